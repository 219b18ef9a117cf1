"""States to save, and comparisons with loaded states: by bytes, never by `==`."""

from __future__ import annotations

import dataclasses
import random
import struct
from collections.abc import Mapping
from typing import cast

import numpy as np
import torch

from ckptfmt_conformance.neutral.peer import Loaded

__all__ = ["Expected", "bits_of", "filled", "from_bits", "mixed_state", "small_state", "template"]


def from_bits(content: bytes, dtype: torch.dtype, shape: tuple[int, ...] = (-1,)) -> torch.Tensor:
    """Return a tensor with the given bytes."""
    flat = (
        torch.frombuffer(bytearray(content), dtype=torch.uint8)
        if content
        else torch.empty(0, dtype=torch.uint8)
    )
    return flat.view(dtype).reshape(shape)


def bits_of(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor's elements in C order."""
    if tensor.numel() == 0:
        return b""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


def filled(nbytes: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a large tensor with bytes derived from a seed."""
    words = torch.arange(nbytes // 8, dtype=torch.int64)
    return words.add_(seed << 40).mul_(0x9E3779B97F4A7C1).view(dtype)


def small_state(seed: int, keeps: frozenset[str] = frozenset()) -> dict[str, object]:
    """Return a state of about 60 KiB without long constant stretches of bytes."""
    rng = random.Random(seed)
    tensors = {
        "embed.weight": from_bits(rng.randbytes(96 * 64 * 4), torch.float32, (96, 64)),
        "layers.0.weight": from_bits(rng.randbytes(64 * 64 * 4), torch.float32, (64, 64)),
        "layers.0.bias": from_bits(rng.randbytes(64 * 4), torch.float32),
        "layers.1.weight": from_bits(rng.randbytes(64 * 96 * 2), torch.bfloat16, (64, 96)),
        "positions": from_bits(rng.randbytes(48 * 8), torch.int64),
    }
    state: dict[str, object] = {"tensors": tensors}
    if "values" in keeps:
        state["values"] = {
            "epoch": seed,
            "names": [f"sample-{rng.randrange(10**9)}" for _ in range(20)],
            "lr": 0.1,
        }
    return state


def mixed_state(nbytes: int, seed: int, count: int = 8) -> dict[str, object]:
    """Return a state of `nbytes` bytes in `count` tensors."""
    return {
        "tensors": {
            f"layers.{i}.weight": filled(nbytes // count, seed * count + i) for i in range(count)
        }
    }


def template(state: Mapping[str, object]) -> dict[str, object]:
    """Return a state of the same names, shapes and dtypes with every byte wrong.

    Names that share a tensor share a tensor in the template too.
    """
    tensors = cast("Mapping[str, torch.Tensor]", state["tensors"])
    made: dict[int, torch.Tensor] = {}
    for tensor in tensors.values():
        if id(tensor) not in made:
            made[id(tensor)] = _wrong(tensor)
    wrong: dict[str, object] = {
        "tensors": {name: made[id(tensor)] for name, tensor in tensors.items()}
    }
    if "values" in state:
        wrong["values"] = _emptied(state["values"])
    return wrong


def _wrong(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype == torch.bool:
        return tensor.detach().logical_not().contiguous()
    flat = torch.frombuffer(bytearray(bits_of(tensor) or b"\0"), dtype=torch.uint8).bitwise_not()
    return flat[: tensor.numel() * tensor.element_size()].view(tensor.dtype).reshape(tensor.shape)


def _emptied(value: object) -> object:
    return {key: _emptied(item) for key, item in value.items()} if isinstance(value, dict) else None


def _exact(value: object) -> object:
    """Return a value for comparisons by types and bits."""
    if isinstance(value, float):
        return ("float", struct.pack("<d", value))
    if isinstance(value, Mapping):
        return (
            "mapping",
            sorted(((repr(key), _exact(item)) for key, item in value.items()), key=repr),
        )
    if isinstance(value, list | tuple):
        return (type(value).__name__, [_exact(item) for item in value])
    return (type(value).__name__, value)


@dataclasses.dataclass(frozen=True, slots=True)
class Expected:
    """The expected content of a load, copied at the save.

    Later changes to the live state don't change the copy.

    Attributes:
        tensors: dtype, shape and bytes of each tensor.
        values: the plain values; None for none.
        step: the saved step; None if the step isn't compared.
    """

    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...], bytes]]
    values: object
    step: int | None

    @classmethod
    def of(cls, state: Mapping[str, object], step: int | None) -> Expected:
        """Return a copy of a state's content."""
        tensors = cast("Mapping[str, torch.Tensor]", state["tensors"])
        taken = {
            name: (tensor.dtype, tuple(tensor.shape), bits_of(tensor))
            for name, tensor in tensors.items()
        }
        values = state.get("values")
        return cls(taken, None if values is None else _exact(values), step)

    def difference(self, loaded: Loaded) -> str | None:
        """Return the first difference of a loaded state; None if there is none."""
        found = loaded.state.get("tensors")
        if not isinstance(found, Mapping):
            return "no tensors came back"
        if set(found) != set(self.tensors):
            return f"other names came back: {sorted(set(found) ^ set(self.tensors))[:3]}"
        for name, expected in self.tensors.items():
            said = _tensor_difference(found[name], *expected)
            if said:
                return f"{name}: {said}"
        if self.values is not None and _exact(loaded.state.get("values")) != self.values:
            return f"values: {str(loaded.state.get('values'))[:120]} came back"
        if self.step is not None and loaded.step != self.step:
            return f"step {loaded.step} came back for step {self.step}"
        return None


def _tensor_difference(
    tensor: object, dtype: torch.dtype, shape: tuple[int, ...], content: bytes
) -> str | None:
    if not isinstance(tensor, torch.Tensor):
        return f"a {type(tensor).__name__} came back"
    if tensor.dtype != dtype:
        return f"{tensor.dtype} came back for {dtype}"
    if tuple(tensor.shape) != shape:
        return f"shape {tuple(tensor.shape)} came back for {shape}"
    found = bits_of(tensor)
    if found == content:
        return None
    wrong = (np.frombuffer(found, np.uint8) != np.frombuffer(content, np.uint8)).nonzero()[0]
    return f"{len(wrong)} of {len(content)} bytes differ, the first at {wrong[0]}"
