"""The bar of long work: on a terminal, on standard error, and only once the work has taken a moment."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Final, Self

from ckptfmt.cli.console import bytes_text, is_terminal

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

#: Work that is done sooner shows nothing, in seconds; and how often the bar moves after that.
_DELAY_S: Final = 0.5
_EVERY_S: Final = 0.1
_BAR_WIDTH: Final = 24


class Progress:
    """Show how many bytes are done; a context manager that leaves no trace.

    Args:
        total: returns how many bytes there are, None if nobody knows; asked only if the bar is shown.
        quiet: show nothing in any case.
    """

    def __init__(self, total: Callable[[], int | None], *, quiet: bool) -> None:
        self._shown = not quiet and is_terminal(sys.stderr)
        self._ask_total = total
        self._total_nbytes: int | None = None
        self._done_nbytes = 0
        self._begin_s = self._last_s = time.monotonic()
        self._drawn = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._drawn:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def advance(self, nbytes: int) -> None:
        """Add bytes that are done, and move the bar if it is time."""
        self._done_nbytes += nbytes
        if not self._shown:
            return
        now_s = time.monotonic()
        if now_s - self._begin_s < _DELAY_S or now_s - self._last_s < _EVERY_S:
            return
        if not self._drawn:
            self._total_nbytes = self._ask_total()
        self._drawn, self._last_s = True, now_s
        print(f"\r\x1b[K{self._text(now_s)}", end="", file=sys.stderr, flush=True)

    def _text(self, now_s: float) -> str:
        rate = bytes_text(int(self._done_nbytes / max(now_s - self._begin_s, 1e-9)))
        done = bytes_text(self._done_nbytes)
        if not self._total_nbytes:
            return f"{done}  {rate}/s"
        part = min(1.0, self._done_nbytes / self._total_nbytes)
        bar = ("#" * round(part * _BAR_WIDTH)).ljust(_BAR_WIDTH, ".")
        return f"[{bar}] {part:4.0%}  {done} of {bytes_text(self._total_nbytes)}  {rate}/s"
