"""Reports of a campaign: a table by kind, JSON, and a run of the suite for JUnit XML and HTML."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ckptfmt_conformance import __version__
from ckptfmt_conformance.cases import Case, Expectation
from ckptfmt_conformance.chaos.campaign import Verdict
from ckptfmt_conformance.judge import Status
from ckptfmt_conformance.protocol import Description
from ckptfmt_conformance.runner import Result, Run

__all__ = ["as_run", "dump_json", "sum_of", "text_of"]


def as_injections(verdicts: Sequence[Verdict]) -> list[dict[str, Any]]:
    """Return the members of each injection for a JSON report."""
    return [
        {
            "index": one.index,
            "kind": one.kind.name,
            "phase": one.kind.phase,
            "does": one.kind.does,
            "promise": one.kind.promise,
            "victim": one.victim,
            "recovered": one.recovered,
            "seconds": round(one.seconds, 2),
            "steps_lost": one.steps_lost,
            "identical": one.identical,
            "kept": one.is_kept,
            "message": one.message,
        }
        for one in verdicts
    ]


def table_of(injections: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of the kinds, the broken promises, and the sums.

    Args:
        injections: the injections of any number of campaigns, in the form of JSON reports.
    """
    kinds: dict[str, list[Mapping[str, Any]]] = {}
    for one in injections:
        kinds.setdefault(one["kind"], []).append(one)
    lines = [f"{'kind':32} {'phase':9} count  back wrong   median    worst  lost"]
    for name, found in sorted(kinds.items()):
        times = [one["seconds"] for one in found]
        lines.append(
            f"{name:32} {found[0]['phase']:9} {len(found):5}"
            f" {sum(one['recovered'] is True for one in found):5} "
            f"{sum(one['identical'] is not True for one in found):5}"
            f" {statistics.median(times):6.1f} s "
            f"{max(times):6.1f} s {max(one['steps_lost'] for one in found):5}"
        )
    broken = [one for one in injections if not one["kept"]]
    lines += [
        f"{one['index']} {one['kind']} at {one['victim']}: {one['message']}" for one in broken
    ]
    lines.append(
        f"{len(injections) - len(broken)} of {len(injections)} injections of {len(kinds)} kinds:"
        " training went on by "
        "itself, and every checkpoint has the bits of the undisturbed run"
    )
    return "\n".join(lines)


def text_of(verdicts: Sequence[Verdict], *, seed: int, seconds: float) -> str:
    """Return the table of a campaign."""
    rate = 60 * len(verdicts) / max(seconds, 1)
    return (
        f"{table_of(as_injections(verdicts))}. Seed {seed}, {seconds:.0f} s, {rate:.1f}"
        " injections a minute"
    )


def dump_json(
    verdicts: Sequence[Verdict], *, seed: int, seconds: float, options: Mapping[str, Any]
) -> str:
    """Return a report as JSON."""
    members = {
        "suite": __version__,
        "seed": seed,
        "seconds": round(seconds, 1),
        "options": dict(options),
    }
    return json.dumps({**members, "injections": as_injections(verdicts)}, indent=2, sort_keys=True)


def sum_of(reports: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of several campaigns from their JSON reports."""
    seeds = ", ".join(str(one["seed"]) for one in reports)
    seconds = sum(one["seconds"] for one in reports)
    return (
        f"{table_of([one for report in reports for one in report['injections']])}. Seeds"
        f" {seeds}, {seconds:.0f} s"
    )


def as_run(verdicts: Sequence[Verdict], *, adapter: str, seed: int, seconds: float) -> Run:
    """Return the campaign as a run of the suite, for `dump_junit` and `dump_html`."""
    results = tuple(
        Result(
            case=Case(
                id=f"chaos/{one.kind.name}/{one.index}",
                description=f"{one.kind.does} ({one.victim}, {one.kind.phase})",
                kind="chaos",
                expect=Expectation(outcome="accept"),
                why=one.kind.promise,
            ),
            status=Status.PASS if one.is_kept else Status.FAIL,
            message=f"{one.steps_lost} steps lost; {one.message}" if one.message else "",
            seconds=one.seconds,
        )
        for one in verdicts
    )
    described = Description(
        name="chaos", version=f"seed {seed}", spec=(), roles=(), features=(), kinds=()
    )
    return Run(
        adapter=adapter,
        description=described,
        results=results,
        selection=(f"--seed {seed}",),
        seconds=seconds,
        unix_s=int(time.time()),
    )
