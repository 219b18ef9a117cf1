"""The claim level of a run, and a badge with the level.

Each level includes all levels below: S0 the bytes in any layout, S1 the order of samples, S2 the
same microbatches per logical worker, T1 the same trajectory on the same layout, T2 the same
trajectory on any number of workers.
"""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Iterable
from typing import Final

from ckptfmt_conformance.cells import WITNESSED
from ckptfmt_conformance.judge import Status
from ckptfmt_conformance.runner import Result, Run
from ckptfmt_conformance.seeded import PREFIX, SEEDED

__all__ = [
    "LEVELS",
    "SELF_REPORTED",
    "ProfileCount",
    "badge_svg",
    "claim_of",
    "count_profiles",
    "said_claim",
]

LEVELS: Final = ("S0", "S1", "S2", "T1", "T2")

#: Features that belong to a level. The minimum of a level consists of the cases that need no
#: feature beyond these.
_NEEDED: Final[dict[str, frozenset[str]]] = {
    "S1": frozenset({"new-layout", "layout:ddp", "layout:fsdp2", "layout:tp"}),
    "T2": frozenset({"layout:elastic", "new-world-size"}),
}
#: A note beside each claim: the suite can't know whether anybody but the adapter's authors ran it.
SELF_REPORTED: Final = "self-reported"

_GREEN: Final = "#2e7d32"
_YELLOW: Final = "#8d6e00"
_RED: Final = "#b3261e"
_GREY: Final = "#5f6368"
#: Approximate width of a character, in pixels, of a font like Verdana at 11 pixels.
_CHARACTER_WIDTH: Final = 6.6


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProfileCount:
    """The cases of a profile in a run.

    Attributes:
        name: the profile, or the companion.
        passed: number of the profile's cases that passed.
        total: number of the profile's cases for the claimed profiles.
        is_held: whether the run is green, all these cases passed, and none was left out by a
            selection.
    """

    name: str
    passed: int
    total: int
    is_held: bool


def count_profiles(run: Run) -> list[ProfileCount]:
    """Return the counts of all claimed profiles, sorted by name.

    A case belongs to each profile that the case needs. Without a claim of profiles, all profiles
    count, and a case that was left out is a case that didn't pass.
    """
    claimed = set(run.description.profiles)
    found: dict[str, list[Result]] = {}
    for result in run.results:
        needed = result.case.profiles
        if not claimed or set(needed) <= claimed:
            for name in needed:
                found.setdefault(name, []).append(result)
    complete = run.is_green and not _is_partial(run)
    counts = []
    for name, results in sorted(found.items()):
        passed = sum(result.status is Status.PASS for result in results)
        counts.append(
            ProfileCount(
                name=name,
                passed=passed,
                total=len(results),
                is_held=complete and passed == len(results),
            )
        )
    return counts


def claim_of(run: Run) -> str:
    """Return the highest level that is reached together with all levels below; "" for none.

    Each level has a minimum: all of its cases that need no feature beyond the level's own. Each
    case of the minimum has to pass. S0 rests on the vectors that are opened, read and resharded,
    and on the questions that a seed drew (`seeded`). Each level above S0 rests on the trajectories
    that claim the level. T1 and T2 also need some trajectories that the suite's own process trains
    and judges (`trajectories.witness`). An optional feature that isn't supported lowers no level,
    and is counted beside the claim.
    """
    if not run.is_green or run.selection:
        return ""
    reached = ""
    passed = _kinds_that_pass(run.results)
    for level in LEVELS:
        asked = [result for result in run.results if _level_of(result) == level]
        if any(result.status is Status.XFAIL for result in asked):
            break
        least = [result for result in asked if _is_needed(result, level)]
        is_reached = bool(least) and all(result.status is Status.PASS for result in least)
        if level == "S0" and not (
            is_reached and {"open", "read", "reshard", SEEDED} <= _kinds_that_pass(asked)
        ):
            break
        if level in ("T1", "T2") and WITNESSED not in passed:
            break
        if is_reached:
            reached = level
    return reached


def said_claim(run: Run) -> str:
    """Return the claim with a note on self-reporting, and with the run's seed."""
    seed = "" if run.seed is None else f"; the same questions: --seed {run.seed}"
    return f"{claim_of(run)}, {SELF_REPORTED}{seed}" if claim_of(run) else ""


def _level_of(result: Result) -> str:
    return (
        str((result.case.request or {}).get("claim", ""))
        if result.case.kind == "trajectory"
        else "S0"
    )


def _is_needed(result: Result, level: str) -> bool:
    """Return whether a case belongs to the minimum of a level."""
    case = result.case
    if level == "S0" and (
        case.kind not in ("open", "read", "reshard") or case.profiles not in ((), ("R-core",))
    ):
        return False
    # A case of a version that the adapter doesn't speak is skipped, unless the case checks that the
    # adapter refuses the version.
    is_of_another_version = result.status is Status.SKIPPED and "version" in result.message
    return set(case.features) <= _NEEDED.get(level, frozenset()) and not is_of_another_version


def _kinds_that_pass(results: Iterable[Result]) -> set[str]:
    passed = [result.case for result in results if result.status is Status.PASS]
    found = {case.kind for case in passed}
    for prefix, name in ((PREFIX, SEEDED), (WITNESSED, WITNESSED)):
        found |= {name for case in passed if case.id.startswith(prefix)}
    return found


def badge_text(run: Run) -> tuple[str, str]:
    """Return the text of the right half of the badge, and the colour."""
    counts = run.counts
    red = counts[Status.FAIL] + counts[Status.ERROR] + counts[Status.XPASS]
    if red:
        return f"{red} failing", _RED
    if run.selection or not run.is_green:
        return "partial run", _GREY
    left = counts[Status.UNSUPPORTED]
    known = counts[Status.XFAIL]
    reached = claim_of(run)
    claim = f"{reached}, {SELF_REPORTED}" if reached else "no claim"
    notes = [f"{known} known failures"] * bool(known) + [f"{left} unsupported"] * bool(left)
    return ", ".join([claim, *notes]), _YELLOW if notes or claim == "no claim" else _GREEN


def _is_partial(run: Run) -> bool:
    """Return whether a selection left out cases of profiles; a choice of whole profiles doesn't."""
    return any(not text.startswith("--profile ") for text in run.selection)


def _profile_text(run: Run, profile: str) -> tuple[str, str]:
    """Return the text of the right half of a profile's badge, and the colour."""
    count = next((count for count in count_profiles(run) if count.name == profile), None)
    if count is None:
        return "not claimed", _GREY
    if _is_partial(run):
        return "partial run", _GREY
    if not count.is_held:
        return f"{count.passed} of {count.total}", _RED
    return f"{count.total} cases, {SELF_REPORTED}", _GREEN


def badge_svg(run: Run, *, profile: str = "") -> str:
    """Return a badge as SVG: the version of the format on the left, the claim on the right.

    Args:
        profile: the name of a profile, for a badge of this profile instead of the claim level.
    """
    left = f"ckptfmt {'/'.join(run.description.spec)}" + (f" {profile}" if profile else "")
    right, colour = _profile_text(run, profile) if profile else badge_text(run)
    widths = [round(len(text) * _CHARACTER_WIDTH) + 12 for text in (left, right)]
    texts = [(left, widths[0] / 2), (right, widths[0] + widths[1] / 2)]
    title = html.escape(f"{left}: {right}")
    shown = "".join(f'<text x="{x:g}" y="14">{html.escape(text)}</text>' for text, x in texts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{sum(widths)}" height="20" role="img"'
        f' aria-label="{title}">'
        f"<title>{title}</title>"
        f'<rect width="{widths[0]}" height="20" fill="#3c4043"/>'
        f'<rect x="{widths[0]}" width="{widths[1]}" height="20" fill="{colour}"/>'
        '<g fill="#fff" text-anchor="middle" font-family="Verdana,Geneva,DejaVu Sans,sans-serif"'
        ' font-size="11">'
        f"{shown}</g></svg>\n"
    )
