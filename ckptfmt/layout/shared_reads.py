"""Who reads what, where several processes want the same blocks: each is read by one of them, and sent to the others.

A pure function of what all of them want, so that each computes it alone and all come to the same result.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

#: A range of a file: path, first byte, first byte behind it.
Span = tuple[str, int, int]


@dataclasses.dataclass(frozen=True, slots=True)
class Unit:
    """Bytes of a file that several processes want.

    Attributes:
        path: of the file.
        byte_begin: first byte; a block begins here.
        nbytes: how many.
        reader: the process that reads them.
        wanters: all who want them, the reader among them; sorted.
    """

    path: str
    byte_begin: int
    nbytes: int
    reader: int
    wanters: tuple[int, ...]


def split_shared(wanted: Sequence[Sequence[Span]], *, unit_nbytes: int, least_nbytes: int = 1) -> tuple[Unit, ...]:
    """Return what more than one process wants, in units, each with the one that reads it.

    A unit begins where a span of some process begins or ends, or a multiple of `unit_nbytes` behind that. The work is
    spread: a unit goes to whoever of its wanters has the fewest bytes to read so far.

    Args:
        wanted: what each process wants, in the order of the processes; the spans of one are disjoint.
        unit_nbytes: longest unit, in bytes.
        least_nbytes: what is shorter is left to everybody.

    >>> split_shared([[("a", 0, 8)], [("a", 4, 12)]], unit_nbytes=4)
    (Unit(path='a', byte_begin=4, nbytes=4, reader=0, wanters=(0, 1)),)
    """
    load = [sum(end - begin for _, begin, end in spans) for spans in wanted]
    stretches = [stretch for stretch in _iter_stretches(wanted) if stretch[2] - stretch[1] >= least_nbytes]
    for _, begin, end, wanters in stretches:
        for process in wanters:
            load[process] -= end - begin
    units = []
    for path, begin, end, wanters in stretches:
        for at in range(begin, end, unit_nbytes):
            nbytes = min(unit_nbytes, end - at)
            reader = min(wanters, key=lambda process: (load[process], process))
            load[reader] += nbytes
            units.append(Unit(path, at, nbytes, reader, wanters))
    return tuple(units)


def plan_rounds(units: Sequence[Unit], process_count: int, round_nbytes: int) -> tuple[tuple[Unit, ...], ...]:
    """Return the units in rounds, in each of which no process holds more than `round_nbytes`, unless it is one unit."""
    rounds: list[list[Unit]] = []
    held = [0] * process_count
    for unit in units:
        if not rounds or any(held[process] + unit.nbytes > round_nbytes for process in unit.wanters):
            rounds.append([])
            held = [0] * process_count
        rounds[-1].append(unit)
        for process in unit.wanters:
            held[process] += unit.nbytes
    return tuple(tuple(group) for group in rounds)


def _iter_stretches(wanted: Sequence[Sequence[Span]]) -> Iterator[tuple[str, int, int, tuple[int, ...]]]:
    """Yield what two or more processes want, from one end of a span to the next: path, begin, end, processes."""
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
