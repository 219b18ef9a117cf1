"""Both commands, small: the names that goals are said in, the record's shape, and what is printed."""

import json
import re
import subprocess
import sys

import pytest

from tests.house.sources import ROOT
from tests.house.test_repository import MACHINE_PLACE

NAMES = {
    "save": {"save_vs_direct", "save_vs_dcp", "save_vs_safetensors"},
    "stall": {
        "stall_vs_copy",
        "first_stall_vs_later",
        "lost_vs_dcp_thread",
        "lost_vs_dcp_process",
        "overlap_blocked_vs_copy",
        "overlap_lost_vs_not",
    },
}
CONTESTANTS = {
    "save": {"ckptfmt", "raw", "raw_huge_pages", "dcp", "dcp_best", "safetensors", "torch_save"},
    "stall": {"ckptfmt", "ckptfmt_copy", "dcp_thread", "dcp_process"},
}


@pytest.fixture(scope="module", params=["save", "stall"])
def finished(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    command = [request.param, "--nbytes", "20e6", "--rounds", "1", "--json"]
    places = ["--directory", str(folder / "files"), "--out", str(folder / "records" / "record.json")]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", *command, *places], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return request.param, done, folder


@pytest.mark.slow
def test_prints_the_record_and_nothing_else(finished):
    _, done, folder = finished

    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == json.loads((folder / "records" / "record.json").read_text("utf-8"))


@pytest.mark.slow
def test_leaves_no_file_behind(finished):
    _, _, folder = finished

    assert list((folder / "files").iterdir()) == []


@pytest.mark.slow
def test_every_goal_has_a_number_and_its_spread(finished):
    command, done, _ = finished
    record = json.loads(done.stdout)

    assert NAMES[command] <= record["ratios"].keys()
    assert all(type(ratio) is float and ratio > 0 for ratio in record["ratios"].values())
    assert record["goals"].keys() == NAMES[command]
    assert record["spread"].keys() == record["ratios"].keys()
    assert all(0 < spread["p10"] <= spread["p90"] for spread in record["spread"].values())


@pytest.mark.slow
def test_a_record_says_what_was_measured_where_and_how(finished):
    command, done, folder = finished
    record = json.loads(done.stdout)

    assert record["command"] == f"python -m benchmarks {command} --nbytes 20000000 --rounds 1"
    assert re.fullmatch("[0-9a-f]{40}", record["git_commit"])
    assert record["packages"].keys() >= {"ckptfmt", "torch", "safetensors"}
    assert record["machine"].keys() >= {"cores", "ram_gib", "kernel"}
    assert record["storage"]["fs"] != "unknown"
    assert record["workload"]["tensors"] == 198
    assert record["settings"].keys() == CONTESTANTS[command]
    assert all(settings["call" if name[:3] != "raw" else "threads"] for name, settings in record["settings"].items())
    assert set(record["repeats"].values()) == {1}
    assert all(len(rows) == 1 for rows in record["rounds"].values())
    assert str(folder) not in done.stdout
    assert not MACHINE_PLACE.search(done.stdout)


@pytest.mark.slow
def test_memory_of_trainer_and_saver_is_in_the_record(finished):
    memory = json.loads(finished[1].stdout)["memory"]

    assert memory["saver_processes"] == 1
    assert 2**20 < memory["saver_anonymous_nbytes"] < 2**30
    assert 0 <= memory["trainer_beyond_slots_nbytes"] < 2**30


def test_a_bad_number_is_refused_at_once():
    command = [sys.executable, "-m", "benchmarks", "save", "--nbytes", "-1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 2
    assert "isn't a positive whole number" in done.stderr
