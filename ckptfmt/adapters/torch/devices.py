"""The CUDA devices of a trainer, as far as snapshots need them: what lies there, side streams, pinned slots."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch

from ckptfmt.adapters.torch.device_copies import Cuda, DeviceCopy, SideStreams, pin, plan_device_copies, unpin
from ckptfmt.adapters.torch.slot_blocks import SlotBlocks
from ckptfmt.adapters.torch.tensors import TorchSource
from ckptfmt.box import Box
from ckptfmt.documents.tables import TensorKey
from ckptfmt.stage.slot import Slot
from ckptfmt.write.image import Image
from ckptfmt.write.snapshot import TensorSource


class Devices:
    """Side streams and pinned slots of one trainer; nothing is touched before a tensor lies on a device.

    Args:
        report: called with a sentence where slots can't be pinned.
        cuda: the calls to use, such as those of a fake.
        device_type: of the tensors that are taken.
    """

    def __init__(self, report: Callable[[str], None], *, cuda: Cuda | None = None, device_type: str = "cuda") -> None:
        # Weak: what takes a pin back refers to this, and must not keep alive who reports.
        self._report = weakref.WeakMethod(report)
        self._cuda = Cuda() if cuda is None else cuda
        self._device_type = device_type
        self._sides = SideStreams(cuda=self._cuda)
        self._blocks: dict[int, SlotBlocks] = {}

    def find(self, source: TensorSource, box: Box) -> torch.Tensor | None:
        """Return the elements of `box` where they lie on a device, else None."""
        if not isinstance(source, TorchSource) or source.local.device.type != self._device_type:
            return None
        return held_at(source, box)

    def blocks_of(self, slot: int, image: Image, *, is_known: bool) -> SlotBlocks:
        """Return what a slot holds, by its number; see `SlotBlocks.begin`."""
        blocks = self._blocks.setdefault(slot, SlotBlocks())
        blocks.begin(image, is_known=is_known)
        return blocks

    def plan(
        self,
        pieces: Iterable[tuple[TensorKey, torch.Tensor, int, int]],
        view: memoryview,
        blocks: SlotBlocks | None = None,
    ) -> tuple[DeviceCopy, ...]:
        """Return the copies of what `find` found; see `plan_device_copies`."""
        return plan_device_copies(pieces, view, sides=self._sides, blocks=blocks)

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
