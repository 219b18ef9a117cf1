"""Python's garbage collector, out of the way while many objects are made that all stay."""

from __future__ import annotations

import contextlib
import gc
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["collector_paused"]


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Let no collection begin meanwhile, of any thread's garbage: for milliseconds, not for minutes.

    A plan makes tens of thousands of objects, none of them garbage. To find that out, the collector goes through all
    objects of the process every few loads: measured, a tenth of a second beside torch.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
