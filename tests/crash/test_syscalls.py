"""A job is killed at each system call that changes a disk, one after the other, by strace."""

import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile

import pytest

from tests.crash.trainer import one_launch
from tests.explorer.crashes import scan
from tests.explorer.judge import Judge, Promises
from tests.explorer.telling import tell
from tests.store.helpers import FAST_DIRECTORY, ROOT

SYSCALLS = ("mkdirat", "linkat", "unlinkat", "renameat", "fsync")


class Trainers:
    """Launches with one save each, in processes that are forked from one that has imported everything."""

    def __init__(self):
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.crash.trainer"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._put, self._get = self._server.stdin, self._server.stdout

    def launch(self, root, syscall, number):
        """Run a launch, killed at its `number`-th `syscall`; return its marks, and its exit code."""
        self._put.write(f"{root}\n")
        self._put.flush()
        pid = int(self._get.readline().removeprefix("pid "))
        inject = f"inject={syscall}:signal=KILL:when={number}"
        command = [
            "strace",
            "-f",
            "-o",
            "/dev/null",
            "-e",
            f"trace={syscall}",
            "-e",
            inject,
            "-p",
            str(pid),
        ]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as strace:
            assert strace.stderr is not None
            said = strace.stderr.readline()
            assert "attached" in said, said
            os.kill(pid, signal.SIGCONT)
            marks = []
            while not (line := self._get.readline()).startswith("ended "):
                assert line, "the trainers' process has ended"
                marks.append(line.rstrip("\n"))
            strace.communicate()
        return marks, int(line.removeprefix("ended "))

    def close(self):
        self._put.close()
        self._get.close()
        assert self._server.wait(60) == 0


@pytest.fixture(scope="module")
def trainers():
    """Skip where there is no strace, or where it may not trace."""
    if shutil.which("strace") is None:
        pytest.skip("strace isn't installed")
    tried = subprocess.run(
        ["strace", "-qq", "-o", "/dev/null", "-e", "inject=fsync:signal=KILL:when=1", "true"],
        capture_output=True,
        check=False,
    )
    if tried.returncode != 0:
        pytest.skip("strace isn't allowed to trace")
    trainers = Trainers()
    yield trainers
    trainers.close()


@pytest.mark.slow
@pytest.mark.timeout(2000)
@pytest.mark.parametrize("stride", [4, pytest.param(1, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("syscall", SYSCALLS)
def test_a_kill_at_each_system_call_loses_nothing(syscall, stride, trainers):
    """`make test` kills at one call in so many; the explorer of crashes has every one of them, on a model of a disk."""
    judge = Judge()
    killed_count = 0
    for number in range(1, 200, stride):
        with tempfile.TemporaryDirectory(dir=FAST_DIRECTORY, prefix="ckptfmt-strace-") as directory:
            root = pathlib.Path(directory) / "run"
            before: list[str] = []
            one_launch(root, tell=before.append)
            marks, exit_code = trainers.launch(root, syscall, number)
            promises = Promises()
            for mark in [*before, *marks]:
                promises = promises.after(mark)
            assert judge.judge(scan(root).files, promises) == [], f"killed at {syscall} {number}"
            if exit_code == 0:
                break
            assert exit_code == -signal.SIGKILL
            killed_count += 1
            one_launch(root)  # in place, with no manual step

    tell(f"{killed_count} kills, one at each {syscall}, or one in {stride}")
    assert killed_count >= 1
