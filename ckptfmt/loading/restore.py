"""The load of an open checkpoint into the live `State` of all processes, or an error on all."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

from ckptfmt.adapters import jax_side, torch_side
from ckptfmt.adapters.capture import list_streams
from ckptfmt.adapters.context import find_differences
from ckptfmt.adapters.data_loaders import may_load, settle
from ckptfmt.adapters.live import Kind, Live, Unit, optimizer_prefix
from ckptfmt.adapters.live_trees import fingerprint, prefix_of
from ckptfmt.adapters.load_plan import MISSING, LoadPlan, Patterns, Rename, check_allow
from ckptfmt.adapters.placing import (
    Placer,
    plan_named_tensors,
    plan_sink,
    put_back,
    take_named_leaf,
)
from ckptfmt.adapters.rng_streams import capture_streams, live_streams, plan_streams, settling
from ckptfmt.adapters.streamed_data import (
    finish_load,
    is_loader,
    is_of_known_library,
    load_position,
)
from ckptfmt.data.cursor import KIND as CURSOR_KIND
from ckptfmt.documents.tables import TensorKey
from ckptfmt.documents.tree import find_difference, parse_tree
from ckptfmt.errors import Code, err
from ckptfmt.group import Group
from ckptfmt.loading.agreement import JointStep
from ckptfmt.loading.claims import (
    LEFT_OUT,
    STREAMS_PENDING,
    claim_of,
    compare_config,
    compare_objects,
    compare_topology,
    find_reasons,
)
from ckptfmt.loading.load_report import LoadReport, claim_of_all
from ckptfmt.read.reader import Checkpoint
from ckptfmt.read.reading import Reading
from ckptfmt.read.sharing import Peers, refuse_sharing
from ckptfmt.read.streaming import ReadReport
from ckptfmt.state import CapturedRng, State, place_of
from ckptfmt.write.snapshot import Memory

#: Loaded fields. The remaining fields are compared, or put back as RNG streams.
_LOADED: Final = ("weights", "optimizer", "data")


def load_once(
    state: State,
    checkpoint: Checkpoint,
    group: Group,
    *,
    allow: Iterable[str],
    strict: bool,
    streams: bool = True,
    only: Patterns = None,
    rename: Rename = None,
    override: Patterns = (),
    share: bool = False,
    memory: Memory | None = None,
    goes_back: bool = False,
    lends: bool = False,
) -> LoadReport:
    """Load a checkpoint into a state on every process of the group.

    A tensor or value without a place on any process is unexpected. Mismatches on any process are
    found before a live object changes on any process. Damaged bytes are found during the read:
    then the state is partly loaded, and must not be used to continue.

    Args:
        state: live objects. Parameters, containers and arrays are filled in place; JAX trees are
            replaced in the state.
        allow: accepted differences: ``missing``, ``unexpected``, ``dtype``, ``streams``,
            ``loader``.
        strict: whether to refuse RNG streams of another number of workers.
        streams: whether to put the RNG streams back too; else `restore_streams` does so, after the
            iterators are made.
        only: patterns of the saved names to load; see `ckptfmt.adapters.load_plan.Only`.
        rename: saved names for live names; see `ckptfmt.adapters.load_plan.Renaming`.
        override: patterns of live names to leave unchanged.
        share: whether one process reads data for several processes, and sends the data to them.
        memory: see `Checkpoint.plan_reading`.
        goes_back: see `LoadPlan`.
        lends: whether processes with contents in memory send the contents to the others.

    Raises: as `ckptfmt.load`; LayoutError(WRITERS_DIVERGED) if the processes load different
        checkpoints; StateError(PEER_FAILED) if another process refused; ReplacedError on all
        processes if the checkpoint was replaced during the load; DamagedMemoryError on all
        processes if lent contents differ from their digests.
    """
    allow = check_allow(allow)
    step = JointStep(group, checkpoint)
    with step:
        plan = LoadPlan(
            checkpoint,
            worker=group.writer,
            worker_count=group.writer_count,
            allow=allow,
            only=only,
            rename=rename,
            override=override,
            goes_back=goes_back,
        )
        restoration = plan_restore(state, plan, strict=strict)
        untaken = restoration.list_untaken()
    told = group.all_gather({"digest": checkpoint.digest, **untaken})
    digests = {theirs["digest"] for theirs in told}
    if len(digests) > 1:
        with step:
            checkpoint.check_current()
        raise err(Code.WRITERS_DIVERGED, f"the processes load {len(digests)} different checkpoints")
    with step:
        restoration.check(*_find_untaken(told))
        reading = restoration.plan_reading(memory)
    with contextlib.ExitStack() as stack:
        if (share or lends) and group.writer_count > 1:
            peers = stack.enter_context(_open_peers(group))
            if lends:
                reading.lend(peers, memory)
            if share:
                reading.share(peers)
        with step:
            reads = reading.run()
            report = restoration.apply(reads, streams=streams)
    return claim_of_all(report, group)


def _find_untaken(
    told: Sequence[Mapping[str, Any]],
) -> tuple[frozenset[tuple[str, TensorKey]], frozenset[str], frozenset[str]]:
    """Return the arguments of `Restoration.check` from every process's `list_untaken`."""
    leftovers = [{(kind, tuple(key)) for kind, key in theirs["leftover"]} for theirs in told]
    renames = [frozenset(theirs["unused"]) for theirs in told]
    patterns = [frozenset(theirs["idle"]) for theirs in told]
    return (
        frozenset(set.intersection(*leftovers)),
        frozenset.intersection(*renames),
        frozenset.intersection(*patterns),
    )


def _open_peers(group: Group) -> AbstractContextManager[Peers]:
    side = torch_side()
    if side is None:
        raise refuse_sharing(group.writer_count)
    peers: AbstractContextManager[Peers] = side.open_peers(group)
    return peers


def restore_streams(
    state: State,
    checkpoint: Checkpoint,
    *,
    worker: int,
    worker_count: int,
    allow: Iterable[str] = frozenset(),
    strict: bool = False,
    override: Patterns = (),
    settled: Iterable[str] = (),
) -> tuple[str, ...]:
    """Put the RNG streams back, as the last action before the first step.

    Args:
        settled: names of RNG streams to leave unchanged, because objects restored them.

    Returns: reasons that lower the claim: RNG streams that couldn't be put back, and differences of
        the topology. The topology is compared again, because the program may have set flags or
        compiled functions since the load.

    Raises: StateError(STREAM_MISSING, STREAM_UNEXPECTED).
    """
    live = Live.of(state, worker=worker, worker_count=worker_count)
    plan = LoadPlan(
        checkpoint,
        worker=worker,
        worker_count=worker_count,
        allow=frozenset(allow),
        override=override,
    )
    plan.settled |= set(settled)
    actions = _plan_streams(plan, state, live, strict=strict)
    plan.check()
    for action in actions:
        action()
    return (*plan.downgrades, *compare_topology(plan, live))


def mark_streams(state: State, group: Group) -> Callable[[], object]:
    """Return a function whose value changes with every draw from the live RNG streams."""
    if state.rng is False:
        return lambda: None
    devices = Live.of(state, worker=group.writer, worker_count=group.writer_count).devices
    generators = None if isinstance(state.rng, CapturedRng) else state.rng
    return lambda: capture_streams(
        live_streams(generators, devices, torch_side()), worker=group.writer
    )


def plan_restore(state: State, plan: LoadPlan, *, strict: bool = False) -> Restoration:
    """Return the plan of a load; no live object changes.

    Args:
        plan: empty plan, which is filled here.
        strict: whether to refuse RNG streams of another number of workers.

    Raises: StateError.
    """
    live = Live.of(state, worker=plan.worker, worker_count=plan.worker_count)
    lacking = [unit for unit in live.units if plan.is_imported and _lacks(plan, unit)]
    plan.downgrades += [
        f"{place_of(unit.field, unit.name)} wasn't imported: it stays as it is" for unit in lacking
    ]
    side: Any = torch_side()  # only torch has entries, modules and optimizers
    for field, entries in live.entries.items():
        left = tuple(prefix_of(unit.path) for unit in lacking if unit.field == field)
        for entry in entries:
            if not entry.names[0].startswith(left):
                side.plan_entry(plan, entry, field)
    for number, unit in enumerate(live.units):
        if unit not in lacking:
            _plan_unit(plan, unit, live, number)
    stream_actions = _plan_streams(plan, state, live, strict=strict)
    differences = compare_config(plan, state)
    _explain_shapes(plan, differences)
    lowered_by = find_reasons(plan, state, live, differences)
    return Restoration(plan, state, live, stream_actions, tuple(differences), lowered_by)


def _lacks(plan: LoadPlan, unit: Unit) -> bool:
    """Return whether an imported checkpoint lacks a unit and the load may leave the unit as it is.

    Foreign formats have no place for some objects, and objects may be newer than the checkpoint.
    Weights are always required: a missing parameter is an error in an imported checkpoint too.
    """
    return unit.field != "weights" and not plan.has(unit.field, unit.name)


@dataclasses.dataclass(frozen=True, slots=True)
class Restoration:
    """A planned load: call `check`, then `plan_reading`, run the reading, then call `apply`.

    The workers intersect their results of `leftover`, `unused_renames` and `idle_patterns`, and
    give the intersections to `check`.
    """

    plan: LoadPlan
    state: State
    live: Live
    stream_actions: list[Callable[[], None]]
    config_differences: tuple[tuple[str, object, object], ...]
    lowered_by: tuple[str, ...]

    def leftover(self) -> frozenset[tuple[str, TensorKey]]:
        """Return the saved tensors and values without a place on this worker.

        Returns: ``tensor`` or ``leaf``, with field, name and scope.
        """
        return self.plan.leftover(field for field in _LOADED if not _is_left_out(self.state, field))

    def unused_renames(self) -> frozenset[str]:
        """Return the keys of `rename` without a matching live name on this worker."""
        return self.plan.renaming.unused()

    def idle_patterns(self) -> list[str]:
        """Return the patterns of `only` without a match on this worker."""
        return self.plan.list_idle_patterns(has_streams=self.state.rng is not False)

    def list_untaken(self) -> dict[str, Any]:
        """Return `leftover`, `unused_renames` and `idle_patterns` as a JSON value."""
        return {
            "leftover": sorted(self.leftover()),
            "unused": sorted(self.unused_renames()),
            "idle": self.idle_patterns(),
        }

    def check(
        self,
        leftover: frozenset[tuple[str, TensorKey]],
        unused_renames: frozenset[str] = frozenset(),
        idle_patterns: frozenset[str] = frozenset(),
    ) -> None:
        """Raise the error of this load, if a check fails. Raises: StateError.

        Args:
            leftover: saved tensors and values without a place on any worker.
            unused_renames: keys of `rename` without a matching live name on any worker.
            idle_patterns: patterns of `only` without a match on any worker.
        """
        if unused_renames:
            raise err(
                Code.ARGUMENT,
                (
                    "no live name equals, or lies beneath, any of the names"
                    f" {', '.join(map(repr, sorted(unused_renames)))}"
                ),
                where="rename=",
                remedy=(
                    "The keys are names in the live state; the values are names in the checkpoint."
                ),
            )
        self.plan.refuse_leftover(leftover)
        self.plan.refuse_idle_patterns(idle_patterns)
        self.plan.check()

    def plan_reading(self, memory: Memory | None = None) -> Reading:
        """Return the plan of the reads, which fill live tensors when run.

        Args:
            memory: see `Checkpoint.plan_reading`.

        Raises: IntegrityError of parts.
        """
        plan = self.plan
        side = torch_side()
        borrow = None if side is None else side.plan_arrivals(plan.sinks, report=plan.notes.append)
        return plan.checkpoint.plan_reading(
            plan.sinks, borrow=borrow, frozen_base=self.state.frozen_base, memory=memory
        )

    def apply(self, reads: ReadReport, *, streams: bool = True) -> LoadReport:
        """Fill the live objects that aren't tensors, after all reads.

        Args:
            reads: the amounts read.
            streams: whether to put the RNG streams back too.

        Raises: StateError(READ_BACK).
        """
        plan = self.plan
        for action in plan.actions:
            action()
        for action in self.stream_actions if streams else ():
            action()
        lowered = (*self.lowered_by, *plan.downgrades, *compare_objects(plan, self.live))
        if plan.is_partial:
            lowered += (f"{LEFT_OUT}{plan.left_count} tensors and values",)
        if not streams:
            lowered += (STREAMS_PENDING,)
        manifest = plan.checkpoint.manifest
        return LoadReport(
            step=manifest.origin.step,
            digest=manifest.digest,
            claim=claim_of(plan, lowered),
            lowered_by=lowered,
            downgrades=tuple(plan.downgrades),
            notes=tuple(plan.notes),
            config_differences=self.config_differences,
            values=plan.values,
            reads=reads,
            renamed=plan.list_renamed(),
            left_count=plan.left_count,
            settled=tuple(sorted(plan.settled)),
        )


# --- units ----------------------------------------------------------------------------------------


def _plan_unit(plan: LoadPlan, unit: Unit, live: Live, number: int) -> None:
    side: Any = torch_side()
    match unit.kind:
        case Kind.MODULE:
            side.plan_module(plan, live.views[number], unit.field)
            take_named_leaf(plan, unit)
        case Kind.OPTIMIZER:
            prefix = f"{plan.renaming.saved_name(unit.name)}/" if optimizer_prefix(unit) else ""
            side.plan_optimizer(
                plan, unit.value, live.names,
                prefix=prefix, path=() if prefix else unit.path, field=unit.field, scope=unit.scope,
            )  # fmt: skip
        case Kind.STATEFUL:
            _plan_stateful(plan, unit)
        case Kind.PIECE:
            plan_sink(plan, unit.value, field=unit.field, where=place_of(unit.field, unit.name))
        case Kind.GENERATOR:
            pass  # put back with the RNG streams
        case Kind.TREE:
            _plan_tree(plan, unit)


def _plan_stateful(plan: LoadPlan, unit: Unit) -> None:
    chosen = plan.choose(unit.field, [unit.name])
    if not chosen:
        return
    name, at, saved = plan.leaf(unit.field, chosen, unit.scope)
    where = place_of(unit.field, unit.name)
    if saved is MISSING:
        plan.problem(Code.LEAF_MISSING, where, "nothing was saved for this object")
        return
    if not may_load(plan, saved, unit.value, where):
        return
    now = None if _is_loader(unit) else unit.value.state_dict()
    _compare_cursors(plan, saved, now, where)
    _compare_schedules(plan, unit.value, saved, now, where)
    value = Placer(plan, field=unit.field, scope=at).fresh(saved, name, now)
    plan.actions.append(functools.partial(_load_stateful, plan, unit, value, where))


def _is_loader(unit: Unit) -> bool:
    """Return whether an object is another library's loader, which has a position of its own."""
    return unit.field == "data" and is_loader(unit.value)


def _compare_cursors(plan: LoadPlan, saved: object, now: object, where: str) -> None:
    """Report differences between a saved and a live cursor, in the plan or in the mixture.

    Another mixture changes the order of samples, which lowers the claim to S0.
    """
    if not all(
        isinstance(cursor, dict) and cursor.get("kind") == CURSOR_KIND for cursor in (saved, now)
    ):
        return
    cursors: tuple[Any, Any] = (saved, now)
    for part in ("plan", "mixture"):
        for path, before, after in find_differences(*(cursor.get(part) for cursor in cursors)):
            plan.downgrades.append(f"{where}: {part}/{path}: saved {before!r}, here {after!r}")
            plan.reorders |= part == "mixture"
    if any("pipeline" in cursor for cursor in cursors):
        plan.downgrades.append(
            f"{where}: pipeline: the samples are issued in the same order, each is consumed or"
            " discarded once, and the steps that train on them follow the times of the answers"
        )


def _compare_schedules(
    plan: LoadPlan, live: object, saved: object, now: object, where: str
) -> None:
    """Refuse the saved state of another class of scheduler before any live object changes.

    A scheduler's own load_state_dict accepts any attributes.
    """
    if not (
        hasattr(live, "last_epoch") and isinstance(saved, Mapping) and isinstance(now, Mapping)
    ):
        return
    if lacking := sorted(str(name) for name in now.keys() - saved.keys()):
        detail = (
            f"the saved state lacks {', '.join(lacking[:4])}, which a"
            f" {type(live).__qualname__} has: it was saved"
        )
        detail += " from another class, or by another version of it"
        remedy = (
            "Give an object of the class that was saved; or keep the live one:"
            " Checkpointer(loading=Loading(override=...))."
        )
        plan.problem(Code.READ_BACK, where, detail, remedy=remedy)


def _load_stateful(plan: LoadPlan, unit: Unit, value: object, where: str) -> None:
    live = unit.value
    wanted = fingerprint(value, field=where, name="")
    is_position = _is_loader(unit)
    try:
        with settling(plan, unit):
            if is_position:
                load_position(live, value)
            else:
                live.load_state_dict(value)
    except Exception as error:
        error.add_note(f"ckptfmt: raised by the load_state_dict of {where}")
        raise
    # Some loaders make an iterator to answer state_dict(), which draws random numbers. The RNG
    # streams are put back afterwards.
    found = fingerprint(live.state_dict(), field=where, name="")
    is_settled = found == wanted or settle(live, value)
    if is_position:
        finish_load(live, value)
        is_settled = is_settled or is_of_known_library(live)
    if not is_settled:
        path = find_difference(
            parse_tree(wanted[0], where=where), parse_tree(found[0], where=where)
        )
        differing = path or next(
            name for name, digest in wanted[1].items() if found[1].get(name) != digest
        )
        detail = f"the object's state_dict differs from the loaded state, first at {differing}"
        if not is_position:
            raise err(Code.READ_BACK, detail, where=where)
        # A loader may move to the position with its first batch.
        plan.downgrades.append(f"{where}: {detail}")
        plan.reorders = True


def _plan_tree(plan: LoadPlan, unit: Unit) -> None:
    side = jax_side()
    if side is not None and side.has_arrays(unit.value):
        side.plan_tree(plan, unit)
        return
    if plan_named_tensors(plan, unit):
        return
    saved_name = plan.renaming.saved_name(unit.name)
    where = place_of(unit.field, unit.name)
    # If a mapping isn't chosen as a whole, single entries may still be chosen.
    inside = type(unit.value) in (dict, OrderedDict) and not plan.only.fits(unit.field, saved_name)
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
    plan.actions.append(functools.partial(put_back, plan, unit, placed))


# --- comparisons ----------------------------------------------------------------------------------


def _plan_streams(
    plan: LoadPlan, state: State, live: Live, *, strict: bool
) -> list[Callable[[], None]]:
    streams = list_streams(state, live, torch_side())
    return plan_streams(plan, streams, strict=strict) if streams or state.rng is not False else []


def _is_left_out(state: State, field: str) -> bool:
    return field in state.absent_reasons()


def _explain_shapes(plan: LoadPlan, differences: list[tuple[str, object, object]]) -> None:
    """Give shape errors a remedy about the configuration, if a configuration was saved.

    The remedy lists the differing values. Otherwise the remedy asks for a configuration.
    """
    if differences:
        told = "; ".join(
            f"config:{path} was {before!r}, and is {now!r} here"
            for path, before, now in differences[:3]
        )
        remedy = f"Build the model as it was saved: {told}."
    elif plan.checkpoint.manifest.fields["config"].reason is None:
        path = plan.checkpoint.store.name
        remedy = (
            f"Build the model as it was saved: `ckptfmt inspect {path} --field config` shows"
            " its configuration."
        )
    else:
        remedy = (
            "Build the model with the saved sizes. No configuration was saved:"
            " State(config={...}) is compared by a"
            " load, which then names the value that differs."
        )
    plan.problems = [
        dataclasses.replace(problem, remedy=remedy)
        if problem.code == Code.SHAPE_MISMATCH
        else problem
        for problem in plan.problems
    ]
