"""One load, from an open checkpoint into the live objects of all processes: all of them succeed, or all raise."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptfmt.errors import Code, err
from ckptfmt.restore import LoadReport, plan_restore

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ckptfmt.engines.reader import Checkpoint
    from ckptfmt.group import Group
    from ckptfmt.state import State

__all__ = ["load_once"]


def load_once(
    state: State,
    checkpoint: Checkpoint,
    group: Group,
    *,
    allow: Iterable[str],
    strict: bool,
    streams: bool = True,
) -> LoadReport:
    """Load a checkpoint into a state on every process of the group.

    What one process has no place for may be another's; only what none of them takes is unexpected. Whatever doesn't fit
    is found on all of them before anything live is changed on any. Damaged bytes are found as they are read: then the
    state is partly that of the checkpoint, and isn't fit to go on with.

    Raises: as `ckptfmt.load`; LayoutError(WRITERS_DIVERGED) if the processes load different checkpoints;
        StateError(PEER_FAILED) where another process refused.
    """
    worker, count = group.writer, group.writer_count
    allow = (allow,) if isinstance(allow, str) else tuple(allow)
    restoration = group.together(
        lambda: plan_restore(state, checkpoint, worker=worker, worker_count=count, allow=allow, strict=strict)
    )
    told = group.all_gather({"digest": checkpoint.digest, "leftover": sorted(restoration.leftover())})
    digests = {theirs["digest"] for theirs in told}
    if len(digests) > 1:
        raise err(Code.WRITERS_DIVERGED, f"the processes load {len(digests)} different checkpoints")
    leftovers = [{(kind, tuple(key)) for kind, key in theirs["leftover"]} for theirs in told]
    group.together(lambda: restoration.check(frozenset(set.intersection(*leftovers))))
    return group.together(lambda: restoration.apply(streams=streams))
