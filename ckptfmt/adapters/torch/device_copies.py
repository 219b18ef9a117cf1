"""Copy CUDA tensors into a slot on a side stream, in few large transfers without conversion.

No tensor here needs `record_stream`. The caching allocator only knows the stream on which a block
was allocated. It reuses the block in the order of that stream, as soon as the last reference is
gone.

- Sources belong to other streams. A copy keeps a reference to each source until the copy's event
  has completed. Until then the memory can't become another tensor while the side stream reads.
  (`record_stream` would have the same effect, but would free memory later and at unpredictable
  times.)
- Buffers for packed data are allocated, used and freed on the side stream only. The next user of
  the memory runs on the same stream, after the transfer that reads the buffer. The same order lets
  all gathers of a device share a single buffer.
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
from ckptfmt.write.slot import Slot
from ckptfmt.write.snapshot import TensorSink, TensorSource
from ckptfmt.write.staging import DeviceTensor, Filling, Seen

#: A contiguous tensor of at least this many bytes has its own transfer; smaller neighbours are
#: gathered.
SMALL_NBYTES: Final = 1 << 20
#: The largest gather or pack, in bytes. The memory taken on a device is at most about twice this.
GATHER_NBYTES: Final = 32 << 20
#: Neighbours up to this many bytes share a `DeviceCopy`, its event and its host overhead. This is
#: the step of the watermark.
COPY_NBYTES: Final = 64 << 20
#: cudaHostRegisterPortable: pinned for all devices of the process, not only for the current device.
_PORTABLE: Final = 1


class Cuda:
    """The calls of torch.cuda that staging needs, as a seam for tests. The class has no state."""

    def device_of(self, tensor: torch.Tensor) -> torch.device:
        """Return the device of a tensor."""
        return tensor.device

    def make_stream(self, device: torch.device) -> torch.cuda.Stream:
        """Return a new stream of `device`, different from the default stream."""
        return torch.cuda.Stream(device)

    def follow_current(self, stream: torch.cuda.Stream, device: torch.device) -> None:
        """Make `stream` wait for all work enqueued so far on this thread's current stream."""
        stream.wait_stream(torch.cuda.current_stream(device))

    def run_on(self, stream: torch.cuda.Stream, work: Callable[[], None]) -> None:
        """Call `work` with `stream` as the current stream."""
        with torch.cuda.stream(stream):
            work()

    def copy_to_host(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy contiguous bytes to the host on the current stream.

        The call returns at once if `target` is pinned, else after the copy.
        """
        target.copy_(source, non_blocking=True)

    def empty(self, nbytes: int, stream: torch.cuda.Stream, device: torch.device) -> torch.Tensor:
        """Return a new buffer from the memory pool of `stream`."""
        with torch.cuda.stream(stream):
            return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def empty_on_host(self, nbytes: int) -> torch.Tensor:
        """Return new pinned memory."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def digest_blocks(self, content: torch.Tensor, block_nbytes: int) -> torch.Tensor | None:
        """Return the digests of blocks of bytes, computed on the current stream.

        Returns: None if no kernel is available.
        """
        return block_digests(content, block_nbytes)

    def record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """Return an event that completes after all work enqueued so far on `stream`."""
        # blocking: by default cudaEventSynchronize may spin on a core that training could use
        event = torch.cuda.Event(blocking=True)
        event.record(stream)
        return event

    def synchronize(self, event: torch.cuda.Event) -> None:
        """Block this thread until `event` completes. Torch releases the GIL meanwhile."""
        event.synchronize()

    def hold_current(self, event: torch.cuda.Event, device: torch.device) -> None:
        """Make later work of this thread's current stream wait for `event`.

        The thread itself doesn't wait.
        """
        torch.cuda.current_stream(device).wait_event(event)

    def register(self, address: int, nbytes: int) -> int:
        """Pin memory that is already mapped, and return CUDA's status, 0 for success."""
        return int(torch.cuda.cudart().cudaHostRegister(address, nbytes, _PORTABLE))

    def unregister(self, address: int) -> int:
        """Undo `register`, and return CUDA's status."""
        return int(torch.cuda.cudart().cudaHostUnregister(address))

    def explain(self, status: int) -> str:
        """Return CUDA's description of a status."""
        cudart = torch.cuda.cudart()
        return f"{cudart.cudaGetErrorString(cudart.cudaError(status))} ({status})"

    def forget_error(self) -> None:
        """Clear the error of a failed call from this thread.

        Otherwise, torch's next kernel in any code would raise the error.
        """
        # torch has no binding for cudaGetLastError, but calls it after each kernel launch
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device="cuda")


def pin(address: int, nbytes: int, *, cuda: Cuda) -> str | None:
    """Pin a slot's memory, once in the slot's life.

    Pinning takes as long as touching the memory. Without pinning, copies still work, but
    `DeviceCopy.start` blocks.

    Args:
        address: the address of the first byte, a multiple of the page size. The memory is mapped
            for writing and has been touched.
        nbytes: the size in bytes.
        cuda: the CUDA calls to use.

    Returns: None, or CUDA's reason for a refusal.
    """
    return _refusal(cuda.register(address, nbytes), cuda)


def unpin(address: int, *, cuda: Cuda) -> str | None:
    """Undo `pin`, before the unmap and after all copies into the slot have finished.

    Returns: None, or CUDA's reason for a refusal.
    """
    return _refusal(cuda.unregister(address), cuda)


def _refusal(status: int, cuda: Cuda) -> str | None:
    if status == 0:
        return None
    cuda.forget_error()
    return cuda.explain(status)


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class _Side:
    """The staging resources of a device: a stream, and a buffer for gathers.

    A second buffer would be idle, since all gathers share the stream.
    """

    cuda: Cuda
    device: torch.device
    stream: torch.cuda.Stream
    buffer: torch.Tensor | None = None

    def reserve(self) -> None:
        """Allocate the buffer, if there is none yet."""
        if self.buffer is None:
            self.buffer = self.cuda.empty(GATHER_NBYTES, self.stream, self.device)


class SideStreams:
    """A side stream and a buffer for each device, reused by all saves.

    Only a single thread may start the copies, because a gather and its transfer are enqueued as a
    pair.
    """

    def __init__(self, *, cuda: Cuda) -> None:
        self._cuda = cuda
        self._sides: dict[torch.device, _Side] = {}

    def of(self, tensor: torch.Tensor) -> _Side:
        """Return the staging resources of a tensor's device."""
        device = self._cuda.device_of(tensor)
        if device not in self._sides:
            self._sides[device] = _Side(
                cuda=self._cuda, device=device, stream=self._cuda.make_stream(device)
            )
        return self._sides[device]


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class _Transfer:
    """A transfer of the bytes ``[begin, end)`` of the image from `parts` on the device.

    Attributes:
        watched: the slot's known content for the transfer's only tensor; None if the transfer isn't
            compared.
        digests: host memory for the digests of the tensor's blocks, filled by the device.
        kept: a flag for each block, true if the slot already has the block; None before the
            comparison.
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
        """The number of bytes."""
        return self.end - self.begin

    @property
    def is_direct(self) -> bool:
        """Whether the transfer is a large tensor whose bytes need no packing."""
        return self.nbytes >= SMALL_NBYTES and all(_is_plain(part) for part in self.parts)

    def run(self, target: torch.Tensor) -> None:
        """Pack, gather and send the parts on the current stream."""
        packed = [_bytes_of(part) for part in self.parts]
        if len(packed) > 1:
            assert self.side.buffer is not None  # noqa: S101
            packed = [torch.cat(packed, out=self.side.buffer[: self.nbytes])]
        self.side.cuda.copy_to_host(target, packed[0])

    @property
    def waits(self) -> bool:
        """Whether the blocks to send are known only after the digests have arrived."""
        return self.watched is not None and self.watched.held is not None

    def reserve(self) -> None:
        """Allocate host memory for the digests of the blocks."""
        if self.watched is not None:
            self.digests = self.side.cuda.empty_on_host(
                -(-self.nbytes // self.block_nbytes) * DIGEST_NBYTES
            )

    def look(self) -> None:
        """Compute the digests of the blocks and send them, on the current stream.

        Without a kernel for digests, the transfer is no longer compared.
        """
        if self.digests is None:
            return
        found = self.side.cuda.digest_blocks(_bytes_of(self.parts[0]), self.block_nbytes)
        if found is None:
            self.watched = self.digests = None
        else:
            self.side.cuda.copy_to_host(self.digests, found.reshape(-1))

    def compare(self) -> None:
        """Find the blocks that the slot already has. The digests must have arrived."""
        if self.kept is None and self.watched is not None and self.digests is not None:
            self.kept = self.watched.compare(self.digests.numpy().tobytes())

    def run_changed(self, image: torch.Tensor) -> None:
        """Send the blocks that the slot lacks, on the current stream.

        Neighbouring blocks are sent together.
        """
        assert self.kept is not None  # noqa: S101
        content = _bytes_of(self.parts[0])
        # The beginnings of runs of equal values, and the end of the last run.
        edges = [0, *(np.flatnonzero(np.diff(self.kept)) + 1).tolist(), len(self.kept)]
        for first, last in itertools.pairwise(edges):
            if not self.kept[first]:
                begin = first * self.block_nbytes
                end = min(last * self.block_nbytes, len(content))
                self.side.cuda.copy_to_host(
                    image[self.begin + begin : self.begin + end], content[begin:end]
                )

    def seen(self) -> Seen:
        """Return the digests and the comparison's result."""
        self.compare()
        assert self.kept is not None  # noqa: S101
        assert self.digests is not None  # noqa: S101
        return Seen(
            begin=self.begin, digests=self.digests.numpy().tobytes(), kept=self.kept.tobytes()
        )


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class DeviceCopy:
    """A copy of the bytes ``[begin, end)`` of the image from a device: a `Copy` of staging.

    The training thread calls `start` and `guard`, which refer to this thread's current stream. Any
    thread may call `finish`.

    If the slot already holds a tensor, all or in part, `start` only computes the digests of the
    tensor's blocks. The first call of `finish` or `guard` after that sends the changed blocks, once
    the digests have arrived.
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
        """Enqueue the copy after all work enqueued so far on the current stream.

        The copied values are those at the time of this call.
        """
        cuda = self.side.cuda
        stream = self.side.stream
        for transfer in self.transfers:
            transfer.reserve()
        cuda.follow_current(stream, self.side.device)
        try:
            cuda.run_on(stream, self._enqueue)
            self._looks = True
        finally:  # also after an out-of-memory error: earlier work still writes into the slot
            self.event = cuda.record(stream)

    def finish(self) -> None:
        """Wait until the bytes are in the slot, then release the sources and the slot.

        The wait releases the GIL.
        """
        self._send_changed()
        if self.event is not None:
            self.side.cuda.synchronize(self.event)
        self.seen = [
            each.seen() for each in self.transfers if self._looks and each.watched is not None
        ]
        self.transfers = []
        self.image = None

    def guard(self) -> None:
        """Make later work of the current stream wait until the sources have been read.

        The call blocks the thread only while digests are missing.
        """
        self._send_changed()
        if self.event is not None:
            self.side.cuda.hold_current(self.event, self.side.device)

    def _enqueue(self) -> None:
        assert self.image is not None  # noqa: S101
        for transfer in self.transfers:
            transfer.look()
            if not transfer.waits:
                transfer.run(self.image[transfer.begin : transfer.end])

    def _send_changed(self) -> None:
        """Send the changed blocks of tensors that waited for digests, if not already sent."""
        with self._sending:
            waiting = [
                each for each in self.transfers if self._looks and each.waits and each.kept is None
            ]
            if not waiting or self.event is None:
                return
            cuda = self.side.cuda
            stream = self.side.stream
            image = self.image
            assert image is not None  # noqa: S101
            cuda.synchronize(self.event)
            for transfer in waiting:
                transfer.compare()

            def send() -> None:
                for transfer in waiting:
                    transfer.run_changed(image)

            try:
                cuda.run_on(stream, send)
            finally:  # earlier work still writes into the slot, as in `start`
                self.event = cuda.record(stream)


def plan_device_copies(
    pieces: Iterable[tuple[TensorKey, torch.Tensor, int, int]],
    slot_view: memoryview,
    *,
    sides: SideStreams,
    filling: Filling | None = None,
) -> tuple[DeviceCopy, ...]:
    """Return the copies of device tensors into a slot, in image order.

    The call allocates missing buffers.

    Args:
        pieces: tuples (key, tensor, begin, end), in image order: the elements of `tensor` in C
            order are bytes ``[begin, end)``. Neighbours share copies. Pieces that must finish
            separately are planned in separate calls.
        slot_view: the image, writable. The buffer stays exported until each copy has finished or is
            dropped.
        sides: the streams and buffers of the devices.
        filling: the known content of the slot. Only changed blocks of large tensors are sent. None
            sends all bytes.
    """
    parts = (
        transfer
        for piece in pieces
        for transfer in _iter_transfers(piece, sides=sides, filling=filling)
    )
    transfers = [
        _join(run) for run in _iter_runs(parts, GATHER_NBYTES, is_alone=lambda part: part.is_direct)
    ]
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
    side = sides.of(held)
    tensor = held.detach()  # keeps the memory after `tensor.data = ...`
    for at, part in _iter_parts(tensor, begin, end):
        transfer = _Transfer(side=side, keys=[key], begin=at, end=at + part.nbytes, parts=[part])
        # Blocks start at the begin of a piece, so a piece that is sent in parts can't be compared.
        if filling is not None and part is tensor and transfer.is_direct:
            transfer.block_nbytes, transfer.watched = filling.block_nbytes, filling.watch(begin)
        yield transfer


def _join(run: list[_Transfer]) -> _Transfer:
    if len(run) == 1:
        return run[0]
    run[0].side.reserve()
    parts = [part for transfer in run for part in transfer.parts]
    return _Transfer(
        side=run[0].side, keys=[*_keys_of(run)], begin=run[0].begin, end=run[-1].end, parts=parts
    )


def _keys_of(run: list[_Transfer]) -> tuple[TensorKey, ...]:
    """Return the distinct keys of a run. A tensor packed in several parts has a single key."""
    return tuple(dict.fromkeys(key for transfer in run for key in transfer.keys))


def _iter_runs(
    transfers: Iterable[_Transfer], limit_nbytes: int, *, is_alone: Callable[[_Transfer], bool]
) -> Iterator[list[_Transfer]]:
    """Yield runs of neighbours in the image that share a device and fit the limit.

    A transfer larger than the limit forms its own run.
    """
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
    """Yield a tensor and its first byte in the image.

    A tensor that must be packed is yielded in parts that fit the gather buffer.
    """
    assert tensor.nbytes == end - begin  # noqa: S101
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
    """Return the bytes of a tensor in C order, on the tensor's device.

    The result shares the memory of a contiguous tensor; other tensors are packed.
    """
    held = _as_integers(part.resolve_conj().resolve_neg()).contiguous()
    # reshape keeps an arbitrary stride of a single element, and then the view as bytes fails.
    return held.as_strided((held.numel(),), (1,)).view(torch.uint8)


#: The device type of tensors outside of host memory.
DEVICE_TYPE: Final = "cuda"


class Devices:
    """The side streams and pinned slots of a trainer.

    CUDA isn't used before a tensor is on a device.

    Args:
        report: called with a sentence if a slot can't be pinned.
        cuda: the CUDA calls to use, such as those of a fake.
        device_type: the device type of the tensors to copy.
    """

    def __init__(
        self,
        report: Callable[[str], None],
        *,
        cuda: Cuda | None = None,
        device_type: str = DEVICE_TYPE,
    ) -> None:
        # Weak: the function that unpins refers to this object, and must not keep the reporter
        # alive.
        self._report = weakref.WeakMethod(report)
        self._cuda = Cuda() if cuda is None else cuda
        self._device_type = device_type
        self._sides = SideStreams(cuda=self._cuda)

    def find(self, source: TensorSource, box: Box) -> torch.Tensor | None:
        """Return the elements of `box` if they are on a device, else None."""
        if not isinstance(source, TorchSource) or source.local.device.type != self._device_type:
            return None
        return source.held_at(box)

    def plan(
        self,
        pieces: Iterable[tuple[TensorKey, torch.Tensor, int, int]],
        view: memoryview,
        filling: Filling | None = None,
    ) -> tuple[DeviceCopy, ...]:
        """Return the copies of tensors that `find` returned; see `plan_device_copies`."""
        return plan_device_copies(pieces, view, sides=self._sides, filling=filling)

    def holds_any(self, sources: Iterable[TensorSource]) -> bool:
        """Return whether any of the sources is on a device."""
        return any(
            isinstance(source, TorchSource) and source.local.device.type == self._device_type
            for source in sources
        )

    def pin(self, slot: Slot) -> Callable[[], None]:
        """Pin a slot's memory, and return a function that unpins the memory.

        The function must be called before the slot is closed.
        """
        address = slot.address
        view = slot.view
        problem = pin(address, slot.nbytes, cuda=self._cuda)
        if problem is not None:
            report = self._report()
            if report is not None:
                report(
                    "SLOT_NOT_PINNED: copies from the device are slower, and keep the host"
                    f" waiting: {problem}"
                )
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
    """Return a context manager factory that lends the read buffers to the device's sinks.

    Args:
        sinks: the sinks of a load.
        report: called with a sentence if the buffers can't be pinned.
        cuda: the CUDA calls to use, such as those of a fake.
        device_type: the device type of the tensors to fill.

    Returns: None if no sink is on a device.
    """
    found = [
        sink
        for sink in sinks
        if isinstance(sink, TorchSink) and sink.local.device.type == device_type
    ]
    if not found:
        return None
    return _Arrivals(found, report, Cuda() if cuda is None else cuda).borrow


class _Arrivals:
    def __init__(
        self, sinks: Sequence[TorchSink], report: Callable[[str], None], cuda: Cuda
    ) -> None:
        self._sinks = sinks
        self._report = report
        self._cuda = cuda
        self._sides = SideStreams(cuda=cuda)

    @contextlib.contextmanager
    def borrow(self, memory: memoryview) -> Iterator[None]:
        """Pin the buffers, and let the sinks copy from them on a side stream."""
        # Work on the program's streams may still read the tensors that are about to be filled.
        for side in {self._sides.of(sink.local) for sink in self._sinks}:
            self._cuda.follow_current(side.stream, side.device)
        address = np.frombuffer(memory, np.uint8).ctypes.data
        problem = pin(address, len(memory), cuda=self._cuda)
        if problem is not None:
            self._report(
                "the buffers of the load aren't pinned, and copies to the device are slower:"
                f" {problem}"
            )
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
        """Copy and wait for the end of the copy, because the buffer is reused afterwards."""

        def enqueue() -> None:
            with torch.no_grad():
                target.copy_(incoming, non_blocking=True)

        stream = self._sides.of(target).stream
        self._cuda.run_on(stream, enqueue)
        self._cuda.synchronize(self._cuda.record(stream))
