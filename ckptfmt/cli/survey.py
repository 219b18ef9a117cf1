"""The effect of a clean-up of a run, and the directories left to a person."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from ckptfmt.commit.waiting import launches_of, list_held
from ckptfmt.documents.manifest import Abort, Tombstone
from ckptfmt.documents.run import Launch, RunRecord
from ckptfmt.errors import CkptError
from ckptfmt.run.lineage import (
    LostLaunch,
    RunEntry,
    check_writer_features,
    iter_lineage,
    list_checkpoints,
    list_launches,
    list_missing,
)
from ckptfmt.run.retention import (
    Retention,
    find_missing_metric,
    is_at_home,
    list_abandoned,
    plan_retention,
)
from ckptfmt.store.protocol import Store


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """The checkpoints of a run for a clean-up to remove, and those left to a person.

    Attributes:
        launch: the newest launch; 0 of a run without launches.
        going: committed checkpoints to be retired by retention, oldest first.
        abandoned: undecided directories of older launches.
        remains: names of directories with files next to an abort record or a tombstone: a clean-up
            was interrupted.
        unfinished: undecided directories of the newest launch, without a living saver. Only the
            next launch aborts them, or finishes them from a node's cache (REQ-CMT-021).
        in_hand: undecided directories of launches with living savers.
        beside: committed checkpoints off the lineage, each with the reason. Retention leaves them
            alone.
        unreadable: directories with an unreadable register, with the error. In a run with deltas,
            such a directory stops all retirement: the bases are unknown
            (REQ-CMT-034).
        lost: launches with an unreadable record. No checkpoint of an older launch is retired or
            aborted before a repair.
        missing: launches with a checkpoint directory and without a record. No checkpoint is retired
            before a repair.
        problem: why retention lets no checkpoint go for lack of a metric, or an empty text.
    """

    launch: int
    going: tuple[RunEntry, ...]
    abandoned: tuple[RunEntry, ...]
    remains: tuple[str, ...]
    unfinished: tuple[RunEntry, ...]
    in_hand: tuple[RunEntry, ...]
    beside: tuple[tuple[RunEntry, str], ...]
    unreadable: tuple[tuple[RunEntry, CkptError], ...]
    lost: tuple[LostLaunch, ...]
    missing: tuple[LostLaunch, ...]
    problem: str


def survey_run(store: Store, run: RunRecord, retention: Retention) -> Survey:
    """Return the effect of a clean-up at this moment.

    Args:
        store: rooted at the run.
        retention: the rules for committed checkpoints.

    Raises: UnsupportedError(FEATURE_UNSUPPORTED) where the run has a feature unknown to this
        cleaner; StoreError. Spec: REQ-CMT-020 to REQ-CMT-026.
    """
    check_writer_features(run, "REQ-CMT-025", doing="cleaning up", undone="nothing was looked at")
    # Before the registers, where a save decided in between is seen.
    held = launches_of(list_held(store))
    launches = list_launches(store, run)
    entries = list_checkpoints(store, run)
    launch = launches[-1].launch if launches else 0
    missing = list_missing(store, launches, entries)
    going = [] if missing else plan_retention(launches, entries, retention)
    undecided = [entry for entry in entries if entry.register is None and entry.launch >= launch]
    names = {entry.name for entry in going}
    known = sorted([*launches, *missing], key=lambda launch: launch.launch)
    problem = None
    if retention.best is not None and not going and not missing:
        problem = find_missing_metric(launches, entries, retention, retention.best[0])
    return Survey(
        launch=launch,
        going=tuple(going),
        abandoned=tuple(list_abandoned(known, entries, launch)),
        remains=tuple(
            entry.name
            for entry in entries
            if isinstance(entry.register, Abort | Tombstone)
            and len(store.at(entry.name).list("")) > 1
        ),
        unfinished=tuple(entry for entry in undecided if entry.launch not in held),
        in_hand=tuple(entry for entry in undecided if entry.launch in held),
        beside=tuple(one for one in iter_beside(known, entries) if one[0].name not in names),
        unreadable=tuple(
            (entry, entry.register) for entry in entries if isinstance(entry.register, CkptError)
        ),
        lost=tuple(launch for launch in launches if isinstance(launch, LostLaunch)),
        missing=tuple(missing),
        problem=problem or "",
    )


def iter_beside(
    launches: Sequence[Launch | LostLaunch], entries: list[RunEntry]
) -> Iterator[tuple[RunEntry, str]]:
    """Yield the committed checkpoints off the lineage, each with the reason."""
    lineage = {entry.name for entry in iter_lineage(launches, entries)}
    beside = {
        entry.name: entry
        for entry in entries
        if entry.manifest is not None and entry.name not in lineage
    }
    before: set[str] = set()
    for count, launch in enumerate(launches, 1) if beside else ():
        own = [entry for entry in entries if entry.launch < launch.launch]
        after = {entry.name for entry in iter_lineage(launches[:count], own)}
        for name in sorted((before - after) & beside.keys()):
            entry = beside.pop(name)
            yield entry, _suspect_text(entry) or _turn_text(launch, entry)
        # All checkpoints of this launch count, until the next launch has chosen.
        before = after | {entry.name for entry in entries if entry.launch == launch.launch}
    for entry in beside.values():
        yield entry, _suspect_text(entry) or "no launch went on from it"


def _suspect_text(entry: RunEntry) -> str:
    return f"it is suspect: {entry.labels.suspect}" if entry.is_suspect else ""


def _turn_text(launch: Launch | LostLaunch, entry: RunEntry) -> str:
    """Return how a launch left the checkpoint from which the run would have gone on."""
    if isinstance(launch, LostLaunch):
        return f"launch {launch.launch} didn't save it, and its record can't be read"
    instead = "nothing" if launch.resume_from is None else launch.resume_from.name
    if launch.chosen_by == "fallback":
        found = "found it damaged" if is_at_home(entry) else "didn't find its files"
        return f"launch {launch.launch} {found}, and went on from {instead}"
    if launch.chosen_by == "hand":
        return f"launch {launch.launch} went on from {instead}, by hand"
    return f"it was committed when launch {launch.launch} had begun from {instead}"
