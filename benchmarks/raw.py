"""Raw direct writes: the same bytes, nothing else. What the machine gives, and the yardstick of a save."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import errno
import os
from pathlib import Path
from typing import Final

from benchmarks.durable import sync_directory
from benchmarks.pages import Region

__all__ = ["SETTINGS", "RawSetting", "RawWriter"]

_MIB: Final = 2**20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RawSetting:
    """How many threads write, and how much each of them asks for at once."""

    threads: int
    request_nbytes: int


#: What is tried; the best by median counts.
SETTINGS: Final = tuple(
    RawSetting(threads=threads, request_nbytes=mib * _MIB) for threads, mib in ((2, 16), (2, 4), (3, 8))
)


class RawWriter:
    """Write a region to a file with O_DIRECT, preallocated, and make it durable.

    Where the file system refuses direct I/O the writes are buffered, and `describe` says so.
    """

    def __init__(self, name: str, region: Region, setting: RawSetting) -> None:
        self.name = name
        self.is_buffered = False
        self._region = region
        self._setting = setting

    def describe(self) -> dict[str, object]:
        """Return the settings."""
        return {**self._region.describe(), **dataclasses.asdict(self._setting), "direct": not self.is_buffered}

    def save(self, path: Path) -> Path:
        """Write all bytes durably; return the file."""
        opened = self._create(path)
        try:
            os.posix_fallocate(opened, 0, self._region.nbytes)
            with concurrent.futures.ThreadPoolExecutor(self._setting.threads) as pool:
                for done in [pool.submit(self._write_share, opened, first) for first in range(self._setting.threads)]:
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
        path.unlink(missing_ok=True)  # the name may be there although the flag was refused
        return os.open(path, flags, 0o644)

    def _write_share(self, opened: int, first: int) -> None:
        """Write every n-th request, beginning with `first`, n being the number of threads."""
        request_nbytes = self._setting.request_nbytes
        stride = request_nbytes * self._setting.threads
        for begin in range(first * request_nbytes, self._region.nbytes, stride):
            request = self._region.view[begin : begin + request_nbytes]
            written = 0
            while written < len(request):
                written += os.pwrite(opened, request[written:], begin + written)
