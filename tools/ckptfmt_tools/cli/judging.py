"""The verdict on a rehearsal: killed and resumed launches, compared with an undisturbed run."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Final

from ckptfmt.errors import Code, err
from ckptfmt.loop.comparing import StepComparison, compare_steps
from ckptfmt.loop.rehearsal import Account
from ckptfmt.loop.step_log import Steps
from ckptfmt.run.witness import RESULTS, WITNESS, WORDS, StepRecord

_LOG_NAME: Final = re.compile(r"([0-9]+)/([0-9]+)\.steps")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RehearsalFinding:
    """A step that differs.

    Attributes:
        launch: the launch that did the step, in words.
        writer: the number of the process.
        step: the number of the step.
        what: the first differing member; ``outside`` for a module outside `State`.
        text: the sentence on the difference and its cause.
    """

    launch: str
    writer: int
    step: int
    what: str
    text: str


@dataclasses.dataclass(slots=True, kw_only=True)
class RehearsalOutcome:
    """The outcome of a rehearsal.

    Attributes:
        kills: the numbers of steps after which launches were killed.
        resumed: the first step numbers of the later launches, in their order, by process 0.
        step_count: the number of compared steps, counted after resumes only, on process 0.
        writer_count: the number of processes of the undisturbed run.
        compared: the compared members, in words.
        difference: the first difference between the killed and resumed run and the undisturbed
            run; None if identical.
        claim: the claim of the last resume by the contents of its State; None if no launch resumed
            and reached its end.
        lowered_by: the reasons why the claim isn't T1.
        is_repeatable: whether two fresh starts are equal. If not, a resume is compared with the
            previous launches of the killed run only.
        notes: sentences on the rehearsal itself.
    """

    kills: list[int]
    resumed: list[int] = dataclasses.field(default_factory=list)
    step_count: int = 0
    writer_count: int = 0
    compared: tuple[str, ...] = ()
    difference: RehearsalFinding | None = None
    claim: str | None = None
    lowered_by: tuple[str, ...] = ()
    is_repeatable: bool = True
    notes: list[str] = dataclasses.field(default_factory=list)

    @property
    def verdict(self) -> str:
        """``same``, ``different``, or ``unknown`` if no step after a resume could be compared."""
        if self.difference is not None:
            return "different"
        has_results = any(WORDS[name] in self.compared for name in RESULTS)
        return "same" if self.step_count and has_results else "unknown"


def judge(scratch: Path, kills: list[int]) -> RehearsalOutcome:
    """Return the outcome of the launches below a scratch directory, by their step logs.

    Raises: StateError(ARGUMENT) if no step was recorded.
    """
    calm = _read_logs(scratch / "calm")
    killed = _read_logs(scratch / "killed")
    outcome = RehearsalOutcome(kills=kills)
    if not calm:
        remedy = (
            "The program makes no Checkpointer, takes no step with it, or has"
            " Checks(witness=False)."
        )
        raise err(
            Code.ARGUMENT, "the undisturbed run recorded no step", where="rehearse", remedy=remedy
        )
    outcome.writer_count = max(steps.header.writer_count for steps in calm.values())
    first_launch = min(launch for _, launch, _ in calm)
    undisturbed = {
        (name, writer): steps
        for (name, launch, writer), steps in calm.items()
        if launch == first_launch
    }
    references = {key: [_with_streams(steps, set())] for key, steps in undisturbed.items()}
    sizes = {name: steps.header.writer_count for (name, _), steps in undisturbed.items()}
    found_in: list[tuple[tuple[int, int, int, int], RehearsalFinding]] = []
    for (name, launch, writer), steps in sorted(killed.items()):
        size = steps.header.writer_count
        if sizes.setdefault(name, size) != size:
            # Sums of another number of processes differ in their last bits, from here on.
            for key in [key for key in references if key[0] == name]:
                del references[key]
            sizes[name] = size
        known = references.setdefault((name, writer), [])
        is_first = steps.header.resumed is None
        alike = [one for one in known if _is_alike(one, steps)]
        found = _compare_launch(steps, alike, outcome, counts=not is_first and writer == 0)
        if is_first and found is not None:
            outcome.is_repeatable = False
            outcome.notes.append(
                f"two fresh starts differ by themselves from step {found[0]} on"
                f" ({WORDS[found[1].what or 'weights']}):"
                " seed the program to compare it with an undisturbed run; the steps behind a kill"
                " are compared with"
                " those before it alone"
            )
            known.clear()
        elif is_first and alike:
            calm_steps = undisturbed[name, writer]
            known[:] = [_with_streams(calm_steps, _seeded_streams(calm_steps, steps))]
        elif found is not None:
            step, comparison = found
            what = comparison.what or ""
            where = f"launch {launch}, which resumed from step {steps.header.first_step}"
            finding = RehearsalFinding(
                launch=where, writer=writer, step=step, what=what, text=comparison.detail
            )
            found_in.append(((launch, step, list(WORDS).index(what), writer), finding))
        if not is_first and writer == 0:
            outcome.resumed.append(steps.header.first_step)
        known.append(steps)
    if found_in:
        outcome.difference = min(found_in, key=lambda pair: pair[0])[1]
    if not outcome.resumed:
        outcome.notes.append("no launch resumed from a checkpoint of a killed one")
    is_one_size = (
        len({steps.header.writer_count for steps in (*calm.values(), *killed.values())}) == 1
    )
    compares_modules = is_one_size and outcome.is_repeatable and bool(outcome.resumed)
    accounts = read_accounts(scratch / "calm"), read_accounts(scratch / "killed")
    _judge_accounts(outcome, *accounts, compares_modules=compares_modules)
    return outcome


def _judge_accounts(
    outcome: RehearsalOutcome,
    calm: dict[tuple[str, int], Account],
    killed: dict[tuple[str, int], Account],
    *,
    compares_modules: bool,
) -> None:
    """Add the judgement of the launches' final accounts: claims, and modules outside `State`."""
    for (_, writer), account in killed.items():
        if writer == 0 and account.claim is not None:
            outcome.claim = account.claim
            outcome.lowered_by = account.lowered_by
    found: list[RehearsalFinding] = []
    if compares_modules:
        for key, account in killed.items():
            for name, digests in account.modules.items() if key in calm else ():
                if (
                    len(calm[key].modules.get(name, [])) == len(digests)
                    and calm[key].modules[name] != digests
                ):
                    where = (
                        f"launch {account.launch}, which resumed from step {outcome.resumed[-1]}"
                    )
                    text = (
                        f"{name} isn't in State, and differs in the end: give it in extra=, if"
                        " a resume needs it"
                    )
                    found.append(
                        RehearsalFinding(
                            launch=where,
                            writer=key[1],
                            step=account.step,
                            what="outside",
                            text=text,
                        )
                    )
    if found and outcome.difference is None:
        outcome.difference = found.pop(0)
    outcome.notes += list(dict.fromkeys(finding.text for finding in found))


def _with_streams(steps: Steps, names: set[str]) -> Steps:
    """Return the records with only the named RNG streams."""
    places = [place for place, name in enumerate(steps.header.streams) if name in names]
    header = dataclasses.replace(
        steps.header, streams=tuple(steps.header.streams[place] for place in places)
    )
    records = {
        number: dataclasses.replace(
            one, streams=tuple(one.streams[place] for place in places if place < len(one.streams))
        )
        for number, one in steps.records.items()
    }
    return Steps(header, records)


def _seeded_streams(one: Steps, other: Steps) -> set[str]:
    """Return the names of the RNG streams that are equal in each step of two fresh starts.

    Fresh starts differ in streams that the program neither seeds nor uses.
    """
    found = set(one.header.streams) & set(other.header.streams)
    for number in one.records.keys() & other.records.keys():
        first = dict(zip(one.header.streams, one.records[number].streams, strict=False))
        second = dict(zip(other.header.streams, other.records[number].streams, strict=False))
        found -= {name for name in found if name not in first or first[name] != second.get(name)}
    return found


def _is_alike(one: Steps, other: Steps) -> bool:
    return one.header.writer_count == other.header.writer_count


def _compare_launch(
    steps: Steps, references: list[Steps], outcome: RehearsalOutcome, *, counts: bool
) -> tuple[int, StepComparison] | None:
    """Compare each step with the first reference that has the step.

    Returns: the number and the comparison of the first step that differs; None if all are equal.
    """
    is_first = True
    for number, record in sorted(steps.records.items()):
        reference = next((one for one in references if number in one.records), None)
        if reference is None:
            continue
        found = _compare(reference, reference.records[number], steps, record, is_first=is_first)
        is_first = False
        if counts and found.compared:
            outcome.step_count += 1
            words = tuple(WORDS[name] for name in found.compared)
            is_new = outcome.step_count == 1
            outcome.compared = (
                words if is_new else tuple(word for word in outcome.compared if word in words)
            )
        if found.what is not None:
            return number, found
    return None


def _compare(
    one: Steps, earlier: StepRecord, other: Steps, now: StepRecord, *, is_first: bool
) -> StepComparison:
    return compare_steps(
        earlier,
        now,
        streams=other.header.streams,
        earlier_streams=one.header.streams,
        same_tensors=one.header.tensors == other.header.tensors,
        is_first=is_first,
    )


def _read_logs(folder: Path) -> dict[tuple[str, int, int], Steps]:
    """Return the step logs below a folder of runs, by run, launch and process."""
    found: dict[tuple[str, int, int], Steps] = {}
    for path in sorted(folder.glob(f"*/{WITNESS}/*/*.steps")):
        run_folder = path.parents[2]
        parsed = _LOG_NAME.fullmatch(f"{path.parent.name}/{path.name}")
        steps = Steps.parse(path.read_bytes())
        if parsed is not None and steps is not None:
            found[run_folder.name, int(parsed[1]), int(parsed[2])] = steps
    return found


def read_accounts(folder: Path) -> dict[tuple[str, int], Account]:
    """Return the accounts of the last finished launch, by run and process."""
    found: dict[tuple[str, int], Account] = {}
    for path in sorted(folder.glob("*.json")):
        account = Account.parse(path.read_bytes())
        found[path.name.rpartition("-")[0].rpartition("-")[0], account.writer] = account
    return found
