"""Trainings with a pipeline that are killed at random moments, in forks of a process that has imported torch."""

import json
import multiprocessing
import random
import re
import runpy
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import ckptfmt
from ckptfmt.data.course import EMPTY, add_ledgers, ledger_of_samples, list_positions
from ckptfmt.data.cursor import Ledger
from ckptfmt.data.shuffle import sample_indices
from tests.spec.pages import ROOT

#: The page whose loop is killed.
PAGE = ROOT / "docs" / "rl.md"
#: Optimizers import torch._dynamo.
_FORKS = multiprocessing.get_context("forkserver")
_SLOW = [
    "torch",
    "torch._dynamo",
    "ckptfmt.checkpointer",
    "ckptfmt.adapters.torch",
    "ckptfmt.saving.background",
]
#: Longest time that a training may take to begin.
_WAIT_S = 240.0
#: Longest time that the last training may take: it trains on all prompts that are left.
_END_S = 4 * 3600.0


def script_of_the_page(*, inline: bool = True) -> str:
    """The loop of docs/rl.md; by default with a save of each step in the training's process."""
    (script,) = re.findall(
        r"^```python file=rl.py\n((?:.*\n)*?)^```$", PAGE.read_text("utf-8"), re.MULTILINE
    )
    kept = "every=5, keep=2"
    assert script.count(kept) == 1
    often = 'every=1, keep=2, saving=ckptfmt.Saving(saver="inline")'
    return str(script.replace(kept, often) if inline else script)


def _run(script: str, arguments: list[str]) -> None:
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


def _begun(run: Path) -> int:
    """The number of the run's launches."""
    return len(list((run / "launches").glob("*.json"))) if run.exists() else 0


def _last_step(run: Path) -> int:
    """The step of the newest checkpoint, which was saved by the newest launch if greater than before."""
    steps = [int(path.parent.name[5:13]) for path in run.glob("step-*/manifest.json")]
    return max(steps, default=-1)


def train(
    script: Path, run: Path, count: int, *, kills: int, seed: int, longest_s: float = 0.3
) -> int:
    """Run a training to its end, killed `kills` times before; return the number of saves between kills.

    Most kills wait for a save of the launch first, or the training would never begin; the others may
    hit the resume.
    """
    _FORKS.set_forkserver_preload(_SLOW)
    chance = random.Random(seed)
    killed = saved = 0
    while True:
        before = _last_step(run), _begun(run)
        process = _FORKS.Process(target=_run, args=(str(script), [str(run), str(count)]))
        process.start()
        try:
            if killed == kills:
                process.join(_END_S)
                assert not process.is_alive(), f"the last training isn't over after {_END_S:.0f} s"
            else:
                waits_for_save = chance.random() < 0.8
                deadline_s = time.monotonic() + _WAIT_S
                while process.is_alive() and time.monotonic() < deadline_s:
                    if _begun(run) > before[1] and not waits_for_save:
                        break
                    if _last_step(run) > before[0]:
                        saved += 1
                        break
                    time.sleep(0.003)
                process.join(chance.uniform(0, longest_s))
        finally:
            process.kill()
            process.join()
        if process.exitcode != -9:
            assert process.exitcode == 0, process.exitcode
            return saved
        killed += 1


def judge(run: Path, count: int) -> dict[str, int]:
    """Check the last checkpoint: each prompt of the epoch was trained once or discarded once.

    The fates are those that the loop counted; the ledgers are the cursor's. Neither knows the other.
    """
    with ckptfmt.Run(run).open() as checkpoint:
        fates: Any = np.asarray(checkpoint.extra["fates"])
        cursor: Any = dict(checkpoint.data)
    wrong = np.flatnonzero(fates.sum(axis=0) != 1)
    assert not len(wrong), (
        f"prompts {wrong[:9].tolist()} were used {fates.sum(axis=0)[wrong][:9]} times"
    )
    pipeline = cursor["pipeline"]
    assert all(position >= count for position in list_positions(pipeline["open"]))
    total = EMPTY
    for ledger, row in ((cursor["ledger"], fates[0]), (pipeline["discarded"], fates[1])):
        used = np.flatnonzero(row)
        assert Ledger(**ledger) == ledger_of_samples("data", 0, used)
        total = add_ledgers(total, Ledger(**ledger))
    order = sample_indices(count, seed=cursor["order"]["seed"], begin=0, end=count)
    assert total == ledger_of_samples("data", 0, order)
    return {"trained": int(fates[0].sum()), "discarded": int(fates[1].sum())}


if __name__ == "__main__":
    kills, folder = int(sys.argv[1]), Path(sys.argv[2])
    script = folder / "rl.py"
    script.write_text(script_of_the_page(), "utf-8")
    begin_s = time.monotonic()
    count = 16 * kills
    saved = train(script, folder / "run", count, kills=kills, seed=1, longest_s=0.05)
    found = judge(folder / "run", count)
    sys.stdout.write(
        json.dumps(
            {"kills": kills, "with_saves": saved, "s": round(time.monotonic() - begin_s), **found}
        )
    )
