"""Send bytes between two processes of torch.distributed, outside of the program's groups."""

from __future__ import annotations

import contextlib
import datetime as dt
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ckptfmt.errors import CkptError, Code, err

_DATA_TAG = 0
_NOTHING_TAG = 1
_NOTHING_S: Final = 0.001
#: A timeout longer than any training. `Pair.abort` or the end of the other process ends the wait.
_EVER: Final = dt.timedelta(days=365)


def find_rank() -> tuple[int, int] | None:
    """Return rank and world size, or None if torch.distributed isn't initialised or lacks gloo."""
    if not (dist.is_available() and dist.is_initialized() and dist.is_gloo_available()):
        return None
    return dist.get_rank(), dist.get_world_size()


class Pair:
    """A connection of two processes. On each side, a single thread at a time sends or receives.

    The connection is a gloo group that only these two processes create. No other process takes
    part, no sequence number of a process group is used, and no work runs on a device. A sent
    message waits until the other side receives it.

    Args:
        name: the connection's name, equal on both sides and new for each connection.
        number: 0 on the first side, 1 on the second side.
        deadline_s: the time limit for connecting and sending, in seconds.
        store: the store through which the processes find each other; None for the store of
            torch.distributed.

    Raises: CommitError(WRITERS_MISSING) if the other side doesn't connect.
    """

    def __init__(self, name: str, number: int, *, deadline_s: float, store: Any = None) -> None:
        self._timeout = dt.timedelta(seconds=deadline_s)
        self._other = 1 - number
        if store is None:
            store = c10d._get_default_store()  # noqa: SLF001
        make: Any = dist.ProcessGroupGloo  # torch's annotations lack its calls
        try:
            self._group = make(c10d.PrefixStore(name, store), number, 2, self._timeout)
        except RuntimeError as error:
            raise _gone(error) from error

    def send(self, content: bytearray | memoryview) -> None:
        """Send at least one byte. The memory must be writable.

        Raises: CommitError(WRITERS_MISSING) if the other side is gone or hangs.
        """
        try:
            self._group.send(
                [torch.frombuffer(content, dtype=torch.uint8)], self._other, _DATA_TAG
            ).wait(self._timeout)
        except RuntimeError as error:
            raise _gone(error) from error

    def receive(self, nbytes: int, *, timeout_s: float | None) -> bytearray:
        """Return the next `nbytes` bytes from the other side.

        Args:
            nbytes: the number of bytes, at least 1.
            timeout_s: the time limit, in seconds; None for no limit while the other side lives.

        Raises: CommitError(WRITERS_MISSING). The connection is unusable after that.
        """
        content = bytearray(nbytes)
        timeout = _EVER if timeout_s is None else dt.timedelta(seconds=timeout_s)
        try:
            self._group.recv(
                [torch.frombuffer(content, dtype=torch.uint8)], self._other, _DATA_TAG
            ).wait(timeout)
        except RuntimeError as error:
            raise _gone(error) from error
        return content

    def abort(self) -> None:
        """End the connection. Waiting calls on both sides raise an error."""
        # gloo closes a connection when a call times out. Torch 2.7 to 2.15 has no other way.
        with contextlib.suppress(RuntimeError):
            nothing = torch.empty(1, dtype=torch.uint8)
            self._group.recv([nothing], self._other, _NOTHING_TAG).wait(
                dt.timedelta(seconds=_NOTHING_S)
            )


def _gone(error: RuntimeError) -> CkptError:
    # gloo's message has source locations before the first sentence, and advice after it.
    said = str(error).partition("\n")[0].rpartition("] ")[2].partition(". ")[0]
    return err(Code.WRITERS_MISSING, said or type(error).__qualname__)
