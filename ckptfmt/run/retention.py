"""The rules for the checkpoints that a run keeps, and the retirement of the rest.

Spec: REQ-CMT-020 to REQ-CMT-026.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import itertools
import secrets
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from ckptfmt import limits
from ckptfmt.commit.decision import (
    CONDEMNED,
    Known,
    abort,
    delete_unfinished,
    read_register,
    refusal_of,
    retire,
    sweep,
)
from ckptfmt.documents.durability import HOME
from ckptfmt.documents.manifest import (
    PINS_SUFFIX,
    Abort,
    Manifest,
    Tombstone,
    parse_checkpoint_name,
)
from ckptfmt.documents.run import LABELS_FOLDER, SAVERS, LabelsRecord, Launch, Pins, RunRecord
from ckptfmt.errors import CkptError, Code, IntegrityError, err
from ckptfmt.features import LABELS, REFERENCED
from ckptfmt.read.verify import find_damage
from ckptfmt.run.labelling import list_newest_labels
from ckptfmt.run.lineage import (
    LostLaunch,
    RunEntry,
    check_not_fenced,
    check_records,
    check_writer_features,
    is_overtaken,
    iter_lineage,
    list_checkpoints,
    list_launch_numbers,
    list_launches,
    list_missing,
    read_launch,
)
from ckptfmt.store.protocol import CALLS_AT_ONCE, Store, call_each

#: A metric, ``min`` or ``max``, and the number of best checkpoints to keep.
KeepBest: TypeAlias = "tuple[str, Literal['min', 'max'], int]"


class Need(NamedTuple):
    """The reason why a checkpoint is needed, and the remedy for a deletion by a person."""

    reason: str
    remedy: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """The rules by which committed checkpoints of a run stay, for ``Checkpointer(keep=)``.

    A checkpoint stays if any of the rules applies. Pinned checkpoints always stay.

    Attributes:
        newest: number of the newest checkpoints to keep; by default None, to keep all.
        every: divisor of the steps whose checkpoints are kept as well, in steps; by default None,
            for no such checkpoint.
        best: a metric, "min" or "max", and a number: this many checkpoints, the best by the metric,
            are kept as well; by default None. A checkpoint saved without the metric doesn't count,
            unless `Run.set_metrics` has added the metric since. As long as no checkpoint has the
            metric, all checkpoints are kept, and the log says so.

    Raises: StateError(ARGUMENT) for a number below 1, and for `best` without `newest`.

    >>> Retention(newest=3, best=("eval_loss", "min", 1))
    Retention(newest=3, every=None, best=('eval_loss', 'min', 1))
    """

    newest: int | None = None
    every: int | None = None
    best: KeepBest | None = None

    def __post_init__(self) -> None:
        for name, count in (("newest", self.newest), ("every", self.every)):
            if count is not None:
                _check_count(count, name, where=f"Retention({name}=)", remedy=_COUNTS[name])
        if self.best is not None:
            _check_best(self.best, self.newest)

    @classmethod
    def of(cls, given: int | Retention | None) -> Retention:
        """Return the rules of a caller; a number is the number of newest checkpoints.

        Raises: StateError(ARGUMENT).
        """
        if isinstance(given, Retention):
            return given
        if given is not None:
            remedy = f"{_COUNTS['newest']}; or a ckptfmt.Retention"
            _check_count(given, "keep", where="keep=", remedy=remedy)
        return cls(newest=given)

    def as_dict(self) -> dict[str, Any]:
        """Return the rules as plain values."""
        return {**dataclasses.asdict(self), "best": self.best and list(self.best)}

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> Retention:
        """Return the rules from the plain values of `as_dict`."""
        return cls(**{**value, "best": value["best"] and tuple(value["best"])})


#: An example of each number, and the meaning of a missing number.
_COUNTS: Final = {
    "newest": "keep=3 for the newest three; without it all stay",
    "every": (
        "keep=Retention(newest=3, every=1000) for the steps that 1000 divides as well; without"
        " every= no checkpoint stays for its step"
    ),
}
#: Number of checkpoints without the metric from which on a training reports.
_MANY: Final = 16
#: The rules under which all committed checkpoints stay.
KEEP_ALL: Final = Retention()
#: Errors of a store that surely didn't write: a call without an answer may take effect later.
_REFUSALS: Final = frozenset({Code.NO_SPACE, Code.STORE_ACCESS})
_ALL: Final = "To delete the whole run, delete its directory."
_SAVING: Final = Need(
    "a save that isn't committed yet will read from it",
    "Delete it once that save is over: `ckptfmt ls` shows it.",
)


def _check_count(count: object, name: str, *, where: str, remedy: str) -> None:
    if type(count) is not int or count < 1:
        raise err(
            Code.ARGUMENT,
            f"{name}={count!r} isn't a positive number",
            where=where,
            remedy=f"Pass a whole number from 1 on, such as {remedy}.",
        )


def _check_best(best: object, newest: int | None) -> None:
    """Raise unless the value is a metric, ``min`` or ``max``, and a number.

    Raises: StateError(ARGUMENT).
    """
    match best:
        case (str(), "min" | "max", int(count)) if count > 0 and type(count) is int:
            if newest is None:
                remedy = "Say with newest= how many of the newest stay beside the best."
                raise err(
                    Code.ARGUMENT,
                    "without newest= all checkpoints stay",
                    where="Retention(best=)",
                    remedy=remedy,
                )
        case _:
            remedy = "Pass a metric, 'min' or 'max', and how many, such as ('eval_loss', 'min', 3)."
            raise err(
                Code.ARGUMENT,
                f"{best!r} isn't a metric, 'min' or 'max', and a number",
                where="Retention(best=)",
                remedy=remedy,
            )


def explain_no_space(error: CkptError, run: Store, retention: Retention) -> CkptError:
    """Return the error of a save to a full store with the run's remedy; other errors unchanged.

    Args:
        run: rooted at the run.
        retention: the run's rules.
    """
    if error.code != Code.NO_SPACE or error.remedy != Code.NO_SPACE.remedy:
        return error
    keep = retention.newest
    if keep is None:
        remedy = (
            f"Without keep= this run keeps all its checkpoints: `ckptfmt gc {run.name} --keep 3`"
            " deletes all but the"
            " newest three now, and Checkpointer(keep=3) does so after each save."
        )
    elif keep > 1 or retention.every is not None or retention.best is not None:
        chosen = f"keep={keep}" if retention == Retention(newest=keep) else f"keep={retention!r}"
        remedy = (
            f"This run was begun with {chosen}: `ckptfmt gc {run.name} --keep 1`"
            " deletes all but the newest checkpoint now, and a Checkpointer that keeps less does"
            " so after each save."
        )
    else:
        remedy = (
            "This run keeps one checkpoint, and a save needs room for a second one until it is"
            " committed: free space"
            f" outside of {run.name}."
        )
    return err(
        error.code, error.detail, where=error.where, requirement=error.requirement, remedy=remedy
    )


def plan_retention(
    launches: Sequence[Launch | LostLaunch], entries: list[RunEntry], retention: Retention
) -> list[RunEntry]:
    """Return the committed checkpoints that may go, oldest first. Pure.

    The checkpoints on the lineage of the newest launch are counted, and may go. Off the lineage:

    - A late commit of a fenced launch may go, once the newest launch has committed: no launch
      passed the checkpoint over, and none goes on from there.
    - A damaged checkpoint, passed over by a launch, goes once as many as are kept have greater
      steps, like an undamaged checkpoint.
    - The checkpoints left by a rollback stay, for a person to decide.

    The checkpoint that the newest launch resumes from stays until the launch's first commit.

    A checkpoint with files in caches only isn't counted, and goes once a newer checkpoint is at
    home, whatever `retention` says. A suspect checkpoint isn't counted either, and goes like a
    damaged one.

    A pinned checkpoint stays. While no checkpoint has the metric of `best`, all stay: perhaps
    the metric's name is misspelt, or the metric is measured later.

    Where the lineage passes a launch with an unreadable record, no checkpoint of an older launch
    goes: the choice of this launch is unknown.
    """
    # Entries after an unreadable record may not be on the lineage, and aren't counted.
    known = itertools.takewhile(lambda entry: not entry.is_record, iter_lineage(launches, entries))
    lineage = [entry for entry in known if entry.manifest is not None]
    at_home = [entry for entry in lineage if is_at_home(entry)]
    own = [entry for entry in at_home if launches and entry.launch == launches[-1].launch]
    protected = {entry.name for entry in entries if entry.is_pinned}
    newest = launches[-1] if launches else None
    if not own and isinstance(newest, Launch) and newest.resume_from is not None:
        protected.add(newest.resume_from.name)
    behind = [
        entry
        for entry in _iter_behind(entries, lineage, at_home, own)
        if entry.name not in protected
    ]
    ended = _list_ended(
        launches, entries, retention, at_home, has_own=bool(own), protected=protected
    )
    going = {entry.name for entry in (*behind, *ended)}
    # Bases of checkpoints that stay, also of checkpoints off the lineage.
    going -= {one.name for entry in entries if entry.name not in going for one in entry.references}
    first = find_barrier(launches, entries)
    # A delta comes after its bases, which are of the same launch and of smaller steps.
    return sorted(
        (entry for entry in (*behind, *ended) if entry.name in going and entry.launch >= first),
        key=lambda entry: (entry.step, entry.launch),
    )


def find_barrier(launches: Sequence[Launch | LostLaunch], entries: list[RunEntry]) -> int:
    """Return the newest launch on the lineage with an unreadable record; 0 if there is none.

    No checkpoint of an older launch may go by retention. Spec: REQ-CMT-051.
    """
    return max(
        (entry.launch for entry in iter_lineage(launches, entries) if entry.is_record), default=0
    )


def is_at_home(entry: RunEntry) -> bool:
    """Return whether a checkpoint is committed, and had all files at home at the commit."""
    return entry.manifest is not None and entry.manifest.durability == HOME


def _list_ended(
    launches: Sequence[Launch | LostLaunch],
    entries: list[RunEntry],
    retention: Retention,
    at_home: list[RunEntry],
    *,
    has_own: bool,
    protected: set[str],
) -> list[RunEntry]:
    """Return the checkpoints at home that may go; `at_home` has the lineage's, best first."""
    keep = retention.newest
    every = retention.every
    if keep is None:
        return []
    staying = protected | {entry.name for entry in at_home[:keep]}
    if retention.best is not None:
        metric, mode, count = retention.best
        best = sort_by_metric(at_home, metric, mode)[:count]
        if not best:
            return []
        staying |= {entry.name for entry in best}
    late: list[RunEntry] = []
    given_up: list[RunEntry] = []
    if has_own:
        beside = [
            one
            for one in _iter_beside(launches, entries, at_home, chosen_by="lineage")
            if is_at_home(one)
        ]
        late = [one for one in beside if not one.is_suspect]
        names = {one.name for one in at_home}
        suspect = [
            one
            for one in iter_lineage(launches, entries, with_suspect=True)
            if one.name not in names
        ]
        passed_over = [
            *suspect,
            *beside,
            *_iter_beside(launches, entries, at_home, chosen_by="fallback"),
        ]
        given_up = [
            one
            for one in {one.name: one for one in passed_over}.values()
            if is_at_home(one)
            and one not in late
            and sum(other.step > one.step for other in at_home) >= keep
        ]
    return [
        *(
            one
            for one in (*at_home, *late)
            if one.name not in staying and not (every and one.step % every == 0)
        ),
        *(one for one in given_up if one.name not in staying),
    ]


def _iter_behind(
    entries: list[RunEntry], lineage: list[RunEntry], at_home: list[RunEntry], own: list[RunEntry]
) -> Iterator[RunEntry]:
    """Yield the checkpoints with files in caches only, no longer wanted by any process.

    On the lineage, all after the first checkpoint at home are yielded. Off the lineage, all of
    older launches are yielded, once the newest launch has a commit at home.

    Spec: REQ-CMT-049.
    """
    names = {entry.name for entry in lineage}
    first = lineage.index(at_home[0]) if at_home else len(lineage)
    yield from (entry for entry in lineage[first:] if not is_at_home(entry))
    for entry in entries:
        is_beside = entry.manifest is not None and not is_at_home(entry) and entry.name not in names
        if is_beside and own and entry.launch < own[0].launch:
            yield entry


def sort_by_metric(entries: Iterable[RunEntry], metric: str, mode: str) -> list[RunEntry]:
    """Return the checkpoints with a metric, the best first; of equals the newer first.

    Args:
        mode: ``min`` where less is better, ``max`` where more is better.
    """
    sign = 1 if mode == "min" else -1
    known = [
        (value, entry) for entry in entries if (value := entry.labels.number(metric)) is not None
    ]
    known.sort(key=lambda one: (sign * one[0], -one[1].step, -one[1].launch))
    return [entry for _, entry in known]


def _iter_beside(
    found: Sequence[Launch | LostLaunch],
    entries: list[RunEntry],
    lineage: list[RunEntry],
    *,
    chosen_by: str,
) -> Iterator[RunEntry]:
    """Yield the checkpoints off the lineage ranking before the next launch's choice.

    If the next launch followed the lineage, the checkpoints were committed late. If it fell back,
    it passed them over as damaged, or they were committed late. Checkpoints given up by hand aren't
    among them, nor checkpoints from which a launch resumed.

    Args:
        chosen_by: the way of the next launch's choice: ``lineage`` or ``fallback``.

    Spec: REQ-CMT-026.
    """
    launches = [launch for launch in found if isinstance(launch, Launch)]
    known = {entry.name for entry in lineage} | {
        one.resume_from.name for one in launches if one.resume_from
    }
    standing = [launch for launch in launches if not is_overtaken(launch, entries)]
    for entry in entries:
        successor = next((launch for launch in standing if launch.launch > entry.launch), None)
        if (
            entry.manifest is None
            or entry.name in known
            or successor is None
            or successor.chosen_by != chosen_by
        ):
            continue
        between = [
            launch for launch in launches if entry.launch < launch.launch <= successor.launch
        ]
        if len(between) < successor.launch - entry.launch:
            continue  # a record is lost, perhaps the record of a rollback
        chosen = (
            None
            if successor.resume_from is None
            else parse_checkpoint_name(successor.resume_from.name)
        )
        if chosen is None or chosen[::-1] < (entry.launch, entry.step):
            yield entry


class LastLoadable(NamedTuple):
    """The newest loadable checkpoint to be retired, where no remaining checkpoint is loadable.

    Attributes:
        names: names of the checkpoint and of its bases; empty where no checkpoint of the run can
            be loaded.
        reason: why the checkpoint stays.
    """

    names: frozenset[str]
    reason: str


def find_last_loadable(
    store: Store,
    launches: Sequence[Launch | LostLaunch],
    entries: list[RunEntry],
    going: Sequence[RunEntry],
    *,
    loadable: set[str] | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> LastLoadable | None:
    """Return the last loadable checkpoint if among `going`; None if a loadable checkpoint stays.

    The remaining checkpoints are verified in the order of resumption, every byte, until one is
    whole: a deletion is final, and sizes don't show a flipped bit. The sizes are checked first: a
    missing or truncated file costs no reading.

    Args:
        going: the checkpoints to be retired.
        loadable: digests of checkpoints found to be whole before; the call adds to the set.
        on_progress: called with the number of bytes just checked.

    Raises: StoreError. Spec: REQ-CMT-052.
    """
    found: dict[str, CkptError] = {}
    known = set() if loadable is None else loadable
    names = {entry.name for entry in going}
    order = {entry.name: number for number, entry in enumerate(iter_lineage(launches, entries))}
    at_home = sorted(
        (entry for entry in entries if is_at_home(entry) and not entry.is_suspect),
        key=lambda entry: (order.get(entry.name, len(order)), -entry.launch, -entry.step),
    )

    def can_load(entry: RunEntry) -> bool:
        assert entry.manifest is not None  # noqa: S101
        if entry.manifest.digest in known:
            return True
        problem = find_damage(
            store.at(entry.name), digest=entry.manifest.digest, on_progress=on_progress
        )
        if problem is None:
            known.add(entry.manifest.digest)
        else:
            found[entry.name] = problem
        return problem is None

    if any(can_load(entry) for entry in at_home if entry.name not in names):
        return None
    others = ", ".join(f"{name}: {problem.code}" for name, problem in list(found.items())[:4])
    last = next((entry for entry in at_home if entry.name in names and can_load(entry)), None)
    if last is None:
        return LastLoadable(frozenset(), f"no checkpoint of the run can be loaded ({others})")
    reason = (
        "it is the last checkpoint of the run that can be loaded"
        f" ({others or 'no other is at home'})"
    )
    return LastLoadable(frozenset({last.name, *(one.name for one in last.references)}), reason)


def clean_up(
    store: Store,
    run: RunRecord,
    *,
    launch: int,
    retention: Retention = KEEP_ALL,
    known: Known | None = None,
    staying: Container[str] = (),
    aborts: bool = True,
    on_problem: Callable[[str], None] | None = None,
) -> list[str]:
    """Retire checkpoints, abort unfinished saves of older launches, finish interrupted clean-ups.

    While the record of a launch with checkpoints is missing, none is retired: the lineage is
    unknown (REQ-RUN-015).

    Args:
        store: rooted at the run.
        launch: the launch that cleans; undecided directories of this and newer launches are
            left alone.
        retention: the rules for committed checkpoints.
        known: documents parsed before.
        staying: names of checkpoints to keep in any case.
        aborts: whether to abort unfinished saves. An unfinished directory at another home of the
            run is a copy in progress.
        on_problem: called with a sentence where checkpoints stay for lack of a launch record, and
            now and then where they stay for lack of a metric.

    Returns: the names of the directories retired or aborted.
    Raises: UnsupportedError(FEATURE_UNSUPPORTED), before any removal, if the run has a feature
        unknown to this cleaner; FencedError(FENCED) if a newer launch has taken over and does the
        cleaning; StoreError.
    Spec: REQ-CMT-020 to REQ-CMT-026, REQ-RUN-004.
    """
    check_writer_features(run, "REQ-CMT-025", doing="cleaning up", undone="nothing was removed")
    check_not_fenced(store, launch)
    # The leftovers are leases, and probes of the server.
    for folder in ("", SAVERS) if store.holds_expire else (SAVERS,):
        store.delete_leftovers(folder)
    if not store.holds_expire:
        _delete_ended_holds(store, launch)
    launches = list_launches(store, run)
    entries = list_checkpoints(store, run, known=known)
    missing = list_missing(store, launches, entries)
    plan = [] if missing else plan_retention(launches, entries, retention)
    going = [entry for entry in plan if entry.name not in staying]
    problem = _find_lost(store.name, launches, entries, missing)
    if problem is not None and on_problem is not None:
        on_problem(problem)
    is_kept = not missing and not any(map(is_at_home, going))
    if retention.best is not None and is_kept and on_problem is not None:
        problem = find_missing_metric(
            launches, entries, retention, retention.best[0], is_due=_is_worth_a_line
        )
        if problem is not None:
            on_problem(problem)
    is_shared = not {REFERENCED, LABELS}.isdisjoint(run.writer_features)
    removed = (
        _retire_unread(store, run, launches, going, known)[0]
        if is_shared and going
        else _retire(store, going)
    )
    abandoned: set[str] = set()
    if aborts:
        known_launches = [*launches, *missing]
        abandoned = {entry.name for entry in list_abandoned(known_launches, entries, launch)}
    for entry in entries:
        if entry.name in abandoned:
            reason = f"unfinished when launch {launch} cleaned up"
            place = store.at(entry.name)
            if abort(place, run_id=run.run_id, launch=entry.launch, step=entry.step, reason=reason):
                removed.append(entry.name)
    _finish_clean_ups(store, entries, known or Known())
    return removed


def _find_lost(
    run: str,
    launches: Sequence[Launch | LostLaunch],
    entries: list[RunEntry],
    missing: Sequence[LostLaunch],
) -> str | None:
    """Return a sentence if checkpoints stay for lack of a launch record; else None.

    Args:
        run: the run's path.
        missing: the launches without a record.
    """
    if missing:
        return (
            f"launch {missing[0].launch} has a checkpoint and no record: nothing is retired until"
            f" `ckptfmt repair {run}` has written it"
        )
    number = find_barrier(launches, entries)
    if not number:
        return None
    return (
        f"the record of launch {number} can't be read: nothing of older launches is retired until"
        f" `ckptfmt repair {run}` has mended it"
    )


def _finish_clean_ups(store: Store, entries: list[RunEntry], known: Known) -> None:
    """Sweep aborted and retired directories; a directory once found clean isn't listed again."""
    registers = {entry.name: entry.register for entry in entries if entry.name not in known.swept}
    ended = [name for name, found in registers.items() if isinstance(found, Abort | Tombstone)]
    for name in ended:
        # A listing leaves out temporary files. Those of a killed writer may be large.
        if isinstance(registers[name], Abort):
            delete_unfinished(store.at(name))
    for name, file_count in zip(ended, _count_files(store, ended), strict=True):
        if file_count > 1:
            sweep(store.at(name))
        else:
            known.swept.add(name)


def _count_files(store: Store, names: list[str]) -> list[int]:
    """Return the number of files in each directory of a run.

    A remote store with many directories is asked by one listing of the whole run: a retired
    checkpoint has one file, and a run has more retired checkpoints than files of checkpoints that
    stay.
    """
    if store.is_remote and len(names) > CALLS_AT_ONCE:
        counts = Counter(path.partition("/")[0] for path in store.list(""))
        return [counts[name] for name in names]
    return call_each(store, lambda name: len(store.at(name).list("")), names)


def list_abandoned(
    launches: Sequence[Launch | LostLaunch], entries: list[RunEntry], launch: int
) -> list[RunEntry]:
    """Return the undecided directories of older launches, which no process will decide any more.

    Args:
        launch: the launch that cleans.

    Spec: REQ-CMT-021.
    """
    # A checkpoint named in a record was committed: a missing register there is damage, and no
    # unfinished save.
    named = {
        past.resume_from.name
        for past in launches
        if isinstance(past, Launch) and past.resume_from is not None
    }
    # An unreadable or missing record may name any directory of an older launch.
    lost = max((past.launch for past in launches if isinstance(past, LostLaunch)), default=0)
    return [
        entry
        for entry in entries
        if entry.register is None and lost <= entry.launch < launch and entry.name not in named
    ]


def _delete_ended_holds(store: Store, launch: int) -> None:
    """Remove the files of killed savers of older launches from `SAVERS`.

    Only savers use names of this form.
    """
    for name in store.list_names(SAVERS):
        number = name.partition("-")[0]
        if number.isdecimal() and int(number) < launch and not store.is_held(f"{SAVERS}/{name}"):
            store.delete(f"{SAVERS}/{name}")


def find_missing_metric(
    launches: Sequence[Launch | LostLaunch],
    entries: list[RunEntry],
    retention: Retention,
    metric: str,
    *,
    is_due: Callable[[int, str | None], bool] = lambda *_: True,
) -> str | None:
    """Return a sentence if checkpoints stay only for lack of the metric of `best`; else None.

    Args:
        metric: the metric of `Retention.best`.
        is_due: called with the number of such checkpoints, and with a metric
            of a similar name, or None; returns whether to report.
    """
    lineage = [entry for entry in iter_lineage(launches, entries) if entry.manifest is not None]
    has_metric = any(entry.labels.number(metric) is not None for entry in lineage)
    without = plan_retention(launches, entries, dataclasses.replace(retention, best=None))
    count = sum(map(is_at_home, without))
    known = sorted({name for entry in lineage for name in entry.labels.metrics})
    near = next(iter(difflib.get_close_matches(metric, known, n=1, cutoff=0.8)), None)
    if has_metric or not count or not is_due(count, near):
        return None
    meant = f"; did you mean {near!r}?" if near else ""
    return (
        f"Retention(best=) names the metric {metric!r}, which no checkpoint has, so {count} stay"
        " that keep= would let go;"
        f" their metrics: {', '.join(known[:8]) or 'none'}{meant}"
    )


def _is_worth_a_line(count: int, near: str | None) -> bool:
    """Return whether a training reports checkpoints kept for lack of a metric.

    A metric measured once an epoch comes later than the first saves: the report comes when many
    checkpoints stay, and again at each doubling. If checkpoints have a metric of a similar name,
    the name was probably misspelt.

    >>> ([count for count in range(100) if _is_worth_a_line(count, None)],
    ...  _is_worth_a_line(1, "loss"))
    ([16, 32, 64], True)
    """
    return near is not None or (count >= _MANY and count & (count - 1) == 0)


def _retire_unread(
    store: Store,
    run: RunRecord,
    launches: Sequence[Launch | LostLaunch],
    going: list[RunEntry],
    known: Known | None,
) -> tuple[list[str], dict[str, Need]]:
    """Retire the checkpoints that aren't pinned and have no readers, including saves in progress.

    The checkpoints are condemned first, and readers are looked for afterwards. A process that pins
    a checkpoint later sees the condemnation; a pin before is seen here. The same holds for a launch
    beginning from a checkpoint, and for a process recording a metric.

    Args:
        launches: the launches known when the choice was made.

    Returns: the names of the retired checkpoints; and the needs of the rest, by digest.
    Spec: REQ-CMT-026, REQ-CMT-032, REQ-CMT-033.
    """
    # A unique name: a withdrawal removes only this process's condemnation.
    name = CONDEMNED + secrets.token_hex(8)
    staying = list(going)
    try:
        for entry in going:
            store.at(entry.name).create(name, [b""])
        read = _find_read(store, run, going, known)
        read |= _find_begun_from(store, run, launches)
        staying = [
            entry for entry in going if entry.manifest is None or entry.manifest.digest in read
        ]
    finally:
        for entry in staying:
            store.at(entry.name).delete(name)
    # A delta goes before its bases, and an interruption leaves only whole checkpoints.
    condemned = [entry for entry in reversed(going) if entry not in staying]
    return _retire_condemned(store, condemned, name), read


def _retire_condemned(store: Store, going: list[RunEntry], name: str) -> list[str]:
    """Retire condemned checkpoints, and return their names.

    After an error, the condemnation is withdrawn from the checkpoints that stay committed: nobody
    could pin these, or begin a launch from them. A checkpoint whose tombstone may still take effect
    stays condemned.

    Args:
        name: the name of the condemnations.

    Spec: REQ-CMT-033.
    """
    left = list(going)
    try:
        while left:
            _retire(store, left[:1])
            del left[0]
    except BaseException as error:
        for entry in left if _stays_committed(store, left[0], error) else left[1:]:
            with contextlib.suppress(CkptError):
                store.at(entry.name).delete(name)
        raise
    return [entry.name for entry in going]


def _stays_committed(store: Store, entry: RunEntry, error: BaseException) -> bool:
    """Return whether a failed retirement of a checkpoint surely left no tombstone."""
    if not isinstance(error, CkptError) or error.code not in _REFUSALS:
        return False
    try:
        return isinstance(read_register(store.at(entry.name)), Manifest)
    except CkptError:
        return False


def _find_read(
    store: Store, run: RunRecord, going: list[RunEntry], known: Known | None
) -> dict[str, Need]:
    """Return, by digest, the need of checkpoints in `going` with readers or labels.

    Readers are checkpoints outside of `going`, and unfinished saves.
    """
    labelled = _find_labelled(store, going)
    if REFERENCED not in run.writer_features:
        return labelled
    # In this order: a save decided meanwhile keeps its pins until the manifest exists.
    pinned = _find_pinned(store, list_checkpoints(store, run, known=known))
    entries = list_checkpoints(store, run, known=known)
    if any(isinstance(entry.register, CkptError) for entry in entries):
        unreadable = next(entry.name for entry in entries if isinstance(entry.register, CkptError))
        reason = f"{unreadable} can't be read, so its references are unknown"
        need = Need(
            reason,
            f"First restore it from a mirror: ckptfmt repair {store.name} --with MIRROR",
        )
        return {entry.manifest.digest: need for entry in going if entry.manifest}
    names = {entry.name for entry in going}
    read = {
        one.digest: _need_of_readers(store.name, [entry.name])
        for entry in entries
        if entry.name not in names
        for one in entry.references
    }
    return dict.fromkeys(pinned, _SAVING) | read | labelled


def _find_begun_from(
    store: Store, run: RunRecord, launches: Sequence[Launch | LostLaunch]
) -> dict[str, Need]:
    """Return, by digest, the checkpoints from which launches outside of `launches` resume.

    Spec: REQ-CMT-026.
    """
    known = {launch.launch for launch in launches}
    new = [
        read_launch(store, number, run)
        for number in list_launch_numbers(store)
        if number not in known
    ]
    return {
        one.resume_from.digest: Need(
            f"launch {one.launch} has just begun, and resumes from it", _after_a_save(one.launch)
        )
        for one in new
        if one.resume_from
    }


def _find_labelled(store: Store, going: list[RunEntry]) -> dict[str, Need]:
    """Return, by digest, the checkpoints with a new record since the choice, such as a pin.

    Spec: REQ-CMT-040.
    """
    newest = list_newest_labels(store)
    found = {}
    changed = Need(
        "its pin, metrics or tags were changed just now",
        "Give the command again, to read the new pin, metrics and tags.",
    )
    for entry in going:
        seen = entry.record.number if isinstance(entry.record, LabelsRecord) else 0
        if entry.manifest is not None and newest.get(entry.name, 0) > seen:
            found[entry.manifest.digest] = changed
    return found


def delete_checkpoint(
    store: Store,
    run: RunRecord,
    name: str,
    *,
    dry_run: bool = False,
    force: bool = False,
    gone: Iterable[str] = (),
    loadable: set[str] | None = None,
) -> None:
    """Retire a checkpoint chosen by a person, unless the checkpoint is needed.

    Needed are: the checkpoint from which the run goes on, the checkpoint from which the newest
    launch resumes until its first commit, the last committed checkpoint, pinned checkpoints, and
    bases of checkpoints; also the last loadable checkpoint, unless `force` is set.

    Args:
        store: rooted at the run.
        run: the run's record.
        name: the checkpoint's name.
        dry_run: whether to raise the errors of a deletion without a change.
        force: whether to delete the checkpoint without a check that another checkpoint can be
            loaded.
        gone: names of checkpoints regarded as deleted, for a dry run of several deletions.
        loadable: digests of checkpoints found to be whole before, as in `find_last_loadable`.

    Raises: CommitError(CHECKPOINT_NEEDED); IntegrityError(NOT_COMMITTED, CHECKPOINT_ABORTED,
        CHECKPOINT_RETIRED, or FILE_MISSING of a launch record); UnsupportedError(
        FEATURE_UNSUPPORTED); StoreError.
    Spec: REQ-CMT-022 to REQ-CMT-026, REQ-CMT-032, REQ-CMT-040, REQ-RUN-015.
    """
    check_writer_features(run, "REQ-CMT-025", doing="deleting", undone="nothing was removed")
    launches = list_launches(store, run)
    entries = list_checkpoints(store, run)
    entry = next((entry for entry in entries if entry.name == name), None)
    if entry is None or entry.register is None:
        raise err(Code.NOT_COMMITTED, "it isn't committed", where=name)
    if entry.manifest is None:
        assert entry.register is not None  # noqa: S101
        raise (
            entry.register if isinstance(entry.register, CkptError) else refusal_of(entry.register)
        ).below(name)
    check_records(store, entries)
    gone = {*gone}
    left = [one for one in entries if one.name not in gone]
    need = _find_need(store.name, launches, left, entry)
    if need is None and not force:
        last = find_last_loadable(store, launches, left, [entry], loadable=loadable)
        if last is not None and entry.name in last.names:
            need = Need(
                last.reason,
                f"ckptfmt repair {store.name} --with MIRROR mends the others. To delete it all"
                " the same: ckptfmt rm"
                f" --force {store.name} {entry.name}; in a program, Run(...).delete(...,"
                " force=True).",
            )
    if need is None and dry_run:
        need = _SAVING if entry.manifest.digest in _find_pinned(store, entries) else None
    elif need is None:
        need = _retire_unread(store, run, launches, [entry], None)[1].get(entry.manifest.digest)
    if need is not None:
        raise err(
            Code.CHECKPOINT_NEEDED,
            need.reason,
            where=name,
            requirement="REQ-CMT-026",
            remedy=need.remedy,
        )


def retire_as_elsewhere(store: Store, run: RunRecord, names: Iterable[str]) -> list[str]:
    """Retire the run's retired checkpoints in a copy, except pinned ones and needed bases.

    The process that retired a checkpoint in the run has checked there that the run doesn't need it.

    Returns: the names of the retired checkpoints.
    Raises: StoreError. Spec: REQ-RUN-031, REQ-CMT-034, REQ-CMT-040.
    """
    launches = list_launches(store, run)
    entries = list_checkpoints(store, run)
    if any(isinstance(entry.register, CkptError) for entry in entries):
        return []
    wanted = set(names)
    going = [
        entry
        for entry in entries
        if entry.name in wanted and entry.manifest is not None and not entry.is_pinned
    ]
    kept = {one.name for entry in entries if entry not in going for one in entry.references}
    return _retire_unread(
        store, run, launches, [entry for entry in going if entry.name not in kept], None
    )[0]


def _find_need(
    run: str, launches: Sequence[Launch | LostLaunch], entries: list[RunEntry], entry: RunEntry
) -> Need | None:
    """Return the need of a committed checkpoint, or None; `run` is the run's path."""
    lineage = [one for one in iter_lineage(launches, entries) if one.manifest is not None]
    at_home = [one for one in lineage if is_at_home(one)]
    if entry.name in {one.name for one in (*lineage[:1], *at_home[:1])}:
        older = next((one.name for one in at_home if one.name != entry.name), None)
        other = "resume='fresh'" if older is None else f"resume={older!r}"
        return Need(
            "the run goes on from it",
            "It may go once the run has a newer checkpoint: train on until the next save, or go"
            " on from elsewhere with"
            f" Checkpointer(..., {other}) until that has saved. {_ALL}",
        )
    last = launches[-1] if launches else None
    has_own = last is not None and any(one.launch == last.launch for one in at_home)
    if last is not None and not has_own and (need := _find_beginning(run, last, entry)) is not None:
        return need
    if is_at_home(entry) and all(one is entry for one in entries if is_at_home(one)):
        return Need(
            "it is the last committed checkpoint of the run",
            f"It may go once the run has a newer one. {_ALL}",
        )
    if entry.labels_error:
        reason = f"it may be pinned: its newest record in {LABELS_FOLDER}/ can't be read"
        remedy = (
            f"ckptfmt repair {run} --with MIRROR restores the record. Without a mirror,"
            f" ckptfmt unpin {run}"
        )
        return Need(reason, f"{remedy} {entry.name} lets the checkpoint go.")
    if entry.is_pinned:
        return Need("it is pinned", f"Take its pin away first: ckptfmt unpin {run} {entry.name}")
    readers = [
        one.name for one in entries if any(found.name == entry.name for found in one.references)
    ]
    return _need_of_readers(run, readers) if readers else None


def _find_beginning(run: str, launch: Launch | LostLaunch, entry: RunEntry) -> Need | None:
    """Return the need of a checkpoint for a launch without saves, or None.

    The launch resumes from the checkpoint, or may do so if the launch record is unreadable.
    """
    if isinstance(launch, LostLaunch):
        if entry.launch >= launch.launch:
            return None
        reason = f"launch {launch.launch} may resume from it: {launch.path} can't be read"
        return Need(
            reason, f"ckptfmt repair {run} mends the record; with --with MIRROR from a copy."
        )
    if launch.resume_from is None or launch.resume_from.name != entry.name:
        return None
    return Need(f"launch {launch.launch} resumes from it", _after_a_save(launch.launch))


def _need_of_readers(run: str, readers: list[str]) -> Need:
    """Return the need of a checkpoint from which deltas read."""
    reason = f"{readers[0]} reads from it"
    if len(readers) > 1:
        reason = f"{readers[0]} and {len(readers) - 1} more read from it, up to {readers[-1]}"
    return Need(
        reason,
        "Delete these first, or name all of them in one command. Where the run goes on from one"
        " of these, either train"
        f" on until a full checkpoint, or make one: ckptfmt compact {run} --take-over",
    )


def _after_a_save(launch: int) -> str:
    """Return the remedy where a launch may still return to the checkpoint resumed from."""
    return (
        f"Delete it once launch {launch}, or a later one, has committed a checkpoint of its"
        f" own. {_ALL}"
    )


def _retire(store: Store, going: list[RunEntry]) -> list[str]:
    """Retire checkpoints; return their names."""
    for entry in going:
        if entry.manifest is not None:
            retire(store.at(entry.name), entry.manifest)
    return [entry.name for entry in going]


def _find_pinned(store: Store, entries: list[RunEntry]) -> set[str]:
    """Return the digests of the bases of undecided saves.

    Spec: REQ-CMT-035.
    """
    found: set[str] = set()
    for entry in entries:
        place = store.at(entry.name)
        for name in place.list_names("parts") if entry.register is None else ():
            if name.endswith(PINS_SUFFIX):
                path = f"parts/{name}"
                try:
                    content = place.read(path, limit_nbytes=limits.JSON_NBYTES)
                except IntegrityError:
                    continue  # the save was decided meanwhile, and the files were removed
                found.update(one.digest for one in Pins.parse(content, where=path).references)
    return found


def tidy_up(
    store: Store,
    run: RunRecord,
    *,
    launch: int,
    retention: Retention,
    known: Known | None = None,
    aborts: bool = True,
) -> tuple[list[str], str]:
    """Clean up after a committed save; an error is returned as a text, without failing the save.

    Args:
        launch, retention, known, aborts: see `clean_up`.

    Returns: the names of the directories retired or aborted; a text about problems, or an empty
        text.
    """
    problems: list[str] = []
    try:
        removed = clean_up(
            store,
            run,
            launch=launch,
            retention=retention,
            known=known,
            aborts=aborts,
            on_problem=problems.append,
        )
    except CkptError as error:
        return [], f"clean-up stopped: {error}"
    return removed, "; ".join(problems)
