"""An object store in memory: flat keys, conditional put, no rename, no directories, lost answers.

This store is the model of every object store, and runs under the same commit code as a file system.
`MemoryStore.inject` simulates the failures of a network.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum, auto

from ckptfmt.errors import CkptError, Code, err
from ckptfmt.store.leases import HeldByLeases, Leases, boot_s
from ckptfmt.store.protocol import (
    Buffer,
    FunctionReader,
    Names,
    RangeReader,
    check_path,
    check_prefix,
    join_path,
)


class Loss(Enum):
    """The fate of a request without an answer. The caller gets ``STORE_NO_ANSWER`` each time."""

    #: The store executes (or refuses) the request, and the answer is lost.
    ANSWER = auto()
    #: The request is lost and never executed.
    REQUEST = auto()
    #: The store executes the request later, in `MemoryStore.land`, with the contents at that time.
    LATE = auto()


@dataclasses.dataclass(frozen=True, slots=True)
class _Put:
    """A request: ``PUT key``, with ``If-None-Match: *`` if it is exclusive."""

    key: str
    data: bytes
    exclusive: bool


@dataclasses.dataclass(slots=True)
class _Bucket:
    """The shared data of all views of one store. Every access holds the lock."""

    objects: dict[str, bytes]
    clock: Callable[[], float] = time.time
    losses: list[tuple[Loss, str]] = dataclasses.field(default_factory=list)
    late: list[_Put] = dataclasses.field(default_factory=list)
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    #: The time of each lease's last write, by `clock`. Listings omit leases.
    leases: dict[str, float] = dataclasses.field(default_factory=dict)

    def carry_out(self, put: _Put) -> bool:
        """Execute a request; return whether it was accepted."""
        if put.exclusive and put.key in self.objects:
            return False
        self.objects[put.key] = put.data
        return True

    def next_loss(self, key: str) -> Loss | None:
        """Remove the first injected loss for a key, and return it; None without one."""
        for position, (loss, key_end) in enumerate(self.losses):
            if key.endswith(key_end):
                del self.losses[position]
                return loss
        return None


class MemoryStore(HeldByLeases):
    """Objects in memory as a `ckptfmt.store.Store`: atomic puts, consistent reads.

    Every read sees all earlier puts.

    >>> store = MemoryStore()
    >>> store.create("run/manifest.json", [b"{", b"}"])
    >>> store.at("run").read("manifest.json", limit_nbytes=10)
    b'{}'

    Args:
        clock: the clock of the store and of the machine, in seconds; None for the time of day.
    """

    #: Calls need no network; see `Store`.
    is_remote = False

    def __init__(self, *, clock: Callable[[], float] | None = None) -> None:
        self._bucket = _Bucket({}, clock or time.time)
        self._prefix = ""
        objects = _LeaseObjects(self._bucket)
        self._leases = Leases(objects, writable=True, local_s=clock or boot_s)

    @classmethod
    def from_snapshot(cls, objects: Mapping[str, bytes]) -> MemoryStore:
        """Return a store with the objects of a mapping from keys to contents."""
        for key in objects:
            check_path(key)
        store = cls()
        store._bucket.objects.update(objects)
        return store

    def snapshot(self) -> dict[str, bytes]:
        """Return a copy of all objects by their keys, without late requests."""
        with self._bucket.lock:
            return dict(self._bucket.objects)

    def inject(self, loss: Loss, *, path_end: str = "") -> None:
        """Lose the next `create` or `replace` of a path that ends with `path_end`.

        Several injected losses apply in order, one for each request.
        """
        with self._bucket.lock:
            self._bucket.losses.append((loss, path_end))

    def land(self, *, count: int | None = None) -> Names:
        """Execute the oldest `count` late requests (None: all); return the accepted keys."""
        with self._bucket.lock:
            arriving = self._bucket.late[:count]
            del self._bucket.late[: len(arriving)]
            return [put.key for put in arriving if self._bucket.carry_out(put)]

    @property
    def late_count(self) -> int:
        """Number of late requests."""
        with self._bucket.lock:
            return len(self._bucket.late)

    @property
    def name(self) -> str:
        """``memory:`` and the prefix."""
        return f"memory:{self._prefix}"

    def __repr__(self) -> str:
        return f"<MemoryStore {self.name}>"

    def at(self, prefix: str) -> MemoryStore:
        """Return the same store with `prefix` as root; see `Store.at`."""
        check_prefix(prefix)
        lower = copy.copy(self)
        lower._prefix = join_path(self._prefix, prefix)  # noqa: SLF001
        return lower

    def beside(self, name: str) -> MemoryStore:
        """Return the store of a sibling prefix; see `Store.beside`.

        A whole bucket has no siblings: the result is then an empty store.
        """
        check_path(name)
        other = copy.copy(self)
        other._prefix = join_path(self._prefix.rpartition("/")[0], name)  # noqa: SLF001
        return other if self._prefix else MemoryStore()

    def create(self, path: str, chunks: Iterable[Buffer]) -> None:
        """Create an object exclusively and whole; see `Store.create`."""
        check_path(path)
        data = b"".join(chunks)
        if not self._put(path, data, exclusive=True):
            raise err(Code.STORE_EXISTS, f"the file is in {self.name} already", where=path)

    def replace(self, path: str, data: bytes) -> None:
        """Write `data` to an object, and replace existing contents; see `Store.replace`."""
        check_path(path)
        self._put(path, bytes(data), exclusive=False)

    def read(self, path: str, *, limit_nbytes: int) -> bytes:
        """Return a whole small object; see `Store.read`."""
        data = self._get(path)
        if len(data) > limit_nbytes:
            detail = f"{len(data)} bytes, of {limit_nbytes} allowed"
            raise err(Code.LIMIT_EXCEEDED, detail, where=path, requirement="REQ-DOC-008")
        return data

    def read_range(self, path: str, byte_begin: int, nbytes: int) -> bytes:
        """Return exactly a range of an object; see `Store.read_range`."""
        data = self._get(path)
        if not 0 <= byte_begin <= byte_begin + nbytes <= len(data):
            detail = f"bytes [{byte_begin}, {byte_begin + nbytes}) of a file of {len(data)}"
            raise err(Code.FILE_NBYTES, detail, where=path, requirement="REQ-CKP-003")
        return data[byte_begin : byte_begin + nbytes]

    @contextlib.contextmanager
    def open_ranges(self, path: str) -> Iterator[RangeReader]:
        """Open an object for range reads; see `Store.open_ranges`."""
        self._get(path)

        def read_into(byte_begin: int, nbytes: int, buffer: memoryview) -> memoryview:
            buffer[:nbytes] = self.read_range(path, byte_begin, nbytes)
            return buffer[:nbytes]

        yield FunctionReader(read_into)

    def waits(self, path: str) -> bool:
        """Return False: the object is in memory; see `Store.waits`."""
        del path
        return False

    def nbytes(self, path: str) -> int:
        """Return an object's size in bytes; see `Store.nbytes`."""
        return len(self._get(path))

    def list(self, prefix: str) -> Names:
        """Return the paths of all objects below `prefix`; see `Store.list`."""
        check_prefix(prefix)
        directory = _directory_key(join_path(self._prefix, prefix))
        root = _directory_key(self._prefix)
        with self._bucket.lock:
            return sorted(
                key.removeprefix(root) for key in self._bucket.objects if key.startswith(directory)
            )

    def list_names(self, prefix: str) -> Names:
        """Return the first components of the keys below `prefix`; see `Store.list_names`."""
        inner = [path.removeprefix(_directory_key(prefix)) for path in self.list(prefix)]
        return sorted({head + slash for head, slash, _ in (path.partition("/") for path in inner)})

    def delete(self, path: str) -> None:
        """Remove an object; see `Store.delete`."""
        check_path(path)
        with self._bucket.lock:
            self._bucket.objects.pop(join_path(self._prefix, path), None)

    def _put(self, path: str, data: bytes, *, exclusive: bool) -> bool:
        put = _Put(join_path(self._prefix, path), data, exclusive)
        with self._bucket.lock:
            loss = self._bucket.next_loss(put.key)
            if loss is Loss.LATE:
                self._bucket.late.append(put)
            accepted = loss in (None, Loss.ANSWER) and self._bucket.carry_out(put)
        if loss is not None:
            raise err(Code.STORE_NO_ANSWER, f"no answer to a put in {self.name}", where=path)
        return accepted

    def _get(self, path: str) -> bytes:
        check_path(path)
        with self._bucket.lock:
            data = self._bucket.objects.get(join_path(self._prefix, path))
        if data is None:
            raise self._missing(path)
        return data

    def _missing(self, path: str) -> CkptError:
        return err(
            Code.FILE_MISSING,
            f"no such object in {self.name}",
            where=path,
            requirement="REQ-CKP-004",
        )


def _directory_key(prefix: str) -> str:
    return f"{prefix}/" if prefix else ""


class _LeaseObjects:
    """The leases in a bucket; see `LeaseObjects`."""

    def __init__(self, bucket: _Bucket) -> None:
        self._bucket = bucket

    def put(self, key: str) -> None:
        """Write a lease; see `LeaseObjects.put`."""
        with self._bucket.lock:
            self._bucket.leases[key] = self._bucket.clock()

    def delete(self, key: str) -> None:
        """Remove a lease; see `LeaseObjects.delete`."""
        with self._bucket.lock:
            self._bucket.leases.pop(key, None)

    def list_modified(self, directory: str) -> list[tuple[str, float]]:
        """Return keys and times; see `LeaseObjects.list_modified`."""
        with self._bucket.lock:
            return [
                entry
                for entry in self._bucket.leases.items()
                if entry[0].startswith(f"{directory}/")
            ]
