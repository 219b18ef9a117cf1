"""One clause broken on purpose, and which test convicts it: what makes sure that a clause's test can fail."""

from __future__ import annotations
import __future__

import contextlib
import dataclasses
import inspect
import sys
import textwrap
import types
from collections.abc import Callable, Generator, Iterator, Sequence
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
        old: what is in its source exactly once, from the indentation of ``def`` on.
        new: what stands there instead.
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
    source = textwrap.dedent(inspect.getsource(function))
    if source.count(old) != 1:
        raise NameError(f"{function.__qualname__} has {old!r} {source.count(old)} times")
    # Tracebacks tell the lines of the file, as far as nothing was added.
    source = "\n" * (function.__code__.co_firstlineno - 1) + source.replace(old, new)
    flags = __future__.annotations.compiler_flag
    module = compile(source, function.__code__.co_filename, "exec", flags=flags, dont_inherit=True)
    for code in module.co_consts:
        if isinstance(code, types.CodeType) and code.co_name == function.__name__:
            if code.co_freevars != function.__code__.co_freevars:
                break
            return code
    raise NameError(f"{function.__qualname__} can't be compiled by itself")


class _Broken:
    """Puts a mutant's fault in around the body of each test, and remembers how each went."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant
        self.outcomes: list[str] = []

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leave out what asks a server: a clause is as broken elsewhere."""
        items[:] = [item for item in items if kind_of(item) != "s3"]

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_pyfunc_call(self) -> Generator[None, object, object]:
        with contextlib.ExitStack() as fault:
            try:
                fault.enter_context(self._mutant.patch())
            except Exception as error:
                self.outcomes.append(f"stale: {error!r}")
                raise
            try:
                answer = yield
            except STALE as error:
                self.outcomes.append(f"stale: {error!r}")
                raise
            except (Exception, pytest.fail.Exception) as error:
                self.outcomes.append(f"convicted: {error!r:.200}")
                raise
        self.outcomes.append("passed")
        return answer


def convict(mutant: Mutant, tests: Sequence[str] = ()) -> list[str]:
    """Run tests with a mutant, those that it names unless others are given.

    Returns:
        How each test, with each of its parameters, went: "convicted: ...", "passed", or "stale:
        ...".
    """
    broken = _Broken(mutant)
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
    nodes = [str(TESTS / test) for test in tests or mutant.tests]
    pytest.main([*options, *without, *nodes], plugins=[broken])
    # Where a debugger would look for it, pytest keeps the last error, and with it all that the test
    # held.
    for name in ("last_exc", "last_type", "last_value", "last_traceback"):
        vars(sys).pop(name, None)
    return broken.outcomes
