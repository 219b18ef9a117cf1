"""Every command and every example of the README is run, in the order in which a reader meets them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ckptfmt

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text("utf-8")
FENCES = re.findall(r"^```(.*)\n((?:.*\n)*?)^```$", README, re.MULTILINE)
COMMANDS = [line[2:] for kind, body in FENCES if kind == "console" for line in body.splitlines()]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the examples ran: what they saved is what the commands look at."""
    place = tmp_path_factory.mktemp("readme")
    for kind, body in FENCES:
        if kind == "python":
            run([sys.executable, "-W", "error", "-c", body], place)
    program = (
        "import ckptfmt\n"
        "state = ckptfmt.State(data={'position': 0})\n"
        "with ckptfmt.Checkpointer('my-run', state) as checkpointer:\n"
        "    for _ in checkpointer.steps(2): pass\n"
    )
    run([sys.executable, "-c", program], place)
    return place


def run(argv: list[str], place: Path) -> str:
    done = subprocess.run(argv, cwd=place, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_fence_is_of_a_kind_that_is_checked() -> None:
    assert {kind for kind, _ in FENCES} == {"text", "console", "python", "python no-run"}


def test_examples_run(directory: Path) -> None:
    assert (directory / "ckpt" / "manifest.json").is_file()
    assert (directory / "plain" / "manifest.json").is_file()


@pytest.mark.parametrize("command", [command for command in COMMANDS if not command.startswith("make ")])
def test_command_runs(command: str, directory: Path) -> None:
    program, *arguments = command.split()
    assert program == "python"
    assert run([sys.executable, *arguments], directory)


@pytest.mark.parametrize("command", [command for command in COMMANDS if command.startswith("make ")])
def test_make_target_is_there(command: str) -> None:
    # The targets themselves run this test, or are run by their own: here it's their names that must hold.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
    subprocess.run([*command.split(), "--dry-run"], cwd=ROOT, env=environment, check=True, capture_output=True)


def test_loop_of_the_first_screen_is_that_of_the_package() -> None:
    loop, *others = (body for kind, body in FENCES if kind == "python no-run")
    for body in (loop, *others):
        compile(body, "README.md", "exec")
    assert 'ckptfmt.Checkpointer("runs/gpt", state, every="5min", keep=3)' in loop
    assert 'ckptfmt.Checkpointer("runs/gpt", state, every="5min", keep=3)' in (ckptfmt.__doc__ or "")


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)]+)\)", README):
        assert (ROOT / target.partition("#")[0]).exists(), target
