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
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Generic, Self, TypeVar

from ckptfmt import limits
from ckptfmt.commit.decision import create_once, read_register
from ckptfmt.commit.waiting import describe_savers, poll, wait_for_savers
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
from ckptfmt.errors import CkptError, Code, StoreError, err
from ckptfmt.run.lineage import (
    LostLaunch,
    RunEntry,
    check_records,
    check_writer_features,
    iter_lineage,
    list_checkpoints,
    list_launches,
    list_places,
    list_vote_numbers,
    open_run,
    read_launch,
    read_run,
)
from ckptfmt.store import Address, address_of, check_apart, local_path, open_address
from ckptfmt.store.protocol import Store

T = TypeVar("T")

#: Pause before a home that didn't answer is asked again, in seconds: the first, and the longest.
_PAUSE_MIN_S: Final = 0.1
_PAUSE_MAX_S: Final = 5.0
#: Number of tries for the votes of a majority. Each try takes a new number.
_TRIES: Final = 16
#: Longest pause before the next try, in seconds: launches that begin at once must fall out of step.
_TRY_PAUSE_S: Final = 0.5


@dataclasses.dataclass(frozen=True, slots=True)
class Home:
    """A home of a run, opened only when it is asked: a home that is away can't be opened.

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

    def open(self) -> Store:
        """Return the store for writing, opened at the first call in this process."""
        if not isinstance(self.address, bytes | dict):
            return self.address
        key = repr(self.address)
        store = _OPENED.get(key)
        if store is None:
            store = _OPENED[key] = open_address(self.address, writable=True)
        return store

    @property
    def has_address(self) -> bool:
        """Whether other processes of this machine can open the home."""
        return isinstance(self.address, bytes | dict)


#: The opened stores, by the text of their addresses.
_OPENED: Final[dict[str, Store]] = {}


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
    homes: Mapping[int, Home],
    question: Callable[[Store], T],
    *,
    deadline_s: float,
    is_enough: Callable[[Mapping[int, T]], bool] = lambda _: False,
) -> Answers[T]:
    """Ask several homes at once, and again after a StoreError, until all have answered.

    Args:
        homes: homes by their numbers.
        question: called with the store of each home, in a thread of the home.
        deadline_s: longest wait in seconds. A home without an answer by then is away.
        is_enough: whether the answers so far are enough, so that the rest isn't waited for.

    Raises: any other error of the question.
    """
    told: queue.SimpleQueue[tuple[int, T | None, BaseException | None]] = queue.SimpleQueue()
    end_s = time.monotonic() + deadline_s
    for number, home in homes.items():
        # A daemon: a request to an unresponsive store may take minutes.
        tell = functools.partial(_tell, told, number)
        threading.Thread(
            target=_keep_asking,
            args=(home, question, end_s, tell),
            name="ckptfmt-home",
            daemon=True,
        ).start()
    answers: Answers[T] = Answers()
    while len(answers.values) < len(homes) and not is_enough(answers.values):
        try:
            number, value, error = told.get(timeout=max(0.0, end_s - time.monotonic()))
        except queue.Empty:
            break
        if isinstance(error, StoreError):
            answers.errors[number] = error
        elif isinstance(error, CkptError):
            raise error.below(homes[number].name)
        elif error is not None:
            raise error
        else:
            answers.errors.pop(number, None)
            answers.values[number] = value  # type: ignore[assignment]
    return answers


def _tell(
    told: queue.SimpleQueue[tuple[int, T | None, BaseException | None]],
    number: int,
    value: T | None,
    error: BaseException | None,
) -> None:
    told.put((number, value, error))


def _keep_asking(
    home: Home,
    question: Callable[[Store], T],
    end_s: float,
    tell: Callable[[T | None, BaseException | None], None],
) -> None:
    """Ask a home until it answers or the time is over; every error is told."""
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
        time.sleep(pause_s)
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
        away_after_s: time after which a home that doesn't answer counts as away, in seconds.
    """

    homes: tuple[Home, ...]
    away_after_s: float

    def as_dict(self) -> dict[str, Any]:
        """Return the homes as plain values; a store without an address stays a store."""
        homes = [[home.address, home.name] for home in self.homes]
        return {"homes": homes, "away_after_s": str(self.away_after_s)}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Self:
        """Return the homes of `as_dict`."""
        homes = tuple(Home(address, name) for address, name in value["homes"])
        return cls(homes=homes, away_after_s=float(value["away_after_s"]))

    def await_copy(
        self, home: Store, launch: int, *, deadline_s: float, gives_up: threading.Event
    ) -> None:
        """Wait until a majority of the homes has the save before the next commit of a launch.

        Args:
            home: the home at which the launch commits.
            deadline_s: longest wait in seconds.
            gives_up: ends the wait when set, as nobody copies any more.

        Raises: StoreError(HOME_BEHIND). Spec: REQ-RUN-068.
        """
        before = find_previous(home, launch)
        if before is None:
            return
        needed_count = majority_of(len(self.homes) + 1) - 1
        homes = dict(enumerate(self.homes))

        def is_enough(values: Mapping[int, bool]) -> bool:
            return sum(values.values()) >= needed_count

        for _ in poll(deadline_s, pause_max_s=1.0):
            answers = ask(
                homes,
                lambda store: _has(store, before),
                deadline_s=self.away_after_s,
                is_enough=is_enough,
            )
            if is_enough(answers.values):
                return
            if gives_up.is_set():
                break
        raise err(
            Code.HOME_BEHIND,
            f"{before.name} isn't at another home yet, and a commit before that could lose two"
            " saves with this home",
            where=home.name,
            requirement="REQ-RUN-068",
        )

    def confirm(self, home: Store, launch: int) -> None:
        """Check that no newer launch may have the votes of a majority.

        Called after a commit at `home`: the commit counts only if this method returns.

        Raises: FencedError(FENCED); StoreError(HOMES_AWAY). Spec: REQ-RUN-067.
        """
        homes = dict(enumerate((Home(home, home.name), *self.homes)))
        count = len(homes)

        def question(store: Store) -> dict[int, str]:
            newer = [number for number in list_vote_numbers(store) if number > launch]
            return {number: read_vote(store, number).nonce for number in newer}

        def is_enough(values: Mapping[int, dict[int, str]]) -> bool:
            if len(values) < majority_of(count):
                return False
            return _find_overruling(values.values(), count) is None

        answers = ask(homes, question, deadline_s=self.away_after_s, is_enough=is_enough)
        if len(answers.values) < majority_of(count):
            raise _homes_away(homes, answers, "REQ-RUN-067")
        newest = _find_overruling(answers.values.values(), count)
        if newest is not None:
            raise err(
                Code.FENCED,
                f"launch {newest} has taken over from launch {launch}, at another home",
                where=f"{VOTES}/{launch_name(newest)}",
                requirement="REQ-RUN-067",
            )


def _find_overruling(seen: Iterable[Mapping[int, str]], count: int) -> int | None:
    """Return a newer launch that may have the votes of a majority; None without one.

    Args:
        seen: numbers and nonces of the votes at each home that answered.
        count: number of homes.
    """
    answers = list(seen)
    votes = collections.Counter(vote for answer in answers for vote in answer.items())
    unseen_count = count - len(answers)
    # A home without an answer may have voted for any launch, also for one that no other home knows.
    # Such a launch needs the votes of a majority, and so of a home that answered.
    return max(
        (
            number
            for (number, _), vote_count in votes.items()
            if vote_count + unseen_count >= majority_of(count)
        ),
        default=None,
    )


def find_previous(home: Store, launch: int) -> Reference | None:
    """Return the newest commit of a launch at its home, else the checkpoint it resumed from."""
    steps = sorted((step for step, number in list_places(home) if number == launch), reverse=True)
    for step in steps:
        name = checkpoint_name(step, launch)
        register = read_register(home.at(name))
        if isinstance(register, Manifest):
            return Reference(name=name, digest=register.digest)
    return read_launch(home, launch).resume_from


def _has(store: Store, reference: Reference) -> bool:
    register = read_register(store.at(reference.name))
    if isinstance(register, Tombstone):
        return register.manifest_digest == reference.digest
    return isinstance(register, Manifest) and register.digest == reference.digest


# --- votes ----------------------------------------------------------------------------------------


def read_vote(store: Store, number: int) -> Vote:
    """Return a vote of a home. Raises: FormatError, IntegrityError."""
    path = f"{VOTES}/{launch_name(number)}"
    return Vote.parse(store.read(path, limit_nbytes=limits.JSON_NBYTES), where=path)


def _cast(store: Store, vote: Vote) -> int:
    """Vote for a launch at a home.

    Returns: 0, or the number of the newest launch with a vote, if another launch has this number.
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
    """The contents of a home.

    Attributes:
        run: the run's record; None at a place that isn't a home of the run yet.
        launches, entries: see `list_launches` and `list_checkpoints`.
        newest: greatest number of a launch with a vote, a record or a checkpoint; 0 for none.
    """

    run: RunRecord | None
    launches: list[Launch | LostLaunch]
    entries: list[RunEntry]
    newest: int


def _look(store: Store) -> _View:
    newest = max(list_vote_numbers(store), default=0)
    run = read_run(store)
    if run is None:
        return _View(None, [], [], newest)
    launches = list_launches(store, run)
    entries = list_checkpoints(store, run, with_labels=False)
    check_records(store, entries)
    known = [*(launch.launch for launch in launches), *(entry.launch for entry in entries)]
    return _View(run, launches, entries, max([newest, *known]))


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """The home at which a launch begins.

    Attributes:
        number: number of the home, in the order in which the homes were given.
        reports: one sentence for each home that is away, or isn't up to date.
    """

    number: int
    reports: tuple[str, ...]


class Homes:
    """The homes of a run, for the process that begins launches.

    Args:
        homes: the homes; the first usable one is preferred.
        away_after_s: time after which a home that doesn't answer counts as away, in seconds.
    """

    def __init__(self, homes: Sequence[Home], *, away_after_s: float) -> None:
        self.homes = tuple(homes)
        self._away_after_s = away_after_s
        self._majority = majority_of(len(homes))
        self._by_number = dict(enumerate(self.homes))
        #: The votes for the next launch, if a majority has voted.
        self._vote: Vote | None = None

    def beside(self, number: int) -> OtherHomes:
        """Return the homes except one."""
        others = tuple(home for place, home in enumerate(self.homes) if place != number)
        return OtherHomes(homes=others, away_after_s=self._away_after_s)

    def enter(self, *, resume: str, writer_features: Sequence[str], wait_s: float) -> Entry:
        """Get the votes for the next launch, and choose the home at which the launch begins.

        The home has the checkpoint from which the launch resumes. `elect` then returns the votes.

        Args:
            resume: see `Checkpointer`.
            writer_features: writer features of a new run.
            wait_s: longest wait for the saves of living savers, in seconds.

        Raises: StoreError(HOMES_AWAY); CommitError(HOMES_DIVERGED); errors of the homes' documents.
        Spec: REQ-RUN-066, REQ-RUN-069.
        """
        answers = self._ask_all(_look)
        check_apart([self.homes[number].open() for number in answers.values])
        run = self._find_run(answers.values, writer_features)
        reports = [
            f"HOMES_AWAY: {self.homes[number].name} doesn't answer: {error.detail}"
            for number, error in sorted(_errors_of(self.homes, answers).items())
        ]
        for number in sorted(answers.values):
            with contextlib.suppress(StoreError):  # the next look finds out whether it is away
                held = wait_for_savers(self.homes[number].open(), deadline_s=wait_s)
                if held:
                    reports.append(
                        f"the saves of {describe_savers(held)} weren't committed in time"
                    )
        self._vote = self._collect(run.run_id, max(one.newest for one in answers.values.values()))
        # A newer launch sees each commit that was confirmed before these votes.
        looked = self._ask_all(_look, of=answers.values)
        views = {number: view for number, view in looked.values.items() if view.run is not None}
        if len(views) < self._majority and len(looked.values) < len(self.homes):
            raise _homes_away(self._by_number, looked, "REQ-RUN-066")
        launches, entries = _unite(views, self.homes)
        number = _choose(views, launches, entries, resume)
        self._bring_records(number, views, launches)
        if number != min(views):
            reports.append(
                f"HOME_BEHIND: the launch goes on at {self.homes[number].name}, which has the"
                " newest checkpoint"
            )
        return Entry(number, tuple(reports))

    def elect(self, run: RunRecord, known: int) -> Vote:
        """Return the votes of a majority for the next launch: those of `enter`, else new ones.

        Args:
            run: record of the run.
            known: the greatest known number of a launch.

        Raises: StoreError(HOMES_AWAY). Spec: REQ-RUN-066.
        """
        vote = self._vote
        self._vote = None
        return vote or self._collect(run.run_id, known)

    def _ask_all(
        self, question: Callable[[Store], T], *, of: Iterable[int] | None = None
    ) -> Answers[T]:
        """Ask all homes, or the homes of these numbers; a majority must answer."""
        homes = self._by_number
        asked = homes if of is None else {number: homes[number] for number in of}
        answers = ask(asked, question, deadline_s=self._away_after_s)
        if len(answers.values) < self._majority:
            raise _homes_away(homes, answers, "REQ-RUN-066")
        return answers

    def _find_run(self, views: Mapping[int, _View], writer_features: Sequence[str]) -> RunRecord:
        """Return the record of the run, and make a place without files a home.

        A new place becomes a home only while all homes answer: a majority of new places may know
        nothing of the run.

        Raises: FormatError(RUN_MISMATCH); StoreError(HOMES_AWAY). Spec: REQ-RUN-070.
        """
        members = {number: view for number, view in views.items() if view.run is not None}
        if len(members) < self._majority and len(views) < len(self.homes):
            missing = [self.homes[number].name for number in views if number not in members]
            raise err(
                Code.HOMES_AWAY,
                f"{', '.join(missing)} has no run yet, and not all homes answer",
                where=self.homes[0].name,
                requirement="REQ-RUN-070",
                remedy="Start once while all homes answer.",
            )
        if members:
            number = min(members)
            run = members[number].run
            assert run is not None  # noqa: S101
            for other, view in members.items():
                found = None if view.run is None else view.run.run_id
                where = f"{self.homes[other].name}/{RUN_NAME}"
                check_run_id(run.run_id, found, where)
            check_writer_features(run)
            if any(view.launches or view.entries for view in members.values()):
                return run  # a new home gets the record with its first checkpoint
        else:
            number = min(views)
            run = open_run(self.homes[number].open(), writer_features=writer_features)
        content = self.homes[number].open().read(RUN_NAME, limit_nbytes=limits.JSON_NBYTES)
        for other in views:
            if other not in members and other != number:
                create_once(self.homes[other].open(), RUN_NAME, content=content)
                self.homes[other].open().sync("")
        return run

    def _collect(self, run_id: str, known: int) -> Vote:
        """Return the votes of a majority for a launch with a number above `known`."""
        homes = self._by_number
        for attempt in range(_TRIES):
            if attempt:
                time.sleep(random.uniform(0.0, _TRY_PAUSE_S))  # noqa: S311
            vote = Vote(run_id=run_id, launch=known + 1, nonce=secrets.token_hex(16))

            def is_enough(values: Mapping[int, int]) -> bool:
                return list(values.values()).count(0) >= self._majority

            answers = ask(
                homes,
                lambda store: _cast(store, vote),  # noqa: B023
                deadline_s=self._away_after_s,
                is_enough=is_enough,
            )
            if is_enough(answers.values):
                return vote
            if len(answers.values) < self._majority:
                raise _homes_away(homes, answers, "REQ-RUN-066")
            known = max(vote.launch, *answers.values.values())
        detail = f"{_TRIES} times other launches began at the same moment"
        raise err(Code.HOMES_AWAY, detail, where=homes[0].name, requirement="REQ-RUN-066")

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
            content = self.homes[source].open().read(path, limit_nbytes=limits.JSON_NBYTES)
            if Launch.parse(content, where=path) == launch:
                create_once(home, path, content=content)
                home.sync(LAUNCHES)


def _errors_of(homes: Sequence[Home], answers: Answers[Any]) -> dict[int, CkptError]:
    """Return the error of each home without an answer."""
    silent = err(Code.STORE_NO_ANSWER, "no answer in time")
    return {
        number: answers.errors.get(number, silent)
        for number in range(len(homes))
        if number not in answers.values
    }


def _homes_away(homes: Mapping[int, Home], answers: Answers[Any], requirement: str) -> CkptError:
    errors = _errors_of(list(homes.values()), answers)
    told = "; ".join(f"{homes[number].name}: {error.detail}" for number, error in errors.items())
    count = len(homes) - len(errors)
    return err(
        Code.HOMES_AWAY,
        f"{count} of {len(homes)} homes answer, and {majority_of(len(homes))} are needed: {told}",
        where=homes[0].name,
        requirement=requirement,
    )


def _unite(
    views: Mapping[int, _View], homes: Sequence[Home]
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


def _diverged(path: str, home: Home) -> CkptError:
    detail = f"it is another one at {home.name} than at the homes before"
    return err(Code.HOMES_DIVERGED, detail, where=path, requirement="REQ-RUN-069")


def _digest_of(entry: RunEntry) -> str | None:
    """Return the manifest's digest of a committed or retired checkpoint; else None."""
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
