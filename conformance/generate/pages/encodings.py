"""Encodings; spec/delta/55-encodings.md."""

from __future__ import annotations

import struct
from typing import Any

from conformance.generate.cases import Page
from conformance.generate.chains import BASE, DELTA, Chain, base_plan, chain
from conformance.generate.encodings import (
    LANES,
    changes,
    classes,
    encode,
    frame,
    lanes,
    number,
    planes,
    set_bytes,
    sparse_plane,
    steps_between,
    string,
    zstd_string,
)
from conformance.generate.plans import DTYPES, Plan, Stored, Tensor, whole

__all__ = ["page"]

WHY = "a digest says who wrote something, not that it does no harm"


def page() -> Page:
    """Return the cases of encodings."""
    made = Page("encodings")
    _each(made)
    _dtypes(made)
    _bits(made)
    _forms(made)
    _strings(made)
    _frames(made)
    _sets(made)
    _steps(made)
    return made


def _floats(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


#: Sixteen weights, before and after a step.
BEFORE = _floats(*(0.5 + number / 16 for number in range(16)))
AFTER = bytearray(BEFORE)
AFTER[12:16] = _floats(struct.unpack("<f", BEFORE[12:16])[0] + 2**-20)
AFTER[40:44] = bytes([BEFORE[40] + 1, *BEFORE[41:44]])
CONTENT = bytes(AFTER)
BASE_TENSOR = Tensor(name="w", shape=(16,), content=BEFORE)


def _made(
    encoding: str, stored: bytes | None = None, content: bytes = CONTENT, base: Tensor = BASE_TENSOR
) -> Any:
    """Return a delta of a single block in the given storage form."""
    block = encode(encoding, content, base.content, base.dtype) if stored is None else stored
    needs = encoding != "planes"
    extent = Stored(encoding=encoding, blocks=[block], reference=BASE if needs else None)
    tensor = Tensor(
        name=base.name,
        dtype=base.dtype,
        shape=base.shape,
        content=content,
        pieces=[whole(base.shape, stored=[extent])],
    )
    made = chain(base_plan(base), tensor)
    return made if needs else Chain(made.delta, {})


def _accept(made: Page, slug: str, clauses: str, says: str, link: Any, why: str) -> None:  # noqa: PLR0917 - a row of a table of cases
    made.accept(
        slug, link.delta, clauses, says, why=why, place=DELTA, beside=link.beside, bug="WRONG_BYTES"
    )


def _each(made: Page) -> None:
    why = "each encoding has to come back bit by bit"
    repeated = Tensor(name="w", shape=(16,), content=_floats(*[1.5] * 16))
    link = _made("planes", content=repeated.content)
    _accept(
        made,
        "planes",
        "ENC-001 ENC-002 ENC-012 ENC-005 ENC-006 ENC-007 ENC-008",
        "one block in planes",
        link,
        why,
    )
    for encoding, clauses in (
        ("xor", "ENC-001 ENC-002 ENC-014"),
        ("difference", "ENC-001 ENC-002 ENC-015 ENC-016"),
        ("sparse", "ENC-001 ENC-002 ENC-010 ENC-011 ENC-015 ENC-017 ENC-018"),
        ("classes", "ENC-001 ENC-002 ENC-015 ENC-019 ENC-020 ENC-023"),
    ):
        _accept(
            made,
            encoding,
            clauses + " ENC-004 ENC-013 ENC-022",
            f"one block by {encoding}, of which two lanes changed",
            _made(encoding),
            why,
        )


def _dtypes(made: Page) -> None:
    """Add every dtype with a step to show whether lanes are sign and magnitude."""
    for encoding in ("difference", "xor"):
        tensors = []
        bases = []
        for name, (width, _) in DTYPES.items():
            lane = LANES[name][0]
            before = b"".join(
                (1 << 8 * lane - 1 | 3).to_bytes(lane, "little") for _ in range(32 * width // lane)
            )
            after = (1).to_bytes(lane, "little") + before[lane:]
            if name == "bool":
                before = b"\1" * 32
                after = b"\0" + b"\1" * 31
            base = Tensor(name=name, dtype=name, shape=(32,), content=before)
            block = _shorter(encoding, after, before, name)
            bases.append(base)
            extent = Stored(encoding=encoding, blocks=[block], reference=BASE)
            tensors.append(
                Tensor(
                    name=name,
                    dtype=name,
                    shape=(32,),
                    content=after,
                    pieces=[whole((32,), stored=[extent])],
                )
            )
        _accept(
            made,
            f"{encoding}-dtypes",
            "ENC-013 ENC-015 ENC-022 TEN-003",
            f"each dtype by {encoding}, a lane across zero",
            chain(base_plan(*bases), *tensors),
            "lanes of floats are sign and magnitude, those of integers aren't",
        )


def _bits(made: Page) -> None:
    """Add ambiguous contents: floats changed by arithmetic, and a raw block equal to a frame."""
    before = _floats(*[1.0] * 32)
    odd = bytes.fromhex("0100807f ffffffff 00000080 01000000 000080ff 0100a0ff")
    after = odd + before[len(odd) :]
    steps = steps_between(after, before, "float32")
    tensors = []
    bases = []
    for encoding, block in (
        ("planes", planes(lanes(after, "float32"), 4, plane=sparse_plane)),
        ("difference", _shorter("difference", after, before, "float32")),
        ("sparse", changes(steps, 4, levels=0)),
    ):
        bases.append(Tensor(name=encoding, shape=(32,), content=before))
        reference = None if encoding == "planes" else BASE
        extent = Stored(encoding=encoding, blocks=[block], reference=reference)
        tensors.append(
            Tensor(
                name=encoding, shape=(32,), content=after, pieces=[whole((32,), stored=[extent])]
            )
        )
    _accept(
        made,
        "bits",
        "ENC-022 ENC-015",
        (
            "NaN that signal, with payloads, and either zero, denormals and infinity, by three"
            " encodings"
        ),
        chain(base_plan(*bases), *tensors),
        "who moves floats as floats changes some of their bits",
    )
    # A reader that inflated the block would get equally many bytes.
    content = frame(b"\7" * 60).ljust(60, b"\0")
    made.accept(
        "raw-like-a-frame",
        Plan(tensors=[Tensor(name="w", dtype="uint8", shape=(60,), content=content)]),
        "ENC-003",
        "a raw block that begins with a zstd frame",
        why="a block's encoding is what its part says, and not what its bytes look like",
        bug="WRONG_BYTES",
    )


def _shorter(encoding: str, content: bytes, base: bytes, dtype: str) -> bytes:
    """Return a block with each plane in the shorter of two forms."""
    width = LANES[dtype][0]
    if encoding == "xor":
        words = [a ^ b for a, b in zip(lanes(content, dtype), lanes(base, dtype), strict=True)]
    else:
        words = steps_between(content, base, dtype)

    def plane(row: bytes) -> bytes:
        return min(string(row), sparse_plane(row), key=len)

    return planes(words, width, plane=plane)


def _forms(made: Page) -> None:
    why = "which of several forms a writer takes for the same content is its own choice"
    base = Tensor(name="w", dtype="uint8", shape=(60,), content=bytes(60))
    few = bytes(20) + b"\7" + bytes(30) + b"\5" + bytes(8)
    runs = b"\7" * 24 + b"\x09" * 36
    long = Tensor(name="w", dtype="uint8", shape=(700,), content=bytes(700))
    for slug, clauses, says, encoding, tensor, content, stored in (
        ("sparse-plane", "ENC-012 ENC-011", "a plane as a set and two bytes", "planes", base, few,
         sparse_plane(few)),
        ("one-byte", "ENC-008 ENC-012", "a plane of one byte", "planes", base, b"\3" * 60, b"\1\3"),
        ("zstd", "ENC-008 ENC-009 ENC-012", "a plane in a zstd frame of two runs", "planes", base,
         runs, zstd_string(runs)),
        ("frame-checksum", "ENC-009 ENC-024", "a plane in a zstd frame with a checksum", "planes",
         base, runs, zstd_string(b"", _checked(frame(runs)))),
        ("frame-dictionary-0", "ENC-009 ENC-024", ("a plane in a zstd frame that states the"
        " dictionary id 0"), "planes",
         base, runs, zstd_string(b"", b"\x28\xb5\x2f\xfd\x21\0" + frame(runs)[5:])),
        ("sparse-plane-zero", "ENC-012 ENC-011", ("a plane as a set of three places, at one of"
        " which is a zero"),
         "planes", base, few, b"\3" + set_bytes([20, 30, 51], 60) + string(b"\7\0\5")),
        ("zstd-of-700", "ENC-008 ENC-009", "a frame whose size takes two bytes", "planes", long,
         b"\4" * 300 + b"\6" * 400,
         zstd_string(b"\4" * 300 + b"\6" * 400)),
        ("outside", "ENC-011", "a set that lists the places outside of it", "sparse", base,
         b"\0" + b"\1" * 59, changes(steps_between(b"\0" + b"\1" * 59, bytes(60), "uint8"), 1)),
        ("low-bits", "ENC-011 ENC-017", "gaps of which three bits stand apart", "sparse", base, few,
         changes(steps_between(few, bytes(60), "uint8"), 1, k=3)),
        ("levels-0", "ENC-017 ENC-018", "no levels, but the planes of all heights", "sparse", base,
         few, changes(steps_between(few, bytes(60), "uint8"), 1, levels=0)),
        ("levels-3", "ENC-017 ENC-018", "three levels, and what is left of the heights", "sparse",
         base, few, changes(steps_between(few, bytes(60), "uint8"), 1, levels=3)),
        ("nothing-changed", "ENC-017 ENC-011", "no change at all", "sparse", base, bytes(60),
         b"\0"),
    ):  # fmt: skip
        _accept(made, slug, clauses, says, _made(encoding, stored, content, tensor), why)
    steps = steps_between(CONTENT, BEFORE, "float32")
    for slug, says, stored in (
        (
            "classes-with-cuts",
            "three classes, one of them without lanes",
            classes(steps, BEFORE, "float32", cuts=(20, 127), k=(255, 0)),
        ),
        (
            "classes-with-signs",
            "signs, and low bits of the steps apart",
            classes(steps, BEFORE, "float32", cuts=(127,), k=(5, 255)),
        ),
    ):
        _accept(made, slug, "ENC-019 ENC-020 ENC-023", says, _made("classes", stored), why)


def _refuse(  # noqa: PLR0917 - a row of a table of cases
    made: Page, slug: str, of: str, clauses: str, says: str, encoding: str, stored: bytes, *,
    content: bytes = CONTENT,
    base: Tensor = BASE_TENSOR, error: str = "ENCODED_FORM", bug: str = "CRASH",
) -> None:  # fmt: skip
    link = _made(encoding, stored, content, base)
    files = link.beside | {f"{DELTA}/{path}": value for path, value in link.delta.seal().items()}
    made.reject(
        slug,
        of,
        None,
        clauses,
        error,
        says,
        why=WHY,
        bug=bug,
        phase="read",
        files=files,
        path=DELTA,
        features=link.delta.manifest["features"]["reader"],
    )


SMALL = Tensor(name="w", dtype="uint8", shape=(60,), content=bytes(60))
ONES = b"\3" * 60


def _strings(made: Page) -> None:
    for slug, clauses, says, stored in (
        ("bytes-behind", "ENC-006", "a byte behind the last plane", b"\1\3\0"),
        ("cut", "ENC-005", "a string without its byte", b"\1"),
        ("nothing", "ENC-005", "no bytes at all, for 60", b""),
        ("string-short", "ENC-005", "a string of 20 bytes for 60", b"\0" + b"\3" * 20),
        ("string-kind-4", "ENC-008", "a string of the kind 4", b"\4\3"),
    ):
        _refuse(
            made,
            slug,
            "one-byte",
            clauses,
            f"the block has {says}",
            "planes",
            stored,
            content=ONES,
            base=SMALL,
        )
    _refuse(
        made,
        "decodes-to-another",
        "one-byte",
        "DEL-008 ENC-012",
        "the block has another byte in its plane",
        "planes",
        b"\1\4",
        content=ONES,
        base=SMALL,
        error="DECODED_DIGEST",
        bug="WRONG_BYTES",
    )


#: The lower half of XXH64 of 24 sevens and 36 nines, little-endian.
CHECKSUM = bytes.fromhex("2d3b7a3c")


def _checked(content: bytes) -> bytes:
    """Return the frame of 24 sevens and 36 nines with a checksum."""
    return content[:4] + bytes([content[4] | 4]) + content[5:] + CHECKSUM


def _frames(made: Page) -> None:
    good = frame(b"\7" * 24 + b"\x09" * 36)
    body = good[6:]
    no_size = b"\x28\xb5\x2f\xfd\x00\x00" + body
    window = b"\x28\xb5\x2f\xfd\x80\x98" + (60).to_bytes(4, "little") + body
    dictionary = b"\x28\xb5\x2f\xfd\x21\x05" + bytes([60]) + body
    bomb = (
        b"\x28\xb5\x2f\xfd\xa0"
        + (2**28).to_bytes(4, "little")
        + b"\x02\0\x10\7" * 3
        + b"\x03\0\x10\7"
    )
    for slug, says, content in (
        (
            "frame-size-more",
            "a frame that states a byte more than the string has",
            frame(b"\7" * 61),
        ),
        (
            "frame-size-lies",
            "a frame that states another size than it has",
            frame(b"\7" * 24 + b"\x09" * 36, size=61),
        ),
        ("frame-has-less", "a frame of fewer bytes than it states", frame(b"\7" * 24, size=60)),
        ("frame-without-size", "a frame that states no size", no_size),
        ("frame-window", "a frame with a window of 128 MiB", window),
        ("frame-dictionary", "a frame that names a dictionary", dictionary),
        ("frame-checksum-wrong", "a frame whose checksum is another", _checked(good)[:-1] + b"\0"),
        ("frame-twice", "two frames", frame(b"\7" * 60) + frame(b"")),
        (
            "frame-skippable",
            "a skippable frame before the frame",
            b"\x50\x2a\x4d\x18\1\0\0\0x" + good,
        ),
        ("frame-cut", "a frame without its last byte", good[:-1]),
        ("frame-bomb", "a frame that states 256 MiB", bomb),
    ):
        _refuse(
            made,
            slug,
            "zstd",
            "ENC-009" + (" ENC-024" if "checksum" in slug else ""),
            f"the string has {says}",
            "planes",
            zstd_string(b"", content),
            content=b"\7" * 24 + b"\x09" * 36,
            base=SMALL,
            bug="RESOURCE",
        )
    _refuse(
        made,
        "frame-longer-than-string",
        "zstd",
        "ENC-007 ENC-009",
        "a frame of more bytes than its string",
        "planes",
        b"\2" + number(61),
        content=ONES,
        base=SMALL,
        bug="RESOURCE",
    )
    _refuse(
        made,
        "number-with-zeros",
        "zstd",
        "ENC-007",
        "the frame's number ends with a zero byte",
        "planes",
        b"\2" + bytes([len(good) | 0x80, 0]) + good,
        content=b"\7" * 24 + b"\x09" * 36,
        base=SMALL,
    )


def _sets(made: Page) -> None:
    few = bytes(20) + b"\7" + bytes(30) + b"\5" + bytes(8)
    good = set_bytes([20, 51], 60)
    tail = string(b"\7\5")
    assert sparse_plane(few) == b"\3" + good + tail
    for slug, clauses, says, listed in (
        ("set-too-many", "ENC-011 ENC-007", "more places than there are", number(2 * 61)),
        ("set-more-than-half", "ENC-011", "40 of 60 places listed, and not those outside",
         number(80) + b"\0" + number(0) + string(b"\xff" * 5)),
        ("set-k-too-large", "ENC-011", "six low bits of places below 60",
         number(4) + b"\6" + number(0) + string(b"\3") + bytes(2)),
        ("set-beyond", "ENC-011", "a place beyond the last",
         number(4) + b"\0" + number(58) + string(bytes(6) + b"\x06" + b"\x08")),
        ("set-ones", "ENC-011", "three ones for two places",
         number(4) + b"\0" + number(50) + string(bytes(2) + b"\x13" + bytes(3) + b"\x08")),
        ("set-unused-bits", "ENC-010", "ones behind the last bit", number(4) + b"\0" + number(50)
         + string(bytes(2) + b"\x10" + bytes(3) + b"\xf8")),
        ("set-last-bit-zero", "ENC-011", "a zero as last bit", number(4) + b"\0" + number(51)
         + string(bytes(2) + b"\x10" + bytes(3) + b"\x08")),
    ):  # fmt: skip
        _refuse(
            made,
            slug,
            "sparse-plane",
            clauses,
            f"the set has {says}",
            "planes",
            b"\3" + listed + tail,
            content=few,
            base=SMALL,
        )


def _steps(made: Page) -> None:
    few = bytes(20) + b"\7" + bytes(30) + b"\5" + bytes(8)
    places = set_bytes([20, 51], 60)
    for slug, clauses, says, stored in (
        (
            "sparse-16-levels",
            "ENC-018",
            "sixteen levels",
            places + string(b"\3") + b"\x10" + b"\1" * 16,
        ),
        (
            "sparse-empty-level",
            "ENC-018",
            "a level above one that nothing reached",
            places + string(b"\3") + b"\2" + b"\0\0",
        ),
        (
            "sparse-height",
            "ENC-018",
            "a height whose step has nine bits",
            places + string(b"\3") + b"\0" + string(b"\x80\x81"),
        ),
        (
            "sparse-sign-bits",
            "ENC-010",
            "signs of more than two lanes",
            places + string(b"\7") + b"\0" + string(b"\6\4"),
        ),
    ):
        _refuse(
            made,
            slug,
            "levels-0",
            clauses,
            f"the changes have {says}",
            "sparse",
            stored,
            content=few,
            base=SMALL,
        )
    same = b"\xff" + b"\0"
    for slug, clauses, says, stored in (
        ("classes-32-cuts", "ENC-020", "32 cuts", bytes([32, *range(1, 33)]) + same),
        ("classes-cut-0", "ENC-020", "a cut at 0", b"\1\0" + same),
        ("classes-cuts-fall", "ENC-020", "cuts that fall", b"\2\x7f\x14" + same),
        ("classes-k", "ENC-023", "a k of 32, of 32 bits", b"\0\x20" + bytes(4)),
        (
            "classes-too-many-bits",
            "ENC-023",
            "planes of 32 bits behind five",
            b"\0\5\1\0" + bytes(8) + b"\1\0\1\0\1\0\1\xff",
        ),
    ):
        _refuse(
            made,
            slug,
            "classes",
            clauses + " ENC-019",
            f"the classes have {says}",
            "classes",
            stored,
        )
    _refuse(
        made, "xor-too-short", "xor", "ENC-014 ENC-005", "three planes of four", "xor", b"\1\0" * 3
    )
    _refuse(
        made,
        "difference-too-long",
        "difference",
        "ENC-016 ENC-006",
        "five planes of four",
        "difference",
        b"\1\0" * 5,
    )
