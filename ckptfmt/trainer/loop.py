"""The loop of a training: how many steps are done, who may say so, when to save, which signals ask it to stop."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import operator
import re
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

from ckptfmt.adapters.data_loaders import find_samplers
from ckptfmt.errors import Code, err
from ckptfmt.group import Group
from ckptfmt.state import State, check_state
from ckptfmt.trainer.one_save import check_step

if TYPE_CHECKING:
    from ckptfmt.run.node_cache import CacheOptions
    from ckptfmt.store.protocol import Store
    from ckptfmt.trainer.auto_every import AutoEvery
    from ckptfmt.trainer.handle import SaveHandle
    from ckptfmt.trainer.launching import Taken
    from ckptfmt.trainer.time_keeping import TimeKeeper

_LOG: Final = logging.getLogger("ckptfmt")
_WHERE: Final = "step="
#: What lowers the claim where the first batch was drawn, or trained on, with RNG streams other than the saved ones.
DRAWN_IN_HAND: Final = (
    "the first step's batch was taken before the RNG streams were put back, and random numbers were drawn after that"
    " (by its transforms, or by a forward pass outside of the step): make the iterator, call restore_rng(), then take"
    " the batch; or take it within the step"
)
_DURATION: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?(s|min|h)")
#: How often the processes ask each other whether one of them got a signal, in seconds.
_ASK_S: Final = 1.0
#: The remedies of times that can't be read.
_EVERY: Final = "Such as every=100 for each hundredth step, every='5min' or every='auto'; None leaves it to save()."
_MTBF: Final = "Pass a number with a unit, s, min or h, such as mtbf='3h'."
_UNIT_S: Final = {"s": 1.0, "min": 60.0, "h": 3600.0}


class StepCount:
    """The steps done, over the whole run, and the samplers that commit with them.

    Attributes:
        state: whose samplers are meant, an empty one if nothing was given; what it holds may change.
        step: how many steps are done.
        is_under_way: whether a step's body is being run.
        is_streamless: whether the RNG streams of `step` are still to be put back.

    Raises: StateError(ARGUMENT) for what is no state.
    """

    def __init__(self, state: State | None) -> None:
        self.state = State() if state is None else state
        check_state(self.state)
        self.step = 0
        self.is_under_way = self.is_streamless = False
        self._is_told = self._is_left = False
        self._mark_streams: Callable[[], object] = lambda: None

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
                f"step {step} is counted, but the RNG streams of step {self.step} were never put back: what"
                " was trained since then isn't this run",
                where=_WHERE,
                remedy="Call restore_rng() before the first step, once the iterators exist; or use training_step().",
            )

    def tell(self, step: int) -> int:
        """Take note that so many steps are done, on samplers too, and return how many more they are.

        Raises: StateError(ARGUMENT) as `check`, and where the batches that a sampler was asked for say otherwise.
        """
        self.check(step)
        step = operator.index(step)  # numpy's integers too
        samplers = list(find_samplers(self.state)) if step > self.step else []
        for sampler in samplers:
            sampler.check_fetched(step)
        for sampler in samplers:
            sampler.commit(step)
        more, self.step, self._is_told = step - self.step, step, True
        self._is_left = self._is_left and not more
        return more

    def go_to(self, step: int, mark_streams: Callable[[], object]) -> None:
        """Take note that a checkpoint of a step was restored, but for its RNG streams.

        Samplers of which it knows nothing begin there.

        Args:
            mark_streams: returns a value that changes with every random number that is drawn.
        """
        self.step, self.is_streamless = step, True
        self._mark_streams = mark_streams
        for sampler in find_samplers(self.state):
            sampler.begin_at(step)
            sampler.note_fetch = mark_streams

    def go_back(self, step: int) -> None:
        """Take note that the state is that of an earlier step again, RNG streams included."""
        self.step = step
        for sampler in find_samplers(self.state):
            sampler.begin_at(step)

    def find_drawn(self) -> tuple[str, ...]:
        """Return what lowers the claim as the RNG streams are about to be put back; batches aren't watched after it."""
        samplers, mark = list(find_samplers(self.state)), self._mark_streams()
        for sampler in samplers:
            sampler.note_fetch = None
        return (DRAWN_IN_HAND,) if any(sampler.drawn_in_hand(mark) for sampler in samplers) else ()

    def check_known(self) -> None:
        """Raise where it isn't known which step is live. Raises: StateError(ARGUMENT)."""
        if not self._is_told:
            raise err(
                Code.ARGUMENT,
                f"the steps aren't counted: the state would be saved as that of step {self.step}, whatever was trained",
                where="save()",
                remedy="Pass the number of steps done: save(step=...); or let steps() or training_step() count them.",
            )
        if self._is_left:
            raise err(
                Code.ARGUMENT,
                f"step {self.step} was left half-way, by break or an exception: the live state is no step's end",
                where="save()",
                remedy="Leave the loop at a step's end; or call save(step=...) if you know that nothing has changed.",
            )


class StopSignals:
    """The signals after which a run is to save and stop.

    The first one is only noted. A second one does what it would have done without us: whoever sends it is impatient.

    Args:
        numbers: such as ``signal.SIGTERM``; none for none.
        deadline_s: how long saving and stopping may take, in seconds.

    Attributes:
        first_s: when the signal came, on the monotonic clock; None if none did.
        first_name: its name.
        is_agreed: whether all processes know of it.

    Raises: StateError(ARGUMENT).
    """

    def __init__(self, numbers: Iterable[int], *, deadline_s: float = 30.0) -> None:
        if not deadline_s > 0:
            raise err(Code.ARGUMENT, f"{deadline_s!r} isn't a positive time", where="stop_deadline_s=")
        self.deadline_s = deadline_s
        try:
            # Each once: to catch one twice would make ourselves the one to give it back to.
            self._numbers = list(dict.fromkeys(signal.Signals(number) for number in numbers))
        except (TypeError, ValueError) as error:
            raise err(Code.ARGUMENT, f"stop_on: {error}", where="stop_on=") from error
        for number in self._numbers:
            if number in (signal.SIGKILL, signal.SIGSTOP):
                raise err(Code.ARGUMENT, f"no process can catch {number.name}", where="stop_on=")
        self._previous: dict[signal.Signals, Any] = {}
        self.first_s: float | None = None
        self.first_name = ""
        self.is_agreed = False

    def __bool__(self) -> bool:
        return bool(self._numbers)

    def end_s(self) -> float:
        """Return until when, on the monotonic clock, this process waits for the others to hear of its signal.

        Infinity where no signal came, or all processes know of it.
        """
        return math.inf if self.first_s is None or self.is_agreed else self.first_s + self.deadline_s

    def install(self) -> None:
        """Catch the signals from now on. Raises: StateError(ARGUMENT) outside of the main thread."""
        if not self._numbers or self._previous:
            return
        if threading.current_thread() is not threading.main_thread():
            raise err(Code.ARGUMENT, "signals can be caught in the main thread only", where="stop_on=")
        for number in self._numbers:
            self._previous[number] = signal.signal(number, self._note)

    def remove(self) -> None:
        """Give the signals back to whom they belonged before; outside of the main thread, that is left to the next."""
        if threading.current_thread() is not threading.main_thread():
            return
        while self._previous:
            number, previous = self._previous.popitem()
            # None: it was set from C, and can't be set again from here.
            signal.signal(number, signal.SIG_DFL if previous is None else previous)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.first_s, self.first_name = time.monotonic(), signal.Signals(number).name
        _LOG.warning("%s: the run stops at the end of a step", self.first_name)
        self.remove()


@dataclasses.dataclass(slots=True)
class Timer:
    """When the last save was, by this process's clock in seconds, and at which step to ask next."""

    last_s: float = 0.0
    steps_since: int = 0
    next_step: int = 0

    def answer(self, step: int, now_s: float, every_s: float, *, asks: bool, is_alone: bool) -> dict[str, Any]:
        """Return whether a save is due, and at which step to ask again: half of the remaining time ahead.

        Args:
            step: how many steps are done.
            now_s: by this process's clock.
            every_s: time from save to save.
            asks: whether a signal may come: then within a second.
            is_alone: whether nobody else has to be asked: then at each step.
        """
        elapsed_s = now_s - self.last_s
        per_step_s = max(elapsed_s / self.steps_since, 1e-9)
        ahead = min((every_s - elapsed_s) / 2 / per_step_s, 1e6)
        if asks:
            ahead = 1 if is_alone else min(ahead, _ASK_S / per_step_s)
        return {"step": step, "due": elapsed_s >= every_s, "next_step": step + max(1, int(ahead))}


def parse_every(every: int | str | None) -> int | float | None:
    """Return a number of steps as an int, a time in seconds as a float: infinity for "auto", which is to be measured.

    Raises: StateError(ARGUMENT).
    """
    if every is None:
        return None
    if every == "auto":
        return math.inf
    if hasattr(every, "__index__") and not isinstance(every, bool) and operator.index(every) > 0:
        return operator.index(every)
    detail = f"every={every!r} isn't a number of steps from 1 on, 'auto', or a time such as '5min'"
    return _parse_time(every, detail, "every=", _EVERY)


def _parse_time(time_text: object, detail: str, where: str, remedy: str) -> float:
    found = _DURATION.fullmatch(time_text) if isinstance(time_text, str) else None
    if found is None or float(found[1]) <= 0:
        raise err(Code.ARGUMENT, detail, where=where, remedy=remedy)
    return float(found[1]) * _UNIT_S[found[2]]


class Meters:
    """What measures a training, on process 0 and where it was asked for: without any, each call does nothing.

    Attributes:
        auto: for the interval of saves.
        keeper: for the ledger.
    """

    def __init__(self, auto: AutoEvery | None, keeper: TimeKeeper | None) -> None:
        self.auto, self.keeper = auto, keeper

    def note_launch(self, store: Store, taken: Taken) -> None:
        """Take note of the launch that was begun in the run at `store`."""
        if self.auto is not None:
            self.auto.note_launches(store, taken.run, taken.launch)
        if self.keeper is not None:
            self.keeper.note_launch(store, taken)

    def note_restored(self) -> None:
        """Take note that the state is loaded."""
        if self.keeper is not None:
            self.keeper.note_restored()

    def note_begun(self, step: int) -> None:
        """Take note that the first step begins, behind so many of the run."""
        if self.keeper is not None:
            self.keeper.note_begun(step)

    def note_steps(self, now_s: float, count: int) -> None:
        """Take note that so many steps are over."""
        if self.auto is not None:
            self.auto.note_steps(now_s, count)
        if self.keeper is not None:
            self.keeper.note_steps(now_s, count)

    def note_save(self, handle: SaveHandle) -> None:
        """Take note that a save has begun."""
        if self.auto is not None:
            self.auto.note_save(handle)
        if self.keeper is not None:
            self.keeper.note_save(handle)

    def cadence(self, cadence: int | float | None) -> int | float | None:  # noqa: PYI041 - as `parse_every` has it
        """Return when to save, as `parse_every` returns it: the time that is measured, or what there was."""
        return cadence if self.auto is None else self.auto.interval_s()

    def ledger(self, step: int) -> bytes:
        """Return the ledger's entry for a save that begins now, after so many steps; empty where there is no ledger."""
        return b"" if self.keeper is None else self.keeper.entry(step, is_save=True).dump()

    def note_closing(self) -> None:
        """Take note that no step follows."""
        if self.keeper is not None:
            self.keeper.note_closing()

    def close(self, step: int) -> None:
        """Take note that no save is under way any more."""
        if self.keeper is not None:
            self.keeper.close(step)


def make_meters(
    every: int | str | None, mtbf: str | None, group: Group, cache: CacheOptions | None, *, ledger: bool
) -> Meters:
    """Return what measures this training. Raises: StateError(ARGUMENT)."""
    mtbf_s = None if mtbf is None else _parse_time(mtbf, f"mtbf={mtbf!r} isn't a time", "mtbf=", _MTBF)
    if every != "auto" and mtbf is not None:
        raise err(Code.ARGUMENT, "mtbf= says nothing without every='auto'", where="mtbf=")
    meters = Meters(None, None)
    if group.writer == 0 and every == "auto":
        from ckptfmt.trainer.auto_every import AutoEvery  # noqa: PLC0415 - nobody else is to wait for it

        meters.auto = AutoEvery(mtbf_s, group.writer_count, 1 if cache is None else cache.upload_every)
    if group.writer == 0 and ledger:
        from ckptfmt.trainer.time_keeping import TimeKeeper  # noqa: PLC0415 - the same

        meters.keeper = TimeKeeper()
    return meters
