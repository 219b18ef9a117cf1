"""The peer for ckptfmt."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import ckptfmt
import ckptfmt.adapters.torch  # once, for all forked processes
from ckptfmt.saving.handle import SaveHandle
from ckptfmt_conformance.neutral.peer import Description, Loaded

__all__ = ["Ckptfmt"]


@dataclasses.dataclass(frozen=True, slots=True)
class _Waiting:
    """A save of a run, with the checkpointer that performs the save."""

    handle: SaveHandle
    checkpointer: ckptfmt.Checkpointer

    def wait(self) -> None:
        """Wait until the checkpoint is committed, and close the checkpointer."""
        try:
            self.handle.wait()
        finally:
            self.checkpointer.close()


class Ckptfmt:
    """`ckptfmt.save` and `ckptfmt.load` in place; a `Checkpointer` for asynchronous saves."""

    def describe(self) -> Description:
        """Return the peer's description."""
        return Description(
            name="ckptfmt",
            version=ckptfmt.__version__,
            settings=(
                "ckptfmt.save and ckptfmt.load in place; a Checkpointer with its saver"
                " process for async saves"
            ),
        )

    def save(self, path: Path, state: Mapping[str, object], step: int) -> None:
        """Save a directory."""
        ckptfmt.save(path, _state(state), step=step)

    def load(self, path: Path, state: Mapping[str, object]) -> Loaded:
        """Load in place a checkpoint, or the newest checkpoint of a run."""
        report = ckptfmt.load(path, _state(state))
        return Loaded(state, report.step)

    def save_async(self, path: Path, state: Mapping[str, object], step: int) -> _Waiting:
        """Start a save in a separate run."""
        checkpointer = ckptfmt.Checkpointer(path, _state(state))
        checkpointer.restore()
        handle = checkpointer.save(step=step)
        assert handle is not None
        return _Waiting(handle, checkpointer)

    save_distributed = save
    load_distributed = load


def _state(state: Mapping[str, object]) -> ckptfmt.State:
    extra = {"values": state["values"]} if "values" in state else None
    return ckptfmt.State(weights=state["tensors"], extra=extra)
