"""The loop's one class: resume, cadence, retention, lineage, fencing; numpy states, threads as processes."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import numpy as np
import pytest

import ckptfmt
from ckptfmt.adapters.capture import capture
from ckptfmt.api import compact
from ckptfmt.checkpointer import Checkpointer
from ckptfmt.documents.manifest import Manifest, Tombstone
from ckptfmt.documents.run import RUN_NAME, SAVERS, RunRecord
from ckptfmt.errors import CkptError, Code, FencedError
from ckptfmt.run.lineage import list_checkpoints, open_run
from ckptfmt.store import open_store
from ckptfmt.store.memory import MemoryStore
from tests import builders
from tests.homes import Home, damage, find
from tests.interface.test_group import Allgather, run_writers
from tests.stores.hooked import HookedStore, Operation
from tests.stores.recorder import Recorder


class Trainer:
    """A run whose state says how it came about: its weights are the sum of the steps taken."""

    def __init__(self) -> None:
        self.weights = {"w": np.zeros(3)}
        self.data = {"position": 0}
        self.state = ckptfmt.State(weights=self.weights, data=self.data)

    def step(self, number: int) -> None:
        self.weights["w"] += number + 1
        self.data["position"] = number + 1


def run(store: Any, total: int, **options: Any) -> tuple[Trainer, Checkpointer, list[int]]:
    trainer, done = Trainer(), []
    with Checkpointer(store, trainer.state, **options) as checkpointer:
        for number in checkpointer.steps(total):
            trainer.step(number)
            done.append(number)
    return trainer, checkpointer, done


def committed(store: Any) -> list[tuple[int, int]]:
    return [
        (entry.step, entry.launch)
        for entry in list_checkpoints(store)
        if isinstance(entry.register, Manifest)
    ]


@pytest.fixture
def store(home: Home) -> Any:
    return home.store()


def test_second_start_goes_on_where_the_first_ended(store: Any) -> None:
    run(store, 4)
    trainer, checkpointer, done = run(store, 7)
    assert done == [4, 5, 6]
    assert trainer.weights["w"].tobytes() == np.full(3, 28.0).tobytes()
    assert trainer.data == {"position": 7}
    assert checkpointer.launch is not None
    assert checkpointer.launch.launch == 2
    assert checkpointer.launch.chosen_by == "lineage"


@pytest.mark.parametrize(("mode", "opened"), [("off", [2]), ("smallest", [1, 2])])
def test_resume_reads_each_index_and_part_once(mode: str, opened: list[int]) -> None:
    """A resume opened and parsed a checkpoint, and the bases of a delta, twice: to verify it, and to load it."""
    weights = {"changes": np.zeros(3), "stays": np.arange(100_000.0)}
    state = ckptfmt.State(weights=weights)
    inner = MemoryStore()
    with Checkpointer(
        inner, state, saver="thread", delta={"mode": mode, "restore_budget": 100.0}
    ) as first:
        for step in (1, 2):
            weights["changes"] += step
            first.save(step=step)
    recorder = Recorder(inner)
    with Checkpointer(recorder, state, saver="inline") as second:
        second.restore_rng()
    read = [
        one.path
        for one in recorder.log.operations
        if one.op == "read" and one.path.endswith(".msgpack")
    ]
    names = [f"step-{step:08d}-l0001" for step in opened]
    assert sorted(path.partition("/")[0] for path in read) == sorted(
        names * 2
    )  # the index, and the only part
    assert len(set(read)) == len(read)


def test_nothing_is_left_to_do_when_the_run_is_over(store: Any) -> None:
    run(store, 4)
    _, _, done = run(store, 4)
    assert done == []
    assert committed(store) == [(4, 1)]


def test_saves_every_so_many_steps_and_at_the_end(store: Any) -> None:
    run(store, 7, every=3)
    assert committed(store) == [(3, 1), (6, 1), (7, 1)]


def labels_of(store: Any) -> dict[int, Any]:
    found = {entry.step: entry.register for entry in list_checkpoints(store)}
    return {
        step: (one.labels.metrics, one.labels.tags)
        for step, one in found.items()
        if isinstance(one, Manifest)
    }


@pytest.mark.parametrize("saver", ["inline", "thread", "process"])
def test_metrics_and_tags_go_with_the_save_that_they_were_given_to(home: Home, saver: Any) -> None:
    """REQ-MAN-010: at once, at the end of the step whose body asked for it, or with the save that is due."""
    trainer, place = Trainer(), home.path()
    with Checkpointer(place, trainer.state, every=4, saver=saver) as checkpointer:
        with checkpointer.training_step():
            checkpointer.save(metrics={"loss": 2}, tags=["in the body"])
        checkpointer.save(step=2, metrics={"loss": 1.5}, tags="at once")
        checkpointer.end_step(3, metrics={"loss": 9.0})
        checkpointer.end_step(4, metrics={"loss": 1.25})
        checkpointer.save(step=5)
    assert labels_of(open_store(place, writable=False)) == {
        1: ({"loss": "2.0"}, ("in the body",)),
        2: ({"loss": "1.5"}, ("at once",)),
        4: ({"loss": "1.25"}, ()),
        5: ({}, ()),
    }
    assert ckptfmt.validate(place)


def test_tags_of_the_run_go_with_each_save(store: Any) -> None:
    """Also with those that `steps` makes, beside tags of the save itself."""
    saving = ckptfmt.Saving(saver="inline", tags=["wandb:1a", "b"])
    with Checkpointer(store, Trainer().state, every=2, saving=saving) as checkpointer:
        for step in checkpointer.steps(4):
            if step == 3:
                checkpointer.save(tags=["b", "c"])
    assert labels_of(store) == {2: ({}, ("b", "wandb:1a")), 4: ({}, ("b", "c", "wandb:1a"))}


def test_a_tag_that_no_save_could_have_is_refused_at_once() -> None:
    refused: list[Any] = [["x" * 101], [""], [3], [f"tag {number}" for number in range(33)]]
    for tags in refused:
        with pytest.raises(CkptError) as caught:
            ckptfmt.Saving(tags=tags)
        assert (caught.value.code, caught.value.where) == ("ARGUMENT", "tags=")


@pytest.mark.parametrize("saver", ["inline", "thread", "process"])
def test_the_best_checkpoints_and_the_pinned_outlive_the_newest(home: Home, saver: Any) -> None:
    """REQ-CMT-040: the rule travels to whoever cleans up."""
    place = home.path()
    losses = {1: 5.0, 2: 1.0, 3: 4.0, 4: 2.0, 5: 3.0, 6: None, 7: 6.0}
    with Checkpointer(
        place, Trainer().state, keep=1, keep_best=("loss", "min", 2), saver=saver
    ) as checkpointer:
        for step, loss in losses.items():
            handle = checkpointer.save(step=step, metrics={} if loss is None else {"loss": loss})
            assert handle is not None
            handle.wait("COMMITTED")
            if step == 1:
                ckptfmt.Run(place).pin(1)
    run = ckptfmt.Run(place)
    assert [one.step for one in run.list() if one.state == "committed"] == [1, 2, 4, 7]
    assert run.best("loss", "min").step == 2
    assert ckptfmt.validate(place)


@pytest.mark.parametrize(
    "keep_best",
    [
        "loss",
        ("loss", "min"),
        ("loss", "least", 3),
        ("loss", "min", 0),
        ("loss", "max", True),
        (3, "min", 1),
    ],
)
def test_what_says_nothing_of_the_best_is_refused(keep_best: Any) -> None:
    for keep in (1, None):
        error = builders.error_of(
            lambda keep=keep: Checkpointer(
                MemoryStore(), Trainer().state, keep=keep, keep_best=keep_best
            )
        )
        assert (error.code, error.where) == (Code.ARGUMENT, "Retention(best=)")
    assert (
        builders.error_of(
            lambda: Checkpointer(MemoryStore(), Trainer().state, keep_best=("loss", "min", 1))
        ).code
        == Code.ARGUMENT
    )


def test_labels_of_a_step_that_is_saved_already_are_not_lost_in_silence(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Checkpointer(MemoryStore(), Trainer().state, saver="inline") as checkpointer:
        checkpointer.save(step=1)
        assert checkpointer.save(metrics={"loss": 1.0}) is None
    assert "step 1 is saved already, without these metrics" in caplog.text


def test_a_delta_has_labels_too(home: Home) -> None:
    """REQ-MAN-005, REQ-DEL-001"""
    weights, place = {"w": np.arange(100_000.0)}, home.path()
    with Checkpointer(
        place, ckptfmt.State(weights=weights), delta={"mode": "smallest", "restore_budget": 100}
    ) as made:
        for step in (1, 2):
            weights["w"][step] += 1
            made.save(step=step, metrics={"loss": step})
    (_, first), (_, second) = [
        (entry.step, entry.manifest)
        for entry in list_checkpoints(open_store(place, writable=False))
    ]
    assert first is not None
    assert second is not None
    assert (first.profile, first.features) == ("full", ("labels",))
    assert second.profile == "delta"
    assert {"deltas", "labels"} <= set(second.features)
    assert ckptfmt.validate(place)
    full = home.store()
    compact(place, out=full)
    with ckptfmt.open(full) as checkpoint:
        assert checkpoint.manifest.labels == second.labels
        assert checkpoint.manifest.profile == "full"


def test_retention_keeps_the_last_and_every_nth(store: Any) -> None:
    run(store, 9, every=1, keep=2, keep_every=4)
    assert committed(store) == [(4, 1), (8, 1), (9, 1)]
    retired = [entry for entry in list_checkpoints(store) if isinstance(entry.register, Tombstone)]
    assert [entry.step for entry in retired] == [1, 2, 3, 5, 6, 7]
    assert ckptfmt.validate(store).valid


def test_rollback_by_hand_stays_rolled_back(store: Any) -> None:
    run(store, 6, every=2)
    _, checkpointer, done = run(store, 3, resume="step-00000002-l0001")
    assert done == [2]
    assert checkpointer.launch is not None
    assert checkpointer.launch.chosen_by == "hand"
    _, _, done = run(store, 5)
    assert done == [3, 4]


def test_rollback_holds_even_if_the_launch_saved_nothing(store: Any) -> None:
    run(store, 6, every=2)
    trainer = Trainer()
    with Checkpointer(store, trainer.state, resume="step-00000002-l0001") as checkpointer:
        assert checkpointer.step == 2
    _, _, done = run(store, 4)
    assert done == [2, 3]


def test_fresh_start_ignores_what_is_there(store: Any) -> None:
    run(store, 3)
    _, _, done = run(store, 2, resume="fresh")
    assert done == [0, 1]


def test_unknown_checkpoint_by_hand_is_refused(store: Any) -> None:
    run(store, 3)
    with pytest.raises(CkptError) as caught:
        run(store, 4, resume="step-00000009-l0001")
    assert caught.value.code == Code.NOT_COMMITTED


def test_damaged_newest_is_passed_over_by_name_and_recorded(store: Any) -> None:
    run(store, 6, every=2)
    damage(store, "step-00000006-l0001/weights-")
    _, checkpointer, done = run(store, 7)
    assert done == [4, 5, 6]
    assert checkpointer.launch is not None
    assert checkpointer.launch.chosen_by == "fallback"
    assert checkpointer.launch.resume_from is not None
    assert checkpointer.launch.resume_from.name == "step-00000004-l0001"
    assert "step-00000006-l0001" in checkpointer.passed_over[0]


def test_run_without_a_valid_checkpoint_is_an_error_and_not_a_fresh_start(store: Any) -> None:
    run(store, 2)
    damage(store, "step-00000002-l0001/index-", lambda _: b"")
    with pytest.raises(CkptError) as caught:
        run(store, 3)
    assert caught.value.code == Code.NO_VALID_CHECKPOINT


def test_process_that_was_thought_dead_is_fenced_at_its_next_save(store: Any) -> None:
    """REQ-RUN-004."""
    zombie = Trainer()
    with Checkpointer(store, zombie.state) as old:
        run(store, 2)
        old.step = 5
        handle = old.save()
        assert handle is not None
        with pytest.raises(FencedError) as caught:
            handle.wait()
        old.step = 6
        with pytest.raises(FencedError):  # once more, for whoever doesn't wait
            old.save()
    assert caught.value.code == Code.FENCED
    assert committed(store) == [(2, 2)]


class SavingStore(HookedStore):
    """A store in which an old saver is at work until it is looked for a second time; its step is committed by then."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.holding = contextlib.ExitStack()
        self.holding.enter_context(inner.hold(f"{SAVERS}/0001-00000-{'a' * 16}"))
        self.look_count = 0

    def before(self, operation: Operation) -> None:
        if operation.op == "list_held":
            self.look_count += 1
            if self.look_count == 2:
                inner: Any = self._inner
                held = capture(Trainer().state, worker=0, worker_count=1)
                place = inner.at("step-00000009-l0001")
                builders.save(place, held, run_id=open_run(inner).run_id, step=9, launch=1)
                self.holding.close()


def test_launch_waits_for_what_an_old_saver_has_in_its_hands(store: Any) -> None:
    """REQ-RUN-018."""
    run(store, 2, saver="inline")
    with Checkpointer(SavingStore(store), Trainer().state, saver="inline") as checkpointer:
        checkpointer.restore()
        assert checkpointer.step == 9


def test_launch_says_what_it_waits_for_and_for_how_long(
    store: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """REQ-RUN-018: before it stands still."""
    run(store, 2, saver="inline")
    with Checkpointer(SavingStore(store), Trainer().state, saver="inline", deadline_s=120):
        assert (
            caplog.messages[0]
            == "waiting at most 60 s for the saves that launch 1 (writer 0) has in hand"
        )


def test_launch_that_gives_up_waiting_says_what_it_passed_over(store: Any) -> None:
    """REQ-RUN-018: a saver that hangs keeps no run from going on, and nobody believes that nothing was left behind."""
    run(store, 2, saver="inline")
    with store.hold(f"{SAVERS}/0001-00003-{'a' * 16}"):
        _, checkpointer, done = run(store, 4, saver="inline", deadline_s=0.02)
    assert done == [2, 3]
    assert checkpointer.passed_over == [
        "the saves of launch 1 (writer 3) weren't committed within 0.01 s"
    ]


def test_run_of_a_newer_program_is_left_as_it_is(store: Any) -> None:
    """REQ-VER-003: what refers to its checkpoints, only that one knows."""
    store.create(RUN_NAME, [RunRecord(run_id="a" * 32, writer_features=("me.packs",)).dump()])
    with pytest.raises(CkptError) as caught:
        run(store, 2, saver="inline")
    assert caught.value.code == Code.FEATURE_UNSUPPORTED
    assert store.list("") == [RUN_NAME]


def test_saving_a_step_twice_does_nothing(store: Any) -> None:
    trainer = Trainer()
    with Checkpointer(store, trainer.state) as checkpointer:
        checkpointer.step = 3
        assert checkpointer.save() is not None
        assert checkpointer.save() is None
    assert committed(store) == [(3, 1)]


def test_sampler_commits_with_the_step(store: Any) -> None:
    def start(total: int) -> list[list[int]]:
        sampler = ckptfmt.Sampler(10, global_batch=4, seed=7, worker=(0, 1))
        with Checkpointer(
            store, ckptfmt.State(weights={"w": np.zeros(1)}, data=sampler), every=2
        ) as checkpointer:
            batches = iter(sampler)
            return [next(batches) for _ in checkpointer.steps(total)]

    interrupted = start(3) + start(6)
    uninterrupted = list(
        itertools.islice(iter(ckptfmt.Sampler(10, global_batch=4, seed=7, worker=(0, 1))), 6)
    )
    assert interrupted == uninterrupted


def test_a_mixture_with_a_skip_goes_on_where_it_was(store: Any) -> None:
    def make() -> ckptfmt.Sampler:
        mixture = {0: {"books": 3, "code": 1}, 8: {"books": 1, "code": 3}}
        return ckptfmt.Sampler(
            {"books": 10, "code": 5}, mixture=mixture, global_batch=4, worker=(0, 1)
        )

    def start(total: int, *, skip_at: int | None = None) -> list[list[Any]]:
        sampler, seen = make(), []
        with Checkpointer(
            store, ckptfmt.State(weights={"w": np.zeros(1)}, data=sampler), every=2
        ) as checkpointer:
            for step in checkpointer.steps(total):
                if step == skip_at:
                    sampler.skip(samples=[1, 2], source="code", policy="shift", reason="corrupt")
                seen.append(sampler.indices(step))
        return seen

    uninterrupted = make()
    uninterrupted.commit(2)
    uninterrupted.skip(samples=[1, 2], source="code", policy="shift")
    assert start(3, skip_at=2) + start(8) == [uninterrupted.indices(step) for step in range(8)]


def test_what_cannot_be_saved_is_refused_before_the_first_step(store: Any) -> None:
    state = ckptfmt.State(weights={"w": np.zeros(1)}, extra={"socket": object()})
    done: list[int] = []
    with (
        pytest.raises(CkptError, match="socket") as caught,
        Checkpointer(store, state) as checkpointer,
    ):
        done.extend(checkpointer.steps(3))
    assert (caught.value.code, done) == (Code.STATE_UNSUPPORTED, [])


@pytest.mark.parametrize("every", [0, -1, True, 1.5, "5", "min", "0s", "5 days", "-1s"])
def test_cadence_that_means_nothing_is_refused(every: Any) -> None:
    with pytest.raises(CkptError) as caught:
        Checkpointer(MemoryStore(), Trainer().state, every=every)
    assert caught.value.code == Code.ARGUMENT


@pytest.mark.parametrize("keep", [0, -1, True, 1.5])
def test_retention_that_means_nothing_is_refused(keep: Any) -> None:
    with pytest.raises(CkptError) as caught:
        Checkpointer(MemoryStore(), Trainer().state, keep=keep)
    assert caught.value.code == Code.ARGUMENT


def test_writers_with_clocks_that_disagree_save_the_same_steps() -> None:
    """REQ-CMT-001."""
    store, allgather = MemoryStore(), Allgather(3)

    def body(writer: int) -> list[int]:
        weights = {"w": np.zeros(2)}
        checkpointer = Checkpointer(
            store,
            ckptfmt.State(weights=weights),
            every="10s",
            writer=(writer, 3),
            agree=allgather.of(writer),
        )
        # A step takes a second. Writer 1's clock runs twenty times as fast, writer 2's stands
        # still.
        checkpointer._pace.clock = lambda: checkpointer.step * (1.0, 20.0, 0.0)[writer]
        saves: list[int] = []
        checkpointer_save = checkpointer._save

        def save(**options: Any) -> Any:
            saves.append(checkpointer.step)
            return checkpointer_save(**options)

        checkpointer._save = save  # type: ignore[method-assign]
        with checkpointer:
            for _ in checkpointer.steps(60):
                weights["w"] += 1
        return saves

    first, second, third = run_writers(3, body)
    assert first == second == third
    assert first == [10, 20, 30, 40, 50, 60]
    assert [step for step, _ in committed(store)] == first


def test_a_save_of_one_writer_alone_is_refused_on_all_of_them() -> None:
    """REQ-CMT-001: also on those who ask meanwhile whether the time has come."""
    store, allgather = MemoryStore(), Allgather(2)

    def body(writer: int) -> Code:
        state = ckptfmt.State(weights={"w": np.zeros(2)})
        checkpointer = Checkpointer(
            store, state, every="10s", writer=(writer, 2), agree=allgather.of(writer)
        )
        checkpointer._pace.clock = lambda: float(checkpointer.step)

        def train() -> None:
            with checkpointer:
                for number in checkpointer.steps(20):
                    if number == 5 and writer == 0:
                        checkpointer.save()

        with pytest.raises(CkptError) as caught:
            train()
        return caught.value.code

    assert run_writers(2, body) == [Code.WRITERS_DIVERGED, Code.WRITERS_DIVERGED]


def test_time_is_asked_for_rarely_and_not_at_every_step() -> None:
    asked = 0

    def gather(value: bytes) -> list[bytes]:
        nonlocal asked
        asked += 1
        return [value]

    checkpointer = Checkpointer(MemoryStore(), Trainer().state, every="1000s")
    checkpointer._group._gather = gather
    checkpointer._group.writer_count = 1
    now = itertools.count()
    checkpointer._pace.clock = lambda: float(next(now))
    checks = []
    checkpointer.restore()
    for step in range(1, 900):
        checkpointer.step = step
        before = checkpointer._pace.timer.next_step
        assert not checkpointer._pace.is_due(checkpointer.step, 1, will_save=False)
        if step >= before:
            checks.append(step)
    assert len(checks) < 30


def test_save_within_the_body_is_taken_when_the_step_is_over(store: Any) -> None:
    """Of step 3's weights none may be called those of step 2."""
    trainer = Trainer()
    with Checkpointer(store, trainer.state, every=5) as checkpointer:
        for number in checkpointer.steps(10):
            trainer.step(number)
            if number == 2:
                assert checkpointer.save() is None
            if number == 3:
                break
    assert committed(store) == [(3, 1)]
    resumed, _, done = run(store, 10)
    assert done == [3, 4, 5, 6, 7, 8, 9]
    assert resumed.weights["w"].tobytes() == np.full(3, 55.0).tobytes()


def test_save_by_hand_does_not_put_off_the_next_by_time(store: Any) -> None:
    trainer = Trainer()
    with Checkpointer(store, trainer.state, every="10s") as checkpointer:
        checkpointer._pace.clock = lambda: float(checkpointer.step)
        for number in checkpointer.steps(40):
            trainer.step(number)
            if number == 8:
                checkpointer.save()
    assert [step for step, _ in committed(store)] == [9, 19, 29, 39, 40]


def test_restore_that_failed_is_no_fresh_start(store: Any) -> None:
    run(store, 3)
    other = ckptfmt.State(weights={"w": np.zeros(3), "v": np.zeros(1)}, data={"position": 0})
    checkpointer = Checkpointer(store, other)
    for code in (Code.LEAF_MISSING, Code.ARGUMENT):
        with pytest.raises(CkptError) as caught:
            checkpointer.restore()
        assert caught.value.code == code


@pytest.mark.parametrize("what", ["launches", "launches/0002.json", "run.json"])
def test_run_that_lost_a_record_is_refused_and_not_begun_anew(store: Any, what: str) -> None:
    """REQ-RUN-015"""
    run(store, 2)
    run(store, 4)
    for path in [path for path in store.list("") if path.startswith(what)]:
        store.delete(path)
    store.remove_directory("launches")
    for action in (lambda: run(store, 6), lambda: ckptfmt.load(store)):
        if what == "run.json" and action.__code__.co_names[0] != "run":
            continue
        with pytest.raises(CkptError) as caught:
            action()
        assert caught.value.code == Code.FILE_MISSING
    assert not ckptfmt.validate(store).valid


def test_chosen_checkpoint_that_is_damaged_leaves_no_record(store: Any) -> None:
    run(store, 4, every=2)
    damage(store, "step-00000002-l0001/index-", lambda _: b"")
    with pytest.raises(CkptError) as caught:
        run(store, 6, resume="step-00000002-l0001")
    assert caught.value.code == Code.FILE_NBYTES
    assert store.list_names("launches") == ["0001.json"]


def test_checkpoint_that_a_record_names_and_that_is_lost_is_reported(store: Any) -> None:
    """REQ-RUN-006, REQ-RUN-007"""
    run(store, 4, every=2)
    with Checkpointer(store, Trainer().state):
        pass
    store.delete("step-00000004-l0001/manifest.json")
    _, checkpointer, done = run(store, 5)
    assert done == [2, 3, 4]
    assert checkpointer.launch is not None
    assert checkpointer.launch.chosen_by == "fallback"
    assert "step-00000004-l0001" in checkpointer.passed_over[0]
    assert find(store, "step-00000004-l0001/weights-")


def test_directory_is_a_run_or_a_checkpoint_and_not_both(home: Home) -> None:
    """REQ-RUN-016"""
    store, lone = home.store(), home.store()
    run(store, 2, saver="inline")
    ckptfmt.save(lone, ckptfmt.State(data=1), step=1)
    for action in (
        lambda: ckptfmt.save(store, ckptfmt.State(data=1), step=1),
        lambda: run(lone, 2, saver="inline"),
    ):
        with pytest.raises(CkptError) as caught:
            action()
        assert caught.value.code == Code.CHECKPOINT_EXISTS


def test_sampler_in_a_mapping_commits_too(store: Any) -> None:
    sampler = ckptfmt.Sampler(10, global_batch=4, seed=7, worker=(0, 1))
    state = ckptfmt.State(
        data={"train": sampler, "note": 1}, extra={"eval": ckptfmt.PerWorker(sampler)}
    )
    with Checkpointer(store, state) as checkpointer:
        for _ in checkpointer.steps(3):
            pass
    assert sampler.steps_done == 3
