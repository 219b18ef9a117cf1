"""The digest of everything that a training step changes, each thing by its own name.

It reads the live objects itself and uses nothing of what ckptfmt saves or restores them with: a judge of its own.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ckptfmt.data.sampler import Sampler
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
    numpy_state = np.random.get_state(legacy=False)  # noqa: NPY002 - the global stream is one of those to restore
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
