"""Live tensors and arrays, whole or in pieces, as sources and sinks of global tensors."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptfmt
from ckptfmt.adapters.torch.tensors import TORCH_DTYPES
from ckptfmt.errors import CkptError
from ckptfmt.store.memory import MemoryStore


def code_of(action):
    with pytest.raises(CkptError) as caught:
        action()
    return caught.value.code


@st.composite
def divided(draw):
    """Return a shape, and cuts of each of its dimensions."""
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
    cuts = [
        sorted({0, extent, *draw(st.sets(st.integers(0, extent), max_size=2))}) for extent in shape
    ]
    return shape, cuts


def grid(shape, cuts):
    """Yield the slices of all boxes of a division, each dimension cut on its own."""
    spans = [
        list(itertools.pairwise(cut)) or [(0, extent)]
        for cut, extent in zip(cuts, shape, strict=True)
    ]
    boxes: list[tuple[tuple[int, int], ...]] = [()]
    for span in spans:
        boxes = [(*box, bounds) for box in boxes for bounds in span]
    return [tuple(slice(begin, end) for begin, end in box) for box in boxes]


def bits(shape, dtype, seed):
    nbytes = int(np.prod(shape, dtype=np.int64)) * TORCH_DTYPES[dtype].itemsize
    content = np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)
    if dtype == "bool":
        content &= 1
    return torch.frombuffer(bytearray(content.tobytes()) or bytearray(1), dtype=torch.uint8)[
        :nbytes
    ]


@settings(max_examples=80, deadline=None)
@given(
    saved=divided(),
    wanted=st.data(),
    dtype=st.sampled_from(sorted(TORCH_DTYPES)),
    strided=st.booleans(),
)
def test_any_pieces_give_the_same_bytes_in_any_other_pieces(saved, wanted, dtype, strided):
    shape, cuts = saved
    whole = bits(shape, dtype, 7).view(TORCH_DTYPES[dtype]).reshape(shape)
    held = whole.mT.contiguous().mT if strided and len(shape) > 1 else whole
    pieces = {tuple(s.start for s in at): held[at] for at in grid(shape, cuts)}
    source = ckptfmt.source_of("w", pieces, global_shape=shape)
    store = MemoryStore()
    ckptfmt.save(store, ckptfmt.State(weights={"w": source}, rng=False), step=1)

    other = [
        sorted({0, extent, *wanted.draw(st.sets(st.integers(0, extent), max_size=2))})
        for extent in shape
    ]
    target = torch.zeros_like(bits(shape, dtype, 0)).view(TORCH_DTYPES[dtype]).reshape(shape)
    sink = ckptfmt.sink_of(
        "w",
        {tuple(s.start for s in at): target[at] for at in grid(shape, other)},
        global_shape=shape,
    )
    with ckptfmt.open(store) as checkpoint:
        checkpoint.read_into([sink])
    as_bytes = [
        value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        for value in (target, whole)
    ]
    assert as_bytes[0] == as_bytes[1]


def test_numpy_pieces_and_a_whole_tensor_of_torch_read_each_other():
    array = np.arange(12, dtype="<i4").reshape(3, 4)
    store = MemoryStore()
    pieces = {(0, 0): array[:2], (2, 0): array[2:].astype(">i4")}
    ckptfmt.save(
        store,
        ckptfmt.State(weights={"w": ckptfmt.source_of("w", pieces, global_shape=(3, 4))}),
        step=1,
    )
    target = torch.zeros(3, 4, dtype=torch.int32)
    halves = {(0, 0): np.zeros((3, 1), np.int32), (0, 1): np.zeros((3, 3), np.int32)}
    with ckptfmt.open(store) as checkpoint:
        checkpoint.read_into(
            [ckptfmt.sink_of("w", target), ckptfmt.sink_of("w", halves, global_shape=(3, 4))]
        )
    assert target.numpy().tobytes() == array.tobytes()
    assert np.concatenate(list(halves.values()), axis=1).tobytes() == array.tobytes()


def test_a_sink_of_another_dtype_converts_where_it_is_told():
    store = MemoryStore()
    source = ckptfmt.source_of("w", torch.tensor([1.5, 2.5]))
    ckptfmt.save(store, ckptfmt.State(weights={"w": source}), step=1)
    target = torch.zeros(2, dtype=torch.bfloat16)
    with ckptfmt.open(store) as checkpoint:
        checkpoint.read_into([ckptfmt.sink_of("w", target, dtype=checkpoint.weights["w"].dtype)])
        assert (
            code_of(lambda: checkpoint.read_into([ckptfmt.sink_of("w", target)]))
            == "DTYPE_MISMATCH"
        )
    assert target.tolist() == [1.5, 2.5]


WHOLE: Any = np.zeros((2, 3), np.float32)


@pytest.mark.parametrize(
    ("pieces", "more", "code"),
    [
        ({(0, 0): WHOLE}, {}, "ARGUMENT"),
        ({}, {"global_shape": (2, 3)}, "ARGUMENT"),
        ({(1, 0): WHOLE}, {"global_shape": (2, 3)}, "BOX_BOUNDS"),
        ({(-1, 0): WHOLE}, {"global_shape": (2, 3)}, "BOX_BOUNDS"),
        ({(0,): WHOLE}, {"global_shape": (2, 3)}, "BOX_BOUNDS"),
        ({(0, 0): WHOLE}, {"global_shape": (2, 3, 1)}, "BOX_BOUNDS"),
        ({(0, 0): [1, 2]}, {"global_shape": (2,)}, "STATE_UNSUPPORTED"),
        ({(0, 0): WHOLE, (1, 0): WHOLE}, {"global_shape": (4, 3)}, "TILING_OVERLAP"),
        ({(0.5, 0): WHOLE}, {"global_shape": (2, 3)}, "ARGUMENT"),
        ({0: WHOLE}, {"global_shape": (2, 3)}, "ARGUMENT"),
        ({"a": WHOLE}, {"global_shape": (2, 3)}, "ARGUMENT"),
        (WHOLE, {"global_shape": (4, 3)}, "ARGUMENT"),
        (torch.zeros(2, 3), {"global_shape": (3, 2)}, "ARGUMENT"),
        ([1, 2], {}, "STATE_UNSUPPORTED"),
        (None, {}, "STATE_UNSUPPORTED"),
        (np.array(["a"]), {}, "STATE_UNSUPPORTED"),
    ],
)
def test_what_is_no_tensor_and_what_leaves_it_is_refused(pieces, more, code):
    for make in (ckptfmt.source_of, ckptfmt.sink_of):
        assert code_of(lambda make=make: make("w", pieces, **more)) == code


def test_pieces_of_one_source_have_one_dtype():
    pieces = {(0, 0): WHOLE, (2, 0): WHOLE.astype(np.float64)}
    assert code_of(lambda: ckptfmt.source_of("w", pieces, global_shape=(4, 3))) == "ARGUMENT"
