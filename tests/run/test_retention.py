"""Which checkpoints stay, and what a cleaner may touch."""

import dataclasses
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptfmt.commit.decision import read_register, retire
from ckptfmt.documents.labels import Labels
from ckptfmt.documents.manifest import Abort, Manifest, Reference, Tombstone, checkpoint_name
from ckptfmt.documents.run import LabelsRecord, Launch, RunRecord
from ckptfmt.errors import CkptError, Code, UnsupportedError
from ckptfmt.features import LABELS, REFERENCED
from ckptfmt.run.catalog import Run
from ckptfmt.run.lineage import (
    RunEntry,
    begin_launch,
    iter_lineage,
    list_checkpoints,
    list_launches,
)
from ckptfmt.run.retention import Retention, clean_up, list_abandoned, plan_retention, tidy_up
from ckptfmt.store import LocalStore
from ckptfmt.write.writer import write_part
from tests.builders import error_of, origin, save, snapshot, tensor, verify
from tests.chains import Saving
from tests.homes import files_of
from tests.run.test_lineage import RunOfSteps, manifests
from tests.store.helpers import temporaries
from tests.stores.faults import Fault, FaultStore
from tests.stores.recorder import Recorder


def planned(made, **options):
    launches, entries = list_launches(made.store, made.run), list_checkpoints(made.store, made.run)
    return [
        (entry.step, entry.launch)
        for entry in plan_retention(launches, entries, Retention(**options))
    ]


def committed(made):
    return [
        (entry.step, entry.launch)
        for entry in list_checkpoints(made.store, made.run)
        if entry.manifest is not None
    ]


@pytest.fixture
def ten(home):
    made = RunOfSteps(home.store())
    made.begin()
    return made.save(*range(10, 110, 10))


def test_the_oldest_go_first(ten):
    assert planned(ten, newest=7) == [(10, 1), (20, 1), (30, 1)]


def test_without_a_number_all_stay(ten):
    assert planned(ten) == planned(ten, every=20) == []


def test_the_last_one_never_goes(ten):
    """REQ-CMT-026."""
    assert (100, 1) not in planned(ten, newest=1)
    assert len(planned(ten, newest=1)) == 9


def test_every_so_many_steps_one_stays(ten):
    assert planned(ten, newest=2, every=40) == [
        (10, 1),
        (20, 1),
        (30, 1),
        (50, 1),
        (60, 1),
        (70, 1),
    ]


class History:
    """A run as it is planned for, without its files: launches, saves, rollbacks by hand, pins; the newest launch saves.

    Args:
        draw: of hypothesis, which chooses.
    """

    def __init__(self, draw):
        self._draw = draw
        self.launches: list[Launch] = []
        self.entries: list[RunEntry] = []
        self.begin(by_hand=False)
        for _ in range(draw(st.integers(0, 12))):
            match draw(st.integers(0, 6)):
                case 0:
                    self.begin(by_hand=False)
                case 1:
                    self.begin(by_hand=True)
                case 2 if self.entries:
                    self.pin(draw(st.sampled_from(self.entries)))
                case _:
                    self.save()

    @property
    def lineage(self):
        return [
            entry
            for entry in iter_lineage(self.launches, self.entries)
            if entry.manifest is not None
        ]

    def begin(self, *, by_hand):
        candidates = self.entries if by_hand else self.lineage[:1]
        chosen = self._draw(st.sampled_from(candidates)) if candidates else None
        resume = (
            None if chosen is None else Reference(name=chosen.name, digest=chosen.manifest.digest)
        )
        number, by = len(self.launches) + 1, "hand" if by_hand else "lineage"
        self.launches.append(
            Launch(run_id="f" * 32, launch=number, nonce="0" * 32, chosen_by=by, resume_from=resume)
        )

    def save(self):
        launch = self.launches[-1]
        own = [entry for entry in self.entries if entry.launch == launch.launch]
        before = (
            own[-1].step
            if own
            else 0
            if launch.resume_from is None
            else int(launch.resume_from.name[5:13])
        )
        step = before + self._draw(st.integers(1, 3))
        base = self._draw(st.sampled_from([None, None, *own]))
        references = (
            ()
            if base is None
            else (*base.references, Reference(name=base.name, digest=base.manifest.digest))
        )
        metric = self._draw(st.sampled_from([None, 1, 2, 3]))
        suspect = self._draw(st.sampled_from([None, None, None, "nan"]))
        manifest = Manifest(
            origin=origin(run_id="f" * 32, launch=launch.launch, step=step),
            saved_unix_s=0,
            fields={},
            index_nbytes=0,
            index_digest="",
            references=references,
            labels=Labels.of({} if metric is None else {"loss": metric}, suspect=suspect),
            digest=f"{len(self.entries)}",
        )
        name = checkpoint_name(step, launch.launch)
        self.entries.append(RunEntry(name=name, step=step, launch=launch.launch, register=manifest))

    def pin(self, entry):
        labels = self._draw(st.sampled_from([entry.labels, Labels.of({"loss": 0})]))
        record = LabelsRecord(
            run_id="f" * 32, checkpoint=entry.name, number=1, pinned=True, labels=labels
        )
        record = self._draw(st.sampled_from([record, dataclasses.replace(record, pinned=False)]))
        self.entries[self.entries.index(entry)] = dataclasses.replace(entry, record=record)


def must_stay(history, entry, *, newest, every, best):
    """Say by brute force whether a checkpoint stays for its own sake."""
    lineage, last = history.lineage, history.launches[-1]
    is_unmeasured = all(other.labels.number("loss") is None for other in lineage)
    if entry not in lineage or entry.is_pinned or (best is not None and is_unmeasured):
        return True
    if sum(other.step > entry.step for other in lineage) < newest or (
        every and not entry.step % every
    ):
        return True
    has_own = any(other.launch == last.launch for other in lineage)
    if not has_own and last.resume_from is not None and last.resume_from.name == entry.name:
        return True
    value = entry.labels.number("loss")
    if best is None or value is None:
        return False
    _, mode, count = best
    better = 0
    for other in lineage:
        theirs = other.labels.number("loss")
        if theirs is not None and (
            (theirs < value if mode == "min" else theirs > value)
            or (theirs == value and other.step > entry.step)
        ):
            better += 1
    return better < count


@settings(max_examples=300, deadline=None)
@given(
    st.data(),
    st.integers(1, 4),
    st.none() | st.integers(1, 4),
    st.none() | st.tuples(st.just("loss"), st.sampled_from(["min", "max"]), st.integers(1, 4)),
)
def test_nothing_goes_that_must_stay_and_all_else_goes(data, newest, every, best):
    """REQ-CMT-026, REQ-CMT-040: the newest, the best, the pinned, every so many, and what any of them reads from."""
    history = History(data.draw)
    options = {"newest": newest, "every": every, "best": best}
    going = [
        entry.name
        for entry in plan_retention(history.launches, history.entries, Retention(**options))
    ]
    lineage = history.lineage
    doubted = [
        entry
        for entry in history.entries
        if entry.name in going and entry.is_suspect and entry not in lineage
    ]
    for entry in doubted:  # of those beside the lineage, test_suspect.py says which go
        assert sum(other.step > entry.step for other in lineage) >= newest
        assert not entry.is_pinned
    staying = {
        one.name
        for one in history.entries
        if must_stay(history, one, **options) and one not in doubted
    }
    while True:
        read = {
            one.name
            for entry in history.entries
            if entry.name in staying
            for one in entry.references
        }
        if read <= staying:
            break
        staying |= read

    assert sorted(going) == sorted({entry.name for entry in history.entries} - staying)
    assert len(going) < max(1, len(history.entries))
    assert {entry.name for entry in lineage[:1]}.isdisjoint(going)


def test_the_best_and_the_pinned_stay(ten):
    """REQ-CMT-040: what has no metric isn't among the best."""
    run = Run(ten.store)
    for step, loss in ((20, 0.5), (50, 0.25), (70, 0.5), (80, 9.0)):
        run.set_metrics(step, {"loss": loss})
    best = {"newest": 1, "best": ("loss", "min", 2)}
    assert planned(ten, **best) == [
        (step, 1) for step in range(10, 100, 10) if step not in (50, 70)
    ]
    assert (80, 1) not in planned(ten, newest=1, best=("loss", "max", 1))
    run.set_metrics(100, {"loss": 0.0})
    assert (70, 1) in planned(ten, **best)


def test_a_metric_that_no_checkpoint_has_lets_nothing_go(ten):
    """A misspelt metric deletes nothing, and the log says it."""
    run = Run(ten.store)
    ample = Retention(newest=10, best=("los", "min", 2))
    assert tidy_up(ten.store, ten.run, launch=1, retention=ample) == ([], "")
    scarce = dataclasses.replace(ample, newest=1)
    run.set_metrics(20, {"loss": 0.5})
    removed, problem = tidy_up(ten.store, ten.run, launch=1, retention=scarce)
    assert removed == []
    assert "'los'" in problem
    assert "their metrics: loss; did you mean 'loss'?" in problem
    run.set_metrics(20, {"los": 0.5})
    removed, problem = tidy_up(ten.store, ten.run, launch=1, retention=scarce)
    assert (len(removed), problem) == (8, "")


def test_more_to_keep_than_there_are(ten):
    assert planned(ten, newest=99) == []


def test_what_a_launch_resumes_from_stays_until_it_saved(ten):
    """REQ-CMT-026: also when it is far back, chosen by hand."""
    ten.begin(choose="step-00000030-l0001")
    assert planned(ten, newest=1) == [(10, 1), (20, 1)]
    ten.save(35)
    assert planned(ten, newest=1) == [(10, 1), (20, 1), (30, 1)]


def test_what_a_rollback_left_beside_is_left_alone(ten):
    """REQ-CMT-026: nobody asked for it to go."""
    ten.begin(choose="step-00000030-l0001")
    ten.save(35, 45)
    clean_up(ten.store, ten.run, launch=2, retention=Retention(newest=1))
    assert committed(ten) == [(step, 1) for step in range(40, 110, 10) if step < 45] + [(45, 2)] + [
        (step, 1) for step in range(50, 110, 10)
    ]


def late_run(store):
    """Launch 1 saved 10 and 20, launch 2 resumes from 20, and launch 1 then commits 30 and 40."""
    made = RunOfSteps(store)
    made.begin()
    made.save(10, 20)
    assert made.begin().resume_from.name == "step-00000020-l0001"
    return made.save(30, 40, launch=1)


def test_what_a_fenced_launch_committed_late_goes_once_its_successor_saved(home):
    """REQ-CMT-026: it is no candidate, and nobody left it there."""
    made = late_run(home.store())
    assert planned(made, newest=1) == [(10, 1)]
    made.save(25)
    assert planned(made, newest=1) == [(10, 1), (20, 1), (30, 1), (40, 1)]
    assert planned(made, newest=2) == [(10, 1), (30, 1), (40, 1)]
    assert planned(made, newest=1, every=20) == [(10, 1), (30, 1)]
    assert planned(made) == []
    clean_up(made.store, made.run, launch=2, retention=Retention(newest=1))
    assert committed(made) == [(25, 2)]
    assert made.head() == "step-00000025-l0002"


def test_late_commits_of_many_launches_do_not_pile_up(home):
    """REQ-CMT-026: each launch is taken over while it saves, as by a scheduler that restarts a job too soon."""
    made = RunOfSteps(home.store())
    for number in range(1, 14):
        made.begin()
        made.save(10 * number)
        if number > 1:
            made.save(10 * number + 1, launch=number - 1)
        clean_up(made.store, made.run, launch=number, retention=Retention(newest=1))
    assert committed(made) == [(130, 13)]


def test_the_first_save_of_a_launch_that_was_taken_over_is_late_too(home):
    """REQ-CMT-026: its successor resumed from nothing, or from what came before both."""
    made = RunOfSteps(home.store())
    made.begin()
    assert made.begin().resume_from is None
    made.save(5, launch=1).save(7)
    assert planned(made, newest=1) == [(5, 1)]
    made.begin()
    made.begin()
    made.save(9, launch=3).save(8)
    assert planned(made, newest=1) == [(5, 1), (7, 2), (9, 3)]


def test_what_a_rollback_left_is_not_late_for_launches_that_follow_it(ten):
    """REQ-CMT-026: the launch after the rollback follows the lineage, but who rolled back gave the others up."""
    ten.begin(choose="step-00000030-l0001")
    assert ten.begin().chosen_by == "lineage"
    ten.save(35)
    assert planned(ten, newest=1) == [(10, 1), (20, 1), (30, 1)]
    ten.begin(fresh=True)
    ten.save(1)
    assert planned(ten, newest=1) == []


def test_a_lost_record_makes_nothing_late(ten):
    """REQ-CMT-026: it may have been that of a rollback, which is gone with it."""
    ten.begin(choose="step-00000030-l0001")
    ten.begin()
    ten.save(35)
    ten.store.delete("launches/0002.json")
    assert planned(ten, newest=1) == [(10, 1), (20, 1), (30, 1)]


def test_what_a_launch_fell_back_from_goes_with_others_of_its_step(ten):
    """REQ-CMT-026: it is damaged, perhaps not beyond repair; it mustn't stay for ever either."""
    ten.damage(100, 1)
    assert ten.begin().chosen_by == "fallback"
    assert (100, 1) not in planned(ten, newest=1)
    ten.save(95)
    assert (100, 1) not in planned(ten, newest=1)
    ten.save(105)
    assert (100, 1) not in planned(ten, newest=2)
    assert (100, 1) in planned(ten, newest=1)
    ten.save(115)
    assert (100, 1) in planned(ten, newest=2)
    assert (100, 1) in planned(ten, newest=1, every=50)  # another one of this step is as good
    clean_up(ten.store, ten.run, launch=2, retention=Retention(newest=1))
    assert committed(ten) == [(115, 2)]
    ten.begin(choose="step-00000115-l0002")
    assert planned(ten, newest=1) == []


def test_a_late_one_that_somebody_went_on_from_is_not_late_any_more(home):
    """REQ-CMT-026: a record names it."""
    made = late_run(home.store())
    made.save(25)
    made.begin(choose="step-00000040-l0001")
    made.save(45)
    made.begin(choose="step-00000025-l0002")
    made.save(26)
    assert planned(made, newest=1) == [(10, 1), (20, 1), (25, 2), (30, 1)]


def test_a_launch_that_was_overtaken_makes_nothing_late(home):
    """REQ-CMT-026: launch 2 named 10, which launch 1 retired behind its 20; launch 3 goes on from that."""
    made = RunOfSteps(home.store())
    made.begin()
    made.save(10)
    made.begin()
    made.save(20, launch=1)
    retire(made.place(10, 1), manifests(made)[0])
    assert made.begin().resume_from.name == "step-00000020-l0001"
    assert planned(made, newest=1) == []
    made.begin(choose="step-00000020-l0001")
    made.save(30, launch=1)
    made.save(25)
    assert planned(made, newest=1) == [(20, 1), (30, 1)]


def test_bases_of_a_late_delta_go_with_it(home):
    """REQ-CMT-026: they stay as long as it does."""
    array = np.arange(4096, dtype=np.float32)
    saving = Saving(snapshot(tensor("w", array)), store=home.store())
    for step in (1, 2):
        saving.save(step, snapshot(tensor("w", array + step)))
    second, _ = begin_launch(saving.store, saving.run)
    manifest = saving.save(
        3, snapshot(tensor("w", array + 3))
    )  # launch 1 is taken over, and doesn't know it yet
    assert {one.name for one in manifest.references} >= {
        checkpoint_name(1, 1),
        checkpoint_name(2, 1),
    }
    place = saving.store.at(checkpoint_name(3, 2))
    save(
        place,
        snapshot(tensor("w", array)),
        step=3,
        launch=2,
        run_id=saving.run.run_id,
        attempt="b" * 16,
    )
    assert second.launch == 2
    removed = clean_up(saving.store, saving.run, launch=2, retention=Retention(newest=1))
    assert sorted(removed) == [checkpoint_name(step, 1) for step in (1, 2, 3)]
    assert verify(place).valid


def test_a_cleaned_run_resumes_where_it_was(ten):
    assert clean_up(ten.store, ten.run, launch=1, retention=Retention(newest=2)) == [
        f"step-{step:08}-l0001" for step in range(10, 90, 10)
    ]
    assert committed(ten) == [(90, 1), (100, 1)]
    assert ten.head() == "step-00000100-l0001"
    for step in (10, 80):
        place = ten.place(step, 1)
        assert place.list("") == ["manifest.json"]
    assert clean_up(ten.store, ten.run, launch=2, retention=Retention(newest=2)) == []
    assert all(verify(ten.place(step, 1)).valid for step in (90, 100))


def test_an_unknown_writer_feature_removes_nothing(ten):
    """REQ-CMT-025, REQ-VER-003."""
    before = files_of(ten.store)
    run = RunRecord(run_id=ten.run.run_id, writer_features=("me.packs",))
    error = error_of(lambda: clean_up(ten.store, run, launch=9, retention=Retention(newest=1)))
    assert (error.code, error.requirement, type(error)) == (
        Code.FEATURE_UNSUPPORTED,
        "REQ-CMT-025",
        UnsupportedError,
    )
    assert "me.packs" in error.detail
    assert files_of(ten.store) == before


def unfinished(made, step, launch):
    made_origin = origin(step=step, launch=launch, run_id=made.run.run_id, attempt=f"{step:016x}")
    write_part(made.place(step, launch), snapshot(tensor("w", np.ones(2))), made_origin, writer=0)


def test_only_what_older_launches_left_unfinished_is_aborted(ten):
    """REQ-CMT-021, REQ-CMT-020."""
    ten.begin()
    for launch in (1, 2):
        unfinished(ten, 200 + launch, launch)
    assert clean_up(ten.store, ten.run, launch=2) == [checkpoint_name(201, 1)]
    unfinished(ten, 203, 3)
    entries = list_checkpoints(ten.store, ten.run)
    assert list_abandoned(list_launches(ten.store, ten.run), entries, 2) == []
    registers = {entry.name: entry.register for entry in list_checkpoints(ten.store, ten.run)}
    assert isinstance(registers[checkpoint_name(201, 1)], Abort)
    assert registers[checkpoint_name(202, 2)] is None
    assert registers[checkpoint_name(203, 3)] is None
    assert ten.place(201, 1).list("") == ["manifest.json"]
    assert len(ten.place(202, 2).list("")) == 2
    assert len(committed(ten)) == 10


ENDS = {
    "given up": (201, ["create", "sync", "delete"]),
    "retired": (20, ["replace", "sync", "delete"]),
    "left behind": (10, ["sync", "delete"]),
}


@pytest.mark.parametrize(("step", "expected"), ENDS.values(), ids=ENDS)
def test_files_go_only_behind_a_record_that_is_synced(ten, step, expected):
    """REQ-CMT-020, REQ-CMT-022, REQ-CMT-024."""
    unfinished(ten, 201, 1)
    interrupted = FaultStore(ten.store, Fault(fail_at=1, operations=frozenset({"delete"})))
    error_of(lambda: clean_up(interrupted, ten.run, launch=1, retention=Retention(newest=9)))
    assert isinstance(read_register(ten.place(10, 1)), Tombstone)
    ten.begin()
    recorder = Recorder(ten.store)
    clean_up(recorder, ten.run, launch=2, retention=Retention(newest=1))
    name = checkpoint_name(step, 1)
    steps = [step.op for step in recorder.log.operations if step.path.split("/")[0] == name]
    lasting = [op for op in steps if op in ("create", "replace", "sync", "delete")]
    assert lasting[: lasting.index("delete") + 1] == expected
    assert ten.place(step, 1).list("") == ["manifest.json"]


def test_a_clean_up_with_nothing_to_retire_reads_each_register_once():
    """In an object store each of these is a request behind every save; to retire something they are read again."""
    made = RunOfSteps()
    made.begin()
    made.save(10, 20, 30)
    run = dataclasses.replace(made.run, writer_features=(LABELS, REFERENCED))
    registers = [f"{checkpoint_name(step, 1)}/manifest.json" for step in (10, 20, 30)]

    def read_by(keep):
        recorder = Recorder(made.store)
        clean_up(recorder, run, launch=1, retention=Retention(newest=keep))
        return sorted(
            one.path
            for one in recorder.log.operations
            if one.op == "read" and one.path in registers
        )

    assert read_by(3) == registers
    assert read_by(2) == sorted(registers * 3)


def test_a_register_that_cannot_be_read_is_left_alone(ten):
    """REQ-CMT-021: nobody decides for it."""
    path = "step-00000010-l0001/manifest.json"
    ten.store.replace(path, b"garbage")
    ten.begin()
    before = {
        name: content
        for name, content in files_of(ten.store).items()
        if name.startswith("step-00000010")
    }
    clean_up(ten.store, ten.run, launch=2, retention=Retention(newest=1))
    after = files_of(ten.store)
    assert {name: after.get(name) for name in before} == before


@pytest.mark.long_on_s3
def test_a_clean_up_that_was_interrupted_is_finished(home, ten):
    """REQ-CMT-024: at whatever operation it stopped, the next one gets to the same end, and nothing else is hurt."""
    done = home.store(files_of(ten.store))
    clean_up(done, ten.run, launch=1, retention=Retention(newest=7))
    for fail_at in range(1, 200):
        inner = home.store(files_of(ten.store))
        fault = Fault(
            fail_at=fail_at, operations=frozenset({"replace", "delete", "create", "sync"})
        )
        try:
            clean_up(FaultStore(inner, fault), ten.run, launch=1, retention=Retention(newest=7))
        except CkptError:
            kept = RunOfSteps(inner)
            assert {(step, 1) for step in range(40, 110, 10)} <= set(committed(kept))
            assert all(verify(kept.place(step, 1)).valid for step in (40, 100))
        clean_up(inner, ten.run, launch=1, retention=Retention(newest=7))
        assert files_of(inner) == files_of(done)
        if not fault.fired_count:
            assert fail_at > 6
            return
    raise AssertionError("no end of operations")


@pytest.mark.parametrize("path_end", [checkpoint_name(201, 1), "parts"])
def test_the_unfinished_files_of_an_aborted_save_go_with_the_next_clean_up(tmp_path, path_end):
    """REQ-CMT-024: no listing shows them, and the first clean-up failed behind its record."""
    made = RunOfSteps(LocalStore(tmp_path, writable=True))
    made.begin()
    unfinished(made, 201, 1)
    folder = tmp_path / checkpoint_name(201, 1)
    (folder / f".tmp-{'0' * 32}").write_bytes(b"of a killed writer")
    (folder / "parts" / f".tmp-{'1' * 32}").write_bytes(b"of a killed writer")
    made.begin()
    fault = Fault(fail_at=1, operations=frozenset({"delete_leftovers"}), path_end=path_end)
    error_of(
        lambda: clean_up(FaultStore(made.store, fault), made.run, launch=2, retention=Retention())
    )
    assert temporaries(folder)
    clean_up(made.store, made.run, launch=2, retention=Retention())
    assert temporaries(folder) == []


@pytest.mark.long_on_s3
def test_random_histories_never_lose_what_comes_next(home):
    """REQ-CMT-026: launches, saves, rollbacks, damage and clean-ups in any order; what would be resumed from stays."""
    for seed in range(12):
        rng = random.Random(seed)
        made = RunOfSteps(home.store())
        made.begin()
        step = 0
        for _ in range(12):
            action = rng.randrange(6)
            if action <= 1:
                step += rng.randrange(1, 9)
                made.save(step)
            elif action == 2:
                made.begin()
            elif action == 3 and committed(made):
                back = rng.choice(committed(made))
                made.begin(choose=checkpoint_name(*back))
            elif action == 4 and made.launch.launch > 1:
                late = (step + rng.randrange(1, 9), rng.randrange(1, made.launch.launch))
                if checkpoint_name(*late) not in {
                    entry.name for entry in list_checkpoints(made.store, made.run)
                }:
                    made.save(late[0], launch=late[1])
            else:
                before = made.begin().resume_from
                clean_up(
                    made.store,
                    made.run,
                    launch=made.launch.launch,
                    retention=Retention(newest=rng.randint(1, 2), every=rng.choice((None, 5))),
                )
                assert made.begin().resume_from == before
        assert not made.passed_over
        retired = [
            entry
            for entry in list_checkpoints(made.store, made.run)
            if isinstance(entry.register, Tombstone)
        ]
        assert all(
            made.place(entry.step, entry.launch).list("") == ["manifest.json"] for entry in retired
        )
