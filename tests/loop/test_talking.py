"""What a run says: a line by process 0, to whoever runs it; nothing where logging is somebody else's."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptfmt
from ckptfmt.store.memory import MemoryStore
from tests.interface.test_group import Allgather, run_writers

PROGRAM = """
import logging, sys
import numpy as np, ckptfmt

path, lr, total, how = sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
if how == "configured":
    logging.basicConfig(level=logging.ERROR)
sampler = ckptfmt.Sampler(100, global_batch=2)
state = ckptfmt.State(
    weights={"w": np.zeros(250_000, np.float32)}, optimizer={"n": 0}, data=sampler, config={"lr": lr, "out": lr},
    harmless=("out",),
)
before = list(logging.getLogger("ckptfmt").handlers), logging.getLogger("ckptfmt").level
init_from = sys.argv[5] if how == "init" else None
with ckptfmt.Checkpointer(path, state, saving=ckptfmt.Saving(saver="thread"), init_from=init_from) as checkpointer:
    batches = iter(sampler)
    for step in checkpointer.steps(total):
        next(batches)
    if how == "later":
        logging.basicConfig(level=logging.ERROR)
        next(batches)
        checkpointer.save(step=total + 1)
assert (list(logging.getLogger("ckptfmt").handlers), logging.getLogger("ckptfmt").level) == before
"""


def lines_of(*arguments: object) -> list[str]:
    """Return what a program prints that trains."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    return done.stderr.splitlines()


def test_a_program_that_configures_no_logging_sees_a_line_for_each_event(tmp_path: Path) -> None:
    """Begun, committed, resumed with the claim, its reasons and the configuration as old -> new, nothing to do."""
    run = tmp_path / "run"
    begun, committed = lines_of(run, 0.1, 3, "plain")
    assert begun == "ckptfmt: launch 1 begins from nothing, at step 0"
    at = re.escape(str(run / "step-00000003-l0001"))
    assert re.fullmatch(
        rf"ckptfmt: step 3 COMMITTED: 976\.\d KiB in \d+\.\d\d s \(\S+ [KM]iB/s\): {at}", committed
    )
    resumed, again = lines_of(run, 0.2, 4, "plain")
    assert resumed == (
        f"ckptfmt: launch 2 goes on from step 3 of launch 1 ({run / 'step-00000003-l0001'}):"
        " claim S1 expected;"
        " config: lr 0.1 -> 0.2; config, harmless: out 0.1 -> 0.2"
    )
    assert "step 4 COMMITTED" in again
    resumed, nothing = lines_of(run, 0.2, 4, "plain")
    assert resumed.endswith("claim T1 expected")
    assert nothing == "ckptfmt: nothing is left to do: 4 of 4 steps are done"


def test_a_run_that_begins_from_another_checkpoint_says_from_which(tmp_path: Path) -> None:
    """By its path."""
    lines_of(tmp_path / "run", 0.1, 3, "plain")
    begun, _ = lines_of(tmp_path / "other", 0.1, 1, "init", tmp_path / "run")
    assert (
        begun
        == f"ckptfmt: launch 1 begins from {tmp_path / 'run' / 'step-00000003-l0001'}, at step 0"
    )


def test_who_configures_logging_is_not_talked_over(tmp_path: Path) -> None:
    """Before the run, or while it goes."""
    assert lines_of(tmp_path / "run", 0.1, 3, "configured") == []
    later = lines_of(tmp_path / "other", 0.1, 3, "later")
    assert later[0] == "ckptfmt: launch 1 begins from nothing, at step 0"
    assert not any("step 4" in line for line in later)


def test_only_process_0_speaks_and_the_others_whisper(caplog: pytest.LogCaptureFixture) -> None:
    """At DEBUG they say the same."""
    store, allgather = MemoryStore(), Allgather(2)

    def train(writer: int) -> Any:
        state = ckptfmt.State(weights={"w": np.zeros(4)}, data={"n": 1})
        agree = allgather.of(writer)
        with ckptfmt.Checkpointer(
            store, state, saver="inline", writer=(writer, 2), agree=agree
        ) as checkpointer:
            for _ in checkpointer.steps(2):
                pass
        return writer

    with caplog.at_level(logging.DEBUG, "ckptfmt"):
        assert run_writers(2, train) == [0, 1]
        assert run_writers(2, train) == [0, 1]
    for words in (
        "begins from nothing",
        "step 2 COMMITTED",
        "goes on from step 2 of launch 1",
        "nothing is left to do",
    ):
        levels = sorted(record.levelno for record in caplog.records if words in record.getMessage())
        assert levels[0] == logging.DEBUG, words
        assert len([level for level in levels if level >= logging.INFO]) == 1, words
