"""Share reads between processes: one process reads bytes wanted by several, and sends the bytes.

The assignment of reads to processes is a pure function of all processes' wishes. Each process
computes the same assignment alone. Reads and transfers happen in rounds with a fixed amount of
memory: in each round, every process reads its parcels, then all processes exchange parcels. A
process that fails takes part in all remaining rounds, and marks its parcels as bad, so that no
process waits for a failed process.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, Protocol, TypeAlias

import numpy as np

from ckptfmt.errors import CkptError, Code, err
from ckptfmt.layout.read_plan import BlockRange
from ckptfmt.store.direct import make_memory

#: A range of a file: path, first byte, end (exclusive).
FileSpan: TypeAlias = tuple[str, int, int]


@dataclasses.dataclass(frozen=True, slots=True)
class Parcel:
    """Bytes of a file that several processes want.

    Attributes:
        path: the file's path.
        byte_begin: the first byte, at the beginning of a block.
        nbytes: size in bytes.
        reader: number of the process that reads the bytes.
        wanters: sorted numbers of the processes that want the bytes, the reader included.
    """

    path: str
    byte_begin: int
    nbytes: int
    reader: int
    wanters: tuple[int, ...]


def split_shared(
    wanted: Sequence[Sequence[FileSpan]], *, parcel_nbytes: int, least_nbytes: int = 1
) -> tuple[Parcel, ...]:
    """Return the bytes wanted by more than one process as parcels, each with a reader.

    Parcels begin at the beginning or end of a process's span, and at multiples of `parcel_nbytes`
    after such a point. For balance, the reader of a parcel is the process with the fewest bytes to
    read so far, among the processes that want the parcel.

    Args:
        wanted: the wanted spans of each process, in the order of the processes; the spans of a
            process are disjoint.
        parcel_nbytes: maximum size of a parcel, in bytes.
        least_nbytes: minimum size of a shared stretch in bytes; every process reads shorter
            stretches itself.

    >>> split_shared([[("a", 0, 8)], [("a", 4, 12)]], parcel_nbytes=4)
    (Parcel(path='a', byte_begin=4, nbytes=4, reader=0, wanters=(0, 1)),)
    """
    load = [sum(end - begin for _, begin, end in spans) for spans in wanted]
    stretches = [
        stretch for stretch in _iter_stretches(wanted) if stretch[2] - stretch[1] >= least_nbytes
    ]
    for _, begin, end, wanters in stretches:
        for process in wanters:
            load[process] -= end - begin
    parcels = []
    for path, begin, end, wanters in stretches:
        for at in range(begin, end, parcel_nbytes):
            nbytes = min(parcel_nbytes, end - at)
            reader = min(wanters, key=lambda process: (load[process], process))
            load[reader] += nbytes
            parcels.append(Parcel(path, at, nbytes, reader, wanters))
    return tuple(parcels)


def plan_rounds(
    parcels: Sequence[Parcel], process_count: int, round_nbytes: int
) -> tuple[tuple[Parcel, ...], ...]:
    """Return the parcels in rounds.

    In a round, no process holds more than `round_nbytes`, or more than one parcel if the parcel is
    larger.
    """
    rounds: list[list[Parcel]] = []
    held = [0] * process_count
    for parcel in parcels:
        if not rounds or any(
            held[process] + parcel.nbytes > round_nbytes for process in parcel.wanters
        ):
            rounds.append([])
            held = [0] * process_count
        rounds[-1].append(parcel)
        for process in parcel.wanters:
            held[process] += parcel.nbytes
    return tuple(tuple(group) for group in rounds)


def _iter_stretches(
    wanted: Sequence[Sequence[FileSpan]],
) -> Iterator[tuple[str, int, int, tuple[int, ...]]]:
    """Yield the stretches wanted by at least two processes: path, begin, end, processes.

    A stretch lies between two consecutive ends of spans.
    """
    changes: dict[str, dict[int, list[tuple[int, int]]]] = defaultdict(lambda: defaultdict(list))
    for process, spans in enumerate(wanted):
        for path, begin, end in spans:
            changes[path][begin].append((process, 1))
            changes[path][end].append((process, -1))
    for path in sorted(changes):
        count = [0] * len(wanted)
        places = sorted(changes[path])
        for at, behind in itertools.pairwise(places):
            for process, change in changes[path][at]:
                count[process] += change
            wanters = tuple(process for process, spans in enumerate(count) if spans)
            if len(wanters) > 1:
                yield path, at, behind, wanters


# --- exchange -------------------------------------------------------------------------------------


#: Maximum number of bytes that a process holds in a round.
ROUND_NBYTES: Final = 24 << 20
#: Size of a parcel in bytes.
PARCEL_NBYTES: Final = 4 << 20
#: Minimum size in bytes of a shared stretch: a shorter stretch is faster to read again than to
#: send.
LEAST_NBYTES: Final = 64 << 10
_GOOD: Final = 1

#: The number of the other process, and the memory to send or to fill.
Message: TypeAlias = tuple[int, memoryview]
Take: TypeAlias = "Callable[[BlockRange, memoryview], None]"
Read: TypeAlias = "Callable[[list[BlockRange], Take], None]"


class Peers(Protocol):
    """The processes of a joint load, and their exchange of bytes."""

    @property
    def number(self) -> int:
        """The number of this process."""

    @property
    def count(self) -> int:
        """The number of processes."""

    def all_gather(self, value: object) -> list[Any]:
        """Return the JSON values of all processes, in the order of the processes."""

    def exchange(self, outgoing: Sequence[Message], incoming: Sequence[Message]) -> None:
        """Send all of `outgoing` and fill all of `incoming`.

        Messages between two processes keep their order.

        Raises: CommitError(WRITERS_MISSING) if a process is gone.
        """


def refuse_sharing(count: int) -> CkptError:
    """Return the error for processes without a connection to each other."""
    return err(
        Code.ARGUMENT,
        f"share= needs {count} processes that torch.distributed connects",
        where="share=",
        remedy="Call torch.distributed.init_process_group first, or leave share= out.",
    )


def share_ranges(
    ranges: Iterable[BlockRange], peers: Peers, *, block_nbytes: int
) -> tuple[list[BlockRange], Rounds]:
    """Return the ranges that this process reads alone, and the shared rounds.

    Every process calls this function.
    """
    ranges = sorted(ranges, key=lambda blocks: (blocks.path, blocks.byte_begin))
    by_path: dict[str, list[list[int]]] = defaultdict(list)
    for blocks in ranges:
        by_path[blocks.path].append([blocks.byte_begin, blocks.byte_end])
    told = peers.all_gather({"wanted": by_path})
    if any(type(theirs) is not dict or theirs.keys() != {"wanted"} for theirs in told):
        raise err(Code.WRITERS_DIVERGED, "not every process has share=True", where="share=")
    parcels = split_shared(
        [
            [(path, begin, end) for path, spans in theirs["wanted"].items() for begin, end in spans]
            for theirs in told
        ],
        parcel_nbytes=max(1, PARCEL_NBYTES // block_nbytes) * block_nbytes,
        least_nbytes=LEAST_NBYTES,
    )
    shared = _Shared(ranges)
    own = []
    for group in plan_rounds(parcels, peers.count, ROUND_NBYTES):
        mine = [parcel for parcel in group if peers.number in parcel.wanters]
        own += [mine] if mine else []
        for parcel in mine:
            shared.add(parcel)
    return shared.left(), Rounds(peers, own, shared)


class _Places(Protocol):
    """The ranges of parcels in a read."""

    def range_of(self, parcel: Parcel) -> BlockRange:
        """Return the range of blocks in a parcel."""


class Rounds:
    """The rounds of shared reads.

    Args:
        rounds: the parcels that this process sends or receives, by path and begin in each round.
        shared: the ranges of the parcels.

    Attributes:
        received_nbytes: number of bytes received from other processes so far.
        buffer_nbytes: size in bytes of the buffer for a round.
        memory: the buffer for a round.
    """

    def __init__(self, peers: Peers, rounds: Sequence[Sequence[Parcel]], shared: _Places) -> None:
        self._peers = peers
        self._rounds = rounds
        self._shared = shared
        self.received_nbytes = 0
        # Each parcel has an extra byte: a mark that the bytes are good.
        self.buffer_nbytes = max(
            (sum(parcel.nbytes + 1 for parcel in parcels) for parcels in rounds), default=0
        )
        self.memory = make_memory(max(1, self.buffer_nbytes))[: self.buffer_nbytes]

    def run(self, read: Read, take: Take, settle: Callable[[], None] = lambda: None) -> None:
        """Read, exchange, check and place all parcels.

        An error is raised after the last round, since other processes wait for this process.

        Args:
            read: reads and places ranges, and calls a function with each range.
            take: checks and places a range that another process has read.
            settle: called after each round, before the buffer is filled again; waits for copies out
                of the buffer.

        Raises: the errors of reading, checking and settling; StateError(PEER_FAILED) if another
            process couldn't read a parcel.
        """
        failed: Exception | None = None
        for parcels in self._rounds:
            places = self._places(parcels)
            try:
                self._read(parcels, places, read)
            except Exception as error:  # noqa: BLE001
                failed = failed or error
            self._exchange(parcels, places)
            try:
                self._take(parcels, places, take)
            except Exception as error:  # noqa: BLE001
                failed = failed or error
            try:
                settle()
            except Exception as error:  # noqa: BLE001
                failed = failed or error
        if failed is not None:
            raise failed

    def _places(self, parcels: Sequence[Parcel]) -> dict[Parcel, memoryview]:
        ends = list(itertools.accumulate(parcel.nbytes + 1 for parcel in parcels))
        places = {
            parcel: self.memory[begin:end]
            for parcel, begin, end in zip(parcels, [0, *ends], ends, strict=False)
        }
        for place in places.values():
            place[-1] = 0
        return places

    def _read(
        self, parcels: Sequence[Parcel], places: dict[Parcel, memoryview], read: Read
    ) -> None:
        own = [parcel for parcel in parcels if parcel.reader == self._peers.number]
        begins = [(parcel.path, parcel.byte_begin) for parcel in own]

        def keep(blocks: BlockRange, content: memoryview) -> None:
            parcel = own[bisect.bisect_right(begins, (blocks.path, blocks.byte_begin)) - 1]
            at = blocks.byte_begin - parcel.byte_begin
            # numpy releases the GIL during the copy, unlike a memoryview.
            target = np.frombuffer(places[parcel][at : at + blocks.nbytes], np.uint8)
            np.copyto(target, np.frombuffer(content, np.uint8))

        read([self._shared.range_of(parcel) for parcel in own], keep)
        for parcel in own:
            places[parcel][-1] = _GOOD

    def _exchange(self, parcels: Sequence[Parcel], places: dict[Parcel, memoryview]) -> None:
        number = self._peers.number
        outgoing = [
            (peer, places[parcel])
            for parcel in parcels
            if parcel.reader == number
            for peer in parcel.wanters
            if peer != number
        ]
        self._peers.exchange(
            outgoing,
            [(parcel.reader, places[parcel]) for parcel in parcels if parcel.reader != number],
        )

    def _take(
        self, parcels: Sequence[Parcel], places: dict[Parcel, memoryview], take: Take
    ) -> None:
        for parcel in parcels:
            if parcel.reader == self._peers.number:
                continue
            if places[parcel][-1] != _GOOD:
                raise err(
                    Code.PEER_FAILED,
                    f"process {parcel.reader} couldn't read this file",
                    where=parcel.path,
                )
            # Each receiver checks the bytes, because only the receiver can detect damage by the
            # network.
            take(self._shared.range_of(parcel), places[parcel][:-1])
            self.received_nbytes += parcel.nbytes


class _Shared:
    """The ranges of this process, and the shared parcels in these ranges."""

    def __init__(self, ranges: Sequence[BlockRange]) -> None:
        self._ranges = ranges
        self._begins = [(blocks.path, blocks.byte_begin) for blocks in ranges]
        self._parcels: dict[int, list[Parcel]] = defaultdict(list)

    def add(self, parcel: Parcel) -> None:
        """Mark a parcel as shared; the parcel lies in one range."""
        self._parcels[self._find(parcel)].append(parcel)

    def range_of(self, parcel: Parcel) -> BlockRange:
        """Return the part of a range covered by a parcel."""
        return _part_of(
            self._ranges[self._find(parcel)], parcel.byte_begin, parcel.byte_begin + parcel.nbytes
        )

    def left(self) -> list[BlockRange]:
        """Return the parts of the ranges that aren't shared."""
        left = []
        for number, blocks in enumerate(self._ranges):
            at = blocks.byte_begin
            for parcel in sorted(
                self._parcels.get(number, ()), key=lambda parcel: parcel.byte_begin
            ):
                if at < parcel.byte_begin:
                    left.append(_part_of(blocks, at, parcel.byte_begin))
                at = parcel.byte_begin + parcel.nbytes
            if at < blocks.byte_end or not blocks.nbytes:
                left.append(_part_of(blocks, at, blocks.byte_end))
        return left

    def _find(self, parcel: Parcel) -> int:
        return bisect.bisect_right(self._begins, (parcel.path, parcel.byte_begin)) - 1


def _part_of(blocks: BlockRange, begin: int, end: int) -> BlockRange:
    first = blocks.box_byte_begin + begin - blocks.byte_begin
    return dataclasses.replace(blocks, byte_begin=begin, nbytes=end - begin, box_byte_begin=first)
