"""One clause broken on purpose, and which test convicts it: what makes sure that a clause's test can fail."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

__all__ = ["Mutant", "convict", "replaced"]

TESTS = Path(__file__).parents[1]
#: A mutant that dies of one of these is a patch that doesn't fit the code any more, and no broken clause.
STALE = (AttributeError, ImportError, NameError, TypeError)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """The implementation with one thing wrong.

    Attributes:
        clauses: the clauses that it breaks.
        fault: what it does wrong, in a few words that follow "it".
        patch: puts the fault in, and takes it out again at its end. It holds while the body of a test runs, so not in
            fixtures, and not in processes that a test starts afresh.
        tests: the tests that must fail with it, each ``path::name`` with the path from ``tests/``.
    """

    clauses: tuple[str, ...]
    fault: str
    patch: Callable[[], AbstractContextManager[Any]]
    tests: tuple[str, ...]


def replaced(owner: object, name: str, broken: Callable[..., Any]) -> Callable[[], AbstractContextManager[Any]]:
    """Return a patch that calls `broken`, which is given the right function first, in place of a function.

    Args:
        owner: the module or class whose attribute it is, where it is looked up by those who call it.
        name: of the attribute.
        broken: called with the right function, and then with what the function is called with.
    """

    def patch() -> AbstractContextManager[Any]:
        right = getattr(owner, name)

        def instead(*arguments: Any, **keywords: Any) -> Any:
            return broken(right, *arguments, **keywords)

        return mock.patch.object(owner, name, instead)

    return patch


class _Broken:
    """Puts a mutant's fault in around the body of each test, and remembers how each went."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant
        self.outcomes: list[str] = []

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_pyfunc_call(self) -> Generator[None, object, object]:
        try:
            with self._mutant.patch():
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
        How each test, with each of its parameters, went: "convicted: ...", "passed", or "stale: ...".
    """
    broken = _Broken(mutant)
    options = ("-q", "--no-header", "--no-summary", "--tb=no", "--durations=1", "-m", "", "-n", "0", "--timeout=0")
    nodes = [str(TESTS / test) for test in tests or mutant.tests]
    pytest.main([*options, "-p", "no:cacheprovider", *nodes], plugins=[broken])
    return broken.outcomes
