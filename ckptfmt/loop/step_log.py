"""The step logs of a run's processes, written in place at each step: SIGKILL loses no record.

A run in a directory has the logs next to its checkpoints. For a run in an object store, each node
keeps its own logs in a directory of this user among the temporary files, and `bring_home` copies a
log to the run. Spec: REQ-RUN-061.
"""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import shutil
import stat
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final, Self

from ckptfmt import limits
from ckptfmt.documents.run import parse_launch_name
from ckptfmt.errors import CkptError, Code, err
from ckptfmt.run.witness import (
    ENDING_PLACE,
    HEADER_NBYTES,
    RECORD_NBYTES,
    STEP_COUNT,
    WITNESS,
    Ending,
    StepRecord,
    StepsHeader,
    WitnessRecord,
    steps_path,
)
from ckptfmt.store.local import LocalStore
from ckptfmt.store.protocol import Store, call_each

#: Greatest size of a step log, in bytes.
NBYTES: Final = HEADER_NBYTES + STEP_COUNT * RECORD_NBYTES
#: Number of newest launches that keep their step logs.
KEPT_LAUNCHES: Final = 8


def node_folder(store: Store, run_id: str) -> Path | None:
    """Return the directory of this machine for the step logs of a run; None where there is none.

    A store in memory has no such directory: no file of such a run outlives the process.
    """
    if isinstance(store, LocalStore):
        return Path(store.name)
    if not store.is_remote:
        return None
    return Path(tempfile.gettempdir()) / f"ckptfmt-{os.getuid()}" / run_id


class StepLog:
    """The step log of this process, opened and written by a thread of this class.

    The caller never waits for the storage, except in `flush` and `close`: a network file system
    that is away delays no step of a training.

    Args:
        path: the file, which must not exist.
        header: the first record.
    """

    def __init__(self, path: Path, header: StepsHeader) -> None:
        self.path = path
        self._fd = -1
        self._error: CkptError | None = None
        self._tasks: queue.SimpleQueue[StepRecord | Callable[[], object] | None] = (
            queue.SimpleQueue()
        )
        self._tasks.put(functools.partial(self._open, header))
        self._thread = threading.Thread(target=self._work, name="ckptfmt-steps", daemon=True)
        self._thread.start()

    def put(self, record: StepRecord) -> None:
        """Write the record of a step soon, after the earlier records.

        Raises: StoreError(STORE_IO) for an earlier record that couldn't be written, and if
            `STEP_COUNT` records wait for the storage.
        """
        if self._error is not None:
            raise self._error
        if self._tasks.qsize() > STEP_COUNT:
            detail = f"the storage has taken none of the last {STEP_COUNT} records of steps"
            raise err(Code.STORE_IO, detail, where=str(self.path))
        self._tasks.put(record)

    def call(self, task: Callable[[], object]) -> None:
        """Call a function in the thread of the log, after the earlier records and calls."""
        self._tasks.put(task)

    def replace_header(self, header: StepsHeader) -> None:
        """Write the header anew, after the earlier records."""
        self._tasks.put(functools.partial(self._write_at, 0, header.dump()))

    def end(self, ending: Ending) -> None:
        """Write how the launch ended, after the earlier records."""
        self._tasks.put(functools.partial(self._write_at, ENDING_PLACE, ending.dump()))

    def flush(self, timeout_s: float) -> bool:
        """Wait until all records are written and all calls are done; return whether they are.

        Args:
            timeout_s: the longest wait in seconds.
        """
        is_done = threading.Event()
        self._tasks.put(is_done.set)
        return is_done.wait(timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Finish the records and calls, and close the file; return whether all this is done.

        A second call has no further effect.

        Args:
            timeout_s: the longest wait in seconds. The thread goes on after a longer time, until
                the process ends.
        Raises: StoreError(STORE_IO) for a record that couldn't be written.
        """
        self._tasks.put(None)
        self._thread.join(timeout_s)
        if self._error is not None:
            raise self._error
        return not self._thread.is_alive()

    def _work(self) -> None:
        while True:
            # Under load, the records of several steps are written at once: each write may wait for
            # the interpreter's lock.
            waiting: list[StepRecord] = []
            task: StepRecord | Callable[[], object] | None = self._tasks.get()
            while isinstance(task, StepRecord):
                waiting.append(task)
                task = _nothing if self._tasks.empty() else self._tasks.get()
            self._attempt(functools.partial(self._write, waiting))
            if task is None:
                self._attempt(self._close)
                return
            self._attempt(task)

    def _attempt(self, task: Callable[[], object]) -> None:
        """Call a function, and keep its first error for the caller of `put` and `close`."""
        try:
            task()
        except Exception as error:  # noqa: BLE001 - a dead thread would let `flush` and `close` wait
            self._error = self._error or _named(error, self.path)

    def _open(self, header: StepsHeader) -> None:
        _make_folder(self.path.parent)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        self._fd = os.open(self.path, flags, 0o644)
        os.ftruncate(self._fd, HEADER_NBYTES)
        os.pwrite(self._fd, header.dump(), 0)

    def _write(self, records: Iterable[StepRecord]) -> None:
        """Write records. Records of successive steps are written at once."""
        runs: list[tuple[int, bytearray]] = []
        end = -1
        for record in records:
            place = HEADER_NBYTES + record.step % STEP_COUNT * RECORD_NBYTES
            if place != end:
                runs.append((place, bytearray()))
            runs[-1][1].extend(record.dump())
            end = place + RECORD_NBYTES
        if self._error is None:
            for place, content in runs:
                os.pwrite(self._fd, content, place)

    def _write_at(self, place: int, content: bytes) -> None:
        if self._error is None:
            os.pwrite(self._fd, content, place)

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Steps:
    """The records of a step log, by step.

    Attributes:
        header: the header.
        records: the records of the newest steps.
        ending: how the launch ended on this process; None without a record of the end.
    """

    def __init__(
        self, header: StepsHeader, records: dict[int, StepRecord], ending: Ending | None = None
    ) -> None:
        self.header = header
        self.records = records
        self.ending = ending

    @property
    def last_step(self) -> int:
        """The last recorded step; the number of steps done at the start without a record."""
        return max(self.records, default=self.header.first_step)

    @classmethod
    def parse(cls, content: bytes) -> Self | None:
        """Return the records; None for other bytes than a step log."""
        header = StepsHeader.parse(content[:HEADER_NBYTES])
        if header is None:
            return None
        places = range(HEADER_NBYTES, len(content) - RECORD_NBYTES + 1, RECORD_NBYTES)
        found = (StepRecord.parse(content[place : place + RECORD_NBYTES]) for place in places)
        records = {record.step: record for record in found if record is not None}
        return cls(header, records, Ending.parse(content))


def read_steps(store: Store, run_id: str, launch: int, writer: int) -> Steps | None:
    """Return the step log of one process of a launch, of this node or of the run, or None."""
    path = steps_path(launch, writer)
    folder = node_folder(store, run_id)
    content = b""
    if folder is not None:
        with contextlib.suppress(OSError):
            content = (folder / path).read_bytes()
    if not content and store.is_remote:
        with contextlib.suppress(CkptError):
            content = store.read(path, limit_nbytes=NBYTES)
    steps = Steps.parse(content)
    return steps if steps is not None and steps.header.run_id == run_id else None


def list_logged_launches(store: Store, run_id: str) -> list[int]:
    """Return the numbers of the launches with step logs on this node or in the run, ascending."""
    names: set[str] = set()
    with contextlib.suppress(CkptError):
        names |= set(store.list_names(WITNESS))
    folder = node_folder(store, run_id)
    if folder is not None and store.is_remote:
        with contextlib.suppress(OSError):
            names |= {f"{path.name}/" for path in (folder / WITNESS).iterdir() if path.is_dir()}
    return sorted(int(name[:-1]) for name in names if name.endswith("/") and name[:-1].isdecimal())


def read_verdicts(store: Store) -> dict[int, WitnessRecord]:
    """Return the verdicts on the launches of a run, by the number of the launch.

    Damaged verdicts are left out.

    Spec: REQ-RUN-062.
    """
    names: Sequence[str] = ()
    with contextlib.suppress(CkptError):
        names = store.list_names(WITNESS)
    verdicts: dict[int, WitnessRecord] = {}
    for name in names:
        number = parse_launch_name(name)
        if number is not None:
            with contextlib.suppress(CkptError):
                path = f"{WITNESS}/{name}"
                content = store.read(path, limit_nbytes=limits.JSON_NBYTES)
                verdicts[number] = WitnessRecord.parse(content, where=path)
    return verdicts


def bring_home(store: Store, path: Path, launch: int, writer: int) -> None:
    """Copy a step log of this node to the run, if the run is in an object store.

    Raises: StoreError.
    """
    if not store.is_remote:
        return
    try:
        content = path.read_bytes()
    except OSError as error:
        raise _named(error, path) from error
    store.replace(steps_path(launch, writer), content)


def remove_old(store: Store, run_id: str, launch: int, *, spared: int | None) -> None:
    """Remove the step logs of all but the newest earlier launches; on process 0 only.

    A failed removal is ignored.

    Args:
        launch: this launch.
        spared: the launch whose logs stay at any age, since another process may be about to read
            them.
    """
    earlier = [number for number in list_logged_launches(store, run_id) if number < launch]
    for number in earlier[:-KEPT_LAUNCHES]:
        if number == spared:
            continue
        prefix = f"{WITNESS}/{number:04d}"
        with contextlib.suppress(CkptError):
            call_each(store, store.delete, list(store.list(prefix)))
            store.remove_directory(prefix)
        folder = node_folder(store, run_id)
        if folder is not None and store.is_remote:
            shutil.rmtree(folder / prefix, ignore_errors=True)


def _make_folder(path: Path) -> None:
    """Make a directory. The directory among the temporary files must belong to this user.

    Raises: OSError.
    """
    shared = Path(tempfile.gettempdir()) / f"ckptfmt-{os.getuid()}"
    if shared in path.parents:
        shared.mkdir(mode=0o700, exist_ok=True)
        status = shared.lstat()
        if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode):
            raise PermissionError(f"{shared} belongs to another user")
    path.mkdir(parents=True, exist_ok=True)


def _named(error: Exception, path: Path) -> CkptError:
    reason = error.strerror if isinstance(error, OSError) else None
    return err(Code.STORE_IO, f"{type(error).__name__}: {reason or error}", where=str(path))


def _nothing() -> None:
    """Do nothing: the task behind the last waiting record."""
