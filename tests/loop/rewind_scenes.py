"""Scenes of two processes that go back together, without a restart."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ckptfmt
from tests.resharding.stage import Stage, optimizer_bits, weight_bits

STEPS = 20


def _make(kind: str, stage: Stage) -> Any:
    torch.manual_seed(7)
    net = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.25), nn.Linear(6, 2))
    if kind == "data_parallel":
        return DistributedDataParallel(net)
    mesh = init_device_mesh("cpu", (stage.world_size,))
    fully_shard(net[0], mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net


def _train(
    stage: Stage, kind: str, name: str, *, seed: int | None, saving: ckptfmt.Saving
) -> dict[str, Any]:
    """Train, and go back at random times if there is a seed; return the bits of each step."""
    net = _make(kind, stage)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    sampler = ckptfmt.Sampler(64, global_batch=4, seed=2)
    inputs: Any = torch.randn(64, 4, generator=torch.Generator().manual_seed(5))
    loader = torch.utils.data.DataLoader(inputs, batch_sampler=sampler)
    state = ckptfmt.State(weights=net, optimizer=optimizer, data=sampler, config={})
    chance = random.Random(seed)  # the same on both processes
    rows: dict[int, str] = {}
    reads = []
    with ckptfmt.Checkpointer(
        stage.path(name), state, every=3, saving=saving, job=ckptfmt.Job(deadline_s=60.0)
    ) as checkpointer:
        torch.manual_seed(11 + stage.rank)
        batches = iter(loader)
        for step in checkpointer.steps(STEPS):
            loss = net(next(batches)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            rows[step] = loss.item().hex()
            if seed is not None and step > 3 and checkpointer.rewinds < 5 and chance.random() < 0.4:
                to = None if chance.random() < 0.6 else chance.randrange(3, step + 1)
                reads.append(checkpointer.rewind(to).reads.memory_nbytes)
        report = checkpointer.load_report
    return {
        "rows": rows,
        "weights": weight_bits(net),
        "optimizer": optimizer_bits(optimizer, net),
        "streams": torch.get_rng_state().numpy().tobytes().hex(),
        "rewinds": checkpointer.rewinds,
        "from memory": sum(map(bool, reads)),
        "evidence": None if report is None else report.evidence,
        "claim": None if report is None else report.claim,
    }


def _compare(stage: Stage, kind: str) -> Any:
    right = _train(stage, kind, f"{kind}-right", seed=None, saving=ckptfmt.Saving(saver="inline"))
    savings = {
        "process": ckptfmt.Saving(),
        "deltas": ckptfmt.Saving(delta="auto"),
        "inline": ckptfmt.Saving(saver="inline"),
        "snapshots": ckptfmt.Saving(snapshot_every=2),
    }
    differences = {}
    told = {}
    for number, (name, saving) in enumerate(savings.items()):
        found = _train(stage, kind, f"{kind}-{name}", seed=number, saving=saving)
        differences[name] = [
            key for key in ("rows", "weights", "optimizer", "streams") if found[key] != right[key]
        ]
        told[name] = [found[key] for key in ("rewinds", "claim", "evidence", "from memory")]
    return {"differences": differences, "told": told}


def data_parallel(stage: Stage) -> Any:
    return _compare(stage, "data_parallel")


def sharded(stage: Stage) -> Any:
    return _compare(stage, "sharded")


def alarm_of_one(stage: Stage, saving: ckptfmt.Saving | None = None) -> Any:
    """A NaN that only process 1 sees takes both processes back, and both leave the samples out."""
    net = _make("data_parallel", stage)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    sampler = ckptfmt.Sampler(64, global_batch=4, seed=2)
    triggers = ckptfmt.Triggers("rewind")
    state = ckptfmt.State(weights=net, optimizer=optimizer, data=sampler, config={})
    samples = []
    with ckptfmt.Checkpointer(
        stage.path("alarm" if saving is None else "alarm-and-snapshots"), state,
        every=2 if saving is None else 4, stop=ckptfmt.Stop(triggers=triggers), saving=saving,
        job=ckptfmt.Job(deadline_s=60.0),
    ) as checkpointer:  # fmt: skip
        batches = iter(sampler)
        for step in checkpointer.steps(8):
            if saving is not None and checkpointer._handle is not None:
                checkpointer._handle.wait_over(60)  # a snapshot needs a free slot
            found = next(batches)
            net(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            samples.append((step, found))
            is_bad = stage.rank == 1 and step == 5 and not checkpointer.rewinds
            triggers.feed(loss=float("nan") if is_bad else 1.0)
    return {
        "rewinds": checkpointer.rewinds,
        "samples": samples,
        "weights": weight_bits(net),
        "skips": [(skip["range"], skip["reason"]) for skip in sampler.state_dict()["skips"]],
    }


def alarm_with_snapshots(stage: Stage) -> Any:
    return alarm_of_one(stage, ckptfmt.Saving(snapshot_every=1))
