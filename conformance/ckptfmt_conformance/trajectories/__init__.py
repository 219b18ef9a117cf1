"""Trajectories: an interrupted run must have the same bits of all state, at every step.

A cell trains a small model twice. The first run isn't interrupted. The second run is saved,
discarded, made anew from another seed, loaded, and continued. The cell compares the raw bytes of
all state that a step changes. The adapter provides a `Checkpointing` for saves and loads:

    for cell in list_cells():
        result = run_cell(cell, checkpointing, directory)

A checkpointing with the methods of `Sampling` is also judged by the format's order of samples, and
one with those of `ForeignLoading` by foreign loaders. For an `AsyncCheckpointing`, which saves
asynchronously, trainers are also killed during a save.

Cells of tier ``T-N`` are negative controls: after the load, some state is dropped or damaged. Such
a cell passes if the comparison finds and names the damage, and the damage changes the training.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from ckptfmt_conformance.trajectories.cells import list_cells
from ckptfmt_conformance.trajectories.gang import close_gang, play_in_gang
from ckptfmt_conformance.trajectories.killed import play_killed
from ckptfmt_conformance.trajectories.play import play
from ckptfmt_conformance.trajectories.protocol import (
    AsyncCheckpointing,
    Cell,
    CellResult,
    Checkpointing,
    PerRank,
)

__all__ = [
    "AsyncCheckpointing",
    "Cell",
    "CellResult",
    "Checkpointing",
    "PerRank",
    "close_gang",
    "list_cells",
    "run_cell",
]


def run_cell(cell: Cell, checkpointing: Checkpointing, directory: str | Path) -> CellResult:
    """Run a cell, and return its result.

    Failures of the implementation are results, and no exceptions.

    Cells of several processes share eight processes, which the first such cell starts. They end
    with the program, or by `close_gang`. Killed trainers have processes of their own. A script must
    call this function under ``if __name__ == "__main__"``, since the new processes import the
    script.

    Args:
        cell: a cell of `list_cells`.
        checkpointing: the judged implementation. For cells with several processes, its class must
            be importable there.
        directory: the parent of a new directory for checkpoints.

    Returns: a `CellResult`. The program's random-number streams are restored.
    """
    root = Path(directory)
    root.mkdir(parents=True, exist_ok=True)
    own = Path(tempfile.mkdtemp(prefix=f"{cell.id.replace('/', '-')}-", dir=root))
    if cell.kill:
        return play_killed(cell, checkpointing, own)
    return (
        play_in_gang(cell, checkpointing, own) if cell.processes else play(cell, checkpointing, own)
    )
