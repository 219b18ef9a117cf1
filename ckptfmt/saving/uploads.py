"""The uploads of cached saves to their run's home: one thread, in the order of saves, with retries.

A job is retried as long as home doesn't answer.
"""

from __future__ import annotations

import collections
import functools
import threading
import time
from collections.abc import Callable, Container
from typing import Final, TypeVar

from ckptfmt.documents.durability import HOME
from ckptfmt.documents.manifest import Manifest
from ckptfmt.errors import CkptError, Code
from ckptfmt.run.node_cache import NodeCache, part_of
from ckptfmt.run.save_job import SaveJob

T = TypeVar("T")

#: Codes of errors of home that may pass, so that a call is repeated.
PASSING: Final = frozenset({Code.STORE_IO, Code.STORE_NO_ANSWER, Code.STORE_ACCESS})
#: The first and the longest pause between two calls to a home that doesn't answer, in seconds.
_PAUSE_MIN_S = 0.1
_PAUSE_MAX_S = 10.0


def bring_home(
    cache: NodeCache, job: SaveJob, *, uploads: Uploads, has_replica: bool = False
) -> Manifest:
    """Copy a writer's cached save to home, commit the save, and mark it as settled in the cache.

    Writer 0 commits; the rest wait for the commit. If the files may stay in caches, only the part
    is copied, and the save is settled by a later save with its files at home.

    Args:
        job: the save, at home.
        has_replica: whether another node's cache certainly has the files.

    Raises: errors of `NodeCache.upload` and `SaveJob.run`; FencedError(FENCED);
        CommitError(CHECKPOINT_EXISTS). After an error the save is settled too, except where home
        doesn't answer.
    Spec: REQ-RUN-035, REQ-RUN-037, REQ-RUN-004, REQ-CMT-048.
    """
    save = job.save
    part = part_of(save.origin, save.writer)
    passing = PASSING
    if save.writer == 0:
        passing |= {Code.COMMIT_UNKNOWN}  # a committer may ask again
    try:
        manifest = job.run(
            lambda: cache.upload(part, save.store, has_replica=has_replica),
            again=functools.partial(uploads.until_home_answers, passing=passing),
            waits=True,
        )
    except Exception as error:
        if not (isinstance(error, CkptError) and error.code in passing):
            cache.settle(part)
        raise
    if manifest.durability == HOME:
        cache.settle(part)
        cache.settle_up_to(part)
    return manifest


class Uploads:
    """A queue of jobs, and the thread that runs them one after the other.

    Args:
        note: called in the thread, with a sentence for the user, when home stops answering.
        on_broken: called with the exception that ends the thread; the remaining jobs aren't run.
    """

    def __init__(
        self, note: Callable[[str], None], on_broken: Callable[[BaseException], None]
    ) -> None:
        self._note = note
        self._on_broken = on_broken
        self._changed = threading.Condition()
        # The lock of `_changed` guards the attributes down to `_end_s`.
        self._jobs: collections.deque[Callable[[], None]] = collections.deque()
        self._is_ending = self._is_busy = self._has_ended = False
        self._done_count = 0
        #: Time at which a home that doesn't answer is given up; None while the trainer is alive.
        self._end_s: float | None = None
        #: Whether home answered the last call.
        self.is_well = True
        self._thread = threading.Thread(target=self._work, name="ckptfmt-upload", daemon=True)
        self._thread.start()

    def add(self, job: Callable[[], None]) -> None:
        """Append a job to the queue. A job reports its own errors."""
        with self._changed:
            self._jobs.append(job)
            self._changed.notify_all()

    def wait_for_one(self) -> bool:
        """Wait until a job is done; return False at once without jobs or without a thread."""
        with self._changed:
            count = self._done_count
            if not self._has_work():
                return False
            self._changed.wait_for(lambda: self._done_count > count or self._has_ended)
            return True

    def wait_idle(self) -> None:
        """Wait until all jobs are done."""
        with self._changed:
            self._changed.wait_for(lambda: not self._has_work())

    def until_home_answers(self, call: Callable[[], T], *, passing: Container[Code] = PASSING) -> T:
        """Repeat a call to home until home answers, and return the result.

        Raises: any error of the call outside `passing`. After the deadline of `limit`, also errors
        in
            `passing`.
        """
        pause_s = _PAUSE_MIN_S
        while True:
            try:
                answer = call()
            except CkptError as error:
                if error.code not in passing or self._is_over():
                    raise
                if self.is_well:
                    self._note(f"HOME_UNREACHABLE: saves wait in the cache of this node: {error}")
                self.is_well = False
            else:
                self.is_well = True
                return answer
            self._pause(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_MAX_S)

    def limit(self, deadline_s: float) -> None:
        """Set a deadline for a home that doesn't answer, since the trainer has ended or will soon.

        Args:
            deadline_s: seconds from now. Only the first call counts.
        """
        with self._changed:
            if self._end_s is None:
                self._end_s = time.monotonic() + deadline_s
            self._changed.notify_all()

    def end(self) -> None:
        """Run the remaining jobs, end the thread, and wait for its end."""
        with self._changed:
            self._is_ending = True
            self._changed.notify_all()
        self._thread.join()

    def is_alive(self) -> bool:
        """Return whether the thread is running."""
        return self._thread.is_alive()

    def _has_work(self) -> bool:
        return not self._has_ended and (self._is_busy or bool(self._jobs))

    def _is_over(self) -> bool:
        with self._changed:
            return self._end_s is not None and time.monotonic() >= self._end_s

    def _pause(self, pause_s: float) -> None:
        """Wait for some time, but not beyond the deadline; a new deadline ends the wait."""
        with self._changed:
            had = self._end_s is not None
            rest_s = (
                pause_s
                if self._end_s is None
                else min(pause_s, max(0.0, self._end_s - time.monotonic()))
            )
            self._changed.wait_for(lambda: not had and self._end_s is not None, rest_s)

    def _work(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._jobs or self._is_ending)
                    if not self._jobs:
                        return
                    job = self._jobs.popleft()
                    self._is_busy = True
                job()
                del job
                with self._changed:
                    self._is_busy = False
                    self._done_count += 1
                    self._changed.notify_all()
        except BaseException as error:  # noqa: BLE001
            self._on_broken(error)
        finally:
            with self._changed:
                self._has_ended = True
                self._jobs.clear()
                self._changed.notify_all()
