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
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from typing import Any, Final, Generic, Self, TypeAlias, TypeVar

from ckptfmt import limits
from ckptfmt.commit.decision import create_once, read_register
from ckptfmt.commit.waiting import describe_savers, wait_for_savers
from ckptfmt.documents.manifest import Manifest, Reference, Tombstone, checkpoint_name
from ckptfmt.documents.run import (
    HOME_NAME,
    LAUNCHES,
    RUN_NAME,
    VOTES,
    HomeRecord,
    Launch,
    RunRecord,
    Vote,
    check_run_id,
    launch_name,
    parse_launch_name,
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
    open_run,
    read_launch,
    read_run,
)
from ckptfmt.run.scrub import scrub_checkpoint
from ckptfmt.store import Address, LocalStore, address_of, check_apart, local_path, open_address
from ckptfmt.store.protocol import Store, read_if_there

T = TypeVar("T")

#: Pause before a silent home is asked again, in seconds: the first, and the longest.
_PAUSE_MIN_S: Final = 0.1
_PAUSE_MAX_S: Final = 5.0
#: Number of tries for the votes of a majority. Each try takes a new number.
_TRIES: Final = 16
#: Longest pause before the next try, in seconds: launches begun at once must fall out of step.
_TRY_PAUSE_S: Final = 0.5
#: Longest wait for further votes after those of a majority, in seconds.
_VOTE_GRACE_S: Final = 2.0
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
        home_id: id of the home; empty as long as unknown.
    """

    address: Address | Store
    name: str
    home_id: str = ""

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

        Raises: StoreError; IntegrityError(FILE_MISSING) for a missing directory.
        """
        if not isinstance(self.address, bytes | dict):
            return self.address
        if isinstance(self.address, bytes) and not makes:
            try:
                os.stat(self.address)  # noqa: PTH116
            except FileNotFoundError as error:
                raise err(Code.FILE_MISSING, _MISSING, where=self.name) from error
            except OSError as error:
                raise err(Code.STORE_IO, str(error), where=self.name) from error
        store = _OPENED.get(self.key)
        if store is None:
            store = _OPENED[self.key] = open_address(self.address, writable=True)
        return store

    def open_unasked(self) -> Store:
        """Return a store for the name alone, without a look at the place."""
        if isinstance(self.address, bytes):
            return LocalStore(os.fsdecode(self.address), writable=False)
        if isinstance(self.address, dict):
            return open_address(self.address, writable=False)
        return self.address

    @property
    def key(self) -> str:
        """A text that distinguishes the homes of this process."""
        return repr(self.address) if self.has_address else str(id(self.address))

    @property
    def has_address(self) -> bool:
        """Whether any process of this machine can open the home."""
        return isinstance(self.address, bytes | dict)


#: The detail of the error of a missing directory.
_MISSING: Final = "the directory is missing"
#: The opened stores, by the text of their addresses.
_OPENED: Final[dict[str, Store]] = {}
#: The threads with questions, by the home's name, and the largest number of threads for a home.
_ASKING: Final[dict[str, list[threading.Thread]]] = {}
_ASKING_LOCK: Final = threading.Lock()
_ASKING_COUNT: Final = 32
#: The error of a place that isn't a home of the run.
_STRANGER: Final = err(
    Code.FILE_MISSING, "it isn't a home of the run; if nothing there is needed, empty it"
)
#: Codes of errors despite a majority: the homes aren't homes of the same run, or a newer launch
#: has begun.
_FATAL: Final = frozenset({Code.RUN_MISMATCH, Code.HOMES_DIVERGED, Code.ARGUMENT, Code.FENCED})


#: The queue of answers: the number of a home, and its answer or error.
_Told: TypeAlias = "queue.SimpleQueue[tuple[int, T | None, BaseException | None]]"


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
    member_of: str = "",
    is_enough: Callable[[Mapping[int, T]], bool] = lambda _: False,
    grace_s: float | None = None,
) -> Answers[T]:
    """Ask several homes at once, and again after a StoreError, until all answers or the deadline.

    A home with damaged documents has no answer either: a majority without damage goes on.

    Args:
        homes: homes by their numbers.
        question: called with the store of each home, in a thread of the home.
        deadline_s: longest wait in seconds. A home without an answer by then is away.
        member_of: id of the run: only a home of the run, with the known id, has an answer. Empty
            to ask any place.
        is_enough: whether the answers so far are enough to end the wait.
        grace_s: longest wait after the answers of a majority, in seconds; None for the deadline.

    Raises: errors of `_FATAL`; exceptions except CkptError.
    """
    told: _Told[T] = queue.SimpleQueue()
    end_s = time.monotonic() + deadline_s
    is_over = threading.Event()
    answers: Answers[T] = Answers()
    final: set[int] = set()

    def ask_member(home: HomePlace) -> T:
        store = home.open()
        if member_of:
            check_member(store, member_of, home.home_id)
        return question(store)

    for number, home in homes.items():
        keep_asking = functools.partial(
            _keep_asking, functools.partial(ask_member, home), end_s, is_over, told, number
        )
        if not _start_asking(home, keep_asking):
            answers.errors[number] = err(Code.STORE_NO_ANSWER, "earlier requests have no answer")
            final.add(number)
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
                if grace_s is not None and len(answers.values) == majority_of(len(homes)):
                    end_s = min(end_s, time.monotonic() + grace_s)
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


def _start_asking(home: HomePlace, keep_asking: Callable[[], None]) -> bool:
    """Ask a home in a thread; return False if too many questions to the home hang in threads."""
    with _ASKING_LOCK:
        threads = _ASKING.setdefault(home.key, [])
        threads[:] = [thread for thread in threads if thread.is_alive()]
        if len(threads) >= _ASKING_COUNT:
            return False
        # A daemon: a request to an unresponsive store may take minutes.
        thread = threading.Thread(target=keep_asking, name="ckptfmt-home", daemon=True)
        thread.start()
        threads.append(thread)
        return True


def _keep_asking(
    question: Callable[[], T],
    end_s: float,
    is_over: threading.Event,
    told: _Told[T],
    number: int,
) -> None:
    """Ask a home until an answer or the end of the time; every error is told."""
    pause_s = _PAUSE_MIN_S
    while True:
        try:
            value = question()
        except BaseException as error:  # noqa: BLE001
            told.put((number, None, error))
            if not isinstance(error, StoreError) or time.monotonic() + pause_s >= end_s:
                return
        else:
            told.put((number, value, None))
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
        home_id: id of the home at which the launch commits.
        away_after_s: time after which a silent home counts as away, in seconds.
        own: nonces of this process's votes: they overrule no launch of this process.
    """

    homes: tuple[HomePlace, ...]
    home_id: str
    away_after_s: float
    own: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the homes as plain values; a store without an address stays a store."""
        return {
            "homes": [[home.address, home.name, home.home_id] for home in self.homes],
            "home_id": self.home_id,
            "away_after_s": str(self.away_after_s),
            "own": list(self.own),
        }

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Self:
        """Return the homes of `as_dict`."""
        return cls(
            homes=tuple(HomePlace(*row) for row in value["homes"]),
            home_id=value["home_id"],
            away_after_s=float(value["away_after_s"]),
            own=tuple(value["own"]),
        )

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
        homes = dict(enumerate(self.homes))
        end_s = time.monotonic() + deadline_s
        slice_s = _SLICE_MIN_S

        def is_enough(values: Mapping[int, bool]) -> bool:
            return sum(values.values()) >= needed_count

        while True:
            slice_end_s = min(end_s, time.monotonic() + slice_s)
            is_over = threading.Event()
            question = functools.partial(
                _await, reference=before, end_s=slice_end_s, is_over=is_over, gives_up=gives_up
            )
            answers = ask(
                homes,
                question,
                deadline_s=max(0.0, slice_end_s - time.monotonic()),
                member_of=run_id,
                is_enough=is_enough,
            )
            is_over.set()
            if is_enough(answers.values):
                return
            with contextlib.suppress(StoreError):  # a newer launch is why nobody copies
                self.confirm(home, run_id, launch)
            if gives_up.wait(max(0.0, slice_end_s - time.monotonic())) or time.monotonic() >= end_s:
                break
            slice_s = min(4 * slice_s, _SLICE_MAX_S)
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
        homes = dict(enumerate((HomePlace(home, home.name, self.home_id), *self.homes)))
        check_votes(
            homes,
            run_id,
            launch,
            own=self.own,
            deadline_s=self.away_after_s,
            requirement="REQ-RUN-067",
        )


def check_votes(
    homes: Mapping[int, HomePlace],
    run_id: str,
    launch: int,
    *,
    own: Container[str],
    deadline_s: float,
    requirement: str,
) -> None:
    """Check that no launch newer than `launch` may have the votes of a majority.

    Args:
        own: nonces of the caller's own votes, which don't count.
        deadline_s: longest wait for a home in seconds.

    Raises: FencedError(FENCED); StoreError(HOMES_AWAY).
    """
    count = len(homes)

    def question(store: Store) -> dict[int, str]:
        newer = [number for number in list_vote_numbers(store) if number > launch]
        found = {number: _nonce_of(store, number) for number in newer}
        votes = {number: nonce for number, nonce in found.items() if nonce not in own}
        # A launch with a record has had the votes of a majority.
        begun = votes.keys() & list_launch_numbers(store) if votes else votes.keys()
        if begun:
            raise _overruled(launch, max(begun), requirement)
        return votes

    def is_enough(values: Mapping[int, dict[int, str]]) -> bool:
        if len(values) < majority_of(count):
            return False
        return _find_overruling(values.values(), count, count - len(values)) is None

    answers = ask(homes, question, deadline_s=deadline_s, member_of=run_id, is_enough=is_enough)
    if len(answers.values) < majority_of(count):
        raise _homes_away(homes, answers, requirement)
    newest = _find_overruling(answers.values.values(), count, 0)
    if newest is not None:
        raise _overruled(launch, newest, requirement)
    if not is_enough(answers.values):
        away = _errors_of(list(homes.values()), answers.values, answers.errors)
        names = ", ".join(homes[number].name for number in away)
        raise err(
            Code.HOMES_AWAY,
            f"another launch may have begun with the vote of {names}, which is away",
            where=homes[0].name,
            requirement=requirement,
            remedy="Wait until all homes answer, or start the training anew.",
        )


def _overruled(launch: int, newest: int, requirement: str) -> CkptError:
    return err(
        Code.FENCED,
        f"launch {newest} has the votes of the homes, and takes over from launch {launch}",
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


def read_home(store: Store) -> HomeRecord | None:
    """Return the identity of a home; None at a place without one.

    Raises: FormatError, IntegrityError.
    """
    content = read_if_there(store, HOME_NAME, limit_nbytes=limits.JSON_NBYTES)
    return None if content is None else HomeRecord.parse(content)


def check_member(store: Store, run_id: str, home_id: str) -> None:
    """Raise unless a place is the home of a run with this id.

    Another place, such as an empty mount point, knows no votes.

    Raises: IntegrityError(FILE_MISSING); FormatError(RUN_MISMATCH). Spec: REQ-RUN-070.
    """
    home = read_home(store)
    if home is None or home.home != home_id:
        raise err(Code.FILE_MISSING, "the place isn't this home of the run", where=HOME_NAME)
    check_run_id(run_id, home.run_id, HOME_NAME)


def find_previous(home: Store, launch: int) -> Reference | None:
    """Return the newest commit of a launch at the home, else the checkpoint at the start."""
    steps = sorted((step for step, number in list_places(home) if number == launch), reverse=True)
    for step in steps:
        name = checkpoint_name(step, launch)
        register = read_register(home.at(name))
        if isinstance(register, Manifest):
            return Reference(name=name, digest=register.digest)
    return read_launch(home, launch).resume_from


def _has(store: Store, reference: Reference) -> bool:
    """Return whether a home has a checkpoint; a retired checkpoint doesn't count."""
    register = read_register(store.at(reference.name))
    return isinstance(register, Manifest) and register.digest == reference.digest


def _await(
    store: Store,
    *,
    reference: Reference,
    end_s: float,
    is_over: threading.Event,
    gives_up: threading.Event,
) -> bool:
    """Wait for a checkpoint at a home, until a time or an event; return whether it is there."""
    pause_s = _PAUSE_MIN_S
    while not _has(store, reference):
        if time.monotonic() >= end_s or gives_up.is_set() or is_over.wait(pause_s):
            return False
        pause_s = min(2 * pause_s, 1.0)
    return True


# --- votes ----------------------------------------------------------------------------------------


def list_vote_numbers(store: Store) -> list[int]:
    """Return the numbers of the launches with a vote of this home, in ascending numerical order.

    A run with one home has no votes. Spec: REQ-RUN-065.
    """
    names = set(store.list_names(VOTES))
    if store.is_remote:  # a damaged network answer may look like a shorter listing
        names.update(store.list_names(VOTES))
    numbers = map(parse_launch_name, names)
    return sorted(number for number in numbers if number is not None)


def read_vote(store: Store, number: int) -> Vote:
    """Return a vote of a home. Raises: FormatError, IntegrityError."""
    path = f"{VOTES}/{launch_name(number)}"
    return Vote.parse(store.read(path, limit_nbytes=limits.JSON_NBYTES), where=path)


def _cast(store: Store, vote: Vote) -> int:
    """Vote for a launch at a home.

    Returns: 0, or the number of the newest launch with a vote, if another launch has this number.
    Raises: StoreError.
    """
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
    """The contents of a home, or of a place that may become one.

    Attributes:
        home: identity of the home; None at a place without one.
        run: the run's record; None before the first copy.
        launches, entries: see `list_launches` and `list_checkpoints`.
        vote: the newest vote; None without a vote.
        newest: greatest number of a launch with a vote, a record or a checkpoint; 0 for none.
    """

    home: HomeRecord | None
    run: RunRecord | None
    launches: list[Launch | LostLaunch]
    entries: list[RunEntry]
    vote: Vote | None
    newest: int


def _probe(store: Store) -> None:
    """Find out whether a home answers."""
    store.list_names(VOTES)


def _read_view(store: Store) -> _View:
    """Return the contents of a home."""
    numbers = list_vote_numbers(store)
    vote = read_vote(store, numbers[-1]) if numbers else None
    newest = max(numbers, default=0)
    home = read_home(store)
    run = read_run(store)
    if run is None:
        return _View(home, None, [], [], vote, newest)
    launches = list_launches(store, run)
    entries = list_checkpoints(store, run, with_labels=False)
    check_records(store, entries)
    known = [*(launch.launch for launch in launches), *(entry.launch for entry in entries)]
    return _View(home, run, launches, entries, vote, max([newest, *known]))


@dataclasses.dataclass(frozen=True, slots=True)
class ChosenHome:
    """The home at which a launch begins.

    Attributes:
        number: number of the home, in the order in which the homes were given.
        ids: ids of all homes, in this order.
        reports: a sentence for each home away, or not up to date.
    """

    number: int
    ids: tuple[str, ...]
    reports: tuple[str, ...]


def _find_ids(views: Mapping[int, _View]) -> tuple[set[str], set[str]]:
    """Return the ids of the homes of a run, and the ids that the newest vote may have set.

    Both are empty before the first vote. A launch that changes the homes records them behind its
    votes. In between, only a launch with a majority of both may begin.
    """
    places = [(view.home, view.vote) for view in views.values() if view.home is not None]
    newest = max((home for home, _ in places), key=lambda home: home.launch)
    # A vote from before the home had this id tells nothing of the homes.
    votes = [vote for home, vote in places if vote is not None and home.home in vote.homes]
    vote = max(votes, key=lambda vote: vote.launch, default=None)
    if vote is None or vote.launch <= newest.launch or set(vote.homes) == set(newest.homes):
        return set(newest.homes), set()
    return set(newest.homes or vote.homes), set(vote.homes)


class RunHomes:
    """The homes of a run, for the process that begins launches.

    Args:
        homes: the homes; the first usable one is preferred.
        away_after_s: time after which a silent home counts as away, in seconds.

    Attributes:
        homes: the homes, with their ids after `enter`.
        reports: a sentence for each repaired checkpoint.
    """

    def __init__(self, homes: Sequence[HomePlace], *, away_after_s: float) -> None:
        self.homes = tuple(homes)
        self.reports: list[str] = []
        self._away_after_s = away_after_s
        self._majority = majority_of(len(homes))
        #: The votes for the next launch, with a look at the homes behind them.
        self._vote: Vote | None = None
        #: Number of the last launch of this process with votes, and the nonces of all its votes.
        self._mine = 0
        self._own: list[str] = []
        #: Ids of the homes of the run, and whether the homes must record them.
        self._ids: tuple[str, ...] = ()
        self._must_record = False
        #: Whether the next launch changes the homes, as the first launch does.
        self._changes = False
        #: The home of the launch, and the homes with an answer at the launch's begin.
        self._sources: list[HomePlace] = []

    def beside(self, number: int) -> OtherHomes:
        """Return the homes except a single home."""
        others = tuple(home for place, home in enumerate(self.homes) if place != number)
        return OtherHomes(
            homes=others,
            home_id=self.homes[number].home_id,
            away_after_s=self._away_after_s,
            own=tuple(self._own),
        )

    def enter(self, *, resume: str, writer_features: Sequence[str], wait_s: float) -> ChosenHome:
        """Get the votes for the next launch, and choose the home at which the launch begins.

        The home has the checkpoint from which the launch resumes. `elect` then returns the votes.

        Args:
            resume: see `Checkpointer`.
            writer_features: writer features of a new run.
            wait_s: longest wait for the saves of living savers, in seconds.

        Raises: StoreError(HOMES_AWAY, HOME_BEHIND); CommitError(HOMES_DIVERGED);
            IntegrityError(NOT_COMMITTED) without the checkpoint of `resume`. Spec: REQ-RUN-066,
            REQ-RUN-069, REQ-RUN-070.
        """
        for _ in range(_TRIES):
            views, errors = self._look_at_all(writer_features)
            members, joining = self._find_members(views, errors)
            run_id = self._check_runs(members)
            reports = self._tell_away(views, errors, members, joining)
            check_wanted(members, self.homes, resume)
            reports += self._wait_for_savers(members, wait_s)
            known = max(view.newest for view in views.values())
            collected = self._collect(run_id, known, members, joining)
            if collected is None:  # the homes may be others now
                continue
            vote, voters = collected
            # A newer launch sees each commit confirmed before the votes.
            looked = self._look(members)
            views = looked.values
            if len(views) < self._majority:
                raise _homes_away(self._by_number, looked, "REQ-RUN-066")
            if max(view.newest for view in views.values()) <= vote.launch:
                break
        else:
            raise self._too_many()
        if self._must_record:
            self._record_homes(vote, (*views, *joining))
        views = {number: view for number, view in views.items() if view.run is not None}
        if not views:
            raise err(
                Code.HOMES_AWAY,
                "no home that answers has a copy of the run yet",
                where=self.homes[0].name,
                requirement="REQ-RUN-066",
                remedy="Start again when the home with the run answers.",
            )
        launches, entries = _unite(views, self.homes)
        number = _choose(views, launches, entries, resume, voters)
        self._check_kept(views, resume)
        self._bring_records(number, views, launches)
        if number != min(members):
            reports.append(
                f"HOME_BEHIND: the launch goes on at {self.homes[number].name}, which has the"
                " newest checkpoint"
            )
        self._vote = vote
        self._mine = vote.launch
        self._changes = False
        others = [self.homes[other] for other in views if other != number]
        self._sources = [self.homes[number], *others]
        ids = tuple(home.home_id for home in self.homes)
        return ChosenHome(number, ids, tuple(reports))

    def adopt(self, ids: Sequence[str]) -> None:
        """Use the ids of the homes that process 0 has found."""
        self.homes = tuple(
            dataclasses.replace(home, home_id=home_id)
            for home, home_id in zip(self.homes, ids, strict=True)
        )

    def elect(self, run: RunRecord) -> Vote:
        """Return the votes of a majority for the next launch: the votes of `enter`, or new votes.

        New votes are for a launch behind the last launch of this process, at the same home.

        Raises: FencedError(FENCED) if another launch has begun since; StoreError(HOMES_AWAY). Spec:
            REQ-RUN-066.
        """
        vote = self._vote
        self._vote = None
        if vote is None:
            members = range(len(self.homes))
            collected = self._collect(run.run_id, self._mine, members, {})
            assert collected is not None  # noqa: S101
            vote = collected[0]
            check_votes(
                self._by_number,
                run.run_id,
                self._mine,
                own=self._own,
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

        Raises: IntegrityError(FILE_MISSING) if no other home has the checkpoint whole.
        """
        home, *others = self._sources
        for other in others:
            with contextlib.suppress(CkptError):
                copies = [home.open().at(name), other.open().at(name)]
                if isinstance(read_register(copies[1]), Manifest):
                    scrub_checkpoint(copies)
                    sentence = f"{name} was damaged at {home.name}: repaired from {other.name}"
                    self.reports.append(sentence)
                    return
        raise err(Code.FILE_MISSING, "no other home has it whole", where=name)

    @property
    def _by_number(self) -> dict[int, HomePlace]:
        return dict(enumerate(self.homes))

    # --- steps of `enter` -------------------------------------------------------------------------

    def _look(self, of: Iterable[int]) -> Answers[_View]:
        """Return the contents of homes after a first answer."""
        return ask(
            {number: self.homes[number] for number in of},
            _read_view,
            deadline_s=self._away_after_s * _LOOK_TIMES,
            grace_s=self._away_after_s,
        )

    def _look_at_all(
        self, writer_features: Sequence[str]
    ) -> tuple[dict[int, _View], dict[int, CkptError]]:
        """Return the contents of all homes that answer, and the errors of the rest.

        Places without homes of any run become the homes of a run.
        """
        alive = ask(self._by_number, _probe, deadline_s=self._away_after_s)
        missing = [n for n, error in alive.errors.items() if error.detail == _MISSING]
        check_apart([self.homes[n].open_unasked() for n in (*alive.values, *missing)])
        looked = self._look(alive.values)
        errors = alive.errors | looked.errors
        if any(view.home for view in looked.values.values()):
            return looked.values, errors
        if len(looked.values) + len(missing) < len(self.homes):
            raise _homes_away(
                self._by_number,
                Answers(looked.values, errors),
                "REQ-RUN-070",
                remedy="Start once while all homes answer.",
            )
        self._found(looked.values, writer_features)
        looked = self._look(self._by_number)
        return looked.values, looked.errors

    def _found(self, views: Mapping[int, _View], writer_features: Sequence[str]) -> None:
        """Make the places homes of a run: of a run with one home until now, or of a new run.

        Missing directories are made. Spec: REQ-RUN-070.
        """
        stores = [home.open(makes=True) for home in self.homes]
        runs = [view.run for view in views.values() if view.run is not None]
        run = runs[0] if runs else open_run(stores[0], writer_features=(HOMES, *writer_features))
        for store in stores:
            create_home(store, run.run_id)
            if not runs and store is not stores[0]:
                create_once(store, RUN_NAME, content=run.dump())
                store.sync("")

    def _find_members(
        self, views: dict[int, _View], errors: Mapping[int, CkptError]
    ) -> tuple[dict[int, _View], dict[int, str]]:
        """Return the homes of the run, and the ids of places that become homes.

        The newest vote names the homes. A place without a home becomes one if all other homes are
        there, so that each of them votes for the launch with the new home.

        Raises: StoreError(HOMES_AWAY). Spec: REQ-RUN-070.
        """
        ids = {n: view.home.home for n, view in views.items() if view.home is not None}
        run_id = next(view.home.run_id for view in views.values() if view.home is not None)
        known, doubted = _find_ids(views)
        is_new = not known
        known = known or set(ids.values())
        members = {n: views[n] for n, home_id in ids.items() if home_id in known}
        fewest = len(members)
        if doubted:
            fewest = min(fewest, len(doubted.intersection(ids.values())))
        if is_new and len(views) == len(self.homes):
            # The founding process ended in between: no launch has begun, as the first one needs
            # the votes of all homes.
            for n in views.keys() - ids.keys():
                ids[n] = create_home(self.homes[n].open(), run_id)
                home = HomeRecord(run_id=run_id, home=ids[n])
                views[n] = dataclasses.replace(views[n], home=home)
            members = {n: views[n] for n in ids}
            fewest = len(members)
        if fewest < self._majority or (is_new and len(ids) < len(self.homes)):
            source = self.homes[min(members or ids)].name
            told = _errors_of(self.homes, members, {**dict.fromkeys(views, _STRANGER), **errors})
            others = "; ".join(f"{self.homes[n].name}: {one.detail}" for n, one in told.items())
            raise err(
                Code.HOMES_AWAY,
                f"{fewest} of {len(self.homes)} homes of the run answer: {others}",
                where=source,
                requirement="REQ-RUN-070",
                remedy=f"If the other homes are lost for good, with all jobs that used them, delete"
                f" {HOME_NAME} at {source}, and start while all places answer."
                if len(views) > len(members)
                else None,
            )
        joining: dict[int, str] = {}
        # A place that was to become a home before, and never voted, is free, too.
        free = [
            n
            for n, view in views.items()
            if view.home is None or not (n in members or view.home.homes or view.vote)
        ]
        if len(members) + len(free) == len(self.homes):
            joining = {n: create_home(self.homes[n].open(), run_id) for n in free}
        by_place = {**{n: ids[n] for n in members}, **joining}
        gone = sorted(known - set(by_place.values()))  # homes that are away
        self.homes = tuple(
            dataclasses.replace(home, home_id=by_place.get(n) or (gone[0] if gone else ""))
            for n, home in enumerate(self.homes)
        )
        self._ids = tuple(sorted({*by_place.values(), *(() if joining else gone)}))
        self._changes = is_new or bool(joining)
        self._must_record = self._changes or bool(doubted)
        return members, joining

    def _record_homes(self, vote: Vote, of: Iterable[int]) -> None:
        """Record the homes of the run at each home, once a launch has the votes for them."""
        for number in of:
            home = HomeRecord(
                run_id=vote.run_id,
                home=self.homes[number].home_id,
                homes=vote.homes,
                launch=vote.launch,
            )
            self.homes[number].open().replace(HOME_NAME, home.dump())

    def _check_runs(self, members: Mapping[int, _View]) -> str:
        """Return the id of the run. Raises: FormatError(RUN_MISMATCH); UnsupportedError."""
        run_id = next(view.home.run_id for view in members.values() if view.home)
        for number, view in members.items():
            assert view.home is not None  # noqa: S101
            name = self.homes[number].name
            check_run_id(run_id, view.home.run_id, f"{name}/{HOME_NAME}")
            if view.run is not None:
                check_run_id(run_id, view.run.run_id, f"{name}/{RUN_NAME}")
                check_writer_features(view.run)
        return run_id

    def _tell_away(
        self,
        views: Mapping[int, _View],
        errors: Mapping[int, CkptError],
        members: Container[int],
        joining: Container[int],
    ) -> list[str]:
        reports = [
            f"HOMES_AWAY: {self.homes[number].name} is away: {error.code}: {error.detail}"
            for number, error in sorted(_errors_of(self.homes, views, errors).items())
        ]
        for number in sorted(views):
            name = self.homes[number].name
            if number in joining:
                reports.append(f"HOME_BEHIND: {name} was empty, and becomes a home of the run")
            elif number not in members:
                reports.append(f"HOMES_AWAY: {name} is away: {_STRANGER.detail}")
        return reports

    def _wait_for_savers(self, members: Iterable[int], wait_s: float) -> list[str]:
        held = ask(
            {number: self.homes[number] for number in members},
            lambda store: wait_for_savers(store, deadline_s=wait_s),
            deadline_s=wait_s + self._away_after_s,
            grace_s=self._away_after_s + wait_s,
        )
        return [
            f"the saves of {describe_savers(names)} weren't committed in time"
            for names in held.values.values()
            if names
        ]

    def _check_kept(self, views: Mapping[int, _View], wanted: str) -> None:
        """Refuse a checkpoint retired at too many homes: no majority can have the files again.

        Raises: StoreError(HOME_BEHIND). Spec: REQ-RUN-068.
        """
        retired = [
            self.homes[number].name
            for number, view in views.items()
            for entry in view.entries
            if wanted in (entry.name, entry.digest) and isinstance(entry.register, Tombstone)
        ]
        if len(self.homes) - len(retired) < self._majority:
            raise err(
                Code.HOME_BEHIND,
                f"{wanted} is retired at {', '.join(retired)}, and would be lost with one home",
                where=self.homes[0].name,
                requirement="REQ-RUN-068",
                remedy="Choose a checkpoint that a majority of the homes has: `ckptfmt ls`.",
            )

    def _collect(
        self, run_id: str, known: int, members: Collection[int], joining: Mapping[int, str]
    ) -> tuple[Vote, set[int]] | None:
        """Return the votes of a majority for a launch with a number above `known`, and the voters.

        A launch that changes the homes needs the votes of all members.

        Args:
            members: numbers of the homes, whose votes count.
            joining: places that become homes with this launch.

        Returns: None if another launch has the number of a launch that changes the homes.
        """
        needed_count = len(members) if self._changes else self._majority
        homes = {number: self.homes[number] for number in members}
        for attempt in range(_TRIES):
            if attempt:
                time.sleep(random.uniform(0.0, _TRY_PAUSE_S))  # noqa: S311
            nonce = secrets.token_hex(16)
            vote = Vote(run_id=run_id, launch=known + 1, nonce=nonce, homes=self._ids)
            self._own.append(nonce)
            answers = ask(
                homes,
                lambda store: _cast(store, vote),  # noqa: B023
                deadline_s=self._away_after_s,
                member_of=run_id,
                is_enough=lambda values: any(values.values()),
                grace_s=_VOTE_GRACE_S,
            )
            voters = {number for number, taken in answers.values.items() if taken == 0}
            if len(voters) >= needed_count:
                for number in joining:  # its own vote isn't needed
                    _cast(self.homes[number].open(), vote)
                return vote, voters
            taken = max(answers.values.values(), default=0)
            if taken == 0:
                raise _homes_away(self._by_number, answers, "REQ-RUN-066")
            if self._changes:
                time.sleep(random.uniform(0.0, _TRY_PAUSE_S))  # noqa: S311
                return None
            known = max(vote.launch, taken)
        raise self._too_many()

    def _too_many(self) -> CkptError:
        detail = f"{_TRIES} times other launches began at the same moment"
        return err(Code.HOMES_AWAY, detail, where=self.homes[0].name, requirement="REQ-RUN-066")

    def _bring_records(
        self, number: int, views: Mapping[int, _View], launches: Sequence[Launch | LostLaunch]
    ) -> None:
        """Copy the launch records that a home lacks, if it has the checkpoints named there.

        The lineage of the home then leads where the lineage of all homes leads.
        """
        home = self.homes[number].open()
        own = {launch.launch: launch for launch in views[number].launches}
        registers = {entry.name: entry.digest for entry in views[number].entries}
        for launch in launches:
            damaged = isinstance(own.get(launch.launch), LostLaunch)
            if isinstance(launch, LostLaunch) or (launch.launch in own and not damaged):
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
            if content is None or Launch.parse(content, where=path) != launch:
                continue
            if damaged:
                home.replace(path, content)
            else:
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
            if len({entry.digest, other.digest, None}) > 2:
                raise _diverged(entry.name, homes[number])
            if other.manifest is None and (entry.manifest is not None or entry.digest):
                entries[entry.name] = entry
    ordered = sorted(entries.values(), key=lambda entry: (entry.step, entry.launch))
    return [launches[number] for number in sorted(launches)], ordered


def _diverged(path: str, home: HomePlace) -> CkptError:
    detail = f"it is another one at {home.name} than at the homes before"
    return err(Code.HOMES_DIVERGED, detail, where=path, requirement="REQ-RUN-069")


def _choose(
    views: Mapping[int, _View],
    launches: Sequence[Launch | LostLaunch],
    entries: list[RunEntry],
    resume: str,
    voters: Container[int],
) -> int:
    """Return the first home with the best checkpoint; the first home if there is no checkpoint.

    A home without a vote for the launch comes last: nothing can be written there.
    """
    order = sorted(views, key=lambda number: (number not in voters, number))
    if resume == "fresh":
        return order[0]
    if resume == "auto":
        wanted = [entry for entry in iter_lineage(launches, entries) if entry.manifest is not None]
    else:
        wanted = [entry for entry in entries if resume in (entry.name, entry.digest)]
    for entry in wanted:
        for number in order:
            for own in views[number].entries:
                if own.name == entry.name and own.manifest is not None:
                    return number
    return order[0]


def check_wanted(views: Mapping[int, _View], homes: Sequence[HomePlace], resume: str) -> None:
    """Refuse a checkpoint that no home has, before a vote ends a running training.

    Raises: IntegrityError(NOT_COMMITTED).
    """
    found = any(
        entry.manifest is not None and resume in (entry.name, entry.manifest.digest)
        for view in views.values()
        for entry in view.entries
    )
    if resume not in ("auto", "fresh") and not found:
        raise err(
            Code.NOT_COMMITTED,
            f"no home that answers has a committed checkpoint of the name or digest {resume!r}",
            where=homes[min(views)].name,
            remedy="`ckptfmt ls` lists the checkpoints at a home.",
        )


def create_home(store: Store, run_id: str) -> str:
    """Make a place a home, unless it is one, and return the id of the home.

    Raises: StoreError; FormatError(RUN_MISMATCH).
    """
    home = HomeRecord(run_id=run_id, home=secrets.token_hex(16))
    try:
        store.create(HOME_NAME, [home.dump()])
    except CkptError as error:
        if error.code not in (Code.STORE_EXISTS, Code.STORE_NO_ANSWER):
            raise
    store.sync("")
    found = read_home(store)
    if found is None:
        raise err(Code.STORE_IO, "the home's identity was just created, and isn't there")
    check_run_id(run_id, found.run_id, HOME_NAME)
    return found.home
