"""Adapters that know the answers, or judge themselves, reach no claim."""

import hashlib
import json
import pathlib
from typing import Any, ClassVar

import pytest

from ckptfmt_conformance import cells
from ckptfmt_conformance.adapters.reference import Reference
from ckptfmt_conformance.callers import find_target
from ckptfmt_conformance.cases import Case, load_cases, vectors_root
from ckptfmt_conformance.perturb import perturb
from ckptfmt_conformance.protocol import Answer, ask_line, parse_description
from ckptfmt_conformance.readback import read_back
from ckptfmt_conformance.runner import ask_case, run_cases
from ckptfmt_conformance.seeded import draw_cases
from ckptfmt_conformance.trajectories.witness import answer_witness, judge_witnessed, list_witnessed

VECTORS = load_cases(vectors_root())
DESCRIBED = parse_description(Reference().describe())
_OUTCOMES = {0: "accepted", 10: "rejected", 11: "unsupported"}


class Here:
    """A caller without a process of its own."""

    def __init__(self, adapter: Any) -> None:
        self.adapter = adapter

    def call(self, kind: str, *, path: Any = None, request: Any = None, **_: Any) -> Answer:
        question = {"kind": kind, "input": str(path)} | (
            {} if request is None else {"request": request}
        )
        code, body = ask_line(self.adapter, question)
        return Answer(outcome=_OUTCOMES[code], body=body)

    def close(self) -> None:
        pass


class Table:
    """Reads nothing: it has the answers of all released cases by the hash of what it is asked."""

    def __init__(self, cases: Any) -> None:
        self.answers: dict[str, Any] = {}
        known = Here(Reference())
        learning = self

        class Learning:
            def call(self, kind: str, *, path: Any = None, request: Any = None, **_: Any) -> Answer:
                answer = known.call(kind, path=path, request=request)
                learning.answers[key_of(kind, path, request)] = answer
                return answer

        for case in cases:
            ask_case(Learning(), case, DESCRIBED)  # type: ignore[arg-type]

    def call(self, kind: str, *, path: Any = None, request: Any = None, **_: Any) -> Answer:
        unknown = Answer(outcome="error", message="not in the table")
        found: Answer = self.answers.get(key_of(kind, path, request), unknown)
        return found


def key_of(kind: str, path: pathlib.Path, request: Any) -> str:
    files = sorted(
        (str(one.relative_to(path)), one.read_bytes()) for one in path.rglob("*") if one.is_file()
    )
    return hashlib.sha256(
        repr((kind, json.dumps(request, sort_keys=True), files)).encode()
    ).hexdigest()


def statuses(caller: Any, cases: Any) -> set[str]:
    return {str(ask_case(caller, case, DESCRIBED).status) for case in cases}


def test_a_table_of_answers_by_hash_has_none_of_what_a_seed_draws() -> None:
    released = [
        case
        for case in VECTORS
        if case.kind in ("read", "reshard") or case.id.startswith("manifest/valid/")
    ]
    table = Table(released)
    assert statuses(table, released) == {"PASS"}
    drawn = draw_cases(VECTORS, 1)
    assert len(drawn) == 72
    assert {case.kind for case in drawn} == {"open", "read", "reshard"}
    assert statuses(table, drawn) == {"ERROR"}
    assert statuses(Here(Reference()), drawn) == {"PASS"}


def test_a_seed_draws_the_same_again_and_another_one_other_bytes_and_boxes() -> None:
    def asked(seed: int) -> list[tuple[Any, ...]]:
        return [
            (case.id, case.request, dict(case.files), case.expect)
            for case in draw_cases(VECTORS, seed)
        ]

    assert asked(7) == asked(7)
    assert not {str(one[2:]) for one in asked(7)} & {str(one[2:]) for one in asked(8)}


@pytest.mark.parametrize(
    "name", ["index/valid/two-writers", "parts/valid/replicas", "whole/valid/newest"]
)
def test_replicas_get_the_same_bytes_in_each_writer(name: str, tmp_path: pathlib.Path) -> None:
    """A box that two writers hold was given two contents, so that the suite asked for what must be refused."""
    import random  # noqa: PLC0415

    (case,) = (case for case in VECTORS if case.id == name)
    root = case.write_files(tmp_path)
    perturb(root, random.Random(2))
    answer = Here(Reference()).call("open", path=root, request={"verify": "all"})
    assert (answer.outcome, answer.body.get("error")) == ("accepted", None), answer


def test_a_checkpoint_with_other_bytes_is_as_sound_as_before(tmp_path: pathlib.Path) -> None:
    import random  # noqa: PLC0415

    (case,) = (case for case in VECTORS if case.id == "manifest/valid/two-writers")
    root = case.write_files(tmp_path)
    before = read_back(root)
    perturb(root, random.Random(3))
    after = read_back(root)
    assert {name: one["shape"] for name, one in before["tensors"].items()} == {
        name: one["shape"] for name, one in after["tensors"].items()
    }
    changed = [
        name
        for name, one in before["tensors"].items()
        if one["blake3"] != after["tensors"][name]["blake3"]
    ]
    assert len(changed) >= len(before["tensors"]) - 1
    assert before["leaves"] == after["leaves"]


# --- trajectories ---------------------------------------------------------------------------------


def witnessed_by(checkpointing: Any, number: int = 0) -> str | None:
    cell = list_witnessed()[number]
    return judge_witnessed(
        cell, lambda do, request: answer_witness(checkpointing, {**request, "do": do})
    )


@pytest.mark.parametrize(
    "number", range(len(list_witnessed())), ids=[cell.id for cell in list_witnessed()]
)
def test_the_reference_passes_each_cell_that_can_be_witnessed(number: int) -> None:
    assert witnessed_by(Reference().checkpointing(), number) is None


class Nothing:
    def save(self, *_: Any) -> None: ...

    def load(self, *_: Any) -> None: ...


class AtTheEnd(Nothing):
    """Leaves nothing to compare."""

    def load(self, _path: str, state: Any) -> None:
        state["progress"].step = 12


class OneTensorLess:
    def __init__(self) -> None:
        self.inner = Reference().checkpointing()

    def save(self, path: str, state: Any, step: int) -> None:
        self.inner.save(path, state, step)

    def load(self, path: str, state: Any) -> None:
        self.inner.load(path, state)
        next(iter(state["weights"].parameters())).data.flatten()[0] += 1


@pytest.mark.parametrize(
    ("made", "said"),
    [(Nothing, "stands at step 0"), (AtTheEnd, "stands at step 12"), (OneTensorLess, "step 8: ")],
)
def test_what_loads_something_else_is_told_from_outside(made: Any, said: str) -> None:
    divergence = witnessed_by(made())
    assert divergence is not None
    assert said in divergence


class JudgesItself(Reference):
    """Says that each trajectory passes, from the process that was to train it."""

    def __init__(self) -> None:
        cells.run_cell = lambda *_: {"status": "PASS", "divergence": None, "seconds": 0.1}

    def checkpointing(self) -> Any:
        return Nothing()


class Remembers(Reference):
    """Keeps the values in its memory, and writes none."""

    kept: ClassVar[dict[str, Any]] = {}

    def checkpointing(self) -> Any:
        return self

    def save(self, path: str, state: Any, *_: Any) -> None:
        self.kept[path] = {
            name: value.state_dict()
            for name, value in state.items()
            if hasattr(value, "state_dict")
        }

    def load(self, path: str, state: Any) -> None:
        for name, values in self.kept[path].items():
            state[name].load_state_dict(values)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["JudgesItself", "Remembers"])
def test_an_adapter_that_judges_itself_or_writes_nothing_is_convicted(
    name: str, monkeypatch: Any
) -> None:
    monkeypatch.syspath_prepend(str(pathlib.Path(__file__).parents[2]))
    witnessed = cells.draw_witnessed(5)[:1]
    told: tuple[Case, ...] = ()
    if name == "JudgesItself":
        told = tuple(
            case for case in cells.list_cases() if case.id == "trajectory/t1/plain/mlp/sgd/boundary"
        )
    run = run_cases(find_target(f"tests.conformance.test_unforgeable:{name}"), [*told, *witnessed])
    assert [str(result.status) for result in run.results][: len(told)] == ["PASS"] * len(told)
    assert str(run.results[-1].status) in ("FAIL", "ERROR")
    assert not run.is_green
