"""What `make gpu` does, rehearsed in small on the processor; no test that needs a device is left out of it."""

import json
import subprocess
import sys
import zipfile

import pytest

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import rehearsal, wheels
from tests.house.sources import ROOT


def run_gpu(out, *arguments):
    command = [
        sys.executable,
        "-m",
        "benchmarks.gpu",
        "--out",
        str(out),
        "--wheels",
        str(out / "none"),
        *arguments,
    ]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=900
    )
    records = (
        (out / "records.jsonl").read_text().splitlines() if (out / "records.jsonl").exists() else []
    )
    return done, [json.loads(record) for record in records]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_first_steps_are_rehearsed_on_the_processor(tmp_path):
    done, records = run_gpu(tmp_path, "--rehearse", "--steps", "environment,round_trip,cuda_tests")

    assert done.returncode == 0, (tmp_path / "output.log").read_text()
    assert [(record["step"], record["exit_code"]) for record in records] == [
        ("environment", 0),
        ("round_trip", 0),
        ("cuda_tests", 0),
    ]
    assert '"went on alike": true' in records[1]["output_tail"]
    assert "needs a CUDA device" in records[2]["output_tail"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "cuda_tests.xml",
        "output.log",
        "records.jsonl",
    ]


def test_a_step_that_fails_or_takes_too_long_does_not_end_the_others(tmp_path, monkeypatch, capsys):
    steps = {
        "fails": ("-c", "print('so'); raise SystemExit(3)"),
        "hangs": ("-c", "import time; print('begun', flush=True); time.sleep(600)"),
        "works": ("-c", "print('{device}')"),
    }
    made = [
        gpu.Step(name=name, arguments=words, limit_s=30 if name != "hangs" else 0.5)
        for name, words in steps.items()
    ]
    monkeypatch.setattr(gpu, "STEPS", made)

    assert gpu.main(["--out", str(tmp_path), "--rehearse", "--wheels", str(tmp_path / "none")]) == 1

    records = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    assert [record["exit_code"] for record in records] == [3, 124, 0]
    assert records[0]["output_tail"] == "so\n"
    assert records[2]["output_tail"] == "cpu\n"
    assert "hangs: exit code 124" in capsys.readouterr().out


def test_without_time_left_nothing_is_begun(tmp_path, monkeypatch):
    monkeypatch.setattr(
        gpu, "STEPS", [gpu.Step(name="late", arguments=("-c", "print(1)"), limit_s=30)]
    )
    assert gpu.main(["--out", str(tmp_path), "--bound", "0"]) == 1
    assert json.loads((tmp_path / "records.jsonl").read_text())["exit_code"] == 124


def test_an_unknown_step_is_refused(tmp_path, capsys):
    assert gpu.main(["--out", str(tmp_path / "out"), "--steps", "environment,stalls"]) == 2
    assert "no step stalls" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def test_packages_that_travelled_along_come_before_the_machines(tmp_path):
    with zipfile.ZipFile(tmp_path / "thing-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("thing.py", "NAME = 'ours'")
    site = tmp_path / "site"

    assert gpu.unpack(tmp_path, site) == 1
    environment = gpu.environment_of(site, device="cpu")
    told = subprocess.run(
        [sys.executable, "-c", "import thing; print(thing.NAME)"],
        env=environment,
        capture_output=True,
        check=True,
    )
    assert told.stdout == b"ours\n"


def test_every_test_that_needs_a_device_is_marked_and_run():
    asking = [
        path
        for path in (ROOT / "tests").rglob("test_*.py")
        if "skipif(not torch.cuda" in path.read_text()
    ]
    assert [path.name for path in asking] == ["test_gpu.py"], (
        "mark it @pytest.mark.cuda: `make gpu` runs what is"
    )
    assert {"tests/adapters/test_device.py", "tests/adapters/test_arrivals.py"} <= set(
        gpu.find_tests()
    )
    (step,) = [step for step in gpu.STEPS if step.name == "cuda_tests"]
    assert set(gpu.find_tests()) <= set(step.arguments)


def test_what_travels_along_is_pinned_and_is_what_the_tests_and_the_package_need(tmp_path):
    assert all("==" in pin for pin in wheels.pins())
    rehearsal.lend(tmp_path / "site", ("numpy",))
    assert (tmp_path / "site" / "numpy").is_symlink()
    assert not (tmp_path / "site" / "blake3").exists()
