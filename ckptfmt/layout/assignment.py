"""The assignment of boxes to writers: exactly one holder writes each box. Pure.

The boxes of all writers are columns: a launch of thousands of processes holds millions of boxes,
and each process derives the whole assignment. Only boxes with several holders take a Python step
each.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Self

import numpy as np
from numpy.typing import NDArray

from ckptfmt.box import Box
from ckptfmt.documents.holdings import Structure, products
from ckptfmt.documents.packed import Integers, join_integers
from ckptfmt.documents.tables import TensorTable, title_of
from ckptfmt.errors import CkptError, Code, err


def assign_writers(structures: Sequence[Structure]) -> tuple[NDArray[np.bool_], ...]:
    """Return for each writer's boxes whether the writer writes the box.

    Equal boxes of a tensor with the same declarer are a piece, and exactly one holder writes a
    piece. Pieces with a single holder are assigned first. Shared pieces follow, largest first,
    each assigned to the holder with the fewest bytes so far; ties go to the lower tensor, box and
    declarer, then to the lower writer. The order of a writer's boxes doesn't matter.

    Args:
        structures: the structure of each writer.

    Shapes: for each writer (boxes,), in the order of the writer's structure.
    Units: bytes.
    Raises: ARGUMENT when a writer lists a piece twice; TENSOR_DIVERGED when two writers give
        different sizes for a piece.
    Source: LPT scheduling, R. L. Graham, SIAM J. Appl. Math. 17 (1969), with restricted machines.
    """
    held = _Held.of(structures)
    written = np.zeros(len(held.writer), np.bool_)
    load = np.zeros(len(structures), np.int64)
    shared = []
    for ndim in np.unique(held.ndim).tolist():
        rows, first = held.sort(ndim)
        held.check(rows, first)
        count = np.diff(first, append=len(rows))
        alone = rows[first[count == 1]]
        written[alone] = True
        np.add.at(load, held.writer[alone], held.nbytes[alone])
        shared += [
            rows[begin : begin + holders]
            for begin, holders in zip(
                first[count > 1].tolist(), count[count > 1].tolist(), strict=True
            )
        ]
    for rows in held.largest_first(shared):
        holders = held.writer[rows]
        chosen = int(load[holders].argmin())  # the first of equal loads: the lower writer
        load[holders[chosen]] += held.nbytes[rows[0]]
        written[rows[chosen]] = True
    return tuple(np.split(written, np.cumsum(held.box_counts)[:-1])) if structures else ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Held:
    """The boxes held by all writers, in the order of the writers.

    Attributes:
        structures: the structure of each writer.
        box_counts: number of boxes of each writer.
        writer: number of each box's holder.
        tensor: number of each box's tensor, in the order of all keys.
        declarer: number of each box's declarer, in the order of all names.
        ndim: number of each box's dimensions.
        nbytes: size of each box in bytes.
        place: offset of each box's numbers in the flattened columns.
        begin, box_shape: flattened columns of all boxes.
    """

    structures: Sequence[Structure]
    box_counts: list[int]
    writer: Integers
    tensor: Integers
    declarer: Integers
    ndim: Integers
    nbytes: Integers
    place: Integers
    begin: Integers
    box_shape: Integers

    @classmethod
    def of(cls, structures: Sequence[Structure]) -> Self:
        """Return the boxes of all writers."""
        tables = {id(one.table): one.table for one in structures}
        firsts = dict(zip(tables, _first_rows(tables.values()), strict=True))
        # The row of each box's tensor in the concatenation of all distinct tables.
        row = join_integers(
            [
                np.repeat(np.arange(len(one.box_count)) + firsts[id(one.table)], one.box_count)
                for one in structures
            ]
        )
        ndim = join_integers([table.ndim for table in tables.values()])[row]
        box_shape = join_integers([one.box_shape for one in structures])
        element_nbytes = join_integers([table.element_nbytes for table in tables.values()])[row]
        box_counts = [int(one.box_count.sum()) for one in structures]
        return cls(
            structures=structures,
            box_counts=box_counts,
            writer=np.repeat(np.arange(len(structures)), box_counts),
            tensor=_number_keys(tables.values())[row],
            declarer=_number_declarers(structures),
            ndim=ndim,
            nbytes=products(box_shape, ndim) * element_nbytes,
            place=np.cumsum(ndim) - ndim,
            begin=join_integers([one.begin for one in structures]),
            box_shape=box_shape,
        )

    def sort(self, ndim: int) -> tuple[Integers, Integers]:
        """Return the boxes of `ndim` dimensions, sorted by piece, then by writer.

        Returns: the numbers of the boxes, and the place of each piece's first box among them.
        """
        rows = np.flatnonzero(self.ndim == ndim)
        place = self.place[rows, None] + np.arange(ndim)
        columns = [
            self.tensor[rows], *self.begin[place].T, *self.box_shape[place].T, self.declarer[rows]
        ]  # fmt: skip
        order = np.lexsort(columns[::-1])  # stable: writers stay in order
        new = np.ones(len(rows), np.bool_)
        new[1:] = False
        for column in columns:
            new[1:] |= np.diff(column[order]) != 0
        return rows[order], np.flatnonzero(new)

    def check(self, rows: Integers, first: Integers) -> None:
        """Raise unless each piece has a single size, and each holder lists the piece once.

        Args:
            rows, first: the result of `sort`.
        """
        again = np.diff(self.writer[rows], prepend=-1) == 0
        again[first] = False
        if again.any():
            row = int(rows[again.argmax()])
            detail = f"writer {self.writer[row]} lists {self._title(row)} twice"
            raise err(Code.ARGUMENT, detail)
        unequal = np.diff(self.nbytes[rows], prepend=0) != 0
        unequal[first] = False
        if unequal.any():
            at = int(unequal.argmax())
            raise self._diverged(int(rows[at - 1]), int(rows[at]))

    def largest_first(self, pieces: Sequence[Integers]) -> Iterable[Integers]:
        """Return pieces by size, tensor and box. The argument has a tensor's pieces in order."""
        one = np.array([rows[0] for rows in pieces], np.int64)
        order = np.lexsort((np.arange(len(one)), self.tensor[one], -self.nbytes[one]))
        return (pieces[number] for number in order.tolist())

    def _title(self, row: int) -> str:
        """Return tensor and box of a row, for messages."""
        structure = self.structures[int(self.writer[row])]
        at = row - sum(self.box_counts[: int(self.writer[row])])
        place = slice(int(self.place[row]), int(self.place[row] + self.ndim[row]))
        box = Box(tuple(self.begin[place].tolist()), tuple(self.box_shape[place].tolist()))
        return f"{title_of(structure.table.keys[structure.owner[at]])}, {box},"

    def _diverged(self, one: int, other: int) -> CkptError:
        first, second = (f"{self.nbytes[row]} bytes" for row in (one, other))
        detail = (
            f"{self._title(one)} has {first} on writer {self.writer[one]} and {second} on writer"
            f" {self.writer[other]}"
        )
        return err(Code.TENSOR_DIVERGED, detail)


def _first_rows(tables: Iterable[TensorTable]) -> list[int]:
    """Return the number of each table's first row in the concatenation of all tables."""
    return list(itertools.accumulate((len(table.keys) for table in tables), initial=0))[:-1]


def _number_keys(tables: Iterable[TensorTable]) -> Integers:
    """Return the number of each row's key in the order of all keys, for the rows of all tables."""
    keys = [key for table in tables for key in table.keys]
    numbers = {key: number for number, key in enumerate(sorted(set(keys)))}
    return np.array([numbers[key] for key in keys], np.int64)


def _number_declarers(structures: Sequence[Structure]) -> Integers:
    """Return the number of each box's declarer in the order of all names; 0 for no declarer."""
    rows = [one.declared_by.rows_with_text() for one in structures]
    names = sorted(
        {one.declared_by[row] for one, own in zip(structures, rows, strict=True) for row in own}
    )
    numbers = {name: number for number, name in enumerate(names, start=1)}
    found = []
    for one, own in zip(structures, rows, strict=True):
        of_tensors = np.zeros(len(one.box_count), np.int64)
        of_tensors[own] = [numbers[one.declared_by[row]] for row in own]
        found.append(np.repeat(of_tensors, one.box_count))
    return join_integers(found)
