"""Saves by way of a node's cache: WRITTEN there, committed at home behind that, finished by whoever comes next."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from ckptfmt.checkpointer import Checkpointer
from ckptfmt.commit.waiting import poll
from ckptfmt.documents.manifest import Manifest, checkpoint_name
from ckptfmt.errors import Code, err
from ckptfmt.read.cached import CachedStore
from ckptfmt.read.reader import Checkpoint
from ckptfmt.run.lineage import list_checkpoints
from ckptfmt.run.node_cache import Cache, NodeCache
from ckptfmt.saving.handle import SaveHandle
from ckptfmt.store import LocalStore, open_store
from ckptfmt.store.memory import MemoryStore
from ckptfmt.store.protocol import Store
from tests.builders import code_of
from tests.explorer.telling import tell
from tests.interface.test_group import Allgather, run_writers
from tests.s3.fixtures import KIND
from tests.s3.proxy import Fault, Proxy, Rule
from tests.save.test_saves import Run, is_whole
from tests.saver.test_saver import WAIT_S
from tests.store.helpers import ROOT
from tests.stores.hooked import HookedStore, Operation

#: What a home is asked for once a launch has begun.
_ASKS = frozenset(
    {
        "create",
        "replace",
        "read",
        "read_range",
        "nbytes",
        "list",
        "list_names",
        "sync",
        "hold",
        "delete",
    }
)


class Outage(HookedStore):
    """A home that answers or doesn't."""

    def __init__(self, inner: Store | None = None) -> None:
        super().__init__(MemoryStore() if inner is None else inner)
        self.is_down = [False]
        self.asked = threading.Event()

    def before(self, operation: Operation) -> None:
        if self.is_down[0] and operation.op in _ASKS:
            self.asked.set()
            raise err(Code.STORE_NO_ANSWER, "nobody answers")

    @contextlib.contextmanager
    def down(self) -> Iterator[None]:
        """Answer nothing meanwhile; whoever ends a test that failed in it isn't kept waiting."""
        self.is_down[0] = True
        try:
            yield
        finally:
            self.is_down[0] = False


def committed(store: Store) -> list[int]:
    return [entry.step for entry in list_checkpoints(store) if isinstance(entry.register, Manifest)]


def cached(path: pathlib.Path, suffix: str = "") -> list[str]:
    """Return the paths of the files in a cache, below the run."""
    files = (file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file())
    return sorted(file.partition("/")[2] for file in files if file.endswith(suffix))


def wait_for(condition: Any) -> bool:
    return any(condition() for _ in poll(WAIT_S))


def test_a_save_is_written_to_the_cache_and_committed_at_home(tmp_path: pathlib.Path) -> None:
    """REQ-RUN-035: the same files under the same paths, and the register at home alone."""
    home = MemoryStore()
    with Run(home, cache=tmp_path) as run:
        run.save(1).wait(timeout_s=WAIT_S)
        run.save(2).wait(timeout_s=WAIT_S)
    assert committed(home) == [1, 2]
    assert is_whole(home, 1)
    assert is_whole(home, 2)
    files = set(home.list(checkpoint_name(1, 1)))
    here = {path for path in cached(tmp_path) if path.startswith(checkpoint_name(1, 1))}
    settled = {path for path in here if path.endswith(".settled")}
    assert here - settled == {
        path for path in files if "manifest" not in path and "index" not in path
    }
    assert len(settled) == 1


def test_saves_queue_while_home_does_not_answer(tmp_path: pathlib.Path) -> None:
    """Training goes on with two slots and five saves; all reach home afterwards, in order."""
    home = Outage()
    order: list[int] = []
    with Run(home, cache=tmp_path, slots=2) as run:
        run.save(1).wait(timeout_s=WAIT_S)
        home.is_down[0] = True
        handles = [run.save(step) for step in range(2, 7)]
        for handle in handles:
            handle.on_committed(lambda report: order.append(report.step))
            handle.wait("WRITTEN", timeout_s=WAIT_S)
        assert home.asked.wait(WAIT_S)
        assert {handle.state for handle in handles} == {"WRITTEN"}
        home.is_down[0] = False
        for handle in handles:
            handle.wait(timeout_s=WAIT_S)
        assert any(sentence.startswith("HOME_UNREACHABLE") for sentence in run.checkpointer.reports)
    assert committed(home) == [1, 2, 3, 4, 5, 6]
    assert order == [2, 3, 4, 5, 6]
    assert all(is_whole(home, step) for step in range(1, 7))


# --- finishing ------------------------------------------------------------------------------------


def died(home: Outage, caches: list[pathlib.Path]) -> tuple[MemoryStore, list[pathlib.Path]]:
    """Return copies of a home and of caches: what a process that is killed at this moment leaves."""
    left = MemoryStore()
    for path, content in home._inner.snapshot().items():  # type: ignore[attr-defined]
        left.create(path, [content])
    copies = [cache.with_name(f"{cache.name}-left") for cache in caches]
    for cache, copy in dict(zip(caches, copies, strict=True)).items():
        shutil.copytree(
            cache, copy, ignore=shutil.ignore_patterns("*.held")
        )  # which go at any moment
    return left, copies


def one_that_died(
    home: Outage, cache: pathlib.Path, **options: Any
) -> tuple[MemoryStore, pathlib.Path]:
    """Return what is left of a trainer that has committed step 1, and has steps 2 and 3 in its cache."""
    with Run(home, cache=cache, **options) as run:
        run.save(1).wait(timeout_s=WAIT_S)
        home.is_down[0] = True
        for step in (2, 3):
            run.save(step).wait("WRITTEN", timeout_s=WAIT_S)
        left, (copy,) = died(home, [cache])
        home.is_down[0] = False
    return left, copy


def test_a_launch_finishes_what_a_killed_one_left(tmp_path: pathlib.Path) -> None:
    """REQ-RUN-036: before it chooses what to resume from."""
    home, cache = one_that_died(Outage(), tmp_path / "cache")
    assert committed(home) == [1]
    with Run(home, cache=cache, resume="auto") as run:
        assert run.checkpointer.step == 3
        assert run.weights["w"][0] == 3
        run.checkpointer.restore_rng()
        run.save(4).wait(timeout_s=WAIT_S)
    assert committed(home) == [1, 2, 3, 4]
    assert is_whole(home, 2)
    assert is_whole(home, 3)


def test_without_its_cache_a_launch_goes_on_from_what_home_has(tmp_path: pathlib.Path) -> None:
    """The control of the test above: it is the cache that brings the two others."""
    home, _ = one_that_died(Outage(), tmp_path / "cache")
    with Run(home, cache=tmp_path / "another", resume="auto") as run:
        assert run.checkpointer.step == 1


@pytest.mark.parametrize("ends", [True, False])
def test_a_launch_waits_for_a_saver_of_its_node_that_home_does_not_know_of(
    tmp_path: pathlib.Path, *, ends: bool
) -> None:
    """REQ-RUN-036: its lease ran out while home didn't answer; when it is dead, what it had is finished."""
    home, cache = one_that_died(Outage(), tmp_path / "cache")
    there = NodeCache(Cache(str(cache)), next(entry.name for entry in cache.iterdir()))
    *_, last = there.list_unfinished()
    saver = contextlib.ExitStack()

    class Watch(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if ends and "for the saver that has" in record.getMessage():
                saver.close()

    watch = Watch()
    logging.getLogger("ckptfmt").addHandler(watch)
    saver.callback(logging.getLogger("ckptfmt").removeHandler, watch)
    with saver:
        saver.enter_context(there.hold(last))
        with Run(home, cache=cache, resume="auto", deadline_s=60 if ends else 0.1) as run:
            assert run.checkpointer.step == (3 if ends else 2)
            assert (
                any(
                    "a living saver has it in hand" in sentence
                    for sentence in run.checkpointer.reports
                )
                != ends
            )


@pytest.mark.parametrize("what", [".safetensors", ".msgpack"])
@pytest.mark.parametrize("how", ["damaged", "truncated", "deleted"])
def test_what_is_damaged_in_the_cache_is_not_finished(
    tmp_path: pathlib.Path, what: str, how: str
) -> None:
    """REQ-RUN-035: no byte of it gets home unseen; the others are finished, and the report names it."""
    home, cache = one_that_died(Outage(), tmp_path / "cache")
    name = checkpoint_name(3, 1)
    for file in cache.rglob(f"{name}/**/*{what}"):
        spoil(file, how)
    with Run(home, cache=cache, resume="auto") as run:
        assert run.checkpointer.step == 2
        is_told = any(name in sentence for sentence in run.checkpointer.reports)
        assert is_told != (
            how == "deleted" and what == ".msgpack"
        )  # without its part it was never written
    assert committed(home) == [1, 2]


def spoil(file: pathlib.Path, how: str) -> None:
    content = bytearray(file.read_bytes())
    if how == "damaged":
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    elif how == "truncated":
        file.write_bytes(content[:-1])
    else:
        file.unlink()


def test_what_an_older_launch_left_is_not_finished(tmp_path: pathlib.Path) -> None:
    """REQ-RUN-036: a newer launch has gone on without it; and its files go."""
    home, cache = one_that_died(Outage(), tmp_path / "cache")
    with Run(home, resume="auto"):
        pass
    with Run(home, cache=cache, resume="auto") as run:
        assert run.checkpointer.step == 1
    assert committed(home) == [1]
    assert {path.partition("/")[0] for path in cached(cache)} <= {checkpoint_name(1, 1)}


def two_that_died(
    home: Outage, caches: list[pathlib.Path]
) -> tuple[MemoryStore, list[pathlib.Path]]:
    """Return what two trainers left, each with its own cache, that have written step 1 there."""
    gather, left = Allgather(2), []
    meeting = threading.Barrier(2, timeout=WAIT_S)

    def body(writer: int) -> None:
        with Run(home, writer=writer, allgather=gather, cache=caches[writer]) as run:
            run.checkpointer.prepare()
            meeting.wait()
            home.is_down[0] = True
            run.save(1).wait("WRITTEN", timeout_s=WAIT_S)
            meeting.wait()
            if writer == 0:
                left.append(died(home, caches))
                home.is_down[0] = False
            meeting.wait()

    found = run_writers(2, body)
    assert found == [None, None]
    return left[0]


@pytest.mark.parametrize("exchanged", [False, True])
def test_the_parts_of_all_writers_come_from_wherever_they_are(
    tmp_path: pathlib.Path, *, exchanged: bool
) -> None:
    """REQ-RUN-036: also where the processes have other numbers on other nodes now."""
    home, caches = two_that_died(Outage(), [tmp_path / "a", tmp_path / "b"])
    gather = Allgather(2)

    def body(writer: int) -> int:
        with Run(
            home, writer=writer, allgather=gather, cache=caches[writer ^ exchanged], resume="auto"
        ) as run:
            return run.checkpointer.step

    assert run_writers(2, body) == [1, 1]
    assert committed(home) == [1]


def test_one_process_finishes_from_a_shared_cache(tmp_path: pathlib.Path) -> None:
    """REQ-RUN-036: two of a node have left their parts; one comes back."""
    home, (cache, _) = two_that_died(Outage(), [tmp_path / "a"] * 2)
    with Run(home, cache=cache, resume="auto") as run:
        assert run.checkpointer.step == 1
    assert committed(home) == [1]


def test_a_lost_node_leaves_nothing_half_visible(tmp_path: pathlib.Path) -> None:
    """What can't be finished isn't begun: home doesn't even get the other part."""
    home, caches = two_that_died(Outage(), [tmp_path / "a", tmp_path / "b"])
    shutil.rmtree(caches[1])
    before = set(home.list(""))
    gather = Allgather(2)

    def body(writer: int) -> int:
        with Run(home, writer=writer, allgather=gather, cache=caches[writer], resume="auto") as run:
            return run.checkpointer.step

    assert run_writers(2, body) == [0, 0]
    assert committed(home) == []
    assert {path for path in set(home.list("")) - before if path.startswith("step-")} == set()


def test_the_next_saver_of_a_launch_goes_on_with_the_last_ones(tmp_path: pathlib.Path) -> None:
    """REQ-RUN-036: the saver's process is killed with two saves in the cache, while home isn't there."""
    root, away = tmp_path / "home", tmp_path / "away"
    run = Run(root, saver="process", cache=tmp_path / "cache", slots=2)
    run.save(1).wait(timeout_s=WAIT_S)
    root.rename(away)
    handles = [run.save(step) for step in (2, 3)]
    for handle in handles:
        handle.wait("WRITTEN", timeout_s=WAIT_S)
    background = run.checkpointer._saves._background
    assert background is not None
    assert background._link is not None
    os.kill(background._link.pid, signal.SIGKILL)  # type: ignore[union-attr]
    for handle in handles:
        assert code_of(lambda handle=handle: handle.wait(timeout_s=WAIT_S)) == Code.SAVER_LOST
        handle.on_failed(lambda _: None)
    away.rename(root)
    run.save(4).wait(timeout_s=WAIT_S)
    run.close()
    home = LocalStore(root, writable=False)
    assert committed(home) == [1, 2, 3, 4]
    assert all(is_whole(home, step) for step in (1, 2, 3, 4))


# --- room, and a cache that fails -----------------------------------------------------------------


def nbytes_of(path: pathlib.Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def test_the_oldest_that_home_has_goes_first(tmp_path: pathlib.Path) -> None:
    """REQ-RUN-037: and a limit is one of all runs that share the cache."""
    one, limit = 250_000, 800_000  # bytes: a save takes 240,030 and a few thousand
    for home, steps in ((MemoryStore(), (1, 2)), (MemoryStore(), (1, 2, 3, 4))):
        with Run(home, cache=tmp_path, cache_nbytes=limit) as run:
            for step in steps:
                run.save(step).wait(timeout_s=WAIT_S)
                assert nbytes_of(tmp_path) < limit
        assert committed(home) == list(steps)
    assert {path.partition("/")[0] for path in cached(tmp_path)} == {
        checkpoint_name(step, 1) for step in (2, 3, 4)
    }
    assert nbytes_of(tmp_path) > limit - one


def test_what_home_lacks_stays_and_the_saver_waits(tmp_path: pathlib.Path) -> None:
    """REQ-RUN-037: a third save has no room beside two that home doesn't have."""
    home = Outage()
    with Run(home, cache=tmp_path, cache_nbytes=600_000) as run:
        run.save(1).wait(timeout_s=WAIT_S)
        with home.down():
            first, second = run.save(2), run.save(3)
            second.wait("WRITTEN", timeout_s=WAIT_S)
            third = run.save(4)
            third.wait("STAGED", timeout_s=WAIT_S)
            assert home.asked.wait(WAIT_S)
            assert (first.state, second.state, third.state) == ("WRITTEN", "WRITTEN", "STAGED")
            assert {path.partition("/")[0] for path in cached(tmp_path, ".msgpack")} == {
                checkpoint_name(step, 1) for step in (2, 3)
            }
        third.wait(timeout_s=WAIT_S)
    assert committed(home) == [1, 2, 3, 4]


def test_a_cache_that_is_no_directory_costs_no_save_and_is_told(tmp_path: pathlib.Path) -> None:
    home = MemoryStore()
    (tmp_path / "file").touch()
    with Run(home, cache=tmp_path / "file") as run:
        run.save(1).wait(timeout_s=WAIT_S)
        assert any(
            re.match("CACHE_FAILED.*Pass ckptfmt.Cache a directory", line)
            for line in run.checkpointer.reports
        )
    assert committed(home) == [1]


def test_a_save_that_never_fits_goes_home_at_once(tmp_path: pathlib.Path) -> None:
    home = MemoryStore()
    with Run(home, cache=tmp_path, cache_nbytes=100_000) as run:
        run.save(1).wait(timeout_s=WAIT_S)
        assert any(sentence.startswith("CACHE_FAILED") for sentence in run.checkpointer.reports)
    assert committed(home) == [1]
    assert is_whole(home, 1)
    assert cached(tmp_path, ".safetensors") == []


def test_a_cache_that_is_deleted_costs_nothing_that_is_not_only_there(
    tmp_path: pathlib.Path,
) -> None:
    """Between saves, and with a save on its way, which fails by name; the training goes on."""
    home, cache = Outage(), tmp_path / "cache"
    with Run(home, cache=cache) as run:
        run.save(1).wait(timeout_s=WAIT_S)
        shutil.rmtree(
            cache, ignore_errors=True
        )  # its saver removes the file that it held, at this moment
        run.save(2).wait(timeout_s=WAIT_S)
        run.save(3).wait(timeout_s=WAIT_S)
        home.is_down[0] = True
        lost = run.save(4)
        lost.wait("WRITTEN", timeout_s=WAIT_S)
        shutil.rmtree(cache, ignore_errors=True)
        home.is_down[0] = False
        assert code_of(lambda: lost.wait(timeout_s=WAIT_S)) == Code.FILE_MISSING
        run.save(5).wait(timeout_s=WAIT_S)
        assert code_of(run.close) == Code.FILE_MISSING  # told at the end, too
    assert committed(home) == [1, 2, 3, 5]
    assert all(is_whole(home, step) for step in (1, 2, 3, 5))


def test_a_training_that_was_taken_over_is_told_so(tmp_path: pathlib.Path) -> None:
    """REQ-RUN-004: what says that this launch is over is raised by the next save, cache or not."""
    home = MemoryStore()
    run = Run(home, cache=tmp_path)
    run.save(1).wait(timeout_s=WAIT_S)
    with Run(home, resume="auto"):
        pass
    handle = run.save(2)
    assert code_of(lambda: handle.wait(timeout_s=WAIT_S)) == Code.FENCED
    assert code_of(lambda: run.save(3)) == Code.FENCED
    run.close()
    assert committed(home) == [1]


@pytest.mark.parametrize(
    "options", [{"cache": "s3://bucket/x"}, {"cache_nbytes": 5}, {"cache": "x", "cache_nbytes": 0}]
)
def test_what_is_no_cache_is_refused(options: dict[str, Any]) -> None:
    assert code_of(lambda: Checkpointer(MemoryStore(), **options)) == Code.ARGUMENT
    assert code_of(lambda: Checkpointer(MemoryStore(), cache="x", saver="inline")) == Code.ARGUMENT


def test_deltas_go_through_a_cache(tmp_path: pathlib.Path) -> None:
    """A base is what home has; what waits there isn't one, and a save without an answering home is full."""
    home = Outage()
    # However long reading a chain would take: on a busy machine that is any time.
    with Run(home, cache=tmp_path, delta={"mode": "smallest", "restore_budget": 1e9}) as run:
        for step in (1, 2, 3):
            run.save(step).wait(timeout_s=WAIT_S)
        reports = [run.save(step).wait(timeout_s=WAIT_S) for step in (4, 5)]
        assert [report.profile for report in reports if report is not None] == ["delta", "delta"]
        home.is_down[0] = True
        waiting = [run.save(step) for step in (6, 7)]
        for handle in waiting:
            handle.wait("WRITTEN", timeout_s=WAIT_S)
        home.is_down[0] = False
        for handle in waiting:
            handle.wait(timeout_s=WAIT_S)
    assert committed(home) == [1, 2, 3, 4, 5, 6, 7]
    assert all(is_whole(home, step) for step in range(1, 8))


# --- reading --------------------------------------------------------------------------------------


class Asked(HookedStore):
    """A home that notes which files' bytes it was asked for."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.paths: list[str] = []

    def before(self, operation: Operation) -> None:
        if operation.op in ("read_range", "nbytes"):
            self.paths.append(operation.path)

    def stored(self) -> list[str]:
        return [path for path in self.paths if path.endswith((".safetensors", ".pack"))]


def saved(cache: pathlib.Path, **options: Any) -> MemoryStore:
    home = MemoryStore()
    with Run(home, cache=cache, **options) as run:
        for step in (1, 2, 3):
            run.save(step).wait(timeout_s=WAIT_S)
    return home


@pytest.mark.parametrize("delta", ["off", "smallest"])
def test_a_restore_takes_from_the_cache_what_is_there(tmp_path: pathlib.Path, delta: str) -> None:
    """REQ-RUN-038: no byte of a shard is asked of home, bases of a delta included."""
    home = Asked(saved(tmp_path, delta=delta))
    with Run(home, cache=tmp_path, resume="auto") as run:
        assert run.checkpointer.step == 3
        assert (run.weights["w"] == 3).all()
        assert run.checkpointer.reports == ()
    assert home.stored() == []


@pytest.mark.parametrize("delta", ["off", "smallest"])
@pytest.mark.parametrize("how", ["damaged", "truncated", "deleted"])
def test_what_is_not_whole_in_the_cache_is_read_from_home(
    tmp_path: pathlib.Path, how: str, delta: str
) -> None:
    """REQ-RUN-038: by itself, and the report says so."""
    inner = saved(tmp_path, delta=delta)
    spoilt = [
        file
        for kind in ("safetensors", "pack")
        for file in sorted(tmp_path.rglob(f"weights-*.{kind}"))
    ]
    for file in spoilt:
        spoil(file, how)
    home = Asked(inner)
    with Run(home, cache=tmp_path, resume="auto") as run:
        assert run.checkpointer.step == 3
        assert (run.weights["w"] == 3).all()
        told = [
            sentence
            for sentence in run.checkpointer.reports
            if sentence.startswith("CACHE_DAMAGED")
        ]
        assert bool(told) == (how != "deleted")
        run.checkpointer.restore_rng()
        run.save(4).wait(timeout_s=WAIT_S)
    assert {path.rpartition("/")[2].partition("-")[0] for path in home.stored()} == {"weights"}
    assert not any(file.exists() for file in spoilt if checkpoint_name(3, 1) in file.parts)


def test_a_cache_that_goes_while_it_is_read_costs_nothing(tmp_path: pathlib.Path) -> None:
    """REQ-RUN-038: the files were whole a moment ago."""
    cache = tmp_path / "cache"
    home = saved(cache)
    run_id = next(path.name for path in cache.iterdir())
    reports: list[str] = []
    store = CachedStore(home, LocalStore(cache / run_id, writable=True), reports.append)
    with Checkpoint(store.at(checkpoint_name(3, 1))) as checkpoint:
        key = next(item.key for item in checkpoint.index.tensors if item.key[1] == "v")
        assert (checkpoint.read(*key) == 3).all()
        shutil.rmtree(cache)
        assert all((checkpoint.read(*item.key) == 3).all() for item in checkpoint.index.tensors)
    assert reports == []


# --- kills, and a server --------------------------------------------------------------------------


def killed(*options: str, kills: int, seed: int, writers: int) -> dict[str, Any]:
    """Return the report of `tests.crash.cached`."""
    command = [
        sys.executable,
        "-m",
        "tests.crash.cached",
        "--kills",
        str(kills),
        "--seed",
        str(seed),
    ]
    command += ["--writers", str(writers), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    tell(f"seed {seed}: {report}")
    assert report["violations"] == []
    assert report["written_count"] >= 1
    return report


@pytest.mark.slow
@pytest.mark.parametrize(
    ("writers", "every", "kills"),
    [
        (1, 1, 8),
        (2, 3, 8),
        *(
            pytest.param(writers, every, 40, marks=pytest.mark.exhaustive)
            for writers, every in ((1, 1), (2, 1), (2, 3))
        ),
    ],
)
def test_kills_at_random_moments_lose_nothing_that_was_written(
    writers: int, every: int, kills: int
) -> None:
    """REQ-RUN-036: trainer, saver and uploader die at once; the processes have other numbers each time."""
    report = killed("--every", str(every), kills=kills, seed=20261123, writers=writers)
    assert (report["node_count"] > 0) is (every > 1)
    # Where saves are uploaded now and then, `close` brings the last one home, too, unless a kill
    # comes before it.
    assert not report["staying_count"] or every > 1
    assert report["lost"] == []
    assert report["finished_count"] >= 1, "no launch finished anything"


@pytest.mark.slow
def test_kills_lose_what_was_written_where_caches_go() -> None:
    """The control of the test above: whoever loses a written save is found."""
    assert killed("--forget", kills=20, seed=20261123, writers=1)["lost"] != []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saver", "kills"),
    [
        ("process", 8),
        pytest.param("thread", 250, marks=[pytest.mark.exhaustive, pytest.mark.timeout(4000)]),
        pytest.param("process", 250, marks=[pytest.mark.exhaustive, pytest.mark.timeout(4000)]),
    ],
)
def test_kills_lose_nothing_that_was_on_its_way_to_a_bucket(saver: str, kills: int) -> None:
    """REQ-RUN-036: savers that are processes die alone, then their trainer; and in the end nothing is left over."""
    writers = 2 if saver == "thread" else 1
    report = killed("--server", KIND, "--saver", saver, kills=kills, seed=20261123, writers=writers)
    assert report["lost"] == []


def test_saves_reach_a_bucket_by_way_of_a_cache(
    s3_bucket: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    """From a saver's own process; and the next launch reads no shard of the bucket."""
    for name, value in s3_bucket.endpoint.environment.items():
        monkeypatch.setenv(name, value)
    url = f"s3://{s3_bucket.name}/run"
    with Run(url, saver="process", cache=tmp_path) as run:
        for step in (1, 2, 3):
            run.save(step)
    assert committed(open_store(url, writable=False)) == [1, 2, 3]
    home = Asked(open_store(url, writable=True))
    with Run(home, cache=tmp_path, resume="auto") as run:
        assert run.checkpointer.step == 3
        assert (run.weights["w"] == 3).all()
    assert home.stored() == []


def test_training_goes_on_while_a_server_cannot_be_reached(
    s3_bucket: Any, s3_proxy: Proxy, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    """Connections break for as long as four saves take that are behind each other; all get home, in order."""
    for name, value in s3_bucket.through(s3_proxy).endpoint.environment.items():
        monkeypatch.setenv(name, value)
    url = f"s3://{s3_bucket.name}/run"
    order: list[int] = []
    with Run(url, saver="process", cache=tmp_path, slots=2, deadline_s=300) as run:
        run.save(1).wait(timeout_s=WAIT_S)
        s3_proxy.script(Rule(fault=Fault.DROP_REQUEST, count=None))
        handles = [run.save(step) for step in range(2, 6)]
        for handle in handles:
            handle.on_committed(lambda report: order.append(report.step))
            handle.wait("WRITTEN", timeout_s=300)
        assert {handle.state for handle in handles} == {"WRITTEN"}
        s3_proxy.script()
        for handle in handles:
            handle.wait(timeout_s=300)
    assert order == [2, 3, 4, 5]
    assert committed(open_store(url, writable=False)) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("seconds", [5, pytest.param(60, marks=pytest.mark.exhaustive)])
def test_saves_queue_within_slots_and_cache_while_a_server_is_away(
    s3_bucket: Any,
    s3_proxy: Proxy,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: pathlib.Path,
    seconds: int,
) -> None:
    """A training that mustn't wait trains on: what finds no room is skipped, and all else gets home, in order."""
    for name, value in s3_bucket.through(s3_proxy).endpoint.environment.items():
        monkeypatch.setenv(name, value)
    url, limit = f"s3://{s3_bucket.name}/run", 1_100_000  # bytes: four saves
    order: list[int] = []
    options: dict[str, Any] = {
        "cache": tmp_path,
        "cache_nbytes": limit,
        "when_busy": "skip",
        "deadline_s": 300,
    }
    with Run(url, saver="process", **options) as run:
        run.save(1).wait(timeout_s=WAIT_S)
        s3_proxy.script(Rule(fault=Fault.DROP_REQUEST, count=None))
        end_s = time.monotonic() + seconds
        handles: list[SaveHandle] = []
        saved: list[SaveHandle] = []
        full = ["WRITTEN"] * 4 + ["STAGED"] * 2  # so many find room beside each other
        while time.monotonic() < end_s or (
            time.monotonic() < end_s + WAIT_S and [handle.state for handle in saved] != full
        ):
            handles.append(
                run.save(len(handles) + 2).on_committed(lambda report: order.append(report.step))
            )
            saved = [handle for handle in handles if handle.state != "SKIPPED"]
            time.sleep(0.1)
            assert nbytes_of(tmp_path) <= limit
        assert [handle.state for handle in saved] == full
        assert len(handles) > len(saved)
        assert order == []
        s3_proxy.script()
        for handle in saved:
            handle.wait(timeout_s=300)
    assert order == [handle.step for handle in saved]
    home = open_store(url, writable=False)
    assert committed(home) == [1, *order]
    assert all(is_whole(home, step) for step in (1, *order))
