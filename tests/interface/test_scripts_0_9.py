"""Scripts of version 0.9 run unchanged: those of its README and its tutorial, and one with all of its keywords."""

import os
import signal
from pathlib import Path

import pytest

from tests.forks import run_program
from tests.house.sources import ROOT

SCRIPTS = Path(__file__).parent


def programs(name, place):
    """Write the programs of a script into a directory, and return their paths."""
    paths = []
    for number, text in enumerate((SCRIPTS / name).read_text("utf-8").split("# %%\n")):
        path = place / f"program_{number}.py"
        path.write_text(text, "utf-8")
        paths.append(path)
    return paths


def run(program, **environment):
    """Run a program with all warnings as errors but DeprecationWarning; return its code, output and errors."""
    errors = program.with_suffix(".errors")
    errors.unlink(missing_ok=True)
    code, printed = run_program(
        [str(program)],
        place=program.parent,
        variables={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        warn=["error", "default::DeprecationWarning"],
        errors=str(errors),
    )
    return code, printed, errors.read_text("utf-8")


def trained(program, **environment):
    """Train to the end, once killed; return what the program printed."""
    assert run(program, KILL_AT="25", **environment)[0] == -signal.SIGKILL
    code, printed, errors = run(program, **environment)
    assert code == 0, errors
    assert "Deprecation" not in errors
    return printed


def test_the_script_of_readme(tmp_path):
    (train,) = programs("readme_0_9.txt", tmp_path)
    trained(train)
    assert (tmp_path / "runs/first/step-00000040-l0002").is_dir()


def test_the_scripts_of_the_tutorial(tmp_path):
    first, train, compare, listing = programs("tutorial_0_9.txt", tmp_path)
    code, printed, errors = run(first)
    assert (code, printed.split()[:2]) == (0, ["True", "1"]), errors
    code, calm, errors = run(train, RUN="calm")
    assert code == 0, errors
    assert trained(train, RUN="killed") == calm
    assert run(compare)[:2] == (0, "True\n")
    code, printed, errors = run(listing)
    assert code == 0, errors
    assert printed.endswith("40 (2, 8)\n")


@pytest.mark.parametrize("steps", ["3"])
def test_a_script_with_all_old_keywords_warns_and_runs(steps, tmp_path):
    (program,) = programs("keywords_0_9.txt", tmp_path)
    code, printed, errors = run(program, STEPS=steps)
    assert (code, printed) == (0, "3 3\n"), errors
    assert errors.count("DeprecationWarning") == 2
    assert "keep=ckptfmt.Retention(newest=2, every=5, best=('loss', 'min', 1))" in errors
    assert "copies=[ckptfmt.Cache(path='cache', limit_nbytes=1073741824" in errors
    assert (tmp_path / "mirror").is_dir()
