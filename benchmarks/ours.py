"""ckptfmt in the benchmarks: a `Checkpointer` with defaults, without overlap, or with deltas."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import ckptfmt
from benchmarks.peers import Pending


class Ours:
    """A `ckptfmt.Checkpointer` on a separate run, ready to save.

    Args:
        run: the directory or URL of the run, which must not exist yet.
        state: the state to save.
        overlap: whether parameters and moments are copied during the next step.
        options: further options of `Checkpointer`.

    Attributes:
        slots_ready_s: the seconds from the start of construction until slots are made and touched.
        staging_threads: the number of threads that copy into a slot.
    """

    is_buffered = False

    def __init__(
        self,
        run: Path | str,
        state: ckptfmt.State,
        *,
        overlap: bool,
        name: str = "ckptfmt",
        delta: Any = "off",
        **options: Any,
    ) -> None:
        self.name = name
        self._overlap = overlap
        begin_s = time.perf_counter()
        saving = ckptfmt.Saving(overlap=overlap, delta=delta)
        self._checkpointer = ckptfmt.Checkpointer(
            run, state, resume="fresh", saving=saving, **options
        )
        self._checkpointer.prepare()
        self.slots_ready_s = time.perf_counter() - begin_s
        self.staging_threads = self._checkpointer.staging_threads

    def describe(self) -> dict[str, object]:
        """Return the settings, and the checkpointer's report of them."""
        return {
            "call": "Checkpointer.save, until COMMITTED",
            "overlap": self._overlap,
            "staging_threads": self.staging_threads,
            "hashed": "every byte",
            "durable": "fsync of files and directories",
            "reports": list(self._checkpointer.reports),
        }

    def start(self, path: Path | None = None) -> Pending:  # noqa: ARG002
        """Start a save of the next step."""
        self._checkpointer.step += 1
        handle = self._checkpointer.save()
        assert handle is not None, "this step is saved already"
        return Pending(
            path=Path(handle.path),
            is_done=lambda: handle.state in {"COMMITTED", "FAILED"},
            wait=handle.wait,
            blocked_s=lambda: handle.blocked_s,
        )

    def save(self, path: Path | None = None) -> Path:
        """Save, wait until the commit, and return the checkpoint's directory."""
        pending = self.start(path)
        pending.wait()
        return pending.path

    def close(self) -> None:
        """Stop the saver and release the slots."""
        self._checkpointer.close()
