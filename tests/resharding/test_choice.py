"""Every optimizer of torch under FSDP2, conversions between layouts, and loads of some tensors or into other names."""

import pytest

from tests.resharding.choice_scenes import OPTIMIZERS
from tests.resharding.launch import launch

pytestmark = [pytest.mark.dist, pytest.mark.slow]

#: What torch 2.13 itself doesn't run on DTensors; a later one may.
UNSUPPORTED = {"Adafactor", "Muon", "Rprop"}


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    scenes = ["every_optimizer", "converted", "chosen"]
    return launch(
        "tests.resharding.choice_scenes",
        scenes,
        world_size=4,
        scratch=tmp_path_factory.mktemp("choice"),
    )


def test_what_torch_does_not_run_on_shards(four):
    for rank in four.of("every_optimizer"):
        assert {name for name, said in rank.items() if "unsupported" in said} <= UNSUPPORTED


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_its_state_moves_between_layouts_into_optimizers_that_have_none(four, name):
    """REQ-OPN-005: FSDP2 on four to four, to three and to one; from one to four."""
    for rank, ranks in enumerate(four.of("every_optimizer")):
        said = ranks[name]
        if name in UNSUPPORTED and "unsupported" in said:
            pytest.skip(said["unsupported"])
        assert said["same"] == said["plain"] == said["saved"] != said["later"]
        assert said["again"] == said["later"]
        if rank < 3:
            assert said["three"] == said["saved"]
        assert said["from_plain"][0] == said["from_plain"][1] != said["saved"]
        assert all(state != {} for state in said["saved"]["state"].values())


def test_dtypes_are_converted_from_one_layout_into_another(four):
    for rank in four.of("converted"):
        assert rank["found"] == rank["expected"]
        lines = [line for line in rank["downgrades"] if "saved as float32, here bfloat16" in line]
        assert len(lines) == 4 * 3
        assert any("optimizer:up.weight/exp_avg_sq" in line for line in lines)


class TestNames:
    def test_each_rank_takes_its_own_under_another_name(self, four):
        for rank, said in enumerate(four.of("chosen")):
            assert said["every"]["code"] == "OK"
            assert said["every"]["after"] == {
                f"stage{rank}.{key}": value for key, value in said["saved"].items()
            }
            names = [
                (f"weights:stage{rank}.{key}", f"weights:{rank}.{key}")
                for key in ("bias", "weight")
            ]
            assert [tuple(pair) for pair in said["every"]["renamed"]] == names

    def test_a_part_of_it(self, four):
        for rank, said in enumerate(four.of("chosen")):
            assert said["some"]["code"] == "OK"
            taken = {f"stage{rank}.{key}": value for key, value in said["saved"].items()}
            assert said["some"]["after"] == (taken if rank in (1, 2) else said["some"]["before"])
            assert said["some"]["left_count"] == (0 if rank in (1, 2) else 2)

    def test_a_key_that_no_rank_has_is_refused_on_all(self, four):
        for said in four.of("chosen"):
            assert said["unknown"]["code"] == "ARGUMENT"
            assert "'stage9'" in said["unknown"]["text"]
            assert "'stage0'" not in said["unknown"]["text"]
            assert said["unknown"]["after"] == said["unknown"]["before"]

    def test_a_rank_that_lacks_its_names_stops_all(self, four):
        said = four.of("chosen")
        assert said[0]["differently"]["code"] == "TENSOR_MISSING"
        for rank in said:
            assert rank["differently"]["code"] != "OK"
            assert rank["differently"]["after"] == rank["differently"]["before"]

    def test_one_process_takes_two_tensors_of_what_four_saved(self, four):
        said = four.of("chosen")
        for rank in said:
            assert rank["alone"] == {
                f"{stage}.weight": said[stage]["saved"]["weight"] for stage in (0, 1)
            }
