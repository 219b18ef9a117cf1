"""How far the demo is: a line that moves on a terminal, a line per phase in a pipe."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

_BAR_WIDTH = 20


class Progress:
    """Show the phases of the demo on standard error.

    Args:
        phase_count: how many there are.
        stream: where to show them.
    """

    def __init__(self, phase_count: int, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._live = self._stream.isatty()
        self._phase_count = phase_count
        self._number = 0
        self._text = ""
        self._begin_s = time.monotonic()

    def phase(self, text: str, steps: int) -> Callable[[int], None]:
        """Begin a phase of so many steps; return what is to be called with the steps done."""
        self.end()
        self._number += 1
        self._text = f"{self._number}/{self._phase_count} {text}"
        self._begin_s = time.monotonic()

        def show(step: int) -> None:
            if self._live:
                bar = ("#" * (step * _BAR_WIDTH // steps)).ljust(_BAR_WIDTH, ".")
                what = f"step {step} of {steps}" if step else "starting"
                print(f"\r\x1b[K  {self._text}  [{bar}] {what}", end="", file=self._stream, flush=True)

        if not self._live:
            print(f"  {self._text}", file=self._stream, flush=True)
        show(0)
        return show

    def end(self) -> None:
        """End the phase, if there is one."""
        if self._live and self._text:
            print(f"\r\x1b[K  {self._text}  {time.monotonic() - self._begin_s:.0f} s", file=self._stream, flush=True)
        self._text = ""
