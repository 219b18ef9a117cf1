"""One save, from live objects to a committed checkpoint, for a single path or a run."""

from __future__ import annotations

import base64
import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any, Final

from ckptfmt import limits
from ckptfmt.adapters.capture import capture
from ckptfmt.adapters.data_loaders import merged_shares
from ckptfmt.adapters.data_position import DataPosition
from ckptfmt.adapters.live import Live
from ckptfmt.box import Box
from ckptfmt.documents.holdings import Structure
from ckptfmt.documents.labels import NO_LABELS, Labels
from ckptfmt.documents.manifest import Manifest
from ckptfmt.documents.tables import TensorKey, TensorTable, key_of
from ckptfmt.errors import CkptError, Code, err
from ckptfmt.group import Group, attempt
from ckptfmt.layout.assignment import assign_writers
from ckptfmt.run.save_job import SaveJob, SaveState
from ckptfmt.saving.same_leaves import check_same_leaves, mark_leaves
from ckptfmt.state import State
from ckptfmt.write.image import Image, plan_image
from ckptfmt.write.snapshot import Snapshot
from ckptfmt.write.writer import check_snapshot, for_saving, structure_of, write_part

#: Fields whose values are equal on all processes of a launch. A difference makes a save wrong.
_CONSTANT: Final = frozenset({"config", "topology"})


@dataclasses.dataclass(slots=True)
class Ownership:
    """The results of a structure's analysis, kept between saves: names and boxes, no tensors.

    Attributes:
        check_replicas: whether this writer also digests declared replicas written by other writers.
        signature: signature of this writer's structure.
        fingerprint: fingerprint of this writer's structure; equal only for equal structures.
        fingerprints: fingerprints of all writers' structures.
        written: pieces written by this writer; None for all pieces.
        image: plan of the written pieces' positions.
        is_new_group: whether other processes have joined, which don't know the structures.
        position: evidence of earlier saves about the position in the data.
    """

    check_replicas: bool = False
    signature: object = None
    fingerprint: str = ""
    fingerprints: list[str] = dataclasses.field(default_factory=list)
    written: frozenset[tuple[TensorKey, Box]] | None = None
    image: Image | None = None
    is_new_group: bool = False
    position: DataPosition = dataclasses.field(default_factory=DataPosition)


def save_once(
    group: Group,
    state: State,
    save: SaveState,
    *,
    label: Callable[[], Labels] | None = None,
    unsaved: Callable[[Live], Sequence[str]] | None = None,
) -> Manifest:
    """Save `state` outside of a run, in the calling thread.

    Args:
        save: values of the save, as proposed by this process.
        label: see `agree_on_save`.
        unsaved: see `capture`.

    Raises: CkptError of any kind. Then no checkpoint was committed, unless the code is
        COMMIT_UNKNOWN or the store failed after the decision.
    Spec: the steps of REQ-CMT-001 to REQ-CMT-009.
    """
    ownership = Ownership()
    save, snapshot, _ = agree_on_save(
        group, state, save, ownership=ownership, checks=True, label=label, unsaved=unsaved
    )
    return write_live(SaveJob(save), snapshot, ownership)


def write_live(job: SaveJob, snapshot: Snapshot, ownership: Ownership) -> Manifest:
    """Make a save from the live tensors, in the calling thread, up to the sweep.

    Raises: as `SaveJob.run_here`.
    """
    save = job.save
    return job.run_here(
        lambda: write_part(
            save.store, snapshot, save.origin, writer=save.writer, image=ownership.image
        )
    )


def agree_on_save(
    group: Group,
    state: State,
    save: SaveState,
    *,
    ownership: Ownership,
    checks: bool,
    label: Callable[[], Labels] | None = None,
    say: object = None,
    unsaved: Callable[[Live], Sequence[str]] | None = None,
) -> tuple[SaveState, Snapshot, list[Any]]:
    """Capture the live state, and agree with the other writers on the attempt and the shares.

    Args:
        save: values of the save, as proposed by this process. The step isn't checked yet.
        checks: whether writer 0 runs the step `check` before the first write.
        label: returns metrics and tags. Called on writer 0 only. An exception stops the save on all
            writers.
        say: JSON value to send to all writers.
        unsaved: see `capture`.

    Returns: the values of the save with the agreed origin; this writer's contribution; each
        writer's `say`, by writer number.
    Raises: the error that refuses the save, on all writers alike.
    Spec: REQ-CMT-001, REQ-CMT-002.
    """
    proposed = save.origin

    def take() -> Snapshot:
        check_step(proposed.step)
        if checks and group.writer == 0:
            SaveJob(save).check()
        labels = label() if label is not None and group.writer == 0 else NO_LABELS
        # Saves to paths may be of different states, whose positions aren't comparable.
        number = None if save.run is None else operator.index(proposed.step)
        snapshot = _take(state, group, ownership, step=number, unsaved=unsaved)
        return dataclasses.replace(snapshot, labels=labels)

    with merged_shares(group, state):
        snapshot, error = attempt(take)
    mine = {
        "step": 0 if snapshot is None else operator.index(proposed.step),
        "fingerprint": "" if snapshot is None else ownership.fingerprint,
        "nonce": proposed.nonce,
        "attempt": proposed.attempt,
        "leaves": {}
        if snapshot is None or group.writer_count == 1
        else mark_leaves(snapshot.leaves),
        "say": say,
    }
    told = group.agree(error, mine)
    assert snapshot is not None  # noqa: S101
    fingerprints = [theirs["fingerprint"] for theirs in told]
    check_same_leaves(group, snapshot.leaves, [theirs["leaves"] for theirs in told])
    origin = dataclasses.replace(
        proposed,
        nonce=told[0]["nonce"],
        step=operator.index(proposed.step),  # accepts NumPy's integers
        attempt=told[0]["attempt"],
        writer_count=group.writer_count,
    )
    _assign(group, snapshot, ownership, fingerprints, origin.block_nbytes)
    agreed = dataclasses.replace(save, origin=origin, writer=group.writer)
    return agreed, snapshot, [theirs["say"] for theirs in told]


def prepare_once(
    group: Group,
    state: State,
    ownership: Ownership,
    *,
    block_nbytes: int,
    step: int | None = None,
    unsaved: Callable[[Live], Sequence[str]] | None = None,
) -> Snapshot:
    """Check a state as a save does, and assign the pieces to writers, before the first step.

    Args:
        step: number of training steps done; None if unknown.
        unsaved: see `capture`.

    Returns: this writer's snapshot for a save now.

    Raises: StateError; FormatError; LayoutError.
    """
    snapshot = group.together(
        lambda: _take(state, group, ownership, step=step, is_save=False, unsaved=unsaved)
    )
    mine = {
        "fingerprint": ownership.fingerprint,
        "leaves": mark_leaves(snapshot.leaves, fields=_CONSTANT),
    }
    told = group.all_gather(mine)
    check_same_leaves(group, snapshot.leaves, [theirs["leaves"] for theirs in told])
    _assign(group, snapshot, ownership, [theirs["fingerprint"] for theirs in told], block_nbytes)
    return snapshot


def _assign(
    group: Group,
    snapshot: Snapshot,
    ownership: Ownership,
    fingerprints: list[str],
    block_nbytes: int,
) -> None:
    """Assign the pieces to writers and plan the image, unless no writer's structure has changed."""
    if fingerprints != ownership.fingerprints or ownership.is_new_group:
        before = ownership.fingerprints, ownership.written
        ownership.written = find_written(group, snapshot)
        ownership.fingerprints = fingerprints
        ownership.is_new_group = False
        if (fingerprints, ownership.written) != before:
            ownership.image = None
    if ownership.image is None or ownership.image.block_nbytes != block_nbytes:
        ownership.image = plan_image(
            snapshot,
            written=ownership.written,
            block_nbytes=block_nbytes,
            check_replicas=ownership.check_replicas,
        )


def _take(
    state: State,
    group: Group,
    ownership: Ownership,
    *,
    step: int | None,
    is_save: bool = True,
    unsaved: Callable[[Live], Sequence[str]] | None = None,
) -> Snapshot:
    look = (
        None
        if step is None
        else functools.partial(ownership.position.look, step=step, is_save=is_save)
    )
    try:
        snapshot = capture(
            state, worker=group.writer, worker_count=group.writer_count, look=look, unsaved=unsaved
        )
        _look_at(snapshot, ownership)
    except CkptError as error:
        if (found := for_saving(error)) is not error:
            raise found from error
        raise
    return snapshot


def check_step(step: object, where: str = "step=") -> None:
    """Check that a value is a number of steps. Raises: StateError(ARGUMENT)."""
    if (
        isinstance(step, bool)
        or not hasattr(step, "__index__")
        or not 0 <= operator.index(step) <= limits.JSON_INTEGER
    ):
        remedy = "Pass a whole number of steps, from 0 on, such as 100."
        raise err(Code.ARGUMENT, f"{step!r} isn't a number of steps", where=where, remedy=remedy)


def _look_at(snapshot: Snapshot, ownership: Ownership) -> None:
    """Check the names of a snapshot and keep the structure; skip an unchanged structure.

    Raises: StateError(STATE_NAME).
    """
    declared = snapshot.declared_by
    tensors = [
        (
            source.field, source.name, source.scope, source.dtype, source.global_shape,
            source.boxes, source.replica,
            source.storage, source.aliases, declared.get(key_of(source)),
        )
        for source in snapshot.tensors
    ]  # fmt: skip
    leaves = list(map(key_of, snapshot.leaves))
    signature = (tensors, leaves, [(stream.name, stream.scope) for stream in snapshot.streams])
    if signature != ownership.signature:
        check_snapshot(snapshot)
        # The fingerprint covers all inputs of the image: a changed dtype needs a new plan.
        ownership.fingerprint = structure_of(snapshot).dump()[1].hex()
        ownership.signature = signature


def find_written(group: Group, snapshot: Snapshot) -> frozenset[tuple[TensorKey, Box]] | None:
    """Exchange the structures with all writers, and return this writer's pieces.

    Returns: None for all pieces.
    """
    if group.writer_count == 1:
        return None
    content, _ = structure_of(snapshot).dump()
    gathered = group.all_gather(base64.b64encode(content).decode())
    known: dict[bytes, TensorTable] = {}
    structures = [Structure.parse(base64.b64decode(theirs), known=known) for theirs in gathered]
    own = structures[group.writer]
    written = assign_writers(structures)[group.writer].tolist()
    return frozenset(
        (key, box) for key, box, _, _ in itertools.compress(own.iter_pieces(), written)
    )
