"""Forks of a process that has imported torch: an import of torch takes seconds of processor time.

One server for each worker of the tests serves all test modules. Of several modules that start
processes, the first one would otherwise decide which modules the server has imported.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import sys
import tempfile
import threading
import traceback
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, Final, NamedTuple
from unittest import mock

_FORKS: Final = multiprocessing.get_context("forkserver")
#: The modules that forks would import.
_PRELOADED: Final = (
    "torch",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.optim.swa_utils",
    "torch._dynamo",  # the first optimizer of a process imports it
    "jsonschema",
    "ml_dtypes",
    "ckptfmt.checkpointer",
    "ckptfmt.adapters.torch",
    "ckptfmt_conformance.trajectories.play",
    "tests.preloaded",
)
#: The greatest time for a program, in seconds: that of the longest exhaustive test.
_PROGRAM_S: Final = 4.0 * 3600


def start_server() -> None:
    """Start the server of all forks of this process, unless it runs."""
    _FORKS.set_forkserver_preload(list(_PRELOADED))
    # Forks have one thread each; DDP of several processes on one machine warns otherwise.
    with mock.patch.dict(os.environ, {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}):
        forkserver.ensure_running()


def fork(target: Callable[..., None], *arguments: Any) -> Any:
    """Start a function in a fork of a process that has imported torch; return the `multiprocessing.Process`.

    Args:
        target: a function of a module, which begins with `settle`.
        arguments: the function's arguments.
    """
    start_server()
    process = _FORKS.Process(target=target, args=arguments)
    process.start()
    return process


def settle(variables: Mapping[str, str], output: str, errors: str | None = None) -> None:
    """Give a fork the environment and the output that a process of its own would have been started with.

    Args:
        variables: the environment.
        output: the file for standard output, which is appended to.
        errors: the file for standard error; None for `output`.
    """
    with Path(output).open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if errors is not None:
        with Path(errors).open("ab") as file:
            os.dup2(file.fileno(), 2)
    os.environ.clear()
    os.environ.update(variables)
    import torch  # noqa: PLC0415

    torch.set_num_threads(1)  # what OMP_NUM_THREADS says is read by the import


def run_program(
    words: Sequence[str],
    *,
    place: Path,
    variables: Mapping[str, str],
    warn: Sequence[str] = (),
    errors: str | None = None,
) -> tuple[int, str]:
    """Run ``python SCRIPT ...``, ``-m MODULE`` or ``-c TEXT`` in a fork; return exit code and output.

    Args:
        words: the words after ``python``.
        place: the current directory.
        variables: the environment.
        warn: the words after each ``-W``.
        errors: the file for standard error; None for a part of the output.
    """
    with tempfile.NamedTemporaryFile("r") as output:
        program = _Program(dict(variables), output.name, errors, place, list(words), list(warn))
        process = fork(_be_program, program)
        process.join(_PROGRAM_S)
        process.kill()
        process.join()
        return process.exitcode, output.read()


def start_script(
    command: Sequence[str], *, env: Mapping[str, str], stdout: Any, **_: Any
) -> types.SimpleNamespace:
    """Run a Python script as `subprocess.run` does, in a fork; return an object with the exit code."""
    program = _Program(dict(env), stdout.name, None, Path.cwd(), list(command[1:]), [])
    process = fork(_be_program, program)
    process.join()
    return types.SimpleNamespace(returncode=process.exitcode)


class _Program(NamedTuple):
    """The arguments of `run_program`, and the file for the output."""

    variables: dict[str, str]
    output: str
    errors: str | None
    place: Path
    words: list[str]
    warn: list[str]


def _be_program(program: _Program) -> None:
    settle(program.variables, program.output, program.errors)
    os.chdir(program.place)
    words = program.words
    multiprocessing.set_start_method("fork", force=True)  # as in a process of its own
    warnings._processoptions(program.warn)  # type: ignore[attr-defined]
    sys.argv = [words[0], *words[2:]] if words[0] in ("-c", "-m") else words
    code = 1
    try:
        if words[0] == "-c":
            sys.path.insert(0, "")
            main = types.ModuleType("__main__")
            sys.modules["__main__"] = main
            exec(compile(words[1], "<string>", "exec"), vars(main))
        elif words[0] == "-m":
            sys.path.insert(0, str(program.place))
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(words[0]).resolve().parent))
            runpy.run_path(words[0], run_name="__main__")
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if not isinstance(error.code, int | None):
            sys.stderr.write(f"{error.code}\n")
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()  # multiprocessing ends a fork without them
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
