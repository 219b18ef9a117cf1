"""From the built wheels, in an empty directory outside of this checkout, the suite runs: by its command, by pytest."""

import json
import os
import re
import shlex
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest

from tests.conformance.vectors import VECTORS
from tests.distributions import build_once, pip, run
from tests.house.sources import ROOT

pytestmark = pytest.mark.slow

HANDFUL = [
    "--filter",
    "manifest/valid/*",
    "--filter",
    "documents/invalid/e*",
    "--filter",
    "trees/valid/*",
]


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    return [build_once(tmp_path_factory, name)[1] for name in ("ckptfmt-conformance", "ckptfmt")]


@pytest.fixture(scope="module")
def installed(wheels, tmp_path_factory):
    folder = tmp_path_factory.mktemp("installed")
    run(*pip(sys.executable, "--no-deps", "--target", folder, *wheels), cwd=folder)
    return folder


def test_the_wheel_carries_all_vectors_as_they_are(wheels):
    with zipfile.ZipFile(wheels[0]) as archive:
        carried = {
            name.removeprefix("ckptfmt_conformance/vectors/"): archive.read(name)
            for name in archive.namelist()
            if name.startswith("ckptfmt_conformance/vectors/")
        }
    files = {
        path.relative_to(VECTORS).as_posix(): path for path in VECTORS.rglob("*") if path.is_file()
    }

    assert carried.keys() == files.keys()
    assert all(carried[name] == path.read_bytes() for name, path in files.items())
    assert len(files) > 30


def test_the_command_runs_from_the_wheel(installed, tmp_path):
    command = [sys.executable, "-m", "ckptfmt", "conformance", "run", "--adapter", "reference"]
    report = tmp_path / "report.json"

    out = run(*command, *HANDFUL, "--json", str(report), cwd=tmp_path, path=installed)

    assert re.search(r"\(format [0-9./]+\): \d\d+ PASS in ", out)
    results = json.loads(report.read_text())
    assert results["green"]
    assert {result["status"] for result in results["results"]} == {"PASS"}
    where = run(
        sys.executable, "-c", ("import ckptfmt, ckptfmt_conformance as c; print(ckptfmt.__file__,"
        " c.__file__)"),
        cwd=tmp_path, path=installed,
    )  # fmt: skip
    assert where.split() == [
        str(installed / name / "__init__.py") for name in ("ckptfmt", "ckptfmt_conformance")
    ]


def test_a_broken_adapter_is_red_from_the_wheel(installed, tmp_path):
    command = [
        sys.executable,
        "-m",
        "ckptfmt",
        "conformance",
        "run",
        "--adapter",
        "broken/lost_tuples",
    ]

    assert "FAIL        trees/valid/sequences" in run(
        *command, *HANDFUL, cwd=tmp_path, path=installed, code=1
    )


def test_the_adapter_of_a_user_is_found_in_the_current_directory(installed, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from ckptfmt_conformance.adapters.reference import Reference\nclass Mine(Reference):"
        " pass\n"
    )
    command = [
        sys.executable,
        str(installed / "bin" / "ckptfmt"),
        "conformance",
        "run",
        "--adapter",
        "mine:Mine",
    ]

    assert "PASS" in run(*command, "--filter", "manifest/valid/*", cwd=tmp_path, path=installed)


@pytest.mark.parametrize("by_environment", [True, False])
def test_pytest_runs_from_the_wheel(installed, tmp_path, by_environment):
    pytest_command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    if by_environment:
        command = [
            "env",
            "CKPTFMT_ADAPTER=reference",
            *pytest_command,
            "--pyargs",
            "ckptfmt_conformance",
        ]
        command += ["-k", "manifest and valid and small or documents and invalid and empty"]
    else:
        command = [
            *pytest_command,
            "-p",
            "ckptfmt_conformance.plugin",
            "--pyargs",
            "ckptfmt_conformance",
        ]
        command += ["--adapter", "reference", *HANDFUL]

    out = run(*command, cwd=tmp_path, path=installed)

    assert re.search(r"\d passed", out)
    assert "failed" not in out
    assert "skipped" not in out


def test_the_lines_to_copy_name_what_there_is(installed, tmp_path):
    text = (ROOT / "conformance" / "RUN_IN_YOUR_CI.md").read_text()
    block = text.partition("```yaml\n")[2].partition("```")[0]
    (line,) = [line for line in block.splitlines() if "conformance run" in line]
    words = shlex.split(line.partition("- run: ")[2])
    (tmp_path / "my-adapter").write_text(
        f"#!/bin/sh\nexec {shlex.quote(sys.executable)} -m"
        " ckptfmt_conformance.adapters.reference"
        ' "$@"\n'
    )
    (tmp_path / "my-adapter").chmod(0o755)

    assert len(block.strip().splitlines()) == 12
    run(sys.executable, *words[1:], "--filter", "manifest/valid/*", cwd=tmp_path, path=installed)
    assert (tmp_path / "junit.xml").is_file()
    assert (tmp_path / "conformance.html").is_file()


def test_the_action_runs_what_it_is_told(installed, tmp_path):
    text = (ROOT / "conformance" / "action.yml").read_text()
    (script,) = re.findall(r"      run: \|\n((?:        .*\n)+)", text)
    environment = [
        "ADAPTER=reference",
        "ARGUMENTS=--kind open --filter 'manifest/valid/*'",
        "REPORTS=out",
    ]
    environment.append(f"PATH={Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")

    out = run(
        "env",
        *environment,
        "bash",
        "-euo",
        "pipefail",
        "-c",
        textwrap.dedent(script),
        cwd=tmp_path,
        path=installed,
    )

    assert "PASS" in out
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "badge.svg", "conformance.html", "junit.xml", "report.json",
    ]  # fmt: skip
    assert json.loads((tmp_path / "out" / "report.json").read_text())["selection"] == [
        "--filter manifest/valid/*", "--kind open",
    ]  # fmt: skip
