"""The loops of docs/porting.md: killed by SIGKILL between saves, they go on as if nothing had happened, bit for bit."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

import ckptfmt
from tests.forks import run_program
from tests.house.sources import ROOT

PAGE = ROOT / "docs" / "porting.md"
#: Runs a program that ends by SIGKILL where it prints the loss of a step: the program itself isn't
#: changed.
KILLER = """
import builtins, os, runpy, signal, sys

at, program, *rest = sys.argv[1:]
say = builtins.print

def print_and_die(*words, **options):
    say(*words, **options)
    if words[:2] == ("step", int(at)):
        os.kill(os.getpid(), signal.SIGKILL)

builtins.print = print_and_die
sys.argv = [program, *rest]
runpy.run_path(program, run_name="__main__")
"""


def program_of(name: str) -> str:
    """Return a program of the page."""
    found = re.search(
        rf"^```python file={name}\n((?:.*\n)*?)```$", PAGE.read_text("utf-8"), re.MULTILINE
    )
    assert found is not None
    return found[1]


def start(
    place: Path, program: str, run: str, *, kill_at: int = -1
) -> tuple[int, dict[tuple[str, int], str], str]:
    """Run a program; return its exit code, the losses that it printed with all their bits, and its log."""
    options = ["--run", run] if program == "imagenet.py" else [run]
    log = place / f"{run}-{kill_at}.log"
    code, printed = run_program(
        ["-c", KILLER, str(kill_at), program, *options],
        place=place,
        variables=os.environ,
        warn=["error"],
        errors=str(log),
    )
    losses = {}
    for line in printed.splitlines():
        kind, number, loss = line.split()
        losses[kind, int(number)] = float(loss).hex()
    return code, losses, log.read_text("utf-8")


def contents(path: Path) -> dict[str, bytes]:
    """Return the bytes of all tensors of the newest checkpoint of a run, and of its RNG streams and position."""
    with ckptfmt.open(path) as checkpoint:
        found: dict[str, Any] = {
            f"{key}": checkpoint.read(*key).tobytes() for key in checkpoint.tensors
        }
        found["step"] = checkpoint.step
        found |= {
            f"{key}": checkpoint.leaf(*key)
            for key in checkpoint.leaves
            if key[0] in ("data", "optimizer")
        }
        # The programs seed and draw from torch alone.
        found |= {
            f"rng {key}": repr(checkpoint.stream(*key))
            for key in checkpoint.streams
            if key[0] == "torch.cpu"
        }
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "kills", "steps"),
    [("imagenet.py", (7, 23), 32), ("nanogpt.py", (9, 26), 40), ("epochs.py", (12, 30), 50)],
)
def test_a_ported_loop_that_is_killed_is_the_same_run(
    program: str, kills: tuple[int, ...], steps: int, tmp_path: Path
) -> None:
    """Each kill lies between two saves, the second one behind the end of an epoch or an evaluation."""
    (tmp_path / program).write_text(program_of(program), "utf-8")
    code, calm, said = start(tmp_path, program, "calm")
    assert code == 0, said
    assert [number for kind, number in calm if kind == "step"] == [*range(steps)]
    went_on = []
    for kill_at in kills:
        code, losses, said = start(tmp_path, program, "killed", kill_at=kill_at)
        assert code == -signal.SIGKILL, said
        assert max(number for kind, number in losses if kind == "step") == kill_at
        assert losses == {key: calm[key] for key in losses}
        went_on.append(min(number for kind, number in losses if kind == "step"))
    code, losses, said = start(tmp_path, program, "killed")
    assert code == 0, said
    assert losses == {key: calm[key] for key in losses}
    assert "claim T1" in said
    first = min(number for kind, number in losses if kind == "step")
    assert 0 < went_on[1] <= kills[0], "steps of the killed launch were done again"
    assert went_on[1] < first <= kills[1]
    assert contents(tmp_path / "killed") == contents(tmp_path / "calm")


def test_the_page_has_a_before_for_each_after() -> None:
    text = PAGE.read_text("utf-8")
    assert (
        text.count("\nBefore:\n")
        == text.count("\nAfter: ")
        == len(re.findall(r"^```python file=", text, re.MULTILINE))
        == 3
    )
