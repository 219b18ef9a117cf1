"""Reports and claims, configuration, what several workers leave, fields on their own."""

import subprocess
import sys

import pytest
import torch

from ckptfmt.adapters.capture import capture
from ckptfmt.adapters.load_plan import LoadPlan
from ckptfmt.errors import StateError
from ckptfmt.loading.restore import plan_restore
from ckptfmt.state import PerWorker, State
from tests.adapters.double import checkpoint_of, load, restore, save

CURSOR = {"kind": "ckptfmt.data_cursor", "position": 3}


def whole(**changes):
    net = torch.nn.Linear(2, 2)
    fields = {
        "weights": net,
        "optimizer": torch.optim.SGD(net.parameters(), lr=0.1),
        "data": dict(CURSOR),
        "config": {"model": {"width": 2}, "log": "a"},
        "provenance": {"who": "me"},
    }
    return State(**{**fields, **changes})


def test_a_whole_state_in_the_same_place_goes_on_bit_by_bit():
    checkpoint = save(whole())

    report = load(whole(), checkpoint)

    assert report.claim == "T1"
    assert report.lowered_by == ()
    assert report.step == 7
    assert report.digest == checkpoint.digest


def test_what_lowers_the_claim_is_said():
    saved = save(whole())

    other_flags = torch.get_num_threads()
    torch.set_num_threads(other_flags + 1)
    try:
        report = load(whole(), saved)
    finally:
        torch.set_num_threads(other_flags)
    assert report.claim == "S1"
    assert report.lowered_by == (f"num_threads: saved {other_flags}, here {other_flags + 1}",)
    assert report.downgrades == ()


def test_without_a_cursor_only_bytes_are_claimed():
    saved = save(whole(data={"n": 1}))

    report = load(whole(data=None), saved)

    assert report.claim == "S0"
    assert report.lowered_by == ("not in State: data",)


def test_a_field_that_was_not_saved_lowers_the_claim():
    report = load(State(weights=torch.nn.Linear(2, 2)), save(State(weights=torch.nn.Linear(2, 2))))

    assert report.claim == "S0"
    assert report.lowered_by == ("not in State: optimizer, data, config",)


def test_a_field_that_is_here_and_was_not_saved_is_told_with_its_reason():
    report = load(whole(config={"a": 1}), save(whole(config=None, absent={"config": "secret"})))

    assert report.lowered_by[0] == "config wasn't saved: secret"


def test_configuration_is_compared_and_never_loaded():
    config = {"model": {"width": 2}, "log": "b", "new": None}

    report = load(whole(config=config), save(whole()))

    assert report.config_differences == (("log", "a", "b"), ("new", "<absent>", None))
    assert config == {"model": {"width": 2}, "log": "b", "new": None}


def test_a_key_of_identity_must_be_equal():
    saved = save(whole())

    load(whole(identity=("model/width", "model")), saved)
    with pytest.raises(StateError, match=r"CONFIG_IDENTITY.*model/width.*saved 2, here 3"):
        load(whole(config={"model": {"width": 3}}, identity=("model",)), saved)
    with pytest.raises(StateError, match=r"ARGUMENT.*modle"):
        load(whole(identity=("modle",)), saved)


def test_a_type_that_changed_is_a_difference():
    report = load(whole(config={"a": 1}), save(whole(config={"a": True})))

    assert report.config_differences == (("a", True, 1),)


def test_an_unknown_word_in_allow_is_refused():
    with pytest.raises(StateError, match=r"ARGUMENT.*missing"):
        load(whole(), save(whole()), allow={"mising"})


def test_a_field_that_is_not_asked_for_is_left_alone():
    saved = save(whole(extra={"n": 1}))
    net = torch.nn.Linear(2, 2)

    report = load(State(weights=net), saved)

    assert "not in State: optimizer, data, config" in report.lowered_by
    assert "claim='S0'; not in State: optimizer, data, config" in repr(report)
    assert "lowered" not in repr(report)


def stage(worker, *, lr=0.1):
    net = torch.nn.ModuleDict({str(worker): torch.nn.Linear(2, 2)})
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    net[str(worker)](torch.ones(2)).sum().backward()
    optimizer.step()
    return State(weights=net, optimizer=optimizer, data=PerWorker({"worker": worker}))


def plan_of(checkpoint, worker):
    return LoadPlan(checkpoint, worker=worker, worker_count=2, allow=frozenset())


def test_stages_of_a_pipeline_load_their_own_and_leave_the_others():
    saved = [stage(worker, lr=0.1 * (worker + 1)) for worker in range(2)]
    checkpoint = checkpoint_of(
        *(capture(one, worker=i, worker_count=2) for i, one in enumerate(saved))
    )
    live = [stage(worker) for worker in range(2)]

    plans = [plan_restore(one, plan_of(checkpoint, i)) for i, one in enumerate(live)]
    nobody = plans[0].leftover() & plans[1].leftover()
    for plan in plans:
        plan.check(nobody)
        plan.apply(plan.plan_reading().run(), streams=False)

    assert nobody == frozenset()
    assert plans[0].leftover()
    for worker in range(2):
        assert torch.equal(
            live[worker].weights[str(worker)].weight, saved[worker].weights[str(worker)].weight
        )
        assert live[worker].optimizer.param_groups[0]["lr"] == 0.1 * (worker + 1)
        assert live[worker].data.value == {"worker": worker}


def test_what_no_worker_takes_is_refused():
    saved = [stage(worker) for worker in range(2)]
    checkpoint = checkpoint_of(
        *(capture(one, worker=i, worker_count=2) for i, one in enumerate(saved))
    )
    plans = [plan_restore(stage(0), plan_of(checkpoint, i)) for i in range(2)]

    with pytest.raises(StateError, match=r"TENSOR_UNEXPECTED|LEAF_UNEXPECTED"):
        plans[1].check(plans[0].leftover() & plans[1].leftover())


def test_a_failed_plan_changes_nothing():
    saved = save(whole(extra={"n": 1}))
    live = whole(extra={"n": 5, "m": 6})
    before = live.weights.weight.detach().clone()

    with pytest.raises(StateError, match="LEAF_MISSING"):
        load(live, saved)

    assert torch.equal(live.weights.weight, before)
    assert live.extra == {"n": 5, "m": 6}


def test_values_of_workers_that_are_gone_are_reported():
    states = [State(data=PerWorker({"worker": worker})) for worker in range(3)]
    checkpoint = checkpoint_of(
        *(capture(one, worker=i, worker_count=3) for i, one in enumerate(states))
    )
    data = {"worker": 9}

    report = restore(
        State(data=PerWorker(data)), checkpoint, worker=0, worker_count=1, strict=False
    )

    assert data == {"worker": 0}
    assert any("2 tensors and values" in line for line in report.downgrades)


LAZY = """
import sys
import ckptfmt

class Lazy:
    count = 0
    def state_dict(self):
        import torch
        return {"count": self.count}
    def load_state_dict(self, state):
        self.count = state["count"]

state = ckptfmt.State(data=Lazy(), config={})
if sys.argv[2] == "save":
    ckptfmt.save(sys.argv[1], state, step=1)
else:
    assert "torch" not in sys.modules
    report = ckptfmt.load(sys.argv[1], state)
    print(sorted(report.lowered_by))
"""


def test_torch_that_a_state_dict_imports_is_there_for_the_claim(tmp_path):
    """torch was looked up once, before the state_dict of a live object had imported it."""
    printed = []
    for word in ("save", "load"):
        command = [sys.executable, "-c", LAZY, str(tmp_path / "c"), word]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stderr
        printed.append(run.stdout)
    assert "<absent>" not in printed[1]
    assert "flags" not in printed[1]
