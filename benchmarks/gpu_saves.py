"""Saves of a state on a device of which little has changed: deltas beside full ones, each of the same state.

The state is nothing but tensors, so that what is timed is what a save does with bytes: find out
which blocks are new, bring them over, write them, commit.
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

#: How many times the state is stored at most: of each run a full checkpoint and the next one, and
#: deltas.
STORAGE_FACTOR: Final = 5
_TENSOR_NBYTES: Final = 64 << 20
_BLOCK_ELEMENTS: Final = limits.BLOCK_NBYTES // 4
#: Of so many blocks one changes between two saves.
_CHANGED_OF: Final = 100
#: First saves that don't count: one fills each of the two slots, and by the third there is a base
#: to compare with.
_UNCOUNTED: Final = 3
#: No chain ends for what reading it would cost: deltas are what is timed.
_DELTA: Final = {"restore_budget": 1e6, "full_every": limits.REFERENCES}
_RATIO: Final = "delta_save_1pct_vs_full"

Row = dict[str, Any]

SAVE_GOALS: Final = {_RATIO: "<= 0.1"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSaves:
    """What came of the saves, by the names that they have in a record.

    Attributes:
        ratios: none where no save of the counted rounds was a delta.
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
    """Save the same states with deltas and without, one after the other, until each is committed.

    Args:
        nbytes: about how large the state is.
        mode: of the checkpointer that saves deltas.

    Raises: RuntimeError if what was saved last doesn't load back bit for bit.
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
    """Change some blocks, and save them in every run."""
    changed_blocks = held.change(number + _UNCOUNTED)
    order = order_of_round(list(runs), number)
    return {
        "order": order,
        "changed_blocks": changed_blocks,
        **{name: runs[name].save() for name in order},
    }


def _sum_up(held: _Held, rows: list[Row], settings: Mapping[str, object]) -> DeviceSaves:
    """Compare deltas with the full saves of their rounds; a save of that run which became a full one is left out."""
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
    """Tensors on a device, of which one element in each of some blocks changes between two saves.

    Attributes:
        changed_of: of so many blocks one changes: fewer than a hundred where there are no more.
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
        """Change the first element of every hundredth block, other blocks each time; return of how many blocks."""
        begin = changed = 0
        for tensor in self.tensors.values():
            block_count = _count_blocks(tensor)
            first = (number - begin) % self.changed_of
            # No other value is as large, and none is written twice.
            tensor[first * _BLOCK_ELEMENTS :: self.changed_of * _BLOCK_ELEMENTS] = 100.0 + number
            changed += len(range(first, block_count, self.changed_of))
            begin += block_count
        return changed

    def settle(self) -> None:
        """Wait until the device has done what it was given."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _cut(nbytes: int, part_nbytes: int) -> Sequence[int]:
    """Return the sizes of parts; the last one may be smaller.

    >>> _cut(10, 4)
    [4, 4, 2]
    """
    return [min(part_nbytes, nbytes - begin) for begin in range(0, nbytes, part_nbytes)]


def _count_blocks(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // limits.BLOCK_NBYTES)


class _Run:
    """A checkpointer on a run of its own, which keeps no checkpoint that nothing is read from any more.

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
        """Save; return how long it took until it was committed, and what it came to."""
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
        """Load what was saved last, and compare it with what is there.

        Raises: RuntimeError.
        """
        loaded = {name: torch.empty(tensor.shape) for name, tensor in self._held.tensors.items()}
        ckptfmt.load(self._kept[-1], ckptfmt.State(weights=loaded))
        for name, tensor in self._held.tensors.items():
            if not torch.equal(loaded[name].view(torch.int32), tensor.cpu().view(torch.int32)):
                raise RuntimeError(f"{self._kept[-1].name}: {name} isn't what was saved")

    def _keep(self, path: Path, *, is_full: bool) -> None:
        """Delete what came before a full checkpoint: it reads from none of them."""
        if is_full:
            for earlier in self._kept:
                remove(earlier)
            self._kept.clear()
        self._kept.append(path)
