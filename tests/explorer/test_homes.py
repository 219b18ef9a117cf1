"""Three homes and two jobs: no order of their steps makes a fork, loses two saves, or ends the run."""

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Final
from unittest import mock

import pytest

from ckptfmt.run import elections, votes
from tests.explorer import homes
from tests.explorer.homes import CASES, NEW_RUN, HomesScene, Job
from tests.explorer.schedule import explore, sample
from tests.explorer.telling import tell

SEED = 20261129
ALL: Final[Mapping[str, Mapping[str, Job]]] = {**CASES, "new_run": NEW_RUN}


@pytest.fixture(autouse=True)
def _in_turn() -> Iterator[None]:
    with homes.in_turn():
        yield


def scene_of(name: str) -> Callable[[], HomesScene]:
    initial: Mapping[str, bytes] = {} if name == "new_run" else homes.prepare()
    return lambda: HomesScene(ALL[name], initial)


@pytest.mark.parametrize("name", ALL)
def test_no_order_by_chance_does_harm(name: str) -> None:
    """REQ-RUN-066 to REQ-RUN-070."""
    result = sample(scene_of(name), count=12, rng=random.Random(SEED))
    assert result.violations == []


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ALL)
def test_no_order_of_steps_does_harm(name: str) -> None:
    result = explore(scene_of(name), preemptions=1)
    tell(f"{name}, 1 preemption: {result}")
    assert result.violations == []
    assert result.run_count > 50


def _no_rule(*_: object, **__: object) -> None:
    return None


def _replaced(owner: Any, name: str, by: Any) -> Callable[[], AbstractContextManager[Any]]:
    return lambda: mock.patch.object(owner, name, by)


@contextlib.contextmanager
def _majority_of_one() -> Iterator[None]:
    with (
        mock.patch.object(elections, "majority_of", return_value=1),
        mock.patch.object(votes, "majority_of", return_value=1),
    ):
        yield


#: Broken protocols, each with a case that convicts it.
MUTANTS: Final[Mapping[str, tuple[str, Callable[[], AbstractContextManager[Any]]]]] = {
    "commits_not_confirmed": (
        "all_reach_all",
        _replaced(votes.OtherHomes, "confirm", _no_rule),
    ),
    "commits_ahead_of_the_copies": (
        "copies_are_late",
        _replaced(votes.OtherHomes, "await_copy", _no_rule),
    ),
    "one_vote_is_enough": (
        "no_majority",
        _majority_of_one,
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_protocol_is_convicted(name: str) -> None:
    case, patch = MUTANTS[name]
    make = scene_of(case)
    with patch():
        result = explore(make, preemptions=1, stop_early=True)
    tell(f"{name}: convicted after {result.run_count} runs")
    assert {violation.rule for violation, _ in result.violations} & {"fork", "twice"}
