"""The adapters: the reference is all green, each broken one convicted by what it names; and the suite's own reader."""

import functools
import json
import os
import shlex
import shutil
import sys
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest

import ckptfmt
from ckptfmt.documents.tree import parse_tree
from ckptfmt_conformance.adapters import broken
from ckptfmt_conformance.adapters.reference import Reference, original, tagged
from ckptfmt_conformance.callers import find_target
from ckptfmt_conformance.judge import Status
from ckptfmt_conformance.msgpk import dump, parse
from ckptfmt_conformance.protocol import (
    Answer,
    Unsupported,
    ask,
    parse_answer,
    parse_description,
    parse_reply,
)
from ckptfmt_conformance.readback import ReadbackError, read_back
from ckptfmt_conformance.runner import ask_case, run_cases
from ckptfmt_conformance.tagged import from_tree
from tests.conformance.tagged_values import VALUES
from tests.conformance.vectors import cases_by_id

ROOT = Path(__file__).parents[2]
CASES = cases_by_id()
BROKEN = broken.find_all()
#: What no fault has to do with, but for those that answer everything alike.
SPARED = ("manifest/valid/small", "trees/valid/torch", "documents/invalid/not-utf-8")
INDISCRIMINATE = (
    "accepting",
    "crashing",
    "dying",
    "hanging",
    "late",
    "pleading",
    "refusing",
    "wrong_code",
)
#: Those that are asked in a process of their own, as the suite asks any class: what answers
#: nothing, or everything alike, and one of the others.
IN_A_PROCESS = (*INDISCRIMINATE, "lost_tuples")


@pytest.fixture(autouse=True)
def _paths(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{ROOT / 'conformance'}")


class Here:
    """A broken adapter that is asked in this process, which saves the second that another process takes to start."""

    def __init__(self, name):
        self.text = name
        self._adapter = BROKEN[name]()

    def open(self, **_):
        return self

    def call(self, kind, *, path=None, request=None, output=None, **_):
        try:
            exit_code, body = ask(self._adapter, kind, path=path, request=request, output=output)
            reply = json.dumps({"id": 1, "exit": exit_code, "answer": body})
        except Exception as error:  # noqa: BLE001
            reply = json.dumps({"id": 1, "exit": 1, "message": repr(error)})
        return parse_reply(reply.encode(), 1)

    def close(self):
        """Forget what broken functions may have left in caches."""
        ours = [vars(module) for name, module in sys.modules.items() if name.startswith("ckptfmt")]
        for member in [member for names in ours for member in names.values()]:
            if isinstance(member, functools._lru_cache_wrapper):
                member.cache_clear()


@pytest.mark.parametrize("stride", [5, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_the_reference_passes_everything(stride):
    """Asked by the suite's runner; what it answers to each case is in test_vectors.py."""
    run = run_cases(find_target("reference"), list(CASES.values())[::stride], jobs=1)

    assert [result.case.id for result in run.results if result.status is not Status.PASS] == []
    assert run.is_green


@pytest.mark.parametrize("may_serve", [True, False], ids=["server", "command"])
def test_the_reference_as_a_command_answers_the_same(may_serve):
    command = shlex.join([sys.executable, "-m", "ckptfmt_conformance.adapters.reference"])
    kinds = {case.kind: case for case in CASES.values() if case.expect.outcome == "accept"}
    cases = [*kinds.values(), *(CASES[name] for name in SPARED[2:])]

    run = run_cases(find_target(command), cases, may_serve=may_serve)

    assert run.description.serve
    assert {result.status for result in run.results} == {Status.PASS}, run.results


def test_each_fault_is_found_by_its_name():
    written = [
        line
        for path in Path(broken.__file__).parent.glob("*.py")
        for line in path.read_text("utf-8").splitlines()
        if line.endswith("(Reference):")
    ]

    assert len(BROKEN) == len(written) >= 126
    assert broken.lost_tuples is BROKEN["lost_tuples"]
    with pytest.raises(AttributeError, match="no broken adapter 'none'"):
        broken.none  # noqa: B018


@pytest.mark.parametrize("name", sorted(BROKEN))
def test_a_broken_adapter_is_convicted_by_the_cases_that_it_names_and_by_no_others(name):
    convicting = [CASES[case_id] for case_id in BROKEN[name].convicted_by]
    spared = [CASES[case_id] for case_id in SPARED if name not in INDISCRIMINATE]
    target: Any = find_target(f"broken/{name}") if name in IN_A_PROCESS else Here(name)

    run = run_cases(target, [*convicting, *spared], timeout_s=1.5 if name == "hanging" else 30)

    assert convicting
    assert {
        result.case.id for result in run.results if result.status in (Status.FAIL, Status.ERROR)
    } == {case.id for case in convicting}, [
        (result.case.id, result.status, result.message) for result in run.results
    ]
    silent = name in ("crashing", "dying", "hanging")
    assert run.counts[Status.ERROR] == (len(convicting) if silent else run.counts[Status.ERROR])
    assert str(BROKEN[name].__doc__).startswith(("It ", "Its ", "Of "))


def test_each_example_of_the_pages_convicts_who_takes_or_refuses_everything():
    examples = [case for case in CASES.values() if case.id.startswith("examples/")]
    passed = [
        {result.case.id for result in run.results if result.status is Status.PASS}
        for run in (
            run_cases(find_target(f"broken/{name}"), examples) for name in ("accepting", "refusing")
        )
    ]

    assert len(examples) > 300
    assert not passed[0] & passed[1]


def test_who_has_no_sampler_says_so_and_is_not_convicted():
    class Reader(Reference):
        def describe(self):
            return {**super().describe(), "features": []}

        def context(self, path, request):
            if request:
                raise Unsupported(next(iter(request)))
            return super().context(path, request)

    reader, cases = Reader(), [case for case in CASES.values() if case.kind == "context"]
    described = parse_description(reader.describe())

    class Calls:
        def call(self, kind, *, path=None, request=None, **_):
            exit_code, body = ask(reader, kind, path=path, request=request, output=None)
            return parse_answer(exit_code, json.dumps(body).encode())

        def close(self):
            """Nothing is open."""

    found = {case.id: ask_case(Calls(), case, described).status for case in cases}
    asked = {case.id for case in cases if case.request}
    assert {found[name] for name in asked} == {Status.UNSUPPORTED}
    assert {status for name, status in found.items() if name not in asked} == {Status.PASS}


def test_a_fault_is_put_in_for_a_call_and_taken_out_again(tmp_path):
    place = "ckptfmt.read.files:check_index_tiling"
    before = original(place)

    class Broken(Reference):
        replacements = ((place, lambda *_: pytest.fail("asked")),)

    with pytest.raises(pytest.fail.Exception):
        Broken().open(CASES["manifest/valid/small"].write_files(tmp_path), None)

    assert original(place) is before


# Trees


@pytest.mark.parametrize("text", sorted(VALUES))
def test_reference_and_suite_say_a_tree_alike(text):
    content = dump(VALUES[text])

    assert tagged(parse_tree(content, where="")) == from_tree(parse(content)) == json.loads(text)


@pytest.mark.parametrize(
    "content",
    ["", "c1", "c0c0", "cc7f", "d101", "92c0", "81c0c0", "82a161c0a161c0", "a1ff", "9ac0"],
)
def test_the_suites_msgpack_has_one_form(content):
    with pytest.raises(ValueError):
        parse(bytes.fromhex(content))


# The suite's own reader

WHOLE = [
    case
    for case in CASES.values()
    if case.kind == "open"
    and case.expect.outcome == "accept"
    and not case.features
    and (PurePosixPath(case.path) / "manifest.json").as_posix() in case.files
    and case.id
    != "parts/valid/two-extents"  # which no writer may make (REQ-PRT-010): the reader is for what they make
]


@pytest.mark.parametrize("case", WHOLE, ids=lambda case: case.id)
def test_the_suites_reader_reads_every_full_checkpoint_of_the_vectors(case, tmp_path):
    assert read_back(case.write_files(tmp_path))["tensors"] == case.expect.members["tensors"]


def a_checkpoint(path):
    weights = {
        "w": np.arange(24, dtype=np.float32).reshape(4, 6),
        "scalar": np.array(3, np.int64),
        "none": np.zeros((0, 2)),
    }
    ckptfmt.save(path, ckptfmt.State(weights=weights, config={"lr": -0.0, "shape": (1, 2)}), step=7)
    return path


def test_the_suites_reader_reads_what_the_reference_writes(tmp_path):
    found = read_back(a_checkpoint(tmp_path / "x"))

    assert found["step"] == 7
    assert found["tensors"]["weights/w"]["shape"] == [4, 6]
    assert (
        found["tensors"]["weights/w"]["first16"] == np.arange(4, dtype=np.float32).tobytes().hex()
    )
    assert found["leaves"]["config/"] == {
        "dict": [["lr", {"float": "8000000000000000"}], ["shape", {"tuple": [1, 2]}]]
    }


def test_the_suites_reader_finds_any_flipped_byte(tmp_path):
    root = a_checkpoint(tmp_path / "x")
    files = sorted(path for path in root.rglob("*") if path.is_file())
    assert len(files) >= 4
    for path in files:
        content = path.read_bytes()
        for at in range(0, len(content), max(1, len(content) // 10)):
            path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
            with pytest.raises(ReadbackError):
                read_back(root)
        path.write_bytes(content + b"\0")
        with pytest.raises(ReadbackError):
            read_back(root)
        path.unlink()
        with pytest.raises(ReadbackError):
            read_back(root)
        path.write_bytes(content)
    read_back(root)


REQUEST = {
    "step": 3,
    "tensors": {
        "weights/a": {"dtype": "bfloat16", "shape": [3, 2]},
        "optimizer/b": {"dtype": "int8", "shape": []},
    },
}


def test_what_the_reference_writes_on_request_is_as_requested(tmp_path):
    Reference().write(None, {**REQUEST, "config": {"width": 3}}, tmp_path / "x")

    found = read_back(tmp_path / "x")

    assert {name: one["dtype"] for name, one in found["tensors"].items()} == {
        "weights/a": "bfloat16",
        "optimizer/b": "int8",
    }
    assert found["tensors"]["weights/a"]["first16"] == bytes(range(12)).hex()


def test_a_writer_is_judged_by_what_it_wrote(tmp_path):
    wrong = a_checkpoint(tmp_path / "wrong")
    described = parse_description(Reference().describe())
    cases = [case for case in CASES.values() if case.kind == "write"]

    class Copies:
        def call(self, *_, output=None, **__):
            shutil.copytree(wrong, output)
            return Answer(outcome="accepted")

        def close(self):
            """Nothing is open."""

    assert cases
    assert {ask_case(Copies(), case, described).status for case in cases} == {Status.FAIL}
