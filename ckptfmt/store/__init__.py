"""Stores: one small protocol, with a local directory, a bucket, and an object store in memory."""

from __future__ import annotations

import difflib
import itertools
import os
import posixpath
import re
from collections.abc import Sequence
from typing import Any, Final, TypeAlias
from urllib.parse import urlsplit

from ckptfmt.errors import CkptError, Code, err
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
    "check_apart",
    "check_path",
    "empty_path",
    "is_url",
    "local_path",
    "open_address",
    "open_store",
    "split_path",
    "suggest_path",
]

#: The address for another process to open the same store: a path, which needn't be text, or a URL
#: with options.
Address: TypeAlias = bytes | dict[str, Any]

#: A URL that `pathlib.Path` has shortened to one slash.
_SPOILT: Final = re.compile(r"(s3|gs|az|file):/[^/]")


def open_store(path_or_store: str | os.PathLike[str] | Store, *, writable: bool) -> Store:
    """Return the store for an argument of a caller: a `Store` unchanged, or a path or URL opened.

    Args:
        path_or_store: a store; the path of a directory; or a URL: ``file://``, or a URL for
            `ObjectStore`.
        writable: whether the caller will write. A directory is then created and tested, and a
            server is tested.

    Raises:
        CkptError: ``STORE_UNSUPPORTED`` for a URL of another kind, ``ARGUMENT`` for an empty path
            or another type; ``UNSAFE_FILE`` for the path of a file; the errors of opening a
            `LocalStore` or an `ObjectStore`.
    """
    if not isinstance(path_or_store, str | os.PathLike):
        if not callable(getattr(path_or_store, "list_names", None)):
            detail = (
                f"a {type(path_or_store).__qualname__} where a path, a URL or a store is wanted"
            )
            raise err(
                Code.ARGUMENT, detail, where="path", remedy="Give the path first, then the State."
            )
        return path_or_store
    path = os.fspath(path_or_store)
    if not path:
        raise empty_path("path")
    here = local_path(path)
    if here is None:
        return ObjectStore(path, writable=writable)
    _refuse_file(here, writable=writable)
    return LocalStore(here, writable=writable)


def empty_path(where: str) -> CkptError:
    """Return the error for an empty path.

    Args:
        where: the name of the argument.
    """
    remedy = (
        "Give the path of a directory or file, or a URL. Perhaps the path is from a variable"
        " that isn't set."
    )
    return err(Code.ARGUMENT, "the path is '', an empty text", where=where, remedy=remedy)


def local_path(path: str | os.PathLike[str] | Store) -> str | None:
    """Return the local path of a path or a ``file://`` URL; None for any other URL, and a store.

    Raises: StateError(ARGUMENT) for an incomplete URL, and for a file on another machine.

    >>> local_path("file:///data/run"), local_path("run"), local_path("s3://bucket/run")
    ('/data/run', 'run', None)
    """
    if not isinstance(path, str | os.PathLike):
        return None
    text = os.fspath(path)
    if _SPOILT.match(os.fsdecode(text)):
        remedy = (
            "Write two slashes, and pass the URL as a str: a Path makes one of two. A"
            " directory: ./s3:/..."
        )
        raise err(Code.ARGUMENT, "a URL with one slash", where=text, remedy=remedy)
    if not is_url(text):
        return text
    parts = urlsplit(text)
    if parts.scheme != "file":
        return None
    if parts.netloc not in ("", "localhost"):
        raise err(
            Code.ARGUMENT,
            f"a file on {parts.netloc!r}",
            where=text,
            remedy="Write file:///the/path.",
        )
    return text.partition("://")[2].removeprefix("localhost")


def _refuse_file(path: str | bytes, *, writable: bool) -> None:
    """Check that a path isn't a file's, such as of torch.save. Raises: FormatError(UNSAFE_FILE)."""
    if os.path.isfile(path):  # noqa: PTH113
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
        raise err(
            Code.UNSAFE_FILE,
            detail,
            where=os.fsdecode(path),
            requirement="REQ-CKP-002",
            remedy=remedy,
        )


def split_path(path: str | os.PathLike[str]) -> tuple[str, str]:
    """Return the path or URL of a directory's parent, and the directory's name.

    Symbolic links of a local path are resolved.

    >>> split_path("s3://bucket/run/step-00000400-l0001/")
    ('s3://bucket/run', 'step-00000400-l0001')
    """
    here = local_path(path)
    if here is None:
        return posixpath.split(os.fspath(path).rstrip("/"))
    return os.path.split(os.path.realpath(here))


def suggest_path(path: str) -> str:
    """Return the remedy for a missing local path: a similar name, or the existing part."""
    parent, name = os.path.split(path.rstrip("/"))
    while parent and not os.path.isdir(parent):  # noqa: PTH112
        parent, name = os.path.split(parent)
    try:
        names = os.listdir(parent or ".")  # noqa: PTH208
    except OSError:
        names = []
    near = difflib.get_close_matches(name, names, n=1)
    if near:
        return f"Did you mean {os.path.join(parent, near[0])}?"  # noqa: PTH118
    remedy = "Give the directory of a checkpoint or of a run; `ckptfmt ls` lists both."
    return f"{parent or 'The working directory'} has nothing called {name}. {remedy}"


def address_of(store: Store) -> Address | None:
    """Return the address of a store for other processes of this machine; None without one."""
    if isinstance(store, LocalStore):
        return os.fsencode(store.name)
    return store.address if isinstance(store, ObjectStore) else None


def open_address(address: Address, *, writable: bool) -> Store:
    """Open the store of an address from `address_of`. Raises: the errors of `open_store`."""
    if isinstance(address, bytes):
        return LocalStore(os.fsdecode(address), writable=writable)
    options = dict(address)
    return ObjectStore(options.pop("url"), writable=writable, **options)


def check_apart(copies: Sequence[Store]) -> None:
    """Check that no copy of a run equals another copy or lies inside another copy.

    Stores without a known address aren't compared.

    Raises: StateError(ARGUMENT).
    """
    for one, other in itertools.permutations(copies, 2):
        outer = _root_of(one)
        inner = _root_of(other)
        if (
            outer
            and inner
            and outer[0] == inner[0]
            and f"{inner[1]}/".startswith(f"{outer[1].rstrip('/')}/")
        ):
            detail = f"this is in {one.name}, of which it is to be a copy"
            raise err(
                Code.ARGUMENT, detail, where=other.name, remedy="Give each copy a place of its own."
            )


def _root_of(store: Store) -> tuple[Any, str] | None:
    """Return the place of a store, and its root there; None if the address is unknown."""
    address = address_of(store)
    if isinstance(address, bytes):
        return "local", os.path.realpath(os.fsdecode(address))
    if address is None:
        return None
    return [value for name, value in address.items() if name != "url"], address["url"]
