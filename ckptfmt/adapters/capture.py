"""Capture a State for a save: tensors as sources, values and RNG streams as copies."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from ckptfmt.adapters import Sides, find_sides
from ckptfmt.adapters.context import local_facts, own_config, provenance, topology
from ckptfmt.adapters.data_loaders import has_unread_samplers
from ckptfmt.adapters.data_position import UNREAD
from ckptfmt.adapters.live import Kind, Live, Unit, check_source, is_piece, optimizer_prefix
from ckptfmt.adapters.live_trees import GLOBAL, Encoder, plain_leaves
from ckptfmt.adapters.numbering import list_leaves
from ckptfmt.adapters.placing import is_named_tensors
from ckptfmt.adapters.rng_streams import capture_streams, live_streams, unit_streams
from ckptfmt.adapters.streamed_data import find_losses
from ckptfmt.adapters.unsaved import UNSAVED
from ckptfmt.adapters.visible import look_at
from ckptfmt.documents.frozen_tensors import BASE_LEAF, dump_location
from ckptfmt.documents.manifest import FIELDS
from ckptfmt.documents.part import Leaf
from ckptfmt.documents.tables import TensorKey, key_of, sort_rows
from ckptfmt.documents.tree import TensorRef
from ckptfmt.errors import Code, err
from ckptfmt.state import LiveRngStream, State, place_of
from ckptfmt.write.snapshot import Snapshot, TensorSource

#: Leaf of topology from worker 0 only: facts that may differ between machines.
LOCAL_TOPOLOGY: Final = "local"
#: Leaf of topology from worker 0 only: digests of the visible attributes of objects of unknown
#: classes.
SEEN_TOPOLOGY: Final = "objects"


def capture(
    state: State,
    *,
    worker: int,
    worker_count: int,
    look: Callable[[Sequence[Unit], Sequence[Leaf], Sequence[TensorSource]], Iterable[str]]
    | None = None,
    unsaved: Callable[[Live], Sequence[str]] | None = None,
) -> Snapshot:
    """Return this worker's contribution to a save.

    The sources refer to live tensors, so their content is right until the program changes the
    tensors. Values and RNG streams are copied here.

    Args:
        state: the state to save.
        worker: number of this worker, from 0.
        worker_count: number of workers.
        look: examines the objects, values and tensors, and returns the names of the `DATA_DOUBTS`
            that apply.
        unsaved: returns texts about parts of the training missing from this save. The texts lower
            the claim of a load. Worker 0's texts are saved.

    Raises: StateError(STATE_UNSUPPORTED, STATE_NAME, PARAMETER_UNNAMED, ARGUMENT);
        FormatError(LIMIT_EXCEEDED, DOC_DEPTH).
    """
    live = Live.of(state, worker=worker, worker_count=worker_count)
    _refuse_shared_parameters(live)
    lacking = () if unsaved is None else unsaved(live)
    tensors: list[TensorSource] = []
    leaves: list[Leaf] = []
    side = live.sides.torch  # only torch has entries, modules and optimizers
    for field, entries in live.entries.items():
        sources = side.capture_entries(entries, field)
        if field == "weights" and state.frozen_base is not None:
            place = state.frozen_base
            seen = state._frozen.setdefault(os.fspath(place), {})  # noqa: SLF001
            split = side.split_frozen(sources, entries, place, seen)
            sources = split.stored
            leaves += _frozen_leaves(split, worker=worker, worker_count=live.worker_count)
        tensors += sources
    for number, unit in enumerate(live.units):
        if not unit.is_given:
            continue
        found, sources = _capture_unit(unit, live, number)
        leaves += found
        tensors += sources
    doubts: tuple[str, ...] = (UNREAD,) if has_unread_samplers(state) else ()
    if look is not None:
        doubts += tuple(look(live.units, leaves, tensors))
    sides = find_sides()  # the code of a value may have imported a library
    positions = [unit.value for unit in live.units if unit.field == "data"]
    if worker == 0 and positions:  # worker 0 saves the doubts
        doubts += tuple(find_losses(positions))
    leaves += _context_leaves(state, live, sides, lacking, worker=worker, doubts=doubts)
    aliases = [
        (tensor.field, alias, tensor.scope) for tensor in tensors for alias in tensor.aliases
    ]
    _check_unique([*map(key_of, tensors), *aliases], "tensors")
    _check_unique(map(key_of, leaves), "values")
    streams = capture_streams(list_streams(state, live, sides.torch), worker=worker, sides=sides)
    given = {tensor.field for tensor in tensors} | {leaf.field for leaf in leaves}
    if streams:
        given.add("rng")
    reasons = state.absent_reasons()
    empty = [field for field in FIELDS if field not in given]
    absent = {field: reasons.get(field, "nothing of it on this worker") for field in empty}
    return Snapshot(
        tensors=sort_rows(tensors),
        streams=tuple(streams),
        leaves=sort_rows(leaves),
        absent=absent,
        doubts=doubts,
        declared_by={} if side is None else side.declared_by(tensors),
    )


def add_optimizers(
    snapshot: Snapshot, optimizers: Mapping[tuple[Any, ...], Mapping[str, Any]]
) -> Snapshot:
    """Return a snapshot with the leaves of optimizers' state_dicts added.

    Args:
        snapshot: the snapshot of the tensors, among others.
        optimizers: state_dicts by the path of keys of each optimizer. Sources stand for the tensors
            of the same name.

    Raises: StateError(STATE_UNSUPPORTED, STATE_NAME); FormatError(LIMIT_EXCEEDED, DOC_DEPTH).
    """
    encoder = Encoder(field="optimizer", scope=GLOBAL)
    trees = list_leaves(optimizers)
    leaves = [
        *snapshot.leaves,
        *(encoder.leaf(name, _with_references(tree)) for name, tree in trees.items()),
    ]
    if encoder.sources:
        detail = "a tensor instead of a ckptfmt.TensorSource"
        raise err(Code.STATE_UNSUPPORTED, detail, where=f"optimizer:{encoder.sources[0].name}")
    _check_unique(map(key_of, leaves), "values")
    absent = {name: reason for name, reason in snapshot.absent.items() if name != "optimizer"}
    return dataclasses.replace(snapshot, leaves=sort_rows(leaves), absent=absent)


def _with_references(tree: Any) -> Any:
    """Return a tree with a reference in the place of each source."""
    if isinstance(tree, dict):
        return {key: _with_references(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_with_references(value) for value in tree]
    return TensorRef(tree.name, "torch") if is_piece(tree) else tree


def list_streams(state: State, live: Live, side: Any) -> list[LiveRngStream]:
    """Return the RNG streams that a save contains and a load puts back.

    Args:
        state: the State.
        live: the structure of the State.
        side: the result of `torch_side`.

    Raises: as `ckptfmt.adapters.rng_streams.live_streams`: StateError(STATE_UNSUPPORTED,
        STREAM_MISSING).
    """
    own = [] if state.rng is False else live_streams(state.rng, live.devices, side)
    return own + unit_streams(live.units, state.rng, side)


def _refuse_shared_parameters(live: Live) -> None:
    """Refuse optimizers of one parameter whose options or states would have the same names.

    Raises: StateError(STATE_NAME).
    """
    side = live.sides.torch
    optimizers = [
        unit for unit in live.units if unit.kind is Kind.OPTIMIZER and not optimizer_prefix(unit)
    ]
    owners: dict[tuple[int, str], tuple[Unit, object]] = {}
    for unit in optimizers if len(optimizers) > 1 else ():
        for parameter, told in side.iter_members(unit.value):
            owner, theirs = owners.setdefault((id(parameter), unit.scope), (unit, told))
            if owner.value is unit.value or (told is not None and told == theirs):
                continue
            detail = (
                f"an optimizer with a parameter that {place_of(owner.field, owner.name)} has, too:"
                " the options and states of both would have the same names"
            )
            remedy = (
                "Give one of them in extra, where its name comes first:"
                f" State(extra={{{unit.name.rpartition('/')[2]!r}: optimizer}})."
            )
            where = place_of(unit.field, unit.name)
            raise err(Code.STATE_NAME, detail, where=where, remedy=remedy)


def _frozen_leaves(split: Any, *, worker: int, worker_count: int) -> list[Leaf]:
    """Return the references to the frozen base. Spec: REQ-FRZ-001 to REQ-FRZ-003."""
    rows = [(one.leaf_name, one.dump()) for one in split.frozen]
    # Another worker may have references although worker 0 has none.
    if worker == 0 and (rows or worker_count > 1):
        rows.append((BASE_LEAF, dump_location(split.location)))
    return [Leaf(field="weights", name=name, scope=GLOBAL, value=value) for name, value in rows]


def _check_unique(keys: Iterable[TensorKey], what: str) -> None:
    """Check that no key occurs twice. Raises: StateError(STATE_NAME)."""
    twice = next((key for key, count in Counter(keys).items() if count > 1), None)
    if twice is not None:
        field, name, scope = twice
        raise err(
            Code.STATE_NAME,
            f"two {what} of {field} are called {name!r} in scope {scope}",
            where=place_of(field, name),
        )


def _capture_unit(unit: Unit, live: Live, number: int) -> tuple[list[Leaf], list[TensorSource]]:
    """Return the values and the tensors of an object of the state."""
    side = live.sides.torch
    encoder = Encoder(field=unit.field, scope=unit.scope, sides=live.sides)
    leaves: list[Leaf] = []
    match unit.kind:
        case Kind.MODULE:
            leaves = side.capture_module(live.views[number], encoder)
        case Kind.OPTIMIZER:
            prefix = optimizer_prefix(unit)
            path = () if prefix else unit.path
            leaves = side.capture_optimizer(
                unit.value, live.names, prefix=prefix, path=path, encoder=encoder
            )
        case Kind.STATEFUL:
            leaves = [encoder.leaf(unit.name, unit.value.state_dict())]
        case Kind.PIECE:
            encoder.sources.append(
                check_source(unit.value, field=unit.field, where=place_of(unit.field, unit.name))
            )
        case Kind.TREE if live.worker_count > 1 and is_named_tensors(unit):
            encoder.encode(unit.value, unit.name)
        case Kind.TREE:
            leaves = [encoder.leaf(unit.name, unit.value)]
    return leaves, encoder.sources


def _context_leaves(
    state: State,
    live: Live,
    sides: Sides,
    unsaved: Sequence[str],
    *,
    worker: int,
    doubts: Iterable[str],
) -> list[Leaf]:
    facts = topology(worker_count=live.worker_count, side=sides.torch)
    values: list[tuple[str, str, Any]] = [("topology", "", facts)]
    config, is_given = own_config(state.config, worker=worker)
    if config is not None and is_given:
        values.append(("config", "", config))
    if worker == 0:
        facts = local_facts(live, sides.torch)
        values.append(("provenance", "", provenance(state.provenance, state.init_from)))
        facts |= dict.fromkeys(doubts, True)
        if unsaved:
            facts[UNSAVED] = list(unsaved)
        if objects := look_at(live.units):
            values.append(("topology", SEEN_TOPOLOGY, objects))
        values.append(("topology", LOCAL_TOPOLOGY, facts))
    return plain_leaves(values, sides)
