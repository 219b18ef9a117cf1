"""Kinds of tensors that are made of several: the caller registers them, nothing is guessed."""

from __future__ import annotations

from typing import Any, Final

import torch

from ckptfmt.errors import Code, err

_REGISTERED: Final[set[type[torch.Tensor]]] = set()


def register_flatten(kind: type[torch.Tensor]) -> None:
    """Save tensors of exactly this class as the inner tensors that its ``__tensor_flatten__`` names.

    They are called ``<name>/<attribute>`` and are filled in place. What else an instance holds must follow from the
    program that creates it: it isn't saved.

    Raises: StateError(ARGUMENT) where the class has no ``__tensor_flatten__``.
    """
    if not hasattr(kind, "__tensor_flatten__"):
        raise err(Code.ARGUMENT, f"{kind.__qualname__} has no __tensor_flatten__")
    _REGISTERED.add(kind)


def is_registered(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is of a registered class."""
    return type(tensor) in _REGISTERED


def inner_tensors(tensor: Any, name: str) -> list[tuple[str, torch.Tensor]]:  # noqa: ANN401 - of a registered class
    """Return names and tensors that a tensor is made of; itself, if its class isn't registered."""
    if not is_registered(tensor):
        return [(name, tensor)]
    attributes, _ = tensor.__tensor_flatten__()
    return [pair for key in attributes for pair in inner_tensors(getattr(tensor, key), f"{name}/{key}")]
