"""Small snapshots and checkpoints made of numpy arrays, and checkpoints that lie under valid digests."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import os
import zlib
from collections import deque
from typing import Any

import numpy as np

from ckptfmt.box import Box
from ckptfmt.commit.decision import commit
from ckptfmt.digest import digest_text
from ckptfmt.documents.canonical import dump_document
from ckptfmt.documents.manifest import MANIFEST_NAME, Manifest, Origin, index_name, part_path
from ckptfmt.documents.msgpk import dump_packed_document, parse_msgpack
from ckptfmt.documents.packed import dump_packed, dump_strings, parse_packed
from ckptfmt.documents.part import Leaf, RngStream
from ckptfmt.documents.run import Launch
from ckptfmt.documents.tree import DtypeName, InlineArray, TensorRef, dump_tree
from ckptfmt.errors import CkptError
from ckptfmt.read.reader import Checkpoint
from ckptfmt.read.report import Report
from ckptfmt.read.verify import verify_checkpoint
from ckptfmt.run.lineage import list_launches
from ckptfmt.store.memory import MemoryStore
from ckptfmt.store.protocol import Store
from ckptfmt.write.snapshot import Snapshot
from ckptfmt.write.writer import write_part

NONCE = "00112233445566778899aabbccddeeff"
RUN_ID = "f" * 32
ATTEMPT = "0123456789abcdef"


@dataclasses.dataclass(kw_only=True)
class ArraySource:
    """A tensor source over the whole array, of which `boxes` are held here."""

    field: str
    name: str
    array: np.ndarray[Any, Any]
    boxes: tuple[Box, ...]
    dtype: str
    global_shape: tuple[int, ...]
    scope: str = "global"
    replica: bool = False
    storage: str = "persistent"
    aliases: tuple[str, ...] = ()

    def copy_into(self, box: Box, out: memoryview) -> None:
        """Copy the elements of `box` into `out`."""
        out[:] = self.array[box.relative_to(Box.whole(self.global_shape))].tobytes()


def tensor(name: str, array: Any, **members: Any) -> ArraySource:
    """Return a source of `array`, a whole tensor; `boxes` are what is held of it, everything if not given."""
    array = np.asarray(array)
    members.setdefault("field", "weights")
    members.setdefault("dtype", str(array.dtype))
    members.setdefault("global_shape", array.shape)
    members.setdefault("boxes", (Box.whole(array.shape),))
    return ArraySource(name=name, array=array, **members)


@dataclasses.dataclass(kw_only=True)
class ArraySink:
    """A tensor sink that fills an array and notes every box that it was given."""

    field: str = "weights"
    name: str
    dtype: str
    global_shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    scope: str = "global"
    taken: list[tuple[Box, bytes]] = dataclasses.field(default_factory=list)

    def copy_from(self, box: Box, content: memoryview) -> None:
        """Take verified elements."""
        self.taken.append((box, bytes(content)))


def leaf(field: str, value: object, *, name: str = "", scope: str = "global") -> Leaf:
    """Return a plain value."""
    return Leaf(field=field, name=name, scope=scope, value=dump_tree(value, where=name))


def stream(
    name: str, state: object, *, scope: str = "lw/0", kind: str = "python.mt19937"
) -> RngStream:
    """Return a random-number stream."""
    return RngStream(name=name, scope=scope, kind=kind, state=dump_tree(state, where=name))


def snapshot(
    *tensors: ArraySource, leaves: Any = (), streams: Any = (), absent: Any = None, **members: Any
) -> Snapshot:
    """Return what one writer gives to a save."""
    absent = dict(absent or {})
    return Snapshot(
        tensors=tensors, streams=tuple(streams), leaves=tuple(leaves), absent=absent, **members
    )


def origin(**members: Any) -> Origin:
    """Return an origin outside of a run; `members` replace its own."""
    own = {
        "run_id": None,
        "launch": None,
        "nonce": NONCE,
        "step": 3,
        "attempt": ATTEMPT,
        "writer_count": 1,
    }
    return Origin(**{**own, "block_nbytes": 4096, **members})


def save(store: Store, *snapshots: Snapshot, deadline_s: float = 1, **members: Any) -> Manifest:
    """Write a checkpoint, one snapshot for each writer, all of them writing all that they hold."""
    made = origin(writer_count=len(snapshots), **members)
    for writer, held in enumerate(snapshots):
        write_part(store, held, made, writer=writer)
    return commit(store, made, deadline_s=deadline_s)


def verify(store: Store) -> Report:
    """Check every byte of a checkpoint."""
    report = Report(target="x", kind="checkpoint")
    verify_checkpoint(store, report)
    return report


def read_all(store: Store) -> dict[tuple[str, ...], object]:
    """Open a checkpoint and read everything that it has, as bytes and trees; equal results are equal contents."""
    checkpoint = Checkpoint(store)
    found: dict[tuple[str, ...], object] = {("manifest",): checkpoint.digest}
    for item in checkpoint.index.tensors:
        pieces = checkpoint.iter_content(item, Box.whole(item.global_shape))
        found["tensor", *item.key] = [(box, bytes(content)) for box, content in pieces]
    for field, name, scope in checkpoint.leaves:
        found["leaf", field, name, scope] = dump_tree(checkpoint.leaf(field, name, scope), where="")
    for name, scope in checkpoint.streams:
        kind, state = checkpoint.stream(name, scope)
        found["stream", name, scope] = (kind, dump_tree(state, where=""))
    return found


def slot_count() -> int:
    """Return how many slots this process has open."""
    count = 0
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - twice in each test; a Path is slow
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115 - as above
            count += target.startswith("/memfd:ckptfmt-slot")
    return count


def code_of(action: Any) -> str:
    """Return the code of the CkptError that `action` raises, or "ok"; any other exception comes through."""
    try:
        action()
    except CkptError as error:
        return str(error.code)
    return "ok"


def error_of(action: Any) -> Any:
    """Return the CkptError that `action` raises: typed Any, for a test knows which of its members are there."""
    try:
        action()
    except CkptError as error:
        return error
    raise AssertionError("nothing was refused")


def two_writers() -> tuple[Snapshot, Snapshot]:
    """Return what two writers give to a small save that has something of every kind."""
    embedding = np.arange(24, dtype=np.float32).reshape(6, 4)
    halves = (Box((0, 0), (3, 4)), Box((3, 0), (3, 4)))
    bias = np.array([1, -2, 3], np.int16)
    leaves = (
        leaf("config", {"lr": 1e-3, "betas": (0.9, 0.999), 1: None, "big": 1 << 70}),
        leaf(
            "optimizer",
            {"exp_avg": TensorRef("exp_avg", "numpy"), "dtype": DtypeName("float32")},
            name="state",
        ),
    )
    parts = []
    for writer in range(2):
        own = f"lw/{writer}"
        parts.append(
            snapshot(
                tensor("embedding", embedding, boxes=(halves[writer],), aliases=("head",)),
                tensor("bias", bias),
                tensor("scale", np.float64(0.5)),
                tensor("empty", np.zeros((0, 3), np.int8)),
                tensor("phase", np.array([1 + 2j]), boxes=(Box.whole((1,)),) if writer else ()),
                tensor("cache", np.arange(5, dtype=np.uint8), storage="non-persistent", scope=own),
                tensor("exp_avg", np.full(3, writer, np.float32), field="optimizer", scope=own),
                tensor("exp_avg", np.ones(2, np.float32), field="optimizer"),
                leaves=(
                    *leaves,
                    leaf("data", deque([writer, InlineArray("int8", (2,), b"\1\2")], 3), scope=own),
                ),
                streams=[stream("python", (3, (1, 2, writer), None), scope=own)],
                absent={"topology": "not given to State", "provenance": "not given to State"},
            )
        )
    return parts[0], parts[1]


def small_files(**members: Any) -> dict[str, bytes]:
    """Return the files of a small checkpoint by two writers."""
    store = MemoryStore()
    save(store, *two_writers(), **members)
    return store.snapshot()


class Forgery:
    """A checkpoint whose documents may be edited, and whose digests are then made to fit again.

    Attributes:
        files: by path, shards among them; edit or delete as you like.
        manifest: what the manifest signs.
        index: what the index signs.
        parts: what each part signs.
    """

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = dict(files)
        self.manifest = parse_json(files[MANIFEST_NAME])
        attempt = self.manifest["attempt"]
        self.index_path = index_name(attempt)
        self.index = parse_signed(files[self.index_path])
        self.part_paths = [
            part_path(attempt, writer) for writer in range(self.manifest["writer_count"])
        ]
        self.parts = [parse_signed(files[path]) for path in self.part_paths]

    def store(self) -> MemoryStore:
        """Return a store with the edited checkpoint, digests and sizes made to fit from the parts upwards."""
        contents = [dump_packed_document(part) for part in self.parts]
        files = dict(self.files)
        for path, (content, _) in zip(self.part_paths, contents, strict=True):
            files[path] = content
        index = copy.deepcopy(self.index)
        if isinstance(index.get("parts"), dict) and index["parts"].keys() == {"nbytes", "digest"}:
            index["parts"]["nbytes"] = dump_packed([len(content) for content, _ in contents])
            index["parts"]["digest"] = b"".join(digest for _, digest in contents)
        files[self.index_path], digest = dump_packed_document(index)
        manifest = copy.deepcopy(self.manifest)
        manifest["index"]["nbytes"] = len(files[self.index_path])
        manifest["index"]["digest"] = digest_text(digest)
        files[MANIFEST_NAME] = dump_document(manifest)
        return MemoryStore.from_snapshot(files)


def parse_signed(content: bytes) -> dict[str, Any]:
    """Return what a msgpack document signs, unchecked."""
    envelope = parse_msgpack(content, where="", limit_items=8)
    signed: dict[str, Any] = parse_msgpack(
        zlib.decompress(envelope["signed"]), where="", limit_items=10**6
    )
    return signed


def parse_json(content: bytes) -> dict[str, Any]:
    """Return what a JSON document signs, unchecked."""
    import json  # noqa: PLC0415

    signed: dict[str, Any] = json.loads(content)["signed"]
    return signed


def unpacked(value: object) -> list[int]:
    """Return the integers of a packed array."""
    return [int(entry) for entry in parse_packed(value, "")]


def unpacked_strings(value: Any) -> list[str]:
    """Return the strings of a column of strings."""
    lengths, text = value
    ends, content = [0, *itertools.accumulate(unpacked(lengths))], text.encode()
    return [content[begin:end].decode() for begin, end in itertools.pairwise(ends)]


def edit_strings(table: dict[str, Any], key: str, edit: Any) -> None:
    """Edit a column of strings as a list: by a function that changes it, or returns another."""
    strings = unpacked_strings(table[key])
    changed = edit(strings)
    table[key] = dump_strings(strings if changed is None else changed)


def known_launches(store: Store) -> list[Launch]:
    """Return the launches of a run; all of their records can be read."""
    launches = list_launches(store)
    known = [launch for launch in launches if isinstance(launch, Launch)]
    assert known == launches
    return known
