"""Small checkpoints under valid digests that would cost whoever reads them gigabytes or minutes: builders, by name."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable
from typing import Any, Final

import msgpack
import numpy as np

from ckptfmt.digest import digest_bytes, digest_text
from ckptfmt.documents.canonical import dump_document
from ckptfmt.documents.index import Index
from ckptfmt.documents.manifest import FIELDS, MANIFEST_NAME
from ckptfmt.documents.msgpk import dump_msgpack
from ckptfmt.documents.packed import dump_packed, dump_strings
from ckptfmt.documents.sharding import Sharding, sharding_columns
from ckptfmt.documents.tree import dump_tree
from ckptfmt.layout.merge import summarise
from ckptfmt.store.memory import MemoryStore
from tests.builders import Forgery, save, small_files, snapshot, tensor, unpacked, unpacked_strings

#: Rows that cost a byte or two of a stream each at most, and hundreds of bytes as objects.
MANY: Final = 16_000_000

#: Stands for a list of so many empty strings, until its document is dumped: as objects they take
#: seconds.
_MANY_EMPTY: Final = "many empty strings"

#: How large documents get that are padded.
PADDED_NBYTES: Final = 1_000_000

#: How large a checkpoint of `LARGE_BOMBS` is at most.
LARGE_NBYTES: Final = 16 << 20


class Bomb(Forgery):
    """A forgery.

    Attributes:
        padded: which documents are padded: None for the index, numbers for parts.
        padded_nbytes: how large these get together.
        is_summed: whether the manifest's summary is made to fit.
        most_nbytes: how large all files are together at most.
    """

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(files)
        self.padded: tuple[int | None, ...] = ()
        self.padded_nbytes = PADDED_NBYTES
        self.is_summed = False
        self.most_nbytes = 1 << 20

    def size_of(self, document: int | None) -> int:
        """Return how large the stream of a document shall be at least."""
        return self.padded_nbytes // len(self.padded) if document in self.padded else 0


Edit = Callable[[Bomb], None]


def build(edit: Edit) -> dict[str, bytes]:
    """Return the files of a bomb: each document compressed as well as zlib can, digests and sizes made to fit."""
    forgery = Bomb(small_files())
    edit(forgery)
    files = dict(forgery.files)
    parts = [
        seal(part, nbytes=forgery.size_of(number)) for number, part in enumerate(forgery.parts)
    ]
    files |= {path: content for path, (content, _) in zip(forgery.part_paths, parts, strict=True)}
    index = copy.copy(forgery.index)
    if len(index["parts"]["digest"]) == len(parts) * 32:
        index["parts"] = {
            "nbytes": dump_packed([len(content) for content, _ in parts]),
            "digest": b"".join(digest for _, digest in parts),
        }
    content, digest = seal(index, nbytes=forgery.size_of(None))
    files[forgery.index_path] = content
    if forgery.is_summed:
        summary = summarise(Index.parse(content, where="", digest=digest))
        forgery.manifest["fields"] = {name: field.as_dict() for name, field in summary.items()}
    forgery.manifest["index"] |= {"nbytes": len(content), "digest": digest_text(digest)}
    files[MANIFEST_NAME] = dump_document(forgery.manifest)
    assert sum(map(len, files.values())) < forgery.most_nbytes
    return files


def seal(signed: dict[str, Any], *, nbytes: int = 0) -> tuple[bytes, bytes]:
    """Return the file of a document and its digest.

    Args:
        signed: what it says.
        nbytes: of the stream, which gets empty blocks until it has as many: limits that go by
            stored bytes are met so.
    """
    content = dump_msgpack(signed).replace(
        dump_msgpack(_MANY_EMPTY), _head(MANY - 1, b"\xa0") + b"\xa0" * (MANY - 1)
    )
    stream = zlib.compressobj(9, wbits=-15)
    deflated = stream.compress(content) + stream.flush(zlib.Z_FULL_FLUSH)
    deflated += b"\0\0\0\xff\xff" * ((nbytes - len(deflated)) // 5) + b"\1\0\0\xff\xff"
    stored = b"\x78\x01" + deflated + zlib.adler32(content).to_bytes(4, "big")
    digest = digest_bytes(stored)
    return dump_msgpack({"digest": digest, "nbytes": len(content), "signed": stored}), digest


def zeros(count: int = MANY) -> list[object]:
    """Return a packed array of zeros."""
    return [1, bytes(count)]


def empties(count: int = MANY) -> list[object]:
    """Return a column of empty strings."""
    return [zeros(count), ""]


def _fill(
    table: dict[str, Any], *keys: str, strings: tuple[str, ...] = ("name",), count: int = MANY
) -> None:
    table.update({key: zeros(count) for key in keys})
    table.update({key: empties(count) for key in strings})


def _leaves(forgery: Bomb) -> None:
    _fill(forgery.index["leaves"], "field", "scope", "part")


def _streams(forgery: Bomb) -> None:
    _fill(forgery.index["streams"], "scope", "part", strings=("name", "kind"))


def _aliases(forgery: Bomb) -> None:
    _fill(forgery.index["aliases"], "tensor")


def _tensors(forgery: Bomb) -> None:
    keys = ("field", "scope", "dtype", "ndim", "storage", "sharding")
    _fill(forgery.index["tensors"], *keys, count=MANY // 2)
    forgery.index["tensors"]["global_shape"] = zeros(0)


def _extents_of_tensors(forgery: Bomb) -> None:
    """Tensors of 32 dimensions each."""
    count = MANY // 40
    table = forgery.index["tensors"]
    _fill(table, "field", "scope", "dtype", "storage", "sharding", count=count)
    table["name"] = dump_strings([f"{number:x}" for number in range(count)])
    table["ndim"] = [1, bytes([32]) * count]
    table["global_shape"] = [1, bytes([1]) * (32 * count)]


def _files(forgery: Bomb) -> None:
    _fill(
        forgery.parts[0]["files"],
        "nbytes",
        "header_nbytes",
        strings=("name", "kind"),
        count=MANY // 32,
    )
    forgery.parts[0]["files"]["header_digest"] = bytes(32 * (MANY // 32))


def _list(document: str, member: str) -> Edit:
    def edit(forgery: Bomb) -> None:
        signed = forgery.index if document == "index" else forgery.parts[0]
        signed[member] = _MANY_EMPTY

    return edit


def _parts(forgery: Bomb) -> None:
    count = 1_000_000
    forgery.manifest["writer_count"] = forgery.index["writer_count"] = count
    forgery.index["parts"] = {"nbytes": zeros(count), "digest": bytes(32 * count)}


def _shardings(forgery: Bomb) -> None:
    _fill(forgery.index["shardings"], "ndim", "form", "box_count", strings=())


def _cuts(forgery: Bomb) -> None:
    """Grids of 32 dimensions."""
    count = 300_000
    table = forgery.index["shardings"]
    table["ndim"], table["form"], table["box_count"] = (
        [1, bytes([each]) * count] for each in (32, 1, 1)
    )
    table["grid_shape"] = table["extent"] = [1, bytes([1]) * (32 * count)]
    table["part"] = zeros(count)


def _boxes(forgery: Bomb) -> None:
    """Boxes of a scalar, in a part."""
    part = forgery.parts[0]
    counts = [0] * (len(part["tensors"]["ndim"][1]))
    counts[-1] = 9_000_000
    part["tensors"]["box_count"] = dump_packed(counts)
    part["boxes"] |= {"replica": [1, bytes([1]) * 9_000_000], "digest_count": zeros(9_000_000)}


def _extents(forgery: Bomb) -> None:
    keys = ("box", "block_begin", "block_count", "file", "gap_nbytes", "encoding")
    _fill(forgery.parts[0]["extents"], *keys, strings=("key",), count=MANY // 4)


def _corners(forgery: Bomb) -> None:
    """Boxes that are no grid, in as many dimensions as may be cut."""
    count, ndim = 250_000, 8
    table = forgery.index["shardings"]
    table["ndim"], table["form"], table["box_count"] = (
        [1, bytes([ndim])],
        zeros(1),
        dump_packed([count]),
    )
    table["grid_shape"] = table["extent"] = zeros(0)
    begin = np.zeros((ndim, count), np.int64)
    begin[-1] = 2
    table["begin"] = dump_packed(begin.reshape(-1))
    table["box_shape"] = [1, bytes([1]) * (ndim * count)]
    table["part"] = zeros(count)
    _reshape(forgery, (2,) * (ndim - 1) + (1 << 20,))


def _bricks(forgery: Bomb) -> None:
    """Boxes that are no grid and do tile, in as many dimensions as may be cut: ten million corners, a gigabyte."""
    count, ndim = 300, 8
    place = np.indices((2,) * (ndim - 1) + (count,)).reshape(ndim, -1).T.astype(np.int64)
    edges = np.arange(0, 4 * count + 1, 4)
    odd = edges + ((edges > 0) & (edges < edges[-1]))
    bounds = np.stack([edges, odd])
    begin, box_shape = place.copy(), np.ones_like(place)
    begin[:, -1] = bounds[place[:, 0], place[:, -1]]
    box_shape[:, -1] = bounds[place[:, 0], place[:, -1] + 1] - begin[:, -1]
    sharding = Sharding.boxes(begin, box_shape, np.zeros(len(begin), np.int64))
    assert sharding.extents is None
    forgery.index["shardings"] = sharding_columns([sharding], forgery.manifest["writer_count"])
    _reshape(forgery, (2,) * (ndim - 1) + (4 * count,))
    forgery.padded, forgery.is_summed = (None,), True


def _begins(forgery: Bomb) -> None:
    """Boxes of 32 dimensions that are no grid."""
    count, ndim = 300_000, 32
    _corners(forgery)
    table = forgery.index["shardings"]
    table["ndim"], table["box_count"] = [1, bytes([ndim])], dump_packed([count])
    begin = np.zeros((ndim, count), np.int64)
    begin[-1] = 2
    table["begin"] = dump_packed(begin.reshape(-1))
    table["box_shape"] = [1, bytes([1]) * (ndim * count)]
    table["part"] = zeros(count)
    _reshape(forgery, (2,) * (ndim - 1) + (1 << 20,))


def _reshape(forgery: Bomb, shape: tuple[int, ...]) -> None:
    """Give all tensors one shape, and the first sharding."""
    tensors = forgery.index["tensors"]
    count = len(tensors["sharding"][1])
    tensors["sharding"], tensors["ndim"] = zeros(count), [1, bytes([len(shape)]) * count]
    tensors["global_shape"] = dump_packed(shape * count)


def _values(content: bytes) -> Edit:
    """Return an edit that makes all leaves of the first part hold a tree."""

    def edit(forgery: Bomb) -> None:
        for part in forgery.parts:
            part["leaves"]["value"] = [content for _ in part["leaves"]["value"]]

    return edit


def _array(count: int, entry: bytes, tag: bytes = b"\xa1l") -> bytes:
    return _head(count, tag) + entry * count


def _head(count: int, tag: bytes) -> bytes:
    """Return how an array begins that has so many entries behind its tag."""
    head: bytes = msgpack.Packer().pack_array_header(count + 1)
    return head + tag


def _at_the_limit(content: bytes) -> Edit:
    """Return an edit that makes all leaves hold a tree, and pads the parts until they may."""

    def edit(forgery: Bomb) -> None:
        _values(content)(forgery)
        forgery.padded = (0, 1)

    return edit


def _names(count: int) -> list[object]:
    """Return a column of different names, sorted, that compress well."""
    return [
        [1, bytes([4]) * count],
        "".join(
            chr(97 + n // 17576)
            + chr(97 + n // 676 % 26)
            + chr(97 + n // 26 % 26)
            + chr(97 + n % 26)
            for n in range(count)
        ),
    ]


def _of_one_hash(tag: bytes, value: bytes) -> bytes:
    """Return a dict or a set of integers that are multiples of 2^61 - 1, of which Python's hash is 0."""
    trees = (
        b"\x92\xa1i\xc4\x0b" + (((1 << 61) - 1) * ((1 << 21) + n)).to_bytes(11, "little")
        for n in range(19_000)
    )
    return _head(19_000 * (1 + len(value)), b"\xa1" + tag) + b"".join(
        sorted(tree + value for tree in trees)
    )


def _nested(depth: int) -> bytes:
    """Return a frozenset of one frozenset, and so on; the innermost has many members."""
    members = b"".join(b"\xce" + (1 << 30 | n).to_bytes(4, "big") for n in range(50_000))
    return b"\x92\xa1z" * depth + _head(50_000, b"\xa1z") + members


def _nested_lists(depth: int) -> bytes:
    return b"\x92\xa1l" * depth + _array(300_000, b"\xc0")


def _cursor(sources: list[dict[str, object]], members: dict[object, object]) -> Edit:
    """Return an edit that makes a data cursor of the leaf of the field `data`."""
    position = len(sources) if "mixture" in members else 0
    tree: dict[object, object] = {
        "kind": "ckptfmt.data_cursor",
        "v": 1,
        "plan": {"unit": "sample", "global_batch": 1, "assign": "contig-v1", "tail": "carry"},
        "commit": {"step": 0, "global_pos": position},
        "order": {
            "alg": "feistel-v1",
            "seed": 0,
            "vector_check": {"pos": 0, "source": "0", "id": 0},
        },
        "sources": sources,
        "skips": [],
        "ledger": {"alg": "mix64-add4-v1", "count": 0, "set_digest": "0" * 64},
        "mixture": _mixture(len(sources)),
    }
    content = dump_tree({**tree, **members}, where="data")

    def edit(forgery: Bomb) -> None:
        for part in forgery.parts:
            fields = unpacked(part["leaves"]["field"])
            part["leaves"]["value"] = [
                content if FIELDS[field] == "data" else value
                for field, value in zip(fields, part["leaves"]["value"], strict=True)
            ]
        forgery.padded = (0, 1)

    return edit


def _many_sources(count: int) -> list[dict[str, object]]:
    return [{"id": f"{n}", "fingerprint": None, "n": 1 << 40, "pos": 0} for n in range(count)]


def _many_skips(count: int) -> list[dict[str, object]]:
    same = {"scope": "sample", "policy": "shift", "from_pos": 0, "reason": ""}
    return [{**same, "source": f"{n % 1000}", "ids": [n]} for n in range(count)]


def _mixture(count: int) -> dict[str, object]:
    counts = {f"{n}": int(n < 1000) for n in range(count)}
    return {
        "alg": "block-det-v1",
        "block": min(count, 1000),
        "seed": 0,
        "stages": [{"from_pos": 0, "counts": counts}],
    }


def _leaves_at_the_limit(forgery: Bomb) -> None:
    """As many leaves as may be, all of them different: nothing is wrong but that no part has them."""
    _fill(forgery.index["leaves"], "field", "scope", "part", strings=(), count=400_000)
    forgery.index["leaves"]["name"] = _names(400_000)
    forgery.padded, forgery.is_summed = (None,), True


def _tensors_at_the_limit(forgery: Bomb) -> None:
    count, table = 390_000, forgery.index["tensors"]
    _fill(table, "field", "scope", "dtype", "storage", "sharding", strings=(), count=count)
    table["name"], table["ndim"] = _names(count), [1, bytes([4]) * count]
    table["global_shape"] = dump_packed([300 + number % 256 for number in range(4 * count)])
    forgery.padded = (None,)


def _boxes_at_the_limit(forgery: Bomb) -> None:
    count, part = 400_000, forgery.parts[0]
    counts = [0] * (len(part["tensors"]["ndim"][1]))
    counts[-1] = count
    part["tensors"]["box_count"] = dump_packed(counts)
    part["boxes"] |= {
        "begin": zeros(0),
        "cut_shape": zeros(0),
        "replica": [1, b"\1" * count],
        "digest_count": zeros(count),
    }
    _fill(
        part["extents"],
        "box",
        "block_begin",
        "block_count",
        "file",
        "gap_nbytes",
        "encoding",
        strings=("key",),
        count=0,
    )
    forgery.padded = (0,)


def _corners_at_the_limit(forgery: Bomb) -> None:
    _corners(forgery)
    forgery.padded = (None,)


def _begins_at_the_limit(forgery: Bomb) -> None:
    _begins(forgery)
    forgery.padded = (None,)


def _columns_at_the_limit(forgery: Bomb) -> None:
    """Ten million boxes of a grid."""
    count, table = 10_000_000, forgery.index["shardings"]
    table["ndim"], table["form"], table["box_count"] = [1, b"\1"], [1, b"\1"], dump_packed([count])
    table["grid_shape"], table["extent"] = dump_packed([count]), [1, b"\1" * count]
    table["begin"] = table["box_shape"] = zeros(0)
    table["part"] = zeros(count)
    _reshape(forgery, (count,))
    forgery.padded = (None,)


def _sharing(sharding: Sharding, shapes: list[tuple[int, ...]]) -> Edit:
    """Return an edit that gives the checkpoint as many tensors as there are shapes, all of one sharding."""

    def edit(forgery: Bomb) -> None:
        count, table = len(shapes), forgery.index["tensors"]
        _fill(table, "field", "scope", "dtype", "storage", "sharding", strings=(), count=count)
        table["name"], table["ndim"] = _names(count), dump_packed([len(shape) for shape in shapes])
        table["global_shape"] = dump_packed([extent for shape in shapes for extent in shape])
        forgery.index["dtypes"], forgery.index["scopes"] = ["float32"], ["global"]
        for rows in (
            "leaves",
            "streams",
        ):  # which would refer to tensors that aren't there any more
            forgery.index[rows] = {
                key: empties(0) if isinstance(column[1], str) else zeros(0)
                for key, column in forgery.index[rows].items()
            }
        forgery.index["aliases"] = {"tensor": zeros(0), "name": empties(0)}
        forgery.index["shardings"] = sharding_columns([sharding], forgery.manifest["writer_count"])
        forgery.padded, forgery.is_summed = (None,), True

    return edit


def _many_tensors(count: int) -> Edit:
    """Return an edit that gives the checkpoint many tensors without elements, and one of them a long name."""

    def edit(forgery: Bomb) -> None:
        _sharing(Sharding.of(()), [(0,)] * count)(forgery)
        names = [*unpacked_strings(_names(count))[:-1], "~" * 4096]
        forgery.index["tensors"]["name"] = dump_strings(names)

    return edit


def _grid_of(count: int) -> Sharding:
    """Return a grid of many boxes of one element, all in the part of the last writer."""
    return Sharding.grid([np.ones(count, np.int64)], np.ones(count, np.int64))


def _without_elements(count: int) -> Sharding:
    """Return boxes without elements, which are no grid."""
    begin = np.zeros((count, 2), np.int64)
    begin[:, 1] = np.arange(count)
    return Sharding.boxes(begin, np.zeros((count, 2), np.int64), np.zeros(count, np.int64))


def _small_tensors(count: int) -> Edit:
    """Return an edit that puts a checkpoint of many tensors of a byte in its place: all is sound but the header."""

    def edit(forgery: Bomb) -> None:
        array = np.zeros(1, np.uint8)
        names = unpacked_strings(_names(count))
        store = MemoryStore()
        save(
            store,
            snapshot(
                *(tensor(name, array) for name in names), absent=dict.fromkeys(FIELDS, "none")
            ),
        )
        saved = Forgery(store.snapshot())
        (shard,) = (path for path in saved.files if path.endswith(".safetensors"))
        saved.files[shard] = bytes(64 + count)
        files = saved.parts[0]["files"]
        files["nbytes"], files["header_nbytes"] = dump_packed([64 + count]), dump_packed([64])
        files["header_digest"] = digest_bytes(bytes(64))
        vars(forgery).update(vars(saved))
        forgery.is_summed = True
        forgery.padded = (None, 0)

    return edit


def _many_files(file_count: int, tensor_count: int) -> Edit:
    """Return an edit that makes a checkpoint of small tensors, and of many sound files that hold none of them."""

    def edit(forgery: Bomb) -> None:
        _small_tensors(tensor_count)(forgery)
        header = (56).to_bytes(8, "little") + b"{}".ljust(56)
        (own,) = (path for path in forgery.files if path.endswith(".safetensors"))
        paths = [
            own.replace("weights", f"x{name}") for name in unpacked_strings(_names(file_count))
        ]
        forgery.files |= dict.fromkeys(paths, header)
        table = forgery.parts[0]["files"]
        (nbytes,) = unpacked(table["nbytes"])
        table["name"], table["kind"] = (
            dump_strings([own, *paths]),
            dump_strings(["safetensors"] * (1 + file_count)),
        )
        table["nbytes"] = dump_packed([nbytes, *[64] * file_count])
        table["header_nbytes"] = dump_packed([64] * (1 + file_count))
        table["header_digest"] += digest_bytes(header) * file_count
        forgery.padded_nbytes -= 64 * file_count

    return edit


def _values_of_many_leaves(content: bytes, count: int) -> Edit:
    """Return an edit that makes a part of several megabytes have many leaves, each with the same tree."""

    def edit(forgery: Bomb) -> None:
        for table in (forgery.parts[0]["leaves"], forgery.index["leaves"]):
            _fill(table, *(table.keys() & {"field", "scope", "part"}), strings=(), count=count)
            table["name"] = _names(count)
        forgery.parts[0]["leaves"]["value"] = [content] * count
        forgery.is_summed = True
        forgery.most_nbytes = LARGE_NBYTES
        forgery.padded, forgery.padded_nbytes = (0,), len(content) * count // 2 + (1 << 16)

    return edit


def _millions_of_tensors(count: int) -> Edit:
    """Return an edit that makes an index of several megabytes list millions of scalars."""

    def edit(forgery: Bomb) -> None:
        table = forgery.index["tensors"]
        _fill(
            table, "field", "scope", "dtype", "storage", "sharding", "ndim", strings=(), count=count
        )
        letters = np.arange(count)[:, None] // 26 ** np.arange(4, -1, -1) % 26 + ord("a")
        table["name"] = [[1, bytes([5]) * count], letters.astype(np.uint8).tobytes().decode()]
        table["global_shape"] = zeros(0)
        forgery.index["dtypes"] = forgery.index["dtypes"][:1]
        forgery.most_nbytes = LARGE_NBYTES
        forgery.padded, forgery.padded_nbytes = (None,), 2 * count + (1 << 16)

    return edit


def _broken_part(edit: Edit) -> Edit:
    """Return an edit that also makes the parts such as can't be read."""

    def broken(forgery: Bomb) -> None:
        edit(forgery)
        for part in forgery.parts:
            part["type"] = "index"

    return broken


BOMBS: Final[dict[str, Edit]] = {
    "leaves without names": _leaves,
    "streams without names": _streams,
    "aliases without names": _aliases,
    "tensors without names": _tensors,
    "tensors of 32 dimensions": _extents_of_tensors,
    "files without names": _files,
    "dtypes of the index": _list("index", "dtypes"),
    "scopes of the index": _list("index", "scopes"),
    "dtypes of a part": _list("part", "dtypes"),
    "encodings of a part": _list("part", "encodings"),
    "a million parts": _parts,
    "shardings without dimensions": _shardings,
    "cuts of grids": _cuts,
    "boxes of a scalar": _boxes,
    "extents without blocks": _extents,
    "corners of boxes": _corners,
    "boxes of 32 dimensions": _begins,
    "a tree of Nones": _values(_array(999_000, b"\xc0")),
    "a tree of empty lists": _values(_array(490_000, b"\x91\xa1l")),
    "a tree of one pair a dict": _values(_array(240_000, b"\x93\xa1d\xc0\xc0")),
    "padded: leaves": _leaves_at_the_limit,
    "padded: tensors": _tensors_at_the_limit,
    "padded: boxes of a scalar": _boxes_at_the_limit,
    "padded: corners of boxes": _corners_at_the_limit,
    "padded: bricks": _bricks,
    "padded: boxes of 32 dimensions": _begins_at_the_limit,
    "padded: boxes of a grid": _columns_at_the_limit,
    "padded: trees of Nones": _at_the_limit(_array(326_000, b"\xc0")),
    "padded: trees of empty lists": _at_the_limit(_array(108_000, b"\x91\xa1l")),
    "padded: trees of dicts": _at_the_limit(_array(64_000, b"\x93\xa1d\xc0\xc0")),
    "padded: dicts of keys of one hash": _at_the_limit(_of_one_hash(b"d", b"\xc0")),
    "padded: sets of members of one hash": _at_the_limit(_of_one_hash(b"s", b"")),
    "padded: frozensets in each other": _at_the_limit(_nested(30)),
    "padded: lists in each other": _at_the_limit(_nested_lists(30)),
    "padded: a cursor of many sources": _cursor(_many_sources(6000), {}),
    "padded: a cursor of many skips": _cursor(_many_sources(1000), {"skips": _many_skips(5000)}),
    "a cursor of an endless number": _cursor([], {"v": 1 << 400_000}),
    "a cursor of an endless name": _cursor([], {(1 << 400_000): None}),
    "padded: a grid that many tensors share": _sharing(_grid_of(250_000), [(250_000,)] * 3000),
    "padded: a large grid that many tensors share": _sharing(
        _grid_of(8_000_000), [(8_000_000,)] * 3000
    ),
    "padded: a grid that many tensors share, in no part": _broken_part(
        _sharing(_grid_of(250_000), [(250_000,)] * 3000)
    ),
    "padded: boxes without elements that many tensors share": _sharing(
        _without_elements(200_000), [(0, 200_000 + number) for number in range(60_000)]
    ),
    "padded: boxes without elements, in no part": _broken_part(
        _sharing(_without_elements(200_000), [(0, 200_000)] * 60_000)
    ),
    "padded: small tensors": _small_tensors(25_000),
    "padded: many files": _many_files(3000, 25_000),
    "padded: tensors and a long name": _many_tensors(240_000),
    "padded: a cursor of a mixture": _cursor(_many_sources(5000), {"mixture": _mixture(5000)}),
}

#: Documents of several megabytes, which pay for what they hold by their size, but for the last
#: limits.
LARGE_BOMBS: Final[dict[str, Edit]] = {
    "empty lists in one leaf after the other": _values_of_many_leaves(
        _array(499_000, b"\x91\xa1l"), 14
    ),
    "Nones in one leaf after the other": _values_of_many_leaves(_array(999_000, b"\xc0"), 14),
    "four million tensors": _millions_of_tensors(4_000_000),
}
