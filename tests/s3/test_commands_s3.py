"""The commands on a run in an object store: what is typed, what comes back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptfmt
from ckptfmt.__main__ import main
from ckptfmt.documents.manifest import checkpoint_name
from ckptfmt.errors import Code
from tests.builders import error_of
from tests.s3.fixtures import Bucket


def reach(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let URLs be those of the bucket's server."""
    for name, value in bucket.endpoint.environment.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def run(s3_bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> str:
    """A run of three checkpoints in a bucket, and where it is."""
    reach(s3_bucket, monkeypatch)
    url = f"s3://{s3_bucket.name}/runs/one"
    state = ckptfmt.State(weights={"w": np.arange(1000, dtype=np.float32)})
    with ckptfmt.Checkpointer(url, state, saver="inline") as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step=step, metrics={"loss": 4 - step})
    return url


def said(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> Any:
    capsys.readouterr()
    assert main([*arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def states(run: str) -> list[str]:
    return [one.state for one in ckptfmt.Run(run).list()]


def test_commands_that_look(run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = [checkpoint_name(step, 1) for step in (1, 2, 3)]
    assert sorted(one["name"] for one in said(capsys, "ls", run)["checkpoints"]) == names
    sizes = {one["name"]: one["nbytes"] for one in said(capsys, "du", run)["uses"]}
    assert all(sizes[name] > 4000 for name in names)
    assert said(capsys, "doctor", run)["target"] == run
    page = tmp_path / "out.html"
    assert main(["report", run, "--html", str(page)]) == 0
    assert all(name in page.read_text("utf-8") for name in names)


def test_commands_that_delete(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "rm", run, "1", "--dry-run")["state"] == "committed"
    said(capsys, "gc", run, "--keep", "1", "--dry-run")
    assert states(run) == ["committed"] * 3
    assert said(capsys, "rm", run, "3", code=2)["error"]["code"] == "CHECKPOINT_NEEDED"
    assert said(capsys, "rm", run, "1")["state"] == "retired"
    said(capsys, "gc", run, "--keep", "1")
    assert states(run) == ["retired", "retired", "committed"]


def test_nothing_is_saved_among_the_files_of_a_run(run: str, s3_bucket: Bucket) -> None:
    """A clean-up of the run deleted it, or the run was invalid afterwards."""
    state = ckptfmt.State(data={"position": 1})
    for place in (checkpoint_name(9, 1), f"{checkpoint_name(1, 1)}/best", "labels"):
        error = error_of(lambda p=place: ckptfmt.save(f"{run}/{p}", state, step=9))
        assert (error.code, run in error.detail) == (Code.CHECKPOINT_EXISTS, True)
    for place in (f"{run}/export", f"s3://{s3_bucket.name}/labels"):
        ckptfmt.save(place, state, step=9)
        assert ckptfmt.validate(place)
    assert states(run) == ["committed"] * 3


def test_repair_from_a_mirror_in_the_same_bucket(
    run: str, s3_bucket: Bucket, capsys: pytest.CaptureFixture[str]
) -> None:
    mirror = f"s3://{s3_bucket.name}/mirror"
    assert main(["mirror", run, mirror]) == 0
    (shard,) = [
        name
        for name in s3_bucket.names(f"runs/one/{checkpoint_name(3, 1)}")
        if name.endswith(".safetensors")
    ]
    key = f"runs/one/{checkpoint_name(3, 1)}/{shard}"
    whole = bytes(s3_bucket.store().get(key).bytes())
    s3_bucket.store().put(key, whole[:-1] + bytes([whole[-1] ^ 1]))

    assert said(capsys, "repair", run, code=1)["whole"] is False
    found = said(capsys, "repair", run, "--with", mirror)
    assert [one["repaired"] for one in found["damages"]] == [True]
    assert bytes(s3_bucket.store().get(key).bytes()) == whole
    assert said(capsys, "repair", run)["whole"] is True


def test_large_files_are_copied_and_mended_from_bucket_to_bucket(
    s3_bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than a part of an upload: the copy is uploaded while it is read."""
    reach(s3_bucket, monkeypatch)
    large, mirror = f"s3://{s3_bucket.name}/large", f"s3://{s3_bucket.name}/mirror"
    state = ckptfmt.State(weights={"w": np.random.default_rng(1).random(5_000_000, np.float32)})
    with ckptfmt.Checkpointer(
        large, state, saver="inline", mirrors=[f"{mirror}-beside"]
    ) as checkpointer:
        checkpointer.save(step=1)
    assert main(["validate", f"{mirror}-beside"]) == 0
    assert main(["mirror", large, mirror]) == 0
    assert main(["validate", mirror]) == 0

    (shard,) = [
        name
        for name in s3_bucket.names(f"large/{checkpoint_name(1, 1)}")
        if name.endswith(".safetensors")
    ]
    key = f"large/{checkpoint_name(1, 1)}/{shard}"
    whole = bytes(s3_bucket.store().get(key).bytes())
    s3_bucket.store().put(key, whole[:-1] + bytes([whole[-1] ^ 1]))
    assert main(["scrub", large, "--with", mirror]) == 0
    assert bytes(s3_bucket.store().get(key).bytes()) == whole


def test_checkpoints_in_a_bucket_are_converted(
    run: str, s3_bucket: Bucket, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, back = tmp_path / "w.pt", f"s3://{s3_bucket.name}/converted"
    assert said(capsys, "convert", run, str(file), "--only", "weights")["source"] == {
        "path": run,
        "kind": "ckptfmt",
    }
    assert said(capsys, "convert", str(file), back)["target"] == {"path": back, "kind": "ckptfmt"}
    assert ckptfmt.validate(back)
    assert (
        ckptfmt.load(back, framework="numpy")["weights"]["w"] == np.arange(1000, dtype=np.float32)
    ).all()
    assert said(capsys, "convert", str(file), back, code=2)["error"]["code"] == "CHECKPOINT_EXISTS"
    for name in ("w.pt", "w.safetensors"):
        elsewhere = f"s3://{s3_bucket.name}/{name}"
        assert said(capsys, "convert", run, elsewhere, code=2)["error"]["where"] == elsewhere
    assert sorted(path.name for path in tmp_path.iterdir()) == ["w.pt"]
