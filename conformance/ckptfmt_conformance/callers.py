"""How adapters are called: commands once per question, classes in a process of their own that answers many.

Either way a deadline holds, and what doesn't keep it is killed with all that it started.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Final, Protocol, Self

from ckptfmt_conformance.errors import SuiteError
from ckptfmt_conformance.protocol import Answer, Description, parse_answer, parse_description

__all__ = ["BUILTIN", "Caller", "ClassCaller", "CommandCaller", "Target", "describe", "find_target"]

#: Adapters that come with the suite, by their short names.
BUILTIN: Final = {
    "reference": "ckptfmt_conformance.adapters.reference:Reference",
}
#: What is kept of an output; nothing that is asked needs more.
OUTPUT_NBYTES: Final = 64 << 20
#: What is shown of standard error.
TAIL_NBYTES: Final = 1200
#: How long an adapter may take to start and to say what it is, in seconds: a framework may be imported on the way.
START_S: Final = 120.0

_CLASS: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
#: One of the broken ones, by its short name.
_BROKEN: Final = re.compile(r"broken/[a-z_]+")
_REMEDY: Final = "Give `reference`, `package.module:Class`, or a command line; see README.md of the suite."


class Caller(Protocol):
    """One adapter, ready to be asked."""

    def call(
        self,
        kind: str,
        *,
        path: Path | None = None,
        request: Mapping[str, Any] | None = None,
        output: Path | None = None,
        cell: str | None = None,
        timeout_s: float = START_S,
    ) -> Answer:
        """Ask one question. It raises nothing: whatever goes wrong is an answer of outcome ``error``."""

    def close(self) -> None:
        """Let go of what runs."""


class Target:
    """What ``--adapter`` means.

    Attributes:
        text: as it was given.
        xfails: where the list of expected failures lies beside it, whether or not it is there; None for nowhere.
    """

    def __init__(self, text: str, *, class_name: str = "", argv: tuple[str, ...] = (), xfails: Path | None) -> None:
        self.text = text
        self.xfails = xfails
        self._class_name = class_name
        self._argv = argv

    def open(self) -> Caller:
        """Return a caller of its own; each thread needs one."""
        return ClassCaller(self._class_name) if self._class_name else CommandCaller(self._argv)


def find_target(text: str) -> Target:
    """Return what a name, a class or a command line means. Raises: SuiteError where it is none of them."""
    name = BUILTIN.get(text, text)
    if _BROKEN.fullmatch(text):
        name = f"ckptfmt_conformance.adapters.{text.replace('/', '.')}:Broken"
    if _CLASS.fullmatch(name):
        return Target(text, class_name=name, xfails=_xfails_of_class(name.partition(":")[0]))
    try:
        argv = shlex.split(text)
    except ValueError as error:
        raise SuiteError(f"the adapter {text!r} is no command line: {error}", remedy=_REMEDY) from error
    found = shutil.which(argv[0]) if argv else None
    if found is None:
        raise SuiteError(f"there is no adapter {text!r}", remedy=_REMEDY)
    # The script is what an interpreter is told to run, and what a list of expected failures lies beside.
    scripts = [Path(word) for word in argv if Path(word).is_file()]
    script = scripts[-1] if scripts else Path(found)
    return Target(text, argv=(found, *argv[1:]), xfails=script.with_name(f"{script.name}.xfails"))


def _xfails_of_class(module: str) -> Path | None:
    """Return the place beside a module. Raises: SuiteError where there is no such module."""
    try:
        with _search_path():
            found = importlib.util.find_spec(module)
    except (ImportError, ValueError) as error:
        raise SuiteError(f"the adapter's module {module!r} can't be imported: {error}", remedy=_REMEDY) from error
    if found is None:
        raise SuiteError(f"there is no module {module!r} for an adapter", remedy="Is its folder on PYTHONPATH?")
    return Path(found.origin).with_suffix(".xfails") if found.origin else None


@contextlib.contextmanager
def _search_path() -> Any:  # noqa: ANN401 - a context
    """Look for modules in the current directory, too, as whoever calls the worker does."""
    sys.path.append(str(Path.cwd()))
    try:
        yield
    finally:
        sys.path.pop()


def describe(caller: Caller) -> Description:
    """Ask an adapter what it is. Raises: SuiteError where that isn't an answer: then nothing can be asked of it."""
    answer = caller.call("describe", timeout_s=START_S)
    remedy = "An adapter answers `describe` with a JSON object of name, version, spec, roles, features and kinds."
    if answer.outcome != "accepted":
        raise SuiteError(f"the adapter doesn't describe itself: {answer.message or answer.outcome}", remedy=remedy)
    try:
        return parse_description(answer.body)
    except ValueError as error:
        raise SuiteError(f"the adapter describes itself wrongly: {error}", remedy=remedy) from error


class CommandCaller:
    """An adapter that is a command: one process for each question."""

    def __init__(self, argv: tuple[str, ...]) -> None:
        self._argv = argv

    def close(self) -> None:
        """Do nothing: no process is left."""

    def call(
        self,
        kind: str,
        *,
        path: Path | None = None,
        request: Mapping[str, Any] | None = None,
        output: Path | None = None,
        cell: str | None = None,
        timeout_s: float = START_S,
    ) -> Answer:
        """Ask one question."""
        if cell is not None:
            return Answer(outcome="unsupported", body={"feature": "trajectory: it needs a Python class"})
        with tempfile.TemporaryDirectory(prefix="ckptfmt-conformance-") as folder:
            argv = [*self._argv, kind]
            if path is not None:
                argv += ["--input", str(path)]
            if request is not None:
                file = Path(folder) / "request.json"
                file.write_text(json.dumps(request, sort_keys=True), "utf-8")
                argv += ["--request", str(file)]
            if output is not None:
                argv += ["--output", str(output)]
            with (Path(folder) / "stdout").open("w+b") as stdout, (Path(folder) / "stderr").open("w+b") as stderr:
                try:
                    exit_code = _run(argv, stdout, stderr, timeout_s)
                except OSError as error:
                    return Answer(outcome="error", message=f"it can't be started: {error}")
                if exit_code is None:
                    return Answer(outcome="error", message=f"no answer within {timeout_s:g} s")
                content = _read_back(stdout, OUTPUT_NBYTES + 1)
                if len(content) > OUTPUT_NBYTES:
                    return Answer(outcome="error", message=f"more than {OUTPUT_NBYTES} bytes of output")
                answer = parse_answer(exit_code, content)
                return _with_tail(answer, stderr)


class ClassCaller:
    """An adapter that is a Python class: one process, begun at the first question and again after a crash."""

    def __init__(self, class_name: str) -> None:
        self._class_name = class_name
        self._process: subprocess.Popen[bytes] | None = None
        self._stderr: IO[bytes] | None = None
        self._rest = b""
        self._said_nbytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            _kill(self._process)
            for stream in (self._process.stdin, self._process.stdout, self._stderr):
                if stream is not None:
                    with contextlib.suppress(OSError):
                        stream.close()
        self._process = self._stderr = None
        self._rest = b""

    def call(
        self,
        kind: str,
        *,
        path: Path | None = None,
        request: Mapping[str, Any] | None = None,
        output: Path | None = None,
        cell: str | None = None,
        timeout_s: float = START_S,
    ) -> Answer:
        """Ask one question."""
        if self._process is None:
            started = self._start()
            if started is not None:
                self.close()
                return started
        assert self._process is not None
        assert self._process.stdin is not None
        paths = {"path": path, "output": output}
        question = {name: str(value) if value is not None else None for name, value in paths.items()}
        line = json.dumps({"kind": kind, "request": request, "cell": cell, **question}).encode() + b"\n"
        assert self._stderr is not None
        self._said_nbytes = self._stderr.seek(0, os.SEEK_END)
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
        except OSError as error:
            self.close()
            return Answer(outcome="error", message=f"its process is gone: {error}")
        answer = self._await(timeout_s)
        if self._process.poll() is not None or answer.message.startswith("no answer"):
            self.close()
        return answer

    def _start(self) -> Answer | None:
        """Start the process; return what went wrong, None if nothing did."""
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the process
        # The same modules are found as here, those of the current directory too.
        places = [place or str(Path.cwd()) for place in sys.path] + [str(Path.cwd())]
        package = str(Path(__file__).parents[1])
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys([*places, package]))}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ckptfmt_conformance.worker", self._class_name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=environment,
            start_new_session=True,
        )
        started = self._await(START_S)
        return None if started.outcome == "accepted" else started

    def _await(self, timeout_s: float) -> Answer:
        """Return the answer that comes on the next line."""
        assert self._process is not None
        assert self._process.stdout is not None
        assert self._stderr is not None
        descriptor, end_s = self._process.stdout.fileno(), time.monotonic() + timeout_s
        pieces = [self._rest]
        while b"\n" not in pieces[-1]:
            ready, _, _ = select.select([descriptor], [], [], max(0.0, end_s - time.monotonic()))
            if not ready:
                return Answer(outcome="error", message=f"no answer within {timeout_s:g} s")
            piece = os.read(descriptor, 1 << 20)
            if not piece:
                return self._say_how_it_ended()
            pieces.append(piece)
        line, _, self._rest = b"".join(pieces).partition(b"\n")
        reply = json.loads(line)
        if reply["message"]:
            return _with_tail(Answer(outcome="error", message=reply["message"]), self._stderr, self._said_nbytes)
        return parse_answer(reply["exit"], json.dumps(reply["body"]).encode())

    def _say_how_it_ended(self) -> Answer:
        assert self._process is not None
        assert self._stderr is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        code = self._process.returncode
        how = f"by signal {-code}" if code is not None and code < 0 else f"with exit code {code}"
        return _with_tail(Answer(outcome="error", message=f"its process ended {how}"), self._stderr, self._said_nbytes)


def _run(argv: list[str], stdout: IO[bytes], stderr: IO[bytes], timeout_s: float) -> int | None:
    """Run a command and return its exit code; None at the deadline. Raises: OSError."""
    process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, start_new_session=True)
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it started; it leads a session of its own."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _read_back(stream: IO[bytes], nbytes: int) -> bytes:
    stream.seek(0)
    return stream.read(nbytes)


def _with_tail(answer: Answer, stderr: IO[bytes], begin: int = 0) -> Answer:
    """Add to an error what was said last on standard error, from a byte on."""
    if answer.outcome != "error":
        return answer
    end = stderr.seek(0, os.SEEK_END)
    stderr.seek(max(begin, end - TAIL_NBYTES))
    tail = stderr.read().decode("utf-8", "replace").strip()
    stderr.seek(0, os.SEEK_END)
    return Answer(outcome="error", message=f"{answer.message}\n{tail}" if tail else answer.message)
