"""Peaks of memory during a computation: in this process, and in the saver process below."""

from __future__ import annotations

import threading
import time
from typing import Final, Self

from benchmarks.machine import find_children, rss_anon_nbytes, rss_unfiled_nbytes

_SAVER: Final = "ckptfmt.saving.saver"
_EVERY_S: Final = 0.005
_OFTEN_S: Final = 0.002
_LOOK_EVERY: Final = 10  # a search for new children reads all of /proc


class PeakMemory:
    """Watch anonymous resident memory from a thread while the context is open.

    Slots are shared memory, and are in none of these figures.
    """

    def __init__(self) -> None:
        self._before_nbytes = self._peak_nbytes = self._saver_peak_nbytes = 0
        self._savers: list[int] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peak-memory", daemon=True)

    def __enter__(self) -> Self:
        self._before_nbytes = self._peak_nbytes = rss_anon_nbytes()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def describe(self) -> dict[str, int]:
        """Return the peaks in bytes: this process's growth, and the saver's total."""
        return {
            "trainer_beyond_slots_nbytes": self._peak_nbytes - self._before_nbytes,
            "saver_anonymous_nbytes": self._saver_peak_nbytes,
            "saver_processes": len(self._savers),
        }

    def _watch(self) -> None:
        samples = 0
        while not self._is_over.is_set():
            if samples % _LOOK_EVERY == 0:
                self._savers = sorted({*self._savers, *find_children(_SAVER)})
            self._peak_nbytes = max(self._peak_nbytes, rss_anon_nbytes())
            savers_nbytes = sum(rss_anon_nbytes(pid) for pid in self._savers)
            self._saver_peak_nbytes = max(self._saver_peak_nbytes, savers_nbytes)
            samples += 1
            time.sleep(_EVERY_S)


class PeakResident:
    """Watch this process's anonymous and shared memory from a thread while the context is open.

    Attributes:
        extra_nbytes: the peak beyond the initial value.
    """

    def __init__(self) -> None:
        self.extra_nbytes = 0
        self._before_nbytes = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peak-resident", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._before_nbytes = rss_unfiled_nbytes()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._is_over.wait(_OFTEN_S):
            if self._before_nbytes:
                self.extra_nbytes = max(
                    self.extra_nbytes, rss_unfiled_nbytes() - self._before_nbytes
                )
