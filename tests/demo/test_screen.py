"""The last screen and the progress: what is said of which outcome, and where there is room for it."""

import dataclasses
import io
import json
from pathlib import Path

import pytest

from ckptfmt_tools.demo.journal import Difference, Header, JournalComparison
from ckptfmt_tools.demo.screen import DemoProgress, Look, as_json, render
from ckptfmt_tools.demo.settings import make_settings
from ckptfmt_tools.demo.story import Resized, StoryOutcome, Strip

NAMES = [
    "parameter/w",
    "moment/exp_avg/w",
    "step/w",
    "buffer/b",
    "schedule/s",
    "cursor/data",
    "trainer/state",
    "rng/numpy",
    "sample/ids",
]
HEADER = Header(
    pid=7,
    rank=0,
    world_size=2,
    launch=1,
    resumed_from=None,
    claim=None,
    parameter_count=842_496,
    sample_count=1024,
    text="78 modules of a library",
)


def comparison(steps, *different):
    differences = tuple(
        Difference(step=step, rank=1, name=name, expected="00", found="01")
        for step, name in different
    )
    names = dict.fromkeys([*NAMES, "loss/bits"], steps)
    return JournalComparison(
        steps=steps, names=names, repeated=((31, 0), (35, 1)), differences=differences
    )


def outcome(steps=60, **changes):
    settings = make_settings(steps=steps)
    saves = tuple(range(settings.every, steps + 1, settings.every))
    resized = Resized(
        world_size=3,
        step=settings.resized_step,
        same=comparison(steps - settings.resized_step),
        new_stream_count=3,
        stream_count=9,
        samples_wrong="",
        sample_count=steps * settings.global_batch,
        claim="S1",
        lowered_by=("processes: saved 2, here 3",),
    )
    killed = tuple(step for step in saves if step < settings.killed_step)
    strips = (
        Strip(name="undisturbed", world_size=2, first=0, last=steps, saves=saves),
        Strip(
            name="launch 1",
            world_size=2,
            first=0,
            last=settings.killed_step,
            saves=killed,
            killed=True,
        ),
        Strip(
            name="launch 2", world_size=2, first=killed[-1], last=steps, saves=saves[len(killed) :]
        ),
    )
    given = StoryOutcome(
        directory=Path("demo"),
        settings=settings,
        header=HEADER,
        strips=strips,
        same=comparison(steps),
        claim="T1",
        losses=(5.5, 2.6),
        resized=resized,
        violations=(),
        checked_nbytes=1 << 20,
        without=None,
    )
    return dataclasses.replace(given, **changes)


@pytest.mark.parametrize("steps", [8, 24, 60, 61, 1000])
def test_the_screen_fits_a_terminal(steps):
    lines = render(outcome(steps), Look(), seconds=84.0).splitlines()

    assert len(lines) <= 36
    assert max(map(len, lines)) <= 80


def test_if_all_holds_it_says_identical():
    text = render(outcome(), Look(), seconds=84.0)

    assert "identical over all 60 steps" in text
    assert "84 s" in text
    assert "DIFFERENT" not in text


def broken_outcomes():
    resized = outcome().resized
    assert resized is not None
    one_digest = comparison(60, (31, "rng/numpy"))
    return {
        "a digest": ({"same": one_digest}, "NOT the same run: 59 of 60 steps agree"),
        "the initial state": (
            {"same": comparison(60, (0, "parameter/w"))},
            "DIFFERENT  60 of 60 steps",
        ),
        "no third launch": ({"resized": None}, "not all"),
        "its bits": (
            {"resized": dataclasses.replace(resized, same=one_digest)},
            "Launch 3: First divergence",
        ),
        "its samples": (
            {"resized": dataclasses.replace(resized, samples_wrong="too few")},
            "Launch 3: too few.",
        ),
        "the run": (
            {"violations": ("BLOCK_DIGEST",)},
            "The run left behind isn't valid: BLOCK_DIGEST",
        ),
    }


@pytest.mark.parametrize(
    ("changes", "said"), broken_outcomes().values(), ids=broken_outcomes().keys()
)
def test_whatever_does_not_hold_is_said(changes, said):
    broken = outcome(**changes)
    text = render(broken, Look(), seconds=84.0)

    assert not broken.holds
    assert said in text
    assert "  identical over all 60 steps   (" not in text


def test_the_result_is_json():
    said = json.loads(json.dumps(as_json(outcome(), seconds=84.04)))

    assert said["holds"] is True
    assert said["identical_steps"] == said["steps"] == 60
    assert said["resized"]["claim"] == "S1"
    assert said["resized"]["identical_steps"] == said["resized"]["steps"] == 20
    assert said["seconds"] == 84.0


# What a stream can show


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(("encoding", "save"), [("utf-8", "●"), ("ascii", "o"), ("latin-1", "o")])
def test_boxes_are_drawn_where_the_encoding_has_them(encoding, save):
    look = Look.of(io.TextIOWrapper(io.BytesIO(), encoding=encoding))

    assert look.save == save
    assert not look.colour
    render(outcome(), look, seconds=84.0).encode(encoding)


def test_colour_is_for_terminals_and_not_for_who_refuses_it(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert Look.of(Terminal()).colour
    assert "\x1b[1;32m" in render(outcome(), Look.of(Terminal()), seconds=84.0)
    monkeypatch.setenv("NO_COLOR", "1")
    assert not Look.of(Terminal()).colour


def test_progress_moves_on_a_terminal():
    terminal = Terminal()
    progress = DemoProgress(2, terminal)
    show = progress.phase("training", 4)
    show(2)
    progress.end()

    assert "step 2 of 4" in terminal.getvalue()
    assert terminal.getvalue().endswith(" s\n")


def test_progress_is_a_line_per_phase_in_a_pipe():
    pipe = io.StringIO()
    progress = DemoProgress(2, pipe)
    progress.phase("training", 4)(2)
    progress.phase("training again", 4)(4)
    progress.end()

    assert pipe.getvalue() == "  1/2 training\n  2/2 training again\n"
