"""The limits of the format, with their units in the names.

``spec/core/90-limits.md`` holds the same table.

A reader refuses a value over a limit before it reads, allocates or descends (REQ-LIM-001).
"""

from __future__ import annotations

# A substitute for typing.TYPE_CHECKING: `ckptfmt --version` imports this module, and shouldn't wait
# for typing.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final

FORMAT_VERSION: Final = "1.0"

#: Largest JSON document, except the manifest.
JSON_NBYTES: Final = 1 << 20
#: Largest manifest, small enough to be readable at any scale.
MANIFEST_NBYTES: Final = (64 << 10) - 1
#: Deepest nesting of a JSON document.
JSON_DEPTH: Final = 16
#: Largest integer of a JSON document; larger integers are strings.
JSON_INTEGER: Final = (1 << 53) - 1
#: Longest string of a JSON document, in UTF-8.
JSON_STRING_NBYTES: Final = 4096

#: Largest index or part, as stored and as inflated: columns for 10^7 boxes and their digests.
MSGPACK_NBYTES: Final = 4 << 30
#: Largest content of an index or part, inflated, at any ratio.
INFLATED_NBYTES: Final = 64 << 10
#: Most bytes of a larger content for each byte of `signed`.
INFLATED_RATIO: Final = 32
#: Fewest bytes of `signed` for each row of the tables of an index or part, and for each value of
#: its msgpack.
ROW_NBYTES: Final = 2
#: Most extents of the tensors, boxes and shardings of an index or part for each byte of `signed`.
EXTENT_RATIO: Final = 2
#: Values of an index or part without bytes in `signed`.
FREE_ITEMS: Final = 1000
#: Most bytes of all trees of a part, at any ratio.
TREES_NBYTES: Final = 64 << 10
#: Most bytes of more trees for each byte of `signed`.
TREES_RATIO: Final = 2
#: Most values of all trees of a part together.
TREES_ITEMS: Final = 4_000_000
#: Deepest nesting of a msgpack document; trees inside leaves count on their own.
MSGPACK_DEPTH: Final = 32
#: Most values in a msgpack document or tree, counting scalars and containers.
MSGPACK_ITEMS: Final = 20_000_000
#: Most arrays and maps in an index or part, with rows in columns.
MSGPACK_CONTAINERS: Final = 1000
#: Largest tree of a leaf or stream.
TREE_NBYTES: Final = 256 << 20
#: Most values in a tree.
TREE_ITEMS: Final = 1_000_000
#: Least number of entries of a list of numbers, or of strings, that a tree holds as one array of
#: bytes.
COMPACT_ITEMS: Final = 16
#: Most keys of a dict, or members of a set, with equal hashes, where a reader counts them.
EQUAL_HASHES: Final = 64

#: Longest name of a tensor, leaf or stream, in UTF-8.
NAME_NBYTES: Final = 4096
#: Longest key of a box in a shard's header, in UTF-8: a name, followed by a number.
KEY_NBYTES: Final = 4160
#: Most dimensions of a tensor.
NDIM: Final = 32
#: Most dimensions in which a tensor is cut into pieces.
SPLIT_NDIM: Final = 8
#: Most corners of a tensor's boxes: boxes times two to the power of the number of cut dimensions.
CORNERS: Final = 1 << 26
#: Largest extent of a dimension, in elements.
DIM: Final = 1 << 48
#: Largest number of elements of a tensor, without zero-sized dimensions in the product.
ELEMENTS: Final = 1 << 60
#: Most tensors of a checkpoint.
TENSORS: Final = 2_000_000
#: Most boxes of a checkpoint.
BOXES: Final = 10_000_000
#: Most writers of a checkpoint.
WRITERS: Final = 1_000_000
#: Most references of a checkpoint.
REFERENCES: Final = 32

#: Most metrics of a checkpoint.
METRICS: Final = 64
#: Most tags of a checkpoint.
TAGS: Final = 32

#: Most positions in a block of a mixture of sources.
MIXTURE_BLOCK: Final = 1 << 16
#: Most samples of a source removed by skips from the order.
SKIPPED: Final = 1 << 20
#: Most open positions of a cursor: samples issued, but neither consumed nor discarded.
OPEN_POSITIONS: Final = 1 << 20

#: Default size of a block.
BLOCK_NBYTES: Final = 1 << 20
#: Smallest and largest size of a block for a writer to choose; a power of two.
BLOCK_NBYTES_MIN: Final = 4096
BLOCK_NBYTES_MAX: Final = 1 << 26

#: Largest JSON text of a safetensors header.
SHARD_HEADER_NBYTES: Final = 16 << 20
#: The data of a shard begins at a multiple of this number of bytes.
SHARD_ALIGN_NBYTES: Final = 64
