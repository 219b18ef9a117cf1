"""``interval`` and ``simulate``: the cost of saves and failures, by formulas and by simulation."""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, TypeVar

from ckptfmt.cli.console import Console, clean, count_text, print_json
from ckptfmt.errors import Code, err
from ckptfmt.loop.interval import (
    Level,
    best_interval_s,
    choose_every,
    expected_waste,
    shortest_interval_s,
    young_interval_s,
)
from ckptfmt_tools.simulator import NODE, Failure, Scenario, simulate

T = TypeVar("T")

_DURATION: Final = re.compile(r"([0-9]+(?:\.[0-9]*)?(?:e[+-]?[0-9]+)?) ?(s|min|h|d)?")
_UNIT_S: Final = {"": 1.0, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
#: The names of the levels, by their number.
_NAMES: Final = {1: ("home",), 2: ("cache", "home"), 3: ("cache", "peers", "home")}
#: The multiples of the best interval shown as rows.
_ROWS: Final = (1 / 8, 1 / 4, 1 / 2, 1 / math.sqrt(2), 1.0, math.sqrt(2), 2.0, 4.0, 8.0)
_TRACE_NBYTES: Final = 64 << 20


def run(arguments: argparse.Namespace) -> int:
    """Print the waste of a run, and return the exit code. Raises: StateError(ARGUMENT)."""
    return (
        _show_interval(arguments)
        if arguments.command == "interval"
        else _show_simulation(arguments)
    )


def _show_interval(arguments: argparse.Namespace) -> int:
    levels = _scenario_of(arguments, duration_s=1.0).levels_with_nodes()
    best_s = best_interval_s(levels)
    young_s = young_interval_s(levels)
    shortest_s = shortest_interval_s(levels)
    rows = [(best_s * factor, expected_waste(best_s * factor, levels)) for factor in _ROWS
            if best_s * factor >= shortest_s]  # fmt: skip
    told = [
        {
            "interval_s": interval_s,
            "waste": waste.total,
            "of_saves": waste.of_saves,
            **dataclasses.asdict(waste),
        }
        for interval_s, waste in rows
    ]
    best = next(one for one in told if one["interval_s"] == best_s)
    if arguments.json:
        bounds = {"young_interval_s": young_s, "shortest_interval_s": shortest_s}
        print_json({"levels": _levels_json(levels), "best": best, **bounds, "intervals": told})
        return 0
    console = Console()
    header = ("interval", "waste", "saving", "redone", "restoring", "")
    lines = [
        [
            seconds_text(interval_s),
            _percent(waste.total),
            _percent(waste.saving),
            _percent(waste.redone),
            _percent(waste.restoring),
            "best" if interval_s == best_s else "",
        ]
        for interval_s, waste in rows
    ]
    console.table([header, *lines], right=(0, 1, 2, 3, 4), indent=0)
    _print_levels(console, levels)
    console.line()
    console.line(
        f"Young's interval is {seconds_text(young_s)}; none is shorter than"
        f" {seconds_text(shortest_s)}, the"
    )
    console.line(
        "time in which saves are committed. Waste is a share of the time; training has the rest."
    )
    return 0


def _show_simulation(arguments: argparse.Namespace) -> int:
    trace = (
        None
        if arguments.trace is None
        else _read_trace(arguments.trace, _names(len(arguments.commit)))
    )
    duration_s = _seconds("--duration", arguments.duration)
    scenario = _scenario_of(arguments, duration_s=duration_s, shape=arguments.shape, trace=trace)
    levels = scenario.levels_with_nodes()
    interval_s = (
        best_interval_s(levels) if arguments.every is None else _seconds("--every", arguments.every)
    )
    runs = arguments.runs if trace is None else 1
    outcome = simulate(scenario, interval_s, runs=runs, seed=arguments.seed, trace=trace)
    is_exact = trace is None and scenario.shape == 1
    formula = 1 - expected_waste(interval_s, levels).total if is_exact else None
    if arguments.json:
        members = {
            name: value for name, value in dataclasses.asdict(outcome).items() if name != "runs"
        }
        members["half_width"] = None if math.isinf(outcome.half_width) else outcome.half_width
        print_json(
            {
                "levels": _levels_json(levels),
                "nodes": scenario.nodes,
                "interval_s": interval_s,
                "duration_s": scenario.duration_s,
                "seed": arguments.seed,
                **members,
                "goodput_by_formula": formula,
                "runs": [dataclasses.asdict(one) for one in outcome.runs],
            }
        )
        return 0
    console = Console()
    width = (
        ""
        if math.isinf(outcome.half_width)
        else f" +- {_percent(outcome.half_width)} (95 % confidence)"
    )
    by_formula = "" if formula is None else f"; by formula {_percent(formula)}"
    console.line(
        ("goodput", "dim"), "    ", (_percent(outcome.goodput), "bold"), f"{width}{by_formula}"
    )
    for name in ("saving", "redone", "restoring"):
        console.line((name.ljust(9), "dim"), f"  {_percent(getattr(outcome, name))}")
    runs = count_text(len(outcome.runs), "run")
    failures = count_text(outcome.failures, "failure")
    saves = count_text(outcome.saves, "save")
    console.line(
        ("played", "dim"),
        f"     {runs} of {seconds_text(scenario.duration_s)}, {failures}, {saves}",
    )
    console.line(("interval", "dim"), f"   {seconds_text(interval_s)}")
    _print_levels(console, levels)
    return 0


def _print_levels(console: Console, levels: Sequence[Level]) -> None:
    header = ("level", "lost", "commit", "restore", "MTBF", "every")
    rows = [
        [
            clean(level.name),
            seconds_text(level.lost_s),
            seconds_text(level.commit_s),
            seconds_text(level.restore_s),
            seconds_text(level.mtbf_s),
            str(level.every),
        ]
        for level in levels
    ]
    console.line()
    console.table([header, *rows], right=(1, 2, 3, 4, 5), indent=0)


def _levels_json(levels: Sequence[Level]) -> list[dict[str, object]]:
    return [
        {**dataclasses.asdict(level), "mtbf_s": None if math.isinf(level.mtbf_s) else level.mtbf_s}
        for level in levels
    ]


# --- arguments ------------------------------------------------------------------------------------


def _names(count: int) -> tuple[str, ...]:
    return _NAMES.get(count) or tuple(f"level{number}" for number in range(1, count + 1))


def _scenario_of(
    arguments: argparse.Namespace,
    *,
    duration_s: float,
    shape: float = 1.0,
    trace: Sequence[Failure] | None = None,
) -> Scenario:
    """Return the scenario that the options describe, with the failure rates of a trace, if given.

    Raises: StateError(ARGUMENT).
    """
    count = len(arguments.commit)
    names = _names(count)
    times = {
        name: _each(
            f"--{name}", getattr(arguments, name), count, "0" if name == "lost" else "inf", _seconds
        )
        for name in ("lost", "commit", "restore", "mtbf")
    }
    levels = [
        Level(name=name, lost_s=lost_s, commit_s=commit_s, restore_s=restore_s, mtbf_s=mtbf_s)
        for name, lost_s, commit_s, restore_s, mtbf_s in zip(names, *times.values(), strict=True)
    ]
    node_mtbf_s = (
        math.inf if arguments.node_mtbf is None else _seconds("--node-mtbf", arguments.node_mtbf)
    )
    if trace is not None:
        seen = Counter(failure.level for failure in trace if failure.at_s < duration_s)
        rates = {number: duration_s / many for number, many in seen.items()}
        levels = [
            dataclasses.replace(one, mtbf_s=rates.get(number, math.inf))
            for number, one in enumerate(levels)
        ]
        node_mtbf_s = rates.get(NODE, math.inf) * arguments.nodes
    elif node_mtbf_s == math.inf and arguments.nodes != 1:
        remedy = "Give --node-mtbf; or put the failures of nodes into --mtbf."
        raise err(
            Code.ARGUMENT,
            "--nodes says nothing without --node-mtbf",
            where="--nodes",
            remedy=remedy,
        )
    made = Scenario(
        levels=tuple(levels),
        duration_s=duration_s,
        nodes=arguments.nodes,
        node_mtbf_s=node_mtbf_s,
        shape=shape,
    )
    if arguments.share is None:
        every = [level.every for level in choose_every(made.levels_with_nodes())]
    else:
        every = _each("--share", arguments.share, count, "1", _whole)
    told = zip(levels, every, strict=True)
    return dataclasses.replace(
        made, levels=tuple(dataclasses.replace(level, every=many) for level, many in told)
    )


def _each(
    option: str,
    typed: Sequence[str] | None,
    count: int,
    missing: str,
    read: Callable[[str, str], T],
) -> list[T]:
    """Return a value for each level. Raises: StateError(ARGUMENT)."""
    typed = [missing] * count if typed is None else typed
    if len(typed) != count:
        raise err(
            Code.ARGUMENT,
            (
                f"{option} has {count_text(len(typed), 'value')}, and --commit"
                f" {count_text(count, 'value')}"
            ),
            where=option,
            remedy="Give one value for each level, nearest first.",
        )
    return [read(option, one) for one in typed]


def _seconds(option: str, typed: str) -> float:
    """Return a time in seconds. Raises: StateError(ARGUMENT)."""
    found = _DURATION.fullmatch(typed)
    if found is None and typed != "inf":
        remedy = (
            "Write a number of seconds, or a number with min, h or d, such as 90, 5min or 1.5h."
        )
        raise err(Code.ARGUMENT, f"{clean(typed)!r} isn't a time", where=option, remedy=remedy)
    return math.inf if found is None else float(found[1]) * _UNIT_S[found[2] or ""]


def _whole(option: str, typed: str) -> int:
    if not typed.isdecimal() or len(typed) > 9:
        raise err(Code.ARGUMENT, f"{clean(typed)!r} isn't a whole number", where=option)
    return int(typed)


def _read_trace(path: str, names: Sequence[str]) -> list[Failure]:
    """Return the failures in a file, with lines ``SECONDS LEVEL`` or ``SECONDS node NUMBER``.

    The text after a # is a comment.

    Raises: StateError(ARGUMENT).
    """
    try:
        with Path(path).open("rb") as file:
            content = file.read(_TRACE_NBYTES + 1)
        lines = content.decode("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise err(Code.ARGUMENT, f"the trace can't be read: {error}", where=path) from error
    if len(content) > _TRACE_NBYTES:
        raise err(Code.ARGUMENT, f"the trace has more than {_TRACE_NBYTES:,} bytes", where=path)
    failures = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        where = f"{path}:{number}"
        if not words:
            continue
        if len(words) == 3 and words[1] == "node":
            failures.append(
                Failure(at_s=_seconds(where, words[0]), level=NODE, node=_whole(where, words[2]))
            )
        elif len(words) == 2 and words[1] in names:
            failures.append(Failure(at_s=_seconds(where, words[0]), level=names.index(words[1])))
        else:
            detail = (
                f"{clean(line)!r} isn't SECONDS and a level ({', '.join(names)}), or SECONDS"
                " node NUMBER"
            )
            raise err(Code.ARGUMENT, detail, where=where)
    return failures


def _percent(share: float) -> str:
    return f"{share * 100:.3f} %"


def seconds_text(seconds: float) -> str:
    """Return a time as a text with a unit; "never" for infinity.

    >>> (seconds_text(9.684), seconds_text(90), seconds_text(10800), seconds_text(0.0131),
    ...  seconds_text(0))
    ('9.68 s', '90 s', '3 h', '0.0131 s', '0 s')
    """
    if math.isinf(seconds):
        return "never"
    for unit, size, least in (("d", 86400.0, 2), ("h", 3600.0, 2), ("min", 60.0, 10)):
        if seconds >= least * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"
