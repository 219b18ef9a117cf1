"""Stores: one small protocol, a local directory, an in-memory object store, a recorder around either."""

from __future__ import annotations

import os

from ckptfmt.errors import Code, err
from ckptfmt.store.local import LocalStore
from ckptfmt.store.memory import MemoryStore
from ckptfmt.store.protocol import Buffer, Store, check_path

__all__ = ["Buffer", "LocalStore", "MemoryStore", "Store", "check_path", "open_store"]


def open_store(path_or_store: str | os.PathLike[str] | Store, *, writable: bool) -> Store:
    """Return the store that a caller of ckptfmt means: a `Store` as it is, a path as a `LocalStore`.

    Args:
        path_or_store: a store, or the path of a directory.
        writable: whether the caller will change anything; a directory is then made and tried out.

    Raises:
        CkptError: ``STORE_UNSUPPORTED`` for a URL, ``ARGUMENT`` for an empty path; the errors of opening a
            `LocalStore`.
    """
    if not isinstance(path_or_store, str | os.PathLike):
        return path_or_store
    path = os.fspath(path_or_store)
    if not path:
        raise err(Code.ARGUMENT, "the path is empty")
    if "://" in path:
        remedy = "Pass an object that implements ckptfmt.store.Store."
        raise err(Code.STORE_UNSUPPORTED, "URLs aren't supported", where=path, remedy=remedy)
    return LocalStore(path, writable=writable)
