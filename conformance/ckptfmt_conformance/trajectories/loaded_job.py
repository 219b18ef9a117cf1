"""Training jobs with torch's DataLoader over an implementation's sampler: plain and elastic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from ckptfmt_conformance.elastic.tree import place
from ckptfmt_conformance.protocol import Unsupported
from ckptfmt_conformance.trajectories.data import augmented, rows_of
from ckptfmt_conformance.trajectories.elastic_job import ElasticJob
from ckptfmt_conformance.trajectories.feed import Feed
from ckptfmt_conformance.trajectories.job import TrainingJob
from ckptfmt_conformance.trajectories.ledger import Facts, facts_of
from ckptfmt_conformance.trajectories.plans import DataPlan, plan_of
from ckptfmt_conformance.trajectories.protocol import Checkpointing, Sampler, Sampling
from ckptfmt_conformance.trajectories.recipes import Recipe

__all__ = ["BATCH", "FEATURE", "LoadedElasticJob", "LoadedJob", "Seen", "make_loaded", "plan_for"]

#: The feature that an implementation needs for these jobs.
FEATURE = "sampler"
#: The number of positions in a step of one process, and in a step of the elastic trainer.
BATCH = 6
ELASTIC_BATCH = 16

#: Source, sample and weight of each row of a step.
Seen = list[tuple[str, int, int]]


def plan_for(recipe: Recipe) -> DataPlan:
    """Return the data plan of a recipe."""
    return plan_of(recipe.data, ELASTIC_BATCH if recipe.layout == "elastic" else BATCH)


def make_loaded(
    recipe: Recipe, seed: int, checkpointing: Checkpointing, processes: int
) -> LoadedJob | LoadedElasticJob:
    """Return a job before its first step.

    Args:
        processes: the number of worker processes of its loaders.

    Raises: Unsupported.
    """
    if not isinstance(checkpointing, Sampling):
        raise Unsupported(FEATURE)
    if recipe.layout == "elastic":
        return LoadedElasticJob(recipe, seed, checkpointing, processes)
    return LoadedJob(recipe, seed, checkpointing, processes)


class _Reading:
    """Samplers at the same step, with a feed for each. The data cursor of a job.

    All samplers have the same cursor, so the cursor of the first is the job's.
    """

    def __init__(
        self, recipe: Recipe, sampling: Sampling, workers: Sequence[tuple[int, int]], processes: int
    ) -> None:
        self.plan = plan_for(recipe)
        self._sampling = sampling
        self._workers = workers
        self._processes = processes
        self._model = recipe.model
        self.use(self.plan)

    def use(self, plan: DataPlan, done: int = 0) -> None:
        """Make new samplers of a plan, with `done` finished steps."""
        self.samplers: list[Sampler] = [
            self._sampling.sampler(plan, worker) for worker in self._workers
        ]
        self.advance(done)
        self.feeds = [
            Feed(sampler, plan, self._model, self._processes) for sampler in self.samplers
        ]

    @property
    def ahead(self) -> int:
        """The number of batches drawn from each sampler and not yet trained with."""
        return min(feed.ahead for feed in self.feeds)

    def say(self, step: int) -> None:
        """Pass to the samplers the skips that become known at a step."""
        skips = [skip for skip in self.plan.skips if skip.said == step]
        for sampler in self.samplers:
            for skip in skips:
                sampler.skip(**skip.arguments(self.plan.batch))
        if skips:
            for feed in self.feeds:
                feed.restart()

    def advance(self, steps: int = 1) -> None:
        """Mark steps as done in all samplers."""
        for sampler in self.samplers:
            sampler.advance(steps)

    def state_dict(self) -> dict[str, Any]:
        """Return the cursor."""
        return self.samplers[0].state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a cursor."""
        for sampler in self.samplers:
            sampler.load_state_dict(state)


class LoadedJob(TrainingJob):
    """A job of one process that reads from a loader."""

    def __init__(self, recipe: Recipe, seed: int, sampling: Sampling, processes: int) -> None:
        super().__init__(recipe, seed)
        self.reading = _Reading(recipe, sampling, [(0, 1)], processes)
        self.seen: Seen = []

    def advance(self) -> None:
        """Do a step."""
        step = self.progress.step
        self.reading.say(step)
        keys, inputs, targets = self.reading.feeds[0].take()
        weights = self.reading.samplers[0].weights(step)
        self.seen = [(*key, weight) for key, weight in zip(keys, weights, strict=True)]
        logits = self.model(augmented(self.recipe.model, inputs, self.augment))
        losses = functional.cross_entropy(logits, targets, reduction="none")
        loss = (losses * torch.tensor(weights)).sum() / sum(weights)
        self.loss = float(loss.item())
        loss.backward()  # type: ignore[no-untyped-call]
        self._finish()
        self.reading.advance()

    def state(self) -> dict[str, object]:
        """Return the state for the checkpointing."""
        return super().state() | {"data": self.reading.samplers[0]}

    def facts(self) -> Facts:
        """Return all state, with the sampler's state instead of the suite's own cursor."""
        facts = {
            name: fact for name, fact in super().facts().items() if not name.startswith("cursor/")
        }
        return (
            facts | facts_of("cursor", self.reading.state_dict()) | {"sample/ids": repr(self.seen)}
        )


class LoadedElasticJob(ElasticJob):
    """A job on the reference trainer, with a loader for each logical worker."""

    def __init__(self, recipe: Recipe, seed: int, sampling: Sampling, processes: int) -> None:
        super().__init__(recipe, seed)
        self.owned = self.plan.owned(*place())
        workers = [(worker, self.plan.workers) for worker in self.owned]
        self.reading = _Reading(recipe, sampling, workers, processes)
        self.seen: Seen = []

    def _loss_of(self, model: nn.Module, samples: range) -> tuple[torch.Tensor, int]:
        own = samples.start % self.plan.global_batch // self.plan.microbatch - self.owned.start
        keys, inputs, targets = self.reading.feeds[own].take()
        weights = self.reading.samplers[own].weights(self.trainer.steps_done)
        self.seen += [(*key, weight) for key, weight in zip(keys, weights, strict=True)]
        if not keys:  # all of the worker's samples are skipped, so its gradients are zeros
            inputs, targets = rows_of(self.recipe.model, [0])
            weights = [0]
        each = len(targets) // len(weights)
        losses = functional.cross_entropy(model(inputs), targets, reduction="none")
        return (losses * torch.tensor(weights).repeat_interleave(each)).sum(), sum(weights) * each

    def advance(self) -> None:
        """Do a step."""
        self.reading.say(self.trainer.steps_done)
        self.seen = []
        super().advance()
        self.reading.advance()
        if dist.is_initialized():
            of_all: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(of_all, self.seen)
            self.seen = [one for own in of_all for one in own]

    def state(self) -> dict[str, object]:
        """Return the state for the checkpointing."""
        return super().state() | {"data": self.reading, "trainer": self.trainer}

    def facts(self) -> Facts:
        """Return all state for the comparison."""
        return (
            super().facts()
            | facts_of("cursor", self.reading.state_dict())
            | {"sample/ids": repr(self.seen)}
        )
