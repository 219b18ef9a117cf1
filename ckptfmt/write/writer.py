"""Write what one writer holds: shards, then the part that describes them. Spec: REQ-CMT-003 to REQ-CMT-005."""

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
from ckptfmt.documents.part import Part, dump_failure
from ckptfmt.documents.tables import TensorKey
from ckptfmt.errors import CkptError, Code, err
from ckptfmt.store.direct import in_pages, make_memory
from ckptfmt.store.protocol import Buffer, SizedChunks, Store, call_each
from ckptfmt.write.image import Context, Image, Piece, gather_boxes, key_of, plan_image, sort_sources
from ckptfmt.write.snapshot import Snapshot, TensorSource

#: What to do about a limit that a save meets, by the clause that it breaks, and otherwise.
_REMEDIES: Final = {
    "REQ-DOC-023": "Save fewer plain values there: a long history or table belongs in a tensor, a numpy array or a log"
    " of its own.",
    "REQ-SHD-001": "Save fewer, larger tensors: stack small ones, or divide them among more processes.",
    "REQ-MAN-004": "Save fewer references: pass delta='off', or a smaller full_every.",
}
_REMEDY: Final = (
    "Save less there: large data as tensors or arrays, in fewer pieces; or leave it out of the state."
    " spec/90-limits.md has the limits."
)


def check_snapshot(snapshot: Snapshot) -> None:
    """Raise if two tensors, RNG streams or leaves of a snapshot have one name, or one that a document can't hold.

    Raises: StateError(STATE_NAME). Spec: REQ-IDX-003, REQ-IDX-008, REQ-LIM-001.
    """
    rows = [key_of(source) for source in snapshot.tensors]
    rows += [(source.field, alias, source.scope) for source in snapshot.tensors for alias in source.aliases]
    rows += [("rng", stream.name, stream.scope) for stream in snapshot.streams]
    rows += [(f"leaf of {leaf.field}", leaf.name, leaf.scope) for leaf in snapshot.leaves]
    seen = set()
    for row in rows:
        if row in seen:
            raise err(Code.STATE_NAME, f"{row[0]} has {row[1]!r} twice", where=row[1], requirement="REQ-IDX-003")
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
            remedy="Rename it; names of nested modules and mappings are joined by dots, so flatten them.",
        )


def _check_shape(source: TensorSource) -> None:
    shape = tuple(source.global_shape)
    if len(shape) > limits.NDIM or max(shape, default=0) > limits.DIM:
        raise err(
            Code.LIMIT_EXCEEDED,
            f"a tensor of {len(shape)} dimensions, the largest of {max(shape)} elements; {limits.NDIM} dimensions of"
            f" {limits.DIM} elements are the limit",
            where=f"{source.field}:{source.name}",
            requirement="REQ-LIM-001",
            remedy="Save it in another shape, with dimensions joined: tensor.flatten(), or a view of it.",
        )


def for_saving(error: CkptError) -> CkptError:
    """Return an error of a limit with a remedy for whoever saves.

    The table's remedy is for whoever reads: it blames the writer of a file, and that is the caller of a save.
    """
    if error.code not in (Code.LIMIT_EXCEEDED, Code.DOC_DEPTH) or error.remedy != error.code.remedy:
        return error
    remedy = _REMEDIES.get(error.requirement or "", _REMEDY)
    return type(error)(error.code, error.detail, where=error.where, requirement=error.requirement, remedy=remedy)


def structure_of(snapshot: Snapshot) -> Structure:
    """Return what a writer holds, for the writers to agree on who writes what."""
    sources = sort_sources(snapshot)
    return Structure(
        **gather_boxes(sources).members(),
        declared_by=[snapshot.declared_by.get(key_of(source), "") for source in sources],
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
    """Write the shards of one writer from live tensors and, when they are durable, its part.

    Args:
        store: rooted at the checkpoint's directory.
        snapshot: what this writer holds.
        origin: of the attempt; its ``attempt`` was never used before.
        writer: number of this writer.
        image: as planned before for the same structure; planned now if None.
        written: which of the pieces this writer writes; all of them if None.
        on_progress: called with the number of bytes just written.

    Raises: StoreError; StateError(STATE_NAME).
    Spec: REQ-CMT-003, REQ-CMT-004, REQ-CMT-005, REQ-TEN-005, REQ-TEN-006.
    """
    check_snapshot(snapshot)
    image = image or plan_image(snapshot, written=written, block_nbytes=origin.block_nbytes)
    contents = LiveContents(snapshot, image, on_progress)
    return write_image(store, image, contents, origin, Context.of(snapshot), writer=writer)


class Contents(Protocol):
    """The bytes of an image, wherever they come from.

    Attributes:
        shards_at_once: how many shards may be drawn at once, by as many threads; a remote store takes so many.
    """

    shards_at_once: int

    def iter_chunks(self, shard: int) -> Iterator[Buffer]:
        """Yield the bytes of a shard, header and all, in order; anew at each call. Waits for what isn't there yet."""

    def digests(self) -> list[bytes]:
        """Return the digests of the blocks of each piece of the image, in its order. Called when all is written."""


def write_image(
    store: Store, image: Image, contents: Contents, origin: Origin, context: Context, *, writer: int
) -> Part:
    """Write the shards of an image and, when they are durable, the part that describes them.

    Raises: StoreError; what `contents` raises. Then no shard is left.
    Spec: REQ-CMT-003, REQ-CMT-004, REQ-CMT-005.
    """
    digests = _write_shards(store, image, contents, [shard_name(s.stem, origin.attempt, writer) for s in image.shards])
    part = image.part(origin, digests, context, writer=writer)
    write_part_file(store, part)
    return part


def write_part_file(store: Store, part: Part) -> None:
    """Write a part whose files are written, and make it durable behind them. Spec: REQ-CMT-003, REQ-CMT-004."""
    content, _ = part.dump()
    if part.files:
        store.sync("")
    create_once(store, part_path(part.origin.attempt, part.writer), lambda: [content], content=content)
    store.sync("parts")


def write_failure(store: Store, origin: Origin, writer: int, error: CkptError) -> None:
    """Tell the committer that this writer failed, so that nobody waits out the deadline. Spec: REQ-CMT-004."""
    path = failure_path(origin.attempt, writer)
    content = dump_failure(origin, writer, error)
    create_once(store, path, lambda: [content], content=content)


def tell_failure(store: Store, origin: Origin, writer: int, error: CkptError) -> None:
    """Leave a failure record where others wait for it, as well as that can be done. Spec: REQ-CMT-004."""
    # Of a writer that failed, others find that one's own record.
    if origin.writer_count > 1 and error.code not in (Code.COMMIT_UNKNOWN, Code.WRITER_FAILED):
        # They find the deadline if the store takes this neither.
        with contextlib.suppress(CkptError):
            write_failure(store, origin, writer, error)


def as_ckpt_error(error: BaseException) -> CkptError:
    """Return an error of the program's own objects, or a bug, as one of ckptfmt's; of a limit as `for_saving`."""
    if isinstance(error, CkptError):
        return for_saving(error)
    return err(Code.PEER_FAILED, f"{type(error).__qualname__}: {error}")


@contextlib.contextmanager
def removed_after_error(store: Store, paths: Sequence[str]) -> Iterator[None]:
    """Remove files after an error: what nothing will refer to is never committed, and a full disk would stay full."""
    try:
        yield
    except Exception as error:
        # Where no answer came, what refers to them may be there, or still come.
        unknown = isinstance(error, CkptError) and error.code in (Code.STORE_NO_ANSWER, Code.COMMIT_UNKNOWN)
        for path in () if unknown else paths:
            with contextlib.suppress(CkptError):
                store.delete(path)
        raise


def _write_shards(store: Store, image: Image, contents: Contents, names: list[str]) -> list[bytes]:
    """Write all shards, or leave none; return the digests of each piece's blocks."""

    def write(number: int) -> None:
        nbytes = image.shards[number].nbytes
        create_once(store, names[number], functools.partial(_chunks_of, contents, number, nbytes), nbytes=nbytes)

    with removed_after_error(store, names):
        call_each(store, write, range(len(names)), at_once=contents.shards_at_once)
        return contents.digests()


def _chunks_of(contents: Contents, shard: int, nbytes: int) -> SizedChunks:
    return SizedChunks(contents.iter_chunks(shard), nbytes)


class LiveContents:
    """The bytes of live tensors, copied one box at a time, just when they are written."""

    shards_at_once = 1  # a caller's objects, by the caller's thread

    def __init__(self, snapshot: Snapshot, image: Image, on_progress: Callable[[int], None] | None) -> None:
        self._sources = {key_of(source): source for source in snapshot.tensors}
        self._image = image
        self._on_progress = on_progress
        self._digests: dict[Piece, bytes] = {}
        self._copied = memoryview(bytearray())  # the memory of the piece that was copied last

    def iter_chunks(self, shard: int) -> Iterator[Buffer]:
        """Yield the header, then the pieces; note their digests as they pass."""
        return in_pages(self._iter_contents(shard))

    def digests(self) -> list[bytes]:
        """Return the digests; of what isn't written here, only now."""
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
        """Yield the bytes of a piece, having noted its digests by the end; each chunk is valid until the next."""
        yield self._copy(piece)
        self._tell(piece.end - piece.begin)

    def _tell(self, nbytes: int) -> None:
        if self._on_progress is not None:
            self._on_progress(nbytes)

    def _copy(self, piece: Piece) -> memoryview:
        """Copy a piece to where the one before it was."""
        nbytes = piece.end - piece.begin
        if nbytes > len(self._copied):
            self._copied = make_memory(nbytes)
        content = self._copied[:nbytes]
        self._sources[piece.key].copy_into(piece.box, content)
        self._digests[piece] = block_digests(content, self._image.block_nbytes)
        return content
