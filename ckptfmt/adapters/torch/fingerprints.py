"""A digest of chosen elements of a state's tensors, read where the tensors live and fetched without waiting."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import hashlib
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch

from ckptfmt.adapters.torch.tensors import _as_integers, is_distributed, is_plain, local_of
from ckptfmt.documents.witness import FULL_EVERY

#: The number of tensors that a step looks at; with more, each step looks at others, in turn. A large step drives the
#: memory of its tensors out of the caches: then each costs about 5 microseconds.
_TENSORS: Final = 4
#: The number of tensors that a step with a full record looks at.
_FULL_TENSORS: Final = 32
#: The number of elements of each of these tensors: elements in a row share a line of the caches.
_ELEMENTS: Final = 8
#: The number of different choices of elements, at least.
_ROUNDS: Final = 4


class Pending:
    """The bits of a digest, or of a number, on their way from a device.

    Args:
        parts: contiguous tensors in the host's memory, which devices fill.
        events: the event of each device behind its last copy; none where the tensors are filled.
        is_number: whether the bits are those of the only element, a float of 64 bits, and no digest.
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
        """Return whether `bits` returns at once."""
        return all(event.query() for event in self._events)

    def wait(self) -> None:
        """Wait for the devices."""
        for event in self._events:
            event.synchronize()

    def bits(self) -> int:
        """Return the bits."""
        if self._is_number:
            return int(self._parts[0].view(torch.int64)) % (1 << 64)
        return _digest((_buffer(part) for part in self._parts), self._seed)


def fetch(value: torch.Tensor) -> Pending | float:
    """Return a tensor of one element, perhaps on its way to the host, as a float of 64 bits: all floats are exact.

    Raises: ValueError for a tensor of several elements.
    """
    if value.numel() != 1:
        raise ValueError(f"a tensor of {value.numel()} elements")
    if value.is_cpu and is_plain(value):
        return float(value.item())
    number = local_of(value).reshape(-1)[:1]
    return _fetch([number.to(torch.float64, copy=True)], is_number=True)


def fetch_batch(value: object) -> Pending | int | None:
    """Return a digest of chosen elements of all tensors of a batch; None where there is no tensor."""
    tensors = list(_tensors_in(value))
    chosen = _Chosen.of(tensors, seeds=range(len(tensors)))
    return chosen.fetch() if chosen.views or chosen.groups else None


def digest_outside_modules(held: Iterable[torch.Tensor]) -> dict[str, list[int]]:
    """Return digests of chosen elements of all live modules, but for some tensors, by the name of the module.

    A module within another one is a part of it. The garbage collector finds modules, in tens of milliseconds.

    Args:
        held: the tensors that are left out.
    """
    held_ids = {id(tensor) for tensor in held}
    modules = [found for found in gc.get_objects() if issubclass(type(found), torch.nn.Module)]
    inner = {id(child) for module in modules for child in module.children()}
    digests: dict[str, list[int]] = {}
    for module in modules:
        named = [*module.named_parameters(), *module.named_buffers()] if id(module) not in inner else []
        rows = [(name, tensor) for name, tensor in _iter_usable(named) if id(tensor) not in held_ids]
        found = fetch_batch([tensor.detach() for _, tensor in rows])
        if found is None:
            continue
        if isinstance(found, Pending):
            found.wait()
            found = found.bits()
        others = f" and {len(rows) - 1} more" if len(rows) > 1 else ""
        digests.setdefault(f"{type(module).__qualname__} ({rows[0][0]}{others})", []).append(found)
    return digests


@dataclasses.dataclass(slots=True, eq=False)
class _Chosen:
    """The chosen elements of some tensors.

    Elements in the host's memory are read at their address: torch's operations cost three times as much, and an array
    of numpy would forbid the program to resize the memory. `is_current` says whether the address still holds.

    Attributes:
        tensors: the tensors.
        places: the address and the number of elements of each tensor when the views were made.
        is_plain: whether all tensors are of torch's own class, and none a DTensor.
        views: the elements in the host's memory, which keep that memory alive.
        buffers: the same elements by their address.
        groups: the elements of other devices, by device and dtype: each group is gathered at once.
    """

    tensors: list[torch.Tensor]
    places: list[tuple[int, int]]
    is_plain: bool
    views: list[torch.Tensor]
    buffers: list[ctypes.Array[ctypes.c_uint8]]
    groups: list[list[torch.Tensor]]

    @classmethod
    def of(cls, tensors: list[torch.Tensor], seeds: Iterable[int]) -> _Chosen:
        """Choose elements of each tensor."""
        views: list[torch.Tensor] = []
        groups: dict[tuple[str, torch.dtype], list[torch.Tensor]] = {}
        for tensor, seed in zip(tensors, seeds, strict=True):
            view = _choose(tensor, seed)
            if view is not None and view.is_cpu:
                views.append(view)
            elif view is not None:
                groups.setdefault((str(view.device), view.dtype), []).append(view)
        places = [_place_of(tensor) for tensor in tensors]
        plain = all(is_plain(tensor) for tensor in tensors)
        return cls(tensors, places, plain, views, [_buffer(view) for view in views], list(groups.values()))

    def is_current(self) -> bool:
        """Return whether the memory of each tensor is still where the views show it."""
        if self.is_plain:
            return [(tensor.data_ptr(), tensor.numel()) for tensor in self.tensors] == self.places
        return [_place_of(tensor) for tensor in self.tensors] == self.places

    def fetch(self) -> Pending | int:
        """Return a digest of the elements as they are now, perhaps still on its way."""
        digest = _digest(self.buffers)
        if not self.groups:
            return digest
        return _fetch([torch.cat(group) for group in self.groups], is_number=False, seed=digest)


class Fingerprint:
    """The chosen elements of a state's tensors; the choice depends on names, shapes and the step's number alone.

    Every tensor is looked at in turn. A view keeps memory alive that the
    program gave up, and would go on showing it: each step compares the addresses of its tensors first, and makes the
    views anew where one has moved.

    Args:
        named: the names and tensors, in any order. A tensor without memory here, or of a layout that has no strides,
            is left out.

    Attributes:
        plan: a digest of names, shapes and dtypes: of two plans that differ, fingerprints can't be compared.
        tensor_count: the number of tensors that are looked at.
    """

    def __init__(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._named = sorted(_iter_usable(named), key=lambda pair: pair[0])
        rows = [f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in self._named]
        self.plan = hashlib.blake2b("\n".join(rows).encode(), digest_size=8).hexdigest()
        self.tensor_count = len(self._named)
        self._rounds: dict[tuple[int, int], _Chosen] = {}

    def start(self, step: int, *, is_full: bool) -> Pending | int | None:
        """Return the digest after a step, perhaps still on its way; None where there is nothing to look at."""
        if not self._named or _is_capturing():
            return None
        count = _FULL_TENSORS if is_full else _TENSORS
        parts = math.ceil(self.tensor_count / count)
        # Every part is looked at with several choices of elements: rounds are a multiple of parts.
        rounds = parts * math.ceil(_ROUNDS / parts)
        number = (step // FULL_EVERY if is_full else step) % rounds
        found = self._rounds.get((count, number))
        if found is None or not found.is_current():
            rows = self._named[number % parts :: parts]
            seeds = [zlib.crc32(f"{name}/{number}".encode()) for name, _ in rows]
            found = self._rounds[count, number] = _Chosen.of([tensor for _, tensor in rows], seeds)
        return found.fetch()


def _place_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the address and the number of elements of the memory that this process holds of a tensor."""
    local = getattr(tensor, "_local_tensor", tensor)
    return int(local.data_ptr()), int(local.numel())


def _buffer(view: torch.Tensor) -> ctypes.Array[ctypes.c_uint8]:
    """Return the bytes of a contiguous tensor in the host's memory, which the tensor must keep alive."""
    return (ctypes.c_uint8 * view.nbytes).from_address(view.data_ptr())


def _digest(buffers: Iterable[ctypes.Array[ctypes.c_uint8]], digest: int = 0) -> int:
    for buffer in buffers:
        digest = zlib.crc32(buffer, digest)
    return digest


def _fetch(parts: list[torch.Tensor], *, is_number: bool, seed: int = 0) -> Pending:
    """Return what is on its way to the host: a copy that nobody waits for, where it comes from a CUDA device."""
    if any(part.device.type != "cuda" for part in parts):
        return Pending([part.cpu() for part in parts], (), is_number=is_number, seed=seed)
    hosts = [torch.empty(part.shape, dtype=part.dtype, device="cpu", pin_memory=True) for part in parts]
    for host, part in zip(hosts, parts, strict=True):
        host.copy_(part, non_blocking=True)
    events = []
    for device in {part.device for part in parts}:
        events.append(torch.cuda.Event())
        events[-1].record(torch.cuda.current_stream(device))
    return Pending(hosts, events, is_number=is_number, seed=seed)


def _is_capturing() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _iter_usable(named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in named:
        is_known = is_plain(tensor) or is_distributed(tensor)
        if is_known and tensor.layout == torch.strided and tensor.device.type != "meta" and not tensor.is_quantized:
            yield name, tensor


def _choose(tensor: torch.Tensor, seed: int) -> torch.Tensor | None:
    """Return a view of a few elements in a row, from a place that the seed chooses; None where there is none."""
    local = local_of(tensor)
    if local.is_conj() or local.is_neg() or local.data_ptr() == 0 or not local.numel():
        return None
    integers = _as_integers(local)
    if integers.is_complex():
        integers = torch.view_as_real(integers).view(torch.int64)
    span = sum((size - 1) * stride for size, stride in zip(integers.shape, integers.stride(), strict=True)) + 1
    # A tensor with gaps, or whose elements share memory, is looked at where it begins.
    count = min(_ELEMENTS, integers.numel()) if span == integers.numel() else 1
    place = seed % (integers.numel() - count + 1) if count > 1 else 0
    return integers.as_strided((count,), (1,), integers.storage_offset() + place)


def _tensors_in(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield from (tensor for _, tensor in _iter_usable([("", value)]))
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors_in(item)
