"""Saves beside the training, seen from the trainer: its slots, its saver, and the saves in their hands."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import logging
import os
import queue
import threading
import time
from typing import TYPE_CHECKING, Any, Final

from ckptfmt.engines.saver import SaveRequest
from ckptfmt.engines.staging import Copy, Seen, Staging
from ckptfmt.errors import CkptError, Code, err
from ckptfmt.handle import SaveHandle, SaveReport
from ckptfmt.links import Link, ProcessLink, ThreadLink
from ckptfmt.stage.memory import available_nbytes, plan_slots
from ckptfmt.stage.slot import Slot

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ckptfmt.engines.image import Image
    from ckptfmt.store.protocol import Store

__all__ = ["Background", "staging_thread_count"]

_LOG: Final = logging.getLogger("ckptfmt")


def staging_thread_count() -> int:
    """Return by how many threads a snapshot is copied: half of the cores, and four at most."""
    return max(1, min(4, len(os.sched_getaffinity(0)) // 2))


@dataclasses.dataclass(slots=True, eq=False)
class _Place:
    """A slot, and the save that it holds."""

    slot: Slot
    release: Callable[[], None]
    is_ready: bool = False
    handle: SaveHandle | None = None
    was_written: bool = False
    last_save: int = 0

    def is_free(self) -> bool:
        """Tell whether nothing reads or fills it any more."""
        return self.handle is None

    def close(self) -> None:
        """Let the memory go; pinned memory that a device may still fill stays pinned."""
        if self.handle is None or self.handle.is_copied:
            self.release()
        self.slot.close()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Lent:
    """A slot to be filled.

    Attributes:
        number: of the slot.
        view: of its memory.
        was_written: whether what it holds was written by the save before: then it is what was handed to that.
    """

    number: int
    view: memoryview
    was_written: bool


class Background:
    """The slots and the saver of one trainer. All calls come from the trainer's own thread.

    Args:
        store: rooted at the run.
        in_process: whether the saver is a process of its own, else a thread; it must be a local store then.
        slot_count: how many slots there should be.
        nice: what the saver's process adds to its niceness.
        deadline_s: how long to wait for the saver to be ready, in seconds.
    """

    def __init__(self, store: Store, *, in_process: bool, slot_count: int, nice: int, deadline_s: float) -> None:
        self._store = store
        self._in_process = in_process
        self._slot_count = slot_count
        self._nice = nice
        self._deadline_s = deadline_s
        self._link: Link | None = None
        self._link_count = 0
        self._places: list[_Place] = []
        self._image: Image | None = None
        self._sent_image: Image | None = None
        self._saves: dict[int, tuple[SaveRequest, SaveHandle]] = {}
        self._changed = threading.Condition()
        self._broken: CkptError | None = None
        self._is_closing = False
        self._pid = os.getpid()
        self._failures: list[tuple[str, CkptError]] = []
        self._told: set[str] = set()
        self._count = 0
        self.thread_count = staging_thread_count()
        self._threads = concurrent.futures.ThreadPoolExecutor(max(1, self.thread_count - 1), "ckptfmt-copy")
        self._later: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._stager: threading.Thread | None = None

    # --- getting ready ------------------------------------------------------------------------------------------------

    def prepare(
        self, image: Image, *, shared_by: int, pin: Callable[[Slot], Callable[[], None]] = lambda _: _nothing
    ) -> str:
        """Make and touch slots for an image, and start the saver; nothing to do if that was done.

        Args:
            shared_by: how many trainers of this machine do the same now.
            pin: called with each new slot; what it returns is called before the slot is closed.

        Returns: a sentence if there are fewer slots than wanted; with none at all, nothing can be saved from here.
        Raises: StateError(SLOT_MEMORY); CommitError(SAVER_LOST); what opening the run raises in the saver.
        """
        self._image = image
        self._ensure_link()
        problem = ""
        if not self._places or any(place.slot.nbytes < image.nbytes for place in self._places):
            problem = self._make_slots(image.nbytes, shared_by, pin)
        self._wait_for(lambda: all(place.is_ready for place in self._places), self._deadline_s, "the saver isn't ready")
        return problem

    def _make_slots(self, image_nbytes: int, shared_by: int, pin: Callable[[Slot], Callable[[], None]]) -> str:
        self._wait_for(lambda: all(place.is_free() for place in self._places), self._deadline_s, "slots are in use")
        for place in self._places:
            place.close()
        self._places = []
        room_nbytes = available_nbytes()
        count = plan_slots(image_nbytes, self._slot_count, room_nbytes, shared_by)
        for number in range(count):
            slot = Slot.make(image_nbytes)
            slot.touch()
            self._places.append(_Place(slot, pin(slot)))
            self._give_slot(number)
        if count == self._slot_count:
            return ""
        detail = f"{image_nbytes} bytes each, and {room_nbytes} are left for {shared_by} trainers of this machine"
        return f"SLOTS_REDUCED: {count} of {self._slot_count} slots: {detail}"

    def _ensure_link(self) -> None:
        if os.getpid() != self._pid:
            remedy = "Save from the process that made the checkpointer."
            raise err(
                Code.SAVER_LOST, "this process was forked from the trainer", where=self._store.name, remedy=remedy
            )
        if self._link is not None:
            return
        with self._changed:
            self._broken = None
            self._sent_image = None
            self._link_count += 1
            on_lost = functools.partial(self._on_lost, self._link_count)
        if self._in_process:
            self._link = ProcessLink(self._store.name, nice=self._nice, on_message=self._on_message, on_lost=on_lost)
        else:
            self._link = ThreadLink(self._store, on_message=self._on_message)
        for number in range(len(self._places)):
            self._give_slot(number)

    def _give_slot(self, number: int) -> None:
        assert self._link is not None  # noqa: S101 - _ensure_link made it
        self._places[number].is_ready = False
        self._link.add_slot(number, self._places[number].slot)

    # --- saving -------------------------------------------------------------------------------------------------------

    @property
    def has_slots(self) -> bool:
        """Whether anything can be saved from here."""
        return bool(self._places)

    def is_busy(self) -> bool:
        """Tell whether every slot holds a save that isn't written."""
        with self._changed:
            return not any(place.is_free() for place in self._places)

    def wait_free(self, timeout_s: float) -> None:
        """Wait until a slot is free. Raises: CommitError(SLOTS_BUSY) at the timeout."""
        with self._changed:
            if not self._changed.wait_for(lambda: any(place.is_free() for place in self._places), timeout_s):
                saves = ", ".join(str(handle) for _, handle in self._saves.values())
                raise err(Code.SLOTS_BUSY, f"no slot is free after {timeout_s:g} s: {saves}")

    def begin(self, request: SaveRequest, handle: SaveHandle) -> Lent:
        """Begin a save into a free slot, which is returned; the saver follows the copies from now on."""
        assert self._image is not None  # noqa: S101 - see prepare
        self._ensure_link()
        self._wait_for(lambda: all(place.is_ready for place in self._places), self._deadline_s, "the saver isn't ready")
        with self._changed:
            link = self._link
            if link is None:
                raise err(Code.SAVER_LOST, "it ended just now", where=handle.path)
            # The one that was filled longest ago, so that the newest snapshot stays for as long as it can.
            number = min((n for n, place in enumerate(self._places) if place.is_free()), key=self._last_use)
            place = self._places[number]
            self._count += 1
            lent = Lent(number=number, view=place.slot.view, was_written=place.was_written)
            place.handle, place.last_save, place.was_written = handle, self._count, False
            request = dataclasses.replace(request, number=self._count, slot=number)
            self._saves = {n: save for n, save in self._saves.items() if not save[1].is_over}
            self._saves[request.number] = (request, handle)
        if self._sent_image is not self._image:
            link.send({"type": "image", "image": self._image.as_dict()})
            self._sent_image = self._image
        link.send({"type": "save", "request": request.as_dict()})
        return lent

    def _last_use(self, number: int) -> int:
        return self._places[number].last_save

    def stage(self, handle: SaveHandle, now: Sequence[Copy], later: Sequence[Copy], view: memoryview) -> None:
        """Do the copies of a save: those of `now` before this returns, those of `later` in a thread.

        Raises: what a copy of `now` raises; then the save is abandoned.
        """
        assert self._image is not None  # noqa: S101 - see prepare
        number = self._number_of(handle)
        link = self._link

        def tell(nbytes: int, seen: Sequence[Seen]) -> None:
            if link is not None:
                rows = [[one.begin, one.digests, one.kept] for one in seen]
                link.send({"type": "staged", "number": number, "nbytes": nbytes, "seen": rows})

        copies = sorted((*now, *later), key=lambda copy: copy.begin)
        staging = Staging(self._image, copies, view, tell)
        try:
            for copy in copies:
                copy.start()
            staging.run(now, threads=self._threads, thread_count=self.thread_count)
        except BaseException as error:
            self._end_copies(number, handle, error)
            raise
        if not later:
            self._end_copies(number, handle, None)
            return

        def run_later() -> None:
            problem: BaseException | None = None
            try:
                staging.run(later)
            except Exception as error:  # noqa: BLE001 - told by the handle
                problem = error
            self._end_copies(number, handle, problem)

        if self._stager is None:
            self._stager = threading.Thread(target=self._stage_later, name="ckptfmt-stager", daemon=True)
            self._stager.start()
        self._later.put(run_later)

    def abandon(self, handle: SaveHandle, problem: BaseException) -> None:
        """Give up a save that was begun, and of which nothing is copied."""
        self._end_copies(self._number_of(handle), handle, problem)

    def _number_of(self, handle: SaveHandle) -> int:
        return next(number for number, (_, known) in self._saves.items() if known is handle)

    def _stage_later(self) -> None:
        while (task := self._later.get()) is not None:
            task()

    def _end_copies(self, number: int, handle: SaveHandle, problem: BaseException | None) -> None:
        """Say that a save's snapshot is complete, or that it never will be."""
        link = self._link
        if problem is not None:
            known = problem if isinstance(problem, CkptError) else None
            self._fail(number, known or err(Code.STATE_CHANGED, f"the copy failed: {problem}", remedy=""))
        if link is not None:
            detail = {} if problem is None else {"detail": str(problem)}
            link.send({"type": "complete" if problem is None else "abandon", "number": number, **detail})
        with self._changed:
            handle.tell_copied()
            self._free_slots()

    # --- what the saver tells -----------------------------------------------------------------------------------------

    def _on_message(self, message: dict[str, Any]) -> None:
        kind = message["type"]
        if kind == "ready":
            with self._changed:
                self._places[message["slot"]].is_ready = True
                self._changed.notify_all()
        elif kind == "broken":
            self._lose(error_of(message["error"]))
        else:
            self._on_state(message)

    def _on_state(self, message: dict[str, Any]) -> None:
        number, state = message["number"], message["state"]
        save = self._saves.get(number)
        if save is None:
            return  # it is over, and forgotten
        request, handle = save
        if state == "FAILED":
            self._fail(number, error_of(message))
            return
        if state == "DONE":
            if message["problem"]:
                _LOG.warning("clean-up stopped: %s", message["problem"])
            handle.tell_over(tuple(message["removed"]))
        elif state == "COMMITTED":
            report = SaveReport(
                path=handle.path,
                digest=message["digest"],
                step=request.origin.step,
                nbytes=message["nbytes"],
                writer_count=request.origin.writer_count,
                profile=message["profile"],
                stored_nbytes=message["stored_nbytes"],
                reason=message["reason"],
            )
            handle.tell_state(state, report)
            _LOG.info("step %d COMMITTED in %.2f s: %s", handle.step, handle.times.get(state, 0.0), handle.path)
        else:
            handle.tell_state(state)
        with self._changed:
            self._free_slots()

    def _on_lost(self, link_number: int) -> None:
        """Take note that the saver's process is gone."""
        with self._changed:
            # When we close, it finishes what it has. If there is another by now, the loss of this one is known.
            if not self._is_closing and link_number == self._link_count:
                self._lose(err(Code.SAVER_LOST, "it ended", where=self._store.name))

    def _lose(self, error: CkptError) -> None:
        """Let go of the saver: whatever it has in its hands isn't known to be committed."""
        # All at once: who learns of it from a handle may start the next saver, to which this is nothing.
        with self._changed:
            self._link = None
            self._broken = error
            for number, (_, handle) in list(self._saves.items()):
                if not handle.is_over:
                    self._fail(number, error_of({**error.as_json(), "where": handle.path}))
            self._changed.notify_all()

    def _fail(self, number: int, error: CkptError) -> None:
        request, handle = self._saves[number]
        with self._changed:
            # Together: who learns of it from the handle finds it here too.
            if handle.tell_failed(error):
                _LOG.error("step %d FAILED: %s", handle.step, error)
                if request.origin.attempt not in self._told:
                    self._failures.append((request.origin.attempt, error))
            self._free_slots()

    def _free_slots(self) -> None:
        for place in self._places:
            handle = place.handle
            if handle is not None and handle.is_through:
                place.handle, place.was_written = None, "WRITTEN" in handle.times
        self._changed.notify_all()

    # --- failures, and the end ----------------------------------------------------------------------------------------

    def next_failure(self) -> tuple[str, CkptError] | None:
        """Return attempt and error of a save that failed and of which nobody was told yet."""
        with self._changed:
            return self._failures[0] if self._failures else None

    def tell_failure(self, attempt: str) -> None:
        """Take note that the failure of an attempt was raised here: not again, even if it is still to come."""
        with self._changed:
            self._told.add(attempt)
            self._failures = [failure for failure in self._failures if failure[0] not in self._told]

    def close(self, timeout_s: float) -> list[SaveHandle]:
        """Wait until all saves are over, end the saver, and let the slots go.

        Returns: the saves that weren't over in time; a process goes on with them, a thread ends with this one.
        """
        if os.getpid() != self._pid:
            return []  # a fork of the trainer leaves its `with`, and has none of it
        end_s = time.monotonic() + timeout_s
        rest = [
            handle
            for _, handle in list(self._saves.values())
            if not handle.wait_over(max(0.0, end_s - time.monotonic()))
        ]
        for handle in rest if self._in_process else ():
            # Nobody will tell it anything any more, and somebody may wait for it.
            handle.tell_failed(err(Code.SAVER_LOST, "the checkpointer was closed meanwhile", where=handle.path))
        self._threads.shutdown(wait=not rest, cancel_futures=True)
        self._end_link(1.0 if rest else 5.0)
        self._end_staging()
        return rest

    def let_go(self, timeout_s: float) -> None:
        """Wait for no longer than it takes to lose nothing: a process finishes by itself what is staged."""
        if os.getpid() != self._pid:
            return  # a fork of the trainer ends, and has none of it
        end_s = time.monotonic() + timeout_s
        for _, handle in self._saves.values():
            rest_s = max(0.0, end_s - time.monotonic())
            if self._in_process:
                with contextlib.suppress(CkptError):
                    handle.wait_staged(rest_s)
            else:
                handle.wait_over(rest_s)
        # What it was told last has to reach it; how it goes on with that needn't be seen.
        self._end_link(0.5, drain_s=end_s - time.monotonic())
        self._end_staging()

    def _end_staging(self) -> None:
        """Let slots and stager go, as soon as the copies that they still have in their hands are done."""
        self._later.put(None)
        for place in self._places:
            place.close()
        self._places = []

    def _end_link(self, timeout_s: float, *, drain_s: float = 0.0) -> None:
        self._is_closing = True
        link, self._link = self._link, None
        if link is not None:
            link.close(timeout_s, drain_s=drain_s)

    def _wait_for(self, is_there: Callable[[], bool], timeout_s: float, detail: str) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._broken is not None or is_there(), timeout_s)
            if self._broken is not None:
                broken, self._broken, self._link = self._broken, None, None
                raise broken
            if not is_there():
                raise err(Code.SAVER_LOST, f"{detail} after {timeout_s:g} s", where=self._store.name)


def _nothing() -> None:
    """Release what was never pinned."""


def error_of(told: dict[str, Any]) -> CkptError:
    """Return the error that another process told of."""
    return err(
        Code(told["code"]),
        told["detail"],
        where=told["where"],
        requirement=told["requirement"],
        remedy=told["remedy"],
    )
