"""Decisions about the failures of a run: the rule, and the record of each decision.

The rule is pure; `loop.healer` collects the evidence. Spec: REQ-RUN-063, REQ-RUN-064.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Sequence
from typing import Any, Final, Literal, Self, cast

from ckptfmt import limits
from ckptfmt.documents.canonical import dump_document, fit_string, head_of
from ckptfmt.documents.run import launch_name, parse_launch_name, parse_of_launch
from ckptfmt.errors import CkptError, StoreError
from ckptfmt.run.witness import RESULTS, WORDS, Ending, StepDifference, What
from ckptfmt.store.protocol import Store

_LOG: Final = logging.getLogger("ckptfmt")
_NUMBER: Final = re.compile(r"[-+]?[0-9][0-9.e+-]*")
#: The directory of a run with the decisions.
HEALING: Final = "healing"
#: The greatest number of failures behind a decision.
FAILURES: Final = 9
#: Longest sentence of a decision, in characters.
TEXT_LENGTH: Final = 1000

Choice = Literal["retry", "skip", "back", "stop"]
Cause = Literal["data", "state", "hardware", "outside", "program", "unknown"]
#: How a launch failed: as `Ending.kind`, or without a trace.
FailureKind = Literal["alarm", "error", "outside", "lost"]


def decision_path(launch: int) -> str:
    """Return the path in a run of the decision about the end of a launch.

    >>> decision_path(3)
    'healing/0003.json'
    """
    return f"{HEALING}/{launch_name(launch)}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ResultDifference:
    """Other results of the same steps: the first difference between two launches.

    Attributes:
        step: the number of the step.
        member: the first member that differs, a result of the step.
        writers: the numbers of the processes with this difference.
        nodes: the machines of the processes, in the earlier launch and in the later launch; empty
            if all of several processes have this difference, so that no machine stands out.
        is_proven: whether the hardware is the cause, and not the program: only some of several
            processes differ, or an earlier repetition in the run had the same results.
    """

    step: int
    member: What
    writers: tuple[int, ...]
    nodes: tuple[str, ...]
    is_proven: bool

    def __str__(self) -> str:
        result = f"step {self.step} differs in the {WORDS[self.member]}"
        if not self.nodes:
            return f"{result} on all processes, so that no machine stands out"
        writers = " and ".join(str(writer) for writer in self.writers)
        plural = "es" if len(self.writers) > 1 else ""
        return f"{result} on process{plural} {writers} ({' and '.join(self.nodes)})"


def merge_differences(
    told: Sequence[tuple[StepDifference, Sequence[str]]],
    writer_count: int,
    *,
    has_verified: bool = False,
) -> ResultDifference | None:
    """Return the first difference of all processes; None without one, or if the inputs differ.

    The earliest step counts. Within the step, a differing loss stands out: the processes of a job
    exchange gradients, so that the weights of all processes differ after the step. Other random
    numbers or samples aren't a fault of the hardware.

    Args:
        told: each differing process's first difference, with the machines of the process.
        writer_count: the number of processes.
        has_verified: whether an earlier repetition in the run had the same results.
    """
    if not told:
        return None
    step = min(one.step for one, _ in told)
    found = [(one, nodes) for one, nodes in told if one.step == step]
    if any(one.what not in RESULTS for one, _ in found):
        return None
    found = [(one, nodes) for one, nodes in found if one.what == "loss"] or found
    is_shared = len(found) == writer_count > 1
    machines = dict.fromkeys(node for _, nodes in found for node in nodes if node)
    return ResultDifference(
        step=step,
        member=found[0][0].what,
        writers=tuple(one.writer for one, _ in found),
        nodes=() if is_shared else tuple(machines),
        is_proven=has_verified or len(found) < writer_count,
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LaunchFailure:
    """The failure of one launch, with the comparison to an earlier failure.

    Attributes:
        launch: number of the launch.
        start: name of the checkpoint that the launch resumed from; None for a fresh start.
        step: number of the step under way at the end.
        kind: how the launch ended.
        text: the error or the alarm.
        signature: type and place of the exception, which the same failure repeats.
        is_numeric: whether numbers that aren't finite, or rise, are the failure.
        is_single: whether the step was counted alone, so that its samples are known.
        writer: number of the process with the error.
        reference: number of the earlier launch under comparison; None without an earlier launch.
        same_count: number of steps with the same results in both launches.
        is_same: whether all compared steps had the same results. Without a compared step, the same
            results are expected under the claim T1 and after a fresh start.
        difference: other results of the same steps; None without any.
        choice: the choice that led to the launch; None without a decision about this trouble.
        skip: the first and the last step with samples left out; None for none.
    """

    launch: int
    start: str | None
    step: int
    kind: FailureKind
    text: str = ""
    signature: str = ""
    is_numeric: bool = False
    is_single: bool = True
    writer: int = 0
    reference: int | None = None
    same_count: int = 0
    is_same: bool = False
    difference: ResultDifference | None = None
    choice: Choice | None = None
    skip: tuple[int, int] | None = None

    def resembles(self, other: LaunchFailure) -> bool:
        """Return whether another failure is the same failure in the same step."""
        return (self.step, self.kind, self.signature) == (other.step, other.kind, other.signature)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """The choices that are open to a decision.

    Attributes:
        starts: greatest number of launches that fail in one step, or begin at one checkpoint.
        can_skip: whether samples of a step may be left out.
        head: the checkpoint from which the next launch would resume; None for a fresh start.
        older: the newest good checkpoint before the starts of all later failures; None if there is
            none.
    """

    starts: int
    can_skip: bool
    head: str | None
    older: str | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A choice after a failure.

    Attributes:
        choice: the next try. "retry": the same steps again. "skip": without the samples of the
            failed step. "back": from an older checkpoint. "stop": no further try.
        resume_from: the checkpoint to name; None to follow the run's lineage.
        skip: the first and the last step with samples left out; None for none.
        suspected: the cause that the evidence speaks for.
        why: the reason in words.
    """

    choice: Choice
    resume_from: str | None = None
    skip: tuple[int, int] | None = None
    suspected: Cause = "unknown"
    why: str


def decide(failures: Sequence[LaunchFailure], means: Means) -> Plan:
    """Return the plan after the newest of some failures, oldest first.

    The failures belong together: none of the later launches has saved the step of an earlier
    failure. At most `Means.starts` launches begin at one checkpoint, and an older checkpoint is
    chosen once, so that each sequence of decisions ends.

    >>> means = Means(starts=3, can_skip=True, head="step-00000020-l0001", older=None)
    >>> first = LaunchFailure(launch=1, start=None, step=26, kind="alarm", text="loss is nan")
    >>> decide([first], means).choice
    'retry'
    >>> second = dataclasses.replace(first, launch=2, start=means.head, is_same=True,
    ...     choice="retry")
    >>> decide([first, second], means).choice
    'skip'
    """
    newest = failures[-1]
    begun = sum(failure.start == means.head for failure in failures)
    starts = max(begun, sum(newest.resembles(failure) for failure in failures))
    if len(failures) >= FAILURES:
        return Plan(choice="stop", why=f"{len(failures)} launches failed one after the other")
    if newest.kind in ("lost", "outside") or newest.difference is not None:
        return _retry(newest, means, starts)
    is_second = any(newest.resembles(failure) for failure in failures[:-1])
    is_tried = newest.choice in ("skip", "back") and (is_second or newest.is_numeric)
    if not is_tried and not (is_second and newest.is_same):
        return _retry(newest, means, starts)
    return _try_otherwise(failures, means, begun)


def _retry(newest: LaunchFailure, means: Means, starts: int) -> Plan:
    """Return another try of the same, if there are tries left."""
    difference = newest.difference
    suspected: Cause = "unknown"
    if difference is not None:
        suspected = "hardware" if difference.is_proven else "unknown"
        why = f"the same steps had other results: {difference}"
    elif newest.kind == "outside":
        suspected = "outside"
        why = "the failure came from outside of the training: a store, a network or a process"
    elif newest.kind == "lost":
        suspected = "outside"
        why = (
            "the processes ended without a record of the end, as after SIGKILL, the kernel's OOM"
            " killer or a hang"
        )
    elif newest.reference is None:
        why = "one failure doesn't show whether the same steps fail again"
    else:
        why = f"nothing shows that launch {newest.reference} did the same steps in the same way"
    if starts >= means.starts:
        tried = f"{starts} launches failed in this step, or began at {means.head or 'step 0'}"
        return Plan(choice="stop", suspected=suspected, why=f"{tried}; {why}")
    return Plan(choice="retry", skip=newest.skip, suspected=suspected, why=why)


def _try_otherwise(failures: Sequence[LaunchFailure], means: Means, begun: int) -> Plan:
    """Return the next try after a failure that the same steps, or a change, don't prevent."""
    newest = failures[-1]
    tried = {failure.choice for failure in failures}
    can_skip = means.can_skip and newest.is_single and begun < means.starts
    if tried.isdisjoint({"skip", "back"}) and can_skip:
        return Plan(
            choice="skip",
            skip=(newest.step, newest.step),
            suspected="data",
            why="the same steps failed again in the same way",
        )
    if newest.is_numeric and means.older is not None and "back" not in tried:
        without = "other samples failed too" if "skip" in tried else "the same steps failed again"
        return Plan(
            choice="back",
            resume_from=means.older,
            suspected="state",
            why=f"{without}: the checkpoint may be damaged",
        )
    if "skip" in tried:
        why = "the step failed with other samples too: the program, or the state long before"
    elif newest.is_numeric:
        why = "the same steps failed again: the samples of the step, or the state long before"
    else:
        why = "the same steps failed again in the same way: the program, or the samples of the step"
    return Plan(choice="stop", suspected="unknown" if newest.is_numeric else "program", why=why)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HealingOutcome:
    """The end of a trouble: a later launch has passed the step of the failure.

    Attributes:
        launch: number of the launch after the decision.
        cause: the cause, by the success of the launch.
        text: the sentence for people.
    """

    launch: int
    cause: Cause
    text: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The decision after the failure of a launch.

    Attributes:
        run_id: the id of the run.
        launch: number of the launch that failed.
        step: number of the step under way at the failure.
        kind: how the launch ended: "alarm", "error", "outside" (a store, a network, another
            process), or "lost" (without a trace).
        evidence: the failures and comparisons behind the decision, a sentence each.
        choice: see `Plan`.
        resume_from: the checkpoint that the next launch names; "fresh" for a start from nothing;
            None to follow the lineage.
        skip: the first and the last step with samples left out; None for none.
        sample_count: number of samples that are left out, over all processes.
        suspected: the cause that the evidence speaks for.
        text: the decision in a sentence.
        next: the plan after the same failure, as a sentence.
        outcome: the end of the trouble; None before.
    """

    run_id: str
    launch: int
    step: int
    kind: FailureKind
    evidence: tuple[str, ...]
    choice: Choice
    resume_from: str | None
    skip: tuple[int, int] | None
    sample_count: int
    suspected: Cause
    text: str
    next: str
    outcome: HealingOutcome | None = None

    @property
    def path(self) -> str:
        """The path of the record in the run."""
        return decision_path(self.launch)

    def dump(self) -> bytes:
        """Return the bytes of the record."""
        members = dataclasses.asdict(self)
        members["evidence"] = list(self.evidence)
        members["skip"] = None if self.skip is None else list(self.skip)
        return dump_document({**head_of("healing"), **members})

    @classmethod
    def parse(cls, content: bytes, *, where: str) -> Self:
        """Return the decision of a file.

        Raises: FormatError (RUN_MISMATCH if the number differs from the file's name),
            IntegrityError, UnsupportedError.
        """
        signed = parse_of_launch(content, where=where, kind="healing", requirement="REQ-RUN-063")
        members: dict[str, Any] = {
            field.name: signed[field.name] for field in dataclasses.fields(cls)
        }
        skip = members["skip"]
        outcome = members["outcome"]
        return cls(
            **{
                **members,
                "evidence": tuple(members["evidence"]),
                "skip": None if skip is None else (skip[0], skip[1]),
                "outcome": None if outcome is None else HealingOutcome(**outcome),
            }
        )


_TRIES: Final[dict[Choice, str]] = {
    "retry": "the same steps are done again",
    "skip": "the samples of the step are left out",
    "back": "the run goes back to an older checkpoint",
    "stop": "the run stops",
}


def describe_next(plan: Plan, failures: Sequence[LaunchFailure], means: Means) -> str:
    """Return the plan after the same failure of the next launch, as a sentence."""
    if plan.choice == "stop":
        return "a person chooses the checkpoint, by resume="
    newest = failures[-1]
    again = dataclasses.replace(
        newest,
        launch=newest.launch + 1,
        start=plan.resume_from or means.head,
        choice=plan.choice,
        skip=plan.skip,
        reference=newest.launch,
        is_same=plan.choice == "retry",
        difference=None,
    )
    return f"after the same failure: {_TRIES[decide([*failures, again], means).choice]}"


def describe_plan(plan: Plan, failure: LaunchFailure) -> str:
    """Return a decision as a sentence: the failure, the choice and the reason."""
    text = f"launch {failure.launch} failed in step {failure.step} ({failure.text})"
    action = _TRIES[plan.choice]
    if plan.choice == "retry" and plan.skip is not None:
        action += f", without the samples of step {plan.skip[0]}"
    elif plan.skip is not None:
        action = action.replace("the step ", f"step {plan.skip[0]} ")
    if plan.resume_from is not None:
        action += f", {plan.resume_from}"
    return fit_string(f"{text}: {action}, because {plan.why}", TEXT_LENGTH)


def relate_failures(
    failures: Sequence[LaunchFailure], saved: Sequence[tuple[int, int]]
) -> list[LaunchFailure]:
    """Return the newest failures in steps that no later launch has saved.

    Args:
        failures: the failures of successive launches, oldest first.
        saved: launch and step of each good checkpoint.
    """
    found: list[LaunchFailure] = []
    for failure in reversed(failures):
        later = {one.launch for one in found}
        if any(launch in later and step >= failure.step for launch, step in saved):
            break
        found.insert(0, failure)
    return found


def explain_success(
    decision: Decision, difference: ResultDifference | None, launch: int
) -> HealingOutcome:
    """Return the outcome of a decision, after the step of the failure.

    Args:
        decision: the decision that led to the launch.
        difference: other results of the same steps; None without any.
        launch: number of the launch.
    """
    cause: Cause = "unknown"
    if decision.skip is not None:
        cause = "data"
        text = "without the samples that were left out"
    elif difference is not None:
        unproven: Cause = "state" if decision.choice == "back" else "unknown"
        cause = "hardware" if difference.is_proven else unproven
        text = f"with other results of the same steps: {difference}"
        if difference.is_proven and difference.nodes:
            text += ". Leave the machine out, or check the machine"
        elif not difference.is_proven:
            text += ". Kernels that aren't deterministic, state outside of the State and hardware"
            text += " look the same"
    elif decision.choice == "back":
        cause = "state"
        text = "from the older checkpoint"
    else:
        cause = "outside" if decision.kind in ("lost", "outside") else "unknown"
        text = "and the failure didn't happen again"
    text = fit_string(f"launch {launch} passed step {decision.step}, {text}", TEXT_LENGTH)
    return HealingOutcome(launch=launch, cause=cause, text=text)


def describe_failure(failure: LaunchFailure, writer_count: int) -> list[str]:
    """Return the evidence of a failure, a sentence each."""
    process = f"process {failure.writer}: " if writer_count > 1 and failure.kind != "lost" else ""
    found = [f"launch {failure.launch}, step {failure.step}: {process}{failure.text}"]
    earlier = f"launch {failure.launch} beside launch {failure.reference}"
    if failure.difference is not None:
        found.append(f"{earlier}: {failure.difference}")
    elif failure.same_count:
        plural = "s" * (failure.same_count != 1)
        found.append(f"{earlier}: {failure.same_count} step{plural} with the same results")
    elif failure.is_same:
        found.append(f"{earlier}: no step to compare before the failure; the same is expected")
    return [fit_string(sentence, TEXT_LENGTH) for sentence in found]


def classify(ending: Ending | None) -> tuple[FailureKind, str, str, bool] | None:
    """Return kind, words, signature and numeric nature of a failure; None for a good end."""
    if ending is None:
        return "lost", "no record of the end", "", False
    if ending.kind in ("closed", "unknown"):
        return None
    is_alarm = ending.kind == "alarm"
    words = ending.text if is_alarm else f"{ending.name}: {ending.text}"
    signature = _NUMBER.sub("#", ending.text) if is_alarm else f"{ending.name} {ending.place}"
    return cast("FailureKind", ending.kind), words, signature, ending.is_numeric


def read_decisions(store: Store) -> dict[int, Decision]:
    """Return the decisions of a run, by the number of the failed launch; damaged ones are left out.

    Raises: StoreError. Spec: REQ-RUN-064.
    """
    found: dict[int, Decision] = {}
    for name in store.list_names(HEALING):
        number = parse_launch_name(name)
        if number is None:
            continue
        path = f"{HEALING}/{name}"
        try:
            found[number] = Decision.parse(
                store.read(path, limit_nbytes=limits.JSON_NBYTES), where=path
            )
        except StoreError:
            raise
        except CkptError as error:
            _LOG.warning("%s can't be read: %s", path, error)
    return found
