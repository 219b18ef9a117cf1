"""Ledger entries: where the time of one launch of a run went, as its process 0 measured it. Spec: REQ-RUN-043."""

from __future__ import annotations

import dataclasses
from typing import Any, Final

from ckptfmt import limits
from ckptfmt.documents.canonical import dump_document, parse_document
from ckptfmt.documents.run import launch_name, parse_launch_name
from ckptfmt.errors import Code, err

#: The directory of a run that holds the entries.
LEDGER: Final = "ledger"


def ledger_path(launch: int) -> str:
    """Return the path of a launch's entry in the run.

    >>> ledger_path(3)
    'ledger/0003.json'
    """
    return f"{LEDGER}/{launch_name(launch)}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LaunchTimes:
    """Where the time of a launch went until it was measured, in milliseconds; no two of these overlap.

    Attributes:
        initialising: from the start of the process until the first step began, less waiting and restoring.
        waiting: for saves of earlier launches that were not committed yet.
        restoring: choosing, verifying and loading what the launch resumed from.
        training: since the first step began, less blocked and lost.
        blocked: the training stood still for saves.
        lost: by how much longer the steps beside saves took than other steps.
    """

    initialising: int = 0
    waiting: int = 0
    restoring: int = 0
    training: int = 0
    blocked: int = 0
    lost: int = 0

    @property
    def in_training(self) -> int:
        """Since the first step began."""
        return self.training + self.blocked + self.lost


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEntry:
    """What is recorded of the time of one launch; each later measurement takes the place of the one before.

    Attributes:
        run_id: of the run.
        launch: number of the launch.
        started_unix_ms: when process 0 was started, in milliseconds since 1970.
        measured_unix_ms: until when the times were measured.
        ended_unix_ms: when process 0 was gone, or had closed the run; None where nobody saw it.
        first_step: steps done when the first step of the launch began.
        step: steps done when the times were measured.
        save_count: saves that were begun, that one among them at whose begin it was measured.
        commit_count: saves of which it is known how long they took to be committed.
        committing_ms: how long these took, in all.
        times: where the time went.
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
        """Where it lies in the run."""
        return ledger_path(self.launch)

    def dump(self) -> bytes:
        """Return the bytes of the entry."""
        members = dataclasses.asdict(self)
        return dump_document(
            {
                "type": "ledger",
                "format_version": limits.FORMAT_VERSION,
                "features": {"reader": [], "writer": []},
                "times_ms": members.pop("times"),
                **members,
            }
        )

    @classmethod
    def parse(cls, content: bytes, *, where: str) -> LedgerEntry:
        """Return the entry of a file.

        Raises: FormatError (RUN_MISMATCH where the number isn't that of the file's name), IntegrityError,
            UnsupportedError.
        """
        signed, _ = parse_document(content, where=where, types=("ledger",))
        if parse_launch_name(where.rpartition("/")[2]) != signed["launch"]:
            detail = f"the entry is that of launch {signed['launch']}"
            raise err(Code.RUN_MISMATCH, detail, where=where, requirement="REQ-RUN-043")
        members: dict[str, Any] = {key.name: signed[key.name] for key in dataclasses.fields(cls) if key.name != "times"}
        return cls(**members, times=LaunchTimes(**signed["times_ms"]))
