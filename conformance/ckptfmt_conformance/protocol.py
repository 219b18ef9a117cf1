"""The protocol between suite and adapter: what is asked, what may be answered, and what an answer means.

An adapter is a command, in any language, or a Python class. README.md says how to write one. A command says how it
went by its exit code, or, where it serves, by a number in its answer: 0 accepted, 10 rejected, 11 unsupported.
Everything else, a crash among it, is an error and never a refusal.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final, Protocol

__all__ = [
    "EXIT_ACCEPTED",
    "EXIT_FAILED",
    "EXIT_REJECTED",
    "EXIT_UNSUPPORTED",
    "METHODS",
    "Adapter",
    "Answer",
    "Description",
    "Rejected",
    "Unsupported",
    "ask",
    "ask_line",
    "parse_answer",
    "parse_description",
    "parse_ready",
    "parse_reply",
    "run_as_command",
    "serve",
    "take_output",
]

EXIT_ACCEPTED: Final = 0
EXIT_REJECTED: Final = 10
EXIT_UNSUPPORTED: Final = 11
#: What a question ended with that raised anything but an answer.
EXIT_FAILED: Final = 1
#: What a command exits with that was called wrongly. Python's own 1 and 2 are left alone: they are crashes.
EXIT_USAGE: Final = 2

#: What can be asked of an adapter with a directory; the methods of a class have these names.
METHODS: Final = ("open", "read", "reshard", "write", "context", "parse")


class Rejected(Exception):  # noqa: N818 - an answer, and no error of the adapter's
    """The implementation refuses what it was given.

    Args:
        code: of the table of errors in the specification.
        where: the place, if it is known.
        phase: ``open``, ``read`` or ``validate``.
    """

    def __init__(self, code: str, where: str | None = None, phase: str | None = None) -> None:
        super().__init__(code, where, phase)
        self.code = str(code)
        self.where = where
        self.phase = phase


class Unsupported(Exception):  # noqa: N818 - an answer, and no error of the adapter's
    """The implementation doesn't do this, and says so.

    Args:
        feature: which feature it lacks.
    """

    def __init__(self, feature: str) -> None:
        super().__init__(feature)
        self.feature = feature


class Adapter(Protocol):
    """What a class has that is judged. A method that is missing is a kind that it doesn't do.

    For trajectories it has a method ``checkpointing()`` as well; see `ckptfmt_conformance.trajectories`.
    """

    def describe(self) -> Mapping[str, Any]:
        """Return name, version, spec, roles, features and kinds."""

    def open(self, path: Path, request: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """Open a checkpoint, check all that the metadata says, read every tensor; return their digests."""

    def read(self, path: Path, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the digest of a box of a tensor."""

    def reshard(self, path: Path, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the digests of several boxes of a tensor, in their order."""

    def write(self, path: Path | None, request: Mapping[str, Any], output: Path) -> Mapping[str, Any]:
        """Save the state that is described as a checkpoint at `output`."""

    def context(self, path: Path, request: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """Return a tree as tagged JSON; or, as the request says, the samples that come next, or a loader's state."""

    def parse(self, path: Path, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Parse one document or value that stands alone."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """What an adapter says of itself.

    Attributes:
        spec: versions of the format that it speaks.
        serve: whether it answers many questions with one process.
    """

    name: str
    version: str
    spec: tuple[str, ...]
    roles: tuple[str, ...]
    features: tuple[str, ...]
    kinds: tuple[str, ...]
    serve: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came back.

    Attributes:
        outcome: ``accepted``, ``rejected``, ``unsupported``, or ``error``: what isn't an answer at all.
        body: what the adapter printed.
        message: of an error, what happened.
    """

    outcome: str
    body: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    message: str = ""


_OUTCOMES: Final = {EXIT_ACCEPTED: "accepted", EXIT_REJECTED: "rejected", EXIT_UNSUPPORTED: "unsupported"}
_NEEDED: Final = {"rejected": "error", "unsupported": "feature"}


def parse_answer(exit_code: int, stdout: bytes) -> Answer:
    """Return what an exit code and an output mean; whatever isn't of the protocol is an error, and never a refusal.

    >>> parse_answer(10, b'{"error": "TILING_GAP"}').outcome
    'rejected'
    >>> parse_answer(1, b'{"error": "TILING_GAP"}').message
    'exit code 1, which is no answer'
    """
    if exit_code not in _OUTCOMES:
        what = f"killed by signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}, which is no answer"
        return Answer(outcome="error", message=what)
    try:
        body = json.loads(stdout)
    except (ValueError, RecursionError) as error:
        return Answer(outcome="error", message=f"exit code {exit_code}, but the output isn't JSON: {error}")
    return _answer_of(exit_code, body)


def parse_reply(line: bytes, number: int) -> Answer:
    """Return what a line means that one who serves answered to the question of a number.

    Raises: ValueError for what isn't of the protocol, after which nothing that it says can be told apart.

    >>> parse_reply(b'{"id": 7, "exit": 10, "answer": {"error": "TILING_GAP"}}', 7).outcome
    'rejected'
    >>> parse_reply(b'{"id": 7, "exit": 1, "message": "KeyError: 3"}', 7).message
    'KeyError: 3'
    """
    reply = _parse_line(line)
    if type(reply.get("id")) is not int or reply["id"] != number:
        raise ValueError(f"it answered the question {reply.get('id')!r} instead of {number}")
    exit_code = reply.get("exit")
    if type(exit_code) is not int:
        raise ValueError(f"its answer's 'exit' is {exit_code!r} instead of a number")
    if exit_code in _OUTCOMES:
        return _answer_of(exit_code, reply.get("answer"))
    return Answer(outcome="error", message=str(reply.get("message") or f"exit code {exit_code}, which is no answer"))


def parse_ready(line: bytes) -> None:
    """See that the first line of one who serves says that it does; another says why it can't, by `message`.

    Raises: ValueError.
    """
    said = _parse_line(line)
    if said.get("ready") is not True:
        raise ValueError(str(said.get("message") or 'its first line isn\'t {"ready": true}'))


def _parse_line(line: bytes) -> dict[str, Any]:
    """Return the JSON object of a line. Raises: ValueError."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"a line of its output isn't JSON: {error}: {line[:80]!r}") from error
    if not isinstance(value, dict):
        raise ValueError(f"a line of its output isn't one JSON object: {line[:80]!r}")  # noqa: TRY004 - what it said
    return value


def _answer_of(exit_code: int, body: object) -> Answer:
    """Return what an exit code that is an answer's means, with what was printed."""
    outcome = _OUTCOMES[exit_code]
    if not isinstance(body, dict):
        return Answer(outcome="error", message=f"exit code {exit_code}, but the output isn't one JSON object")
    needed = _NEEDED.get(outcome)
    if needed is not None and (not isinstance(body.get(needed), str) or not body[needed]):
        return Answer(outcome="error", message=f"exit code {exit_code}, but the output doesn't name its {needed!r}")
    return Answer(outcome=outcome, body=body)


def parse_description(body: Mapping[str, Any]) -> Description:
    """Return what an adapter says of itself. Raises: ValueError naming the member that is missing or wrong."""
    lists: dict[str, tuple[str, ...]] = {}
    for member in ("spec", "roles", "features", "kinds"):
        values = [body["spec"]] if member == "spec" and isinstance(body.get("spec"), str) else body.get(member)
        if not isinstance(values, list | tuple) or not all(isinstance(value, str) for value in values):
            raise ValueError(f"{member!r} isn't a list of strings")
        lists[member] = tuple(values)
    for member in ("name", "version"):
        if not isinstance(body.get(member), str):
            raise ValueError(f"{member!r} isn't a string")  # noqa: TRY004 - it is what an adapter said
    if not isinstance(body.get("serve", False), bool):
        raise ValueError("'serve' is neither true nor false")  # noqa: TRY004 - it is what an adapter said
    return Description(name=body["name"], version=body["version"], serve=body.get("serve", False), **lists)


def ask(
    adapter: Any,  # noqa: ANN401 - whatever class its author wrote
    kind: str,
    *,
    path: Path | None,
    request: Mapping[str, Any] | None,
    output: Path | None,
) -> tuple[int, Mapping[str, Any]]:
    """Ask a class, and return exit code and output as a command would give them.

    Raises: whatever the class raises that is no answer.
    """
    if kind == "describe":
        return EXIT_ACCEPTED, adapter.describe()
    method: Callable[..., Mapping[str, Any]] | None = getattr(adapter, kind, None)
    if method is None:
        return EXIT_UNSUPPORTED, {"feature": kind}
    try:
        body = method(path, request, output) if kind == "write" else method(path, request)
    except Rejected as answer:
        return EXIT_REJECTED, {"error": answer.code, "where": answer.where, "phase": answer.phase}
    except Unsupported as answer:
        return EXIT_UNSUPPORTED, {"feature": answer.feature}
    return EXIT_ACCEPTED, body


def run_as_command(adapter: Any, argv: Sequence[str]) -> int:  # noqa: ANN401 - whatever class its author wrote
    """Answer as a command does, for a class: print the output, return the exit code. The command serves, too.

    Example: ``sys.exit(run_as_command(MyAdapter(), sys.argv[1:]))``
    """
    parser = argparse.ArgumentParser(description="An adapter of the conformance suite of ckptfmt.")
    parser.add_argument("kind", choices=("describe", "serve", *METHODS))
    parser.add_argument("--input", type=Path)
    parser.add_argument("--request", type=Path)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args(argv)
    if arguments.kind == "serve":
        with take_output() as answers:
            serve(sys.stdin.buffer, answers, lambda question: ask_line(adapter, question))
        return EXIT_ACCEPTED
    request = None if arguments.request is None else json.loads(arguments.request.read_bytes())
    exit_code, body = ask(adapter, arguments.kind, path=arguments.input, request=request, output=arguments.output)
    print(json.dumps({**body, "serve": True} if arguments.kind == "describe" else body, sort_keys=True))
    return exit_code


def take_output() -> BinaryIO:
    """Return standard output, for answers alone: whatever else is printed goes to standard error."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return answers


def serve(
    questions: Iterable[bytes],
    answers: BinaryIO,
    answer: Callable[[Mapping[str, Any]], tuple[int, Mapping[str, Any]]],
) -> None:
    """Answer questions, a line each, until there are no more.

    Args:
        answer: returns exit code and output of a question as a command would give them; whatever it raises costs that
            question alone.
    """
    _print_line(answers, '{"ready": true}')
    for line in questions:
        question = json.loads(line)
        try:
            exit_code, body = answer(question)
            reply = {"id": question["id"], "exit": exit_code, "answer": body}
            text = json.dumps(reply, sort_keys=True)
        except Exception as error:  # noqa: BLE001 - a crash is no answer, and the next question may have one
            traceback.print_exc()
            message = f"{type(error).__name__}: {error}"
            text = json.dumps({"id": question["id"], "exit": EXIT_FAILED, "message": message})
        _print_line(answers, text)


def ask_line(adapter: Any, question: Mapping[str, Any]) -> tuple[int, Mapping[str, Any]]:  # noqa: ANN401 - a class
    """Ask a class the question of a line. Raises: whatever the class raises that is no answer."""
    path, output = (Path(question[name]) if name in question else None for name in ("input", "output"))
    return ask(adapter, question["kind"], path=path, request=question.get("request"), output=output)


def _print_line(answers: BinaryIO, text: str) -> None:
    answers.write(text.encode() + b"\n")
    answers.flush()
