"""Forged metadata of less than a megabyte costs little, whatever is done with it. REQ-DOC-029, REQ-DOC-030."""

import json
import pathlib
import subprocess
import sys

import pytest

from tests.hostile.bombs_metadata import BOMBS, Edit, build

ROOT = pathlib.Path(__file__).parents[2]
MOST_MIB = 512


@pytest.mark.parametrize("edit", BOMBS.values(), ids=BOMBS)
def test_a_bomb_is_refused_before_it_goes_off(edit: Edit, tmp_path: pathlib.Path) -> None:
    for path, content in build(edit).items():
        place = tmp_path / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)
    asked = [sys.executable, "-m", "tests.hostile.defuse", str(tmp_path)]
    told = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True, timeout=300)
    found = json.loads(told.stdout)
    # What is at the limits, and not beyond, may be read; it costs no more than what is refused.
    assert max(step["peak_mib"] for step in found.values()) < MOST_MIB, found
    # Processor time, of what takes up to 3 s on a machine that does nothing else.
    assert max(step["cpu_s"] for step in found.values()) < 20, found
