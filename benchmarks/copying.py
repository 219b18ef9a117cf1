"""The yardstick of a stall: copying the same tensors into tensors that are there already, and touched."""

from __future__ import annotations

import time

import torch

from benchmarks.state import Trainer


class CopyYardstick:
    """Targets for every tensor of a trainer, and a clock around the copy."""

    def __init__(self, trainer: Trainer) -> None:
        self._sources = list(trainer.tensors().values())
        # From a device the fastest copy is into pinned memory.
        self._is_far = trainer.device.type == "cuda"
        self._targets = [torch.empty_like(source, device="cpu", pin_memory=self._is_far) for source in self._sources]
        self._threads = trainer.threads
        self.time_copy(threads=self._threads)  # touches the targets

    def time_copy(self, *, threads: int) -> float:
        """Return the seconds that the copy of all tensors takes with so many threads."""
        torch.set_num_threads(threads)
        try:
            begin_s = time.perf_counter()
            for source, target in zip(self._sources, self._targets, strict=True):
                target.copy_(source, non_blocking=self._is_far)
            if self._is_far:
                torch.cuda.synchronize()
            return time.perf_counter() - begin_s
        finally:
            torch.set_num_threads(self._threads)
