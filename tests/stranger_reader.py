"""A reader of checkpoints by somebody who had read spec/ and no code: everything is read, and every byte checked."""

import itertools
import json
import math
import re
import struct
from collections import Counter, OrderedDict, deque
from dataclasses import make_dataclass
from pathlib import Path

import msgpack
import safetensors
from blake3 import blake3

FIELDS = ("weights", "optimizer", "rng", "data", "config", "topology", "provenance")
ORIGIN = ("run_id", "launch", "nonce", "step", "attempt", "writer_count", "block_nbytes")
WIDTH_AND_TAG = {name: (int(width), tag or "U8") for name, width, tag in re.findall(r"(\w+)=(\d+)(\w*)", """
    bool=1BOOL uint8=1U8 int8=1I8 uint16=2U16 int16=2I16 uint32=4U32 int32=4I32 uint64=8U64 int64=8I64 float16=2F16
    bfloat16=2BF16 float32=4F32 float64=8F64 complex64=8C64 complex128=16 complex32=4 float4_e2m1fn_x2=1
    float8_e4m3fn=1F8_E4M3 float8_e5m2=1F8_E5M2 float8_e8m0fnu=1F8_E8M0 float8_e4m3fnuz=1F8_E4M3FNUZ
    float8_e5m2fnuz=1F8_E5M2FNUZ""")}  # fmt: skip
NUMBERS = {"f": lambda raw: struct.unpack("<d", raw)[0], "c": lambda raw: complex(*struct.unpack("<2d", raw)),
           "i": lambda raw: int.from_bytes(raw, "little", signed=True)}  # fmt: skip
BUILD = {"l": list, "t": tuple, "s": set, "z": frozenset, "q": lambda items: deque(items[1:], items[0]), "d": dict,
         "O": OrderedDict, "C": lambda pairs: Counter(dict(pairs))}  # fmt: skip
Tagged = make_dataclass("Tagged", ("tag", "items"), frozen=True)  # in trees: T, a reference to a tensor; a, n, D, V, S


def require(condition, message):
    if not condition:
        raise ValueError(message)


def read_file(path, nbytes):
    require(path.is_file() and not path.is_symlink() and path.stat().st_size == nbytes, f"{path}: missing, or wrong size")
    return path.read_bytes()


def check_signed(signed, kind, origin):
    require(signed["features"]["reader"] == [], f"{kind}: needs features that this reader doesn't know")
    expected = {"format_version": "0.1", "type": kind, "profile": "full", "references": [], "encodings": ["raw"]}
    for key, value in (expected | origin).items():
        require(signed.get(key, value) == value, f"{kind}: {key} is {signed.get(key)!r} instead of {value!r}")
    return signed


def unpack(raw):
    value = msgpack.unpackb(raw, object_pairs_hook=lambda pairs: dict(sorted(pairs)))
    require(msgpack.packb(value) == raw, "msgpack that isn't in canonical form")
    return value


def read_tables(path, nbytes, digest, kind, origin):
    envelope = unpack(read_file(path, nbytes))
    digests = {envelope["digest"], blake3(envelope["signed"]).digest(), digest}
    require(len(digests) == 1 and len(envelope) == 2, f"{path}: hasn't the digest by which it was named")
    return check_signed(unpack(envelope["signed"]), kind, origin)


def columns(document, table, ndims=()):
    result = dict(document[table])
    for key, value in result.items():
        if isinstance(value, bytes):  # digests
            result[key] = [value[i : i + 32] for i in range(0, len(value), 32)]
        elif value and isinstance(value[0], int):  # a packed array
            result[key] = struct.unpack(f"<{len(value[1]) // value[0]}{' BH I   Q'[value[0]]}", value[1])
    for key in {"global_shape", "begin", "box_shape"} & result.keys():  # flattened
        flat, counts = iter(result[key]), result["ndim"] if key == "global_shape" else ndims
        require(sum(counts) == len(result[key]), f"{table}/{key}: wrong number of entries")
        result[key] = [tuple(itertools.islice(flat, count)) for count in counts]
    return result


def rows(document, table, ndims=()):
    by_column = columns(document, table, ndims)
    result = [dict(zip(by_column, row, strict=True)) for row in zip(*by_column.values(), strict=True)]
    for row in result if "scope" in by_column else ():
        row["id"] = (FIELDS[row.get("field", 2)], row["name"], document["scopes"][row["scope"]])
        row["dtype"] = document["dtypes"][row["dtype"]] if "dtype" in row else row.get("kind")
    return result


def decode(tree, references):
    if not isinstance(tree, list):
        require(tree is None or isinstance(tree, int | str | bytes), f"a {type(tree)} in a tree")
        return tree
    tag, *items = tree
    if tag in NUMBERS:
        return NUMBERS[tag](*items)
    if tag in ("T", "a", "n", "D", "V", "S"):
        references += items[:1] if tag == "T" else []
        return Tagged(tag, tuple(tuple(item) if isinstance(item, list) else item for item in items))
    values = [decode(item, references) for item in items]
    values = list(zip(values[::2], values[1::2], strict=True)) if tag in ("d", "O", "C") else values
    require(len(BUILD[tag](values)) == len(values) - (tag == "q"), "a tree with a key or member twice")
    return BUILD[tag](values)


def read_boxes(root, part):
    """The boxes of a part by tensor, begin and shape, with their bytes if it wrote them; checks its shards against it."""
    owners = [tensor for tensor in rows(part, "tensors") for _ in range(tensor["box_count"])]
    boxes = rows(part, "boxes", [tensor["ndim"] for tensor in owners])
    extents = sorted(rows(part, "extents"), key=lambda extent: (extent["byte_begin"], -len(extent["key"])))
    for number, file in enumerate(rows(part, "files")):
        name = rf"[a-z][a-z_]{{0,40}}-{part['attempt']}-{part['writer']:05}\.safetensors"
        require(re.fullmatch(name, file["name"]), f"{file['name']}: not a name of this writer's shards")
        raw, start = read_file(root / file["name"], file["nbytes"]), file["header_nbytes"]
        require(blake3(raw[:start]).digest() == file["header_digest"], f"{file['name']}: wrong digest of the header")
        expected, end = [], start
        for extent in (extent for extent in extents if extent["file"] == number):
            box, (width, tag) = boxes[extent["box"]], WIDTH_AND_TAG[owners[extent["box"]]["dtype"]]
            ...
