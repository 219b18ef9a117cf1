"""Clocks that disagree, a full disk, and ranks that die: nobody hangs, nothing half-saved is taken for a checkpoint."""

import pytest
import torch
from torch import nn

import ckptfmt
from ckptfmt import State
from ckptfmt.errors import Code
from tests.resharding.failure_scenes import RATES, SHORT_S
from tests.resharding.launch import launch
from tests.resharding.stage import bits, optimizer_bits, steps_without_model, weight_bits

pytestmark = [pytest.mark.dist, pytest.mark.slow]

MODULE = "tests.resharding.failure_scenes"
KILLED = -9
PROMPT_S = 60


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("failures")


@pytest.fixture(scope="module")
def first(scratch):
    scenes = ["skewed_clocks", "disk_full", "disk_full_to_the_last_byte", "killed_in_mid_save"]
    return launch(MODULE, scenes, world_size=3, scratch=scratch)


@pytest.fixture(scope="module")
def second(scratch, first):
    assert first.one("killed_in_mid_save", 0)
    scenes = ["resume_after_death", "killed_before_the_decision"]
    return launch(MODULE, scenes, world_size=3, scratch=scratch)


@pytest.fixture(scope="module")
def undisturbed():
    """The same six steps in one process that nothing happens to: weights and state after each."""
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    after = []
    for step in range(6):
        steps_without_model(module, optimizer, range(step, step + 1))
        after.append([weight_bits(module), optimizer_bits(optimizer, module)])
    return after


class TestClocks:
    def test_all_ranks_save_the_same_steps(self, first):
        for turn in zip(*first.of("skewed_clocks"), strict=True):
            assert len({tuple(rank["saved"]) for rank in turn}) == 1
            assert sorted(rank["rate"] for rank in turn) == sorted(RATES)
            assert turn[0]["saved"][-1] == 40

    def test_it_is_the_first_ranks_clock_that_counts(self, first):
        by_rate = {turn["rate"]: len(turn["saved"]) for turn in first.of("skewed_clocks")[0]}
        assert by_rate[0.0] == 1
        assert by_rate[0.0] < by_rate[1.0] < by_rate[20.0]


class TestFullDisk:
    def test_the_others_are_told_at_once(self, first, scratch):
        said = first.of("disk_full")
        assert [rank["failed"]["code"] for rank in said] == [
            Code.WRITER_FAILED,
            Code.NO_SPACE,
            Code.WRITER_FAILED,
        ]
        assert said[1]["fired"] > 0
        for rank in said:
            assert rank["failed"]["seconds"] < PROMPT_S
            assert "NO_SPACE" in rank["failed"]["text"]
        self.assert_saved_later(said, scratch / "full")

    def test_or_find_out_at_the_deadline(self, first, scratch):
        said = first.of("disk_full_to_the_last_byte")
        assert said[1]["failed"]["code"] == Code.NO_SPACE
        for rank in (said[0], said[2]):
            assert rank["failed"]["code"] in (Code.WRITERS_MISSING, Code.WRITER_FAILED)
            assert "writers 1" in rank["failed"]["text"]
            assert rank["failed"]["seconds"] < SHORT_S + PROMPT_S
        self.assert_saved_later(said, scratch / "fuller")

    @staticmethod
    def assert_saved_later(said, path):
        """With space again the same call at the same place goes well."""
        assert [rank["again"]["code"] for rank in said] == ["OK"] * 3
        assert ckptfmt.validate(path).violations == []
        target = nn.ParameterDict({f"w{rank}": torch.zeros(5) for rank in range(3)})
        ckptfmt.load(path, State(weights=target))
        assert set(weight_bits(target).values()) == {bits(torch.ones(5))} != {bits(torch.zeros(5))}


class TestSuddenDeath:
    def test_the_others_say_whom_they_miss(self, first):
        assert first.exit_codes == [0, KILLED, 0]
        for rank in (0, 2):
            for scene in ("died", "missed"):
                outcome = first.one("killed_in_mid_save", rank)[scene]
                assert outcome["code"] in (Code.WRITERS_MISSING, Code.WRITER_FAILED)
                assert "WRITERS_MISSING" in outcome["text"]
                assert "writers 1" in outcome["text"] or "writer 1" in outcome["text"]
                assert outcome["seconds"] < SHORT_S + PROMPT_S

    def test_the_next_start_goes_on_from_the_last_whole_save(self, first, second, undisturbed):
        saved = first.one("killed_in_mid_save", 0)["saved"]
        assert saved == undisturbed[1]
        for rank in range(3):
            said = second.one("resume_after_death", rank)
            assert said["step"] == 2
            assert said["after"] == saved != said["before"]
            assert said["later"] == undisturbed[3]

    def test_a_committer_that_dies_leaves_nothing_decided(self, second, scratch, undisturbed):
        assert second.exit_codes == [KILLED, 0, 0]
        for rank in (1, 2):
            outcome = second.one("killed_before_the_decision", rank)
            # All parts are there: whoever finishes the committer's work would still make a
            # checkpoint of them.
            assert outcome["code"] == Code.COMMIT_UNKNOWN
            assert "committer" in outcome["text"]
            assert outcome["seconds"] < SHORT_S + PROMPT_S
        module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        optimizer = torch.optim.AdamW(module.parameters())
        state = State(weights=module, optimizer=optimizer, data={"position": 1})
        with ckptfmt.Checkpointer(scratch / "run", state) as checkpointer:
            assert checkpointer.step == 4
        assert [weight_bits(module), optimizer_bits(optimizer, module)] == undisturbed[3]
        report = ckptfmt.validate(scratch / "run")
        assert report.violations == []
        assert sorted(report.checkpoints) == ["step-00000002-l0001", "step-00000004-l0002"]
