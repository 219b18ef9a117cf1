"""The demo's judge: the digest of everything that a training step changes, each by its own name, and its controls.

`digest_state` reads the live objects itself and uses nothing of what ckptfmt saves or restores them with.
A comparison that can't fail proves nothing. So whatever the demo claims to restore can be left out by name
(`leave_out`); it then has, after the restore, the value that a fresh start gives it, and the comparison must find it.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ckptfmt.data.sampler import Sampler
from ckptfmt.demo.settings import ITEMS
from ckptfmt.digest import digest_bytes
from ckptfmt_conformance.elastic import Trainer


def digest_state(
    model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler, sampler: Sampler, trainer: Trainer
) -> dict[str, str]:
    """Return 128 bits of BLAKE3, in hex, for each parameter, moment, step, buffer, RNG stream and the rest.

    Names are ``<category>/<name>``. Tensors are digested by their bytes: -0.0 isn't 0.0, and a NaN equals itself.
    """
    digests = {f"parameter/{name}": _digest_tensor(tensor) for name, tensor in model.named_parameters()}
    digests |= {f"buffer/{name}": _digest_tensor(tensor) for name, tensor in model.named_buffers()}
    digests |= dict(_iter_optimizer(model, optimizer))
    digests["schedule/scheduler"] = _digest_tree(scheduler.state_dict())
    digests["cursor/data"] = _digest_tree(sampler.state_dict())
    digests["trainer/state"] = _digest_tree(trainer.state_dict())
    digests["rng/python"] = _digest_tree(random.getstate())
    numpy_state = np.random.get_state(legacy=False)  # noqa: NPY002 - the global RNG stream is one of those to restore
    digests["rng/numpy"] = _digest_tree(numpy_state)
    digests["rng/torch.cpu"] = _digest_tensor(torch.get_rng_state())
    return digests


def _iter_optimizer(model: nn.Module, optimizer: Optimizer) -> Iterator[tuple[str, str]]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for number, group in enumerate(optimizer.param_groups):
        options = {key: value for key, value in group.items() if key != "params"}
        yield f"schedule/group {number}", _digest_tree(options)
        for parameter in group["params"]:
            for key, value in optimizer.state[parameter].items() if parameter in optimizer.state else ():
                category = "step" if key == "step" else f"moment/{key}"
                yield f"{category}/{names[id(parameter)]}", _digest_tensor(value)


def _digest_tensor(tensor: torch.Tensor) -> str:
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return digest_bytes(content.numpy().data)[:16].hex()


def _digest_tree(tree: object) -> str:
    """Digest plain values; JSON writes a float with all digits that tell it from every other one."""
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
    before = np.random.get_state()  # noqa: NPY002 - the global RNG stream is the one left out
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
