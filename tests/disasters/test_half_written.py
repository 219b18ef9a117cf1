"""Disasters of half-written checkpoints: the last whole checkpoint is loaded, or an error names the damage."""

import io
import os
import shutil
import signal

import numpy as np
import pytest
import torch

import ckptfmt
from ckptfmt.checkpointer import Checkpointer
from ckptfmt.store import LocalStore
from tests.builders import code_of, error_of, tensor
from tests.faults.driver import committed, hear, start
from tests.interface.test_group import Allgather, run_writers
from tests.loop.test_checkpointer import run
from tests.stores.recorder import RecordingCalls

INLINE = ckptfmt.Saving(saver="inline")


def state_of(number, size=1000):
    """Return a state with `number` in each element."""
    return ckptfmt.State(weights={"w": np.full(size, float(number))}, rng=False)


def number_at(path):
    """Return the number that fills the checkpoint, after a comparison of each byte with a digest."""
    assert ckptfmt.validate(path).valid
    (number,) = set(ckptfmt.load(path, framework="numpy")["weights"]["w"].tolist())
    return number


def shard_of(directory):
    """Return the file with the weights."""
    (shard,) = directory.glob("weights-*")
    return shard


def test_metaseq_53_an_emptied_shard_beside_temporary_files_is_passed_over(place):
    """A failed write left a shard of 0 bytes and stray `.tmp` files (metaseq#53).

    A shard of another size is named by `load`, and the next launch resumes from the whole
    checkpoint before it.
    """
    run(place, 6, every=2, saving=INLINE)
    newest = place / "step-00000006-l0001"
    shard = shard_of(newest)
    shard.write_bytes(b"")
    (newest / "checkpoint_last-shard0.pt.tmp").write_bytes(bytes(100))

    assert error_of(lambda: ckptfmt.load(newest)).code == "FILE_NBYTES"
    trainer, checkpointer, done = run(place, 7, saving=INLINE)
    assert done == [4, 5, 6]
    assert trainer.weights["w"].tobytes() == np.full(3, 28.0).tobytes()
    assert "step-00000006-l0001" in checkpointer.passed_over[0]


KILLED = """
import numpy as np

weights = np.zeros(2 << 20)
state = ckptfmt.State(weights={"w": weights}, data={"step": 0}, rng=False)
with Checkpointer(run, state, saving=ckptfmt.Saving(saver="inline")) as checkpointer:
    checkpointer.restore_rng()
    for step in range(checkpointer.step + 1, 1000):
        weights[...] = state.data["step"] = step
        tell("saving", step)
        checkpointer.save(step=step)
        tell("saved", step)
"""


def test_lightning_688_and_19970_a_sigkill_amid_a_write_leaves_the_checkpoint_before_it(place):
    """A kill amid a write left a file that ends too early, and the repair was lost in a later
    change (pytorch-lightning#688, #19970).

    A SIGKILL amid a save leaves each acknowledged checkpoint whole.
    """
    control = io.BytesIO()
    torch.save({"w": torch.zeros(1000)}, control)
    with pytest.raises(RuntimeError):
        torch.load(io.BytesIO(control.getvalue()[: control.tell() // 2]))

    met_a_save = False
    for number in range(10):
        killed = place / f"run-{number}"
        with start(KILLED, killed) as process:
            told = [hear(process).split() for _ in range(5)]
            assert [words[0] for words in told] == ["saving", "saved", "saving", "saved", "saving"]
            os.kill(process.pid, signal.SIGKILL)
            last = process.communicate()[0].split()
        acknowledged = int(last[-1] if last and last[-2] == "saved" else told[3][1])
        assert committed(killed) in (
            list(range(1, acknowledged + 1)),
            list(range(1, acknowledged + 2)),  # killed between the commit and the answer
        )
        assert ckptfmt.validate(killed).violations == []
        for step in committed(killed):
            trees = ckptfmt.load(killed / f"step-{step:08d}-l0001", framework="numpy")
            assert trees["data"] == {"step": step}
            assert set(trees["weights"]["w"].tolist()) == {float(step)}
        met_a_save = not last or last[-2] == "saving"
        if met_a_save and number:
            break
    assert met_a_save, "no kill met a save"


def test_pytorch_2883_and_48243_an_object_that_cannot_be_saved_leaves_the_old_checkpoint(tmp_path):
    """torch.save empties the target before the object is pickled, and an atomic save was refused
    (pytorch#2883, #48243).

    A refused object leaves the checkpoint in place that was to be replaced.
    """
    control = tmp_path / "control.pt"
    torch.save({"w": torch.ones(3)}, control)
    with pytest.raises((AttributeError, TypeError, ValueError, RuntimeError)):
        torch.save({"w": torch.ones(3), "hook": (item for item in "x")}, control)
    with pytest.raises((RuntimeError, EOFError)):
        torch.load(control)

    path = tmp_path / "best"
    ckptfmt.save(path, state_of(1), step=1)
    unsaveable = ckptfmt.State(
        weights={"w": np.full(1000, 2.0)}, extra={"hook": (item for item in "x")}, rng=False
    )
    refusal = error_of(lambda: ckptfmt.save(path, unsaveable, step=2, replace=True))
    assert refusal.code == "STATE_UNSUPPORTED"
    assert number_at(path) == 1.0


class Failing:
    """A tensor that raises an error when it is copied, once `fails` is set."""

    def __init__(self, inner):
        self._inner = inner
        self.fails = False

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def copy_into(self, box, out):
        if self.fails:
            raise MemoryError("injected")
        self._inner.copy_into(box, out)


def test_transformers_40790_an_exception_amid_a_save_leaves_no_directory_that_looks_whole(place):
    """An exception amid a save left a directory that looked like a whole checkpoint
    (transformers#40790).

    A directory without a manifest is no checkpoint, and the run's checkpoint is the one before.
    """
    late = Failing(tensor("late", np.ones(1000)))
    data = {"step": 1}
    state = ckptfmt.State(weights={"w": np.zeros(1000), "late": late}, data=data, rng=False)
    with Checkpointer(place, state, saving=INLINE) as checkpointer:
        checkpointer.restore_rng()
        checkpointer.save(step=1)
        late.fails, data["step"] = True, 2
        with pytest.raises(MemoryError):
            checkpointer.save(step=2)
    assert (place / "step-00000001-l0001/manifest.json").exists()
    assert not (place / "step-00000002-l0001/manifest.json").exists()
    assert code_of(lambda: ckptfmt.load(place / "step-00000002-l0001")) == "NOT_COMMITTED"
    assert ckptfmt.open(place).step == 1
    assert ckptfmt.load(place, framework="numpy")["data"] == {"step": 1}


def test_delta_rs_4433_two_writers_of_one_path_leave_one_of_their_checkpoints(tmp_path):
    """Two writers uploaded to one object name, and the object was damaged (delta-rs#4433).

    Of two processes that save to one path without knowing of each other, one commits, and the
    other gets an error; the checkpoint is the winner's, byte by byte.
    """
    for turn in range(6):
        path = tmp_path / f"shared{turn}"
        gather = Allgather(2).of

        def save(writer, path=path, gather=gather):
            gather(writer)(b"")  # both begin at the same moment
            return ckptfmt.save(path, state_of(writer, 100_000), step=1, writer=(0, 1))

        outcomes = run_writers(2, save)
        won = [number for number, one in enumerate(outcomes) if hasattr(one, "digest")]
        assert len(won) == 1
        assert outcomes[1 - won[0]].code in ("CHECKPOINT_EXISTS", "COMMIT_CONFLICT")
        assert number_at(path) == float(won[0])


def test_allennlp_2129_and_bookkeeper_2635_damaged_checkpoints_are_passed_over_once(place):
    """A crash damaged the latest checkpoint without a way back, and a damaged checkpoint was
    tried for ever (allennlp#2129, bookkeeper#2635).

    A launch goes back along its line to the first whole checkpoint and names each that it passes
    over; the launch after it begins with the new line.
    """
    run(place, 6, every=2, saving=INLINE)
    for step in (4, 6):
        shard = shard_of(place / f"step-{step:08d}-l0001")
        shard.write_bytes(shard.read_bytes()[:-3])

    _, checkpointer, done = run(place, 5, saving=INLINE)
    assert done == [2, 3, 4]
    passed = " ".join(checkpointer.passed_over)
    assert "step-00000006-l0001" in passed
    assert "step-00000004-l0001" in passed

    trainer, checkpointer, done = run(place, 6, saving=INLINE)
    assert (done, list(checkpointer.passed_over)) == ([5], [])
    assert trainer.weights["w"].tobytes() == np.full(3, 21.0).tobytes()


def test_composer_686_and_axlearn_704_no_commit_before_the_last_writer_has_written(tmp_path):
    """Writer 0 finished a checkpoint while other writers still wrote (composer#686, axlearn#704).

    A commit takes the receipts of all writers: a missing receipt is an error, and the directory
    isn't a checkpoint before the commit.
    """
    path, whole = tmp_path / "c", np.arange(24.0).reshape(6, 4)
    attempt = ckptfmt.SaveAttempt.begin(step=5, writer_count=2)
    halves = [
        ckptfmt.State(
            weights={"w": tensor("w", whole, boxes=(ckptfmt.Box((3 * writer, 0), (3, 4)),))},
            rng=False,
        )
        for writer in range(2)
    ]
    first = attempt.write_part(path, halves[0], writer=0)
    refusal = error_of(lambda: attempt.commit(path, [first]))
    assert "1 records for 2 writers; missing: 1" in str(refusal)
    assert code_of(lambda: ckptfmt.load(path)) == "NOT_COMMITTED"

    second = attempt.write_part(path, halves[1], writer=1)
    attempt.commit(path, [first, second])
    assert ckptfmt.load(path, framework="numpy")["weights"]["w"].tobytes() == whole.tobytes()


def test_dlio_benchmark_230_every_file_is_flushed_before_the_commit(tmp_path):
    """Processes passed a barrier while their data was not on the disk yet (dlio_benchmark#230).

    Each file, and the directory with its name, is flushed before the manifest gets its name.
    """
    calls = RecordingCalls(tmp_path)
    store = LocalStore(tmp_path / "c", writable=True, calls=calls)
    ckptfmt.save(store, state_of(1, 100_000), step=1)
    operations = calls.log.operations
    (commit,) = [at for at, one in enumerate(operations) if one.to.endswith("/manifest.json")]
    written = {}
    for at, one in enumerate(operations[:commit]):
        if one.op in ("write", "write_at"):
            written[one.path] = at
    flushed = {one.path: at for at, one in enumerate(operations[:commit]) if one.op == "fsync"}
    assert len(written) >= 4  # shard, part, index, manifest
    assert all(flushed.get(path, -1) > at for path, at in written.items())
    named = [at for at, one in enumerate(operations[:commit]) if one.to]
    synced = [at for at, one in enumerate(operations) if one.op == "fsync_directory"]
    assert any(max(named) < at < commit for at in synced)
    assert synced[-1] > commit


def test_deepspeed_4536_many_processes_make_one_missing_directory_together(tmp_path):
    """Processes that made one directory at the same time disturbed each other (DeepSpeed#4536).

    Writers that all find a path missing save into it together.
    """
    count, whole = 8, np.arange(64.0)
    path = tmp_path / "not" / "yet" / "there"
    gather = Allgather(count).of

    def save(writer):
        box = ckptfmt.Box((8 * writer,), (8,))
        state = ckptfmt.State(weights={"w": tensor("w", whole, boxes=(box,))}, rng=False)
        return ckptfmt.save(path, state, step=1, writer=(writer, count), agree=gather(writer))

    assert {one.digest for one in run_writers(count, save)} == {ckptfmt.open(path).digest}
    assert ckptfmt.load(path, framework="numpy")["weights"]["w"].tobytes() == whole.tobytes()


def test_simpletuner_2714_a_checkpoint_is_replaced_while_its_file_is_the_memory_of_the_state(
    tmp_path,
):
    """A file was written over its own memory map, and the tensors turned into zeros and huge
    numbers (SimpleTuner#2714).

    A save goes to a new file: weights that are a memory map of the replaced checkpoint are saved
    as they were.
    """
    whole = np.arange(5000.0)
    control = tmp_path / "control.bin"
    control.write_bytes(whole.tobytes())
    mapped = np.memmap(control, np.float64, mode="r")
    with control.open("r+b") as file:  # a header in front, in place
        file.write(bytes(64) + whole.tobytes())
    assert mapped.tobytes() != whole.tobytes()

    path = tmp_path / "lora"
    ckptfmt.save(path, ckptfmt.State(weights={"w": whole}, rng=False), step=1)
    shard = shard_of(path)
    offset = shard.stat().st_size - whole.nbytes
    live = np.asarray(np.memmap(shard, np.float64, mode="r", offset=offset))
    assert live.tobytes() == whole.tobytes()
    ckptfmt.save(
        path, ckptfmt.State(weights={"w": live}, rng=False), step=2, replace=True, tags=("lora",)
    )
    found = ckptfmt.load(path, framework="numpy")["weights"]["w"]
    assert (ckptfmt.open(path).step, found.tobytes()) == (2, whole.tobytes())


def test_speculators_739_and_megatron_bridge_5964_the_largest_number_is_no_checkpoint(place):
    """A resume took the directory with the largest number, which was written by halves
    (speculators#739, RLinf#1469, Megatron-Bridge#5964).

    Only a committed checkpoint of the run's records counts, whatever the directories are called.
    """
    run(place, 4, every=2, saving=INLINE)
    half = place / "step-00000099-l0001"
    shutil.copytree(place / "step-00000004-l0001", half)
    (half / "manifest.json").unlink()
    (place / "step-00000500-l0001").mkdir()

    assert ckptfmt.open(place).step == 4
    _, _, done = run(place, 6, saving=INLINE)
    assert done == [4, 5]


def test_verl_7952_and_dlrover_1065_no_start_from_zero_where_a_run_has_checkpoints(place):
    """Without the file that names the latest step, a training began anew from step 0 in silence
    (verl#7952, dlrover#1065).

    A run that lost its records, or all valid checkpoints, is an error with a remedy, and nothing
    is deleted.
    """
    run(place, 4, every=2, saving=INLINE)
    record = place / "launches/0001.json"
    content = record.read_bytes()
    record.unlink()
    refusal = error_of(lambda: run(place, 5, saving=INLINE))
    assert (refusal.code, refusal.where) == ("FILE_MISSING", "launches/0001.json")
    assert committed(place) == [2, 4]
    record.write_bytes(content)
    assert run(place, 5, saving=INLINE)[2] == [4]

    for directory in place.glob("step-*"):
        shard_of(directory).write_bytes(b"")
    assert code_of(lambda: run(place, 6, saving=INLINE)) == "NO_VALID_CHECKPOINT"
    assert committed(place) == [2, 4, 5]
