"""Storage that doesn't answer: the training goes on, nothing piles up, whoever waits has a deadline."""

import contextlib
import functools
import pathlib
import shutil
import signal
import subprocess
import threading
import time

import pytest

from ckptfmt.checkpointer import Checkpointer
from tests.builders import slot_count
from tests.faults.driver import (
    PATIENCE_S,
    Toy,
    code_of,
    committed,
    hear,
    outcome_of,
    problems,
    savers,
    send,
    start,
    until,
)

NBYTES = 8 << 20


@pytest.fixture
def freezable(tmp_path):
    """A file system that can be frozen: what writes to it then waits, deaf to every signal."""
    image, place = tmp_path / "image", tmp_path / "disk"
    place.mkdir()
    with image.open("wb") as file:
        file.truncate(64 << 20)
    commands = [
        ["mkfs.ext4", "-q", str(image)],
        ["mount", "-o", "loop", str(image), str(place)],
        ["fsfreeze", "--freeze", str(place)],
    ]
    for number, command in enumerate(commands):
        if (
            not shutil.which(command[0])
            or subprocess.run(command, capture_output=True, check=False).returncode
        ):
            if number == len(commands) - 1:
                subprocess.run(["umount", "--lazy", str(place)], check=True)
            pytest.skip(f"no {command[0]} here")
    subprocess.run(["fsfreeze", "--unfreeze", str(place)], check=True)
    yield place
    subprocess.run(["fsfreeze", "--unfreeze", str(place)], capture_output=True, check=False)
    assert until(lambda: not savers())
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def resident_nbytes():
    """What this process has in memory, shared memory included."""
    fields = dict(
        line.split(":") for line in pathlib.Path("/proc/self/status").read_text().splitlines()
    )
    return int(fields["VmRSS"].split()[0]) * 1024


@contextlib.contextmanager
def hanging(checkpointer, toy):
    """Save once, then stop the saver for as long as this lasts."""
    toy.save(checkpointer).wait("COMMITTED", PATIENCE_S)
    (pid,) = savers()
    send(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        send(pid, signal.SIGCONT)


def test_saves_are_skipped_and_nothing_piles_up(run):
    toy = Toy(NBYTES)
    with Checkpointer(run, toy.state, when_busy="skip") as checkpointer:
        with hanging(checkpointer, toy):
            begin_s = time.monotonic()
            # The second one finds the slot busy, and has a second slot made for the third one.
            first, skipped, second = [toy.save(checkpointer) for _ in range(3)]
            assert skipped.state == "SKIPPED"
            handles = [first, second]
            before_nbytes = resident_nbytes()
            rest = [toy.save(checkpointer) for _ in range(99)]
            assert time.monotonic() - begin_s < PATIENCE_S / 2
            assert {handle.state for handle in handles} == {"STAGING"}
            assert {handle.state for handle in rest} == {"SKIPPED"}
            assert resident_nbytes() - before_nbytes < NBYTES
            assert slot_count() == 2
            assert len(savers()) == 1
        assert all(handle.wait(timeout_s=PATIENCE_S) for handle in handles)
        assert toy.save(checkpointer).wait(timeout_s=PATIENCE_S) is not None
    assert committed(run) == [1, 2, 4, 104]
    assert problems(run) == []


def test_save_that_waits_for_a_slot_has_a_deadline(run):
    toy = Toy(NBYTES)
    with Checkpointer(run, toy.state, deadline_s=4, failed_saves=0) as checkpointer:
        with hanging(checkpointer, toy):
            handles = [toy.save(checkpointer) for _ in range(2)]
            for _ in range(2):
                begin_s = time.monotonic()
                assert code_of(lambda: toy.save(checkpointer)) == "SLOTS_BUSY"
                assert 3 < time.monotonic() - begin_s < PATIENCE_S / 2
        assert all(handle.wait(timeout_s=PATIENCE_S) for handle in handles)
        assert toy.save(checkpointer).wait(timeout_s=PATIENCE_S) is not None
    assert committed(run) == [1, 2, 3, 6]
    assert problems(run) == []


def test_close_has_a_deadline_and_loses_nothing(run):
    toy = Toy(NBYTES)
    checkpointer = Checkpointer(run, toy.state, deadline_s=4)
    with hanging(checkpointer, toy):
        handles = [toy.save(checkpointer) for _ in range(2)]
        begin_s = time.monotonic()
        assert code_of(checkpointer.close) == "SAVE_PENDING"
        assert 3 < time.monotonic() - begin_s < PATIENCE_S / 2
        assert {outcome_of(handle) for handle in handles} == {"SAVER_LOST"}, (
            "somebody may wait for them"
        )
        assert slot_count() == 0
    assert until(lambda: not savers())
    assert committed(run) == [1, 2, 3]
    assert problems(run) == []


EXIT = """
toy = Toy(8 << 20)
checkpointer = Checkpointer(run, toy.state)
toy.save(checkpointer).wait("COMMITTED")
(pid,) = savers()
send(pid, signal.SIGSTOP)
toy.save(checkpointer)
toy.save(checkpointer)
tell("saved")
"""


@pytest.mark.parametrize("end", ["", "sys.exit(3)", "raise ValueError", "del checkpointer, toy"])
def test_interpreter_ends_promptly_and_loses_nothing(run, end):
    with start(EXIT + end, run) as trainer:
        assert hear(trainer) == "saved"
        begin_s = time.monotonic()
        _, errors = trainer.communicate(timeout=PATIENCE_S)
        assert time.monotonic() - begin_s < PATIENCE_S / 3
    assert trainer.returncode == {"sys.exit(3)": 3, "raise ValueError": 1}.get(end, 0), errors
    assert ("ValueError" in errors) == ("ValueError" in end)
    (pid,) = savers()
    send(pid, signal.SIGCONT)
    assert until(lambda: not savers())
    assert committed(run) == [1, 2, 3]
    assert problems(run) == []


FROZEN = """
toy = Toy(8 << 20)
checkpointer = Checkpointer(run, toy.state, when_busy="skip", deadline_s=4)
toy.save(checkpointer).wait("COMMITTED")
tell("ready")
sys.stdin.readline()
states = [toy.save(checkpointer).state for _ in range(5)]
try:
    checkpointer.close()
except ckptfmt.CkptError as error:
    tell(*states, error.code)
"""


def run_frozen(script: str, place: pathlib.Path) -> tuple[list[str], str]:
    """Run a script, freeze the file system at its first word, and return its later words and log.

    All words come while the file system is frozen. The process ends when the file system is thawed:
    no signal ends a thread that waits for a frozen file system, such as the thread of the step log.
    """
    with start(script, place / "run") as trainer:
        assert hear(trainer) == "ready"
        subprocess.run(["fsfreeze", "--freeze", str(place)], check=True)
        thaw = functools.partial(
            subprocess.run, ["fsfreeze", "--unfreeze", str(place)], check=False
        )
        late = threading.Timer(PATIENCE_S, thaw)
        late.start()
        try:
            assert trainer.stdin is not None
            trainer.stdin.write("go\n")
            trainer.stdin.flush()
            words = hear(trainer).split()
            assert late.is_alive(), "nothing was told before the file system was thawed"
        finally:
            late.cancel()
            thaw()
        _, errors = trainer.communicate(timeout=PATIENCE_S)
    assert trainer.returncode == 0, errors
    return words, errors


def test_frozen_file_system_stops_no_training(freezable):
    words, _ = run_frozen(FROZEN, freezable)
    # The second save finds the slot busy, and has a second slot made for the third save.
    assert words == ["STAGING", "SKIPPED", "STAGING", "SKIPPED", "SKIPPED", "SAVE_PENDING"]
    assert until(lambda: not savers())
    assert committed(freezable / "run") == [1, 2, 4]
    assert problems(freezable / "run") == []


STEPS = """
toy = Toy(8 << 20)
checkpointer = Checkpointer(run, toy.state, deadline_s=4)
for step in checkpointer.steps(12):
    toy.train()
    if step == 2:
        checkpointer._saves._background._settle()  # the saver has started
        tell("ready")
        sys.stdin.readline()
try:
    checkpointer.close()
except ckptfmt.CkptError as error:
    tell(checkpointer.step, error.code)
"""


def test_frozen_file_system_stops_no_loop_of_steps(freezable):
    words, errors = run_frozen(STEPS, freezable)
    assert words == ["12", "SAVE_PENDING"]
    assert "the storage hasn't taken the last records of steps" in errors
    assert until(lambda: not savers())
    assert committed(freezable / "run") == [12]
    assert problems(freezable / "run") == []
