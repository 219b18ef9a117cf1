"""Saves in the background, on the trainer's side: the slots, the saver and the saves in flight."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from ckptfmt.box import Box
from ckptfmt.documents.manifest import Origin
from ckptfmt.documents.tables import TensorKey
from ckptfmt.errors import CkptError, Code, StoreError, encodable, err, error_from_json
from ckptfmt.run.node_cache import Cache
from ckptfmt.run.save_job import SaveJob, SaveState
from ckptfmt.saving.handle import STATES, SaveHandle, SaveReport, tell_committed, wait_until
from ckptfmt.saving.links import Link, Lost, ProcessLink, ThreadLink
from ckptfmt.saving.request import OF_MANIFEST
from ckptfmt.store import address_of
from ckptfmt.store.protocol import Store
from ckptfmt.write.image import Image
from ckptfmt.write.processors import processor_count
from ckptfmt.write.slot import Slot, available_nbytes, is_shortage, plan_slots
from ckptfmt.write.snapshot import Memory
from ckptfmt.write.staging import Copy, Seen, Staging

_LOG: Final = logging.getLogger("ckptfmt")
#: Codes, besides those of store errors, of failures between cache and home that don't end a
#: training.
_PASSING: Final = frozenset(
    {
        Code.FILE_MISSING, Code.FILE_NBYTES, Code.BLOCK_DIGEST, Code.HEADER_DIGEST, Code.DOC_DIGEST,
        Code.DOC_MISMATCH, Code.WRITER_FAILED, Code.WRITERS_MISSING, Code.COMMIT_UNKNOWN,
    }
)  # fmt: skip


def staging_thread_count() -> int:
    """Return the number of threads for copies of a snapshot: half of the cores, at most four."""
    return max(1, min(4, processor_count() // 2))


@dataclasses.dataclass(slots=True, eq=False)
class SaveSlot:
    """A slot with the save in the slot.

    Attributes:
        number: the slot's number.
        release: unpins the slot's memory; None before the first save.
        given_to: link over which the slot was handed to a saver.
        ready_for: number of the link whose saver has mapped the slot.
        refusal: error of a saver without memory for the slot.
        handle: handle of the save in the slot; None if the slot is free.
        was_written: whether the slot's last save was WRITTEN, so that the slot holds the snapshot
            that was handed to the saver.
        last_save: number of the slot's last save; 0 for none.
        attempt: name of the last save's attempt; empty for none.
        image: layout of the last save's snapshot.
    """

    number: int
    slot: Slot
    release: Callable[[], None] | None = None
    given_to: Link | None = None
    ready_for: int = 0
    refusal: CkptError | None = None
    handle: SaveHandle | None = None
    was_written: bool = False
    last_save: int = 0
    attempt: str = ""
    image: Image | None = None

    def close(self) -> None:
        """Unmap the memory. Pinned memory that a device may still fill stays pinned."""
        if self.release is not None and (self.handle is None or self.handle.is_copied):
            self.release()
        self.slot.close()


@dataclasses.dataclass(slots=True, eq=False, kw_only=True)
class _Save:
    """A started save.

    Attributes:
        number: number of the save in this trainer, by which the saver knows the save.
        state: values of the save.
        link: link to the save's saver.
        thread: id of the thread that called `save`.
        later: copies in the stager's thread, once they were handed over.
        is_complete: whether all is copied, so that the saver may finish the save.
        is_held: whether the saver holds the save, whose failure ends no training.
    """

    number: int
    state: SaveState
    handle: SaveHandle
    link: Link
    thread: int
    later: concurrent.futures.Future[None] | None = None
    is_complete: bool = False
    is_held: bool = False

    def answer(self, problem: str) -> None:
        """Send the saver the result of the replication: an empty string, or the problem."""
        self.link.send({"type": "replicated", "number": self.number, "problem": encodable(problem)})

    def is_left(self) -> bool:
        """Return whether the copies are incomplete and no thread works on them any more."""
        if self.handle.is_copied:
            return False
        # Without `later` the thread that called `save` copies. If that same thread asks, its
        # copying has ended.
        return threading.get_ident() == self.thread if self.later is None else self.later.done()


class Background:
    """The slots and the saver of one trainer. All calls come from the trainer's own thread.

    Every loss of the saver ends in `_lose`, which fails the saver's unfinished saves. The next save
    starts another saver.

    Args:
        store: store rooted at the run; None if each request names its place.
        in_process: whether the saver is a separate process instead of a thread. Then `address_of`
            must know the store.
        slot_count: largest number of slots. Slots after the first ones are made when a save finds
            all slots busy.
        first_count: number of slots made at first.
        nice: increment of the saver process's niceness.
        deadline_s: longest wait for the saver to be ready, in seconds.
        cache: node cache for saves of the run; None for none.
        note: called from a thread with a sentence from the saver.
        on_written: called with the values of a WRITTEN save, and a function to send the saver the
            result of the replication.
    """

    def __init__(
        self,
        store: Store | None,
        *,
        in_process: bool,
        slot_count: int,
        first_count: int = 1,
        nice: int,
        deadline_s: float,
        cache: Cache | None = None,
        note: Callable[[str], None] = lambda _: None,
        on_written: Callable[[SaveState, Callable[[str], None]], None] = lambda *_: None,
    ) -> None:
        self._store = store
        self._cache = cache
        self._note = note
        self._on_written = on_written
        self._name = None if store is None else store.name
        self._address = None if store is None else address_of(store)
        self._in_process = in_process
        self._slot_count = slot_count
        self._first_count = first_count
        self._nice = nice
        self._deadline_s = deadline_s
        self._pid = os.getpid()
        #: The image of the slots, and the image sent to the saver.
        self._image: Image | None = None
        self._sent_image: Image | None = None
        # Entered directly instead of through the condition: an interrupt can't come between the
        # acquisition and the `with` block.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        # The lock guards all attributes below.
        self._link: Link | None = None
        self._link_number = 0
        #: The error by which the link of this number was lost; None if the link is in use.
        self._lost: CkptError | None = None
        self._places: list[SaveSlot] = []
        self._preparing: threading.Thread | None = None
        self._has_failed_preparing = False
        self._is_cancelled = False
        #: Number of slots that fit into memory, as far as known.
        self._room_count = 0
        self._shared_by = 1
        self._pin: Callable[[Slot], Callable[[], None]] = _pin_nothing
        #: Whether slots must be made: there are none, or a thread or a saver may still use them.
        self._wants_slots = True
        self._saves: dict[int, _Save] = {}
        #: The saves that the saver holds, the newest last: not written before `release_held`.
        self._held: list[_Save] = []
        self._count = 0
        self._is_closing = False
        self._failures: list[tuple[str, SaveHandle]] = []
        self._told: set[str] = set()
        self.thread_count = staging_thread_count()
        self._threads = concurrent.futures.ThreadPoolExecutor(
            max(1, self.thread_count - 1), "ckptfmt-copy"
        )
        self._stager = concurrent.futures.ThreadPoolExecutor(1, "ckptfmt-stager")

    # --- getting ready ----------------------------------------------------------------------------

    def prepare(
        self,
        image: Image,
        *,
        shared_by: int,
        pin: Callable[[Slot], Callable[[], None]] | None = None,
    ) -> str:
        """Make and touch slots for an image, and start the saver, unless both are ready.

        At first there are `first_count` slots; see `begin_adding_slot`.

        Args:
            shared_by: number of trainers making slots on this machine at the same time.
            pin: called with each slot by the slot's first save. The returned function is called
                before the slot closes.

        Returns: a sentence if there is room for fewer slots than wanted, else an empty string.
            Without any slot no save is possible from here.
        Raises: CommitError(SAVER_LOST, SLOTS_BUSY); the saver's error of opening the run.
        """
        self._settle()
        self._check_process()
        self._image = image
        if self.fits(image):
            self._ready_link()
            return ""
        # After a failure in a thread the other trainers have their slots already.
        self._shared_by = 1 if self._has_failed_preparing else shared_by
        self._pin = pin or _pin_nothing
        count, reason = self._find_room(image.nbytes, self._slot_count)
        wanted = min(count, max(self._first_count, len(self._places)))
        while True:
            try:
                self._make_slots(wanted, image.nbytes)
                break
            except Exception as error:
                # A limit of this process or of the saver may refuse memory that the system reports
                # as available.
                if not (wanted and is_shortage(error)):
                    raise
                count = wanted = wanted - 1
                reason = _reason_of(error)
        self._has_failed_preparing = False
        self._room_count = count
        return self._tell_room(reason)

    def begin_preparing(self, prepare: Callable[[], None]) -> None:
        """Call a function with a call of `prepare`, in a thread.

        Calls that use slots wait for the end of the thread. An error is logged, and the next save
        prepares again.
        """

        def work() -> None:
            try:
                prepare()
            except Exception as error:  # noqa: BLE001
                self._has_failed_preparing = True
                if not self._is_cancelled:
                    told = "saves can't be prepared now, and the next save tries again: %s"
                    _LOG.warning(told, error)

        self._begin_thread(work)

    def begin_adding_slot(self, report: Callable[[str], None]) -> None:
        """Make a further slot in a thread, unless there are as many as planned.

        The thread's failure costs nothing but the slot.

        The saver attaches the slot before the first save in the slot, and isn't waited for: a saver
        that hangs delays no training.

        Args:
            report: called in the thread with a sentence if there is no room for the slot.
        """
        self._settle()
        image = self._image
        if image is not None and self.fits(image) and len(self._places) < self._room_count:
            self._begin_thread(functools.partial(self._add_slot, image.nbytes, report))

    def _begin_thread(self, work: Callable[[], None]) -> None:
        self._settle()
        self._preparing = threading.Thread(target=work, name="ckptfmt-prepare", daemon=True)
        try:
            self._preparing.start()
        except RuntimeError:  # no thread can start: the next save prepares
            self._preparing = None

    def _settle(self, *, cancels: bool = False) -> None:
        """Wait for the end of a preparation in a thread; the thread itself doesn't wait.

        Args:
            cancels: whether the preparation is of no use any more, and ends early.
        """
        self._is_cancelled |= cancels
        thread = self._preparing
        if thread is not None and thread is not threading.current_thread():
            if os.getpid() == self._pid:  # a fork of the trainer has no such thread
                thread.join()
            self._preparing = None

    def _find_room(self, nbytes: int, wanted: int) -> tuple[int, str]:
        """Return the number of further slots within a limit and the memory, and the reason."""
        room_nbytes = available_nbytes()
        reason = (
            f"{nbytes} bytes each, and {room_nbytes} are left for {self._shared_by} trainers"
            " of this machine"
        )
        return plan_slots(nbytes, wanted, room_nbytes, self._shared_by), reason

    def _tell_room(self, reason: str) -> str:
        if self._room_count == self._slot_count:
            return ""
        return f"SLOTS_REDUCED: {self._room_count} of {self._slot_count} slots: {reason}"

    def _add_slot(self, nbytes: int, report: Callable[[str], None]) -> None:
        count, reason = self._find_room(nbytes, 1)
        try:
            if count:
                self._make_slot(nbytes)
        except Exception as error:  # noqa: BLE001
            count, reason = 0, _reason_of(error)
        if count:
            self._hand_out(self._places[-1])
            return
        self._room_count = len(self._places)
        if not self._is_cancelled:
            report(self._tell_room(reason))

    def _hand_out(self, place: SaveSlot) -> None:
        """Hand a further slot to the saver, if there is a saver. The next saver gets all slots."""
        with self._lock:
            link = self._link
            number = self._link_number
        if link is not None:
            link.add_slot(place.number, place.slot)
            place.given_to = link
            place.ready_for = number

    def _make_slot(self, nbytes: int) -> None:
        slot = Slot.make(nbytes)
        slot.touch(self._check_going, thread_count=self.thread_count)
        with self._lock:
            self._places.append(SaveSlot(len(self._places), slot))

    def _check_going(self, _: int) -> None:
        """Raise SAVER_LOST if the slots in preparation are of no use any more."""
        if self._is_cancelled:
            raise err(Code.SAVER_LOST, "the saves are being closed", where=self._name)

    def _make_slots(self, count: int, nbytes: int) -> None:
        """Wait until the slots are free, close them, make new slots, and hand them to the saver.

        Held saves are dropped.
        """
        self.drop_held()
        if not self._wait(lambda: all(place.handle is None for place in self._places)):
            raise self.busy_error(self._deadline_s)
        if count < len(self._places):
            self._end_idle_link()
        with self._lock:
            self._wants_slots = True
            places = self._places
            self._places = []
        for place in places:
            place.close()
        for _ in range(count):
            self._make_slot(nbytes)
        if count:
            self._ready_link()
        self._wants_slots = False

    def _end_idle_link(self) -> None:
        """End the saver once all saves are over: a saver keeps the memory of old slots."""
        with self._lock:
            handles = [save.handle for save in self._saves.values()]
        if all(handle.wait_over(self._deadline_s) for handle in handles):
            self._drop(err(Code.SAVER_LOST, "the saver had no slots any more", where=self._name))

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            remedy = "Save from the process that made the checkpointer."
            raise err(
                Code.SAVER_LOST,
                "this process is a fork of the saving process",
                where=self._name,
                remedy=remedy,
            )

    def _ready_link(self) -> Link:
        """Return the link to a saver with all slots; start a saver if none is running.

        Raises: CommitError(SAVER_LOST); the saver's error.
        """
        self.look()
        self._drop_refused()
        link = self._link or self._start_link()
        for place in self._places:
            if place.given_to is not link:
                place.refusal = None
                link.add_slot(place.number, place.slot)
                place.given_to = link
        number = self._link_number

        def is_ready() -> bool:
            return (
                self._is_cancelled
                or self._link is not link
                or all(place.ready_for == number or place.refusal for place in self._places)
            )

        if not is_ready() and not self._wait(is_ready):
            self._drop(
                err(
                    Code.SAVER_LOST,
                    f"the saver isn't ready in {self._deadline_s:g} s",
                    where=self._name,
                )
            )
        self._check_going(0)
        with self._lock:
            if self._link is not link:
                raise self._lost or err(
                    Code.SAVER_LOST, "the saver ended just now", where=self._name
                )
            for place in self._places:
                if place.refusal is not None:
                    raise place.refusal
        return link

    def _drop_refused(self) -> None:
        """Close a further slot that the saver has no memory for, once no save is in the slot."""
        with self._lock:
            last = self._places[-1] if len(self._places) > 1 else None
            if last is None or last.refusal is None or last.handle is not None:
                return
            self._places = self._places[:-1]
            self._room_count = len(self._places)
        last.close()

    def _start_link(self) -> Link:
        number = self._number_link()
        link: Link | None = None
        on_message = functools.partial(self._on_message, number)
        on_lost = functools.partial(self._on_lost, number)
        try:
            link = self._make_link(on_message, on_lost)
            with self._lock:
                lost = self._lost
                self._link = link if lost is None else None
        finally:
            if link is not None and self._link is not link:
                link.drop()
        if lost is not None:  # the saver was lost while it started
            raise lost
        return link

    def _number_link(self) -> int:
        with self._lock:
            self._link_number += 1
            self._lost = self._sent_image = None
            return self._link_number

    def _make_link(
        self, on_message: Callable[[dict[str, Any]], None], on_lost: Callable[[Lost], None]
    ) -> Link:
        if self._in_process:
            return ProcessLink(
                self._address,
                cache=self._cache,
                nice=self._nice,
                on_message=on_message,
                on_lost=on_lost,
            )
        return ThreadLink(self._store, cache=self._cache, on_message=on_message, on_lost=on_lost)

    # --- saving -----------------------------------------------------------------------------------

    @property
    def has_slots(self) -> bool:
        """Whether saves from here are possible, as far as known."""
        self._settle()
        return bool(self._places) or self._wants_slots

    def is_busy(self) -> bool:
        """Return whether every slot holds an unwritten save."""
        self._settle()
        with self._lock:
            return bool(self._places) and not any(
                place.handle is None and place.refusal is None for place in self._places
            )

    def fits(self, image: Image) -> bool:
        """Return whether the slots are made, and hold the image of the last `prepare`."""
        self._settle()
        return (
            self._image is image
            and bool(self._places)
            and not self._wants_slots
            and all(place.slot.nbytes >= image.nbytes for place in self._places)
        )

    def wait_free(self, timeout_s: float) -> CkptError | None:
        """Wait until a slot is free. Returns: the error SLOTS_BUSY at the timeout; else None."""
        if self.is_busy() and not self._wait(lambda: not self.is_busy(), timeout_s):
            return self.busy_error(timeout_s)
        return None

    def busy_error(self, timeout_s: float) -> CkptError:
        """Return the error for a save without a free slot."""
        with self._lock:
            saves = ", ".join(
                str(save.handle) for save in self._saves.values() if not save.handle.is_over
            )
        return err(
            Code.SLOTS_BUSY, f"no slot became free within {timeout_s:g} s; they hold {saves}"
        )

    def save(
        self,
        state: SaveState,
        request: dict[str, Any],
        handle: SaveHandle,
        plan: Callable[[SaveSlot, memoryview], tuple[list[Copy], list[Copy]]],
        *,
        hold: bool = False,
    ) -> None:
        """Save into a free slot; the saver reads behind the copies, and finishes by itself.

        Args:
            state: values of the save.
            request: the request for the saver, from `dump_request`.
            plan: called with the slot's place and memory. Returns the copies to do before this
                method returns, and the copies for the stager's thread.
            hold: whether the saver writes the save only after `release_held`, or after the end of
                this process. The save is dropped once a later snapshot is complete. The failure of
                a held save isn't returned by `next_failure`.

        Raises: CommitError(SAVER_LOST, SLOTS_BUSY); errors of `plan` and of the copies. After an
            error the caller calls `abandon`.
        """
        self._check_process()
        save, place = self._begin(state, request, handle, self._ready_link(), hold=hold)
        if place.release is None:
            place.release = self._pin(place.slot)
        view = place.slot.view
        now, later = plan(place, view)

        def tell(nbytes: int, seen: Sequence[Seen]) -> None:
            rows = [[one.begin, one.digests, one.kept] for one in seen]
            save.link.send(
                {"type": "staged", "number": save.number, "nbytes": nbytes, "seen": rows}
            )

        assert self._image is not None  # noqa: S101
        staging = Staging(self._image, (*now, *later), view, tell)
        try:
            for copy in staging.copies:
                copy.start()
            staging.run(now, threads=self._threads, thread_count=self.thread_count)
        except BaseException:
            staging.settle()  # the slot is used again
            raise
        if later:
            save.later = self._stager.submit(self._stage_later, save, staging, later)
        else:
            self._end_copies(save, None)

    def _begin(
        self,
        state: SaveState,
        request: dict[str, Any],
        handle: SaveHandle,
        link: Link,
        *,
        hold: bool,
    ) -> tuple[_Save, SaveSlot]:
        """Reserve a free slot for a save, and announce the save to the saver."""
        assert self._image is not None  # noqa: S101
        with self._lock:
            if self._link is not link or self._wants_slots:
                raise err(Code.SAVER_LOST, "the saver ended just now", where=handle.path)
            free = [
                place for place in self._places if place.handle is None and place.refusal is None
            ]
            if not free:
                raise self.busy_error(0.0)
            # The slot with the oldest snapshot, so that the newest snapshot stays in memory.
            place = min(free, key=lambda place: place.last_save)
            self._count += 1
            save = _Save(
                number=self._count,
                state=state,
                handle=handle,
                link=link,
                thread=threading.get_ident(),
                is_held=hold,
            )
            self._saves[save.number] = save
            self._held += [save] if hold else []
            place.handle = handle
            place.last_save = self._count
            place.attempt = state.origin.attempt
            place.image = self._image
        if self._sent_image is not self._image:
            link.send({"type": "image", "image": self._image.as_dict()})
            self._sent_image = self._image
        link.send(
            {
                "type": "save",
                "number": save.number,
                "slot": place.number,
                "request": request,
                "held": hold,
            }
        )
        return save, place

    def held_step(self, timeout_s: float) -> int | None:
        """Return the step of the newest held save, after the end of all copies; None without one.

        Args:
            timeout_s: longest wait for copies in progress, in seconds. A later save whose copies
                succeed takes the place of the held save.
        """
        if os.getpid() != self._pid:
            return None  # a fork of the trainer has no saver
        end_s = time.monotonic() + timeout_s
        with self._lock:
            handles = [save.handle for save in self._saves.values()] if self._held else []
        for handle in handles:
            with contextlib.suppress(CkptError):
                handle.wait_copied(max(0.0, end_s - time.monotonic()))
        with self._lock:
            steps = [
                save.handle.step
                for save in self._held
                if save.is_complete and save.handle.state in STATES
            ]
        return steps[-1] if steps else None

    def release_held(self, step: int) -> tuple[SaveHandle, Origin] | None:
        """Let the saver write the held save of a step; `drop_held` drops the others.

        Returns: handle and origin of the save; None without such a save.
        """
        with self._lock:
            save = next((one for one in self._held if one.handle.step == step), None)
            if save is None:
                return None
            self._held.remove(save)
            save.is_held = False
            save.handle.tell_released()
            save.link.send({"type": "release", "number": save.number})
            return save.handle, save.state.origin

    def end_held(self, timeout_s: float) -> tuple[SaveHandle, Origin] | None:
        """Release the newest held save if this is the only writer, and drop the others.

        Several writers may hold different saves, and only they can agree.

        Args:
            timeout_s: longest wait for copies in progress, in seconds.

        Returns: as `release_held`.
        """
        with self._lock:
            is_alone = all(save.state.origin.writer_count == 1 for save in self._held)
        step = self.held_step(timeout_s) if is_alone else None
        released = None if step is None else self.release_held(step)
        self.drop_held()
        return released

    def drop_held(self, *, before: float = math.inf) -> bool:
        """Ask the saver to drop the held saves of smaller numbers; return whether there are any.

        A slot is free once the saver has answered: until then the saver may write the save, since
        this process may end.
        """
        with self._lock:
            if os.getpid() != self._pid:
                return False
            going = [save for save in self._held if save.number < before]
            self._held = self._held[len(going) :]
            for save in going:
                save.link.send({"type": "drop", "number": save.number})
            return bool(going)

    def snapshots(self) -> dict[str, tuple[Memory, bool]]:
        """Return the snapshots in slots that no save uses any more, by the name of the attempt.

        A snapshot is in memory until the next save begins. The second value says whether the
        snapshot has all boxes of this process, those written by other processes included.
        """
        self._settle()
        with self._lock:
            places = [place for place in self._places if place.handle is None and place.was_written]
        return {
            place.attempt: (
                _snapshot(place.image, place.slot.view),
                len(place.image.rows) == len(place.image.holdings.replica),
            )
            for place in places
            if place.image is not None
        }

    def drop_snapshots(self) -> None:
        """Return no present snapshot from `snapshots` any more, and copy all into each slot anew.

        No save is in progress.
        """
        with self._lock:
            for place in self._places:
                place.was_written = False

    def wait_over(self, timeout_s: float) -> bool:
        """Wait until all saves are over. Returns: whether they are over in time."""
        end_s = time.monotonic() + timeout_s
        with self._lock:
            handles = [save.handle for save in self._saves.values()]
        return all(handle.wait_over(max(0.0, end_s - time.monotonic())) for handle in handles)

    def list_attempts(self, image: Image | None) -> list[str]:
        """Return the attempts in slots that `snapshots` returns whole, with this layout."""
        whole = {name for name, (_, is_whole) in self.snapshots().items() if is_whole}
        with self._lock:
            places = [place for place in self._places if place.image is image]
        return [place.attempt for place in places if place.attempt in whole]

    def give_up(self, timeout_s: float, error: CkptError) -> bool:
        """Wait until all saves are over, and give up the other saves: a process of the job is lost.

        No later call returns the failures of these saves; the handles have the failures.

        Args:
            timeout_s: longest wait in seconds. The copies, and the saver's answer after a save is
                given up, have the same time again.
            error: the failure of a save that is given up, for all writers.

        Returns: whether the training may change its tensors: nothing is copied any more.
        """
        self._settle()
        with self._lock:
            saves = list(self._saves.values())
        if not self.wait_over(timeout_s):
            for save in saves:
                if save.handle.is_over:
                    continue
                save.link.send({"type": "give_up", "number": save.number})
                # A thread, since the run may not answer. The waits then end at their deadline.
                threading.Thread(
                    target=_fail_quietly,
                    args=(save.state, error),
                    name="ckptfmt-give-up",
                    daemon=True,
                ).start()
            self._wait(lambda: all(save.handle.is_through for save in saves), timeout_s)
        for save in saves:
            self.note_told(save.state.origin.attempt)
        with self._lock:
            self._failures = []
        return all(save.handle.is_copied for save in saves)

    def abandon(self, handle: SaveHandle, attempt: str, problem: BaseException) -> None:
        """Abandon a started save, unless all of the snapshot is copied.

        The caller raises the failure, so no later call raises it again.

        Args:
            attempt: the attempt's name.
        """
        if not isinstance(problem, Exception):
            # After an interrupt the position in the code is unknown; a thread may still fill the
            # slot. New slots are safe.
            self._wants_slots = True
        with self._lock:
            save = next((save for save in self._saves.values() if save.handle is handle), None)
        if save is not None:
            self._end_copies(save, None if save.is_complete else problem)
        self.note_told(attempt)

    def _stage_later(self, save: _Save, staging: Staging, later: Sequence[Copy]) -> None:
        try:
            if save.handle.is_copied:
                return  # the save was abandoned
            staging.run(later)
            self._end_copies(save, None)
        except BaseException as error:  # noqa: BLE001
            staging.settle()  # the slot is used again
            self._end_copies(save, None if save.is_complete else error)

    def _end_copies(self, save: _Save, problem: BaseException | None) -> None:
        """Send the end of the copies to the saver: a complete snapshot, or an abandoned save.

        An interrupted call may be repeated.
        """
        if problem is None:
            save.is_complete = True
            save.link.send({"type": "complete", "number": save.number})
            if save.handle.state in STATES:
                self.drop_held(before=save.number)
        else:
            self._fail(save, _copy_error(problem))
            save.link.send(
                {"type": "abandon", "number": save.number, "detail": encodable(str(problem))}
            )
        with self._lock:
            if save.later is None or save.later.done() or threading.get_ident() != save.thread:
                save.handle.tell_copied()  # else the stager calls this, after its copies
            self._free_slots()

    # --- the saver's messages ---------------------------------------------------------------------

    def _on_message(self, link_number: int, message: dict[str, Any]) -> None:
        kind = message["type"]
        if kind == "ready":
            with self._lock:
                for place in self._places[message["slot"] : message["slot"] + 1]:
                    place.ready_for = max(place.ready_for, link_number)
                self._changed.notify_all()
        elif kind == "refused":
            with self._lock:
                for place in self._places[message["slot"] : message["slot"] + 1]:
                    place.refusal = error_from_json(message["error"])
                self._changed.notify_all()
        elif kind == "broken":
            # The saver's last message: the saver uses no slot any more.
            self._lose(link_number, Lost(error=error_from_json(message["error"]), has_ended=True))
        elif kind == "note":
            self._note(message["sentence"])
        else:
            self._on_state(message)

    def _on_state(self, message: dict[str, Any]) -> None:
        state = message["state"]
        with self._lock:
            save = self._saves.get(message["number"])
        if save is None:
            return  # the record of a finished save is removed
        handle = save.handle
        if state == "FAILED":
            self._fail(save, error_from_json(message))
            return
        if state == "DROPPED":
            handle.tell_skipped()
        elif state == "DONE":
            if message["problem"]:
                _LOG.warning("%s", message["problem"])
            handle.tell_over(tuple(message["removed"]))
        elif state == "COMMITTED":
            origin = save.state.origin
            told = {name: message[name] for name in (*OF_MANIFEST, "reason")}
            report = SaveReport(
                path=handle.path, step=origin.step, writer_count=origin.writer_count, **told
            )
            handle.tell_state(state, report)
            tell_committed(save.state.writer, report, handle.times.get(state, 0.0))
        else:
            handle.tell_state(state)
            if state == "WRITTEN":
                self._on_written(save.state, save.answer)
        with self._lock:
            self._free_slots()

    def _on_lost(self, link_number: int, lost: Lost) -> None:
        if not self._is_closing:  # a closing saver finishes all saves
            self._lose(link_number, lost)

    def _drop(self, error: CkptError) -> None:
        """Stop using the current saver."""
        self._lose(self._link_number, Lost(error=error, has_ended=False))

    def _lose(self, link_number: int, lost: Lost) -> None:
        """Stop using a saver, and fail the saver's unfinished saves, whose commit is unknown.

        Args:
            link_number: number of the saver's link; ignored if a newer link is in use.
        """
        # Under one lock: a thread that sees the failure in a handle may start the next saver, and
        # must not find the old saver's state.
        with self._lock:
            if link_number != self._link_number or self._lost is not None:
                return  # handled already
            link = self._link
            self._link = None
            self._lost = lost.error
            # A saver that still writes staged saves reads its slots, so new slots are made.
            self._wants_slots |= not lost.has_ended and link is not None
            for save in self._saves.values():
                if not save.handle.is_over:
                    self._fail(save, _at(save, lost.error))
            self._changed.notify_all()
        if link is not None:
            link.drop()

    def look(self) -> None:
        """Find savers and copying threads that ended without a message, and fail their saves.

        Waiting threads call this from time to time, so that no wait is endless. Finished saves are
        forgotten.
        """
        with self._lock:
            saves = [save for save in self._saves.values() if not save.handle.is_over]
            self._saves = {save.number: save for save in saves}
            link = self._link
            number = self._link_number
        for save in saves:
            if save.is_left():
                self._end_copies(
                    save, None if save.is_complete else RuntimeError("the copying thread has ended")
                )
        failure = None if link is None else link.failure()
        if failure is not None:
            self._lose(number, Lost(error=failure, has_ended=False))
        for save in (
            saves if link is None else ()
        ):  # the saver was dropped or closed, and finishes its saves
            failure = save.link.failure()
            if failure is not None:
                self._fail(save, _at(save, failure))

    def _fail(self, save: _Save, error: CkptError) -> None:
        with self._lock:
            # Under one lock: a thread that sees the failure in the handle finds it here too.
            if save.handle.tell_failed(error):
                _LOG.error("step %d FAILED: %s", save.handle.step, error)
                attempt = save.state.origin.attempt
                if not save.is_held and attempt not in self._told:
                    self._failures.append((attempt, save.handle))
            self._free_slots()

    def _free_slots(self) -> None:
        for place in self._places:
            handle = place.handle
            if handle is not None and handle.is_through:
                place.handle = None
                place.was_written = "WRITTEN" in handle.times
        self._changed.notify_all()

    # --- failures, and the end --------------------------------------------------------------------

    def next_failure(self, *, at_end: bool = False) -> tuple[str, CkptError] | None:
        """Return attempt and error of a failed save, if not yet raised or reported.

        Args:
            at_end: whether this is the last such call. Earlier calls leave out failures between
                cache and home, unless the failure means that this launch is over.
        """
        with self._lock:
            failures = [
                (attempt, handle.error)
                for attempt, handle in self._failures
                if not handle.is_failure_taken and (at_end or not self._is_passing(handle))
            ]
        return next(((attempt, error) for attempt, error in failures if error is not None), None)

    def _is_passing(self, handle: SaveHandle) -> bool:
        """Return whether a save failed between cache and home, in a way that may pass."""
        return (
            self._cache is not None
            and "WRITTEN" in handle.times
            and handle.error is not None
            and (isinstance(handle.error, StoreError) or handle.error.code in _PASSING)
        )

    def use_home(self, store: Store) -> None:
        """Save in the run at another store, by another saver. No save is in progress."""
        self._settle()
        self._drop(err(Code.SAVER_LOST, "the run goes on at another home", where=self._name))
        self._store = store
        self._name = store.name
        self._address = address_of(store)

    def replicate_by(self, on_written: Callable[[SaveState, Callable[[str], None]], None]) -> None:
        """Call another function with the values of WRITTEN saves, as the argument `on_written`."""
        self._on_written = on_written

    def note_told(self, attempt: str) -> None:
        """Record that an attempt's failure was raised, so that no later call raises it again.

        The failure may also arrive after this call.
        """
        with self._lock:
            self._told.add(attempt)
            self._failures = [failure for failure in self._failures if failure[0] not in self._told]

    def close(self, timeout_s: float) -> list[SaveHandle]:
        """Wait until all saves are over, end the saver, and close the slots.

        Returns: the saves that weren't over in time. A saver process continues with them; a saver
            thread ends with this process.
        """
        self._settle(cancels=True)
        if os.getpid() != self._pid:
            return []  # a fork of the trainer owns no saver and no slots
        end_s = time.monotonic() + timeout_s
        with self._lock:
            handles = [save.handle for save in self._saves.values()]
        rest = [
            handle for handle in handles if not handle.wait_over(max(0.0, end_s - time.monotonic()))
        ]
        for handle in rest if self._in_process else ():
            # The link ends, so no further message arrives; a thread may wait for the handle.
            handle.tell_failed(
                err(
                    Code.SAVER_LOST,
                    "the checkpointer was closed during the save",
                    where=handle.path,
                )
            )
        self._threads.shutdown(wait=not rest, cancel_futures=True)
        self._end_link(1.0 if rest else 5.0)
        self._end_staging()
        return rest

    def let_go(self, timeout_s: float) -> None:
        """Wait until no staged save can be lost, then close the saver and the slots.

        A saver process finishes staged saves without the trainer, so the wait is for the copies
        only. With a saver thread the wait is for the saves' end.
        """
        self._settle(cancels=True)
        if os.getpid() != self._pid:
            return  # a fork of the trainer owns no saver and no slots
        end_s = time.monotonic() + timeout_s
        self.end_held(timeout_s)
        with self._lock:
            handles = [save.handle for save in self._saves.values()]
        for handle in handles:
            rest_s = max(0.0, end_s - time.monotonic())
            if self._in_process:
                with contextlib.suppress(CkptError):
                    handle.wait_copied(rest_s)
            else:
                handle.wait_over(rest_s)
        # The last messages must reach the saver. The answers don't matter.
        self._end_link(0.5, drain_s=end_s - time.monotonic())
        self._end_staging()

    def _end_staging(self) -> None:
        """Close the stager and the slots; copies in progress keep their slot's memory mapped."""
        self._stager.shutdown(wait=False)
        with self._lock:
            places = self._places
            self._places = []
        for place in places:
            place.close()

    def _end_link(self, timeout_s: float, *, drain_s: float = 0.0) -> None:
        with self._lock:
            self._is_closing = True
            link = self._link
            self._link = None
        if link is not None:
            link.close(timeout_s, drain_s=drain_s)

    def _wait(self, is_there: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Wait until a condition holds. Returns: whether the condition held in time."""
        return wait_until(
            is_there,
            lock=self._lock,
            changed=self._changed,
            look=self.look,
            timeout_s=self._deadline_s if timeout_s is None else timeout_s,
        )


def _fail_quietly(state: SaveState, error: CkptError) -> None:
    """Report the failure of a save to all writers, if the run answers."""
    with contextlib.suppress(CkptError):
        SaveJob(state).fail(error)


def _pin_nothing(_slot: Slot) -> Callable[[], None]:
    return lambda: None


def _reason_of(error: Exception) -> str:
    return error.detail if isinstance(error, CkptError) else repr(error)


def _snapshot(image: Image, view: memoryview) -> Memory:
    """Return a function for the contents of boxes in a slot."""
    places = {(piece.key, piece.box): (piece.begin, piece.end) for piece in image.pieces}

    def find(key: TensorKey, box: Box) -> memoryview | None:
        place = places.get((key, box))
        return None if place is None else view[place[0] : place[1]]

    return find


def _at(save: _Save, error: CkptError) -> CkptError:
    """Return an error of the saver as the error of one save."""
    found = error_from_json({**error.as_json(), "where": save.handle.path})
    found.__cause__ = error.__cause__
    return found


def _copy_error(problem: BaseException) -> CkptError:
    if isinstance(problem, CkptError):
        return problem
    error = err(
        Code.STATE_CHANGED,
        f"copying the state failed: {type(problem).__qualname__}: {problem}",
        remedy="",
    )
    error.__cause__ = problem
    return error
