"""BLAKE3-256 of the blocks of a tensor's bytes, computed on the device that holds them.

Two programs that give the same bits: Triton kernels (`ckptfmt.adapters.torch.blake3_triton`) for CUDA devices, and
plain torch operations for any other. Bytes of the host are digested faster by `ckptfmt.digest`.

The words of BLAKE3 are int32 here: torch's uint32 can't add or shift. An int32 sum wraps as a sum modulo 2^32 does, and
the sign that a right shift pulls in is masked off. A state is 4 rows of 4 words, as in the specification; every word is
a row of `n` lanes, one for each chunk or parent that is compressed at once. Each of the four column steps of a round is
then one operation on 4 rows. So is each diagonal step: a rotated row is the same memory, looked at from another row on.
"""

from __future__ import annotations

import functools
import importlib.util
import warnings
from collections.abc import Callable
from typing import Final

import torch

from ckptfmt import limits
from ckptfmt.adapters.torch.blake3_trees import (
    CHUNK_END,
    CHUNK_NBYTES,
    CHUNK_START,
    IV,
    PARENT,
    PERMUTATION,
    ROOT,
    Forest,
    has_words,
)
from ckptfmt.digest import DIGEST_NBYTES
from ckptfmt.digest import block_digests as host_digests
from ckptfmt.errors import Code, err

_MESSAGE_NBYTES: Final = 64  # what one compression takes in
_MESSAGES: Final = CHUNK_NBYTES // _MESSAGE_NBYTES
_ROUNDS: Final = 7

#: Input that is digested at once, in whole blocks: its chaining values take a 32nd of this.
BATCH_NBYTES: Final = 256 << 20
#: Chunks that the torch program compresses at once; each takes `_Lanes.ROWS` words of memory. A processor's cache holds
#: the first number of them, and 48 MiB the second, by which a device is given few and large operations.
_HOST_LANES: Final = 8192
_DEVICE_LANES: Final = (48 << 20) // 256
#: How a program digests a batch: the digests go to its second argument, int32 words, a row of 8 for each block.
_Program = Callable[[torch.Tensor, torch.Tensor, Forest], None]


def block_digests(tensor_bytes: torch.Tensor, block_nbytes: int) -> torch.Tensor:
    """Return the BLAKE3-256 digests of the blocks of a tensor's bytes, computed where they are.

    Work is enqueued on the current stream, and nothing waits for it; but for the first call on a CUDA device, which
    compiles the kernels and compares what they give with the host's digests. Where they can't be compiled, or give
    anything else, the torch program is used in their place, and a RuntimeWarning says so. Neither program takes more
    than 64 MiB of memory beside its input and its result.

    Args:
        tensor_bytes: of any device, contiguous, at any address; read only.
        block_nbytes: a power of two from `BLOCK_NBYTES_MIN` to `BLOCK_NBYTES_MAX`.

    Shapes: uint8 [nbytes] -> uint8 [blocks, 32], on the same device; no bytes have no block, the last may be short.
    Raises: StateError(ARGUMENT).
    Spec: REQ-TEN-005, REQ-TEN-006.

    >>> block_digests(torch.zeros(4097, dtype=torch.uint8), 4096)[1, :4].tolist()
    [45, 58, 222, 223]
    """
    _check(tensor_bytes, block_nbytes)
    kernels = _find_kernels(tensor_bytes.device) if tensor_bytes.is_cuda else None
    return _digest(tensor_bytes.detach(), block_nbytes, _digest_by_torch if kernels is None else kernels)


def _check(tensor_bytes: torch.Tensor, block_nbytes: int) -> None:
    if tensor_bytes.dtype != torch.uint8 or tensor_bytes.dim() != 1 or not tensor_bytes.is_contiguous():
        told = f"{tensor_bytes.dtype}, shape {tuple(tensor_bytes.shape)}, strides {tensor_bytes.stride()}"
        raise err(Code.ARGUMENT, f"{told}: bytes one after the other are needed", where="tensor_bytes=")
    least, most = limits.BLOCK_NBYTES_MIN, limits.BLOCK_NBYTES_MAX
    if not least <= block_nbytes <= most or block_nbytes & (block_nbytes - 1):
        detail = f"{block_nbytes} isn't a power of two from {least} to {most}"
        raise err(Code.ARGUMENT, detail, where="block_nbytes=", requirement="REQ-TEN-005")


def _digest(content: torch.Tensor, block_nbytes: int, program: _Program) -> torch.Tensor:
    """Let a program digest as many whole blocks at a time as fit into a batch."""
    block_count = -(-content.numel() // block_nbytes)
    digests = torch.empty((block_count, DIGEST_NBYTES // 4), dtype=torch.int32, device=content.device)
    at_once = BATCH_NBYTES // block_nbytes
    for first in range(0, block_count, at_once):
        batch = content[first * block_nbytes : (first + at_once) * block_nbytes]
        program(batch, digests[first : first + at_once], Forest.of(batch.numel(), block_nbytes))
    return digests.view(torch.uint8)


# --- which of the two


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
    told = f"BLAKE3 by torch operations: the Triton kernels don't do on {device}: {reason}"
    warnings.warn(told, RuntimeWarning, stacklevel=3)
    return None


def _is_right(program: _Program, device: torch.device) -> bool:
    """Compare a program with the host's digests where kernels differ: alignment, short ends, few and many levels."""
    nbytes = (2 << 20) + 3 * CHUNK_NBYTES + 7
    content = (torch.arange(nbytes, dtype=torch.int32) * 40503 >> 8).to(torch.uint8)
    host, held = content.numpy().tobytes(), content.to(device)
    return all(
        _digest(held[begin:], block_nbytes, program).cpu().numpy().tobytes()
        == host_digests(memoryview(host)[begin:], block_nbytes)
        for begin in (0, 1)
        for block_nbytes in (limits.BLOCK_NBYTES_MIN, 4 << 20)
    )


# --- in torch operations


def _digest_by_torch(content: torch.Tensor, digests: torch.Tensor, forest: Forest) -> None:
    """Digest a batch. Memory: `_Lanes` and a 32nd of the batch."""
    at_once = min(forest.chunk_count, _DEVICE_LANES if content.device.type != "cpu" else _HOST_LANES)
    values = torch.empty((8, forest.chunk_count), dtype=torch.int32, device=content.device)
    lanes = _Lanes(at_once, content.device)
    for begin in range(0, forest.chunk_count, at_once):
        end = min(begin + at_once, forest.chunk_count)
        _digest_chunks(lanes.first(end - begin), content, values[:, begin:end], begin, forest)
    for level in forest.iter_levels():
        for begin in range(0, level.pairs, at_once):
            end = min(begin + at_once, level.pairs)
            _join_pairs(lanes.first(end - begin), values, begin, level.root_begin)
        if level.is_odd:
            values[:, level.pairs] = values[:, 2 * level.pairs]
    digests.copy_(values[:, : digests.shape[0]].t())


def _digest_chunks(lanes: _Lanes, content: torch.Tensor, values: torch.Tensor, begin: int, forest: Forest) -> None:
    """Write the chaining values of the chunks from `begin` on, one for each lane."""
    count = values.shape[1]
    part = content[begin * CHUNK_NBYTES : (begin + count) * CHUNK_NBYTES]
    whole = part.numel() // CHUNK_NBYTES
    # The short one at the end, if there is one, padded by zeros.
    short_nbytes = part.numel() - whole * CHUNK_NBYTES
    short = torch.zeros(CHUNK_NBYTES if short_nbytes else 0, dtype=torch.uint8, device=content.device)
    short[:short_nbytes] = part[whole * CHUNK_NBYTES :]
    is_root = begin <= forest.root_chunk < begin + count
    last_nbytes = short_nbytes or CHUNK_NBYTES

    values.copy_(lanes.iv.expand(8, count))
    first = begin % forest.block_chunks
    counters = torch.arange(first, first + count, dtype=torch.int32, device=content.device)
    counters &= forest.block_chunks - 1
    for step in range(_MESSAGES):
        at = step * _MESSAGE_NBYTES
        lanes.load(part[: whole * CHUNK_NBYTES], at, 0, whole)
        lanes.load(short, at, whole, count)
        lanes.counter.copy_(counters)
        flags = (CHUNK_START if step == 0 else 0) | (CHUNK_END if step == _MESSAGES - 1 else 0)
        lanes.nbytes.fill_(_MESSAGE_NBYTES)
        lanes.flags.fill_(flags)
        if at >= last_nbytes:  # the last lane is done
            kept = values[:, -1].clone()
            lanes.compress(values)
            values[:, -1] = kept
            continue
        if at + _MESSAGE_NBYTES >= last_nbytes:
            lanes.nbytes[-1:].fill_(last_nbytes - at)
            lanes.flags[-1:].fill_(flags | CHUNK_END | (ROOT if is_root else 0))
        lanes.compress(values)


def _join_pairs(lanes: _Lanes, values: torch.Tensor, begin: int, root_begin: int) -> None:
    """Replace the values of pairs by that of their parent, one pair for each lane; pair i goes to place i.

    A pair's place is never behind its own, and what is read lies in the lanes before anything is written.
    """
    end = begin + lanes.count
    lanes.message[:8].copy_(values[:, 2 * begin : 2 * end : 2])
    lanes.message[8:].copy_(values[:, 2 * begin + 1 : 2 * end : 2])
    lanes.counter.zero_()
    lanes.nbytes.fill_(_MESSAGE_NBYTES)
    lanes.flags.fill_(PARENT)
    if root_begin < end:
        lanes.flags[max(root_begin - begin, 0) :].fill_(PARENT | ROOT)
    parents = values[:, begin:end]
    parents.copy_(lanes.iv.expand(8, lanes.count))
    lanes.compress(parents)


def _signed(word: int) -> int:
    return word - (word >> 31 << 32)


def _host_word(word: int) -> torch.Tensor:
    """Return a scalar that operations on any device take, and needn't wrap first: that would take half their time."""
    return torch.tensor(_signed(word), dtype=torch.int32, device="cpu")


@functools.cache
def _rotation(bits: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return what turns a word to the right: the shift, a mask of what it leaves, and a factor for the rest."""
    return _host_word(bits), _host_word((1 << (32 - bits)) - 1), 1 << (32 - bits)


def _message_orders() -> list[list[int]]:
    """Return for each round which words of the message go to a, then b of columns, then a, then b of diagonals."""
    order, orders = list(range(16)), []
    for _ in range(_ROUNDS):
        orders.append([*order[0:8:2], *order[1:8:2], *order[8::2], *order[9::2]])
        order = [order[index] for index in PERMUTATION]
    return orders


@functools.cache
def _constants(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the IV as a column, and the orders of the message. Kept: what comes from the host is waited for."""
    iv = torch.tensor([_signed(word) for word in IV], dtype=torch.int32, device=device)
    return iv[:, None], torch.tensor(_message_orders(), dtype=torch.int32, device=device)


class _Lanes:
    """Memory for so many compressions at once.

    `b`, `c` and `d` have more rows than words: the words of a diagonal step follow each other from another row on,
    once those that come round have been copied.

    Attributes:
        message: of each lane, 16 rows.
        counter, nbytes, flags: of each lane, one row; `compress` changes them.
        iv: as a column, for all lanes alike.
    """

    ROWS: Final = 64

    def __init__(self, count: int, device: torch.device) -> None:
        self._set(torch.empty((self.ROWS, count), dtype=torch.int32, device=device), *_constants(device))

    def _set(self, rows: torch.Tensor, iv: torch.Tensor, orders: torch.Tensor) -> None:
        self._rows, self.iv, self._orders = rows, iv, orders
        self.count = rows.shape[1]
        self.message, self._ordered, self._a, self._spare, b, c, d, _ = rows.split([16, 16, 4, 4, 5, 6, 5, 8])
        self.counter, self.nbytes, self.flags = d[1], d[3], d[4]
        self._zero = d[2]
        words = self._ordered.split(4)
        self._columns = (b[:4], c[:4], d[1:], words[0], words[1])
        self._diagonals = (b[1:], c[2:], d[:4], words[2], words[3])
        self._round = ((b[4], b[0]), (c[4:], c[:2]), (d[0], d[4]))

    def first(self, count: int) -> _Lanes:
        """Return so many of these lanes."""
        if count == self.count:
            return self
        fewer = _Lanes.__new__(_Lanes)
        fewer._set(self._rows[:, :count], self.iv, self._orders)  # noqa: SLF001 - its own kind
        return fewer

    def load(self, content: torch.Tensor, at: int, begin: int, end: int) -> None:
        """Set the messages of lanes ``[begin, end)`` to the 64 bytes from `at` on of as many chunks."""
        if begin == end:
            return
        target, chunks = self.message[:, begin:end], content.view(end - begin, CHUNK_NBYTES)
        if has_words(content):
            target.copy_(chunks.view(torch.int32)[:, at // 4 : at // 4 + 16].t())
            return
        by_bytes = self._rows[:16].view(torch.uint8).unflatten(1, (-1, 4))[:, begin:end]
        by_bytes.copy_(chunks[:, at : at + _MESSAGE_NBYTES].unflatten(1, (16, 4)).transpose(0, 1))

    def compress(self, values: torch.Tensor) -> None:
        """Replace chaining values, 8 rows, by those behind the message."""
        b, c, d = self._columns[:3]
        self._a.copy_(values[:4])
        b.copy_(values[4:])
        c.copy_(self.iv[:4].expand(4, self.count))
        self._zero.zero_()
        for order in self._orders:
            torch.index_select(self.message, 0, order, out=self._ordered)
            self._mix(*self._columns)
            for extra, own in self._round:
                extra.copy_(own)
            self._mix(*self._diagonals)
            for extra, own in self._round:
                own.copy_(extra)
        torch.bitwise_xor(self._a, c, out=values[:4])
        torch.bitwise_xor(b, d, out=values[4:])

    def _mix(self, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> None:
        """Do the quarter rounds of all four columns, or of all four diagonals."""
        a = self._a
        a.add_(b).add_(x)
        self._turn(d.bitwise_xor_(a), 16)
        self._turn(b.bitwise_xor_(c.add_(d)), 12)
        a.add_(b).add_(y)
        self._turn(d.bitwise_xor_(a), 8)
        self._turn(b.bitwise_xor_(c.add_(d)), 7)

    def _turn(self, words: torch.Tensor, bits: int) -> None:
        shift, mask, factor = _rotation(bits)
        torch.bitwise_right_shift(words, shift, out=self._spare).bitwise_and_(mask)
        torch.add(self._spare, words, alpha=factor, out=words)
