"""The house: a newcomer finds a module by its name, and old paths that README named still lead there."""

import collections
import importlib
import re

import pytest

from tests.house.file_list import file_list, written
from tests.house.sources import ROOT

PACKAGE = ROOT / "ckptfmt"
MODULES = sorted(
    path for path in PACKAGE.rglob("*.py") if path.name not in ("__init__.py", "__main__.py")
)


def test_no_two_modules_have_one_name():
    counts = collections.Counter(path.name for path in MODULES)
    assert [name for name, count in counts.items() if count > 1] == []


def test_the_top_level_is_for_users():
    files = [path.name for path in PACKAGE.glob("*.py")]
    assert len(files) <= 13, files  # interop.py goes with 1.0


@pytest.mark.parametrize(
    ("old", "new", "names"),
    [
        (
            "ckptfmt.interop.loaders",
            "ckptfmt.adapters.data_loaders",
            ["ConsumedSamples", "ForeignLoader"],
        )
    ],
)
def test_what_readme_named_elsewhere_is_still_found_there(old, new, names):
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
    assert folders - named == set()


def test_every_file_is_listed_with_its_docstring():
    """If it isn't: ``python -m tests.house.file_list``."""
    assert written()[1] == file_list()
