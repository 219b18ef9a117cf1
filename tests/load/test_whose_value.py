"""Whose value a checkpoint holds: that of every worker, of each its own, of the first one; and RNG streams of none."""

import random
from typing import Any

import numpy as np
import pytest

import ckptfmt
from ckptfmt.errors import CkptError


class Counter:
    """An object with a state_dict."""

    def __init__(self, count):
        self.count = count

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def load(path, *arguments) -> Any:
    return ckptfmt.load(path, *arguments)


def save_all(path, states):
    attempt = ckptfmt.SaveAttempt.begin(step=1, writer_count=len(states))
    return attempt.commit(
        path, [attempt.write_part(path, state, writer=n) for n, state in enumerate(states)]
    )


def test_the_first_workers_value_counts_for_all(tmp_path):
    states = [
        ckptfmt.State(
            data=ckptfmt.FirstWorker(Counter(worker)),
            extra={
                "best": ckptfmt.FirstWorker({"loss": float(worker), "w": np.full(3, worker)}),
                "same": 1,
            },
        )
        for worker in range(3)
    ]
    save_all(tmp_path / "c", states)
    assert ckptfmt.validate(tmp_path / "c").valid

    for worker in range(3):
        held: dict[str, Any] = {
            "best": ckptfmt.FirstWorker({"loss": -1.0, "w": np.zeros(3, int)}),
            "same": 0,
        }
        counter = Counter(-1)
        state = ckptfmt.State(data=ckptfmt.FirstWorker(counter), extra=held)
        ckptfmt.load(
            tmp_path / "c",
            state,
            writer=(worker, 3),
            agree=lambda value: [value] * 3,
            allow=("streams",),
        )
        assert counter.count == 0
        assert held["best"].value["loss"] == 0.0
        assert held["best"].value["w"].tobytes() == np.zeros(3, int).tobytes()
        assert held["same"] == 1


def test_values_that_differ_are_refused_without_it(tmp_path):
    with pytest.raises(CkptError) as caught:
        save_all(tmp_path / "c", [ckptfmt.State(extra={"best": worker}) for worker in range(2)])
    assert caught.value.code == "LEAF_DIVERGED"
    assert "FirstWorker" in caught.value.remedy


def test_a_single_worker_is_the_first(tmp_path):
    ckptfmt.save(tmp_path / "c", ckptfmt.State(data=ckptfmt.FirstWorker({"n": 5})), step=1)
    assert load(tmp_path / "c")["data"] == {"n": 5}


@pytest.mark.parametrize("inside", [ckptfmt.PerWorker({"n": 1}), {"deep": [ckptfmt.PerWorker(1)]}])
def test_what_is_each_workers_own_is_not_the_first_ones(tmp_path, inside):
    with pytest.raises(CkptError) as caught:
        ckptfmt.save(tmp_path / "c", ckptfmt.State(data=ckptfmt.FirstWorker(inside)), step=1)
    assert caught.value.code == "ARGUMENT"


def test_modules_are_given_as_they_are(tmp_path):
    torch = pytest.importorskip("torch")
    state = ckptfmt.State(weights=ckptfmt.FirstWorker(torch.nn.Linear(2, 2)))
    with pytest.raises(CkptError) as caught:
        ckptfmt.save(tmp_path / "c", state, step=1)
    assert caught.value.code == "ARGUMENT"


def test_a_sampler_below_the_first_workers_value_commits(tmp_path):
    sampler = ckptfmt.Sampler(10, global_batch=4, seed=7, worker=(0, 1))
    state = ckptfmt.State(data=ckptfmt.FirstWorker(sampler))
    with ckptfmt.Checkpointer(tmp_path / "run", state, saver="inline") as checkpointer:
        for _ in checkpointer.steps(3):
            pass
    assert sampler.steps_done == 3


def test_no_stream_is_saved_or_touched_where_the_framework_keeps_them(tmp_path):
    state = ckptfmt.State(data={"n": 1}, rng=False)
    ckptfmt.save(tmp_path / "c", state, step=1)
    with ckptfmt.open(tmp_path / "c") as checkpoint:
        assert not checkpoint.streams
        assert checkpoint.manifest.fields["rng"].reason == "State(rng=False)"
    random.seed(5)
    before = random.getstate()
    report = load(tmp_path / "c", state)
    assert random.getstate() == before
    assert report.claim != "T1"
    assert any("rng" in reason for reason in report.lowered_by)


def test_saved_streams_stay_where_they_are_for_a_state_without_them(tmp_path):
    random.seed(1)
    ckptfmt.save(tmp_path / "c", ckptfmt.State(data={"n": 1}), step=1)
    random.seed(5)
    before = random.getstate()
    report = load(tmp_path / "c", ckptfmt.State(data={"n": 0}, rng=False))
    assert random.getstate() == before
    assert "not in State: weights, optimizer, rng, config" in report.lowered_by
    assert report.claim != "T1"

    ckptfmt.load(tmp_path / "c", ckptfmt.State(data={"n": 0}))
    random_there = random.getstate()
    random.seed(1)
    assert random_there == random.getstate(), "the control: a state with RNG streams gets them back"
