"""A sample of the campaign, and that its oracle finds what it is there to find."""

import json
import mmap
import shutil
import subprocess
import sys

import pytest

from tests.campaign.checker import look_at
from tests.campaign.oracle import Oracle
from tests.campaign.states import Spec, TorchHeld, hold
from tests.campaign.trainer import Life, live
from tests.explorer.telling import tell
from tests.store.helpers import ROOT

SEED = 20261122


def run_campaign(*arguments, timeout_s):
    command = [sys.executable, "-m", "tests.campaign", "--seed", str(SEED), *arguments]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=timeout_s
    )
    tell(done.stdout)
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["problems"] == []
    assert done.returncode == 0, done.stderr
    return report


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_a_sample_of_the_campaign_loses_nothing_and_changes_nothing():
    report = run_campaign(
        "--states", "8", "--torch", "0", "--large", "0", "--lives", "3", timeout_s=900
    )
    assert report["states"] >= 8
    assert report["compared"] >= 2
    assert sum(report["kills"].values()) + sum(report["stops"].values()) + report["ends"] >= 1


@pytest.mark.exhaustive
@pytest.mark.timeout(5000)
def test_a_thousand_states_of_all_kinds():
    report = run_campaign("--states", "1000", timeout_s=4900)
    assert report["large"] >= 20
    assert report["deltas"] >= 100
    assert report["compared"] >= 300
    assert {"trainer", "job", "saver", "coder"} <= report["kills"].keys()


# --- the oracle -----------------------------------------------------------------------------------


def make_life(**members):
    options = {
        "saver": "inline",
        "keep": 2,
        "keep_every": None,
        "deadline_s": 60.0,
    }
    specs = [
        Spec(name="a", dtype="float32", shape=(40, 3), form="rows", course="new"),
        Spec(
            name="b",
            dtype="bfloat16",
            shape=(5, 7),
            form="transposed",
            course="near",
            alias="b.tied",
        ),
        Spec(name="c", dtype="int16", shape=(9,), form="swapped", course="some"),
        Spec(name="d", dtype="complex64", shape=(), form="strided", course="range"),
        Spec(name="e", dtype="bool", shape=(33,), form="own", course="new"),
    ]
    own = {
        "number": 0,
        "seed": 1,
        "worker_count": 1,
        "framework": "numpy",
        "specs": specs,
        "elastic": False,
        "options": options,
        "step_count": 4,
        "own_loop": True,
        "changes": False,
        "meddles": False,
        "wait_chance": 1.0,
        "nap_s": 0.0,
    }
    return Life(**{**own, **members})


@pytest.fixture
def lived(tmp_path):
    """A run after one life of four saves, of which retention has left two, and its oracle."""
    assert (
        live(make_life(), 0, run=tmp_path / "run", log=tmp_path / "log", progress=mmap.mmap(-1, 1))
        == 0
    )
    oracle = Oracle(tmp_path / "run", tmp_path / "log")
    oracle.listen(excused=frozenset())
    return oracle


def judge(oracle, change=lambda loaded: loaded):
    """Load and compare everything; return what is wrong, by kind."""
    for place, ranges in oracle.wanted(again=lambda: True).items():
        oracle.compare(place, change(look_at(oracle.place_of(place), ranges, framework="numpy")))
    oracle.check_kept(is_quiet=True, rescues=True)
    return {kind: getattr(oracle, kind) for kind in ("lost", "different", "overdue", "unexpected")}


NOTHING: dict[str, list[str]] = {"lost": [], "different": [], "overdue": [], "unexpected": []}


def test_a_good_run_is_found_good(lived):
    assert lived.registers() == {
        (1, 1): "tombstone",
        (1, 2): "tombstone",
        (1, 3): "manifest",
        (1, 4): "manifest",
    }
    assert judge(lived) == NOTHING
    assert lived.state_count() == 4
    assert lived.counts["compared"] == 2


def test_what_was_committed_and_is_gone_is_lost(lived):
    shutil.rmtree(lived.place_of((1, 4)))
    assert "(1, 4) was COMMITTED, and its register holds None" in judge(lived)["lost"]


def test_what_retention_was_not_entitled_to_take_is_lost(lived):
    register = lived.place_of((1, 3)) / "manifest.json"
    register.write_bytes((lived.place_of((1, 1)) / "manifest.json").read_bytes())
    (sentence,) = judge(lived)["lost"]
    assert "(1, 3) was COMMITTED, and its register holds tombstone" in sentence


@pytest.mark.parametrize("name", ["weights:a", "weights:b.tied", "optimizer:lw/0/extra/own/e"])
def test_a_bit_that_differs_is_found(lived, name):
    def change(loaded):
        digests = loaded["tensors"][name]["digests"]
        loaded["tensors"][name]["digests"] = {key: digest[::-1] for key, digest in digests.items()}
        return loaded

    assert len(judge(lived, change)["different"]) == 2


def test_a_value_or_a_name_that_differs_is_found(lived):
    def change(loaded):
        loaded["values"]["data:step"] = "7"
        return loaded

    assert len(judge(lived, change)["different"]) == 2
    assert len(judge(lived, lambda loaded: {**loaded, "tensors": {}})["different"]) == 4


def test_damage_is_lost(lived):
    shard = next(lived.place_of((1, 4)).glob("weights-*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    (sentence,) = judge(lived)["lost"]
    assert "(1, 4) doesn't load: BLOCK_DIGEST" in sentence


def test_a_wait_past_its_deadline_and_an_error_that_nobody_caused_are_found(lived, tmp_path):
    with (tmp_path / "log").open("a") as log:
        for told in (
            {"kind": "wait", "what": "save", "seconds": 99.0, "limit_s": 60.0},
            {
                "kind": "error",
                "code": "SAVER_LOST",
                "text": "SAVER_LOST",
                "during": "save",
                "worker": 0,
            },
        ):
            log.write(f"{json.dumps(told)}\n")
    lived.listen(excused=frozenset())
    found = judge(lived)
    assert len(found["overdue"]) == len(found["unexpected"]) == 1


def test_a_launch_that_passes_over_what_was_committed_is_found(lived, tmp_path):
    own = make_life(number=1)
    again = make_life(number=1, options={**own.options, "resume": "fresh"})
    assert (
        live(again, 0, run=tmp_path / "run", log=tmp_path / "log", progress=mmap.mmap(-1, 1)) == 0
    )
    record = tmp_path / "run" / "launches" / "0002.json"
    record.write_bytes(record.read_bytes().replace(b'"hand"', b'"lineage"'))
    lived.listen(excused=frozenset())
    (sentence,) = lived.lost
    assert "launch 2 resumed from None; (1, 4) was COMMITTED" in sentence


def test_a_module_says_what_it_holds():
    specs = make_life().specs
    held = hold(specs, worker=0, worker_count=1, framework="module")
    assert isinstance(held, TorchHeld)
    assert held.describe()["tensors"].keys() == {
        f"weights:{name}" for name in ("a", "b", "b_tied", "c", "d", "e")
    }
