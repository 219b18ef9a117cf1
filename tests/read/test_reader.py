"""Reading: any box of any tiling, only what is needed, nothing before it is verified."""

import contextlib
import gc
import random

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptfmt
from ckptfmt.box import Box
from ckptfmt.dtypes import numpy_dtype
from ckptfmt.errors import CkptError, Code, FormatError, IntegrityError, StateError
from ckptfmt.read import decoding
from ckptfmt.read.files import StoredBox
from ckptfmt.read.reader import Checkpoint
from ckptfmt.store.memory import MemoryStore
from tests.builders import (
    ATTEMPT,
    ArraySink,
    code_of,
    error_of,
    leaf,
    read_all,
    save,
    small_files,
    snapshot,
    stream,
    tensor,
    two_writers,
)
from tests.layout.test_merge import cut
from tests.stores.hooked import HookedStore

DTYPES = [
    "float32",
    "int8",
    "float64",
    "uint16",
    "complex64",
    "complex128",
    "bool",
    "bfloat16",
    "float8_e4m3fn",
    "float16",
]


class Counting(HookedStore):
    """Notes what is read."""

    def __init__(self, inner):
        super().__init__(inner)
        self.read_paths: list[str] = []
        self.read_ranges: list[tuple[int, int]] = []

    def before(self, operation):
        self.read_paths.append(operation.path)

    def read_range(self, path, byte_begin, nbytes):
        self.read_ranges.append((byte_begin, nbytes))
        return super().read_range(path, byte_begin, nbytes)

    def open_ranges(self, path):
        counting = self

        class Ranges:
            def __init__(self, inner):
                self._inner = inner

            def read_into(self, byte_begin, nbytes, buffer):
                counting.read_ranges.append((byte_begin, nbytes))
                return self._inner.read_into(byte_begin, nbytes, buffer)

        @contextlib.contextmanager
        def opened():
            with super(Counting, self).open_ranges(path) as inner:
                yield Ranges(inner)

        return opened()


def random_array(shape, dtype, rng):
    generator = np.random.default_rng(rng.randrange(2**32))
    content = generator.bytes(
        int(np.prod(shape, dtype=int)) * np.dtype(numpy_dtype(dtype)).itemsize
    )
    if dtype == "bool":
        content = bytes(byte & 1 for byte in content)
    return np.frombuffer(content, numpy_dtype(dtype)).reshape(shape)


def random_box(shape, rng):
    begin = tuple(rng.randint(0, extent) for extent in shape)
    return Box(
        begin, tuple(rng.randint(0, extent - at) for at, extent in zip(begin, shape, strict=True))
    )


def save_tiled(array, dtype, rng, writers=3, **members):
    """Save an array cut at random, its pieces held by random writers."""
    boxes = cut(array.shape, rng)
    held: list[list[Box]] = [[] for _ in range(writers)]
    for box in boxes:
        for writer in rng.sample(range(writers), rng.randint(1, writers)):
            held[writer].append(box)
    store = MemoryStore()
    save(
        store,
        *(snapshot(tensor("w", array, dtype=dtype, boxes=tuple(mine), **members)) for mine in held),
    )
    return store


SHAPES = st.lists(st.integers(0, 6), max_size=4).map(tuple) | st.sampled_from(
    [(3000,), (70, 40), (2, 3, 700), (1, 1500, 2)]
)


@settings(max_examples=150)
@given(
    SHAPES,
    st.sampled_from(DTYPES),
    st.randoms(use_true_random=False),
    st.sampled_from([1 << 20, 8192, 4096, 64]),
)
def test_any_box_of_any_tiling_is_what_was_saved(shape, dtype, rng, request_nbytes):
    """REQ-OPN-005, REQ-OPN-007, REQ-TEN-001, REQ-TEN-002: bit for bit, whatever the requests."""
    array = random_array(shape, dtype, rng)
    store = save_tiled(array, dtype, rng)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoding, "REQUEST_NBYTES", request_nbytes)
        checkpoint = Checkpoint(store)
        for box in (Box.whole(shape), random_box(shape, rng), random_box(shape, rng)):
            expected = array[box.relative_to(Box.whole(shape))]
            found = checkpoint.read("weights", "w", box=box)
            assert (found.dtype, found.shape) == (array.dtype, box.shape)
            assert found.tobytes() == expected.tobytes()
            sink = ArraySink(name="w", dtype=dtype, global_shape=shape, boxes=(box,))
            checkpoint.read_into([sink])
            seen = np.zeros(shape, int)
            for piece, content in sink.taken:
                assert box.contains(piece)
                assert content == array[piece.relative_to(Box.whole(shape))].tobytes()
                assert len(content) <= max(request_nbytes, 4096)  # a block is never cut
                seen[piece.relative_to(Box.whole(shape))] += 1
            assert (seen[box.relative_to(Box.whole(shape))] == 1).all()
            assert seen.sum() == box.element_count


@given(st.lists(st.integers(1, 5), max_size=3).map(tuple), st.randoms(use_true_random=False))
def test_slices_are_those_of_numpy(shape, rng):
    """REQ-OPN-005; rows 97: basic indices."""
    array = random_array(shape, "int8", rng)
    handle = Checkpoint(save_tiled(array, "int8", rng)).weights["w"]
    for _ in range(8):
        items = []
        for extent in shape:
            low, high = rng.randint(-extent - 2, extent + 2), rng.randint(-extent - 2, extent + 2)
            items.append(
                rng.choice(
                    (
                        rng.randrange(-extent, extent),
                        slice(low, high),
                        slice(None, high),
                        slice(None),
                    )
                )
            )
        first = rng.randint(0, len(items))
        last = rng.randint(first, len(items))
        if rng.random() < 0.5:
            items[first:last] = [...]
        elif rng.random() < 0.5:
            del items[first:]
        item = tuple(items) if len(items) != 1 else items[0]
        assert np.array_equal(handle[item], array[item])
        assert handle[item].shape == array[item].shape
    assert (np.asarray(handle) == array).all()


@pytest.mark.parametrize(
    "item",
    [
        5,
        -6,
        (0, 0, 0),
        slice(None, None, 2),
        slice(None, None, -1),
        None,
        (..., ...),
        "x",
        1.0,
        True,
        np.True_,
        np.array([1, 2]),
        [1, 2],
        (np.array([True]), 0),
    ],
)
def test_other_indices_are_refused(item):
    """Row 97."""
    store = MemoryStore()
    save(store, snapshot(tensor("w", np.zeros((5, 2)))))
    handle = Checkpoint(store).weights["w"]
    error = error_of(lambda: handle[item])
    assert (error.code, type(error)) == (Code.ARGUMENT, StateError)


@pytest.mark.parametrize(
    "box",
    [
        Box((0,), (2,)),
        Box((0, 0), (6, 2)),
        Box((-1, 0), (2, 2)),
        Box((0, 0), (-1, 2)),
        Box((4, 0), (2, 1)),
        Box((0, 0, 0), (1, 1, 1)),
        Box((0,), (2, 2)),
        Box((9, 9), (0, 0)),
    ],
)
def test_boxes_out_of_bounds_are_refused(box):
    """Row 97: in whatever way they are asked for; memory that nobody had filled was handed on."""
    store = MemoryStore()
    save(store, snapshot(tensor("w", np.zeros((5, 2)))))
    checkpoint = Checkpoint(store)
    (item,) = checkpoint.index.tensors
    asked = (
        lambda: checkpoint.read("weights", "w", box=box),
        lambda: list(checkpoint.iter_content(item, box)),
        lambda: checkpoint.fill(item, box, np.empty(max(0, box.element_count), np.uint64)),
    )
    assert [code_of(ask) for ask in asked] == [Code.ARGUMENT] * 3


def test_integers_of_numpy_are_integers():
    store = MemoryStore()
    save(store, snapshot(tensor("w", np.arange(10).reshape(5, 2))))
    assert Checkpoint(store).weights["w"][np.int64(-1), np.uint8(1)] == 9


def test_a_row_reads_the_blocks_that_have_it_and_no_others():
    """REQ-OPN-002, REQ-OPN-006: opening reads register and index, a row its block, and one part."""
    array = np.arange(4096 * 4, dtype=np.float32).reshape(16, 1024)  # a row is a block
    store = MemoryStore()
    save(store, snapshot(tensor("w", array), tensor("v", array)), snapshot(tensor("u", array)))
    counting = Counting(store)
    checkpoint = Checkpoint(counting)
    assert set(counting.read_paths) == {"manifest.json", f"index-{ATTEMPT}.msgpack"}
    counting.read_paths.clear()
    assert (checkpoint.weights["w"][3:5, 7] == array[3:5, 7]).all()
    header, *blocks = [nbytes for _, nbytes in counting.read_ranges]
    assert (header < 4096, blocks) == (True, [2 * 4096])
    assert set(counting.read_paths) == {
        f"parts/{ATTEMPT}-00000.msgpack",
        f"weights-{ATTEMPT}-00000.safetensors",
    }


@pytest.mark.parametrize("shape", [(1 << 20,), (1024, 1024)])
def test_memory_does_not_grow_with_a_tensor(shape, monkeypatch):
    """REQ-OPN-008: what is read into is a few requests, whether rows or columns are wanted."""
    monkeypatch.setattr(decoding, "REQUEST_NBYTES", 1 << 15)
    array = np.arange(1 << 20, dtype=np.float32).reshape(shape)
    store = MemoryStore()
    save(store, snapshot(tensor("w", array)))
    wanted = Box((0,) * len(shape), (*shape[:-1], shape[-1] // 2))
    sink = ArraySink(name="w", dtype="float32", global_shape=shape, boxes=(wanted,))

    report = Checkpoint(store).read_into([sink])

    assert report.needed_nbytes == array.nbytes // 2
    assert report.buffer_nbytes < array.nbytes // 8


@pytest.mark.parametrize("at", [0, 5000, 9999])
def test_damage_is_found_before_a_byte_is_handed_on(at):
    """REQ-OPN-006: no byte of a damaged block, whatever was asked of it."""
    array = np.arange(10_000, dtype=np.uint8)
    store = MemoryStore()
    save(store, snapshot(tensor("w", array)))
    files = store.snapshot()
    path = f"weights-{ATTEMPT}-00000.safetensors"
    data = len(files[path]) - 10_000
    damaged = bytearray(files[path])
    damaged[data + at] ^= 1
    checkpoint = Checkpoint(MemoryStore.from_snapshot({**files, path: bytes(damaged)}))
    block = at // 4096
    sink = ArraySink(
        name="w",
        dtype="uint8",
        global_shape=(10_000,),
        boxes=tuple(Box((n,), (1,)) for n in range(0, 10_000, 500)),
    )
    error = error_of(lambda: checkpoint.read_into([sink]))
    assert (error.code, error.requirement, type(error)) == (
        Code.BLOCK_DIGEST,
        "REQ-OPN-006",
        IntegrityError,
    )
    end = min(10_000, (block + 1) * 4096)
    assert error.where == f"{path}[{data + block * 4096}:{data + end}]"
    assert all(content == array[box.begin[0] : box.end[0]].tobytes() for box, content in sink.taken)
    assert not any(box.begin[0] // 4096 == block for box, _ in sink.taken)
    # What doesn't touch the block is fine.
    other = 0 if block else 9000
    assert (
        checkpoint.weights["w"][other : other + 10].tolist() == array[other : other + 10].tolist()
    )


def test_parts_with_equal_tensors_share_one_table():
    """Memory and time of a reader don't grow with the number of parts times tensors."""
    store = MemoryStore()
    halves = (Box((0, 0), (3, 4)), Box((3, 0), (3, 4)))
    array = np.arange(24, dtype=np.float32).reshape(6, 4)
    save(store, *(snapshot(tensor("w", array, boxes=(half,))) for half in halves))

    checkpoint = Checkpoint(store)
    one, two = (checkpoint.open_part(number).part.holdings.table for number in (0, 1))

    assert one is two
    assert checkpoint.weights["w"][...].tolist() == array.tolist()


def test_a_file_that_changes_while_it_is_read():
    """Row 58."""
    store = MemoryStore()
    save(store, snapshot(tensor("w", np.arange(10_000, dtype=np.uint8))))
    checkpoint = Checkpoint(store)
    assert checkpoint.weights["w"][0] == 0
    path = f"weights-{ATTEMPT}-00000.safetensors"
    store.replace(path, store.snapshot()[path][:-1] + b"x")
    assert code_of(lambda: checkpoint.weights["w"][9999]) == Code.BLOCK_DIGEST


def test_names_aliases_and_scopes():
    """REQ-IDX-006, REQ-IDX-011."""
    store = MemoryStore()
    save(store, *two_writers())
    with Checkpoint(store) as checkpoint:
        assert list(checkpoint.weights) == [
            "bias",
            "cache",
            "embedding",
            "head",
            "empty",
            "phase",
            "scale",
        ]
        assert len(checkpoint.weights) == 7
        assert "head" in checkpoint.weights
        assert "nothing" not in checkpoint.weights
        assert (checkpoint.weights["head"][...] == checkpoint.weights["embedding"][...]).all()
        assert checkpoint.weights["scale"][()] == 0.5
        assert checkpoint.weights["empty"][...].shape == (0, 3)
        assert checkpoint.weights["phase"][...].tolist() == [1 + 2j]
        assert (checkpoint.weights["embedding"].shape, checkpoint.weights["embedding"].dtype) == (
            (6, 4),
            "float32",
        )
        assert checkpoint.weights["embedding"].nbytes == 96
        assert repr(checkpoint.weights["bias"]) == "TensorHandle('bias', int16, (3,))"
        # The tensor of all stands before that of one; each worker has its own.
        assert checkpoint.optimizer["exp_avg"][...].tolist() == [1, 1]
        for worker in range(2):
            assert (
                checkpoint.optimizer.scoped(f"lw/{worker}")["exp_avg"][...].tolist() == [worker] * 3
            )
        assert checkpoint.weights["cache"][...].tolist() == [0, 1, 2, 3, 4]
        assert checkpoint.leaf("data", scope="lw/1")[0] == 1
        assert checkpoint.stream("python", "lw/1") == ("python.mt19937", (3, (1, 2, 1), None))
        assert checkpoint.step == 3
        assert list(checkpoint.field("optimizer")) == ["exp_avg"]


MISSING = {
    Code.TENSOR_MISSING: [
        lambda c: c.weights["x"],
        lambda c: c.read("weights", "x"),
        lambda c: c.read("optimizer", "bias"),
        lambda c: c.read("weights", "bias", "lw/0"),
        lambda c: c.weights.scoped("lw/0")["bias"],
        lambda c: c.read_into([ArraySink(name="x", dtype="int8", global_shape=(), boxes=())]),
    ],
    Code.LEAF_MISSING: [
        lambda c: c.leaf("config", "x"),
        lambda c: c.leaf("data"),
        lambda c: c.leaf("data", scope="lw/2"),
    ],
    Code.STREAM_MISSING: [lambda c: c.stream("x", "lw/0"), lambda c: c.stream("python", "global")],
    Code.DTYPE_MISMATCH: [
        lambda c: c.read_into(
            [ArraySink(name="bias", dtype="uint16", global_shape=(3,), boxes=(Box((0,), (3,)),))]
        ),
    ],
    Code.SHAPE_MISMATCH: [
        lambda c: c.read_into(
            [
                ArraySink(
                    name="bias", dtype="int16", global_shape=(3, 1), boxes=(Box((0, 0), (3, 1)),)
                )
            ]
        ),
        lambda c: c.read_into(
            [ArraySink(name="bias", dtype="int16", global_shape=(4,), boxes=(Box((0,), (3,)),))]
        ),
    ],
}


@pytest.mark.parametrize("code", MISSING)
def test_what_is_not_there_is_named(code):
    """Rows 98 and 99; REQ-CTX-006."""
    checkpoint = Checkpoint(MemoryStore.from_snapshot(small_files()))
    for action in MISSING[code]:
        error = error_of(lambda action=action: action(checkpoint))
        assert (error.code, isinstance(error, StateError)) == (code, True)
        assert error.where in {"x", "bias", "", "python"}


def test_a_part_that_turns_out_damaged_when_it_is_needed():
    """REQ-OPN-004: nothing of it is used."""
    files = small_files()
    path = f"parts/{ATTEMPT}-00001.msgpack"
    damaged = files[path][:-40] + bytes([files[path][-40] ^ 1]) + files[path][-39:]
    checkpoint = Checkpoint(MemoryStore.from_snapshot({**files, path: damaged}))
    assert checkpoint.weights["bias"][...].tolist() == [1, -2, 3]
    for action in (
        lambda: checkpoint.weights["phase"][...],
        lambda: checkpoint.leaf("data", scope="lw/1"),
    ):
        error = error_of(action)
        assert isinstance(error, IntegrityError | FormatError)
        assert error.where == path


def test_bit_patterns_survive():
    """REQ-OPN-007, REQ-TEN-002: NaNs with payloads, -0.0, subnormals, in every float dtype."""
    rng = random.Random(7)
    for dtype in (
        "float16",
        "bfloat16",
        "float32",
        "float64",
        "complex64",
        "complex128",
        "float8_e5m2",
        "float8_e8m0fnu",
    ):
        array = random_array((257,), dtype, rng)
        store = save_tiled(array, dtype, rng)
        assert Checkpoint(store).weights["w"][...].tobytes() == array.tobytes()


def test_arrays_of_other_byte_orders_and_strides_are_saved_by_value():
    """REQ-TEN-001: what a source copies is C order, whatever it holds."""
    array = np.asfortranarray(np.arange(12, dtype=np.float32).reshape(3, 4))[::-1]
    store = MemoryStore()
    save(store, snapshot(tensor("w", array, boxes=(Box((0, 0), (3, 2)), Box((0, 2), (3, 2))))))
    assert (Checkpoint(store).weights["w"][...] == array).all()


def test_dtypes_of_numpy():
    assert numpy_dtype("bfloat16") == ml_dtypes.bfloat16
    assert numpy_dtype("float32") == np.dtype("<f4")
    error = error_of(lambda: numpy_dtype("float4_e2m1fn_x2"))
    assert (error.code, "float4_e2m1fn_x2" in error.detail) == (Code.STATE_UNSUPPORTED, True)


def test_opaque_dtypes_without_numpy_are_read_as_bytes():
    """REQ-TEN-004: a sink takes them."""
    array = np.arange(8, dtype=np.uint8).reshape(2, 4)
    store = MemoryStore()
    save(store, snapshot(tensor("w", array, dtype="float4_e2m1fn_x2")))
    sink = ArraySink(
        name="w", dtype="float4_e2m1fn_x2", global_shape=(2, 4), boxes=(Box((0, 1), (2, 2)),)
    )
    Checkpoint(store).read_into([sink])
    assert sink.taken == [(Box((0, 1), (2, 2)), array[:, 1:3].tobytes())]


def test_a_checkpoint_of_nothing():
    """REQ-MAN-003: all seven fields absent."""
    store = MemoryStore()
    fields = ("weights", "optimizer", "rng", "data", "config", "topology", "provenance")
    save(store, snapshot(absent=dict.fromkeys(fields, "nothing")))
    checkpoint = Checkpoint(store)
    assert len(read_all(store)) == 1
    assert {summary.reason for summary in checkpoint.manifest.fields.values()} == {"nothing"}


def test_large_numbers_of_leaves_take_linear_time():
    import time  # noqa: PLC0415

    store = MemoryStore()
    leaves = [leaf("config", number, name=f"{number:05}") for number in range(3000)]
    save(store, snapshot(leaves=leaves, streams=[stream(f"{n:04}", n) for n in range(500)]))
    begin = time.process_time()
    assert len(read_all(store)) == 3501
    assert time.process_time() - begin < 20


@pytest.mark.parametrize("at", [0, 9, 40])
def test_a_damaged_header_is_found_by_whoever_loads(at):
    """REQ-OPN-011: though the blocks behind it are whole."""
    store = MemoryStore()
    ckptfmt.save(store, ckptfmt.State(weights={"w": np.ones(3)}), step=1)
    (path,) = (path for path in store.list("") if path.startswith("weights-"))
    content = bytearray(store.snapshot()[path])
    content[at] ^= 1
    store.replace(path, bytes(content))
    with pytest.raises(CkptError) as caught:
        ckptfmt.load(store)
    assert (caught.value.code, caught.value.where) == (
        Code.HEADER_DIGEST,
        f"{path}[0:{len(content) - 24}]",
    )


def test_a_shard_with_a_byte_more_is_found_by_whoever_loads():
    """REQ-OPN-011."""
    store = MemoryStore()
    ckptfmt.save(store, ckptfmt.State(weights={"w": np.ones(3)}), step=1)
    (path,) = (path for path in store.list("") if path.startswith("weights-"))
    store.replace(path, store.snapshot()[path] + b"\0")
    with pytest.raises(CkptError) as caught:
        ckptfmt.load(store)
    assert (caught.value.code, caught.value.where) == (Code.FILE_NBYTES, path)


def test_opening_a_part_makes_no_object_for_a_box():
    """It made a row for each box and each extent, also where one tensor of a hundred thousand was wanted."""
    store = MemoryStore()
    save(store, snapshot(*(tensor(f"rowless{number}", np.full(3, number)) for number in range(50))))
    checkpoint = Checkpoint(store)
    checkpoint.open_part(0)
    assert rowless() == []
    assert checkpoint.weights["rowless7"][:].tolist() == [7, 7, 7]
    assert rowless() == ["rowless7"]


def rowless():
    """Return the tensors of the boxes that are objects."""
    gc.collect()
    names = (one.key[1] for one in gc.get_objects() if type(one) is StoredBox)
    return [name for name in names if name.startswith("rowless")]
