"""The peer for `safetensors.torch.save_file` and `load_file`, as careful users call them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import cast

import safetensors
import safetensors.torch
import torch

from ckptfmt_conformance.adapters.peers.durable import replace_durably
from ckptfmt_conformance.neutral.peer import Description, Loaded, Unsupported

__all__ = ["SafetensorsFile"]

_NO_CHECKSUM = (
    "The authors chose speed over a checksum compared on load: "
    "https://github.com/safetensors/safetensors/issues/220"
)


class SafetensorsFile:
    """A file, written under a temporary name, with the step as text in the metadata."""

    def describe(self) -> Description:
        """Return the peer's description."""
        return Description(
            name="safetensors",
            version=safetensors.__version__,
            settings="save_file of contiguous tensors to a temporary name, fsync, rename, fsync"
            " of the directory; "
            "load_file; the step in the metadata; names and shapes compared as load_state_dict"
            " does",
            keeps=frozenset({"step"}),
            remarks={"damage/flipped-bit": _NO_CHECKSUM, "damage/zero-tail": _NO_CHECKSUM},
        )

    def save(self, path: Path, state: Mapping[str, object], step: int) -> None:
        """Save a file."""
        if "values" in state:
            raise Unsupported("it keeps tensors, and texts as metadata: no values")
        tensors = cast("Mapping[str, torch.Tensor]", state["tensors"])
        # save_file refuses non-contiguous tensors, and the error recommends this copy.
        contiguous = {
            name: tensor if tensor.is_contiguous() else tensor.contiguous()
            for name, tensor in tensors.items()
        }
        replace_durably(
            path,
            lambda temporary: safetensors.torch.save_file(
                contiguous, temporary, metadata={"step": str(step)}
            ),
        )

    def load(self, path: Path, state: Mapping[str, object]) -> Loaded:
        """Load the tensors, and the step from the metadata."""
        live = cast("Mapping[str, torch.Tensor]", state["tensors"])
        tensors = safetensors.torch.load_file(path)
        if tensors.keys() != live.keys():
            raise KeyError(f"unexpected or missing: {sorted(tensors.keys() ^ live.keys())}")
        for name, tensor in tensors.items():
            if tensor.shape != live[name].shape:
                raise ValueError(
                    f"{name}: shape {tuple(tensor.shape)} for {tuple(live[name].shape)}"
                )
        with safetensors.safe_open(path, framework="pt") as file:
            step = int(file.metadata()["step"])
        return Loaded({"tensors": tensors}, step)
