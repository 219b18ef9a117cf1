"""Compile the digest kernels for a device in a process of their own, into Triton's cache.

The compilation takes half a minute, most of the time under Python's lock. The trainer's own first
call then finds the kernels in the cache.
"""

from __future__ import annotations

import os
import sys
import threading

import torch

from ckptfmt.adapters.torch.blake3 import find_kernels
from ckptfmt.write.helper_process import Channel, be_helper

#: The increment of the niceness: the training's own processes go first.
_NICE = 10


def main(fd: int) -> None:
    """Compile the kernels for the device that the trainer names, then end.

    The process ends early if the trainer ends.

    Args:
        fd: the end of the channel to the trainer.
    """
    channel = be_helper(fd)
    os.nice(_NICE)
    received = channel.receive()
    if received is not None:
        threading.Thread(target=_end_with_trainer, args=(channel,), daemon=True).start()
        find_kernels(torch.device(received[0]["device"]))


def _end_with_trainer(channel: Channel) -> None:
    channel.receive()
    os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]))
