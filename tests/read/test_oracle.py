"""Any tiling by several writers into any wanted boxes, against numpy: not a bit differs, nothing else is touched."""

import itertools
import math
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

import ckptfmt
from ckptfmt import State
from ckptfmt.adapters.numpy import ArraySink
from ckptfmt.adapters.torch.tensors import TORCH_DTYPES, TorchSink
from ckptfmt.box import Box
from ckptfmt.dtypes import DTYPES, numpy_dtype
from ckptfmt.layout.placements import LocalPiece
from ckptfmt.read.reader import Checkpoint
from ckptfmt.store.memory import MemoryStore
from tests.builders import save, snapshot, tensor
from tests.layout.test_merge import cut

#: All that numpy has; packed ones are bytes to it.
NAMES = sorted(name for name in DTYPES if name not in ("complex32", "float4_e2m1fn_x2"))
SHAPES = st.lists(st.integers(0, 7), max_size=4).map(tuple) | st.sampled_from(
    [(9000,), (130, 40), (33, 3, 70), (1, 5000, 2), (2, 2, 2, 3, 2)]
)
RANDOM = st.randoms(use_true_random=False)


# --- what there is --------------------------------------------------------------------------------


def content(shape, dtype, rng):
    """Random bytes: NaNs with payloads among them, and every fifth element is -0.0."""
    kind = np.dtype(numpy_dtype(dtype))
    found = np.frombuffer(rng.randbytes(math.prod(shape) * kind.itemsize), np.uint8).copy()
    if dtype == "bool":
        found &= 1
    elif "float" in dtype:
        found.reshape(-1, kind.itemsize)[::5] = [0] * (kind.itemsize - 1) + [0x80]
    return found.view(kind).reshape(shape)


def slices(box):
    """Return what indexes a box in the whole array; the dots keep a scalar an array."""
    return (*(slice(at, at + extent) for at, extent in zip(box.begin, box.shape, strict=True)), ...)


def edges(extent, rng, most=5):
    inner = (
        sorted(rng.sample(range(1, extent), rng.randint(0, min(most, extent - 1))))
        if extent > 1
        else []
    )
    return list(itertools.pairwise([0, *inner, extent]))


def grid(shape, rng):
    """Cut every dimension at random places."""
    return [
        Box(tuple(low for low, _ in cell), tuple(high - low for low, high in cell))
        for cell in itertools.product(*(edges(extent, rng, 3) for extent in shape))
    ]


def rows(shape, rng):
    """Cut the first dimension into uneven rows."""
    if not shape:
        return [Box((), ())]
    return [
        Box((low, *(0 for _ in shape[1:])), (high - low, *shape[1:]))
        for low, high in edges(shape[0], rng)
    ]


def flat_range(shape, begin, end):
    """Return the boxes of the elements from `begin` to `end` in C order, as an optimizer has them that shards flat."""
    if begin >= end:
        return []
    if not shape:
        return [Box((), ())]
    inner = math.prod(shape[1:])
    boxes = []
    at = begin
    while at < end:
        row, column = divmod(at, inner)
        if column == 0 and end - at >= inner:
            count = (end - at) // inner
            boxes.append(Box((row, *(0 for _ in shape[1:])), (count, *shape[1:])))
            at += count * inner
        else:
            stop = min(end - row * inner, inner)
            boxes += [
                Box((row, *box.begin), (1, *box.shape))
                for box in flat_range(shape[1:], column, stop)
            ]
            at = row * inner + stop
    return boxes


def flat(shape, rng):
    """Cut the elements in C order at random places, each range into its boxes."""
    return [
        box for low, high in edges(math.prod(shape), rng, 3) for box in flat_range(shape, low, high)
    ]


TILINGS = [cut, grid, rows, flat]


def tile(shape, rng):
    if 0 in shape:
        return [Box.whole(shape)]
    return rng.choice(TILINGS)(shape, rng)


def save_tiled(arrays, rng):
    """Save arrays by name, (dtype, array) each, cut at random and held by random writers, several at times."""
    writers = rng.randint(1, 4)
    held: list[list[Any]] = [[] for _ in range(writers)]
    for name, (dtype, array) in arrays.items():
        mine: list[list[Box]] = [[] for _ in range(writers)]
        for box in tile(array.shape, rng):
            for writer in rng.sample(range(writers), rng.randint(1, writers)):
                mine[writer].append(box)
        for boxes, sources in zip(mine, held, strict=True):
            if boxes:
                sources.append(tensor(name, array, dtype=dtype, boxes=tuple(boxes)))
    store = MemoryStore()
    save(store, *(snapshot(*sources) for sources in held), block_nbytes=rng.choice([4096, 65536]))
    return store


# --- what is wanted -------------------------------------------------------------------------------


def random_box(shape, rng):
    begin = tuple(rng.randint(0, extent) for extent in shape)
    return Box(
        begin, tuple(rng.randint(0, extent - at) for at, extent in zip(begin, shape, strict=True))
    )


def wanted_boxes(shape, rng):
    """Return what a process may hold: all, one box, rows, columns, some pieces of a tiling, a flat range."""
    if 0 in shape:
        return [Box.whole(shape)]
    kind = rng.randrange(5)
    if kind == 0:
        return [Box.whole(shape)]
    if kind == 1:
        return [random_box(shape, rng)]
    if kind == 2 and shape:
        axis = rng.randrange(len(shape))
        low, high = rng.choice(edges(shape[axis], rng))
        begin = [0] * len(shape)
        begin[axis] = low
        return [Box(tuple(begin), (*shape[:axis], high - low, *shape[axis + 1 :]))]
    if kind == 3:
        low, high = sorted(rng.choices(range(math.prod(shape) + 1), k=2))
        return flat_range(shape, low, high)
    boxes = tile(shape, rng)
    return rng.sample(boxes, rng.randint(0, len(boxes)))


def untouched(shape, dtype):
    kind = np.dtype(numpy_dtype(dtype))
    return (
        np.full(math.prod(shape) * kind.itemsize, 1 if dtype == "bool" else 0xA5, np.uint8)
        .view(kind)
        .reshape(shape)
    )


def oracle(array, dtype, boxes):
    found = untouched(array.shape, dtype)
    for box in boxes:
        found[slices(box)] = array[slices(box)]
    return found.tobytes()


def strided(shape, rng):
    """Return where elements lie in a larger memory: an axis order, and a step and a margin for each axis."""
    order = list(range(len(shape)))
    rng.shuffle(order)
    return order, [rng.choice([1, 1, 2]) for _ in shape], [rng.choice([0, 0, 3]) for _ in shape]


def spread(shape, dtype, rng, *, make):
    """Return an array or a tensor of any strides, none of its elements touched."""
    order, steps, margins = strided(shape, rng)
    room = [(shape[axis] + margins[axis]) * steps[axis] for axis in order]
    memory = make(untouched(tuple(room), dtype))
    part = memory[(*(slice(margins[axis] * steps[axis], None, steps[axis]) for axis in order), ...)]
    back = [order.index(axis) for axis in range(len(shape))]
    return part.permute(back) if isinstance(part, torch.Tensor) else part.transpose(back)


def as_torch(array, dtype):
    raw = torch.from_numpy(array.reshape(-1).view(np.uint8))
    return raw.view(TORCH_DTYPES[dtype]).reshape(array.shape)


def torch_sink(name, dtype, live, pieces):
    return TorchSink(
        field="weights", name=name, dtype=dtype, global_shape=tuple(live.shape), scope="global", tensor=live,
        local=live, pieces=pieces,
    )  # fmt: skip


def array_sink(name, dtype, live, boxes):
    return ArraySink(
        field="weights",
        name=name,
        dtype=dtype,
        global_shape=live.shape,
        scope="global",
        array=live,
        boxes=tuple(boxes),
    )


def torch_bytes(live):
    dense = live.detach().clone(memory_format=torch.contiguous_format)
    return dense.reshape(-1).view(torch.uint8).numpy().tobytes()


# --- the properties -------------------------------------------------------------------------------


@given(st.lists(st.tuples(SHAPES, st.sampled_from(NAMES)), min_size=1, max_size=3), RANDOM)
def test_any_tiling_into_any_boxes_of_arrays_and_tensors(kinds, rng):
    """REQ-OPN-005, REQ-OPN-007, REQ-TEN-001, REQ-TEN-002."""
    arrays = {
        f"t{number}": (dtype, content(shape, dtype, rng))
        for number, (shape, dtype) in enumerate(kinds)
    }
    checkpoint = Checkpoint(save_tiled(arrays, rng))
    sinks, said = [], []
    for name, (dtype, array) in arrays.items():
        for _ in range(rng.randint(1, 2)):  # a tensor may be wanted twice
            boxes = wanted_boxes(array.shape, rng)
            if rng.random() < 0.5:
                live = spread(array.shape, dtype, rng, make=lambda memory: memory)
                sinks.append(array_sink(name, dtype, live, boxes))
                said.append((live.tobytes, oracle(array, dtype, boxes)))
            else:
                live = spread(
                    array.shape,
                    dtype,
                    rng,
                    make=lambda memory, dtype=dtype: as_torch(memory, dtype),
                )
                sinks.append(
                    torch_sink(name, dtype, live, tuple(LocalPiece(box, box) for box in boxes))
                )
                said.append((lambda live=live: torch_bytes(live), oracle(array, dtype, boxes)))

    checkpoint.read_into(sinks)

    for number, (found, expected) in enumerate(said):
        assert found() == expected, f"{sinks[number].name} {sinks[number].boxes}"


@given(SHAPES, st.sampled_from(NAMES), RANDOM)
def test_a_shard_that_lies_elsewhere_than_in_the_whole(shape, dtype, rng):
    """REQ-OPN-005: a box fills a local tensor of its own shape, wherever it was in the global one."""
    array = content(shape, dtype, rng)
    checkpoint = Checkpoint(save_tiled({"w": (dtype, array)}, rng))
    box = random_box(shape, rng)
    live = spread(box.shape, dtype, rng, make=lambda memory: as_torch(memory, dtype))
    sink = TorchSink(
        field="weights", name="w", dtype=dtype, global_shape=shape, scope="global", tensor=live, local=live,
        pieces=(LocalPiece(box, Box.whole(box.shape)),),
    )  # fmt: skip

    checkpoint.read_into([sink])

    assert torch_bytes(live) == array[slices(box)].tobytes()


@given(st.lists(st.tuples(SHAPES, st.sampled_from(NAMES)), min_size=1, max_size=4), RANDOM)
def test_any_tiling_into_live_mappings(kinds, rng):
    """REQ-OPN-005: through `ckptfmt.load`, by one process, of what several wrote; some tensors, or all."""
    arrays = {
        f"t{number}": (dtype, content(shape, dtype, rng))
        for number, (shape, dtype) in enumerate(kinds)
    }
    store = save_tiled(arrays, rng)
    chosen = rng.sample(sorted(arrays), rng.randint(1, len(arrays)))
    live = {}
    for name, (dtype, array) in arrays.items():
        empty = untouched(array.shape, dtype)
        live[f"my_{name}"] = empty if rng.random() < 0.5 else as_torch(empty, dtype)

    ckptfmt.load(
        store,
        State(weights=live),
        only=chosen,
        rename=lambda name: name.removeprefix("my_"),
        writer=(0, 1),
    )

    for name, (dtype, array) in arrays.items():
        found = live[f"my_{name}"]
        expected = array if name in chosen else untouched(array.shape, dtype)
        assert (
            torch_bytes(found) if isinstance(found, torch.Tensor) else found.tobytes()
        ) == expected.tobytes()


@given(st.lists(st.integers(1, 5), max_size=4).map(tuple), RANDOM)
def test_the_tilings_of_this_test_tile(shape, rng):
    for make in TILINGS:
        seen = np.zeros(shape, int)
        for box in make(shape, rng):
            seen[slices(box)] += 1
        assert (seen == 1).all()
    low, high = sorted(rng.choices(range(math.prod(shape) + 1), k=2))
    seen = np.zeros(shape, int)
    for box in flat_range(shape, low, high):
        seen[slices(box)] += 1
    assert seen.reshape(-1).tolist() == [int(low <= at < high) for at in range(math.prod(shape))]
