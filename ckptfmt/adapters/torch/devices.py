"""The device side of a trainer's saves: copies from CUDA tensors, and pinned slots."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence

import torch

from ckptfmt.adapters.torch.device_copies import (
    DEVICE_TYPE,
    Cuda,
    DeviceCopy,
    SideStreams,
    pin,
    plan_device_copies,
    unpin,
)
from ckptfmt.adapters.torch.device_snapshot import Row, take_snapshot
from ckptfmt.adapters.torch.tensors import TorchSource
from ckptfmt.box import Box
from ckptfmt.write.slot import Slot
from ckptfmt.write.snapshot import TensorSource
from ckptfmt.write.staging import Filling


class Devices:
    """The side streams and pinned slots of a trainer.

    The first tensor on a device initialises CUDA.

    Args:
        report: called with a sentence if a slot can't be pinned.
        cuda: the CUDA calls to use, such as those of a fake.
        device_type: the device type of the tensors to copy.
    """

    def __init__(
        self,
        report: Callable[[str], None],
        *,
        cuda: Cuda | None = None,
        device_type: str = DEVICE_TYPE,
    ) -> None:
        # Weak: the function that unpins refers to this object, and must not keep the reporter
        # alive.
        self._report = weakref.WeakMethod(report)
        self._cuda = Cuda() if cuda is None else cuda
        self._device_type = device_type
        self._sides = SideStreams(cuda=self._cuda)
        #: The devices of the tensors given to `holds_any`.
        self._devices: set[torch.device] = set()

    def find(self, source: TensorSource, box: Box) -> torch.Tensor | None:
        """Return the elements of `box`, or None for a tensor outside of devices."""
        if not isinstance(source, TorchSource) or source.local.device.type != self._device_type:
            return None
        return source.held_at(box)

    def plan(
        self,
        rows: Iterable[Row],
        view: memoryview,
        filling: Filling | None = None,
        *,
        is_later: bool = False,
    ) -> tuple[DeviceCopy, ...]:
        """Return the copies of tensors found by `find`, as `plan_device_copies` does."""
        return plan_device_copies(rows, view, sides=self._sides, filling=filling, is_later=is_later)

    def take(
        self, rows: Sequence[Row], view: memoryview, filling: Filling | None = None
    ) -> tuple[DeviceCopy, ...] | None:
        """Copy tensors found by `find` within the devices, as `take_snapshot` does."""
        return take_snapshot(rows, view, sides=self._sides, filling=filling)

    def holds_any(self, sources: Iterable[TensorSource]) -> bool:
        """Return whether any source is on a device."""
        found = {
            self._cuda.device_of(source.local)
            for source in sources
            if isinstance(source, TorchSource) and source.local.device.type == self._device_type
        }
        self._devices |= found
        return bool(found)

    def begin_digests(self) -> None:
        """Start to compile the kernels for digests on the devices, in other processes."""
        for device in self._devices:
            self._cuda.has_digests(device)

    def pin(self, slot: Slot) -> Callable[[], None]:
        """Pin a slot's memory, and return a function for the caller to unpin the memory.

        The caller unpins before closing the slot.
        """
        address = slot.address
        view = slot.view
        problem = pin(address, slot.nbytes, cuda=self._cuda)
        if problem is not None:
            report = self._report()
            if report is not None:
                report(
                    "SLOT_NOT_PINNED: copies from the device are slower, and keep the host"
                    f" waiting: {problem}"
                )
            return lambda: None

        def release() -> None:
            unpin(address, cuda=self._cuda)
            view.release()

        return release
