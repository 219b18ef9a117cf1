"""The public names: few, documented, and there without torch."""

import inspect
import subprocess
import sys

import pytest

import ckptfmt


def test_public_names_are_at_most_a_dozen():
    assert len(ckptfmt.__all__) <= 12
    assert len(set(ckptfmt.__all__)) == len(ckptfmt.__all__)


def test_every_public_name_is_there_and_documented():
    for name in ckptfmt.__all__:
        value = getattr(ckptfmt, name)
        if callable(value):
            assert inspect.getdoc(value), f"ckptfmt.{name} has no docstring"


@pytest.mark.parametrize("module", ["ckptfmt", "ckptfmt.__main__"])
def test_the_core_starts_without_torch(module, tmp_path):
    program = f"import {module}, sys; print([name for name in sys.modules if name.partition('.')[0] == 'torch'])"

    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr
