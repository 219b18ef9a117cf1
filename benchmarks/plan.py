"""Metadata at scale: time to commit, check, open and plan with the parts of a thousand ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import math
import os
import pickle
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from torch.distributed.checkpoint.default_planner import (
    _validate_global_plan,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.planner import SavePlan

from benchmarks.counting import CountingStore
from benchmarks.dcp_boxes import write_item
from benchmarks.figures import Figure, summarize
from benchmarks.fleet import Wanted, fill_memory, iter_bad, make_origin, write_fleet
from benchmarks.mixture import CutTensor, describe_mixture, halve, make_mixture, split_rows
from benchmarks.record import Outcome
from benchmarks.rounds import Progress, Workplace, check_room, remove
from ckptfmt.commit.decision import finalize
from ckptfmt.digest import DIGEST_NBYTES
from ckptfmt.documents.index import Index
from ckptfmt.documents.manifest import MANIFEST_NAME, index_name
from ckptfmt.errors import LayoutError
from ckptfmt.layout.merge import check_index_tiling
from ckptfmt.read.reader import Checkpoint
from ckptfmt.store import open_store

_ROUNDS: Final = 5
_FEWER: Final = 8  # the divisor of ranks, for the exponent
_DCP_RANKS: Final = 256  # so many that plan and validation take a few seconds
#: The requests of a rank with goals.
_COUNTED: Final = ("same", "half")
_MEMORY_NBYTES_PER_BOX: Final = 800

_GOALS: Final = {
    "commit_s": "<= 2",
    "check_s": "<= 1",
    "open_plan_s": "<= 1",
    "metadata_read_fraction": "<= 0.02",
    "exponent": "<= 1.1",
    "nbytes_per_box": "<= 20",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Scale:
    """The measurements for a number of ranks.

    Attributes:
        rows: the seconds of each round.
        reads: the largest number of bytes and parts read by any rank, for each request.
        nbytes: the size of manifest, index and parts.
        digests: the number of digests.
    """

    ranks: int
    boxes: int
    rows: list[dict[str, float]]
    reads: dict[str, dict[str, int]]
    nbytes: dict[str, int]
    digests: int

    def seconds(self, name: str) -> list[float]:
        """Return the seconds of all rounds."""
        return [row[name] for row in self.rows]


def measure_plan(
    ranks: int, tensors: int, *, rounds: int | None, place: Workplace, progress: Progress
) -> Outcome:
    """Measure the cost of many ranks' metadata on a single core, with DCP's plan and validation.

    Args:
        ranks: a power of two; an eighth of the ranks is measured too.
        tensors: the number of tensors, each with a box on every rank.
        rounds: the number of rounds; None for as many as a figure needs.

    Raises: SystemExit without enough memory; RuntimeError if a bad tiling passes.
    """
    check_room(
        place.directory,
        memory_nbytes=_MEMORY_NBYTES_PER_BOX * ranks * tensors,
        storage_nbytes=2**30,
    )
    rounds = rounds or _ROUNDS
    with _one_core():
        scales = [
            _measure_scale(count, tensors, rounds, place, progress)
            for count in (ranks // _FEWER, ranks)
        ]
        mixture = make_mixture(ranks, tensors)
        told = describe_mixture(mixture)
        progress.say("plan: bad tilings")
        refused = _refuse_bad(mixture)
        del mixture
        dcp = _measure_dcp(make_mixture(min(ranks, _DCP_RANKS), tensors), rounds, progress)
    progress.say("")
    return _sum_up(scales, told, refused, dcp)


def _measure_scale(
    ranks: int, tensors: int, rounds: int, place: Workplace, progress: Progress
) -> _Scale:
    """Write the parts of a number of ranks, and measure the operations on them."""
    mixture = make_mixture(ranks, tensors)
    boxes = sum(len(tensor.boxes) for tensor in mixture)
    _forget_rubbish()  # with ten million boxes, each full collection takes seconds
    directory = place.fresh(f"ranks-{ranks}")
    digests = write_fleet(
        directory, mixture, ranks, lambda rank: progress.say(f"plan: part {rank + 1} of {ranks}")
    )
    asked = _list_asked(mixture, ranks)
    del mixture
    _forget_rubbish()
    rows, reads = [], dict[str, dict[str, int]]()
    for number in range(rounds):
        progress.say(f"plan: {ranks} ranks, round {number + 1} of {rounds}")
        row = {"commit_s": _time_commit(directory, ranks), "check_s": _time_check(directory, ranks)}
        for name, of_ranks in asked.items():
            found = [_time_open(directory, wanted) for wanted in of_ranks]
            row[f"open_plan_{name}_s"] = max(seconds for seconds, _ in found)
            reads[name] = {key: max(read[key] for _, read in found) for key in found[0][1]}
        rows.append(row)
    nbytes = {
        "manifest": (directory / MANIFEST_NAME).stat().st_size,
        "index": (directory / index_name(make_origin(ranks).attempt)).stat().st_size,
        "parts": sum(path.stat().st_size for path in (directory / "parts").iterdir()),
    }
    remove(directory)
    return _Scale(ranks=ranks, boxes=boxes, rows=rows, reads=reads, nbytes=nbytes, digests=digests)


def _list_asked(mixture: Sequence[CutTensor], ranks: int) -> dict[str, list[list[Wanted]]]:
    """Return the requests of first, middle and last rank: saved boxes, halves, grid rows."""
    half = ranks // 2
    rows = {tensor.name: split_rows(tensor, ranks) for tensor in mixture if tensor.grid}
    return {
        "same": [
            [Wanted.of(tensor, tensor.boxes[rank]) for tensor in mixture]
            for rank in (0, half, ranks - 1)
        ],
        "half": [
            [Wanted.of(tensor, *halve(tensor, rank)) for tensor in mixture]
            for rank in (0, half // 2, half - 1)
        ],
        "grid_to_rows": [
            [Wanted.of(tensor, rows.get(tensor.name, tensor.boxes)[rank]) for tensor in mixture]
            for rank in (0, half, ranks - 1)
        ],
    }


def _time_commit(directory: Path, ranks: int) -> float:
    """Return the seconds of a commit with all parts present and without an earlier result."""
    origin = make_origin(ranks)
    for name in (MANIFEST_NAME, index_name(origin.attempt)):
        (directory / name).unlink(missing_ok=True)
    store = open_store(directory, writable=True)
    gc.collect()
    begin_s = time.perf_counter()
    finalize(store, origin)
    return time.perf_counter() - begin_s


def _time_check(directory: Path, ranks: int) -> float:
    """Return the seconds of parsing an index, and of checking the exact tiling of each tensor."""
    name = index_name(make_origin(ranks).attempt)
    content = (directory / name).read_bytes()
    gc.collect()
    begin_s = time.perf_counter()
    check_index_tiling(Index.parse(content, where=name))
    return time.perf_counter() - begin_s


def _time_open(directory: Path, wanted: Sequence[Wanted]) -> tuple[float, dict[str, int]]:
    """Return a rank's seconds to open and plan, and the metadata read."""
    store = CountingStore(directory)
    gc.collect()
    begin_s = time.perf_counter()
    with Checkpoint(store) as checkpoint:
        requests = plan_reads(checkpoint, wanted)
        seconds = time.perf_counter() - begin_s
    assert requests, "nothing to read was planned"
    return seconds, {
        "nbytes": store.metadata_nbytes,
        "parts": store.part_count,
        "requests": requests,
    }


def plan_reads(checkpoint: Checkpoint, wanted: Sequence[Wanted]) -> int:
    """Plan a load's reads for some boxes, and return the number of ranges.

    Only this function knows how the reader plans.
    """
    reading = checkpoint.plan_reading(wanted)
    return len(reading.library.plan_requests(reading.ranges))


def _refuse_bad(mixture: Sequence[CutTensor]) -> list[str]:
    """Return the refusals of bad tilings per kind. Raises: RuntimeError if a bad tiling passes."""
    by_kind = {tensor.kind: tensor for tensor in mixture}
    refused = []
    for kind, tensor in by_kind.items():
        for wrong, boxes in iter_bad(tensor.boxes, tensor.global_shape):
            try:
                finalize(fill_memory(tensor, boxes), make_origin(len(boxes)))
            except LayoutError as error:
                refused.append(f"{kind}, {wrong}: {error.code}")
            else:
                raise RuntimeError(f"a bad tiling was committed: {kind}, {wrong}")
    return refused


def _measure_dcp(mixture: Sequence[CutTensor], rounds: int, progress: Progress) -> dict[str, Any]:
    """Time DCP's plan and validation of the same boxes, and pickle its metadata."""
    ranks = len(mixture[0].boxes)
    boxes = sum(len(tensor.boxes) for tensor in mixture)
    plans = [
        SavePlan(
            [write_item(tensor.name, tensor.boxes[rank], tensor.global_shape) for tensor in mixture]
        )
        for rank in range(ranks)
    ]
    _forget_rubbish()
    rows = []
    for number in range(rounds):
        progress.say(f"plan: DCP with {ranks} ranks, round {number + 1} of {rounds}")
        gc.collect()
        begin_s = time.perf_counter()
        merged, metadata = create_default_global_save_plan(plans)
        planned_s = time.perf_counter() - begin_s
        problems = _validate_global_plan(merged, metadata)
        rows.append({"dcp_plan_s": planned_s, "dcp_plan_validate_s": time.perf_counter() - begin_s})
        assert not problems, problems[0]
    nbytes = len(pickle.dumps(metadata))
    return {"ranks": ranks, "boxes": boxes, "rows": rows, "nbytes_per_box": nbytes / boxes}


def _sum_up(
    scales: Sequence[_Scale],
    mixture: Mapping[str, object],
    refused: list[str],
    dcp: Mapping[str, Any],
) -> Outcome:
    fewer, all_ = scales
    exponents = {name: _exponent(fewer, all_, name) for name in all_.rows[0]}
    fractions = {
        name: read["nbytes"] / sum(all_.nbytes.values()) for name, read in all_.reads.items()
    }
    seconds = {
        f"{scale.ranks}_ranks_{name}": scale.seconds(name)
        for scale in scales
        for name in scale.rows[0]
    }
    seconds |= {name: [row[name] for row in dcp["rows"]] for name in dcp["rows"][0]}
    return Outcome(
        workload={
            "nbytes": sum(all_.nbytes.values()),
            "tensors": all_.boxes // all_.ranks,
            "ranks": all_.ranks,
            "mixture": mixture,
            "boxes": all_.boxes,
            "digests": all_.digests,
            "metadata_nbytes": all_.nbytes,
        },
        settings={
            "ckptfmt": {
                "call": "finalize; Index.parse and check_index_tiling; Checkpoint and its plan",
                "cores": 1,
            },
            "dcp": {
                "call": "create_default_global_save_plan, then _validate_global_plan",
                "cores": 1,
                **{name: dcp[name] for name in ("ranks", "boxes")},
            },
        },
        repeats={"metadata": len(all_.rows), "dcp": len(dcp["rows"])},
        rounds={f"{scale.ranks}_ranks": scale.rows for scale in scales} | {"dcp": dcp["rows"]},
        figures={name: summarize(of_rounds) for name, of_rounds in seconds.items()},
        ratios=_list_ratios(all_, exponents, fractions),
        goals=_GOALS,
        memory={},
        notes={
            "exponents": {name: figure.median for name, figure in exponents.items()},
            "metadata_read_fractions": fractions,
            "metadata_read": all_.reads,
            "refused": refused,
            "dcp_nbytes_per_box": dcp["nbytes_per_box"],
        },
        cache="warm: parts and index were just written",
    )


def _list_ratios(
    scale: _Scale, exponents: Mapping[str, Figure], fractions: Mapping[str, float]
) -> dict[str, Figure]:
    """Return the ratios with goals; requests for saved boxes and for halves count."""
    lean_nbytes = scale.nbytes["index"] + scale.nbytes["parts"] - DIGEST_NBYTES * scale.digests
    opens = [f"open_plan_{name}_s" for name in _COUNTED]
    counted = [exponents[name] for name in ("commit_s", "check_s", *opens)]
    return {
        "commit_s": summarize(scale.seconds("commit_s")),
        "check_s": summarize(scale.seconds("check_s")),
        "open_plan_s": max(
            (summarize(scale.seconds(name)) for name in opens), key=lambda figure: figure.median
        ),
        "metadata_read_fraction": summarize([max(fractions[name] for name in _COUNTED)]),
        "exponent": max(counted, key=lambda figure: figure.median),
        "nbytes_per_box": summarize([lean_nbytes / scale.boxes]),
    }


def _exponent(fewer: _Scale, all_: _Scale, name: str) -> Figure:
    """Return the slope of time over ranks, both on a logarithmic scale; 1 is linear."""
    pairs = zip(all_.seconds(name), fewer.seconds(name), strict=True)
    steps = math.log(all_.ranks / fewer.ranks)
    return summarize([math.log(many_s / few_s) / steps for many_s, few_s in pairs])


@contextlib.contextmanager
def _one_core() -> Iterator[None]:
    """Restrict this thread, and threads started meanwhile, to a single processor."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _forget_rubbish() -> None:
    """Exclude existing objects from garbage collection: a real program has no such objects."""
    gc.collect()
    gc.freeze()
