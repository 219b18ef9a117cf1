"""``validate``: check every byte of a checkpoint or of a run, list all violations, give a verdict.

The output distinguishes three parts: a checkpoint's *own* bytes; its *references*, that is, the
checkpoints it reads from, directly or indirectly, and whether they exist; and their *closure*, the
verdict on each referenced checkpoint. A full checkpoint has neither references nor a closure. In a
run, each checkpoint is checked once, as own bytes; members of the closure outside the run are
reported separately.

With ``--split I/N``, a slice of the blocks and all documents are checked. With ``--join``, the JSON
objects printed for the slices are joined into a single report.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Final

from ckptfmt.cli.console import (
    Cell,
    Console,
    Progress,
    bytes_text,
    clean,
    count_text,
    print_errors,
    print_json,
)
from ckptfmt.cli.places import Place, open_bases, open_place
from ckptfmt.commit.decision import read_register
from ckptfmt.documents.manifest import Manifest
from ckptfmt.errors import CkptError, Code, StoreError, err
from ckptfmt.read.reader import Checkpoint
from ckptfmt.read.report import Report
from ckptfmt.read.verify import verify_checkpoint, verify_run
from ckptfmt.run.lineage import find_checks, list_checkpoints
from ckptfmt.signing.trust import Trust
from ckptfmt.store import Store

_EXIT_CODES: Final = {"valid": 0, "invalid": 1, "incomplete": 2}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """The outcome of a check; `failure` is the store's error that made the check incomplete."""

    report: Report
    failure: StoreError | None
    elapsed_s: float

    @property
    def verdict(self) -> str:
        """The verdict: ``valid``, ``invalid``, or ``incomplete`` after an error of the store.

        An error of the store proves neither validity nor damage.
        """
        if self.failure is not None:
            return "incomplete"
        return "invalid" if self.report.violations else "valid"


def run(arguments: argparse.Namespace) -> int:
    """Check a checkpoint or a run, print the report, and return the exit code.

    Raises: StateError(ARGUMENT), IntegrityError(FILE_MISSING), StoreError if the path can't be
        opened as a checkpoint or run.
    """
    if (arguments.path is None) == (arguments.join is None):
        remedy = "Write `ckptfmt validate PATH`, or `ckptfmt validate --join FILE ...`."
        raise err(Code.ARGUMENT, "either a PATH is needed or the reports to join", remedy=remedy)
    if arguments.join is not None:
        from ckptfmt.cli.joining import join

        return join(arguments)
    share = parse_split(arguments.split)
    place = open_place(arguments.path)
    stores = open_bases(arguments.bases)
    trust = parse_trust(arguments)
    with Progress(lambda: _total_nbytes(place, stores), quiet=arguments.quiet) as progress:
        outcome = _check(place, stores, share, progress.advance, trust)
    if arguments.json:
        _print_json(outcome)
    elif not arguments.quiet:
        _print_text(outcome)
    return _EXIT_CODES[outcome.verdict]


def parse_split(text: str | None) -> tuple[int, int]:
    """Return the number of a slice, from 0 on, and the count. Raises: StateError(ARGUMENT).

    >>> parse_split("2/8"), parse_split(None)
    ((1, 8), (0, 1))
    """
    if text is None:
        return 0, 1
    number, _, count = text.partition("/")
    if not (
        number.isdecimal()
        and count.isdecimal()
        and len(count) < 7
        and 1 <= int(number) <= int(count)
    ):
        remedy = "Write the number of the slice and how many there are: 1/8, 2/8 and so on to 8/8."
        raise err(Code.ARGUMENT, f"{text!r} is no slice", where="--split", remedy=remedy)
    return int(number) - 1, int(count)


def parse_trust(arguments: argparse.Namespace) -> Trust | None:
    """Return the signers that the options name; None without such an option.

    Raises: StateError(ARGUMENT).
    """
    given = {
        name: getattr(arguments, name)
        for name in ("keys", "roots", "identity", "issuer", "sigstore_root", "pin")
        if getattr(arguments, name)
    }
    if given and not {"keys", "roots", "identity"} & given.keys():
        remedy = "Give --key, --root, or --identity with --issuer, too."
        raise err(
            Code.ARGUMENT,
            "no signer is named",
            where=f"--{min(given).replace('_', '-')}",
            remedy=remedy,
        )
    return Trust(**given) if given else None


def _check(
    place: Place,
    bases: Sequence[Store],
    share: tuple[int, int],
    on_progress: Callable[[int], None],
    trust: Trust | None,
) -> _Outcome:
    begin_s = time.perf_counter()
    kind = "run" if place.is_run else "checkpoint"
    report = Report(target=place.path, kind=kind, on_progress=on_progress, share=share)
    failure = None
    try:
        if place.is_run:
            verify_run(place.store, report, bases=bases, require_signature=trust)
        else:
            check = find_checks(place.path, place.store, trust)
            verify_checkpoint(place.store, report, bases=bases, check=check)
    except StoreError as error:
        failure = error
    return _Outcome(report=report, failure=failure, elapsed_s=time.perf_counter() - begin_s)


def _total_nbytes(place: Place, bases: Sequence[Store]) -> int | None:
    """Return the bytes of tensors to check, by the manifests; None if a manifest is unreadable."""
    try:
        if place.is_run:
            manifests = [
                entry.manifest for entry in list_checkpoints(place.store, with_labels=False)
            ]
        else:
            checkpoint = Checkpoint(place.store, bases=bases)
            found = [
                read_register(checkpoint.closure.find(one))
                for one in checkpoint.manifest.references
            ]
            manifests = [checkpoint.manifest, *(one for one in found if isinstance(one, Manifest))]
    except CkptError:
        return None
    return sum(manifest.stored_nbytes for manifest in manifests if manifest is not None)


def _print_json(outcome: _Outcome) -> None:
    report = outcome.report
    own = {
        "valid": not report.own_violation_count,
        "complete": outcome.failure is None,
        "nbytes": report.own_nbytes,
        "violation_count": report.own_violation_count,
    }
    print_json(
        {
            **report.as_json(),
            "valid": outcome.verdict == "valid",
            "verdict": outcome.verdict,
            "failure": outcome.failure.as_json() if outcome.failure is not None else None,
            "split": {"slice": report.share[0] + 1, "count": report.share[1]},
            "own": own,
            "elapsed_s": round(outcome.elapsed_s, 6),
        }
    )


def _print_text(outcome: _Outcome) -> None:
    console = Console()
    print_errors(console, outcome.report.violations, "red bold")
    if outcome.failure is not None:
        print_errors(console, [outcome.failure], "magenta bold")
    for warning in outcome.report.warnings:
        console.line(("warning", "yellow bold"), f"  {clean(warning)}")
    if outcome.report.violations or outcome.failure or outcome.report.warnings:
        console.line()
    if outcome.report.kind == "checkpoint":
        _print_references(console, outcome.report)
    console.line(*_verdict_cells(outcome))


def _print_references(console: Console, report: Report) -> None:
    """Print a line for each referenced checkpoint: its existence, and the verdict on it."""
    members = {member.digest: member for member in report.closure}
    rows: list[list[Cell | str]] = []
    for one in report.references:
        member = members.get(one.digest)
        state: Cell = (one.reason, "red") if one.path is None else ("there, not checked", "yellow")
        if member is not None:
            state = (
                ("valid", "green")
                if member.valid
                else (count_text(member.violation_count, "violation"), "red")
            )
        size = bytes_text(member.nbytes) if member is not None else ""
        digest = one.digest.removeprefix("blake3:")[:12]
        rows.append(
            [("reads from", "dim"), (clean(one.name), "bold"), (digest, "yellow"), size, state]
        )
    console.table(rows, indent=0, right=(3,))
    if rows:
        console.line()


def _verdict_cells(outcome: _Outcome) -> list[Cell]:
    report = outcome.report
    style = {"valid": "green bold", "invalid": "red bold", "incomplete": "magenta bold"}[
        outcome.verdict
    ]
    found = ((len(outcome.report.violations), "violation"), (len(report.warnings), "warning"))
    counts = [count_text(len(report.checkpoints), "checkpoint")]
    counts += [count_text(count, noun) for count, noun in found if count]
    checked = f"{bytes_text(report.own_nbytes)} of own bytes checked in {outcome.elapsed_s:.2f} s"
    if report.share[1] > 1:
        checked += f", slice {report.share[0] + 1} of {report.share[1]} of the blocks"
    return [
        (outcome.verdict, style),
        (f"  {clean(report.target)}: {', '.join(counts)}, {checked}{_closure_text(report)}", ""),
    ]


def _closure_text(report: Report) -> str:
    """Return the text on the referenced checkpoints; "" without references."""
    if not report.references:
        return ""
    references = count_text(len(report.references), "reference")
    if report.closure:
        nbytes = sum(member.nbytes for member in report.closure)
        return (
            f"; {references}, closure of {count_text(len(report.closure), 'checkpoint')},"
            f" {bytes_text(nbytes)}"
        )
    if report.kind == "checkpoint":
        return f"; {references}, no closure"
    is_whole = all(reference.path is not None for reference in report.references)
    return f"; {references}, " + (
        "all of the closure within the run" if is_whole else "not all of the closure there"
    )
