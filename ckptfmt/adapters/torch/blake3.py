"""Compute BLAKE3-256 digests of the blocks of a tensor's bytes, on the tensor's CUDA device.

The program consists of Triton kernels (`ckptfmt.adapters.torch.blake3_triton`). Without Triton no
digest is computed on the device: torch's own operations would move nearly 300 bytes of device
memory for each byte, and would take longer than the copy to the host that a digest can avoid.
"""

from __future__ import annotations

import functools
import importlib.util
import subprocess
import warnings
from collections.abc import Callable
from typing import Final

import torch

from ckptfmt import limits
from ckptfmt.digest import DIGEST_NBYTES
from ckptfmt.digest import block_digests as host_digests
from ckptfmt.errors import Code, err
from ckptfmt.write.helper_process import Channel, start_helper

#: The size of a batch in bytes, a multiple of the block size. The chaining values take a 32nd of
#: this size.
BATCH_NBYTES: Final = 256 << 20
#: A program that digests the blocks of its first argument. It writes a row of 8 int32 words for
#: each block to its second argument. The third argument is the block size.
_Program = Callable[[torch.Tensor, torch.Tensor, int], None]


#: The devices whose compilation is over.
_READY: Final[set[torch.device]] = set()


def block_digests(tensor_bytes: torch.Tensor, block_nbytes: int) -> torch.Tensor | None:
    """Return the BLAKE3-256 digests of the blocks of a tensor's bytes, computed on the device.

    The work is enqueued on the current stream without waiting. Only the first call on a device
    waits: the kernels are compiled, and their results are compared with the host's digests. If the
    compilation fails, or a digest differs, a RuntimeWarning is issued once. The kernels take at
    most 8 MiB of memory in addition to input and result.

    Args:
        tensor_bytes: a contiguous tensor on a CUDA device, at any address, which is only read.
        block_nbytes: a power of two from `BLOCK_NBYTES_MIN` to `BLOCK_NBYTES_MAX`.

    Shapes: uint8 [nbytes] -> uint8 [blocks, 32], on the same device. Zero bytes have zero blocks,
        and the last block may be short.
    Returns: None if no working kernels are available.
    Raises: StateError(ARGUMENT).
    Spec: REQ-TEN-005, REQ-TEN-006.
    """
    if (
        tensor_bytes.dtype != torch.uint8
        or tensor_bytes.dim() != 1
        or not tensor_bytes.is_contiguous()
    ):
        told = (
            f"{tensor_bytes.dtype}, shape {tuple(tensor_bytes.shape)}, strides"
            f" {tensor_bytes.stride()}"
        )
        raise err(
            Code.ARGUMENT, f"{told}: a contiguous vector of uint8 is needed", where="tensor_bytes="
        )
    least = limits.BLOCK_NBYTES_MIN
    most = limits.BLOCK_NBYTES_MAX
    if not least <= block_nbytes <= most or block_nbytes & (block_nbytes - 1):
        detail = f"{block_nbytes} isn't a power of two from {least} to {most}"
        raise err(Code.ARGUMENT, detail, where="block_nbytes=", requirement="REQ-TEN-005")
    kernels = find_kernels(tensor_bytes.device)
    return None if kernels is None else _digest(tensor_bytes.detach(), block_nbytes, kernels)


def _digest(content: torch.Tensor, block_nbytes: int, program: _Program) -> torch.Tensor:
    """Digest the content in batches of whole blocks."""
    block_count = -(-content.numel() // block_nbytes)
    digests = torch.empty(
        (block_count, DIGEST_NBYTES // 4), dtype=torch.int32, device=content.device
    )
    at_once = BATCH_NBYTES // block_nbytes
    for first in range(0, block_count, at_once):
        batch = content[first * block_nbytes : (first + at_once) * block_nbytes]
        program(batch, digests[first : first + at_once], block_nbytes)
    return digests.view(torch.uint8)


def are_kernels_ready(device: torch.device) -> bool:
    """Return whether `block_digests` on a device needs no compilation any more.

    The first call starts the compilation, in a process of its own. The kernels are also ready if
    there are none, or if that process failed: then the next digest compiles, or fails.
    """
    if device in _READY or importlib.util.find_spec("triton") is None:
        return True
    compilation = _start_compilation(device)
    if compilation is not None and compilation[0].poll() is None:
        return False
    _READY.add(device)
    return True


@functools.cache
def _start_compilation(device: torch.device) -> tuple[subprocess.Popen[bytes], Channel] | None:
    """Start a process that compiles the kernels for a device; return None if none can start."""
    try:
        process, channel = start_helper("ckptfmt.adapters.torch.compile_kernels")
        channel.send({"device": str(device)})
    except OSError:
        return None
    return process, channel


@functools.cache
def find_kernels(device: torch.device) -> _Program | None:
    """Return the kernels, or None if they are missing or give wrong digests on this device."""
    if importlib.util.find_spec("triton") is None:
        return None
    try:
        from ckptfmt.adapters.torch import blake3_triton  # noqa: PLC0415

        is_right = _is_right(blake3_triton.digest_batch, device)
    except Exception as error:  # noqa: BLE001
        reason = f"{type(error).__name__}: {error}"
    else:
        if is_right:
            return blake3_triton.digest_batch
        reason = "they give other digests than the host"
    told = (
        f"no digests on {device}, so that saves also copy unchanged blocks: the Triton"
        f" kernels don't do: {reason}"
    )
    warnings.warn(told, RuntimeWarning, stacklevel=3)
    return None


def _is_right(program: _Program, device: torch.device) -> bool:
    """Return whether a program's digests equal the host's.

    The test covers different alignments, short ends, and trees of few and many levels.
    """
    nbytes = (2 << 20) + 3 * 1024 + 7
    content = (torch.arange(nbytes, dtype=torch.int32) * 40503 >> 8).to(torch.uint8)
    host = content.numpy().tobytes()
    held = content.to(device)
    return all(
        _digest(held[begin:], block_nbytes, program).cpu().numpy().tobytes()
        == host_digests(memoryview(host)[begin:], block_nbytes)
        for begin in (0, 1)
        for block_nbytes in (limits.BLOCK_NBYTES_MIN, 4 << 20)
    )
