"""What a delta is made against: a committed checkpoint, pinned, and the content of its blocks."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence

from ckptfmt.commit.decision import Known, check_base, create_once
from ckptfmt.digest import digest_at, digest_bytes
from ckptfmt.documents.manifest import Manifest, Origin, Reference, pins_path
from ckptfmt.documents.part import Part
from ckptfmt.documents.run import Pins
from ckptfmt.read.decoding import Library, join_blocks
from ckptfmt.read.files import CheckpointFiles
from ckptfmt.store.protocol import Store
from ckptfmt.write.image import Image


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Base:
    """A committed checkpoint to make a delta against, of the same image.

    Attributes:
        reference: its name and digest.
        manifest: its manifest.
        part: this writer's part of it.
        digests: of the blocks of each piece of the image.
        view: where its snapshot was; it may be another by now. None where it surely is.
        slot: number of that slot, likewise.
    """

    reference: Reference
    manifest: Manifest
    part: Part
    digests: Sequence[bytes]
    view: memoryview | None
    slot: int | None = None


def pin_base(
    store: Store, origin: Origin, writer: int, base: Base, *, known: Known | None = None
) -> tuple[Reference, ...]:
    """Keep a base from being cleaned away until this save is decided; return what its delta will refer to.

    Raises: IntegrityError(BASE_MISSING, BASE_MISMATCH) if it is going already; StoreError.
    Spec: REQ-CMT-035, REQ-CMT-031.
    """
    references = tuple(sorted({base.reference, *base.manifest.references}, key=lambda one: one.digest))
    content = Pins(attempt=origin.attempt, writer=writer, references=references).dump()
    create_once(store, pins_path(origin.attempt, writer), lambda: [content], content=content)
    store.sync("parts")
    for reference in references:
        check_base(store, reference, known=known)
    return references


class BaseContents:
    """The content of the base's blocks, verified: out of its slot as long as it is there, else from elsewhere.

    Args:
        image: of the base.
        digests: of the blocks of each piece.
        view: where the snapshot was; see `Base`.
        otherwise: returns the content of a block that isn't there any more, given the number of its piece and its own.
    """

    def __init__(
        self,
        image: Image,
        digests: Sequence[bytes],
        view: memoryview | None,
        *,
        otherwise: Callable[[int, int], memoryview],
    ) -> None:
        self._image = image
        self._digests = digests
        self._view = view
        self._otherwise = otherwise

    def digest(self, number: int, block: int) -> bytes:
        """Return the digest of a block."""
        return digest_at(self._digests[number], block)

    def content(self, number: int, block: int) -> memoryview:
        """Return the content of a block."""
        if self._view is not None:
            begin, end = self._image.span(number, block)
            # Copied first: the trainer may take the slot at any time, and what was compared must be what is used.
            content = bytes(self._view[begin:end])
            if digest_bytes(content) == self.digest(number, block):
                return memoryview(content)
        return self._otherwise(number, block)

    def elements(self, number: int, elements: range, width: int) -> memoryview:
        """Return elements of a piece."""
        return join_blocks(lambda block: self.content(number, block), elements, width, self._image.block_nbytes)


class BaseFiles:
    """The content of the base's blocks out of its files, which are opened when the first one is asked for."""

    def __init__(self, store: Store, image: Image, base: Base) -> None:
        self._store = store
        self._image = image
        self._base = base
        self._library: Library | None = None
        self._lock = threading.Lock()

    def content(self, number: int, block: int) -> memoryview:
        """Return the content of a block, verified; thread-safe."""
        piece = self._image.pieces[number]
        library = self._open()
        stored = library.files.open_part(self._base.part.writer).find(piece.key, piece.box)
        assert stored is not None  # noqa: S101 - the base has the same image
        return library.read_blocks(stored, [block])[0][0]

    def close(self) -> None:
        """Close the files."""
        if self._library is not None:
            self._library.files.close()

    def _open(self) -> Library:
        with self._lock:
            if self._library is None:
                place = self._store.beside(self._base.reference.name)
                self._library = Library(CheckpointFiles(place, digest=self._base.reference.digest))
            return self._library
