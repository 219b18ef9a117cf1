"""Replacement of the tensor bytes of a full checkpoint by drawn bytes, with all digests recomputed.

A case with such bytes has the same documents, apart from digests, and another answer.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from blake3 import blake3

from ckptfmt_conformance import msgpk
from ckptfmt_conformance.readback import (
    DTYPES,
    ReadbackError,
    canonical,
    entries_of,
    read_back,
    rows,
    unfold,
)

__all__ = ["perturb"]

#: The bytes of each box. Key: the tensor's field, name and scope, the box's begin and shape.
_Drawn: TypeAlias = dict[tuple[Any, ...], bytes]


def perturb(root: Path, rng: random.Random) -> None:
    """Replace the bytes of each tensor of the full checkpoint at `root` by bytes drawn from `rng`.

    Raises: ReadbackError where the checkpoint isn't sound, or isn't full.
    """
    read_back(root)  # an unsound checkpoint is left unchanged
    manifest = json.loads((root / "manifest.json").read_bytes())
    signed = manifest["signed"]
    if list(root.rglob("*.pack")):
        raise ReadbackError("it isn't a full checkpoint")
    drawn: _Drawn = {}
    parts = [
        _perturb_part(root, signed, number, rng, drawn) for number in range(signed["writer_count"])
    ]
    place = root / signed["index"]["name"]
    index = _parse(place.read_bytes())
    index["parts"] = {
        "nbytes": _packed([nbytes for nbytes, _ in parts]),
        "digest": b"".join(one for _, one in parts),
    }
    nbytes, digest = _write(place, index)
    signed["index"] |= {"nbytes": nbytes, "digest": f"blake3:{digest.hex()}"}
    manifest["digest"] = f"blake3:{blake3(canonical(signed).encode()).hexdigest()}"
    (root / "manifest.json").write_bytes(canonical(manifest).encode())


def _perturb_part(
    root: Path, manifest: Mapping[str, Any], number: int, rng: random.Random, drawn: _Drawn
) -> tuple[int, bytes]:
    """Rewrite a part and its shards. Return the part's size in bytes and digest.

    A box of several writers has the same bytes in each writer's part (REQ-CMT-012). `drawn`
    keeps the bytes of each box.
    """
    place = root / f"parts/{manifest['attempt']}-{number:05d}.msgpack"
    document = _parse(place.read_bytes())
    owners = [row for row in rows(document, "tensors") for _ in range(row["box_count"])]
    boxes = rows(document, "boxes", [owner["ndim"] for owner in owners])
    digests = iter(entries_of(document["digests"]))
    found = [list(itertools.islice(digests, box["digest_count"])) for box in boxes]
    contents: list[bytes] = []
    for position, (owner, box) in enumerate(zip(owners, boxes, strict=True)):
        cuts = zip(box["cut_shape"], owner["global_shape"], strict=True)
        shape = tuple(cut - 1 if cut else extent for cut, extent in cuts)
        key = (owner["field"], owner["name"], owner["scope"], box["begin"], shape)
        if key not in drawn:
            drawn[key] = _draw(owner["dtype"], math.prod(shape), rng)
        contents.append(drawn[key])
        size = manifest["block_nbytes"]
        # a writer may omit the digests of boxes written by another writer
        if found[position]:
            blocks = (drawn[key][at : at + size] for at in range(0, len(drawn[key]), size))
            found[position] = [blake3(block).digest() for block in blocks]
    extents = rows(document, "extents")
    positions = itertools.accumulate(step + 1 for step in unfold(row["box"] for row in extents))
    owned = [
        (position - 1, extent["file"]) for position, extent in zip(positions, extents, strict=True)
    ]
    for file_number, file in enumerate(rows(document, "files")):
        data = b"".join(contents[position] for position, in_file in owned if in_file == file_number)
        header = (root / file["name"]).read_bytes()[: file["header_nbytes"]]
        (root / file["name"]).write_bytes(header + data)
    document["digests"] = b"".join(itertools.chain.from_iterable(found))
    return _write(place, document)


def _draw(dtype: str, count: int, rng: random.Random) -> bytes:
    """Return drawn bytes for `count` elements of a dtype."""
    content = rng.randbytes(DTYPES[dtype][0] * count)
    return bytes(byte & 1 for byte in content) if dtype == "bool" else content


def _parse(content: bytes) -> dict[str, Any]:
    document: dict[str, Any] = msgpk.parse(zlib.decompress(msgpk.parse(content)["signed"]))
    return document


def _write(place: Path, document: Mapping[str, Any]) -> tuple[int, bytes]:
    """Write a document of tables. Return size in bytes and digest."""
    content = _dump(document)
    # Stored blocks always keep the limit on the ratio of inflated to compressed size (REQ-DOC-028).
    stored = zlib.compress(content, 0)
    digest = blake3(stored).digest()
    raw = _dump({"digest": digest, "nbytes": len(content), "signed": stored})
    place.write_bytes(raw)
    return len(raw), digest


def _packed(values: list[int]) -> list[Any]:
    """Return a packed array: the bytes of all entries in planes, the lowest first."""
    width = next(n for n in (1, 2, 4, 8) if max(values, default=0) < 1 << 8 * n)
    return [
        width,
        b"".join(bytes(value >> 8 * plane & 255 for value in values) for plane in range(width)),
    ]


def _dump(value: Any) -> bytes:  # noqa: PLR0911 - a return for each kind of value
    """Return the canonical msgpack of a value of the profile."""
    if value is None:
        return b"\xc0"
    if isinstance(value, bool):
        return b"\xc3" if value else b"\xc2"
    if isinstance(value, int):
        return _dump_int(value)
    if isinstance(value, str):
        raw = value.encode()
        return _head(len(raw), 0xA0, 32, (0xD9, 0xDA, 0xDB)) + raw
    if isinstance(value, bytes):
        return _head(len(value), 0, 0, (0xC4, 0xC5, 0xC6)) + value
    if isinstance(value, Mapping):
        members = sorted(value.items(), key=lambda member: member[0].encode())
        entries = b"".join(_dump(name) + _dump(item) for name, item in members)
        return _head(len(members), 0x80, 16, (None, 0xDE, 0xDF)) + entries
    return _head(len(value), 0x90, 16, (None, 0xDC, 0xDD)) + b"".join(map(_dump, value))


def _head(count: int, short: int, below: int, long: tuple[int | None, int, int]) -> bytes:
    """Return the first bytes of a string or container of `count` entries, in the shortest form."""
    if count < below:
        return bytes([short | count])
    for tag, width in zip(long, (1, 2, 4), strict=True):
        if tag is not None and count < 1 << 8 * width:
            return bytes([tag]) + count.to_bytes(width, "big")
    raise ReadbackError(f"{count} is too many for msgpack")


def _dump_int(value: int) -> bytes:
    if -32 <= value < 128:
        return value.to_bytes(1, "big", signed=value < 0)
    tags = (0xCC, 0xCD, 0xCE, 0xCF) if value >= 0 else (0xD0, 0xD1, 0xD2, 0xD3)
    for tag, width in zip(tags, (1, 2, 4, 8), strict=True):
        least, most = (0, 1 << 8 * width) if value >= 0 else (-(1 << 8 * width - 1), 0)
        if least <= value < most:
            return bytes([tag]) + value.to_bytes(width, "big", signed=value < 0)
    raise ReadbackError(f"{value} has no form in msgpack")
