"""Copies of a snapshot into a slot, by the host or by devices: only of what the slot doesn't hold already.

A slot is filled with the same image again and again, and of a model that is adapted most stays as it was.

Of a tensor of the host, whoever copies a block keeps the checksum of what lies in the slot then; the next time the
tensor's block is read, and nothing else, to find that it is the same. A block whose first bytes aren't those of the
last save has changed for certain. Where all blocks of a tensor have, it is copied without more ado: training that
changes everything at every step pays next to nothing.

Of a tensor of a device, digests of its blocks are computed where it lives. Blocks whose digests are those of the last
filling needn't cross the bus again. So what a slot holds is always a whole snapshot: whoever reads it needn't know how
it came there.

The checksums are XXH3's of 128 bits, at the rate at which memory is read. XXH3 isn't cryptographic: given its seed,
anybody can make two contents with one checksum. The seed is random, drawn for each trainer and kept in its memory; the
checksums leave the process nowhere. What is stored has BLAKE3's digests, as ever. See
``spec/decisions/2026-11-22-slot-digests.md``.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import secrets
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Executor, Future, wait
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128_digest

from ckptfmt.box import Box
from ckptfmt.digest import DIGEST_NBYTES, iter_blocks
from ckptfmt.documents.tables import TensorKey
from ckptfmt.write.image import Image, Piece, key_of
from ckptfmt.write.snapshot import MemoryOf, Snapshot, TensorSource

#: How many bytes of a block are compared with those of the last save before all of it is read.
_SAMPLE_NBYTES: Final = 1024
#: For how many fillings at most a tensor of a device is only copied. Dense training changes every block at every step,
#: and then digests tell nothing; what is left of looking after it is two of 18 fillings.
_LONGEST_PAUSE: Final = 16


@dataclasses.dataclass(slots=True, eq=False)
class DeviceTensor:
    """What a slot holds of one tensor of a device.

    Attributes:
        held: digests of its blocks, of shape (blocks, 32), before it is filled; None where they aren't known.
        found: those of what it is being filled with; None where nobody looks.
    """

    held: NDArray[np.uint8] | None = None
    found: NDArray[np.uint8] | None = None
    _pause: int = 0
    _rest: int = 0

    def begin(self, *, was_written: bool) -> None:
        """Prepare for the next filling; see `Fillings.begin`."""
        self.held, self.found = self.found if was_written else None, None

    def is_due(self) -> bool:
        """Tell whether to look at this filling; to be asked once."""
        if self._rest:
            self._rest -= 1
            return False
        return True

    def compare(self, digests: bytes) -> NDArray[np.bool_]:
        """Take the digests of what it is filled with; return for each block whether the slot has it."""
        self.found = np.frombuffer(digests, np.uint8).reshape(-1, DIGEST_NBYTES)
        if self.held is None:
            return np.zeros(len(self.found), np.bool_)
        kept: NDArray[np.bool_] = (self.found == self.held).all(axis=1)
        self._pause = 0 if kept.any() else min(max(1, 2 * self._pause), _LONGEST_PAUSE)
        self._rest = self._pause
        return kept


class Filling:
    """One filling of a slot. Its pieces may be copied by several threads, each piece by one.

    The next filling, of another slot, may begin before this one has ended; they share the samples, which only say where
    it is useless to look.

    Args:
        block_nbytes: size of the blocks of a piece in bytes.
        before: by first byte of the piece in the image, the checksums of the blocks that the slot holds, if they are
            known.
        on_devices: by first byte, what the slot holds of tensors of devices.
        samples: by first byte, the checksums of the first bytes of its blocks at the last save, into whichever slot.
        checksum: of bytes; the same for all fillings that share slots and samples.

    Attributes:
        found: as `before`, of what the slot holds now.
    """

    def __init__(
        self,
        block_nbytes: int,
        before: dict[int, list[bytes]],
        on_devices: dict[int, DeviceTensor],
        samples: dict[int, list[bytes]],
        checksum: Callable[[memoryview], bytes],
    ) -> None:
        self._checksum = checksum
        self.block_nbytes = block_nbytes
        self._before = before
        self.on_devices = on_devices
        self._samples = samples
        self.found: dict[int, list[bytes]] = {}

    def copy_changed(
        self, begin: int, content: NDArray[np.uint8], place: NDArray[np.uint8], copy_all: Callable[[], None]
    ) -> bytes:
        """Copy those blocks of a piece that the slot doesn't have; return a byte for each block, 1 where it has it.

        Args:
            begin: first byte of the piece in the image.
            content: of the piece.
            place: of the piece in the slot.
            copy_all: copies all of it, by whatever is fastest.

        Raises: ValueError if the two aren't of one size.
        """
        if content.nbytes != place.nbytes:
            raise ValueError(f"{content.nbytes} bytes don't fill {place.nbytes}")
        source, slot = content.data, place.data
        blocks = list(iter_blocks(content.nbytes, self.block_nbytes))
        samples = [self._checksum(source[first : min(end, first + _SAMPLE_NBYTES)]) for first, end in blocks]
        last, self._samples[begin] = self._samples.get(begin, samples), samples
        moved = [one != other for one, other in zip(samples, last, strict=True)]
        if all(moved):
            copy_all()
            return bytes(len(blocks))
        held: Sequence[bytes | None] = self._before.get(begin) or [None] * len(blocks)
        found: list[bytes] = []
        kept = bytearray()
        for (first, end), has_moved, known in zip(blocks, moved, held, strict=True):
            if known is not None and not has_moved and self._checksum(source[first:end]) == known:
                kept.append(1)
                found.append(known)
                continue
            np.copyto(place[first:end], content[first:end])
            kept.append(0)
            # Of what is there now, whatever was written to the tensor meanwhile.
            found.append(self._checksum(slot[first:end]))
        self.found[begin] = found
        return bytes(kept)

    def watch(self, begin: int) -> DeviceTensor | None:
        """Return what is known of the device's tensor whose first byte is `begin`; None to copy it unseen."""
        tensor = self.on_devices.setdefault(begin, DeviceTensor())
        return tensor if tensor.is_due() else None


class Fillings:
    """What is known of the slots of a trainer."""

    def __init__(self) -> None:
        self._image: Image | None = None
        self._samples: dict[int, list[bytes]] = {}
        self._fillings: dict[int, Filling] = {}
        self._checksum: Callable[[memoryview], bytes] = functools.partial(xxh3_128_digest, seed=secrets.randbits(64))

    def begin(self, slot: int, image: Image, *, was_written: bool) -> Filling:
        """Return the next filling of a slot.

        Args:
            slot: its number.
            image: what it will hold.
            was_written: whether what it holds now was written by a save, so that nothing of it was left out, and the
                saver has compared it with what devices had found.
        """
        if image is not self._image:
            self._image, self._samples, self._fillings = image, {}, {}
        before = self._fillings.get(slot)
        held = before.found if before and was_written else {}
        on_devices = before.on_devices if before else {}
        for tensor in on_devices.values():
            tensor.begin(was_written=was_written)
        filling = Filling(image.block_nbytes, held, on_devices, self._samples, self._checksum)
        self._fillings[slot] = filling
        return filling


# --- the copies -------------------------------------------------------------------------------------------------------

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
