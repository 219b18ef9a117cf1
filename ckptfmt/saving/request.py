"""The request for a save, from trainer to saver: an object, and the plain values of a message."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any, Final

from ckptfmt.delta.policy import DeltaOptions
from ckptfmt.documents.durability import HOME
from ckptfmt.documents.labels import Labels
from ckptfmt.documents.manifest import Origin
from ckptfmt.documents.part import Leaf, RngStream
from ckptfmt.run.retention import KEEP_ALL, Retention
from ckptfmt.store import Address
from ckptfmt.store.protocol import Store
from ckptfmt.write.image import Context

#: Attributes of the manifest in the saver's report of a commit.
OF_MANIFEST: Final = ("digest", "nbytes", "profile", "stored_nbytes", "durability")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """A save, as the trainer requests it from the saver.

    Attributes:
        origin: the attempt's origin: run, launch, step and name.
        writer: number of this writer.
        context: everything in the snapshot except the tensors.
        deadline_s: longest wait for the other writers, in seconds.
        retention: rule by which committed checkpoints stay.
        writer_features: writer features of the run.
        delta: options of deltas.
        place: address or store of a checkpoint outside a run (see `ckptfmt.store`); None in a run.
        replace: whether to replace a checkpoint at that place.
        durability: least durability of the files at the commit: "home", or "node" or "peers" where
            caches are enough.
        ledger: the ledger entry at the begin of the save; empty for none.
    """

    origin: Origin
    writer: int
    context: Context
    deadline_s: float
    writer_features: tuple[str, ...]
    retention: Retention = KEEP_ALL
    delta: DeltaOptions = dataclasses.field(default_factory=DeltaOptions)
    place: Address | Store | None = None
    replace: bool = False
    durability: str = HOME
    ledger: bytes = b""

    def as_dict(self) -> dict[str, Any]:
        """Return the request as plain values, with streams and leaves as columns."""
        context = self.context
        return {
            "origin": self.origin.as_dict(),
            "writer": self.writer,
            "saved_unix_s": context.saved_unix_s,
            "streams": _columns(context.streams, RngStream),
            "leaves": _columns(context.leaves, Leaf),
            "absent": context.absent,
            "labels": {**context.labels.members(), "suspect": context.labels.suspect},
            "deadline_s": str(self.deadline_s),
            "retention": self.retention.as_dict(),
            "writer_features": list(self.writer_features),
            "delta": self.delta.as_dict(),
            "place": self.place,
            "replace": self.replace,
            "durability": self.durability,
            "ledger": self.ledger,
        }

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> SaveRequest:
        """Return the request from the result of `as_dict`."""
        context = Context(
            saved_unix_s=value["saved_unix_s"],
            streams=tuple(RngStream(**row) for row in _rows(value["streams"])),
            leaves=tuple(Leaf(**row) for row in _rows(value["leaves"])),
            absent=value["absent"],
            labels=Labels(**{**value["labels"], "tags": tuple(value["labels"]["tags"])}),
        )
        return cls(
            origin=Origin(**value["origin"]),
            writer=value["writer"],
            context=context,
            deadline_s=float(value["deadline_s"]),
            retention=Retention.from_dict(value["retention"]),
            writer_features=tuple(value["writer_features"]),
            delta=DeltaOptions.from_dict(value["delta"]),
            place=value["place"],
            replace=value["replace"],
            durability=value["durability"],
            ledger=value["ledger"],
        )


def _columns(rows: Iterable[RngStream | Leaf], kind: type[RngStream | Leaf]) -> dict[str, Any]:
    rows = tuple(rows)
    return {
        field.name: [getattr(row, field.name) for row in rows] for field in dataclasses.fields(kind)
    }


def _rows(columns: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for values in zip(*columns.values(), strict=True):
        yield dict(zip(columns, values, strict=True))
