"""Calls of adapters: a process for each question, or a process for all questions.

Each call has a deadline. A process that misses the deadline is killed with all processes that it
started.
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
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Final, Protocol

from ckptfmt_conformance.errors import SuiteError
from ckptfmt_conformance.protocol import (
    Answer,
    Description,
    parse_answer,
    parse_description,
    parse_ready,
    parse_reply,
)

__all__ = [
    "BUILTIN",
    "Caller",
    "ClassCaller",
    "CommandCaller",
    "ServerCaller",
    "Target",
    "describe",
    "find_target",
    "open_described",
]

#: Adapters that come with the suite, by their short names.
BUILTIN: Final = {
    "reference": "ckptfmt_conformance.adapters.reference:Reference",
}
#: The limit on the size of an output, in bytes. No answer needs more.
OUTPUT_NBYTES: Final = 64 << 20
#: How much of the end of standard error a message shows, in bytes.
TAIL_NBYTES: Final = 1200
#: How long an adapter may take to start and to describe itself, in seconds. The adapter may have to
#: import a framework.
START_S: Final = 120.0
#: How long an adapter's process may take to exit after its input is closed, in seconds.
END_S: Final = 5.0
_NO_CELLS: Final = Answer(
    outcome="unsupported", body={"feature": "trajectory: it needs a Python class"}
)

_CLASS: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
#: The short name of a broken adapter.
_BROKEN: Final = re.compile(r"broken/[a-z_]+")
_REMEDY: Final = (
    "Give `reference`, `package.module:Class`, or a command line; see README.md of the suite."
)


class Caller(Protocol):
    """An open adapter."""

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
        """Ask one question.

        Return every failure as an answer of outcome ``error``; raise no exception.
        """

    def close(self) -> None:
        """End the adapter's process, if there is a process."""


class Target:
    """The adapter that ``--adapter`` names.

    Attributes:
        text: the value of ``--adapter``.
        xfails: the path of the adapter's list of expected failures, whether or not a file exists
            there; None where the adapter has no such path.
    """

    def __init__(
        self, text: str, *, class_name: str = "", argv: tuple[str, ...] = (), xfails: Path | None
    ) -> None:
        self.text = text
        self.xfails = xfails
        self._class_name = class_name
        self._argv = argv

    def open(self, *, is_serving: bool = False) -> Caller:
        """Return a new caller. Each thread needs its own caller.

        Args:
            is_serving: whether an adapter that is a command is asked all questions through one
                process.
        """
        if self._class_name:
            return ClassCaller(self._class_name)
        return ServerCaller((*self._argv, "serve")) if is_serving else CommandCaller(self._argv)


def find_target(text: str) -> Target:
    """Return the adapter of a short name, a class or a command line.

    Raises: SuiteError where the text is none of the three.
    """
    name = BUILTIN.get(text, text)
    if _BROKEN.fullmatch(text):
        name = f"ckptfmt_conformance.adapters.{text.replace('/', ':')}"
    if name != text and importlib.util.find_spec("ckptfmt") is None:
        remedy = 'Install it: pip install "ckptfmt[conformance]".'
        raise SuiteError(
            f"the adapter {text} is one of ckptfmt, which isn't installed", remedy=remedy
        )
    if _CLASS.fullmatch(name):
        return Target(text, class_name=name, xfails=_xfails_of_class(name.partition(":")[0]))
    try:
        argv = shlex.split(text)
    except ValueError as error:
        raise SuiteError(
            f"the adapter {text!r} is no command line: {error}", remedy=_REMEDY
        ) from error
    found = shutil.which(argv[0]) if argv else None
    if found is None:
        raise SuiteError(f"there is no adapter {text!r}", remedy=_REMEDY)
    # If a command line runs a script by an interpreter, the list of expected failures lies
    # beside the script.
    scripts = [Path(word) for word in argv if Path(word).is_file()]
    script = scripts[-1] if scripts else Path(found)
    return Target(text, argv=(found, *argv[1:]), xfails=script.with_name(f"{script.name}.xfails"))


def _xfails_of_class(module: str) -> Path | None:
    """Return the path of the list of expected failures beside a module.

    Raises: SuiteError where there is no such module.
    """
    try:
        with _search_path():
            found = importlib.util.find_spec(module)
    except (ImportError, ValueError) as error:
        raise SuiteError(
            f"the adapter's module {module!r} can't be imported: {error}", remedy=_REMEDY
        ) from error
    if found is None:
        raise SuiteError(
            f"there is no module {module!r} for an adapter", remedy="Is its folder on PYTHONPATH?"
        )
    return Path(found.origin).with_suffix(".xfails") if found.origin else None


@contextlib.contextmanager
def _search_path() -> Any:
    """Search modules in the current directory too, as the worker process does."""
    sys.path.append(str(Path.cwd()))
    try:
        yield
    finally:
        sys.path.pop()


@contextlib.contextmanager
def open_described(
    target: Target, *, may_serve: bool = True
) -> Iterator[tuple[Caller, Description]]:
    """Open an adapter, ask for its description, and yield a caller and the description.

    For a serving command, the caller uses a single process for all questions.

    Args:
        may_serve: whether a serving command is asked through a single process.

    Raises: SuiteError as `describe` does.
    """
    with contextlib.ExitStack() as stack:
        caller = stack.enter_context(contextlib.closing(target.open()))
        description = describe(caller)
        if description.serve and may_serve:
            caller = stack.enter_context(contextlib.closing(target.open(is_serving=True)))
        yield caller, description


def describe(caller: Caller) -> Description:
    """Return an adapter's description.

    Raises: SuiteError where the adapter gives no valid description. No case can be asked then.
    """
    answer = caller.call("describe", timeout_s=START_S)
    remedy = (
        "An adapter answers `describe` with a JSON object of name, version, spec, roles,"
        " features and kinds."
    )
    if answer.outcome != "accepted":
        raise SuiteError(
            f"the adapter doesn't describe itself: {answer.message or answer.outcome}",
            remedy=remedy,
        )
    try:
        return parse_description(answer.body)
    except ValueError as error:
        raise SuiteError(f"the adapter describes itself wrongly: {error}", remedy=remedy) from error


class CommandCaller:
    """A command as an adapter: a process for each question."""

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
            return _NO_CELLS
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
            with (
                (Path(folder) / "stdout").open("w+b") as stdout,
                (Path(folder) / "stderr").open("w+b") as stderr,
            ):
                try:
                    exit_code = _run(argv, stdout, stderr, timeout_s)
                except OSError as error:
                    return Answer(outcome="error", message=f"it can't be started: {error}")
                if exit_code is None:
                    return Answer(outcome="error", message=f"no answer within {timeout_s:g} s")
                content = _read_back(stdout, OUTPUT_NBYTES + 1)
                if len(content) > OUTPUT_NBYTES:
                    return Answer(
                        outcome="error", message=f"more than {OUTPUT_NBYTES} bytes of output"
                    )
                answer = parse_answer(exit_code, content)
                return _with_tail(answer, stderr)


class ServerCaller:
    """A serving command as an adapter: a process for all questions.

    The first question starts the process. After a question that ends without a valid answer, such
    as by a crash or at the deadline, the process is ended, and the next question starts a new
    process. So such an end costs only one question.

    Args:
        argv: the command line of the process.
        environment: the environment of the process; the current process's by default.
        has_cells: whether the adapter can be asked for trajectories.
    """

    def __init__(
        self,
        argv: tuple[str, ...],
        *,
        environment: Mapping[str, str] | None = None,
        has_cells: bool = False,
    ) -> None:
        self._argv = argv
        self._environment = environment
        self._has_cells = has_cells
        self._process: subprocess.Popen[bytes] | None = None
        self._stderr: IO[bytes] | None = None
        self._said_nbytes = 0
        self._count = 0
        self._rest = b""
        # The failure of the first start. Later questions return the failure at once, so
        # that a run doesn't wait for the start once per case.
        self._failure: Answer | None = None
        self._was_ready = False

    def close(self) -> None:
        """Close the process's input and wait for the exit, for `END_S` at most.

        Then kill all processes of the session.
        """
        process = self._process
        stderr = self._stderr
        self._process = self._stderr = None
        if process is None or stderr is None:
            return
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
        self._end(process, stderr)

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
        if cell is not None and not self._has_cells:
            return _NO_CELLS
        if self._process is None:
            failure = self._failure or self._start()
            if failure is not None:
                return failure
        assert self._stderr is not None
        self._said_nbytes = self._stderr.seek(0, os.SEEK_END)
        self._count += 1
        members = {
            "id": self._count,
            "kind": kind,
            "input": path and str(path),
            "request": request,
            "output": output and str(output),
            "cell": cell,
        }
        given = {name: value for name, value in members.items() if value is not None}
        end_s = time.monotonic() + timeout_s
        try:
            self._write(json.dumps(given, sort_keys=True).encode() + b"\n", end_s)
            reply = self._read_reply(end_s)
        except TimeoutError:
            return self._give_up(f"no answer within {timeout_s:g} s")
        except (OSError, ValueError) as error:
            return self._give_up(str(error))
        return _with_tail(reply, self._stderr, self._said_nbytes)

    def _start(self) -> Answer | None:
        """Start the process and wait for readiness. Return the failure; None on success."""
        # The file lives as long as the process.
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115
        self._said_nbytes = 0
        self._rest = b""
        try:
            self._process = subprocess.Popen(
                self._argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                env=self._environment,
                start_new_session=True,
                bufsize=0,
            )
        except OSError as error:
            self._stderr.close()
            self._failure = Answer(outcome="error", message=f"it can't be started: {error}")
            return self._failure
        try:
            parse_ready(self._read_line(time.monotonic() + START_S))
        except TimeoutError:
            failure = self._give_up(f"it wasn't ready within {START_S:g} s")
        except (OSError, ValueError) as error:
            failure = self._give_up(str(error))
        else:
            self._was_ready = True
            return None
        if not self._was_ready:
            self._failure = failure
        return failure

    def _write(self, line: bytes, end_s: float) -> None:
        """Write a question to the process. Raises: TimeoutError, OSError."""
        assert self._process is not None
        assert self._process.stdin is not None
        descriptor = self._process.stdin.fileno()
        os.set_blocking(descriptor, False)
        while line:
            _wait_for(descriptor, end_s, is_writing=True)
            try:
                line = line[os.write(descriptor, line) :]
            except BrokenPipeError:
                # The exit code or the signal, which is read later, says more than a broken pipe
                # does.
                return

    def _read_reply(self, end_s: float) -> Answer:
        """Return the answer to the last question.

        Raises: TimeoutError; ValueError where the answer violates the protocol.
        """
        reply = parse_reply(self._read_line(end_s), self._count)
        if self._rest:
            raise ValueError("more than one line of output")
        return reply

    def _read_line(self, end_s: float) -> bytes:
        """Return the next line of output.

        Raises: TimeoutError; ValueError where the line is too long, or the process ended.
        """
        assert self._process is not None
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        pieces = [self._rest]
        nbytes = len(self._rest)
        while b"\n" not in pieces[-1]:
            _wait_for(descriptor, end_s)
            piece = os.read(descriptor, 1 << 20)
            if not piece:
                raise ValueError(self._say_how_it_ended())
            pieces.append(piece)
            nbytes += len(piece)
            if nbytes > OUTPUT_NBYTES:
                raise ValueError(f"more than {OUTPUT_NBYTES} bytes of output")
        line, _, self._rest = b"".join(pieces).partition(b"\n")
        return line

    def _say_how_it_ended(self) -> str:
        assert self._process is not None
        try:
            code = self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            return "it closed its standard output"
        return f"its process ended {f'by signal {-code}' if code < 0 else f'with exit code {code}'}"

    def _give_up(self, message: str) -> Answer:
        """End the process. Return an error with the end of standard error."""
        assert self._process is not None
        assert self._stderr is not None
        answer = _with_tail(
            Answer(outcome="error", message=message), self._stderr, self._said_nbytes
        )
        self._end(self._process, self._stderr)
        self._process = self._stderr = None
        return answer

    def _end(self, process: subprocess.Popen[bytes], stderr: IO[bytes]) -> None:
        _kill(process)
        for stream in (process.stdin, process.stdout, stderr):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


class ClassCaller(ServerCaller):
    """A Python class as an adapter, in a separate process."""

    def __init__(self, class_name: str) -> None:
        # The process searches modules in the same places as this process, and in the current
        # directory.
        places = [place or str(Path.cwd()) for place in sys.path] + [str(Path.cwd())]
        package = str(Path(__file__).parents[1])
        super().__init__(
            (sys.executable, "-m", "ckptfmt_conformance.worker", class_name),
            environment={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(dict.fromkeys([*places, package])),
            },
            has_cells=True,
        )


def _wait_for(descriptor: int, end_s: float, *, is_writing: bool = False) -> None:
    """Wait until a pipe can be read or written. Raises: TimeoutError."""
    places = [descriptor]
    reading, writing = ([], places) if is_writing else (places, [])
    if not any(select.select(reading, writing, [], max(0.0, end_s - time.monotonic()))):
        raise TimeoutError


def _run(argv: list[str], stdout: IO[bytes], stderr: IO[bytes], timeout_s: float) -> int | None:
    """Run a command and return the exit code; None at the deadline. Raises: OSError."""
    process = subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, start_new_session=True
    )
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the leader of a session, and all processes of the session."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _read_back(stream: IO[bytes], nbytes: int) -> bytes:
    stream.seek(0)
    return stream.read(nbytes)


def _with_tail(answer: Answer, stderr: IO[bytes], begin: int = 0) -> Answer:
    """Return an error extended by the end of standard error; any other answer unchanged.

    Args:
        begin: the first byte of standard error from the question.
    """
    if answer.outcome != "error":
        return answer
    end = stderr.seek(0, os.SEEK_END)
    stderr.seek(max(begin, end - TAIL_NBYTES))
    tail = stderr.read().decode("utf-8", "replace").strip()
    stderr.seek(0, os.SEEK_END)
    return Answer(outcome="error", message=f"{answer.message}\n{tail}" if tail else answer.message)
