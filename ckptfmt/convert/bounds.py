"""What a foreign source may make of itself: how much of its stored bytes, and which files.

A pickle of 2 KB can refer to one dict along 2^30 paths, a tensor of one element can be 2^36 elements by a stride of 0,
and an index can name a file elsewhere. What is read is bounded by what is stored, and by its directory.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

from ckptfmt.errors import Code, err

#: Plain values that a source may hold, whatever its size. A scalar counts one, a container eight, text one for each
#: eight bytes.
_VALUES: Final = 100_000
#: More of them for each byte of the pickle: what is stored once and referred to several times.
_VALUES_RATIO: Final = 2
#: Bytes of tensors that a source may have, whatever its size.
_TENSORS_NBYTES: Final = 64 << 20
#: More of them for each byte of the source: tensors may show the same memory, or repeat it with a stride of 0.
_TENSORS_RATIO: Final = 16


class Budget:
    """How much a source may still make of what it stores."""

    def __init__(self, limit: int, *, what: str, where: str, remedy: str) -> None:
        self.left = limit
        self._said = (f"it makes more than {limit:,} {what}", where, remedy)

    def spend(self, count: int) -> None:
        """Take so much away. Raises: FormatError(LIMIT_EXCEEDED)."""
        self.left -= count
        if self.left < 0:
            detail, where, remedy = self._said
            raise err(Code.LIMIT_EXCEEDED, detail, where=where, remedy=remedy)


def value_budget(nbytes: int, *, where: str) -> Budget:
    """Return the budget of the plain values that a pickle of so many bytes may expand to."""
    return Budget(
        _VALUES + _VALUES_RATIO * nbytes,
        what=f"plain values of {nbytes:,} bytes",
        where=where,
        remedy="Save it anew, with what it refers to many times stored as often, or once.",
    )


def tensor_budget(nbytes: int, *, where: str) -> Budget:
    """Return the budget of the bytes of tensors that a source of so many bytes may have."""
    return Budget(
        _TENSORS_NBYTES + _TENSORS_RATIO * nbytes,
        what=f"bytes of tensors of {nbytes:,} bytes that are stored",
        where=where,
        remedy="Save it anew with contiguous() of tensors that repeat few elements, or without them.",
    )


def member_of(root: Path, name: object, *, named_by: str) -> Path:
    """Return the path of a file that a source's own document names: a regular file of its directory.

    A symbolic link may lead to another file of the directory, or to the ``blobs`` of the Hugging Face cache of which
    the directory is a snapshot; files in that cache are such links.

    Args:
        root: the source's directory.
        name: as the document says it.
        named_by: the document, for messages.

    Raises: FormatError(UNSAFE_PATH, UNSAFE_FILE); IntegrityError(FILE_MISSING).
    """
    if type(name) is not str or name in ("", ".", "..") or "/" in name or "\0" in name or os.sep in name:
        raise err(Code.UNSAFE_PATH, f"a file called {str(name)[:200]!r}", where=named_by)
    path = root / name
    try:
        kind = path.lstat().st_mode
        resolved = path.resolve(strict=True)
        regular = stat.S_ISREG(resolved.stat().st_mode)
    except (OSError, ValueError, RuntimeError):
        remedy = "Fetch the missing file, or copy the directory again."
        raise err(Code.FILE_MISSING, f"{named_by} names it", where=str(path), remedy=remedy) from None
    home = root.resolve()
    blobs = [home.parent.parent / "blobs"] if home.parent.name == "snapshots" else []
    if stat.S_ISLNK(kind) and not any(resolved.parent == place for place in (home, *blobs)):
        remedy = "Replace the link by the file, if you trust it."
        raise err(Code.UNSAFE_FILE, "it is a link that leads out of the directory", where=str(path), remedy=remedy)
    if not regular:
        raise err(Code.UNSAFE_FILE, "it is no regular file", where=str(path))
    return path
