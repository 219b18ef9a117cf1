"""A reader of checkpoints by somebody who had read spec/ and no code: everything is read, and every byte checked."""

import json
import math
import re
import struct
import zlib
from collections import Counter, OrderedDict, deque
from dataclasses import make_dataclass
from itertools import accumulate, islice, pairwise, product
from pathlib import Path

import msgpack
import safetensors
from blake3 import blake3

FIELDS = ("weights", "optimizer", "rng", "data", "config", "topology", "provenance")
ORIGIN = ("run_id", "launch", "nonce", "step", "attempt", "writer_count", "block_nbytes")
TABLE = """bool=1BOOL uint8=1U8 int8=1I8 uint16=2U16 int16=2I16 uint32=4U32 int32=4I32 uint64=8U64 int64=8I64
    float16=2F16 bfloat16=2BF16 float32=4F32 float64=8F64 complex64=8C64 complex128=16 complex32=4 float4_e2m1fn_x2=1
    float8_e4m3fn=1F8_E4M3 float8_e5m2=1F8_E5M2 float8_e8m0fnu=1F8_E8M0 float8_e4m3fnuz=1F8_E4M3FNUZ
    float8_e5m2fnuz=1F8_E5M2FNUZ"""
DTYPES = {name: (int(width), tag) for name, width, tag in re.findall(r"(\w+)=(\d+)(\w*)", TABLE)}  # tag: safetensors'
BUILD = {"l": list, "t": tuple, "s": set, "z": frozenset, "q": lambda v: deque(v[1:], v[0]), "d": dict,
         "O": OrderedDict, "C": lambda v: Counter(dict(v)), "i": lambda v: int.from_bytes(*v, "little", signed=True),
         "f": lambda v: struct.unpack("<d", *v)[0], "c": lambda v: complex(*struct.unpack("<2d", *v))}  # fmt: skip
PACKED = {"bool": "?", "float64": "d", "uint8": "B", "uint16": "H", "uint32": "I", "uint64": "Q", "int8": "b",
          "int16": "h", "int32": "i", "int64": "q"}  # fmt: skip
Tagged = make_dataclass("Tagged", ("tag", "items"), frozen=True)  # in trees: T, a reference to a tensor; a, n, D, V, S


def require(condition, message):
    if not condition:
        raise ValueError(message)


def read_file(path, nbytes):
    require(path.is_file() and not path.is_symlink() and path.stat().st_size == nbytes, f"no {nbytes} bytes: {path}")
    return path.read_bytes()


def check(signed, expected):
    version = signed.get("format_version")
    require(re.fullmatch(r"1\.(0|[1-9][0-9]*)", str(version)), f"format_version is {version!r} instead of '1.0'")
    for key, value in expected.items():
        require(signed.get(key) == value, f"not readable here: {key} is {signed.get(key)!r} instead of {value!r}")
    require({"caches", "labels", "suspect"} >= set(f := signed["features"]["reader"]), f"needs features {f}")
    return signed


def read_tables(path, nbytes, digest, expected):
    raw = read_file(path, nbytes)
    envelope, stream = msgpack.unpackb(raw), zlib.decompressobj()
    signed = stream.decompress(envelope["signed"], envelope["nbytes"] + 1)
    require(stream.eof and not stream.unused_data and len(signed) == envelope["nbytes"], f"{path}: badly compressed")
    document = msgpack.unpackb(signed, object_pairs_hook=lambda pairs: dict(sorted(pairs)))
    canonical = msgpack.packb({"digest": digest, "nbytes": len(signed), "signed": envelope["signed"]})
    require(canonical == raw and msgpack.packb(document) == signed, f"{path}: not in its one form")
    require(blake3(envelope["signed"]).digest() == digest, f"{path}: wrong digest")
    return check(document, expected)


def column(value):
    if isinstance(value, bytes):  # digests
        return [digest for (digest,) in struct.iter_unpack("32s", value)]
    if value and isinstance(value[0], int):  # a packed array: a plane of the lowest bytes, one of the next, ...
        count = len(value[1]) // value[0]
        return [int.from_bytes(value[1][i::count], "little") for i in range(count)]
    if value and isinstance(value[0], list):  # strings
        ends, text = [0, *accumulate(column(value[0]))], value[1].encode()
        require(ends[-1] == len(text), "strings of another length")
        return [text[begin:end].decode() for begin, end in pairwise(ends)]
    return value


def steps_of(values):  # of both signs
    return [-(value + 1) // 2 if value % 2 else value // 2 for value in values]


def rows(document, table, ndims=()):
    table = {key: column(value) for key, value in table.items()}
    for key in {"global_shape", "begin", "cut_shape"} & table.keys():  # flattened
        flat, counts = iter(table[key]), table["ndim"] if key == "global_shape" else ndims
        require(sum(counts) == len(table[key]), f"{key}: wrong number of entries")
        table[key] = [tuple(islice(flat, count)) for count in counts]
    result = [dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True)]
    for row in result if "scope" in table else ():
        row["id"] = (FIELDS[row.get("field", 2)], row["name"], document["scopes"][row["scope"]])
        row["kind"] = document["dtypes"][row["dtype"]] if "dtype" in row else row.get("kind")
    return result


def read_shardings(index):
    table = {key: iter(column(value)) for key, value in index["shardings"].items()}
    parts = accumulate(table["part"], lambda part, step: (part + step + 1) % index["writer_count"], initial=-1)
    next(parts)
    for ndim, form, count in zip(table["ndim"], table["form"], table["box_count"], strict=True):
        if form:  # a grid: the product of intervals
            axes = [accumulate(islice(table["extent"], n), initial=0) for n in list(islice(table["grid_shape"], ndim))]
            boxes = [([a for a, _ in box], [b - a for a, b in box]) for box in product(*map(pairwise, axes))]
        else:  # box after box, dimension after dimension: by what step each begins behind the one before
            extents = [list(islice(table["box_shape"], count)) for _ in range(ndim)]
            steps = [steps_of(islice(table["begin"], count)) for _ in range(ndim)]
            for last, shape in zip(steps[-1:], extents[-1:], strict=True):
                last[1:] = map(int.__add__, last[1:], shape)  # or behind its end
            boxes = list(zip(zip(*map(accumulate, steps), strict=True), zip(*extents, strict=True), strict=True))
        require(len(boxes) == count, "a sharding of another number of boxes")
        yield [(tuple(begin), tuple(shape), next(parts)) for begin, shape in boxes]


def decode(tree, names):
    if tree is None or isinstance(tree, int | str | bytes):
        return tree
    tag, *items = tree
    if tag in ("T", "a", "n", "D", "V", "S"):
        require(tag != "T" or items[0] in names, f"a tree refers to {items[0]!r}, and there is no such tensor")
        return Tagged(tag, tuple(tuple(item) if isinstance(item, list) else item for item in items))
    if tag in ("L", "U", "Q"):  # many numbers, or strings, as one array of bytes
        kind, *packed = items[tag == "Q" :]
        values = column(packed) if kind == "str" else [n for (n,) in struct.iter_unpack("<" + PACKED[kind], *packed)]
        return BUILD[{"L": "l", "U": "t", "Q": "q"}[tag]](items[: tag == "Q"] + values)
    values = [decode(item, names) for item in items]
    return BUILD[tag](zip(values[::2], values[1::2], strict=True) if tag in ("d", "O", "C") else values)


def read_part(root, row, expected):
    stem, size = f"{expected['attempt']}-{expected['writer']:05}", expected["block_nbytes"]
    part = read_tables(root / "parts" / f"{stem}.msgpack", row["nbytes"], row["digest"], expected)
    held = {("leaves", row["id"], None): row["value"] for row in rows(part, part["leaves"])}
    held |= {("streams", row["id"], row["kind"]): row["state"] for row in rows(part, part["streams"])}
    owners = [tensor for tensor in rows(part, part["tensors"]) for _ in range(tensor["box_count"])]
    boxes = rows(part, part["boxes"], [owner["ndim"] for owner in owners])
    for box, owner in zip(boxes, owners, strict=True):  # 0 is the whole extent, and what is cut is one more
        cuts = zip(box["cut_shape"], owner["global_shape"], strict=True)
        box["box_shape"] = tuple(cut - 1 if cut else extent for cut, extent in cuts)
    extents = rows(part, part["extents"])
    for extent, at in zip(extents, accumulate(step + 1 for step in steps_of(e["box"] for e in extents)), strict=True):
        extent["box"], extent["key"] = at - 1, extent["key"] or owners[at - 1]["name"]
    digests = struct.iter_unpack("32s", part["digests"])
    listed = [list(islice(digests, box["digest_count"])) for box in boxes]
    for number, file in enumerate(rows(part, part["files"])):
        require(re.fullmatch(rf"[a-z][a-z_]{{0,40}}-{stem}\.safetensors", file["name"]), f"not a shard: {file['name']}")
        raw = read_file(root / file["name"], file["nbytes"])
        require(blake3(raw[: file["header_nbytes"]]).digest() == file["header_digest"], f"{file['name']}: bad header")
        seen, at = dict(safetensors.deserialize(raw)), file["header_nbytes"]  # what other tools see; without gaps
        for extent in (extent for extent in extents if extent["file"] == number):
            owner, box, digests = (table[extent["box"]] for table in (owners, boxes, listed))
            (width, tag), count = DTYPES[owner["kind"]], math.prod(box["box_shape"])
            content, at = raw[at : at + count * width], at + count * width
            blocks = [(blake3(content[at : at + size]).digest(),) for at in range(0, count * width, size)]
            fits = blocks == digests and (extent["block_count"], extent["gap_nbytes"]) == (len(blocks), 0)
            require(fits, f"{file['name']}: {extent} is damaged")
            same = {"dtype": tag or "U8", "shape": list(box["box_shape"]) if tag else [count * width], "data": content}
            require(seen.pop(extent["key"]) == same, f"{file['name']}: {extent} isn't what safetensors finds")
            held["tensors", owner["id"], box["begin"], box["box_shape"]] = content
        require(not seen and at == len(raw), f"{file['name']}: {list(seen)} aren't in the part")
    return held


def assemble(tensor, tiles, parts):
    shape, width, pieces, content = tensor["global_shape"], DTYPES[tensor["kind"]][0], [], bytearray()
    for begin, extents, part in tiles:
        require(all(b + n <= s for b, n, s in zip(begin, extents, shape, strict=True)), f"{tensor['id']}: box outside")
        box, run = parts[part]["tensors", tensor["id"], begin, extents], width * math.prod(extents[-1:])
        for number, corner in enumerate(product(*map(range, extents[:-1])) if box else ()):  # runs along the last axis
            at = sum(i * math.prod(shape[axis:]) for axis, i in enumerate(map(int.__add__, begin, (*corner, 0)), 1))
            pieces.append((at * width, box[number * run : (number + 1) * run]))
    for at, piece in [*sorted(pieces), (width * math.prod(shape), b"")]:
        require(at == len(content), f"{tensor['id']}: a gap or an overlap at byte {at}")
        content += piece
    return {"dtype": tensor["kind"], "shape": shape, "storage": tensor["storage"], "bytes": bytes(content)}


def read_checkpoint(directory):
    root, trees = Path(directory), {"leaves": {}, "streams": {}}
    try:
        raw = read_file(root / "manifest.json", min((root / "manifest.json").stat().st_size, 65535))
        match = re.fullmatch(rb'\{"digest":"blake3:([0-9a-f]{64})","signed":(\{.*\})\}', raw)
        require(match and blake3(match[2]).hexdigest() == match[1].decode(), "manifest.json: wrong form or digest")
        manifest = check(json.loads(match[2]), {"type": "manifest", "profile": "full", "references": []})
        origin = {key: manifest[key] for key in ORIGIN}
        path, named = root / f"index-{manifest['attempt']}.msgpack", manifest["index"]
        index = read_tables(path, named["nbytes"], bytes.fromhex(named["digest"][7:]), origin | {"type": "index"})
        own = origin | {"type": "part", "references": [], "encodings": ["raw"]}
        parts = [read_part(root, row, own | {"writer": i}) for i, row in enumerate(rows(index, index["parts"]))]
        shardings = list(read_shardings(index))
        tensors = {row["id"]: assemble(row, shardings[row["sharding"]], parts) for row in rows(index, index["tensors"])}
        owners = ((list(tensors)[row["tensor"]], row["name"]) for row in rows(index, index["aliases"]))
        aliases = {(field, name, scope): (field, first, scope) for (field, first, scope), name in owners}
        names = {at: {k[1] for k in tensors | aliases if k[::2] == at} for at in {k[::2] for k in tensors | aliases}}
        for kind, at, row in ((table, row["id"], row) for table in trees for row in rows(index, index[table])):
            value = decode(msgpack.unpackb(parts[row["part"]][kind, at, row["kind"]]), names.get(at[::2], ()))
            trees[kind][at] = value if kind == "leaves" else (row["kind"], value)
    except (AttributeError, LookupError, OSError, TypeError, safetensors.SafetensorError, zlib.error) as error:
        raise ValueError(f"{root}: not a whole checkpoint of format 0.1: {error!r}") from error
    return {"manifest": manifest, "tensors": tensors, "aliases": aliases} | trees
