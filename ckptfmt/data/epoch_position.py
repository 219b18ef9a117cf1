"""The position of a loader that reads its data set epoch by epoch, as saved for torch's DataLoader.

The order of the samples depends on the states of the random-number streams from which the samplers
drew when the epoch began. The position has the states of the streams, and the number of batches
that the loop has taken.

Spec: REQ-EPO-001 to REQ-EPO-003.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final

from ckptfmt import limits
from ckptfmt.data.cursor_map import CursorMap, refuse

#: The name of the library in the saved value.
LIB: Final = "torch.utils.data"
_CLAUSE: Final = "REQ-EPO-001"
_SEED_BITS: Final = 64
_DIGEST_DIGITS: Final = 64
#: Types of the values that `attributes` may have.
_SCALARS: Final = (bool, int, float, str, type(None))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SavedStream:
    """The state of a random-number stream; `state` is a tree document of the stream's kind."""

    name: str
    kind: str
    state: bytes


Streams = tuple[SavedStream, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The facts of a loader that decide its batches. None stands for an unknown number.

    Attributes:
        samples: number of samples of the data set.
        batch_size: number of samples in a batch.
        drop_last: whether the last, smaller batch of an epoch is left out.
        batch_count: number of batches in an epoch.
        sampler: name of the class of the sampler or batch sampler.
    """

    samples: int | None
    batch_size: int | None
    drop_last: bool
    batch_count: int | None
    sampler: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Epoch:
    """The epoch that a loader has begun.

    Attributes:
        begin: streams before the iterator of the sampler was made.
        first: streams before the first batch was drawn; None before the first batch.
        redrawn: names of the streams from which the sampler drew for later batches.
        ahead: batches drawn by the sampler, and not taken by the loop; None unless `redrawn`.
        is_drawn: whether the sampler has come to its end.
        seed: seed of the worker processes; None without worker processes.
        digest: digest of the samples of the batches taken; None for samples without numbers.
    """

    begin: Streams
    first: Streams | None
    redrawn: tuple[str, ...]
    ahead: tuple[object, ...] | None
    is_drawn: bool
    seed: int | None
    digest: str | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EpochPosition:
    """The position of a loader.

    Attributes:
        sizes: facts of the loader, compared before the position is restored.
        epoch: number of epochs before the current epoch.
        batches: number of batches of the current epoch that the loop has taken.
        attributes: changed attributes of the samplers, at the begin of the current epoch.
        process_count: number of worker processes.
        draws: whether the data set has drawn random numbers.
        streams: streams of each worker process after the process's last batch taken; None for a
            process without draws.
        current: the current epoch; None between two epochs.
        seed: seed of worker processes that live for all epochs; None without such processes.
    """

    sizes: Sizes
    epoch: int
    batches: int
    attributes: dict[str, object]
    process_count: int
    draws: bool
    streams: tuple[Streams | None, ...]
    current: Epoch | None
    seed: int | None


def dump_position(position: EpochPosition) -> dict[str, Any]:
    """Return the tree. Spec: REQ-EPO-001."""
    current = position.current
    tree = {
        "sizes": _members(position.sizes),
        "epoch": position.epoch,
        "batches": position.batches,
        "attributes": dict(position.attributes),
        "process_count": position.process_count,
        "draws": position.draws,
        "streams": [_dump_streams(streams) for streams in position.streams],
        "current": None,
        "seed": position.seed,
    }
    if current is not None:
        tree["current"] = _members(current) | {
            "begin": _dump_streams(current.begin),
            "first": _dump_streams(current.first),
            "redrawn": list(current.redrawn),
            "ahead": None if current.ahead is None else list(current.ahead),
        }
    return tree


def _members(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def _dump_streams(streams: Streams | None) -> list[dict[str, Any]] | None:
    return None if streams is None else [_members(stream) for stream in streams]


def parse_position(tree: object, *, where: str = "loader/state") -> EpochPosition:
    """Return the position from its tree. Raises: CURSOR_FORM. Spec: REQ-EPO-001."""
    top = CursorMap.of(tree, where, _CLAUSE)
    top.check_names(*(field.name for field in dataclasses.fields(EpochPosition)))
    sizes = top.inner("sizes")
    sizes.check_names(*(field.name for field in dataclasses.fields(Sizes)))
    attributes = top.inner("attributes")
    for name, value in attributes.members.items():
        if type(name) is not str or type(value) not in _SCALARS:
            refuse("attributes have names, and plain values", attributes.where, _CLAUSE)
    count = top.integer("process_count", limits.WRITERS)
    streams = tuple(
        _parse_streams(value, f"{where}/streams/{number}")
        for number, value in enumerate(top.items("streams"))
    )
    if len(streams) != count:
        refuse(f"{len(streams)} lists for {count} processes", f"{where}/streams", _CLAUSE)
    batches = top.integer("batches", limits.JSON_INTEGER)
    current = None if top.members["current"] is None else _parse_epoch(top.inner("current"))
    if batches and (current is None or current.first is None):
        refuse(f"{batches} batches of no epoch", f"{where}/batches", "REQ-EPO-002")
    return EpochPosition(
        sizes=Sizes(
            samples=_optional(sizes, "samples", limits.JSON_INTEGER),
            batch_size=_optional(sizes, "batch_size", limits.JSON_INTEGER),
            drop_last=_flag(sizes, "drop_last"),
            batch_count=_optional(sizes, "batch_count", limits.JSON_INTEGER),
            sampler=sizes.text("sampler"),
        ),
        epoch=top.integer("epoch", limits.JSON_INTEGER),
        batches=batches,
        attributes={str(name): value for name, value in attributes.members.items()},
        process_count=count,
        draws=_flag(top, "draws"),
        streams=streams,
        current=current,
        seed=_optional(top, "seed", (1 << _SEED_BITS) - 1),
    )


def _parse_epoch(found: CursorMap) -> Epoch:
    found.check_names(*(field.name for field in dataclasses.fields(Epoch)))
    begin = _parse_streams(found.members["begin"], f"{found.where}/begin")
    if begin is None:
        refuse("no streams", f"{found.where}/begin", _CLAUSE)
    redrawn = found.items("redrawn")
    if not all(type(name) is str for name in redrawn):
        refuse("not a list of names", f"{found.where}/redrawn", _CLAUSE)
    has_ahead = found.members["ahead"] is not None
    if has_ahead != bool(redrawn):
        refuse("batches drawn ahead, or none", f"{found.where}/ahead", "REQ-EPO-002")
    digest = found.members["digest"]
    if digest is not None and len(found.text("digest")) != _DIGEST_DIGITS:
        refuse("not a digest", f"{found.where}/digest", _CLAUSE)
    return Epoch(
        begin=begin,
        first=_parse_streams(found.members["first"], f"{found.where}/first"),
        redrawn=tuple(str(name) for name in redrawn),
        ahead=tuple(found.items("ahead")) if has_ahead else None,
        is_drawn=_flag(found, "is_drawn"),
        seed=_optional(found, "seed", (1 << _SEED_BITS) - 1),
        digest=None if digest is None else str(digest),
    )


def _parse_streams(value: object, where: str) -> Streams | None:
    if value is None:
        return None
    rows = CursorMap({"streams": value}, where, _CLAUSE)
    parsed = []
    for row in rows.maps("streams"):
        row.check_names("name", "kind", "state")
        state = row.members["state"]
        if type(state) is not bytes:
            refuse("not a state in bytes", f"{row.where}/state", _CLAUSE)
        parsed.append(SavedStream(name=row.text("name"), kind=row.text("kind"), state=state))
    return tuple(parsed)


def _optional(found: CursorMap, name: str, most: int) -> int | None:
    return None if found.members[name] is None else found.integer(name, most)


def _flag(found: CursorMap, name: str) -> bool:
    value = found.members[name]
    if type(value) is not bool:
        refuse(f"{name} is neither true nor false", f"{found.where}/{name}", _CLAUSE)
    return value
