"""The base of a delta: a committed checkpoint, protected by pins, and the blocks' contents."""

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
    """A committed checkpoint of the same image, against which a delta is made.

    Attributes:
        reference: name and digest of the checkpoint.
        manifest: manifest of the checkpoint.
        part: this writer's part of the checkpoint.
        digests: digests of the blocks of each piece of the image.
        view: memory of the slot that held the base's snapshot; its contents may have changed since.
            None if the slot is being overwritten now.
        slot: number of that slot; None if the slot is being overwritten now.
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
    """Write pins that keep a base from being deleted before this save is decided.

    Returns: the references of the delta, sorted by digest: the base and all that the base lists.
    Raises: IntegrityError(BASE_MISSING, BASE_MISMATCH) if the base is being deleted; StoreError.
    Spec: REQ-CMT-035, REQ-CMT-031.
    """
    references = tuple(
        sorted({base.reference, *base.manifest.references}, key=lambda one: one.digest)
    )
    content = Pins(attempt=origin.attempt, writer=writer, references=references).dump()
    create_once(store, pins_path(origin.attempt, writer), lambda: [content], content=content)
    store.sync("parts")
    for reference in references:
        check_base(store, reference, known=known)
    return references


class BaseContents:
    """The verified contents of the base's blocks, read from the base's slot or from a fallback.

    Args:
        image: image of the base.
        digests: digests of the blocks of each piece.
        view: memory of the base's slot, as in `Base`.
        otherwise: returns the content of a block that the slot no longer holds, given the numbers
            of the piece and of the block.
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
        """Return the digest of a block of the base."""
        return digest_at(self._digests[number], block)

    def content(self, number: int, block: int) -> memoryview:
        """Return the verified content of a block of the base."""
        if self._view is not None:
            begin, end = self._image.span(number, block)
            # Copied before hashing: the trainer may overwrite the slot at any time, and the bytes
            # that are verified must be the bytes that are returned.
            content = bytes(self._view[begin:end])
            if digest_bytes(content) == self.digest(number, block):
                return memoryview(content)
        return self._otherwise(number, block)

    def elements(self, number: int, elements: range, width: int) -> memoryview:
        """Return a range of elements of a piece of the base."""
        return join_blocks(
            lambda block: self.content(number, block), elements, width, self._image.block_nbytes
        )


class BaseFiles:
    """The verified contents of the base's blocks, read from files that the first read opens."""

    def __init__(self, store: Store, image: Image, base: Base) -> None:
        self._store = store
        self._image = image
        self._base = base
        self._library: Library | None = None
        self._lock = threading.Lock()

    def content(self, number: int, block: int) -> memoryview:
        """Return the verified content of a block; thread-safe."""
        piece = self._image.pieces[number]
        library = self._open()
        stored = library.files.open_part(self._base.part.writer).find(piece.key, piece.box)
        assert stored is not None  # noqa: S101
        return library.read_blocks(stored, [block])[0][0]

    def close(self) -> None:
        """Close the files, if a read opened them."""
        if self._library is not None:
            self._library.files.close()

    def _open(self) -> Library:
        with self._lock:
            if self._library is None:
                place = self._store.beside(self._base.reference.name)
                self._library = Library(CheckpointFiles(place, digest=self._base.reference.digest))
            return self._library
