"""Compare the repeated steps of a resumed launch with the records of earlier launches."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Mapping
from typing import Any, Final

from ckptfmt.documents.canonical import fit_string
from ckptfmt.documents.manifest import parse_checkpoint_name
from ckptfmt.documents.run import Launch
from ckptfmt.group import Group
from ckptfmt.loop.comparing import compare_steps
from ckptfmt.loop.step_log import Steps, read_steps
from ckptfmt.run.witness import (
    RESULTS,
    WORDS,
    StepDifference,
    StepRecord,
    StepsHeader,
    Verdict,
    What,
    WitnessRecord,
)
from ckptfmt.store.protocol import Store

_LOG: Final = logging.getLogger("ckptfmt")
#: The maximum length of the sentence on a difference, in characters.
_TEXT_LENGTH: Final = 1000
_ORDER: Final = tuple(WORDS)


class RepeatedSteps:
    """The comparison of one launch's steps, by one process, and the verdict of all processes.

    A process reports a differing step immediately. Steps count as identical once all processes
    agree: at the next save with several processes, immediately with a single process.

    Args:
        group: the processes of the job.
        launch: this launch.
        expected: the claim of the launch's load: ``T1``, ``S1`` or ``S0``.

    Attributes:
        reports: sentences for the caller.
        is_written: whether the current verdict is written.
    """

    def __init__(self, group: Group, launch: Launch, expected: str) -> None:
        self.reports: list[str] = []
        self.is_written = True
        self._group = group
        self._launch = launch
        self._expected = expected
        self._references: dict[int, tuple[StepRecord, StepsHeader]] = {}
        self._final_step = 0
        self._first_step: int | None = None
        self._last_step: int | None = None
        self._identical: list[int] = []
        self._compared: tuple[What, ...] = ()
        self._stream_count = 0
        self._difference: StepDifference | None = None
        #: The last step that is identical on all processes.
        self._agreed_step: int | None = None
        self._is_said = False
        self._sentence = ""

    @property
    def record(self) -> WitnessRecord:
        """The current verdict."""
        verdict: Verdict = "expected"
        if self._difference is not None and self._expected == "T1":
            verdict = "refuted"
        elif self._difference is None and self._agreed_step is not None and self._has_results:
            verdict = "verified"
        words = [WORDS[name] for name in self._compared]
        if "rng" in self._compared:
            plural = "" if self._stream_count == 1 else "s"
            words[self._compared.index("rng")] = f"{self._stream_count} RNG stream{plural}"
        return WitnessRecord(
            run_id=self._launch.run_id,
            launch=self._launch.launch,
            expected=self._expected,
            verdict=verdict,
            first_step=self._first_step,
            last_step=self._agreed_step,
            step_count=len([step for step in self._identical if step <= (self._agreed_step or 0)]),
            compared=tuple(words),
            difference=self._difference,
        )

    @property
    def _has_results(self) -> bool:
        """Whether a result of a step was compared, in addition to the inputs of the step."""
        return not RESULTS.isdisjoint(self._compared)

    @property
    def is_decided(self) -> bool:
        """Whether a step differs, or every comparable step was compared."""
        return self._difference is not None or self._last_step == self._final_step

    def find(self, store: Store, step: int, launches: Iterable[int]) -> None:
        """Read the records of earlier launches that did the steps after the same checkpoint.

        The launch that saved the checkpoint takes precedence.

        Args:
            store: the run.
            step: the number of steps done.
            launches: the numbers of the launches that have step logs, ascending.
        """
        resumed = self._launch.resume_from
        named = None if resumed is None else parse_checkpoint_name(resumed.name)
        if resumed is None or named is None:
            return
        for number in launches:
            if not named[1] <= number < self._launch.launch:
                continue
            steps = read_steps(store, self._launch.run_id, number, self._group.writer)
            if steps is None or not self._is_comparable(
                steps, is_saver=number == named[1], digest=resumed.digest
            ):
                continue
            for record in steps.records.values():
                if record.step > step:
                    self._references.setdefault(record.step, (record, steps.header))
        self._final_step = max(self._references, default=0)

    def expect(self, records: Iterable[StepRecord], header: StepsHeader) -> None:
        """Set records of this launch as the reference for steps that will be repeated."""
        self._references = {record.step: (record, header) for record in records}
        self._final_step = max(self._references, default=0)

    def has(self, step: int) -> bool:
        """Return whether an earlier record of a step is left for comparison."""
        return step in self._references

    def compare(self, record: StepRecord, header: StepsHeader, *, has_new_skips: bool) -> None:
        """Compare a step with the earlier record of the step, if such a record exists.

        Args:
            has_new_skips: whether the program has skipped samples since the load. In this case
                different samples are intended, here or on another process, and no step after the
                first differing step is compared.
        """
        reference = self._references.pop(record.step, None)
        if reference is None or self._difference is not None:
            return
        earlier, earlier_header = reference
        found = compare_steps(
            earlier,
            record,
            streams=header.streams,
            earlier_streams=earlier_header.streams,
            same_tensors=header.tensors == earlier_header.tensors,
            is_first=self._first_step is None,
        )
        if not found.compared:
            return
        if found.what is not None and has_new_skips:
            self._references.clear()
            text = (
                "step %d differs, and samples were skipped since the resume: later steps"
                " aren't compared"
            )
            _LOG.log(self._level(logging.INFO), text, record.step)
            return
        if self._first_step is None:
            self._first_step = record.step
            self._compared = found.compared
        if "rng" in found.compared:
            self._stream_count = len(record.streams)
        if found.what is not None:
            # The names of RNG streams are the caller's.
            text = fit_string(found.detail, _TEXT_LENGTH)
            difference = StepDifference(
                step=record.step, writer=self._group.writer, what=found.what, text=text
            )
            self._refute(difference, level=logging.WARNING)
            return
        sparse = set() if earlier.is_full and record.is_full else {"rng", "weights"}
        self._compared = tuple(
            name for name in self._compared if name in found.compared or name in sparse
        )
        self._last_step = record.step
        self._identical.append(record.step)
        if self._group.writer_count == 1:
            self._agreed_step = record.step
            self.is_written = False
            if record.step == self._final_step:
                self._say_identical()

    def answer(self) -> dict[str, Any]:
        """Return this process's findings, for the exchange at a save."""
        difference = None if self._difference is None else dataclasses.asdict(self._difference)
        return {"last": self._last_step, "final": self._final_step, "difference": difference}

    def hear(self, told: Iterable[Mapping[str, Any]]) -> None:
        """Merge the findings of all processes.

        The difference with the earliest step counts, and within a step the difference of the
        earliest member: a differing loss on one process makes the weights of all processes differ.
        """
        told = list(told)
        found = [
            StepDifference(**theirs["difference"])
            for theirs in told
            if theirs["difference"] is not None
        ]
        if found:
            earliest = min(found, key=lambda one: (one.step, _ORDER.index(one.what), one.writer))
            if earliest != self._difference:
                self._refute(earliest, level=self._level(logging.WARNING))
        lasts = [theirs["last"] for theirs in told]
        if found or None in lasts or self._agreed_step == min(lasts):
            return
        self._agreed_step = min(lasts)
        self.is_written = False
        if all(theirs["last"] == theirs["final"] for theirs in told):
            self._say_identical()

    def close(self) -> None:
        """Log the verdict if it wasn't logged before. A refuted claim is logged again."""
        if self.record.verdict == "verified" and not self._is_said:
            self._say_identical()
        if self.record.verdict == "refuted" and self._difference is not None:
            text = "launch %d isn't the same trajectory as an earlier one: %s"
            _LOG.log(self._level(logging.WARNING), text, self._launch.launch, self._difference.text)

    def _is_comparable(self, steps: Steps, *, is_saver: bool, digest: str) -> bool:
        """Return whether the same steps are expected of this launch and of an earlier launch.

        The earlier launch saved the checkpoint, or resumed from the checkpoint with the same claim.
        """
        header = steps.header
        if header.writer_count != self._group.writer_count:
            return False
        return is_saver or (header.resumed == digest and header.expected == self._expected)

    def _refute(self, difference: StepDifference, *, level: int) -> None:
        self._difference = difference
        self.is_written = False
        process = f"process {difference.writer}: " if self._group.writer_count > 1 else ""
        if self._expected == "T1":
            sentence = f"NOT the same trajectory: {process}{difference.text}"
            self.reports = [*(one for one in self.reports if one != self._sentence), sentence]
            self._sentence = sentence
            _LOG.log(level, "%s", sentence)
        else:
            text = "steps are done again, otherwise than before, and T1 isn't claimed: %s%s"
            _LOG.log(self._level(logging.INFO), text, process, difference.text)

    def _say_identical(self) -> None:
        self._is_said = True
        record = self.record
        steps = f"step {record.first_step}"
        if record.first_step != record.last_step:
            steps = f"steps {record.first_step} to {record.last_step}"
            if record.step_count != (record.last_step or 0) - (record.first_step or 0) + 1:
                steps += f", {record.step_count} of them compared,"
        claim = (
            "T1 verified"
            if self._expected == "T1"
            else f"claim {self._expected} all the same, see load_report"
        )
        if not self._has_results:
            claim = (
                f"claim {self._expected} still expected, since neither loss nor weights could"
                " be compared"
            )
        text = "%s done again: identical (%s): %s"
        _LOG.log(self._level(logging.INFO), text, steps, ", ".join(record.compared), claim)

    def _level(self, level: int) -> int:
        return level if self._group.writer == 0 else logging.DEBUG
