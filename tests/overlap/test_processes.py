"""Several processes: no share of a save contains a value from after the call."""

import pytest

from tests.resharding.launch import launch

pytestmark = [pytest.mark.dist, pytest.mark.slow]

NAMES = {f"{name}.{kind}" for name in ("0", "1", "2") for kind in ("weight", "bias")}
LATE = {f"weights:{name}" for name in NAMES} | {
    f"optimizer:{name}/{key}" for name in NAMES for key in ("exp_avg", "exp_avg_sq")
}


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    scratch = tmp_path_factory.mktemp("overlap")
    return launch(
        "tests.overlap.scenes", ["data_parallel", "sharded"], world_size=2, scratch=scratch
    )


@pytest.mark.parametrize("scene", ["data_parallel", "sharded"])
def test_no_value_is_from_after_the_call(scene, played):
    said = played.of(scene)
    assert [rank["torn"] for rank in said] == [{}, {}]
    assert set().union(*(rank["overlapped"] for rank in said)) == LATE
