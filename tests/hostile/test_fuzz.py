"""Random damage under valid digests: whatever comes in, only a CkptError comes out, and soon."""

import contextlib
import copy
import random
from typing import Any

import pytest

from ckptfmt.documents.canonical import dump_canonical, dump_document
from ckptfmt.documents.index import Index
from ckptfmt.documents.manifest import Reference, parse_register
from ckptfmt.documents.msgpk import (
    dump_msgpack,
    dump_packed_document,
    parse_msgpack,
    parse_packed_document,
)
from ckptfmt.documents.packed import dump_packed
from ckptfmt.documents.part import Part
from ckptfmt.documents.run import Launch, RunRecord
from ckptfmt.documents.shard import parse_shard_header
from ckptfmt.documents.tree import dump_tree, parse_tree
from ckptfmt.errors import CkptError
from tests.builders import (
    NONCE,
    RUN_ID,
    Forgery,
    code_of,
    parse_json,
    parse_signed,
    read_all,
    small_files,
    verify,
)

FILES = small_files()
INDEX = "index-0123456789abcdef.msgpack"
PART = "parts/0123456789abcdef-00001.msgpack"
SHARD = "weights-0123456789abcdef-00001.safetensors"
LAUNCH = Launch(
    run_id=RUN_ID,
    launch=3,
    nonce=NONCE,
    chosen_by="hand",
    resume_from=Reference(name="step-00000400-l0001", digest="blake3:" + "a" * 64),
)

ATOMS: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    255,
    256,
    2**31,
    2**32,
    2**48,
    2**48 + 1,
    2**53 - 1,
    2**53,
    2**60,
    2**63 - 1,
    2**63,
    2**64 - 1,
    -(2**63),
    "",
    "a",
    "global",
    "lw/0",
    "lw/-1",
    "float32",
    "raw",
    "é",
    "../x",
    "x" * 5000,
    "\u202e",
    "blake3:",
    [],
    {},
    [[]],
    [1, b""],
    [1, b"\0"],
    [2, b"\0\0"],
    [8, b"\xff" * 8],
    [True, b"\1"],
    {"": 0},
    ["global"],
]
BYTES = [b"", b"\0", b"\xff" * 8, bytes(32), b"\xdd\xff\xff\xff\xff", b"\xc1", b"\x90"]


def mutated(value, rng, *, has_bytes):
    """Return a copy of `value` with one to three places changed."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        value = _mutate(value, rng, has_bytes=has_bytes)
    return value


def _mutate(value, rng, *, has_bytes):
    at: Any
    holder: Any
    key: Any
    at, holder, key = value, None, None
    while isinstance(at, dict | list) and at and rng.random() < 0.85:
        holder, key = at, rng.choice(list(at) if isinstance(at, dict) else range(len(at)))
        at = at[key]
    atoms = [*ATOMS, *(BYTES if has_bytes else [])]
    new = _changed(at, rng) if rng.random() < 0.6 else copy.deepcopy(rng.choice(atoms))
    if not has_bytes and _has_bytes(new):
        new = 7
    if holder is None:
        return new
    action = rng.random()
    if action < 0.1:
        del holder[key]
    elif action < 0.2 and isinstance(holder, dict):
        holder[rng.choice(["", "x", "type", "digest", "\ufeff"])] = new
    elif action < 0.25 and isinstance(holder, list):
        holder.insert(key, new)
    elif action < 0.3 and isinstance(holder, list):
        rng.shuffle(holder)
    else:
        holder[key] = new
    return value


def _has_bytes(value):
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return isinstance(value, bytes) or any(map(_has_bytes, items))


def _changed(value: Any, rng: random.Random) -> Any:
    """Return something close to `value`: what is almost right gets furthest."""
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int):
        return value + rng.choice((-1, 1, 256, -value))
    if isinstance(value, str | bytes) and value:
        at = rng.randrange(len(value))
        before: Any = value[:at]
        after: Any = value[at + 1 :]
        changed: Any = (
            chr(ord(value[at]) ^ 1)
            if isinstance(value, str)
            else bytes([value[at] ^ 1 << rng.randrange(8)])
        )
        return rng.choice((before + changed + after, before, before + after, value + value[:1]))  # type: ignore[operator]
    if isinstance(value, list) and len(value) == 2 and isinstance(value[1], bytes):
        numbers = [*value[1]] if value[0] == 1 else [1, 300]
        if numbers:
            numbers[rng.randrange(len(numbers))] = rng.choice((0, 1, 2, 3, 5, 255))
        return dump_packed(numbers)
    return rng.choice(([], {}, value))


def json_document(signed):
    try:
        return dump_document(signed)
    except (ValueError, TypeError):
        return b"{}"


def parse_index(signed):
    return Index.parse(dump_packed_document(signed)[0], where=INDEX)


def parse_part(signed):
    return Part.parse(dump_packed_document(signed)[0], where=PART)


TARGETS: dict[str, tuple[Any, Any, bool]] = {
    "manifest": (
        parse_json(FILES["manifest.json"]),
        lambda v: parse_register(json_document(v)),
        False,
    ),
    "run": (
        parse_json(RunRecord(run_id=RUN_ID).dump()),
        lambda v: RunRecord.parse(json_document(v)),
        False,
    ),
    "launch": (
        parse_json(LAUNCH.dump()),
        lambda v: Launch.parse(json_document(v), where="launches/0003.json"),
        False,
    ),
    "index": (parse_signed(FILES[INDEX]), parse_index, True),
    "part": (parse_signed(FILES[PART]), parse_part, True),
    "tree": (
        parse_msgpack(
            dump_tree(
                {"a": [1.5, (1 << 70, {3, 4}), {1: b"x"}], (1, 2): [1j, -0.0, None]}, where=""
            ),
            where="",
            limit_items=100,
        ),
        lambda v: parse_tree(dump_msgpack(v), where="x"),
        True,
    ),
}


#: How many edits are tried of each kind of document.
COUNTS = pytest.mark.parametrize("count", [800, pytest.param(4000, marks=pytest.mark.exhaustive)])


@COUNTS
@pytest.mark.parametrize("name", TARGETS)
def test_edited_documents_make_nothing_but_ckpterrors(name, count):
    """What is accepted again is the same when it is dumped again: there are no two forms."""
    signed, parse, has_bytes = TARGETS[name]
    rng = random.Random(name)
    accepted = 0
    for _ in range(count):
        edited = mutated(signed, rng, has_bytes=has_bytes)
        if has_bytes:
            try:
                dump_msgpack(edited)
            except (OverflowError, ValueError):
                continue
        accepted += code_of(lambda edited=edited: parse(edited)) == "ok"
    assert accepted < count * 5 // 8


RAW: dict[str, tuple[bytes, Any]] = {
    "manifest": (FILES["manifest.json"], parse_register),
    "index": (FILES[INDEX], lambda content: Index.parse(content, where="x")),
    "part": (FILES[PART], lambda content: Part.parse(content, where="x")),
    "envelope": (FILES[INDEX], lambda content: parse_packed_document(content, where="x")),
    "msgpack": (
        dump_msgpack(parse_signed(FILES[PART])),
        lambda c: parse_msgpack(c, where="x", limit_items=10_000),
    ),
    "tree": (
        dump_tree({"a": [1.5, (1 << 70, {3, 4}), {1: b"x"}], (1, 2): [1j, -0.0, None]}, where=""),
        lambda content: parse_tree(content, where="x"),
    ),
    "shard": (
        FILES[SHARD],
        lambda content: parse_shard_header(content, file_nbytes=len(content), where="x"),
    ),
    "signed manifest": (
        dump_canonical(parse_json(FILES["manifest.json"])),
        lambda content: parse_register(b'{"digest":"","signed":' + content + b"}"),
    ),
}


@COUNTS
@pytest.mark.parametrize("name", RAW)
def test_damaged_bytes_make_nothing_but_ckpterrors(name, count):
    content, parse = RAW[name]
    rng = random.Random(name)
    for _ in range(count):
        damaged = bytearray(content)
        for _ in range(rng.choice((1, 1, 2, 5))):
            at = rng.randrange(len(damaged) + 1)
            action = rng.randrange(5)
            if action == 0:
                damaged[at : at + 1] = bytes([rng.randrange(256)])
            elif action == 1:
                damaged[at : at + rng.randrange(9)] = b""
            elif action == 2:
                damaged[at:at] = rng.choice(
                    (
                        b"\xff" * 4,
                        b"{",
                        b"[",
                        b'"',
                        b"\\",
                        b"\0",
                        b"\x90",
                        b"\xdd",
                        b"-",
                        b"0",
                        b",",
                    )
                )
            elif action == 3:
                other = rng.randrange(len(damaged) + 1)
                damaged[at:at] = damaged[other : other + rng.randrange(40)]
            elif damaged:
                damaged[at % len(damaged)] ^= 1 << rng.randrange(8)
            if not damaged:
                break
        code_of(lambda damaged=bytes(damaged): parse(damaged))


@COUNTS
def test_edited_checkpoints_make_nothing_but_ckpterrors(count):
    """Deep: index, parts and manifest edited, and all digests made to fit. What verify takes can be read."""
    rng = random.Random("checkpoint")
    for _ in range(count // 5):
        forgery = Forgery(FILES)
        target = rng.randrange(4)
        if target == 0:
            forgery.index = mutated(forgery.index, rng, has_bytes=True)
        elif target == 3:
            edited = mutated(forgery.manifest["fields"], rng, has_bytes=False)
            forgery.manifest["fields"] = edited
        else:
            forgery.parts[target - 1] = mutated(forgery.parts[target - 1], rng, has_bytes=True)
        try:
            store = forgery.store()
        except (ValueError, OverflowError, TypeError, AttributeError):
            continue
        if not verify(store).violations:
            read_all(store)
        else:
            with contextlib.suppress(CkptError):
                read_all(store)


@COUNTS
def test_edited_headers_make_nothing_but_ckpterrors(count):
    """The JSON of a shard's header, edited as a value."""
    import json  # noqa: PLC0415

    content = FILES[SHARD]
    nbytes = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:nbytes])
    rng = random.Random("header")
    for _ in range(count):
        text = json.dumps(mutated(header, rng, has_bytes=False)).encode()
        text += b" " * (-(8 + len(text)) % 64)
        edited = len(text).to_bytes(8, "little") + text
        code_of(
            lambda edited=edited: parse_shard_header(
                edited, file_nbytes=len(edited) + 94, where="x"
            )
        )
