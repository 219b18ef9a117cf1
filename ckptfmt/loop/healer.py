"""A healer: the evidence about failed launches, the decision, and the outcome.

The rule is in `run.failures`. Step logs of earlier launches are the evidence: each process reads
the logs of its own number, and process 0 decides for all. Spec: REQ-RUN-063.
"""

from __future__ import annotations

import dataclasses
import errno
import logging
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

from ckptfmt.adapters.data_loaders import find_samplers
from ckptfmt.documents.canonical import fit_string
from ckptfmt.documents.manifest import parse_checkpoint_name
from ckptfmt.documents.run import Launch
from ckptfmt.errors import CkptError, Code, CommitError, StoreError, err
from ckptfmt.group import Group
from ckptfmt.loop.comparing import compare_steps, have_same_results
from ckptfmt.loop.rewinding import BY_HEALER, can_skip
from ckptfmt.loop.step_log import Steps, list_logged_launches, read_steps, read_verdicts
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
    merge_differences,
    read_decisions,
    relate_failures,
)
from ckptfmt.run.lineage import (
    RunEntry,
    iter_lineage,
    list_checkpoints,
    list_launches,
    read_run,
)
from ckptfmt.run.witness import Ending, StepDifference
from ckptfmt.state import State
from ckptfmt.store.protocol import Store

_LOG: Final = logging.getLogger("ckptfmt")
#: Longest text of an ending, in characters.
_ENDING_LENGTH: Final = 300
#: Errors of launches without a failure: a newer launch goes on, or nothing was tried.
_NO_FAILURES: Final = (Code.FENCED, Code.HEALING_STOPPED)
#: Errors by which a process learns of the end of another one.
_OF_PEERS: Final = (Code.PEER_FAILED, Code.WRITERS_MISSING)
#: Texts of RuntimeErrors that a network or the end of another process causes.
_NETWORK: Final = re.compile(
    r"gloo/|NCCL|Connection (closed|reset|refused)|Broken pipe|Timed out waiting"
    r"|DataLoader worker .* (killed by signal|exited unexpectedly)",
    re.IGNORECASE,
)
#: Errors of devices, networks and full storage. A missing or damaged file is no such error.
_ERRNOS: Final = frozenset(
    {
        errno.EIO,
        errno.ESTALE,
        errno.ENOSPC,
        errno.EDQUOT,
        errno.ENODEV,
        errno.ENETDOWN,
        errno.ENETUNREACH,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.EREMOTEIO,
    }
)
#: How `Triggers` begins an alarm about a number.
_FED: Final = ("loss ", "grad_norm ")
#: The findings in step logs about some launches, by the number of the launch: one for each log.
Findings: TypeAlias = Mapping[int, Sequence[Mapping[str, Any]]]
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
        starts: greatest number of launches that fail in one step, or begin at one checkpoint and
            fail; by default 3. Where machines are often taken away between two saves, choose a
            greater number.
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
        decision: the decision that led to this launch, until the steps of the trouble are passed;
            None without a decision.
    """

    def __init__(self, healer: Healer, store: Store, group: Group) -> None:
        self.decision: Decision | None = None
        self._healer = healer
        self._store = store
        self._group = group
        #: The trouble behind the decision.
        self._trouble = _Trouble()
        #: First and last step of samples that are left out for good.
        self._left_out: list[tuple[int, int]] = []

    def use_home(self, store: Store) -> None:
        """Read and write the records at another home of the run, before the first decision."""
        self._store = store

    @property
    def follows(self) -> int:
        """The number of the failed launch behind the decision; 0 without a decision."""
        return 0 if self.decision is None else self.decision.launch

    def choose(self, state: State | None, *, has_failed: bool) -> str:
        """Decide after the newest launch's failure, and return the value of `resume=`.

        Args:
            state: the live state; None if unknown, and then no samples are left out.
            has_failed: whether the newest launch has failed in these processes.

        Raises: StateError(HEALING_STOPPED) if nothing is left to try. Spec: REQ-RUN-063.
        """
        self.decision = None
        group = self._group
        survey = _Survey(self._store) if group.writer == 0 else None
        run_id, numbers = group.run_on_first(lambda: ("", []) if survey is None else survey.read())
        findings = self._look_together(run_id, numbers)
        batch = _batch_of(state) if self._healer.quarantine else 0
        obstacle = _find_obstacle(state, self._healer.quarantine)
        found = group.run_on_first(
            lambda: None if survey is None else self._decide(survey, findings, batch, obstacle)
        )
        self._left_out = [(first, last) for first, last in found["left_out"]]
        if found["content"] is None:
            if has_failed:
                raise err(
                    Code.HEALING_STOPPED,
                    "the steps of this launch aren't recorded, so that there is no evidence",
                    where=self._store.name,
                    remedy="Checkpointer.reports says why: the witness is off, or the run is in"
                    " memory. Start the program again.",
                )
            return "auto"
        self.decision = decision = Decision.parse(found["content"].encode(), where=found["path"])
        self._trouble = _Trouble(**found["trouble"])
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
        self, survey: _Survey, findings: Findings, batch: int, obstacle: str
    ) -> dict[str, Any]:
        """Decide and record; return the decision and its trouble as members. On process 0 only."""
        healed = [one for one in survey.decisions.values() if is_healed_by_skip(one)]
        answer: dict[str, Any] = {"left_out": [one.skip for one in healed], "content": None}
        failures = survey.find_failures(findings)
        if not failures:
            return answer
        newest = failures[-1]
        left_out_count = sum(one.sample_count for one in healed)
        means = Means(
            starts=self._healer.starts,
            can_skip=batch > 0 and left_out_count + batch <= self._healer.quarantine,
            head=survey.head,
            older=survey.find_older(failures),
        )
        plan = decide(failures, means)
        # Suspect checkpoints alone stop a start that follows the lineage.
        is_fresh = plan.choice != "stop" and means.head is None and survey.has_checkpoints
        text = describe_plan(plan, newest)
        if plan.choice == "stop" and obstacle and newest.kind in ("alarm", "error"):
            text = f"{text}; no samples were left out: {obstacle}"
        decision = Decision(
            run_id=survey.run_id,
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
            sample_count=0 if plan.skip is None else (plan.skip[1] - plan.skip[0] + 1) * batch,
            suspected=plan.suspected,
            text=fit_string(text, TEXT_LENGTH),
            next=describe_next(plan, failures, means),
        )
        self._store.replace(decision.path, decision.dump())
        alike = [failure.launch for failure in failures if failure.skip == plan.skip]
        trouble = _Trouble(
            launches=[failure.launch for failure in failures],
            last_step=max([failure.step for failure in failures] + list(plan.skip or ())),
            reference=max(alike, default=0),
            has_verified=survey.has_verified,
        )
        content = decision.dump().decode()
        return answer | {
            "content": content,
            "path": decision.path,
            "trouble": dataclasses.asdict(trouble),
        }

    def give_up(self) -> None:
        """Forget the decision: the program itself goes back."""
        self.decision = None

    def leave_out(self, state: State) -> None:
        """Leave out the samples of this decision and of healed failures, after a load."""
        decision = self.decision
        ranges = list(self._left_out)
        if decision is not None and decision.skip is not None:
            ranges.append(decision.skip)
        for sampler in find_samplers(state):
            for first, last in sorted(ranges):
                if sampler.is_pipeline or sampler.steps_done >= first:
                    continue  # the loaded cursor has the skip
                begin = sampler.positions_of(first - 1)[0]
                end = sampler.positions_of(last - 1)[1]
                reason = f"{BY_HEALER}step {first} failed"
                sampler.skip(positions=(begin, end), policy="shift", reason=reason)

    @staticmethod
    def end_of(
        error: object,
        *,
        step: int,
        alarm: tuple[int | None, str | None] | None,
        has_stopped: bool,
    ) -> Ending:
        """Return how the launch ends on this process; see `ending_of`."""
        return ending_of(error, step=step, alarm=alarm, has_stopped=has_stopped)

    def is_passed(self, step: int) -> bool:
        """Return whether the steps of the trouble are done."""
        return self.decision is not None and step >= self._trouble.last_step

    def end_trouble(self, launch: Launch) -> None:
        """Record the outcome of the trouble, once its steps are done and recorded.

        Args:
            launch: this launch.
        """
        decision = self.decision
        trouble = self._trouble
        assert decision is not None  # noqa: S101
        self.decision = None
        number = launch.launch
        findings = self._look_together(launch.run_id, [trouble.reference, number])[number]
        found = _merge(findings, trouble.reference, has_verified=trouble.has_verified)
        outcome = explain_success(decision, found, number)
        ended = dataclasses.replace(decision, outcome=outcome)
        if is_healed_by_skip(ended) and decision.skip is not None:
            self._left_out.append(decision.skip)
        if self._group.writer == 0:
            try:
                known = read_decisions(self._store) | {ended.launch: ended}
                for failed in trouble.launches:
                    if failed in known:
                        one = dataclasses.replace(known[failed], outcome=outcome)
                        self._store.replace(one.path, one.dump())
            except CkptError as error:  # the training goes on without the record
                _LOG.warning("healer: the outcome couldn't be recorded: %s", error)
        self._tell(ended, outcome.text)

    def _look_together(self, run_id: str, numbers: Sequence[int]) -> Findings:
        """Return the findings of all processes about some launches, oldest first."""
        told = self._group.all_gather(
            self._group.together(lambda: _look(self._store, run_id, numbers, self._group))
        )
        return {
            number: [one for theirs in told for one in theirs[str(number)]] for number in numbers
        }

    def _tell(self, decision: Decision, text: str) -> None:
        if self._group.writer != 0:
            return
        _LOG.warning("healer: %s", text)
        if self._healer.on_decision is not None:
            try:
                self._healer.on_decision(decision)
            except Exception:  # noqa: BLE001 - a training doesn't end for a note about it
                _LOG.exception("Healer(on_decision=) failed")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Trouble:
    """Failures that belong together.

    Attributes:
        launches: numbers of the failed launches.
        last_step: the step after which the trouble is over.
        reference: the newest failed launch with the steps and samples of the next launch; 0 if none
            had the same samples.
        has_verified: whether an earlier repetition in the run had the same results.
    """

    launches: list[int] = dataclasses.field(default_factory=list)
    last_step: int = 0
    reference: int = 0
    has_verified: bool = False


class _Survey:
    """The records of a run about the newest launches, on process 0."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._launches: list[Launch] = []
        self._saved: list[tuple[int, int]] = []
        self._good: list[RunEntry] = []
        self.run_id = ""
        self.has_checkpoints = False
        self.has_verified = False
        self.decisions: dict[int, Decision] = {}

    @property
    def head(self) -> str | None:
        """The checkpoint from which the next launch would resume; None without a good one."""
        return self._good[0].name if self._good else None

    def read(self) -> tuple[str, list[int]]:
        """Read the records; return the run's id, and the newest launches with step logs."""
        run = read_run(self._store)
        if run is None:
            return "", []
        launches = list_launches(self._store, run)
        entries = list_checkpoints(self._store, run, with_labels=False)
        committed = [entry for entry in entries if entry.manifest is not None]
        self.run_id = run.run_id
        self.decisions = read_decisions(self._store)
        self.has_checkpoints = bool(committed)
        self._saved = [(entry.launch, entry.step) for entry in committed if not entry.is_suspect]
        self._good = [
            entry for entry in iter_lineage(launches, entries) if entry.manifest is not None
        ]
        verdicts = read_verdicts(self._store).values()
        self.has_verified = any(verdict.verdict == "verified" for verdict in verdicts)
        logged = list_logged_launches(self._store, run.run_id)[-FAILURES:]
        first = min(logged, default=0)
        self._launches = [
            one for one in launches if isinstance(one, Launch) and one.launch >= first
        ]
        return run.run_id, logged

    def find_older(self, failures: Sequence[LaunchFailure]) -> str | None:
        """Return the newest good checkpoint before the starts of all later failures; or None."""
        starts = [self.head, *(failure.start for failure in failures[1:])]
        steps = [parse_checkpoint_name(name) for name in starts if name is not None]
        if len(steps) < len(starts):
            return None  # a later failure began from nothing
        bound = min(found[0] for found in steps if found is not None)
        return next((entry.name for entry in self._good if entry.step < bound), None)

    def find_failures(self, findings: Findings) -> list[LaunchFailure]:
        """Return the failures that belong to the newest launch's failure, oldest first.

        Without a failure of the newest launch the result is empty. Launches without a healer, and
        launches without a step, don't count.

        Args:
            findings: the findings about the launches with step logs.
        """
        failures: list[LaunchFailure] = []
        for launch in self._launches:
            number = launch.launch
            found = findings.get(number, [])
            follows = found[0]["follows"] if found else max(
                (one for one in self.decisions if one < number), default=0
            )  # fmt: skip
            decision = self.decisions.get(follows or 0)
            start = "fresh" if launch.resume_from is None else launch.resume_from.name
            if launch.chosen_by == "hand" and (decision is None or decision.resume_from != start):
                failures = []  # a person chose the checkpoint
            if not found or follows is None:
                continue
            failure = _failure_of(launch, found, decision)
            failures = [] if failure is None else [*failures, failure]
        related = relate_failures(failures, self._saved)
        known = {failure.launch for failure in related}
        compared: list[LaunchFailure] = []
        for failure in related:
            found = findings[failure.launch]
            is_open = found[0]["follows"] in known  # else the decision was about an earlier trouble
            asked = failure if is_open else dataclasses.replace(failure, choice=None, skip=None)
            compared.append(self._compare(asked, compared, found))
        return compared

    def _compare(
        self,
        failure: LaunchFailure,
        earlier: Sequence[LaunchFailure],
        found: Sequence[Mapping[str, Any]],
    ) -> LaunchFailure:
        """Return a failure with the comparison to the earlier failure that is most alike."""
        alike = [one for one in earlier if one.skip == failure.skip]
        same = [one for one in alike if failure.resembles(one)]
        if not alike:
            return failure
        reference = (same or alike)[-1].launch
        compared = [one["compared"].get(str(reference)) for one in found]
        is_complete = len(found) == found[0]["writer_count"] and None not in compared
        difference = _merge(found, reference, has_verified=self.has_verified)
        return dataclasses.replace(
            failure,
            reference=reference,
            same_count=min(one["same_count"] for one in compared) if is_complete else 0,
            is_same=is_complete and all(_is_same(one) for one in compared),
            # The same failure after other results isn't explained by the difference.
            difference=None if same else difference,
        )


def _failure_of(
    launch: Launch, found: Sequence[Mapping[str, Any]], decision: Decision | None
) -> LaunchFailure | None:
    """Return the failure of a launch; None if the launch ended well, or if the end is unknown."""
    endings = [
        (one["writer"], None if one["ending"] is None else Ending(**one["ending"])) for one in found
    ]
    failed = [
        (writer, ending)
        for writer, ending in endings
        if ending is not None and ending.kind not in ("closed", "unknown")
    ]
    failed.sort(key=lambda one: (one[1].kind == "outside", one[1].step, one[0]))
    if not failed and all(ending is not None for _, ending in endings):
        return None
    writer, ending = failed[0] if failed else (0, None)
    said = classify(ending)
    assert said is not None  # noqa: S101
    kind, text, signature, is_numeric = said
    step = max(one["last"] for one in found) + 1 if ending is None else ending.step
    return LaunchFailure(
        launch=launch.launch,
        start=None if launch.resume_from is None else launch.resume_from.name,
        step=step,
        kind=kind,
        text=text,
        signature=signature,
        is_numeric=is_numeric,
        is_single=all(one["is_single"] for one in found),
        writer=writer,
        choice=None if decision is None else decision.choice,
        skip=None if decision is None else decision.skip,
    )


def _is_same(compared: Mapping[str, Any]) -> bool:
    """Return whether one process had the results of an earlier launch in all common steps.

    Without a common step the same results are expected under the claim T1, and after a fresh start.
    """
    is_expected = compared["expected"] in ("T1", None)
    return compared["difference"] is None and bool(compared["same_count"] or is_expected)


def _merge(
    found: Sequence[Mapping[str, Any]], reference: int, *, has_verified: bool
) -> ResultDifference | None:
    """Return other results of the same steps by all processes of a launch; None without any.

    The same results are expected under the claim T1. After a fresh start the program may draw
    other numbers: there, the steps before must have the same results.
    """
    compared = [one["compared"].get(str(reference)) for one in found]
    differing = [
        (StepDifference(**one["difference"]), one["nodes"])
        for one in compared
        if one is not None
        and one["difference"] is not None
        and (one["expected"] == "T1" or (one["expected"] is None and one["same_count"]))
    ]
    return merge_differences(differing, len(found), has_verified=has_verified)


def _look(
    store: Store, run_id: str, numbers: Sequence[int], group: Group
) -> dict[str, list[dict[str, Any]]]:
    """Return the findings in this process's step logs about some launches, by number.

    Args:
        numbers: numbers of the launches, oldest first.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    before: dict[int, dict[int, Steps]] = {}
    for number in numbers:
        logs = _read_logs(store, run_id, number, group)
        found[str(number)] = [
            {
                "writer": writer,
                "writer_count": steps.header.writer_count,
                "follows": steps.header.follows,
                "last": steps.last_step,
                "is_single": _is_single(steps),
                "ending": None if steps.ending is None else dataclasses.asdict(steps.ending),
                "compared": {
                    str(earlier): _compare(known[writer], steps)
                    for earlier, known in before.items()
                    if writer in known
                },
            }
            for writer, steps in logs.items()
        ]
        before[number] = logs
    return found


def _is_single(steps: Steps) -> bool:
    """Return whether the step of the failure follows a recorded step, or the start."""
    ending = steps.ending
    before = steps.last_step if ending is None else ending.step - 1
    return before == steps.header.first_step or before in steps.records


def _read_logs(store: Store, run_id: str, launch: int, group: Group) -> dict[int, Steps]:
    """Return the step logs of a launch that this process reads, by writer."""
    own = read_steps(store, run_id, launch, group.writer)
    logs = {} if own is None else {group.writer: own}
    first = own or read_steps(store, run_id, launch, 0)
    count = 0 if first is None else first.header.writer_count
    for writer in range(group.writer + group.writer_count, count, group.writer_count):
        steps = read_steps(store, run_id, launch, writer)
        if steps is not None:
            logs[writer] = steps
    return logs


def _compare(earlier: Steps, now: Steps) -> dict[str, Any] | None:
    """Compare the common steps of two launches on one process; None if impossible.

    Results decide: other random numbers in a program that doesn't use the numbers change nothing.
    """
    if earlier.header.writer_count != now.header.writer_count:
        return None
    same_tensors = earlier.header.tensors == now.header.tensors
    difference: dict[str, Any] | None = None
    same_count = 0
    for step in sorted(earlier.records.keys() & now.records.keys()):
        then, record = earlier.records[step], now.records[step]
        if have_same_results(then, record, same_tensors=same_tensors):
            same_count += 1
            continue
        outcome = compare_steps(
            then,
            record,
            streams=now.header.streams,
            earlier_streams=earlier.header.streams,
            same_tensors=same_tensors,
            is_first=not same_count,
        )
        if outcome.what is not None:
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


def is_healed_by_skip(decision: Decision) -> bool:
    """Return whether samples are left out for good: a launch without the samples succeeded."""
    outcome = decision.outcome
    return decision.skip is not None and outcome is not None and outcome.cause == "data"


def _find_obstacle(state: State | None, quarantine: int) -> str:
    """Return the reason why no samples can be left out; empty if samples can be."""
    if not quarantine:
        return "Healer(quarantine=) is 0"
    if state is None:
        return "the launch was chosen before the state was known"
    return "" if can_skip(state) else "the State has no ckptfmt.Sampler as its position in the data"


def _batch_of(state: State | None) -> int:
    """Return the number of samples of a step; 0 if samplers can't leave samples out."""
    if state is None or not can_skip(state):
        return 0
    return sum(sampler.global_batch for sampler in find_samplers(state))


def ending_of(
    error: object,
    *,
    step: int,
    alarm: tuple[int | None, str | None] | None,
    has_stopped: bool = False,
) -> Ending:
    """Return how a launch ends on this process.

    Args:
        error: the exception that ends the training; None without one.
        step: number of steps done.
        alarm: step and reason of the alarm that stopped the run; None without an alarm.
        has_stopped: whether a signal or a notice stopped the run, which may end by an exit code.
    """
    if alarm is not None or (isinstance(error, CkptError) and error.code == Code.ALARM):
        since, reason = alarm or (step, "")
        text = _shorten(re.sub(r"^step [0-9]+: ", "", reason or ""))
        is_numeric = text.startswith(_FED) or _NUMERIC.search(text) is not None
        return Ending(kind="alarm", step=since or step, text=text, is_numeric=is_numeric)
    if not isinstance(error, BaseException) or _is_good_end(error, has_stopped=has_stopped):
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


def _is_good_end(error: BaseException, *, has_stopped: bool) -> bool:
    """Return whether an exception is a person's wish, or the end of a stopped run."""
    if isinstance(error, KeyboardInterrupt | GeneratorExit):
        return True
    if isinstance(error, SystemExit):
        return has_stopped or not error.code
    return isinstance(error, CkptError) and error.code in _NO_FAILURES


def _is_from_outside(error: BaseException) -> bool:
    """Return whether a store, a network or another process has caused an exception."""
    if isinstance(error, CkptError):
        return isinstance(error, StoreError | CommitError) or error.code in _OF_PEERS
    if isinstance(error, ConnectionError | TimeoutError):
        return True
    if isinstance(error, OSError):  # a damaged file is an OSError of many libraries, too
        return error.errno in _ERRNOS
    names = {kind.__name__ for kind in type(error).__mro__}
    if "DistError" in names or "DistBackendError" in names:
        return True
    return isinstance(error, RuntimeError) and _NETWORK.search(str(error)) is not None


def _shorten(text: str) -> str:
    return fit_string(" ".join(text.split()), _ENDING_LENGTH)
