"""System calls of real processes fail by strace: also those that don't pass through a store."""

import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile

import pytest

from tests.explorer.telling import tell
from tests.faults.every_call import Judge, do
from tests.faults.traced_calls import OPERATIONS
from tests.store.helpers import FAST_DIRECTORY, ROOT

#: The system calls that fail, each with the error that a kernel is likely to return. Memory of a
#: slot comes from memfd_create and ftruncate, the free space of a cache from statfs.
SYSCALLS = {
    "openat": "EMFILE",
    "newfstatat": "EIO",
    "getdents64": "EIO",
    "pread64": "EIO",
    "preadv": "EIO",
    "flock": "ENOLCK",
    "mkdirat": "ENOSPC",
    "write": "ENOSPC",
    "fsync": "EIO",
    "linkat": "EIO",
    "renameat": "EIO",
    "renameat2": "EIO",
    "unlinkat": "EROFS",
    "unlink": "EROFS",
    "mkdir": "ENOSPC",
    "rename": "EIO",
    "ftruncate": "EIO",
    "memfd_create": "ENOMEM",
}


class Traced:
    """A process that does operations under strace."""

    def __init__(self):
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.traced_calls"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._put, self._get = self._server.stdin, self._server.stdout

    def do(self, name, root, told, fault, log):
        """Do an operation while strace injects `fault`; return the answer, and the failed calls."""
        syscall = fault.partition(":")[0]
        self._put.write(f"{json.dumps({'name': name, 'root': str(root), 'told': told})}\n")
        self._put.flush()
        pid = json.loads(self._get.readline())["pid"]
        words = ["-f", "-o", str(log), "-e", f"trace={syscall}", "-e", f"inject={fault}"]
        with subprocess.Popen(
            ["strace", *words, "-p", str(pid)], stderr=subprocess.PIPE, text=True
        ) as strace:
            assert strace.stderr is not None
            assert "attached" in strace.stderr.readline()
            os.kill(pid, signal.SIGCONT)
            answer = json.loads(self._get.readline())
            strace.communicate()
        return answer, log.read_text("utf-8", "replace").count("(INJECTED)")

    def close(self):
        self._put.close()
        self._get.close()
        assert self._server.wait(60) == 0


@pytest.fixture(scope="module")
def traced():
    """Skip where there is no strace, or where it may not trace."""
    if shutil.which("strace") is None:
        pytest.skip("strace isn't installed")
    tried = subprocess.run(
        ["strace", "-qq", "-o", "/dev/null", "-e", "inject=fsync:error=EIO:when=1", "true"],
        capture_output=True,
        check=False,
    )
    if tried.returncode != 0:
        pytest.skip("strace isn't allowed to trace")
    traced = Traced()
    yield traced
    traced.close()


def fail_once(traced, name, start, told, fault):
    """Do an operation with a fault, then without; return the outcome, the failures, the problems."""
    scene, judge, told = OPERATIONS[name], Judge(), dict(told)
    with tempfile.TemporaryDirectory(dir=FAST_DIRECTORY, prefix="ckptfmt-traced-") as directory:
        root = pathlib.Path(directory) / "root"
        shutil.copytree(start, root, symlinks=True)
        answer, failed = traced.do(name, root, told, fault, pathlib.Path(directory) / "log")
        problems = [answer["problem"]] if answer.get("problem") else []
        if answer["exit"] or "outcome" not in answer:
            problems.append(f"the process ended: {answer}")
        told = answer.get("told", told)
        problems += [*judge.find_lost(root, scene, told), *judge.find_silent(root)]
        again, problem = do(scene, root, told)
        if again != "ok":
            problems.append(f"stuck: {again} {problem}")
        problems += [*judge.find_lost(root, scene, told), *judge.find_silent(root)]
    return answer.get("outcome"), failed, problems


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("sample", [2, pytest.param(None, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_failing_call_of_a_process_is_an_exact_result_or_a_named_error(
    name, sample, traced, tmp_path
):
    """`make test` takes a few calls by chance; the N-th call of a thread fails, or all from it on."""
    told = OPERATIONS[name].prepare(tmp_path)
    rng = random.Random(name)
    outcomes: dict[str, int] = {}
    failed_count, problems = 0, []
    syscalls = [*SYSCALLS] if sample is None else rng.sample([*SYSCALLS], sample)
    for syscall in syscalls:
        for later in ("", "+"):
            numbers = range(1, 1000) if sample is None else [rng.randint(1, 6)]
            for number in numbers:
                fault = f"{syscall}:error={SYSCALLS[syscall]}:when={number}{later}"
                outcome, failed, found = fail_once(traced, name, tmp_path, told, fault)
                if not failed:
                    break
                outcomes[outcome] = outcomes.get(outcome, 0) + 1
                failed_count += failed
                problems += [f"{fault}: {problem}" for problem in found]
    tell(f"{name}: {sum(outcomes.values())} faults, {failed_count} failed calls: {outcomes}")
    assert problems == []
