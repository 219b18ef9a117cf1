"""Saves of a mostly unchanged state on a device: deltas against full saves of the same state.

The state consists only of tensors, so that the time covers a save's work on bytes: find new blocks,
copy the blocks to the host, write, commit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

import torch

import ckptfmt
from benchmarks.figures import Figure, paired_ratio, summarize
from benchmarks.ours import Ours
from benchmarks.rounds import Progress, Workplace, order_of_round, remove
from ckptfmt import limits
from ckptfmt.saving.handle import SaveReport

#: The largest multiple of the state in storage: per run a full checkpoint and the next, and deltas.
STORAGE_FACTOR: Final = 5
_TENSOR_NBYTES: Final = 64 << 20
_BLOCK_ELEMENTS: Final = limits.BLOCK_NBYTES // 4
#: The ratio of blocks to changed blocks between two saves.
_CHANGED_OF: Final = 100
#: The number of first saves that don't count: two fill the slots, and the third is the first with a
#: base.
_UNCOUNTED: Final = 3
#: No chain ends because of the cost of reading, since the benchmark times deltas.
_DELTA: Final = {"restore_budget": 1e6, "full_every": limits.REFERENCES}
_RATIO: Final = "delta_save_1pct_vs_full"

Row = dict[str, Any]

SAVE_GOALS: Final = {_RATIO: "<= 0.1"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSaves:
    """The results of the saves, by their names in a record.

    Attributes:
        ratios: the ratios; empty if no save of the counted rounds was a delta.
    """

    workload: Mapping[str, object]
    settings: Mapping[str, object]
    rounds: list[Row]
    figures: Mapping[str, Figure]
    ratios: Mapping[str, Figure]
    notes: Mapping[str, object]


def measure_saves(
    device: torch.device,
    nbytes: int,
    *,
    rounds: int,
    place: Workplace,
    progress: Progress,
    mode: str = "auto",
) -> DeviceSaves:
    """Save the same states with deltas and without, in turn, each until the commit.

    Args:
        nbytes: the approximate size of the state.
        mode: the mode of the checkpointer with deltas.

    Raises: RuntimeError if the last save doesn't load back bit for bit.
    """
    progress.say("gpu_digest: making slots")
    held = _Held(device, nbytes)
    deltas: dict[str, str | Mapping[str, Any]] = {"full": "off", "delta": {"mode": mode, **_DELTA}}
    with contextlib.ExitStack() as stack:
        runs = {
            name: stack.enter_context(_Run(name, held, delta, place))
            for name, delta in deltas.items()
        }
        rows = []
        for number in range(-_UNCOUNTED, rounds):
            progress.say(f"gpu_digest: saving, round {number + 1} of {rounds}")
            row = _save_round(held, runs, number)
            if number >= 0:
                rows.append(row)
        progress.say("gpu_digest: loading what was saved last")
        for run in runs.values():
            run.check()
        progress.say("")
        settings = {
            f"{name}_save": {**run.ours.describe(), "delta": deltas[name]}
            for name, run in runs.items()
        }
    return _sum_up(held, rows, settings)


def _save_round(held: _Held, runs: Mapping[str, _Run], number: int) -> Row:
    """Change some blocks, and save the blocks in every run."""
    changed_blocks = held.change(number + _UNCOUNTED)
    order = order_of_round(list(runs), number)
    return {
        "order": order,
        "changed_blocks": changed_blocks,
        **{name: runs[name].save() for name in order},
    }


def _sum_up(held: _Held, rows: list[Row], settings: Mapping[str, object]) -> DeviceSaves:
    """Compare deltas with full saves of the same rounds; skip full saves in the run with deltas."""
    paired = [row for row in rows if row["delta"]["profile"] == "delta"]
    figures = {"save_full_s": summarize([row["full"]["seconds"] for row in rows])}
    ratios = {}
    if paired:
        figures["save_delta_s"] = summarize([row["delta"]["seconds"] for row in paired])
        figures["save_delta_stored_nbytes"] = summarize(
            [row["delta"]["stored_nbytes"] for row in paired]
        )
        ratios[_RATIO] = paired_ratio(
            *([row[name]["seconds"] for row in paired] for name in ("delta", "full"))
        )
    return DeviceSaves(
        workload={
            "saved_nbytes": held.nbytes,
            "saved_tensors": len(held.tensors),
            "changed_of": held.changed_of,
        },
        settings=settings,
        rounds=rows,
        figures=figures,
        ratios=ratios,
        notes={
            "deltas": len(paired),
            "reasons": sorted({row["delta"]["reason"] for row in rows}),
            "loaded_back": "the last save of each run, bit for bit",
        },
    )


class _Held:
    """Tensors on a device; an element in each of some blocks changes between two saves.

    Attributes:
        changed_of: the ratio of blocks to changed blocks: below 100 for fewer blocks.
    """

    def __init__(self, device: torch.device, nbytes: int) -> None:
        generator = torch.Generator(device).manual_seed(0)
        self._device = device
        self.tensors = {
            f"tensor-{number:05d}": torch.randn(
                part_nbytes // 4, device=device, generator=generator
            )
            for number, part_nbytes in enumerate(_cut(nbytes - nbytes % 4, _TENSOR_NBYTES))
        }
        self.nbytes = sum(tensor.nbytes for tensor in self.tensors.values())
        self.changed_of = min(_CHANGED_OF, sum(map(_count_blocks, self.tensors.values())))

    def change(self, number: int) -> int:
        """Change the first element of every hundredth block, and return the number of blocks."""
        begin = changed = 0
        for tensor in self.tensors.values():
            block_count = _count_blocks(tensor)
            first = (number - begin) % self.changed_of
            # No other value is as large, and no value is written twice.
            tensor[first * _BLOCK_ELEMENTS :: self.changed_of * _BLOCK_ELEMENTS] = 100.0 + number
            changed += len(range(first, block_count, self.changed_of))
            begin += block_count
        return changed

    def settle(self) -> None:
        """Wait until the device has finished all work."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _cut(nbytes: int, part_nbytes: int) -> Sequence[int]:
    """Return the sizes of parts; the last part may be smaller.

    >>> _cut(10, 4) [4, 4, 2]
    """
    return [min(part_nbytes, nbytes - begin) for begin in range(0, nbytes, part_nbytes)]


def _count_blocks(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // limits.BLOCK_NBYTES)


class _Run:
    """A checkpointer on a separate run that deletes unneeded checkpoints.

    Attributes:
        ours: the checkpointer.
    """

    def __init__(
        self, name: str, held: _Held, delta: str | Mapping[str, Any], place: Workplace
    ) -> None:
        self._held = held
        self._place = place
        self._directory = place.fresh(f"run-{name}")
        self._kept: list[Path] = []
        self.ours = Ours(
            self._directory, ckptfmt.State(weights=held.tensors), overlap=False, delta=delta
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.ours.close()
        remove(self._directory)

    def save(self) -> Row:
        """Save, and return the seconds until the commit, with the counters."""
        self._held.settle()
        self._place.settle(is_buffered=False)
        begin_s = time.perf_counter()
        pending = self.ours.start()
        report = pending.wait()
        seconds = time.perf_counter() - begin_s
        assert isinstance(report, SaveReport), "it is committed"
        self._keep(pending.path, is_full=report.profile == "full")
        return {
            "seconds": seconds,
            "blocked_s": pending.blocked_s(),
            "profile": report.profile,
            "stored_nbytes": report.stored_nbytes,
            "reason": report.reason,
        }

    def check(self) -> None:
        """Load the last save, and compare with the tensors.

        Raises: RuntimeError.
        """
        loaded = {name: torch.empty(tensor.shape) for name, tensor in self._held.tensors.items()}
        ckptfmt.load(self._kept[-1], ckptfmt.State(weights=loaded))
        for name, tensor in self._held.tensors.items():
            if not torch.equal(loaded[name].view(torch.int32), tensor.cpu().view(torch.int32)):
                raise RuntimeError(f"{self._kept[-1].name}: {name} isn't what was saved")

    def _keep(self, path: Path, *, is_full: bool) -> None:
        """Delete checkpoints before a full checkpoint, which needs no base."""
        if is_full:
            for earlier in self._kept:
                remove(earlier)
            self._kept.clear()
        self._kept.append(path)
