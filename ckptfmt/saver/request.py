"""A save as a trainer asks its saver for it, as an object and as plain values of a message; the answer to a commit."""

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

#: What a saver tells the trainer of a manifest.
OF_MANIFEST: Final = ("digest", "nbytes", "profile", "stored_nbytes", "durability")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """One save, as the trainer asks for it.

    Attributes:
        origin: of the attempt.
        writer: number of this writer.
        context: what isn't tensors.
        deadline_s: how long to wait for the other writers, in seconds.
        retention: what stays of what is committed.
        writer_features: of the run.
        delta: whether it may be a delta.
        place: of a checkpoint outside of a run: its address (see `ckptfmt.store`), or a store that is rooted there.
        replace: whether to take the place of a checkpoint that is there.
        durability: where its files must be for the commit: "home"; "node" where a cache of this node will do.
        ledger: the entry of the run's ledger as of the begin of the save; empty for none.
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
        """Return the request as plain values, the many of a kind in columns."""
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
        """Return the request that `as_dict` was asked of."""
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
    return {field.name: [getattr(row, field.name) for row in rows] for field in dataclasses.fields(kind)}


def _rows(columns: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for values in zip(*columns.values(), strict=True):
        yield dict(zip(columns, values, strict=True))
