"""Two checkpoints compared: what differs and by how much, and how little is read for it."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptfmt.box import Box
from ckptfmt.documents.manifest import FIELDS
from ckptfmt.errors import Code
from ckptfmt.read.reader import Checkpoint
from ckptfmt.store.memory import MemoryStore
from ckptfmt_tools.comparison import Distance, ValueDifference, compare
from tests.builders import code_of, leaf, save, snapshot, stream, tensor, two_writers
from tests.chains import Saving

BLOCK = 4096


def saved(*snapshots, **members):
    store = MemoryStore()
    save(store, *snapshots, **members)
    return Checkpoint(store)


def diff(one, other, fields=FIELDS):
    return compare(one, other, fields=fields)


def some(count=3 * BLOCK, seed=0):
    return np.random.default_rng(seed).standard_normal(count).astype(np.float32)


def test_the_same_state_is_the_same_whoever_wrote_it_when():
    found = diff(saved(*two_writers()), saved(*two_writers(), attempt="f" * 16, step=9))

    assert found.is_same
    assert (found.counts.differing_count, found.counts.read_nbytes) == (0, 0)
    assert found.counts.block_count > 0


def test_only_blocks_that_differ_are_read():
    one, other = some(), some()
    other[[5, BLOCK + 1]] *= 2
    found = diff(
        saved(snapshot(tensor("w", one), tensor("same", one))),
        saved(snapshot(tensor("w", other), tensor("same", one))),
    )

    (difference,) = found.tensors
    assert (
        difference.name,
        difference.distance.changed_count,
        difference.distance.element_count,
    ) == ("w", 2, one.size)
    assert difference.distance.max_abs == float(np.abs(one - other).max())
    assert difference.distance.max_ulps == 1 << 23
    counts = found.counts
    assert (counts.tensor_count, counts.block_count, counts.differing_count) == (2, 24, 2)
    assert (counts.read_nbytes, counts.content_nbytes) == (2 * 2 * BLOCK, 4 * one.nbytes)


@pytest.mark.parametrize("cut_alike", [True, False])
def test_the_largest_differences_are_found_at_their_indices(cut_alike):
    array = some(6 * BLOCK).reshape(512, 48)
    changed = array.copy()
    changed[17, 5] += 9
    changed[500, 47] -= 7
    changed[2, 3] += 0.5
    changed[3, 3] += 0.25
    halves = [Box((at, 0), (256, 48)) for at in (0, 256)]
    one, other = (
        [snapshot(tensor("w", whole, boxes=(box,))) for box in halves] for whole in (array, changed)
    )
    if not cut_alike:
        other = [snapshot(tensor("w", changed))]

    (difference,) = diff(saved(*one), saved(*other)).tensors

    assert difference.distance is not None
    assert [(change.index, change.values) for change in difference.distance.largest] == [
        (index, (float(array[index]), float(changed[index])))
        for index in ((17, 5), (500, 47), (2, 3))
    ]
    assert difference.distance.changed_count == 4


def test_what_only_one_side_has():
    one = snapshot(
        tensor("a", some()), tensor("b", some()), leaves=[leaf("config", 1), leaf("data", 1)]
    )
    other = snapshot(
        tensor("b", some()),
        tensor("c", some()),
        leaves=[leaf("config", 1)],
        streams=[stream("python", 1)],
    )
    found = diff(saved(one), saved(other))

    assert [(tensor.name, tensor.only_in, tensor.distance) for tensor in found.tensors] == [
        ("a", 0, None),
        ("c", 1, None),
    ]
    assert [(value.field, value.only_in) for value in found.values] == [("data", 0), ("rng", 1)]


@pytest.mark.parametrize("what", ["dtype", "global_shape", "storage", "aliases"])
def test_what_is_said_of_a_tensor_otherwise(what):
    array = some()
    one = tensor("w", array)
    other = {
        "dtype": tensor("w", array.view(np.int32)),
        "global_shape": tensor("w", array.reshape(2, -1)),
        "storage": tensor("w", array, storage="non-persistent"),
        "aliases": tensor("w", array, aliases=("tied",)),
    }[what]
    found = diff(saved(snapshot(one)), saved(snapshot(other)))

    (difference,) = found.tensors
    assert list(difference.described) == [what]
    assert (difference.distance is None) == (what in {"dtype", "global_shape"})
    assert found.counts.read_nbytes == 0


def test_values_and_streams_say_where_they_differ():
    one = snapshot(
        tensor("w", some()),
        leaves=[leaf("config", {"lr": 1.0, "model": {"width": 4}})],
        streams=[stream("python", (3, 1)), stream("cuda", 1, scope="lw/1", kind="torch.philox")],
    )
    other = snapshot(
        tensor("w", some()),
        leaves=[leaf("config", {"lr": 1.0, "model": {"width": 5}})],
        streams=[stream("python", (3, 2)), stream("cuda", 1, scope="lw/1", kind="torch.mt19937")],
    )
    found = diff(saved(one), saved(other))

    assert found.tensors == ()
    assert found.values == (
        ValueDifference(field="config", name="", scope="global", place="/model/width"),
        ValueDifference(field="rng", name="cuda", scope="lw/1", place="kind"),
        ValueDifference(field="rng", name="python", scope="lw/0", place="/1"),
    )
    assert diff(saved(one), saved(other), fields=("weights",)).is_same


def test_other_layouts_are_compared_by_reading():
    array = some().reshape(6, -1)
    changed = array.copy()
    changed[4, 7] = np.nan
    halves = [Box((0, 0), (3, array.shape[1])), Box((3, 0), (3, array.shape[1]))]
    one = saved(snapshot(tensor("w", array)))
    cut = [
        saved(*(snapshot(tensor("w", held, boxes=(half,))) for half in halves))
        for held in (array, changed)
    ]

    assert diff(one, cut[0]).is_same
    found = diff(one, cut[1])
    distance = found.tensors[0].distance
    assert distance is not None
    assert dataclasses.replace(distance, largest=()) == Distance(
        element_count=array.size, changed_count=1, nan_count=1
    )
    assert (found.counts.block_count, found.counts.read_nbytes) == (0, 2 * array.nbytes)
    assert diff(*cut).counts.differing_count == 1


def test_blocks_of_another_size_are_compared_by_reading():
    one, other = (
        saved(snapshot(tensor("w", some())), block_nbytes=nbytes) for nbytes in (4096, 8192)
    )

    assert diff(one, other).is_same
    assert diff(one, other).counts.read_nbytes == 2 * some().nbytes


def test_a_delta_and_its_base():
    """What isn't changed isn't read, though it lies in another checkpoint; what is, is decoded."""
    one, other = some(), some()
    other.view(np.uint32)[[3, 4, 2 * BLOCK]] += 1
    saving = Saving(snapshot(tensor("w", one)), block_nbytes=BLOCK)
    for step, array in enumerate((one, other, other), start=1):
        saving.save(step, snapshot(tensor("w", array)))
    found = diff(saving.open(1), saving.open(2))

    (difference,) = found.tensors
    assert dataclasses.replace(
        difference.distance, max_abs=None, max_rel=None, largest=()
    ) == Distance(element_count=one.size, changed_count=3, max_ulps=1, ulp_counts=(0, 3))
    assert found.counts.differing_count == 2
    assert 4 * BLOCK < found.counts.read_nbytes < 5 * BLOCK  # both sides need the base's two blocks
    assert diff(saving.open(2), saving.open(3)).is_same
    full = saved(snapshot(tensor("w", other)))
    assert diff(full, saving.open(3)).counts.read_nbytes == 0
    assert diff(full, saving.open(3)).is_same


def damaged_copy(array):
    """A checkpoint of an array, and a copy of it with eight other bytes."""
    store = MemoryStore()
    save(store, snapshot(tensor("w", array)))
    files = store.snapshot()
    (path,) = [path for path in files if path.startswith("weights-")]
    begin = len(files[path]) - array.nbytes
    files[path] = files[path][:begin] + b"damaged!" + files[path][begin + 8 :]
    return Checkpoint(store), Checkpoint(MemoryStore.from_snapshot(files))


def test_damage_is_an_error_and_no_difference():
    """REQ-OPN-006."""
    other = some()
    other[0] = 0
    _, damaged = damaged_copy(some())

    assert code_of(lambda: diff(damaged, saved(snapshot(tensor("w", other))))) == Code.BLOCK_DIGEST


def test_a_damaged_copy_is_the_same_by_recorded_digests_only():
    """REQ-OPN-009: what was compared is part of the answer, and who wants to know reads the bytes."""
    good, damaged = damaged_copy(some())

    by_digest = diff(good, damaged)
    assert (by_digest.is_same, by_digest.is_verified, by_digest.counts.read_nbytes) == (
        True,
        False,
        0,
    )
    told: list[int] = []
    verified = compare(good, damaged, fields=FIELDS, verify=True, on_progress=told.append)
    assert (verified.is_same, verified.is_verified, verified.is_damaged) == (False, True, True)
    assert [[error.code for error in errors] for errors in verified.damages] == [
        [],
        [Code.BLOCK_DIGEST],
    ]
    assert sum(told) > 2 * some().nbytes
    sound = compare(good, good, fields=FIELDS, verify=True)
    assert (sound.is_same, sound.is_verified, sound.is_damaged) == (True, True, False)


def test_verifying_a_delta_reads_what_it_reads_from():
    """REQ-OPN-009: damage in a base is damage of what reads from it."""
    one, other = some(), some()
    other[0] = 0
    saving = Saving(snapshot(tensor("w", one)), block_nbytes=BLOCK)
    saving.save(1, snapshot(tensor("w", one)))
    saving.save(2, snapshot(tensor("w", other)))
    assert compare(saving.open(2), saving.open(2), fields=FIELDS, verify=True).is_same
    files = saving.store.snapshot()
    (path,) = [
        path for path in files if "l0001/weights-" in path and path.startswith("step-00000001")
    ]
    files[path] = files[path][:-8] + b"damaged!"
    saving.store = MemoryStore.from_snapshot(files)
    found = compare(saving.open(2), saving.open(2), fields=FIELDS, verify=True)

    assert found.is_damaged
    assert {error.code for errors in found.damages for error in errors} == {Code.BLOCK_DIGEST}


def test_progress_is_told_in_bytes():
    told: list[int] = []
    one = saved(snapshot(tensor("w", some()), tensor("v", some())))
    compare(one, one, fields=FIELDS, on_progress=told.append)
    assert sum(told) == 2 * some().nbytes


@given(st.data())
def test_any_two_arrays_in_any_two_layouts(data):
    """Against numpy, element by element."""
    rows, columns = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 700))
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 16)))
    one = rng.integers(-5, 5, (rows, columns), np.int16)
    other = one.copy()
    for _ in range(data.draw(st.integers(0, 4))):
        other[rng.integers(rows), rng.integers(columns)] += np.int16(rng.integers(-3, 4))
    sides = []
    for array in (one, other):
        at = data.draw(st.integers(0, rows))
        boxes = [Box((0, 0), (at, columns)), Box((at, 0), (rows - at, columns))]
        held = [snapshot(tensor("w", array, boxes=(box,))) for box in boxes if box.element_count]
        sides.append(saved(*held))
    found = diff(*sides)

    if (one == other).all():
        assert found.is_same
        return
    distance = found.tensors[0].distance
    assert distance.changed_count == int((one != other).sum())
    assert distance.max_abs == int(np.abs(one.astype(int) - other).max())
