"""Runs with deltas, saved by several writers in one thread: every step of a saver, and no process."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from ckptfmt.commit.decision import Known, finalize, sweep_attempts
from ckptfmt.delta.chain import Chain
from ckptfmt.delta.policy import DeltaOptions
from ckptfmt.documents.manifest import Manifest, Origin, checkpoint_name
from ckptfmt.documents.run import Launch, RunRecord
from ckptfmt.features import REFERENCED
from ckptfmt.read.reader import Checkpoint
from ckptfmt.run.lineage import begin_launch, open_run
from ckptfmt.store.memory import MemoryStore
from ckptfmt.write.image import Context, Image, plan_image
from ckptfmt.write.slot_contents import FillProgress, Snapped
from ckptfmt.write.snapshot import Snapshot
from tests.builders import snapshot, tensor

SMALLEST = DeltaOptions(mode="smallest", restore_budget=float("inf"))


@dataclasses.dataclass
class Writer:
    """One of the writers: its chain, its slots, the layout of what it saves."""

    image: Image
    chain: Chain
    slots: Sequence[bytearray | memoryview]


class Saving:
    """A run and its writers.

    Args:
        snapshots: what each writer holds, for the layout.
        slot_count: how many slots each writer has; the saves take them in turn.
        written: which of its pieces each writer writes; all of them where there is nothing.
        known: what was parsed before.
    """

    def __init__(
        self,
        *snapshots: Snapshot,
        store: Any = None,
        block_nbytes: int = 4096,
        options: DeltaOptions = SMALLEST,
        slot_count: int = 2,
        written: Sequence[frozenset[Any] | None] | None = None,
        known: Known | None = None,
    ) -> None:
        self.store = MemoryStore() if store is None else store
        self.options = options
        self.known = known or Known()
        self.block_nbytes = block_nbytes
        self.run: RunRecord = open_run(self.store, writer_features=(REFERENCED,))
        self.launch: Launch = begin_launch(self.store, self.run)[0]
        self.number = 0
        self.writers = []
        for number, held in enumerate(snapshots):
            own = None if written is None else written[number]
            image = plan_image(held, written=own, block_nbytes=block_nbytes)
            slots = [bytearray(image.nbytes) for _ in range(slot_count)]
            self.writers.append(Writer(image=image, chain=Chain(known=self.known), slots=slots))

    def origin(self, step: int) -> Origin:
        return Origin(
            run_id=self.run.run_id,
            launch=self.launch.launch,
            nonce=self.launch.nonce,
            step=step,
            attempt=secrets.token_hex(8),
            writer_count=len(self.writers),
            block_nbytes=self.block_nbytes,
        )

    def place(self, step: int) -> Any:
        return self.store.at(checkpoint_name(step, self.launch.launch))

    def write(self, step: int, snapshots: Any) -> tuple[Origin, list[str]]:
        """Write the parts of a save; return why each writer made what it made."""
        origin, reasons = self.origin(step), []
        for number, (writer, held) in enumerate(zip(self.writers, snapshots, strict=True)):
            slot = self.number % len(writer.slots)
            view = memoryview(writer.slots[slot])
            fill(writer.image, held, view)
            progress = FillProgress()
            progress.complete()
            snapped = Snapped(
                image=writer.image,
                view=view,
                slot=slot,
                context=Context.of(held),
                progress=progress,
            )
            plan = writer.chain.write(
                self.place(step), origin, number, snapped, options=self.options
            )
            reasons.append(plan.reason)
        self.number += 1
        return origin, reasons

    def save(self, step: int, *snapshots: Snapshot) -> Manifest:
        """Write and commit."""
        origin, _ = self.write(step, snapshots)
        manifest = finalize(self.place(step), origin, known=self.known)
        sweep_attempts(self.place(step), origin, known=self.known)
        for writer in self.writers:
            writer.chain.commit(manifest)
        return manifest

    def open(self, step: int, **members: Any) -> Checkpoint:
        return Checkpoint(self.place(step), **members)


def fill(image: Image, snapshot: Snapshot, view: memoryview) -> None:
    """Copy a snapshot into a slot."""
    sources = {(source.field, source.name, source.scope): source for source in snapshot.tensors}
    for shard in image.shards:
        view[shard.begin : shard.begin + len(shard.header)] = shard.header
    for piece in image.pieces:
        sources[piece.key].copy_into(piece.box, view[piece.begin : piece.end])


def mixed(master: Any, *, rounded: Any = None) -> Snapshot:
    """A weight in binary32 and its copy in bfloat16, as mixed-precision training has them."""
    copy = (master if rounded is None else rounded).astype(ml_dtypes.bfloat16)
    return snapshot(
        tensor("w", copy, dtype="bfloat16"),
        tensor("master/w", master, field="optimizer", dtype="float32"),
    )


def cast_chain(store: Any = None) -> Saving:
    """A full checkpoint, and a delta whose weights are predicted from their masters, two blocks from one."""
    master = np.random.default_rng(7).standard_normal(5 * 4096 // 4 + 100, dtype=np.float32)
    saving = Saving(mixed(master), store=store)
    for step in (1, 2):
        saving.save(step, mixed(master))
        master = master * np.float32(1.001)
    assert "cast" in saving.open(2).manifest.features
    return saving
