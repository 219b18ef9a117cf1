"""Every limit of the format, with its unit in the name. ``spec/90-limits.md`` holds the same table; a test compares.

A reader refuses what exceeds a limit before it reads, allocates or descends (REQ-LIM-001).
"""

from __future__ import annotations

TYPE_CHECKING = False  # as of typing: `ckptfmt --version` says the format's, and nothing else should take its time
if TYPE_CHECKING:
    from typing import Final

FORMAT_VERSION: Final = "0.10"

#: Largest JSON document, except the manifest.
JSON_NBYTES: Final = 1 << 20
#: Largest manifest: it stays readable at any scale.
MANIFEST_NBYTES: Final = (64 << 10) - 1
#: Deepest nesting of a JSON document.
JSON_DEPTH: Final = 16
#: Largest integer of a JSON document; larger ones are strings.
JSON_INTEGER: Final = (1 << 53) - 1
#: Longest string of a JSON document, in UTF-8.
JSON_STRING_NBYTES: Final = 4096

#: Largest index or part, as stored and as inflated: columns for 10^7 boxes and their digests.
MSGPACK_NBYTES: Final = 4 << 30
#: Largest content of an index or part, inflated, whatever its ratio.
INFLATED_NBYTES: Final = 64 << 10
#: Most bytes of a larger content for each byte of `signed`.
INFLATED_RATIO: Final = 32
#: Fewest bytes of `signed` for each row of the tables of an index or part, and for each value of its msgpack.
ROW_NBYTES: Final = 2
#: Most extents of the tensors, boxes and shardings of an index or part for each byte of `signed`.
EXTENT_RATIO: Final = 2
#: Values of an index or part that `signed` needn't have bytes for.
FREE_ITEMS: Final = 1000
#: Most bytes of all trees of a part, whatever their ratio.
TREES_NBYTES: Final = 64 << 10
#: Most bytes of more trees for each byte of `signed`.
TREES_RATIO: Final = 2
#: Deepest nesting of a msgpack document; trees inside leaves count on their own.
MSGPACK_DEPTH: Final = 32
#: Most values in one msgpack document or tree, each scalar and each container counting as one.
MSGPACK_ITEMS: Final = 20_000_000
#: Most arrays and maps in one index or part, whose rows are in columns.
MSGPACK_CONTAINERS: Final = 1000
#: Largest tree of one leaf or stream.
TREE_NBYTES: Final = 256 << 20
#: Most values in one tree.
TREE_ITEMS: Final = 1_000_000
#: From how many entries on a list of numbers, or of strings, is one array of bytes in a tree.
COMPACT_ITEMS: Final = 16
#: Most keys of a dict, or members of a set, whose hashes are equal, where a reader counts them.
EQUAL_HASHES: Final = 64

#: Longest name of a tensor, leaf or stream, in UTF-8.
NAME_NBYTES: Final = 4096
#: Longest key of a box in a shard's header, in UTF-8: a name, and a number behind it.
KEY_NBYTES: Final = 4160
#: Most dimensions of a tensor.
NDIM: Final = 32
#: Most dimensions of one tensor that are cut into pieces.
SPLIT_NDIM: Final = 8
#: Most corners of one tensor's boxes: boxes times two to the power of the dimensions that are cut.
CORNERS: Final = 1 << 26
#: Largest extent of one dimension, in elements.
DIM: Final = 1 << 48
#: Largest number of elements of a tensor, zero-sized dimensions left out of the product.
ELEMENTS: Final = 1 << 60
#: Most boxes of one checkpoint.
BOXES: Final = 10_000_000
#: Most writers of one checkpoint.
WRITERS: Final = 1_000_000
#: Most references of one checkpoint.
REFERENCES: Final = 32

#: Most metrics of one checkpoint.
METRICS: Final = 64
#: Most tags of one checkpoint.
TAGS: Final = 32

#: Most positions in a block of a mixture of sources.
MIXTURE_BLOCK: Final = 1 << 16
#: Most samples of one source that skips remove from its order.
SKIPPED: Final = 1 << 20

#: Size of a block if the writer doesn't choose another.
BLOCK_NBYTES: Final = 1 << 20
#: Smallest and largest size of a block that a writer may choose; a power of two.
BLOCK_NBYTES_MIN: Final = 4096
BLOCK_NBYTES_MAX: Final = 1 << 26

#: Largest JSON text of a safetensors header.
SHARD_HEADER_NBYTES: Final = 16 << 20
#: Where the data of a shard begins: a multiple of this.
SHARD_ALIGN_NBYTES: Final = 64
