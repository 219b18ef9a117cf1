"""The chain of one saver's saves: each is full, or a delta of the last committed save."""

from __future__ import annotations

import dataclasses
import time
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ckptfmt.codecs import encodings
from ckptfmt.commit.decision import Known
from ckptfmt.delta.base import Base, pin_base
from ckptfmt.delta.coders import Coders
from ckptfmt.delta.delta import Delta
from ckptfmt.delta.policy import DeltaOptions, SaveMeasurements, SavePlan, plan_save
from ckptfmt.digest import DIGEST_NBYTES
from ckptfmt.documents.extents import RAW, SAME
from ckptfmt.documents.manifest import Manifest, Origin, Reference, checkpoint_name, pins_path
from ckptfmt.documents.part import Part
from ckptfmt.errors import IntegrityError, StoreError
from ckptfmt.store.protocol import Store
from ckptfmt.write.image import Image
from ckptfmt.write.slot_contents import SlotContents, Snapped
from ckptfmt.write.writer import removed_after_error, write_image, write_part_file

#: Most written saves to remember before their commit is known; failed saves are among them.
_WRITTEN_COUNT: Final = 64
#: Smallest image for which coder processes start, in bytes: less takes less time to encode.
_LEAST_NBYTES: Final = 32 << 20


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class _Link:
    """A save of the chain.

    Attributes:
        digests: digests of the blocks of each piece of the image.
        read_nbytes: number of bytes for a restore to read, for each block.
        decoded_nbytes: number of content bytes for a restore to decode, for each block.
    """

    snapped: Snapped
    part: Part
    digests: list[bytes]
    read_nbytes: NDArray[np.int64]
    decoded_nbytes: NDArray[np.int64]
    manifest: Manifest | None = None


class Chain:
    """A saver's memory of its saves: the last committed save, and the measured costs.

    Args:
        coders: processes for encoding blocks, if the saver may use some.
        known: documents already parsed by the saver.
    """

    def __init__(self, coders: Coders | None = None, known: Known | None = None) -> None:
        self._coders = coders
        self._known = known
        self.history = SaveMeasurements()
        self._last: _Link | None = None  # the last committed save
        #: Written saves, not yet known to be committed, by attempt, the oldest first.
        self._written: dict[str, _Link] = {}
        #: Image and digests of each slot's contents, by slot number, until the slot is filled
        #: again.
        self._in_slots: dict[int, tuple[Image, list[bytes]]] = {}

    def write(
        self,
        store: Store,
        origin: Origin,
        writer: int,
        snapped: Snapped,
        *,
        options: DeltaOptions,
        home: Store | None = None,
    ) -> SavePlan:
        """Write a snapshot's files and its part, in full or as a delta.

        Args:
            store: store of the checkpoint's directory.
            home: store of the same directory where bases are read and pins are written, if another
                than `store`. If `home` fails, the save is full.

        Returns: the decision, with its reason.
        Raises: StoreError; errors of waiting for the slot.
        """
        begin_s = time.monotonic()
        while len(self._written) >= _WRITTEN_COUNT:
            del self._written[next(iter(self._written))]
        image, held = self._in_slots.pop(snapped.slot, (None, None))
        held = held if image is snapped.image else None
        plan, base = self._plan(snapped, options, origin.launch)
        if options.mode == "smallest":
            self._start_coders(snapped.image)  # this mode encodes every delta
        if (fields := plan.fields) is not None and base is not None:
            try:
                references = pin_base(home or store, origin, writer, base, known=self._known)
            except (IntegrityError, StoreError) as error:
                if isinstance(error, StoreError) and home is None:
                    raise
                plan = SavePlan(fields=None, reason=f"the base can't be had: {error}")
            else:
                # Without a part there is no reader of the bases, and forgotten pins would protect
                # them.
                with removed_after_error(home or store, [pins_path(origin.attempt, writer)]):
                    delta = Delta(
                        home or store,
                        snapped,
                        base=base,
                        references=references,
                        fields=fields,
                        among=encodings.ENCODINGS
                        if options.mode == "smallest"
                        else encodings.QUICK,
                        coders=self._coders,
                        held=held,
                    )
                    link = self._write_delta(
                        delta, store, origin, writer, begin_s=begin_s, mode=options.mode
                    )
                self._written[origin.attempt] = link
                self._in_slots[snapped.slot] = snapped.image, link.digests
                return plan
        with SlotContents(snapped, held) as contents:
            part = write_image(
                store, snapped.image, contents, origin, snapped.context, writer=writer
            )
        nbytes = _content_nbytes(snapped.image)
        link = _Link(
            snapped=snapped,
            part=part,
            digests=contents.digests(),
            read_nbytes=nbytes,
            decoded_nbytes=np.zeros_like(nbytes),
        )
        self._written[origin.attempt] = link
        self._in_slots[snapped.slot] = snapped.image, link.digests
        seconds = time.monotonic() - begin_s
        self.history.note_full(
            nbytes=int(nbytes.sum()), seconds=seconds, unchanged=self._unchanged(link, nbytes)
        )
        if plan_save(options, self.history, base_reference_count=0).fields:
            self._start_coders(snapped.image)  # ready for the next save, which may be a delta
        return plan

    def commit(self, manifest: Manifest) -> None:
        """Record that a save is committed: the next save may be a delta of it.

        Earlier saves are forgotten.
        """
        attempt = manifest.origin.attempt
        if attempt in self._written:
            behind = list(self._written)[list(self._written).index(attempt) + 1 :]
            self._last = self._written[attempt]
            self._last.manifest = manifest
            self._written = {later: self._written[later] for later in behind}

    def _plan(
        self, snapped: Snapped, options: DeltaOptions, launch: int | None
    ) -> tuple[SavePlan, Base | None]:
        last = self._last
        if last is None or last.manifest is None or last.snapped.image is not snapped.image:
            return plan_save(options, self.history, base_reference_count=None), None
        origin = last.manifest.origin
        is_taken = last.snapped.slot == snapped.slot
        # Outside a run, any base may be deleted. A base of another launch may be a save of steps
        # that a rewind has abandoned.
        if origin.launch is None or origin.launch != launch:
            return plan_save(options, self.history, base_reference_count=None), None
        base = Base(
            reference=Reference(
                name=checkpoint_name(origin.step, origin.launch), digest=last.manifest.digest
            ),
            manifest=last.manifest,
            part=last.part,
            digests=last.digests,
            view=None if is_taken else last.snapped.view,
            slot=None if is_taken else last.snapped.slot,
        )
        return plan_save(
            options, self.history, base_reference_count=len(last.manifest.references)
        ), base

    def _write_delta(
        self, delta: Delta, store: Store, origin: Origin, writer: int, *, begin_s: float, mode: str
    ) -> _Link:
        assert self._last is not None  # noqa: S101
        snapped = delta.snapped
        try:
            part = delta.write(store, origin, writer)
            snapped.progress.wait_complete()
            snapped.check(delta.digests)
        finally:
            delta.close()
        write_part_file(store, part)
        nbytes = _content_nbytes(snapped.image)
        encoding = delta.verdicts["encoding"]
        own = delta.verdicts["nbytes"]
        is_raw = encoding == RAW
        is_same = encoding == SAME
        encoded_nbytes = np.where(is_raw | is_same, 0, nbytes)
        link = _Link(
            snapped=snapped,
            part=part,
            digests=delta.digests,
            read_nbytes=np.where(is_raw, own, own + self._last.read_nbytes),
            decoded_nbytes=np.where(is_raw, 0, self._last.decoded_nbytes + encoded_nbytes),
        )
        self.history.note_delta(
            seconds=time.monotonic() - begin_s,
            unchanged=int(nbytes[is_same].sum()) / max(self.history.nbytes, 1),
            stored_nbytes=int(own.sum()),
            encoded_nbytes=int(encoded_nbytes.sum()),
            decode_s=delta.decode_s,
            restore_nbytes=int(link.read_nbytes.sum()),
            decoded_nbytes=int(link.decoded_nbytes.sum()),
            mode=mode,
        )
        return link

    def _start_coders(self, image: Image) -> None:
        if self._coders is not None and image.nbytes >= _LEAST_NBYTES:
            self._coders.start()

    def _unchanged(self, link: _Link, nbytes: NDArray[np.int64]) -> float:
        """Return the share of bytes in blocks equal to those of the last save."""
        last = self._last
        if last is None or last.snapped.image is not link.snapped.image:
            return 0.0
        old, new = (
            np.frombuffer(b"".join(one.digests), np.uint8).reshape(-1, DIGEST_NBYTES)
            for one in (last, link)
        )
        equal = (old == new).all(axis=1)
        return float(nbytes[equal].sum() / max(int(nbytes.sum()), 1))


def _content_nbytes(image: Image) -> NDArray[np.int64]:
    """Return the size of each block of an image in bytes, in the order of pieces."""
    sizes = [
        min(image.block_nbytes, piece.end - begin)
        for piece in image.pieces
        for begin in range(piece.begin, piece.end, image.block_nbytes)
    ]
    return np.array(sizes, np.int64)
