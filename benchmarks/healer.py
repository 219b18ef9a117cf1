"""Decisions of a healer over runs with injected failures, beside three controls.

Each case is a whole life of a run: processes start until the run ends, stops or loops. The cases
are those of `tests.loop.healer_scenes`: a share of the lives is decided as the cause demands.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Final

from benchmarks.figures import Figure, summarize
from benchmarks.record import Outcome
from benchmarks.rounds import Progress, Workplace
from tests.loop.healer_scenes import (
    CAUSES,
    CONTROLS,
    STARTS,
    STARTS_AT_ONE,
    Case,
    HealerName,
    Result,
    expected,
    make_case,
    play_all,
)

#: The number of cases that each control plays.
_CONTROL_CASES: Final = 49
#: The smallest share of cases that the healer has to decide as demanded.
_SHARE: Final = 0.95


def measure_healer(count: int, *, seed: int, place: Workplace, progress: Progress) -> Outcome:
    """Play cases with the healer, and the first cases with each control.

    Args:
        count: the number of cases.
        seed: the seed of the first case; the next cases have the next seeds.
    """
    cases = [make_case(number) for number in range(seed, seed + count)]
    played: dict[HealerName, list[Case]] = {
        "healer": cases,
        **dict.fromkeys(CONTROLS, cases[:_CONTROL_CASES]),
    }
    rows: dict[str, list[dict[str, Any]]] = {}
    for healer, mine in played.items():

        def say(number: int, healer: HealerName = healer, total: int = len(mine)) -> None:
            progress.say(f"healer: {healer}, {number} of {total} cases")

        results = play_all(
            [(case, healer) for case in mine],
            place.fresh("lives"),
            players=max(1, os.cpu_count() or 1),
            say=say,
        )
        rows[healer] = [_row(case, result) for case, result in zip(mine, results, strict=True)]
    progress.say("")
    goals = {
        "healer_decided": f">= {_SHARE}",
        "healer_most_starts": f"<= {STARTS_AT_ONE}",
        "healer_loops": "<= 0",
        "healer_explained": ">= 1",
    }
    return Outcome(
        workload={
            "nbytes": 3 * 4 * (8 * 16 + 16 + 16 + 1),
            "tensors": 12,
            "cases": count,
            "seed": seed,
            "state": "two linear layers under AdamW or SGD; a Sampler; 30 to 40 steps",
        },
        settings={
            "ckptfmt": {"saver": "inline", "failed_saves": 0},
            **{name: {"cases": len(mine)} for name, mine in played.items()},
        },
        repeats=dict.fromkeys(rows, 1),
        rounds=rows,
        figures={
            f"{name.replace(' ', '_')}_life_s": summarize([row["seconds"] for row in found])
            for name, found in rows.items()
        },
        ratios={
            f"{name.replace(' ', '_')}_{key}": Figure(
                median=value, p10=value, p90=value, count=len(found)
            )
            for name, found in rows.items()
            for key, value in _judge(found).items()
        },
        goals=goals,
        memory={},
        notes={
            "decided": "share of the cases that are decided as the cause demands",
            "most_starts": "greatest number of launches that began at one checkpoint, or failed"
            " in one step",
            "loops": f"number of runs that neither ended nor stopped within {STARTS} starts",
            "explained": "share of the decisions that have a line of text",
            "seeds": f"healer: {seed} to {seed + count - 1}; each control: {seed} to"
            f" {seed + len(played[CONTROLS[0]]) - 1}",
            **_table(rows),
            **{
                f"seed {row['seed']}": f"{row['case']}: {'; '.join(row['complaints'])}"
                for row in rows["healer"]
                if row["complaints"]
            },
        },
        cache="warm",
    )


def _row(case: Case, result: Result) -> dict[str, Any]:
    """Return the raw figures of a life."""
    texts = result.texts
    return {
        "seed": case.seed,
        "cause": case.cause,
        "case": case.describe(),
        "choices": result.choices,
        "complaints": expected(case).complaints(result),
        "most_starts": max(result.starts, result.failures),
        "processes": result.processes,
        "launches": result.launches,
        "is_loop": result.is_loop or result.is_late,
        "decisions": len(texts),
        "explained": sum(bool(text.strip()) and text.isprintable() for text in texts),
        "ended": result.ended,
        "outcome": result.cause,
        "seconds": result.seconds,
    }


def _judge(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the figures with a goal, of some lives."""
    decisions = sum(row["decisions"] for row in rows)
    return {
        "decided": sum(not row["complaints"] for row in rows) / len(rows),
        "most_starts": float(max(row["most_starts"] for row in rows)),
        "loops": float(sum(row["is_loop"] for row in rows)),
        "explained": sum(row["explained"] for row in rows) / max(1, decisions),
    }


def _table(rows: dict[str, list[dict[str, Any]]]) -> dict[str, str]:
    """Return a line for each healer and cause."""
    lines = {}
    for healer, found in rows.items():
        for cause in (*CAUSES, "all"):
            mine = [row for row in found if cause in (row["cause"], "all")]
            if not mine:
                continue
            decided = sum(not row["complaints"] for row in mine)
            processes = max(row["processes"] for row in mine)
            judged = _judge(mine)
            lines[f"{healer:15}  {cause:19}"] = (
                f"{len(mine):3} cases, {decided:3} decided as demanded, at most"
                f" {judged['most_starts']:2.0f} starts at one step, {processes:2} in all,"
                f" {judged['loops']:2.0f} loops"
            )
    return lines
