"""``rehearse``: kill a training on purpose, resume it, and compare it with an undisturbed run."""

from __future__ import annotations

import argparse
import dataclasses
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final
from xml.etree import ElementTree as ET

from ckptfmt.cli.console import Console, clean, count_text, print_json
from ckptfmt.errors import Code, err
from ckptfmt.loop.rehearsal import Rehearsal
from ckptfmt_tools.cli.judging import RehearsalOutcome, judge, read_accounts

#: The number of last lines shown of a failed launch's output.
_TAIL: Final = 12
#: The last line of a traceback; torchrun may put the rank before it.
_EXCEPTION: Final = re.compile(
    r"(\[rank[0-9]+\]: ?)?[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit): "
)


def run(arguments: argparse.Namespace) -> int:
    """Rehearse a program, print the outcome, and return the exit code.

    Returns: 0 for the same trajectory, 1 for a different trajectory, 2 without a judgement.
    Raises: StateError(ARGUMENT) for invalid options, or if a launch fails by itself.
    """
    command = arguments.program[1:] if arguments.program[:1] == ["--"] else arguments.program
    if not command:
        remedy = "Write it behind two dashes: ckptfmt rehearse -- python train.py --lr 0.1"
        raise err(Code.ARGUMENT, "no program is given", where="rehearse", remedy=remedy)
    worlds = _parse_worlds(arguments.world)
    plan_kills(
        arguments.steps, arguments.every, arguments.kills, arguments.seed
    )  # refuses before any launch
    scratch = (
        Path(tempfile.mkdtemp(prefix="ckptfmt-rehearsal-"))
        if arguments.keep is None
        else Path(arguments.keep)
    )
    scratch.mkdir(parents=True, exist_ok=True)
    try:
        begun_s = time.monotonic()
        kills = _play(command, worlds, scratch, arguments)
        outcome = judge(scratch, kills)
        seconds = time.monotonic() - begun_s
    finally:
        if arguments.keep is None:
            shutil.rmtree(scratch, ignore_errors=True)
    if arguments.junit is not None:
        Path(arguments.junit).write_bytes(_junit(outcome, command, seconds))
    if arguments.json:
        print_json(
            {
                "kind": "rehearsal",
                "program": command,
                "verdict": outcome.verdict,
                **dataclasses.asdict(outcome),
            }
        )
    else:
        _print(Console(), outcome, command, arguments)
    return {"same": 0, "different": 1, "unknown": 2}[outcome.verdict]


def plan_kills(steps: int, every: int, count: int, seed: int) -> list[int]:
    """Return the numbers of steps after which launches are killed: ascending, each between saves.

    Raises: StateError(ARGUMENT) if the kills don't fit between the saves.

    >>> plan_kills(24, 5, 2, 0)
    [12, 18]
    """
    places = [range(save + 2, save + every) for save in range(every, steps - every, every)]
    if every < 3 or count < 1 or len(places) < count:  # a save, its commit, and a lost step
        detail = f"{count} kills don't fit between the saves of {steps} steps, one every {every}"
        remedy = "Pass --every 5 or more, and --steps of at least (kills + 2) times as many."
        raise err(Code.ARGUMENT, detail, where="--steps, --every, --kills", remedy=remedy)
    chosen = random.Random(seed)  # noqa: S311
    return sorted(chosen.choice(place) for place in chosen.sample(places, count))


# --- launches -------------------------------------------------------------------------------------


def _parse_worlds(text: str | None) -> list[int | None]:
    """Return the number of processes of each launch in turn; None to start the program unchanged.

    Raises: StateError(ARGUMENT).
    """
    if text is None:
        return [None]
    try:
        worlds = [int(part) for part in text.split(",")]
    except ValueError:
        worlds = [0]
    if min(worlds) < 1:
        remedy = (
            "Pass numbers of processes, such as --world 2, or one for each launch: --world 2,1."
        )
        raise err(
            Code.ARGUMENT,
            f"{text!r} isn't a list of numbers of processes",
            where="--world",
            remedy=remedy,
        )
    return [*worlds]


def _play(
    command: list[str], worlds: list[int | None], scratch: Path, arguments: argparse.Namespace
) -> list[int]:
    """Start the undisturbed run, then the launches of the killed run, one after another.

    Returns: the numbers of steps after which launches were killed.
    Raises: StateError(ARGUMENT) if a launch ends by itself with an error.
    """
    kills: dict[int, int | None] = dict.fromkeys(
        plan_kills(arguments.steps, arguments.every, arguments.kills, arguments.seed)
    )
    rehearsal = Rehearsal(
        folder=str(scratch / "calm"), every=arguments.every, steps=arguments.steps, kill_at=None
    )
    total = len(kills) + 2
    _start(command, worlds[0], rehearsal, scratch / "calm-1.log", f"launch 1 of {total}")
    save_at = _find_change(scratch / "calm", [*kills], arguments.every)
    if save_at is not None:
        kills = dict(sorted((kills | {save_at + 1: save_at}).items()))
    rehearsal = dataclasses.replace(rehearsal, folder=str(scratch / "killed"))
    total = len(kills) + 2
    for place, kill_at in enumerate([*kills, None]):
        number = place + 2
        world = worlds[min(place, len(worlds) - 1)]
        save_at = None if kill_at is None else kills[kill_at]
        one = dataclasses.replace(rehearsal, kill_at=kill_at, save_at=save_at)
        _start(command, world, one, scratch / f"killed-{number}.log", f"launch {number} of {total}")
    return [*kills]


def _find_change(calm: Path, kills: list[int], every: int) -> int | None:
    """Return the first step after which an RNG stream or a schedule changed before the next step.

    Returns: None without such a step, or if a launch resumes from such a step already.
    """
    changes = sorted({step for account in read_accounts(calm).values() for step in account.changes})
    resumed = {kill // every * every for kill in kills}
    return changes[0] if changes and not resumed & set(changes) else None


def _start(
    command: list[str], world: int | None, rehearsal: Rehearsal, log: Path, name: str
) -> None:
    """Start a launch and wait for its end.

    Raises: StateError(ARGUMENT) if the program can't be started, or the launch ends by itself with
        an error.
    """
    kill_at = rehearsal.kill_at
    ends = (
        f"is killed behind step {kill_at}"
        if kill_at is not None
        else f"goes on to step {rehearsal.steps}"
    )
    Console(sys.stderr).line((f"{name} {ends}", "dim"))
    started = _command(command, world)
    environment = {**os.environ, **rehearsal.as_environment()}
    with log.open("w+b") as output:
        try:
            code = subprocess.run(  # noqa: S603
                started, env=environment, stdout=output, stderr=output, check=False
            ).returncode
        except OSError as error:
            detail = f"the program can't be started: {error.strerror}"
            remedy = "Write the command behind two dashes, as in a shell: python train.py --lr 0.1"
            raise err(Code.ARGUMENT, detail, where=started[0][:200], remedy=remedy) from error
        output.seek(0)
        said = output.read().decode(errors="replace").splitlines()
    was_killed = kill_at is not None and code != 0
    if code != 0 and not was_killed:
        raise err(
            Code.ARGUMENT,
            f"{name}, which {ends}, ended with exit code {code}: {_last_words(said)}"[:2000],
            where=" ".join(started)[:200],
            remedy=(
                "Run the program by itself first; a resume that is refused says why in its"
                " last line."
            ),
        )


def _last_words(said: list[str]) -> str:
    """Return the first line with an exception in a failed launch's output, or the last lines."""
    found = next((line for line in said if _EXCEPTION.match(line)), None)
    return " / ".join(said[-_TAIL:]) if found is None else found


def _command(command: list[str], world: int | None) -> list[str]:
    """Return the command of a launch, under torchrun if the number of processes is given.

    Raises: StateError(ARGUMENT) for a program that isn't Python, with a number of processes.
    """
    if world is None:
        return command
    if not re.fullmatch(r"python[0-9.]*", Path(command[0]).name):
        remedy = (
            "Give the program as `python train.py ...`, or start torchrun yourself and leave"
            " --world out."
        )
        raise err(Code.ARGUMENT, f"{command[0]} isn't Python", where="--world", remedy=remedy)
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    return [command[0], *torchrun, *command[1:]]


# --- output ---------------------------------------------------------------------------------------


def _print(
    console: Console,
    outcome: RehearsalOutcome,
    command: Sequence[str],
    arguments: argparse.Namespace,
) -> None:
    processes = count_text(outcome.writer_count, "process", "processes")
    kills = _joined(outcome.kills)
    resumed = _joined(outcome.resumed) or "nothing"
    console.line(("program", "dim"), f"   {clean(' '.join(command))}")
    console.line(
        ("calm", "dim"),
        f"      {arguments.steps} steps, {processes}, a save every {arguments.every}",
    )
    console.line(("killed", "dim"), f"    behind step {kills}; resumed from step {resumed}")
    steps = count_text(outcome.step_count, "step")
    console.line(
        ("compared", "dim"), f"  {steps} behind resumes: {', '.join(outcome.compared) or 'nothing'}"
    )
    if outcome.lowered_by:
        console.line(
            ("claim", "yellow"),
            f"     {outcome.claim} at a resume: {clean('; '.join(outcome.lowered_by))}",
        )
    for note in outcome.notes:
        console.line(("note", "yellow"), f"      {clean(note)}")
    console.line()
    found = outcome.difference
    if found is not None:
        process = f", process {found.writer}" if outcome.writer_count > 1 else ""
        console.line(("NOT the same trajectory", "red bold"), f": {clean(found.launch)}{process}")
        console.line(f"  {clean(found.text)}")
    elif outcome.step_count:
        is_claimed = outcome.claim in (None, "T1")
        verdict = (
            f"T1 verified over {steps}"
            if is_claimed
            else f"{steps} identical, claim {outcome.claim} all the same"
        )
        console.line(("the same trajectory", "green bold"), f": {verdict}")
    else:
        console.line(("unknown", "yellow bold"), ": no step behind a resume could be compared")


def _joined(numbers: Sequence[int]) -> str:
    words = [str(number) for number in numbers]
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _junit(outcome: RehearsalOutcome, command: Sequence[str], seconds: float) -> bytes:
    """Return the outcome as JUnit XML, with a single test."""
    failures = int(outcome.verdict != "same")
    suite = ET.Element(
        "testsuite", name="ckptfmt rehearse", tests="1", failures=str(failures), errors="0"
    )
    name = clean(" ".join(command))
    case = ET.SubElement(suite, "testcase", classname="rehearse", name=name, time=f"{seconds:.3f}")
    if outcome.difference is not None:
        ET.SubElement(case, "failure", message="NOT the same trajectory").text = clean(
            outcome.difference.text
        )
    elif failures:
        ET.SubElement(case, "failure", message="no step behind a resume could be compared")
    return bytes(ET.tostring(suite, encoding="utf-8", xml_declaration=True))
