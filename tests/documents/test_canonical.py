"""JSON documents: rows 3 to 24 of the hostile inputs, and that only the canonical bytes are taken."""

import json
import time
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptfmt import limits
from ckptfmt.documents.canonical import (
    check_string,
    check_version,
    dump_canonical,
    dump_document,
    nests_deeper,
    parse_document,
)
from ckptfmt.errors import Code, FormatError, IntegrityError, UnsupportedError
from tests.builders import code_of, error_of

FEATURES: dict[str, Any] = {"reader": [], "writer": []}
RUN = {"type": "run", "format_version": "1.0", "features": FEATURES, "run_id": "0" * 32}


def parse(content, **options):
    return parse_document(content, where="x.json", **{"types": ("run",), **options})


def test_what_is_dumped_is_parsed():
    signed, digest = parse(dump_document(RUN))
    assert signed == RUN
    assert digest.startswith("blake3:")


def refused(text, code, requirement):
    return pytest.param(
        text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"),
        code,
        requirement,
    )


REFUSED = {
    "3 no bytes": refused("", Code.DOC_SYNTAX, "REQ-DOC-003"),
    "5 byte-order mark": refused("\ufeff{}", Code.DOC_ENCODING, "REQ-DOC-002"),
    "6 not UTF-8": refused(b'{"a":"\xff"}', Code.DOC_ENCODING, "REQ-DOC-002"),
    "6 overlong": refused(b'{"a":"\xc0\x80"}', Code.DOC_ENCODING, "REQ-DOC-002"),
    "6 surrogate in UTF-8": refused('{"a":"\ud800"}', Code.DOC_ENCODING, "REQ-DOC-002"),
    "7 UTF-16": refused('{"a":1}'.encode("utf-16"), Code.DOC_ENCODING, "REQ-DOC-002"),
    "7 UTF-16 without mark": refused('{"a":1}'.encode("utf-16-le"), Code.DOC_SYNTAX, "REQ-DOC-003"),
    "7 UTF-32": refused('{"a":1}'.encode("utf-32"), Code.DOC_ENCODING, "REQ-DOC-002"),
    "8 key twice": refused('{"a":1,"a":1}', Code.DOC_DUPLICATE_KEY, "REQ-DOC-004"),
    "9 key twice, within": refused('{"a":{"b":1,"b":2}}', Code.DOC_DUPLICATE_KEY, "REQ-DOC-004"),
    "10 key twice by an escape": refused(
        r'{"a":1,"\u0061":2}', Code.DOC_DUPLICATE_KEY, "REQ-DOC-004"
    ),
    "11 keys equal under NFC": refused('{"\u00e9":1,"e\u0301":2}', Code.DOC_STRING, "REQ-DOC-006"),
    "12 NaN": refused('{"a":NaN}', Code.DOC_NUMBER, "REQ-DOC-005"),
    "12 Infinity": refused('{"a":Infinity}', Code.DOC_NUMBER, "REQ-DOC-005"),
    "12 -Infinity": refused('{"a":-Infinity}', Code.DOC_NUMBER, "REQ-DOC-005"),
    "13 1e400": refused('{"a":1e400}', Code.DOC_NUMBER, "REQ-DOC-005"),
    "14 1.0": refused('{"a":1.0}', Code.DOC_NUMBER, "REQ-DOC-005"),
    "14 1e1": refused('{"a":1e1}', Code.DOC_NUMBER, "REQ-DOC-005"),
    "15 2^53": refused('{"a":9007199254740992}', Code.DOC_NUMBER, "REQ-DOC-005"),
    "15 -2^53": refused('{"a":-9007199254740992}', Code.DOC_NUMBER, "REQ-DOC-005"),
    "16 5,001 digits": refused('{"a":' + "1" * 5001 + "}", Code.DOC_NUMBER, "REQ-DOC-005"),
    "16 a million digits": refused('{"a":' + "1" * 1_000_000 + "}", Code.DOC_NUMBER, "REQ-DOC-005"),
    "17 -0": refused('{"a":-0}', Code.DOC_NUMBER, "REQ-DOC-005"),
    "17 leading zero": refused('{"a":01}', Code.DOC_SYNTAX, "REQ-DOC-003"),
    "19 17 deep": refused("[" * 17 + "]" * 17, Code.DOC_DEPTH, "REQ-DOC-007"),
    "19 100,000 arrays": refused("[" * 100_000, Code.DOC_DEPTH, "REQ-DOC-007"),
    "19 100,000 objects": refused('{"a":' * 100_000, Code.DOC_DEPTH, "REQ-DOC-007"),
    "19 closed before opened": refused(
        "]" * 100_000 + "[" * 100_000, Code.DOC_SYNTAX, "REQ-DOC-003"
    ),
    "20 lone surrogate": refused(r'{"a":"\ud800"}', Code.DOC_STRING, "REQ-DOC-006"),
    "20 lone low surrogate in a key": refused(r'{"\udc00":1}', Code.DOC_STRING, "REQ-DOC-006"),
    "21 NUL": refused(r'{"a":"\u0000"}', Code.DOC_STRING, "REQ-DOC-006"),
    "21 NUL, raw": refused('{"a":"\0"}', Code.DOC_SYNTAX, "REQ-DOC-003"),
    "21 DEL": refused('{"a":"\x7f"}', Code.DOC_STRING, "REQ-DOC-006"),
    "21 C1": refused('{"a":"\x85"}', Code.DOC_STRING, "REQ-DOC-006"),
    "21 right-to-left override": refused('{"a":"\u202e"}', Code.DOC_STRING, "REQ-DOC-006"),
    "21 bidi character in a key": refused('{"\u2066":1}', Code.DOC_STRING, "REQ-DOC-006"),
    "22 two documents": refused("{} {}", Code.DOC_SYNTAX, "REQ-DOC-003"),
    "22 bytes behind": refused("{}\0", Code.DOC_SYNTAX, "REQ-DOC-003"),
    "23 comment": refused("{/**/}", Code.DOC_SYNTAX, "REQ-DOC-003"),
    "23 trailing comma": refused('{"a":1,}', Code.DOC_SYNTAX, "REQ-DOC-003"),
    "23 single quotes": refused("{'a':1}", Code.DOC_SYNTAX, "REQ-DOC-003"),
    "25 array": refused("[]", Code.DOC_SYNTAX, "REQ-DOC-003"),
    "25 string": refused('"a"', Code.DOC_SYNTAX, "REQ-DOC-003"),
    "25 null": refused("null", Code.DOC_SYNTAX, "REQ-DOC-003"),
    "26 no members": refused("{}", Code.DOC_SCHEMA, "REQ-DOC-011"),
    "26 another member": refused('{"a":1,"digest":"","signed":{}}', Code.DOC_SCHEMA, "REQ-DOC-011"),
    "26 signed is no object": refused('{"digest":"","signed":[]}', Code.DOC_SCHEMA, "REQ-DOC-011"),
    "a digest that is no string": refused(
        '{"digest":[],"signed":{}}', Code.DOC_DIGEST, "REQ-DOC-009"
    ),
    "a string of 4,097 bytes": refused(
        '{"a":"' + "é" * 2048 + 'x"}', Code.DOC_STRING, "REQ-DOC-006"
    ),
}


@pytest.mark.parametrize(("content", "code", "requirement"), REFUSED.values(), ids=REFUSED)
def test_hostile_documents_are_refused(content, code, requirement):
    begin = time.process_time()
    error = error_of(lambda: parse(content))
    assert (error.code, error.requirement) == (code, requirement)
    assert error.where.startswith("x.json")
    assert time.process_time() - begin < 20
    assert len(str(error)) < 1000


def envelope(signed):
    return dump_document(signed)


NOT_CANONICAL = {
    "white space": lambda text: text.replace(b",", b", "),
    "line feed at the end": lambda text: text + b"\n",
    "members out of order": lambda text: (
        b'{"signed":' + text.partition(b'"signed":')[2][:-1] + b"," + text[1:83] + b"}"
    ),
    "escaped letter": lambda text: text.replace(b'"run"', rb'"\u0072un"'),
    "escaped slash": lambda text: text.replace(b'"run"', rb'"ru\/n"'),
    "white space before": lambda text: b" " + text,
}


@pytest.mark.parametrize("edit", NOT_CANONICAL)
def test_only_the_canonical_bytes_are_taken(edit):
    """Row 24; REQ-DOC-001."""
    content = NOT_CANONICAL[edit](dump_document(RUN))
    assert json.loads(content)["signed"].keys() == RUN.keys()
    error = error_of(lambda: parse(content))
    assert (error.code, error.requirement) == (Code.DOC_NOT_CANONICAL, "REQ-DOC-001")


def test_a_digest_of_other_contents_is_damage():
    """Row 35; REQ-DOC-009: an IntegrityError, before anything is said of the contents."""
    content = dump_document({**RUN, "format_version": "9.9"}).replace(b'"9.9"', b'"9.8"')
    error = error_of(lambda: parse(content))
    assert (error.code, type(error)) == (Code.DOC_DIGEST, IntegrityError)


SCHEMA = {
    "18 true where a number is": ({"run_id": True}, Code.DOC_SCHEMA),
    "26 unknown member": ({"owner": "me"}, Code.DOC_SCHEMA),
    "27 unknown reader feature": (
        {"features": {"reader": ["packs"], "writer": []}},
        Code.FEATURE_UNSUPPORTED,
    ),
    "27 before anything else is looked at": (
        {"features": {"reader": ["packs"], "writer": []}, "run_id": 7, "more": 1},
        Code.FEATURE_UNSUPPORTED,
    ),
    "28 newer version": ({"format_version": "2.0"}, Code.VERSION_UNSUPPORTED),
    "28 before anything else is looked at": (
        {"format_version": "0.2", "features": 1, "x": 1},
        Code.VERSION_UNSUPPORTED,
    ),
    "29 version as a number": ({"format_version": 1}, Code.DOC_SCHEMA),
    "29 version null": ({"format_version": None}, Code.DOC_SCHEMA),
    "31 Arabic digits": ({"run_id": "\u0660" * 32}, Code.DOC_SCHEMA),
    "32 upper case": ({"run_id": "A" * 32}, Code.DOC_SCHEMA),
    "32 too short": ({"run_id": "0" * 31}, Code.DOC_SCHEMA),
    "another type": ({"type": "launch"}, Code.DOC_SCHEMA),
    "a type that is no string": ({"type": ["run"]}, Code.DOC_SCHEMA),
    "no features": ({"features": None}, Code.DOC_SCHEMA),
    "features with a member more": ({"features": {**FEATURES, "x": []}}, Code.DOC_SCHEMA),
    "features with a member less": ({"features": {"reader": []}}, Code.DOC_SCHEMA),
    "reader features of another type": (
        {"features": {"reader": "x", "writer": []}},
        Code.DOC_SCHEMA,
    ),
    "a reader feature that is no string": (
        {"features": {"reader": [1], "writer": []}},
        Code.DOC_SCHEMA,
    ),
    "a writer feature that is no string": (
        {"features": {"reader": [], "writer": [{}]}},
        Code.DOC_SCHEMA,
    ),
    "a writer feature with a wrong name": (
        {"features": {"reader": [], "writer": ["A b"]}},
        Code.DOC_SCHEMA,
    ),
    "a writer feature twice": ({"features": {"reader": [], "writer": ["a", "a"]}}, Code.DOC_SCHEMA),
    "65 writer features": (
        {"features": {"reader": [], "writer": [f"f{i}" for i in range(65)]}},
        Code.DOC_SCHEMA,
    ),
}


@pytest.mark.parametrize(("members", "code"), SCHEMA.values(), ids=SCHEMA)
def test_documents_that_break_their_schema_are_refused(members, code):
    """REQ-DOC-010, REQ-DOC-011, REQ-VER-001, REQ-VER-002, REQ-VER-008."""
    error = error_of(lambda: parse(dump_document({**RUN, **members})))
    assert error.code == code
    assert isinstance(error, UnsupportedError if "UNSUPPORTED" in code else FormatError)
    assert "#/signed" in str(error.where)


@pytest.mark.parametrize("missing", RUN)
def test_no_member_may_be_missing(missing):
    """Row 29; REQ-DOC-011."""
    content = dump_document({key: value for key, value in RUN.items() if key != missing})
    assert code_of(lambda: parse(content)) == Code.DOC_SCHEMA


def test_writer_features_are_left_to_those_who_write():
    """REQ-VER-002."""
    signed, _ = parse(
        dump_document({**RUN, "features": {"reader": [], "writer": ["packs", "me.x-1_2"]}})
    )
    assert signed["features"]["writer"] == ["packs", "me.x-1_2"]


def test_a_line_feed_behind_a_hexadecimal_id_is_refused():
    """Row 30: the dollar of Python's patterns matches before it; REQ-DOC-006."""
    content = dump_canonical(RUN).replace(b'00"', rb'00\n"')
    assert code_of(lambda: parse(b'{"digest":"","signed":' + content + b"}")) == Code.DOC_STRING


def test_a_document_over_its_limit_is_refused_unread():
    """Row 4; REQ-DOC-008."""
    error = error_of(lambda: parse(b"x" * 11, limit_nbytes=10))
    assert (error.code, error.requirement) == (Code.LIMIT_EXCEEDED, "REQ-DOC-008")
    assert code_of(lambda: parse(b" " * (limits.JSON_NBYTES + 1))) == Code.LIMIT_EXCEEDED


def nested(depth):
    value: object = 1
    for _ in range(depth):
        value = [value]
    return value


def test_depth_16_is_the_last_that_is_parsed():
    """REQ-DOC-007; brackets within strings don't count."""
    assert nests_deeper(dump_canonical(nested(16)), 16) is False
    assert nests_deeper(dump_canonical(nested(17)), 16) is True
    assert nests_deeper(b'{"' + b"[{" * 1000 + b'":"\\"[[[\\\\"}', 1) is False
    deep = dump_document({"type": "run", "a": nested(14)})
    assert code_of(lambda: parse(deep)) == Code.DOC_SCHEMA
    assert code_of(lambda: parse(dump_document({"type": "run", "a": nested(15)}))) == Code.DOC_DEPTH


def large(text):
    return text.encode()[: limits.JSON_NBYTES]


KEYS = [f"{i:x}" for i in range(90_000)]
BOMBS = {
    "36 a string for a backtracking pattern": large('{"a":"' + "a" * 10**6 + '"}'),
    "36 quotes": large('{"a":"' + '\\"' * (1 << 19)),
    "36 backslashes": large('{"' + "\\" * (1 << 20)),
    "90,000 members, the last one twice": large(
        "{" + ",".join(f'"{key}":1' for key in [*KEYS, KEYS[-1]]) + "}"
    ),
    "objects in a list that must be unique": dump_document(
        {**RUN, "features": {"reader": [], "writer": [{"a": i} for i in range(80_000)]}}
    ),
    "strings in a list that must be unique": dump_document(
        {**RUN, "features": {"reader": [], "writer": [f"a{i}" for i in range(80_000)]}}
    ),
    "unknown members": dump_document({**RUN, **dict.fromkeys(KEYS[:50_000], 1)}),
    "a hundred thousand zeros": dump_document({**RUN, "run_id": [0] * 100_000}),
}


@pytest.mark.parametrize("content", BOMBS.values(), ids=BOMBS)
def test_bombs_cost_a_second_and_little_memory(content):
    """Rows 16, 19 and 36: nothing is quadratic, and no pattern backtracks."""
    begin = time.process_time()
    assert code_of(lambda: parse(content)) != "ok"
    assert time.process_time() - begin < 20
    tracemalloc.start()
    assert code_of(lambda: parse(content)) != "ok"
    assert tracemalloc.get_traced_memory()[1] < 64 << 20
    tracemalloc.stop()


FORBIDDEN = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\ud800\udfff\x7f\x80\x9f\0\x1f"


@pytest.mark.parametrize("char", FORBIDDEN)
def test_characters_that_cannot_be_seen_are_refused(char):
    """REQ-DOC-006."""
    error = error_of(lambda: check_string(f"a{char}b", "x"))
    assert (error.code, error.requirement) == (Code.DOC_STRING, "REQ-DOC-006")
    assert char not in str(error)


@pytest.mark.parametrize(
    "text", ["", "é", "日本語", "👩‍🚀", "a" * 4096, " ~\xa0", "\u061b\u200d\u2065"]
)
def test_other_characters_are_taken(text):
    """REQ-DOC-006."""
    check_string(text, "x")


def test_the_version_is_checked_before_the_features():
    """REQ-DOC-010, REQ-VER-001."""
    wrong = {"format_version": "0.2", "features": {"reader": ["packs"], "writer": []}}
    assert code_of(lambda: check_version(wrong, "x")) == Code.VERSION_UNSUPPORTED
    assert (
        code_of(lambda: check_version({**wrong, "format_version": "1.0"}, "x"))
        == Code.FEATURE_UNSUPPORTED
    )


TEXTS = st.text(
    st.characters(min_codepoint=0x20, max_codepoint=0x24F, exclude_categories=("Cc", "Cs")),
    max_size=8,
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-limits.JSON_INTEGER, limits.JSON_INTEGER) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=12,
)


@given(st.dictionaries(TEXTS, VALUES, max_size=4))
def test_canonical_bytes_are_a_fixed_point(value):
    """REQ-DOC-001: what is parsed and dumped again gives the same bytes."""
    content = dump_canonical(value)
    assert dump_canonical(json.loads(content)) == content
    # It fails only at what the schema says of it, or is too deep.
    assert code_of(lambda: parse(dump_document(value))) in {
        Code.DOC_SCHEMA,
        Code.VERSION_UNSUPPORTED,
        Code.DOC_DEPTH,
    }
