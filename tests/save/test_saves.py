"""Saves beside the training: equal checkpoints whoever writes them, decisions alike on all, failures told once."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
import torch

import ckptfmt
import ckptfmt.saving.background
import ckptfmt.saving.saves
from ckptfmt.checkpointer import Checkpointer
from ckptfmt.commit.waiting import poll
from ckptfmt.documents.manifest import checkpoint_name
from ckptfmt.documents.tree import dump_tree
from ckptfmt.errors import CkptError, Code, err
from ckptfmt.read.reader import Checkpoint
from ckptfmt.saving.background import Background
from ckptfmt.saving.handle import SaveHandle
from ckptfmt.store import open_store
from ckptfmt.store.memory import MemoryStore
from ckptfmt.store.protocol import Store
from ckptfmt.write.slot import Slot
from ckptfmt.write.staging import HostCopy
from tests.builders import code_of, error_of
from tests.interface.test_group import Allgather, run_writers
from tests.loop.test_checkpointer import committed
from tests.saver.test_saver import WAIT_S, GateStore
from tests.stores.faults import Fault, FaultStore

MIB = 1 << 20


class Run:
    """One trainer of a run whose weights are its step, everywhere; saves by hand."""

    def __init__(
        self, store: Any, *, writer: int = 0, allgather: Allgather | None = None, **options: Any
    ) -> None:
        self.weights: dict[str, Any] = {"w": np.zeros(30_000), "v": np.zeros((3, 5), np.int16)}
        if allgather is not None:
            options |= {
                "writer": (writer, allgather._barrier.parties),
                "agree": allgather.of(writer),
            }
        self.data = {"position": 0}
        self.state = ckptfmt.State(weights=self.weights, data=self.data, config={"lr": 0.5})
        self.checkpointer = Checkpointer(
            store,
            self.state,
            **{
                "saver": "thread",
                "deadline_s": WAIT_S,
                "resume": "fresh",
                "failed_saves": 0,
                **options,
            },
        )

    def set(self, step: int) -> None:
        self.checkpointer.step = self.data["position"] = step
        for array in self.weights.values():
            array[...] = step

    def save(self, step: int) -> SaveHandle:
        """Save a step, and train on at once."""
        self.checkpointer.restore()
        self.set(step)
        handle = self.checkpointer.save()
        assert handle is not None
        for array in self.weights.values():
            array[...] = -1
        return handle

    def close(self) -> None:
        self.checkpointer.close()

    def __enter__(self) -> Self:
        self.checkpointer.restore()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def contents(store: Store, step: int) -> dict[tuple[str, ...], object]:
    """Return all tensors, values and streams of a checkpoint, but not where and when it was made."""
    found: dict[tuple[str, ...], object] = {}
    with Checkpoint(store.at(checkpoint_name(step, 1))) as checkpoint:
        for item in checkpoint.index.tensors:
            array = checkpoint.read(*item.key)
            found["tensor", *item.key] = (item.dtype, item.global_shape, array.tobytes())
        for field, name, scope in checkpoint.leaves:
            if field != "provenance":
                found["leaf", field, name, scope] = dump_tree(
                    checkpoint.leaf(field, name, scope), where=""
                )
        for name, scope in checkpoint.streams:
            kind, state = checkpoint.stream(name, scope)
            found["stream", name, scope] = (kind, dump_tree(state, where=""))
    return found


def is_whole(store: Store, step: int) -> bool:
    """Tell whether every tensor of a checkpoint is of its step."""
    with Checkpoint(store.at(checkpoint_name(step, 1))) as checkpoint:
        return all((checkpoint.read(*item.key) == step).all() for item in checkpoint.index.tensors)


# --- who writes -----------------------------------------------------------------------------------


def test_checkpoints_are_equal_whoever_writes_them(tmp_path: Path) -> None:
    """And none of them shows what the training changed after `save` had returned."""
    found = {}
    for saver in ("inline", "thread", "process"):
        store = open_store(tmp_path / saver, writable=True)
        with Run(store, saver=saver) as run:
            for step in (1, 2, 3, 4, 5):
                run.save(step)
            assert run.checkpointer.reports == ()
        assert committed(store) == [(step, 1) for step in (1, 2, 3, 4, 5)]
        assert all(is_whole(store, step) for step in (1, 2, 3, 4, 5))
        found[saver] = [contents(store, step) for step in (1, 2, 3, 4, 5)]
    assert found["inline"] == found["thread"] == found["process"]
    assert len(found["inline"][0]) > 5


def test_checkpoints_of_a_training_are_equal_whoever_writes_them(tmp_path: Path) -> None:
    """The optimizer has no state at the first save, and all of it at the next."""

    def train(saver: Any) -> list[dict[tuple[str, ...], object]]:
        torch.manual_seed(3)
        model = torch.nn.Sequential(
            torch.nn.Linear(40, 30), torch.nn.BatchNorm1d(30), torch.nn.Linear(30, 5)
        )
        optimizer = torch.optim.AdamW(model.parameters())
        store = open_store(tmp_path / saver, writable=True)
        state = ckptfmt.State(weights=model, optimizer=optimizer)
        with Checkpointer(store, state, every=1, saver=saver, deadline_s=WAIT_S) as checkpointer:
            checkpointer.save(step=0)
            for _ in checkpointer.steps(4):
                optimizer.zero_grad()
                model(torch.randn(6, 40)).square().sum().backward()
                optimizer.step()
        assert committed(store) == [(step, 1) for step in range(5)]
        return [contents(store, step) for step in range(5)]

    inline = train("inline")
    assert inline == train("thread") == train("process")
    counts = [sum(key[:2] == ("tensor", "optimizer") for key in found) for found in inline]
    assert (counts[0], len(set(counts[1:]))) == (0, 1)
    assert counts[1] >= 12
    assert inline[3] != inline[4]


@pytest.mark.parametrize("saver", ["inline", "thread", "process"])
def test_handle_tells_what_the_save_did(tmp_path: Path, saver: str) -> None:
    store = open_store(tmp_path / "run", writable=True)
    with Run(store, saver=saver, keep=1) as run:
        run.save(1).wait(timeout_s=WAIT_S)
        handle = run.save(2)
        report = handle.wait(timeout_s=WAIT_S)
        assert handle.wait_over(WAIT_S)
        assert report is not None
        assert (handle.step, handle.state) == (2, "COMMITTED")
        assert Path(handle.path) == tmp_path / "run" / checkpoint_name(2, 1)
        assert (report.step, report.path, report.writer_count) == (2, handle.path, 1)
        assert report.nbytes == 30_000 * 8 + 30
        with Checkpoint(store.at(checkpoint_name(2, 1))) as checkpoint:
            assert checkpoint.digest == report.digest
        assert handle.report is not None
        assert handle.report.removed == (checkpoint_name(1, 1),)
        assert 0 < handle.blocked_s < WAIT_S
        assert set(handle.times) >= {"COMMITTED"}
    assert committed(store) == [(2, 1)]


def test_store_that_no_other_process_can_open_is_written_by_a_thread() -> None:
    store = MemoryStore()
    with Run(store, saver="process") as run:
        run.save(1)
        (report,) = run.checkpointer.reports
    assert report.startswith("SAVER_IN_THREAD")
    assert is_whole(store, 1)


@pytest.mark.parametrize(
    "options",
    [
        {"saver": "fork"},
        {"saver": None},
        {"when_busy": "raise"},
        {"slots": 0},
        {"slots": 9},
        {"slots": True},
        {"slots": 2.0},
        {"nice": -1},
        {"nice": 20},
        {"nice": None},
    ],
)
def test_option_that_means_nothing_is_refused(options: dict[str, Any]) -> None:
    error = error_of(lambda: Run(MemoryStore(), **options))
    (name,) = options
    assert (error.code, error.where) == (Code.ARGUMENT, f"{name}=")


def test_closed_checkpointer_can_save_again(tmp_path: Path) -> None:
    store = open_store(tmp_path / "run", writable=True)
    run = Run(store, saver="process")
    for step in (1, 2):
        run.save(step)
        run.close()
        assert committed(store)[-1] == (step, 1)
    run.close()


@pytest.mark.parametrize("saver", ["thread", "process"])
def test_checkpointer_that_nobody_has_any_more_lets_go_of_everything(
    tmp_path: Path, saver: str
) -> None:
    """Once what is staged is safe: neither a saver nor the slots stay until the program ends."""
    store = open_store(tmp_path / "run", writable=True)
    run = Run(store, saver=saver)
    handle = run.save(1)
    background = run.checkpointer._saves._background
    assert background is not None
    saves, slot = weakref.ref(run.checkpointer._saves), weakref.ref(background._places[0].slot)
    del run, background
    gc.collect()
    assert (saves(), slot()) == (None, None)
    assert handle.state != "FAILED"
    assert any(committed(store) == [(1, 1)] for _ in poll(WAIT_S))


# --- when every slot is busy ----------------------------------------------------------------------


@pytest.mark.parametrize(("count", "slow"), [(1, 0), (2, 0), (2, 1), (3, 2)])
def test_all_skip_what_one_has_no_slot_for(count: int, slow: int) -> None:
    """Each decides by what all say: else one would wait for the part of another that never comes."""
    inner, allgather = MemoryStore(), Allgather(count)
    gated = GateStore(inner, step=1)

    def body(writer: int) -> list[Any]:
        store = gated if writer == slow else inner
        with Run(store, writer=writer, allgather=allgather, slots=1, when_busy="skip") as run:
            first = run.save(1)
            if writer == slow:
                assert gated.begun.wait(WAIT_S)
            else:
                first.wait("WRITTEN", WAIT_S)  # this one has a slot
            skipped = [run.save(step) for step in (2, 3)]
            states = [handle.state for handle in skipped]
            assert [handle.wait() for handle in skipped] == [None, None]
            if writer == slow:
                gated.gate.set()
            first.wait(timeout_s=WAIT_S)
            assert first.wait_over(WAIT_S)
            run.save(4)
        return [first.state, *states]

    assert run_writers(count, body) == [["COMMITTED", "SKIPPED", "SKIPPED"]] * count
    assert committed(inner) == [(1, 1), (4, 1)]
    assert is_whole(inner, 4)


@pytest.mark.parametrize(("count", "slow"), [(1, 0), (3, 1)])
def test_all_wait_for_the_one_that_has_no_slot(
    monkeypatch: pytest.MonkeyPatch, count: int, slow: int
) -> None:
    inner, allgather = MemoryStore(), Allgather(count)
    gated = GateStore(inner, step=1)
    waited = []
    wait_free = Background.wait_free

    def open_gate(background: Background, timeout_s: float) -> CkptError | None:
        waited.append(background.is_busy())
        if background._store is gated and background.is_busy():
            gated.gate.set()
        return wait_free(background, timeout_s)

    monkeypatch.setattr(Background, "wait_free", open_gate)

    def body(writer: int) -> list[str]:
        store = gated if writer == slow else inner
        with Run(store, writer=writer, allgather=allgather, slots=1) as run:
            handles = [run.save(step) for step in (1, 2, 3)]
        return [handle.state for handle in handles]

    assert run_writers(count, body) == [["COMMITTED"] * 3] * count
    assert any(waited)
    assert committed(inner) == [(1, 1), (2, 1), (3, 1)]
    assert all(is_whole(inner, step) for step in (1, 2, 3))


@pytest.mark.parametrize(("count", "slow"), [(1, 0), (2, 0), (2, 1)])
def test_slot_that_never_gets_free_is_an_error_on_all(count: int, slow: int) -> None:
    inner, allgather = MemoryStore(), Allgather(count)
    gated = GateStore(inner, step=1)

    def body(writer: int) -> tuple[Any, str]:
        store = gated if writer == slow else inner
        with Run(store, writer=writer, allgather=allgather, slots=1) as run:
            first = run.save(1)
            assert writer != slow or gated.begun.wait(WAIT_S)
            run.set(2)
            error = error_of(lambda: run.checkpointer._save(must=False, deadline_s=0.1))
            gated.gate.set()
            first.wait(timeout_s=WAIT_S)
            run.save(3)
        return error.code, error.detail

    found = run_writers(count, body)
    assert [code for code, _ in found] == [Code.SLOTS_BUSY] * count
    assert "step=1" in found[slow][1]
    assert committed(inner) == [(1, 1), (3, 1)]


@pytest.mark.parametrize("count", [1, 2])
def test_last_step_of_the_loop_is_never_skipped(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    inner, allgather = MemoryStore(), Allgather(count)
    gated = GateStore(inner, step=1)
    wait_free = Background.wait_free

    def open_gate(background: Background, timeout_s: float) -> CkptError | None:
        """Only a save that waits calls it."""
        gated.gate.set()
        return wait_free(background, timeout_s)

    monkeypatch.setattr(Background, "wait_free", open_gate)

    def body(writer: int) -> None:
        store = gated if writer == 0 else inner
        with Run(
            store, writer=writer, allgather=allgather, slots=1, when_busy="skip", every=1
        ) as run:
            for step in run.checkpointer.steps(4):
                for array in run.weights.values():
                    array[...] = step + 1

    assert run_writers(count, body) == [None] * count
    assert committed(inner) == [(1, 1), (4, 1)]
    assert is_whole(inner, 4)


# --- failures -------------------------------------------------------------------------------------


def failing(inner: Store, *, code: Code = Code.NO_SPACE) -> FaultStore:
    """Return a store that takes no tensor of the first save."""
    return FaultStore(
        inner,
        Fault(fail_at=1, operations=frozenset({"create"}), path_end=".safetensors"),
        code=code,
    )


@pytest.mark.parametrize(("count", "who"), [(1, 0), (2, 0), (2, 1), (3, 1)])
def test_failure_is_raised_on_all_at_the_next_save_and_once(count: int, who: int) -> None:
    inner, allgather = MemoryStore(), Allgather(count)

    def body(writer: int) -> list[Any]:
        store = failing(inner) if writer == who else inner
        with Run(store, writer=writer, allgather=allgather) as run:
            handle = run.save(1)
            outcomes: list[Any] = [code_of(lambda: handle.wait(timeout_s=WAIT_S)), handle.state]
            run.set(2)
            outcomes.append(code_of(run.checkpointer.save))
            outcomes.append(code_of(lambda: run.save(2).wait(timeout_s=WAIT_S)))
        return outcomes

    for writer, outcomes in enumerate(run_writers(count, body)):
        code = Code.NO_SPACE if writer == who else Code.WRITER_FAILED
        assert outcomes == [code, "FAILED", code, "ok"]
    assert committed(inner) == [(2, 1)]
    assert is_whole(inner, 2)


def test_failure_that_one_has_not_heard_of_is_raised_there_too_and_not_again() -> None:
    """Writer 0 is slow: of the first save's end it hears after it was told by the others."""
    inner, allgather = MemoryStore(), Allgather(2)
    gated = GateStore(inner, step=1)
    handles: list[SaveHandle] = []

    def body(writer: int) -> list[str]:
        with Run(
            failing(inner) if writer else gated, writer=writer, allgather=allgather, slots=2
        ) as run:
            handle = run.save(1)
            if writer == 1:
                assert code_of(lambda: handle.wait(timeout_s=WAIT_S)) == Code.NO_SPACE
            else:
                handles.append(handle)
            run.set(2)
            outcomes = [code_of(run.checkpointer.save)]
            if writer == 0:
                assert handle.state in ("STAGING", "STAGED")
                gated.gate.set()
                outcomes.append(code_of(lambda: handle.wait(timeout_s=WAIT_S)))
            run.save(2).wait(timeout_s=WAIT_S)
            run.save(3)
        return outcomes

    found = run_writers(2, body)
    assert found == [[Code.NO_SPACE, Code.WRITER_FAILED], [Code.NO_SPACE]]
    assert committed(inner) == [(2, 1), (3, 1)]


@pytest.mark.parametrize(("count", "who"), [(1, 0), (2, 0), (2, 1)])
def test_failure_that_was_not_raised_is_raised_by_close_and_once(count: int, who: int) -> None:
    inner, allgather = MemoryStore(), Allgather(count)

    def body(writer: int) -> list[str]:
        run = Run(failing(inner) if writer == who else inner, writer=writer, allgather=allgather)
        run.save(1)
        return [code_of(run.close), code_of(run.close)]

    for writer, outcomes in enumerate(run_writers(count, body)):
        assert outcomes == [Code.NO_SPACE if writer == who else Code.WRITER_FAILED, "ok"]
    assert committed(inner) == []


def test_failure_of_a_save_does_not_hide_the_error_of_the_body(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = Run(failing(MemoryStore()))

    def body() -> None:
        run.save(1)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), run.checkpointer:
        body()
    assert "NO_SPACE" in caplog.text


@pytest.mark.parametrize("saver", ["thread", "inline"])
def test_failed_step_can_be_saved_again(saver: str) -> None:
    inner = MemoryStore()
    with Run(failing(inner), saver=saver) as run:
        outcomes = [code_of(lambda: run.save(1).wait(timeout_s=WAIT_S))]
        run.set(1)
        if saver == "thread":
            outcomes.append(code_of(run.checkpointer.save))
        run.save(1).wait(timeout_s=WAIT_S)
        run.set(1)
        assert run.checkpointer.save() is None
    assert set(outcomes) == {Code.NO_SPACE}
    assert committed(inner) == [(1, 1)]


def test_copy_that_fails_is_raised_by_its_save_and_not_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(_copy: HostCopy) -> None:
        raise MemoryError

    store = MemoryStore()
    with Run(store, slots=1) as run:
        run.save(1)
        with monkeypatch.context() as patch:
            patch.setattr(HostCopy, "finish", fail)
            with pytest.raises(MemoryError):
                run.save(2)
        run.save(2)
        run.save(3)
    assert committed(store) == [(1, 1), (2, 1), (3, 1)]
    assert is_whole(store, 2)


def test_close_says_what_is_still_under_way() -> None:
    inner = MemoryStore()
    gated = GateStore(inner)
    run = Run(gated, deadline_s=0.1)
    handle = run.save(1)
    handle.wait("STAGED", WAIT_S)
    error = error_of(run.close)
    assert (error.code, error.where) == (Code.SAVE_PENDING, handle.path)
    gated.gate.set()
    handle.wait(timeout_s=WAIT_S)
    assert is_whole(inner, 1)


def test_close_waits_for_saves_and_for_what_comes_after_them() -> None:
    store = MemoryStore()
    with Run(store, keep=1) as run:
        for step in range(1, 6):
            run.save(step)
    assert committed(store) == [(5, 1)]


# --- memory ---------------------------------------------------------------------------------------


def room_for(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    """Let as much memory be left, beside the margin."""
    monkeypatch.setattr(ckptfmt.saving.background, "available_nbytes", lambda: 256 * MIB + nbytes)


@pytest.mark.parametrize(
    ("room_nbytes", "slot_count"), [(4 * MIB, 2), (3 * MIB // 2, 1), (MIB // 2, 0)]
)
def test_short_memory_is_reported_and_saves_are_made_all_the_same(
    monkeypatch: pytest.MonkeyPatch, room_nbytes: int, slot_count: int
) -> None:
    store = MemoryStore()
    gated = GateStore(store)
    if slot_count < 2:
        gated.gate.set()
    room_for(monkeypatch, room_nbytes)
    with Run(gated) as run:
        run.weights["big"] = np.zeros(MIB, np.int8)
        for step in (1, 2, 3):
            handle = run.save(step)
            assert slot_count or handle.state == "COMMITTED"
            if step == 2:
                gated.gate.set()
        reports = run.checkpointer.reports
        assert run.checkpointer._saves._background is not None
        assert len(run.checkpointer._saves._background._places) == slot_count
    assert committed(store) == [(1, 1), (2, 1), (3, 1)]
    assert all(is_whole(store, step) for step in (1, 2, 3))
    if slot_count == 2:
        assert reports == ()
    else:
        (report,) = reports
        assert report.startswith(f"SLOTS_REDUCED: {slot_count} of 2 slots")
        assert ("inline" in report) == (slot_count == 0)


def test_memory_that_gets_short_later_is_reported_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was saved before is safe, and what has grown is saved without slots."""
    store = MemoryStore()
    with Run(store) as run:
        run.save(1).wait_over()
        room_for(monkeypatch, 0)
        run.save(2).wait_over()
        assert not run.checkpointer.reports
        run.weights["m"] = np.zeros(MIB)
        assert [run.save(step).state for step in (3, 4)] == ["COMMITTED"] * 2
        found = list(run.checkpointer.reports)
    assert [report[:27] for report in found] == ["SLOTS_REDUCED: 0 of 2 slots"]
    assert all(is_whole(store, step) for step in (1, 2, 3, 4))


@pytest.mark.parametrize("poor", [0, 1])
def test_writer_without_a_slot_saves_with_those_that_have_some(
    monkeypatch: pytest.MonkeyPatch, poor: int
) -> None:
    store, allgather = MemoryStore(), Allgather(2)
    make_slots = Background._make_slots

    def make(background: Background, count: int, *args: Any) -> None:
        if count and background is poor_one[0]:
            raise MemoryError
        make_slots(background, count, *args)

    poor_one: list[Any] = [None]
    monkeypatch.setattr(Background, "_make_slots", make)
    make_background = ckptfmt.saving.saves.Saves._make_background

    def note(saves: Any) -> Background:
        background = make_background(saves)
        if saves._group.writer == poor:
            poor_one[0] = background
        return background

    monkeypatch.setattr(ckptfmt.saving.saves.Saves, "_make_background", note)

    def body(writer: int) -> list[str]:
        with Run(store, writer=writer, allgather=allgather) as run:
            handles = [run.save(step) for step in (1, 2, 3)]
            assert writer != poor or [handle.state for handle in handles] == ["COMMITTED"] * 3
        return [handle.state for handle in handles]

    assert run_writers(2, body) == [["COMMITTED"] * 3] * 2
    assert all(is_whole(store, step) for step in (1, 2, 3))


@pytest.mark.parametrize("saver", ["thread", "process"])
@pytest.mark.parametrize("slots", [1, 2])
def test_structure_that_grows_and_shrinks_between_saves(
    tmp_path: Path, saver: str, slots: int
) -> None:
    """As an optimizer's does with its first step: slots are made anew, once what they hold is written."""
    store = open_store(tmp_path / "run", writable=True)
    with Run(store, saver=saver, slots=slots) as run:
        run.save(1)
        run.weights["m"] = np.zeros(200_000)
        run.save(2)
        run.save(3)
        run.weights["w"] = np.zeros(70_000, np.float32)
        run.save(4)
        del run.weights["m"], run.weights["v"]
        run.save(5)
        run.save(6)
    assert committed(store) == [(step, 1) for step in range(1, 7)]
    assert all(is_whole(store, step) for step in range(1, 7))
    names = [
        sorted(key[2] for key in contents(store, step) if key[0] == "tensor") for step in (1, 2, 6)
    ]
    assert names == [["v", "w"], ["m", "v", "w"], ["w"]]


def test_slots_are_made_anew_only_when_what_they_hold_is_written() -> None:
    inner = MemoryStore()
    gated = GateStore(inner)
    with Run(gated, slots=2) as run:
        first = run.save(1)
        assert gated.begun.wait(WAIT_S)
        run.weights["m"] = np.zeros(200_000)
        opening = threading.Timer(0.05, gated.gate.set)
        opening.start()
        run.save(2)
        assert first.state != "STAGED"
        opening.join(WAIT_S)
    assert all(is_whole(inner, step) for step in (1, 2))


def test_growth_on_one_writer_only() -> None:
    store, allgather = MemoryStore(), Allgather(2)

    def body(writer: int) -> None:
        with Run(store, writer=writer, allgather=allgather) as run:
            run.save(1)
            if writer == 1:
                run.weights["m"] = np.zeros(200_000)
            run.save(2)
            run.save(3)

    assert run_writers(2, body) == [None, None]
    assert all(is_whole(store, step) for step in (1, 2, 3))
    assert ("tensor", "weights", "m", "global") in contents(store, 3)


def test_the_second_slot_is_made_when_a_save_finds_the_first_one_busy() -> None:
    store = MemoryStore()
    gated = GateStore(store)
    with Run(gated) as run:
        run.save(1)
        background = run.checkpointer._saves._background
        assert background is not None
        assert len(background._places) == 1
        run.save(2)
        assert len(background._places) == 2
        gated.gate.set()
        run.save(3)
        assert len(background._places) == 2
    assert all(is_whole(store, step) for step in (1, 2, 3))


def test_a_save_that_is_skipped_has_a_second_slot_made_without_waiting_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, released = MemoryStore(), threading.Event()
    gated = GateStore(store)
    touch = Slot.touch

    def touch_late(slot: Slot, *args: Any, **options: Any) -> None:
        assert released.wait(WAIT_S)
        touch(slot, *args, **options)

    with Run(gated, when_busy="skip") as run:
        states = [run.save(1).state]
        monkeypatch.setattr(Slot, "touch", touch_late)
        states.append(run.save(2).state)
        released.set()
        states += [run.save(step).state for step in (3, 4)]
        gated.gate.set()
    assert [state == "SKIPPED" for state in states] == [False, True, False, True]
    assert committed(store) == [(1, 1), (3, 1)]


def test_a_further_slot_that_cannot_be_made_fails_no_save(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    gated = GateStore(store)
    with Run(gated) as run:
        run.save(1)
        monkeypatch.setattr(Background, "_make_slot", lambda *_: 1 / 0)
        threading.Timer(0.2, gated.gate.set).start()
        run.save(2)
        reports = run.checkpointer.reports
    assert [report[:27] for report in reports] == ["SLOTS_REDUCED: 1 of 2 slots"]
    assert "ZeroDivisionError" in reports[0]
    assert all(is_whole(store, step) for step in (1, 2))


def test_a_further_slot_that_the_saver_refuses_fails_its_save_and_is_given_up() -> None:
    store = MemoryStore()
    gated = GateStore(store)
    with Run(gated, failed_saves=3) as run:
        run.save(1)
        background = run.checkpointer._saves._background
        assert background is not None
        saver, add_slot = background._link._saver, background._link.add_slot  # type: ignore[union-attr]
        error = err(Code.SLOT_MEMORY, "no memory for it")

        vars(background._link)["add_slot"] = lambda number, _: saver.refuse_slot(number, error)
        refused = run.save(2)
        vars(background._link)["add_slot"] = add_slot
        gated.gate.set()
        assert code_of(lambda: refused.wait(timeout_s=WAIT_S)) == Code.SLOT_MEMORY
        message = {"type": "refused", "slot": 1, "error": error.as_json()}
        background._on_message(background._link_number, message)
        run.save(3).wait(timeout_s=WAIT_S)
        assert len(background._places) == 1
    assert committed(store) == [(1, 1), (3, 1)]
    assert is_whole(store, 3)


def test_closing_ends_a_preparation_early(monkeypatch: pytest.MonkeyPatch) -> None:
    store, going = MemoryStore(), threading.Event()
    ended: list[float] = []

    def touch(_slot: Slot, on_progress: Any = None, **_options: Any) -> None:
        going.set()
        end_s = time.monotonic() + WAIT_S
        while time.monotonic() < end_s:
            on_progress(1)
            time.sleep(0.01)
        ended.append(end_s)

    with Run(store, every=9) as run:
        for step in run.checkpointer.steps(9):
            if step == 0:
                run.weights["m"] = np.zeros(200_000)
                monkeypatch.setattr(Slot, "touch", touch)
            elif going.wait(WAIT_S):
                break
    assert going.is_set()
    assert not ended


def test_a_save_waits_for_a_preparation_beside_the_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, released = MemoryStore(), threading.Event()
    touch = Slot.touch

    def touch_late(slot: Slot, *args: Any, **options: Any) -> None:
        released.wait(WAIT_S)
        touch(slot, *args, **options)

    with Run(store, every=3) as run:
        for step in run.checkpointer.steps(3):
            if step == 0:
                run.weights["m"] = np.zeros(200_000)
                monkeypatch.setattr(Slot, "touch", touch_late)
            if step == 1:
                background = run.checkpointer._saves._background
                assert background is not None
                assert background._preparing is not None
                assert background._preparing.is_alive()
                threading.Timer(0.2, released.set).start()
            for array in run.weights.values():
                array[...] = step + 1
        assert released.is_set()
    assert is_whole(store, 3)


def test_a_preparation_that_fails_is_logged_and_done_again_by_the_save(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = MemoryStore()
    make_slots = Background._make_slots
    failed: list[str] = []

    def fail_once(background: Background, *args: Any) -> None:
        if threading.current_thread().name == "ckptfmt-prepare" and not failed:
            failed.append("once")
            raise ZeroDivisionError("of the first step")
        make_slots(background, *args)

    monkeypatch.setattr(Background, "_make_slots", fail_once)
    with Run(store, every=3) as run:
        for step in run.checkpointer.steps(3):
            if step == 0:
                run.weights["m"] = np.zeros(200_000)
            for array in run.weights.values():
                array[...] = step + 1
    assert failed
    assert "of the first step" in caplog.text
    assert is_whole(store, 3)


def test_loop_prepares_for_what_the_first_step_brings() -> None:
    """No save waits for slots that could have been made before."""
    store = MemoryStore()
    with Run(store, every=2) as run:
        for step in run.checkpointer.steps(4):
            if step == 0:
                run.weights["m"] = np.zeros(200_000)
            if step == 1:
                background = run.checkpointer._saves._background
                assert background is not None
                background._settle()
                assert {place.slot.nbytes > 200_000 * 8 for place in background._places} == {True}
            for array in run.weights.values():
                array[...] = step + 1
    assert all(is_whole(store, step) for step in (2, 4))


def test_save_that_breaks_off_before_its_copies_blocks_nothing(monkeypatch):
    """The saver was told to begin, and waits for a snapshot that never comes."""

    def fail(*_args, **_options):
        raise MemoryError

    store = MemoryStore()
    with Run(store, deadline_s=5) as run:
        with monkeypatch.context() as patch:
            patch.setattr(ckptfmt.saving.saves, "plan_copies", fail)
            with pytest.raises(MemoryError):
                run.save(1)
        run.save(2).wait(timeout_s=5)
        run.save(3).wait(timeout_s=5)
    assert committed(store) == [(2, 1), (3, 1)]


def test_all_save_a_failed_step_again_or_none_does():
    """Writer 1 knows that step 1 failed, writer 0 doesn't yet: both call save() again, as a program does at its end."""
    inner, allgather = MemoryStore(), Allgather(2)
    allgather._barrier = threading.Barrier(2, timeout=5)
    gated = GateStore(inner, step=1)

    def body(writer):
        run = Run(failing(inner) if writer else gated, writer=writer, allgather=allgather)
        handle = run.save(1)
        if writer == 1:
            code_of(lambda: handle.wait(timeout_s=WAIT_S))
        run.set(1)
        outcome = code_of(run.checkpointer.save)
        gated.gate.set()
        code_of(run.checkpointer.close)
        return outcome

    run_writers(2, body)


def test_slots_that_one_writer_cannot_make_for_what_has_grown_fail_the_save_on_all(monkeypatch):
    """All had agreed on the save: the others waited for a part that never came, until the deadline."""
    store, allgather = MemoryStore(), Allgather(2)
    make_slots, refused = Background._make_slots, threading.local()

    def make(background, *args):
        if getattr(refused, "now", False):
            refused.now = False
            raise PermissionError("no slots for you")
        make_slots(background, *args)

    monkeypatch.setattr(Background, "_make_slots", make)

    def body(writer):
        with Run(store, writer=writer, allgather=allgather) as run:
            run.save(1).wait(timeout_s=WAIT_S)
            run.weights["m"] = np.zeros(200_000)
            refused.now = writer == 1
            if writer == 1:
                with pytest.raises(PermissionError):
                    run.save(2)
                outcome = ""
            else:
                handle = run.save(2)
                outcome = code_of(lambda: handle.wait(timeout_s=WAIT_S))
            run.set(3)
            again = code_of(run.checkpointer.save)
            run.save(4).wait(timeout_s=WAIT_S)
        return outcome, again

    found = run_writers(2, body)
    assert found == [(Code.WRITER_FAILED, Code.WRITER_FAILED), ("", Code.WRITER_FAILED)]
    assert is_whole(store, 4)
