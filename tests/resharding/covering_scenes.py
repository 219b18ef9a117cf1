"""Every layout into every other, in one launch of eight processes: a world of n is the first n of them.

What a target has to hold is found without ckptfmt: a module is given the contents as a whole and
then wrapped by torch, which cuts them; the memory of its shards is what a load has to leave in
those of another module.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import math
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import ckptfmt
from ckptfmt import State
from ckptfmt.errors import CkptError
from ckptfmt.loading.load_report import LoadReport
from tests.resharding.stage import Stage

#: State of AdamW that has the shape of its parameter.
_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclasses.dataclass(frozen=True)
class Node:
    """A layout on a number of processes: as a source and as a target."""

    layout: str
    mesh_shape: tuple[int, ...]

    @property
    def world_size(self) -> int:
        """How many processes it takes."""
        return math.prod(self.mesh_shape)

    @property
    def name(self) -> str:
        """Layout and mesh."""
        return f"{self.layout}-{'x'.join(map(str, self.mesh_shape))}"


#: Each layout once, each world size once.
NODES = (
    Node("plain", (1,)),
    Node("ddp", (2,)),
    Node("pipeline", (3,)),
    Node("hsdp", (2, 2)),
    Node("tensor", (5,)),
    Node("fsdp_tensor", (3, 2)),
    Node("fsdp", (7,)),
    Node("expert", (8,)),
    Node("mesh", (2, 2, 2)),
)
#: More worlds of these, and other placements.
MORE_NODES = (
    Node("fsdp", (2,)),
    Node("fsdp", (8,)),
    Node("fsdp_columns", (3,)),
    Node("hsdp", (2, 3)),
    Node("tensor", (8,)),
    Node("fsdp_tensor", (2, 2)),
    Node("fsdp_tensor", (2, 4)),
    Node("pipeline", (8,)),
    Node("expert", (3,)),
    Node("expert_fsdp", (4,)),
    Node("mesh", (2, 3)),
    Node("mesh", (7,)),
)
#: Source and target, in every run of the tests: each of the layouts is read by itself and by two of
#: the others, among them larger and smaller worlds, and itself reads two.
PAIRS: tuple[tuple[Node, Node], ...] = tuple(
    (node, NODES[(number + ahead) % len(NODES)])
    for number, node in enumerate(NODES)
    for ahead in (0, 2, 5)
)
#: Each of more nodes with a third of those above, so that all of these occur; each way; and with
#: itself.
_PARTNERS: tuple[tuple[Node, Node], ...] = tuple(
    (node, NODES[(number + third) % len(NODES)])
    for number, node in enumerate(MORE_NODES)
    for third in (0, 3, 6)
)
#: What is exhaustive: all other pairs of the first nodes too.
MORE_PAIRS: tuple[tuple[Node, Node], ...] = (
    *(pair for pair in itertools.product(NODES, NODES) if pair not in PAIRS),
    *((one, other) for other, one in _PARTNERS),
    *_PARTNERS,
    *zip(MORE_NODES, MORE_NODES, strict=True),
)


# --- what there is to hold ------------------------------------------------------------------------


class Block(nn.Module):
    """A pair of layers, cut by columns and by rows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(6, width)
        self.down = nn.Linear(width, 6, bias=False)


class Expert(nn.Module):
    """A layer of which each rank may have its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, 5))


class Model(nn.Module):
    """Dimensions that no world size divides, or that are smaller than it; several dtypes; buffers of both kinds.

    Args:
        blocks, experts: which of them are here.
        ends: whether embedding and head are here.
    """

    def __init__(
        self,
        blocks: range = range(6),
        experts: range = range(5),
        ends: tuple[bool, bool] = (True, True),
    ):
        super().__init__()
        if ends[0]:
            self.embed = nn.Embedding(11, 6, dtype=torch.bfloat16)
            self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))
        self.blocks = nn.ModuleDict({str(i): Block(8 + 2 * i) for i in blocks})
        self.experts = nn.ModuleDict({str(i): Expert() for i in experts})
        if ends[1]:
            self.grouped = nn.Parameter(torch.zeros(5, 4, 3))
            self.head = nn.Linear(6, 5, bias=False, dtype=torch.float64)
            self.scale = nn.Parameter(torch.zeros(1))
            self.register_buffer("cache", torch.zeros(2, 2), persistent=False)


def content(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return what a tensor holds: bits that follow from name and index, NaNs with payloads and -0.0 among them."""
    element_nbytes = torch.empty(0, dtype=dtype).element_size()
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    bits = np.random.default_rng(seed).integers(
        0, 256, (math.prod(shape), element_nbytes), np.uint8
    )
    if dtype.is_floating_point:
        bits[::7] = [0] * (element_nbytes - 1) + [0x80]  # -0.0
        bits[3::7, -2:] = [
            0xF0,
            0xFF,
        ]  # exponent all ones in each of the three widths, a payload in the bytes below
        bits[3::7, 0] |= 1
    return torch.from_numpy(bits.reshape(-1).copy()).view(dtype).reshape(shape)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _integers(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory that is here as integers, of which every bit is copied."""
    local = _local(tensor)
    return local.view(
        {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[local.element_size()]
    )


def _bits(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], bytes]:
    local = _local(tensor)
    return (
        str(local.dtype),
        tuple(local.shape),
        local.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(),
    )


def _scribble(tensor: torch.Tensor) -> None:
    """Overwrite what is here of a tensor, padding left alone, with what nothing saved looks like."""
    _integers(tensor).fill_(0x5A)


# --- layouts --------------------------------------------------------------------------------------


class Worlds:
    """Meshes and groups over the first ranks, made by all of them in the same order."""

    def __init__(self, nodes: tuple[Node, ...], rank: int) -> None:
        self.rank = rank
        self._meshes: dict[tuple[int, ...], DeviceMesh] = {}
        self._groups: dict[int, Any] = {}
        for shape in sorted({node.mesh_shape for node in nodes}):
            ranks = torch.arange(math.prod(shape)).reshape(shape)
            self._meshes[shape] = DeviceMesh(
                "cpu", ranks, mesh_dim_names=tuple("abc"[: len(shape)])
            )
        for world_size in sorted({node.world_size for node in nodes}):
            self._groups[world_size] = dist.new_group(list(range(world_size)))

    def mesh(self, node: Node) -> DeviceMesh:
        """Return the mesh of a node."""
        return self._meshes[node.mesh_shape]

    def group(self, node: Node) -> Any:
        """Return the process group of a node."""
        return self._groups[node.world_size]

    def writers(self, node: Node) -> dict[str, Any]:
        """Return what tells ckptfmt who takes part."""

        def gather(value: bytes) -> list[bytes]:
            gathered: list[Any] = [None] * node.world_size
            dist.all_gather_object(gathered, value, group=self.group(node))
            return gathered

        return {"writer": (self.rank, node.world_size), "agree": gather}


def _own(count: int, node: Node, rank: int) -> range:
    """Return a rank's share of so many things, the first ranks having more; the last may have none."""
    return range(rank * count // node.world_size, (rank + 1) * count // node.world_size)


def _bare(node: Node, rank: int) -> Model:
    if node.layout == "pipeline":
        last = node.world_size - 1
        return Model(_own(6, node, rank), _own(5, node, rank), (rank == 0, rank == last))
    if node.layout.startswith("expert"):
        return Model(experts=_own(5, node, rank))
    return Model()


def _tensor_parallel(module: Model, mesh: DeviceMesh) -> None:
    plan: dict[str, ParallelStyle] = {"embed": RowwiseParallel(), "head": ColwiseParallel()}
    for index in module.blocks:
        plan |= {f"blocks.{index}.up": ColwiseParallel(), f"blocks.{index}.down": RowwiseParallel()}
    parallelize_module(module, mesh, plan)


def _shard(module: Model, mesh: DeviceMesh, **how: Any) -> None:
    for block in module.blocks.values():
        fully_shard(block, mesh=mesh, **how)
    fully_shard(module, mesh=mesh, **how)


def _columns(parameter: nn.Parameter) -> Shard | None:
    # Other dimensions than the first must be divisible.
    return Shard(1) if parameter.ndim > 1 and parameter.shape[1] % 3 == 0 else None


def _distribute(
    module: nn.Module,
    mesh: DeviceMesh,
    choose: Callable[[int, torch.Tensor], list[Placement] | None],
) -> None:
    """Make DTensors of parameters by hand."""
    for number, (name, parameter) in enumerate(list(module.named_parameters())):
        placements = choose(number, parameter)
        if placements is not None:
            owner, _, key = name.rpartition(".")
            whole = distribute_tensor(parameter.detach(), mesh, placements)
            setattr(module.get_submodule(owner), key, nn.Parameter(whole))


def _any_placements(
    number: int, parameter: torch.Tensor, *, mesh_dim_count: int
) -> list[Placement]:
    choices: list[Placement] = [Replicate(), *map(Shard, range(parameter.ndim))]
    options = list(itertools.product(choices, repeat=mesh_dim_count))
    return list(options[(number * 5 + 1) % len(options)])


def build(node: Node, worlds: Worlds, *, under: str = "", empty: bool = False) -> nn.Module:
    """Return this rank's module of a layout.

    Args:
        node: the layout.
        worlds: where it lives.
        under: what the names of its contents begin with.
        empty: make it on the meta device, wrap it, and give it memory only then.
    """
    with torch.device("meta" if empty else "cpu"):
        module = _bare(node, worlds.rank)
    if not empty:
        with torch.no_grad():
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                tensor.copy_(content(under + name, tuple(tensor.shape), tensor.dtype))
    mesh = worlds.mesh(node)
    if node.layout in ("fsdp", "hsdp"):
        _shard(module, mesh)
    elif node.layout == "fsdp_columns":
        _shard(module, mesh, shard_placement_fn=_columns)
    elif node.layout == "tensor":
        _tensor_parallel(module, mesh)
    elif node.layout == "fsdp_tensor":
        _tensor_parallel(module, mesh["b"])
        _shard(module, mesh["a"])
    elif node.layout == "mesh":
        _distribute(
            module, mesh, functools.partial(_any_placements, mesh_dim_count=len(node.mesh_shape))
        )
    elif node.layout.startswith("expert"):
        _distribute(module, mesh, lambda _, parameter: [Shard(0)] if parameter.ndim == 3 else None)
        if node.layout == "expert_fsdp":
            for block in module.blocks.values():
                fully_shard(block, mesh=mesh)
    if empty:
        module.to_empty(device="cpu")
    return (
        DistributedDataParallel(module, process_group=worlds.group(node))
        if node.layout == "ddp"
        else module
    )


def _named(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    bare = module.module if isinstance(module, DistributedDataParallel) else module
    yield from bare.named_parameters()


def _buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    bare = module.module if isinstance(module, DistributedDataParallel) else module
    yield from bare.named_buffers()


def _adamw(module: nn.Module, lr: float) -> torch.optim.AdamW:
    return torch.optim.AdamW(module.parameters(), lr=lr)


def _step(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer make its state, without the arithmetic of a step: all values are overwritten.

    For each placement, DTensor would search for the placements of the results of ten operations.
    """
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with mock.patch("torch.optim.adam.adam"):
        optimizer.step()
    optimizer.zero_grad()


# --- what is where --------------------------------------------------------------------------------


def _expected(node: Node, worlds: Worlds) -> dict[str, Any]:
    """Return what this rank has to hold, as torch cuts it."""
    found: dict[str, Any] = {}
    module = build(node, worlds)
    found |= {name: _bits(tensor) for name, tensor in (*_named(module), *_buffers(module))}
    for moment in _MOMENTS:
        shadow = build(node, worlds, under=f"{moment}/")
        found |= {f"{moment}/{name}": _bits(tensor) for name, tensor in _named(shadow)}
    for name, _ in _named(module):
        found[f"step/{name}"] = _bits(content(f"step/{name}", (), torch.float32))
    return found


def _held(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    found = {name: _bits(tensor) for name, tensor in (*_named(module), *_buffers(module))}
    for name, parameter in _named(module):
        for key, value in optimizer.state[parameter].items():
            found[f"{key}/{name}"] = _bits(value)
    return found


def _fill(node: Node, worlds: Worlds, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Put the contents into a module and a state that a step has made."""
    for under in ("", *(f"{moment}/" for moment in _MOMENTS)):
        shadow = build(node, worlds, under=under)
        for (_, parameter), (_, wanted) in zip(_named(module), _named(shadow), strict=True):
            target = optimizer.state[parameter][under[:-1]] if under else parameter
            _integers(target).copy_(_integers(wanted))
    for name, parameter in _named(module):
        optimizer.state[parameter]["step"].copy_(content(f"step/{name}", (), torch.float32))
    for name, buffer in _buffers(module):
        buffer.copy_(content(name, tuple(buffer.shape), buffer.dtype))


class Target:
    """A module of a layout, and optimizers of it with and without state, that take one checkpoint after another."""

    def __init__(self, node: Node, worlds: Worlds) -> None:
        self.node = node
        self.worlds = worlds
        self.expected = _expected(node, worlds)
        self.module = build(node, worlds)
        self.stepped = _adamw(self.module, lr=0.5)
        _step(self.module, self.stepped)

    def load(self, path: str, number: int) -> list[str]:
        """Load a checkpoint; return what isn't as it has to be.

        Args:
            path: of the checkpoint.
            number: which way to go: an optimizer that has a state, one that has none, a module
                fresh from meta.
        """
        module, optimizer = self.module, self.stepped
        if number % 3 == 1:
            optimizer = _adamw(module, lr=0.5)
        elif number % 9 == 2:
            module = build(self.node, self.worlds, empty=True)
            optimizer = _adamw(module, lr=0.5)
        self._scribble(module, optimizer)
        before, places = (
            _held(module, optimizer),
            {name: id(tensor) for name, tensor in _named(module)},
        )
        optimizer.param_groups[0]["lr"] = 0.5
        report = ckptfmt.load(
            path, State(weights=module, optimizer=optimizer), **self.worlds.writers(self.node)
        )
        assert isinstance(report, LoadReport)
        after = _held(module, optimizer)
        wrong = [
            name
            for name in self.expected.keys() | after.keys()
            if after.get(name) != self.expected.get(name)
        ]
        wrong += [
            f"{name} wasn't changed"
            for name, bits in before.items()
            if bits[2] and bits == after[name]
        ]
        wrong += [
            f"{name} was replaced" for name, tensor in _named(module) if places[name] != id(tensor)
        ]
        wrong += [
            f"{name} isn't placed as its parameter" for name in self._displaced(module, optimizer)
        ]
        wrong += [
            f"downgrade: {line}"
            for line in report.downgrades
            if "streams" not in line and "STREAM" not in line
        ]
        wrong += [f"lr={group['lr']}" for group in optimizer.param_groups if group["lr"] != 0.0123]
        return sorted(wrong)

    @staticmethod
    def _scribble(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for _, tensor in (*_named(module), *_buffers(module)):
            _scribble(tensor)
        for state in optimizer.state.values():
            for value in state.values():
                _scribble(value)

    @staticmethod
    def _displaced(module: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[str]:
        for name, parameter in _named(module):
            for moment in _MOMENTS:
                value = optimizer.state[parameter][moment]
                if isinstance(parameter, DTensor) and value.placements != parameter.placements:
                    yield f"{moment}/{name}"


# --- scenes ---------------------------------------------------------------------------------------


def pair_name(source: Node, target: Node) -> str:
    """Return how a pair is called in what a scene says."""
    return f"{source.name} to {target.name}"


def _save(node: Node, worlds: Worlds, path: str) -> None:
    module = build(node, worlds)
    optimizer = _adamw(module, lr=0.0123)
    _step(module, optimizer)
    _fill(node, worlds, module, optimizer)
    ckptfmt.save(path, State(weights=module, optimizer=optimizer), step=3, **worlds.writers(node))


def _cover(stage: Stage, pairs: tuple[tuple[Node, Node], ...], label: str) -> Any:
    nodes = tuple(dict.fromkeys(node for pair in pairs for node in pair))
    worlds = Worlds(nodes, stage.rank)
    begin_s = time.monotonic()
    for node in nodes:
        if stage.rank < node.world_size:
            with contextlib.suppress(
                CkptError
            ):  # what isn't there fails the pairs that it is the source of
                _save(node, worlds, stage.path(f"{label}-{node.name}"))
    dist.barrier()
    saved_s = time.monotonic() - begin_s
    outcomes: dict[str, list[str] | str] = {}
    for offset, node in enumerate(nodes):
        if stage.rank < node.world_size:
            target = Target(node, worlds)
            for number, source in enumerate(source for source, to in pairs if to == node):
                path = stage.path(f"{label}-{source.name}")
                try:
                    outcomes[pair_name(source, node)] = target.load(path, number + offset)
                except Exception:  # noqa: BLE001
                    outcomes[pair_name(source, node)] = traceback.format_exc()
    return {
        "outcomes": outcomes,
        "saved_s": saved_s,
        "loaded_s": time.monotonic() - begin_s - saved_s,
    }


def cover(stage: Stage) -> Any:
    return _cover(stage, PAIRS, "cover")


def cover_more(stage: Stage) -> Any:
    return _cover(stage, MORE_PAIRS, "more")
