"""Runs of less than a megabyte whose records are as many as fit: builders, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from ckptfmt.digest import digest_text
from ckptfmt.documents.canonical import dump_document
from ckptfmt.documents.manifest import MANIFEST_NAME, Abort, Reference, Tombstone, checkpoint_name
from ckptfmt.documents.run import LAUNCHES, RUN_NAME, Launch, RunRecord, launch_name
from tests.builders import NONCE, RUN_ID, Forgery, small_files

_DIGEST: Final = digest_text(bytes(32))
#: A launch record takes half a kilobyte, a decision somewhat less.
_LAUNCHES: Final = 2000


def _run(launches: int, resume_from: Callable[[int], int | None]) -> dict[str, bytes]:
    """Return the records of a run.

    Args:
        resume_from: the step that a launch resumes from, of the launch before it; None for a fresh
            start.
    """
    files = {RUN_NAME: RunRecord(run_id=RUN_ID).dump()}
    for number in range(1, launches + 1):
        step = resume_from(number)
        name = None if step is None or number == 1 else checkpoint_name(step, number - 1)
        files[f"{LAUNCHES}/{launch_name(number)}"] = Launch(
            run_id=RUN_ID,
            launch=number,
            nonce=NONCE,
            chosen_by="lineage",
            resume_from=None if name is None else Reference(name=name, digest=_DIGEST),
        ).dump()
    return files


def _tombstone(step: int, launch: int) -> dict[str, bytes]:
    content = Tombstone(run_id=RUN_ID, launch=launch, step=step, manifest_digest=_DIGEST).dump()
    return {f"{checkpoint_name(step, launch)}/{MANIFEST_NAME}": content}


def _abort(step: int, launch: int) -> dict[str, bytes]:
    content = Abort(run_id=RUN_ID, launch=launch, step=step, reason="given up").dump()
    return {f"{checkpoint_name(step, launch)}/{MANIFEST_NAME}": content}


def _launches() -> dict[str, bytes]:
    """Launches that started anew, each."""
    return _run(_LAUNCHES, lambda _: None)


def _missing() -> dict[str, bytes]:
    """A chain of launches; what each resumed from isn't there."""
    return _run(_LAUNCHES, lambda number: number)


def _retired() -> dict[str, bytes]:
    """A chain of launches; what each resumed from was retired, so that each counts as overtaken."""
    files = _run(_LAUNCHES // 2, lambda number: number)
    for number in range(1, _LAUNCHES // 2):
        files |= _tombstone(number + 1, number)
    return files


def _tombstones() -> dict[str, bytes]:
    """One launch, and thousands of steps that were retired."""
    files = _run(1, lambda _: None)
    for step in range(_LAUNCHES):
        files |= _tombstone(step, 1)
    return files


def _aborts() -> dict[str, bytes]:
    files = _run(1, lambda _: None)
    for step in range(_LAUNCHES):
        files |= _abort(step, 1)
    return files


def _damaged() -> dict[str, bytes]:
    """A chain of launches, each of which resumed from a checkpoint whose register is damaged."""
    files = _run(_LAUNCHES, lambda number: number)
    return files | {
        f"{checkpoint_name(number + 1, number)}/{MANIFEST_NAME}": b""
        for number in range(1, _LAUNCHES)
    }


def _committed() -> dict[str, bytes]:
    """Manifests that are sound, of checkpoints of which nothing else is there."""
    signed = Forgery(small_files()).manifest
    files = _run(1, lambda _: None)
    for step in range(_LAUNCHES // 4):
        content = dump_document({**signed, "run_id": RUN_ID, "launch": 1, "step": step})
        files[f"{checkpoint_name(step, 1)}/{MANIFEST_NAME}"] = content
    return files


RUN_BOMBS: Final[dict[str, Callable[[], dict[str, bytes]]]] = {
    "launches that started anew": _launches,
    "launches that resumed from what isn't there": _missing,
    "launches that resumed from what was retired": _retired,
    "retired steps": _tombstones,
    "aborted steps": _aborts,
    "registers that are damaged": _damaged,
    "manifests alone": _committed,
}
