"""BLAKE3 of blocks where a tensor lives: the same bits as the host's, whichever program, length, address and slices."""

import importlib.util
import os
import random
import subprocess
import sys
import types
from unittest.mock import Mock

import pytest
import torch
from blake3 import blake3 as oracle
from hypothesis import example, given
from hypothesis import strategies as st

from ckptfmt import digest, limits
from ckptfmt.adapters.torch import blake3, blake3_trees
from ckptfmt.adapters.torch.blake3 import block_digests
from ckptfmt.adapters.torch.blake3_trees import Forest
from ckptfmt.errors import Code, StateError
from tests.house.sources import ROOT

MIB = 1 << 20
LEAST = limits.BLOCK_NBYTES_MIN
# Where a message, a word, a chunk, a pair, a block and a pair of blocks end.
EDGES = sorted(
    {
        max(edge + step, 0)
        for edge in (0, 4, 64, 960, 1024, 2048, 3072, 4096, 5120, 8192, 12288, 65536)
        for step in (-1, 0, 1, 3)
    }
)
KERNELS = "ckptfmt.adapters.torch.blake3_triton"


def as_tensor(content, *, begin=0):
    """The bytes from `begin` on, where they lie in a tensor of all."""
    return torch.tensor(list(content), dtype=torch.uint8)[begin:]


def expected(content, block_nbytes):
    return b"".join(oracle(content[at : at + block_nbytes]).digest() for at in range(0, len(content), block_nbytes))


def of(digests):
    assert digests.dtype == torch.uint8
    assert digests.shape[1:] == (32,)
    return digests.numpy().tobytes()


def fold(chunk_count, block_chunks):
    """What the levels of a forest make of its chunks: the tree of each block, as text."""
    forest = Forest.of(chunk_count * 1024, block_chunks * 1024)
    values = [f"{number % block_chunks}{'!' * (number == forest.root_chunk)}" for number in range(chunk_count)]
    for level in forest.iter_levels():
        assert (level.pairs, level.is_odd) == (len(values) // 2, len(values) % 2 == 1)
        joined = [
            f"({left} {right}){'!' * (pair >= level.root_begin)}"
            for pair, (left, right) in enumerate(zip(values[::2], values[1::2], strict=False))
        ]
        values = joined + values[2 * level.pairs :]
    return values


def tree(chunks):
    """The tree of one block as BLAKE3 defines it: on the left the largest power of two that leaves something."""
    if len(chunks) == 1:
        return str(chunks[0])
    left = 1 << (len(chunks) - 1).bit_length() - 1
    return f"({tree(chunks[:left])} {tree(chunks[left:])})"


@pytest.mark.parametrize("block_chunks", [4, 8, 16, 32])
@pytest.mark.parametrize("chunk_count", range(1, 21))
def test_the_levels_make_the_tree_of_each_block(chunk_count, block_chunks):
    blocks = [range(min(block_chunks, chunk_count - at)) for at in range(0, chunk_count, block_chunks)]

    assert fold(chunk_count, block_chunks) == [f"{tree(chunks)}!" for chunks in blocks]


@pytest.mark.parametrize("nbytes", EDGES)
def test_the_digests_at_every_edge_are_those_of_the_host(nbytes):
    """REQ-TEN-006."""
    content = random.Random(nbytes).randbytes(nbytes)

    digests = block_digests(as_tensor(content), LEAST)

    assert of(digests) == expected(content, LEAST) == digest.block_digests(memoryview(content), LEAST)


@given(
    nbytes=st.integers(0, 40_000) | st.sampled_from(EDGES),
    begin=st.integers(0, 9),
    block_nbytes=st.sampled_from([LEAST, 2 * LEAST, 4 * LEAST, MIB]),
    seed=st.integers(0, 2**32),
)
@example(nbytes=3 * MIB + 1025, begin=1, block_nbytes=MIB, seed=0)
@example(nbytes=MIB, begin=4, block_nbytes=limits.BLOCK_NBYTES_MAX, seed=0)
def test_the_digests_of_any_bytes_at_any_address_are_those_of_the_host(nbytes, begin, block_nbytes, seed):
    """REQ-TEN-005, REQ-TEN-006."""
    content = random.Random(seed).randbytes(begin + nbytes)

    digests = block_digests(as_tensor(content, begin=begin), block_nbytes)

    assert of(digests) == expected(content[begin:], block_nbytes)


def test_bytes_at_an_odd_address_with_an_even_offset():
    content = random.Random(1).randbytes(5000)
    memory = bytearray(b"x" + content)
    tensor_bytes = torch.frombuffer(memoryview(memory)[1:], dtype=torch.uint8)
    assert (tensor_bytes.storage_offset(), tensor_bytes.data_ptr() % 4) != (0, 0)

    assert of(block_digests(tensor_bytes, LEAST)) == expected(content, LEAST)


@pytest.mark.parametrize("lanes", [1, 3, 4, 7])
@pytest.mark.parametrize("batch_nbytes", [LEAST, 3 * LEAST])
def test_slices_and_batches_make_no_difference(monkeypatch, lanes, batch_nbytes):
    monkeypatch.setattr(blake3, "_HOST_LANES", lanes)
    monkeypatch.setattr(blake3, "BATCH_NBYTES", batch_nbytes)
    content = random.Random(2).randbytes(4 * LEAST + 2500)

    assert of(block_digests(as_tensor(content), LEAST)) == expected(content, LEAST)


def test_memory_beside_the_input_is_bounded():
    values_nbytes = blake3.BATCH_NBYTES // blake3_trees.CHUNK_NBYTES * 32
    lanes_nbytes = 4 * blake3._Lanes.ROWS * max(blake3._DEVICE_LANES, blake3._HOST_LANES)

    assert blake3.BATCH_NBYTES >= limits.BLOCK_NBYTES_MAX
    assert values_nbytes + lanes_nbytes <= 60 * MIB  # what is left is for counters and one short chunk


@pytest.mark.parametrize("place", [0, 3, 64, 1023, 1024, 4095])
@pytest.mark.parametrize("bit", [0, 7])
def test_one_flipped_bit_gives_another_digest_of_its_block_alone(place, bit):
    content = bytearray(random.Random(3).randbytes(3 * LEAST))
    before = block_digests(as_tensor(content), LEAST)
    content[LEAST + place] ^= 1 << bit

    after = block_digests(as_tensor(content), LEAST)

    assert [bool((one == other).all()) for one, other in zip(before, after, strict=True)] == [True, False, True]


def test_the_input_is_only_read():
    tensor_bytes = as_tensor(random.Random(4).randbytes(5000))
    before = tensor_bytes.clone()

    block_digests(tensor_bytes, LEAST)

    assert torch.equal(tensor_bytes, before)


@pytest.mark.parametrize("block_nbytes", [0, 1024, LEAST + 1, 3 * LEAST, 2 * limits.BLOCK_NBYTES_MAX, -LEAST])
def test_other_sizes_of_blocks_are_refused(block_nbytes):
    """REQ-TEN-005."""
    with pytest.raises(StateError) as raised:
        block_digests(torch.zeros(1, dtype=torch.uint8), block_nbytes)

    assert raised.value.code == Code.ARGUMENT


@pytest.mark.parametrize(
    "tensor_bytes",
    [
        torch.zeros(8, dtype=torch.int8),
        torch.zeros((2, 8), dtype=torch.uint8),
        torch.zeros(16, dtype=torch.uint8)[::2],
    ],
    ids=["another dtype", "two dimensions", "gaps"],
)
def test_what_is_not_bytes_one_after_the_other_is_refused(tensor_bytes):
    with pytest.raises(StateError) as raised:
        block_digests(tensor_bytes, LEAST)

    assert raised.value.code == Code.ARGUMENT


# --- which program


class OnCuda(torch.Tensor):
    """A tensor of the host that says it isn't there."""

    is_cuda = property(lambda _: True)


@pytest.fixture
def device_bytes():
    return as_tensor(random.Random(5).randbytes(9000)).as_subclass(OnCuda)


@pytest.fixture
def _fresh():
    blake3._find_kernels.cache_clear()
    yield
    blake3._find_kernels.cache_clear()


@pytest.fixture
def kernels(monkeypatch, _fresh):
    """Return a fake of the kernels, which are there as triton is."""
    fake = types.SimpleNamespace(digest_batch=Mock(side_effect=blake3._digest_by_torch))
    monkeypatch.setitem(sys.modules, KERNELS, fake)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "triton" or None)
    return fake.digest_batch


def test_a_tensor_on_cuda_goes_to_the_kernels_once_they_are_found_right(kernels, device_bytes, monkeypatch):
    first = block_digests(device_bytes, LEAST)
    calls = kernels.call_count
    monkeypatch.setattr(blake3, "_digest_by_torch", Mock(side_effect=AssertionError))

    second = block_digests(device_bytes, LEAST)

    assert of(first) == of(second) == expected(bytes(device_bytes.tolist()), LEAST)
    assert kernels.call_count == calls + 1
    assert kernels.call_args.args[2] == Forest.of(9000, LEAST)


def test_a_tensor_of_the_host_does_not(kernels):
    block_digests(torch.zeros(9000, dtype=torch.uint8), LEAST)

    assert not kernels.called


@pytest.mark.usefixtures("_fresh")
def test_without_triton_a_tensor_on_cuda_goes_to_torch(device_bytes, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    monkeypatch.delitem(sys.modules, KERNELS, raising=False)

    assert of(block_digests(device_bytes, LEAST)) == expected(bytes(device_bytes.tolist()), LEAST)
    assert KERNELS not in sys.modules


def wrong(content, digests, forest):
    blake3._digest_by_torch(content, digests, forest)
    digests[-1, 7] ^= 1


@pytest.mark.parametrize(
    ("fault", "words"),
    [(wrong, "other digests than the host"), (RuntimeError("no C compiler"), "RuntimeError: no C compiler")],
)
def test_kernels_that_do_not_do_are_not_used_and_a_warning_says_why(kernels, device_bytes, fault, words):
    kernels.side_effect = fault

    with pytest.warns(RuntimeWarning, match=words):
        digests = block_digests(device_bytes, LEAST)
    calls = kernels.call_count
    again = block_digests(device_bytes, LEAST)  # without another warning, which would be an error

    assert of(digests) == of(again) == expected(bytes(device_bytes.tolist()), LEAST)
    assert kernels.call_count == calls


# --- the kernels, interpreted

# Begun as a program: whether triton interprets or compiles is settled when it is imported.
INTERPRETED = """
import random, sys, torch
from blake3 import blake3 as oracle
from ckptfmt.adapters.torch import blake3, blake3_triton as kernels

def check(nbytes, begin, block_nbytes, **sizes):
    for name, value in sizes.items():
        setattr(kernels, name, value)
    content = random.Random(nbytes).randbytes(begin + nbytes)
    held = torch.frombuffer(bytearray(content), dtype=torch.uint8)[begin:]
    digests = blake3._digest(held, block_nbytes, kernels.digest_batch).numpy().tobytes()
    parts = [content[at : at + block_nbytes] for at in range(begin, len(content), block_nbytes)]
    assert digests == b"".join(oracle(part).digest() for part in parts), (nbytes, begin, block_nbytes)

check(65536 + 1024, 0, 65536, CHUNK_LANES=128)  # by words, a block of one whole chunk, two trees in one launch
check(5 * 1024 + 1, 1, 4096)  # by bytes
check(16384 + 3 * 1024 + 1, 4, 16384, GROUP_LEVELS=3, PAIR_LANES=2)  # both; two launches for the trees, several tiles
print("equal")
"""


@pytest.mark.slow
@pytest.mark.cuda
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton comes with torch's CUDA builds alone")
def test_the_interpreted_kernels_give_the_digests_of_the_host():
    """REQ-TEN-006."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}

    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True, check=False
    )

    assert (done.returncode, done.stdout.strip()) == (0, "equal"), done.stderr
