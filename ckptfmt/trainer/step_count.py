"""How many steps of a training are done: who may say so, and what can't be right."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from ckptfmt.data.sampler import Sampler
from ckptfmt.errors import Code, err
from ckptfmt.state import PerWorker
from ckptfmt.trainer.one_save import check_step

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptfmt.state import State

_WHERE: Final = "step="


class StepCount:
    """The steps done, over the whole run, and the samplers that commit with them.

    Args:
        state: whose samplers are meant; what it holds may change.

    Attributes:
        step: how many steps are done.
        is_under_way: whether a step's body is being run.
        is_streamless: whether the RNG streams of `step` are still to be put back.
    """

    def __init__(self, state: State) -> None:
        self.step = 0
        self.is_under_way = self.is_streamless = False
        self._state = state
        self._is_told = self._is_left = False

    @contextlib.contextmanager
    def body(self) -> Iterator[None]:
        """Hold the body of a step; one that an exception ends is left half-way. Raises: StateError(ARGUMENT)."""
        if self.is_under_way:
            raise err(Code.ARGUMENT, "a step begins within another one", where=_WHERE, remedy="End the first one.")
        self.is_under_way = self._is_left = True
        try:
            yield
        finally:
            self.is_under_way = False
        self._is_left = False

    def check(self, step: int) -> None:
        """Refuse a number of steps done that can't be right. Raises: StateError(ARGUMENT)."""
        check_step(step)
        if self.is_under_way:
            raise err(
                Code.ARGUMENT,
                f"step {step} is counted within the body of a step, which counts itself",
                where=_WHERE,
                remedy="Count after the body; or leave it to steps() or training_step(), and call save() without step.",
            )
        if step < self.step:
            raise err(
                Code.ARGUMENT,
                f"{self.step} steps are done, and the count doesn't go back to {step}",
                where=_WHERE,
                remedy="Count on from checkpointer.step; to go back, start with resume= and the name of a checkpoint.",
            )
        if step > self.step and self.is_streamless:
            raise err(
                Code.ARGUMENT,
                f"step {step} is counted, and the random-number streams of step {self.step} weren't put back: what"
                " was trained since isn't this run",
                where=_WHERE,
                remedy="Call restore_rng() before the first step, once the iterators exist; or use training_step().",
            )

    def tell(self, step: int) -> int:
        """Take note that so many steps are done, on samplers too, and return how many more they are.

        Raises: StateError(ARGUMENT) as `check`, and where the batches that a sampler was asked for say otherwise.
        """
        self.check(step)
        step = operator.index(step)  # numpy's integers too
        samplers = list(_find_samplers((self._state.data, self._state.extra))) if step > self.step else []
        for sampler in samplers:
            sampler.check_fetched(step)
        for sampler in samplers:
            sampler.commit(step)
        more, self.step, self._is_told = step - self.step, step, True
        self._is_left = self._is_left and not more
        return more

    def check_known(self) -> None:
        """Raise where it isn't known which step is live. Raises: StateError(ARGUMENT)."""
        if not self._is_told:
            raise err(
                Code.ARGUMENT,
                f"nobody counts the steps: it would be saved as step {self.step}, whatever was trained",
                where="save()",
                remedy="Say save(step=...) with the number of steps done; or let steps() or training_step() count.",
            )
        if self._is_left:
            raise err(
                Code.ARGUMENT,
                f"step {self.step} was left half-way, by break or an exception: what is live is no step's end",
                where="save()",
                remedy="Leave when a step is over; or say save(step=...) if you know that nothing has changed.",
            )


def _find_samplers(value: object) -> Iterator[Sampler]:
    """Yield the samplers in a part of a state."""
    if isinstance(value, Sampler):
        yield value
    elif isinstance(value, PerWorker):
        yield from _find_samplers(value.value)
    elif isinstance(value, Mapping):
        yield from _find_samplers(tuple(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _find_samplers(item)
