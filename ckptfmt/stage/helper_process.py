"""Processes that help a trainer: this very interpreter, in a session of its own, with a channel and nothing else."""

from __future__ import annotations

import functools
import gc
import os
import pathlib
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from typing import Any, Final

from ckptfmt.documents.msgpk import dump_msgpack, parse_msgpack

_LENGTH: Final = struct.Struct("<Q")
_LIMIT_ITEMS: Final = 1 << 28


class Channel:
    """One end of a pair of connected sockets; maps of plain values go through it, whole and in order.

    Any thread may send; one at a time may receive. A process that is forked from one that has a channel hasn't got it:
    else the other end would not learn that this one is gone.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._sending = threading.Lock()
        _watch_forks()
        _LIVE.add(self)

    @classmethod
    def pair(cls) -> tuple[Channel, socket.socket]:
        """Return one end, and the socket of the other for the process that will have it."""
        ours, theirs = socket.socketpair()
        return cls(ours), theirs

    def limit_waits(self, timeout_s: float) -> None:
        """Let `send` and `receive` raise OSError when nothing moves for so long, in seconds; then the talk is over."""
        self._socket.settimeout(timeout_s)

    def send(self, message: dict[str, Any], *, fd: int | None = None) -> None:
        """Send a message, and with it a copy of a descriptor. Raises: OSError if the other end is gone."""
        content = dump_msgpack(message)
        head = _LENGTH.pack(len(content))
        with self._sending:
            # The descriptor travels with the first byte; the rest of the head may need another call.
            sent = socket.send_fds(self._socket, [head], [] if fd is None else [fd])
            self._socket.sendall(head[sent:])
            self._socket.sendall(content)

    def receive(self) -> tuple[dict[str, Any], int | None] | None:
        """Wait for the next message; None when the other end is gone, or can't be understood any more.

        The descriptor is the caller's to close.
        """
        fds: list[int] = []
        try:
            head, fds, flags, _ = socket.recv_fds(self._socket, _LENGTH.size, 1)
            if flags & socket.MSG_CTRUNC:  # a descriptor came, for which this process has no number left
                return None
            head += self._receive_exactly(_LENGTH.size - len(head)) if head else b""
            if not head:
                return None
            content = self._receive_exactly(*_LENGTH.unpack(head))
        except (ConnectionError, EOFError):
            # It came with half a message, which nobody will get; and open, it would keep the memory behind it.
            for fd in fds:
                os.close(fd)
            return None
        message = parse_msgpack(content, where="message", limit_items=_LIMIT_ITEMS)
        return message, (fds[0] if fds else None)

    def _receive_exactly(self, nbytes: int) -> bytes:
        content = bytearray(nbytes)
        rest = memoryview(content)
        while rest:
            count = self._socket.recv_into(rest)
            if count == 0:
                raise EOFError
            rest = rest[count:]
        return bytes(content)

    def shut_down(self) -> None:
        """End the talk: the other end, and a thread that waits here, learn of it at once."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it is gone already

    def close(self) -> None:
        """Close the descriptor."""
        self._socket.close()

    def close_in_fork(self) -> None:
        """Close a descriptor that a fork brought here, without a word to the other end."""
        fd = self._socket.detach()
        if fd >= 0:
            os.close(fd)


_LIVE: Final[weakref.WeakSet[Channel]] = weakref.WeakSet()


@functools.cache
def _watch_forks() -> None:
    """See to forks from now on; not at import, since most programs that import this package have no channel."""
    os.register_at_fork(after_in_child=_close_all)


def _close_all() -> None:
    for channel in list(_LIVE):
        channel.close_in_fork()


def start_helper(
    module: str, *, environment: Mapping[str, str] | None = None
) -> tuple[subprocess.Popen[bytes], Channel]:
    """Start ``python -m MODULE FD``, with null standard streams, and one end of a channel as FD; return the other.

    Args:
        module: what it runs.
        environment: variables that it has beside those of this process.

    Raises: OSError if it can't be started.
    """
    channel, theirs = Channel.pair()
    try:
        process = subprocess.Popen(  # noqa: S603 - this very interpreter
            [sys.executable, "-P", "-m", module, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=[theirs.fileno()],
            cwd="/",
            env={**os.environ, **(environment or {}), "PYTHONPATH": _import_path()},
        )
    except OSError:
        channel.close()
        raise
    finally:
        theirs.close()
    return process, channel


def _import_path() -> str:
    """Return what this process imports from: it may have other ways to extend that than the environment."""
    return os.pathsep.join(str(pathlib.Path(place).resolve()) for place in sys.path)


def be_helper(fd: int) -> Channel:
    """Make this process what `start_helper` started, and return its end of the channel."""
    # Whoever stops the training with a signal to all of its processes means the training.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # What was imported stays; to look at it again and again takes a collection 10 ms, in the middle of a save.
    gc.freeze()
    threading.excepthook = _end_process
    return Channel(socket.socket(fileno=fd))


def _end_process(_: threading.ExceptHookArgs) -> None:
    """End this process: a thread died of what nobody expected, and others may wait for it. The other end notices."""
    os._exit(1)


def watch(pid: int, channel: Channel) -> None:
    """End the talk when a process dies, from now on: one that it forked may hold its end of the socket for long."""
    threading.Thread(target=_watch, args=(pid, channel), daemon=True).start()


def _watch(pid: int, channel: Channel) -> None:
    try:
        other = os.pidfd_open(pid)
    except ProcessLookupError:
        channel.shut_down()  # it is gone already
        return
    except OSError:
        return  # no such call, or no descriptor left: then the end of the channel has to say it
    watched = select.poll()
    watched.register(other, select.POLLIN)
    watched.poll()
    channel.shut_down()
