"""Write what one writer holds: shards, then the part that describes them. Spec: REQ-CMT-003 to REQ-CMT-005."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from typing import TYPE_CHECKING

from ckptfmt import limits
from ckptfmt.digest import block_digests, digest_bytes
from ckptfmt.documents.manifest import Origin, failure_path, part_path, shard_name
from ckptfmt.documents.part import Extent, Part, PartBox, PartFile, PartTensor, dump_failure
from ckptfmt.documents.shard import ShardEntry, plan_shard
from ckptfmt.documents.tables import TensorKey, block_count, sort_key
from ckptfmt.dtypes import DTYPES
from ckptfmt.engines.commit import create_once
from ckptfmt.errors import CkptError, Code, err

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ckptfmt.box import Box
    from ckptfmt.engines.snapshot import Snapshot, TensorSource
    from ckptfmt.store.protocol import Buffer, Store

__all__ = ["Holding", "check_snapshot", "list_holdings", "write_failure", "write_part"]

#: What identifies a piece among all writers, and its size in bytes.
Holding = tuple[tuple[TensorKey, "Box"], int]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Shard:
    """A file to be written: its name, its header, and where each piece goes."""

    name: str
    header: bytes
    pieces: tuple[tuple[TensorSource, Box, ShardEntry], ...]

    @property
    def nbytes(self) -> int:
        return max((entry.byte_end for _, _, entry in self.pieces), default=len(self.header))


def check_snapshot(snapshot: Snapshot) -> None:
    """Raise if two tensors, streams or leaves of a snapshot have one name, or one that a document can't hold.

    Raises: StateError(STATE_NAME). Spec: REQ-IDX-003, REQ-IDX-008, REQ-LIM-001.
    """
    rows = [_key(source) for source in snapshot.tensors]
    rows += [(source.field, alias, source.scope) for source in snapshot.tensors for alias in source.aliases]
    rows += [("rng", stream.name, stream.scope) for stream in snapshot.streams]
    rows += [(f"leaf of {leaf.field}", leaf.name, leaf.scope) for leaf in snapshot.leaves]
    seen = set()
    for row in rows:
        if row in seen:
            raise err(Code.STATE_NAME, f"{row[0]} has {row[1]!r} twice", where=row[1], requirement="REQ-IDX-003")
        if len(row[1].encode(errors="replace")) > limits.NAME_NBYTES or not _is_text(row[1]):
            raise err(
                Code.STATE_NAME,
                f"{row[0]} has a name that is too long, or isn't Unicode text",
                where=ascii(row[1][:64]),
                requirement="REQ-LIM-001",
            )
        seen.add(row)


def _is_text(name: str) -> bool:
    return not any("\ud800" <= char <= "\udfff" for char in name)


def list_holdings(snapshot: Snapshot) -> list[Holding]:
    """Return every piece that a writer holds, for `assign_writers`."""
    return [
        ((_key(source), box), box.element_count * DTYPES[source.dtype].nbytes)
        for source in snapshot.tensors
        for box in source.boxes
    ]


def write_part(
    store: Store,
    snapshot: Snapshot,
    origin: Origin,
    *,
    writer: int,
    written: frozenset[tuple[TensorKey, Box]] | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> Part:
    """Write the shards of one writer and, when they are durable, its part.

    Args:
        store: rooted at the checkpoint's directory.
        snapshot: what this writer holds.
        origin: of the attempt; its ``attempt`` was never used before.
        writer: number of this writer.
        written: which of the pieces this writer writes; all of them if None.
        on_progress: called with the number of bytes just written.

    Raises: StoreError; StateError(STATE_NAME).
    Spec: REQ-CMT-003, REQ-CMT-004, REQ-CMT-005, REQ-TEN-005, REQ-TEN-006.
    """
    check_snapshot(snapshot)
    saved_unix_s = int(time.time())
    shards = _plan_shards(snapshot, origin, writer, written)
    digests = _write_shards(store, shards, origin.block_nbytes, on_progress)
    part = Part(
        origin=origin,
        writer=writer,
        saved_unix_s=saved_unix_s,
        files=tuple(
            PartFile(
                name=shard.name,
                kind="safetensors",
                nbytes=shard.nbytes,
                header_nbytes=len(shard.header),
                header_digest=digest_bytes(shard.header),
            )
            for shard in shards
        ),
        tensors=_describe_tensors(snapshot, shards, digests, origin.block_nbytes),
        streams=tuple(sorted(snapshot.streams, key=lambda stream: (stream.name.encode(), stream.scope.encode()))),
        leaves=tuple(sorted(snapshot.leaves, key=lambda leaf: sort_key((leaf.field, leaf.name, leaf.scope)))),
        absent=dict(snapshot.absent),
    )
    content, _ = part.dump()
    if shards:
        store.sync("")
    create_once(store, part_path(origin.attempt, writer), lambda: [content], content=content)
    store.sync("parts")
    return part


def write_failure(store: Store, origin: Origin, writer: int, error: CkptError) -> None:
    """Tell the committer that this writer failed, so that nobody waits out the deadline. Spec: REQ-CMT-004."""
    path = failure_path(origin.attempt, writer)
    content = dump_failure(origin, writer, error)
    create_once(store, path, lambda: [content], content=content)


def _write_shards(
    store: Store, shards: list[_Shard], block_nbytes: int, on_progress: Callable[[int], None] | None
) -> dict[tuple[TensorKey, Box], bytes]:
    """Write all shards, or leave none; return the digests of each piece's blocks."""
    digests: dict[tuple[TensorKey, Box], bytes] = {}
    try:
        for shard in shards:

            def chunks(shard: _Shard = shard) -> Iterator[Buffer]:
                return _iter_chunks(shard, block_nbytes, digests, on_progress)

            create_once(store, shard.name, chunks, nbytes=shard.nbytes)
    except Exception as error:
        # Without a part they can never be committed, and a full disk would stay full. Of what is unknown, nothing goes.
        known = not isinstance(error, CkptError) or error.code != Code.STORE_NO_ANSWER
        for shard in shards if known else ():
            with contextlib.suppress(CkptError):
                store.delete(shard.name)
        raise
    return digests


# --- shards ---------------------------------------------------------------------------------------------------------


def _key(source: TensorSource) -> TensorKey:
    return source.field, source.name, source.scope


def _stem(source: TensorSource) -> str:
    """Return in which file a tensor goes: tools that load weights by name find nothing else among them."""
    if DTYPES[source.dtype].safetensors is None:
        return f"{source.field}_opaque"
    return f"{source.field}_buffers" if source.storage == "non-persistent" else source.field


def _plan_shards(
    snapshot: Snapshot, origin: Origin, writer: int, written: frozenset[tuple[TensorKey, Box]] | None
) -> list[_Shard]:
    by_stem: dict[str, list[tuple[TensorSource, Box]]] = {}
    for source in sorted(snapshot.tensors, key=lambda source: sort_key(_key(source))):
        for box in sorted(source.boxes):
            if written is None or (_key(source), box) in written:
                by_stem.setdefault(_stem(source), []).append((source, box))
    shards = []
    for stem, pieces in sorted(by_stem.items()):
        keys = _shard_keys([source.name for source, _ in pieces])
        rows = [(key, *_shard_type(source, box)) for key, (source, box) in zip(keys, pieces, strict=True)]
        header, entries = plan_shard(rows)
        shards.append(
            _Shard(
                name=shard_name(stem, origin.attempt, writer),
                header=header,
                pieces=tuple((source, box, entry) for (source, box), entry in zip(pieces, entries, strict=True)),
            )
        )
    return shards


def _shard_type(source: TensorSource, box: Box) -> tuple[str, tuple[int, ...]]:
    """Return tag and shape of a piece in a shard's header. Spec: REQ-TEN-004."""
    dtype = DTYPES[source.dtype]
    if dtype.safetensors is None:
        return "U8", (box.element_count * dtype.nbytes,)
    return dtype.safetensors, box.shape


def _shard_keys(names: list[str]) -> list[str]:
    """Return a key of its own for each name: the name where it is free, else with a number behind. Spec: REQ-SHD-009.

    >>> _shard_keys(["w", "w", "__metadata__", "w#1"])
    ['w', 'w#1', '__metadata__#1', 'w#1#1']
    """
    taken = {"__metadata__"}
    reached: dict[str, int] = {}  # What was taken stays taken: no need to try it again for the next of this name.
    keys = []
    for name in names:
        key, number = name, reached.get(name, 0)
        while key in taken:
            number += 1
            key = f"{name}#{number}"
        reached[name] = number
        taken.add(key)
        keys.append(key)
    return keys


def _iter_chunks(
    shard: _Shard,
    block_nbytes: int,
    digests: dict[tuple[TensorKey, Box], bytes],
    on_progress: Callable[[int], None] | None,
) -> Iterator[Buffer]:
    """Yield the bytes of a shard in order, and note the digests of each piece's blocks as they pass."""
    yield shard.header
    for source, box, entry in sorted(shard.pieces, key=lambda piece: (piece[2].byte_begin, piece[2].byte_end)):
        content = _copy(source, box)
        digests[_key(source), box] = block_digests(content, block_nbytes)
        yield content
        if on_progress is not None:
            on_progress(entry.byte_end - entry.byte_begin)


def _copy(source: TensorSource, box: Box) -> memoryview:
    content = memoryview(bytearray(box.element_count * DTYPES[source.dtype].nbytes))
    source.copy_into(box, content)
    return content


def _describe_tensors(
    snapshot: Snapshot,
    shards: list[_Shard],
    digests: dict[tuple[TensorKey, Box], bytes],
    block_nbytes: int,
) -> tuple[PartTensor, ...]:
    places = {
        (_key(source), box): (number, entry)
        for number, shard in enumerate(shards)
        for source, box, entry in shard.pieces
    }
    return tuple(
        PartTensor(
            field=source.field,
            name=source.name,
            scope=source.scope,
            dtype=source.dtype,
            global_shape=source.global_shape,
            storage=source.storage,
            aliases=tuple(sorted(source.aliases, key=str.encode)),
            boxes=tuple(_describe_box(source, box, places, digests, block_nbytes) for box in sorted(source.boxes)),
        )
        for source in sorted(snapshot.tensors, key=lambda source: sort_key(_key(source)))
    )


def _describe_box(
    source: TensorSource,
    box: Box,
    places: dict[tuple[TensorKey, Box], tuple[int, ShardEntry]],
    digests: dict[tuple[TensorKey, Box], bytes],
    block_nbytes: int,
) -> PartBox:
    place = places.get((_key(source), box))
    if place is None:
        # Somebody else writes it. Whether it is the same must be proved, unless mesh or caller vouch for it.
        own = b"" if source.replica else block_digests(_copy(source, box), block_nbytes)
        return PartBox(box=box, replica=source.replica, digests=own, extents=())
    file, entry = place
    blocks = block_count(entry.byte_end - entry.byte_begin, block_nbytes)
    extent = Extent(block_begin=0, block_count=blocks, file=file, byte_begin=entry.byte_begin, key=entry.key)
    return PartBox(box=box, replica=source.replica, digests=digests[_key(source), box], extents=(extent,))
