"""One load, from an open checkpoint into the live objects of all processes: all of them succeed, or all raise."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Final

from ckptfmt.adapters import torch_side
from ckptfmt.errors import Code, err
from ckptfmt.read.sharing import refuse_sharing
from ckptfmt.trainer.restore import CLAIMS, LoadReport, plan_restore

if TYPE_CHECKING:
    from collections.abc import Iterable
    from contextlib import AbstractContextManager

    from ckptfmt.adapters.load_plan import Patterns, Rename
    from ckptfmt.group import Group
    from ckptfmt.read.reader import Checkpoint
    from ckptfmt.read.sharing import Peers
    from ckptfmt.state import State

#: What a reason of another process begins with.
_OTHER: Final = "process "
#: How many reasons a process tells the others.
_TOLD: Final = 32


def load_once(
    state: State,
    checkpoint: Checkpoint,
    group: Group,
    *,
    allow: Iterable[str],
    strict: bool,
    streams: bool = True,
    only: Patterns = None,
    rename: Rename = None,
    override: Patterns = (),
    share: bool = False,
) -> LoadReport:
    """Load a checkpoint into a state on every process of the group.

    What one process has no place for may be another's; only what none of them takes is unexpected. Whatever doesn't fit
    is found on all of them before anything live is changed on any. Damaged bytes are found as they are read: then the
    state is partly that of the checkpoint, and isn't fit to go on with.

    With `share`, what several processes want is read by one of them and sent to the others.

    Raises: as `ckptfmt.load`; LayoutError(WRITERS_DIVERGED) if the processes load different checkpoints;
        StateError(PEER_FAILED) where another process refused.
    """
    worker, count = group.writer, group.writer_count
    allow = (allow,) if isinstance(allow, str) else tuple(allow)
    only = tuple(only) if only is not None and not isinstance(only, str) else only
    override = (override,) if isinstance(override, str) else tuple(override or ())
    restoration = group.together(
        lambda: plan_restore(
            state,
            checkpoint,
            worker=worker,
            worker_count=count,
            allow=allow,
            strict=strict,
            only=only,
            rename=rename,
            override=override,
        )
    )
    mine = {"leftover": sorted(restoration.leftover()), "unused": sorted(restoration.unused_renames())}
    told = group.all_gather({"digest": checkpoint.digest, **mine})
    digests = {theirs["digest"] for theirs in told}
    if len(digests) > 1:
        raise err(Code.WRITERS_DIVERGED, f"the processes load {len(digests)} different checkpoints")
    leftovers = [{(kind, tuple(key)) for kind, key in theirs["leftover"]} for theirs in told]
    unused = frozenset.intersection(*(frozenset(theirs["unused"]) for theirs in told))
    group.together(lambda: restoration.check_renames(unused))
    group.together(lambda: restoration.check(frozenset(set.intersection(*leftovers))))
    reading = group.together(restoration.plan_reading)
    with contextlib.ExitStack() as stack:
        if share and count > 1:
            reading.share(stack.enter_context(_open_peers(group)))
        report = group.together(lambda: restoration.apply(reading, streams=streams))
    return claim_of_all(report, group)


def claim_of_all(report: LoadReport, group: Group) -> LoadReport:
    """Return a report with what lowers the claim on any process: a run is no more than the least of them.

    What another process says, and this one doesn't, comes last, with its number.
    """
    if group.writer_count == 1:
        return report
    own = [reason for reason in report.lowered_by if not reason.startswith(_OTHER)]
    told = group.all_gather({"claim": report.claim, "lowered_by": own[:_TOLD]})
    others = {
        reason: f"{_OTHER}{number}: {reason}"
        for number, theirs in reversed(list(enumerate(told)))
        for reason in theirs["lowered_by"]
        if reason not in report.lowered_by
    }
    claim = min((theirs["claim"] for theirs in told), key=CLAIMS.index)
    return dataclasses.replace(
        report, claim=claim, lowered_by=tuple(dict.fromkeys((*report.lowered_by, *others.values())))
    )


def _open_peers(group: Group) -> AbstractContextManager[Peers]:
    side = torch_side()
    if side is None:
        raise refuse_sharing(group.writer_count)
    peers: AbstractContextManager[Peers] = side.open_peers(group)
    return peers
