"""Check blocks: raw ones by the file, encoded ones decoded together with what they need of each other.

Spec: REQ-OPN-006, REQ-OPN-009, REQ-DEL-005, REQ-DEL-007, REQ-DEL-008, REQ-DEL-022.
"""

from __future__ import annotations

import dataclasses
import threading
from typing import TYPE_CHECKING, TypeAlias

from ckptfmt.digest import digest_bytes
from ckptfmt.errors import CkptError, Code, err
from ckptfmt.layout.read_plan import BlockRange, plan_requests
from ckptfmt.read.ahead import iter_ahead
from ckptfmt.read.closure import Library
from ckptfmt.read.decoding import Decoder, iter_runs
from ckptfmt.read.reading import unit_of
from ckptfmt.read.report import is_violation, without_frames
from ckptfmt.read.stored import iter_damages
from ckptfmt.read.streaming import REQUEST_NBYTES, stream_requests

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from ckptfmt.documents.extents import Extent
    from ckptfmt.layout.read_plan import Request
    from ckptfmt.read.decoding import OpenPart, Run, StoredBox

#: The encoded blocks that were decoded already: by manifest digest, number of the part and of the box.
Done: TypeAlias = "dict[tuple[str, int, int], set[int]]"
#: Blocks that are decoded together: whose they are, and the number of each.
_Unit: TypeAlias = "list[tuple[Run, int]]"


# --- a file -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Expected:
    """What a range of a file should be: raw blocks, or, with a digest, what one encoded block is stored as."""

    box: StoredBox
    block: int
    stored_digest: bytes = b""


def sort_extents(opened: OpenPart) -> list[list[tuple[StoredBox, Extent]]]:
    """Return the extents that each file of a part has, by the number of the file; all boxes are gone through once."""
    found: list[list[tuple[StoredBox, Extent]]] = [[] for _ in opened.part.files]
    for box in opened.iter_boxes():
        for extent in box.extents:
            if extent.file is not None:
                found[extent.file].append((box, extent))
    return found


def find_damages(
    opened: OpenPart,
    number: int,
    extents: Sequence[tuple[StoredBox, Extent]],
    count: Callable[[int], None],
    *,
    with_stored: bool = False,
) -> list[CkptError]:
    """Return an error for every block of a file that isn't what was saved, in the order of the file.

    Args:
        number: of the file in the part.
        extents: those that the file has.
        count: is told how many bytes were checked.
        with_stored: whether encoded blocks are compared with the digests of what they are stored as; else they are
            left to `find_undecodable`.

    Raises: StoreError.
    """
    name, block_nbytes = opened.part.files[number].name, opened.part.origin.block_nbytes
    expected: list[_Expected] = []
    ranges: list[BlockRange] = []
    for begin, nbytes, row in _iter_expected(opened, extents, with_stored=with_stored):
        ranges.append(BlockRange(name, begin, nbytes, len(expected), row.block * block_nbytes))
        expected.append(row)
    requests = plan_requests(ranges, block_nbytes=block_nbytes, request_nbytes=REQUEST_NBYTES, gap_nbytes=0)
    found: list[tuple[int, CkptError]] = []
    lock = threading.Lock()

    def take(request: Request, content: memoryview) -> None:
        for blocks in request.ranges:
            at = blocks.byte_begin - request.byte_begin
            damages = list(_iter_wrong(expected[blocks.piece], blocks, content[at : at + blocks.nbytes], block_nbytes))
            with lock:
                found.extend((blocks.byte_begin, damage) for damage in damages)
                count(blocks.nbytes)

    stream_requests(opened.checkpoint.store, requests, take)
    return [damage for _, damage in sorted(found, key=lambda pair: pair[0])]


def _iter_expected(
    opened: OpenPart, extents: Iterable[tuple[StoredBox, Extent]], *, with_stored: bool
) -> Iterator[tuple[int, int, _Expected]]:
    """Yield first byte, size and contents of what a file has."""
    for box, extent in extents:
        if extent.encoding == "raw":
            block_nbytes = opened.part.origin.block_nbytes
            begin = extent.block_begin * block_nbytes
            nbytes = min(box.nbytes, begin + extent.block_count * block_nbytes) - begin
            if nbytes:
                yield extent.byte_begin, nbytes, _Expected(box=box, block=extent.block_begin)
        elif with_stored:
            yield from _iter_stored(box, extent)


def _iter_stored(box: StoredBox, extent: Extent) -> Iterator[tuple[int, int, _Expected]]:
    for block in range(extent.block_begin, extent.block_begin + extent.block_count if extent.is_encoded else 0):
        if nbytes := extent.stored_nbytes(block):
            row = _Expected(box=box, block=block, stored_digest=extent.stored_digest(block))
            yield extent.stored_begin(block), nbytes, row


def _iter_wrong(expected: _Expected, blocks: BlockRange, content: memoryview, block_nbytes: int) -> Iterator[CkptError]:
    if not expected.stored_digest:
        yield from iter_damages(blocks, content, expected.box.digests, block_nbytes, title=expected.box.title)
    elif digest_bytes(content) != expected.stored_digest:
        yield err(
            Code.BLOCK_DIGEST,
            f"block {expected.block} of {expected.box.title} isn't stored as it was saved",
            where=f"{blocks.path}[{blocks.byte_begin}:{blocks.byte_end}]",
            requirement="REQ-DEL-007",
        )


# --- a part -----------------------------------------------------------------------------------------------------------


def find_undecodable(
    opened: OpenPart, done: Done, count: Callable[[int], None], *, with_bases: bool
) -> list[CkptError]:
    """Return an error for every block of a part that doesn't decode to what was saved, in the order of its boxes.

    Args:
        done: what was decoded before, which isn't again; what is decoded now is added, blocks of bases too.
        count: is told how many bytes were checked: of what blocks are stored as.
        with_bases: whether what this part needs of its bases is checked as well, and damage there is told; else the
            bases are checked by themselves.

    Raises: StoreError; StateError(FLOAT_ENVIRONMENT).
    """
    plan = _Plan(opened, with_bases=with_bases)
    damages = plan.damages + plan.check_ranges(count)
    units = []
    for unit in plan.units.values():
        units.append([(run, block) for run, block in unit if block not in done.get(_key(run.opened, run.box), ())])
        count(sum(run.extent.stored_nbytes(block) for run, block in unit))
    for wrong, decoded in iter_ahead(_decode, [unit for unit in units if unit]):
        damages += wrong
        for opened_by, box, block in decoded:
            done.setdefault(_key(opened_by, box), set()).add(block)
    # Of whoever has a file, the attempt is in its name: what is wrong in a base is said once, there.
    attempt = opened.part.origin.attempt
    return [damage for damage in damages if with_bases or damage.where is None or attempt in damage.where]


def _key(opened: OpenPart, box: StoredBox) -> tuple[str, int, int]:
    return opened.checkpoint.digest, opened.part.writer, box.row


class _Plan:
    """What has to be read to know all blocks of a part that aren't raw in a file of its own.

    Attributes:
        units: encoded blocks, those that need each other together.
        damages: why blocks aren't among them.
    """

    def __init__(self, opened: OpenPart, *, with_bases: bool) -> None:
        self.units: dict[tuple[int, int, int], _Unit] = {}
        self.damages: list[CkptError] = []
        self._checkpoint = opened.checkpoint
        self._library = Library(opened.checkpoint)
        self._runs: list[Run] = []
        for box in opened.iter_boxes():
            for extent in box.extents:
                if extent.encoding != "raw":
                    self._add(opened, box, extent, with_bases=with_bases)

    def _add(self, opened: OpenPart, box: StoredBox, extent: Extent, *, with_bases: bool) -> None:
        last = extent.block_begin + extent.block_count
        try:
            runs = list(iter_runs(opened, box, extent.block_begin, last))
        except CkptError as error:
            if not is_violation(error):
                raise
            self.damages.append(without_frames(error))
            return
        for run in runs:
            if run.opened is not opened and not with_bases:
                continue
            if run.extent.encoding == "raw":
                self._runs.append(run)
                continue
            for block in range(run.first, run.last):
                self.units.setdefault(unit_of(run, block), []).append((run, block))

    def check_ranges(self, count: Callable[[int], None]) -> list[CkptError]:
        """Return an error for every raw block of a base that is needed, and isn't what was saved."""
        block_nbytes = self._checkpoint.manifest.origin.block_nbytes
        found: list[tuple[int, CkptError]] = []
        lock = threading.Lock()

        def take(request: Request, content: memoryview) -> None:
            for blocks in request.ranges:
                at = blocks.byte_begin - request.byte_begin
                box = self._runs[blocks.piece].box
                row = _Expected(box=box, block=self._runs[blocks.piece].first)
                damages = list(_iter_wrong(row, blocks, content[at : at + blocks.nbytes], block_nbytes))
                with lock:
                    found.extend((blocks.piece, damage) for damage in damages)
                    count(blocks.nbytes)

        try:
            ranges = [self._library.range_of(run, number) for number, run in enumerate(self._runs)]
            requests = self._checkpoint.plan_requests(self._library, ranges)
        except CkptError as error:
            if not is_violation(error):
                raise
            return [error]
        stream_requests(self._library, requests, take)
        return [damage for _, damage in sorted(found, key=lambda pair: pair[0])]


def _decode(unit: _Unit) -> tuple[list[CkptError], list[tuple[OpenPart, StoredBox, int]]]:
    """Return what is wrong with a unit, and what was decoded for it."""
    decoder, wrong = Decoder(), []
    for run, block in unit:
        try:
            decoder.content(run.opened, run.box, block)
        except CkptError as error:
            if not is_violation(error):
                raise
            wrong.append(without_frames(error))
    return wrong, decoder.blocks
