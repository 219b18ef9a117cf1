"""What saves from a slot, beside the training: states in order, nothing half done, and the same files as without it."""

import dataclasses
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptfmt.commit.decision import decide, read_register
from ckptfmt.commit.waiting import poll
from ckptfmt.delta.policy import DeltaOptions
from ckptfmt.documents.manifest import Manifest, checkpoint_name, failure_path, part_path
from ckptfmt.documents.msgpk import dump_msgpack, parse_msgpack
from ckptfmt.documents.part import Leaf, RngStream
from ckptfmt.documents.run import SAVERS
from ckptfmt.errors import Code, err
from ckptfmt.run.lineage import begin_launch, list_checkpoints, open_run
from ckptfmt.run.retention import Retention
from ckptfmt.run.save_job import SaveState
from ckptfmt.saving.request import dump_request, parse_request
from ckptfmt.saving.saver import Saver
from ckptfmt.store import LocalStore
from ckptfmt.store.memory import MemoryStore
from ckptfmt.store.protocol import Buffer, Store
from ckptfmt.write import slot_contents
from ckptfmt.write.image import Context, plan_image
from ckptfmt.write.slot import Slot
from ckptfmt.write.writer import write_part
from tests.builders import leaf, origin, snapshot, stream, tensor, two_writers, verify
from tests.stores.faults import Fault, FaultStore
from tests.stores.hooked import HookedStore, Operation
from tests.write.test_image import fill

WAIT_S = 60


def made_of(step: int, *, nbytes: int = 50_000):
    """Return a snapshot in three files."""
    content = np.arange(nbytes, dtype=np.uint64).astype(np.uint8) + np.uint8(step)
    return snapshot(
        tensor("w", content),
        tensor("z", np.array([step * 1j])),
        tensor("m", content[: nbytes // 2], field="optimizer"),
        leaves=[leaf("config", {"lr": 0.1, "step": step})],
        streams=[stream("python", (3, (1, step), None))],
        absent={"topology": "not given"},
    )


TRAINERS: list["Trainer"] = []


@pytest.fixture(autouse=True)
def no_thread_stays():
    """End every saver of a test; and none of their threads waits for something that never comes."""
    before = set(threading.enumerate())
    yield
    while TRAINERS:
        trainer = TRAINERS.pop()
        saver = trainer.saver
        saver.lose_trainer()  # a test that failed half way completes nothing any more
        if isinstance(trainer.store, GateStore):
            trainer.store.gate.set()  # nor does it let anything go on
        assert saver.finish(WAIT_S)
    new = set(threading.enumerate()) - before
    assert [thread.name for thread in new if thread.name.startswith("ckptfmt")] == []


class Trainer:
    """The other side of a saver: slots in memory, and what it was told."""

    def __init__(
        self,
        store: Store | None = None,
        *,
        seen: Store | None = None,
        writer: int = 0,
        writer_count: int = 1,
    ):
        self.store: Any = MemoryStore() if store is None else store
        self.seen: Any = self.store if seen is None else seen
        self.writer, self.writer_count = writer, writer_count
        self.run = open_run(self.seen)
        self.launch, _ = begin_launch(self.seen, self.run)
        self.told: list[dict[str, Any]] = []
        self.files_at: dict[tuple[int, str], set[str]] = {}
        self.changed = threading.Condition()
        self.saver = Saver(self.store, self.receive)
        self.contents: dict[int, memoryview] = {}
        self.views: dict[int, memoryview] = {}
        self.staged_pause_s = 0.0
        TRAINERS.append(self)

    def receive(self, message: dict[str, Any]) -> None:
        """Note a message, and which files there were when it came."""
        told = parse_msgpack(dump_msgpack(message), where="", limit_items=10_000)
        if told["state"] == "STAGED":
            time.sleep(self.staged_pause_s)
        with self.changed:
            self.told.append(told)
            self.files_at[told["number"], told["state"]] = set(self.seen.list(""))
            self.changed.notify_all()

    def origin(self, step: int):
        return origin(
            run_id=self.run.run_id,
            launch=self.launch.launch,
            nonce=self.launch.nonce,
            step=step,
            attempt=f"{step:016x}",
            writer_count=self.writer_count,
        )

    def place(self, step: int) -> Any:
        return self.seen.at(checkpoint_name(step, self.launch.launch))

    def begin(
        self,
        number: int,
        made: Any = None,
        *,
        slot: int = 0,
        keep: int | None = None,
        held: bool = False,
    ) -> None:
        """Begin save `number`, of the step of this number; the slot holds rubbish as yet."""
        made = made_of(number) if made is None else made
        image = plan_image(made, block_nbytes=4096)
        self.contents[number] = fill(image, made)
        made_slot = Slot.make(len(self.contents[number]))
        self.views[number] = made_slot.view[: len(self.contents[number])]
        self.views[number][:] = b"\xee" * len(self.contents[number])
        self.saver.add_slot(slot, made_slot)
        save = SaveState(
            store=self.place(number),
            origin=self.origin(number),
            writer=self.writer,
            deadline_s=WAIT_S,
            run=self.seen,
            retention=Retention(newest=keep),
        )
        request = dump_request(save, Context.of(made), DeltaOptions())
        self.send({"type": "image", "image": image.as_dict()})
        message = {"type": "save", "number": number, "slot": slot, "request": request}
        self.send({**message, "held": held})

    def send(self, message: dict[str, Any]) -> None:
        """Send a message as the channel would."""
        self.saver.handle(parse_msgpack(dump_msgpack(message), where="", limit_items=10_000))

    def stage(self, number: int, nbytes: int | None = None) -> None:
        """Copy up to a byte, and say so."""
        content = self.contents[number]
        nbytes = len(content) if nbytes is None else nbytes
        self.views[number][:nbytes] = content[:nbytes]
        self.send({"type": "staged", "number": number, "nbytes": nbytes})

    def complete(self, number: int) -> None:
        """Copy everything, and say that it is of one moment."""
        self.stage(number)
        self.send({"type": "complete", "number": number})

    def abandon(self, number: int) -> None:
        self.send({"type": "abandon", "number": number, "detail": "weights:w was written to"})

    def wait(self, number: int, *states: str) -> dict[str, Any]:
        """Return the message that tells of one of these states; the other end of a save ends the wait too."""
        with self.changed:

            def find() -> dict[str, Any] | None:
                mine = [told for told in self.told if told["number"] == number]
                return next(
                    (told for told in mine if told["state"] in (*states, "DONE", "FAILED")), None
                )

            assert self.changed.wait_for(find, WAIT_S), (
                f"save {number} stays at {self.states(number)}"
            )
            found = find()
        assert found is not None
        return found

    def save(self, number: int, made: Any = None, **options: Any) -> dict[str, Any]:
        """Save from begin to end, and return the last message."""
        self.begin(number, made, **options)
        self.complete(number)
        return self.wait(number)

    def states(self, number: int) -> list[str]:
        return [told["state"] for told in self.told if told["number"] == number]

    def held(self) -> bool:
        """Say whether any saver holds the run."""
        held = [self.hold_name(number) for number in range(10)]
        return any(self.seen.is_held(name) for name in held)

    def hold_name(self, number: int) -> str:
        return f"{SAVERS}/{self.launch.launch:04d}-{self.writer:05d}-{number:016x}"

    def is_let_go(self) -> bool:
        """Wait until nothing is held any more."""
        return any(not self.held() for _ in poll(WAIT_S))

    def committed(self) -> list[int]:
        return [
            entry.step
            for entry in list_checkpoints(self.seen)
            if isinstance(entry.register, Manifest)
        ]


class GateStore(HookedStore):
    """A store that stops before it creates a file of one step, until it is let go on."""

    def __init__(self, inner: Store, *, step: int = 1) -> None:
        super().__init__(inner)
        self.begun, self.gate = threading.Event(), threading.Event()
        self.prefix = f"step-{step:08d}"

    def before(self, operation: Operation) -> None:
        if operation.op == "create" and operation.path.startswith(self.prefix):
            self.begun.set()
            assert self.gate.wait(WAIT_S)


class FullStore(HookedStore):
    """A store that takes no tensor, and says so before it has drawn a byte, until it is well."""

    code = Code.NO_SPACE
    is_well = False

    def create(self, path: str, chunks: Iterable[Buffer]) -> None:
        if not self.is_well and path.endswith(".safetensors"):
            raise err(self.code, "no")
        super().create(path, chunks)


class LockedStore(HookedStore):
    """A store that doesn't even say which launches there are, until it is well."""

    code = Code.STORE_ACCESS
    is_well = False

    def before(self, operation: Operation) -> None:
        if not self.is_well and operation.op == "list_names":
            raise err(self.code, "no")


class DrawingStore:
    """A store in memory that notes each chunk as it is drawn."""

    def __init__(self, inner: MemoryStore, drawn: list[bytes]) -> None:
        self.inner, self.drawn = inner, drawn

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def at(self, prefix: str) -> "DrawingStore":
        return DrawingStore(self.inner.at(prefix), self.drawn)

    def create(self, path: str, chunks: Iterable[Buffer]) -> None:
        def draw() -> Iterator[bytes]:
            for chunk in map(bytes, chunks):
                if path.endswith(".safetensors"):
                    self.drawn.append(chunk)
                yield chunk

        self.inner.create(path, draw())


# --- the usual way --------------------------------------------------------------------------------


def test_states_come_in_order_each_with_what_it_promises() -> None:
    """REQ-CMT-030."""
    trainer = Trainer()
    trainer.staged_pause_s = 0.05  # time enough to overtake it
    trainer.begin(1)
    trainer.stage(1)
    # All bytes are there, and may still turn out not to be of one moment.
    assert any(len(trainer.place(1).list("")) >= 3 for _ in poll(WAIT_S))
    time.sleep(0.05)
    assert trainer.told == []
    trainer.complete(1)
    done = trainer.wait(1)
    assert trainer.states(1) == ["STAGED", "WRITTEN", "COMMITTED", "DONE"]
    name = checkpoint_name(1, 1)
    part, register = f"{name}/{part_path('0' * 15 + '1', 0)}", f"{name}/manifest.json"
    promised = [
        (part in trainer.files_at[1, state], register in trainer.files_at[1, state])
        for state in trainer.states(1)
    ]
    assert promised == [(False, False), (True, False), (True, True), (True, True)]
    committed = trainer.told[2]
    manifest = read_register(trainer.place(1))
    assert isinstance(manifest, Manifest)
    assert (committed["digest"], committed["nbytes"]) == (manifest.digest, 75_016)
    assert (done["removed"], done["problem"]) == ([], "")
    assert verify(trainer.place(1)).valid


@pytest.mark.parametrize("kind", ["memory", "local"])
@pytest.mark.parametrize("writer_count", [1, 2])
def test_files_are_those_of_a_save_without_it(tmp_path, monkeypatch, kind, writer_count) -> None:
    """Of the same state, by the same attempt, at the same time: byte by byte."""
    monkeypatch.setattr("time.time", lambda: 1_700_000_000)
    stores = [
        MemoryStore() if kind == "memory" else LocalStore(tmp_path / str(n), writable=True)
        for n in range(2)
    ]
    states = [*two_writers()][:writer_count] if writer_count > 1 else [made_of(3, nbytes=300_000)]
    first = Trainer(stores[0], writer_count=writer_count)
    trainers = [first]
    for writer in range(1, writer_count):
        trainers.append(Trainer(stores[0], writer=writer, writer_count=writer_count))
        trainers[-1].launch = first.launch
    for trainer, made in zip(trainers, states, strict=True):
        # The second launch was only made to make the trainer: the first one would be fenced by it.
        stores[0].delete("launches/0002.json")
        trainer.begin(3, made)
        trainer.complete(3)
    assert [trainer.wait(3)["state"] for trainer in trainers] == ["DONE"] * writer_count
    place = stores[1].at(checkpoint_name(3, 1))
    for writer, made in enumerate(states):
        write_part(place, made, first.origin(3), writer=writer)
    decide(place, first.origin(3), writer=0, deadline_s=WAIT_S)

    def contents(store: Any) -> dict[str, bytes]:
        return {path: store.read(path, limit_nbytes=10**7) for path in store.list("")}

    assert contents(first.place(3)) == contents(place)


@given(
    st.lists(st.integers(0, 80_000), max_size=6).map(sorted),
    st.sampled_from([4096, 8192, 1 << 20]),
)
def test_nothing_is_read_before_it_is_there(marks, chunk_nbytes) -> None:
    """Neither to be written nor to be hashed: what lies behind the watermark is rubbish."""
    drawn: list[bytes] = []
    store = MemoryStore()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slot_contents, "_CHUNK_NBYTES", chunk_nbytes)
        trainer = Trainer(DrawingStore(store, drawn), seen=store)
        trainer.begin(1)
        for mark in marks:
            trainer.stage(1, min(mark, len(trainer.contents[1])))
        trainer.complete(1)
        assert trainer.wait(1)["state"] == "DONE"
    assert b"".join(drawn) == b"".join(
        trainer.place(1).read(name, limit_nbytes=10**6)
        for name in sorted(trainer.place(1).list_names(""))
        if name.endswith(".safetensors")
    )
    assert verify(trainer.place(1)).valid


def test_writing_begins_before_the_copies_end(monkeypatch) -> None:
    monkeypatch.setattr(slot_contents, "_CHUNK_NBYTES", 4096)
    drawn: list[bytes] = []
    store = MemoryStore()
    trainer = Trainer(DrawingStore(store, drawn), seen=store)
    trainer.begin(1)
    trainer.stage(1, 3 * 4096 + 17)
    assert any(len(drawn) == 3 for _ in poll(WAIT_S))
    assert trainer.told == []
    trainer.complete(1)
    assert trainer.wait(1)["state"] == "DONE"


def test_all_that_is_left_to_say_is_that_it_is_complete() -> None:
    """Messages of how far it is may be few, or none."""
    trainer = Trainer()
    trainer.begin(1)
    trainer.views[1][:] = trainer.contents[1]
    trainer.send({"type": "complete", "number": 1})
    assert trainer.wait(1)["state"] == "DONE"
    assert verify(trainer.place(1)).valid


@pytest.mark.parametrize(
    "made", [snapshot(leaves=[leaf("config", 1)]), snapshot(tensor("e", np.ones((0, 3))))]
)
def test_state_without_bytes_is_saved_when_it_is_complete(made) -> None:
    trainer = Trainer()
    trainer.begin(1, made)
    assert trainer.told == []
    trainer.complete(1)
    assert trainer.wait(1)["state"] == "DONE"
    assert verify(trainer.place(1)).valid


def test_one_after_the_other() -> None:
    """The second one is staged while the first is written; each has its own image."""
    inner = MemoryStore()
    store = GateStore(inner)
    trainer = Trainer(store, seen=inner)
    trainer.begin(1, slot=0)
    trainer.complete(1)
    assert store.begun.wait(WAIT_S)
    trainer.begin(2, made_of(2, nbytes=90_000), slot=1)
    trainer.complete(2)
    assert trainer.wait(2, "STAGED")["state"] == "STAGED"
    assert trainer.states(1) == ["STAGED"]
    store.gate.set()
    assert [trainer.wait(number)["state"] for number in (1, 2)] == ["DONE", "DONE"]
    order = [(told["number"], told["state"]) for told in trainer.told]
    assert order.index((1, "DONE")) < order.index((2, "WRITTEN"))
    assert trainer.committed() == [1, 2]
    assert all(verify(trainer.place(step)).valid for step in (1, 2))


def test_old_checkpoints_go_and_are_named() -> None:
    trainer = Trainer()
    for number in (1, 2):
        assert trainer.save(number, keep=1)["state"] == "DONE"
    assert trainer.told[-1]["removed"] == [checkpoint_name(1, 1)]
    assert trainer.committed() == [2]


def test_clean_up_that_fails_is_no_failure_of_the_save() -> None:
    inner = MemoryStore()
    fault = Fault(fail_at=1, operations=frozenset({"replace"}))
    trainer = Trainer(FaultStore(inner, fault), seen=inner)
    trainer.save(1, keep=1)
    done = trainer.save(2, keep=1)
    assert (done["state"], done["removed"]) == ("DONE", [])
    assert Code.STORE_IO in done["problem"]
    assert trainer.committed() == [1, 2]


# --- held saves -----------------------------------------------------------------------------------


def begin_held(trainer: Trainer, number: int) -> None:
    """Hand over a held save whose snapshot is complete."""
    trainer.begin(number, held=True)
    trainer.complete(number)


def test_held_save_is_written_when_it_is_released() -> None:
    trainer = Trainer()
    before = trainer.store.snapshot().keys()
    begin_held(trainer, 1)
    time.sleep(0.05)  # time enough to write
    assert trainer.states(1) == []
    assert trainer.store.snapshot().keys() == before
    assert not trainer.held()  # nobody waits for a save that may never be written
    was_held = []

    def receive(message: dict[str, Any]) -> None:
        was_held.append(trainer.held())
        trainer.receive(message)

    trainer.saver._send = receive
    trainer.send({"type": "release", "number": 1})
    assert trainer.wait(1)["state"] == "DONE"
    assert trainer.states(1) == ["STAGED", "WRITTEN", "COMMITTED", "DONE"]
    assert was_held == [True] * 4  # REQ-RUN-017
    assert trainer.committed() == [1]
    assert trainer.is_let_go()


def test_held_save_that_is_dropped_writes_nothing() -> None:
    trainer = Trainer()
    before = trainer.store.snapshot().keys()
    begin_held(trainer, 1)
    trainer.send({"type": "drop", "number": 1})
    assert trainer.wait(1, "DROPPED")["state"] == "DROPPED"
    trainer.send({"type": "release", "number": 1})  # comes too late
    assert trainer.store.snapshot().keys() == before
    assert trainer.save(2)["state"] == "DONE"
    assert trainer.committed() == [2]


def test_slot_of_a_dropped_save_is_never_read_again() -> None:
    """The answer frees the slot: the trainer's death behind the answer writes nothing of the slot."""
    trainer = Trainer()
    begin_held(trainer, 1)
    trainer.send({"type": "drop", "number": 1})
    trainer.wait(1, "DROPPED")
    trainer.views[1][:] = b"\xee" * len(trainer.views[1])
    trainer.saver.lose_trainer()
    assert trainer.saver.finish(WAIT_S)
    assert trainer.committed() == []


@pytest.mark.parametrize("writer_count", [1, 2])
def test_held_save_of_a_trainer_that_is_gone_is_written_if_there_is_no_other_writer(
    writer_count: int,
) -> None:
    """Several trainers may hold different steps, and their savers would wait for each other."""
    trainer = Trainer(writer_count=writer_count)
    before = trainer.store.snapshot().keys()
    begin_held(trainer, 1)
    trainer.saver.lose_trainer()
    assert trainer.saver.finish(WAIT_S)
    if writer_count == 1:
        assert trainer.committed() == [1]
        assert verify(trainer.place(1)).valid
    else:
        assert trainer.store.snapshot().keys() == before


def test_held_save_that_was_being_copied_goes_with_its_trainer() -> None:
    trainer = Trainer()
    trainer.begin(1, held=True)
    trainer.stage(1, 5000)
    trainer.saver.lose_trainer()
    assert trainer.saver.finish(WAIT_S)
    assert trainer.wait(1)["code"] == Code.TRAINER_LOST
    assert trainer.committed() == []
    assert trainer.place(1).list("") == []


# --- what fails -----------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("writer_count", [1, 2])
def test_abandoned_save_leaves_nothing(share, writer_count) -> None:
    """REQ-CMT-029; REQ-CMT-004: where others wait for it, it leaves the reason."""
    trainer = Trainer(writer_count=writer_count)
    before = trainer.store.snapshot()
    trainer.begin(1)
    trainer.stage(1, int(share * len(trainer.contents[1])))
    if share == 1.0:  # all is written, and time enough to go on with the part
        assert any(len(trainer.place(1).list("")) >= 3 for _ in poll(WAIT_S))
        time.sleep(0.05)
    trainer.abandon(1)
    failed = trainer.wait(1)
    assert (failed["state"], failed.get("code")) == ("FAILED", Code.STATE_CHANGED)
    assert "weights:w" in failed["detail"]
    left = trainer.store.snapshot().keys() - before.keys()
    record = f"{checkpoint_name(1, 1)}/{failure_path('0' * 15 + '1', 0)}"
    assert left == ({record} if writer_count > 1 else set())
    trainer.complete(1)  # comes late, and changes nothing
    assert trainer.is_let_go()
    assert trainer.states(1)[0] == "FAILED"


def test_what_is_complete_cannot_be_abandoned() -> None:
    inner = MemoryStore()
    store = GateStore(inner)
    trainer = Trainer(store, seen=inner)
    trainer.begin(1)
    trainer.complete(1)
    trainer.abandon(1)
    trainer.saver.lose_trainer()
    store.gate.set()
    assert trainer.wait(1)["state"] == "DONE"
    assert verify(trainer.place(1)).valid


def test_trainer_that_is_gone_loses_only_what_it_was_copying() -> None:
    inner = MemoryStore()
    store = GateStore(inner)
    trainer = Trainer(store, seen=inner)
    trainer.begin(1, slot=0)
    trainer.complete(1)
    for number in (2, 3):
        trainer.begin(number, slot=number - 1)
        trainer.stage(number, 5000)
    trainer.saver.lose_trainer()
    store.gate.set()
    assert trainer.wait(1)["state"] == "DONE"
    assert [trainer.wait(number)["code"] for number in (2, 3)] == [Code.TRAINER_LOST] * 2
    assert trainer.committed() == [1]
    assert all(trainer.place(step).list("") == [] for step in (2, 3))
    assert trainer.is_let_go()


def test_whatever_fails_the_saver_goes_on() -> None:
    """Each operation in turn fails, once: that save fails with its code or is committed, the next one is well."""
    codes = set()
    for fail_at in range(1, 60):
        inner = MemoryStore()
        fault = Fault(fail_at=fail_at)
        trainer = Trainer(FaultStore(inner, fault, code=Code.NO_SPACE), seen=inner)
        last = trainer.save(1)
        fired_count = fault.fired_count
        if last["state"] == "FAILED":
            codes.add(last["code"])
        else:
            assert trainer.committed() == [1]
        assert trainer.is_let_go()
        fault.fail_at = 0
        assert trainer.save(2)["state"] == "DONE"
        assert verify(trainer.place(2)).valid
        assert trainer.is_let_go()
        if not fired_count:
            assert fail_at > 10
            assert Code.NO_SPACE in codes
            return
    raise AssertionError("no end of operations")


@pytest.mark.parametrize("writer", [0, 1])
@pytest.mark.parametrize("path_end", [".safetensors", ".msgpack"])
def test_failure_of_the_store_is_told_to_trainer_and_writers(writer, path_end) -> None:
    """REQ-CMT-004: nobody waits out the deadline for it."""
    inner = MemoryStore()
    fault = Fault(fail_at=1, operations=frozenset({"create"}), path_end=path_end)
    trainer = Trainer(
        FaultStore(inner, fault, code=Code.NO_SPACE), seen=inner, writer=writer, writer_count=2
    )
    before = inner.snapshot()
    trainer.begin(1)
    trainer.complete(1)
    failed = trainer.wait(1)
    assert (failed["state"], failed["code"]) == ("FAILED", Code.NO_SPACE)
    record = f"{checkpoint_name(1, 1)}/{failure_path('0' * 15 + '1', writer)}"
    left = inner.snapshot().keys() - before.keys()
    assert record in left
    assert path_end != ".safetensors" or left == {record}
    assert b"NO_SPACE" in inner.snapshot()[record]
    assert trainer.is_let_go()


@pytest.mark.parametrize("store_of", [FullStore, LockedStore])
def test_failure_while_it_is_still_copied_ends_at_once(store_of) -> None:
    """The threads that hash don't wait for copies that nobody needs any more."""
    inner = MemoryStore()
    store = store_of(inner)
    trainer = Trainer(store, seen=inner)
    trainer.begin(1)
    assert trainer.wait(1)["code"] == store.code
    trainer.stage(1)
    trainer.complete(1)
    store.is_well = True
    assert trainer.save(2)["state"] == "DONE"


def test_launch_that_was_taken_over_writes_nothing() -> None:
    """REQ-RUN-004: it looks before each save."""
    trainer = Trainer()
    assert trainer.save(1)["state"] == "DONE"
    begin_launch(trainer.store, trainer.run)
    before = trainer.store.snapshot()
    assert trainer.save(2).get("code") == Code.FENCED
    assert trainer.store.snapshot() == before


def test_step_that_is_there_already_stays_as_it_is() -> None:
    """REQ-CMT-008."""
    trainer = Trainer()
    trainer.save(1)
    before = trainer.store.snapshot()
    trainer.told.clear()
    trainer.begin(1, made_of(7))
    trainer.complete(1)
    assert trainer.wait(1)["code"] == Code.CHECKPOINT_EXISTS
    assert trainer.store.snapshot() == before


def test_messages_about_saves_that_nobody_knows_are_passed_over() -> None:
    trainer = Trainer()
    for kind in ("staged", "complete", "abandon"):
        trainer.send({"type": kind, "number": 77, "nbytes": 5, "detail": ""})
    assert trainer.told == []
    assert trainer.save(1)["state"] == "DONE"


# --- the file that says "there is something to wait for" ------------------------------------------


@pytest.mark.parametrize("kind", ["memory", "local"])
def test_run_is_held_from_the_first_save_to_the_last_ones_end(tmp_path, kind) -> None:
    """REQ-RUN-017."""
    inner: Any = MemoryStore() if kind == "memory" else LocalStore(tmp_path, writable=True)
    store = GateStore(inner, step=2)
    trainer = Trainer(store, seen=inner)
    assert not trainer.held()
    trainer.begin(1, slot=0)
    name = trainer.hold_name(1)
    assert inner.is_held(name)
    trainer.begin(2, slot=1)
    trainer.complete(1)
    trainer.wait(1)
    assert inner.is_held(name)
    trainer.complete(2)
    assert store.begun.wait(WAIT_S)
    assert inner.is_held(name)
    store.gate.set()
    trainer.wait(2)
    assert trainer.is_let_go()
    if kind == "local":
        assert inner.list_names(SAVERS) == []
    trainer.begin(3)
    assert inner.is_held(trainer.hold_name(3))
    trainer.abandon(3)
    trainer.wait(3)
    assert trainer.is_let_go()


def test_run_that_cannot_be_held_fails_the_save_and_not_the_saver() -> None:
    inner = MemoryStore()
    trainer = Trainer(
        FaultStore(inner, Fault(fail_at=1, operations=frozenset({"hold"}))), seen=inner
    )
    assert trainer.save(1)["code"] == Code.STORE_IO
    assert trainer.place(1).list("") == []
    assert trainer.save(2)["state"] == "DONE"
    assert trainer.is_let_go()


# --- what goes over the wire ----------------------------------------------------------------------

TEXT = st.text(st.characters(codec="utf-8"), max_size=8)
CONTEXTS = st.builds(
    Context,
    saved_unix_s=st.integers(0, 2**40),
    streams=st.lists(st.builds(RngStream, name=TEXT, scope=TEXT, kind=TEXT, state=st.binary())).map(
        tuple
    ),
    leaves=st.lists(st.builds(Leaf, field=TEXT, name=TEXT, scope=TEXT, value=st.binary())).map(
        tuple
    ),
    absent=st.dictionaries(TEXT, TEXT),
)
SAVES = st.builds(
    SaveState,
    store=st.none(),
    run=st.just(MemoryStore()),
    origin=st.builds(
        origin,
        run_id=st.sampled_from(["f" * 32, "0" * 32]),
        launch=st.integers(1, 9999),
        step=st.integers(0, 2**53 - 1),
    ),
    writer=st.integers(0, 999_999),
    deadline_s=st.floats(0, 1e9) | st.just(float("inf")) | st.integers(0, 10**6),
    retention=st.builds(
        Retention,
        newest=st.integers(1, 2**31),
        every=st.none() | st.integers(1, 2**31),
        best=st.none() | st.tuples(TEXT, st.sampled_from(["min", "max"]), st.integers(1, 9)),
    ),
    writer_features=st.lists(TEXT).map(tuple),
)


@given(SAVES, CONTEXTS)
def test_request_arrives_as_it_was_made(save: SaveState, context: Context) -> None:
    request = dump_request(save, context, DeltaOptions())
    message = parse_msgpack(dump_msgpack(request), where="", limit_items=10_000)
    arrived, *others = parse_request(message, save.run)
    assert arrived.store.name.endswith(checkpoint_name(save.origin.step, save.origin.launch or 0))
    assert dataclasses.replace(arrived, store=save.store) == save
    assert others == [context, DeltaOptions()]


@pytest.mark.parametrize("writer", [0, 1])
def test_run_that_cannot_be_held_is_told_to_the_other_writers(writer):
    """REQ-CMT-004: else they would wait out the deadline."""
    inner = MemoryStore()
    trainer = Trainer(
        FaultStore(inner, Fault(fail_at=1, operations=frozenset({"hold"}))),
        seen=inner,
        writer=writer,
        writer_count=2,
    )
    assert trainer.save(1)["code"] == Code.STORE_IO
    assert trainer.place(1).list("") == [failure_path("0" * 15 + "1", writer)]
