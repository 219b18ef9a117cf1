"""A stored piece of a tensor, and those who want something of it: what to read, whether it is right, where it goes."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ckptfmt.box import Box
from ckptfmt.digest import digest_at, digest_bytes, iter_blocks
from ckptfmt.errors import CkptError, Code, err
from ckptfmt.layout.read_plan import BlockRange, cut_range, find_blocks, find_stretch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from ckptfmt.documents.index import IndexTensor
    from ckptfmt.read.decoding import OpenPart, StoredBox
    from ckptfmt.write.snapshot import MemoryOf, TensorSink

#: Integers of the size of an element: copied as these, elements are copied by the row.
_CARRIERS: Final = {1: "u1", 2: "u2", 4: "u4", 8: "u8"}


def carrier_of(element_nbytes: int) -> np.dtype[Any]:
    """Return a numpy dtype for elements of a size, whatever they mean."""
    return np.dtype(_CARRIERS.get(element_nbytes, (np.void, element_nbytes)))


@contextlib.contextmanager
def allocating(tensor: IndexTensor) -> Iterator[None]:
    """Say by name that memory doesn't suffice for a tensor, by numpy or torch. Raises: StateError(LOAD_MEMORY)."""
    try:
        yield
    except CkptError:
        raise
    except (MemoryError, RuntimeError, ValueError) as error:  # the last beyond all addresses
        detail = f"{tensor.dtype} of shape {tensor.global_shape}: {error}"
        raise err(Code.LOAD_MEMORY, detail, where=tensor.name) from error


def iter_damages(
    blocks: BlockRange, content: memoryview, digests: bytes, block_nbytes: int, *, title: str = ""
) -> Iterator[CkptError]:
    """Yield an error for each block of a range that isn't what was saved.

    Args:
        content: of the range.
        digests: of all blocks of its piece.
        title: of the tensor, for messages.
    """
    first = blocks.piece_byte_begin // block_nbytes
    for number, (begin, end) in enumerate(iter_blocks(blocks.nbytes, block_nbytes), start=first):
        if digest_bytes(content[begin:end]) != digest_at(digests, number):
            yield err(
                Code.BLOCK_DIGEST,
                f"block {number}{title and f' of {title}'} isn't what was saved",
                where=f"{blocks.path}[{blocks.byte_begin + begin}:{blocks.byte_begin + end}]",
                requirement="REQ-OPN-006",
            )


@dataclasses.dataclass(slots=True, kw_only=True)
class StoredPiece:
    """A piece as one part stores it, and what is wanted of it.

    Attributes:
        stored: what its part says of it.
        opened: its part.
        element_nbytes: size of an element in bytes.
        wanted: who wants which elements of it; none of the boxes is empty. Complete before anything is placed.
    """

    stored: StoredBox
    opened: OpenPart
    element_nbytes: int
    wanted: list[tuple[TensorSink, Box]] = dataclasses.field(default_factory=list)
    _straight: list[tuple[int, NDArray[np.uint8]]] = dataclasses.field(default_factory=list)
    _others: list[tuple[TensorSink, Box]] = dataclasses.field(default_factory=list)

    @property
    def wanted_nbytes(self) -> int:
        """How many bytes are wanted of it; what two want counts twice."""
        return sum(box.element_count for _, box in self.wanted) * self.element_nbytes

    @property
    def box(self) -> Box:
        """Which elements it has."""
        return self.stored.box

    @property
    def block_nbytes(self) -> int:
        """Size of a block in bytes."""
        return self.opened.part.origin.block_nbytes

    def iter_blocks(self) -> Iterator[tuple[int, int]]:
        """Yield the runs of blocks that have something wanted, each ``[begin, end)``, none across two extents."""
        blocks = find_blocks(self.box, [box for _, box in self.wanted], self.element_nbytes, self.block_nbytes)
        for extent in self.stored.extents:
            for begin, end in blocks:
                first = max(begin, extent.block_begin)
                last = min(end, extent.block_begin + extent.block_count)
                if first < last:
                    yield first, last

    def check(self, blocks: BlockRange, content: memoryview) -> None:
        """Raise unless every block of a range is what was saved. Raises: IntegrityError(BLOCK_DIGEST)."""
        for error in iter_damages(blocks, content, self.stored.digests, self.block_nbytes):
            raise error

    def open_sinks(self) -> None:
        """Find out whose elements follow each other in memory as they do here. To be called before `place`."""
        for sink, box in self.wanted:
            first = find_stretch(self.box, box)
            # Asked by name: that something is a protocol takes longer to find out than to copy a small tensor.
            memory_of: MemoryOf | None = None if first is None else getattr(sink, "memory_of", None)
            memory = None if memory_of is None else memory_of(box)
            if first is None or memory is None:
                self._others.append((sink, box))
            else:
                self._straight.append((first * self.element_nbytes, memory))

    def place(self, blocks: BlockRange, content: memoryview) -> None:
        """Hand the elements of a range, which was checked, to those who want them; other threads run meanwhile."""
        begin = blocks.piece_byte_begin
        for first, memory in self._straight:
            low, high = max(begin, first), min(begin + blocks.nbytes, first + memory.nbytes)
            if low < high:
                found = np.frombuffer(content[low - begin : high - begin], np.uint8)
                np.copyto(memory[low - first : high - first], found)
        if not self._others:
            return
        for at, box in cut_range(self.box, begin, begin + blocks.nbytes, self.element_nbytes):
            for sink, wanted in self._others:
                common = box.intersect(wanted)
                if common is not None:
                    sink.copy_from(common, _cut(content[at - begin :], box, common, self.element_nbytes))


@dataclasses.dataclass(slots=True, kw_only=True)
class ArrayTarget:
    """An array to be filled with a box of a tensor, as whatever its elements are; a `MemorySink`.

    Attributes:
        array: of the shape of the box, and of the dtype that `carrier_of` gives.
    """

    field: str
    name: str
    scope: str
    dtype: str
    global_shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    array: NDArray[Any]

    def copy_from(self, box: Box, content: memoryview) -> None:
        """Take the elements of `box`."""
        index: tuple[Any, ...] = (*box.relative_to(self.boxes[0]), ...)  # the dots keep an array of rank 0 one
        target: NDArray[Any] = self.array[index]
        np.copyto(target, np.frombuffer(content, self.array.dtype).reshape(box.shape))

    def memory_of(self, box: Box) -> NDArray[np.uint8] | None:
        """Return the bytes of the elements of `box`, if they follow each other."""
        first = find_stretch(self.boxes[0], box) if self.array.flags.c_contiguous else None
        if first is None:
            return None
        flat: NDArray[np.uint8] = self.array.reshape(-1)[first : first + box.element_count].view(np.uint8)
        return flat


def _cut(content: memoryview, box: Box, wanted: Box, element_nbytes: int) -> memoryview:
    """Return the elements of `wanted` out of those of `box`, with which `content` begins: in place, if they follow."""
    first = find_stretch(box, wanted)
    if first is not None:
        begin = first * element_nbytes
        return content[begin : begin + wanted.element_count * element_nbytes]
    carrier = carrier_of(element_nbytes)
    held = np.frombuffer(content[: box.element_count * element_nbytes], carrier).reshape(box.shape)
    cut: memoryview = np.ascontiguousarray(held[wanted.relative_to(box)]).reshape(-1).view(np.uint8).data
    return cut
