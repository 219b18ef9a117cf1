"""Launch a program several times as it is, and note what it trains on and with which result.

Usage: observed.py FOLDER PROGRAM MODULES KILLS RANKS

A launch runs in a fork of this process, which has imported the modules: a test of many launches
imports a framework once. KILLS is a list in JSON with the event at which each launch dies by
SIGKILL; null is a launch that ends by itself. RANKS is the number of processes of a launch.

A step of an optimizer is an event, and so is a step of an environment of reinforcement learning.
The digest of an event has the tensors that modules were called with since the last event, the
parameters, and the state and options of the optimizer.
"""

import importlib
import json
import os
import runpy
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules import module as modules
from torch.optim.optimizer import register_optimizer_step_post_hook

from tests.plugins.trainings import KILL_AT, Journal


class Observer:
    """Notes the events of a program."""

    def __init__(self, journal: Path) -> None:
        self._journal = Journal(journal)
        self._count = self._depth = 0
        self._inputs: list[Any] = []
        modules.register_module_forward_pre_hook(self._enter)
        modules.register_module_forward_hook(self._leave, always_call=True)
        register_optimizer_step_post_hook(self._step)
        environments: Any = sys.modules.get("stable_baselines3.common.vec_env.dummy_vec_env")
        if environments is not None:
            step_wait = environments.DummyVecEnv.step_wait

            def wait(vec_env: Any) -> Any:
                result = step_wait(vec_env)
                self._note(environment=list(result[:3]), actions=vec_env.actions)
                return result

            environments.DummyVecEnv.step_wait = wait

    def _enter(self, _module: object, inputs: Any) -> None:
        if self._depth == 0 and torch.is_grad_enabled():  # not in an evaluation
            self._inputs += [one.clone() for one in inputs if isinstance(one, torch.Tensor)]
        self._depth += 1

    def _leave(self, *_: object) -> None:
        self._depth -= 1

    def _step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        options = [
            {name: value for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ]
        state = [dict(optimizer.state[param]) for param in params]
        self._note(inputs=self._inputs, params=params, state=state, options=options)
        self._inputs = []

    def _note(self, **facts: Any) -> None:
        self._count += 1
        self._journal.note(self._count, **facts)


def launch(folder: Path, program: Path, journal: str) -> None:
    """Run the program in a folder, with a journal there."""
    os.chdir(folder)
    sys.path.insert(0, str(program.parent))
    sys.argv = [str(program)]
    Observer(folder / journal)
    runpy.run_path(str(program), run_name="__main__")


def fork(folder: Path, program: Path, name: str, variables: dict[str, str]) -> int:
    """Launch in a fork with a name and with variables, and return its process id."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        output = os.open(folder / f"output-{name}", os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ |= variables
        launch(folder, program, f"journal-{name}")
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def launch_all(folder: Path, program: Path, number: int, kill_at: int | None, ranks: int) -> None:
    """Launch all ranks, and check that rank 0 ends as asked; its death ends the others."""
    variables = {} if kill_at is None else {KILL_AT: str(kill_at)}
    if ranks > 1:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        job = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        variables |= job
    pids = []
    for rank in range(ranks):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}
        name = f"{number}-{rank}" if ranks > 1 else f"{number}"
        pids.append(fork(folder, program, name, variables | own))
    code = os.waitstatus_to_exitcode(os.waitpid(pids[0], 0)[1])
    for pid in pids[1:]:
        if kill_at is not None:
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    if code != (0 if kill_at is None else -signal.SIGKILL):
        texts = [path.read_text() for path in sorted(folder.glob(f"output-{number}*"))]
        raise SystemExit(f"launch {number}: {code}\n" + "\n".join(texts))


def main() -> None:
    """Launch as the arguments say."""
    folder, program, names, kills, ranks = sys.argv[1:]
    for name in names.split():
        importlib.import_module(name)
    for number, kill_at in enumerate(json.loads(kills)):
        launch_all(Path(folder), Path(program), number, kill_at, int(ranks))


main()
