"""Disasters of retention: no rule and no crash deletes the checkpoint that a user needs."""

import os
import shutil
import signal

import numpy as np
import pytest

import ckptfmt
from ckptfmt.__main__ import main
from ckptfmt.checkpointer import Checkpointer
from ckptfmt.store.memory import MemoryStore
from tests.builders import code_of
from tests.disasters.gates import WAIT_S
from tests.faults.driver import Toy, committed, problems, resume, save_and_stop, savers
from tests.loop.test_checkpointer import Trainer, run
from tests.loop.test_checkpointer import committed as committed_in

INLINE = ckptfmt.Saving(saver="inline")


def save_steps(store, *steps, **options):
    """Save these steps of a training, one after the other."""
    trainer = Trainer()
    with Checkpointer(store, trainer.state, saving=INLINE, **options) as checkpointer:
        checkpointer.restore_rng()
        for step in steps:
            trainer.step(step - 1)
            checkpointer.save(step=step)


def steps_in(store):
    """Return the steps with a committed checkpoint."""
    return [step for step, _ in committed_in(store)]


def test_transformers_27138_and_26961_retention_sorts_by_number_and_not_by_text_or_time(place):
    """`save_total_limit` deleted the newest checkpoint: 10000 sorts before 9000 as text, and times
    of files lie (transformers#27138, #26961).

    Retention goes by the number of the step, also beyond the eight digits of a directory's name.
    """
    steps = (9000, 9900, 10000, 99_999_999, 100_000_000)
    assert sorted(map(str, steps)) != [*map(str, steps)]  # the order of the text is another
    save_steps(place, *steps[:3])
    for age, directory in enumerate(sorted(place.glob("step-*"))):
        for path in [*directory.rglob("*"), directory]:
            os.utime(path, (2e9 - 1e6 * age, 2e9 - 1e6 * age))  # the newest looks oldest
    assert main(["gc", str(place), "--keep", "2"]) == 0
    assert committed(place) == [9900, 10000]

    store = MemoryStore()
    save_steps(store, *steps, keep=3)
    assert steps_in(store) == [10000, 99_999_999, 100_000_000]
    assert ckptfmt.open(store).step == 100_000_000


def test_transformers_11748_the_best_checkpoint_takes_no_other_ones_place():
    """The best checkpoint was exchanged with the last one in the order of deletion, so the last one
    was deleted (transformers PR #11748).

    The best checkpoint stays in addition to the newest checkpoints.
    """
    store, trainer = MemoryStore(), Trainer()
    keep = ckptfmt.Retention(newest=2, best=("loss", "min", 1))
    losses = {1: 0.5, 2: 0.1, 3: 0.4, 4: 0.3, 5: 0.2}
    with Checkpointer(store, trainer.state, keep=keep, saving=INLINE) as checkpointer:
        checkpointer.restore_rng()
        for step, loss in losses.items():
            checkpointer.save(step=step, metrics={"loss": loss})
    assert steps_in(store) == [2, 4, 5]


@pytest.mark.parametrize("target", ["keep", "rm"])
def test_transformers_25129_a_limit_of_one_leaves_one(place, target, capsys):
    """`save_total_limit=1` deleted all checkpoints (transformers#25129).

    One valid checkpoint stays: retention keeps the newest, and `ckptfmt rm` refuses the last
    checkpoint that can be loaded.
    """
    save_steps(place, 1, 2, 3, keep=1 if target == "keep" else None)
    if target == "keep":
        assert committed(place) == [3]
        return
    (shard,) = (place / "step-00000003-l0001").glob("weights-*")
    shard.write_bytes(b"")
    (shard,) = (place / "step-00000001-l0001").glob("weights-*")
    shard.write_bytes(b"")
    catalog = ckptfmt.Run(place)
    assert code_of(lambda: catalog.delete(2)) == "CHECKPOINT_NEEDED"
    assert main(["rm", str(place), "2"]) != 0
    assert "CHECKPOINT_NEEDED" in capsys.readouterr().err
    assert run(place, 4, saving=INLINE)[2] == [2, 3]


def test_megatron_bridge_4678_4820_and_5184_the_old_checkpoint_stays_until_the_new_one_is_committed(
    place,
):
    """With one checkpoint to keep, the only durable one was deleted while an asynchronous save
    was incomplete (Megatron-Bridge#4678, #4820, #5184).

    Retention comes after the commit: a save that is killed with its trainer leaves the checkpoint
    before it.
    """
    toy = Toy(32 << 20)
    checkpointer = Checkpointer(place, toy.state, keep=1)
    checkpointer.restore_rng()
    toy.save(checkpointer).wait("COMMITTED", WAIT_S)
    handle = save_and_stop(checkpointer, toy)
    durable = handle.step - 1
    assert committed(place) == [durable]
    (pid,) = savers()
    os.kill(pid, signal.SIGKILL)
    assert code_of(checkpointer.close) == "SAVER_LOST"
    assert committed(place) == [durable]
    assert problems(place) == []
    assert resume(place, Toy(32 << 20), keep=1) == durable


def test_lightning_21813_and_16426_a_checkpoint_of_another_run_is_never_deleted(place, tmp_path):
    """A resumed training deleted the checkpoint from which it had resumed, in the directory of
    another run (pytorch-lightning#21813, #16426).

    A run retires its own checkpoints only, and the checkpoint that a launch resumed from stays
    until a newer one is committed.
    """
    source = tmp_path / "first"
    save_steps(source, 1, 2)
    before = {path: path.read_bytes() for path in source.rglob("*") if path.is_file()}
    trainer = Trainer()
    init = ckptfmt.InitFrom(source / "step-00000002-l0001")
    with Checkpointer(place, trainer.state, init_from=init, keep=1, saving=INLINE) as checkpointer:
        for number in checkpointer.steps(3):
            trainer.step(number)
            checkpointer.save()
    assert committed(place) == [3]
    assert {path: path.read_bytes() for path in source.rglob("*") if path.is_file()} == before

    back = tmp_path / "back"
    save_steps(back, 1, 2, 3)
    first = "step-00000001-l0001"
    with Checkpointer(back, Trainer().state, resume=first, keep=1, saving=INLINE) as checkpointer:
        assert checkpointer.step == 1
    assert main(["gc", str(back), "--keep", "1"]) == 0
    assert 1 in committed(back)
    assert run(back, 2, keep=1, saving=INLINE)[2] == [1]
    assert 1 not in committed(back)


def test_orbax_394_a_copied_checkpoint_is_a_checkpoint_and_stays(place, tmp_path):
    """A good checkpoint that was copied to a bucket had no success marker there, and the clean-up
    deleted it as temporary (orbax#394).

    The manifest is the only marker and belongs to the files: a copy of a run by other means is a
    whole run, and the next launch cleans up nothing of it.
    """
    save_steps(place, 1, 2)
    copy = tmp_path / "copy"
    shutil.copytree(place, copy)
    shutil.rmtree(place)
    assert ckptfmt.validate(copy).valid
    trainer, checkpointer, done = run(copy, 3, keep=5, saving=INLINE)
    assert (done, list(checkpointer.passed_over)) == ([2], [])
    assert main(["gc", str(copy), "--keep", "5"]) == 0
    assert committed(copy) == [1, 2, 3]
    assert trainer.weights["w"].tobytes() == np.full(3, 6.0).tobytes()

    bucket = MemoryStore.from_snapshot(
        {
            path.relative_to(copy).as_posix(): path.read_bytes()
            for path in copy.rglob("*")
            if path.is_file()
        }
    )
    assert run(bucket, 4, keep=5, saving=INLINE)[2] == [3]
    assert steps_in(bucket) == [1, 2, 3, 4]


def test_transformers_48315_a_run_that_was_moved_goes_on(place, tmp_path):
    """The absolute path of a directory was recorded, and the end of a moved run failed
    (transformers#48315).

    Nothing in a run names an absolute path: a run is moved by a rename.
    """
    keep = ckptfmt.Retention(newest=1, best=("loss", "min", 1))
    trainer = Trainer()
    with Checkpointer(place, trainer.state, keep=keep, saving=INLINE) as checkpointer:
        for number in checkpointer.steps(3):
            trainer.step(number)
            checkpointer.save(metrics={"loss": number})
    for path in place.rglob("*"):
        assert not path.is_file() or os.fsencode(place) not in path.read_bytes()
    moved = tmp_path / "elsewhere" / "under another name"
    moved.parent.mkdir()
    place.rename(moved)
    assert run(moved, 5, keep=keep, saving=INLINE)[2] == [3, 4]
    assert committed(moved) == [1, 5]
    assert ckptfmt.Run(moved).best("loss").step == 1
    assert not place.exists()


def test_torchtitan_4197_an_abandoned_save_counts_for_no_checkpoint(place):
    """Retention counted directories of staged or abandoned saves as checkpoints (torchtitan#4197).

    Retention counts committed checkpoints only; the remains of an abandoned save are removed.
    """
    save_steps(place, 1, 2)
    for step in (7, 8, 9):
        remains = place / f"step-{step:08d}-l0001"
        shutil.copytree(place / "step-00000002-l0001", remains)
        (remains / "manifest.json").unlink()
    trainer, _, done = run(place, 4, every=1, keep=2, saving=INLINE)
    assert done == [2, 3]
    assert committed(place) == [3, 4]
    assert trainer.data == {"position": 4}
    for step in (7, 8, 9):
        assert not list((place / f"step-{step:08d}-l0001").glob("*.safetensors"))


def test_bookkeeper_2564_a_file_that_later_checkpoints_need_stays_and_its_damage_is_named(place):
    """A damaged file that checkpoints shared made all later checkpoints useless
    (bookkeeper#2564).

    A base stays while deltas read from it, damage of a base is found in each delta that reads from
    it, and other checkpoints load.
    """
    arrays = {"moves": np.zeros(1000), "stays": np.arange(50_000.0)}
    state = ckptfmt.State(weights=arrays, rng=False)
    deltas = ckptfmt.Saving(saver="thread", delta={"mode": "smallest", "full_every": 3})
    with Checkpointer(place, state, saving=deltas) as checkpointer:
        checkpointer.restore_rng()
        for step in range(1, 6):
            arrays["moves"] += 1
            handle = checkpointer.save(step=step)
            assert handle is not None
            handle.wait("COMMITTED", WAIT_S)
    profiles = {}
    for step in committed(place):
        with ckptfmt.open(place / f"step-{step:08d}-l0001") as checkpoint:
            profiles[step] = {base.name for base in checkpoint.manifest.references}
    needy = {step for step, bases in profiles.items() if "step-00000001-l0001" in bases}
    assert needy
    assert needy != set(profiles) - {1}
    assert code_of(lambda: ckptfmt.Run(place).delete(1)) == "CHECKPOINT_NEEDED"

    (shard,) = (place / "step-00000001-l0001").glob("weights-*")
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    for step in profiles:
        path = place / f"step-{step:08d}-l0001"
        if step == 1 or step in needy:
            assert code_of(lambda path=path: ckptfmt.load(path)) == "BLOCK_DIGEST"
        else:
            found = ckptfmt.load(path, framework="numpy")["weights"]
            assert found["moves"].tobytes() == np.full(1000, float(step)).tobytes()
            assert found["stays"].tobytes() == arrays["stays"].tobytes()
