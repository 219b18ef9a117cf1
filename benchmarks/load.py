"""Load rates, cold and warm, against raw direct reads, DCP, torch.load and safetensors; memory."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import blake3
import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.bare import BareLoad
from benchmarks.cold import list_files, make_cold, make_warm
from benchmarks.extra_memory import measure_extra_memory
from benchmarks.figures import Figure, median_of, paired_ratio, summarize
from benchmarks.loaders import DcpLoad, Loader, OursLoad, RawLoad, SafetensorsLoad, TorchLoad
from benchmarks.pages import Region, heat, pages_in_order
from benchmarks.peers import process_group
from benchmarks.raw import READ_SETTINGS, SETTINGS, TOUCH_SETTINGS, RawWriter
from benchmarks.record import Outcome
from benchmarks.rounds import Progress, Workplace, check_room, order_of_round, remove
from benchmarks.state import Bench, Trainer

#: A NaN that no training produces.
_SPOILT: Final = 0x7FC0BAD0


class Destination:
    """The destination tensors of all contestants, and the expected contents.

    Args:
        tensors: contiguous tensors of four-byte elements, with the saved contents.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = dict(tensors)
        self.nbytes = sum(tensor.nbytes for tensor in self.tensors.values())
        self._flat = [
            tensor.detach().reshape(-1).view(torch.int32) for tensor in self.tensors.values()
        ]
        self._ends = self._read_ends()
        self._digests = self._digest_all()

    def spoil(self) -> None:
        """Fill all tensors with a value that every load must overwrite; touch all memory."""
        for flat in self._flat:
            flat.fill_(_SPOILT)

    def check(self) -> None:
        """Raise RuntimeError unless both ends of every tensor were loaded."""
        if self._read_ends() != self._ends:
            raise RuntimeError("a load left a tensor as it was")

    def check_all(self) -> None:
        """Raise RuntimeError unless every byte equals the saved byte."""
        if self._digest_all() != self._digests:
            raise RuntimeError("a load brought other bytes than were saved")

    def _read_ends(self) -> list[tuple[int, int]]:
        return [(int(flat[0]), int(flat[-1])) for flat in self._flat]

    def _digest_all(self) -> list[bytes]:
        return [_digest(flat.numpy()) for flat in self._flat]


def _digest(array: NDArray[np.int32]) -> bytes:
    return blake3.blake3(array.view(np.uint8).data, max_threads=blake3.blake3.AUTO).digest()


_ROUNDS: Final = 11
_TRIALS: Final = 3  # trials per setting, for the choice by median
_THREAD_COUNTS: Final = (1, 2)
_RAW: Final = "raw_cold"
_TOUCHED: Final = "raw_touched_cold"
_UNVERIFIED: Final = "ckptfmt_cold_unverified"

#: Ratios of rates: name, dividend, divisor, goal. A ratio of bounds shows the reachable value.
_RATES: Final = {
    "load_cold_vs_direct": ("ckptfmt_cold", _RAW, ">= 0.9"),
    "load_cold_vs_touched": ("ckptfmt_cold", _TOUCHED, ""),
    "touched_vs_direct": (_TOUCHED, _RAW, ""),
    "load_warm_vs_dcp": ("ckptfmt_warm", "dcp", ">= 1.5"),
    "load_warm_vs_torch": ("ckptfmt_warm", "torch_load", ">= 3"),
    "load_warm_vs_bare": ("ckptfmt_warm", BareLoad.name, ""),
    "bare_vs_dcp": (BareLoad.name, "dcp", ""),
    "bare_vs_torch": (BareLoad.name, "torch_load", ""),
    "load_warm_vs_torch_mmap": ("ckptfmt_warm", "torch_load_mmap", ""),
    "load_warm_vs_safetensors": ("ckptfmt_warm", "safetensors", ""),
}
_GOALS: Final = {
    **{name: goal for name, (_, _, goal) in _RATES.items() if goal},
    "verified_vs_unverified_cold": "<= 1.05",
    "extra_memory_mib": "<= 64",
}

Candidates = Mapping[str, Sequence[Loader]]


def measure_load(
    nbytes: int, *, rounds: int | None, place: Workplace, progress: Progress
) -> Outcome:
    """Measure all rates, cold and warm separately, in interleaved rounds, and ckptfmt's memory.

    Args:
        nbytes: the approximate size of the state.
        rounds: the number of rounds of each experiment; None for as many as a figure needs.

    Raises: SystemExit without enough memory or storage.
    """
    check_room(place.directory, memory_nbytes=12 * nbytes, storage_nbytes=8 * nbytes)
    rounds = rounds or _ROUNDS
    extra = measure_extra_memory(nbytes, place, progress)  # first, while this process is small
    bench = Bench(
        trainer=Trainer(nbytes, threads=os.cpu_count() or 1), place=place, progress=progress
    )
    bench.trainer.drop_gradients()
    destination = Destination(bench.trainer.tensors())
    with process_group():
        cold = _Experiment(bench, destination, "cold").run(_list_cold(bench.trainer), rounds)
        warm = _Experiment(bench, destination, "warm").run(
            _list_warm(destination, bench.trainer), rounds
        )
    progress.say("")
    seconds = {
        name: [row["seconds"][name] for row in rows]
        for rows in (cold.rows, warm.rows)
        for name in rows[0]["order"]
    }
    return Outcome(
        workload=bench.trainer.describe(),
        settings={**cold.settings, **warm.settings},
        repeats={"cold": len(cold.rows), "warm": len(warm.rows)},
        rounds={"cold": cold.rows, "warm": warm.rows},
        figures={
            f"{name}_gb_per_s": summarize([destination.nbytes / s / 1e9 for s in all_s])
            for name, all_s in seconds.items()
        },
        ratios={
            **_sum_up(seconds),
            "extra_memory_mib": summarize([max(size["extra_mib"] for size in extra)]),
        },
        goals=_GOALS,
        memory={f"extra_{size['nbytes']}_nbytes": size["extra_nbytes"] for size in extra},
        notes={"tried_s": {**cold.tried, **warm.tried}, "extra_memory": extra},
        cache=(
            "cold: cachestat(2) found no page before each load; warm: it found all; memory of"
            " all touched and hot"
        ),
    )


class _Experiment:
    """Interleaved rounds of loads, either all cold or all warm."""

    def __init__(self, bench: Bench, destination: Destination, cache: str) -> None:
        self._bench = bench
        self._destination = destination
        self._is_cold = cache == "cold"
        self._cache = cache
        self._written: dict[str, Path] = {}
        self.rows: list[dict[str, Any]] = []
        self.tried: dict[str, dict[str, float]] = {}
        self.settings: dict[str, object] = {}

    def run(self, candidates: Candidates, rounds: int) -> _Experiment:
        """Choose the best setting of each contestant, and run the rounds."""
        try:
            chosen = [
                self._choose(name, loaders, min(_TRIALS, rounds))
                for name, loaders in candidates.items()
            ]
            kinds = {loader.kind for loader in chosen}
            self._discard([kind for kind in self._written if kind not in kinds])
            for number in range(rounds):
                self._run_round(
                    {loader.name: loader for loader in chosen}, number, f"{number + 1} of {rounds}"
                )
        finally:
            self._discard(list(self._written))
        self.settings = {loader.name: loader.describe() for loader in chosen}
        return self

    def _choose(self, name: str, loaders: Sequence[Loader], trials: int) -> Loader:
        """Check a load of each setting, and return the best setting by median."""
        medians = []
        for loader in loaders:
            self._bench.progress.say(f"load: {self._cache}, trying {name}: {loader.describe()}")
            path = self._find(loader)
            if loader.fills:
                self._destination.spoil()
                self._settle(path)
                loader.load(path)
                self._destination.check_all()
            medians.append(median_of([self._time(loader) for _ in range(trials)]))
        best = medians.index(min(medians))
        if len(loaders) > 1:
            self.tried[name] = {
                _say(loader): seconds for loader, seconds in zip(loaders, medians, strict=True)
            }
        return loaders[best]

    def _run_round(self, loaders: Mapping[str, Loader], number: int, title: str) -> None:
        if self._is_cold:
            self._discard(list(self._written))  # under fresh names, on both sides
            for loader in loaders.values():
                self._find(loader)
        order = order_of_round(list(loaders), number)
        seconds = {}
        for name in order:
            self._bench.progress.say(f"load: {self._cache}, round {title}: {name}")
            seconds[name] = self._time(loaders[name])
        self.rows.append({"order": order, "seconds": seconds})

    def _time(self, loader: Loader) -> float:
        """Return the seconds of a load; memory is released outside of the timing."""
        path = self._find(loader)
        self._settle(path)
        heat(self._destination.nbytes)
        if loader.fills:
            # The whole destination is touched: memory left idle for seconds costs ten times as much
            # to touch.
            self._destination.spoil()
        begin_s = time.perf_counter()
        left = loader.load(path)
        seconds = time.perf_counter() - begin_s
        del left
        self._destination.check()
        return seconds

    def _settle(self, path: Path) -> None:
        """Make sure that the page cache holds all pages of the files, or no page."""
        files = list_files(path)
        if self._is_cold:
            make_cold(files)
            return
        make_warm(files)

    def _find(self, loader: Loader) -> Path:
        """Return a contestant's files, written in this run."""
        if loader.kind not in self._written:
            self._written[loader.kind] = loader.write(self._bench.place.fresh(loader.kind))
            os.sync()
        return self._written[loader.kind]

    def _discard(self, kinds: Sequence[str]) -> None:
        for kind in kinds:
            remove(self._written.pop(kind))


def _list_cold(trainer: Trainer) -> Candidates:
    """Return the contestants for cold files, in each setting worth a trial."""
    with pages_in_order(trainer.nbytes):
        writer = RawWriter("raw", Region(trainer.tensors().values(), huge=True), SETTINGS[0])
    return {
        "ckptfmt_cold": [OursLoad("ckptfmt_cold", trainer)],
        _UNVERIFIED: [OursLoad(_UNVERIFIED, trainer, verify=False)],
        _RAW: [RawLoad(_RAW, writer, setting) for setting in READ_SETTINGS],
        _TOUCHED: [RawLoad(_TOUCHED, writer, setting, touches=True) for setting in TOUCH_SETTINGS],
    }


def _list_warm(destination: Destination, trainer: Trainer) -> Candidates:
    """Return the contestants for warm files, in each setting worth a trial."""
    tensors = destination.tensors
    return {
        "ckptfmt_warm": [OursLoad("ckptfmt_warm", trainer)],
        BareLoad.name: [BareLoad(tensors)],
        "dcp": [
            DcpLoad(tensors, thread_count=files, copy_threads=threads)
            for files in _THREAD_COUNTS
            for threads in _THREAD_COUNTS
        ],
        "torch_load": [TorchLoad("torch_load", tensors, mmap=False)],
        "torch_load_mmap": [TorchLoad("torch_load_mmap", tensors, mmap=True)],
        "safetensors": [
            SafetensorsLoad(tensors, one_by_one=one_by_one) for one_by_one in (False, True)
        ],
    }


def _say(loader: Loader) -> str:
    """Return a setting as a key of the trials."""
    settings = loader.describe()
    varying = ("threads", "request_nbytes", "files", "copy_threads")
    said = [f"{name}={settings[name]}" for name in varying if name in settings]
    return ", ".join(said) or str(settings["call"])


def _sum_up(seconds: Mapping[str, list[float]]) -> dict[str, Figure]:
    """Return the ratios of rates, and the ratio of times with and without verification."""
    ratios = {
        name: paired_ratio(seconds[peer], seconds[ours]) for name, (ours, peer, _) in _RATES.items()
    }
    return {
        **ratios,
        "verified_vs_unverified_cold": paired_ratio(seconds["ckptfmt_cold"], seconds[_UNVERIFIED]),
    }
