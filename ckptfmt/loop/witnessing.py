"""The witness of a launch: it records each step and compares repeated steps with earlier records.

The claim of a load is deduced from the State, and misses state that a program keeps outside of the
State. A launch that resumes after a kill repeats some steps of the killed launch. The comparison of
the repeated steps shows whether the trajectory is the same: the verdict is "verified" or "refuted".
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import logging
import socket
import struct
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec

from ckptfmt.adapters import find_sides, jax_side, torch_side
from ckptfmt.adapters.data_loaders import find_readers
from ckptfmt.adapters.live import Kind, iter_tensor_readers, iter_tensors, may_be_schedule, walk
from ckptfmt.adapters.live_trees import fingerprint
from ckptfmt.adapters.rng_streams import live_streams, make_stream_digest
from ckptfmt.documents.manifest import parse_checkpoint_name
from ckptfmt.documents.run import Launch
from ckptfmt.errors import CkptError, Code, err
from ckptfmt.group import Group
from ckptfmt.loading.load_report import LoadReport
from ckptfmt.loop.repeated_steps import RepeatedSteps
from ckptfmt.loop.step_log import StepLog, bring_home, list_logged_launches, node_folder, remove_old
from ckptfmt.run.witness import (
    FULL_EVERY,
    STREAM_COUNT,
    Ending,
    StepRecord,
    StepsHeader,
    WitnessRecord,
    steps_path,
    verdict_path,
)
from ckptfmt.state import CapturedRng, LiveRngStream, State
from ckptfmt.store.protocol import Store

if TYPE_CHECKING:
    from ckptfmt.adapters.torch.fingerprints import Fingerprint

_LOG: Final = logging.getLogger("ckptfmt")
#: The maximum number of steps with unfinished copies from a device. With more steps, the witness
#: waits for the oldest.
_DEPTH: Final = 16
_MASK: Final = (1 << 64) - 1
_FLOAT: Final = struct.Struct("<d")
_BITS: Final = struct.Struct("<Q")
#: Longest wait for the storage at the end of a launch and before a kill, in seconds.
_END_S: Final = 10.0
#: Longest name of a machine in a header, in characters.
_NODE_LENGTH: Final = 200
#: The options of a parameter group that schedules change.
_OPTIONS: Final = ("lr", "momentum", "betas", "weight_decay")
#: The maximum number of parameter groups of an optimizer that enter the digest.
_GROUPS: Final = 64


P = ParamSpec("P")


def _harmless(
    method: Callable[Concatenate[Witness, P], None],
) -> Callable[Concatenate[Witness, P], None]:
    """Return a method that switches the witness off on an exception.

    An error of the witness must not end a training.
    """

    @functools.wraps(method)
    def call(witness: Witness, /, *arguments: P.args, **options: P.kwargs) -> None:
        try:
            method(witness, *arguments, **options)
        except Exception as error:  # noqa: BLE001
            witness.turn_off(error)

    return call


@dataclasses.dataclass(slots=True)
class _Open:
    """A step with copies from a device that may be unfinished.

    Attributes:
        known: the members of the record that are known.
        observed: the digests and numbers that may still be in transfer, by member.
    """

    known: dict[str, Any]
    observed: dict[str, list[Any]]

    def is_ready(self) -> bool:
        """Return whether all copies from devices are finished."""
        return all(
            _is_here(value) or value.is_ready()
            for values in self.observed.values()
            for value in values
        )

    def wait(self) -> None:
        """Wait until all copies from devices are finished."""
        for values in self.observed.values():
            for value in values:
                if not _is_here(value):
                    value.wait()

    def close(self) -> StepRecord:
        """Return the complete record."""
        members = self.known
        for name, values in self.observed.items():
            members[name] = _combine(values)
            if len(values) > 1 and name in ("loss", "grad_norm"):
                members["is_several"] = True
        return StepRecord(**members)


class Witness:
    """The witness of one process of a launch.

    The training's thread makes all calls. An error of the witness doesn't end a training: the
    witness is switched off, and `reports` gets a sentence.

    Args:
        group: the processes of the job.
        is_on: whether the witness is active.
        kept_count: the number of newest records that `go_back` needs.
        is_thorough: whether all records are full and `changes` is filled, as in a rehearsal.

    Attributes:
        changes: the steps after which an RNG stream or a schedule changed before the next step.
            Filled only if `is_thorough`.
        restores_streams_itself: whether the RNG streams are restored at the start of the first
            step, after the whole setup of the program. In this case a resumed run never repeats
            random numbers that were drawn between a save and the next step.
    """

    def __init__(
        self, group: Group, *, is_on: bool, kept_count: int = 0, is_thorough: bool = False
    ) -> None:
        self.restores_streams_itself = False
        self.changes: list[int] = []
        self._is_thorough = is_thorough
        self._group = group
        self._is_on = is_on
        self._side: Any = None
        self._store: Store | None = None
        self._header: StepsHeader | None = None
        #: The earlier launch whose step logs must stay.
        self._spared: int | None = None
        self._repeated: RepeatedSteps | None = None
        self._log: StepLog | None = None
        self._fingerprint: Fingerprint | None = None
        self._optimizers: list[Any] = []
        self._samplers: list[Any] = []
        self._streams: list[LiveRngStream] = []
        self._digests: list[Callable[[], int]] = []
        #: Whether the next record is the first record after a start or a save.
        self._is_first = True
        self._is_before_first = True
        self._has_failed = False
        #: The digests of the RNG streams before this step; None in a loop without `begin_step`.
        self._before: tuple[int, ...] | None = None
        self._observed: dict[str, list[Any]] = {}
        self._open: collections.deque[_Open] = collections.deque()
        self._newest: collections.deque[StepRecord] = collections.deque(maxlen=kept_count)
        self._saved: _End | None = None
        self._last: _End | None = None
        self._warned: set[str] = set()
        self._own_reports: list[str] = []

    @property
    def is_recording(self) -> bool:
        """Whether steps are recorded."""
        return self._header is not None

    @property
    def reports(self) -> tuple[str, ...]:
        """Sentences for the caller.

        The subjects are a refuted claim, a state that changed after a save, and a witness that was
        switched off.
        """
        repeated = () if self._repeated is None else self._repeated.reports
        return (*repeated, *self._own_reports)

    def update(self, report: LoadReport | None) -> LoadReport | None:
        """Return a load's report with the current verdict."""
        if report is None or self._repeated is None:
            return report
        return report.with_witness(self._repeated.record)

    @_harmless
    def begin(
        self,
        store: Store,
        launch: Launch,
        step: int,
        report: LoadReport | None,
        state: State,
        *,
        follows: int | None = None,
    ) -> None:
        """Start recording. A second call has no effect.

        The RNG streams must be restored before the call.

        Args:
            step: the number of steps done.
            report: the report of the load of this launch's checkpoint; None for a fresh start.
            follows: see `StepsHeader`. With a healer, the log is opened before the first step, so
                that a log without an ending shows an end without a record.
        """
        if not self._is_on or self._header is not None or node_folder(store, launch.run_id) is None:
            return
        self._store, self._side = store, torch_side()
        resumed = launch.resume_from
        expected = None if report is None or resumed is None else report.claim
        self._streams = _witnessed_streams(state)
        self._digests = [make_stream_digest(stream) for stream in self._streams]
        self._header = StepsHeader(
            run_id=launch.run_id,
            launch=launch.launch,
            writer=self._group.writer,
            writer_count=self._group.writer_count,
            first_step=step,
            resumed=None if resumed is None else resumed.digest,
            expected=expected,
            streams=tuple(stream.name for stream in self._streams),
            tensors="",
            node="" if follows is None else socket.gethostname()[:_NODE_LENGTH],
            follows=follows,
        )
        if follows is not None:
            log = self._start_log()
            log.call(functools.partial(self._bring_home, log.path, self._header))
        if expected is not None:
            self._repeated = RepeatedSteps(self._group, launch, expected)
            self._repeated.find(store, step, list_logged_launches(store, launch.run_id))
        saver = None if resumed is None else parse_checkpoint_name(resumed.name)
        self._spared = None if saver is None else saver[1]

    @_harmless
    def begin_step(self, step: int, state: State) -> None:
        """Digest the RNG streams before a step, and check the state for changes since the save.

        Args:
            step: the number of steps done.
        """
        if self._header is None:
            return
        # An evaluation between steps, or a step that ended with an exception, may have left values.
        self._observed = {}
        self._before = self._digest_streams() if self._is_full(step) else ()
        self._check_unchanged(step, state)

    @_harmless
    def begin_epoch(self, step: int, state: State) -> None:
        """Check the state for changes since the save, before the iterator of an epoch is created.

        The creation of an iterator draws random numbers. A resumed run draws the same numbers,
        because the streams are restored before.
        """
        if self._header is not None:
            self._check_unchanged(step, state)

    def _check_unchanged(self, step: int, state: State) -> None:
        saved = self._saved
        last = self._last
        self._saved = self._last = None
        if step not in {end.step for end in (saved, last) if end is not None}:
            return
        now = self._look(step, state)
        if saved is not None and saved.step == step:
            self._compare_saved(saved, now)
        if last is not None and last.step == step and last != now:
            self.changes.append(step)

    def observe(self, *, loss: Any, grad_norm: Any, batch: Any) -> None:
        """Record numbers of the current step, without a wait for values on a device.

        Raises: StateError(ARGUMENT) for a loss or a norm that is no number.
        """
        # The witness is off or hasn't begun, or the store is in memory and has no step logs.
        if self._header is None:
            return
        side = self._side
        try:
            for name, value in (("loss", loss), ("grad_norm", grad_norm)):
                if value is not None:
                    self._observed.setdefault(name, []).append(_fetch(name, value, side))
            found = side.fetch_batch(batch) if batch is not None and side is not None else None
            if found is not None:
                self._observed.setdefault("batch", []).append(found)
        except CkptError:
            raise
        except Exception as error:  # noqa: BLE001
            self.turn_off(error)

    @_harmless
    def end_step(self, step: int, state: State, *, is_single: bool) -> None:
        """Record a step, and compare the step with an earlier launch's record, if there is one.

        Args:
            step: the number of steps done, including this step.
            is_single: whether one step was counted. If several steps were counted at once, the
                observed numbers are dropped: another launch may group the steps differently.
        """
        if self._header is None:
            return
        if self._is_first:
            self._look_up_objects(state)
        position, samples = _position_of(self._samplers, step)
        is_full = self._is_full(step - 1)
        streams = self._before
        is_before = self._before is not None
        if streams is None:
            streams = self._digest_streams() if is_full else ()
        known = {
            "step": step,
            "position": position,
            "samples": samples,
            "options": _digest_options(self._optimizers),
            "streams": streams,
            "is_before": is_before,
            "is_full": is_full,
        }
        observed = self._observed if is_single else {}
        weights = (
            None if self._fingerprint is None else self._fingerprint.start(step, is_full=is_full)
        )
        if weights is not None:
            observed["weights"] = [weights]
        self._open.append(_Open(known, observed))
        self._is_first = False
        self._before = None
        self._observed = {}
        self._flush(is_last=False)
        if self._is_thorough:
            self._last = self._look(step, state)

    @_harmless
    def note_saved(self, step: int, state: State) -> None:
        """Keep the state's digests after a save, for a check at the start of the next step."""
        if self._header is None:
            return
        self._is_first = True
        if self.restores_streams_itself and not isinstance(state.rng, CapturedRng):
            self._saved = self._look(step, state)

    @_harmless
    def go_back(self, launch: Launch, step: int, expected: str) -> None:
        """Start comparing with earlier records of this launch, after a load of an earlier state.

        Args:
            step: the number of steps done in the loaded state.
            expected: the claim of the load.
        """
        self._flush(is_last=True)
        if self._header is not None:
            self._repeated = RepeatedSteps(self._group, launch, expected)
            self._repeated.expect(
                [record for record in self._newest if record.step > step], self._header
            )
            self._is_first = True
            self._saved = self._last = None

    def _look(self, step: int, state: State) -> _End:
        return _End(step, self._digest_streams(), _schedules(state))

    def turn_off(self, error: Exception) -> None:
        """Stop recording, and report the reason."""
        self._report(
            f"WITNESS_OFF: steps aren't recorded any more: {type(error).__name__}: {error}"
        )
        self._write_ending(Ending(kind="unknown", step=0))
        self._switch_off(timeout_s=0.0)

    def answer(self) -> dict[str, Any] | None:
        """Return this process's findings for the exchange at a save; None without comparisons."""
        return None if self._repeated is None else self._repeated.answer()

    def hear(self, told: Iterable[Mapping[str, Any]]) -> None:
        """Merge the findings of all processes, and write the verdict on process 0.

        Args:
            told: each process's message, with the findings as ``witness``.
        """
        answers = [theirs["witness"] for theirs in told if theirs["witness"] is not None]
        if self._repeated is not None and len(answers) == self._group.writer_count:
            self._repeated.hear(answers)
            self._write()

    @_harmless
    def end(self, ending: Ending) -> None:
        """Record how the launch ends on this process. A good end replaces no failure."""
        self._flush(is_last=True)
        if not (self._has_failed and ending.kind == "closed"):
            self._has_failed = ending.kind != "closed"
            self._write_ending(ending)

    def _write_ending(self, ending: Ending) -> None:
        """Write an ending into the log, if a healer reads endings."""
        header = self._header
        if self._log is not None and header is not None and header.follows is not None:
            self._log.end(ending)

    def flush(self) -> None:
        """Wait until the records of all steps are in the file, but not for a hanging storage."""
        self._finish()
        if self._log is not None:
            self._log.flush(_END_S)

    def close(self) -> None:
        """Finish the log, log the verdict, and write the verdict. A second call has no effect."""
        self._finish()
        if self._header is None:
            return
        if self._repeated is not None:
            self._repeated.close()
            self._write()
        self._switch_off(timeout_s=_END_S)

    @_harmless
    def _finish(self) -> None:
        """Wait for all unfinished steps, and write and compare them."""
        self._flush(is_last=True)

    def _look_up_objects(self, state: State) -> None:
        """Look up the optimizers, samplers and tensors of the state in the first step after a save.

        A launch that resumes from the save looks up the objects at the same time. Digests aren't
        comparable if the tensors differ from the tensors of the first step. In this case the
        witness takes no digests of tensors until the next save. Without torch there are no digests.
        """
        sides = find_sides()
        units = walk(state, worker=0, sides=sides)
        self._optimizers = [unit.value for unit in units if hasattr(unit.value, "param_groups")]
        samplers, loaders = find_readers(state)
        self._samplers = [*samplers, *loaders]
        side = sides.torch
        found = None if side is None else side.Fingerprint(iter_tensor_readers(state))
        tensors = "" if found is None else found.plan
        assert self._header is not None  # noqa: S101
        if self._is_before_first:
            self._is_before_first = False
            # Only after the first step have optimizers their state, and wrappers their parameters.
            self._header = dataclasses.replace(self._header, tensors=tensors)
            if self._log is None:
                self._start_log()
            else:
                self._log.replace_header(self._header)
        self._fingerprint = found if tensors == self._header.tensors else None

    def _start_log(self) -> StepLog:
        """Open the log, with the header."""
        assert self._header is not None and self._store is not None  # noqa: PT018, S101
        header = self._header
        folder = node_folder(self._store, header.run_id)
        assert folder is not None  # noqa: S101
        self._log = StepLog(folder / steps_path(header.launch, header.writer), header)
        if self._group.writer == 0:
            remove = functools.partial(
                remove_old, self._store, header.run_id, header.launch, spared=self._spared
            )
            self._log.call(remove)
        return self._log

    def _is_full(self, step: int) -> bool:
        """Return whether the record of the step after `step` done steps is full.

        A full record has digests of the RNG streams, and covers more tensors.
        """
        return self._is_thorough or self._is_first or step % FULL_EVERY == 0

    def _digest_streams(self) -> tuple[int, ...]:
        digests = [digest() for digest in self._digests]
        if len(digests) <= STREAM_COUNT:
            return tuple(digests)
        rest = hash(tuple(digests[STREAM_COUNT - 1 :])) & 0xFFFFFFFF
        return (*digests[: STREAM_COUNT - 1], rest)

    def _flush(self, *, is_last: bool) -> None:
        """Write and compare the steps with finished copies, in order.

        Args:
            is_last: whether to wait for all steps.
        """
        while self._open and self._log is not None and self._header is not None:
            first = self._open[0]
            if is_last or len(self._open) > _DEPTH:
                first.wait()
            elif not first.is_ready():
                return
            self._open.popleft()
            record = first.close()
            self._log.put(record)
            self._newest.append(record)
            if self._repeated is not None and self._repeated.has(record.step):
                has_new_skips = any(sampler.has_new_skips for sampler in self._samplers)
                self._repeated.compare(record, self._header, has_new_skips=has_new_skips)
                if self._repeated.is_decided:
                    self._write()

    def _write(self) -> None:
        """Write the verdict beside the run if the verdict has changed, on process 0 only."""
        repeated = self._repeated
        if (
            self._group.writer == 0
            and repeated is not None
            and not repeated.is_written
            and self._log is not None
        ):
            repeated.is_written = True
            self._log.call(functools.partial(self._write_verdict, repeated.record))

    def _write_verdict(self, record: WitnessRecord) -> None:
        assert self._store is not None  # noqa: S101
        try:
            self._store.replace(verdict_path(record.launch), record.dump())
        except CkptError as error:  # a failed write of the verdict must not stop a training
            self._report(f"WITNESS_OFF: the verdict on this launch couldn't be written: {error}")

    def _switch_off(self, *, timeout_s: float) -> None:
        """Stop recording, and copy the log from the node to the run.

        Args:
            timeout_s: the longest wait for the storage in seconds.
        """
        header = self._header
        log = self._log
        self._is_on = False
        self._header = None
        self._log = None
        if header is None or log is None:
            return
        log.call(functools.partial(self._bring_home, log.path, header))
        try:
            if not log.close(timeout_s) and timeout_s:
                self._report(
                    "WITNESS_OFF: the storage hasn't taken the last records of steps in"
                    f" {timeout_s:.0f} s"
                )
        except CkptError as error:
            if timeout_s:  # else the caller has reported the error
                self._report(f"WITNESS_OFF: the last steps aren't recorded: {error}")

    def _bring_home(self, path: Path, header: StepsHeader) -> None:
        assert self._store is not None  # noqa: S101
        try:
            bring_home(self._store, path, header.launch, header.writer)
        except CkptError as error:
            self._report(f"WITNESS_OFF: the steps of this launch couldn't be copied home: {error}")

    def _compare_saved(self, saved: _End, now: _End) -> None:
        """Report changes of the state between a save and the next step.

        A resumed run doesn't have such changes.
        """
        rows = zip(self._streams, saved.streams, now.streams, strict=False)
        for name in [stream.name for stream, before, after in rows if before != after]:
            self._warn(
                f"the RNG stream {name} was drawn from",
                saved.step,
                "draws other numbers (an evaluation, a prefetched batch): draw within the step,"
                " or undo the draws by"
                " capture_rng() and put_back()",
            )
        for name, value in now.schedules.items():
            if saved.schedules.get(name, value) != value:
                self._warn(
                    f"{name} changed",
                    saved.step,
                    "goes on from the saved value: step it before the save",
                )

    def _warn(self, change: str, step: int, outcome: str) -> None:
        if change not in self._warned:
            self._warned.add(change)
            self._report(
                f"{change} between the save of step {step} and the next step, so that a resume"
                f" {outcome}"
            )

    def _report(self, sentence: str) -> None:
        self._own_reports.append(sentence)
        _LOG.log(logging.WARNING if self._group.writer == 0 else logging.DEBUG, "%s", sentence)


@dataclasses.dataclass(frozen=True, slots=True)
class _End:
    """The end of a step, with the digests of its RNG streams and the states of its schedulers."""

    step: int
    streams: tuple[int, ...]
    schedules: dict[str, object]


def _fetch(name: str, value: Any, side: Any) -> Any:
    """Return a number, or a pending copy of a torch tensor or of a JAX array.

    Args:
        name: the argument of `Checkpointer.observe`.
        side: `torch_side`.

    Raises: StateError(ARGUMENT) for a value that isn't a single number.
    """
    if type(value) is float:
        return value
    try:
        if side is not None and side.is_tensor(value):
            return side.fetch(value)
        of_jax: Any = jax_side()
        if of_jax is not None and of_jax.is_array(value):
            return of_jax.PendingArray(value)
        return float(value)
    except (TypeError, ValueError) as error:
        remedy = f"Pass a number, or a tensor of one element, such as {name}.mean()."
        raise err(
            Code.ARGUMENT, f"{name} is no number: {error}", where="observe()", remedy=remedy
        ) from error


def _combine(values: list[Any]) -> int:
    """Return the bits of a single value, or a digest of several values of a step in order."""
    numbers = [_bits(value) for value in values]
    total = numbers[0]
    for number in numbers[1:]:
        total = (total * 0x9E3779B97F4A7C15 + number) & _MASK
    return total


def _is_here(value: Any) -> bool:
    return type(value) is float or type(value) is int


def _bits(value: Any) -> int:
    if type(value) is float:
        return int(_BITS.unpack(_FLOAT.pack(value))[0])
    return value if type(value) is int else int(value.bits())


def _witnessed_streams(state: State) -> list[LiveRngStream]:
    if state.rng is False:
        return []
    generators = None if isinstance(state.rng, CapturedRng) else state.rng
    side: Any = torch_side()
    devices = (
        frozenset[str]()
        if side is None
        else side.devices_of([tensor for _, tensor in iter_tensors(state)])
    )
    return live_streams(generators, devices, side)


def digest_outside_modules(state: State) -> dict[str, list[int]]:
    """Return digests of chosen elements of the live torch modules outside of a state, by name.

    Without torch the result is empty.
    """
    side: Any = torch_side()
    return (
        {}
        if side is None
        else side.digest_outside_modules([tensor for _, tensor in iter_tensors(state)])
    )


def _digest_options(optimizers: Iterable[Any]) -> int | None:
    """Return a digest of the options that schedules change, over the groups of all optimizers.

    The result is None if no optimizer has a group.
    """
    values = [
        _without_waiting(group.get(name))
        for optimizer in optimizers
        for group in optimizer.param_groups[:_GROUPS]
        for name in _OPTIONS
    ]
    return zlib.crc32(repr(values).encode()) if values else None


def _without_waiting(value: Any) -> Any:
    """Return an option, or "tensor" for a tensor on a device: its value would need a wait."""
    return value if type(value) is float or getattr(value, "is_cpu", True) else "tensor"


def _position_of(samplers: Iterable[Any], step: int) -> tuple[int | None, int | None]:
    """Return the sum of the samplers' positions after a step and a digest of its samples."""
    position: int | None = None
    samples: int | None = None
    for sampler in samplers:
        if sampler.is_pipeline:  # the samples of a step follow the times of the answers
            continue
        position = (position or 0) + sampler.position
        drawn = sampler.samples_digest(step - 1)
        if drawn is not None:
            samples = ((samples or 0) + drawn) & _MASK
    return position, samples


def _schedules(state: State) -> dict[str, object]:
    """Return a fingerprint of the state of each scheduler, by place."""
    found: dict[str, object] = {}
    for unit in walk(state, worker=0):
        name = f"{unit.field}:{unit.name}" if unit.name else unit.field
        if unit.kind is Kind.STATEFUL and may_be_schedule(unit.name, unit.value):
            found[name] = fingerprint(unit.value.state_dict(), field=unit.field, name=unit.name)
    return found
