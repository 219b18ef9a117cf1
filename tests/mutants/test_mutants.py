"""Each mutant is convicted by every test that it names: a clause that nobody can break unseen."""

import importlib
import pkgutil
from pathlib import Path

import pytest

from ckptfmt.store.local import LocalStore
from tests.mutants.mutant import Mutant, convict, rewritten

HERE = Path(__file__).parent
MUTANTS = {
    f"{module.name}/{name}": mutant
    for module in pkgutil.iter_modules([str(HERE)])
    if module.name not in ("mutant", "test_mutants")
    for name, mutant in importlib.import_module(f"tests.mutants.{module.name}").MUTANTS.items()
}


@pytest.fixture(scope="module")
def outcomes_of(request):
    """Return what gives the outcomes of a mutant; the selected mutants of a module share one nested run."""
    names = [
        item.callspec.params["name"]
        for item in request.session.items
        if item.path == request.path and item.name.startswith("test_a_mutant_is_convicted")
    ]
    found = {}

    def ask(name):
        if name not in found:
            module = name.partition("/")[0]
            same = {one: MUTANTS[one] for one in names if one.partition("/")[0] == module}
            found.update(convict(same))
        return found[name]

    return ask


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_convicted_by_each_test_that_it_names(name, outcomes_of):
    mutant = MUTANTS[name]

    outcomes = outcomes_of(name)

    assert len(outcomes) >= len(mutant.tests) > 0
    assert [outcome for outcome in outcomes if not outcome.startswith("convicted")] == []


@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_without_a_fault_nothing_is_convicted(stride):
    """Else a test that fails in a nested run for another reason would convict everything."""
    tests = sorted({test for mutant in MUTANTS.values() for test in mutant.tests})[::stride]
    harmless = Mutant(
        clauses=(), fault="does nothing", patch=pytest.MonkeyPatch.context, tests=tuple(tests)
    )

    outcomes = convict({"harmless": harmless})["harmless"]

    assert len(outcomes) >= len(tests)
    assert set(outcomes) == {"passed"}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("no such words", ""),
        ("check_prefix(path)", "check_prefix(path"),
        ("check_prefix(path)", "    x"),
    ],
)
def test_what_cannot_be_put_in_convicts_nothing(old, new):
    stale = Mutant(
        clauses=(),
        fault="isn't one",
        patch=rewritten(LocalStore.sync, old, new),
        tests=("store/test_local.py::test_sync_of_what_is_not_there_is_an_error",),
    )

    (outcome,) = convict({"stale": stale})["stale"]

    assert outcome.startswith("stale")


def test_what_was_rewritten_is_as_it_was_behind_the_test():
    right = LocalStore.sync.__code__

    with rewritten(LocalStore.sync, "check_prefix(path)", "pass")():
        assert LocalStore.sync.__code__ is not right

    assert LocalStore.sync.__code__ is right
