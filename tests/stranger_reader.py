"""A reader of checkpoints of format 0.1, written by somebody who had read spec/ and no code; neither ckptfmt nor numpy.

`read_checkpoint` reads all that a checkpoint holds and checks every byte of it; what it can't accept is a ValueError.
"""

import collections
import dataclasses
import itertools
import json
import math
import re
import struct
from pathlib import Path

import msgpack
import safetensors
from blake3 import blake3

FIELDS = ("weights", "optimizer", "rng", "data", "config", "topology", "provenance")
ORIGIN = ("run_id", "launch", "nonce", "step", "attempt", "writer_count", "block_nbytes")
DTYPES = {  # name: bytes of an element, and the tag in safetensors, U8 where it has none
    name: (int(nbytes), tag)
    for name, nbytes, tag in re.findall(r"(\w+)=(\d+)(\w+)", """
        bool=1BOOL uint8=1U8 int8=1I8 uint16=2U16 int16=2I16 uint32=4U32 int32=4I32 uint64=8U64 int64=8I64 float16=2F16
        bfloat16=2BF16 float32=4F32 float64=8F64 complex64=8C64 float8_e4m3fn=1F8_E4M3 float8_e5m2=1F8_E5M2
        float8_e8m0fnu=1F8_E8M0 float8_e4m3fnuz=1F8_E4M3FNUZ float8_e5m2fnuz=1F8_E5M2FNUZ
        complex128=16U8 complex32=4U8 float4_e2m1fn_x2=1U8""")}  # fmt: skip
UNTAGGED = ("complex128", "complex32", "float4_e2m1fn_x2")


@dataclasses.dataclass(frozen=True)
class Tagged:  # what has no plain Python type: T (a reference to a tensor), a, n, D, V, S
    tag: str
    items: tuple


def require(condition, message):
    if not condition:
        raise ValueError(message)


def read_file(root, name, nbytes):
    path = root / name
    require(path.is_file() and not path.is_symlink(), f"{name}: missing, or no regular file")
    require(path.parent == root or not path.parent.is_symlink(), f"{name}: behind a symbolic link")
    require(path.stat().st_size == nbytes, f"{name}: {path.stat().st_size} bytes instead of {nbytes}")
    return path.read_bytes()


def check_head(signed, kind):
    version, features = signed.get("format_version"), signed.get("features")
    require(version == "0.1", f"a {kind} of format {version}, and this reads 0.1 only")
    require(features["reader"] == [], f"a {kind} with features that this reader doesn't know: {features}")
    require(signed["type"] == kind, f"not a {kind} but a {signed['type']}")


def read_manifest(root):
    require((root / "manifest.json").is_file(), f"{root}: no manifest.json, so nothing is committed here")
    raw = read_file(root, "manifest.json", min((root / "manifest.json").stat().st_size, 65535)).decode()
    document = json.loads(raw, parse_float=lambda text: require(None, text), parse_constant=lambda text: require(None, text))
    form, signed = (json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
                    for value in (document, document["signed"]))  # fmt: skip
    require(form == raw and document.keys() == {"digest", "signed"}, "manifest.json: not in canonical form")
    require(document["digest"] == "blake3:" + blake3(signed.encode()).hexdigest(), "manifest.json: wrong digest")
    check_head(document["signed"], "manifest")
    require(document["signed"]["profile"] == "full" and document["signed"]["references"] == [], "not a full checkpoint")
    return document["signed"], document["digest"]


def unpack(raw):
    def in_profile(value):  # the value with its maps sorted
        if isinstance(value, list):
            return [in_profile(entry) for entry in value]
        if isinstance(value, dict):
            return {str(key): in_profile(value[key]) for key in sorted(value)}
        require(value is None or isinstance(value, int | str | bytes), f"msgpack with a {type(value)}")
        return value

    value = msgpack.unpackb(raw)
    require(msgpack.packb(in_profile(value)) == raw, "msgpack that isn't in canonical form")
    return value


def read_document(root, name, nbytes, digest, kind):
    envelope = unpack(read_file(root, name, nbytes))
    require(envelope.keys() == {"digest", "signed"} and envelope["digest"] == digest, f"{name}: not the one that was named")
    require(blake3(envelope["signed"]).digest() == digest, f"{name}: wrong digest")
    signed = unpack(envelope["signed"])
    check_head(signed, kind)
    return signed
