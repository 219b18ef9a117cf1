"""Python's garbage collector, out of the way while many objects are made that all stay."""

from __future__ import annotations

import contextlib
import gc
import threading
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["collector_paused"]


_LOCK: Final = threading.Lock()


class _Paused:
    """How many pauses there are at this moment, and whether the collector was on before the first of them."""

    count = 0
    was_enabled = True


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Let no collection begin meanwhile, of any thread's garbage: for milliseconds, not for minutes.

    A plan makes tens of thousands of objects, none of them garbage. To find that out, the collector goes through all
    objects of the process every few loads: measured, a tenth of a second beside torch. Pauses of several threads may
    overlap; with the end of the last one it is as it was before the first.
    """
    with _LOCK:
        if not _Paused.count:
            _Paused.was_enabled = gc.isenabled()
            gc.disable()
        _Paused.count += 1
    try:
        yield
    finally:
        with _LOCK:
            _Paused.count -= 1
            if not _Paused.count and _Paused.was_enabled:
                gc.enable()
