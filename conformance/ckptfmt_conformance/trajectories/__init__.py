"""Trajectories: is a run that was interrupted the same run, in every bit of all of its state, at every step?

A cell trains a small model twice: once without interruption, and once saved, thrown away, made anew from another seed,
loaded, and gone on with. What is compared is the raw bytes of everything a step changes. What saves and loads is a
`Checkpointing`, made by an adapter:

    for cell in list_cells():
        result = run_cell(cell, checkpointing, directory)

What also is a `Sampling` is judged by the format's order of samples, and what is a `ForeignLoading` by other loaders.
One that saves beside the training may be an `AsyncCheckpointing` as well; then trainers are killed while it saves.

Cells of tier ``T-N`` are negative controls: after the load something is taken away or damaged, and the cell passes
where that is seen, named, and changes what is learnt.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from ckptfmt_conformance.trajectories.cells import list_cells
from ckptfmt_conformance.trajectories.gang import close_gang, play_in_gang
from ckptfmt_conformance.trajectories.killed import play_killed
from ckptfmt_conformance.trajectories.play import play
from ckptfmt_conformance.trajectories.protocol import AsyncCheckpointing, Cell, CellResult, Checkpointing, PerRank

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
    """Run a cell, and say how it went; it never raises for what an implementation does.

    Cells of several processes share eight that the first of them starts. They end with the program, or by `close_gang`.
    Trainers that are killed have processes of their own. A script must call it under ``if __name__ == "__main__"``,
    since those processes import it, too.

    Args:
        cell: one of `list_cells`.
        checkpointing: what is judged; for cells with processes of their own, of a class that those can import.
        directory: where checkpoints may be written, in a directory of their own.

    Returns: a `CellResult`; the state of the program's random-number streams is as it was.
    """
    root = Path(directory)
    root.mkdir(parents=True, exist_ok=True)
    own = Path(tempfile.mkdtemp(prefix=f"{cell.id.replace('/', '-')}-", dir=root))
    if cell.kill:
        return play_killed(cell, checkpointing, own)
    return play_in_gang(cell, checkpointing, own) if cell.processes else play(cell, checkpointing, own)
