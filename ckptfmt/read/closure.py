"""The checkpoints that a delta reads from: found by digest, beside it or where the caller says; each opened once.

Spec: REQ-DEL-020 to REQ-DEL-024.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from ckptfmt.commit.decision import read_register
from ckptfmt.documents.manifest import MANIFEST_NAME, Manifest
from ckptfmt.errors import CkptError, Code, FormatError, IntegrityError, UnsupportedError, err
from ckptfmt.layout.read_plan import BlockRange

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from ckptfmt.documents.manifest import Reference
    from ckptfmt.documents.part import Part
    from ckptfmt.layout.read_plan import Request
    from ckptfmt.read.decoding import Run, StoredBlock
    from ckptfmt.read.reader import Checkpoint
    from ckptfmt.store.protocol import RangeReader, Store


class Closure:
    """What one checkpoint refers to.

    Args:
        store: of the checkpoint.
        manifest: of the checkpoint; its references are all that may be opened here.
        bases: where else to look: each a checkpoint, or a directory of checkpoints.
        open_base: opens what was found.
    """

    def __init__(
        self,
        store: Store,
        manifest: Manifest,
        bases: Sequence[Store],
        open_base: Callable[[Store, Reference, Closure], Checkpoint],
    ) -> None:
        self._store = store
        self._references = frozenset(manifest.references)
        self._bases = tuple(bases)
        self._open_base = open_base
        self._opened: dict[Reference, Checkpoint] = {}
        self._lock = threading.RLock()

    def open(self, reference: Reference) -> Checkpoint:
        """Return a referenced checkpoint.

        Raises: IntegrityError(BASE_MISSING, BASE_MISMATCH) and those of opening it; FormatError(REFERENCE_CLOSURE).
        """
        with self._lock:
            if reference not in self._opened:
                self._opened[reference] = self._find(reference)
            return self._opened[reference]

    def close(self) -> None:
        """Let go of what was opened."""
        with self._lock:
            for checkpoint in self._opened.values():
                checkpoint.close()

    def _find(self, reference: Reference) -> Checkpoint:
        self._check_listed({reference})
        store = self.find(reference)
        try:
            checkpoint = self._open_base(store, reference, self)
        except CkptError as error:
            raise error.below(reference.name) from error
        # What it reads from is then listed as well, and fewer than here: no chain is endless, and none has a ring.
        self._check_listed(set(checkpoint.manifest.references))
        return checkpoint

    def _check_listed(self, needed: set[Reference]) -> None:
        missing = sorted(reference.name for reference in needed - self._references)
        if missing:
            raise err(
                Code.REFERENCE_CLOSURE,
                f"it reads from {', '.join(missing)}, which its manifest doesn't list",
                where=f"{MANIFEST_NAME}#/signed/references",
                requirement="REQ-DEL-021",
            )

    def find(self, reference: Reference) -> Store:
        """Return where a checkpoint lies that has the digest. Raises: IntegrityError(BASE_MISSING, BASE_MISMATCH)."""
        found: list[str] = []
        elsewhere = (place for base in self._bases for place in (base, base.at(reference.name)))
        for place in (self._store.beside(reference.name), *elsewhere):
            try:
                register = read_register(place)
            except (FormatError, IntegrityError, UnsupportedError) as error:
                found.append(f"{place.name}: {error.code}")
                continue
            if isinstance(register, Manifest) and register.digest == reference.digest:
                return place
            if register is not None:
                kind = register.digest if isinstance(register, Manifest) else type(register).__name__.lower()
                found.append(f"{place.name}: {kind}")
        code = Code.BASE_MISMATCH if found else Code.BASE_MISSING
        detail = f"{reference.digest} isn't there" + (f"; found {'; '.join(found)}" if found else "")
        raise err(code, detail, where=reference.name, requirement="REQ-DEL-020")


class Library:
    """The files of a checkpoint and of those that it reads from, each under a path of its own.

    Its own files have their names as paths, those of others the name of the checkpoint before.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._files: dict[str, tuple[Checkpoint, Part, str]] = {}

    def add(self, checkpoint: Checkpoint, part: Part, name: str) -> str:
        """Return the path of a file."""
        path = name
        if checkpoint is not self._checkpoint:
            path = f"{checkpoint.title}/{name}"
            known = self._files.get(path)
            if known is not None and known[0] is not checkpoint:
                path = f"{checkpoint.digest}/{name}"
        self._files[path] = checkpoint, part, name
        return path

    def range_of(self, run: Run, piece: int) -> BlockRange:
        """Return where the blocks of a run are, which are raw; `piece` is a number of the caller's."""
        assert run.extent.file is not None  # noqa: S101 - raw blocks are in a file
        part = run.opened.part
        block_nbytes = part.origin.block_nbytes
        return BlockRange(
            path=self.add(run.opened.checkpoint, part, part.files[run.extent.file].name),
            byte_begin=run.extent.byte_begin + (run.first - run.extent.block_begin) * block_nbytes,
            nbytes=min(run.last * block_nbytes, run.box.nbytes) - run.first * block_nbytes,
            piece=piece,
            piece_byte_begin=run.first * block_nbytes,
        )

    def range_of_block(self, stored: StoredBlock, piece: int) -> BlockRange:
        """Return where the bytes of a block are, however it is stored; `piece` is a number of the caller's."""
        return BlockRange(
            path=self.add(stored.opened.checkpoint, stored.opened.part, stored.name),
            byte_begin=stored.byte_begin,
            nbytes=stored.nbytes,
            piece=piece,
            piece_byte_begin=0,
        )

    def read(self, request: Request) -> memoryview:
        """Return what a request asks for; see `Store.read_range`."""
        checkpoint, _, name = self._files[request.path]
        return memoryview(checkpoint.store.read_range(name, request.byte_begin, request.nbytes))

    def check(self, path: str) -> None:
        """Compare size and header of a file with its part, once. Raises: IntegrityError. Spec: REQ-OPN-011."""
        checkpoint, part, name = self._files[path]
        checkpoint.check_file(part, name)

    def open_ranges(self, path: str) -> AbstractContextManager[RangeReader]:
        """Open a file; see `Store.open_ranges`."""
        checkpoint, _, name = self._files[path]
        return checkpoint.store.open_ranges(name)

    def waits(self, path: str) -> bool:
        """Return whether reads of a file wait; see `Store.waits`."""
        checkpoint, _, name = self._files[path]
        return checkpoint.store.waits(name)
