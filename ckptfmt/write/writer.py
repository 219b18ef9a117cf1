"""Write a writer's files: first the shards, then the part. Spec: REQ-CMT-003 to REQ-CMT-005."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Protocol

from ckptfmt import limits
from ckptfmt.box import Box
from ckptfmt.commit.decision import create_once
from ckptfmt.digest import block_digests
from ckptfmt.documents.holdings import Structure
from ckptfmt.documents.manifest import Origin, failure_path, part_path, shard_name
from ckptfmt.documents.packed import Strings
from ckptfmt.documents.part import Part, dump_failure
from ckptfmt.documents.tables import TensorKey, key_of
from ckptfmt.errors import CkptError, Code, err
from ckptfmt.store.direct import in_pages, make_memory
from ckptfmt.store.protocol import Buffer, SizedChunks, Store, call_each
from ckptfmt.write.image import (
    Context,
    Image,
    Piece,
    gather_boxes,
    plan_image,
    sort_sources,
)
from ckptfmt.write.snapshot import Snapshot, TensorSource

#: Remedies for a save that exceeds a limit, by the violated clause; `_REMEDY` for all other
#: clauses.
_REMEDIES: Final = {
    "REQ-DOC-023": "Save fewer plain values there: a long history or table belongs in a tensor, a"
    " numpy array or a log"
    " of its own.",
    "REQ-SHD-001": (
        "Save fewer, larger tensors: stack small ones, or divide them among more processes."
    ),
    "REQ-MAN-004": "Save fewer references: pass delta='off', or a smaller full_every.",
}
_REMEDY: Final = (
    "Save less there: large data as tensors or arrays, in fewer pieces; or leave it out of the"
    " state."
    " spec/core/90-limits.md has the limits."
)


def check_snapshot(snapshot: Snapshot) -> None:
    """Raise if names in a snapshot collide, or if a document can't hold a name or shape.

    Raises: StateError(STATE_NAME, LIMIT_EXCEEDED). Spec: REQ-IDX-003, REQ-IDX-008, REQ-LIM-001.
    """
    rows = [key_of(source) for source in snapshot.tensors]
    rows += [
        (source.field, alias, source.scope)
        for source in snapshot.tensors
        for alias in source.aliases
    ]
    rows += [("rng", stream.name, stream.scope) for stream in snapshot.streams]
    rows += [(f"leaf of {leaf.field}", leaf.name, leaf.scope) for leaf in snapshot.leaves]
    seen = set()
    for row in rows:
        if row in seen:
            raise err(
                Code.STATE_NAME,
                f"{row[0]} has {row[1]!r} twice",
                where=row[1],
                requirement="REQ-IDX-003",
            )
        _check_name(*row[:2])
        seen.add(row)
    for source in snapshot.tensors:
        _check_shape(source)


def _check_name(kind: str, name: str) -> None:
    try:
        nbytes = len(name.encode())
    except UnicodeEncodeError:
        raise err(
            Code.STATE_NAME,
            f"{kind} has a name with a lone surrogate",
            where=name,
            requirement="REQ-IDX-003",
            remedy="Rename it: a name is Unicode text.",
        ) from None
    if nbytes > limits.NAME_NBYTES:
        raise err(
            Code.STATE_NAME,
            f"{kind} has a name of {nbytes} bytes; {limits.NAME_NBYTES} is the limit",
            where=f"{name[:64]}...",
            requirement="REQ-LIM-001",
            remedy=(
                "Rename it; names of nested modules and mappings are joined by dots, so"
                " flatten them."
            ),
        )


def _check_shape(source: TensorSource) -> None:
    shape = tuple(source.global_shape)
    if len(shape) > limits.NDIM or max(shape, default=0) > limits.DIM:
        raise err(
            Code.LIMIT_EXCEEDED,
            f"a tensor of {len(shape)} dimensions, the largest of {max(shape)} elements;"
            f" {limits.NDIM} dimensions of"
            f" {limits.DIM} elements are the limit",
            where=f"{source.field}:{source.name}",
            requirement="REQ-LIM-001",
            remedy=(
                "Save the tensor in another shape, with dimensions joined: tensor.flatten(), or a"
                " view."
            ),
        )


def for_saving(error: CkptError) -> CkptError:
    """Return an error with a remedy for the caller of a save, if the error reports a limit.

    The default remedy is for readers and blames the writer of the file. In a save, the caller is
    the writer.
    """
    if error.code not in (Code.LIMIT_EXCEEDED, Code.DOC_DEPTH) or error.remedy != error.code.remedy:
        return error
    remedy = _REMEDIES.get(error.requirement or "", _REMEDY)
    return type(error)(
        error.code, error.detail, where=error.where, requirement=error.requirement, remedy=remedy
    )


def structure_of(snapshot: Snapshot) -> Structure:
    """Return the structure of a writer's state, from which each box's writer is derived."""
    sources = sort_sources(snapshot)
    return Structure(
        **gather_boxes(sources).members(),
        declared_by=Strings.of(
            [snapshot.declared_by.get(key_of(source), "") for source in sources]
        ),
        replica=[source.replica for source in sources],
    )


def write_part(
    store: Store,
    snapshot: Snapshot,
    origin: Origin,
    *,
    writer: int,
    image: Image | None = None,
    written: frozenset[tuple[TensorKey, Box]] | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> Part:
    """Write a writer's shards from live tensors and, when the shards are durable, the part.

    Args:
        store: a store rooted at the checkpoint's directory.
        snapshot: the writer's state.
        origin: the attempt's origin; its ``attempt`` was never used before.
        writer: the writer's number.
        image: an image planned before for the same structure; None to plan it now.
        written: tensor and box of the pieces that this writer writes; None for all.
        on_progress: called with the number of bytes just written.

    Raises: StoreError; StateError(STATE_NAME).
    Spec: REQ-CMT-003, REQ-CMT-004, REQ-CMT-005, REQ-TEN-005, REQ-TEN-006.
    """
    check_snapshot(snapshot)
    image = image or plan_image(snapshot, written=written, block_nbytes=origin.block_nbytes)
    contents = LiveContents(snapshot, image, on_progress)
    return write_image(store, image, contents, origin, Context.of(snapshot), writer=writer)


class Contents(Protocol):
    """The bytes of an image, from live tensors or from a slot.

    Attributes:
        shards_at_once: largest number of shards that may be read at once, by as many threads. A
            remote store uses this many uploads.
    """

    shards_at_once: int

    def iter_chunks(self, shard: int) -> Iterator[Buffer]:
        """Yield the bytes of a shard in order, including the header; each call starts anew.

        Waits for bytes not yet staged.
        """

    def digests(self) -> list[bytes]:
        """Return the digests of the blocks of each piece, in the image's order.

        Called after all shards are written.
        """


def write_image(
    store: Store, image: Image, contents: Contents, origin: Origin, context: Context, *, writer: int
) -> Part:
    """Write the shards of an image and, when the shards are durable, the part.

    Raises: StoreError; the errors of `contents`. The shards are removed after an error.
    Spec: REQ-CMT-003, REQ-CMT-004, REQ-CMT-005.
    """
    digests = _write_shards(
        store, image, contents, [shard_name(s.stem, origin.attempt, writer) for s in image.shards]
    )
    part = image.part(origin, digests, context, writer=writer)
    write_part_file(store, part)
    return part


def write_part_file(store: Store, part: Part) -> None:
    """Write a part after its files, and make the part durable. Spec: REQ-CMT-003, REQ-CMT-004."""
    content, _ = part.dump()
    if part.files:
        store.sync("")
    create_once(
        store, part_path(part.origin.attempt, part.writer), lambda: [content], content=content
    )
    store.sync("parts")


def write_failure(store: Store, origin: Origin, writer: int, error: CkptError) -> None:
    """Write a failure record, so that the other writers fail at once instead of at the deadline.

    Spec: REQ-CMT-004.
    """
    path = failure_path(origin.attempt, writer)
    content = dump_failure(origin, writer, error)
    create_once(store, path, lambda: [content], content=content)


def tell_failure(store: Store, origin: Origin, writer: int, error: CkptError) -> None:
    """Write a failure record if another writer may wait for this writer.

    Ignore errors of the store. Spec: REQ-CMT-004.
    """
    # After WRITER_FAILED, the writer that failed first has left its own record.
    if origin.writer_count > 1 and error.code not in (Code.COMMIT_UNKNOWN, Code.WRITER_FAILED):
        # If the store rejects the record as well, the other writers fail at the deadline.
        with contextlib.suppress(CkptError):
            write_failure(store, origin, writer, error)


def as_ckpt_error(error: BaseException) -> CkptError:
    """Return an exception as an error of ckptfmt, with the remedy of `for_saving`."""
    if isinstance(error, CkptError):
        return for_saving(error)
    return err(Code.PEER_FAILED, f"{type(error).__qualname__}: {error}")


@contextlib.contextmanager
def removed_after_error(store: Store, paths: Sequence[str]) -> Iterator[None]:
    """Remove files after an error in the ``with`` block, so that a full disk gets space back."""
    try:
        yield
    except Exception as error:
        # Without an answer of the store, a document that refers to the files may exist or appear
        # later.
        unknown = isinstance(error, CkptError) and error.code in (
            Code.STORE_NO_ANSWER,
            Code.COMMIT_UNKNOWN,
        )
        for path in () if unknown else paths:
            with contextlib.suppress(CkptError):
                store.delete(path)
        raise


def _write_shards(store: Store, image: Image, contents: Contents, names: list[str]) -> list[bytes]:
    """Write all shards, or remove them after an error.

    Return the digests of each piece's blocks.
    """

    def write(number: int) -> None:
        nbytes = image.shards[number].nbytes
        create_once(
            store,
            names[number],
            functools.partial(_chunks_of, contents, number, nbytes),
            nbytes=nbytes,
        )

    with removed_after_error(store, names):
        call_each(store, write, range(len(names)), at_once=contents.shards_at_once)
        return contents.digests()


def _chunks_of(contents: Contents, shard: int, nbytes: int) -> SizedChunks:
    return SizedChunks(contents.iter_chunks(shard), nbytes)


class LiveContents:
    """The bytes of live tensors; each box is copied just before the write."""

    shards_at_once = 1  # the caller's objects are used in the caller's thread only

    def __init__(
        self, snapshot: Snapshot, image: Image, on_progress: Callable[[int], None] | None
    ) -> None:
        self._sources = {key_of(source): source for source in snapshot.tensors}
        self._image = image
        self._on_progress = on_progress
        self._digests: dict[Piece, bytes] = {}
        self._copied = memoryview(bytearray())  # a buffer reused for each piece

    def iter_chunks(self, shard: int) -> Iterator[Buffer]:
        """Yield the header, then the pieces, and record the digest of each piece."""
        return in_pages(self._iter_contents(shard))

    def digests(self) -> list[bytes]:
        """Return the digests of all pieces. Pieces without a file are copied and digested now."""
        for piece in self._image.pieces:
            if piece.shard is None:
                self._copy(piece)
        return [self._digests[piece] for piece in self._image.pieces]

    def _iter_contents(self, shard: int) -> Iterator[Buffer]:
        yield self._image.shards[shard].header
        for piece in self._image.pieces:
            if piece.shard == shard:
                yield from self._iter_piece(piece)

    def _iter_piece(self, piece: Piece) -> Iterator[Buffer]:
        """Yield the bytes of a piece and record its digest.

        Each chunk is valid until the next chunk.
        """
        yield self._copy(piece)
        self._tell(piece.end - piece.begin)

    def _tell(self, nbytes: int) -> None:
        if self._on_progress is not None:
            self._on_progress(nbytes)

    def _copy(self, piece: Piece) -> memoryview:
        """Copy a piece into the reused buffer, record its digest, and return the bytes."""
        nbytes = piece.end - piece.begin
        if nbytes > len(self._copied):
            self._copied = make_memory(nbytes)
        content = self._copied[:nbytes]
        self._sources[piece.key].copy_into(piece.box, content)
        self._digests[piece] = block_digests(content, self._image.block_nbytes)
        return content
