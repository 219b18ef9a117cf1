"""From an open checkpoint back into a live `State`, in place."""

from __future__ import annotations

import dataclasses
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, Final

from ckptfmt.adapters import torch_side
from ckptfmt.adapters.context import find_differences, local_facts, plain_config, topology
from ckptfmt.adapters.data_loaders import may_load
from ckptfmt.adapters.live import Kind, Live, Unit, optimizer_prefix
from ckptfmt.adapters.live_trees import GLOBAL, Encoder, fingerprint
from ckptfmt.adapters.load_plan import MISSING, LoadPlan, Patterns, Rename
from ckptfmt.adapters.placing import Placer, plan_named_tensors, plan_sink, take_named_leaf
from ckptfmt.adapters.rng_streams import live_streams, plan_streams
from ckptfmt.documents.manifest import FIELDS
from ckptfmt.documents.tables import TensorKey
from ckptfmt.documents.tree import find_difference, parse_tree
from ckptfmt.errors import Code, err
from ckptfmt.read.reader import Checkpoint
from ckptfmt.read.reading import Reading
from ckptfmt.read.streaming import ReadReport
from ckptfmt.state import State
from ckptfmt.trainer.capture import LOCAL_TOPOLOGY

#: The levels of claims, from the least on.
CLAIMS: Final = ("S0", "S1", "T1")
#: Fields that are loaded; the others are compared, or put back as streams.
_LOADED: Final = ("weights", "optimizer", "data")
#: How many differences of the configuration are told one by one.
_SHOWN: Final = 20
_CURSOR_KIND: Final = "ckptfmt.data_cursor"
#: What lowers the claim of a load as long as the RNG streams stand elsewhere.
_STREAMS_PENDING: Final = "the random-number streams aren't put back yet"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What a load did, and what may be claimed of the run that goes on from it.

    Attributes:
        step: training steps done.
        digest: of the manifest.
        claim: ``T1`` same trajectory bit by bit; ``S1`` same order of samples, each once; ``S0`` same bytes.
        lowered_by: why the claim isn't T1.
        downgrades: what was loaded in another way than saved; among `lowered_by`.
        notes: changes worth a line that don't lower the claim.
        config_differences: path, saved and live value; configuration is never loaded.
        values: loaded values that stand in no container that could be changed, by field and name.
        reads: how much was read for it, by this process.
        renamed: live name and saved name, each with its field, of what was saved under another name.
        left_count: how many live tensors and values of this process `only` left as they were.
    """

    step: int
    digest: str
    claim: str
    lowered_by: tuple[str, ...]
    downgrades: tuple[str, ...]
    notes: tuple[str, ...]
    config_differences: tuple[tuple[str, object, object], ...]
    values: dict[str, object]
    reads: ReadReport
    renamed: tuple[tuple[str, str], ...]
    left_count: int

    def with_streams(self, found: Iterable[str] = ()) -> LoadReport:
        """Return the report once the RNG streams are put back, too, and what was found to differ then."""
        known = (reason for reason in self.lowered_by if reason != _STREAMS_PENDING)
        lowered = tuple(dict.fromkeys((*known, *found)))
        return dataclasses.replace(self, claim=self.claim if lowered else "T1", lowered_by=lowered)


def restore(
    state: State,
    checkpoint: Checkpoint,
    *,
    worker: int,
    worker_count: int,
    allow: Iterable[str] = frozenset(),
    strict: bool = False,
    streams: bool = True,
    only: Patterns = None,
    rename: Rename = None,
) -> LoadReport:
    """Load a checkpoint into the live objects of a state.

    Everything that can be known to be wrong is found before anything live is changed. With several workers, what this
    one leaves may be another's: then nothing is refused as unexpected here; use `plan_restore`.

    Args:
        state: live objects; parameters, containers and arrays are filled in place.
        checkpoint: an open one.
        worker: number of this worker, from 0.
        worker_count: how many workers load.
        allow: differences to accept: ``missing``, ``unexpected``, ``dtype``, ``streams``, ``loader``.
        strict: refuse RNG streams of another number of workers.
        streams: put RNG streams back too; else `restore_streams` does, once iterators exist.
        only: what to load, as patterns of saved names; see `ckptfmt.adapters.load_plan.Only`.
        rename: what live names were called; see `ckptfmt.adapters.load_plan.Renaming`.

    Raises: StateError (TENSOR_MISSING, TENSOR_UNEXPECTED, SHAPE_MISMATCH, DTYPE_MISMATCH, META_DESTINATION,
        LEAF_MISSING, LEAF_UNEXPECTED, GROUP_MISMATCH, STREAM_MISSING, STREAM_UNEXPECTED, CONFIG_IDENTITY, READ_BACK);
        and what reading raises.
    """
    restoration = plan_restore(
        state,
        checkpoint,
        worker=worker,
        worker_count=worker_count,
        allow=allow,
        strict=strict,
        only=only,
        rename=rename,
    )
    if worker_count == 1:
        restoration.check_renames(restoration.unused_renames())
    restoration.check(restoration.leftover() if worker_count == 1 else frozenset())
    return restoration.apply(restoration.plan_reading(), streams=streams)


def restore_streams(
    state: State,
    checkpoint: Checkpoint,
    *,
    worker: int,
    worker_count: int,
    allow: Iterable[str] = frozenset(),
    strict: bool = False,
    override: Patterns = (),
) -> tuple[str, ...]:
    """Put the RNG streams back: the last thing to do before the first step.

    Returns: what lowers the claim now: RNG streams that couldn't be put back, and what of the topology isn't as it was;
        since the load, flags may have been set, or something compiled.

    Raises: StateError(STREAM_MISSING, STREAM_UNEXPECTED).
    """
    live = Live.of(state, worker=worker, worker_count=worker_count)
    plan = LoadPlan(checkpoint, worker=worker, worker_count=worker_count, allow=frozenset(allow), override=override)
    actions = plan_streams(plan, live_streams(state.rng, live.devices), strict=strict)
    plan.check()
    for action in actions:
        action()
    return (*plan.downgrades, *_compare_topology(plan, live))


def plan_restore(
    state: State,
    checkpoint: Checkpoint,
    *,
    worker: int,
    worker_count: int,
    allow: Iterable[str] = frozenset(),
    strict: bool = False,
    only: Patterns = None,
    rename: Rename = None,
    override: Patterns = (),
) -> Restoration:
    """Return what a load would do; nothing live is changed. Arguments and errors are those of `restore`."""
    live = Live.of(state, worker=worker, worker_count=worker_count)
    plan = LoadPlan(
        checkpoint,
        worker=worker,
        worker_count=worker_count,
        allow=frozenset(allow),
        only=only,
        rename=rename,
        override=override,
    )
    side = torch_side()
    for field, entries in live.entries.items():
        for entry in entries:
            if side is not None:
                side.plan_entry(plan, entry, field)
    for number, unit in enumerate(live.units):
        _PLANS[unit.kind](plan, unit, live, number)
    stream_actions = plan_streams(plan, live_streams(state.rng, live.devices), strict=strict)
    differences = _compare_config(plan, state)
    lowered = (
        *_missing_fields(plan, state),
        *_list_decisive(plan, state, differences),
        *_compare_topology(plan, live),
        *_find_limits(live),
    )
    return Restoration(plan, state, stream_actions, tuple(differences), lowered)


class Restoration:
    """A load that is planned and not yet done: `leftover`, `check`, then `apply`.

    Workers agree on what none of them takes by intersecting their `leftover`, and give the result to `check`; likewise
    with `unused_renames` and `check_renames`.
    """

    def __init__(
        self,
        plan: LoadPlan,
        state: State,
        stream_actions: list[Callable[[], None]],
        config_differences: tuple[tuple[str, object, object], ...],
        lowered_by: tuple[str, ...],
    ) -> None:
        self._plan = plan
        self._state = state
        self._stream_actions = stream_actions
        self._config_differences = config_differences
        self._lowered_by = lowered_by

    def leftover(self) -> frozenset[tuple[str, TensorKey]]:
        """Return what this worker has no place for: ``tensor`` or ``leaf``, with field, name and scope."""
        return self._plan.leftover(field for field in _LOADED if not _is_left_out(self._state, field))

    def unused_renames(self) -> frozenset[str]:
        """Return the keys of `rename` that no live name of this worker has met."""
        return self._plan.renaming.unused()

    @staticmethod
    def check_renames(unused: frozenset[str]) -> None:
        """Refuse keys of `rename` that no worker has met. Raises: StateError(ARGUMENT)."""
        if unused:
            raise err(
                Code.ARGUMENT,
                f"no live name is one of these, or lies beneath it: {', '.join(map(repr, sorted(unused)))}",
                where="rename=",
                remedy="The keys are names of the live state; the values are those in the checkpoint.",
            )

    def check(self, leftover: frozenset[tuple[str, TensorKey]]) -> None:
        """Raise what is wrong with this load; `leftover` is what no worker takes."""
        self._plan.refuse_leftover(leftover)
        self._plan.check()

    def plan_reading(self) -> Reading:
        """Return what will be read for `apply`; nothing live is changed. Raises: IntegrityError of parts."""
        plan, side = self._plan, torch_side()
        borrow = None if side is None else side.plan_arrivals(plan.sinks, report=plan.notes.append)
        return plan.checkpoint.plan_reading(plan.sinks, borrow=borrow)

    def apply(self, reading: Reading, *, streams: bool = True) -> LoadReport:
        """Fill the live objects. Raises: StateError(READ_BACK), and what reading raises."""
        plan = self._plan
        reads = reading.run()
        for action in plan.actions:
            action()
        for action in self._stream_actions if streams else ():
            action()
        lowered = (*self._lowered_by, *plan.downgrades)
        if plan.is_partial:
            lowered += (f"only= was given: {plan.left_count} tensors and values here are left as they were",)
        if not streams:
            lowered += (_STREAMS_PENDING,)
        manifest = plan.checkpoint.manifest
        return LoadReport(
            step=manifest.origin.step,
            digest=manifest.digest,
            claim=self._claim(lowered),
            lowered_by=lowered,
            downgrades=tuple(plan.downgrades),
            notes=tuple(plan.notes),
            config_differences=self._config_differences,
            values=plan.values,
            reads=reads,
            renamed=plan.list_renamed(),
            left_count=plan.left_count,
        )

    def _claim(self, lowered: tuple[str, ...]) -> str:
        if not lowered:
            return "T1"
        checkpoint = self._plan.checkpoint
        if self._plan.is_partial or self._plan.reorders or ("data", "", GLOBAL) not in self._plan.taken_leaves:
            return "S0"
        cursor = checkpoint.leaf("data", "", GLOBAL)
        return "S1" if isinstance(cursor, dict) and cursor.get("kind") == _CURSOR_KIND else "S0"


# --- units ------------------------------------------------------------------------------------------------------------


def _plan_module(plan: LoadPlan, unit: Unit, live: Live, number: int) -> None:
    side = torch_side()
    if side is not None:
        side.plan_module(plan, live.views[number], unit.field)
        take_named_leaf(plan, unit)


def _plan_optimizer(plan: LoadPlan, unit: Unit, live: Live, _number: int) -> None:
    side = torch_side()
    if side is not None:
        prefix = f"{plan.renaming.saved_name(unit.name)}/" if optimizer_prefix(unit) else ""
        side.plan_optimizer(plan, unit.value, live.names, prefix=prefix, field=unit.field, scope=unit.scope)


def _plan_stateful(plan: LoadPlan, unit: Unit, _live: Live, _number: int) -> None:
    chosen = plan.choose(unit.field, [unit.name])
    if not chosen:
        return
    name, at, saved = plan.leaf(unit.field, chosen, unit.scope)
    where = f"{unit.field}:{unit.name}"
    if saved is MISSING:
        plan.problem(Code.LEAF_MISSING, where, "nothing was saved for this object")
        return
    if not may_load(plan, saved, unit.value, where):
        return
    now = unit.value.state_dict()
    _compare_cursors(plan, saved, now, where)
    value = Placer(plan, field=unit.field, scope=at).fresh(saved, name, now)
    plan.actions.append(functools.partial(_load_stateful, unit.value, value, where))


def _compare_cursors(plan: LoadPlan, saved: object, now: object, where: str) -> None:
    """Report what a cursor allows to be another from here on, and what makes another training of the run."""
    if not all(isinstance(cursor, dict) and cursor.get("kind") == _CURSOR_KIND for cursor in (saved, now)):
        return
    cursors: tuple[Any, Any] = (saved, now)
    for part in ("plan", "mixture"):
        for path, before, after in find_differences(*(cursor.get(part) for cursor in cursors)):
            plan.downgrades.append(f"{where}: {part}/{path}: saved {before!r}, here {after!r}")
            plan.reorders |= part == "mixture"


def _load_stateful(live: Any, value: object, where: str) -> None:  # noqa: ANN401 - has the two methods
    wanted = fingerprint(value, field=where, name="")
    try:
        live.load_state_dict(value)
    except Exception as error:
        error.add_note(f"ckptfmt: raised by the load_state_dict of {where}")
        raise
    found = fingerprint(live.state_dict(), field=where, name="")
    if found != wanted:
        path = find_difference(parse_tree(wanted[0], where=where), parse_tree(found[0], where=where))
        differing = path or next(name for name, digest in wanted[1].items() if found[1].get(name) != digest)
        raise err(Code.READ_BACK, f"its state_dict differs from the loaded one, first at {differing}", where=where)


def _plan_piece(plan: LoadPlan, unit: Unit, _live: Live, _number: int) -> None:
    plan_sink(plan, unit.value, field=unit.field, where=f"{unit.field}:{unit.name}")


def _plan_tree(plan: LoadPlan, unit: Unit, _live: Live, _number: int) -> None:
    if plan_named_tensors(plan, unit):
        return
    saved_name = plan.renaming.saved_name(unit.name)
    where = f"{unit.field}:{unit.name}"
    # Of a mapping that isn't chosen as a whole, what is in it may be.
    inside = type(unit.value) in (dict, OrderedDict) and not plan.fits(unit.field, saved_name)
    if not inside and not plan.choose(unit.field, [unit.name]):
        return
    name, at, saved = plan.leaf(unit.field, [saved_name], unit.scope)
    if saved is MISSING:
        if not inside:
            plan.problem(Code.LEAF_MISSING, where, "not saved")
        return
    if not may_load(plan, saved, unit.value, where):
        return
    placed = Placer(plan, field=unit.field, scope=at).place(unit.value, saved, name)
    if placed is unit.value:
        return
    if unit.put is None:
        plan.values[where] = placed
    else:
        plan.actions.append(functools.partial(unit.put, placed))


_PLANS: Final[dict[Kind, Callable[[LoadPlan, Unit, Live, int], None]]] = {
    Kind.MODULE: _plan_module,
    Kind.OPTIMIZER: _plan_optimizer,
    Kind.STATEFUL: _plan_stateful,
    Kind.PIECE: _plan_piece,
    Kind.TREE: _plan_tree,
}


# --- comparisons ------------------------------------------------------------------------------------------------------


def _is_left_out(state: State, field: str) -> bool:
    return field in state.absent_reasons()


def _missing_fields(plan: LoadPlan, state: State) -> list[str]:
    fields = plan.checkpoint.manifest.fields
    absent = [f"{field} wasn't saved: {fields[field].reason}" for field in FIELDS if fields[field].reason is not None]
    left = [field for field in _LOADED if fields[field].reason is None and _is_left_out(state, field)]
    return absent + [f"{field} isn't loaded" for field in left]


def _compare_config(plan: LoadPlan, state: State) -> list[tuple[str, object, object]]:
    if state.config is None:
        return []
    live = Encoder(field="config", scope=GLOBAL, inline=True).encode(plain_config(state.config, where="config:"), "")
    key = ("config", "", GLOBAL)
    saved = plan.checkpoint.leaf(*key) if key in plan.checkpoint.leaves else {}
    differences = find_differences(saved, live)
    known = [path for path, _, _ in find_differences({}, live)]
    for identity in state.identity:
        if not any(_lies_under(path, identity) for path in known):
            raise err(Code.ARGUMENT, f"config has no key {identity!r}", where="State(identity=...)")
        for path, before, now in differences:
            if _lies_under(path, identity):
                plan.problem(Code.CONFIG_IDENTITY, f"config:{path}", f"saved {before!r}, here {now!r}")
    return differences


def _list_decisive(plan: LoadPlan, state: State, differences: list[tuple[str, object, object]]) -> list[str]:
    """Return what the configuration lowers the claim by: whatever the caller doesn't call harmless."""
    if state.config is None:
        return [] if plan.checkpoint.manifest.fields["config"].reason is not None else ["config isn't compared"]
    decisive = [
        f"config:{path}: saved {before!r}, here {now!r}"
        for path, before, now in differences
        if not any(_lies_under(path, key) for key in state.harmless)
    ]
    more = len(decisive) - _SHOWN
    return decisive if more <= 0 else [*decisive[:_SHOWN], f"config: {more} more values differ"]


def _lies_under(path: str, key: str) -> bool:
    return path == key or path.startswith(f"{key}/")


def _find_limits(live: Live) -> list[str]:
    """Return what no checkpoint can bring back, and what therefore lowers the claim."""
    side = torch_side()
    return (
        [] if side is None else [limit for view in live.views.values() for limit in side.find_claim_limits(view.module)]
    )


def _compare_topology(plan: LoadPlan, live: Live) -> list[str]:
    facts: dict[str, object] = {"": topology(worker_count=plan.worker_count)}
    if plan.worker == 0:
        facts[LOCAL_TOPOLOGY] = local_facts(devices=live.devices, meshes=live.meshes)
    lowered = []
    for name, now in facts.items():
        key = ("topology", name, GLOBAL)
        saved = plan.checkpoint.leaf(*key) if key in plan.checkpoint.leaves else {}
        lowered += [f"{path}: saved {before!r}, here {after!r}" for path, before, after in find_differences(saved, now)]
    return lowered
