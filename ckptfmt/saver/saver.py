"""Save from a slot, beside the training: follow the copies into the slot, hash, write, commit, clean up.

A `Saver` does what messages say. It knows the run's store and the slots, and no framework. It works in a thread of the
trainer, or in a process of its own, ``python -m ckptfmt.saver.saver FD``, that a `Checkpointer` starts, in a session of
its own and without standard streams. When the trainer is gone, that process finishes the saves whose snapshot is
complete, gives up the others, and ends. A save goes through these states, and each is reported:

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

from ckptfmt.commit.decision import Known, check_vacant, decide
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
from ckptfmt.store.local import LocalStore
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
    """

    origin: Origin
    writer: int
    context: Context
    deadline_s: float
    writer_features: tuple[str, ...]
    retention: Retention = KEEP_ALL
    delta: DeltaOptions = dataclasses.field(default_factory=DeltaOptions)

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
        )


def _columns(rows: Iterable[RngStream | Leaf], kind: type[RngStream | Leaf]) -> dict[str, Any]:
    rows = tuple(rows)
    return {field.name: [getattr(row, field.name) for row in rows] for field in dataclasses.fields(kind)}


def _rows(columns: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for values in zip(*columns.values(), strict=True):
        yield dict(zip(columns, values, strict=True))


def save_snapshot(
    run_store: Store,
    request: SaveRequest,
    snapped: Snapped,
    *,
    report: Callable[[str, dict[str, Any]], None],
    chain: Chain,
    known: Known,
) -> None:
    """Save what is, or will be, in a slot; tell every state behind STAGED that is reached, FAILED included.

    Args:
        run_store: rooted at the run.
        report: called with a state and what there is to say of it.
        chain: the saves before this one.
        known: what they have parsed.

    Spec: REQ-CMT-003 to REQ-CMT-009, REQ-CMT-029, REQ-RUN-004.
    """
    origin = request.origin
    store = _place(run_store, origin)
    try:
        if request.writer == 0:
            check_not_fenced(run_store, origin.launch or 0)
            check_vacant(store)
        plan = chain.write(store, origin, request.writer, snapped, options=request.delta)
        report("WRITTEN", {})
        manifest = decide(store, origin, writer=request.writer, deadline_s=request.deadline_s, known=known)
    except Exception as error:  # noqa: BLE001 - told to the trainer, whatever it is
        fail(run_store, request, error, report)
        return
    # From here on there is a checkpoint, whatever comes.
    told = {name: getattr(manifest, name) for name in ("digest", "nbytes", "profile", "stored_nbytes")}
    report("COMMITTED", {**told, "reason": plan.reason})
    chain.commit(manifest)
    report("DONE", _tidy_up(run_store, request, known))


def fail(
    run_store: Store, request: SaveRequest, error: Exception, report: Callable[[str, dict[str, Any]], None]
) -> None:
    """Tell trainer and other writers that a save has failed. Spec: REQ-CMT-004."""
    origin, known = request.origin, as_ckpt_error(error)
    tell_failure(_place(run_store, origin), origin, request.writer, known)
    report("FAILED", known.as_json())


def _place(run_store: Store, origin: Origin) -> Store:
    assert origin.launch is not None  # noqa: S101 - only runs are saved in the background
    return run_store.at(checkpoint_name(origin.step, origin.launch))


def _tidy_up(run_store: Store, request: SaveRequest, known: Known) -> dict[str, Any]:
    origin = request.origin
    if request.writer != 0:
        return {"removed": [], "problem": ""}
    assert origin.run_id is not None  # noqa: S101 - see _place
    assert origin.launch is not None  # noqa: S101
    run = RunRecord(run_id=origin.run_id, writer_features=request.writer_features)
    try:
        removed, problem = tidy_up(run_store, run, launch=origin.launch, retention=request.retention, known=known)
    except Exception as error:  # noqa: BLE001 - it is the next save's to try again, and this one is committed
        removed, problem = [], str(as_ckpt_error(error))
    return {"removed": removed, "problem": encodable(problem)}


class Saver:
    """Saves one after the other, as messages come. As long as there are any, a file in the run is held.

    Args:
        store: rooted at the run.
        send: called with each message to the trainer, from any thread.
        rest: called after each save, when nobody waits for that one any more.

    Spec: REQ-RUN-017.
    """

    def __init__(
        self, store: Store, send: Callable[[dict[str, Any]], None], *, rest: Callable[[], object] = lambda: None
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
            self._hold(number, request, progress)
        except Exception as error:  # noqa: BLE001 - told to the trainer, whatever it is
            fail(self._store, request, error, report)
            return

        def task() -> None:
            try:
                save_snapshot(self._store, request, snapped, report=report, chain=self._chain, known=self._known)
            finally:
                self._release(number)

        self._tasks.put(task)

    def _hold(self, number: int, request: SaveRequest, progress: Progress) -> None:
        """Hold the file by which a new launch knows that there is something to wait for."""
        with self._lock:
            if not self._pending:
                origin = request.origin
                name = f"{SAVERS}/{origin.launch:04d}-{request.writer:05d}-{origin.attempt}"
                self._held.enter_context(self._store.hold(name))
            self._pending[number] = progress

    def _release(self, number: int) -> None:
        with self._lock:
            del self._pending[number]
            if not self._pending:
                with contextlib.suppress(CkptError):
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
        saver = Saver(LocalStore(os.fsdecode(opening["path"]), writable=True), send, rest=gc.collect)
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
