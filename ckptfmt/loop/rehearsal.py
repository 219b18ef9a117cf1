"""A rehearsal: a few steps of a training in a scratch directory, started by `ckptfmt rehearse`.

A launch of a rehearsal may end with a kill of the process.
"""

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
from ckptfmt.saving.handle import SaveHandle
from ckptfmt.store.protocol import Store

#: The environment variable by which the command passes a `Rehearsal` to a program.
VARIABLE: Final = "CKPTFMT_REHEARSAL"
#: The maximum wait for the last save before a kill, in seconds.
_WAIT_S: Final = 60.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """The account of one process of a completed launch, for the command `ckptfmt rehearse`.

    Attributes:
        launch: the number of the launch.
        writer: the number of the process.
        step: the number of steps done.
        claim: the claim of the launch's load; None for a fresh start.
        lowered_by: the reasons why the claim isn't T1.
        changes: the steps after which an RNG stream or a schedule changed before the next step.
        modules: digests of the modules outside of the State, by name. Modules may share a name.
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
        lowered_by = tuple(members.pop("lowered_by"))
        changes = tuple(members.pop("changes"))
        return cls(lowered_by=lowered_by, changes=changes, **members)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """The part of one launch in a rehearsal.

    Attributes:
        folder: the directory for runs, in place of the program's directory.
        every: the number of steps from save to save, in place of the program's interval.
        steps: the number of steps after which the process ends.
        kill_at: the number of steps after which the process is killed; None for no kill.
        save_at: the number of steps after which there is an additional save; None for no such save.
    """

    folder: str
    every: int
    steps: int
    kill_at: int | None
    save_at: int | None = None

    @classmethod
    def from_environment(cls) -> Self | None:
        """Return the rehearsal of this process; None for an ordinary training.

        Raises: StateError(ARGUMENT).
        """
        text = os.environ.get(VARIABLE)
        if not text:
            return None
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError) as error:
            remedy = (
                f"Unset {VARIABLE}; `ckptfmt rehearse` sets it for the programs that it starts."
            )
            raise err(
                Code.ARGUMENT, f"{text!r} is no rehearsal", where=VARIABLE, remedy=remedy
            ) from error

    def as_environment(self) -> dict[str, str]:
        """Return the environment variable that passes the rehearsal to a program."""
        return {VARIABLE: json.dumps(dataclasses.asdict(self))}

    def place(self, run: str | os.PathLike[str] | Store) -> str:
        """Return the directory of the rehearsal's run, which replaces the program's run."""
        name = os.fsdecode(os.fspath(run)) if isinstance(run, str | os.PathLike) else run.name
        return str(
            Path(self.folder) / f"run-{zlib.crc32(name.encode('utf-8', 'surrogateescape')):08x}"
        )

    def give(self, run: str, account: Account) -> None:
        """Write the account of this process beside the directory of the run."""
        name = f"{Path(run).name}-{account.launch:04d}-{account.writer:05d}.json"
        (Path(self.folder) / name).write_text(json.dumps(dataclasses.asdict(account)), "utf-8")

    def is_fatal(self, step: int) -> bool:
        """Return whether this process must be killed after a step."""
        return self.kill_at is not None and step >= self.kill_at

    def kill(self, handle: SaveHandle | None) -> None:
        """Kill this process as the system would, after a wait for the last save.

        The next launch resumes from this save.
        """
        if handle is not None:
            with contextlib.suppress(CkptError):
                handle.wait(timeout_s=_WAIT_S)
        os.kill(os.getpid(), signal.SIGKILL)

    def is_over(self, step: int) -> bool:
        """Return whether all steps are done."""
        return step >= self.steps

    def end(self) -> NoReturn:
        """End this process. Code after the training loop, such as an export, isn't rehearsed."""
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
