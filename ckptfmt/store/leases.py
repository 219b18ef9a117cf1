"""Holds on object stores: a lease is an object that its holder writes again and again, and the store's clock judges it.

An object store has no locks. So the holder of a file creates an object beside it, in a folder of the store's own, and
replaces it six times as often as it would run out. Whoever asks lists that folder: each lease comes with the time of
its last renewal, as the store's clock has it. A holder that dies stops renewing, and holds nothing a term later.

A lease says whom to wait for, and nothing else. A holder that is stopped for longer than a term goes on afterwards: no
file may be deleted because nobody holds it. Clocks of machines don't matter to who may write: the store's clock is read
off an object that the asker itself has just written.

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

#: How long a lease counts after it was last written, in seconds of the store's clock.
TERM_S: Final = 60.0
#: The folder of leases, beside the files that they hold. Listings leave it out, as all that is of a store's own.
FOLDER: Final = f"{TEMPORARY_PREFIX}leases"
#: A lease is renewed so many times in a term, and so much sooner again after an error.
_RENEWALS, _REPEATS = 6, 30
#: For how many seconds the end of a hold waits for a renewal that is on its way.
_LAST_RENEWAL_S: Final = 2.0
#: How often the first put of a lease is tried that a store doesn't answer.
_TRIES: Final = 4
#: For how many terms the difference of the clocks is believed that was measured once.
_KNOWN_TERMS: Final = 10
_NAME: Final = re.compile(r"(.*)-[0-9a-f]{16}", re.DOTALL)


class LeaseObjects(Protocol):
    """What leases need of an object store. Keys begin at the bucket's root. Every call may raise a CkptError."""

    def put(self, key: str) -> None:
        """Create an empty object, or replace it; give up well within a term."""

    def delete(self, key: str) -> None:
        """Remove an object. One that isn't there is fine."""

    def list_modified(self, directory: str) -> list[tuple[str, float]]:
        """Return the keys of all objects below `directory`, each with the time at which the store says it was written.

        The time is in seconds since any moment, by the store's clock, and may be rounded down.
        """


def boot_s() -> float:
    """Return the seconds since this machine was started, those counted during which it was suspended."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if clock is None else time.clock_gettime(clock)


@dataclasses.dataclass(slots=True, eq=False)
class _Lease:
    """A lease of this process.

    Attributes:
        renewed_s: when the last renewal that succeeded was begun.
        due_s: when the next is due. Both by the clock of this machine.
        is_ended: whether the hold is over. The object is removed by the end of the hold or, where a renewal is on its
            way then or an exception interrupted that end, by the thread that renews.
        is_told: whether it was logged that the lease has run out.
    """

    key: str
    renewed_s: float
    due_s: float
    is_ended: bool = False
    is_told: bool = False


class Leases:
    """The leases that this process has in one object store, and what it asks of those of others. Thread-safe.

    Args:
        objects: the store.
        writable: whether the store's clock may be read off an object that is written for it; a reader goes by the clock
            of its own machine.
        term_s: how long a lease counts; all who use a store agree on it.
        local_s: the clock of this machine, of any beginning.
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
        #: A moment by the store's clock, which isn't before it, and by this machine's.
        self._known: tuple[float, float] | None = None
        self._reset()

    @contextlib.contextmanager
    def hold(self, key: str) -> Iterator[None]:
        """Hold the file `key` while the context is open; see `Store.hold`. No object of that key is made."""
        directory, _, name = key.rpartition("/")
        lease = _Lease(_lease_key(directory, name), renewed_s=0.0, due_s=0.0)
        try:
            try:
                self._put_first(lease)
                self._add(lease)
            except BaseException:
                self._delete(lease)  # the put may have been carried out
                raise
            yield
        finally:
            lease.is_ended = True  # whatever keeps `_end` from being called, such as a KeyboardInterrupt
            self._end(lease)

    def list_held(self, directory: str) -> Names:
        """Return the names of the files in a directory that somebody holds, sorted; usually by a single request."""
        found, now_s = self._look(directory)
        names = {_name_of(key) for key, modified_s in found if now_s - modified_s < self._term_s}
        return sorted(names - {""})

    def delete_ended(self, directory: str) -> None:
        """Remove the leases in a directory that have run out. A holder that was only stopped writes its own again."""
        found, now_s = self._look(directory)
        for key, modified_s in found:
            if now_s - modified_s >= self._term_s:
                self._objects.delete(key)

    # --- asking ------------------------------------------------------------------------------------------------------

    def _look(self, directory: str) -> tuple[list[tuple[str, float]], float]:
        """Return the leases in a directory with their times, and what the store's clock says at least."""
        folder, asked_s = join_path(directory, FOLDER), time.time()
        found = self._objects.list_modified(folder)
        if not found:
            return [], 0.0
        if not self._writable:  # an answer may take a minute to come
            return found, max(asked_s, *(modified_s for _, modified_s in found))
        if self._known is not None:
            store_s, local_s = self._known
            passed_s = self._local_s() - local_s
            if passed_s < self._term_s * _KNOWN_TERMS:
                return found, store_s + passed_s
        return self._look_at_clock(directory)

    def _look_at_clock(self, directory: str) -> tuple[list[tuple[str, float]], float]:
        """Write an object that is no lease, and list it with the leases: its time is the store's now, or just before.

        What is told of the clock is never ahead of it: a lease is taken for running rather than for run out.
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
        if store_s is None:  # somebody removed it; the newest lease isn't in the future either
            return found, max((modified_s for _, modified_s in found), default=0.0)
        if answered_s - begun_s < self._term_s / _RENEWALS:  # else it is of a moment long ago
            self._known = store_s, answered_s
        return [entry for entry in found if entry[0] != key], store_s

    # --- holding -----------------------------------------------------------------------------------------------------

    def _reset(self) -> None:
        """Begin without a lease, as a forked child does: what was held stays its parent's."""
        self._changed = threading.Condition()
        self._leases: list[_Lease] = []
        self._thread: threading.Thread | None = None
        #: What each thread is writing at this moment: one thread, and those before it that a slow store still keeps.
        self._renewing: dict[threading.Thread, _Lease] = {}

    def _put_first(self, lease: _Lease) -> None:
        """Write a lease for the first time. A busy server may take a minute, which is no reason to fail a save."""
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
                thread.start()  # if there can be no more threads, nothing is held; else it waits until we are through
                self._thread = thread
            self._leases.append(lease)
            self._changed.notify_all()

    def _end(self, lease: _Lease) -> None:
        with self._changed:
            if lease in self._leases:
                self._leases.remove(lease)
            elif lease not in self._renewing.values():
                return  # it was never added; or this is a forked child's copy of somebody else's lease
            idle = None
            if not self._leases:
                idle, self._thread = self._thread, None
            self._changed.notify_all()
            is_renewing = lease in self._renewing.values()
            # A process that ended meanwhile would leave a lease that was just renewed: a launch would wait for it.
            self._changed.wait_for(lambda: lease not in self._renewing.values(), _LAST_RENEWAL_S)
            idle = None if idle in self._renewing else idle
        if idle is not None:
            idle.join()  # at once: it only waits
        if not is_renewing:  # else who renews it deletes it
            self._delete(lease)

    def _delete(self, lease: _Lease) -> None:
        """Remove a lease; one that stays runs out by itself."""
        with contextlib.suppress(Exception):
            self._objects.delete(lease.key)

    def _work(self) -> None:
        while (lease := self._take_due()) is not None:
            self._renew(lease)

    def _take_due(self) -> _Lease | None:
        """Wait until a lease is to be renewed, and return it; None once the last hold has ended, and so the thread."""
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
        """Write a lease again, and delete it if its hold has ended meanwhile.

        After an error it is tried again soon, for as long as the hold lasts.
        """
        begun_s = self._local_s()
        problem: Exception | None = None
        try:
            if not lease.is_ended:
                self._objects.put(lease.key)
        except Exception as error:  # noqa: BLE001 - a thread that ended here would end all holds in silence
            problem = error
        now_s = self._local_s()
        with self._changed:
            if problem is None:
                lease.renewed_s, lease.due_s, lease.is_told = begun_s, begun_s + self._term_s / _RENEWALS, False
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
            _LOG.warning("no new launch waits for this process, which can't renew its lease: %s", problem)

    def _note_renewed(self) -> None:
        del self._renewing[threading.current_thread()]
        self._changed.notify_all()


def free_key(directory: str) -> str:
    """Return the key of an object that is no lease, and is removed as one that has run out."""
    return _lease_key(directory, "")


def _lease_key(directory: str, name: str) -> str:
    return join_path(directory, f"{FOLDER}/{name}-{secrets.token_hex(8)}")


def _name_of(key: str) -> str:
    """Return the name of the file that a lease holds; ``""`` for what is no lease.

    >>> _name_of(_lease_key("run/savers", "0003-00000-9f3c41d27ab80e65"))
    '0003-00000-9f3c41d27ab80e65'
    """
    found = _NAME.fullmatch(key.rpartition("/")[2])
    return "" if found is None else found[1]


class HeldByLeases:
    """What a store of objects has alike with any other: no directories, and holds that are leases.

    Attributes:
        _leases: of the bucket.
        _prefix: under which the store's keys begin.
    """

    #: See `Store`.
    holds_expire = True
    _leases: Leases
    _prefix: str

    def hold(self, path: str) -> contextlib.AbstractContextManager[None]:
        """Hold a key by a lease while the context is open; see `Store.hold`."""
        return self._leases.hold(self._key_to_change(path))

    def is_held(self, path: str) -> bool:
        """Say whether somebody holds a key; see `Store.is_held`."""
        check_path(path)
        directory, _, name = path.rpartition("/")
        return name in self.list_held(directory)

    def list_held(self, prefix: str, wanted: Callable[[str], object] = bool) -> Names:
        """Return the names below `prefix` that somebody holds; see `Store.list_held`."""
        check_prefix(prefix)
        return [name for name in self._leases.list_held(join_path(self._prefix, prefix)) if wanted(name)]

    def delete_leftovers(self, prefix: str) -> None:
        """Remove leases that have run out: a put that didn't end leaves nothing that is listed; see `Store`."""
        check_prefix(prefix)
        self._leases.delete_ended(join_path(self._prefix, prefix))

    def remove_directory(self, path: str) -> None:
        """Do nothing: there are no directories."""
        check_prefix(path)

    def sync(self, path: str) -> None:
        """Do nothing: what was acknowledged is durable."""
        check_prefix(path)

    def _key_to_change(self, path: str) -> str:
        """Return the key of a path that is about to be written. Raises: what an invalid path raises."""
        check_path(path)
        return join_path(self._prefix, path)


_ALL: Final[weakref.WeakSet[Leases]] = weakref.WeakSet()


def _forget_inherited() -> None:
    for leases in list(_ALL):
        leases._reset()  # noqa: SLF001 - of this module


@functools.cache
def _watch_forks() -> None:
    """See to forks from now on; not at import, since most programs that import this package hold nothing."""
    os.register_at_fork(after_in_child=_forget_inherited)
