"""What a snapshot holds: fields, reasons, topology, provenance, configuration."""

import argparse
import dataclasses
import enum
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import torch

from ckptfmt.adapters.capture import capture
from ckptfmt.adapters.origin import program_origin
from ckptfmt.documents.manifest import FIELDS
from ckptfmt.documents.tree import InlineArray, parse_tree
from ckptfmt.errors import CkptError, StateError
from ckptfmt.state import NOT_GIVEN, PerWorker, State
from ckptfmt.write.snapshot import TensorSource


def leaves_of(snapshot):
    return {
        (leaf.field, leaf.name): parse_tree(leaf.value, where=leaf.name) for leaf in snapshot.leaves
    }


def test_every_field_is_given_or_absent_with_a_reason():
    snapshot = capture(State(absent={"data": "synthetic"}), worker=0, worker_count=1)

    assert snapshot.absent == {
        "weights": NOT_GIVEN,
        "optimizer": NOT_GIVEN,
        "data": "synthetic",
        "config": NOT_GIVEN,
    }
    assert {leaf.field for leaf in snapshot.leaves} == {"topology", "provenance"}


def test_a_worker_without_a_piece_of_a_field_says_so():
    snapshot = capture(
        State(weights={}, data=PerWorker(torch.nn.Module())), worker=1, worker_count=2
    )

    assert snapshot.absent["data"] == "nothing of it on this worker"
    assert snapshot.absent["provenance"] == "nothing of it on this worker"
    assert set(snapshot.absent) <= set(FIELDS)


def test_all_workers_agree_on_topology_and_only_the_first_gives_the_rest():
    first, second = (capture(State(), worker=worker, worker_count=2) for worker in range(2))

    assert {(leaf.field, leaf.name) for leaf in first.leaves} - {
        (leaf.field, leaf.name) for leaf in second.leaves
    } == {
        ("topology", "local"),
        ("provenance", ""),
    }
    topology = leaves_of(second)["topology", ""]
    assert topology == leaves_of(first)["topology", ""]
    assert topology["worker_count"] == 2
    assert topology["versions"]["torch"] == torch.__version__
    assert topology["flags"]["get_default_dtype"] == "torch.float32"
    assert leaves_of(first)["topology", "local"]["device_kinds"] == []


def test_provenance_says_where_the_run_comes_from(monkeypatch):
    """REQ-CTX-005."""
    monkeypatch.delenv("CKPTFMT_GIT_COMMIT", raising=False)
    monkeypatch.setenv("GITHUB_SHA", "abc")
    program_origin.cache_clear()
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "do not keep me")
    snapshot = capture(State(provenance={"who": "me", "python": "mine"}), worker=0, worker_count=1)

    program_origin.cache_clear()  # the variable belongs to this test
    provenance = leaves_of(snapshot)["provenance", ""]

    assert provenance["git_commit"] == "abc"
    assert provenance["who"] == "me"
    assert provenance["python"] == "mine"
    assert provenance["packages"]["numpy"] == np.__version__
    assert not any(b"do not keep me" in leaf.value for leaf in snapshot.leaves)


class Mode(enum.Enum):
    FAST = 1


@dataclasses.dataclass
class Model:
    width: int
    mode: Mode


def test_configurations_become_plain_values():
    config = argparse.Namespace(
        model=Model(8, Mode.FAST),
        path=pathlib.PurePosixPath("/a/b"),
        dtype=torch.bfloat16,
        betas=(0.9, np.float32(0.5)),
        table=np.ones(2, np.int8),
    )

    snapshot = capture(State(config=config), worker=0, worker_count=1)

    found = leaves_of(snapshot)["config", ""]
    assert found["model"] == {"width": 8, "mode": "FAST"}
    assert found["path"] == "/a/b"
    assert found["dtype"].name == "bfloat16"
    assert found["betas"][1] == InlineArray("float32", (), np.float32(0.5).tobytes(), scalar=True)
    assert found["table"].content == b"\1\1"
    assert not snapshot.tensors


@pytest.mark.parametrize(
    ("value", "code", "where"),
    [
        (object(), "STATE_UNSUPPORTED", "config/a/b"),
        (torch.ones(1), "STATE_UNSUPPORTED", "config/a/b"),
        (print, "STATE_UNSUPPORTED", "config/a/b"),
    ],
)
def test_a_configuration_without_a_form_is_refused_by_name(value, code, where):
    with pytest.raises(StateError) as caught:
        capture(State(config={"a": {"b": value}}), worker=0, worker_count=1)

    assert caught.value.code == code
    assert caught.value.where == where


def test_a_configuration_that_contains_itself_is_refused():
    config: dict[str, object] = {}
    config["again"] = config

    with pytest.raises(CkptError, match="DOC_DEPTH"):
        capture(State(config=config), worker=0, worker_count=1)


def test_sources_are_what_engines_expect_and_are_sorted():
    snapshot = capture(
        State(weights=torch.nn.Linear(2, 2), data={"x": np.ones(2)}, extra={"a": torch.ones(2)}),
        worker=0,
        worker_count=1,
    )

    assert all(isinstance(source, TensorSource) for source in snapshot.tensors)
    assert [(source.field, source.name) for source in snapshot.tensors] == [
        ("weights", "bias"),
        ("weights", "weight"),
        ("optimizer", "extra/a"),
        ("data", "x"),
    ]
    assert [leaf.field for leaf in snapshot.leaves] == sorted(
        (leaf.field for leaf in snapshot.leaves), key=FIELDS.index
    )


def test_a_source_shows_the_tensor_until_it_is_copied():
    weights = {"x": torch.zeros(2)}
    (source,) = capture(State(weights=weights), worker=0, worker_count=1).tensors
    weights["x"] += 1

    out = bytearray(8)
    source.copy_into(source.boxes[0], memoryview(out))

    assert np.frombuffer(out, np.float32).tolist() == [1, 1]


def test_a_worker_out_of_range_is_refused():
    with pytest.raises(StateError, match="ARGUMENT"):
        capture(State(), worker=2, worker_count=2)


def test_numpy_runs_go_without_torch():
    program = """
import sys
import numpy as np
from ckptfmt.adapters.capture import capture
from ckptfmt.loading.restore import load_once
from ckptfmt.state import State
snapshot = capture(State(weights={"w": np.ones(2)}, config={"a": 1}), worker=0, worker_count=1)
print(len(snapshot.tensors), [name for name in sys.modules if name.partition(".")[0] == "torch"])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )

    assert (done.returncode, done.stdout.strip()) == (0, "1 []"), done.stderr


def test_another_name_of_a_tied_tensor_is_taken_too():
    weight = torch.nn.Parameter(torch.ones(2))
    tied = torch.nn.ParameterDict({"a": weight, "b": weight})

    with pytest.raises(StateError, match=r"STATE_NAME.*extra/x/b"):
        capture(
            State(optimizer={"extra": {"x": {"b": torch.ones(2)}}}, extra={"x": tied}),
            worker=0,
            worker_count=1,
        )


def names_of(snapshot):
    return [source.name for source in snapshot.tensors if source.field == "weights"]


def test_a_capture_sees_what_changed_since_the_last_one():
    model = torch.nn.Sequential(
        torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False)
    )
    state = State(weights=model)
    assert names_of(capture(state, worker=0, worker_count=1)) == ["0.weight", "1.weight"]

    model[1].register_buffer("scale", torch.ones(1))
    model[1].weight = model[0].weight
    model[0] = torch.nn.DataParallel(model[0])
    snapshot = capture(state, worker=0, worker_count=1)
    assert names_of(snapshot) == ["0.weight", "1.scale"]
    assert snapshot.tensors[0].aliases == ("1.weight",)

    model.register_state_dict_post_hook(lambda *arguments: arguments[1].__delitem__("1.scale"))
    model[1].weight = torch.nn.Parameter(torch.zeros(3, 3))
    snapshot = capture(state, worker=0, worker_count=1)
    assert names_of(snapshot) == ["0.weight", "1.weight"]
    assert snapshot.tensors[1].global_shape == (3, 3)


def test_values_are_copied_and_tensors_are_live():
    order, loss = [1, 2, 3], torch.zeros(2)
    snapshot = capture(State(data={"order": order, "loss": loss}), worker=0, worker_count=1)
    order.append(4)
    loss += 1

    assert leaves_of(snapshot)["data", ""]["order"] == [1, 2, 3]
    held = bytearray(8)
    snapshot.tensors[0].copy_into(snapshot.tensors[0].boxes[0], memoryview(held))
    assert np.frombuffer(held, np.float32).tolist() == [1, 1]
