"""A checkpoint in memory, made straight from snapshots: what a load needs, without writer, store and reader."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ckptfmt.box import Box
from ckptfmt.documents.index import Index, IndexLeaf, IndexStream, IndexTensor
from ckptfmt.documents.manifest import FIELDS, FieldSummary, Manifest, Origin
from ckptfmt.documents.sharding import Sharding
from ckptfmt.documents.tree import parse_tree
from ckptfmt.dtypes import DTYPES
from ckptfmt.read.reader import numpy_dtype
from ckptfmt.read.streaming import ReadReport
from ckptfmt.trainer.capture import capture
from ckptfmt.trainer.restore import LoadReport, restore
from ckptfmt.write.snapshot import Snapshot, TensorSink


class MemoryCheckpoint:
    """Holds a copy of everything that the snapshots gave; later changes of live tensors don't show."""

    def __init__(self, *snapshots: Snapshot, step: int = 7) -> None:
        origin = Origin(
            run_id=None, launch=None, nonce="0" * 32, step=step, attempt="0" * 16, writer_count=len(snapshots)
        )
        self._contents: dict[tuple[str, str, str], Any] = {}
        self.tensors: dict[tuple[str, str, str], IndexTensor] = {}
        self.leaves: dict[tuple[str, str, str], IndexLeaf] = {}
        self.streams: dict[tuple[str, str], IndexStream] = {}
        self._values: dict[tuple[str, str, str], bytes] = {}
        self._states: dict[tuple[str, str], bytes] = {}
        self._pieces: dict[tuple[str, str, str], dict[Box, int]] = {}
        for part, snapshot in enumerate(snapshots):
            self._take(part, snapshot)
        given = {key[0] for key in (*self.tensors, *self.leaves)} | ({"rng"} if self.streams else set())
        reasons = {field: reason for snapshot in snapshots for field, reason in snapshot.absent.items()}
        fields = {field: FieldSummary(reason=None if field in given else reasons[field]) for field in FIELDS}
        self.manifest = Manifest(
            origin=origin, saved_unix_s=0, fields=fields, index_nbytes=0, index_digest="", digest="blake3:0"
        )
        self.index = Index(
            origin=origin,
            saved_unix_s=0,
            parts=(),
            tensors=tuple(self.tensors.values()),
            streams=tuple(self.streams.values()),
            leaves=tuple(self.leaves.values()),
            absent={},
        )

    def _take(self, part: int, snapshot: Snapshot) -> None:
        for source in snapshot.tensors:
            key = (source.field, source.name, source.scope)
            size = DTYPES[source.dtype].nbytes
            whole = self._contents.setdefault(key, np.zeros(source.global_shape, f"V{size}"))
            for box in source.boxes:
                piece = bytearray(box.element_count * size)
                source.copy_into(box, memoryview(piece))
                elements = np.frombuffer(piece, f"V{size}").reshape(box.shape)
                if box in self._pieces.get(key, {}):
                    assert whole[_slices(box)].tobytes() == elements.tobytes(), f"replicas of {key} differ"
                whole[_slices(box)] = elements
                self._pieces.setdefault(key, {})[box] = part
            self.tensors[key] = IndexTensor(
                field=source.field,
                name=source.name,
                scope=source.scope,
                dtype=source.dtype,
                global_shape=source.global_shape,
                storage=source.storage,
                aliases=source.aliases,
                sharding=Sharding.of(self._pieces.get(key, {}).items()),
            )
        for leaf in snapshot.leaves:
            key = (leaf.field, leaf.name, leaf.scope)
            assert self._values.setdefault(key, leaf.value) == leaf.value, f"leaf {key} diverged"
            self.leaves[key] = IndexLeaf(field=leaf.field, name=leaf.name, scope=leaf.scope, part=part)
        for stream in snapshot.streams:
            self._states[stream.name, stream.scope] = stream.state
            self.streams[stream.name, stream.scope] = IndexStream(
                name=stream.name, scope=stream.scope, kind=stream.kind, part=part
            )

    def find(self, field: str, name: str, scope: str) -> IndexTensor | None:
        by_alias = (t for t in self.tensors.values() if (t.field, t.scope) == (field, scope) and name in t.aliases)
        return self.tensors.get((field, name, scope)) or next(by_alias, None)

    def leaf(self, field: str, name: str, scope: str) -> Any:
        return parse_tree(self._values[field, name, scope], where=name)

    def stream(self, name: str, scope: str) -> tuple[str, Any]:
        return self.streams[name, scope].kind, parse_tree(self._states[name, scope], where=name)

    def read(self, field: str, name: str, scope: str) -> Any:
        found = self.find(field, name, scope)
        assert found is not None
        return np.frombuffer(self._contents[found.key].tobytes(), numpy_dtype(found.dtype)).reshape(found.global_shape)

    def plan_reading(self, sinks: Sequence[TensorSink], *, borrow: object = None) -> "MemoryReading":
        del borrow
        return MemoryReading(self, sinks)

    def content_of(self, sink: TensorSink, box: Box) -> bytes:
        found = self.find(sink.field, sink.name, sink.scope)
        assert found is not None
        assert (found.dtype, found.global_shape) == (sink.dtype, sink.global_shape)
        content: bytes = self._contents[found.key][_slices(box)].tobytes()
        return content


class MemoryReading:
    def __init__(self, checkpoint: MemoryCheckpoint, sinks: Sequence[TensorSink]) -> None:
        self._checkpoint = checkpoint
        self._sinks = sinks

    def share(self, peers: object) -> None:
        raise NotImplementedError(peers)

    def run(self) -> ReadReport:
        """Hand on each wanted box in two pieces where it can be cut, as a reader does that goes by blocks."""
        for sink in self._sinks:
            for box in sink.boxes:
                for piece in _halves(box):
                    sink.copy_from(piece, memoryview(self._checkpoint.content_of(sink, piece)))
        return ReadReport()


def save(state, *, worker_count=1):
    """Capture a state and copy it."""
    return MemoryCheckpoint(
        *(capture(state, worker=worker, worker_count=worker_count) for worker in range(worker_count))
    )


def load(state, checkpoint, **options) -> LoadReport:
    """Restore as the only worker."""
    return restore(state, checkpoint, worker=0, worker_count=1, **options)


def _slices(box):
    return (*box.relative_to(Box.whole(tuple(end for end in box.end))), ...) if box.shape else ...


def _halves(box):
    if not box.shape or box.shape[0] < 2:
        return [box]
    half = box.shape[0] // 2
    return [
        Box(box.begin, (half, *box.shape[1:])),
        Box((box.begin[0] + half, *box.begin[1:]), (box.shape[0] - half, *box.shape[1:])),
    ]
