"""Copies from CUDA tensors into a slot: a side stream beside training, few and large transfers, no byte converted.

Why no tensor here needs `record_stream`: the caching allocator knows of a block only the stream that it was allocated
on, and gives it away again as soon as the last reference is gone, in the order of that stream.

- Sources belong to other streams. A copy keeps a reference to each until its event has completed, so that their
  memory can't become another tensor while the side stream reads it. (`record_stream` would do the same later, and
  make it a matter of chance when memory comes back.)
- What is packed on the way is allocated, used and freed on the side stream alone: who gets that memory next does so on
  the same stream, behind the transfer that reads it. The same order lets one buffer serve all gathers of a device.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from ckptfmt.adapters.torch.blake3 import block_digests
from ckptfmt.adapters.torch.tensors import TorchSink, TorchSource, _as_integers
from ckptfmt.box import Box
from ckptfmt.digest import DIGEST_NBYTES
from ckptfmt.documents.tables import TensorKey
from ckptfmt.read.streaming import Borrow
from ckptfmt.stage.slot import Slot
from ckptfmt.write.snapshot import TensorSink, TensorSource
from ckptfmt.write.staging import DeviceTensor, Filling, Seen

#: A contiguous tensor of at least this many bytes crosses the bus by itself; smaller neighbours are gathered.
SMALL_NBYTES: Final = 1 << 20
#: What is gathered or packed at once; bounds the memory taken on a device to about twice this.
GATHER_NBYTES: Final = 32 << 20
#: Neighbours share a `DeviceCopy`, its event and its host overhead up to this many bytes: steps of the watermark.
COPY_NBYTES: Final = 64 << 20
#: cudaHostRegisterPortable: pinned for all devices of the process, not only for the current one.
_PORTABLE: Final = 1


class Cuda:
    """The calls of torch.cuda that staging makes, one method each: the seam for tests. Without state."""

    def device_of(self, tensor: torch.Tensor) -> torch.device:
        """Return where a tensor is."""
        return tensor.device

    def make_stream(self, device: torch.device) -> torch.cuda.Stream:
        """Return a stream of `device` that isn't the default one."""
        return torch.cuda.Stream(device)

    def follow_current(self, stream: torch.cuda.Stream, device: torch.device) -> None:
        """Let `stream` wait for all that the current stream of this thread has been given so far."""
        stream.wait_stream(torch.cuda.current_stream(device))

    def run_on(self, stream: torch.cuda.Stream, work: Callable[[], None]) -> None:
        """Call `work` so that what it does on the device is enqueued on `stream`."""
        with torch.cuda.stream(stream):
            work()

    def copy_to_host(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy contiguous bytes on the current stream; returns at once if `target` is pinned, else when it is done."""
        target.copy_(source, non_blocking=True)

    def empty(self, nbytes: int, stream: torch.cuda.Stream, device: torch.device) -> torch.Tensor:
        """Return a buffer from the pool of `stream`."""
        with torch.cuda.stream(stream):
            return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def empty_on_host(self, nbytes: int) -> torch.Tensor:
        """Return pinned memory."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def digest_blocks(self, content: torch.Tensor, block_nbytes: int) -> torch.Tensor | None:
        """Return the digests of blocks of bytes, computed on the current stream; None where there is no program."""
        return block_digests(content, block_nbytes)

    def record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """Return an event behind all that `stream` has been given so far."""
        # blocking: by default cudaEventSynchronize may spin, on a core that training could use.
        event = torch.cuda.Event(blocking=True)
        event.record(stream)
        return event

    def synchronize(self, event: torch.cuda.Event) -> None:
        """Block this thread until `event`. torch releases the GIL meanwhile."""
        event.synchronize()

    def hold_current(self, event: torch.cuda.Event, device: torch.device) -> None:
        """Let what the current stream of this thread is given from now on wait for `event`; blocks no thread."""
        torch.cuda.current_stream(device).wait_event(event)

    def register(self, address: int, nbytes: int) -> int:
        """Pin memory that is mapped already; return CUDA's status, 0 for success."""
        return int(torch.cuda.cudart().cudaHostRegister(address, nbytes, _PORTABLE))

    def unregister(self, address: int) -> int:
        """Take `register` back."""
        return int(torch.cuda.cudart().cudaHostUnregister(address))

    def explain(self, status: int) -> str:
        """Return CUDA's words for a status."""
        cudart = torch.cuda.cudart()
        return f"{cudart.cudaGetErrorString(cudart.cudaError(status))} ({status})"

    def forget_error(self) -> None:
        """Take the error of a refused call out of this thread, where torch's next kernel, whoever's, would raise it."""
        # torch doesn't bind cudaGetLastError, but asks it behind every kernel that it launches.
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device="cuda")


def pin(address: int, nbytes: int, *, cuda: Cuda) -> str | None:
    """Pin a slot's mapping, once in its life: as slow as touching it. Without, copies work, and `start` blocks.

    Args:
        address: of its first byte; a multiple of the page size, mapped for writing, touched.

    Returns: None, or why CUDA refuses.
    """
    return _refusal(cuda.register(address, nbytes), cuda)


def unpin(address: int, *, cuda: Cuda) -> str | None:
    """Take `pin` back. Do so before the slot is unmapped, and after every copy into it has finished.

    Returns: None, or why CUDA refuses.
    """
    return _refusal(cuda.unregister(address), cuda)


def _refusal(status: int, cuda: Cuda) -> str | None:
    if status == 0:
        return None
    cuda.forget_error()
    return cuda.explain(status)


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class _Side:
    """What one device lends to staging. `buffer` is for gathers; a second one would stay idle on a single stream."""

    cuda: Cuda
    device: torch.device
    stream: torch.cuda.Stream
    buffer: torch.Tensor | None = None

    def reserve(self) -> None:
        """Allocate the buffer."""
        if self.buffer is None:
            self.buffer = self.cuda.empty(GATHER_NBYTES, self.stream, self.device)


class SideStreams:
    """One side stream and one buffer per device, kept from save to save.

    Copies planned with one of these are started by one thread: a gather and its transfer are enqueued as a pair.
    """

    def __init__(self, *, cuda: Cuda) -> None:
        self._cuda = cuda
        self._sides: dict[torch.device, _Side] = {}

    def of(self, tensor: torch.Tensor) -> _Side:
        """Return that of the device which holds `tensor`."""
        device = self._cuda.device_of(tensor)
        if device not in self._sides:
            self._sides[device] = _Side(cuda=self._cuda, device=device, stream=self._cuda.make_stream(device))
        return self._sides[device]


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class _Transfer:
    """Bytes ``[begin, end)`` of the image that cross the bus at once; on the device they are in `parts`.

    Attributes:
        watched: what the slot is known to hold of the only tensor; None if nobody looks at that.
        digests: of its blocks, on the host: room for them, which the device fills.
        kept: which of its blocks the slot had already; None before that is known.
    """

    side: _Side
    keys: list[TensorKey]
    begin: int
    end: int
    parts: list[torch.Tensor]
    block_nbytes: int = 0
    watched: DeviceTensor | None = None
    digests: torch.Tensor | None = None
    kept: NDArray[np.bool_] | None = None

    @property
    def nbytes(self) -> int:
        """How many bytes they are."""
        return self.end - self.begin

    @property
    def is_direct(self) -> bool:
        """Whether it is one large tensor that lies on the device as it does in the image."""
        return self.nbytes >= SMALL_NBYTES and all(_is_plain(part) for part in self.parts)

    def run(self, target: torch.Tensor) -> None:
        """Pack, gather and send, on the current stream."""
        packed = [_bytes_of(part) for part in self.parts]
        if len(packed) > 1:
            assert self.side.buffer is not None  # noqa: S101 - the plan reserves it
            packed = [torch.cat(packed, out=self.side.buffer[: self.nbytes])]
        self.side.cuda.copy_to_host(target, packed[0])

    @property
    def waits(self) -> bool:
        """Whether what of it crosses the bus is known only when its digests are there."""
        return self.watched is not None and self.watched.held is not None

    def reserve(self) -> None:
        """Make room for the digests of its blocks."""
        if self.watched is not None:
            self.digests = self.side.cuda.empty_on_host(-(-self.nbytes // self.block_nbytes) * DIGEST_NBYTES)

    def look(self) -> None:
        """Compute the digests of its blocks and send them, on the current stream; where nothing can, watch no more."""
        if self.digests is None:
            return
        found = self.side.cuda.digest_blocks(_bytes_of(self.parts[0]), self.block_nbytes)
        if found is None:
            self.watched = self.digests = None
        else:
            self.side.cuda.copy_to_host(self.digests, found.reshape(-1))

    def compare(self) -> None:
        """Find what the slot has already, once the digests are there."""
        if self.kept is None and self.watched is not None and self.digests is not None:
            self.kept = self.watched.compare(self.digests.numpy().tobytes())

    def run_changed(self, image: torch.Tensor) -> None:
        """Send what the slot doesn't have, neighbours together, on the current stream."""
        assert self.kept is not None  # noqa: S101 - compared before
        content = _bytes_of(self.parts[0])
        # Where runs of equal values begin, and behind the last.
        edges = [0, *(np.flatnonzero(np.diff(self.kept)) + 1).tolist(), len(self.kept)]
        for first, last in itertools.pairwise(edges):
            if not self.kept[first]:
                begin, end = first * self.block_nbytes, min(last * self.block_nbytes, len(content))
                self.side.cuda.copy_to_host(image[self.begin + begin : self.begin + end], content[begin:end])

    def seen(self) -> Seen:
        """Return what the device found of it."""
        self.compare()
        assert self.kept is not None  # noqa: S101 - it was looked at
        assert self.digests is not None  # noqa: S101
        return Seen(begin=self.begin, digests=self.digests.numpy().tobytes(), kept=self.kept.tobytes())


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class DeviceCopy:
    """A copy of bytes ``[begin, end)`` of the image from one device: a `Copy` of staging.

    `start` and `guard` are called by the thread that trains: they mean its current stream. `finish` by any.

    Of tensors that the slot holds already, all or in part, `start` only has the digests of their blocks computed. What
    has changed is sent by whoever comes first, `finish` or `guard`, as soon as these are there.
    """

    keys: tuple[TensorKey, ...]
    begin: int
    end: int
    side: _Side
    transfers: list[_Transfer]
    image: torch.Tensor | None
    event: torch.cuda.Event | None = None
    seen: Sequence[Seen] = ()
    _looks: bool = False
    _sending: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def start(self) -> None:
        """Enqueue it behind all that the current stream has been given so far: the values are those of this call."""
        cuda, stream = self.side.cuda, self.side.stream
        for transfer in self.transfers:
            transfer.reserve()
        cuda.follow_current(stream, self.side.device)
        try:
            cuda.run_on(stream, self._enqueue)
            self._looks = True
        finally:  # also when the device is out of memory: what was enqueued before still writes into the slot
            self.event = cuda.record(stream)

    def finish(self) -> None:
        """Wait until the bytes are in the slot, with the GIL free; then let go of the sources and the slot."""
        self._send_changed()
        if self.event is not None:
            self.side.cuda.synchronize(self.event)
        self.seen = [each.seen() for each in self.transfers if self._looks and each.watched is not None]
        self.transfers, self.image = [], None

    def guard(self) -> None:
        """Let all that the current stream is given from now on wait until the sources are read.

        Blocks no thread, but for digests that aren't there yet.
        """
        self._send_changed()
        if self.event is not None:
            self.side.cuda.hold_current(self.event, self.side.device)

    def _enqueue(self) -> None:
        assert self.image is not None  # noqa: S101 - nobody starts a copy that has finished
        for transfer in self.transfers:
            transfer.look()
            if not transfer.waits:
                transfer.run(self.image[transfer.begin : transfer.end])

    def _send_changed(self) -> None:
        """Send what the slot doesn't have of tensors that waited for their digests, if that wasn't done."""
        with self._sending:
            waiting = [each for each in self.transfers if self._looks and each.waits and each.kept is None]
            if not waiting or self.event is None:
                return
            cuda, stream, image = self.side.cuda, self.side.stream, self.image
            assert image is not None  # noqa: S101 - it has transfers
            cuda.synchronize(self.event)
            for transfer in waiting:
                transfer.compare()

            def send() -> None:
                for transfer in waiting:
                    transfer.run_changed(image)

            try:
                cuda.run_on(stream, send)
            finally:  # as in `start`
                self.event = cuda.record(stream)


def plan_device_copies(
    pieces: Iterable[tuple[TensorKey, torch.Tensor, int, int]],
    slot_view: memoryview,
    *,
    sides: SideStreams,
    filling: Filling | None = None,
) -> tuple[DeviceCopy, ...]:
    """Return the copies of device tensors into a slot, in image order. Allocates the buffers that are still missing.

    Args:
        pieces: (key, tensor, begin, end), in image order: elements of `tensor` in C order are bytes ``[begin, end)``.
            Neighbours share copies: what is to be finished apart from others is planned apart from them.
        slot_view: the image, writable; exported until each copy has finished or is dropped.
        filling: what the slot holds: of large tensors only the other blocks are sent. None to send everything.
    """
    parts = (transfer for piece in pieces for transfer in _iter_transfers(piece, sides=sides, filling=filling))
    transfers = [_join(run) for run in _iter_runs(parts, GATHER_NBYTES, is_alone=lambda part: part.is_direct)]
    if not transfers:
        return ()
    image = torch.frombuffer(slot_view, dtype=torch.uint8)
    return tuple(
        DeviceCopy(
            keys=_keys_of(run),
            begin=run[0].begin,
            end=run[-1].end,
            side=run[0].side,
            transfers=run,
            image=image,
        )
        for run in _iter_runs(transfers, COPY_NBYTES, is_alone=lambda _: False)
    )


def _iter_transfers(
    piece: tuple[TensorKey, torch.Tensor, int, int], *, sides: SideStreams, filling: Filling | None
) -> Iterator[_Transfer]:
    key, held, begin, end = piece
    side, tensor = sides.of(held), held.detach()  # what a later `tensor.data = ...` leaves behind stays held
    for at, part in _iter_parts(tensor, begin, end):
        transfer = _Transfer(side=side, keys=[key], begin=at, end=at + part.nbytes, parts=[part])
        # Blocks are cut from a piece's begin: of one that is sent in parts they are nowhere as they will be.
        if filling is not None and part is tensor and transfer.is_direct:
            transfer.block_nbytes, transfer.watched = filling.block_nbytes, filling.watch(begin)
        yield transfer


def _join(run: list[_Transfer]) -> _Transfer:
    if len(run) == 1:
        return run[0]
    run[0].side.reserve()
    parts = [part for transfer in run for part in transfer.parts]
    return _Transfer(side=run[0].side, keys=[*_keys_of(run)], begin=run[0].begin, end=run[-1].end, parts=parts)


def _keys_of(run: list[_Transfer]) -> tuple[TensorKey, ...]:
    """Return each key once, also of a tensor that is packed in several parts."""
    return tuple(dict.fromkeys(key for transfer in run for key in transfer.keys))


def _iter_runs(
    transfers: Iterable[_Transfer], limit_nbytes: int, *, is_alone: Callable[[_Transfer], bool]
) -> Iterator[list[_Transfer]]:
    """Yield neighbours in the image that are on one device and together within the limit; a larger one by itself."""
    run: list[_Transfer] = []
    for transfer in transfers:
        if run and (
            run[-1].end != transfer.begin
            or run[-1].side is not transfer.side
            or transfer.end - run[0].begin > limit_nbytes
            or is_alone(run[0])
            or is_alone(transfer)
        ):
            yield run
            run = []
        run.append(transfer)
    if run:
        yield run


def _iter_parts(tensor: torch.Tensor, begin: int, end: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield a tensor with its first byte in the image: whole, or, if it must be packed, in parts that fit."""
    assert tensor.nbytes == end - begin  # noqa: S101 - the image was laid out for this tensor
    if begin == end:
        return
    if _is_plain(tensor) or tensor.nbytes <= GATHER_NBYTES:
        yield begin, tensor
        return
    row_count = GATHER_NBYTES // (tensor.nbytes // len(tensor))
    for part in tensor.split(row_count) if row_count else tensor.unbind():
        yield from _iter_parts(part, begin, begin + part.nbytes)
        begin += part.nbytes


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _bytes_of(part: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor in C order: its own memory if it is contiguous, else packed, on its device."""
    held = _as_integers(part.resolve_conj().resolve_neg()).contiguous()
    # Not reshape: it keeps whatever stride a single element has, and such a tensor has no view as bytes.
    return held.as_strided((held.numel(),), (1,)).view(torch.uint8)


#: Where tensors lie that aren't reached through the processor's memory.
DEVICE_TYPE: Final = "cuda"


class Devices:
    """Side streams and pinned slots of one trainer; nothing is touched before a tensor lies on a device.

    Args:
        report: called with a sentence where slots can't be pinned.
        cuda: the calls to use, such as those of a fake.
        device_type: of the tensors that are taken.
    """

    def __init__(
        self, report: Callable[[str], None], *, cuda: Cuda | None = None, device_type: str = DEVICE_TYPE
    ) -> None:
        # Weak: what takes a pin back refers to this, and must not keep alive who reports.
        self._report = weakref.WeakMethod(report)
        self._cuda = Cuda() if cuda is None else cuda
        self._device_type = device_type
        self._sides = SideStreams(cuda=self._cuda)

    def find(self, source: TensorSource, box: Box) -> torch.Tensor | None:
        """Return the elements of `box` where they lie on a device, else None."""
        if not isinstance(source, TorchSource) or source.local.device.type != self._device_type:
            return None
        return source.held_at(box)

    def plan(
        self,
        pieces: Iterable[tuple[TensorKey, torch.Tensor, int, int]],
        view: memoryview,
        filling: Filling | None = None,
    ) -> tuple[DeviceCopy, ...]:
        """Return the copies of what `find` found; see `plan_device_copies`."""
        return plan_device_copies(pieces, view, sides=self._sides, filling=filling)

    def holds_any(self, sources: Iterable[TensorSource]) -> bool:
        """Tell whether any of the sources lies on a device."""
        return any(
            isinstance(source, TorchSource) and source.local.device.type == self._device_type for source in sources
        )

    def pin(self, slot: Slot) -> Callable[[], None]:
        """Pin a slot's memory; return what takes that back, to be called before the slot is closed."""
        address, view = slot.address, slot.view
        problem = pin(address, slot.nbytes, cuda=self._cuda)
        if problem is not None:
            report = self._report()
            if report is not None:
                report(f"SLOT_NOT_PINNED: copies from the device are slower, and keep the host waiting: {problem}")
            return lambda: None

        def release() -> None:
            unpin(address, cuda=self._cuda)
            view.release()

        return release


def plan_arrivals(
    sinks: Sequence[TensorSink],
    *,
    report: Callable[[str], None],
    cuda: Cuda | None = None,
    device_type: str = DEVICE_TYPE,
) -> Borrow | None:
    """Return what buffers are to be lent to while these sinks are filled; None if none of them is on a device.

    Args:
        report: called with a sentence where the buffers can't be pinned.
        cuda: the calls to use, such as those of a fake.
        device_type: of the tensors that are filled this way.
    """
    found = [sink for sink in sinks if isinstance(sink, TorchSink) and sink.local.device.type == device_type]
    if not found:
        return None
    return _Arrivals(found, report, Cuda() if cuda is None else cuda).borrow


class _Arrivals:
    def __init__(self, sinks: Sequence[TorchSink], report: Callable[[str], None], cuda: Cuda) -> None:
        self._sinks = sinks
        self._report = report
        self._cuda = cuda
        self._sides = SideStreams(cuda=cuda)

    @contextlib.contextmanager
    def borrow(self, memory: memoryview) -> Iterator[None]:
        """Pin the buffers, and let the sinks copy from them on a stream of their own."""
        # What the program gave its own streams may still read what is about to be filled.
        for side in {self._sides.of(sink.local) for sink in self._sinks}:
            self._cuda.follow_current(side.stream, side.device)
        address = np.frombuffer(memory, np.uint8).ctypes.data
        problem = pin(address, len(memory), cuda=self._cuda)
        if problem is not None:
            self._report(f"the buffers of the load aren't pinned, and copies to the device are slower: {problem}")
        for sink in self._sinks:
            sink.arrive = self._copy
        try:
            yield
        finally:
            for sink in self._sinks:
                sink.arrive = None
            if problem is None:
                unpin(address, cuda=self._cuda)

    def _copy(self, target: torch.Tensor, incoming: torch.Tensor) -> None:
        """Copy, and wait until it is done: the buffer is used again then."""

        def enqueue() -> None:
            with torch.no_grad():
                target.copy_(incoming, non_blocking=True)

        stream = self._sides.of(target).stream
        self._cuda.run_on(stream, enqueue)
        self._cuda.synchronize(self._cuda.record(stream))
