"""Neutral cases, resources, and results."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Final

from ckptfmt_conformance.judge import Status
from ckptfmt_conformance.neutral.peer import Peer

__all__ = ["FULL", "QUICK", "Bench", "Effort", "NeutralCase", "Result", "Status", "Verdict"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """The amount of testing.

    Attributes:
        flips_per_file: the number of regions of each file in which a bit is flipped.
        cuts_per_file: the number of places where each file is cut, and where zeros begin.
        kills: the number of kills during a save by the clock, and the number of kills by
            file-system events.
        async_rounds: the number of saves during which tensors are changed.
        async_nbytes: the size of each such save, in bytes.
        killed_nbytes: the size of a killed save, in bytes.
        timeout_s: the time limit of a case, in seconds.
    """

    flips_per_file: int
    cuts_per_file: int
    kills: int
    async_rounds: int
    async_nbytes: int
    killed_nbytes: int
    timeout_s: float


FULL: Final = Effort(
    flips_per_file=64,
    cuts_per_file=12,
    kills=12,
    async_rounds=5,
    async_nbytes=64 << 20,
    killed_nbytes=32 << 20,
    timeout_s=300,
)
QUICK: Final = Effort(
    flips_per_file=12,
    cuts_per_file=4,
    kills=4,
    async_rounds=2,
    async_nbytes=8 << 20,
    killed_nbytes=4 << 20,
    timeout_s=120,
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """The resources of a case.

    Attributes:
        scratch: an empty directory of the case's own.
        effort: the amount of testing.
        note: records the current trial, which is reported if the process dies.
    """

    scratch: Path
    effort: Effort
    note: Callable[[str], None]

    def place(self, name: str) -> Path:
        """Return the path of a checkpoint in a new directory for that checkpoint only."""
        (self.scratch / name).mkdir()
        return self.scratch / name / "checkpoint"


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """The finding of a case.

    Attributes:
        status: the status of the case.
        seen: the observation, in one line.
    """

    status: Status
    seen: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NeutralCase:
    """A question to any checkpoint library.

    Attributes:
        id: the case's name.
        asked: the procedure.
        passes, fails, unsupported: the criteria for each status.
        judge: runs the case.
        imports: slow modules for the case's processes. They are imported once, before the
            processes are forked.
    """

    id: str
    asked: str
    passes: str
    fails: str
    unsupported: str
    judge: Callable[[Peer, Bench], Verdict]
    imports: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of a case for a peer.

    Attributes:
        peer: the peer's name, as in ``package.module:Class``.
        case: the case's id.
        status: the status of the case.
        seen: the observation, in one line.
        remark: a statement of the library's makers, with the place; "" for none.
    """

    peer: str
    case: str
    status: Status
    seen: str
    remark: str = ""
