"""One save, from live objects to a committed checkpoint, the same for a lone path and for a run."""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import secrets
from typing import TYPE_CHECKING, Any

from ckptfmt import limits
from ckptfmt.arithmetic.assign import assign_writers
from ckptfmt.box import Box
from ckptfmt.capture import capture
from ckptfmt.digest import digest_bytes
from ckptfmt.documents.manifest import Manifest, Origin
from ckptfmt.documents.tree import dump_tree, parse_tree
from ckptfmt.engines.commit import commit, sweep_attempts, wait_for_decision
from ckptfmt.engines.writer import check_snapshot, list_holdings, write_failure, write_part
from ckptfmt.errors import CkptError, Code, err

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptfmt.documents.tables import TensorKey
    from ckptfmt.engines.snapshot import Snapshot
    from ckptfmt.group import Group
    from ckptfmt.state import State
    from ckptfmt.store.protocol import Store

__all__ = ["Ownership", "SaveReport", "prepare_once", "save_once"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SaveReport:
    """What a save did.

    Attributes:
        path: where the checkpoint is.
        digest: of its manifest: its name.
        step: training steps done.
        nbytes: size of all tensors in bytes, each counted once.
        writer_count: how many writers it took.
        removed: checkpoints of the run that retention let go afterwards.
    """

    path: str
    digest: str
    step: int
    nbytes: int
    writer_count: int
    removed: tuple[str, ...] = ()


@dataclasses.dataclass(slots=True)
class Ownership:
    """Who writes what, found once per structure and kept between saves. Names and boxes only, never a tensor."""

    fingerprints: list[str] = dataclasses.field(default_factory=list)
    written: frozenset[tuple[TensorKey, Box]] | None = None


def save_once(
    store: Store,
    group: Group,
    state: State,
    *,
    step: int,
    run_id: str | None = None,
    launch: int | None = None,
    nonce: str | None = None,
    block_nbytes: int,
    deadline_s: float,
    ownership: Ownership,
    check: Callable[[], None] | None = None,
) -> Manifest:
    """Save `state` into the checkpoint directory that `store` is rooted at.

    Args:
        check: run on writer 0 before anything is written; what it raises stops all writers.
        ownership: kept by the caller between saves.

    Raises: CkptError of any kind; then no checkpoint was committed, unless the code is COMMIT_UNKNOWN, or the store
        failed after the decision.
    Spec: the steps of REQ-CMT-001 to REQ-CMT-009.
    """
    snapshot, error = _capture(state, group, step, check)
    mine = {
        "step": 0 if snapshot is None else operator.index(step),
        "fingerprint": "" if snapshot is None else _fingerprint(snapshot),
        "nonce": nonce or secrets.token_hex(16),
        "attempt": secrets.token_hex(8),
    }
    told = group.raise_together(error, value=mine)
    if any(not isinstance(theirs, dict) or theirs.keys() != mine.keys() for theirs in told):
        raise err(Code.WRITERS_DIVERGED, "the writers aren't at the same point", requirement="REQ-CMT-001")
    assert snapshot is not None  # noqa: S101 - raise_together raised otherwise
    step = operator.index(step)  # numpy's integers too
    steps = sorted({theirs["step"] for theirs in told})
    if len(steps) > 1:
        raise err(Code.WRITERS_DIVERGED, f"the writers save steps {steps}", requirement="REQ-CMT-001")
    origin = Origin(
        run_id=run_id,
        launch=launch,
        nonce=told[0]["nonce"],
        step=step,
        attempt=told[0]["attempt"],
        writer_count=group.writer_count,
        block_nbytes=block_nbytes,
    )
    _assign(group, snapshot, ownership, [theirs["fingerprint"] for theirs in told])
    return _write_and_commit(store, group, snapshot, origin, written=ownership.written, deadline_s=deadline_s)


def prepare_once(group: Group, state: State, ownership: Ownership) -> None:
    """Refuse now what a save would refuse, and find out who writes what: before the first step, not hours after it.

    Raises: StateError; FormatError; LayoutError.
    """
    snapshot = group.together(lambda: _check_capture(state, group))
    _assign(group, snapshot, ownership, group.all_gather(_fingerprint(snapshot)))


def _assign(group: Group, snapshot: Snapshot, ownership: Ownership, fingerprints: list[str]) -> None:
    """Find out who writes what, unless nothing changed on any writer since it was found out last."""
    if fingerprints != ownership.fingerprints:
        ownership.written = _find_written(group, snapshot)
        ownership.fingerprints = fingerprints


def _check_capture(state: State, group: Group) -> Snapshot:
    snapshot = capture(state, worker=group.writer, worker_count=group.writer_count)
    check_snapshot(snapshot)
    return snapshot


def _capture(
    state: State, group: Group, step: int, check: Callable[[], None] | None
) -> tuple[Snapshot | None, Exception | None]:
    try:
        _check_step(step)
        if check is not None and group.writer == 0:
            check()
        return _check_capture(state, group), None
    except Exception as error:  # noqa: BLE001 - raised again, once the others know of it
        return None, error


def _check_step(step: object) -> None:
    if isinstance(step, bool) or not hasattr(step, "__index__") or not 0 <= operator.index(step) <= limits.JSON_INTEGER:
        raise err(Code.ARGUMENT, f"step={step!r} isn't a number of steps", where="step=")


def _fingerprint(snapshot: Snapshot) -> str:
    return digest_bytes(_dump_holdings(snapshot)).hex()


def _dump_holdings(snapshot: Snapshot) -> bytes:
    by = snapshot.declared_by
    holdings = [(key, box.begin, box.shape, by.get(key, ""), nbytes) for (key, box), nbytes in list_holdings(snapshot)]
    return dump_tree(holdings, where="holdings")


def _find_written(group: Group, snapshot: Snapshot) -> frozenset[tuple[TensorKey, Box]] | None:
    """Tell all writers what this one holds, and return which pieces it writes; None for all of them."""
    if group.writer_count == 1:
        return None
    gathered = group.all_gather(_dump_holdings(snapshot).hex())
    holdings = [_parse_holdings(bytes.fromhex(theirs)) for theirs in gathered]
    return frozenset((key, box) for key, box, _ in assign_writers(holdings)[group.writer])


def _parse_holdings(content: bytes) -> list[tuple[tuple[TensorKey, Box, str], int]]:
    rows: list[Any] = parse_tree(content, where="holdings")
    return [((key, Box(begin, shape), declared_by), nbytes) for key, begin, shape, declared_by, nbytes in rows]


def _write_and_commit(
    store: Store,
    group: Group,
    snapshot: Snapshot,
    origin: Origin,
    *,
    written: frozenset[tuple[TensorKey, Box]] | None,
    deadline_s: float,
) -> Manifest:
    try:
        write_part(store, snapshot, origin, writer=group.writer, written=written)
        if group.writer == 0:
            manifest = commit(store, origin, deadline_s=deadline_s)
            # The save is done. What a killed attempt left takes space, and isn't worth an error.
            with contextlib.suppress(CkptError):
                sweep_attempts(store, origin)
            return manifest
    except Exception as error:
        known = error if isinstance(error, CkptError) else err(Code.PEER_FAILED, f"{type(error).__qualname__}: {error}")
        if group.writer_count > 1 and known.code != Code.COMMIT_UNKNOWN:
            # Best effort: the others find the deadline if the store takes this neither.
            with contextlib.suppress(CkptError):
                write_failure(store, origin, group.writer, known)
        raise
    return wait_for_decision(store, origin, deadline_s=deadline_s)
