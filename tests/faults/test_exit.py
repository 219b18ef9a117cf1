"""The interpreter ends while a save goes on: nobody hangs, and what was saved is saved."""

import signal
import time

import pytest

import ckptfmt
from tests.faults.driver import PATIENCE_S, committed, hear, problems, savers, send, start, until


def end_of(script, run):
    """Run a script to its end; return its status and its errors."""
    with start(script, run) as process:
        begin_s = time.monotonic()
        _, errors = process.communicate(timeout=PATIENCE_S)
        assert time.monotonic() - begin_s < PATIENCE_S
    return process.returncode, errors


def check_saved(run, steps):
    assert until(lambda: not savers())
    assert committed(run) == steps
    assert problems(run) == []


@pytest.mark.parametrize("saver", ["process", "thread"])
@pytest.mark.parametrize(
    ("where", "toy"),
    [
        ("module", "Toy(60 << 20)"),
        ("module", "TorchToy(30 << 20)"),
        ("function", "Toy()"),
        ("function", "TorchToy()"),
    ],
)
def test_exit_right_after_save_loses_nothing(run, saver, toy, where):
    body = f"""
    toy = {toy}
    checkpointer = Checkpointer(run, toy.state, saving=ckptfmt.Saving(saver="{saver}"))
    for _ in range(4):
        toy.save(checkpointer)
    """
    script = f"def main():{body}\nmain()" if where == "function" else f"if True:{body}"
    assert end_of(script, run) == (0, "")
    check_saved(run, [1, 2, 3, 4])


def test_exit_waits_until_a_slow_saver_has_been_told_everything(run):
    """The names of very many tensors are no small message: it doesn't fit into the socket."""
    script = """
import numpy as np
weights = {f"layers.{number}.weight": np.ones(8) for number in range(6000)}
checkpointer = Checkpointer(run, ckptfmt.State(weights=weights))
checkpointer.prepare()
(pid,) = savers()
send(pid, signal.SIGSTOP)
checkpointer.save(step=0)
tell(pid)
"""
    with start(script, run) as process:
        pid = int(hear(process))
        time.sleep(2)
        send(pid, signal.SIGCONT)
        _, errors = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, errors) == (0, "")
    assert until(lambda: not savers())
    assert committed(run) == [0]
    assert ckptfmt.validate(run).valid


@pytest.mark.parametrize("saver", ["process", "thread"])
def test_exit_within_the_body_ends_with_what_was_saved(run, saver):
    script = f"""
toy = Toy(32 << 20)
with Checkpointer(run, toy.state, saving=ckptfmt.Saving(saver="{saver}")) as checkpointer:
    toy.save(checkpointer)
    toy.save(checkpointer)
    sys.exit(7)
"""
    assert end_of(script, run) == (7, "")
    check_saved(run, [1, 2])


@pytest.mark.parametrize("saver", ["process", "thread"])
def test_exception_within_the_body_comes_out_as_it_is(run, saver):
    script = f"""
toy = Toy(32 << 20)
try:
    with Checkpointer(run, toy.state, saving=ckptfmt.Saving(saver="{saver}")) as checkpointer:
        toy.save(checkpointer)
        raise ValueError("of the training")
except ValueError as error:
    assert error.args == ("of the training",) and error.__context__ is None
    sys.exit(8)
"""
    assert end_of(script, run) == (8, "")
    check_saved(run, [1])


def test_exception_within_the_body_comes_out_before_that_of_a_save(run):
    script = """
toy = Toy(32 << 20)
try:
    with Checkpointer(run, toy.state) as checkpointer:
        save_and_stop(checkpointer, toy)
        os.kill(savers()[0], signal.SIGKILL)
        raise ValueError("of the training")
except ValueError:
    sys.exit(8)
"""
    status, errors = end_of(script, run)
    assert status == 8, errors
    assert "SAVER_LOST" in errors, "the failure of the save isn't logged"
    assert problems(run) == []


def test_interrupt_by_keyboard_within_the_body_ends_with_what_was_saved(run):
    """Ctrl-C reaches the whole process group; the saver isn't in it."""
    script = """
toy = Toy(32 << 20)
with Checkpointer(run, toy.state) as checkpointer:
    save_and_stop(checkpointer, toy)
    send(savers()[0], signal.SIGCONT)
    os.killpg(0, signal.SIGINT)
    time.sleep(60)
"""
    status, errors = end_of(script, run)
    assert status == -2, errors
    assert "KeyboardInterrupt" in errors
    assert until(lambda: not savers())
    assert committed(run)
    assert problems(run) == []
