"""A real training, as small as they get, whose losses say whether a resumed run is the same run: dropout, shuffling."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ckptfmt.data.sampler import Sampler
from ckptfmt.state import State

SAMPLES = 37


class Points(torch.utils.data.Dataset[Any]):
    """Samples that are disturbed as they are fetched, out of two streams."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        point = torch.arange(4, dtype=torch.float32) + index
        return (point / SAMPLES) + 0.01 * torch.randn(4) + 0.01 * random.random()


def seed(number: int) -> None:
    """Seed what a process begins with."""
    random.seed(number)
    torch.manual_seed(number)


class Tiny:
    """A start of the run: it begins with other random numbers than any other start.

    Attributes:
        losses: by step, exact.
    """

    def __init__(
        self,
        start: int = 0,
        *,
        lr: float = 0.1,
        global_batch: int = 4,
        worker: tuple[int, int] = (0, 1),
        scheduler: bool = False,
        config: Any = None,
        micro_batches: int = 1,
        **state: Any,
    ) -> None:
        seed(7)
        self.net: Any = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=lr)
        extra = {}
        self.scheduler = None
        if scheduler:
            self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=20)
            extra = {"scheduler": self.scheduler}
        seed(100 + start)
        self.sampler = Sampler(
            SAMPLES, global_batch=global_batch, seed=3, worker=worker, micro_batches=micro_batches
        )
        self.loader = torch.utils.data.DataLoader(Points(), batch_sampler=self.sampler)
        fields = {
            "weights": self.net,
            "data": self.sampler,
            "config": config or {"lr": lr},
            "extra": extra or None,
        }
        self.state = State(**{**fields, "optimizer": self.optimizer, **state})
        self.losses: dict[int, str] = {}

    def batches(self) -> Iterator[torch.Tensor]:
        """Return an iterator of the loader, which draws."""
        return iter(self.loader)

    def train(self, step: int, batch: torch.Tensor) -> None:
        """Do a step."""
        self.optimizer.zero_grad()
        loss = self.net(batch).square().mean()
        loss.backward()
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self.losses[step] = float(loss.detach()).hex()
