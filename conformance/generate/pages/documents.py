"""JSON documents; spec/core/10-documents.md, first half. All cases are registers."""

from __future__ import annotations

from conformance.generate.bases import alter, replace, set_at, small
from conformance.generate.cases import Page
from conformance.generate.model import Checkpoint

__all__ = ["page"]

REASON = b'"none"'


def page() -> Page:
    """Return the cases of JSON documents."""
    made = Page("documents")
    _valid(made)
    _bytes(made)
    _syntax(made)
    _numbers(made)
    _strings(made)
    _form(made)
    _members(made)
    _types(made)
    return made


def _reason(text: str) -> dict[str, str]:
    return {"data": text}


def _valid(made: Page) -> None:
    made.accept(
        "small",
        small(),
        (
            "DOC-001 DOC-002 DOC-003 DOC-004 DOC-007 DOC-008 DOC-009 DOC-010 DOC-011 VER-001"
            " VER-006 ERR-003"
            " CKP-007"
        ),
        "one writer, one tensor, one leaf, one stream",
        why="it is the least that a reader has to read, and what the invalid documents differ from",
    )
    made.accept(
        "strings",
        small(absent=_reason('quote " backslash \\ slash / é 漢 😀 U+2028 \u2028 U+FEFF \ufeff')),
        "DOC-001 DOC-006",
        "a reason with a quote, a backslash and letters beyond ASCII",
        why=(
            "a JSON library that escapes more, or normalises, makes other bytes and so another"
            " digest"
        ),
    )
    made.accept(
        "string-normal-form",
        # In the order of the description; U+0958 is never composed, U+FB01 changes under NFKC only.
        small(absent=_reason("\u00e9 \uac01 \u0915\u093c \ufb01 x\u1dfa\u0301 \U0001e290")),
        "DOC-006",
        "a reason with a composed letter, a composed syllable, a letter that is only ever two"
        " code points, a ligature, "
        "two marks in their order, and a letter that Unicode 14.0 was the first to have",
        why="normal form C isn't the absence of marks, nor that of ligatures",
    )
    made.accept(
        "largest-integer",
        small(step=2**53 - 1, saved_unix_s=0),
        "DOC-005 LIM-002",
        "a step of 2^53 - 1",
        why="the greatest integer that may stand in a document has to come out exactly",
    )
    made.accept(
        "reason-of-1000",
        small(absent=_reason("é" * 1000)),
        "DOC-006 LIM-001 LIM-002 PRT-009 MAN-003 MAN-004",
        "a reason of 1000 characters, of two bytes each",
        why="characters are counted here, and bytes elsewhere",
    )


def _document(
    made: Page,
    slug: str,
    clauses: str,
    error: str,
    says: str,
    *,
    why: str,
    bug: str = "AMBIGUITY",
    **changes: object,
) -> None:
    made.reject(slug, "small", alter("manifest", **changes), clauses, error, says, why=why, bug=bug)


def _bytes(made: Page) -> None:
    why = "what isn't UTF-8 reads differently from library to library"
    _document(
        made,
        "bom",
        "DOC-002",
        "DOC_ENCODING",
        "a byte-order mark before the document",
        why=why,
        outer=lambda c: b"\xef\xbb\xbf" + c,
    )
    _document(
        made,
        "not-utf-8",
        "DOC-002",
        "DOC_ENCODING",
        "the byte FF in a reason",
        why=why,
        inner=lambda c: c.replace(REASON, b'"no\xffe"', 1),
    )
    _document(
        made,
        "utf-16",
        "DOC-002",
        "DOC_ENCODING",
        "the whole document in UTF-16",
        why=why,
        outer=lambda c: b"\xff\xfe" + c.decode().encode("utf-16-le"),
    )
    _document(
        made,
        "utf-8-surrogate",
        "DOC-002",
        "DOC_ENCODING",
        "a surrogate, encoded as if it were UTF-8",
        why=why,
        inner=lambda c: c.replace(REASON, b'"\xed\xa0\x80"', 1),
    )
    _document(
        made,
        "too-large",
        "DOC-008 MAN-004 LIM-001",
        "LIMIT_EXCEEDED",
        "65536 bytes, by spaces at the end",
        why="a reader that reads first and asks later can be made to read anything",
        bug="RESOURCE",
        outer=lambda c: c.ljust(65536),
    )
    for depth in (17, 2_000):
        _document(
            made,
            f"depth-{depth}",
            "DOC-007 LIM-001",
            "DOC_DEPTH",
            f"arrays nested to the depth {depth}",
            why="a recursive parser dies of it, before it can refuse",
            bug="CRASH",
            inner=lambda _, n=depth - 2: b'{"features":' + b"[" * n + b"]" * n + b"}",
        )


def _syntax(made: Page) -> None:
    why = "what a lenient parser takes and a strict one doesn't is two documents in one"
    for slug, says, change in (
        ("empty", "a register of no bytes", lambda _: b""),
        ("array", "an array instead of an object", lambda _: b"[]"),
        ("two-documents", "a second object behind the document", lambda c: c + b"{}"),
        ("trailing-comma", "a comma behind the last member", lambda c: c[:-1] + b",}"),
        ("comment", "a comment behind the document", lambda c: c + b"//"),
    ):
        _document(made, slug, "DOC-003", "DOC_SYNTAX", says, why=why, outer=change)
    _document(
        made,
        "line-feed",
        "DOC-001 DOC-003",
        "DOC_SYNTAX DOC_NOT_CANONICAL",
        "a line feed at the end",
        why="an editor that ends the last line makes another file",
        outer=lambda c: c + b"\n",
    )
    why = "parsers differ in which of the two they take"
    _document(
        made,
        "duplicate-member",
        "DOC-004",
        "DOC_DUPLICATE_KEY",
        "the member digest twice",
        why=why,
        outer=lambda c: b'{"digest":"blake3:' + b"0" * 64 + b'",' + c[1:],
    )
    _document(
        made,
        "duplicate-inside",
        "DOC-004",
        "DOC_DUPLICATE_KEY",
        "the member step twice in signed",
        why=why,
        inner=replace(b'"step":3', b'"step":2,"step":3'),
    )
    _document(
        made,
        "duplicate-escaped",
        "DOC-004",
        "DOC_DUPLICATE_KEY",
        "step, and st\\u0065p",
        why=why,
        inner=replace(b'"step":3', b'"step":3,"st\\u0065p":2'),
    )


def _numbers(made: Page) -> None:
    why = "a language with another type for numbers gets another value, or an exception"
    for slug, text in (
        ("fraction", b"3.0"), ("exponent", b"3e0"), ("negative-zero", b"-0"),
        ("beyond-2-53", b"9007199254740992"),
        ("huge-exponent", b"1e400"), ("nan", b"NaN"), ("infinity", b"-Infinity"),
        ("5001-digits", b"1" + b"0" * 5000),
    ):  # fmt: skip
        shown = text.decode() if len(text) < 20 else "an integer of 5001 digits"
        _document(
            made,
            f"number-{slug}",
            "DOC-005 LIM-001",
            "DOC_NUMBER",
            f"as step stands {shown}",
            why=why,
            inner=replace(b'"step":3', b'"step":' + text),
        )


def _strings(made: Page) -> None:
    why = "what cannot be seen can forge a line of a log or a name"
    for slug, says, text in (
        ("nul", "an escaped U+0000", b'"\\u0000"'),
        ("bidi", "the override U+202E", '"\u202e"'.encode()),
        ("surrogate", "an escaped surrogate alone", b'"\\ud800"'),
        ("not-nfc", "an e and a combining accent", '"e\u0301"'.encode()),
        ("jamo", "a syllable in two pieces", '"\u1100\u1161"'.encode()),
        (
            "singleton",
            "the sign for Angstrom, whose normal form is the letter",
            '"\u212b"'.encode(),
        ),
        ("excluded", "a letter whose normal form is two code points", '"\u0958"'.encode()),
        (
            "marks",
            "two marks out of their order, of which one is of Unicode 14.0",
            '"x\u0301\u1dfa"'.encode(),
        ),
        ("too-long", "4097 bytes", b'"' + b"x" * 4097 + b'"'),
    ):
        _document(
            made,
            f"string-{slug}",
            "DOC-006",
            "DOC_STRING",
            f"a reason with {says}",
            why=why,
            inner=lambda c, text=text: c.replace(REASON, text, 1),
        )
    _document(
        made,
        "string-line-feed",
        "DOC-006",
        "DOC_STRING",
        "an attempt that ends with a line feed",
        why=why,
        inner=replace(b'"attempt":"0123456789abcdef"', b'"attempt":"0123456789abcdef\\n"'),
    )
    _document(
        made,
        "name-not-nfc",
        "DOC-006",
        "DOC_STRING",
        "a member whose name isn't in normal form C",
        why=why,
        inner=lambda c: b'{"e\xcc\x81":1,' + c[1:],
    )


def _form(made: Page) -> None:
    why = "in a form with freedom, some flipped bits would still be valid documents"
    for slug, says, change in (
        ("spaces", "a space behind a colon", replace(b'"step":3', b'"step": 3')),
        (
            "unsorted",
            "signed before digest",
            lambda c: b'{"signed":' + c[c.index(b'"signed":') + 9 : -1] + b"," + c[1:83] + b"}",
        ),
        ("escape", "an escape that isn't needed", replace(b'"signed"', b'"s\\u0069gned"')),
    ):
        _document(made, slug, "DOC-001", "DOC_NOT_CANONICAL", says, why=why, outer=change)
    why = "damage has to be called damage"
    for slug, says, change in (
        ("digest-of-another", "the last digit of digest is another", _digit),
        ("digest-upper-case", "digest in upper case", lambda c: c[:18] + c[18:82].upper() + c[82:]),
        (
            "digest-md5",
            "a digest that begins with md5:",
            lambda c: c.replace(b"blake3:", b"md5:", 1),
        ),
        ("changed", "step is 2, under the digest of step 3", replace(b'"step":3', b'"step":2')),
    ):
        _document(
            made,
            slug,
            "DOC-009 ERR-003",
            "DOC_DIGEST",
            says,
            why=why,
            bug="DAMAGE_UNSEEN",
            outer=change,
        )


def _digit(content: bytes) -> bytes:
    at = content.index(b'","signed"') - 1
    return content[:at] + (b"0" if content[at : at + 1] != b"0" else b"1") + content[at + 1 :]


def _members(made: Page) -> None:
    _document(
        made,
        "envelope-of-one",
        "DOC-011",
        "DOC_SCHEMA",
        "no digest in the envelope",
        why="a document that no digest covers proves nothing",
        bug="DAMAGE_UNSEEN",
        outer=lambda c: b'{"signed":' + c[c.index(b'"signed":') + 9 :],
    )
    _document(
        made,
        "envelope-of-three",
        "DOC-011",
        "DOC_SCHEMA",
        "a third member in the envelope",
        why="what stands beside signed is covered by no digest",
        bug="DAMAGE_UNSEEN",
        outer=lambda c: c[:-1] + b',"twin":1}',
    )
    _versions(made)
    _later(made)


def _versions(made: Page) -> None:
    """Add other versions."""

    def version_first(checkpoint: Checkpoint) -> None:
        checkpoint.manifest |= {"format_version": "9.0", "colour": "red", "step": "3"}

    why = "what a later version means by the other members isn't known"
    made.reject(
        "version",
        "small",
        set_at("manifest", "format_version", value="9.0"),
        "VER-001 DOC-010",
        "VERSION_UNSUPPORTED",
        "format_version is 9.0",
        why=why,
        bug="WRONG_BYTES",
    )
    for slug, text, says in (
        ("version-one", "1", "1, which is 1.0 as a number"),
        ("version-longer", "1.00", "1.00, which is 1.0 as a number"),
        ("version-zero", "01.0", "01.0, which is 1.0 as two numbers"),
        ("version-space", "1.0 ", "1.0 and a space"),
        ("version-sign", "1.-1", "1.-1, which isn't after 1.0"),
    ):
        made.reject(
            slug,
            "small",
            set_at("manifest", "format_version", value=text),
            "VER-001 DOC-010",
            "VERSION_UNSUPPORTED",
            f"format_version is {says}",
            why="a version is a text, and no fraction",
            bug="WRONG_BYTES",
        )
    made.reject(
        "version-first",
        "small",
        version_first,
        "DOC-010 VER-001",
        "VERSION_UNSUPPORTED",
        "format_version is 9.0, and other members are unknown or of other types",
        why=why,
        bug="WRONG_BYTES",
    )


def _later(made: Page) -> None:
    """Add documents of a later minor version."""

    def later(checkpoint: Checkpoint) -> None:
        for signed in (checkpoint.manifest, checkpoint.index, *checkpoint.parts):
            signed |= {"format_version": "1.7", "colour": "red"}
        checkpoint.index["colours"] = {"name": [[1, b""], ""]}

    def nested(checkpoint: Checkpoint) -> None:
        later(checkpoint)
        checkpoint.manifest["index"]["colour"] = "red"

    def feature(checkpoint: Checkpoint) -> None:
        later(checkpoint)
        checkpoint.manifest["features"]["reader"] = ["colours"]

    made.accept(
        "later-minor",
        made.bases["small"],
        "VER-011 VER-001",
        "manifest, index and part are of 1.7, with members that 1.0 lacks",
        why="a minor version adds members, and a reader of 1.0 goes on reading",
        edit=later,
    )
    made.reject(
        "later-minor-nested",
        "small",
        nested,
        "VER-011 DOC-011",
        "DOC_SCHEMA",
        "a manifest of 1.7 with an unknown member within a member of 1.0",
        why="a minor version doesn't change what a member of 1.0 holds",
        bug="AMBIGUITY",
    )
    made.reject(
        "later-minor-feature",
        "small",
        feature,
        "VER-002 VER-011",
        "FEATURE_UNSUPPORTED",
        "a manifest of 1.7 with an unknown feature of readers",
        why="a feature says that ignoring its members would misread the checkpoint",
        bug="WRONG_BYTES",
    )


def _types(made: Page) -> None:
    """Add members of other types."""
    why = "what a later version means by the other members isn't known"
    made.reject(
        "version-missing",
        "small",
        lambda c: c.manifest.pop("format_version"),
        "DOC-010 DOC-011",
        "DOC_SCHEMA VERSION_UNSUPPORTED",
        "format_version is missing",
        why=why,
    )
    why = "an object that is open lets two readers disagree on what it says"
    made.reject(
        "unknown-member",
        "small",
        set_at("manifest", "colour", value="red"),
        "DOC-011",
        "DOC_SCHEMA",
        "a member colour, which no page has",
        why=why,
        bug="AMBIGUITY",
    )
    for slug, key, value in (
        ("true-for-integer", "step", True),
        ("arabic-digits", "attempt", "\u0660123456789abcdef"),
        ("upper-case-hex", "nonce", "AA" * 16), ("another-type", "type", "run"),
    ):  # fmt: skip
        made.reject(
            slug,
            "small",
            set_at("manifest", key, value=value),
            "DOC-011",
            "DOC_SCHEMA",
            f"{key} is {value!r}",
            why=why,
            bug="AMBIGUITY",
        )
