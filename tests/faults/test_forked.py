"""Processes that the trainer forks have nothing of its saves: they neither keep the saver waiting nor disturb it."""

import os
import pathlib
import signal

import pytest

from tests.faults.driver import (
    PATIENCE_S,
    Toy,
    committed,
    hear,
    problems,
    resume,
    savers,
    send,
    start,
    until,
)

NBYTES = 32 << 20


def inherited(pid):
    """What a process holds of another's saves: slots by descriptor or mapping, and locks."""
    place = pathlib.Path("/proc", str(pid))
    links = [str(link.readlink()) for link in (place / "fd").iterdir()]
    found = [link for link in links if "ckptfmt" in link or "/savers/" in link]
    return found + [
        line for line in (place / "maps").read_text().splitlines() if "ckptfmt-slot" in line
    ]


def sockets(pid):
    links = [str(link.readlink()) for link in pathlib.Path("/proc", str(pid), "fd").iterdir()]
    return {link for link in links if link.startswith("socket:")}


FORK = """
pid = os.fork()
if pid == 0:
    time.sleep(600)
    os._exit(0)
"""
LOADER = """
import torch
class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 1000
    def __getitem__(self, index):
        return index
batches = iter(torch.utils.data.DataLoader(Slow(), num_workers=1, prefetch_factor=2, multiprocessing_context="fork"))
next(batches)
pid = batches._workers[0].pid
"""


@pytest.mark.parametrize("fork", [FORK, LOADER], ids=["fork", "loader"])
def test_forked_process_that_outlives_the_trainer_keeps_nothing_of_its_saves(run, fork):
    script = f"""
toy = Toy({NBYTES})
checkpointer = Checkpointer(run, toy.state)
toy.save(checkpointer).wait("COMMITTED")
toy.save(checkpointer)
{fork}
handle = save_and_stop(checkpointer, toy)
tell(handle.step, pid)
sys.stdin.readline()
"""
    with start(script, run) as trainer:
        step, child = map(int, hear(trainer).split())
        (saver,) = savers()
        try:
            assert inherited(child) == []
            assert inherited(trainer.pid) != []
            assert not sockets(child) & sockets(trainer.pid)
            trainer.kill()
            trainer.wait(PATIENCE_S)
            send(saver, signal.SIGCONT)
            assert until(lambda: saver not in savers())
            assert fork is LOADER or pathlib.Path("/proc", str(child)).exists()
        finally:
            os.kill(child, signal.SIGKILL)
    assert step in committed(run)
    assert problems(run) == []
    assert resume(run, Toy(NBYTES)) == step


@pytest.mark.parametrize(
    "end", ["sys.exit()", "raise SystemExit(0)", "pass", "checkpointer.close(); os._exit(0)"]
)
@pytest.mark.parametrize("moment", ["between", "amid"])
def test_forked_process_that_ends_leaves_the_saves_alone(run, end, moment):
    """It runs what was to be run at the trainer's exit, and leaves the trainer's `with`."""
    script = f"""
toy = Toy({NBYTES})
with Checkpointer(run, toy.state) as checkpointer:
    handle = toy.save(checkpointer)
    if "{moment}" == "between":
        handle.wait("COMMITTED")
    parent = os.getpid()
    if os.fork() == 0:
        {end}
    if os.getpid() == parent:
        _, status = os.wait()
        assert status == 0
        handle.wait("COMMITTED")
        for _ in range(3):
            toy.save(checkpointer).wait("COMMITTED")
        assert len(savers()) == 1
        tell("well")
"""
    with start(script, run) as trainer:
        output, errors = trainer.communicate(timeout=PATIENCE_S)
    assert (trainer.returncode, output, errors) == (0, "well\n", "")
    assert committed(run) == [1, 2, 3, 4]
    assert problems(run) == []


def test_forked_process_may_not_save(run):
    script = """
toy = Toy()
checkpointer = Checkpointer(run, toy.state)
toy.save(checkpointer).wait("COMMITTED")
if os.fork() == 0:
    tell(code_of(lambda: toy.save(checkpointer)))
    os._exit(0)
os.wait()
toy.save(checkpointer).wait("COMMITTED")
checkpointer.close()
"""
    with start(script, run) as trainer:
        output, errors = trainer.communicate(timeout=PATIENCE_S)
    assert (trainer.returncode, output, errors) == (0, "SAVER_LOST\n", "")
    assert committed(run) == [1, 2]
