"""Stored bytes of a delta on real training, with entropy floor and peers, and the coding rate."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

import numpy as np

from benchmarks.chains import CHAIN_GOALS, measure_chains
from benchmarks.codecs import CODECS, Measured, measure_codec
from benchmarks.coding import code
from benchmarks.figures import Figure, summarize
from benchmarks.floors import change_of, gradient_nbytes, gradient_nbytes_by_block, moment_nbytes
from benchmarks.record import Outcome
from benchmarks.rounds import Progress, Workplace, check_room
from benchmarks.scenes import RATES, Scene, Sizes, list_scenes
from benchmarks.snapshots import WEIGHT, Pair
from benchmarks.training import Studio
from ckptfmt.delta.policy import DeltaOptions

_ROUNDS: Final = 3
_OURS: Final = "ckptfmt"
_OURS_ALONE: Final = "ckptfmt_unpredicted"

#: The stored bytes are equal in each round: from the second round on, these settings are enough for
#: rates.
_TIMED: Final = ("adamw-1e-3", "adamw-1e-6", "adamw-bf16-1e-3")

Row = dict[str, Any]

#: For each ratio: prefix of the settings' names, precision, quantity, and goal. The worst setting
#: counts.
_RATIOS: Final = {
    "bf16_rl_vs_floor": ("adamw-1e-6-fused-gap1", "bf16", "vs_floor", "<= 1.1"),
    "adamw_vs_raw": ("adamw-fp32-", "fp32", "vs_raw", "<= 0.285"),
    "adamw_bf16_grads_vs_raw": ("adamw-bf16-", "fp32", "vs_raw", "<= 0.12"),
    "adamw_clipped_vs_raw": ("adamw-clipped-", "fp32", "vs_raw", "<= 0.12"),
    "sgd_vs_raw": ("sgd-fp32-", "fp32", "vs_raw", "<= 0.42"),
    "sgd_bf16_grads_vs_raw": ("sgd-bf16-", "fp32", "vs_raw", "<= 0.18"),
    "adamw_gap10_1e3_vs_raw": ("adamw-1e-3-fused-gap10", "fp32", "vs_raw", "<= 0.73"),
    "adamw_gap10_1e5_vs_raw": ("adamw-1e-5-aged-fused-gap10", "fp32", "vs_raw", "<= 0.66"),
    "frozen_vs_raw": ("", "untouched", "with_digests_vs_raw", "< 0.001"),
}


def measure_delta(
    sizes: Sizes,
    *,
    copies: int,
    scratch: Path,
    rounds: int | None,
    place: Workplace,
    progress: Progress,
) -> Outcome:
    """Measure the stored bytes of each setting by each contestant, and the rates.

    Args:
        sizes: the sizes of the models and their training.
        copies: the number of copies of the model for timed saves.
        scratch: the directory that keeps trained states from run to run.
        rounds: the number of saved runs per kind and of coding rounds; None for as many as a figure
            needs.

    Raises: SystemExit without enough memory or storage.
    """
    rounds = rounds or _ROUNDS
    check_room(place.directory, memory_nbytes=8 << 30, storage_nbytes=8 << 30)
    scenes = list_scenes(sizes)
    studio = Studio(sizes, scratch, progress)
    rows: list[list[Row]] = []
    for number in range(rounds):
        rows.append([])
        for scene in (scene for scene in scenes if number == 0 or scene.name in _TIMED):
            progress.say(f"delta: coding, round {number + 1} of {rounds}: {scene.name}")
            for pair in studio.iter_pairs([scene]):
                rows[-1] += _measure_pair(scene, pair, first=rows[0] if number else None)
    chains = measure_chains(
        sizes, scratch, copies=copies, passes=rounds, place=place, progress=progress
    )
    first = studio.pair(scenes[0], 0, 1)
    return Outcome(
        workload={
            "nbytes": first.nbytes,
            "tensors": len(first.new),
            "parameters": sum(
                tensor.array.size for tensor in first.new.values() if tensor.role == WEIGHT
            ),
            "copies": copies,
            "sizes": dataclasses.asdict(sizes),
            "scenes": [dataclasses.asdict(scene) for scene in scenes],
        },
        settings=_describe_contestants(),
        repeats={"coding": rounds, "chains": rounds},
        rounds={
            **{f"coding_{number + 1}": of_round for number, of_round in enumerate(rows)},
            **chains.rounds,
        },
        figures={**_sum_up(rows), **chains.figures},
        ratios={**_list_ratios(rows[0]), **chains.ratios},
        goals={**{name: goal for name, (_, _, _, goal) in _RATIOS.items()}, **CHAIN_GOALS},
        memory={},
        notes=_list_notes(rows[0]),
        cache=(
            "coding: in memory, seconds of one thread's processor time; chains: files warm,"
            " wall time"
        ),
    )


def steady_of(stored_vs_raw: float) -> float:
    """Return stored over raw bytes of a long run with deltas of a given size, full saves included.

    The default policy applies, with free decoding: a delta may always follow a full save; a further
    delta may follow unless the cost of reading the chain, 1 + the sum of the deltas, would exceed
    the budget.

    >>> steady_of(0.25), steady_of(0.6), steady_of(0.0) (0.5, 0.8, 0.0625)
    """
    options = DeltaOptions()
    most = options.full_every - 1
    affordable = (
        math.floor((options.restore_budget - 1) / stored_vs_raw + 1e-9) if stored_vs_raw else most
    )
    deltas = min(most, max(1, affordable))
    return (1 + deltas * stored_vs_raw) / (1 + deltas)


def _describe_contestants() -> dict[str, object]:
    ours = {
        "call": "encodings.choose, prediction.encode_member",
        "of": "a block of 1 MiB",
        "base": "the other state",
    }
    return {
        _OURS: ours,
        _OURS_ALONE: {**ours, "call": "encodings.choose"},
        **{name: make().describe() for name, make in CODECS.items()},
    }


def _measure_pair(scene: Scene, pair: Pair, first: list[Row] | None) -> list[Row]:
    """Return the rows of a pair: the whole state, bfloat16 weights, and the untouched part.

    Args:
        first: the rows of the first round, for values equal in each round.
    """
    states = {"fp32": pair}
    if scene.name in {f"adamw-{rate}" for rate in RATES}:
        states["bf16"] = pair.rounded()
    if scene.model in ("lora", "moe"):
        states["untouched"] = pair.untouched()
    rows = []
    for state, of_state in states.items():
        key = {"setting": pair.name, "state": state}
        known = next((row for row in first or () if key.items() <= row.items()), None)
        told = known["told"] if known else _measure_floor(of_state)
        rows.append({**key, "told": told, "coded": _measure_contestants(scene, of_state, told)})
    return rows


def _measure_floor(pair: Pair) -> Row:
    """Return the changed fraction and the floors: changes in ULPs, and a step's gradients."""
    change = change_of(pair.base, pair.new)
    told: Row = {
        "nbytes": pair.nbytes,
        "gap": pair.gap,
        "lr": pair.lr,
        "changed": change.fraction,
        "changed_weights": change_of(pair.base, pair.new, roles=[WEIGHT]).fraction,
        "floor_nbytes": change.floor_nbytes,
    }
    if pair.base.keys() == pair.new.keys():  # an expert's first step has no moments to compare
        told["floor_vs_raw"] = change.floor_nbytes / pair.nbytes
    if not pair.kind or not pair.gradients:
        return told
    gradients = list(pair.gradients.values())
    narrow = not any(
        np.bitwise_or.reduce(gradient.view(np.uint32).ravel()) & 0xFFFF for gradient in gradients
    )
    told["gradient_floor_vs_raw"] = gradient_nbytes(gradients, narrow=narrow) / pair.nbytes
    told["block_floor_vs_raw"] = gradient_nbytes_by_block(gradients, narrow=narrow) / pair.nbytes
    if not narrow:
        role, decay = _first_moment(pair)
        told["moment_floor_vs_raw"] = (
            moment_nbytes(pair.base, pair.new, role=role, decay=decay) / pair.nbytes
        )
    return told


def _first_moment(pair: Pair) -> tuple[str, float]:
    """Return the role of the first moment, and the factor of its decay."""
    if pair.kind == "sgd":
        return "momentum_buffer", cast("float", pair.options["momentum"])
    return "exp_avg", cast("Sequence[float]", pair.options["betas"])[0]


def _measure_contestants(scene: Scene, pair: Pair, told: Row) -> dict[str, Row]:
    contestants: dict[str, Callable[[], Measured]] = {_OURS: lambda: code(pair)}
    if pair.kind:
        contestants[_OURS_ALONE] = lambda: code(pair, predict=False)
    if len(scene.implementations) == 1:  # once per setting is enough
        contestants |= {
            name: lambda make=make: measure_codec(make(), pair.new, pair.base)  # type: ignore[misc] # bound now
            for name, make in CODECS.items()
        }
    coded = {}
    for name, measure in contestants.items():
        measured = measure()
        coded[name] = dict(measured.describe())
        if told.get("floor_vs_raw"):
            coded[name]["vs_floor"] = measured.stored_nbytes / told["floor_nbytes"]
    return coded


def _list_ratios(rows: Sequence[Row]) -> dict[str, Figure]:
    ratios = {}
    for name, (prefix, state, key, _) in _RATIOS.items():
        of_state = (
            row for row in rows if row["state"] == state and row["setting"].startswith(prefix)
        )
        ratios[name] = summarize([max(row["coded"][_OURS][key] for row in of_state)])
    return ratios


def _sum_up(rows: Sequence[list[Row]]) -> dict[str, Figure]:
    """Return stored over raw bytes of each setting in ckptfmt, and all rates over all settings."""
    figures: dict[str, Figure] = {}
    for row in rows[0]:
        figures[f"{row['setting']}_{row['state']}_vs_raw"] = summarize(
            [row["coded"][_OURS]["vs_raw"]]
        )
    for name in _describe_contestants():
        for state in ("fp32", "bf16"):
            for rate in ("encode_gb_per_s", "decode_gb_per_s"):
                found = [
                    row["coded"][name][rate]
                    for of_round in rows
                    for row in of_round
                    if row["state"] == state and name in row["coded"]
                ]
                if found:
                    figures[f"{name}_{state}_{rate}"] = summarize(found)
    return figures


def _list_notes(rows: Sequence[Row]) -> Mapping[str, object]:
    """Return the notes: steady ratios, then per setting the changes, floors, and codecs."""
    tables: dict[str, object] = {}
    for row in rows:
        floors = (
            "floor_vs_raw",
            "gradient_floor_vs_raw",
            "block_floor_vs_raw",
            "moment_floor_vs_raw",
        )
        told = {name: row["told"].get(name) for name in ("changed_weights", *floors)}
        tables[f"{row['setting']} {row['state']}"] = {
            **{name: value for name, value in told.items() if value is not None},
            **{name: coded["vs_raw"] for name, coded in row["coded"].items()},
        }
    ratios = _list_ratios(rows)
    steady = {
        name: steady_of(figure.median)
        for name, figure in ratios.items()
        if name != "bf16_rl_vs_floor"
    }
    return {"steady_vs_raw": steady, **tables}
