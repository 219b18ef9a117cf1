"""Copy CUDA tensors into a slot on a side stream, in few large transfers without conversion.

Sources and buffers for gathers need no `record_stream`. The caching allocator only knows the stream
on which a block was allocated. It reuses the block in the order of that stream, as soon as the last
reference is gone.

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from ckptfmt.adapters.torch.blake3 import are_kernels_ready, block_digests
from ckptfmt.adapters.torch.tensors import _as_integers
from ckptfmt.digest import DIGEST_NBYTES
from ckptfmt.documents.tables import TensorKey
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

    def make_pool(self, device: torch.device) -> torch.cuda.Stream:
        """Return a new stream of `device`, for the memory pool only."""
        return torch.cuda.Stream(device)

    def follow_current(self, stream: torch.cuda.Stream, device: torch.device) -> None:
        """Make `stream` wait for all work enqueued so far on this thread's current stream."""
        stream.wait_stream(torch.cuda.current_stream(device))

    def record_current(self, device: torch.device) -> torch.cuda.Event:
        """Return an event that completes after all work of this thread's current stream so far."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        return event

    def follow(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        """Make later work of `stream` wait for `event`."""
        stream.wait_event(event)

    def copy_on_device(self, target: torch.Tensor, sources: list[torch.Tensor]) -> None:
        """Copy flat tensors of one dtype side by side, on this thread's current stream.

        Few kernels copy many tensors. The call doesn't wait.
        """
        torch.cat(sources, out=target)

    def spare_nbytes(self, device: torch.device) -> tuple[int, int]:
        """Return the memory of a device that nobody has reserved, and the whole memory, in bytes.

        Memory in the cache of torch's allocator is reserved.
        """
        return torch.cuda.mem_get_info(device)

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

    def empty_for_both(
        self,
        nbytes: int,
        pool: torch.cuda.Stream,
        stream: torch.cuda.Stream,
        device: torch.device,
    ) -> torch.Tensor:
        """Return a new buffer for this thread's current stream and for `stream`.

        The buffer comes from the memory pool of `pool`, a stream without any work. The allocator
        gives freed memory of the pool to the next buffer only after the work of both streams that
        preceded the release.
        """
        memory = self.empty(nbytes, pool, device)
        memory.record_stream(torch.cuda.current_stream(device))
        memory.record_stream(stream)
        return memory

    def empty_on_host(self, nbytes: int) -> torch.Tensor:
        """Return new pinned memory."""
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def digest_blocks(self, content: torch.Tensor, block_nbytes: int) -> torch.Tensor | None:
        """Return the digests of blocks of bytes, computed on the current stream.

        Returns: None if no kernel is available, or while the kernels are compiled.
        """
        if not self.has_digests(content.device):
            return None
        return block_digests(content, block_nbytes)

    def has_digests(self, device: torch.device) -> bool:
        """Return whether digests need no compilation any more; start the compilation if not."""
        return are_kernels_ready(device)

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
class Side:
    """The staging resources of a device: a stream, and a buffer for gathers.

    A second buffer would be idle, since all gathers share the stream.

    Attributes:
        pool: a stream without work, whose memory pool has the buffers of snapshots.
        kept_nbytes: the memory that snapshots have left in the pool.
        is_full: whether the device had no memory for a snapshot although enough was expected.
        enqueuing: held while a copy is enqueued, because a gather and its transfer are a pair.
    """

    cuda: Cuda
    device: torch.device
    stream: torch.cuda.Stream
    pool: torch.cuda.Stream
    kept_nbytes: int = 0
    is_full: bool = False
    buffer: torch.Tensor | None = None
    enqueuing: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def reserve(self) -> None:
        """Allocate the buffer, if there is none yet."""
        if self.buffer is None:
            self.buffer = self.cuda.empty(GATHER_NBYTES, self.stream, self.device)


class SideStreams:
    """A side stream and a buffer for each device, reused by all saves."""

    def __init__(self, *, cuda: Cuda) -> None:
        self._cuda = cuda
        self._sides: dict[torch.device, Side] = {}

    def of(self, tensor: torch.Tensor) -> Side:
        """Return the staging resources of a tensor's device."""
        device = self._cuda.device_of(tensor)
        if device not in self._sides:
            self._sides[device] = Side(
                cuda=self._cuda,
                device=device,
                stream=self._cuda.make_stream(device),
                pool=self._cuda.make_pool(device),
            )
        return self._sides[device]


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class Transfer:
    """A transfer of the bytes ``[begin, end)`` of the image from `parts` on the device.

    Attributes:
        watched: the slot's known content for the transfer's only tensor; None if the transfer isn't
            compared.
        digests: host memory for the digests of the tensor's blocks, filled by the device.
        kept: a flag for each block, true if the slot already has the block; None before the
            comparison.
    """

    side: Side
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
        return self.nbytes >= SMALL_NBYTES and all(is_in_order(part) for part in self.parts)

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
class Moment:
    """The moment of the values that several copies from a device have.

    Attributes:
        event: an event on the stream that was current at the moment; None before the moment.
    """

    cuda: Cuda
    device: torch.device
    event: torch.cuda.Event | None = None

    def mark(self) -> None:
        """Let the moment be now, unless the moment is past."""
        if self.event is None:
            self.event = self.cuda.record_current(self.device)


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class DeviceCopy:
    """A copy of the bytes ``[begin, end)`` of the image from a device: a `Copy` of staging.

    The training thread calls `start` and `guard`, which refer to this thread's current stream. Any
    thread may call `finish`.

    A driver accepts a bounded amount of copies, and then blocks the calling thread until the bus
    has done some. Therefore `start` only marks the moment of a copy that is done later, and the
    thread of the copies enqueues: each call of `finish` enqueues the next copy too, so that the bus
    stays busy, and no further copies.

    If the slot already holds a tensor, all or in part, the digests of the tensor's blocks are
    computed first. The changed blocks are sent by `finish` or `guard`, once the digests have
    arrived.

    Attributes:
        is_later: whether `finish` or `guard` enqueues the copy, instead of `start`.
        ahead: the copy that `finish` enqueues besides this copy.
        sources: the tensors whose memory must live until the copy is over.
    """

    keys: tuple[TensorKey, ...]
    begin: int
    end: int
    side: Side
    transfers: list[Transfer]
    image: torch.Tensor | None
    moment: Moment
    is_later: bool = False
    ahead: DeviceCopy | None = None
    sources: Sequence[torch.Tensor] = ()
    event: torch.cuda.Event | None = None
    seen: Sequence[Seen] = ()
    _is_begun: bool = False
    _looks: bool = False
    _problem: BaseException | None = None
    _sending: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def start(self) -> None:
        """Mark the moment of the copied values, and enqueue the copy unless it is done later.

        Moment: after all work enqueued so far on the current stream.
        """
        self.moment.mark()
        if not self.is_later:
            self._enqueue_once()

    def finish(self) -> None:
        """Wait until the bytes are in the slot, then release the sources and the slot.

        The wait releases the GIL. After an error the caller calls `settle`.

        Raises: the error of the device, also if `guard` or the copy before met the error first.
        """
        self._enqueue_once()
        if self.ahead is not None:
            self.ahead.try_enqueue()
        self._send_changed()
        if self.event is not None:
            self.side.cuda.synchronize(self.event)
        self.seen = [
            each.seen() for each in self.transfers if self._looks and each.watched is not None
        ]
        self._release()

    def guard(self) -> None:
        """Make later work of the current stream wait until the sources have been read.

        The call blocks the thread while digests are missing, and while the driver accepts no
        further copies. A copy that can't be enqueued doesn't fail here but in `finish`.
        """
        self.try_enqueue()
        with contextlib.suppress(Exception):  # `finish` raises the error
            self._send_changed()
        if self.event is not None:
            self.side.cuda.hold_current(self.event, self.side.device)

    def try_enqueue(self) -> None:
        """Enqueue the copy, unless it is enqueued already; leave a failure to `finish`."""
        with contextlib.suppress(Exception):
            self._enqueue_once()

    def settle(self) -> None:
        """Wait until the device no longer writes into the slot; nothing is enqueued from now on.

        An error of the device is left out.
        """
        with self._sending:
            self._is_begun = True
            with contextlib.suppress(Exception):
                if self.event is not None:
                    self.side.cuda.synchronize(self.event)
        self._release()

    def _release(self) -> None:
        self.transfers = []
        self.image = self.ahead = None
        self.sources = ()

    def _enqueue_once(self) -> None:
        """Enqueue the copy behind the moment, unless it is enqueued already."""
        with self._sending, self._keeping_problem():
            if self._is_begun or self.moment.event is None:
                return
            self._is_begun = True
            for transfer in self.transfers:
                transfer.reserve()
            with self.side.enqueuing:
                self.side.cuda.follow(self.side.stream, self.moment.event)
                self._run_on_side(self._enqueue)
            self._looks = True

    @contextlib.contextmanager
    def _keeping_problem(self) -> Iterator[None]:
        """Raise the first error of this copy, of this block or of an earlier block.

        A copy that failed once is never taken for a finished copy. Needs the lock.
        """
        if self._problem is not None:
            raise self._problem
        try:
            yield
        except BaseException as error:
            self._problem = error
            raise

    def _run_on_side(self, work: Callable[[], None]) -> None:
        cuda = self.side.cuda
        try:
            cuda.run_on(self.side.stream, work)
        finally:  # also after an out-of-memory error: earlier work still writes into the slot
            self.event = cuda.record(self.side.stream)

    def _enqueue(self) -> None:
        assert self.image is not None  # noqa: S101
        for transfer in self.transfers:
            transfer.look()
            if not transfer.waits:
                transfer.run(self.image[transfer.begin : transfer.end])

    def _send_changed(self) -> None:
        """Send the changed blocks of tensors that waited for digests, if not already sent."""
        with self._sending, self._keeping_problem():
            waiting = [
                each for each in self.transfers if self._looks and each.waits and each.kept is None
            ]
            if not waiting or self.event is None:
                return
            image = self.image
            assert image is not None  # noqa: S101
            self.side.cuda.synchronize(self.event)
            for transfer in waiting:
                transfer.compare()

            def send() -> None:
                for transfer in waiting:
                    transfer.run_changed(image)

            with self.side.enqueuing:
                self._run_on_side(send)


def plan_device_copies(
    pieces: Iterable[tuple[TensorKey, torch.Tensor, int, int]],
    slot_view: memoryview,
    *,
    sides: SideStreams,
    filling: Filling | None = None,
    is_later: bool = False,
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
        is_later: whether the copies are done later, in this order, by one thread.
    """
    parts = (
        transfer
        for piece in pieces
        for transfer in _iter_transfers(piece, sides=sides, filling=filling)
    )
    transfers = [
        _join(run) for run in _iter_runs(parts, GATHER_NBYTES, is_alone=lambda part: part.is_direct)
    ]
    moments: dict[torch.device, Moment] = {}
    return join_copies(transfers, slot_view, moments, is_later=is_later)


def join_copies(
    transfers: Iterable[Transfer],
    slot_view: memoryview,
    moments: dict[torch.device, Moment],
    *,
    is_later: bool,
) -> tuple[DeviceCopy, ...]:
    """Return copies of neighbouring transfers, in image order.

    Args:
        transfers: the transfers, in image order.
        slot_view: the image, writable.
        moments: the moment of the values, by device; a missing moment is added, and is marked by
            the start of a copy.
        is_later: whether the copies are done later, in this order, by one thread.
    """
    image: torch.Tensor | None = None
    copies: list[DeviceCopy] = []
    for run in _iter_runs(transfers, COPY_NBYTES, is_alone=lambda _: False):
        image = torch.frombuffer(slot_view, dtype=torch.uint8) if image is None else image
        side = run[0].side
        moment = moments.setdefault(side.device, Moment(cuda=side.cuda, device=side.device))
        copies.append(
            DeviceCopy(
                keys=_keys_of(run),
                begin=run[0].begin,
                end=run[-1].end,
                side=side,
                transfers=run,
                image=image,
                moment=moment,
                is_later=is_later,
            )
        )
    for copy, ahead in itertools.pairwise(copies) if is_later else ():
        copy.ahead = ahead
    return tuple(copies)


def _iter_transfers(
    piece: tuple[TensorKey, torch.Tensor, int, int], *, sides: SideStreams, filling: Filling | None
) -> Iterator[Transfer]:
    key, held, begin, end = piece
    side = sides.of(held)
    tensor = held.detach()  # keeps the memory after `tensor.data = ...`
    for at, part in _iter_parts(tensor, begin, end):
        transfer = Transfer(side=side, keys=[key], begin=at, end=at + part.nbytes, parts=[part])
        # Blocks start at the begin of a piece, so a piece that is sent in parts can't be compared.
        if filling is not None and part is tensor and transfer.is_direct:
            transfer.block_nbytes, transfer.watched = filling.block_nbytes, filling.watch(begin)
        yield transfer


def _join(run: list[Transfer]) -> Transfer:
    if len(run) == 1:
        return run[0]
    run[0].side.reserve()
    parts = [part for transfer in run for part in transfer.parts]
    return Transfer(
        side=run[0].side, keys=[*_keys_of(run)], begin=run[0].begin, end=run[-1].end, parts=parts
    )


def _keys_of(run: list[Transfer]) -> tuple[TensorKey, ...]:
    """Return the distinct keys of a run. A tensor packed in several parts has a single key."""
    return tuple(dict.fromkeys(key for transfer in run for key in transfer.keys))


def _iter_runs(
    transfers: Iterable[Transfer], limit_nbytes: int, *, is_alone: Callable[[Transfer], bool]
) -> Iterator[list[Transfer]]:
    """Yield runs of neighbours in the image that share a device and fit the limit.

    A transfer larger than the limit forms its own run.
    """
    run: list[Transfer] = []
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
    if is_in_order(tensor) or tensor.nbytes <= GATHER_NBYTES:
        yield begin, tensor
        return
    row_count = GATHER_NBYTES // (tensor.nbytes // len(tensor))
    for part in tensor.split(row_count) if row_count else tensor.unbind():
        yield from _iter_parts(part, begin, begin + part.nbytes)
        begin += part.nbytes


def is_in_order(tensor: torch.Tensor) -> bool:
    """Return whether the memory of a tensor is the content, in C order."""
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
