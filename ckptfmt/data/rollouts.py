"""Rows of arrays of any length, in memory of a constant layout, for small deltas.

A replay buffer grows and shrinks all the time. A save with an array for each row would change the
structure of the checkpoint with every row, and could never be a delta. Here, each column lies in
segments of a fixed number and size. A save stores the blocks with new rows only.

A save may still read a segment while other threads append, and must not see a change. So a save
gets a copy of the open segment, which the next rows fill further. A full segment is never changed:
once all rows are removed, a new array replaces a segment seen by a save.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from ckptfmt.errors import Code, err

#: Largest size of a segment, in bytes.
_SEGMENT_NBYTES: Final = 8 << 20
#: Number of segments of a buffer below this size, and least number of expected rows in a segment.
_SEGMENTS: Final = 16
_SEGMENT_ROWS: Final = 64
_WHERE: Final = "Rollouts"
#: Columns of the table of rows before the places: the number of the append, from 1 on, and the key.
_HEAD: Final = 2
#: Numbers of a place: segment, first element, number of elements.
_PLACE: Final = 3


class _Column:
    """The elements of a column: segments, each with the number of its rows."""

    def __init__(self, name: str, dtype: np.dtype[Any], count: int, length: int) -> None:
        self.name = name
        self.dtype = dtype
        self.length = length
        self.segments = [np.zeros(length, dtype) for _ in range(count)]
        self.row_counts = [0] * count
        #: Segments seen by a save, which may still be reading.
        self.seen = [False] * count
        #: The segment to be filled further, and the number of elements in this segment.
        self.open = 0
        self.filled = 0

    def find(self, count: int) -> int | None:
        """Return a segment with room for `count` elements."""
        if self.filled + count <= self.length:
            return self.open
        total = len(self.segments)
        later = ((self.open + step) % total for step in range(total))
        return next((number for number in later if not self.row_counts[number]), None)

    def put(self, segment: int, values: NDArray[Any]) -> tuple[int, int, int]:
        """Append values to a segment from `find`; return the place."""
        if segment != self.open or self.filled + len(values) > self.length:
            if self.seen[segment]:
                self.segments[segment] = np.zeros_like(self.segments[segment])
                self.seen[segment] = False
            self.open = segment
            self.filled = 0
        begin = self.filled
        self.filled += len(values)
        self.segments[segment][begin : self.filled] = values
        self.row_counts[segment] += 1
        return segment, begin, len(values)


class Rollouts:
    """Rows of one-dimensional arrays by key, such as answers by the position of their prompt.

    Give the object in ``State(extra={"rollouts": rollouts})``. With ``Saving(delta="auto")`` or
    ``"smallest"``, a save stores the rows appended since the previous save. Any thread may call the
    methods.

    Args:
        columns: dtype of each column.
        capacity: largest number of rows.
        length: expected number of elements of a row, on average; or a mapping with a number for
            each column. The memory is allocated for ``capacity * length`` elements and two
            segments.
        evicts: whether a full buffer drops its oldest rows, as a replay buffer does. Otherwise
            `append` refuses.

    Raises: StateError(ARGUMENT).

    >>> rollouts = Rollouts({"tokens": "int32", "reward": "float32"}, capacity=100, length=16)
    >>> rollouts.append(7, tokens=[5, 3, 9], reward=0.5)
    >>> 7 in rollouts, len(rollouts), rollouts[7]["tokens"].tolist()
    (True, 1, [5, 3, 9])
    >>> rollouts.pop(7)["reward"].tolist(), len(rollouts)
    ([0.5], 0)
    """

    def __init__(
        self,
        columns: Mapping[str, DTypeLike],
        *,
        capacity: int,
        length: int | Mapping[str, int],
        evicts: bool = False,
    ) -> None:
        lengths = length if isinstance(length, Mapping) else dict.fromkeys(columns, length)
        if not columns or capacity < 1 or any(lengths.get(name, 0) < 1 for name in columns):
            detail = "columns, capacity and the length of each column are at least 1"
            raise err(Code.ARGUMENT, detail, where=_WHERE)
        self._lock = threading.Lock()
        self._evicts = evicts
        self._names = frozenset(columns)
        self._columns = []
        for name, given in columns.items():
            dtype = np.dtype(given)
            expected = capacity * lengths[name]
            least = max(expected // _SEGMENTS, _SEGMENT_ROWS * lengths[name])
            elements = min(least, _SEGMENT_NBYTES // dtype.itemsize)
            count = -(-expected // elements) + 2
            self._columns.append(_Column(name, dtype, count, elements))
        #: The table of rows; a row of zeros is free.
        self._rows = np.zeros((capacity, _HEAD + _PLACE * len(columns)), np.int64)
        #: Slots of the table by key, oldest first; and free slots. In a plain dict, the search for
        #: the oldest key passes over the places of all removed keys.
        self._slots: OrderedDict[int, int] = OrderedDict()
        self._free = list(range(capacity))[::-1]
        self._appended = 0

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, key: object) -> bool:
        return key in self._slots

    def __iter__(self) -> Iterator[int]:
        """Return an iterator over the present keys, oldest first."""
        with self._lock:
            return iter(list(self._slots))

    def append(self, key: int, **values: ArrayLike) -> None:
        """Add a row. A row of the same key is replaced.

        Args:
            key: number of the row, such as `Ticket.position`, below 2^63.
            values: array of each column; arrays of more dimensions are flattened.

        Raises: StateError(ARGUMENT) for a full buffer, for values unfit for the columns, and
            for a row longer than a segment: 64 times `length` is always allowed up to 8 MiB.
        """
        if values.keys() != self._names:
            detail = f"a row has the columns {sorted(values)}, the buffer {sorted(self._names)}"
            raise err(Code.ARGUMENT, detail, where=_WHERE)
        if not 0 <= key < 1 << 63:
            raise err(Code.ARGUMENT, f"the key {key!r} isn't from 0 to 2^63 - 1", where=_WHERE)
        arrays = [
            np.asarray(values[column.name]).astype(column.dtype, copy=False).reshape(-1)
            for column in self._columns
        ]
        for column, array in zip(self._columns, arrays, strict=True):
            if len(array) > column.length:
                detail = (
                    f"a row has {len(array)} elements of {column.name!r}, more than {column.length}"
                )
                remedy = "Pass a larger length= to Rollouts, or split the row."
                raise err(Code.ARGUMENT, detail, where=_WHERE, remedy=remedy)
        with self._lock:
            if key in self._slots:
                self._remove(key)
            places = self._find_room(arrays)
            slot = self._free.pop()
            self._appended += 1
            row = [self._appended, key]
            for column, place, array in zip(self._columns, places, arrays, strict=True):
                row += column.put(place, array)
            self._rows[slot] = row
            self._slots[key] = slot

    def __getitem__(self, key: int) -> dict[str, NDArray[Any]]:
        """Return copies of a row's arrays. Raises: KeyError."""
        with self._lock:
            return self._row(key)

    def pop(self, key: int) -> dict[str, NDArray[Any]]:
        """Remove a row and return its arrays. Raises: KeyError."""
        with self._lock:
            row = self._row(key)
            self._remove(key)
            return row

    def discard(self, key: int) -> None:
        """Remove a row, if there is one."""
        with self._lock:
            if key in self._slots:
                self._remove(key)

    def state_dict(self) -> dict[str, Any]:
        """Return the rows as arrays of a constant number and size.

        One segment of each column is copied. Later calls of other methods don't change the result.
        """
        with self._lock:
            for column in self._columns:
                column.seen = [number != column.open for number in range(len(column.seen))]
            return {
                "rows": self._rows.copy(),
                "filled": np.array(
                    [self._appended, *(n for c in self._columns for n in (c.open, c.filled))]
                ),
                "columns": {
                    column.name: [
                        segment if seen else segment.copy()
                        for segment, seen in zip(column.segments, column.seen, strict=True)
                    ]
                    for column in self._columns
                },
            }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Replace all rows by the rows of a `state_dict`.

        Raises: StateError(CONFIG_IDENTITY) if columns, capacity or lengths differ.
        """
        columns = state_dict["columns"]
        theirs = {name: [(one.dtype, one.shape) for one in columns[name]] for name in columns}
        ours = {c.name: [(one.dtype, one.shape) for one in c.segments] for c in self._columns}
        if theirs != ours or state_dict["rows"].shape != self._rows.shape:
            raise err(
                Code.CONFIG_IDENTITY,
                "the saved rollouts have other columns, another capacity or other lengths",
                where=_WHERE,
                remedy="Make Rollouts with the saved arguments.",
            )
        filled = [int(number) for number in state_dict["filled"]]
        with self._lock:
            self._rows = np.array(state_dict["rows"])
            live = np.flatnonzero(self._rows[:, 0])
            live = live[np.argsort(self._rows[live, 0])]
            keys = self._rows[live, 1].tolist()
            self._slots = OrderedDict(zip(keys, live.tolist(), strict=True))
            self._free = np.flatnonzero(self._rows[:, 0] == 0)[::-1].tolist()
            self._appended = filled[0]
            for number, column in enumerate(self._columns):
                column.segments = list(columns[column.name])
                column.seen = [True] * len(column.segments)
                column.open, column.filled = filled[1 + 2 * number : 3 + 2 * number]
                # Filled further, while the caller may keep the array.
                column.segments[column.open] = np.array(column.segments[column.open])
                column.seen[column.open] = False
                places = self._rows[live, _HEAD + _PLACE * number]
                column.row_counts = np.bincount(places, minlength=len(column.segments)).tolist()

    def _row(self, key: int) -> dict[str, NDArray[Any]]:
        places = self._rows[self._slots[key], _HEAD:].reshape(-1, _PLACE).tolist()
        return {
            column.name: column.segments[segment][begin : begin + count].copy()
            for column, (segment, begin, count) in zip(self._columns, places, strict=True)
        }

    def _remove(self, key: int) -> None:
        slot = self._slots.pop(key)
        segments = self._rows[slot, _HEAD::_PLACE].tolist()
        for column, segment in zip(self._columns, segments, strict=True):
            column.row_counts[segment] -= 1
        self._rows[slot] = 0
        self._free.append(slot)

    def _find_room(self, arrays: list[NDArray[Any]]) -> list[int]:
        """Return a segment for each array, if necessary after the removal of old rows.

        Raises: StateError(ARGUMENT).
        """
        while True:
            places = [
                column.find(len(array)) for column, array in zip(self._columns, arrays, strict=True)
            ]
            found = [place for place in places if place is not None]
            if self._free and len(found) == len(places):
                return found
            if not self._evicts or not self._slots:
                raise err(
                    Code.ARGUMENT,
                    f"the buffer is full: {len(self._slots)} rows of {len(self._rows)}",
                    where=_WHERE,
                    remedy="Remove rows with pop() or discard(); pass a larger capacity or length,"
                    " or evicts=True.",
                )
            self._remove(next(iter(self._slots)))
