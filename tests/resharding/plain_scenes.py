"""Scenes of four processes that hold plain tensors: no mesh says who has what, and no rank may decide it alone."""

from __future__ import annotations

import contextlib
import time
import unittest.mock
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import ckptfmt
from ckptfmt import PerWorker, State
from ckptfmt.adapters.torch.tensors import TorchSource
from ckptfmt.loading.load_report import LoadReport
from tests.resharding.stage import (
    Stage,
    attempt,
    bits,
    optimizer_bits,
    steps_without_model,
    weight_bits,
)

LAYERS = 4


class Layers(nn.Module):
    """Some of the layers of a model, under the names that they have in the whole one."""

    def __init__(self, numbers: range, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        whole = [nn.Linear(5 + number, 6 + number) for number in range(LAYERS)]
        self.layers = nn.ModuleDict({str(number): whole[number] for number in numbers})


def make_layers(numbers: range, seed: int) -> tuple[Layers, torch.optim.AdamW]:
    module = Layers(numbers, seed)
    return module, torch.optim.AdamW(module.parameters(), lr=0.01 + seed / 100)


def _share(stage: Stage) -> range:
    """Megatron's order: pipeline stages outermost, data-parallel ranks beside each other."""
    first = stage.rank // 2 * 2
    return range(first, first + 2)


def _both(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    options = [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    return {
        "weights": weight_bits(module),
        "state": optimizer_bits(optimizer, module),
        "options": bits(options),
    }


# --- pipeline stages of data-parallel ranks -------------------------------------------------------


def pipeline_save(stage: Stage) -> Any:
    module, optimizer = make_layers(_share(stage), 1)
    steps_without_model(module, optimizer, range(3))
    state = State(weights=module, optimizer=optimizer, data={"position": 7})
    report = ckptfmt.save(stage.path("pipeline"), state, step=3)
    return {**_both(module, optimizer), "nbytes": report.nbytes, "digest": report.digest}


def pipeline_whole(stage: Stage) -> Any:
    """One process alone loads the whole model, and saves it whole."""
    if stage.rank != 1:
        return None
    module, optimizer = make_layers(range(LAYERS), 2)
    data: dict[str, object] = {}
    state = State(weights=module, optimizer=optimizer, data=data)
    before = _both(module, optimizer)
    report = ckptfmt.load(stage.path("pipeline"), state, writer=(0, 1))
    assert isinstance(report, LoadReport)
    ckptfmt.save(stage.path("whole"), state, step=3, writer=(0, 1))
    return {
        "before": before,
        "after": _both(module, optimizer),
        "data": data,
        "claim": report.claim,
    }


def pipeline_back(stage: Stage) -> Any:
    module, optimizer = make_layers(_share(stage), 3)
    before = _both(module, optimizer)
    state = State(weights=module, optimizer=optimizer, data={})
    report = ckptfmt.load(stage.path("whole"), state)
    assert isinstance(report, LoadReport)
    return {"before": before, "after": _both(module, optimizer), "claim": report.claim}


def pipeline_lost_layer(stage: Stage) -> Any:
    """A layer that no stage takes is an error on all of them."""
    numbers = range(2) if stage.rank < 2 else range(2, 3)
    module, optimizer = make_layers(numbers, 3)
    state = State(weights=module, optimizer=optimizer, data={})
    return attempt(lambda: ckptfmt.load(stage.path("whole"), state))


class Tied(nn.Module):
    """An embedding that is also the head, or one of the two alone."""

    def __init__(self, seed: int, *, embed: bool, head: bool) -> None:
        super().__init__()
        torch.manual_seed(seed)
        weight = nn.Parameter(torch.randn(6, 4))
        if embed:
            self.embed = nn.Embedding(6, 4, _weight=weight)
            self.embed.weight = weight
        if head:
            self.head = nn.Linear(4, 6, bias=False)
            self.head.weight = weight


def _tied(seed: int, *, embed: bool = True, head: bool = True) -> tuple[Tied, torch.optim.AdamW]:
    module = Tied(seed, embed=embed, head=head)
    return module, torch.optim.AdamW(module.parameters(), lr=0.5)


def tied_whole_save(stage: Stage) -> Any:
    if stage.rank:
        return None
    module, optimizer = _tied(1)
    steps_without_model(module, optimizer, range(2))
    ckptfmt.save(
        stage.path("tied"),
        State(weights=module, optimizer=optimizer, data={}),
        step=2,
        writer=(0, 1),
    )
    return _both(module, optimizer)


def tied_stages(stage: Stage) -> Any:
    """From one process to two stages, and back: as they were, and after the stages went apart."""
    last = stage.rank > 1
    module, optimizer = _tied(2, embed=not last, head=last)
    state = State(weights=module, optimizer=optimizer, data={})
    ckptfmt.load(stage.path("tied"), state)
    loaded = _both(module, optimizer)
    ckptfmt.save(stage.path("tied-stages"), state, step=2)
    if last:
        for moments in optimizer.state.values():
            moments["exp_avg"] += 1
    ckptfmt.save(stage.path("tied-apart"), state, step=3)
    if stage.rank:
        return {"loaded": loaded}
    whole, again = _tied(3)
    before = _both(whole, again)
    target = State(weights=whole, optimizer=again, data={})

    def load(name: str) -> dict[str, Any]:
        return attempt(lambda: ckptfmt.load(stage.path(name), target, writer=(0, 1)))

    back = {"before": before, "outcome": load("tied-stages"), "after": _both(whole, again)}
    return {"loaded": loaded, "back": back, "apart": load("tied-apart")}


# --- the same names, other contents ---------------------------------------------------------------


class Expert(nn.Module):
    """An expert that numbers its layers from 0, as every other one does."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        first = nn.Linear(300, 1000)
        self.layers = nn.ModuleList([first, nn.Linear(3, 2)])
        self.last_row = first.weight.detach()[-1]


def _expert(stage: Stage, seed: int = 0) -> tuple[Expert, torch.optim.AdamW]:
    module = Expert(7)
    if stage.rank == 2:
        with torch.no_grad():  # differs in the last row alone, which is in the second block
            module.last_row += 1
    if seed:
        torch.manual_seed(seed + stage.rank)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.normal_()
    optimizer = torch.optim.AdamW(module.parameters())
    return module, optimizer


def experts_same_names(stage: Stage) -> Any:
    module, _ = _expert(stage)
    state = State(weights=module)
    return attempt(lambda: ckptfmt.save(stage.path("experts-same"), state, step=1, deadline_s=120))


def experts_per_worker(stage: Stage) -> Any:
    module, optimizer = _expert(stage, 11)
    steps_without_model(module, optimizer, range(2))
    path = stage.path("experts-own")
    ckptfmt.save(
        path, State(weights=PerWorker(module), optimizer=PerWorker(optimizer), data={}), step=1
    )
    saved = _both(module, optimizer)
    other, again = _expert(stage, 31)
    before = _both(other, again)
    ckptfmt.load(path, State(weights=PerWorker(other), optimizer=PerWorker(again), data={}))
    return {"saved": saved, "before": before, "after": _both(other, again)}


class NamedExpert(nn.Module):
    """What all ranks share, and one expert under a name of its own."""

    def __init__(self, number: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.attention = nn.Linear(4, 4)
        torch.manual_seed(seed + 100 * number)
        self.experts = nn.ModuleDict({str(number): nn.Linear(4, 3)})
        torch.manual_seed(seed)
        self.router = nn.Linear(4, 2)


def experts_own_names(stage: Stage) -> Any:
    """One parameter group holds shared and own parameters: no two ranks have the same group."""
    module = NamedExpert(stage.rank, 5)
    optimizer = torch.optim.AdamW(module.parameters(), lr=torch.tensor(0.125))
    steps_without_model(module, optimizer, range(2))
    path = stage.path("experts-named")
    ckptfmt.save(path, State(weights=module, optimizer=optimizer, data={}), step=1)
    saved = _both(module, optimizer)
    other = NamedExpert(stage.rank, 6)
    again = torch.optim.AdamW(other.parameters(), lr=torch.tensor(0.5))
    before = _both(other, again)
    ckptfmt.load(path, State(weights=other, optimizer=again, data={}))
    return {"saved": saved, "before": before, "after": _both(other, again)}


def stages_replicated_by_their_own_mesh(stage: Stage) -> Any:
    """Local layer numbers again, but a mesh of each stage says that its ranks are replicas: only of one another."""
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415
    from torch.distributed.tensor import Replicate, distribute_tensor  # noqa: PLC0415

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "data"))["data"]

    def tensor(value: float) -> torch.Tensor:
        return distribute_tensor(torch.full((6, 5), value), mesh, [Replicate()])

    different = State(weights={"layers.0.weight": tensor(float(stage.rank // 2))})
    refused = attempt(
        lambda: ckptfmt.save(stage.path("stages-differ"), different, step=1, deadline_s=120)
    )
    same = State(weights={"layers.0.weight": tensor(3.0)})
    accepted = attempt(
        lambda: ckptfmt.save(stage.path("stages-same"), same, step=1, deadline_s=120)
    )
    return {"refused": refused, "accepted": accepted}


def mappings_of_other_keys(stage: Stage) -> Any:
    """Flat mappings of tensors, as a Megatron-style state_dict is, add up as modules do; loaded whole on one rank."""
    state = State(weights={f"layers.{stage.rank}": torch.full((2,), float(stage.rank))})
    ckptfmt.save(stage.path("mappings"), state, step=1, deadline_s=120)
    whole = {f"layers.{rank}": torch.zeros(2) for rank in range(stage.world_size)}
    ckptfmt.load(stage.path("mappings"), State(weights=whole), writer=(0, 1))
    return [tensor.tolist() for tensor in whole.values()]


# --- what differs between the ranks ---------------------------------------------------------------


def _attempt_save(stage: Stage, name: str, state: State, *, step: int = 1) -> dict[str, Any]:
    return attempt(lambda: ckptfmt.save(stage.path(name), state, step=step, deadline_s=120))


def leaf_differs(stage: Stage) -> Any:
    data = {"shards": [{"at": 5}, {"at": 6 + (stage.rank == 3)}]}
    return _attempt_save(stage, "leaf", State(weights={"w": torch.ones(2)}, data=data))


def config_differs(stage: Stage) -> Any:
    config = {"model": {"width": 4}, "rank": stage.rank}
    return _attempt_save(stage, "config", State(weights={"w": torch.ones(2)}, config=config))


def steps_differ(stage: Stage) -> Any:
    return _attempt_save(
        stage, "steps", State(weights={"w": torch.ones(2)}), step=10 + (stage.rank == 1)
    )


def shapes_differ(stage: Stage) -> Any:
    return _attempt_save(stage, "shapes", State(weights={"w": torch.ones(2 + (stage.rank == 2))}))


def dtypes_differ(stage: Stage) -> Any:
    dtype = torch.int32 if stage.rank == 2 else torch.float32
    return _attempt_save(stage, "dtypes", State(weights={"w": torch.zeros(2, dtype=dtype)}))


def one_is_unsupported(stage: Stage) -> Any:
    bad = torch.eye(2).to_sparse() if stage.rank == 2 else torch.eye(2)
    return _attempt_save(stage, "unsupported", State(weights={"w": bad}))


class Fragile:
    """An object whose own code fails on one rank."""

    def __init__(self, *, fails_at: str = "") -> None:
        self.fails_at = fails_at

    def state_dict(self) -> dict[str, int]:
        if self.fails_at == "save":
            raise RuntimeError("the loader's worker died")
        return {"at": 3}

    def load_state_dict(self, tree: dict[str, int]) -> None:
        if self.fails_at == "load":
            raise RuntimeError("the loader can't go back")
        assert tree == {"at": 3}


def foreign_error_in_capture(stage: Stage) -> Any:
    return _attempt_save(
        stage, "foreign", State(data=Fragile(fails_at="save" if stage.rank == 1 else ""))
    )


def foreign_error_in_load(stage: Stage) -> Any:
    path = stage.path("foreign-load")
    ckptfmt.save(path, State(data=Fragile()), step=1)
    state = State(data=Fragile(fails_at="load" if stage.rank == 1 else ""))
    return attempt(lambda: ckptfmt.load(path, state, deadline_s=120))


def foreign_error_in_write(stage: Stage) -> Any:
    """Memory runs out on one rank while it copies."""

    def fail(*_: object) -> None:
        raise MemoryError("no memory for a copy")

    with (
        unittest.mock.patch.object(TorchSource, "copy_into", fail)
        if stage.rank == 3
        else contextlib.nullcontext()
    ):
        return _attempt_save(stage, "foreign-write", State(weights={"w": torch.full((2,), 1.0)}))


# --- how the ranks reach each other ---------------------------------------------------------------


def _gather(value: bytes) -> list[bytes]:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def _save_and_load(stage: Stage, name: str, **how: Any) -> Any:
    module, optimizer = make_layers(range(LAYERS), 1)
    steps_without_model(module, optimizer, range(2))
    path = stage.path(name)
    report = ckptfmt.save(path, State(weights=module, optimizer=optimizer, data={}), step=2, **how)
    saved = _both(module, optimizer)
    other, again = make_layers(range(LAYERS), 2)
    before = _both(other, again)
    ckptfmt.load(path, State(weights=other, optimizer=again, data={}), **how)
    return {"saved": saved, "before": before, "after": _both(other, again), "digest": report.digest}


def agree_by_default(stage: Stage) -> Any:
    return _save_and_load(stage, "default")


def agree_by_callable(stage: Stage) -> Any:
    return _save_and_load(stage, "callable", agree=_gather)


def agree_by_token(stage: Stage) -> Any:
    return _save_and_load(
        stage, "token", agree="start-20270101", writer=(stage.rank, stage.world_size)
    )


def writer_given(stage: Stage) -> Any:
    """Numbers of writers that aren't the ranks of torch.distributed."""
    number = stage.world_size - 1 - stage.rank
    order = lambda value: _gather(value)[::-1]  # noqa: E731
    return _save_and_load(stage, "given", agree=order, writer=(number, stage.world_size))


def half_of_them_save(stage: Stage) -> Any:
    """Two of the four save on their own; the others never call it."""
    pair = dist.new_group([0, 1])
    if stage.rank > 1:
        return None

    def gather(value: bytes) -> list[bytes]:
        gathered: list[Any] = [None, None]
        dist.all_gather_object(gathered, value, group=pair)
        return gathered

    return _save_and_load(stage, "half", agree=gather, writer=(stage.rank, 2))


def nobody_to_ask(stage: Stage) -> Any:
    """The number of writers is given, and nothing that reaches them."""
    state = State(weights={"w": torch.ones(2)})
    return attempt(
        lambda: ckptfmt.save(stage.path("nobody"), state, step=1, writer=(stage.rank % 2, 2))
    )


def one_never_comes(stage: Stage) -> Any:
    """A rank skips the save: the others say whom they miss, each at its deadline."""
    state = State(weights={"w": torch.ones(2)})

    if stage.rank == 2:
        time.sleep(6)
        return None
    token = "start-with-a-gap"
    how: dict[str, Any] = {"agree": token, "writer": (stage.rank, 4), "deadline_s": 4}
    return attempt(lambda: ckptfmt.save(stage.path("gap"), state, step=1, **how))


# --- replicas -------------------------------------------------------------------------------------


def replicas_are_written_once(stage: Stage) -> Any:
    torch.manual_seed(0)
    module = nn.Sequential(*[nn.Linear(64, 64) for _ in range(16)])
    wrapped = nn.parallel.DistributedDataParallel(module)
    optimizer = torch.optim.AdamW(wrapped.parameters())
    steps_without_model(wrapped, optimizer, range(1))
    path = stage.path("replicas")
    ckptfmt.save(path, State(weights=wrapped, optimizer=optimizer), step=1)
    nbytes = {"weights": 0, "optimizer": 0}
    nbytes["weights"] = sum(parameter.nbytes for parameter in module.parameters())
    tensors = [value for state in optimizer.state.values() for value in state.values()]
    nbytes["optimizer"] = sum(tensor.nbytes for tensor in tensors)
    files = {file.name: file.stat().st_size for file in Path(path).glob("*.safetensors")}
    return {"nbytes": nbytes, "files": files, "largest": max(tensor.nbytes for tensor in tensors)}
