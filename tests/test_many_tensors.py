"""More tensors in one process than one tree has room for. What a million cost: python -m benchmarks tensors."""

import numpy as np

import ckptfmt
from ckptfmt import limits


def test_what_writers_hold_is_no_tree_whose_items_are_limited(tmp_path, monkeypatch):
    """Each tensor was 13 to 17 values of one tree: 1,000,000 of them were reached at 59,000 tensors."""
    monkeypatch.setattr(limits, "TREE_ITEMS", 5000)
    experts = {f"experts.{number}.w": np.array([number], np.int32) for number in range(600)}
    ckptfmt.save(tmp_path, ckptfmt.State(weights=experts), step=1)
    live = {name: np.zeros(1, np.int32) for name in experts}
    ckptfmt.load(tmp_path, ckptfmt.State(weights=live))
    assert np.array_equal(np.concatenate(list(live.values())), np.arange(600))
