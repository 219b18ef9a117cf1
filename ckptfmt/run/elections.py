"""The begin of a launch of a run with several homes: its votes, and the home to go on at.

Spec: REQ-RUN-066, REQ-RUN-069, REQ-RUN-070.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import secrets
import time
from collections import Counter
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from typing import Final

from ckptfmt import limits
from ckptfmt.commit.decision import create_once, read_register
from ckptfmt.commit.waiting import describe_savers, wait_for_savers
from ckptfmt.documents.manifest import Manifest, Tombstone
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
)
from ckptfmt.errors import CkptError, Code, err
from ckptfmt.features import HOMES
from ckptfmt.run.homes import (
    MISSING,
    STRANGER,
    Answers,
    HomePlace,
    ask,
    create_home,
    errors_of,
    homes_away,
    majority_of,
    read_home,
)
from ckptfmt.run.lineage import (
    LostLaunch,
    RunEntry,
    check_records,
    check_writer_features,
    fenced,
    iter_lineage,
    list_checkpoints,
    list_launches,
    open_run,
    read_run,
)
from ckptfmt.run.scrub import scrub_checkpoint
from ckptfmt.run.votes import OtherHomes, cast, check_votes, list_vote_numbers, read_vote
from ckptfmt.store import check_apart
from ckptfmt.store.protocol import Store

#: Number of tries for the votes of a majority. Each try takes a new number.
_TRIES: Final = 16
#: Longest pause before the next try, in seconds: launches begun at once must fall out of step.
_TRY_PAUSE_S: Final = 0.5
#: Longest wait for further votes after those of a majority, in seconds.
_VOTE_GRACE_S: Final = 2.0
#: Longest time of a home to list the run after an answer, as a multiple of `away_after_s`.
_LOOK_TIMES: Final = 10


@dataclasses.dataclass(frozen=True, slots=True)
class _View:
    """The contents of a home, or of a place that may become a home.

    Attributes:
        home: identity of the home; None at any other place.
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


def _run_of(views: Mapping[int, _View]) -> str:
    """Return the id of the run with the most homes here, whichever home answered first.

    Of several such runs, the run of the place that was given first counts.
    """
    homes = [home for number in sorted(views) if (home := views[number].home) is not None]
    return Counter(home.run_id for home in homes).most_common(1)[0][0]


def _find_ids(views: Mapping[int, _View], run_id: str) -> tuple[set[str], set[str]]:
    """Return the ids of the homes of the run, and the ids that the newest vote may have set.

    Both are empty before the first vote. A launch that changes the homes records them behind its
    votes. In between, only a launch with a majority of both sets may begin.
    """
    # A home of another run has launches and votes of its own.
    places = [
        (view.home, view.vote)
        for view in views.values()
        if view.home is not None and view.home.run_id == run_id
    ]
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

    def enter(
        self,
        *,
        resume: str,
        writer_features: Sequence[str],
        wait_s: float,
        after: int | None = None,
    ) -> ChosenHome:
        """Get the votes for the next launch, and choose the home at which the launch begins.

        The home has the checkpoint from which the launch resumes. `elect` then returns the votes.

        Args:
            resume: see `Checkpointer`.
            writer_features: writer features of a new run.
            wait_s: longest wait for the saves of living savers, in seconds.
            after: number of the launch whose processes go on, and which must still own the run;
                None for a start.

        Raises: StoreError(HOMES_AWAY, HOME_BEHIND); CommitError(HOMES_DIVERGED);
            IntegrityError(NOT_COMMITTED) without the checkpoint of `resume`; FencedError(FENCED).
            Spec: REQ-RUN-066, REQ-RUN-069, REQ-RUN-070.
        """
        for _ in range(_TRIES):
            views, errors = self._look_at_all(writer_features)
            members, joining = self._find_members(views, errors)
            run_id = self._check_runs(members)
            _check_owned(members.values(), after)
            reports = self._tell_away(views, errors, members, joining)
            check_wanted(members, self.homes, resume)
            reports += self._wait_for_savers(members, wait_s)
            known = max(view.newest for view in views.values())
            collected = self._collect(
                run_id, known, members, joining, looks_again=after is not None
            )
            if collected is None:  # the homes, or the newest launch, may be others now
                continue
            vote, voters = collected
            # A newer launch sees each commit confirmed before the votes.
            looked = self._look(members)
            views = looked.values
            if len(views) < self._majority:
                raise homes_away(self._by_number, looked, "REQ-RUN-066")
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
        """Return the votes of a majority for the next launch: from `enter`, or new votes.

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
        """Return the contents of all answering homes, and the errors of the rest.

        Places without homes of any run become the homes of a run.
        """
        alive = ask(self._by_number, _probe, deadline_s=self._away_after_s)
        missing = [n for n, error in alive.errors.items() if error.detail == MISSING]
        check_apart([self.homes[n].open_unasked() for n in (*alive.values, *missing)])
        looked = self._look(alive.values)
        errors = alive.errors | looked.errors
        if any(view.home for view in looked.values.values()):
            return looked.values, errors
        if len(looked.values) + len(missing) < len(self.homes):
            raise homes_away(
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

        The newest vote names the homes. A place without a home becomes a home if all other homes
        are there, so that all other homes vote for the launch with the new home.

        Raises: StoreError(HOMES_AWAY). Spec: REQ-RUN-070.
        """
        ids = {n: view.home.home for n, view in views.items() if view.home is not None}
        run_id = _run_of(views)
        known, doubted = _find_ids(views, run_id)
        is_new = not known
        known = known or set(ids.values())
        members = {n: views[n] for n, home_id in ids.items() if home_id in known}
        fewest = len(members)
        if doubted:
            fewest = min(fewest, len(doubted.intersection(ids.values())))
        if is_new and len(views) == len(self.homes):
            # The founding process ended in between: no launch has begun, as the first needs
            # the votes of all homes.
            for n in views.keys() - ids.keys():
                ids[n] = create_home(self.homes[n].open(), run_id)
                home = HomeRecord(run_id=run_id, home=ids[n])
                views[n] = dataclasses.replace(views[n], home=home)
            members = {n: views[n] for n in ids}
            fewest = len(members)
        if fewest < self._majority or (is_new and len(ids) < len(self.homes)):
            source = self.homes[min(members or ids)].name
            told = errors_of(self.homes, members, {**dict.fromkeys(views, STRANGER), **errors})
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
            for number, error in sorted(errors_of(self.homes, views, errors).items())
        ]
        for number in sorted(views):
            name = self.homes[number].name
            if number in joining:
                reports.append(f"HOME_BEHIND: {name} was empty, and becomes a home of the run")
            elif number not in members:
                reports.append(f"HOMES_AWAY: {name} is away: {STRANGER.detail}")
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
        self,
        run_id: str,
        known: int,
        members: Collection[int],
        joining: Mapping[int, str],
        *,
        looks_again: bool = False,
    ) -> tuple[Vote, set[int]] | None:
        """Return the votes of a majority for a launch with a number above `known`, and the voters.

        A launch that changes the homes needs the votes of all members.

        Args:
            members: numbers of the homes, whose votes count.
            joining: places that become homes with this launch.
            looks_again: whether another launch with the number matters, as in a launch that changes
                the homes.

        Returns: None if another launch has the number, and matters.
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
                lambda store: cast(store, vote),  # noqa: B023
                deadline_s=self._away_after_s,
                member_of=run_id,
                is_enough=lambda values: any(values.values()),
                grace_s=_VOTE_GRACE_S,
            )
            voters = {number for number, taken in answers.values.items() if taken == 0}
            if len(voters) >= needed_count:
                for number in joining:  # its own vote isn't needed
                    cast(self.homes[number].open(), vote)
                return vote, voters
            taken = max(answers.values.values(), default=0)
            if taken == 0:
                raise homes_away(self._by_number, answers, "REQ-RUN-066")
            if self._changes or looks_again:
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


def _check_owned(views: Iterable[_View], launch: int | None) -> None:
    """Refuse to go on from a launch that isn't the newest, before a vote ends the newest one.

    Raises: FencedError(FENCED). Spec: REQ-RUN-004.
    """
    begun = (one.launch for view in views for one in view.launches)
    newest = max(begun, default=0)
    if launch is not None and newest > launch:
        raise fenced(newest, launch)


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
