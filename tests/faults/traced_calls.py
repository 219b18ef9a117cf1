"""Operations in processes whose system calls strace fails, those of the saver's process too.

A request is a line with the name of an operation and the root of its directory. Each operation runs
in a fork of this process, which has imported everything. The fork stops itself, so that strace can
attach. Its outcome comes by shared memory: no system call of the outcome can fail.
"""

import json
import logging
import mmap
import os
import pathlib
import signal
import sys
import tempfile
from typing import Final

import ckptfmt
from tests.faults.every_call import SCENES, Scene, Told, Toy, do, prepare_run, train
from tests.store.helpers import FAST_DIRECTORY

_MEMORY_NBYTES: Final = 1 << 16


def _resume(root: pathlib.Path, told: Told) -> None:
    train(root / "run", told, count=1, keep=2, saver="process", deadline_s=20)


def _prepare_link(root: pathlib.Path) -> Told:
    toy = Toy()
    toy.set(2)
    ckptfmt.save(root / "old", toy.state, step=2)
    (root / "alone").symlink_to("old")
    return {"old": 2}


def _save_over_link(root: pathlib.Path, told: Told) -> None:
    toy = Toy()
    toy.set(5)
    ckptfmt.save(root / "alone", toy.state, step=5, replace=True)
    told["alone"] = 5


OPERATIONS: Final = {
    "resume": Scene(prepare=prepare_run, act=_resume, keep=2),
    "save over a link": Scene(prepare=_prepare_link, act=_save_over_link),
    "load": SCENES["load"],
    "gc": SCENES["gc"],
}


def serve() -> None:
    """Do an operation for each request; tell the process, and then the outcome as JSON."""
    with tempfile.TemporaryDirectory(dir=FAST_DIRECTORY, prefix="ckptfmt-traced-") as directory:
        for name, scene in OPERATIONS.items():  # what an operation imports late
            root = pathlib.Path(directory, name)
            root.mkdir()
            scene.act(root, scene.prepare(root))
    for line in sys.stdin:
        request = json.loads(line)
        memory = mmap.mmap(-1, _MEMORY_NBYTES)
        pid = os.fork()
        if pid == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
            told: Told = request["told"]
            outcome, problem = do(OPERATIONS[request["name"]], pathlib.Path(request["root"]), told)
            content = json.dumps({"outcome": outcome, "problem": problem, "told": told}).encode()
            memory[: len(content)] = content
            os._exit(0)
        os.waitpid(pid, os.WUNTRACED)
        _tell({"pid": pid})
        _, status = os.waitpid(pid, 0)
        content = memory[:].rstrip(b"\0") or b"{}"
        _tell({"exit": os.waitstatus_to_exitcode(status), **json.loads(content)})


def _tell(answer: dict[str, object]) -> None:
    os.write(1, f"{json.dumps(answer)}\n".encode())


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    serve()
