"""From a live `State` to the `Snapshot` that a writer writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from ckptfmt.adapters import torch_side
from ckptfmt.adapters.context import local_facts, plain_config, provenance, topology
from ckptfmt.adapters.live import Kind, Live, Unit, check_source, optimizer_prefix
from ckptfmt.adapters.live_trees import GLOBAL, Encoder, check_unique
from ckptfmt.adapters.placing import is_named_tensors
from ckptfmt.adapters.rng_streams import capture_streams, live_streams
from ckptfmt.documents.manifest import FIELDS
from ckptfmt.documents.part import Leaf
from ckptfmt.documents.tables import sort_key
from ckptfmt.state import State
from ckptfmt.write.snapshot import Snapshot, TensorSource

#: Leaf of topology that only worker 0 gives: what may differ between machines.
LOCAL_TOPOLOGY: Final = "local"


def capture(state: State, *, worker: int, worker_count: int) -> Snapshot:
    """Return everything that this worker gives to a save.

    The sources refer to live tensors: they hold this state until the program changes it. Values and RNG streams are
    copied here.

    Args:
        state: what to save.
        worker: number of this worker, from 0.
        worker_count: how many workers there are.

    Raises: StateError(STATE_UNSUPPORTED, STATE_NAME, PARAMETER_UNNAMED, ARGUMENT); FormatError(LIMIT_EXCEEDED,
        DOC_DEPTH).
    """
    live = Live.of(state, worker=worker, worker_count=worker_count)
    tensors: list[TensorSource] = []
    leaves: list[Leaf] = []
    side = torch_side()
    for field, entries in live.entries.items():
        tensors += [] if side is None else side.capture_entries(entries, field)
    for number, unit in enumerate(live.units):
        encoder = Encoder(field=unit.field, scope=unit.scope)
        leaves += _CAPTURES[unit.kind](unit, encoder, live, number)
        tensors += encoder.sources
    leaves += _context_leaves(state, live, worker=worker, worker_count=worker_count)
    aliases = [(tensor.field, alias, tensor.scope) for tensor in tensors for alias in tensor.aliases]
    check_unique([*((tensor.field, tensor.name, tensor.scope) for tensor in tensors), *aliases], "tensors")
    check_unique([(leaf.field, leaf.name, leaf.scope) for leaf in leaves], "values")
    given = {tensor.field for tensor in tensors} | {leaf.field for leaf in leaves}
    return Snapshot(
        tensors=tuple(sorted(tensors, key=_tensor_order)),
        streams=capture_streams(live_streams(state.rng, live.devices), worker=worker),
        leaves=tuple(sorted(leaves, key=lambda leaf: sort_key((leaf.field, leaf.name, leaf.scope)))),
        absent=_absent(state, given),
        declared_by={} if side is None else side.declared_by(tensors),
    )


def _tensor_order(source: TensorSource) -> tuple[int, bytes, bytes]:
    return sort_key((source.field, source.name, source.scope))


def _capture_module(_unit: Unit, encoder: Encoder, live: Live, number: int) -> list[Leaf]:
    side = torch_side()
    leaves: list[Leaf] = [] if side is None else side.capture_module(live.views[number], encoder)
    return leaves


def _capture_optimizer(unit: Unit, encoder: Encoder, live: Live, _number: int) -> list[Leaf]:
    side = torch_side()
    prefix = optimizer_prefix(unit)
    leaves: list[Leaf] = (
        [] if side is None else side.capture_optimizer(unit.value, live.names, prefix=prefix, encoder=encoder)
    )
    return leaves


def _capture_stateful(unit: Unit, encoder: Encoder, _live: Live, _number: int) -> list[Leaf]:
    return [encoder.leaf(unit.name, unit.value.state_dict())]


def _capture_piece(unit: Unit, encoder: Encoder, _live: Live, _number: int) -> list[Leaf]:
    encoder.sources.append(check_source(unit.value, field=unit.field, where=f"{unit.field}:{unit.name}"))
    return []


def _capture_tree(unit: Unit, encoder: Encoder, live: Live, _number: int) -> list[Leaf]:
    if live.worker_count > 1 and is_named_tensors(unit):
        encoder.encode(unit.value, unit.name)
        return []
    return [encoder.leaf(unit.name, unit.value)]


_CAPTURES: Final[dict[Kind, Callable[[Unit, Encoder, Live, int], list[Leaf]]]] = {
    Kind.MODULE: _capture_module,
    Kind.OPTIMIZER: _capture_optimizer,
    Kind.STATEFUL: _capture_stateful,
    Kind.PIECE: _capture_piece,
    Kind.TREE: _capture_tree,
}


def _context_leaves(state: State, live: Live, *, worker: int, worker_count: int) -> list[Leaf]:
    values: list[tuple[str, str, Any]] = [("topology", "", topology(worker_count=worker_count))]
    if state.config is not None:
        values.append(("config", "", plain_config(state.config, where="config:")))
    if worker == 0:
        values.append(("topology", LOCAL_TOPOLOGY, local_facts(devices=live.devices, meshes=live.meshes)))
        values.append(("provenance", "", provenance(state.provenance)))
    return [
        Encoder(field=field, scope=GLOBAL, inline=True).leaf(name, value, tensors_under=name)
        for field, name, value in values
    ]


def _absent(state: State, given: set[str]) -> dict[str, str]:
    reasons = state.absent_reasons()
    empty = [field for field in FIELDS if field not in given and field != "rng"]
    return {field: reasons.get(field, "nothing of it on this worker") for field in empty}
