"""Each mutant is convicted by every test that it names: a clause that nobody can break unseen."""

import importlib
import pkgutil
from pathlib import Path

import pytest

from tests.mutants.mutant import Mutant, convict

HERE = Path(__file__).parent
MUTANTS = {
    f"{module.name}/{name}": mutant
    for module in pkgutil.iter_modules([str(HERE)])
    if module.name not in ("mutant", "test_mutants")
    for name, mutant in importlib.import_module(f"tests.mutants.{module.name}").MUTANTS.items()
}
HARMLESS = Mutant(clauses=(), fault="does nothing", patch=pytest.MonkeyPatch.context, tests=())


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_convicted_by_each_test_that_it_names(name):
    mutant = MUTANTS[name]

    outcomes = convict(mutant)

    assert len(outcomes) >= len(mutant.tests) > 0
    assert [outcome for outcome in outcomes if not outcome.startswith("convicted")] == []


def test_without_a_fault_nothing_is_convicted():
    outcomes = convict(HARMLESS, ("store/test_local.py::test_sync_of_what_is_not_there_is_an_error",))

    assert outcomes == ["passed"]
