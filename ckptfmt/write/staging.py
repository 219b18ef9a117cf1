"""Copies of a snapshot into a slot, by the host or by devices, in the order of its image; how far it is filled."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Executor, Future, wait
from typing import Any, Final, Protocol

import numpy as np

from ckptfmt.box import Box
from ckptfmt.documents.tables import TensorKey
from ckptfmt.write.fillings import Filling
from ckptfmt.write.image import Image, Piece, key_of
from ckptfmt.write.snapshot import MemoryOf, Snapshot, TensorSource

#: How much more must be there before it is told, in bytes. Whoever is told wakes up, and takes a core from the copies:
#: told every 4 MiB, a copy of 1.6 GB on two cores took 1.16 times as long.
_TELL_NBYTES: Final = 64 << 20
_FIRST_NBYTES: Final = 16 << 20
#: Smallest piece that is looked at before it is copied, in bytes: a smaller one is copied in less time.
_LEAST_LOOKED_AT_NBYTES: Final = 1 << 16


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What was found of a piece when it was copied.

    Attributes:
        begin: first byte of the piece in the image.
        digests: of its blocks, one behind the other, as a device computed them when its copy was asked for; empty where
            the host looked itself.
        kept: a byte for each block: 1 where the slot had it from an earlier save, and it wasn't copied again.
    """

    begin: int
    digests: bytes
    kept: bytes


class Copy(Protocol):
    """The copy of one tensor's box, or of several neighbours, into bytes ``[begin, end)`` of the image."""

    @property
    def keys(self) -> Sequence[TensorKey]:
        """The tensors that it copies."""

    @property
    def begin(self) -> int:
        """First byte in the image."""

    @property
    def end(self) -> int:
        """The byte behind the last."""

    @property
    def seen(self) -> Sequence[Seen]:
        """What was found of what it copied, once it is finished."""

    def start(self) -> None:
        """Set it going, where a device does it; the values are those of now."""

    def finish(self) -> None:
        """Do it, or wait until the device has done it."""

    def guard(self) -> None:
        """Keep later work of the device from overtaking it, without waiting for it."""


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class HostCopy:
    """A copy that the calling thread does.

    Attributes:
        source: a `MemorySource`, if it is to be looked at.
        filling: knows what the slot has, which needn't be copied; None to copy without looking, as what is small is
            copied in any case.
    """

    source: TensorSource
    box: Box
    keys: tuple[TensorKey, ...]
    begin: int
    end: int
    view: memoryview
    filling: Filling | None = None
    seen: Sequence[Seen] = ()

    def start(self) -> None:
        """Nothing to set going."""

    def finish(self) -> None:
        """Copy."""
        out = self.view[self.begin : self.end]
        looks = self.filling is not None and out.nbytes >= _LEAST_LOOKED_AT_NBYTES
        memory_of: MemoryOf | None = getattr(self.source, "memory_of", None) if looks else None
        memory = None if memory_of is None else memory_of(self.box)
        if memory is None or self.filling is None:
            self.source.copy_into(self.box, out)
            return
        place = np.frombuffer(out, np.uint8)
        kept = self.filling.copy_changed(self.begin, memory, place, lambda: self.source.copy_into(self.box, out))
        if any(kept):
            self.seen = (Seen(begin=self.begin, digests=b"", kept=kept),)

    def guard(self) -> None:
        """Nothing that could overtake it."""


def plan_copies(
    snapshot: Snapshot,
    image: Image,
    view: memoryview,
    *,
    later: Collection[TensorKey],
    devices: Any,  # noqa: ANN401 - torch's side, which this module must not import
    filling: Filling | None = None,
) -> tuple[list[Copy], list[Copy]]:
    """Return the copies that fill `view` with what `image` says: those to be done now, and those of `later`.

    Args:
        snapshot: of the structure that the image was planned for.
        view: of a slot, as long as the image at least.
        later: tensors that may be copied beside the training.
        devices: a ``ckptfmt.adapters.torch.Devices``, or None where torch isn't there.
        filling: what the slot holds; None to copy everything.
    """
    sources = {key_of(source): source for source in snapshot.tensors}
    pieces = [(sources[piece.key], piece) for piece in image.pieces if piece.end > piece.begin]
    return (
        _plan([row for row in pieces if row[1].key not in later], view, devices, filling),
        _plan([row for row in pieces if row[1].key in later], view, devices, filling),
    )


def _plan(
    rows: Sequence[tuple[TensorSource, Piece]],
    view: memoryview,
    devices: Any,  # noqa: ANN401 - see plan_copies
    filling: Filling | None,
) -> list[Copy]:
    copies: list[Copy] = []
    on_device = []
    for source, piece in rows:
        tensor = None if devices is None else devices.find(source, piece.box)
        if tensor is not None:
            on_device.append((piece.key, tensor, piece.begin, piece.end))
        else:
            copies.append(
                HostCopy(
                    source=source,
                    box=piece.box,
                    keys=(piece.key,),
                    begin=piece.begin,
                    end=piece.end,
                    view=view,
                    filling=filling,
                )
            )
    if on_device:
        copies += devices.plan(on_device, view, filling)
    return copies


class Staging:
    """The copies of one save.

    Args:
        image: what they fill.
        copies: by first byte, without overlap.
        view: of the slot; the headers of the shards are put into it now.
        tell: called with the number of bytes that the filled prefix has, as it grows, and with what was found of what
            was filled since; from any thread, in order.
    """

    def __init__(
        self, image: Image, copies: Sequence[Copy], view: memoryview, tell: Callable[[int, Sequence[Seen]], None]
    ) -> None:
        for shard in image.shards:
            view[shard.begin : shard.begin + len(shard.header)] = shard.header
        self._begins = [copy.begin for copy in copies] + [image.nbytes]
        self._numbers = {id(copy): number for number, copy in enumerate(copies)}
        self._done = [False] * len(copies)
        self._front = 0
        self._told = 0
        self._seen: list[Seen] = []
        self._tell = tell
        self._lock = threading.Lock()

    def run(self, copies: Sequence[Copy], *, threads: Executor | None = None, thread_count: int = 1) -> None:
        """Do some of the copies, which were started, and return when they are done.

        Args:
            threads: that help; None to do everything in this thread.
            thread_count: how many do it, this one included.

        Raises: what a copy raises; then no other copy is begun.
        """
        rest = collections.deque(copies)
        taking = threading.Lock()

        def take() -> Copy | None:
            with taking:
                return rest.popleft() if rest else None

        def work() -> None:
            try:
                while (copy := take()) is not None:
                    copy.finish()
                    self._finished(copy)
            except BaseException:
                with taking:
                    rest.clear()  # nobody needs the others
                raise

        helpers: list[Future[None]] = []
        try:
            if threads is not None:
                with contextlib.suppress(RuntimeError):  # no thread can be started: fewer do it
                    for _ in range(min(thread_count, len(copies)) - 1):
                        helpers.append(threads.submit(work))  # noqa: PERF401 - those that began count, if one can't
            work()
        finally:
            wait(helpers)  # after an error, too: they fill the slot
        for helper in helpers:
            helper.result()

    def _finished(self, copy: Copy) -> None:
        with self._lock:
            self._done[self._numbers[id(copy)]] = True
            self._seen += copy.seen
            while self._front < len(self._done) and self._done[self._front]:
                self._front += 1
            nbytes = self._begins[self._front]
            # The first more often, since whoever is told has nothing to do yet, and the last, to leave little for then.
            step_nbytes = min(_TELL_NBYTES, max(_FIRST_NBYTES, min(self._told, self._begins[-1] - nbytes)))
            if nbytes - self._told >= step_nbytes or self._front == len(self._done):
                self._told = nbytes
                seen, self._seen = self._seen, []
                self._tell(nbytes, seen)
