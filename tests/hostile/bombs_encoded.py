"""Checkpoints of less than a megabyte whose blocks are as long as may be once they are decoded: builders, by name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Final

import zstandard

from ckptfmt import limits
from ckptfmt.box import Box
from ckptfmt.codecs.strings import FILL, FRAME, dump_number
from ckptfmt.commit.decision import commit
from ckptfmt.digest import digest_bytes
from ckptfmt.documents.manifest import FIELDS
from ckptfmt.documents.part import PACK_HEADER, Part, PartFile
from ckptfmt.store.memory import MemoryStore
from ckptfmt.write.writer import write_part_file
from tests.builders import ATTEMPT, origin
from tests.part_rows import RowBox, RowExtent, RowTensor, holdings_of

_BLOCK: Final = limits.BLOCK_NBYTES_MAX


@functools.cache
def _digest_of_zeros() -> bytes:
    return digest_bytes(bytes(_BLOCK))


def _checkpoint(stored: bytes, count: int) -> dict[str, bytes]:
    """Return a checkpoint of one tensor of zeros, each block of which is stored alike."""
    made = origin(block_nbytes=_BLOCK)
    name = f"weights-{ATTEMPT}-00000.pack"
    extent = RowExtent(
        block_begin=0,
        block_count=count,
        file=0,
        byte_begin=len(PACK_HEADER),
        key="w",
        encoding="planes",
        stored_nbytes=(len(stored),) * count,
        stored_digests=digest_bytes(stored) * count,
    )
    held = RowBox(
        box=Box.whole((count * _BLOCK,)),
        replica=False,
        digests=_digest_of_zeros() * count,
        extents=(extent,),
    )
    part = Part(
        origin=made,
        writer=0,
        saved_unix_s=0,
        files=(
            PartFile(
                name=name,
                kind="pack",
                nbytes=len(PACK_HEADER) + len(stored) * count,
                header_nbytes=len(PACK_HEADER),
                header_digest=digest_bytes(PACK_HEADER),
            ),
        ),
        holdings=holdings_of(
            [
                RowTensor(
                    field="weights",
                    name="w",
                    scope="global",
                    dtype="uint8",
                    global_shape=(count * _BLOCK,),
                    storage="persistent",
                    aliases=(),
                    boxes=(held,),
                ),
            ]
        ),
        streams=(),
        leaves=(),
        absent=dict.fromkeys(set(FIELDS) - {"weights"}, "none"),
    )
    store = MemoryStore()
    store.create(name, [PACK_HEADER + stored * count])
    write_part_file(store, part)
    commit(store, made, deadline_s=1)
    return store.snapshot()


def constant(count: int) -> dict[str, bytes]:
    """Return a checkpoint of blocks of which one byte is stored, repeated."""
    return _checkpoint(bytes((FILL, 0)), count)


def _string(frame: bytes) -> bytes:
    return bytes((FRAME,)) + dump_number(len(frame)) + frame


def _frame(nbytes: int, **options: int) -> bytes:
    parameters = zstandard.ZstdCompressionParameters.from_level(19, source_size=nbytes, **options)
    return zstandard.ZstdCompressor(compression_params=parameters).compress(bytes(nbytes))


def _frames(count: int) -> dict[str, bytes]:
    """Blocks that are frames: sound ones of zeros."""
    return _checkpoint(_string(_frame(_BLOCK)), count)


def _beyond(count: int) -> dict[str, bytes]:
    """Frames that hold sixteen times as much as a block, and say so."""
    return _checkpoint(_string(_frame(16 * _BLOCK)), count)


def _lying(count: int) -> dict[str, bytes]:
    """Frames that say that they hold a block, and hold sixteen times as much."""
    frame = bytearray(_frame(16 * _BLOCK))
    said = zstandard.get_frame_parameters(bytes(frame)).content_size
    at = frame.index(said.to_bytes(4, "little"))
    frame[at : at + 4] = _BLOCK.to_bytes(4, "little")
    return _checkpoint(_string(bytes(frame)), count)


def _endless(count: int) -> dict[str, bytes]:
    """Frames that say that they hold 2^62 bytes."""
    head = b"\x28\xb5\x2f\xfd\xe0" + (1 << 62).to_bytes(8, "little")
    return _checkpoint(_string(head + b"\x03\0\0\0"), count)


def _many(count: int) -> dict[str, bytes]:
    """A block of a hundred thousand frames, one behind the other."""
    return _checkpoint(_string(_frame(64) * 10_000), count)


ENCODED_BOMBS: Final[dict[str, Callable[[], dict[str, bytes]]]] = {
    "constant blocks": lambda: constant(8),
    "frames of zeros": lambda: _frames(8),
    "frames of more than a block": lambda: _beyond(8),
    "frames of more than they say": lambda: _lying(8),
    "frames of 2^62 bytes": lambda: _endless(1000),
    "frames one behind the other": lambda: _many(1),
}
