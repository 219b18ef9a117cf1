"""What every experiment works with."""

from __future__ import annotations

import dataclasses

from benchmarks.rounds import Progress, Workplace
from benchmarks.state import Trainer


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """The state that is saved, the place for files, and whom to tell how far it is."""

    trainer: Trainer
    place: Workplace
    progress: Progress
