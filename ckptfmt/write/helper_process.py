"""Helper processes of a trainer: the same interpreter, in its own session, behind a channel."""

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
    """An end of a pair of connected sockets. Messages are maps of plain values, whole, in order.

    Any thread may send; one thread at a time may receive. A forked child loses the channel:
    otherwise the peer wouldn't see the end of this process.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._sending = threading.Lock()
        _watch_forks()
        _LIVE.add(self)

    @classmethod
    def pair(cls) -> tuple[Channel, socket.socket]:
        """Return an end of a new pair, and the socket of the peer's end."""
        ours, theirs = socket.socketpair()
        return cls(ours), theirs

    def limit_waits(self, timeout_s: float) -> None:
        """Let `send` and `receive` raise OSError after so many seconds without progress.

        After such an error the channel is unusable.
        """
        self._socket.settimeout(timeout_s)

    def send(self, message: dict[str, Any], *, fd: int | None = None) -> None:
        """Send a message, with a copy of a descriptor. Raises: OSError if the peer is gone."""
        content = dump_msgpack(message)
        head = _LENGTH.pack(len(content))
        with self._sending:
            # The descriptor travels with the first byte; the rest of the head may need another
            # call.
            sent = socket.send_fds(self._socket, [head], [] if fd is None else [fd])
            self._socket.sendall(head[sent:])
            self._socket.sendall(content)

    def receive(self) -> tuple[dict[str, Any], int | None] | None:
        """Wait for the next message; return None if the peer is gone or the stream is broken.

        The caller closes the received descriptor.
        """
        fds: list[int] = []
        try:
            head, fds, flags, _ = socket.recv_fds(self._socket, _LENGTH.size, 1)
            if flags & socket.MSG_CTRUNC:  # a descriptor came, but this process has too many
                return None
            head += self._receive_exactly(_LENGTH.size - len(head)) if head else b""
            if not head:
                return None
            content = self._receive_exactly(*_LENGTH.unpack(head))
        except (ConnectionError, EOFError):
            # The message is incomplete and is dropped. Its descriptor would keep the memory behind
            # it.
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
        """Shut the connection down, which wakes up the peer and a thread that waits here."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the connection is closed already

    def close(self) -> None:
        """Close the descriptor."""
        self._socket.close()

    def close_in_fork(self) -> None:
        """Close the inherited descriptor in a forked child; the connection stays up."""
        fd = self._socket.detach()
        if fd >= 0:
            os.close(fd)


_LIVE: Final[weakref.WeakSet[Channel]] = weakref.WeakSet()


@functools.cache
def _watch_forks() -> None:
    """Close channels in forked children from now on.

    This isn't done at import, since most programs that import this package have no channel.
    """
    os.register_at_fork(after_in_child=_close_all)


def _close_all() -> None:
    for channel in list(_LIVE):
        channel.close_in_fork()


def start_helper(
    module: str, *, environment: Mapping[str, str] | None = None
) -> tuple[subprocess.Popen[bytes], Channel]:
    """Start ``python -m MODULE FD``, where FD is an end of a new channel.

    Returns: the process, and this process's end of the channel.

    The standard streams of the process are null.

    Args:
        module: name of the module to run.
        environment: variables to add to the environment of this process.

    Raises: OSError if the process can't be started.
    """
    channel, theirs = Channel.pair()
    try:
        process = subprocess.Popen(  # noqa: S603
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
    """Return the import path of this process, which may differ from its environment."""
    return os.pathsep.join(str(pathlib.Path(place).resolve()) for place in sys.path)


def be_helper(fd: int) -> Channel:
    """Set up a process that `start_helper` started, and return its end of the channel."""
    # A signal to all processes of a training is meant for the trainer.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # Imported objects stay alive. Without the freeze, each collection would scan them, which takes
    # 10 ms in the middle of a save.
    gc.freeze()
    threading.excepthook = _end_process
    return Channel(socket.socket(fileno=fd))


def _end_process(_: threading.ExceptHookArgs) -> None:
    """End this process after an unexpected error in a thread, since other threads may wait for it.

    The peer sees the end of the channel.
    """
    os._exit(1)


def watch(pid: int, channel: Channel) -> None:
    """Shut the channel down when a process ends, from now on.

    The end of the channel alone isn't enough: a child of that process may keep the socket open.
    """
    threading.Thread(target=_watch, args=(pid, channel), daemon=True).start()


def _watch(pid: int, channel: Channel) -> None:
    try:
        other = os.pidfd_open(pid)
    except ProcessLookupError:
        channel.shut_down()  # the process has ended already
        return
    except OSError:
        return  # no such call or no descriptor: the end of the channel must do
    watched = select.poll()
    watched.register(other, select.POLLIN)
    watched.poll()
    channel.shut_down()
