"""Scenes of FSDP2, HSDP and tensor parallelism: uneven rows, empty shards, several meshes, containers of optimizers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

import ckptfmt
from ckptfmt import State
from ckptfmt.loading.load_report import LoadReport
from tests.resharding.stage import (
    Stage,
    attempt,
    bits,
    gather_on,
    optimizer_bits,
    steps_without_model,
    weight_bits,
)


class Net(nn.Module):
    """Rows that no number of ranks divides, fewer rows than ranks, a scalar, and a buffer that isn't saved by torch."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.table = nn.Embedding(10, 6)
        self.up = nn.Linear(6, 7)
        self.down = nn.Linear(7, 3)
        self.out = nn.Linear(3, 5, bias=False)
        self.scale = nn.Parameter(torch.full((1,), 1.0 + seed))
        self.register_buffer("seen", torch.full((2,), float(seed)), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.up(self.table(ids)))
        result: torch.Tensor = self.out(torch.relu(self.down(hidden))) * self.scale
        return result


def shard(seed: int, mesh: DeviceMesh) -> Net:
    """The root keeps its parameters whole after a forward pass; the layers give theirs up."""
    module = Net(seed)
    for layer in (module.up, module.down):
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh, reshard_after_forward=False)
    return module


def adamw(module: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(module.parameters(), lr=0.0123, weight_decay=0.1)


def train(
    module: nn.Module, optimizer: torch.optim.Optimizer, steps: range, share: int
) -> list[str]:
    """Train; return the bits of each loss."""
    losses = []
    for step in steps:
        ids = torch.tensor([(step * 7 + share) % 10, (step * 3 + 5 * share + 1) % 10])
        loss = (module(ids) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(bits(loss))
    return losses


def both(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"weights": weight_bits(module), "state": optimizer_bits(optimizer, module)}


def _files_nbytes(path: str, field: str) -> int:
    return sum(file.stat().st_size for file in Path(path).glob(f"{field}-*.safetensors"))


# --- FSDP2 ----------------------------------------------------------------------------------------


def fsdp_save(stage: Stage) -> Any:
    """Save right after an evaluation, in which the root's parameters stay whole."""
    mesh = init_device_mesh("cpu", (stage.world_size,))
    module = shard(1, mesh)
    optimizer = adamw(module)
    train(module, optimizer, range(3), stage.rank)
    module.eval()
    with torch.no_grad():
        module(torch.tensor([1, 2]))
    whole = [
        name for name, parameter in module.named_parameters() if not isinstance(parameter, DTensor)
    ]
    path = stage.path(f"fsdp-{stage.world_size}")
    state = State(weights=module, optimizer=optimizer, data={})
    ckptfmt.save(path, state, step=3)
    local = {
        name: list(parameter.to_local().shape)  # type: ignore[attr-defined]
        for name, parameter in module.named_parameters()
    }
    saved = both(module, optimizer)
    module.train()
    losses = train(module, optimizer, range(3, 5), stage.rank)
    return {
        "saved": saved,
        "whole": whole,
        "local": local,
        "losses": losses,
        "later": both(module, optimizer),
    }


def _load_fsdp(module: nn.Module, path: str, **how: Any) -> dict[str, Any]:
    optimizer = adamw(module)
    before = both(module, optimizer)
    report = ckptfmt.load(path, State(weights=module, optimizer=optimizer, data={}), **how)
    assert isinstance(report, LoadReport)
    return {"before": before, "after": both(module, optimizer), "claim": report.claim}


def fsdp_load_same(stage: Stage) -> Any:
    """The same number of ranks goes on bit by bit."""
    module = shard(2, init_device_mesh("cpu", (stage.world_size,)))
    optimizer = adamw(module)
    path = stage.path(f"fsdp-{stage.world_size}")
    ckptfmt.load(path, State(weights=module, optimizer=optimizer, data={}))
    losses = train(module, optimizer, range(3, 5), stage.rank)
    return {"losses": losses, "later": both(module, optimizer)}


def fsdp_load_two(stage: Stage) -> Any:
    return _load_fsdp(shard(2, init_device_mesh("cpu", (stage.world_size,))), stage.path("fsdp-2"))


def fsdp_load_four(stage: Stage) -> Any:
    return _load_fsdp(shard(2, init_device_mesh("cpu", (stage.world_size,))), stage.path("fsdp-4"))


def fsdp_load_four_on_two(stage: Stage) -> Any:
    """Two of the ranks load alone."""
    mesh, gather = DeviceMesh("cpu", [0, 1]), gather_on([0, 1])
    if stage.rank > 1:
        return None
    how = {"writer": (stage.rank, 2), "agree": gather}
    return _load_fsdp(shard(2, mesh), stage.path("fsdp-4"), **how)


def fsdp_without_state(stage: Stage) -> Any:
    """An optimizer that hasn't stepped yet; one that has may not keep what it had."""
    mesh = init_device_mesh("cpu", (stage.world_size,))
    module = shard(1, mesh)
    path = stage.path("fsdp-fresh")
    ckptfmt.save(path, State(weights=module, optimizer=adamw(module), data={}), step=0)
    saved = weight_bits(module)
    other = shard(2, mesh)
    fresh = _load_fsdp(other, path)
    stepped = adamw(other)
    train(other, stepped, range(1), stage.rank)
    refused = attempt(lambda: ckptfmt.load(path, State(weights=other, optimizer=stepped, data={})))
    return {"saved": saved, "fresh": fresh, "refused": refused}


def load_after_evaluation(stage: Stage) -> Any:
    """Parameters are whole when the load comes: what the next step uses has to be what was loaded."""
    mesh = init_device_mesh("cpu", (stage.world_size,))
    path = stage.path(f"fsdp-{stage.world_size}")
    said = []
    for evaluate in (True, False):
        module = shard(2, mesh)
        optimizer = adamw(module)
        if evaluate:
            with torch.no_grad():
                module(torch.tensor([1, 2]))
        ckptfmt.load(path, State(weights=module, optimizer=optimizer, data={}))
        said.append([train(module, optimizer, range(3, 5), stage.rank), both(module, optimizer)])
    return said


def replicate_composably(stage: Stage) -> Any:
    """torch's `replicate`, which in some versions makes DTensors of the parameters and in others hooks."""
    from torch.distributed._composable.replicate import replicate  # noqa: PLC0415

    def make(seed: int) -> Net:
        module = Net(seed)
        replicate(module)
        return module

    module = make(1)
    optimizer = adamw(module)
    train(module, optimizer, range(2), stage.rank)
    path = stage.path("replicate")
    ckptfmt.save(path, State(weights=module, optimizer=optimizer, data={}), step=2)
    return {"saved": both(module, optimizer), "loaded": _load_fsdp(make(2), path)}


# --- other meshes ---------------------------------------------------------------------------------


def hsdp(stage: Stage) -> Any:
    """Step with made-up gradients: torch 2.7 can't average the real ones over replicas with gloo."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    module = shard(1, mesh)
    optimizer = adamw(module)
    steps_without_model(module, optimizer, range(2))
    path = stage.path("hsdp")
    report = ckptfmt.save(path, State(weights=module, optimizer=optimizer, data={}), step=2)
    saved = both(module, optimizer)
    loaded = _load_fsdp(shard(2, mesh), path)
    from_fsdp = _load_fsdp(shard(3, mesh), stage.path("fsdp-4"))
    placements = sorted({str(parameter.placements) for parameter in module.parameters()})  # type: ignore[attr-defined]
    sizes = {field: _files_nbytes(path, field) for field in ("weights", "optimizer")}
    return {
        "saved": saved, "loaded": loaded, "from_fsdp": from_fsdp, "placements": placements, "sizes": sizes,
        "nbytes": report.nbytes,
    }  # fmt: skip


_TP_PLAN: dict[str, Callable[[], ParallelStyle]] = {
    "up": ColwiseParallel,
    "down": RowwiseParallel,
    "out": ColwiseParallel,
}


def _parallel(seed: int, mesh: DeviceMesh) -> Net:
    module = Net(seed)
    parallelize_module(module, mesh, {name: make() for name, make in _TP_PLAN.items()})
    return module


def tensor_parallel(stage: Stage) -> Any:
    """Rows and columns over four ranks; seven columns leave the last rank one."""
    mesh = init_device_mesh("cpu", (stage.world_size,))
    module = _parallel(1, mesh)
    optimizer = adamw(module)
    steps_without_model(module, optimizer, range(2))
    path = stage.path("tp")
    ckptfmt.save(path, State(weights=module, optimizer=optimizer, data={}), step=2)
    placements = {
        name: str(parameter.placements)
        for name, parameter in module.named_parameters()
        if isinstance(parameter, DTensor)
    }
    return {
        "saved": both(module, optimizer), "loaded": _load_fsdp(_parallel(2, mesh), path), "placements": placements,
        "from_fsdp": _load_fsdp(_parallel(3, mesh), stage.path("fsdp-4")),
    }  # fmt: skip


class Even(nn.Module):
    """A pair of layers that FSDP2 and tensor parallelism cut along the same dimension."""

    def __init__(self, seed: int, rows: int, columns: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up = nn.Linear(columns, rows)
        self.down = nn.Linear(rows, columns)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(torch.relu(self.up(values)))
        return result


def _strided(seed: int, mesh: DeviceMesh, rows: int, columns: int) -> Even:
    module = Even(seed, rows, columns)
    parallelize_module(module, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(module, mesh=mesh["dp"])
    return module


def _fsdp_over_tp(stage: Stage, rows: int, columns: int) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    try:
        module = _strided(1, mesh, rows, columns)
    except (
        NotImplementedError
    ) as error:  # raised by `fully_shard` of older versions of torch for uneven shards
        return {"torch_lacks": str(error)}
    optimizer = adamw(module)
    for step in range(2):
        (module(torch.full((2, columns), 0.5 + step + stage.rank // 2)) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    path = stage.path(f"strided-{rows}-{columns}")
    ckptfmt.save(path, State(weights=module, optimizer=optimizer, data={}), step=2)
    placements = {name: str(parameter.placements) for name, parameter in module.named_parameters()}  # type: ignore[attr-defined]
    saved = both(module, optimizer)
    loaded = _load_fsdp(_strided(2, mesh, rows, columns), path)
    flat = Even(3, rows, columns)
    fully_shard(flat, mesh=init_device_mesh("cpu", (4,)))
    return {
        "saved": saved,
        "loaded": loaded,
        "flat": _load_fsdp(flat, path),
        "placements": placements,
    }


def fsdp_over_tp(stage: Stage) -> Any:
    return _fsdp_over_tp(stage, 8, 4)


def fsdp_over_tp_uneven(stage: Stage) -> Any:
    return _fsdp_over_tp(stage, 10, 6)


def meshes_of_many_shapes(stage: Stage) -> Any:
    """Bare DTensors in every placement of a two-dimensional mesh, each loaded into every other."""
    mesh = init_device_mesh("cpu", (2, 2))
    whole = torch.arange(5 * 7, dtype=torch.int64).reshape(5, 7)
    choices = [Replicate(), Shard(0), Shard(1)]
    layouts = list(itertools.product(choices, choices))
    tensors = {
        f"t{number}": distribute_tensor(whole, mesh, layout)
        for number, layout in enumerate(layouts)
    }
    path = stage.path("placements")
    ckptfmt.save(path, State(weights=tensors), step=1)
    wrong = []
    for turn in range(len(layouts)):
        turned = layouts[turn:] + layouts[:turn]
        targets = {
            f"t{number}": distribute_tensor(torch.zeros_like(whole), mesh, layout)
            for number, layout in enumerate(turned)
        }
        before = bits(targets)
        ckptfmt.load(path, State(weights=targets))
        wrong += [
            name
            for name, value in bits(targets).items()
            if value != bits(whole) or before[name] == value
        ]
    return {"wrong": wrong, "count": len(layouts) ** 2}


def outside_of_the_mesh(stage: Stage) -> Any:
    """Two ranks of four are in the mesh; the others have the same objects and hold nothing."""
    mesh = DeviceMesh("cpu", [0, 2])
    whole = torch.arange(15, dtype=torch.int64).reshape(5, 3)

    def make(factor: int) -> dict[str, torch.Tensor]:
        return {
            "sharded": distribute_tensor(whole * factor, mesh, [Shard(0)]),
            "replicated": distribute_tensor(whole * factor, mesh, [Replicate()]),
        }

    path = stage.path("outside")
    ckptfmt.save(path, State(weights=make(1)), step=1)
    target = make(2)
    ckptfmt.load(path, State(weights=target))
    plain = {"sharded": whole * 0, "replicated": whole * 0}
    ckptfmt.load(path, State(weights=plain), writer=(0, 1))
    inside = mesh.get_coordinate() is not None
    return {
        "inside": inside,
        "target": bits(target) if inside else None,
        "plain": bits(plain),
        "whole": bits(whole),
    }


def partial_is_refused(stage: Stage) -> Any:
    mesh = init_device_mesh("cpu", (stage.world_size,))
    tensor = DTensor.from_local(torch.ones(3), mesh, [Partial()], run_check=False)
    return attempt(
        lambda: ckptfmt.save(
            stage.path("partial"), State(weights={"w": tensor}), step=1, deadline_s=120
        )
    )


# --- several optimizers ---------------------------------------------------------------------------


def _make_optimizers(module: Net) -> list[torch.optim.Optimizer]:
    first = [module.table.weight, *module.up.parameters()]
    rest = [*module.down.parameters(), *module.out.parameters(), module.scale]
    return [torch.optim.AdamW(first, lr=0.01), torch.optim.SGD(rest, lr=0.02, momentum=0.9)]


class Container(torch.optim.Optimizer):
    """What torchtitan does: an optimizer of optimizers, whose state_dict is one flat mapping by qualified names."""

    def __init__(self, module: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        self.module = module
        self.optimizers = optimizers
        super().__init__(
            [p for inner in optimizers for group in inner.param_groups for p in group["params"]], {}
        )

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del closure
        for inner in self.optimizers:
            inner.step()

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002
        for inner in self.optimizers:
            inner.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import (  # noqa: PLC0415
            StateDictOptions,
            get_optimizer_state_dict,
        )

        options = StateDictOptions(flatten_optimizer_state_dict=True)
        return {
            key: value
            for inner in self.optimizers
            for key, value in get_optimizer_state_dict(self.module, inner, options=options).items()
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        from torch.distributed.checkpoint.state_dict import (  # noqa: PLC0415
            StateDictOptions,
            set_optimizer_state_dict,
        )

        options = StateDictOptions(flatten_optimizer_state_dict=True)
        for inner in self.optimizers:
            set_optimizer_state_dict(
                self.module, inner, optim_state_dict=state_dict, options=options
            )


def _containers(
    stage: Stage, name: str, wrap: Callable[[Net, list[torch.optim.Optimizer]], object]
) -> Any:
    mesh = init_device_mesh("cpu", (stage.world_size,))

    def make(seed: int) -> tuple[Net, list[torch.optim.Optimizer], object]:
        module = shard(seed, mesh)
        optimizers = _make_optimizers(module)
        return module, optimizers, wrap(module, optimizers)

    def state_of(module: Net, optimizers: list[torch.optim.Optimizer]) -> Any:
        options = [
            {k: v for k, v in g.items() if k != "params"}
            for o in optimizers
            for g in o.param_groups
        ]
        return [
            weight_bits(module),
            *[optimizer_bits(inner, module) for inner in optimizers],
            bits(options),
        ]

    def run(module: Net, optimizers: list[torch.optim.Optimizer], steps: range) -> None:
        for step in steps:
            (module(torch.tensor([step, stage.rank])) ** 2).mean().backward()
            for inner in optimizers:
                inner.step()
                inner.zero_grad()

    module, optimizers, given = make(1)
    run(module, optimizers, range(2))
    path = stage.path(f"optimizers-{name}")
    ckptfmt.save(path, State(weights=module, optimizer=given, data={}), step=2)
    saved = state_of(module, optimizers)
    run(module, optimizers, range(2, 4))
    other, inner, given = make(2)
    for optimizer in inner:
        optimizer.param_groups[0]["lr"] = 0.5
    before = state_of(other, inner)
    ckptfmt.load(path, State(weights=other, optimizer=given, data={}))
    after = state_of(other, inner)
    run(other, inner, range(2, 4))
    return {
        "saved": saved, "before": before, "after": after, "later": state_of(module, optimizers),
        "again": state_of(other, inner),
    }  # fmt: skip


def list_of_optimizers(stage: Stage) -> Any:
    return _containers(stage, "list", lambda _, optimizers: optimizers)


def dict_of_optimizers(stage: Stage) -> Any:
    return _containers(
        stage, "dict", lambda _, optimizers: {"a": optimizers[0], "b/c": optimizers[1]}
    )


def container_of_optimizers(stage: Stage) -> Any:
    return _containers(stage, "container", Container)


def containers_on_other_ranks(stage: Stage) -> Any:
    """A list and a container of optimizers, saved by four ranks, are loaded by these."""
    mesh = init_device_mesh("cpu", (stage.world_size,))
    said = {}
    for name in ("list", "container"):
        module = shard(2, mesh)
        optimizers = _make_optimizers(module)
        given = optimizers if name == "list" else Container(module, optimizers)
        state = State(weights=module, optimizer=given, data={})
        ckptfmt.load(stage.path(f"optimizers-{name}"), state)
        said[name] = [weight_bits(module), *[optimizer_bits(inner, module) for inner in optimizers]]
    return said
