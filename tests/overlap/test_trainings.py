"""REQ-CMT-028: a save contains what was live when it was asked for, however the training changes it afterwards."""

import pytest

from tests.overlap.trainings import TRAININGS
from tests.overlap.watching import Late, Spy, Trainer

#: Enough for the first save to be a probation, and for more than one of each kind to be copied
#: late.
TURNS = 6


@pytest.mark.parametrize("name", TRAININGS)
def test_no_value_is_from_after_the_call(name, late: Late, spy: Spy):
    training = TRAININGS[name]()
    with Trainer(training.state, late) as trainer:
        for number in range(TURNS):
            training.turn(number)
            trainer.save()
    assert trainer.torn() == {}
    assert spy.overlapped[0] == set(), "the first save is a probation"
    assert spy.overlapped[-1] == training.late
    reports = [
        report for report in trainer.checkpointer.reports if report.startswith("OVERLAP_REFUSED")
    ]
    assert len(reports) == bool(training.refused)
    assert all(name in reports[0] for name in training.refused)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_saver_in_a_process_finds_the_same(overlap, late: Late, spy: Spy, tmp_path):
    training = TRAININGS["something of most kinds"]()
    with Trainer(training.state, late, path=tmp_path / "run", overlap=overlap) as trainer:
        for number in range(TURNS):
            training.turn(number)
            trainer.save()
    assert trainer.torn() == {}
    assert spy.overlapped[-1:] == [training.late] * overlap
