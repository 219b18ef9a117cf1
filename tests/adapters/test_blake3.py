"""BLAKE3 of blocks where a tensor lives: the same bits as the host's, or none."""

import importlib.util
import os
import random
import subprocess
import sys
import time
import types
from unittest.mock import Mock

import pytest
import torch
from blake3 import blake3 as oracle

from ckptfmt import digest, limits
from ckptfmt.adapters.torch import blake3
from ckptfmt.adapters.torch.blake3 import block_digests
from ckptfmt.adapters.torch.device_copies import Cuda
from ckptfmt.errors import Code, StateError
from ckptfmt.write.helper_process import start_helper
from tests.house.sources import ROOT

LEAST = limits.BLOCK_NBYTES_MIN
KERNELS = "ckptfmt.adapters.torch.blake3_triton"


def as_tensor(content):
    return torch.tensor(list(content), dtype=torch.uint8)


def expected(content, block_nbytes):
    return b"".join(
        oracle(content[at : at + block_nbytes]).digest()
        for at in range(0, len(content), block_nbytes)
    )


def of(digests):
    assert digests.dtype == torch.uint8
    assert digests.shape[1:] == (32,)
    return digests.numpy().tobytes()


def by_the_host(content, digests, block_nbytes):
    """A program as the kernels are, on the host."""
    found = digest.block_digests(
        memoryview(content.as_subclass(torch.Tensor).numpy()), block_nbytes
    )
    digests.copy_(torch.frombuffer(bytearray(found), dtype=torch.int32).reshape(digests.shape))


def wrong(content, digests, block_nbytes):
    by_the_host(content, digests, block_nbytes)
    digests[-1, 7] ^= 1


@pytest.fixture
def _fresh():
    blake3.find_kernels.cache_clear()
    yield
    blake3.find_kernels.cache_clear()


@pytest.fixture
def kernels(monkeypatch, _fresh):
    """Return a fake of the kernels, which are there as triton is."""
    fake = types.SimpleNamespace(digest_batch=Mock(side_effect=by_the_host))
    monkeypatch.setitem(sys.modules, KERNELS, fake)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "triton" or None)
    return fake.digest_batch


@pytest.mark.parametrize(
    "block_nbytes", [0, 1024, LEAST + 1, 3 * LEAST, 2 * limits.BLOCK_NBYTES_MAX, -LEAST]
)
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


def test_the_kernels_digest_once_they_are_found_right(kernels):
    """REQ-TEN-006."""
    content = random.Random(5).randbytes(9000)
    first = block_digests(as_tensor(content), LEAST)
    calls = kernels.call_count

    second = block_digests(as_tensor(content), LEAST)

    assert of(first) == of(second) == expected(content, LEAST)
    assert kernels.call_count == calls + 1


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("nbytes", [0, 1, LEAST, LEAST + 1, 3 * LEAST, 4 * LEAST + 2500])
@pytest.mark.parametrize("batch_nbytes", [LEAST, 3 * LEAST])
def test_batches_make_no_difference(monkeypatch, nbytes, batch_nbytes):
    content = random.Random(2).randbytes(nbytes)
    block_digests(as_tensor(content), LEAST)
    monkeypatch.setattr(blake3, "BATCH_NBYTES", batch_nbytes)

    assert of(block_digests(as_tensor(content), LEAST)) == expected(content, LEAST)


@pytest.mark.usefixtures("_fresh")
def test_without_triton_there_are_no_digests(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    monkeypatch.delitem(sys.modules, KERNELS, raising=False)

    assert block_digests(torch.zeros(9000, dtype=torch.uint8), LEAST) is None
    assert KERNELS not in sys.modules


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (wrong, "other digests than the host"),
        (RuntimeError("no C compiler"), "RuntimeError: no C compiler"),
    ],
)
def test_kernels_that_do_not_do_are_not_used_and_a_warning_says_why(kernels, fault, words):
    kernels.side_effect = fault

    with pytest.warns(RuntimeWarning, match=words):
        assert block_digests(torch.zeros(9000, dtype=torch.uint8), LEAST) is None
    calls = kernels.call_count

    assert (
        block_digests(torch.zeros(9000, dtype=torch.uint8), LEAST) is None
    )  # another warning would be an error
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
@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton comes with torch's CUDA builds alone"
)
def test_the_interpreted_kernels_give_the_digests_of_the_host():
    """REQ-TEN-006."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}

    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.returncode, done.stdout.strip()) == (0, "equal"), done.stderr


@pytest.fixture
def _no_compilation():
    blake3._start_compilation.cache_clear()
    blake3._READY.clear()
    yield
    blake3._start_compilation.cache_clear()
    blake3._READY.clear()


@pytest.mark.usefixtures("_no_compilation")
def test_kernels_are_compiled_in_a_process_of_their_own_and_until_then_there_is_no_digest(
    monkeypatch,
):
    """The process is real; it finds no Triton here, and ends."""
    device = torch.device("cpu")
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: name == "triton" or find_spec(name)
    )
    begin_s = time.monotonic()
    assert not blake3.are_kernels_ready(device)
    assert Cuda().digest_blocks(torch.zeros(9000, dtype=torch.uint8), LEAST) is None
    while not blake3.are_kernels_ready(device):
        assert time.monotonic() < begin_s + 120
        time.sleep(0.05)
    compilation = blake3._start_compilation(device)
    assert compilation is not None
    assert compilation[0].returncode == 0
    compilation[1].close()


@pytest.mark.usefixtures("_no_compilation")
def test_where_no_process_can_start_the_first_digest_compiles(monkeypatch):
    def refuse(_module):
        raise OSError("no process")

    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: name == "triton" or find_spec(name)
    )
    monkeypatch.setattr(blake3, "start_helper", refuse)
    assert blake3.are_kernels_ready(torch.device("cpu"))


@pytest.mark.usefixtures("_no_compilation")
def test_without_triton_there_is_nothing_to_wait_for(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "triton" else find_spec(name)
    )
    monkeypatch.setattr(blake3, "start_helper", None)
    assert blake3.are_kernels_ready(torch.device("cpu"))


def test_the_compiling_process_ends_with_its_trainer():
    """The end of the channel is the end of the trainer."""
    process, channel = start_helper("ckptfmt.adapters.torch.compile_kernels")
    channel.shut_down()
    assert process.wait(60) == 0
    channel.close()
