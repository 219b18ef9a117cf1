"""A campaign of faults against a live job, as a user starts it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.exhaustive
COMMAND = [
    sys.executable,
    "-m",
    "ckptfmt_conformance",
    "chaos",
    "--adapter",
    "reference",
    "--seed",
    "3",
]


def marks_of(directory: Path) -> set[str]:
    """Return by what the nodes are known whose processes train in a directory."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            variables = dict(
                one.split("=", 1) for one in entry.read_text("utf-8").split("\0") if "=" in one
            )
        except (OSError, UnicodeDecodeError):
            continue
        if variables.get("CKPTFMT_CHAOS_RUN", "").startswith(str(directory)):
            found.add(variables["CKPTFMT_CHAOS_NODE"])
    return found


def test_job_goes_on_after_a_lost_rank_and_a_damaged_checkpoint(tmp_path):
    kinds = ["--filter", "process/rank-killed", "--filter", "checkpoint/bit-flipped"]
    report, page = tmp_path / "report.json", tmp_path / "report.html"
    told = subprocess.run(
        [
            *COMMAND,
            *kinds,
            "--count",
            "2",
            "--json",
            str(report),
            "--html",
            str(page),
            "--keep",
            str(tmp_path / "kept"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert told.returncode == 0, told.stdout + told.stderr
    injections = json.loads(report.read_text("utf-8"))["injections"]
    assert {one["kind"] for one in injections} == {"process/rank-killed", "checkpoint/bit-flipped"}
    assert all(one["recovered"] and one["identical"] for one in injections)
    assert "process/rank-killed" in page.read_text("utf-8")
    summed = subprocess.run(
        [*COMMAND, "--sum", report, report], capture_output=True, text=True, check=True
    )
    assert "4 of 4 injections of 2 kinds" in summed.stdout


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_campaign_that_is_interrupted_leaves_no_process_and_no_network(tmp_path, number):
    campaign = subprocess.Popen(
        [*COMMAND, "--keep", str(tmp_path / "kept")], env={**os.environ, "TMPDIR": str(tmp_path)}
    )
    try:
        while not (tmp_path / "kept" / "job0" / "progress").exists():
            assert campaign.poll() is None
            time.sleep(0.1)
        marks = marks_of(tmp_path)
        assert len(marks) == 2
        campaign.send_signal(number)
        assert campaign.wait(300) == 130
    finally:
        campaign.kill()
    assert not marks_of(tmp_path)
    for words in (["netns", "list"], ["link"]):
        listed = subprocess.run(["ip", *words], capture_output=True, text=True, check=False).stdout
        assert not any(f"ck{mark[:-1]}" in listed for mark in marks)
    assert not list(tmp_path.glob("chaos-*"))
