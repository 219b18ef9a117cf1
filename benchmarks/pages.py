"""Touched memory of a given kind: the source of raw writes, and the destination of raw reads."""

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
#: More than Linux caches of recently freed memory, for two processors and 24 GiB.
_FREED_NBYTES = 3 * 2**29
_MADV_POPULATE_WRITE = 23


def round_up(nbytes: int, multiple: int = PAGE_NBYTES) -> int:
    """Return the least multiple that isn't smaller.

    >>> round_up(4097, 4096) 8192
    """
    return -(-nbytes // multiple) * multiple


@contextlib.contextmanager
def pages_in_order(nbytes: int) -> Iterator[None]:
    """Give buffers made within the context physically consecutive pages.

    Linux reuses recently freed pages first, and in reverse order. A direct write of such pages is
    split into many small requests, and takes a fifth longer. The affected part of a buffer varies,
    so the context holds such pages meanwhile.

    Args:
        nbytes: the size of the buffers in bytes; the context holds at most twice the size.
    """
    with mmap.mmap(
        -1, round_up(min(_FREED_NBYTES, 2 * nbytes)), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    ) as held:
        held.madvise(_MADV_POPULATE_WRITE)
        yield


def heat(nbytes: int) -> None:
    """Touch and free memory: later allocations then use pages that the host hasn't reclaimed.

    Args:
        nbytes: the number of bytes.
    """
    with mmap.mmap(
        -1, round_up(max(1, nbytes)), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    ) as touched:
        touched.madvise(_MADV_POPULATE_WRITE)


class Region:
    """A mapping filled with the bytes of consecutive tensors, and thereby touched.

    Args:
        tensors: the contents, rounded up to whole pages.
        huge: anonymous memory in huge pages where the kernel provides them; else a memfd, mapped
            shared, in small pages, as in a slot.
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
        """Return kind and page size, and the size of the part in huge pages."""
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
    """Return anonymous memory, in huge pages where the kernel provides them."""
    mapped = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapped.madvise(mmap.MADV_HUGEPAGE)
    return mapped


def _huge_nbytes(address: int) -> int:
    """Return the number of bytes in huge pages of the mapping around an address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif inside and line.startswith("AnonHugePages:"):
            return int(line.split()[1]) * 1024
    return 0
