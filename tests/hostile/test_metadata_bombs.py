"""Forged metadata of less than a megabyte costs little, whatever is done with it. REQ-DOC-029, REQ-DOC-030."""

import json
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ckptfmt.documents.canonical import dump_document, parse_document
from ckptfmt.errors import CkptError
from tests.hostile.bombs_json import JSON_BOMBS
from tests.hostile.bombs_metadata import BOMBS, Edit, build
from tests.hostile.defuse import measure

ROOT = pathlib.Path(__file__).parents[2]
MOST_MIB = 512
#: What a Python has that has imported torch.
PROCESS_MIB = 160
MOST_CPU_S = 5.0

Defuse = Callable[[pathlib.Path], dict[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def defuse() -> Iterator[Defuse]:
    """Return what opens, validates, loads and inspects a checkpoint, each in a process of its own."""
    asked = [sys.executable, "-m", "tests.hostile.defuse"]
    with subprocess.Popen(asked, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        put, get = server.stdin, server.stdout

        def ask(path: pathlib.Path) -> dict[str, dict[str, Any]]:
            put.write(f"{path}\n")
            put.flush()
            found: dict[str, dict[str, Any]] = json.loads(get.readline())
            return found

        yield ask
        put.close()


def check_costs(found: dict[str, dict[str, Any]]) -> None:
    # Processor time, of system and user, so that it holds on a busy machine; each action is in a process of its own.
    assert max(step["growth_mib"] for step in found.values()) < MOST_MIB - PROCESS_MIB, found
    assert max(step["cpu_s"] for step in found.values()) < MOST_CPU_S, found


@pytest.mark.parametrize("edit", BOMBS.values(), ids=BOMBS)
def test_a_bomb_is_refused_before_it_goes_off(edit: Edit, tmp_path: pathlib.Path, defuse: Defuse) -> None:
    for path, content in build(edit).items():
        place = tmp_path / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)
    found = defuse(tmp_path)
    # What is at the limits, and not beyond, may be read; it costs no more than what is refused.
    check_costs(found)
    # A named error, or nothing: what else a process ends with has a bracket or a blank in it.
    assert all(step["outcome"].removeprefix("exit ").replace("_", "").isalnum() for step in found.values()), found


@pytest.mark.parametrize("signed", JSON_BOMBS.values(), ids=JSON_BOMBS)
def test_a_json_document_costs_little(signed: dict[str, object]) -> None:
    content = dump_document(signed)
    assert len(content) < 1 << 20

    def parse() -> str:
        with pytest.raises(CkptError) as caught:
            parse_document(content, where="x", types=(str(signed["type"]),))
        return str(caught.value.code)

    found = measure(parse)
    check_costs({"parse": found})
    assert found["outcome"] in ("DOC_SCHEMA", "DOC_STRING"), found
