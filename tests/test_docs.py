"""The pages of docs/: their examples are Python, their links lead somewhere, and their versions are those tested."""

import re
from pathlib import Path

import pytest

from ckptfmt.__main__ import main

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))


def exit_code_of(arguments):
    try:
        return main(arguments)
    except SystemExit as ended:
        return ended.code


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_are_python_and_links_lead_somewhere(page):
    text = page.read_text("utf-8")
    fences = re.findall(r"^```(.*)\n((?:.*\n)*?)^```$", text, re.MULTILINE)
    assert {kind for kind, _ in fences} <= {"python no-run", "console"}
    for kind, body in fences:
        if kind == "console":
            for command in re.findall(r"^\$ python -m ckptfmt (\S+)", body, re.MULTILINE):
                assert exit_code_of([command, "--help"]) == 0, command
        else:
            compile(body, page.name, "exec")
    for target in re.findall(r"\]\((?!https?:)([^)#]*)", text):
        assert (page.parent / target).exists(), target


def test_the_frameworks_are_those_that_are_tested():
    """And no plug-in is left out."""
    page = (ROOT / "docs/frameworks.md").read_text("utf-8")
    lines = (ROOT / "constraints-plugins.txt").read_text("utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    told = re.findall(r"\b(torch|transformers|accelerate|lightning|torchdata|ray|jax|flax|optax) (\d+\.\d+\.\d+)", page)
    assert [(name, version) for name, version in told if pins[name] != version] == []
    plugins = {path.stem for path in (ROOT / "ckptfmt/plugins").glob("*.py")} - {"__init__"}
    assert {name for name in plugins if f"ckptfmt.plugins.{name}" not in page} == set()
