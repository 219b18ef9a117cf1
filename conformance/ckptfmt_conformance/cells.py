"""Trajectories as cases: a bridge from `ckptfmt_conformance.trajectories` to the suite's cases.

The package `trajectories` imports a framework. Hence it is imported only when a trajectory is asked
for.
"""

from __future__ import annotations

import dataclasses
import importlib
import random
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from ckptfmt_conformance.cases import Case, Expectation, select_cases

__all__ = [
    "ABSENT",
    "PREFIX",
    "WITNESSED",
    "draw_witnessed",
    "find_cases",
    "judge_witnessed",
    "list_cases",
    "run_cell",
]

#: The prefix of a cell's id.
PREFIX: Final = "trajectory/"
#: The id of the substitute for all cells where trajectories aren't available.
ABSENT: Final = "trajectory/all"
#: The prefix of the id of a cell trained and judged by the suite's own process.
WITNESSED: Final = "trajectory/witnessed/"
_MODULE: Final = "ckptfmt_conformance.trajectories"
#: How many witnessed cells a seed draws.
_WITNESSED_COUNT: Final = 2


def find_cases(patterns: Sequence[str]) -> tuple[Case, ...]:
    """Return the cells whose id fits a pattern; all cells if `patterns` is empty.

    No cell is listed, and no framework is imported, where no pattern can fit the id of a cell.
    """
    begins = [re.split(r"[*?[]", pattern, maxsplit=1)[0] for pattern in patterns]
    if patterns and not any(
        PREFIX.startswith(begin) or begin.startswith(PREFIX) for begin in begins
    ):
        return ()
    return select_cases(list_cases(), patterns=patterns)


def list_cases() -> tuple[Case, ...]:
    """Return all cells as cases; where trajectories aren't available, one case with the reason."""
    try:
        cells = importlib.import_module(_MODULE).list_cells()
    except ImportError as error:
        reason = f"trajectories need more than is installed here: {error}"
        stand_in = Case(
            id=ABSENT,
            description="all trajectories",
            kind="trajectory",
            roles=(),
            expect=Expectation(outcome="accept"),
            why=reason,
        )
        return (stand_in,)
    return tuple(map(_case_of, cells))


def draw_witnessed(seed: int, patterns: Sequence[str] = ()) -> tuple[Case, ...]:
    """Return drawn witnessed cells, as cases.

    Return () where trajectories aren't available.
    """
    try:
        cells = importlib.import_module(f"{_MODULE}.witness").list_witnessed()
    except ImportError:
        return ()
    drawn = random.Random(seed).sample(cells, min(_WITNESSED_COUNT, len(cells)))
    cases = [_case_of(cell) for cell in drawn]
    witnessed = [
        dataclasses.replace(
            case,
            id=WITNESSED + case.id.removeprefix(PREFIX),
            description=f"{case.description}, trained and judged by the suite's own process",
            request={**(case.request or {}), "processes": 1, "witnessed": True},
        )
        for case in cases
    ]
    return select_cases(witnessed, patterns=patterns)


def judge_witnessed(case: Case, ask: Callable[[str, Mapping[str, Any]], None]) -> str | None:
    """Train a cell in this process while `ask` has the adapter save and load the state.

    Returns: the divergence of the restored state; None where there is none.
    """
    module = importlib.import_module(f"{_MODULE}.witness")
    wanted = case.id.removeprefix(WITNESSED)
    (cell,) = (cell for cell in module.list_witnessed() if cell.id == wanted)
    found: str | None = module.judge_witnessed(cell, ask)
    return found


def _case_of(cell: Any) -> Case:
    return Case(
        id=PREFIX + str(cell.id),
        description=str(getattr(cell, "description", "") or cell.id),
        kind="trajectory",
        roles=(),
        features=tuple(cell.features),
        request={
            "claim": str(cell.claim),
            "tier": str(cell.tier),
            "processes": int(getattr(cell, "processes", 0)),
        },
        expect=Expectation(outcome="accept"),
        bug_class="TRAJECTORY",
        why="a run that resumes isn't the same run",
    )


def run_cell(adapter: Any, case_id: str, directory: Path) -> Mapping[str, Any]:
    """Run a cell with an adapter's checkpoints, and return status, divergence and seconds.

    Raises: ImportError; any exception of the adapter.
    """
    make = getattr(adapter, "checkpointing", None)
    if make is None:
        return {
            "status": "SKIPPED",
            "divergence": "the adapter has no checkpointing()",
            "seconds": 0.0,
        }
    module = importlib.import_module(_MODULE)
    wanted = case_id.removeprefix(PREFIX)
    cell = next(cell for cell in module.list_cells() if str(cell.id) == wanted)
    checkpointing = make()
    result = module.run_cell(cell, checkpointing, directory)
    status = str(getattr(result.status, "value", result.status))
    return {"status": status, "divergence": result.divergence, "seconds": float(result.seconds)}
