"""Plain values, arrays and tensors in trees; objects with state_dict; what is refused, and what is changed in place."""

import collections
import math
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from ckptfmt.adapters.live_trees import join_name
from ckptfmt.adapters.numpy import ArraySink
from ckptfmt.adapters.placing import load_trees
from ckptfmt.box import Box
from ckptfmt.errors import StateError
from ckptfmt.state import PerWorker, State
from tests.adapters.double import load, save


class Holder:
    """Any object with the two methods."""

    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return self.value

    def load_state_dict(self, value):
        self.value = value


def tree():
    return {
        "none": None,
        "numbers": [1, -(1 << 70), True, -0.0, math.inf, 1 + 2j],
        "tuple": ("a", b"b", ("nested", {"deep": [1, [2, [3]]]})),
        1: collections.OrderedDict(b=1, a=2),
        (2, "x"): collections.Counter({"a": 3}),
        "deque": collections.deque([1, 2], maxlen=3),
        "sets": {1, 2},
        "frozen": frozenset({"x"}),
        "array": np.arange(6, dtype=np.int16).reshape(2, 3),
        "scalar": np.float32(1.5),
        "brain": np.array([1.5, -0.0], ml_dtypes.bfloat16),
        "tensor": torch.arange(4.0),
        "names": [torch.float32, torch.device("cpu"), torch.Size([2, 3])],
    }


def same(left, right):
    if isinstance(left, np.ndarray | np.generic | torch.Tensor):
        as_bytes = [
            value.numpy().tobytes() if isinstance(value, torch.Tensor) else value.tobytes()
            for value in (left, right)
        ]
        return (
            type(left) is type(right) and left.dtype == right.dtype and as_bytes[0] == as_bytes[1]
        )
    if isinstance(left, dict):
        return (
            type(left) is type(right)
            and list(left) == list(right)
            and all(same(left[k], right[k]) for k in left)
        )
    if isinstance(left, list | tuple | collections.deque):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and left == right and repr(left) == repr(right)


def test_an_empty_mapping_takes_everything():
    live: dict[object, object] = {}

    load(State(data=live), save(State(data=tree())))

    assert same(live, tree())


def test_an_object_gets_its_tree_back():
    holder = Holder(None)

    load(State(data=holder), save(State(data=Holder(tree()))))

    assert same(holder.value, tree())


def test_everything_mutable_is_changed_in_place():
    live = tree()
    kept = {key: live[key] for key in (1, (2, "x"), "numbers", "deque", "sets", "array", "tensor")}
    deep = live["tuple"][2][1]["deep"]
    changed = tree()
    changed["array"] += 1
    changed["tensor"] += 1
    changed["numbers"].append(9)
    changed["deque"].append(3)
    changed["sets"].add(5)
    changed[2, "x"]["b"] = 7
    changed["tuple"][2][1]["deep"][0] = 8

    load(State(data=live), save(State(data=changed)))

    assert same(live, changed)
    assert all(live[key] is value for key, value in kept.items())
    assert live["tuple"][2][1]["deep"] is deep


def test_a_deep_copy_is_filled_in_place():
    average = {"layers": [{"w": torch.zeros(2)}, {"w": torch.zeros(2)}]}
    inner = [layer["w"] for layer in average["layers"]]
    saved = {"layers": [{"w": torch.ones(2)}, {"w": torch.full((2,), 2.0)}]}

    load(State(extra={"ema": average}), save(State(extra={"ema": saved})))

    assert [tensor.tolist() for tensor in inner] == [[1, 1], [2, 2]]
    assert average["layers"][0]["w"] is inner[0]


def test_immutable_values_are_set_in_their_container_or_reported():
    per, holder = PerWorker(1), Holder(0)
    mixed = {"h": holder, "n": 2}
    extra = {"step": 0, "per": per, "mixed": mixed}
    checkpoint = save(
        State(extra={"step": 5, "per": PerWorker(6), "mixed": {"h": Holder(7), "n": 8}}, data=9)
    )

    report = load(State(extra=extra, data=0), checkpoint)

    assert (extra["step"], per.value, holder.value, mixed["n"]) == (5, 6, 7, 8)
    assert report.values == {"data:": 9}
    assert ("optimizer", "extra/per", "lw/0") in checkpoint.leaves


@pytest.mark.parametrize(
    ("live", "saved", "code", "where"),
    [
        ({"a": 1, "b": {"x": 1}}, {"a": 1, "b": {}}, "LEAF_MISSING", "b/x"),
        ({"a": 1, "b": {"x": 1}}, {"a": 1, "b": {"x": 1, "y": 2}}, "LEAF_UNEXPECTED", "b/y"),
        ({"a": np.zeros(2)}, {"a": np.zeros(3)}, "SHAPE_MISMATCH", "a"),
        ({"a": np.zeros(2)}, {"a": np.zeros(2, np.int64)}, "DTYPE_MISMATCH", "a"),
    ],
)
def test_other_keys_shapes_and_dtypes_are_refused(live, saved, code, where):
    with pytest.raises(StateError) as caught:
        load(State(data=live), save(State(data=saved)))

    assert caught.value.code == code
    assert caught.value.where == f"data:{where}"


def test_keys_may_be_left_out_or_kept_where_allowed():
    live = {"a": 1, "mine": 2}

    report = load(
        State(data=live),
        save(State(data={"a": 5, "theirs": torch.ones(2)})),
        allow={"missing", "unexpected"},
    )

    assert live == {"a": 5, "mine": 2}
    assert len(report.downgrades) == 2


def test_a_missing_and_an_unexpected_value():
    saved = save(State(extra={"a": 1, "b": 2}))

    with pytest.raises(StateError, match=r"LEAF_UNEXPECTED at extra:b"):
        load(State(extra={"a": 0}), saved)
    with pytest.raises(StateError, match=r"LEAF_MISSING at extra:c"):
        load(State(extra={"a": 0, "b": 0, "c": 0}), saved)
    live = {"a": 0, "c": 3}
    load(State(extra=live), saved, allow={"missing", "unexpected"})
    assert live == {"a": 1, "c": 3}


class Strange:
    pass


Point = collections.namedtuple("Point", "x")  # noqa: PYI024


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (Strange(), "Strange"),
        (Point(1), "Point"),
        (collections.defaultdict(int), "defaultdict"),
        (np.array(["a"]), "<U1"),
        (np.array([object()]), "object"),
        (np.zeros(2, [("a", "f4")]), "'a'"),
        (np.ma.zeros(2), "MaskedArray"),
        (np.datetime64("2020-01-01"), "datetime64"),
        (lambda: 0, "function"),
    ],
)
def test_what_has_no_form_is_refused_by_name_and_place(value, said):
    with pytest.raises(StateError) as caught:
        save(State(extra={"a": {"b": [value]}}))

    assert caught.value.code == "STATE_UNSUPPORTED"
    assert said in caught.value.detail
    assert "extra:a" in str(caught.value.where)
    assert "b/0" in str(caught.value.where)


def test_an_object_that_does_not_keep_what_it_loads_is_found_out():
    class Rounding(Holder):
        def load_state_dict(self, value):
            self.value = {
                **value,
                "x": round(value["x"]),
                "t": value["t"].to(torch.float16).float(),
            }

    for x in (1.25, 1.0):
        saved = save(State(data=Holder({"x": x, "t": torch.tensor(1 / 3)})))
        with pytest.raises(StateError, match=r"READ_BACK.*first at /?[xt]"):
            load(State(data=Rounding({})), saved)


def test_an_object_that_fails_says_where():
    class Failing(Holder):
        def load_state_dict(self, _value):
            raise RuntimeError("no")

    with pytest.raises(RuntimeError) as caught:
        load(State(data=Failing(0)), save(State(data=Holder(1))))

    assert any("load_state_dict of data" in note for note in caught.value.__notes__)


def test_an_object_that_empties_what_it_is_given_is_judged_by_what_it_holds():
    class Popping(Holder):
        def load_state_dict(self, value):
            self.value = {"x": value.pop("x"), "t": value.pop("t")}

    live = Popping({})

    load(State(data=live), save(State(data=Holder({"x": 1, "t": np.ones(2)}))))

    assert live.value["x"] == 1


def test_minus_zero_and_nan_payloads_of_arrays_and_floats():
    bits = np.array([0x80000000, 0x7FC00001, 0xFF800001, 0x7F800001], np.uint32).view(np.float32)
    live: dict[str, Any] = {"array": np.zeros(4, np.float32), "scalar": 0, "float": 1.0}
    payload = np.array([0x7FF8000000000123], np.uint64).view(np.float64)[0].item()

    load(State(data=live), save(State(data={"array": bits, "scalar": bits[1], "float": payload})))

    assert live["array"].tobytes() == bits.tobytes()
    assert live["scalar"].tobytes() == bits[1].tobytes()
    assert np.float64(live["float"]).tobytes() == np.float64(payload).tobytes()


@pytest.mark.parametrize(
    "array", [np.arange(6, dtype=">f4").reshape(2, 3), np.asfortranarray(np.ones((2, 3)))]
)
def test_byte_order_and_memory_order_of_an_array_do_not_matter(array):
    live = np.zeros_like(array)

    load(State(data={"x": live}), save(State(data={"x": array})))

    assert (live == array).all()


def test_a_read_only_array_is_refused():
    array = np.zeros(2)
    array.setflags(write=False)

    with pytest.raises(StateError, match=r"STATE_UNSUPPORTED.*read-only"):
        load(State(data={"x": array}), save(State(data={"x": np.ones(2)})))


def test_an_array_is_converted_only_where_allowed():
    live = {"x": np.zeros(2, np.float32)}

    load(State(data=live), save(State(data={"x": np.array([1 / 3, 2.0])})), allow={"dtype"})

    assert live["x"].tolist() == [np.float32(1 / 3), 2.0]


def test_a_sink_takes_any_piece():
    array = np.zeros((4, 3), np.int32)
    whole = np.arange(12, dtype=np.int32).reshape(4, 3)
    sink = ArraySink(
        field="data",
        name="x",
        dtype="int32",
        global_shape=(4, 3),
        scope="global",
        array=array,
        boxes=(),
    )
    for box in (Box((0, 0), (1, 3)), Box((1, 0), (3, 2)), Box((1, 2), (3, 1))):
        sink.copy_from(box, memoryview(whole[box.relative_to(Box.whole((4, 3)))].tobytes()))

    assert (array == whole).all()


def test_names_escape_what_separates_them():
    assert join_name(["a/b", "c~d", 3, (1, "x")]) == "a~1b/c~0d/3/(1, 'x')"


def test_trees_come_back_without_a_state():
    net = torch.nn.Linear(2, 2)
    net.register_buffer("cache", torch.ones(1), persistent=False)
    generator = np.random.default_rng(3)
    checkpoint = save(
        State(
            weights=net,
            data=tree(),
            config={"lr": 0.1},
            extra={"n": PerWorker(4), "m": 5},
            rng={"g": generator},
        )
    )

    trees = load_trees(checkpoint)

    torch.nn.Linear(2, 2).load_state_dict(trees["weights"])
    assert torch.equal(trees["weights"]["weight"], net.weight)
    assert same(trees["data"], tree())
    assert trees["config"] == {"lr": 0.1}
    assert trees["optimizer"] == {"extra/m": 5, "lw/0": {"extra/n": 4}}
    assert trees["rng"]["lw/0"]["user/g"][1] == generator.bit_generator.state
    assert isinstance(load_trees(checkpoint, "numpy")["weights"]["bias"], np.ndarray)
    assert isinstance(load_trees(checkpoint, "torch")["data"]["array"], torch.Tensor)
    with pytest.raises(StateError, match="ARGUMENT"):
        load_trees(checkpoint, "mxnet")


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_a_framework_that_is_not_installed_is_named(monkeypatch, framework):
    checkpoint = save(State(data={"n": 1}))
    monkeypatch.setitem(sys.modules, framework, None)
    with pytest.raises(StateError, match=f"ARGUMENT.*{framework} isn't installed.*pip install"):
        load_trees(checkpoint, framework)


def test_tied_weights_have_all_their_names_without_a_state():
    weight = torch.nn.Parameter(torch.ones(2))
    net = torch.nn.ParameterDict({"a": weight, "b": weight})

    weights = load_trees(save(State(weights=net)))["weights"]

    assert weights["a"] is weights["b"]


@pytest.mark.parametrize("kind", [dict, collections.OrderedDict])
def test_the_order_of_a_mapping_comes_back(kind):
    """A live mapping with the same keys kept its own order."""
    saved = kind(b=1, c=2, a=3)
    checkpoint = save(State(data={"queue": saved}))
    live = kind(a=0, b=0, c=0)

    load(State(data={"queue": live}), checkpoint)

    assert list(live.items()) == [("b", 1), ("c", 2), ("a", 3)]
