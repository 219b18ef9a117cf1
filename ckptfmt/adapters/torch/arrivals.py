"""Copy the bytes of a load from pinned buffers to CUDA tensors, while the host reads on.

The thread that has filled and verified a buffer enqueues the copies out of the buffer, and goes on
with another buffer. A buffer is filled again after its copies have ended; see
`ckptfmt.read.streaming.Loan`.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch

from ckptfmt.adapters.torch.device_copies import DEVICE_TYPE, Cuda, SideStreams, pin, unpin
from ckptfmt.adapters.torch.tensors import TorchSink
from ckptfmt.errors import Code, err
from ckptfmt.read.streaming import Borrow
from ckptfmt.write.snapshot import TensorSink


def plan_arrivals(
    sinks: Sequence[TensorSink],
    *,
    report: Callable[[str], None],
    cuda: Cuda | None = None,
    device_type: str = DEVICE_TYPE,
) -> Borrow | None:
    """Let the sinks on a device copy on side streams; return the function that lends buffers.

    The side streams wait for all work that the program has enqueued so far, since the work may
    still read the tensors.

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
    arrivals = _Arrivals([sink.local for sink in found], report, Cuda() if cuda is None else cuda)
    for sink in found:
        sink.arrive = arrivals.copy
    return arrivals.borrow


class _Arrivals:
    """The copies of a load to devices, on one side stream for each device.

    Args:
        tensors: the tensors to fill. The object keeps their devices, and no tensor.
        report: called with a sentence if the buffers can't be pinned.
        cuda: the CUDA calls to use.
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor], report: Callable[[str], None], cuda: Cuda
    ) -> None:
        self._report = report
        self._cuda = cuda
        sides = SideStreams(cuda=cuda)
        found = {cuda.device_of(tensor): sides.of(tensor).stream for tensor in tensors}
        self._streams: dict[torch.device, torch.cuda.Stream] = found
        self._loans: list[_Loan] = []
        for device, stream in self._streams.items():
            cuda.follow_current(stream, device)

    def copy(self, target: torch.Tensor, incoming: torch.Tensor) -> None:
        """Copy to a device. Bytes in a lent buffer may be in use after the call.

        Raises: StateError(LOAD_MEMORY) if the device's memory is full; the errors of the device.
        """
        device = self._cuda.device_of(target)
        stream = self._streams[device]
        address = incoming.data_ptr()
        loan = next((loan for loan in self._loans if loan.contains(address)), None)

        def enqueue() -> None:
            send(target, incoming)

        with _naming(device):
            if loan is not None:
                loan.is_in_use = True
            self._cuda.run_on(stream, enqueue)
            if loan is None:
                self._cuda.synchronize(self._cuda.record(stream))

    @contextlib.contextmanager
    def borrow(self, memory: memoryview) -> Iterator[_Loan]:
        """Pin memory, and lend the memory to the devices. The end waits for all copies.

        If a device fails in the wait, the memory stays pinned and allocated until the process ends.

        Raises: the errors of the device.
        """
        loan = _Loan(memory, self._streams, self._cuda)
        problem = pin(loan.address, len(memory), cuda=self._cuda)
        if problem is not None:
            self._report(
                "the buffers of the load aren't pinned, and copies to the device are slower:"
                f" {problem}"
            )
        self._loans.append(loan)
        try:
            yield loan
        except BaseException:
            with contextlib.suppress(Exception):  # the first error says more
                self._end(loan, is_pinned=problem is None)
            raise
        self._end(loan, is_pinned=problem is None)

    def _end(self, loan: _Loan, *, is_pinned: bool) -> None:
        self._loans.remove(loan)
        try:
            loan.wait_all()
        finally:
            if loan.is_in_use:
                # The device may still read the memory, which must never be freed.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(loan.memory))
            elif is_pinned:
                unpin(loan.address, cuda=self._cuda)


def send(target: torch.Tensor, incoming: torch.Tensor) -> None:
    """Copy to a device on the current stream. Bytes in pinned memory are in use after the call."""
    with torch.no_grad():
        target.copy_(incoming, non_blocking=True)


class _Loan:
    """Pinned memory with the copies out of the memory; see `ckptfmt.read.streaming.Loan`.

    A buffer is used by one thread at a time.

    Attributes:
        memory: the memory.
        address: the address of the first byte.
        is_in_use: whether copies may be in progress. After a failed wait, the value stays true.
    """

    def __init__(
        self, memory: memoryview, streams: dict[torch.device, torch.cuda.Stream], cuda: Cuda
    ) -> None:
        self.memory = memory
        self.address = _address_of(memory)
        self.is_in_use = False
        self._streams = streams
        self._cuda = cuda
        self._events: dict[int, list[tuple[torch.device, torch.cuda.Event]]] = {}
        self._failure: BaseException | None = None

    def contains(self, address: int) -> bool:
        """Return whether an address lies in the memory."""
        return self.address <= address < self.address + len(self.memory)

    def mark(self, buffer: memoryview) -> None:
        """Remember the copies that were enqueued so far, as copies out of `buffer`.

        Raises: the errors of the device.
        """
        if self.is_in_use:
            with self._failing():
                self._events[_address_of(buffer)] = self._record()

    def wait(self, buffer: memoryview) -> None:
        """Wait until all marked copies out of `buffer` have ended.

        Raises: the errors of the device; the error of an earlier call, since the end of the copies
            is unknown.
        """
        if self._failure is not None:
            raise self._failure
        with self._failing():
            self._wait_for(self._events.pop(_address_of(buffer), ()))

    def wait_all(self) -> None:
        """Wait until all copies out of the memory have ended. An interruption is raised afterwards.

        No thread may enqueue a copy out of the memory meanwhile.

        Raises: the errors of the device.
        """
        interruption: BaseException | None = None
        while self.is_in_use:
            try:
                with self._failing():
                    self._wait_for(self._record())
                self.is_in_use = False
            except Exception:
                raise
            except BaseException as error:  # noqa: BLE001
                interruption = error
        self._events.clear()
        if interruption is not None:
            raise interruption

    def _record(self) -> list[tuple[torch.device, torch.cuda.Event]]:
        found = []
        for device, stream in self._streams.items():
            with _naming(device):
                found.append((device, self._cuda.record(stream)))
        return found

    def _wait_for(self, events: Iterable[tuple[torch.device, torch.cuda.Event]]) -> None:
        for device, event in events:
            with _naming(device):
                self._cuda.synchronize(event)

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """Keep an error of the device: no buffer may be filled again afterwards."""
        try:
            yield
        except BaseException as error:
            self._failure = error
            raise


def _address_of(memory: memoryview) -> int:
    return int(np.frombuffer(memory, np.uint8).ctypes.data)


@contextlib.contextmanager
def _naming(device: torch.device) -> Iterator[None]:
    """Name the load and the device in the errors of the device.

    Raises: StateError(LOAD_MEMORY) if the device's memory is full; the other errors as they are,
        with a note.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise err(Code.LOAD_MEMORY, f"a copy to {device}: {error}", where=str(device)) from error
    except Exception as error:
        error.add_note(f"ckptfmt: raised by the load's copies to {device}")
        raise
