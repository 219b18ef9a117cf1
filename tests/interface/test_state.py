"""What may be handed over."""

import pytest

from ckptfmt.errors import StateError
from ckptfmt.state import NO_RNG, NOT_GIVEN, PerWorker, State


def test_what_is_left_out_has_a_reason():
    state = State(weights={}, absent={"data": "synthetic"})

    assert state.absent_reasons() == {
        "optimizer": NOT_GIVEN,
        "data": "synthetic",
        "config": NOT_GIVEN,
    }
    assert "optimizer" not in State(extra={"n": 1}).absent_reasons()


@pytest.mark.parametrize(
    "arguments",
    [
        {"identity": "model/width"},
        {"extra": [1]},
        {"extra": {1: 2}},
        {"rng": 5},
        {"provenance": "me"},
        {"absent": {"nonsense": "why"}},
        {"absent": {"rng": "why"}},
        {"absent": {"data": ""}},
        {"absent": {"data": "why"}, "data": {}},
        {"absent": {"optimizer": "why"}, "extra": {"n": 1}},
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments):
    with pytest.raises(StateError) as caught:
        State(**arguments)

    assert caught.value.code == "ARGUMENT"


def test_per_worker_holds_its_value():
    wrapper = PerWorker([1])
    wrapper.value = [2]

    assert wrapper.value == [2]
    assert wrapper != PerWorker([2])


def test_streams_are_left_out_by_false_alone():
    assert State(rng=False).absent_reasons()["rng"] == NO_RNG
    assert (
        State(rng=False, absent={"rng": "the framework's"}).absent_reasons()["rng"]
        == "the framework's"
    )
    assert "rng" not in State(rng={}).absent_reasons()
    with pytest.raises(StateError):
        State(rng=True)  # type: ignore[arg-type]
