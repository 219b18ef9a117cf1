"""Random-number streams go on where they were."""

import random
from typing import Any

import numpy as np
import pytest
import torch

from ckptfmt.adapters.capture import capture
from ckptfmt.adapters.rng_streams import capture_rng
from ckptfmt.errors import Code, StateError
from ckptfmt.loading.restore import restore_streams
from ckptfmt.state import CapturedRng, State
from tests.adapters.double import checkpoint_of, load, restore, save


def draw_all():
    return (
        random.random(),
        random.gauss(0, 1),
        np.random.rand(),  # noqa: NPY002
        np.random.randn(),  # noqa: NPY002
        torch.rand(3).tolist(),
    )


def test_the_streams_of_the_process_go_on():
    random.gauss(0, 1)  # leaves a second value behind, which is state too
    np.random.randn()  # noqa: NPY002
    state = State(data={"n": 1})
    checkpoint = save(state)
    expected = draw_all()
    draw_all()

    load(state, checkpoint)

    assert draw_all() == expected


GENERATORS: dict[str, Any] = {
    "PCG64": np.random.default_rng,
    "Philox": lambda seed: np.random.Generator(np.random.Philox(seed)),
    "SFC64": lambda seed: np.random.Generator(np.random.SFC64(seed)),
    "MT19937": lambda seed: np.random.Generator(np.random.MT19937(seed)),
    "legacy": np.random.RandomState,
    "python": random.Random,
    "torch": lambda seed: torch.Generator().manual_seed(seed),
}


def draw(generator):
    if isinstance(generator, torch.Generator):
        return torch.rand(3, generator=generator).tolist()
    if isinstance(generator, random.Random):
        return generator.random(), generator.gauss(0, 1)
    return (
        generator.random(3).tolist(),
        generator.standard_normal(),
        generator.integers(9) if hasattr(generator, "integers") else 0,
    )


@pytest.mark.parametrize("kind", GENERATORS)
def test_the_callers_generators_go_on(kind):
    """REQ-CTX-003."""
    generator, other = GENERATORS[kind](1), GENERATORS[kind](2)
    draw(generator)
    checkpoint = save(State(rng={"mine": generator}))
    expected = draw(generator)

    load(State(rng={"mine": other}), checkpoint)

    assert draw(other) == expected
    assert ("user/mine", "lw/0") in checkpoint.streams


def test_an_unknown_generator_is_refused():
    with pytest.raises(StateError, match=r"STATE_UNSUPPORTED.*SystemRandom"):
        save(State(rng={"mine": random.SystemRandom()}))


def test_a_missing_stream_is_refused_unless_allowed_and_lowers_the_claim():
    generator = random.Random(1)
    before = generator.getstate()
    checkpoint = save(State())

    with pytest.raises(StateError, match=r"STREAM_MISSING.*user/mine"):
        load(State(rng={"mine": generator}), checkpoint)
    report = load(State(rng={"mine": generator}), checkpoint, allow={"streams"})

    assert generator.getstate() == before
    assert any("user/mine" in line for line in report.lowered_by)


def test_an_unexpected_stream_is_refused_unless_allowed():
    checkpoint = save(State(rng={"mine": random.Random(1)}))

    with pytest.raises(StateError, match=r"STREAM_UNEXPECTED.*user/mine"):
        load(State(), checkpoint)
    load(State(), checkpoint, allow={"streams"})


def test_a_stream_of_another_kind_is_refused():
    checkpoint = save(State(rng={"mine": GENERATORS["PCG64"](1)}))

    with pytest.raises(StateError, match=r"STREAM_MISSING.*numpy.PCG64.*numpy.Philox"):
        load(State(rng={"mine": GENERATORS["Philox"](1)}), checkpoint)


def test_another_number_of_workers_is_refused_or_reported():
    """REQ-CTX-003, REQ-CTX-004."""

    def state(seed):
        return State(rng={"mine": random.Random(seed)})

    saved = [state(seed) for seed in (1, 2)]
    checkpoint = checkpoint_of(
        *(capture(one, worker=i, worker_count=2) for i, one in enumerate(saved))
    )

    with pytest.raises(StateError, match=r"STREAM_UNEXPECTED.*lw/1"):
        load(state(5), checkpoint, strict=True)
    fewer = state(5)
    report = load(fewer, checkpoint)
    assert fewer.rng["mine"].getstate() == saved[0].rng["mine"].getstate()
    assert any("lw/1" in line for line in report.lowered_by)
    assert report.claim != "T1"

    with pytest.raises(StateError, match="STREAM_MISSING"):
        restore(state(5), checkpoint, worker=2, worker_count=3, strict=True)
    third = state(5)
    fresh = third.rng["mine"].getstate()
    restore(third, checkpoint, worker=2, worker_count=3)
    assert third.rng["mine"].getstate() == fresh


def test_streams_can_be_put_back_late():
    state = State()
    checkpoint = save(state)
    expected = draw_all()

    load(state, checkpoint, streams=False)
    assert draw_all() != expected
    assert restore_streams(state, checkpoint, worker=0, worker_count=1) == ()

    assert draw_all() == expected


@pytest.mark.parametrize("is_captured", [True, False])
def test_streams_that_were_captured_earlier_are_saved_as_they_stood_then(is_captured):
    """The negative control saves them as they stand at the save."""
    own = {kind: make(5) for kind, make in GENERATORS.items()}
    state = State(data={"n": 1}, rng=own)
    captured = capture_rng(own)
    expected = draw_all(), [draw(generator) for generator in own.values()]
    if is_captured:
        state.rng = captured
    checkpoint = save(state)
    draw_all()

    load(State(data={"n": 1}, rng=own), checkpoint)

    assert (
        (draw_all(), [draw(generator) for generator in own.values()]) == expected
    ) is is_captured


def test_load_into_captured_streams_is_one_into_the_live_ones():
    """A state that is saved with them is loaded into later: the next load must not bring back what was captured."""
    own = {"mine": np.random.default_rng(1)}
    draw_all()
    state = State(data={"n": 1}, rng=own)
    checkpoint = save(state)
    expected = draw_all(), draw(own["mine"])
    state.rng = capture_rng(own)
    draw_all()

    load(state, checkpoint)

    assert (draw_all(), draw(own["mine"])) == expected


def test_captured_streams_are_put_back_as_often_as_one_likes():
    own = {kind: make(5) for kind, make in GENERATORS.items()}
    captured = capture_rng(own)
    drawn = []
    for _ in range(3):
        drawn.append((draw_all(), [draw(generator) for generator in own.values()]))
        captured.put_back()
    assert drawn[0] == drawn[1] == drawn[2]
    assert draw_all() != draw_all()


def test_stream_that_was_not_captured_is_named():
    """As where they were captured before torch was imported, or a second device was in use."""
    captured = capture_rng()
    fewer = CapturedRng(tuple(stream for stream in captured.streams if stream.name != "torch.cpu"))
    with pytest.raises(
        StateError, match=r"torch\.cpu wasn't captured.*capture_rng\(devices="
    ) as caught:
        save(State(data={"n": 1}, rng=fewer))
    assert caught.value.code == Code.STREAM_MISSING
