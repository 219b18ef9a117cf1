"""The use of a run's time, from the entries of the ledger and further records.

Spec: REQ-RUN-044.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

from ckptfmt import limits
from ckptfmt.documents.manifest import parse_checkpoint_name
from ckptfmt.documents.run import Launch, RunRecord, check_run_id, parse_launch_name
from ckptfmt.errors import CkptError, StoreError
from ckptfmt.run.accounts import Goodput, KnownLaunch, account
from ckptfmt.run.ledger import LEDGER, LaunchTimes, LedgerEntry, ledger_path
from ckptfmt.run.lineage import (
    LostLaunch,
    RunEntry,
    list_checkpoints,
    list_launches,
    read_known_run,
)
from ckptfmt.store.protocol import Store, call_each


def read_goodput(store: Store, found: Iterable[RunEntry] | None = None) -> Goodput:
    """Return the use of a run's time, as far as recorded.

    Args:
        store: rooted at the run.
        found: the run's checkpoints; None to list them.

    Raises: IntegrityError(FILE_MISSING) without a run; errors of a damaged launch record;
        StoreError.
    """
    run = read_known_run(store)
    found_launches = list_launches(store, run)
    launches = [launch for launch in found_launches if isinstance(launch, Launch)]
    entries, problems = read_entries(store, run)
    numbers = {launch.launch for launch in launches}
    known = {number: _of_entry(entry) for number, entry in entries.items() if number in numbers}
    untimed: set[int] = set()
    # A launch without an entry never trained, or kept no ledger.
    if any(launch.launch not in known for launch in launches):
        found = list_checkpoints(store, run, with_labels=False) if found is None else tuple(found)
        for launch in launches:
            if launch.launch not in known:
                saves = [entry for entry in found if entry.launch == launch.launch]
                inferred = _of_saves(saves)
                if inferred is not None:
                    known[launch.launch] = inferred
                elif saves:
                    untimed.add(launch.launch)
    goodput = account({launch.launch: _resumed(launch) for launch in launches}, known, untimed)
    problems += [
        f"launch {launch.launch} isn't counted: {launch.path} can't be read: {launch.error}"
        for launch in found_launches
        if isinstance(launch, LostLaunch)
    ]
    goodput.doubts += tuple(problems)
    return goodput


def read_entries(store: Store, run: RunRecord) -> tuple[dict[int, LedgerEntry], list[str]]:
    """Return the ledger entries of a run by launch, and a sentence for each unreadable entry.

    Raises: StoreError.
    """
    names = store.list_names(LEDGER)
    numbers = sorted(number for number in map(parse_launch_name, names) if number is not None)
    read = call_each(store, functools.partial(_read_entry, store, run), numbers)
    entries = {entry.launch: entry for entry in read if isinstance(entry, LedgerEntry)}
    return entries, [
        f"an entry can't be read: {error}" for error in read if isinstance(error, CkptError)
    ]


def _read_entry(store: Store, run: RunRecord, number: int) -> LedgerEntry | CkptError:
    path = ledger_path(number)
    try:
        entry = LedgerEntry.parse(store.read(path, limit_nbytes=limits.JSON_NBYTES), where=path)
        check_run_id(run.run_id, entry.run_id, path)
    except StoreError:
        raise
    except CkptError as error:
        return error
    return entry


def _resumed(launch: Launch) -> tuple[int, int] | None:
    return None if launch.resume_from is None else parse_checkpoint_name(launch.resume_from.name)


def _of_entry(entry: LedgerEntry) -> KnownLaunch:
    return KnownLaunch(
        is_measured=True,
        started_s=entry.started_unix_ms / 1000,
        measured_s=entry.measured_unix_ms / 1000,
        ended_s=None if entry.ended_unix_ms is None else entry.ended_unix_ms / 1000,
        first_step=entry.first_step,
        step=entry.step,
        save_count=entry.save_count,
        commit_count=entry.commit_count,
        committing_ms=entry.committing_ms,
        times=entry.times,
    )


def _of_saves(saves: Iterable[RunEntry]) -> KnownLaunch | None:
    """Return a launch's times from its manifests; None if no manifest has a time."""
    taken = sorted(
        (one.step, one.manifest.saved_unix_s) for one in saves if one.manifest is not None
    )
    taken = [(step, at_s) for step, at_s in taken if at_s > 0]
    if not taken:
        return None
    (first_step, first_s), (step, last_s) = taken[0], taken[-1]
    return KnownLaunch(
        is_measured=False,
        started_s=first_s,
        measured_s=max(first_s, last_s),
        ended_s=None,
        first_step=first_step,
        step=step,
        save_count=len(taken),
        times=LaunchTimes(training=max(0, last_s - first_s) * 1000),
    )
