"""Digests of chosen elements of a state's tensors, read in place and copied without a wait."""

from __future__ import annotations

import ctypes
import gc
import hashlib
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeGuard

import torch

from ckptfmt.adapters.torch.tensors import _as_integers, is_distributed, is_plain, local_of
from ckptfmt.run.witness import FULL_EVERY

#: The number of tensors in the digest of a step. If there are more tensors, the steps take turns.
#: A large step evicts the tensors from the CPU's caches; then each costs about 5 microseconds.
_TENSORS: Final = 4
#: The number of tensors in the digest of a step with a full record.
_FULL_TENSORS: Final = 32
#: The number of chosen elements of a tensor. Adjacent elements share a cache line.
_ELEMENTS: Final = 8
#: Number of different selections of elements, which take turns: several in a small model, one in a
#: large model.
_CHOICES: Final = 4
#: The maximum number of cached addresses, of a few hundred bytes each.
_ADDRESSES: Final = 4096

_Buffer = ctypes.Array[ctypes.c_uint8]
_Place = tuple[int, int, torch.dtype]


class Pending:
    """A digest or a number in transfer from a device.

    Args:
        parts: contiguous tensors in the host's memory, which devices fill.
        events: the event of each device after the last copy; empty if the tensors are filled.
        is_number: whether the result is the only element, a 64-bit float, instead of a digest.
        seed: a digest of elements that are on the host already.
    """

    def __init__(
        self,
        parts: Sequence[torch.Tensor],
        events: Sequence[Any],
        *,
        is_number: bool,
        seed: int = 0,
    ) -> None:
        self._parts = parts
        self._events = events
        self._is_number = is_number
        self._seed = seed

    def is_ready(self) -> bool:
        """Return whether `bits` returns without a wait."""
        return all(event.query() for event in self._events)

    def wait(self) -> None:
        """Wait until the devices have filled the tensors."""
        for event in self._events:
            event.synchronize()

    def bits(self) -> int:
        """Return the bits of the number, or the digest."""
        if self._is_number:
            return int(self._parts[0].view(torch.int64)) % (1 << 64)
        return _digest((_buffer(part) for part in self._parts), self._seed)


def fetch(value: torch.Tensor) -> Pending | float:
    """Return a tensor of one element as a 64-bit float, or a pending copy of the element.

    The conversion of all floats is exact.

    Raises: ValueError for a tensor with any other number of elements.
    """
    if value.numel() != 1:
        raise ValueError(f"a tensor of {value.numel()} elements")
    if value.is_cpu and is_plain(value):
        return float(value.item())
    number = local_of(value).reshape(-1)[:1]
    if number.device.type != "cuda":
        return float(number.item())
    return _fetch([number.to(torch.float64, copy=True)], is_number=True)


def fetch_batch(value: object) -> Pending | int | None:
    """Return a digest of chosen elements of a batch's tensors; None if there are no tensors."""
    views = [
        view
        for number, tensor in enumerate(_tensors_in(value))
        if (view := _choose(tensor, number)) is not None
    ]
    if not views:
        return None
    digest = _digest([_buffer(view) for view in views if view.is_cpu])
    return _gather([view for view in views if not view.is_cpu], digest)


def digest_outside_modules(held: Iterable[torch.Tensor]) -> dict[str, list[int]]:
    """Return digests of chosen elements of all live modules, by module name.

    A submodule is a part of its parent. The search through the objects of the garbage collector
    takes tens of milliseconds.

    Args:
        held: the tensors to exclude.
    """
    held_ids = {id(tensor) for tensor in held}
    modules = [found for found in gc.get_objects() if issubclass(type(found), torch.nn.Module)]
    inner = {id(child) for module in modules for child in module.children()}
    digests: dict[str, list[int]] = {}
    for module in modules:
        named = (
            [*module.named_parameters(), *module.named_buffers()] if id(module) not in inner else []
        )
        rows = [
            (name, tensor)
            for name, tensor in named
            if _is_usable(tensor) and id(tensor) not in held_ids
        ]
        found = fetch_batch([tensor.detach() for _, tensor in rows])
        if found is None:
            continue
        if isinstance(found, Pending):
            found.wait()
            found = found.bits()
        others = f" and {len(rows) - 1} more" if len(rows) > 1 else ""
        digests.setdefault(f"{type(module).__qualname__} ({rows[0][0]}{others})", []).append(found)
    return digests


class Fingerprint:
    """Digests of chosen elements of a state's tensors.

    The choice depends on names and the step's number. Each step reads the present tensors from
    their places, because a program may replace the tensor in a place at every step. No tensor and
    no view is kept, so that the program can free its memory. Elements in the host's memory are read
    at a cached address, because torch's operations take three times as long.

    Args:
        readers: the places of the tensors, in any order, each with a function that returns the
            present tensor, or None. Tensors without memory in this process and tensors without
            strides are excluded.

    Attributes:
        plan: a digest of names, shapes and dtypes. Digests with different plans aren't comparable.
        tensor_count: the number of tensors.
    """

    def __init__(self, readers: Iterable[tuple[str, Callable[[], torch.Tensor | None]]]) -> None:
        found = [(name, read, read()) for name, read in readers]
        rows = [(name, read, tensor) for name, read, tensor in found if _is_usable(tensor)]
        rows.sort(key=lambda row: row[0])
        text = "\n".join(f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, _, tensor in rows)
        self._readers = [(name, read) for name, read, _ in rows]
        self.plan = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        self.tensor_count = len(rows)
        #: The place of a tensor in the host's memory, and the bytes of its chosen elements, by the
        #: tensor's number and the number of the choice.
        self._buffers: dict[tuple[int, int], tuple[_Place, _Buffer]] = {}

    def start(self, step: int, *, is_full: bool) -> Pending | int | None:
        """Return the digest after a step, or a pending digest.

        The result is None if there are no tensors, and during the capture of a CUDA graph.
        """
        if not self._readers or _is_capturing():
            return None
        parts = math.ceil(self.tensor_count / (_FULL_TENSORS if is_full else _TENSORS))
        turn = step // FULL_EVERY if is_full else step
        choice = turn // parts % max(1, _CHOICES // parts)
        digest = 0
        views: list[torch.Tensor] = []
        for number in range(turn % parts, self.tensor_count, parts):
            name, read = self._readers[number]
            tensor = read()
            known = self._buffers.get((number, choice))
            if known is not None and tensor is not None and known[0] == _place_of(tensor):
                digest = zlib.crc32(known[1], digest)
                continue
            if not _is_usable(tensor):
                continue
            view = _choose(tensor, zlib.crc32(f"{name}/{choice}".encode()))
            if view is not None and view.is_cpu:
                buffer = _buffer(view)
                if len(self._buffers) >= _ADDRESSES:
                    self._buffers.clear()
                self._buffers[number, choice] = (_place_of(tensor), buffer)
                digest = zlib.crc32(buffer, digest)
            elif view is not None:
                views.append(view)
        return _gather(views, digest)


def _place_of(tensor: torch.Tensor) -> _Place:
    """Return the address, element count and dtype of the part of a tensor in this process."""
    local = getattr(tensor, "_local_tensor", tensor)
    return local.data_ptr(), local.numel(), local.dtype


def _buffer(view: torch.Tensor) -> _Buffer:
    """Return the bytes of a contiguous tensor in the host's memory.

    The bytes are valid only while the tensor's memory is allocated.
    """
    return (ctypes.c_uint8 * view.nbytes).from_address(view.data_ptr())


def _digest(buffers: Iterable[_Buffer], digest: int = 0) -> int:
    for buffer in buffers:
        digest = zlib.crc32(buffer, digest)
    return digest


def _gather(views: list[torch.Tensor], digest: int) -> Pending | int:
    """Return `digest` continued by elements on devices, with one copy for each device and dtype."""
    if not views:
        return digest
    groups: dict[tuple[str, torch.dtype], list[torch.Tensor]] = {}
    for view in views:
        groups.setdefault((str(view.device), view.dtype), []).append(view)
    return _fetch([torch.cat(group) for group in groups.values()], is_number=False, seed=digest)


def _fetch(parts: list[torch.Tensor], *, is_number: bool, seed: int = 0) -> Pending:
    """Return a pending copy to the host. Copies from CUDA devices run without a wait."""
    if any(part.device.type != "cuda" for part in parts):
        return Pending([part.cpu() for part in parts], (), is_number=is_number, seed=seed)
    hosts = [
        torch.empty(part.shape, dtype=part.dtype, device="cpu", pin_memory=True) for part in parts
    ]
    for host, part in zip(hosts, parts, strict=True):
        host.copy_(part, non_blocking=True)
    events = []
    for device in {part.device for part in parts}:
        events.append(torch.cuda.Event())
        events[-1].record(torch.cuda.current_stream(device))
    return Pending(hosts, events, is_number=is_number, seed=seed)


def _is_capturing() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _is_usable(tensor: torch.Tensor | None) -> TypeGuard[torch.Tensor]:
    if tensor is None or not (is_plain(tensor) or is_distributed(tensor)):
        return False
    return (
        tensor.layout == torch.strided and tensor.device.type != "meta" and not tensor.is_quantized
    )


def _choose(tensor: torch.Tensor, seed: int) -> torch.Tensor | None:
    """Return a view of a few adjacent elements at a place chosen by the seed.

    The result is None for a conjugated or negated view, and for a tensor without elements in this
    process.
    """
    local = local_of(tensor)
    if local.is_conj() or local.is_neg() or local.data_ptr() == 0 or not local.numel():
        return None
    integers = _as_integers(local)
    if integers.is_complex():
        integers = torch.view_as_real(integers).view(torch.int64)
    span = (
        sum(
            (size - 1) * stride
            for size, stride in zip(integers.shape, integers.stride(), strict=True)
        )
        + 1
    )
    # Of a tensor with gaps or with elements that share memory, only the first element is read.
    count = min(_ELEMENTS, integers.numel()) if span == integers.numel() else 1
    place = seed % (integers.numel() - count + 1) if count > 1 else 0
    return integers.as_strided((count,), (1,), integers.storage_offset() + place)


def _tensors_in(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield from [value] if _is_usable(value) else []
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors_in(item)
