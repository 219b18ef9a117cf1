"""Plain tensors on several processes: everything is saved, once, and what contradicts itself is refused by name.

A rule that each rank computes alone ("only data-parallel rank 0 writes") loses half of a
Megatron-style layout here.
"""

import pytest

import ckptfmt
from ckptfmt import State
from ckptfmt.errors import Code
from ckptfmt.loading.load_report import LoadReport
from tests.resharding.launch import launch
from tests.resharding.plain_scenes import LAYERS, _both, make_layers

pytestmark = [pytest.mark.dist, pytest.mark.slow]

SCENES = [
    "pipeline_save", "pipeline_whole", "pipeline_back", "pipeline_lost_layer", "tied_whole_save", "tied_stages",
    "experts_same_names", "experts_per_worker", "experts_own_names", "stages_replicated_by_their_own_mesh",
    "mappings_of_other_keys", "leaf_differs", "config_differs", "steps_differ", "shapes_differ", "dtypes_differ",
    "one_is_unsupported", "foreign_error_in_capture", "foreign_error_in_load", "foreign_error_in_write",
    "agree_by_default", "agree_by_callable", "agree_by_token", "writer_given", "half_of_them_save", "nobody_to_ask",
    "replicas_are_written_once", "one_never_comes",
]  # fmt: skip

#: A save whose deadline is 120 s, and in which one rank refuses, ends everywhere well before that.
PROMPT_S = 60


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("plain")


@pytest.fixture(scope="module")
def four(scratch):
    return launch(
        "tests.resharding.plain_scenes", SCENES, world_size=4, scratch=scratch, rendezvous="env"
    )


def union(parts):
    merged: dict[str, object] = {}
    for part in parts:
        for name, value in part.items():
            assert merged.setdefault(name, value) == value, f"replicas of {name} differ"
    return merged


def assert_refused(said, code, *, mentions):
    """All fail with the code, all name what is wrong, and nobody waited. REQ-CMT-038."""
    for outcome in said:
        assert outcome["code"] == code, outcome
        assert outcome["text"] == said[0]["text"]
        assert outcome["seconds"] < PROMPT_S
        for text in mentions:
            assert text in outcome["text"], outcome


class TestPipelineStages:
    def test_everything_is_saved(self, four, scratch):
        stages = four.of("pipeline_save")
        module, optimizer = make_layers(range(LAYERS), 2)
        before = _both(module, optimizer)
        data: dict[str, object] = {}

        report = ckptfmt.load(
            scratch / "pipeline", State(weights=module, optimizer=optimizer, data=data)
        )

        after = _both(module, optimizer)
        for kind in ("weights", "state"):
            saved = union(stage[kind] for stage in stages)
            assert after[kind] == saved
            assert before[kind].keys() == saved.keys()
            assert all(before[kind][name] != saved[name] for name in saved)
        assert after["options"] == stages[0]["options"] == stages[3]["options"] != before["options"]
        assert data == {"position": 7}
        assert isinstance(report, LoadReport)
        assert report.claim == "S0"
        assert ckptfmt.validate(scratch / "pipeline").violations == []

    def test_sizes_count_each_tensor_once(self, four):
        module, optimizer = make_layers(range(LAYERS), 2)
        weights = sum(parameter.nbytes for parameter in module.parameters())
        step_nbytes = 4 * len(list(module.parameters()))
        assert {stage["nbytes"] for stage in four.of("pipeline_save")} == {
            3 * weights + step_nbytes
        }
        assert len(optimizer.state) == 0

    def test_all_ranks_report_the_same_checkpoint(self, four):
        assert len({stage["digest"] for stage in four.of("pipeline_save")}) == 1

    def test_one_process_takes_all_of_it(self, four):
        whole = four.of("pipeline_whole")[1]
        stages = four.of("pipeline_save")
        assert (
            whole["after"]["weights"]
            == union(stage["weights"] for stage in stages)
            != whole["before"]["weights"]
        )
        assert whole["data"] == {"position": 7}

    def test_and_gives_it_back(self, four):
        for saved, loaded in zip(four.of("pipeline_save"), four.of("pipeline_back"), strict=True):
            for kind in ("weights", "state", "options"):
                assert loaded["after"][kind] == saved[kind] != loaded["before"][kind]

    def test_a_layer_that_no_stage_takes_is_an_error_on_all(self, four):
        said = four.of("pipeline_lost_layer")
        assert {outcome["code"] for outcome in said} == {Code.LEAF_UNEXPECTED}
        assert all("layers.3.bias" in outcome["text"] for outcome in said)


class TestTiedAcrossStages:
    """The embedding is the head: one tensor in a whole model, two in a pipeline, each with optimizer state."""

    def test_both_stages_take_what_was_one(self, four):
        whole = four.of("tied_whole_save")[0]
        for rank, said in enumerate(four.of("tied_stages")):
            name = "head.weight" if rank > 1 else "embed.weight"
            assert said["loaded"]["weights"] == {name: whole["weights"]["embed.weight"]}
            assert said["loaded"]["state"] == {name: whole["state"]["embed.weight"]} != {name: {}}

    def test_one_takes_what_both_had(self, four):
        whole = four.of("tied_whole_save")[0]
        said = four.of("tied_stages")[0]["back"]
        assert said["outcome"]["code"] == "OK", said["outcome"]["text"]
        assert said["after"] == {
            "weights": whole["weights"],
            "state": whole["state"],
            "options": whole["options"],
        }
        assert said["before"]["weights"] != whole["weights"]

    def test_unless_they_had_become_different(self, four):
        outcome = four.of("tied_stages")[0]["apart"]
        assert outcome["code"] in (Code.LEAF_UNEXPECTED, Code.TENSOR_UNEXPECTED)
        assert "head.weight" in outcome["text"]


class TestSameNamesOtherContents:
    def test_they_are_refused(self, four):
        assert_refused(
            four.of("experts_same_names"),
            Code.REPLICA_DIVERGED,
            mentions=["layers.0.weight", "block 1", "writers 0 and 2"],
        )

    def test_each_worker_may_have_its_own(self, four):
        self.assert_each_rank_gets_its_own_back(four.of("experts_per_worker"))

    def test_names_of_their_own_work_too(self, four):
        said = four.of("experts_own_names")
        self.assert_each_rank_gets_its_own_back(said)
        assert {rank["after"]["options"][0]["lr"] for rank in said} == {
            said[0]["saved"]["options"][0]["lr"]
        }

    def test_a_mesh_speaks_for_its_own_ranks_only(self, four):
        said = four.of("stages_replicated_by_their_own_mesh")
        assert [rank["accepted"]["code"] for rank in said] == ["OK"] * 4
        assert_refused(
            [rank["refused"] for rank in said],
            Code.REPLICA_DIVERGED,
            mentions=["layers.0.weight"],
        )

    @staticmethod
    def assert_each_rank_gets_its_own_back(said):
        for rank in said:
            assert rank["after"] == rank["saved"]
            assert all(rank["before"][kind] != rank["saved"][kind] for kind in ("weights", "state"))
        assert len({str(rank["saved"]["weights"]) for rank in said}) == 4


class TestMappings:
    def test_flat_mappings_of_tensors_add_up(self, four):
        for outcome in four.of("mappings_of_other_keys"):
            assert outcome == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]


class TestRanksThatContradictEachOther:
    @pytest.mark.parametrize(
        ("scene", "code", "mentions"),
        [
            ("leaf_differs", Code.LEAF_DIVERGED, ["shards/1/at", "writers 0 and 3", "data"]),
            ("config_differs", Code.LEAF_DIVERGED, ["rank", "writers 0 and 1", "config"]),
            ("shapes_differ", Code.TENSOR_DIVERGED, ["(2,)", "(3,)", "writer 2", "'w'"]),
            ("dtypes_differ", Code.TENSOR_DIVERGED, ["float32", "int32", "writer 2", "'w'"]),
        ],
    )
    def test_the_difference_is_named(self, four, scene, code, mentions):
        assert_refused(four.of(scene), code, mentions=mentions)

    def test_so_are_different_steps(self, four):
        for outcome in four.of("steps_differ"):
            assert outcome["code"] == Code.WRITERS_DIVERGED
            assert "[10, 11]" in outcome["text"]
            assert outcome["seconds"] < PROMPT_S

    def test_what_one_cannot_save_stops_all(self, four):
        said = four.of("one_is_unsupported")
        assert [outcome["code"] for outcome in said] == [
            Code.PEER_FAILED, Code.PEER_FAILED, Code.STATE_UNSUPPORTED, Code.PEER_FAILED,
        ]  # fmt: skip
        assert all(
            "writer 2" in said[rank]["text"] and "sparse" in said[rank]["text"]
            for rank in (0, 1, 3)
        )
        assert all(outcome["seconds"] < PROMPT_S for outcome in said)

    @pytest.mark.parametrize(
        ("scene", "rank", "kind", "text"),
        [
            ("foreign_error_in_capture", 1, "RuntimeError", "the loader's worker died"),
            ("foreign_error_in_load", 1, "RuntimeError", "the loader can't go back"),
            ("foreign_error_in_write", 3, "MemoryError", "no memory for a copy"),
        ],
    )
    def test_an_error_that_is_not_ours_stops_all_as_well(self, four, scene, rank, kind, text):
        for number, outcome in enumerate(four.of(scene)):
            if number == rank:
                assert outcome["code"] == kind
            else:
                assert outcome["code"] in (Code.PEER_FAILED, Code.WRITER_FAILED)
                assert f"writer {rank}" in outcome["text"]
            assert text in outcome["text"]
            assert outcome["seconds"] < PROMPT_S


class TestWaysToAgree:
    @pytest.mark.parametrize(
        "scene", ["agree_by_default", "agree_by_callable", "agree_by_token", "writer_given"]
    )
    def test_all_ranks_save_and_load_the_same(self, four, scene):
        said = four.of(scene)
        assert len({rank["digest"] for rank in said}) == 1
        for rank in said:
            assert rank["after"] == rank["saved"] == said[0]["saved"]
            assert rank["before"] != rank["saved"]

    def test_a_part_of_the_ranks_may_save(self, four):
        said = four.of("half_of_them_save")
        assert said[0]["digest"] == said[1]["digest"]
        assert said[0]["after"] == said[0]["saved"] != said[0]["before"]
        assert said[2:] == [None, None]

    def test_nothing_is_left_of_the_exchange(self, four, scratch):
        assert four.of("agree_by_token")
        assert not (scratch / "token" / "exchange" / "start-20270101").exists()

    def test_writers_that_cannot_reach_each_other_are_told(self, four):
        assert {outcome["code"] for outcome in four.of("nobody_to_ask")} == {Code.WRITERS_UNKNOWN}

    def test_a_rank_that_never_comes_is_named(self, four):
        said = four.of("one_never_comes")
        for rank in (0, 1, 3):
            assert said[rank]["code"] == Code.WRITERS_MISSING
            assert "writer 2" in said[rank]["text"]
            assert 1 < said[rank]["seconds"] < PROMPT_S


class TestReplicas:
    def test_they_are_written_once(self, four):
        said = four.of("replicas_are_written_once")[0]
        for field, nbytes in said["nbytes"].items():
            files = {name: size for name, size in said["files"].items() if name.startswith(field)}
            headers = 20_000 * len(files)
            assert nbytes <= sum(files.values()) < nbytes + headers

    def test_and_spread_over_their_holders(self, four):
        said = four.of("replicas_are_written_once")[0]
        by_writer = [0] * 4
        for name, size in said["files"].items():
            by_writer[int(name.rpartition("-")[2].partition(".")[0])] += size
        assert max(by_writer) - min(by_writer) < said["largest"] + 20_000
        assert max(by_writer) < sum(by_writer) / 2  # and not all by one
