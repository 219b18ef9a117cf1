"""One clause broken on purpose, and which test convicts it: what makes sure that a clause's test can fail."""

from __future__ import annotations
import __future__

import ast
import contextlib
import dataclasses
import inspect
import io
import itertools
import sys
import textwrap
import tokenize
import types
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.homes import kind_of

TESTS = Path(__file__).parents[1]
#: A mutant that dies of one of these is a patch that doesn't fit the code any more, and no broken
#: clause.
STALE = (AttributeError, ImportError, NameError, TypeError)


#: Tokens that hold no code.
_SPACE = frozenset(
    {
        tokenize.COMMENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
        tokenize.INDENT,
        tokenize.NEWLINE,
        tokenize.NL,
    }
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """The implementation with one thing wrong.

    Attributes:
        clauses: the clauses that it breaks.
        fault: what it does wrong, in a few words that follow "it".
        patch: puts the fault in, and takes it out again at its end. It holds while the body of a
            test runs, so not in fixtures, and not in processes that a test starts afresh.
        tests: the tests that must fail with it, each ``path::name`` with the path from ``tests/``.
    """

    clauses: tuple[str, ...]
    fault: str
    patch: Callable[[], AbstractContextManager[Any]]
    tests: tuple[str, ...]


def replaced(
    owner: object, name: str, broken: Callable[..., Any]
) -> Callable[[], AbstractContextManager[Any]]:
    """Return a patch that calls `broken`, which is given the right function first, in place of a function.

    Args:
        owner: the module or class whose attribute it is, where it is looked up by those who call
            it.
        name: of the attribute.
        broken: called with the right function, and then with what the function is called with.
    """

    def patch() -> AbstractContextManager[Any]:
        right = getattr(owner, name)

        def instead(*arguments: Any, **keywords: Any) -> Any:
            return broken(right, *arguments, **keywords)

        return mock.patch.object(owner, name, instead)

    return patch


def rewritten(function: Any, old: str, new: str) -> Callable[[], AbstractContextManager[Any]]:
    """Return a patch that changes a few words of a function's source, wherever the function was imported to.

    Args:
        function: or method, decorated or not.
        old: code that its source has exactly once; how it is laid out doesn't matter.
        new: what stands there instead; with the indentation below ``def`` from its second line on.
    """

    @contextlib.contextmanager
    def patch() -> Iterator[None]:
        plain = inspect.unwrap(function)
        right = plain.__code__
        plain.__code__ = _compile_rewritten(plain, old, new)
        try:
            yield
        finally:
            plain.__code__ = right

    return patch


def _compile_rewritten(function: types.FunctionType, old: str, new: str) -> types.CodeType:
    """Return the code of a function after a change of its source. Raises: NameError if it isn't there once."""
    source = ast.unparse(ast.parse(textwrap.dedent(inspect.getsource(function))))
    found = _find_tokens(source, old)
    if len(found) != 1:
        raise NameError(f"{function.__qualname__} has {old!r} {len(found)} times")
    begin, end = found[0]
    source = source[:begin] + new.strip() + source[end:]
    flags = __future__.annotations.compiler_flag
    module = compile(source, function.__code__.co_filename, "exec", flags=flags, dont_inherit=True)
    for code in module.co_consts:
        if isinstance(code, types.CodeType) and code.co_name == function.__name__:
            if code.co_freevars != function.__code__.co_freevars:
                break
            return code
    raise NameError(f"{function.__qualname__} can't be compiled by itself")


def _find_tokens(source: str, wanted: str) -> list[tuple[int, int]]:
    """Return the places of some code in a source that `ast.unparse` has written.

    Only tokens count: spaces, line breaks, comments, quotes and trailing commas are free.
    """
    for rest in ("", " pass"):  # the head of a block is no statement by itself
        with contextlib.suppress(SyntaxError):  # part of a statement, such as a condition
            wanted = ast.unparse(ast.parse(textwrap.dedent(wanted) + rest))
            wanted = wanted.removesuffix(rest)
            break
    lines = [0, *itertools.accumulate(len(line) for line in source.splitlines(keepends=True))]
    tokens = list(_tokens_of(source))
    texts = [_text_of(token) for token in tokens]
    words = [_text_of(token) for token in _tokens_of(wanted)]
    return [
        (
            lines[tokens[at].start[0] - 1] + tokens[at].start[1],
            lines[tokens[at + len(words) - 1].end[0] - 1] + tokens[at + len(words) - 1].end[1],
        )
        for at in range(len(tokens) - len(words) + 1)
        if texts[at : at + len(words)] == words
    ]


def _tokens_of(source: str) -> Iterator[tokenize.TokenInfo]:
    with contextlib.suppress(tokenize.TokenError, IndentationError):  # part of a statement
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type not in _SPACE:
                yield token


def _text_of(token: tokenize.TokenInfo) -> str:
    """Return the text of a token, with the quotes of `repr` if it is a string."""
    if token.type == tokenize.STRING and not token.string.lower().startswith(("f", "rf")):
        return repr(ast.literal_eval(token.string))
    return token.string


class _Broken:
    """Runs the tests of each mutant with its fault around the body of each test, and records the outcomes.

    Attributes:
        outcomes: by name of the mutant, the outcomes of its tests.
    """

    def __init__(self, mutants: Mapping[str, Mutant]) -> None:
        self._mutants = mutants
        self._name = ""
        self.outcomes: dict[str, list[str]] = {name: [] for name in mutants}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leave out what asks a server: a clause is as broken elsewhere."""
        items[:] = [item for item in items if kind_of(item) != "s3"]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run the tests of one mutant after the other; no fixture lives on from mutant to mutant."""
        if session.testsfailed:
            raise session.Interrupted("a test of a mutant can't be collected")
        for name, mutant in self._mutants.items():
            self._name = name
            items = [item for item in session.items if _is_named(item, mutant.tests)]
            for item, following in zip(items, [*items[1:], None], strict=True):
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                # Where a debugger would look for it, pytest keeps the last error, and with it all
                # that the test held.
                for kept in ("last_exc", "last_type", "last_value", "last_traceback"):
                    vars(sys).pop(kept, None)
        return True

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_pyfunc_call(self) -> Generator[None, object, object]:
        outcomes = self.outcomes[self._name]
        with contextlib.ExitStack() as fault:
            try:
                fault.enter_context(self._mutants[self._name].patch())
            except Exception as error:
                outcomes.append(f"stale: {error!r}")
                raise
            try:
                answer = yield
            except STALE as error:
                outcomes.append(f"stale: {error!r}")
                raise
            except (Exception, pytest.fail.Exception) as error:
                outcomes.append(f"convicted: {error!r:.200}")
                raise
        outcomes.append("passed")
        return answer


def _is_named(item: pytest.Item, tests: Sequence[str]) -> bool:
    path = item.path.relative_to(TESTS).as_posix()
    nodes = {f"{path}::{item.name}", f"{path}::{item.name.partition('[')[0]}"}
    return not nodes.isdisjoint(tests)


def convict(mutants: Mapping[str, Mutant]) -> dict[str, list[str]]:
    """Run each mutant's tests with the mutant, all in one nested run of pytest.

    Returns:
        By name of the mutant, the outcome of each test with each of its parameters: "convicted:
        ...", "passed", or "stale: ...".
    """
    broken = _Broken(mutants)
    options = (
        "-q",
        "--no-header",
        "--no-summary",
        "--tb=no",
        "--durations=1",
        "-m",
        "",
        "-n",
        "0",
        "--timeout=0",
    )
    # The second one collects the garbage of the whole process five times, at the end of each run.
    without = ("-p", "no:cacheprovider", "-p", "no:unraisableexception")
    named = dict.fromkeys(test for mutant in mutants.values() for test in mutant.tests)
    pytest.main([*options, *without, *(str(TESTS / test) for test in named)], plugins=[broken])
    return broken.outcomes
