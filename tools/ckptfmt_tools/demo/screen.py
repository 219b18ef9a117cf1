"""The demo's output: progress, and a last screen with events, comparisons and the verdict."""

from __future__ import annotations

import dataclasses
import os
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from typing import TextIO

from ckptfmt_tools.demo.journal import JournalComparison
from ckptfmt_tools.demo.story import Resized, StoryOutcome, Strip

_WIDTH = 78
_STRIP_WIDTH = 60
_LABEL_WIDTH = 13


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """The characters and styles for an output stream.

    Attributes:
        save, kill, begin, resume, line: characters of the time line.
        rule: character of the rule between the parts.
        colour: whether styles are shown.
    """

    save: str = "o"
    kill: str = "X"
    begin: str = "|"
    resume: str = "`"
    line: str = "-"
    rule: str = "-"
    colour: bool = False

    @classmethod
    def of(cls, stream: TextIO) -> Look:
        """Return the look for `stream`: box characters if encodable, colour on a terminal."""
        colour = (
            stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        )
        boxes = {"save": "●", "kill": "✗", "begin": "├", "resume": "╰", "line": "─", "rule": "─"}
        try:
            "".join(boxes.values()).encode(stream.encoding or "ascii")
        except UnicodeEncodeError:
            boxes = {}
        return cls(**boxes, colour=colour)

    def style(self, text: str, code: str) -> str:
        """Return text in a style, by the style's number in ECMA-48; plain without colour."""
        return f"\x1b[{code}m{text}\x1b[0m" if self.colour else text

    def verdict(self, *, good: bool, text: str) -> str:
        """Return text in green or red."""
        return self.style(text, "1;32" if good else "1;31")


def render(outcome: StoryOutcome, look: Look, *, seconds: float) -> str:
    """Return the last screen."""
    rule = look.style(look.rule * _WIDTH, "2")
    parts = [
        [rule, *_iter_what(outcome)],
        list(_iter_time_line(outcome, look)),
        list(_iter_comparison(outcome, look)),
        list(_iter_resized(outcome.resized, look)) if outcome.resized else [],
        [*_iter_verdict(outcome, look, seconds), rule, *_iter_next(outcome)],
    ]
    return "\n\n".join("\n".join(part) for part in parts if part)


def _iter_what(outcome: StoryOutcome) -> Iterator[str]:
    header = outcome.header
    settings = outcome.settings
    before, after = outcome.losses
    text = (
        f"A GPT of {header.parameter_count:,} parameters on {settings.text_nbytes >> 10:,} KiB of"
        f" text, {header.text}:"
        f" AdamW, dropout to {settings.dropout}, warm-up, cosine; {header.world_size} processes"
        " under torchrun"
        f" with gloo; {settings.steps} steps, {outcome.sample_count:,} samples; loss {before:.2f}"
        f" to {after:.2f}."
    )
    if outcome.home is not None:
        text += f" Checkpoints in {outcome.home}."
    yield from textwrap.wrap(text, _WIDTH, initial_indent="  ", subsequent_indent="  ")


def _iter_time_line(outcome: StoryOutcome, look: Look) -> Iterator[str]:
    settings = outcome.settings
    axis = [" "] * (_STRIP_WIDTH + 4)
    steps = {*range(0, settings.steps, settings.every), settings.steps}
    shown = [step for step in sorted(steps) if _fits(step, settings.steps)]
    for step in shown:
        column = step * _STRIP_WIDTH // settings.steps
        axis[column : column + len(str(step))] = str(step)
    yield "  " + "step".ljust(_LABEL_WIDTH) + "".join(axis).rstrip()
    for strip in outcome.strips:
        yield _draw(strip, settings.steps, look)


def _fits(step: int, steps: int) -> bool:
    """Return whether a step's number has room before the number of the last step."""
    return step == steps or (steps - step) * _STRIP_WIDTH // steps > len(str(step))


def _draw(strip: Strip, steps: int, look: Look) -> str:
    columns = {
        step: step * _STRIP_WIDTH // steps for step in (strip.first, strip.last, *strip.saves)
    }
    begin = columns[strip.first]
    end = columns[strip.last]
    cells = [look.line] * (end - begin + 1)
    for step in strip.saves:
        cells[columns[step] - begin] = look.save
    cells[0] = look.resume if strip.first else look.begin
    if strip.killed:
        cells[-1] = look.style(look.kill, "1;31")
    before = f"on {strip.world_size} processes, resumes from {strip.first} " if strip.first else ""
    after = f" SIGKILL after step {strip.last}" if strip.killed else ""
    return (
        "  "
        + strip.name.ljust(_LABEL_WIDTH)
        + before.rjust(begin)
        + "".join(cells)
        + look.style(after, "31")
    )


def _iter_comparison(outcome: StoryOutcome, look: Look) -> Iterator[str]:
    same = outcome.same
    steps = outcome.settings.steps
    yield "  Launches 1 and 2 against the undisturbed run, each step of each process:"
    for name, categories, what in _list_rows(same):
        done = min(same.identical_steps(category) for category in categories)
        good = done == steps and not any(other.category in categories for other in same.differences)
        verdict = look.verdict(good=good, text="identical" if good else "DIFFERENT")
        yield f"    {name:<14} {what:<30} {verdict}  {done} of {steps} steps"
    again = sorted({step for step, _ in same.repeated})
    if again:
        steps_text = (
            f"Steps {again[0]} to {again[-1]} were" if len(again) > 1 else f"Step {again[0]} was"
        )
        yield f"    {steps_text} done before the kill and again after it: both compared."
    yield f"    {_claim(outcome.claim)}"


def _claim(level: str) -> str:
    """Return the load's own claim about the run that goes on from the checkpoint."""
    meaning = {"T1": "the same trajectory, bit by bit", "S1": "the same samples, each once"}
    return f"The load claims {level}, {meaning.get(level, 'the same state')}"


def _list_rows(same: JournalComparison) -> list[tuple[str, tuple[str, ...], str]]:
    """Return the rows of the comparison: label, categories, and a description of the facts."""
    names = same.names_of
    return [
        ("parameters", ("parameter",), f"{len(names('parameter'))} tensors"),
        (
            "AdamW",
            ("moment", "step"),
            f"{len(names('moment'))} moments, {len(names('step'))} step counts",
        ),
        ("buffer", ("buffer",), ", ".join(names("buffer"))),
        ("learning rate", ("schedule",), "scheduler, options of AdamW"),
        ("trainer", ("trainer",), "plan, steps, sums under way"),
        ("RNG streams", ("rng",), ", ".join(names("rng"))),
        ("data", ("sample", "cursor"), "ids in order, position, ledger"),
        ("loss", ("loss",), "all bits"),
    ]


def _iter_resized(resized: Resized, look: Look) -> Iterator[str]:
    same = resized.same
    yield (
        f"  Launch 3, on {resized.world_size} processes instead of 2, against the undisturbed run:"
    )
    verdict = look.verdict(good=same.identical, text="identical" if same.identical else "DIFFERENT")
    what = f"all of the above, {same.compared:,} digests"
    yield f"    {what:<45} {verdict}  {same.identical_steps()} of {same.steps} steps"
    good = not resized.samples_wrong
    word = look.verdict(good=good, text="none skipped, none repeated" if good else "WRONG")
    yield f"    samples of the whole history: {resized.sample_count:,}, {word}"
    yield f"    {_claim(resized.claim)}; the trainer does the rest"
    new = resized.new_stream_count
    streams = resized.stream_count
    yield f"    {new} of {streams} RNG streams are new, and decide nothing: process 0 draws for all"


def _iter_verdict(outcome: StoryOutcome, look: Look, seconds: float) -> Iterator[str]:
    same = outcome.same
    steps = outcome.settings.steps
    for sentence in _iter_problems(outcome):
        yield from textwrap.wrap(sentence, _WIDTH, initial_indent="  ", subsequent_indent="    ")
    if outcome.holds:
        text = f"identical over all {steps} steps"
    elif same.identical:
        text = f"identical over all {steps} steps, but not all of the above holds"
    else:
        text = f"NOT the same run: {same.identical_steps()} of {steps} steps agree"
    compared = same.compared + (outcome.resized.same.compared if outcome.resized else 0)
    yield (
        f"  {look.verdict(good=outcome.holds, text=text)}   ({compared:,} digests compared;"
        f" {seconds:.0f} s)"
    )


def _iter_problems(outcome: StoryOutcome) -> Iterator[str]:
    if outcome.without:
        yield (
            f"Negative control: {outcome.without} was left out when launch 2 restored. The"
            " comparison has to fail."
        )
    if not outcome.same.identical:
        yield _sentence(outcome.same)
    resized = outcome.resized
    if resized is not None:
        if not resized.same.identical:
            yield f"Launch 3: {_sentence(resized.same)}"
        if resized.samples_wrong:
            yield f"Launch 3: {resized.samples_wrong}."
    for violation in outcome.violations:
        yield f"The run left behind isn't valid: {violation}"


def _sentence(comparison: JournalComparison) -> str:
    text = comparison.explain()
    return f"{text[:1].upper()}{text[1:]}."


def _iter_next(outcome: StoryOutcome) -> Iterator[str]:
    yield "  The run is left behind to look at:"
    for command, path in (
        ("log", outcome.run),
        ("inspect", outcome.last_checkpoint),
        ("validate", outcome.run),
    ):
        yield f"    ckptfmt {command} {path}"


def as_json(outcome: StoryOutcome, *, seconds: float) -> dict[str, object]:
    """Return the contents of the last screen as a JSON-ready mapping."""
    same = outcome.same
    resized = outcome.resized
    return {
        "holds": outcome.holds,
        "run": str(outcome.run),
        "home": outcome.home,
        "seconds": round(seconds, 1),
        "steps": outcome.settings.steps,
        "identical_steps": same.identical_steps(),
        "compared": same.compared,
        "differing": sorted({difference.name for difference in same.differences}),
        "first_divergence": None if same.identical else same.explain(),
        "left_out": outcome.without,
        "claim": outcome.claim,
        "strips": [dataclasses.asdict(strip) for strip in outcome.strips],
        "repeated": [list(pair) for pair in same.repeated],
        "resized": None
        if resized is None
        else {
            "holds": resized.holds,
            "world_size": resized.world_size,
            "step": resized.step,
            "steps": resized.same.steps,
            "identical_steps": resized.same.identical_steps(),
            "compared": resized.same.compared,
            "first_divergence": None if resized.same.identical else resized.same.explain(),
            "samples_wrong": resized.samples_wrong,
            "sample_count": resized.sample_count,
            "claim": resized.claim,
            "lowered_by": list(resized.lowered_by),
        },
        "violations": list(outcome.violations),
        "checked_nbytes": outcome.checked_nbytes,
    }


_BAR_WIDTH = 20


class DemoProgress:
    """The display of the demo's phases on standard error.

    Args:
        phase_count: number of phases.
        stream: the output stream; None for standard error.
    """

    def __init__(self, phase_count: int, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._live = self._stream.isatty()
        self._phase_count = phase_count
        self._number = 0
        self._text = ""
        self._begin_s = time.monotonic()

    def phase(self, text: str, steps: int) -> Callable[[int], None]:
        """Begin a phase of `steps` steps; return a function that shows the steps done."""
        self.end()
        self._number += 1
        self._text = f"{self._number}/{self._phase_count} {text}"
        self._begin_s = time.monotonic()

        def show(step: int) -> None:
            if self._live:
                bar = ("#" * (step * _BAR_WIDTH // steps)).ljust(_BAR_WIDTH, ".")
                what = f"step {step} of {steps}" if step else "starting"
                print(
                    f"\r\x1b[K  {self._text}  [{bar}] {what}", end="", file=self._stream, flush=True
                )

        if not self._live:
            print(f"  {self._text}", file=self._stream, flush=True)
        show(0)
        return show

    def end(self) -> None:
        """End the current phase, if any."""
        if self._live and self._text:
            print(
                f"\r\x1b[K  {self._text}  {time.monotonic() - self._begin_s:.0f} s",
                file=self._stream,
                flush=True,
            )
        self._text = ""
