"""Small checkpoints from which many cases derive, and edits for several pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from conformance.generate.model import Checkpoint, Edit
from conformance.generate.plans import Leaf, Piece, Plan, Stream, Tensor, whole

__all__ = ["alter", "flip", "pop_at", "put_file", "replace", "set_at", "small", "two_writers"]

RUN_ID = "9f8b6c0d2e4a4f1c8d7e6b5a49382716"


def small(**members: Any) -> Plan:
    """Return the smallest checkpoint with a tensor, a leaf and a stream."""
    return Plan(
        tensors=[Tensor(name="w", shape=(2, 3))],
        leaves=[Leaf(field="config", value=["d", "width", 3])],
        streams=[Stream(name="noise", state=["t", 3, ["t", 1, 2], None])],
        **members,
    )


def two_writers(**members: Any) -> Plan:
    """Return a checkpoint of two writers with a value of every kind."""
    halves = [
        Piece(writer=0, begin=(0, 0), shape=(3, 4)),
        Piece(writer=1, begin=(3, 0), shape=(3, 4)),
    ]
    return Plan(
        tensors=[
            Tensor(name="embedding", shape=(6, 4), aliases=("head",), pieces=halves),
            Tensor(name="bias", dtype="int16", shape=(3,), pieces=[whole((3,), 0), whole((3,), 1)]),
            Tensor(name="scale", dtype="float64", shape=()),
            Tensor(name="empty", dtype="int8", shape=(0, 3)),
            Tensor(name="cache", dtype="uint8", shape=(5,), storage=1, scope="lw/0"),
            Tensor(
                name="cache",
                dtype="uint8",
                shape=(5,),
                storage=1,
                scope="lw/1",
                pieces=[whole((5,), 1)],
            ),
            Tensor(name="moment", shape=(2,), field="optimizer", pieces=[whole((2,), 1)]),
        ],
        leaves=[
            Leaf(field="config", value=["d", "width", 3], writers=(0, 1)),
            Leaf(
                field="optimizer",
                name="state",
                value=["d", "m", ["T", "moment", "torch"]],
                writers=(0, 1),
            ),
            Leaf(field="data", value=["l", 0], scope="lw/0"),
            Leaf(field="data", value=["l", 1], scope="lw/1", writers=(1,)),
        ],
        streams=[
            Stream(name="noise", state=["t", 1]),
            Stream(name="noise", state=["t", 2], scope="lw/1", writers=(1,)),
        ],
        writer_count=2,
        **members,
    )


def replace(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    """Return a change from the bytes `old`, which occur exactly once, to `new`."""

    def change(content: bytes) -> bytes:
        if content.count(old) != 1:
            raise ValueError(f"{old!r} stands {content.count(old)} times in it")
        return content.replace(old, new)

    return change


def set_at(document: str, *path: str | int, value: Any) -> Edit:
    """Return an edit of a value: `set_at("index", "tensors", "field", 0, value=1)`."""

    def edit(made: Checkpoint) -> None:
        place = _place(made, document)
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = value

    return edit


def pop_at(document: str, *path: str | int) -> Edit:
    """Return an edit to remove a member from a document."""

    def edit(made: Checkpoint) -> None:
        place = _place(made, document)
        for step in path[:-1]:
            place = place[step]
        del place[path[-1]]

    return edit


def put_file(path: str, content: bytes | None) -> Edit:
    """Return an edit to replace a file after signing, or with None to remove the file."""

    def edit(made: Checkpoint) -> None:
        made.extra[path] = content

    return edit


def _place(made: Checkpoint, document: str) -> Any:
    return (
        made.parts[int(document[5:])] if document.startswith("part/") else getattr(made, document)
    )


def alter(document: str, **changes: Any) -> Edit:
    """Return an edit of a document's bytes; see `Bend`."""
    return lambda made: made.bend(document, **changes)


def flip(path: str, at: int, bit: int = 0) -> Callable[[dict[str, bytes]], None]:
    """Return a change of one bit in a file, for use after all documents are signed."""

    def change(files: dict[str, bytes]) -> None:
        content = bytearray(files[path])
        content[at] ^= 1 << bit
        files[path] = bytes(content)

    return change
