"""A rehearsal: a training that `ckptfmt rehearse` started in a scratch directory, for a few steps, and may kill."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import sys
import zlib
from pathlib import Path
from typing import Final, NoReturn, Self

from ckptfmt.errors import CkptError, Code, err
from ckptfmt.store.protocol import Store
from ckptfmt.trainer.handle import SaveHandle

#: The environment variable by which the command tells a program what to rehearse.
VARIABLE: Final = "CKPTFMT_REHEARSAL"
#: The time that a process waits for its last save at most, before it is killed, in seconds.
_WAIT_S: Final = 60.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """The account of one process of a launch that wasn't killed, for the command that started it.

    Attributes:
        launch: the number of the launch.
        writer: the number of the process.
        step: the number of steps done.
        claim: the claim of the launch's load; None for a fresh start.
        lowered_by: the reasons why the claim isn't T1.
        changes: the steps behind which an RNG stream or a schedule changed before the next step.
        modules: digests of the modules outside of the State, by name; several modules may have one name.
    """

    launch: int
    writer: int
    step: int
    claim: str | None
    lowered_by: tuple[str, ...]
    changes: tuple[int, ...]
    modules: dict[str, list[int]]

    @classmethod
    def parse(cls, content: bytes) -> Self:
        """Return the account that a process wrote."""
        members = json.loads(content)
        lowered_by, changes = tuple(members.pop("lowered_by")), tuple(members.pop("changes"))
        return cls(lowered_by=lowered_by, changes=changes, **members)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """The part of one launch in a rehearsal.

    Attributes:
        folder: the directory below which runs are made, in the place of the program's own.
        every: the number of steps from save to save, in the place of the program's own.
        steps: the number of steps after which the process ends.
        kill_at: the number of steps after which the process is killed; None for a launch that goes on to the end.
        save_at: the number of steps after which there is one more save; None for no other saves than `every` asks for.
    """

    folder: str
    every: int
    steps: int
    kill_at: int | None
    save_at: int | None = None

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

    def give(self, run: str, account: Account) -> None:
        """Write the account of this process, beside the directory of its run."""
        name = f"{Path(run).name}-{account.launch:04d}-{account.writer:05d}.json"
        (Path(self.folder) / name).write_text(json.dumps(dataclasses.asdict(account)), "utf-8")

    def is_fatal(self, step: int) -> bool:
        """Return whether this process is to be killed behind a step."""
        return self.kill_at is not None and step >= self.kill_at

    def kill(self, handle: SaveHandle | None) -> None:
        """Kill this process, as the system would, once the last save is committed: the next launch goes on from it."""
        if handle is not None:
            with contextlib.suppress(CkptError):
                handle.wait(timeout_s=_WAIT_S)
        os.kill(os.getpid(), signal.SIGKILL)

    def is_over(self, step: int) -> bool:
        """Return whether no step is left to do."""
        return step >= self.steps

    def end(self) -> NoReturn:
        """End this process: the program behind its loop, such as an export, is no part of a rehearsal."""
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
