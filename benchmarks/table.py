"""A record as lines of text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def format_record(record: Mapping[str, Any]) -> str:
    """Return the tables of a record: what was measured, and the ratios beside what they are meant to be."""
    workload, machine, storage = record["workload"], record["machine"], record["storage"]
    head = (
        f"{workload['nbytes'] / 1e9:.3g} GB in {workload['tensors']} tensors; {machine['cores']} cores, "
        f"{machine['ram_gib']} GiB, {storage['fs']}; torch {record['packages']['torch']}; "
        f"{record['duration_s']:.0f} s, load {machine['load_average'][0]:.1f}"
    )
    figures = [
        (name, *(_number(figure[key]) for key in ("median", "p10", "p90")), str(figure["count"]))
        for name, figure in record["figures"].items()
    ]
    ratios = [
        (name, *(_number(value) for value in (ratio, spread["p10"], spread["p90"])), record["goals"].get(name, ""))
        for (name, ratio), spread in zip(record["ratios"].items(), record["spread"].values(), strict=True)
    ]
    lines = [head, "", *_align([("", "median", "p10", "p90", "n"), *figures])]
    lines += ["", *_align([("ratio", "median", "p10", "p90", "goal"), *ratios])]
    notes = {**record["memory"], **record["notes"]}
    lines += ["", *(f"{name}: {_text(value)}" for name, value in notes.items())]
    return "\n".join(lines)


def _align(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(_pad(cell, width, at) for at, (cell, width) in enumerate(zip(row, widths, strict=True))).rstrip()
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
