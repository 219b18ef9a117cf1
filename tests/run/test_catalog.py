"""A run seen from outside: its listing, its best checkpoint, labels, pins, and what is deleted by hand."""

from __future__ import annotations

import dataclasses
import functools
import re
import threading
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import ckptfmt
from ckptfmt.api import compact
from ckptfmt.commit import decision
from ckptfmt.commit.decision import CONDEMNED
from ckptfmt.documents.labels import Labels
from ckptfmt.documents.manifest import checkpoint_name
from ckptfmt.documents.run import LABELS_FOLDER, SAVERS, LabelsRecord, RunRecord
from ckptfmt.errors import CkptError, Code, err
from ckptfmt.run import labelling
from ckptfmt.run.lineage import begin_launch, find_head, list_checkpoints, open_run
from ckptfmt.run.retention import Retention, clean_up, delete_checkpoint
from ckptfmt.store import open_store
from ckptfmt.store.memory import MemoryStore
from ckptfmt.store.protocol import Names
from tests.builders import error_of, snapshot, tensor
from tests.chains import Saving
from tests.run.test_lineage import RunOfSteps
from tests.stores.faults import Fault, FaultStore
from tests.stores.hooked import HookedStore, Operation
from tests.stores.recorder import Recorder


def made(*steps: int, **options: Any) -> tuple[MemoryStore, ckptfmt.Run]:
    """Return a run of one launch whose metric `loss` is 10 less the step."""
    store = MemoryStore()
    with ckptfmt.Checkpointer(
        store, ckptfmt.State(data={"a": 1}), saver="inline", **options
    ) as checkpointer:
        for step in steps:
            checkpointer.save(step=step, metrics={"loss": 10 - step}, tags=[f"s{step}"])
    return store, ckptfmt.Run(store)


class Meddling(HookedStore):
    """A store beside which somebody else acts, behind an operation."""

    def __init__(self, inner: Any, meddle: Any) -> None:
        super().__init__(inner)
        self._meddle = meddle

    def after(self, operation: Operation) -> None:
        """Let the other act."""
        self._meddle(operation)


def code_of(call: Any) -> Code:
    code = error_of(call).code
    assert isinstance(code, Code)
    return code


def test_a_listing_says_what_registers_and_records_say() -> None:
    store, run = made(1, 2, 3, keep=2)
    store.at(checkpoint_name(4, 1)).create("parts/x", [b""])

    found = {one.step: one for one in run.list()}
    assert [one.state for one in found.values()] == [
        "retired",
        "committed",
        "committed",
        "unfinished",
    ]
    assert (found[2].metrics, found[2].tags, found[2].pinned) == ({"loss": 8.0}, ("s2",), False)
    assert found[3].digest == ckptfmt.open(store).digest
    assert found[1].digest is not None
    assert found[1].nbytes is None
    assert found[3].nbytes == 0
    assert found[3].saved_unix_s
    assert run.newest() == found[3]
    with run.open() as checkpoint:
        assert (checkpoint.step, checkpoint.pending) == (3, ())


def test_saves_that_are_still_in_hand_are_listed(tmp_path: Path) -> None:
    """REQ-RUN-019: by opening and by listing, so that who looks doesn't take an older one for the last."""
    with ckptfmt.Checkpointer(
        tmp_path, ckptfmt.State(data={"a": 1}), saver="inline"
    ) as checkpointer:
        checkpointer.save(step=1)
    store = open_store(tmp_path, writable=True)
    store.at(checkpoint_name(2, 1)).create("parts/x", [b""])
    held = "0001-00000-" + "a" * 16
    run = ckptfmt.Run(tmp_path)
    assert [one.state for one in run.list()] == ["committed", "unfinished"]
    with store.hold(f"{SAVERS}/{held}"):
        assert run.pending == (held,)
        assert [one.state for one in run.list()] == ["committed", "saving"]
        with run.open() as checkpoint:
            assert checkpoint.pending == (held,)
        assert "launch 1 (writer 0) has a save in hand" in str(error_of(lambda: run.open(2 + 1)))


def test_the_best_is_known_by_what_was_said_last() -> None:
    """REQ-RUN-025"""
    _, run = made(1, 2, 3)

    assert (run.best("loss").step, run.best("loss", "max").step) == (3, 1)
    run.set_metrics(1, {"loss": -2.5, "accuracy": 0.5})
    assert run.best("loss", "min").step == 1
    run.set_metrics(1, {"loss": 7})  # that of step 3: of equals the newest
    assert run.best("loss").step == 3
    assert {one.step: dict(one.metrics) for one in run.list()}[1] == {"loss": 7.0, "accuracy": 0.5}
    assert run.best("accuracy").step == 1
    assert code_of(lambda: run.best("nothing")) == Code.NOT_COMMITTED
    assert code_of(lambda: run.best("loss", cast("Any", "least"))) == Code.ARGUMENT


def test_a_checkpoint_is_meant_by_name_digest_or_step() -> None:
    _, run = made(1, 2)
    one = run.list()[0]

    for which in (one, one.name, one.digest, one.step):
        with run.open(which) as checkpoint:
            assert checkpoint.step == 1
    assert code_of(lambda: run.open(7)) == Code.NOT_COMMITTED
    assert code_of(lambda: run.open("latest")) == Code.NOT_COMMITTED


def test_a_step_of_two_launches_is_that_on_the_lineage() -> None:
    store, _ = made(1, 2, 3)
    with ckptfmt.Checkpointer(
        store, ckptfmt.State(data={"a": 1}), saver="inline", resume=checkpoint_name(1, 1)
    ) as one:
        one.restore_rng()
        one.save(step=2)
    with ckptfmt.Run(store).open(2) as checkpoint:
        assert checkpoint.manifest.origin.launch == 2


def test_tags_and_pins_are_given_and_taken() -> None:
    """REQ-RUN-024, REQ-RUN-025"""
    store, run = made(1, 2)
    run.tag(1, "b", "a")
    run.untag(1, "s1", "not there")
    run.pin(1)
    assert (run.list()[0].tags, run.list()[0].pinned) == (("a", "b"), True)
    run.unpin(1)
    assert (run.list()[0].tags, run.list()[0].pinned) == (("a", "b"), False)
    assert (run.list()[1].tags, dict(run.list()[1].metrics)) == (("s2",), {"loss": 8.0})
    assert store.list_names(LABELS_FOLDER) == [
        f"{checkpoint_name(1, 1)}-{number:04d}.json" for number in range(1, 5)
    ]
    assert ckptfmt.validate(store)


def test_of_two_who_tag_at_once_neither_is_lost() -> None:
    """REQ-RUN-024"""
    store, _ = made(1, 2)
    gate = threading.Barrier(8)

    def tag(number: int) -> None:
        gate.wait(20)
        ckptfmt.Run(store).tag(1, f"t{number}")

    threads = [threading.Thread(target=tag, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert ckptfmt.Run(store).list()[0].tags == ("s1", *(f"t{number}" for number in range(8)))


def test_who_was_slower_adds_to_what_the_faster_one_said() -> None:
    """REQ-RUN-024: the number is taken when it comes to create its record."""
    store, run = made(1, 2)
    record, name = open_run(store), checkpoint_name(1, 1)
    first: list[Operation] = []

    def tag(operation: Operation) -> None:
        if operation.op == "list_names" and operation.path == LABELS_FOLDER and not first:
            first.append(operation)
            run.tag(1, "faster")

    def change(known: LabelsRecord) -> LabelsRecord:
        return dataclasses.replace(known, labels=Labels.of(tags={*known.labels.tags, "slower"}))

    labelling.change_labels(Meddling(store, tag), record, name, change)
    assert run.list()[0].tags == ("faster", "s1", "slower")


def test_labels_of_what_is_not_committed_are_refused() -> None:
    store, run = made(1, 2, keep=1)
    store.at(checkpoint_name(3, 1)).create("parts/x", [b""])
    assert code_of(lambda: run.tag(1, "a")) == Code.CHECKPOINT_RETIRED
    assert code_of(lambda: run.set_metrics(3, {"a": 1})) == Code.NOT_COMMITTED
    assert code_of(lambda: run.set_metrics(2, {"a": float("nan")})) == Code.ARGUMENT
    assert store.list(LABELS_FOLDER) == []


def test_a_record_that_cannot_be_read_pins_until_somebody_unpins() -> None:
    """REQ-CMT-040"""
    store, run = made(1, 2, 3)
    store.create(f"{LABELS_FOLDER}/{checkpoint_name(1, 1)}-0001.json", [b"damaged"])
    record = open_run(store)
    assert [one.pinned for one in run.list()] == [True, False, False]
    clean_up(store, record, launch=1, retention=Retention(newest=1))
    assert [one.state for one in run.list()] == ["committed", "retired", "committed"]
    assert run.list()[0].tags == ("s1",)
    run.unpin(1)
    clean_up(store, record, launch=1, retention=Retention(newest=1))
    assert [one.state for one in run.list()] == ["retired", "retired", "committed"]


def test_a_run_of_a_version_without_pins_takes_labels_and_no_pin() -> None:
    """REQ-CMT-041: that version would retire what is pinned."""
    runs = RunOfSteps()
    runs.begin()
    runs.save(10, 20)
    run = ckptfmt.Run(runs.store)
    run.tag(10, "a")
    assert run.list()[0].tags == ("a",)
    error = error_of(lambda: run.pin(10))
    assert (error.code, error.requirement) == (Code.ARGUMENT, "REQ-CMT-041")


def test_a_pin_looks_for_condemnations_and_then_at_the_register() -> None:
    """REQ-CMT-041: behind its record, which is synced by then."""
    store, _ = made(1, 2)
    recorder = Recorder(store)
    labelling.pin_checkpoint(recorder, open_run(store), checkpoint_name(1, 1))
    seen = [(one.op, one.path) for one in recorder.log.operations]
    name = checkpoint_name(1, 1)
    created = next(
        at
        for at, (op, path) in enumerate(seen)
        if op == "create" and path.startswith(LABELS_FOLDER)
    )
    rest = [one for one in seen[created + 1 :] if one[0] in ("sync", "list_names", "read")]
    assert rest[:3] == [
        ("sync", LABELS_FOLDER),
        ("list_names", name),
        ("read", f"{name}/manifest.json"),
    ]


def test_a_pin_that_comes_second_waits_for_the_cleaner(monkeypatch: pytest.MonkeyPatch) -> None:
    """REQ-CMT-041"""
    store, run = made(1, 2)
    place = store.at(checkpoint_name(1, 1))
    place.create(f"{CONDEMNED}{0:016x}", [b""])
    monkeypatch.setattr(labelling, "_CLEANER_S", 0.05)
    assert code_of(lambda: run.pin(1)) == Code.CHECKPOINT_CONDEMNED
    assert run.list()[0].pinned
    place.delete(f"{CONDEMNED}{0:016x}")
    run.pin(1)

    manifest = decision.read_register(place)
    looks: list[str] = []

    def retire(operation: Any) -> None:
        if operation.op == "list_names" and operation.path == checkpoint_name(1, 1):
            looks.append(operation.path)
            decision.retire(place, manifest)  # type: ignore[arg-type]

    error = error_of(
        lambda: labelling.pin_checkpoint(
            Meddling(store, retire), open_run(store), checkpoint_name(1, 1)
        )
    )
    assert (error.code, len(looks)) == (Code.CHECKPOINT_RETIRED, 1)


def test_what_is_deleted_is_no_checkpoint_any_more() -> None:
    """REQ-CMT-022, REQ-CMT-026"""
    store, run = made(1, 2, 3)
    run.delete(2)
    assert [one.state for one in run.list()] == ["committed", "retired", "committed"]
    assert store.list(checkpoint_name(2, 1)) == [f"{checkpoint_name(2, 1)}/manifest.json"]
    assert code_of(lambda: run.delete(2)) == Code.CHECKPOINT_RETIRED
    assert code_of(lambda: run.delete(9)) == Code.NOT_COMMITTED


def test_what_is_needed_is_not_deleted() -> None:
    """REQ-CMT-026, REQ-CMT-040: each time with the reason."""
    store, run = made(1, 2, 3)
    run.pin(1)
    with ckptfmt.Checkpointer(
        store, ckptfmt.State(data={"a": 1}), saver="inline", resume=checkpoint_name(2, 1)
    ):
        pass
    for step, reason in ((1, "pinned"), (2, "goes on from it")):
        error = error_of(lambda step=step: run.delete(step))
        assert (error.code, reason in error.detail) == (Code.CHECKPOINT_NEEDED, True), error
    run.delete(3)  # what the rollback left beside the lineage
    run.unpin(1)
    run.delete(1)
    assert [one.state for one in run.list()] == ["retired", "committed", "retired"]


def test_each_reason_not_to_delete_has_a_remedy_that_works() -> None:
    """The remedy of the head isn't that of a pin; each is done here as it says, and the checkpoint then goes."""
    store, run = made(1, 2, 3)

    def remedy(step: int) -> str:
        error = error_of(lambda: run.delete(step))
        assert error.code == Code.CHECKPOINT_NEEDED
        return str(error.remedy)

    run.pin(1)
    assert f"ckptfmt unpin {store.name} {checkpoint_name(1, 1)}" in remedy(1)
    run.unpin(1)
    run.delete(1)
    resume = re.search(r"resume='([^']*)'", remedy(3))
    assert resume is not None
    with ckptfmt.Checkpointer(
        store, ckptfmt.State(data={"a": 1}), saver="inline", resume=resume[1]
    ) as checkpointer:
        checkpointer.restore_rng()
        checkpointer.save(step=9)
    run.delete(3)
    assert [one.step for one in run.list() if one.state == "committed"] == [2, 9]
    store.create(f"{LABELS_FOLDER}/{checkpoint_name(2, 1)}-0001.json", [b"damaged"])
    assert f"ckptfmt unpin {store.name} {checkpoint_name(2, 1)}" in remedy(2)
    run.unpin(2)
    run.delete(2)
    resume = re.search(r"resume='([^']*)'", remedy(9))
    assert resume is not None
    with ckptfmt.Checkpointer(
        store, ckptfmt.State(data={"a": 1}), saver="inline", resume=resume[1]
    ) as checkpointer:
        assert "once the run has a newer one" in remedy(9)
        checkpointer.save(step=1)
    run.delete(9)


def saved_deltas() -> Saving:
    """Return a run of steps 10, 20 and 30, of which each reads from the one before."""
    arrays = np.arange(3000, dtype=np.float32)
    saving = Saving(snapshot(tensor("w", arrays)))
    for step in (10, 20, 30):
        arrays[step] += 1
        saving.save(step, snapshot(tensor("w", arrays)))
    return saving


def test_the_remedy_of_a_base_works() -> None:
    """Named together they go; the head, which reads from one, is made full by a compaction."""
    saving = saved_deltas()
    run = ckptfmt.Run(saving.store)
    text = str(error_of(lambda: run.delete(10)).remedy)
    assert "name all of them in one command" in text
    assert f"ckptfmt compact {saving.store.name} --take-over" in text
    compact(saving.store, take_over=True)
    for step in (30, 20, 10):
        run.delete(checkpoint_name(step, 1))
    assert [one.launch for one in run.list() if one.state == "committed"] == [2]


def test_what_the_newest_launch_began_with_is_not_deleted() -> None:
    """REQ-CMT-026: it has read it, or is about to, and its head may be another one's."""
    store, run = made(1)
    with ckptfmt.Checkpointer(store, ckptfmt.State(data={"a": 1}), saver="inline", resume="fresh"):
        pass
    assert run.best("loss").step == 1
    error = error_of(lambda: run.delete(1))
    assert (error.code, error.detail) == (
        Code.CHECKPOINT_NEEDED,
        "it is the last committed checkpoint of the run",
    )


def test_a_base_is_not_deleted_before_what_reads_from_it() -> None:
    """REQ-CMT-026, REQ-CMT-032"""
    saving = saved_deltas()
    run = ckptfmt.Run(saving.store)
    assert run.list()[1].stored_nbytes != run.list()[1].nbytes
    error = error_of(lambda: run.delete(10))
    assert (error.code, error.detail) == (
        Code.CHECKPOINT_NEEDED,
        f"{checkpoint_name(20, 1)} and 1 more read from it, up to {checkpoint_name(30, 1)}",
    )
    assert ckptfmt.validate(saving.store)


def test_a_pin_between_the_choice_and_the_tombstone_holds() -> None:
    """REQ-CMT-040, REQ-CMT-032: the cleaner looks again, behind its condemnation."""
    store, run = made(1, 2, 3)

    def pin(operation: Any) -> None:
        if operation.op == "create" and CONDEMNED in operation.path and not run.list()[0].pinned:
            pinned = functools.partial(dataclasses.replace, pinned=True)
            labelling.change_labels(store, open_run(store), checkpoint_name(1, 1), pinned)

    clean_up(Meddling(store, pin), open_run(store), launch=1, retention=Retention(newest=1))
    assert [one.state for one in run.list()] == ["committed", "retired", "committed"]
    assert not [path for path in store.list("") if CONDEMNED in path]


@pytest.mark.parametrize("code", [Code.NO_SPACE, Code.STORE_ACCESS])
@pytest.mark.parametrize("fail_at", [1, 2])
@pytest.mark.parametrize("operation", ["create", "replace"])
def test_a_clean_up_without_space_condemns_nothing_for_good(
    operation: str, fail_at: int, code: Code
) -> None:
    """REQ-CMT-033: what stays committed can be pinned, and a launch can begin from it."""
    store, run = made(1, 2, 3, 4)
    fault = Fault(fail_at=fail_at, sticky=True, operations=frozenset({operation}))
    full = FaultStore(store, fault, code=code)
    cleaning = functools.partial(clean_up, launch=1, retention=Retention(newest=1))
    assert code_of(lambda: cleaning(full, open_run(store))) == code
    retired_count = fail_at - 1 if operation == "replace" else 0
    assert [one.state for one in run.list()].count("retired") == retired_count
    assert not [path for path in store.list("") if CONDEMNED in path]
    run.pin(1)
    assert code_of(lambda: delete_checkpoint(full, open_run(store), checkpoint_name(2, 1))) == code
    assert not [path for path in store.list("") if CONDEMNED in path]


@pytest.mark.parametrize("state", ["committed", "retired"])
def test_a_tombstone_without_an_answer_stays_announced(state: str) -> None:
    """REQ-CMT-032: it may take effect later, and whoever pins the checkpoint must see that."""
    store, run = made(1, 2, 3)
    fault = Fault(fail_at=1, applied=state == "retired", operations=frozenset({"replace"}))
    silent = FaultStore(store, fault, code=Code.STORE_NO_ANSWER)
    cleaning = functools.partial(clean_up, launch=1, retention=Retention(newest=1))
    assert code_of(lambda: cleaning(silent, open_run(store))) == Code.STORE_NO_ANSWER
    condemned = {path.split("/")[0] for path in store.list("") if CONDEMNED in path}
    assert condemned == {checkpoint_name(2, 1)}
    assert run.list()[1].state == state
    run.pin(1)


def test_a_metric_that_comes_between_the_choice_and_the_tombstone_keeps_the_best() -> None:
    """REQ-CMT-032: whatever was recorded since the choice wasn't considered in it."""
    store, run = made(1, 2, 3)

    def measure(operation: Any) -> None:
        if (
            operation.op == "create"
            and CONDEMNED in operation.path
            and not run.list()[0].metrics.get("accuracy")
        ):
            run.set_metrics(1, {"accuracy": 0.75})

    run.set_metrics(3, {"accuracy": 0.5})
    retention = Retention(newest=1, best=("accuracy", "max", 1))
    clean_up(Meddling(store, measure), open_run(store), launch=1, retention=retention)
    assert [one.state for one in run.list()] == ["committed", "retired", "committed"]
    assert run.best("accuracy", "max").step == 1


@pytest.mark.parametrize("cleaner", ["a person", "a launch"])
def test_a_launch_that_begins_after_the_choice_keeps_what_it_resumes_from(cleaner: str) -> None:
    """REQ-CMT-032, REQ-RUN-013: the cleaner lists the launches again, behind its condemnation."""
    store, run = made(1, 2, 3)
    begun: list[int] = []

    def begin(operation: Any) -> None:
        if operation.op == "list_names" and operation.path == LABELS_FOLDER and not begun:
            begun.append(
                begin_launch(store, open_run(store), choose=checkpoint_name(1, 1))[0].launch
            )

    meddling = Meddling(store, begin)
    if cleaner == "a person":
        error = error_of(
            lambda: delete_checkpoint(meddling, open_run(store), checkpoint_name(1, 1))
        )
        assert (error.code, error.detail) == (
            Code.CHECKPOINT_NEEDED,
            "launch 2 has just begun, and resumes from it",
        )
    else:
        clean_up(meddling, open_run(store), launch=1, retention=Retention(newest=1))
    assert begun == [2]
    assert run.newest().step == 1
    assert not [path for path in store.list("") if CONDEMNED in path]
    assert begin_launch(store, open_run(store))[0].launch == 3


def test_a_launch_by_hand_does_not_begin_from_what_is_condemned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """REQ-RUN-013: before its record nothing is changed, behind it a condemnation is seen as well."""
    monkeypatch.setattr(labelling, "_CLEANER_S", 0.0)
    store, run = made(1, 2, 3)
    place, condemnation = store.at(checkpoint_name(1, 1)), f"{CONDEMNED}{0:016x}"
    place.create(condemnation, [b""])
    error = error_of(lambda: begin_launch(store, open_run(store), choose=checkpoint_name(1, 1)))
    assert (error.code, condemnation in error.detail) == (Code.CHECKPOINT_CONDEMNED, True)
    assert len(store.list_names("launches")) == 1
    place.delete(condemnation)

    def condemn(operation: Any) -> None:
        if operation.op == "create" and operation.path.startswith("launches"):
            place.create(condemnation, [b""])

    meddling = Meddling(store, condemn)
    error = error_of(lambda: begin_launch(meddling, open_run(store), choose=checkpoint_name(1, 1)))
    assert error.code == Code.CHECKPOINT_CONDEMNED
    assert run.newest().step == 1


def test_a_run_without_a_head_does_not_seem_to_be_without_checkpoints() -> None:
    """REQ-RUN-006: the launch was begun by hand from what is retired."""
    store, _ = made(1, 2, 3)
    begin_launch(store, open_run(store), choose=checkpoint_name(1, 1))
    place = store.at(checkpoint_name(1, 1))
    decision.retire(place, decision.read_register(place))  # type: ignore[arg-type]
    error = error_of(lambda: find_head(store))
    assert error.code == Code.NOT_COMMITTED
    assert checkpoint_name(1, 1) in error.detail
    assert "resume=" in str(error.remedy)


def test_what_stays_for_the_sake_of_an_unreadable_register_names_that_one() -> None:
    """REQ-CMT-034"""
    arrays = np.arange(3000, dtype=np.float32)
    saving = Saving(snapshot(tensor("w", arrays)))
    saving.save(10, snapshot(tensor("w", arrays)))
    for step in (20, 30):  # each of its own launch, and so full
        newer = Saving(snapshot(tensor("w", arrays)), store=saving.store)
        newer.save(step, snapshot(tensor("w", arrays)))
    saving.store.at(checkpoint_name(20, 2)).replace("manifest.json", b"{")
    error = error_of(lambda: ckptfmt.Run(saving.store).delete(10))
    assert (error.code, checkpoint_name(20, 2) in error.detail) == (Code.CHECKPOINT_NEEDED, True), (
        error
    )


def test_the_remedy_for_what_is_retired_is_not_only_for_who_saves() -> None:
    _, run = made(1, 2)
    run.delete(1)
    assert "take another checkpoint" in str(error_of(lambda: run.pin(1)).remedy)


def test_a_damaged_run_is_named() -> None:
    store = MemoryStore()
    assert code_of(lambda: ckptfmt.Run(store).list()) == Code.FILE_MISSING
    open_run(store)
    assert ckptfmt.Run(store).list() == ()
    assert isinstance(open_run(store), RunRecord)
    assert list_checkpoints(store) == []


def test_a_run_with_a_feature_of_a_newer_version_is_left_alone() -> None:
    """REQ-VER-003, REQ-CMT-025"""
    store = MemoryStore()
    store.create("run.json", [RunRecord(run_id="f" * 32, writer_features=("a.newer",)).dump()])
    for call in ("pin", "unpin", "delete"):
        with pytest.raises(CkptError) as caught:
            getattr(ckptfmt.Run(store), call)(1)
        assert caught.value.code == Code.FEATURE_UNSUPPORTED


class Locked(HookedStore):
    """A store in which nobody may read the records of labels, as where another user wrote them with umask 077."""

    def before(self, operation: Operation) -> None:
        """Refuse to read them."""
        if operation.op == "read" and operation.path.startswith(f"{LABELS_FOLDER}/"):
            raise err(Code.STORE_ACCESS, "Permission denied", where=operation.path)


def test_a_record_that_may_not_be_read_pins_and_stops_nobody() -> None:
    """REQ-RUN-026, REQ-CMT-040: a training goes on, whoever loads is served, and the checkpoint stays."""
    store, run = made(1, 2, 3)
    run.tag(1, "mine")
    locked = Locked(store)

    assert [one.pinned for one in ckptfmt.Run(locked).list()] == [True, False, False]
    clean_up(locked, open_run(store), launch=1, retention=Retention(newest=1))
    assert [one.state for one in run.list()] == ["committed", "retired", "committed"]
    ckptfmt.Run(locked).unpin(1)
    assert not run.list()[0].pinned


def test_labels_that_cannot_be_read_are_told_wherever_they_matter(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An entry of a listing without its metrics looks like one that never had any."""
    store, run = made(1, 2)
    run.set_metrics(1, {"loss": 1})
    locked = ckptfmt.Run(Locked(store))

    first, second = locked.list()
    assert "STORE_ACCESS" in str(first.labels_error)
    assert (first.metrics, first.pinned, second.labels_error) == ({"loss": 9}, True, None)
    assert locked.best("loss").step == 2
    assert f"{first.name} is compared by the metrics of its save" in caplog.text
    locked.tag(1, "b")
    path = f"{LABELS_FOLDER}/{first.name}-0001.json"
    assert f"goes without metrics and tags of {path}" in caplog.text
    assert run.list()[0].tags == ("b", "s1")


class Unlisted(Locked):
    """A store in which nobody may list the records of labels either."""

    def before(self, operation: Operation) -> None:
        """Refuse to list them."""
        super().before(operation)
        if operation.op == "list_names" and operation.path == LABELS_FOLDER:
            raise err(Code.STORE_ACCESS, "Permission denied", where=operation.path)


def test_what_to_resume_from_is_chosen_without_records_of_labels() -> None:
    """REQ-RUN-026"""
    store, run = made(1, 2)
    run.tag(2, "mine")
    unlisted = Unlisted(store)
    with ckptfmt.open(unlisted) as checkpoint:
        assert checkpoint.step == 2
    with ckptfmt.Checkpointer(
        unlisted, ckptfmt.State(data={"a": 1}), saver="inline"
    ) as checkpointer:
        checkpointer.restore_rng()
        checkpointer.save(step=3)
    assert run.newest().step == 3


@pytest.mark.parametrize("number", ["9" * 60, "9007199254740992", "0000"])
def test_a_number_that_no_record_can_have_is_passed_over(number: str) -> None:
    """REQ-RUN-023"""
    store, run = made(1, 2)
    store.create(f"{LABELS_FOLDER}/{checkpoint_name(1, 1)}-{number}.json", [b"damaged"])
    run.tag(1, "a")
    run.tag(1, "b")
    assert (run.list()[0].tags, run.list()[0].pinned) == (("a", "b", "s1"), False)


def test_behind_the_largest_number_there_is_none() -> None:
    """REQ-RUN-024: that is said; nothing is written that no reader takes."""
    store, run = made(1, 2)
    store.create(f"{LABELS_FOLDER}/{checkpoint_name(1, 1)}-9007199254740991.json", [b"damaged"])
    assert run.list()[0].pinned
    assert code_of(lambda: run.unpin(1)) == Code.LIMIT_EXCEEDED
    assert len(store.list(LABELS_FOLDER)) == 1


def test_a_listing_that_lags_behind_does_not_hold_a_change_up() -> None:
    """REQ-RUN-024: who finds a number taken knows of that record."""

    class Lagging(HookedStore):
        def list_names(self, prefix: str) -> Names:
            return [] if prefix == LABELS_FOLDER else super().list_names(prefix)

    store, run = made(1, 2)
    run.tag(1, "a")
    ckptfmt.Run(Lagging(store)).tag(1, "b")
    assert run.list()[0].tags == ("a", "b", "s1")


def test_a_change_that_is_overtaken_for_ever_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """REQ-RUN-024"""

    class Overtaken(HookedStore):
        def before(self, operation: Operation) -> None:
            if operation.op == "create" and operation.path.startswith(LABELS_FOLDER):
                store.create(operation.path, [b"somebody else's"])

    store, _ = made(1, 2)
    monkeypatch.setattr(labelling, "_TRIES", 4)
    assert code_of(lambda: ckptfmt.Run(Overtaken(store)).tag(1, "a")) == Code.COMMIT_CONFLICT
    assert len(store.list(LABELS_FOLDER)) == 4


class Retiring(HookedStore):
    """A store in which a training goes on and retires step 1, when its register is about to be read the n-th time."""

    def __init__(self, inner: Any, trainer: ckptfmt.Checkpointer, *, at: int) -> None:
        super().__init__(inner)
        self._trainer = trainer
        self._left = [at]

    def before(self, operation: Operation) -> None:
        """Save step 2."""
        if operation.op == "read" and operation.path == f"{checkpoint_name(1, 1)}/manifest.json":
            self._left[0] -= 1
            if self._left[0] == 0:
                self._trainer.save(step=2)


@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize("look", [lambda store: ckptfmt.Run(store).open(), ckptfmt.open])
def test_the_newest_is_opened_while_a_training_retires_the_one_before(look: Any, at: int) -> None:
    """REQ-RUN-020: whoever looks once more gets the one that came in its place."""
    store = MemoryStore()
    with ckptfmt.Checkpointer(
        store, ckptfmt.State(data={"a": 1}), saver="inline", keep=1
    ) as trainer:
        trainer.save(step=1)
        with look(Retiring(store, trainer, at=at)) as checkpoint:
            assert checkpoint.step == 2


@pytest.mark.parametrize("at", [1, 2])
def test_the_newest_is_described_as_it_was_found(at: int) -> None:
    """REQ-RUN-020: never as retired, by a second look."""
    store = MemoryStore()
    with ckptfmt.Checkpointer(
        store, ckptfmt.State(data={"a": 1}), saver="inline", keep=1
    ) as trainer:
        trainer.save(step=1)
        assert ckptfmt.Run(Retiring(store, trainer, at=at)).newest().state == "committed"


def test_a_path_without_a_run_is_named_and_nothing_is_made_there(tmp_path: Path) -> None:
    """REQ-RUN-015: nothing says there that a run.json was lost."""
    typo = tmp_path / "typo" / "run"
    for call in (
        lambda run: run.list(),
        lambda run: run.tag(1, "a"),
        lambda run: run.pin(1),
        lambda run: run.delete(1),
    ):
        error = error_of(lambda call=call: call(ckptfmt.Run(typo)))
        assert (error.code, error.detail) == (Code.FILE_MISSING, "no run is here")
    assert not typo.parent.exists()
    ckptfmt.save(tmp_path / "lone", ckptfmt.State(data={"a": 1}), step=1)
    assert (
        error_of(lambda: ckptfmt.Run(tmp_path / "lone").list()).detail
        == "a checkpoint is here, and no run"
    )


def test_behind_a_record_that_cannot_be_read_nothing_older_is_lost() -> None:
    """REQ-RUN-024, REQ-RUN-026"""
    store, run = made(1, 2)
    run.set_metrics(1, {"accuracy": 0.5})
    run.tag(1, "a")
    store.create(f"{LABELS_FOLDER}/{checkpoint_name(1, 1)}-0003.json", [b"damaged"])
    run.tag(1, "b")
    found = run.list()[0]
    assert (found.tags, dict(found.metrics)) == (("a", "b", "s1"), {"loss": 9.0, "accuracy": 0.5})
    assert found.pinned


def test_arguments_of_another_type_are_named() -> None:
    """Of a step that is a bool or a fraction, `delete` would delete step 1."""
    _, run = made(1, 2)
    odd: Any
    for odd in (True, 1.0, None, ["a"], -1, 10**5000):
        assert code_of(lambda odd=odd: run.find(odd)) == Code.ARGUMENT
    odd = np.int64(1)
    assert run.find(odd).step == 1
    odd = ["a"]
    assert code_of(lambda: run.untag(1, odd)) == Code.ARGUMENT
    assert code_of(lambda: run.best(odd)) == Code.ARGUMENT


def test_nothing_is_recorded_where_nothing_is_given() -> None:
    store, run = made(1, 2)
    run.tag(1)
    run.untag(1)
    run.set_metrics(1, {})
    assert store.list(LABELS_FOLDER) == []
