"""The least that has to be done, in loops of a few lines that know no format.

A verified load from the page cache has to read each block, digest it, and copy it to its place; who
finds out what has changed since the last save has to read what there is.
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
    """A loop of a few lines over one file, by as many threads as there are processors.

    It knows no format, plans nothing, and has file, places and digests at hand before its clock
    starts: what it takes is what no verified load can do without, as long as its bytes come through
        `read` and its digests are BLAKE3's.
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
        """Write the tensors one after the other, and note the digests of their blocks."""
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
            rest = iter(range(len(self._places)))  # shared by the threads: one step of it is atomic
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
    """A piece of memory that is read by as many threads as there are processors."""

    def __init__(self, nbytes: int) -> None:
        self._numbers = np.arange(-(-nbytes // 8), dtype=np.uint64)
        self._sum = sum(self._sum_rest(self._iter_begins()))
        self._thread_count = len(os.sched_getaffinity(0))

    def time(self) -> float:
        """Read all of it; return the seconds."""
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
