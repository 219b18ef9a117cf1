"""Descriptions of a state to save: tensors with the pieces of writers, leaves, streams, groups."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

from blake3 import blake3

__all__ = [
    "DTYPES",
    "FIELDS",
    "Box",
    "Group",
    "Leaf",
    "Piece",
    "Plan",
    "Reference",
    "Stored",
    "Stream",
    "Tensor",
    "box_bytes",
    "expected",
    "key_of",
    "payload",
    "whole",
]

FIELDS = ("weights", "optimizer", "rng", "data", "config", "topology", "provenance")

#: Bytes of an element, and the tag in a shard's header; spec/core/50-tensors.md.
DTYPES: dict[str, tuple[int, str]] = {
    "bool": (1, "BOOL"), "uint8": (1, "U8"), "int8": (1, "I8"),
    "uint16": (2, "U16"), "int16": (2, "I16"), "uint32": (4, "U32"), "int32": (4, "I32"),
    "uint64": (8, "U64"), "int64": (8, "I64"),
    "float16": (2, "F16"), "bfloat16": (2, "BF16"), "float32": (4, "F32"), "float64": (8, "F64"),
    "complex64": (8, "C64"), "float8_e4m3fn": (1, "F8_E4M3"), "float8_e5m2": (1, "F8_E5M2"),
    "float8_e8m0fnu": (1, "F8_E8M0"), "float8_e4m3fnuz": (1, "F8_E4M3FNUZ"),
    "float8_e5m2fnuz": (1, "F8_E5M2FNUZ"), "complex128": (16, ""), "complex32": (4, ""),
    "float4_e2m1fn_x2": (1, ""),
}  # fmt: skip

Shape = tuple[int, ...]
#: Begin and shape.
Box = tuple[Shape, Shape]


@dataclasses.dataclass(slots=True, kw_only=True)
class Stored:
    """Some blocks of a piece, stored otherwise than as raw bytes.

    Attributes:
        encoding: the name from the registry.
        first, count: the first block and the number of blocks; None for all blocks from `first` on.
        blocks: the stored bytes of each encoded block.
        reference: the name of the checkpoint with the base.
        predicted: whether the group's prediction replaces the base.
        in_pack: whether a raw block is in a pack.
        place: the first sort key within the file, before box and blocks.
    """

    encoding: str
    first: int = 0
    count: int | None = None
    blocks: list[bytes] = dataclasses.field(default_factory=list)
    reference: str | None = None
    predicted: bool = False
    in_pack: bool = True
    place: int = 0


@dataclasses.dataclass(slots=True, kw_only=True)
class Piece:
    """The piece of a tensor on one writer; without `stored`, one raw extent in a shard.

    A `ghost` has no content: the writer's part names the tensor without a box.
    """

    writer: int
    begin: Shape
    shape: Shape
    replica: bool = False
    written: bool = True
    digested: bool = True
    ghost: bool = False
    stored: list[Stored] | None = None


@dataclasses.dataclass(slots=True, kw_only=True)
class Tensor:
    """A tensor with all of its bytes."""

    name: str
    dtype: str = "float32"
    shape: Shape = ()
    content: bytes = b""
    field: str = "weights"
    scope: str = "global"
    storage: int = 0
    aliases: tuple[str, ...] = ()
    pieces: list[Piece] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        """Fill in default content, and one writer with the whole tensor."""
        self.content = self.content or payload(self.nbytes)
        self.pieces = self.pieces or [whole(self.shape)]
        if len(self.content) != self.nbytes:
            raise ValueError(f"{self.name}: {len(self.content)} bytes for {self.nbytes}")

    @property
    def width(self) -> int:
        """Bytes of an element."""
        return DTYPES[self.dtype][0]

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.width * math.prod(self.shape)

    @property
    def order(self) -> tuple[int, bytes, bytes]:
        """Sort key in tables of tensors."""
        return FIELDS.index(self.field), self.name.encode(), self.scope.encode()


@dataclasses.dataclass(slots=True, kw_only=True)
class Leaf:
    """A plain value, as msgpack of a tree."""

    field: str
    value: Any
    name: str = ""
    scope: str = "global"
    writers: tuple[int, ...] = (0,)

    @property
    def order(self) -> tuple[int, bytes, bytes]:
        """Sort key in tables of leaves."""
        return FIELDS.index(self.field), self.name.encode(), self.scope.encode()


@dataclasses.dataclass(slots=True, kw_only=True)
class Stream:
    """A stream of random numbers, with the msgpack of the state's tree."""

    name: str
    state: Any
    kind: str = "python.mt19937"
    scope: str = "lw/0"
    writers: tuple[int, ...] = (0,)

    @property
    def order(self) -> tuple[bytes, bytes]:
        """Sort key in tables of streams."""
        return self.name.encode(), self.scope.encode()


@dataclasses.dataclass(slots=True, kw_only=True)
class Reference:
    """A reference to a base: the checkpoint's directory in the run and the manifest's digest."""

    name: str
    digest: bytes


@dataclasses.dataclass(slots=True, kw_only=True)
class Group:
    """Tensors of a writer, predicted together: a piece of each, in the order of decoding."""

    kind: str
    rule: Any
    members: list[str]
    reference: str | None = None
    writer: int = 0


@dataclasses.dataclass(slots=True, kw_only=True)
class Plan:
    """A whole checkpoint, as described by its writers."""

    tensors: list[Tensor] = dataclasses.field(default_factory=list)
    leaves: list[Leaf] = dataclasses.field(default_factory=list)
    streams: list[Stream] = dataclasses.field(default_factory=list)
    groups: list[Group] = dataclasses.field(default_factory=list)
    references: list[Reference] = dataclasses.field(default_factory=list)
    absent: dict[str, str] = dataclasses.field(default_factory=dict)
    empty: tuple[str, ...] = ()
    writer_count: int = 1
    run_id: str | None = None
    launch: int | None = None
    nonce: str = "00112233445566778899aabbccddeeff"
    step: int = 3
    attempt: str = "0123456789abcdef"
    block_nbytes: int = 4096
    saved_unix_s: int = 1793491200

    def origin(self) -> dict[str, Any]:
        """Return the members common to all documents of the attempt."""
        keys = ("run_id", "launch", "nonce", "step", "attempt", "writer_count", "block_nbytes")
        return {key: getattr(self, key) for key in keys}

    def reasons(self) -> dict[str, str]:
        """Return the reason for each field without saved content, except fields marked `empty`."""
        there = {one.field for one in self.tensors} | {one.field for one in self.leaves}
        there |= {"rng"} if self.streams else set()
        given = {name: "none" for name in FIELDS if name not in there and name not in self.empty}
        return given | self.absent


def payload(nbytes: int) -> bytes:
    """Return the default bytes of a tensor: byte i is i mod 251."""
    return bytes(i % 251 for i in range(nbytes))


def whole(shape: Shape, writer: int = 0, **members: Any) -> Piece:
    """Return the whole tensor as the piece of one writer."""
    return Piece(writer=writer, begin=(0,) * len(shape), shape=shape, **members)


def box_bytes(tensor: Tensor, begin: Shape, shape: Shape) -> bytes:
    """Return the elements of a box, in C order."""
    if not math.prod(shape):
        return b""
    if not shape:
        return tensor.content
    strides = [tensor.width * math.prod(tensor.shape[axis + 1 :]) for axis in range(len(shape))]
    run = shape[-1] * tensor.width
    rows = itertools.product(
        *(range(b, b + n) for b, n in zip(begin[:-1], shape[:-1], strict=True))
    )
    starts = (sum(i * s for i, s in zip((*row, begin[-1]), strides, strict=True)) for row in rows)
    return b"".join(tensor.content[start : start + run] for start in starts)


def key_of(tensor: Tensor) -> str:
    """Return the key of a tensor in a case: field and name, then the scope unless it is global."""
    return f"{tensor.field}/{tensor.name}" + (
        "" if tensor.scope == "global" else f"@{tensor.scope}"
    )


def expected(plan: Plan) -> dict[str, dict[str, Any]]:
    """Return the expected tensors: dtype, shape, digest and first bytes of each."""
    return {
        key_of(tensor): {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "blake3": blake3(tensor.content).hexdigest(),
            "first16": tensor.content[:16].hex(),
        }
        for tensor in plan.tensors
    }
