"""A part and the files of its writer, derived from a plan; spec/40, spec/45 and spec/50."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from blake3 import blake3

from conformance.generate.plans import DTYPES, Group, Piece, Plan, Stored, Tensor, box_bytes
from conformance.generate.tables import (
    alias_rows,
    base_document,
    leaf_rows,
    scopes_of,
    stream_rows,
    tensor_rows,
)
from conformance.generate.wire import FORMAT_VERSION, Folded, Packed, Strings, msgpack

__all__ = ["ENCODINGS", "PACK_HEADER", "Files", "part_of", "shard_header", "stored_nbytes"]

Files = dict[str, bytes]

#: The registry, in its order; spec/delta/45-deltas.md.
ENCODINGS = ("raw", "same", "planes", "xor", "difference", "sparse", "classes", "gradient")
PACK_HEADER = f"ckptfmt pack {FORMAT_VERSION}\n".encode().ljust(64, b"\0")


@dataclass(slots=True, kw_only=True)
class _Extent:
    """Some blocks of a box, with their stored bytes."""

    box: int
    tensor: Tensor
    piece: Piece
    stored: Stored
    first: int
    count: int
    content: bytes
    file: str = ""
    begin: int = 0
    key: str = ""


def _blocks(content: bytes, block_nbytes: int) -> list[bytes]:
    return [content[at : at + block_nbytes] for at in range(0, len(content), block_nbytes)]


def part_of(plan: Plan, writer: int) -> tuple[dict[str, Any], Files]:
    """Return the signed content of a writer's part, and the files of the writer."""
    known = (one for one in plan.tensors if any(piece.writer == writer for piece in one.pieces))
    held = sorted(known, key=lambda one: one.order)
    leaves = sorted(
        (one for one in plan.leaves if writer in one.writers), key=lambda one: one.order
    )
    streams = sorted(
        (one for one in plan.streams if writer in one.writers), key=lambda one: one.order
    )
    scopes = scopes_of(held, leaves, streams)
    dtypes = sorted({one.dtype for one in held})
    boxes = [(one, piece) for one in held for piece in _pieces(one, writer)]
    extents = [
        extent
        for row, (one, piece) in enumerate(boxes)
        for extent in _extents_of(plan, row, one, piece)
    ]
    groups = [group for group in plan.groups if group.writer == writer]
    names, files = _lay_out(plan, writer, extents)
    extents.sort(
        key=lambda one: (
            not one.file,
            one.file,
            one.begin,
            len(one.content) > 0,
            one.box,
            one.first,
        )
    )
    references = _references(plan, extents, groups)
    features = _features(references, extents, groups)
    part = {
        **base_document("part", plan),
        "features": {"reader": features, "writer": []},
        "writer": writer,
        "scopes": scopes,
        "dtypes": dtypes,
        "references": references,
        "encodings": [
            name for name in ENCODINGS if any(one.stored.encoding == name for one in extents)
        ]
        or ["raw"],
        "files": _file_table(names, files),
        "tensors": {
            **tensor_rows(held, scopes, dtypes),
            "box_count": Packed(len(_pieces(one, writer)) for one in held),
        },
        "aliases": alias_rows(held),
        "boxes": _box_table(plan, boxes),
        "digests": b"".join(_digests(plan, one, piece) for one, piece in boxes),
        "streams": {
            **stream_rows(streams, scopes),
            "state": [msgpack(one.state) for one in streams],
        },
        "leaves": {**leaf_rows(leaves, scopes), "value": [msgpack(one.value) for one in leaves]},
        "absent": plan.reasons(),
    }
    part["extents"] = _extent_table(part, extents, names, is_delta=bool(features))
    if features:
        part["stored"] = _stored_table(extents)
        part["groups"] = _group_table(part, groups, boxes)
    return part, files


def _pieces(tensor: Tensor, writer: int) -> list[Piece]:
    return [piece for piece in tensor.pieces if piece.writer == writer and not piece.ghost]


def _digests(plan: Plan, tensor: Tensor, piece: Piece) -> bytes:
    if not piece.digested:
        return b""
    content = box_bytes(tensor, piece.begin, piece.shape)
    return b"".join(blake3(block).digest() for block in _blocks(content, plan.block_nbytes))


def _extents_of(plan: Plan, row: int, tensor: Tensor, piece: Piece) -> list[_Extent]:
    if not piece.written:
        return []
    blocks = _blocks(box_bytes(tensor, piece.begin, piece.shape), plan.block_nbytes)
    found = []
    for stored in piece.stored or [Stored(encoding="raw", in_pack=False)]:
        count = len(blocks) - stored.first if stored.count is None else stored.count
        raw = b"".join(blocks[stored.first : stored.first + count])
        content = raw if stored.encoding == "raw" else b"".join(stored.blocks)
        found.append(
            _Extent(
                box=row,
                tensor=tensor,
                piece=piece,
                stored=stored,
                first=stored.first,
                count=count,
                content=content,
            )
        )
    return found


def stored_nbytes(plan: Plan, tensor: Tensor) -> int:
    """Return the number of bytes that a checkpoint's files store for a tensor."""
    own = [piece for piece in tensor.pieces if not piece.ghost]
    return sum(len(one.content) for piece in own for one in _extents_of(plan, 0, tensor, piece))


def _file_of(plan: Plan, writer: int, extent: _Extent) -> str:
    if extent.stored.encoding == "same":
        return ""
    tail = (
        "_buffers" if extent.tensor.storage else "" if DTYPES[extent.tensor.dtype][1] else "_opaque"
    )
    is_pack = extent.stored.encoding != "raw" or extent.stored.in_pack
    ending = "pack" if is_pack and extent.piece.stored is not None else "safetensors"
    return f"{extent.tensor.field}{tail}-{plan.attempt}-{writer:05d}.{ending}"


def _lay_out(plan: Plan, writer: int, extents: Sequence[_Extent]) -> tuple[list[str], Files]:
    """Place extents in files, and return the file names in order, and the contents."""
    for extent in extents:
        extent.file = _file_of(plan, writer, extent)
    names = sorted({extent.file for extent in extents} - {""})
    files: Files = {}
    for name in names:
        own = [extent for extent in extents if extent.file == name]
        own.sort(
            key=lambda one: (
                -one.tensor.width,
                len(one.content) >= 1 << 20,
                one.stored.place,
                one.box,
                one.first,
            )
        )
        at = 0
        for extent in own:
            extent.begin = at
            at = at + len(extent.content)
        header = PACK_HEADER if name.endswith(".pack") else shard_header(_entries(own))
        files[name] = header + b"".join(extent.content for extent in own)
    return names, files


def _entries(own: Sequence[_Extent]) -> dict[str, dict[str, Any]]:
    """Return the header entries of a shard's boxes."""
    entries: dict[str, dict[str, Any]] = {}
    for extent in own:
        name = extent.tensor.name
        number = 0
        key = name
        while key in entries or key == "__metadata__":
            number += 1
            key = f"{name}#{number}"
        tag = DTYPES[extent.tensor.dtype][1]
        entries[key] = {
            "dtype": tag or "U8",
            "shape": list(extent.piece.shape) if tag else [len(extent.content)],
            "data_offsets": [extent.begin, extent.begin + len(extent.content)],
        }
        extent.key = "" if key == name else key
    return entries


def shard_header(entries: dict[str, Any], *, metadata: Any = None, pad: bytes = b" ") -> bytes:
    """Return length, JSON text and padding of a shard."""
    value = {"__metadata__": {"format": "pt"} if metadata is None else metadata, **entries}
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()
    text += pad * (-(8 + len(text)) % 64)
    return len(text).to_bytes(8, "little") + text


def _features(
    references: Sequence[Any], extents: Sequence[_Extent], groups: Sequence[Group]
) -> list[str]:
    used = {one.stored.encoding for one in extents}
    names = (used - {"raw", "same"}) | {group.kind for group in groups}
    return sorted({"deltas", *names}) if names or references or "same" in used else []


def _references(
    plan: Plan, extents: Sequence[_Extent], groups: Sequence[Group]
) -> list[dict[str, Any]]:
    """Return the references of a part: all references of the plan if the part reads from any."""
    reads = any(one.stored.reference for one in extents) or any(one.reference for one in groups)
    rows = sorted(plan.references, key=lambda one: one.digest) if reads else []
    return [{"name": one.name, "digest": one.digest} for one in rows]


def _file_table(names: Sequence[str], files: Files) -> dict[str, Any]:
    headers = [
        64 if name.endswith(".pack") else 8 + int.from_bytes(files[name][:8], "little")
        for name in names
    ]
    return {
        "name": Strings(names),
        "kind": Strings(name.rpartition(".")[2] for name in names),
        "nbytes": Packed(len(files[name]) for name in names),
        "header_nbytes": Packed(headers),
        "header_digest": b"".join(
            blake3(files[name][:nbytes]).digest()
            for name, nbytes in zip(names, headers, strict=True)
        ),
    }


def _box_table(plan: Plan, boxes: Sequence[tuple[Tensor, Piece]]) -> dict[str, Any]:
    counts = [
        -(-tensor.width * math.prod(piece.shape) // plan.block_nbytes) for tensor, piece in boxes
    ]
    return {
        "begin": Packed(begin for _, piece in boxes for begin in piece.begin),
        "cut_shape": Packed(
            0 if cut == extent else cut + 1
            for tensor, piece in boxes
            for cut, extent in zip(piece.shape, tensor.shape, strict=True)
        ),
        "replica": Packed(int(piece.replica) for _, piece in boxes),
        "digest_count": Packed(
            count if piece.digested else 0 for count, (_, piece) in zip(counts, boxes, strict=True)
        ),
    }


def _extent_table(
    part: dict[str, Any], rows: Sequence[_Extent], names: Sequence[str], *, is_delta: bool
) -> dict[str, Any]:
    numbers = {name: number for number, name in enumerate([*names, ""])}
    boxes = [-1, *(one.box for one in rows)]
    table: dict[str, Any] = {
        "box": Folded(after - before - 1 for before, after in itertools.pairwise(boxes)),
        "block_begin": Packed(one.first for one in rows),
        "block_count": Packed(one.count for one in rows),
        "file": Packed(numbers[one.file] for one in rows),
        "gap_nbytes": Packed([0] * len(rows)),
        "encoding": Packed(part["encodings"].index(one.stored.encoding) for one in rows),
        "key": Strings(one.key for one in rows),
    }
    if is_delta:
        places = {one["name"]: number for number, one in enumerate(part["references"], 1)}
        table["reference"] = Packed(
            places[one.stored.reference] if one.stored.reference else 0 for one in rows
        )
        table["predicted"] = Packed(int(one.stored.predicted) for one in rows)
    return table


def _stored_table(extents: Sequence[_Extent]) -> dict[str, Any]:
    blocks = [
        block
        for one in extents
        if one.stored.encoding not in ("raw", "same")
        for block in one.stored.blocks
    ]
    return {
        "nbytes": Packed(len(block) for block in blocks),
        "digest": b"".join(blake3(block).digest() for block in blocks),
    }


def _group_table(
    part: dict[str, Any], groups: Sequence[Group], boxes: Sequence[tuple[Tensor, Piece]]
) -> dict[str, Any]:
    rows = {tensor.name: row for row, (tensor, _) in enumerate(boxes)}
    places = {one["name"]: number for number, one in enumerate(part["references"], 1)}
    ordered = sorted(groups, key=lambda group: [rows[name] for name in group.members])
    members = [0, *(rows[name] for group in ordered for name in group.members)]
    return {
        "kind": Strings(group.kind for group in ordered),
        "rule": [msgpack(group.rule) for group in ordered],
        "reference": Packed(places[group.reference] if group.reference else 0 for group in ordered),
        "member_count": Packed(len(group.members) for group in ordered),
        "box": Folded(after - before for before, after in itertools.pairwise(members)),
    }
