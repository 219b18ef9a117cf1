"""Processor seconds of a save by thread and process, with a floor: copy, digest and write only."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from benchmarks.figures import Figure, paired_ratio, summarize
from benchmarks.machine import find_children
from benchmarks.ours import Ours
from benchmarks.pages import Region
from benchmarks.peers import Pending
from benchmarks.raw import RawSetting, RawWriter
from benchmarks.rounds import order_of_round
from benchmarks.state import Bench, Trainer
from ckptfmt.digest import block_digests
from ckptfmt.limits import BLOCK_NBYTES

_SAVER: Final = "ckptfmt.saving.saver"
#: The number of bytes digested at once.
_SPAN_NBYTES: Final = 8 << 20
_SETTING: Final = RawSetting(threads=1, request_nbytes=16 << 20)


class Floor:
    """The least work of a verified save: a single thread copies, digests and writes the same bytes.

    The floor knows no format, and memory and places are ready before the clock starts. No optimizer
    waits, so the copy in memory may be an inconsistent snapshot.
    """

    name = "floor"
    is_buffered = False

    def __init__(self, trainer: Trainer) -> None:
        tensors = list(trainer.tensors().values())
        self._sources = [tensor.detach().reshape(-1).view(torch.uint8) for tensor in tensors]
        self._region = Region([tensor.cpu() for tensor in tensors], huge=False)
        self._writer = RawWriter(self.name, self._region, _SETTING)
        #: Processor seconds of the last save, by activity.
        self.cpu_s: dict[str, float] = {}

    def describe(self) -> dict[str, object]:
        """Return the settings."""
        return {
            "call": "copy, BLAKE3 of blocks, pwrite, fsync; one thread",
            **self._writer.describe(),
        }

    def start(self, path: Path) -> Pending:
        """Begin a save in a thread."""
        thread = threading.Thread(target=self.save, args=(path,), name="floor")
        thread.start()
        return Pending(path=path, is_done=lambda: not thread.is_alive(), wait=thread.join)

    def save(self, path: Path) -> Path:
        """Save durably, and return the file."""
        begin_s = time.thread_time()
        self._copy()
        copied_s = time.thread_time()
        self._digest()
        self.cpu_s = {"copy": copied_s - begin_s, "digest": time.thread_time() - copied_s}
        begin_s = time.process_time()  # the writer has its own thread
        self._writer.save(path)
        self.cpu_s["write"] = time.process_time() - begin_s
        return path

    def _copy(self) -> None:
        target = np.frombuffer(self._region.view, np.uint8)
        begin = 0
        for source in self._sources:
            place = target[begin : begin + source.nbytes]
            if source.is_cpu:
                np.copyto(place, source.numpy())
            else:
                torch.from_numpy(place).copy_(source)
            begin += source.nbytes

    def _digest(self) -> None:
        for begin in range(0, self._region.nbytes, _SPAN_NBYTES):
            block_digests(self._region.view[begin : begin + _SPAN_NBYTES], BLOCK_NBYTES)


def measure_account(bench: Bench, ours: Ours, *, rounds: int) -> list[dict[str, Any]]:
    """Save without training, in turns with the floor, and return processor seconds per round."""
    floor = Floor(bench.trainer)
    rows = []
    for number in range(rounds):
        bench.progress.say(f"stall: account, round {number + 1} of {rounds}")
        row: dict[str, Any] = {"order": order_of_round([ours.name, floor.name], number)}
        for name in row["order"]:
            path = bench.place.fresh(name)
            bench.place.settle(is_buffered=False)
            if name == floor.name:
                floor.save(path)
                row[name] = dict(floor.cpu_s)
            else:
                row[name], path = _account(ours)
            bench.place.discard(path, is_buffered=False)
        rows.append(row)
    return rows


def sum_up_account(rows: list[dict[str, Any]]) -> tuple[dict[str, Figure], dict[str, Figure]]:
    """Return the figures and the ratio of the rounds."""
    names = {
        key: sorted({name for row in rows for name in row[key]}) for key in ("ckptfmt", "floor")
    }
    figures = {
        f"cpu_{key}_{name}_s": summarize([row[key].get(name, 0.0) for row in rows])
        for key, found in names.items()
        for name in found
    }
    ours, floor = ([sum(row[key].values()) for row in rows] for key in ("ckptfmt", "floor"))
    figures |= {"cpu_ckptfmt_s": summarize(ours), "cpu_floor_s": summarize(floor)}
    return figures, {"cpu_vs_floor": paired_ratio(ours, floor)}


def _account(ours: Ours) -> tuple[dict[str, float], Path]:
    """Save, and return the processor seconds by process and thread, and the checkpoint's path."""
    before = _read_clocks()
    path = ours.save()
    time.sleep(0.1)  # for retention, which follows the commit
    after = _read_clocks()
    spent = {name: seconds - before.get(name, 0.0) for name, seconds in after.items()}
    for process in ("trainer", "saver"):
        living = sum(seconds for name, seconds in spent.items() if name.startswith(f"{process}/"))
        # Only the process counts the time of threads that ended meanwhile, such as hashers and
        # writers.
        spent[f"{process}/ended"] = spent.pop(process) - living
    return {name: seconds for name, seconds in spent.items() if seconds >= 0.0005}, path


def _read_clocks() -> dict[str, float]:
    """Return the processor seconds so far of trainer and saver, and of their living threads."""
    clocks = {"trainer": time.process_time(), "saver": 0.0}
    for thread in threading.enumerate():
        if thread.ident is not None:
            name = f"trainer/{thread.name.partition('_')[0]}"
            clocks[name] = clocks.get(name, 0.0) + time.clock_gettime(
                time.pthread_getcpuclockid(thread.ident)
            )
    for pid in find_children(_SAVER):
        # The clock of another process, numbered as by clock_getcpuclockid(3).
        clocks["saver"] += time.clock_gettime((~pid << 3) | 2)
        for task in Path(f"/proc/{pid}/task").iterdir():
            name = "saver/messages" if int(task.name) == pid else "saver/ckptfmt-saver"
            clocks[name] = (
                clocks.get(name, 0.0) + int((task / "schedstat").read_text().split()[0]) / 1e9
            )
    return clocks
