"""A night of the fuzzer counts its inputs, and fails after a finding."""

import json
import subprocess

import pytest

from tests.fuzz import night
from tests.fuzz.targets import TARGETS

COUNTED = "stat::number_of_executed_units: 1200\nstat::average_exec_per_sec:     40\n"


@pytest.mark.parametrize("fault", ["", "finding", "hardly begun"])
def test_a_finding_fails_the_night(tmp_path, monkeypatch, capsys, fault):
    def run(command, **_options):
        target = command[command.index("tests.fuzz.guided") + 1]
        if target != "part" or not fault:
            return subprocess.CompletedProcess(command, 0, "", COUNTED)
        output = "Uncaught Python exception: a bug\n" + (COUNTED if fault == "finding" else "")
        return subprocess.CompletedProcess(command, 77 if fault == "finding" else 0, "", output)

    monkeypatch.setattr(subprocess, "run", run)
    figures = tmp_path / "figures.json"

    status = night.main([str(tmp_path / "corpus"), "--jobs", "2", "--json", str(figures)])

    assert status == bool(fault)
    assert ("a bug" in capsys.readouterr().out) is bool(fault)
    found = json.loads(figures.read_text())
    assert set(found) == set(TARGETS)
    assert sum(row["inputs"] for row in found.values()) == 1200 * (
        len(TARGETS) - (fault == "hardly begun")
    )
    assert ["finding" in found[target] for target in TARGETS] == [
        bool(fault) and target == "part" for target in TARGETS
    ]
