"""The content of any block, however it is stored: raw, as the base has it, or encoded. Verified at each step.

Spec: REQ-DEL-005, REQ-DEL-007, REQ-DEL-008, REQ-DEL-011, REQ-DEL-022, REQ-DEL-023.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from typing import TYPE_CHECKING, Final

from ckptfmt.arithmetic import encodings, prediction
from ckptfmt.box import Box
from ckptfmt.digest import DIGEST_NBYTES, digest_bytes
from ckptfmt.documents.manifest import part_path
from ckptfmt.documents.tables import TensorKey
from ckptfmt.dtypes import DTYPES
from ckptfmt.errors import CkptError, Code, err

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ckptfmt.documents.deltas import Group
    from ckptfmt.documents.manifest import Reference
    from ckptfmt.documents.part import Extent, Leaf, Part, PartBox, PartTensor, Stream
    from ckptfmt.engines.reader import Checkpoint

__all__ = ["Decoder", "OpenPart", "Run", "StoredBox", "iter_runs", "join_blocks", "open_part"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoredBox:
    """A box as one part stores it.

    Attributes:
        row: its number among the boxes of its part.
        tensor: whose it is.
        held: where it is stored.
        group: what it is predicted with; None where it is in no group.
    """

    row: int
    tensor: PartTensor
    held: PartBox
    group: Group | None = None

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return self.tensor.box_nbytes(self.held.box)

    @property
    def element_nbytes(self) -> int:
        """Size of an element in bytes."""
        return DTYPES[self.tensor.dtype].nbytes

    def extent_of(self, block: int) -> Extent:
        """Return the extent that has a block."""
        return self.held.extents[self._find(block)]

    def extents_of(self, first: int, last: int) -> tuple[Extent, ...]:
        """Return the extents that have something of the blocks ``[first, last)``, at least one of them."""
        return self.held.extents[self._find(first) : self._find(last - 1) + 1]

    def _find(self, block: int) -> int:
        """Return the number of the extent that has a block: they hold each block once, in order."""
        return bisect.bisect_right(self.held.extents, block, key=lambda extent: extent.block_begin) - 1

    def digests_of(self, first: int, last: int) -> bytes:
        """Return the digests of the content of blocks ``[first, last)``."""
        return self.held.digests[first * DIGEST_NBYTES : last * DIGEST_NBYTES]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OpenPart:
    """A part of an opened checkpoint, with its rows by name: what it wrote of each tensor, by box.

    Attributes:
        boxes: all boxes of the part, by row.
    """

    checkpoint: Checkpoint
    part: Part
    tensors: dict[TensorKey, tuple[PartTensor, dict[Box, StoredBox]]]
    streams: dict[tuple[str, str], Stream]
    leaves: dict[TensorKey, Leaf]
    boxes: tuple[StoredBox, ...]
    _ends: dict[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)

    def begin_of(self, extent: Extent, number: int) -> int:
        """Return where the stored bytes of an encoded block begin in their file, given its number in the extent."""
        if id(extent) not in self._ends:
            self._ends[id(extent)] = tuple(itertools.accumulate(extent.stored_nbytes))
        return extent.byte_begin + (self._ends[id(extent)][number - 1] if number else 0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """What a block is stored as, and where."""

    stored: memoryview
    extent: Extent
    where: str


def open_part(checkpoint: Checkpoint, part: Part) -> OpenPart:
    """Return a part with its rows by name."""
    groups = {row: group for group in part.groups for row in group.boxes}
    rows = [(tensor, held) for tensor in part.tensors for held in tensor.boxes]
    boxes = tuple(
        StoredBox(row=row, tensor=tensor, held=held, group=groups.get(row)) for row, (tensor, held) in enumerate(rows)
    )
    tensors: dict[TensorKey, tuple[PartTensor, dict[Box, StoredBox]]] = {
        tensor.key: (tensor, {}) for tensor in part.tensors
    }
    for box in boxes:
        if box.held.extents:
            tensors[box.tensor.key][1][box.held.box] = box
    return OpenPart(
        checkpoint=checkpoint,
        part=part,
        tensors=tensors,
        streams={(stream.name, stream.scope): stream for stream in part.streams},
        leaves={(leaf.field, leaf.name, leaf.scope): leaf for leaf in part.leaves},
        boxes=boxes,
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Blocks ``[first, last)`` of a box that lie in one extent of whoever has them: a part, or that of a base.

    Attributes:
        opened, box: who has them.
        extent: where; its encoding is any but ``same``.
    """

    first: int
    last: int
    opened: OpenPart
    box: StoredBox
    extent: Extent


def iter_runs(opened: OpenPart, box: StoredBox, first: int, last: int) -> Iterator[Run]:
    """Yield who has the blocks ``[first, last)`` of a box, in order. Bases are opened for it, where they have some.

    Raises: as `Decoder.content`, but for what only the bytes of blocks show.
    """
    for extent in box.extents_of(first, last):
        begin, end = max(first, extent.block_begin), min(last, extent.block_begin + extent.block_count)
        if extent.encoding != "same":
            yield Run(first=begin, last=end, opened=opened, box=box, extent=extent)
            continue
        base, found = _find_base(opened, box, _reference_of(opened, extent.reference))
        if found.digests_of(begin, end) != box.digests_of(begin, end):
            detail = f"has other blocks among {begin} to {end - 1} in {base.checkpoint.title}"
            raise _no_base(opened, box, detail, "REQ-DEL-023")
        yield from iter_runs(base, found, begin, end)


#: What is wrong where bytes don't have their digest: code and clause.
_RAW: Final = (Code.BLOCK_DIGEST, "REQ-OPN-006")
_STORED: Final = (Code.BLOCK_DIGEST, "REQ-DEL-007")
_DECODED: Final = (Code.DECODED_DIGEST, "REQ-DEL-008")


class Decoder:
    """Decodes blocks, each once: what one of them needs of another is kept as long as this object.

    Attributes:
        blocks: those that it has, in the order in which they were done: of bases, too.
        read_nbytes: how many bytes were read of files.
        verified_nbytes: how many bytes were compared with a digest.
        request_count: how many ranges were read.
        decoded_nbytes: how many bytes of content were decoded.
    """

    def __init__(self) -> None:
        self._contents: dict[tuple[int, int, int], memoryview] = {}
        self.blocks: list[tuple[OpenPart, StoredBox, int]] = []
        self.read_nbytes = self.verified_nbytes = self.request_count = self.decoded_nbytes = 0

    def content(self, opened: OpenPart, box: StoredBox, block: int) -> memoryview:
        """Return the content of a block, which is what was saved.

        Raises: IntegrityError(BLOCK_DIGEST, BASE_MISSING, BASE_MISMATCH, ...); FormatError(ENCODED_FORM,
            DECODED_DIGEST, BASE_BLOCK, REFERENCE_CLOSURE); StateError(FLOAT_ENVIRONMENT).
        """
        at = (id(opened), box.row, block)
        if at not in self._contents:
            self._contents[at] = self._decode(opened, box, block)
            self.blocks.append((opened, box, block))
        return self._contents[at]

    def _decode(self, opened: OpenPart, box: StoredBox, block: int) -> memoryview:
        extent = box.extent_of(block)
        if extent.encoding == "same":
            (run,) = iter_runs(opened, box, block, block + 1)
            return self.content(run.opened, run.box, block)
        found = self._read(opened, box, extent, block)
        title = f"block {block} of {box.tensor.field} {box.tensor.name[:100]!r}"
        if extent.encoding == "raw":
            self._check(found.stored, box.digests_of(block, block + 1), found, _RAW, f"{title} isn't what was saved")
            return found.stored
        number = block - extent.block_begin
        digest = extent.stored_digests[number * DIGEST_NBYTES : (number + 1) * DIGEST_NBYTES]
        self._check(found.stored, digest, found, _STORED, f"{title} isn't stored as it was saved")
        content = memoryview(bytearray(self._block_nbytes(opened, box, block)))
        self._fill(opened, box, block, found=found, content=content)
        self.decoded_nbytes += content.nbytes
        self._check(content, box.digests_of(block, block + 1), found, _DECODED, f"{title} decodes to something else")
        return content

    def _fill(self, opened: OpenPart, box: StoredBox, block: int, *, found: _Found, content: memoryview) -> None:
        """Decode a block into `content`."""
        extent = found.extent
        if box.group is not None and extent.predicted:
            begin = block * opened.part.origin.block_nbytes // box.element_nbytes
            elements = range(begin, begin + content.nbytes // box.element_nbytes)
            self._fill_predicted(opened, box, box.group, elements, found=found, content=content)
            return
        base = None
        if extent.reference is not None:
            base = self.content(*_find_base(opened, box, _reference_of(opened, extent.reference)), block)
        encodings.decode(extent.encoding, found.stored, content, dtype=box.tensor.dtype, base=base, where=found.where)

    def _fill_predicted(
        self, opened: OpenPart, box: StoredBox, group: Group, elements: range, *, found: _Found, content: memoryview
    ) -> None:
        """Decode a block against what its group predicts."""
        rule = prediction.Rule.parse(group.rule, found.where)
        roles = prediction.roles(rule)
        members = [opened.boxes[row] for row in group.boxes]
        dtypes = [member.tensor.dtype for member in members]
        if rule.kind != group.kind or [prediction.role_dtype(rule, role) for role in roles] != dtypes:
            detail = f"a group of {', '.join(dtypes)}, kind {group.kind}, with a rule of another form"
            raise err(Code.ENCODED_FORM, detail, where=found.where, requirement="REQ-DEL-009")
        number = group.boxes.index(box.row)
        news = {roles[at]: self._elements(opened, members[at], elements) for at in range(number)}
        bases = {}
        if group.reference is not None:
            reference = _reference_of(opened, group.reference)
            needed = prediction.needed_bases(rule, roles[number])
            for role, member in ((role, member) for role, member in zip(roles, members, strict=True) if role in needed):
                bases[role] = self._elements(*_find_base(opened, member, reference), elements)
        prediction.decode_member(
            rule, roles[number], found.extent.encoding, found.stored, content, bases=bases, news=news, where=found.where
        )

    def _elements(self, opened: OpenPart, box: StoredBox, elements: range) -> memoryview:
        """Return the bytes of some elements of a box."""
        block_nbytes = opened.part.origin.block_nbytes
        return join_blocks(lambda block: self.content(opened, box, block), elements, box.element_nbytes, block_nbytes)

    def _read(self, opened: OpenPart, box: StoredBox, extent: Extent, block: int) -> _Found:
        """Return what a block is stored as, not yet verified."""
        assert extent.file is not None  # noqa: S101 - all but the base's blocks are in a file
        file = opened.part.files[extent.file]
        opened.checkpoint.check_file(opened.part, file.name)
        number = block - extent.block_begin
        if extent.encoding == "raw":
            begin = extent.byte_begin + number * opened.part.origin.block_nbytes
            nbytes = self._block_nbytes(opened, box, block)
        else:
            begin = opened.begin_of(extent, number)
            nbytes = extent.stored_nbytes[number]
        self.read_nbytes += nbytes
        self.request_count += 1
        where = f"{opened.checkpoint.place_of(file.name)}[{begin}:{begin + nbytes}]"
        stored = memoryview(opened.checkpoint.store.read_range(file.name, begin, nbytes))
        return _Found(stored=stored, extent=extent, where=where)

    def _block_nbytes(self, opened: OpenPart, box: StoredBox, block: int) -> int:
        block_nbytes = opened.part.origin.block_nbytes
        return min(block_nbytes, box.nbytes - block * block_nbytes)

    def _check(self, content: memoryview, digest: bytes, found: _Found, broken: tuple[Code, str], detail: str) -> None:
        self.verified_nbytes += content.nbytes
        if digest_bytes(content) != digest:
            code, requirement = broken
            raise err(code, detail, where=found.where, requirement=requirement)


def _find_base(opened: OpenPart, box: StoredBox, reference: Reference) -> tuple[OpenPart, StoredBox]:
    """Return the same box of the same tensor in a base. Raises: FormatError(BASE_BLOCK) if it has none."""
    checkpoint = opened.checkpoint.closure.open(reference)
    tensor = checkpoint.tensors.get(box.tensor.key)
    if (
        tensor is None
        or (tensor.dtype, tensor.global_shape) != (box.tensor.dtype, box.tensor.global_shape)
        or checkpoint.manifest.origin.block_nbytes != opened.part.origin.block_nbytes
    ):
        raise _no_base(opened, box, f"isn't in {reference.name} as dtype {box.tensor.dtype} and in this shape")
    found = next((part for held, part in tensor.sharding.find(box.held.box) if held == box.held.box), None)
    if found is None:
        raise _no_base(opened, box, f"is cut otherwise in {reference.name}")
    base = checkpoint.open_part(found)
    stored = base.tensors.get(tensor.key, (None, {}))[1].get(box.held.box)
    if stored is None:
        raise _no_base(opened, box, f"isn't stored by the part of {reference.name} that should have it")
    return base, stored


def join_blocks(
    content_of: Callable[[int], memoryview], elements: range, element_nbytes: int, block_nbytes: int
) -> memoryview:
    """Return the bytes of some elements of a box, given what returns its blocks by their numbers."""
    begin, end = elements.start * element_nbytes, elements.stop * element_nbytes
    blocks = range(begin // block_nbytes, -(-end // block_nbytes))
    found = [content_of(block) for block in blocks]
    whole = found[0] if len(found) == 1 else memoryview(b"".join(found))
    first = blocks.start * block_nbytes
    return whole[begin - first : end - first]


def _reference_of(opened: OpenPart, number: int | None) -> Reference:
    assert number is not None  # noqa: S101 - parsing saw to it
    return opened.part.references[number]


def _no_base(opened: OpenPart, box: StoredBox, detail: str, requirement: str = "REQ-DEL-022") -> CkptError:
    return err(
        Code.BASE_BLOCK,
        f"box {box.held.box} of {box.tensor.name[:100]!r} {detail}",
        where=opened.checkpoint.place_of(part_path(opened.part.origin.attempt, opened.part.writer)),
        requirement=requirement,
    )
