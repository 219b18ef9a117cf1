"""The demo's judge: a digest of each piece of state, and negative controls.

`digest_state` reads the live objects without any of ckptfmt's code for saving and restoring. A
comparison that can't fail proves nothing. So each restored piece of state can be left out by name
(`leave_out`): after the restore, it has the value of a fresh start, and the comparison must find
the difference.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ckptfmt.data.sampler import Sampler
from ckptfmt.digest import digest_bytes
from ckptfmt_conformance.elastic import Trainer
from ckptfmt_tools.demo.settings import ITEMS


def digest_state(
    model: nn.Module,
    optimizer: Optimizer,
    scheduler: LRScheduler,
    sampler: Sampler,
    trainer: Trainer,
) -> dict[str, str]:
    """Return the digests, 128 bits of BLAKE3 in hex, of each piece of state.

    The pieces are parameters, moments, steps, buffers, RNG streams and the rest.

    Names are ``<category>/<name>``. Tensors are digested by their bytes: -0.0 differs from 0.0, and
    a NaN equals itself.
    """
    digests = {
        f"parameter/{name}": _digest_tensor(tensor) for name, tensor in model.named_parameters()
    }
    digests |= {f"buffer/{name}": _digest_tensor(tensor) for name, tensor in model.named_buffers()}
    digests |= dict(_iter_optimizer(model, optimizer))
    digests["schedule/scheduler"] = _digest_tree(scheduler.state_dict())
    digests["cursor/data"] = _digest_tree(sampler.state_dict())
    digests["trainer/state"] = _digest_tree(trainer.state_dict())
    digests["rng/python"] = _digest_tree(random.getstate())
    numpy_state = np.random.get_state(legacy=False)  # noqa: NPY002
    digests["rng/numpy"] = _digest_tree(numpy_state)
    digests["rng/torch.cpu"] = _digest_tensor(torch.get_rng_state())
    return digests


def _iter_optimizer(model: nn.Module, optimizer: Optimizer) -> Iterator[tuple[str, str]]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for number, group in enumerate(optimizer.param_groups):
        options = {key: value for key, value in group.items() if key != "params"}
        yield f"schedule/group {number}", _digest_tree(options)
        for parameter in group["params"]:
            for key, value in (
                optimizer.state[parameter].items() if parameter in optimizer.state else ()
            ):
                category = "step" if key == "step" else f"moment/{key}"
                yield f"{category}/{names[id(parameter)]}", _digest_tensor(value)


def _digest_tensor(tensor: torch.Tensor) -> str:
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return digest_bytes(content.numpy().data)[:16].hex()


def _digest_tree(tree: object) -> str:
    """Return the digest of plain values; JSON writes a float with all distinguishing digits."""
    text = json.dumps(tree, sort_keys=True, default=lambda array: array.tolist())
    return digest_bytes(text.encode())[:16].hex()


def leave_out(
    item: str,
    model: nn.Module,
    *,
    optimizer: Optimizer,
    scheduler: LRScheduler,
    sampler: Sampler,
    trainer: Trainer,
) -> Callable[[], object]:
    """Copy the value of a piece of state before the restore.

    Returns: a function that sets the piece to this value, to be called after the restore.
    Raises: ValueError for an item outside of `ITEMS`.
    """
    if item not in ITEMS:
        raise ValueError(f"{item!r} is none of {', '.join(ITEMS)}")
    if item.startswith("optimizer."):
        return lambda: _reset_moments(optimizer, item.removeprefix("optimizer."))

    def put_cursor_back(before: dict[str, Any]) -> None:
        # With the number of steps done: the checkpointer would refuse a cursor with another number.
        before["commit"]["step"] = sampler.steps_done
        sampler.load_state_dict(before)

    def put_buffers_back(before: list[torch.Tensor]) -> None:
        for buffer, value in zip(model.buffers(), before, strict=True):
            buffer.copy_(value)

    ways: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
        "python": (random.getstate, random.setstate),
        "numpy": (np.random.get_state, np.random.set_state),
        "torch.cpu": (torch.get_rng_state, torch.set_rng_state),
        "scheduler": (scheduler.state_dict, scheduler.load_state_dict),
        "trainer": (trainer.state_dict, trainer.load_state_dict),
        "cursor": (sampler.state_dict, put_cursor_back),
        "buffer": (lambda: list(model.buffers()), put_buffers_back),
    }
    read, put_back = ways[item]
    before = copy.deepcopy(read())
    return lambda: put_back(before)


def _reset_moments(optimizer: Optimizer, key: str) -> None:
    """Set a moment, or the step count, of all parameters to zero, as in a new AdamW."""
    for state in optimizer.state.values():
        state[key].zero_()
