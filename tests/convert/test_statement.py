"""`ckptfmt convert --statement`: the digests of the written files, and the recorded origin."""

import hashlib
import json

import numpy as np
import pytest

import ckptfmt
from ckptfmt.__main__ import main


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
