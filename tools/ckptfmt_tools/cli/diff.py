"""``diff``: the tensors and values in which two checkpoints differ, and by how much.

The recorded digests of the blocks are compared first. Only differing blocks are read, provided that
both checkpoints divide their tensors alike. With ``--verify``, every byte of both checkpoints is
first read and compared with its digest. The output begins with a summary by field. The first
differing tensors and values follow; with ``--all``, all of them.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import time
from collections.abc import Iterator
from typing import Any, Final

from ckptfmt.adapters.context import ABSENT, find_differences
from ckptfmt.api import open_checkpoint
from ckptfmt.cli.console import (
    Cell,
    Console,
    Progress,
    bytes_text,
    clean,
    count_text,
    print_errors,
    print_json,
    share_text,
)
from ckptfmt.cli.places import check_field, checkpoint_path
from ckptfmt.cli.views import dump_view, value_text
from ckptfmt.documents.manifest import FIELDS
from ckptfmt.read.files import read_anew
from ckptfmt.read.reader import Checkpoint
from ckptfmt.state import place_of
from ckptfmt_tools.comparison import Change, Comparison, TensorDifference, ValueDifference, compare

#: The number of tensors, and the number of values, shown without ``--all``.
_SHOWN: Final = 3
_DIGITS: Final = ".3g"
#: The greatest distance shown in ULPs: a few ULPs indicate rounding; a larger number isn't helpful.
_MOST_ULPS: Final = 64
#: The numbers of places within a plain value: shown as text, and listed as JSON.
_SHOWN_PLACES = 12
_MOST_PLACES = 10_000


def run(arguments: argparse.Namespace) -> int:
    """Compare two checkpoints, print the differences, and return the exit code.

    Returns: 0 for equal checkpoints, 1 for different checkpoints, 2 if either is damaged.
    Raises: CkptError of any kind if either checkpoint can't be read.
    """
    check_field(arguments.field)
    bases = arguments.bases
    verify = arguments.verify
    paths = (arguments.one, arguments.other)
    if arguments.third is not None:  # a run, and two checkpoints of it
        paths = (
            checkpoint_path(arguments.one, arguments.other),
            checkpoint_path(arguments.one, arguments.third),
        )

    def show() -> Comparison:
        begin_s = time.perf_counter()
        with (
            open_checkpoint(paths[0], bases=bases) as first,
            open_checkpoint(paths[1], bases=bases) as second,
        ):
            total_nbytes = (first.manifest.nbytes + second.manifest.nbytes) // 2
            if verify:
                total_nbytes += first.manifest.stored_nbytes + second.manifest.stored_nbytes
            with Progress(lambda: total_nbytes, quiet=False) as progress:
                fields = FIELDS if arguments.field is None else (arguments.field,)
                with first.while_current(), second.while_current():
                    found = compare(
                        first, second, fields=fields, verify=verify, on_progress=progress.advance
                    )
            for side, damages in zip((first, second), found.damages, strict=True):
                if damages:
                    side.check_current()
            elapsed_s = time.perf_counter() - begin_s
            # The output reads no further files: the comparison has opened the parts of all
            # differing values.
            if arguments.json:
                _print_json(paths, (first, second), found, elapsed_s)
            else:
                _print_text(
                    paths,
                    (first, second),
                    found,
                    elapsed_s,
                    shown=None if arguments.all else _SHOWN,
                )
        return found

    found = read_anew(show)
    return 2 if found.is_damaged else 0 if found.is_same else 1


# --- JSON -----------------------------------------------------------------------------------------


def _print_json(
    paths: tuple[str, str],
    sides: tuple[Checkpoint, Checkpoint],
    found: Comparison,
    elapsed_s: float,
) -> None:
    print_json(
        {
            **{
                side: {"path": path, "digest": checkpoint.digest, "step": checkpoint.step}
                for side, path, checkpoint in zip(("a", "b"), paths, sides, strict=True)
            },
            "compared": "verified_bytes" if found.is_verified else "recorded_digests",
            "same": None if found.is_damaged else found.is_same,
            "damages": {
                side: [error.as_json() for error in errors]
                for side, errors in zip(("a", "b"), found.damages, strict=True)
            },
            "tensors": [_tensor_members(tensor) for tensor in found.tensors],
            "values": [_value_members(sides, value) for value in found.values],
            "counts": dataclasses.asdict(found.counts),
            "elapsed_s": round(elapsed_s, 6),
        }
    )


def _tensor_members(tensor: TensorDifference) -> dict[str, Any]:
    distance = None
    if tensor.distance is not None:
        distance = dataclasses.asdict(tensor.distance)
        distance["median_ulps"] = tensor.distance.median_ulps
        for name in ("max_abs", "max_rel"):
            distance[name] = _number(distance[name])
        distance["largest"] = [
            {
                "index": one.index,
                "values": [dump_view(value) for value in one.values],
                "gap": _number(one.gap),
            }
            for one in tensor.distance.largest
        ]
    return {**dataclasses.asdict(tensor), "only_in": _side(tensor.only_in), "distance": distance}


def _number(value: float | None) -> float | str | None:
    """Return a number for JSON, with infinity as the string "inf"."""
    return "inf" if value == math.inf else value


def _value_members(sides: tuple[Checkpoint, Checkpoint], value: ValueDifference) -> dict[str, Any]:
    changes = [
        {"place": place, "values": [dump_view(one), dump_view(other)]}
        for place, one, other in _list_changes(sides, value)[:_MOST_PLACES]
    ]
    return {**dataclasses.asdict(value), "only_in": _side(value.only_in), "changes": changes}


def _list_changes(
    sides: tuple[Checkpoint, Checkpoint], value: ValueDifference
) -> list[tuple[str, Any, Any]]:
    """Return the differing places within a plain value, each with both values.

    The list is empty for an RNG stream, and for a value that only a single checkpoint has.
    """
    if value.only_in is not None or value.field == "rng":
        return []
    one, other = (side.leaf(value.field, value.name, value.scope) for side in sides)
    return find_differences(one, other)


def _side(only_in: int | None) -> str | None:
    return None if only_in is None else "ab"[only_in]


# --- text -----------------------------------------------------------------------------------------


#: The explanation of a difference in RNG streams only, as between two runs with different seeds.
_ONLY_RNG: Final = (
    "Only RNG streams differ: the programs seeded them otherwise, or not at all, or drew from"
    " them otherwise. Streams"
    " from which the training doesn't draw don't matter."
)


def _print_text(
    paths: tuple[str, str],
    sides: tuple[Checkpoint, Checkpoint],
    found: Comparison,
    elapsed_s: float,
    *,
    shown: int | None,
) -> None:
    """Print the verdict, a summary by field, and the first `shown` tensors and values, or all."""
    console = Console()
    if found.is_damaged:
        _print_damages(console, paths, found)
        return
    steps = " and ".join(
        f"{clean(path)} (step {side.step})" for path, side in zip(paths, sides, strict=True)
    )
    same = "the same" if found.is_verified else "the same by digest"
    verdict: Cell = (same, "green bold") if found.is_same else ("different", "yellow bold")
    counts = found.counts
    console.line(
        verdict,
        (
            f"  {steps}: {count_text(len(found.tensors), 'tensor')} and"
            f" {count_text(len(found.values), 'value')} differ"
        ),
    )
    if (
        not found.is_same
        and not found.tensors
        and {value.field for value in found.values} == {"rng"}
    ):
        console.line((_ONLY_RNG, "yellow"))
    console.table(_field_rows(found))
    compared = f"{count_text(counts.tensor_count, 'tensor')} compared"
    blocks = (
        f"{counts.differing_count} of {count_text(counts.block_count, 'block')} differ by digest"
    )
    read = f"{bytes_text(counts.read_nbytes)} read of {bytes_text(counts.content_nbytes)}"
    console.line((f"  {compared}: {blocks}, {read} in {elapsed_s:.2f} s", "dim"))
    how = (
        "recorded digests were compared, the bytes behind equal ones were not read: --verify"
        " reads and checks them"
    )
    if found.is_verified:
        how = "before that, every byte of both was read and compared with its digest"
    console.line((f"  {how}", "dim"))
    for field, of_field in itertools.groupby(
        found.tensors[:shown], key=lambda tensor: tensor.field
    ):
        console.title(f"{field} tensors")
        console.table([cells for tensor in of_field for cells in _tensor_rows(tensor)], right=(3,))
    if found.values:
        console.title("values")
        console.table(
            [cells for value in found.values[:shown] for cells in _value_rows(sides, value)]
        )
    rest = len(found.tensors[_SHOWN:]) + len(found.values[_SHOWN:])
    if rest and shown is not None:
        console.line()
        console.line((f"  ... and {count_text(rest, 'difference')} more: --all shows them", "dim"))


def _field_rows(found: Comparison) -> Iterator[list[Cell | str]]:
    """Yield a row for each differing field: counts, and the largest difference of numbers."""
    for field in FIELDS:
        tensors = [tensor for tensor in found.tensors if tensor.field == field]
        values = [value for value in found.values if value.field == field]
        told = [
            count_text(len(one), noun)
            for one, noun in ((tensors, "tensor"), (values, "value"))
            if one
        ]
        if not told:
            continue
        alone = sum(tensor.only_in is not None for tensor in tensors)
        alone += sum(value.only_in is not None for value in values)
        sizes = [
            tensor.distance.max_abs
            for tensor in tensors
            if tensor.distance is not None and tensor.distance.max_abs is not None
        ]
        largest = f"by at most {format(max(sizes), _DIGITS)}" if sizes else ""
        only = f"{alone} in one of the checkpoints only" if alone else ""
        yield [(field, "bold"), " and ".join(told), ", ".join(filter(None, (largest, only)))]


def _print_damages(console: Console, paths: tuple[str, str], found: Comparison) -> None:
    """Print the violations found in either checkpoint."""
    for path, errors in zip(paths, found.damages, strict=True):
        if errors:
            console.title(clean(path))
            print_errors(console, errors, "red bold")
    console.line()
    counts = ", ".join(
        f"{clean(path)} has {count_text(len(errors), 'violation')}"
        for path, errors in zip(paths, found.damages, strict=True)
    )
    console.line(("damaged", "red bold"), f"  {counts}: nothing was compared")


def _tensor_rows(tensor: TensorDifference) -> list[list[Cell | str]]:
    """Return a row of a tensor, and a row for each of the elements that differ most."""
    changes = () if tensor.distance is None else tensor.distance.largest
    elements: list[list[Cell | str]] = [
        ["", "", "", "", _change_text(change), ""] for change in changes
    ]
    return [_tensor_cells(tensor), *elements]


def _change_text(change: Change) -> Cell:
    one, other = (format(value, ".6g") for value in change.values)
    return f"{list(change.index)}  {one} -> {other}", "cyan"


def _tensor_cells(tensor: TensorDifference) -> list[Cell | str]:
    scope = f" ({tensor.scope})" if tensor.scope != "global" else ""
    cells: list[Cell | str] = [
        (f"{clean(tensor.name)}{scope}", "bold"),
        (tensor.dtype, "cyan"),
        str(list(tensor.global_shape)),
    ]
    if tensor.only_in is not None:
        return [*cells, "", (f"only in {'AB'[tensor.only_in]}", "yellow"), ""]
    remarks = [
        f"{what}: {_said(one)} and {_said(other)}"
        for what, (one, other) in tensor.described.items()
    ]
    distance = tensor.distance
    if distance is None:
        return [*cells, "", "", ("; ".join(remarks), "yellow")]
    changed = (
        f"{distance.changed_count} ({share_text(distance.changed_count, distance.element_count)})"
    )
    sizes = [] if distance.max_abs is None else [f"by at most {format(distance.max_abs, _DIGITS)}"]
    if distance.max_rel is not None:
        sizes.append(f"relative {format(distance.max_rel, _DIGITS)}")
    if distance.max_ulps is not None and distance.max_ulps <= _MOST_ULPS:
        sizes += [f"half within {distance.median_ulps} ULP", f"all within {distance.max_ulps}"]
    sizes += [f"{distance.nan_count} NaN"] if distance.nan_count else []
    return [*cells, changed, ", ".join(sizes), ("; ".join(remarks), "yellow")]


def _said(value: object) -> str:
    return (
        clean(", ".join(map(str, value)) or "none")
        if isinstance(value, tuple)
        else clean(str(value))
    )


def _shown(value: object) -> str:
    return "nothing" if value is ABSENT else value_text(value)


def _value_rows(
    sides: tuple[Checkpoint, Checkpoint], value: ValueDifference
) -> list[list[Cell | str]]:
    """Return rows of a plain value: both values at each place that differs."""
    scope = f" ({value.scope})" if value.scope != "global" else ""
    field, _, name = place_of(value.field, value.name).partition(":")
    title: list[Cell | str] = [(field, "dim"), (f"{clean(name)}{scope}", "bold")]
    changes = _list_changes(sides, value)
    if not changes:
        where = (
            f"only in {'AB'[value.only_in]}"
            if value.only_in is not None
            else f"at {clean(value.place)}"
        )
        return [[*title, (where, "yellow" if value.only_in is not None else ""), ""]]
    rows: list[list[Cell | str]] = [
        [*title, clean(place), (f"{_shown(one)} -> {_shown(other)}", "cyan")]
        for place, one, other in changes[:_SHOWN_PLACES]
    ]
    if len(changes) > _SHOWN_PLACES:
        rows.append(
            [*title, (f"and {count_text(len(changes) - _SHOWN_PLACES, 'place')} more", "dim"), ""]
        )
    return rows
