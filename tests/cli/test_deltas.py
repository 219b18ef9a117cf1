"""Deltas on the command line: validate, log, inspect, compact and diff of a run that has some."""

import json
import pathlib
import shutil
from typing import Any

import numpy as np
import pytest

import ckptfmt
from ckptfmt.documents.manifest import checkpoint_name
from ckptfmt.errors import Code
from ckptfmt.store import LocalStore
from tests.builders import error_of, leaf, snapshot, tensor
from tests.chains import Saving

BLOCK = 4096
NAMES = [checkpoint_name(step, 1) for step in (1, 2, 3)]


def state(step):
    """Weights of which one block in three changes, and moments of which all do."""
    rng = np.random.default_rng(1)
    w, m = rng.standard_normal((2, 6 * BLOCK // 4), dtype=np.float32)
    w[: 2 * BLOCK // 4].view(np.uint32)[::7] += step
    m.view(np.uint32)[::5] += step
    return snapshot(
        tensor("w", w), tensor("m", m, field="optimizer"), leaves=[leaf("config", {"lr": 1.0})]
    )


@pytest.fixture(scope="module")
def _master(tmp_path_factory):
    path = tmp_path_factory.mktemp("deltas") / "run"
    saving = Saving(state(0), store=LocalStore(path, writable=True), block_nbytes=BLOCK)
    for step in (1, 2, 3):
        saving.save(step, state(step))
    return path


@pytest.fixture
def run(_master, tmp_path):
    """A run of a full checkpoint and two deltas; the test may damage it."""
    return pathlib.Path(shutil.copytree(_master, tmp_path / "run"))


@pytest.fixture
def alone(run, tmp_path):
    """The newest delta, somewhere else."""
    return pathlib.Path(shutil.copytree(run / NAMES[2], tmp_path / "alone" / NAMES[2]))


def arrays(path, **options):
    with ckptfmt.open(path, **options) as checkpoint:
        return {key: checkpoint.read(*key).tobytes() for key in checkpoint.tensors}


EXPECTED = {
    (source.field, source.name, source.scope): source.array.tobytes() for source in state(3).tensors
}


# --- validate -------------------------------------------------------------------------------------


def test_own_bytes_references_and_closure_lie_apart(call, call_json, run):
    code, answer = call_json("validate", run / NAMES[2])

    assert (code, answer["verdict"], answer["own"]["valid"]) == (0, "valid", True)
    assert {
        one["name"]: (one["found"], one["reason"]) for one in answer["references"]
    } == dict.fromkeys(NAMES[:2], (True, None))
    assert [(one["name"], one["valid"]) for one in answer["closure"]] == [
        (NAMES[1], True),
        (NAMES[0], True),
    ]
    assert (
        answer["own"]["nbytes"] + sum(one["nbytes"] for one in answer["closure"])
        == answer["nbytes"]
    )
    assert list(answer["checkpoints"]) == [str(run / NAMES[2])]
    code, out, _ = call("validate", run / NAMES[2])
    assert code == 0
    assert [line.split()[2] for line in out.splitlines()[:2]] == NAMES[1::-1]
    assert "2 references, closure of 2 checkpoints" in out


def test_a_run_is_its_own_closure(call, call_json, run):
    code, answer = call_json("validate", run)

    assert (code, sorted(answer["checkpoints"]), answer["closure"]) == (0, NAMES, [])
    assert len(answer["references"]) == 3
    assert "3 references, all of the closure within the run" in call("validate", run)[1]


def test_damage_in_the_closure_is_no_damage_of_its_own(call_json, run):
    (shard,) = (run / NAMES[0]).glob("weights-*")
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    code, answer = call_json("validate", run / NAMES[2])

    assert (code, answer["verdict"], answer["own"]["valid"]) == (1, "invalid", True)
    assert [one["violation_count"] for one in answer["closure"]] == [0, 1]
    ((where,),) = [[violation["where"] for violation in answer["violations"]]]
    assert where.startswith(f"{NAMES[0]}/{shard.name}[")


def test_a_missing_base_and_where_it_lies(call, call_json, alone, run):
    code, answer = call_json("validate", alone)

    assert code == 1
    assert {(one["code"], one["where"]) for one in answer["violations"]} == {
        ("BASE_MISSING", name) for name in NAMES[:2]
    }
    assert [(one["found"], one["path"], one["reason"]) for one in answer["references"]] == [
        (False, None, "BASE_MISSING")
    ] * 2
    out = call("validate", alone)[1]
    assert out.count("BASE_MISSING  step-") == 2
    assert out.count("remedy: ") == 1
    assert call("validate", alone, "--base", run)[0] == 0
    assert call("validate", alone, "--base", run / NAMES[0], "--base", run / NAMES[1])[0] == 0
    assert call("validate", alone, "--base", run / NAMES[0])[0] == 1
    assert call("validate", alone, "--base", run / "nowhere")[0] == 2


def test_the_api_takes_bases_as_well(alone, run):
    assert ckptfmt.validate(alone, bases=[run]).valid
    assert not ckptfmt.validate(alone).valid
    assert arrays(alone, bases=[run]) == EXPECTED
    trees: Any = ckptfmt.load(alone, bases=[run], framework="numpy")
    assert trees["weights"]["w"].tobytes() == EXPECTED["weights", "w", "global"]
    live = np.zeros(6 * BLOCK // 4, np.float32)
    report: Any = ckptfmt.load(
        alone,
        ckptfmt.State(weights={"w": live}),
        bases=[LocalStore(run, writable=False)],
        allow=("unexpected", "streams"),
    )
    assert live.tobytes() == EXPECTED["weights", "w", "global"]
    assert report.reads.decoded_nbytes >= 2 * BLOCK
    assert error_of(lambda: ckptfmt.open(alone, bases=str(run))).code == Code.ARGUMENT
    assert error_of(lambda: arrays(alone)).code == Code.BASE_MISSING


# --- log, inspect ---------------------------------------------------------------------------------


def test_log_says_what_a_delta_stores(call, call_json, run):
    code, answer = call_json("log", run)

    assert code == 0
    newest = answer["checkpoints"][0]
    assert (newest["profile"], sorted(one["name"] for one in newest["references"])) == (
        "delta",
        NAMES[:2],
    )
    weights, optimizer = (newest["fields"][field] for field in ("weights", "optimizer"))
    assert weights["nbytes"] == optimizer["nbytes"] == 6 * BLOCK
    assert 0 < weights["stored_nbytes"] < optimizer["stored_nbytes"] < 6 * BLOCK
    assert newest["stored_nbytes"] == weights["stored_nbytes"] + optimizer["stored_nbytes"]
    assert (answer["checkpoints"][2]["profile"], answer["checkpoints"][2]["stored_nbytes"]) == (
        "full",
        12 * BLOCK,
    )
    out = call("log", run)[1]
    share = round(100 * newest["stored_nbytes"] / (12 * BLOCK))
    lines = [line for line in out.splitlines() if "committed" in line and line.startswith("*")]
    assert lines[0].endswith(f"{share} %, 2 references")
    assert lines[1].endswith(" %, 1 reference")
    assert lines[2].endswith("full")


def test_the_total_of_a_run_is_what_lies_there(call_json, run):
    entries = call_json("log", run)[1]["checkpoints"]
    for entry in entries:
        files = sum(
            path.stat().st_size for path in (run / entry["name"]).rglob("*") if path.is_file()
        )
        assert entry["nbytes"] < files < entry["nbytes"] + 8192  # parts, manifest and headers


def test_inspect_shows_what_it_reads_from(call, call_json, alone, run):
    code, out, _ = call("inspect", run / NAMES[2])

    assert code == 0
    assert "delta, 2 references" in out
    assert f"{NAMES[0]}  " in out
    assert " stored, " in out
    code, answer = call_json("inspect", run / NAMES[2])
    assert answer["profile"] == "delta"
    assert {one["name"]: one["path"] for one in answer["references"]} == {
        name: str(run / name) for name in NAMES[:2]
    }
    assert sum(answer["encodings"].values()) == 12
    assert answer["encodings"]["same"] == 4
    assert answer["fields"]["weights"]["stored_nbytes"] < answer["fields"]["weights"]["nbytes"]
    _, answer = call_json("inspect", alone)
    assert [(one["path"], one["reason"]) for one in answer["references"]] == [
        (None, "BASE_MISSING")
    ] * 2
    _, answer = call_json("inspect", alone, "--base", run)
    assert [one["reason"] for one in answer["references"]] == [None] * 2


def test_inspect_of_a_full_one_has_no_encodings_to_tell(call, call_json, run):
    assert call_json("inspect", run / NAMES[0])[1]["encodings"] is None
    assert "reads from" not in call("inspect", run / NAMES[0])[1]


# --- compact --------------------------------------------------------------------------------------


def test_compact_to_a_place_of_its_own(call, call_json, run, tmp_path):
    out = tmp_path / "full"
    code, answer = call_json("compact", run, "--out", out)

    assert (code, answer["path"], answer["profile"], answer["step"]) == (0, str(out), "full", 3)
    shutil.rmtree(run)
    assert arrays(out) == EXPECTED
    assert call("validate", out)[0] == 0


def test_compact_one_that_lies_elsewhere(call, alone, run, tmp_path):
    assert call("compact", alone, "--out", tmp_path / "full")[0] == 2
    code, out, _ = call("compact", alone, "--out", tmp_path / "full", "--base", run)

    assert code == 0
    assert out.startswith("compacted  ")
    assert arrays(tmp_path / "full") == EXPECTED


def test_compact_in_the_run(call, call_json, run):
    code, out, _ = call("compact", run, "--take-over")

    assert code == 0
    assert "The run goes on from the compacted checkpoint" in out
    answer = call_json("log", run)[1]
    assert answer["head"] == checkpoint_name(3, 2)
    assert answer["lineage"] == [checkpoint_name(3, 2), *NAMES[::-1]]
    assert call("validate", run)[0] == 0
    assert arrays(run) == EXPECTED
    assert call("compact", run, "--take-over")[1].startswith("full already")


def test_compact_says_where(call, run, tmp_path):
    for arguments in ([], ["--out", tmp_path / "full", "--take-over"]):
        assert call("compact", run, *arguments)[0] == 2
    options: Any
    for options in ({}, {"out": tmp_path / "full", "take_over": True}):
        error = error_of(lambda options=options: ckptfmt.api.compact(run, **options))
        assert error.code == Code.ARGUMENT
    assert call("compact", run / NAMES[2], "--take-over")[0] == 2


@pytest.mark.parametrize(
    "where", ["run/step-00000009-l0001", f"run/{NAMES[2]}/full", f"run/{NAMES[1]}", "run"]
)
def test_compact_to_where_it_would_be_taken_for_another(call, run, tmp_path, where):
    """REQ-CKP-006, REQ-CKP-007, REQ-RUN-016."""
    before = sorted(run.rglob("*"))
    code, _, err = call("compact", run / NAMES[2], "--out", tmp_path / where)

    assert (code, sorted(run.rglob("*"))) == (2, before)
    assert err.startswith(("error: ARGUMENT", "error: CHECKPOINT_EXISTS"))


# --- diff -----------------------------------------------------------------------------------------


def test_diff_of_the_same_and_of_others(call, call_json, run, tmp_path):
    call("compact", run, "--out", tmp_path / "full")
    code, out, _ = call("diff", run, tmp_path / "full")
    assert code == 0
    assert out.startswith("the same by digest  ")
    code, out, _ = call("diff", run / NAMES[0], run / NAMES[2])
    assert code == 1
    assert "half within 2 ULP, all within 2" in out
    code, answer = call_json("diff", run / NAMES[0], run / NAMES[2])
    assert (code, answer["same"], answer["a"]["step"], answer["b"]["step"]) == (1, False, 1, 3)
    weights, optimizer = answer["tensors"]
    assert (weights["name"], optimizer["name"]) == ("w", "m")
    assert weights["distance"]["changed_count"] == len(range(0, 2 * BLOCK // 4, 7))
    assert weights["distance"]["max_ulps"] == optimizer["distance"]["max_ulps"] == 2
    assert answer["counts"]["differing_count"] == 2 + 6
    assert json.dumps(answer)


def test_diff_shows_what_was_and_what_is(call, call_json, tmp_path):
    for name, value, lr in (("one", 1.0, 0.1), ("other", 1.5, 0.3)):
        array = np.ones((40, 30), np.float32)
        array[17, 5] = value
        config = {"lr": lr, "model": {"widths": [1, 2]}, **({} if name == "one" else {"seed": 7})}
        ckptfmt.save(tmp_path / name, ckptfmt.State(weights={"w": array}, config=config), step=1)

    code, out, _ = call("diff", tmp_path / "one", tmp_path / "other")

    assert code == 1
    lines = [line.split() for line in out.splitlines()]
    assert [
        "w",
        "float32",
        "[40,",
        "30]",
        "1",
        "(<1",
        "%)",
        "by",
        "at",
        "most",
        "0.5,",
        "relative",
        "0.333",
    ] in lines
    assert ["[17,", "5]", "1", "->", "1.5"] in lines
    assert ["config", "lr", "0.1", "->", "0.3"] in lines
    assert ["config", "seed", "nothing", "->", "7"] in lines
    assert "ULP" not in out
    answer = call_json("diff", tmp_path / "one", tmp_path / "other")[1]
    assert answer["tensors"][0]["distance"]["largest"] == [
        {"index": [17, 5], "values": [1.0, 1.5], "gap": 0.5}
    ]
    assert answer["values"][0]["changes"][0] == {"place": "lr", "values": [0.1, 0.3]}


def test_diff_says_what_was_compared_and_reads_the_bytes_if_asked_to(
    call, call_json, checkpoint_path, tmp_path
):
    """REQ-OPN-009: a damaged copy has the digests of the good one."""
    copy = pathlib.Path(shutil.copytree(checkpoint_path, tmp_path / "copy"))
    shard = next(copy.glob("weights-*"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")

    code, out, _ = call("diff", checkpoint_path, copy)
    assert code == 0
    assert out.startswith("the same by digest  ")
    assert "recorded digests were compared, the bytes behind equal ones were not read" in out
    code, answer = call_json("diff", checkpoint_path, copy)
    assert (code, answer["same"], answer["compared"]) == (0, True, "recorded_digests")
    code, out, _ = call("diff", checkpoint_path, copy, "--verify")
    assert code == 2
    assert f"BLOCK_DIGEST  {shard.name}[" in out
    assert out.splitlines()[-1].startswith("damaged  ")
    code, answer = call_json("diff", checkpoint_path, copy, "--verify")
    assert (code, answer["same"], answer["compared"]) == (2, None, "verified_bytes")
    assert (answer["damages"]["a"], [one["code"] for one in answer["damages"]["b"]]) == (
        [],
        ["BLOCK_DIGEST"],
    )
    code, out, _ = call("diff", checkpoint_path, checkpoint_path, "--verify")
    assert code == 0
    assert out.startswith("the same  ")
    assert "every byte of both was read and compared with its digest" in out


def test_commands_say_what_they_have_checked(call, call_json, run, tmp_path):
    """A word such as committed or full says something of a register, and nothing of bytes that weren't read."""
    assert "validate checks the bytes" in call("log", run)[1]
    assert call_json("log", run)[1]["checked"] == "registers"
    assert "validate checks the bytes" in call("inspect", run)[1]
    assert "No tensor's bytes were read" in call("inspect", run / NAMES[0])[1]
    assert call_json("inspect", run / NAMES[0])[1]["checked"] == "documents"
    assert (
        "Every block was compared with its digest"
        in call("compact", run, "--out", tmp_path / "full")[1]
    )
    assert call_json("compact", run, "--take-over")[1]["checked"] == "bytes"
    assert "the bytes were not read" in call("compact", run, "--take-over")[1]
    assert call_json("compact", run, "--take-over")[1]["checked"] == "registers"
    code, out, _ = call("convert", tmp_path / "full", tmp_path / "hf", "--to", "hf")
    assert code == 0
    assert "Every byte that was converted was compared with its digest first." in out


def test_a_run_is_shown_with_the_saves_that_savers_have_in_hand(call, call_json, run):
    """REQ-RUN-019."""
    name = "0001-00000-0123456789abcdef"
    with LocalStore(run, writable=True).hold(f"savers/{name}"):
        for command in ("log", "inspect"):
            assert (
                "launch 1 (writer 0): a newer checkpoint may be committed" in call(command, run)[1]
            )
            assert call_json(command, run)[1]["pending"] == [name]
        code, answer = call_json("validate", run)
        assert (code, len(answer["warnings"])) == (0, 1)
        assert "launch 1 (writer 0) still has saves in hand" in answer["warnings"][0]
    assert call_json("log", run)[1]["pending"] == []
    assert "saving" not in call("log", run)[1]


def test_what_a_delta_reads_from_stays_whatever_is_named(call, call_json, run):
    saving = ckptfmt.Run(run)
    code, _, text = call("rm", run, 1)
    assert (code, "read from it" in text) == (2, True)
    code, answer = call_json("rm", run, 1, 2)
    assert (code, answer["deleted"]) == (2, [])
    assert {one["where"] for one in answer["refused"]} == set(NAMES[:2])
    assert "reads from it" in answer["refused"][0]["detail"]
    assert {one.state for one in saving.list()} == {"committed"}


def test_diff_of_one_field(call, call_json, run):
    assert call("diff", run / NAMES[0], run / NAMES[2], "--field", "config")[0] == 0
    _, answer = call_json("diff", run / NAMES[0], run / NAMES[2], "--field", "weights")
    assert [tensor["name"] for tensor in answer["tensors"]] == ["w"]
    assert call("diff", run, run, "--field", "colour")[0] == 2


def test_diff_that_cannot_be_made(call, alone, run):
    assert call("diff", run, run / "nowhere")[0] == 2
    code, _, err = call("diff", alone, run / NAMES[1])
    assert (code, err.split(": ")[1].split()[0]) == (2, "BASE_MISSING")
    assert call("diff", alone, run / NAMES[1], "--base", run)[0] == 1


def test_infinitely_far_is_json_too(call_json, tmp_path):
    for name, value in (("one", np.inf), ("other", -np.inf)):
        ckptfmt.save(tmp_path / name, ckptfmt.State(weights={"w": np.array([value, 0.0])}), step=1)
    code, answer = call_json("diff", tmp_path / "one", tmp_path / "other", "--field", "weights")

    assert (code, answer["tensors"][0]["distance"]["max_abs"]) == (1, "inf")
