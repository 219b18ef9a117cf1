"""Scenes of DistributedDataParallel: statistics and random streams of each rank, wrappers, and a run that goes on."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ckptfmt
from ckptfmt import State
from ckptfmt.loading.load_report import LoadReport
from tests.resharding.stage import Stage, attempt, bits, optimizer_bits, weight_bits

# --- BatchNorm ------------------------------------------------------------------------------------


def make_normed(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))


def batch_norm_save(stage: Stage) -> Any:
    module = DistributedDataParallel(make_normed(1))
    torch.manual_seed(100 + stage.rank)
    for _ in range(2 + stage.rank):
        module.module(torch.randn(5, 4))  # past the wrapper: each rank has seen its own batches
    ckptfmt.save(stage.path("norm"), State(weights=module, data={}), step=2)
    return weight_bits(module.module)


def batch_norm_load(stage: Stage) -> Any:
    module = DistributedDataParallel(make_normed(2))
    before = weight_bits(module.module)
    report = ckptfmt.load(stage.path("norm"), State(weights=module, data={}))
    assert isinstance(report, LoadReport)
    return {
        "before": before, "after": weight_bits(module.module), "downgrades": report.downgrades, "claim": report.claim,
        "lowered_by": report.lowered_by,
    }  # fmt: skip


def _sharded(seed: int) -> nn.Module:
    module = make_normed(seed)
    fully_shard(module)
    return module


def batch_norm_sharded(stage: Stage) -> Any:
    """FSDP2 keeps buffers as they are, on each rank; its parameters are shards."""
    module, path = _sharded(1), stage.path("norm-sharded")
    torch.manual_seed(100 + stage.rank)
    for _ in range(2):
        module(torch.randn(5, 4))
    ckptfmt.save(path, State(weights=module, data={}), step=2)
    other = _sharded(2)
    report = ckptfmt.load(path, State(weights=other, data={}))
    assert isinstance(report, LoadReport)
    return {
        "saved": weight_bits(module),
        "after": weight_bits(other),
        "downgrades": report.downgrades,
    }


def batch_norm_beside(stage: Stage) -> Any:
    """What is wrapped is given without its wrapper: nothing says that its statistics are each rank's own."""
    module = DistributedDataParallel(make_normed(1))
    torch.manual_seed(100 + stage.rank)
    module.module(torch.randn(5, 4))
    return attempt(
        lambda: ckptfmt.save(
            stage.path("beside"), State(weights=module.module), step=1, deadline_s=120
        )
    )


def sync_batch_norm(stage: Stage) -> Any:
    """Its statistics are the same on all ranks: if they aren't, that is an error, and nothing is kept per worker."""

    def make(value: float) -> nn.Module:
        module = DistributedDataParallel(make_normed(1))
        norm = nn.SyncBatchNorm(6)  # put in afterwards: the wrapper takes it on accelerators only
        assert norm.running_mean is not None
        norm.running_mean.fill_(value)
        module.module[1] = norm
        return module

    equal, other = make(0.5), make(0.25 + stage.rank)
    path = stage.path("sync")
    ckptfmt.save(path, State(weights=equal), step=1)
    with ckptfmt.open(path) as checkpoint:
        scopes = sorted({scope for field, _, scope in checkpoint.tensors if field == "weights"})
    target = make(0.75)
    ckptfmt.load(path, State(weights=target))
    different = attempt(
        lambda: ckptfmt.save(
            stage.path("sync-differs"), State(weights=other), step=1, deadline_s=120
        )
    )
    return {
        "scopes": scopes,
        "saved": weight_bits(equal),
        "after": weight_bits(target),
        "different": different,
    }


# --- random-number streams ------------------------------------------------------------------------


def _draw(own: dict[str, Any]) -> Any:
    user, array = own["torch"], own["numpy"]
    return [
        random.random().hex(),
        np.random.rand().hex(),  # noqa: NPY002
        bits(torch.rand(3)),
        bits(torch.rand(3, generator=user)),
        float(array.random()).hex(),
    ]


def _seed(seed: int) -> dict[str, Any]:
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.manual_seed(seed)
    return {
        "torch": torch.Generator().manual_seed(seed + 1),
        "numpy": np.random.default_rng(seed + 2),
    }


def streams_save(stage: Stage) -> Any:
    own = _seed(1000 + stage.rank)
    _draw(own)
    ckptfmt.save(stage.path("streams"), State(data={}, rng=own), step=1)
    return [_draw(own) for _ in range(2)]


def streams_load(stage: Stage) -> Any:
    own = _seed(2000 + stage.rank)
    fresh = [_draw(own) for _ in range(2)]
    own = _seed(2000 + stage.rank)
    report = ckptfmt.load(stage.path("streams"), State(data={}, rng=own))
    assert isinstance(report, LoadReport)
    return {
        "fresh": fresh,
        "after": [_draw(own) for _ in range(2)],
        "downgrades": report.downgrades,
    }


def streams_load_elsewhere(stage: Stage) -> Any:
    """More ranks than saved: strict says so on every one of them; otherwise the new rank keeps its own."""
    own = _seed(2000 + stage.rank)
    fresh = [_draw(own) for _ in range(2)]
    own = _seed(2000 + stage.rank)
    strict = attempt(
        lambda: ckptfmt.load(stage.path("streams"), State(data={}, rng=own), strict=True)
    )
    untouched = [_draw(own) for _ in range(2)]
    own = _seed(2000 + stage.rank)
    report = ckptfmt.load(stage.path("streams"), State(data={}, rng=own))
    assert isinstance(report, LoadReport)
    after = [_draw(own) for _ in range(2)]
    return {
        "fresh": fresh, "strict": strict, "untouched": untouched, "after": after, "claim": report.claim,
        "downgrades": report.downgrades,
    }  # fmt: skip


# --- wrappers -------------------------------------------------------------------------------------


class Tower(nn.Module):
    """A model that has attributes called as wrappers call what they wrap."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(4, 5)
        self.module = nn.Linear(5, 5)
        self._orig_mod = nn.Linear(5, 3)
        self.register_buffer("count", torch.tensor(seed))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self._orig_mod(
            torch.relu(self.module(torch.relu(self.first(values))))
        )
        return result


def _activation(tower: Tower) -> Tower:
    for name in ("first", "module"):
        setattr(tower, name, checkpoint_wrapper(getattr(tower, name)))
    return tower


def _compile(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


WRAPPED = {
    "plain": Tower,
    "ddp": lambda seed: DistributedDataParallel(Tower(seed)),
    "compiled": lambda seed: _compile(Tower(seed)),
    "activation": lambda seed: _activation(Tower(seed)),
    "compiled ddp": lambda seed: _compile(DistributedDataParallel(Tower(seed))),
    "ddp compiled": lambda seed: DistributedDataParallel(_compile(Tower(seed))),
    "all": lambda seed: DistributedDataParallel(_compile(_activation(Tower(seed)))),
}


def _unwrapped_bits(module: nn.Module) -> list[Any]:
    return [bits(value) for value in module.state_dict().values()]


def wrappers(stage: Stage) -> Any:
    """Each kind of wrapper is saved, trained once, and loaded into the next kind."""
    made = {}
    for number, (kind, make) in enumerate(WRAPPED.items()):
        module = make(number + 1)
        optimizer = torch.optim.AdamW(module.parameters())
        module(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        ckptfmt.save(
            stage.path(f"wrapped-{kind}"),
            State(weights=module, optimizer=optimizer, data={}),
            step=1,
        )
        made[kind] = (module, optimizer)
    names, results = {}, {}
    kinds = list(WRAPPED)
    for number, kind in enumerate(kinds):
        with ckptfmt.open(stage.path(f"wrapped-{kind}")) as checkpoint:
            names[kind] = sorted([*checkpoint.tensors, *checkpoint.leaves])
        target_kind = kinds[(number + 1) % len(kinds)]
        target = WRAPPED[target_kind](50)
        again = torch.optim.AdamW(target.parameters())
        before = _unwrapped_bits(target)
        ckptfmt.load(stage.path(f"wrapped-{kind}"), State(weights=target, optimizer=again, data={}))
        saved, optimizer = made[kind]
        results[f"{kind} to {target_kind}"] = {
            "before": before, "after": _unwrapped_bits(target), "saved": _unwrapped_bits(saved),
            "state": bits(again.state_dict()["state"]), "saved_state": bits(optimizer.state_dict()["state"]),
        }  # fmt: skip
    return {"names": names, "results": results}


def meta_destination(stage: Stage) -> Any:
    path = stage.path("wrapped-plain")
    with torch.device("meta"):
        module = Tower(1)
    refused = attempt(lambda: ckptfmt.load(path, State(weights=module), allow=("unexpected",)))
    module.to_empty(device="cpu")
    for value in module.state_dict().values():
        value.zero_()
    before = weight_bits(module)
    ckptfmt.load(path, State(weights=module))
    with torch.device("meta"):
        unsaved = Tower(1)
    save = attempt(
        lambda: ckptfmt.save(stage.path("meta"), State(weights=unsaved), step=1, deadline_s=120)
    )
    return {"refused": refused, "before": before, "after": weight_bits(module), "save": save}


# --- a run that goes on ---------------------------------------------------------------------------


class _Run(NamedTuple):
    module: nn.Module
    optimizer: torch.optim.AdamW
    scheduler: Any
    state: State


def _training(stage: Stage, seed: int) -> _Run:
    torch.manual_seed(seed)
    inner = nn.Sequential(
        nn.Linear(6, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)
    )
    module = DistributedDataParallel(inner)
    torch.manual_seed(seed + 10 * stage.rank)  # dropout differs between ranks
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=6)
    sampler = ckptfmt.Sampler(64, global_batch=8, seed=3)
    state = State(
        weights=module,
        optimizer=optimizer,
        data=sampler,
        config={"lr": 0.01},
        extra={"scheduler": scheduler},
    )
    return _Run(module, optimizer, scheduler, state)


def _train(run: _Run, steps: range) -> Any:
    module, optimizer, scheduler, state = run
    rows = torch.randn(64, 6, generator=torch.Generator().manual_seed(5))
    losses = []
    batches = iter(state.data)  # type: ignore[call-overload]
    for step in steps:
        samples = next(batches)
        loss = (module(rows[list(samples)]) ** 2).mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        state.data.commit(step + 1)  # type: ignore[attr-defined]
        losses.append([bits(loss), list(map(int, samples))])
    weights = weight_bits(module)
    return {
        "losses": losses,
        "weights": weights,
        "state": optimizer_bits(optimizer, module),
        "lr": scheduler.get_last_lr(),
    }


def train_and_save(stage: Stage) -> Any:
    run = _training(stage, 1)
    first = _train(run, range(3))
    ckptfmt.save(stage.path("training"), run.state, step=3)
    return {"first": first, "later": _train(run, range(3, 6))}


def load_and_train(stage: Stage) -> Any:
    run = _training(stage, 2)
    report = ckptfmt.load(stage.path("training"), run.state)
    assert isinstance(report, LoadReport)
    later = _train(run, range(3, 6))
    return {"later": later, "claim": report.claim, "lowered_by": report.lowered_by}


def train_without_load(stage: Stage) -> Any:
    """The control: the same last steps from another start."""
    run = _training(stage, 2)
    dist.barrier()
    return _train(run, range(3))
