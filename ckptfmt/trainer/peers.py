"""Replicas of saves in the cache of another node, through torch.distributed, beside the training.

Behind WRITTEN a process offers its save to a process of another node, its partner. The partner asks for the part and
for the files that it names, range by range, compares each byte with the part's digests, and creates the same files in
its own cache, the part last. Each pair of processes has a connection of its own and one thread on either side, so that
no more than a few chunks are held in memory, and the training's process groups have nothing to do with it.

Spec: REQ-RUN-037, REQ-RUN-039, REQ-RUN-040.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Protocol

from ckptfmt.adapters import torch_side
from ckptfmt.commit.lone import is_run
from ckptfmt.errors import CkptError, Code, err, error_from_json
from ckptfmt.group import Group
from ckptfmt.run.node_cache import CachedPart, CacheOptions, NodeCache
from ckptfmt.store.direct import make_memory
from ckptfmt.store.protocol import PAGE_NBYTES, RangeReader, Store
from ckptfmt.write.writer import as_ckpt_error

_LOG: Final = logging.getLogger("ckptfmt")
#: How long the end of a thread may take once its connection was ended, in seconds.
_ABORT_S: Final = 2.0
_LENGTH_NBYTES: Final = 8
#: The longest message without bytes of a file, in bytes.
_MESSAGE_NBYTES: Final = 1 << 16
_WHERE: Final = "peers="


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PeerOptions:
    """What a caller chooses: on which node this process is."""

    node: str

    @classmethod
    def of(cls, peers: int, node: str | None, *, has_cache: bool) -> PeerOptions | None:
        """Return what a caller chose; None for no replicas. Raises: StateError(ARGUMENT)."""
        if node is not None and (type(node) is not str or not node):
            raise err(Code.ARGUMENT, f"node={node!r} isn't the name of a node", where="node=")
        if type(peers) is not int or peers not in (0, 1):
            remedy = "Pass peers=1: replicas on more nodes would need a partner of each process on each of these."
            raise err(Code.ARGUMENT, f"peers={peers!r} isn't 0 or 1", where=_WHERE, remedy=remedy)
        if peers == 0:
            if node is not None:
                raise err(Code.ARGUMENT, "there are no replicas to place", where="node=", remedy="Pass peers=1, too.")
            return None
        if not has_cache:
            remedy = "Pass cache=, a directory on a disk of this node."
            raise err(Code.ARGUMENT, "replicas lie in caches, and there is none", where=_WHERE, remedy=remedy)
        return cls(node=node or socket.gethostname())

    def check(self, group: Group) -> None:
        """Check that torch.distributed connects the processes of a group. Raises: StateError(ARGUMENT)."""
        side = torch_side()
        found = None if side is None else side.find_rank()
        if found != (group.writer, group.writer_count):
            raise err(
                Code.ARGUMENT,
                f"replicas go through torch.distributed, with gloo, and it isn't initialised for writer {group.writer}"
                f" of {group.writer_count}",
                where=_WHERE,
                remedy="Call torch.distributed.init_process_group first, and leave writer= out; or leave peers= out.",
            )

    def meet(self, group: Group, home: Store) -> tuple[str, ...]:
        """Return the nodes of all processes, in their order. Every process calls it.

        Args:
            home: of the run; one that has begun already may have lost all nodes but one since then.

        Raises: StateError(ARGUMENT) if a run begins on one node only; LayoutError(WRITERS_DIVERGED).
        """
        told = group.all_gather({"node": self.node})
        if any(type(theirs) is not dict or theirs.keys() != {"node"} for theirs in told):
            raise err(Code.WRITERS_DIVERGED, "not every process has peers=1", where=_WHERE)
        nodes = tuple(str(theirs["node"]) for theirs in told)
        if len(set(nodes)) == 1 and not group.together(lambda: is_run(home)):
            raise err(
                Code.ARGUMENT,
                f"peers= needs another node: all {len(nodes)} processes are on {nodes[0]!r}",
                where=_WHERE,
                remedy="Start processes on several nodes, tell the nodes apart by node=, or leave peers= out.",
            )
        return nodes


def choose_partners(nodes: Sequence[str]) -> tuple[int, ...]:
    """Return to which process each process sends its replicas: one of the next node, the last's next is the first.

    Nodes come in the order of their first processes. The processes of a node share what comes from the node before.

    Args:
        nodes: the node of each process; two different ones at least.

    Spec: REQ-RUN-039.

    >>> choose_partners(["a", "a", "b", "b"])
    (2, 3, 0, 1)
    """
    ranks: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        ranks.setdefault(node, []).append(rank)
    order = list(ranks)
    following = dict(zip(order, [*order[1:], order[0]], strict=True))
    partners = []
    for rank, node in enumerate(nodes):
        there = ranks[following[node]]
        partners.append(there[ranks[node].index(rank) % len(there)])
    return tuple(partners)


class Connection(Protocol):
    """See `ckptfmt.adapters.torch.pair.Pair`."""

    def send(self, content: bytearray | memoryview) -> None:
        """Send some bytes, in memory that may be written to."""

    def receive(self, nbytes: int, *, timeout_s: float | None) -> bytearray:
        """Return so many bytes."""

    def abort(self) -> None:
        """End the connection; whoever waits on either side raises."""


#: Connects with another process: given sender and receiver, and returns the end of the one that calls.
Connect = Callable[[int, int], Connection]


def connect_by_torch(rank: int, *, name: str, deadline_s: float) -> Connect:
    """Return what connects a process of torch.distributed with others.

    Args:
        name: the same on all processes, and new for each launch.
        deadline_s: how long connecting and sending may take, in seconds.
    """

    def connect(sender: int, receiver: int) -> Connection:
        side = torch_side()
        assert side is not None  # noqa: S101 - see PeerOptions.check
        pair: Connection = side.Pair(
            f"ckptfmt/peers/{name}/{sender}-{receiver}", int(rank == receiver), deadline_s=deadline_s
        )
        return pair

    return connect


class _Line:
    """One end of a connection, for messages that may have bytes of a file behind them."""

    def __init__(self, connection: Connection, deadline_s: float) -> None:
        self._connection = connection
        self._deadline_s = deadline_s
        self.abort = connection.abort

    def tell(self, message: dict[str, Any], content: bytearray | memoryview | None = None) -> None:
        """Send a message. Raises: CommitError(WRITERS_MISSING)."""
        told = json.dumps({**message, "nbytes": len(content or ())}).encode()
        self._connection.send(bytearray(len(told).to_bytes(_LENGTH_NBYTES, "little")))
        self._connection.send(bytearray(told))
        if content:
            self._connection.send(content)

    def hear(self, *, is_idle: bool = False) -> tuple[dict[str, Any], bytearray]:
        """Return the next message, and what is behind it.

        Args:
            is_idle: whether there may be none for as long as the other process lives.

        Raises: CommitError(WRITERS_MISSING).
        """
        deadline_s = self._deadline_s
        length = self._connection.receive(_LENGTH_NBYTES, timeout_s=None if is_idle else deadline_s)
        nbytes = int.from_bytes(length, "little")
        if not 0 < nbytes <= _MESSAGE_NBYTES:
            raise err(Code.WRITERS_MISSING, f"a message of {nbytes} bytes")
        message = json.loads(self._connection.receive(nbytes, timeout_s=deadline_s))
        nbytes = message["nbytes"]
        return message, self._connection.receive(nbytes, timeout_s=deadline_s) if nbytes else bytearray()


# --- the side that has the files ------------------------------------------------------------------


class _Sender:
    """Offers this process's saves to its partner, one after the other, and answers what the partner asks for.

    Args:
        line: None where there is no connection: then every save is answered with the problem.
        title: of the partner.
        note: called with a sentence.
    """

    def __init__(
        self, options: CacheOptions, run_id: str, line: _Line | None, *, title: str, note: Callable[[str], None]
    ) -> None:
        self._options, self._run_id, self._line, self._title, self._note = options, run_id, line, title, note
        self._lost = "" if line is not None else "there is no connection"
        self._has_problem = self._is_closing = False
        self._jobs: queue.SimpleQueue[tuple[CachedPart, Callable[[str], None]] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._work, name="ckptfmt-replica-send", daemon=True)
        self.thread.start()

    def add(self, part: CachedPart, answer: Callable[[str], None]) -> None:
        """Have a save copied; `answer` is called with what went wrong, or nothing, from a thread."""
        self._jobs.put((part, answer))

    def end(self) -> None:
        """End the thread once everything is done."""
        self._is_closing = True
        self._jobs.put(None)

    def abort(self) -> None:
        """Let the thread end now."""
        if self._line is not None:
            self._line.abort()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            part, answer = job
            if not self._lost:
                try:
                    problem = self._offer(part)
                except Exception as error:  # noqa: BLE001 - told, whatever it is; the thread goes on to answer
                    problem = self._lost = str(as_ckpt_error(error))
                    if not self._is_closing:
                        self._note(f"PEER_LOST: {self._title} takes no replicas any more: {problem}")
                    self.abort()
            answer(self._lost or problem)
        if self._line is not None and not self._lost:
            with contextlib.suppress(CkptError):
                self._line.tell({"type": "end"})

    def _offer(self, part: CachedPart) -> str:
        assert self._line is not None  # noqa: S101 - nothing is lost
        try:
            cache = NodeCache(self._options, self._run_id)
            if not cache.is_unfinished(part):
                return "the cache has no such save, or it is decided already"
        except CkptError as error:  # a cache that fails is told of by the saver
            return str(error)
        self._line.tell({"type": "offer", "name": part.name, "attempt": part.attempt, "writer": part.writer})
        with contextlib.closing(_OfferedFiles(cache.at(part.name))) as files:
            while (asked := self._line.hear()[0])["type"] != "end":
                self._line.tell(*files.answer(asked))
        problem: str = asked["problem"]
        with contextlib.suppress(CkptError):
            if problem and not cache.is_unfinished(part):
                return problem  # it got home meanwhile, and its files were let go
        if problem and not self._has_problem:
            self._note(f"PEER_LOST: {self._title} has no replica of {part.name}: {problem}")
        self._has_problem = bool(problem)
        return problem


class _OfferedFiles:
    """The files of a save that is offered, as the partner asks for them: one after the other, so that one is open."""

    def __init__(self, place: Store) -> None:
        self._place = place
        self._opened = contextlib.ExitStack()
        self._path = ""
        self._ranges: RangeReader | None = None
        self._memory = memoryview(b"")

    def answer(self, asked: dict[str, Any]) -> tuple[dict[str, Any], bytearray | memoryview]:
        """Return a message, and bytes to send behind it, which stay as they are until the next call."""
        told, content = {"type": "answer", "value": 0}, bytearray()
        try:
            if asked["type"] == "nbytes":
                told["value"] = self._place.nbytes(asked["path"])
            elif asked["type"] == "read":
                content = bytearray(self._place.read(asked["path"], limit_nbytes=asked["limit_nbytes"]))
            else:
                return told, self._read(asked["path"], asked["begin"], asked["end"] - asked["begin"])
        except CkptError as error:
            told = {"type": "problem", "error": error.as_json()}
        return told, content

    def close(self) -> None:
        """Close the file that is open."""
        self._path, self._ranges = "", None
        self._opened.close()

    def _read(self, path: str, byte_begin: int, nbytes: int) -> memoryview:
        if self._ranges is None or path != self._path:
            self.close()
            self._ranges, self._path = self._opened.enter_context(self._place.open_ranges(path)), path
        if len(self._memory) < nbytes + 2 * PAGE_NBYTES:
            self._memory = make_memory(nbytes + 2 * PAGE_NBYTES)
        return self._ranges.read_into(byte_begin, nbytes, self._memory)


# --- the side that takes replicas -----------------------------------------------------------------


class _PartnersFiles:
    """The files of a save that is offered, as `NodeCache.take` reads them; from several threads."""

    def __init__(self, line: _Line) -> None:
        self._line = line
        self._lock = threading.Lock()

    def nbytes(self, path: str) -> int:
        """Return a file's size in bytes."""
        value: int = self._ask({"type": "nbytes", "path": path})[0]["value"]
        return value

    def read(self, path: str, *, limit_nbytes: int) -> bytes:
        """Return a whole small file."""
        return bytes(self._ask({"type": "read", "path": path, "limit_nbytes": limit_nbytes})[1])

    @contextlib.contextmanager
    def open_ranges(self, path: str) -> Iterator[RangeReader]:
        """Open a file to read ranges of it."""
        yield _PartnersRanges(self._ask, path)

    def _ask(self, message: dict[str, Any]) -> tuple[dict[str, Any], bytearray]:
        with self._lock:
            self._line.tell(message)
            told, content = self._line.hear()
        if told["type"] == "problem":
            raise error_from_json(told["error"])
        return told, content


class _PartnersRanges:
    """A file of a save that is offered, to read ranges of it; see `RangeReader`."""

    def __init__(self, ask: Callable[[dict[str, Any]], tuple[dict[str, Any], bytearray]], path: str) -> None:
        self._ask = ask
        self._path = path

    def read_into(self, byte_begin: int, nbytes: int, buffer: memoryview) -> memoryview:
        """Return exactly a range, in memory of the answer's own; see `RangeReader.read_into`."""
        del buffer
        _, content = self._ask({"type": "range", "path": self._path, "begin": byte_begin, "end": byte_begin + nbytes})
        return memoryview(content)


class _Receiver:
    """Takes what another process offers into the cache of this node.

    Args:
        title: of that process.
        note: called with a sentence.
    """

    def __init__(
        self, options: CacheOptions, run_id: str, line: _Line, *, title: str, note: Callable[[str], None]
    ) -> None:
        self._options, self._run_id, self._line, self._title, self._note = options, run_id, line, title, note
        self._is_closing = False
        self.thread = threading.Thread(target=self._work, name="ckptfmt-replica-receive", daemon=True)
        self.thread.start()

    def end(self) -> None:
        """Take note that the end of the other process is no surprise any more."""
        self._is_closing = True

    def abort(self) -> None:
        """Let the thread end now."""
        self._line.abort()

    def _work(self) -> None:
        try:
            while (offer := self._line.hear(is_idle=True)[0])["type"] != "end":
                part = CachedPart(offer["name"], offer["attempt"], offer["writer"])
                self._line.tell({"type": "end", "problem": self._take(part)})
        except Exception as error:  # noqa: BLE001 - told, whatever it is
            self._line.abort()  # so that the other side doesn't wait
            if not self._is_closing:
                self._note(f"PEER_LOST: {self._title} sends no replicas any more: {as_ckpt_error(error)}")

    def _take(self, part: CachedPart) -> str:
        """Return why there is no replica; nothing where there is."""
        try:
            NodeCache(self._options, self._run_id).take(part, _PartnersFiles(self._line))
        except CkptError as error:
            if error.code == Code.WRITERS_MISSING:
                raise
            return str(error)
        return ""


# --- both -----------------------------------------------------------------------------------------


class Replicas:
    """What one process sends to its partner, and takes from those whose partner it is, from the launch to the end.

    A partner that is gone, hangs or has no room costs its replicas: the sentence PEER_LOST says so.

    Args:
        options: of the cache of this node.
        run_id: of the run.
        rank: number of this process.
        nodes: of all processes.
        connect: how; each connection is made on both sides in the same order.
        deadline_s: how long a partner may take to ask or to answer, in seconds.
        note: called with a sentence, from any thread.
    """

    def __init__(
        self,
        options: CacheOptions,
        run_id: str,
        *,
        rank: int,
        nodes: Sequence[str],
        connect: Connect,
        deadline_s: float,
        note: Callable[[str], None],
    ) -> None:
        self._pid = os.getpid()
        partners = choose_partners(nodes)
        self._sender: _Sender | None = None
        self._receivers: list[_Receiver] = []
        # By one order of all pairs: who waits for another one, waits for one that has made all pairs before this one.
        for sender, receiver in sorted(enumerate(partners)):
            if rank not in (sender, receiver):
                continue
            other = sender if rank == receiver else receiver
            title = f"process {other} on node {nodes[other]!r}"
            line: _Line | None = None
            try:
                line = _Line(connect(sender, receiver), deadline_s)
            except CkptError as error:
                note(f"PEER_LOST: no connection with {title}: {error}")
            if rank == sender:
                self._sender = _Sender(options, run_id, line, title=title, note=note)
            elif line is not None:
                self._receivers.append(_Receiver(options, run_id, line, title=title, note=note))

    def replicate(self, part: CachedPart, answer: Callable[[str], None]) -> None:
        """Copy a save of this process to its partner, behind those before it.

        Args:
            answer: called with what went wrong, or an empty text, from a thread.
        """
        assert self._sender is not None  # noqa: S101 - every process has a partner
        self._sender.add(part, answer)

    def close(self, timeout_s: float) -> None:
        """Tell the others that nothing comes any more, wait for that from them, and end.

        Args:
            timeout_s: how long to wait for others, in seconds; the connections are ended then.
        """
        if os.getpid() != self._pid:
            return  # a fork has neither threads nor connections
        ends: list[_Sender | _Receiver] = [*([] if self._sender is None else [self._sender]), *self._receivers]
        end_s = time.monotonic() + timeout_s
        for one in ends:
            one.end()
        for one in ends:
            one.thread.join(max(0.0, end_s - time.monotonic()))
        for one in ends:
            if one.thread.is_alive():
                one.abort()
        for one in ends:
            one.thread.join(_ABORT_S)
