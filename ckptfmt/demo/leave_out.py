"""The demo's negative controls: leave one thing out of a restore, and see that the comparison finds it.

A comparison that can't fail proves nothing. So whatever the demo claims to restore can be left out by name; it then
has, after the restore, the value that a fresh start gives it.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ckptfmt.data.sampler import Sampler
from ckptfmt.demo.settings import ITEMS
from ckptfmt_conformance.elastic import Trainer


def leave_out(
    item: str,
    model: nn.Module,
    *,
    optimizer: Optimizer,
    scheduler: LRScheduler,
    sampler: Sampler,
    trainer: Trainer,
) -> Callable[[], None]:
    """Remember what `item` is before the restore.

    Returns: a function that puts that value back; to be called after the restore.
    Raises: ValueError for an item that isn't in `ITEMS`.
    """
    if item not in ITEMS:
        raise ValueError(f"{item!r} is none of {', '.join(ITEMS)}")
    if item.startswith("optimizer."):
        return lambda: _reset_moments(optimizer, item.removeprefix("optimizer."))
    return {
        "python": _keep_python,
        "numpy": _keep_numpy,
        "torch.cpu": _keep_torch,
        "scheduler": lambda: _keep_stateful(scheduler),
        "cursor": lambda: _keep_cursor(sampler),
        "buffer": lambda: _keep_buffers(model),
        "trainer": lambda: _keep_stateful(trainer),
    }[item]()


def _keep_python() -> Callable[[], None]:
    before = random.getstate()
    return lambda: random.setstate(before)


def _keep_numpy() -> Callable[[], None]:
    before = np.random.get_state()  # noqa: NPY002 - the global stream is the one left out
    return lambda: np.random.set_state(before)  # noqa: NPY002


def _keep_torch() -> Callable[[], None]:
    before = torch.get_rng_state()

    def put_back() -> None:
        torch.set_rng_state(before)

    return put_back


def _keep_cursor(sampler: Sampler) -> Callable[[], None]:
    before = copy.deepcopy(sampler.state_dict())

    def put_back() -> None:
        # With the steps done, which the checkpointer counts as well: it would refuse a cursor that disagrees.
        before["commit"]["step"] = sampler.steps_done
        sampler.load_state_dict(before)

    return put_back


def _keep_stateful(stateful: LRScheduler | Trainer) -> Callable[[], None]:
    before = copy.deepcopy(stateful.state_dict())
    return lambda: stateful.load_state_dict(before)


def _keep_buffers(model: nn.Module) -> Callable[[], None]:
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]

    def put_back() -> None:
        for buffer, value in before:
            buffer.copy_(value)

    return put_back


def _reset_moments(optimizer: Optimizer, key: str) -> None:
    """A fresh AdamW begins with zeros: in the moments, and in the steps done."""
    for state in optimizer.state.values():
        state[key].zero_()
