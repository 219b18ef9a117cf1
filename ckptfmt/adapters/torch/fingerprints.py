"""A digest of chosen elements of a state's tensors, gathered where the tensors live and fetched without waiting."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch

from ckptfmt.adapters.torch.tensors import _as_integers, is_distributed, is_plain, local_of

#: The number of tensors that one step looks at; with more, each step looks at others, in turn.
_TENSORS: Final = 12
#: The number of elements of each of these tensors.
_ELEMENTS: Final = 8
#: The number of different choices of elements, at least.
_ROUNDS: Final = 4


class Pending:
    """The bits of a digest, or of a number, on their way from a device.

    Args:
        parts: contiguous tensors in the host's memory, which a device fills.
        event: the event of a device behind the last copy; None where the tensors are filled.
        is_number: whether the bits are those of the only element, a float of 64 bits, and no digest.
    """

    def __init__(self, parts: Sequence[torch.Tensor], event: Any, *, is_number: bool) -> None:  # noqa: ANN401 - CUDA's
        self._parts = parts
        self._event = event
        self._is_number = is_number

    def is_ready(self) -> bool:
        """Return whether `bits` returns at once."""
        return self._event is None or bool(self._event.query())

    def wait(self) -> None:
        """Wait for the device."""
        if self._event is not None:
            self._event.synchronize()

    def bits(self) -> int:
        """Return the 64 bits."""
        if self._is_number:
            return int(self._parts[0].view(torch.int64)) % (1 << 64)
        return digest_of(self._parts)


def digest_of(parts: Iterable[torch.Tensor]) -> int:
    """Return a digest of 64 bits of the bytes of contiguous tensors in the host's memory."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part.numpy().view("uint8").data)
    return int.from_bytes(digest.digest(), "little")


def fetch(value: torch.Tensor) -> Pending | float:
    """Return a tensor of one element, perhaps on its way to the host, as a float of 64 bits: all floats are exact."""
    if value.device.type == "cpu" and is_plain(value):
        return float(value.item())
    number = local_of(value).reshape(-1)[:1]
    return _fetch([number.to(torch.float64, copy=True)], is_number=True)


def fetch_batch(value: object) -> Pending | None:
    """Return the digest of chosen elements of all tensors of a batch; None where there is no tensor."""
    views = [view for number, tensor in enumerate(_tensors_in(value)) if (view := _choose(tensor, number)) is not None]
    return _fetch([torch.cat(group) for group in _grouped(views)]) if views else None


def _fetch(parts: list[torch.Tensor], *, is_number: bool = False) -> Pending:
    """Return what is on its way to the host: a copy that nobody waits for, where it comes from a CUDA device."""
    if all(part.device.type == "cpu" for part in parts):
        return Pending(parts, None, is_number=is_number)
    if any(part.device.type != "cuda" for part in parts):
        return Pending([part.cpu() for part in parts], None, is_number=is_number)
    hosts = [torch.empty(part.shape, dtype=part.dtype, device="cpu", pin_memory=True) for part in parts]
    for host, part in zip(hosts, parts, strict=True):
        host.copy_(part, non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(parts[0].device))
    return Pending(hosts, event, is_number=is_number)


@dataclasses.dataclass(slots=True, eq=False)
class _Round:
    """The tensors of one choice, and the chosen elements of each, as views."""

    tensors: list[torch.Tensor]
    addresses: list[int]
    groups: list[list[torch.Tensor]]


class Fingerprint:
    """The chosen elements of a state's tensors; the choice depends on names, shapes and the step's number alone.

    Every tensor is looked at in one of so many steps in a row as there are rounds. A view keeps memory alive that the
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
        self._parts = math.ceil(self.tensor_count / _TENSORS)
        # Every part is looked at with several choices of elements: rounds are a multiple of parts.
        self._round_count = self._parts * math.ceil(_ROUNDS / max(1, self._parts))
        self._rounds: dict[int, _Round] = {}

    def start(self, step: int) -> Pending | None:
        """Return the digest after a step, perhaps still on its way; None where there is nothing to look at."""
        if not self._named or _is_capturing():
            return None
        number = step % self._round_count
        found = self._rounds.get(number)
        if found is None or [address_of(tensor) for tensor in found.tensors] != found.addresses:
            found = self._rounds[number] = self._make(number)
        return _fetch([torch.cat(group) for group in found.groups])

    def _make(self, number: int) -> _Round:
        rows = self._named[number % self._parts :: self._parts]
        views = [_choose(tensor, zlib.crc32(f"{name}/{number}".encode())) for name, tensor in rows]
        tensors = [tensor for _, tensor in rows]
        groups = _grouped(view for view in views if view is not None)
        return _Round(tensors, [address_of(tensor) for tensor in tensors], groups)


def address_of(tensor: torch.Tensor) -> int:
    """Return where the memory of a tensor begins that this process holds."""
    return int(getattr(tensor, "_local_tensor", tensor).data_ptr())


def _is_capturing() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _iter_usable(named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in named:
        is_known = is_plain(tensor) or is_distributed(tensor)
        if is_known and tensor.layout == torch.strided and tensor.device.type != "meta" and not tensor.is_quantized:
            yield name, tensor


def _choose(tensor: torch.Tensor, seed: int) -> torch.Tensor | None:
    """Return a view of a few elements, spread evenly from a place that the seed chooses; None where there is none."""
    local = local_of(tensor)
    if local.is_conj() or local.is_neg() or local.data_ptr() == 0 or not local.numel():
        return None
    integers = _as_integers(local)
    if integers.is_complex():
        integers = torch.view_as_real(integers).view(torch.int64)
    span = sum((size - 1) * stride for size, stride in zip(integers.shape, integers.stride(), strict=True)) + 1
    if span != integers.numel():
        integers = integers[(0,) * (integers.ndim - 1)] if integers.ndim > 1 else integers
        return integers[:_ELEMENTS] if integers.ndim else integers.reshape(1)
    count = min(_ELEMENTS, integers.numel())
    step = integers.numel() // count
    return integers.as_strided((count,), (step,), integers.storage_offset() + seed % step)


def _grouped(views: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return the views by device and dtype: each group is gathered at once."""
    groups: dict[tuple[str, torch.dtype], list[torch.Tensor]] = {}
    for view in views:
        groups.setdefault((str(view.device), view.dtype), []).append(view)
    return list(groups.values())


def _tensors_in(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield from (tensor for _, tensor in _iter_usable([("", value)]))
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors_in(item)
