"""Which checkpoints of a run to keep, and how to let the others go. Spec: REQ-CMT-020 to REQ-CMT-026."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from ckptfmt import limits
from ckptfmt.commit.decision import CONDEMNED, abort, retire, sweep
from ckptfmt.documents.manifest import PINS_SUFFIX, Abort, Tombstone, parse_checkpoint_name
from ckptfmt.documents.run import Pins
from ckptfmt.errors import CkptError, IntegrityError
from ckptfmt.features import REFERENCED
from ckptfmt.run.lineage import (
    RunEntry,
    check_not_fenced,
    check_writer_features,
    is_overtaken,
    iter_lineage,
    list_checkpoints,
    list_launches,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptfmt.commit.decision import Known
    from ckptfmt.documents.run import Launch, RunRecord
    from ckptfmt.store.protocol import Store


def plan_retention(
    launches: list[Launch], entries: list[RunEntry], *, keep: int | None, keep_every: int | None
) -> list[RunEntry]:
    """Return the committed checkpoints that may go, oldest first. Pure.

    Those on the way that led to the newest launch are counted, and may go. Beside it, what a fenced launch committed
    late may go, too, once the newest launch has a commit of its own: no launch passed over it, and none goes on from
    it. What a rollback left beside the lineage, or a launch that fell back to an older checkpoint, is somebody's to
    look at. What the newest launch resumes from stays until that launch has a commit of its own.

    Args:
        keep: how many of the newest stay; None for all.
        keep_every: checkpoints of steps divisible by this stay as well.

    Spec: REQ-CMT-026.
    """
    if keep is None:
        return []
    lineage = [entry for entry in iter_lineage(launches, entries) if entry.manifest is not None]
    own = [entry for entry in lineage if launches and entry.launch == launches[-1].launch]
    protected = {entry.name for entry in lineage[: max(1, keep)]}
    if not own and launches and launches[-1].resume_from is not None:
        protected.add(launches[-1].resume_from.name)
    late = list(_iter_late(launches, entries, lineage)) if own else []
    going = {
        entry.name
        for entry in (*lineage, *late)
        if entry.name not in protected and not (keep_every and entry.step % keep_every == 0)
    }
    # What stays reads from these, wherever it lies: beside the lineage, too.
    going -= {one.name for entry in entries if entry.name not in going for one in entry.references}
    # What reads comes behind what it reads from, which is of its launch and of a smaller step.
    return sorted(
        (entry for entry in (*lineage, *late) if entry.name in going), key=lambda entry: (entry.step, entry.launch)
    )


def _iter_late(launches: list[Launch], entries: list[RunEntry], lineage: list[RunEntry]) -> Iterator[RunEntry]:
    """Yield the checkpoints that were committed when the next launch had already chosen what to resume from.

    That launch followed the lineage, on which the checkpoint would have come before what it took. Nobody gave it up by
    hand or for damage, then; and nobody resumed from it by hand since.

    Spec: REQ-CMT-026.
    """
    known = {entry.name for entry in lineage} | {one.resume_from.name for one in launches if one.resume_from}
    standing = [launch for launch in launches if not is_overtaken(launch, entries)]
    for entry in entries:
        successor = next((launch for launch in standing if launch.launch > entry.launch), None)
        if entry.manifest is None or entry.name in known or successor is None or successor.chosen_by != "lineage":
            continue
        between = [launch for launch in launches if entry.launch < launch.launch <= successor.launch]
        if len(between) < successor.launch - entry.launch:
            continue  # a record is lost, which may have been that of a rollback
        chosen = None if successor.resume_from is None else parse_checkpoint_name(successor.resume_from.name)
        if chosen is None or chosen[::-1] < (entry.launch, entry.step):
            yield entry


def clean_up(
    store: Store,
    run: RunRecord,
    *,
    launch: int,
    keep: int | None = None,
    keep_every: int | None = None,
    known: Known | None = None,
) -> list[str]:
    """Retire what retention lets go, give up what older launches left unfinished, finish interrupted clean-ups.

    Args:
        store: rooted at the run.
        launch: the launch that cleans; undecided directories of this one and of newer ones are left alone.
        known: what the caller has parsed before.

    Returns: the names of what was retired or given up.
    Raises: UnsupportedError(FEATURE_UNSUPPORTED) if the run has a feature that this cleaner doesn't know: then nothing
        is removed; FencedError(FENCED) if a newer launch has taken over: it does the cleaning; StoreError.
    Spec: REQ-CMT-020 to REQ-CMT-026, REQ-RUN-004.
    """
    check_writer_features(run, "REQ-CMT-025", doing="cleaning up", undone="nothing was removed")
    check_not_fenced(store, launch)
    launches = list_launches(store, run)
    entries = list_checkpoints(store, run, known=known)
    going = plan_retention(launches, entries, keep=keep, keep_every=keep_every)
    removed = _retire_unread(store, run, going, known) if REFERENCED in run.writer_features else _retire(store, going)
    named = {past.resume_from.name for past in launches if past.resume_from is not None}
    for entry in entries:
        place = store.at(entry.name)
        # What a record names was committed once: if its register is gone, that is damage, and no unfinished save.
        if entry.register is None and entry.launch < launch and entry.name not in named:
            reason = f"unfinished when launch {launch} cleaned up"
            if abort(place, run_id=run.run_id, launch=entry.launch, step=entry.step, reason=reason):
                removed.append(entry.name)
        elif isinstance(entry.register, Abort | Tombstone) and len(place.list("")) > 1:
            sweep(place)
    return removed


def _retire_unread(store: Store, run: RunRecord, going: list[RunEntry], known: Known | None) -> list[str]:
    """Retire checkpoints that nothing reads from, and nothing that is still being saved will.

    They are condemned first, and looked for afterwards: who pins one after that sees that it is condemned, and who
    pinned it before is seen here.

    Returns: the names of those that were retired.
    Spec: REQ-CMT-032, REQ-CMT-033.
    """
    name = CONDEMNED + secrets.token_hex(8)  # of its own: who withdraws takes nobody else's away
    staying = list(going)
    try:
        for entry in going:
            store.at(entry.name).create(name, [b""])
        read = _find_read(store, run, going, known)
        staying = [entry for entry in going if entry.manifest is None or entry.manifest.digest in read]
    finally:
        for entry in staying:
            store.at(entry.name).delete(name)
    # What reads goes before what it reads from: whatever ends this in between, what is left is whole.
    return _retire(store, [entry for entry in reversed(going) if entry not in staying])


def _find_read(store: Store, run: RunRecord, going: list[RunEntry], known: Known | None) -> set[str]:
    """Return the digests of what others than those that go read from, or will."""
    # In this order: a save that is decided meanwhile has its pins until its manifest is there.
    pinned = _find_pinned(store, list_checkpoints(store, run, known=known))
    entries = list_checkpoints(store, run, known=known)
    if any(isinstance(entry.register, CkptError) for entry in entries):
        return {entry.manifest.digest for entry in going if entry.manifest}  # nobody knows what that one reads
    names = {entry.name for entry in going}
    return {one.digest for entry in entries if entry.name not in names for one in entry.references} | pinned


def _retire(store: Store, going: list[RunEntry]) -> list[str]:
    """Retire checkpoints; return their names."""
    for entry in going:
        if entry.manifest is not None:
            retire(store.at(entry.name), entry.manifest)
    return [entry.name for entry in going]


def _find_pinned(store: Store, entries: list[RunEntry]) -> set[str]:
    """Return the digests of what saves that aren't decided yet will read from. Spec: REQ-CMT-035."""
    found: set[str] = set()
    for entry in entries:
        place = store.at(entry.name)
        for name in place.list_names("parts") if entry.register is None else ():
            if name.endswith(PINS_SUFFIX):
                path = f"parts/{name}"
                try:
                    content = place.read(path, limit_nbytes=limits.JSON_NBYTES)
                except IntegrityError:
                    continue  # it was decided meanwhile, and swept
                found.update(one.digest for one in Pins.parse(content, where=path).references)
    return found


def tidy_up(
    store: Store,
    run: RunRecord,
    *,
    launch: int,
    keep: int | None,
    keep_every: int | None,
    known: Known | None = None,
) -> tuple[list[str], str]:
    """Clean up behind a committed save: what fails is said, and is no failure of the save.

    Returns: the names of what was retired or given up; what went wrong, or an empty string.
    """
    try:
        return clean_up(store, run, launch=launch, keep=keep, keep_every=keep_every, known=known), ""
    except CkptError as error:
        return [], str(error)
