"""Packed arrays and columns: the tables of index and parts. Spec: REQ-DOC-024, REQ-IDX-002, REQ-IDX-003."""

from __future__ import annotations

import itertools
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ckptfmt import limits
from ckptfmt.errors import CkptError, Code, err

__all__ = ["Columns", "Integers", "dump_packed", "parse_packed"]

Integers = NDArray[np.int64]

_WIDTHS: Final = (1, 2, 4, 8)


def dump_packed(values: ArrayLike) -> list[object]:
    r"""Return non-negative integers as ``[width, bytes]``: little-endian, in the smallest width that holds them all.

    >>> dump_packed([1, 2, 300])
    [2, b'\x01\x00\x02\x00,\x01']
    """
    array = np.asarray(values, dtype=np.int64)
    width = _width(array)
    return [width, array.astype(f"<u{width}").tobytes()]


def parse_packed(value: object, where: str) -> Integers:
    """Return the integers of a packed array.

    Raises: FormatError(PACKED_FORM). Spec: REQ-DOC-024.
    """
    match value:
        case [int() as width, bytes() as content] if (
            type(width) is int and width in _WIDTHS and len(content) % width == 0
        ):
            array = np.frombuffer(content, dtype=f"<u{width}")
            signed = array.astype(np.int64)
            if (signed >= 0).all() and _width(signed) == width:
                return signed
    raise err(Code.PACKED_FORM, "not [width, bytes] in the smallest width", where=where, requirement="REQ-DOC-024")


def _width(array: Integers) -> int:
    greatest = int(array.max(initial=0))
    return next(width for width in _WIDTHS if greatest < 1 << (8 * width - (width == 8)))


class Columns:
    """Typed access to one map of columns; every complaint names the place.

    Args:
        value: what stands there.
        keys: exactly the keys that the map has.
        where: file and JSON pointer of the map, for messages.
    """

    def __init__(self, value: object, keys: tuple[str, ...], where: str) -> None:
        if not isinstance(value, dict) or set(value) != set(keys):
            found = ", ".join(sorted(value)) if isinstance(value, dict) else type(value).__name__
            raise err(
                Code.DOC_SCHEMA,
                f"expected a map of {', '.join(keys)}; found {found[:200]}",
                where=where,
                requirement="REQ-DOC-011",
            )
        self._value: dict[str, Any] = value
        self._where = where

    def place(self, key: str) -> str:
        """Return the place of a member, for messages."""
        return f"{self._where}/{key}" if "#" in self._where else f"{self._where}#/{key}"

    def any(self, key: str) -> Any:  # noqa: ANN401 - whatever stands there
        """Return a member as it stands."""
        return self._value[key]

    def columns(self, key: str, keys: tuple[str, ...]) -> Columns:
        """Return a member that is a map of columns itself."""
        return Columns(self._value[key], keys, self.place(key))

    def packed(self, key: str, *, count: int | None = None, below: int = limits.ELEMENTS + 1) -> list[int]:
        """Return a packed column of `count` entries, each less than `below`."""
        array = parse_packed(self._value[key], self.place(key))
        if (
            (count is not None and len(array) != count)
            or int(array.max(initial=0)) >= below > 0
            or (below == 0 and len(array))
        ):
            raise self.broken(key, f"{len(array)} entries up to {array.max(initial=0)}; {count} below {below} expected")
        return [int(entry) for entry in array]

    def strings(self, key: str, *, count: int | None = None, limit_nbytes: int = limits.NAME_NBYTES) -> list[str]:
        """Return a column of `count` strings."""
        value = self._value[key]
        if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
            raise self.broken(key, "not a list of strings")
        if count is not None and len(value) != count:
            raise self.broken(key, f"{len(value)} entries where {count} are expected")
        if any(len(entry.encode()) > limit_nbytes for entry in value):
            raise err(
                Code.LIMIT_EXCEEDED,
                f"a name longer than {limit_nbytes} bytes",
                where=self.place(key),
                requirement="REQ-LIM-001",
            )
        return value

    def blobs(self, key: str, *, count: int) -> list[bytes]:
        """Return a column of `count` byte strings."""
        value = self._value[key]
        if not isinstance(value, list) or len(value) != count or not all(isinstance(entry, bytes) for entry in value):
            raise self.broken(key, f"not a list of {count} byte strings")
        return value

    def fixed(self, key: str, *, count: int, nbytes: int) -> list[bytes]:
        """Return a column of `count` byte strings of `nbytes` bytes each, stored one after the other."""
        value = self._value[key]
        if not isinstance(value, bytes) or len(value) != count * nbytes:
            raise self.broken(key, f"not {count} times {nbytes} bytes")
        return [value[begin : begin + nbytes] for begin in range(0, len(value), nbytes)]

    def broken(self, key: str, detail: str) -> CkptError:
        """Return the error for a column that doesn't fit."""
        return err(Code.COLUMN_FORM, detail, where=self.place(key), requirement="REQ-IDX-002")

    def check_increasing(self, key: str, rows: list[Any]) -> None:
        """Raise unless `rows`, the rows of this table by which it is sorted, increase strictly. Spec: REQ-IDX-003."""
        if any(a >= b for a, b in itertools.pairwise(rows)):
            raise err(
                Code.COLUMN_ORDER, "rows aren't sorted and unique", where=self.place(key), requirement="REQ-IDX-003"
            )
