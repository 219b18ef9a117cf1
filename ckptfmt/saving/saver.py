"""The saver: follows the copies into a slot, hashes, writes, commits and cleans up.

A `Saver` executes messages of the trainer. It uses stores and slots, and no framework. It runs in a
thread of the trainer, or in a process ``python -m ckptfmt.saving.saver FD`` with its own session
and without standard streams. After the trainer's end, the process finishes the saves with a
complete snapshot, gives up the rest, and exits. A save passes through these states, and reports
each:

    STAGED      the snapshot is complete: the saver finishes the save even if the trainer dies
    WRITTEN     this writer's files and part are durable, at home or in the node's cache; the slot
                is free
    COMMITTED   the checkpoint is committed, for all writers
    DONE        older checkpoints are deleted, and no hold is left in a directory outside a run
    FAILED      the save has failed; the report has the error
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import os
import pathlib
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from ckptfmt.commit.decision import Known
from ckptfmt.delta.chain import Chain
from ckptfmt.delta.coders import Coders
from ckptfmt.delta.policy import DeltaOptions
from ckptfmt.documents.durability import HOME, PEERS
from ckptfmt.documents.manifest import Manifest
from ckptfmt.documents.run import SAVERS
from ckptfmt.errors import CkptError, Code, FormatError, IntegrityError, StoreError, encodable, err
from ckptfmt.run.ledger_writer import end_entry
from ckptfmt.run.node_cache import Cache, CachedPart, NodeCache, part_of
from ckptfmt.run.save_job import SaveJob, SaveState
from ckptfmt.saving.request import OF_MANIFEST, parse_request
from ckptfmt.saving.uploads import Uploads, bring_home
from ckptfmt.store import open_address
from ckptfmt.store.protocol import Store
from ckptfmt.write.helper_process import Channel, be_helper, watch
from ckptfmt.write.image import Image
from ckptfmt.write.slot import Slot
from ckptfmt.write.slot_contents import FillProgress, Snapped
from ckptfmt.write.staging import Seen
from ckptfmt.write.writer import as_ckpt_error


class Saver:
    """Executes the saves of a trainer, in order, and holds a file in the run meanwhile.

    Args:
        store: store of the run; None if each request has a place.
        send: called with each message to the trainer, from any thread.
        cache: options of the node's cache, through which saves reach home; None for no cache.
        rest: called after each save, when the trainer isn't waiting for the save.

    Spec: REQ-RUN-017, REQ-RUN-035.
    """

    def __init__(
        self,
        store: Store | None,
        send: Callable[[dict[str, Any]], None],
        *,
        cache: Cache | None = None,
        rest: Callable[[], object] = lambda: None,
    ) -> None:
        self._store = store
        self._cache_options = cache
        self._cache: NodeCache | None = None
        self._uploads = None if cache is None else Uploads(self._note, self._break_by)
        #: Manifests committed through the cache, for the writing thread.
        self._committed: queue.SimpleQueue[Manifest] = queue.SimpleQueue()
        self._has_adopted = False
        self._send = send
        self._rest = rest
        self._views: dict[int, memoryview] = {}
        #: The errors of slots that this process has no memory for.
        self._refused: dict[int, CkptError] = {}
        self._image: Image | None = None
        self._pending: dict[int, FillProgress] = {}
        #: The trainer's answers about the replicas of saves: a problem, or an empty string.
        self._answers: dict[int, queue.SimpleQueue[str]] = {}
        #: Whether held saves are written, once that is decided: the first order counts.
        self._orders: dict[int, queue.SimpleQueue[bool]] = {}
        self._coders = Coders()
        self._known = Known()
        self._upload_known = Known()  # for the upload thread
        self._chain = Chain(self._coders, self._known)
        self._held = contextlib.ExitStack()
        self._is_held = False
        self._deadline_s = 0.0
        self._is_alone = False
        #: Set once nobody waits for the saves so far any more: at the trainer's end, and when the
        #: trainer gives its saves up.
        self._gives_up = threading.Event()
        #: Number of the launch with a ledger, and the trainer's end in Unix milliseconds.
        self._launch: int | None = None
        self._ended_unix_ms: int | None = None
        self._lock = threading.Lock()  # guards `_pending` to `_orders`, `_held` and `_is_held`
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="ckptfmt-saver", daemon=True)
        self._thread.start()

    def add_slot(self, number: int, slot: Slot) -> None:
        """Register a slot under a number, in place of the previous slot of that number."""
        self._views[number] = slot.view
        self._refused.pop(number, None)
        self._coders.add_slot(number, slot)

    def refuse_slot(self, number: int, error: CkptError) -> None:
        """Let the saves in a slot fail with an error, until there is a slot of this number."""
        self._refused[number] = error

    def handle(self, message: dict[str, Any]) -> None:
        """Execute a message of the trainer.

        The types are image, save, staged, complete, replicated, abandon, give_up, release and drop.
        A save may be held: it is written after ``release``, and never after ``drop``, which is
        answered with the state DROPPED: from then on the slot isn't read. At the trainer's end a
        held save is written if the trainer is the only writer. Several trainers may hold different
        steps, and only they can agree. After ``give_up`` no save so far waits for a copy at another
        home.
        """
        kind = message["type"]
        number = message.get("number", 0)
        if kind == "image":
            self._image = Image.from_dict(message["image"])
        elif kind == "save":
            self._begin(number, message["slot"], message["request"], is_held=message["held"])
        elif (progress := self._pending.get(number)) is not None:
            if kind == "staged":
                seen = message.get("seen", ())
                progress.advance(
                    message["nbytes"],
                    [Seen(begin=at, digests=of, kept=kept) for at, of, kept in seen],
                )
            elif kind == "complete":
                if number not in self._orders:
                    self._report(number, "STAGED", {})
                progress.complete()
            # The save of a `replicated` message may have ended already.
            elif kind == "replicated" and (answers := self._answers.get(number)) is not None:
                answers.put(message["problem"])
            elif kind == "give_up":
                self._gives_up.set()
                self._gives_up = threading.Event()  # for later saves
            elif kind == "abandon":
                progress.abandon(err(Code.STATE_CHANGED, message["detail"]))
            elif kind in ("release", "drop") and (orders := self._orders.get(number)) is not None:
                orders.put(kind == "release")
                if kind == "drop":
                    self._report(number, "DROPPED", {})

    def lose_trainer(self) -> None:
        """Give up all saves with an incomplete snapshot, since the trainer has ended.

        Saves in the cache are still brought home.
        """
        self._ended_unix_ms = time.time_ns() // 1_000_000
        self._gives_up.set()
        for answers in list(self._answers.values()):
            answers.put("the trainer is gone")
        self.give_up(
            err(Code.TRAINER_LOST, "the trainer ended while it copied", requirement="REQ-CMT-029")
        )

    def give_up(self, error: CkptError) -> None:
        """Give up all saves with an incomplete snapshot."""
        for progress in list(self._pending.values()):
            progress.abandon(error)

    def finish(self, timeout_s: float | None = None) -> bool:
        """Finish the accepted saves, and held ones of a single writer, then end the thread.

        Args:
            timeout_s: longest wait in seconds; None for no limit.

        Returns: whether the thread has ended.
        """
        if self._uploads is not None:
            self._uploads.limit(self._deadline_s)
        for orders in list(self._orders.values()):
            orders.put(self._is_alone)
        self._tasks.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def is_alive(self) -> bool:
        """Return whether the threads of the saver are running."""
        return self._thread.is_alive() and (self._uploads is None or self._uploads.is_alive())

    def _begin(self, number: int, slot: int, request: dict[str, Any], *, is_held: bool) -> None:
        assert self._image is not None  # noqa: S101
        try:
            save, context, delta = parse_request(request, self._store)
        except Exception as error:  # noqa: BLE001
            self._report(number, "FAILED", as_ckpt_error(error).as_json())  # so for all writers
            return
        if slot in self._refused:
            self._fail(number, SaveJob(save, self._known), self._refused[slot])
            return
        progress = FillProgress()
        snapped = Snapped(
            image=self._image,
            view=self._views[slot],
            slot=slot,
            context=context,
            progress=progress,
        )
        job = SaveJob(save, self._known, gives_up=self._gives_up)
        orders: queue.SimpleQueue[bool] = queue.SimpleQueue()
        if is_held:
            self._orders[number] = orders
            self._is_alone = save.origin.writer_count == 1
        try:
            self._hold(number, job, progress, is_late=is_held)
        except Exception as error:  # noqa: BLE001
            self._release(number, job)
            self._fail(number, job, error)
            return

        def task() -> None:
            is_on_its_way = False
            try:
                if is_held and not self._await_order(number, job, orders):
                    return
                is_on_its_way = self._uploads is not None and self._save_by_cache(
                    number, job, snapped, delta, self._uploads
                )
                if not is_on_its_way:
                    manifest = self._save(number, job, snapped, delta)
                    if (
                        self._uploads is not None
                        and manifest is not None
                        and manifest.durability == HOME
                    ):
                        self._settle_older(save)
            finally:
                if not is_on_its_way:
                    self._release(number, job)

        self._deadline_s = save.deadline_s
        if save.ledger:
            self._launch = save.origin.launch
        self._tasks.put(task)

    def _await_order(self, number: int, job: SaveJob, orders: queue.SimpleQueue[bool]) -> bool:
        """Wait until a held save is released or dropped, and return whether to write the save.

        A released save is STAGED: from here on the file in the run shows the save. Spec:
        REQ-RUN-017.
        """
        is_wanted = orders.get()
        with self._lock:
            self._orders.pop(number, None)
        if not is_wanted:
            return False
        try:
            self._hold_at_home(job)
        except Exception as error:  # noqa: BLE001
            self._fail(number, job, error)
            return False
        self._report(number, "STAGED", {})
        return True

    def _save(
        self, number: int, job: SaveJob, snapped: Snapped, delta: DeltaOptions
    ) -> Manifest | None:
        """Write and commit a snapshot from a slot; report WRITTEN, COMMITTED and DONE, or FAILED.

        Args:
            snapped: the snapshot, in a slot that may still be filling.

        Returns: the manifest, or None after a failure.
        Spec: REQ-CMT-003 to REQ-CMT-009, REQ-CMT-029, REQ-RUN-004.
        """
        save = job.save
        reason = ""

        def write() -> None:
            nonlocal reason
            plan = self._chain.write(save.store, save.origin, save.writer, snapped, options=delta)
            reason = plan.reason
            self._report(number, "WRITTEN", {})

        is_in_run = save.run is not None
        try:
            # In a run, the sweep follows the report: nobody waits for the sweep.
            manifest = job.run(write, waits=True, sweeps=not is_in_run)
        except Exception as error:  # noqa: BLE001
            self._fail(number, job, error)
            return None
        # From here on the checkpoint exists, and later errors don't fail the save.
        self._tell_committed(number, job, manifest, reason)
        if manifest.durability == HOME:  # no base otherwise: files may be in caches
            self._chain.commit(manifest)
        if is_in_run:
            job.sweep()
        self._end_well(number, job)
        return manifest

    def _tell_committed(self, number: int, job: SaveJob, manifest: Manifest, reason: str) -> None:
        told = {name: getattr(manifest, name) for name in OF_MANIFEST}
        self._report(number, "COMMITTED", told | {"reason": reason})
        job.record()

    def _end_well(self, number: int, job: SaveJob) -> None:
        """Clean up after a committed save, and report DONE."""
        removed, problem = job.retain()
        self._end(number, job, "DONE", {"removed": removed, "problem": encodable(problem)})

    def _fail(self, number: int, job: SaveJob, error: Exception) -> None:
        """Report the failure of a save to trainer and writers. Spec: REQ-CMT-004."""
        self._end(number, job, "FAILED", job.fail(error).as_json())

    def _end(self, number: int, job: SaveJob, state: str, told: dict[str, Any]) -> None:
        """End the holds, then report the outcome.

        The receiver may move or delete the directory, so that no hold may be left there.
        """
        job.tidy()
        self._report(number, state, told)

    # --- saves through a cache --------------------------------------------------------------------

    def _save_by_cache(
        self,
        number: int,
        job: SaveJob,
        snapped: Snapped,
        delta: DeltaOptions,
        uploads: Uploads,
    ) -> bool:
        """Write a save into the cache and queue the upload, which releases the save.

        Returns: False if the cache failed, after all earlier saves have ended; True otherwise.
        """
        while not self._committed.empty():
            self._chain.commit(self._committed.get())
        try:
            cache = self._open_cache(job.save, uploads)
            reason = self._write_to_cache(job, cache, uploads, snapped, delta)
            self._report(number, "WRITTEN", {})
        except (StoreError, IntegrityError, FormatError) as error:
            self._cache = None
            self._note(f"CACHE_FAILED: a save is written to the run's home at once: {error}")
            uploads.wait_idle()
            return False
        except Exception as error:  # noqa: BLE001
            self._report(number, "FAILED", as_ckpt_error(error).as_json())
            uploads.add(functools.partial(self._end_failed, number, job, error))
            return True

        def upload() -> None:
            try:
                uploads.until_home_answers(lambda: self._hold_run(job.save))
                self._bring_home(number, job, cache, uploads, reason)
            except CkptError as error:  # home refuses the hold
                self._fail(number, job, error)
            finally:
                self._release(number, job)

        job.known = self._upload_known
        uploads.add(upload)
        return True

    def _write_to_cache(
        self,
        job: SaveJob,
        cache: NodeCache,
        uploads: Uploads,
        snapped: Snapped,
        delta: DeltaOptions,
    ) -> str:
        """Write a snapshot from a slot into the cache.

        Returns: the reason why the save is a full save or a delta, or why it stays in the cache.
        Raises: StoreError, IntegrityError, FormatError if the cache fails or has no room; errors of
            waiting for the slot.
        """
        save = job.save
        nbytes = snapped.image.nbytes
        while not cache.make_room(nbytes):
            if not uploads.wait_for_one():
                detail = f"no room for a save of {nbytes} bytes"
                raise err(
                    Code.NO_SPACE,
                    detail,
                    where=cache.store.name,
                    remedy="Raise Cache(limit_nbytes=), or free space.",
                )
        part = part_of(save.origin, save.writer)
        job.held.enter_context(cache.hold(part))
        stays = save.durability != HOME
        context = dataclasses.replace(snapped.context, durability=save.durability)
        try:
            plan = self._chain.write(
                cache.at(part.name),
                save.origin,
                save.writer,
                dataclasses.replace(snapped, context=context),
                options=delta if uploads.is_well and not stays else DeltaOptions(),
                home=save.store,
            )
        except Exception:
            cache.drop(part)
            raise
        return "it stays in the cache of its node" if stays else plan.reason

    def _bring_home(
        self, number: int, job: SaveJob, cache: NodeCache, uploads: Uploads, reason: str
    ) -> None:
        """Copy the result of `_write_to_cache` home; report COMMITTED and DONE, or FAILED."""
        try:
            has_replica = job.save.durability == PEERS and self._has_replica(number, job.save)
            manifest = bring_home(cache, job, uploads=uploads, has_replica=has_replica)
        except Exception as error:  # noqa: BLE001
            self._fail(number, job, error)
            return
        if manifest.durability == HOME:
            self._committed.put(manifest)
        self._tell_committed(number, job, manifest, reason)
        self._end_well(number, job)

    def _has_replica(self, number: int, save: SaveState) -> bool:
        """Wait for the trainer's answer, up to the deadline; return whether a replica exists."""
        with contextlib.suppress(queue.Empty):
            return not self._answers[number].get(timeout=save.deadline_s)
        return False

    def _settle_older(self, save: SaveState) -> None:
        """Mark earlier saves in the cache as settled: this save is at home, and they needn't be."""
        assert self._cache_options is not None  # noqa: S101
        with contextlib.suppress(CkptError):  # the cache may be gone
            cache = NodeCache(self._cache_options, save.origin.run_id or "")
            cache.settle_up_to(part_of(save.origin, save.writer))

    def _end_failed(self, number: int, job: SaveJob, error: Exception) -> None:
        """Report to all writers a save that failed before it was in the cache.

        The trainer has the report already.
        """
        try:
            job.fail(error)
        finally:
            self._release(number, job)

    def _open_cache(self, save: SaveState, uploads: Uploads) -> NodeCache:
        """Return the cache.

        The first call also queues the uploads of a saver of this launch and writer that died.
        """
        assert self._cache_options is not None  # noqa: S101
        origin = save.origin
        if self._cache is None:
            self._cache = NodeCache(self._cache_options, origin.run_id or "")
        if not self._has_adopted:
            self._has_adopted = True
            for part in self._cache.list_unfinished():
                if (part.writer, part.launch) == (save.writer, origin.launch):
                    uploads.add(functools.partial(self._adopt, self._cache, part, save, uploads))
        return self._cache

    def _adopt(self, cache: NodeCache, part: CachedPart, save: SaveState, uploads: Uploads) -> None:
        """Finish a cached save of a saver that died. Spec: REQ-RUN-036.

        Args:
            save: values of a later save by this saver.
        """
        assert self._store is not None  # noqa: S101
        try:
            with cache.hold(part):
                origin = cache.read_part(part)[0].origin
                adopted = dataclasses.replace(save, store=self._store.at(part.name), origin=origin)
                bring_home(cache, SaveJob(adopted, self._upload_known), uploads=uploads)
        except Exception as error:  # noqa: BLE001
            self._note(
                f"CACHE_UNFINISHED: {part.name}, which a saver left when it died:"
                f" {as_ckpt_error(error)}"
            )

    def _note(self, sentence: str) -> None:
        self._send({"type": "note", "sentence": encodable(sentence)})

    # --- holds ------------------------------------------------------------------------------------

    def _hold(self, number: int, job: SaveJob, progress: FillProgress, *, is_late: bool) -> None:
        """Hold the file that shows that saves are in progress.

        Args:
            is_late: whether `_hold_at_home` is called later: the save may never be written.
        """
        with self._lock:
            self._answers[number] = queue.SimpleQueue()
            self._pending[number] = progress  # first: keeps an existing hold
        if not is_late:
            self._hold_at_home(job)

    def _hold_at_home(self, job: SaveJob) -> None:
        try:
            job.hold() if job.save.run is None else self._hold_run(job.save)
        except StoreError:
            if self._uploads is None:
                raise
            # Home doesn't answer, and no launch can begin there. The upload takes the hold before
            # it writes its first byte to home.

    def _hold_run(self, save: SaveState) -> None:
        """Hold a file in the run, unless this saver holds one already. Spec: REQ-RUN-017."""
        with self._lock:
            if self._is_held:
                return
        assert self._store is not None  # noqa: S101
        name = f"{SAVERS}/{save.origin.launch:04d}-{save.writer:05d}-{save.origin.attempt}"
        with contextlib.ExitStack() as held:
            held.enter_context(self._store.hold(name))
            with self._lock:
                if not self._is_held:
                    self._held = held.pop_all()
                    self._is_held = True

    def _release(self, number: int, job: SaveJob) -> None:
        with self._lock, contextlib.suppress(CkptError):
            del self._pending[number], self._answers[number]
            self._orders.pop(number, None)
            with job.held:
                if self._pending.keys() <= self._orders.keys():  # held saves need no file
                    self._is_held = False
                    self._held.close()

    def _report(self, number: int, state: str, told: dict[str, Any]) -> None:
        self._send({"type": "state", "number": number, "state": state, **told})

    def _work(self) -> None:
        try:
            while (task := self._tasks.get()) is not None:
                task()
                self._rest()
        except BaseException as error:  # noqa: BLE001
            self._break(error)
        finally:
            self._coders.close()
            if self._uploads is not None:
                self._uploads.end()
            if (
                self._store is not None
                and self._launch is not None
                and self._ended_unix_ms is not None
            ):
                end_entry(self._store, self._launch, self._ended_unix_ms)
            with contextlib.suppress(CkptError):
                self._held.close()

    def _break_by(self, error: BaseException) -> None:
        """End the writing thread with an error of the upload thread.

        The trainer reuses the slots after the report. The writing thread reads slots, and must end
        first.
        """

        def task() -> None:
            raise error

        self._tasks.put(task)

    def _break(self, error: BaseException) -> None:
        """Report that the saver has stopped, after an error that belongs to no single save."""
        known = as_ckpt_error(error)
        self.give_up(known)
        self._send({"type": "broken", "error": known.as_json()})


# --- a process of its own -------------------------------------------------------------------------


def main(fd: int) -> None:
    """Serve the trainer at the other end of the socket `fd` until it is gone."""
    channel = be_helper(fd)

    def send(message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the trainer has ended, and needs no report
            channel.send(message)

    first = channel.receive()
    if first is None:
        return
    opening = first[0]
    _be_nice(opening["nice"])
    watch(opening["trainer_pid"], channel)
    saver: Saver | None = None
    problem: CkptError | None = None
    try:
        # Garbage is collected between saves only: a collection takes milliseconds of a save.
        gc.disable()
        address = opening["address"]
        store = None if address is None else open_address(address, writable=True)
        cache = None if opening["cache"] is None else Cache.from_dict(opening["cache"])
        saver = Saver(store, send, cache=cache, rest=gc.collect)
        _serve(channel, saver, send)
    except Exception as error:  # noqa: BLE001
        problem = as_ckpt_error(error)
    if saver is not None:
        saver.lose_trainer() if problem is None else saver.give_up(problem)
        saver.finish()
    if problem is not None:
        # Last, since the trainer then reuses the slots.
        send({"type": "broken", "error": problem.as_json()})


def _be_nice(added: int) -> None:
    """Add to the niceness of this process and of its session, by which many kernels schedule."""
    niceness = os.nice(added)
    with contextlib.suppress(OSError):  # no such kernel, or too many changes in a moment
        pathlib.Path("/proc/self/autogroup").write_text(str(niceness))


def _serve(channel: Channel, saver: Saver, send: Callable[[dict[str, Any]], None]) -> None:
    """Execute the trainer's messages until the trainer is gone."""
    slots: dict[int, Slot] = {}
    while (received := channel.receive()) is not None:
        message, slot_fd = received
        if slot_fd is not None:
            number = message["slot"]
            try:
                slots[number] = slot = Slot.attach(slot_fd)
                slot.touch()
            except CkptError as error:  # saves in other slots go on
                saver.refuse_slot(number, error)
                send({"type": "refused", "slot": number, "error": error.as_json()})
                continue
            saver.add_slot(number, slot)
            send({"type": "ready", "slot": number})
        else:
            saver.handle(message)


if __name__ == "__main__":
    main(int(sys.argv[1]))
