"""Delay a signal of a program to itself: a thread of the checkpointer can write the records of the last steps.

The steps of a page's training take a millisecond each, and a busy machine may run no other thread
before the kill. Python imports this module at the start of each program that finds it.
"""

import os
import time

_kill = os.kill


def _kill_late(pid: int, number: int) -> None:
    if pid == os.getpid():
        time.sleep(1.0)
    _kill(pid, number)


os.kill = _kill_late
