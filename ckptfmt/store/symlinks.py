"""Symbolic links to checkpoints, and their atomic replacement by directories."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import stat
from typing import Final

from ckptfmt.errors import Code, err, remedy_of
from ckptfmt.store.posix import PosixCalls
from ckptfmt.store.protocol import TEMPORARY_PREFIX

#: The end of a temporary directory's name, after the link's name. An interrupted call leaves such
#: directories.
_LEFTOVER: Final = re.compile(r"[0-9a-f]{16}(?:-gone)?")


def is_link(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a symbolic link; False without a file of the path.

    A slash or ``/.`` at the path's end doesn't matter. Unlike `os.path.islink`, the function
    doesn't take a failed call for an answer: a save that replaces would write to the target of the
    link.

    Raises: StoreError(STORE_IO).
    """
    try:
        status = _look(_own_path(path))
    except OSError as error:
        detail = f"it can't be told whether this is a symbolic link: {error.strerror}"
        raise err(Code.STORE_IO, detail, where=str(path), remedy=remedy_of(error)) from error
    return status is not None and stat.S_ISLNK(status.st_mode)


def remove_link(path: str | os.PathLike[str]) -> bool:
    """Remove a symbolic link, and return whether the path was a link. The link's target stays.

    Raises: StoreError(STORE_IO).
    """
    if not is_link(path):
        return False
    try:
        os.unlink(_own_path(path))
    except OSError as error:
        detail = f"the symbolic link can't be removed: {error.strerror}"
        raise err(Code.STORE_IO, detail, where=str(path), remedy=remedy_of(error)) from error
    return True


def _own_path(path: str | os.PathLike[str]) -> str:
    """Return the absolute path of a file or link, with the links resolved up to its directory.

    The kernel resolves ``..`` behind a link in the link's target, unlike `os.path.abspath`. A
    missing directory counts as in `LocalStore`.

    Raises: OSError.
    """
    text = os.fsdecode(path)
    if "\0" in text:
        return text
    parent, name = os.path.split(text.rstrip("/"))
    while parent and name == ".":
        parent, name = os.path.split(parent.rstrip("/"))
    if name in ("", ".", ".."):
        return os.path.realpath(text)
    try:
        return os.path.join(os.path.realpath(parent, strict=True), name)
    except (FileNotFoundError, NotADirectoryError):
        return os.path.join(os.path.realpath(parent), name)


def _look(path: str | os.PathLike[str]) -> os.stat_result | None:
    """Return the status of a file or link; None without a file of the path. Raises: OSError."""
    try:
        return os.lstat(path)
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a null character
        return None


def detach_link(path: str | os.PathLike[str], *, calls: PosixCalls | None = None) -> None:
    """Replace a symbolic link to a directory atomically by a directory of hard links.

    The hard links lead to the same files. No data is copied, and the target of the link stays. A
    path that isn't a symbolic link stays unchanged; a dangling link is removed. The next call
    removes the temporary directories that an interrupted call left next to the path.

    Raises:
        CkptError: ``STORE_UNSUPPORTED`` where the file system can't exchange names or make hard
            links; the link is then unchanged. The errors of `is_link` and of opening a directory.
    """
    calls = PosixCalls() if calls is None else calls
    try:
        path = _own_path(path)
        parent, name = os.path.split(path)
        prefix = f"{TEMPORARY_PREFIX}{name}-"
        with contextlib.suppress(OSError):
            _remove_leftovers(parent, prefix)
        if not is_link(path):
            return
        target = os.path.realpath(path)
        copy = f"{prefix}{secrets.token_hex(8)}"
        directory = calls.open_root(parent)
        try:
            if _look(target) is not None:
                _link_tree(target, os.path.join(parent, copy))
                calls.fsync_directory(directory)
                calls.exchange(copy, name, directory)
            else:
                calls.unlink(name, directory)
            calls.fsync_directory(directory)
        finally:
            calls.close(directory)
            if os.path.lexists(os.path.join(parent, copy)):
                _remove_tree(os.path.join(parent, copy))
    except OSError as error:
        detail = f"the symbolic link can't give way to a directory: {error.strerror}"
        remedy = "Remove the link first, or save to the path that it leads to."
        raise err(Code.STORE_UNSUPPORTED, detail, where=str(path), remedy=remedy) from error


def _remove_leftovers(parent: str, prefix: str) -> None:
    for left in os.listdir(parent) if os.path.isdir(parent) else ():
        rest = left.removeprefix(prefix)
        if rest != left and _LEFTOVER.fullmatch(rest):
            # Rename first: a concurrent call can then not exchange a half-deleted directory.
            gone = os.path.join(parent, f"{prefix}{secrets.token_hex(8)}-gone")
            os.rename(os.path.join(parent, left), gone)
            _remove_tree(gone)


def _link_tree(source: str, copy: str) -> None:
    """Create a durable directory of hard links to the files of another directory."""
    os.mkdir(copy)
    for name in os.listdir(source):
        old = os.path.join(source, name)
        new = os.path.join(copy, name)
        if os.path.isdir(old) and not os.path.islink(old):
            _link_tree(old, new)
        elif not name.startswith(TEMPORARY_PREFIX):
            os.link(old, new, follow_symlinks=False)
    fd = os.open(copy, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _remove_tree(path: str) -> None:
    if os.path.islink(path) or not os.path.isdir(path):
        os.unlink(path)
    else:
        shutil.rmtree(path)
