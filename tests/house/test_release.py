"""The files of a release and of continuous integration: versions, targets that exist, and builds that are compared."""

import re
import subprocess
import tarfile
import tomllib
import zipfile
from typing import Any

import pytest

from tests.distributions import PROJECTS
from tests.house import release
from tests.house.sources import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))


def test_a_release_has_the_distributions_of_the_repository():
    assert {name: (ROOT / folder).resolve() for name, folder in release.FOLDERS.items()} == PROJECTS


@pytest.fixture
def builds(tmp_path):
    """Two folders with an equal wheel and an equal source distribution."""
    for name in ("one", "other"):
        folder = tmp_path / name
        folder.mkdir()
        write_wheel(folder / "a.whl", b"x")
        with tarfile.open(folder / "a.tar.gz", "w:gz") as archive:
            archive.addfile(tarfile.TarInfo("a/empty"))
        (folder / "a.tar.gz").write_bytes((tmp_path / "one" / "a.tar.gz").read_bytes())
    return tmp_path / "one", tmp_path / "other"


def write_wheel(path, content, year=2026):
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(zipfile.ZipInfo("a/b.py", (year, 1, 1, 0, 0, 0)), content)


def test_equal_builds_have_no_difference_and_sums_that_the_tool_accepts(builds):
    assert release.find_differences(*builds) == []

    release.write_sums(builds[0])
    subprocess.run(["sha256sum", "--check", "--strict", release.SUMS], cwd=builds[0], check=True)


def test_another_content_another_time_and_a_missing_file_are_named(builds):
    one, other = builds
    write_wheel(other / "a.whl", b"y")
    assert release.find_differences(one, other) == ["a.whl differs, in a/b.py"]

    write_wheel(other / "a.whl", b"x", year=2025)
    (other / "a.tar.gz").unlink()
    assert release.find_differences(one, other) == [
        "a.tar.gz is in one build only",
        "a.whl differs, in order, times, modes or compression of its members",
    ]


def test_the_citation_has_the_version_and_the_licence():
    lines = (ROOT / "CITATION.cff").read_text("utf-8").splitlines()

    assert f'version: "{PROJECT["version"]}"' in lines
    assert f"license: {PROJECT['license']}" in lines


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_are_yaml_and_run_what_exists(path):
    yaml: Any = pytest.importorskip("yaml")
    workflow = yaml.safe_load(path.read_text("utf-8"))
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        matrix = job.get("strategy", {}).get("matrix", {}).get("target", [])
        runs = [step["run"] for step in job["steps"] if "run" in step]
        assert runs
        assert set(matrix) <= TARGETS
        for command in runs:
            assert command in (".ci/run", "make ${{ matrix.target }}", "make fuzz")
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111


def test_the_nightly_workflow_runs_all_lines_of_the_night():
    text = (ROOT / ".github" / "workflows" / "nightly.yml").read_text("utf-8")
    line = {"test-exhaustive", "test-plugins-exhaustive", "test-torch", "test-pythons"}

    assert line <= set(re.findall(r"test-[a-z-]+", text))
    assert "run: make fuzz" in text


def test_targets_that_the_page_names_are_there():
    text = (ROOT / "docs" / "releasing.md").read_text("utf-8")
    named = {
        word for line in re.findall(r"`make ([a-z0-9 -]+)`", text) for word in line.split()
    } | set(re.findall(r"^\$ make ([a-z0-9-]+)$", text, re.MULTILINE))

    assert {"release", "test", "test-plugins"} <= named <= TARGETS
