"""Disasters of lost answers, lost writes and failures without a word: the outcome is told, and nothing good is lost."""

import logging
import time
from typing import Any

import numpy as np
import pytest

import ckptfmt
from ckptfmt.checkpointer import Checkpointer
from ckptfmt.errors import Code
from ckptfmt.store import objects
from ckptfmt.store.memory import MemoryStore
from tests.builders import code_of, error_of
from tests.disasters.gates import WAIT_S
from tests.faults.driver import Toy
from tests.interface.test_group import Allgather, run_writers
from tests.loop.test_checkpointer import committed as committed_in
from tests.loop.test_checkpointer import run
from tests.s3.proxy import Fault, Rule
from tests.save.test_failed_saves import FULL, FailingStore, Outage

INLINE = ckptfmt.Saving(saver="inline")


def state_of(number):
    """Return a state with `number` in each element."""
    return ckptfmt.State(weights={"w": np.full(5000, float(number))}, rng=False)


@pytest.fixture
def bucket_url(s3_bucket, s3_proxy, monkeypatch):
    """Return the URL of an empty bucket whose server is behind a proxy, with short deadlines."""
    for name, value in s3_bucket.through(s3_proxy).endpoint.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(objects, "_PAUSE_MIN_S", 0.001)
    monkeypatch.setattr(objects, "_DEADLINE_S", 0.3)
    return f"s3://{s3_bucket.name}/best"


@pytest.mark.parametrize("answers_again", [True, False])
def test_iceberg_2317_3717_and_11814_a_lost_answer_to_a_commit_deletes_nothing(
    answers_again, bucket_url, s3_proxy
):
    """The answer to a commit was lost, and the client deleted files that had been committed
    (iceberg#2317, #3717, #11814).

    The committer reads the manifest back; if the store doesn't answer, the error is
    COMMIT_UNKNOWN and all files stay.
    """
    rules = [Rule(fault=Fault.DROP_ANSWER, operation="PutObject", key="*manifest.json")]
    if not answers_again:
        rules += [
            Rule(fault=Fault.DROP_ANSWER, operation="PutObject", key="*manifest.json", count=None),
            Rule(fault=Fault.DROP_REQUEST, operation="GetObject", key="*manifest.json", nth=2,
                 count=None),
        ]  # fmt: skip
    s3_proxy.script(*rules)
    outcome = code_of(lambda: ckptfmt.save(bucket_url, state_of(7), step=7))
    assert s3_proxy.faults[Fault.DROP_ANSWER] > 0
    assert outcome == ("ok" if answers_again else "COMMIT_UNKNOWN")
    deleted = [key for operation, key in s3_proxy.requests if operation.startswith("Delete")]
    assert not [key for key in deleted if key.endswith((".safetensors", ".json", ".msgpack"))]

    s3_proxy.calm()
    s3_proxy.script()
    assert ckptfmt.validate(bucket_url).valid
    found = ckptfmt.load(bucket_url, framework="numpy")["weights"]["w"]
    assert found.tobytes() == np.full(5000, 7.0).tobytes()


def test_pytorch_183878_bytes_that_never_arrived_are_missed_before_the_commit(bucket_url, s3_proxy):
    """A writer said that a file was written while its bytes never reached the bucket
    (pytorch#183878).

    The committer looks for each file with its size: without a file there is no checkpoint, and the
    next save works.
    """
    lost = Rule(fault=Fault.LOSE_ACKNOWLEDGED, operation="PutObject", key="*.safetensors")
    s3_proxy.script(lost)
    assert code_of(lambda: ckptfmt.save(bucket_url, state_of(1), step=1)) == "FILE_MISSING"
    assert s3_proxy.faults[Fault.LOSE_ACKNOWLEDGED] == 1
    s3_proxy.script()
    assert code_of(lambda: ckptfmt.load(bucket_url)) == "NOT_COMMITTED"
    ckptfmt.save(bucket_url, state_of(2), step=2)
    found = ckptfmt.load(bucket_url, framework="numpy")["weights"]["w"]
    assert found.tobytes() == np.full(5000, 2.0).tobytes()


def test_orbax_605_and_keras_23609_a_failed_asynchronous_save_is_told(caplog):
    """An asynchronous save failed and the training went on without a word; the weights that were
    restored later were older (orbax#605, keras#23609).

    The handle, the log and the reports name a failed save; the failure of the last save is raised
    by `close`.
    """
    toy, outage = Toy(), Outage(FULL[0], operations=FULL[1])
    inner = MemoryStore()
    events: list[Any] = []
    checkpointer = Checkpointer(
        FailingStore(inner, outage),
        toy.state,
        saving=ckptfmt.Saving(saver="thread"),
        on_save=events.append,
    )
    checkpointer.restore_rng()
    with caplog.at_level(logging.WARNING, "ckptfmt"):
        outcomes = []
        for is_out in (False, True, False, True):
            outage.is_on = is_out
            handle = toy.save(checkpointer)
            outcomes.append(code_of(lambda handle=handle: handle.wait("COMMITTED", WAIT_S)))
        outage.is_on = False
        assert outcomes == ["ok", "NO_SPACE", "ok", "NO_SPACE"]
        assert error_of(checkpointer.close).code == "NO_SPACE"
    assert "SAVE_FAILED" in caplog.text
    assert any(report.startswith("SAVE_FAILED") for report in checkpointer.reports)
    assert [one.error.code for one in events if one.kind == "failed"] == ["NO_SPACE", "NO_SPACE"]
    assert [step for step, _ in committed_in(inner)] == [1, 3]


def test_ray_48801_and_47939_a_failed_upload_ends_no_training():
    """A checkpoint that couldn't be uploaded ended the training (ray#48801, #47939).

    A storage that is away for some saves costs these saves; too many in a row end the run with the
    error of the storage.
    """
    outage = Outage(Code.STORE_NO_ANSWER)
    inner, toy = MemoryStore(), Toy()
    saving = ckptfmt.Saving(saver="thread", failed_saves=3)
    checkpointer = Checkpointer(FailingStore(inner, outage), toy.state, saving=saving)
    checkpointer.restore_rng()
    for is_out in (False, True, True, False):
        outage.is_on = is_out
        toy.save(checkpointer).wait_over(WAIT_S)
    assert [step for step, _ in committed_in(inner)] == [1, 4]
    outage.is_on = True

    def train_on():
        for _ in range(9):
            toy.save(checkpointer).wait_over(WAIT_S)

    assert code_of(train_on) == "STORE_NO_ANSWER"
    assert toy.data["step"] < 4 + 9
    outage.is_on = False
    code_of(checkpointer.close)
    assert [step for step, _ in committed_in(inner)] == [1, 4]


@pytest.mark.timeout(120)
def test_orbax_392_and_automodel_3261_a_process_that_never_comes_is_named_at_the_deadline(tmp_path):
    """A save hung for hours because a process was gone (orbax#392, Automodel#3261).

    Each wait for another process has a deadline, whose error names the process; the old checkpoint
    stays.
    """
    path = tmp_path / "c"
    ckptfmt.save(path, state_of(1), step=1)
    begin_s = time.monotonic()
    group: Any = {"writer": (0, 2), "agree": "token-of-this-start", "deadline_s": 0.5}
    error = error_of(lambda: ckptfmt.save(path, state_of(2), step=2, replace=True, **group))
    assert time.monotonic() - begin_s < 60
    assert error.code == "WRITERS_MISSING"
    assert "writer 1 didn't come within 0.5 s" in str(error)
    assert ckptfmt.open(path).step == 1


def test_orbax_392_a_process_that_dies_amid_a_save_keeps_no_other_waiting(tmp_path):
    """See above: here the process comes to the agreement, and fails before it has written."""
    gather = Allgather(2).of

    class Dying:
        def state_dict(self):
            raise ConnectionError("injected")

        def load_state_dict(self, _):
            raise AssertionError

    def save(writer):
        extra = {"n": Dying() if writer else {"n": 1}}
        state = ckptfmt.State(weights={"w": np.ones(3)}, extra=extra, rng=False)
        try:
            return ckptfmt.save(
                tmp_path / "c", state, step=1, writer=(writer, 2), agree=gather(writer)
            )
        except ConnectionError as error:
            return error

    first, second = run_writers(2, save)
    assert first.code == "PEER_FAILED"
    assert isinstance(second, ConnectionError)
    assert code_of(lambda: ckptfmt.load(tmp_path / "c")) == "NOT_COMMITTED"


def test_megatron_lm_5281_a_damaged_local_copy_is_not_trusted(place, tmp_path):
    """A damaged copy on a local disk was loaded again at each of 44 restarts, since nothing
    compared it and nothing went back to the shared checkpoint (Megatron-LM#5281).

    A copy is compared with the digests of the run; a damaged copy is passed over for the file at
    home, and said so, at the first restart.
    """
    cache = tmp_path / "nvme"
    options = {"copies": [ckptfmt.Cache(cache)], "saving": ckptfmt.Saving(saver="thread")}
    run(place, 3, **options)
    shards = sorted(cache.rglob("weights-*.safetensors"))
    assert shards
    for shard in shards:
        content = bytearray(shard.read_bytes())
        content[-1] ^= 0x7F
        shard.write_bytes(content)

    trainer, checkpointer, done = run(place, 5, **options)
    assert done == [3, 4]
    assert trainer.weights["w"].tobytes() == np.full(3, 15.0).tobytes()
    assert any(report.startswith("CACHE_DAMAGED") for report in checkpointer.reports)
    assert run(place, 6, **options)[2] == [5]
