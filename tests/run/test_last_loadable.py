"""The last checkpoint that can be loaded stays, whatever a person asks to delete, unless the person insists."""

import os
import pathlib
from typing import Any

import numpy as np
import pytest

from ckptfmt.__main__ import main
from ckptfmt.checkpointer import Checkpointer
from ckptfmt.errors import CkptError, Code
from ckptfmt.run.catalog import Run
from ckptfmt.state import State
from tests.builders import error_of


def train(path: pathlib.Path, count: int = 3) -> None:
    weights = {"w": np.zeros(5000)}
    with Checkpointer(
        path, State(weights=weights, rng=False), every=1, saver="inline"
    ) as checkpointer:
        for step in checkpointer.steps(checkpointer.step + count):
            weights["w"][...] = step + 1


def spoil(path: pathlib.Path, step: int, how: str) -> None:
    (directory,) = path.glob(f"step-{step:08d}-*")
    (file,) = directory.glob("weights-*")
    if how == "missing":
        file.unlink()
    elif how == "cut":
        os.truncate(file, 100)
    else:
        file.chmod(0o644)
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def steps_of(path: pathlib.Path) -> list[int]:
    return [one.step for one in Run(path).list() if one.state == "committed"]


@pytest.fixture
def path(tmp_path: pathlib.Path) -> pathlib.Path:
    train(tmp_path / "run")
    return tmp_path / "run"


def call(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str]:
    capsys.readouterr()
    code = main([str(one) for one in argv])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


@pytest.mark.parametrize("how", ["missing", "cut", "bit"])
def test_gc_keeps_the_last_checkpoint_that_can_be_loaded(
    path: pathlib.Path, how: str, capsys: Any
) -> None:
    """REQ-CMT-052: the newest is damaged, and would be the only one left."""
    spoil(path, 3, how)
    for options in (("--dry-run",), ()):
        code, out = call(capsys, "gc", path, "--keep", 1, *options)
        assert code == 1
        assert (
            "it is the last checkpoint of the run that can be loaded (step-00000003-l0001: " in out
        )
    assert steps_of(path) == [2, 3]
    train(path, 1)
    assert steps_of(path) == [2, 3, 3]  # the second one is of launch 2, which went on from step 2


def test_gc_of_a_run_of_which_nothing_can_be_loaded_retires_nothing(
    path: pathlib.Path, capsys: Any
) -> None:
    for step in (1, 2, 3):
        spoil(path, step, "bit")
    code, out = call(capsys, "gc", path, "--keep", 1)
    assert code == 1
    assert "no checkpoint of the run can be loaded" in out
    assert steps_of(path) == [1, 2, 3]
    assert call(capsys, "gc", path, "--keep", 1, "--force")[0] == 0
    assert steps_of(path) == [3]


def test_gc_where_what_stays_is_whole_is_as_before(path: pathlib.Path, capsys: Any) -> None:
    spoil(path, 1, "bit")
    code, _ = call(capsys, "gc", path, "--keep", 1)
    assert code == 0
    assert steps_of(path) == [3]


@pytest.mark.parametrize("how", ["missing", "cut", "bit"])
def test_rm_and_delete_refuse_the_last_checkpoint_that_can_be_loaded(
    path: pathlib.Path, how: str, capsys: Any
) -> None:
    """REQ-CMT-052: the refusal names the others, and how to delete the checkpoint all the same."""
    for step in (2, 3):
        spoil(path, step, how)
    error: CkptError = error_of(lambda: Run(path).delete(1))
    assert error.code == Code.CHECKPOINT_NEEDED
    assert "last checkpoint of the run that can be loaded" in error.detail
    code, out = call(capsys, "rm", path, 1)
    assert code == 2
    assert "ckptfmt rm --force" in out
    assert steps_of(path) == [1, 2, 3]
    assert call(capsys, "rm", "--force", path, 1)[0] == 0
    assert steps_of(path) == [2, 3]


def test_what_is_damaged_itself_may_be_deleted(path: pathlib.Path) -> None:
    spoil(path, 2, "bit")
    Run(path).delete(2)
    assert steps_of(path) == [1, 3]
    Run(path).delete(1, force=True)
    assert steps_of(path) == [3]
