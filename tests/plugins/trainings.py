"""Trainings that are killed and resumed, for the tests of plug-ins: run a script, and compare what two runs did.

A script notes each step in a `Journal`; `run` starts it as one process or as several, and has it
killed behind a step; `compare` holds the steps of a resumed run against those of one that nobody
disturbed.
"""

import contextlib
import functools
import hashlib
import json
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from ckptfmt.commit.waiting import wait_for_savers
from ckptfmt.store import open_store

#: At which step a script kills itself.
KILL_AT = "KILL_AT_STEP"
#: Scripts run in forks of one process that has imported what is slow to import: a test that starts
#: six of them would wait for that six times. Ray and JAX, which start threads, aren't among these
#: modules.
_FORKS = multiprocessing.get_context("forkserver")
_SLOW = (
    "torch",
    "tests.plugins.vision",  # before all that imports torchvision
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch._dynamo",  # the first optimizer imports it
    "torchdata.stateful_dataloader",
    "accelerate",
    "lightning.pytorch",
    "transformers.trainer",
    "tests.plugins.warm",
    "tests.preloaded",
)


def run_ranks(
    forks: Any,
    target: Callable[..., None],
    directory: Path,
    told: Mapping[str, Any],
    *,
    processes: int = 1,
    kill_at: int | None = None,
    exitcode: int = 0,
    env: Mapping[str, str] | None = None,
) -> None:
    """Train in processes of their own; process 0 ends or is killed, and then the others are, too.

    Args:
        forks: the context of the processes.
        target: called with the directory, the environment and `told`.
        kill_at: the step behind which each process kills itself.
        exitcode: the expected exit code of process 0 if no process is killed.
        env: more variables of the environment.
    """
    env = dict(env or {})
    if kill_at is not None:
        env[KILL_AT] = str(kill_at)
    if processes > 1:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        env |= {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = []
    try:
        for rank in range(processes):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if processes > 1 else {}
            ranks.append(forks.Process(target=target, args=(directory, env | own, told)))
            ranks[-1].start()
        ranks[0].join(200)
        for process in ranks[1:]:
            process.join(30 if exitcode == 0 and kill_at is None else 0)
        codes = [process.exitcode for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.join()
    assert codes[0] == (exitcode if kill_at is None else -signal.SIGKILL), codes
    assert kill_at is not None or not any(codes[1:]), codes


def digest(value: object) -> str:
    """Return a digest of every bit of a nested value: tensors and arrays with dtype and shape, and plain values."""
    state = hashlib.blake2b(digest_size=12)
    for piece in _pieces(value):
        state.update(len(piece).to_bytes(8, "little"))
        state.update(piece)
    return state.hexdigest()


def _pieces(value: Any) -> Iterable[bytes]:
    if isinstance(value, Mapping):
        yield b"mapping"
        for key in sorted(value, key=repr):
            yield repr(key).encode()
            yield from _pieces(value[key])
    elif isinstance(value, list | tuple):
        yield b"list"
        for item in value:
            yield from _pieces(item)
    elif hasattr(value, "shape") and hasattr(value, "dtype"):
        if hasattr(value, "full_tensor"):
            value = value.full_tensor()
        if hasattr(value, "detach"):
            import torch  # noqa: PLC0415 - the framework's signature

            flat = value.detach().cpu().contiguous().reshape(-1)
            content = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        else:
            import numpy as np  # noqa: PLC0415 - the framework's signature

            content = np.asarray(value).tobytes()
        yield f"{value.dtype} {tuple(value.shape)}".encode()
        yield content
    else:
        yield repr(value).encode()


def rng_digest() -> str:
    """Return a digest of the RNG streams of Python, numpy and torch."""
    import random  # noqa: PLC0415 - the framework's signature

    import numpy as np  # noqa: PLC0415 - the framework's signature
    import torch  # noqa: PLC0415 - the framework's signature

    return digest([random.getstate(), np.random.get_state(), torch.get_rng_state()])  # noqa: NPY002 - the framework's signature


class Journal:
    """What a training did, a line for each step. A step that is done again after a resume has two lines.

    Args:
        path: of the file; of several processes each has its own.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)

    def note(self, step: int, **facts: Any) -> None:
        """Note what is to be the same in every run, and die by SIGKILL where `run` asked for that.

        Args:
            step: training steps done.
            facts: numbers and texts as they are, tensors and what holds any by digest.
        """
        plain = {
            name: fact if isinstance(fact, str | int) else digest(fact)
            for name, fact in facts.items()
        }
        with self._path.open("a") as file:
            file.write(json.dumps({"step": step, **plain}) + "\n")
        if self.is_last(step):
            os.kill(os.getpid(), signal.SIGKILL)

    @staticmethod
    def is_last(step: int) -> bool:
        """Return whether this process dies behind a step, as soon as it is noted."""
        return os.environ.get(KILL_AT) == str(step)


def read(path: str | Path) -> dict[int, list[dict[str, Any]]]:
    """Return the lines of a journal by step."""
    steps: dict[int, list[dict[str, Any]]] = {}
    for line in Path(path).read_text().splitlines():
        told = json.loads(line)
        steps.setdefault(told["step"], []).append(told)
    return steps


def compare(undisturbed: str | Path, resumed: str | Path, *, last_step: int) -> list[str]:
    """Return how a resumed run differs from one that nobody disturbed: a sentence each, none if every bit is equal.

    Args:
        last_step: of both: every step up to it must be there.
    """
    right, ours = read(undisturbed), read(resumed)
    found = [
        f"step {step} is missing"
        for step in range(1, last_step + 1)
        if step not in right or step not in ours
    ]
    for step, lines in sorted(ours.items()):
        for line in lines:
            if step in right and line != right[step][0]:
                names = sorted(name for name in line if line.get(name) != right[step][0].get(name))
                found.append(f"step {step} differs in {', '.join(names)}")
    return found


def await_savers(run: str | Path) -> None:
    """Wait until the savers of a run are at their end: they outlive a kill of the training."""
    assert wait_for_savers(open_store(run, writable=True), deadline_s=600) == []


def verdict(run: str | Path) -> tuple[str, set[str], str]:
    """Return the newest verdict of a run's witness, what it compared, and the sentence on what differs, if it does.

    Of a verdict that something differs, what differs stands in the place of what was compared.
    """
    from ckptfmt.loop.step_log import read_verdicts  # noqa: PLC0415 - the framework's signature
    from ckptfmt.store import open_store  # noqa: PLC0415 - the framework's signature

    found = read_verdicts(open_store(run, writable=False))
    newest = found[max(found)]
    if newest.difference is None:
        return newest.verdict, set(newest.compared), ""
    return newest.verdict, {newest.difference.what}, newest.difference.text


def run(
    *command: str | Path,
    kill_at: int | None = None,
    processes: int = 1,
    timeout_s: float = 300.0,
    env: Mapping[str, str] | None = None,
) -> str:
    """Run a Python script to its end, or until it kills itself, and return what it printed.

    Args:
        command: the script and its arguments.
        kill_at: the step behind which process 0 dies by SIGKILL; then the others are killed, too.
        processes: how many processes run it, each with RANK, WORLD_SIZE and the like.
        env: variables beside those of this process.

    Raises: AssertionError where it ends in another way.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    variables = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **(env or {}),
    }
    root = Path(__file__).parents[2]
    variables["PYTHONPATH"] = os.pathsep.join([str(root), variables.get("PYTHONPATH", "")])
    if kill_at is not None:
        variables[KILL_AT] = str(kill_at)
    if processes > 1:
        variables |= {
            "WORLD_SIZE": str(processes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
    # Of frameworks, those that the tests of this process have imported.
    _FORKS.set_forkserver_preload([name for name in _SLOW if name.partition(".")[0] in sys.modules])
    ranks: list[Any] = []
    with contextlib.ExitStack() as stack:
        outputs = [stack.enter_context(tempfile.NamedTemporaryFile("r")) for _ in range(processes)]
        try:
            for rank, output in enumerate(outputs):
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if processes > 1 else {}
                told = [str(argument) for argument in command], variables | own, output.name
                ranks.append(_FORKS.Process(target=_run_script, args=told))
                ranks[-1].start()
            _wait(ranks, timeout_s, is_killed=kill_at is not None)
            texts = [output.read() for output in outputs]
        finally:
            for process in ranks:
                process.kill()
                process.join()
    codes = [process.exitcode for process in ranks]
    is_as_asked = not any(codes) if kill_at is None else codes[0] == -signal.SIGKILL
    assert is_as_asked, f"{codes}\n" + "\n".join(texts)[-8000:]
    return "".join(texts)


def _run_script(command: list[str], variables: dict[str, str], output: str) -> None:
    """Do in a fork what ``python SCRIPT`` does in a process of its own."""
    with Path(output).open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.clear()
    settle(variables)
    sys.path[:0] = [str(Path(__file__).parents[2])]
    sys.argv = command
    runpy.run_path(command[0], run_name="__main__")


def settle(variables: Mapping[str, str]) -> None:
    """Let a fork of a server be as a process of its own, with some more variables."""
    os.environ.update(variables)
    multiprocessing.set_start_method("fork", force=True)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)  # what OMP_NUM_THREADS says is read by the import
        _keep_reducers(sys.modules["torch"])


def _keep_reducers(torch: Any) -> None:
    """Keep each DistributedDataParallel until the process ends, which it does without destructors.

    The destructor of DDP's reducer waits, with the interpreter's lock, for a thread of gloo that may
    wait for the lock: in few of many trainings on two processes one never ended.
    """
    kept: list[Any] = []
    wrapper = torch.nn.parallel.DistributedDataParallel
    begin = wrapper.__init__

    @functools.wraps(begin)
    def begin_and_keep(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        kept.append(self)

    wrapper.__init__ = begin_and_keep


def _wait(ranks: list[Any], timeout_s: float, *, is_killed: bool) -> None:
    """Wait until all have ended, or one failed: the others would wait for it."""
    end_s = time.monotonic() + timeout_s
    while any(process.exitcode is None for process in ranks):
        codes = [process.exitcode for process in ranks]
        if (is_killed and codes[0] is not None) or any(codes):
            return
        assert time.monotonic() < end_s, f"not over in {timeout_s:g} s"
        time.sleep(0.05)
