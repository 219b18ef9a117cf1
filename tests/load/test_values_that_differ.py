"""Values that differ between processes: refused when that is known, with both values, alike on all processes."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

import ckptfmt
from ckptfmt.checkpointer import Checkpointer
from ckptfmt.errors import CkptError, Code
from ckptfmt.store.memory import MemoryStore
from tests.interface.test_group import Allgather, run_writers
from tests.loop.test_checkpointer import committed


def arguments(rank: int) -> argparse.Namespace:
    """As a training script has them, with the rank that its launcher passed."""
    return argparse.Namespace(arch="resnet50", lr=0.1, rank=rank, dist_url="env://")


def train(
    store: Any,
    allgather: Allgather,
    writer: int,
    *,
    config: Any,
    total: int = 4,
    count: int = 2,
    **state: Any,
) -> tuple[Checkpointer, list[int]]:
    """Train on a process of several; return the steps that it did."""
    done: list[int] = []
    extra = state.pop("extra", {})
    given = ckptfmt.State(weights={"w": 1}, config=config, extra=extra, **state)
    options: Any = {"writer": (writer, count), "agree": allgather.of(writer), "saver": "thread"}
    with Checkpointer(store, given, every=2, **options) as checkpointer:
        try:
            for step in checkpointer.steps(total):
                done.append(step)
                if "best" in extra and step == 2:
                    extra["best"] = 0.5 + writer
        except CkptError as error:
            error.add_note(f"done: {done}")
            raise
    return checkpointer, done


def refusals(count: int = 2, **how: Any) -> list[CkptError]:
    """Return what each process of a training raises."""
    store, allgather = MemoryStore(), Allgather(count)

    def body(writer: int) -> CkptError:
        own = {name: value(writer) if callable(value) else value for name, value in how.items()}
        with pytest.raises(CkptError) as caught:
            train(store, allgather, writer, count=count, **own)
        return caught.value

    return run_writers(count, body)


@pytest.mark.parametrize("count", [2, 3])
def test_a_rank_in_config_is_refused_before_the_first_step_on_all_processes(count: int) -> None:
    """It was raised at the second save, by one process, and the steps before it were lost."""
    found = refusals(count, config=lambda writer: vars(arguments(writer)))
    assert {error.code for error in found} == {Code.LEAF_DIVERGED}
    assert len({str(error) for error in found}) == 1
    text = str(found[0])
    assert "config '': differs between writers 0 and 1 at /rank: 0 and 1" in text
    assert "config=ckptfmt.FirstWorker(config)" in text
    assert all("done: []" in error.__notes__ for error in found)


def test_the_remedy_works_and_process_0s_configuration_is_saved_and_compared() -> None:
    store = MemoryStore()

    def start(total: int, lr: float) -> list[Checkpointer]:
        allgather = Allgather(2)

        def body(writer: int) -> Checkpointer:
            config = {**vars(arguments(writer)), "lr": lr}
            options: Any = {"total": total, "identity": ("arch",), "rng": False}
            return train(store, allgather, writer, config=ckptfmt.FirstWorker(config), **options)[0]

        return run_writers(2, body)

    start(4, 0.1)
    assert committed(store) == [(2, 1), (4, 1)]
    resumed = start(6, 0.1)
    for checkpointer in resumed:
        assert checkpointer.load_report is not None
        assert checkpointer.load_report.config_differences == ()
    changed = start(8, 0.2)
    reports = [checkpointer.load_report for checkpointer in changed]
    assert reports[0] is not None
    assert reports[0].config_differences == (("lr", 0.1, 0.2),)
    assert all(
        report is not None and any("config:lr" in one for one in report.lowered_by)
        for report in reports
    )


@pytest.mark.parametrize("wrapper", [ckptfmt.FirstWorker, ckptfmt.PerWorker])
def test_a_wrapper_within_a_configuration_is_refused_with_what_to_write(
    wrapper: Any, tmp_path: Any
) -> None:
    """It was saved as a mapping with the key `value`."""
    with pytest.raises(CkptError, match=r"State\(config=ckptfmt.FirstWorker\(config\)\)") as caught:
        ckptfmt.save(tmp_path / "c", ckptfmt.State(config={"args": wrapper({"rank": 0})}), step=1)
    assert caught.value.code is Code.ARGUMENT


@pytest.mark.parametrize("count", [2, 3])
def test_a_value_that_comes_to_differ_is_refused_by_the_save_itself(count: int) -> None:
    """A metric that each process computes: the step that saves it raises, not the save after it."""
    found = refusals(count, config={}, extra=lambda _: {"best": 0.0, "epoch": 3})
    assert {error.code for error in found} == {Code.LEAF_DIVERGED}
    assert len({str(error) for error in found}) == 1
    assert "optimizer 'extra/best': differs between writers 0 and 1 at /: 0.5 and 1.5" in str(
        found[0]
    )
    assert "ckptfmt.FirstWorker" in str(found[0])
    assert all("done: [0, 1, 2, 3]" in error.__notes__ for error in found)


def test_values_of_one_process_alone_and_of_each_its_own_are_no_difference() -> None:
    store, allgather = MemoryStore(), Allgather(2)

    def body(writer: int) -> Checkpointer:
        extra = {
            "own": ckptfmt.PerWorker(writer),
            "first": ckptfmt.FirstWorker({"at": writer}),
            f"stage{writer}": writer,
            "same": [1, 2],
        }
        return train(store, allgather, writer, config={"a": 1}, extra=extra)[0]

    assert all(checkpointer.reports == () for checkpointer in run_writers(2, body))
    assert committed(store) == [(2, 1), (4, 1)]
