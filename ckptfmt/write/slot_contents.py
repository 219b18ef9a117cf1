"""A snapshot in a slot, as the saver reads it during the filling: progress, bytes and digests."""

from __future__ import annotations

import dataclasses
import itertools
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, Self

from ckptfmt.digest import block_digests, digest_at
from ckptfmt.errors import CkptError, Code, err
from ckptfmt.store.protocol import Buffer
from ckptfmt.write.image import Context, Image
from ckptfmt.write.staging import Seen

#: Size of a chunk handed to the store, in bytes: the length of one store request.
_CHUNK_NBYTES: Final = 16 << 20
#: Size of a span that a thread hashes at once, in bytes.
_SPAN_NBYTES: Final = 8 << 20


class FillProgress:
    """The length of the filled prefix of a slot's image, in bytes.

    One thread updates the length, other threads wait.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._nbytes = 0
        self._seen: dict[int, Seen] = {}
        self._complete = False
        self._error: CkptError | None = None

    def advance(self, nbytes: int, seen: Iterable[Seen] = ()) -> None:
        """Record that the first `nbytes` bytes are filled, and add comparison results."""
        with self._changed:
            self._seen.update((one.begin, one) for one in seen)
            self._nbytes = max(self._nbytes, nbytes)
            self._changed.notify_all()

    def complete(self) -> None:
        """Record that the slot is filled with a consistent snapshot."""
        with self._changed:
            self._complete = True
            self._changed.notify_all()

    def abandon(self, error: CkptError) -> None:
        """Record a snapshot as incomplete for good. Has no effect after `complete`."""
        with self._changed:
            if not self._complete and self._error is None:
                self._error = error
                self._changed.notify_all()

    def seen(self, begin: int) -> Seen | None:
        """Return the comparison result of a piece; None if the piece was copied without comparison.

        Valid once the piece is filled.

        Args:
            begin: the piece's first byte in the image.
        """
        return self._seen.get(begin)

    def wait(self, nbytes: int) -> None:
        """Wait until the first `nbytes` bytes are filled. Raises: the error of `abandon`."""
        self._wait_for(lambda: self._complete or self._nbytes >= nbytes)

    def wait_complete(self) -> None:
        """Wait until the snapshot is complete. Raises: the error of `abandon`."""
        self._wait_for(lambda: self._complete)

    def _wait_for(self, is_there: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or is_there())
            if self._error is not None:
                raise self._error


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Snapped:
    """A snapshot in a slot during the filling.

    Attributes:
        image: the snapshot's layout.
        view: the slot's memory, at least as long as the image.
        slot: the slot's number.
        context: the part's contents except tensors.
        progress: progress of the filling.
    """

    image: Image
    view: memoryview
    slot: int
    context: Context
    progress: FillProgress

    def check(self, digests: Sequence[bytes], held: Sequence[bytes] | None = None) -> None:
        """Compare the slot's contents with the results found while the slot was filled.

        For a piece digested by a device, the digests must be the device's. A block that was
        skipped because the slot already held it must have the same digest as before this filling.

        Args:
            digests: for each piece, digests of its blocks in the slot.
            held: for each piece, digests of its blocks before this filling; None to skip this
                comparison.

        Raises: StateError(STATE_CHANGED). Spec: REQ-CMT-028.
        """
        for number, (piece, now) in enumerate(zip(self.image.pieces, digests, strict=True)):
            seen = self.progress.seen(piece.begin) if piece.end > piece.begin else None
            if seen is None:
                continue
            where = ":".join(piece.key[:2])
            if seen.digests and seen.digests != now:
                detail = (
                    "the tensor's copy differs from the device's contents at the call of the save"
                )
                raise err(Code.STATE_CHANGED, detail, where=where, requirement="REQ-CMT-028")
            before = now if held is None else held[number]
            for block in itertools.compress(itertools.count(), seen.kept if before != now else b""):
                if digest_at(now, block) != digest_at(before, block):
                    raise err(
                        Code.STATE_CHANGED,
                        (
                            f"block {block} of the tensor's copy changed since an earlier save, but"
                            " no copy was made"
                        ),
                        where=where,
                        requirement="REQ-CMT-028",
                        remedy=(
                            "The next save copies all. If the error recurs, look for code that"
                            " writes into the slot."
                        ),
                    )


class SlotContents:
    """The bytes of a snapshot in a slot; implements `ckptfmt.write.writer.Contents`.

    Separate threads compute the digests, because hashing takes longer than writing on fast storage.
    They start when half of the image is filled: until then the training waits for the copies, and
    hashing would take memory bandwidth from them.

    Args:
        held: digests of the slot's contents before this filling, if known.
    """

    #: Two shards at once keep the network link busy: parts of the next shard are sent while the
    #: upload of the previous shard is completed.
    shards_at_once = 2

    def __init__(self, snapped: Snapped, held: Sequence[bytes] | None = None) -> None:
        self._snapped = snapped
        self._image = image = snapped.image
        self._view = snapped.view
        self._progress = snapped.progress
        self._held = held
        span_nbytes = max(_SPAN_NBYTES, image.block_nbytes)
        self._spans = [
            (number, begin, min(begin + span_nbytes, piece.end))
            for number, piece in enumerate(image.pieces)
            for begin in range(piece.begin, piece.end, span_nbytes)
        ]
        self._digests = [b""] * len(self._spans)
        self._found: list[bytes] | None = None
        self._error: BaseException | None = None
        # Shared by the threads: each step of the iterator is atomic.
        self._rest = iter(range(len(self._spans)))
        self._threads = [
            threading.Thread(target=self._hash_rest, name="ckptfmt-hash", daemon=True)
            for _ in range(min(_hash_thread_count(), len(self._spans)))
        ]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            # Otherwise the hashing threads would wait for bytes that may never be staged.
            self._progress.abandon(err(Code.WRITER_FAILED, "this save has failed"))
        self._join()

    def iter_chunks(self, shard: int) -> Iterator[Buffer]:
        """Yield the bytes of a shard as the slot is filled."""
        found = self._image.shards[shard]
        end = found.begin + found.nbytes
        for begin in range(found.begin, end, _CHUNK_NBYTES):
            self._progress.wait(min(begin + _CHUNK_NBYTES, end))
            yield self._view[begin : min(begin + _CHUNK_NBYTES, end)]

    def digests(self) -> list[bytes]:
        """Wait until the snapshot is complete, and return the digests of each piece.

        Raises: StateError(STATE_CHANGED).
        """
        if self._found is None:
            self._found = self._find_digests()
        return self._found

    def _find_digests(self) -> list[bytes]:
        self._progress.wait_complete()
        self._hash_rest()  # this thread has written all chunks and now helps to hash
        self._join()
        if self._error is not None:
            raise self._error
        found: list[list[bytes]] = [[] for _ in self._image.pieces]
        for (number, _, _), digest in zip(self._spans, self._digests, strict=True):
            found[number].append(digest)
        digests = [b"".join(of_piece) for of_piece in found]
        self._snapped.check(digests, self._held)
        return digests

    def _join(self) -> None:
        """Wait until the threads end: all spans are hashed, or the snapshot is abandoned."""
        for thread in self._threads:
            thread.join()

    def _hash_rest(self) -> None:
        try:
            self._progress.wait(self._image.nbytes // 2)
            for span in self._rest:
                _, begin, end = self._spans[span]
                self._progress.wait(end)
                self._digests[span] = block_digests(self._view[begin:end], self._image.block_nbytes)
        except BaseException as error:  # noqa: BLE001
            self._error = error


def _hash_thread_count() -> int:
    """Return the number of hashing threads: one for four cores, from 1 to 4.

    Each thread takes a core from the training.
    """
    return max(1, min(4, len(os.sched_getaffinity(0)) // 4))
