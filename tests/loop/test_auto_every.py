"""`every="auto"` of a run: what it measures, whom it asks, what it says."""

import contextlib
import itertools
import logging
import shutil
import subprocess
import sys
import types
from typing import Any

import numpy as np
import pytest

import ckptfmt
from ckptfmt.checkpointer import Checkpointer
from ckptfmt.errors import CkptError
from ckptfmt.loop.auto_every import AutoEvery
from ckptfmt.store.memory import MemoryStore
from tests.interface.test_group import Allgather, run_writers
from tests.loop.test_checkpointer import Trainer, committed


class Clock:
    """A clock that steps and saves move on."""

    def __init__(self, checkpointer: Checkpointer, save_s: float) -> None:
        self.now_s = 1000.0
        checkpointer._pace.clock = lambda: self.now_s
        save = checkpointer._saves.save

        def slowly(*arguments: Any, **options: Any) -> Any:
            self.now_s += save_s
            handle = save(*arguments, **options)
            if handle is not None:
                handle.wait()  # real time stands still
            return handle

        checkpointer._saves.save = slowly  # type: ignore[method-assign]


class DiedError(Exception):
    """The end of a training."""


def train(
    store: Any,
    steps: int,
    *,
    save_s: float = 2.0,
    mtbf: str | None = "1h",
    dies: bool = False,
    **options: Any,
) -> Checkpointer:
    """Train so many steps of a second each, with saves that cost `save_s`."""
    trainer = Trainer()
    checkpointer = Checkpointer(
        store, trainer.state, every="auto", mtbf=mtbf, **{"saver": "inline", **options}
    )
    clock = Clock(checkpointer, save_s)
    with contextlib.suppress(DiedError), checkpointer:
        first = checkpointer.step
        for number in checkpointer.steps(10**6):
            clock.now_s += 1
            trainer.step(number)
            if number == first + steps:
                if dies:
                    raise DiedError
                break
    return checkpointer


def gaps(store: Any) -> list[int]:
    steps = [step for step, _ in committed(store)]
    return [after - before for before, after in itertools.pairwise(steps)]


def test_the_interval_is_that_of_the_measured_cost(caplog: Any) -> None:
    """Saves of 2 s and a failure in an hour: at first sqrt(2 * 2 * 3600) = 120 s, then longer, as nothing fails."""
    caplog.set_level(logging.INFO, "ckptfmt")
    store = MemoryStore()
    train(store, 2000)
    assert committed(store)[0][0] == pytest.approx(60, abs=1)
    assert all(110 < gap < 180 for gap in gaps(store))
    told = [line for line in caplog.messages if line.startswith("every='auto'")]
    assert "a save costs 2 s of training" in told[0]
    assert len(told) <= 2


def test_dearer_saves_are_rarer() -> None:
    cheap, dear = MemoryStore(), MemoryStore()
    train(cheap, 1000, save_s=0.5)
    train(dear, 1000, save_s=8)
    assert 50 < np.mean(gaps(cheap)) < 90
    assert 200 < np.mean(gaps(dear)) < 350


def test_launches_that_failed_make_saves_more_frequent() -> None:
    store = MemoryStore()
    for _ in range(6):
        train(store, 150)
    before = len(committed(store))
    last = train(store, 1000)
    assert last._pace.meters.auto is not None
    assert last._pace.meters.auto._auto.failures == 6
    assert 50 < last._pace.meters.auto._auto.meters[0].mtbf_s < 700
    assert np.mean(gaps(store)[before + 1 :]) < 60


def test_records_that_can_not_be_read_are_no_obstacle() -> None:
    store = MemoryStore()
    for _ in range(3):
        train(store, 150)
    last = train(store, 5)
    assert last.launch is not None
    assert last._run is not None
    store.delete("launches/0001.json")
    auto = AutoEvery(None, 8)
    auto.note_launches(store, last._run, last.launch)
    assert len(auto._launches) == 2


def test_saves_to_caches_and_home_are_measured_apart(tmp_path: Any, caplog: Any) -> None:
    """And so are failures that took the caches along: the next launch had to pass something over."""
    caplog.set_level(logging.INFO, "ckptfmt")
    run, cache = tmp_path / "run", tmp_path / "cache"
    options: dict[str, Any] = {
        "save_s": 0.5,
        "mtbf": "10min",
        "saver": "thread",
        "cache": cache,
        "upload_every": 4,
    }
    train(run, 400, dies=True, **options)
    shutil.rmtree(cache)
    second = train(run, 400, dies=True, **options)
    third = train(run, 400, **options)
    assert second.launch is not None
    assert second.launch.chosen_by == "fallback"
    assert third._pace.meters.auto is not None
    meters = third._pace.meters.auto._auto.meters
    assert [meter.failures for meter in meters] == [1, 1]
    assert all(meter.is_measured for meter in meters)
    told = [line for line in caplog.messages if line.startswith("every='auto'")]
    assert any(
        "a save to caches costs 0.5 s" in line and "a failure that takes caches is expected" in line
        for line in told
    )


def handle(durability: str, state: str = "SAVING") -> Any:
    report = types.SimpleNamespace(durability=durability)
    return types.SimpleNamespace(
        state=state, blocked_s=0.0, times={"COMMITTED": 10.0}, report=report
    )


def test_what_saves_to_caches_cost_beside_one_that_goes_home_is_not_its_own() -> None:
    """Steps of a second. A save to caches costs half a second; one home a second, and five others begin meanwhile."""
    auto, clock = (
        AutoEvery(3600.0, 1, upload_every=8),
        itertools.accumulate([0.0, *[1.0] * 9], initial=0.0),
    )
    for now_s in clock:
        auto.note_steps(now_s, 1)
    near = handle("node")
    auto.note_save(near)
    auto.note_steps(10.5, 1)
    near.state = "COMMITTED"
    auto.note_steps(11.5, 1)
    home = handle("home")
    auto.note_save(home)
    now_s = 12.5 + 1.0
    for _ in range(5):
        auto.note_save(handle("node"))
        now_s += 0.5
        auto.note_steps(now_s, 1)
        now_s += 1.0
    home.state = "COMMITTED"
    auto.note_steps(now_s, 1)
    assert [meter.lost_s for meter in auto._auto.meters] == pytest.approx([0.5, 1.0])


def test_numbers_that_say_never_are_taken() -> None:
    auto = AutoEvery(1e13, 1, upload_every=2_000_000)
    for now_s in range(5):
        auto.note_steps(float(now_s), 1)
    home = handle("home", "COMMITTED")
    auto.note_save(home)
    auto.note_steps(6.0, 1)
    assert 1 <= auto.interval_s() <= 3600


def test_all_save_at_the_steps_that_process_0_chooses() -> None:
    store, allgather, saved = MemoryStore(), Allgather(3), {}

    def body(writer: int) -> None:
        weights = {"w": np.zeros(3)}
        checkpointer = Checkpointer(
            store,
            ckptfmt.State(weights=weights),
            every="auto",
            mtbf="1h",
            saver="inline",
            writer=(writer, 3),
            agree=allgather.of(writer),
        )
        assert (checkpointer._pace.meters.auto is not None) == (writer == 0)
        clock = Clock(checkpointer, 2.0)
        steps = []
        with checkpointer:
            for _ in checkpointer.steps(400):
                clock.now_s += 1.0 + writer  # clocks of the others run faster
                before = checkpointer._saved_step
                if before is not None and before not in steps:
                    steps.append(before)
        saved[writer] = steps

    run_writers(3, body)
    assert saved[0] == saved[1] == saved[2]
    assert len(saved[0]) >= 3


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"every": 5, "mtbf": "1h"}, "mtbf= says nothing without every='auto'"),
        ({"every": "auto", "mtbf": "soon"}, "mtbf='soon' isn't a time"),
        ({"every": "automatic"}, "isn't a number of steps from 1 on, 'auto', or a time"),
    ],
)
def test_what_means_nothing_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(CkptError, match=said):
        Checkpointer(MemoryStore(), Trainer().state, **options)


def test_a_run_without_it_imports_nothing_of_it(tmp_path: Any) -> None:
    program = """
import sys, ckptfmt, numpy
with ckptfmt.Checkpointer("run", ckptfmt.State(weights={"w": numpy.ones(3)}), every=%r, saver="inline") as one:
    for _ in one.steps(3): pass
print([name for name in sys.modules if "goodput" in name or "auto_every" in name])
"""
    for every, is_empty in ((2, True), ("5min", True), ("auto", False)):
        argv = [sys.executable, "-c", program % (every,)]
        done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=True)
        assert (done.stdout == "[]\n") == is_empty, done.stdout
