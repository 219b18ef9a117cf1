"""Training seconds lost to a save through a node cache to a bucket.

The same rounds measure a save to a local directory, and a plain upload of equally many bytes by
obstore.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

import ckptfmt
from benchmarks.figures import Figure, floor_all, median_of, paired_ratio, summarize
from benchmarks.lone_upload import LoneUpload
from benchmarks.loop import Contestant, run_until_done
from benchmarks.lost import MARGIN, run_round
from benchmarks.machine import own_processor, yield_processors
from benchmarks.ours import Ours
from benchmarks.peers import Pending
from benchmarks.state import Bench

_LOCAL: Final = "ckptfmt_local"
_CACHED: Final = "ckptfmt_cached"
#: The processors of the training's thread: all processors, shared with other threads, or an
#: exclusive processor.
_SHARED: Final = "shared"
_APART: Final = "apart"
#: Parts of the command lines of a server's processes.
_SERVERS: Final = ("ckptfmt_tools.demo.servers", "ceph-", "radosgw")
#: The resolution of the clock in such an experiment, in seconds.
_FLOOR_S: Final = 0.001
#: The capacity of a cache in saves: the save in progress, the save before, and the save to be
#: deleted.
_ROOM: Final = 3.5
#: The largest batch, and the target duration of forward and backward pass, in seconds.
_ROWS: Final = (4, 8, 16, 32, 64, 128)
_PASSES_S: Final = 0.1


class _Run:
    """A run that deletes older checkpoints itself; the loop only deletes an empty file."""

    is_buffered = False

    def __init__(self, name: str, run: str | Path, bench: Bench, **options: Any) -> None:
        self.name = name
        self._ours = Ours(run, bench.trainer.state, overlap=True, name=name, keep=1, **options)

    def describe(self) -> dict[str, object]:
        """Return the settings."""
        return {**self._ours.describe(), "keep": 1}

    def start(self, path: Path) -> Pending:
        """Start a save of the next step."""
        path.touch()
        return dataclasses.replace(self._ours.start(), path=path)

    def close(self) -> None:
        """Stop the saver."""
        self._ours.close()


class _Apart:
    """A contestant with threads kept off the training's processor, including threads of the save.

    A separate thread moves the threads during training, since a walk over all threads of the system
    takes milliseconds.
    """

    is_buffered = False

    def __init__(self, contestant: Contestant, keep_apart: Callable[[], None]) -> None:
        self.name = contestant.name
        self.describe = contestant.describe
        self._contestant = contestant
        self._keep_apart = keep_apart

    def start(self, path: Path) -> Pending:
        """Start a save."""
        pending = self._contestant.start(path)
        threading.Thread(target=self._keep_apart).start()
        return pending


def measure_cached_lost(
    bucket: str, bench: Bench, setting: tuple[int, int], *, rounds: int
) -> tuple[list[dict[str, Any]], dict[str, object]]:
    """Run interleaved rounds of equal steps: no save, a save to a directory, a save to a bucket.

    Each round runs twice. In the first run, the training has fewer threads than cores by one, so
    that a core is left for the saver, and the system places the threads. In the second run, the
    training has a thread and an exclusive processor, as always with a GPU. The servers below this
    process get the remaining processors from now on, since servers run elsewhere in practice.

    Args:
        setting: the settings of a plain upload by obstore: bytes per part, and concurrent parts.

    Returns: the raw rounds, each with ``apart`` or ``shared`` as ``processors``, and the notes for
    a
        record.
    """
    yield_processors(*_SERVERS)
    with _threads(max(1, bench.trainer.threads - 1)), contextlib.ExitStack() as stack:
        rows = _choose_rows(bench)
        contestants: list[_Run | LoneUpload] = [LoneUpload(bucket, bench.trainer.nbytes, setting)]
        stack.callback(contestants[0].close)
        for name, run, options in (
            (_LOCAL, bench.place.fresh("run"), {}),
            (
                _CACHED,
                f"{bucket}/cached",
                {
                    "copies": [
                        ckptfmt.Cache(
                            bench.place.fresh("cache"),
                            limit_nbytes=int(_ROOM * bench.trainer.nbytes),
                        )
                    ]
                },
            ),
        ):
            contestants.append(_Run(name, run, bench, **options))
            stack.callback(contestants[-1].close)
        bench.progress.say("s3: lost seconds, warming up")
        warm = [run_until_done(bench, one) for one in contestants * 2]
        steps = math.ceil(MARGIN * max(run.steps for run in warm)) + 1
        found = []
        for number in range(rounds):
            said = f"s3: lost seconds, round {number + 1} of {rounds}, {steps} steps each"
            bench.progress.say(said)
            named: dict[str, Contestant] = {one.name: one for one in contestants}
            found.append({"processors": _SHARED, **run_round(bench, named, number, steps)})
            bench.progress.say(f"{said}, with a processor of its own")
            with _threads(1), own_processor() as keep_apart:
                named = {one.name: _Apart(one, keep_apart) for one in contestants}
                found.append({"processors": _APART, **run_round(bench, named, number, steps)})
        notes = {
            "steps": steps,
            "batch_rows": rows,
            "threads": torch.get_num_threads(),
            "saves_that_outlasted_the_steps": sum(
                not run["is_done"] for row in found for run in row["runs"].values()
            ),
            "settings": {one.name: one.describe() for one in contestants},
        }
    return found, notes


def sum_up_cached_lost(
    rows: Sequence[Mapping[str, Any]],
) -> tuple[dict[str, Figure], dict[str, Figure]]:
    """Return figures and ratios of the rounds; ``_shared`` marks rounds with shared processors.

    A loss counts at least as much as the difference between two runs without a save in the median
    round, since the clock resolves no smaller difference.
    """
    figures, ratios = {}, {}
    for processors, ending in ((_APART, ""), (_SHARED, "_shared")):
        of_each = _sum_up([row for row in rows if row["processors"] == processors])
        for into, found in zip((figures, ratios), of_each, strict=True):
            into.update({f"{name}{ending}": figure for name, figure in found.items()})
    return figures, ratios


def _sum_up(rows: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Figure], dict[str, Figure]]:
    without = [sum(row["without_s"]) / len(row["without_s"]) for row in rows]
    noise = [max(row["without_s"]) - min(row["without_s"]) for row in rows]
    lost = {
        name: [
            row["runs"][name]["wall_s"] - base_s for row, base_s in zip(rows, without, strict=True)
        ]
        for name in (_LOCAL, _CACHED, LoneUpload.name)
    }
    least_s = max(_FLOOR_S, median_of(noise))
    floored = {name: floor_all(seconds, least_s) for name, seconds in lost.items()}
    figures = {
        "lost_steps_without_s": summarize(without),
        "lost_told_apart_s": summarize(noise),
        **{f"lost_{name}_s": summarize(seconds) for name, seconds in lost.items()},
        **{
            f"blocked_{name}_s": summarize([row["runs"][name]["blocked_s"] for row in rows])
            for name in lost
        },
        **{
            f"save_{name}_s": summarize([row["runs"][name]["save_s"] for row in rows])
            for name in lost
        },
        "lost_cached_minus_local_s": summarize(
            [a - b for a, b in zip(lost[_CACHED], lost[_LOCAL], strict=True)]
        ),
    }
    ratios = {
        "cache_vs_local_lost": paired_ratio(floored[_CACHED], floored[_LOCAL]),
        "cache_vs_upload_lost": paired_ratio(floored[_CACHED], floored[LoneUpload.name]),
    }
    return figures, ratios


def _choose_rows(bench: Bench) -> int:
    """Choose a batch for passes of a tenth of a second, and return the number of rows."""
    for rows in _ROWS:
        bench.trainer.set_batch(rows)
        bench.trainer.step()
        if median_of([bench.trainer.step().passes_s for _ in range(3)]) >= _PASSES_S:
            break
    return rows


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
