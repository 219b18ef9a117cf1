"""Save from a slot, beside the training: follow the copies into the slot, hash, write, commit, clean up.

A `Saver` does what messages say. It knows stores and slots, and no framework. It works in a thread of the trainer, or
in a process of its own, ``python -m ckptfmt.saver.saver FD``, in a session of its own and without standard streams.
When the trainer is gone, that process finishes the saves whose snapshot is complete, gives up the others, and ends. A
save goes through these states, and each is reported:

    STAGED      the snapshot is complete, and the saver has it: a trainer that dies now loses nothing
    WRITTEN     this writer's files and part are durable, in the cache of this node where there is one; the slot is free
    COMMITTED   the checkpoint is, for all writers
    DONE        older checkpoints were cleaned up, and nothing is held in a directory that belongs to no run
    FAILED      with the error
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
from ckptfmt.run.lineage import check_not_fenced
from ckptfmt.run.node_cache import CachedPart, CacheOptions, NodeCache, part_of
from ckptfmt.run.retention import explain_no_space, tidy_up
from ckptfmt.saver.ledger_writer import end_entry, put_entry
from ckptfmt.saver.request import OF_MANIFEST, SaveRequest
from ckptfmt.saver.uploads import Uploads, bring_home
from ckptfmt.stage.helper_process import Channel, be_helper, watch
from ckptfmt.stage.slot import Slot
from ckptfmt.store import open_address
from ckptfmt.store.protocol import Store
from ckptfmt.write.image import Image
from ckptfmt.write.slot_contents import Progress, Snapped
from ckptfmt.write.staging import Seen
from ckptfmt.write.writer import as_ckpt_error, tell_failure


class _Work:
    """A save in the hands of a saver: where it goes, and what is held meanwhile.

    Args:
        run_store: rooted at the run; None outside of one.
        request: what was asked for.
        report: called with a state and what there is to say of it.

    Raises: what opening the place raises.
    """

    def __init__(
        self, run_store: Store | None, request: SaveRequest, report: Callable[[str, dict[str, Any]], None]
    ) -> None:
        self.request, self.report = request, report
        self.held = contextlib.ExitStack()
        #: Saves of others to the same place that were under way when this one began.
        self._earlier: list[str] = []
        #: Why there is no replica, or nothing, once the trainer knows.
        self.replicated: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._run_store = run_store
        origin, place = request.origin, request.place
        if place is None:
            assert run_store is not None  # noqa: S101 - such requests go to the saver of a run
            assert origin.launch is not None  # noqa: S101
            self.store = run_store.at(checkpoint_name(origin.step, origin.launch))
        else:
            self.store = open_address(place, writable=True) if isinstance(place, bytes | dict) else place

    @property
    def is_in_run(self) -> bool:
        """Whether the checkpoint belongs to a run."""
        return self.request.place is None

    def hold(self) -> None:
        """Let others see that somebody is at it. Spec: REQ-CMT-043."""
        request = self.request
        self._earlier = self.held.enter_context(
            hold_attempt(self.store, request.origin, request.writer, must=request.replace)
        )

    def save(self, snapped: Snapped, chain: Chain, known: Known) -> Manifest | None:
        """Save what is, or will be, in a slot; tell every state behind STAGED that is reached, FAILED included.

        Returns: the manifest, if it is committed.

        Args:
            chain: the saves before this one.
            known: what they have parsed.

        Spec: REQ-CMT-003 to REQ-CMT-009, REQ-CMT-029, REQ-RUN-004.
        """
        request = self.request
        try:
            if request.writer == 0:
                self._check()
            plan = chain.write(self.store, request.origin, request.writer, snapped, options=request.delta)
            self.report("WRITTEN", {})
            manifest = self._decide(known)
        except Exception as error:  # noqa: BLE001 - told to the trainer, whatever it is
            self.fail(error)
            return None
        # From here on there is a checkpoint, whatever comes.
        self._tell_committed(manifest, plan.reason)
        if manifest.durability == HOME:  # else it is no base: other writers' files may be in caches
            chain.commit(manifest)
        if request.writer == 0 and self.is_in_run:
            with contextlib.suppress(CkptError):  # what a killed attempt left takes space, and isn't worth an error
                sweep_attempts(self.store, request.origin, known=known)
        self._end("DONE", self._tidy_up(known))
        return manifest

    def write_to_cache(self, cache: NodeCache, uploads: Uploads, snapped: Snapped, chain: Chain) -> str:
        """Save into the cache what is, or will be, in a slot, and tell WRITTEN; return why so, or as a delta.

        Raises: StoreError, IntegrityError, FormatError where the cache takes nothing, or has no room for this; what
            waiting for the slot raises.
        """
        request, nbytes = self.request, snapped.image.nbytes
        while not cache.make_room(nbytes):
            if not uploads.wait_for_one():
                detail = f"no room for a save of {nbytes} bytes"
                raise err(Code.NO_SPACE, detail, where=cache.store.name, remedy="Raise cache_nbytes=, or free space.")
        part = part_of(request.origin, request.writer)
        self.held.enter_context(cache.hold(part))
        stays = request.durability != HOME
        try:
            plan = chain.write(
                cache.at(part.name),
                request.origin,
                request.writer,
                dataclasses.replace(
                    snapped, context=dataclasses.replace(snapped.context, durability=request.durability)
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
        self, cache: NodeCache, uploads: Uploads, known: Known, reason: str, on_commit: Callable[[Manifest], object]
    ) -> None:
        """Bring home what `write_to_cache` wrote; tell COMMITTED and DONE, or FAILED.

        Args:
            on_commit: called with the manifest of what the next save may be a delta of.
        """
        request = self.request
        assert self._run_store is not None  # noqa: S101 - only saves of a run go through a cache
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
        except Exception as error:  # noqa: BLE001 - told to the trainer, whatever it is
            self.fail(error)
            return
        if manifest.durability == HOME:
            on_commit(manifest)
        self._tell_committed(manifest, reason)
        self._end("DONE", self._tidy_up(known))

    def _has_replica(self) -> bool:
        """Wait until the trainer says whether another node has the save, no longer than the deadline."""
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
            sweeps=not self.is_in_run,  # there it is part of what is done behind the commit
        )

    def _tell_committed(self, manifest: Manifest, reason: str) -> None:
        self.report("COMMITTED", {name: getattr(manifest, name) for name in OF_MANIFEST} | {"reason": reason})
        if self._run_store is not None:
            put_entry(self._run_store, self.request.origin.launch, self.request.ledger)

    def fail(self, error: Exception) -> None:
        """Tell trainer and other writers that the save has failed. Spec: REQ-CMT-004."""
        known = as_ckpt_error(error)
        if self.is_in_run and self._run_store is not None:
            known = explain_no_space(known, self._run_store, self.request.retention)
        self.tell_others(known)
        self._end("FAILED", known.as_json())

    def _end(self, state: str, told: dict[str, Any]) -> None:
        """Tell how it ended, once nothing is held in its directory: whoever hears it may move or delete that."""
        with contextlib.suppress(CkptError):
            self.held.close()
        self.report(state, told)

    def tell_others(self, error: CkptError) -> None:
        """Tell the other writers that the save has failed. Spec: REQ-CMT-004."""
        tell_failure(self.store, self.request.origin, self.request.writer, error)

    def _check(self) -> None:
        """Raise where nothing may be saved any more; wait for earlier saves to the same place."""
        request = self.request
        if self.is_in_run:
            assert self._run_store is not None  # noqa: S101 - see __init__
            check_not_fenced(self._run_store, request.origin.launch or 0)
            check_vacant(self.store)
            return
        wait_for_attempts(self.store, self._earlier, deadline_s=request.deadline_s)
        if request.replace:
            # What a killed save left may be as large as this one, and there may be room for one of them only.
            sweep_attempts(self.store, request.origin)
        else:
            check_vacant(self.store)

    def _tidy_up(self, known: Known) -> dict[str, Any]:
        origin = self.request.origin
        if self.request.writer != 0 or self.request.place is not None or self._run_store is None:
            return {"removed": [], "problem": ""}
        assert origin.run_id is not None  # noqa: S101 - see __init__
        assert origin.launch is not None  # noqa: S101
        run = RunRecord(run_id=origin.run_id, writer_features=self.request.writer_features)
        retention = self.request.retention
        try:
            removed, problem = tidy_up(self._run_store, run, launch=origin.launch, retention=retention, known=known)
        except Exception as error:  # noqa: BLE001 - it is the next save's to try again, and this one is committed
            removed, problem = [], str(as_ckpt_error(error))
        return {"removed": removed, "problem": encodable(problem)}


class Saver:
    """Saves one after the other, as messages come. As long as there are any, a file in the run is held.

    Args:
        store: rooted at the run; None where each request says its place.
        send: called with each message to the trainer, from any thread.
        cache: through which the saves of a run go home; None for none.
        rest: called after each save, when nobody waits for that one any more.

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
        #: What was committed by way of the cache, for the thread that writes to hear of.
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
        self._upload_known = Known()  # of the other thread
        self._chain = Chain(self._coders, self._known)
        self._held = contextlib.ExitStack()
        self._is_held = False
        self._deadline_s = 0.0
        #: Of the launch whose ledger is kept: its number, and when its trainer was gone.
        self._launch: int | None = None
        self._ended_unix_ms: int | None = None
        self._lock = threading.Lock()  # guards what is pending, and what is held
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="ckptfmt-saver", daemon=True)
        self._thread.start()

    def add_slot(self, number: int, slot: Slot) -> None:
        """Take note of a slot, in the place of the one of this number."""
        self._views[number] = slot.view
        self._coders.add_slot(number, slot)

    def handle(self, message: dict[str, Any]) -> None:
        """Do what a message of the trainer says: image, save, staged, complete or abandon."""
        kind, number = message["type"], message.get("number", 0)
        if kind == "image":
            self._image = Image.from_dict(message["image"])
        elif kind == "save":
            self._begin(number, message["slot"], SaveRequest.from_dict(message["request"]))
        elif (progress := self._pending.get(number)) is not None:
            if kind == "staged":
                seen = message.get("seen", ())
                progress.advance(message["nbytes"], [Seen(begin=at, digests=of, kept=kept) for at, of, kept in seen])
            elif kind == "complete":
                self._report(number, "STAGED", {})
                progress.complete()
            elif kind == "replicated" and (work := self._works.get(number)) is not None:  # else it is over just now
                work.replicated.put(message["problem"])
            elif kind == "abandon":
                progress.abandon(err(Code.STATE_CHANGED, message["detail"]))

    def lose_trainer(self) -> None:
        """Give up the saves whose snapshot isn't complete: the trainer is gone. Those in a cache are brought home."""
        self._ended_unix_ms = time.time_ns() // 1_000_000
        for work in list(self._works.values()):
            work.replicated.put("the trainer is gone")
        self.give_up(err(Code.TRAINER_LOST, "the trainer ended while it copied", requirement="REQ-CMT-029"))

    def give_up(self, error: CkptError) -> None:
        """Give up the saves whose snapshot isn't complete."""
        for progress in list(self._pending.values()):
            progress.abandon(error)

    def finish(self, timeout_s: float | None = None) -> bool:
        """Do what is still to do, then end; False if that takes longer than `timeout_s` seconds."""
        if self._uploads is not None:
            self._uploads.limit(self._deadline_s)
        self._tasks.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def is_alive(self) -> bool:
        """Tell whether anybody would do what is asked."""
        return self._thread.is_alive() and (self._uploads is None or self._uploads.is_alive())

    def _begin(self, number: int, slot: int, request: SaveRequest) -> None:
        assert self._image is not None  # noqa: S101 - the trainer sends it first
        progress = Progress()
        snapped = Snapped(
            image=self._image, view=self._views[slot], slot=slot, context=request.context, progress=progress
        )
        try:
            work = _Work(self._store, request, functools.partial(self._report, number))
        except Exception as error:  # noqa: BLE001 - told to the trainer, whatever it is
            self._report(number, "FAILED", as_ckpt_error(error).as_json())  # the others find no store, either
            return
        try:
            self._hold(number, work, progress)
        except Exception as error:  # noqa: BLE001 - the same
            self._release(number, work)
            work.fail(error)
            return

        def task() -> None:
            is_on_its_way = False
            try:
                is_on_its_way = self._uploads is not None and self._save_by_cache(number, work, snapped, self._uploads)
                if not is_on_its_way:
                    manifest = work.save(snapped, self._chain, self._known)
                    if self._uploads is not None and manifest is not None and manifest.durability == HOME:
                        self._settle_older(request)
            finally:
                if not is_on_its_way:
                    self._release(number, work)

        self._deadline_s = request.deadline_s
        if request.ledger:
            self._launch = request.origin.launch
        self._tasks.put(task)

    # --- by way of a cache --------------------------------------------------------------------------------------------

    def _save_by_cache(self, number: int, work: _Work, snapped: Snapped, uploads: Uploads) -> bool:
        """Write a save into the cache, and have it brought home behind those before it; it is in hand until then.

        Returns: False where the cache takes nothing, and all saves before this one are over.
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
        except Exception as error:  # noqa: BLE001 - told to the trainer, whatever it is
            work.report("FAILED", as_ckpt_error(error).as_json())
            uploads.add(functools.partial(self._end_failed, number, work, error))
            return True

        def upload() -> None:
            try:
                uploads.until_home_answers(lambda: self._hold_run(work.request))
                work.bring_home(cache, uploads, self._upload_known, reason, self._committed.put)
            except CkptError as error:  # of a hold, which home doesn't take
                work.fail(error)
            finally:
                self._release(number, work)

        uploads.add(upload)
        return True

    def _settle_older(self, request: SaveRequest) -> None:
        """Take note that what the cache has of earlier saves may go: this one went past it, and is at home."""
        assert self._cache_options is not None  # noqa: S101 - there are uploads
        with contextlib.suppress(CkptError):  # the cache may be gone
            cache = NodeCache(self._cache_options, request.origin.run_id or "")
            cache.settle_up_to(part_of(request.origin, request.writer))

    def _end_failed(self, number: int, work: _Work, error: Exception) -> None:
        """Tell the other writers of a save that failed before it was in the cache; the trainer knows."""
        try:
            work.tell_others(as_ckpt_error(error))
        finally:
            self._release(number, work)

    def _open_cache(self, request: SaveRequest, uploads: Uploads) -> NodeCache:
        """Return the cache, and take over what a saver of this launch and writer left there when it died."""
        assert self._cache_options is not None  # noqa: S101 - there are uploads
        origin = request.origin
        if self._cache is None:
            self._cache = NodeCache(self._cache_options, origin.run_id or "")
        if not self._has_adopted:
            self._has_adopted = True
            for part in self._cache.list_unfinished():
                if (part.writer, part.launch) == (request.writer, origin.launch):
                    uploads.add(functools.partial(self._adopt, self._cache, part, request, uploads))
        return self._cache

    def _adopt(self, cache: NodeCache, part: CachedPart, request: SaveRequest, uploads: Uploads) -> None:
        """Finish a save of a saver that died. Spec: REQ-RUN-036."""
        assert self._store is not None  # noqa: S101 - it is a run's
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
        except Exception as error:  # noqa: BLE001 - nobody has a handle of it
            self._note(f"CACHE_UNFINISHED: {part.name}, which a saver left when it died: {as_ckpt_error(error)}")

    def _note(self, sentence: str) -> None:
        self._send({"type": "note", "sentence": encodable(sentence)})

    # --- holds --------------------------------------------------------------------------------------------------------

    def _hold(self, number: int, work: _Work, progress: Progress) -> None:
        """Hold the file by which others know that there is something to wait for."""
        with self._lock:
            self._works[number] = work
            self._pending[number] = progress  # first: what is held stays so from here on
        try:
            self._hold_run(work.request) if work.is_in_run else work.hold()
        except StoreError:
            if self._uploads is None:
                raise
            # Home doesn't answer: it is held before the first byte goes there, and no launch begins before that.

    def _hold_run(self, request: SaveRequest) -> None:
        """Hold a file in the run, unless one is held. Spec: REQ-RUN-017."""
        with self._lock:
            if self._is_held:
                return
        assert self._store is not None  # noqa: S101 - see _Work
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
        except BaseException as error:  # noqa: BLE001 - told to the trainer, whatever it is
            self._break(error)
        finally:
            self._coders.close()
            if self._uploads is not None:
                self._uploads.end()
            if self._store is not None and self._launch is not None and self._ended_unix_ms is not None:
                end_entry(self._store, self._launch, self._ended_unix_ms)
            with contextlib.suppress(CkptError):
                self._held.close()

    def _break_by(self, error: BaseException) -> None:
        """Let the thread that writes end with the error of another: while it reads slots, they mustn't be let go."""

        def task() -> None:
            raise error

        self._tasks.put(task)

    def _break(self, error: BaseException) -> None:
        """Say that nothing is saved from here any more: what failed isn't a save, or telling of one."""
        known = as_ckpt_error(error)
        self.give_up(known)
        self._send({"type": "broken", "error": known.as_json()})


# --- a process of its own ---------------------------------------------------------------------------------------------


def main(fd: int) -> None:
    """Serve the trainer at the other end of the socket `fd` until it is gone."""
    channel = be_helper(fd)

    def send(message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the trainer is gone: there is nobody to tell
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
        # Garbage has time until a save is over; to look for it takes milliseconds, and somebody waits for those.
        gc.disable()
        address = opening["address"]
        store = None if address is None else open_address(address, writable=True)
        cache = None if opening["cache"] is None else CacheOptions.from_dict(opening["cache"])
        saver = Saver(store, send, cache=cache, rest=gc.collect)
        _serve(channel, saver, send)
    except Exception as error:  # noqa: BLE001 - told to the trainer, whatever it is
        problem = as_ckpt_error(error)
    if saver is not None:
        saver.lose_trainer() if problem is None else saver.give_up(problem)
        saver.finish()
    if problem is not None:
        # Last: the trainer takes the slots back now.
        send({"type": "broken", "error": problem.as_json()})


def _be_nice(added: int) -> None:
    """Add to the niceness of this process, and to that of its session, which is what many kernels go by."""
    niceness = os.nice(added)
    with contextlib.suppress(OSError):  # no such kernel, or set too often within a moment
        pathlib.Path("/proc/self/autogroup").write_text(str(niceness))


def _serve(channel: Channel, saver: Saver, send: Callable[[dict[str, Any]], None]) -> None:
    """Do what the trainer says, until it is gone."""
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
