"""Read once, share: what several processes want is read by one of them, and sent to the others.

It goes in rounds, so that it takes a fixed amount of memory: each process reads its units of a round, then all exchange
them. Whoever fails goes on to the end, and sends a mark in the place of bytes: nobody waits for who has given up.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

from ckptfmt.errors import CkptError, Code, err
from ckptfmt.layout.read_plan import BlockRange
from ckptfmt.layout.shared_reads import Unit, plan_rounds, split_shared

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

#: How much a process holds of a round at most, in bytes.
ROUND_NBYTES: Final = 24 << 20
#: What is sent at once, in bytes.
UNIT_NBYTES: Final = 4 << 20
#: What is shorter is quicker to read again than to send, in bytes.
LEAST_NBYTES: Final = 64 << 10
_GOOD: Final = 1

#: The other process, and the memory that is sent or filled.
Message: TypeAlias = tuple[int, memoryview]
Take: TypeAlias = "Callable[[BlockRange, memoryview], None]"
Read: TypeAlias = "Callable[[list[BlockRange], Take], None]"


class Peers(Protocol):
    """The processes that load the same checkpoint together, and how they send bytes to each other."""

    @property
    def number(self) -> int:
        """The number of this process."""

    @property
    def count(self) -> int:
        """How many there are."""

    def all_gather(self, value: object) -> list[Any]:
        """Return the JSON values of all processes, in their order."""

    def exchange(self, outgoing: Sequence[Message], incoming: Sequence[Message]) -> None:
        """Send each of `outgoing` and fill each of `incoming`; between two processes, in their order.

        Raises: CommitError(WRITERS_MISSING) if a process is gone.
        """


def refuse_sharing(count: int) -> CkptError:
    """Return the error of processes that nothing connects."""
    return err(
        Code.ARGUMENT,
        f"share= is for {count} processes that torch.distributed connects",
        where="share=",
        remedy="Call torch.distributed.init_process_group first, or leave share= out.",
    )


def share_ranges(ranges: Iterable[BlockRange], peers: Peers, *, block_nbytes: int) -> tuple[list[BlockRange], Rounds]:
    """Return what this process reads for itself alone, and what it shares. Every process calls it."""
    ranges = sorted(ranges, key=lambda blocks: (blocks.path, blocks.byte_begin))
    by_path: dict[str, list[list[int]]] = defaultdict(list)
    for blocks in ranges:
        by_path[blocks.path].append([blocks.byte_begin, blocks.byte_end])
    told = peers.all_gather({"wanted": by_path})
    if any(type(theirs) is not dict or theirs.keys() != {"wanted"} for theirs in told):
        raise err(Code.WRITERS_DIVERGED, "not every process shares what it reads", where="share=")
    units = split_shared(
        [[(path, begin, end) for path, spans in theirs["wanted"].items() for begin, end in spans] for theirs in told],
        unit_nbytes=max(1, UNIT_NBYTES // block_nbytes) * block_nbytes,
        least_nbytes=LEAST_NBYTES,
    )
    shared = _Shared(ranges)
    own = []
    for group in plan_rounds(units, peers.count, ROUND_NBYTES):
        mine = [unit for unit in group if peers.number in unit.wanters]
        own += [mine] if mine else []
        for unit in mine:
            shared.add(unit)
    return shared.left(), Rounds(peers, own, shared)


class Rounds:
    """What is shared, round by round.

    Attributes:
        received_nbytes: how much other processes sent so far.
        buffer_nbytes: how much is held of a round.
    """

    def __init__(self, peers: Peers, rounds: Sequence[Sequence[Unit]], shared: _Shared) -> None:
        self._peers = peers
        self._rounds = rounds
        self._shared = shared
        self.received_nbytes = 0
        # A byte more for each unit: whether its bytes are good.
        self.buffer_nbytes = max((sum(unit.nbytes + 1 for unit in units) for units in rounds), default=0)
        self._buffer = memoryview(bytearray(self.buffer_nbytes))

    def run(self, read: Read, take: Take) -> None:
        """Read, exchange and take everything; an error is raised at the end, since others wait for this process.

        Args:
            read: reads and takes ranges, and gives each to a callable.
            take: checks and places what another process has read.

        Raises: what reading and checking raise; StateError(PEER_FAILED) where another process couldn't read.
        """
        failed: Exception | None = None
        for units in self._rounds:
            places = self._places(units)
            try:
                self._read(units, places, read)
            except Exception as error:  # noqa: BLE001 - whatever it is, the others wait
                failed = failed or error
            self._exchange(units, places)
            try:
                self._take(units, places, take)
            except Exception as error:  # noqa: BLE001 - whatever it is, the others wait
                failed = failed or error
        if failed is not None:
            raise failed

    def _places(self, units: Sequence[Unit]) -> dict[Unit, memoryview]:
        ends = list(itertools.accumulate(unit.nbytes + 1 for unit in units))
        places = {unit: self._buffer[begin:end] for unit, begin, end in zip(units, [0, *ends], ends, strict=False)}
        for place in places.values():
            place[-1] = 0
        return places

    def _read(self, units: Sequence[Unit], places: dict[Unit, memoryview], read: Read) -> None:
        own = [unit for unit in units if unit.reader == self._peers.number]
        begins = [(unit.path, unit.byte_begin) for unit in own]

        def keep(blocks: BlockRange, content: memoryview) -> None:
            unit = own[bisect.bisect_right(begins, (blocks.path, blocks.byte_begin)) - 1]
            at = blocks.byte_begin - unit.byte_begin
            places[unit][at : at + blocks.nbytes] = content

        read([self._shared.range_of(unit) for unit in own], keep)
        for unit in own:
            places[unit][-1] = _GOOD

    def _exchange(self, units: Sequence[Unit], places: dict[Unit, memoryview]) -> None:
        number = self._peers.number
        outgoing = [
            (peer, places[unit]) for unit in units if unit.reader == number for peer in unit.wanters if peer != number
        ]
        self._peers.exchange(outgoing, [(unit.reader, places[unit]) for unit in units if unit.reader != number])

    def _take(self, units: Sequence[Unit], places: dict[Unit, memoryview], take: Take) -> None:
        for unit in units:
            if unit.reader == self._peers.number:
                continue
            if places[unit][-1] != _GOOD:
                raise err(Code.PEER_FAILED, f"process {unit.reader} couldn't read it", where=unit.path)
            # Checked here, too: what a network did to it is nobody else's to find.
            take(self._shared.range_of(unit), places[unit][:-1])
            self.received_nbytes += unit.nbytes


class _Shared:
    """The ranges of this process, and which of their bytes are shared."""

    def __init__(self, ranges: Sequence[BlockRange]) -> None:
        self._ranges = ranges
        self._begins = [(blocks.path, blocks.byte_begin) for blocks in ranges]
        self._units: dict[int, list[Unit]] = defaultdict(list)

    def add(self, unit: Unit) -> None:
        """Note that a unit, which lies in one range, is shared."""
        self._units[self._find(unit)].append(unit)

    def range_of(self, unit: Unit) -> BlockRange:
        """Return the part of a range that a unit is."""
        return _part_of(self._ranges[self._find(unit)], unit.byte_begin, unit.byte_begin + unit.nbytes)

    def left(self) -> list[BlockRange]:
        """Return what isn't shared."""
        left = []
        for number, blocks in enumerate(self._ranges):
            at = blocks.byte_begin
            for unit in sorted(self._units.get(number, ()), key=lambda unit: unit.byte_begin):
                if at < unit.byte_begin:
                    left.append(_part_of(blocks, at, unit.byte_begin))
                at = unit.byte_begin + unit.nbytes
            if at < blocks.byte_end or not blocks.nbytes:
                left.append(_part_of(blocks, at, blocks.byte_end))
        return left

    def _find(self, unit: Unit) -> int:
        return bisect.bisect_right(self._begins, (unit.path, unit.byte_begin)) - 1


def _part_of(blocks: BlockRange, begin: int, end: int) -> BlockRange:
    first = blocks.box_byte_begin + begin - blocks.byte_begin
    return dataclasses.replace(blocks, byte_begin=begin, nbytes=end - begin, box_byte_begin=first)
