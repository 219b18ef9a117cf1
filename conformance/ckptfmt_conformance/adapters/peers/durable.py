"""Durable replacement of a file, as added by users of libraries without durable saves."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

__all__ = ["replace_durably"]


def replace_durably(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file under a temporary name, sync, and rename atomically.

    Args:
        path: the path of the file.
        write: writes the file to the given path.
    """
    temporary = path.with_name(path.name + ".tmp")
    write(temporary)
    _sync(temporary)
    temporary.replace(path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
