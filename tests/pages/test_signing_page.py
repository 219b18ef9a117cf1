"""The page on signatures: its programs and its commands do what it says."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptfmt
from ckptfmt.__main__ import main
from tests.builders import code_of
from tests.signing.keys import write_key

PAGE = Path(__file__).parents[2] / "docs" / "signing.md"


@pytest.fixture
def page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_key(tmp_path)
    return PAGE.read_text("utf-8")


def test_the_programs_of_the_page_sign_and_require(page, capsys):
    programs = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    state = ckptfmt.State(weights={"w": np.zeros(4)})
    names = {"ckptfmt": ckptfmt, "state": state, "train_step": lambda: None}
    assert len(programs) == 2
    for program in programs:
        exec(program, names)
    assert capsys.readouterr().out == "300\n"
    assert json.loads(Path("newest.json").read_text())["step"] == 300
    for command in re.findall(r"^\$ ckptfmt (.*runs/gpt.*)$", page, flags=re.MULTILINE):
        assert main(command.split()) == 0, command
    for signature in Path("runs/gpt").glob("step-00000300-*/signature-*"):
        signature.unlink()
    trust: Any = names["trust"]
    assert code_of(lambda: ckptfmt.open("runs/gpt", require_signature=trust)) == "SIGNATURE_MISSING"
    assert main(["validate", "runs/gpt", "--key", "key.pub"]) == 1
    checkpointer = ckptfmt.Checkpointer(
        "runs/gpt", state, loading=ckptfmt.Loading(require_signature=trust)
    )
    assert code_of(checkpointer.restore) == "SIGNATURE_MISSING"
