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


@pytest.mark.parametrize("begins", ["before the first save", "after some saves"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_no_value_is_from_after_the_call(backend, begins, late: Late, spy: Spy):
    training: Training = TRAININGS["AdamW, foreach"]()
    try:
        compiled = torch.compile(training.turn, backend=backend)
        compiled(0)
    except Exception as error:  # noqa: BLE001 - of whichever kind: there is no compiler for this torch
        pytest.skip(f"torch can't compile here: {type(error).__name__}: {str(error)[:200]}")
    with Trainer(training.state, late) as trainer:
        for number in range(1, 7):
            turn = training.turn if begins == "after some saves" and number <= 3 else compiled
            turn(number)
            trainer.save()
    assert trainer.torn() == {}
    assert spy.overlapped[-1] == training.late
