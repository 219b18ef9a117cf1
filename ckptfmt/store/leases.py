"""Holds on object stores: leases, which are objects that a holder renews by the store's clock.

An object store has no locks. The holder of a file therefore creates an object next to the file, in
a folder of the store's own, and rewrites the object six times in each lease term. To check a hold,
a process lists this folder: each lease has the time of its last renewal, by the store's clock. A
holder that dies stops renewing, and the lease expires one term later.

A lease only tells other processes to wait for the holder. A holder that is stopped for longer than
a term may continue afterwards: no file may be deleted because no lease exists. The clocks of
machines don't matter to writers: a writer reads the store's clock from an object that the writer
has just written.

Spec: REQ-STO-008 to REQ-STO-011.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import re
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Final, Protocol

from ckptfmt.errors import CkptError, Code
from ckptfmt.store.protocol import TEMPORARY_PREFIX, Names, check_path, check_prefix, join_path

_LOG: Final = logging.getLogger("ckptfmt")

#: Term of a lease after its last renewal, in seconds of the store's clock.
TERM_S: Final = 60.0
#: The folder of leases, next to the held files. Listings omit this folder, as all of a store's own
#: files.
FOLDER: Final = f"{TEMPORARY_PREFIX}leases"
#: Number of renewals in a term, and number of attempts in a term after an error.
_RENEWALS = 6
_REPEATS = 30
#: Maximum wait for a renewal in progress at the end of a hold, in seconds.
_LAST_RENEWAL_S: Final = 2.0
#: Number of attempts of the first put of a lease, while the store doesn't answer.
_TRIES: Final = 4
#: Validity of a measured difference between the clocks, in terms.
_KNOWN_TERMS: Final = 10
_NAME: Final = re.compile(r"(.*)-[0-9a-f]{16}", re.DOTALL)


class LeaseObjects(Protocol):
    """The operations of an object store that leases need.

    Keys begin at the bucket's root. Every call may raise a CkptError.
    """

    def put(self, key: str) -> None:
        """Create an empty object, or replace it. The call gives up well within a term."""

    def delete(self, key: str) -> None:
        """Remove an object; a missing object is no error."""

    def list_modified(self, directory: str) -> list[tuple[str, float]]:
        """Return the keys of all objects below `directory`, each with the time of its last write.

        The time is in seconds of the store's clock, from any origin, and may be rounded down.
        """


def boot_s() -> float:
    """Return the seconds since the start of this machine, including suspended time if possible."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if clock is None else time.clock_gettime(clock)


@dataclasses.dataclass(slots=True, eq=False)
class _Lease:
    """A lease of this process.

    Attributes:
        key: the key of the lease's object.
        renewed_s: start of the last successful renewal, by this machine's clock.
        due_s: time of the next renewal, by this machine's clock.
        is_ended: whether the hold has ended. The end of the hold removes the object. If a renewal
            is in progress at the end, or an exception interrupted the end, the renewing thread
            removes the object.
        is_told: whether the expiry of the lease was logged.
    """

    key: str
    renewed_s: float
    due_s: float
    is_ended: bool = False
    is_told: bool = False


class Leases:
    """The leases of this process in one object store, and queries of all leases. Thread-safe.

    Args:
        objects: the store.
        writable: whether the store's clock may be read by writing an object; a reader uses its own
            machine's clock.
        term_s: the term of a lease in seconds, the same for all users of the store.
        local_s: the clock of this machine in seconds, from any origin.
    """

    def __init__(
        self,
        objects: LeaseObjects,
        *,
        writable: bool,
        term_s: float = TERM_S,
        local_s: Callable[[], float] = boot_s,
    ) -> None:
        self._objects = objects
        self._writable = writable
        self._term_s = term_s
        self._local_s = local_s
        #: One moment by the store's clock and by this machine's clock; the store's value is never
        #: ahead.
        self._known: tuple[float, float] | None = None
        self._reset()

    @contextlib.contextmanager
    def hold(self, key: str) -> Iterator[None]:
        """Hold the file `key` while the context is open; see `Store.hold`.

        The lease is an object with a key of its own; `key` itself isn't created.
        """
        directory, _, name = key.rpartition("/")
        lease = _Lease(_lease_key(directory, name), renewed_s=0.0, due_s=0.0)
        try:
            try:
                self._put_first(lease)
                self._add(lease)
            except BaseException:
                self._delete(lease)  # the put may have succeeded
                raise
            yield
        finally:
            lease.is_ended = True  # even if KeyboardInterrupt prevents `_end`
            self._end(lease)

    def list_held(self, directory: str) -> Names:
        """Return the names of the held files in a directory, sorted; usually one request."""
        found, now_s = self._look(directory)
        names = {_name_of(key) for key, modified_s in found if now_s - modified_s < self._term_s}
        return sorted(names - {""})

    def delete_ended(self, directory: str) -> None:
        """Remove the expired leases in a directory.

        A stopped holder that continues writes its lease again.
        """
        found, now_s = self._look(directory)
        for key, modified_s in found:
            if now_s - modified_s >= self._term_s:
                self._objects.delete(key)

    # --- asking -----------------------------------------------------------------------------------

    def _look(self, directory: str) -> tuple[list[tuple[str, float]], float]:
        """Return a directory's leases with their times, and a lower bound of the store's clock."""
        folder = join_path(directory, FOLDER)
        asked_s = time.time()
        found = self._objects.list_modified(folder)
        if not found:
            return [], 0.0
        if not self._writable:  # an answer may take a minute
            return found, max(asked_s, *(modified_s for _, modified_s in found))
        if self._known is not None:
            store_s, local_s = self._known
            passed_s = self._local_s() - local_s
            if passed_s < self._term_s * _KNOWN_TERMS:
                return found, store_s + passed_s
        return self._look_at_clock(directory)

    def _look_at_clock(self, directory: str) -> tuple[list[tuple[str, float]], float]:
        """Return the leases in a directory, and the store's clock read from a newly written object.

        The object isn't a lease, and is listed together with the leases. Its time is the store's
        current time or slightly earlier. The returned time is never ahead of the clock: an
        inaccuracy makes a lease look valid rather than expired.
        """
        key = free_key(directory)
        begun_s = self._local_s()
        try:
            self._objects.put(key)
            answered_s = self._local_s()
            found = self._objects.list_modified(join_path(directory, FOLDER))
        finally:
            with contextlib.suppress(Exception):
                self._objects.delete(key)
        store_s = dict(found).get(key)
        if store_s is None:  # the object was removed; the newest lease isn't in the future either
            return found, max((modified_s for _, modified_s in found), default=0.0)
        if answered_s - begun_s < self._term_s / _RENEWALS:  # after a slow put it is outdated
            self._known = store_s, answered_s
        return [entry for entry in found if entry[0] != key], store_s

    # --- holding ----------------------------------------------------------------------------------

    def _reset(self) -> None:
        """Start without leases, as in a forked child: the parent keeps its leases."""
        self._changed = threading.Condition()
        self._leases: list[_Lease] = []
        self._thread: threading.Thread | None = None
        #: The lease that each thread is writing: the current thread, and earlier threads that a
        #: slow store blocks.
        self._renewing: dict[threading.Thread, _Lease] = {}

    def _put_first(self, lease: _Lease) -> None:
        """Write a lease for the first time.

        The put is repeated while the store doesn't answer: a busy server may take a minute, and a
        save shouldn't fail for this reason.
        """
        for attempt in range(_TRIES):
            lease.renewed_s = self._local_s()
            lease.due_s = lease.renewed_s + self._term_s / _RENEWALS
            try:
                self._objects.put(lease.key)
            except CkptError as error:
                if error.code != Code.STORE_NO_ANSWER or attempt + 1 == _TRIES:
                    raise
            else:
                return

    def _add(self, lease: _Lease) -> None:
        _watch_forks()
        _ALL.add(self)
        with self._changed:
            if self._thread is None:
                thread = threading.Thread(target=self._work, name="ckptfmt-lease", daemon=True)
                thread.start()  # a failure means no hold; the thread waits for the lock
                self._thread = thread
            self._leases.append(lease)
            self._changed.notify_all()

    def _end(self, lease: _Lease) -> None:
        with self._changed:
            if lease in self._leases:
                self._leases.remove(lease)
            elif lease not in self._renewing.values():
                return  # never added, or a forked child's copy of the parent's lease
            idle = None
            if not self._leases:
                idle = self._thread
                self._thread = None
            self._changed.notify_all()
            is_renewing = lease in self._renewing.values()
            # Wait for a renewal in progress: if the process exited now, the renewed lease would
            # stay, and a launch would wait for a term.
            self._changed.wait_for(lambda: lease not in self._renewing.values(), _LAST_RENEWAL_S)
            idle = None if idle in self._renewing else idle
        if idle is not None:
            idle.join()  # returns at once: the thread only waits
        if not is_renewing:  # otherwise the renewing thread deletes the lease
            self._delete(lease)

    def _delete(self, lease: _Lease) -> None:
        """Remove a lease. A lease that can't be removed expires."""
        with contextlib.suppress(Exception):
            self._objects.delete(lease.key)

    def _work(self) -> None:
        while (lease := self._take_due()) is not None:
            self._renew(lease)

    def _take_due(self) -> _Lease | None:
        """Wait until a lease is due for renewal, and return it; None once the last hold has ended.

        None ends the renewing thread.
        """
        this = threading.current_thread()
        with self._changed:
            while self._thread is this:
                if not self._leases:  # an exception interrupted the beginning or the end of a hold
                    self._thread = None
                    break
                lease = min(self._leases, key=lambda one: one.due_s)
                pause_s = lease.due_s - self._local_s()
                if pause_s <= 0:
                    self._renewing[this] = lease
                    return lease
                self._changed.wait(pause_s)
            return None

    def _renew(self, lease: _Lease) -> None:
        """Renew a lease, or delete it if its hold has ended meanwhile.

        A failed renewal is repeated soon, as long as the hold lasts.
        """
        begun_s = self._local_s()
        problem: Exception | None = None
        try:
            if not lease.is_ended:
                self._objects.put(lease.key)
        except Exception as error:  # noqa: BLE001
            problem = error
        now_s = self._local_s()
        with self._changed:
            if problem is None:
                lease.renewed_s = begun_s
                lease.due_s = begun_s + self._term_s / _RENEWALS
                lease.is_told = False
            else:
                lease.due_s = now_s + self._term_s / _REPEATS
            is_ended = lease.is_ended
            if not is_ended:
                self._note_renewed()
        if is_ended:
            self._delete(lease)
            with self._changed:
                if lease in self._leases:  # an exception interrupted the end of the hold
                    self._leases.remove(lease)
                self._note_renewed()
        elif problem is not None and now_s - lease.renewed_s >= self._term_s and not lease.is_told:
            lease.is_told = True
            _LOG.warning(
                "no new launch waits for this process, which can't renew its lease: %s", problem
            )

    def _note_renewed(self) -> None:
        del self._renewing[threading.current_thread()]
        self._changed.notify_all()


def free_key(directory: str) -> str:
    """Return the key of an object that isn't a lease, but is deleted like an expired lease."""
    return _lease_key(directory, "")


def _lease_key(directory: str, name: str) -> str:
    return join_path(directory, f"{FOLDER}/{name}-{secrets.token_hex(8)}")


def _name_of(key: str) -> str:
    """Return the name of the file that a lease holds; ``""`` for an object that isn't a lease.

    >>> _name_of(_lease_key("run/savers", "0003-00000-9f3c41d27ab80e65"))
    '0003-00000-9f3c41d27ab80e65'
    """
    found = _NAME.fullmatch(key.rpartition("/")[2])
    return "" if found is None else found[1]


class HeldByLeases:
    """The common base of object stores: no directories, and holds by leases.

    Attributes:
        _leases: the bucket's leases.
        _prefix: the prefix of the store's keys.
    """

    #: A lease expires; see `Store`.
    holds_expire = True
    _leases: Leases
    _prefix: str

    def hold(self, path: str) -> contextlib.AbstractContextManager[None]:
        """Hold a key by a lease while the context is open; see `Store.hold`."""
        return self._leases.hold(self._key_to_change(path))

    def is_held(self, path: str) -> bool:
        """Return whether any process holds a key; see `Store.is_held`."""
        check_path(path)
        directory, _, name = path.rpartition("/")
        return name in self.list_held(directory)

    def list_held(self, prefix: str, wanted: Callable[[str], object] = bool) -> Names:
        """Return the held names below `prefix`; see `Store.list_held`."""
        check_prefix(prefix)
        return [
            name for name in self._leases.list_held(join_path(self._prefix, prefix)) if wanted(name)
        ]

    def delete_leftovers(self, prefix: str) -> None:
        """Remove expired leases; see `Store`. An unfinished put leaves no listed object."""
        check_prefix(prefix)
        self._leases.delete_ended(join_path(self._prefix, prefix))

    def remove_directory(self, path: str) -> None:
        """Do nothing: an object store has no directories."""
        check_prefix(path)

    def sync(self, path: str) -> None:
        """Do nothing: acknowledged requests are durable."""
        check_prefix(path)

    def _key_to_change(self, path: str) -> str:
        """Return the key of a path before a write. Raises: CkptError(UNSAFE_PATH)."""
        check_path(path)
        return join_path(self._prefix, path)


_ALL: Final[weakref.WeakSet[Leases]] = weakref.WeakSet()


def _forget_inherited() -> None:
    for leases in list(_ALL):
        leases._reset()  # noqa: SLF001


@functools.cache
def _watch_forks() -> None:
    """Register the fork handler, once.

    The handler isn't registered at import, since most programs that import this package hold no
    file.
    """
    os.register_at_fork(after_in_child=_forget_inherited)
