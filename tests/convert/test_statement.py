"""`ckptfmt convert --statement`: the digests of the written files, and the recorded origin."""

import hashlib
import json

import numpy as np
import pytest

import ckptfmt
from ckptfmt.__main__ import main
from ckptfmt_tools.convert.converting import Conversion


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-planted-secret")
    monkeypatch.setenv("CKPTFMT_IMAGE_DIGEST", "sha256:" + "ab" * 32)
    state = ckptfmt.State(weights={"w": np.ones((4, 4), "float32")}, config={"lr": 0.1})
    with ckptfmt.Checkpointer(tmp_path / "run", state, every=1) as checkpointer:
        for _ in checkpointer.steps(2):
            pass
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("target", "kind"), [("out", "dcp"), ("out", "hf"), ("out.safetensors", "safetensors")]
)
def test_the_statement_names_files_and_origin(run, tmp_path, target, kind):
    place = tmp_path / target
    said = tmp_path / "statement.json"

    assert main(["convert", str(run), str(place), "--to", kind, "--statement", str(said)]) == 0

    statement = json.loads(said.read_bytes())
    files = [place] if place.is_file() else [path for path in place.rglob("*") if path.is_file()]
    assert len(files) > 0
    assert {one["name"]: one["digest"]["sha256"] for one in statement["subject"]} == {
        (path.name if path == place else path.relative_to(place).as_posix()): hashlib.sha256(
            path.read_bytes()
        ).hexdigest()
        for path in files
    }
    assert statement["predicateType"] == "https://slsa.dev/provenance/v1"
    definition = statement["predicate"]["buildDefinition"]
    with ckptfmt.open(run) as checkpoint:
        assert definition["externalParameters"] == {
            "run_id": checkpoint.manifest.origin.run_id,
            "launch": 1,
            "step": 2,
            "manifest": checkpoint.digest,
        }
    resources = definition["resolvedDependencies"]
    assert {"uri": f"pkg:pypi/numpy@{np.__version__}"} in resources
    assert b"a-planted-secret" not in said.read_bytes()
    assert len(said.read_bytes()) < 1 << 20


def test_what_has_no_statement_is_refused_before_anything_is_written(run, tmp_path, capsys):
    foreign = tmp_path / "weights.safetensors"
    assert main(["convert", str(run), str(foreign), "--only", "weights"]) == 0
    target = tmp_path / "back"
    for arguments in (
        [str(foreign), str(target), "--statement", str(tmp_path / "statement.json")],
        [str(run), str(target), "--to", "dcp", "--statement", str(tmp_path / "absent" / "file")],
    ):
        assert main(["convert", *arguments]) == 2
        assert "--statement" in (said := capsys.readouterr().err) or "absent" in said
        assert not target.exists()
        assert not (tmp_path / "statement.json").exists()


@pytest.mark.parametrize(
    "place",
    [
        "taken.json",
        "dangling",
        "out",
        "parent/../out",
        "out/statement.json",
        "run/run.json",
        "run/statement.json",
        "run/launches/../statement.json",
    ],
)
def test_a_statement_changes_no_other_file(run, tmp_path, capsys, place):
    """An existing file, the target itself and the source's documents were overwritten."""
    (tmp_path / "taken.json").write_bytes(b"precious")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "parent").mkdir()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    arguments = [str(run), str(tmp_path / "out"), "--to", "safetensors"]

    said = str(tmp_path / place)
    assert main(["convert", *arguments, "--statement", said, "--json"]) == 2

    error = json.loads(capsys.readouterr().out)["error"]
    assert error["code"] == (
        "ARGUMENT" if "out" in place or "statement" in place else "STORE_EXISTS"
    )
    assert error["where"] == said
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert (tmp_path / "dangling").is_symlink()


def test_a_statement_that_appears_meanwhile_stays(run, tmp_path, capsys, monkeypatch):
    said = tmp_path / "statement.json"
    right = Conversion.run

    def convert(conversion, on_progress):
        right(conversion, on_progress)
        said.write_bytes(b"precious")

    monkeypatch.setattr(Conversion, "run", convert)
    arguments = ["convert", str(run), str(tmp_path / "out"), "--to", "dcp"]
    assert main([*arguments, "--statement", str(said), "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "STORE_EXISTS"
    assert said.read_bytes() == b"precious"
