"""Bytes of tensors and arrays, copied into whichever memory: any offset, dtype and layout."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from ckptfmt.adapters.numpy import ArraySource
from ckptfmt.adapters.torch.tensors import TORCH_DTYPES, source_of
from ckptfmt.box import Box
from ckptfmt.dtypes import DTYPES
from ckptfmt.layout.placements import LocalPiece

SHAPE = (6, 10)
OFFSETS = (0, 1, 2, 4, 8)
FENCE = 0xA5
VIEWS: dict[str, Any] = {
    "whole": np.s_[:],
    "rows": np.s_[1:4],
    "columns": np.s_[:, 2:6],
    "an even stride": np.s_[::2, ::4],
    "an odd stride": np.s_[:, 1::3],
    "one element": np.s_[3:4, 7:8],
    "one column": np.s_[:, 3],
    "0-dim": np.s_[2, 3],
    "empty": np.s_[:, 4:4],
}


def copied(source, offset, box=None):
    """Return what is copied to an offset, after a look at the bytes around it."""
    box = box or source.boxes[0]
    nbytes = box.element_count * DTYPES[source.dtype].nbytes
    memory = bytearray([FENCE]) * (offset + nbytes + 16)
    source.copy_into(box, memoryview(memory)[offset : offset + nbytes])
    assert set(memory[:offset] + memory[offset + nbytes :]) == {FENCE}
    found = bytes(memory[offset : offset + nbytes])
    as_it_is = source.memory_of(box)
    assert as_it_is is None or as_it_is.tobytes() == found
    return found


def content(dtype):
    """Return random bytes, NaNs of every kind among them, and the same as opaque elements."""
    size = DTYPES[dtype].nbytes
    raw = random.Random(dtype).randbytes(SHAPE[0] * SHAPE[1] * size)
    return raw, np.frombuffer(raw, f"V{size}").reshape(SHAPE)


def tensor_source(tensor):
    return source_of(tensor, field="weights", name="w", scope="global")


def array_source(array):
    return ArraySource.of(array, field="weights", name="w", scope="global")


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_tensors_of_every_dtype_and_layout_keep_their_bits(dtype, view):
    raw, opaque = content(dtype)
    tensor = (
        torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        .view(TORCH_DTYPES[dtype])
        .view(SHAPE)[VIEWS[view]]
    )
    expected = opaque[VIEWS[view]].tobytes()
    assert [copied(tensor_source(tensor), offset) for offset in OFFSETS] == [expected] * len(
        OFFSETS
    )


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float32", "int64"])
def test_transposed_and_expanded_tensors_are_copied_in_c_order(dtype):
    raw, opaque = content(dtype)
    tensor = (
        torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(TORCH_DTYPES[dtype]).view(SHAPE)
    )
    for offset in OFFSETS:
        assert copied(tensor_source(tensor.t()), offset) == opaque.T.tobytes()
        expanded = tensor[:1].expand(3, *SHAPE[1:])
        assert copied(tensor_source(expanded), offset) == opaque[:1].repeat(3, axis=0).tobytes()


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_conjugates_and_negatives_are_copied_as_their_values(dtype):
    tensor = torch.randn(4, 3, dtype=dtype, generator=torch.Generator().manual_seed(1))
    values = tensor.numpy().copy()
    assert tensor.conj().is_conj()
    assert tensor.conj().imag.is_neg()
    for offset in OFFSETS:
        assert copied(tensor_source(tensor.conj()), offset) == values.conj().tobytes()
        assert copied(tensor_source(tensor.mH), offset) == values.conj().T.tobytes()
        assert copied(tensor_source(tensor.conj().imag), offset) == (-values.imag).tobytes()
        assert copied(tensor_source(tensor.conj()[1, 2]), offset) == values.conj()[1, 2].tobytes()


def test_a_piece_is_cut_out_of_what_is_here():
    """As a strided shard has it: several pieces that lie one behind the other."""
    raw, opaque = content("float32")
    whole = tensor_source(torch.frombuffer(bytearray(raw), dtype=torch.float32).view(SHAPE))
    places = {Box((4, 0), (2, 10)): Box((0, 0), (2, 10)), Box((0, 3), (6, 4)): Box((0, 6), (6, 4))}
    pieces = tuple(LocalPiece(box, local_box) for box, local_box in places.items())
    source = dataclasses.replace(whole, pieces=pieces, boxes=tuple(places))

    for box, local_box in places.items():
        expected = opaque[local_box.relative_to(Box.whole(SHAPE))].tobytes()
        assert [copied(source, offset, box) for offset in OFFSETS] == [expected] * len(OFFSETS)


def test_memory_is_told_where_it_holds_the_bytes_as_they_are():
    tensor = torch.randn(6, 10, generator=torch.Generator().manual_seed(2))
    imaginary = torch.view_as_complex(tensor.view(6, 5, 2))
    told = [tensor, tensor[1:4], tensor[2, 3], torch.nn.Parameter(tensor), imaginary]
    assert all(memory_of(tensor_source(one)) is not None for one in told)
    others = [tensor.t(), tensor[:, 2:6], imaginary.conj(), imaginary.conj().imag]
    assert [memory_of(tensor_source(one)) for one in others] == [None] * len(others)

    array = tensor.numpy()
    assert all(
        memory_of(array_source(one)) is not None for one in (array, array[1:4], array[2, 3, ...])
    )
    assert [
        memory_of(array_source(one)) for one in (array.T, array[:, 2:6], array.astype(">f4"))
    ] == [None] * 3


def memory_of(source):
    return source.memory_of(source.boxes[0])


@pytest.mark.parametrize("nbytes", [0, 15, 17])
def test_memory_of_another_size_is_not_written_to(nbytes):
    memory = bytearray([FENCE]) * 32
    for source in (tensor_source(torch.zeros(4)), array_source(np.zeros(4, np.float32))):
        with pytest.raises(ValueError, match=r"."):
            source.copy_into(source.boxes[0], memoryview(memory)[:nbytes])
    assert set(memory) == {FENCE}


def test_a_tensor_can_be_resized_after_it_was_copied():
    tensor = torch.ones(4)
    copied(tensor_source(tensor), 0)

    tensor.resize_(100)
    assert tensor.shape == (100,)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize(
    "dtype", ["int8", "float16", "uint32", "float64", "complex128", "bfloat16", "float8_e5m2"]
)
def test_arrays_of_every_size_and_layout_keep_their_bits(dtype, view):
    raw, opaque = content(dtype)
    array = np.frombuffer(raw, getattr(ml_dtypes, dtype, dtype)).reshape(SHAPE)[VIEWS[view]]
    expected = opaque[VIEWS[view]].tobytes()
    assert [copied(array_source(np.asarray(array)), offset) for offset in OFFSETS] == [
        expected
    ] * len(OFFSETS)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dtype", ["int8", "float16", "uint32", "float64", "complex64"])
def test_arrays_of_the_other_byte_order_are_turned_around(dtype, view):
    raw, opaque = content(dtype)
    array = (
        np.frombuffer(raw, dtype)
        .byteswap()
        .view(np.dtype(dtype).newbyteorder(">"))
        .reshape(SHAPE)[VIEWS[view]]
    )
    expected = opaque[VIEWS[view]].tobytes()
    assert [copied(array_source(np.asarray(array)), offset) for offset in OFFSETS] == [
        expected
    ] * len(OFFSETS)


def test_an_array_may_be_transposed_and_read_only():
    array = np.arange(12, dtype=np.int16).reshape(3, 4)
    array.flags.writeable = False
    assert copied(array_source(array.T), 1) == array.T.tobytes()
    assert copied(array_source(array), 1) == array.tobytes()
