"""Tables shared by index and parts: tensors, aliases, RNG streams, scopes.

Spec: REQ-IDX-002 to REQ-IDX-007.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, TypeVar

import numpy as np

from ckptfmt import limits
from ckptfmt.documents.canonical import check_string, head_of
from ckptfmt.documents.manifest import FIELDS, Origin, check_membership
from ckptfmt.documents.msgpk import dump_mapless
from ckptfmt.documents.packed import (
    Columns,
    Integers,
    dump_packed,
    dump_strings,
    make_integers,
    parse_packed,
)
from ckptfmt.dtypes import DTYPES
from ckptfmt.errors import CkptError, Code, FormatError, err

#: Storage kinds of a tensor in its module; non-persistent tensors have separate files.
STORAGE: Final = ("persistent", "non-persistent")
ORIGIN_KEYS: Final = tuple(field.name for field in dataclasses.fields(Origin))

#: Longest reason for a field's absence in characters, as in the schema of manifests.
_REASON_LENGTH: Final = 1000
_SCOPE: Final = re.compile(r"global|lw/(0|[1-9][0-9]{0,8})")

_R = TypeVar("_R")
_FIELD_NUMBERS: Final = {field: number for number, field in enumerate(FIELDS)}

#: Field, name and scope, which identify a tensor independently of its holders.
TensorKey = tuple[str, str, str]

#: Returns the key of a tensor, leaf or description of either.
key_of: Final[Callable[[Any], TensorKey]] = operator.attrgetter("field", "name", "scope")


def sort_key(key: TensorKey) -> tuple[int, bytes, bytes]:
    """Return the sort key of tensors, RNG streams and leaves. Spec: REQ-IDX-003."""
    field, name, scope = key
    # Names that aren't Unicode text pass here; a later check reports them with their place.
    return _FIELD_NUMBERS[field], name.encode(errors="surrogatepass"), scope.encode()


def sort_rows(rows: Iterable[_R]) -> tuple[_R, ...]:
    """Return tensors or leaves in the order in which documents list them. Spec: REQ-IDX-003."""
    return tuple(sorted(rows, key=lambda row: sort_key(key_of(row))))


def title_of(key: TensorKey) -> str:
    """Return the title of a tensor, leaf or RNG stream for messages.

    >>> title_of(("rng", "cpu", "lw/3"))
    "rng 'cpu' (lw/3)"
    """
    field, name, scope = key
    return f"{field} {name!r}" + ("" if scope == "global" else f" ({scope})")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TensorTable:
    """Keys and properties of tensors: rows as tuples, and numeric columns as arrays.

    Attributes:
        keys: field, name and scope of each tensor.
        dtypes: dtype name of each tensor.
        global_shapes: shape of each tensor.
        storages: storage kind of each tensor, from `STORAGE`.
        aliases: other names of each tensor, sorted.
        ndim: number of dimensions of each tensor.
        extents: `global_shapes`, flattened.
        element_nbytes: element size of each tensor, in bytes.
        scope_numbers: numbers of the occurring scopes in the document.
    """

    keys: tuple[TensorKey, ...]
    dtypes: tuple[str, ...]
    global_shapes: tuple[tuple[int, ...], ...]
    storages: tuple[str, ...]
    aliases: tuple[tuple[str, ...], ...]
    ndim: Integers
    extents: Integers
    element_nbytes: Integers
    scope_numbers: frozenset[int] = frozenset()

    @classmethod
    def of(cls, tensors: Sequence[Any]) -> TensorTable:
        """Return the table of objects with the attributes that `members` lists."""
        return cls(
            keys=tuple(map(key_of, tensors)),
            dtypes=tuple(tensor.dtype for tensor in tensors),
            global_shapes=tuple(tuple(tensor.global_shape) for tensor in tensors),
            storages=tuple(tensor.storage for tensor in tensors),
            aliases=tuple(tuple(sorted(tensor.aliases, key=str.encode)) for tensor in tensors),
            ndim=make_integers(len(tensor.global_shape) for tensor in tensors),
            extents=make_integers(extent for tensor in tensors for extent in tensor.global_shape),
            element_nbytes=make_integers(DTYPES[tensor.dtype].nbytes for tensor in tensors),
        )

    def members(self, row: int) -> dict[str, Any]:
        """Return field, name, scope, dtype, global_shape, storage and aliases of one row."""
        field, name, scope = self.keys[row]
        return {
            "field": field,
            "name": name,
            "scope": scope,
            "dtype": self.dtypes[row],
            "global_shape": self.global_shapes[row],
            "storage": self.storages[row],
            "aliases": self.aliases[row],
        }

    @functools.cached_property
    def numbers(self) -> dict[TensorKey, int]:
        """The row of each tensor."""
        return {key: row for row, key in enumerate(self.keys)}

    def dtypes_by_key(self) -> dict[TensorKey, str]:
        """Return the dtype of each tensor."""
        return dict(zip(self.keys, self.dtypes, strict=True))


def block_count(nbytes: int, block_nbytes: int) -> int:
    """Return the number of blocks of a box of `nbytes` bytes.

    >>> [block_count(nbytes, 4096) for nbytes in (0, 1, 4096, 4097)]
    [0, 1, 1, 2]
    """
    return -(-nbytes // block_nbytes)


def document_head(
    kind: str, origin: Origin, *, saved_unix_s: int, scopes: list[str], dtypes: list[str]
) -> dict[str, object]:
    """Return the common first members of index and parts."""
    return {
        **head_of(kind),
        **origin.as_dict(),
        "saved_unix_s": saved_unix_s,
        "scopes": scopes,
        "dtypes": dtypes,
    }


def tensor_columns(table: TensorTable, scopes: list[str], dtypes: list[str]) -> dict[str, object]:
    """Return the common columns of tensors in index and parts."""
    scope_numbers = {scope: number for number, scope in enumerate(scopes)}
    dtype_numbers = {dtype: number for number, dtype in enumerate(dtypes)}
    return {
        "field": dump_packed([_FIELD_NUMBERS[field] for field, _, _ in table.keys]),
        "name": dump_strings([name for _, name, _ in table.keys]),
        "scope": dump_packed([scope_numbers[scope] for _, _, scope in table.keys]),
        "dtype": dump_packed([dtype_numbers[dtype] for dtype in table.dtypes]),
        "ndim": dump_packed(table.ndim),
        "global_shape": dump_packed(table.extents),
        "storage": dump_packed([STORAGE.index(storage) for storage in table.storages]),
    }


def alias_columns(table: TensorTable) -> dict[str, object]:
    """Return the columns of the tensors' aliases."""
    pairs = [(number, alias) for number, aliases in enumerate(table.aliases) for alias in aliases]
    return {
        "tensor": dump_packed([number for number, _ in pairs]),
        "name": dump_strings([alias for _, alias in pairs]),
    }


def dump_table(table: TensorTable) -> dict[str, Any]:
    """Return a table as columns, including scopes and dtypes, for `parse_table`."""
    scopes = collect_scopes(table)
    dtypes = sorted(set(table.dtypes))
    tensors = tensor_columns(table, scopes, dtypes)
    return {"scopes": scopes, "dtypes": dtypes, "tensors": tensors, "aliases": alias_columns(table)}


def parse_table(
    columns: Columns, *more: str, known: dict[bytes, TensorTable] | None = None
) -> tuple[TensorTable, Columns]:
    """Return the table from the columns of `dump_table`, and the columns of its tensors.

    Args:
        more: names of further columns of the tensors.
        known: see `parse_tensor_table`.

    Raises: the errors of `parse_tensor_table`.
    """
    rows = columns.columns("tensors", (*TENSOR_KEYS, *more))
    aliases = columns.columns("aliases", ("tensor", "name"))
    scopes = check_scopes(columns)
    return parse_tensor_table(rows, aliases, scopes, columns, known=known), rows


#: The members of `dump_table`.
TABLE_KEYS: Final = ("scopes", "dtypes", "tensors", "aliases")
TENSOR_KEYS: Final = ("field", "name", "scope", "dtype", "ndim", "global_shape", "storage")


def parse_tensor_table(
    table: Columns,
    aliases: Columns,
    scopes: list[str],
    dtypes: Columns,
    *,
    known: dict[bytes, TensorTable] | None = None,
) -> TensorTable:
    """Return a table of tensors and their aliases.

    Args:
        table: columns of the tensors.
        aliases: columns of the aliases.
        scopes: scopes of the document.
        dtypes: the document, for its member `dtypes`.
        known: a cache of the tables of other documents, to which new tables are added. The writers
            of a launch usually have one table, which is then parsed once, and is one object.

    Raises: FormatError(COLUMN_FORM, COLUMN_ORDER, LIMIT_EXCEEDED).
    Spec: REQ-IDX-002, REQ-IDX-003, REQ-IDX-007.
    """
    if known is None:
        return _parse_tensor_table(table, aliases, scopes, dtypes)
    columns = (
        aliases.any("tensor"), aliases.any("name"), *(table.any(key) for key in TENSOR_KEYS)
    )  # fmt: skip
    # Only the scopes of tensors: each writer of a launch has RNG streams in a scope of its own.
    numbers = np.unique(parse_packed(table.any("scope"), table.place("scope"))).tolist()
    own = [(number, scope) for number, scope in enumerate(scopes) if number in numbers]
    same = dump_mapless([own, len(own) == len(numbers), dtypes.any("dtypes"), columns])
    found = known.get(same)
    if found is None:
        found = known[same] = _parse_tensor_table(table, aliases, scopes, dtypes)
    else:
        row_count = len(found.keys) + sum(map(len, found.aliases))
        table.take("name", rows=row_count, extents=len(found.extents))
    return found


def _parse_tensor_table(
    table: Columns, aliases: Columns, scopes: list[str], dtypes: Columns
) -> TensorTable:
    known = _parse_dtypes(dtypes)
    names = table.strings("name")
    count = len(names)
    if count > limits.TENSORS:
        detail = f"{count} tensors, and there may be {limits.TENSORS}"
        raise err(Code.LIMIT_EXCEEDED, detail, where=table.place("name"), requirement="REQ-LIM-001")
    fields = table.packed("field", count=count, below=len(FIELDS)).tolist()
    scope = table.packed("scope", count=count, below=len(scopes)).tolist()
    dtype = table.packed("dtype", count=count, below=len(known)).tolist()
    ndim = table.packed("ndim", count=count, below=limits.NDIM + 1)
    table.take("ndim", extents=int(ndim.sum()))
    extents = table.packed("global_shape", count=int(ndim.sum()), below=limits.DIM + 1)
    storage = table.packed("storage", count=count, below=len(STORAGE)).tolist()
    numbers = iter(extents.tolist())
    shapes = tuple(tuple(itertools.islice(numbers, rank)) for rank in ndim.tolist())
    for shape in shapes:
        if math.prod(filter(None, shape)) > limits.ELEMENTS:
            raise table.broken("global_shape", f"{shape} has too many elements")
    rows = zip(fields, names.tolist(), scope, strict=True)
    keys = tuple((FIELDS[field], name, scopes[number]) for field, name, number in rows)
    table.check_increasing("name", [sort_key(key) for key in keys])
    if len(set(dtype)) != len(known):
        raise dtypes.unsorted("dtypes", "dtypes are there that no tensor has", "REQ-IDX-007")
    return TensorTable(
        keys=keys,
        dtypes=tuple(known[number] for number in dtype),
        global_shapes=shapes,
        storages=tuple(STORAGE[number] for number in storage),
        aliases=_parse_aliases(aliases, count),
        ndim=ndim,
        extents=extents,
        element_nbytes=make_integers(DTYPES[known[number]].nbytes for number in dtype),
        scope_numbers=frozenset(scope),
    )


def stream_columns(streams: Sequence[Any], scopes: list[str]) -> dict[str, object]:
    """Return the common columns of RNG streams in index and parts."""
    return {
        "name": dump_strings([stream.name for stream in streams]),
        "scope": dump_packed(_number_scopes(streams, scopes)),
        "kind": dump_strings([stream.kind for stream in streams]),
    }


def _number_scopes(rows: Sequence[Any], scopes: list[str]) -> list[int]:
    """Return the number of each row's scope. There may be as many scopes as processes."""
    numbers = {scope: number for number, scope in enumerate(scopes)}
    return [numbers[row.scope] for row in rows]


def parse_stream_rows(table: Columns, scopes: list[str]) -> list[dict[str, str]]:
    """Return name, scope and kind of each row, as members.

    Raises: FormatError(COLUMN_FORM, COLUMN_ORDER).
    """
    names = table.strings("name").tolist()
    scope = table.packed("scope", count=len(names), below=len(scopes)).tolist()
    kinds = table.strings("kind", count=len(names)).tolist()
    columns = zip(names, scope, kinds, strict=True)
    rows = [{"name": name, "scope": scopes[number], "kind": kind} for name, number, kind in columns]
    table.check_increasing("name", [(row["name"].encode(), row["scope"].encode()) for row in rows])
    return rows


def leaf_columns(leaves: Sequence[Any], scopes: list[str]) -> dict[str, object]:
    """Return the common columns of plain values in index and parts."""
    return {
        "field": dump_packed([FIELDS.index(leaf.field) for leaf in leaves]),
        "name": dump_strings([leaf.name for leaf in leaves]),
        "scope": dump_packed(_number_scopes(leaves, scopes)),
    }


def parse_leaf_rows(table: Columns, scopes: list[str]) -> list[dict[str, str]]:
    """Return field, name and scope of each row, as members.

    Raises: FormatError(COLUMN_FORM, COLUMN_ORDER).
    """
    names = table.strings("name").tolist()
    fields = table.packed("field", count=len(names), below=len(FIELDS)).tolist()
    scope = table.packed("scope", count=len(names), below=len(scopes)).tolist()
    keys = [(FIELDS[f], name, scopes[s]) for f, name, s in zip(fields, names, scope, strict=True)]
    table.check_increasing("name", [sort_key(key) for key in keys])
    return [{"field": field, "name": name, "scope": at} for field, name, at in keys]


def _parse_aliases(columns: Columns, tensor_count: int) -> tuple[tuple[str, ...], ...]:
    """Return the aliases of each tensor."""
    names = columns.strings("name").tolist()
    owners = columns.packed("tensor", count=len(names), below=tensor_count).tolist()
    columns.check_increasing(
        "name", [(owner, name.encode()) for owner, name in zip(owners, names, strict=True)]
    )
    aliases: list[list[str]] = [[] for _ in range(tensor_count)] if names else []
    for owner, name in zip(owners, names, strict=True):
        aliases[owner].append(name)
    return tuple(map(tuple, aliases)) if names else ((),) * tensor_count


def collect_scopes(table: TensorTable, *others: Sequence[Any]) -> list[str]:
    """Return the scopes of tensors and of rows of other tables, sorted."""
    return sorted(
        {scope for _, _, scope in table.keys} | {row.scope for rows in others for row in rows}
    )


def check_scopes(columns: Columns) -> list[str]:
    """Return the scopes of a document.

    Raises: FormatError(SCOPE_FORM, COLUMN_ORDER). Spec: REQ-IDX-006.
    """
    scopes = columns.texts("scopes")
    columns.check_increasing("scopes", scopes)
    for scope in scopes:
        if not _SCOPE.fullmatch(scope):
            raise err(
                Code.SCOPE_FORM,
                f"{scope[:64]!r}",
                where=columns.place("scopes"),
                requirement="REQ-IDX-006",
            )
    return scopes


def check_scopes_used(columns: Columns, table: TensorTable, rows: Iterable[Any]) -> None:
    """Raise unless every scope of a document is used.

    Raises: FormatError(COLUMN_ORDER). Spec: REQ-IDX-007.
    """
    scopes = columns.any("scopes")
    if len(table.scope_numbers) != len(scopes):
        used = {scopes[number] for number in table.scope_numbers} | {row.scope for row in rows}
        if len(used) != len(scopes):
            raise columns.unsorted("scopes", "scopes are there that nothing has", "REQ-IDX-007")


def _parse_dtypes(columns: Columns) -> list[str]:
    """Return the dtypes of a document.

    Raises: FormatError(COLUMN_FORM, COLUMN_ORDER). Spec: REQ-TEN-003.
    """
    dtypes = columns.texts("dtypes")
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
    hexadecimal = {"nonce": 32, "attempt": 16} | (
        {"run_id": 32} if values["run_id"] is not None else {}
    )
    for key, digits in hexadecimal.items():
        if not isinstance(values[key], str) or not re.fullmatch(
            f"[0-9a-f]{{{digits}}}", values[key]
        ):
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
    check_membership(values["run_id"], values["launch"], columns.place("launch"))
    return Origin(**values)


def parse_absent(columns: Columns) -> dict[str, str]:
    """Return the absent fields and their reasons.

    Raises: FormatError(MANIFEST_FIELDS). Spec: REQ-MAN-003.
    """
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
    """Return whether a field's name and reason fit a manifest. Spec: REQ-MAN-003, REQ-PRT-009."""
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
