"""What the repository must not say, and what its files must say alike."""

import re
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.house.sources import ROOT, repository_files

# Put together from pieces, so that this file doesn't name them itself.
MACHINE_PLACES = [
    "/" + "work/",
    "/" + "root/",
    "/" + "opt/(?!local|ml/checkpoints)",  # SageMaker's is a place of its users
    "/" + "home/[a-z]",
    "/" + "Users/[A-Za-z]",
    "pypi" + r"\.org",
    "python" + "hosted",
    "download" + r"\.pytorch",
    "registry" + r"\.npmjs",
]
MACHINE_PLACE = re.compile("|".join(MACHINE_PLACES))

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
REQUIREMENTS = [
    requirement
    for text in [*PROJECT["dependencies"], *EXTRAS["torch"], *EXTRAS["dev"]]
    if (requirement := Requirement(text)).name != PROJECT["name"]
]


def text_lines(path):
    try:
        return path.read_text("utf-8").splitlines()
    except UnicodeDecodeError:
        return []  # a binary file: vectors, pictures


def test_no_file_names_a_machine_or_a_registry():
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
        for path in repository_files()
        for number, line in enumerate(text_lines(path), 1)
        if MACHINE_PLACE.search(line)
    ]

    assert not found, "\n".join(found)


def test_no_file_has_the_markers_of_a_merge():
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in repository_files()
        for number, line in enumerate(text_lines(path), 1)
        if line.startswith(("<" * 7 + " ", ">" * 7 + " "))
    ]

    assert not found


@pytest.mark.parametrize("requirement", REQUIREMENTS, ids=lambda requirement: requirement.name)
def test_every_requirement_is_pinned_to_a_version_in_its_range(requirement):
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    pin = {canonicalize_name(name): version for name, version in pins.items()}[
        canonicalize_name(requirement.name)
    ]

    assert requirement.specifier.contains(pin), f"{requirement} against the pin {pin}"
