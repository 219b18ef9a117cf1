"""Decode blocks in any form of storage: raw, taken from a base, or encoded. Each step is verified.

Spec: REQ-DEL-005, REQ-DEL-007, REQ-DEL-008, REQ-DEL-011, REQ-DEL-022, REQ-DEL-023.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Final, TypeAlias

import numpy as np

from ckptfmt.codecs import encodings, prediction
from ckptfmt.codecs.rule import Rule, role_dtype, roles
from ckptfmt.digest import digest_bytes
from ckptfmt.documents.extents import PredictionGroup
from ckptfmt.documents.manifest import part_path
from ckptfmt.errors import CkptError, Code, err
from ckptfmt.layout.read_plan import BlockRange, Request, plan_requests
from ckptfmt.read.files import CheckpointFiles, OpenPart, StoredBox
from ckptfmt.read.report import is_violation, without_frames
from ckptfmt.read.streaming import LENT_REQUEST_NBYTES, REMOTE_REQUEST_NBYTES, REQUEST_NBYTES
from ckptfmt.store.protocol import RangeReader

#: Maximum number of unneeded bytes between two ranges that are read in one request.
GAP_NBYTES: Final = 64 << 10
#: The same limit for remote stores. A connection transfers this many bytes in 5 ms, and a request
#: takes at least 20 ms. The limit is below the usual block size, so that no unneeded block of that
#: size is read.
REMOTE_GAP_NBYTES: Final = 256 << 10

#: A block: its box, and its number in the box.
Block: TypeAlias = tuple[StoredBox, int]


# --- places of blocks -----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BlockSpan:
    """Blocks ``[first, last)`` in one extent of a stored box, which may be a box of a base.

    Attributes:
        encoding: the extent's encoding; never ``same``.
    """

    stored: StoredBox
    first: int
    last: int
    encoding: str


def iter_spans(stored: StoredBox, first: int, last: int) -> Iterator[BlockSpan]:
    """Yield the places of the blocks ``[first, last)`` of a box, in order.

    Open the bases that store some of them.

    Raises: the errors of `Decoder.content` that don't depend on the bytes of blocks.
    """
    for extent in stored.extents_of(first, last):
        begin = max(first, extent.block_begin)
        end = min(last, extent.block_begin + extent.block_count)
        if extent.encoding != "same":
            yield BlockSpan(stored=stored, first=begin, last=end, encoding=extent.encoding)
            continue
        found = _find_base(stored, extent.reference)
        if found.digests_of(begin, end) != stored.digests_of(begin, end):
            detail = f"has other blocks among {begin} to {end - 1} in {found.opened.files.title}"
            raise _no_base(stored, detail, "REQ-DEL-023")
        yield from iter_spans(found, begin, end)


def _find_base(stored: StoredBox, number: int | None) -> StoredBox:
    """Return the same box of the same tensor in a base.

    Raises: FormatError(BASE_BLOCK) if the base lacks the box.
    """
    assert number is not None  # noqa: S101
    opened = stored.opened
    reference = opened.part.references[number]
    files = opened.files.closure.open(reference)
    tensor = files.tensors.get(stored.key)
    if (
        tensor is None
        or (tensor.dtype, tensor.global_shape) != (stored.dtype, stored.global_shape)
        or files.block_nbytes != stored.block_nbytes
    ):
        raise _no_base(
            stored, f"isn't in {reference.name} as dtype {stored.dtype} and in this shape"
        )
    part = tensor.sharding.part_of(stored.box)
    if part is None:
        raise _no_base(stored, f"is cut otherwise in {reference.name}")
    found = files.open_part(part).find(stored.key, stored.box)
    if found is None:
        raise _no_base(stored, f"isn't stored by the part of {reference.name} that should have it")
    return found


def _no_base(stored: StoredBox, detail: str, requirement: str = "REQ-DEL-022") -> CkptError:
    opened = stored.opened
    return err(
        Code.BASE_BLOCK,
        f"box {stored.box} of {stored.key[1][:100]!r} {detail}",
        where=opened.files.place_of(part_path(opened.part.origin.attempt, opened.part.writer)),
        requirement=requirement,
    )


# --- sources of decoding --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Sources:
    """The sources for decoding the blocks of a box with the same reference and prediction.

    Attributes:
        base: the box in the base; None if no base is needed, or if the blocks are predicted.
        rule: the rule of the prediction group; None if the blocks aren't predicted.
        role: the box's role in the group.
        news: the earlier members of the group, with their roles.
        bases: the needed members in the base, with their roles.
    """

    base: StoredBox | None = None
    rule: Rule | None = None
    role: str = ""
    news: tuple[tuple[str, StoredBox], ...] = ()
    bases: tuple[tuple[str, StoredBox], ...] = ()


def _find_sources(stored: StoredBox, block: int) -> _Sources:
    """Return the sources for decoding a block, in addition to the block's own stored bytes.

    Raises: the errors of `Decoder.content` that don't depend on the bytes of blocks.
    """
    extent = stored.extent_of(block)
    if stored.group is not None and extent.predicted:
        return _find_predicting(stored, stored.group, block)
    if extent.reference is None:
        return _Sources()
    return _Sources(base=_find_base(stored, extent.reference))


def _find_predicting(stored: StoredBox, group: PredictionGroup, block: int) -> _Sources:
    """Return the sources for predicting a block.

    Raises: FormatError(ENCODED_FORM) for a rule that doesn't match the group.
    """
    where = stored.place_of(block)
    rule = _parse_rule(group, where)
    ordered = roles(rule)
    members = [stored.opened.box(row) for row in group.boxes]
    dtypes = [member.dtype for member in members]
    if rule.kind != group.kind or [role_dtype(rule, role) for role in ordered] != dtypes:
        detail = f"a group of {', '.join(dtypes)}, kind {group.kind}, with a rule of another form"
        raise err(Code.ENCODED_FORM, detail, where=where, requirement="REQ-DEL-009")
    number = group.boxes.index(stored.row)
    bases: list[tuple[str, StoredBox]] = []
    if group.reference is not None:
        needed = prediction.needed_bases(rule, ordered[number])
        bases = [
            (role, _find_base(member, group.reference))
            for role, member in zip(ordered, members, strict=True)
            if role in needed
        ]
    return _Sources(
        rule=rule,
        role=ordered[number],
        news=tuple((ordered[at], members[at]) for at in range(number)),
        bases=tuple(bases),
    )


def _parse_rule(group: PredictionGroup, where: str) -> Rule:
    try:
        return _known_rule(group.rule)
    except CkptError:
        return Rule.parse(group.rule, where)  # raises the same error with its place


@functools.lru_cache(maxsize=64)
def _known_rule(content: bytes) -> Rule:
    """Return a parsed rule. All parameters with the same optimizer options share one rule."""
    return Rule.parse(content, "")


def _elements_of(stored: StoredBox, block: int) -> range:
    """Return the elements of a box in a block, as numbers within the box."""
    begin = block * stored.block_nbytes // stored.element_nbytes
    return range(begin, begin + stored.content_nbytes(block) // stored.element_nbytes)


def _blocks_of(elements: range, element_nbytes: int, block_nbytes: int) -> range:
    """Return the numbers of the blocks that contain the elements."""
    return range(
        elements.start * element_nbytes // block_nbytes,
        -(-elements.stop * element_nbytes // block_nbytes),
    )


def join_blocks(
    content_of: Callable[[int], memoryview], elements: range, element_nbytes: int, block_nbytes: int
) -> memoryview:
    """Return the bytes of some elements of a box.

    Args:
        content_of: returns a block's content by number.
        elements: numbers of the elements within the box.
    """
    begin = elements.start * element_nbytes
    end = elements.stop * element_nbytes
    blocks = _blocks_of(elements, element_nbytes, block_nbytes)
    found = [content_of(block) for block in blocks]
    whole = found[0] if len(found) == 1 else memoryview(b"".join(found))
    first = blocks.start * block_nbytes
    return whole[begin - first : end - first]


# --- reading --------------------------------------------------------------------------------------


@dataclasses.dataclass(slots=True, kw_only=True)
class Fetched:
    """The verified stored bytes of some blocks, and of all blocks needed to decode them.

    Attributes:
        stored: for each block, its stored bytes, or the error that makes them unusable.
        nbytes: total size in bytes of the stored blocks.
        read_nbytes: number of bytes read, gaps included.
        request_count: number of range reads.
    """

    stored: dict[Block, memoryview | CkptError] = dataclasses.field(default_factory=dict)
    nbytes: int = 0
    read_nbytes: int = 0
    request_count: int = 0


class Library:
    """The files and blocks of a checkpoint and of its bases, each file under a unique path.

    The path of the checkpoint's own file is the file's name. The path of a base's file has the
    base's name as a prefix. Threads may share a library.
    """

    def __init__(self, files: CheckpointFiles) -> None:
        self.files = files
        self._opened: dict[str, tuple[OpenPart, str]] = {}
        self._sources: dict[tuple[StoredBox, int | None, bool], _Sources] = {}

    def range_of(self, stored: StoredBox, first: int, last: int, box: int) -> BlockRange:
        """Return the byte range of the stored blocks ``[first, last)`` of one extent.

        See `StoredBox.span_of`.

        Args:
            box: a number chosen by the caller, which identifies the box in the returned range.
        """
        name, byte_begin, nbytes = stored.span_of(first, last)
        return BlockRange(
            self._path_of(stored.opened, name), byte_begin, nbytes, box, first * stored.block_nbytes
        )

    def _path_of(self, opened: OpenPart, name: str) -> str:
        path = name
        if opened.files is not self.files:
            path = f"{opened.files.title}/{name}"
            known = self._opened.get(path)
            if known is not None and known[0].files is not opened.files:
                path = f"{opened.files.digest}/{name}"
        self._opened[path] = opened, name
        return path

    def plan_requests(
        self, ranges: Iterable[BlockRange], *, is_lent: bool = False
    ) -> tuple[Request, ...]:
        """Return the requests that read the ranges.

        Args:
            is_lent: whether a device copies from the buffers.
        """
        local_nbytes = LENT_REQUEST_NBYTES if is_lent else REQUEST_NBYTES
        return plan_requests(
            ranges,
            block_nbytes=self.files.block_nbytes,
            request_nbytes=REMOTE_REQUEST_NBYTES if self.is_remote else local_nbytes,
            gap_nbytes=REMOTE_GAP_NBYTES if self.is_remote else GAP_NBYTES,
        )

    def check(self, path: str) -> None:
        """Compare the size and the header of a file with its part, once.

        Raises: IntegrityError. Spec: REQ-OPN-011.
        """
        opened, name = self._opened[path]
        opened.files.check_file(opened.part, name)

    def open_ranges(self, path: str) -> AbstractContextManager[RangeReader]:
        """Open a file for range reads; see `Store.open_ranges`."""
        opened, name = self._opened[path]
        return opened.files.store.open_ranges(name)

    @property
    def is_remote(self) -> bool:
        """Whether the checkpoint's own files are in a remote store."""
        return self.files.store.is_remote

    def waits(self, path: str) -> bool:
        """Return whether reads of a file wait; see `Store.waits`."""
        opened, name = self._opened[path]
        return opened.files.store.waits(name)

    def sources_of(self, stored: StoredBox, block: int) -> _Sources:
        """Return the sources for decoding a block; see `_find_sources`.

        Raises: as `_find_sources`.
        """
        extent = stored.extent_of(block)
        at = stored, extent.reference, extent.predicted
        if at not in self._sources:
            self._sources[at] = _find_sources(stored, block)
        return self._sources[at]

    def fetch(self, wanted: Iterable[Block]) -> Fetched:
        """Read and verify the stored bytes of blocks, and of all blocks needed to decode them.

        Raises: StoreError. An error of a single block is raised later, when that block is decoded.
        """
        found = Fetched()
        blocks = list(self._iter_stored(wanted))
        ranges = []
        for number, (stored, block) in enumerate(blocks):
            blocks_range = self.range_of(stored, block, block + 1, number)
            try:
                self.check(blocks_range.path)
            except CkptError as error:
                found.stored[stored, block] = _kept(error)
                continue
            ranges.append(blocks_range)
            found.nbytes += blocks_range.nbytes
        for request in self.plan_requests(ranges):
            opened, name = self._opened[request.path]
            content = memoryview(
                opened.files.store.read_range(name, request.byte_begin, request.nbytes)
            )
            found.read_nbytes += request.nbytes
            found.request_count += 1
            for one in request.ranges:
                at = one.byte_begin - request.byte_begin
                stored, block = blocks[one.box]
                bytes_of_block = content[at : at + one.nbytes]
                damage = next(stored.iter_damages(one, bytes_of_block), None)
                found.stored[stored, block] = bytes_of_block if damage is None else damage
        return found

    def _iter_stored(self, wanted: Iterable[Block]) -> Iterator[Block]:
        """Yield each stored block needed to decode the wanted blocks, once.

        The needed blocks include the sources of sources, over any number of steps.
        """
        seen: set[Block] = set()
        waiting = list(wanted)
        while waiting:
            stored, block = waiting.pop()
            if (stored, block) in seen:
                continue
            seen.add((stored, block))
            encoding = stored.extent_of(block).encoding
            try:
                if encoding == "same":
                    (span,) = iter_spans(stored, block, block + 1)
                    waiting.append((span.stored, block))
                    continue
                yield stored, block
                if encoding != "raw":
                    waiting += self._iter_needed(stored, block)
            except CkptError as error:
                _kept(error)  # decoding the block raises the same error

    def _iter_needed(self, stored: StoredBox, block: int) -> Iterator[Block]:
        """Yield the blocks from which a block is decoded."""
        sources = self.sources_of(stored, block)
        if sources.base is not None:
            yield sources.base, block
        elements = _elements_of(stored, block)
        for _, member in (*sources.news, *sources.bases):
            for number in _blocks_of(elements, member.element_nbytes, member.block_nbytes):
                yield member, number

    def read_blocks(
        self, stored: StoredBox, blocks: Iterable[int]
    ) -> tuple[list[memoryview], Fetched]:
        """Return the contents of some blocks of a box, and the record of the reads.

        Raises: as `Decoder.content`.
        """
        blocks = list(blocks)
        fetched = self.fetch((stored, block) for block in blocks)
        decoder = Decoder(self, fetched)
        return [decoder.content(stored, block) for block in blocks], fetched


def _kept(error: CkptError) -> CkptError:
    """Return an error that describes a damaged block, for later.

    Raises: any other error, such as a store error.
    """
    if not is_violation(error):
        raise error
    return without_frames(error)


class Decoder:
    """A decoder that decodes each block once, and keeps the contents for dependent blocks.

    Args:
        fetched: the stored bytes of the blocks, and of all blocks needed to decode them.

    Attributes:
        contents: the decoded blocks with their contents, in the order of decoding, blocks of bases
            included.
        decoded_nbytes: size in bytes of the contents decoded and compared with a digest.
    """

    def __init__(self, library: Library, fetched: Fetched) -> None:
        self._library = library
        self._fetched = fetched
        self.contents: dict[Block, memoryview] = {}
        self.decoded_nbytes = 0

    def content(self, stored: StoredBox, block: int) -> memoryview:
        """Return the content of a block, as saved.

        Raises: IntegrityError(BLOCK_DIGEST, BASE_MISSING, BASE_MISMATCH, ...);
            FormatError(ENCODED_FORM, DECODED_DIGEST, BASE_BLOCK, REFERENCE_CLOSURE);
            StateError(FLOAT_ENVIRONMENT).
        """
        if (stored, block) not in self.contents:
            self.contents[stored, block] = self._decode(stored, block)
        return self.contents[stored, block]

    def _decode(self, stored: StoredBox, block: int) -> memoryview:
        encoding = stored.extent_of(block).encoding
        if encoding == "same":
            (span,) = iter_spans(stored, block, block + 1)
            return self.content(span.stored, block)
        found = self._fetched.stored[stored, block]
        if isinstance(found, CkptError):
            raise found
        if encoding == "raw":
            return found
        content = np.empty(stored.content_nbytes(block), np.uint8).data  # filled by decoding
        self._fill(stored, block, encoding, found, content)
        self.decoded_nbytes += content.nbytes
        if digest_bytes(content) != stored.digests_of(block, block + 1):
            detail = f"{stored.title_of(block)} decodes to something else"
            raise err(
                Code.DECODED_DIGEST, detail, where=stored.place_of(block), requirement="REQ-DEL-008"
            )
        return content

    def _fill(
        self, stored: StoredBox, block: int, encoding: str, found: memoryview, content: memoryview
    ) -> None:
        """Decode the stored bytes of a block into `content`."""
        sources = self._library.sources_of(stored, block)
        where = stored.place_of(block)
        if sources.rule is None:
            base = None if sources.base is None else self.content(sources.base, block)
            encodings.decode(encoding, found, content, dtype=stored.dtype, base=base, where=where)
            return
        elements = _elements_of(stored, block)
        news = {role: self._elements(member, elements) for role, member in sources.news}
        bases = {role: self._elements(member, elements) for role, member in sources.bases}
        prediction.decode_member(
            sources.rule,
            sources.role,
            encoding,
            found,
            content,
            bases=bases,
            news=news,
            where=where,
        )

    def _elements(self, stored: StoredBox, elements: range) -> memoryview:
        """Return the bytes of some elements of a box."""
        return join_blocks(
            lambda block: self.content(stored, block),
            elements,
            stored.element_nbytes,
            stored.block_nbytes,
        )
