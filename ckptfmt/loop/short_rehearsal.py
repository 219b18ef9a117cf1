"""A rehearsal within one process: the steps after the first save are done twice and compared."""

from __future__ import annotations

import contextlib
from typing import Any, Final

from ckptfmt.adapters.data_loaders import ForeignLoader, find_samplers
from ckptfmt.adapters.live import Kind, walk
from ckptfmt.data.sampler import Sampler
from ckptfmt.documents.durability import HOME
from ckptfmt.errors import CkptError, Code, err
from ckptfmt.saving.handle import SaveHandle
from ckptfmt.state import State, place_of

_COMMAND: Final = "`ckptfmt rehearse` does it in processes of their own"


class ShortRehearsal:
    """The rehearsal of `Checks(rehearse=k)`, at most once in a launch, after a fresh start.

    Args:
        steps: the number of steps that are done twice; 0 for no rehearsal.
        every: the interval of saves.

    Attributes:
        first: the step of the save to which the state goes back; None before this save.
        name: the name of the saved checkpoint; empty until `find_obstacle` finds no obstacle.

    Raises: StateError(ARGUMENT) if the interval of saves is too short for the number of steps.
    """

    def __init__(self, steps: int, every: object) -> None:
        if steps < 0 or (isinstance(every, int) and steps >= every):
            detail = f"rehearse={steps} with every={every!r}: the steps must lie between two saves"
            raise err(
                Code.ARGUMENT,
                detail,
                where="rehearse=",
                remedy="Pass fewer steps than every=, such as 3.",
            )
        self.first: int | None = None
        self.name = ""
        self._steps = steps
        self._handle: SaveHandle | None = None
        self._is_over = steps == 0

    def note_saved(self, step: int, handle: SaveHandle) -> bool:
        """Begin the rehearsal after the first save.

        Returns: whether this save ends a rehearsal that has begun.
        """
        if self._is_over:
            return False
        if self.first is not None:
            self._is_over = True
            return True
        self.first = step
        self._handle = handle
        return False

    def is_due(self, step: int) -> bool:
        """Return whether the state must go back now. Only one call returns true."""
        if self._is_over or self.first is None or step < self.first + self._steps:
            return False
        self._is_over = True
        return True

    def find_obstacle(self, state: State, *, timeout_s: float) -> str:
        """Wait for the save, and return the reason why the state can't go back within this process.

        The result is empty if the state can go back.
        """
        assert self._handle is not None  # noqa: S101
        try:
            report = self._handle.wait(timeout_s=timeout_s)
        except CkptError as error:
            return f"the save of step {self.first} failed: {error}"
        if report is None or report.durability != HOME:
            return (
                f"the save of step {self.first} isn't at home: it is in caches alone, or was"
                " skipped"
            )
        if not all(sampler.can_go_back for sampler in find_samplers(state)):
            return f"a batch is fetched ahead, as worker processes of a loader do: {_COMMAND}"
        for unit in walk(state, worker=0):
            is_position = unit.field == "data" and not isinstance(unit.value, Sampler)
            if is_position or (unit.kind is Kind.STATEFUL and _has_iterators(unit.value)):
                place = place_of(unit.field, unit.name)
                return (
                    f"{place} is no ckptfmt.Sampler, and the reader of the position may not go"
                    f" back with the load: {_COMMAND}"
                )
        self.name = report.path.rstrip("/").rpartition("/")[2]
        return ""


def keep_iterators(state: State) -> contextlib.ExitStack:
    """Return a context in which a load of a sampler keeps the sampler's live iterators."""
    stack = contextlib.ExitStack()
    for sampler in find_samplers(state):
        stack.enter_context(sampler.keep_iterators())
    return stack


def _has_iterators(value: Any) -> bool:
    return isinstance(value, ForeignLoader) or (
        hasattr(value, "__iter__") and not isinstance(value, Sampler)
    )
