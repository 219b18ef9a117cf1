"""The CUDA devices of a trainer: what of a snapshot lies there, side streams, pinned slots and buffers of loads."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

import numpy as np
import torch

from ckptfmt.adapters.torch.device_copies import Cuda, DeviceCopy, SideStreams, pin, plan_device_copies, unpin
from ckptfmt.adapters.torch.tensors import TorchSink, TorchSource
from ckptfmt.box import Box
from ckptfmt.documents.tables import TensorKey
from ckptfmt.read.streaming import Borrow
from ckptfmt.stage.slot import Slot
from ckptfmt.write.snapshot import TensorSink, TensorSource
from ckptfmt.write.staging import Filling

#: Where tensors lie that aren't reached through the processor's memory.
DEVICE_TYPE: Final = "cuda"


class Devices:
    """Side streams and pinned slots of one trainer; nothing is touched before a tensor lies on a device.

    Args:
        report: called with a sentence where slots can't be pinned.
        cuda: the calls to use, such as those of a fake.
        device_type: of the tensors that are taken.
    """

    def __init__(
        self, report: Callable[[str], None], *, cuda: Cuda | None = None, device_type: str = DEVICE_TYPE
    ) -> None:
        # Weak: what takes a pin back refers to this, and must not keep alive who reports.
        self._report = weakref.WeakMethod(report)
        self._cuda = Cuda() if cuda is None else cuda
        self._device_type = device_type
        self._sides = SideStreams(cuda=self._cuda)

    def find(self, source: TensorSource, box: Box) -> torch.Tensor | None:
        """Return the elements of `box` where they lie on a device, else None."""
        if not isinstance(source, TorchSource) or source.local.device.type != self._device_type:
            return None
        return held_at(source, box)

    def plan(
        self,
        pieces: Iterable[tuple[TensorKey, torch.Tensor, int, int]],
        view: memoryview,
        filling: Filling | None = None,
    ) -> tuple[DeviceCopy, ...]:
        """Return the copies of what `find` found; see `plan_device_copies`."""
        return plan_device_copies(pieces, view, sides=self._sides, filling=filling)

    def holds_any(self, sources: Iterable[TensorSource]) -> bool:
        """Tell whether any of the sources lies on a device."""
        return any(
            isinstance(source, TorchSource) and source.local.device.type == self._device_type for source in sources
        )

    def pin(self, slot: Slot) -> Callable[[], None]:
        """Pin a slot's memory; return what takes that back, to be called before the slot is closed."""
        address, view = slot.address, slot.view
        problem = pin(address, slot.nbytes, cuda=self._cuda)
        if problem is not None:
            report = self._report()
            if report is not None:
                report(f"SLOT_NOT_PINNED: copies from the device are slower, and keep the host waiting: {problem}")
            return lambda: None

        def release() -> None:
            unpin(address, cuda=self._cuda)
            view.release()

        return release


def held_at(source: TorchSource, box: Box) -> torch.Tensor:
    """Return the elements of one of a source's boxes, as a view of the live memory."""
    piece = next(piece for piece in source.pieces if piece.box == box)
    return source.local[piece.local_box.relative_to(Box.whole(tuple(source.local.shape)))]


def plan_arrivals(
    sinks: Sequence[TensorSink],
    *,
    report: Callable[[str], None],
    cuda: Cuda | None = None,
    device_type: str = DEVICE_TYPE,
) -> Borrow | None:
    """Return what buffers are to be lent to while these sinks are filled; None if none of them is on a device.

    Args:
        report: called with a sentence where the buffers can't be pinned.
        cuda: the calls to use, such as those of a fake.
        device_type: of the tensors that are filled this way.
    """
    found = [sink for sink in sinks if isinstance(sink, TorchSink) and sink.local.device.type == device_type]
    if not found:
        return None
    return _Arrivals(found, report, Cuda() if cuda is None else cuda).borrow


class _Arrivals:
    def __init__(self, sinks: Sequence[TorchSink], report: Callable[[str], None], cuda: Cuda) -> None:
        self._sinks = sinks
        self._report = report
        self._cuda = cuda
        self._sides: dict[torch.device, torch.cuda.Stream] = {}

    @contextlib.contextmanager
    def borrow(self, memory: memoryview) -> Iterator[None]:
        """Pin the buffers, and let the sinks copy from them on a stream of their own."""
        for device in {self._cuda.device_of(sink.local) for sink in self._sinks}:
            if device not in self._sides:
                self._sides[device] = self._cuda.make_stream(device)
            # What the program gave its own stream may still read what is about to be filled.
            self._cuda.follow_current(self._sides[device], device)
        address = np.frombuffer(memory, np.uint8).ctypes.data
        problem = pin(address, len(memory), cuda=self._cuda)
        if problem is not None:
            self._report(f"the buffers of the load aren't pinned, and copies to the device are slower: {problem}")
        for sink in self._sinks:
            sink.arrive = self._copy
        try:
            yield
        finally:
            for sink in self._sinks:
                sink.arrive = None
            if problem is None:
                unpin(address, cuda=self._cuda)

    def _copy(self, target: torch.Tensor, incoming: torch.Tensor) -> None:
        """Copy, and wait until it is done: the buffer is used again then."""
        side = self._sides[self._cuda.device_of(target)]
        self._cuda.run_on(side, lambda: self._enqueue(target, incoming))
        self._cuda.synchronize(self._cuda.record(side))

    @staticmethod
    def _enqueue(target: torch.Tensor, incoming: torch.Tensor) -> None:
        with torch.no_grad():
            target.copy_(incoming, non_blocking=True)
