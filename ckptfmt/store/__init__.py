"""Stores: one small protocol; a local directory, a bucket of an object store, and a model of the latter in memory."""

from __future__ import annotations

import difflib
import os
import posixpath
import re
from typing import Any, Final, TypeAlias
from urllib.parse import urlsplit

from ckptfmt.errors import Code, err
from ckptfmt.store.local import LocalStore
from ckptfmt.store.memory import MemoryStore
from ckptfmt.store.objects import ObjectStore, is_url
from ckptfmt.store.protocol import Buffer, Store, check_path

__all__ = [
    "Address",
    "Buffer",
    "LocalStore",
    "MemoryStore",
    "ObjectStore",
    "Store",
    "address_of",
    "check_path",
    "is_url",
    "open_address",
    "open_store",
    "split_path",
    "suggest_path",
]

#: What another process opens the same store by, in a message: a path, which needn't be text, or a URL with options.
Address: TypeAlias = bytes | dict[str, Any]

#: What `pathlib.Path` makes of a URL.
_SPOILT: Final = re.compile(r"(s3|gs|az|file):/[^/]")


def open_store(path_or_store: str | os.PathLike[str] | Store, *, writable: bool) -> Store:
    """Return the store that a caller of ckptfmt means: a `Store` as it is, a path or URL as what is there.

    Args:
        path_or_store: a store; the path of a directory; or a URL: ``file://``, or one that `ObjectStore` takes.
        writable: whether the caller will change anything; a directory is then made and tried out, a server tried out.

    Raises:
        CkptError: ``STORE_UNSUPPORTED`` for a URL of another kind, ``ARGUMENT`` for an empty path; the errors of
            opening a `LocalStore` or an `ObjectStore`.
    """
    if not isinstance(path_or_store, str | os.PathLike):
        if not callable(getattr(path_or_store, "list_names", None)):
            detail = f"a {type(path_or_store).__qualname__} where a path, a URL or a store is wanted"
            raise err(Code.ARGUMENT, detail, where="path", remedy="Give the path first, then the State.")
        return path_or_store
    path = os.fspath(path_or_store)
    if not path:
        raise err(Code.ARGUMENT, "the path is empty")
    if not isinstance(path_or_store, str) and _SPOILT.match(os.fsdecode(path)):
        remedy = "Pass the URL as a str: a Path makes one slash of two."
        raise err(Code.ARGUMENT, "this was a URL", where=path, remedy=remedy)
    if not is_url(path):
        _refuse_file(path, writable=writable)
        return LocalStore(path, writable=writable)
    parts = urlsplit(path)
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost"):
            raise err(Code.ARGUMENT, f"a file on {parts.netloc!r}", where=path, remedy="Write file:///the/path.")
        return LocalStore(path.partition("://")[2].removeprefix("localhost"), writable=writable)
    return ObjectStore(path, writable=writable)


def _refuse_file(path: str | bytes, *, writable: bool) -> None:
    """Raise where a path is that of a file, as of torch.save. Raises: FormatError(UNSAFE_FILE)."""
    if os.path.isfile(path):  # noqa: PTH113 - a path needn't be text
        remedy = "Give a directory, or a path where nothing is."
        if not writable:
            remedy = (
                "If it is a file of torch.save or of safetensors, make a checkpoint of it:"
                f" python -m ckptfmt convert {os.fsdecode(path)} imported --to ckptfmt"
            )
        folder, name = os.path.split(os.fsdecode(path))
        if name in ("manifest.json", "run.json"):
            remedy = f"Give its directory, {folder or '.'}"
        detail = "this is a file, and a checkpoint or a run is a directory"
        raise err(Code.UNSAFE_FILE, detail, where=os.fsdecode(path), requirement="REQ-CKP-002", remedy=remedy)


def split_path(path: str | os.PathLike[str]) -> tuple[str, str]:
    """Return the path or URL of what holds a directory, and the directory's name; symbolic links are resolved.

    >>> split_path("s3://bucket/run/step-00000400-l0001/")
    ('s3://bucket/run', 'step-00000400-l0001')
    """
    if is_url(path) and urlsplit(os.fspath(path)).scheme != "file":
        return posixpath.split(os.fspath(path).rstrip("/"))
    local = os.fspath(path).partition("://")[2] if is_url(path) else path
    return os.path.split(os.path.realpath(local))


def suggest_path(path: str) -> str:
    """Return the remedy where nothing is at a local path: what is there of it, and the name that was probably meant."""
    parent, name = os.path.split(path.rstrip("/"))
    while parent and not os.path.isdir(parent):  # noqa: PTH112 - a path needn't be text for pathlib
        parent, name = os.path.split(parent)
    try:
        names = os.listdir(parent or ".")  # noqa: PTH208 - as above
    except OSError:
        names = []
    near = difflib.get_close_matches(name, names, n=1)
    if near:
        return f"Did you mean {os.path.join(parent, near[0])}?"  # noqa: PTH118 - as it was typed
    remedy = "Give the directory of a checkpoint or of a run; `ckptfmt ls` lists both."
    return f"{parent or 'The working directory'} has nothing called {name}. {remedy}"


def address_of(store: Store) -> Address | None:
    """Return what another process of this machine opens the same store by; None if none can."""
    if isinstance(store, LocalStore):
        return os.fsencode(store.name)
    return store.address if isinstance(store, ObjectStore) else None


def open_address(address: Address, *, writable: bool) -> Store:
    """Open the store that `address_of` told of, in this process. Raises: as `open_store`."""
    if isinstance(address, bytes):
        return LocalStore(os.fsdecode(address), writable=writable)
    options = dict(address)
    return ObjectStore(options.pop("url"), writable=writable, **options)
