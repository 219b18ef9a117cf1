"""Scenes of deltas: saved by FSDP2, each rank against its own base; loaded by other numbers of ranks."""

from __future__ import annotations

from typing import Any

from torch.distributed.device_mesh import init_device_mesh

import ckptfmt
from ckptfmt import Checkpointer, State
from ckptfmt.delta import block_coder as coding
from ckptfmt.loading.load_report import LoadReport
from tests.resharding.sharded_scenes import adamw, both, shard, train
from tests.resharding.stage import Stage

#: Full, then deltas as long as there are steps.
DELTA = {"mode": "smallest", "restore_budget": 100.0}
STEPS = 4


def save_deltas(stage: Stage) -> Any:
    """Train and save at each step."""
    # Its tensors are small, and it is about what becomes of encoded blocks. In this process alone,
    # which ends with it.
    vars(coding)["SMALL_NBYTES"] = 0
    module = shard(1, init_device_mesh("cpu", (stage.world_size,)))
    optimizer = adamw(module)
    state = State(weights=module, optimizer=optimizer, data={})
    profiles, held = [], []
    with Checkpointer(stage.path("deltas"), state, delta=DELTA, saver="thread") as ck:
        for step in range(STEPS):
            train(module, optimizer, range(step, step + 1), stage.rank)
            handle = ck.save(step=step + 1)
            assert handle is not None
            report = handle.wait()
            assert report is not None
            profiles.append(report.profile)
            held.append(both(module, optimizer))
    return {"profiles": profiles, "held": held}


def load_deltas(stage: Stage) -> Any:
    """Load each step into a fresh module and a fresh optimizer."""
    held = []
    for step in range(1, STEPS + 1):
        module = shard(2, init_device_mesh("cpu", (stage.world_size,)))
        optimizer = adamw(module)
        path = f"{stage.path('deltas')}/step-{step:08d}-l0001"
        report = ckptfmt.load(path, State(weights=module, optimizer=optimizer, data={}))
        assert isinstance(report, LoadReport)
        held.append(both(module, optimizer))
    return {"held": held}


def go_on_with_deltas(stage: Stage) -> Any:
    """Another number of ranks resumes the run: its first save is full, since the layout is another one."""
    module = shard(3, init_device_mesh("cpu", (stage.world_size,)))
    optimizer = adamw(module)
    profiles = []
    with Checkpointer(stage.path("deltas"), State(weights=module, optimizer=optimizer, data={}), delta=DELTA, keep=1,
                      saver="thread") as ck:  # fmt: skip
        resumed = ck.step
        ck.restore_rng()
        for step in range(ck.step, ck.step + 2):
            train(module, optimizer, range(step, step + 1), stage.rank)
            handle = ck.save(step=step + 1)
            assert handle is not None
            report = handle.wait()
            assert report is not None
            profiles.append(report.profile)
    return {"resumed": resumed, "profiles": profiles, "held": both(module, optimizer)}
