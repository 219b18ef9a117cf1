"""Runs with three homes: a launch goes on elsewhere by itself, and a majority decides which launch may commit."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import ckptfmt
from ckptfmt.documents.run import RUN_NAME, VOTES, Launch, Vote, launch_name
from ckptfmt.errors import CkptError, Code, err
from ckptfmt.run import homes as run_homes
from ckptfmt.run import votes
from ckptfmt.run.homes import HomePlace
from ckptfmt.run.lineage import (
    begin_launch,
    find_head,
    list_launches,
    open_run,
    read_known_run,
)
from ckptfmt.run.mirror import mirror_run, promote
from ckptfmt.run.votes import OtherHomes, list_vote_numbers
from ckptfmt.store import LocalStore
from ckptfmt.store.memory import MemoryStore
from ckptfmt.store.protocol import Store
from tests.loop.test_rewind import Training, undisturbed
from tests.stores.hooked import HookedStore, Operation

SAVERS = ["process", "thread", "inline"]
NAMES = ("a", "b", "c")
STEPS = 24


class Switched(HookedStore):
    """A store that doesn't answer one job while its switch is off.

    Args:
        off: the names of the homes that don't answer.
    """

    def __init__(self, inner: Store, name: str, off: set[str]) -> None:
        super().__init__(inner)
        self.place = name
        self.off = off

    def before(self, operation: Operation) -> None:
        if self.place in self.off:
            raise err(Code.STORE_NO_ANSWER, "the test has switched it off", where=operation.path)


class Directories:
    """Three homes on the disk.

    Attributes:
        stores: the homes as the judge sees them: they always answer.
    """

    def __init__(self, folder: Path) -> None:
        self.paths = [folder / name for name in NAMES]
        self.stores = [LocalStore(path, writable=True) for path in self.paths]

    def of_job(self, off: set[str]) -> list[Switched]:
        """Return the homes as one job sees them."""
        pairs = zip(NAMES, self.stores, strict=True)
        return [Switched(store, name, off) for name, store in pairs]

    def ids(self) -> list[str]:
        """Return the ids of the homes."""
        found = map(run_homes.read_home, self.stores)
        return [home.home for home in found if home is not None]

    def seen_from_first(self, *others: HomePlace) -> OtherHomes:
        """Return the other homes as a launch at the first home sees them."""
        first, second, third = self.ids()
        given = others or (HomePlace.of(self.paths[1]), HomePlace.of(self.paths[2]))
        pairs = zip(given, (second, third), strict=True)
        return OtherHomes(
            homes=tuple(dataclasses.replace(home, home_id=home_id) for home, home_id in pairs),
            home_id=first,
            away_after_s=0.3,
        )

    def heads(self) -> list[tuple[str, str]]:
        """Return the head of each home."""
        found = [find_head(store) for store in self.stores]
        return [(name, manifest.digest) for name, manifest in found]

    def numbers(self) -> list[list[int]]:
        """Return the numbers of the launches at each home."""
        return [[one.launch for one in list_launches(store)] for store in self.stores]


@pytest.fixture
def homes(tmp_path: Path) -> Directories:
    return Directories(tmp_path)


def checkpointer_of(
    places: list[Any], training: Training, *, away_after_s: float = 5.0, **options: Any
) -> ckptfmt.Checkpointer:
    options.setdefault("every", 4)
    options.setdefault("saving", ckptfmt.Saving(saver="thread"))
    copies = [ckptfmt.Homes(places[1:], away_after_s=away_after_s)]
    return ckptfmt.Checkpointer(places[0], training.state, copies=copies, **options)


def train(places: list[Any], total: int, **options: Any) -> tuple[Training, ckptfmt.Checkpointer]:
    """Train up to a step, from where the run is."""
    training = Training()
    with checkpointer_of(places, training, **options) as checkpointer:
        batches = training.batches()
        for step in checkpointer.steps(total):
            training.train(step, next(batches))
    return training, checkpointer


def wait_until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def have(paths: list[Path], step: int) -> bool:
    """Return whether all runs have a committed save of a step."""
    return all(any(one.step == step and one.digest for one in ckptfmt.Run(p).list()) for p in paths)


def states_of(events: list[Any]) -> list[tuple[int, str]]:
    """Return step and state of each event at the end of a save."""
    return [(event.step, event.kind) for event in events if event.kind != "staged"]


def code_of(action: Callable[[], object]) -> Code:
    with pytest.raises(CkptError) as caught:
        action()
    return caught.value.code


# --- saves ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("saver", SAVERS)
def test_each_home_has_the_whole_run(homes: Directories, saver: Any) -> None:
    right = undisturbed()
    saving = ckptfmt.Saving(saver=saver)
    train(homes.paths, 10, saving=saving)
    training, checkpointer = train(homes.paths, STEPS, saving=saving)

    assert training.bits() == right.bits()
    assert checkpointer.reports == ()
    assert checkpointer.launch is not None
    assert checkpointer.launch.launch == 2
    (head,) = set(homes.heads())
    assert head[0] == "step-00000024-l0002"
    assert homes.numbers() == [[1, 2]] * 3
    for path in homes.paths:
        assert not ckptfmt.validate(path).violations
        assert ckptfmt.load(path, Training().state, allow="missing").step == STEPS


def test_a_home_votes_for_one_launch_of_a_number(homes: Directories) -> None:
    """REQ-RUN-065."""
    train(homes.paths, 4)
    store = homes.stores[0]
    vote = votes.read_vote(store, 1)
    (launch,) = list_launches(store)
    assert isinstance(launch, Launch)
    ids = homes.ids()
    assert vote == Vote(
        run_id=launch.run_id, launch=1, nonce=launch.nonce, homes=tuple(sorted(ids))
    )

    other = dataclasses.replace(vote, nonce="0" * 32)
    assert votes.cast(store, vote) == 0
    assert votes.cast(store, other) == 1
    assert votes.read_vote(store, 1) == vote
    named = f"{VOTES}/{launch_name(2)}"
    assert code_of(lambda: Vote.parse(vote.dump(), where=named)) == Code.RUN_MISMATCH


def test_no_save_is_two_ahead_of_the_other_homes(homes: Directories) -> None:
    """REQ-RUN-068: with the second save, the first one must be at another home."""
    off: set[str] = set()
    training = Training()
    job = ckptfmt.Job(deadline_s=2.0)
    with (  # noqa: PT012
        pytest.raises(CkptError, match="step-00000004-l0001 isn't at another home") as caught,
        checkpointer_of(
            homes.of_job(off),
            training,
            away_after_s=0.3,
            job=job,
            saving=ckptfmt.Saving(saver="inline", failed_saves=0),
        ) as checkpointer,
    ):
        batches = training.batches()
        for step in checkpointer.steps(STEPS):
            training.train(step, next(batches))
            if step == 0:
                off |= {"b"}
                homes.stores[2].replace(RUN_NAME, b"damaged")  # no copy can be made
    assert caught.value.code == Code.HOME_BEHIND
    assert "reports" in caught.value.remedy
    assert any("MIRROR_BEHIND" in report for report in checkpointer.reports)
    assert find_head(homes.stores[0])[0] == "step-00000004-l0001"


def test_a_saver_without_a_trainer_waits_for_no_copies(homes: Directories) -> None:
    train(homes.paths, 4)
    for store in homes.stores[1:]:
        shutil.rmtree(Path(store.name) / "step-00000004-l0001")
    others = homes.seen_from_first()
    gives_up = threading.Event()
    gives_up.set()
    wait: Callable[[], None] = lambda: others.await_copy(  # noqa: E731
        homes.stores[0],
        read_known_run(homes.stores[0]).run_id,
        1,
        deadline_s=3600.0,
        gives_up=gives_up,
    )
    assert code_of(wait) == Code.HOME_BEHIND


# --- a home is away -------------------------------------------------------------------------------


def test_a_launch_goes_on_at_another_home(homes: Directories) -> None:
    right = undisturbed()
    train(homes.of_job(set()), 10)
    training, checkpointer = train(homes.of_job({"a"}), 18)
    assert checkpointer.launch is not None
    assert checkpointer.launch.launch == 2
    assert [report.partition(":")[0] for report in checkpointer.reports[:1]] == ["HOMES_AWAY"]
    assert homes.numbers() == [[1], [1, 2], [1, 2]]
    assert homes.heads()[0][0] == "step-00000010-l0001"

    # Back again, the old home is behind: the next launch doesn't begin there, and it is caught up.
    training, checkpointer = train(homes.of_job(set()), 20)
    assert [report.partition(":")[0] for report in checkpointer.reports] == ["HOME_BEHIND"]
    assert len(set(homes.heads())) == 1
    training, checkpointer = train(homes.of_job(set()), STEPS)
    assert checkpointer.reports == ()
    assert homes.numbers() == [[1, 2, 3, 4]] * 3
    assert len(set(homes.heads())) == 1
    assert training.bits() == right.bits()


def test_a_home_that_goes_away_amid_a_training_ends_no_training(homes: Directories) -> None:
    off: set[str] = set()
    training = Training()
    with checkpointer_of(homes.of_job(off), training) as checkpointer:
        batches = training.batches()
        for step in checkpointer.steps(STEPS):
            training.train(step, next(batches))
            if step == 5:
                off.add("b")
            if step == 17:
                off.clear()
    assert training.bits() == undisturbed().bits()
    assert len(set(homes.heads())) == 1


def test_without_a_majority_no_launch_begins(homes: Directories) -> None:
    """REQ-RUN-066."""
    train(homes.of_job(set()), 4)
    with pytest.raises(CkptError, match="1 of 3 homes of the run answer: ") as caught:
        train(homes.of_job({"a", "b"}), 8, away_after_s=0.2)
    assert caught.value.code == Code.HOMES_AWAY
    assert "empty place" in caught.value.remedy
    assert [list_vote_numbers(store) for store in homes.stores] == [[1]] * 3


def test_a_launch_without_the_other_homes_is_refused(homes: Directories) -> None:
    """REQ-RUN-066."""
    train(homes.paths, 4)
    training = Training()
    with pytest.raises(CkptError, match="several homes") as caught:
        ckptfmt.Checkpointer(homes.paths[1], training.state).restore()
    assert caught.value.code == Code.ARGUMENT
    assert "Homes([...])" in caught.value.remedy
    assert code_of(lambda: promote(homes.stores[1])) == Code.ARGUMENT
    assert homes.numbers() == [[1]] * 3


def test_the_number_of_a_launch_is_new_at_every_home(homes: Directories) -> None:
    """REQ-RUN-066: votes that came to nothing take a number, too."""
    train(homes.paths, 4)
    run = read_known_run(homes.stores[0])
    ids = tuple(sorted(homes.ids()))
    for number, store in zip((2, 2, 5), homes.stores, strict=True):
        nonce = f"{store.name[-1]:0>32}"
        votes.cast(store, Vote(run_id=run.run_id, launch=number, nonce=nonce, homes=ids))
    _, checkpointer = train(homes.paths, 8)
    assert checkpointer.launch is not None
    assert checkpointer.launch.launch == 6
    assert len(set(homes.heads())) == 1


# --- two jobs -------------------------------------------------------------------------------------


def test_a_job_that_was_taken_for_dead_commits_nothing_that_counts(homes: Directories) -> None:
    """REQ-RUN-067: its home still answers it, and has no newer launch."""
    off: set[str] = set()
    old = Training()
    events: list[Any] = []
    train(homes.of_job(set()), 4)
    with (  # noqa: PT012
        pytest.raises(CkptError) as caught,
        checkpointer_of(homes.of_job(off), old, on_save=events.append, every=3) as checkpointer,
    ):
        batches = old.batches()
        for step in checkpointer.steps(STEPS):
            old.train(step, next(batches))
            if step == 7:
                wait_until(lambda: (6, "committed") in states_of(events))
                train(homes.of_job({"a"}), 8)
                off.add("b")  # one of the two that voted for the newer launch is enough
    assert caught.value.code == Code.FENCED
    assert "launch 3 has the votes of the homes, and takes over from launch 2" in str(caught.value)
    assert states_of(events)[:2] == [(6, "committed"), (9, "failed")]
    assert all(state == "failed" for _, state in states_of(events)[1:])

    training, _ = train(homes.of_job(set()), STEPS)
    assert training.bits() == undisturbed().bits()
    assert len(set(homes.heads())) == 1
    # The commit that didn't count lies beside the lineage, at its home alone.
    assert [store.list_names("step-00000009-l0002") != [] for store in homes.stores] == [
        True, False, False,
    ]  # fmt: skip


def test_votes_of_a_minority_overtake_nobody(homes: Directories) -> None:
    """REQ-RUN-067: a launch that got one vote of three hasn't begun."""
    train(homes.paths, 4)
    run = read_known_run(homes.stores[0])
    others = homes.seen_from_first()
    vote = Vote(run_id=run.run_id, launch=2, nonce="1" * 32, homes=tuple(homes.ids()))
    votes.cast(homes.stores[2], vote)
    others.confirm(homes.stores[0], run.run_id, 1)
    # While a home is away, its vote may be the second one.
    cut = HomePlace(Switched(homes.stores[1], "b", {"b"}), "b")
    unsure = homes.seen_from_first(cut, others.homes[1])
    assert code_of(lambda: unsure.confirm(homes.stores[0], run.run_id, 1)) == Code.HOMES_AWAY
    votes.cast(homes.stores[1], vote)
    assert code_of(lambda: others.confirm(homes.stores[0], run.run_id, 1)) == Code.FENCED
    away = homes.seen_from_first(cut, cut)
    assert code_of(lambda: away.confirm(homes.stores[0], run.run_id, 1)) == Code.HOMES_AWAY


def test_a_place_without_the_run_confirms_nothing(homes: Directories) -> None:
    """REQ-RUN-067, REQ-RUN-070: an empty directory, such as a mount point, has no newer votes."""
    train(homes.paths, 4)
    run = read_known_run(homes.stores[0])
    empty = HomePlace(MemoryStore(), "empty")
    cut = HomePlace(Switched(homes.stores[2], "c", {"c"}), "c")
    others = homes.seen_from_first(empty, cut)
    assert code_of(lambda: others.confirm(homes.stores[0], run.run_id, 1)) == Code.HOMES_AWAY


@pytest.mark.parametrize("saver", ["thread", "inline"])
def test_a_rewind_gets_votes_of_its_own(homes: Directories, saver: Any) -> None:
    right = undisturbed()
    training = Training()
    saving = ckptfmt.Saving(saver=saver)
    with checkpointer_of(homes.paths, training, saving=saving) as checkpointer:
        batches = training.batches()
        for step in checkpointer.steps(STEPS):
            training.train(step, next(batches))
            if step == 9 and checkpointer.rewinds == 0:
                checkpointer.rewind()
    assert training.bits() == right.bits()
    assert homes.numbers() == [[1, 2]] * 3
    assert list_vote_numbers(homes.stores[0]) == [1, 2]
    assert len(set(homes.heads())) == 1


def test_a_rollback_by_hand_holds_at_every_home(homes: Directories) -> None:
    train(homes.of_job(set()), 10)
    _, checkpointer = train(homes.of_job({"a"}), 6, resume="step-00000004-l0001", every=None)
    assert checkpointer.launch is not None
    assert checkpointer.launch.chosen_by == "hand"
    # The first home has step 10, which was rolled back while it was away.
    training = Training()
    with checkpointer_of(homes.of_job(set()), training) as checkpointer:
        assert checkpointer.step == 6
    fresh, checkpointer = train(homes.of_job(set()), 4, resume="fresh")
    assert fresh.bits() == train_alone(4).bits()


def train_alone(total: int) -> Training:
    training = Training()
    with ckptfmt.Checkpointer(MemoryStore(), training.state) as checkpointer:
        batches = training.batches()
        for step in checkpointer.steps(total):
            training.train(step, next(batches))
    return training


# --- places that become homes ---------------------------------------------------------------------


def test_a_run_is_founded_while_all_homes_answer(homes: Directories) -> None:
    """REQ-RUN-070."""
    with pytest.raises(CkptError, match="Start once while all homes answer") as caught:
        train(homes.of_job({"c"}), 8, away_after_s=0.2)
    assert caught.value.code == Code.HOMES_AWAY
    assert [sorted(path.iterdir()) for path in homes.paths] == [[], [], []]
    train(homes.of_job(set()), 4)
    assert [read_known_run(store).writer_features for store in homes.stores] == [
        ("homes", "labels")
    ] * 3


def test_an_interrupted_founding_is_continued(homes: Directories) -> None:
    """REQ-RUN-070: no launch has begun without the votes of all homes."""
    run = open_run(homes.stores[0], writer_features=("homes", "labels"))
    first = run_homes.create_home(homes.stores[0], run.run_id)
    training, checkpointer = train(homes.of_job(set()), STEPS)
    assert checkpointer.reports == ()
    assert homes.ids()[0] == first
    assert training.bits() == undisturbed().bits()
    assert len(set(homes.heads())) == 1


@pytest.mark.parametrize("away", [set(), {"a"}])
def test_empty_places_decide_nothing(homes: Directories, away: set[str]) -> None:
    """REQ-RUN-070: a majority without the run knows nothing of it."""
    train(homes.of_job(set()), 4)
    for path in homes.paths[1:]:
        shutil.rmtree(path)
        path.mkdir()
    with pytest.raises(CkptError) as caught:
        train(homes.of_job(away), 8, away_after_s=0.2)
    assert caught.value.code == Code.HOMES_AWAY
    assert [sorted(path.iterdir()) for path in homes.paths[1:]] == [[], []]


def test_an_empty_place_replaces_a_lost_home(homes: Directories) -> None:
    """REQ-RUN-070: both other homes vote for the launch with the new home."""
    train(homes.of_job(set()), 4)
    before = homes.ids()
    shutil.rmtree(homes.paths[2])
    homes.paths[2].mkdir()
    with pytest.raises(CkptError, match="it isn't a home of the run") as caught:
        train(homes.of_job({"a"}), 6, away_after_s=0.3)  # the other home must vote, too
    assert caught.value.code == Code.HOMES_AWAY
    assert not (homes.paths[2] / "home.json").exists()
    _, checkpointer = train(homes.of_job(set()), 8)
    assert any("becomes a home of the run" in report for report in checkpointer.reports)
    assert homes.ids()[:2] == before[:2]
    assert homes.ids()[2] != before[2]
    found = list(map(run_homes.read_home, homes.stores))
    assert {one.homes for one in found if one} == {tuple(sorted(homes.ids()))}
    training, _ = train(homes.of_job({"a"}), STEPS)
    assert training.bits() == undisturbed().bits()


def test_two_lost_homes_are_replaced_by_hand(homes: Directories) -> None:
    """REQ-RUN-070: the remedy of the error."""
    train(homes.paths, 4)
    for path in homes.paths[1:]:
        shutil.rmtree(path)
        path.mkdir()
    run_homes._OPENED.clear()
    with pytest.raises(CkptError) as caught:
        train(homes.paths, 8)
    assert f"delete home.json at {homes.paths[0]}" in caught.value.remedy
    (homes.paths[0] / "home.json").unlink()
    training, _ = train(homes.paths, STEPS)
    assert training.bits() == undisturbed().bits()
    assert len(set(homes.heads())) == 1
    assert train(homes.paths, STEPS)[1].reports == ()


def test_a_home_that_is_another_place_for_one_machine(homes: Directories, tmp_path: Path) -> None:
    """REQ-RUN-070: an unmounted directory became a home; the place behind it isn't one any more."""
    train(homes.of_job(set()), 4)
    real = homes.stores[2]
    mount_point = LocalStore(tmp_path / "unmounted", writable=True)
    places = homes.of_job(set())
    train([*places[:2], Switched(mount_point, "c", set())], 8)  # there "c" is empty
    # The machine with the real place has the first home, and the other one has its own two.
    with pytest.raises(CkptError) as caught:
        train(homes.of_job({"b"}), 12, away_after_s=0.3)
    assert caught.value.code == Code.HOMES_AWAY
    assert real.list_names("launches") == ["0001.json"]
    training, _ = train([places[0], places[1], Switched(mount_point, "c", set())], STEPS)
    assert training.bits() == undisturbed().bits()


def test_a_missing_directory_is_away(homes: Directories) -> None:
    """A mount point may be missing: nothing is written in its place."""
    train(homes.paths, 4)
    shutil.rmtree(homes.paths[2])
    run_homes._OPENED.clear()
    _, checkpointer = train(homes.paths, 8, away_after_s=0.3)
    assert not homes.paths[2].exists()
    assert "the directory is missing" in checkpointer.reports[0]


def test_a_damaged_home_is_away(homes: Directories) -> None:
    train(homes.of_job(set()), 4)
    homes.stores[1].replace(RUN_NAME, b"damaged")
    _, checkpointer = train(homes.of_job(set()), 8)
    assert checkpointer.reports[0].startswith("HOMES_AWAY")
    assert find_head(homes.stores[0])[0] == find_head(homes.stores[2])[0]


def test_a_damaged_checkpoint_is_repaired_from_another_home(homes: Directories) -> None:
    train(homes.paths, 10)
    (shard,) = homes.paths[0].glob("step-00000010-l0001/weights-*")
    whole = shard.read_bytes()
    shard.write_bytes(bytes([*whole[:-1], whole[-1] ^ 1]))
    training, checkpointer = train(homes.paths, STEPS)
    assert checkpointer.passed_over == []
    assert checkpointer.launch is not None
    assert checkpointer.launch.resume_from is not None
    assert checkpointer.launch.resume_from.name == "step-00000010-l0001"
    assert training.bits() == undisturbed().bits()
    assert shard.read_bytes() == whole


def test_a_run_with_one_home_gets_two_more(homes: Directories) -> None:
    training = Training()
    with ckptfmt.Checkpointer(homes.paths[0], training.state, every=4) as checkpointer:
        batches = training.batches()
        for step in checkpointer.steps(10):
            training.train(step, next(batches))
    training, checkpointer = train(homes.paths, STEPS)
    assert training.bits() == undisturbed().bits()
    assert homes.numbers() == [[1, 2]] * 3
    assert len(set(homes.heads())) == 1


def test_a_wrong_name_ends_no_running_training(homes: Directories) -> None:
    train(homes.of_job(set()), 4)
    with pytest.raises(CkptError, match="no home that answers has") as caught:
        train(homes.of_job(set()), 8, resume="step-00000003-l0001")
    assert caught.value.code == Code.NOT_COMMITTED
    assert [list_vote_numbers(store) for store in homes.stores] == [[1]] * 3


def test_a_rewind_of_an_overtaken_job_is_refused(homes: Directories) -> None:
    """REQ-RUN-066: its home knows nothing of the newer launch."""
    train(homes.of_job(set()), 4)
    old = Training()
    job = ckptfmt.Job(deadline_s=5.0)
    with checkpointer_of(homes.of_job(set()), old, every=3, job=job) as checkpointer:
        batches = old.batches()
        for step in checkpointer.steps(STEPS):
            old.train(step, next(batches))
            if step == 7:
                train(homes.of_job({"a"}), 8, job=job)
                with pytest.raises(CkptError) as caught:
                    checkpointer.rewind()
                break
    assert caught.value.code == Code.FENCED
    training, _ = train(homes.of_job(set()), STEPS, job=job)
    assert training.bits() == undisturbed().bits()


def test_a_regroup_ends_no_newer_launch(homes: Directories) -> None:
    """REQ-RUN-004: the survivors of an old launch go on without a vote against the newest one."""
    training = Training()
    old = checkpointer_of(homes.of_job(set()), training, every=3)
    batches = training.batches()
    for step in old.steps(7):
        training.train(step, next(batches))
    newer = Training()
    with checkpointer_of(homes.of_job({"a"}), newer) as checkpointer:
        batches = newer.batches()
        for step in checkpointer.steps(STEPS):
            newer.train(step, next(batches))
            if step == 9:
                assert code_of(old.regroup) == Code.FENCED
    assert newer.bits() == undisturbed().bits()
    assert list_vote_numbers(homes.stores[1]) == [1, 2]
    with contextlib.suppress(CkptError):
        old.close()


@pytest.mark.parametrize("delta", ["off", "auto"])
def test_a_regroup_goes_on_at_another_home_and_at_the_first_again(
    homes: Directories, delta: Any
) -> None:
    off: set[str] = set()

    def has_all(step: int) -> bool:
        names = [name for name in NAMES if name not in off]
        return have([homes.paths[NAMES.index(name)] for name in names], step)

    training = Training()
    saving = ckptfmt.Saving(saver="thread", delta=delta)
    places = homes.of_job(off)
    with checkpointer_of(places, training, every=3, saving=saving) as checkpointer:
        # The second home has all saves while the first is away, and until it has caught up.
        for last_step, away, name in ((3, "", "a"), (9, "a", "b"), (15, "", "b"), (15, "", "a")):
            batches = training.batches()
            for step in checkpointer.steps(STEPS):
                if step > last_step:
                    break
                training.train(step, next(batches))
            wait_until(lambda: has_all(last_step))  # noqa: B023
            off.clear()
            off.update(away)
            checkpointer.regroup()
            assert checkpointer.step == last_step
            assert repr(str(homes.paths[NAMES.index(name)])) in repr(checkpointer)
            wait_until(lambda: has_all(last_step))  # noqa: B023
        batches = training.batches()
        for step in checkpointer.steps(STEPS):
            training.train(step, next(batches))
    assert training.bits() == undisturbed().bits()
    assert checkpointer.launch is not None
    assert checkpointer.launch.launch == 5
    assert len(set(homes.heads())) == 1
    assert list_vote_numbers(homes.stores[1]) == [1, 2, 3, 4, 5]


def test_a_failed_answer_stops_no_later_save(homes: Directories) -> None:
    """A commit without a confirmation is copied, and the next save waits for the copy."""
    off: set[str] = set()
    training = Training()
    events: list[Any] = []
    with checkpointer_of(
        homes.of_job(off),
        training,
        every=3,
        away_after_s=0.3,
        on_save=events.append,
        job=ckptfmt.Job(deadline_s=3.0),
    ) as checkpointer:
        batches = training.batches()
        for step in checkpointer.steps(STEPS):
            training.train(step, next(batches))
            if step == 6:
                wait_until(lambda: len(states_of(events)) == 2)
                off |= {"b", "c"}
            if step == 9:
                wait_until(lambda: len(states_of(events)) == 3)
                off.clear()
    assert states_of(events)[:3] == [(3, "committed"), (6, "committed"), (9, "failed")]
    assert states_of(events)[-1] == (STEPS, "committed")
    assert training.bits() == undisturbed().bits()
    assert len(set(homes.heads())) == 1


@pytest.mark.parametrize("place", [0, 2])
@pytest.mark.parametrize("launches", [1, 3])
def test_a_home_of_another_run_is_away(
    homes: Directories, tmp_path: Path, launches: int, place: int
) -> None:
    """The run of most places counts, whichever answers first and has more launches."""
    train(homes.paths, 4)
    other = Directories(tmp_path / "other")
    for number in range(launches):
        train(other.paths, 4 * number + 4)
    places = list(homes.paths)
    places[place] = other.paths[place]
    _, checkpointer = train(places, 8)
    assert "isn't a home of the run" in checkpointer.reports[0]
    assert len(set(other.heads())) == 1


def test_copies_between_homes(homes: Directories) -> None:
    """REQ-RUN-069."""
    train(homes.paths, 4)
    first, second, _ = homes.stores
    # A launch that only the second home knows is no reason to refuse, if a newer one is copied.
    run = read_known_run(first)

    def elect(number: int) -> Callable[..., Vote]:
        vote = Vote(run_id=run.run_id, launch=number, nonce=f"{number:032x}", homes=())
        return lambda *_: vote

    begin_launch(second, run, elect=elect(2))
    assert code_of(lambda: mirror_run(first, second, are_homes=True)) == Code.HOMES_DIVERGED
    begin_launch(first, run, elect=elect(3))
    assert code_of(lambda: mirror_run(first, second)) == Code.HOMES_DIVERGED
    mirror_run(first, second, are_homes=True)
    assert homes.numbers()[:2] == [[1, 3], [1, 2, 3]]
    # Two launches of one number are.
    path = f"launches/{launch_name(2)}"
    content = second.read(path, limit_nbytes=1 << 20)
    record = dataclasses.replace(Launch.parse(content, where=path), nonce="f" * 32)
    first.create(path, [record.dump()])
    assert code_of(lambda: mirror_run(first, second, are_homes=True)) == Code.HOMES_DIVERGED
    assert code_of(lambda: train(homes.paths, 8)) == Code.HOMES_DIVERGED


# --- options --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda: ckptfmt.Homes(["/b"]),
        lambda: ckptfmt.Homes(["/b", "/c", "/d"]),
        lambda: ckptfmt.Homes("/b"),
        lambda: ckptfmt.Homes(["/b", None]),  # type: ignore[list-item]
        lambda: ckptfmt.Homes(["/b", "/c"], away_after_s=0),
    ],
)
def test_options_that_make_no_sense(make: Callable[[], object]) -> None:
    assert code_of(make) == Code.ARGUMENT


def test_what_homes_cannot_be_combined_with(tmp_path: Path) -> None:
    homes = ckptfmt.Homes([tmp_path / "b", tmp_path / "c"])

    def make(*copies: Any, **options: Any) -> ckptfmt.Checkpointer:
        state = Training().state
        return ckptfmt.Checkpointer(tmp_path / "a", state, copies=copies, **options)

    assert code_of(lambda: make(homes, ckptfmt.Cache(tmp_path / "cache"))) == Code.ARGUMENT
    assert code_of(lambda: make(homes, homes)) == Code.ARGUMENT
    token = ckptfmt.Job(writer=(0, 2), agree="a-token")
    assert code_of(lambda: make(homes, job=token)) == Code.ARGUMENT
    same = ckptfmt.Homes([tmp_path / "a", tmp_path / "c"], away_after_s=1.0)
    assert code_of(lambda: make(same).choose()) == Code.ARGUMENT


def test_stores_in_memory_are_homes_too() -> None:
    stores = [MemoryStore() for _ in NAMES]
    training, _ = train(stores, STEPS)
    assert training.bits() == undisturbed().bits()
    assert len({find_head(store)[1].digest for store in stores}) == 1


@pytest.fixture(autouse=True)
def _forget_stores() -> Iterator[None]:
    yield
    run_homes._OPENED.clear()


def test_a_damaged_record_founds_no_second_run(homes: Directories) -> None:
    """REQ-RUN-070: an unreadable run.json isn't a missing one."""
    train(homes.paths, 4)
    for path in homes.paths[1:]:
        shutil.rmtree(path)
        path.mkdir()
    homes.stores[0].replace(RUN_NAME, b"damaged")
    run_homes._OPENED.clear()
    assert code_of(lambda: train(homes.paths, 8, away_after_s=0.3)) == Code.HOMES_AWAY
    assert [sorted(path.iterdir()) for path in homes.paths[1:]] == [[], []]


def test_the_first_start_makes_missing_directories_at_once(tmp_path: Path) -> None:
    paths = [tmp_path / "new" / name for name in NAMES]
    train(paths, 4, away_after_s=3600.0)  # a missing directory isn't waited for
    assert all((path / "home.json").exists() for path in paths)
