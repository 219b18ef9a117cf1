"""BLAKE3-256: the digest of documents, headers and blocks. Spec: REQ-DOC-009, REQ-TEN-006."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from blake3 import blake3

DIGEST_NBYTES: Final = 32
PREFIX: Final = "blake3:"


def digest_bytes(content: bytes | bytearray | memoryview) -> bytes:
    """Return the 32-byte digest of `content`."""
    return blake3(content).digest()


def digest_text(digest: bytes) -> str:
    """Return a digest in the form of JSON documents.

    >>> digest_text(digest_bytes(b""))
    'blake3:af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262'
    """
    return PREFIX + digest.hex()


def digest_at(digests: bytes, number: int) -> bytes:
    """Return the digest of a number in a concatenation of digests."""
    return digests[number * DIGEST_NBYTES : (number + 1) * DIGEST_NBYTES]


def iter_blocks(nbytes: int, block_nbytes: int) -> Iterator[tuple[int, int]]:
    """Yield ``[begin, end)`` of each block of `nbytes` bytes; the last block may be short."""
    for begin in range(0, nbytes, block_nbytes):
        yield begin, min(begin + block_nbytes, nbytes)


def block_digests(content: memoryview, block_nbytes: int) -> bytes:
    """Return the digests of the blocks of `content`, one after the other.

    Units: `block_nbytes` in bytes; the result has 32 bytes for each block.
    Spec: REQ-TEN-005, REQ-TEN-006.
    """
    return b"".join(
        digest_bytes(content[begin:end]) for begin, end in iter_blocks(content.nbytes, block_nbytes)
    )
