"""The data of the cells: a cursor over shuffled epochs, and batches that use all random streams."""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ckptfmt_conformance.trajectories.models import (
    CLASSES,
    CONTEXT,
    FEATURES,
    TOKENS,
    VOCABULARY,
    is_language_model,
)

__all__ = ["Cursor", "augmented", "make_batch", "order_of", "rows_of"]


@functools.lru_cache(maxsize=64)
def order_of(samples: int, seed: int, epoch: int) -> tuple[int, ...]:
    """Return the order of an epoch.

    >>> sorted(order_of(4, 0, 1))
    [0, 1, 2, 3]
    """
    order = list(range(samples))
    random.Random(f"{seed} {epoch}").shuffle(order)
    return tuple(order)


class Cursor:
    """The position of the run in its data: the samples consumed by all processes.

    >>> cursor = Cursor(5, seed=0)
    >>> len(cursor.take(4)), len(cursor.take(4)), cursor.state_dict()
    (4, 4, {'epoch': 1, 'position': 3, 'samples': 5, 'seed': 0})
    """

    def __init__(self, samples: int, *, seed: int) -> None:
        self.samples = samples
        self.seed = seed
        self.consumed = 0

    @property
    def epoch(self) -> int:
        """The number of finished epochs."""
        return self.consumed // self.samples

    def take(self, count: int) -> list[int]:
        """Return the next `count` samples, across ends of epochs."""
        begin = self.consumed
        self.consumed = self.consumed + count
        places = (divmod(at, self.samples) for at in range(begin, self.consumed))
        return [order_of(self.samples, self.seed, epoch)[position] for epoch, position in places]

    def state_dict(self) -> dict[str, int]:
        """Return the position, independent of rank and world size."""
        epoch, position = divmod(self.consumed, self.samples)
        return {"epoch": epoch, "position": position, "samples": self.samples, "seed": self.seed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position."""
        self.samples = state["samples"]
        self.seed = state["seed"]
        self.consumed = state["epoch"] * state["samples"] + state["position"]


@functools.lru_cache(maxsize=4)
# A key of the cache.
def _table(language: bool) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: FBT001
    """Return inputs and targets of all samples; the same in every process."""
    draw = torch.Generator().manual_seed(2026)
    if language:
        text = torch.randint(VOCABULARY, (256, TOKENS), generator=draw)
        return text[:, :CONTEXT], text[:, 1:]
    features = torch.randn(256, FEATURES, generator=draw)
    return features, features[:, :CLASSES].argmax(dim=1)


def rows_of(model: str, samples: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets of samples, without augmentation."""
    inputs, targets = _table(is_language_model(model))
    chosen = torch.tensor([sample % len(inputs) for sample in samples])
    return inputs[chosen], targets[chosen].flatten()


def make_batch(
    model: str, samples: Sequence[int], augment: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets, augmented by Python's, numpy's and the program's random streams.

    The models use torch's stream. So the loss of any of the four streams changes the next step.
    """
    inputs, targets = rows_of(model, samples)
    return augmented(model, inputs, augment), targets


def augmented(model: str, inputs: torch.Tensor, augment: torch.Generator) -> torch.Tensor:
    """Return inputs augmented by all random streams except torch's."""
    noise = np.random.random(inputs.shape)  # noqa: NPY002 - the global stream is under test
    if is_language_model(model):
        shift = random.randrange(1, VOCABULARY)
        other = torch.randint(VOCABULARY, inputs.shape, generator=augment)
        masked = torch.from_numpy(noise < 0.2)
        return torch.where(masked, (other + shift) % VOCABULARY, inputs)
    gain = random.uniform(0.8, 1.2)
    jitter = 0.1 * torch.randn(inputs.shape, generator=augment)
    return (inputs * gain + jitter) * torch.from_numpy(noise > 0.1)
