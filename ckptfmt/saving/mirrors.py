"""The mirrors of a run in training: a thread copies each commit; failures don't stop a training."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from ckptfmt.errors import Code, printable
from ckptfmt.run.mirror import mirror_run
from ckptfmt.saving.handle import SaveHandle
from ckptfmt.store import open_store
from ckptfmt.store.protocol import Store
from ckptfmt.write.writer import as_ckpt_error

#: Place of a mirror: a directory or URL, a store rooted there, or another home of the run.
Place: TypeAlias = "str | os.PathLike[str] | Store | HomePlace"

if TYPE_CHECKING:
    from ckptfmt.run.homes import HomePlace

_LOG: Final = logging.getLogger("ckptfmt")
#: Longest time for a copy to stop after a request, in seconds.
_STOP_S: Final = 5.0
#: Longest wait of `close` for other processes' uploads to home, and its polling interval, in
#: seconds.
_OTHERS_S: Final = 10.0
_PAUSE_S: Final = 0.5
#: Longest pause before a failed copy to another home is made again, in seconds.
_PAUSE_MAX_S: Final = 30.0


def _open(place: str | os.PathLike[str] | Store) -> Store:
    return open_store(place, writable=True)


class Mirrors:
    """The mirrors of a run, and the only thread for copies, which lives while copies are due.

    Args:
        home: store rooted at the run.
        places: places of the mirrors.
        reports: list to which a sentence is added for each problem.
        opens: opens the store of a place, and raises StoreError if the place doesn't answer.
        are_homes: see `mirror_run`.
        repeats: whether a failed copy is made again after a pause, instead of behind the next
            commit.
        tidy: called with the store of a mirror after each copy that brought the head; retires
            checkpoints there, and returns a problem or an empty string.
    """

    def __init__(
        self,
        home: Store,
        places: Sequence[Place],
        reports: list[str],
        *,
        opens: Callable[[Any], Store] = _open,
        are_homes: bool = False,
        repeats: bool = False,
        tidy: Callable[[Store], str] = lambda _: "",
    ) -> None:
        self._home = home
        self._places = places
        self._reports = reports
        self._opens = opens
        self._are_homes = are_homes
        #: The newest sentence about a failed copy that is repeated, by place.
        self._repeated: dict[str, str] = {}
        self._repeats = repeats
        self._tidy = tidy
        self._stop = threading.Event()
        #: Ends a pause before another copy.
        self._wake = threading.Event()
        self._lock = threading.Lock()  # guards the next five attributes
        self._is_wanted = self._is_behind = self._is_overtaken = False
        self._in_caches: frozenset[str] = frozenset()
        self._thread: threading.Thread | None = None

    @property
    def is_behind(self) -> bool:
        """Whether a copy is due, in progress, or has failed."""
        with self._lock:
            return self._is_behind or self._thread is not None

    @property
    def is_overtaken(self) -> bool:
        """Whether the run goes on at the mirror, so that no copy is made any more."""
        with self._lock:
            return self._is_overtaken

    def note_launch(self) -> None:
        """Copy at the end at the latest: processes of an earlier launch may have ended before."""
        self._is_behind = True

    def follow(self, handle: SaveHandle) -> None:
        """Start a copy of the committed checkpoints when a save is committed."""
        handle.on_committed(lambda _: self.start())

    def close(self, deadline_s: float, brought_home: str | None = None) -> None:
        """Wait until the mirrors are complete; stop a running copy at the deadline.

        Args:
            deadline_s: longest wait in seconds.
            brought_home: name of a checkpoint, if this process uploaded files after the commit.
                Other processes may still be uploading their files.
        """
        end_s = time.monotonic() + deadline_s
        others_end_s = min(end_s, time.monotonic() + _OTHERS_S)
        self._join(end_s)
        if self._is_behind or brought_home is not None:
            self.start()  # another try: the store may answer now
            self._join(end_s)
        while brought_home in self._in_caches and time.monotonic() < others_end_s:
            time.sleep(_PAUSE_S)
            self.start()
            self._join(end_s)
        if brought_home in self._in_caches:
            self._report(
                f"MIRROR_BEHIND: {brought_home} isn't at home yet, with the files of all"
                " processes; `mirror` copies the checkpoint afterwards"
            )
        thread = self._thread
        if thread is not None:
            self._report(
                "MIRROR_BEHIND: the last checkpoints weren't copied by the deadline; `mirror`"
                " copies them"
            )
            self.stop()
            thread.join(_STOP_S)

    def stop(self) -> None:
        """Begin no further copy, and end a copy in progress soon."""
        self._stop.set()
        self._wake.set()

    def _join(self, end_s: float) -> None:
        thread = self._thread
        if thread is not None:
            thread.join(max(0.0, end_s - time.monotonic()))

    def start(self) -> None:
        """Start a copy of the committed checkpoints, after a copy in progress."""
        self._wake.set()
        with self._lock:
            self._is_wanted = True
            if self._thread is None and not self._stop.is_set():
                # A daemon: unfinished copies at the interpreter's exit are made another time.
                thread = threading.Thread(target=self._run, name="ckptfmt-mirror", daemon=True)
                thread.start()  # waits for the lock
                self._thread = thread

    def _run(self) -> None:
        pause_s = _PAUSE_S
        while True:
            with self._lock:
                if not self._is_wanted or self._stop.is_set():
                    self._thread = None
                    return
                self._is_wanted = self._is_behind = False
            for place in self._places:
                self._copy(place)
            if not self._repeats or not self._is_behind or self._is_overtaken:
                pause_s = _PAUSE_S
                continue
            self._wake.wait(pause_s)
            self._wake.clear()
            pause_s = min(2 * pause_s, _PAUSE_MAX_S)
            with self._lock:
                self._is_wanted = True

    def _copy(self, place: Place) -> None:
        name = os.fspath(place) if isinstance(place, str | os.PathLike) else place.name
        try:
            store = self._opens(place)
            report = mirror_run(self._home, store, are_homes=self._are_homes, stop=self._stop)
            is_current = report.current and not report.stopped
            left = self._tidy(store) if is_current else ""
        except BaseException as error:  # noqa: BLE001
            known = as_ckpt_error(error)
            with self._lock:
                self._is_behind = True
                self._is_overtaken |= known.code == Code.HOMES_DIVERGED
            self._report(f"MIRROR_BEHIND: {name}: {known}", place=name)
            return
        with self._lock:
            self._in_caches = frozenset(report.in_caches)
            self._is_behind |= self._repeats and not is_current
        for problem in report.problems:
            self._report(f"MIRROR_BEHIND: {name}: {problem}")
        if left:
            self._report(f"MIRROR_BEHIND: {name}: the clean-up there: {left}", place=name)
        for copied in report.copied:
            _LOG.info("mirrored %s to %s", copied, printable(str(name)))

    def _report(self, sentence: str, *, place: str = "") -> None:
        """Log and report a problem; of repeated copies to a place, only the newest is kept."""
        if sentence in self._reports:
            return
        if self._repeats and place:
            before = self._repeated.get(place)
            with contextlib.suppress(ValueError):
                self._reports.remove(before or "")
            self._repeated[place] = sentence
        _LOG.warning("%s", sentence)
        self._reports.append(sentence)
