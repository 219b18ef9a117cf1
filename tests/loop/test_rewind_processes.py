"""Two processes go back together, in DDP and FSDP2, and end in the bits of the undisturbed run."""

from typing import Any

import pytest

from tests.resharding.launch import launch

pytestmark = [pytest.mark.dist, pytest.mark.slow]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return launch(
        "tests.loop.rewind_scenes",
        ["data_parallel", "sharded", "alarm_of_one", "alarm_with_snapshots"],
        world_size=2,
        scratch=tmp_path_factory.mktemp("rewind"),
    )


@pytest.mark.parametrize("scene", ["data_parallel", "sharded"])
def test_both_processes_end_in_the_bits_of_the_undisturbed_run(scene: str, played: Any) -> None:
    for rank in played.of(scene):
        assert set(rank["told"]) == {"process", "deltas", "inline", "snapshots"}
        assert not any(rank["differences"].values()), rank["differences"]
        for name, (rewinds, claim, evidence, from_memory) in rank["told"].items():
            assert (rewinds, claim) == (5, "T1"), name
            # The last rewind to a snapshot may leave no step to repeat.
            assert evidence == "verified" or (name, evidence) == ("snapshots", "expected")
            assert (from_memory > 0) is (name != "inline")


def test_an_alarm_of_one_process_takes_both_back(played: Any) -> None:
    first, second = played.of("alarm_of_one")
    assert first["rewinds"] == second["rewinds"] == 1
    assert first["weights"] == second["weights"]
    assert first["skips"] == second["skips"]
    assert [reason for _, reason in first["skips"]] == ["step 6: loss is nan"]
    begin, end = first["skips"][0][0]
    assert (begin % 8, end) == (0, 24)  # a save every two steps, and six steps of four samples


def test_processes_with_snapshots_lose_the_step_of_the_alarm_alone(played: Any) -> None:
    """Process 0, which has no alarm of its own, keeps no snapshot of the step with the alarm either."""
    for rank in played.of("alarm_with_snapshots"):
        assert rank["rewinds"] == 1
        assert [skip for skip, _ in rank["skips"]] == [[20, 24]]
