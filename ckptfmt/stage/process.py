"""Processes that help a trainer: this very interpreter, in a session of its own, with a channel and nothing else."""

from __future__ import annotations

import gc
import os
import pathlib
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping

from ckptfmt.stage.channel import Channel


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
