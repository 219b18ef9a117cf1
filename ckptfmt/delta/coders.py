"""The processes that digest and encode blocks for a saver, and the way to them. Without them it does so by itself.

A saver starts as many as it has processors for: arithmetic on small arrays, by several threads of one Python process,
takes as long as by one. A coder is ``python -m ckptfmt.delta.coders FD``. It knows slots, and no store: what isn't in a
slot any more is encoded by the saver.
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
from ckptfmt.stage.helper_process import Channel, be_helper, start_helper, watch
from ckptfmt.stage.slot import Slot
from ckptfmt.write.image import Image
from ckptfmt.write.slot_contents import Snapped

#: A coder makes and drops arrays of a block's size all the time: the C library shall keep their memory.
_ENVIRONMENT: Final = {"MALLOC_MMAP_THRESHOLD_": str(64 << 20), "MALLOC_TRIM_THRESHOLD_": str(128 << 20)}
#: How long a process may take for a few blocks, in seconds, a thousand times as long as it does. Then the saver does
#: them itself.
_PATIENCE_S: Final = 60.0


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class _Coder:
    """One process.

    Attributes:
        slots: those that it has been sent.
        image: that it has been sent last.
        results: where it leaves what it stores of a block; None before it has said so.
    """

    process: subprocess.Popen[bytes]
    channel: Channel
    slots: dict[int, Slot]
    image: Image | None = None
    results: Slot | None = None


class Coders:
    """Processes that encode, as many as there are processors, at most eight; none before `start`.

    Deltas come one after the other; blocks of one may come from several threads.
    """

    def __init__(self) -> None:
        self._slots: dict[int, Slot] = {}
        self._all: list[_Coder] = []
        self._idle: list[_Coder] = []
        #: Of threads that wait for one, in the order in which they came: a stream waits for its oldest batch.
        self._waiting: collections.deque[queue.SimpleQueue[_Coder | None]] = collections.deque()
        self._alive_count = 0
        self._has_started = False
        self._lock = threading.Lock()

    def add_slot(self, number: int, slot: Slot) -> None:
        """Take note of a slot, in the place of the one of this number."""
        self._slots[number] = slot

    def start(self) -> None:
        """Start the processes, and don't wait for them. Where none can be started, there will be none."""
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
        """Tell all of the delta whose blocks come now.

        Args:
            snapped: the snapshot.
            base_slot: number of the slot that has the base.
            groups: pieces that are predicted from each other.
            fields: those whose changed blocks are encoded.
            among: encodings to choose from.
        """
        image, slot = snapped.image, snapped.slot
        self._idle, self._alive_count = [], 0
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
                continue  # it is gone
            finally:
                if not is_told:
                    coder.channel.shut_down()  # half a message may have been sent
            self._idle.append(coder)
            self._alive_count += 1

    def code(self, blocks: Sequence[tuple[int, int]], nbytes: int) -> dict[tuple[int, int], tuple[Any, bytes]]:
        """Return the verdicts of blocks, and what those store that are encoded. Waits for a process.

        Args:
            blocks: number of piece and block of each; the caller codes those that aren't in what is returned.
            nbytes: size of their content, all together: what is stored of them is no more.
        """
        coder, coded = self._take(), None
        if coder is not None:
            try:
                coded = self._ask(coder, blocks, nbytes)
            finally:
                # After an error nobody knows what it says next, and to which question.
                self._lose(coder) if coded is None else self._give_back(coder)
        return coded or {}

    def _ask(
        self, coder: _Coder, blocks: Sequence[tuple[int, int]], nbytes: int
    ) -> dict[tuple[int, int], tuple[Any, bytes]] | None:
        """Return what a process made of blocks; None if it is gone."""
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
        assert coder.results is not None  # noqa: S101 - the first answer has it
        verdicts = np.frombuffer(told["verdicts"], VERDICT)
        encoded = np.where((verdicts["encoding"] == RAW) | (verdicts["encoding"] == UNDECIDED), 0, verdicts["nbytes"])
        ends = np.cumsum(encoded).tolist()
        stored = [bytes(coder.results.view[end - size : end]) for end, size in zip(ends, encoded.tolist(), strict=True)]
        rows = zip(blocks, verdicts, stored, strict=True)
        return {at: (verdict, content) for at, verdict, content in rows if verdict["encoding"] != UNDECIDED}

    def close(self) -> None:
        """End the processes."""
        for coder in self._all:
            coder.channel.shut_down()
            coder.channel.close()
        for coder in self._all:
            try:
                coder.process.wait(_PATIENCE_S)
            except subprocess.TimeoutExpired:  # it is stopped, say
                coder.process.kill()
                coder.process.wait()
        self._all = []

    def _take(self) -> _Coder | None:
        """Return a process that has nothing to do, when there is one; None if there won't be."""
        with self._lock:
            if self._idle or not self._alive_count:
                return self._idle.pop() if self._idle else None
            place: queue.SimpleQueue[_Coder | None] = queue.SimpleQueue()
            self._waiting.append(place)
        with contextlib.suppress(queue.Empty):
            return place.get(timeout=_PATIENCE_S)
        with self._lock, contextlib.suppress(ValueError):
            self._waiting.remove(place)
        return None if place.empty() else place.get()  # it came just now

    def _give_back(self, coder: _Coder) -> None:
        """Hand a process to who has waited longest."""
        with self._lock:
            if self._waiting:
                self._waiting.popleft().put(coder)
            else:
                self._idle.append(coder)

    def _lose(self, coder: _Coder) -> None:
        """Have nothing to do with a process any more; with the last one nobody has to wait any more."""
        coder.channel.shut_down()
        with self._lock:
            self._alive_count -= 1
            while self._waiting and not self._alive_count:
                self._waiting.popleft().put(None)

    def _send_slots(self, coder: _Coder, *numbers: int) -> None:
        """Send what a coder doesn't have yet."""
        for number in numbers:
            slot = self._slots[number]
            if coder.slots.get(number) is not slot:
                coder.channel.send({"type": "slot", "slot": number}, fd=slot.fd)
                coder.slots[number] = slot


def _dump_groups(groups: Sequence[PlannedGroup]) -> list[list[Any]]:
    """Return each rule, of which there are few, with the pieces of its groups, of which there are many."""
    pieces: dict[int, list[list[int]]] = collections.defaultdict(list)
    for group in groups:
        pieces[id(group.rule)].append(list(group.pieces))
    return [[rule, pieces[number]] for number, rule in dump_rules(groups).items()]


def coder_count() -> int:
    """Return how many blocks are encoded at once: what that takes from the training it takes for a shorter time."""
    return max(1, min(8, len(os.sched_getaffinity(0))))


# --- in the process ---------------------------------------------------------------------------------------------------


def main(fd: int) -> None:
    """Serve the saver at the other end of the socket `fd` until it is gone."""
    channel = be_helper(fd)
    watch(os.getppid(), channel)
    with contextlib.suppress(OSError):  # the saver is gone: there is nobody to tell
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
            assert image is not None  # noqa: S101 - the saver sends it first
            coder = _make_coder(message, image, slots)
        else:
            assert coder is not None  # noqa: S101 - the saver sends image and delta first
            room_nbytes, fd = message["room_nbytes"], None
            if results is None or results.nbytes < room_nbytes:
                results = Slot.make(room_nbytes)
                fd = results.fd
            verdicts = _code_all(coder, message["blocks"], results.view)
            channel.send({"verdicts": verdicts.tobytes()}, fd=fd)


def _make_coder(message: dict[str, Any], image: Image, slots: dict[int, Slot]) -> BlockCoder:
    contents = BaseContents(image, message["digests"], slots[message["base_slot"]].view, otherwise=_refuse)
    rules = [(Rule.parse(rule, "delta"), rows) for rule, rows in message["groups"]]
    groups = [PlannedGroup(rule=rule, pieces=tuple(pieces)) for rule, rows in rules for pieces in rows]
    view = slots[message["slot"]].view
    fields, among = frozenset(message["fields"]), message["among"]
    return BlockCoder(image, view, contents=contents, groups=groups, fields=fields, among=among)


def _refuse(piece: int, block: int) -> memoryview:
    raise LookupError(f"block {block} of piece {piece} isn't in the base's slot any more")


def _code_all(coder: BlockCoder, blocks: list[list[int]], results: memoryview) -> NDArray[Any]:
    """Leave what is stored of encoded blocks in `results`, one behind the other, and return the verdict of each block.

    What wasn't coded, for whatever reason, is left undecided: the saver does it.
    """
    verdicts = np.zeros(len(blocks), VERDICT)
    verdicts["encoding"] = UNDECIDED
    begin = 0
    for row, (piece, block) in enumerate(blocks):
        with contextlib.suppress(Exception):  # the saver meets it again, and tells of it
            verdict, stored = coder.code(piece, block)
            results[begin : begin + len(stored)] = stored
            verdicts[row] = verdict
            begin += len(stored)
    return verdicts


if __name__ == "__main__":
    main(int(sys.argv[1]))
