"""A job is killed at each system call that changes a disk, one after the other, by strace."""

import pathlib
import shutil
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
KILLED = (-9, 137)


def strace(root, syscall, number):
    """Run one launch with one save under strace, killed at its `number`-th `syscall`."""
    inject = f"inject={syscall}:signal=KILL:when={number}"
    command = ["strace", "-qq", "-f", "-o", "/dev/null", "-e", f"trace={syscall}", "-e", inject]
    command += [sys.executable, "-m", "tests.crash.trainer", str(root)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)


@pytest.fixture(scope="module")
def _ptrace():
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


@pytest.mark.slow
@pytest.mark.timeout(2000)
@pytest.mark.usefixtures("_ptrace")
@pytest.mark.parametrize("syscall", SYSCALLS)
def test_a_kill_at_each_system_call_loses_nothing(syscall):
    judge = Judge()
    killed_count = 0
    for number in range(1, 200):
        with tempfile.TemporaryDirectory(dir=FAST_DIRECTORY, prefix="ckptfmt-strace-") as directory:
            root = pathlib.Path(directory) / "run"
            before: list[str] = []
            one_launch(root, tell=before.append)
            done = strace(root, syscall, number)
            promises = Promises()
            for mark in [*before, *done.stdout.splitlines()]:
                promises = promises.after(mark)
            assert judge.judge(scan(root).files, promises) == [], f"killed at {syscall} {number}"
            if done.returncode == 0:
                break
            assert done.returncode in KILLED, done.stderr
            killed_count += 1
            one_launch(root)  # in place, with no manual step

    tell(f"{killed_count} kills, one at each {syscall}")
    assert killed_count >= 1
