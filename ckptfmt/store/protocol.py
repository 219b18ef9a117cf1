"""What a store promises: the one place where ckptfmt touches bytes that outlive the process.

A store holds files under a root. Paths are relative to it, with ``/`` between components, on every kind of store.
There are two kinds, and the same code runs over both:

- a *file system* has directories; a new name is durable only after `Store.sync`;
- an *object store* has flat keys; what was acknowledged is durable, and `Store.sync` has nothing to do.

Whoever implements one keeps three promises, on which crash safety rests:

1. **Exclusive.** Of any number of concurrent `Store.create` calls on one path, on any number of machines, at most
   one succeeds. A look before the write doesn't give that: it takes ``link``, ``renameat2(RENAME_NOREPLACE)`` or
   ``PUT If-None-Match: *``. Object stores take no such condition for what is sent in parts: there `SizedChunks` may
   only be looked for before, and are given names that nobody else creates.
2. **Whole.** A path either isn't there, or has all bytes that were handed over. No reader sees a part, after a
   crash neither.
3. **Honest about the unknown.** A call whose request or answer may be lost raises ``STORE_NO_ANSWER``, never
   another code: the caller then reads back, and deletes nothing until it knows.

Every call may raise ``STORE_IO``, ``STORE_ACCESS`` and ``STORE_NO_ANSWER``, calls that write also ``NO_SPACE``; the
docstrings name what comes on top. Calls may come from several threads at once.
"""

from __future__ import annotations

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

# Inside of a class with a method `list`, the built-in type can't be named any more.
Names: TypeAlias = list[str]

#: A store's own unfinished files begin with this: callers can't use such names and listings leave them out.
TEMPORARY_PREFIX: Final = ".tmp-"

#: To what addresses, positions and sizes of direct reads and writes are aligned, in bytes: what common devices ask for.
PAGE_NBYTES: Final = 4096

#: Longest component of a path, in UTF-8: what common file systems take.
COMPONENT_NBYTES: Final = 255

#: How many calls `call_each` has under way at once.
CALLS_AT_ONCE: Final = 16

_FORBIDDEN: Final = {"\\", "\x7f", *map(chr, range(0x20))}


class SizedChunks:
    """Chunks of a file that may be large, and its size: a store may make room for all of it at once. It need not look.

    Args:
        nbytes: the size in bytes; None where it shows only when the last chunk is drawn.
        most_nbytes: what the size doesn't exceed, where `nbytes` is None.
    """

    def __init__(self, chunks: Iterable[Buffer], nbytes: int | None, *, most_nbytes: int = 0) -> None:
        self._chunks = chunks
        self.nbytes: Final = nbytes
        self.most_nbytes: Final = most_nbytes if nbytes is None else nbytes

    def __iter__(self) -> Iterator[Buffer]:
        return iter(self._chunks)


class RangeReader(Protocol):
    """An open file, to read ranges of it."""

    def read_into(self, byte_begin: int, nbytes: int, buffer: memoryview) -> memoryview:
        """Read exactly ``[byte_begin, byte_begin + nbytes)``, and return where these bytes are: in `buffer` as a rule.

        What else is in `buffer` afterwards means nothing: a file system may read whole pages past its cache, of a file
        that isn't in it. A store whose client has put them into memory of their own returns that; it is let go of
        before `buffer` is used again.

        Args:
            buffer: writable, from a page's begin on, and two pages (`PAGE_NBYTES`) larger than `nbytes` at least.

        Raises:
            CkptError: ``FILE_NBYTES`` if the file doesn't have them all.

        Spec: REQ-CKP-003
        """


class Source(Protocol):
    """Whatever has files: a `Store`, or another process that reads from one. Its methods are those of `Store`."""

    def nbytes(self, path: str) -> int:
        """Return a file's size in bytes."""

    def read(self, path: str, *, limit_nbytes: int) -> bytes:
        """Return a whole small file."""

    def open_ranges(self, path: str) -> AbstractContextManager[RangeReader]:
        """Open a file to read many ranges of it."""


class Store(Protocol):
    """Files under a root, created whole and at most once."""

    @property
    def name(self) -> str:
        """The place in words, for messages: a directory, or a bucket with a prefix."""

    @property
    def is_remote(self) -> bool:
        """Whether each call is a request over a network, which takes its time however little it asks for.

        Callers then make requests several at once and larger ones, and `waits` is true of every file.
        """

    def create(self, path: str, chunks: Iterable[Buffer]) -> None:
        """Create the file `path` from `chunks`, exclusively and whole; make missing directories.

        The contents are durable before the name appears. The name is durable after `sync` of its directory.
        When a CkptError leaves this call, the file wasn't created and won't be later, unless the code is
        ``STORE_NO_ANSWER``: then it is there, isn't, or (object stores) still comes, and is created exclusively
        even then.

        Args:
            path: where; see `check_path`.
            chunks: the contents in order, `SizedChunks` of what may be large; drawn once, and not far ahead of
                what is written. A chunk stays unchanged until `create` returns.

        Raises:
            CkptError: ``STORE_EXISTS`` if the path is taken, whatever it holds; ``UNSAFE_PATH``; ``UNSAFE_FILE`` if
                a parent isn't a directory. An error of `chunks` comes through as it is, an OSError as a store
                error.

        Spec: REQ-CKP-001, REQ-CKP-002
        """

    def replace(self, path: str, data: bytes) -> None:
        """Put `data` at `path` whole and at once, whatever was there.

        Only the decision register may be replaced, an entry of the ledger, and a damaged document by what it was.

        A reader sees the old contents or the new ones. After an error it is one of the two. Durable when `create`
        is.

        Raises:
            CkptError: ``UNSAFE_PATH``, ``UNSAFE_FILE``.
        """

    def read(self, path: str, *, limit_nbytes: int) -> bytes:
        """Return a whole small file. Its size is checked before anything is read or allocated.

        Raises:
            CkptError: ``FILE_MISSING``; ``LIMIT_EXCEEDED`` if it is larger than `limit_nbytes`; ``UNSAFE_FILE`` if
                it isn't a regular file or is reached through a symlink; ``FILE_NBYTES`` if it shrinks meanwhile.

        Spec: REQ-CKP-002, REQ-CKP-004, REQ-DOC-008
        """

    def read_range(self, path: str, byte_begin: int, nbytes: int) -> bytes:
        """Return exactly the bytes ``[byte_begin, byte_begin + nbytes)`` of a file.

        The range is checked against the file's true size before `nbytes` are allocated.

        Raises:
            CkptError: ``FILE_NBYTES`` if the file doesn't have them all; ``FILE_MISSING``, ``UNSAFE_FILE``.

        Spec: REQ-CKP-002, REQ-CKP-003, REQ-CKP-004
        """

    def open_ranges(self, path: str) -> AbstractContextManager[RangeReader]:
        """Open a file to read many ranges of it: the context yields a `RangeReader`, for any number of threads.

        Raises:
            CkptError: ``FILE_MISSING``, ``UNSAFE_FILE``, when the context is entered; of an object store not before a
                range is read.

        Spec: REQ-CKP-002, REQ-CKP-004
        """

    def waits(self, path: str) -> bool:
        """Return whether reads of a file wait for a device or a network, rather than copy memory.

        A hint for who plans reads, and never an error: of a file that isn't there it means nothing.
        """

    def nbytes(self, path: str) -> int:
        """Return a file's size in bytes.

        Raises:
            CkptError: ``FILE_MISSING``, ``UNSAFE_FILE``.
        """

    def list(self, prefix: str) -> Names:
        """Return the paths of all files below the directory `prefix`, relative to the root, sorted.

        A file system lists symlinks, pipes and the like too, without following them, and names that `check_path`
        refuses; both leave out unfinished files. Nothing there: an empty list. A listing is a hint: no commit rests
        on it.
        """

    def list_names(self, prefix: str) -> Names:
        """Return the names in the directory `prefix`, sorted; those of directories end with ``/``.

        An object store has no empty directories. Otherwise as `list`.
        """

    def delete(self, path: str) -> None:
        """Remove a file. One that isn't there is fine. Durable after `sync` of the directory.

        Raises:
            CkptError: ``UNSAFE_FILE`` if it is a directory.
        """

    def delete_leftovers(self, prefix: str) -> None:
        """Remove the unfinished files that killed writers left in the directory `prefix`; objects: what held files.

        Not in the directories below it, which may be somebody else's. Only where nobody writes any more: a living
        writer's `create` would fail. Of an object store these are the leases there that have run out.
        """

    def remove_directory(self, path: str) -> None:
        """Remove the empty directories below `path`, and it; objects: no-op.

        One that isn't empty stays, without an error; so does the root of the opened store.
        """

    def sync(self, path: str) -> None:
        """Make durable which names are in the directory `path` and in its parents up to the root; objects: no-op.

        "Root" is that of the store which was opened, above all `at`. Directories *below* `path` aren't included.
        Never retried: after an error nobody knows what is durable.

        Raises:
            CkptError: ``FILE_MISSING`` if there is no such directory.
        """

    def hold(self, path: str) -> AbstractContextManager[None]:
        """Hold the file `path` while the context is open: `is_held` says so to every process that sees the store.

        Several may hold one file. A process that dies, however suddenly, holds it no more, at once or after a minute
        (`holds_expire`); a forked child never held it. On a file system the file is made if it isn't there, with its
        missing directories, and the last one who holds it removes it; nothing is made durable. Where a file system has
        no locks, nothing is held, without an error. An object store makes objects of its own, which are never listed.

        Raises:
            CkptError: ``UNSAFE_PATH``, ``UNSAFE_FILE``; all of it when the context is entered.

        Spec: REQ-STO-008, REQ-STO-009
        """

    @property
    def holds_expire(self) -> bool:
        """Whether a holder that is stopped for a minute holds nothing any more, although it may go on.

        Then nothing may be deleted because nobody holds it.

        Spec: REQ-STO-011
        """

    def is_held(self, path: str) -> bool:
        """Return whether somebody holds the file `path` now. Makes nothing that stays, and doesn't wait.

        Raises:
            CkptError: ``UNSAFE_PATH``, ``UNSAFE_FILE``.

        Spec: REQ-STO-008, REQ-STO-010
        """

    def list_held(self, prefix: str, wanted: Callable[[str], object] = bool) -> Names:
        """Return the names of the files in the directory `prefix` that somebody holds now, sorted; otherwise `is_held`.

        An object store is asked once for all of them. Nobody holds a path that isn't a regular file.

        Args:
            prefix: the directory.
            wanted: says of a name whether it is looked at.
        """

    def at(self, prefix: str) -> Store:
        """Return the same store with the directory `prefix` as root; it needn't be there yet."""

    def beside(self, name: str) -> Store:
        """Return the store whose root is called `name`, in the directory that holds this one's; to be read only.

        Args:
            name: one component of a path.

        Raises:
            CkptError: ``UNSAFE_PATH``.
        """


@functools.lru_cache(maxsize=1024)  # a file's name comes by at each of its ranges
def check_path(path: str) -> None:
    """Raise unless `path` names a file below a root, on every kind of store.

    Raises:
        CkptError: ``UNSAFE_PATH`` for an absolute or empty path; for a component that is empty, ``.``, ``..``,
            longer than `COMPONENT_NBYTES` or a store's own (`TEMPORARY_PREFIX`); for backslash, NUL and other control
            characters; for what isn't Unicode.

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
    """Raise unless `prefix` names a directory: ``""`` for the root, or what `check_path` takes.

    Raises:
        CkptError: ``UNSAFE_PATH``.
    """
    if prefix:
        check_path(prefix)


def join_path(prefix: str, path: str) -> str:
    """Return `path` below `prefix`, either of which may be ``""``.

    >>> join_path("", "a"), join_path("a", ""), join_path("a", "b/c")
    ('a', 'a', 'a/b/c')
    """
    return f"{prefix}/{path}" if prefix and path else prefix or path


def _unsafe(path: str, detail: str) -> CkptError:
    # The path is hostile text: quoted and cut, it can't forge a line of a log.
    return err(Code.UNSAFE_PATH, detail, where=ascii(path[:200]), requirement="REQ-CKP-001")


def call_each(
    store: Store, call: Callable[[Item], Answer], items: Iterable[Item], *, at_once: int = CALLS_AT_ONCE
) -> list[Answer]:
    """Return what `call` returns for each item, in their order; several are under way at once if `store` is remote.

    Args:
        store: what `call` asks.
        call: is called by several threads at once if `store` is remote.
        at_once: by how many.

    Raises: what `call` raises for the first item for which it does. No more calls are begun then, and those that were
        begun have ended.
    """
    items = list(items)
    count = min(at_once, len(items)) if store.is_remote else 1
    if count <= 1:
        return [call(item) for item in items]
    answers: dict[int, Answer] = {}
    errors: dict[int, BaseException] = {}
    left, lock = iter(enumerate(items)), threading.Lock()

    def work() -> None:
        while not errors:
            with lock:
                found = next(left, None)
            if found is None:
                return
            number, item = found
            try:
                answers[number] = call(item)
            except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
                errors[number] = error

    threads = _start_threads(work, count - 1)
    work()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[min(errors)]
    return [answers[number] for number in range(len(items))]


def _start_threads(work: Callable[[], Any], count: int) -> list[threading.Thread]:
    """Start threads that all do the same; fewer where no more can be started."""
    threads: list[threading.Thread] = []
    for _ in range(count):
        # Daemons: at its end the interpreter would wait for others, whatever these wait for.
        thread = threading.Thread(target=work, name="ckptfmt-calls", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # there are too many, or the interpreter is about to end
            break
        threads.append(thread)
    return threads
