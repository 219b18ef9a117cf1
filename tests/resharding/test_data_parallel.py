"""DistributedDataParallel: what each rank has for itself comes back to it, and a run goes on bit by bit."""

import pytest

import ckptfmt
from ckptfmt import State
from ckptfmt.errors import CkptError, Code
from ckptfmt.loading.load_report import LoadReport
from tests.resharding.data_parallel_scenes import WRAPPED, _draw, _seed, make_normed
from tests.resharding.launch import launch
from tests.resharding.stage import weight_bits

pytestmark = [pytest.mark.dist, pytest.mark.slow]

MODULE = "tests.resharding.data_parallel_scenes"
STATISTICS = {"1.running_mean", "1.running_var", "1.num_batches_tracked"}


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("data-parallel")


@pytest.fixture(scope="module")
def two(scratch):
    scenes = [
        "batch_norm_save", "batch_norm_sharded", "batch_norm_beside", "sync_batch_norm", "streams_save",
        "train_and_save", "wrappers", "meta_destination",
    ]  # fmt: skip
    return launch(MODULE, scenes, world_size=2, scratch=scratch, rendezvous="file")


@pytest.fixture(scope="module")
def two_again(scratch, two):
    assert two.of("train_and_save")
    scenes = ["batch_norm_load", "streams_load", "load_and_train", "train_without_load"]
    return launch(MODULE, scenes, world_size=2, scratch=scratch)


@pytest.fixture(scope="module")
def three(scratch, two):
    assert two.of("streams_save")
    return launch(
        MODULE, ["batch_norm_load", "streams_load_elsewhere"], world_size=3, scratch=scratch
    )


def differing(left, right):
    assert left.keys() == right.keys()
    return {name for name in left if left[name] != right[name]}


class TestBatchNorm:
    def test_statistics_differ_between_ranks_and_come_back_to_each(self, two, two_again):
        saved, loaded = two.of("batch_norm_save"), two_again.of("batch_norm_load")
        assert differing(*saved) == STATISTICS
        for rank in (0, 1):
            assert loaded[rank]["after"] == saved[rank]
            assert differing(loaded[rank]["before"], saved[rank]) > STATISTICS
            assert loaded[rank]["downgrades"] == []

    def test_on_more_ranks_the_new_one_takes_the_first_ones(self, two, three):
        saved, loaded = two.of("batch_norm_save"), three.of("batch_norm_load")
        for rank, expected in enumerate([saved[0], saved[1], saved[0]]):
            assert loaded[rank]["after"] == expected
            assert loaded[rank]["claim"] == "S0"
        for name in STATISTICS:
            assert any(
                name in line and "process 2" in line and "process 0" in line
                for line in loaded[2]["downgrades"]
            )

    def test_in_one_process(self, two, scratch):
        module = make_normed(3)

        report = ckptfmt.load(scratch / "norm", State(weights=module, data={}))

        saved = two.of("batch_norm_save")
        assert weight_bits(module) == saved[0]
        assert differing(saved[0], saved[1]) == STATISTICS
        assert isinstance(report, LoadReport)
        assert report.claim == "S0"
        for name in STATISTICS:
            assert any(name in line and "process 0" in line for line in report.downgrades), (
                report.downgrades
            )
        assert any(
            line.startswith("3 tensors") and "no longer exist" in line for line in report.downgrades
        )

    def test_statistics_of_shards_come_back_to_each(self, two):
        """They were compared with each other, and the save failed with REPLICA_DIVERGED, at its end."""
        said = two.of("batch_norm_sharded")
        assert differing(said[0]["saved"], said[1]["saved"]) == STATISTICS - {
            "1.num_batches_tracked"
        }
        for rank in said:
            assert rank["after"] == rank["saved"]
            assert rank["downgrades"] == []

    def test_module_without_its_wrapper_is_refused_and_the_wrapper_asked_for(self, two):
        for rank in two.of("batch_norm_beside"):
            assert "REPLICA_DIVERGED" in rank["text"]
            assert "'1.running_mean'" in rank["text"]
            assert "DistributedDataParallel module and not its .module" in rank["text"]

    def test_synchronised_statistics_belong_to_all(self, two):
        for rank in two.of("sync_batch_norm"):
            assert rank["scopes"] == ["global"]
            assert rank["after"] == rank["saved"]
            assert "'1.running_mean'" in rank["different"]["text"]
            assert "REPLICA_DIVERGED" in rank["different"]["text"]


class TestStreams:
    def test_each_rank_gets_its_own_back(self, two, two_again):
        saved, loaded = two.of("streams_save"), two_again.of("streams_load")
        for rank in (0, 1):
            assert loaded[rank]["after"] == saved[rank]
            assert not {*loaded[rank]["fresh"][0]} & {*saved[rank][0]}
            assert loaded[rank]["downgrades"] == []
        assert not {*saved[0][0]} & {*saved[1][0]} - {saved[0][0][3]}

    def test_more_ranks_are_an_error_on_all_of_them(self, three):
        said = three.of("streams_load_elsewhere")
        assert [rank["strict"]["code"] for rank in said] == [
            Code.PEER_FAILED,
            Code.PEER_FAILED,
            Code.STREAM_MISSING,
        ]
        for rank in said:
            assert "lw/2" in rank["strict"]["text"]
            assert rank["untouched"] == rank["fresh"]

    def test_or_are_reported(self, two, three):
        saved, said = two.of("streams_save"), three.of("streams_load_elsewhere")
        assert [rank["after"] for rank in said[:2]] == saved
        assert said[2]["after"] == said[2]["fresh"]
        for rank in said:
            assert rank["claim"] == "S0"
            assert [line for line in rank["downgrades"] if "STREAM_MISSING at rng (lw/2)" in line]
        assert any(
            "STREAM_MISSING" in line and "torch.cpu" in line for line in said[2]["downgrades"]
        )

    def test_fewer_are_an_error_too(self, two, scratch):
        assert two.of("streams_save")
        own = _seed(5)
        fresh = _draw(own)
        own = _seed(5)
        with pytest.raises(CkptError) as caught:
            ckptfmt.load(scratch / "streams", State(data={}, rng=own), strict=True)
        assert caught.value.code == Code.STREAM_UNEXPECTED
        assert "lw/1" in str(caught.value)
        assert _draw(own) == fresh

    def test_or_reported(self, two, scratch):
        own = _seed(5)
        report = ckptfmt.load(scratch / "streams", State(data={}, rng=own))
        assert [_draw(own), _draw(own)] == two.of("streams_save")[0]
        assert isinstance(report, LoadReport)
        assert report.claim == "S0"
        assert any("STREAM_UNEXPECTED" in line and "lw/1" in line for line in report.downgrades)


class TestWrappers:
    def test_they_do_not_show_in_names(self, two):
        names = two.of("wrappers")[0]["names"]
        assert names.keys() == WRAPPED.keys()
        for kind in WRAPPED:
            assert names[kind] == names["plain"]
        weights = {name for field, name, _ in names["plain"] if field == "weights"}
        assert {"first.weight", "module.weight", "_orig_mod.bias", "count"} <= weights

    def test_each_loads_what_another_saved(self, two):
        for rank in two.of("wrappers"):
            assert len(rank["results"]) == len(WRAPPED)
            for result in rank["results"].values():
                assert result["after"] == result["saved"]
                assert not set(result["before"]) & set(result["saved"])
                assert result["state"] == result["saved_state"] != {}


class TestMetaDevice:
    def test_it_is_refused_by_name(self, two):
        for rank in two.of("meta_destination"):
            assert rank["refused"]["code"] == Code.META_DESTINATION
            assert "first.weight" in rank["refused"]["text"]
            assert "to_empty" in rank["refused"]["text"]
            assert rank["save"]["code"] == Code.STATE_UNSUPPORTED

    def test_materialised_it_is_filled(self, two):
        saved = two.of("wrappers")[0]["results"]["plain to ddp"]["saved"]
        for rank in two.of("meta_destination"):
            assert list(rank["after"].values()) == saved
            assert not set(rank["before"].values()) & set(saved)


class TestTheRunGoesOn:
    def test_bit_by_bit(self, two, two_again):
        before, after = two.of("train_and_save"), two_again.of("load_and_train")
        for rank in (0, 1):
            assert after[rank]["later"] == before[rank]["later"]
            assert before[rank]["later"]["losses"] != before[rank]["first"]["losses"]
        assert before[0]["later"]["losses"] != before[1]["later"]["losses"]

    def test_and_says_so(self, two_again):
        for rank in two_again.of("load_and_train"):
            assert rank["lowered_by"] == []
            assert rank["claim"] == "T1"

    def test_which_takes_the_checkpoint(self, two, two_again):
        """The control: without it neither losses nor weights are the same."""
        for before, control in zip(
            two.of("train_and_save"), two_again.of("train_without_load"), strict=True
        ):
            assert differing(before["later"]["weights"], control["weights"]) == set(
                control["weights"]
            )
            assert not {loss for loss, _ in before["later"]["losses"]} & {
                loss for loss, _ in control["losses"]
            }

    def test_in_all_of_it_nothing_is_wrong(self, two_again, scratch):
        assert two_again.of("load_and_train")
        paths = [path.parent for path in scratch.glob("*/manifest.json")]
        assert len(paths) >= len(WRAPPED) + len({"norm", "streams", "training", "sync"})
        for path in paths:
            assert ckptfmt.validate(path).violations == []
