"""Raw direct writes and reads of the same bytes: the machine's limit, the yardstick of saves."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import errno
import os
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.cold import sync_directory
from benchmarks.pages import PAGE_NBYTES, Region, map_anonymous, round_up

_MIB: Final = 2**20
_HUGE_NBYTES: Final = 2**21
_CACHE_LINE_NBYTES: Final = 64


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RawSetting:
    """The number of threads, and the size of each request."""

    threads: int
    request_nbytes: int


#: The settings to try; the best by median counts.
SETTINGS: Final = tuple(
    RawSetting(threads=threads, request_nbytes=mib * _MIB)
    for threads, mib in ((2, 16), (2, 4), (3, 8))
)
#: The settings for reads.
READ_SETTINGS: Final = (
    *(
        RawSetting(threads=threads, request_nbytes=mib * _MIB)
        for threads in (1, 2, 4)
        for mib in (1, 4, 16)
    ),
    RawSetting(threads=8, request_nbytes=_MIB // 2),
)
#: The settings for touched reads: the fastest settings of untouched reads.
TOUCH_SETTINGS: Final = tuple(
    setting for setting in READ_SETTINGS if setting.threads > 1 and setting.request_nbytes <= _MIB
)


class RawWriter:
    """Write a region to a file with O_DIRECT, preallocated, and make the file durable.

    Where the file system refuses direct I/O, writes are buffered, and `describe` reports the fact.
    """

    def __init__(self, name: str, region: Region, setting: RawSetting) -> None:
        self.name = name
        self.is_buffered = False
        self._region = region
        self._setting = setting

    def describe(self) -> dict[str, object]:
        """Return the settings."""
        return {
            **self._region.describe(),
            **dataclasses.asdict(self._setting),
            "direct": not self.is_buffered,
        }

    def save(self, path: Path) -> Path:
        """Write all bytes durably, and return the file."""
        opened = self._create(path)
        try:
            os.posix_fallocate(opened, 0, self._region.nbytes)
            with concurrent.futures.ThreadPoolExecutor(self._setting.threads) as pool:
                for done in [
                    pool.submit(self._write_share, opened, first)
                    for first in range(self._setting.threads)
                ]:
                    done.result()
            os.fsync(opened)
        finally:
            os.close(opened)
        sync_directory(path.parent)
        return path

    def _create(self, path: Path) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        try:
            return os.open(path, flags | os.O_DIRECT, 0o644)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        self.is_buffered = True
        path.unlink(missing_ok=True)  # the name may exist although the flag was refused
        return os.open(path, flags, 0o644)

    def _write_share(self, opened: int, first: int) -> None:
        """Write every n-th request, beginning with `first`, for n threads."""
        request_nbytes = self._setting.request_nbytes
        stride = request_nbytes * self._setting.threads
        for begin in range(first * request_nbytes, self._region.nbytes, stride):
            request = self._region.view[begin : begin + request_nbytes]
            written = 0
            while written < len(request):
                written += os.pwrite(opened, request[written:], begin + written)


class RawReader:
    """Read a file with O_DIRECT into touched buffers in huge pages, a buffer per thread.

    Where the file system refuses direct I/O, reads are buffered, and `describe` reports the fact.

    Args:
        touches: whether a word of each cache line is read before the next request: used bytes have
            to move from the cache of the writing processor to the cache of the reading processor.
    """

    def __init__(self, setting: RawSetting, *, touches: bool = False) -> None:
        self._setting = setting
        self._touches = touches
        self._is_direct = True
        mapped = map_anonymous(round_up(setting.threads * setting.request_nbytes, _HUGE_NBYTES))
        mapped.write(bytes(len(mapped)))
        self._buffers = [
            memoryview(mapped)[first * setting.request_nbytes :][: setting.request_nbytes]
            for first in range(setting.threads)
        ]

    def describe(self) -> dict[str, object]:
        """Return the settings."""
        return {
            "call": "preadv",
            "memory": "anonymous, MADV_HUGEPAGE",
            **dataclasses.asdict(self._setting),
            "direct": self._is_direct,
            "touched": self._touches,
        }

    def load(self, path: Path) -> None:
        """Read all bytes of a file, each byte once."""
        nbytes = path.stat().st_size
        opened = self._open(path)
        try:
            with concurrent.futures.ThreadPoolExecutor(self._setting.threads) as pool:
                shares = [
                    pool.submit(self._read_share, opened, first, nbytes)
                    for first in range(len(self._buffers))
                ]
                read_nbytes = sum(share.result() for share in shares)
        finally:
            os.close(opened)
        assert read_nbytes == nbytes, f"{read_nbytes} bytes of {nbytes}"

    def _open(self, path: Path) -> int:
        try:
            return os.open(path, os.O_RDONLY | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        self._is_direct = False
        return os.open(path, os.O_RDONLY)

    def _read_share(self, opened: int, first: int, nbytes: int) -> int:
        """Read every n-th request, from `first` on, for n threads, and return the byte count."""
        request_nbytes = self._setting.request_nbytes
        view = self._buffers[first]
        total_nbytes = 0
        for begin in range(first * request_nbytes, nbytes, request_nbytes * self._setting.threads):
            wanted_nbytes = min(request_nbytes, nbytes - begin)
            read_nbytes = 0
            while read_nbytes < wanted_nbytes:
                target = view[read_nbytes : round_up(wanted_nbytes, PAGE_NBYTES)]
                read_nbytes += os.preadv(opened, [target], begin + read_nbytes)
            total_nbytes += read_nbytes
            if self._touches:
                np.frombuffer(view[: read_nbytes // 8 * 8], np.uint64)[
                    :: _CACHE_LINE_NBYTES // 8
                ].sum()
        return total_nbytes
