"""A healer: the evidence about failed launches, the decision, and the outcome.

The rule is in `run.failures`. Step logs of earlier launches are the evidence: each process reads
the logs of its own number, and process 0 decides for all. Spec: REQ-RUN-063.
"""

from __future__ import annotations

import dataclasses
import logging
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from ckptfmt.adapters.data_loaders import find_samplers
from ckptfmt.documents.canonical import fit_string
from ckptfmt.documents.run import Launch
from ckptfmt.errors import CkptError, Code, CommitError, StoreError, err
from ckptfmt.group import Group
from ckptfmt.loop.comparing import compare_steps
from ckptfmt.loop.rewinding import BY_HEALER, can_skip
from ckptfmt.loop.step_log import Steps, read_steps
from ckptfmt.run.failures import (
    FAILURES,
    TEXT_LENGTH,
    Decision,
    LaunchFailure,
    Means,
    ResultDifference,
    classify,
    decide,
    describe_failure,
    describe_next,
    describe_plan,
    explain_success,
    find_failures_that_belong_together,
    merge_differences,
    read_decisions,
)
from ckptfmt.run.lineage import iter_lineage, list_checkpoints, list_launches, read_run
from ckptfmt.run.witness import RESULTS, Ending, StepDifference
from ckptfmt.state import State
from ckptfmt.store.protocol import Store

_LOG: Final = logging.getLogger("ckptfmt")
#: Longest text of an ending, in characters.
_ENDING_LENGTH: Final = 300
#: Errors of launches without a failure: a newer launch goes on, or nothing was tried.
_NO_FAILURES: Final = (Code.FENCED, Code.HEALING_STOPPED)
#: Errors by which a process learns of the end of another one.
_OF_PEERS: Final = (Code.PEER_FAILED, Code.WRITERS_MISSING)
_NETWORK: Final = re.compile(
    r"gloo/|NCCL|Connection (closed|reset|refused)|Broken pipe|Timed out waiting", re.IGNORECASE
)
_NUMERIC: Final = re.compile(r"\b(nan|inf|infinit\w*|non-?finite|not finite)\b", re.IGNORECASE)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Healer:
    """Decisions after failures, for ``Stop(healer=)``.

    The launch after a failure decides by the records of the steps. The first failure is tried
    again. A failure that the same steps repeat comes from the data, the state or the program: the
    launch leaves out the samples of the step, or goes back to an older checkpoint, or stops. Other
    results of the same steps come from the hardware: the decision names process and machine. Each
    decision is a record in the run; `ckptfmt log` and `Run.decisions` show the records.

    With ``Triggers("rewind")`` an alarm is healed in the same processes; otherwise the decision
    waits for the next start. A start with ``resume=`` is a person's choice, and asks no healer.

    Attributes:
        quarantine: greatest number of samples to leave out of the run; by default 0, for none. Only
            a `Sampler` without ``pipeline=True`` leaves samples out.
        starts: greatest number of failing launches from one checkpoint; by default 3. Where
            machines are often taken away between two saves, choose a greater number.
        on_decision: function to call on process 0 with each `Decision`, and again with the
            outcome; by default None. An exception in the function is logged.

    Raises: StateError(ARGUMENT).

    >>> Healer(quarantine=1000).starts
    3
    """

    quarantine: int = 0
    starts: int = 3
    on_decision: Callable[[Decision], object] | None = None

    def __post_init__(self) -> None:
        for name, least in (("quarantine", 0), ("starts", 1)):
            number = getattr(self, name)
            if type(number) is not int or number < least:
                raise err(
                    Code.ARGUMENT,
                    f"{name}={number!r} isn't a whole number from {least} on",
                    where=f"Healer({name}=)",
                    remedy=f"Pass a number such as Healer({name}={max(least, 3)}).",
                )

    def begin(self, store: Store, group: Group, *, has_witness: bool) -> Healing:
        """Return the decisions of a `Checkpointer`. Raises: StateError(ARGUMENT)."""
        if not has_witness:
            detail = "a healer decides by the records of the witness, which is off"
            remedy = "Leave out Checks(witness=False), or Stop(healer=)."
            raise err(Code.ARGUMENT, detail, where="Stop(healer=)", remedy=remedy)
        return Healing(self, store, group)


class Healing:
    """The decisions of one `Checkpointer`; every process makes all calls.

    Args:
        healer: the options.
        store: store rooted at the run.
        group: the processes of the job.

    Attributes:
        decision: the decision that led to this launch, until the step of the failure is passed;
            None without a decision.
    """

    def __init__(self, healer: Healer, store: Store, group: Group) -> None:
        self.decision: Decision | None = None
        self._healer = healer
        self._store = store
        self._group = group
        #: The failed launch whose steps the next launch does in the same way.
        self._reference = 0

    def choose(self, state: State | None, *, has_failed: bool) -> str:
        """Decide after the newest launch's failure, and return the value of `resume=`.

        Args:
            state: the live state; None if unknown, and then no samples are left out.
            has_failed: whether the newest launch has failed in these processes.

        Raises: StateError(HEALING_STOPPED) if nothing is left to try. Spec: REQ-RUN-063.
        """
        seen = _Survey(self._store) if self._group.writer == 0 else None
        numbers = self._group.run_on_first(lambda: seen.read() if seen is not None else [])
        mine = self._group.together(
            lambda: _look(self._store, numbers[0], numbers[1:], self._group) if numbers else {}
        )
        told = self._group.all_gather(mine)
        batch = _batch_of(state) if self._healer.quarantine else 0
        found = self._group.run_on_first(
            lambda: None if seen is None else self._decide(seen, told, batch)
        )
        self.decision = decision = None
        if found is not None:
            content, path, self._reference = found
            self.decision = decision = Decision.parse(content.encode(), where=path)
        if decision is None and has_failed:
            raise err(
                Code.HEALING_STOPPED,
                "the steps of this launch aren't recorded, so that there is no evidence",
                where=self._store.name,
                remedy="Checkpointer.reports says why: the witness is off, or the run is in memory."
                " Start the program again.",
            )
        if decision is None:
            return "auto"
        self._tell(decision, decision.text)
        if decision.choice == "stop":
            raise err(
                Code.HEALING_STOPPED,
                f"{decision.text}. {decision.next[:1].upper()}{decision.next[1:]}",
                where=self._store.name,
                requirement="REQ-RUN-063",
            )
        return decision.resume_from or "auto"

    def _decide(
        self, seen: _Survey, told: Sequence[Mapping[str, Any]], batch: int
    ) -> tuple[str, str, int] | None:
        """Decide and record; return content and path of the record, and the launch to compare with.

        On process 0 only.
        """
        failures = seen.find_failures(told)
        if not failures:
            return None
        newest = failures[-1]
        left_out = sum(
            one.sample_count
            for one in seen.decisions.values()
            if one.choice in ("skip", "back_skip") and one.launch != newest.launch
        )
        has_skipped = any(failure.choice in ("skip", "back_skip") for failure in failures)
        needed = batch * (2 if has_skipped else 1)
        means = Means(
            starts=self._healer.starts,
            can_skip=batch > 0 and left_out + needed <= self._healer.quarantine,
            head=seen.head,
            older=seen.older,
        )
        plan = decide(failures, means)
        step_count = 0 if plan.skip is None else plan.skip[1] - plan.skip[0] + 1
        # Suspect checkpoints alone stop a start that follows the lineage.
        is_fresh = plan.choice != "stop" and means.head is None and seen.has_checkpoints
        text = describe_plan(plan, newest)
        if plan.choice == "stop" and batch == 0 and newest.kind in ("alarm", "error"):
            text = f"{text}; Healer(quarantine=) leaves samples of a ckptfmt.Sampler out"
        decision = Decision(
            run_id=seen.run_id,
            launch=newest.launch,
            step=newest.step,
            kind=newest.kind,
            evidence=tuple(
                sentence
                for failure in failures
                for sentence in describe_failure(failure, self._group.writer_count)
            ),
            choice=plan.choice,
            resume_from="fresh" if is_fresh else plan.resume_from,
            skip=plan.skip,
            sample_count=step_count * batch,
            suspected=plan.suspected,
            text=fit_string(text, TEXT_LENGTH),
            next=describe_next(plan, failures, means),
        )
        self._store.replace(decision.path, decision.dump())
        unchanged = [failure.launch for failure in failures if failure.skip is None]
        return decision.dump().decode(), decision.path, max(unchanged, default=newest.launch)

    def leave_out(self, state: State) -> None:
        """Leave out the samples of the decision, once the cursor is loaded."""
        decision = self.decision
        if decision is None or decision.skip is None:
            return
        first, last = decision.skip
        for sampler in find_samplers(state):
            if sampler.is_pipeline or sampler.steps_done >= first:
                continue  # the loaded cursor is behind the step
            begin = sampler.positions_of(first - 1)[0]
            end = sampler.positions_of(last - 1)[1]
            reason = f"{BY_HEALER}step {decision.step} failed"
            sampler.skip(positions=(begin, end), policy="shift", reason=reason)

    @staticmethod
    def end_of(error: object, *, step: int, alarm: tuple[int | None, str | None] | None) -> Ending:
        """Return how the launch ends on this process; see `ending_of`."""
        return ending_of(error, step=step, alarm=alarm)

    def is_passed(self, step: int) -> bool:
        """Return whether the step of the failure is done."""
        return self.decision is not None and step >= self.decision.step

    def end_trouble(self, launch: Launch) -> None:
        """Record the outcome of the decision, once the step of the failure is done and recorded.

        Args:
            launch: this launch.
        """
        decision = self.decision
        assert decision is not None  # noqa: S101
        self.decision = None
        numbers = [self._reference, launch.launch]
        mine = self._group.together(lambda: _look(self._store, launch.run_id, numbers, self._group))
        told = self._group.all_gather(mine)
        has_changed = decision.skip is not None
        found = None if has_changed else _merge(_list_findings(told, launch.launch))
        outcome = explain_success(decision, found, launch.launch)
        ended = dataclasses.replace(decision, outcome=outcome)
        if self._group.writer == 0:
            try:
                self._store.replace(ended.path, ended.dump())
            except CkptError as error:  # the training goes on without the record
                _LOG.warning("healer: the outcome couldn't be recorded: %s", error)
        self._tell(ended, outcome.text)

    def _tell(self, decision: Decision, text: str) -> None:
        if self._group.writer != 0:
            return
        _LOG.warning("healer: %s", text)
        if self._healer.on_decision is not None:
            try:
                self._healer.on_decision(decision)
            except Exception:  # noqa: BLE001 - a training doesn't end for a note about it
                _LOG.exception("Healer(on_decision=) failed")


class _Survey:
    """The records of a run about the newest launches, on process 0."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._launches: list[Launch] = []
        self._saved: list[tuple[int, int]] = []
        self.run_id = ""
        self.decisions: dict[int, Decision] = {}
        self.has_checkpoints = False
        self.head: str | None = None
        self.older: str | None = None

    def read(self) -> list[Any]:
        """Read the records; return the run's id and the launches to look at, or nothing."""
        run = read_run(self._store)
        if run is None:
            return []
        known = list_launches(self._store, run)
        entries = list_checkpoints(self._store, run, with_labels=False)
        self.run_id = run.run_id
        self.decisions = read_decisions(self._store)
        self._launches = [one for one in known if isinstance(one, Launch)][-FAILURES:]
        self.has_checkpoints = any(entry.manifest is not None for entry in entries)
        self._saved = [
            (entry.launch, entry.step)
            for entry in entries
            if entry.manifest is not None and not entry.is_suspect
        ]
        good = [entry for entry in iter_lineage(known, entries) if entry.manifest is not None]
        if good:
            self.head = good[0].name
            older = (entry.name for entry in good if entry.step < good[0].step)
            self.older = next(older, None)
        return [run.run_id, *(launch.launch for launch in self._launches)]

    def find_failures(self, told: Sequence[Mapping[str, Any]]) -> list[LaunchFailure]:
        """Return the failures that belong to the newest launch's failure, oldest first.

        Without a failure of the newest launch the result is empty.

        Args:
            told: the findings of all processes, by `_look`.
        """
        failures: list[LaunchFailure] = []
        before: Launch | None = None
        for launch in self._launches:
            decision = None if before is None else self.decisions.get(before.launch)
            before = launch
            if launch.chosen_by == "hand":
                start = "fresh" if launch.resume_from is None else launch.resume_from.name
                if decision is None or decision.resume_from != start:
                    failures = []  # a person chose the checkpoint
                    decision = None
            found = _list_findings(told, launch.launch)
            if not found:
                continue  # no step began
            failure = _failure_of(launch, found, decision)
            failures = [] if failure is None else [*failures, failure]
        return find_failures_that_belong_together(failures, self._saved)


def _failure_of(
    launch: Launch, found: Sequence[Mapping[str, Any]], decision: Decision | None
) -> LaunchFailure | None:
    """Return the failure of a launch; None if the launch ended well."""
    endings = [
        (one["writer"], Ending(**one["ending"])) for one in found if one["ending"] is not None
    ]
    failed = [(writer, ending) for writer, ending in endings if ending.kind != "closed"]
    failed.sort(key=lambda one: (one[1].kind == "outside", one[1].step, one[0]))
    if not failed and endings:
        return None
    writer, ending = failed[0] if failed else (0, None)
    said = classify(ending)
    assert said is not None  # noqa: S101
    kind, text, signature, is_numeric = said
    has_changed = decision is not None and decision.skip is not None
    return LaunchFailure(
        launch=launch.launch,
        start=None if launch.resume_from is None else launch.resume_from.name,
        step=max(one["last"] for one in found) + 1 if ending is None else ending.step,
        kind=kind,
        text=text,
        signature=signature,
        is_numeric=is_numeric,
        writer=writer,
        is_same=True if not has_changed and _are_same(found) else None,
        difference=None if has_changed else _merge(found),
        choice=None if decision is None else decision.choice,
        skip=None if decision is None else decision.skip,
    )


def _list_findings(told: Sequence[Mapping[str, Any]], launch: int) -> list[Mapping[str, Any]]:
    """Return the findings of all processes about a launch, one for each step log."""
    return [one for theirs in told for one in theirs.get(str(launch), ())]


def _are_same(found: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether all processes of a launch had the results of the launch before.

    A launch that fails in its first step has no results. The same bits are expected of such a
    launch under the claim T1, and after a fresh start.
    """
    compared = [one["compared"] for one in found if one["compared"] is not None]
    return len(compared) == found[0]["writer_count"] and all(
        one["difference"] is None and (one["same_count"] or one["expected"] in ("T1", None))
        for one in compared
    )


def _merge(found: Sequence[Mapping[str, Any]]) -> ResultDifference | None:
    """Return other results of the same steps by all processes of a launch; None without any.

    The same results are expected under the claim T1. After a fresh start the program may draw
    other numbers: there, the steps before must have the same results.
    """
    differing = [
        (StepDifference(**one["difference"]), one["nodes"])
        for one in (each["compared"] for each in found)
        if one is not None
        and one["difference"] is not None
        and (one["expected"] == "T1" or (one["expected"] is None and one["same_count"]))
    ]
    return merge_differences(differing, len(found))


def _look(
    store: Store, run_id: str, numbers: Sequence[int], group: Group
) -> dict[str, list[dict[str, Any]]]:
    """Return the findings in this process's step logs about some launches, by number.

    Args:
        numbers: numbers of the launches, oldest first.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    before: dict[int, Steps] = {}
    for number in numbers:
        logs = _read_logs(store, run_id, number, group)
        found[str(number)] = [
            {
                "writer": writer,
                "writer_count": steps.header.writer_count,
                "last": max(steps.records, default=steps.header.first_step),
                "ending": None if steps.ending is None else dataclasses.asdict(steps.ending),
                "compared": _compare(before.get(writer), steps),
            }
            for writer, steps in logs.items()
        ]
        before = logs or before
    return found


def _read_logs(store: Store, run_id: str, launch: int, group: Group) -> dict[int, Steps]:
    """Return the step logs of a launch that this process reads, by writer."""
    logs: dict[int, Steps] = {}
    writer = group.writer
    count = writer + 1
    while writer < count:
        steps = read_steps(store, run_id, launch, writer)
        if steps is not None:
            logs[writer] = steps
            count = steps.header.writer_count
        writer += group.writer_count
    return logs


def _compare(earlier: Steps | None, now: Steps) -> dict[str, Any] | None:
    """Compare the common steps of two launches on one process; None if impossible."""
    if earlier is None or earlier.header.writer_count != now.header.writer_count:
        return None
    difference: dict[str, Any] | None = None
    same_count = 0
    for step in sorted(earlier.records.keys() & now.records.keys()):
        outcome = compare_steps(
            earlier.records[step],
            now.records[step],
            streams=now.header.streams,
            earlier_streams=earlier.header.streams,
            same_tensors=earlier.header.tensors == now.header.tensors,
            is_first=not same_count,
        )
        if outcome.what is None:
            same_count += not RESULTS.isdisjoint(outcome.compared)
        else:
            difference = {
                "step": step,
                "writer": now.header.writer,
                "what": outcome.what,
                "text": fit_string(outcome.detail, TEXT_LENGTH),
            }
            break
    return {
        "expected": now.header.expected,
        "same_count": same_count,
        "difference": difference,
        "nodes": [earlier.header.node, now.header.node],
    }


def _batch_of(state: State | None) -> int:
    """Return the number of samples of a step; 0 if samplers can't leave samples out."""
    if state is None or not can_skip(state):
        return 0
    return sum(sampler.global_batch for sampler in find_samplers(state))


def ending_of(error: object, *, step: int, alarm: tuple[int | None, str | None] | None) -> Ending:
    """Return how a launch ends on this process.

    Args:
        error: the exception that ends the training; None without one.
        step: number of steps done.
        alarm: step and reason of the alarm that stopped the run; None without an alarm.
    """
    is_exit = isinstance(error, KeyboardInterrupt | GeneratorExit) or (
        isinstance(error, SystemExit) and not error.code
    )
    if alarm is not None or (isinstance(error, CkptError) and error.code == Code.ALARM):
        since, reason = alarm or (step, "")
        text = _shorten(re.sub(r"^step [0-9]+: ", "", reason or ""))
        return Ending(kind="alarm", step=since or step, text=text, is_numeric=True)
    if not isinstance(error, BaseException) or is_exit:
        return Ending(kind="closed", step=step)
    if isinstance(error, CkptError) and error.code in _NO_FAILURES:
        return Ending(kind="closed", step=step)
    text = str(error)
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1] if frames else None
    kind = type(error)
    return Ending(
        kind="outside" if _is_from_outside(error) else "error",
        step=step + 1,
        name=_shorten(f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")),
        place=""
        if last is None
        else _shorten(f"{last.filename.rpartition('/')[2]}:{last.lineno} {last.name}"),
        text=_shorten(text),
        is_numeric=isinstance(error, FloatingPointError) or _NUMERIC.search(text) is not None,
    )


def _is_from_outside(error: BaseException) -> bool:
    """Return whether a store, a network or another process has caused an exception."""
    if isinstance(error, CkptError):
        return isinstance(error, StoreError | CommitError) or error.code in _OF_PEERS
    names = {kind.__name__ for kind in type(error).__mro__}
    if isinstance(error, OSError) or "DistError" in names or "DistBackendError" in names:
        return True
    return isinstance(error, RuntimeError) and _NETWORK.search(str(error)) is not None


def _shorten(text: str) -> str:
    return fit_string(" ".join(text.split()), _ENDING_LENGTH)
