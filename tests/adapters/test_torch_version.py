"""A torch that is too old is refused by name, before anything of it is used."""

import subprocess
import sys
import types
from pathlib import Path

import pytest

from ckptfmt.adapters import OLDEST_TORCH, check_torch
from ckptfmt.errors import StateError

ROOT = Path(__file__).parents[2]
OLDEST = ".".join(map(str, OLDEST_TORCH))
TOO_OLD = f"{OLDEST_TORCH[0]}.{OLDEST_TORCH[1] - 1}.1+cpu"


def torch_of(version):
    module = types.ModuleType("torch")
    module.__version__ = version  # type: ignore[attr-defined]
    return module


@pytest.mark.parametrize("version", [TOO_OLD, "1.13.1", "2.0"])
def test_older_torch_is_refused_by_name(version):
    with pytest.raises(StateError) as caught:
        check_torch(torch_of(version))

    assert caught.value.code == "ARGUMENT"
    assert version in caught.value.detail
    assert OLDEST in caught.value.remedy


@pytest.mark.parametrize(
    "version", [f"{OLDEST}.0", f"{OLDEST}.0a0+git1", "2.15.0", "2.100", "3.0.0", "own build"]
)
def test_newer_torch_is_accepted(version):
    check_torch(torch_of(version))


SAVE = """
import sys, types
sys.modules["torch"] = torch = types.ModuleType("torch")
torch.__version__ = sys.argv[1]
import ckptfmt
try:
    ckptfmt.save(sys.argv[2], ckptfmt.State(config={"a": 1}), step=1)
except ckptfmt.CkptError as error:
    print(error.code, error.detail)
"""


def test_first_use_beside_an_older_torch_says_which_is_needed(tmp_path):
    """It ended in an AttributeError, or later as "a bug of ckptfmt"."""
    command = [sys.executable, "-c", SAVE, TOO_OLD, str(tmp_path / "ckpt")]
    process = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)

    assert (
        process.stdout
        == f"ARGUMENT ckptfmt needs torch {OLDEST} or newer, and this is torch {TOO_OLD}\n"
    )


def test_one_oldest_torch_is_named_everywhere():
    assert f'torch = ["torch>={OLDEST}"]' in (ROOT / "pyproject.toml").read_text("utf-8")
    assert f"torch {OLDEST} or newer" in (ROOT / "README.md").read_text("utf-8")
    assert f"TORCH_VERSIONS := {OLDEST}." in (ROOT / "Makefile").read_text("utf-8")
