"""``python -m benchmarks frameworks`` measures every framework, and its record says what is meant."""

import json
import types

import pytest

from benchmarks import __main__ as benchmarks
from benchmarks import frameworks
from benchmarks.frameworks import HOW
from tests.plugins import trainings

pytest.importorskip("lightning")
pytest.importorskip("transformers")

pytestmark = pytest.mark.slow


def run_in_fork(command, **_):
    """Run a training of the benchmark in a fork; an interpreter imports the framework for seconds."""
    printed = trainings.run(frameworks.__file__, *command[command.index("-m") + 2 :])
    told = "\n".join(line for line in printed.splitlines() if line.startswith("{"))
    return types.SimpleNamespace(returncode=0, stdout=told, stderr="")


def test_every_framework_is_measured_with_its_own_saving_and_with_the_plug_in(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(frameworks, "subprocess", types.SimpleNamespace(run=run_in_fork))
    out = tmp_path / "record.json"
    command = [
        "frameworks",
        "--nbytes",
        "12e6",
        "--rounds",
        "1",
        "--directory",
        str(tmp_path),
        "--out",
        str(out),
    ]
    assert benchmarks.main(command) == 0

    record, printed = json.loads(out.read_text()), capsys.readouterr().out
    assert record["command"] == "python -m benchmarks frameworks --nbytes 12000000 --rounds 1"
    bounds = {f"dcp_lost_vs_{bound}" for bound in ("staging", "hashing", "writing")}
    assert set(record["ratios"]) == {*record["goals"], *bounds}
    assert all(name in printed for name in record["ratios"])
    for name, ways in HOW.items():
        assert {f"{name}_{how}_s" for how in ways} <= set(record["figures"])
