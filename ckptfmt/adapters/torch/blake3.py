"""BLAKE3-256 of the blocks of a tensor's bytes, computed on the CUDA device that holds them.

The program are Triton kernels (`ckptfmt.adapters.torch.blake3_triton`). Where there are none, nothing is digested on
the device: torch's own operations would move nearly 300 bytes of its memory for each byte, and take longer than the
copy to the host that a digest may spare.
"""

from __future__ import annotations

import functools
import importlib.util
import warnings
from collections.abc import Callable
from typing import Final

import torch

from ckptfmt import limits
from ckptfmt.digest import DIGEST_NBYTES
from ckptfmt.digest import block_digests as host_digests
from ckptfmt.errors import Code, err

#: Input that is digested at once, in whole blocks: its chaining values take a 32nd of this.
BATCH_NBYTES: Final = 256 << 20
#: How a program digests blocks of a size: to its second argument, int32 words, a row of 8 for each block.
_Program = Callable[[torch.Tensor, torch.Tensor, int], None]


def block_digests(tensor_bytes: torch.Tensor, block_nbytes: int) -> torch.Tensor | None:
    """Return the BLAKE3-256 digests of the blocks of a tensor's bytes, computed where they are.

    Work is enqueued on the current stream, and nothing waits for it; but for the first call on a device, which compiles
    the kernels and compares what they give with the host's digests. Where they can't be compiled, or give anything
    else, a RuntimeWarning says so once. They take no more than 8 MiB of memory beside their input and their result.

    Args:
        tensor_bytes: of a CUDA device, contiguous, at any address; read only.
        block_nbytes: a power of two from `BLOCK_NBYTES_MIN` to `BLOCK_NBYTES_MAX`.

    Shapes: uint8 [nbytes] -> uint8 [blocks, 32], on the same device; no bytes have no block, the last may be short.
    Returns: None where there are no kernels that do.
    Raises: StateError(ARGUMENT).
    Spec: REQ-TEN-005, REQ-TEN-006.
    """
    if tensor_bytes.dtype != torch.uint8 or tensor_bytes.dim() != 1 or not tensor_bytes.is_contiguous():
        told = f"{tensor_bytes.dtype}, shape {tuple(tensor_bytes.shape)}, strides {tensor_bytes.stride()}"
        raise err(Code.ARGUMENT, f"{told}: a contiguous vector of uint8 is needed", where="tensor_bytes=")
    least, most = limits.BLOCK_NBYTES_MIN, limits.BLOCK_NBYTES_MAX
    if not least <= block_nbytes <= most or block_nbytes & (block_nbytes - 1):
        detail = f"{block_nbytes} isn't a power of two from {least} to {most}"
        raise err(Code.ARGUMENT, detail, where="block_nbytes=", requirement="REQ-TEN-005")
    kernels = _find_kernels(tensor_bytes.device)
    return None if kernels is None else _digest(tensor_bytes.detach(), block_nbytes, kernels)


def _digest(content: torch.Tensor, block_nbytes: int, program: _Program) -> torch.Tensor:
    """Let a program digest as many whole blocks at a time as fit into a batch."""
    block_count = -(-content.numel() // block_nbytes)
    digests = torch.empty((block_count, DIGEST_NBYTES // 4), dtype=torch.int32, device=content.device)
    at_once = BATCH_NBYTES // block_nbytes
    for first in range(0, block_count, at_once):
        batch = content[first * block_nbytes : (first + at_once) * block_nbytes]
        program(batch, digests[first : first + at_once], block_nbytes)
    return digests.view(torch.uint8)


@functools.cache
def _find_kernels(device: torch.device) -> _Program | None:
    """Return the kernels, if there are any and they are right on this device."""
    if importlib.util.find_spec("triton") is None:
        return None
    try:
        from ckptfmt.adapters.torch import blake3_triton  # noqa: PLC0415 - triton comes only with torch's CUDA builds

        is_right = _is_right(blake3_triton.digest_batch, device)
    except Exception as error:  # noqa: BLE001 - a kernel is compiled by an LLVM, an assembler and a C compiler
        reason = f"{type(error).__name__}: {error}"
    else:
        if is_right:
            return blake3_triton.digest_batch
        reason = "they give other digests than the host"
    told = f"no digests on {device}, so that saves copy what hasn't changed, too: the Triton kernels don't do: {reason}"
    warnings.warn(told, RuntimeWarning, stacklevel=3)
    return None


def _is_right(program: _Program, device: torch.device) -> bool:
    """Compare a program with the host's digests where kernels differ: alignment, short ends, few and many levels."""
    nbytes = (2 << 20) + 3 * 1024 + 7
    content = (torch.arange(nbytes, dtype=torch.int32) * 40503 >> 8).to(torch.uint8)
    host, held = content.numpy().tobytes(), content.to(device)
    return all(
        _digest(held[begin:], block_nbytes, program).cpu().numpy().tobytes()
        == host_digests(memoryview(host)[begin:], block_nbytes)
        for begin in (0, 1)
        for block_nbytes in (limits.BLOCK_NBYTES_MIN, 4 << 20)
    )
