"""The content of any block, however it is stored: raw, as the base has it, or encoded. Verified at each step.

Spec: REQ-DEL-005, REQ-DEL-007, REQ-DEL-008, REQ-DEL-011, REQ-DEL-022, REQ-DEL-023.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import types
from typing import TYPE_CHECKING

import numpy as np

from ckptfmt.box import Box
from ckptfmt.codecs import encodings, prediction
from ckptfmt.digest import DIGEST_NBYTES, digest_bytes
from ckptfmt.documents.manifest import part_path
from ckptfmt.documents.tables import TensorKey
from ckptfmt.dtypes import DTYPES
from ckptfmt.errors import CkptError, Code, err

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from ckptfmt.documents.extents import Extent, Group
    from ckptfmt.documents.manifest import Reference
    from ckptfmt.documents.part import Leaf, Part, Stream
    from ckptfmt.read.reader import Checkpoint


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredBox:
    """A box as one part stores it: a row of the part's columns.

    Attributes:
        row: its number among the boxes of its part.
        key: of its tensor.
        dtype: of its tensor.
        global_shape: of its tensor.
        storage: of its tensor.
        box: which piece of the tensor.
        digests: of the content of its blocks.
        extents: where its blocks are stored; none where another part stores them.
        group: what it is predicted with; None where it is in no group.
    """

    row: int
    key: TensorKey
    dtype: str
    global_shape: tuple[int, ...]
    storage: str
    box: Box
    digests: bytes
    extents: tuple[Extent, ...]
    group: Group | None = None

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return self.box.element_count * self.element_nbytes

    @property
    def element_nbytes(self) -> int:
        """Size of an element in bytes."""
        return DTYPES[self.dtype].nbytes

    @property
    def title(self) -> str:
        """The tensor, for messages."""
        return f"{self.key[0]} {self.key[1][:100]!r}"

    def extent_of(self, block: int) -> Extent:
        """Return the extent that has a block."""
        extents = self.extents
        return extents[0] if len(extents) == 1 else extents[self._find(block)]

    def extents_of(self, first: int, last: int) -> tuple[Extent, ...]:
        """Return the extents that have something of the blocks ``[first, last)``, at least one of them."""
        return self.extents[self._find(first) : self._find(last - 1) + 1]

    def _find(self, block: int) -> int:
        """Return the number of the extent that has a block: they hold each block once, in order."""
        return bisect.bisect_right(self.extents, block, key=lambda extent: extent.block_begin) - 1

    def digests_of(self, first: int, last: int) -> bytes:
        """Return the digests of the content of blocks ``[first, last)``."""
        return self.digests[first * DIGEST_NBYTES : last * DIGEST_NBYTES]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class OpenPart:
    """A part of an opened checkpoint, whose boxes are found by name. What is asked for becomes an object, and is kept.

    Attributes:
        streams: its random-number streams, by name and scope.
        leaves: its plain values, by key.
    """

    checkpoint: Checkpoint
    part: Part
    streams: dict[tuple[str, str], Stream]
    leaves: dict[TensorKey, Leaf]
    _boxes: dict[int, StoredBox] = dataclasses.field(default_factory=dict)
    _written: dict[int, dict[Box, int]] = dataclasses.field(default_factory=dict)
    _sources: dict[tuple[int, int | None, bool], Sources] = dataclasses.field(default_factory=dict)

    def find(self, key: TensorKey, box: Box) -> StoredBox | None:
        """Return what the part stores of a tensor; None where it doesn't store this box."""
        tensor = self.part.holdings.table.numbers.get(key)
        if tensor is None:
            return None
        if tensor not in self._written:
            held = self.part.holdings
            self._written[tensor] = {held.box(row): row for row in held.boxes_of(tensor) if held.written[row]}
        row = self._written[tensor].get(box)
        return None if row is None else self.box(row)

    def box(self, row: int) -> StoredBox:
        """Return a box, given its number."""
        if row not in self._boxes:
            held = self.part.holdings
            tensor = held.owner[row]
            self._boxes[row] = StoredBox(
                row=row,
                key=held.table.keys[tensor],
                dtype=held.table.dtypes[tensor],
                global_shape=held.table.global_shapes[tensor],
                storage=held.table.storages[tensor],
                box=held.box(row),
                digests=held.digests_of(row),
                extents=held.extents.of_box(row),
                group=self._groups.get(row),
            )
        return self._boxes[row]

    def iter_boxes(self) -> Iterator[StoredBox]:
        """Yield all boxes."""
        return map(self.box, range(len(self.part.holdings.replica)))

    @functools.cached_property
    def _groups(self) -> dict[int, Group]:
        return {row: group for group in self.part.groups for row in group.boxes}

    def sources_of(self, box: StoredBox, block: int) -> Sources:
        """Return what a block of a box is decoded from, beside what is stored of it.

        Raises: as `Decoder.content`, but for what only the bytes of blocks show.
        """
        extent = box.extent_of(block)
        at = box.row, extent.reference, extent.predicted
        if at not in self._sources:
            self._sources[at] = _find_sources(self, box, block)
        return self._sources[at]

    def base_of(self, box: StoredBox, number: int | None) -> tuple[OpenPart, StoredBox]:
        """Return the same box of the same tensor in a base. Raises: FormatError(BASE_BLOCK) if it has none."""
        assert number is not None  # noqa: S101 - parsing saw to it
        return _find_base(self, box, self.part.references[number])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sources:
    """What blocks of a box are decoded from that have the same reference, and are predicted alike.

    Attributes:
        base: the box of the base; None where none is needed, or the group's prediction stands in its place.
        rule: of the group that predicts them; None where none does.
        role: of the box in the group.
        news: the members before it, with their roles.
        bases: the members of the base that are needed, with their roles.
    """

    base: tuple[OpenPart, StoredBox] | None = None
    rule: prediction.Rule | None = None
    role: str = ""
    news: tuple[tuple[str, OpenPart, StoredBox], ...] = ()
    bases: tuple[tuple[str, OpenPart, StoredBox], ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoredBlock:
    """Where the bytes of a block are that is stored: raw, or encoded.

    Attributes:
        opened, box, block: which one.
        name: of the file.
        byte_begin: of them in the file.
        nbytes: how many they are.
    """

    opened: OpenPart
    box: StoredBox
    block: int
    name: str
    byte_begin: int
    nbytes: int

    @property
    def key(self) -> tuple[int, int, int]:
        """What tells it from others, as long as its part is there."""
        return id(self.opened), self.box.row, self.block

    @property
    def where(self) -> str:
        """The place, for errors."""
        place = self.opened.checkpoint.place_of(self.name)
        return f"{place}[{self.byte_begin}:{self.byte_begin + self.nbytes}]"

    @property
    def title(self) -> str:
        """What it is, for errors."""
        return f"block {self.block} of {self.box.title}"

    def check(self, stored: memoryview) -> None:
        """Compare what is stored with its digest. Raises: IntegrityError(BLOCK_DIGEST). Spec: REQ-DEL-007."""
        extent = self.box.extent_of(self.block)
        if extent.encoding == "raw":
            digest = self.box.digests_of(self.block, self.block + 1)
            requirement, saved = "REQ-OPN-006", "what was saved"
        else:
            digest = extent.stored_digest(self.block)
            requirement, saved = "REQ-DEL-007", "stored as it was saved"
        if digest_bytes(stored) != digest:
            raise err(Code.BLOCK_DIGEST, f"{self.title} isn't {saved}", where=self.where, requirement=requirement)


def open_part(checkpoint: Checkpoint, part: Part) -> OpenPart:
    """Return a part whose rows are found by name."""
    return OpenPart(
        checkpoint=checkpoint,
        part=part,
        streams={(stream.name, stream.scope): stream for stream in part.streams},
        leaves={(leaf.field, leaf.name, leaf.scope): leaf for leaf in part.leaves},
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
        base, found = opened.base_of(box, extent.reference)
        if found.digests_of(begin, end) != box.digests_of(begin, end):
            detail = f"has other blocks among {begin} to {end - 1} in {base.checkpoint.title}"
            raise _no_base(opened, box, detail, "REQ-DEL-023")
        yield from iter_runs(base, found, begin, end)


def stored_block(opened: OpenPart, box: StoredBox, block: int) -> StoredBlock:
    """Return where a block is stored, whose encoding is any but ``same``."""
    extent = box.extent_of(block)
    assert extent.file is not None  # noqa: S101 - all but the base's blocks are in a file
    if extent.encoding == "raw":
        byte_begin = extent.byte_begin + (block - extent.block_begin) * opened.part.origin.block_nbytes
        nbytes = _block_nbytes(opened, box, block)
    else:
        byte_begin, nbytes = extent.stored_begin(block), extent.stored_nbytes(block)
    name = opened.part.files[extent.file].name
    return StoredBlock(opened=opened, box=box, block=block, name=name, byte_begin=byte_begin, nbytes=nbytes)


def iter_stored(wanted: Iterable[tuple[OpenPart, StoredBox, int]]) -> Iterator[StoredBlock]:
    """Yield all that is stored of blocks, of those that they are decoded from, and so on; each once.

    Raises: as `Decoder.content`, but for what only the bytes of blocks show.
    """
    seen: set[tuple[int, int, int]] = set()
    waiting = list(wanted)
    while waiting:
        opened, box, block = waiting.pop()
        if (id(opened), box.row, block) in seen:
            continue
        seen.add((id(opened), box.row, block))
        encoding = box.extent_of(block).encoding
        if encoding == "same":
            (run,) = iter_runs(opened, box, block, block + 1)
            waiting.append((run.opened, run.box, block))
            continue
        yield stored_block(opened, box, block)
        if encoding != "raw":
            waiting += _iter_needed(opened, box, block)


def _iter_needed(opened: OpenPart, box: StoredBox, block: int) -> Iterator[tuple[OpenPart, StoredBox, int]]:
    """Yield the blocks that a block is decoded from."""
    sources = opened.sources_of(box, block)
    if sources.base is not None:
        yield (*sources.base, block)
    elements = _elements_of(opened, box, block)
    for _, held, member in (*sources.news, *sources.bases):
        width, block_nbytes = member.element_nbytes, held.part.origin.block_nbytes
        for number in _blocks_of(elements, width, block_nbytes):
            yield held, member, number


class Decoder:
    """Decodes blocks, each once: what one of them needs of another is kept as long as this object.

    Args:
        stored: what is stored of some blocks, by `StoredBlock.key`, read and checked before.

    Attributes:
        blocks: those that it has, in the order in which they were done: of bases, too.
        read_nbytes: how many bytes it read of files itself.
        verified_nbytes: how many bytes it compared with a digest itself.
        request_count: how many ranges it read itself.
        decoded_nbytes: how many bytes of content were decoded.
    """

    def __init__(self, stored: Mapping[tuple[int, int, int], memoryview] = types.MappingProxyType({})) -> None:
        self._contents: dict[tuple[int, int, int], memoryview] = {}
        self._read_before = stored
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
        encoding = box.extent_of(block).encoding
        if encoding == "same":
            (run,) = iter_runs(opened, box, block, block + 1)
            return self.content(run.opened, run.box, block)
        place = stored_block(opened, box, block)
        stored = self._read(place)
        if encoding == "raw":
            return stored
        content = np.empty(
            _block_nbytes(opened, box, block), np.uint8
        ).data  # not cleared: it counts once its digest fits
        self._fill(place, encoding, stored, content)
        self.decoded_nbytes += content.nbytes
        self.verified_nbytes += content.nbytes
        if digest_bytes(content) != box.digests_of(block, block + 1):
            detail = f"{place.title} decodes to something else"
            raise err(Code.DECODED_DIGEST, detail, where=place.where, requirement="REQ-DEL-008")
        return content

    def _read(self, place: StoredBlock) -> memoryview:
        """Return what a block is stored as, verified."""
        known = self._read_before.get(place.key)
        if known is not None:
            return known
        checkpoint = place.opened.checkpoint
        checkpoint.check_file(place.opened.part, place.name)
        stored = memoryview(checkpoint.store.read_range(place.name, place.byte_begin, place.nbytes))
        self.read_nbytes += place.nbytes
        self.request_count += 1
        self.verified_nbytes += place.nbytes
        place.check(stored)
        return stored

    def _fill(self, place: StoredBlock, encoding: str, stored: memoryview, content: memoryview) -> None:
        """Decode a block into `content`."""
        opened, box, block = place.opened, place.box, place.block
        sources = opened.sources_of(box, block)
        if sources.rule is None:
            base = None if sources.base is None else self.content(*sources.base, block)
            encodings.decode(encoding, stored, content, dtype=box.dtype, base=base, where=place.where)
            return
        elements = _elements_of(opened, box, block)
        news = {role: self._elements(held, member, elements) for role, held, member in sources.news}
        bases = {role: self._elements(held, member, elements) for role, held, member in sources.bases}
        prediction.decode_member(
            sources.rule, sources.role, encoding, stored, content, bases=bases, news=news, where=place.where
        )

    def _elements(self, opened: OpenPart, box: StoredBox, elements: range) -> memoryview:
        """Return the bytes of some elements of a box."""
        block_nbytes = opened.part.origin.block_nbytes
        return join_blocks(lambda block: self.content(opened, box, block), elements, box.element_nbytes, block_nbytes)


def _find_sources(opened: OpenPart, box: StoredBox, block: int) -> Sources:
    extent = box.extent_of(block)
    if box.group is not None and extent.predicted:
        return _find_predicting(opened, box, box.group, block)
    if extent.reference is None:
        return Sources()
    return Sources(base=opened.base_of(box, extent.reference))


def _find_predicting(opened: OpenPart, box: StoredBox, group: Group, block: int) -> Sources:
    """Return what a block is predicted from. Raises: FormatError(ENCODED_FORM) for a rule that isn't the group's."""
    where = stored_block(opened, box, block).where
    rule = _parse_rule(group, where)
    roles = prediction.roles(rule)
    members = [opened.box(row) for row in group.boxes]
    dtypes = [member.dtype for member in members]
    if rule.kind != group.kind or [prediction.role_dtype(rule, role) for role in roles] != dtypes:
        detail = f"a group of {', '.join(dtypes)}, kind {group.kind}, with a rule of another form"
        raise err(Code.ENCODED_FORM, detail, where=where, requirement="REQ-DEL-009")
    number = group.boxes.index(box.row)
    bases = []
    if group.reference is not None:
        needed = prediction.needed_bases(rule, roles[number])
        bases = [
            (role, *opened.base_of(member, group.reference))
            for role, member in zip(roles, members, strict=True)
            if role in needed
        ]
    return Sources(
        rule=rule,
        role=roles[number],
        news=tuple((roles[at], opened, members[at]) for at in range(number)),
        bases=tuple(bases),
    )


def _parse_rule(group: Group, where: str) -> prediction.Rule:
    try:
        return _known_rule(group.rule)
    except CkptError:
        return prediction.Rule.parse(group.rule, where)  # which raises again, and says where


@functools.lru_cache(maxsize=64)
def _known_rule(content: bytes) -> prediction.Rule:
    """Return a rule: all parameters that an optimizer treats alike have the same."""
    return prediction.Rule.parse(content, "")


def _elements_of(opened: OpenPart, box: StoredBox, block: int) -> range:
    """Return the elements of a box that are in a block."""
    begin = block * opened.part.origin.block_nbytes // box.element_nbytes
    return range(begin, begin + _block_nbytes(opened, box, block) // box.element_nbytes)


def _block_nbytes(opened: OpenPart, box: StoredBox, block: int) -> int:
    block_nbytes = opened.part.origin.block_nbytes
    return min(block_nbytes, box.nbytes - block * block_nbytes)


def _find_base(opened: OpenPart, box: StoredBox, reference: Reference) -> tuple[OpenPart, StoredBox]:
    """Return the same box of the same tensor in a base. Raises: FormatError(BASE_BLOCK) if it has none."""
    checkpoint = opened.checkpoint.closure.open(reference)
    tensor = checkpoint.tensors.get(box.key)
    if (
        tensor is None
        or (tensor.dtype, tensor.global_shape) != (box.dtype, box.global_shape)
        or checkpoint.manifest.origin.block_nbytes != opened.part.origin.block_nbytes
    ):
        raise _no_base(opened, box, f"isn't in {reference.name} as dtype {box.dtype} and in this shape")
    found = tensor.sharding.part_of(box.box)
    if found is None:
        raise _no_base(opened, box, f"is cut otherwise in {reference.name}")
    base = checkpoint.open_part(found)
    stored = base.find(box.key, box.box)
    if stored is None:
        raise _no_base(opened, box, f"isn't stored by the part of {reference.name} that should have it")
    return base, stored


def join_blocks(
    content_of: Callable[[int], memoryview], elements: range, element_nbytes: int, block_nbytes: int
) -> memoryview:
    """Return the bytes of some elements of a box, given what returns its blocks by their numbers."""
    begin, end = elements.start * element_nbytes, elements.stop * element_nbytes
    blocks = _blocks_of(elements, element_nbytes, block_nbytes)
    found = [content_of(block) for block in blocks]
    whole = found[0] if len(found) == 1 else memoryview(b"".join(found))
    first = blocks.start * block_nbytes
    return whole[begin - first : end - first]


def _blocks_of(elements: range, element_nbytes: int, block_nbytes: int) -> range:
    """Return the blocks that have some elements."""
    return range(elements.start * element_nbytes // block_nbytes, -(-elements.stop * element_nbytes // block_nbytes))


def _no_base(opened: OpenPart, box: StoredBox, detail: str, requirement: str = "REQ-DEL-022") -> CkptError:
    return err(
        Code.BASE_BLOCK,
        f"box {box.box} of {box.key[1][:100]!r} {detail}",
        where=opened.checkpoint.place_of(part_path(opened.part.origin.attempt, opened.part.writer)),
        requirement=requirement,
    )
