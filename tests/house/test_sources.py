"""What every module looks like: documented, short enough to read, and importing only what it may."""

import ast

import pytest

from tests.house.sources import ROOT, code_lines, imported_modules, iter_functions, parse, python_files

FUNCTION_LINES = 60  # one screen: a function that needs a second one usually holds a second idea
MODULE_LINES = 600

# Functions that may be longer, each with its reason: {"ckptfmt/x.py": {"Class.method": "why"}}. Empty is the aim.
LONGER_FUNCTIONS: dict[str, dict[str, str]] = {}

OURS = python_files("ckptfmt", "conformance", "benchmarks")


def name_of(path):
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", OURS, ids=name_of)
def test_every_module_has_a_docstring(path):
    assert ast.get_docstring(parse(path)), f"{name_of(path)} doesn't say what lives in it"


@pytest.mark.parametrize("path", OURS, ids=name_of)
def test_modules_are_short(path):
    lines = path.read_text("utf-8").count("\n")

    assert lines <= MODULE_LINES, f"{name_of(path)} has {lines} lines; which part of it has a name of its own?"


@pytest.mark.parametrize("path", OURS, ids=name_of)
def test_functions_fit_on_a_screen(path):
    measured = {name: code_lines(function) for name, function in iter_functions(parse(path))}
    too_long = {name: lines for name, lines in measured.items() if lines > FUNCTION_LINES}
    excused = LONGER_FUNCTIONS.get(name_of(path), {})

    assert not {name: lines for name, lines in too_long.items() if name not in excused}
    assert excused.keys() <= too_long.keys(), "no longer too long: take it off the list"


def test_the_list_of_longer_functions_names_files_that_exist():
    assert LONGER_FUNCTIONS.keys() <= {name_of(path) for path in OURS}


@pytest.mark.parametrize("path", python_files("conformance"), ids=name_of)
def test_the_suite_does_not_lean_on_the_library_it_judges(path):
    if "adapters" in path.relative_to(ROOT).parts:
        pytest.skip("an adapter is the one place that knows its implementation")

    roots = {name.partition(".")[0] for name in imported_modules(parse(path))}

    assert "ckptfmt" not in roots
