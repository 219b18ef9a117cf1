"""A checkpoint of ckptfmt as the source or the target of a conversion."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable, Iterator

import numpy as np

from ckptfmt import limits
from ckptfmt.box import Box
from ckptfmt.commit.decision import finalize
from ckptfmt.convert.content import Content, LeftOut, Tensor
from ckptfmt.digest import block_digests
from ckptfmt.documents.index import IndexTensor
from ckptfmt.documents.manifest import FIELDS, Manifest, Origin
from ckptfmt.documents.part import Leaf
from ckptfmt.documents.tables import sort_key
from ckptfmt.documents.tree import dump_tree
from ckptfmt.dtypes import DTYPES
from ckptfmt.read.reader import Checkpoint
from ckptfmt.read.reading import carrier_of
from ckptfmt.store.protocol import Store
from ckptfmt.write.image import Piece, plan_image
from ckptfmt.write.snapshot import Snapshot
from ckptfmt.write.writer import Context, LiveContents, check_snapshot, write_image


def read_checkpoint(checkpoint: Checkpoint) -> Content:
    """Return what a checkpoint holds; its tensors are read, and verified, when they are asked for."""
    content = Content(origin="a checkpoint of ckptfmt", step=checkpoint.step)
    for tensor in checkpoint.tensors.values():
        content.add(
            Tensor(
                field=tensor.field,
                name=tensor.name,
                scope=tensor.scope,
                dtype=tensor.dtype,
                global_shape=tensor.global_shape,
                storage=tensor.storage,
                aliases=tensor.aliases,
                read=functools.partial(_read, checkpoint, tensor),
            )
        )
    content.leaves = {key: checkpoint.leaf(*key) for key in checkpoint.leaves}
    content.left_out = [
        LeftOut(f"rng:{name} ({scope})", "the target has no random-number streams")
        for name, scope in checkpoint.streams
    ]
    return content


def _read(checkpoint: Checkpoint, tensor: IndexTensor, box: Box, out: memoryview) -> None:
    carrier = carrier_of(DTYPES[tensor.dtype].nbytes)
    checkpoint.fill(tensor, box, np.frombuffer(out, carrier).reshape(box.shape))


def snapshot_of(content: Content) -> Snapshot:
    """Return what a save of all this writes.

    Raises: StateError(STATE_UNSUPPORTED, STATE_NAME) for what a checkpoint can't hold; FormatError(LIMIT_EXCEEDED).
    """
    leaves = [
        Leaf(field=field, name=name, scope=scope, value=dump_tree(tree, where=f"{field}:{name}"))
        for (field, name, scope), tree in content.leaves.items()
    ]
    given = {leaf.field for leaf in leaves} | {tensor.field for tensor in content.tensors.values()}
    snapshot = Snapshot(
        tensors=tuple(content.tensors[key] for key in sorted(content.tensors, key=sort_key)),
        streams=(),
        leaves=tuple(sorted(leaves, key=lambda leaf: sort_key((leaf.field, leaf.name, leaf.scope)))),
        absent={field: f"imported from {content.origin}" for field in FIELDS if field not in given},
    )
    check_snapshot(snapshot)
    return snapshot


def write_checkpoint(store: Store, snapshot: Snapshot, *, step: int, on_progress: Callable[[int], None]) -> Manifest:
    """Write and commit a checkpoint from the tensors of a conversion, a chunk in memory at a time.

    Raises: StoreError; what reading the source raises. Spec: REQ-CMT-003 to REQ-CMT-008.
    """
    origin = Origin(
        run_id=None,
        launch=None,
        nonce=secrets.token_hex(16),
        step=step,
        attempt=secrets.token_hex(8),
        writer_count=1,
        block_nbytes=limits.BLOCK_NBYTES,
    )
    image = plan_image(snapshot, block_nbytes=origin.block_nbytes)
    contents = _Streamed(snapshot, image, on_progress)
    write_image(store, image, contents, origin, Context.of(snapshot), writer=0)
    return finalize(store, origin)


class _Streamed(LiveContents):
    """The bytes of an image of which no tensor is ever whole in memory."""

    def _iter_piece(self, piece: Piece) -> Iterator[memoryview]:
        source = self._sources[piece.key]
        assert isinstance(source, Tensor)  # noqa: S101 - of `snapshot_of`
        found = []
        for chunk in _whole_blocks(source.iter_content(), self._image.block_nbytes):
            found.append(block_digests(chunk, self._image.block_nbytes))
            yield chunk
            self._tell(chunk.nbytes)
        self._digests[piece] = b"".join(found)


def _whole_blocks(chunks: Iterator[memoryview], block_nbytes: int) -> Iterator[memoryview]:
    """Yield the same bytes, cut at multiples of a block."""
    rest = b""
    for chunk in chunks:
        content = memoryview(b"".join((rest, chunk))) if rest else chunk
        whole = content.nbytes - content.nbytes % block_nbytes
        if whole:
            yield content[:whole]
        rest = bytes(content[whole:])
    if rest:
        yield memoryview(rest)
