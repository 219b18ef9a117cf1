"""Headers of shards: rows 60 to 87 of the hostile inputs, and that safetensors opens what we write."""

import io
import json
import pickle
import time
import tracemalloc
import zipfile

import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st

from ckptfmt import limits
from ckptfmt.documents.shard import dump_shard_header, parse_shard_header, plan_shard
from ckptfmt.dtypes import DTYPES
from ckptfmt.errors import Code, FormatError
from tests.builders import code_of, error_of

F32 = {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}


def padded(text, padding=b" "):
    """Return length, JSON text and padding, as a hostile writer may put them."""
    text = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    text += padding * (-(8 + len(text)) % 64)
    return len(text).to_bytes(8, "little") + text


def parse(content, data_nbytes=0):
    return parse_shard_header(
        content, file_nbytes=len(content) + data_nbytes, where="x.safetensors"
    )


def header(**entries):
    return padded(json.dumps(entries))


def with_entry(**members):
    return header(w={**F32, **members})


def zip_file():
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("data.pkl", b"x" * 100)
    return content.getvalue()


NBYTES, SYNTAX, SCHEMA = (
    Code.SHARD_HEADER_NBYTES,
    Code.SHARD_HEADER_SYNTAX,
    Code.SHARD_HEADER_SCHEMA,
)
REFUSED = {
    **{f"60 {n} bytes": (bytes(n), 0, NBYTES, "REQ-SHD-001") for n in range(8)},
    "61 header longer than the file": (
        (120).to_bytes(8, "little") + b"{}",
        0,
        NBYTES,
        "REQ-SHD-001",
    ),
    "62 length 2^63": ((1 << 63).to_bytes(8, "little") + b"{}", 0, NBYTES, "REQ-SHD-001"),
    "62 length 2^64-1": (b"\xff" * 8 + b"{}", 0, NBYTES, "REQ-SHD-001"),
    "62 length 0": (bytes(8), 0, NBYTES, "REQ-SHD-001"),
    "62 length 0, and more bytes": (bytes(64), 0, NBYTES, "REQ-SHD-001"),
    "63 over 16 MiB": (
        ((16 << 20) + 56).to_bytes(8, "little") + b"{}" + b" " * (16 << 20),
        99,
        NBYTES,
        "REQ-SHD-001",
    ),
    "64 a space first": (padded(" {}"), 0, SYNTAX, "REQ-SHD-004"),
    "64 a byte-order mark first": (padded("\ufeff{}"), 0, SYNTAX, "REQ-SHD-004"),
    "64 an array": (padded("[]"), 0, SYNTAX, "REQ-SHD-004"),
    "65 padded with tabs": (padded("{}", b"\t"), 0, SYNTAX, "REQ-SHD-004"),
    "65 padded with line feeds": (padded("{}", b"\n"), 0, SYNTAX, "REQ-SHD-004"),
    "65 padded with NUL": (padded("{}", b"\0"), 0, SYNTAX, "REQ-SHD-004"),
    "65 a tab, then spaces": (padded("{}\t"), 0, SYNTAX, "REQ-SHD-004"),
    "66 tensor twice": (
        padded(f'{{"w":{json.dumps(F32)},"w":{json.dumps(F32)}}}'),
        12,
        Code.DOC_DUPLICATE_KEY,
        "REQ-SHD-005",
    ),
    "66 tensor twice, differently": (
        padded('{"w":{},"w":1}'),
        0,
        Code.DOC_DUPLICATE_KEY,
        "REQ-SHD-005",
    ),
    "66 tensor twice by an escape": (
        padded(r'{"w":{},"\u0077":1}'),
        0,
        Code.DOC_DUPLICATE_KEY,
        "REQ-SHD-005",
    ),
    "67 key of __metadata__ twice": (
        padded('{"__metadata__":{"a":"1","a":"1"}}'),
        0,
        Code.DOC_DUPLICATE_KEY,
        "REQ-SHD-005",
    ),
    "68 __metadata__ twice": (
        padded('{"__metadata__":{},"__metadata__":{}}'),
        0,
        Code.DOC_DUPLICATE_KEY,
        "REQ-SHD-005",
    ),
    "68 dtype twice": (
        padded('{"w":{"dtype":"F32","dtype":"F32","shape":[],"data_offsets":[0,4]}}'),
        4,
        Code.DOC_DUPLICATE_KEY,
        "REQ-SHD-005",
    ),
    "69 a member more": (with_entry(strides=[1]), 12, SCHEMA, "REQ-SHD-006"),
    "69 a member less": (header(w={"dtype": "F32", "shape": [3]}), 12, SCHEMA, "REQ-SHD-006"),
    "69 not an object": (header(w=[]), 0, SCHEMA, "REQ-SHD-006"),
    "69 null": (header(w=None), 0, SCHEMA, "REQ-SHD-006"),
    "70 __metadata__ null": (header(__metadata__=None), 0, SCHEMA, "REQ-SHD-006"),
    "70 __metadata__ of a number": (header(__metadata__={"a": 1}), 0, SCHEMA, "REQ-SHD-006"),
    "70 __metadata__ as a list": (header(__metadata__=[]), 0, SCHEMA, "REQ-SHD-006"),
    "70 __metadata__ as a tensor": (header(__metadata__=F32), 12, SCHEMA, "REQ-SHD-006"),
    "71 unknown dtype": (with_entry(dtype="F31"), 12, Code.SHARD_DTYPE, "REQ-SHD-006"),
    "71 lower case": (with_entry(dtype="f32"), 12, Code.SHARD_DTYPE, "REQ-SHD-006"),
    "71 a list": (with_entry(dtype=[2, 2]), 12, Code.SHARD_DTYPE, "REQ-SHD-006"),
    "71 null": (with_entry(dtype=None), 12, Code.SHARD_DTYPE, "REQ-SHD-006"),
    "71 opaque": (with_entry(dtype="C128"), 12, Code.SHARD_DTYPE, "REQ-SHD-006"),
    "72 negative": (with_entry(shape=[-3]), 12, Code.SHARD_SHAPE, "REQ-SHD-007"),
    "72 float": (
        padded('{"w":{"dtype":"F32","shape":[3.0],"data_offsets":[0,12]}}'),
        12,
        SYNTAX,
        "REQ-SHD-004",
    ),
    "72 true": (with_entry(shape=[True]), 12, Code.SHARD_SHAPE, "REQ-SHD-007"),
    "72 text": (with_entry(shape=["3"]), 12, Code.SHARD_SHAPE, "REQ-SHD-007"),
    "72 not a list": (with_entry(shape=3), 12, Code.SHARD_SHAPE, "REQ-SHD-007"),
    "72 -0": (
        padded('{"w":{"dtype":"F32","shape":[-0],"data_offsets":[0,0]}}'),
        0,
        SYNTAX,
        "REQ-SHD-004",
    ),
    "73 2^64-1": (with_entry(shape=[2**64 - 1]), 12, Code.SHARD_SHAPE, "REQ-SHD-007"),
    "73 a product that wraps around": (
        with_entry(shape=[4194305, 4194305, 211106198978564]),
        12,
        Code.SHARD_SHAPE,
        "REQ-SHD-007",
    ),
    "73 5,001 digits": (
        padded('{"w":{"dtype":"F32","shape":[' + "1" * 5001 + '],"data_offsets":[0,0]}}'),
        0,
        SYNTAX,
        "REQ-SHD-004",
    ),
    "74 [0, 2^62, 2^62]": (
        with_entry(shape=[0, 2**62, 2**62], data_offsets=[0, 0]),
        0,
        Code.SHARD_SHAPE,
        "REQ-SHD-007",
    ),
    "74 [0, 2^48, 2^48]": (
        with_entry(shape=[0, 2**48, 2**48], data_offsets=[0, 0]),
        0,
        Code.SHARD_SHAPE,
        "REQ-SHD-007",
    ),
    "75 rank 33": (with_entry(shape=[1] * 33), 12, Code.SHARD_SHAPE, "REQ-SHD-007"),
    "75 rank 100,000": (with_entry(shape=[1] * 100_000), 12, Code.SHARD_SHAPE, "REQ-SHD-007"),
    "76 offsets reversed": (with_entry(data_offsets=[12, 0]), 12, SCHEMA, "REQ-SHD-006"),
    "76 offsets negative": (with_entry(data_offsets=[-12, 0]), 12, SCHEMA, "REQ-SHD-006"),
    "77 overlap": (header(a=F32, b=F32), 12, Code.SHARD_OFFSETS, "REQ-SHD-008"),
    "77 overlap by a byte": (
        header(a=F32, b={**F32, "data_offsets": [11, 23]}),
        23,
        Code.SHARD_OFFSETS,
        "REQ-SHD-008",
    ),
    "78 hole": (
        header(a=F32, b={**F32, "data_offsets": [16, 28]}),
        28,
        Code.SHARD_OFFSETS,
        "REQ-SHD-008",
    ),
    "79 bytes behind the last": (with_entry(), 13, Code.SHARD_OFFSETS, "REQ-SHD-008"),
    "79 no tensors, and bytes": (header(), 1, Code.SHARD_OFFSETS, "REQ-SHD-008"),
    "80 first not at 0": (with_entry(data_offsets=[4, 16]), 16, Code.SHARD_OFFSETS, "REQ-SHD-008"),
    "81 one offset": (with_entry(data_offsets=[0]), 12, SCHEMA, "REQ-SHD-006"),
    "81 three offsets": (with_entry(data_offsets=[0, 12, 12]), 12, SCHEMA, "REQ-SHD-006"),
    "81 offsets true": (
        with_entry(shape=[0], data_offsets=[False, False]),
        0,
        SCHEMA,
        "REQ-SHD-006",
    ),
    "82 bytes that don't fit the shape": (
        with_entry(shape=[2]),
        12,
        Code.SHARD_OFFSETS,
        "REQ-SHD-008",
    ),
    "82 a scalar of 12 bytes": (with_entry(shape=[]), 12, Code.SHARD_OFFSETS, "REQ-SHD-008"),
    "82 file shorter than its tensors": (with_entry(), 11, Code.SHARD_OFFSETS, "REQ-SHD-008"),
    "83 a dtype below a byte": (
        with_entry(dtype="F4", shape=[3], data_offsets=[0, 2]),
        2,
        Code.SHARD_DTYPE,
        "REQ-SHD-006",
    ),
    "85 data not aligned": ((2).to_bytes(8, "little") + b"{}", 0, NBYTES, "REQ-SHD-001"),
    "87 pickle": (
        pickle.dumps({"w": [1.0] * 100}, protocol=4) + bytes(99),
        0,
        NBYTES,
        "REQ-SHD-001",
    ),
    "87 ZIP": (zip_file(), 0, NBYTES, "REQ-SHD-001"),
    "87 GGUF": (b"GGUF\3\0\0\0" + bytes(99), 0, NBYTES, "REQ-SHD-001"),
    "87 HDF5": (b"\x89HDF\r\n\x1a\n" + bytes(99), 0, NBYTES, "REQ-SHD-001"),
    "not UTF-8": (padded(b'{"\xff":1}'), 0, SYNTAX, "REQ-SHD-004"),
    "a lone surrogate in a key": (padded(r'{"\ud800":{}}'), 0, SYNTAX, "REQ-SHD-004"),
    "a lone surrogate in __metadata__": (
        padded(r'{"__metadata__":{"a":"\udc00"}}'),
        0,
        SYNTAX,
        "REQ-SHD-004",
    ),
    "NaN": (padded('{"a":NaN}'), 0, SYNTAX, "REQ-SHD-004"),
    "1e400": (padded('{"a":1e400}'), 0, SYNTAX, "REQ-SHD-004"),
    "two objects": (padded("{}{}"), 0, SYNTAX, "REQ-SHD-004"),
    "a trailing comma": (padded('{"__metadata__":{},}'), 0, SYNTAX, "REQ-SHD-004"),
    "four deep": (padded('{"a":{"shape":[[]]}}'), 0, SYNTAX, "REQ-SHD-004"),
    "100,000 arrays": (padded('{"a":' + "[" * 100_000), 0, SYNTAX, "REQ-SHD-004"),
    "100,000 objects": (padded('{"a":' * 100_000), 0, SYNTAX, "REQ-SHD-004"),
    "a million brackets": (padded('{"a":{"b":' + "[" * 1_000_000), 0, SYNTAX, "REQ-SHD-004"),
}


@pytest.mark.parametrize(
    ("content", "data_nbytes", "code", "requirement"), REFUSED.values(), ids=REFUSED
)
def test_hostile_headers_are_refused(content, data_nbytes, code, requirement):
    """No RecursionError, no MemoryError, no TypeError: the code of the row, in a second."""
    begin = time.process_time()
    error = error_of(lambda: parse(content, data_nbytes))
    assert (error.code, error.requirement, type(error)) == (code, requirement, FormatError)
    assert error.where.startswith("x.safetensors")
    assert time.process_time() - begin < 20
    assert len(str(error)) < 1000


def test_a_long_string_costs_little_memory():
    """Row 36: a backtracking pattern would remember every byte of it."""
    content = padded('{"' + "a" * (8 << 20) + '":{}}')
    tracemalloc.start()
    begin = time.process_time()
    assert code_of(lambda: parse(content)) == Code.SHARD_HEADER_SCHEMA
    assert time.process_time() - begin < 20
    assert tracemalloc.get_traced_memory()[1] < 128 << 20
    tracemalloc.stop()


NAMES = st.text(st.characters(codec="utf-8"), max_size=12) | st.sampled_from(
    [
        "",
        "{",
        "}{[",
        '"',
        "\\",
        "\0",
        "\u202e",
        "../../etc/passwd",
        "a{{{{{{b",
        "\U0001f600",
        "__metadata",
        '\\"[',
    ]
)
ROWS = st.lists(
    st.tuples(
        NAMES,
        st.sampled_from(
            sorted(dtype.safetensors for dtype in DTYPES.values() if dtype.safetensors)
        ),
        st.lists(st.integers(0, 3), max_size=4).map(tuple),
    ),
    max_size=6,
    unique_by=lambda row: row[0],
)


@given(ROWS)
def test_headers_come_back(rows):
    """REQ-SHD-001 to REQ-SHD-008: any names, dtypes, empty tensors and scalars; safetensors agrees."""
    content, entries = plan_shard(rows)
    end = max((entry.byte_end for entry in entries), default=len(content))
    assert len(content) % limits.SHARD_ALIGN_NBYTES == 0
    assert parse(content, end - len(content)) == {entry.key: entry for entry in entries}
    widths = {dtype.safetensors: dtype.nbytes for dtype in DTYPES.values()}
    assert all(entry.byte_begin % widths[entry.tag] == 0 for entry in entries), (
        "a box isn't aligned to its element"
    )
    opened = dict(safetensors.deserialize(content + bytes(end - len(content))))
    assert {key: (found["dtype"], tuple(found["shape"])) for key, found in opened.items()} == {
        entry.key: (entry.tag, entry.shape) for entry in entries
    }


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["BF16", "F64", "U8", "F32"]), st.sampled_from([1, 2**17, 2**19, 2**20])
        )
    )
)
def test_wider_elements_come_first_then_smaller_boxes_and_equal_ones_keep_their_order(rows):
    """REQ-SHD-002, REQ-SHD-003."""
    _, entries = plan_shard(
        [(str(number), tag, (count,)) for number, (tag, count) in enumerate(rows)]
    )
    width = {"BF16": 2, "F64": 8, "U8": 1, "F32": 4}
    order = sorted(entries, key=lambda entry: entry.byte_begin)
    expected = sorted(
        (-width[tag], width[tag] * count >= 2**20, number)
        for number, (tag, count) in enumerate(rows)
    )
    assert [int(entry.key) for entry in order] == [number for _, _, number in expected]


def test_a_header_over_its_limit_is_not_written(monkeypatch):
    """REQ-SHD-001."""
    monkeypatch.setattr(limits, "SHARD_HEADER_NBYTES", 100)
    assert code_of(lambda: dump_shard_header({"w" * 100: {}})) == Code.LIMIT_EXCEEDED


def test_bytes_behind_the_header_do_not_matter():
    content = with_entry()
    assert parse_shard_header(
        content + b"x" * 12, file_nbytes=len(content) + 12, where="x"
    ).keys() == {"w"}


TOKENS = st.sampled_from(
    [
        "{",
        "}",
        "[",
        "]",
        ",",
        ":",
        '"w"',
        '"dtype"',
        '"shape"',
        '"data_offsets"',
        '"F32"',
        '"U8"',
        "0",
        "1",
        "12",
        "-1",
        "null",
        "true",
        '"__metadata__"',
        '"a"',
        " ",
        "\n",
        "1.5",
        "{}",
        "[0,4]",
        "[]",
        '"',
        "\\",
        "\ud800",
    ]
)


@given(st.lists(TOKENS, max_size=30).map("".join), st.integers(0, 12))
def test_no_header_makes_anything_but_a_ckpterror(text, data_nbytes):
    code_of(lambda: parse(padded("{" + text), data_nbytes))
    code_of(lambda: parse(padded('{"w":{' + text + "}}"), data_nbytes))
