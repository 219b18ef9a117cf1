"""The merge of tensors, box by box and object by object: slow, plain, and what the one by columns is held against."""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np

from ckptfmt.digest import DIGEST_NBYTES
from ckptfmt.documents.index import IndexTensor
from ckptfmt.documents.sharding import Sharding
from ckptfmt.documents.tables import TensorKey, sort_key
from ckptfmt.errors import Code, err
from ckptfmt.layout.tiling import check_tiling
from tests.part_rows import RowBox, RowTensor, rows_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptfmt.box import Box
    from ckptfmt.documents.part import Part

#: Who holds a piece: (writer, what its part says of the piece).
_Holders = list[tuple[int, "RowBox"]]


def merge_tensors(parts: Sequence[Part], block_nbytes: int) -> tuple[IndexTensor, ...]:
    """The tensors of an index, tiling checked; parts in writer order."""
    held = sorted(_by_key(parts).items(), key=lambda item: sort_key(item[0]))
    for key, holders in held:
        _check_alike(key, holders)
    tensors = tuple(_merge_tensor(key, holders, block_nbytes) for key, holders in held)
    for tensor in tensors:
        rows = (len(tensor.sharding), len(tensor.global_shape))
        begin = np.array([box.begin for box, _ in tensor.sharding], dtype=np.int64).reshape(rows)
        box_shape = np.array([box.shape for box, _ in tensor.sharding], dtype=np.int64).reshape(
            rows
        )
        check_tiling(tensor.global_shape, begin, box_shape, where=_title(tensor.key))
    return tensors


def _by_key(parts: Sequence[Part]) -> dict[TensorKey, list[tuple[int, RowTensor]]]:
    held: dict[TensorKey, list[tuple[int, RowTensor]]] = defaultdict(list)
    for part in parts:
        for tensor in rows_of(part.holdings):
            held[tensor.key].append((part.writer, tensor))
    return held


def _check_alike(key: TensorKey, holders: list[tuple[int, RowTensor]]) -> None:
    first_writer, first = holders[0]
    for writer, tensor in holders[1:]:
        for what in ("dtype", "global_shape", "storage"):
            if getattr(tensor, what) != getattr(first, what):
                raise err(
                    Code.TENSOR_DIVERGED,
                    f"{what} is {getattr(first, what)} on writer {first_writer}, "
                    f"{getattr(tensor, what)} on writer {writer}",
                    where=_title(key),
                    requirement="REQ-CMT-011",
                )


def _merge_tensor(
    key: TensorKey, holders: list[tuple[int, RowTensor]], block_nbytes: int
) -> IndexTensor:
    _, first = holders[0]
    pieces: dict[Box, _Holders] = defaultdict(list)
    for writer, tensor in holders:
        for held in tensor.boxes:
            if held.box.element_count or 0 in first.global_shape:
                if pieces[held.box] and pieces[held.box][-1][0] == writer:
                    raise err(
                        Code.TILING_OVERLAP,
                        f"writer {writer} lists {held.box} twice",
                        where=_title(key),
                        requirement="REQ-PRT-011",
                    )
                pieces[held.box].append((writer, held))
    return IndexTensor(
        field=first.field,
        name=first.name,
        scope=first.scope,
        dtype=first.dtype,
        global_shape=first.global_shape,
        storage=first.storage,
        aliases=tuple(
            sorted({alias for _, tensor in holders for alias in tensor.aliases}, key=str.encode)
        ),
        sharding=Sharding.of(
            [(box, _merge_piece(key, pieces[box], block_nbytes)) for box in sorted(pieces)]
        ),
    )


def _merge_piece(key: TensorKey, holders: _Holders, block_nbytes: int) -> int:
    """Return the writer whose copy of a piece counts, after comparing all copies that have digests."""
    declared = all(held.replica for _, held in holders)
    known = [(writer, held) for writer, held in holders if held.digests]
    if len(holders) > 1 and not declared and len(known) not in (0, len(holders)):
        silent = next(writer for writer, held in holders if not held.digests)
        raise err(
            Code.REPLICA_DIVERGED,
            (
                f"writer {silent} gives no digest of what it holds, and not every holder says"
                " that it"
                " is a replica"
            ),
            where=_title(key),
            requirement="REQ-CMT-012",
        )
    for writer, held in known[1:]:
        _check_same_digests(key, known[0], (writer, held), block_nbytes)
    for writer, held in holders:
        if held.extents:
            return writer
    raise err(
        Code.HELD_NOT_WRITTEN,
        (
            f"writers {', '.join(str(writer) for writer, _ in holders[:8])} hold"
            f" {holders[0][1].box};"
            " none wrote it"
        ),
        where=_title(key),
        requirement="REQ-CMT-013",
    )


def _check_same_digests(
    key: TensorKey, one: tuple[int, RowBox], other: tuple[int, RowBox], block_nbytes: int
) -> None:
    if one[1].digests == other[1].digests:
        return
    pairs = itertools.zip_longest(_split(one[1].digests), _split(other[1].digests))
    block = next(number for number, (a, b) in enumerate(pairs) if a != b)
    raise err(
        Code.REPLICA_DIVERGED,
        f"block {block} (from byte {block * block_nbytes}) of {one[1].box} differs between"
        f" writers {one[0]} and"
        f" {other[0]}",
        where=_title(key),
        requirement="REQ-CMT-012",
    )


def _split(digests: bytes) -> list[bytes]:
    return [
        digests[begin : begin + DIGEST_NBYTES] for begin in range(0, len(digests), DIGEST_NBYTES)
    ]


def _title(key: TensorKey) -> str:
    field, name, scope = key
    return f"{field} {name!r}" + ("" if scope == "global" else f" ({scope})")
