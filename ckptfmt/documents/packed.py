"""Packed arrays and columns: the tables of index and parts, and long lists in trees.

Spec: REQ-DOC-024, REQ-DOC-026, REQ-IDX-002, REQ-TRE-010, REQ-TRE-011.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import Any, Final, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ckptfmt import limits
from ckptfmt.digest import DIGEST_NBYTES
from ckptfmt.documents.msgpk import Weight
from ckptfmt.errors import CkptError, Code, err

Integers = NDArray[np.int64]

_WIDTHS: Final = (1, 2, 4, 8)


def dump_packed(values: ArrayLike) -> list[object]:
    r"""Return non-negative integers as ``[width, bytes]``, in the smallest sufficient width.

    The bytes are stored in planes, the lowest byte of every integer first, which zlib compresses
    well.

    >>> dump_packed([1, 2, 300])
    [2, b'\x01\x02,\x00\x00\x01']
    """
    array = np.ascontiguousarray(values, dtype=np.int64)
    width = _width(int(array.max(initial=0)))
    if width == 1:
        return [1, array.astype(np.uint8).tobytes()]
    return [width, array.astype(f"<u{width}").view(np.uint8).reshape(-1, width).T.tobytes()]


def parse_packed(value: object, where: str, *, count: int | None = None) -> Integers:
    """Return the integers of a packed array.

    Args:
        count: the expected number of integers, if known; checked before an array is allocated.

    Raises: FormatError(PACKED_FORM, COLUMN_FORM). Spec: REQ-DOC-024.
    """
    match value:
        case [int() as width, bytes() as content] if (
            type(width) is int and width in _WIDTHS and len(content) % width == 0
        ):
            if count is not None and len(content) != count * width:
                detail = f"{len(content) // width} entries where {count} are expected"
                raise err(Code.COLUMN_FORM, detail, where=where, requirement="REQ-IDX-002")
            planes = np.frombuffer(content, np.uint8).reshape(width, -1)
            # A non-zero upper half of the planes shows that no smaller width fits; the last plane
            # shows that int64 fits.
            if width == 1 or (
                planes[width // 2 :].any() and (width < 8 or int(planes[-1].max()) < 0x80)
            ):
                integers = (
                    np.ascontiguousarray(planes.T).view(f"<u{width}") if width > 1 else planes
                )
                return integers.reshape(-1).astype(np.int64)
    raise err(
        Code.PACKED_FORM,
        "not [width, bytes] in the smallest width",
        where=where,
        requirement="REQ-DOC-024",
    )


def _width(greatest: int) -> int:
    return next(width for width in _WIDTHS if greatest < 1 << (8 * width - (width == 8)))


def join_integers(arrays: Sequence[Integers]) -> Integers:
    """Return the concatenation of some arrays; an empty array for no arrays."""
    return np.concatenate(arrays) if arrays else np.zeros(0, np.int64)


def fold(steps: Integers) -> Integers:
    """Return integers of both signs as non-negative integers: 2s for s, 2s - 1 for -s.

    >>> fold(np.array([0, -1, 1, -2])).tolist()
    [0, 1, 2, 3]
    """
    folded: Integers = np.where(steps < 0, -2 * steps - 1, 2 * steps)
    return folded


def unfold(folded: Integers) -> Integers:
    """Return the integers from the result of `fold`."""
    steps: Integers = (folded >> 1) ^ -(folded & 1)
    return steps


def total_of(counts: Integers) -> int:
    """Return the sum of counts. A malformed file may have a sum that overflows an int64."""
    return int(counts.sum()) if int(counts.max(initial=0)) < 1 << 32 else sum(counts.tolist())


def spread(first: Integers, counts: Integers) -> Integers:
    """Return for each row `counts` consecutive integers that begin with `first`.

    >>> spread(np.array([5, 0]), np.array([2, 3])).tolist()
    [5, 6, 0, 1, 2]
    """
    begins = np.repeat(first - (np.cumsum(counts) - counts), counts)
    return begins + np.arange(len(begins))


def make_integers(values: Any) -> Integers:
    """Return an array of integers."""
    return np.array(list(values), np.int64)


class Strings(Sequence[str]):
    """A column of strings in its stored form, a single text.

    A string is cut out only when requested.

    Args:
        ends: end of each string in bytes. Without `begins`, each string begins at the end of the
            previous string.
        content: the text in UTF-8; all cuts lie between characters.
        begins: begin of each string in bytes, if the strings aren't consecutive.
    """

    __slots__ = ("_begins", "_content", "_ends")

    def __init__(self, ends: Integers, content: bytes, begins: Integers | None = None) -> None:
        self._begins = (
            np.concatenate([np.zeros(1, np.int64), ends[:-1]])[: len(ends)]
            if begins is None
            else begins
        )
        self._ends = ends
        self._content = content

    @classmethod
    def of(cls, strings: Sequence[str]) -> Strings:
        """Return strings as a column."""
        return cls(
            np.cumsum(make_integers(len(string.encode()) for string in strings)),
            "".join(strings).encode(),
        )

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, at: int) -> str: ...
    @overload
    def __getitem__(self, at: slice) -> list[str]: ...
    def __getitem__(self, at: int | slice) -> str | list[str]:
        if isinstance(at, slice):
            return self.tolist()[at]
        return self._content[self._begins[at] : self._ends[at]].decode()

    def take(self, rows: NDArray[np.intp]) -> Strings:
        """Return some of the strings in a given order, without cutting them out."""
        return Strings(self._ends[rows], self._content, self._begins[rows])

    def rows_with_text(self) -> list[int]:
        """Return the numbers of the non-empty strings."""
        found: list[int] = np.flatnonzero(self._ends > self._begins).tolist()
        return found

    def tolist(self) -> list[str]:
        """Return all strings."""
        bounds = zip(self._begins.tolist(), self._ends.tolist(), strict=True)
        return [self._content[begin:end].decode() for begin, end in bounds]


def dump_strings(strings: Sequence[str]) -> list[object]:
    r"""Return strings as ``[lengths, text]``: packed lengths in UTF-8, and the concatenation.

    >>> dump_strings(["layers.0.w", "é"])
    [[1, b'\n\x02'], 'layers.0.wé']
    """
    text = "".join(strings)
    nbytes = (
        [len(string) for string in strings]
        if text.isascii()
        else [len(string.encode()) for string in strings]
    )
    return [dump_packed(nbytes), text]


class RowBudget:
    """The number of rows and extents left for a document's tables, from its stored size.

    Spec: REQ-DOC-029.
    """

    __slots__ = ("_extents", "_rows")

    def __init__(self, most: Weight) -> None:
        self._rows = most.rows
        self._extents = most.extents

    def take(self, where: str, *, rows: int = 0, extents: int = 0) -> None:
        """Subtract rows and extents before they are built. Raises: FormatError(LIMIT_EXCEEDED)."""
        self._rows -= rows
        self._extents -= extents
        if self._rows < 0 or self._extents < 0:
            detail = (
                "more rows, or extents, than a document may have of which so few bytes are stored"
            )
            raise err(Code.LIMIT_EXCEEDED, detail, where=where, requirement="REQ-DOC-029")


class Columns:
    """Typed access to one map of columns. Errors name the place in the file.

    Args:
        value: the value found in the document.
        keys: the exact keys of the map.
        where: file and JSON pointer of the map, for messages.
        budget: the rest of the document's budget; None for no limit.
    """

    __slots__ = ("_budget", "_value", "_where")

    def __init__(
        self, value: object, keys: tuple[str, ...], where: str, *, budget: RowBudget | None = None
    ) -> None:
        if not isinstance(value, dict) or value.keys() != set(keys):
            found = ", ".join(sorted(value)) if isinstance(value, dict) else type(value).__name__
            raise err(
                Code.DOC_SCHEMA,
                f"expected a map of {', '.join(keys)}; found {found[:200]}",
                where=where,
                requirement="REQ-DOC-011",
            )
        self._value: dict[str, Any] = value
        self._where = where
        self._budget = budget

    def place(self, key: str) -> str:
        """Return the place of a member, for messages."""
        return f"{self._where}/{key}" if "#" in self._where else f"{self._where}#/{key}"

    def any(self, key: str) -> Any:
        """Return a member unchanged."""
        return self._value[key]

    def columns(self, key: str, keys: tuple[str, ...]) -> Columns:
        """Return a member that is a map of columns."""
        return Columns(self._value[key], keys, self.place(key), budget=self._budget)

    def take(self, key: str, *, rows: int = 0, extents: int = 0) -> None:
        """Subtract rows and extents from the budget before they are built.

        Raises: FormatError(LIMIT_EXCEEDED).
        """
        if self._budget is not None:
            self._budget.take(self.place(key), rows=rows, extents=extents)

    def packed(
        self, key: str, *, count: int | None = None, below: int = limits.ELEMENTS + 1
    ) -> Integers:
        """Return a packed column of `count` entries, each less than `below`.

        Without `count`, the entries are subtracted from the budget as rows.
        """
        if count is None:
            self.take(key, rows=_entry_count(self._value[key]))
        array = parse_packed(self._value[key], self.place(key), count=count)
        if len(array) and int(array.max()) >= below:
            raise self.broken(key, f"an entry of {array.max()}, not below {below}")
        return array

    def strings(
        self, key: str, *, count: int | None = None, limit_nbytes: int = limits.NAME_NBYTES
    ) -> Strings:
        """Return a column of `count` strings, each of at most `limit_nbytes` bytes.

        Without `count`, the strings are subtracted from the budget as rows.

        Spec: REQ-DOC-026, REQ-DOC-029.
        """
        match self._value[key]:
            case [lengths, str() as text]:
                if count is None:
                    self.take(key, rows=_entry_count(lengths))
                nbytes = parse_packed(lengths, self.place(key), count=count)
            case _:
                raise self.broken(key, "not [lengths, text]")
        if len(nbytes) and int(nbytes.max()) > limit_nbytes:
            raise err(
                Code.LIMIT_EXCEEDED,
                f"a name longer than {limit_nbytes} bytes",
                where=self.place(key),
                requirement="REQ-LIM-001",
            )
        content = text.encode()
        if int(nbytes.sum()) != len(content) or not (
            text.isascii() or _cuts_characters(nbytes, content)
        ):
            raise self.broken(
                key, f"lengths that don't cut a text of {len(content)} bytes into strings"
            )
        return Strings(np.cumsum(nbytes), content)

    def texts(self, key: str) -> list[str]:
        """Return a member that is an array of strings."""
        value = self._value[key]
        if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
            raise self.broken(key, "not a list of strings")
        return value

    def blobs(self, key: str, *, count: int) -> list[bytes]:
        """Return a column of `count` byte strings."""
        value = self._value[key]
        if (
            not isinstance(value, list)
            or len(value) != count
            or not all(isinstance(entry, bytes) for entry in value)
        ):
            raise self.broken(key, f"not a list of {count} byte strings")
        return value

    def digests(self, key: str, *, count: int) -> bytes:
        """Return a column of `count` concatenated digests."""
        value = self._value[key]
        if not isinstance(value, bytes) or len(value) != count * DIGEST_NBYTES:
            raise self.broken(key, f"not {count} digests")
        return value

    def broken(self, key: str, detail: str, requirement: str = "REQ-IDX-002") -> CkptError:
        """Return the error for a malformed column."""
        return err(Code.COLUMN_FORM, detail, where=self.place(key), requirement=requirement)

    def check_increasing(self, key: str, rows: Sequence[Any]) -> None:
        """Raise unless `rows`, the sort keys of this table's rows, increase strictly.

        Spec: REQ-IDX-003.
        """
        if any(a >= b for a, b in itertools.pairwise(rows)):
            raise self.unsorted(key)

    def unsorted(
        self,
        key: str,
        detail: str = "rows aren't sorted and unique",
        requirement: str = "REQ-IDX-003",
    ) -> CkptError:
        """Return the error for rows that aren't in the required order."""
        return err(Code.COLUMN_ORDER, detail, where=self.place(key), requirement=requirement)


def _entry_count(value: object) -> int:
    """Return the number of entries of a packed array; 0 for values that the parser rejects."""
    match value:
        case [int() as width, bytes() as content] if width in _WIDTHS:
            return len(content) // width
    return 0


def _cuts_characters(nbytes: Integers, content: bytes) -> bool:
    """Return whether no string begins within a character: with a byte of the form 10xxxxxx."""
    begins = (np.cumsum(nbytes) - nbytes)[nbytes > 0]
    return not ((np.frombuffer(content, np.uint8)[begins] & 0xC0) == 0x80).any()


# --- lists of numbers or strings in a tree --------------------------------------------------------

#: NumPy formats of the numbers in a packed list.
_NUMBERS: Final = {
    "bool": "?",
    "float64": "<f8",
    **{f"uint{bits}": f"<u{bits // 8}" for bits in (8, 16, 32, 64)},
    **{f"int{bits}": f"<i{bits // 8}" for bits in (8, 16, 32, 64)},
}
_BITS: Final = (8, 16, 32, 64)


def pack_items(values: Collection[Any]) -> list[object] | None:
    r"""Return kind and bytes of a list of numbers or strings; None if the list isn't packed.

    >>> pack_items([True, False] * 8)
    ['bool', b'\x01\x00\x01\x00\x01\x00\x01\x00\x01\x00\x01\x00\x01\x00\x01\x00']
    """
    kinds = set(map(type, values)) if len(values) >= limits.COMPACT_ITEMS else set()
    if len(kinds) != 1:
        return None
    (kind,) = kinds
    if kind is str:
        try:
            return ["str", *dump_strings(list(values))]
        except UnicodeEncodeError:
            return None  # an error for the single string names its place
    name = _number_kind(kind, values)
    return None if name is None else [name, np.array(list(values), _NUMBERS[name]).tobytes()]


def _number_kind(kind: type, values: Collection[Any]) -> str | None:
    """Return the name of the smallest dtype for values of one type, unsigned if possible."""
    if kind is bool:
        return "bool"
    if kind is float:
        return "float64"
    if kind is not int:
        return None
    least = min(values)
    most = max(values)
    if least >= 0:
        return next((f"uint{bits}" for bits in _BITS if most < 1 << bits), None)
    return next(
        (f"int{bits}" for bits in _BITS if -1 << bits - 1 <= least and most < 1 << bits - 1), None
    )


def unpack_items(items: list[Any], *, where: str) -> list[Any]:
    """Return the entries from the result of `pack_items`.

    Raises: ValueError, TypeError, KeyError or FormatError for items that `pack_items` can't return.
    """
    kind = items[0]
    content = items[1:]
    if kind == "str":
        values: list[Any] = (
            Columns({"": content}, ("",), where).strings("", limit_nbytes=len(content[1])).tolist()
        )
    else:
        (numbers,) = content
        values = np.frombuffer(numbers, _NUMBERS[kind]).tolist()
    if pack_items(values) != items:
        raise ValueError
    return values
