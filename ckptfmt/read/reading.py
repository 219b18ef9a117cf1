"""Read elements from their blocks into destinations, in one process or shared with other processes.

`ckptfmt.read.streaming` reads raw blocks, of this checkpoint and of bases. Encoded blocks are
decoded in bundles. A bundle contains the blocks with the same elements in all boxes of a prediction
group, so that blocks shared by several members are decoded once. Only the stored bytes of a few
batches of bundles are in memory at a time.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from ckptfmt.box import Box
from ckptfmt.digest import block_digests
from ckptfmt.documents.index import IndexTensor
from ckptfmt.errors import CkptError, Code, IntegrityError, err
from ckptfmt.layout.read_plan import (
    BlockRange,
    Request,
    cut_range,
    find_blocks,
    find_stretch,
    iter_stored_boxes,
)
from ckptfmt.read.decoding import BlockSpan, Decoder, Fetched, Library, iter_spans
from ckptfmt.read.files import CheckpointFiles, StoredBox
from ckptfmt.read.frozen_base import FrozenReading
from ckptfmt.read.sharing import Peers, Rounds, Take, share_ranges
from ckptfmt.read.streaming import (
    REMOTE_READER_COUNT,
    WAITING,
    Borrow,
    BufferMemory,
    ReadReport,
    iter_ahead,
    iter_batches,
    stream_requests,
    thread_count,
)
from ckptfmt.store.protocol import call_each
from ckptfmt.write.snapshot import Memory, MemoryOf, TensorSink

if TYPE_CHECKING:
    from ckptfmt.read.lending import Loans

T = TypeVar("T")

#: Number of threads per processor that read stored bytes for decoding, where reads wait.
_WHILE_WAITING: Final = 3
#: Maximum size in bytes of the decoded contents whose stored bytes are read ahead; a larger batch
#: is read anyway.
_AHEAD_NBYTES: Final = 64 << 20
#: The same limit for remote stores, where the number of reading threads is that of raw blocks.
_REMOTE_AHEAD_NBYTES: Final = 128 << 20
#: Size in bytes of the decoded contents of a batch.
_BATCH_NBYTES: Final = 2 << 20
#: Maximum number of bundles in a batch: planning and decoding many small bundles takes as long as a
#: few large ones.
_BATCH_COUNT: Final = 16
#: Integer dtypes by element size: numpy copies arrays of integers row by row.
_CARRIERS: Final = {1: "u1", 2: "u2", 4: "u4", 8: "u8"}

#: Stores bytes in a destination, from a byte of the destination on.
_Fill: TypeAlias = Callable[[int, memoryview], None]
#: The optional method `fill_of` of a sink with elements outside of host memory. The method returns
#: a function to store bytes of the elements of a box, in C order and little-endian; None unless the
#: elements are contiguous. Bytes in memory from the load's `Borrow` may be in use after the call.
#: Several threads may call the function at once.
_FillOf: TypeAlias = "Callable[[Box], _Fill | None]"
#: Blocks that are decoded together, each as the number of the box in the read and the block's
#: number.
Bundle: TypeAlias = list[tuple[int, int]]


# --- destinations ---------------------------------------------------------------------------------


def carrier_of(element_nbytes: int) -> np.dtype[Any]:
    """Return a numpy dtype for elements of a size, without regard to their meaning."""
    return np.dtype(_CARRIERS.get(element_nbytes, (np.void, element_nbytes)))


def allocate(tensor: IndexTensor, make: Callable[[], T]) -> T:
    """Return the array that `make` allocates for a tensor, with numpy or torch.

    Raises: StateError(LOAD_MEMORY) with the tensor's name.
    """
    try:
        return make()
    except CkptError:
        raise
    except (MemoryError, RuntimeError, ValueError) as error:  # ValueError: beyond the address space
        detail = f"{tensor.dtype} of shape {tensor.global_shape}: {error}"
        raise err(Code.LOAD_MEMORY, detail, where=tensor.name) from error


@dataclasses.dataclass(slots=True, kw_only=True)
class ArrayTarget:
    """An array that receives a box of a tensor without conversion; see `MemoryOf`.

    Attributes:
        array: an array with the shape of the box and the dtype from `carrier_of`.
    """

    field: str
    name: str
    scope: str
    dtype: str
    global_shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    array: NDArray[Any]

    def copy_from(self, box: Box, content: memoryview) -> None:
        """Store the elements of `box`."""
        index: tuple[Any, ...] = (*box.relative_to(self.boxes[0]), ...)  # the ellipsis keeps rank 0
        target: NDArray[Any] = self.array[index]
        np.copyto(target, np.frombuffer(content, self.array.dtype).reshape(box.shape))

    def memory_of(self, box: Box) -> NDArray[np.uint8] | None:
        """Return the memory of the elements of `box` as bytes; None if not contiguous."""
        first = find_stretch(self.boxes[0], box) if self.array.flags.c_contiguous else None
        if first is None:
            return None
        flat: NDArray[np.uint8] = self.array.reshape(-1)[first : first + box.element_count].view(
            np.uint8
        )
        return flat


@dataclasses.dataclass(slots=True, kw_only=True)
class WantedBox:
    """A stored box with its destinations; without destinations, the box is only verified.

    Attributes:
        wanted: pairs of a sink and a non-empty box of elements for the sink, complete before the
            first `place`.
    """

    stored: StoredBox
    wanted: list[tuple[TensorSink, Box]] = dataclasses.field(default_factory=list)
    _straight: list[tuple[int, int, _Fill]] = dataclasses.field(default_factory=list)
    _others: list[tuple[TensorSink, Box]] = dataclasses.field(default_factory=list)

    @property
    def wanted_nbytes(self) -> int:
        """Number of wanted bytes; bytes for two sinks count twice."""
        return sum(box.element_count for _, box in self.wanted) * self.stored.element_nbytes

    def iter_spans(self) -> Iterator[BlockSpan]:
        """Yield the places of the blocks that contain wanted elements.

        Raises: as `ckptfmt.read.decoding.iter_spans`.
        """
        stored = self.stored
        wanted = [box for _, box in self.wanted]
        for first, last in find_blocks(
            stored.box, wanted, stored.element_nbytes, stored.block_nbytes
        ):
            yield from iter_spans(stored, first, last)

    def open_sinks(self) -> None:
        """Find the sinks whose memory has the order of the stored bytes. Call this before `place`.

        Bytes for these sinks are copied straight to memory, without a call of `copy_from`.
        """
        element_nbytes = self.stored.element_nbytes
        for sink, box in self.wanted:
            first = find_stretch(self.stored.box, box)
            fill = None if first is None else _find_fill(sink, box)
            if first is None or fill is None:
                self._others.append((sink, box))
            else:
                begin = first * element_nbytes
                end = begin + box.element_count * element_nbytes
                self._straight.append((begin, end, fill))

    def place(self, blocks: BlockRange, content: memoryview) -> None:
        """Copy the elements of a verified range to their sinks.

        Several threads may place different ranges at the same time.
        """
        begin = blocks.box_byte_begin
        for first, last, fill in self._straight:
            low = max(begin, first)
            high = min(begin + blocks.nbytes, last)
            if low < high:
                fill(low - first, content[low - begin : high - begin])
        if not self._others:
            return
        for at, box in cut_range(
            self.stored.box, begin, begin + blocks.nbytes, self.stored.element_nbytes
        ):
            for sink, wanted in self._others:
                common = box.intersect(wanted)
                if common is not None:
                    sink.copy_from(
                        common, _cut(content[at - begin :], box, common, self.stored.element_nbytes)
                    )


def _find_fill(sink: TensorSink, box: Box) -> _Fill | None:
    """Return a function to store bytes of a box, if the sink's elements are contiguous."""
    # `getattr` instead of a check of the protocol, which takes longer than a copy of a small
    # tensor.
    memory_of: MemoryOf | None = getattr(sink, "memory_of", None)
    memory = None if memory_of is None else memory_of(box)
    if memory is not None:
        return functools.partial(_fill_memory, memory)
    fill_of: _FillOf | None = getattr(sink, "fill_of", None)
    return None if fill_of is None else fill_of(box)


def _fill_memory(memory: NDArray[np.uint8], at: int, content: memoryview) -> None:
    np.copyto(memory[at : at + content.nbytes], np.frombuffer(content, np.uint8))


def _cut(content: memoryview, box: Box, wanted: Box, element_nbytes: int) -> memoryview:
    """Return the elements of `wanted` from the elements of `box` at the beginning of `content`.

    The result is a view of `content` if the elements are contiguous, else a copy.
    """
    first = find_stretch(box, wanted)
    if first is not None:
        begin = first * element_nbytes
        return content[begin : begin + wanted.element_count * element_nbytes]
    carrier = carrier_of(element_nbytes)
    held = np.frombuffer(content[: box.element_count * element_nbytes], carrier).reshape(box.shape)
    cut: memoryview = (
        np.ascontiguousarray(held[wanted.relative_to(box)]).reshape(-1).view(np.uint8).data
    )
    return cut


# --- reading --------------------------------------------------------------------------------------


class DamagedMemoryError(IntegrityError):
    """The error of a load for damaged contents in the memory of a process.

    The files of the checkpoint may be good: another load reads the files.
    """


def damaged_memory(what: str) -> DamagedMemoryError:
    """Return the error for contents in the memory of a process that differ from their digests."""
    return DamagedMemoryError(
        Code.BLOCK_DIGEST,
        f"{what}, from the memory of another process, isn't what was saved",
    )


def plan_reading(
    files: CheckpointFiles,
    sinks: Sequence[TensorSink],
    borrow: Borrow | None = None,
    memory: Memory | None = None,
) -> Reading:
    """Return a read that fills sinks; see `ckptfmt.read.reader.Checkpoint.plan_reading`."""
    tensors = [_find_for(files, sink) for sink in sinks]
    files.open_parts(_list_parts(tensors, sinks) if files.store.is_remote else ())
    boxes: dict[StoredBox, WantedBox] = {}
    for tensor, sink in zip(tensors, sinks, strict=True):
        for wanted in sink.boxes:
            for box, part, common in iter_stored_boxes(tensor.sharding, wanted):
                stored = files.stored_box(tensor, box, part)
                if stored not in boxes:
                    boxes[stored] = WantedBox(stored=stored)
                boxes[stored].wanted.append((sink, common))
    reading = Reading(files, borrow)
    for one in boxes.values():
        number = reading.add_box(one)
        held = None if memory is None else memory(one.stored.key, one.stored.box)
        if held is None:
            reading.add_blocks(number, one.iter_spans())
        else:
            reading.add_content(number, held)
    return reading


def _list_parts(tensors: Sequence[IndexTensor], sinks: Sequence[TensorSink]) -> set[int]:
    """Return the numbers of the parts that contain elements for the sinks."""
    return {
        part
        for tensor, sink in zip(tensors, sinks, strict=True)
        for wanted in sink.boxes
        for _, part, _ in iter_stored_boxes(tensor.sharding, wanted)
    }


def _find_for(files: CheckpointFiles, sink: TensorSink) -> IndexTensor:
    tensor = files.find(sink.field, sink.name, sink.scope)
    if tensor is None:
        raise err(
            Code.TENSOR_MISSING,
            f"{sink.field} has no tensor {sink.name!r} ({sink.scope})",
            where=sink.name,
        )
    if sink.dtype != tensor.dtype:
        raise err(
            Code.DTYPE_MISMATCH, f"saved as {tensor.dtype}, wanted as {sink.dtype}", where=sink.name
        )
    if tuple(sink.global_shape) != tensor.global_shape:
        raise err(
            Code.SHAPE_MISMATCH,
            f"saved as {tensor.global_shape}, wanted as {tuple(sink.global_shape)}",
            where=sink.name,
        )
    return tensor


class Reading:
    """A read of blocks from files to sinks. A read without sinks only checks the blocks.

    Attributes:
        boxes: the boxes to read, each once.
        ranges: the raw blocks that this process reads for itself alone.
        library: the files of the blocks.
        frozen: the read of tensors of a frozen base; None without such tensors.
    """

    frozen: FrozenReading | None = None

    def __init__(self, files: CheckpointFiles, borrow: Borrow | None = None) -> None:
        self.boxes: list[WantedBox] = []
        self.ranges: list[BlockRange] = []
        self.library = Library(files)
        self._bundles: dict[tuple[StoredBox, int], Bundle] = {}
        #: Boxes with their contents in memory.
        self._contents: list[tuple[int, memoryview]] = []
        self._borrow = borrow
        self._memory = BufferMemory(borrow)
        self._loans: Loans | None = None
        self._rounds: Rounds | None = None
        self._read_nbytes = self._verified_nbytes = self._request_count = self._buffer_nbytes = 0
        self._decoded_nbytes = 0

    def add_box(self, wanted: WantedBox) -> int:
        """Add a box to the read, and return the box's number in this read."""
        self.boxes.append(wanted)
        return len(self.boxes) - 1

    def add_blocks(self, number: int, spans: Iterable[BlockSpan]) -> None:
        """Add blocks of a box to the read, given the box's number."""
        for span in spans:
            if span.encoding == "raw":
                self.ranges.append(
                    self.library.range_of(span.stored, span.first, span.last, number)
                )
                continue
            for block in range(span.first, span.last):
                self._bundles.setdefault(_bundle_of(span.stored, block), []).append((number, block))

    def add_content(self, number: int, content: memoryview) -> None:
        """Add the whole content of a box, given the box's number; nothing is read for the box."""
        self._contents.append((number, content))

    def lend(self, peers: Peers, memory: Memory | None) -> None:
        """Take contents from the memory of other processes, and lend contents in this memory.

        Every process calls this method, before `share`. Nothing is read for a borrowed box.

        Args:
            memory: as given to `Checkpoint.plan_reading`.

        Raises: the errors of the gather.
        """
        from ckptfmt.read.lending import Loans  # noqa: PLC0415 - few loads need the module

        held = {number for number, _ in self._contents}
        self._loans = Loans(
            {at: one.stored for at, one in enumerate(self.boxes) if at not in held},
            memory,
            peers,
            block_nbytes=self.library.files.block_nbytes,
        )
        borrowed = self._loans.borrowed
        self.ranges = [blocks for blocks in self.ranges if blocks.box not in borrowed]
        bundles = {
            key: [row for row in bundle if row[0] not in borrowed]
            for key, bundle in self._bundles.items()
        }
        self._bundles = {key: bundle for key, bundle in bundles.items() if bundle}

    def share(self, peers: Peers) -> None:
        """Share raw blocks wanted by several processes: one process reads and sends each block.

        Every process calls this method.

        Raises: the errors of the gather.
        """
        self.ranges, self._rounds = share_ranges(
            self.ranges, peers, block_nbytes=self.library.files.block_nbytes
        )

    def run(self) -> ReadReport:
        """Read, verify and place all blocks.

        If the read is shared, every process calls this method.

        Raises: IntegrityError; the errors of the sinks; StateError(PEER_FAILED).
        """
        for wanted in self.boxes:
            wanted.open_sinks()
        failed: Exception | None = None
        with self._memory:
            try:
                if self.frozen is not None:
                    self.frozen.run()
                self._place_contents()
                with self.library.files.while_current():
                    self._read(self.ranges)
                    if self._bundles:
                        self._decode()
            except Exception as error:
                if self._rounds is None and self._loans is None:
                    raise
                failed = error  # raised later, since other processes wait for this process's bytes
            for rounds in (self._run_loans, self._run_rounds):
                try:
                    rounds()
                except Exception as error:  # noqa: BLE001
                    failed = failed or error
        if failed is not None:
            raise failed
        return self._report()

    def _run_rounds(self) -> None:
        """Run the shared rounds, if any, with the rounds' memory lent to the device as well."""
        rounds = self._rounds
        if rounds is None:
            return
        with self.library.files.while_current():
            if self._borrow is None or not rounds.buffer_nbytes:
                rounds.run(self._read, self._take)
                return
            with self._borrow(rounds.memory) as loan:
                rounds.run(self._read, self._take, settle=loan.wait_all)

    def _run_loans(self) -> None:
        """Run the rounds that carry contents from the memory of processes, if any."""
        loans = self._loans
        if loans is None:
            return

        def read(ranges: list[BlockRange], then: Take) -> None:
            for blocks in ranges:
                then(blocks, loans.content_of(blocks))

        if self._borrow is None or not loans.rounds.buffer_nbytes:
            loans.rounds.run(read, self._take_content)
            return
        with self._borrow(loans.rounds.memory) as loan:
            loans.rounds.run(read, self._take_content, settle=loan.wait_all)

    def _take_content(self, blocks: BlockRange, content: memoryview) -> None:
        """Check the content of blocks from another process, then place the wanted elements."""
        wanted = self.boxes[blocks.box]
        stored = wanted.stored
        first = blocks.box_byte_begin // stored.block_nbytes
        found = block_digests(content, stored.block_nbytes)
        if found != stored.digests_of(first, first - (-blocks.nbytes // stored.block_nbytes)):
            raise damaged_memory(f"{stored.title_of(first)} or a block behind")
        wanted.place(blocks, content)

    def _read(self, ranges: list[BlockRange], then: Take | None = None) -> None:
        """Read, check and place ranges; also call `then` with each range and its bytes."""
        ranges = self._check_files(ranges)
        requests = self.library.plan_requests(ranges, is_lent=self._memory.is_lent)

        def take(request: Request, content: memoryview) -> None:
            for blocks in request.ranges:
                at = blocks.byte_begin - request.byte_begin
                found = content[at : at + blocks.nbytes]
                self._take(blocks, found)
                if then is not None:
                    then(blocks, found)

        self._request_count += len(requests)
        self._read_nbytes += sum(request.nbytes for request in requests)
        self._verified_nbytes += sum(blocks.nbytes for blocks in ranges)
        buffer_nbytes = stream_requests(self.library, requests, take, memory=self._memory)
        self._buffer_nbytes = max(self._buffer_nbytes, buffer_nbytes)

    def _place_contents(self) -> None:
        """Copy contents in memory to their sinks, the largest first, in several threads."""
        if not self._contents:
            return
        # A future for each content would take longer than the copy of a small content. The threads
        # take from one iterator.
        left = iter(sorted(self._contents, key=lambda row: -row[1].nbytes))

        def place() -> None:
            for number, content in left:
                self.boxes[number].place(BlockRange("", 0, content.nbytes, number, 0), content)

        with ThreadPoolExecutor(thread_count(), "ckptfmt-place") as threads:
            for placed in [threads.submit(place) for _ in range(thread_count())]:
                placed.result()

    def _check_files(self, ranges: list[BlockRange]) -> list[BlockRange]:
        """Compare size and header of the ranges' files, and return the ranges that can be read."""
        call_each(
            self.library.files.store, self.library.check, sorted({blocks.path for blocks in ranges})
        )
        return ranges

    def _take(self, blocks: BlockRange, stored: memoryview) -> None:
        """Check a range, then place its wanted elements."""
        wanted = self.boxes[blocks.box]
        for damage in wanted.stored.iter_damages(blocks, stored):
            raise damage
        wanted.place(blocks, stored)

    def _decode(self) -> None:
        """Decode and place all bundles. Where reads wait, a few threads read ahead.

        One thread decodes. Measured on two cores, two threads took between the same time and twice
        the time, because the calls are short and each call passes on the interpreter's lock.
        """
        batches = self._list_batches()
        is_remote = self.library.is_remote
        most_nbytes = _REMOTE_AHEAD_NBYTES if is_remote else _AHEAD_NBYTES
        room = most_nbytes // max(sum(map(self._nbytes_of, batch)) for batch in batches)
        most = REMOTE_READER_COUNT if is_remote else thread_count() * _WHILE_WAITING
        count = max(1, min(most, room // (WAITING + 1))) if self._waits() else 0

        def fetch(batch: list[Bundle]) -> tuple[list[Bundle], Fetched]:
            wanted = (
                (self.boxes[number].stored, block) for bundle in batch for number, block in bundle
            )
            return batch, self.library.fetch(wanted)

        for batch, fetched in (
            iter_ahead(fetch, batches, count=count) if count else map(fetch, batches)
        ):
            self._read_nbytes += fetched.read_nbytes
            self._request_count += fetched.request_count
            self._verified_nbytes += fetched.nbytes
            self._buffer_nbytes = max(self._buffer_nbytes, fetched.nbytes * (WAITING * count + 1))
            for bundle in batch:
                decoder = Decoder(self.library, fetched)
                self._decode_bundle(bundle, decoder)
                self._decoded_nbytes += decoder.decoded_nbytes
                self._verified_nbytes += decoder.decoded_nbytes

    def _waits(self) -> bool:
        """Return whether reads of the encoded blocks wait for a device or a network."""
        number, block = next(iter(self._bundles.values()))[0]
        (span,) = iter_spans(self.boxes[number].stored, block, block + 1)
        return self.library.waits(self.library.range_of(span.stored, block, block + 1, number).path)

    def _list_batches(self) -> list[list[Bundle]]:
        """Return the bundles in batches; the stored bytes of a batch are read together.

        Small bundles alone would need too many requests. Batches of small bundles take long to
        decode for their size. They are spread among the other batches, so that neither reading nor
        decoding waits for long.
        """
        sorts: tuple[list[Bundle], list[Bundle]] = [], []
        for bundle in self._bundles.values():
            sorts[self._nbytes_of(bundle) * _BATCH_COUNT < _BATCH_NBYTES].append(bundle)
        placed: list[tuple[float, list[Bundle]]] = []
        for bundles in sorts:
            batches = list(
                iter_batches(bundles, self._nbytes_of, nbytes=_BATCH_NBYTES, count=_BATCH_COUNT)
            )
            placed += [((at + 0.5) / len(batches), batch) for at, batch in enumerate(batches)]
        return [batch for _, batch in sorted(placed, key=lambda row: row[0])]

    def _nbytes_of(self, bundle: Bundle) -> int:
        return sum(self.boxes[number].stored.content_nbytes(block) for number, block in bundle)

    def _decode_bundle(self, bundle: Bundle, decoder: Decoder) -> None:
        """Decode the blocks of a bundle, and place their wanted elements."""
        for number, block in bundle:
            wanted = self.boxes[number]
            content = decoder.content(wanted.stored, block)
            wanted.place(
                BlockRange("", 0, content.nbytes, number, block * wanted.stored.block_nbytes),
                content,
            )

    def _report(self) -> ReadReport:
        all_rounds = (self._rounds, None if self._loans is None else self._loans.rounds)
        rounds = [one for one in all_rounds if one is not None]
        received_nbytes = sum(one.received_nbytes for one in rounds)
        frozen_nbytes = 0 if self.frozen is None else self.frozen.read_nbytes
        return ReadReport(
            needed_nbytes=sum(wanted.wanted_nbytes for wanted in self.boxes) + frozen_nbytes,
            read_nbytes=self._read_nbytes + frozen_nbytes,
            verified_nbytes=self._verified_nbytes + received_nbytes + frozen_nbytes,
            request_count=self._request_count,
            received_nbytes=received_nbytes,
            decoded_nbytes=self._decoded_nbytes,
            buffer_nbytes=self._buffer_nbytes + max([0, *(one.buffer_nbytes for one in rounds)]),
            metadata_nbytes=self.library.files.metadata_nbytes,
            memory_nbytes=sum(content.nbytes for _, content in self._contents),
        )


def _bundle_of(stored: StoredBox, block: int) -> tuple[StoredBox, int]:
    """Return the key of a block's bundle: the first box of the group, and a number."""
    members = (
        [stored] if stored.group is None else [stored.opened.box(row) for row in stored.group.boxes]
    )
    narrowest = min(member.element_nbytes for member in members)
    # The same number of elements fills more blocks if the elements are wider.
    return members[0], block * narrowest // stored.element_nbytes
