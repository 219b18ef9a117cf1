"""A rehearsal: a training that `ckptfmt rehearse` started in a scratch directory, for a few steps, and may kill."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import zlib
from pathlib import Path
from typing import Final, NoReturn, Self

from ckptfmt.errors import Code, err
from ckptfmt.store.protocol import Store

#: The environment variable by which the command tells a program what to rehearse.
VARIABLE: Final = "CKPTFMT_REHEARSAL"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """The part of one launch in a rehearsal.

    Attributes:
        folder: the directory below which runs are made, in the place of the program's own.
        every: the number of steps from save to save, in the place of the program's own.
        steps: the number of steps after which the process ends.
        kill_at: the number of steps after which the process is killed; None for a launch that goes on to the end.
    """

    folder: str
    every: int
    steps: int
    kill_at: int | None

    @classmethod
    def from_environment(cls) -> Self | None:
        """Return what this process rehearses; None for a training like any other. Raises: StateError(ARGUMENT)."""
        text = os.environ.get(VARIABLE)
        if not text:
            return None
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError) as error:
            remedy = f"Unset {VARIABLE}; `ckptfmt rehearse` sets it for the programs that it starts."
            raise err(Code.ARGUMENT, f"{text!r} is no rehearsal", where=VARIABLE, remedy=remedy) from error

    def as_environment(self) -> dict[str, str]:
        """Return the variable that tells a program of it."""
        return {VARIABLE: json.dumps(dataclasses.asdict(self))}

    def place(self, run: str | os.PathLike[str] | Store) -> str:
        """Return the directory of the rehearsal's run in the place of a program's run."""
        name = os.fsdecode(os.fspath(run)) if isinstance(run, str | os.PathLike) else run.name
        return str(Path(self.folder) / f"run-{zlib.crc32(name.encode('utf-8', 'surrogateescape')):08x}")

    def kill(self, step: int) -> None:
        """Kill this process, as the system would, where its time has come."""
        if self.kill_at is not None and step >= self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def is_over(self, step: int) -> bool:
        """Return whether no step is left to do."""
        return step >= self.steps

    def end(self) -> NoReturn:
        """End this process: the program behind its loop, such as an export, is no part of a rehearsal."""
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
