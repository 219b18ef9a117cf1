"""A run that nobody trained: records, registers and the index of its newest checkpoint, as many as are asked for."""

from __future__ import annotations

import math
import pathlib

from ckptfmt.box import Box
from ckptfmt.digest import digest_text
from ckptfmt.documents.index import Index, IndexTensor, PartEntry
from ckptfmt.documents.labels import Labels
from ckptfmt.documents.manifest import (
    FIELDS,
    MANIFEST_NAME,
    Abort,
    FieldSummary,
    Manifest,
    Origin,
    Reference,
    Tombstone,
    checkpoint_name,
    index_name,
    parse_register,
)
from ckptfmt.documents.run import LabelsRecord, Launch, RunRecord, launch_name
from ckptfmt.documents.sharding import Sharding
from ckptfmt.features import DELTAS, LABELS

RUN_ID = "5" * 32
WRITERS = 8


def tensors_of(layer_count: int, prefix: str) -> tuple[IndexTensor, ...]:
    """Return ten tensors for each layer, and an embedding, in the order of an index."""
    width = 64
    shardings: dict[tuple[int, ...], Sharding] = {}
    for shape in ((width,), (width, width), (4 * width, width)):
        rows = shape[0] // WRITERS
        boxes = [
            (Box((at * rows, *[0] * (len(shape) - 1)), (rows, *shape[1:])), at)
            for at in range(WRITERS)
        ]
        shardings[shape] = Sharding.of(boxes)
    shardings[4096, width] = Sharding.of([(Box((0, 0), (4096, width)), 3)])
    shapes: dict[str, tuple[int, ...]] = {
        "q": (width, width),
        "k": (width, width),
        "up": (4 * width, width),
        "down": (4 * width, width),
    }
    tensors: list[tuple[str, str, tuple[int, ...]]] = [("weights", "embed.weight", (4096, width))]
    for layer in range(layer_count):
        for name, extents in {**shapes, "norm": (width,)}.items():
            tensors.append(("weights", f"{prefix}.{layer:05d}.{name}.weight", extents))
            tensors.append(("optimizer", f"{prefix}.{layer:05d}.{name}.weight/exp_avg", extents))
    tensors.sort(key=lambda one: (FIELDS.index(one[0]), one[1].encode()))
    return tuple(
        IndexTensor(
            field=field, name=name, scope="global", dtype="float32", global_shape=extents, storage="persistent",
            aliases=(), sharding=shardings[extents],
        )
        for field, name, extents in tensors
    )  # fmt: skip


class MadeUpRun:
    """Writes a run of a dozen launches with kills, rollbacks, deltas and labels.

    Every tenth checkpoint is full, the others are deltas; every second launch begins where the one
    before had been a while ago.

    Attributes:
        head: name of the newest checkpoint.
    """

    def __init__(
        self,
        path: pathlib.Path,
        *,
        checkpoints: int,
        layers: int = 4,
        tag: str = "release",
        prefix: str = "layers",
    ) -> None:
        self._path, self._tag = path, tag
        self._tensors = tensors_of(layers, prefix)
        self._sizes = {
            field: [one.nbytes for one in self._tensors if one.field == field]
            for field in ("weights", "optimizer")
        }
        self._known: list[tuple[str, str, int]] = []
        (path / "launches").mkdir(parents=True)
        (path / "labels").mkdir()
        (path / "run.json").write_bytes(RunRecord(run_id=RUN_ID, writer_features=(LABELS,)).dump())
        per_launch = max(4, checkpoints // 12)
        for launch, first in enumerate(range(0, checkpoints, per_launch), 1):
            self._write_launch(
                launch,
                per_launch,
                min(per_launch, checkpoints - first),
                first + per_launch >= checkpoints,
            )
        self.head = self._known[-1][0]

    def _write_launch(self, launch: int, per_launch: int, count: int, is_last: bool) -> None:  # noqa: FBT001
        resume, step = None, 0
        if self._known:
            name, digest, step = self._known[-1 - (per_launch // 2 if launch % 2 else 0)]
            resume = Reference(name=name, digest=digest)
        chosen_by = "hand" if resume and launch % 2 else "lineage"
        record = Launch(
            run_id=RUN_ID,
            launch=launch,
            nonce=f"{launch:032x}",
            chosen_by=chosen_by,
            resume_from=resume,
        )
        (self._path / "launches" / launch_name(launch)).write_bytes(record.dump())
        for number in range(count):
            step += 100
            name = checkpoint_name(step, launch)
            (self._path / name).mkdir()
            register: Abort | Tombstone | None = None
            if not is_last and number == count - 1:
                (self._path / name / "parts").mkdir()  # killed
                continue
            if not is_last and number == count - 2 and launch % 3 == 0:
                register = Abort(run_id=RUN_ID, launch=launch, step=step, reason="a rank failed")
            elif launch == 1 and number < per_launch // 4:
                digest = f"blake3:{step:064x}"
                register = Tombstone(
                    run_id=RUN_ID, launch=launch, step=step, manifest_digest=digest
                )
            if register is not None:
                (self._path / name / "manifest.json").write_bytes(register.dump())
            else:
                self._commit(
                    launch,
                    step,
                    number,
                    is_head=is_last and number == count - 1,
                    is_tagged=number == 1,
                )

    def _commit(
        self, launch: int, step: int, number: int, *, is_head: bool, is_tagged: bool
    ) -> None:
        name = checkpoint_name(step, launch)
        origin = Origin(
            run_id=RUN_ID, launch=launch, nonce=f"{launch:032x}", step=step, attempt=f"{launch:08x}{step:08x}",
            writer_count=WRITERS,
        )  # fmt: skip
        saved_unix_s = 1_790_000_000 + launch * 5000 + step
        is_delta = number % 10 != 0
        fields = {
            field: self._summary(self._sizes[field], number, is_delta)
            if field in self._sizes
            else FieldSummary(reason="not given to State")
            for field in FIELDS
        }
        index, index_digest = b"?", bytes(32)
        if is_head:
            index, index_digest = self._index(origin, saved_unix_s)
            (self._path / name / index_name(origin.attempt)).write_bytes(index)
        labels = Labels.of(
            {"loss": 4 / math.log(step + 10) + 0.05 * math.sin(step)},
            [self._tag] if is_tagged and launch == 2 else [],
        )
        content = Manifest(
            origin=origin, saved_unix_s=saved_unix_s, fields=fields, index_nbytes=len(index),
            index_digest=digest_text(index_digest), features=(*[DELTAS] * is_delta, LABELS), labels=labels,
        ).dump()  # fmt: skip
        (self._path / name / MANIFEST_NAME).write_bytes(content)
        manifest = parse_register(content)
        assert isinstance(manifest, Manifest)
        self._known.append((name, manifest.digest, step))
        if is_tagged:
            pin = LabelsRecord(run_id=RUN_ID, checkpoint=name, number=1, pinned=True, labels=labels)
            (self._path / pin.path).write_bytes(pin.dump())

    def _summary(self, sizes: list[int], number: int, is_delta: bool) -> FieldSummary:  # noqa: FBT001
        stored_nbytes = sum(sizes) * (5 + number % 7) // 20 if is_delta else None
        return FieldSummary(tensor_count=len(sizes), nbytes=sum(sizes), stored_nbytes=stored_nbytes)

    def _index(self, origin: Origin, saved_unix_s: int) -> tuple[bytes, bytes]:
        absent = dict.fromkeys(
            (field for field in FIELDS if field not in self._sizes), "not given to State"
        )
        return Index(
            origin=origin, saved_unix_s=saved_unix_s, parts=(PartEntry(nbytes=1, digest=bytes(32)),) * WRITERS,
            tensors=self._tensors, streams=(), leaves=(), absent=absent,
        ).dump()  # fmt: skip
