"""Two processes of torch.distributed that send bytes to each other, apart from all process groups of the program."""

from __future__ import annotations

import contextlib
import datetime as dt
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ckptfmt.errors import CkptError, Code, err

_DATA_TAG, _NOTHING_TAG = 0, 1
_NOTHING_S: Final = 0.001
#: Longer than any training: a wait that `Pair.abort` ends, or the end of the other process.
_EVER: Final = dt.timedelta(days=365)


def find_rank() -> tuple[int, int] | None:
    """Return rank and world size where torch.distributed is initialised and has gloo, else None."""
    if not (dist.is_available() and dist.is_initialized() and dist.is_gloo_available()):
        return None
    return dist.get_rank(), dist.get_world_size()


class Pair:
    """A connection of two processes, over which one thread at a time sends or receives on either side.

    A gloo group of its own, made by these two processes alone: no other process takes part, no number of a process
    group is used up, and nothing of it runs on a device. What is sent waits until the other side receives it.

    Args:
        name: the same on both sides, and new for each connection.
        number: 0 on one side, 1 on the other.
        deadline_s: how long connecting and sending may take, in seconds.
        store: through which they find each other; None for that of torch.distributed.

    Raises: CommitError(WRITERS_MISSING) if the other side doesn't come.
    """

    def __init__(self, name: str, number: int, *, deadline_s: float, store: Any = None) -> None:  # noqa: ANN401
        self._timeout = dt.timedelta(seconds=deadline_s)
        self._other = 1 - number
        if store is None:
            store = c10d._get_default_store()  # noqa: SLF001 - there is no public way
        make: Any = dist.ProcessGroupGloo  # torch's annotations lack its calls
        try:
            self._group = make(c10d.PrefixStore(name, store), number, 2, self._timeout)
        except RuntimeError as error:
            raise _gone(error) from error

    def send(self, content: bytearray | memoryview) -> None:
        """Send some bytes, one at least, in memory that may be written to.

        Raises: CommitError(WRITERS_MISSING) if the other side is gone or hangs.
        """
        try:
            self._group.send([torch.frombuffer(content, dtype=torch.uint8)], self._other, _DATA_TAG).wait(self._timeout)
        except RuntimeError as error:
            raise _gone(error) from error

    def receive(self, nbytes: int, *, timeout_s: float | None) -> bytearray:
        """Return so many bytes, one at least.

        Args:
            timeout_s: how long to wait, in seconds; None for as long as the other side lives.

        Raises: CommitError(WRITERS_MISSING). After that nothing can be sent or received any more.
        """
        content = bytearray(nbytes)
        timeout = _EVER if timeout_s is None else dt.timedelta(seconds=timeout_s)
        try:
            self._group.recv([torch.frombuffer(content, dtype=torch.uint8)], self._other, _DATA_TAG).wait(timeout)
        except RuntimeError as error:
            raise _gone(error) from error
        return content

    def abort(self) -> None:
        """End the connection; whoever waits on either side raises."""
        # gloo closes a connection when one of its calls runs out of time; there is no other way in torch 2.7 to 2.15.
        with contextlib.suppress(RuntimeError):
            nothing = torch.empty(1, dtype=torch.uint8)
            self._group.recv([nothing], self._other, _NOTHING_TAG).wait(dt.timedelta(seconds=_NOTHING_S))


def _gone(error: RuntimeError) -> CkptError:
    # Behind the first sentence gloo gives advice, and places of its source before it.
    said = str(error).partition("\n")[0].rpartition("] ")[2].partition(". ")[0]
    return err(Code.WRITERS_MISSING, said or type(error).__qualname__)
