"""Ledger entries: the use of time in one launch of a run, as measured by its process 0.

Spec: REQ-RUN-043.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final

from ckptfmt.documents.canonical import dump_document, head_of
from ckptfmt.documents.run import launch_name, parse_of_launch

#: The directory of a run with the entries.
LEDGER: Final = "ledger"


def ledger_path(launch: int) -> str:
    """Return the path of a launch's entry in the run.

    >>> ledger_path(3)
    'ledger/0003.json'
    """
    return f"{LEDGER}/{launch_name(launch)}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LaunchTimes:
    """The use of a launch's time until the measurement, in milliseconds. The parts don't overlap.

    Attributes:
        initialising: time from the start of the process to the first step, without waiting and
            restoring.
        waiting: time spent waiting for uncommitted saves of earlier launches.
        restoring: time spent choosing, verifying and loading the checkpoint to resume from.
        training: time since the first step began, without blocked and lost time.
        blocked: time in which the training stood still for saves.
        lost: additional time of steps during saves, compared with other steps.
    """

    initialising: int = 0
    waiting: int = 0
    restoring: int = 0
    training: int = 0
    blocked: int = 0
    lost: int = 0

    @property
    def in_training(self) -> int:
        """Time since the first step began, in milliseconds."""
        return self.training + self.blocked + self.lost


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEntry:
    """The record of one launch's time. Each measurement replaces the previous one.

    Attributes:
        run_id: the run's id.
        launch: number of the launch.
        started_unix_ms: start of process 0, in milliseconds since 1970.
        measured_unix_ms: time of the measurement, in milliseconds since 1970.
        ended_unix_ms: end of process 0, or time at which it closed the run, in milliseconds since
            1970; None if unknown.
        first_step: number of steps done when the launch's first step began.
        step: number of steps done at the measurement.
        save_count: number of saves begun, including a save that begins at the measurement.
        commit_count: number of saves with a known duration from begin to commit.
        committing_ms: sum of these durations.
        times: the use of the time.
    """

    run_id: str
    launch: int
    started_unix_ms: int
    measured_unix_ms: int
    ended_unix_ms: int | None
    first_step: int
    step: int
    save_count: int
    commit_count: int
    committing_ms: int
    times: LaunchTimes

    @property
    def path(self) -> str:
        """The entry's path in the run."""
        return ledger_path(self.launch)

    def dump(self) -> bytes:
        """Return the bytes of the entry."""
        members = dataclasses.asdict(self)
        return dump_document(
            {
                **head_of("ledger"),
                "times_ms": members.pop("times"),
                **members,
            }
        )

    @classmethod
    def parse(cls, content: bytes, *, where: str) -> LedgerEntry:
        """Return the entry of a file.

        Raises: FormatError (RUN_MISMATCH if the number differs from the file's name),
            IntegrityError, UnsupportedError.
        """
        signed = parse_of_launch(content, where=where, kind="ledger", requirement="REQ-RUN-043")
        members: dict[str, Any] = {
            key.name: signed[key.name] for key in dataclasses.fields(cls) if key.name != "times"
        }
        return cls(**members, times=LaunchTimes(**signed["times_ms"]))
