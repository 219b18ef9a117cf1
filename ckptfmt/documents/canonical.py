"""JSON documents: canonical bytes, digest, and validation against a JSON Schema.

Spec: REQ-DOC-001 to REQ-DOC-011.
"""

from __future__ import annotations

import functools
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable
from importlib import resources
from typing import TYPE_CHECKING, Any, Final, NoReturn

from ckptfmt import limits
from ckptfmt.digest import digest_bytes, digest_text
from ckptfmt.documents.fit import Fits, compile_schema
from ckptfmt.documents.versions import EARLIER, is_known, known_members
from ckptfmt.errors import CkptError, Code, err
from ckptfmt.features import READER_FEATURES

if TYPE_CHECKING:
    from jsonschema import Draft202012Validator

# Possessive quantifiers: backtracking would use a hundred bytes of memory for each byte of a long
# string.
_STRING: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_BRACKET: Final = re.compile(rb"[\[\]{}]")
_FEATURES: Final = 64
_FEATURE: Final = re.compile(r"[a-z][a-z0-9._-]{0,63}")
_FORBIDDEN: Final = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def dump_canonical(value: object) -> bytes:
    """Return the canonical bytes of a JSON value: sorted members, no white space, UTF-8.

    >>> dump_canonical({"b": 1, "a": ["é"]}).decode()
    '{"a":["é"],"b":1}'
    """
    return json.dumps(
        value, ensure_ascii=False, sort_keys=True, separators=(",", ":"), allow_nan=False
    ).encode()


def head_of(
    kind: str, *, reader: Iterable[str] = (), writer: Iterable[str] = ()
) -> dict[str, object]:
    """Return the members that all documents have: type, version and features."""
    return {
        "type": kind,
        "format_version": limits.FORMAT_VERSION,
        "features": {"reader": list(reader), "writer": list(writer)},
    }


def dump_document(signed: dict[str, Any]) -> bytes:
    """Return the file of a JSON document, from the members under its digest.

    Spec: REQ-DOC-001, REQ-DOC-009.
    """
    return dump_canonical(
        {"digest": digest_text(digest_bytes(dump_canonical(signed))), "signed": signed}
    )


def parse_document(
    content: bytes, *, where: str, types: tuple[str, ...], limit_nbytes: int = limits.JSON_NBYTES
) -> tuple[dict[str, Any], str]:
    """Return the members under a JSON document's digest, and the digest.

    The checks run in the order of the specification, so that a damaged file is reported as damaged,
    not as a document of another version.

    Args:
        where: name of the file, for messages.
        types: the allowed values of ``type``.
        limit_nbytes: largest size of an accepted file.

    Raises: FormatError, IntegrityError (DOC_DIGEST), UnsupportedError.
    Spec: REQ-DOC-001 to REQ-DOC-011.
    """
    if len(content) > limit_nbytes:
        raise err(
            Code.LIMIT_EXCEEDED,
            f"{len(content)} bytes where at most {limit_nbytes} are allowed",
            where=where,
            requirement="REQ-DOC-008",
        )
    value = _parse_json(content, where)
    if set(value) != {"digest", "signed"} or not isinstance(value["signed"], dict):
        raise err(
            Code.DOC_SCHEMA,
            "a document has the members digest and signed",
            where=where,
            requirement="REQ-DOC-011",
        )
    if dump_canonical(value) != content:
        raise err(
            Code.DOC_NOT_CANONICAL,
            "the bytes aren't the canonical form",
            where=where,
            requirement="REQ-DOC-001",
        )
    signed: dict[str, Any] = value["signed"]
    digest = digest_text(digest_bytes(dump_canonical(signed)))
    if value["digest"] != digest:
        raise err(
            Code.DOC_DIGEST,
            f"its contents have the digest {digest}",
            where=where,
            requirement="REQ-DOC-009",
        )
    check_version(signed, where)
    if signed.get("type") not in types:
        raise err(
            Code.DOC_SCHEMA,
            f"type is {signed.get('type')!r}, expected one of {', '.join(types)}",
            where=f"{where}#/signed/type",
            requirement="REQ-DOC-011",
        )
    signed = known_members(signed, _members_of(signed["type"]))
    check_schema(signed["type"], signed, where=where)
    return signed, digest


def check_version(signed: dict[str, Any], where: str) -> None:
    """Raise unless this reader supports the document's version and all of its reader features.

    Raises: UnsupportedError(VERSION_UNSUPPORTED, FEATURE_UNSUPPORTED); FormatError(DOC_SCHEMA).
    Spec: REQ-DOC-010, REQ-VER-002.
    """
    version = signed.get("format_version")
    if not isinstance(version, str):
        raise err(
            Code.DOC_SCHEMA,
            "format_version is missing or isn't a string",
            where=f"{where}#/signed/format_version",
            requirement="REQ-DOC-011",
        )
    if not is_known(version):
        raise err(
            Code.VERSION_UNSUPPORTED,
            f"format {version!r}; this reader knows 1.x and {' and '.join(EARLIER)}",
            where=f"{where}#/signed/format_version",
            requirement="REQ-DOC-010",
        )
    features = signed.get("features")
    if not isinstance(features, dict) or set(features) != {"reader", "writer"}:
        raise _features_error("features hasn't exactly the members reader and writer", where)
    for needed in features.values():
        # Checked before the schema: the schema's check for unique items takes quadratic time on
        # items other than strings.
        if (
            not isinstance(needed, list)
            or len(needed) > _FEATURES
            or not all(map(_is_feature, needed))
        ):
            raise _features_error("features aren't two short lists of names", where)
        if len(set(needed)) != len(needed):
            raise _features_error("a feature is named twice", where)
    needed = features["reader"]
    unknown = sorted(
        set(needed)
        - (READER_FEATURES if signed.get("type") in ("manifest", "part") else frozenset())
    )
    if unknown:
        raise err(
            Code.FEATURE_UNSUPPORTED,
            f"needs {', '.join(unknown)}",
            where=f"{where}#/signed/features/reader",
            requirement="REQ-DOC-010",
        )


def _is_feature(name: object) -> bool:
    return isinstance(name, str) and _FEATURE.fullmatch(name) is not None


def _features_error(detail: str, where: str) -> CkptError:
    return err(
        Code.DOC_SCHEMA, detail, where=f"{where}#/signed/features", requirement="REQ-VER-008"
    )


def check_string(text: str, where: str) -> None:
    """Raise unless a document's string is normalised, short, and without control characters.

    Raises: FormatError(DOC_STRING). Spec: REQ-DOC-006.
    """
    problem = _find_problem(text)
    if problem is not None:
        raise err(Code.DOC_STRING, problem, where=where, requirement="REQ-DOC-006")


def _find_problem(text: str) -> str | None:
    """Return the first problem of a JSON document's string in words; None for a valid string."""
    found = _FORBIDDEN.search(text)
    if found:
        return f"character U+{ord(found.group()):04X} isn't allowed"
    if len(text.encode()) > limits.JSON_STRING_NBYTES:
        return f"longer than {limits.JSON_STRING_NBYTES} bytes"
    return None if unicodedata.is_normalized("NFC", text) else "not in Unicode normal form C"


def fit_string(text: str, length: int) -> str:
    r"""Return a text as a string for `check_string`, escaped and cut between words if necessary.

    >>> fit_string("disk\x00full", 20), fit_string("writers 0 and 1 differ", 14)
    ('disk\\x00full', 'writers 0...')
    """
    if _FORBIDDEN.search(text) or not unicodedata.is_normalized("NFC", text):
        text = text.encode("unicode_escape").decode("ascii")
    if len(text) <= length:
        return text
    kept = text[: length - 3]
    # A text without spaces, such as a long name, is cut at the limit.
    return (kept[: kept.rfind(" ")] if " " in kept[length // 2 :] else kept) + "..."


def _parse_json(content: bytes, where: str) -> dict[str, Any]:
    """Return the single JSON object of `content`, after all checks that need no schema."""
    if nests_deeper(content, limits.JSON_DEPTH):
        raise err(
            Code.DOC_DEPTH,
            f"nests deeper than {limits.JSON_DEPTH}",
            where=where,
            requirement="REQ-DOC-007",
        )

    def raise_number(text: str) -> NoReturn:
        raise err(
            Code.DOC_NUMBER,
            f"{text[:32]!r} isn't an allowed number",
            where=where,
            requirement="REQ-DOC-005",
        )

    def parse_integer(text: str) -> int:
        # Every allowed integer has at most 17 characters; int() takes quadratic time on long texts.
        if len(text) > 17 or text == "-0" or abs(int(text)) > limits.JSON_INTEGER:
            raise_number(text)
        return int(text)

    def check_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        members = dict(pairs)
        if len(members) != len(pairs):
            twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
            raise err(
                Code.DOC_DUPLICATE_KEY,
                f"member {twice[:64]!r} twice",
                where=where,
                requirement="REQ-DOC-004",
            )
        return members

    if content.startswith(b"\xef\xbb\xbf"):
        raise err(
            Code.DOC_ENCODING,
            "starts with a byte-order mark",
            where=where,
            requirement="REQ-DOC-002",
        )
    try:
        value = json.loads(
            content.decode("utf-8"),
            object_pairs_hook=check_pairs,
            parse_float=raise_number,
            parse_constant=raise_number,
            parse_int=parse_integer,
        )
    except UnicodeDecodeError as error:
        raise err(
            Code.DOC_ENCODING,
            f"byte {error.start} isn't UTF-8",
            where=where,
            requirement="REQ-DOC-002",
        ) from None
    except json.JSONDecodeError as error:
        raise err(
            Code.DOC_SYNTAX,
            f"{error.msg} at character {error.pos}",
            where=where,
            requirement="REQ-DOC-003",
        ) from None
    if not isinstance(value, dict):
        raise err(Code.DOC_SYNTAX, "not a JSON object", where=where, requirement="REQ-DOC-003")
    _check_strings(value, where)
    return value


def nests_deeper(content: bytes, depth: int) -> bool:
    """Return whether the brackets of a JSON text, outside of strings, nest deeper than `depth`.

    Called before `json.loads`, whose RecursionError isn't reliable. Spec: REQ-DOC-007.

    >>> nests_deeper(b'{"[[": []}', 2), nests_deeper(b'{"": [[]]}', 2)
    (False, True)
    """
    reached = 0
    for bracket in _BRACKET.finditer(_STRING.sub(b"", content)):
        reached += 1 if bracket.group() in b"[{" else -1
        if reached > depth:
            return True
    return False


def _check_strings(value: object, where: str, *keys: str) -> None:
    """Check every string in the value at the path `keys`.

    The path becomes text only for an error: keys are long, and a value may contain many strings.
    """
    if isinstance(value, dict):
        for key, item in value.items():
            _check_string(key, where, keys)
            _check_strings(item, where, *keys, key)
    elif isinstance(value, list):
        for item in value:
            _check_strings(item, where, *keys)
    elif isinstance(value, str):
        _check_string(value, where, keys)


def _check_string(text: str, where: str, keys: tuple[str, ...]) -> None:
    problem = _find_problem(text)
    if problem is not None:
        place = f"{where}#/{'/'.join(keys)}" if keys else where
        raise err(Code.DOC_STRING, problem, where=place, requirement="REQ-DOC-006")


# --- the JSON Schemas of spec/schema --------------------------------------------------------------


def schema_text(name: str) -> str:
    """Return the text of ``<name>.schema.json``, from the wheel or from the source tree."""
    shipped = resources.files("ckptfmt") / "_schema" / f"{name}.schema.json"
    if shipped.is_file():
        return shipped.read_text("utf-8")
    return (
        resources.files("ckptfmt") / ".." / "spec" / "schema" / f"{name}.schema.json"
    ).read_text("utf-8")


@functools.cache
def _validator(name: str) -> Draft202012Validator:
    # Imported here because the import takes a tenth of a second, which only a program that meets a
    # violation needs to spend.
    from jsonschema import Draft202012Validator  # noqa: PLC0415
    from jsonschema.validators import extend  # noqa: PLC0415

    whole = Draft202012Validator.VALIDATORS["items"]

    def check_items(validator: Any, items: Any, instance: Any, schema: Any) -> Any:
        """Check an array's items. A too long array is a violation anyway, without this check."""
        is_long = isinstance(instance, list) and len(instance) > schema.get(
            "maxItems", len(instance)
        )
        return () if is_long else whole(validator, items, instance, schema)

    with_items: type[Draft202012Validator] = extend(Draft202012Validator, {"items": check_items})  # type: ignore[no-untyped-call]
    return with_items(_schema(name))


@functools.cache
def _fits(name: str) -> Fits:
    return compile_schema(_schema(name))


@functools.cache
def _members_of(name: str) -> frozenset[str]:
    """Return the names of the members of a type of document, from its schema."""
    return frozenset(_schema(name)["properties"])


@functools.cache
def _schema(name: str) -> Any:
    return _inline(json.loads(schema_text(name)), json.loads(schema_text("defs"))["$defs"])


def _inline(schema: Any, definitions: dict[str, Any]) -> Any:
    """Return a JSON Schema with each reference replaced by its definition.

    All definitions are in ``defs.schema.json``, a reference has no sibling members, and no
    definition is recursive. Without references, the check of a manifest takes 0.6 ms instead of 1.6
    ms.
    """
    if isinstance(schema, list):
        return [_inline(item, definitions) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inline(
            definitions[schema["$ref"].removeprefix("defs.schema.json#/$defs/")], definitions
        )
    return {key: _inline(value, definitions) for key, value in schema.items()}


def check_schema(name: str, value: object, *, where: str) -> None:
    """Raise unless `value` fits the schema `name`.

    The error reports the first violation in document order.

    `check_string` has passed all strings before, so a pattern's ``$`` can't match before a newline.
    Numbers are integers, so ``1.0`` can't pass as an integer.

    Raises: FormatError(DOC_SCHEMA), with the JSON pointer and the clause from the schema.
    """
    if _fits(name)(value):
        return
    violations = sorted(
        _validator(name).iter_errors(value), key=lambda violation: [str(p) for p in violation.path]
    )
    if not violations:
        return
    first = violations[0]
    pointer = "".join(f"/{step}" for step in first.absolute_path)
    schema = first.schema if isinstance(first.schema, dict) else {}
    raise err(
        Code.DOC_SCHEMA,
        first.message[:300],
        where=f"{where}#/signed{pointer}",
        requirement=schema.get("$comment", "REQ-DOC-011").split()[0],
    )
