"""A reader of checkpoints of format 0.1 by somebody who had read spec/ and no code; it needs neither ckptfmt nor numpy.

`read_checkpoint` reads all that a checkpoint holds and checks every byte of it; what it can't accept is a ValueError.
"""

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
MAKE = {"l": list, "t": tuple, "s": set, "z": frozenset, "d": dict, "O": OrderedDict, "C": lambda kv: Counter(dict(kv))}
Tagged = make_dataclass("Tagged", ("tag", "items"), frozen=True)  # in trees: T, a reference to a tensor; a, n, D, V, S


def require(condition, message):
    if not condition:
        raise ValueError(message)


def read_file(root, name, nbytes):
    path, links = root / name, [p for p in (root / name, (root / name).parent) if p != root and p.is_symlink()]
    require(path.is_file() and not links, f"{name}: missing, or not a regular file")
    require(path.stat().st_size == nbytes, f"{name}: {path.stat().st_size} bytes instead of {nbytes}")
    return path.read_bytes()


def check_signed(signed, kind, manifest):
    require(signed["format_version"] == "0.1", f"{kind}: format {signed['format_version']}, and this reads only 0.1")
    require(signed["features"]["reader"] == [], f"{kind}: needs unknown features {signed['features']['reader']}")
    require(signed["type"] == kind, f"not a {kind}, but a document of type {signed['type']}")
    full = signed.get("profile", "full") == "full" and signed.get("encodings", ["raw"]) == ["raw"]
    require(full and not signed.get("references"), f"{kind}: not of a full checkpoint")
    require(all(signed[key] == (manifest or signed)[key] for key in ORIGIN), f"{kind}: of another origin")
    return signed


def read_manifest(root):
    raw = read_file(root, "manifest.json", min((root / "manifest.json").stat().st_size, 65535)).decode()
    document = json.loads(raw, parse_float=str, parse_constant=str)  # as strings, these don't come out as they came in
    dump = json.JSONEncoder(ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode
    require(dump(document) == raw and len(document) == 2, "manifest.json: not in canonical form")
    digest = "blake3:" + blake3(dump(document["signed"]).encode()).hexdigest()
    require(document["digest"] == digest, "manifest.json: wrong digest")
    return check_signed(document["signed"], "manifest", None), digest


def unpack(raw):
    value = msgpack.unpackb(raw, object_pairs_hook=lambda pairs: dict(sorted(pairs)))
    require(msgpack.packb(value) == raw, "msgpack that isn't in canonical form")
    return value


def read_tables(root, name, nbytes, digest, kind, manifest):
    envelope = unpack(read_file(root, name, nbytes))
    require(len(envelope) == 2 and envelope["digest"] == digest, f"{name}: not the file that was named")
    require(blake3(envelope["signed"]).digest() == digest, f"{name}: wrong digest")
    return check_signed(unpack(envelope["signed"]), kind, manifest)


def columns(document, table, ndims=None):
    result = dict(document[table])
    for key, value in result.items():
        if isinstance(value, bytes):  # digests
            result[key] = [value[i : i + 32] for i in range(0, len(value), 32)]
        elif value and isinstance(value[0], int):  # a packed array
            numbers = struct.unpack(f"<{len(value[1]) // value[0]}{' BH I   Q'[value[0]]}", value[1])
            smallest = next(width for width in (1, 2, 4, 8) if max(numbers, default=0) < 256**width)
            require(value[0] == smallest and max(numbers, default=0) < 2**63, f"{table}/{key}: not as packed arrays are")
            result[key] = numbers
    for key in {"global_shape", "begin", "box_shape"} & result.keys():  # flattened
        counts, flat = result["ndim"] if ndims is None else ndims, iter(result[key])
        require(sum(counts) == len(result[key]), f"{table}/{key}: wrong number of entries")
        result[key] = [tuple(itertools.islice(flat, count)) for count in counts]
    return result


def rows(document, table, ndims=None):
    """The rows of a table as dicts, with words for the numbers of fields, scopes and dtypes, by (field, name, scope)."""
    by_column = columns(document, table, ndims)
    result = [dict(zip(by_column, row, strict=True)) for row in zip(*by_column.values(), strict=True)]
    for row in result:
        row |= {"dtype": document["dtypes"][row["dtype"]]} if "dtype" in row else {}
        row["key"] = (FIELDS[row.get("field", 2)], row.get("name"), document["scopes"][row["scope"]] if "scope" in row else None)
    return result


def decode(tree, references):
    if not isinstance(tree, list):
        require(tree is None or isinstance(tree, int | str | bytes), f"a {type(tree)} in a tree")
        return tree
    tag, *items = tree
    if tag in ("f", "c"):
        return struct.unpack("<d", *items)[0] if tag == "f" else complex(*struct.unpack("<2d", *items))
    if tag == "i":
        return int.from_bytes(*items, "little", signed=True)
    if tag in ("T", "a", "n", "D", "V", "S"):
        references += items[:1] if tag == "T" else []
        return Tagged(tag, tuple(tuple(item) if isinstance(item, list) else item for item in items))
    values = [decode(item, references) for item in items]
    if tag == "q":
        return deque(values[1:], values[0])
    members = list(zip(values[::2], values[1::2], strict=True)) if tag in ("d", "O", "C") else values
    made = MAKE[tag](members)
    require(len(made) == len(members), "a tree with one key or member twice")
    return made
