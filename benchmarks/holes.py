"""Writers of states larger than any disk: files are holes, digests those of their bytes.

The bytes of a shard are zeros, but for a few planted boxes with random bytes. The ordinary writer
writes the shard; only the system call that would write zeros makes a hole of the file instead. A
hole reads as zeros, so each digest is the digest of the bytes that a reader finds in the file.
"""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Iterator, Mapping
from typing import Final

import numpy as np

from ckptfmt.box import Box
from ckptfmt.digest import DIGEST_NBYTES, block_digests, digest_bytes
from ckptfmt.documents.tables import TensorKey
from ckptfmt.store.posix import PosixCalls
from ckptfmt.store.protocol import Buffer
from ckptfmt.write.image import Image, Piece

#: The zeros of all holes: a chunk of a shard is a view of this memory.
_ZEROS: Final = memoryview(bytes(16 << 20))


class HoleCalls(PosixCalls):
    """System calls that leave a hole where `_ZEROS` would be written."""

    def write(self, fd: int, data: memoryview) -> int:
        """Write at the file's position, or move the position."""
        if data.obj is not _ZEROS.obj:
            return super().write(fd, data)
        self._extend(fd, os.lseek(fd, len(data), os.SEEK_CUR))
        return len(data)

    def write_at(self, fd: int, data: memoryview, byte_begin: int) -> int:
        """Write at a place, or extend the file up to the end of the hole."""
        if data.obj is not _ZEROS.obj:
            return super().write_at(fd, data, byte_begin)
        self._extend(fd, byte_begin + len(data))
        return len(data)

    def preallocate(self, fd: int, nbytes: int) -> None:
        """Extend a file without reserving space."""
        self._extend(fd, nbytes)

    def _extend(self, fd: int, nbytes: int) -> None:
        if os.fstat(fd).st_size < nbytes:
            os.ftruncate(fd, nbytes)


class HoleContents:
    """The bytes of an image: zeros and planted boxes; implements `ckptfmt.write.writer.Contents`.

    Args:
        planted: the bytes of some boxes, by tensor and box.
    """

    shards_at_once = 1

    def __init__(self, image: Image, planted: Mapping[tuple[TensorKey, Box], bytes]) -> None:
        self._image = image
        self._planted = planted

    def iter_chunks(self, shard: int) -> Iterator[Buffer]:
        """Yield header and pieces; neighbouring zeros are one hole."""
        found = self._image.shards[shard]
        yield found.header
        at = found.begin + len(found.header)
        for piece in self._image.pieces:
            content = self._content(piece) if piece.shard == shard else None
            if content is not None:
                yield from _iter_zeros(piece.begin - at)
                yield content
                at = piece.end
        yield from _iter_zeros(found.begin + found.nbytes - at)

    def digests(self) -> list[bytes]:
        """Return the digests of each piece; those of zeros are computed once for each length."""
        block_nbytes = self._image.block_nbytes
        return [
            _digests_of_zeros(piece.end - piece.begin, block_nbytes)
            if (content := self._content(piece)) is None
            else block_digests(memoryview(content), block_nbytes)
            for piece in self._image.pieces
        ]

    def _content(self, piece: Piece) -> bytes | None:
        return self._planted.get((piece.key, piece.box)) if self._planted else None


def plant(box: Box, seed: str) -> bytes:
    """Return random bytes for a box of float32, equal for equal seeds.

    Bits of the exponent are kept clear, so that no value is a NaN.
    """
    values = np.frombuffer(random.Random(seed).randbytes(4 * box.element_count), np.uint32)
    return (values & np.uint32(0xBFFFFFFF)).tobytes()


def _iter_zeros(nbytes: int) -> Iterator[memoryview]:
    for begin in range(0, nbytes, len(_ZEROS)):
        yield _ZEROS[: min(len(_ZEROS), nbytes - begin)]


@functools.cache
def _digests_of_zeros(nbytes: int, block_nbytes: int) -> bytes:
    """Return the digests of the blocks of `nbytes` zeros."""
    whole, rest = divmod(nbytes, block_nbytes)
    last = digest_bytes(_ZEROS[:rest]) if rest else b""
    digests = digest_bytes(_ZEROS[:block_nbytes]) * whole + last
    assert len(digests) % DIGEST_NBYTES == 0
    return digests
