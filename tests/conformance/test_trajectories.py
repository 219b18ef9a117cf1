"""The cells judge what they're for: the library passes, and whatever is lost or damaged turns a cell red."""

import dataclasses
import doctest
import importlib
import itertools
import random
import re
import sys
from typing import NamedTuple

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from ckptfmt.run.lineage import list_checkpoints  # noqa: E402
from ckptfmt.store import open_store  # noqa: E402
from ckptfmt_conformance.protocol import Unsupported  # noqa: E402
from ckptfmt_conformance.trajectories import close_gang, list_cells, run_cell  # noqa: E402
from ckptfmt_conformance.trajectories.controls import CONTROLS  # noqa: E402
from ckptfmt_conformance.trajectories.ledger import Comparison, differ, ulps_between  # noqa: E402
from ckptfmt_conformance.trajectories.play import own_streams, reference_of  # noqa: E402
from ckptfmt_conformance.trajectories.recipes import Recipe  # noqa: E402
from ckptfmt_conformance.trajectories.vacuity import find_vacuity  # noqa: E402
from tests.conformance.checkpointing import (  # noqa: E402
    Asynchronous,
    Ended,
    Files,
    Forgetful,
    Hasty,
    InThread,
    Library,
    Live,
    Swallowing,
)
from tests.conformance.elastic_scenes import Crashes, Dies  # noqa: E402

CELLS = {cell.id: cell for cell in list_cells()}
ALONE = [name for name, cell in CELLS.items() if not cell.processes]
SAMPLE = [
    "t1/plain/mlp/adamw-fused/boundary", "t1/plain/cnn/sgd/boundary", "t1/plain/gpt/averaged/often",
    "t1/plain/moe/accumulated/window", "t1/plain/mlp/averaged/twice", "t1/plain/mlp/bf16-masters/window",
    "t1/plain/gpt/fp16-scaler/skipped", "t1/plain/mlp/fp16-scaler/growth", "t1/plain/mlp/averaged/fresh",
    "t1/plain/mlp/plateau/epoch", "t1/plain/mlp/adamw-tensor-lr/boundary",
]  # fmt: skip
TOGETHER = [
    "t1/ddp/mlp/window", "t1/fsdp2/gpt/often", "t1/tp/gpt/boundary", "t2/pairs/3-to-5", "s0/tp-2-to-fsdp2-3",
    "s1/ddp-2-to-ddp-3", "t2/refused/8-to-16-workers",
]  # fmt: skip
#: What only `make test-exhaustive` asks of several processes. Controls of one process are many, and
#: these are of the same kinds.
MORE_TOGETHER = [
    "t1/ddp/cnn/three/boundary", "t2/chains/8-3-1-4-8", "t2/window/4-to-3", "t2/masters/3-to-2",
    "control/elastic.weights/damage", "control/elastic.window/drop", "control/elastic.exp_avg/drop",
]  # fmt: skip
MLP = "t1/plain/mlp/adamw-loop/boundary"


class Judged(NamedTuple):
    status: str
    said: str


def judge(cell, checkpointing, directory):
    result = run_cell(cell, checkpointing, directory)
    return Judged(result.status, result.divergence or "")


@pytest.fixture(scope="module", autouse=True)
def gang_ended():
    yield
    close_gang()


@pytest.mark.parametrize("name", ["ledger", "data", "cells"])
def test_the_examples_are_true(name):
    result = doctest.testmod(importlib.import_module(f"ckptfmt_conformance.trajectories.{name}"))

    assert result.failed == 0


def test_there_are_as_many_cells_as_are_promised():
    kept = [cell for cell in CELLS.values() if cell.tier == "T-0"]

    assert len(CELLS) == len(list_cells())
    assert len(kept) >= 60
    assert len([cell for cell in kept if not cell.processes]) >= 60
    assert {cell.claim for cell in kept} == {"T1", "T2", "S0", "S1"}
    assert {cell.control for cell in CELLS.values() if cell.tier == "T-N"} == set(CONTROLS)
    assert all(cell.description for cell in kept)


def test_each_world_size_goes_to_each():
    legs = {
        leg
        for cell in CELLS.values()
        if cell.tier == "T-0"
        for leg in itertools.pairwise(cell.worlds)
    }  # fmt: skip

    assert legs >= {(before, after) for before in range(1, 9) for after in range(1, 9)}


# The library


@pytest.mark.parametrize("name", SAMPLE)
def test_the_library_passes(name, tmp_path):
    result = judge(CELLS[name], Library(), tmp_path)

    assert (result.status, result.said) == ("PASS", "")


@pytest.mark.parametrize("name", [name for name in ALONE if CELLS[name].control])
def test_a_control_turns_red(name, tmp_path):
    result = judge(CELLS[name], Library(), tmp_path)

    assert result.status == "PASS", result.said
    assert "first divergence at step" in result.said


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.exhaustive] if name in MORE_TOGETHER else [])
        for name, cell in CELLS.items()
        if name in (*TOGETHER, *MORE_TOGETHER) or (cell.control and cell.processes)
    ],
)
def test_of_several_processes_too(name, tmp_path):
    result = judge(CELLS[name], Library(), tmp_path)

    assert result.status == "PASS", result.said
    assert (result.said == "") == (CELLS[name].tier == "T-0")


@pytest.mark.dist
@pytest.mark.slow
def test_a_process_that_dies_costs_one_cell(tmp_path):
    died = judge(CELLS["t1/ddp/mlp/boundary"], Dies(), tmp_path)
    after = judge(CELLS["t1/ddp/mlp/boundary"], Library(), tmp_path)

    assert (died.status, died.said) == ("ERROR", "process 1 died")
    assert after.status == "PASS", after.said


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "t1/ddp/mlp/boundary",
        pytest.param("t2/pairs/3-to-2", marks=pytest.mark.exhaustive),
        pytest.param("s0/fsdp2-4-to-ddp-2", marks=pytest.mark.exhaustive),
        "s1/ddp-2-to-ddp-3",
    ],
)
def test_nothing_restored_is_seen_by_several_processes(name, tmp_path):
    result = judge(CELLS[name], Forgetful(), tmp_path)

    assert result.status == "FAIL"
    assert result.said.startswith("rank 0: ")
    assert "most likely not restored: " in result.said


@pytest.mark.dist
@pytest.mark.slow
def test_a_run_of_another_plan_that_is_taken_is_seen(tmp_path):
    result = judge(CELLS["t2/refused/8-to-16-workers"], Swallowing(), tmp_path)

    assert result == ("FAIL", "rank 0: a run of 8 logical workers was loaded into one of 16")


# Trainers that are killed


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("name", ["full/staging", "full/staged", "full/retention", "delta/torn"])
def test_a_killed_trainer_loses_nothing_that_it_was_promised(name, tmp_path):
    result = judge(CELLS[f"t1/killed/{name}"], Asynchronous(), tmp_path)

    assert result.status == "PASS", result.said
    assert "resumed from step " in result.said


@pytest.mark.dist
@pytest.mark.slow
def test_what_a_trainer_is_killed_in_is_a_delta(tmp_path):
    result = judge(CELLS["t1/killed/delta/committed"], Asynchronous(), tmp_path)

    (run,) = sorted(tmp_path.glob("*/run-*"))[-1:]
    entries = list_checkpoints(open_store(run, writable=False))
    resumed = {
        entry.step: entry.manifest.profile for entry in entries if entry.manifest is not None
    }
    assert result.status == "PASS", result.said
    assert resumed[int(result.said.rpartition(" ")[2])] == "delta"


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("name", ["before", "staging", "committed"])
def test_what_tells_of_few_phases_is_judged_by_those(name, tmp_path):
    result = judge(CELLS[f"t1/killed/full/{name}"], Files(), tmp_path)

    assert result.status == "PASS", result.said


@pytest.mark.parametrize(
    ("name", "checkpointing", "said"),
    [
        ("full/before", Library(), "async-saves"),
        ("full/staged", Files(), "async-saves: its saves don't tell of STAGED"),
        (
            "full/retention",
            Files(),
            "async-saves: its saves don't tell of COMMITTED and what follows",
        ),
    ],
)
def test_what_a_save_does_not_tell_is_unsupported(name, checkpointing, said, tmp_path):
    result = judge(CELLS[f"t1/killed/{name}"], checkpointing, tmp_path)

    assert (result.status, result.said) == ("UNSUPPORTED", said)


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "checkpointing", "said"),
    [
        ("committed", Hasty(), r"resumed from step \d+: step \d+ was COMMITTED, and is lost"),
        ("staged", InThread(), r"resumed from step \d+: step \d+ was STAGED, and is lost"),
        (
            "before",
            Live(),
            r"resumed from step 5: first divergence at step 5 \(right after load 1\): parameter/",
        ),
    ],
)
def test_a_promise_that_is_not_kept_turns_a_cell_red(name, checkpointing, said, tmp_path):
    result = judge(CELLS[f"t1/killed/full/{name}"], checkpointing, tmp_path)

    assert result.status == "FAIL"
    assert re.search(said, result.said), result.said


@pytest.mark.dist
@pytest.mark.slow
def test_a_trainer_that_ends_by_itself_is_no_killed_one(tmp_path):
    result = judge(CELLS["t1/killed/full/staging"], Ended(), tmp_path)

    assert (result.status, result.said) == ("ERROR", "a process died before it was killed")


# What isn't restored, and what isn't an answer


@pytest.mark.parametrize("name", SAMPLE)
def test_nothing_restored_turns_every_cell_red(name, tmp_path):
    result = judge(CELLS[name], Forgetful(), tmp_path)

    assert result.status == "FAIL"
    assert "right after load 1): parameter/" in result.said or "position" in result.said


class Partial(Library):
    """The library, with something of its own after each load."""

    def __init__(self, after):
        self.after = after

    def load(self, path, state):
        super().load(path, state)
        self.after(state)


def flip(state):
    with torch.no_grad():
        state["weights"].down.bias[2:3].view(torch.int32).bitwise_xor_(1)


def test_the_first_divergence_is_said_by_step_tensor_index_ulps_and_likely_cause(tmp_path):
    said = judge(CELLS[MLP], Partial(flip), tmp_path).said

    assert said.startswith(
        "first divergence at step 7 (right after load 1): parameter/down.bias[2] is "
    )
    assert "(1 ULPs), 1 of 4 elements differ; most likely not restored: the weights\n" in said
    header, row, *_ = [line.split() for line in said.splitlines()[2:]]
    assert header == ["steps", "done", *map(str, range(7, 13))]
    assert (row[0], len(row), "." in row) == ("parameter/down.bias", len(header) - 1, False)


def test_a_save_that_changes_the_state_is_seen(tmp_path):
    class Meddling(Library):
        def save(self, path, state, step):
            super().save(path, state, step)
            flip(state)

    said = judge(CELLS[MLP], Meddling(), tmp_path).said

    assert "at step 7 (before any load): parameter/down.bias[2]" in said
    assert "or a save changed it" in said


def test_a_divergence_that_comes_later_is_told_from_one_at_the_load(tmp_path):
    hooks = []

    def later(state):
        down = state["weights"].down
        hooks.append(down.register_forward_hook(lambda *call: call[-1] + 1e-3 * call[-1].sum()))

    said = judge(CELLS[MLP], Partial(later), tmp_path).said

    assert "at step 8 (after load 1)" in said
    assert "all that is compared came back" in said


def test_what_the_implementation_raises_is_an_error_and_no_failure(tmp_path):
    result = judge(CELLS[MLP], Crashes(), tmp_path)

    assert (result.status, result.said) == ("ERROR", "OSError: no space left")


def test_what_it_does_not_do_is_unsupported(tmp_path):
    class Modest(Library):
        def save(self, path, state, step):
            raise Unsupported(f"extra-state: {path} {step} {len(state)}"[:11])

    result = judge(CELLS[MLP], Modest(), tmp_path)

    assert (result.status, result.said) == ("UNSUPPORTED", "extra-state")


def test_the_program_that_runs_a_cell_keeps_its_streams_and_settings(tmp_path):
    numpy_state = np.random.get_state(legacy=False)  # noqa: NPY002
    before = random.getstate(), repr(numpy_state), torch.get_rng_state(), torch.get_num_threads()
    judge(CELLS[MLP], Library(), tmp_path)

    assert random.getstate() == before[0]
    assert repr(np.random.get_state(legacy=False)) == before[1]  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), before[2])
    assert torch.get_num_threads() == before[3]
    assert not torch.are_deterministic_algorithms_enabled()


# A control that finds nothing, a cell that proves nothing


def test_a_control_that_stays_green_fails(tmp_path, monkeypatch):
    name = "control/cursor/damage"
    blunt = dataclasses.replace(CONTROLS["cursor/damage"], damage=lambda _: None)
    monkeypatch.setitem(CONTROLS, "cursor/damage", blunt)

    result = judge(CELLS[name], Library(), tmp_path)

    assert (result.status, result.said.partition(":")[0]) == ("FAIL", "stayed green")


def test_a_control_that_is_found_for_another_reason_fails(tmp_path, monkeypatch):
    wrong = dataclasses.replace(CONTROLS["cursor/damage"], named="the loss scaler")
    monkeypatch.setitem(CONTROLS, "cursor/damage", wrong)

    result = judge(CELLS["control/cursor/damage"], Library(), tmp_path)

    assert result.said.startswith("red, but not for the loss scaler")


def test_a_control_that_changes_nothing_that_is_learnt_fails(tmp_path, monkeypatch):
    idle = dataclasses.replace(CONTROLS["progress.skipped/drop"], learns=True)
    monkeypatch.setitem(CONTROLS, "progress.skipped/drop", idle)

    result = judge(CELLS["control/progress.skipped/drop"], Library(), tmp_path)

    assert result.said.startswith("what is learnt stays the same for 4 steps")


def frozen(reference, prefix):
    """The same run, in which one kind of fact never changed."""
    first = reference[0, 0] | {
        name: fact for name, fact in reference[12, 0].items() if name.startswith("moment/")
    }
    return {
        position: facts | {name: first[name] for name in facts if name.startswith(prefix)}
        for position, facts in reference.items()
    }


@pytest.mark.parametrize(
    ("prefix", "said"),
    [
        ("rng/torch", "a random-number stream isn't drawn from in every step"),
        ("rng/augment", "a random-number stream isn't drawn from in every step"),
        ("group/0/lr", "the learning rate is constant"),
        ("cursor/", "the data isn't gone through twice"),
        ("buffer/", "the buffers don't move"),
        ("scaler/", "the loss scale doesn't both shrink and grow"),
        ("moment/", "the optimizer's state doesn't move"),
        ("ema/", "the averages don't move"),
    ],
)
def test_a_cell_that_does_not_exercise_what_it_compares_is_found(prefix, said):
    recipe = Recipe(precision="fp16", averaged=True, optimizer="sgd")
    cell = dataclasses.replace(CELLS[MLP], recipe=recipe)
    with own_streams():
        reference = reference_of(recipe)

    assert find_vacuity(cell, reference) is None
    assert said in str(find_vacuity(cell, frozen(reference, prefix)))


def test_a_job_that_has_the_weights_already_proves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(
        sys.modules["ckptfmt_conformance.trajectories.play"], "make_job", always_the_same
    )

    result = judge(dataclasses.replace(CELLS[MLP], cuts=((0, 0),)), Library(), tmp_path)

    assert result.said == "the cell proves nothing: the job to load into has the weights already"


def always_the_same(recipe, seed):
    from ckptfmt_conformance.trajectories.job import TrainingJob  # noqa: PLC0415

    del seed
    return TrainingJob(recipe, 1)


# The ledger


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        (0.0, -0.0, True),
        (float("nan"), float("nan"), False),
        (1.0, 1.0, False),
        (1.0, 1.0000001, True),
    ],
)
def test_bits_are_compared(left, right, expected):
    assert differ(torch.tensor(left), torch.tensor(right)) == expected


def test_dtype_and_shape_count():
    assert differ(torch.zeros(2), torch.zeros(2, dtype=torch.int32))
    assert differ(torch.zeros(2), torch.zeros(1, 2))
    assert differ(torch.zeros(2), None)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_neighbours_are_one_ulp_apart(dtype):
    for value in (1.0, -1.0, 0.5, 0.0):
        one = torch.tensor(value, dtype=dtype)
        integer = {8: torch.int64, 4: torch.int32, 2: torch.int16}[one.element_size()]
        other = (one.view(integer) + 1).view(dtype)
        assert ulps_between(one, other) == 1


def test_ulps_are_counted_across_zero_and_not_for_what_is_no_number():
    assert ulps_between(torch.tensor(-0.0), torch.tensor(0.0)) == 1
    assert ulps_between(torch.tensor(float("nan")), torch.tensor(0.0)) is None
    assert ulps_between(torch.tensor(1), torch.tensor(2)) is None


def test_a_missing_fact_is_a_difference():
    comparison = Comparison({(0, 0): {"rng/python": "1", "cursor/position": "4"}})
    comparison.look((0, 0), {"rng/python": "1"}, loads=1, at_load=True)

    assert comparison.first is not None
    assert "cursor/position is missing, should be 4" in comparison.first.explain()
    assert comparison.first.explain().endswith("most likely not restored: the data cursor")


def test_a_divergence_is_shown_by_tensor_and_step():
    """A failed trajectory: which tensor parts at which step, and by how much; whole steps, from the first on."""

    def facts(weight, moment, name="a"):
        return {
            "parameter/w": torch.tensor([1.0, weight]),
            "moment/exp_avg/w": torch.tensor([moment]),
            "config/x": name,
        }

    comparison = Comparison(
        {(step, micro): facts(2.0, 4.0) for step in range(5) for micro in range(2)}
    )
    for position, found in {
        (0, 0): facts(2.0, 4.0),
        (1, 1): facts(2.0, 2.0),
        (2, 0): facts(1.5, 4.0),
        (2, 1): facts(2.0, 4.0),
        (3, 0): facts(2.0, float("nan"), "b"),
        (4, 0): {"parameter/w": torch.ones(3)},
    }.items():
        comparison.look(position, found, loads=1, at_load=False)

    sentence, _, *table = (comparison.explain() or "").splitlines()
    assert sentence.startswith("first divergence at step 1, microbatch 1")
    assert [line.split() for line in table] == [
        ["steps", "done", "1+1", "2", "3", "4"],
        ["moment/exp_avg/w", "5e-01", ".", "nan", "missing"],
        ["parameter/w", ".", "2e-01", ".", "differs"],
        ["config/x", ".", ".", "differs", "missing"],
    ]


def test_a_table_of_differences_has_an_end():
    comparison = Comparison({(0, 0): {f"rng/{number}": "1" for number in range(1000)}})
    comparison.look((0, 0), {}, loads=1, at_load=True)

    lines = (comparison.explain() or "").splitlines()
    assert len(lines) < 40
    assert lines[-1] == "and 976 more"
