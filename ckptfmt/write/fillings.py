"""What the slots of a trainer hold, block by block, so that what is there already isn't copied again, nor digested.

A slot is filled with the same image again and again, and of a model that is adapted most stays as it was.

Of a tensor of the host, whoever copies a block keeps the checksum of what lies in the slot then; the next time the
tensor's block is read, and nothing else, to find that it is the same. A block whose first bytes aren't those of the
last save has changed for certain. Where all blocks of a tensor have, it is copied without more ado: training that
changes everything at every step pays next to nothing.

Of a tensor of a device, digests of its blocks are computed where it lives. Blocks whose digests are those of the last
filling needn't cross the bus again. So what a slot holds is always a whole snapshot: whoever reads it needn't know how
it came there.

The checksums are XXH3's of 128 bits, at the rate at which memory is read. XXH3 isn't cryptographic: given its seed,
anybody can make two contents with one checksum. The seed is random, drawn for each trainer and kept in its memory; the
checksums leave the process nowhere. What is stored has BLAKE3's digests, as ever. See
``spec/decisions/2026-11-22-slot-digests.md``.
"""

from __future__ import annotations

import dataclasses
import functools
import secrets
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128_digest

from ckptfmt.digest import DIGEST_NBYTES, iter_blocks
from ckptfmt.write.image import Image

#: How many bytes of a block are compared with those of the last save before all of it is read.
_SAMPLE_NBYTES: Final = 1024
#: For how many fillings at most a tensor of a device is only copied. Dense training changes every block at every step,
#: and then digests tell nothing; what is left of looking after it is two of 18 fillings.
_LONGEST_PAUSE: Final = 16


@dataclasses.dataclass(slots=True, eq=False)
class DeviceTensor:
    """What a slot holds of one tensor of a device.

    Attributes:
        held: digests of its blocks, of shape (blocks, 32), before it is filled; None where they aren't known.
        found: those of what it is being filled with; None where nobody looks.
    """

    held: NDArray[np.uint8] | None = None
    found: NDArray[np.uint8] | None = None
    _pause: int = 0
    _rest: int = 0

    def begin(self, *, was_written: bool) -> None:
        """Prepare for the next filling; see `Fillings.begin`."""
        self.held, self.found = self.found if was_written else None, None

    def is_due(self) -> bool:
        """Tell whether to look at this filling; to be asked once."""
        if self._rest:
            self._rest -= 1
            return False
        return True

    def compare(self, digests: bytes) -> NDArray[np.bool_]:
        """Take the digests of what it is filled with; return for each block whether the slot has it."""
        self.found = np.frombuffer(digests, np.uint8).reshape(-1, DIGEST_NBYTES)
        if self.held is None:
            return np.zeros(len(self.found), np.bool_)
        kept: NDArray[np.bool_] = (self.found == self.held).all(axis=1)
        self._pause = 0 if kept.any() else min(max(1, 2 * self._pause), _LONGEST_PAUSE)
        self._rest = self._pause
        return kept


class Filling:
    """One filling of a slot. Its pieces may be copied by several threads, each piece by one.

    The next filling, of another slot, may begin before this one has ended; they share the samples, which only say where
    it is useless to look.

    Args:
        block_nbytes: size of the blocks of a piece in bytes.
        before: by first byte of the piece in the image, the checksums of the blocks that the slot holds, if they are
            known.
        on_devices: by first byte, what the slot holds of tensors of devices.
        samples: by first byte, the checksums of the first bytes of its blocks at the last save, into whichever slot.
        checksum: of bytes; the same for all fillings that share slots and samples.

    Attributes:
        found: as `before`, of what the slot holds now.
    """

    def __init__(
        self,
        block_nbytes: int,
        before: dict[int, list[bytes]],
        on_devices: dict[int, DeviceTensor],
        samples: dict[int, list[bytes]],
        checksum: Callable[[memoryview], bytes],
    ) -> None:
        self._checksum = checksum
        self.block_nbytes = block_nbytes
        self._before = before
        self.on_devices = on_devices
        self._samples = samples
        self.found: dict[int, list[bytes]] = {}

    def copy_changed(
        self, begin: int, content: NDArray[np.uint8], place: NDArray[np.uint8], copy_all: Callable[[], None]
    ) -> bytes:
        """Copy those blocks of a piece that the slot doesn't have; return a byte for each block, 1 where it has it.

        Args:
            begin: first byte of the piece in the image.
            content: of the piece.
            place: of the piece in the slot.
            copy_all: copies all of it, by whatever is fastest.

        Raises: ValueError if the two aren't of one size.
        """
        if content.nbytes != place.nbytes:
            raise ValueError(f"{content.nbytes} bytes don't fill {place.nbytes}")
        source, slot = content.data, place.data
        blocks = list(iter_blocks(content.nbytes, self.block_nbytes))
        samples = [self._checksum(source[first : min(end, first + _SAMPLE_NBYTES)]) for first, end in blocks]
        last, self._samples[begin] = self._samples.get(begin, samples), samples
        moved = [one != other for one, other in zip(samples, last, strict=True)]
        if all(moved):
            copy_all()
            return bytes(len(blocks))
        held: Sequence[bytes | None] = self._before.get(begin) or [None] * len(blocks)
        found: list[bytes] = []
        kept = bytearray()
        for (first, end), has_moved, known in zip(blocks, moved, held, strict=True):
            if known is not None and not has_moved and self._checksum(source[first:end]) == known:
                kept.append(1)
                found.append(known)
                continue
            np.copyto(place[first:end], content[first:end])
            kept.append(0)
            # Of what is there now, whatever was written to the tensor meanwhile.
            found.append(self._checksum(slot[first:end]))
        self.found[begin] = found
        return bytes(kept)

    def watch(self, begin: int) -> DeviceTensor | None:
        """Return what is known of the device's tensor whose first byte is `begin`; None to copy it unseen."""
        tensor = self.on_devices.setdefault(begin, DeviceTensor())
        return tensor if tensor.is_due() else None


class Fillings:
    """What is known of the slots of a trainer."""

    def __init__(self) -> None:
        self._image: Image | None = None
        self._samples: dict[int, list[bytes]] = {}
        self._fillings: dict[int, Filling] = {}
        self._checksum: Callable[[memoryview], bytes] = functools.partial(xxh3_128_digest, seed=secrets.randbits(64))

    def begin(self, slot: int, image: Image, *, was_written: bool) -> Filling:
        """Return the next filling of a slot.

        Args:
            slot: its number.
            image: what it will hold.
            was_written: whether what it holds now was written by a save, so that nothing of it was left out, and the
                saver has compared it with what devices had found.
        """
        if image is not self._image:
            self._image, self._samples, self._fillings = image, {}, {}
        before = self._fillings.get(slot)
        held = before.found if before and was_written else {}
        on_devices = before.on_devices if before else {}
        for tensor in on_devices.values():
            tensor.begin(was_written=was_written)
        filling = Filling(image.block_nbytes, held, on_devices, self._samples, self._checksum)
        self._fillings[slot] = filling
        return filling
