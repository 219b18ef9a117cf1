"""What a campaign of faults makes of the checkpoints that it finds."""

import pytest

from ckptfmt_conformance.chaos.campaign import Verdict, judge_job
from ckptfmt_conformance.chaos.kinds import KINDS

EXPECTED = {step: f"bits of {step}" for step in range(1, 9)}
KILLED = next(kind for kind in KINDS if kind.name == "process/rank-killed")
FAILING = next(kind for kind in KINDS if kind.name == "storage/sync-fails")
DAMAGED = next(kind for kind in KINDS if kind.name == "checkpoint/bit-flipped")


def judged(changes, second=KILLED):
    """Judge two injections, after steps 2 and 5, into a job whose checkpoints are right but for some changes."""
    states = {f"step-{step}": {"step": step, "digest": digest} for step, digest in EXPECTED.items()}
    for step, state in changes.items():
        states[f"step-{step}"] = {"step": step, **state}
    verdicts = [
        Verdict(index=index, kind=kind, victim="node0", recovered=True, first_step=first)
        for index, kind, first in ((0, KILLED, 2), (1, second, 5))
    ]
    judge_job({name: one for name, one in states.items() if "gone" not in one}, EXPECTED, verdicts)
    return [verdict.is_kept for verdict in verdicts]


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({}, [True, True]),
        ({4: {"digest": "others"}}, [False, True]),
        ({7: {"digest": "others"}}, [True, False]),
        ({1: {"digest": "others"}}, [False, True]),
        ({6: {"gone": True}}, [True, False]),
        ({6: {"problem": "BLOCK_DIGEST"}}, [False, False]),
    ],
)
def test_other_bits_and_missing_steps_are_blamed_on_the_injection_before(changes, kept):
    assert judged(changes) == kept


def test_as_many_checkpoints_as_were_damaged_may_be_unreadable():
    problem = {"problem": "BLOCK_DIGEST"}
    assert judged({6: problem}, DAMAGED) == [True, True]
    assert judged({6: {"gone": True}}, DAMAGED) == [True, True]
    assert judged({6: problem, 7: problem}, DAMAGED) == [False, False]


def test_a_save_that_may_fail_leaves_no_checkpoint_and_no_damaged_one():
    assert judged({6: {"gone": True}}, FAILING) == [True, True]
    assert judged({6: {"gone": True}, 7: {"gone": True}}, FAILING) == [True, False]
    assert judged({6: {"problem": "BLOCK_DIGEST"}}, FAILING) == [False, False]
    assert judged({6: {"digest": "others"}}, FAILING) == [True, False]


def test_names_of_kinds_differ():
    assert len({kind.name for kind in KINDS}) == len(KINDS)
