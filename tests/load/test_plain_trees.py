"""Trees of many plain values: what a load or a check does with each of them in Python.

A document of 10.8 MB took a load 74 s: each value was given a name, and was copied or yielded by
itself.
"""

import functools
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ckptfmt
from ckptfmt.adapters.live_trees import FLATTENED
from ckptfmt.documents.tree import TensorRef, dump_tree, iter_references, parse_tree

_COUNT = 20_000


def calls_of(action: Callable[[], object]) -> int:
    """Return how many functions of Python are called, in this thread."""
    count = 0

    def note(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(before)
    return count


@pytest.mark.parametrize("action", ["load", "validate"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: [None] * _COUNT,
        lambda: tuple([None, "a"] * (_COUNT // 2)),
        lambda: deque([None, 1] * (_COUNT // 2), _COUNT),
        lambda: {f"{number:05d}": number for number in range(_COUNT)},
        lambda: OrderedDict((number, None) for number in range(_COUNT)),
        lambda: Counter({f"{number:05d}": number for number in range(_COUNT)}),
    ],
    ids=["list", "tuple", "deque", "dict", "ordered", "counter"],
)
def test_no_step_in_python_for_each_plain_value_that_was_parsed(
    tmp_path: Any, action: str, make: Any
) -> None:
    saved = {"few": None, "many": make()}
    for name, history in saved.items():
        state = ckptfmt.State(weights={"w": np.zeros(2)}, extra={"history": history})
        ckptfmt.save(tmp_path / name, state, step=1)
    getattr(ckptfmt, action)(tmp_path / "few")  # which imports what it needs
    do = getattr(ckptfmt, action)
    few, many = (calls_of(functools.partial(do, tmp_path / name)) for name in saved)
    content = dump_tree(saved["many"], where="")
    assert many - few < calls_of(lambda: parse_tree(content, where="")) + _COUNT // 10
    with ckptfmt.open(tmp_path / "many") as checkpoint:
        (key,) = (key for key in checkpoint.leaves if key[1].endswith("history"))
        loaded = checkpoint.leaf(*key)
    assert type(loaded) is type(saved["many"])
    assert loaded == saved["many"]


def test_references_are_found_wherever_they_are() -> None:
    one, other = TensorRef("a", "torch"), TensorRef("b", "numpy")
    assert list(iter_references(one)) == [one]
    tree = {
        "x": [1, (2.5, deque([other, b""]))],
        "y": OrderedDict(z={"w": one}),
        "n": {1, 2},
        "c": Counter(a=1),
    }
    assert sorted(found.name for found in iter_references(tree)) == ["a", "b"]
    assert list(iter_references({FLATTENED: "x", "d": [None] * 3})) == []
