"""Files of tensors, their headers, and the elements in them."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from blake3 import blake3

from ckptfmt_conformance.adapters.reference import Box, Checkpoint, CkptError, Code, Reference, numpy_dtype, original

_json: Any = original("ckptfmt.documents.shard:json")
_parse_header = original("ckptfmt.documents.shard:_parse_header")


def _read_header(store: Any, file: Any) -> Any:  # noqa: ANN401 - of the implementation
    return store.read_range(file.name, 0, file.header_nbytes)


class UncheckedHeader(Reference):
    """It doesn't compare the header of a shard with its digest: other tools see other tensors."""

    convicted_by = ("shards/invalid/bit-in-header", "shards/invalid/bit-in-padding")
    replacements = (("ckptfmt.read.files:read_header", _read_header),)


def _check_nothing(*_: object) -> None:
    return None


class TrustedHeaders(Reference):
    """It checks the bytes of a shard's header, and not that it says what the part says."""

    breaks = ("REQ-SHD-010",)
    convicted_by = (
        "deltas/invalid/base-beyond-key",
        "parts/invalid/two-extents-checked",
    )
    replacements = (("ckptfmt.read.verify:_verify_header", _check_nothing),)


class IgnoredLength(Reference):
    """It doesn't compare the size of a file with what its part says: what was appended goes unseen."""

    convicted_by = ("shards/invalid/a-byte-long",)
    replacements = (("ckptfmt.read.files:check_nbytes", _check_nothing),)


class _Json:
    """Reads integers as Python does."""

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - of the implementation
        return getattr(_json, name)

    def loads(self, text: str, **options: Any) -> Any:  # noqa: ANN401 - of the implementation
        """Read a text."""
        return _json.loads(text, **options | {"parse_int": int})


class LaxNumbers(Reference):
    """It takes any number in a shard's header that is an integer by its value."""

    breaks = ("REQ-SHD-004",)
    convicted_by = (
        "shards/invalid/minus-zero",
        "shards/invalid/digits-21",
    )
    replacements = (("ckptfmt.documents.shard:json", _Json()),)


def _has_other(value: Any) -> bool:  # noqa: ANN401 - of the implementation
    if isinstance(value, dict | list):
        return any(map(_has_other, value.values() if isinstance(value, dict) else value))
    return value is None or isinstance(value, bool)


def _parse_listed(text: bytes, where: str) -> Any:  # noqa: ANN401 - of the implementation
    header = _parse_header(text, where)
    if _has_other(header):
        raise CkptError(Code.SHARD_HEADER_SYNTAX, "a value of another kind", where=where)
    return header


class OnlyListedJson(Reference):
    """It takes true, false and null in a shard's header for JSON that can't be parsed."""

    breaks = ("REQ-SHD-011",)
    convicted_by = (
        "shards/invalid/box-null",
        "shards/invalid/extent-true",
        "shards/invalid/offset-false",
        "shards/invalid/shape-null",
        "shards/invalid/tag-null",
    )
    replacements = (("ckptfmt.documents.shard:_parse_header", _parse_listed),)


#: Bytes of a number, of the dtypes with more than one; a complex element is two numbers.
_WIDTHS = {
    **dict.fromkeys(("uint16", "int16", "float16", "bfloat16", "complex32"), 2),
    **dict.fromkeys(("uint32", "int32", "float32", "complex64"), 4),
    **dict.fromkeys(("uint64", "int64", "float64", "complex128"), 8),
}


class BigEndian(Reference):
    """It takes elements to begin with their highest byte."""

    breaks = ("REQ-TEN-002",)
    convicted_by = (
        "manifest/valid/small",
        "shards/valid/dtypes",
        "shards/valid/bits",
        "prediction/valid/two-groups",
        "deltas/valid/base-whole",
    )

    def content(self, checkpoint: Checkpoint, key: tuple[str, str, str], box: Box) -> bytes:
        """Return the bytes of a box, those of each number turned round."""
        content = super().content(checkpoint, key, box)
        width = _WIDTHS.get(checkpoint.tensors[key].dtype, 1)
        return np.frombuffer(content, f"u{width}").byteswap().tobytes()


#: Bytes of each of the two numbers of a complex element.
_COMPLEX_WIDTHS = {"complex32": 2, "complex64": 4, "complex128": 8}


class ImaginaryFirst(Reference):
    """It takes the imaginary part of a complex element for the real one."""

    breaks = ("REQ-TEN-002",)
    convicted_by = ("shards/valid/dtypes",)

    def content(self, checkpoint: Checkpoint, key: tuple[str, str, str], box: Box) -> bytes:
        """Return the bytes of a box, both parts exchanged."""
        content = super().content(checkpoint, key, box)
        width = _COMPLEX_WIDTHS.get(checkpoint.tensors[key].dtype)
        if width is None:
            return content
        return np.frombuffer(content, f"u{width}").reshape(-1, 2)[:, ::-1].tobytes()


class LostSign(Reference):
    """It loses the sign of zero, wherever a tensor or a tree has a float."""

    breaks = ("REQ-OPN-007",)
    convicted_by = ("trees/valid/floats", "trees/valid/complex", "shards/valid/bits")

    def content(self, checkpoint: Checkpoint, key: tuple[str, str, str], box: Box) -> bytes:
        """Return the bytes of a box, 0.0 for -0.0."""
        content = super().content(checkpoint, key, box)
        dtype = checkpoint.tensors[key].dtype
        if dtype not in ("float32", "float64"):
            return content
        values = np.frombuffer(content, dtype).copy()
        values[values == 0] = 0
        return values.tobytes()

    def tree_of(self, content: bytes) -> object:
        """Return what is said of a tree, 0.0 for -0.0."""
        return json.loads(json.dumps(super().tree_of(content)).replace(f'"{"80" + "00" * 7}"', f'"{"00" * 8}"'))


class Widened(Reference):
    """It makes floats of 32 bits of those of 16: whoever loads has other bytes, and another dtype, than were saved."""

    breaks = ("REQ-OPN-007",)
    convicted_by = ("shards/valid/dtypes",)

    def digests(self, checkpoint: Checkpoint, key: tuple[str, str, str]) -> dict[str, Any]:
        """Return what is said of a tensor, once it is widened."""
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
    """It writes other bytes than it is given once there are more than a few, and signs them all the same."""

    convicted_by = ("opening/valid/write-odd-shapes",)

    def array_of(self, dtype: str, shape: list[int]) -> np.ndarray[Any, Any]:
        """Return an array whose byte i is i mod 256."""
        kind = numpy_dtype(dtype)
        count = kind.itemsize * int(np.prod(shape, dtype=np.int64))
        return np.arange(count, dtype=np.int64).astype(np.uint8).view(kind).reshape(shape)
