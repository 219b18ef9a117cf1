"""Make a full checkpoint of a delta in constant memory.

The full checkpoint has the same parts, with raw shards instead of packs.

Spec: REQ-CKP-006, REQ-CKP-007, REQ-CMT-003 to REQ-CMT-008, REQ-RUN-004, REQ-RUN-008.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from ckptfmt.commit.decision import check_vacant
from ckptfmt.commit.waiting import describe_savers, wait_for_savers
from ckptfmt.documents.manifest import Manifest, Origin, checkpoint_name
from ckptfmt.documents.tables import block_count
from ckptfmt.errors import Code, err
from ckptfmt.read.decoding import Library
from ckptfmt.read.files import OpenPart, StoredBox
from ckptfmt.read.reader import Checkpoint
from ckptfmt.read.streaming import iter_ahead
from ckptfmt.run.lineage import begin_launch, check_not_fenced, find_head, open_run
from ckptfmt.run.save_job import SaveJob, SaveState, new_origin
from ckptfmt.signing.signer import Signer
from ckptfmt.store.protocol import Store
from ckptfmt.write.image import Context, Image, lay_out
from ckptfmt.write.writer import write_image

#: Bytes of small blocks decoded at a time.
_CHUNK_NBYTES: Final = 1 << 20
#: Time to wait for the saves of living savers, in seconds.
_DEADLINE_S: Final = 20.0


def compact_checkpoint(
    checkpoint: Checkpoint,
    store: Store,
    *,
    on_progress: Callable[[int], None] | None = None,
    signer: Signer | None = None,
) -> Manifest:
    """Write a full checkpoint, outside of a run, with the contents of another checkpoint.

    An interrupted call leaves files without a manifest; the next call in the same place removes
    them.

    Args:
        checkpoint: the checkpoint to read.
        store: the store to write, rooted at the new checkpoint.
        on_progress: called with the number of bytes just written.
        signer: signs the new manifest; None for no signature.

    Raises: CommitError(CHECKPOINT_EXISTS); StoreError; errors of reading.
    Spec: REQ-CKP-007.
    """
    check_vacant(store)
    old = checkpoint.manifest.origin
    origin = new_origin(step=old.step, writer_count=old.writer_count, block_nbytes=old.block_nbytes)
    return _write(checkpoint, store, origin, on_progress, signer)


def compact_run(
    store: Store,
    *,
    deadline_s: float = _DEADLINE_S,
    on_progress: Callable[[int], None] | None = None,
    signer: Signer | None = None,
) -> tuple[str, Manifest, bool]:
    """Write a full checkpoint of a run's head, as the first commit of a new launch.

    The run then goes on from the full checkpoint.

    The new launch resumes by hand from the delta: the lineage leads through this launch, and after
    a kill the run goes on as before. A running training is fenced off, as by any newer launch.

    Args:
        store: the store to write, rooted at the run.
        deadline_s: time to wait for the saves of living savers, in seconds.
        on_progress: called with the number of bytes just checked, or written.
        signer: signs the new manifest; None for no signature.

    Returns: the name of the full checkpoint, its manifest, and whether the call wrote it: a head
        may be full already.
    Raises: IntegrityError(NOT_COMMITTED, and codes of a damaged head);
        UnsupportedError(FEATURE_UNSUPPORTED); FencedError; CommitError(SAVE_PENDING and others);
        StoreError.
    Spec: REQ-RUN-002, REQ-RUN-004, REQ-RUN-006, REQ-RUN-008, REQ-RUN-018, REQ-VER-003.
    """
    if held := wait_for_savers(store, deadline_s=deadline_s):
        remedy = (
            "Wait until the training has ended, or compact its newest checkpoint to a place"
            " of its own."
        )
        detail = f"{describe_savers(held)} still hasn't finished its saves after {deadline_s:g} s"
        raise err(Code.SAVE_PENDING, detail, where=store.name, remedy=remedy)
    name, head = find_head(store)
    if head.profile == "full":
        return name, head, False
    run = open_run(store)
    launch, checkpoint = begin_launch(store, run, choose=head.digest, on_progress=on_progress)
    assert checkpoint is not None  # noqa: S101
    origin = new_origin(
        step=head.origin.step,
        launch=launch,
        writer_count=head.origin.writer_count,
        block_nbytes=head.origin.block_nbytes,
    )
    full_name = checkpoint_name(origin.step, launch.launch)
    with checkpoint:
        check_not_fenced(store, launch.launch)
        manifest = _write(checkpoint, store.at(full_name), origin, on_progress, signer)
        return full_name, manifest, True


def _write(
    checkpoint: Checkpoint,
    store: Store,
    origin: Origin,
    on_progress: Callable[[int], None] | None,
    signer: Signer | None,
) -> Manifest:
    """Write every part again, and commit them.

    After an error the files stay: once all parts are there, any process may still commit them. The
    next call removes the files after its commit; in a run, the next clean-up does.
    """

    def write() -> None:
        for number in range(origin.writer_count):
            opened = checkpoint.open_part(number)
            part = opened.part
            held = part.holdings
            image = lay_out(
                held,
                block_nbytes=origin.block_nbytes,
                written=held.written,
                replica=held.replica,
                digested=held.digest_count > 0,
            )
            context = Context(
                saved_unix_s=part.saved_unix_s,
                streams=part.streams,
                leaves=part.leaves,
                absent=dict(part.absent),
                labels=part.labels,
            )
            contents = _Decoded(opened, image, on_progress)
            write_image(store, image, contents, origin, context, writer=number)

    save = SaveState(store=store, origin=origin, deadline_s=_DEADLINE_S, signer=signer)
    return SaveJob(save).run(write)


# --- one part -------------------------------------------------------------------------------------


class _Decoded:
    """The bytes of a part's image, decoded when written.

    The class is a `ckptfmt.write.writer.Contents`.
    """

    shards_at_once = 1  # one stream of decoded blocks, in order

    def __init__(
        self, opened: OpenPart, image: Image, on_progress: Callable[[int], None] | None
    ) -> None:
        self._opened = opened
        self._library = Library(opened.files)
        self._image = image
        self._on_progress = on_progress

    def iter_chunks(self, shard: int) -> Iterator[bytes | memoryview]:
        """Yield the header, then the pieces, each block verified."""
        yield self._image.shards[shard].header
        for chunk in iter_ahead(self._decode, self._iter_blocks(shard)):
            for content in chunk:
                yield content
                if self._on_progress is not None:
                    self._on_progress(content.nbytes)

    def digests(self) -> list[bytes]:
        """Return the part's own digests: all contents were compared with the digests."""
        return [self._opened.part.holdings.digests_of(row) for row in self._image.rows]

    def _iter_blocks(self, shard: int) -> Iterator[tuple[StoredBox, range]]:
        """Yield the blocks of a shard in order, several small blocks of a box together."""
        step = max(1, _CHUNK_NBYTES // self._image.block_nbytes)
        for row, piece in zip(self._image.rows, self._image.pieces, strict=True):
            count = block_count(piece.end - piece.begin, self._image.block_nbytes)
            for first in range(0, count, step) if piece.shard == shard else ():
                yield self._opened.box(row), range(first, min(first + step, count))

    def _decode(self, chunk: tuple[StoredBox, range]) -> list[memoryview]:
        return self._library.read_blocks(*chunk)[0]
