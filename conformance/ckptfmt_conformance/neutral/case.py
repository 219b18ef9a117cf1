"""One neutral case, what it may use, and what it finds."""

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
    """How much is tried.

    Attributes:
        flips_per_file: regions of each file in which a bit is flipped.
        cuts_per_file: places at which each file is cut, and from which on it is zeros.
        kills: moments at which a process is killed in mid-save, by the clock; as many again by what it does.
        async_rounds: saves whose tensors are changed.
        async_nbytes: size of each of them, in bytes.
        killed_nbytes: size of a save that is killed, in bytes.
        timeout_s: for one case, in seconds.
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
    """What a case is given.

    Attributes:
        scratch: an empty directory of its own.
        effort: how much to try.
        note: take note of what is being tried: told if the process dies of it.
    """

    scratch: Path
    effort: Effort
    note: Callable[[str], None]

    def place(self, name: str) -> Path:
        """Return the path of a checkpoint, alone in a new directory, so that all files there are its own."""
        (self.scratch / name).mkdir()
        return self.scratch / name / "checkpoint"


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """What a case found.

    Attributes:
        status: how it ended.
        seen: what was seen, in one line.
    """

    status: Status
    seen: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NeutralCase:
    """One question that can be put to any checkpoint library.

    Attributes:
        id: its name.
        asked: what is done.
        passes, fails, unsupported: what counts as which.
        judge: ask it.
        imports: modules that its processes need, and that are slow to import: it is done once, before they are forked.
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
    """One case put to one peer.

    Attributes:
        peer: its name, as in ``package.module:Class``.
        case: its id.
        status: how it ended.
        seen: what was seen.
        remark: what the library's makers say about it, with the place; empty for nothing.
    """

    peer: str
    case: str
    status: Status
    seen: str
    remark: str = ""
