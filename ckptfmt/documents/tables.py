"""What index and parts have in common: tables of tensors, boxes, aliases, scopes. Spec: REQ-IDX-002 to REQ-IDX-006."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from typing import TYPE_CHECKING, Any, Final

from ckptfmt import limits
from ckptfmt.box import Box
from ckptfmt.documents.canonical import check_string
from ckptfmt.documents.manifest import FIELDS, Origin
from ckptfmt.documents.packed import Columns, dump_packed
from ckptfmt.dtypes import DTYPES
from ckptfmt.errors import CkptError, Code, FormatError, err

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = [
    "ORIGIN_KEYS",
    "STORAGE",
    "TENSOR_KEYS",
    "TensorKey",
    "alias_columns",
    "block_count",
    "check_dtypes",
    "check_scopes",
    "collect_scopes",
    "document_head",
    "leaf_columns",
    "parse_absent",
    "parse_aliases",
    "parse_boxes",
    "parse_counter",
    "parse_leaf_rows",
    "parse_origin",
    "parse_stream_rows",
    "parse_tensor_rows",
    "sort_key",
    "stream_columns",
    "tensor_columns",
]

#: How a tensor belongs to its module; non-persistent ones have files of their own.
STORAGE: Final = ("persistent", "non-persistent")
ORIGIN_KEYS: Final = tuple(field.name for field in dataclasses.fields(Origin))

#: Longest reason why a field is absent, in characters, as the schema of manifests has it.
_REASON_LENGTH: Final = 1000
_SCOPE: Final = re.compile(r"global|lw/(0|[1-9][0-9]{0,8})")

_FIELD_NUMBERS: Final = {field: number for number, field in enumerate(FIELDS)}

#: field, name, scope: what a tensor is called, whoever holds which piece of it.
TensorKey = tuple[str, str, str]


def sort_key(key: TensorKey) -> tuple[int, bytes, bytes]:
    """Return by what tensors, streams and leaves are sorted. Spec: REQ-IDX-003."""
    field, name, scope = key
    return _FIELD_NUMBERS[field], name.encode(), scope.encode()


def block_count(nbytes: int, block_nbytes: int) -> int:
    """Return the number of blocks of a box of `nbytes` bytes.

    >>> [block_count(nbytes, 4096) for nbytes in (0, 1, 4096, 4097)]
    [0, 1, 1, 2]
    """
    return -(-nbytes // block_nbytes)


def document_head(
    kind: str, origin: Origin, *, saved_unix_s: int, scopes: list[str], dtypes: list[str]
) -> dict[str, object]:
    """Return the members that stand alike at the head of index and parts."""
    return {
        "type": kind,
        "format_version": limits.FORMAT_VERSION,
        "features": {"reader": [], "writer": []},
        **origin.as_dict(),
        "saved_unix_s": saved_unix_s,
        "scopes": scopes,
        "dtypes": dtypes,
    }


def tensor_columns(tensors: Sequence[Any], scopes: list[str], dtypes: list[str]) -> dict[str, object]:
    """Return the columns that describe tensors alike in index and parts."""
    return {
        "field": dump_packed([FIELDS.index(tensor.field) for tensor in tensors]),
        "name": [tensor.name for tensor in tensors],
        "scope": dump_packed([scopes.index(tensor.scope) for tensor in tensors]),
        "dtype": dump_packed([dtypes.index(tensor.dtype) for tensor in tensors]),
        "ndim": dump_packed([len(tensor.global_shape) for tensor in tensors]),
        "global_shape": dump_packed([extent for tensor in tensors for extent in tensor.global_shape]),
        "storage": dump_packed([STORAGE.index(tensor.storage) for tensor in tensors]),
    }


def alias_columns(tensors: Sequence[Any]) -> dict[str, object]:
    """Return the columns of the other names of tensors."""
    pairs = [(number, alias) for number, tensor in enumerate(tensors) for alias in tensor.aliases]
    return {"tensor": dump_packed([number for number, _ in pairs]), "name": [alias for _, alias in pairs]}


TENSOR_KEYS: Final = ("field", "name", "scope", "dtype", "ndim", "global_shape", "storage")


def parse_tensor_rows(
    columns: Columns, scopes: list[str], dtypes: list[str]
) -> list[tuple[TensorKey, str, tuple[int, ...], str]]:
    """Return key, dtype, global shape and storage of each row of a table of tensors.

    Raises: FormatError(COLUMN_FORM, COLUMN_ORDER, LIMIT_EXCEEDED).
    """
    names = columns.strings("name")
    count = len(names)
    fields = columns.packed("field", count=count, below=len(FIELDS))
    scope = columns.packed("scope", count=count, below=len(scopes))
    dtype = columns.packed("dtype", count=count, below=len(dtypes))
    ndim = columns.packed("ndim", count=count, below=limits.NDIM + 1)
    extents = iter(columns.packed("global_shape", count=sum(ndim), below=limits.DIM + 1))
    storage = columns.packed("storage", count=count, below=len(STORAGE))
    shapes = [tuple(itertools.islice(extents, rank)) for rank in ndim]
    for shape in shapes:
        if math.prod(extent for extent in shape if extent) > limits.ELEMENTS:
            raise columns.broken("global_shape", f"{shape} has too many elements")
    keys = [(FIELDS[f], name, scopes[s]) for f, name, s in zip(fields, names, scope, strict=True)]
    columns.check_increasing("name", [sort_key(key) for key in keys])
    return [(key, dtypes[d], shape, STORAGE[s]) for key, d, shape, s in zip(keys, dtype, shapes, storage, strict=True)]


def stream_columns(streams: Sequence[Any], scopes: list[str]) -> dict[str, object]:
    """Return the columns that describe random-number streams alike in index and parts."""
    return {
        "name": [stream.name for stream in streams],
        "scope": dump_packed([scopes.index(stream.scope) for stream in streams]),
        "kind": [stream.kind for stream in streams],
    }


def parse_stream_rows(table: Columns, scopes: list[str]) -> list[tuple[str, str, str]]:
    """Return name, scope and kind of each row. Raises: FormatError(COLUMN_FORM, COLUMN_ORDER)."""
    names = table.strings("name")
    scope = table.packed("scope", count=len(names), below=len(scopes))
    kinds = table.strings("kind", count=len(names))
    rows = [(name, scopes[number], kind) for name, number, kind in zip(names, scope, kinds, strict=True)]
    table.check_increasing("name", [(name.encode(), at.encode()) for name, at, _ in rows])
    return rows


def leaf_columns(leaves: Sequence[Any], scopes: list[str]) -> dict[str, object]:
    """Return the columns that describe plain values alike in index and parts."""
    return {
        "field": dump_packed([FIELDS.index(leaf.field) for leaf in leaves]),
        "name": [leaf.name for leaf in leaves],
        "scope": dump_packed([scopes.index(leaf.scope) for leaf in leaves]),
    }


def parse_leaf_rows(table: Columns, scopes: list[str]) -> list[TensorKey]:
    """Return field, name and scope of each row. Raises: FormatError(COLUMN_FORM, COLUMN_ORDER)."""
    names = table.strings("name")
    fields = table.packed("field", count=len(names), below=len(FIELDS))
    scope = table.packed("scope", count=len(names), below=len(scopes))
    keys = [(FIELDS[f], name, scopes[s]) for f, name, s in zip(fields, names, scope, strict=True)]
    table.check_increasing("name", [sort_key(key) for key in keys])
    return keys


def parse_aliases(columns: Columns, tensor_count: int) -> list[tuple[str, ...]]:
    """Return the other names of each tensor."""
    names = columns.strings("name")
    owners = columns.packed("tensor", count=len(names), below=tensor_count)
    columns.check_increasing("name", [(owner, name.encode()) for owner, name in zip(owners, names, strict=True)])
    aliases: list[list[str]] = [[] for _ in range(tensor_count)]
    for owner, name in zip(owners, names, strict=True):
        aliases[owner].append(name)
    return [tuple(found) for found in aliases]


def parse_boxes(columns: Columns, shapes: Iterable[tuple[int, int]]) -> list[list[Box]]:
    """Return the boxes of a table; `shapes` gives rank and number of boxes of each row that owns some."""
    owners = list(shapes)
    number_count = sum(rank * count for rank, count in owners)
    begins = iter(columns.packed("begin", count=number_count, below=limits.DIM + 1))
    extents = iter(columns.packed("box_shape", count=number_count, below=limits.DIM + 1))
    return [
        [Box(tuple(itertools.islice(begins, rank)), tuple(itertools.islice(extents, rank))) for _ in range(count)]
        for rank, count in owners
    ]


def collect_scopes(*tables: Sequence[Any]) -> list[str]:
    """Return the scopes that rows of any table have, sorted."""
    return sorted({row.scope for table in tables for row in table})


def check_scopes(columns: Columns) -> list[str]:
    """Return the scopes of a document. Raises: FormatError(SCOPE_FORM, COLUMN_ORDER). Spec: REQ-IDX-006."""
    scopes = columns.strings("scopes")
    columns.check_increasing("scopes", scopes)
    for scope in scopes:
        if not _SCOPE.fullmatch(scope):
            raise err(Code.SCOPE_FORM, f"{scope[:64]!r}", where=columns.place("scopes"), requirement="REQ-IDX-006")
    return scopes


def check_dtypes(columns: Columns) -> list[str]:
    """Return the dtypes of a document. Raises: FormatError(COLUMN_FORM, COLUMN_ORDER). Spec: REQ-TEN-003."""
    dtypes = columns.strings("dtypes")
    columns.check_increasing("dtypes", dtypes)
    unknown = [dtype for dtype in dtypes if dtype not in DTYPES]
    if unknown:
        raise columns.broken("dtypes", f"unknown dtype {unknown[0][:64]!r}")
    return dtypes


def parse_origin(columns: Columns) -> Origin:
    """Return the origin of a msgpack document.

    Raises: FormatError(DOC_SCHEMA).
    """
    values = {key: columns.any(key) for key in ORIGIN_KEYS}
    hexadecimal = {"nonce": 32, "attempt": 16} | ({"run_id": 32} if values["run_id"] is not None else {})
    for key, digits in hexadecimal.items():
        if not isinstance(values[key], str) or not re.fullmatch(f"[0-9a-f]{{{digits}}}", values[key]):
            raise _schema_error(columns, key)
    bounds = {
        "step": (0, limits.JSON_INTEGER),
        "writer_count": (1, limits.WRITERS),
        "block_nbytes": (limits.BLOCK_NBYTES_MIN, limits.BLOCK_NBYTES_MAX),
    } | ({"launch": (0, limits.JSON_INTEGER)} if values["launch"] is not None else {})
    for key, (least, most) in bounds.items():
        if type(values[key]) is not int or not least <= values[key] <= most:
            raise _schema_error(columns, key)
    if values["block_nbytes"].bit_count() != 1:
        raise _schema_error(columns, "block_nbytes")
    return Origin(**values)


def parse_absent(columns: Columns) -> dict[str, str]:
    """Return the absent fields and their reasons. Raises: FormatError(MANIFEST_FIELDS). Spec: REQ-MAN-003."""
    absent = columns.any("absent")
    if not isinstance(absent, dict) or not all(map(_is_absence, absent, absent.values())):
        raise err(
            Code.MANIFEST_FIELDS,
            "not a map from field to a reason that a manifest may hold",
            where=columns.place("absent"),
            requirement="REQ-MAN-003",
        )
    return absent


def _is_absence(field: str, reason: object) -> bool:
    """Say whether a manifest can repeat what a part says of a field. Spec: REQ-MAN-003, REQ-PRT-009."""
    if field not in FIELDS or not isinstance(reason, str) or not 1 <= len(reason) <= _REASON_LENGTH:
        return False
    try:
        check_string(reason, "")
    except FormatError:
        return False
    return True


def parse_counter(columns: Columns, key: str, *, below: int = limits.JSON_INTEGER + 1) -> int:
    """Return an integer member. Raises: FormatError(DOC_SCHEMA)."""
    value = columns.any(key)
    if type(value) is not int or not 0 <= value < below:
        raise _schema_error(columns, key)
    return value


def _schema_error(columns: Columns, key: str) -> CkptError:
    return err(
        Code.DOC_SCHEMA,
        f"{str(columns.any(key))[:64]!r} is out of range or of the wrong type",
        where=columns.place(key),
        requirement="REQ-DOC-011",
    )
