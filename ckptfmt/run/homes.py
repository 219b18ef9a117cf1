"""A run with several homes: the home at which a launch goes on, and the launch that may commit.

Each home holds the whole run. A launch commits at one of the homes, and its commits are copied to
the others. A home votes for a launch by a file that is created once. A launch begins with the votes
of a majority of the homes, and a commit counts once a majority shows no newer launch. Two
majorities have a home in common, so a launch sees each commit that counted before its votes, unless
the only home with the commit is away.

Spec: REQ-RUN-065 to REQ-RUN-070.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import os
import queue
import random
import secrets
import threading
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, Final, Generic, Self, TypeVar

from ckptfmt import limits
from ckptfmt.commit.decision import create_once, read_register
from ckptfmt.commit.waiting import describe_savers, wait_for_savers
from ckptfmt.documents.manifest import Manifest, Reference, Tombstone, checkpoint_name
from ckptfmt.documents.run import (
    LAUNCHES,
    RUN_NAME,
    VOTES,
    Launch,
    RunRecord,
    Vote,
    check_run_id,
    launch_name,
)
from ckptfmt.errors import CkptError, Code, StoreError, UnsupportedError, err
from ckptfmt.features import HOMES
from ckptfmt.run.lineage import (
    LostLaunch,
    RunEntry,
    check_records,
    check_writer_features,
    iter_lineage,
    list_checkpoints,
    list_launch_numbers,
    list_launches,
    list_places,
    list_vote_numbers,
    open_run,
    read_launch,
    read_run,
)
from ckptfmt.run.scrub import scrub_checkpoint
from ckptfmt.store import Address, LocalStore, address_of, check_apart, local_path, open_address
from ckptfmt.store.protocol import Store

T = TypeVar("T")

#: Pause before a silent home is asked again, in seconds: the first, and the longest.
_PAUSE_MIN_S: Final = 0.1
_PAUSE_MAX_S: Final = 5.0
#: Number of tries for the votes of a majority. Each try takes a new number.
_TRIES: Final = 16
#: Longest pause before the next try, in seconds: launches begun at once must fall out of step.
_TRY_PAUSE_S: Final = 0.5
#: Time after which a save waiting for a copy looks for a newer launch, in seconds: at first, and at
#: most.
_SLICE_MIN_S: Final = 2.0
_SLICE_MAX_S: Final = 30.0
#: Longest time of a home to list the run after an answer, as a multiple of `away_after_s`.
_LOOK_TIMES: Final = 10


@dataclasses.dataclass(frozen=True, slots=True)
class HomePlace:
    """A home of a run, opened only for a question: a home can't be opened while away.

    Attributes:
        address: address of the store, or a store without an address.
        name: name for messages.
    """

    address: Address | Store
    name: str

    @classmethod
    def of(cls, place: str | os.PathLike[str] | Store) -> Self:
        """Return the home at a directory, a URL, or a store rooted there."""
        if not isinstance(place, str | os.PathLike):
            return cls(address_of(place) or place, place.name)
        here = local_path(place)
        if here is None:
            return cls({"url": os.fspath(place)}, os.fspath(place))
        return cls(os.fsencode(os.path.abspath(here)), os.fspath(place))  # noqa: PTH100

    def open(self, *, makes: bool = False) -> Store:
        """Return the store for writing, opened at the first call in this process.

        Args:
            makes: whether to make a missing directory. A mount point may be missing, too.

        Raises: StoreError, also for a missing directory.
        """
        if not isinstance(self.address, bytes | dict):
            return self.address
        if isinstance(self.address, bytes) and not (makes or os.path.isdir(self.address)):  # noqa: PTH112
            raise err(Code.STORE_IO, _MISSING, where=self.name)
        key = repr(self.address)
        store = _OPENED.get(key)
        if store is None:
            store = _OPENED[key] = open_address(self.address, writable=True)
        return store

    def open_unasked(self) -> Store:
        """Return a store for the name alone, without a look at the place."""
        if isinstance(self.address, bytes):
            return LocalStore(os.fsdecode(self.address), writable=False)
        if isinstance(self.address, dict):
            return open_address(self.address, writable=False)
        return self.address

    @property
    def has_address(self) -> bool:
        """Whether any process of this machine can open the home."""
        return isinstance(self.address, bytes | dict)


#: The detail of the error of a missing directory.
_MISSING: Final = "the directory is missing; an empty directory would become a home"
#: The opened stores, by the text of their addresses.
_OPENED: Final[dict[str, Store]] = {}
#: The threads with questions, by the home's name, and the largest number of threads for a home.
_ASKING: Final[dict[str, list[threading.Thread]]] = {}
_ASKING_LOCK: Final = threading.Lock()
_ASKING_COUNT: Final = 32
#: Codes of errors despite a majority: the homes aren't homes of the same run, or a newer launch
#: has begun.
_FATAL: Final = frozenset({Code.RUN_MISMATCH, Code.HOMES_DIVERGED, Code.ARGUMENT, Code.FENCED})


@dataclasses.dataclass(slots=True)
class Answers(Generic[T]):
    """The answers of homes to a question, by the number of the home.

    Attributes:
        values: the answers.
        errors: the last error of each home without an answer so far.
    """

    values: dict[int, T] = dataclasses.field(default_factory=dict)
    errors: dict[int, CkptError] = dataclasses.field(default_factory=dict)


def ask(
    homes: Mapping[int, HomePlace],
    question: Callable[[Store], T],
    *,
    deadline_s: float,
    is_enough: Callable[[Mapping[int, T]], bool] = lambda _: False,
) -> Answers[T]:
    """Ask several homes at once, and again after a StoreError, until all have answered.

    A home with damaged documents has no answer either: a majority without damage goes on.

    Args:
        homes: homes by their numbers.
        question: called with the store of each home, in a thread of the home.
        deadline_s: longest wait in seconds. A home without an answer by then is away.
        is_enough: whether the answers so far are enough to end the wait.

    Raises: errors of `_FATAL`; exceptions except CkptError.
    """
    told: queue.SimpleQueue[tuple[int, T | None, BaseException | None]] = queue.SimpleQueue()
    end_s = time.monotonic() + deadline_s
    is_over = threading.Event()
    for number, home in homes.items():
        _start_asking(home, question, end_s, is_over, functools.partial(_tell, told, number))
    answers: Answers[T] = Answers()
    final: set[int] = set()
    try:
        while len(final) < len(homes) and not is_enough(answers.values):
            try:
                number, value, error = told.get(timeout=max(0.0, end_s - time.monotonic()))
            except queue.Empty:
                break
            if error is None:
                answers.errors.pop(number, None)
                answers.values[number] = value  # type: ignore[assignment]
                final.add(number)
                continue
            if not isinstance(error, CkptError):
                raise error
            if error.code in _FATAL or isinstance(error, UnsupportedError):
                raise error if error.code == Code.FENCED else error.below(homes[number].name)
            answers.errors[number] = error
            if not isinstance(error, StoreError):
                final.add(number)
    finally:
        is_over.set()
    return answers


def _tell(
    told: queue.SimpleQueue[tuple[int, T | None, BaseException | None]],
    number: int,
    value: T | None,
    error: BaseException | None,
) -> None:
    told.put((number, value, error))


def _start_asking(
    home: HomePlace,
    question: Callable[[Store], T],
    end_s: float,
    is_over: threading.Event,
    tell: Callable[[T | None, BaseException | None], None],
) -> None:
    """Ask a home in a thread, unless earlier questions to the home hang in their threads."""
    with _ASKING_LOCK:
        threads = _ASKING.setdefault(home.name, [])
        threads[:] = [thread for thread in threads if thread.is_alive()]
        if len(threads) >= _ASKING_COUNT:
            tell(None, err(Code.STORE_NO_ANSWER, "earlier requests have no answer yet"))
            return
        # A daemon: a request to an unresponsive store may take minutes.
        thread = threading.Thread(
            target=_keep_asking,
            args=(home, question, end_s, is_over, tell),
            name="ckptfmt-home",
            daemon=True,
        )
        thread.start()
        threads.append(thread)


def _keep_asking(
    home: HomePlace,
    question: Callable[[Store], T],
    end_s: float,
    is_over: threading.Event,
    tell: Callable[[T | None, BaseException | None], None],
) -> None:
    """Ask a home until an answer or the end of the time; every error is told."""
    pause_s = _PAUSE_MIN_S
    while True:
        try:
            value = question(home.open())
        except BaseException as error:  # noqa: BLE001
            tell(None, error)
            if not isinstance(error, StoreError) or time.monotonic() + pause_s >= end_s:
                return
        else:
            tell(value, None)
            return
        if is_over.wait(pause_s):
            return
        pause_s = min(2 * pause_s, _PAUSE_MAX_S)


def majority_of(count: int) -> int:
    """Return the smallest majority of so many homes.

    >>> majority_of(3), majority_of(4), majority_of(5)
    (2, 3, 3)
    """
    return count // 2 + 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OtherHomes:
    """The homes of a run beside the home at which a launch commits.

    Attributes:
        homes: the homes.
        away_after_s: time after which a silent home counts as away, in seconds.
    """

    homes: tuple[HomePlace, ...]
    away_after_s: float

    def as_dict(self) -> dict[str, Any]:
        """Return the homes as plain values; a store without an address stays a store."""
        homes = [[home.address, home.name] for home in self.homes]
        return {"homes": homes, "away_after_s": str(self.away_after_s)}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Self:
        """Return the homes of `as_dict`."""
        homes = tuple(HomePlace(address, name) for address, name in value["homes"])
        return cls(homes=homes, away_after_s=float(value["away_after_s"]))

    def await_copy(
        self,
        home: Store,
        run_id: str,
        launch: int,
        *,
        deadline_s: float,
        gives_up: threading.Event,
    ) -> None:
        """Wait until a majority of the homes has the save before the next commit of a launch.

        Args:
            home: the home at which the launch commits.
            deadline_s: longest wait in seconds.
            gives_up: ends the wait when set, as nobody copies any more.

        Raises: StoreError(HOME_BEHIND); FencedError(FENCED). Spec: REQ-RUN-068.
        """
        before = find_previous(home, launch)
        if before is None:
            return
        needed_count = majority_of(len(self.homes) + 1) - 1
        end_s = time.monotonic() + deadline_s
        slice_s = _SLICE_MIN_S
        while True:
            is_over = threading.Event()
            slice_s = min(slice_s, max(0.0, end_s - time.monotonic()))
            question = functools.partial(
                _await,
                run_id=run_id,
                reference=before,
                end_s=time.monotonic() + slice_s,
                is_over=is_over,
                gives_up=gives_up,
            )

            def is_enough(values: Mapping[int, bool]) -> bool:
                return sum(values.values()) >= needed_count

            answers = ask(
                dict(enumerate(self.homes)), question, deadline_s=slice_s, is_enough=is_enough
            )
            is_over.set()
            if is_enough(answers.values):
                return
            with contextlib.suppress(StoreError):  # a newer launch is why nobody copies
                self.confirm(home, run_id, launch)
            if gives_up.is_set() or time.monotonic() >= end_s:
                break
            slice_s = min(4 * max(slice_s, _SLICE_MIN_S), _SLICE_MAX_S)
        raise err(
            Code.HOME_BEHIND,
            f"{before.name} isn't at another home yet, and a commit before that could lose two"
            " saves with this home",
            where=home.name,
            requirement="REQ-RUN-068",
        )

    def confirm(self, home: Store, run_id: str, launch: int) -> None:
        """Check that no newer launch may have the votes of a majority.

        Called after a commit at `home`: the commit counts only if this method returns.

        Raises: FencedError(FENCED); StoreError(HOMES_AWAY). Spec: REQ-RUN-067.
        """
        homes = dict(enumerate((HomePlace(home, home.name), *self.homes)))
        check_votes(
            homes, run_id, launch, None, deadline_s=self.away_after_s, requirement="REQ-RUN-067"
        )


def check_votes(
    homes: Mapping[int, HomePlace],
    run_id: str,
    after: int,
    before: int | None,
    *,
    deadline_s: float,
    requirement: str,
) -> None:
    """Check that no launch between two launches may have the votes of a majority.

    Args:
        after, before: numbers of the launches; None for no launch behind.
        deadline_s: longest wait for a home in seconds.

    Raises: FencedError(FENCED); StoreError(HOMES_AWAY).
    """
    count = len(homes)

    def question(store: Store) -> dict[int, str]:
        _check_member(store, run_id)
        between = [
            number
            for number in list_vote_numbers(store)
            if number > after and (before is None or number < before)
        ]
        # A launch with a record has had the votes of a majority.
        begun = set(between).intersection(list_launch_numbers(store) if between else ())
        if begun:
            raise _overruled(after, max(begun), requirement)
        return {number: _nonce_of(store, number) for number in between}

    def is_enough(values: Mapping[int, dict[int, str]]) -> bool:
        if len(values) < majority_of(count):
            return False
        return _find_overruling(values.values(), count, count - len(values)) is None

    answers = ask(homes, question, deadline_s=deadline_s, is_enough=is_enough)
    if len(answers.values) < majority_of(count):
        raise _homes_away(homes, answers, requirement)
    newest = _find_overruling(answers.values.values(), count, 0)
    if newest is not None:
        raise _overruled(after, newest, requirement)
    if not is_enough(answers.values):  # a home that is away may have the deciding vote
        raise _homes_away(homes, answers, requirement)


def _overruled(launch: int, newest: int, requirement: str) -> CkptError:
    return err(
        Code.FENCED,
        f"launch {newest} has taken over from launch {launch}, at another home",
        where=f"{VOTES}/{launch_name(newest)}",
        requirement=requirement,
    )


def _find_overruling(
    seen: Iterable[Mapping[int, str]], count: int, unseen_count: int
) -> int | None:
    """Return the newest launch with the votes of a majority, some of which may be unseen; or None.

    A launch without a vote in the answers has no majority.

    Args:
        seen: numbers and nonces of the votes in each answer. An unreadable vote has an
            empty nonce, and counts for each launch of its number.
        count: number of homes.
        unseen_count: number of homes without an answer.
    """
    votes: dict[int, collections.Counter[str]] = {}
    for answer in seen:
        for number, nonce in answer.items():
            votes.setdefault(number, collections.Counter())[nonce] += 1
    found = []
    for number, nonces in votes.items():
        unread_count = nonces.pop("", 0)
        most = max(nonces.values(), default=0)
        if most + unread_count + unseen_count >= majority_of(count):
            found.append(number)
    return max(found, default=None)


def _nonce_of(store: Store, number: int) -> str:
    """Return the nonce of a vote; an empty text for an unreadable vote."""
    try:
        return read_vote(store, number).nonce
    except StoreError:
        raise
    except CkptError:
        return ""


def _check_member(store: Store, run_id: str) -> None:
    """Raise unless the store is a home of a run: a place without the run knows no votes.

    Raises: IntegrityError(FILE_MISSING); FormatError(RUN_MISMATCH). Spec: REQ-RUN-070.
    """
    run = read_run(store)
    if run is None:
        raise err(Code.FILE_MISSING, "no run is here yet", where=RUN_NAME)
    check_run_id(run_id, run.run_id, RUN_NAME)


def find_previous(home: Store, launch: int) -> Reference | None:
    """Return the newest commit of a launch at the home, else the checkpoint at the start."""
    steps = sorted((step for step, number in list_places(home) if number == launch), reverse=True)
    for step in steps:
        name = checkpoint_name(step, launch)
        register = read_register(home.at(name))
        if isinstance(register, Manifest):
            return Reference(name=name, digest=register.digest)
    return read_launch(home, launch).resume_from


def _has(store: Store, run_id: str, reference: Reference) -> bool:
    """Return whether a home has a checkpoint; a retired checkpoint doesn't count."""
    _check_member(store, run_id)
    register = read_register(store.at(reference.name))
    return isinstance(register, Manifest) and register.digest == reference.digest


def _await(
    store: Store,
    *,
    run_id: str,
    reference: Reference,
    end_s: float,
    is_over: threading.Event,
    gives_up: threading.Event,
) -> bool:
    """Wait for a checkpoint at a home, until a time or an event; return whether it is there."""
    pause_s = _PAUSE_MIN_S
    while not _has(store, run_id, reference):
        if time.monotonic() >= end_s or gives_up.is_set() or is_over.wait(pause_s):
            return False
        pause_s = min(2 * pause_s, 1.0)
    return True


# --- votes ----------------------------------------------------------------------------------------


def read_vote(store: Store, number: int) -> Vote:
    """Return a vote of a home. Raises: FormatError, IntegrityError."""
    path = f"{VOTES}/{launch_name(number)}"
    return Vote.parse(store.read(path, limit_nbytes=limits.JSON_NBYTES), where=path)


def _cast(store: Store, vote: Vote) -> int:
    """Vote for a launch at a home.

    Returns: 0, or the number of the newest launch with a vote, if another launch has this number.
    Raises: as `_check_member`; StoreError.
    """
    _check_member(store, vote.run_id)
    try:
        create_once(store, vote.path, content=vote.dump())
    except CkptError as error:
        if error.code != Code.COMMIT_CONFLICT:
            raise
        return max(list_vote_numbers(store))
    store.sync(VOTES)
    return 0


# --- the begin of a launch ------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class _View:
    """The contents of a home.

    Attributes:
        run: the run's record.
        launches, entries: see `list_launches` and `list_checkpoints`.
        newest: greatest number of a launch with a vote, a record or a checkpoint; 0 for none.
    """

    run: RunRecord
    launches: list[Launch | LostLaunch]
    entries: list[RunEntry]
    newest: int


def _probe(store: Store) -> None:
    """Find out whether a home answers."""
    store.list_names(VOTES)


def _look(store: Store) -> _View | None:
    """Return the contents of a home; None at a place without the run."""
    newest = max(list_vote_numbers(store), default=0)
    run = read_run(store)
    if run is None:
        return None
    launches = list_launches(store, run)
    entries = list_checkpoints(store, run, with_labels=False)
    check_records(store, entries)
    known = [*(launch.launch for launch in launches), *(entry.launch for entry in entries)]
    return _View(run, launches, entries, max([newest, *known]))


@dataclasses.dataclass(frozen=True, slots=True)
class ChosenHome:
    """The home at which a launch begins.

    Attributes:
        number: number of the home, in the order in which the homes were given.
        reports: a sentence for each home away, or not up to date.
    """

    number: int
    reports: tuple[str, ...]


class RunHomes:
    """The homes of a run, for the process that begins launches.

    Args:
        homes: the homes; the first usable one is preferred.
        away_after_s: time after which a silent home counts as away, in seconds.
    """

    def __init__(self, homes: Sequence[HomePlace], *, away_after_s: float) -> None:
        self.homes = tuple(homes)
        self._away_after_s = away_after_s
        self._majority = majority_of(len(homes))
        self._by_number = dict(enumerate(self.homes))
        #: The votes for the next launch, with a look at the homes behind them.
        self._vote: Vote | None = None
        #: Number of the last launch of this process with votes.
        self._mine = 0
        #: The home of the launch, and the homes with an answer at the launch's begin.
        self._sources: list[HomePlace] = []

    def beside(self, number: int) -> OtherHomes:
        """Return the homes except a single home."""
        others = tuple(home for place, home in enumerate(self.homes) if place != number)
        return OtherHomes(homes=others, away_after_s=self._away_after_s)

    def enter(self, *, resume: str, writer_features: Sequence[str], wait_s: float) -> ChosenHome:
        """Get the votes for the next launch, and choose the home at which the launch begins.

        The home has the checkpoint from which the launch resumes. `elect` then returns the votes.

        Args:
            resume: see `Checkpointer`.
            writer_features: writer features of a new run.
            wait_s: longest wait for the saves of living savers, in seconds.

        Raises: StoreError(HOMES_AWAY, HOME_BEHIND); CommitError(HOMES_DIVERGED). Spec: REQ-RUN-066,
            REQ-RUN-069.
        """
        alive = ask(self._by_number, _probe, deadline_s=self._away_after_s)
        missing = [n for n, error in alive.errors.items() if error.detail == _MISSING]
        check_apart([self.homes[n].open_unasked() for n in (*alive.values, *missing)])
        first = self._look(alive.values)
        if not first.errors and not any(first.values.values()):
            self._found(alive, missing, writer_features)
            first = self._look(self._by_number)
        if len(first.values) < self._majority:
            raise _homes_away(self._by_number, first, "REQ-RUN-066")
        run, members = self._find_run(first)
        errors = {**alive.errors, **first.errors}
        reports = [
            f"HOMES_AWAY: {self.homes[number].name} is away: {error.code}: {error.detail}"
            for number, error in sorted(_errors_of(self.homes, first.values, errors).items())
        ]
        reports += [
            f"HOME_BEHIND: {self.homes[number].name} is empty, and gets a copy of the run"
            for number, view in sorted(first.values.items())
            if view is None
        ]
        held = ask(
            {number: self.homes[number] for number in members},
            lambda store: wait_for_savers(store, deadline_s=wait_s),
            deadline_s=wait_s + self._away_after_s,
        )
        reports += [
            f"the saves of {describe_savers(names)} weren't committed in time"
            for names in held.values.values()
            if names
        ]
        known = max(view.newest for view in members.values())
        while True:
            vote = self._collect(run.run_id, known)
            # A newer launch sees each commit confirmed before the votes.
            looked = self._look(members)
            views = {number: view for number, view in looked.values.items() if view is not None}
            if len(views) < self._majority:
                raise _homes_away(self._by_number, looked, "REQ-RUN-066")
            known = max(view.newest for view in views.values())
            if known <= vote.launch:
                break
        launches, entries = _unite(views, self.homes)
        number = _choose(views, launches, entries, resume)
        if resume not in ("auto", "fresh"):
            self._check_kept(views, resume)
        self._bring_records(number, views, launches)
        if number != min(first.values):
            reports.append(
                f"HOME_BEHIND: the launch goes on at {self.homes[number].name}, which has the"
                " newest checkpoint"
            )
        self._vote = vote
        self._mine = vote.launch
        others = [self.homes[other] for other in views if other != number]
        self._sources = [self.homes[number], *others]
        return ChosenHome(number, tuple(reports))

    def _check_kept(self, views: Mapping[int, _View], wanted: str) -> None:
        """Refuse a checkpoint retired at too many homes: no majority can have the files again.

        Raises: StoreError(HOME_BEHIND). Spec: REQ-RUN-068.
        """
        retired = [
            self.homes[number].name
            for number, view in views.items()
            for entry in view.entries
            if wanted in (entry.name, _digest_of(entry)) and isinstance(entry.register, Tombstone)
        ]
        if len(self.homes) - len(retired) < self._majority:
            raise err(
                Code.HOME_BEHIND,
                f"{wanted} is retired at {', '.join(retired)}, and would be lost with one home",
                where=self.homes[0].name,
                requirement="REQ-RUN-068",
                remedy="Choose a checkpoint that a majority of the homes has: `ckptfmt ls`.",
            )

    def elect(self, run: RunRecord, known: int) -> Vote:
        """Return the votes of a majority for the next launch: the votes of `enter`, or new votes.

        New votes are for a launch behind the last launch of this process, at the same home.

        Args:
            run: record of the run.
            known: the greatest known number of a launch.

        Raises: FencedError(FENCED) if another launch came between; StoreError(HOMES_AWAY). Spec:
            REQ-RUN-066.
        """
        vote = self._vote
        self._vote = None
        if vote is None:
            vote = self._collect(run.run_id, known)
            check_votes(
                self._by_number,
                run.run_id,
                self._mine,
                vote.launch,
                deadline_s=self._away_after_s,
                requirement="REQ-RUN-066",
            )
            self._mine = vote.launch
        return vote

    @property
    def is_entered(self) -> bool:
        """Whether `enter` got votes that no launch has taken yet."""
        return self._vote is not None

    def mend(self, name: str) -> None:
        """Repair a damaged checkpoint at the home of the launch, from another home's copy.

        Raises: errors of the homes.
        """
        home, *others = (source.open().at(name) for source in self._sources)
        copies = [other for other in others if isinstance(read_register(other), Manifest)]
        scrub_checkpoint([home, *copies])

    def _look(self, of: Iterable[int]) -> Answers[_View | None]:
        """Return the contents of homes after a first answer."""
        asked = {number: self.homes[number] for number in of}
        return ask(asked, _look, deadline_s=self._away_after_s * _LOOK_TIMES)

    def _found(
        self, alive: Answers[None], missing: Sequence[int], writer_features: Sequence[str]
    ) -> None:
        """Found a run at all homes: none of them has a run.

        Args:
            missing: numbers of the homes with missing directories, which are made.

        Raises: StoreError(HOMES_AWAY). Spec: REQ-RUN-070.
        """
        if len(alive.values) + len(missing) < len(self.homes):
            raise _homes_away(
                self._by_number, alive, "REQ-RUN-070", remedy="Start once while all homes answer."
            )
        features = (HOMES, *writer_features)
        stores = [home.open(makes=True) for home in self.homes]
        run = open_run(stores[0], writer_features=features)
        for store in stores[1:]:
            create_once(store, RUN_NAME, content=run.dump())
            store.sync("")

    def _find_run(self, looked: Answers[_View | None]) -> tuple[RunRecord, dict[int, _View]]:
        """Return the record of the run, and the contents of the homes with the run.

        Raises: FormatError(RUN_MISMATCH); UnsupportedError; StoreError(HOMES_AWAY). Spec:
            REQ-RUN-070.
        """
        members = {number: view for number, view in looked.values.items() if view is not None}
        if not members:
            raise _homes_away(self._by_number, Answers({}, looked.errors), "REQ-RUN-070")
        is_new = not any(view.newest for view in members.values())
        if len(members) < self._majority and is_new and len(looked.values) == len(self.homes):
            # The founding process ended in between.
            run = members[min(members)].run
            for number in looked.values.keys() - members.keys():
                create_once(self.homes[number].open(), RUN_NAME, content=run.dump())
                self.homes[number].open().sync("")
                members[number] = _View(run, [], [], 0)
        if len(members) < self._majority:
            empty = [self.homes[number].name for number in looked.values if number not in members]
            source = self.homes[min(members)].name
            raise err(
                Code.HOMES_AWAY,
                f"{', '.join(empty)} has no copy of the run, and only a majority with the run"
                " decides",
                where=source,
                requirement="REQ-RUN-070",
                remedy=f"If the other homes are lost for good, copy the run first:"
                f" `ckptfmt mirror {source} {empty[0] if empty else 'PLACE'}`.",
            )
        run = members[min(members)].run
        for number, view in members.items():
            check_run_id(run.run_id, view.run.run_id, f"{self.homes[number].name}/{RUN_NAME}")
        check_writer_features(run)
        return run, members

    def _collect(self, run_id: str, known: int) -> Vote:
        """Return the votes of a majority for a launch with a number above `known`."""
        for attempt in range(_TRIES):
            if attempt:
                time.sleep(random.uniform(0.0, _TRY_PAUSE_S))  # noqa: S311
            vote = Vote(run_id=run_id, launch=known + 1, nonce=secrets.token_hex(16))

            def is_won(values: Mapping[int, int]) -> bool:
                return list(values.values()).count(0) >= self._majority

            def is_enough(values: Mapping[int, int]) -> bool:
                return is_won(values) or (len(values) >= self._majority and any(values.values()))

            answers = ask(
                self._by_number,
                lambda store: _cast(store, vote),  # noqa: B023
                deadline_s=self._away_after_s,
                is_enough=is_enough,
            )
            if is_won(answers.values):
                return vote
            if len(answers.values) < self._majority:
                raise _homes_away(self._by_number, answers, "REQ-RUN-066")
            known = max(vote.launch, *answers.values.values())
        detail = f"{_TRIES} times other launches began at the same moment"
        raise err(Code.HOMES_AWAY, detail, where=self.homes[0].name, requirement="REQ-RUN-066")

    def _bring_records(
        self, number: int, views: Mapping[int, _View], launches: Sequence[Launch | LostLaunch]
    ) -> None:
        """Copy the launch records that a home lacks, if it has the checkpoints named there.

        The lineage of the home then leads where the lineage of all homes leads.
        """
        home = self.homes[number].open()
        known = {launch.launch for launch in views[number].launches}
        registers = {entry.name: _digest_of(entry) for entry in views[number].entries}
        for launch in launches:
            if isinstance(launch, LostLaunch) or launch.launch in known:
                continue
            resume = launch.resume_from
            if resume is not None and registers.get(resume.name) != resume.digest:
                continue
            path = f"{LAUNCHES}/{launch_name(launch.launch)}"
            source = next(one for one, view in views.items() if launch in view.launches)
            read = ask(
                {source: self.homes[source]},
                lambda store: store.read(path, limit_nbytes=limits.JSON_NBYTES),  # noqa: B023
                deadline_s=self._away_after_s,
            )
            content = read.values.get(source)
            if content is not None and Launch.parse(content, where=path) == launch:
                create_once(home, path, content=content)
                home.sync(LAUNCHES)


def _errors_of(
    homes: Sequence[HomePlace], answered: Container[int], errors: Mapping[int, CkptError]
) -> dict[int, CkptError]:
    """Return the error of each home without an answer."""
    silent = err(Code.STORE_NO_ANSWER, "no answer in time")
    return {
        number: errors.get(number, silent) for number in range(len(homes)) if number not in answered
    }


def _homes_away(
    homes: Mapping[int, HomePlace],
    answers: Answers[Any],
    requirement: str,
    *,
    remedy: str | None = None,
) -> CkptError:
    errors = _errors_of(list(homes.values()), answers.values, answers.errors)
    told = "; ".join(f"{homes[number].name}: {error.detail}" for number, error in errors.items())
    count = len(homes) - len(errors)
    return err(
        Code.HOMES_AWAY,
        f"{count} of {len(homes)} homes answer, and {majority_of(len(homes))} are needed: {told}",
        where=homes[0].name,
        requirement=requirement,
        remedy=remedy,
    )


def _unite(
    views: Mapping[int, _View], homes: Sequence[HomePlace]
) -> tuple[list[Launch | LostLaunch], list[RunEntry]]:
    """Return the launches and checkpoints of all homes.

    Raises: CommitError(HOMES_DIVERGED) where two homes have different launches of a number, or
        checkpoints of a name.
    """
    launches: dict[int, Launch | LostLaunch] = {}
    entries: dict[str, RunEntry] = {}
    for number, view in sorted(views.items()):
        for launch in view.launches:
            known = launches.setdefault(launch.launch, launch)
            if isinstance(known, LostLaunch):
                launches[launch.launch] = launch
            elif isinstance(launch, Launch) and launch != known:
                raise _diverged(f"{LAUNCHES}/{launch_name(launch.launch)}", homes[number])
        for entry in view.entries:
            other = entries.setdefault(entry.name, entry)
            if len({_digest_of(entry), _digest_of(other), None}) > 2:
                raise _diverged(entry.name, homes[number])
            if other.manifest is None and (entry.manifest is not None or _digest_of(entry)):
                entries[entry.name] = entry
    ordered = sorted(entries.values(), key=lambda entry: (entry.step, entry.launch))
    return [launches[number] for number in sorted(launches)], ordered


def _diverged(path: str, home: HomePlace) -> CkptError:
    detail = f"it is another one at {home.name} than at the homes before"
    return err(Code.HOMES_DIVERGED, detail, where=path, requirement="REQ-RUN-069")


def _digest_of(entry: RunEntry) -> str | None:
    """Return the manifest's digest of a committed or retired checkpoint, or None."""
    if isinstance(entry.register, Tombstone):
        return entry.register.manifest_digest
    return None if entry.manifest is None else entry.manifest.digest


def _choose(
    views: Mapping[int, _View],
    launches: Sequence[Launch | LostLaunch],
    entries: list[RunEntry],
    resume: str,
) -> int:
    """Return the first home with the best checkpoint; the first home if there is no checkpoint."""
    if resume == "fresh":
        return min(views)
    if resume == "auto":
        wanted = [entry for entry in iter_lineage(launches, entries) if entry.manifest is not None]
    else:
        wanted = [entry for entry in entries if resume in (entry.name, _digest_of(entry))]
    for entry in wanted:
        for number, view in sorted(views.items()):
            for own in view.entries:
                if own.name == entry.name and own.manifest is not None:
                    return number
    return min(views)
