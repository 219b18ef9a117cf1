"""Loads in a layout other than the saved layout: relative time, and bytes read."""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from benchmarks.cold import list_files, make_cold, make_warm
from benchmarks.dcp_boxes import load_as_rank, save_as_ranks
from benchmarks.figures import Figure, paired_ratio, summarize
from benchmarks.layouts import BLOCK_NBYTES, Cut, Matrices, count_edge_nbytes, save_in_rows
from benchmarks.loaders import describe_reads
from benchmarks.machine import read_by_calls_nbytes
from benchmarks.pages import heat
from benchmarks.peers import process_group
from benchmarks.record import Outcome
from benchmarks.rounds import Progress, Workplace, check_room, order_of_round
from benchmarks.sharing import measure_sharing
from benchmarks.state import plan_width
from ckptfmt.read.reader import Checkpoint
from ckptfmt.store import open_store

_ROUNDS: Final = 11
_SHARING_ROUNDS: Final = 5
#: Matrices of a layer's size: 64 MB each by default, with 16 MB of each on a writer.
_MATRICES: Final = 25
_HOT_NBYTES: Final = 2**28


def _rows(ranks: int) -> Cut:
    return Cut(name=f"rows_{ranks}", dim=0, ranks=ranks)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """A load by all ranks of a cut, from the files of all writers of another cut.

    Attributes:
        same: the case for comparison: equally many ranks with equal shares load the saved layout.
    """

    name: str
    stored: Cut
    wanted: Cut
    same: str = ""


STORED: Final = _rows(4)
COLUMNS: Final = Cut(name="columns_2", dim=1, ranks=2)
_SAME: Final = tuple(
    _Case(name=f"same_{n}", stored=_rows(n), wanted=_rows(n)) for n in (4, 8, 2, 3)
)
_ROWS: Final = tuple(
    _Case(name=f"rows_{n}", stored=STORED, wanted=_rows(n), same=f"same_{n}") for n in (8, 2, 3)
)
_COLUMNS: Final = _Case(name=COLUMNS.name, stored=STORED, wanted=COLUMNS, same="same_2")
_CASES: Final = (*_SAME, *_ROWS, _COLUMNS)
#: DCP's cases: every load from four writers.
_DCP_CASES: Final = tuple(case for case in _CASES if case.stored == STORED)

_GOALS: Final = {
    "reshard_rows_vs_same": "<= 1.1",
    "reshard_rows_vs_same_warm": "<= 1.1",
    "overread_rows": "<= 1.02",
    "overread_columns": "<= 2.05",
    "overread_columns_shared": "near 1",
}

Rows = list[dict[str, Any]]


class _Load(Protocol):
    """A contestant's load: fills the local tensors of a rank, and returns counters."""

    def __call__(self, path: Path, matrices: Matrices, cut: Cut, rank: int) -> dict[str, int]:
        """Load."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Contestant:
    """A contestant in a case: all ranks load in turn, and together need every byte once."""

    name: str
    load: _Load
    case: _Case
    path: Path
    is_cold: bool

    def run(self, matrices: Matrices, *, check: bool = False) -> dict[str, Any]:
        """Return seconds and bytes of the loads of all ranks."""
        files = list_files(self.path)
        cut = self.case.wanted
        seconds = 0.0
        by_calls_nbytes = 0
        counted = dict[str, int]()
        for rank in range(cut.ranks):
            if check:
                matrices.spoil(cut, rank)
            self._settle(files)
            heat(min(_HOT_NBYTES, matrices.nbytes))
            before_nbytes = read_by_calls_nbytes()
            begin_s = time.perf_counter()
            reads = self.load(self.path, matrices, cut, rank)
            seconds += time.perf_counter() - begin_s
            by_calls_nbytes += read_by_calls_nbytes() - before_nbytes
            # Buffers are released before the next rank begins; other counters add up.
            counted = {
                name: max(counted.get(name, 0), count)
                if name == "buffer_nbytes"
                else counted.get(name, 0) + count
                for name, count in reads.items()
            }
            if check:
                matrices.check(cut, rank)
        return {"seconds": seconds, "by_calls_nbytes": by_calls_nbytes, **counted}

    def _settle(self, files: Sequence[Path]) -> None:
        if self.is_cold:
            make_cold(files)
            return
        make_warm(files)


def measure_reshard(
    nbytes: int, *, rounds: int | None, place: Workplace, progress: Progress
) -> Outcome:
    """Measure loads in other layouts and in the saved layout in interleaved rounds, and DCP's.

    Args:
        nbytes: the approximate size of the checkpoint.
        rounds: the number of rounds; None for as many as a figure needs.

    Raises: SystemExit without enough memory or storage.
    """
    check_room(place.directory, memory_nbytes=9 * nbytes, storage_nbytes=6 * nbytes)
    rounds = rounds or _ROUNDS
    matrices = Matrices(
        _MATRICES, _plan_width(nbytes), most=max(1 / case.wanted.ranks for case in _CASES)
    )
    ours = {}
    for stored in {case.stored.name: case.stored for case in _CASES}.values():
        progress.say(f"reshard: writing as {stored.ranks} writers")
        ours[stored.name] = save_in_rows(place.fresh(f"ckptfmt-{stored.name}"), matrices, stored)
    theirs = save_as_ranks(place.fresh("dcp"), matrices, STORED)
    os.sync()
    cold, warm = (
        [
            _Contestant(
                name=case.name,
                load=_load_ours,
                case=case,
                path=ours[case.stored.name],
                is_cold=is_cold,
            )
            for case in _CASES
        ]
        for is_cold in (True, False)
    )
    warm += [
        _Contestant(name=f"dcp_{case.name}", load=_load_dcp, case=case, path=theirs, is_cold=False)
        for case in _DCP_CASES
    ]
    with process_group():
        rows = {
            cache: _run_rounds(cache, contestants, matrices, rounds, progress)
            for cache, contestants in (("cold", cold), ("warm", warm))
        }
    shared = measure_sharing(ours[STORED.name], matrices, min(rounds, _SHARING_ROUNDS), progress)
    progress.say("")
    return _sum_up(matrices, rows["cold"], rows["warm"], shared)


def _plan_width(nbytes: int) -> int:
    """Return the width of a matrix: a multiple of 8, for different uneven remainders."""
    return max(16, 8 * round(math.sqrt(nbytes / _MATRICES / 4) / 8))


def _load_ours(path: Path, matrices: Matrices, cut: Cut, rank: int) -> dict[str, int]:
    """Open the checkpoint anew, and read into the local tensors."""
    with Checkpoint(open_store(path, writable=False)) as checkpoint:
        return describe_reads(checkpoint.read_into(matrices.sinks(cut, rank)))


def _load_dcp(path: Path, matrices: Matrices, cut: Cut, rank: int) -> dict[str, int]:
    """Load into the local tensors with DCP, as a single rank."""
    load_as_rank(path, matrices, cut, rank)
    return {}


def _run_rounds(
    cache: str,
    contestants: Sequence[_Contestant],
    matrices: Matrices,
    rounds: int,
    progress: Progress,
) -> Rows:
    by_name = {one.name: one for one in contestants}
    for one in contestants:
        progress.say(f"reshard: {cache}, checking {one.name}")
        one.run(matrices, check=True)
    rows = []
    for number in range(rounds):
        order = order_of_round(list(by_name), number)
        runs = {}
        for name in order:
            progress.say(f"reshard: {cache}, round {number + 1} of {rounds}: {name}")
            runs[name] = by_name[name].run(matrices)
        rows.append({"order": order, "runs": runs})
    return rows


def _sum_up(matrices: Matrices, cold: Rows, warm: Rows, shared: Mapping[str, Any]) -> Outcome:
    edges = {
        case.name: count_edge_nbytes(matrices.shape, case.stored, case.wanted)["edges"]
        * len(matrices.whole)
        for case in _ROWS
    }
    return Outcome(
        workload=_describe_workload(matrices),
        settings={
            "ckptfmt": {
                "call": "Checkpoint(store).read_into(sinks), as each rank in turn",
                "verified": "every block",
            },
            "dcp": {
                "call": "dcp.load with a planner given boxes, as each rank in turn",
                "verified": "nothing",
            },
            "ckptfmt_shared": {
                "call": "ckptfmt.load(path, State(weights=DTensors)), two processes under gloo"
            },
        },
        repeats={"cold": len(cold), "warm": len(warm), "shared": len(shared["rounds"])},
        rounds={"cold": cold, "warm": warm, "shared": shared["rounds"]},
        figures={
            f"{cache}_{name}_s": summarize(_list_seconds(rows, name))
            for cache, rows in (("cold", cold), ("warm", warm))
            for name in sorted(rows[0]["runs"])
        },
        ratios=_list_ratios(matrices, cold, warm, edges, shared["rounds"]),
        goals=_GOALS,
        memory={f"block_edges_{name}_nbytes": count for name, count in edges.items()},
        notes={
            "each_vs_same": {
                cache: {
                    case.name: _compare(rows, case.name, case.same).median
                    for case in (*_ROWS, _COLUMNS)
                }
                for cache, rows in (("cold", cold), ("warm", warm))
            },
            "with_edges_if_198_matrices": _overread_small(matrices.nbytes),
            "counters": {case.name: cold[0]["runs"][case.name] for case in _CASES},
        },
        cache=(
            "cold: cachestat(2) found no page before each rank's load; warm: it found all;"
            " memory touched and hot"
        ),
    )


def _describe_workload(matrices: Matrices) -> dict[str, object]:
    return {
        "nbytes": matrices.nbytes,
        "tensors": len(matrices.whole),
        "dtype": "float32",
        "shape": list(matrices.shape),
        "saved_as": (
            f"{STORED.ranks} writers, each with rows of every matrix, by the rule of torch.chunk"
        ),
        "compared_with": "a checkpoint of the same matrices saved by as many writers as ranks load",
        "block_nbytes": BLOCK_NBYTES,
    }


def _list_ratios(
    matrices: Matrices, cold: Rows, warm: Rows, edges: Mapping[str, int], shared: Rows
) -> dict[str, Figure]:
    return {
        "reshard_rows_vs_same": _worst(_compare(cold, case.name, case.same) for case in _ROWS),
        "reshard_rows_vs_same_warm": _worst(_compare(warm, case.name, case.same) for case in _ROWS),
        "reshard_columns_vs_same": _compare(cold, _COLUMNS.name, _COLUMNS.same),
        "reshard_columns_vs_same_warm": _compare(warm, _COLUMNS.name, _COLUMNS.same),
        **_list_overreads(matrices.nbytes, cold, edges),
        "overread_columns_shared": summarize(
            [row["read_nbytes"] / row["needed_nbytes"] for row in shared]
        ),
        **{
            f"{case.name}_warm_vs_dcp": _compare(warm, f"dcp_{case.name}", case.name)
            for case in _DCP_CASES
        },
    }


def _list_seconds(rows: Rows, name: str) -> list[float]:
    return [row["runs"][name]["seconds"] for row in rows]


def _compare(rows: Rows, name: str, with_name: str) -> Figure:
    """Return the ratio of two times; both loads need the same bytes."""
    return paired_ratio(_list_seconds(rows, name), _list_seconds(rows, with_name))


def _worst(figures: Iterable[Figure]) -> Figure:
    return max(figures, key=lambda figure: figure.median)


def _list_overreads(needed_nbytes: int, rows: Rows, edges: Mapping[str, int]) -> dict[str, Figure]:
    """Return bytes read over needed: the worst split of rows, with and without edges; columns."""

    def divide(name: str, left_out_nbytes: int = 0) -> Figure:
        read = [row["runs"][name]["read_nbytes"] for row in rows]
        return summarize([(nbytes - left_out_nbytes) / needed_nbytes for nbytes in read])

    return {
        "overread_rows": _worst(divide(case.name, edges[case.name]) for case in _ROWS),
        "overread_rows_with_edges": _worst(divide(case.name) for case in _ROWS),
        "overread_columns": divide(_COLUMNS.name),
    }


def _overread_small(nbytes: int) -> dict[str, float]:
    """Return the share of block edges in the bytes read for matrices as small as elsewhere."""
    width = plan_width(nbytes)
    counts = {
        case.name: count_edge_nbytes((width, width), case.stored, case.wanted) for case in _ROWS
    }
    return {name: 1 + count["edges"] / count["needed"] for name, count in counts.items()}
