"""Peers of delta checkpoints: generic encodings of two states, for stores of any data.

- ``zstd``: the whole newer state in a stream, without the base.
- ``xor_zstd``: each tensor XOR its base, in a zstd frame, as in slime's updates of weights.
- ``blocks``: a store of blocks by digest: only blocks missing in the base are stored. The block
  table of a full checkpoint alone can do as much.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, ParamSpec, Protocol, TypeVar

import numpy as np
import zstandard

from benchmarks.snapshots import Snapshot
from ckptfmt.digest import DIGEST_NBYTES, digest_bytes, iter_blocks

P = ParamSpec("P")
T = TypeVar("T")
Contents = Mapping[str, memoryview]
Stored = Sequence[bytes]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The result of a codec on a state: sizes, and seconds on a single core.

    Attributes:
        nbytes: the size of the state.
        stored_nbytes: the size of the stored bytes.
        encode_s: the processor seconds of encoding.
        decode_s: the processor seconds of decoding.
    """

    nbytes: int
    stored_nbytes: int
    encode_s: float
    decode_s: float

    def describe(self) -> dict[str, object]:
        """Return the entry for a record."""
        return {
            "vs_raw": self.stored_nbytes / self.nbytes,
            "encode_gb_per_s": self.nbytes / max(self.encode_s, 1e-9) / 1e9,
            "decode_gb_per_s": self.nbytes / max(self.decode_s, 1e-9) / 1e9,
        }


class Codec(Protocol):
    """A lossless way to store a state, given a stored base.

    `prepare` returns the data that a store has about the base before a save or a load; the
    preparation isn't timed.
    """

    def describe(self) -> dict[str, object]:
        """Return the settings."""
        ...

    def prepare(self, base: Contents) -> Any:
        """Return the data about the base."""
        ...

    def encode(self, new: Contents, known: Any) -> Stored:
        """Return the stored bytes."""
        ...

    def decode(self, stored: Stored, out: Contents, known: Any) -> None:
        """Fill `out` with the newer state."""
        ...


class Zstd:
    """The whole state in one zstd stream."""

    def __init__(self, level: int) -> None:
        self._level = level

    def describe(self) -> dict[str, object]:
        """Return the settings."""
        return {
            "call": "zstandard.ZstdCompressor.compressobj",
            "level": self._level,
            "of": "the whole state",
        }

    def prepare(self, base: Contents) -> None:
        """Return None, since the codec has no base."""

    def encode(self, new: Contents, known: None) -> Stored:  # noqa: ARG002
        """Return the stored bytes."""
        compressor = zstandard.ZstdCompressor(level=self._level).compressobj(size=_nbytes(new))
        return [*(compressor.compress(content) for content in new.values()), compressor.flush()]

    def decode(self, stored: Stored, out: Contents, known: None) -> None:  # noqa: ARG002
        """Fill `out` with the newer state."""
        whole = zstandard.ZstdDecompressor().decompressobj()
        content = memoryview(b"".join(whole.decompress(piece) for piece in stored))
        begin = 0
        for place in out.values():
            place[:] = content[begin : begin + place.nbytes]
            begin += place.nbytes


class XorZstd:
    """Each tensor XOR its base, each in a separate zstd frame."""

    def __init__(self, level: int) -> None:
        self._level = level

    def describe(self) -> dict[str, object]:
        """Return the settings."""
        return {
            "call": "numpy.bitwise_xor, zstandard.ZstdCompressor.compress",
            "level": self._level,
            "of": "a tensor",
        }

    def prepare(self, base: Contents) -> Contents:
        """Return the base unchanged."""
        return base

    def encode(self, new: Contents, known: Contents) -> Stored:
        """Return the stored bytes."""
        compressor = zstandard.ZstdCompressor(level=self._level)
        return [
            compressor.compress(_xor(content, known.get(name)).data)
            for name, content in new.items()
        ]

    def decode(self, stored: Stored, out: Contents, known: Contents) -> None:
        """Fill `out` with the newer state."""
        decompressor = zstandard.ZstdDecompressor()
        for (name, place), frame in zip(out.items(), stored, strict=True):
            _bytes(place)[:] = _xor(memoryview(decompressor.decompress(frame)), known.get(name))


class Blocks:
    """Blocks of a tensor by digest: only new blocks are stored, with the digests of all blocks."""

    def __init__(self, block_nbytes: int) -> None:
        self._block_nbytes = block_nbytes

    def describe(self) -> dict[str, object]:
        """Return the settings."""
        return {
            "call": "a table of blocks by their BLAKE3",
            "block_nbytes": self._block_nbytes,
            "of": "a tensor",
        }

    def prepare(self, base: Contents) -> dict[bytes, memoryview]:
        """Return the blocks of the base by digest, as in the store."""
        return {
            digest_bytes(block): block for content in base.values() for block in self._cut(content)
        }

    def encode(self, new: Contents, known: Mapping[bytes, memoryview]) -> Stored:
        """Return the stored bytes: the digests in order, then the new blocks."""
        digests: list[bytes] = []
        stored: dict[bytes, bytes] = {}
        for content in new.values():
            for block in self._cut(content):
                digest = digest_bytes(block)
                digests.append(digest)
                if digest not in known:
                    stored[digest] = bytes(block)
        return [b"".join(digests), *stored.values()]

    def decode(self, stored: Stored, out: Contents, known: Mapping[bytes, memoryview]) -> None:
        """Fill `out` with the newer state, with a lookup and a verification of each block."""
        digests, *blocks = stored
        by_digest = {**known, **{digest_bytes(block): memoryview(block) for block in blocks}}
        at = 0
        for place in out.values():
            for target in self._cut(place):
                digest = digests[at : at + DIGEST_NBYTES]
                target[:] = by_digest[digest]
                if digest in known and digest_bytes(target) != digest:
                    raise RuntimeError("a block of the base has changed")
                at += DIGEST_NBYTES

    def _cut(self, content: memoryview) -> list[memoryview]:
        return [
            content[begin:end] for begin, end in iter_blocks(content.nbytes, self._block_nbytes)
        ]


#: Every peer, by name.
CODECS: Final[dict[str, Callable[[], Codec]]] = {
    "zstd_1": lambda: Zstd(1),
    "zstd_3": lambda: Zstd(3),
    "xor_zstd_1": lambda: XorZstd(1),
    "blocks_1_mib": lambda: Blocks(1 << 20),
    "blocks_64_kib": lambda: Blocks(64 << 10),
}


def measure_codec(codec: Codec, new: Snapshot, base: Snapshot) -> Measured:
    """Store and restore a state, and compare the result.

    Raises: RuntimeError for a different result.
    """
    contents = contents_of(new)
    before = contents_of(base)
    out = {name: memoryview(bytearray(content.nbytes)) for name, content in contents.items()}
    known = codec.prepare(before)
    stored, encode_s = timed(codec.encode, contents, known)
    _, decode_s = timed(codec.decode, stored, out, known)
    if any(out[name] != content for name, content in contents.items()):
        raise RuntimeError(f"other bytes came back: {codec.describe()}")
    stored_nbytes = sum(map(len, stored))
    return Measured(
        nbytes=_nbytes(contents), stored_nbytes=stored_nbytes, encode_s=encode_s, decode_s=decode_s
    )


def timed(call: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> tuple[T, float]:
    """Return the result of a call, and the processor seconds of this thread in the call."""
    begin_s = time.thread_time()
    result = call(*arguments, **options)
    return result, time.thread_time() - begin_s


def contents_of(state: Snapshot) -> dict[str, memoryview]:
    """Return the bytes of each tensor."""
    return {name: tensor.content for name, tensor in state.items()}


def _xor(content: memoryview, base: memoryview | None) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the XOR, or the content of a tensor without a base."""
    return _bytes(content) if base is None else _bytes(content) ^ _bytes(base)


def _bytes(content: memoryview) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.frombuffer(content, np.uint8)


def _nbytes(contents: Contents) -> int:
    return sum(content.nbytes for content in contents.values())
