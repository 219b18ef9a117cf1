"""Send the contents of boxes from the memory of some processes to processes without the contents.

The assignment of boxes to lenders is a pure function of all processes' answers, as in
`ckptfmt.read.sharing`, whose rounds carry the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from ckptfmt.box import Box
from ckptfmt.errors import Code, err
from ckptfmt.layout.read_plan import BlockRange
from ckptfmt.read.sharing import (
    PARCEL_NBYTES,
    ROUND_NBYTES,
    Parcel,
    Peers,
    Rounds,
    plan_rounds,
)
from ckptfmt.write.snapshot import Memory

if TYPE_CHECKING:
    from ckptfmt.read.files import StoredBox

#: The member of a message with the boxes lacking in a process.
_LACKING: Final = "lacking"


def choose_lenders(
    nbytes: Sequence[Sequence[int]], held: Sequence[Sequence[Sequence[int]]]
) -> dict[tuple[int, int], int]:
    """Return the lender of each box in the memory of a process, by borrower and number.

    For balance, the lender of a box is the holder with the fewest bytes to send so far.

    Args:
        nbytes: for each process, the sizes of the lacking boxes in bytes.
        held: for each process, and for each borrower, the numbers of the boxes in memory.

    >>> choose_lenders([[], [8, 4]], [[[], [0, 1]], [[], []]])
    {(1, 0): 0, (1, 1): 0}
    """
    holders: dict[tuple[int, int], list[int]] = {}
    for process, rows in enumerate(held):
        for borrower, numbers in enumerate(rows):
            for number in numbers:
                holders.setdefault((borrower, number), []).append(process)
    load = [0] * len(nbytes)
    lenders = {}
    for borrower, number in sorted(holders):
        lender = min(holders[borrower, number], key=lambda process: (load[process], process))
        load[lender] += nbytes[borrower][number]
        lenders[borrower, number] = lender
    return lenders


class Loans:
    """The loans of boxes between the processes of one load; every process makes all calls.

    Args:
        lacking: this process's boxes without content in memory, by number in the read.
        memory: see `Checkpoint.plan_reading`; None without contents in memory.
        peers: the processes.
        block_nbytes: size of a block in bytes.

    Attributes:
        borrowed: numbers in the read of this process's borrowed boxes.
        rounds: the rounds for the contents.
    """

    def __init__(
        self,
        lacking: dict[int, StoredBox],
        memory: Memory | None,
        peers: Peers,
        *,
        block_nbytes: int,
    ) -> None:
        numbers = list(lacking)
        rows = [
            [list(box.key), box.box.begin, box.box.shape, box.nbytes] for box in lacking.values()
        ]
        told = _gather(peers, _LACKING, rows)
        self._contents: dict[tuple[int, int], memoryview] = {}
        held: list[list[int]] = []
        for borrower, theirs in enumerate(told):
            is_other = borrower != peers.number and memory is not None
            held.append(self._find(borrower, theirs, memory) if is_other and memory else [])
        sizes = [[row[3] for row in theirs] for theirs in told]
        lenders = choose_lenders(sizes, _gather(peers, "held", held))
        nbytes = max(1, PARCEL_NBYTES // block_nbytes) * block_nbytes
        parcels = [
            Parcel(
                f"{borrower:06d}/{number:09d}",
                begin,
                min(nbytes, sizes[borrower][number] - begin),
                lender,
                (min(lender, borrower), max(lender, borrower)),
            )
            for (borrower, number), lender in sorted(lenders.items())
            for begin in range(0, sizes[borrower][number], nbytes)
        ]
        own = [
            [parcel for parcel in group if peers.number in parcel.wanters]
            for group in plan_rounds(parcels, peers.count, ROUND_NBYTES)
        ]
        self._numbers = numbers
        self.borrowed = {numbers[at] for borrower, at in lenders if borrower == peers.number}
        self.rounds = Rounds(peers, [group for group in own if group], self)

    def range_of(self, parcel: Parcel) -> BlockRange:
        """Return the range of a box in a parcel, with the box's number in the borrower's read."""
        number = int(parcel.path.partition("/")[2])
        own = self._numbers[number] if number < len(self._numbers) else number
        return BlockRange(parcel.path, parcel.byte_begin, parcel.nbytes, own, parcel.byte_begin)

    def content_of(self, blocks: BlockRange) -> memoryview:
        """Return the content of a range lent by this process."""
        borrower, _, number = blocks.path.partition("/")
        return self._contents[int(borrower), int(number)][blocks.byte_begin : blocks.byte_end]

    def _find(self, borrower: int, rows: Sequence[Any], memory: Memory) -> list[int]:
        """Return the numbers of a borrower's boxes with contents in this process's memory."""
        found = []
        for number, ((field, name, scope), begin, shape, nbytes) in enumerate(rows):
            content = memory((field, name, scope), Box(tuple(begin), tuple(shape)))
            if content is not None and content.nbytes == nbytes > 0:
                self._contents[borrower, number] = content
                found.append(number)
        return found


def _gather(peers: Peers, name: str, value: object) -> list[Any]:
    """Return a member of all processes' messages. Raises: LayoutError(WRITERS_DIVERGED)."""
    told = peers.all_gather({name: value})
    if any(type(theirs) is not dict or theirs.keys() != {name} for theirs in told):
        detail = "the processes aren't at the same point of a load"
        raise err(Code.WRITERS_DIVERGED, detail, requirement="REQ-CMT-001")
    return [theirs[name] for theirs in told]
