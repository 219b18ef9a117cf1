"""What was parsed before: a saver meets the same registers and the same tables of tensors at every save.

A file is read anew each time, since what it holds is what counts. Only what these very bytes mean isn't found out
again: of a register that takes a millisecond, and a chain of thirty deltas asks for it a hundred and fifty times.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import dataclasses
from typing import TYPE_CHECKING, Final, TypeAlias

from ckptfmt.documents.manifest import Abort, Manifest, Tombstone, parse_register

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptfmt.documents.tables import TensorTable

Register: TypeAlias = Manifest | Abort | Tombstone

#: Of how many registers it is remembered: a few times as many as a checkpoint may refer to.
_COUNT: Final = 256
#: With more tables than this all are forgotten: they are a few where writers hold shards, and one each else.
_TABLE_COUNT: Final = 16


@dataclasses.dataclass(slots=True)
class _Memory:
    registers: collections.OrderedDict[bytes, Register] = dataclasses.field(default_factory=collections.OrderedDict)
    tables: dict[bytes, TensorTable] = dataclasses.field(default_factory=dict)


_MEMORY: Final[contextvars.ContextVar[_Memory | None]] = contextvars.ContextVar("_MEMORY", default=None)


@contextlib.contextmanager
def remembered() -> Iterator[None]:
    """Remember what was parsed, in this thread and while the context lasts."""
    token = _MEMORY.set(_Memory())
    try:
        yield
    finally:
        _MEMORY.reset(token)


def parse_known(content: bytes) -> Register:
    """Return what a decision register holds; see `parse_register`. Raises: as that, each time."""
    memory = _MEMORY.get()
    if memory is None:
        return parse_register(content)
    known = memory.registers
    if content not in known:
        known[content] = parse_register(content)
        if len(known) > _COUNT:
            known.popitem(last=False)
    known.move_to_end(content)
    return known[content]


def known_tables() -> dict[bytes, TensorTable]:
    """Return the tables of tensors that parts had, for `Part.parse` to take from and to add to."""
    memory = _MEMORY.get()
    return {} if memory is None else dict(memory.tables)


def remember_tables(tables: dict[bytes, TensorTable]) -> None:
    """Remember the tables that `known_tables` returned and what was added to them, unless they are too many."""
    memory = _MEMORY.get()
    if memory is not None:
        memory.tables = tables if len(tables) <= _TABLE_COUNT else {}
