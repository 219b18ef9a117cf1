"""msgpack documents: rows 100 to 111 of the hostile inputs, and that only the canonical bytes are taken."""

import collections
import contextlib
import struct
import time
import tracemalloc
import zlib
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptfmt import limits
from ckptfmt.digest import digest_bytes
from ckptfmt.documents.msgpk import (
    Weight,
    dump_msgpack,
    dump_packed_document,
    parse_msgpack,
    parse_packed_document,
)
from ckptfmt.errors import Code, FormatError, IntegrityError
from tests.builders import code_of, error_of


def parse(content, limit_items=1000):
    return parse_msgpack(content, where="x.msgpack", limit_items=limit_items)


def array32(count):
    return b"\xdd" + struct.pack(">I", count)


REFUSED = {
    "100 nothing": (b"", Code.MSGPACK_SYNTAX, "REQ-DOC-021"),
    "100 cut string": (b"\xa3ab", Code.MSGPACK_SYNTAX, "REQ-DOC-021"),
    "100 cut integer": (b"\xcd\x01", Code.MSGPACK_SYNTAX, "REQ-DOC-021"),
    "100 cut length": (b"\xc6\0\0", Code.MSGPACK_SYNTAX, "REQ-DOC-021"),
    "100 cut count": (b"\xdd\0\0", Code.MSGPACK_SYNTAX, "REQ-DOC-021"),
    "101 bytes behind": (b"\xc0\xc0", Code.MSGPACK_SYNTAX, "REQ-DOC-021"),
    "102 0xc1": (b"\xc1", Code.MSGPACK_SYNTAX, "REQ-DOC-021"),
    "102 0xc1 within": (b"\x91\xc1", Code.MSGPACK_SYNTAX, "REQ-DOC-021"),
    "103 key twice": (b"\x82\xa1a\xc0\xa1a\xc0", Code.DOC_DUPLICATE_KEY, "REQ-DOC-020"),
    "104 integer as key": (b"\x81\x01\xc0", Code.MSGPACK_TYPE, "REQ-DOC-020"),
    "104 bytes as key": (b"\x81\xc4\x01a\xc0", Code.MSGPACK_TYPE, "REQ-DOC-020"),
    "104 array as key": (b"\x81\x90\xc0", Code.MSGPACK_TYPE, "REQ-DOC-020"),
    "104 map as key": (b"\x81\x80\xc0", Code.MSGPACK_TYPE, "REQ-DOC-020"),
    "104 nil as key": (b"\x81\xc0\xc0", Code.MSGPACK_TYPE, "REQ-DOC-020"),
    "105 timestamp": (b"\xd6\xff\0\0\0\0", Code.MSGPACK_TYPE, "REQ-DOC-020"),
    "105 fixext1": (b"\xd4\x01\0", Code.MSGPACK_TYPE, "REQ-DOC-020"),
    "105 ext8": (b"\xc7\0\x01", Code.MSGPACK_TYPE, "REQ-DOC-020"),
    "105 ext32 of 2^32-1": (b"\xc9" + b"\xff" * 4 + b"\x01", Code.MSGPACK_TYPE, "REQ-DOC-020"),
    "105 float32": (b"\xca\0\0\0\0", Code.MSGPACK_TYPE, "REQ-DOC-020"),
    "105 float64 NaN": (b"\xcb\x7f\xf8" + bytes(6), Code.MSGPACK_TYPE, "REQ-DOC-020"),
    "106 array32 of 2^32-1": (b"\xdd" + b"\xff" * 4, Code.MSGPACK_SYNTAX, "REQ-DOC-023"),
    "106 map32 of 2^32-1": (b"\xdf" + b"\xff" * 4, Code.MSGPACK_SYNTAX, "REQ-DOC-023"),
    "106 bin32 of 2^32-1": (b"\xc6" + b"\xff" * 4, Code.MSGPACK_SYNTAX, "REQ-DOC-021"),
    "106 str32 of 2^32-1": (b"\xdb" + b"\xff" * 4, Code.MSGPACK_SYNTAX, "REQ-DOC-021"),
    "106 a map of half the bytes": (b"\x82\xa1a\xc0", Code.MSGPACK_SYNTAX, "REQ-DOC-023"),
    "107 33 arrays": (b"\x91" * 33 + b"\xc0", Code.DOC_DEPTH, "REQ-DOC-023"),
    "107 33 maps": (b"\x81\xa0" * 33 + b"\xc0", Code.DOC_DEPTH, "REQ-DOC-023"),
    "107 100,000 arrays": (b"\x91" * 100_000 + b"\xc0", Code.DOC_DEPTH, "REQ-DOC-023"),
    "108 ten megabytes of 0x90": (b"\x90" * (10 << 20), Code.MSGPACK_SYNTAX, "REQ-DOC-021"),
    "108 ten million empty arrays": (
        array32(10_000_000) + b"\x90" * 10_000_000,
        Code.LIMIT_EXCEEDED,
        "REQ-DOC-023",
    ),
    "108 ten million empty maps": (
        array32(10_000_000) + b"\x80" * 10_000_000,
        Code.LIMIT_EXCEEDED,
        "REQ-DOC-023",
    ),
    "109 not UTF-8": (b"\xa1\xff", Code.DOC_ENCODING, "REQ-DOC-020"),
    "109 surrogate": (b"\xa3\xed\xa0\x80", Code.DOC_ENCODING, "REQ-DOC-020"),
    "109 overlong": (b"\xa2\xc0\x80", Code.DOC_ENCODING, "REQ-DOC-020"),
    "109 not UTF-8 in a key": (b"\x81\xa1\xff\xc0", Code.DOC_ENCODING, "REQ-DOC-020"),
    "110 uint8 of 127": (b"\xcc\x7f", Code.DOC_NOT_CANONICAL, "REQ-DOC-022"),
    "110 uint64 of 1": (b"\xcf" + bytes(7) + b"\x01", Code.DOC_NOT_CANONICAL, "REQ-DOC-022"),
    "110 int8 of 1": (b"\xd0\x01", Code.DOC_NOT_CANONICAL, "REQ-DOC-022"),
    "110 int64 of 2^40": (b"\xd3\0\0\1\0\0\0\0\0", Code.DOC_NOT_CANONICAL, "REQ-DOC-022"),
    "110 str8 of one byte": (b"\xd9\x01a", Code.DOC_NOT_CANONICAL, "REQ-DOC-022"),
    "110 bin16 of one byte": (b"\xc5\0\x01a", Code.DOC_NOT_CANONICAL, "REQ-DOC-022"),
    "110 array16 of none": (b"\xdc\0\0", Code.DOC_NOT_CANONICAL, "REQ-DOC-022"),
    "110 map16 of none": (b"\xde\0\0", Code.DOC_NOT_CANONICAL, "REQ-DOC-022"),
    "110 keys out of order": (b"\x82\xa1b\xc0\xa1a\xc0", Code.DOC_NOT_CANONICAL, "REQ-DOC-022"),
}


@pytest.mark.parametrize(("content", "code", "requirement"), REFUSED.values(), ids=REFUSED)
def test_hostile_values_are_refused(content, code, requirement):
    tracemalloc.start()
    begin = time.process_time()
    error = error_of(lambda: parse(content))
    elapsed = time.process_time() - begin
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (error.code, error.requirement, type(error)) == (code, requirement, FormatError)
    assert error.where == "x.msgpack"
    assert elapsed < 1
    assert peak < 1 << 20


def test_every_first_byte_has_an_outcome():
    """No byte makes anything but a value or a CkptError, whatever follows; REQ-DOC-020."""
    for first in range(256):
        for rest in (b"", b"\0", b"\xff" * 9, b"\0" * 9, b"\xc0" * 40):
            content = bytes([first]) + rest
            code = code_of(lambda content=content: parse(content))
            assert code == "ok" or code in {
                Code.MSGPACK_SYNTAX,
                Code.MSGPACK_TYPE,
                Code.DOC_NOT_CANONICAL,
                Code.DOC_ENCODING,
                Code.DOC_DUPLICATE_KEY,
            }


def sized(forms, count, rest):
    """Return the values of a length in each form that can hold the length: (first byte, width)."""
    return [
        bytes([first]) + count.to_bytes(width, "big") + rest
        for first, width in forms
        if count < 1 << 8 * width
    ]


LENGTHS = (0, 1, 15, 16, 17, 31, 32, 33, 255, 256, 257, 65_535, 65_536)
NUMBERS = sorted(
    sign * (1 << bits) + more
    for sign in (1, -1)
    for bits in (0, 5, 7, 8, 15, 16, 31, 32, 63)
    for more in (-1, 0, 1)
)


def every_form():
    for count in LENGTHS:
        yield from sized([(0xD9, 1), (0xDA, 2), (0xDB, 4)], count, b"x" * count)
        yield from sized([(0xC4, 1), (0xC5, 2), (0xC6, 4)], count, b"x" * count)
        yield from sized([(0xDC, 2), (0xDD, 4)], count, b"\xc0" * count)
        entries = b"".join(b"\xa5%05d\xc0" % number for number in range(count))
        yield from sized([(0xDE, 2), (0xDF, 4)], count, entries)
        for most, begin, rest in (
            (32, 0xA0, b"x" * count),
            (16, 0x90, b"\xc0" * count),
            (16, 0x80, entries),
        ):
            if count < most:
                yield bytes([begin + count]) + rest
    for number in NUMBERS:
        for first, is_signed in ((0xCC, False), (0xD0, True)):
            for power in range(4):
                with contextlib.suppress(OverflowError):
                    packed = number.to_bytes(1 << power, "big", signed=is_signed)
                    yield bytes([first + power]) + packed
        if -32 <= number < 128:
            yield number.to_bytes(1, "big", signed=number < 0)


def test_the_shortest_form_alone_is_taken():
    """REQ-DOC-022: msgpack's own packer is the oracle, for the last value of each form and the next."""
    counts = collections.Counter[bool]()
    for content in every_form():
        is_shortest = msgpack.packb(msgpack.unpackb(content, strict_map_key=False)) == content
        nested = b"\x92\xc0" + content
        wanted = "ok" if is_shortest else Code.DOC_NOT_CANONICAL
        assert code_of(lambda content=content: parse(content, 1 << 20)) == wanted, content[:9]
        assert code_of(lambda content=nested: parse(content, 1 << 20)) == wanted, content[:9]
        counts[is_shortest] += 1
    assert min(counts.values()) > 80


def test_limits_are_the_last_that_is_taken():
    """REQ-DOC-023; REQ-LIM-002."""
    assert code_of(lambda: parse(b"\x91" * 32 + b"\xc0")) == "ok"
    assert code_of(lambda: parse(dump_msgpack([None] * 999))) == "ok"
    assert code_of(lambda: parse(dump_msgpack([None] * 1000))) == Code.LIMIT_EXCEEDED
    assert code_of(lambda: parse(dump_msgpack({str(i): None for i in range(499)}))) == "ok"
    assert (
        code_of(lambda: parse(dump_msgpack({str(i): None for i in range(500)})))
        == Code.LIMIT_EXCEEDED
    )


@pytest.mark.parametrize(("count", "code"), [(998, "ok"), (999, Code.LIMIT_EXCEEDED)])
def test_an_index_or_part_has_few_arrays_and_maps(count, code):
    """REQ-DOC-031: rows are in columns, whatever the number of rows."""
    stored = zlib.compress(dump_msgpack({"rows": [[]] * count}), 0)
    content = dump_msgpack(
        {
            "digest": digest_bytes(stored),
            "nbytes": len(zlib.decompress(stored)),
            "signed": stored,
        }
    )

    assert code_of(lambda: parse_packed_document(content, where="x")) == code


TEXTS = st.text(st.characters(codec="utf-8"), max_size=40)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | TEXTS
    | st.binary(max_size=300),
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=30,
)


@given(VALUES)
def test_values_come_back(value):
    """REQ-DOC-020, REQ-DOC-022."""
    content = dump_msgpack(value)
    assert parse(content, 10_000) == value
    assert dump_msgpack(parse(content, 10_000)) == content
    assert msgpack.unpackb(content, strict_map_key=False) == value


@given(VALUES)
def test_documents_come_back(value):
    """REQ-DOC-025."""
    content, digest = dump_packed_document({"value": value})
    assert parse_packed_document(content, where="x")[:2] == ({"value": value}, digest)
    assert parse_packed_document(content, where="x", digest=digest)[:2] == (
        {"value": value},
        digest,
    )


def test_maps_are_sorted_by_the_bytes_of_their_keys():
    """REQ-DOC-022: astral characters behind the private ones, unlike in UTF-16."""
    value = {"\U0001f600": 1, "\uffee": 2, "b": 3, "ab": 4, "": 5, "nested": {"z": 1, "a": 2}}
    content = dump_msgpack(value)
    assert list(parse(content)) == ["", "ab", "b", "nested", "\uffee", "\U0001f600"]
    assert list(parse(content)["nested"]) == ["a", "z"]


def with_dictionary(content):
    stream = zlib.compressobj(zdict=content)
    return stream.compress(content) + stream.flush()


def enveloped(**members):
    return dump_msgpack(members)


CONTENT = dump_msgpack({"a": 1})
SIGNED = zlib.compress(CONTENT)


def sealed(signed=SIGNED, nbytes: Any = 4):
    """Return an envelope under a valid digest."""
    return enveloped(digest=digest_bytes(signed), nbytes=nbytes, signed=signed)


def test_any_zlib_stream_of_the_content_is_taken():
    """REQ-DOC-027: builds of zlib differ in what they make of the same bytes."""
    streams = {zlib.compress(CONTENT, level) for level in range(10)} | {
        zlib.compress(CONTENT, wbits=bits) for bits in (9, 15)
    }
    assert len(streams) > 1
    for stream in streams:
        assert parse_packed_document(sealed(stream), where="x")[:2] == (
            {"a": 1},
            digest_bytes(stream),
        )


DOCUMENTS = {
    "not a map": (dump_msgpack([1]), Code.DOC_SCHEMA, FormatError),
    "no digest": (enveloped(nbytes=4, signed=SIGNED), Code.DOC_SCHEMA, FormatError),
    "no nbytes": (
        enveloped(signed=SIGNED, digest=digest_bytes(SIGNED)),
        Code.DOC_SCHEMA,
        FormatError,
    ),
    "a member more": (
        enveloped(signed=SIGNED, nbytes=4, digest=digest_bytes(SIGNED), x=1),
        Code.DOC_SCHEMA,
        FormatError,
    ),
    "digest as text": (
        enveloped(signed=SIGNED, nbytes=4, digest=digest_bytes(SIGNED).hex()),
        Code.DOC_SCHEMA,
        FormatError,
    ),
    "signed as a map": (
        enveloped(signed={"a": 1}, nbytes=4, digest=digest_bytes(SIGNED)),
        Code.DOC_SCHEMA,
        FormatError,
    ),
    "nbytes true": (sealed(nbytes=True), Code.DOC_SCHEMA, FormatError),
    "nbytes negative": (sealed(nbytes=-1), Code.DOC_SCHEMA, FormatError),
    "nbytes as text": (sealed(nbytes="4"), Code.DOC_SCHEMA, FormatError),
    "another digest": (
        enveloped(signed=SIGNED, nbytes=4, digest=bytes(32)),
        Code.DOC_DIGEST,
        IntegrityError,
    ),
    "a short digest": (
        enveloped(signed=SIGNED, nbytes=4, digest=digest_bytes(SIGNED)[:16]),
        Code.DOC_DIGEST,
        IntegrityError,
    ),
    "no digest at all": (
        enveloped(signed=SIGNED, nbytes=4, digest=b""),
        Code.DOC_DIGEST,
        IntegrityError,
    ),
    "the digest of what is inflated": (
        enveloped(signed=SIGNED, nbytes=4, digest=digest_bytes(CONTENT)),
        Code.DOC_DIGEST,
        IntegrityError,
    ),
    "signed isn't a map": (dump_packed_document([1])[0], Code.DOC_SCHEMA, FormatError),  # type: ignore[arg-type]
    "signed isn't msgpack": (sealed(zlib.compress(b"\xc1"), 1), Code.MSGPACK_SYNTAX, FormatError),
    "signed is empty": (sealed(b"", 0), Code.DOC_COMPRESSION, FormatError),
    "nothing is signed": (sealed(zlib.compress(b""), 0), Code.MSGPACK_SYNTAX, FormatError),
    "signed isn't compressed": (sealed(CONTENT), Code.DOC_COMPRESSION, FormatError),
    "a byte less": (sealed(nbytes=len(CONTENT) - 1), Code.DOC_COMPRESSION, FormatError),
    "a byte more": (sealed(nbytes=len(CONTENT) + 1), Code.DOC_COMPRESSION, FormatError),
    "a byte behind the stream": (sealed(SIGNED + b"\0"), Code.DOC_COMPRESSION, FormatError),
    "a second stream": (sealed(SIGNED + SIGNED), Code.DOC_COMPRESSION, FormatError),
    "a stream that ends early": (sealed(SIGNED[:-1]), Code.DOC_COMPRESSION, FormatError),
    "a stream with a wrong checksum": (
        sealed(SIGNED[:-1] + b"\0"),
        Code.DOC_COMPRESSION,
        FormatError,
    ),
    "raw deflate": (sealed(zlib.compress(CONTENT, wbits=-15)), Code.DOC_COMPRESSION, FormatError),
    "gzip": (sealed(zlib.compress(CONTENT, wbits=31)), Code.DOC_COMPRESSION, FormatError),
    "a dictionary": (sealed(with_dictionary(CONTENT)), Code.DOC_COMPRESSION, FormatError),
    "many values": (
        dump_msgpack(dict.fromkeys(map(str, range(9)))),
        Code.LIMIT_EXCEEDED,
        FormatError,
    ),
}


@pytest.mark.parametrize(("content", "code", "kind"), DOCUMENTS.values(), ids=DOCUMENTS)
def test_other_envelopes_are_refused(content, code, kind):
    """REQ-DOC-025, REQ-DOC-027."""
    error = error_of(lambda: parse_packed_document(content, where="x"))
    assert (error.code, type(error)) == (code, kind)


def test_a_bomb_is_refused_before_it_goes_off():
    """Row 108; REQ-DOC-028: neither what it says nor what it holds is allocated."""
    bomb = zlib.compress(bytes(256 << 20), 9)
    assert len(bomb) < 300_000
    for nbytes, code in (
        (256 << 20, Code.LIMIT_EXCEEDED),  # it says what it is, and that is too much for so little
        (limits.INFLATED_RATIO * len(bomb) + 1, Code.LIMIT_EXCEEDED),
        (limits.MSGPACK_NBYTES + 1, Code.LIMIT_EXCEEDED),
        (2**64 - 1, Code.LIMIT_EXCEEDED),
        (1000, Code.DOC_COMPRESSION),  # it says that it is small
        (0, Code.DOC_COMPRESSION),  # or nothing, which must not mean no limit
    ):
        tracemalloc.start()
        begin = time.process_time()
        error = error_of(
            lambda nbytes=nbytes: parse_packed_document(sealed(bomb, nbytes), where="x")
        )
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
        tracemalloc.stop()
        assert time.process_time() - begin < 20
        assert error.code == code


def test_what_is_much_larger_than_stored_has_a_limit():
    """REQ-DOC-028, REQ-LIM-002: up to a size, or up to a ratio, whichever is more."""
    zeros = {"a": bytes(limits.INFLATED_NBYTES - 100)}
    assert parse_packed_document(dump_packed_document(zeros)[0], where="x")[0] == zeros
    with_zeros = dump_msgpack({"a": bytes(limits.INFLATED_NBYTES)})
    stream = zlib.compress(with_zeros)
    assert (
        code_of(lambda: parse_packed_document(sealed(stream, len(with_zeros)), where="x"))
        == Code.LIMIT_EXCEEDED
    )
    noise = np.random.default_rng(1).bytes(4 << 10)
    loud = dump_msgpack({"a": bytes(limits.INFLATED_NBYTES), "b": noise})
    assert parse_packed_document(sealed(zlib.compress(loud), len(loud)), where="x")[0]["b"] == noise


@pytest.mark.parametrize(
    "weight",
    [Weight(rows=9000), Weight(extents=40_000), Weight(tree_nbytes=70_000), Weight()],
    ids=repr,
)
def test_what_is_regular_is_compressed_less_where_a_reader_would_refuse_it(weight):
    """REQ-DOC-028, REQ-DOC-029, REQ-DOC-030: a million tensors named by number are as few bytes as zlib can."""
    signed = {"a": bytes(90_000)}
    content, digest = dump_packed_document(signed, weight)
    assert parse_packed_document(content, where="x")[:2] == (signed, digest)
    assert weight.fits(Weight.most(parse_packed_document(content, where="x")[2]))


def test_a_digest_that_another_document_gives_counts():
    """REQ-OPN-003."""
    content, _ = dump_packed_document({"a": 1})
    assert (
        code_of(lambda: parse_packed_document(content, where="x", digest=bytes(32)))
        == Code.DOC_DIGEST
    )


def test_a_bomb_in_a_tree_costs_a_second():
    """Row 108: a tree has at most a million values, however small they are; REQ-TRE-007."""
    content = array32(2_000_000) + b"\x90" * 2_000_000
    begin = time.process_time()
    assert code_of(lambda: parse(content, limits.TREE_ITEMS)) == Code.LIMIT_EXCEEDED
    assert time.process_time() - begin < 20
