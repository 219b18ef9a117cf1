"""How writers tell each other what must be the same."""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from ckptfmt import group as group_module
from ckptfmt.errors import CkptError, Code, err
from ckptfmt.group import Group, _TorchExchange, find_worker, make_group
from ckptfmt.loop.loop import StopSignals
from ckptfmt.store.memory import MemoryStore


class Allgather:
    """What mpi4py's comm.allgather does, for threads."""

    def __init__(self, count: int, *, timeout_s: float = 20) -> None:
        self._values: list[bytes] = [b""] * count
        self._barrier = threading.Barrier(count, timeout=timeout_s)

    def of(self, writer: int) -> Callable[[bytes], list[bytes]]:
        def gather(value: bytes) -> list[bytes]:
            self._values[writer] = value
            self._barrier.wait()
            found = list(self._values)
            self._barrier.wait()
            return found

        return gather


def run_writers(count: int, body: Callable[[int], Any]) -> list[Any]:
    """Run `body` for each writer in a thread of its own; errors come back as values."""

    def attempt(writer: int) -> Any:
        try:
            return body(writer)
        except CkptError as error:
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(attempt, range(count)))


def test_one_writer_asks_nobody() -> None:
    group = make_group(None, None, MemoryStore(), deadline_s=1)
    assert (group.writer, group.writer_count) == (0, 1)
    assert group.all_gather({"step": 3}) == [{"step": 3}]


@pytest.mark.parametrize("writer", [(1, 1), (-1, 2), (2, 2), (0, 0)])
def test_impossible_writer_is_refused(writer: tuple[int, int]) -> None:
    with pytest.raises(CkptError) as caught:
        find_worker(writer)
    assert caught.value.code == Code.ARGUMENT


def test_several_writers_without_a_way_to_agree_are_refused() -> None:
    with pytest.raises(CkptError) as caught:
        make_group((0, 2), None, MemoryStore(), deadline_s=1)
    assert caught.value.code == Code.WRITERS_UNKNOWN


@pytest.mark.parametrize("how", ["callable", "token"])
def test_all_gather_returns_values_in_writer_order(how: str) -> None:
    allgather, store = Allgather(3), MemoryStore()

    def body(writer: int) -> list[Any]:
        agree = allgather.of(writer) if how == "callable" else "start-1"
        group = make_group((writer, 3), agree, store, deadline_s=20)
        return [group.all_gather(writer * 10), group.all_gather([writer])]

    assert run_writers(3, body) == [[[0, 10, 20], [[0], [1], [2]]]] * 3


def test_token_exchange_goes_on_in_a_second_group_of_the_same_start() -> None:
    store = MemoryStore()

    def body(writer: int) -> list[Any]:
        first = make_group((writer, 2), "start-1", store, deadline_s=20).all_gather(f"a{writer}")
        second = make_group((writer, 2), "start-1", store, deadline_s=20).all_gather(f"b{writer}")
        return [first, second]

    assert run_writers(2, body) == [[["a0", "a1"], ["b0", "b1"]]] * 2


def gather_token(store: MemoryStore, token: str, writer: int) -> list[Any]:
    return make_group((writer, 2), token, store, deadline_s=20).all_gather(token)


def test_token_of_another_start_sees_nothing_of_this_one() -> None:
    store = MemoryStore()
    for token in ("start-1", "start-2"):
        values = run_writers(2, partial(gather_token, store, token))
        assert values == [[token, token]] * 2


def test_writer_that_never_comes_is_named_at_the_deadline() -> None:
    group = make_group((0, 2), "start-1", MemoryStore(), deadline_s=0.05)
    with pytest.raises(CkptError, match="writer 1") as caught:
        group.all_gather(0)
    assert caught.value.code == Code.WRITERS_MISSING


def test_a_wait_ends_once_a_process_is_known_to_be_lost() -> None:
    asked: list[bool] = []

    def is_lost() -> bool:
        asked.append(True)
        return len(asked) > 2

    group = make_group((0, 2), "start-1", MemoryStore(), deadline_s=600, is_lost=is_lost)
    with pytest.raises(CkptError, match="lost") as caught:
        group.all_gather(0)
    assert caught.value.code == Code.WRITERS_MISSING
    assert len(asked) == 3


def test_a_question_that_hangs_or_fails_keeps_no_wait_from_its_end() -> None:
    over = threading.Event()

    def hang() -> bool:
        return over.wait(60)

    def fail() -> bool:
        raise OSError("the rendezvous is gone")

    for is_lost, deadline_s, text in ((hang, 1.0, "writer 1"), (fail, 600.0, "is gone")):
        store = MemoryStore()
        group = make_group((0, 2), "start-1", store, deadline_s=deadline_s, is_lost=is_lost)
        with pytest.raises(CkptError, match=text) as caught:
            group.all_gather(0)
        assert caught.value.code == Code.WRITERS_MISSING
    over.set()


def test_refusal_of_one_writer_reaches_all() -> None:
    """REQ-CMT-001."""
    allgather = Allgather(3)

    def body(writer: int) -> None:
        group = Group(writer, 3, allgather.of(writer))
        group.raise_together(
            err(Code.STATE_UNSUPPORTED, "a socket", where="extra/x") if writer == 1 else None
        )

    codes = [error.code for error in run_writers(3, body)]
    assert codes == [Code.PEER_FAILED, Code.STATE_UNSUPPORTED, Code.PEER_FAILED]


def test_refusal_of_writer_0_has_its_own_code_everywhere() -> None:
    allgather = Allgather(2)

    def refuse() -> None:
        raise err(Code.FENCED, "launch 4 has taken over")

    errors = run_writers(
        2, lambda writer: Group(writer, 2, allgather.of(writer)).run_on_first(refuse)
    )
    assert [error.code for error in errors] == [Code.FENCED, Code.FENCED]
    assert type(errors[0]) is type(errors[1])


def test_broadcast_instead_of_all_gather_is_refused() -> None:
    group = make_group((0, 2), lambda value: [value], MemoryStore(), deadline_s=1)
    with pytest.raises(CkptError, match="all-gather") as caught:
        group.all_gather(0)
    assert caught.value.code == Code.WRITERS_DIVERGED


@pytest.fixture
def relay() -> Iterator[tuple[int, threading.Event]]:
    """Yield a port that leads to a store of torch.distributed, and an event after which nothing comes through any more.

    A host that loses its power, or its network, does the same: no connection is ended.
    """
    dist = pytest.importorskip("torch.distributed")
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    is_silent = threading.Event()

    def forward(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while content := source.recv(65536):
                if not is_silent.is_set():
                    target.sendall(content)

    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    near, _ = listener.accept()
                    far = socket.create_connection(("127.0.0.1", server.port))
                    for one in (near, far):
                        stack.callback(one.close)
                        stack.callback(one.shutdown, socket.SHUT_RDWR)
                    for ends in ((near, far), (far, near)):
                        threading.Thread(target=forward, args=ends, daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield listener.getsockname()[1], is_silent
        listener.shutdown(socket.SHUT_RDWR)


def test_a_store_whose_host_is_gone_without_a_word_is_not_waited_for(
    relay: tuple[int, threading.Event],
) -> None:
    """torch's client waits for an answer, whatever time-out it was given."""
    dist = pytest.importorskip("torch.distributed")
    port, is_silent = relay
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=dt.timedelta(seconds=1))
    torch = SimpleNamespace(
        distributed_c10d=SimpleNamespace(_get_default_store=lambda: store),
        PrefixStore=dist.PrefixStore,
    )
    assert _TorchExchange(torch, 0, 1, deadline_s=60.0)(b"first") == [b"first"]
    is_silent.set()
    with mock.patch.object(group_module, "_ANSWER_S", 0.1), pytest.raises(CkptError) as caught:
        _TorchExchange(torch, 0, 1, deadline_s=0.1)(b"second")
    assert (caught.value.code, "process 0" in str(caught.value)) == (Code.WRITERS_MISSING, True)


def test_process_that_holds_the_store_leaves_when_the_others_have_read() -> None:
    """Its next step may be to end, and torch's store ends with it: a slower process lost the last exchange of a run."""
    dist = pytest.importorskip("torch.distributed")

    class SlowStore(dist.PrefixStore):  # type: ignore[misc, name-defined]
        def get(self, key: str) -> bytes:
            time.sleep(0.5)
            return bytes(super().get(key))

    def make_exchange(writer: int, store: Any) -> _TorchExchange:
        default = SimpleNamespace(_get_default_store=lambda: store)
        kind = (dist.PrefixStore, SlowStore)[writer]
        return _TorchExchange(
            SimpleNamespace(distributed_c10d=default, PrefixStore=kind),
            writer,
            2,
            deadline_s=20.0,
        )

    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    slow = make_exchange(1, dist.TCPStore("127.0.0.1", host.port, is_master=False))
    hosting = [make_exchange(0, host)]
    del host
    with ThreadPoolExecutor(2) as threads:
        taking_part = threads.submit(slow, b"slow")
        assert threads.submit(hosting.pop(), b"host").result() == [
            b"host",
            b"slow",
        ]  # nobody has the store now
        assert taking_part.result() == [b"host", b"slow"]


def test_process_that_a_signal_asks_to_stop_waits_no_longer_for_one_that_was_killed() -> None:
    """Torchrun ends the survivors by SIGTERM: a wait that let no handler run cost each restart half a minute."""
    dist = pytest.importorskip("torch.distributed")
    store = dist.HashStore()
    torch = SimpleNamespace(
        distributed_c10d=SimpleNamespace(_get_default_store=lambda: store),
        PrefixStore=dist.PrefixStore,
    )
    signals = StopSignals([signal.SIGUSR1], deadline_s=0.1)
    signals.install()
    try:
        exchange = _TorchExchange(torch, 0, 2, deadline_s=20.0, stop_end_s=signals.end_s)
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        by_the_deadline = pytest.raises(CkptError, match="by the deadline of a signal")
        with mock.patch.object(group_module, "_ANSWER_S", 0.1), by_the_deadline as caught:
            exchange(b"here")
        assert caught.value.code == Code.WRITERS_MISSING
    finally:
        signals.remove()
        dist.PrefixStore("ckptfmt", store).set(
            "0/1", ""
        )  # the thread that waits in the store's client ends


def test_signal_that_came_long_before_an_exchange_does_not_end_it() -> None:
    """A step may take longer than stop_deadline_s: the run is saved at its end all the same."""
    dist = pytest.importorskip("torch.distributed")
    store = dist.HashStore()
    torch = SimpleNamespace(
        distributed_c10d=SimpleNamespace(_get_default_store=lambda: store),
        PrefixStore=dist.PrefixStore,
    )
    others = dist.PrefixStore("ckptfmt", store)
    others.set("0/1", "aGVyZQ==")  # the other process's value, in base64
    others.set("0/1/read", "")
    long_ago_s = time.monotonic() - 60.0
    assert _TorchExchange(torch, 0, 2, deadline_s=20.0, stop_end_s=lambda: long_ago_s)(b"here") == [
        b"here",
        b"here",
    ]
