"""``validate --join``: the reports of machines that shared a check, joined into a single report."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, Final

from ckptfmt.cli.console import Console, bytes_text, clean, count_text, print_json
from ckptfmt.errors import Code, err

_EXIT_CODES: Final = {"valid": 0, "invalid": 1, "incomplete": 2}
_STYLES: Final = {"valid": "green bold", "invalid": "red bold", "incomplete": "magenta bold"}
#: The required members of a report, and their types.
_MEMBERS: Final[dict[str, type]] = {
    "verdict": str, "kind": str, "target": str, "split": dict, "checkpoints": dict,
    "violations": list, "warnings": list, "nbytes": int,
}  # fmt: skip


def join(arguments: argparse.Namespace) -> int:
    """Join the reports of all slices, print the joined report, and return the exit code.

    The exit code is that of an undivided check.

    Raises: StateError(ARGUMENT) for an invalid report, a report of a different check, or a missing
        slice.
    """
    reports = [_read_report(path) for path in arguments.join]
    _check_slices(arguments.join, reports)
    joined = _join_reports(reports)
    if arguments.json:
        print_json(joined)
    elif not arguments.quiet:
        _print_text(joined)
    return _EXIT_CODES[joined["verdict"]]


def _read_report(path: str) -> dict[str, Any]:
    try:
        report = json.loads(Path(path).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise _no_report(path, str(error)) from error
    if not isinstance(report, dict) or any(
        not isinstance(report.get(key), kind) for key, kind in _MEMBERS.items()
    ):
        raise _no_report(path, "the file isn't a report of `ckptfmt validate --json`")
    numbers = [report["split"].get(key) for key in ("slice", "count")]
    if report["verdict"] not in _EXIT_CODES or any(type(number) is not int for number in numbers):
        raise _no_report(path, "its verdict or its split means nothing")
    return report


def _no_report(path: str, why: str) -> Exception:
    remedy = "Run `ckptfmt validate PATH --split I/N --json > FILE` again."
    return err(Code.ARGUMENT, f"not the report of a slice: {why[:500]}", where=path, remedy=remedy)


def _check_slices(paths: list[str], reports: list[dict[str, Any]]) -> None:
    """Check that the reports belong to the same check and have each slice once.

    Raises: StateError(ARGUMENT).
    """
    first = reports[0]
    count = first["split"]["count"]
    slices: dict[int, str] = {}
    for path, report in zip(paths, reports, strict=True):
        # Digests only: the machines may have different paths of the same place.
        if report["kind"] != first["kind"] or _digests(report) != _digests(first):
            remedy = (
                "Join reports of one checkpoint, or of a run into which nobody saved meanwhile."
            )
            raise err(
                Code.ARGUMENT,
                f"it isn't of the same checkpoints as {paths[0]}",
                where=path,
                remedy=remedy,
            )
        number = report["split"]["slice"]
        if report["split"]["count"] != count:
            detail = f"{report['split']['count']} slices, where {paths[0]} says {count}"
            raise err(
                Code.ARGUMENT,
                detail,
                where=path,
                remedy="Split into as many slices on each machine.",
            )
        if number in slices:
            remedy = "Give the report of each slice once."
            raise err(
                Code.ARGUMENT,
                f"slice {number} is that of {slices[number]}, too",
                where=path,
                remedy=remedy,
            )
        slices[number] = path
    missing = [
        number for number in range(1, min(count, len(slices) + 17) + 1) if number not in slices
    ]
    if missing:
        shown = ", ".join(map(str, missing[:16])) + (" and more" if len(missing) > 16 else "")
        remedy = "Give the reports of all slices."
        raise err(
            Code.ARGUMENT, f"of {count} slices, {shown} aren't there", where="--join", remedy=remedy
        )


def _digests(report: dict[str, Any]) -> list[str]:
    return sorted(map(str, report["checkpoints"].values()))


def _join_reports(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the joined report.

    All machines read the documents, so equal violations and warnings appear only once.
    """
    violations = {
        json.dumps(one, sort_keys=True): one for report in reports for one in report["violations"]
    }
    verdicts = {report["verdict"] for report in reports}
    verdict = next(verdict for verdict in ("incomplete", "invalid", "valid") if verdict in verdicts)
    return {
        "target": reports[0]["target"],
        "kind": reports[0]["kind"],
        "valid": verdict == "valid",
        "verdict": verdict,
        "split": {"slice": None, "count": len(reports)},
        "violations": list(violations.values()),
        "warnings": sorted({str(warning) for report in reports for warning in report["warnings"]}),
        "checkpoints": reports[0]["checkpoints"],
        "nbytes": sum(report["nbytes"] for report in reports),
    }


def _print_text(joined: dict[str, Any]) -> None:
    console = Console()
    for one in joined["violations"]:
        members = one if isinstance(one, dict) else {"detail": one}
        cells = [
            clean(str(members[key]))
            for key in ("where", "requirement", "detail")
            if members.get(key)
        ]
        console.line((clean(str(members.get("code"))), "red bold"), "  ", "  ".join(cells))
    for warning in joined["warnings"]:
        console.line(("warning", "yellow bold"), f"  {clean(warning)}")
    counts = [
        count_text(len(joined["checkpoints"]), "checkpoint"),
        count_text(len(joined["violations"]), "violation"),
    ]
    read = (
        f"{bytes_text(joined['nbytes'])} checked in {count_text(joined['split']['count'], 'slice')}"
    )
    verdict = (joined["verdict"], _STYLES[joined["verdict"]])
    console.line(verdict, f"  {clean(joined['target'])}: {', '.join(counts)}, {read}")
