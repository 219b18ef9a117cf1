"""Replicas of saves in the cache of another node: what is left after the loss of a node has all that was WRITTEN."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch._C import _distributed_c10d as c10d

from ckptfmt.adapters.torch.pair import Pair
from ckptfmt.checkpointer import Checkpointer
from ckptfmt.commit.waiting import poll
from ckptfmt.documents.manifest import checkpoint_name
from ckptfmt.errors import CkptError, Code, err
from ckptfmt.run.node_cache import Cache, CachedPart, NodeCache
from ckptfmt.saving import peers as replication
from ckptfmt.saving import saves
from ckptfmt.saving.peers import Replicas
from ckptfmt.store import LocalStore
from ckptfmt.store.memory import MemoryStore
from tests.builders import error_of
from tests.explorer.telling import tell
from tests.forks import fork
from tests.interface.test_group import Allgather, run_writers
from tests.resharding.launch import _meeting
from tests.save.test_node_cache import Outage, cached, committed, died, nbytes_of, spoil, wait_for
from tests.save.test_saves import Run, is_whole
from tests.saver.test_saver import WAIT_S
from tests.store.helpers import ROOT, open_fd_count
from tests.stores.hooked import HookedStore, Operation

#: How long processes may take that should take seconds: on a busy machine a minute's work takes
#: ten.
PATIENCE_S = 300.0

# --- who is whose partner -------------------------------------------------------------------------

nodes_of_processes = st.lists(st.sampled_from("abcde"), min_size=2, max_size=24).filter(
    lambda nodes: len(set(nodes)) > 1
)


@given(nodes_of_processes)
def test_partners_are_on_another_node_and_share_the_work(nodes: list[str]) -> None:
    """REQ-RUN-039: and all that comes from one node goes to one node, spread as evenly as can be."""
    partners = replication.choose_partners(nodes)
    for node in set(nodes):
        theirs = [partners[rank] for rank, one in enumerate(nodes) if one == node]
        assert len({nodes[partner] for partner in theirs}) == 1
        assert nodes[theirs[0]] != node
        there = [rank for rank, one in enumerate(nodes) if one == nodes[theirs[0]]]
        counts = [theirs.count(rank) for rank in there]
        assert max(counts) - min(counts) <= 1


@given(st.permutations(range(12)), st.integers(2, 6))
def test_equal_nodes_form_one_ring(ranks: list[int], node_count: int) -> None:
    """REQ-RUN-039: each process has one partner, and is the partner of one, around all nodes."""
    count = 12 // node_count * node_count
    nodes = [f"n{rank % node_count}" for rank in ranks if rank < count]
    partners = replication.choose_partners(nodes)
    assert sorted(partners) == list(range(count))
    for rank in range(count):
        seen = [rank]
        for _ in range(node_count):
            seen.append(partners[seen[-1]])
        assert seen[-1] == rank
        assert len({nodes[one] for one in seen}) == node_count


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({"peers": 1}, "peers="),
        ({"peers": 2, "cache": "x"}, "peers="),
        ({"peers": True, "cache": "x"}, "peers="),
        ({"peers": 1, "cache": "x"}, "peers="),  # nothing connects the processes
        ({"node": "a"}, "node="),
        ({"peers": 1, "cache": "x", "node": ""}, "node="),
    ],
)
def test_what_can_have_no_replicas_is_refused(options: dict[str, Any], where: str) -> None:
    error = error_of(lambda: Checkpointer(MemoryStore(), **options))
    assert (error.code, error.where) == (Code.ARGUMENT, where)


# --- two processes in one -------------------------------------------------------------------------


class Couple:
    """Two processes of two nodes, as threads of this one, that are each other's partners.

    Attributes:
        reports: what each of them was told.
        pairs: the ends of their connections, by the sender and the one whose end it is.
    """

    def __init__(
        self, caches: list[pathlib.Path], run_id: str, *, deadline_s: float = WAIT_S, **options: Any
    ) -> None:
        self.reports: list[list[str]] = [[], []]
        self.pairs: dict[tuple[int, int], Pair] = {}
        store = c10d.HashStore()

        def make(rank: int) -> Replicas:
            def connect(sender: int, receiver: int) -> Pair:
                number = int(rank == receiver)
                self.pairs[sender, rank] = pair = Pair(
                    f"{sender}-{receiver}", number, deadline_s=deadline_s, store=store
                )
                return pair

            return Replicas(
                Cache(str(caches[rank]), **options),
                run_id,
                rank=rank,
                nodes=("a", "b"),
                connect=connect,
                deadline_s=deadline_s,
                note=self.reports[rank].append,
            )

        self.members: list[Replicas] = run_writers(2, make)

    def replicate(self, part: CachedPart, rank: int = 0) -> str:
        """Return what is answered of a save."""
        answers: list[str] = []
        told = threading.Event()

        def answer(problem: str) -> None:
            answers.append(problem)
            told.set()

        self.members[rank].replicate(part, answer)
        assert told.wait(WAIT_S)
        return answers[0]

    def close(self) -> None:
        run_writers(2, lambda rank: self.members[rank].close(WAIT_S))
        assert not [
            thread.name
            for thread in threading.enumerate()
            if thread.name.startswith("ckptfmt-replica")
        ]


@contextlib.contextmanager
def couple(*arguments: Any, **options: Any) -> Iterator[Couple]:
    made = Couple(*arguments, **options)
    try:
        yield made
    finally:
        made.close()


def two_written(path: pathlib.Path) -> tuple[NodeCache, list[CachedPart]]:
    """Return the cache of a trainer that died with steps 2 and 3 in it, which home doesn't have."""
    home = Outage()
    with Run(home, cache=path.with_name("living")) as run:
        run.save(1).wait(timeout_s=WAIT_S)
        home.is_down[0] = True
        for step in (2, 3):
            run.save(step).wait("WRITTEN", timeout_s=WAIT_S)
        shutil.copytree(path.with_name("living"), path, ignore=shutil.ignore_patterns("*.held"))
        home.is_down[0] = False
    cache = NodeCache(Cache(str(path)), next(entry.name for entry in path.iterdir()))
    return cache, cache.list_unfinished()


def files_of(path: pathlib.Path, part: CachedPart) -> dict[str, bytes]:
    """Return the contents of the files of a save in a cache."""
    files = (
        file
        for file in path.rglob(f"*{part.attempt}*")
        if file.is_file() and file.suffix != ".held"
    )
    return {file.relative_to(path).as_posix(): file.read_bytes() for file in files}


def test_a_replica_has_the_same_bytes_under_the_same_paths(tmp_path: pathlib.Path) -> None:
    here, there = tmp_path / "a", tmp_path / "b"
    cache, parts = two_written(here)
    with couple([here, there], cache._run_id) as both:
        assert [both.replicate(part) for part in parts] == ["", ""]
    for part in parts:
        assert files_of(there, part) == files_of(here, part)
        assert len(files_of(there, part)) >= 2
    assert NodeCache(Cache(str(there)), cache._run_id).list_unfinished() == parts
    assert both.reports == [[], []]


@pytest.mark.parametrize("what", [".safetensors", ".msgpack"])
@pytest.mark.parametrize("how", ["damaged", "truncated"])
def test_what_is_damaged_is_no_replica(tmp_path: pathlib.Path, what: str, how: str) -> None:
    """REQ-RUN-040: each byte is compared where it arrives; the next save is replicated again."""
    here, there = tmp_path / "a", tmp_path / "b"
    cache, (first, second) = two_written(here)
    spoil(next(here.rglob(f"*{first.attempt}*{what}")), how)
    with couple([here, there], cache._run_id) as both:
        problem = both.replicate(first)
        assert problem
        assert both.replicate(second) == ""
    assert files_of(there, first) == {}
    assert files_of(there, second) == files_of(here, second)
    assert [len(reports) for reports in both.reports] == [1, 0]
    assert both.reports[0][0].startswith("PEER_LOST")


class Watched:
    """The files of another node; looks, whenever one is read, whether the part is there already."""

    def __init__(self, inner: Any, cache: NodeCache, part: CachedPart) -> None:
        self.nbytes, self._inner, self._cache, self._part = inner.nbytes, inner, cache, part
        self.early: list[str] = []
        self.is_held: list[bool] = []

    def read(self, path: str, *, limit_nbytes: int) -> bytes:
        found: bytes = self._inner.read(path, limit_nbytes=limit_nbytes)
        return found

    def open_ranges(self, path: str) -> Any:
        self.early += [path] if self._cache.is_unfinished(self._part) else []
        self.is_held.append(self._cache.is_held(self._part))
        return self._inner.open_ranges(path)


def test_the_part_of_a_replica_comes_last(tmp_path: pathlib.Path) -> None:
    """REQ-RUN-040: a process that dies half-way leaves nothing that a launch would take for a whole save."""
    cache, (part, _) = two_written(tmp_path / "a")
    taker = NodeCache(Cache(str(tmp_path / "b")), cache._run_id)
    source = Watched(cache.at(part.name), taker, part)
    taker.take(part, source)
    assert source.early == []
    assert source.is_held
    assert all(source.is_held)
    assert not taker.is_held(part)
    assert taker.is_unfinished(part)


def test_a_replica_counts_against_the_limit(tmp_path: pathlib.Path) -> None:
    """REQ-RUN-037: nothing goes for it that home lacks; the save itself is as it was, and the problem is told once."""
    here, there = tmp_path / "a", tmp_path / "b"
    cache, parts = two_written(here)
    one = sum(map(len, files_of(here, parts[0]).values()))
    with couple([here, there], cache._run_id, limit_nbytes=one * 3 // 2) as both:
        assert both.replicate(parts[0]) == ""
        assert "NO_SPACE" in both.replicate(parts[1])
        assert "NO_SPACE" in both.replicate(parts[1])
        assert nbytes_of(there) <= one * 3 // 2
        NodeCache(Cache(str(there)), cache._run_id).settle(parts[0])
        assert both.replicate(parts[1]) == ""
    assert [len(reports) for reports in both.reports] == [1, 0]
    assert both.reports[0][0].startswith("PEER_LOST")
    assert [bool(files_of(there, part)) for part in parts] == [False, True]


def test_what_home_has_is_not_sent(tmp_path: pathlib.Path) -> None:
    here, there = tmp_path / "a", tmp_path / "b"
    cache, (part, _) = two_written(here)
    cache.settle(part)
    with couple([here, there], cache._run_id) as both:
        assert "decided" in both.replicate(part)
    assert both.reports == [[], []]
    assert not there.exists() or cached(there) == []


def test_one_cache_for_two_nodes_is_told(tmp_path: pathlib.Path) -> None:
    """And costs the save nothing that is there."""
    here = tmp_path / "a"
    cache, (part, _) = two_written(here)
    before = files_of(here, part)
    with couple([here, here], cache._run_id) as both:
        assert "one cache" in both.replicate(part)
    assert files_of(here, part) == before


def test_a_cache_that_takes_nothing_is_a_problem_and_no_error(tmp_path: pathlib.Path) -> None:
    here, there = tmp_path / "a", tmp_path / "b"
    cache, (first, second) = two_written(here)
    there.write_text("no directory")
    with couple([here, there], cache._run_id) as both:
        assert both.replicate(first)
        there.unlink()
        assert both.replicate(second) == ""
    assert [len(reports) for reports in both.reports] == [1, 0]


def test_a_replica_that_fails_asks_for_nothing_more(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does it keep a file open, as long as somebody has the error."""
    cache, (first, _) = two_written(tmp_path / "a")
    there, open_before = (
        NodeCache(Cache(str(tmp_path / "b")), cache._run_id),
        open_fd_count(),
    )

    def refuse(_self: LocalStore, path: str, chunks: Any) -> None:
        next(iter(chunks))
        raise err(Code.NO_SPACE, "full", where=path)

    monkeypatch.setattr(LocalStore, "create", refuse)
    error = error_of(lambda: there.take(first, cache.at(first.name)))
    assert error.code == Code.NO_SPACE
    assert error.__traceback__ is not None
    assert open_fd_count() == open_before


@pytest.mark.parametrize("how", ["gone", "hangs"])
def test_a_partner_that_is_lost_costs_replicas_alone(tmp_path: pathlib.Path, how: str) -> None:
    """Every later save is answered at once; nobody waits for longer than the deadline, at the end neither."""
    here, there = tmp_path / "a", tmp_path / "b"
    cache, parts = two_written(here)
    go_on = threading.Event()

    def hang(*_: Any) -> None:
        go_on.wait(WAIT_S)

    with (
        mock.patch.object(NodeCache, "take", hang),
        couple([here, there], cache._run_id, deadline_s=1.0) as both,
    ):
        if how == "gone":
            both.pairs[0, 1].abort()
        assert both.replicate(parts[0])
        begin_s = time.monotonic()
        assert both.replicate(parts[1])
        assert time.monotonic() - begin_s < WAIT_S / 2
        go_on.set()
    assert sum(sentence.startswith("PEER_LOST") for sentence in both.reports[0]) == 1


def test_a_partner_that_never_comes_is_told_at_the_launch(tmp_path: pathlib.Path) -> None:
    told: list[str] = []

    def connect(_sender: int, _receiver: int) -> Pair:
        raise err(Code.WRITERS_MISSING, "nobody")

    options = Cache(str(tmp_path))
    replicas = Replicas(
        options, "0" * 32, rank=0, nodes=("a", "b"), connect=connect, deadline_s=1, note=told.append
    )
    answers: list[str] = []
    replicas.replicate(CachedPart("step-00000001-l0001", "0" * 16, 0), answers.append)
    replicas.close(WAIT_S)
    assert len(told) == 2
    assert all(sentence.startswith("PEER_LOST") for sentence in told)
    assert answers == ["there is no connection"]


# --- trainings ------------------------------------------------------------------------------------


@contextlib.contextmanager
def threads_as_nodes() -> Iterator[None]:
    """Let trainers that are threads of this process connect as processes of torch.distributed do."""
    store = c10d.HashStore()

    def connect_by_store(rank: int, *, name: str, deadline_s: float) -> Callable[[int, int], Pair]:
        return lambda sender, receiver: Pair(
            f"{name}/{sender}-{receiver}", int(rank == receiver), deadline_s=deadline_s, store=store
        )

    with (
        mock.patch.object(saves, "check_peers"),
        mock.patch.object(saves, "connect_by_torch", connect_by_store),
    ):
        yield


def two_that_lost_a_node(
    tmp_path: pathlib.Path, peers: int, **options: Any
) -> tuple[MemoryStore, pathlib.Path]:
    """Return what is left of home and of the first node's cache; both nodes have written step 2, and home lacks it."""
    home, caches = Outage(), [tmp_path / "a", tmp_path / "b"]
    gather, left = Allgather(2), []
    meeting = threading.Barrier(2, timeout=WAIT_S)

    def body(writer: int) -> tuple[str, ...]:
        node = {"peers": 1, "node": f"node {writer}"} if peers else {}
        with Run(
            home, writer=writer, allgather=gather, cache=caches[writer], **node, **options
        ) as run:
            run.save(1).wait(timeout_s=WAIT_S)
            meeting.wait()
            home.is_down[0] = True
            run.save(2).wait("WRITTEN", timeout_s=WAIT_S)
            other = f"step-00000002-l0001/parts/*-{1 - writer:05d}.msgpack"
            assert not peers or wait_for(lambda: list(caches[writer].rglob(other)))
            meeting.wait()
            if writer == 0:
                left.append(died(home, caches))
                home.is_down[0] = False
            meeting.wait()
        return run.checkpointer.reports

    with threads_as_nodes():
        reports = run_writers(2, body)
    expected = ("HOME_UNREACHABLE", "DATA_UNCHANGED")  # the data of this training stands still
    assert not [
        sentence
        for told in reports
        for sentence in told
        if not any(word in sentence for word in expected)
    ]
    (found, copies), *_ = left
    shutil.rmtree(copies[1])
    return found, copies[0]


def test_a_launch_survives_the_loss_of_a_node_of_two_processes(tmp_path: pathlib.Path) -> None:
    """REQ-RUN-039: whichever of two nodes with two processes each it is."""
    home, gather, meeting = Outage(), Allgather(4), threading.Barrier(4, timeout=WAIT_S)
    caches = [tmp_path / node for node in "aabb"]
    left: list[Any] = []

    def body(writer: int) -> None:
        options = {"peers": 1, "node": "aabb"[writer]}
        with Run(home, writer=writer, allgather=gather, cache=caches[writer], **options) as run:
            run.checkpointer.prepare()
            meeting.wait()
            home.is_down[0] = True
            run.save(1).wait("WRITTEN", timeout_s=WAIT_S)
            wait_for(lambda: len(list(caches[writer].rglob("*.msgpack"))) == 4)
            meeting.wait()
            if writer == 0:
                left.append(died(home, caches))
                home.is_down[0] = False
            meeting.wait()

    with threads_as_nodes():
        assert run_writers(4, body) == [None] * 4
    for cache in (left[0][1][0], left[0][1][2]):
        found = MemoryStore()
        for path, content in left[0][0].snapshot().items():
            found.create(path, [content])
        with Run(found, cache=cache, resume="auto") as run:
            assert run.checkpointer.step == 1
        assert is_whole(found, 1)


@pytest.mark.parametrize("peers", [1, 0])
def test_a_launch_finishes_a_lost_node_s_saves_from_its_replicas(
    tmp_path: pathlib.Path, peers: int
) -> None:
    """Without replicas it goes on from what home has: the control."""
    home, cache = two_that_lost_a_node(tmp_path, peers)
    with Run(home, cache=cache, resume="auto") as run:
        assert run.checkpointer.step == 1 + peers
        assert (run.weights["w"] == 1 + peers).all()
    assert committed(home) == [1, 2][: 1 + peers]
    if peers:
        assert is_whole(home, 2)


@pytest.mark.parametrize("how", ["peers", "node", "problem"])
def test_what_stays_in_caches_survives_a_node_with_replicas(
    tmp_path: pathlib.Path, how: str
) -> None:
    """REQ-CMT-048: durability "peers" is true; a save without its replica goes home; "node" doesn't survive."""
    home, gather, meeting = MemoryStore(), Allgather(2), threading.Barrier(2, timeout=WAIT_S)
    caches = [tmp_path / "a", tmp_path / "b"]
    left: list[Any] = []

    def body(writer: int) -> list[str]:
        options: dict[str, Any] = {} if how == "node" else {"peers": 1, "node": f"node {writer}"}
        with Run(
            home, writer=writer, allgather=gather, cache=caches[writer], upload_every=9, **options
        ) as run:
            reports = [run.save(step).wait(timeout_s=WAIT_S) for step in (1, 2)]
            meeting.wait()
            if writer == 0:
                shutil.copytree(
                    caches[0], tmp_path / "left", ignore=shutil.ignore_patterns("*.held")
                )
                left.append(home.snapshot())
            meeting.wait()
        return [report.durability for report in reports if report is not None]

    def refuse(*_: Any) -> None:
        raise err(Code.NO_SPACE, "no room")

    patch = (
        mock.patch.object(NodeCache, "take", refuse)
        if how == "problem"
        else contextlib.nullcontext()
    )
    with threads_as_nodes(), patch:
        assert run_writers(2, body) == [["home", "node" if how == "node" else "peers"]] * 2
    found = MemoryStore()
    for path, content in left[0].items():
        found.create(path, [content])
    shards = [path for path in found.list("step-00000002-l0001") if path.endswith(".safetensors")]
    assert bool(shards) == (how == "problem")
    with Run(found, cache=tmp_path / "left", resume="auto") as run:
        assert run.checkpointer.step == (1 if how == "node" else 2)
    assert how == "node" or is_whole(found, 2)


class Slow(HookedStore):
    """A home that takes parts only when it is told to."""

    def __init__(self) -> None:
        super().__init__(MemoryStore())
        self.go_on = threading.Event()

    def before(self, operation: Operation) -> None:
        if operation.op == "create" and operation.path.endswith(".msgpack"):
            assert self.go_on.wait(WAIT_S)


def test_replicas_of_what_is_home_are_settled(tmp_path: pathlib.Path) -> None:
    """REQ-RUN-037: by the node that has them, so that they go when there is no room."""
    home, caches, gather = Slow(), [tmp_path / "a", tmp_path / "b"], Allgather(2)
    both = threading.Barrier(2)

    def body(writer: int) -> list[CachedPart]:
        with Run(
            home,
            writer=writer,
            allgather=gather,
            cache=caches[writer],
            peers=1,
            node=f"node {writer}",
        ) as run:
            assert run.checkpointer.launch is not None
            run_id = run.checkpointer.launch.run_id
            cache = NodeCache(Cache(str(caches[writer])), run_id)

            def is_there(step: int) -> bool:
                """Tell whether the partner's save is here, and nobody is at work on it any more."""
                return (checkpoint_name(step, 1), 1 - writer) in [
                    (one.name, one.writer) for one in cache.list_unfinished()
                ]

            handles = [run.save(step) for step in (1, 2)]
            for step, handle in zip((1, 2), handles, strict=True):
                handle.wait("WRITTEN", timeout_s=WAIT_S)
                assert wait_for(lambda step=step: is_there(step))
            both.wait(WAIT_S)  # what one of them settles would be looked for in vain by the other
            home.go_on.set()
            for handle in handles:
                handle.wait(timeout_s=WAIT_S)
            assert wait_for(lambda: all(handle.is_over for handle in handles))
            return cache.list_unfinished()

    with threads_as_nodes():
        assert run_writers(2, body) == [[], []]
    assert committed(home) == [1, 2]


def test_only_what_is_not_newer_is_settled_with_a_commit(tmp_path: pathlib.Path) -> None:
    """REQ-RUN-037: and not what somebody is at work on."""
    cache, (first, second) = two_written(tmp_path / "a")
    cache.settle_up_to(first)
    assert cache.list_unfinished() == [second]
    with cache.hold(second):
        cache.settle_up_to(second)
    assert cache.list_unfinished() == [second]
    cache.settle_up_to(second)
    assert cache.list_unfinished() == []


def test_one_node_alone_is_refused_at_the_launch(tmp_path: pathlib.Path) -> None:
    """On all processes, before a launch is taken."""
    home, gather = MemoryStore(), Allgather(2)

    def body(writer: int) -> None:
        with Run(home, writer=writer, allgather=gather, cache=tmp_path, peers=1, node="same"):
            pass

    with threads_as_nodes():
        found = run_writers(2, body)
    assert [isinstance(error, CkptError) and (error.code, error.where) for error in found] == [
        (Code.ARGUMENT, "peers=")
    ] * 2
    assert list(home.list("")) == []


def test_a_run_goes_on_on_one_node_without_replicas(tmp_path: pathlib.Path) -> None:
    """As after the loss of all nodes but one: the command is the same, and the reports say what is missing."""
    home, reports = MemoryStore(), []
    for nodes in ("ab", "aa"):
        gather = Allgather(2)

        def body(writer: int, nodes: str = nodes, gather: Allgather = gather) -> None:
            cache = tmp_path / nodes[writer]
            with Run(
                home, writer=writer, allgather=gather, cache=cache, peers=1, node=nodes[writer]
            ) as run:
                run.save(1 + nodes.count("a")).wait(timeout_s=WAIT_S)
                reports.append(run.checkpointer.reports)

        with threads_as_nodes():
            assert run_writers(2, body) == [None, None]
    assert [
        [told for told in those if "saves have no replicas" in told] for those in reports[:2]
    ] == [[], []]
    assert all(
        "PEER_LOST: all 2 processes are on node 'a'" in " ".join(those) for those in reports[2:]
    )
    assert committed(home) == [2, 3]


# --- processes ------------------------------------------------------------------------------------


class Processes:
    """The processes of one start of `tests.peer_training`: forks of one that has imported torch."""

    def __init__(self, scene: str, meeting: dict[str, str], **options: Any) -> None:
        self.out = pathlib.Path(options["out"])
        self.out.mkdir()
        self.codes: list[int] = []
        count = len(options["caches"])
        variables = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "WORLD_SIZE": str(count),
            **meeting,
        }
        plain = json.loads(json.dumps(options, default=str))
        from tests import peer_training  # noqa: PLC0415

        self._running = [
            fork(
                peer_training.main,
                {**variables, "RANK": str(rank)},
                str(self._output(rank)),
                scene,
                plain,
            )
            for rank in range(count)
        ]

    def _output(self, rank: int) -> pathlib.Path:
        return self.out / f"output-{rank}"

    def _printed(self) -> list[str]:
        outputs = [self._output(rank) for rank in range(len(self._running))]
        return [
            output.read_text(errors="replace")[-3000:] if output.exists() else ""
            for output in outputs
        ]

    def told(self, name: str, rank: int) -> Any:
        """Return what a process tells under a name, once it does."""
        path = self.out / f"{name}-{rank}"
        for _ in poll(PATIENCE_S):
            if path.exists():
                return json.loads(path.read_text())
            if self._running[rank].exitcode not in (None, 0):
                break
        raise AssertionError(f"process {rank} said nothing: {self.end()}")

    def end(self) -> list[str]:
        """Kill what is left, and return what all of them printed."""
        for process in self._running:
            process.kill()
            process.join()
        return self._printed()

    def wait(self) -> list[int]:
        """Wait until all have ended."""
        for process in self._running:
            process.join(PATIENCE_S)
        codes = [process.exitcode for process in self._running]
        if None in codes:
            raise AssertionError(f"not over in {PATIENCE_S:g} s: {codes} {self.end()}")
        if any(code > 0 for code in codes):
            tell("\n".join(self._printed()))
        return codes


def train(
    scene: str, path: pathlib.Path, *, name: str, nodes: str, peers: int, **options: Any
) -> Processes:
    """Start a training on nodes, one letter for each process; its run and its caches are in a directory."""
    path.mkdir(exist_ok=True)
    with _meeting("store", path) as meeting:
        running = Processes(
            scene,
            meeting,
            home=path / "home",
            out=path / name,
            caches=[path / f"cache-{node}" for node in nodes],
            nodes=list(nodes),
            peers=peers,
            **{"deadline_s": PATIENCE_S, "total": 8, **options},
        )
        if scene == "lose_a_node":
            kill([pid for rank in range(len(nodes)) for pid in running.told("ready", rank)])
        elif scene == "stop_a_partner":
            pid, _ = running.told("stop", 1)
            assert wait_for(
                lambda: (
                    pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
                    == "T"
                )
            )
            (running.out / "stopped").touch()
            running.told("lost", 0)
            os.kill(pid, signal.SIGCONT)
        running.codes = running.wait()
    return running


def kill(pids: list[int]) -> None:
    """Kill processes for good, and wait until they hold nothing any more."""
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    for pid in pids:
        wait_for(lambda pid=pid: not pathlib.Path(f"/proc/{pid}/exe").exists())


def states(running: Processes, kind: str) -> dict[int, bytes]:
    """Return all bits that were told, by step."""
    return {
        int(file.name.rpartition("-")[2]): file.read_bytes()
        for file in running.out.glob(f"{kind}-*")
    }


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize(
    "cases", [[(1, 5)], pytest.param([(1, 5), (0, 3)], marks=pytest.mark.exhaustive)]
)
def test_a_run_goes_on_from_what_a_lost_node_had_replicated(
    tmp_path: pathlib.Path, cases: list[tuple[int, int]]
) -> None:
    """REQ-RUN-036, REQ-RUN-039: four processes on two nodes; one node and its cache are gone for good in mid-run.

    The other node goes on alone, bit for bit as the undisturbed run does. Without replicas it goes
    on from an older
    step: the control. The test of threads, above, has that too.
    """
    undisturbed = train("go_on", tmp_path / "undisturbed", name="one", nodes="aabb", peers=0)
    assert undisturbed.codes == [0] * 4
    expected = states(undisturbed, "state")
    assert sorted(expected) == list(range(1, 9))
    assert len(set(expected.values())) == 8
    for peers, step in cases:
        path = tmp_path / f"peers-{peers}"
        train("lose_a_node", path, name="one", nodes="aabb", peers=peers)
        shutil.rmtree(path / "cache-b")
        (path / "away").rename(path / "home")
        home = LocalStore(path / "home", writable=False)
        assert committed(home) == [1, 2, 3]
        again = train("go_on", path, name="two", nodes="aa", peers=peers)
        assert again.codes == [0, 0]
        assert [again.told("began", rank) for rank in range(2)] == [step, step]
        assert states(again, "resumed") == {step: expected[step]}
        assert states(again, "state") == {later: expected[later] for later in range(step + 1, 9)}
        assert committed(home) == [*range(1, step + 1), *range(step + 1, 9)]


@pytest.mark.slow
@pytest.mark.dist
def test_a_partner_that_is_stopped_or_killed_costs_no_save(tmp_path: pathlib.Path) -> None:
    """It costs the replicas, which the reports say; and the end of the others doesn't wait for it."""
    running = train(
        "stop_a_partner", tmp_path / "run", name="one", nodes="ab", peers=1, deadline_s=30
    )
    assert running.codes == [0, -signal.SIGKILL]
    reports = running.told("reports", 0)
    assert [
        sum(words in sentence for sentence in reports) for words in ("takes no", "sends no")
    ] == [1, 1]
    assert committed(LocalStore(tmp_path / "run" / "home", writable=False)) == [1, 2, 3]
