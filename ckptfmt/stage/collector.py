"""Python's garbage collector, out of the way while many objects are made that all stay."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class _Paused:
    """How many pauses there are at this moment, and the collector's thresholds before the first of them."""

    lock = threading.Lock()
    count = 0
    thresholds = (0, 0, 0)


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Let no collection begin meanwhile, of any thread's garbage: for milliseconds, not for minutes.

    A plan, a part or an index is tens of thousands of objects, none of them garbage. To find that out, the collector
    goes through all objects of the process every few loads and saves: measured, a tenth of a second beside torch.

    Pauses of several threads may overlap. With the end of the last one the thresholds are as they were before the
    first, unless the program has set others meanwhile; whether the collector is enabled is the program's affair.
    """
    _watch_forks()
    with _Paused.lock:
        if not _Paused.count:
            _Paused.thresholds = gc.get_threshold()
            gc.set_threshold(0)  # it begins nothing by itself
        _Paused.count += 1
    try:
        yield
    finally:
        with _Paused.lock:
            if _Paused.count:  # else this process was forked meanwhile
                _Paused.count -= 1
                _resume_last()


def _resume_last() -> None:
    if not _Paused.count and not gc.get_threshold()[0]:
        gc.set_threshold(*_Paused.thresholds)


def _end_all() -> None:
    """Let a process that is forked in a pause, such as a data loader's, go without: who paused isn't in it."""
    _Paused.lock = threading.Lock()
    if _Paused.count:
        _Paused.count = 0
        _resume_last()


@functools.cache
def _watch_forks() -> None:
    """See to forks from now on; not at import."""
    os.register_at_fork(after_in_child=_end_all)
