"""Copies of a run: a mirror is whole at every moment, runs go on from it, and copies repair each other."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptfmt
from ckptfmt.__main__ import main
from ckptfmt.commit.decision import CONDEMNED, abort, read_register, retire
from ckptfmt.documents.manifest import Manifest, Tombstone, checkpoint_name, index_name
from ckptfmt.documents.run import LAUNCHES, launch_name
from ckptfmt.errors import CkptError, Code, err
from ckptfmt.read.report import Report
from ckptfmt.read.verified_files import VerifiedFile, create_verified
from ckptfmt.read.verify import verify_run
from ckptfmt.run.catalog import Run
from ckptfmt.run.lineage import (
    begin_launch,
    find_head,
    iter_lineage,
    list_checkpoints,
    list_launches,
    open_run,
)
from ckptfmt.run.mirror import MirrorReport, follow_run, mirror_run, promote
from ckptfmt.run.retention import clean_up
from ckptfmt.run.scrub import scrub_checkpoint, scrub_run
from ckptfmt.saving import mirrors
from ckptfmt.store import LocalStore, check_apart
from ckptfmt.store.memory import MemoryStore
from ckptfmt.store.posix import PosixCalls
from ckptfmt.store.protocol import PAGE_NBYTES
from tests.builders import code_of, error_of, known_launches, read_all, snapshot, tensor
from tests.chains import Saving
from tests.run.test_lineage import RunOfSteps
from tests.store.helpers import open_fd_count
from tests.stores.faults import Fault, FaultStore
from tests.stores.hooked import HookedStore, Operation

FLOATS = np.arange(3000, dtype=np.float32)


class Places:
    """A run at home, and an empty place for its mirror, in one memory."""

    def __init__(self) -> None:
        self.memory = MemoryStore()
        self.home = self.memory.at("home")
        self.other = self.memory.at("other")
        self.made = RunOfSteps(self.home)
        self.made.begin()

    def mirror(self, **options: Any) -> MirrorReport:
        return mirror_run(self.home, self.other, **options)

    def damage(self, store: MemoryStore, path: str, *, at: int = -1) -> bytes:
        """Flip a bit of a file; return what it was."""
        content = store.read(path, limit_nbytes=1 << 24)
        broken = bytearray(content)
        broken[at] ^= 1
        store.replace(path, bytes(broken))
        return content


def committed(store: Any) -> set[str]:
    return {entry.name for entry in list_checkpoints(store) if entry.manifest is not None}


def files_of(store: MemoryStore) -> dict[str, bytes]:
    return {path: store.read(path, limit_nbytes=1 << 24) for path in store.list("")}


def check_whole(store: Any) -> None:
    report = Report(target="run", kind="run")
    verify_run(store, report)
    assert [str(one) for one in report.violations] == []


def retire_one(store: Any, name: str) -> None:
    register = read_register(store.at(name))
    assert isinstance(register, Manifest)
    retire(store.at(name), register)


def delta_run(store: Any, *, steps: int = 4) -> Saving:
    """Return a run whose checkpoints are a full one and deltas of it."""
    saving = Saving(snapshot(tensor("w", FLOATS)), store=store)
    for step in range(1, steps + 1):
        saving.save(
            step,
            snapshot(tensor("w", np.where(np.arange(3000) % 7 == step, FLOATS + step, FLOATS))),
        )
    return saving


# --- what is copied -------------------------------------------------------------------------------


def test_a_mirror_has_the_same_files_under_the_same_paths():
    """REQ-RUN-027."""
    places = Places()
    places.made.save(10, 20)
    places.made.begin()
    places.made.save(30)
    Run(places.home).tag(20, "good")

    report = places.mirror()

    assert files_of(places.other) == files_of(places.home)
    assert (report.head, report.current, report.launches) == (checkpoint_name(30, 2), True, (1, 2))
    assert set(report.copied) == committed(places.home)
    assert (report.problems, report.retired) == ((), ())
    again = places.mirror()
    assert (again.copied, again.launches, again.nbytes, again.current) == ((), (), 0, True)


def test_what_comes_later_is_copied_later():
    places = Places()
    for step in (10, 20, 30):
        places.made.save(step)
        assert places.mirror().copied == (checkpoint_name(step, 1),)
        places.made.begin()
        places.made.save(step + 5)
        assert places.mirror().launches == (places.made.launch.launch,)
        places.made.launch = dataclasses.replace(places.made.launch, launch=1)
    assert find_head(places.other) == find_head(places.home)


@pytest.mark.parametrize("kind", ["memory", "local"])
def test_deltas_come_behind_what_they_read_from(kind, tmp_path):
    """REQ-RUN-028: with their closure, and every one loads as at home."""
    home: Any = MemoryStore() if kind == "memory" else LocalStore(tmp_path / "home", writable=True)
    other: Any = (
        MemoryStore() if kind == "memory" else LocalStore(tmp_path / "other", writable=True)
    )
    saving = delta_run(home)
    assert any(entry.references for entry in list_checkpoints(home))

    report = mirror_run(home, other)

    assert len(report.copied) == 4
    check_whole(other)
    for name in committed(home):
        assert str(read_all(other.at(name))) == str(read_all(home.at(name)))
    assert report.head == checkpoint_name(4, saving.launch.launch)


def test_a_run_on_a_mirror_goes_on_bit_for_bit(tmp_path):
    """The same training, killed once: resumed at home, and at the mirror."""

    def train(path, steps):
        rng = np.random.default_rng(0)
        arrays = {"w": rng.standard_normal(500).astype(np.float32)}
        state = ckptfmt.State(weights=arrays, data={"step": 0})
        with ckptfmt.Checkpointer(
            path, state, saver="thread", delta="smallest", every=1
        ) as checkpointer:
            for step in checkpointer.steps(steps):
                arrays["w"] += np.float32(step) * arrays["w"][::-1]
        return arrays["w"].tobytes()

    train(tmp_path / "home", 3)
    assert main(["mirror", str(tmp_path / "home"), str(tmp_path / "other")]) == 0
    assert main(["promote", str(tmp_path / "other")]) == 0

    assert (
        train(tmp_path / "other", 6)
        == train(tmp_path / "home", 6)
        == train(tmp_path / "undisturbed", 6)
    )


def test_damage_at_home_is_told_and_not_copied():
    """REQ-RUN-027: each kind of file."""
    for end in (".safetensors", "-00000.msgpack", "index"):
        places = Places()
        places.made.save(10, 20)
        name = checkpoint_name(20, 1)
        path = next(
            path for path in places.home.list(name) if path.endswith(end) or f"/{end}" in path
        )
        places.damage(places.home, path, at=-3)

        report = places.mirror()

        (problem,) = report.problems
        assert problem.where is not None
        assert problem.where.startswith(name)
        assert problem.code in (Code.BLOCK_DIGEST, Code.DOC_DIGEST, Code.DOC_COMPRESSION), end
        assert committed(places.other) == {checkpoint_name(10, 1)}
        assert not report.current
        assert find_head(places.other)[0] == checkpoint_name(10, 1)


def test_a_header_that_was_changed_at_home_is_not_copied():
    """REQ-RUN-027."""
    places = Places()
    places.made.save(10)
    path = next(path for path in places.home.list("") if path.endswith(".safetensors"))
    places.damage(places.home, path, at=12)
    assert [one.code for one in places.mirror().problems] == [Code.HEADER_DIGEST]


def test_where_nothing_to_go_on_from_is_whole_there_is_no_run_yet():
    """REQ-RUN-029: with run.json a launch there would begin anew."""
    places = Places()
    places.made.save(10)
    places.made.begin(fresh=True)
    places.made.save(20)
    shard = next(
        path for path in places.home.list(checkpoint_name(20, 2)) if path.endswith(".safetensors")
    )
    content = places.damage(places.home, shard)

    assert places.mirror().copied == (checkpoint_name(10, 1),)
    assert code_of(lambda: promote(places.other)) == Code.FILE_MISSING
    assert code_of(lambda: open_run(places.other)) == Code.FILE_MISSING

    places.home.replace(shard, content)
    assert places.mirror().copied == (checkpoint_name(20, 2),)
    assert find_head(places.other) == find_head(places.home)


def test_a_register_that_cannot_be_read_is_told():
    places = Places()
    places.made.save(10, 20)
    places.damage(places.home, f"{checkpoint_name(20, 1)}/manifest.json", at=40)

    report = places.mirror()

    assert [one.where for one in report.problems] == [f"{checkpoint_name(20, 1)}/manifest.json"]
    assert report.copied == (checkpoint_name(10, 1),)


def test_a_delta_on_a_damaged_base_is_not_copied():
    """REQ-RUN-028."""
    home, other = MemoryStore(), MemoryStore()
    delta_run(home)
    base = checkpoint_name(1, 1)
    path = next(path for path in home.list(base) if path.endswith(".safetensors"))
    content = home.read(path, limit_nbytes=1 << 20)
    home.replace(path, content[:-1] + bytes([content[-1] ^ 1]))

    report = mirror_run(home, other)

    assert {one.code for one in report.problems} == {Code.BLOCK_DIGEST, Code.BASE_MISSING}
    assert committed(other) == {
        entry.name
        for entry in list_checkpoints(home)
        if entry.name != base and not entry.references
    }


def test_a_file_of_another_size_at_the_mirror_keeps_the_register_away():
    """REQ-RUN-028."""
    places = Places()
    places.made.save(10)
    path = next(path for path in places.home.list("") if path.endswith(".safetensors"))
    places.other.create(path, [b"short"])

    (problem,) = places.mirror().problems

    assert problem.code == Code.FILE_NBYTES
    assert committed(places.other) == set()


def test_a_base_that_the_mirror_is_about_to_retire_is_none():
    """REQ-RUN-028: what a cleaner at the mirror has condemned may be gone a moment later."""
    home, other = MemoryStore(), MemoryStore()
    saving = delta_run(home, steps=1)
    mirror_run(home, other)
    saving.save(2, snapshot(tensor("w", FLOATS + (np.arange(3000) % 7 == 2))))
    other.create(f"{checkpoint_name(1, 1)}/{CONDEMNED}{'0' * 16}", [b""])

    report = mirror_run(home, other)

    assert [one.code for one in report.problems] == [Code.BASE_MISSING]
    assert committed(other) == {checkpoint_name(1, 1)}


# --- every moment ---------------------------------------------------------------------------------


class Watched(HookedStore):
    """A store that calls a function behind each operation that changes something."""

    def __init__(self, inner: Any, watch: Any) -> None:
        super().__init__(inner)
        self._watch = watch
        self._lock = threading.Lock()

    def after(self, operation: Operation) -> None:
        """Look."""
        if operation.op in ("create", "replace", "delete"):
            with self._lock:
                self._watch(operation)


def resumed(store: Any) -> str:
    """Return what a launch would resume from, or the code of its refusal."""
    copy = MemoryStore.from_snapshot(store.snapshot() if isinstance(store, MemoryStore) else store)
    try:
        launch, _ = begin_launch(copy, open_run(copy))
    except CkptError as error:
        return str(error.code)
    return (
        "fresh" if launch.resume_from is None else f"{launch.chosen_by} {launch.resume_from.name}"
    )


def history() -> tuple[MemoryStore, list[str]]:
    """Return a run with a rollback, a fall-back, retirements; and what it went on from at each moment."""
    made, heads = RunOfSteps(), []

    def note() -> None:
        heads.append(resumed(made.store))

    made.begin()
    for step in (10, 20, 30):
        made.save(step)
        note()
    made.begin()
    note()
    for step in (40, 50):
        made.save(step)
        note()
    made.begin(choose=checkpoint_name(20, 1))
    note()
    made.save(25)
    note()
    made.save(60, launch=2)  # late: launch 2 was taken over
    note()
    made.begin()
    made.save(35)
    note()
    return made.store, heads


def test_at_every_moment_a_mirror_is_the_run_as_it_was_once():
    """REQ-RUN-029: a launch at the mirror goes on from what the home went on from at some moment, or is refused."""
    home, heads = history()
    other = MemoryStore()
    seen: list[str] = []

    def watch(_: Operation) -> None:
        state = other.snapshot()
        seen.append(
            resumed(state) if any(key.startswith(("step-", LAUNCHES)) for key in state) else "empty"
        )

    mirror_run(home, Watched(other, watch))

    assert set(seen) <= {*heads, str(Code.FILE_MISSING)}
    assert seen[-1] == heads[-1]
    # Without its record nobody takes it for a run; with it, it has what the run goes on from.
    assert str(Code.FILE_MISSING) in seen


@given(st.integers(0, 6), st.integers(0, 4))
@settings(max_examples=8, deadline=None)
def test_at_every_moment_of_a_later_copy_too(first: int, second: int) -> None:
    """REQ-RUN-029: whatever the mirror had before, and the home got since."""
    made, other = RunOfSteps(), MemoryStore()
    heads, seen = [], []

    def act(number: int) -> None:
        if made.launch is None or number % 5 == 3:
            made.begin()
        if number % 5 == 4 and committed(made.store):
            made.begin(choose=random.Random(number).choice(sorted(committed(made.store))))
        made.save(number + 1)
        heads.append(resumed(made.store))

    for number in range(first + 1):
        act(number)
    mirror_run(made.store, other)
    for number in range(first + 1, first + second + 2):
        if number % 5 in (3, 4):
            made.begin()
            heads.append(resumed(made.store))
        act(number)
    # What a launch by hand chose is what the home goes on from until that launch has saved.
    heads += [
        f"lineage {one.resume_from.name}"
        for one in known_launches(made.store)
        if one.resume_from is not None
    ]
    mirror_run(made.store, Watched(other, lambda _: seen.append(resumed(other))))

    assert set(seen) <= set(heads)
    assert resumed(other) == resumed(made.store)
    assert committed(other) == committed(made.store)


def test_no_checkpoint_is_committed_before_all_its_files_and_bases():
    """REQ-RUN-028: at every moment each one that has a register is whole."""
    home, other = MemoryStore(), MemoryStore()
    delta_run(home)
    verified = 0

    def watch(operation: Operation) -> None:
        nonlocal verified
        if operation.path.endswith("manifest.json"):
            copy = MemoryStore.from_snapshot(other.snapshot())
            for name in committed(copy):
                assert ckptfmt.validate(copy.at(name)).valid
                verified += 1

    mirror_run(home, Watched(other, watch))

    assert verified == 10


def test_a_launch_that_begins_at_a_mirror_at_any_moment_goes_on_undisturbed():
    """REQ-RUN-028, REQ-RUN-030: it gives up what is half copied, and whoever copies finds out."""
    number = 0
    while True:
        number += 1
        places = Places()
        places.made.save(10)
        places.mirror()
        places.made.save(20)
        places.made.begin()
        places.made.save(30)
        seen: list[Operation] = []
        there = RunOfSteps(places.other)

        def watch(
            operation: Operation, seen: list[Operation] = seen, there: RunOfSteps = there
        ) -> None:
            seen.append(operation)
            if len(seen) == number:  # noqa: B023
                there.begin()
                there.save(99)
                clean_up(there.store, there.run, launch=there.launch.launch)

        with contextlib.suppress(CkptError):
            mirror_run(places.home, Watched(places.other, watch))
        if there.launch is None:
            break
        assert find_head(places.other)[0] == checkpoint_name(99, there.launch.launch)
        check_whole(places.other)
        assert code_of(places.mirror) == Code.HOMES_DIVERGED
    assert number == 10  # nine moments, and one turn without


@pytest.mark.parametrize("applied", [False, True])
@pytest.mark.parametrize("op", ["create", "sync", "read_range"])
def test_whatever_fails_it_is_done_again(op, applied):
    """REQ-RUN-028, REQ-RUN-029: after each failure of either store the next call goes on."""
    number = 0
    while True:
        number += 1
        home, other = MemoryStore(), MemoryStore()
        delta_run(home, steps=2)
        fault = Fault(fail_at=number, operations=frozenset({op}), applied=applied, sticky=True)
        code = Code.STORE_NO_ANSWER if applied else Code.STORE_IO
        broken = FaultStore(home if op == "read_range" else other, fault, code=code)
        try:
            mirror_run(*((broken, other) if op == "read_range" else (home, broken)))
        except CkptError as error:
            assert error.code == code
        if not fault.fired_count:
            break
        assert mirror_run(home, other).current
        check_whole(other)
    assert number > 4


# --- what the home lets go ------------------------------------------------------------------------


def test_a_mirror_keeps_what_the_home_retires_until_it_is_told():
    """REQ-RUN-031."""
    places = Places()
    places.made.save(10, 20, 30)
    places.mirror()
    for step in (10, 20):
        retire_one(places.home, checkpoint_name(step, 1))
    places.made.save(40)

    assert places.mirror().retired == ()
    assert len(committed(places.other)) == 4
    assert find_head(places.other) == find_head(places.home)

    assert set(places.mirror(retire=True).retired) == {
        checkpoint_name(10, 1),
        checkpoint_name(20, 1),
    }
    assert files_of(places.other) == files_of(places.home)


def test_what_is_pinned_at_the_mirror_stays():
    """REQ-RUN-031, REQ-CMT-040."""
    store, other = MemoryStore(), MemoryStore()
    with ckptfmt.Checkpointer(store, ckptfmt.State(data={"a": 1}), saver="inline") as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step=step)
    mirror_run(store, other)
    Run(other).pin(1)
    for step in (1, 2):
        Run(store).delete(step)

    assert mirror_run(store, other, retire=True).retired == (checkpoint_name(2, 1),)
    assert checkpoint_name(1, 1) in committed(other)


def test_nothing_is_retired_as_long_as_the_newest_is_not_there():
    """REQ-RUN-031: its only good copy may be the older one."""
    places = Places()
    places.made.save(10)
    places.mirror()
    places.made.save(20)
    retire_one(places.home, checkpoint_name(10, 1))
    places.damage(
        places.home, next(path for path in places.home.list("") if path.endswith(".safetensors"))
    )

    report = places.mirror(retire=True)

    assert (report.retired, report.current) == ((), False)
    assert committed(places.other) == {checkpoint_name(10, 1)}


def test_a_launch_whose_checkpoint_is_gone_finds_its_tombstone():
    """REQ-RUN-029: launch 2 has saved, and what it began from was retired before the first copy."""
    places = Places()
    places.made.save(10)
    places.made.begin()
    places.made.save(20)
    retire_one(places.home, checkpoint_name(10, 1))

    assert places.mirror().copied == (checkpoint_name(20, 2),)
    assert files_of(places.other) == files_of(places.home)


def test_an_overtaken_launch_leads_no_mirror_back():
    """REQ-RUN-031: what launch 2 was to resume from was retired, so that the lineage of launch 1 goes on."""
    places = Places()
    places.made.save(10)
    places.made.begin()
    places.mirror()
    places.made.save(20, launch=1)
    retire_one(places.home, checkpoint_name(10, 1))
    assert find_head(places.home)[0] == checkpoint_name(20, 1)

    assert places.mirror().retired == (checkpoint_name(10, 1),)
    assert find_head(places.other) == find_head(places.home)

    fresh = places.memory.at("fresh")
    assert mirror_run(places.home, fresh).launches == (1,)
    assert find_head(fresh) == find_head(places.home)


def test_what_is_retired_while_it_is_copied_is_not_there_half():
    """REQ-RUN-028: its files go, its tombstone comes."""
    places = Places()
    places.made.save(10, 20)
    first = checkpoint_name(10, 1)
    retired: list[str] = []

    def watch(operation: Operation) -> None:
        if operation.path.startswith(first) and not retired:
            retired.append(first)
            retire_one(places.home, first)

    report = mirror_run(places.home, Watched(places.other, watch))

    assert (report.copied, report.problems) == ((checkpoint_name(20, 1),), ())
    mirror_run(places.home, places.other)
    assert isinstance(read_register(places.other.at(first)), Tombstone)
    assert len(places.other.list(first)) == 1
    check_whole(places.other)


# --- beside a training ----------------------------------------------------------------------------


@pytest.mark.parametrize("saver", ["inline", "thread", "process"])
def test_a_training_keeps_its_mirrors_up_to_date(saver, tmp_path):
    places = [tmp_path / "one", tmp_path / "two"]
    data = {"step": 0}
    state = ckptfmt.State(weights={"w": FLOATS}, data=data)
    with ckptfmt.Checkpointer(
        tmp_path / "home", state, saver=saver, keep=2, mirrors=places
    ) as checkpointer:
        for step in (1, 2, 3):
            data["step"] = step
            handle = checkpointer.save(step=step)
            assert handle is not None
            handle.wait()

    for place in places:
        assert ckptfmt.Run(place).newest().digest == ckptfmt.Run(tmp_path / "home").newest().digest
        check_whole(LocalStore(place, writable=False))
    assert checkpointer.reports == ()


def test_a_launch_without_a_save_copies_what_an_earlier_one_left(tmp_path):
    """A process that was killed ahead of its mirror; its successor has nothing left to save."""
    home = tmp_path / "home"
    state = ckptfmt.State(weights={"w": FLOATS})
    with ckptfmt.Checkpointer(home, state, saver="inline") as checkpointer:
        checkpointer.save(step=1)
    with ckptfmt.Checkpointer(
        home, state, saver="inline", mirrors=[tmp_path / "mirror"]
    ) as checkpointer:
        checkpointer.restore()
    assert checkpointer.reports == ()
    assert ckptfmt.Run(tmp_path / "mirror").newest().digest == ckptfmt.Run(home).newest().digest
    with ckptfmt.Checkpointer(tmp_path / "none", state, mirrors=[tmp_path / "unused"]) as unused:
        pass  # there is nothing to copy
    assert unused.reports == ()


@pytest.mark.parametrize("retire", [False, True])
def test_a_mirror_follows_a_run_that_saves_and_retires(retire, tmp_path):
    """REQ-RUN-028, REQ-RUN-031: deltas come, and what they no longer read from goes, while it is copied."""
    home, stop = tmp_path / "home", threading.Event()
    other = LocalStore(tmp_path / "other", writable=True)
    problems: list[CkptError] = []
    arrays = {"w": FLOATS.copy()}
    state = ckptfmt.State(weights=arrays)
    delta = {"mode": "smallest", "full_every": 4}
    with ckptfmt.Checkpointer(home, state, saver="thread", keep=1, delta=delta) as checkpointer:
        checkpointer.save(step=1)
        following = threading.Thread(
            target=follow_run,
            args=(LocalStore(home, writable=False), other),
            kwargs={
                "every_s": 0.001,
                "stop": stop,
                "retire": retire,
                "on_report": lambda report: problems.extend(report.problems),
                "on_failure": lambda error, _: problems.append(error),
            },
        )
        following.start()
        try:
            for step in range(2, 25):
                arrays["w"][step] += 1
                checkpointer.save(step=step)
        finally:
            checkpointer.close()
            stop.set()
            following.join()
    report = mirror_run(LocalStore(home, writable=False), other, retire=retire)
    assert report.current
    check_whole(other)
    assert [str(one) for one in problems] == []
    if retire:
        assert committed(other) == committed(LocalStore(home, writable=False))


def test_a_mirror_that_fails_is_told_and_ends_no_training(tmp_path):
    """Its store is broken for a while, and for good: the training's saves are committed at home."""
    for_a_while = FaultStore(MemoryStore(), Fault(fail_at=1, operations=frozenset({"create"})))
    for_good = FaultStore(MemoryStore(), Fault(fail_at=1, sticky=True), code=Code.STORE_ACCESS)
    places: list[Any] = [for_a_while, for_good]
    with ckptfmt.Checkpointer(
        tmp_path, ckptfmt.State(data=1), saver="inline", mirrors=places
    ) as checkpointer:
        checkpointer.save(step=1)

    assert {one.split()[2] for one in checkpointer.reports} == {"STORE_IO", "STORE_ACCESS"}
    assert all(one.startswith("MIRROR_BEHIND: memory:") for one in checkpointer.reports)
    assert ckptfmt.Run(for_a_while).newest().step == 1


def test_a_mirror_that_hangs_holds_up_no_end_of_a_training(tmp_path):
    go_on, begun = threading.Event(), threading.Event()

    def wait(_: Operation) -> None:
        begun.set()
        go_on.wait(60)

    checkpointer = ckptfmt.Checkpointer(
        tmp_path,
        ckptfmt.State(data=1),
        saver="inline",
        deadline_s=0.2,
        mirrors=[Watched(MemoryStore(), wait)],
    )
    with checkpointer:
        checkpointer.save(step=1)
        assert begun.wait(60)
        threading.Timer(1.0, go_on.set).start()
    assert any("by the deadline" in one for one in checkpointer.reports)
    go_on.wait(60)


# --- two homes ------------------------------------------------------------------------------------


def test_two_homes_that_both_went_on_are_a_named_error():
    """REQ-RUN-030: whoever meets first, in either direction; by launches, and by checkpoints."""
    places = Places()
    places.made.save(10)
    places.mirror()
    promote(places.other)
    assert places.other.list_names(LAUNCHES) == ["0001.json", "0002.json"]

    assert code_of(places.mirror) == Code.HOMES_DIVERGED
    assert mirror_run(places.other, places.home).launches == (
        2,
    )  # the old home did nothing: it follows

    RunOfSteps(places.other).begin()
    places.made.begin()
    for one, other in ((places.home, places.other), (places.other, places.home)):
        error = error_of(lambda one=one, other=other: mirror_run(one, other))
        assert (error.code, error.where) == (Code.HOMES_DIVERGED, f"{LAUNCHES}/{launch_name(3)}")


def test_a_home_that_saved_behind_its_mirrors_back_is_no_mirror_of_it():
    """REQ-RUN-030: the same launches, and a checkpoint that the other one doesn't have."""
    places = Places()
    places.made.save(10)
    places.mirror()
    promote(places.other)
    places.made.save(20)

    error = error_of(lambda: mirror_run(places.other, places.home))
    assert (error.code, error.where) == (Code.HOMES_DIVERGED, checkpoint_name(20, 1))


def test_another_run_is_refused():
    places = Places()
    RunOfSteps(places.other).begin()
    assert code_of(places.mirror) == Code.RUN_MISMATCH
    places.other.delete("run.json")
    assert code_of(places.mirror) == Code.RUN_MISMATCH
    lone = places.memory.at("lone")
    ckptfmt.save(lone, ckptfmt.State(data=1), step=1)
    assert code_of(lambda: mirror_run(places.home, lone)) == Code.CHECKPOINT_EXISTS
    assert code_of(lambda: mirror_run(lone, places.other)) == Code.FILE_MISSING


def test_promotion_takes_over_the_old_home_and_its_last_saves():
    """REQ-RUN-032: who still trains there is fenced off, and has lost nothing."""
    places = Places()
    places.made.save(10)
    places.mirror()
    places.made.save(20)

    report = promote(places.other, places.home)

    assert (report.name, report.fenced, report.launch) == (checkpoint_name(20, 1), 2, 3)
    assert list_launches(places.home)[-1].launch == 2
    assert find_head(places.other)[0] == checkpoint_name(20, 1)
    assert mirror_run(places.other, places.home).current


def test_promotion_says_what_it_passes_over_and_refuses_where_nothing_is():
    """REQ-RUN-032."""
    places = Places()
    places.mirror()
    assert code_of(lambda: promote(places.other)) == Code.NOT_COMMITTED
    places.made.save(10, 20)
    places.mirror()
    newest = checkpoint_name(20, 1)
    places.damage(
        places.other,
        next(path for path in places.other.list(newest) if path.endswith(".safetensors")),
    )

    report = promote(places.other)

    assert report.name == checkpoint_name(10, 1)
    assert newest in report.passed_over[0]
    assert known_launches(places.other)[-1].chosen_by == "fallback"


def test_a_launch_at_the_mirror_gives_up_what_was_half_copied():
    """REQ-RUN-028: a copy that comes late finds the abort record."""
    places = Places()
    places.made.save(10)
    places.mirror()
    places.made.save(20)
    name = checkpoint_name(20, 1)
    abort(
        places.other.at(name), run_id=places.made.run.run_id, launch=1, step=20, reason="unfinished"
    )

    (problem,) = places.mirror().problems
    assert problem.code in (Code.CHECKPOINT_ABORTED, Code.COMMIT_CONFLICT)


# --- following ------------------------------------------------------------------------------------


def test_following_copies_what_comes_and_survives_failures():
    places = Places()
    places.made.save(10)
    fault = Fault(fail_at=3, operations=frozenset({"create"}))
    other, stop = FaultStore(places.other, fault, code=Code.STORE_NO_ANSWER), threading.Event()
    failing = FaultStore(other, Fault(fail_at=2, operations=frozenset({"list_names"})))
    copied: list[str] = []
    failures: list[CkptError] = []

    def tell(report: MirrorReport) -> None:
        copied.extend(report.copied)
        places.made.save(10 * len(copied) + 10)
        if len(copied) == 3:
            stop.set()

    follow_run(
        places.home,
        failing,
        every_s=0.001,
        stop=stop,
        on_report=tell,
        on_failure=lambda error, _: failures.append(error),
    )

    assert copied == [checkpoint_name(step, 1) for step in (10, 20, 30)]
    assert [error.code for error in failures] == [Code.STORE_IO]


def test_following_ends_in_the_middle_of_a_file():
    places = Places()
    places.made.save(10)
    stop = threading.Event()
    reports: list[MirrorReport] = []

    def watch(operation: Operation) -> None:
        if operation.path.endswith("0001.json"):
            stop.set()

    follow_run(
        places.home,
        Watched(places.other, watch),
        every_s=1000,
        stop=stop,
        on_report=reports.append,
        on_failure=lambda *_: None,
    )

    assert (reports[0].stopped, reports[0].copied) == (True, ())
    assert places.mirror().current


def test_what_does_not_pass_ends_following():
    places = Places()
    places.made.save(10)
    places.mirror()
    promote(places.other)
    stop = threading.Event()

    def follow() -> None:
        follow_run(
            places.home,
            places.other,
            every_s=1,
            stop=stop,
            on_report=lambda _: None,
            on_failure=lambda *_: None,
        )

    assert code_of(follow) == Code.HOMES_DIVERGED


# --- scrubbing ------------------------------------------------------------------------------------


def mirrored() -> tuple[MemoryStore, MemoryStore]:
    """Return a run with deltas and a label, and its mirror."""
    memory = MemoryStore()
    home, other = memory.at("home"), memory.at("other")
    delta_run(home, steps=2)
    Run(home).tag(1, "good")
    mirror_run(home, other)
    return home, other


def paths_of_a_run() -> list[str]:
    return sorted(mirrored()[0].list(""))


def kind_of(path: str) -> str:
    return next(
        kind
        for kind in (
            "run.json",
            LAUNCHES,
            "labels",
            "manifest",
            "index",
            "parts/",
            ".safetensors",
            ".pack",
        )
        if kind in path
    )


KINDS = sorted(map(kind_of, paths_of_a_run()))


def test_a_run_has_files_of_each_kind():
    assert {
        "run.json",
        LAUNCHES,
        "labels",
        "manifest",
        "index",
        "parts/",
        ".safetensors",
        ".pack",
    } == set(KINDS)


@pytest.mark.parametrize("how", ["changed", "cut", "deleted"])
@pytest.mark.parametrize("place", ["home", "other"])
def test_a_damaged_file_of_each_kind_is_rewritten_from_the_other_copy(place, how):
    """REQ-RUN-033: both ways, and nothing else is touched."""
    for number in range(len(KINDS)):
        home, other = mirrored()
        store = home if place == "home" else other
        path = sorted(store.list(""))[number]
        if how == "deleted" and kind_of(path) == "labels":
            continue  # what nobody said here isn't missed
        before = files_of(store)
        content = before[path]
        changed = content[:-3] + bytes([content[-3] ^ 1]) + content[-2:]
        store.delete(path)
        if how != "deleted":
            store.create(path, [content[:-3] if how == "cut" else changed])
        broken = Watched(
            store,
            lambda operation, path=path: operation.path == path or pytest.fail(str(operation)),
        )
        copies: list[Any] = [broken, other] if place == "home" else [home, broken]

        told = scrub_run([home, other], dry_run=True)
        assert [(one.copy, one.path, one.repaired) for one in told.damages] == [
            (store.name, path, False)
        ]
        assert not told.whole
        report = scrub_run(copies)

        assert report.whole, path
        assert [(one.copy, one.path) for one in report.damages] == [(store.name, path)]
        assert files_of(store) == before
        assert not scrub_run([home, other]).damages


def test_a_file_that_somebody_writes_meanwhile_is_not_deleted():
    """REQ-RUN-033: a mirror is copied beside the scrub; what was missing a moment ago is there, and whole."""
    home, other = mirrored()
    path = next(path for path in home.list("") if path.endswith(".safetensors"))
    content = other.read(path, limit_nbytes=1 << 20)
    other.delete(path)

    def watch(operation: Operation) -> None:
        if (
            operation.path == path
            and operation.op in ("read_range", "nbytes")
            and path not in other.list("")
        ):
            other.create(path, [content])

    class Beside(Watched):
        def after(self, operation: Operation) -> None:
            """Write it as soon as it was found to be missing."""
            self._watch(operation)

    writes: list[Operation] = []
    report = scrub_run([home, Watched(Beside(other, watch), writes.append)])

    assert report.whole
    assert not [one for one in writes if one.op == "delete"]
    assert other.read(path, limit_nbytes=1 << 20) == content


def test_copies_repair_each_other():
    """REQ-RUN-033: each has something that the other lacks."""
    home, other = mirrored()
    before = files_of(home)
    shards = [path for path in home.list("") if path.endswith((".safetensors", ".pack"))]
    for store, path in zip((home, other), shards, strict=False):
        store.replace(path, before[path][:-1] + bytes([before[path][-1] ^ 1]))

    assert scrub_run([home, other]).whole
    assert files_of(home) == files_of(other) == before


def test_what_no_copy_has_whole_is_reported_and_left_as_it_is():
    """REQ-RUN-033, REQ-RUN-034."""
    home, other = mirrored()
    path = next(path for path in home.list("") if path.endswith(".safetensors"))
    for store in (home, other):
        content = store.read(path, limit_nbytes=1 << 20)
        store.replace(path, content[:-1] + bytes([content[-1] ^ 1]))
    before = files_of(home)

    report = scrub_run([home, other])

    assert [(one.path, one.repaired_from) for one in report.damages] == [(path, None)] * 2
    assert files_of(home) == before
    assert {one.error.code for one in report.damages} == {Code.BLOCK_DIGEST}


def test_a_register_is_not_rewritten_over_files_that_cannot_be_repaired():
    """REQ-RUN-034."""
    home, other = mirrored()
    name = checkpoint_name(1, 1)
    shard = next(path for path in home.list(name) if path.endswith(".safetensors"))
    for store in (home, other):
        content = store.read(shard, limit_nbytes=1 << 20)
        store.replace(shard, content[:-1] + bytes([content[-1] ^ 1]))
    home.delete(f"{name}/manifest.json")

    assert not scrub_run([home, other]).whole
    assert read_register(home.at(name)) is None


def test_what_was_retired_is_not_brought_back():
    """REQ-RUN-034: in one copy it is retired, in the other one it is whole."""
    home, other = mirrored()
    name = checkpoint_name(2, 1)
    retire_one(home, name)
    tombstone = home.read(f"{name}/manifest.json", limit_nbytes=1 << 16)
    assert scrub_run([home, other]).damages == ()
    home.replace(f"{name}/manifest.json", tombstone[:-4])

    (damage,) = scrub_run([home, other]).damages

    assert (damage.path, damage.repaired) == (f"{name}/manifest.json", False)
    assert home.list(name) == [f"{name}/manifest.json"]


@pytest.mark.parametrize("how", ["directory", "register and index"])
@pytest.mark.parametrize(("place", "step"), [("home", 2), ("home", 1), ("other", 1)])
def test_a_checkpoint_that_a_copy_lost_is_reported(place, step, how):
    """REQ-RUN-034: a scrub doesn't write its register; a copy in the other direction brings it back."""
    home, other = mirrored()
    name = checkpoint_name(step, 1)
    store = home if place == "home" else other
    lost = [
        path
        for path in store.list(name)
        if how == "directory" or "manifest" in path or "index" in path
    ]
    for path in lost:
        store.delete(path)
    before = files_of(store)

    report = scrub_run([home, other])

    assert [(one.copy, one.path, one.repaired_from) for one in report.damages] == [
        (store.name, f"{name}/manifest.json", None)
    ]
    assert not report.whole
    (damage,) = report.damages
    assert damage.error.code == Code.FILE_MISSING
    assert f"ckptfmt mirror {(other if place == 'home' else home).name} {store.name}" in str(
        damage.error.remedy
    )
    assert files_of(store) == before
    mirror_run(*((other, home) if place == "home" else (home, other)))
    assert scrub_run([home, other]).damages == ()


def test_a_mirror_that_is_behind_is_whole():
    """What its home committed since the last copy isn't lost there."""
    home, other = mirrored()
    made = RunOfSteps(home.at(""))
    made.begin()
    made.save(3)
    assert scrub_run([home, other]).damages == ()
    (damage,) = scrub_run([other, home]).damages  # of the copy named first, more is wanted
    assert (damage.copy, damage.path) == (other.name, f"{checkpoint_name(3, 2)}/manifest.json")


def test_a_checkpoint_committed_during_a_scrub_is_not_lost(monkeypatch):
    """A mirror follows the run: it may have a checkpoint that wasn't at home a moment before."""
    home, other = mirrored()

    def list_before(store, *arguments, **options):
        entries = list_checkpoints(store, *arguments, **options)
        return entries[:1] if store is home else entries

    monkeypatch.setattr("ckptfmt.run.scrub.list_checkpoints", list_before)
    assert scrub_run([home, other]).damages == ()


def test_a_checkpoint_named_alone_must_be_there():
    """A scrub of one checkpoint says nothing good about a place without it."""
    home, other = mirrored()
    name = checkpoint_name(2, 1)
    copies = [home.at(name), other.at(name)]
    assert scrub_checkpoint(copies).damages == ()
    register = read_register(copies[1])
    assert isinstance(register, Manifest)
    for path in ("manifest.json", index_name(register.origin.attempt)):
        copies[0].delete(path)
    for order in (copies, copies[::-1]):
        (damage,) = scrub_checkpoint(order).damages
        assert (damage.copy, damage.path, damage.repaired) == (
            copies[0].name,
            "manifest.json",
            False,
        )
        assert damage.error.code == Code.FILE_MISSING
    home, other = mirrored()
    retire_one(home, name)
    copies = [home.at(name), other.at(name)]
    (damage,) = scrub_checkpoint(copies).damages
    assert (damage.error.code, damage.repaired) == (Code.CHECKPOINT_RETIRED, False)
    assert isinstance(read_register(copies[0]), Tombstone)
    assert scrub_checkpoint(copies[::-1]).damages == ()


def test_copies_that_went_apart_do_not_repair_each_other():
    """REQ-RUN-030, REQ-RUN-033."""
    home, other = mirrored()
    RunOfSteps(home).begin()
    RunOfSteps(other).begin()
    assert code_of(lambda: scrub_run([home, other])) == Code.HOMES_DIVERGED
    home.replace(f"{LAUNCHES}/0002.json", b"{")
    RunOfSteps(MemoryStore())
    made = RunOfSteps(home.at(""))
    made.launch = dataclasses.replace(known_launches(other)[-1], nonce="f" * 32)
    made.save(30, launch=2)
    place = home.at(checkpoint_name(30, 2))
    register = read_register(place)
    assert isinstance(register, Manifest)
    assert register.origin.nonce != known_launches(other)[-1].nonce
    assert code_of(lambda: scrub_run([home, other])) == Code.HOMES_DIVERGED


def test_a_scrub_that_fails_in_between_is_done_again():
    """REQ-RUN-033: no copy has lost what it had whole."""
    number = 0
    while True:
        number += 1
        home, other = mirrored()
        before = files_of(home)
        for path in before:
            home.replace(path, before[path][:-2])
        fault = Fault(
            fail_at=number,
            operations=frozenset({"create", "replace", "delete", "sync"}),
            sticky=True,
        )
        broken = FaultStore(home, fault)
        if fault.fail_at > 40:
            break
        try:
            scrub_run([broken, other])
        except CkptError as error:
            assert error.code == Code.STORE_IO
        assert files_of(other) == before
        if not fault.fired_count:
            break
        scrub_run([home, other])
        scrub_run([home, other])
        assert {
            path: content for path, content in files_of(home).items() if "labels" not in path
        } == {path: content for path, content in before.items() if "labels" not in path}
    assert number > 8


# --- processes ------------------------------------------------------------------------------------


def test_a_mirror_that_is_killed_again_and_again_becomes_whole(tmp_path):
    """REQ-RUN-028, REQ-RUN-029: real processes, killed at any moment."""
    home = LocalStore(tmp_path / "home", writable=True)
    saving = Saving(snapshot(tensor("w", np.arange(60_000, dtype=np.float32))), store=home)
    for step in range(1, 6):
        saving.save(step, snapshot(tensor("w", np.arange(60_000, dtype=np.float32) + step)))
    other = tmp_path / "other"
    command = [
        sys.executable,
        "-m",
        "ckptfmt",
        "mirror",
        str(tmp_path / "home"),
        str(other),
        "--json",
    ]
    pause, kills, rng = 0.1, 0, random.Random(1)
    done = None
    while done is None or done.returncode != 0:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        try:
            out, _ = process.communicate(timeout=pause * rng.random())
            done = subprocess.CompletedProcess(command, process.returncode, out)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.communicate()
            kills += 1
            pause *= 1.15
            if (other / "run.json").exists():
                names = {
                    entry.name
                    for entry in iter_lineage(list_launches(home), list_checkpoints(home))
                }
                assert find_head(LocalStore(other, writable=False))[0] in names
                for name in committed(LocalStore(other, writable=False)):
                    assert ckptfmt.validate(other / name).valid
    assert kills > 5
    assert json.loads(done.stdout)["current"] is True
    check_whole(LocalStore(other, writable=False))
    assert committed(LocalStore(other, writable=False)) == committed(home)
    assert not [path for path in other.rglob(".tmp-*") if path.parent.name.startswith("step-")]


def test_following_ends_with_a_signal(tmp_path):
    with ckptfmt.Checkpointer(
        tmp_path / "home", ckptfmt.State(data={"a": 1}), saver="inline"
    ) as checkpointer:
        checkpointer.save(step=1)
    command = [
        sys.executable,
        "-m",
        "ckptfmt",
        "mirror",
        str(tmp_path / "home"),
        str(tmp_path / "other"),
        "--follow",
    ]
    with subprocess.Popen(
        [*command, "--every", "3600"], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("mirrored")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_commands_say_what_they_did(tmp_path, capsys):
    home, other = str(tmp_path / "home"), str(tmp_path / "other")

    def said(*arguments: str, code: int = 0) -> Any:
        assert main([*arguments, "--json"]) == code
        return json.loads(capsys.readouterr().out)

    with ckptfmt.Checkpointer(home, ckptfmt.State(data={"a": 1}), saver="inline") as checkpointer:
        for step in (1, 2):
            checkpointer.save(step=step)
    assert said("mirror", home, other)["copied"] == [checkpoint_name(2, 1), checkpoint_name(1, 1)]
    assert main(["mirror", home, other]) == 0
    assert f"to {other}, which has the newest: {checkpoint_name(2, 1)}" in capsys.readouterr().out

    index = next((tmp_path / "other" / checkpoint_name(1, 1)).glob("index-*"))
    shutil.copy(index, tmp_path / "whole")
    index.write_bytes(index.read_bytes()[:-1])
    assert main(["scrub", home, "--with", other, "--dry-run"]) == 1
    assert "can be rewritten" in capsys.readouterr().out
    assert main(["scrub", other]) == 1
    assert "beyond repair" in capsys.readouterr().out
    assert said("scrub", home, "--with", other)["damages"][0]["repaired"] is True
    assert index.read_bytes() == (tmp_path / "whole").read_bytes()
    assert main(["scrub", home, "--with", other]) == 0
    assert capsys.readouterr().out.startswith("whole")

    gone = tmp_path / "home" / checkpoint_name(2, 1)
    gone.rename(tmp_path / "gone")
    for name in ("repair", "scrub"):
        assert main([name, home, "--with", other]) == 1
        out = capsys.readouterr().out
        assert "beyond repair" in out
        assert f"ckptfmt mirror {other} {home}" in out
    (tmp_path / "gone").rename(gone)

    assert main(["promote", other, "--home", home]) == 0
    assert f"promoted  {other}: launch 3, from {checkpoint_name(2, 1)}" in capsys.readouterr().out
    assert said("mirror", home, other, code=2)["error"]["code"] == "HOMES_DIVERGED"
    assert said("mirror", other, home)["launches"] == [3]
    assert said("promote", other)["fenced"] is None
    assert said("mirror", str(tmp_path), other, code=2)["error"]["code"] == "ARGUMENT"
    assert not (tmp_path / "third").exists()
    assert (
        said("scrub", home, "--with", str(tmp_path / "third"), code=2)["error"]["code"]
        == "FILE_MISSING"
    )
    assert not (tmp_path / "third").exists()


def test_copies_and_checks_of_a_cold_run_leave_the_page_cache_to_the_training(
    tmp_path: pathlib.Path,
) -> None:
    """Bytes that are read once, to be compared, would push out those that the training reads again and again."""
    run, calls = tmp_path / "run", PosixCalls()
    state = ckptfmt.State(weights={"w": np.random.default_rng(1).random(8 << 17)})  # 8 MiB
    with ckptfmt.Checkpointer(run, state, resume="fresh") as checkpointer:
        checkpointer.step = 1
        checkpointer.save()
    (shard,) = run.glob("step-*/weights-*")

    def cached_nbytes() -> int:
        with shard.open("rb") as file:
            return calls.cached_page_count(file.fileno(), 0, shard.stat().st_size) * PAGE_NBYTES

    with shard.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    try:
        if cached_nbytes():
            pytest.skip("this file system drops nothing")
    except OSError:
        pytest.skip("this kernel has no cachestat")
    home = LocalStore(run, writable=True)
    assert mirror_run(home, LocalStore(tmp_path / "copy", writable=True)).current
    assert cached_nbytes() < 1 << 20
    assert not scrub_run([home]).damages
    assert cached_nbytes() < 1 << 20


def test_whatever_ends_a_copy_beside_the_training_is_reported(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library may raise what is no Exception; the thread that copies goes on."""

    class Panic(BaseException):
        pass

    def panic_once(*_: Any, **__: Any) -> Any:
        monkeypatch.setattr(mirrors, "mirror_run", mirror_run)
        raise Panic

    monkeypatch.setattr(mirrors, "mirror_run", panic_once)
    state = ckptfmt.State(weights={"w": np.zeros(9)}, rng=False)
    with ckptfmt.Checkpointer(
        tmp_path / "run", state, saver="thread", mirrors=[tmp_path / "copy"]
    ) as checkpointer:
        checkpointer.save(step=1)
    assert [
        report for report in checkpointer.reports if "MIRROR_BEHIND" in report and "Panic" in report
    ]
    assert len(list_checkpoints(LocalStore(tmp_path / "copy", writable=False))) == 1


@pytest.mark.parametrize(
    "pair", [("run", "run"), ("run", "link"), ("run", "run/copy"), ("run/copy", "run")]
)
def test_a_run_is_no_copy_of_itself(tmp_path: pathlib.Path, pair: tuple[str, str]) -> None:
    """Nor is what lies within it: a mirror of itself would report that it has everything."""
    (tmp_path / "run" / "copy").mkdir(parents=True)
    (tmp_path / "link").symlink_to("run")
    one, other = (LocalStore(tmp_path / name, writable=True) for name in pair)
    assert code_of(lambda: mirror_run(one, other)) == Code.ARGUMENT
    assert code_of(lambda: promote(other, one)) == Code.ARGUMENT
    assert code_of(lambda: scrub_run([one, other])) == Code.ARGUMENT
    check_apart(
        [one, LocalStore(tmp_path / "running", writable=True), MemoryStore(), MemoryStore()]
    )


def ahead_threads() -> list[str]:
    return [
        thread.name for thread in threading.enumerate() if thread.name.startswith("ckptfmt-ahead")
    ]


@pytest.mark.parametrize("code", [Code.NO_SPACE, Code.STORE_NO_ANSWER])
def test_a_copy_that_fails_lets_go_at_once_of_the_file_that_it_reads(
    tmp_path: pathlib.Path, code: Code
) -> None:
    """Found in a saver, which doesn't look for garbage during a save: each try left a file open, and two threads."""
    (tmp_path / "a").write_bytes(bytes(24 << 20))
    spans: Any = [(begin, 4 << 20, bytes) for begin in range(0, 24 << 20, 4 << 20)]
    file = VerifiedFile(path="a", nbytes=24 << 20, spans=spans)
    meanwhile = []

    class Refusing(MemoryStore):
        def create(self, path: str, chunks: Any) -> None:
            next(iter(chunks))
            meanwhile.append((open_fd_count() - fd_count, len(ahead_threads())))
            raise err(code, "", where=path)

    home, fd_count = LocalStore(tmp_path, writable=False), open_fd_count()
    try:
        create_verified(Refusing(), file, lambda: file.iter_chunks(home))
    except CkptError as error:  # with its traceback, as a report keeps it
        assert error.code == code
        assert open_fd_count() == fd_count
        assert not ahead_threads()
    else:
        pytest.fail("it was to fail")
    assert meanwhile == [(1, 2)] * (
        3 if code == Code.STORE_NO_ANSWER else 1
    )  # never those of the try before, too
