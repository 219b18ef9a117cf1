"""What a user sees of a checkpoint and of the objects: mappings, representations, and types that a checker knows."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptfmt
from ckptfmt.store.memory import MemoryStore

PARTS = ("weights", "optimizer", "extra", "data", "config", "rng", "topology", "provenance")


@pytest.fixture
def store() -> MemoryStore:
    """A checkpoint with something in each field."""
    store = MemoryStore()
    state = ckptfmt.State(
        weights={"w": np.arange(6, dtype=np.float32).reshape(2, 3)},
        optimizer={"m": np.ones(3)},
        data={"position": 24},
        config={"lr": 0.1, "model": {"width": 8}},
        extra={"average": {"w": np.full(3, 2.0)}, "count": 3},
        provenance={"ticket": "A-7"},
    )
    ckptfmt.save(store, state, step=5, metrics={"loss": 0.5}, tags=["good"])
    return store


def test_a_checkpoint_shows_its_parts_as_mappings(store: MemoryStore) -> None:
    """Each is a `Mapping`: keys, `in`, `get`, `dict(...)`, and a `KeyError` where nothing is."""
    with ckptfmt.open(store) as checkpoint:
        for name in PARTS:
            part: Any = getattr(checkpoint, name)
            assert isinstance(part, Mapping), name
            assert len(part) == len(list(part)) == len(part.keys()) == len(part.items()) > 0, name
            assert all(key in part for key in part), name
            assert part.get("no such name") is None, name
            assert "no such name" not in part, name
            with pytest.raises(KeyError):
                part["no such name"]
            assert repr(part), name
        assert checkpoint.weights["w"][0].tolist() == [0, 1, 2]
        assert list(checkpoint.optimizer) == ["m"]
        assert dict(checkpoint.config) == {"lr": 0.1, "model": {"width": 8}}
        assert dict(checkpoint.data) == {"position": 24}
        assert checkpoint.extra["count"] == 3
        assert checkpoint.extra["average"]["w"][...].tolist() == [2, 2, 2]
        assert checkpoint.rng["lw/0"]["python"][0] == "python.mt19937"
        assert checkpoint.topology["local"]
        assert checkpoint.provenance["ticket"] == "A-7"
        assert (checkpoint.metrics, checkpoint.tags) == ({"loss": 0.5}, ("good",))


def test_a_name_that_is_not_there_is_a_key_error_and_one_of_ours(store: MemoryStore) -> None:
    """Who catches either, catches it; it survives a process boundary."""
    with (
        ckptfmt.open(store) as checkpoint,
        pytest.raises(ckptfmt.CkptError, match="TENSOR_MISSING at v:") as caught,
    ):
        checkpoint.weights["v"]
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_what_is_absent_is_an_empty_mapping(tmp_path: Path) -> None:
    """Not an error: a part may be looked for before it is known to be there."""
    ckptfmt.save(tmp_path / "x", ckptfmt.State(data=24, rng=False), step=1)
    with ckptfmt.open(tmp_path / "x") as checkpoint:
        assert [
            len(getattr(checkpoint, name))
            for name in ("weights", "optimizer", "extra", "config", "rng")
        ] == [0] * 5
        assert dict(checkpoint.data) == {"": 24}


def test_the_engines_members_are_not_shown(store: MemoryStore) -> None:
    """`dir` and completion list what is for users; all of it is there."""
    with ckptfmt.open(store) as checkpoint:
        shown = dir(checkpoint)
        assert {*PARTS, "step", "path", "metrics", "tags", "digest"} <= set(shown)
        assert not {
            "find",
            "closure",
            "open_part",
            "plan_reading",
            "stored_leaf",
            "block_nbytes",
        } & set(shown)
        assert all(hasattr(checkpoint, name) for name in shown)


def test_representations_say_what_it_is_in_a_line(tmp_path: Path) -> None:
    """Of everything public that a user makes or is given."""
    state = ckptfmt.State(
        weights={"w": np.zeros(3)}, data={"n": 1}, config={"lr": 1}, identity=("lr",)
    )
    run = str(tmp_path / "run")
    assert repr(state) == "State(weights={w}, data={n}, config={lr}, identity=('lr',))"
    with ckptfmt.Checkpointer(run, state, saving=ckptfmt.Saving(saver="inline")) as checkpointer:
        handle = checkpointer.save(step=2)
        assert repr(checkpointer) == f"Checkpointer({run!r}, step=2, launch=1)"
        assert handle is not None
        assert repr(handle).startswith("SaveHandle(step=2, state='COMMITTED'")
    path = handle.path
    assert repr(ckptfmt.Run(run)) == f"Run({run!r})"
    sampler = ckptfmt.Sampler(
        {"books": 10, "code": 5}, mixture={"books": 3, "code": 1}, global_batch=4, worker=(0, 1)
    )
    assert repr(sampler) == "Sampler(books: 10, code: 5, global_batch=4, seed=0, steps_done=0)"
    assert repr(ckptfmt.PerWorker(sampler)) == "PerWorker(Sampler)"
    assert repr(ckptfmt.FirstWorker({"best": np.zeros(3)})) == "FirstWorker({best})"
    assert repr(ckptfmt.Parts([sampler, {"w": np.zeros(9)}])) == "Parts([Sampler, {w}])"
    assert repr(ckptfmt.PathSaver(saver="thread")) == "PathSaver(saver='thread', 0 saves in hand)"
    with ckptfmt.open(run) as checkpoint:
        assert repr(checkpoint) == (
            f"Checkpoint({path!r}, step=2, nbytes=24, weights rng data config topology provenance)"
        )
        assert repr(checkpoint.weights) == "TensorView(weights: 1 names)"
    assert repr(ckptfmt.validate(path)).startswith(f"Report({path!r}, checkpoint, nbytes=")
    report = ckptfmt.load(path, state)
    assert repr(report) == "LoadReport(step=2, claim='S0'; not in State: optimizer)"


PROGRAM = """
from typing import assert_type

import ckptfmt

state = ckptfmt.State()
assert_type(ckptfmt.load("x", state), ckptfmt.LoadReport)
ckptfmt.load("x")["weights"]
ckptfmt.Checkpointer("x", state, saving=ckptfmt.Saving(saver="proces"))
ckptfmt.Checkpointer("x", state, saving=ckptfmt.Saving(when_busy="wiat"))
ckptfmt.Checkpointer("x", state, saving=ckptfmt.Saving(delta="smalest"))
ckptfmt.Checkpointer("x", state, keep=ckptfmt.Retention(newest=1, best=("loss", "least", 1)))
ckptfmt.Checkpointer("x", state, when_busy="wiat")
ckptfmt.Checkpointer("x", state, delta="smalest")
ckptfmt.Checkpointer("x", state, keep=3, slots=1, stop_on=[15])
ckptfmt.PathSaver(saver="proces")
ckptfmt.load("x", state, allow=("mising",))
ckptfmt.load("x", framework="numpyy")
ckptfmt.Run("x").best("loss", "least")
handle: ckptfmt.SaveHandle
report: ckptfmt.SaveReport = ckptfmt.save("x", state, step=1)
found: ckptfmt.Report = ckptfmt.validate("x")
checkpoint: ckptfmt.Checkpoint = ckptfmt.open("x")
one: ckptfmt.RunCheckpoint = ckptfmt.Run("x").newest()
"""


def test_a_type_checker_finds_what_is_misspelt_and_knows_the_results(tmp_path: Path) -> None:
    """`saver="proces"` was found when the training began."""
    (tmp_path / "program.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--config-file=", "program.py"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    lines = PROGRAM.splitlines()
    wrong = [
        number
        for number, line in enumerate(lines, 1)
        if any(
            word in line for word in ('proces"', "wiat", "smalest", 'least"', "mising", "numpyy")
        )
    ]
    found = sorted(
        {int(line.split(":")[1]) for line in done.stdout.splitlines() if ": error:" in line}
    )
    assert found == wrong, done.stdout
