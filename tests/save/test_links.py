"""The trainer's way to its saver: nobody waits for it, and nothing of it stays behind."""

import contextlib
import dataclasses
import os
import pathlib
import queue
import signal
import sys
import threading
import time
from typing import Any

from ckptfmt.commit.waiting import poll
from ckptfmt.delta.policy import DeltaOptions
from ckptfmt.errors import Code, CommitError
from ckptfmt.run.lineage import begin_launch, open_run
from ckptfmt.run.save_job import SaveState
from ckptfmt.saving.links import Lost, ProcessLink, ThreadLink
from ckptfmt.saving.request import dump_request
from ckptfmt.store import open_store
from ckptfmt.store.memory import MemoryStore
from ckptfmt.write.image import Context, plan_image
from ckptfmt.write.slot import Slot
from tests.builders import error_of, origin, read_all
from tests.saver.test_saver import WAIT_S, GateStore, made_of
from tests.write.test_image import fill


class Told:
    """What a saver tells its trainer."""

    def __init__(self) -> None:
        self.messages: queue.Queue[dict[str, Any]] = queue.Queue()
        self.lost: queue.Queue[Lost] = queue.Queue()
        self.slots: list[Slot] = []

    def next(self) -> dict[str, Any]:
        return self.messages.get(timeout=WAIT_S)

    def lose(self, lost: Lost) -> None:
        self.lost.put(lost)


def start(path, told, **options) -> ProcessLink:
    options.setdefault("nice", 0)
    return ProcessLink(
        os.fsencode(path), on_message=told.messages.put, on_lost=told.lose, **options
    )


def hand_over(link: Any, told: Told, number: int, nbytes: int = 4096) -> Slot:
    """Make a slot, keep it, and hand it over."""
    slot = Slot.make(nbytes)
    slot.touch()
    told.slots.append(slot)
    link.add_slot(number, slot)
    return slot


def request_of(store: Any, made: Any) -> dict[str, Any]:
    """Begin a launch, and return the request of its step 1."""
    run = open_run(store)
    launch, _ = begin_launch(store, run)
    save = dataclasses.replace(
        SaveState.in_run(store, run, launch, step=1),
        origin=origin(run_id=run.run_id, launch=launch.launch, nonce=launch.nonce, step=1),
        deadline_s=WAIT_S,
    )
    return dump_request(save, Context.of(made), DeltaOptions())


def send_save(link: Any, told: Told, store: Any) -> None:
    """Fill a slot, and say all that there is to say of it."""
    made = made_of(1)
    image = plan_image(made, block_nbytes=4096)
    slot = hand_over(link, told, 0, image.nbytes)
    slot.view[: image.nbytes] = fill(image, made)[: image.nbytes]
    link.send({"type": "image", "image": image.as_dict()})
    link.send(
        {"type": "save", "number": 1, "slot": 0, "held": False, "request": request_of(store, made)}
    )
    link.send({"type": "complete", "number": 1})


def states(told: Told) -> list[str]:
    """Return the states of a save, until it is over."""
    assert told.next() == {"type": "ready", "slot": 0}
    found = [told.next()["state"]]
    while found[-1] not in ("DONE", "FAILED"):
        found.append(told.next()["state"])
    told.slots.pop().close()
    return found


def status_of(pid: int) -> dict[str, str]:
    lines = pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def is_there(pid: int) -> bool:
    return pathlib.Path(f"/proc/{pid}").exists()


def open_fds() -> list[str]:
    return sorted(path.name for path in pathlib.Path("/proc/self/fd").iterdir())


def test_process_saves_what_is_in_a_slot_and_ends(tmp_path) -> None:
    store, told = open_store(tmp_path, writable=True), Told()
    before = open_fds()
    link = start(tmp_path, told)
    pid = link.pid
    send_save(link, told, store)
    assert states(told) == ["STAGED", "WRITTEN", "COMMITTED", "DONE"]
    assert link.close(WAIT_S, drain_s=WAIT_S)
    assert not is_there(pid)
    assert open_fds() == before
    assert ("tensor", "weights", "w", "global") in read_all(store.at("step-00000001-l0001"))


def test_thread_saves_what_is_in_a_slot_and_ends() -> None:
    store, told = MemoryStore(), Told()
    link = ThreadLink(store, on_message=told.messages.put, on_lost=told.lose)
    send_save(link, told, store)
    assert states(told) == ["STAGED", "WRITTEN", "COMMITTED", "DONE"]
    assert link.close(WAIT_S, drain_s=WAIT_S)


def test_process_is_of_its_own_kind(tmp_path) -> None:
    """A signal to the training's terminal or group, its streams, its directory: none of them is the saver's."""
    told = Told()
    link = start(tmp_path, told, nice=3)
    hand_over(link, told, 0)
    assert told.next() == {"type": "ready", "slot": 0}
    try:
        assert os.getsid(link.pid) == link.pid != os.getsid(0)
        assert os.getpriority(os.PRIO_PROCESS, link.pid) == os.getpriority(os.PRIO_PROCESS, 0) + 3
        place = pathlib.Path(f"/proc/{link.pid}")
        assert {str((place / f"fd/{number}").readlink()) for number in range(3)} == {"/dev/null"}
        assert str((place / "cwd").readlink()) == "/"
        assert "libtorch" not in (place / "maps").read_text()
        ignored = int(status_of(link.pid)["SigIgn"], 16)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            assert ignored >> (number - 1) & 1
    finally:
        assert link.close(WAIT_S, drain_s=WAIT_S)


def test_saver_finds_its_program_wherever_the_trainer_has_it_from(tmp_path, monkeypatch) -> None:
    """Also where the trainer stands in a directory whose modules have the names of ours."""
    for name in ("ckptfmt", "queue", "struct"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(3)\n")
    monkeypatch.chdir(tmp_path)
    told = Told()
    link = start(tmp_path / "run", told)
    hand_over(link, told, 0)
    assert told.next() == {"type": "ready", "slot": 0}
    assert link.close(WAIT_S, drain_s=WAIT_S)


def test_nobody_waits_for_a_saver_that_does_nothing(tmp_path) -> None:
    """However much there is to tell it."""
    told = Told()
    link = start(tmp_path, told)
    hand_over(link, told, 0)
    assert told.next() == {"type": "ready", "slot": 0}
    os.kill(link.pid, signal.SIGSTOP)
    begin_s = time.monotonic()
    for number in range(50):
        link.send({"type": "staged", "number": 1000 + number, "content": bytes(500_000)})
    hand_over(link, told, 1)
    assert time.monotonic() - begin_s < WAIT_S / 2
    os.kill(link.pid, signal.SIGCONT)
    assert told.next() == {"type": "ready", "slot": 1}
    assert link.close(WAIT_S, drain_s=WAIT_S)


def test_close_leaves_a_saver_that_takes_too_long(tmp_path) -> None:
    told = Told()
    before = open_fds()
    link = start(tmp_path, told)
    hand_over(link, told, 0)
    assert told.next() == {"type": "ready", "slot": 0}
    os.kill(link.pid, signal.SIGSTOP)
    begin_s = time.monotonic()
    assert not link.close(0.5, drain_s=0.05)
    assert time.monotonic() - begin_s < WAIT_S / 2
    os.kill(link.pid, signal.SIGCONT)
    assert any(not os.path.exists(f"/proc/{link.pid}") for _ in poll(WAIT_S))  # noqa: PTH110
    told.slots.pop().close()
    assert any(open_fds() == before for _ in poll(WAIT_S))


def test_close_waits_until_the_saver_has_all_that_it_was_told(tmp_path) -> None:
    """Not for what it does with it: a save that is staged goes on without the trainer."""
    store, told = open_store(tmp_path, writable=True), Told()
    link = start(tmp_path, told)
    os.kill(link.pid, signal.SIGSTOP)
    link.send({"type": "staged", "number": 1000, "content": bytes(5_000_000)})
    send_save(link, told, store)
    going_on = threading.Timer(0.1, os.kill, (link.pid, signal.SIGCONT))
    going_on.start()
    if not link.close(0.5, drain_s=WAIT_S):
        with contextlib.suppress(
            ChildProcessError
        ):  # the thread that reaps the process may be first
            os.waitpid(link.pid, 0)
    going_on.join(WAIT_S)
    assert ("tensor", "weights", "w", "global") in read_all(store.at("step-00000001-l0001"))


def test_thread_that_takes_too_long_is_left() -> None:
    inner, told = MemoryStore(), Told()
    store = GateStore(inner)
    link = ThreadLink(store, on_message=told.messages.put, on_lost=told.lose)
    send_save(link, told, inner)
    assert store.begun.wait(WAIT_S)
    assert not link.close(0.5, drain_s=0.05)
    store.gate.set()
    assert states(told)[-1] == "DONE"
    assert link.close(WAIT_S, drain_s=WAIT_S)


def test_saver_that_cannot_be_started_is_named_and_leaves_nothing(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-python"))
    before = open_fds()
    error = error_of(lambda: start(tmp_path, Told()))
    assert (error.code, type(error), error.where) == (
        Code.SAVER_LOST,
        CommitError,
        str(tmp_path / "no-python"),
    )
    assert "thread" in error.remedy
    assert open_fds() == before


def test_run_that_the_saver_cannot_open_is_told(tmp_path) -> None:
    (tmp_path / "file").write_text("no directory")
    told = Told()
    link = start(tmp_path / "file", told)
    broken = told.next()
    assert broken["type"] == "broken"
    assert broken["error"]["code"] in Code.__members__
    told.lost.get(timeout=WAIT_S)
    link.close(WAIT_S, drain_s=WAIT_S)
    assert told.lost.empty()


def test_saver_that_ends_by_itself_is_told_once_and_leaves_nothing(tmp_path) -> None:
    told = Told()
    before = open_fds()
    link = start(tmp_path, told)
    slot = hand_over(link, told, 0)
    assert told.next() == {"type": "ready", "slot": 0}
    slot.close()
    os.kill(link.pid, signal.SIGKILL)
    lost = told.lost.get(timeout=WAIT_S)
    assert (lost.error.code, lost.has_ended) == (Code.SAVER_LOST, True)
    assert f"{link.pid}" in lost.error.detail
    assert "-9" in lost.error.detail
    link.send({"type": "staged", "number": 1, "nbytes": 5})  # is lost, and no error
    assert any(open_fds() == before for _ in poll(WAIT_S))
    assert link.close(WAIT_S, drain_s=WAIT_S)
    assert told.lost.empty()
