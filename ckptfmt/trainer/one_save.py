"""One save, from live objects to a committed checkpoint, the same for a lone path and for a run."""

from __future__ import annotations

import base64
import dataclasses
import operator
import secrets
from typing import TYPE_CHECKING, Any

from ckptfmt import limits
from ckptfmt.commit.decision import decide
from ckptfmt.documents.holdings import Structure
from ckptfmt.documents.labels import NO_LABELS, Labels
from ckptfmt.documents.manifest import Manifest, Origin
from ckptfmt.errors import CkptError, Code, err
from ckptfmt.trainer.capture import capture
from ckptfmt.write.image import Image, assign_writers, plan_image
from ckptfmt.write.writer import as_ckpt_error, check_snapshot, for_saving, structure_of, tell_failure, write_part

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptfmt.box import Box
    from ckptfmt.documents.run import Launch
    from ckptfmt.documents.tables import TensorKey
    from ckptfmt.group import Group
    from ckptfmt.state import State
    from ckptfmt.store.protocol import Store
    from ckptfmt.write.snapshot import Snapshot


@dataclasses.dataclass(slots=True)
class Ownership:
    """What is kept between saves of one structure. Names and boxes only, never a tensor.

    Attributes:
        check_replicas: whether what others write as declared replicas is digested here as well.
        signature: of this writer's structure.
        fingerprint: the same for equal structures only.
        fingerprints: of all writers' structures.
        written: which pieces this writer writes; all of them if None.
        image: where they go.
    """

    check_replicas: bool = False
    signature: object = None
    fingerprint: str = ""
    fingerprints: list[str] = dataclasses.field(default_factory=list)
    written: frozenset[tuple[TensorKey, Box]] | None = None
    image: Image | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """What all writers have agreed to save.

    Attributes:
        snapshot: what this writer gives.
        origin: of the attempt.
        told: what each writer said beside.
    """

    snapshot: Snapshot
    origin: Origin
    told: list[Any]


def save_once(
    store: Store,
    group: Group,
    state: State,
    *,
    step: int,
    block_nbytes: int,
    deadline_s: float,
    ownership: Ownership,
    check: Callable[[], None] | None = None,
    label: Callable[[], Labels] | None = None,
) -> Manifest:
    """Save `state` into the checkpoint directory that `store` is rooted at, outside of a run.

    Args:
        check: run on writer 0 before anything is written; what it raises stops all writers.
        ownership: kept by the caller between saves.
        label: as for `agree_on_save`.

    Raises: CkptError of any kind; then no checkpoint was committed, unless the code is COMMIT_UNKNOWN, or the store
        failed after the decision.
    Spec: the steps of REQ-CMT-001 to REQ-CMT-009.
    """
    agreed = agree_on_save(
        group, state, step=step, block_nbytes=block_nbytes, ownership=ownership, check=check, label=label
    )
    return write_and_commit(store, group, agreed, ownership=ownership, deadline_s=deadline_s)


def agree_on_save(
    group: Group,
    state: State,
    *,
    step: int,
    launch: Launch | None = None,
    block_nbytes: int,
    ownership: Ownership,
    check: Callable[[], None] | None = None,
    label: Callable[[], Labels] | None = None,
    say: object = None,
) -> Agreed:
    """Take what is live here, and agree with the other writers on the attempt and on who writes what.

    Args:
        launch: of the run; None outside of one.
        label: returns metrics and tags; called on writer 0 alone, whose count, and what it raises stops all writers.
        say: JSON that all writers are told beside.

    Raises: what refuses the save, on all writers alike. Spec: REQ-CMT-001, REQ-CMT-002.
    """
    snapshot, error = _capture(state, group, step, ownership, check, label)
    mine = {
        "step": 0 if snapshot is None else operator.index(step),
        "fingerprint": "" if snapshot is None else ownership.fingerprint,
        "nonce": secrets.token_hex(16) if launch is None else launch.nonce,
        "attempt": secrets.token_hex(8),
        "say": say,
    }
    told = group.raise_together(error, value=mine)
    if any(not isinstance(theirs, dict) or theirs.keys() != mine.keys() for theirs in told):
        raise err(Code.WRITERS_DIVERGED, "the writers aren't at the same point", requirement="REQ-CMT-001")
    assert snapshot is not None  # noqa: S101 - raise_together raised otherwise
    steps = sorted({theirs["step"] for theirs in told})
    if len(steps) > 1:
        raise err(Code.WRITERS_DIVERGED, f"the writers save steps {steps}", requirement="REQ-CMT-001")
    origin = Origin(
        run_id=None if launch is None else launch.run_id,
        launch=None if launch is None else launch.launch,
        nonce=told[0]["nonce"],
        step=operator.index(step),  # numpy's integers too
        attempt=told[0]["attempt"],
        writer_count=group.writer_count,
        block_nbytes=block_nbytes,
    )
    _assign(group, snapshot, ownership, [theirs["fingerprint"] for theirs in told], block_nbytes)
    return Agreed(snapshot=snapshot, origin=origin, told=[theirs["say"] for theirs in told])


def prepare_once(group: Group, state: State, ownership: Ownership, *, block_nbytes: int) -> Snapshot:
    """Refuse now what a save would refuse, and find out who writes what: before the first step, not hours after it.

    Returns: what this writer would give to a save of now.

    Raises: StateError; FormatError; LayoutError.
    """
    snapshot = group.together(lambda: _take(state, group, ownership))
    _assign(group, snapshot, ownership, group.all_gather(ownership.fingerprint), block_nbytes)
    return snapshot


def _assign(group: Group, snapshot: Snapshot, ownership: Ownership, fingerprints: list[str], block_nbytes: int) -> None:
    """Find out who writes what, unless nothing changed on any writer since it was found out last."""
    if fingerprints != ownership.fingerprints:
        ownership.written = _find_written(group, snapshot)
        ownership.fingerprints = fingerprints
        ownership.image = None
    if ownership.image is None or ownership.image.block_nbytes != block_nbytes:
        ownership.image = plan_image(
            snapshot, written=ownership.written, block_nbytes=block_nbytes, check_replicas=ownership.check_replicas
        )


def _take(state: State, group: Group, ownership: Ownership) -> Snapshot:
    try:
        snapshot = capture(state, worker=group.writer, worker_count=group.writer_count)
        _look_at(snapshot, ownership)
    except CkptError as error:
        raise for_saving(error) from error
    return snapshot


def _capture(  # noqa: PLR0917 - what `agree_on_save` was given
    state: State,
    group: Group,
    step: int,
    ownership: Ownership,
    check: Callable[[], None] | None,
    label: Callable[[], Labels] | None,
) -> tuple[Snapshot | None, Exception | None]:
    try:
        check_step(step)
        if check is not None and group.writer == 0:
            check()
        labels = label() if label is not None and group.writer == 0 else NO_LABELS
        return dataclasses.replace(_take(state, group, ownership), labels=labels), None
    except Exception as error:  # noqa: BLE001 - raised again, once the others know of it
        return None, error


def check_step(step: object) -> None:
    """Refuse what isn't a number of steps. Raises: StateError(ARGUMENT)."""
    if isinstance(step, bool) or not hasattr(step, "__index__") or not 0 <= operator.index(step) <= limits.JSON_INTEGER:
        raise err(Code.ARGUMENT, f"step={step!r} isn't a number of steps", where="step=")


def _look_at(snapshot: Snapshot, ownership: Ownership) -> None:
    """Check the names of a snapshot, and note its structure, unless it has the one of the last.

    Raises: StateError(STATE_NAME).
    """
    declared = snapshot.declared_by
    tensors = [
        (
            source.field, source.name, source.scope, source.dtype, source.global_shape, source.boxes, source.replica,
            source.storage, source.aliases, declared.get((source.field, source.name, source.scope)),
        )
        for source in snapshot.tensors
    ]  # fmt: skip
    leaves = [(leaf.field, leaf.name, leaf.scope) for leaf in snapshot.leaves]
    signature = (tensors, leaves, [(stream.name, stream.scope) for stream in snapshot.streams])
    if signature != ownership.signature:
        check_snapshot(snapshot)
        # All of what the image is made of: a plan that is kept must not outlive a changed dtype.
        ownership.fingerprint = structure_of(snapshot).dump()[1].hex()
        ownership.signature = signature


def _find_written(group: Group, snapshot: Snapshot) -> frozenset[tuple[TensorKey, Box]] | None:
    """Tell all writers what this one holds, and return which pieces it writes; None for all of them."""
    if group.writer_count == 1:
        return None
    content, _ = structure_of(snapshot).dump()
    gathered = group.all_gather(base64.b64encode(content).decode())
    holdings = [
        [((key, box, declared_by), nbytes) for key, box, declared_by, nbytes in Structure.parse(theirs).iter_pieces()]
        for theirs in map(base64.b64decode, gathered)
    ]
    return frozenset((key, box) for key, box, _ in assign_writers(holdings)[group.writer])


def write_and_commit(
    store: Store, group: Group, agreed: Agreed, *, ownership: Ownership, deadline_s: float
) -> Manifest:
    """Write this writer's share from the live tensors, and have it committed before this returns.

    Raises: StoreError; CommitError; LayoutError.
    """
    origin = agreed.origin
    try:
        write_part(
            store,
            agreed.snapshot,
            origin,
            writer=group.writer,
            image=ownership.image,
        )
        return decide(store, origin, writer=group.writer, deadline_s=deadline_s)
    except Exception as error:
        known = as_ckpt_error(error)
        tell_failure(store, origin, group.writer, known)
        if isinstance(error, CkptError) and known is not error:
            raise known from error
        raise
