"""Scenes in which a rank keeps another time, finds its disk full, or dies in the middle of a save."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import ckptfmt
from ckptfmt import Checkpointer, State
from ckptfmt.errors import Code
from ckptfmt.store import LocalStore
from tests.resharding.stage import Stage, attempt, optimizer_bits, steps_without_model, weight_bits
from tests.stores.faults import Fault, FaultStore

#: For saves that run into it, in seconds.
SHORT_S = 5.0

# --- clocks ---------------------------------------------------------------------------------------

RATES = (1.0, 20.0, 0.0)


def _run_by_the_clock(stage: Stage, turn: int) -> Any:
    rate = RATES[(stage.rank + turn) % len(RATES)]
    begin_s = time.monotonic()
    saved = []
    checkpointer = Checkpointer(
        stage.path(f"clock-{turn}"),
        State(weights={"w": torch.ones(3)}, data={}),
        every="0.3s",
        deadline_s=60,
    )
    checkpointer._pace.clock = lambda: begin_s + (time.monotonic() - begin_s) * rate
    save = checkpointer._save

    def note(**options: Any) -> Any:
        handle = save(**options)
        if handle is not None:
            saved.append(handle.step)
        return handle

    checkpointer._save = note  # type: ignore[method-assign]
    with checkpointer:
        for _ in checkpointer.steps(40):
            time.sleep(0.02 + 0.01 * stage.rank)
    return {"saved": saved, "rate": rate}


def skewed_clocks(stage: Stage) -> Any:
    """Each of the rates has its turn on each of the ranks."""
    return [_run_by_the_clock(stage, turn) for turn in range(len(RATES))]


# --- a full disk ----------------------------------------------------------------------------------


def _on_full_disk(stage: Stage, name: str, *, path_end: str, deadline_s: float) -> Any:
    path = stage.path(name)
    inner = LocalStore(path, writable=True)
    fault = Fault(fail_at=1, sticky=True, operations=frozenset({"create"}), path_end=path_end)
    store = FaultStore(inner, fault, code=Code.NO_SPACE) if stage.rank == 1 else inner
    state = State(weights=nn.ParameterDict({f"w{stage.rank}": torch.ones(5)}))
    failed = attempt(lambda: ckptfmt.save(store, state, step=1, deadline_s=deadline_s))
    again = attempt(lambda: ckptfmt.save(inner, state, step=1, deadline_s=120))
    return {"failed": failed, "again": again, "fired": fault.fired_count}


def disk_full(stage: Stage) -> Any:
    """Shards don't fit, the note that says so does."""
    return _on_full_disk(stage, "full", path_end=".safetensors", deadline_s=120)


def disk_full_to_the_last_byte(stage: Stage) -> Any:
    """Not even the note fits: the others find out at the deadline."""
    return _on_full_disk(stage, "fuller", path_end="", deadline_s=SHORT_S)


# --- sudden death ---------------------------------------------------------------------------------


def _die_at(where: str) -> None:
    """Be killed when a file whose path begins so is about to be created."""
    create = LocalStore.create

    def create_or_die(self: LocalStore, path: str, chunks: Any) -> None:
        if path.startswith(where):
            os.kill(os.getpid(), signal.SIGKILL)
        create(self, path, chunks)

    LocalStore.create = create_or_die  # type: ignore[method-assign]


def _training(
    stage: Stage, seed: int, *, deadline_s: float = SHORT_S
) -> tuple[nn.Module, torch.optim.AdamW, Checkpointer]:
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    state = State(weights=module, optimizer=optimizer, data={"position": 0})
    checkpointer = Checkpointer(stage.path("run"), state, deadline_s=deadline_s, saver="inline")
    return module, optimizer, checkpointer


def _train(
    module: nn.Module, optimizer: torch.optim.AdamW, checkpointer: Checkpointer, total: int
) -> None:
    for step in checkpointer.steps(total):
        steps_without_model(module, optimizer, range(step, step + 1))


def _said(action: Callable[[], object]) -> Any:
    said = attempt(action)
    time.sleep(0.1)
    return said


def killed_in_mid_save(stage: Stage) -> Any:
    """Steps 0 to 2 are saved; at 4 rank 1 has written its shards, and dies before its part."""
    module, optimizer, checkpointer = _training(stage, 1)
    checkpointer.restore()
    _train(module, optimizer, checkpointer, 2)
    saved = [weight_bits(module), optimizer_bits(optimizer, module)]
    if stage.rank == 1:
        _die_at("parts/")
    # One save that fails ends no training: the next agreement misses the process, and the end tells
    # of the save.
    _train(module, optimizer, checkpointer, 4)
    missed = _said(checkpointer.save)
    died = _said(checkpointer.close)
    return {"saved": saved, "died": died, "missed": missed, "launch": checkpointer.launch.launch}  # type: ignore[union-attr]


def resume_after_death(stage: Stage) -> Any:
    """The next start finds step 2, and saves step 4."""
    module, optimizer, checkpointer = _training(stage, 2, deadline_s=120)
    before = [weight_bits(module), optimizer_bits(optimizer, module)]
    with checkpointer:
        step = checkpointer.step
        after = [weight_bits(module), optimizer_bits(optimizer, module)]
        _train(module, optimizer, checkpointer, 4)
    later = [weight_bits(module), optimizer_bits(optimizer, module)]
    return {"step": step, "before": before, "after": after, "later": later}


def killed_before_the_decision(stage: Stage) -> Any:
    """Rank 0 has everything, and dies before the manifest: nothing was saved, and the others say whom they miss."""
    module, optimizer, checkpointer = _training(stage, 3)
    checkpointer.restore()
    if stage.rank == 0:
        _die_at("manifest.json")
    _train(module, optimizer, checkpointer, 6)
    return _said(checkpointer.close)
