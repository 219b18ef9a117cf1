"""Cold and warm files: cached pages according to the kernel, and ways to evict or load files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from benchmarks.pages import PAGE_NBYTES, round_up
from ckptfmt.store.posix import PosixCalls


def sync_file(path: Path) -> None:
    """Wait until a file's bytes and name are durable."""
    _sync(path, os.O_RDONLY)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Wait until the names in a directory are durable."""
    _sync(path, os.O_RDONLY | os.O_DIRECTORY)


def _sync(path: Path, flags: int) -> None:
    opened = os.open(path, flags)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


_REQUEST_NBYTES: Final = 2**22
_WARM_TRIES: Final = 20  # pages may be evicted when memory is short


def list_files(path: Path) -> list[Path]:
    """Return a file itself, or all files of a directory."""
    return sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]


def cached_nbytes(paths: Iterable[Path]) -> int:
    """Return the number of bytes of files in the page cache, in whole pages, without side effects.

    Raises: OSError where the kernel has no cachestat(2).
    """
    return PAGE_NBYTES * sum(_count_pages(path) for path in paths)


def make_cold(paths: Iterable[Path]) -> None:
    """Evict files from the page cache, and confirm the eviction with the kernel.

    Raises: RuntimeError if pages are left.
    """
    paths = list(paths)
    for path in paths:
        sync_file(path)
        opened = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(opened, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(opened)
    check_cold(paths)


def check_cold(paths: Iterable[Path]) -> None:
    """Raise RuntimeError if the page cache holds any page of the files."""
    if held_nbytes := cached_nbytes(paths):
        raise RuntimeError(f"{held_nbytes} bytes are still in the page cache: this isn't cold")


def make_warm(paths: Iterable[Path]) -> None:
    """Read files into the page cache where absent, and confirm the presence with the kernel.

    Raises: RuntimeError if the page cache doesn't keep the files.
    """
    paths = list(paths)
    for _ in range(_WARM_TRIES):
        if not _missing_nbytes(paths):
            return
        _read_all(paths)
    check_warm(paths)


def check_warm(paths: Iterable[Path]) -> None:
    """Raise RuntimeError unless the page cache holds the files whole."""
    if missing_nbytes := _missing_nbytes(list(paths)):
        raise RuntimeError(f"{missing_nbytes} bytes aren't in the page cache: this isn't warm")


def _missing_nbytes(paths: Sequence[Path]) -> int:
    return sum(round_up(path.stat().st_size) for path in paths) - cached_nbytes(paths)


def _read_all(paths: Iterable[Path]) -> None:
    buffer = bytearray(_REQUEST_NBYTES)
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def _count_pages(path: Path) -> int:
    opened = os.open(path, os.O_RDONLY)
    try:
        return PosixCalls().cached_page_count(opened, 0, 0)  # up to the end
    finally:
        os.close(opened)
