"""The loop of a training: the count of steps, the interval of saves, and the signals to stop."""

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

from ckptfmt.adapters.data_loaders import find_loaders, find_readers
from ckptfmt.errors import Code, err
from ckptfmt.group import Group
from ckptfmt.saving.one_save import check_step
from ckptfmt.state import State, check_state

if TYPE_CHECKING:
    from ckptfmt.loop.auto_every import AutoEvery
    from ckptfmt.loop.launching import Taken
    from ckptfmt.loop.time_keeping import TimeKeeper
    from ckptfmt.run.node_cache import Cache
    from ckptfmt.saving.handle import SaveHandle
    from ckptfmt.store.protocol import Store

_LOG: Final = logging.getLogger("ckptfmt")
_WHERE: Final = "step="
#: The reason for a lower claim if the first batch was taken or used without the saved RNG streams.
DRAWN_IN_HAND: Final = (
    "the first step's batch was taken before the RNG streams were put back, and random numbers"
    " were drawn after that"
    " (by its transforms, or by a forward pass outside of the step): make the iterator, call"
    " restore_rng(), then take"
    " the batch; or take it within the step"
)
_DURATION: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?(s|min|h)")
#: Longest time between exchanges of the processes about signals, in seconds.
_ASK_S: Final = 1.0
#: Remedies for invalid times.
_EVERY: Final = (
    "Such as every=100 for each hundredth step, every='5min' or every='auto'; None"
    " leaves it to save()."
)
_MTBF: Final = "Pass a number with a unit, s, min or h, such as every=Auto(mtbf='3h')."
_UNIT_S: Final = {"s": 1.0, "min": 60.0, "h": 3600.0}


class StepCount:
    """The count of steps done over the whole run, with the samplers that commit at each count.

    Attributes:
        state: state with the samplers; an empty state if none was given. Its objects may change.
        step: number of steps done.
        is_under_way: whether a step's body is running.
        is_streamless: whether the RNG streams of `step` still have to be put back.

    Raises: StateError(ARGUMENT) for a value that isn't a State.
    """

    def __init__(self, state: State | None) -> None:
        self.state = State() if state is None else state
        check_state(self.state)
        self.follow()
        self.step = 0
        self.is_under_way = self.is_streamless = False
        self._is_told = self._is_left = False
        self._mark_streams: Callable[[], object] = lambda: None

    @contextlib.contextmanager
    def body(self) -> Iterator[None]:
        """Enclose the body of a step. An exception in the body leaves the step half-way.

        Raises: StateError(ARGUMENT) within another step.
        """
        self.begin_body()
        try:
            yield
        finally:
            self.is_under_way = False
        self._is_left = False

    def begin_body(self) -> None:
        """Begin the body of a step. Raises: StateError(ARGUMENT) within another step."""
        if self.is_under_way:
            raise err(
                Code.ARGUMENT,
                "a step begins within another step",
                where=_WHERE,
                remedy="End the first one. In epochs(), each batch is a step of its own.",
            )
        self.is_under_way = self._is_left = True

    def end_body(self) -> None:
        """End the body of a step."""
        self.is_under_way = self._is_left = False

    def follow(self) -> None:
        """Count the batches of the state's DataLoaders from now on.

        Raises: StateError(STATE_UNSUPPORTED, ARGUMENT) for a loader that can't be followed.
        """
        for loader in find_loaders(self.state):
            loader.is_by_steps = True

    def check(self, step: int) -> None:
        """Check a number of steps done against the count so far. Raises: StateError(ARGUMENT)."""
        check_step(step)
        if self.is_under_way:
            raise err(
                Code.ARGUMENT,
                f"step {step} is counted within the body of a step, which counts itself",
                where=_WHERE,
                remedy=(
                    "Count after the body; or leave it to steps() or training_step(), and call"
                    " save() without step."
                ),
            )
        if step < self.step:
            raise err(
                Code.ARGUMENT,
                f"{self.step} steps are done, and the count doesn't go back to {step}",
                where=_WHERE,
                remedy=(
                    "Count on from checkpointer.step; to go back, start with resume= and the"
                    " name of a checkpoint."
                ),
            )
        if step > self.step and self.is_streamless:
            raise err(
                Code.ARGUMENT,
                f"step {step} is counted, but the RNG streams of step {self.step} were never put"
                " back: training since then drew random numbers of another stream",
                where=_WHERE,
                remedy=(
                    "Call restore_rng() before the first step, once the iterators exist; or"
                    " use training_step()."
                ),
            )

    def tell(self, step: int) -> int:
        """Set the number of steps done, also on samplers; return the increase.

        Raises: StateError(ARGUMENT) as `check`, and if a sampler's batches contradict the number.
        """
        self.check(step)
        step = operator.index(step)  # accepts NumPy's integers
        samplers, loaders = find_readers(self.state) if step > self.step else ([], [])
        for sampler in samplers:
            sampler.check_fetched(step)
        for sampler in samplers:
            sampler.commit(step)
        for loader in loaders:
            loader.note_step(step)
        more = step - self.step
        self.step = step
        self._is_told = True
        self._is_left = self._is_left and not more
        return more

    def go_to(
        self,
        step: int,
        mark_streams: Callable[[], object],
        begin_streams: Callable[[], object],
    ) -> None:
        """Set the count to a restored checkpoint's step; the RNG streams aren't put back yet.

        Samplers without a loaded position begin at this step.

        Args:
            mark_streams: returns a value that changes with every drawn random number.
            begin_streams: puts the RNG streams back. An epoch that begins needs them.
        """
        self.step = step
        self.is_streamless = True
        self._mark_streams = mark_streams
        samplers, loaders = find_readers(self.state)
        for sampler in samplers:
            sampler.begin_at(step)
            sampler.note_fetch = mark_streams
        for loader in loaders:
            loader.is_by_steps = True
            loader.note_fetch = mark_streams
            loader.begin_streams = begin_streams

    def go_back(self, step: int) -> None:
        """Set the count to an earlier step, whose state is live again, RNG streams included."""
        self.step = step

    def find_drawn(self) -> tuple[str, ...]:
        """Return the reasons that lower the claim, just before the RNG streams are put back.

        Samplers no longer watch their batches after this call.
        """
        samplers, loaders = find_readers(self.state)
        mark = self._mark_streams()
        readers: list[Any] = [*samplers, *loaders]
        for reader in readers:
            reader.note_fetch = None
        for loader in loaders:
            loader.begin_streams = None
            loader.has_begun = True
        return (DRAWN_IN_HAND,) if any(reader.drawn_in_hand(mark) for reader in readers) else ()

    def check_known(self) -> None:
        """Check that the live state is the end of a known step. Raises: StateError(ARGUMENT)."""
        if not self._is_told:
            raise err(
                Code.ARGUMENT,
                (
                    "the steps aren't counted: the checkpoint would carry step"
                    f" {self.step}, regardless of the steps trained"
                ),
                where="save()",
                remedy=(
                    "Pass the number of steps done: save(step=...); or let steps() or"
                    " training_step() count them."
                ),
            )
        if self._is_left:
            raise err(
                Code.ARGUMENT,
                (
                    f"step {self.step} was left half-way, by break or an exception: the live"
                    " state is"
                    " no step's end"
                ),
                where="save()",
                remedy=(
                    "Leave the loop at a step's end; or call save(step=...) if you know that"
                    " nothing has changed."
                ),
            )


class StopSignals:
    """The signals after which a run saves and stops.

    The first signal is only recorded. A second signal has its previous effect, so that a user can
    end the program at once.

    Args:
        numbers: signal numbers such as ``signal.SIGTERM``; empty for none.
        deadline_s: longest time for the save and the end, in seconds.

    Attributes:
        first_s: time of the signal by the monotonic clock; None without a signal.
        first_name: name of the signal.
        is_agreed: whether all processes know of the signal.

    Raises: StateError(ARGUMENT).
    """

    def __init__(self, numbers: Iterable[int], *, deadline_s: float = 30.0) -> None:
        if not deadline_s > 0:
            raise err(
                Code.ARGUMENT,
                f"{deadline_s!r} isn't a positive time",
                where="Stop(deadline_s=)",
                remedy="Pass a time in seconds, such as Stop(deadline_s=10).",
            )
        self.deadline_s = deadline_s
        try:
            # Without duplicates: the second `signal.signal` would return our own handler as the
            # previous one.
            self._numbers = list(dict.fromkeys(signal.Signals(number) for number in numbers))
        except (TypeError, ValueError) as error:
            raise err(
                Code.ARGUMENT,
                f"signals={numbers!r}: {error}",
                where="signals=",
                remedy="Pass a list of signal numbers, such as signals=[signal.SIGTERM].",
            ) from error
        for number in self._numbers:
            if number in (signal.SIGKILL, signal.SIGSTOP):
                raise err(
                    Code.ARGUMENT,
                    f"no process can catch {number.name}",
                    where="signals=",
                    remedy="Pass a signal that can be caught, such as signal.SIGTERM.",
                )
        self._previous: dict[signal.Signals, Any] = {}
        self.first_s: float | None = None
        self.first_name = ""
        self.is_agreed = False

    def __bool__(self) -> bool:
        return bool(self._numbers)

    def end_s(self) -> float:
        """Return the time until which this process waits for an exchange about the signal.

        Units: seconds by the monotonic clock; infinity without a signal, or after the agreement.
        """
        return (
            math.inf if self.first_s is None or self.is_agreed else self.first_s + self.deadline_s
        )

    def install(self) -> None:
        """Install the handlers. Raises: StateError(ARGUMENT) outside of the main thread."""
        if not self._numbers or self._previous or self.first_s is not None:
            return
        if threading.current_thread() is not threading.main_thread():
            raise err(
                Code.ARGUMENT, "signals can be caught in the main thread only", where="signals="
            )
        for number in self._numbers:
            self._previous[number] = signal.signal(number, self._note)

    def remove(self) -> None:
        """Restore the previous handlers. Outside of the main thread this has no effect."""
        if threading.current_thread() is not threading.main_thread():
            return
        while self._previous:
            number, previous = self._previous.popitem()
            # None: the previous handler was set from C, and Python can't set it again.
            signal.signal(number, signal.SIG_DFL if previous is None else previous)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.first_s, self.first_name = time.monotonic(), signal.Signals(number).name
        _LOG.warning("%s: the run stops at the end of a step", self.first_name)
        self.remove()


@dataclasses.dataclass(slots=True)
class Timer:
    """The time of the last save by this process's clock, and the step of the next question.

    Attributes:
        last_s: time of the last save in seconds.
        steps_since: number of steps since the last save.
        next_step: step at which to ask again whether a save is due.
    """

    last_s: float = 0.0
    steps_since: int = 0
    next_step: int = 0

    def answer(
        self, step: int, now_s: float, every_s: float, *, asks: bool, is_alone: bool
    ) -> dict[str, Any]:
        """Return whether a save is due, and the step of the next question.

        The next question comes after half of the remaining time.

        Args:
            step: number of steps done.
            now_s: time by this process's clock.
            every_s: interval of saves in seconds.
            asks: whether signals or notices are possible; then the next question is within a
                second, or at the next step if `is_alone`.
            is_alone: whether the job has a single process.
        """
        elapsed_s = now_s - self.last_s
        per_step_s = max(elapsed_s / self.steps_since, 1e-9)
        ahead = min((every_s - elapsed_s) / 2 / per_step_s, 1e6)
        if asks:
            ahead = 1 if is_alone else min(ahead, _ASK_S / per_step_s)
        return {"step": step, "due": elapsed_s >= every_s, "next_step": step + max(1, int(ahead))}


def parse_every(every: int | str | None) -> int | float | None:
    """Return an interval of saves: an int in steps, or a float in seconds.

    The interval of "auto" is measured later, and infinity stands for it here.

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


def parse_mtbf(mtbf: object) -> float:
    """Return a mean time between failures in seconds. Raises: StateError(ARGUMENT)."""
    return _parse_time(mtbf, f"mtbf={mtbf!r} isn't a time", "mtbf=", _MTBF)


def _parse_time(time_text: object, detail: str, where: str, remedy: str) -> float:
    found = _DURATION.fullmatch(time_text) if isinstance(time_text, str) else None
    if found is None or float(found[1]) <= 0:
        raise err(Code.ARGUMENT, detail, where=where, remedy=remedy)
    return float(found[1]) * _UNIT_S[found[2]]


class Meters:
    """The measurements of a training on process 0. Without a meter each call does nothing.

    Attributes:
        auto: meter for the interval of saves; None unless ``every="auto"``.
        keeper: meter for the ledger; None without a ledger.
    """

    def __init__(self, auto: AutoEvery | None, keeper: TimeKeeper | None) -> None:
        self.auto = auto
        self.keeper = keeper

    def note_launch(self, store: Store, taken: Taken) -> None:
        """Record the begun launch of the run at `store`."""
        if self.auto is not None:
            self.auto.note_launches(store, taken.run, taken.launch)
        if self.keeper is not None:
            self.keeper.note_launch(store, taken)

    def note_rewind(self, store: Store, taken: Taken, step: int) -> None:
        """Record a launch that follows in these processes; the launch before has ended.

        Args:
            step: number of steps done by the launch before.
        """
        if self.keeper is not None:
            self.keeper.close(step, store)
            self.keeper = type(self.keeper)(taken.seconds)
            self.keeper.note_launch(store, taken)

    def note_restored(self) -> None:
        """Record the end of the load."""
        if self.keeper is not None:
            self.keeper.note_restored()

    def note_begun(self, step: int) -> None:
        """Record the start of the first step, after `step` steps of the run."""
        if self.keeper is not None:
            self.keeper.note_begun(step)

    def note_steps(self, now_s: float, count: int) -> None:
        """Record the end of `count` steps at the time `now_s`."""
        if self.auto is not None:
            self.auto.note_steps(now_s, count)
        if self.keeper is not None:
            self.keeper.note_steps(now_s, count)

    def note_save(self, handle: SaveHandle) -> None:
        """Record the start of a save."""
        if self.auto is not None:
            self.auto.note_save(handle)
        if self.keeper is not None:
            self.keeper.note_save(handle)

    def note_snapshot(self, handle: SaveHandle) -> None:
        """Record the start of a snapshot, which stays in memory."""
        if self.keeper is not None:
            self.keeper.note_snapshot(handle)

    def cadence(self, cadence: int | float | None) -> int | float | None:  # noqa: PYI041
        """Return the measured interval of saves, or the given interval without a measurement.

        The result is of the form of `parse_every`.
        """
        return cadence if self.auto is None else self.auto.interval_s()

    def ledger(self, step: int) -> bytes:
        """Return the ledger's entry for a save after `step` steps; empty without a ledger."""
        return b"" if self.keeper is None else self.keeper.entry(step, is_save=True).dump()

    def note_closing(self) -> None:
        """Record the end of the last step."""
        if self.keeper is not None:
            self.keeper.note_closing()

    def close(self, step: int) -> None:
        """Record the end of the last save."""
        if self.keeper is not None:
            self.keeper.close(step)


def make_meters(
    every: int | str | None,
    mtbf: str | None,
    group: Group,
    cache: Cache | None,
    *,
    ledger: bool,
) -> Meters:
    """Return the requested meters, on process 0. Raises: StateError(ARGUMENT)."""
    mtbf_s = None if mtbf is None else parse_mtbf(mtbf)
    if every != "auto" and mtbf is not None:
        raise err(
            Code.ARGUMENT,
            "mtbf= says nothing without every='auto'",
            where="mtbf=",
            remedy="Pass every=ckptfmt.Auto(mtbf=...).",
        )
    meters = Meters(None, None)
    if group.writer == 0 and every == "auto":
        from ckptfmt.loop.auto_every import AutoEvery  # noqa: PLC0415

        meters.auto = AutoEvery(
            mtbf_s, group.writer_count, 1 if cache is None else cache.upload_every
        )
    if group.writer == 0 and ledger:
        from ckptfmt.loop.time_keeping import TimeKeeper  # noqa: PLC0415

        meters.keeper = TimeKeeper()
    return meters
