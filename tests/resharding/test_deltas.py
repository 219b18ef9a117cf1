"""Deltas of sharded training: what three ranks saved against their own bases, any other number of ranks takes."""

import pytest

from ckptfmt.read.report import Report
from ckptfmt.read.verify import verify_run
from ckptfmt.store import LocalStore
from tests.resharding.launch import launch

pytestmark = [pytest.mark.dist, pytest.mark.slow]


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("deltas")


@pytest.fixture(scope="module")
def saved(scratch):
    return launch(
        "tests.resharding.delta_scenes",
        ["save_deltas", "load_deltas"],
        world_size=3,
        scratch=scratch,
    )


def test_every_step_of_a_chain_is_loaded_as_it_was(saved):
    said = saved.of("save_deltas")
    for rank in said:
        assert rank["profiles"] == ["full", "delta", "delta", "delta"]
    for mine, theirs in zip(said, saved.of("load_deltas"), strict=True):
        assert mine["held"] == theirs["held"]


def test_two_ranks_load_what_three_saved_and_go_on(saved, scratch):
    first = saved.of("save_deltas")[0]["held"]
    two = launch(
        "tests.resharding.delta_scenes",
        ["load_deltas", "go_on_with_deltas"],
        world_size=2,
        scratch=scratch,
    )

    assert two.of("load_deltas")[0]["held"] == first
    for rank in two.of("go_on_with_deltas"):
        assert (rank["resumed"], rank["profiles"]) == (4, ["full", "delta"])
    report = Report(target="run", kind="run")
    verify_run(LocalStore(scratch / "deltas", writable=False), report)
    assert report.violations == []
    assert len(report.checkpoints) == 2  # the newest, and what it reads from
