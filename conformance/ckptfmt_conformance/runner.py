"""Runs of cases against an adapter: selection, parallel calls, and results."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Final

from ckptfmt_conformance.callers import Caller, Target, open_described
from ckptfmt_conformance.cases import Case
from ckptfmt_conformance.cells import ABSENT, judge_witnessed
from ckptfmt_conformance.judge import RED, Status, Verdict, due, find_reason_to_skip, judge
from ckptfmt_conformance.phases import ask_in_phases
from ckptfmt_conformance.protocol import Answer, Description
from ckptfmt_conformance.xfails import Xfails

__all__ = ["CELL_TIMEOUTS", "TIMEOUT_S", "Result", "Run", "ask_case", "run_cases"]

#: The default time limit of a case, in seconds.
TIMEOUT_S: Final = 30.0
#: The factor by which a trajectory's time limit is longer, because a trajectory trains.
CELL_TIMEOUTS: Final = 10


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of a case."""

    case: Case
    status: Status
    message: str
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The results of all cases.

    Attributes:
        adapter: the value of ``--adapter``.
        description: the adapter's description of itself.
        results: the results in the order of the cases.
        selection: the options of the selection; empty if all cases were asked.
        idle: patterns of expected failures without a fitting case.
        seconds: the time from the first question to the last answer.
        unix_s: the time of the end, in seconds since 1970.
        seed: the seed by which questions were drawn; None where no question was drawn.
    """

    adapter: str
    description: Description
    results: tuple[Result, ...]
    selection: tuple[str, ...] = ()
    idle: tuple[str, ...] = ()
    seconds: float
    unix_s: int
    seed: int | None = None

    @property
    def counts(self) -> dict[Status, int]:
        """The number of results of each status."""
        counted = Counter(result.status for result in self.results)
        return {status: counted[status] for status in Status}

    @property
    def is_green(self) -> bool:
        """Whether no result is red, no expected failure is idle, and some case was judged."""
        return (
            not any(result.status in RED for result in self.results)
            and not self.idle
            and self.has_answers
        )

    @property
    def has_answers(self) -> bool:
        """Whether any case was judged.

        A run of skipped cases shows no conformance.
        """
        return any(
            result.status not in (Status.SKIPPED, Status.UNSUPPORTED) for result in self.results
        )


def run_cases(
    target: Target,
    cases: Sequence[Case],
    *,
    jobs: int = 1,
    timeout_s: float = TIMEOUT_S,
    xfails: Xfails | None = None,
    selection: Sequence[str] = (),
    known: Sequence[str] = (),
    choose: Callable[[Description, Sequence[Case]], Sequence[Case]] | None = None,
    on_result: Callable[[Result], None] | None = None,
    may_serve: bool = True,
    seed: int | None = None,
    drawn_by: int | None = None,
) -> Run:
    """Ask an adapter all cases, and return the results.

    Args:
        choose: returns the cases to ask instead of `cases`, given the adapter's description and
            `cases`.
        jobs: the number of cases asked in parallel, each by a separate process.
        timeout_s: the time limit of each case; a trajectory has `CELL_TIMEOUTS` times as long.
        xfails: the expected failures.
        selection: the options of the selection, for the report.
        known: ids of all existing cases, to find idle patterns; the ids of `cases` by default.
        on_result: called with each result, in the thread of the case; calls don't overlap.
        may_serve: whether a serving command is asked through a single process. Otherwise each case
            has a separate process.
        seed: the seed of the order in which the cases are asked; None for the given order.
        drawn_by: the seed by which `choose` drew questions, for the report.

    Raises: SuiteError where the adapter can't be started, or has no valid description.
    """
    listed = xfails or Xfails()
    begin_s = time.monotonic()
    with open_described(target, may_serve=may_serve) as (first, description):
        cases = choose(description, cases) if choose is not None else cases
        work = _Work(_shuffled(cases, seed), description, timeout_s, listed, on_result)
        open_other = functools.partial(target.open, is_serving=description.serve and may_serve)
        others = [
            threading.Thread(target=work.take_with, args=(open_other,))
            for _ in range(min(jobs, len(cases)) - 1)
        ]
        for thread in others:
            thread.start()
        try:
            work.take(first)
        finally:
            work.stop()
            for thread in others:
                thread.join()
    if work.crash is not None:
        raise work.crash
    return Run(
        adapter=target.text,
        description=description,
        results=tuple(
            work.results[number] for number in range(len(cases)) if number in work.results
        ),
        selection=tuple(selection),
        idle=listed.find_idle(list(known) or [case.id for case in cases]),
        seconds=time.monotonic() - begin_s,
        unix_s=int(time.time()),
        seed=drawn_by,
    )


def _shuffled(cases: Sequence[Case], seed: int | None) -> list[tuple[int, Case]]:
    """Return the cases with their numbers, in the order in which they are asked."""
    numbered = list(enumerate(cases))
    if seed is not None:
        random.Random(seed).shuffle(numbered)
    return numbered


class _Work:
    """A queue of cases for several threads."""

    def __init__(
        self,
        cases: Sequence[tuple[int, Case]],
        description: Description,
        timeout_s: float,
        xfails: Xfails,
        on_result: Callable[[Result], None] | None,
    ) -> None:
        self.results: dict[int, Result] = {}
        self.crash: BaseException | None = None
        self._description = description
        self._timeout_s = timeout_s
        self._xfails = xfails
        self._on_result = on_result
        self._lock = threading.Lock()
        self._queue: SimpleQueue[tuple[int, Case]] = SimpleQueue()
        # A trajectory with permanent processes is left to the first caller.
        self._alone: SimpleQueue[tuple[int, Case]] = SimpleQueue()
        for number, case in cases:
            is_alone = case.kind == "trajectory" and (case.request or {}).get("processes")
            (self._alone if is_alone else self._queue).put((number, case))

    def stop(self) -> None:
        """Remove all remaining cases, which ends all threads."""
        for queue in (self._alone, self._queue):
            with contextlib.suppress(Empty):
                while True:
                    queue.get_nowait()

    def take_with(self, open_caller: Callable[[], Caller]) -> None:
        """Open a caller for this thread, and ask cases until none is left."""
        try:
            with contextlib.closing(open_caller()) as caller:
                self._take(self._queue, caller)
        except BaseException as error:  # noqa: BLE001 - the main thread raises the exception again
            self.crash = error
            self.stop()

    def take(self, caller: Caller) -> None:
        """Ask cases until none is left. Cases for the first caller only come first."""
        self._take(self._alone, caller)
        self._take(self._queue, caller)

    def _take(self, queue: SimpleQueue[tuple[int, Case]], caller: Caller) -> None:
        with contextlib.suppress(Empty):
            while True:
                number, case = queue.get_nowait()
                begin_s = time.monotonic()
                verdict = self._xfails.apply(
                    case.id, ask_case(caller, case, self._description, self._timeout_s)
                )
                result = Result(
                    case=case,
                    status=verdict.status,
                    message=verdict.message,
                    seconds=time.monotonic() - begin_s,
                )
                self.results[number] = result
                if self._on_result is not None:
                    with self._lock:
                        self._on_result(result)


def ask_case(
    caller: Caller, case: Case, description: Description, timeout_s: float = TIMEOUT_S
) -> Verdict:
    """Ask an adapter a case, and return the verdict."""
    reason = find_reason_to_skip(case, description)
    if reason:
        return Verdict(status=Status.SKIPPED, message=reason)
    if case.kind == "trajectory":
        if case.id == ABSENT:
            return Verdict(status=Status.SKIPPED, message=case.why)
        if (case.request or {}).get("witnessed"):
            return _judge_witnessed(caller, case, timeout_s * CELL_TIMEOUTS)
        with _scratch() as folder:
            answer = caller.call(
                "trajectory", cell=case.id, output=folder, timeout_s=timeout_s * CELL_TIMEOUTS
            )
        return _judge_cell(answer)
    if case.kind == "write":
        with _scratch() as folder:
            output = folder / "checkpoint"
            answer = caller.call("write", request=case.request, output=output, timeout_s=timeout_s)
            return judge(case, description, answer, output)

    def ask(path: Path, request: Mapping[str, Any] | None) -> Answer:
        return caller.call(case.kind, path=path, request=request, timeout_s=timeout_s)

    return ask_in_phases(
        case, due(case, description), ask, functools.partial(judge, case, description)
    )


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ckptfmt-conformance-") as folder:
        yield Path(folder)


def _judge_witnessed(caller: Caller, case: Case, timeout_s: float) -> Verdict:
    """Train a trajectory in this process, and have the adapter's process save and load.

    No code of the adapter runs in this process.
    """

    def ask(do: str, request: Mapping[str, Any]) -> None:
        # save and load run in different processes, which share only the checkpoint
        caller.close()
        answer = caller.call("witness", request={**request, "do": do}, timeout_s=timeout_s)
        if answer.outcome != "accepted":
            raise RuntimeError(answer.message or f"{do}: {answer.outcome} {answer.body}")

    try:
        divergence = judge_witnessed(case, ask)
    except Exception as error:  # noqa: BLE001 - any exception is an error of this case
        return Verdict(status=Status.ERROR, message=f"{type(error).__name__}: {str(error)[:1000]}")
    return Verdict(status=Status.FAIL if divergence else Status.PASS, message=divergence or "")


def _judge_cell(answer: Answer) -> Verdict:
    """Return the verdict on a trajectory."""
    if answer.outcome == "unsupported":
        return Verdict(status=Status.SKIPPED, message=str(answer.body["feature"]))
    if answer.outcome != "accepted":
        message = answer.message or f"{answer.outcome}: {answer.body.get('error')}"
        return Verdict(status=Status.ERROR, message=message)
    try:
        status = Status(answer.body.get("status", ""))
    except ValueError:
        return Verdict(status=Status.ERROR, message=f"no status: {answer.body.get('status')!r}")
    return Verdict(status=status, message=str(answer.body.get("divergence") or ""))
