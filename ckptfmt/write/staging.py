"""Copies of a snapshot into a slot, by the host or by devices.

Blocks that the slot already holds are skipped.

A slot is filled with the same image at every save, and when a model is fine-tuned most of its
blocks stay unchanged.

For a tensor in host memory, each copy of a block records the checksum of the block in the slot. The
next filling computes the checksum of the tensor's block and skips the copy if the two are equal. A
sample of a block, its first bytes, is compared with the last save's sample first: a block with a
different sample has certainly changed. If all blocks of a tensor have changed samples, the tensor
is copied without checksums, so that dense training, which changes every block at every step, pays
almost no overhead.

For a tensor on a device, the device computes digests of the tensor's blocks. Blocks with the same
digests as at the last filling aren't transferred again. A slot therefore always holds a complete
snapshot, and readers of the slot needn't know which blocks were copied when.

The checksums are XXH3 of 128 bits, computed at memory bandwidth. XXH3 isn't cryptographic: with a
known seed, two contents with one checksum can be constructed. The seed is random, drawn for each
trainer and kept in its memory; the checksums never leave the process. Stored bytes have BLAKE3
digests. See ``spec/decisions/2026-11-22-slot-digests.md``.
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
from ckptfmt.documents.tables import TensorKey, key_of
from ckptfmt.write.image import Image, Piece
from ckptfmt.write.snapshot import MemoryOf, Snapshot, TensorSource

#: Size of a block's sample in bytes: these first bytes are compared before the whole block is read.
_SAMPLE_NBYTES: Final = 1024
#: Largest number of fillings in a row for which a device's tensor is copied without digests. Dense
#: training changes every block at every step, and digests save no copy then; only two of 18
#: fillings compute them.
_LONGEST_PAUSE: Final = 16


@dataclasses.dataclass(slots=True, eq=False)
class DeviceTensor:
    """The known contents of a slot for one tensor of a device.

    Attributes:
        held: digests of the tensor's blocks in the slot before this filling, of shape (blocks, 32);
            None if unknown.
        found: digests of the blocks of this filling; None if the tensor is copied without digests.
    """

    held: NDArray[np.uint8] | None = None
    found: NDArray[np.uint8] | None = None
    _pause: int = 0
    _rest: int = 0

    def begin(self, *, was_written: bool) -> None:
        """Prepare for the next filling; see `Fillings.begin`."""
        self.held = self.found if was_written else None
        self.found = None

    def is_due(self) -> bool:
        """Return whether to compute digests at this filling. Called once for each filling."""
        if self._rest:
            self._rest -= 1
            return False
        return True

    def compare(self, digests: bytes) -> NDArray[np.bool_]:
        """Record the digests of this filling.

        Return a flag for each block: whether the slot already holds the block.
        """
        self.found = np.frombuffer(digests, np.uint8).reshape(-1, DIGEST_NBYTES)
        if self.held is None:
            return np.zeros(len(self.found), np.bool_)
        kept: NDArray[np.bool_] = (self.found == self.held).all(axis=1)
        self._pause = 0 if kept.any() else min(max(1, 2 * self._pause), _LONGEST_PAUSE)
        self._rest = self._pause
        return kept


class Filling:
    """One filling of a slot. Several threads may copy its pieces, each piece by one thread.

    The next filling, of another slot, may begin before this filling has ended. Both share the
    samples, which only show for which blocks a checksum is useless.

    Args:
        block_nbytes: size of the blocks of a piece in bytes.
        before: for the first byte of each piece in the image, checksums of the blocks that the slot
            holds, if known.
        on_devices: for the first byte of each piece, the known contents of tensors of devices.
        samples: for the first byte of each piece, checksums of the blocks' samples at the last save
            into any slot.
        checksum: the checksum function, the same for all fillings that share slots and samples.

    Attributes:
        found: like `before`, for the slot's contents after this filling.
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
        self,
        begin: int,
        content: NDArray[np.uint8],
        place: NDArray[np.uint8],
        copy_all: Callable[[], None],
    ) -> bytes:
        """Copy the blocks of a piece that the slot doesn't hold.

        Return a byte for each block: 1 if skipped.

        Args:
            begin: first byte of the piece in the image.
            content: the piece's bytes.
            place: the piece's bytes in the slot.
            copy_all: a function that copies the whole piece in the fastest way.

        Raises: ValueError if `content` and `place` differ in size.
        """
        if content.nbytes != place.nbytes:
            raise ValueError(f"{content.nbytes} bytes don't fill {place.nbytes}")
        source = content.data
        slot = place.data
        blocks = list(iter_blocks(content.nbytes, self.block_nbytes))
        samples = [
            self._checksum(source[first : min(end, first + _SAMPLE_NBYTES)])
            for first, end in blocks
        ]
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
            # The checksum of the slot's bytes: the tensor may have been changed during the copy.
            found.append(self._checksum(slot[first:end]))
        self.found[begin] = found
        return bytes(kept)

    def watch(self, begin: int) -> DeviceTensor | None:
        """Return the known contents for a device's tensor; None to copy without digests.

        Args:
            begin: the tensor's first byte in the image.
        """
        tensor = self.on_devices.setdefault(begin, DeviceTensor())
        return tensor if tensor.is_due() else None


class Fillings:
    """The known contents of a trainer's slots."""

    def __init__(self) -> None:
        self._image: Image | None = None
        self._samples: dict[int, list[bytes]] = {}
        self._fillings: dict[int, Filling] = {}
        self._checksum: Callable[[memoryview], bytes] = functools.partial(
            xxh3_128_digest, seed=secrets.randbits(64)
        )

    def begin(self, slot: int, image: Image, *, was_written: bool) -> Filling:
        """Return the next filling of a slot.

        Args:
            slot: the slot's number.
            image: the layout of the next contents.
            was_written: whether a save has written the slot's present contents, which are then
                complete, and the saver has compared them with the digests of devices.
        """
        if image is not self._image:
            self._image = image
            self._samples = {}
            self._fillings = {}
        before = self._fillings.get(slot)
        held = before.found if before and was_written else {}
        on_devices = before.on_devices if before else {}
        for tensor in on_devices.values():
            tensor.begin(was_written=was_written)
        filling = Filling(image.block_nbytes, held, on_devices, self._samples, self._checksum)
        self._fillings[slot] = filling
        return filling


# --- the copies -----------------------------------------------------------------------------------

#: Smallest growth of the filled prefix before the saver is notified, in bytes. The notified saver
#: takes a core from the copies: with a notification every 4 MiB, a copy of 1.6 GB on two cores took
#: 1.16 times as long.
_TELL_NBYTES: Final = 64 << 20
_FIRST_NBYTES: Final = 16 << 20
#: Smallest piece that is compared before a copy, in bytes: a smaller piece is copied in less time.
_LEAST_LOOKED_AT_NBYTES: Final = 1 << 16


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The comparison result of a copied piece.

    Attributes:
        begin: first byte of the piece in the image.
        digests: concatenated digests of the piece's blocks, computed by the device when the copy
            was requested; empty if the host compared.
        kept: a byte for each block: 1 if the slot held the block from an earlier save, and the copy
            was skipped.
    """

    begin: int
    digests: bytes
    kept: bytes


class Copy(Protocol):
    """The copy of one box, or of neighbouring boxes, into bytes ``[begin, end)`` of the image."""

    @property
    def keys(self) -> Sequence[TensorKey]:
        """The tensors that are copied."""

    @property
    def begin(self) -> int:
        """The first byte in the image."""

    @property
    def end(self) -> int:
        """The first byte after the copy in the image."""

    @property
    def seen(self) -> Sequence[Seen]:
        """The comparison results of the pieces, valid once the copy is finished."""

    def start(self) -> None:
        """Start the copy if a device does it. The values at the time of this call are copied."""

    def finish(self) -> None:
        """Copy, or wait until the device has copied."""

    def guard(self) -> None:
        """Make the device's later work wait for the copy, without blocking the caller."""

    def settle(self) -> None:
        """Wait until nothing more is written into the slot, after a failure; report no error."""


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class HostCopy:
    """A copy that the calling thread does.

    Attributes:
        source: the tensor; if it has `memory_of`, it can be compared before the copy.
        filling: the slot's known contents, for skipping unchanged blocks; None to copy everything.
            Small pieces are copied in any case.
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
        """Do nothing: `finish` does the copy."""

    def finish(self) -> None:
        """Copy the box into the slot, without unchanged blocks."""
        out = self.view[self.begin : self.end]
        looks = self.filling is not None and out.nbytes >= _LEAST_LOOKED_AT_NBYTES
        memory_of: MemoryOf | None = getattr(self.source, "memory_of", None) if looks else None
        memory = None if memory_of is None else memory_of(self.box)
        if memory is None or self.filling is None:
            self.source.copy_into(self.box, out)
            return
        place = np.frombuffer(out, np.uint8)
        kept = self.filling.copy_changed(
            self.begin, memory, place, lambda: self.source.copy_into(self.box, out)
        )
        if any(kept):
            self.seen = (Seen(begin=self.begin, digests=b"", kept=kept),)

    def guard(self) -> None:
        """Do nothing: no device is involved."""

    def settle(self) -> None:
        """Do nothing: the thread of the copy has ended."""


@dataclasses.dataclass(slots=True, kw_only=True)
class CopyPlan:
    """The copies of a save.

    Attributes:
        now: the copies to do before the training goes on.
        later: the copies of tensors that must stay constant meanwhile.
        apart: the copies of values that are apart from the training already, in spare memory of
            devices.
        keys_apart: the tensors of `apart`.
    """

    now: list[Copy]
    later: list[Copy]
    apart: Sequence[Copy] = ()
    keys_apart: frozenset[TensorKey] = frozenset()


def plan_copies(
    snapshot: Snapshot,
    image: Image,
    view: memoryview,
    *,
    later: Collection[TensorKey],
    devices: Any,
    filling: Filling | None = None,
    takes_apart: bool = False,
) -> CopyPlan:
    """Return the copies that fill `view` as planned in `image`.

    Args:
        snapshot: a snapshot of the structure for which the image was planned.
        view: the slot's memory, at least as long as the image.
        later: tensors that may be copied while the training goes on.
        devices: a ``ckptfmt.adapters.torch.Devices``, or None without torch.
        filling: the slot's known contents; None to copy everything.
        takes_apart: whether tensors on devices are copied into spare memory of the devices now, if
            there is enough.
    """
    sources = {key_of(source): source for source in snapshot.tensors}
    rows = []
    on_devices = []
    for piece in image.pieces:
        source = sources[piece.key]
        if piece.end == piece.begin:
            continue
        tensor = None if devices is None else devices.find(source, piece.box)
        if tensor is None:
            rows.append((source, piece))
        else:
            on_devices.append((piece.key, tensor, piece.begin, piece.end))
    plan = CopyPlan(
        now=[_host_copy(*row, view, filling) for row in rows if row[1].key not in later],
        later=[_host_copy(*row, view, filling) for row in rows if row[1].key in later],
    )
    if not on_devices:
        return plan
    apart = devices.take(on_devices, view, filling) if takes_apart else None
    if apart is not None:
        plan.apart = apart
        plan.keys_apart = frozenset(row[0] for row in on_devices)
        return plan
    plan.now += devices.plan([row for row in on_devices if row[0] not in later], view, filling)
    plan.later += devices.plan(
        [row for row in on_devices if row[0] in later], view, filling, is_later=True
    )
    return plan


def _host_copy(
    source: TensorSource, piece: Piece, view: memoryview, filling: Filling | None
) -> HostCopy:
    return HostCopy(
        source=source,
        box=piece.box,
        keys=(piece.key,),
        begin=piece.begin,
        end=piece.end,
        view=view,
        filling=filling,
    )


class Staging:
    """The copies of one save.

    Args:
        image: the layout that the copies fill.
        copies: all copies, without overlap.
        view: the slot's memory; the constructor copies the headers of the shards there.
        tell: called with the length of the filled prefix in bytes as it grows, and with the
            comparison results of the pieces finished since the last call; from any thread, in
            order.

    Attributes:
        copies: all copies by first byte.
    """

    def __init__(
        self,
        image: Image,
        copies: Sequence[Copy],
        view: memoryview,
        tell: Callable[[int, Sequence[Seen]], None],
    ) -> None:
        for shard in image.shards:
            view[shard.begin : shard.begin + len(shard.header)] = shard.header
        self.copies = sorted(copies, key=lambda copy: copy.begin)
        self._begins = [copy.begin for copy in self.copies] + [image.nbytes]
        self._numbers = {id(copy): number for number, copy in enumerate(self.copies)}
        self._done = [False] * len(copies)
        self._front = 0
        self._told = 0
        self._seen: list[Seen] = []
        self._tell = tell
        self._lock = threading.Lock()

    def run(
        self, copies: Sequence[Copy], *, threads: Executor | None = None, thread_count: int = 1
    ) -> None:
        """Do some of the copies, which were started before, and return when they are finished.

        Args:
            threads: an executor for helping threads; None to use the calling thread only.
            thread_count: number of copying threads, including the calling thread.

        Raises: the error of a copy; no further copy begins then.
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
                    rest.clear()  # the save has failed: the remaining copies are useless
                raise

        helpers: list[Future[None]] = []
        try:
            if threads is not None:
                with contextlib.suppress(RuntimeError):  # no thread can start: go on with fewer
                    for _ in range(min(thread_count, len(copies)) - 1):
                        helpers.append(threads.submit(work))  # noqa: PERF401
            work()
        finally:
            wait(helpers)  # after an error, too: the helpers write to the slot
        for helper in helpers:
            helper.result()

    def settle(self) -> None:
        """Wait until nothing more is written into the slot, after a failure."""
        for copy in self.copies:
            copy.settle()

    def _finished(self, copy: Copy) -> None:
        with self._lock:
            self._done[self._numbers[id(copy)]] = True
            self._seen += copy.seen
            while self._front < len(self._done) and self._done[self._front]:
                self._front += 1
            nbytes = self._begins[self._front]
            # Notifications are more frequent at the beginning, when the saver is idle, and at the
            # end, so that little work is left for the saver then.
            step_nbytes = min(
                _TELL_NBYTES, max(_FIRST_NBYTES, min(self._told, self._begins[-1] - nbytes))
            )
            if nbytes - self._told >= step_nbytes or self._front == len(self._done):
                self._told = nbytes
                seen = self._seen
                self._seen = []
                self._tell(nbytes, seen)
