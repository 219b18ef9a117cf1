"""Saves to paths through one saver: several states and places, what is refused, what a killed process leaves."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckptfmt
from ckptfmt.commit.waiting import list_held_attempts, poll
from ckptfmt.errors import Code
from ckptfmt.saving.path_saver import PathSaver
from ckptfmt.store.local import LocalStore
from ckptfmt.store.memory import MemoryStore
from ckptfmt.store.posix import Hold
from tests.builders import code_of, error_of
from tests.interface.test_group import Allgather, run_writers
from tests.saver.test_saver import WAIT_S
from tests.stores.faults import Fault, FaultStore

SAVERS = ("process", "thread", "inline")


def make(**options: Any) -> PathSaver:
    return PathSaver(**{"saver": "thread", "deadline_s": WAIT_S, **options})


def state_of(number: int, *, count: int = 20_000) -> ckptfmt.State:
    return ckptfmt.State(
        weights={"w": np.full(count, number, np.float32)}, data={"position": number}, rng=False
    )


def number_at(path: Any) -> int:
    """Return the number of the state that is saved at a path, after a check of every byte."""
    report = ckptfmt.validate(path)
    assert report, report.violations
    trees = ckptfmt.load(path, framework="numpy")
    assert isinstance(trees, dict)
    weights, data = trees["weights"], trees["data"]
    assert isinstance(weights, dict)
    assert isinstance(data, dict)
    assert (weights["w"] == data["position"]).all()
    return int(data["position"])


# --- places and states ----------------------------------------------------------------------------


@pytest.mark.parametrize("saver", SAVERS)
def test_states_of_different_structure_go_through_the_same_slots(
    tmp_path: Path, saver: str
) -> None:
    """Each is saved as it was at the call, whichever the slot held before, and however large that was."""
    small: dict[str, Any] = {"a": np.zeros(7, np.int16), "b": np.zeros((2, 3))}
    large: dict[str, Any] = {"w": np.zeros(300_000, np.float32)}
    states = {
        "small": ckptfmt.State(weights=small, rng=False),
        "large": ckptfmt.State(weights=large, data=[1, 2]),
    }
    with make(saver=saver, slots=2) as saving:
        for step in (1, 2, 3):
            for name, state in states.items():
                for array in (small if name == "small" else large).values():
                    array[...] = step
                saving.save(tmp_path / f"{name}-{step}", state, step=step)
                for array in (small if name == "small" else large).values():
                    array[...] = -1
        assert saving.reports == ()
    for step in (1, 2, 3):
        for name in states:
            assert ckptfmt.validate(tmp_path / f"{name}-{step}")
            with ckptfmt.open(tmp_path / f"{name}-{step}") as checkpoint:
                assert checkpoint.step == step
                assert all(
                    (checkpoint.read(*tensor.key) == step).all()
                    for tensor in checkpoint.index.tensors
                )


@pytest.mark.parametrize("saver", SAVERS)
def test_what_is_saved_is_what_ckptfmt_save_saves(tmp_path: Path, saver: str) -> None:
    model = torch.nn.Linear(30, 20)
    optimizer = torch.optim.AdamW(model.parameters())
    state = ckptfmt.State(weights=model, optimizer=optimizer)
    model(torch.ones(1, 30)).sum().backward()
    optimizer.step()
    with make(saver=saver) as saving:
        report = saving.save(
            tmp_path / "one", state, step=3, metrics={"loss": 0.5}, tags=["best"]
        ).wait()
    ckptfmt.save(tmp_path / "other", state, step=3, metrics={"loss": 0.5}, tags=["best"])
    assert report is not None
    assert report.path == str(tmp_path / "one")
    with ckptfmt.open(tmp_path / "one") as one, ckptfmt.open(tmp_path / "other") as other:
        assert one.manifest.labels == other.manifest.labels
        assert (one.manifest.origin.run_id, one.manifest.origin.launch) == (None, None)
        assert one.manifest.fields == other.manifest.fields
        assert [tensor.key for tensor in one.index.tensors] == [
            tensor.key for tensor in other.index.tensors
        ]
        for tensor in one.index.tensors:
            assert one.read(*tensor.key).tobytes() == other.read(*tensor.key).tobytes()
    kinds = sorted(path.name.partition("-")[0] for path in (tmp_path / "one").iterdir())
    assert kinds == ["index", "manifest.json", "optimizer", "parts", "weights"], (
        "nothing else lies there"
    )


def test_path_need_not_be_text(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"caf\xe9")
    with make(saver="process") as saving:
        saving.save(path, state_of(1), step=1)
    assert number_at(path) == 1


def test_store_is_a_place_for_a_thread_and_not_for_a_process() -> None:
    store = MemoryStore()
    with make() as saving:
        saving.save(store, state_of(1), step=1)
    assert number_at(store) == 1
    with make(saver="process") as saving:
        assert code_of(lambda: saving.save(MemoryStore(), state_of(1), step=1)) == Code.ARGUMENT


def test_parameters_are_copied_beside_the_training_and_each_state_learns_for_itself(
    tmp_path: Path,
) -> None:
    """Names are the same in both trainings; what is trusted of one says nothing of the other."""
    trainings = []
    for _ in range(2):
        model = torch.nn.Linear(64, 64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        trainings.append((model, optimizer, ckptfmt.State(weights=model, optimizer=optimizer)))

    def step(number: int) -> None:
        model, optimizer, _ = trainings[number]
        optimizer.zero_grad()
        model(torch.ones(1, 64)).sum().backward()
        optimizer.step()

    expected = {}
    with make(slots=2) as saving:
        for turn in range(4):
            for number, (model, _, state) in enumerate(trainings):
                step(number)
                path = tmp_path / f"{number}-{turn}"
                expected[path] = model.weight.detach().clone()
                saving.save(path, state, step=turn)
                step(number)
        saves = saving._saves
        assert saves is not None
        assert len(saves._guards) == 2
        assert all(guard._trusted for guard in saves._guards.values())
        trainings.clear()
        del model, state
        gc.collect()
        assert not saves._guards, "nobody keeps a state because it was saved"
    for path, weight in expected.items():
        with ckptfmt.open(path) as checkpoint:
            assert torch.equal(torch.from_numpy(checkpoint.weights["weight"][...]), weight)


# --- refusals and failures ------------------------------------------------------------------------


@pytest.mark.parametrize("saver", ["save", *SAVERS])
@pytest.mark.parametrize(
    "place",
    [
        "step-00000009-l0001",
        "step-00000001-l0001/best",
        "step-00000001-l0001/parts/best",
        "labels",
        "launches/best",
        "savers",
        "ledger",
        "witness",
        "healing",
        "votes",
    ],
)
def test_nothing_is_saved_among_the_files_of_a_run(tmp_path: Path, saver: str, place: str) -> None:
    """Retention deleted it with the checkpoint around it, or the run was invalid afterwards."""
    run = tmp_path / "run"
    with ckptfmt.Checkpointer(run, state_of(1), saver="inline") as checkpointer:
        checkpointer.save(step=1)
    (tmp_path / "link").symlink_to("run")
    before = sorted(run.rglob("*"))
    for path in (run / place, tmp_path / "link" / place):
        if saver == "save":
            error = error_of(lambda p=path: ckptfmt.save(p, state_of(2), step=9))
        else:
            with make(saver=saver) as saving:
                error = error_of(lambda p=path: saving.save(p, state_of(2), step=9))
        assert (error.code, str(run) in error.detail) == (Code.CHECKPOINT_EXISTS, True)
    left = set(run.rglob("*")) - set(before)
    assert saver == "save" or not left
    assert all(path.is_dir() for path in left)
    assert ckptfmt.validate(run)


def test_other_names_in_a_run_and_these_names_elsewhere_are_saved_to(tmp_path: Path) -> None:
    with ckptfmt.Checkpointer(tmp_path / "run", state_of(1), saver="inline") as checkpointer:
        checkpointer.save(step=1)
    places = ("run/export", "run/export/labels/best", "labels", "step-00000009-l0001", "labels/a/b")
    with make() as saving:
        for place in places:
            saving.save(tmp_path / place, state_of(2), step=9).wait()
            ckptfmt.save(tmp_path / place, state_of(3), step=10, replace=True)
    assert [number_at(tmp_path / place) for place in places] == [3] * len(places)
    assert ckptfmt.validate(tmp_path / "run")


@pytest.mark.parametrize("saver", SAVERS)
def test_nothing_that_is_there_is_touched(tmp_path: Path, saver: str) -> None:
    ckptfmt.save(tmp_path / "taken", state_of(1), step=1)
    with ckptfmt.Checkpointer(tmp_path / "run", state_of(2), saver="inline") as checkpointer:
        checkpointer.save(step=1)
    (tmp_path / "file").write_bytes(b"")
    with make(saver=saver) as saving:
        for place in ("taken", "run"):
            assert (
                code_of(lambda p=place: saving.save(tmp_path / p, state_of(3), step=3))
                == Code.CHECKPOINT_EXISTS
            )
        assert (
            code_of(lambda: saving.save(tmp_path / "file", state_of(3), step=3)) == Code.UNSAFE_FILE
        )
        saving.save(tmp_path / "free", state_of(4), step=4)
    assert [number_at(tmp_path / place) for place in ("taken", "free")] == [1, 4]


def test_path_is_refused_while_a_save_to_it_is_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    monkeypatch.setattr("ckptfmt.run.save_job.decide", _behind(gate, "ckptfmt.run.save_job.decide"))
    (tmp_path / "link").symlink_to(tmp_path / "place")
    with make() as saving:
        handle = saving.save(tmp_path / "place", state_of(1), step=1)
        error = error_of(lambda: saving.save(tmp_path / "link", state_of(2), step=2))
        assert error.code == Code.CHECKPOINT_EXISTS
        assert "step 1 is being saved" in error.detail
        gate.set()
        handle.wait(timeout_s=WAIT_S)
    assert number_at(tmp_path / "place") == 1


def _behind(gate: threading.Event, name: str) -> Any:
    """Return a function that waits for a gate before it does what the one of that name does."""
    module, _, attribute = name.rpartition(".")
    function = getattr(sys.modules[module], attribute)

    def wait_and_call(*given: Any, **options: Any) -> Any:
        assert gate.wait(WAIT_S)
        return function(*given, **options)

    return wait_and_call


@pytest.mark.parametrize("by", ["save", "close"])
def test_failure_is_raised_once_by_the_next_call(by: str) -> None:
    full = Fault(fail_at=1, operations=frozenset({"create"}), path_end=".safetensors")
    saving = make()
    handle = saving.save(FaultStore(MemoryStore(), full, code=Code.NO_SPACE), state_of(1), step=1)
    handle.wait_over(WAIT_S)
    assert handle.state == "FAILED"
    if by == "save":
        assert code_of(lambda: saving.save(MemoryStore(), state_of(2), step=2)) == Code.NO_SPACE
        store = MemoryStore()
        saving.save(store, state_of(3), step=3).wait(timeout_s=WAIT_S)
        assert number_at(store) == 3
    else:
        assert code_of(saving.close) == Code.NO_SPACE
    saving.close()


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_held_once_a_save_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, fails: bool
) -> None:
    """Whoever waited may delete the directory, or move it."""
    end = Hold.end

    def end_late(*given: Any) -> None:
        time.sleep(0.2)
        end(*given)

    monkeypatch.setattr(Hold, "end", end_late)
    store = LocalStore(tmp_path / "place", writable=True)
    full = Fault(fail_at=1, operations=frozenset({"create"}), path_end=".safetensors")
    with make() as saving:
        handle = saving.save(FaultStore(store, full) if fails else store, state_of(1), step=1)
        handle.on_failed(lambda _: None)
        assert handle.wait_over(WAIT_S)
        assert (handle.state == "FAILED") is fails
        assert not any(path.suffix == ".held" for path in (tmp_path / "place").rglob("*"))


@pytest.mark.parametrize("saver", SAVERS)
def test_callbacks_are_called_before_close_returns(tmp_path: Path, saver: str) -> None:
    reports: list[Any] = []
    with make(saver=saver) as saving:
        for step in (1, 2):
            saving.save(
                tmp_path / f"{step}", state_of(step), step=step, on_committed=reports.append
            )
    assert [(report.step, report.path) for report in reports] == [
        (step, str(tmp_path / f"{step}")) for step in (1, 2)
    ]
    assert [number_at(report.path) for report in reports] == [1, 2]


def test_failure_that_a_callback_takes_is_raised_by_nobody() -> None:
    full = Fault(fail_at=1, operations=frozenset({"create"}), path_end=".safetensors")
    errors: list[Any] = []
    with make() as saving:
        place = FaultStore(MemoryStore(), full, code=Code.NO_SPACE)
        saving.save(
            place, state_of(1), step=1, on_committed=errors.append, on_failed=errors.append
        ).wait_over(WAIT_S)
        saving.save(MemoryStore(), state_of(2), step=2)
    assert [error.code for error in errors] == [Code.NO_SPACE]


def test_callbacks_of_a_checkpointer_are_called_too(tmp_path: Path) -> None:
    reports: list[Any] = []
    with ckptfmt.Checkpointer(tmp_path / "run", state_of(1), saver="thread") as checkpointer:
        handle = checkpointer.save(step=1)
        assert handle is not None
        handle.on_committed(reports.append)
    assert [report.step for report in reports] == [1]


def test_callback_that_blocks_delays_no_save_and_not_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ckptfmt.saving.saves._CALLBACKS_S", 0.05)
    gate = threading.Event()
    saving = make(slots=1, deadline_s=WAIT_S)
    for step in (1, 2, 3):
        saving.save(
            tmp_path / f"{step}",
            state_of(step),
            step=step,
            on_committed=lambda _: gate.wait(WAIT_S),
        )
    saving.wait(WAIT_S)
    assert [number_at(tmp_path / f"{step}") for step in (1, 2, 3)] == [1, 2, 3]
    saving._deadline_s = 0.05
    saving.close()
    assert "callbacks of saves aren't over" in caplog.text
    gate.set()


@pytest.mark.parametrize("saver", ["process", "thread"])
def test_replaced_while_saves_to_it_are_under_way(tmp_path: Path, saver: str) -> None:
    """One after the other, in the order of the calls."""
    reports: list[Any] = []
    with make(saver=saver, slots=2) as saving:
        for step in range(5):
            saving.save(
                tmp_path / "last",
                state_of(step),
                step=step,
                replace=True,
                on_committed=reports.append,
            )
        saving.wait(WAIT_S)
        assert number_at(tmp_path / "last") == 4
        saving.save(tmp_path / "last", state_of(5), step=5, replace=True)
        saving.remove(tmp_path / "last")
        assert not (tmp_path / "last").exists()
    assert [report.step for report in reports] == list(range(5))


def test_closed_saver_saves_nothing(tmp_path: Path) -> None:
    saving = make()
    saving.save(tmp_path / "one", state_of(1), step=1)
    saving.close()
    saving.close()
    assert code_of(lambda: saving.save(tmp_path / "two", state_of(2), step=2)) == Code.ARGUMENT
    assert not (tmp_path / "two").exists()
    assert code_of(lambda: PathSaver(agree="token")) == Code.ARGUMENT


# --- several processes ----------------------------------------------------------------------------


@pytest.mark.parametrize("saver", ["thread", "inline"])
def test_writers_save_to_the_same_paths_together(tmp_path: Path, saver: str) -> None:
    allgather = Allgather(2)

    def write(writer: int) -> list[str]:
        weights = {"shared": np.arange(10.0)}
        state = ckptfmt.State(weights=weights, data=ckptfmt.PerWorker({"rank": writer}), rng=False)
        with make(saver=saver, writer=(writer, 2), agree=allgather.of(writer)) as saving:
            handles = [saving.save(tmp_path / f"s{step}", state, step=step) for step in (1, 2, 3)]
            saving.wait(WAIT_S)
            assert code_of(lambda: saving.save(tmp_path / "s1", state, step=9)) != "ok"
        return [handle.state for handle in handles]

    assert run_writers(2, write) == [["COMMITTED"] * 3] * 2
    for step in (1, 2, 3):
        assert ckptfmt.validate(tmp_path / f"s{step}")
        with ckptfmt.open(tmp_path / f"s{step}") as checkpoint:
            assert checkpoint.manifest.origin.writer_count == 2


# --- processes that end ---------------------------------------------------------------------------

SCRIPT = """
    import os, signal, sys, numpy as np, ckptfmt
    how, path = sys.argv[1], sys.argv[2]
    weights = {"w": np.full(3_000_000, 1, np.float32)}
    state = ckptfmt.State(weights=weights, data={"position": 1}, rng=False)
    saver = ckptfmt.PathSaver(slots=2)
    for number in (1, 2):
        handle = saver.save(f"{path}/{number}", state, step=number)
    handle.wait_staged()
    assert handle.state in ("STAGED", "WRITTEN", "COMMITTED"), handle.state
    print("staged", flush=True)
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "exits":
        sys.exit()
    if how == "raises":
        raise RuntimeError
    if how == "forks":  # the child has none of it, and ends as it likes
        pid = os.fork()
        if pid == 0:
            try:
                saver.save(f"{path}/3", state, step=3)
            except ckptfmt.CkptError as error:
                saver.close()
                os._exit(error.code == "SAVER_LOST")
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
        saver.close()
        sys.exit()
"""


@pytest.mark.parametrize("how", ["killed", "exits", "raises", "forks"])
def test_what_is_staged_is_saved_however_the_process_ends(tmp_path: Path, how: str) -> None:
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), how, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=WAIT_S)
    assert done.returncode == {"killed": -signal.SIGKILL, "raises": 1}.get(how, 0), done.stderr
    assert "staged" in done.stdout
    for number in ("1", "2"):
        store = LocalStore(tmp_path / number, writable=False)
        assert any(not list_held_attempts(store) for _ in poll(WAIT_S))
        assert number_at(tmp_path / number) == 1
    assert not (tmp_path / "3").exists() or how == "forks"


KILLED = """
    import os, sys
    import numpy as np, ckptfmt

    def say(*words):
        os.write(1, (" ".join(map(str, words)) + "\\n").encode())  # a line at once, for two threads say some

    path, first = sys.argv[1], int(sys.argv[2])
    weights = np.zeros(4_000_000, np.float32)
    saver = ckptfmt.PathSaver(slots=2)
    state = ckptfmt.State(weights={"w": weights}, data={"position": 0}, rng=False)
    for number in range(first, 1_000_000):
        weights[...] = state.data["position"] = number
        handle = saver.save(path, state, step=number, replace=True)
        say("called", number, saver._saves._background._link.pid)
        handle.wait("STAGED")
        say("staged", number)
        handle.on_committed(lambda report: say("committed", report.step))
"""


@pytest.mark.slow
@pytest.mark.parametrize("who", ["trainer", "saver", "both"])
@pytest.mark.parametrize("rounds", [2, pytest.param(12, marks=pytest.mark.exhaustive)])
def test_kills_while_it_is_replaced_leave_the_old_or_the_new_one(
    tmp_path: Path, who: str, rounds: int
) -> None:
    """And what was STAGED is there in the end, if the saver lives."""
    rng, place, last = random.Random(20261123), tmp_path / "last", 0
    ckptfmt.save(place, state_of(last), step=last)
    for _ in range(rounds):
        command = [sys.executable, "-c", textwrap.dedent(KILLED), str(place), str(last + 1)]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        with process:
            assert process.stdout is not None
            line = process.stdout.readline().split()
            assert line[:2] == ["called", str(last + 1)], process.communicate()
            time.sleep(rng.uniform(0.0, 0.3))
            if who != "trainer":
                os.kill(int(line[2]), signal.SIGKILL)
            if who != "saver":
                process.kill()
            told = [words for words in map(str.split, process.stdout) if len(words) > 1]
        store = LocalStore(place, writable=False)
        assert any(not list_held_attempts(store) for _ in poll(WAIT_S))
        called, staged, committed = (
            max([last, *(int(words[1]) for words in told if words[0] == kind)])
            for kind in ("called", "staged", "committed")
        )
        found = number_at(place)
        assert (staged if who == "trainer" else committed) <= found <= max(called, last + 1)
        last = found
    with make() as saving:
        saving.save(place, state_of(last + 1), step=last + 1, replace=True)
    assert ckptfmt.validate(place).warnings == []
    assert number_at(place) == last + 1
