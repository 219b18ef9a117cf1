"""Checkpoints whose files stay in caches for a while: saved, brought home by the next launch, passed over, retired."""

from __future__ import annotations

import os
import pathlib
import shutil
import signal
import threading
from typing import Any

import numpy as np
import pytest

import ckptfmt
from ckptfmt.checkpointer import Checkpointer
from ckptfmt.commit.waiting import poll
from ckptfmt.documents.manifest import Manifest, checkpoint_name
from ckptfmt.errors import CkptError, Code
from ckptfmt.run.lineage import list_checkpoints
from ckptfmt.run.mirror import mirror_run
from ckptfmt.run.node_cache import Cache, CachedPart, NodeCache
from ckptfmt.run.scrub import scrub_run
from ckptfmt.saving import mirrors
from ckptfmt.store import LocalStore
from ckptfmt.store.memory import MemoryStore
from ckptfmt.store.protocol import Store
from tests.builders import code_of, error_of
from tests.interface.test_group import Allgather, run_writers
from tests.save.test_node_cache import Outage, cached, committed, died, nbytes_of, spoil
from tests.save.test_saves import Run, is_whole
from tests.saver.test_saver import WAIT_S
from tests.stores.hooked import HookedStore, Operation


def durabilities(store: Store) -> dict[int, str]:
    entries = list_checkpoints(store)
    return {
        entry.step: entry.register.durability
        for entry in entries
        if isinstance(entry.register, Manifest)
    }


def shards(store: Store, step: int, launch: int = 1) -> list[str]:
    return [
        path for path in store.list(checkpoint_name(step, launch)) if path.endswith(".safetensors")
    ]


def save_all(run: Run, *steps: int) -> list[Any]:
    return [run.save(step).wait(timeout_s=WAIT_S) for step in steps]


def test_of_so_many_saves_one_goes_home(tmp_path: pathlib.Path) -> None:
    """REQ-CMT-048: of the others home gets documents; the handle says what each one survives."""
    home = MemoryStore()
    with Run(home, cache=tmp_path, upload_every=3) as run:
        reports = save_all(run, 1, 2, 3)
        assert [report.durability for report in reports] == ["home", "node", "node"]
        assert durabilities(home) == {1: "home", 2: "node", 3: "node"}
        assert [bool(shards(home, step)) for step in (1, 2, 3)] == [True, False, False]
        assert {path.partition("/")[0] for path in cached(tmp_path, ".settled")} == {
            checkpoint_name(1, 1)
        }
        (last,) = save_all(run, 4)
        assert last.durability == "home"
    assert is_whole(home, 4)


def test_what_was_asked_to_go_home_does(tmp_path: pathlib.Path) -> None:
    home = MemoryStore()
    with Run(home, cache=tmp_path, upload_every=100) as run:
        save_all(run, 1, 2)
        run.set(3)
        handle = run.checkpointer.save(durability="home")
        assert handle is not None
        report = handle.wait(timeout_s=WAIT_S)
        assert report is not None
        assert report.durability == "home"
        assert code_of(lambda: run.checkpointer.save(4, durability="node")) == Code.ARGUMENT
    assert shards(home, 3)


def test_the_last_step_goes_home(tmp_path: pathlib.Path) -> None:
    home = MemoryStore()
    state = ckptfmt.State(weights={"w": np.zeros(10)}, rng=False)
    with Checkpointer(
        home, state, every=1, cache=tmp_path, upload_every=100, saver="thread"
    ) as checkpointer:
        for _ in checkpointer.steps(4):
            pass
    assert durabilities(home) == {1: "home", 4: "home"}


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"upload_every": 2}, r"Pass copies=\[ckptfmt.Cache"),
        ({"cache": "x", "upload_every": 0}, "1 brings every save home"),
        ({"cache": "x", "cache_nbytes": 0}, "a positive integer, or None"),
    ],
)
def test_what_caches_can_not_do_is_refused(options: dict[str, Any], remedy: str) -> None:
    with pytest.raises(CkptError, match=remedy) as caught:
        Checkpointer(MemoryStore(), **options)
    assert caught.value.code == Code.ARGUMENT


# --- the end --------------------------------------------------------------------------------------


def test_close_brings_the_last_save_home(tmp_path: pathlib.Path) -> None:
    """REQ-RUN-035: each process its own files, and none of an older save."""
    home, gather = MemoryStore(), Allgather(2)
    before: list[bool] = []

    def body(writer: int) -> None:
        cache = tmp_path / str(writer)
        with Run(home, writer=writer, allgather=gather, cache=cache, upload_every=100) as run:
            save_all(run, 1, 2, 3)
            gather.of(writer)(b"")
            before.append(bool(shards(home, 3)))
            gather.of(writer)(b"")

    assert run_writers(2, body) == [None, None]
    assert before == [False, False]
    assert is_whole(home, 3)
    assert not shards(home, 2)
    assert durabilities(home) == {1: "home", 2: "node", 3: "node"}
    assert ckptfmt.validate(home).valid


def test_a_training_that_ends_with_an_error_leaves_its_last_save_to_the_next_start(
    tmp_path: pathlib.Path,
) -> None:
    home = MemoryStore()
    run = Run(home, cache=tmp_path, upload_every=100)

    def train() -> None:
        with run.checkpointer:
            save_all(run, 1, 2)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    assert not shards(home, 2)
    with Run(home, cache=tmp_path, resume="auto") as again:
        assert again.checkpointer.step == 2


def test_what_cannot_be_brought_home_in_the_end_is_reported(tmp_path: pathlib.Path) -> None:
    home = Outage()
    run = Run(home, cache=tmp_path, upload_every=100)
    save_all(run, 1, 2)
    with home.down():
        run.close()
    (sentence,) = run.checkpointer.reports
    assert sentence.startswith(f"CACHE_UNFINISHED: {checkpoint_name(2, 1)}")
    assert not shards(home, 2)


def test_the_deadline_of_close_holds_for_bringing_home(tmp_path: pathlib.Path) -> None:
    home = MemoryStore()
    with Run(home, cache=tmp_path, upload_every=100) as run:
        save_all(run, 1)
        run.save(2).wait_over(WAIT_S)
        run.checkpointer._saves._bring_last_home(0.0)  # a moment long ago
        assert "SAVE_PENDING" in run.checkpointer.reports[-1]
        assert not shards(home, 2)


class Slow(HookedStore):
    """A home that takes a second to create a file, once it is told so."""

    def __init__(self) -> None:
        super().__init__(MemoryStore())
        self.is_slow = threading.Event()
        self.ended = threading.Event()

    def before(self, operation: Operation) -> None:
        if self.is_slow.is_set() and operation.op == "create":
            self.ended.wait(WAIT_S)


def test_close_does_not_wait_for_a_home_that_does_not_answer(tmp_path: pathlib.Path) -> None:
    """An object store may take ten minutes for a part; the next start finds the files in the cache."""
    home = Slow()
    run = Run(home, cache=tmp_path, upload_every=100, deadline_s=1.0)
    with run:
        save_all(run, 1, 2)
        home.is_slow.set()
    home.ended.set()
    assert "SAVE_PENDING" in run.checkpointer.reports[-1]
    assert not shards(home, 2)


def test_what_close_brings_home_is_mirrored(tmp_path: pathlib.Path) -> None:
    """The mirror was told of it at its commit, when its files were in the cache."""
    home, mirror = MemoryStore(), MemoryStore()
    with Run(home, cache=tmp_path, upload_every=100, mirrors=[mirror]) as run:
        save_all(run, 1, 2)
        following = run.checkpointer._saves._mirrors
        assert following is not None
        for _ in poll(WAIT_S):
            if checkpoint_name(2, 1) in following._in_caches:
                break
        assert durabilities(mirror) == {1: "home"}
    assert is_whole(mirror, 2)
    assert run.checkpointer.reports == ()


def test_what_other_processes_have_not_brought_home_is_reported_by_the_mirror(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirrors, "_OTHERS_S", 0.0)
    home, mirror, gather = MemoryStore(), MemoryStore(), Allgather(2)
    told: list[tuple[str, ...]] = []

    def body(writer: int) -> None:
        options: dict[str, Any] = {"mirrors": [mirror]} if writer == 0 else {}
        run = Run(
            home,
            writer=writer,
            allgather=gather,
            cache=tmp_path / str(writer),
            upload_every=100,
            **options,
        )
        with run:
            save_all(run, 1, 2)
            gather.of(writer)(b"")
            if writer == 1:
                gather.of(writer)(b"")  # process 0 has ended
        if writer == 0:
            told.append(run.checkpointer.reports)
            gather.of(writer)(b"")

    assert run_writers(2, body) == [None, None]
    ((sentence,),) = told
    assert sentence.startswith(f"MIRROR_BEHIND: {checkpoint_name(2, 1)} isn't at home yet")
    assert is_whole(home, 2)
    assert durabilities(mirror) == {1: "home"}


# --- the next launch ------------------------------------------------------------------------------


def one_that_died(tmp_path: pathlib.Path, **options: Any) -> tuple[MemoryStore, pathlib.Path]:
    """Return what is left of a trainer that has committed steps 1 to 3, the last two into its cache alone."""
    home = Outage()
    with Run(home, cache=tmp_path / "cache", upload_every=3, **options) as run:
        save_all(run, 1, 2, 3)
        left, (copy,) = died(home, [tmp_path / "cache"])
    return left, copy


def test_a_launch_goes_on_from_the_newest_in_its_cache(tmp_path: pathlib.Path) -> None:
    """REQ-RUN-041: it is at home from then on, and what is older isn't brought there."""
    home, cache = one_that_died(tmp_path)
    assert not shards(home, 3)
    with Run(home, cache=cache, upload_every=3, resume="auto") as run:
        assert run.checkpointer.step == 3
        assert (run.weights["w"] == 3).all()
        assert run.checkpointer.passed_over == []
        assert is_whole(home, 3)
        assert not shards(home, 2)
        run.checkpointer.restore_rng()
        save_all(run, 4)
    assert sorted(durabilities(home)) == [1, 4]


def test_without_its_cache_a_launch_goes_on_from_home(tmp_path: pathlib.Path) -> None:
    """REQ-RUN-041, REQ-OPN-012: and names what it passes over; the control of the test above."""
    home, _ = one_that_died(tmp_path)
    with Run(home, cache=tmp_path / "another", upload_every=3, resume="auto") as run:
        assert run.checkpointer.step == 1
        assert [sentence.split()[0] for sentence in run.checkpointer.passed_over] == [
            checkpoint_name(step, 1) for step in (3, 2)
        ]
        assert all("FILES_IN_CACHES" in sentence for sentence in run.checkpointer.passed_over)
        assert run.checkpointer.launch is not None
        assert run.checkpointer.launch.chosen_by == "fallback"
        run.checkpointer.restore_rng()
        save_all(run, 2)
    assert durabilities(home) == {1: "home", 2: "home"}


@pytest.mark.parametrize("how", ["damaged", "truncated", "deleted"])
def test_where_the_newest_is_damaged_the_next_older_one_is_taken(
    tmp_path: pathlib.Path, how: str
) -> None:
    """REQ-RUN-041, REQ-RUN-035: and the report names it."""
    home, cache = one_that_died(tmp_path)
    for file in cache.rglob(f"{checkpoint_name(3, 1)}/**/*.safetensors"):
        spoil(file, how)
    with Run(home, cache=cache, resume="auto") as run:
        assert run.checkpointer.step == 2
        assert (run.weights["w"] == 2).all()
        assert any(checkpoint_name(3, 1) in sentence for sentence in run.checkpointer.reports)
        assert [sentence.split()[0] for sentence in run.checkpointer.passed_over] == [
            checkpoint_name(3, 1)
        ]


def test_what_is_chosen_by_hand_is_brought_home(tmp_path: pathlib.Path) -> None:
    """REQ-RUN-041"""
    home, cache = one_that_died(tmp_path)
    with Run(home, cache=cache, resume=checkpoint_name(2, 1)) as run:
        assert run.checkpointer.step == 2
        assert (run.weights["w"] == 2).all()
    assert not shards(home, 3)


def test_by_hand_without_its_cache_it_is_refused_by_name(tmp_path: pathlib.Path) -> None:
    home, _ = one_that_died(tmp_path)
    run = Run(home, resume=checkpoint_name(2, 1))
    found = error_of(run.checkpointer.choose)
    assert found.code == Code.FILES_IN_CACHES
    assert "cache=" in found.remedy


def test_what_home_never_heard_of_is_finished_and_brought_home(tmp_path: pathlib.Path) -> None:
    """REQ-RUN-036, REQ-RUN-041: home wasn't there for the part of step 3."""
    home = Outage()
    with Run(home, cache=tmp_path / "cache", upload_every=3) as run:
        save_all(run, 1, 2)
        home.is_down[0] = True
        run.save(3).wait("WRITTEN", timeout_s=WAIT_S)
        left, (cache,) = died(home, [tmp_path / "cache"])
        home.is_down[0] = False
    assert committed(left) == [1, 2]
    with Run(left, cache=cache, resume="auto") as run:
        assert run.checkpointer.step == 3
        assert (run.weights["w"] == 3).all()
    assert not shards(left, 2)


def two_that_died(tmp_path: pathlib.Path) -> tuple[MemoryStore, list[pathlib.Path]]:
    """Return what is left of two trainers, each with a cache, with step 1 at home and step 2 in their caches."""
    home, gather, left = Outage(), Allgather(2), []
    caches = [tmp_path / "a", tmp_path / "b"]
    meeting = threading.Barrier(2, timeout=WAIT_S)

    def body(writer: int) -> None:
        with Run(
            home, writer=writer, allgather=gather, cache=caches[writer], upload_every=3
        ) as run:
            save_all(run, 1, 2)
            meeting.wait()
            if writer == 0:
                left.append(died(home, caches))
            meeting.wait()

    assert run_writers(2, body) == [None, None]
    return left[0]


@pytest.mark.parametrize("exchanged", [False, True])
def test_each_writers_files_come_from_wherever_they_are(
    tmp_path: pathlib.Path, *, exchanged: bool
) -> None:
    """REQ-RUN-041: also where the processes have other numbers on other nodes now."""
    home, caches = two_that_died(tmp_path)
    gather = Allgather(2)

    def body(writer: int) -> int:
        with Run(
            home, writer=writer, allgather=gather, cache=caches[writer ^ exchanged], resume="auto"
        ) as run:
            return run.checkpointer.step

    assert run_writers(2, body) == [2, 2]
    assert is_whole(home, 2)


def test_without_one_of_two_nodes_all_go_on_from_home(tmp_path: pathlib.Path) -> None:
    """REQ-RUN-041: and no file of the other one is brought there in vain."""
    home, caches = two_that_died(tmp_path)
    shutil.rmtree(caches[1])
    gather = Allgather(2)

    def body(writer: int) -> int:
        with Run(home, writer=writer, allgather=gather, cache=caches[writer], resume="auto") as run:
            return run.checkpointer.step

    assert run_writers(2, body) == [1, 1]
    assert not shards(home, 2)


def test_a_killed_saver_leaves_nothing_that_is_not_found(tmp_path: pathlib.Path) -> None:
    """REQ-RUN-036, REQ-RUN-037: the next saver of the launch goes on, and what stays in caches stays there."""
    root = tmp_path / "home"
    run = Run(root, saver="process", cache=tmp_path / "cache", upload_every=3)
    save_all(run, 1, 2)
    background = run.checkpointer._saves._background
    assert background is not None
    assert background._link is not None
    os.kill(background._link.pid, signal.SIGKILL)  # type: ignore[union-attr]
    report = run.save(3).on_failed(lambda _: None)
    if report.state != "FAILED":
        report.wait_over(WAIT_S)
    save_all(run, 4)
    home = LocalStore(root, writable=False)
    assert durabilities(home)[4] == "home"
    run.close()
    assert is_whole(home, 4)
    assert not any(step in durabilities(home) for step in (2, 3))


# --- room -----------------------------------------------------------------------------------------


def test_what_nothing_at_home_replaces_stays_and_a_save_without_room_goes_home(
    tmp_path: pathlib.Path,
) -> None:
    """REQ-RUN-037: two saves have room; step 4 goes home from its slot, and then the others may go."""
    home = MemoryStore()
    with Run(home, cache=tmp_path, cache_nbytes=600_000, upload_every=100) as run:
        save_all(run, 1, 2, 3)
        assert {path.partition("/")[0] for path in cached(tmp_path, ".safetensors")} == {
            checkpoint_name(step, 1) for step in (2, 3)
        }
        (fourth,) = save_all(run, 4)
        assert fourth.durability == "home"
        assert any(sentence.startswith("CACHE_FAILED") for sentence in run.checkpointer.reports)
        (fifth,) = save_all(run, 5)
        assert fifth.durability == "node"
        assert nbytes_of(tmp_path) < 600_000
    assert is_whole(home, 4)


def test_once_a_newer_one_is_at_home_the_cache_may_let_all_older_ones_go(
    tmp_path: pathlib.Path,
) -> None:
    """REQ-RUN-037: of other writers, too, whom nobody is at work for; and none that is newer."""
    run_id, attempt = "a" * 32, "0" * 16
    cache = NodeCache(Cache(str(tmp_path)), run_id)
    parts = {
        (step, writer): CachedPart(checkpoint_name(step, 2), attempt, writer)
        for step in (1, 2, 3)
        for writer in (0, 1)
    }
    newer = CachedPart(checkpoint_name(1, 3), attempt, 0)
    for part in (*parts.values(), newer):
        cache.at(part.name).create(part.path, [b""])
    with cache.hold(parts[1, 1]):
        cache.settle_up_to(parts[2, 0])
    assert cache.list_unfinished() == [parts[1, 1], newer, parts[3, 0], parts[3, 1]]


def test_a_cache_that_goes_makes_saves_go_home(tmp_path: pathlib.Path) -> None:
    """What was only there is named by whoever looks for it."""
    home, cache = MemoryStore(), tmp_path / "cache"
    with Run(home, cache=cache, upload_every=100) as run:
        save_all(run, 1, 2)
        while cache.exists():  # the saver may just be removing a file there
            shutil.rmtree(cache, ignore_errors=True)
        cache.write_text("in its place")
        (third,) = save_all(run, 3)
        assert third.durability == "home"
    assert durabilities(home) == {1: "home", 3: "home"}


# --- retention, deltas, and who looks at a run ----------------------------------------------------


@pytest.mark.parametrize("keep", [None, 1, 2])
def test_what_is_in_caches_does_not_count_and_goes_once_a_newer_one_is_at_home(
    tmp_path: pathlib.Path, keep: int | None
) -> None:
    """REQ-CMT-049: the last that is at home stays, however many come behind it."""
    home = MemoryStore()
    with Run(home, cache=tmp_path, upload_every=4, keep=keep) as run:
        save_all(run, 1, 2, 3, 4)
        assert durabilities(home) == {1: "home", 2: "node", 3: "node", 4: "node"}
        run.save(5).wait_over(WAIT_S)
        assert durabilities(home) == ({5: "home"} if keep == 1 else {1: "home", 5: "home"})
        save_all(run, 6, 7)
        assert is_whole(home, 5)


def test_the_last_at_home_cannot_be_deleted_for_one_in_caches(tmp_path: pathlib.Path) -> None:
    """REQ-CMT-026, REQ-CMT-049"""
    home, _ = one_that_died(tmp_path)
    run = ckptfmt.Run(home)
    assert code_of(lambda: run.delete(1)) == Code.CHECKPOINT_NEEDED
    # Whether another checkpoint can be loaded isn't asked then: the run goes on from this one.
    assert code_of(lambda: run.delete(1, force=True)) == Code.CHECKPOINT_NEEDED
    run.delete(2)
    assert durabilities(home) == {1: "home", 3: "node"}


def test_a_pin_is_refused_where_the_files_are_not_at_home(tmp_path: pathlib.Path) -> None:
    """REQ-CMT-041, REQ-CMT-049: and taken, and kept, once they are there."""
    home, cache = one_that_died(tmp_path)
    run = ckptfmt.Run(home)
    assert code_of(lambda: run.pin(3)) == Code.FILES_IN_CACHES
    with Run(home, cache=cache, resume="auto", keep=1) as trainer:
        run.pin(3)
        trainer.checkpointer.restore_rng()
        trainer.save(4).wait_over(WAIT_S)
    assert durabilities(home) == {3: "node", 4: "home"}


def test_deltas_are_made_between_those_that_go_home(tmp_path: pathlib.Path) -> None:
    """REQ-CMT-047: and what lies in between in the slots doesn't get into them."""
    home = MemoryStore()
    with Run(
        home,
        cache=tmp_path,
        upload_every=3,
        delta={"mode": "smallest", "restore_budget": 1e9},
        slots=2,
    ) as run:
        reports = save_all(run, *range(1, 11))
    profiles = [report.profile for report in reports]
    assert [profiles[at] for at in (1, 2, 4, 5, 7, 8)] == ["full"] * 6
    assert "delta" in (profiles[6], profiles[9])
    assert set(durabilities(home)) == {1, 4, 7, 10}
    assert all(is_whole(home, step) for step in (1, 4, 7, 10))


def test_who_looks_at_a_run_is_told(tmp_path: pathlib.Path) -> None:
    """REQ-OPN-012, REQ-RUN-020"""
    home, _ = one_that_died(tmp_path)
    run = ckptfmt.Run(home)
    assert [(one.step, one.durability) for one in run.list()] == [
        (1, "home"),
        (2, "node"),
        (3, "node"),
    ]
    for look in (
        lambda: ckptfmt.open(home),
        lambda: ckptfmt.load(home),
        lambda: run.open(2),
        run.open,
    ):
        assert code_of(look) == Code.FILES_IN_CACHES
    with run.open(1) as checkpoint:
        assert checkpoint.manifest.durability == "home"
    report = ckptfmt.validate(home)
    assert report.valid
    assert sorted(sentence.split()[0] for sentence in report.warnings) == [
        checkpoint_name(step, 1) for step in (2, 3)
    ]
    assert list(report.checkpoints) == [checkpoint_name(1, 1)]


def test_a_mirror_has_what_is_at_home_and_names_the_rest(tmp_path: pathlib.Path) -> None:
    home, cache = one_that_died(tmp_path)
    mirror = MemoryStore()
    report = mirror_run(home, mirror)
    assert report.in_caches == (checkpoint_name(2, 1), checkpoint_name(3, 1))
    assert (report.head, report.current, report.problems) == (checkpoint_name(1, 1), True, ())
    assert durabilities(mirror) == {1: "home"}
    with Run(home, cache=cache, upload_every=3, resume="auto"):
        pass
    report = mirror_run(home, mirror)  # the launch has brought the newest home
    assert (report.head, report.current, report.in_caches) == (
        checkpoint_name(3, 1),
        True,
        (checkpoint_name(2, 1),),
    )
    assert is_whole(mirror, 3)
    assert scrub_run([home, mirror]).whole


def test_scrub_calls_nothing_damaged_that_is_in_caches(tmp_path: pathlib.Path) -> None:
    """But what lacks where it must be is, and what is wrong with a file that is there."""
    home, cache = one_that_died(tmp_path)
    report = scrub_run([home])
    assert report.whole
    assert report.in_caches == (checkpoint_name(2, 1), checkpoint_name(3, 1))
    with Run(home, cache=cache, upload_every=3, resume="auto"):
        pass
    for step, code in ((1, Code.FILE_MISSING), (3, Code.FILE_NBYTES)):
        (path,) = shards(home, step)
        home.delete(path)
        if code == Code.FILE_NBYTES:
            home.create(path, [b"short"])
    report = scrub_run([home])
    assert not report.whole
    assert {damage.error.code for damage in report.damages} == {Code.FILE_MISSING, Code.FILE_NBYTES}
    assert report.in_caches == (checkpoint_name(2, 1),)
