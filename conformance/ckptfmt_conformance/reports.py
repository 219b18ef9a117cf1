"""Reports of a run: text with progress on a terminal, JSON for programs, JUnit XML for CI."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any, Final
from xml.sax.saxutils import escape, quoteattr

from ckptfmt_conformance import __version__
from ckptfmt_conformance.badge import SELF_REPORTED, claim_of, count_profiles, said_claim
from ckptfmt_conformance.cases import Case, Expectation
from ckptfmt_conformance.errors import SuiteError
from ckptfmt_conformance.judge import RED, Status
from ckptfmt_conformance.protocol import parse_description
from ckptfmt_conformance.runner import Result, Run

__all__ = [
    "Progress",
    "count_text",
    "dump_json",
    "dump_junit",
    "group_by_clause",
    "parse_json",
    "text_of",
]

_COLOURS: Final = {
    Status.PASS: "32",
    Status.FAIL: "31",
    Status.ERROR: "35",
    Status.XPASS: "31",
    Status.XFAIL: "33",
    Status.UNSUPPORTED: "36",
    Status.SKIPPED: "2",
}
#: Characters that XML 1.0 can't represent.
_NO_XML: Final = re.compile("[^\t\n\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
#: The interval between updates of the progress line, in seconds.
_EVERY_S: Final = 0.1


class Progress:
    """A progress line on a terminal. On any other stream, the line is not printed.

    Args:
        total: the number of cases.
        stream: the output stream; standard error by default.
    """

    def __init__(self, total: int, stream: IO[str] | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._shown = self._stream.isatty()
        self._total = total
        self._done = 0
        self._red = 0
        self._last_s = 0.0

    def take(self, result: Result) -> None:
        """Count a result, and update the line."""
        self._done += 1
        self._red += result.status in RED
        now_s = time.monotonic()
        if self._shown and (now_s - self._last_s >= _EVERY_S or self._done == self._total):
            self._last_s = now_s
            red = f", {self._red} red" if self._red else ""
            line = f"{self._done}/{self._total}{red}  {result.case.id}"
            print(f"\r\x1b[K{line[:100]}", end="", file=self._stream, flush=True)

    def close(self) -> None:
        """Erase the line."""
        if self._shown:
            print("\r\x1b[K", end="", file=self._stream, flush=True)


def clean(text: str) -> str:
    r"""Return text with control characters escaped, to protect a terminal from an adapter's text.

    >>> clean("a\x1b[31m\n  b")
    'a\\x1b[31m\n  b'
    """
    return "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text
    )


def group_by_clause(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Return results grouped by the first clause of each case.

    Clauses with red results come first; in each group, red results come first. Cases without a
    clause of the specification, such as trajectories, are grouped by their kind.
    """
    groups: dict[str, list[Result]] = {}
    for result in sorted(results, key=lambda result: result.status not in RED):
        groups.setdefault(next(iter(result.case.requirements), result.case.kind), []).append(result)
    return dict(sorted(groups.items(), key=lambda group: (group[1][0].status not in RED, group[0])))


def count_text(results: Sequence[Result]) -> str:
    """Return the number of cases of each status, as text."""
    counts = ((status, sum(result.status is status for result in results)) for status in Status)
    return ", ".join(f"{count} {status}" for status, count in counts if count)


def text_of(run: Run, *, verbose: bool = False, stream: IO[str] | None = None) -> str:
    """Return a report as text: red cases by clause, reasons for omitted cases, counts of statuses.

    Args:
        verbose: whether to list every case.
        stream: the stream for which the text is made. Only a terminal gets colours.
    """
    out = sys.stdout if stream is None else stream
    in_colour = out.isatty() and not os.environ.get("NO_COLOR")

    def paint(status: Status, text: str) -> str:
        return f"\x1b[{_COLOURS[status]}m{text}\x1b[0m" if in_colour else text

    lines = []
    for clause, results in group_by_clause(run.results).items():
        shown = [
            one for one in results if verbose or one.status in RED or one.status is Status.XFAIL
        ]
        if shown:
            lines.append(f"{clause}: {count_text(results)}")
        for result in shown:
            lines.append(f"{paint(result.status, f'{result.status:11}')} {result.case.id}")
            if result.message:
                lines += [f"            {line}" for line in clean(result.message).splitlines()]
            if result.status in RED:
                lines.append(
                    f"            {', '.join(result.case.requirements)}: {result.case.description}"
                )
    lines += [
        f"{'idle':11} {pattern}: no case is expected to fail by this line" for pattern in run.idle
    ]
    if lines:
        lines.append("")
    if not verbose:
        lines += _left_out(run)
    described = run.description
    counts = [paint(status, f"{count} {status}") for status, count in run.counts.items() if count]
    lines.append(
        f"{clean(described.name)} {clean(described.version)} (format {'/'.join(described.spec)}): "
        f"{', '.join(counts) or 'no case'} in {run.seconds:.1f} s"
    )
    claim = said_claim(run)
    why = "none: not everything was asked" if run.selection else "none"
    lines.append(f"claim level: {claim or why}")
    lines += _profile_lines(run)
    return "\n".join(lines)


def _profile_lines(run: Run) -> list[str]:
    """Return a line for each profile with cases in the run."""
    return [
        f"profile {count.name}: {count.passed} of {count.total} cases"
        + (f", {SELF_REPORTED}" if count.is_held else ", not held")
        for count in count_profiles(run)
    ]


def _left_out(run: Run) -> list[str]:
    """Return a line for each reason for which cases were left out."""
    reasons: dict[tuple[Status, str], int] = {}
    for result in run.results:
        if result.status in (Status.SKIPPED, Status.UNSUPPORTED):
            key = (result.status, result.message)
            reasons[key] = reasons.get(key, 0) + 1
    return [
        f"{status:11} {count} {'case' if count == 1 else 'cases'}: {clean(reason)}"
        for (status, reason), count in sorted(reasons.items())
    ]


def dump_json(run: Run) -> str:
    """Return a report as JSON."""
    described = run.description
    return json.dumps(
        {
            "suite": __version__,
            "adapter": run.adapter,
            "implementation": {
                name: getattr(described, name) for name in described.__dataclass_fields__
            },
            "selection": run.selection,
            "green": run.is_green,
            "claim": claim_of(run) or None,
            "claim_by": SELF_REPORTED if claim_of(run) else None,
            "profiles": {
                count.name: {"passed": count.passed, "total": count.total, "held": count.is_held}
                for count in count_profiles(run)
            },
            "seed": run.seed,
            "counts": {str(status): count for status, count in run.counts.items()},
            "idle_xfails": run.idle,
            "seconds": round(run.seconds, 3),
            "unix_s": run.unix_s,
            "results": [_result_members(result) for result in run.results],
        },
        indent=2,
        sort_keys=True,
        ensure_ascii=False,
    )


def _result_members(result: Result) -> dict[str, Any]:
    case = result.case
    return {
        "id": case.id,
        "status": str(result.status),
        "message": result.message,
        "seconds": round(result.seconds, 4),
        "kind": case.kind,
        "requirements": case.requirements,
        "description": case.description,
        "features": case.features,
        "profiles": case.profiles,
        "bug_class": case.bug_class,
        "claim": (case.request or {}).get("claim") if case.kind == "trajectory" else None,
    }


def parse_json(text: str) -> Run:
    """Return the run of a JSON report, with the members for badges and pages.

    Raises: SuiteError for a text other than a report of this suite.
    """
    try:
        members: Mapping[str, Any] = json.loads(text)
        results = tuple(_parse_result(result) for result in members["results"])
        return Run(
            adapter=members["adapter"],
            description=parse_description(members["implementation"]),
            results=results,
            selection=tuple(members["selection"]),
            idle=tuple(members["idle_xfails"]),
            seconds=members["seconds"],
            unix_s=members["unix_s"],
            seed=members.get("seed"),
        )
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise SuiteError(
            f"that is no report of this suite: {error}", remedy="Make one with `run --json FILE`."
        ) from error


def _parse_result(members: Mapping[str, Any]) -> Result:
    case = Case(
        id=members["id"],
        description=members["description"],
        requirements=tuple(members["requirements"]),
        kind=members["kind"],
        features=tuple(members["features"]),
        profiles=tuple(members.get("profiles", ())),
        request={"claim": members["claim"]} if members["claim"] else None,
        expect=Expectation(outcome="accept"),
        bug_class=members["bug_class"],
    )
    return Result(
        case=case,
        status=Status(members["status"]),
        message=members["message"],
        seconds=members["seconds"],
    )


def dump_junit(run: Run) -> str:
    """Return a report as JUnit XML, with a test suite for each folder of case ids."""
    suites: dict[str, list[Result]] = {}
    for result in run.results:
        suites.setdefault(result.case.id.rpartition("/")[0], []).append(result)
    lines = ['<?xml version="1.0" encoding="UTF-8"?>', f"<testsuites{_junit_counts(run.results)}>"]
    for name, results in suites.items():
        lines.append(f"  <testsuite name={_attribute(name)}{_junit_counts(results)}>")
        lines += [line for result in results for line in _junit_case(result)]
        lines.append("  </testsuite>")
    return "\n".join([*lines, "</testsuites>", ""])


def _junit_counts(results: tuple[Result, ...] | list[Result]) -> str:
    failures = sum(result.status in (Status.FAIL, Status.XPASS) for result in results)
    errors = sum(result.status is Status.ERROR for result in results)
    skipped = sum(
        result.status in (Status.SKIPPED, Status.UNSUPPORTED, Status.XFAIL) for result in results
    )
    seconds = sum(result.seconds for result in results)
    return (
        f' tests="{len(results)}" failures="{failures}" errors="{errors}" skipped="{skipped}"'
        f' time="{seconds:.3f}"'
    )


def _junit_case(result: Result) -> list[str]:
    folder, _, name = result.case.id.rpartition("/")
    head = f"    <testcase classname={_attribute(folder)} name={_attribute(name)}"
    head += f' time="{result.seconds:.3f}"'
    element = {Status.FAIL: "failure", Status.XPASS: "failure", Status.ERROR: "error"}.get(
        result.status, "skipped"
    )
    if result.status is Status.PASS:
        return [f"{head}/>"]
    first = result.message.partition("\n")[0]
    text = escape(_NO_XML.sub("?", result.message))
    message = _attribute(f"{result.status}: {first}")
    return [f"{head}>", f"      <{element} message={message}>{text}</{element}>", "    </testcase>"]


def _attribute(text: str) -> str:
    return quoteattr(_NO_XML.sub("?", text))
