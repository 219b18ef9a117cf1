"""Lower bounds: loops of a few lines without a format.

A verified load from the page cache has to read each block, digest the block, and copy the content
to its place. A save of changes has to read all memory in order to find the changes.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from ckptfmt.digest import digest_bytes

_BLOCK_NBYTES: Final = 1 << 20


class BareLoad:
    """A short loop over a file, with as many threads as processors.

    The loop knows no format and no plan; file, places and digests are ready before the clock
    starts. Every verified load needs at least this time, as long as bytes come through `read` and
    digests are BLAKE3.
    """

    name = "bare_warm"
    kind = "bare"
    fills = True

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._places: list[tuple[int, NDArray[np.uint8]]] = []
        begin = 0
        for tensor in tensors.values():
            content = tensor.detach().reshape(-1).view(torch.uint8).numpy()
            cuts = range(0, content.nbytes, _BLOCK_NBYTES)
            self._places += [(begin + cut, content[cut : cut + _BLOCK_NBYTES]) for cut in cuts]
            begin += content.nbytes
        self._digests: list[bytes] = []
        self._thread_count = len(os.sched_getaffinity(0))

    def describe(self) -> dict[str, object]:
        """Return the settings."""
        return {
            "call": "preadv of a block, BLAKE3 of it, copy",
            "threads": self._thread_count,
            "verified": "every block",
        }

    def write(self, path: Path) -> Path:
        """Write the tensors one after another, and keep the digests of their blocks."""
        with path.open("wb") as file:
            for _, content in self._places:
                file.write(content.data)
            file.flush()
            os.fsync(file.fileno())
        self._digests = [digest_bytes(content.data) for _, content in self._places]
        return path

    def load(self, path: Path) -> None:
        """Fill the tensors."""
        opened = os.open(path, os.O_RDONLY)
        try:
            rest = iter(range(len(self._places)))  # shared by the threads: each step is atomic
            problems: list[int] = []
            _run_threads(self._thread_count, lambda: self._load_rest(opened, rest, problems))
        finally:
            os.close(opened)
        assert not problems, f"blocks {problems} aren't what was written"

    def _load_rest(self, opened: int, rest: Iterator[int], problems: list[int]) -> None:
        buffer = np.empty(_BLOCK_NBYTES, np.uint8)
        for number in rest:
            begin, place = self._places[number]
            found = buffer[: place.nbytes]
            os.preadv(opened, [found.data], begin)
            if digest_bytes(found.data) != self._digests[number]:
                problems.append(number)
            np.copyto(place, found)


class BareRead:
    """Memory that is read by as many threads as processors."""

    def __init__(self, nbytes: int) -> None:
        self._numbers = np.arange(-(-nbytes // 8), dtype=np.uint64)
        self._sum = sum(self._sum_rest(self._iter_begins()))
        self._thread_count = len(os.sched_getaffinity(0))

    def time(self) -> float:
        """Read all memory, and return the seconds."""
        begin_s = time.perf_counter()
        rest = self._iter_begins()
        sums: list[int] = []
        _run_threads(self._thread_count, lambda: sums.extend(self._sum_rest(rest)))
        seconds = time.perf_counter() - begin_s
        assert sum(sums) == self._sum, "all of it is read, once"
        return seconds

    def _iter_begins(self) -> Iterator[int]:
        return iter(range(0, self._numbers.size, _BLOCK_NBYTES // 8))

    def _sum_rest(self, rest: Iterator[int]) -> list[int]:
        return [int(self._numbers[begin : begin + _BLOCK_NBYTES // 8].sum()) for begin in rest]


def _run_threads(count: int, work: Callable[[], None]) -> None:
    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
