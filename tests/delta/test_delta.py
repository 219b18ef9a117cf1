"""Deltas: what is written of what changed, what it is read from, and that nothing else comes out."""

import collections
import dataclasses
import time

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptfmt import limits
from ckptfmt.box import Box
from ckptfmt.codecs import encodings, prediction
from ckptfmt.commit.decision import CONDEMNED, finalize, read_register
from ckptfmt.delta import delta
from ckptfmt.delta.block_coder import BlockCoder
from ckptfmt.delta.policy import DeltaOptions
from ckptfmt.digest import digest_bytes
from ckptfmt.documents.manifest import checkpoint_name, pins_path
from ckptfmt.documents.part import PartFile
from ckptfmt.documents.run import Pins
from ckptfmt.errors import CkptError, Code, err
from ckptfmt.run.retention import Retention, clean_up
from ckptfmt.store import direct
from ckptfmt.store.memory import Loss, MemoryStore
from tests.builders import ArraySink, code_of, error_of, leaf, snapshot, tensor
from tests.chains import SMALLEST, Saving, mixed
from tests.part_rows import rows_of
from tests.read.test_oracle import (
    NAMES,
    RANDOM,
    SHAPES,
    array_sink,
    content,
    oracle,
    tile,
    untouched,
    wanted_boxes,
)
from tests.stores.hooked import HookedStore
from tests.stores.recorder import Recorder

BLOCK = 4096
RNG = np.random.default_rng(5)


def state(weights, *, leaves=()):
    return snapshot(*(tensor(name, array) for name, array in weights.items()), leaves=leaves)


def some(count=6 * BLOCK // 4):
    return RNG.standard_normal(count, dtype=np.float32)


def nudged(array, count):
    """Change some elements by an ULP."""
    found = array.copy()
    found.view(np.uint32)[RNG.choice(array.size, count, replace=False)] += 1
    return found


def stored(saving, step, number=0):
    """Return the encodings of a part's blocks, box after box."""
    part = saving.open(step).read_part(number)
    return [
        [(extent.encoding, extent.block_count) for extent in held.extents]
        for row in rows_of(part.holdings)
        for held in row.boxes
    ]


def read_bytes(saving, step, name="w"):
    return saving.open(step).read("weights", name).tobytes()


# --- any state, any change, any layout ------------------------------------------------------------


def changed(array, rng):
    """Return an array of which nothing, some elements, a stretch or everything is another."""
    found = np.frombuffer(array.tobytes(), np.uint8).copy()
    if found.size:
        kind = rng.randrange(4)
        if kind == 1:
            for _ in range(rng.randint(1, 9)):
                found[rng.randrange(found.size)] ^= 1
        elif kind == 2:
            begin = rng.randrange(found.size)
            found[begin : begin + 5000] ^= 1
        elif kind == 3:
            found ^= np.frombuffer(rng.randbytes(found.size), np.uint8) & 1
    return found.view(array.dtype).reshape(array.shape)


@settings(deadline=None, max_examples=25)
@given(st.data(), RANDOM)
def test_any_chain_gives_what_was_saved_in_any_layout(data, rng):
    """REQ-DEL-005, REQ-DEL-007, REQ-OPN-005: not a bit differs at any step, whatever is wanted of it."""
    count = data.draw(st.integers(1, 3))
    arrays = {}
    for number in range(count):
        dtype = data.draw(st.sampled_from(NAMES))
        arrays[f"t{number}"] = dtype, content(data.draw(SHAPES), dtype, rng)
    writers = rng.randint(1, 3)
    held: list[dict[str, list[Box]]] = [{} for _ in range(writers)]
    for name, (_, array) in arrays.items():
        for box in tile(array.shape, rng):
            held[rng.randrange(writers)].setdefault(name, []).append(box)

    def snapshots():
        return [
            snapshot(
                *(
                    tensor(n, arrays[n][1], dtype=arrays[n][0], boxes=tuple(b))
                    for n, b in mine.items()
                )
            )
            for mine in held
        ]

    saving = Saving(*snapshots(), block_nbytes=BLOCK, slot_count=rng.randint(1, 3))
    states = []
    for step in range(1, rng.randint(2, 5)):
        saving.save(step, *snapshots())
        states.append(dict(arrays))
        arrays = {name: (dtype, changed(array, rng)) for name, (dtype, array) in arrays.items()}
    step = rng.randint(1, len(states))
    check_layouts(saving.open(step), states[step - 1], rng)


def check_layouts(checkpoint, arrays, rng):
    sinks, said = [], []
    for name, (dtype, array) in arrays.items():
        boxes = wanted_boxes(array.shape, rng)
        live = untouched(array.shape, dtype)
        sinks.append(array_sink(name, dtype, live, boxes))
        said.append((live, oracle(array, dtype, boxes)))
    checkpoint.read_into(sinks)
    for live, expected in said:
        assert live.tobytes() == expected


# --- what is stored -------------------------------------------------------------------------------


def test_nothing_is_stored_of_what_did_not_change():
    """REQ-DEL-004: no pack, no file, and every block read from the full one, however many deltas lie between."""
    arrays = {"w": some(), "b": some(10)}
    saving = Saving(state(arrays))
    for step in (1, 2, 3):
        manifest = saving.save(step, state(arrays))

    assert stored(saving, 3) == [[("same", 1)], [("same", 6)]]
    assert [
        name for name in saving.place(3).list("") if name.endswith((".pack", ".safetensors"))
    ] == []
    assert manifest.profile == "delta"
    assert manifest.stored_nbytes == 0
    assert {one.name for one in manifest.references} >= {checkpoint_name(1, 1)}
    saving.store.delete(
        f"{checkpoint_name(2, 1)}/manifest.json"
    )  # one hop: the one between isn't needed
    assert read_bytes(saving, 3) == arrays["w"].tobytes()


def test_only_the_block_that_changed_is_stored():
    arrays = {"w": some()}
    saving = Saving(state(arrays))
    saving.save(1, state(arrays))
    arrays["w"] = arrays["w"].copy()
    arrays["w"][2 * BLOCK // 4 + 7] += 1
    manifest = saving.save(2, state(arrays))

    assert stored(saving, 2) == [[("same", 2), ("sparse", 1), ("same", 3)]]
    assert manifest.fields["weights"].stored_nbytes == manifest.stored_nbytes < 100
    assert read_bytes(saving, 2) == arrays["w"].tobytes()


def test_a_field_that_is_not_encoded_is_stored_as_it_is():
    saving = Saving(
        state({"w": some()}), options=dataclasses.replace(SMALLEST, fields=frozenset({"optimizer"}))
    )
    arrays = {"w": some()}
    saving.save(1, state(arrays))
    arrays = {"w": nudged(arrays["w"], 5)}
    saving.save(2, state(arrays))

    assert {encoding for encoding, _ in stored(saving, 2)[0]} <= {"raw", "same"}
    assert read_bytes(saving, 2) == arrays["w"].tobytes()


def test_every_so_many_saves_one_is_full():
    arrays = {"w": some()}
    saving = Saving(state(arrays), options=dataclasses.replace(SMALLEST, full_every=3))
    profiles = []
    for step in range(1, 8):
        arrays = {"w": nudged(arrays["w"], 3)}
        profiles.append(saving.save(step, state(arrays)).profile)

    assert profiles == ["full", "delta", "delta", "full", "delta", "delta", "full"]


def test_writers_whose_full_saves_come_apart_end_their_chain_together():
    """REQ-DEL-021: else references grow with every save, until no part may name them all and no save commits."""
    arrays = [{"v": some()}, {"w": some()}]
    saving = Saving(*map(state, arrays), options=dataclasses.replace(SMALLEST, full_every=4))
    counts = []
    for step in range(1, 15):
        if step == 3:
            saving.writers[
                1
            ].chain.history.pause_count = (
                1  # a delta didn't pay there: its share of this one is full
            )
        counts.append(len(saving.save(step, *map(state, arrays)).references))
        arrays = [{name: nudged(array, 10) for name, array in held.items()} for held in arrays]

    assert counts == [0, 1, 2, 3] * 3 + [0, 1]


def test_a_chain_that_would_take_too_long_to_read_ends():
    """The budget is a factor of what a full restore reads: each of these deltas stores as much as a full one."""
    saving = Saving(state({"w": some()}), options=DeltaOptions(mode="smallest", restore_budget=1.5))
    profiles = [saving.save(step, state({"w": some()})).profile for step in range(1, 6)]

    assert profiles[0] == "full"
    assert profiles.count("full") >= 3


def test_a_state_of_no_bytes_is_saved_in_full():
    made = snapshot(leaves=[leaf("config", {"width": 3})])
    saving = Saving(made)
    saving.save(1, made)
    assert saving.save(2, made).profile == "full"


def test_another_layout_begins_with_a_full_one():
    saving = Saving(state({"w": some()}))
    saving.save(1, state({"w": some()}))
    other = Saving(state({"w": some(), "v": some()}), store=saving.store)
    saving.writers[0].image = other.writers[0].image
    saving.writers[0].slots = other.writers[0].slots
    assert saving.save(2, state({"w": some(), "v": some()})).profile == "full"


def test_tensors_without_elements_are_in_a_delta_too():
    made = snapshot(
        tensor("w", np.zeros((0, 3), np.float32)),
        tensor("x", some(3)),
        leaves=[leaf("config", {"width": 3})],
    )
    saving = Saving(made)
    saving.save(1, made)
    assert saving.save(2, made).profile == "delta"
    assert saving.open(2).read("weights", "w").shape == (0, 3)
    assert saving.open(2).leaf("config") == {"width": 3}


# --- where the base's bytes come from -------------------------------------------------------------


@pytest.mark.parametrize("slot_count", [1, 2, 3])
def test_a_base_is_read_from_its_files_where_its_slot_is_taken(slot_count):
    arrays = {"w": some()}
    saving = Saving(state(arrays), slot_count=slot_count)
    for step in range(1, 5):
        arrays = {"w": nudged(arrays["w"], 40)}
        saving.save(step, state(arrays))
    assert {encoding for encoding, _ in stored(saving, 4)[0]} <= {
        "sparse",
        "classes",
        "xor",
        "difference",
    }
    assert read_bytes(saving, 4) == arrays["w"].tobytes()


def test_a_slot_that_is_overwritten_meanwhile_is_not_believed():
    """The digest of the base's block is compared with that of what was copied from the slot."""
    arrays = {"w": some()}
    saving = Saving(state(arrays))
    saving.save(1, state(arrays))
    saving.writers[0].slots[0][:] = bytes(len(saving.writers[0].slots[0]))
    arrays = {"w": nudged(arrays["w"], 40)}
    saving.save(2, state(arrays))
    assert read_bytes(saving, 2) == arrays["w"].tobytes()


def test_a_save_that_failed_is_no_base():
    arrays = {"w": some()}
    saving = Saving(state(arrays))
    saving.save(1, state(arrays))
    saving.write(2, [state({"w": some()})])  # written, and never committed
    arrays = {"w": nudged(arrays["w"], 4)}
    manifest = saving.save(3, state(arrays))
    assert [one.name for one in manifest.references] == [checkpoint_name(1, 1)]
    assert read_bytes(saving, 3) == arrays["w"].tobytes()


# --- bases that aren't as they were ---------------------------------------------------------------


@pytest.fixture
def chain(home):
    """A full checkpoint, step 1, and two deltas behind it, each against the one before."""
    arrays = [{"w": some()}]
    saving = Saving(state(arrays[0]), store=home.store())
    for step in (1, 2, 3):
        saving.save(step, state(arrays[-1]))
        arrays.append({"w": nudged(arrays[-1]["w"], 2000)})
    return saving, arrays[-2]["w"].tobytes()


def test_a_chain_is_read_through(chain):
    saving, expected = chain
    assert [encoding for encoding, _ in stored(saving, 3)[0]] != ["raw"]
    assert read_bytes(saving, 3) == expected


def begin_of(taken):
    return taken[0].begin


@pytest.mark.parametrize("waits", [False, True])
def test_each_stored_byte_of_a_chain_is_read_once_and_those_side_by_side_at_once(
    waits, monkeypatch
):
    arrays = {name: some(1000) for name in "abcdefgh"} | {"w": some(40 * BLOCK // 4)}
    saving = Saving(state(arrays))
    files: list[PartFile] = []
    for step in (1, 2, 3):
        saving.save(step, state(arrays))
        files += saving.open(step).read_part(0).files
        last, arrays = (
            arrays,
            {name: nudged(array, array.size // 3) for name, array in arrays.items()},
        )
    monkeypatch.setattr(MemoryStore, "waits", lambda *_: waits)
    sinks = [
        ArraySink(
            name=name, dtype="float32", global_shape=array.shape, boxes=(Box.whole(array.shape),)
        )
        for name, array in last.items()
    ]

    report = saving.open(3).read_into(sinks)

    found = {
        sink.name: b"".join(content for _, content in sorted(sink.taken, key=begin_of))
        for sink in sinks
    }
    assert found == {name: array.tobytes() for name, array in last.items()}
    assert report.read_nbytes == sum(file.nbytes - file.header_nbytes for file in files)
    assert report.request_count < 48  # of 48 blocks, each in three files
    assert report.decoded_nbytes == 2 * report.needed_nbytes
    assert report.buffer_nbytes > 0


def test_a_base_that_is_gone_is_named(chain):
    """REQ-DEL-020"""
    saving, _ = chain
    for path in saving.place(1).list(""):
        saving.place(1).delete(path)
    error = error_of(lambda: read_bytes(saving, 3))
    assert (error.code, error.where) == (Code.BASE_MISSING, checkpoint_name(1, 1))
    assert error.remedy


def test_another_checkpoint_in_the_place_of_a_base_is_named(chain):
    """REQ-DEL-020: a base made anew with the same step is another one."""
    saving, _ = chain
    other = Saving(state({"w": some()}))
    other.save(1, state({"w": some()}))
    for path in saving.place(1).list(""):
        saving.place(1).delete(path)
    for path in other.place(1).list(""):
        saving.place(1).create(path, [other.place(1).read(path, limit_nbytes=1 << 20)])
    assert code_of(lambda: read_bytes(saving, 3)) == Code.BASE_MISMATCH


def test_a_base_is_found_elsewhere(chain):
    """REQ-DEL-020: by digest, in a directory of checkpoints or as one itself."""
    saving, expected = chain
    moved = Saving(state({"w": some()})).store
    for path in saving.place(1).list(""):
        moved.create(
            f"{checkpoint_name(1, 1)}/{path}", [saving.place(1).read(path, limit_nbytes=1 << 20)]
        )
        saving.place(1).delete(path)
    for base in (moved, moved.at(checkpoint_name(1, 1))):
        assert saving.open(3, bases=[base]).read("weights", "w").tobytes() == expected


@pytest.mark.parametrize("step", [1, 2, 3])
def test_damage_anywhere_in_a_chain_is_found(chain, step):
    """REQ-DEL-007, REQ-OPN-006: stored bytes are compared before they are decoded."""
    saving, _ = chain
    name = next(
        path for path in saving.place(step).list("") if path.endswith((".pack", ".safetensors"))
    )
    damaged = bytearray(saving.place(step).read(name, limit_nbytes=1 << 20))
    damaged[-9] ^= 4
    saving.place(step).delete(name)
    saving.place(step).create(name, [bytes(damaged)])
    error = error_of(lambda: read_bytes(saving, 3))
    assert error.code == Code.BLOCK_DIGEST
    assert name in error.where


def test_a_block_that_decodes_to_something_else_is_refused(chain, monkeypatch):
    """REQ-DEL-008: whatever is wrong with a decoder shows."""
    saving, _ = chain

    def wrong(*given, **_):
        given[2][:] = bytes(len(given[2]))

    monkeypatch.setattr(encodings, "decode", wrong)
    assert code_of(lambda: read_bytes(saving, 3)) == Code.DECODED_DIGEST


# --- pins, and clean-up ---------------------------------------------------------------------------


def test_pins_are_there_before_the_part_and_gone_after_the_commit(chain):
    """REQ-CMT-035"""
    saving, _ = chain
    origin, _ = saving.write(4, [state({"w": some()})])
    path = pins_path(origin.attempt, 0)
    pins = Pins.parse(saving.place(4).read(path, limit_nbytes=1 << 20), where=path)
    assert {one.name for one in pins.references} == {checkpoint_name(step, 1) for step in (1, 2, 3)}
    assert not [name for name in saving.place(3).list("parts") if "pins" in name]


class CondemningStore(HookedStore):
    """A store in which a cleaner condemns the first step as soon as there are pins whose name is synced."""

    def __init__(self, inner):
        super().__init__(inner)
        self.run = inner
        self.condemned: list[str] = []

    def after(self, operation):
        if operation.op != "sync" or self.condemned:
            return
        if any(name.endswith(".pins.json") for name in self.run.list_names(operation.path)):
            self.condemned.append(f"{checkpoint_name(1, 1)}/{CONDEMNED}0123456789abcdef")
            self.run.create(self.condemned[0], [b""])


def test_a_base_that_is_condemned_once_it_is_pinned_is_not_used():
    """REQ-CMT-035, REQ-CMT-031: pins first, then a look; a cleaner does it the other way round."""
    store = MemoryStore()
    saving = Saving(state({"w": some()}), store=store)
    saving.save(1, state({"w": some()}))
    saving.store = CondemningStore(store)
    assert saving.save(2, state({"w": some()})).profile == "full"
    assert saving.store.condemned


def test_each_writer_has_pins_of_its_own():
    """REQ-CMT-037"""
    halves = [Box((begin,), (1500,)) for begin in (0, 1500)]
    held = [snapshot(tensor("w", some(3000), boxes=(half,))) for half in halves]
    saving = Saving(*held)
    saving.save(1, *held)
    origin, _ = saving.write(2, held)
    for number in range(2):
        path = pins_path(origin.attempt, number)
        pins = Pins.parse(saving.place(2).read(path, limit_nbytes=1 << 20), where=path)
        assert (pins.attempt, pins.writer) == (origin.attempt, number)


@pytest.mark.parametrize("step", [1, 3])
def test_a_base_that_is_condemned_is_not_used(chain, step):
    """REQ-CMT-031"""
    saving, _ = chain
    saving.place(step).create(f"{CONDEMNED}0123456789abcdef", [b""])
    assert saving.save(4, state({"w": some()})).profile == "full"


def test_a_base_that_is_retired_is_not_used(chain):
    """REQ-CMT-031"""
    saving, _ = chain
    saving.store.delete(f"{checkpoint_name(1, 1)}/manifest.json")
    assert saving.save(4, state({"w": some()})).profile == "full"


def test_what_stays_keeps_what_it_reads_from(chain):
    """REQ-CMT-032"""
    saving, expected = chain
    assert clean_up(saving.store, saving.run, launch=1, retention=Retention(newest=1)) == []
    assert read_bytes(saving, 3) == expected


def test_a_chain_goes_when_nothing_reads_from_it_any_more(chain):
    saving, _ = chain
    saving.writers[0].chain = Saving(state({"w": some()})).writers[0].chain
    saving.save(4, state({"w": some()}))
    gone = clean_up(saving.store, saving.run, launch=1, retention=Retention(newest=1))
    assert gone == [checkpoint_name(step, 1) for step in (3, 2, 1)]  # a delta before its base
    assert saving.place(1).list("") == ["manifest.json"]


def test_what_is_pinned_stays_and_is_no_more_condemned(chain):
    """REQ-CMT-032, REQ-CMT-033: a save that isn't decided reads from it."""
    saving, _ = chain
    saving.write(4, [state({"w": some()})])  # undecided, pinned
    saving.writers[0].chain = Saving(state({"w": some()})).writers[0].chain
    saving.save(5, state({"w": some()}))
    assert clean_up(saving.store, saving.run, launch=1, retention=Retention(newest=1)) == []
    for step in (1, 2, 3):
        assert not [name for name in saving.place(step).list("") if name.startswith(CONDEMNED)]


def with_something_to_retire(saving):
    """Save two steps more: one that is pinned and undecided, and one that reads from nothing."""
    saving.write(4, [state({"w": some()})])
    saving.writers[0].chain = Saving(state({"w": some()})).writers[0].chain
    saving.save(5, state({"w": some()}))
    return saving


def test_a_cleaner_condemns_then_looks_for_pins_then_for_references(chain):
    """REQ-CMT-032: whoever is between two of these steps is seen by one of them."""
    saving = with_something_to_retire(chain[0])
    recorder = Recorder(saving.store)
    clean_up(recorder, saving.run, launch=1, retention=Retention(newest=1))
    steps = [(step.op, step.path) for step in recorder.log.operations]
    condemned = [
        number for number, (op, path) in enumerate(steps) if op == "create" and CONDEMNED in path
    ]
    pins = [
        number
        for number, (op, path) in enumerate(steps)
        if op == "read" and path.endswith(".pins.json")
    ]
    register = ("read", f"{checkpoint_name(4, 1)}/manifest.json")
    registers = [number for number, step in enumerate(steps) if step == register]
    assert len(condemned) == 3
    assert max(condemned) < min(pins) <= max(pins) < max(registers)


def condemnations(saving, step):
    return {name for name in saving.place(step).list("") if name.startswith(CONDEMNED)}


def test_no_cleaner_takes_a_condemnation_of_another_away(chain):
    """REQ-CMT-033: the second one comes while the first looks for pins, and is done before it."""
    saving = with_something_to_retire(chain[0])
    seen: list[set[str]] = []
    codes: list[str] = []

    def gate(operation):
        if operation.op == "read" and operation.path.endswith(".pins.json") and not seen:
            seen.append(condemnations(saving, 1))
            codes.append(
                code_of(
                    lambda: clean_up(
                        saving.store, saving.run, launch=1, retention=Retention(newest=1)
                    )
                )
            )
            seen.append(condemnations(saving, 1))

    codes.append(
        code_of(
            lambda: clean_up(
                Recorder(saving.store, gate=gate),
                saving.run,
                launch=1,
                retention=Retention(newest=1),
            )
        )
    )
    assert len(seen[0]) == 1
    assert seen[0] == seen[1]
    assert codes == ["ok", "ok"]
    assert condemnations(saving, 1) == set()


def test_a_register_that_cannot_be_read_protects_everything(chain):
    """REQ-CMT-034: nobody knows what that one reads from."""
    saving, _ = chain
    saving.writers[0].chain = Saving(state({"w": some()})).writers[0].chain
    saving.save(4, state({"w": some()}))
    saving.place(9).create("manifest.json", [b"{"])
    assert clean_up(saving.store, saving.run, launch=1, retention=Retention(newest=1)) == []
    assert saving.place(2).list("") != ["manifest.json"]


# --- groups ---------------------------------------------------------------------------------------


@pytest.fixture
def cast():
    """A full checkpoint, and a delta whose weights are what rounding the masters gives."""
    master = some(5 * BLOCK // 4 + 100)
    saving = Saving(mixed(master))
    saving.save(1, mixed(master))
    master = nudged(master, 2000) * np.float32(1.001)
    saving.save(2, mixed(master))
    return saving, master


def test_a_rounded_copy_costs_next_to_nothing(cast):
    """REQ-DEL-011: six blocks of four bytes are three of two, the last ones short."""
    saving, master = cast
    manifest = saving.open(2).manifest
    assert {"cast", "deltas"} <= set(manifest.features)
    assert manifest.fields["weights"].stored_nbytes < 100
    assert manifest.fields["optimizer"].stored_nbytes > 1000
    copy = master.astype(ml_dtypes.bfloat16)
    checkpoint = saving.open(2)
    assert checkpoint.weights["w"][...].tobytes() == copy.tobytes()
    for begin, end in ((0, 1), (2047, 2049), (3000, 5000), (len(copy) - 1, len(copy))):
        assert checkpoint.weights["w"][begin:end].tobytes() == copy[begin:end].tobytes()


def test_reading_one_member_says_what_it_cost(cast):
    saving, master = cast
    live = np.zeros(master.shape, ml_dtypes.bfloat16)
    sink = array_sink("w", "bfloat16", live, [Box.whole(master.shape)])
    report = saving.open(2).read_into([sink])
    assert report.needed_nbytes == live.nbytes
    # The masters, and what they become; but for a last block that is too small to be worth it.
    assert report.decoded_nbytes == 3 * live.nbytes - master.nbytes % BLOCK
    assert report.read_nbytes > 1000


def test_a_copy_that_is_not_quite_rounded_is_right_all_the_same():
    master = some(3000)
    other = master.copy()
    other[::97] += 1
    saving = Saving(mixed(master))
    saving.save(1, mixed(master, rounded=other))
    master, other = master * np.float32(1.01), other * np.float32(1.01)
    saving.save(2, mixed(master, rounded=other))
    assert (
        saving.open(2).read("weights", "w").tobytes() == other.astype(ml_dtypes.bfloat16).tobytes()
    )


def damage(saving, step, path, at):
    data = bytearray(saving.place(step).read(path, limit_nbytes=1 << 20))
    data[at] ^= 1
    saving.place(step).delete(path)
    saving.place(step).create(path, [bytes(data)])


def pack_of(saving, step, stem):
    return next(
        path
        for path in saving.place(step).list("")
        if path.startswith(stem) and path.endswith(".pack")
    )


def test_damage_in_a_member_is_found_in_what_is_predicted_from_it(cast):
    """REQ-DEL-007, REQ-DEL-010: and a later member's doesn't touch an earlier one."""
    saving, master = cast
    damage(saving, 2, pack_of(saving, 2, "weights"), -1)
    assert saving.open(2).read("optimizer", "master/w").tobytes() == master.tobytes()
    assert code_of(lambda: saving.open(2).read("weights", "w")) == Code.BLOCK_DIGEST
    damage(saving, 2, pack_of(saving, 2, "weights"), -1)
    damage(saving, 2, pack_of(saving, 2, "optimizer"), 100)
    error = error_of(lambda: saving.open(2).read("weights", "w"))
    assert (error.code, error.requirement) == (Code.BLOCK_DIGEST, "REQ-DEL-007")


def test_the_header_of_a_pack_is_compared(cast):
    """REQ-DEL-012"""
    saving, _ = cast
    damage(saving, 2, pack_of(saving, 2, "weights"), 3)
    assert code_of(lambda: saving.open(2).read("weights", "w")) == Code.HEADER_DIGEST


def test_stored_bytes_are_compared_before_anything_decodes_them(chain, monkeypatch):
    """REQ-ENC-004, REQ-DEL-007"""
    saving, _ = chain
    damage(saving, 3, pack_of(saving, 3, "weights"), -1)
    decoded, right = [], encodings.decode

    def decode(encoding, stored, *rest, **members):
        decoded.append(digest_bytes(stored))
        right(encoding, stored, *rest, **members)

    monkeypatch.setattr(encodings, "decode", decode)
    assert code_of(lambda: read_bytes(saving, 3)) == Code.BLOCK_DIGEST
    read_bytes(saving, 2)
    parts = [saving.open(step).read_part(0) for step in (2, 3)]
    known = b"".join(
        e.stored_digests for part in parts for e in rows_of(part.holdings)[0].boxes[0].extents
    )
    assert decoded
    assert all(digest in known for digest in decoded)


def test_what_no_encoding_shortens_is_stored_raw():
    """REQ-ENC-021"""
    noise = [RNG.integers(0, 1 << 32, 6 * BLOCK // 4, np.uint32) for _ in range(2)]
    saving = Saving(state({"w": noise[0]}))
    for step, array in enumerate(noise, 1):
        saving.save(step, state({"w": array}))
    assert saving.open(2).manifest.profile == "delta"
    assert stored(saving, 2) == [[("raw", 6)]]
    assert read_bytes(saving, 2) == noise[1].tobytes()


@pytest.mark.parametrize("wrong", ["encode", "choose"])
def test_what_does_not_decode_to_the_content_is_stored_raw(monkeypatch, wrong):
    """REQ-DEL-013: an encoder that errs costs bytes, never the checkpoint."""
    arrays = {"w": some()}
    saving = Saving(state(arrays))
    saving.save(1, state(arrays))
    encode = encodings.encode

    def nothing_changed(encoding, content, *, dtype, base):
        return encode(encoding, content if base is None else base, dtype=dtype, base=base)

    def chosen_for_nothing(_, *, dtype, base, **__):
        return "sparse", encode("sparse", base, dtype=dtype, base=base)

    monkeypatch.setattr(
        encodings, wrong, nothing_changed if wrong == "encode" else chosen_for_nothing
    )
    arrays = {"w": nudged(arrays["w"], 2000)}
    saving.save(2, state(arrays))
    monkeypatch.undo()
    found = [encoding for encoding, _ in stored(saving, 2)[0]]
    assert "raw" in found[1:] or found == ["raw"]
    assert read_bytes(saving, 2) == arrays["w"].tobytes()


def test_a_member_predicted_wrongly_is_stored_otherwise(monkeypatch):
    """REQ-DEL-013"""
    master = some(4000)
    saving = Saving(mixed(master))
    saving.save(1, mixed(master))
    right = prediction.encode_member

    def zeros(content):
        return memoryview(bytes(len(content)))

    monkeypatch.setattr(
        prediction,
        "encode_member",
        lambda rule, role, new, **rest: right(rule, role, zeros(new), **rest),
    )
    master = master * np.float32(1.01)
    saving.save(2, mixed(master))
    monkeypatch.undo()
    assert (
        saving.open(2).read("weights", "w").tobytes() == master.astype(ml_dtypes.bfloat16).tobytes()
    )


def test_as_many_references_as_there_may_be_are_read():
    """REQ-DEL-024, REQ-DEL-021"""
    arrays = {"w": some(600)}
    options = dataclasses.replace(SMALLEST, full_every=limits.REFERENCES)
    saving = Saving(state(arrays), options=options)
    for step in range(1, limits.REFERENCES + 1):
        arrays = {"w": nudged(arrays["w"], 3)}
        manifest = saving.save(step, state(arrays))
    assert len(manifest.references) == limits.REFERENCES - 1
    assert read_bytes(saving, limits.REFERENCES) == arrays["w"].tobytes()


def test_a_committer_looks_at_bases_again(chain):
    """REQ-CMT-031: between a writer's part and the commit a base may go."""
    saving, _ = chain
    origin, _ = saving.write(4, [state({"w": some()})])
    saving.place(1).create(f"{CONDEMNED}0123456789abcdef", [b""])
    error = error_of(lambda: finalize(saving.place(4), origin))
    assert (error.code, error.requirement) == (Code.BASE_MISSING, "REQ-CMT-031")
    assert read_register(saving.place(4)) is None


def test_pins_that_cannot_be_read_protect_everything(chain):
    """REQ-CMT-034, REQ-CMT-033: and no condemnation is left."""
    saving, _ = chain
    saving.place(9).create(pins_path("0" * 16, 0), [b"{"])
    saving.writers[0].chain = Saving(state({"w": some()})).writers[0].chain
    saving.save(5, state({"w": some()}))
    code = code_of(
        lambda: clean_up(saving.store, saving.run, launch=1, retention=Retention(newest=1))
    )
    for step in (1, 2, 3):
        names = saving.place(step).list("")
        assert len(names) > 1
        assert not [name for name in names if name.startswith(CONDEMNED)]
    assert code == Code.DOC_SYNTAX


def test_what_reads_the_base_is_the_one_that_has_it():
    """REQ-DEL-014: of blocks that never changed, a delta of a delta names the full one."""
    arrays = {"w": some()}
    saving = Saving(state(arrays))
    for step in (1, 2, 3):
        saving.save(step, state(arrays))
    part = saving.open(3).read_part(0)
    (extent,) = rows_of(part.holdings)[0].boxes[0].extents
    assert extent.reference is not None
    assert part.references[extent.reference].name == checkpoint_name(1, 1)


# --- stores that fail -----------------------------------------------------------------------------


@pytest.mark.parametrize("loss", Loss)
@pytest.mark.parametrize("path_end", [".pack", ".msgpack", ".pins.json"])
def test_a_call_without_an_answer_is_repeated_with_the_same_bytes(cast, loss, path_end):
    saving, master = cast
    saving.store.inject(loss, path_end=path_end)
    master = master * np.float32(1.01)
    saving.save(3, mixed(master))
    saving.store.land()
    assert saving.open(3).read("optimizer", "master/w").tobytes() == master.tobytes()
    assert (
        saving.open(3).read("weights", "w").tobytes() == master.astype(ml_dtypes.bfloat16).tobytes()
    )


def test_a_pack_that_breaks_off_is_written_again_as_it_was_noted(monkeypatch):
    """What is coded ahead when a store gives no answer isn't coded again beside it, perhaps otherwise."""
    arrays = {f"{number:02}": some(4_000) + np.float32(number) for number in range(12)}
    saving = Saving(state(arrays))
    saving.save(1, state(arrays))
    changed = {name: array + np.float32(0.01) for name, array in arrays.items()}
    monkeypatch.setattr(delta, "_BATCH_NBYTES", 4096)
    monkeypatch.setattr(direct, "_FIRST_NBYTES", 4096)
    monkeypatch.setattr(direct, "_CHUNK_NBYTES", 4096)
    create = MemoryStore.create
    broken_off: list[bytes] = []

    def break_off_once(self, path, chunks):
        if path.endswith(".pack") and not broken_off:
            broken_off.append(bytes(next(iter(chunks))))
            raise err(Code.STORE_NO_ANSWER, "the link is gone", where=path)
        create(self, path, chunks)

    coded: collections.Counter[tuple[int, int]] = collections.Counter()
    code = BlockCoder.code

    def count(self, number, block, *, digest=None):
        coded[number, block] += 1
        time.sleep(0.005)  # some are under way when the store gives up
        return code(self, number, block, digest=digest)

    monkeypatch.setattr(MemoryStore, "create", break_off_once)
    monkeypatch.setattr(BlockCoder, "code", count)
    assert saving.save(2, state(changed)).profile == "delta"
    assert broken_off
    assert set(coded.values()) == {1}
    with saving.open(2) as opened:
        for name, array in changed.items():
            assert opened.read("weights", name).tobytes() == array.tobytes()


def test_a_delta_that_could_not_be_written_leaves_no_pack_and_no_pin(chain, monkeypatch):
    saving, _ = chain
    monkeypatch.setattr("ckptfmt.delta.chain.write_part_file", _full)
    with pytest.raises(CkptError):
        saving.write(4, [state({"w": some()})])
    monkeypatch.setattr("ckptfmt.delta.delta.Delta._digest_rest", _full)
    with pytest.raises(CkptError):
        saving.write(5, [state({"w": some()})])
    assert saving.place(5).list("") == []
    assert not [path for path in saving.place(4).list("") if "pins" in path]


def _full(*_):
    raise err(Code.NO_SPACE, "no space")


def test_small_blocks_that_changed_in_most_places_are_stored_as_they_are():
    """Biases and gains of norms: encoding them takes a quarter of the time of all, for a quarter of a per cent."""
    arrays = {"few": some(256), "most": some(256)}
    saving = Saving(state(arrays))
    saving.save(1, state(arrays))
    saving.save(2, state({"few": nudged(arrays["few"], 3), "most": nudged(arrays["most"], 200)}))
    rows = {
        tensor.name: tensor.boxes[0].extents[0].encoding
        for tensor in rows_of(saving.open(2).read_part(0).holdings)
    }
    assert rows == {"few": "sparse", "most": "raw"}
