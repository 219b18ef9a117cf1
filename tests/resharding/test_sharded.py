"""FSDP2, HSDP and tensor parallelism: what one layout saved, any other takes, bit by bit, on real ranks."""

import itertools

import pytest
import torch

import ckptfmt
from ckptfmt import State
from ckptfmt.errors import Code
from tests.resharding.launch import launch
from tests.resharding.sharded_scenes import Even, Net, adamw, both
from tests.resharding.stage import bits

pytestmark = [pytest.mark.dist, pytest.mark.slow]

SCENES = [
    "fsdp_save", "fsdp_load_same", "fsdp_load_two", "fsdp_without_state",
    "load_after_evaluation", "replicate_composably", "outside_of_the_mesh", "hsdp", "tensor_parallel", "fsdp_over_tp",
    "fsdp_over_tp_uneven", "meshes_of_many_shapes", "partial_is_refused", "list_of_optimizers", "dict_of_optimizers",
    "container_of_optimizers",
]  # fmt: skip


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("sharded")


@pytest.fixture(scope="module")
def two(scratch):
    return launch(
        "tests.resharding.sharded_scenes",
        ["fsdp_save"],
        world_size=2,
        scratch=scratch,
        rendezvous="env",
    )


@pytest.fixture(scope="module")
def four(scratch, two):
    assert two.of("fsdp_save")
    return launch("tests.resharding.sharded_scenes", SCENES, world_size=4, scratch=scratch)


@pytest.fixture(scope="module")
def three(scratch, four):
    assert four.of("fsdp_save")
    scenes = ["fsdp_load_four", "fsdp_load_four_on_two", "containers_on_other_ranks"]
    return launch(
        "tests.resharding.sharded_scenes", scenes, world_size=3, scratch=scratch, rendezvous="file"
    )


def assert_taken(loaded, saved):
    """What was loaded is what was saved, to the bit; and none of it was there before."""
    assert loaded["after"] == saved
    assert loaded["before"]["weights"].keys() == saved["weights"].keys()
    assert not set(loaded["before"]["weights"].items()) & set(saved["weights"].items())
    assert all(state == {} for state in loaded["before"]["state"].values())
    assert all(state != {} for state in saved["state"].values())


class TestFsdp2:
    def test_the_shards_are_uneven_and_some_are_empty(self, four):
        rows = {
            name: [rank["local"][name][0] for rank in four.of("fsdp_save")]
            for name in four.of("fsdp_save")[0]["local"]
        }
        assert rows["table.weight"] == [3, 3, 3, 1]
        assert rows["down.weight"] == [1, 1, 1, 0]
        assert rows["scale"] == [1, 0, 0, 0]

    @pytest.mark.parametrize("launched", ["two", "four"])
    def test_the_save_came_while_parameters_were_whole(self, launched, request):
        for rank in request.getfixturevalue(launched).of("fsdp_save"):
            assert {"table.weight", "out.weight", "scale"} <= set(rank["whole"])

    def test_two_to_four(self, two, four):
        for loaded in four.of("fsdp_load_two"):
            assert_taken(loaded, two.of("fsdp_save")[0]["saved"])
            assert loaded["claim"] == "S0"

    def test_four_to_three(self, four, three):
        for loaded in three.of("fsdp_load_four"):
            assert_taken(loaded, four.of("fsdp_save")[0]["saved"])

    def test_four_to_two(self, four, three):
        for loaded in three.of("fsdp_load_four_on_two")[:2]:
            assert_taken(loaded, four.of("fsdp_save")[0]["saved"])

    @pytest.mark.parametrize("launched", ["two", "four"])
    def test_to_one_plain_process(self, launched, request, scratch):
        saved = request.getfixturevalue(launched).of("fsdp_save")
        module = Net(9)
        optimizer = adamw(module)
        before = both(module, optimizer)

        state = State(weights=module, optimizer=optimizer, data={})
        ckptfmt.load(scratch / f"fsdp-{len(saved)}", state)

        assert_taken({"before": before, "after": both(module, optimizer)}, saved[0]["saved"])
        assert bits(module.seen) == bits(torch.full((2,), 1.0))
        assert ckptfmt.validate(scratch / f"fsdp-{len(saved)}").violations == []

    def test_the_same_ranks_go_on_bit_by_bit(self, four):
        for before, after in zip(four.of("fsdp_save"), four.of("fsdp_load_same"), strict=True):
            assert after["losses"] == before["losses"]
            assert after["later"] == before["later"] != before["saved"]
        assert len({str(rank["losses"]) for rank in four.of("fsdp_save")}) == 4

    def test_a_load_while_parameters_are_whole(self, four):
        for rank, (evaluated, fresh) in enumerate(four.of("load_after_evaluation")):
            assert (
                evaluated
                == fresh
                == [four.of("fsdp_save")[rank][key] for key in ("losses", "later")]
            )

    def test_an_optimizer_without_state(self, four):
        for rank in four.of("fsdp_without_state"):
            assert (
                rank["fresh"]["after"]["weights"]
                == rank["saved"]
                != rank["fresh"]["before"]["weights"]
            )
            assert all(state == {} for state in rank["fresh"]["after"]["state"].values())
            assert rank["refused"]["code"] == Code.LEAF_MISSING


class TestOtherMeshes:
    def test_hsdp(self, four, scratch):
        said = four.of("hsdp")
        assert said[0]["placements"] == ["(Replicate(), Shard(dim=0))"]
        for rank in said:
            assert_taken(rank["loaded"], said[0]["saved"])
            assert_taken(rank["from_fsdp"], four.of("fsdp_save")[0]["saved"])
        self.assert_plain_process_takes(scratch / "hsdp", Net(9), said[0]["saved"])

    def test_hsdp_writes_each_shard_once(self, four):
        said = four.of("hsdp")[0]
        assert said["nbytes"] <= sum(said["sizes"].values()) < said["nbytes"] + 20_000

    def test_tensor_parallel(self, four, scratch):
        said = four.of("tensor_parallel")
        assert "(Shard(dim=0),)" in said[0]["placements"]["up.weight"]
        assert "(Shard(dim=1),)" in said[0]["placements"]["down.weight"]
        for rank in said:
            assert_taken(rank["loaded"], said[0]["saved"])
            assert_taken(rank["from_fsdp"], four.of("fsdp_save")[0]["saved"])
        self.assert_plain_process_takes(scratch / "tp", Net(9), said[0]["saved"])

    @pytest.mark.parametrize(
        ("scene", "rows", "columns"), [("fsdp_over_tp", 8, 4), ("fsdp_over_tp_uneven", 10, 6)]
    )
    def test_fsdp2_over_tensor_parallel(self, four, scratch, scene, rows, columns):
        said = four.of(scene)
        if "torch_lacks" in said[0]:
            assert scene == "fsdp_over_tp_uneven"
            pytest.skip(f"torch {torch.__version__}: {said[0]['torch_lacks']}")
        assert "_StridedShard" in said[0]["placements"]["up.weight"]
        for rank in said:
            assert_taken(rank["loaded"], said[0]["saved"])
            assert_taken(rank["flat"], said[0]["saved"])
        path = scratch / f"strided-{rows}-{columns}"
        self.assert_plain_process_takes(path, Even(9, rows, columns), said[0]["saved"])

    def test_replicate(self, four, scratch):
        said = four.of("replicate_composably")
        for rank in said:
            assert_taken(rank["loaded"], said[0]["saved"])
        self.assert_plain_process_takes(scratch / "replicate", Net(9), said[0]["saved"])

    def test_ranks_outside_of_the_mesh_hold_nothing(self, four):
        said = four.of("outside_of_the_mesh")
        assert [rank["inside"] for rank in said] == [True, False, True, False]
        for rank in said:
            assert rank["plain"] == {"sharded": rank["whole"], "replicated": rank["whole"]}
            assert rank["target"] == (rank["plain"] if rank["inside"] else None)

    def test_every_placement_of_a_mesh_into_every_other(self, four):
        for rank in four.of("meshes_of_many_shapes"):
            assert rank == {"wrong": [], "count": 81}

    def test_partial_sums_are_refused(self, four):
        for outcome in four.of("partial_is_refused"):
            assert outcome["code"] == Code.STATE_UNSUPPORTED
            assert "Partial" in outcome["text"]

    @staticmethod
    def assert_plain_process_takes(path, module, saved):
        optimizer = adamw(module)
        before = both(module, optimizer)
        ckptfmt.load(path, State(weights=module, optimizer=optimizer, data={}))
        assert_taken({"before": before, "after": both(module, optimizer)}, saved)
        assert ckptfmt.validate(path).violations == []


class TestSeveralOptimizers:
    def test_they_can_be_loaded_by_other_ranks(self, four, three):
        for name in ("list", "container"):
            saved = four.of(f"{name}_of_optimizers")[0]["saved"][:3]
            for rank in three.of("containers_on_other_ranks"):
                assert rank[name] == saved

    @pytest.mark.parametrize(
        "scene", ["list_of_optimizers", "dict_of_optimizers", "container_of_optimizers"]
    )
    def test_each_goes_on_bit_by_bit(self, four, scene):
        for rank in four.of(scene):
            assert rank["after"] == rank["saved"]
            assert rank["again"] == rank["later"]
            for before, saved, later in itertools.zip_longest(
                rank["before"], rank["saved"], rank["later"]
            ):
                assert before != saved
                assert saved != later or isinstance(saved, list)
