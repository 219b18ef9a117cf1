"""From a snapshot to the copies that fill an image: by the host, or by the devices that hold the tensors."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from ckptfmt.documents.tables import TensorKey
from ckptfmt.write.fillings import Filling
from ckptfmt.write.image import Image, Piece, key_of
from ckptfmt.write.snapshot import Snapshot, TensorSource
from ckptfmt.write.staging import Copy, HostCopy


def plan_copies(
    snapshot: Snapshot,
    image: Image,
    view: memoryview,
    *,
    later: Collection[TensorKey],
    devices: Any,  # noqa: ANN401 - torch's side, which this module must not import
    blocks: Any = None,  # noqa: ANN401 - likewise
    filling: Filling | None = None,
) -> tuple[list[Copy], list[Copy]]:
    """Return the copies that fill `view` with what `image` says: those to be done now, and those of `later`.

    Args:
        snapshot: of the structure that the image was planned for.
        view: of a slot, as long as the image at least.
        later: tensors that may be copied beside the training.
        devices: a ``ckptfmt.adapters.torch.Devices``, or None where torch isn't there.
        blocks: what the slot holds of tensors of devices, as `Devices.blocks_of` returns it; None to copy all of them.
        filling: what the slot holds of tensors of the host; None to copy all of them.
    """
    sources = {key_of(source): source for source in snapshot.tensors}
    pieces = [(sources[piece.key], piece) for piece in image.pieces if piece.end > piece.begin]
    return (
        _plan([row for row in pieces if row[1].key not in later], view, devices, blocks, filling),
        _plan([row for row in pieces if row[1].key in later], view, devices, blocks, filling),
    )


def _plan(
    rows: Sequence[tuple[TensorSource, Piece]],
    view: memoryview,
    devices: Any,  # noqa: ANN401 - see plan_copies
    blocks: Any,  # noqa: ANN401
    filling: Filling | None,
) -> list[Copy]:
    copies: list[Copy] = []
    on_device = []
    for source, piece in rows:
        tensor = None if devices is None else devices.find(source, piece.box)
        if tensor is not None:
            on_device.append((piece.key, tensor, piece.begin, piece.end))
        else:
            copies.append(
                HostCopy(
                    source=source,
                    box=piece.box,
                    keys=(piece.key,),
                    begin=piece.begin,
                    end=piece.end,
                    view=view,
                    filling=filling,
                )
            )
    if on_device:
        copies += devices.plan(on_device, view, blocks)
    return copies
