"""It predicts a block from the blocks of the same number: of wider elements, these hold others."""

from __future__ import annotations

from collections.abc import Callable

from ckptfmt_conformance.adapters.reference import Reference

BREAKS = ("REQ-DEL-011",)
CONVICTED_BY = ("prediction/valid/cast-of-two-blocks",)

#: Of those that are predicted here; what is wide is the master.
_NARROW = 2


def _join_one(
    content_of: Callable[[int], memoryview], elements: range, element_nbytes: int, block_nbytes: int
) -> memoryview:
    block = content_of(elements.start * _NARROW // block_nbytes)
    nbytes = len(elements) * element_nbytes
    return memoryview(block.tobytes().ljust(nbytes, b"\0")[:nbytes])


class Broken(Reference):
    """See above."""

    replacements = (("ckptfmt.read.decoding:join_blocks", _join_one),)
