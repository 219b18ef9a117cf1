"""Every module is documented, and imports only what it may."""

import ast

import pytest

from tests.house.sources import ROOT, imported_modules, parse, python_files

OURS = python_files("ckptfmt", "conformance", "tools", "benchmarks")


def name_of(path):
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", OURS, ids=name_of)
def test_every_module_has_a_docstring(path):
    assert ast.get_docstring(parse(path)), f"{name_of(path)} doesn't say what lives in it"


@pytest.mark.parametrize("path", python_files("conformance"), ids=name_of)
def test_the_suite_does_not_lean_on_the_library_it_judges(path):
    if "adapters" in path.relative_to(ROOT).parts:
        pytest.skip("an adapter is the one place that knows its implementation")

    roots = {name.partition(".")[0] for name in imported_modules(parse(path))}

    assert "ckptfmt" not in roots
