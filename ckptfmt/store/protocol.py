"""The protocol of stores: the only interface through which ckptfmt reads and writes durable bytes.

A store holds files under a root. Paths are relative to the root, with ``/`` between components, on
every kind of store. There are two kinds of store, and the same code works on both:

- a *file system* has directories; a new name is durable only after `Store.sync`;
- an *object store* has flat keys; acknowledged requests are durable, and `Store.sync` does nothing.

Every implementation keeps three promises, on which crash safety depends:

1. **Exclusive.** Of any number of concurrent `Store.create` calls on one path, on any number of
   machines, at most one succeeds. A check before the write isn't sufficient: the implementation
   needs ``link``, ``renameat2(RENAME_NOREPLACE)`` or ``PUT If-None-Match: *``. Object stores accept
   no such condition for a multipart upload. There a store may only check for an existing object
   before it uploads `SizedChunks`, and callers give such files unique names.
2. **Whole.** A path is either missing, or has all bytes that were passed. No reader sees a part,
   not even after a crash.
3. **Honest about the unknown.** A call whose request or answer may be lost raises
   ``STORE_NO_ANSWER``, never another code. The caller then reads back, and deletes no file until
   the outcome is known.

Every call may raise ``STORE_IO``, ``STORE_ACCESS`` and ``STORE_NO_ANSWER``; calls that write may
also raise ``NO_SPACE``. The docstrings name further errors. Several threads may call a store at
once.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol, TypeAlias, TypeVar

from ckptfmt.errors import CkptError, Code, err

Item = TypeVar("Item")
Answer = TypeVar("Answer")

#: Bytes to write: C-contiguous.
Buffer: TypeAlias = bytes | bytearray | memoryview

# Inside a class with a method `list`, the built-in type has no accessible name.
Names: TypeAlias = list[str]

#: Prefix of a store's own unfinished files. Callers can't use such names, and listings omit them.
TEMPORARY_PREFIX: Final = ".tmp-"

#: Alignment of addresses, positions and sizes in direct reads and writes, in bytes: the requirement
#: of common devices.
PAGE_NBYTES: Final = 4096

#: Maximum length of a path's component, in bytes of UTF-8: the limit of common file systems.
COMPONENT_NBYTES: Final = 255

#: Maximum number of concurrent calls in `call_each`.
CALLS_AT_ONCE: Final = 16

_FORBIDDEN: Final = {"\\", "\x7f", *map(chr, range(0x20))}


class SizedChunks:
    """The chunks of a possibly large file, with its size. A store may preallocate the file.

    Args:
        nbytes: the size in bytes; None where only the last chunk reveals the size.
        most_nbytes: an upper bound of the size, used where `nbytes` is None.
    """

    def __init__(
        self, chunks: Iterable[Buffer], nbytes: int | None, *, most_nbytes: int = 0
    ) -> None:
        self._chunks = chunks
        self.nbytes: Final = nbytes
        self.most_nbytes: Final = most_nbytes if nbytes is None else nbytes

    def __iter__(self) -> Iterator[Buffer]:
        return iter(self._chunks)


class RangeReader(Protocol):
    """An open file for range reads."""

    def read_into(self, byte_begin: int, nbytes: int, buffer: memoryview, /) -> memoryview:
        """Read exactly ``[byte_begin, byte_begin + nbytes)``, and return a view of these bytes.

        The view usually lies in `buffer`. The rest of `buffer` has undefined contents afterwards: a
        file system may read whole pages by direct I/O. A store whose client has received the bytes
        in separate memory returns a view of that memory. The caller releases the view before the
        next use of `buffer`.

        Args:
            buffer: writable memory that starts at a page boundary, at least two pages
                (`PAGE_NBYTES`) larger than `nbytes`.

        Raises:
            CkptError: ``FILE_NBYTES`` if the file is too short.

        Spec: REQ-CKP-003
        """


@dataclasses.dataclass(frozen=True, slots=True)
class FunctionReader:
    """A `RangeReader` made of a function."""

    read_into: Callable[[int, int, memoryview], memoryview]


class FileSource(Protocol):
    """A source of files: a `Store`, or a process that reads from a store.

    The methods are those of `Store`.
    """

    def nbytes(self, path: str) -> int:
        """Return a file's size in bytes."""

    def read(self, path: str, *, limit_nbytes: int) -> bytes:
        """Return a whole small file."""

    def open_ranges(self, path: str) -> AbstractContextManager[RangeReader]:
        """Open a file for many range reads."""


class Store(Protocol):
    """Files under a root. Each file is created whole and at most once."""

    @property
    def name(self) -> str:
        """The place in words, for messages: a directory, or a bucket with a prefix."""

    @property
    def is_remote(self) -> bool:
        """Whether each call is a network request, with a latency even for a small request.

        Callers then make several and larger requests at once, and `waits` returns True for every
        file.
        """

    def create(self, path: str, chunks: Iterable[Buffer]) -> None:
        """Create the file `path` from `chunks`, exclusively and whole; make missing directories.

        The contents are durable before the name appears. The name is durable after `sync` of its
        directory. When this call raises a CkptError, the file wasn't created and will not be
        created later, unless the code is ``STORE_NO_ANSWER``. After ``STORE_NO_ANSWER`` the file
        exists, is missing, or (object stores) may still appear; the creation is exclusive in each
        case.

        Args:
            path: the file's path, valid for `check_path`.
            chunks: the contents in order, as `SizedChunks` for a possibly large file. The chunks
                are drawn once, and not far ahead of the write. A chunk must stay unchanged until
                `create` returns.

        Raises:
            CkptError: ``STORE_EXISTS`` if any file or directory has the path; ``UNSAFE_PATH``;
                ``UNSAFE_FILE`` if a parent isn't a directory. An error of `chunks` is raised
                unchanged; an OSError is raised as a store error.

        Spec: REQ-CKP-001, REQ-CKP-002
        """

    def replace(self, path: str, data: bytes) -> None:
        """Write `data` to `path` atomically, and replace an existing file.

        Only three kinds of file may be replaced: the decision register, an entry of the ledger, and
        a damaged document by its original contents.

        A reader sees the old or the new contents, also after an error. The new contents become
        durable at the same point as in `create`.

        Raises:
            CkptError: ``UNSAFE_PATH``, ``UNSAFE_FILE``.
        """

    def read(self, path: str, *, limit_nbytes: int) -> bytes:
        """Return a whole small file. The size is checked before any read or allocation.

        Raises:
            CkptError: ``FILE_MISSING``; ``LIMIT_EXCEEDED`` if the file is larger than
                `limit_nbytes`; ``UNSAFE_FILE`` if the path isn't a regular file or contains a
                symlink; ``FILE_NBYTES`` if the file shrinks meanwhile.

        Spec: REQ-CKP-002, REQ-CKP-004, REQ-DOC-008
        """

    def read_range(self, path: str, byte_begin: int, nbytes: int) -> bytes:
        """Return exactly the bytes ``[byte_begin, byte_begin + nbytes)`` of a file.

        The range is checked against the file's true size before `nbytes` are allocated.

        Raises:
            CkptError: ``FILE_NBYTES`` if the file is too short; ``FILE_MISSING``, ``UNSAFE_FILE``.

        Spec: REQ-CKP-002, REQ-CKP-003, REQ-CKP-004
        """

    def open_ranges(self, path: str) -> AbstractContextManager[RangeReader]:
        """Open a file for many range reads. The context yields a thread-safe `RangeReader`.

        Raises:
            CkptError: ``FILE_MISSING``, ``UNSAFE_FILE``, on entry to the context; in an object
                store, at the first range read.

        Spec: REQ-CKP-002, REQ-CKP-004
        """

    def waits(self, path: str) -> bool:
        """Return whether reads of a file wait for a device or a network, rather than copy memory.

        The result is a hint for the planning of reads. The call never fails; the result for a
        missing file has no meaning.
        """

    def nbytes(self, path: str) -> int:
        """Return a file's size in bytes.

        Raises:
            CkptError: ``FILE_MISSING``, ``UNSAFE_FILE``.
        """

    def list(self, prefix: str) -> Names:
        """Return the paths of all files below the directory `prefix`, relative to the root, sorted.

        A file system also lists symlinks, pipes and other special files, without following them,
        and names that `check_path` refuses. Both kinds of store omit unfinished files. The list is
        empty for a missing directory. A listing is a hint: no commit depends on a listing.
        """

    def list_names(self, prefix: str) -> Names:
        """Return the names in the directory `prefix`, sorted; names of directories end with ``/``.

        An object store has no empty directories. All other properties are those of `list`.
        """

    def delete(self, path: str) -> None:
        """Remove a file; a missing file is no error. Durable after `sync` of the directory.

        Raises:
            CkptError: ``UNSAFE_FILE`` for a directory.
        """

    def delete_leftovers(self, prefix: str) -> None:
        """Remove the unfinished files of killed writers in the directory `prefix`.

        In an object store, remove the expired leases in `prefix`. Directories below `prefix` are
        left alone: they may belong to other writers. Call this only when no process writes there
        any more: the `create` of a live writer would fail.
        """

    def remove_directory(self, path: str) -> None:
        """Remove the directory `path` and all empty directories below; object stores: no-op.

        A directory with files stays, without an error. The root of the opened store stays too.
        """

    def sync(self, path: str) -> None:
        """Make the names in the directory `path` and in its parents durable; object stores: no-op.

        The parents go up to the root of the opened store, above the roots of all `at` calls.
        Directories *below* `path` aren't included. The call is never repeated: after an error the
        durable state is unknown.

        Raises:
            CkptError: ``FILE_MISSING`` for a missing directory.
        """

    def hold(self, path: str) -> AbstractContextManager[None]:
        """Hold the file `path` while the context is open. All processes see the hold by `is_held`.

        Several processes may hold one file. The hold of a dead process ends at once or after a
        minute (`holds_expire`). A forked child inherits no hold. A file system creates a missing
        file and its directories; the last holder removes the file; neither change is made durable.
        On a file system without locks the call does nothing, without an error. An object store
        creates its own objects, which no listing shows.

        Raises:
            CkptError: ``UNSAFE_PATH``, ``UNSAFE_FILE``, on entry to the context.

        Spec: REQ-STO-008, REQ-STO-009
        """

    @property
    def holds_expire(self) -> bool:
        """Whether a hold expires after a minute while its holder is stopped.

        A stopped holder may continue later. Where holds expire, the absence of a hold therefore
        permits no deletion.

        Spec: REQ-STO-011
        """

    def is_held(self, path: str) -> bool:
        """Return whether any process holds the file `path` now.

        The call leaves no file behind and doesn't wait.

        Raises:
            CkptError: ``UNSAFE_PATH``, ``UNSAFE_FILE``.

        Spec: REQ-STO-008, REQ-STO-010
        """

    def list_held(self, prefix: str, wanted: Callable[[str], object] = bool) -> Names:
        """Return the names of the currently held files in the directory `prefix`, sorted.

        An object store needs one request for all files. A path that isn't a regular file is never
        held. All other properties are those of `is_held`.

        Args:
            prefix: the directory.
            wanted: predicate of the names to check.
        """

    def at(self, prefix: str) -> Store:
        """Return the same store with the directory `prefix` as root, which may be missing."""

    def beside(self, name: str) -> Store:
        """Return a read-only store whose root is the sibling `name` of this store's root.

        Args:
            name: one component of a path.

        Raises:
            CkptError: ``UNSAFE_PATH``.
        """


@functools.lru_cache(maxsize=1024)  # each range read checks the file's path
def check_path(path: str) -> None:
    """Check that `path` names a file below a root, on every kind of store.

    Raises:
        CkptError: ``UNSAFE_PATH`` for an absolute or empty path; for a component that is empty,
            ``.``, ``..``, longer than `COMPONENT_NBYTES`, or reserved for the store
            (`TEMPORARY_PREFIX`); for backslash, NUL and other control characters; for text that
            isn't valid Unicode.

    Spec: REQ-CKP-001

    >>> check_path("parts/0123456789abcdef-00000.msgpack")
    >>> check_path("../etc/passwd")
    Traceback (most recent call last):
    ...
    ckptfmt.errors.FormatError: UNSAFE_PATH at '../etc/passwd': component '..' ...
    """
    for component in path.split("/"):
        if component in ("", ".", ".."):
            raise _unsafe(path, f"component {component!r} isn't allowed")
        if component.startswith(TEMPORARY_PREFIX):
            raise _unsafe(path, f"component {component!r} is of the store's own names")
    if _FORBIDDEN & set(path):
        raise _unsafe(path, "backslash and control characters aren't allowed")
    try:
        encoded = path.encode()
    except UnicodeEncodeError as error:
        raise _unsafe(path, "it isn't Unicode text") from error
    if max(map(len, encoded.split(b"/"))) > COMPONENT_NBYTES:
        raise _unsafe(path, f"a component is longer than {COMPONENT_NBYTES} bytes")


def check_prefix(prefix: str) -> None:
    """Check that `prefix` names a directory: ``""`` for the root, or a valid path.

    Raises:
        CkptError: ``UNSAFE_PATH``.
    """
    if prefix:
        check_path(prefix)


def join_path(prefix: str, path: str) -> str:
    """Return `path` below `prefix`; each may be ``""``.

    >>> join_path("", "a"), join_path("a", ""), join_path("a", "b/c")
    ('a', 'a', 'a/b/c')
    """
    return f"{prefix}/{path}" if prefix and path else prefix or path


def _unsafe(path: str, detail: str) -> CkptError:
    # A hostile path could forge a line of a log. Quoting and truncation prevent this.
    return err(Code.UNSAFE_PATH, detail, where=ascii(path[:200]), requirement="REQ-CKP-001")


def read_if_there(store: Store, path: str, *, limit_nbytes: int) -> bytes | None:
    """Return a whole small file, as `Store.read`; None for a missing file.

    Raises: as `Store.read`, except IntegrityError(FILE_MISSING).
    """
    try:
        return store.read(path, limit_nbytes=limit_nbytes)
    except CkptError as error:
        if error.code == Code.FILE_MISSING:
            return None
        raise


def call_each(
    store: Store,
    call: Callable[[Item], Answer],
    items: Iterable[Item],
    *,
    at_once: int = CALLS_AT_ONCE,
) -> list[Answer]:
    """Return the results of `call` for each item, in the items' order.

    For a remote store several calls run concurrently.

    Args:
        store: the store that `call` uses.
        call: the function to call. Several threads call it at once if `store` is remote.
        items: the arguments, one for each call.
        at_once: the maximum number of concurrent calls.

    Raises: the error of the first item that failed. No further calls are started after an error;
        all started calls have ended.
    """
    items = list(items)
    count = min(at_once, len(items)) if store.is_remote else 1
    if count <= 1:
        return [call(item) for item in items]
    answers: dict[int, Answer] = {}
    errors: dict[int, BaseException] = {}
    left = iter(enumerate(items))
    lock = threading.Lock()

    def work() -> None:
        while not errors:
            with lock:
                found = next(left, None)
            if found is None:
                return
            number, item = found
            try:
                answers[number] = call(item)
            except BaseException as error:  # noqa: BLE001
                errors[number] = error

    threads = _start_threads(work, count - 1)
    work()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[min(errors)]
    return [answers[number] for number in range(len(items))]


def _start_threads(work: Callable[[], Any], count: int) -> list[threading.Thread]:
    """Start threads with the same target; fewer where the system can't start more."""
    threads: list[threading.Thread] = []
    for _ in range(count):
        # Daemon threads, because the interpreter waits for other threads at exit, even blocked
        # ones.
        thread = threading.Thread(target=work, name="ckptfmt-calls", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # too many threads, or the interpreter shuts down
            break
        threads.append(thread)
    return threads
