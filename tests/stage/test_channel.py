"""Messages between two processes: whole, in order, each with the descriptor that it was sent with."""

import contextlib
import os
import pathlib
import resource
import socket
import struct
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptfmt.documents.msgpk import dump_msgpack
from ckptfmt.write.helper_process import Channel

MESSAGE = dump_msgpack({"type": "x", "content": b"y" * 40})
FRAME = struct.pack("<Q", len(MESSAGE)) + MESSAGE


@pytest.fixture
def ends():
    """Both ends of a talk."""
    ours, socket_of_other = Channel.pair()
    theirs = Channel(socket_of_other)
    yield ours, theirs
    for end in (ours, theirs):
        end.close()


def received_of(end):
    """Return the next message, which must be there; its descriptor is closed."""
    found = end.receive()
    assert found is not None
    if found[1] is not None:
        os.close(found[1])
    return found[0]


def file_with(content):
    """Return a descriptor of memory with a content of its own."""
    fd = os.memfd_create("told apart")
    os.write(fd, content)
    return fd


def content_of(fd):
    """Return what is in such memory, and close it."""
    content = os.pread(fd, 100, 0)
    os.close(fd)
    return content


def open_fds():
    return len(list(pathlib.Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("nbytes", [0, 1, 7, 8, 4096, 212_992, 1_000_000, 5_000_000])
def test_message_of_any_size_arrives_whole(ends, nbytes) -> None:
    """More than a socket's buffer, too: then the sender waits for the receiver."""
    ours, theirs = ends
    message = {"type": "x", "content": os.urandom(nbytes), "text": "é" * (nbytes // 100)}
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(ours.send, message)
        assert theirs.receive() == (message, None)
        sending.result()


TEXT = st.text(st.characters(codec="utf-8"))
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | TEXT | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=15,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])  # a talk may go on for ever
@given(st.lists(st.dictionaries(TEXT, PLAIN, max_size=5), max_size=5))
def test_plain_values_arrive_as_they_were_sent(ends, messages) -> None:
    ours, theirs = ends
    for message in messages:
        ours.send(message)
    assert [received_of(theirs) for _ in messages] == messages


def test_both_ends_talk_at_once(ends) -> None:
    """Neither waits for the other to listen."""
    messages = [{"number": number, "content": bytes(300_000)} for number in range(20)]
    with ThreadPoolExecutor(4) as pool:
        sent = [
            pool.submit(lambda end: [end.send(message) for message in messages], end)
            for end in ends
        ]
        got = [pool.submit(lambda end: [received_of(end) for _ in messages], end) for end in ends]
        assert [found.result(20) for found in got] == [messages, messages]
        assert all(found.result(20) for found in sent)


def test_descriptor_comes_with_its_message(ends) -> None:
    ours, theirs = ends
    before = open_fds()
    for number in range(6):
        fd = file_with(b"%d" % number) if number % 2 else None
        ours.send({"number": number, "content": bytes(number * 1000)}, fd=fd)
        if fd is not None:
            os.close(fd)  # a copy is under way
    for number in range(6):
        found = theirs.receive()
        assert found is not None
        assert found[0]["number"] == number
        assert (None if found[1] is None else content_of(found[1])) == (
            b"%d" % number if number % 2 else None
        )
    assert open_fds() == before


def test_message_whose_descriptor_finds_no_place_is_the_last(ends) -> None:
    """Without it, what is told of it would be believed of something else."""
    ours, theirs = ends
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = []
    try:
        resource.setrlimit(
            resource.RLIMIT_NOFILE,
            (max(int(fd.name) for fd in pathlib.Path("/proc/self/fd").iterdir()) + 2, hard),
        )
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
        ours.send({"slot": 1}, fd=0)
        assert theirs.receive() is None
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in taken:
            os.close(fd)


def test_threads_that_send_at_once_are_not_mixed_up(ends) -> None:
    """Each one's messages come in its order, whole, and with their own descriptors."""
    ours, theirs = ends

    def send(sender):
        for number in range(40):
            message = {
                "sender": sender,
                "number": number,
                "content": bytes([sender]) * (number * 5003 % 150_000),
            }
            fd = file_with(b"%d-%d" % (sender, number)) if number % 3 == 0 else None
            ours.send(message, fd=fd)
            if fd is not None:
                os.close(fd)

    seen: dict[int, list[int]] = defaultdict(list)
    with ThreadPoolExecutor(4) as pool:
        sent = [pool.submit(send, sender) for sender in range(4)]
        for _ in range(160):
            found = theirs.receive()
            assert found is not None
            message, fd = found
            sender, number = message["sender"], message["number"]
            assert message["content"] == bytes([sender]) * (number * 5003 % 150_000)
            assert (fd is None) == (number % 3 != 0)
            assert fd is None or content_of(fd) == b"%d-%d" % (sender, number)
            seen[sender].append(number)
        assert all(found.result(20) is None for found in sent)
    assert seen == {sender: list(range(40)) for sender in range(4)}


def test_what_was_sent_is_still_there_when_the_sender_is_gone(ends) -> None:
    ours, theirs = ends
    ours.send({"number": 1})
    ours.send({"number": 2})
    ours.close()
    assert [theirs.receive(), theirs.receive()] == [({"number": 1}, None), ({"number": 2}, None)]
    assert theirs.receive() is None
    assert theirs.receive() is None


@pytest.mark.parametrize("cut", [0, 1, 7, 8, 9, len(FRAME) - 1])
@pytest.mark.parametrize("with_fd", [False, True])
def test_sender_that_is_gone_in_the_middle_of_a_message_is_gone(cut, with_fd) -> None:
    raw, other = socket.socketpair()
    theirs = Channel(other)
    before = open_fds()
    fd = file_with(b"lost")
    if cut:
        socket.send_fds(raw, [FRAME[:cut]], [fd] if with_fd else [])
    os.close(fd)
    raw.close()
    assert theirs.receive() is None
    # What came along with half a message is nobody's: kept open, it would keep a slot's memory.
    assert open_fds() == before - 1
    theirs.close()


def test_message_that_comes_byte_by_byte() -> None:
    raw, other = socket.socketpair()
    theirs = Channel(other)
    fd = file_with(b"kept")

    def send():
        socket.send_fds(raw, [FRAME[:1]], [fd])
        for begin in range(1, len(FRAME)):
            time.sleep(0.001)
            raw.sendall(FRAME[begin : begin + 1])

    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(send)
        found = theirs.receive()
        sent.result(20)
    assert found is not None
    assert found[0] == {"type": "x", "content": b"y" * 40}
    assert found[1] is not None
    assert content_of(found[1]) == b"kept"
    os.close(fd)
    raw.close()
    theirs.close()


def test_end_that_went_without_listening_is_gone(ends) -> None:
    """The system calls it a connection reset where something was left unread."""
    ours, theirs = ends
    theirs.send({"number": 1})
    ours.send({"number": 2})
    ours.close()
    found = [theirs.receive(), theirs.receive()]
    assert found[1] is None
    with pytest.raises(OSError, match=r"[Bb]roken pipe"):
        theirs.send({"number": 3})


def test_whoever_waits_learns_that_the_talk_is_over(ends) -> None:
    ours, theirs = ends
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(end.receive) for end in ends]
        time.sleep(0.05)
        assert not any(found.done() for found in waiting)
        ours.shut_down()
        assert [found.result(20) for found in waiting] == [None, None]
    ours.shut_down()
    theirs.close()
    ours.shut_down()


def test_sender_that_nobody_listens_to_is_let_go(ends) -> None:
    """A trainer's thread must not hang in a send to a saver that is gone."""
    ours, theirs = ends
    sending = threading.Event()

    def send():
        sending.set()
        while True:
            ours.send({"content": bytes(1_000_000)})

    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(send)
        assert sending.wait(20)
        time.sleep(0.05)
        assert not sent.done()
        theirs.close()
        with pytest.raises(OSError, match=r"[Bb]roken pipe|reset"):
            sent.result(20)


def test_copy_that_a_fork_brought_is_closed_without_a_word(ends) -> None:
    ours, theirs = ends
    fd = os.dup(ours._socket.fileno())
    before = open_fds()
    copied = Channel(socket.socket(fileno=fd))
    copied.close_in_fork()
    assert open_fds() == before - 1
    ours.send({"number": 1})
    assert theirs.receive() == ({"number": 1}, None)
    ours.close()
    assert theirs.receive() is None
