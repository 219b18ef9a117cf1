"""Copies from the host's buffers to CUDA tensors that are being loaded: pinned buffers, a side stream per device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np
import torch

from ckptfmt.adapters.torch.device_copies import Cuda, pin, unpin
from ckptfmt.adapters.torch.tensors import TorchSink
from ckptfmt.read.streaming import Borrow
from ckptfmt.write.snapshot import TensorSink

#: Where tensors lie that aren't reached through the processor's memory.
DEVICE_TYPE: Final = "cuda"


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
