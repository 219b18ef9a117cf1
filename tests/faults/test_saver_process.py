"""What the saver's process is like, seen from outside."""

import contextlib
import os
import pathlib
import signal

import pytest

from ckptfmt.checkpointer import Checkpointer
from tests.explorer.telling import tell
from tests.faults.driver import (
    PATIENCE_S,
    TorchToy,
    Toy,
    committed,
    problems,
    save_and_stop,
    savers,
    send,
)


def anonymous_nbytes(pid):
    """What a process has of its own in memory: no file, nothing shared."""
    fields = dict(
        line.split(":") for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    return int(fields["RssAnon"].split()[0]) * 1024


def test_saver_has_a_session_and_no_streams_of_its_own(run):
    toy = Toy()
    with Checkpointer(run, toy.state, nice=5) as checkpointer:
        toy.save(checkpointer).wait("COMMITTED", PATIENCE_S)
        (pid,) = savers()
        assert os.getsid(pid) == pid
        assert os.getpgid(pid) == pid
        descriptors = {}
        for link in pathlib.Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # the saver closed it meanwhile
                descriptors[int(link.name)] = str(link.readlink())
        assert {descriptors[number] for number in range(3)} == {"/dev/null"}
        assert sum("memfd:ckptfmt-slot" in name for name in descriptors.values()) == 1
        assert pathlib.Path(f"/proc/{pid}/cwd").readlink() == pathlib.Path("/")
        niceness = os.getpriority(os.PRIO_PROCESS, 0) + 5
        assert os.getpriority(os.PRIO_PROCESS, pid) == niceness
        session = pathlib.Path(f"/proc/{pid}/autogroup")
        # Where sessions share the processors, a process alone can't stand back behind those of
        # another session.
        assert not session.exists() or session.read_text().split()[-2:] == ["nice", str(niceness)]
    assert savers() == [], "close doesn't wait for the saver's end"


@pytest.mark.slow
def test_saver_of_a_torch_trainer_has_no_torch_and_little_memory(run):
    toy = TorchToy(300 << 20)
    with Checkpointer(run, toy.state, keep=1) as checkpointer:
        for _ in range(4):
            toy.save(checkpointer).wait("COMMITTED", PATIENCE_S)
        (pid,) = savers()
        assert "libtorch" not in pathlib.Path(f"/proc/{pid}/maps").read_text()
        nbytes = anonymous_nbytes(pid)
        tell(f"{nbytes / 2**20:.1f} MiB of the saver's own")
        assert nbytes <= 48 << 20
    assert problems(run) == []


def test_saver_goes_on_under_signals_that_mean_the_training(run):
    toy = Toy(32 << 20)
    with Checkpointer(run, toy.state) as checkpointer:
        handle = save_and_stop(checkpointer, toy)
        (pid,) = savers()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            send(pid, number)
        send(pid, signal.SIGCONT)
        assert handle.wait(timeout_s=PATIENCE_S) is not None
        assert savers() == [pid]
    assert handle.step in committed(run)
