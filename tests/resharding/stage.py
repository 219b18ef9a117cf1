"""What runs in each process of a launch: meet the others, play the scenes, say what came out."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import hashlib
import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ckptfmt.errors import CkptError

#: How long a collective of the scenes waits, in seconds; less than a launch may take. On a busy
#: machine a second's work takes a minute.
COLLECTIVE_S = 400.0


@dataclasses.dataclass(frozen=True)
class Stage:
    """Where a scene plays: this process, and a directory that all processes and launches share."""

    rank: int
    world_size: int
    scratch: Path

    def path(self, name: str) -> str:
        """Return the place of a checkpoint or run."""
        return str(self.scratch / name)


def gather_on(ranks: list[int]) -> Callable[[bytes], list[bytes]]:
    """Return an all-gather among some ranks, as `agree=` takes it; every rank of the launch makes it."""
    group = dist.new_group(ranks)

    def gather(value: bytes) -> list[bytes]:
        gathered: list[Any] = [None] * len(ranks)
        dist.all_gather_object(gathered, value, group=group)
        return gathered

    return gather


# --- what scenes say ------------------------------------------------------------------------------


def attempt(action: Callable[[], object]) -> dict[str, Any]:
    """Return how a call ended: the code of its error, or ``OK``; and how long it took, in seconds."""
    begin_s = time.monotonic()
    try:
        action()
    except CkptError as error:
        said = {**error.as_json(), "text": str(error), "kind": "CkptError"}
    except Exception as error:  # noqa: BLE001
        said = {"code": type(error).__name__, "where": None, "text": str(error), "kind": "foreign"}
    else:
        said = {"code": "OK", "where": None, "text": "", "kind": "none"}
    return {**said, "seconds": time.monotonic() - begin_s}


def bits(value: Any) -> Any:
    """Return something equal exactly if dtype, shape and every bit are; a DTensor is gathered, by all of its ranks."""
    if isinstance(value, torch.Tensor):
        value = value.detach()
        if hasattr(value, "full_tensor"):
            value = value.full_tensor()
        content = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return f"{value.dtype} {list(value.shape)} {hashlib.sha256(content).hexdigest()[:24]}"
    if isinstance(value, Mapping):
        return {str(key): bits(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [bits(item) for item in value]
    return value.hex() if isinstance(value, float) else value


def weight_bits(module: nn.Module) -> dict[str, Any]:
    """Return the bits of a module's parameters and buffers by their names, wrappers left as they are."""
    return {name: bits(value) for name, value in module.state_dict().items()}


def optimizer_bits(optimizer: torch.optim.Optimizer, module: nn.Module) -> dict[str, Any]:
    """Return the bits of an optimizer's state by the names of its parameters."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    by_name = {
        names[id(parameter)]: parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    return {
        name: bits(optimizer.state.get(parameter, {}))
        for name, parameter in sorted(by_name.items())
    }


def gradient(name: str, shape: tuple[int, ...], step: int) -> torch.Tensor:
    """Return a gradient that follows from name and step alone: the same on whichever rank holds the parameter."""
    seed = int.from_bytes(hashlib.sha256(f"{name} {step}".encode()).digest()[:6], "little")
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def steps_without_model(module: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Step an optimizer with made-up gradients, sharded as the parameters are."""
    for step in steps:
        for name, parameter in module.named_parameters():
            grad = gradient(name, tuple(parameter.shape), step)
            mesh = getattr(parameter, "device_mesh", None)
            if mesh is not None:
                from torch.distributed.tensor import distribute_tensor  # noqa: PLC0415

                grad = distribute_tensor(grad, mesh, parameter.placements)  # type: ignore[attr-defined]
            parameter.grad = grad
        optimizer.step()
        optimizer.zero_grad()


# --- the process ----------------------------------------------------------------------------------


def _meet(rank: int, world_size: int) -> None:
    timeout = dt.timedelta(seconds=COLLECTIVE_S)
    if os.environ["MEET"] == "store":
        port = int(os.environ["MASTER_PORT"])
        host = os.environ["MASTER_ADDR"]
        store = dist.TCPStore(host, port, world_size, is_master=False, timeout=timeout)  # type: ignore[attr-defined]
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=timeout
        )
    else:
        dist.init_process_group(
            "gloo",
            init_method=os.environ["MEET"],
            rank=rank,
            world_size=world_size,
            timeout=timeout,
        )


def _play(stage: Stage, name: str, scene: Callable[[Stage], object]) -> dict[str, Any]:
    begin_s = time.monotonic()
    value, trace = None, None
    try:
        value = scene(stage)
    except Exception:  # noqa: BLE001
        trace = traceback.format_exc()
    seconds = time.monotonic() - begin_s
    return {
        "scene": name,
        "rank": stage.rank,
        "value": value,
        "traceback": trace,
        "seconds": seconds,
    }


@contextlib.contextmanager
def _diary(path: Path) -> Iterator[Callable[[dict[str, Any]], None]]:
    with path.open("a", encoding="utf-8") as file:

        def write(answer: dict[str, Any]) -> None:
            file.write(json.dumps(answer) + "\n")
            file.flush()

        yield write


def main(module: str, scratch: str, here: str, *scenes: str) -> None:
    """Play the scenes of one process."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    played = importlib.import_module(module)
    stage = Stage(rank, world_size, Path(scratch))
    _meet(rank, world_size)
    with _diary(Path(here) / f"rank-{rank}.jsonl") as write:
        for name in scenes:
            write(_play(stage, name, getattr(played, name)))
            if name != scenes[-1]:
                dist.barrier()
    # Without the farewells of gloo, in which a survivor would wait for the dead.
    if "env" in os.environ["MEET"]:
        dist.barrier()
    sys.stdout.flush()
    os._exit(0)
