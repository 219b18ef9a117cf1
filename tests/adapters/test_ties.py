"""Which tensors are one memory: whatever is taken for a tie shows the same elements, also when they change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import ckptfmt
from ckptfmt.adapters.torch.tensors import memory_of
from ckptfmt.store.memory import MemoryStore
from tests.convert.made import done, trees


class Buffers(nn.Module):
    """Tensors under names of their own."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)


def saved(module: nn.Module) -> MemoryStore:
    store = MemoryStore()
    ckptfmt.save(store, ckptfmt.State(weights=module), step=1)
    return store


def shown(module: nn.Module) -> dict[str, list[float]]:
    return {name: buffer.tolist() for name, buffer in module.named_buffers()}


def complex_values() -> torch.Tensor:
    return torch.complex(torch.arange(1.0, 5.0), torch.arange(11.0, 15.0))


def test_negative_view_of_the_same_memory_is_no_tie() -> None:
    values = complex_values()
    assert values.conj().imag.is_neg()
    module = Buffers(imag=values.imag, minus=values.conj().imag, same=values.imag)
    assert memory_of(values.imag) != memory_of(values.conj().imag)
    assert memory_of(values.imag) == memory_of(values.imag)

    found: Any = ckptfmt.load(saved(module), framework="torch")
    assert found["weights"]["imag"].tolist() == [11.0, 12.0, 13.0, 14.0]
    assert found["weights"]["minus"].tolist() == [-11.0, -12.0, -13.0, -14.0]

    other = torch.zeros(4, dtype=torch.complex64)
    into = Buffers(imag=other.imag, minus=other.conj().imag, same=other.imag)
    ckptfmt.load(saved(module), ckptfmt.State(weights=into))
    assert shown(into) == shown(module)


@pytest.mark.parametrize("key", ["model", "nested"])
def test_negative_view_in_a_torch_file_is_no_tie(key, tmp_path) -> None:
    values = complex_values()
    imag, minus = values.imag, torch._neg_view(values.imag)
    torch.save({key: {"imag": imag, "minus": minus}}, tmp_path / "a.pt")
    done(tmp_path / "a.pt", tmp_path / "ckpt", "--to", "ckptfmt")

    found = trees(tmp_path / "ckpt")
    tensors = found["weights"] if key == "model" else found["optimizer"]["extra/nested"]
    assert (tensors["imag"].tolist(), tensors["minus"].tolist()) == (imag.tolist(), minus.tolist())


def test_zeros_without_memory_are_refused_by_name() -> None:
    """They had an address of 0, from which a save copied."""
    with pytest.raises(ckptfmt.CkptError, match=r"STATE_UNSUPPORTED.*zeros.*forward-mode"):
        ckptfmt.save(
            MemoryStore(), ckptfmt.State(weights={"w": torch._efficientzerotensor((3,))}), step=1
        )


@st.composite
def views(draw: st.DrawFn) -> list[torch.Tensor]:
    """Return several views of one storage, of which some show the same elements and most don't."""
    base = complex_values().repeat(3)
    found = []
    for _ in range(draw(st.integers(2, 5))):
        tensor = base
        for change in draw(st.lists(st.sampled_from(sorted(CHANGES)), max_size=5)):
            tensor = CHANGES[change](tensor)
        found.append(tensor)
    return found


#: Each returns a view.
CHANGES: dict[str, Any] = {
    "conj": lambda tensor: tensor.conj(),
    "imag": lambda tensor: tensor.imag if tensor.is_complex() else tensor,
    "real": lambda tensor: tensor.real,
    "neg": torch._neg_view,
    "as real": lambda tensor: (
        torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    ),
    "slice": lambda tensor: tensor[1:] if tensor.ndim and len(tensor) > 1 else tensor,
    "step": lambda tensor: tensor[::2] if tensor.ndim else tensor,
    "fold": lambda tensor: (
        tensor.reshape(2, -1) if tensor.ndim == 1 and not len(tensor) % 2 else tensor
    ),
    "transpose": lambda tensor: tensor.mT if tensor.ndim > 1 else tensor,
    "expand": lambda tensor: tensor.expand(2, *tensor.shape) if tensor.ndim < 4 else tensor,
    "integers": lambda tensor: (
        tensor if tensor.is_neg() or tensor.is_complex() else tensor.view(torch.int32)
    ),
}


@settings(max_examples=60, deadline=None)
@given(tensors=views())
def test_random_views_of_one_memory_are_saved_as_what_they_show(
    tensors: list[torch.Tensor],
) -> None:
    module = Buffers(**{f"b{number}": tensor for number, tensor in enumerate(tensors)})
    found: Any = ckptfmt.load(saved(module), framework="torch")
    for name, tensor in module.named_buffers(remove_duplicate=False):
        loaded, wanted = found["weights"][name], tensor.resolve_conj().resolve_neg()
        assert (loaded.dtype, loaded.shape) == (wanted.dtype, wanted.shape)
        assert loaded.numpy().tobytes() == wanted.numpy().tobytes()
