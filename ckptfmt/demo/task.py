"""What the trainer asks of a program: the loss of some positions of the data, whichever process takes them."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from ckptfmt.data.sampler import Sampler
from ckptfmt.demo.model import BYTES, TinyGPT
from ckptfmt.demo.settings import Settings
from ckptfmt.demo.text import Text


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Augmentation:
    """What a step draws once, for all of its samples.

    Attributes:
        begin: where in its chunk each window begins.
        masked: part of the input bytes that noise replaces.
        dropout: rate of dropout.
    """

    begin: int
    masked: float
    dropout: float


def draw_augmentation(settings: Settings) -> Augmentation:
    """Draw from this process's own streams, one number from each; what process 0 draws goes for all.

    The trainer gives every logical worker random numbers that follow from the plan, and no stream to lose. These three
    are for the streams that a process has and a checkpoint restores: a run that loses one of them learns otherwise.
    """
    begin = random.randrange(settings.chunk_nbytes - settings.context)
    masked = np.random.uniform(0.0, settings.masked)  # noqa: NPY002 - the global stream is one to restore
    dropout = settings.dropout * torch.rand((), dtype=torch.float64).item()
    drawn = torch.tensor([begin, masked, dropout], dtype=torch.float64)
    if dist.is_initialized():
        dist.broadcast(drawn, src=0)
    return Augmentation(begin=int(drawn[0].item()), masked=float(drawn[1].item()), dropout=float(drawn[2].item()))


class Task:
    """The next bytes of a text, as a loss.

    Args:
        model: the one that the trainer trains.
        text: what it learns.
        sampler: yields all samples of each step; the trainer says by their positions which of them are whose.
        settings: of the run.

    Attributes:
        taken: samples of this step that this process took, in the order of the data.
    """

    def __init__(self, model: TinyGPT, text: Text, sampler: Sampler, settings: Settings) -> None:
        self._model = model
        self._text = text
        self._steps = iter(sampler)
        self._settings = settings
        self._samples: list[int] = []
        self._augmentation = Augmentation(begin=0, masked=0.0, dropout=0.0)
        self.taken: list[int] = []

    def begin_step(self) -> None:
        """Take the samples of the next step, and draw what goes for all of them; on every process."""
        self._samples = next(self._steps)
        self._augmentation = draw_augmentation(self._settings)
        self._model.set_dropout(self._augmentation.dropout)
        self.taken = []

    def loss_of(self, _: nn.Module, positions: range) -> tuple[torch.Tensor, int]:
        """Return the loss of some positions of this step, summed over their tokens, and how many tokens those are."""
        samples = [self._samples[position % len(self._samples)] for position in positions]
        self.taken += samples
        tokens, targets = make_batch(self._text, samples, self._augmentation, self._settings)
        loss = functional.cross_entropy(self._model(tokens).flatten(0, 1), targets.flatten(), reduction="sum")
        self._model.count(targets)
        return loss, targets.numel()


def make_batch(
    text: Text, samples: Sequence[int], augmentation: Augmentation, settings: Settings
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and targets, (batch, context), of some samples, with noise.

    The trainer seeds Python's stream and torch's for each logical worker at each step. What numpy draws is derived from
    Python's; torch's is left to the dropout.
    """
    chunks = b"".join(text.chunk(sample) for sample in samples)
    rows = np.frombuffer(chunks, dtype=np.uint8).reshape(len(samples), settings.chunk_nbytes)
    windows = rows[:, augmentation.begin : augmentation.begin + settings.context + 1]
    tokens, targets = windows[:, :-1].copy(), windows[:, 1:].copy()
    generator = np.random.default_rng(random.getrandbits(64))
    noise = generator.random(tokens.shape) < augmentation.masked
    tokens[noise] = generator.integers(BYTES, size=int(noise.sum()), dtype=np.uint8)
    return torch.from_numpy(tokens).long(), torch.from_numpy(targets).long()
