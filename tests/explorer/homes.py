"""Jobs that meet in a run with three homes, some of which some jobs don't reach: every order of their steps.

Each home is a prefix of one store in memory. A job stops before each operation that another job can
see. A cut is an actor of its own: from its step on, a job doesn't reach a home.

The rules: ``fork``: an acknowledged save isn't in the lineage of the newest launch, and isn't the
last save of its launch or all jobs reach all homes; ``twice``: two launches have one number, or two
checkpoints one name; ``stuck``: a later job doesn't go on, or leaves the homes unequal;
``outcome``: an unexpected error, also of a job that resumes from what nobody saved.
"""

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, Final
from unittest import mock

from ckptfmt.documents.manifest import Reference, checkpoint_name, parse_checkpoint_name
from ckptfmt.documents.run import Launch
from ckptfmt.errors import CkptError, Code, err
from ckptfmt.run import elections, homes, lineage, votes
from ckptfmt.run.elections import RunHomes
from ckptfmt.run.homes import _FATAL, Answers, HomePlace, check_member
from ckptfmt.run.mirror import mirror_run
from ckptfmt.run.retention import Retention, tidy_up
from ckptfmt.store.memory import MemoryStore
from ckptfmt.store.protocol import Store
from tests.explorer import content
from tests.explorer.judge import Violation
from tests.explorer.schedule import Actor, GatedStore
from tests.stores.hooked import Operation

NAMES: Final = ("a", "b", "c")
#: The codes that an overtaken job may end with: a newer launch has cleaned up at its home.
_OVERTAKEN: Final = frozenset({Code.CHECKPOINT_ABORTED, Code.CHECKPOINT_RETIRED, Code.FILE_MISSING})
#: The codes that a job may end with when it is overtaken, or doesn't reach enough homes.
_REFUSALS: Final = frozenset(
    {
        Code.FENCED,
        Code.HOMES_AWAY,
        Code.HOME_BEHIND,
        Code.STORE_NO_ANSWER,
        Code.COMMIT_UNKNOWN,
    }
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One training job: it begins a launch, resumes, and saves.

    Attributes:
        first: number of its first attempt; attempts have numbers of their own.
        away: the homes that it never reaches.
        cut: a home that it doesn't reach from some moment on; empty for none.
        save_count: number of saves.
        keep: number of checkpoints that stay at each home; None for all.
        resume: see `Checkpointer`.
        copies_late: whether its saves are copied at some moment by another actor, and never again.
    """

    first: int
    away: str = ""
    cut: str = ""
    save_count: int = 2
    keep: int | None = None
    resume: str = "auto"
    copies_late: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Saved:
    """A save that was acknowledged as committed."""

    launch: int
    step: int
    digest: str

    @property
    def name(self) -> str:
        """The name of the checkpoint."""
        return checkpoint_name(self.step, self.launch)


#: Jobs that meet. In each case the run has a checkpoint of step 10 at each home.
CASES: Final[Mapping[str, Mapping[str, Job]]] = {
    "first_home_lost": {"old": Job(first=0x10), "new": Job(first=0x20, away="a")},
    "old_job_cut_off": {"old": Job(first=0x10, away="b"), "new": Job(first=0x20, away="a")},
    "old_job_loses_a_home": {"old": Job(first=0x10, cut="b"), "new": Job(first=0x20, away="a")},
    "all_reach_all": {"one": Job(first=0x10, save_count=1), "two": Job(first=0x20, save_count=1)},
    "each_its_own_majority": {
        "one": Job(first=0x10, away="c", save_count=1),
        "two": Job(first=0x20, away="a", save_count=1),
    },
    "no_majority": {
        "one": Job(first=0x10, away="bc", save_count=1),
        "two": Job(first=0x20, away="ab", save_count=1),
    },
    "old_job_retires": {
        "old": Job(first=0x10, keep=1),
        "new": Job(first=0x20, away="a", keep=1, save_count=1),
    },
    "copies_are_late": {
        "old": Job(first=0x10, copies_late=True),
        "new": Job(first=0x20, away="a", save_count=1),
    },
    "begun_afresh": {
        "old": Job(first=0x10),
        "new": Job(first=0x20, resume="fresh", save_count=1),
    },
}
#: The start of a run: no home has anything.
NEW_RUN: Final[Mapping[str, Job]] = {
    "one": Job(first=0x10, save_count=1),
    "two": Job(first=0x20, save_count=1),
}


class Unreachable:
    """A store that doesn't answer."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_remote = False

    def __getattr__(self, operation: str) -> Any:
        raise err(Code.STORE_NO_ANSWER, f"{operation}: no answer", where=self.name)


class HomeStore(GatedStore):
    """The store of a job, which stops before what another job can see."""

    def __init__(
        self, inner: MemoryStore, actor: Callable[[], Actor], is_cut: Callable[[str], bool]
    ) -> None:
        super().__init__(inner, actor)
        self._is_cut = is_cut

    def before(self, operation: Operation) -> None:
        """Wait for the job's turn before a change, a listing, and the read of a register."""
        reads = operation.op.startswith(("read", "nbytes", "open_ranges", "waits"))
        if not reads or operation.path.endswith("manifest.json"):
            super().before(operation)
        if self._is_cut(operation.path[:1]):
            raise err(Code.STORE_NO_ANSWER, "no answer", where=operation.path)


def ask_in_turn(
    asked: Mapping[int, HomePlace],
    question: Callable[[Store], Any],
    *,
    member_of: str = "",
    **_: Any,
) -> Answers[Any]:
    """Ask the homes one after the other, once, in the thread of the job: instead of `ask`."""
    answers: Answers[Any] = Answers()
    for number, home in asked.items():
        try:
            store = home.open()
            if member_of:
                check_member(store, member_of, home.home_id)
            answers.values[number] = question(store)
        except CkptError as error:
            if error.code in _FATAL:
                raise error.below(home.name) from error
            answers.errors[number] = error
    return answers


@contextlib.contextmanager
def in_turn() -> Iterator[None]:
    """Let jobs ask in turn and without pauses, with nonces that follow from the schedule."""
    with (
        content.deterministic(),
        mock.patch.object(votes, "ask", ask_in_turn),
        mock.patch.object(elections, "ask", ask_in_turn),
        mock.patch.object(elections, "_TRY_PAUSE_S", 0.0),
        mock.patch.object(elections, "secrets", vars(lineage)["secrets"]),
        mock.patch.object(homes, "secrets", vars(lineage)["secrets"]),
    ):
        yield


def homes_of(root: Any, away: str = "") -> RunHomes:
    """Return the homes of the run in a store, as a job that doesn't reach some of them sees them."""
    found = [
        HomePlace(Unreachable(name) if name in away else root.at(name), name) for name in NAMES
    ]
    return RunHomes(found, away_after_s=0.0)


def run_job(
    root: Any,
    job: Job,
    tell: Callable[[Saved], None],
    tell_begun: Callable[[Launch], None] = lambda _: None,
) -> Launch:
    """Do what a `Checkpointer` and its saver do with homes, in one thread.

    Args:
        tell: called with each save that counts.
        tell_begun: called with the launch.
    """
    homes = homes_of(root, job.away)
    entry = homes.enter(resume=job.resume, writer_features=(), wait_s=0.0)
    home = homes.homes[entry.number].open()
    others = homes.beside(entry.number)
    run = lineage.read_known_run(home)
    launch, checkpoint = lineage.begin_launch(
        home, run, fresh=job.resume == "fresh", elect=homes.elect
    )
    tell_begun(launch)
    copies = () if job.copies_late else others.homes
    step = 0
    if checkpoint is not None:
        checkpoint.close()
        assert launch.resume_from is not None
        loaded = content.load(home.at(launch.resume_from.name), digest=launch.resume_from.digest)
        assert loaded.exact, "resumed from what nobody saved"
        step = loaded.step
    for number in range(job.save_count):
        step += 1
        lineage.check_not_fenced(home, launch.launch)
        _copy(home, copies, launch, job.keep)
        others.await_copy(
            home, run.run_id, launch.launch, deadline_s=0.0, gives_up=threading.Event()
        )
        manifest = content.save(home, content.origin_of(launch, step, job.first + number))
        others.confirm(home, run.run_id, launch.launch)
        tell(Saved(launch.launch, step, manifest.digest))
        _tidy(home, launch, job.keep)
    _copy(home, copies, launch, job.keep)
    return launch


def _copy(home: Any, others: tuple[HomePlace, ...], launch: Launch, keep: int | None) -> None:
    """Copy the run to the other homes, as the threads of `HomeCopies` do."""
    for other in others:
        with contextlib.suppress(CkptError):
            store = other.open()
            mirror_run(home, store, are_homes=True)
            _tidy(store, launch, keep, aborts=False)


def _tidy(store: Any, launch: Launch, keep: int | None, *, aborts: bool = True) -> None:
    if keep is not None:
        run = lineage.read_known_run(store)
        tidy_up(store, run, launch=launch.launch, retention=Retention(newest=keep), aborts=aborts)


class HomesScene:
    """Jobs over the homes of one run.

    Args:
        jobs: the jobs by name.
        initial: contents of the store at the start.
        judged: verdicts that are known already, by files and acknowledged saves. Reads change
            neither.
    """

    def __init__(
        self,
        jobs: Mapping[str, Job],
        initial: Mapping[str, bytes],
        judged: dict[Hashable, list[Violation]] | None = None,
    ) -> None:
        self._judged = {} if judged is None else judged
        self.actors: dict[str, Actor] = {}
        self.saved: list[Saved] = []
        self._begun: dict[str, Launch] = {}
        self._jobs = jobs
        self._store = MemoryStore.from_snapshot(initial)
        self._cuts: set[tuple[str, str]] = set()
        for name, job in jobs.items():
            store = HomeStore(
                self._store,
                functools.partial(self.actors.__getitem__, name),
                functools.partial(self._is_cut, name),
            )
            begin = functools.partial(self._begun.__setitem__, name)
            self.actors[name] = Actor(
                name, functools.partial(run_job, store, job, self.saved.append, begin)
            )
            if job.cut:
                cut = functools.partial(self._cuts.add, (name, job.cut))
                self.actors[f"cut of {name}"] = Actor(f"cut of {name}", cut)
            if job.copies_late:
                copies = functools.partial(self._copy_once, name)
                self.actors[f"copies of {name}"] = Actor(f"copies of {name}", copies)

    def key(self) -> Hashable:
        """Return the contents of all homes, the cuts, and what was acknowledged."""
        return frozenset(self._store.snapshot().items()), frozenset(self._cuts), tuple(self.saved)

    def judge(self) -> list[Violation]:
        """Judge the end of the jobs, and the job after them."""
        newest = max((launch.launch for launch in self._begun.values()), default=0)
        found = []
        for name, actor in self.actors.items():
            error = actor.outcome.error if actor.outcome is not None else None
            launch = self._begun.get(name)
            is_overtaken = launch is not None and launch.launch < newest
            allowed = _REFUSALS | (_OVERTAKEN if is_overtaken else frozenset())
            if error is not None and getattr(error, "code", None) not in allowed:
                found.append(Violation("outcome", f"{name}: {error!r}"))
        return found + self.judge_state()

    def judge_state(self) -> list[Violation]:
        """Judge the homes as they are now, if all jobs die: then a later job goes on."""
        may_lose = any(job.away or job.cut for job in self._jobs.values())
        files = self._store.snapshot()
        key = frozenset(files.items()), tuple(self.saved)
        if key not in self._judged:
            with content.own_nonces("later"):
                self._judged[key] = judge(files, self.saved, may_lose=may_lose)
        return self._judged[key]

    def _is_cut(self, name: str, home: str) -> bool:
        return (name, home) in self._cuts

    def _copy_once(self, name: str) -> None:
        launch = self._begun.get(name)
        if launch is not None:
            homes = homes_of(self._store)
            _copy(homes.homes[0].open(), homes.homes[1:], launch, None)


def judge(files: Mapping[str, bytes], saved: list[Saved], *, may_lose: bool) -> list[Violation]:
    """Return what is wrong with homes, in which saves were acknowledged, and with a later job.

    Args:
        may_lose: whether a job didn't reach all homes, and so may lose another job's last save.
    """
    store = MemoryStore.from_snapshot(files)
    found = _judge_names(store) + _judge_lineage(store, saved, may_lose=may_lose)
    if found:
        return found
    told: list[Saved] = []
    try:
        run_job(store, Job(first=0x100, save_count=1), told.append)
    except Exception as error:  # noqa: BLE001
        return [Violation("stuck", f"a later job: {error!r}")]
    heads = {name: lineage.find_head(store.at(name))[1].digest for name in NAMES}
    if set(heads.values()) != {told[0].digest}:
        return [Violation("stuck", f"the homes have the heads {heads}, not {told[0]}")]
    return _judge_names(store) + _judge_lineage(store, [*saved, *told], may_lose=may_lose)


def _read(store: MemoryStore) -> tuple[dict[int, set[Launch]], dict[str, set[str]]]:
    """Return the launches by number, and the digests of committed checkpoints by name."""
    launches: dict[int, set[Launch]] = {}
    digests: dict[str, set[str]] = {}
    for name in NAMES:
        home = store.at(name)
        run = lineage.read_run(home)
        if run is None:
            continue
        for launch in lineage.list_launches(home, run):
            assert isinstance(launch, Launch)
            launches.setdefault(launch.launch, set()).add(launch)
        for entry in lineage.list_checkpoints(home, run, with_labels=False):
            digest = entry.digest
            if digest is not None:
                digests.setdefault(entry.name, set()).add(digest)
    return launches, digests


def _judge_names(store: MemoryStore) -> list[Violation]:
    launches, digests = _read(store)
    twice = [number for number, found in launches.items() if len(found) > 1]
    twice_named = [name for name, found in digests.items() if len(found) > 1]
    return [Violation("twice", f"{one}") for one in (*twice, *twice_named)]


def _judge_lineage(store: MemoryStore, saved: list[Saved], *, may_lose: bool) -> list[Violation]:
    """Judge where the acknowledged saves are, seen from the newest launch."""
    launches, digests = _read(store)
    found = [
        Violation("fork", f"{one} isn't at any home")
        for one in saved
        if one.digest not in digests.get(one.name, set())
    ]
    lost: dict[int, list[Saved]] = {}
    bounds = _bounds_of(launches)
    for one in saved:
        if one.launch not in bounds or one.step > bounds[one.launch]:
            lost.setdefault(one.launch, []).append(one)
    for launch, ones in lost.items():
        last = max((one for one in saved if one.launch == launch), key=lambda one: one.step)
        if not (may_lose and ones == [last]) and not _is_by_hand(launches, launch):
            found.append(Violation("fork", f"launch {launch} lost {ones}"))
    return found


def _is_by_hand(launches: Mapping[int, set[Launch]], number: int) -> bool:
    """Return whether a later launch was begun by hand, and may leave what it likes."""
    return any(
        one.chosen_by == "hand" and one.launch > number
        for found in launches.values()
        for one in found
    )


def _bounds_of(launches: Mapping[int, set[Launch]]) -> dict[int, float]:
    """Return each launch of the newest one's lineage, with the greatest step that counts."""
    bounds: dict[int, float] = {}
    number = max(launches, default=None)
    bound = float("inf")
    while number is not None and number not in bounds:
        bounds[number] = bound
        resume: Reference | None = next(iter(launches[number])).resume_from
        if resume is None:
            break
        place = parse_checkpoint_name(resume.name)
        assert place is not None
        bound, number = place
    return bounds


def prepare() -> Mapping[str, bytes]:
    """Return the contents of three homes with a checkpoint of step 1 at each of them."""
    store = MemoryStore()
    run_job(store, Job(first=0x1, save_count=1), lambda _: None)
    return store.snapshot()
