"""The request for a save, from trainer to saver, as the plain values of a message."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

from ckptfmt.delta.policy import DeltaOptions
from ckptfmt.documents.labels import Labels
from ckptfmt.documents.manifest import Origin, checkpoint_name
from ckptfmt.documents.part import Leaf, RngStream
from ckptfmt.run.retention import Retention
from ckptfmt.run.save_job import SaveState
from ckptfmt.signing.signer import Signer
from ckptfmt.store import address_of, open_address
from ckptfmt.store.protocol import Store
from ckptfmt.write.image import Context

if TYPE_CHECKING:
    from ckptfmt.run.votes import OtherHomes

#: Attributes of the manifest in the saver's report of a commit.
OF_MANIFEST: Final = ("digest", "nbytes", "profile", "stored_nbytes", "durability")


def dump_request(save: SaveState, context: Context, delta: DeltaOptions) -> dict[str, Any]:
    """Return a request for a save as plain values, with streams and leaves as columns.

    The member `place` is the address or the store of a checkpoint outside of a run (see
    `ckptfmt.store`), and None in a run.

    Args:
        context: everything in the snapshot except the tensors.
        delta: options of deltas.
    """
    return {
        "streams": _columns(context.streams, RngStream),
        "leaves": _columns(context.leaves, Leaf),
        "origin": save.origin.as_dict(),
        "writer": save.writer,
        "saved_unix_s": context.saved_unix_s,
        "absent": context.absent,
        "labels": {**context.labels.members(), "suspect": context.labels.suspect},
        "deadline_s": str(save.deadline_s),
        "retention": save.retention.as_dict(),
        "writer_features": list(save.writer_features),
        "delta": delta.as_dict(),
        "place": None if save.run is not None else address_of(save.store) or save.store,
        "replace": save.replace,
        "durability": save.durability,
        "ledger": save.ledger,
        "signer": None if save.signer is None else save.signer.as_dict(),
        "pin": save.pin,
        "others": None if save.others is None else save.others.as_dict(),
    }


def parse_request(
    value: dict[str, Any], run: Store | None
) -> tuple[SaveState, Context, DeltaOptions]:
    """Return the arguments of `dump_request` from its result.

    Args:
        run: store rooted at the run, for a save in the run; None without a run.

    Raises: errors of opening the place.
    """
    context = Context(
        saved_unix_s=value["saved_unix_s"],
        streams=tuple(RngStream(**row) for row in _rows(value["streams"])),
        leaves=tuple(Leaf(**row) for row in _rows(value["leaves"])),
        absent=value["absent"],
        labels=Labels(**{**value["labels"], "tags": tuple(value["labels"]["tags"])}),
    )
    origin = Origin(**value["origin"])
    place = value["place"]
    if place is None:
        assert run is not None  # noqa: S101
        assert origin.launch is not None  # noqa: S101
        store = run.at(checkpoint_name(origin.step, origin.launch))
    else:
        store = open_address(place, writable=True) if isinstance(place, bytes | dict) else place
    save = SaveState(
        store=store,
        origin=origin,
        writer=value["writer"],
        deadline_s=float(value["deadline_s"]),
        replace=value["replace"],
        run=run if place is None else None,
        writer_features=tuple(value["writer_features"]),
        retention=Retention.from_dict(value["retention"]),
        durability=value["durability"],
        ledger=value["ledger"],
        signer=None if value["signer"] is None else Signer(**value["signer"]),
        pin=value["pin"],
        others=_parse_others(value["others"]),
    )
    return save, context, DeltaOptions.from_dict(value["delta"])


def _parse_others(value: dict[str, Any] | None) -> OtherHomes | None:
    if value is None:
        return None
    from ckptfmt.run.votes import OtherHomes  # noqa: PLC0415 - few runs need the module

    return OtherHomes.from_dict(value)


def _columns(rows: Iterable[RngStream | Leaf], kind: type[RngStream | Leaf]) -> dict[str, Any]:
    rows = tuple(rows)
    return {
        field.name: [getattr(row, field.name) for row in rows] for field in dataclasses.fields(kind)
    }


def _rows(columns: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for values in zip(*columns.values(), strict=True):
        yield dict(zip(columns, values, strict=True))
