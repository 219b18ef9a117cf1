"""An exception at any message, and at any line of the threads that save: every call ends, and a later save works."""

import json
import os

import pytest

from tests.explorer.telling import tell
from tests.forks import run_program
from tests.store.helpers import ROOT

#: What is raised, by whose saver, and how often in the usual suite.
CASES = [
    ("lines", "thread", 4),
    ("interrupts", "thread", 6),
    ("messages", "thread", 6),
    ("remote", "process", 2),
]


def inject(place, what, saver, *options):
    """Run the injections in a process of their own, and return its report."""
    words = ["-m", "tests.faults.injecting", what, "--saver", saver, *options]
    errors = place / "errors"
    code, printed = run_program(words, place=ROOT, variables=os.environ, errors=str(errors))
    assert code == 0, errors.read_text("utf-8")
    report = json.loads(printed)
    tell(
        f"{what}, {saver}: {report['injections']} injections, {report['raised']} raised,"
        f" {len(report['hangs'])} hangs"
    )
    tell(
        f"the longest call took {report['longest_s']:.1f} s: {report['longest_at']};"
        f" {report['outcomes']}"
    )
    return report


def check(report):
    assert report["hangs"] == []
    assert report["problems"] == []


@pytest.mark.slow
@pytest.mark.parametrize(("what", "saver", "sample"), CASES)
def test_whatever_is_raised_wherever_every_call_ends_and_a_later_save_works(
    what, saver, sample, tmp_path
):
    report = inject(tmp_path, what, saver, "--seed", "17", "--sample", str(sample))
    check(report)
    assert report["raised"] == sample


@pytest.mark.exhaustive
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize(
    ("what", "saver"),
    [*[(what, saver) for what, saver, _ in CASES], ("messages", "process"), ("lines", "process")],
)
def test_whatever_is_raised_anywhere_every_call_ends_and_a_later_save_works(what, saver, tmp_path):
    report = inject(tmp_path, what, saver)
    check(report)
    assert report["raised"] > report["injections"] / 2
