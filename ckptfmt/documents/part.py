"""A part: a writer's contribution to an attempt. Spec: REQ-PRT-001 to REQ-PRT-010."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from ckptfmt import limits
from ckptfmt.digest import digest_at, digest_bytes
from ckptfmt.documents import extents, tables
from ckptfmt.documents.canonical import (
    check_version,
    dump_document,
    fit_string,
    head_of,
    parse_document,
)
from ckptfmt.documents.durability import HOME, durability_members, parse_durability
from ckptfmt.documents.extents import Files, PredictionGroup
from ckptfmt.documents.frozen_tensors import has_frozen_leaves
from ckptfmt.documents.holdings import Holdings, parse_holdings
from ckptfmt.documents.labels import NO_LABELS, Labels, parse_labels
from ckptfmt.documents.manifest import Origin, Reference, failure_path
from ckptfmt.documents.msgpk import (
    Weight,
    count_items,
    dump_packed_document,
    parse_packed_document,
)
from ckptfmt.documents.packed import Columns, RowBudget, dump_packed, dump_strings, total_of
from ckptfmt.documents.tables import TensorTable
from ckptfmt.documents.tree import repack_tree
from ckptfmt.documents.versions import UNPACKED, known_members, pack_header
from ckptfmt.errors import CkptError, Code, FormatError, err
from ckptfmt.features import CACHES, FROZEN, LABELS, OF_ANY_PROFILE, SUSPECT, is_of_delta

#: The kinds of files, each with the suffix of the names.
FILE_KINDS: Final = {"safetensors": ".safetensors", "pack": ".pack"}

#: The first bytes of a pack: a name for people and for tools that guess kinds of files.
PACK_HEADER: Final = pack_header()

#: Longest text of a failure record in characters, equal to the longest reason.
_TEXT_LENGTH: Final = 1000
_FILE_NAME: Final = re.compile(
    r"[a-z][a-z_]{0,40}-([0-9a-f]{16})-([0-9]{5,9})(\.safetensors|\.pack)"
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PartFile:
    """A file of a part: kind, size in bytes, size and digest of the header."""

    name: str
    kind: str
    nbytes: int
    header_nbytes: int
    header_digest: bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RngStream:
    """An RNG stream: logical name, scope, generator kind, state as a tree."""

    name: str
    scope: str
    kind: str
    state: bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """A plain value, as a tree."""

    field: str
    name: str
    scope: str
    value: bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Part:
    """A writer's contribution to an attempt.

    Attributes:
        origin: the common members of the attempt's documents.
        writer: number of the writer.
        saved_unix_s: time of the writer's snapshot by its own clock, in seconds since 1970;
            information only.
        files: the writer's files.
        holdings: the tensors of which the writer holds pieces, written or not.
        streams: the writer's RNG streams.
        leaves: the writer's plain values.
        absent: fields for which the writer has no state, each with a reason.
        references: all direct and indirect bases of the part; empty for a full checkpoint.
        groups: groups of boxes with blocks predicted from each other's blocks.
        labels: metrics and tags of the checkpoint, and the reason if suspect; for writer 0 only.
        durability: weakest durability of the files once the part is at home: "home", "peers" or
            "node".
    """

    origin: Origin
    writer: int
    saved_unix_s: int
    files: tuple[PartFile, ...]
    holdings: Holdings
    streams: tuple[RngStream, ...]
    leaves: tuple[Leaf, ...]
    absent: dict[str, str]
    references: tuple[Reference, ...] = ()
    groups: tuple[PredictionGroup, ...] = ()
    labels: Labels = NO_LABELS
    durability: str = HOME

    def dump(self) -> tuple[bytes, bytes]:
        """Return the bytes of the part's file, and the digest."""
        return dump_packed_document(self._signed(), self._weigh())

    def _weigh(self) -> Weight:
        held = self.holdings
        rows = (
            len(held.box_count)
            + len(held.replica)
            + len(held.extents.box)
            + sum(map(len, held.table.aliases))
        )
        return Weight(
            rows=rows + len(self.files) + len(self.groups) + len(self.streams) + len(self.leaves),
            extents=len(held.table.extents) + len(held.begin),
            tree_nbytes=_tree_nbytes(self.streams, self.leaves, self.groups),
        )

    @property
    def features(self) -> list[str]:
        """The part's reader features."""
        needed = extents.delta_features(self.holdings.encodings(), self.groups, self.references)
        if self.durability != HOME:
            needed = [*needed, CACHES]
        if has_frozen_leaves(self.leaves):
            needed = [*needed, FROZEN]
        return sorted([*needed, *self.labels.features])

    def _signed(self) -> dict[str, Any]:
        held = self.holdings
        scopes = tables.collect_scopes(held.table, self.streams, self.leaves)
        dtypes = sorted(set(held.table.dtypes))
        features = self.features
        encodings = held.encodings()
        is_delta = is_of_delta(features)
        header_nbytes = [file.header_nbytes for file in self.files]
        return {
            **tables.document_head(
                "part", self.origin, saved_unix_s=self.saved_unix_s, scopes=scopes, dtypes=dtypes
            ),
            "features": {"reader": features, "writer": []},
            "writer": self.writer,
            "references": extents.dump_references(self.references),
            "encodings": list(encodings),
            "files": self._file_columns(),
            "tensors": {
                **tables.tensor_columns(held.table, scopes, dtypes),
                "box_count": dump_packed(held.box_count),
            },
            "aliases": tables.alias_columns(held.table),
            **held.box_columns(
                self.origin.block_nbytes, header_nbytes, encodings, is_delta=is_delta
            ),
            **({"groups": extents.dump_groups(self.groups)} if is_delta else {}),
            **self.labels.featured_members(),
            **durability_members(self.durability),
            "streams": {
                **tables.stream_columns(self.streams, scopes),
                "state": [stream.state for stream in self.streams],
            },
            "leaves": {
                **tables.leaf_columns(self.leaves, scopes),
                "value": [leaf.value for leaf in self.leaves],
            },
            "absent": dict(self.absent),
        }

    def _file_columns(self) -> dict[str, object]:
        return {
            "name": dump_strings([file.name for file in self.files]),
            "kind": dump_strings([file.kind for file in self.files]),
            "nbytes": dump_packed([file.nbytes for file in self.files]),
            "header_nbytes": dump_packed([file.header_nbytes for file in self.files]),
            "header_digest": b"".join(file.header_digest for file in self.files),
        }

    @classmethod
    def parse(
        cls,
        content: bytes,
        *,
        where: str,
        digest: bytes | None = None,
        known: dict[bytes, TensorTable] | None = None,
    ) -> tuple[Part, bytes]:
        """Return the part of a file, and the part's digest.

        Args:
            where: name of the file, for messages.
            digest: the expected digest from another document; None to skip the check.
            known: a cache of tensor tables from other parts, to which new tables are added. Most
                parts share one table, which is then parsed once.

        Raises: FormatError, IntegrityError(DOC_DIGEST), UnsupportedError.
        Spec: REQ-PRT-001 to REQ-PRT-010.
        """
        signed, actual, stored_nbytes = parse_packed_document(content, where=where, digest=digest)
        part = _parse_part(
            signed, where, {} if known is None else known, Weight.most(stored_nbytes)
        )
        return part, actual


def dump_failure(origin: Origin, writer: int, error: CkptError) -> bytes:
    """Return a failure record: a writer's error for the rest of the writers.

    Spec: REQ-CMT-004.
    """
    return dump_document(
        {
            **head_of("failure"),
            "attempt": origin.attempt,
            "writer": writer,
            "code": str(error.code),
            "detail": fit_string(error.detail, _TEXT_LENGTH),
            "where": None if error.where is None else fit_string(error.where, _TEXT_LENGTH),
            "requirement": error.requirement,
            "remedy": fit_string(error.remedy, _TEXT_LENGTH),
        }
    )


def parse_failure(content: bytes, *, where: str) -> dict[str, Any]:
    """Return the members of a failure record.

    Args:
        where: the record's path in the checkpoint's directory.

    Raises: FormatError (DOC_MISMATCH for a record of another attempt or writer), IntegrityError,
        UnsupportedError.
    Spec: REQ-CMT-050.
    """
    signed, _ = parse_document(content, where=where, types=("failure",))
    if failure_path(signed["attempt"], signed["writer"]) != where:
        detail = f"the record is that of writer {signed['writer']} of attempt {signed['attempt']}"
        raise err(Code.DOC_MISMATCH, detail, where=where, requirement="REQ-CMT-050")
    return signed


# --- parse ----------------------------------------------------------------------------------------

_PART_KEYS: Final = (
    "type", "format_version", "features", *tables.ORIGIN_KEYS, "writer", "saved_unix_s",
    "references", "encodings", "scopes", "dtypes", "files", "tensors", "aliases", "boxes",
    "extents", "digests", "streams", "leaves", "absent",
)  # fmt: skip
_DELTA_KEYS: Final = (*_PART_KEYS, "stored", "groups")


def _parse_part(
    signed: dict[str, Any], where: str, known: dict[bytes, TensorTable], most: Weight
) -> Part:
    check_version(signed, where)
    version = signed["format_version"]
    features = signed["features"]["reader"]
    is_delta = is_of_delta(features)
    behind = {LABELS: ("metrics", "tags"), CACHES: ("durability",), SUSPECT: ("suspect",)}
    added = (key for feature, keys in behind.items() if feature in features for key in keys)
    keys = (*(_DELTA_KEYS if is_delta else _PART_KEYS), *added)
    columns = Columns(known_members(signed, keys), keys, where, budget=RowBudget(most))
    if columns.any("type") != "part":
        raise err(
            Code.DOC_SCHEMA, "not a part", where=columns.place("type"), requirement="REQ-DOC-011"
        )
    if not is_delta and (columns.any("references"), columns.any("encodings")) != ([], ["raw"]):
        raise err(
            Code.PROFILE_MISMATCH,
            "a full checkpoint has no references, and raw blocks only",
            where=where,
            requirement="REQ-MAN-005",
        )
    origin = tables.parse_origin(columns)
    saved_unix_s = tables.parse_counter(columns, "saved_unix_s")
    writer = tables.parse_counter(columns, "writer", below=origin.writer_count)
    if features != sorted(features):
        detail = "the features aren't sorted"
        raise err(
            Code.DOC_SCHEMA, detail, where=columns.place("features"), requirement="REQ-DEL-001"
        )
    labels = parse_labels(signed, features, where)
    if labels and writer != 0:
        detail = "metrics, tags and suspect are those of writer 0"
        place = columns.place("suspect" if labels.suspect else "metrics")
        raise err(Code.DOC_SCHEMA, detail, where=place, requirement="REQ-PRT-014")
    durability = parse_durability(signed, features, origin.run_id, where)
    scopes = tables.check_scopes(columns)
    files = _parse_files(columns, origin, writer, pack_header(version) if is_delta else None)
    references = extents.parse_references(columns)
    held = _parse_holdings(
        columns, origin, scopes, files, known, reference_count=len(references) if is_delta else None
    )
    groups = _parse_groups(columns, held, len(references)) if is_delta else ()
    streams = _parse_streams(columns.columns("streams", ("name", "scope", "kind", "state")), scopes)
    leaves = _parse_leaves(columns.columns("leaves", ("field", "name", "scope", "value")), scopes)
    if version == UNPACKED:
        streams, leaves = _repack(streams, leaves)
    if has_frozen_leaves(leaves) != (FROZEN in features):
        detail = f"{FROZEN!r} is listed exactly if there are references to a frozen base"
        raise err(
            Code.DOC_SCHEMA, detail, where=columns.place("features"), requirement="REQ-FRZ-001"
        )
    tables.check_scopes_used(columns, held.table, (*streams, *leaves))
    tree_nbytes = _tree_nbytes(streams, leaves, groups)
    if tree_nbytes > most.tree_nbytes:
        detail = f"{tree_nbytes} bytes of trees, where {most.tree_nbytes} go with the stored bytes"
        raise err(Code.LIMIT_EXCEEDED, detail, where=where, requirement="REQ-DOC-030")
    _check_tree_items(_list_trees(streams, leaves, groups), where)
    return Part(
        origin=origin,
        writer=writer,
        saved_unix_s=saved_unix_s,
        files=files,
        holdings=held,
        streams=streams,
        leaves=leaves,
        absent=tables.parse_absent(columns),
        references=references,
        groups=groups,
        labels=labels,
        durability=durability,
    )


def _repack(
    streams: Sequence[RngStream], leaves: Sequence[Leaf]
) -> tuple[tuple[RngStream, ...], tuple[Leaf, ...]]:
    """Return streams and leaves of format 0.9 with the trees of format 1.0."""
    return (
        tuple(dataclasses.replace(one, state=repack_tree(one.state)) for one in streams),
        tuple(dataclasses.replace(one, value=repack_tree(one.value)) for one in leaves),
    )


def _tree_nbytes(
    streams: Sequence[RngStream], leaves: Sequence[Leaf], groups: Sequence[PredictionGroup]
) -> int:
    """Return the size of all trees of a part in bytes."""
    return sum(map(len, _list_trees(streams, leaves, groups)))


def _list_trees(
    streams: Sequence[RngStream], leaves: Sequence[Leaf], groups: Sequence[PredictionGroup]
) -> list[bytes]:
    return [
        *(stream.state for stream in streams),
        *(leaf.value for leaf in leaves),
        *(group.rule for group in groups),
    ]


def _check_tree_items(trees: Sequence[bytes], where: str) -> None:
    """Raise LIMIT_EXCEEDED if trees together have more values than allowed.

    Spec: REQ-DOC-030.
    """
    if sum(map(len, trees)) <= limits.TREES_ITEMS:  # a value takes a byte at least
        return
    left = limits.TREES_ITEMS
    for content in trees:
        try:
            left -= count_items(content, where=where, limit_items=left)
        except FormatError as error:
            if error.code != Code.LIMIT_EXCEEDED:
                continue  # what is wrong with this tree is said where the tree is read
            detail = f"more than {limits.TREES_ITEMS} values in all trees together"
            raise err(error.code, detail, where=where, requirement="REQ-DOC-030") from None


def _parse_groups(
    columns: Columns, held: Holdings, reference_count: int
) -> tuple[PredictionGroup, ...]:
    """Return the groups. Raise unless the features fit groups, encodings and references.

    Spec: REQ-DEL-001.
    """
    table = columns.columns("groups", extents.GROUP_KEYS)
    groups = extents.parse_groups(
        table,
        box_nbytes=held.box_nbytes(),
        element_nbytes=held.table.element_nbytes[held.owner],
        references=reference_count,
    )
    _check_predicted(table, held, groups)
    features = [
        feature for feature in columns.any("features")["reader"] if feature not in OF_ANY_PROFILE
    ]
    needed = extents.delta_features(held.encodings(), groups, range(reference_count))
    if features != needed:
        raise err(
            Code.DOC_SCHEMA,
            f"features {', '.join(features)}, where {', '.join(needed)} are needed",
            where=columns.place("features"),
            requirement="REQ-DEL-001",
        )
    return tuple(groups)


def _check_predicted(table: Columns, held: Holdings, groups: Sequence[PredictionGroup]) -> None:
    """Raise unless each prediction has a base. Spec: REQ-DEL-006, REQ-DEL-009, REQ-DEL-010."""
    members = [box for group in groups for box in group.boxes]
    predicted = held.extents.box[held.extents.predicted]
    if np.setdiff1d(predicted, members).size:
        raise table.broken("box", "the box of a predicted block is in no group", "REQ-DEL-006")
    if not held.written[members].all():
        raise table.broken("box", "a box that another writer stores is in a group", "REQ-DEL-009")
    if any((group.kind == "cast") != (group.reference is None) for group in groups):
        raise table.broken(
            "reference", "a group without the base that it needs, or with one", "REQ-DEL-010"
        )
    masters = [group.boxes[0] for group in groups if group.kind == "cast"]
    if np.isin(predicted, masters).any():
        raise table.broken("box", "the master of a group is predicted from nothing", "REQ-DEL-006")


def _parse_files(
    columns: Columns, origin: Origin, writer: int, header: bytes | None
) -> tuple[PartFile, ...]:
    """Return the files of a part. `header` is the header of packs; None for a full part."""
    table = columns.columns("files", _FILE_KEYS)
    names = table.strings("name").tolist()
    table.check_increasing("name", names)
    for name in names:
        found = _FILE_NAME.fullmatch(name)
        if not found or found[1] != origin.attempt or found[2] != f"{writer:05d}":
            raise err(
                Code.UNSAFE_PATH,
                f"{name[:64]!r} isn't a file name of this part",
                where=table.place("name"),
                requirement="REQ-CKP-001",
            )
    kinds = table.strings("kind", count=len(names)).tolist()
    known = ("safetensors",) if header is None else FILE_KINDS
    if any(
        kind not in known or not name.endswith(FILE_KINDS[kind])
        for kind, name in zip(kinds, names, strict=True)
    ):
        raise table.broken("kind", "unknown file kind, or a name of another", "REQ-PRT-003")
    nbytes = table.packed("nbytes", count=len(names)).tolist()
    header_nbytes = table.packed(
        "header_nbytes", count=len(names), below=8 + limits.SHARD_HEADER_NBYTES + 1
    ).tolist()
    joined = table.digests("header_digest", count=len(names))
    digests = [digest_at(joined, number) for number in range(len(names))]
    pack = (len(header or b""), digest_bytes(header or b""))
    for kind, *pair in zip(kinds, header_nbytes, digests, strict=True):
        if kind == "pack" and tuple(pair) != pack:
            raise table.broken("header_digest", "a pack begins with another header", "REQ-DEL-012")
    return tuple(
        PartFile(name=name, kind=kind, nbytes=total, header_nbytes=header, header_digest=digest)
        for name, kind, total, header, digest in zip(
            names, kinds, nbytes, header_nbytes, digests, strict=True
        )
    )


_FILE_KEYS: Final = ("name", "kind", "nbytes", "header_nbytes", "header_digest")


def _parse_holdings(
    columns: Columns,
    origin: Origin,
    scopes: list[str],
    files: tuple[PartFile, ...],
    known: dict[bytes, TensorTable],
    *,
    reference_count: int | None,
) -> Holdings:
    rows = columns.columns("tensors", (*tables.TENSOR_KEYS, "box_count"))
    aliases = columns.columns("aliases", ("tensor", "name"))
    table = tables.parse_tensor_table(rows, aliases, scopes, columns, known=known)
    counts = rows.packed("box_count", count=len(table.keys), below=limits.BOXES + 1)
    box_count = total_of(counts)
    if box_count > limits.BOXES:
        raise err(
            Code.LIMIT_EXCEEDED,
            f"{box_count} boxes",
            where=rows.place("box_count"),
            requirement="REQ-LIM-001",
        )
    rows.take("box_count", rows=box_count, extents=int((table.ndim * counts).sum()))
    return parse_holdings(
        columns,
        table,
        box_count=counts,
        block_nbytes=origin.block_nbytes,
        files=Files(
            nbytes=np.array([file.nbytes for file in files], np.int64),
            header_nbytes=np.array([file.header_nbytes for file in files], np.int64),
            is_pack=np.array([file.kind == "pack" for file in files], np.bool_),
            table=columns.columns("files", _FILE_KEYS),
        ),
        encodings=extents.parse_encodings(columns),
        reference_count=reference_count,
    )


def _parse_streams(table: Columns, scopes: list[str]) -> tuple[RngStream, ...]:
    rows = tables.parse_stream_rows(table, scopes)
    states = table.blobs("state", count=len(rows))
    return tuple(RngStream(**row, state=state) for row, state in zip(rows, states, strict=True))


def _parse_leaves(table: Columns, scopes: list[str]) -> tuple[Leaf, ...]:
    rows = tables.parse_leaf_rows(table, scopes)
    values = table.blobs("value", count=len(rows))
    return tuple(Leaf(**row, value=value) for row, value in zip(rows, values, strict=True))
