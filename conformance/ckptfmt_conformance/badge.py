"""The claim level that a run reached, and a badge that says it.

The levels, each with all below it: S0 the bytes in any layout, S1 the order of samples, S2 the same microbatches per
logical worker, T1 the same trajectory on the same layout, T2 the same trajectory on any number of workers.
"""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import Final

from ckptfmt_conformance.judge import Status
from ckptfmt_conformance.runner import Result, Run

__all__ = ["LEVELS", "badge_svg", "claim_of"]

LEVELS: Final = ("S0", "S1", "S2", "T1", "T2")

_GREEN: Final = "#2e7d32"
_YELLOW: Final = "#8d6e00"
_RED: Final = "#b3261e"
_GREY: Final = "#5f6368"
#: Widths of characters in a font like Verdana at 11 pixels are near enough to this.
_CHARACTER_WIDTH: Final = 6.6


def claim_of(run: Run) -> str:
    """Return the highest level whose cases passed, with those of all levels below it; "" for none.

    S0 rests on the vectors: all are green, and those that open, read and reshard were not left out. A level above it
    is reached by a trajectory that claims it. What isn't supported lowers nothing, and is counted beside the claim.
    """
    if not run.is_green or run.selection:
        return ""
    reached = ""
    for level in LEVELS:
        asked = [result for result in run.results if _level_of(result) == level]
        if any(result.status is Status.XFAIL for result in asked):
            break
        if level == "S0" and not {"open", "read", "reshard"} <= _kinds_that_pass(asked):
            break
        if _kinds_that_pass(asked):
            reached = level
    return reached


def _level_of(result: Result) -> str:
    return str((result.case.request or {}).get("claim", "")) if result.case.kind == "trajectory" else "S0"


def _kinds_that_pass(results: Iterable[Result]) -> set[str]:
    return {result.case.kind for result in results if result.status is Status.PASS}


def badge_text(run: Run) -> tuple[str, str]:
    """Return the right half of the badge, and its colour."""
    counts = run.counts
    red = counts[Status.FAIL] + counts[Status.ERROR] + counts[Status.XPASS]
    if red:
        return f"{red} failing", _RED
    if run.selection or not run.is_green:
        return "partial run", _GREY
    left = counts[Status.UNSUPPORTED]
    known = counts[Status.XFAIL]
    claim = claim_of(run) or "no claim"
    notes = [f"{known} known failures"] * bool(known) + [f"{left} unsupported"] * bool(left)
    return ", ".join([claim, *notes]), _YELLOW if notes or claim == "no claim" else _GREEN


def badge_svg(run: Run) -> str:
    """Return a badge: the version of the format on the left, the claim on the right."""
    left = f"ckptfmt {'/'.join(run.description.spec)}"
    right, colour = badge_text(run)
    widths = [round(len(text) * _CHARACTER_WIDTH) + 12 for text in (left, right)]
    texts = [(left, widths[0] / 2), (right, widths[0] + widths[1] / 2)]
    title = html.escape(f"{left}: {right}")
    shown = "".join(f'<text x="{x:g}" y="14">{html.escape(text)}</text>' for text, x in texts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{sum(widths)}" height="20" role="img" aria-label="{title}">'
        f"<title>{title}</title>"
        f'<rect width="{widths[0]}" height="20" fill="#3c4043"/>'
        f'<rect x="{widths[0]}" width="{widths[1]}" height="20" fill="{colour}"/>'
        f'<g fill="#fff" text-anchor="middle" font-family="Verdana,Geneva,DejaVu Sans,sans-serif" font-size="11">'
        f"{shown}</g></svg>\n"
    )
