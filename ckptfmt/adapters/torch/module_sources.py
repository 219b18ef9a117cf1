"""A module's tensors and values, ready to be written."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ckptfmt.adapters.live_trees import Encoder
from ckptfmt.adapters.torch.modules import Entry, ModuleView
from ckptfmt.adapters.torch.subclasses import inner_tensors
from ckptfmt.adapters.torch.tensors import TorchSource, source_of
from ckptfmt.documents.part import Leaf


def capture_entries(entries: Iterable[Entry], field: str) -> list[TorchSource]:
    """Return the sources of live tensors; tied ones once, with their other names. Raises: StateError."""
    sources = []
    for entry in entries:
        for index, (name, tensor) in enumerate(inner_tensors(entry.tensor, entry.names[0])):
            aliases = [inner_tensors(entry.tensor, other)[index][0] for other in entry.names[1:]]
            sources.append(
                source_of(
                    tensor,
                    field=field,
                    name=name,
                    scope=entry.scope,
                    storage=entry.storage,
                    aliases=tuple(sorted(aliases, key=str.encode)),
                )
            )
    return sources


def capture_module(view: ModuleView, encoder: Encoder) -> list[Leaf]:
    """Return the leaves of extra state and of what hooks made; tensors become sources of the encoder."""
    leaves = [encoder.leaf(name, value) for name, (_, value) in view.extra_states.items()]
    for name, (_, value) in view.foreign.items():
        if isinstance(value, torch.Tensor):
            encoder.encode(value, name)
        else:
            leaves.append(encoder.leaf(name, value))
    return leaves
