"""`ls`, `du` and `gc`: what a run holds, what takes space, and what may go."""

import pathlib

import pytest

import ckptfmt
from ckptfmt.documents.manifest import checkpoint_name
from ckptfmt.errors import Code, err
from ckptfmt.run.lineage import begin_launch, open_run
from ckptfmt.store import LocalStore
from tests.cli.conftest import save_in_run
from tests.save.test_saves import Run
from tests.saver.test_saver import WAIT_S


def contents_of(path):
    """All files below a directory, with their bytes."""
    return {
        file.relative_to(path).as_posix(): file.read_bytes()
        for file in pathlib.Path(path).rglob("*")
        if file.is_file()
    }


def words_of(out):
    return [line.split() for line in out.splitlines()]


def items_of(answer):
    return sorted((item["name"], item["what"]) for item in answer["items"])


# ls


def test_ls_shows_what_there_is_to_load(call, call_json, run_path):
    ckptfmt.Run(run_path).add_labels("step-00000020-l0001", metrics={"loss": 2.5}, tags=["best"])
    ckptfmt.Run(run_path).pin("step-00000020-l0001")

    code, out, err = call("ls", run_path)

    assert (code, err) == (0, "")
    rows = {words[0]: words[1:] for words in words_of(out)[1:-1]}
    assert [*rows] == [
        checkpoint_name(*at) for at in ((10, 1), (20, 1), (30, 1), (30, 2), (40, 1), (50, 2))
    ]
    assert rows[checkpoint_name(50, 2)][:4] == ["committed,", "head", "65.6", "KiB"]
    assert rows[checkpoint_name(20, 1)][-3:] == ["pinned", "loss=2.5", "#best"]
    assert rows[checkpoint_name(40, 1)] == ["unfinished"]
    assert out.splitlines()[-1] == "1 retired or given-up checkpoint more: --all shows all"
    assert checkpoint_name(40, 2) in call("ls", run_path, "--all")[1]
    code, answer = call_json("ls", run_path, "--all")
    assert (code, answer["checked"], len(answer["checkpoints"])) == (0, "registers", 7)
    assert [one["name"] for one in answer["checkpoints"] if one["is_head"]] == [
        checkpoint_name(50, 2)
    ]


def test_ls_says_which_labels_cannot_be_read(call, call_json, run_path):
    ckptfmt.Run(run_path).tag("step-00000020-l0001", "best")
    (record,) = (run_path / "labels").glob("step-00000020-*")
    record.write_bytes(b"{")

    code, out, _ = call("ls", run_path)
    assert (code, "DOC_SYNTAX" in out, record.name in out) == (2, True, True)
    code, answer = call_json("ls", run_path)
    assert (code, [one["where"] for one in answer["problems"]]) == (2, [f"labels/{record.name}"])
    told = {one["name"]: one["labels_error"] for one in answer["checkpoints"]}
    assert "DOC_SYNTAX" in told.pop("step-00000020-l0001")
    assert set(told.values()) == {None}


def test_a_suspect_checkpoint_is_shown_and_why(call, call_json, tmp_path):
    """REQ-RUN-042: `ls`, `log`, `inspect` and `report` say what the run doesn't go on from."""
    with ckptfmt.Checkpointer(
        tmp_path / "run", ckptfmt.State(data={"at": 0}), saver="inline"
    ) as checkpointer:
        checkpointer.save(step=1)
        checkpointer.save(step=2, suspect="loss is nan")
    for command in ("ls", "log"):
        code, out, _ = call(command, tmp_path / "run")
        lines = [line for line in out.splitlines() if "suspect: loss is nan" in line]
        assert (code, len(lines)) == (0, 1)
        assert [words[1:3] for words in words_of(out) if "head" in words] != []
        checkpoints = call_json(command, tmp_path / "run")[1]["checkpoints"]
        assert sorted(str(one["suspect"]) for one in checkpoints) == ["None", "loss is nan"]
    name = checkpoint_name(2, 1)
    assert "suspect: loss is nan" in call("inspect", tmp_path / "run" / name)[1]
    assert call_json("inspect", tmp_path / "run" / name)[1]["suspect"] == "loss is nan"
    call("report", tmp_path / "run", "--html", tmp_path / "page.html")
    assert "suspect: loss is nan" in (tmp_path / "page.html").read_text()


@pytest.mark.usefixtures("run_path", "checkpoint_path")
def test_ls_of_a_directory_shows_the_runs_and_checkpoints_in_it(
    call, call_json, tmp_path, monkeypatch
):
    (tmp_path / "else").mkdir()
    code, out, _ = call("ls", tmp_path)
    assert code == 0
    assert words_of(out)[0] == ["checkpoint", "checkpoint"]
    assert words_of(out)[1][:4] == ["run", "run", "5", "committed,"]
    assert words_of(out)[1][-2:] == ["head", checkpoint_name(50, 2)]
    monkeypatch.chdir(tmp_path)
    assert call("ls")[1] == out
    assert [one["kind"] for one in call_json("ls")[1]["entries"]] == ["checkpoint", "run"]


@pytest.mark.usefixtures("run_path", "checkpoint_path")
@pytest.mark.parametrize("name", ["a-directory", "m-directory", "z-directory"])
def test_ls_of_a_directory_lists_the_others_beside_an_unreadable_one(
    call, call_json, tmp_path, monkeypatch, name
):
    """The entries behind the unreadable one were missing, with exit code 0."""
    (tmp_path / name).mkdir()
    right = LocalStore.list_names

    def list_names(store, prefix):
        if store.name == str(tmp_path / name):
            raise err(Code.STORE_ACCESS, "Permission denied", where=store.name)
        return right(store, prefix)

    monkeypatch.setattr(LocalStore, "list_names", list_names)
    code, out, _ = call("ls", tmp_path)
    assert (code, sorted(words[0] for words in words_of(out))) == (
        2,
        sorted(["checkpoint", name, "run"]),
    )
    assert "can't be read: STORE_ACCESS" in out
    code, answer = call_json("ls", tmp_path)
    errors = {one["name"]: one.get("error", {}).get("code") for one in answer["entries"]}
    assert (code, errors) == (2, {"checkpoint": None, name: "STORE_ACCESS", "run": None})


def test_ls_of_something_else_says_what_to_give(call, checkpoint_path, tmp_path):
    assert "`ckptfmt inspect` shows a checkpoint" in call("ls", checkpoint_path)[2]
    (tmp_path / "empty").mkdir()
    code, out, err = call("ls", tmp_path / "empty")
    assert (code, out) == (2, "")
    assert "neither a checkpoint nor a run" in err
    assert "Did you mean" in call("ls", tmp_path / "emty")[2]


def test_ls_tells_of_what_cannot_be_read(call, run_path):
    (run_path / checkpoint_name(30, 2) / "manifest.json").write_bytes(b"{}")

    code, out, _ = call("ls", run_path)

    assert code == 2
    assert [checkpoint_name(30, 2), "unreadable"] in words_of(out)


# du


@pytest.mark.parametrize("kind", ["run", "checkpoint"])
def test_du_adds_up_to_the_files_that_are_there(request, call, call_json, kind):
    path = request.getfixturevalue(f"{kind}_path")
    nbytes = sum(map(len, contents_of(path).values()))

    code, answer = call_json("du", path)

    assert (code, answer["nbytes"]) == (0, nbytes)
    assert sum(use["nbytes"] for use in answer["uses"]) == nbytes
    assert call("du", path)[1].splitlines()[-1].split()[-3:] == ["in", "all", str(path)]
    names = {use["name"] for use in answer["uses"]}
    assert names >= (
        {checkpoint_name(10, 1), checkpoint_name(40, 1)} if kind == "run" else {"weights"}
    )


# gc


def test_gc_does_what_its_dry_run_says_and_that_changes_nothing(call, call_json, run_path):
    before = contents_of(run_path)

    code, planned = call_json("gc", run_path, "--keep", 1, "--keep-every", 20, "--dry-run")

    assert (code, contents_of(run_path) == before) == (0, True)
    assert items_of(planned) == [
        (checkpoint_name(10, 1), "retired"),
        (checkpoint_name(30, 1), "beside"),
        (checkpoint_name(30, 2), "retired"),
        (checkpoint_name(40, 1), "given_up"),
    ]
    assert "by hand" in next(
        item["reason"] for item in planned["items"] if item["what"] == "beside"
    )
    code, done = call_json("gc", run_path, "--keep", 1, "--keep-every", 20)
    assert (code, done["items"], done["freed_nbytes"]) == (
        0,
        planned["items"],
        planned["freed_nbytes"],
    )
    after = contents_of(run_path)
    for name in (checkpoint_name(10, 1), checkpoint_name(30, 2), checkpoint_name(40, 1)):
        assert [path for path in after if path.startswith(name)] == [f"{name}/manifest.json"]
    kept = (checkpoint_name(20, 1), checkpoint_name(30, 1), checkpoint_name(50, 2))
    assert {path: after[path] for path in before if path.startswith(kept)} == {
        path: content for path, content in before.items() if path.startswith(kept)
    }
    assert call("validate", run_path, "--quiet")[0] == 0
    again = call_json("gc", run_path, "--keep", 1, "--keep-every", 20)[1]
    assert [item["what"] for item in again["items"]] == ["beside"]


def test_gc_retires_nothing_that_it_was_not_told_to(call, run_path):
    code, out, _ = call("gc", run_path)

    assert code == 0
    assert "given up" in out
    assert "retired" not in out
    assert "--keep N says how many of the newest stay" in out
    assert len([one for one in ckptfmt.Run(run_path).list() if one.state == "committed"]) == 5


def test_gc_names_what_was_passed_over_as_damaged_and_rm_deletes_it(call, call_json, run_path):
    damaged = checkpoint_name(50, 2)
    shard = next((run_path / damaged).glob("weights-*"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    store = LocalStore(run_path, writable=True)
    launch, _ = begin_launch(store, open_run(store))
    save_in_run(store, launch, 60)

    row = next(line for line in call("ls", run_path)[1].splitlines() if line.startswith(damaged))
    assert "committed, beside" in row
    assert f"launch 3 found it damaged, and went on from {checkpoint_name(30, 2)}" in row
    listed = {one["name"]: one["beside"] for one in call_json("ls", run_path)[1]["checkpoints"]}
    assert listed[damaged].startswith("launch 3 found it damaged")
    assert listed[checkpoint_name(60, 3)] is None
    code, answer = call_json("gc", run_path, "--dry-run")
    (item,) = [item for item in answer["items"] if item["name"] == damaged]
    assert (code, item["what"]) == (0, "beside")
    assert item["reason"].startswith(
        f"launch 3 found it damaged, and went on from {checkpoint_name(30, 2)}"
    )
    code, answer = call_json("gc", run_path, "--dry-run", "--verify")
    whats = {item["name"]: item["what"] for item in answer["items"]}
    assert (code, whats[damaged], whats[checkpoint_name(30, 1)]) == (1, "damaged", "beside")
    code, out, _ = call("gc", run_path, "--verify")
    assert code == 1
    assert ["damaged", damaged] in [words[:2] for words in words_of(out)]
    assert shard.exists()
    assert call("rm", run_path, damaged)[0] == 0
    assert call("gc", run_path, "--verify")[0] == 0


def test_gc_leaves_what_may_still_be_committed(call_json, run_path):
    """REQ-CMT-021: only the next launch knows that this one will never decide."""
    store = LocalStore(run_path, writable=True)
    store.at(checkpoint_name(60, 2)).create("parts/unfinished.msgpack", [b"x" * 2048])
    before = contents_of(run_path)
    with store.hold("savers/0002-00000-0123456789abcdef"):
        held = items_of(call_json("gc", run_path, "--dry-run")[1])
        assert [what for name, what in held if name == checkpoint_name(60, 2)] == ["saving"]
    assert (checkpoint_name(60, 2), "unfinished") in items_of(call_json("gc", run_path)[1])
    path = f"{checkpoint_name(60, 2)}/parts/unfinished.msgpack"
    assert contents_of(run_path)[path] == before[path]


def test_gc_keeps_the_best_and_what_is_pinned(call, call_json, run_path):
    run = ckptfmt.Run(run_path)
    for name, loss in (
        (checkpoint_name(10, 1), 1.0),
        (checkpoint_name(20, 1), 2.0),
        (checkpoint_name(30, 2), 3.0),
    ):
        run.set_metrics(name, {"loss": loss})
    assert (
        "names the metric 'acc'"
        in call("gc", run_path, "--dry-run", "--keep", 1, "--keep-best", "acc:max:1")[1]
    )
    options = ("--keep", 1, "--keep-best", "loss:min:1")
    planned = call_json("gc", run_path, "--dry-run", *options)[1]
    assert [name for name, what in items_of(planned) if what == "retired"] == [
        checkpoint_name(20, 1),
        checkpoint_name(30, 2),
    ]
    run.pin(checkpoint_name(20, 1))
    done = call_json("gc", run_path, *options)[1]
    assert [name for name, what in items_of(done) if what == "retired"] == [checkpoint_name(30, 2)]


@pytest.mark.parametrize(
    "options",
    [
        ["--keep", "0"],
        ["--keep-every", "5"],
        ["--keep-best", "loss:min:1"],
        ["--keep", "1", "--keep-best", "x"],
    ],
)
def test_gc_refuses_what_says_nothing(call, run_path, options):
    before = contents_of(run_path)

    code, out, err = call("gc", run_path, *options)

    assert (code, out) == (2, "")
    assert err.startswith(f"error: ARGUMENT at {options[-2]}: ")
    assert options[-1] != "0" or "such as --keep 3." in err
    assert contents_of(run_path) == before


def test_gc_names_a_register_that_cannot_be_read(call, run_path):
    (run_path / checkpoint_name(30, 1) / "manifest.json").write_bytes(b"{}")

    code, out, _ = call("gc", run_path, "--dry-run")

    assert code == 1
    assert ["unreadable", checkpoint_name(30, 1)] in [words[:2] for words in words_of(out)]


def test_what_lies_in_caches_is_named_and_counts_no_bytes(call, call_json, tmp_path):
    with Run(tmp_path / "run", cache=tmp_path / "cache", upload_every=100) as run:
        for step in (1, 2):
            run.save(step).wait(timeout_s=WAIT_S)
        code, out, _ = call("ls", tmp_path / "run")
        nbytes = {
            one["name"]: one["nbytes"] for one in call_json("du", tmp_path / "run")[1]["uses"]
        }
    assert code == 0
    rows = {words[0]: words[1:4] for words in words_of(out)}
    assert rows[checkpoint_name(1, 1)][0] == "committed"
    assert rows[checkpoint_name(2, 1)] == ["committed,", "head,", "durability"]
    assert nbytes[checkpoint_name(2, 1)] < nbytes[checkpoint_name(1, 1)]


def test_a_checkpoint_of_a_run_is_named_by_its_step(call, run_path):
    """`inspect RUN 30` and `diff RUN 20 30`, as `rm`, `pin` and `tag` take it."""
    name = checkpoint_name(20, 1)
    assert call("inspect", run_path, "20") == call("inspect", run_path / name)
    assert call("inspect", run_path, name) == call("inspect", run_path / name)
    code, out, _ = call("diff", run_path, "20", name)
    assert code == 0
    assert "the same" in out
    code, out, err = call("inspect", run_path, "21")
    assert (code, out) == (2, "")
    assert "no checkpoint is '21'" in err


def test_gc_counts_what_du_counts(call, call_json, run_path):
    """`gc --keep 1 --dry-run`: what would be freed is the files, with their parts."""
    planned = call_json("gc", run_path, "--keep", "1", "--dry-run")[1]
    uses = {use["name"]: use["nbytes"] for use in call_json("du", run_path)[1]["uses"]}
    retired = [item for item in planned["items"] if item["what"] == "retired"]
    assert retired
    assert [item["nbytes"] for item in retired] == [uses[item["name"]] for item in retired]
    out = call("gc", run_path, "--keep", "1", "--dry-run")[1]
    assert out.split("\n", 1)[0].split() == ["checkpoint", "files"]
    assert " of files in " in out
    assert call("ls", run_path)[1].split("\n", 1)[0].split()[:3] == [
        "checkpoint",
        "state",
        "tensors",
    ]
