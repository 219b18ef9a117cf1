"""Memory of a stated kind, touched: what raw writes read from, and raw reads fill."""

from __future__ import annotations

import contextlib
import mmap
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch

PAGE_NBYTES = mmap.PAGESIZE
#: More than Linux keeps at hand of what was freed last, for two processors and 24 GiB.
_FREED_NBYTES = 3 * 2**29
_MADV_POPULATE_WRITE = 23


def round_up(nbytes: int, multiple: int = PAGE_NBYTES) -> int:
    """Return the least multiple that isn't smaller.

    >>> round_up(4097, 4096)
    8192
    """
    return -(-nbytes // multiple) * multiple


@contextlib.contextmanager
def pages_in_order(nbytes: int) -> Iterator[None]:
    """Let buffers that are made meanwhile have pages that follow each other in physical memory.

    What was freed last comes back first, and in reverse; a direct write of such pages is cut into
    many small requests, and takes a fifth longer. How much of a buffer that concerns is chance, so
    those pages are held by others meanwhile.

    Args:
        nbytes: size of the buffers, in bytes; twice that is held at most.
    """
    with mmap.mmap(
        -1, round_up(min(_FREED_NBYTES, 2 * nbytes)), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    ) as held:
        held.madvise(_MADV_POPULATE_WRITE)
        yield


def heat(nbytes: int) -> None:
    """Touch memory and let go of it: what is allocated next comes from pages that the host has not taken back yet.

    Args:
        nbytes: how much, in bytes.
    """
    with mmap.mmap(
        -1, round_up(max(1, nbytes)), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    ) as touched:
        touched.madvise(_MADV_POPULATE_WRITE)


class Region:
    """A mapping filled with the bytes of tensors, one after the other, and thereby touched.

    Args:
        tensors: what it holds; rounded up to whole pages.
        huge: anonymous memory in huge pages where the kernel gives them; else a memfd, mapped
            shared, in small pages, which is the kind of memory that a slot is.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], *, huge: bool) -> None:
        contents = [tensor.detach().reshape(-1).view(torch.uint8).numpy() for tensor in tensors]
        self.nbytes = round_up(sum(content.nbytes for content in contents))
        self.is_huge = huge
        self._map = map_anonymous(self.nbytes) if huge else _map_memfd(self.nbytes)
        target = np.frombuffer(self._map, np.uint8)
        begin = 0
        for content in contents:
            target[begin : begin + content.nbytes] = content
            begin += content.nbytes
        self._address = int(target.ctypes.data)
        self.view = memoryview(self._map)

    def describe(self) -> dict[str, object]:
        """Return kind and page size, and how much of it really is in huge pages."""
        huge_nbytes = _huge_nbytes(self._address) if self.is_huge else 0
        return {
            "memory": "anonymous, MADV_HUGEPAGE" if self.is_huge else "memfd, MAP_SHARED",
            "page_nbytes": 2**21 if huge_nbytes else PAGE_NBYTES,
            "huge_fraction": round(min(1.0, huge_nbytes / self.nbytes), 3),
        }


def _map_memfd(nbytes: int) -> mmap.mmap:
    memory = os.memfd_create("benchmark")
    try:
        os.ftruncate(memory, nbytes)
        return mmap.mmap(memory, nbytes)
    finally:
        os.close(memory)


def map_anonymous(nbytes: int) -> mmap.mmap:
    """Return anonymous memory, in huge pages where the kernel gives them."""
    mapped = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapped.madvise(mmap.MADV_HUGEPAGE)
    return mapped


def _huge_nbytes(address: int) -> int:
    """Return how many bytes of the mapping that holds an address lie in huge pages."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif inside and line.startswith("AnonHugePages:"):
            return int(line.split()[1]) * 1024
    return 0
