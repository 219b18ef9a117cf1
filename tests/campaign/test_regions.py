"""A few rounds of the campaign of regions, and that its judge knows a lineage."""

import pytest

from ckptfmt.documents.manifest import Reference
from ckptfmt.documents.run import Launch
from tests.campaign.regions import (
    COUNT,
    begin_weights,
    cuts_of,
    is_on,
    play,
    train_step,
    undisturbed,
)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_round_of_outages_and_take_overs_forks_no_run():
    result = play([1])
    assert result.violations == []
    assert result.rounds == 1
    assert result.launches >= 2
    assert result.saves >= 2
    assert result.lost <= result.take_overs


def make_launches(*resumes):
    """Return launches from 1 on; each resumes from a step and a launch, or from nothing."""
    found = {}
    for number, resume in enumerate(resumes, 1):
        name = None if resume is None else f"step-{resume[0]:08d}-l{resume[1]:04d}"
        reference = None if name is None else Reference(name=name, digest="0" * 64)
        found[number] = Launch(
            run_id="1" * 32,
            launch=number,
            nonce="2" * 32,
            chosen_by="lineage",
            resume_from=reference,
        )
    return found


def test_a_lineage_leads_back_over_the_launches_that_went_on():
    launches = make_launches(None, (4, 1), (4, 1), (10, 3))
    cuts = cuts_of(launches, 4)
    assert cuts == {4: float("inf"), 3: 10, 1: 4}
    assert is_on("step-00000012-l0004", cuts)
    assert is_on("step-00000010-l0003", cuts)
    assert is_on("step-00000002-l0001", cuts)
    assert not is_on("step-00000012-l0003", cuts)
    assert not is_on("step-00000006-l0001", cuts)
    assert not is_on("step-00000006-l0002", cuts)


def test_the_weights_depend_on_the_step_alone():
    weights = begin_weights()
    for _ in range(5):
        train_step(weights)
    assert weights.tobytes() == undisturbed(5)
    assert undisturbed(5) != undisturbed(4)
    assert COUNT == 3
