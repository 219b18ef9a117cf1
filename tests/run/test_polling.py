"""A reader that polls a run for the newest weights never gets two versions mixed, while another process saves and cleans up."""

import multiprocessing
import time
from pathlib import Path
from typing import Any

import numpy as np

import ckptfmt
from ckptfmt import Checkpointer, Run, Saving, State
from ckptfmt.errors import CkptError, Code

#: Errors by which a checkpoint that retention removes during a load may be refused.
REMOVED = {Code.CHECKPOINT_RETIRED, Code.FILE_MISSING, Code.NOT_COMMITTED, Code.BASE_MISSING}
STEPS = 24
LAYERS = 6


def save_steps(path: str, delta: Any, is_read: Any) -> None:
    """Save `STEPS` steps; all elements of a step have the step's number, but frozen ones.

    The second half waits until the reader has loaded a checkpoint of the first half.
    """
    weights: dict[str, Any] = {
        f"layer{number}": np.zeros((64, 1024), np.float32) for number in range(LAYERS)
    }
    weights["frozen"] = np.ones(1 << 18, np.float32)
    options = Saving(delta=delta, saver="thread", when_busy="wait")
    with Checkpointer(
        path, State(weights=weights, rng=False), every=1, keep=2, saving=options
    ) as saves:
        for step in saves.steps(STEPS):
            if step == STEPS // 2:
                is_read.wait(120)
            for number in range(LAYERS):
                weights[f"layer{number}"][:] = step + 1


def versions(weights: dict[str, Any]) -> set[float]:
    """The different values of the layers: one, unless versions are mixed."""
    return {
        float(value)
        for name, one in weights.items()
        if name != "frozen"
        for value in np.unique(one)
    }


def test_a_polling_reader_gets_one_version(tmp_path: Path) -> None:
    path = tmp_path / "run"
    spawning = multiprocessing.get_context("spawn")
    is_read = spawning.Event()
    writer = spawning.Process(target=save_steps, args=(str(path), "smallest", is_read))
    writer.start()
    seen: dict[int, str] = {}
    try:
        while True:
            is_over = not writer.is_alive()
            try:
                newest = Run(path).newest()
                weights: dict[str, Any] = {
                    f"layer{number}": np.zeros((64, 1024), np.float32) for number in range(LAYERS)
                }
                weights["frozen"] = np.zeros(1 << 18, np.float32)
                report = ckptfmt.load(
                    path / newest.name, State(weights=weights, rng=False), digest=newest.digest
                )
            except CkptError as error:
                assert not is_over, error
                assert not path.exists() or not newest_is_complete(path) or error.code in REMOVED, (
                    error
                )
                time.sleep(0.01)
                continue
            assert report.step == newest.step
            assert report.digest == newest.digest == seen.setdefault(newest.step, report.digest)
            assert versions(weights) == {newest.step}
            assert (weights["frozen"] == 1).all()
            is_read.set()
            if is_over:
                break
    finally:
        writer.kill()
        writer.join()
    assert [*seen] == sorted(seen)
    assert max(seen) == STEPS
    assert len(seen) > 1


def newest_is_complete(path: Path) -> bool:
    """Whether the run has a checkpoint at all."""
    return any(path.glob("step-*/manifest.json"))


def test_mixed_versions_would_be_seen() -> None:
    """Negative control of `versions`."""
    assert versions({"layer0": np.array([3.0, 3.0]), "frozen": np.ones(2)}) == {3}
    assert versions({"layer0": np.array([3.0, 3.0]), "layer1": np.array([3.0, 4.0])}) == {3, 4}
