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

from ckptfmt.commit.decision import Known, check_vacant, decide, sweep_attempts
from ckptfmt.commit.waiting import hold_attempt, wait_for_attempts
from ckptfmt.delta.chain import Chain
from ckptfmt.delta.coders import Coders
from ckptfmt.delta.policy import DeltaOptions
from ckptfmt.documents.durability import HOME, PEERS
from ckptfmt.documents.manifest import Manifest, checkpoint_name
from ckptfmt.documents.run import SAVERS, RunRecord
from ckptfmt.errors import CkptError, Code, FormatError, IntegrityError, StoreError, encodable, err
from ckptfmt.run.ledger_writer import end_entry, put_entry
from ckptfmt.run.lineage import check_not_fenced
from ckptfmt.run.node_cache import CachedPart, CacheOptions, NodeCache, part_of
from ckptfmt.run.retention import explain_no_space, tidy_up
from ckptfmt.saving.request import OF_MANIFEST, SaveRequest
from ckptfmt.saving.uploads import Uploads, bring_home
from ckptfmt.store import open_address
from ckptfmt.store.protocol import Store
from ckptfmt.write.helper_process import Channel, be_helper, watch
from ckptfmt.write.image import Image
from ckptfmt.write.slot import Slot
from ckptfmt.write.slot_contents import Progress, Snapped
from ckptfmt.write.staging import Seen
from ckptfmt.write.writer import as_ckpt_error, tell_failure


class _Work:
    """A save in a saver: the request, the place of the checkpoint, and the holds.

    Args:
        run_store: store of the run; None outside a run.
        request: request of the trainer.
        report: called with a state and the members of the report.

    Raises: errors of opening the place.
    """

    def __init__(
        self,
        run_store: Store | None,
        request: SaveRequest,
        report: Callable[[str, dict[str, Any]], None],
    ) -> None:
        self.request = request
        self.report = report
        self.held = contextlib.ExitStack()
        #: Attempts at the same place, held when this save began.
        self._earlier: list[str] = []
        #: The trainer's answer about the replica on another node: a problem, or an empty string.
        self.replicated: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._run_store = run_store
        origin = request.origin
        place = request.place
        if place is None:
            assert run_store is not None  # noqa: S101
            assert origin.launch is not None  # noqa: S101
            self.store = run_store.at(checkpoint_name(origin.step, origin.launch))
        else:
            self.store = (
                open_address(place, writable=True) if isinstance(place, bytes | dict) else place
            )

    @property
    def is_in_run(self) -> bool:
        """Whether the checkpoint belongs to a run."""
        return self.request.place is None

    def hold(self) -> None:
        """Hold the attempt, as a sign of a save in progress. Spec: REQ-CMT-043."""
        request = self.request
        self._earlier = self.held.enter_context(
            hold_attempt(self.store, request.origin, request.writer, must=request.replace)
        )

    def save(self, snapped: Snapped, chain: Chain, known: Known) -> Manifest | None:
        """Write and commit a snapshot from a slot; report WRITTEN, COMMITTED and DONE, or FAILED.

        Args:
            snapped: the snapshot, in a slot that may still be filling.
            chain: earlier saves of this saver.
            known: documents already parsed.

        Returns: the manifest, or None after a failure.
        Spec: REQ-CMT-003 to REQ-CMT-009, REQ-CMT-029, REQ-RUN-004.
        """
        request = self.request
        try:
            if request.writer == 0:
                self._check()
            plan = chain.write(
                self.store, request.origin, request.writer, snapped, options=request.delta
            )
            self.report("WRITTEN", {})
            manifest = self._decide(known)
        except Exception as error:  # noqa: BLE001
            self.fail(error)
            return None
        # From here on the checkpoint exists, and later errors don't fail the save.
        self._tell_committed(manifest, plan.reason)
        if manifest.durability == HOME:  # no base otherwise: files may be in caches
            chain.commit(manifest)
        if request.writer == 0 and self.is_in_run:
            with contextlib.suppress(CkptError):  # remains of a killed attempt only take space
                sweep_attempts(self.store, request.origin, known=known)
        self._end("DONE", self._tidy_up(known))
        return manifest

    def write_to_cache(
        self, cache: NodeCache, uploads: Uploads, snapped: Snapped, chain: Chain
    ) -> str:
        """Write a snapshot from a slot into the cache, and report WRITTEN.

        Returns: the reason why the save is a full save or a delta, or why it stays in the cache.
        Raises: StoreError, IntegrityError, FormatError if the cache fails or has no room; errors of
            waiting for the slot.
        """
        request = self.request
        nbytes = snapped.image.nbytes
        while not cache.make_room(nbytes):
            if not uploads.wait_for_one():
                detail = f"no room for a save of {nbytes} bytes"
                raise err(
                    Code.NO_SPACE,
                    detail,
                    where=cache.store.name,
                    remedy="Raise cache_nbytes=, or free space.",
                )
        part = part_of(request.origin, request.writer)
        self.held.enter_context(cache.hold(part))
        stays = request.durability != HOME
        try:
            plan = chain.write(
                cache.at(part.name),
                request.origin,
                request.writer,
                dataclasses.replace(
                    snapped,
                    context=dataclasses.replace(snapped.context, durability=request.durability),
                ),
                options=request.delta if uploads.is_well and not stays else DeltaOptions(),
                home=self.store,
            )
        except Exception:
            cache.drop(part)
            raise
        self.report("WRITTEN", {})
        return "it stays in the cache of its node" if stays else plan.reason

    def bring_home(
        self,
        cache: NodeCache,
        uploads: Uploads,
        known: Known,
        reason: str,
        on_commit: Callable[[Manifest], object],
    ) -> None:
        """Copy the result of `write_to_cache` home; report COMMITTED and DONE, or FAILED.

        Args:
            on_commit: called with the manifest, if the checkpoint can be the base of a delta.
        """
        request = self.request
        assert self._run_store is not None  # noqa: S101
        try:
            part = part_of(request.origin, request.writer)
            manifest = bring_home(
                cache,
                part,
                self._run_store,
                request.origin,
                uploads=uploads,
                known=known,
                deadline_s=request.deadline_s,
                has_replica=request.durability == PEERS and self._has_replica(),
            )
        except Exception as error:  # noqa: BLE001
            self.fail(error)
            return
        if manifest.durability == HOME:
            on_commit(manifest)
        self._tell_committed(manifest, reason)
        self._end("DONE", self._tidy_up(known))

    def _has_replica(self) -> bool:
        """Wait for the trainer's answer, up to the deadline; return whether a replica exists."""
        with contextlib.suppress(queue.Empty):
            return not self.replicated.get(timeout=self.request.deadline_s)
        return False

    def _decide(self, known: Known) -> Manifest:
        request = self.request
        return decide(
            self.store,
            request.origin,
            writer=request.writer,
            deadline_s=request.deadline_s,
            known=known,
            replace=request.replace,
            sweeps=not self.is_in_run,  # in a run, the sweep follows the commit
        )

    def _tell_committed(self, manifest: Manifest, reason: str) -> None:
        self.report(
            "COMMITTED",
            {name: getattr(manifest, name) for name in OF_MANIFEST} | {"reason": reason},
        )
        if self._run_store is not None:
            put_entry(self._run_store, self.request.origin.launch, self.request.ledger)

    def fail(self, error: Exception) -> None:
        """Report the failure of the save to trainer and writers. Spec: REQ-CMT-004."""
        known = as_ckpt_error(error)
        if self.is_in_run and self._run_store is not None:
            known = explain_no_space(known, self._run_store, self.request.retention)
        self.tell_others(known)
        self._end("FAILED", known.as_json())

    def _end(self, state: str, told: dict[str, Any]) -> None:
        """Release the holds, then report the outcome.

        The receiver may move or delete the directory, so that no hold may be left there.
        """
        with contextlib.suppress(CkptError):
            self.held.close()
        self.report(state, told)

    def tell_others(self, error: CkptError) -> None:
        """Report the failure of the save to all writers. Spec: REQ-CMT-004."""
        tell_failure(self.store, self.request.origin, self.request.writer, error)

    def _check(self) -> None:
        """Raise if the save is no longer allowed; wait for earlier saves to the same place."""
        request = self.request
        if self.is_in_run:
            assert self._run_store is not None  # noqa: S101
            check_not_fenced(self._run_store, request.origin.launch or 0)
            check_vacant(self.store)
            return
        wait_for_attempts(self.store, self._earlier, deadline_s=request.deadline_s)
        if request.replace:
            # The remains of a killed save may be as large as this save, with room for only one.
            sweep_attempts(self.store, request.origin)
        else:
            check_vacant(self.store)

    def _tidy_up(self, known: Known) -> dict[str, Any]:
        origin = self.request.origin
        if self.request.writer != 0 or self.request.place is not None or self._run_store is None:
            return {"removed": [], "problem": ""}
        assert origin.run_id is not None  # noqa: S101
        assert origin.launch is not None  # noqa: S101
        run = RunRecord(run_id=origin.run_id, writer_features=self.request.writer_features)
        retention = self.request.retention
        try:
            removed, problem = tidy_up(
                self._run_store, run, launch=origin.launch, retention=retention, known=known
            )
        except Exception as error:  # noqa: BLE001
            removed = []
            problem = str(as_ckpt_error(error))
        return {"removed": removed, "problem": encodable(problem)}


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
        cache: CacheOptions | None = None,
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
        self._image: Image | None = None
        self._pending: dict[int, Progress] = {}
        self._works: dict[int, _Work] = {}
        self._coders = Coders()
        self._known = Known()
        self._upload_known = Known()  # for the upload thread
        self._chain = Chain(self._coders, self._known)
        self._held = contextlib.ExitStack()
        self._is_held = False
        self._deadline_s = 0.0
        #: Number of the launch with a ledger, and the trainer's end in Unix milliseconds.
        self._launch: int | None = None
        self._ended_unix_ms: int | None = None
        self._lock = threading.Lock()  # guards `_pending`, `_works`, `_held` and `_is_held`
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="ckptfmt-saver", daemon=True)
        self._thread.start()

    def add_slot(self, number: int, slot: Slot) -> None:
        """Register a slot under a number, in place of the previous slot of that number."""
        self._views[number] = slot.view
        self._coders.add_slot(number, slot)

    def handle(self, message: dict[str, Any]) -> None:
        """Execute a message: image, save, staged, complete, replicated or abandon."""
        kind = message["type"]
        number = message.get("number", 0)
        if kind == "image":
            self._image = Image.from_dict(message["image"])
        elif kind == "save":
            self._begin(number, message["slot"], SaveRequest.from_dict(message["request"]))
        elif (progress := self._pending.get(number)) is not None:
            if kind == "staged":
                seen = message.get("seen", ())
                progress.advance(
                    message["nbytes"],
                    [Seen(begin=at, digests=of, kept=kept) for at, of, kept in seen],
                )
            elif kind == "complete":
                self._report(number, "STAGED", {})
                progress.complete()
            # The save of a `replicated` message may have ended already.
            elif kind == "replicated" and (work := self._works.get(number)) is not None:
                work.replicated.put(message["problem"])
            elif kind == "abandon":
                progress.abandon(err(Code.STATE_CHANGED, message["detail"]))

    def lose_trainer(self) -> None:
        """Give up all saves with an incomplete snapshot, since the trainer has ended.

        Saves in the cache are still brought home.
        """
        self._ended_unix_ms = time.time_ns() // 1_000_000
        for work in list(self._works.values()):
            work.replicated.put("the trainer is gone")
        self.give_up(
            err(Code.TRAINER_LOST, "the trainer ended while it copied", requirement="REQ-CMT-029")
        )

    def give_up(self, error: CkptError) -> None:
        """Give up all saves with an incomplete snapshot."""
        for progress in list(self._pending.values()):
            progress.abandon(error)

    def finish(self, timeout_s: float | None = None) -> bool:
        """Finish the accepted saves, then end the thread.

        Args:
            timeout_s: longest wait in seconds; None for no limit.

        Returns: whether the thread has ended.
        """
        if self._uploads is not None:
            self._uploads.limit(self._deadline_s)
        self._tasks.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def is_alive(self) -> bool:
        """Return whether the threads of the saver are running."""
        return self._thread.is_alive() and (self._uploads is None or self._uploads.is_alive())

    def _begin(self, number: int, slot: int, request: SaveRequest) -> None:
        assert self._image is not None  # noqa: S101
        progress = Progress()
        snapped = Snapped(
            image=self._image,
            view=self._views[slot],
            slot=slot,
            context=request.context,
            progress=progress,
        )
        try:
            work = _Work(self._store, request, functools.partial(self._report, number))
        except Exception as error:  # noqa: BLE001
            self._report(number, "FAILED", as_ckpt_error(error).as_json())  # so for all writers
            return
        try:
            self._hold(number, work, progress)
        except Exception as error:  # noqa: BLE001
            self._release(number, work)
            work.fail(error)
            return

        def task() -> None:
            is_on_its_way = False
            try:
                is_on_its_way = self._uploads is not None and self._save_by_cache(
                    number, work, snapped, self._uploads
                )
                if not is_on_its_way:
                    manifest = work.save(snapped, self._chain, self._known)
                    if (
                        self._uploads is not None
                        and manifest is not None
                        and manifest.durability == HOME
                    ):
                        self._settle_older(request)
            finally:
                if not is_on_its_way:
                    self._release(number, work)

        self._deadline_s = request.deadline_s
        if request.ledger:
            self._launch = request.origin.launch
        self._tasks.put(task)

    # --- saves through a cache --------------------------------------------------------------------

    def _save_by_cache(self, number: int, work: _Work, snapped: Snapped, uploads: Uploads) -> bool:
        """Write a save into the cache and queue the upload, which releases the save.

        Returns: False if the cache failed, after all earlier saves have ended; True otherwise.
        """
        while not self._committed.empty():
            self._chain.commit(self._committed.get())
        try:
            cache = self._open_cache(work.request, uploads)
            reason = work.write_to_cache(cache, uploads, snapped, self._chain)
        except (StoreError, IntegrityError, FormatError) as error:
            self._cache = None
            self._note(f"CACHE_FAILED: a save is written to the run's home at once: {error}")
            uploads.wait_idle()
            return False
        except Exception as error:  # noqa: BLE001
            work.report("FAILED", as_ckpt_error(error).as_json())
            uploads.add(functools.partial(self._end_failed, number, work, error))
            return True

        def upload() -> None:
            try:
                uploads.until_home_answers(lambda: self._hold_run(work.request))
                work.bring_home(cache, uploads, self._upload_known, reason, self._committed.put)
            except CkptError as error:  # home refuses the hold
                work.fail(error)
            finally:
                self._release(number, work)

        uploads.add(upload)
        return True

    def _settle_older(self, request: SaveRequest) -> None:
        """Mark earlier saves in the cache as settled: this save is at home, and they needn't be."""
        assert self._cache_options is not None  # noqa: S101
        with contextlib.suppress(CkptError):  # the cache may be gone
            cache = NodeCache(self._cache_options, request.origin.run_id or "")
            cache.settle_up_to(part_of(request.origin, request.writer))

    def _end_failed(self, number: int, work: _Work, error: Exception) -> None:
        """Report to all writers a save that failed before it was in the cache.

        The trainer has the report already.
        """
        try:
            work.tell_others(as_ckpt_error(error))
        finally:
            self._release(number, work)

    def _open_cache(self, request: SaveRequest, uploads: Uploads) -> NodeCache:
        """Return the cache.

        The first call also queues the uploads of a saver of this launch and writer that died.
        """
        assert self._cache_options is not None  # noqa: S101
        origin = request.origin
        if self._cache is None:
            self._cache = NodeCache(self._cache_options, origin.run_id or "")
        if not self._has_adopted:
            self._has_adopted = True
            for part in self._cache.list_unfinished():
                if (part.writer, part.launch) == (request.writer, origin.launch):
                    uploads.add(functools.partial(self._adopt, self._cache, part, request, uploads))
        return self._cache

    def _adopt(
        self, cache: NodeCache, part: CachedPart, request: SaveRequest, uploads: Uploads
    ) -> None:
        """Finish a cached save of a saver that died. Spec: REQ-RUN-036."""
        assert self._store is not None  # noqa: S101
        try:
            with cache.hold(part):
                origin = cache.read_part(part)[0].origin
                bring_home(
                    cache,
                    part,
                    self._store,
                    origin,
                    uploads=uploads,
                    known=self._upload_known,
                    deadline_s=request.deadline_s,
                )
        except Exception as error:  # noqa: BLE001
            self._note(
                f"CACHE_UNFINISHED: {part.name}, which a saver left when it died:"
                f" {as_ckpt_error(error)}"
            )

    def _note(self, sentence: str) -> None:
        self._send({"type": "note", "sentence": encodable(sentence)})

    # --- holds ------------------------------------------------------------------------------------

    def _hold(self, number: int, work: _Work, progress: Progress) -> None:
        """Hold the file that shows that saves are in progress."""
        with self._lock:
            self._works[number] = work
            self._pending[number] = progress  # first: keeps an existing hold
        try:
            self._hold_run(work.request) if work.is_in_run else work.hold()
        except StoreError:
            if self._uploads is None:
                raise
            # Home doesn't answer, and no launch can begin there. The upload takes the hold before
            # it writes its first byte to home.

    def _hold_run(self, request: SaveRequest) -> None:
        """Hold a file in the run, unless this saver holds one already. Spec: REQ-RUN-017."""
        with self._lock:
            if self._is_held:
                return
        assert self._store is not None  # noqa: S101
        name = f"{SAVERS}/{request.origin.launch:04d}-{request.writer:05d}-{request.origin.attempt}"
        with contextlib.ExitStack() as held:
            held.enter_context(self._store.hold(name))
            with self._lock:
                if not self._is_held:
                    self._held = held.pop_all()
                    self._is_held = True

    def _release(self, number: int, work: _Work) -> None:
        with self._lock, contextlib.suppress(CkptError):
            del self._pending[number], self._works[number]
            with work.held:
                if not self._pending:
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
        cache = None if opening["cache"] is None else CacheOptions.from_dict(opening["cache"])
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
            slots[message["slot"]] = slot = Slot.attach(slot_fd)
            slot.touch()
            saver.add_slot(message["slot"], slot)
            send({"type": "ready", "slot": message["slot"]})
        else:
            saver.handle(message)


if __name__ == "__main__":
    main(int(sys.argv[1]))
