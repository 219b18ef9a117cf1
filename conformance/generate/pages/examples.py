"""The examples on the pages of the specification, each requested alone, by the kind `parse`."""

from __future__ import annotations

import re
import struct
from collections import Counter, OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from blake3 import blake3

from conformance.generate.cases import Page
from conformance.generate.fences import Example, read_examples
from conformance.generate.wire import msgpack

__all__ = ["page"]

#: Forms with refused lines only: the lines derive from an example of another form.
_RELATED = {"packed_document": "index"}


def page() -> Page:
    """Return the cases of the pages' examples."""
    made = Page("examples")
    examples = read_examples()
    _checkpoint(made, {example.name: example for example in examples if not example.is_edit})
    accepted = {one.name or one.form: _slug(one) for one in reversed(examples) if not one.code}
    for example in examples:
        request = {"form": example.form, "file": example.place}
        files = {example.place: example.content}
        features = [f"parse-{example.form}", *example.features]
        if example.code:
            of = example.name or _RELATED.get(example.form, example.form)
            made.reject(
                _slug(example),
                f"examples/valid/{accepted[of]}",
                None,
                " ".join(label.removeprefix("REQ-") for label in example.clauses),
                example.code,
                _says(example),
                why="who goes by the page refuses it, and by this code",
                bug="AMBIGUITY",
                kind="parse",
                request=request,
                files=files,
                features=features,
                page=example.page,
            )
            continue
        made.ask(
            _slug(example),
            "",
            "parse",
            request,
            " ".join(_shown(example, examples)),
            _says(example),
            why="who goes by the page takes it",
            result={} if example.name else {"value": _tagged(eval(example.says, dict(_NAMES)))},
            bug="REFUSES_VALID",
            files=files,
            features=features,
            page=example.page,
        )
    return made


def _checkpoint(made: Page, named: dict[str, Example]) -> None:
    """Add the checkpoint of the examples on pages 30, 40 and 50, with the shard's elements."""
    elements = {
        "layers.0.bias": struct.pack("<3f", 0.5, 1, 2),
        "layers.0.weight": struct.pack("<6f", *range(6)),
    }
    content = b"".join(elements.values())
    files = {
        one.place: one.content
        for one in (named["manifest"], named["index"], named["part"], named["shard"])
    }
    files[named["shard"].place] = named["shard"].content[: -len(content)] + content
    made.ask(
        "checkpoint",
        "",
        "open",
        {"verify": "all"},
        "MAN-001 IDX-001 PRT-001 SHD-010",
        "manifest, index, part and shard of pages 30, 40 and 50",
        why="the pages' documents name each other by their digests",
        result={
            "tensors": {
                f"weights/{name}": {
                    "dtype": "float32",
                    "shape": shape,
                    "blake3": blake3(elements[name]).hexdigest(),
                    "first16": elements[name][:16].hex(),
                }
                for name, shape in (("layers.0.bias", [3]), ("layers.0.weight", [2, 3]))
            }
        },
        bug="REFUSES_VALID",
        files=files,
    )


def _says(example: Example) -> str:
    text = example.says if len(example.says) <= 100 else f"{example.says[:97]}..."
    what = (
        f"{example.name}, edited: "
        if example.is_edit
        else ""
        if example.name
        else f"{example.form}: "
    )
    return f"page {example.page.rpartition('/')[2][:2]}: {what}{text}"


def _slug(example: Example) -> str:
    """Return a name independent of the rest of the lines."""
    if example.name and not example.is_edit:
        return example.name
    digest = blake3(f"{example.form} {example.name} {example.says}".encode()).hexdigest()[:8]
    words = [example.name or example.form]
    if example.is_edit:
        words += re.findall(r"[a-z0-9]+", example.says.split()[1].lower())
    return "-".join([*words, digest]).replace("_", "-")


def _shown(example: Example, examples: list[Example]) -> list[str]:
    """Return the clauses shown by an accepted example, and the clauses of similar refusals."""
    alike = [
        one for one in examples if one.code and (one.name, one.form) == (example.name, example.form)
    ]
    labels = {label for one in (example, *alike) for label in one.clauses}
    return sorted(label.removeprefix("REQ-") for label in labels)


# The names by which pages write values of trees.


@dataclass(frozen=True, slots=True)
class InlineArray:
    """An array, or a numpy scalar."""

    dtype: str
    shape: tuple[int, ...]
    content: bytes
    scalar: bool = False


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A reference to a tensor."""

    name: str
    kind: str


@dataclass(frozen=True, slots=True)
class DtypeName:
    """A dtype as a value."""

    name: str


@dataclass(frozen=True, slots=True)
class DeviceName:
    """A device as a value."""

    name: str


@dataclass(frozen=True, slots=True)
class Size:
    """A torch.Size."""

    shape: tuple[int, ...]


_NAMES = {
    one.__name__: one
    for one in (Counter, DeviceName, DtypeName, InlineArray, OrderedDict, Size, TensorRef, deque)
}


def _tagged(value: Any) -> Any:  # noqa: PLR0911 - any value of a page, one answer for each form
    """Return a value as tagged JSON."""
    match value:
        case None | bool() | str():
            return value
        case int():
            return value if abs(value) < 1 << 53 else {"int": str(value)}
        case float():
            return {"float": struct.pack(">d", value).hex()}
        case complex():
            return {"complex": [struct.pack(">d", one).hex() for one in (value.real, value.imag)]}
        case bytes():
            return {"bytes": value.hex()}
        case Mapping():
            name = {OrderedDict: "ordered_dict", Counter: "counter"}.get(type(value), "dict")
            return {name: [[_tagged(key), _tagged(item)] for key, item in value.items()]}
        case deque():
            return {"deque": [_tagged(item) for item in value], "maxlen": value.maxlen}
        case list() | tuple():
            return {type(value).__name__: [_tagged(item) for item in value]}
        case set():
            return {"set": [_tagged(item) for item in sorted(value, key=msgpack)]}
    return _tagged_name(value)


def _tagged_name(value: Any) -> dict[str, Any]:
    match value:
        case InlineArray(scalar=True):
            return {"scalar": value.content.hex(), "dtype": value.dtype}
        case InlineArray():
            return {"array": value.content.hex(), "dtype": value.dtype, "shape": list(value.shape)}
        case TensorRef():
            return {"tensor": value.name, "kind": value.kind}
        case DtypeName():
            return {"dtype": value.name}
        case DeviceName():
            return {"device": value.name}
        case Size():
            return {"size": list(value.shape)}
    raise ValueError(f"{value!r} has no form in tagged JSON")
