"""The peer for `torch.save` and `torch.load`, as careful users call them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from ckptfmt_conformance.adapters.peers.durable import replace_durably
from ckptfmt_conformance.neutral.peer import Description, Loaded

__all__ = ["TorchSave"]

_NO_CRC = (
    "The archives hold CRC-32 sums, but torch.load doesn't compare the sums: "
    "https://github.com/pytorch/pytorch/pull/28858,"
    " https://github.com/pytorch/pytorch/issues/126952"
)


class TorchSave:
    """A file, written under a temporary name; loaded with ``weights_only=True``."""

    def describe(self) -> Description:
        """Return the peer's description."""
        return Description(
            name="torch.save",
            version=torch.__version__,
            settings="torch.save to a temporary name, fsync, rename, fsync of the directory; "
            "torch.load(weights_only=True)",
            remarks={"damage/flipped-bit": _NO_CRC},
        )

    def save(self, path: Path, state: Mapping[str, object], step: int) -> None:
        """Save a file."""
        replace_durably(
            path, lambda temporary: torch.save({"state": dict(state), "step": step}, temporary)
        )

    def load(self, path: Path, state: Mapping[str, object]) -> Loaded:
        """Load the whole file. A missing key is an error, as in ``load_state_dict``."""
        loaded = torch.load(path, weights_only=True)
        if loaded["state"].keys() != state.keys():
            raise KeyError(f"keys {sorted(loaded['state'])} for {sorted(state)}")
        return Loaded(loaded["state"], loaded["step"])
