"""The protocol between the suite and an adapter: questions, answers, and their meaning.

An adapter is a command, in any language, or a Python class. README.md explains how to write an
adapter. A command reports the outcome by an exit code. A serving command reports the same
number in the answer: 0 accepted, 10 rejected, 11 unsupported. Every other number, and every crash,
is an error and never a refusal.
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
#: The code of a question on which the adapter raised an exception without an answer.
EXIT_FAILED: Final = 1
#: The exit code of a command with wrong arguments. Python's own codes 1 and 2 keep their meaning: a
#: crash.
EXIT_USAGE: Final = 2

#: The profiles that a profile needs; every companion needs R-core (specification, page 01).
_NEEDS: Final[Mapping[str, tuple[str, ...]]] = {
    "R-core": (),
    "R-run": ("R-core", "R-validate"),
    "W-core": (),
    "W-delta": ("W-core", "R-delta"),
    "W-run": ("W-core", "R-run"),
}

#: The kinds of questions about a directory. The methods of an adapter's class have these names.
METHODS: Final = ("open", "read", "reshard", "write", "context", "parse")


class Rejected(Exception):  # noqa: N818 - an answer, and no error of the adapter's
    """A refusal: the implementation refuses the given content.

    Args:
        code: a code of the specification's table of errors.
        where: the place of the fault; None if unknown.
        phase: ``open``, ``read`` or ``validate``.
    """

    def __init__(self, code: str, where: str | None = None, phase: str | None = None) -> None:
        super().__init__(code, where, phase)
        self.code = str(code)
        self.where = where
        self.phase = phase


class Unsupported(Exception):  # noqa: N818 - an answer, and no error of the adapter's
    """An answer of an implementation without support for a feature.

    Args:
        feature: the missing feature.
    """

    def __init__(self, feature: str) -> None:
        super().__init__(feature)
        self.feature = feature


class Adapter(Protocol):
    """The methods of an adapter's class.

    A class that lacks a method doesn't support that kind of question.

    For trajectories, the class also has a method ``checkpointing()``; see
    `ckptfmt_conformance.trajectories`.
    """

    def describe(self) -> Mapping[str, Any]:
        """Return name, version, spec, roles, features and kinds, and perhaps profiles."""

    def open(self, path: Path, request: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """Open a checkpoint, check all metadata, read every tensor, and return the digests."""

    def read(self, path: Path, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the digest of a box of a tensor."""

    def reshard(self, path: Path, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the digests of several boxes of a tensor, in their order."""

    def write(
        self, path: Path | None, request: Mapping[str, Any], output: Path
    ) -> Mapping[str, Any]:
        """Save the requested state as a checkpoint at `output`."""

    def context(self, path: Path, request: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """Return a tree as tagged JSON, the next samples, or a loader's state, as requested."""

    def parse(self, path: Path, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Parse a single document or value."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """An adapter's description of itself.

    Attributes:
        spec: the supported versions of the format.
        profiles: the implemented profiles; none if the adapter doesn't list them, and is asked the
            cases of all profiles.
        serve: whether the adapter answers many questions with a single process.
    """

    name: str
    version: str
    spec: tuple[str, ...]
    roles: tuple[str, ...]
    features: tuple[str, ...]
    kinds: tuple[str, ...]
    profiles: tuple[str, ...] = ()
    serve: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An adapter's answer.

    Attributes:
        outcome: ``accepted``, ``rejected``, ``unsupported``, or ``error`` where no valid answer
            came.
        body: the adapter's output.
        message: the description of an error.
    """

    outcome: str
    body: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    message: str = ""


_OUTCOMES: Final = {
    EXIT_ACCEPTED: "accepted",
    EXIT_REJECTED: "rejected",
    EXIT_UNSUPPORTED: "unsupported",
}
_NEEDED: Final = {"rejected": "error", "unsupported": "feature"}


def parse_answer(exit_code: int, stdout: bytes) -> Answer:
    """Return the answer of an exit code and an output.

    A violation of the protocol is an error, and never a refusal.

    >>> parse_answer(10, b'{"error": "TILING_GAP"}').outcome
    'rejected'
    >>> parse_answer(1, b'{"error": "TILING_GAP"}').message
    'exit code 1, which is no answer'
    """
    if exit_code not in _OUTCOMES:
        what = (
            f"killed by signal {-exit_code}"
            if exit_code < 0
            else f"exit code {exit_code}, which is no answer"
        )
        return Answer(outcome="error", message=what)
    try:
        body = json.loads(stdout)
    except (ValueError, RecursionError) as error:
        return Answer(
            outcome="error", message=f"exit code {exit_code}, but the output isn't JSON: {error}"
        )
    return _answer_of(exit_code, body)


def parse_reply(line: bytes, number: int) -> Answer:
    """Return the answer in a line of a serving adapter to the question with a number.

    Raises: ValueError for a violation of the protocol. Later lines can't be attributed to
    questions then.

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
    return Answer(
        outcome="error",
        message=str(reply.get("message") or f"exit code {exit_code}, which is no answer"),
    )


def parse_ready(line: bytes) -> None:
    """Check that the first line of a serving adapter reports readiness.

    Raises: ValueError with the adapter's `message`, if there is one.
    """
    said = _parse_line(line)
    if said.get("ready") is not True:
        raise ValueError(str(said.get("message") or 'its first line isn\'t {"ready": true}'))


def _parse_line(line: bytes) -> dict[str, Any]:
    """Return the JSON object in a line. Raises: ValueError."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"a line of its output isn't JSON: {error}: {line[:80]!r}") from error
    if not isinstance(value, dict):
        # The output is wrong, not a type.
        raise ValueError(f"a line of its output isn't one JSON object: {line[:80]!r}")  # noqa: TRY004
    return value


def _answer_of(exit_code: int, body: object) -> Answer:
    """Return the answer for a valid exit code and an output."""
    outcome = _OUTCOMES[exit_code]
    if not isinstance(body, dict):
        return Answer(
            outcome="error", message=f"exit code {exit_code}, but the output isn't one JSON object"
        )
    needed = _NEEDED.get(outcome)
    if needed is not None and (not isinstance(body.get(needed), str) or not body[needed]):
        return Answer(
            outcome="error",
            message=f"exit code {exit_code}, but the output doesn't name its {needed!r}",
        )
    return Answer(outcome=outcome, body=body)


def _check_profiles(profiles: Sequence[str]) -> None:
    """Raise ValueError for a profile without the profiles that it needs."""
    for name in profiles:
        needed = set(_NEEDS.get(name, ("R-core",))) - set(profiles)
        if needed:
            raise ValueError(
                f"'profiles' has {name}, which also needs {' and '.join(sorted(needed))}"
            )


def parse_description(body: Mapping[str, Any]) -> Description:
    """Return an adapter's description.

    Raises: ValueError with the name of the missing or wrong member.
    """
    lists: dict[str, tuple[str, ...]] = {}
    for member in ("spec", "roles", "features", "kinds", "profiles"):
        values = (
            [body["spec"]]
            if member == "spec" and isinstance(body.get("spec"), str)
            else body.get(member, [] if member == "profiles" else None)
        )
        if not isinstance(values, list | tuple) or not all(
            isinstance(value, str) for value in values
        ):
            raise ValueError(f"{member!r} isn't a list of strings")
        lists[member] = tuple(values)
    _check_profiles(lists["profiles"])
    for member in ("name", "version"):
        if not isinstance(body.get(member), str):
            # The answer is wrong, not a type.
            raise ValueError(f"{member!r} isn't a string")  # noqa: TRY004
    if not isinstance(body.get("serve", False), bool):
        # The answer is wrong, not a type.
        raise ValueError("'serve' is neither true nor false")  # noqa: TRY004
    return Description(
        name=body["name"], version=body["version"], serve=body.get("serve", False), **lists
    )


def ask(
    adapter: Any,
    kind: str,
    *,
    path: Path | None,
    request: Mapping[str, Any] | None,
    output: Path | None,
) -> tuple[int, Mapping[str, Any]]:
    """Ask an adapter's class a question. Return exit code and output as a command would give them.

    Raises: any exception of the class except `Rejected` and `Unsupported`.
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


def run_as_command(adapter: Any, argv: Sequence[str]) -> int:
    """Run an adapter's class as a command: print the output, return the exit code.

    The command supports ``serve`` too.

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
    exit_code, body = ask(
        adapter, arguments.kind, path=arguments.input, request=request, output=arguments.output
    )
    print(
        json.dumps(
            {**body, "serve": True} if arguments.kind == "describe" else body, sort_keys=True
        )
    )
    return exit_code


def take_output() -> BinaryIO:
    """Return standard output for answers only, and redirect prints to standard error."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return answers


def serve(
    questions: Iterable[bytes],
    answers: BinaryIO,
    answer: Callable[[Mapping[str, Any]], tuple[int, Mapping[str, Any]]],
) -> None:
    """Answer questions, a line each, until the input ends.

    Args:
        answer: returns exit code and output of a question as a command would give them. An
            exception costs only that question.
    """
    _print_line(answers, '{"ready": true}')
    for line in questions:
        question = json.loads(line)
        try:
            exit_code, body = answer(question)
            reply = {"id": question["id"], "exit": exit_code, "answer": body}
            text = json.dumps(reply, sort_keys=True)
        except Exception as error:  # noqa: BLE001 - a crash costs only this question
            traceback.print_exc()
            message = f"{type(error).__name__}: {error}"
            text = json.dumps({"id": question["id"], "exit": EXIT_FAILED, "message": message})
        _print_line(answers, text)


def ask_line(adapter: Any, question: Mapping[str, Any]) -> tuple[int, Mapping[str, Any]]:
    """Ask an adapter's class the question of a line. Raises: as `ask` does."""
    path, output = (
        Path(question[name]) if name in question else None for name in ("input", "output")
    )
    return ask(adapter, question["kind"], path=path, request=question.get("request"), output=output)


def _print_line(answers: BinaryIO, text: str) -> None:
    answers.write(text.encode() + b"\n")
    answers.flush()
