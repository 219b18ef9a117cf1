"""Files as torch.save wrote them before torch 1.6, byte by byte: what torch itself can't write any more."""

from __future__ import annotations

import io
import struct
import sys
import tarfile
from typing import Any

import numpy as np

from tests.hostile.bombs_foreign import mapping, named, number

MAGIC = 0x1950A86A20F9469CFC6C

#: The class of a storage, and how numpy calls its elements.
KINDS = {
    "Double": "f8",
    "Float": "f4",
    "Half": "f2",
    "BFloat16": "u2",
    "Long": "i8",
    "Int": "i4",
    "Short": "i2",
    "Char": "i1",
    "Byte": "u1",
    "Bool": "u1",
    "ComplexFloat": "c8",
    "ComplexDouble": "c16",
}


def text(value: str) -> bytes:
    """Return the operation that pushes a text as Python 2 wrote it: bytes, with a short form and a long one."""
    encoded = value.encode()
    if len(encoded) < 256:
        return b"U" + bytes([len(encoded)]) + encoded
    return b"T" + struct.pack("<i", len(encoded)) + encoded


def pickled(value: bytes) -> bytes:
    """Return a pickle of protocol 2."""
    return b"\x80\x02" + value + b"."


def sizes(*values: int) -> bytes:
    """Return the operations that push a tuple of numbers, which Python 2 had as long ones."""
    return b"(" + b"".join(b"\x8a\x01" + bytes([value]) for value in values) + b"t"


def ordered(*pairs: tuple[bytes, bytes], state: bytes = b"") -> bytes:
    """Return the operations that push an OrderedDict as Python 2 wrote it: made of a list of lists."""
    items = b"](" + b"".join(b"](" + key + value + b"e" for key, value in pairs) + b"e"
    return named("collections.OrderedDict") + items + b"\x85R" + (state + b"b" if state else b"")


def storage(key: str, kind: str, count: int, *, location: str = "cpu", view: bytes = b"N") -> bytes:
    """Return the operations that push a storage of which `view` is the part that is meant."""
    said = text("storage") + named(f"torch.{kind}Storage") + text(key) + text(location)
    return b"(" + said + number(count) + view + b"tQ"


def tensor(
    of: bytes, shape: tuple[int, ...], strides: tuple[int, ...], offset: int = 0, version: int = 2
) -> bytes:
    """Return the operations that push a tensor, as torch 0.4 and later wrote it, or as earlier ones did."""
    place = of + number(offset) + sizes(*shape) + sizes(*strides)
    if version == 1:
        return named("torch._utils._rebuild_tensor") + b"(" + place + b"tR"
    if version == 0:
        return named("torch.FloatTensor") + b")\x81" + b"(" + place + b"tb"
    return named("torch._utils._rebuild_tensor_v2") + b"(" + place + b"\x89" + ordered() + b"tR"


def sequence(
    value: bytes,
    storages: dict[str, np.ndarray[Any, Any]],
    *,
    big: bool = False,
    says: bool = False,
) -> bytes:
    """Return the bytes of a file of torch 0.1.11 to 1.5.

    Args:
        value: the operations that push the object.
        storages: by key.
        big: whether counts and elements have their highest byte first.
        says: whether the facts of the machine say so.
    """
    order = ">" if big else "<"
    machine = mapping(
        (text("protocol_version"), number(1001)),
        (text("little_endian"), b"\x89" if says else b"\x88"),
        (
            text("type_sizes"),
            mapping(
                (text("short"), number(2)), (text("int"), number(4)), (text("long"), number(4))
            ),
        ),
    )
    keys = sorted(storages)
    heads = [number(MAGIC), number(1001), machine, value, b"](" + b"".join(map(text, keys)) + b"e"]
    raw = [
        struct.pack(f"{order}q", storages[key].size) + _raw(storages[key], big=big) for key in keys
    ]
    return b"".join([*map(pickled, heads), *raw])


def _raw(array: np.ndarray[Any, Any], *, big: bool) -> bytes:
    return (array.byteswap() if big == (sys.byteorder == "little") else array).tobytes()


def tar(
    value: bytes,
    storages: dict[int, tuple[str, np.ndarray[Any, Any]]],
    tensors: dict[int, tuple[int, tuple[int, ...], tuple[int, ...], int]],
    views: bytes = b"]",
    *,
    big: bool = False,
) -> bytes:
    """Return a file of torch before 0.1.11, in which the object refers to tensors by their numbers.

    Args:
        value: the operations that push the object.
        storages: class and elements by number.
        tensors: number of the storage, shape, strides and offset by number.
        views: the operations that push the list of storages that are parts of others.
        big: whether numbers and elements have their highest byte first.
    """
    order = ">" if big else "<"
    held = [pickled(number(len(storages)))]
    for key, (kind, array) in storages.items():
        held.append(pickled(number(key) + text("cpu") + named(f"torch.{kind}Storage") + b"\x87"))
        held.append(struct.pack(f"{order}q", array.size) + _raw(array, big=big))
    held.append(pickled(views))
    described = [pickled(number(len(tensors)))]
    for key, (of, shape, strides, offset) in tensors.items():
        described.append(pickled(number(key) + number(of) + named("torch.FloatTensor") + b"\x87"))
        described.append(struct.pack(f"{order}i4x", len(shape)))
        described.append(struct.pack(f"{order}{2 * len(shape) + 1}q", *shape, *strides, offset))
    members = {
        "sys_info": pickled(b"}"),
        "storages": b"".join(held),
        "tensors": b"".join(described),
    }
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        for name, content in {**members, "pickle": pickled(value)}.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return made.getvalue()
