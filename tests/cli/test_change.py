"""`pin`, `unpin`, `tag`, `untag` and `rm`: what they do, print and return; and what `log` then shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptfmt
from ckptfmt.__main__ import main
from ckptfmt.documents.manifest import checkpoint_name


@pytest.fixture
def run(tmp_path: Path) -> str:
    with ckptfmt.Checkpointer(
        tmp_path, ckptfmt.State(data={"a": 1}), saver="inline"
    ) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step=step, metrics={"loss": 10 - step})
    return str(tmp_path)


def said(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> Any:
    assert main([*arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_what_is_said_holds_and_is_shown(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "pin", run, "1")["pinned"] is True
    assert said(capsys, "tag", run, checkpoint_name(1, 1), "a", "b", "--metric", "acc=0.5")[
        "tags"
    ] == ["a", "b"]
    found = said(capsys, "untag", run, "1", "b")
    assert (found["tags"], found["metrics"], found["step"]) == (["a"], {"loss": 9.0, "acc": 0.5}, 1)

    assert main(["log", run]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "pinned" in line]
    assert "pinned  acc=0.5  loss=9  #a" in line
    first = said(capsys, "log", run)["checkpoints"][-1]
    assert (first["metrics"], first["tags"], first["pinned"]) == (
        {"loss": 9.0, "acc": 0.5},
        ["a"],
        True,
    )

    assert main(["unpin", run, "1"]) == 0
    assert capsys.readouterr().out == f"{checkpoint_name(1, 1)}  acc=0.5  loss=9  #a\n"


def test_a_checkpoint_is_deleted_unless_it_is_needed(
    run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said(capsys, "pin", run, "1")
    for step in ("1", "3"):
        assert said(capsys, "rm", run, step, code=2)["error"]["code"] == "CHECKPOINT_NEEDED"
    found = said(capsys, "rm", run, "2")
    assert (found["state"], found["deleted"], found["refused"]) == ("retired", [found["name"]], [])
    said(capsys, "unpin", run, "1")
    assert main(["rm", run, "1"]) == 0
    assert "deleted" in capsys.readouterr().out
    assert [one.state for one in ckptfmt.Run(run).list()] == ["retired", "retired", "committed"]


def test_of_several_those_go_that_nothing_needs(
    run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said(capsys, "rm", run, "1", "9", code=2)["error"]["code"] == "NOT_COMMITTED"
    assert [one.state for one in ckptfmt.Run(run).list()] == ["committed"] * 3
    found = said(capsys, "rm", run, "1", "2", "3", code=2)
    assert found["deleted"] == [checkpoint_name(1, 1), checkpoint_name(2, 1)]
    assert [(one["code"], one["where"]) for one in found["refused"]] == [
        ("CHECKPOINT_NEEDED", checkpoint_name(3, 1))
    ]
    assert [one.state for one in ckptfmt.Run(run).list()] == ["retired", "retired", "committed"]


@pytest.mark.parametrize("other", ["retired", "unreadable"])
def test_what_was_deleted_is_said_also_beside_another_error(
    run: str, capsys: pytest.CaptureFixture[str], other: str
) -> None:
    """Only the error was said: `deleted` was missing, and the checkpoints were gone."""
    (one, two) = (checkpoint_name(step, 1) for step in (1, 2))
    if other == "retired":
        said(capsys, "rm", run, "1")
        code = "CHECKPOINT_RETIRED"
    else:
        (Path(run) / one / "manifest.json").write_bytes(b"{")
        code = "DOC_SYNTAX"
    dry = said(capsys, "rm", run, one, "2", "--dry-run", code=2)
    found = said(capsys, "rm", run, one, "2", code=2)
    assert dry["deleted"] == found["deleted"] == [two]
    assert [error["code"] for error in found["refused"]] == [code]
    with ckptfmt.Checkpointer(run, ckptfmt.State(data={"a": 1}), saver="inline") as checkpointer:
        checkpointer.restore_rng()
        checkpointer.save(step=4)
    assert main(["rm", run, one, "3"]) == 2
    out = capsys.readouterr().out
    assert f"deleted  {checkpoint_name(3, 1)}" in out
    assert code in out
    assert said(capsys, "rm", run, one, code=2)["error"]["code"] == code


def test_a_dry_run_says_what_would_go_and_changes_nothing(
    run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.read_bytes() for path in Path(run).rglob("*") if path.is_file()}

    assert said(capsys, "rm", run, "3", "--dry-run", code=2)["error"]["code"] == "CHECKPOINT_NEEDED"
    assert said(capsys, "rm", run, "2", "--dry-run")["state"] == "committed"
    found = said(capsys, "rm", run, "1", "2", "3", "--dry-run", code=2)
    assert (found["dry_run"], found["deleted"]) == (
        True,
        [checkpoint_name(1, 1), checkpoint_name(2, 1)],
    )
    assert main(["rm", run, "1", "--dry-run"]) == 0
    assert capsys.readouterr().out.startswith(f"would be deleted  {checkpoint_name(1, 1)}")

    assert {path: path.read_bytes() for path in Path(run).rglob("*") if path.is_file()} == before


def test_a_dry_run_of_a_delta_and_its_base_takes_the_delta_as_gone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = {"w": np.zeros(70_000, np.float32)}
    deltas = ckptfmt.Checkpointer(
        tmp_path, ckptfmt.State(weights=weights), saver="thread", delta="smallest"
    )
    with deltas as checkpointer:
        for step in (1, 2):
            weights["w"][step] = 1
            checkpointer.save(step=step)
    with ckptfmt.Checkpointer(
        tmp_path, ckptfmt.State(weights=weights), saver="inline"
    ) as checkpointer:
        checkpointer.restore_rng()
        checkpointer.save(step=3)
    path = str(tmp_path)

    assert "reads from it" in said(capsys, "rm", path, "1", "--dry-run", code=2)["error"]["detail"]
    dry = said(capsys, "rm", path, "1", "2", "--dry-run")
    wet = said(capsys, "rm", path, "1", "2")
    assert dry["deleted"] == wet["deleted"] == [checkpoint_name(1, 1), checkpoint_name(2, 1)]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("pin", "{run}", "9"), "NOT_COMMITTED"),
        (("pin", "{run}/" + checkpoint_name(1, 1), "1"), "ARGUMENT"),
        (("tag", "{run}", "1", "--metric", "loss"), "ARGUMENT"),
        (("tag", "{run}", "1", "--metric", "loss=nan"), "ARGUMENT"),
        (("tag", "{run}", "1", "x" * 101), "ARGUMENT"),
        (("rm", "{run}/elsewhere", "1"), "FILE_MISSING"),
    ],
)
def test_what_cannot_be_done_is_named(
    run: str, arguments: tuple[str, ...], code: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        said(capsys, *(one.format(run=run) for one in arguments), code=2)["error"]["code"] == code
    )


def test_a_record_that_cannot_be_read_is_a_problem_of_the_log(
    run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    place = Path(run, "labels", f"{checkpoint_name(1, 1)}-0001.json")
    place.parent.mkdir()
    place.write_bytes(b"{}")
    found = said(capsys, "log", run, code=2)
    assert [problem["code"] for problem in found["problems"]] == ["DOC_SCHEMA"]
    assert found["checkpoints"][-1]["pinned"] is True


def test_metrics_and_tags_are_recorded_together_or_not_at_all(
    run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        said(capsys, "tag", run, "1", "x" * 101, "--metric", "z=1", code=2)["error"]["code"]
        == "ARGUMENT"
    )
    assert not Path(run, "labels").exists()
    said(capsys, "tag", run, "1", "a", "--metric", "z=1")
    assert len(list(Path(run, "labels").iterdir())) == 1


def test_a_step_of_thousands_of_digits_is_no_bug(
    run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said(capsys, "rm", run, "9" * 5000, code=2)["error"]["code"] == "NOT_COMMITTED"
