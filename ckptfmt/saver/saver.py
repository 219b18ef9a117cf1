"""Save from a slot, beside the training: follow the copies into the slot, hash, write, commit, clean up.

A `Saver` does what messages say. It knows stores and slots, and no framework. It works in a thread of the trainer, or
in a process of its own, ``python -m ckptfmt.saver.saver FD``, in a session of its own and without standard streams.
When the trainer is gone, that process finishes the saves whose snapshot is complete, gives up the others, and ends. A
save goes through these states, and each is reported:

    STAGED      the snapshot is complete, and the saver has it: a trainer that dies now loses nothing
    WRITTEN     this writer's files and part are durable; the slot is free
    COMMITTED   the checkpoint is, for all writers
    DONE        older checkpoints were cleaned up
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
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ckptfmt.commit.decision import Known, check_vacant, decide, sweep_attempts
from ckptfmt.commit.waiting import hold_attempt, wait_for_attempts
from ckptfmt.delta.chain import Chain
from ckptfmt.delta.coders import Coders
from ckptfmt.delta.policy import DeltaOptions
from ckptfmt.documents.labels import Labels
from ckptfmt.documents.manifest import Origin, checkpoint_name
from ckptfmt.documents.part import Leaf, RngStream
from ckptfmt.documents.run import SAVERS, RunRecord
from ckptfmt.errors import CkptError, Code, encodable, err
from ckptfmt.run.lineage import check_not_fenced
from ckptfmt.run.retention import KEEP_ALL, Retention, tidy_up
from ckptfmt.stage.helper_process import Channel, be_helper, watch
from ckptfmt.stage.slot import Slot
from ckptfmt.store import Address, open_address
from ckptfmt.store.protocol import Store
from ckptfmt.write.image import Context, Image
from ckptfmt.write.slot_contents import Progress, Snapped
from ckptfmt.write.staging import Seen
from ckptfmt.write.writer import as_ckpt_error, tell_failure


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """One save, as the trainer asks for it.

    Attributes:
        origin: of the attempt.
        writer: number of this writer.
        context: what isn't tensors.
        deadline_s: how long to wait for the other writers, in seconds.
        retention: what stays of what is committed.
        writer_features: of the run.
        delta: whether it may be a delta.
        place: of a checkpoint outside of a run: its address (see `ckptfmt.store`), or a store that is rooted there.
        replace: whether to take the place of a checkpoint that is there.
    """

    origin: Origin
    writer: int
    context: Context
    deadline_s: float
    writer_features: tuple[str, ...]
    retention: Retention = KEEP_ALL
    delta: DeltaOptions = dataclasses.field(default_factory=DeltaOptions)
    place: Address | Store | None = None
    replace: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Return the request as plain values, the many of a kind in columns."""
        context = self.context
        return {
            "origin": self.origin.as_dict(),
            "writer": self.writer,
            "saved_unix_s": context.saved_unix_s,
            "streams": _columns(context.streams, RngStream),
            "leaves": _columns(context.leaves, Leaf),
            "absent": context.absent,
            "labels": context.labels.members(),
            "deadline_s": str(self.deadline_s),
            "retention": self.retention.as_dict(),
            "writer_features": list(self.writer_features),
            "delta": self.delta.as_dict(),
            "place": self.place,
            "replace": self.replace,
        }

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> SaveRequest:
        """Return the request that `as_dict` was asked of."""
        context = Context(
            saved_unix_s=value["saved_unix_s"],
            streams=tuple(RngStream(**row) for row in _rows(value["streams"])),
            leaves=tuple(Leaf(**row) for row in _rows(value["leaves"])),
            absent=value["absent"],
            labels=Labels(metrics=value["labels"]["metrics"], tags=tuple(value["labels"]["tags"])),
        )
        return cls(
            origin=Origin(**value["origin"]),
            writer=value["writer"],
            context=context,
            deadline_s=float(value["deadline_s"]),
            retention=Retention.from_dict(value["retention"]),
            writer_features=tuple(value["writer_features"]),
            delta=DeltaOptions.from_dict(value["delta"]),
            place=value["place"],
            replace=value["replace"],
        )


def _columns(rows: Iterable[RngStream | Leaf], kind: type[RngStream | Leaf]) -> dict[str, Any]:
    rows = tuple(rows)
    return {field.name: [getattr(row, field.name) for row in rows] for field in dataclasses.fields(kind)}


def _rows(columns: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for values in zip(*columns.values(), strict=True):
        yield dict(zip(columns, values, strict=True))


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
        origin, place = request.origin, request.place
        if place is None:
            assert run_store is not None  # noqa: S101 - such requests go to the saver of a run
            assert origin.launch is not None  # noqa: S101
            self._run_store = run_store
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

    def save(self, snapped: Snapped, chain: Chain, known: Known) -> None:
        """Save what is, or will be, in a slot; tell every state behind STAGED that is reached, FAILED included.

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
            manifest = decide(
                self.store,
                request.origin,
                writer=request.writer,
                deadline_s=request.deadline_s,
                known=known,
                replace=request.replace,
            )
        except Exception as error:  # noqa: BLE001 - told to the trainer, whatever it is
            self.fail(error)
            return
        # From here on there is a checkpoint, whatever comes.
        told = {name: getattr(manifest, name) for name in ("digest", "nbytes", "profile", "stored_nbytes")}
        self.report("COMMITTED", {**told, "reason": plan.reason})
        chain.commit(manifest)
        self.report("DONE", self._tidy_up(known))

    def fail(self, error: Exception) -> None:
        """Tell trainer and other writers that the save has failed. Spec: REQ-CMT-004."""
        known = as_ckpt_error(error)
        tell_failure(self.store, self.request.origin, self.request.writer, known)
        self.report("FAILED", known.as_json())

    def _check(self) -> None:
        """Raise where nothing may be saved any more; wait for earlier saves to the same place."""
        request = self.request
        if self.is_in_run:
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
        if self.request.writer != 0 or not self.is_in_run:
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
        rest: called after each save, when nobody waits for that one any more.

    Spec: REQ-RUN-017.
    """

    def __init__(
        self, store: Store | None, send: Callable[[dict[str, Any]], None], *, rest: Callable[[], object] = lambda: None
    ) -> None:
        self._store = store
        self._send = send
        self._rest = rest
        self._views: dict[int, memoryview] = {}
        self._image: Image | None = None
        self._pending: dict[int, Progress] = {}
        self._coders = Coders()
        self._known = Known()
        self._chain = Chain(self._coders, self._known)
        self._held = contextlib.ExitStack()
        self._lock = threading.Lock()
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
            elif kind == "abandon":
                progress.abandon(err(Code.STATE_CHANGED, message["detail"]))

    def lose_trainer(self) -> None:
        """Give up the saves whose snapshot isn't complete: the trainer is gone."""
        self.give_up(err(Code.TRAINER_LOST, "the trainer ended while it copied", requirement="REQ-CMT-029"))

    def give_up(self, error: CkptError) -> None:
        """Give up the saves whose snapshot isn't complete."""
        for progress in list(self._pending.values()):
            progress.abandon(error)

    def finish(self, timeout_s: float | None = None) -> bool:
        """Do what is still to do, then end; False if that takes longer than `timeout_s` seconds."""
        self._tasks.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def is_alive(self) -> bool:
        """Tell whether anybody would do what is asked."""
        return self._thread.is_alive()

    def _begin(self, number: int, slot: int, request: SaveRequest) -> None:
        assert self._image is not None  # noqa: S101 - the trainer sends it first
        progress = Progress()
        snapped = Snapped(
            image=self._image, view=self._views[slot], slot=slot, context=request.context, progress=progress
        )
        report = functools.partial(self._report, number)
        try:
            work = _Work(self._store, request, report)
        except Exception as error:  # noqa: BLE001 - told to the trainer, whatever it is
            report("FAILED", as_ckpt_error(error).as_json())  # to the others the store says nothing, either
            return
        try:
            self._hold(number, work, progress)
        except Exception as error:  # noqa: BLE001 - the same
            work.fail(error)
            return

        def task() -> None:
            try:
                work.save(snapped, self._chain, self._known)
            finally:
                self._release(number, work)

        self._tasks.put(task)

    def _hold(self, number: int, work: _Work, progress: Progress) -> None:
        """Hold the file by which others know that there is something to wait for."""
        with self._lock:
            if not work.is_in_run:
                work.hold()
            elif not self._pending:
                assert self._store is not None  # noqa: S101 - see _Work
                origin, writer = work.request.origin, work.request.writer
                name = f"{SAVERS}/{origin.launch:04d}-{writer:05d}-{origin.attempt}"
                self._held.enter_context(self._store.hold(name))
            self._pending[number] = progress

    def _release(self, number: int, work: _Work) -> None:
        with self._lock, contextlib.suppress(CkptError):
            del self._pending[number]
            with work.held:
                if not self._pending:
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
            with contextlib.suppress(CkptError):
                self._held.close()

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
        saver = Saver(store, send, rest=gc.collect)
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
