"""Costs of many small tensors: seconds and memory of saves, loads and resumes, by tensor count.

``python -m benchmarks.tensors ACTION DIRECTORY COUNT`` runs an action in this process, and prints
the costs: ``save`` and ``load`` a checkpoint, or ``run`` a `Checkpointer` with a saver process, and
``resume`` its run.
"""

from __future__ import annotations

import hashlib
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

import torch

import ckptfmt
from benchmarks.figures import summarize
from benchmarks.machine import rss_unfiled_nbytes
from benchmarks.record import Outcome
from benchmarks.rounds import Progress, Workplace, remove

#: The numbers of tensors; numbers above the requested maximum are left out.
_COUNTS: Final = (10_000, 100_000, 1_000_000)
MOST: Final = _COUNTS[-1]
_ROOT: Final = Path(__file__).parents[1]
#: A parameter under AdamW: weights, both moments, and the step count.
_TENSORS_OF_ONE: Final = 4
_SHAPE: Final = (4, 4)
#: The number of parameters in a block of layers.
_BLOCK: Final = 500


def measure_tensors(
    most: int, *, rounds: int | None, place: Workplace, progress: Progress
) -> Outcome:
    """Measure every count up to `most`, each action in a separate process."""
    counts = [count for count in _COUNTS if count <= most] or [most]
    rounds = rounds or 1
    found: dict[str, list[dict[str, Any]]] = {}
    for count in counts:
        for _ in range(rounds):
            progress.say(f"tensors: {count}")
            found.setdefault(f"{count}_tensors", []).append(_measure_count(count, place))
    columns = {
        f"{action}_{name}_of_{rows[0]['count']}": [row[action][name] for row in rows]
        for rows in found.values()
        for action, told in rows[0].items()
        if isinstance(told, dict)
        for name in told
        if name.endswith("_s")
    }
    last = found[f"{counts[-1]}_tensors"]
    return Outcome(
        workload={
            "nbytes": last[0]["nbytes"],
            "tensors": counts[-1],
            "counts": counts,
            "state": (
                "4 x 4 matrices under AdamW; four tensors each: the matrix, both moments,"
                " and the count of steps"
            ),
        },
        settings={"ckptfmt": {"saver": "process", "slots": 2, "overlap": True, "delta": "off"}},
        repeats={name: len(rows) for name, rows in found.items()},
        rounds=found,
        figures={name: summarize(values) for name, values in columns.items()},
        ratios={},
        goals={},
        memory={
            f"{action}_{count}_tensors_{name}": max(
                row[action][name] for row in found[f"{count}_tensors"]
            )
            for count in counts
            for action in ("save", "load", "run", "resume")
            for name in ("before_nbytes", "peak_nbytes")
        },
        notes={
            "processes": "each action in one of its own, which makes the state first",
            "before_nbytes": (
                "what it had of memory before the action: Python, torch, and the state"
            ),
            "peak_nbytes": "the most it had resident, that before included, and the two slots",
            "cpu_s": (
                "seconds of processor of this process, all its threads; what waits for a"
                " busy core isn't in them"
            ),
        },
        cache="warm: what is loaded was written just before",
    )


def _measure_count(count: int, place: Workplace) -> dict[str, Any]:
    alone = place.fresh("alone")
    run = place.fresh("run")
    told = {action: _run_child(action, alone, count) for action in ("save", "load")}
    remove(alone)
    told |= {action: _run_child(action, run, count) for action in ("run", "resume")}
    remove(run)
    for saved, loaded in (("save", "load"), ("run", "resume")):
        assert told[saved].pop("digest") == told[loaded].pop("digest"), (
            f"{loaded} of {count} tensors isn't {saved}"
        )
    return {"count": count, "nbytes": told["save"].pop("nbytes"), **told}


def _run_child(action: str, directory: Path, count: int) -> Any:
    command = [
        sys.executable,
        "-m",
        "benchmarks.tensors",
        action,
        str(directory.resolve()),
        str(count),
    ]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{action} of {count} tensors failed:\n{done.stderr}")
    return json.loads(done.stdout)


class _Training:
    """A model of many small parameters, and its optimizer after `step_count` steps."""

    def __init__(self, count: int, *, step_count: int) -> None:
        rest = max(1, count // _TENSORS_OF_ONE)
        blocks = []
        while rest:
            size = min(rest, _BLOCK)
            blocks.append(torch.nn.ParameterList(torch.empty(_SHAPE) for _ in range(size)))
            rest -= size
        self.model = torch.nn.ModuleList(blocks)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        with torch.no_grad():
            for number, parameter in enumerate(self.model.parameters()):
                parameter.fill_(float(number))
        for _ in range(step_count):
            self.step()

    def state(self) -> ckptfmt.State:
        """Return the state to save or load."""
        return ckptfmt.State(weights=self.model, optimizer=self.optimizer)

    def step(self) -> None:
        """Run a step of the optimizer."""
        for number, parameter in enumerate(self.model.parameters()):
            parameter.grad = torch.full(_SHAPE, float(number % 7))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def tensors(self) -> Iterable[torch.Tensor]:
        """Yield all tensors."""
        for parameter in self.model.parameters():
            yield parameter
            yield from self.optimizer.state[parameter].values()

    def digest(self) -> str:
        """Return a digest of every bit."""
        found = hashlib.sha256()
        for tensor in self.tensors():
            found.update(tensor.detach().numpy().tobytes())
        return found.hexdigest()


class _Clock:
    """Seconds and processor seconds of consecutive activities."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {"before_nbytes": rss_unfiled_nbytes()}

    def time(self, name: str, do: Callable[[], Any]) -> Any:
        began_s = time.perf_counter()
        cpu_s = time.process_time()
        returned = do()
        self.found[f"{name}_s"] = time.perf_counter() - began_s
        self.found[f"{name}_cpu_s"] = time.process_time() - cpu_s
        return returned

    def end(self) -> dict[str, Any]:
        return {
            **self.found,
            "peak_nbytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }


def _save(directory: Path, count: int) -> dict[str, Any]:
    training = _Training(count, step_count=1)
    clock = _Clock()
    clock.time("committed", lambda: ckptfmt.save(directory, training.state(), step=1))
    nbytes = sum(tensor.nbytes for tensor in training.tensors())
    return {**clock.end(), "digest": training.digest(), "nbytes": nbytes}


def _load(directory: Path, count: int) -> dict[str, Any]:
    training = _Training(count, step_count=2)
    clock = _Clock()
    clock.time("loaded", lambda: ckptfmt.load(directory, training.state()))
    return {**clock.end(), "digest": training.digest()}


def _run(directory: Path, count: int) -> dict[str, Any]:
    training = _Training(count, step_count=1)
    clock = _Clock()
    with ckptfmt.Checkpointer(directory, training.state()) as checkpointer:
        clock.time("prepared", checkpointer.prepare)
        for name in ("first", "second"):
            clock.time(f"{name}_training_step", training.step)
            handle = clock.time(
                f"{name}_blocked", lambda: checkpointer.save(step=checkpointer.step + 1)
            )
            clock.time(f"{name}_rest", handle.wait)
            clock.found[f"{name}_committed_s"] = handle.times["COMMITTED"]
        clock.time("third_training_step", training.step)
    # The second save's digest: a fresh training runs the same steps without a save between them.
    return {**clock.end(), "digest": _Training(count, step_count=3).digest()}


def _resume(directory: Path, count: int) -> dict[str, Any]:
    training = _Training(count, step_count=0)
    clock = _Clock()
    checkpointer = ckptfmt.Checkpointer(directory, training.state())
    clock.time("loaded", checkpointer.restore)
    clock.time("prepared", checkpointer.restore_rng)
    checkpointer.close()
    return {**clock.end(), "digest": training.digest()}


_ACTIONS: Final[dict[str, Callable[[Path, int], dict[str, Any]]]] = {
    "save": _save,
    "load": _load,
    "run": _run,
    "resume": _resume,
}


def main(arguments: list[str]) -> None:
    """Run an action in this process, and print the costs."""
    action, directory, count = arguments
    print(json.dumps(_ACTIONS[action](Path(directory), int(count))))


if __name__ == "__main__":
    main(sys.argv[1:])
