"""Every command, small: the names that goals are said in, the record's shape, and what is printed."""

import functools
import json
import re
import subprocess
import sys

import pytest

from benchmarks.__main__ import parse_arguments
from tests.benchmarks.storage import skip_unless_cold
from tests.house.sources import ROOT
from tests.house.test_repository import MACHINE_PLACE

NAMES = {
    "save": {"save_vs_direct", "save_vs_dcp", "save_vs_safetensors"},
    "stall": {
        "stall_vs_copy",
        "first_stall_vs_later",
        "cpu_vs_floor",
        "lost_vs_floor",
        "lost_vs_dcp_thread",
        "lost_vs_dcp_process",
        "overlap_blocked_vs_copy",
        "overlap_lost_vs_not",
    },
    "load": {
        "load_cold_vs_direct",
        "verified_vs_unverified_cold",
        "load_warm_vs_dcp",
        "load_warm_vs_torch",
        "extra_memory_mib",
    },
    "reshard": {
        "reshard_rows_vs_same",
        "reshard_rows_vs_same_warm",
        "overread_rows",
        "overread_columns",
        "overread_columns_shared",
    },
    "plan": {
        "commit_s",
        "check_s",
        "open_plan_s",
        "metadata_read_fraction",
        "exponent",
        "nbytes_per_box",
    },
    "s3": {"save_vs_obstore", "load_vs_obstore", "delta_vs_bytes", "cache_vs_local_lost"},
}
#: What has no goal, and stands beside.
BESIDE = {
    "load": {
        "load_cold_vs_touched",
        "touched_vs_direct",
        "load_warm_vs_bare",
        "bare_vs_dcp",
        "bare_vs_torch",
        "load_warm_vs_torch_mmap",
        "load_warm_vs_safetensors",
    },
    "reshard": {"reshard_columns_vs_same", "overread_rows_with_edges", "columns_2_warm_vs_dcp"},
    "s3": {"cache_vs_upload_lost"},
}
CONTESTANTS = {
    "save": {"ckptfmt", "raw", "raw_huge_pages", "dcp", "dcp_best", "safetensors", "torch_save"},
    "stall": {"ckptfmt", "ckptfmt_copy", "dcp_thread", "dcp_process", "floor"},
    "load": {
        "ckptfmt_cold",
        "ckptfmt_cold_unverified",
        "raw_cold",
        "raw_touched_cold",
        "ckptfmt_warm",
        "bare_warm",
        "dcp",
        "torch_load",
        "torch_load_mmap",
        "safetensors",
    },
    "reshard": {"ckptfmt", "ckptfmt_shared", "dcp"},
    "plan": {"ckptfmt", "dcp"},
    "s3": {"ckptfmt", "obstore"},
}
#: Peers that no environment must have.
OPTIONAL = {"s3torchconnector", "s3fs"}
SIZES = {**dict.fromkeys(NAMES, "--nbytes 20000000"), "plan": "--ranks 16 --tensors 64"}
TENSORS = {"save": 198, "stall": 198, "load": 198, "reshard": 25, "plan": 64, "s3": 198}


#: What `make test` runs; the other commands, of which each takes half a minute of processor time,
#: are exhaustive.
SAMPLE = ("save", "plan")


def param(command):
    return command if command in SAMPLE else pytest.param(command, marks=pytest.mark.exhaustive)


EACH = pytest.mark.parametrize("command", [param(command) for command in NAMES])


@pytest.fixture(scope="module")
def finish(tmp_path_factory):
    """Return a function that runs a command once, and returns what came of it and the folder that it worked in."""

    @functools.cache
    def run(command):
        folder = tmp_path_factory.mktemp(command)
        if command in ("load", "reshard"):
            skip_unless_cold(folder)
        options = [command, *SIZES[command].split(), "--rounds", "1", "--json"]
        places = [
            "--directory",
            str(folder / "files"),
            "--out",
            str(folder / "records" / "record.json"),
        ]
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks", *options, *places],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        return done, folder

    return run


@pytest.mark.slow
@EACH
def test_prints_the_record_and_nothing_else(finish, command):
    done, folder = finish(command)

    # On a busy machine torch says that DCP's own process is slow to end.
    said = [
        line
        for line in done.stderr.splitlines()
        if not line.startswith("Checkpoint background process is still")
    ]
    assert (done.returncode, said) == (0, [])
    assert json.loads(done.stdout) == json.loads(
        (folder / "records" / "record.json").read_text("utf-8")
    )


@pytest.mark.slow
@EACH
def test_leaves_no_file_behind(finish, command):
    _, folder = finish(command)

    assert list((folder / "files").iterdir()) == []


@pytest.mark.slow
@EACH
def test_every_goal_has_a_number_and_its_spread(finish, command):
    done, _ = finish(command)
    record = json.loads(done.stdout)

    assert NAMES[command] | BESIDE.get(command, set()) <= record["ratios"].keys()
    assert all(type(ratio) is float for ratio in record["ratios"].values())
    assert record["goals"].keys() == NAMES[command]
    assert record["spread"].keys() == record["ratios"].keys()
    assert all(
        0 < spread["p10"] <= record["ratios"][name] <= spread["p90"]
        for name, spread in record["spread"].items()
        if name != "exponent"  # of so few ranks it may be anything
    )


@pytest.mark.slow
@EACH
def test_a_record_says_what_was_measured_where_and_how(finish, command):
    done, folder = finish(command)
    record = json.loads(done.stdout)

    assert record["command"] == f"python -m benchmarks {command} {SIZES[command]} --rounds 1"
    assert re.fullmatch("[0-9a-f]{40}", record["git_commit"])
    assert record["packages"].keys() >= {"ckptfmt", "torch", "safetensors"}
    assert record["machine"].keys() >= {"cores", "ram_gib", "kernel"}
    assert record["storage"]["fs"] != "unknown"
    assert record["workload"]["tensors"] == TENSORS[command]
    assert record["settings"].keys() - OPTIONAL == CONTESTANTS[command]
    assert all(
        "call" in settings or "threads" in settings for settings in record["settings"].values()
    )
    assert set(record["repeats"].values()) == {1}
    assert all(len(rows) == 1 for rows in record["rounds"].values())
    assert str(folder) not in done.stdout
    assert not MACHINE_PLACE.search(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("command", [param("save"), param("stall")])
def test_memory_of_trainer_and_saver_is_in_the_record(finish, command):
    memory = json.loads(finish(command)[0].stdout)["memory"]

    assert memory["saver_processes"] == 1
    assert 2**20 < memory["saver_anonymous_nbytes"] < 2**30
    assert 0 <= memory["trainer_beyond_slots_nbytes"] < 2**30


@pytest.mark.slow
@pytest.mark.exhaustive
def test_what_a_load_took_of_memory_is_in_the_record_for_every_size(finish):
    record = json.loads(finish("load")[0].stdout)

    sizes = record["notes"]["extra_memory"]
    told = [size["nbytes"] / record["workload"]["nbytes"] for size in sizes]
    assert told == pytest.approx([0.25, 1.0, 3.75], rel=0.1)
    assert record["ratios"]["extra_memory_mib"] == pytest.approx(
        max(size["extra_mib"] for size in sizes), rel=1e-4
    )


@pytest.mark.slow
@pytest.mark.exhaustive
def test_what_was_read_and_needed_is_in_the_record(finish):
    record = json.loads(finish("reshard")[0].stdout)

    needed_nbytes = record["workload"]["nbytes"]
    for name, run in record["rounds"]["cold"][0]["runs"].items():
        assert run["needed_nbytes"] == needed_nbytes, name
        assert needed_nbytes <= run["verified_nbytes"] <= run["read_nbytes"]
        # What the reader says is what the kernel says, but for metadata and whole pages.
        assert run["by_calls_nbytes"] == pytest.approx(
            run["read_nbytes"] + run["metadata_nbytes"], rel=0.05
        )
    for row in record["rounds"]["shared"]:
        assert row["needed_nbytes"] == needed_nbytes
        assert len(row["ranks"]) == 2


@pytest.mark.slow
def test_what_bad_tilings_were_refused_as_is_in_the_record(finish):
    refused = json.loads(finish("plan")[0].stdout)["notes"]["refused"]

    assert len(refused) == 4 * 4  # kinds of cuts, and of what is wrong with them
    assert all(re.search("TILING_GAP|TILING_OVERLAP|BOX_BOUNDS", line) for line in refused)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_file_that_is_named_has_the_record_and_tables_are_printed(tmp_path):
    command = [
        "plan",
        "--ranks",
        "16",
        "--tensors",
        "64",
        "--rounds",
        "1",
        "--json",
        str(tmp_path / "record.json"),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", *command, "--directory", str(tmp_path / "files")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )

    record = json.loads((tmp_path / "record.json").read_text("utf-8"))
    assert all(name in done.stdout for name in record["ratios"])


def test_a_bad_number_is_refused_at_once(capsys):
    with pytest.raises(SystemExit) as caught:
        parse_arguments(["save", "--nbytes", "-1"])

    assert caught.value.code == 2
    assert "isn't a positive whole number" in capsys.readouterr().err
