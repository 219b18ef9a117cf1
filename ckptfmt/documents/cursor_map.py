"""The maps of a cursor's tree: getters that check types exactly and say the place of what is wrong."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Final, NoReturn

from ckptfmt import limits
from ckptfmt.errors import Code, err

#: Integers with more bits than this aren't printed.
_SHOWN_BITS: Final = 4096


@dataclasses.dataclass(frozen=True, slots=True)
class CursorMap:
    """A map of the tree, with its place; its getters check types exactly: True is no integer here."""

    members: dict[object, object]
    where: str
    #: Which clause says what members it has.
    clause: str = "REQ-CUR-002"

    @classmethod
    def of(cls, value: object, where: str, clause: str = "REQ-CUR-002") -> CursorMap:
        """Return the map that a value is. Raises: CURSOR_FORM."""
        if type(value) is not dict:
            refuse(f"a {type(value).__name__} where a map belongs", where, clause)
        return cls(value, where, clause)

    def check_names(self, *names: str) -> None:
        """Refuse other members than these. Raises: CURSOR_FORM."""
        if missing := [name for name in names if name not in self.members]:
            refuse(f"without {missing[0]!r}", self.where, self.clause)
        if unknown := [name for name in self.members if name not in names]:
            refuse(f"the unknown member {show_value(unknown[0])}", self.where, self.clause)

    def known(self, name: str, *known: str) -> str:
        """Return one of the words that this reader knows. Raises: CURSOR_FORM, FEATURE_UNSUPPORTED."""
        value = self.text(name)
        if value not in known:
            detail = f"{name} {value!r}; this reader knows {', '.join(map(repr, known))}"
            raise err(Code.FEATURE_UNSUPPORTED, detail, where=f"{self.where}/{name}", requirement="REQ-CUR-003")
        return value

    def inner(self, name: str) -> CursorMap:
        """Return a map in this one. Raises: CURSOR_FORM."""
        return CursorMap.of(self.members.get(name), f"{self.where}/{name}", self.clause)

    def items(self, name: str) -> list[object]:
        """Return a list. Raises: CURSOR_FORM."""
        value = self.members.get(name)
        if type(value) is not list:
            refuse(f"a {type(value).__name__} where a list belongs", f"{self.where}/{name}", self.clause)
        return value

    def maps(self, name: str) -> list[CursorMap]:
        """Return a list of maps, each with its place. Raises: CURSOR_FORM."""
        return [
            CursorMap.of(value, f"{self.where}/{name}/{i}", self.clause) for i, value in enumerate(self.items(name))
        ]

    def text(self, name: str) -> str:
        """Return a string of at most `NAME_NBYTES`. Raises: CURSOR_FORM."""
        value = self.members.get(name)
        if type(value) is not str or len(value.encode(errors="replace")) > limits.NAME_NBYTES:
            detail = f"not a string of at most {limits.NAME_NBYTES} bytes"
            refuse(detail, f"{self.where}/{name}", self.clause)
        return value

    def integer(self, name: str, most: int, *, least: int = 0) -> int:
        """Return an integer in a range. Raises: CURSOR_FORM."""
        return _integer(self.members.get(name), f"{self.where}/{name}", most, least, self.clause)

    def integers(self, name: str, most: int, *, count: int | None = None) -> tuple[int, ...]:
        """Return a list of integers, of `count` of them where that is given. Raises: CURSOR_FORM."""
        values = self.items(name)
        if count is not None and len(values) != count:
            refuse(f"{len(values)} integers where {count} belong", f"{self.where}/{name}", self.clause)
        return tuple(
            _integer(value, f"{self.where}/{name}/{i}", most, 0, self.clause) for i, value in enumerate(values)
        )


def refuse(detail: str, where: str, requirement: str) -> NoReturn:
    """Raise CURSOR_FORM."""
    raise err(Code.CURSOR_FORM, detail, where=where, requirement=requirement)


def show_value(value: object) -> str:
    """Return a value as messages show it.

    >>> show_value("a"), show_value(1 << 20_000)
    ("'a'", 'a value of the type int')
    """
    if type(value) in (str, int, bool, type(None)) and not (type(value) is int and value.bit_length() > _SHOWN_BITS):
        return f"{value!r:.80}"
    # What a list or a map holds can be any number, and Python refuses to print long ones.
    return f"a value of the type {type(value).__name__}"


def check_ascending(values: Sequence[int], where: str, requirement: str) -> None:
    """Refuse integers of which one isn't greater than the one before. Raises: CURSOR_FORM."""
    for before, after in itertools.pairwise(values):
        if before >= after:
            refuse(f"{after} comes after {before}; they ascend", where, requirement)


def _integer(value: object, where: str, most: int, least: int, clause: str) -> int:
    if type(value) is not int or not least <= value <= most:
        refuse(f"not an integer from {least} to {most}: {show_value(value)}", where, clause)
    return value
