"""The fenced examples of the specification (spec/appendix/98-notation.md), and their files.

`text` is a picture, and `python` a session with the reference implementation; every other line or
document is a sequence of bytes that every reader accepts or refuses.
"""

from __future__ import annotations

import copy
import json
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conformance.generate.clauses import ROOT, page_paths
from conformance.generate.deflate import deflate_stored
from conformance.generate.views import document_of, load_schema
from conformance.generate.wire import Bend, json_document, msgpack, table_document

__all__ = ["REFUSAL", "Example", "Fence", "edited", "file_of", "read_examples", "read_fences"]

#: The end of a refused line: the code and clause of the refusal, and further clauses shown.
REFUSAL = re.compile(r"(.*) -> ([A-Z_0-9]+) (REQ-[A-Z]{3}-[0-9]{3})((?: REQ-[A-Z]{3}-[0-9]{3})*)")
_EDIT = re.compile(r"(add|replace|remove) (/\S+)(?: (.+))?")
_FENCE = re.compile(r"```(\S*)((?: \S+)*)")
#: Bytes of elements after the header of the example shard.
SHARD_DATA_NBYTES = 36


@dataclass(frozen=True, slots=True, kw_only=True)
class Fence:
    """A fenced example: page, first line on the page, language, tags and content."""

    page: str
    line: int
    language: str
    tags: dict[str, str]
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """Bytes of a form, and the expected result of a reader.

    Attributes:
        form: the form to parse: a document's type, `index`, `part`, `cursor`, `shard`, or a form of
            values.
        name: the name of the example, or of the edited example; "" for a line by itself.
        says: the line, or the title of the example.
        clauses: the clauses shown; for a refusal, the clause of the first refusal.
        code: the code of a refusal; "" for an accepted example.
        is_edit: whether the example is an edit of the named example.
        features: the reader features required.
        place: the file that would contain the bytes.
    """

    form: str
    name: str
    says: str
    content: bytes
    page: str
    clauses: tuple[str, ...] = ()
    code: str = ""
    is_edit: bool = False
    features: tuple[str, ...] = ()
    place: str = "document"


def read_fences(spec: Path = ROOT / "spec") -> list[Fence]:
    """Return all fences in the order of the pages."""
    found = []
    for path in page_paths(spec):
        lines = iter(enumerate(path.read_text("utf-8").splitlines(), 1))
        for number, line in lines:
            opening = _FENCE.fullmatch(line)
            if opening:
                tags = dict(tag.partition("=")[::2] for tag in opening[2].split())
                content = "\n".join(_until_end(lines)) + "\n"
                found.append(
                    Fence(
                        page=path.relative_to(spec).as_posix(),
                        line=number,
                        language=opening[1],
                        tags=tags,
                        content=content,
                    )
                )
    return found


def _until_end(lines: Iterator[tuple[int, str]]) -> Iterator[str]:
    for _, line in lines:
        if line.startswith("```"):
            return
        yield line


def read_examples(spec: Path = ROOT / "spec") -> list[Example]:
    """Return the examples for readers from all fences, in the order of the pages."""
    fences = read_fences(spec)
    named = {fence.tags["name"]: fence for fence in fences if "name" in fence.tags}
    found: list[Example] = []
    for fence in fences:
        match fence.language:
            case "json":
                found.append(
                    _document(
                        fence,
                        json.loads(fence.content),
                        says=f"the example {fence.tags['name']}",
                        page=fence.page,
                    )
                )
            case "edits":
                found += [_edit(named[fence.tags["of"]], fence, line) for line in _lines(fence)]
            case "rejects":
                place = named[fence.tags["parse"]].tags["for"]
                found += [_line(fence, line, place=place) for line in _lines(fence)]
            case "hex":
                found += [_line(fence, line) for line in _lines(fence)]
    return found


def _lines(fence: Fence) -> list[str]:
    return [line for line in fence.content.splitlines() if line.strip()]


def _document(fence: Fence, value: Any, *, says: str, page: str, **members: Any) -> Example:
    original = json.loads(fence.content)
    features = original["features"]["reader"] if "features" in original else ()
    return Example(
        form=_form(fence),
        name=fence.tags["name"],
        says=says,
        content=file_of(fence, value),
        page=page,
        features=tuple(features),
        place=fence.tags.get("for", "document"),
        **members,
    )


def _form(fence: Fence) -> str:
    tags = fence.tags
    return tags.get("document") or tags.get("view") or tags.get("tree") or "shard"


def file_of(fence: Fence, value: Any) -> bytes:
    """Return the file for an example or for an edit of the example."""
    if "document" in fence.tags:
        return json_document(value)[0]
    if "view" in fence.tags:
        signed = document_of(value, load_schema(fence.tags["view"]))
        return table_document(signed, Bend(stream=lambda _: deflate_stored(msgpack(signed))))[0]
    if "tree" in fence.tags:
        return msgpack(_tree_of(value))
    return _padded(json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()) + bytes(
        SHARD_DATA_NBYTES
    )


def _tree_of(value: Any) -> Any:
    """Return the tree of a value; maps and lists stand for dicts and lists."""
    if isinstance(value, dict):
        return ["d", *(item for row in value.items() for item in (row[0], _tree_of(row[1])))]
    if isinstance(value, list):
        return ["l", *map(_tree_of, value)]
    if isinstance(value, float):
        return ["f", struct.pack("<d", value)]
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
        return ["i", value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)]
    return value


def _padded(text: bytes) -> bytes:
    """Return the header of a shard: the length, the text, spaces."""
    text += b" " * (-(8 + len(text)) % 64)
    return len(text).to_bytes(8, "little") + text


def _edit(source: Fence, fence: Fence, line: str) -> Example:
    """Return the example for a line of edits: the source example, edited."""
    text, code, clauses = _refusal(fence, line)
    value = edited(json.loads(source.content), text)
    members: dict[str, Any] = {"code": code, "clauses": clauses, "is_edit": True}
    return _document(source, value, says=text, page=fence.page, **members)


def _line(fence: Fence, line: str, *, place: str = "document") -> Example:
    """Return the example for a line with a whole document or value and the expected result."""
    shown = fence.tags.get("shows")
    members: dict[str, Any] = {
        "form": fence.tags["parse"],
        "name": "",
        "page": fence.page,
        "place": place,
    }
    if fence.language == "hex" and " -> " not in line:
        digits, _, says = line.partition(" = ")
        clauses = tuple(shown.split(",")) if shown else ()
        return Example(says=says, content=bytes.fromhex(digits), clauses=clauses, **members)
    text, code, clauses = _refusal(fence, line)
    if fence.language == "hex" or text.startswith("hex:"):
        content = bytes.fromhex(text.removeprefix("hex:"))
    elif text.startswith("padded:"):
        content = _padded(text.removeprefix("padded:").encode())
    else:
        content = text.encode()
    return Example(says=text, content=content, code=code, clauses=clauses, **members)


def _refusal(fence: Fence, line: str) -> tuple[str, str, tuple[str, ...]]:
    """Return the text of a line, the code, and the clauses.

    Raises: ValueError for a line without code and clauses.
    """
    match = REFUSAL.fullmatch(line)
    if not match:
        raise ValueError(f"{fence.page}: {line!r} doesn't say how it is refused")
    text, code, clause, others = match.groups()
    return text, code, (clause, *others.split())


def edited(value: Any, text: str) -> Any:
    """Return a value after one edit: `add`, `replace` or `remove`, a JSON pointer, the new value.

    Raises: ValueError for an unknown edit, or an edit without effect.
    """
    match = _EDIT.fullmatch(text)
    if not match:
        raise ValueError(f"{text!r} is no edit")
    operation, pointer, new = match.groups()
    before = value
    value = copy.deepcopy(value)
    *path, last = [step.replace("~1", "/").replace("~0", "~") for step in pointer.split("/")[1:]]
    place = value
    for step in path:
        place = place[int(step) if isinstance(place, list) else step]
    if isinstance(place, list):
        at = int(last)
        place[at : at + (operation != "add")] = [] if operation == "remove" else [json.loads(new)]
    elif operation == "remove":
        del place[last]
    else:
        if (last in place) != (operation == "replace"):
            raise ValueError(f"{text!r} is of another operation")
        place[last] = json.loads(new)
    if value == before and json.dumps(value) == json.dumps(before):
        raise ValueError(f"{text!r} changes nothing")
    return value
