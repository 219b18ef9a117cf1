"""Training shown again: a live model and its optimizer, put into one state after the other without training.

What a save costs doesn't depend on how its state came about, so saves are timed of states that lie in files. Several
copies of the model, next to each other, make the state as large as a save has to be to be timed.
"""

from __future__ import annotations

from torch import nn

import ckptfmt
from benchmarks.scenes import Scene, Sizes
from benchmarks.snapshots import Snapshot
from benchmarks.training import fill, make_model, make_optimizers


class Replay:
    """Copies of a scene's model, under one optimizer.

    Attributes:
        state: for `ckptfmt.Checkpointer` and `ckptfmt.load`.
    """

    def __init__(self, sizes: Sizes, scene: Scene, *, copies: int) -> None:
        self._models = nn.ModuleList(make_model(sizes, scene.model) for _ in range(copies))
        parameters = {name: p for name, p in self._models.named_parameters() if p.requires_grad}
        (self._optimizer,) = make_optimizers(scene, parameters)
        self.state = ckptfmt.State(weights=self._models, optimizer=self._optimizer)

    def show(self, state: Snapshot, *, copies: int | None = None) -> None:
        """Put the first so many copies into a state, or all; the others stay as they are."""
        for model in self._models[:copies]:
            fill(model, [self._optimizer], state)

    def check(self, state: Snapshot) -> None:
        """Look whether all copies are in a state.

        Raises: RuntimeError if one isn't.
        """
        for model in self._models:
            places = dict(model.named_parameters()) | dict(model.named_buffers())
            for name, tensor in state.items():
                place = places[tensor.parameter]
                known = {} if tensor.field == "weights" else self._optimizer.state[place]
                found = place.detach() if tensor.field == "weights" else known[tensor.role]
                if found.numpy().tobytes() != tensor.array.tobytes():
                    raise RuntimeError(f"{name} has other bytes than were saved")
