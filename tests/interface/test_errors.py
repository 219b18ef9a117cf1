"""Errors as people and programs meet them: printed, sent to another process, as JSON."""

from __future__ import annotations

import io
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptfmt
from ckptfmt.errors import CkptError, Code, err

#: A name of a file that isn't UTF-8, as Python decodes it.
SURROGATE = "w\udcff"


def print_into(encoding: str, *values: object) -> str:
    """Print values into a strict stream, and return what arrived."""
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding, errors="strict")
    print(*values, file=stream, flush=True)
    return raw.getvalue().decode(encoding)


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_an_error_with_a_lone_surrogate_can_be_printed(encoding: str) -> None:
    error = err(
        Code.FILE_MISSING,
        f"no {SURROGATE}",
        where=f"dir/{SURROGATE}",
        remedy=f"look for {SURROGATE}",
    )
    shown = print_into(
        encoding, error, error.detail, error.where, error.remedy, error.args, repr(error)
    )
    assert shown.count("w\\udcff") >= 4
    assert json.loads(json.dumps(error.as_json())) == error.as_json()
    assert pickle.loads(pickle.dumps(error)).as_json() == error.as_json()
    below = error.below(f"run{SURROGATE}")
    assert below.where == "runw\\udcff/dir/w\\udcff"
    assert below.below(f"run{SURROGATE}").where == below.where


def saved(tmp_path: Path) -> Path:
    path = tmp_path / "ckpt\udcff"
    ckptfmt.save(path, ckptfmt.State(weights={"w": np.zeros(2)}), step=1)
    return path


SAVES: dict[str, dict[str, Any]] = {
    "tensor": {"weights": {SURROGATE: np.zeros(2)}},
    "leaf": {"config": {SURROGATE: 1}},
    "value": {"config": {"a": SURROGATE}},
    "name": {"extra": {SURROGATE: {"x": 1}}},
}


@pytest.mark.parametrize("what", list(SAVES))
def test_what_has_no_text_for_a_name_is_refused_by_name(tmp_path: Path, what: str) -> None:
    with pytest.raises(CkptError) as caught:
        ckptfmt.save(tmp_path / "ckpt", ckptfmt.State(**SAVES[what]), step=1)
    assert caught.value.code in (Code.STATE_UNSUPPORTED, Code.STATE_NAME)
    assert "lone surrogate" in print_into("ascii", caught.value)


def test_a_path_that_is_not_utf_8_is_named_in_errors_and_reports(tmp_path: Path) -> None:
    path = saved(tmp_path)
    for call in (
        lambda: ckptfmt.save(path, ckptfmt.State(weights={"w": np.zeros(2)}), step=1),
        lambda: ckptfmt.open(tmp_path / SURROGATE),
        lambda: ckptfmt.open(path).weights[SURROGATE],
        lambda: ckptfmt.load(path, only=f"weights:{SURROGATE}"),
    ):
        with pytest.raises(CkptError) as caught:
            call()
        assert "\\udcff" in print_into("ascii", caught.value)
    (path / f"more{SURROGATE}").touch()
    report = ckptfmt.validate(path)
    assert "\\udcff" in print_into("ascii", *report.warnings)


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize("command", ["validate", "inspect", "diff", "log"])
def test_commands_print_a_path_that_is_not_utf_8(
    tmp_path: Path, command: str, encoding: str
) -> None:
    path = saved(tmp_path)
    (path / f"more{SURROGATE}").touch()
    nowhere = tmp_path / SURROGATE
    for argv in (
        [path, path] if command == "diff" else [path],
        [nowhere, nowhere] if command == "diff" else [nowhere],
    ):
        for more in ([], ["--json"]):
            done = subprocess.run(
                [sys.executable, "-m", "ckptfmt", command, *map(os.fsencode, argv), *more],
                capture_output=True,
                check=False,
                timeout=60,
                env={**os.environ, "PYTHONIOENCODING": f"{encoding}:strict"},
            )
            said = (done.stdout + done.stderr).decode(encoding)
            assert done.returncode in (0, 2)
            assert "Traceback" not in said
            assert "bug of ckptfmt" not in said
            assert "\\udcff" in said


@pytest.mark.parametrize(
    ("given", "code", "mentions"),
    [
        (
            {"weights": {"w": np.zeros((1,) * 33)}},
            Code.LIMIT_EXCEEDED,
            ["weights:w", "33", "32", "another shape"],
        ),
        (
            {"weights": {"w" * 5000: np.zeros(1)}},
            Code.STATE_NAME,
            ["www", "5000", "4096", "Rename"],
        ),
        (
            {"config": {"seen": [None] * 11_000}},
            Code.LIMIT_EXCEEDED,
            ["config", "10000", "numpy array"],
        ),
        (
            {"config": {"seen": {"b": b"x" * 190_000}}},
            Code.LIMIT_EXCEEDED,
            ["config", "190", "tensors or arrays"],
        ),
    ],
)
def test_a_limit_that_a_save_meets_tells_whoever_saves_what_to_do(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    given: dict[str, Any],
    code: Code,
    mentions: list[str],
) -> None:
    """REQ-LIM-001: what is too large, where, what the limit is; and not that the writer of a file is at fault."""
    monkeypatch.setattr("ckptfmt.limits.TREE_ITEMS", 10_000)
    monkeypatch.setattr("ckptfmt.limits.TREE_NBYTES", 100_000)
    with pytest.raises(CkptError) as caught:
        ckptfmt.save(tmp_path / "ckpt", ckptfmt.State(**given), step=1)
    assert caught.value.code == code
    assert [text for text in mentions if text not in str(caught.value)] == []
    assert "writer" not in caught.value.remedy
    checkpointer = ckptfmt.Checkpointer(tmp_path / "run", ckptfmt.State(**given), saver="inline")
    with checkpointer, pytest.raises(CkptError) as again:
        checkpointer.prepare()
    assert str(again.value) == str(caught.value)


def test_a_limit_that_shows_at_the_commit_tells_whoever_saves_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptfmt.limits.MANIFEST_NBYTES", 500)
    with pytest.raises(CkptError) as caught:
        ckptfmt.save(tmp_path / "ckpt", ckptfmt.State(weights={"w": np.zeros(2)}), step=1)
    assert (caught.value.code, "Save fewer" in caught.value.remedy) == (Code.LIMIT_EXCEEDED, True)


@pytest.mark.parametrize(
    ("clock_s", "saved_unix_s"), [(-5.5, 0), (-4e9, 0), (2.0**60, (1 << 53) - 1)]
)
def test_a_clock_that_is_wrong_is_no_reason_not_to_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock_s: float, saved_unix_s: int
) -> None:
    monkeypatch.setattr("ckptfmt.write.image.time.time", lambda: clock_s)
    ckptfmt.save(tmp_path / "ckpt", ckptfmt.State(weights={"w": np.zeros(2)}), step=1)
    with ckptfmt.open(tmp_path / "ckpt") as checkpoint:
        assert checkpoint.manifest.saved_unix_s == saved_unix_s
