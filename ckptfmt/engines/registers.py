"""Registers that were parsed before: a saver looks at the same ones at every save, of each base and of each checkpoint.

A file is read anew each time, since what it holds is what counts. Only what these very bytes mean isn't found out
again: that takes three milliseconds, and a chain of thirty deltas asks for it a hundred and fifty times.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
from typing import TYPE_CHECKING, Final, TypeAlias

from ckptfmt.documents.manifest import Abort, Manifest, Tombstone, parse_register

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Register", "parse_known", "registers_remembered"]

Register: TypeAlias = Manifest | Abort | Tombstone

#: Of how many registers it is remembered: a few times as many as a checkpoint may refer to.
_COUNT: Final = 256

_KNOWN: Final[contextvars.ContextVar[collections.OrderedDict[bytes, Register] | None]] = contextvars.ContextVar(
    "_KNOWN", default=None
)


@contextlib.contextmanager
def registers_remembered() -> Iterator[None]:
    """Remember what registers mean, in this thread and while the context lasts."""
    token = _KNOWN.set(collections.OrderedDict())
    try:
        yield
    finally:
        _KNOWN.reset(token)


def parse_known(content: bytes) -> Register:
    """Return what a decision register holds; see `parse_register`. Raises: as that, each time."""
    known = _KNOWN.get()
    if known is None:
        return parse_register(content)
    if content not in known:
        known[content] = parse_register(content)
        if len(known) > _COUNT:
            known.popitem(last=False)
    known.move_to_end(content)
    return known[content]
