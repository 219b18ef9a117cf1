"""A new launch begins while the saver of a killed one is still at work."""

import os
import signal
import threading
import time

from ckptfmt.checkpointer import Checkpointer
from tests.faults.driver import (
    PATIENCE_S,
    Toy,
    code_of,
    committed,
    outcome_of,
    problems,
    resume,
    savers,
    send,
    start,
    until,
)

NBYTES = 32 << 20
TRAINER = f"""
toy = Toy({NBYTES})
checkpointer = Checkpointer(run, toy.state)
toy.save(checkpointer).wait("COMMITTED")
handle = save_and_stop(checkpointer, toy)
tell(handle.step)
os.kill(os.getpid(), signal.SIGKILL)
"""


def orphan_saver(run):
    """Leave a stopped saver without its trainer; return it, and the step that it has staged."""
    with start(TRAINER, run) as trainer:
        output, errors = trainer.communicate(timeout=PATIENCE_S)
    assert trainer.returncode == -signal.SIGKILL, errors
    (pid,) = savers()
    return pid, int(output)


def test_launch_waits_for_what_an_old_saver_has_staged(run):
    """REQ-RUN-018."""
    pid, step = orphan_saver(run)
    assert step not in committed(run)
    timer = threading.Timer(1.0, os.kill, (pid, signal.SIGCONT))
    timer.start()
    assert resume(run, Toy(NBYTES)) == step
    timer.join()
    assert problems(run) == []


def test_launch_goes_on_without_a_saver_that_is_too_slow(run):
    pid, step = orphan_saver(run)
    toy = Toy(NBYTES)
    begin_s = time.monotonic()
    with Checkpointer(run, toy.state, deadline_s=4, keep=1, allow="streams") as checkpointer:
        assert checkpointer.step == step - 1
        assert time.monotonic() - begin_s < PATIENCE_S / 2
        checkpointer.restore_rng()
        # Late, beside the new one's saves: it commits, is fenced, or is given up, and does no harm.
        send(pid, signal.SIGCONT)
        for _ in range(3):
            handle = toy.save(checkpointer)
            assert handle.wait_over(PATIENCE_S)
            assert handle.state == "COMMITTED"
            assert problems(run) == []
        assert until(lambda: pid not in savers())
    assert problems(run) == []
    assert resume(run, Toy(NBYTES)) == step + 2
    assert problems(run) == []


def test_late_commit_of_an_old_saver_is_beside_the_lineage(run):
    pid, step = orphan_saver(run)
    assert resume(run, Toy(NBYTES), deadline_s=0.2) == step - 1
    send(pid, signal.SIGCONT)
    assert until(lambda: not savers())
    assert problems(run) == []
    # The launch after: what its own line says, whether or not the late one is whole by now.
    assert resume(run, Toy(NBYTES)) == step - 1
    assert problems(run) == []


def test_saver_killed_with_its_trainer_is_waited_for_by_nobody(run):
    pid, step = orphan_saver(run)
    os.kill(pid, signal.SIGKILL)
    begin_s = time.monotonic()
    assert resume(run, Toy(NBYTES)) == step - 1
    assert time.monotonic() - begin_s < PATIENCE_S / 2
    assert problems(run) == []


def test_saver_that_hears_of_a_new_launch_before_it_begins_writes_nothing(run):
    """What is staged in a saver's socket and not yet in its hands: fenced, since nobody could wait for it."""
    toy = Toy(NBYTES)
    old = Checkpointer(run, toy.state)
    toy.save(old).wait("COMMITTED", PATIENCE_S)
    (pid,) = savers()
    send(pid, signal.SIGSTOP)
    handle = toy.save(old)
    assert resume(run, Toy(NBYTES), deadline_s=0.2) == 1
    send(pid, signal.SIGCONT)
    assert outcome_of(handle) == "FENCED"
    assert code_of(old.close) == "FENCED"
    assert committed(run) == [1]
    assert problems(run) == []
