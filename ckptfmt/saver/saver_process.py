"""The process that writes, hashes and commits beside the training: ``python -m ckptfmt.saver.saver_process FD``.

A `Checkpointer` starts it, in a session of its own and without standard streams; nobody else has to. It imports no
framework. When the trainer is gone, it finishes the saves whose snapshot is complete, gives up the others, and ends.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pathlib
import sys
from typing import TYPE_CHECKING, Any

from ckptfmt.saver.saver import Saver
from ckptfmt.stage.helper_process import be_helper, watch
from ckptfmt.stage.slot import Slot
from ckptfmt.store.local import LocalStore
from ckptfmt.write.writer import as_ckpt_error

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptfmt.errors import CkptError
    from ckptfmt.stage.helper_process import Channel


def main(fd: int) -> None:
    """Serve the trainer at the other end of the socket `fd` until it is gone."""
    channel = be_helper(fd)

    def send(message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the trainer is gone: there is nobody to tell
            channel.send(message)

    first = channel.receive()
    if first is None:
        return
    opening = first[0]
    _be_nice(opening["nice"])
    watch(opening["trainer_pid"], channel)
    saver: Saver | None = None
    problem: CkptError | None = None
    try:
        # Garbage has time until a save is over; to look for it takes milliseconds, and somebody waits for those.
        gc.disable()
        saver = Saver(LocalStore(os.fsdecode(opening["path"]), writable=True), send, rest=gc.collect)
        _serve(channel, saver, send)
    except Exception as error:  # noqa: BLE001 - told to the trainer, whatever it is
        problem = as_ckpt_error(error)
    if saver is not None:
        saver.lose_trainer() if problem is None else saver.give_up(problem)
        saver.finish()
    if problem is not None:
        # Last: the trainer takes the slots back now.
        send({"type": "broken", "error": problem.as_json()})


def _be_nice(added: int) -> None:
    """Add to the niceness of this process, and to that of its session, which is what many kernels go by."""
    niceness = os.nice(added)
    with contextlib.suppress(OSError):  # no such kernel, or set too often within a moment
        pathlib.Path("/proc/self/autogroup").write_text(str(niceness))


def _serve(channel: Channel, saver: Saver, send: Callable[[dict[str, Any]], None]) -> None:
    """Do what the trainer says, until it is gone."""
    slots: dict[int, Slot] = {}
    while (received := channel.receive()) is not None:
        message, slot_fd = received
        if slot_fd is not None:
            slots[message["slot"]] = slot = Slot.attach(slot_fd)
            slot.touch()
            saver.add_slot(message["slot"], slot)
            send({"type": "ready", "slot": message["slot"]})
        else:
            saver.handle(message)


if __name__ == "__main__":
    main(int(sys.argv[1]))
