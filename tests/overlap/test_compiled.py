"""Compiled steps call the guard too."""

import pytest
import torch

from tests.overlap.trainings import TRAININGS, Training
from tests.overlap.watching import Late, Spy, Trainer

# The compiler warns of what torch itself does.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _forget():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("backend", "begins"),
    [
        ("eager", "before the first save"),
        ("eager", "after some saves"),
        pytest.param("aot_eager", "before the first save", marks=pytest.mark.exhaustive),
        ("aot_eager", "after some saves"),
        pytest.param("inductor", "before the first save", marks=pytest.mark.slow),
        pytest.param(
            "inductor", "after some saves", marks=[pytest.mark.slow, pytest.mark.exhaustive]
        ),
    ],
)
def test_no_value_is_from_after_the_call(backend, begins, late: Late, spy: Spy):
    training: Training = TRAININGS["AdamW, foreach"]()
    try:
        compiled = torch.compile(training.turn, backend=backend)
        compiled(0)
    except Exception as error:  # noqa: BLE001
        pytest.skip(f"torch can't compile here: {type(error).__name__}: {str(error)[:200]}")
    with Trainer(training.state, late) as trainer:
        for number in range(1, 7):
            turn = training.turn if begins == "after some saves" and number <= 3 else compiled
            turn(number)
            trainer.save()
    assert trainer.torn() == {}
    assert spy.overlapped[-1] == training.late
