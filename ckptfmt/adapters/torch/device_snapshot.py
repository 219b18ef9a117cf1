"""Copy the tensors of a device into spare memory of the device, and from there into the slot.

A copy within a device runs at the bandwidth of the device's memory, many times faster than a copy
over the bus to the host. The copy is enqueued on the training's own stream, so that all later work
of the training follows the copy: the training may change each tensor at once, and no optimizer's
step waits. The bytes cross the bus afterwards, at the rate of the host.

The memory belongs to a separate pool of torch's allocator, and returns there buffer by buffer while
the bytes cross the bus. The pool stays reserved for the next snapshot, until torch's allocator runs
out of memory and empties all pools. A device with little unreserved memory makes no such copy,
because a growing training would run out of memory.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Sequence
from typing import Final

import torch

from ckptfmt.adapters.torch import device_copies
from ckptfmt.adapters.torch.device_copies import (
    DeviceCopy,
    Moment,
    Side,
    SideStreams,
    Transfer,
    is_in_order,
    join_copies,
)
from ckptfmt.adapters.torch.tensors import _as_integers
from ckptfmt.documents.tables import TensorKey
from ckptfmt.write.staging import Filling

#: The largest buffer that holds several pieces, in bytes. A larger piece has its own buffer.
BUFFER_NBYTES: Final = 256 << 20
#: The alignment of a piece in a buffer is that of the image up to this many bytes.
_ALIGN_NBYTES: Final = 256
#: The least part of a device's memory that stays unreserved, as a divisor, and the least amount in
#: bytes.
_SPARE_DIVISOR: Final = 16
_SPARE_NBYTES: Final = 1 << 30

_LOG: Final = logging.getLogger("ckptfmt")

#: Key, tensor, and the first byte and the end of the tensor's elements in the image.
Row = tuple[TensorKey, torch.Tensor, int, int]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Buffer:
    """Memory on a device for neighbouring pieces.

    Attributes:
        begin: the place of the buffer's first byte in the image.
        memory: the bytes.
        rows: the pieces.
    """

    side: Side
    begin: int
    memory: torch.Tensor
    rows: list[Row]

    def at(self, begin: int, end: int) -> torch.Tensor:
        """Return the bytes ``[begin, end)`` of the image."""
        return self.memory[begin - self.begin : end - self.begin]


def take_snapshot(
    rows: Sequence[Row],
    slot_view: memoryview,
    *,
    sides: SideStreams,
    filling: Filling | None = None,
) -> tuple[DeviceCopy, ...] | None:
    """Copy tensors on their devices, and return the copies from there into a slot.

    The copies on the devices are enqueued on this thread's current streams before the call returns.
    The returned copies are done later, in their order, by one thread.

    Args:
        rows: the pieces with at least one byte, in image order.
        slot_view: the image, writable.
        sides: the streams of the devices.
        filling: the known content of the slot; None sends all bytes.

    Returns: None if a device has too little spare memory; then nothing was copied.
    """
    runs = _cut(rows, sides)
    needed: dict[torch.device, int] = {}
    for side, run in runs:
        begin, end = _extent_of(run)
        needed[side.device] = needed.get(side.device, 0) + end - begin
    found = {side.device: side for side, _ in runs}
    if not all(_has_room(found[device], nbytes) for device, nbytes in needed.items()):
        return None
    try:
        buffers = [_make_buffer(run, side) for side, run in runs]
        with torch.no_grad():  # autograd would track each view, at ten times the cost
            for side, target, sources in _list_copies(buffers):
                side.cuda.copy_on_device(target, sources)
    except torch.OutOfMemoryError as error:
        # Torch's allocator has emptied the training's pools, too: no second try.
        for side in found.values():
            side.is_full = True
        _LOG.info("no more snapshots within the devices, for lack of memory: %s", error)
        return None
    for device, nbytes in needed.items():
        found[device].kept_nbytes = max(found[device].kept_nbytes, nbytes)
    moments = {device: Moment(cuda=side.cuda, device=device) for device, side in found.items()}
    for moment in moments.values():
        moment.mark()
    transfers = (transfer for buffer in buffers for transfer in _iter_transfers(buffer, filling))
    copies = join_copies(transfers, slot_view, moments, is_later=True)
    for side in found.values():
        first = next(copy for copy in copies if copy.side is side)
        first.sources = [tensor for at, run in runs if at is side for _, tensor, _, _ in run]
    return copies


def _has_room(side: Side, nbytes: int) -> bool:
    """Return whether a device has memory for a snapshot, and enough besides."""
    if side.is_full:
        return False
    spare_nbytes, whole_nbytes = side.cuda.spare_nbytes(side.device)
    left_nbytes = spare_nbytes - max(0, nbytes - side.kept_nbytes)
    return left_nbytes >= max(_SPARE_NBYTES, whole_nbytes // _SPARE_DIVISOR)


def _cut(rows: Sequence[Row], sides: SideStreams) -> list[tuple[Side, list[Row]]]:
    """Return the pieces for each buffer: neighbours in the image on the same device."""
    runs: list[tuple[Side, list[Row]]] = []
    for row in rows:
        side = sides.of(row[1])
        if runs:
            last, run = runs[-1]
            if last is side and run[-1][3] == row[2] and row[3] - run[0][2] <= BUFFER_NBYTES:
                run.append(row)
                continue
        runs.append((side, [row]))
    return runs


def _extent_of(rows: list[Row]) -> tuple[int, int]:
    """Return begin and end in the image of a buffer for some pieces."""
    begin = rows[0][2] // _ALIGN_NBYTES * _ALIGN_NBYTES
    return begin, -(-rows[-1][3] // _ALIGN_NBYTES) * _ALIGN_NBYTES


def _make_buffer(rows: list[Row], side: Side) -> _Buffer:
    begin, end = _extent_of(rows)
    memory = side.cuda.empty_for_both(end - begin, side.pool, side.stream, side.device)
    return _Buffer(side=side, begin=begin, memory=memory, rows=rows)


def _list_copies(
    buffers: Sequence[_Buffer],
) -> Iterator[tuple[Side, torch.Tensor, list[torch.Tensor]]]:
    """Yield neighbouring pieces of one dtype, flat, with the bytes of a buffer for all of them."""
    for buffer in buffers:
        begin = buffer.rows[0][2]
        sources: list[torch.Tensor] = []
        for _, tensor, first, _ in buffer.rows:
            source = _flatten(tensor)
            if sources and source.dtype != sources[0].dtype:
                yield buffer.side, buffer.at(begin, first).view(sources[0].dtype), sources
                begin = first
                sources = []
            sources.append(source)
        target = buffer.at(begin, buffer.rows[-1][3])
        yield buffer.side, target.view(sources[0].dtype), sources


def _flatten(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a tensor in C order, in one dimension.

    The elements are integers, which preserve all bits of a NaN. A tensor with another order in
    memory is copied.
    """
    plain = tensor if is_in_order(tensor) else tensor.resolve_conj().resolve_neg()
    held = _as_integers(plain).contiguous()
    # A contiguous tensor may have any stride in a dimension of one element.
    return held.as_strided((held.numel(),), (1,))


def _iter_transfers(buffer: _Buffer, filling: Filling | None) -> Iterator[Transfer]:
    """Yield the transfers of a buffer, in image order.

    A large piece that is compared with the slot is a transfer of its own. All other bytes are sent
    in equal portions.
    """
    begin = buffer.rows[0][2]
    for _, _, first, end in buffer.rows:
        if filling is not None and end - first >= device_copies.SMALL_NBYTES:
            yield from _iter_portions(buffer, begin, first)
            yield Transfer(
                side=buffer.side,
                keys=[],
                begin=first,
                end=end,
                parts=[buffer.at(first, end)],
                block_nbytes=filling.block_nbytes,
                watched=filling.watch(first),
            )
            begin = end
    yield from _iter_portions(buffer, begin, buffer.rows[-1][3])


def _iter_portions(buffer: _Buffer, begin: int, end: int) -> Iterator[Transfer]:
    step_nbytes = device_copies.COPY_NBYTES
    for first in range(begin, end, step_nbytes):
        last = min(first + step_nbytes, end)
        yield Transfer(
            side=buffer.side, keys=[], begin=first, end=last, parts=[buffer.at(first, last)]
        )
