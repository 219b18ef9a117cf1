"""The library as the cells of the conformance suite see it; and ways to checkpoint that do nothing, or too little."""

import contextlib
from collections.abc import Mapping

import ckptfmt
from ckptfmt import PerWorker, State
from ckptfmt_conformance.trajectories import PerRank

FIELDS = ("weights", "optimizer", "data", "config", "rng")


def state_of(state: Mapping[str, object]) -> State:
    """Return the library's state of a cell's."""
    extra = {name: value for name, value in state.items() if name not in FIELDS}
    extra = {name: PerWorker(value.value) if isinstance(value, PerRank) else value for name, value in extra.items()}
    return State(**{name: state[name] for name in FIELDS if name in state}, extra=extra)  # type: ignore[arg-type]


class Library:
    """Save and load with the library."""

    def save(self, path: str, state: Mapping[str, object], step: int) -> None:
        ckptfmt.save(path, state_of(state), step=step)

    def load(self, path: str, state: Mapping[str, object]) -> None:
        ckptfmt.load(path, state_of(state))


class Forgetful:
    """Save and load nothing at all."""

    def save(self, path: str, state: Mapping[str, object], step: int) -> None:
        del path, state, step

    def load(self, path: str, state: Mapping[str, object]) -> None:
        del path, state


class Swallowing(Library):
    """Don't hear what the parts of a state refuse."""

    def load(self, path: str, state: Mapping[str, object]) -> None:
        with contextlib.suppress(Exception):
            super().load(path, state)
