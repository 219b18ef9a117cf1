"""Names that people type, and names of files, play no tricks with a terminal; URLs are shown without secrets."""

import pathlib
import subprocess
import sys
from typing import Any

import pytest

import ckptfmt
from ckptfmt.__main__ import main
from ckptfmt.errors import Code, err, error_from_json
from tests.house.sources import ROOT

_ESCAPES = "\x1b[31mX\x1b]0;title\x07\x9b2J\u202e"


@pytest.mark.parametrize(
    "argv",
    [
        ["ls", f"--foo{_ESCAPES}"],
        ["ls", "a", _ESCAPES],
        ["gc", "x", "--keep", _ESCAPES],
        [_ESCAPES],
        ["diff", _ESCAPES, "b"],
        ["inspect", _ESCAPES],
        ["convert", _ESCAPES, "out"],
    ],
)
def test_what_was_typed_is_shown_without_control_characters(
    argv: Any, capsys: Any, tmp_path: Any, monkeypatch: Any
) -> None:
    """argparse prints words that it doesn't know as they are."""
    monkeypatch.chdir(tmp_path)
    assert main(argv) == 2
    captured = capsys.readouterr()
    text = captured.out + captured.err
    assert "X" in text
    assert [c for c in text if not c.isprintable() and c != "\n"] == []


def test_an_error_is_shown_without_control_characters_by_a_program() -> None:
    error = err(Code.FILE_MISSING, f"no {_ESCAPES}", where=_ESCAPES, remedy=f"Give {_ESCAPES}.")
    assert all(c.isprintable() for c in str(error))
    assert error.where == _ESCAPES  # which is a name, and names something


def test_the_lines_of_a_run_are_shown_without_control_characters(tmp_path: pathlib.Path) -> None:
    program = (
        "import sys, ckptfmt\n"
        "with ckptfmt.Checkpointer(sys.argv[1], ckptfmt.State(data={'position': 0}), every=1) as"
        " run:\n"
        "    for _ in run.steps(2): pass\n"
    )
    run = tmp_path / f"run{_ESCAPES}"
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", program, str(run)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        assert "run\\x1b[31mX" in done.stderr
        assert [c for c in done.stderr if not c.isprintable() and c != "\n"] == []


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://host/m.pt?X-Amz-Signature=SECRET&X-Amz-Date=1", "https://host/m.pt?..."),
        ("https://me:SECRET@host/m.pt?sig=SECRET", "https://host/m.pt?..."),
        ("s3://bucket/run?X-Amz-Signature=SECRET", "s3://bucket/run?..."),
        ("az://container/run?sv=1&sig=SECRET", "az://container/run?..."),
    ],
)
def test_an_error_shows_no_signature_of_a_url(url: str, shown: str) -> None:
    error = err(
        Code.STORE_ACCESS, f"denied in {url}: no", where=url, remedy=f"Try {url} again. Or {url}?"
    )
    for text in (
        str(error),
        str(error_from_json(error.as_json())),
        repr(error),
        str(error.as_json()),
    ):
        assert "SECRET" not in text
        assert shown in text
    assert error.remedy == f"Try {shown} again. Or {shown}?"


def test_a_question_behind_a_url_stays() -> None:
    error = err(
        Code.NOT_COMMITTED,
        "nothing",
        where="s3://b/a",
        remedy="Did you mean s3://b/c? Or 's3://b/d'?",
    )
    assert error.remedy == "Did you mean s3://b/c? Or 's3://b/d'?"


def test_a_url_that_no_store_takes_is_refused_without_its_query() -> None:
    with pytest.raises(ckptfmt.CkptError) as caught:
        ckptfmt.open("https://me:SECRET@host/a?X-Amz-Signature=SECRET")
    assert "SECRET" not in str(caught.value)
