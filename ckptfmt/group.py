"""The exchange of small values between the writers of one job.

The values are a step, an attempt's id, or the distribution of tensors, never tensors or other bulk
data. A writer that fails sends the error here, so that all writers raise an error and none waits.
"""

from __future__ import annotations

import base64
import contextlib
import datetime as dt
import json
import math
import re
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Self, TypeAlias, TypeVar, cast

from ckptfmt.commit.waiting import poll
from ckptfmt.errors import (
    CkptError,
    Code,
    CommitError,
    NotFoundError,
    StateError,
    err,
    error_from_json,
)
from ckptfmt.store.protocol import Store

#: A function that gathers the bytes of all writers, in writer order; or a token, equal on all
#: writers and new at each start.
Agree: TypeAlias = "Callable[[bytes], Sequence[bytes]] | str | None"

T = TypeVar("T")

#: Time to wait for other writers by default, in seconds.
DEADLINE_S: Final = 600.0
#: Folder of a store in which writers with a common token meet.
EXCHANGE: Final = "exchange"
_TOKEN: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_EXCHANGE_NBYTES: Final = 1 << 30
#: Classes of errors to be fixed by the caller of ckptfmt, and not by the author.
_OF_CALLERS: Final = (StateError, CommitError, NotFoundError)
#: Time after the deadline until torch's store counts as lost, in seconds. Also the least time of an
#: exchange, even if a signal has asked this process to stop.
_ANSWER_S: Final = 5.0
#: Time for which process 0 stays in an exchange while the others read the values, in
#: seconds.
_STAY_S: Final = 5.0
#: Interval at which a waiting process checks for a signal to stop, in seconds.
_LOOK_S: Final = 0.25


def attempt(action: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Return an action's result or exception.

    The caller raises the exception after the exchange with all writers.
    """
    try:
        return action(), None
    except Exception as error:  # noqa: BLE001
        return None, error


class Group:
    """The writers of a job: this writer's number, their count, and a gather of small values.

    Args:
        writer: number of this writer, from 0.
        writer_count: number of writers.
        gather: returns the values of all writers in their order; every writer calls it equally
            often.
    """

    def __init__(
        self, writer: int, writer_count: int, gather: Callable[[bytes], Sequence[bytes]]
    ) -> None:
        self.writer = writer
        self.writer_count = writer_count
        self._gather = gather

    def follow(self, other: Group) -> None:
        """Exchange through another group from now on: the job goes on with other processes.

        Raises: StateError(ARGUMENT) unless number and count of this writer are the same.
        """
        if (other.writer, other.writer_count) != (self.writer, self.writer_count):
            raise err(
                Code.ARGUMENT,
                f"this process was writer {self.writer} of {self.writer_count}, and is writer"
                f" {other.writer} of {other.writer_count} in the new group",
                where="regroup()",
                remedy=(
                    "Let each process keep its number, and give the number of a lost process to"
                    " its replacement; or start all processes again."
                ),
            )
        self._gather = other._gather

    def all_gather(self, value: object) -> list[Any]:
        """Return the JSON values of all writers, in writer order.

        Raises: LayoutError(WRITERS_DIVERGED) if the gather doesn't return one value for each
            writer, with this writer's own value in its place; CommitError(WRITERS_MISSING) at a
            deadline.
        """
        own = json.dumps(value).encode()
        gathered = [bytes(item) for item in self._gather(own)]
        if len(gathered) != self.writer_count or gathered[self.writer] != own:
            raise err(
                Code.WRITERS_DIVERGED,
                (
                    f"agree= returned {len(gathered)} values to writer {self.writer} of"
                    f" {self.writer_count}"
                ),
                remedy=(
                    "agree is an all-gather of bytes: the values of all writers, in writer"
                    " order, on every writer."
                ),
            )
        return [json.loads(item) for item in gathered]

    def run_on_first(self, action: Callable[[], Any]) -> Any:
        """Run an action on writer 0, and return the JSON result, or raise the exception, on all.

        Raises: the action's exception; on the other writers an error of the same code.
        """
        result, error = attempt(action) if self.writer == 0 else (None, None)
        return self.raise_together(error, value=result)[0]

    def together(self, action: Callable[[], T]) -> T:
        """Run an action on every writer and return the result; an exception is raised on all.

        Raises: the action's exception; on the other writers as `raise_together`.
        """
        result, error = attempt(action)
        self.raise_together(error)
        return cast("T", result)

    def agree(self, error: Exception | None, answer: dict[str, Any]) -> list[dict[str, Any]]:
        """Exchange an error or None, as `raise_together`, and an answer with a ``step``.

        Returns: the answers of all writers, which have the same keys and the same step.
        Raises: as `raise_together`; LayoutError(WRITERS_DIVERGED). Spec: REQ-CMT-001.
        """
        told = self.raise_together(error, value=answer)
        if any(not isinstance(theirs, dict) or theirs.keys() != answer.keys() for theirs in told):
            raise err(
                Code.WRITERS_DIVERGED,
                "the writers aren't at the same point",
                requirement="REQ-CMT-001",
            )
        steps = sorted({theirs["step"] for theirs in told})
        if len(steps) > 1:
            raise err(
                Code.WRITERS_DIVERGED,
                f"the writers are at different steps: {steps}",
                requirement="REQ-CMT-001",
            )
        return told

    def raise_together(self, error: Exception | None, *, value: object = None) -> list[Any]:
        """Exchange an error or None, and a value; raise on all writers if any has an error.

        Args:
            error: an error of ckptfmt or of the program's own objects; None without an error.
            value: a JSON value.

        Returns: the values of all writers.
        Raises: `error`; on writers without an error StateError(PEER_FAILED), or writer 0's own code
            where writer 0 decides for all, such as FENCED; LayoutError(WRITERS_DIVERGED) where
            another writer is at another point.
        """
        mine = {"error": None if error is None else _error_as_json(error), "value": value}
        try:
            told = self.all_gather(mine) if self.writer_count > 1 else [mine]
        except CkptError as failure:
            raise error or failure from None
        if error is not None:
            # The traceback through ckptfmt doesn't help a caller to fix a wrong call. The traceback
            # of an object's own error, which is the cause, stays.
            raise error.with_traceback(None) if isinstance(error, _OF_CALLERS) else error
        if any(type(theirs) is not dict or theirs.keys() != mine.keys() for theirs in told):
            raise err(
                Code.WRITERS_DIVERGED,
                (
                    "the writers aren't at the same point: one of them gave up waiting, or called"
                    " another function"
                ),
                requirement="REQ-CMT-001",
            )
        for writer, theirs in enumerate(told):
            if theirs["error"] is not None:
                raise _peer_error(writer, theirs["error"])
        return [theirs["value"] for theirs in told]


def _error_as_json(error: Exception) -> dict[str, str | None]:
    if isinstance(error, CkptError):
        return error.as_json()
    kind = type(error).__qualname__
    return {"code": kind, "detail": str(error), "where": None, "requirement": None, "remedy": ""}


def _peer_error(writer: int, error: dict[str, Any]) -> CkptError:
    if writer == 0 and error["code"] in Code.__members__:
        return error_from_json(error)
    remedy = f"On writer {writer}: {error['remedy']}" if error["remedy"] else None
    detail = f"writer {writer}: {error['code']}: {error['detail']}"
    return err(Code.PEER_FAILED, detail, where=error["where"], remedy=remedy)


def check_deadline(deadline_s: float) -> None:
    """Refuse a deadline of 0 or less. Raises: StateError(ARGUMENT)."""
    if not deadline_s > 0:
        raise err(
            Code.ARGUMENT,
            f"deadline_s={deadline_s!r} isn't a positive time",
            where="deadline_s=",
            remedy="Pass a time in seconds, such as deadline_s=60.",
        )


def never() -> bool:
    """Return that no process is lost, as far as known."""
    return False


def find_worker(writer: tuple[int, int] | None) -> tuple[int, int]:
    """Return number and count of this worker.

    These are `writer`, else from torch.distributed or jax.distributed, else (0, 1).

    Raises: StateError(ARGUMENT).
    """
    if writer is not None:
        number, count = writer
        if not 0 <= number < count:
            raise err(
                Code.ARGUMENT,
                f"writer={writer!r} isn't (number, count), 0 <= number < count",
                where="writer=",
            )
        return number, count
    distributed = _find_distributed()
    if distributed is not None:
        return distributed.get_rank(), distributed.get_world_size()
    jax = sys.modules.get("jax")
    if (
        jax is not None
        and getattr(jax, "distributed", None) is not None
        and jax.distributed.is_initialized()
    ):
        return jax.process_index(), jax.process_count()
    return 0, 1


def make_group(
    writer: tuple[int, int] | None,
    agree: Agree,
    store: Store | None,
    *,
    deadline_s: float,
    stop_end_s: Callable[[], float] = lambda: math.inf,
    is_lost: Callable[[], bool] = never,
) -> Group:
    """Return the group of this job's writers.

    Args:
        writer: (number, count); None to ask torch.distributed or jax.distributed, else (0, 1).
        agree: as described at `Agree`; None to use the key-value store of torch.distributed.
        store: the store for the exchange by token; None without a store.
        deadline_s: time to wait for the other writers, in seconds.
        stop_end_s: returns the latest end of the wait, on the monotonic clock, after a signal asked
            this process to stop; infinity without a signal. Used with torch.distributed only.
        is_lost: returns whether a process is lost, to end a wait. A function in `agree` waits by
            itself.

    Raises: StateError(WRITERS_UNKNOWN, ARGUMENT).
    """
    number, count = find_worker(writer)
    if count == 1:
        return Group(0, 1, lambda value: [value])
    if callable(agree):
        return Group(number, count, agree)
    if isinstance(agree, str) and store is not None:
        files = _StoreExchange(store, agree, number, count, deadline_s=deadline_s, is_lost=is_lost)
        return Group(number, count, files)
    distributed = _find_distributed()
    if distributed is not None and (distributed.get_rank(), distributed.get_world_size()) == (
        number,
        count,
    ):
        return Group(
            number,
            count,
            _TorchExchange(
                distributed,
                number,
                count,
                deadline_s=deadline_s,
                stop_end_s=stop_end_s,
                is_lost=is_lost,
            ),
        )
    raise err(
        Code.WRITERS_UNKNOWN,
        f"writer {number} of {count} has no way to reach the others",
        where="agree=",
    )


def _find_distributed() -> Any:
    """Return torch.distributed if the program has imported and initialised it; else None."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed


class _Watch:
    """Asks `Job.lost` during an exchange, in a thread: the function may hang.

    Attributes:
        error: the error that ends the wait; None until the function returns true or raises.
    """

    def __init__(self, is_lost: Callable[[], bool]) -> None:
        self.error: CkptError | None = None
        self._is_lost = is_lost
        self._is_over = threading.Event()

    def __enter__(self) -> Self:
        if self._is_lost is not never:
            threading.Thread(target=self._ask, name="ckptfmt-lost", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()

    def _ask(self) -> None:
        detail = "a process of the job is lost, as Job(lost=) says"
        while not self._is_over.wait(_LOOK_S):
            found, error = attempt(self._is_lost)
            if error is not None:
                detail = f"Job(lost=) has failed: {type(error).__name__}: {error}"
            if found or error is not None:
                missing = err(Code.WRITERS_MISSING, detail, requirement="REQ-CMT-001")
                missing.__cause__ = error
                self.error = missing
                return


class _TorchExchange:
    """All-gather through torch.distributed's key-value store: without a process group or a device.

    Each writer's rounds are counted in the store, not in this process: any number of objects share
    the count.

    The store is in process 0, unless a launcher holds it, and ends with that process. Process 0
    leaves an exchange only after the other processes have read the values, since it may end
    afterwards.
    """

    def __init__(
        self,
        distributed: Any,
        writer: int,
        writer_count: int,
        *,
        deadline_s: float,
        stop_end_s: Callable[[], float] = lambda: math.inf,
        is_lost: Callable[[], bool] = never,
    ) -> None:
        default_store = distributed.distributed_c10d._get_default_store()  # noqa: SLF001
        self._store = distributed.PrefixStore("ckptfmt", default_store)
        self._clones = is_lost is not never
        self._writer = writer
        self._writer_count = writer_count
        self._deadline = dt.timedelta(seconds=deadline_s)
        self._stop_end_s = stop_end_s
        self._is_lost = is_lost

    def __call__(self, value: bytes) -> list[bytes]:
        outcomes: list[tuple[tuple[list[str], list[bytes]] | None, Exception | None]] = []

        def exchange() -> None:
            found, error = attempt(lambda: self._exchange(value))
            outcomes.append((found, error))
            if self._writer == 0 and found is not None:
                self._stay(found[0])

        # After its host has vanished, the store's client ignores its own time-out and waits for an
        # answer for ever. While it waits, no signal handler runs in the calling thread.
        thread = threading.Thread(target=exchange, name="ckptfmt-agree", daemon=True)
        thread.start()
        # A signal from long ago, during a long step, must not end an exchange in which all
        # processes take part.
        least_s = time.monotonic() + _ANSWER_S
        end_s = least_s + self._deadline.total_seconds()
        with _Watch(self._is_lost) as watch:
            while thread.is_alive() and time.monotonic() < min(
                end_s, max(least_s, self._stop_end_s())
            ):
                thread.join(max(0.0, min(_LOOK_S, end_s - time.monotonic())))
                if watch.error is not None:
                    break
        if not outcomes and watch.error is not None:
            raise watch.error
        if not outcomes:
            detail = (
                "torch.distributed's store, on process 0, didn't answer for"
                f" {self._deadline.total_seconds():g} s"
            )
            if math.isfinite(self._stop_end_s()):
                detail = (
                    "another process didn't come by the deadline of a signal that asked this"
                    " one to stop"
                )
            raise err(Code.WRITERS_MISSING, detail, requirement="REQ-CMT-001")
        found, error = outcomes[0]
        if error is not None:
            raise error
        return cast("tuple[list[str], list[bytes]]", found)[1]

    def _exchange(self, value: bytes) -> tuple[list[str], list[bytes]]:
        """Return the keys of this round and their values, in writer order.

        Raises: CommitError(WRITERS_MISSING).
        """
        keys: list[str] = []
        try:
            if self._clones and hasattr(self._store, "clone"):
                # A client of the store answers a single request at a time. An abandoned exchange
                # would keep the program from the store until the deadline.
                self._store = self._store.clone()
            self._clones = False
            number = self._store.add(f"rounds/{self._writer}", 1) - 1
            keys = [f"{number}/{writer}" for writer in range(self._writer_count)]
            self._store.set(keys[self._writer], base64.b64encode(value).decode())
            self._store.wait(keys, self._deadline)
            values = [base64.b64decode(self._store.get(key)) for key in keys]
            if number > 0:
                # All writers have arrived here, so all have read the previous round.
                for key in (f"{number - 1}/{self._writer}", f"{number - 1}/{self._writer}/read"):
                    self._store.delete_key(key)
            # The last request of this round, without an answer.
            self._store.set(f"{keys[self._writer]}/read", "")
        except RuntimeError as error:
            detail = (
                f"{self._name_missing(keys)} didn't come within"
                f" {self._deadline.total_seconds():g} s"
            )
            raise err(Code.WRITERS_MISSING, detail, requirement="REQ-CMT-001") from error
        return keys, values

    def _stay(self, keys: list[str]) -> None:
        """Wait until all writers have read the values of a round."""
        marks = [f"{key}/read" for key in keys]
        # After the loss of a process, the next exchange raises an error.
        with contextlib.suppress(RuntimeError):
            self._store.wait(marks, min(self._deadline, dt.timedelta(seconds=_STAY_S)))

    def _name_missing(self, keys: list[str]) -> str:
        try:
            missing = [
                str(writer) for writer, key in enumerate(keys) if not self._store.check([key])
            ]
        except RuntimeError:  # the process with the key-value store is gone
            missing = []
        return (
            f"writer {', '.join(missing[:16])}"
            if missing
            else "torch.distributed's store or a writer"
        )


class _StoreExchange:
    """All-gather through files, for writers with a common store and token, new at each start."""

    def __init__(
        self,
        store: Store,
        token: str,
        writer: int,
        writer_count: int,
        *,
        deadline_s: float,
        is_lost: Callable[[], bool],
    ) -> None:
        if not _TOKEN.fullmatch(token):
            raise err(
                Code.ARGUMENT,
                f"{token!r} has other characters than letters, digits, - and _",
                where="agree=",
            )
        self._store = store
        self._prefix = f"{EXCHANGE}/{token}"
        self._writer = writer
        self._writer_count = writer_count
        self._deadline_s = deadline_s
        self._is_lost = is_lost
        self._number = 0

    def __call__(self, value: bytes) -> list[bytes]:
        while True:
            number = self._number
            self._number = self._number + 1
            try:
                self._store.create(self._path(number, self._writer), [value])
            except CkptError as error:
                # The file is of an earlier round of this start, by a former object.
                if error.code != Code.STORE_EXISTS:
                    raise
            else:
                with _Watch(self._is_lost) as watch:
                    return [
                        self._wait_for(number, writer, watch)
                        for writer in range(self._writer_count)
                    ]

    def _path(self, number: int, writer: int) -> str:
        return f"{self._prefix}/{number:06d}-{writer:05d}.json"

    def _wait_for(self, number: int, writer: int, watch: _Watch) -> bytes:
        for _ in poll(self._deadline_s):
            try:
                return self._store.read(self._path(number, writer), limit_nbytes=_EXCHANGE_NBYTES)
            except CkptError as error:
                if error.code != Code.FILE_MISSING:
                    raise
            if watch.error is not None:
                raise watch.error
        detail = f"writer {writer} didn't come within {self._deadline_s:g} s"
        raise err(Code.WRITERS_MISSING, detail, requirement="REQ-CMT-001")
