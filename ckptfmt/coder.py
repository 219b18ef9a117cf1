"""A process that encodes blocks of deltas beside a saver: ``python -m ckptfmt.coder FD``.

A saver starts as many as it has processors for: arithmetic on small arrays, by several threads of one Python process,
takes as long as by one. A coder knows slots, and no store: what isn't in a slot any more is encoded by the saver.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING, Any

from ckptfmt.arithmetic.prediction import Rule
from ckptfmt.engines.base import BaseContents
from ckptfmt.engines.coding import BlockCoder
from ckptfmt.engines.groups import PlannedGroup
from ckptfmt.engines.image import Image
from ckptfmt.stage.process import be_helper, watch
from ckptfmt.stage.slot import Slot

if TYPE_CHECKING:
    from ckptfmt.stage.channel import Channel

__all__ = ["main"]


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
            image, results = Image.from_dict(message["image"]), None
        elif message["type"] == "delta":
            assert image is not None  # noqa: S101 - the saver sends it first
            coder = _make_coder(message, image, slots)
        else:
            assert image is not None  # noqa: S101 - the saver sends it first
            assert coder is not None  # noqa: S101
            is_new, results = results is None, results or Slot.make(image.block_nbytes)
            answer = _code(coder, message["piece"], message["block"], results)
            channel.send(answer, fd=results.fd if is_new else None)


def _make_coder(message: dict[str, Any], image: Image, slots: dict[int, Slot]) -> BlockCoder:
    contents = BaseContents(image, message["digests"], slots[message["base_slot"]].view, otherwise=_refuse)
    groups = [PlannedGroup(rule=Rule.parse(rule, "delta"), pieces=tuple(pieces)) for rule, pieces in message["groups"]]
    view = slots[message["slot"]].view
    return BlockCoder(image, view, contents=contents, groups=groups, among=message["among"])


def _refuse(piece: int, block: int) -> memoryview:
    raise LookupError(f"block {block} of piece {piece} isn't in the base's slot any more")


def _code(coder: BlockCoder, piece: int, block: int, results: Slot) -> dict[str, Any]:
    """Leave what is stored of a block in `results`, and return what is told of it.

    That it wasn't encoded, for whatever reason, lets the saver do it.
    """
    try:
        coded = coder.code(piece, block)
    except Exception as error:  # noqa: BLE001 - the saver meets it again, and tells of it
        return {"problem": str(error)}
    results.view[: len(coded.stored)] = coded.stored
    return {
        "encoding": coded.encoding,
        "predicted": coded.predicted,
        "nbytes": len(coded.stored),
        "decode_ns": int(coded.decode_s * 1e9),
    }


if __name__ == "__main__":
    main(int(sys.argv[1]))
