"""Replicas of saves in the cache of another node, sent over torch.distributed in the background.

When a save is WRITTEN, a process offers the save to a partner process on another node. The
partner reads the part and the part's files range by range, compares each byte with the part's
digests, and creates the same files in the partner's cache, the part last. Each pair of processes
has a separate connection with a thread on either side. So only a few chunks are in memory, and the
training's process groups aren't used.

Spec: REQ-RUN-037, REQ-RUN-039, REQ-RUN-040.
"""

from __future__ import annotations

import contextlib
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
from ckptfmt.run.node_cache import Cache, CachedPart, NodeCache
from ckptfmt.store.direct import make_memory
from ckptfmt.store.protocol import PAGE_NBYTES, FunctionReader, RangeReader, Store
from ckptfmt.write.writer import as_ckpt_error

_LOG: Final = logging.getLogger("ckptfmt")
#: Longest time for the end of a thread after an aborted connection, in seconds.
_ABORT_S: Final = 2.0
_LENGTH_NBYTES: Final = 8
#: Size of the longest message, without bytes of a file, in bytes.
_MESSAGE_NBYTES: Final = 1 << 16
_WHERE: Final = "peers="


def check_peers(group: Group) -> None:
    """Check that torch.distributed connects a group. Raises: StateError(ARGUMENT)."""
    side = torch_side()
    found = None if side is None else side.find_rank()
    if found != (group.writer, group.writer_count):
        raise err(
            Code.ARGUMENT,
            "replicas go through torch.distributed, with gloo, and it isn't initialised for"
            f" writer {group.writer}"
            f" of {group.writer_count}",
            where=_WHERE,
            remedy=(
                "Call torch.distributed.init_process_group first, and leave writer= out;"
                " or leave peers= out."
            ),
        )


def meet_peers(node: str | None, group: Group, home: Store) -> tuple[str, ...]:
    """Return the nodes of all processes, in process order. Every process calls this.

    Args:
        node: name of this process's node; None for the host name.
        home: store of the run. A run that already exists may continue on one node, because the
            other nodes may have been lost.

    Raises: StateError(ARGUMENT) if a run begins on one node only;
        LayoutError(WRITERS_DIVERGED).
    """
    told = group.all_gather({"node": node or socket.gethostname()})
    if any(type(theirs) is not dict or theirs.keys() != {"node"} for theirs in told):
        raise err(Code.WRITERS_DIVERGED, "not every process has peers=1", where=_WHERE)
    nodes = tuple(str(theirs["node"]) for theirs in told)
    if len(set(nodes)) == 1 and not group.together(lambda: is_run(home)):
        raise err(
            Code.ARGUMENT,
            f"peers= needs another node: all {len(nodes)} processes are on {nodes[0]!r}",
            where=_WHERE,
            remedy=(
                "Start processes on several nodes, tell the nodes apart by node=, or leave"
                " peers= out."
            ),
        )
    return nodes


def choose_partners(nodes: Sequence[str]) -> tuple[int, ...]:
    """Return the partner of each process: a process of the next node.

    Nodes are in the order of their first processes, and the first node follows the last. The
    processes of a node share the replicas of the node before.

    Args:
        nodes: node of each process, with at least two different nodes.

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
    """The methods of `ckptfmt.adapters.torch.pair.Pair` for replicas."""

    def send(self, content: bytearray | memoryview) -> None:
        """Send bytes from writable memory."""

    def receive(self, nbytes: int, *, timeout_s: float | None) -> bytearray:
        """Return the next `nbytes` bytes."""

    def abort(self) -> None:
        """End the connection; waiting calls on both sides raise."""


#: Connects sender and receiver, and returns the calling process's end of the connection.
Connect = Callable[[int, int], Connection]


def connect_by_torch(rank: int, *, name: str, deadline_s: float) -> Connect:
    """Return a function to connect two processes by torch.distributed.

    Args:
        name: name, equal on all processes and new for each launch.
        deadline_s: longest time to connect or to send, in seconds.
    """

    def connect(sender: int, receiver: int) -> Connection:
        side = torch_side()
        assert side is not None  # noqa: S101
        pair: Connection = side.Pair(
            f"ckptfmt/peers/{name}/{sender}-{receiver}",
            int(rank == receiver),
            deadline_s=deadline_s,
        )
        return pair

    return connect


class _Line:
    """One end of a connection, for messages with optional bytes of a file."""

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
        """Return the next message and the bytes after the message.

        Args:
            is_idle: whether to wait as long as the other process lives, without a deadline.

        Raises: CommitError(WRITERS_MISSING).
        """
        deadline_s = self._deadline_s
        length = self._connection.receive(_LENGTH_NBYTES, timeout_s=None if is_idle else deadline_s)
        nbytes = int.from_bytes(length, "little")
        if not 0 < nbytes <= _MESSAGE_NBYTES:
            raise err(Code.WRITERS_MISSING, f"a message of {nbytes} bytes")
        message = json.loads(self._connection.receive(nbytes, timeout_s=deadline_s))
        nbytes = message["nbytes"]
        return message, self._connection.receive(
            nbytes, timeout_s=deadline_s
        ) if nbytes else bytearray()


# --- the side that has the files ------------------------------------------------------------------


class _Sender:
    """The thread for offers of this process's saves to the partner, in order.

    Args:
        line: connection to the partner; None if the connection failed. Then every save is answered
            with the problem.
        title: description of the partner.
        note: called with a sentence.
    """

    def __init__(
        self,
        options: Cache,
        run_id: str,
        line: _Line | None,
        *,
        title: str,
        note: Callable[[str], None],
    ) -> None:
        self._options = options
        self._run_id = run_id
        self._line = line
        self._title = title
        self._note = note
        self._lost = "" if line is not None else "there is no connection"
        self._has_problem = self._is_closing = False
        self._jobs: queue.SimpleQueue[tuple[CachedPart, Callable[[str], None]] | None] = (
            queue.SimpleQueue()
        )
        self.thread = threading.Thread(target=self._work, name="ckptfmt-replica-send", daemon=True)
        self.thread.start()

    def add(self, part: CachedPart, answer: Callable[[str], None]) -> None:
        """Queue a save. A thread calls `answer` with the problem, or with an empty string."""
        self._jobs.put((part, answer))

    def end(self) -> None:
        """End the thread after the queued saves."""
        self._is_closing = True
        self._jobs.put(None)

    def abort(self) -> None:
        """End the thread now."""
        if self._line is not None:
            self._line.abort()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            part, answer = job
            if not self._lost:
                try:
                    problem = self._offer(part)
                except Exception as error:  # noqa: BLE001
                    problem = self._lost = str(as_ckpt_error(error))
                    if not self._is_closing:
                        self._note(
                            f"PEER_LOST: {self._title} takes no replicas any more: {problem}"
                        )
                    self.abort()
            answer(self._lost or problem)
        if self._line is not None and not self._lost:
            with contextlib.suppress(CkptError):
                self._line.tell({"type": "end"})

    def _offer(self, part: CachedPart) -> str:
        assert self._line is not None  # noqa: S101
        try:
            cache = NodeCache(self._options, self._run_id)
            if not cache.is_unfinished(part):
                return "the cache has no such save, or it is decided already"
        except CkptError as error:  # the saver reports a failing cache
            return str(error)
        self._line.tell(
            {"type": "offer", "name": part.name, "attempt": part.attempt, "writer": part.writer}
        )
        with contextlib.closing(_OfferedFiles(cache.at(part.name))) as files:
            while (asked := self._line.hear()[0])["type"] != "end":
                self._line.tell(*files.answer(asked))
        problem: str = asked["problem"]
        with contextlib.suppress(CkptError):
            if problem and not cache.is_unfinished(part):
                return problem  # the files were removed after the upload to home
        if problem and not self._has_problem:
            self._note(f"PEER_LOST: {self._title} has no replica of {part.name}: {problem}")
        self._has_problem = bool(problem)
        return problem


class _OfferedFiles:
    """The files of an offered save, read for the partner. One file is open at a time."""

    def __init__(self, place: Store) -> None:
        self._place = place
        self._opened = contextlib.ExitStack()
        self._path = ""
        self._ranges: RangeReader | None = None
        self._memory = memoryview(b"")

    def answer(self, asked: dict[str, Any]) -> tuple[dict[str, Any], bytearray | memoryview]:
        """Return the answer's message and bytes; the bytes are valid until the next call."""
        told = {"type": "answer", "value": 0}
        content = bytearray()
        try:
            if asked["type"] == "nbytes":
                told["value"] = self._place.nbytes(asked["path"])
            elif asked["type"] == "read":
                content = bytearray(
                    self._place.read(asked["path"], limit_nbytes=asked["limit_nbytes"])
                )
            else:
                return told, self._read(
                    asked["path"], asked["begin"], asked["end"] - asked["begin"]
                )
        except CkptError as error:
            told = {"type": "problem", "error": error.as_json()}
        return told, content

    def close(self) -> None:
        """Close the open file."""
        self._path = ""
        self._ranges = None
        self._opened.close()

    def _read(self, path: str, byte_begin: int, nbytes: int) -> memoryview:
        if self._ranges is None or path != self._path:
            self.close()
            self._ranges = self._opened.enter_context(self._place.open_ranges(path))
            self._path = path
        if len(self._memory) < nbytes + 2 * PAGE_NBYTES:
            self._memory = make_memory(nbytes + 2 * PAGE_NBYTES)
        return self._ranges.read_into(byte_begin, nbytes, self._memory)


# --- the side that takes replicas -----------------------------------------------------------------


class _PartnersFiles:
    """The files of a partner's offered save, for `NodeCache.take`; thread-safe."""

    def __init__(self, line: _Line) -> None:
        self._line = line
        self._lock = threading.Lock()

    def nbytes(self, path: str) -> int:
        """Return the size of a file in bytes."""
        value: int = self._ask({"type": "nbytes", "path": path})[0]["value"]
        return value

    def read(self, path: str, *, limit_nbytes: int) -> bytes:
        """Return the content of a small file."""
        return bytes(self._ask({"type": "read", "path": path, "limit_nbytes": limit_nbytes})[1])

    @contextlib.contextmanager
    def open_ranges(self, path: str) -> Iterator[RangeReader]:
        """Open a file for reads of ranges."""

        def read_into(byte_begin: int, nbytes: int, _buffer: memoryview) -> memoryview:
            end = byte_begin + nbytes
            asked = {"type": "range", "path": path, "begin": byte_begin, "end": end}
            return memoryview(self._ask(asked)[1])

        yield FunctionReader(read_into)

    def _ask(self, message: dict[str, Any]) -> tuple[dict[str, Any], bytearray]:
        with self._lock:
            self._line.tell(message)
            told, content = self._line.hear()
        if told["type"] == "problem":
            raise error_from_json(told["error"])
        return told, content


class _Receiver:
    """The thread that copies another process's offered saves into this node's cache.

    Args:
        title: description of the other process.
        note: called with a sentence.
    """

    def __init__(
        self,
        options: Cache,
        run_id: str,
        line: _Line,
        *,
        title: str,
        note: Callable[[str], None],
    ) -> None:
        self._options = options
        self._run_id = run_id
        self._line = line
        self._title = title
        self._note = note
        self._is_closing = False
        self.thread = threading.Thread(
            target=self._work, name="ckptfmt-replica-receive", daemon=True
        )
        self.thread.start()

    def end(self) -> None:
        """Record that the other process may end now, without a report."""
        self._is_closing = True

    def abort(self) -> None:
        """End the thread now."""
        self._line.abort()

    def _work(self) -> None:
        try:
            while (offer := self._line.hear(is_idle=True)[0])["type"] != "end":
                part = CachedPart(offer["name"], offer["attempt"], offer["writer"])
                self._line.tell({"type": "end", "problem": self._take(part)})
        except Exception as error:  # noqa: BLE001
            self._line.abort()  # the other side must not wait
            if not self._is_closing:
                self._note(
                    f"PEER_LOST: {self._title} sends no replicas any more: {as_ckpt_error(error)}"
                )

    def _take(self, part: CachedPart) -> str:
        """Copy a save's files into the cache. Returns: the problem, or an empty string."""
        try:
            NodeCache(self._options, self._run_id).take(part, _PartnersFiles(self._line))
        except CkptError as error:
            if error.code == Code.WRITERS_MISSING:
                raise
            return str(error)
        return ""


# --- both -----------------------------------------------------------------------------------------


class Replicas:
    """The replicas of a process's saves on the partner, and of other processes' saves here.

    If a partner is lost, hangs or has no room, replicas are missing, and a sentence PEER_LOST says
    so.

    Args:
        options: options of this node's cache.
        run_id: id of the run.
        rank: number of this process.
        nodes: node of each process.
        connect: connects two processes. Both sides make their connections in the same order.
        deadline_s: longest time for a partner's question or answer, in seconds.
        note: called with a sentence, from any thread.
    """

    def __init__(
        self,
        options: Cache,
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
        # All processes connect in the same order of pairs. Another order could deadlock.
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
        """Queue a copy of this process's save to the partner.

        Args:
            answer: called from a thread with the problem, or with an empty string.
        """
        assert self._sender is not None  # noqa: S101
        self._sender.add(part, answer)

    def close(self, timeout_s: float) -> None:
        """Tell the other processes that no save follows, wait for their ends, and close.

        Args:
            timeout_s: longest wait in seconds; then the connections are aborted.
        """
        if os.getpid() != self._pid:
            return  # a fork has neither threads nor connections
        ends: list[_Sender | _Receiver] = [
            *([] if self._sender is None else [self._sender]),
            *self._receivers,
        ]
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
