"""The library as the cells of the conformance suite see it; and ways to checkpoint that do nothing, or too little."""

import contextlib
import copy
import os
import pathlib
import random
import threading
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

import ckptfmt
from ckptfmt import PerWorker, State
from ckptfmt_conformance.adapters import reference
from ckptfmt_conformance.protocol import Unsupported
from ckptfmt_conformance.trajectories import PerRank

FIELDS = ("weights", "optimizer", "data", "config", "rng")
#: Longer than a step takes.
LATE_S = 0.1


def state_of(state: Mapping[str, object]) -> State:
    """Return the library's state of a cell's."""
    own = {
        name: PerWorker(value.value) if isinstance(value, PerRank) else value
        for name, value in state.items()
    }
    extra = {name: value for name, value in own.items() if name not in FIELDS}
    return State(**{name: own[name] for name in FIELDS if name in own}, extra=extra)  # type: ignore[arg-type]


class Library:
    """Save and load with the library, and read with its sampler."""

    refusals = reference.Checkpointing.refusals

    def save(self, path: str, state: Mapping[str, object], step: int) -> None:
        ckptfmt.save(path, state_of(state), step=step)

    def load(self, path: str, state: Mapping[str, object]) -> None:
        ckptfmt.load(path, state_of(state))

    def sampler(self, plan: Any, worker: tuple[int, int]) -> Any:
        return reference.Checkpointing().sampler(plan, worker)

    def foreign_loader(self, loader: Any) -> Any:
        return reference.Checkpointing().foreign_loader(loader)

    def consumed_samples(self, holder: object, name: str) -> Any:
        return reference.Checkpointing().consumed_samples(holder, name)


class Forgetful:
    """Save and load nothing at all."""

    def save(self, path: str, state: Mapping[str, object], step: int) -> None:
        del path, state, step

    def load(self, path: str, state: Mapping[str, object]) -> None:
        del path, state


class Pickled(Library):
    """Save what the parts of a state say, in a file of its own, and look at nothing."""

    def save(self, path: str, state: Mapping[str, object], step: int) -> None:
        torch.save({"step": step, **take(state)}, path)

    def load(self, path: str, state: Mapping[str, object]) -> None:
        put_back(torch.load(path, weights_only=False), state)


class Swallowing(Library):
    """Don't hear what the parts of a state refuse."""

    def load(self, path: str, state: Mapping[str, object]) -> None:
        with contextlib.suppress(Exception):
            super().load(path, state)


# --- beside the training --------------------------------------------------------------------------


class Asynchronous(Library):
    """Save beside the training with the library."""

    phases = reference.Checkpointing.phases

    def open_run(self, path: str, state: Mapping[str, object], *, delta: bool) -> Any:
        return reference.Checkpointing().open_run(path, state, delta=delta)


class InThread(Asynchronous):
    """A saver that ends with its trainer, though what is STAGED is said to outlive it."""

    def open_run(self, path: str, state: Mapping[str, object], *, delta: bool) -> Any:
        del delta
        return reference.Run(path, state, saver="thread")


class Ended(Asynchronous):
    """A trainer that ends as soon as it begins."""

    def open_run(self, path: str, state: Mapping[str, object], *, delta: bool) -> Any:
        del path, state, delta
        os._exit(3)


class Files(Library):
    """A file for each step, written by a thread that ends with its trainer: sound, as it promises no more than that.

    Attributes:
        is_hasty: whether a save is taken for committed before it is.
        is_live: whether the thread takes what the weights have become by then.
    """

    phases = ("STAGING", "COMMITTED")
    is_hasty = False
    is_live = False

    def open_run(self, path: str, state: Mapping[str, object], *, delta: bool) -> Any:
        if delta:
            raise Unsupported("deltas")
        return FileRun(self, pathlib.Path(path), state)


class Hasty(Files):
    is_hasty = True


class Live(Files):
    is_live = True


class FileRun:
    def __init__(self, files: Files, path: pathlib.Path, state: Mapping[str, Any]) -> None:
        self.files, self.path, self.state = files, path, state
        self.threads: list[threading.Thread] = []
        path.mkdir(exist_ok=True)
        newest = max(path.glob("*.pt"), default=None)
        self.step = int(newest.stem) if newest else 0
        if newest:
            put_back(torch.load(newest, weights_only=False), state)

    def save(self, step: int) -> Any:
        place = self.path / f"{step:04d}.pt"
        thread = threading.Thread(target=self.write, args=(place, take(self.state)), daemon=True)
        thread.start()
        self.threads.append(thread)
        return FileSave(place, is_hasty=self.files.is_hasty)

    def write(self, place: pathlib.Path, content: Mapping[str, Any]) -> None:
        time.sleep(LATE_S)
        if self.files.is_live:
            content["parts"]["weights"] = self.state["weights"].state_dict()
        torch.save(content, place.with_suffix(".new"))
        place.with_suffix(".new").rename(place)

    def close(self) -> None:
        for thread in self.threads:
            thread.join()


class FileSave:
    def __init__(self, place: pathlib.Path, *, is_hasty: bool) -> None:
        self.place, self.is_hasty = place, is_hasty

    def phase(self) -> str:
        return "COMMITTED" if self.is_hasty or self.place.exists() else "STAGING"


def take(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of all of a state, with the streams of the process."""
    content = {
        "parts": {
            name: part.state_dict() for name, part in state.items() if hasattr(part, "state_dict")
        },
        "rng": {name: generator.get_state() for name, generator in state["rng"].items()},
        "python": random.getstate(),
        "numpy": np.random.get_state(),  # noqa: NPY002
        "torch": torch.get_rng_state(),
    }
    return copy.deepcopy(content)


def put_back(saved: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Load what `take` returned."""
    for name, part in saved["parts"].items():
        state[name].load_state_dict(part)
    for name, stream in saved["rng"].items():
        state["rng"][name].set_state(stream)
    random.setstate(saved["python"])
    np.random.set_state(saved["numpy"])  # noqa: NPY002
    torch.set_rng_state(saved["torch"])
