"""Faults with files of tensors, their headers, and their elements."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from blake3 import blake3

from ckptfmt_conformance.adapters.reference import (
    Box,
    Checkpoint,
    CkptError,
    Code,
    Reference,
    numpy_dtype,
    original,
)

_json: Any = original("ckptfmt.documents.shard:json")
_parse_header = original("ckptfmt.documents.shard:_parse_header")


def _read_header(store: Any, file: Any) -> Any:
    return store.read_range(file.name, 0, file.header_nbytes)


class UncheckedHeader(Reference):
    """It doesn't compare a shard's header with its digest, so other tools see other tensors."""

    convicted_by = ("shards/invalid/bit-in-header", "shards/invalid/bit-in-padding")
    replacements = (("ckptfmt.read.files:read_header", _read_header),)


def _check_nothing(*_: object) -> None:
    return None


class TrustedHeaders(Reference):
    """It checks the bytes of a shard's header, but not the agreement with the part."""

    breaks = ("REQ-SHD-010",)
    convicted_by = (
        "deltas/invalid/base-beyond-key",
        "parts/invalid/two-extents-checked",
    )
    replacements = (("ckptfmt.read.verify:_verify_header", _check_nothing),)


class IgnoredLength(Reference):
    """It doesn't compare the size of a file with the part, so appended bytes aren't noticed."""

    convicted_by = ("shards/invalid/a-byte-long",)
    replacements = (("ckptfmt.read.files:check_nbytes", _check_nothing),)


class _Json:
    """A json module that reads integers as Python does."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_json, name)

    def loads(self, text: str, **options: Any) -> Any:
        """Return the value of a text."""
        return _json.loads(text, **options | {"parse_int": int})


class LaxNumbers(Reference):
    """It accepts any notation of an integer in a shard's header."""

    breaks = ("REQ-SHD-004",)
    convicted_by = (
        "shards/invalid/minus-zero",
        "shards/invalid/digits-21",
    )
    replacements = (("ckptfmt.documents.shard:json", _Json()),)


def _has_other(value: Any) -> bool:
    if isinstance(value, dict | list):
        return any(map(_has_other, value.values() if isinstance(value, dict) else value))
    return value is None or isinstance(value, bool)


def _parse_listed(text: bytes, where: str) -> Any:
    header = _parse_header(text, where)
    if _has_other(header):
        raise CkptError(Code.SHARD_HEADER_SYNTAX, "a value of another kind", where=where)
    return header


class OnlyListedJson(Reference):
    """It refuses true, false and null in a shard's header as a JSON syntax error."""

    breaks = ("REQ-SHD-011",)
    convicted_by = (
        "shards/invalid/box-null",
        "shards/invalid/extent-true",
        "shards/invalid/offset-false",
        "shards/invalid/shape-null",
        "shards/invalid/tag-null",
    )
    replacements = (("ckptfmt.documents.shard:_parse_header", _parse_listed),)


#: Number sizes in bytes, for dtypes with more than one byte. A complex element has two numbers.
_WIDTHS = {
    **dict.fromkeys(("uint16", "int16", "float16", "bfloat16", "complex32"), 2),
    **dict.fromkeys(("uint32", "int32", "float32", "complex64"), 4),
    **dict.fromkeys(("uint64", "int64", "float64", "complex128"), 8),
}


class BigEndian(Reference):
    """It reads elements with the highest byte first."""

    breaks = ("REQ-TEN-002",)
    convicted_by = (
        "manifest/valid/small",
        "shards/valid/dtypes",
        "shards/valid/bits",
        "prediction/valid/two-groups",
        "deltas/valid/base-whole",
    )

    def content(self, checkpoint: Checkpoint, key: tuple[str, str, str], box: Box) -> bytes:
        """Return the bytes of a box, with each number's bytes reversed."""
        content = super().content(checkpoint, key, box)
        width = _WIDTHS.get(checkpoint.tensors[key].dtype, 1)
        return np.frombuffer(content, f"u{width}").byteswap().tobytes()


#: Sizes in bytes of each of the two numbers of a complex element.
_COMPLEX_WIDTHS = {"complex32": 2, "complex64": 4, "complex128": 8}


class ImaginaryFirst(Reference):
    """It swaps the real and the imaginary part of a complex element."""

    breaks = ("REQ-TEN-002",)
    convicted_by = ("shards/valid/dtypes",)

    def content(self, checkpoint: Checkpoint, key: tuple[str, str, str], box: Box) -> bytes:
        """Return the bytes of a box, with both parts swapped."""
        content = super().content(checkpoint, key, box)
        width = _COMPLEX_WIDTHS.get(checkpoint.tensors[key].dtype)
        if width is None:
            return content
        return np.frombuffer(content, f"u{width}").reshape(-1, 2)[:, ::-1].tobytes()


class LostSign(Reference):
    """It loses the sign of zero in tensors and trees."""

    breaks = ("REQ-OPN-007",)
    convicted_by = ("trees/valid/floats", "trees/valid/complex", "shards/valid/bits")

    def content(self, checkpoint: Checkpoint, key: tuple[str, str, str], box: Box) -> bytes:
        """Return the bytes of a box, with 0.0 for -0.0."""
        content = super().content(checkpoint, key, box)
        dtype = checkpoint.tensors[key].dtype
        if dtype not in ("float32", "float64"):
            return content
        values = np.frombuffer(content, dtype).copy()
        values[values == 0] = 0
        return values.tobytes()

    def tree_of(self, content: bytes) -> object:
        """Return a tree as tagged JSON, with 0.0 for -0.0."""
        return json.loads(
            json.dumps(super().tree_of(content)).replace(f'"{"80" + "00" * 7}"', f'"{"00" * 8}"')
        )


class Widened(Reference):
    """It converts floats of 16 bits to 32 bits, which changes bytes and dtype."""

    breaks = ("REQ-OPN-007",)
    convicted_by = ("shards/valid/dtypes",)

    def digests(self, checkpoint: Checkpoint, key: tuple[str, str, str]) -> dict[str, Any]:
        """Return the description of a tensor after the conversion."""
        tensor = checkpoint.tensors[key]
        if tensor.dtype not in ("bfloat16", "float16"):
            return super().digests(checkpoint, key)
        content = self.content(checkpoint, key, Box.whole(tensor.global_shape))
        with np.errstate(all="ignore"):
            wide = np.frombuffer(content, numpy_dtype(tensor.dtype)).astype(np.float32).tobytes()
        return {
            "dtype": "float32",
            "shape": list(tensor.global_shape),
            "blake3": blake3(wide).hexdigest(),
            "first16": wide[:16].hex(),
        }


class Miswriting(Reference):
    """It writes wrong bytes for larger tensors, with matching digests."""

    convicted_by = ("opening/valid/write-odd-shapes",)

    def array_of(self, dtype: str, shape: list[int]) -> np.ndarray[Any, Any]:
        """Return an array whose byte i is i mod 256."""
        kind = numpy_dtype(dtype)
        count = kind.itemsize * int(np.prod(shape, dtype=np.int64))
        return np.arange(count, dtype=np.int64).astype(np.uint8).view(kind).reshape(shape)


def _sort_without_widths(rows: Any, *, key: Any) -> list[Any]:
    return sorted(rows, key=lambda row: key(row)[1:])


class NarrowBefore(Reference):
    """It lays out boxes by size alone: elements of eight bytes follow elements of a byte."""

    convicted_by = ("opening/valid/write-dtypes",)
    replacements = (("ckptfmt.documents.shard:sorted", _sort_without_widths),)
