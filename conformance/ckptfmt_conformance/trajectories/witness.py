"""Witnessed trajectories: the suite's process trains and judges, the adapter's saves and loads.

For all other trajectories, the process with the adapter's code trains and compares, and could
report anything. Here, the adapter's process gets the values of a state, and saves them. A second
process of the adapter, without knowledge of the values and of their seed, loads the checkpoint and
returns the values. The suite trains and compares.
"""

from __future__ import annotations

import random
import secrets
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ckptfmt_conformance.trajectories.cells import list_cells
from ckptfmt_conformance.trajectories.job import TrainingJob, seed_streams
from ckptfmt_conformance.trajectories.play import own_streams
from ckptfmt_conformance.trajectories.protocol import Cell
from ckptfmt_conformance.trajectories.recipes import STEPS

__all__ = ["answer_witness", "judge_witnessed", "list_witnessed"]

#: Asks the adapter's process for a save or a load; raises `RuntimeError` with the failure.
Ask = Callable[[str, Mapping[str, Any]], None]


def list_witnessed() -> list[Cell]:
    """Return the cells that can be witnessed.

    Such a cell has one process, one cut at a step's end, and no optional feature.
    """
    return [
        cell
        for cell in list_cells()
        if cell.claim == "T1" and cell.id.endswith("/boundary") and _is_plain(cell)
    ]


def _is_plain(cell: Cell) -> bool:
    return not (cell.features or cell.control or cell.processes or cell.target or cell.kill)


def judge_witnessed(cell: Cell, ask: Ask) -> str | None:
    """Train a cell in this process, with save and load by the adapter's processes.

    Returns: the first difference; None for none.
    """
    seed, ((step, _),) = secrets.randbelow(1 << 31), cell.cuts
    with own_streams(), tempfile.TemporaryDirectory(prefix="ckptfmt-conformance-") as folder:
        given, returned, path = (
            Path(folder) / name for name in ("given.pt", "returned.pt", "checkpoint")
        )
        job = TrainingJob(cell.recipe, seed)
        while job.position < (step, 0):
            job.advance()
        _dump(job, given)
        ask("save", {"cell": cell.id, "values": str(given), "path": str(path), "step": step})
        given.unlink()  # from here on, only the checkpoint has the values
        facts = {}
        while job.position < (STEPS, 0):
            job.advance()
            facts[job.position] = job.facts()
        ask("load", {"cell": cell.id, "values": str(returned), "path": str(path)})
        again = TrainingJob(cell.recipe, secrets.randbelow(1 << 31))
        seed_streams(secrets.randbelow(1 << 31))
        _take(again, returned)
        if again.position != (step, 0):
            return f"what was loaded stands at step {again.position[0]} instead of {step}"
        for position, due in facts.items():
            again.advance()
            found = again.facts()
            for name in sorted(due.keys() | found.keys()):
                if not _are_same(due.get(name), found.get(name)):
                    return f"step {position[0]}: {name} differs from the run without interruption"
    return None


def answer_witness(checkpointing: Any, request: Mapping[str, Any]) -> None:
    """Save the given values, or load and return the values.

    The adapter's process calls this function.

    Raises: any exception of the implementation.
    """
    (cell,) = (one for one in list_witnessed() if one.id == request["cell"])
    job = TrainingJob(cell.recipe, secrets.randbelow(1 << 31))
    seed_streams(secrets.randbelow(1 << 31))
    values = Path(request["values"])
    if request["do"] == "save":
        _take(job, values)
        checkpointing.save(request["path"], job.state(), request["step"])
    else:
        checkpointing.load(request["path"], job.state())
        _dump(job, values)


def _are_same(due: object, found: object) -> bool:
    if isinstance(due, torch.Tensor) and isinstance(found, torch.Tensor):
        return due.dtype == found.dtype and due.shape == found.shape and torch.equal(due, found)
    return type(due) is type(found) and due == found


def _dump(job: TrainingJob, path: Path) -> None:
    """Write all values of a job."""
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002 - a stream under test
    values: dict[str, Any] = {
        name: _values_of(value)
        for name, value in job.state().items()
        if name not in ("config", "rng")
    }
    values["augment"] = job.augment.get_state()
    values["streams"] = [
        random.getstate(),
        [kind, np.asarray(keys).tolist(), *rest],
        torch.get_rng_state(),
    ]
    torch.save(values, path)


def _values_of(value: Any) -> dict[str, Any]:
    return dict(value.state_dict())


def _take(job: TrainingJob, path: Path) -> None:
    """Restore a job from written values."""
    values = torch.load(path, weights_only=True)
    state: dict[str, Any] = job.state()
    for name, value in state.items():
        if name not in ("config", "rng"):
            value.load_state_dict(values[name])
    job.augment.set_state(values["augment"])
    python, numpy, of_torch = values["streams"]
    random.setstate((python[0], tuple(python[1]), python[2]))
    kind, keys, *rest = numpy
    np.random.set_state((kind, np.asarray(keys, np.uint32), *rest))  # noqa: NPY002 - the same
    torch.set_rng_state(of_torch)
