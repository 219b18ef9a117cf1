"""The programs of docs/rehearse.md: `ckptfmt rehearse` finds each fault and says of each what the page says.

A block `diff mends=NAME` mends one fault of a program: without the last blocks of a program, it is
an earlier port. A block `text rehearsed=NAME mended=N` is what the command prints of a program with
N faults mended.
"""

from __future__ import annotations

import os
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from ckptfmt.__main__ import main
from tests.cli.test_rehearse import TRAIN
from tests.forks import start_script
from tests.house.sources import ROOT
from tests.pages.test_porting import program_of

PAGE = (ROOT / "docs" / "rehearse.md").read_text("utf-8")
#: Rehearsals that the fast suite leaves out, since others of the same program are like them.
LONG = {
    ("prefetch", 0),
    ("train.py", 1),
    ("nanogpt.py", 0),
    ("nanogpt.py", 1),
    ("imagenet.py", 1),
    ("imagenet.py", 2),
}


def blocks_of(pattern: str) -> list[tuple[str, ...]]:
    """Return the parts of the information string, and the body, of each block of the page."""
    return [
        found.groups()
        for found in re.finditer(rf"^```{pattern}\n((?:.*\n)*?)```$", PAGE, re.MULTILINE)
    ]


def undo(program: str, mend: str) -> str:
    """Return a program without a mend: with the faulty lines in the place of the mended ones."""
    for hunk in mend.split("@@\n"):
        lines = hunk.splitlines(keepends=True)
        mended = "".join(line[1:] for line in lines if line[0] in " +")
        assert program.count(mended) == 1, mended
        program = program.replace(mended, "".join(line[1:] for line in lines if line[0] in " -"))
    return program


def program_with(name: str, mended: int) -> str:
    """Return a program of the page with so many of its faults mended."""
    if name == "prefetch":
        return TRAIN.replace('"prefetch" in sys.argv', "True")
    on_page = [program for found, program in blocks_of("python file=(.*)") if found == name]
    program = on_page[0] if on_page else program_of(name)
    mends = [mend for mends, mend in blocks_of("diff mends=(.*)") if mends == name]
    for mend in reversed(mends[mended:]):
        program = undo(program, mend)
    return program


def rehearse(
    name: str, mended: int, options: list[str], place: Path, capsys: Any
) -> tuple[int, str]:
    """Return the exit code of a rehearsal, and what it printed."""
    file = "train.py" if name == "prefetch" else name
    (place / file).write_text(program_with(name, mended), "utf-8")
    code = main(["rehearse", *options, "--", "python", file])
    captured = capsys.readouterr()
    return code, captured.out or captured.err


CASES = [
    pytest.param(
        name,
        int(mended or 0),
        ["--world", world] if world else [],
        said,
        id=f"{name}-{mended}{world or ''}",
        marks=[pytest.mark.exhaustive] if world or (name, int(mended or 0)) in LONG else [],
    )
    for name, mended, world, said in blocks_of(
        r"text rehearsed=([\w.]+)(?: mended=([0-9]))?(?: world=(\S+))?"
    )
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mended", "options", "said"), CASES)
def test_each_fault_is_found_and_said_as_on_the_page(
    name: str,
    mended: int,
    options: list[str],
    said: str,
    *,
    tmp_path: Path,
    monkeypatch: Any,
    capsys: Any,
) -> None:
    monkeypatch.chdir(tmp_path)
    if options:  # torchrun starts processes of its own
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        monkeypatch.setenv("PATH", path)
        monkeypatch.setenv("PYTHONPATH", str(ROOT))
    else:
        module = types.SimpleNamespace(run=start_script)
        monkeypatch.setattr("ckptfmt_tools.cli.rehearse.subprocess", module)
    code, printed = rehearse(name, mended, options, tmp_path, capsys)
    assert printed == said
    assert code == (1 if "NOT the same" in said else 0)


def test_each_program_is_right_once_all_its_faults_are_mended() -> None:
    """The last transcript of each program is that of the program that the page shows."""
    for name in ("train.py", "nanogpt.py", "imagenet.py"):
        faults = sum(mends == name for mends, _ in blocks_of("diff mends=(.*)"))
        assert faults >= 2
        transcripts = [
            case.values for case in CASES if case.values[0] == name and not case.values[2]
        ]
        assert [mended for _, mended, _, _ in transcripts] == [*range(faults + 1)]
        assert [("NOT the same" in str(said)) for *_, said in transcripts] == [True] * faults + [
            False
        ]
