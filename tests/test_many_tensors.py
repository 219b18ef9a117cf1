"""More tensors in one process than one tree has room for, and values that grow towards its limits."""

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


def test_a_value_that_grows_towards_a_limit_is_reported_once_and_before(tmp_path, monkeypatch):
    """A list that got too long ended a training in its midst, without a word before."""
    monkeypatch.setattr(limits, "TREE_ITEMS", 2000)
    history: list[object] = []
    state = ckptfmt.State(extra={"history": history})
    with ckptfmt.Checkpointer(tmp_path, state, every=1, saver="inline") as checkpointer:
        for _ in checkpointer.steps(3):
            history += [None] * 400
        reports = [report for report in checkpointer.reports if report.startswith("LIMIT_NEAR")]
    assert len(reports) == 1
    assert "history" in reports[0]
