"""A process that encodes blocks of deltas beside a saver: ``python -m ckptfmt.delta.coder_process FD``.

A saver starts as many as it has processors for: arithmetic on small arrays, by several threads of one Python process,
takes as long as by one. A coder knows slots, and no store: what isn't in a slot any more is encoded by the saver.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckptfmt.codecs.prediction import Rule
from ckptfmt.delta.base import BaseContents
from ckptfmt.delta.block_coder import UNDECIDED, VERDICT, BlockCoder
from ckptfmt.delta.prediction_groups import PlannedGroup
from ckptfmt.stage.helper_process import Channel, be_helper, watch
from ckptfmt.stage.slot import Slot
from ckptfmt.write.image import Image


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
