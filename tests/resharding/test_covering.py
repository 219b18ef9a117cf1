"""What any layout saved, any other takes, weights and optimizer alike, bit by bit; worlds of one to eight processes."""

import pytest

import ckptfmt
from tests.resharding.covering_scenes import MORE_NODES, MORE_PAIRS, NODES, PAIRS, pair_name
from tests.resharding.launch import launch

pytestmark = pytest.mark.dist

MODULE = "tests.resharding.covering_scenes"


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("covering")


@pytest.fixture(scope="module")
def covered(scratch):
    return launch(MODULE, ["cover"], world_size=8, scratch=scratch).of("cover")


@pytest.fixture(scope="module")
def covered_more(scratch):
    return launch(MODULE, ["cover_more"], world_size=8, scratch=scratch, timeout_s=1800).of(
        "cover_more"
    )


def assert_taken(said, source, target):
    """Every rank of the target has just what torch would give it."""
    name = pair_name(source, target)
    outcomes = [rank["outcomes"].get(name) for rank in said]
    assert outcomes[target.world_size :] == [None] * (8 - target.world_size)
    for rank, outcome in enumerate(outcomes[: target.world_size]):
        assert outcome == [], f"rank {rank}\n{outcome}"


def test_each_layout_and_each_world_size_is_covered():
    """REQ-OPN-005: the pairs below are of all of these, in both directions."""
    assert {node.world_size for node in NODES} == set(range(1, 9))
    layouts = {
        "plain",
        "ddp",
        "fsdp",
        "hsdp",
        "tensor",
        "fsdp_tensor",
        "pipeline",
        "expert",
        "mesh",
    }
    assert {node.layout for node in NODES} == layouts
    assert {node.layout for node in MORE_NODES} >= {"fsdp_columns", "expert_fsdp"}
    for pairs in (PAIRS, [(target, source) for source, target in PAIRS]):
        others = {source: {target for one, target in pairs if one == source} for source in NODES}
        assert all(len(targets) >= 3 for targets in others.values())


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair_name(*pair))
def test_pair(covered, pair):
    assert_taken(covered, *pair)


@pytest.mark.parametrize("node", NODES, ids=lambda node: node.name)
def test_each_source_is_valid(covered, scratch, node):
    assert covered
    assert ckptfmt.validate(scratch / f"cover-{node.name}").violations == []


@pytest.mark.slow
@pytest.mark.timeout(2000)
@pytest.mark.exhaustive
@pytest.mark.parametrize("pair", MORE_PAIRS, ids=lambda pair: pair_name(*pair))
def test_pair_of_more(covered_more, pair):
    assert_taken(covered_more, *pair)
