"""The house: a newcomer finds a module by its name, and old paths that README named still lead there."""

import ast
import collections
import importlib
import re

import pytest

from tests.house.picture import draw, drawn
from tests.house.sources import ROOT

PACKAGE = ROOT / "ckptfmt"
TOOLS = ROOT / "tools" / "ckptfmt_tools"
MODULES = sorted(
    path
    for package in (PACKAGE, TOOLS)
    for path in package.rglob("*.py")
    if path.name not in ("__init__.py", "__main__.py")
)


def test_no_two_modules_have_one_name():
    counts = collections.Counter(path.name for path in MODULES)
    assert [name for name, count in counts.items() if count > 1] == []


def test_no_two_modules_have_a_class_of_one_name():
    counts = collections.Counter(
        node.name
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, count in counts.items() if count > 1] == []


def test_the_top_level_is_for_users():
    files = [path.name for path in PACKAGE.glob("*.py")]
    assert len(files) <= 15, files  # goodput.py and interop.py go with 2.0


@pytest.mark.parametrize(
    ("old", "new", "names"),
    [
        (
            "ckptfmt.interop.loaders",
            "ckptfmt.adapters.data_loaders",
            ["ConsumedSamples", "ForeignLoader"],
        ),
        (
            "ckptfmt.goodput.interval",
            "ckptfmt.loop.interval",
            ["Level", "best_interval_s", "choose_every", "expected_waste"],
        ),
    ],
)
def test_what_a_page_named_elsewhere_is_still_found_there(old, new, names):
    for name in names:
        assert getattr(importlib.import_module(old), name) is getattr(
            importlib.import_module(new), name
        )


def paths_named(page: str) -> set[str]:
    return set(
        re.findall(
            r"`((?:[a-z0-9_]+/)*[a-z0-9_]+\.py|(?:[a-z0-9_]+/)+)`", (ROOT / page).read_text("utf-8")
        )
    )


@pytest.mark.parametrize("page", ["ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_the_maps_name_what_is_there(page):
    named = paths_named(page)
    assert [
        name
        for name in sorted(named)
        if not (PACKAGE / name).exists() and not (ROOT / name).exists()
    ] == []


def test_contributors_are_told_targets_that_exist():
    told = set(re.findall(r"`make ([a-z0-9 -]+)`", (ROOT / "CONTRIBUTING.md").read_text("utf-8")))
    targets = set(
        re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    )
    assert {target for line in told for target in line.split()} <= targets


def test_the_map_names_every_folder():
    named = paths_named("ARCHITECTURE.md")
    folders = {f"{path.name}/" for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    folders |= {
        f"tools/ckptfmt_tools/{path.name}/"
        for path in TOOLS.iterdir()
        if (path / "__init__.py").exists()
    }
    assert folders - named == set()


def test_the_picture_of_the_layers_is_that_of_the_contract():
    """If it isn't: ``python -m tests.house.picture``."""
    assert drawn()[1] == draw()


def defined_in(path) -> set[str]:
    """Return the names that a module defines, members of classes included."""
    tree = ast.parse(path.read_text("utf-8"))
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        targets = node.targets if isinstance(node, ast.Assign) else []
        targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
        names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def test_the_map_names_symbols_that_exist():
    page = (ROOT / "ARCHITECTURE.md").read_text("utf-8")
    found = re.findall(
        r"`([A-Za-z_.]+)`(?: and `([A-Za-z_]+)`)? (?:in |\()`([a-z0-9_/]+\.py)`", page
    )
    assert len(found) >= 25
    missing = []
    for one, other, name in found:
        path = PACKAGE / name if (PACKAGE / name).exists() else ROOT / name
        missing += [
            f"{name}: {word}"
            for word in (one.split(".")[-1], other)
            if word and word not in defined_in(path)
        ]
    assert missing == []


#: The twelve changes that the map answers, and some that are asked for less often.
CHANGES = [
    "a dtype",
    "a codec of deltas",
    "a retention rule",
    "a store",
    "a lease, or a hold",
    "a trigger",
    "a metric, a tag or an event",
    "a progress bar",
    "signatures",
    "encryption at rest",
    "a plug-in",
    "a command",
]


def test_the_map_answers_the_usual_changes():
    page = (ROOT / "ARCHITECTURE.md").read_text("utf-8")
    assert [change for change in CHANGES if f"\n| {change} | " not in page] == []
    assert len(page.split()) <= 2500
