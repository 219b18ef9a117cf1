"""The suite's own reader of full checkpoints, which verifies every written byte.

The reader is written from the specification alone, independently of any implementation.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from blake3 import blake3

from ckptfmt_conformance import msgpk, tagged

__all__ = [
    "DTYPES",
    "ReadbackError",
    "canonical",
    "entries_of",
    "read_back",
    "read_contents",
    "rows",
    "unfold",
]

FIELDS: Final = ("weights", "optimizer", "rng", "data", "config", "topology", "provenance")
ORIGIN: Final = ("run_id", "launch", "nonce", "step", "attempt", "writer_count", "block_nbytes")
#: Size of an element in bytes, and the tag in a shard's header; spec/core/50-tensors.md.
DTYPES: Final[dict[str, tuple[int, str]]] = {
    "bool": (1, "BOOL"), "uint8": (1, "U8"), "int8": (1, "I8"),
    "uint16": (2, "U16"), "int16": (2, "I16"), "uint32": (4, "U32"), "int32": (4, "I32"),
    "uint64": (8, "U64"), "int64": (8, "I64"),
    "float16": (2, "F16"), "bfloat16": (2, "BF16"), "float32": (4, "F32"), "float64": (8, "F64"),
    "complex64": (8, "C64"), "float8_e4m3fn": (1, "F8_E4M3"), "float8_e5m2": (1, "F8_E5M2"),
    "float8_e8m0fnu": (1, "F8_E8M0"), "float8_e4m3fnuz": (1, "F8_E4M3FNUZ"),
    "float8_e5m2fnuz": (1, "F8_E5M2FNUZ"), "complex128": (16, ""), "complex32": (4, ""),
    "float4_e2m1fn_x2": (1, ""),
}  # fmt: skip
#: Columns with one entry per dimension of each row.
_FLATTENED: Final = frozenset({"global_shape", "begin", "cut_shape"})

Shape = tuple[int, ...]
Tables = dict[str, Any]
Row = dict[str, Any]


class ReadbackError(Exception):
    """The directory isn't a checkpoint of the format. The text names the place and the reason."""


def _require(condition: object, message: str) -> None:
    if not condition:
        raise ReadbackError(message)


def read_contents(root: Path) -> dict[str, tuple[int, Shape, bytes]]:
    """Return element size in bytes, shape and content of each tensor of a full checkpoint.

    Raises: ReadbackError.
    """
    found: dict[str, tuple[int, Shape, bytes]] = {}
    read_back(root, found)
    return found


def read_back(
    root: Path, contents: dict[str, tuple[int, Shape, bytes]] | None = None
) -> dict[str, Any]:
    """Return the content of a full checkpoint in the form of an adapter's result.

    Args:
        contents: receives element size, shape and bytes of each tensor, if not None.

    Returns: ``step``, ``tensors`` with dtype, shape, digest and first bytes, and ``leaves``, as
    tagged JSON.

    Raises: ReadbackError.
    """
    try:
        return _read_back(root, {} if contents is None else contents)
    except (
        LookupError,
        OSError,
        TypeError,
        ValueError,
        AttributeError,
        RecursionError,
        zlib.error,
    ) as error:
        raise ReadbackError(f"{type(error).__name__}: {error}") from error


def _read_back(root: Path, contents: dict[str, tuple[int, Shape, bytes]]) -> dict[str, Any]:
    manifest = _read_manifest(root / "manifest.json")
    origin = {name: manifest[name] for name in ORIGIN}
    named = manifest["index"]
    _require(named["name"] == f"index-{manifest['attempt']}.msgpack", "the index has a wrong name")
    index = _read_document(
        root / named["name"],
        named["nbytes"],
        bytes.fromhex(named["digest"].removeprefix("blake3:")),
    )
    _check_members(named["name"], index, {**origin, "type": "index"})
    entries = rows(index, "parts")
    _require(len(entries) == manifest["writer_count"], "the index hasn't a part of each writer")
    parts = [_Part(root, number, entry, manifest) for number, entry in enumerate(entries)]
    shardings = list(_iter_shardings(index))
    tensors: dict[str, Any] = {}
    for row in rows(index, "tensors"):
        content = _assemble(row, shardings[row["sharding"]], parts)
        contents[_key_of(row)] = DTYPES[row["dtype"]][0], tuple(row["global_shape"]), content
        tensors[_key_of(row)] = {
            "dtype": row["dtype"],
            "shape": list(row["global_shape"]),
            "blake3": blake3(content).hexdigest(),
            "first16": content[:16].hex(),
        }
    leaves = {
        _key_of(row): parts[row["part"]].leaves[_key_of(row)] for row in rows(index, "leaves")
    }
    _check_summaries(manifest, index)
    return {"step": manifest["step"], "tensors": tensors, "leaves": leaves}


def _read_manifest(path: Path) -> dict[str, Any]:
    raw = path.read_bytes()
    _require(len(raw) <= 65536, f"{path.name} has {len(raw)} bytes")
    document = json.loads(raw)
    _require(document.keys() == {"digest", "signed"}, f"{path.name} isn't an envelope")
    signed = document["signed"]
    content = canonical(signed).encode()
    _require(
        document["digest"] == f"blake3:{blake3(content).hexdigest()}",
        f"{path.name}: a wrong digest",
    )
    _require(raw == canonical(document).encode(), f"{path.name} isn't in its canonical form")
    _check_members(path.name, signed, {"type": "manifest", "profile": "full", "references": []})
    _require(signed["features"]["reader"] == [], f"{path.name} needs features of readers")
    _require(signed["fields"].keys() == set(FIELDS), f"{path.name} doesn't have the seven fields")
    return dict(signed)


def canonical(value: object) -> str:
    """Return the canonical JSON text.

    Members are sorted, white space is omitted, and only quote and backslash are escaped.
    """
    if isinstance(value, dict):
        return (
            "{"
            + ",".join(f"{canonical(name)}:{canonical(value[name])}" for name in sorted(value))
            + "}"
        )
    if isinstance(value, list):
        return "[" + ",".join(map(canonical, value)) + "]"
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return json.dumps(value)


def _check_members(where: str, document: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    for name, value in expected.items():
        _require(
            document[name] == value, f"{where}: {name} is {document[name]!r} instead of {value!r}"
        )


def _check_summaries(manifest: Mapping[str, Any], index: Tables) -> None:
    """Check that the manifest's summary of each field agrees with the index."""
    tables = {table: rows(index, table) for table in ("tensors", "leaves", "streams")}
    for number, field in enumerate(FIELDS):
        own = [row for row in tables["tensors"] if row["field"] == number]
        found = {
            "state": "present",
            "tensor_count": len(own),
            "nbytes": sum(DTYPES[row["dtype"]][0] * math.prod(row["global_shape"]) for row in own),
            "stream_count": len(tables["streams"]) if field == "rng" else 0,
            "leaf_count": sum(row["field"] == number for row in tables["leaves"]),
        }
        if field in index["absent"]:
            found = {"state": "absent", "reason": index["absent"][field]}
        said = manifest["fields"][field]
        _require(
            said == found, f"manifest.json: of {field} it says {said}, and the index has {found}"
        )


# --- documents of tables --------------------------------------------------------------------------


def _read_exactly(path: Path, nbytes: int) -> bytes:
    _require(path.is_file() and not path.is_symlink(), f"{path.name} isn't there, or isn't a file")
    raw = path.read_bytes()
    _require(len(raw) == nbytes, f"{path.name} has {len(raw)} bytes instead of {nbytes}")
    return raw


def _read_document(path: Path, nbytes: int, digest: bytes) -> Tables:
    envelope = msgpk.parse(_read_exactly(path, nbytes))
    _require(envelope.keys() == {"digest", "nbytes", "signed"}, f"{path.name} isn't an envelope")
    _require(
        envelope["digest"] == digest == blake3(envelope["signed"]).digest(),
        f"{path.name}: a wrong digest",
    )
    stream = zlib.decompressobj()
    inflated = stream.decompress(envelope["signed"], envelope["nbytes"] + 1)
    is_whole = stream.eof and not stream.unused_data and len(inflated) == envelope["nbytes"]
    _require(is_whole, f"{path.name}: not one whole zlib stream of {envelope['nbytes']} bytes")
    document = msgpk.parse(inflated)
    _require(isinstance(document, dict), f"{path.name} doesn't hold a map")
    return dict(document)


def entries_of(value: Any) -> list[Any]:
    """Return the entries of a column: plain, packed, strings, or digests."""
    if isinstance(value, bytes):
        _require(len(value) % 32 == 0, "a column of digests of a wrong length")
        return [value[at : at + 32] for at in range(0, len(value), 32)]
    if len(value) == 2 and isinstance(value[0], int) and isinstance(value[1], bytes):
        return _unpack(*value)
    if len(value) == 2 and isinstance(value[0], list) and isinstance(value[1], str):
        text = value[1].encode()
        ends = [0, *itertools.accumulate(_unpack(*value[0]))]
        _require(ends[-1] == len(text), "a column of strings of a wrong length")
        return [text[begin:end].decode() for begin, end in itertools.pairwise(ends)]
    return list(value)


def _unpack(width: int, planes: bytes) -> list[int]:
    _require(width in (1, 2, 4, 8) and len(planes) % width == 0, "a packed array of a wrong width")
    count = len(planes) // width
    values = [int.from_bytes(planes[at::count], "little") for at in range(count)]
    narrowest = next(n for n in (1, 2, 4, 8) if max(values, default=0) < 1 << 8 * n)
    _require(width == narrowest, "a packed array that is wider than it needs to be")
    return values


def unfold(values: Iterable[int]) -> list[int]:
    """Return the signed integers encoded by even and odd numbers."""
    return [-(value + 1) // 2 if value % 2 else value // 2 for value in values]


def rows(document: Tables, name: str, ndims: Sequence[int] = ()) -> list[Row]:
    """Return the rows of a table, with positions of scopes and dtypes replaced by their texts."""
    table = {column: entries_of(value) for column, value in document[name].items()}
    for column in _FLATTENED & table.keys():
        counts = table["ndim"] if column == "global_shape" else ndims
        flat = iter(table[column])
        _require(
            sum(counts) == len(table[column]), f"{name}: {column} has a wrong number of entries"
        )
        table[column] = [tuple(itertools.islice(flat, count)) for count in counts]
    for column, texts in (("scope", "scopes"), ("dtype", "dtypes")):
        if column in table:
            table[column] = [document[texts][position] for position in table[column]]
    return [dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True)]


def _key_of(row: Row) -> str:
    return f"{FIELDS[row['field']]}/{row['name']}" + (
        "" if row["scope"] == "global" else f"@{row['scope']}"
    )


def _iter_shardings(index: Tables) -> Iterator[list[tuple[Shape, Shape, int]]]:
    """Yield the boxes of each sharding: begin, shape, and the number of the part with the box."""
    table = {name: iter(entries_of(value)) for name, value in index["shardings"].items()}
    part = -1
    writer_count = index["writer_count"]
    for ndim, form, count in zip(table["ndim"], table["form"], table["box_count"], strict=True):
        boxes: list[tuple[Shape, Shape]]
        if form:
            cuts = list(itertools.islice(table["grid_shape"], ndim))
            axes = [
                list(itertools.accumulate(itertools.islice(table["extent"], cut), initial=0))
                for cut in cuts
            ]
            intervals = itertools.product(*map(itertools.pairwise, axes))
            boxes = [(tuple(a for a, _ in box), tuple(b - a for a, b in box)) for box in intervals]
        else:
            shapes = [list(itertools.islice(table["box_shape"], count)) for _ in range(ndim)]
            steps = [unfold(itertools.islice(table["begin"], count)) for _ in range(ndim)]
            if ndim:  # in the last dimension, a step starts at the end of the preceding box
                steps[-1][1:] = map(int.__add__, steps[-1][1:], shapes[-1])
            begins = [list(itertools.accumulate(step)) for step in steps]
            boxes = list(zip(zip(*begins, strict=True), zip(*shapes, strict=True), strict=True))
        _require(len(boxes) == count, "a sharding has a wrong number of boxes")
        owned = []
        for begin, shape in boxes:
            part = (part + next(table["part"]) + 1) % writer_count
            owned.append((begin, shape, part))
        yield owned


# --- parts and shards -----------------------------------------------------------------------------


class _Part:
    """A part with the contents of all boxes from the part's writer.

    Each block is checked by digest.

    Attributes:
        leaves: tagged JSON of each leaf, by key.
    """

    def __init__(self, root: Path, number: int, entry: Row, manifest: Mapping[str, Any]) -> None:
        self._stem = f"{manifest['attempt']}-{number:05d}"
        self._block_nbytes = int(manifest["block_nbytes"])
        where = f"parts/{self._stem}.msgpack"
        self._document = document = _read_document(root / where, entry["nbytes"], entry["digest"])
        expected = {name: manifest[name] for name in ORIGIN} | {
            "type": "part",
            "writer": number,
            "references": [],
        }
        _check_members(where, document, {**expected, "encodings": ["raw"]})
        self._contents: dict[tuple[str, Shape, Shape], bytes] = {}
        self.leaves = {
            _key_of(row): tagged.from_tree(msgpk.parse(row["value"])) for row in self.rows("leaves")
        }
        self._owners = [row for row in self.rows("tensors") for _ in range(row["box_count"])]
        self._boxes = rows(document, "boxes", [owner["ndim"] for owner in self._owners])
        for box, owner in zip(self._boxes, self._owners, strict=True):
            cuts = zip(box["cut_shape"], owner["global_shape"], strict=True)
            box["shape"] = tuple(cut - 1 if cut else extent for cut, extent in cuts)
        digests = iter(entries_of(document["digests"]))
        self._digests = [
            list(itertools.islice(digests, box["digest_count"])) for box in self._boxes
        ]
        _require(next(digests, None) is None, f"{where} has digests of no box")
        extents = self.rows("extents")
        ahead = itertools.accumulate(step + 1 for step in unfold(row["box"] for row in extents))
        for extent, position in zip(extents, ahead, strict=True):
            extent["box"] = position - 1
        for position, file in enumerate(self.rows("files")):
            self._read_shard(
                root, file, [extent for extent in extents if extent["file"] == position]
            )

    def rows(self, name: str) -> list[Row]:
        """Return the rows of a table."""
        return rows(self._document, name)

    def content(self, key: str, begin: Shape, shape: Shape) -> bytes:
        """Return the bytes of a stored box."""
        _require(
            (key, begin, shape) in self._contents,
            f"part {self._stem} doesn't store {begin} of {key}",
        )
        return self._contents[key, begin, shape]

    def _read_shard(self, root: Path, file: Row, extents: Sequence[Row]) -> None:
        name = file["name"]
        pattern = rf"[a-z][a-z_]{{0,40}}-{self._stem}\.safetensors"
        _require(
            re.fullmatch(pattern, name) and file["kind"] == "safetensors",
            f"{name} isn't the name of a shard",
        )
        raw = _read_exactly(root / name, file["nbytes"])
        at = int(file["header_nbytes"])
        _require(
            blake3(raw[:at]).digest() == file["header_digest"],
            f"{name}: a wrong digest of the header",
        )
        listed = _parse_header(name, raw, at)
        widths = [
            DTYPES[self._owners[extent["box"]]["dtype"]][0]
            for extent in extents
            if extent["block_count"]
        ]
        is_ordered = widths == sorted(widths, reverse=True)
        _require(is_ordered, f"{name}: narrower elements lie before wider elements")
        for extent in extents:
            owner = self._owners[extent["box"]]
            box = self._boxes[extent["box"]]
            width, tag = DTYPES[owner["dtype"]]
            nbytes = width * math.prod(box["shape"])
            content = raw[at : at + nbytes]
            begin = at
            at = at + nbytes
            size = self._block_nbytes
            digests = [blake3(content[i : i + size]).digest() for i in range(0, nbytes, size)]
            whole = (extent["block_begin"], extent["block_count"], extent["gap_nbytes"]) == (
                0,
                len(digests),
                0,
            )
            fits = whole and digests == self._digests[extent["box"]]
            _require(fits, f"{name}: {owner['name']!r} isn't what was saved")
            first = int(file["header_nbytes"])
            shape = list(box["shape"]) if tag else [nbytes]
            expected = {
                "dtype": tag or "U8",
                "shape": shape,
                "data_offsets": [begin - first, at - first],
            }
            key = extent["key"] or owner["name"]
            _require(
                listed.pop(key, None) == expected,
                f"{name}: the header doesn't say {expected} of {key!r}",
            )
            self._contents[_key_of(owner), box["begin"], box["shape"]] = content
        _require(not listed and at == len(raw), f"{name}: there is more in it than the part says")


def _parse_header(name: str, raw: bytes, header_nbytes: int) -> dict[str, Any]:
    """Return the entries of a shard's header, by key."""
    length = int.from_bytes(raw[:8], "little")
    _require(
        length + 8 == header_nbytes and header_nbytes % 64 == 0,
        f"{name}: a header of {length} bytes",
    )
    text = raw[8:header_nbytes].decode()
    _require(
        text.startswith("{") and text.rstrip(" ").endswith("}"),
        f"{name}: the header isn't a padded object",
    )
    listed = json.loads(text)
    metadata = listed.pop("__metadata__", {})
    _require(
        all(isinstance(value, str) for value in metadata.values()),
        f"{name}: metadata that aren't strings",
    )
    return dict(listed)


def _assemble(row: Row, boxes: Sequence[tuple[Shape, Shape, int]], parts: Sequence[_Part]) -> bytes:
    """Return the bytes of a tensor from boxes, which have to cover each byte exactly once."""
    shape = row["global_shape"]
    width = DTYPES[row["dtype"]][0]
    key = _key_of(row)
    runs: list[tuple[int, bytes]] = []
    for begin, extents, part in boxes:
        inside = all(b + n <= extent for b, n, extent in zip(begin, extents, shape, strict=True))
        _require(inside, f"{key}: a box leaves the tensor")
        content = parts[part].content(key, begin, extents)
        run = width * math.prod(extents[-1:])
        corners = itertools.product(
            *(range(b, b + n) for b, n in zip(begin[:-1], extents[:-1], strict=True))
        )
        for number, corner in enumerate(corners if content else ()):
            place = (*corner, *begin[-1:])
            at = sum(i * math.prod(shape[axis:]) for axis, i in enumerate(place, 1)) * width
            runs.append((at, content[number * run : (number + 1) * run]))
    whole = bytearray()
    for at, piece in [*sorted(runs), (width * math.prod(shape), b"")]:
        _require(at == len(whole), f"{key}: a gap or an overlap at byte {at}")
        whole += piece
    return bytes(whole)
