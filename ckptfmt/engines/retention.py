"""Which checkpoints of a run to keep, and how to let the others go. Spec: REQ-CMT-020 to REQ-CMT-026."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ckptfmt.documents.manifest import Abort, Tombstone
from ckptfmt.engines.commit import abort, retire, sweep
from ckptfmt.engines.lineage import RunEntry, check_not_fenced, iter_lineage, list_checkpoints, list_launches
from ckptfmt.errors import CkptError, Code, err

if TYPE_CHECKING:
    from ckptfmt.documents.run import Launch, Run
    from ckptfmt.store.protocol import Store

__all__ = ["clean_up", "plan_retention", "tidy_up"]

#: The writer features whose rules for clean-up this implementation knows; format 0.1 has none.
_UNDERSTOOD: Final[frozenset[str]] = frozenset()


def plan_retention(
    launches: list[Launch], entries: list[RunEntry], *, keep: int | None, keep_every: int | None
) -> list[RunEntry]:
    """Return the committed checkpoints that may go, oldest first. Pure.

    Only those on the way that led to the newest launch are counted, and only those may go: what a rollback left
    beside it is somebody's to look at. What the newest launch resumes from stays until it has a commit of its own.

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
    return [
        entry
        for entry in reversed(lineage)
        if entry.name not in protected and not (keep_every and entry.step % keep_every == 0)
    ]


def clean_up(
    store: Store, run: Run, *, launch: int, keep: int | None = None, keep_every: int | None = None
) -> list[str]:
    """Retire what retention lets go, give up what older launches left unfinished, finish interrupted clean-ups.

    Args:
        store: rooted at the run.
        launch: the launch that cleans; undecided directories of this one and of newer ones are left alone.

    Returns: the names of what was retired or given up.
    Raises: UnsupportedError(FEATURE_UNSUPPORTED) if the run has a feature that this cleaner doesn't know: then nothing
        is removed; FencedError(FENCED) if a newer launch has taken over: it does the cleaning; StoreError.
    Spec: REQ-CMT-020 to REQ-CMT-026, REQ-RUN-004.
    """
    unknown = sorted(set(run.writer_features) - _UNDERSTOOD)
    if unknown:
        raise err(
            Code.FEATURE_UNSUPPORTED,
            f"cleaning up needs {', '.join(unknown)}; nothing was removed",
            where="run.json#/signed/features/writer",
            requirement="REQ-CMT-025",
        )
    check_not_fenced(store, launch)
    launches = list_launches(store, run)
    entries = list_checkpoints(store, run)
    removed = []
    for entry in plan_retention(launches, entries, keep=keep, keep_every=keep_every):
        if entry.manifest is not None:
            retire(store.at(entry.name), entry.manifest)
            removed.append(entry.name)
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


def tidy_up(store: Store, run: Run, *, launch: int, keep: int | None, keep_every: int | None) -> tuple[list[str], str]:
    """Clean up behind a committed save: what fails is said, and is no failure of the save.

    Returns: the names of what was retired or given up; what went wrong, or an empty string.
    """
    try:
        return clean_up(store, run, launch=launch, keep=keep, keep_every=keep_every), ""
    except CkptError as error:
        return [], str(error)
