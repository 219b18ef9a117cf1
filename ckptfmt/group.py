"""How the writers of one job tell each other the little that must be the same on all of them.

Never tensors, never anything on the byte path: a step, an attempt's id, who holds what. A writer that refuses says so
here, so that the others raise as well and nobody waits.
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
from typing import Any, Final, TypeAlias, TypeVar, cast

from ckptfmt.commit.waiting import poll
from ckptfmt.errors import CkptError, Code, CommitError, NotFoundError, StateError, err, error_from_json
from ckptfmt.store.protocol import Store

#: Gather the bytes of all writers, in writer order; or a token, the same on all writers and new at each start.
Agree: TypeAlias = "Callable[[bytes], Sequence[bytes]] | str | None"

T = TypeVar("T")

#: How long writers wait for each other where nobody says otherwise, in seconds.
DEADLINE_S: Final = 600.0
#: Where in a store the writers meet that know each other by a token.
EXCHANGE: Final = "exchange"
_TOKEN: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_EXCHANGE_NBYTES: Final = 1 << 30
#: Errors that the caller of ckptfmt mends, and not its author.
_OF_CALLERS: Final = (StateError, CommitError, NotFoundError)
#: How much longer than the deadline an exchange through torch's store may take before the store counts as lost, in
#: seconds; and how long an exchange waits for the others at least, whatever signal asked this process to stop.
_ANSWER_S: Final = 5.0
#: How long process 0 stays in an exchange for the others to read the values, in seconds.
_STAY_S: Final = 5.0
#: How often a process that waits for others looks whether a signal has asked it to stop, in seconds.
_LOOK_S: Final = 0.25


def attempt(action: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Return what an action returns, or what it raises: that is raised again, once the other writers know of it."""
    try:
        return action(), None
    except Exception as error:  # noqa: BLE001 - see above
        return None, error


class Group:
    """The writers of a job: this one's number, how many there are, and a gather of small values among them.

    Args:
        writer: number of this writer, from 0.
        writer_count: how many there are.
        gather: returns the values of all writers in their order; every writer calls it equally often.
    """

    def __init__(self, writer: int, writer_count: int, gather: Callable[[bytes], Sequence[bytes]]) -> None:
        self.writer = writer
        self.writer_count = writer_count
        self._gather = gather

    def all_gather(self, value: object) -> list[Any]:
        """Return the JSON values of all writers, in writer order.

        Raises: LayoutError(WRITERS_DIVERGED) if the gather doesn't return one value for each writer, with this
            writer's own at its place; CommitError(WRITERS_MISSING) at a deadline.
        """
        own = json.dumps(value).encode()
        gathered = [bytes(item) for item in self._gather(own)]
        if len(gathered) != self.writer_count or gathered[self.writer] != own:
            raise err(
                Code.WRITERS_DIVERGED,
                f"agree= returned {len(gathered)} values to writer {self.writer} of {self.writer_count}",
                remedy="agree is an all-gather of bytes: the values of all writers, in writer order, on every writer.",
            )
        return [json.loads(item) for item in gathered]

    def run_on_first(self, action: Callable[[], Any]) -> Any:  # noqa: ANN401 - what the action returns
        """Run an action on writer 0 and return its JSON result on all; if it raises there, raise everywhere.

        Raises: what the action raises; on the other writers an error of the same code.
        """
        result, error = attempt(action) if self.writer == 0 else (None, None)
        return self.raise_together(error, value=result)[0]

    def together(self, action: Callable[[], T]) -> T:
        """Run an action on every writer and return its result; if it raises on one, raise on all.

        Raises: what the action raises; elsewhere as `raise_together`.
        """
        result, error = attempt(action)
        self.raise_together(error)
        return cast("T", result)

    def agree(self, error: Exception | None, answer: dict[str, Any]) -> list[dict[str, Any]]:
        """Tell all writers of an error or of none, as `raise_together`, and of an answer that has a ``step``.

        Returns: the answers of all writers, which are of the same form, and of the same step.
        Raises: as `raise_together`; LayoutError(WRITERS_DIVERGED). Spec: REQ-CMT-001.
        """
        told = self.raise_together(error, value=answer)
        if any(not isinstance(theirs, dict) or theirs.keys() != answer.keys() for theirs in told):
            raise err(Code.WRITERS_DIVERGED, "the writers aren't at the same point", requirement="REQ-CMT-001")
        steps = sorted({theirs["step"] for theirs in told})
        if len(steps) > 1:
            raise err(Code.WRITERS_DIVERGED, f"the writers are at different steps: {steps}", requirement="REQ-CMT-001")
        return told

    def raise_together(self, error: Exception | None, *, value: object = None) -> list[Any]:
        """Tell all writers of an error here, or of none, along with a value; raise on all if there is one anywhere.

        Args:
            error: of ckptfmt or of the program's own objects: whoever fails, the others don't wait for it.
            value: JSON.

        Returns: the values of all writers.
        Raises: `error`; on writers without one StateError(PEER_FAILED), or writer 0's own code where it decides for
            all, such as FENCED; LayoutError(WRITERS_DIVERGED) where another writer is at another point.
        """
        mine = {"error": None if error is None else _error_as_json(error), "value": value}
        try:
            told = self.all_gather(mine) if self.writer_count > 1 else [mine]
        except CkptError as failure:
            raise error or failure from None
        if error is not None:
            # The place in ckptfmt where a mistake of the caller was found says nothing to the caller. The traceback of
            # an object's own error, which is the cause, stays.
            raise error.with_traceback(None) if isinstance(error, _OF_CALLERS) else error
        if any(type(theirs) is not dict or theirs.keys() != mine.keys() for theirs in told):
            raise err(
                Code.WRITERS_DIVERGED,
                "the writers aren't at the same point: one of them gave up waiting, or called another function",
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


def find_worker(writer: tuple[int, int] | None) -> tuple[int, int]:
    """Return number and count of this worker: as given, as torch.distributed or jax.distributed says, or the only one.

    Raises: StateError(ARGUMENT).
    """
    if writer is not None:
        number, count = writer
        if not 0 <= number < count:
            raise err(Code.ARGUMENT, f"writer={writer!r} isn't (number, count), 0 <= number < count", where="writer=")
        return number, count
    distributed = _find_distributed()
    if distributed is not None:
        return distributed.get_rank(), distributed.get_world_size()
    jax = sys.modules.get("jax")
    if jax is not None and getattr(jax, "distributed", None) is not None and jax.distributed.is_initialized():
        return jax.process_index(), jax.process_count()
    return 0, 1


def make_group(
    writer: tuple[int, int] | None,
    agree: Agree,
    store: Store | None,
    *,
    deadline_s: float,
    stop_end_s: Callable[[], float] = lambda: math.inf,
) -> Group:
    """Return the group of this job's writers.

    Args:
        writer: (number, count); None to ask torch.distributed or jax.distributed, else the only one.
        agree: see `Agree`; None to use the key-value store of torch.distributed.
        store: for the exchange by token; None where there is none.
        deadline_s: how long to wait for the others, in seconds.
        stop_end_s: returns by when, on the monotonic clock, the wait for the others ends at the latest since a signal
            asked this process to stop; infinity if none did. Asked through torch.distributed alone.

    Raises: StateError(WRITERS_UNKNOWN, ARGUMENT).
    """
    number, count = find_worker(writer)
    if count == 1:
        return Group(0, 1, lambda value: [value])
    if callable(agree):
        return Group(number, count, agree)
    if isinstance(agree, str) and store is not None:
        return Group(number, count, _StoreExchange(store, agree, number, count, deadline_s))
    distributed = _find_distributed()
    if distributed is not None and (distributed.get_rank(), distributed.get_world_size()) == (number, count):
        return Group(number, count, _TorchExchange(distributed, number, count, deadline_s, stop_end_s))
    raise err(Code.WRITERS_UNKNOWN, f"writer {number} of {count} has no way to reach the others", where="agree=")


def _find_distributed() -> Any:  # noqa: ANN401 - a module of torch, which this module must not import
    """Return torch.distributed where the program has imported and initialised it."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed


class _TorchExchange:
    """All-gather through torch.distributed's key-value store: no process group is used, no device is touched.

    Each writer's rounds are counted in that store, not in this process: any number of objects share the count.

    The store is in process 0, unless a launcher holds it, and ends with it. Process 0 leaves an exchange once the
    others have read the values: what it does next may be to end.
    """

    def __init__(
        self,
        distributed: Any,  # noqa: ANN401
        writer: int,
        writer_count: int,
        deadline_s: float,
        stop_end_s: Callable[[], float] = lambda: math.inf,
    ) -> None:
        default_store = distributed.distributed_c10d._get_default_store()  # noqa: SLF001 - there is no public way
        self._store = distributed.PrefixStore("ckptfmt", default_store)
        self._writer = writer
        self._writer_count = writer_count
        self._deadline, self._stop_end_s = dt.timedelta(seconds=deadline_s), stop_end_s

    def __call__(self, value: bytes) -> list[bytes]:
        outcomes: list[tuple[tuple[list[str], list[bytes]] | None, Exception | None]] = []

        def exchange() -> None:
            found, error = attempt(lambda: self._exchange(value))
            outcomes.append((found, error))
            if self._writer == 0 and found is not None:
                self._stay(found[0])

        # The store's client heeds no time-out of its own once the store's host is gone without a word: it waits for the
        # answer to what it then sends. And while it waits, no handler of a signal runs in the thread that called it.
        thread = threading.Thread(target=exchange, name="ckptfmt-agree", daemon=True)
        thread.start()
        # A signal that came long ago, in a long step, ends no exchange in which the others are there.
        least_s = time.monotonic() + _ANSWER_S
        end_s = least_s + self._deadline.total_seconds()
        while thread.is_alive() and time.monotonic() < min(end_s, max(least_s, self._stop_end_s())):
            thread.join(max(0.0, min(_LOOK_S, end_s - time.monotonic())))
        if not outcomes:
            detail = f"torch.distributed's store, on process 0, didn't answer for {self._deadline.total_seconds():g} s"
            if math.isfinite(self._stop_end_s()):
                detail = "another process didn't come by the deadline of a signal that asked this one to stop"
            raise err(Code.WRITERS_MISSING, detail, requirement="REQ-CMT-001")
        found, error = outcomes[0]
        if error is not None:
            raise error
        return cast("tuple[list[str], list[bytes]]", found)[1]

    def _exchange(self, value: bytes) -> tuple[list[str], list[bytes]]:
        """Return the keys of this round and their values, in writer order. Raises: CommitError(WRITERS_MISSING)."""
        keys: list[str] = []
        try:
            number = self._store.add(f"rounds/{self._writer}", 1) - 1
            keys = [f"{number}/{writer}" for writer in range(self._writer_count)]
            self._store.set(keys[self._writer], base64.b64encode(value).decode())
            self._store.wait(keys, self._deadline)
            values = [base64.b64decode(self._store.get(key)) for key in keys]
            if number > 0:
                # All have arrived here, so all have read the round before.
                for key in (f"{number - 1}/{self._writer}", f"{number - 1}/{self._writer}/read"):
                    self._store.delete_key(key)
            self._store.set(f"{keys[self._writer]}/read", "")  # the last request of this round: it has no answer
        except RuntimeError as error:
            detail = f"{self._name_missing(keys)} didn't come within {self._deadline.total_seconds():g} s"
            raise err(Code.WRITERS_MISSING, detail, requirement="REQ-CMT-001") from error
        return keys, values

    def _stay(self, keys: list[str]) -> None:
        """Wait until all writers have read the values of a round."""
        marks = [f"{key}/read" for key in keys]
        with contextlib.suppress(RuntimeError):  # a process is gone: the next exchange says so
            self._store.wait(marks, min(self._deadline, dt.timedelta(seconds=_STAY_S)))

    def _name_missing(self, keys: list[str]) -> str:
        try:
            missing = [str(writer) for writer, key in enumerate(keys) if not self._store.check([key])]
        except RuntimeError:  # the process that holds the key-value store is gone
            missing = []
        return f"writer {', '.join(missing[:16])}" if missing else "torch.distributed's store or a writer"


class _StoreExchange:
    """All-gather through files, for writers that share nothing but the store and a token that is new at each start."""

    def __init__(self, store: Store, token: str, writer: int, writer_count: int, deadline_s: float) -> None:
        if not _TOKEN.fullmatch(token):
            raise err(Code.ARGUMENT, f"{token!r} has other characters than letters, digits, - and _", where="agree=")
        self._store = store
        self._prefix = f"{EXCHANGE}/{token}"
        self._writer = writer
        self._writer_count = writer_count
        self._deadline_s = deadline_s
        self._number = 0

    def __call__(self, value: bytes) -> list[bytes]:
        while True:
            number, self._number = self._number, self._number + 1
            try:
                self._store.create(self._path(number, self._writer), [value])
            except CkptError as error:
                # An earlier round of this start, in an object that was let go.
                if error.code != Code.STORE_EXISTS:
                    raise
            else:
                return [self._wait_for(number, writer) for writer in range(self._writer_count)]

    def _path(self, number: int, writer: int) -> str:
        return f"{self._prefix}/{number:06d}-{writer:05d}.json"

    def _wait_for(self, number: int, writer: int) -> bytes:
        for _ in poll(self._deadline_s):
            try:
                return self._store.read(self._path(number, writer), limit_nbytes=_EXCHANGE_NBYTES)
            except CkptError as error:
                if error.code != Code.FILE_MISSING:
                    raise
        detail = f"writer {writer} didn't come within {self._deadline_s:g} s"
        raise err(Code.WRITERS_MISSING, detail, requirement="REQ-CMT-001")
