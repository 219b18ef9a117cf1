"""The record of a run: subject, place, method, and every raw figure."""

from __future__ import annotations

import dataclasses
import datetime as dt
import importlib.metadata
import json
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.figures import Figure
from benchmarks.machine import describe_machine, describe_storage

_ROOT = Path(__file__).parents[1]
_PACKAGES = ("ckptfmt", "torch", "safetensors", "numpy", "blake3")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The results of a benchmark for a record.

    Attributes:
        workload: the saved or loaded state.
        settings: the settings of each contestant, by name.
        repeats: the number of rounds, by experiment.
        rounds: the raw figures of each round, by experiment.
        figures: the summaries by quantity; a name ends with its unit.
        ratios: the figures with a goal, by the project's names.
        goals: the goal of each ratio.
        memory: the peaks in bytes.
        notes: further facts for readers.
        cache: the state of the page cache and of memory.
    """

    workload: Mapping[str, object]
    settings: Mapping[str, object]
    repeats: Mapping[str, int]
    rounds: Mapping[str, list[dict[str, Any]]]
    figures: Mapping[str, Figure]
    ratios: Mapping[str, Figure]
    goals: Mapping[str, str]
    memory: Mapping[str, object]
    notes: Mapping[str, object]
    cache: str = "fresh files; memory of all contestants touched and kept hot"


def build_record(
    command: str, outcome: Outcome, *, directory: Path, began: dt.datetime
) -> dict[str, Any]:
    """Return the record as plain values.

    Args:
        command: the command for a rerun, without paths of this machine.
        directory: the directory of the written files.
    """
    ended = dt.datetime.now(dt.UTC)
    return {
        "record_version": 1,
        "command": command,
        **_describe_commit(),
        "date": began.isoformat(timespec="seconds"),
        "duration_s": round((ended - began).total_seconds(), 1),
        "python": platform.python_version(),
        "packages": {name: _version_of(name) for name in _PACKAGES},
        "machine": describe_machine(),
        "storage": describe_storage(directory),
        "cache": outcome.cache,
        "workload": _rounded(outcome.workload),
        "settings": dict(outcome.settings),
        "repeats": dict(outcome.repeats),
        "ratios": {name: _rounded(figure.median) for name, figure in outcome.ratios.items()},
        "spread": {name: _rounded(figure.spread()) for name, figure in outcome.ratios.items()},
        "goals": dict(outcome.goals),
        "figures": {
            name: _rounded(dataclasses.asdict(figure)) for name, figure in outcome.figures.items()
        },
        "memory": dict(outcome.memory),
        "notes": _rounded(outcome.notes),
        "rounds": {name: _rounded(rounds) for name, rounds in outcome.rounds.items()},
    }


def _version_of(name: str) -> str | None:
    """Return the version of a package; None for a checkout without installation."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def dump_record(record: Mapping[str, Any]) -> str:
    """Return the record as JSON, a value per line, and a round of raw figures per line."""
    lines = []
    for key, value in record.items():
        if key == "rounds":
            tables = [
                f"{json.dumps(name)}: [\n      "
                + ",\n      ".join(json.dumps(row) for row in rows)
                + "\n    ]"
                for name, rows in value.items()
            ]
            lines.append('  "rounds": {\n    ' + ",\n    ".join(tables) + "\n  }")
        elif isinstance(value, Mapping) and value:
            entries = [
                f"    {json.dumps(name)}: {json.dumps(entry)}" for name, entry in value.items()
            ]
            lines.append(f"  {json.dumps(key)}: {{\n" + ",\n".join(entries) + "\n  }")
        else:
            lines.append(f"  {json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def default_path(record: Mapping[str, Any], name: str) -> Path:
    """Return the default path of a record: below ``out/``, which git ignores."""
    machine = record["machine"]
    kind = f"{machine['cores']}cores-{round(machine['ram_gib'])}gib-{machine['arch']}"
    return Path("out") / "benchmarks" / f"{name}_{kind}_{record['date'][:10].replace('-', '')}.json"


def _describe_commit() -> dict[str, object]:
    """Return the checkout's commit and whether files have changed since; None without git."""
    return {
        "git_commit": _ask_git("rev-parse", "HEAD"),
        "dirty": None if (changes := _ask_git("status", "--porcelain")) is None else bool(changes),
    }


def _ask_git(*arguments: str) -> str | None:
    try:
        asked = subprocess.run(
            ["git", *arguments], cwd=_ROOT, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return asked.stdout.strip()


def _rounded(value: Any) -> Any:
    """Return the value with six significant digits, the precision of the clocks."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {key: _rounded(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(entry) for entry in value]
    return value


def format_record(record: Mapping[str, Any]) -> str:
    """Return the tables of a record: the figures, and the ratios with their goals."""
    workload = record["workload"]
    machine = record["machine"]
    storage = record["storage"]
    head = (
        f"{workload['nbytes'] / 1e9:.3g} GB in {workload['tensors']} tensors; {machine['cores']}"
        " cores, "
        f"{machine['ram_gib']} GiB, {storage['fs']}; torch {record['packages']['torch']}; "
        f"{record['duration_s']:.0f} s, load {machine['load_average'][0]:.1f}"
    )
    figures = [
        (name, *(_number(figure[key]) for key in ("median", "p10", "p90")), str(figure["count"]))
        for name, figure in record["figures"].items()
    ]
    ratios = [
        (
            name,
            *(_number(value) for value in (ratio, spread["p10"], spread["p90"])),
            record["goals"].get(name, ""),
        )
        for (name, ratio), spread in zip(
            record["ratios"].items(), record["spread"].values(), strict=True
        )
    ]
    lines = [head, "", *_align([("", "median", "p10", "p90", "n"), *figures])]
    lines += ["", *_align([("ratio", "median", "p10", "p90", "goal"), *ratios])]
    notes = {**record["memory"], **record["notes"]}
    lines += ["", *(f"{name}: {_text(value)}" for name, value in notes.items())]
    return "\n".join(lines)


def _align(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            _pad(cell, width, at) for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _pad(cell: str, width: int, column: int) -> str:
    return cell.ljust(width) if column == 0 else cell.rjust(width)


def _number(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def _text(value: object) -> str:
    if isinstance(value, Mapping):
        return "; ".join(f"{key} {_text(entry)}" for key, entry in value.items())
    if isinstance(value, list):
        return ", ".join(_text(entry) for entry in value)
    if isinstance(value, int) and value >= 2**20:
        return f"{value / 2**20:.1f} MiB"
    return _number(value) if isinstance(value, float) else str(value)
