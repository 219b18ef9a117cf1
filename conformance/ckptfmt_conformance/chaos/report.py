"""What a campaign says: for eyes, by kind; for programs; and as a run of the suite, for CI and as a page."""

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

__all__ = ["as_run", "dump_json", "text_of"]


def by_kind(verdicts: Sequence[Verdict]) -> dict[str, list[Verdict]]:
    """Return the injections of each kind."""
    groups: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        groups.setdefault(verdict.kind.name, []).append(verdict)
    return dict(sorted(groups.items()))


def text_of(verdicts: Sequence[Verdict], *, seed: int, seconds: float) -> str:
    """Return a table of the kinds, what wasn't kept, and the sums."""
    lines = [f"{'kind':32} {'phase':9} count  back  same   median    worst  lost"]
    for name, found in by_kind(verdicts).items():
        times = [verdict.seconds for verdict in found]
        lines.append(
            f"{name:32} {found[0].kind.phase:9} {len(found):5} {sum(one.recovered is True for one in found):5} "
            f"{sum(one.identical is True for one in found):5} {statistics.median(times):6.1f} s {max(times):6.1f} s "
            f"{max(one.steps_lost for one in found):5}"
        )
    lines += [
        "",
        *(f"{one.index} {one.kind.name} at {one.victim}: {one.message}" for one in verdicts if not one.is_kept),
    ]
    kept = sum(one.is_kept for one in verdicts)
    lines.append(
        f"{kept} of {len(verdicts)} injections of {len(by_kind(verdicts))} kinds: training went on by itself, and "
        f"every checkpoint has the bits of the undisturbed run. Seed {seed}, {seconds:.0f} s, "
        f"{60 * len(verdicts) / max(seconds, 1):.1f} injections a minute"
    )
    return "\n".join(lines)


def dump_json(verdicts: Sequence[Verdict], *, seed: int, seconds: float, options: Mapping[str, Any]) -> str:
    """Return a report for programs."""
    injections = [
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
    members = {"suite": __version__, "seed": seed, "seconds": round(seconds, 1), "options": dict(options)}
    return json.dumps({**members, "injections": injections}, indent=2, sort_keys=True)


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
    described = Description(name="chaos", version=f"seed {seed}", spec=(), roles=(), features=(), kinds=())
    return Run(
        adapter=adapter,
        description=described,
        results=results,
        selection=(f"--seed {seed}",),
        seconds=seconds,
        unix_s=int(time.time()),
    )
