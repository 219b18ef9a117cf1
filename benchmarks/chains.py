"""Chains of saves as in a run: time of a delta save against a full save, and of the restore.

A live model takes states of a real training (see `benchmarks.training`). Two checkpointers save
each state in turn: the first with deltas, the second without. A remote store is a local store
behind a link of 0.2 GB/s.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Self

import torch
from torch import nn

import ckptfmt
from benchmarks.bare import BareRead
from benchmarks.figures import Figure, paired_ratio, summarize
from benchmarks.rounds import Progress, Workplace, remove
from benchmarks.scenes import Scene, Sizes, list_scenes
from benchmarks.snapshots import Snapshot
from benchmarks.throttled import Link, ThrottledStore
from benchmarks.training import Studio, fill, make_model, make_optimizers
from ckptfmt.store import LocalStore, Store


class Replay:
    """Copies of a scene's model, under one optimizer.

    Attributes:
        state: the state for `ckptfmt.Checkpointer` and `ckptfmt.load`.
    """

    def __init__(self, sizes: Sizes, scene: Scene, *, copies: int) -> None:
        self._models = nn.ModuleList(make_model(sizes, scene.model) for _ in range(copies))
        parameters = {name: p for name, p in self._models.named_parameters() if p.requires_grad}
        (self._optimizer,) = make_optimizers(scene, parameters)
        self.state = ckptfmt.State(weights=self._models, optimizer=self._optimizer)

    def show(self, state: Snapshot, *, copies: int | None = None) -> None:
        """Put the first `copies` copies, or all copies, into a state; the rest stays unchanged."""
        for model in self._models[:copies]:
            fill(model, [self._optimizer], state)

    def check(self, state: Snapshot) -> None:
        """Check that all copies are in a state.

        Raises: RuntimeError if a copy isn't.
        """
        for model in self._models:
            places = dict(model.named_parameters()) | dict(model.named_buffers())
            for name, tensor in state.items():
                place = places[tensor.parameter]
                known = {} if tensor.field == "weights" else self._optimizer.state[place]
                found = place.detach() if tensor.field == "weights" else known[tensor.role]
                if found.numpy().tobytes() != tensor.array.tobytes():
                    raise RuntimeError(f"{name} has other bytes than were saved")


#: The rate of a remote store in bytes per second.
FAR: Final = 0.2e9
_STEPS: Final = (1, 2, 3, 4)

Row = dict[str, Any]

CHAIN_GOALS: Final = {
    "delta_save_vs_full": "<= 1.05",
    "delta_unchanged_vs_full": "<= 0.4",
    "delta_throttled_vs_full": "<= 0.45",
    "chain_restore_vs_bytes": "<= 1.1",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The setup of a run.

    Attributes:
        mode: the checkpointer's `delta`.
        is_far: whether the store is behind the link.
        copies: the number of copies of the model.
        moving: the number of copies that train on; the rest stays unchanged.
        is_wide: whether the model is the wider model, with tensors as large as in adapted models.
    """

    scene: str
    mode: str
    is_far: bool
    copies: int
    moving: int
    is_wide: bool = False

    @property
    def is_frozen(self) -> bool:
        """Whether most of the state stays unchanged."""
        return self.moving < self.copies

    @property
    def name(self) -> str:
        """The name in the record."""
        part = f"-{self.moving}-of-{self.copies}" if self.is_frozen else ""
        return f"{self.scene}{part}-{self.mode}-{'far' if self.is_far else 'near'}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Saves:
    """The results of the chains.

    Attributes:
        rounds: each save and each load, by setup.
        figures: each setup's ratios of times and bytes.
    """

    rounds: dict[str, list[Row]]
    figures: dict[str, Figure]
    ratios: dict[str, Figure]


def list_setups(copies: int) -> list[Setup]:
    """Return all setups for a number of copies of the model."""
    near = [
        Setup(scene=scene, mode="auto", is_far=False, copies=copies, moving=copies)
        for scene in ("adamw-1e-3", "adamw-1e-6", "adamw-bf16-1e-5")
    ]
    # An eighth of an adapted model changes; with one changing copy in three, less than a twentieth.
    frozen = Setup(scene="lora", mode="auto", is_far=False, copies=3, moving=1, is_wide=True)
    away = [
        Setup(scene=scene, mode=mode, is_far=True, copies=copies, moving=copies)
        for mode in ("auto", "smallest")
        for scene in ("adamw-1e-3", "adamw-1e-5", "adamw-bf16-1e-5")
    ]
    return [*near, frozen, *away]


def widen(sizes: Sizes) -> Sizes:
    """Return sizes of a model with sixteen times the parameters and a fifteenth of the steps.

    >>> widen(Sizes()).width 1024
    """
    return dataclasses.replace(sizes, width=4 * sizes.width, steps=max(1, sizes.steps // 15))


def measure_chains(
    sizes: Sizes, scratch: Path, *, copies: int, passes: int, place: Workplace, progress: Progress
) -> Saves:
    """Time saves with deltas against full saves, and restores of chains against full restores.

    Args:
        scratch: the directory for trained states.
        copies: the number of copies of the model, so that a save is long enough for the clock.
        passes: the number of runs of each setup.
    """
    rounds: dict[str, list[Row]] = {}
    for setup in list_setups(copies):
        progress.say(f"delta: saving {setup.name}")
        rows = rounds[setup.name] = []
        for number in range(passes):
            rows += _Race(
                widen(sizes) if setup.is_wide else sizes, scratch, setup, place, progress
            ).run(number)
    restores: list[Row] = []
    for scene in ("adamw-1e-3", "adamw-bf16-1e-5"):
        for is_far in (True, False):
            progress.say(f"delta: restoring {scene}")
            setup = Setup(scene=scene, mode="smallest", is_far=is_far, copies=copies, moving=copies)
            restores += _Race(sizes, scratch, setup, place, progress).restore(passes)
    rounds["restores"] = restores
    progress.say("")
    return Saves(rounds=rounds, figures=_list_figures(rounds), ratios=_list_ratios(rounds))


class _Race:
    """Two runs of the same training, with deltas and without."""

    def __init__(
        self, sizes: Sizes, scratch: Path, setup: Setup, place: Workplace, progress: Progress
    ) -> None:
        self._studio = Studio(sizes, scratch, progress)
        self._scene = scene = next(
            scene for scene in list_scenes(sizes) if scene.name == setup.scene
        )
        self._setup = setup
        self._place = place
        self._replay = Replay(sizes, scene, copies=setup.copies)

    def run(self, number: int) -> list[Row]:
        """Save each state in both runs; the first saves are full, and don't count.

        Args:
            number: the number of the pass: in every second pass the full save comes first.
        """
        with (
            _Saver(self._place, self._replay.state, self._setup, "off") as full,
            _Saver(self._place, self._replay.state, self._setup, self._setup.mode) as delta,
            contextlib.ExitStack() as stack,
        ):
            rows, floor = [], None
            # A run's second save is full wherever deltas may be slower: a full save among four
            # would be too many.
            for offset in (0, *self._offsets() * (2 if self._setup.is_frozen else 1)):
                self._show(offset)
                order = [("full", full), ("delta", delta)]
                saved = {
                    name: saver.save()
                    for name, saver in (order[::-1] if (offset + number) % 2 else order)
                }
                if offset:
                    rows.append(
                        {"offset": offset, **saved, **({} if floor is None else floor.measure())}
                    )
                elif self._setup.is_frozen:
                    weights = {
                        str(number): torch.zeros(1)
                        for number in range(full.tensor_count(saved["full"]))
                    }
                    hollow = _Saver(self._place, ckptfmt.State(weights=weights), self._setup, "off")
                    floor = _Floor(saved["full"]["nbytes"], weights, stack.enter_context(hollow))
            return rows

    def restore(self, rounds: int) -> list[Row]:
        """Make a chain of any length, and load its first and last checkpoint."""
        with _Saver(
            self._place, self._replay.state, self._setup, self._setup.mode, restore_budget=100.0
        ) as saver:
            saved = []
            for offset in (0, *self._offsets()):
                self._show(offset)
                saved.append(saver.save())
            states = [
                self._studio.state(self._scene, offset) for offset in (0, self._offsets()[-1])
            ]
            rows = []
            for _ in range(rounds):
                seconds = []
                for save, state, other in zip(
                    (saved[0], saved[-1]), states, states[::-1], strict=True
                ):
                    self._replay.show(other)
                    seconds.append(saver.load(save))
                    self._replay.check(state)
                rows.append(
                    {
                        "setting": self._scene.name,
                        "is_far": self._setup.is_far,
                        "profiles": [save["profile"] for save in saved],
                        "chain_vs_raw": sum(
                            save["stored_nbytes"] / save["nbytes"] for save in saved
                        ),
                        "full_s": seconds[0],
                        "chain_s": seconds[1],
                    }
                )
            return rows

    def _offsets(self) -> tuple[int, ...]:
        return tuple(offset for offset in _STEPS if offset in self._scene.offsets)

    def _show(self, offset: int) -> None:
        copies = None if offset == 0 else self._setup.moving
        self._replay.show(self._studio.state(self._scene, offset), copies=copies)


class _Saver:
    """A checkpointer on a separate run."""

    def __init__(
        self,
        place: Workplace,
        state: ckptfmt.State,
        setup: Setup,
        mode: str,
        *,
        restore_budget: float = 1.5,
    ) -> None:
        self._directory = place.fresh(f"run-{mode}")
        self._state = state
        self._store: Store = LocalStore(self._directory, writable=True)
        if setup.is_far:
            self._store = ThrottledStore(self._store, Link(FAR))
        self._checkpointer = ckptfmt.Checkpointer(
            self._store if setup.is_far else self._directory,
            self._state,
            resume="fresh",
            saving=ckptfmt.Saving(
                overlap=False,
                # The link exists only in this process.
                saver="thread" if setup.is_far else "process",
                delta={"mode": mode, "restore_budget": restore_budget},
            ),
        )
        self._checkpointer.prepare()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._checkpointer.close()
        remove(self._directory)

    def save(self) -> Row:
        """Save the next step, and return the seconds until the commit, with the counters."""
        self._checkpointer.step += 1
        os.sync()
        begin_s = time.perf_counter()
        handle = self._checkpointer.save()
        assert handle is not None, "this step is saved already"
        handle.wait()
        seconds = time.perf_counter() - begin_s
        report = handle.report
        assert report is not None, "it is committed"
        return {
            "seconds": seconds,
            "profile": report.profile,
            "nbytes": report.nbytes,
            "stored_nbytes": report.stored_nbytes,
            "on_disk_nbytes": sum(
                file.stat().st_size for file in Path(handle.path).rglob("*") if file.is_file()
            ),
            "reason": report.reason,
            "name": Path(handle.path).name,
        }

    def tensor_count(self, saved: Row) -> int:
        """Return the number of tensors in a save."""
        with ckptfmt.open(self._store.at(saved["name"])) as opened:
            return len(opened.index.tensors)

    def load(self, saved: Row) -> float:
        """Load a save, and return the seconds."""
        begin_s = time.perf_counter()
        ckptfmt.load(self._store.at(saved["name"]), self._state)
        return time.perf_counter() - begin_s


class _Floor:
    """The least work of a save with few changes.

    Such a save reads the whole state to find the changes, and commits like a full save. The time of
    a commit is measured with a save of equally many tensors of one element each.
    """

    def __init__(self, nbytes: int, weights: dict[str, torch.Tensor], hollow: _Saver) -> None:
        self._read = BareRead(nbytes)
        self._weights = weights
        self._hollow = hollow
        hollow.save()

    def measure(self) -> Row:
        """Return the seconds of both parts."""
        for tensor in self._weights.values():
            tensor.add_(1)
        return {"read_s": self._read.time(), "hollow_s": self._hollow.save()["seconds"]}


def _list_figures(rounds: dict[str, list[Row]]) -> dict[str, Figure]:
    figures = {}
    for name, rows in _iter_saves(rounds):
        figures[f"{name}_vs_full"] = _paired(rows, "seconds")
        figures[f"{name}_on_disk_vs_full"] = _paired(rows, "on_disk_nbytes")
        for part in ("read", "hollow"):
            if f"{part}_s" in rows[0]:
                figures[f"{name}-{part}_vs_full"] = summarize(
                    [row[f"{part}_s"] / row["full"]["seconds"] for row in rows]
                )
    for setting in sorted({row["setting"] for row in rounds["restores"]}):
        for is_far in (True, False):
            rows = [
                row
                for row in rounds["restores"]
                if (row["setting"], row["is_far"]) == (setting, is_far)
            ]
            where = "far" if is_far else "near"
            figures[f"{setting}-restore-{where}_vs_full"] = summarize(
                [row["chain_s"] / row["full_s"] for row in rows]
            )
    return figures


def _list_ratios(rounds: dict[str, list[Row]]) -> dict[str, Figure]:
    """Return the ratios with goals; of several setups, the worst by median."""

    def worst_of(is_meant: Callable[[str], bool], *, deltas_alone: bool = False) -> Figure:
        found = [
            _paired(counted, "seconds")
            for name, rows in _iter_saves(rounds)
            if is_meant(name)
            if (
                counted := [
                    row for row in rows if not deltas_alone or row["delta"]["profile"] == "delta"
                ]
            )
        ]
        return max(found, key=lambda figure: figure.median)

    restores = [
        row["chain_s"] / (row["full_s"] * row["chain_vs_raw"])
        for row in rounds["restores"]
        if row["is_far"]
    ]
    return {
        "delta_save_vs_full": worst_of(lambda name: "-auto-" in name),
        "delta_unchanged_vs_full": worst_of(lambda name: name.startswith("lora-")),
        "delta_throttled_vs_full": worst_of(
            lambda name: name in ("adamw-1e-3-smallest-far", "adamw-1e-5-smallest-far"),
            deltas_alone=True,
        ),
        "chain_restore_vs_bytes": summarize(restores),
    }


def _iter_saves(rounds: dict[str, list[Row]]) -> Iterator[tuple[str, list[Row]]]:
    return ((name, rows) for name, rows in rounds.items() if name != "restores")


def _paired(rows: Sequence[Row], key: str) -> Figure:
    return paired_ratio([row["delta"][key] for row in rows], [row["full"][key] for row in rows])
