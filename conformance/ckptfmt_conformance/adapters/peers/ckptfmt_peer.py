"""ckptfmt, put to the same questions as the others."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import ckptfmt
import ckptfmt.adapters.torch  # here, once, and not at the first save in each process that is forked
from ckptfmt.trainer.handle import SaveHandle
from ckptfmt_conformance.neutral.peer import Description, Loaded

__all__ = ["Ckptfmt"]


@dataclasses.dataclass(frozen=True, slots=True)
class _Waiting:
    """A save of a run; the checkpointer lives as long as it."""

    handle: SaveHandle
    checkpointer: ckptfmt.Checkpointer

    def wait(self) -> None:
        """Wait until it is committed, and let the saver go."""
        try:
            self.handle.wait()
        finally:
            self.checkpointer.close()


class Ckptfmt:
    """`ckptfmt.save` and `ckptfmt.load` in place; a `Checkpointer` for what is saved beside the training."""

    def describe(self) -> Description:
        """Say what it is."""
        return Description(
            name="ckptfmt",
            version=ckptfmt.__version__,
            settings="ckptfmt.save and ckptfmt.load in place; a Checkpointer with its saver process for async saves",
        )

    def save(self, path: Path, state: Mapping[str, object], step: int) -> None:
        """Save one directory."""
        ckptfmt.save(path, _state(state), step=step)

    def load(self, path: Path, state: Mapping[str, object]) -> Loaded:
        """Load in place, a checkpoint or the newest of a run."""
        report = ckptfmt.load(path, _state(state))
        return Loaded(state, report.step)

    def save_async(self, path: Path, state: Mapping[str, object], step: int) -> _Waiting:
        """Begin a save in a run of its own."""
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
