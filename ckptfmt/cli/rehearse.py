"""``rehearse``: kill a training on purpose, in a scratch directory, and say whether it goes on as the same run."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree as ET

from ckptfmt.cli.console import Console, clean, count_text, print_json
from ckptfmt.documents.witness import WITNESS, StepRecord
from ckptfmt.errors import Code, err
from ckptfmt.run.step_log import Steps
from ckptfmt.trainer.comparing import WORDS, Comparison, compare_steps
from ckptfmt.trainer.rehearsal import Rehearsal

#: The number of lines of a failed launch that are shown.
_TAIL: Final = 12
_LOG_NAME: Final = re.compile(r"([0-9]+)/([0-9]+)\.steps")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A step that differs.

    Attributes:
        launch: the launch whose step it is, in words.
        writer: the number of the process.
        step: the number of the step.
        what: the member that differs first.
        text: the sentence on the difference and its cause.
    """

    launch: str
    writer: int
    step: int
    what: str
    text: str


@dataclasses.dataclass(slots=True, kw_only=True)
class Outcome:
    """The outcome of a rehearsal.

    Attributes:
        kills: the numbers of steps after which launches were killed.
        resumed: the numbers of steps with which later launches began, in their order; of process 0.
        step_count: the number of steps that were compared, behind resumes alone.
        writer_count: the number of processes of the calm run.
        compared: the members that were compared, in words.
        difference: the first difference between a killed and resumed run and the undisturbed one; None where they are
            identical.
        is_repeatable: whether two fresh starts are the same: without it, a resume is compared with the launch before
            alone.
        notes: sentences on the rehearsal itself.
    """

    kills: list[int]
    resumed: list[int] = dataclasses.field(default_factory=list)
    step_count: int = 0
    writer_count: int = 0
    compared: tuple[str, ...] = ()
    difference: Finding | None = None
    is_repeatable: bool = True
    notes: list[str] = dataclasses.field(default_factory=list)

    @property
    def verdict(self) -> str:
        """``same``, ``different``, or ``unknown`` where no step behind a resume could be compared."""
        if self.difference is not None:
            return "different"
        return "same" if self.step_count else "unknown"


def run(arguments: argparse.Namespace) -> int:
    """Rehearse a program and return the exit code: 0 for the same trajectory, 1 for another, 2 if none could be judged.

    Raises: StateError(ARGUMENT) for options that don't fit; and where the undisturbed run fails by itself.
    """
    command = arguments.program[1:] if arguments.program[:1] == ["--"] else arguments.program
    if not command:
        remedy = "Write it behind two dashes: ckptfmt rehearse -- python train.py --lr 0.1"
        raise err(Code.ARGUMENT, "no program is given", where="rehearse", remedy=remedy)
    worlds = _parse_worlds(arguments.world)
    kills = plan_kills(arguments.steps, arguments.every, arguments.kills, arguments.seed)
    scratch = Path(tempfile.mkdtemp(prefix="ckptfmt-rehearsal-")) if arguments.keep is None else Path(arguments.keep)
    scratch.mkdir(parents=True, exist_ok=True)
    try:
        begun_s = time.monotonic()
        _play(command, worlds, scratch, arguments)
        outcome = judge(scratch, kills)
        seconds = time.monotonic() - begun_s
    finally:
        if arguments.keep is None:
            shutil.rmtree(scratch, ignore_errors=True)
    if arguments.junit is not None:
        Path(arguments.junit).write_bytes(_junit(outcome, command, seconds))
    if arguments.json:
        print_json({"kind": "rehearsal", "program": command, "verdict": outcome.verdict, **dataclasses.asdict(outcome)})
    else:
        _print(Console(), outcome, command, arguments)
    return {"same": 0, "different": 1, "unknown": 2}[outcome.verdict]


def plan_kills(steps: int, every: int, count: int, seed: int) -> list[int]:
    """Return the numbers of steps after which launches are killed: ascending, each between two saves.

    Raises: StateError(ARGUMENT) where there is no room for as many.

    >>> plan_kills(24, 5, 2, 0)
    [12, 18]
    """
    places = [range(save + 2, save + every) for save in range(every, steps - every, every)]
    if every < 3 or count < 1 or len(places) < count:  # a save, its commit, and a step that is lost
        detail = f"{count} kills don't fit between the saves of {steps} steps, one every {every}"
        remedy = "Pass --every 5 or more, and --steps of at least (kills + 2) times as many."
        raise err(Code.ARGUMENT, detail, where="--steps, --every, --kills", remedy=remedy)
    chosen = random.Random(seed)  # noqa: S311 - places that can be had again
    return sorted(chosen.choice(place) for place in chosen.sample(places, count))


def judge(scratch: Path, kills: list[int]) -> Outcome:
    """Return the outcome of the launches below a scratch directory, as their step logs say.

    Raises: StateError(ARGUMENT) where no step was recorded.
    """
    calm = _read_logs(scratch / "calm")
    killed = _read_logs(scratch / "killed")
    outcome = Outcome(kills=kills)
    if not calm:
        remedy = "The program makes no Checkpointer, takes no step with it, or has witness=False."
        raise err(Code.ARGUMENT, "the undisturbed run recorded no step", where="rehearse", remedy=remedy)
    outcome.writer_count = max(steps.header.writer_count for steps in calm.values())
    first_launch = min(launch for _, launch, _ in calm)
    references = {
        (name, writer): [_without_streams(steps)]
        for (name, launch, writer), steps in calm.items()
        if launch == first_launch
    }
    for (name, launch, writer), steps in sorted(killed.items()):
        known = references.setdefault((name, writer), [])
        is_first = steps.header.resumed is None
        found = _compare_launch(steps, [one for one in known if _is_alike(one, steps)], outcome, counts=not is_first)
        if is_first and found is not None:
            outcome.is_repeatable = False
            outcome.notes.append(
                f"two fresh starts differ by themselves ({found[1].detail}): seed the program to compare it with an"
                " undisturbed run; the steps behind a kill are compared with those before it alone"
            )
            known.clear()
        elif found is not None and outcome.difference is None:
            step, comparison = found
            what = comparison.what or ""
            where = f"launch {launch}, which resumed from step {steps.header.first_step}"
            outcome.difference = Finding(launch=where, writer=writer, step=step, what=what, text=comparison.detail)
        if not is_first and writer == 0:
            outcome.resumed.append(steps.header.first_step)
        known.append(steps)
    if not outcome.resumed:
        outcome.notes.append("no launch resumed from a checkpoint of a killed one")
    return outcome


def _without_streams(steps: Steps) -> Steps:
    """Return the records without RNG streams: fresh starts differ in those that a program neither seeds nor uses."""
    return Steps(steps.header, {number: dataclasses.replace(one, streams=()) for number, one in steps.records.items()})


def _is_alike(one: Steps, other: Steps) -> bool:
    return one.header.writer_count == other.header.writer_count


def _compare_launch(
    steps: Steps, references: list[Steps], outcome: Outcome, *, counts: bool
) -> tuple[int, Comparison] | None:
    """Compare each step with the first reference that has it; return the first that differs."""
    is_first = True
    for number, record in sorted(steps.records.items()):
        reference = next((one for one in references if number in one.records), None)
        if reference is None:
            continue
        found = _compare(reference, reference.records[number], steps, record, is_first=is_first)
        is_first = False
        if counts and found.compared:
            outcome.step_count += 1
            outcome.compared = tuple(WORDS[name] for name in found.compared)
        if found.what is not None:
            return number, found
    return None


def _compare(one: Steps, earlier: StepRecord, other: Steps, now: StepRecord, *, is_first: bool) -> Comparison:
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


# --- launches ---------------------------------------------------------------------------------------------------------


def _parse_worlds(text: str | None) -> list[int | None]:
    """Return the number of processes of each launch in turn; None for a program that is started as it is."""
    if text is None:
        return [None]
    try:
        worlds = [int(part) for part in text.split(",")]
    except ValueError:
        worlds = [0]
    if min(worlds) < 1:
        remedy = "Pass numbers of processes, such as --world 2, or one for each launch: --world 2,1."
        raise err(Code.ARGUMENT, f"{text!r} isn't a list of numbers of processes", where="--world", remedy=remedy)
    return [*worlds]


def _play(command: list[str], worlds: list[int | None], scratch: Path, arguments: argparse.Namespace) -> None:
    """Start the undisturbed run, then the one that is killed, each launch after the end of the one before.

    Raises: StateError(ARGUMENT) where a launch ends by itself with an error.
    """
    console = Console(sys.stderr)
    kills = plan_kills(arguments.steps, arguments.every, arguments.kills, arguments.seed)
    plan: list[tuple[str, int | None, int | None]] = [("calm", None, worlds[0])]
    for place, kill in enumerate([*kills, None]):
        plan.append(("killed", kill, worlds[min(place, len(worlds) - 1)]))
    for number, (name, kill_at, world) in enumerate(plan):
        rehearsal = Rehearsal(folder=str(scratch / name), every=arguments.every, steps=arguments.steps, kill_at=kill_at)
        ends = f"is killed behind step {kill_at}" if kill_at is not None else f"goes on to step {arguments.steps}"
        console.line((f"launch {number + 1} of {len(plan)} {ends}", "dim"))
        with _output(scratch, name, number) as output:
            started = _command(command, world)
            environment = {**os.environ, **rehearsal.as_environment()}
            code = subprocess.run(started, env=environment, stdout=output, stderr=output, check=False).returncode  # noqa: S603 - the user's own
            output.seek(0)
            said = output.read().decode(errors="replace").splitlines()
        was_killed = kill_at is not None and code != 0
        if code != 0 and not was_killed:
            raise err(
                Code.ARGUMENT,
                f"launch {number + 1}, which {ends}, ended with exit code {code}: {' / '.join(said[-_TAIL:])}"[:2000],
                where=" ".join(started)[:200],
                remedy="Run the program by itself first; a resume that is refused says why in its last line.",
            )


@contextlib.contextmanager
def _output(scratch: Path, name: str, number: int) -> Iterator[Any]:
    with (scratch / f"{name}-{number}.log").open("w+b") as file:
        yield file


def _command(command: list[str], world: int | None) -> list[str]:
    """Return the command of one launch: under torchrun where the number of processes is given."""
    if world is None:
        return command
    if not re.fullmatch(r"python[0-9.]*", Path(command[0]).name):
        remedy = "Give the program as `python train.py ...`, or start torchrun yourself and leave --world out."
        raise err(Code.ARGUMENT, f"{command[0]} isn't Python", where="--world", remedy=remedy)
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    return [command[0], *torchrun, *command[1:]]


# --- output -----------------------------------------------------------------------------------------------------------


def _print(console: Console, outcome: Outcome, command: Sequence[str], arguments: argparse.Namespace) -> None:
    processes = count_text(outcome.writer_count, "process", "processes")
    kills = " and ".join(map(str, outcome.kills))
    resumed = " and ".join(map(str, outcome.resumed)) or "nothing"
    console.line(("program", "dim"), f"   {clean(' '.join(command))}")
    console.line(("calm", "dim"), f"      {arguments.steps} steps, {processes}, a save every {arguments.every}")
    console.line(("killed", "dim"), f"    behind step {kills}; resumed from step {resumed}")
    steps = count_text(outcome.step_count, "step")
    console.line(("compared", "dim"), f"  {steps} behind resumes: {', '.join(outcome.compared) or 'nothing'}")
    for note in outcome.notes:
        console.line(("note", "yellow"), f"      {clean(note)}")
    console.line()
    found = outcome.difference
    if found is not None:
        process = f", process {found.writer}" if outcome.writer_count > 1 else ""
        console.line(("NOT the same trajectory", "red bold"), f": {clean(found.launch)}{process}")
        console.line(f"  {clean(found.text)}")
    elif outcome.step_count:
        console.line(("the same trajectory", "green bold"), f": T1 verified over {steps}")
    else:
        console.line(("unknown", "yellow bold"), ": no step behind a resume could be compared")


def _junit(outcome: Outcome, command: Sequence[str], seconds: float) -> bytes:
    """Return the outcome as JUnit XML, with one test."""
    failures = int(outcome.verdict != "same")
    suite = ET.Element("testsuite", name="ckptfmt rehearse", tests="1", failures=str(failures), errors="0")
    name = clean(" ".join(command))
    case = ET.SubElement(suite, "testcase", classname="rehearse", name=name, time=f"{seconds:.3f}")
    if outcome.difference is not None:
        ET.SubElement(case, "failure", message="NOT the same trajectory").text = clean(outcome.difference.text)
    elif failures:
        ET.SubElement(case, "failure", message="no step behind a resume could be compared")
    return bytes(ET.tostring(suite, encoding="utf-8", xml_declaration=True))
