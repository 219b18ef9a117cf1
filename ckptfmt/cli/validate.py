"""``validate``: check every byte of a checkpoint or of a run, say all that is wrong, and give the verdict.

What lies apart in the output: a checkpoint's *own* bytes; the checkpoints that it *references*, that is, reads from;
and their *closure*, what those read from in turn. A full checkpoint has neither of the latter.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import time
from typing import TYPE_CHECKING, Final

from ckptfmt.cli.console import Console, bytes_text, clean, count_text
from ckptfmt.cli.places import Place, open_place
from ckptfmt.cli.progress import Progress
from ckptfmt.documents.manifest import Manifest, parse_checkpoint_name
from ckptfmt.engines.commit import read_register
from ckptfmt.engines.lineage import list_checkpoints, read_run
from ckptfmt.engines.verify import Report, check_place, verify_checkpoint, verify_run
from ckptfmt.errors import CkptError, StoreError
from ckptfmt.store import LocalStore

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ckptfmt.cli.console import Cell

__all__ = ["run_validate"]

_EXIT_CODES: Final = {"valid": 0, "invalid": 1, "incomplete": 2}
_NOTE: Final = "Full checkpoints only: they read from no other, so there are no references and no closure to check."


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """What a check found; `failure` is how the store kept it from being a whole one."""

    report: Report
    violations: list[CkptError]
    failure: StoreError | None
    elapsed_s: float

    @property
    def verdict(self) -> str:
        """One of ``valid``, ``invalid``, ``incomplete``: what a failing store lets pass or damages proves nothing."""
        if self.failure is not None:
            return "incomplete"
        return "invalid" if self.violations else "valid"


def run_validate(path: str, *, as_json: bool, quiet: bool) -> int:
    """Check what is at `path`, print what is found, and return the exit code.

    Raises: StateError(ARGUMENT), IntegrityError(FILE_MISSING), StoreError where there is nothing to check.
    """
    place = open_place(path)
    with Progress(lambda: _total_nbytes(place), quiet=quiet) as progress:
        outcome = _check(place, progress.advance)
    if as_json:
        _print_json(outcome)
    elif not quiet:
        _print_text(outcome)
    return _EXIT_CODES[outcome.verdict]


def _check(place: Place, on_progress: Callable[[int], None]) -> _Outcome:
    begin_s = time.perf_counter()
    report = Report(target=place.path, kind="run" if place.is_run else "checkpoint", on_progress=on_progress)
    failure = None
    try:
        if place.is_run:
            verify_run(place.store, report)
        else:
            checkpoint = verify_checkpoint(place.store, report)
            if checkpoint is not None:
                with report.collect():
                    _check_surroundings(place, checkpoint.manifest)
    except StoreError as error:
        failure = error
    # A part that can't be read is found once as itself, and again by what needs it.
    found = {(error.code, error.where, error.detail): error for error in report.violations}
    return _Outcome(
        report=report, violations=list(found.values()), failure=failure, elapsed_s=time.perf_counter() - begin_s
    )


def _check_surroundings(place: Place, manifest: Manifest) -> None:
    """Raise unless a checkpoint that lies in a run is called as it should be there. Spec: REQ-MAN-002, REQ-RUN-003."""
    parent, name = os.path.split(os.path.realpath(place.path))
    step_and_launch = parse_checkpoint_name(name)
    if step_and_launch is None:
        return
    try:
        run = read_run(LocalStore(parent, writable=False))
    except CkptError:
        return  # It isn't this checkpoint's fault; `validate` on the run says so.
    if run is not None:
        check_place(manifest, step_and_launch, run.run_id)


def _total_nbytes(place: Place) -> int | None:
    """Return how many bytes of tensors there are to check, from the manifests; None if they don't say."""
    try:
        if place.is_run:
            manifests = [entry.manifest for entry in list_checkpoints(place.store)]
        else:
            register = read_register(place.store)
            manifests = [register if isinstance(register, Manifest) else None]
    except CkptError:
        return None
    return sum(field.nbytes for manifest in manifests if manifest is not None for field in manifest.fields.values())


def _print_json(outcome: _Outcome) -> None:
    from ckptfmt.cli.versions import print_json

    own = {
        "valid": not outcome.violations,
        "complete": outcome.failure is None,
        "nbytes": outcome.report.nbytes,
        "violation_count": len(outcome.violations),
    }
    print_json(
        {
            **outcome.report.as_json(),
            "valid": outcome.verdict == "valid",
            "verdict": outcome.verdict,
            "violations": [error.as_json() for error in outcome.violations],
            "failure": outcome.failure.as_json() if outcome.failure is not None else None,
            "own": own,
            "references": [],
            "closure": [],
            "note": _NOTE,
            "elapsed_s": round(outcome.elapsed_s, 6),
        }
    )


def _print_text(outcome: _Outcome) -> None:
    console = Console()
    _print_errors(console, outcome.violations, "red bold")
    if outcome.failure is not None:
        _print_errors(console, [outcome.failure], "magenta bold")
    for warning in outcome.report.warnings:
        console.line(("warning", "yellow bold"), f"  {clean(warning)}")
    if outcome.violations or outcome.failure or outcome.report.warnings:
        console.line()
    console.line(*_verdict_cells(outcome))


def _print_errors(console: Console, errors: Sequence[CkptError], style: str) -> None:
    """Print a line for each error, and the remedy once for neighbours that share it."""
    for (code, remedy), same in itertools.groupby(errors, key=lambda error: (error.code, error.remedy)):
        for error in same:
            cells: list[Cell] = [(str(code), style)]
            if error.where:
                cells += [("  ", ""), (clean(error.where), "bold")]
            if error.requirement:
                cells += [("  ", ""), (error.requirement, "cyan")]
            console.line(*cells, f"  {clean(error.detail)}")
        if remedy:
            console.line((f"  remedy: {clean(remedy)}", "dim"))


def _verdict_cells(outcome: _Outcome) -> list[Cell]:
    report = outcome.report
    style = {"valid": "green bold", "invalid": "red bold", "incomplete": "magenta bold"}[outcome.verdict]
    found = ((len(outcome.violations), "violation"), (len(report.warnings), "warning"))
    counts = [count_text(len(report.checkpoints), "checkpoint")]
    counts += [count_text(count, noun) for count, noun in found if count]
    checked = f"{bytes_text(report.nbytes)} of own bytes checked in {outcome.elapsed_s:.2f} s"
    return [
        (outcome.verdict, style),
        (f"  {clean(report.target)}: {', '.join(counts)}, {checked}; no references, no closure", ""),
    ]
