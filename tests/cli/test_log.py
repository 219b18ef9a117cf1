"""What `log` shows of a run."""

import pytest

from ckptfmt.commit.decision import retire
from ckptfmt.documents.manifest import checkpoint_name
from ckptfmt.read.files import read_manifest
from ckptfmt.run.lineage import begin_launch, open_run
from ckptfmt.store import LocalStore
from tests.cli.conftest import make_run, save_in_run


def graph_of(out):
    """The column of the graph, above its text, without header."""
    lines = out.split("\n\n")[1].splitlines()
    width = lines[0].index("step") - 2
    return [line[:width].rstrip() for line in lines[1:]]


def rows_of(out):
    """Step, launch and state of each checkpoint, in order."""
    rows = []
    for line in out.split("\n\n")[1].splitlines()[1:]:
        words = line.replace("|", " ").replace("/", " ").split()[1:4]
        if words:
            rows.append((int(words[0]), int(words[1]), words[2].rstrip(",")))
    return rows


def test_checkpoints_are_listed_newest_first_with_their_lineage(call, run_path):
    code, out, err = call("log", run_path)

    assert (code, err) == (0, "")
    assert rows_of(out) == [
        (50, 2, "committed"),
        (40, 2, "aborted"),
        (30, 2, "committed"),
        (40, 1, "unfinished"),
        (30, 1, "committed"),
        (20, 1, "committed"),
        (10, 1, "committed"),
    ]
    assert graph_of(out) == ["*", "| x", "|/", "*", "| x", "| o", "|/", "*", "*"]


def test_the_head_is_marked_once(call, run_path):
    _, out, _ = call("log", run_path)

    (line,) = [line for line in out.splitlines() if "committed, head" in line]
    assert line.split()[1:3] == ["50", "2"]


def test_launches_say_who_chose_what(call, run_path):
    _, out, _ = call("log", run_path)

    launches = [line.split() for line in out.split("\n\n")[2].splitlines()[1:]]
    assert launches[0][:3] == ["2", "hand", "step-00000020-l0001"]
    assert launches[1] == ["1", "lineage", "nothing"]


def test_json_has_the_same(call_json, run_path):
    code, answer = call_json("log", run_path)

    assert (code, answer["kind"], answer["head"]) == (0, "run", checkpoint_name(50, 2))
    assert answer["lineage"] == [
        checkpoint_name(*at) for at in ((50, 2), (30, 2), (20, 1), (10, 1))
    ]
    first = answer["checkpoints"][0]
    assert (first["step"], first["launch"], first["state"], first["parent"]) == (
        50,
        2,
        "committed",
        checkpoint_name(30, 2),
    )
    assert first["digest"].startswith("blake3:")
    assert isinstance(first["nbytes"], int)
    assert [entry["reason"] for entry in answer["checkpoints"] if entry["state"] == "aborted"] == [
        "given up"
    ]
    assert [launch["chosen_by"] for launch in answer["launches"]] == ["hand", "lineage"]
    assert answer["launches"][0]["resume_from"]["name"] == checkpoint_name(20, 1)


def test_a_retired_checkpoint_keeps_its_place(call, call_json, run_path):
    entry = LocalStore(run_path, writable=True).at(checkpoint_name(20, 1))
    manifest = read_manifest(entry)
    retire(entry, manifest)

    _, out, _ = call("log", run_path)

    assert graph_of(out)[-2:] == ["-", "*"]
    (retired,) = [
        row for row in call_json("log", run_path)[1]["checkpoints"] if row["state"] == "retired"
    ]
    assert retired["digest"] == manifest.digest


def test_an_unreadable_manifest_is_a_problem_of_one_line_only(call, call_json, run_path):
    (run_path / checkpoint_name(30, 2) / "manifest.json").write_bytes(b"{}")

    code, out, _ = call("log", run_path)

    assert code == 2
    assert (30, 2, "unreadable") in rows_of(out)
    assert f"at {checkpoint_name(30, 2)}/manifest.json" in out
    assert (
        call_json("log", run_path)[1]["problems"][0]["where"]
        == f"{checkpoint_name(30, 2)}/manifest.json"
    )


def test_an_unreadable_launch_is_a_problem_too(call, run_path):
    (run_path / "launches/0001.json").write_bytes(b"")

    code, out, _ = call("log", run_path)

    assert code == 2
    assert len(rows_of(out)) == 7
    assert "launches/0001.json" in out


def test_a_launch_that_resumed_from_what_is_gone_says_so(call, run_path):
    (run_path / checkpoint_name(20, 1)).rename(run_path / "moved")

    code, out, _ = call("log", run_path)

    assert code == 0
    assert "which is gone" in out


def test_a_run_that_has_not_saved_yet_is_shown(call, tmp_path):
    store = LocalStore(tmp_path, writable=True)
    begin_launch(store, open_run(store))

    code, out, _ = call("log", tmp_path)

    assert code == 0
    assert "1 launch, 0 checkpoints, 0 B" in out
    assert call("inspect", tmp_path)[0] == 0


def test_three_branches_stay_apart(call, tmp_path):
    store = LocalStore(tmp_path, writable=True)
    run = open_run(store)
    first, _ = begin_launch(store, run)
    for step in (1, 2):
        save_in_run(store, first, step)
    second, _ = begin_launch(store, run, choose=checkpoint_name(1, 1))
    save_in_run(store, second, 2)
    third, _ = begin_launch(store, run, choose=checkpoint_name(2, 1))
    save_in_run(store, third, 3)

    _, out, _ = call("log", tmp_path)

    assert rows_of(out) == [
        (3, 3, "committed"),
        (2, 2, "committed"),
        (2, 1, "committed"),
        (1, 1, "committed"),
    ]
    assert graph_of(out) == ["*", "| o", "* |", "|/", "*"]


@pytest.mark.parametrize("names", [[], ["manifest.json"], ["manifest.json", "run.json"]])
def test_what_is_no_run_is_bad_usage(call, tmp_path, names):
    for name in names:
        (tmp_path / name).write_text("{}")

    code, _, err = call("log", tmp_path)

    assert code == 2
    assert err.startswith("error: ARGUMENT")


def test_a_run_without_its_record_is_shown_all_the_same(call, run_path):
    (run_path / "run.json").unlink()

    code, out, _ = call("log", run_path)

    assert "without a record" in out
    assert code == 0


def test_the_helper_makes_the_same_run_again(tmp_path):
    assert len(make_run(tmp_path).list_names("")) == 9
