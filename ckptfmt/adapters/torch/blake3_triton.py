"""Compute BLAKE3-256 of blocks with Triton kernels: a lane for each chunk, then the trees.

Import this module only where Triton is installed. The design relies on register counts and
instructions reported by the compiler; no time was measured.

A warp compresses 32 chunks, 64 bytes of each at a time. It loads the data as a tile of 32 by 16
words, with four threads for each row of 64 bytes, so that whole sectors are read. The split of the
tile into columns exchanges words through shared memory. After the exchange, each thread has the
message of its own chunk in registers. A program has a single warp, so the barriers of the exchange
don't wait for other warps. The rounds are unrolled, and the order of the message words is resolved
at trace time. The steps of a chunk are a loop, because the fully unrolled code wouldn't fit into
the instruction cache.

Chaining values are stored as 8 rows, a row for each word, so that loads and stores of neighbouring
threads are adjacent. The trees take one launch or two. A program reduces 1024 values in place,
level by level, with a barrier between reads and writes.

Source: BLAKE3, one function, fast everywhere: J. O'Connor, J.-P. Aumasson, S. Neves, Z.
    Wilcox-O'Hearn, 2020.
"""

from __future__ import annotations

import dataclasses
from typing import Final

import torch
import triton
import triton.language as tl

CHUNK_NBYTES: Final = 1024
#: The number of chunks of a program, with a thread for each chunk.
CHUNK_LANES: Final = 32
CHUNK_WARPS: Final = 1
#: The limits of a tree program: the levels of a launch (2 to this power values), and the pairs
#: compressed at once.
GROUP_LEVELS: Final = 10
PAIR_LANES: Final = 64
PAIR_WARPS: Final = 2

# A kernel can read a global constant only if the constant is a `tl.constexpr`.
#: The first 32 bits of the fractional parts of the square roots of the first eight primes, as in
#: SHA-256.
_IV0, _IV1, _IV2, _IV3, _IV4, _IV5, _IV6, _IV7 = (
    tl.constexpr(word)
    for word in (
        0x6A09E667,
        0xBB67AE85,
        0x3C6EF372,
        0xA54FF53A,
        0x510E527F,
        0x9B05688C,
        0x1F83D9AB,
        0x5BE0CD19,
    )
)
_CHUNK_START, _CHUNK_END, _PARENT, _ROOT = (tl.constexpr(flag) for flag in (1, 2, 4, 8))


@dataclasses.dataclass(frozen=True, slots=True)
class Forest:
    """The trees of the blocks of a batch.

    Chunks are numbered over all blocks of the batch. Within a block the chunk counter begins at 0.

    All blocks except the last have a power of two chunks, so no pair of the batch's chunks crosses
    a block boundary. Pairing from the left gives BLAKE3's tree in the last block too; a test checks
    this.

    Attributes:
        nbytes: the size of the batch in bytes.
        chunk_count: the number of chunks in the batch. The last chunk may be short.
        block_chunks: the number of chunks in a full block.
        last_begin: the index of the last block's first chunk.
        level_count: the number of levels above the chunks in the largest tree.
    """

    nbytes: int
    chunk_count: int
    block_chunks: int
    last_begin: int
    level_count: int

    @classmethod
    def of(cls, nbytes: int, block_nbytes: int) -> Forest:
        """Return the trees of a batch of at least one byte."""
        chunk_count, block_chunks = -(-nbytes // CHUNK_NBYTES), block_nbytes // CHUNK_NBYTES
        return cls(
            nbytes=nbytes,
            chunk_count=chunk_count,
            block_chunks=block_chunks,
            last_begin=(chunk_count - 1) // block_chunks * block_chunks,
            level_count=(min(chunk_count, block_chunks) - 1).bit_length(),
        )

    @property
    def root_chunk(self) -> int:
        """The index of the chunk that is a whole block, else -1.

        Only the last chunk of a batch can be a whole block.
        """
        return self.last_begin if self.last_begin == self.chunk_count - 1 else -1


def digest_batch(content: torch.Tensor, digests: torch.Tensor, block_nbytes: int) -> None:
    """Enqueue the kernels that write the digests of a batch's blocks, on the current stream.

    Args:
        content: uint8, contiguous, at most `BATCH_NBYTES`, since kernels count bytes in 32 bits.
        digests: int32, contiguous, a row of 8 words for each block.
        block_nbytes: the block size. The last block may be shorter.

    Memory: a 32nd of the batch, returned to the current stream's pool.
    """
    forest = Forest.of(content.numel(), block_nbytes)
    values = torch.empty((8, forest.chunk_count), dtype=torch.int32, device=content.device)
    with torch.cuda.device_of(content):
        _launch_chunks(content, values, forest)
        _launch_trees(values, digests, forest)


def _launch_chunks(content: torch.Tensor, values: torch.Tensor, forest: Forest) -> None:
    """Launch the chunk kernels.

    Whole chunks are read by words. A short last chunk, or all chunks of an unaligned batch, are
    read by bytes.
    """
    has_words = content.data_ptr() % 4 == 0 and content.storage_offset() % 4 == 0
    whole = forest.nbytes // CHUNK_NBYTES if has_words else 0
    for begin, end in ((0, whole), (whole, forest.chunk_count)):
        if begin == end:
            continue
        by_bytes = end > whole
        held = content if by_bytes else content[: whole * CHUNK_NBYTES].view(torch.int32)
        _chunk_kernel[(triton.cdiv(end - begin, CHUNK_LANES),)](
            held,
            values,
            forest.chunk_count,
            begin,
            end,
            forest.nbytes,
            forest.block_chunks,
            forest.root_chunk,
            BY_BYTES=by_bytes,
            LANES=CHUNK_LANES,
            num_warps=CHUNK_WARPS,
        )


def _launch_trees(values: torch.Tensor, digests: torch.Tensor, forest: Forest) -> None:
    """Launch the tree kernels.

    Each launch reduces every group of values to a single value. The last launch, for the remaining
    levels, writes the digests.
    """
    spacing, count, last_begin, left = 1, forest.chunk_count, forest.last_begin, forest.level_count
    while True:
        levels = min(left, GROUP_LEVELS)
        is_final = levels == left
        _tree_kernel[(triton.cdiv(count, 1 << GROUP_LEVELS),)](
            values,
            digests,
            forest.chunk_count,
            spacing,
            count,
            last_begin,
            levels,
            1 << left,
            IS_FINAL=is_final,
            GROUP=1 << GROUP_LEVELS,
            LANES=PAIR_LANES,
            num_warps=PAIR_WARPS,
        )
        if is_final:
            return
        spacing, left = spacing << levels, left - levels
        count, last_begin = triton.cdiv(count, 1 << levels), last_begin >> levels


@triton.jit
def _turn(word, bits: tl.constexpr):
    return (word >> bits) | (word << (32 - bits))


@triton.jit
def _mix(a, b, c, d, x, y):
    a = a + b + x
    d = _turn(d ^ a, 16)
    c = c + d
    b = _turn(b ^ c, 12)
    a = a + b + y
    d = _turn(d ^ a, 8)
    c = c + d
    b = _turn(b ^ c, 7)
    return a, b, c, d


# Each line has the words of a single state.
# fmt: off
@triton.jit
def _compress(
    h0, h1, h2, h3, h4, h5, h6, h7,
    m0, m1, m2, m3, m4, m5, m6, m7, m8, m9, m10, m11, m12, m13, m14, m15,
    counter, nbytes, flags,
):
    zero = counter ^ counter
    v0, v1, v2, v3, v4, v5, v6, v7 = h0, h1, h2, h3, h4, h5, h6, h7
    v8, v9, v10, v11 = zero + _IV0, zero + _IV1, zero + _IV2, zero + _IV3
    v12, v13, v14, v15 = counter, zero, nbytes, flags
    for _ in tl.static_range(7):
        v0, v4, v8, v12 = _mix(v0, v4, v8, v12, m0, m1)
        v1, v5, v9, v13 = _mix(v1, v5, v9, v13, m2, m3)
        v2, v6, v10, v14 = _mix(v2, v6, v10, v14, m4, m5)
        v3, v7, v11, v15 = _mix(v3, v7, v11, v15, m6, m7)
        v0, v5, v10, v15 = _mix(v0, v5, v10, v15, m8, m9)
        v1, v6, v11, v12 = _mix(v1, v6, v11, v12, m10, m11)
        v2, v7, v8, v13 = _mix(v2, v7, v8, v13, m12, m13)
        v3, v4, v9, v14 = _mix(v3, v4, v9, v14, m14, m15)
        m0, m1, m2, m3, m4, m5, m6, m7, m8, m9, m10, m11, m12, m13, m14, m15 = \
            m2, m6, m3, m10, m7, m0, m4, m13, m1, m11, m12, m5, m9, m14, m15, m8
    return v0 ^ v8, v1 ^ v9, v2 ^ v10, v3 ^ v11, v4 ^ v12, v5 ^ v13, v6 ^ v14, v7 ^ v15
# fmt: on


@triton.jit
def _initial(zero):
    return (
        zero + _IV0,
        zero + _IV1,
        zero + _IV2,
        zero + _IV3,
        zero + _IV4,
        zero + _IV5,
        zero + _IV6,
        zero + _IV7,
    )


@triton.jit
def _load_words(at, stride, there):
    """Load 8 words that are `stride` apart, such as the words of a chaining value."""
    return (
        tl.load(at + 0 * stride, mask=there, other=0).to(tl.uint32, bitcast=True),
        tl.load(at + 1 * stride, mask=there, other=0).to(tl.uint32, bitcast=True),
        tl.load(at + 2 * stride, mask=there, other=0).to(tl.uint32, bitcast=True),
        tl.load(at + 3 * stride, mask=there, other=0).to(tl.uint32, bitcast=True),
        tl.load(at + 4 * stride, mask=there, other=0).to(tl.uint32, bitcast=True),
        tl.load(at + 5 * stride, mask=there, other=0).to(tl.uint32, bitcast=True),
        tl.load(at + 6 * stride, mask=there, other=0).to(tl.uint32, bitcast=True),
        tl.load(at + 7 * stride, mask=there, other=0).to(tl.uint32, bitcast=True),
    )


@triton.jit
def _store_words(at, stride, there, h0, h1, h2, h3, h4, h5, h6, h7):
    tl.store(at + 0 * stride, h0.to(tl.int32, bitcast=True), mask=there)
    tl.store(at + 1 * stride, h1.to(tl.int32, bitcast=True), mask=there)
    tl.store(at + 2 * stride, h2.to(tl.int32, bitcast=True), mask=there)
    tl.store(at + 3 * stride, h3.to(tl.int32, bitcast=True), mask=there)
    tl.store(at + 4 * stride, h4.to(tl.int32, bitcast=True), mask=there)
    tl.store(at + 5 * stride, h5.to(tl.int32, bitcast=True), mask=there)
    tl.store(at + 6 * stride, h6.to(tl.int32, bitcast=True), mask=there)
    tl.store(at + 7 * stride, h7.to(tl.int32, bitcast=True), mask=there)


@triton.jit
def _halve(words, LANES: tl.constexpr, COUNT: tl.constexpr):
    """Split rows of COUNT words into the words at even and at odd positions."""
    return tl.split(tl.reshape(words, (LANES, COUNT // 2, 2)))


@triton.jit
def _columns4(words, LANES: tl.constexpr):
    even, odd = _halve(words, LANES, 4)
    w0, w2 = tl.split(even)
    w1, w3 = tl.split(odd)
    return w0, w1, w2, w3


@triton.jit
def _columns16(words, LANES: tl.constexpr):
    """Split rows of 16 words into columns."""
    even, odd = _halve(words, LANES, 16)
    by0, by2 = _halve(even, LANES, 8)
    by1, by3 = _halve(odd, LANES, 8)
    m0, m4, m8, m12 = _columns4(by0, LANES)
    m1, m5, m9, m13 = _columns4(by1, LANES)
    m2, m6, m10, m14 = _columns4(by2, LANES)
    m3, m7, m11, m15 = _columns4(by3, LANES)
    return m0, m1, m2, m3, m4, m5, m6, m7, m8, m9, m10, m11, m12, m13, m14, m15


@triton.jit
def _load_by_bytes(content, at, nbytes):
    """Load words at any address. Bytes at `nbytes` and beyond are zero."""
    words = tl.load(content + at, mask=at < nbytes, other=0).to(tl.uint32)
    for place in tl.static_range(1, 4):
        byte = tl.load(content + at + place, mask=at + place < nbytes, other=0).to(tl.uint32)
        words = words | (byte << (8 * place))
    return words


@triton.jit(do_not_specialize=["stride", "begin", "end", "nbytes", "block_chunks", "root_chunk"])
def _chunk_kernel(
    content,
    values,
    stride,
    begin,
    end,
    nbytes,
    block_chunks,
    root_chunk,
    BY_BYTES: tl.constexpr,
    LANES: tl.constexpr,
):
    """Write the chaining values of the chunks ``[begin, end)``.

    All chunks are whole unless BY_BYTES is set.

    Args:
        content: words, or bytes if BY_BYTES is set.
        stride: the distance between two words of a value.
    """
    chunks = begin + tl.program_id(0) * LANES + tl.arange(0, LANES)
    there = chunks < end
    counter = (chunks & (block_chunks - 1)).to(tl.uint32)
    zero = counter ^ counter
    h0, h1, h2, h3, h4, h5, h6, h7 = _initial(zero)
    last_flags = tl.where(chunks == root_chunk, _CHUNK_END | _ROOT, _CHUNK_END)
    if BY_BYTES:
        left = tl.minimum(nbytes - chunks * 1024, 1024)
        last_step = (left - 1) // 64
    at = chunks[:, None] * 256 + tl.arange(0, 16)[None, :]
    for step in range(16):
        first_flags = tl.where(step == 0, _CHUNK_START, 0)
        if BY_BYTES:
            words = _load_by_bytes(content, (at + step * 16) * 4, nbytes)
            flags = first_flags + tl.where(last_step == step, last_flags, 0)
            message_nbytes = tl.minimum(left - step * 64, 64).to(tl.uint32)
        else:
            held = tl.load(content + at + step * 16, mask=there[:, None], other=0)
            words = held.to(tl.uint32, bitcast=True)
            flags = first_flags + tl.where(step == 15, last_flags, 0)
            message_nbytes = zero + 64
        m0, m1, m2, m3, m4, m5, m6, m7, m8, m9, m10, m11, m12, m13, m14, m15 = _columns16(
            words, LANES
        )
        # fmt: off
        n0, n1, n2, n3, n4, n5, n6, n7 = _compress(
            h0, h1, h2, h3, h4, h5, h6, h7,
            m0, m1, m2, m3, m4, m5, m6, m7, m8, m9, m10, m11, m12, m13, m14, m15,
            counter, message_nbytes, flags.to(tl.uint32),
        )
        # fmt: on
        if BY_BYTES:
            goes_on = step <= last_step
            h0, h1 = tl.where(goes_on, n0, h0), tl.where(goes_on, n1, h1)
            h2, h3 = tl.where(goes_on, n2, h2), tl.where(goes_on, n3, h3)
            h4, h5 = tl.where(goes_on, n4, h4), tl.where(goes_on, n5, h5)
            h6, h7 = tl.where(goes_on, n6, h6), tl.where(goes_on, n7, h7)
        else:
            h0, h1, h2, h3, h4, h5, h6, h7 = n0, n1, n2, n3, n4, n5, n6, n7
    _store_words(values + chunks, stride, there, h0, h1, h2, h3, h4, h5, h6, h7)


@triton.jit(
    do_not_specialize=["stride", "spacing", "count", "last_begin", "levels", "block_values"]
)
def _tree_kernel(
    values,
    digests,
    stride,
    spacing,
    count,
    last_begin,
    levels,
    block_values,
    IS_FINAL: tl.constexpr,
    GROUP: tl.constexpr,
    LANES: tl.constexpr,
):
    """Reduce each group of GROUP values by `levels` levels, in place.

    The results are stored at the begin of the group.

    Args:
        stride: the distance between two words of a value.
        spacing: the distance between two values.
        count: the number of values.
        last_begin: the index of the last block's first value.
        block_values: the number of values of each other block.
        IS_FINAL: whether these are the last levels, so that the results are digests.
    """
    begin = tl.program_id(0) * GROUP
    here = tl.minimum(count - begin, GROUP)
    last_here = last_begin - begin
    last_count = count - last_begin
    for _ in range(levels):
        pairs = (here + 1) // 2
        for first in range(0, pairs, LANES):
            lanes = first + tl.arange(0, LANES)
            there = lanes < pairs
            is_pair = lanes * 2 + 1 < here
            at = values + (begin + lanes * 2) * spacing
            m0, m1, m2, m3, m4, m5, m6, m7 = _load_words(at, stride, there)
            m8, m9, m10, m11, m12, m13, m14, m15 = _load_words(at + spacing, stride, is_pair)
            # Another warp may still read the place that this warp writes.
            tl.debug_barrier()
            is_root = tl.where(lanes * 2 >= last_here, last_count == 2, block_values == 2)
            flags = tl.where(is_root, _PARENT | _ROOT, _PARENT).to(tl.uint32)
            zero = flags ^ flags
            h0, h1, h2, h3, h4, h5, h6, h7 = _initial(zero)
            # fmt: off
            n0, n1, n2, n3, n4, n5, n6, n7 = _compress(
                h0, h1, h2, h3, h4, h5, h6, h7,
                m0, m1, m2, m3, m4, m5, m6, m7, m8, m9, m10, m11, m12, m13, m14, m15,
                zero, zero + 64, flags,
            )
            _store_words(
                values + (begin + lanes) * spacing, stride, there,
                tl.where(is_pair, n0, m0), tl.where(is_pair, n1, m1), tl.where(is_pair, n2, m2),
                tl.where(is_pair, n3, m3), tl.where(is_pair, n4, m4), tl.where(is_pair, n5, m5),
                tl.where(is_pair, n6, m6), tl.where(is_pair, n7, m7),
            )
            # fmt: on
        tl.debug_barrier()
        here = pairs
        last_here = last_here // 2
        last_count = (last_count + 1) // 2
        block_values = block_values // 2
    if IS_FINAL:
        for first in range(0, here, LANES):
            lanes = first + tl.arange(0, LANES)
            there = lanes < here
            h0, h1, h2, h3, h4, h5, h6, h7 = _load_words(
                values + (begin + lanes) * spacing, stride, there
            )
            _store_words(
                digests + ((begin >> levels) + lanes) * 8, 1, there, h0, h1, h2, h3, h4, h5, h6, h7
            )
