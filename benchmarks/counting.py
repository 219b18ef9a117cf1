"""A store that counts the bytes of metadata that a reader reads."""

from __future__ import annotations

from pathlib import Path

from ckptfmt.documents.manifest import MANIFEST_NAME
from ckptfmt.store import LocalStore


class CountingStore(LocalStore):
    """A read-only directory.

    Attributes:
        metadata_nbytes: the bytes read so far of manifest, index and parts.
    """

    def __init__(self, root: Path) -> None:
        super().__init__(root, writable=False)
        self.metadata_nbytes = 0
        self._parts: set[str] = set()

    @property
    def part_count(self) -> int:
        """Number of parts with any read."""
        return len(self._parts)

    def read(self, path: str, *, limit_nbytes: int) -> bytes:
        """Return a whole file, and count the bytes."""
        content = super().read(path, limit_nbytes=limit_nbytes)
        self._count(path, len(content))
        return content

    def read_range(self, path: str, byte_begin: int, nbytes: int) -> bytes:
        """Return a range of a file, and count the bytes."""
        self._count(path, nbytes)
        return super().read_range(path, byte_begin, nbytes)

    def _count(self, path: str, nbytes: int) -> None:
        is_part = path.startswith("parts/")
        if is_part:
            self._parts.add(path)
        if is_part or path == MANIFEST_NAME or path.startswith("index-"):
            self.metadata_nbytes += nbytes
