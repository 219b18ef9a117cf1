"""The coder processes, which digest and encode blocks for a saver, and their client.

Without coder processes the saver encodes by itself. A saver starts one per processor:
arithmetic on small arrays gains no time from several threads of a Python process.
A coder is ``python -m ckptfmt.delta.coders FD``. A coder reads slots and no store, so that the
saver itself encodes blocks if their base is no longer in a slot.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Collection, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ckptfmt.codecs.rule import Rule
from ckptfmt.delta.base import Base, BaseContents
from ckptfmt.delta.block_coder import UNDECIDED, VERDICT, BlockCoder, PlannedGroup, dump_rules
from ckptfmt.documents.extents import RAW
from ckptfmt.write.helper_process import Channel, be_helper, start_helper, watch
from ckptfmt.write.image import Image
from ckptfmt.write.slot import Slot
from ckptfmt.write.slot_contents import Snapped

#: Coders allocate and free arrays of a block's size all the time: malloc keeps the memory.
_ENVIRONMENT: Final = {
    "MALLOC_MMAP_THRESHOLD_": str(64 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(128 << 20),
}
#: Longest wait for the answer to a few blocks, in seconds: a thousand times the usual time. After
#: that the saver encodes the blocks by itself.
_PATIENCE_S: Final = 60.0


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class _Coder:
    """A coder process, seen from the saver.

    Attributes:
        slots: slots sent to the process, by number.
        image: image sent to the process last.
        results: shared memory in which the process leaves encoded bytes; None before its first
            answer.
    """

    process: subprocess.Popen[bytes]
    channel: Channel
    slots: dict[int, Slot]
    image: Image | None = None
    results: Slot | None = None


class Coders:
    """The coder processes of a saver: one per processor, at most eight; none before `start`.

    Deltas are coded one at a time. Several threads may code blocks of the same delta.
    """

    def __init__(self) -> None:
        self._slots: dict[int, Slot] = {}
        self._all: list[_Coder] = []
        self._idle: list[_Coder] = []
        #: Queues of threads waiting for a process, in order of arrival: a stream waits for its
        #: oldest batch.
        self._waiting: collections.deque[queue.SimpleQueue[_Coder | None]] = collections.deque()
        self._alive_count = 0
        self._has_started = False
        self._lock = threading.Lock()

    def add_slot(self, number: int, slot: Slot) -> None:
        """Register a slot under a number, in place of the previous slot of that number."""
        self._slots[number] = slot

    def start(self) -> None:
        """Start the processes and return at once. Where starting fails, the saver encodes alone."""
        count = coder_count()
        if self._has_started or count < 2:
            return
        self._has_started = True
        with contextlib.suppress(OSError):
            for _ in range(count):
                process, channel = start_helper("ckptfmt.delta.coders", environment=_ENVIRONMENT)
                coder = _Coder(process=process, channel=channel, slots={})
                self._all.append(coder)
                channel.limit_waits(_PATIENCE_S)
                self._send_slots(coder, *self._slots)

    def begin(
        self,
        snapped: Snapped,
        base: Base,
        base_slot: int,
        *,
        groups: Sequence[PlannedGroup],
        fields: Collection[str],
        among: Sequence[str],
    ) -> None:
        """Announce a delta to all processes, before the blocks are sent.

        Args:
            snapped: snapshot to encode.
            base: base of the delta.
            base_slot: number of the slot of the base.
            groups: groups of pieces that are predicted from each other.
            fields: fields in which changed blocks are encoded.
            among: candidate encodings.
        """
        image = snapped.image
        slot = snapped.slot
        self._idle = []
        self._alive_count = 0
        message = {
            "type": "delta",
            "slot": slot,
            "base_slot": base_slot,
            "digests": list(base.digests),
            "groups": _dump_groups(groups),
            "fields": sorted(fields),
            "among": list(among),
        }
        for coder in self._all:
            is_told = False
            try:
                self._send_slots(coder, slot, base_slot)
                if coder.image is not image:
                    coder.channel.send({"type": "image", "image": image.as_dict()})
                    coder.image = image
                coder.channel.send(message)
                is_told = True
            except OSError:
                continue  # the process is gone
            finally:
                if not is_told:
                    coder.channel.shut_down()  # the message may be incomplete
            self._idle.append(coder)
            self._alive_count += 1

    def code(
        self, blocks: Sequence[tuple[int, int]], nbytes: int
    ) -> dict[tuple[int, int], tuple[Any, bytes]]:
        """Return the verdict and the encoded bytes of blocks, by block. Waits for a free process.

        Args:
            blocks: numbers of piece and block, for each block. The caller codes the blocks
                missing in the result.
            nbytes: size of the blocks' contents in bytes, an upper bound of the encoded size.
        """
        coder = self._take()
        coded = None
        if coder is not None:
            try:
                coded = self._ask(coder, blocks, nbytes)
            finally:
                # After an error the next answer may belong to an earlier question.
                self._lose(coder) if coded is None else self._give_back(coder)
        return coded or {}

    def _ask(
        self, coder: _Coder, blocks: Sequence[tuple[int, int]], nbytes: int
    ) -> dict[tuple[int, int], tuple[Any, bytes]] | None:
        """Return a process's answer for blocks; None if the process is gone."""
        message = {"type": "blocks", "blocks": [list(at) for at in blocks], "room_nbytes": nbytes}
        try:
            coder.channel.send(message)
            received = coder.channel.receive()
        except OSError:
            return None
        if received is None:
            return None
        told, fd = received
        if fd is not None:
            coder.results = Slot.attach(fd)
        assert coder.results is not None  # noqa: S101
        verdicts = np.frombuffer(told["verdicts"], VERDICT)
        encoded = np.where(
            (verdicts["encoding"] == RAW) | (verdicts["encoding"] == UNDECIDED),
            0,
            verdicts["nbytes"],
        )
        ends = np.cumsum(encoded).tolist()
        stored = [
            bytes(coder.results.view[end - size : end])
            for end, size in zip(ends, encoded.tolist(), strict=True)
        ]
        rows = zip(blocks, verdicts, stored, strict=True)
        return {
            at: (verdict, content)
            for at, verdict, content in rows
            if verdict["encoding"] != UNDECIDED
        }

    def close(self) -> None:
        """Stop the processes and wait until they have exited."""
        for coder in self._all:
            coder.channel.shut_down()
            coder.channel.close()
        for coder in self._all:
            try:
                coder.process.wait(_PATIENCE_S)
            except subprocess.TimeoutExpired:  # a suspended process, for example
                coder.process.kill()
                coder.process.wait()
        self._all = []

    def _take(self) -> _Coder | None:
        """Wait for a free process; return None if all are gone or the wait is too long."""
        with self._lock:
            if self._idle or not self._alive_count:
                return self._idle.pop() if self._idle else None
            place: queue.SimpleQueue[_Coder | None] = queue.SimpleQueue()
            self._waiting.append(place)
        with contextlib.suppress(queue.Empty):
            return place.get(timeout=_PATIENCE_S)
        with self._lock, contextlib.suppress(ValueError):
            self._waiting.remove(place)
        return None if place.empty() else place.get()  # a process freed since the timeout

    def _give_back(self, coder: _Coder) -> None:
        """Hand a process to the longest waiting thread, or mark the process as free."""
        with self._lock:
            if self._waiting:
                self._waiting.popleft().put(coder)
            else:
                self._idle.append(coder)

    def _lose(self, coder: _Coder) -> None:
        """Drop a process. After the last process, wake up all waiting threads."""
        coder.channel.shut_down()
        with self._lock:
            self._alive_count -= 1
            while self._waiting and not self._alive_count:
                self._waiting.popleft().put(None)

    def _send_slots(self, coder: _Coder, *numbers: int) -> None:
        """Send a process the slots that it lacks."""
        for number in numbers:
            slot = self._slots[number]
            if coder.slots.get(number) is not slot:
                coder.channel.send({"type": "slot", "slot": number}, fd=slot.fd)
                coder.slots[number] = slot


def _dump_groups(groups: Sequence[PlannedGroup]) -> list[list[Any]]:
    """Return each rule once, with the pieces of all groups that use the rule."""
    pieces: dict[int, list[list[int]]] = collections.defaultdict(list)
    for group in groups:
        pieces[id(group.rule)].append(list(group.pieces))
    return [[rule, pieces[number]] for number, rule in dump_rules(groups).items()]


def coder_count() -> int:
    """Return how many blocks are encoded at once.

    More processes take more from the training, for a shorter time.
    """
    return max(1, min(8, len(os.sched_getaffinity(0))))


# --- in the process -------------------------------------------------------------------------------


def main(fd: int) -> None:
    """Serve the saver at the other end of the socket `fd` until it is gone."""
    channel = be_helper(fd)
    watch(os.getppid(), channel)
    with contextlib.suppress(OSError):  # the saver is gone, and needs no answer
        _serve(channel)


def _serve(channel: Channel) -> None:
    slots: dict[int, Slot] = {}
    image: Image | None = None
    coder: BlockCoder | None = None
    results: Slot | None = None
    while (received := channel.receive()) is not None:
        message, slot_fd = received
        if slot_fd is not None:
            slots[message["slot"]] = slot = Slot.attach(slot_fd)
            slot.touch()
        elif message["type"] == "image":
            image = Image.from_dict(message["image"])
        elif message["type"] == "delta":
            assert image is not None  # noqa: S101
            coder = _make_coder(message, image, slots)
        else:
            assert coder is not None  # noqa: S101
            room_nbytes = message["room_nbytes"]
            fd = None
            if results is None or results.nbytes < room_nbytes:
                results = Slot.make(room_nbytes)
                fd = results.fd
            verdicts = _code_all(coder, message["blocks"], results.view)
            channel.send({"verdicts": verdicts.tobytes()}, fd=fd)


def _make_coder(message: dict[str, Any], image: Image, slots: dict[int, Slot]) -> BlockCoder:
    contents = BaseContents(
        image, message["digests"], slots[message["base_slot"]].view, otherwise=_refuse
    )
    rules = [(Rule.parse(rule, "delta"), rows) for rule, rows in message["groups"]]
    groups = [
        PlannedGroup(rule=rule, pieces=tuple(pieces)) for rule, rows in rules for pieces in rows
    ]
    view = slots[message["slot"]].view
    fields = frozenset(message["fields"])
    among = message["among"]
    return BlockCoder(image, view, contents=contents, groups=groups, fields=fields, among=among)


def _refuse(piece: int, block: int) -> memoryview:
    raise LookupError(f"block {block} of piece {piece} isn't in the base's slot any more")


def _code_all(coder: BlockCoder, blocks: list[list[int]], results: memoryview) -> NDArray[Any]:
    """Write the encoded bytes of blocks into `results`, end to end, and return all verdicts.

    If the coding of a block fails for any reason, the block stays undecided, and the saver codes
    it.
    """
    verdicts = np.zeros(len(blocks), VERDICT)
    verdicts["encoding"] = UNDECIDED
    begin = 0
    for row, (piece, block) in enumerate(blocks):
        with contextlib.suppress(Exception):  # the saver meets and reports the same error
            verdict, stored = coder.code(piece, block)
            results[begin : begin + len(stored)] = stored
            verdicts[row] = verdict
            begin += len(stored)
    return verdicts


if __name__ == "__main__":
    main(int(sys.argv[1]))
