"""What `inspect` shows of a checkpoint and of a run."""

import pytest

import ckptfmt
from ckptfmt.cli import inspect
from ckptfmt.commit.decision import commit
from ckptfmt.data.sampler import Sampler
from ckptfmt.documents.manifest import Origin
from ckptfmt.documents.part import RngStream
from ckptfmt.documents.tree import TensorRef, dump_tree
from ckptfmt.store import LocalStore
from ckptfmt.write.writer import write_part
from tests.cli.conftest import ATTEMPT, CURSOR, leaf_of, save, snapshot_of


def test_the_text_has_what_one_looks_for(call, checkpoint_path):
    code, out, err = call("inspect", checkpoint_path, "--all")

    assert (code, err) == (0, "")
    for text in (
        "step        3",
        f"attempt {ATTEMPT}, 2 writers",
        "blake3:",
        "absent: not given to State",
        "S1 at most: each sample once",
        "12 samples consumed in 3 steps: epoch 1 (from 0), position 2 of 10",
        "2 logical workers",
        f"weights-{ATTEMPT}-00001.safetensors",
        "layers.{0..1}.w  x2  float32  [12, 700]  65.6 KiB  2 boxes of [6, 700] from 2 writers",
        "also tied.scale",
        "bad    nan",
    ):
        assert text in out, text


def test_a_mixture_is_told_by_its_sources(call, tmp_path):
    sampler = Sampler(
        {"books": 20, "code": 7}, mixture={"books": 3, "code": 1}, global_batch=4, worker=(0, 1)
    )
    sampler.commit(3)
    sampler.skip(samples=[5], source="books")
    save(LocalStore(tmp_path, writable=True), leaves=[leaf_of("data", sampler.state_dict())])

    assert (
        "12 samples consumed in 3 steps: 9 of books, 3 of code; 1 skip"
        in call("inspect", tmp_path)[1]
    )


def test_no_line_of_text_ends_in_blanks(call, checkpoint_path, run_path):
    for command, path in (("inspect", checkpoint_path), ("inspect", run_path), ("log", run_path)):
        assert not [line for line in call(command, path)[1].splitlines() if line != line.rstrip()]


def test_tensors_are_listed_one_by_one_on_demand(call, checkpoint_path):
    _, out, _ = call("inspect", checkpoint_path, "--tensors")

    assert "layers.0.w  " in out
    assert "layers.1.w  " in out
    assert out.splitlines()[-1] == "3 tensors"


@pytest.mark.parametrize(
    ("pattern", "count"), [("layers.*", 2), ("tied.*", 1), ("nothing", 0), ("[", 0), ("*1.w", 1)]
)
def test_a_pattern_selects_tensors(call_json, checkpoint_path, pattern, count):
    code, answer = call_json("inspect", checkpoint_path, "--tensors", pattern)

    assert (code, len(answer["tensors"])) == (0, count)


def test_json_leaves_boxes_out_where_they_are_very_many(call_json, checkpoint_path, monkeypatch):
    monkeypatch.setattr(inspect, "_LISTED_BOXES", 3)
    _, answer = call_json("inspect", checkpoint_path)

    assert [tensor["box_count"] for tensor in answer["tensors"]] == [2, 2, 1]
    assert {tensor["boxes"] for tensor in answer["tensors"]} == {None}


def test_very_many_rows_are_shown_to_whoever_asks_for_them(call, checkpoint_path, monkeypatch):
    monkeypatch.setattr(inspect, "_TENSOR_LINES", 1)
    code, text, _ = call("inspect", checkpoint_path, "--all")
    _, asked, _ = call("inspect", checkpoint_path, "--tensors", "*")

    assert code == 0
    assert "scale" not in text
    assert "and 1 row more: --tensors lists each" in text
    assert "scale" in asked


def test_json_has_everything(call_json, checkpoint_path):
    code, answer = call_json("inspect", checkpoint_path)

    assert code == 0
    assert (answer["kind"], answer["format"], answer["step"], answer["writer_count"]) == (
        "checkpoint",
        "1.0",
        3,
        2,
    )
    assert answer["fields"]["optimizer"] == {"state": "absent", "reason": "not given to State"}
    assert answer["claim"] == {
        "at_most": "S1",
        "lowered_by": ["optimizer is absent: not given to State"],
    }
    assert answer["nbytes"] == sum(
        path.stat().st_size for path in checkpoint_path.rglob("*") if path.is_file()
    )
    assert [tensor["name"] for tensor in answer["tensors"]] == ["layers.0.w", "layers.1.w", "scale"]
    assert answer["tensors"][0]["boxes"] == [
        {"begin": [0, 0], "box_shape": [6, 700], "part": 0},
        {"begin": [6, 0], "box_shape": [6, 700], "part": 1},
    ]
    assert answer["tensors"][2]["aliases"] == ["tied.scale"]
    assert [stream["state"] for stream in answer["streams"]] == [[1, 2], [1, 2]]
    values = {leaf["field"]: leaf["value"] for leaf in answer["leaves"]}
    assert values["data"] == CURSOR
    assert values["config"]["$map"] == [
        ["lr", 3e-4],
        ["betas", [0.9, 0.95]],
        ["bad", {"$float": "nan"}],
        [1, {"$bytes": "00ff"}],
        ["model", {"width": 512}],
    ]
    assert answer["problems"] == []


def test_one_field_is_shown_alone_and_whole(call, call_json, tmp_path):
    config = {f"key{number}": number for number in range(100)}
    save(
        LocalStore(tmp_path, writable=True),
        leaves=[leaf_of("config", config), leaf_of("data", {"position": 1})],
    )

    assert "and 90 lines more: --field config shows all" in call("inspect", tmp_path)[1]
    assert "and 40 lines more: --field config shows all" in call("inspect", tmp_path, "--all")[1]
    whole = call("inspect", tmp_path, "--field", "config")[1]
    assert "key99" in whole
    assert "position" not in whole
    assert "weights tensors" not in whole
    answer = call_json("inspect", tmp_path, "--field", "config")[1]
    assert [leaf["field"] for leaf in answer["leaves"]] == ["config"]
    assert (answer["tensors"], answer["streams"]) == ([], [])


def test_streams_are_shown_on_demand(call, checkpoint_path):
    _, out, _ = call("inspect", checkpoint_path, "--field", "rng")

    assert "python  lw/0  python.mt19937" in out


def test_an_unknown_field_is_bad_usage(call, checkpoint_path):
    code, _, err = call("inspect", checkpoint_path, "--field", "colour")

    assert code == 2
    assert "weights, optimizer" in err


def test_what_cannot_be_read_is_named_and_the_rest_is_shown(call, call_json, checkpoint_path):
    (checkpoint_path / f"parts/{ATTEMPT}-00000.msgpack").unlink()

    code, out, _ = call("inspect", checkpoint_path)

    assert code == 2
    assert "layers.{0..1}.w" in out
    assert "unreadable  FILE_MISSING" in out
    code, answer = call_json("inspect", checkpoint_path)
    assert (code, [problem["code"] for problem in answer["problems"]]) == (2, ["FILE_MISSING"])


def test_an_unreadable_manifest_is_an_error(call, checkpoint_path):
    (checkpoint_path / "manifest.json").write_bytes(b"{")

    code, out, err = call("inspect", checkpoint_path)

    assert (code, out) == (2, "")
    assert err.startswith("error: DOC_SYNTAX at manifest.json")


def test_one_screen_shows_what_matters_and_the_rest_is_asked_for(call, tmp_path):
    config = {f"key{number}": number for number in range(100)}
    names = [f"{letter * (number + 1)}.w" for letter in "abcdef" for number in range(5)]
    save(
        LocalStore(tmp_path, writable=True),
        leaves=[leaf_of("config", config), leaf_of("data", CURSOR)],
        names=names,
    )

    _, out, _ = call("inspect", tmp_path)

    assert len(out.splitlines()) <= 50
    assert "and 23 rows more: --tensors lists each" in out
    assert "key9" in out
    assert "--all" in out.splitlines()[-2]
    _, whole, _ = call("inspect", tmp_path, "--all")
    assert {"fffff.w", "files", "data"} <= {
        word for line in whole.splitlines() for word in line.split()
    }
    assert "key59" in whole


def test_metrics_tags_and_pins_are_shown_as_they_were_said_last(call, call_json, run_path):
    path = run_path / "step-00000050-l0002"
    assert "labels" not in call("inspect", path)[1]
    ckptfmt.Run(run_path).add_labels(path.name, metrics={"loss": 2.5}, tags=["best"])
    ckptfmt.Run(run_path).pin(path.name)

    assert "labels      pinned  loss=2.5  #best" in call("inspect", path)[1]
    answer = call_json("inspect", path)[1]
    assert (answer["metrics"], answer["tags"], answer["pinned"]) == ({"loss": 2.5}, ["best"], True)
    (head,) = [
        line for line in call("inspect", run_path)[1].splitlines() if line.startswith("head")
    ]
    assert head.endswith("pinned  loss=2.5  #best")
    (run_path / "labels" / f"{path.name}-0002.json").write_bytes(b"{}")
    code, out, _ = call("inspect", path)
    assert (code, "labels      pinned" in out, "DOC_SCHEMA" in out) == (2, True, True)


def test_a_run_is_shown_with_the_checkpoint_that_it_goes_on_from(call, call_json, run_path):
    code, out, _ = call("inspect", run_path)

    assert code == 0
    assert "newest launch 2, from step-00000020-l0001, chosen by hand" in out
    for text in ("S1 at most: each sample once", "layers.{0..1}.w  x2", "bad    nan", "65.6 KiB"):
        assert text in out, text
    answer = call_json("inspect", run_path)[1]
    assert (
        answer["checkpoint"]["digest"]
        == call_json("inspect", run_path / "step-00000050-l0002")[1]["digest"]
    )
    assert call("inspect", run_path, "--tensors", "scale")[1].splitlines()[-1] == "1 tensor"
    assert call("inspect", run_path, "--field", "config")[1].splitlines()[1] == "config"


def test_a_run_whose_newest_checkpoint_cannot_be_opened_is_shown_all_the_same(
    call, call_json, run_path
):
    next((run_path / "step-00000050-l0002").glob("index-*")).unlink()

    code, out, _ = call("inspect", run_path)

    assert code == 2
    assert "2 launches, 7 checkpoints" in out
    assert "unreadable  FILE_MISSING at step-00000050-l0002/index-" in out
    code, answer = call_json("inspect", run_path)
    assert (code, answer["checkpoint"], answer["checkpoint_error"]["code"]) == (
        2,
        None,
        "FILE_MISSING",
    )


def test_a_run_is_summarised(call, call_json, run_path):
    code, out, _ = call("inspect", run_path)

    assert code == 0
    assert "2 launches, 7 checkpoints: 5 committed, 1 unfinished, 1 aborted" in out
    assert "step-00000050-l0002" in out
    assert f"ckptfmt log {run_path}" in out
    assert call_json("inspect", run_path)[1]["head"] == "step-00000050-l0002"


def test_hostile_names_and_values_are_shown_as_they_are(call, tmp_path):
    store = LocalStore(tmp_path, writable=True)
    leaves = [
        leaf_of(
            "config",
            {"\x1b[31m": "\u202eabc\n", "big": 1 << 60_000, 1: {1 << 70}, "set": frozenset()},
        )
    ]
    save(
        store,
        leaves=leaves,
        names=("layers.*.w", "layers.0.w", "layers.00.w", "\x1b[2J", "9" * 4000, ""),
    )

    for arguments in ((), ("--json",), ("--tensors",), ("--field", "config")):
        code, out, _ = call("inspect", tmp_path, *arguments)

        assert code == 0
        assert not {"\x1b", "\u202e", "\r"} & set(out)


def test_references_to_tensors_and_odd_streams_are_shown(call, tmp_path):
    store = LocalStore(tmp_path, writable=True)
    origin = Origin(
        run_id=None, launch=None, nonce="0" * 32, step=1, attempt=ATTEMPT, writer_count=1
    )
    snapshot = snapshot_of(
        0, 1, leaves=[leaf_of("weights", {"head": TensorRef("scale", "torch")}, name="extra")]
    )
    streams = (RngStream(name="x/y", scope="global", kind="odd", state=dump_tree(None, where="")),)
    object.__setattr__(snapshot, "streams", streams)
    write_part(store, snapshot, origin, writer=0)
    commit(store, origin, deadline_s=5)

    code, out, _ = call("inspect", tmp_path, "--field", "weights")

    assert code == 0
    assert "tensor scale" in out
