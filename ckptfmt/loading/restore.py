"""The load of an open checkpoint into the live `State` of all processes, or an error on all."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Final, TypeVar, cast

from ckptfmt.adapters import jax_side, torch_side
from ckptfmt.adapters.capture import LOCAL_TOPOLOGY, SEEN_TOPOLOGY, list_streams
from ckptfmt.adapters.context import (
    PROCESS_COUNTS,
    find_differences,
    local_facts,
    own_config,
    topology,
)
from ckptfmt.adapters.data_loaders import UNREAD, UNREAD_SAMPLERS, may_load, settle
from ckptfmt.adapters.data_position import DATA_DOUBTS
from ckptfmt.adapters.live import NO_SCHEDULE, Kind, Live, Unit, may_be_schedule, optimizer_prefix
from ckptfmt.adapters.live_trees import GLOBAL, Encoder, fingerprint, prefix_of
from ckptfmt.adapters.load_plan import MISSING, LoadPlan, Patterns, Rename, check_allow
from ckptfmt.adapters.placing import (
    Placer,
    plan_named_tensors,
    plan_sink,
    put_back,
    take_named_leaf,
)
from ckptfmt.adapters.rng_streams import capture_streams, live_streams, plan_streams, settling
from ckptfmt.adapters.unsaved import UNSAVED
from ckptfmt.adapters.visible import compare
from ckptfmt.data.cursor import KIND as CURSOR_KIND
from ckptfmt.documents.manifest import FIELDS
from ckptfmt.documents.tables import TensorKey
from ckptfmt.documents.tree import find_difference, parse_tree
from ckptfmt.errors import Code, StateError, err
from ckptfmt.group import Group, attempt
from ckptfmt.read.files import ReplacedError, read_anew, replaced
from ckptfmt.read.reader import Checkpoint
from ckptfmt.read.reading import Reading
from ckptfmt.read.sharing import Peers, refuse_sharing
from ckptfmt.read.streaming import ReadReport
from ckptfmt.run.witness import Verdict, WitnessRecord
from ckptfmt.state import NO_RNG, NOT_GIVEN, CapturedRng, State, place_of

T = TypeVar("T")

#: Levels of claims, from the lowest to the highest.
CLAIMS: Final = ("S0", "S1", "T1")
#: The claim of a launch whose repeated step differs although T1 was expected.
REFUTED: Final = "refuted"
#: Loaded fields. The remaining fields are compared, or put back as RNG streams.
_LOADED: Final = ("weights", "optimizer", "data")
#: Largest number of configuration differences listed one by one.
_SHOWN: Final = 20
_NOT_IN_STATE: Final = "not in State: "
_LEFT_OUT: Final = "left out by only=: "
#: The reason that lowers the claim until the RNG streams are put back.
_STREAMS_PENDING: Final = "the random-number streams aren't put back yet"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """The report of a load, with the claim for the run that continues from the checkpoint.

    Attributes:
        step: number of training steps done.
        digest: digest of the manifest.
        claim: ``T1`` for the same trajectory bit by bit; ``S1`` for the same order of samples, each
            once; ``S0`` for the same bytes; ``refuted`` if T1 was expected and a repeated step
            differs from the first execution.
        lowered_by: reasons why the claim isn't T1: the differences, and the parts that the caller
            didn't ask for, as ``not in State: ...`` and ``left out by only=: ...``.
        downgrades: tensors and values that were loaded in another form than saved; also in
            `lowered_by`.
        notes: changes to report without effect on the claim.
        config_differences: path, saved value and live value. Configuration is never loaded.
        values: loaded values without a mutable container, by field and name. If a field of the
            State is such a value, the field is set to the loaded value as well.
        reads: amount of data read by this process for the load.
        renamed: live name and saved name, each with its field, of renamed tensors and values.
        left_count: number of this process's live tensors and values left unchanged by `only`.
        settled: names of RNG streams restored by objects' load_state_dict.
        verified_steps: number of repeated steps with identical results. While the number is 0, the
            claim is expected: deduced from the state, not measured.
        compared: compared members of the repeated steps, in words.
        refuted_by: first difference of a repeated step although T1 was expected; then `claim` is
            ``refuted``.
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
    settled: tuple[str, ...] = ()
    verified_steps: int = 0
    compared: tuple[str, ...] = ()
    refuted_by: str | None = None

    @property
    def evidence(self) -> Verdict:
        """The origin of the claim: ``expected``, or ``verified`` or ``refuted`` by repeated steps.

        An expected claim is deduced from the state.
        """
        if self.refuted_by is not None:
            return "refuted"
        return "verified" if self.verified_steps else "expected"

    def __repr__(self) -> str:
        told = [reason for reason in self.lowered_by if was_not_asked(reason)]
        reasons = [reason for reason in self.lowered_by if not was_not_asked(reason)]
        told += [f"lowered by {len(reasons)}: {reasons[0]}"] if reasons else []
        told += [f"and {len(reasons) - 1} more in lowered_by"] if len(reasons) > 1 else []
        first = f"step={self.step}, claim={self.claim!r}{self._evidence_text()}"
        return f"LoadReport({'; '.join([first, *told])})"

    def _evidence_text(self) -> str:
        if self.refuted_by is not None:
            return f", refuted by {self.refuted_by}"
        if self.verified_steps:
            return f", verified over {self.verified_steps} steps"
        return "" if self.claim == "S0" else ", expected"

    def with_witness(self, record: WitnessRecord) -> LoadReport:
        """Return the report with the verdict of a witness."""
        refuted_by = (
            record.difference.text if record.verdict == "refuted" and record.difference else None
        )
        return dataclasses.replace(
            self,
            claim=self.claim if refuted_by is None else REFUTED,
            verified_steps=0 if record.verdict == "expected" else record.step_count,
            compared=record.compared,
            refuted_by=refuted_by,
        )

    def with_streams(self, found: Iterable[str] = ()) -> LoadReport:
        """Return the report for the time after the RNG streams are put back.

        Args:
            found: differences found when the streams were put back.
        """
        known = (reason for reason in self.lowered_by if reason != _STREAMS_PENDING)
        lowered = tuple(dict.fromkeys((*known, *found)))
        return dataclasses.replace(self, claim=self.claim if lowered else "T1", lowered_by=lowered)


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

    Raises: as `ckptfmt.load`; LayoutError(WRITERS_DIVERGED) if the processes load different
        checkpoints; StateError(PEER_FAILED) if another process refused; ReplacedError on all
        processes if the checkpoint was replaced during the load.
    """
    allow = check_allow(allow)

    def plan() -> Restoration:
        load_plan = LoadPlan(
            checkpoint,
            worker=group.writer,
            worker_count=group.writer_count,
            allow=allow,
            only=only,
            rename=rename,
            override=override,
        )
        return plan_restore(state, load_plan, strict=strict)

    restoration = _read_together(group, checkpoint, plan)
    mine = {
        "leftover": sorted(restoration.leftover()),
        "unused": sorted(restoration.unused_renames()),
        "idle": restoration.idle_patterns(),
    }
    told = group.all_gather({"digest": checkpoint.digest, **mine})
    digests = {theirs["digest"] for theirs in told}
    if len(digests) > 1:
        _read_together(group, checkpoint, checkpoint.check_current)
        raise err(Code.WRITERS_DIVERGED, f"the processes load {len(digests)} different checkpoints")
    leftovers = [{(kind, tuple(key)) for kind, key in theirs["leftover"]} for theirs in told]
    unused, idle = (
        frozenset.intersection(*(frozenset(theirs[name]) for theirs in told))
        for name in ("unused", "idle")
    )

    def check() -> Reading:
        restoration.check(frozenset(set.intersection(*leftovers)), unused, idle)
        return restoration.plan_reading()

    reading = _read_together(group, checkpoint, check)
    with contextlib.ExitStack() as stack:
        if share and group.writer_count > 1:
            reading.share(stack.enter_context(_open_peers(group)))
        report = _read_together(
            group, checkpoint, lambda: restoration.apply(reading, streams=streams)
        )
    return claim_of_all(report, group)


def load_anew(
    group: Group, open_checkpoint: Callable[[], Checkpoint], load: Callable[[Checkpoint], T]
) -> T:
    """Return the result of a load on all processes; repeat the load if the checkpoint is replaced.

    Args:
        open_checkpoint: opens the present checkpoint of the place.
        load: loads an open checkpoint into the state.

    Raises: as `read_anew`; IntegrityError(CHECKPOINT_RETIRED) if the new checkpoint lacks a tensor
        of the replaced checkpoint, since the state may contain that tensor already.
    Spec: REQ-OPN-013.
    """
    begun: frozenset[TensorKey] | None = None

    def read() -> T:
        nonlocal begun
        checkpoint = group.together(open_checkpoint)
        if begun is not None:
            filled = begun
            group.together(lambda: _check_filled(checkpoint, filled))
        begun = frozenset(checkpoint.tensors)
        return load(checkpoint)

    return read_anew(read)


def _check_filled(checkpoint: Checkpoint, filled: frozenset[TensorKey]) -> None:
    """Raise CHECKPOINT_RETIRED if a checkpoint lacks a tensor that an earlier try filled."""
    lacking = sorted(filled - checkpoint.tensors.keys())
    if lacking:
        raise err(
            Code.CHECKPOINT_RETIRED,
            "another checkpoint took the place of the one that was being loaded, and lacks some"
            " of the tensors, first"
            f" {place_of(lacking[0][0], lacking[0][1])}: the state is partly loaded",
            where=checkpoint.store.name,
            requirement="REQ-OPN-013",
            remedy="Make the state anew, and load again.",
        )


def _read_together(group: Group, checkpoint: Checkpoint, read: Callable[[], T]) -> T:
    """Return the result of a read by all processes together.

    Raises: ReplacedError on all processes if one process raises it; else as `Group.together`.
    Spec: REQ-OPN-013.
    """

    def look() -> T:
        try:
            return read()
        except StateError as error:
            if error.code == Code.PEER_FAILED:  # with `share`, a reading process may have failed
                checkpoint.check_current()
            raise

    result, error = attempt(look)
    is_replaced = isinstance(error, ReplacedError)
    told = group.raise_together(None if is_replaced else error, value=is_replaced)
    if any(told):
        raise error if error is not None else replaced(checkpoint.digest)
    return cast("T", result)


def was_not_asked(reason: str) -> bool:
    """Return whether a reason for a lower claim is a part that the caller didn't ask for.

    The other reasons are differences.

    >>> was_not_asked("process 1: not in State: data"), was_not_asked("processes: saved 2, here 1")
    (True, False)
    """
    said = reason.partition(": ")[2] if reason.startswith(_OTHER) else reason
    return said.startswith((_NOT_IN_STATE, _LEFT_OUT))


def claim_of_all(report: LoadReport, group: Group) -> LoadReport:
    """Return a report with the lowest claim of all processes, and the reasons of all processes.

    Reasons that only other processes have come last, with the number of a process.
    """
    if group.writer_count == 1:
        return report
    own = [reason for reason in report.lowered_by if not reason.startswith(_OTHER)]
    told = group.all_gather({"claim": report.claim, "lowered_by": own[:_TOLD]})
    others = {
        reason: f"{_OTHER}{number}: {reason}"
        for number, theirs in reversed(list(enumerate(told)))
        for reason in theirs["lowered_by"]
        if reason not in report.lowered_by
    }
    claim = min((theirs["claim"] for theirs in told), key=CLAIMS.index)
    return dataclasses.replace(
        report, claim=claim, lowered_by=tuple(dict.fromkeys((*report.lowered_by, *others.values())))
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
    return (*plan.downgrades, *_compare_topology(plan, live))


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
    differences = _compare_config(plan, state)
    _explain_shapes(plan, differences)
    lowered_by = (
        *_missing_fields(plan, state),
        *_list_decisive(state, differences),
        *_compare_topology(plan, live),
        *_find_limits(live),
        *_find_lost_schedule(plan),
    )
    return Restoration(plan, state, live, stream_actions, tuple(differences), lowered_by)


def _lacks(plan: LoadPlan, unit: Unit) -> bool:
    """Return whether an imported checkpoint lacks a unit and the load may leave the unit as it is.

    Foreign formats have no place for some objects, and objects may be newer than the checkpoint.
    Weights are always required: a missing parameter is an error in an imported checkpoint too.
    """
    return unit.field != "weights" and not plan.has(unit.field, unit.name)


@dataclasses.dataclass(frozen=True, slots=True)
class Restoration:
    """A planned load. Call `check`, then `plan_reading`, then `apply`.

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
                    "no live name is one of these, or lies beneath it:"
                    f" {', '.join(map(repr, sorted(unused_renames)))}"
                ),
                where="rename=",
                remedy=(
                    "The keys are names of the live state; the values are those in the checkpoint."
                ),
            )
        self.plan.refuse_leftover(leftover)
        self.plan.refuse_idle_patterns(idle_patterns)
        self.plan.check()

    def plan_reading(self) -> Reading:
        """Return the plan of the reads for `apply`; no live object changes.

        Raises: IntegrityError of parts.
        """
        plan = self.plan
        side = torch_side()
        borrow = None if side is None else side.plan_arrivals(plan.sinks, report=plan.notes.append)
        return plan.checkpoint.plan_reading(plan.sinks, borrow=borrow)

    def apply(self, reading: Reading, *, streams: bool = True) -> LoadReport:
        """Fill the live objects. Raises: StateError(READ_BACK); errors of reading."""
        plan = self.plan
        reads = reading.run()
        for action in plan.actions:
            action()
        for action in self.stream_actions if streams else ():
            action()
        lowered = (*self.lowered_by, *plan.downgrades, *_compare_objects(plan, self.live))
        if plan.is_partial:
            lowered += (f"{_LEFT_OUT}{plan.left_count} tensors and values",)
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
            config_differences=self.config_differences,
            values=plan.values,
            reads=reads,
            renamed=plan.list_renamed(),
            left_count=plan.left_count,
            settled=tuple(sorted(plan.settled)),
        )

    def _claim(self, lowered: tuple[str, ...]) -> str:
        if not lowered:
            return "T1"
        checkpoint = self.plan.checkpoint
        if (
            self.plan.is_partial
            or self.plan.reorders
            or ("data", "", GLOBAL) not in self.plan.taken_leaves
        ):
            return "S0"
        cursor = checkpoint.leaf("data", "", GLOBAL)
        return "S1" if isinstance(cursor, dict) and cursor.get("kind") == CURSOR_KIND else "S0"


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
    now = unit.value.state_dict()
    _compare_cursors(plan, saved, now, where)
    _compare_schedules(plan, unit.value, saved, now, where)
    value = Placer(plan, field=unit.field, scope=at).fresh(saved, name, now)
    plan.actions.append(functools.partial(_load_stateful, plan, unit, value, where))


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
            " Checkpointer(override=...)."
        )
        plan.problem(Code.READ_BACK, where, detail, remedy=remedy)


def _load_stateful(plan: LoadPlan, unit: Unit, value: object, where: str) -> None:
    live = unit.value
    wanted = fingerprint(value, field=where, name="")
    try:
        with settling(plan, unit):
            live.load_state_dict(value)
    except Exception as error:
        error.add_note(f"ckptfmt: raised by the load_state_dict of {where}")
        raise
    # Some loaders make an iterator to answer state_dict(), which draws random numbers. The RNG
    # streams are put back afterwards.
    found = fingerprint(live.state_dict(), field=where, name="")
    if found != wanted and not settle(live, value):
        path = find_difference(
            parse_tree(wanted[0], where=where), parse_tree(found[0], where=where)
        )
        differing = path or next(
            name for name, digest in wanted[1].items() if found[1].get(name) != digest
        )
        raise err(
            Code.READ_BACK,
            f"its state_dict differs from the loaded one, first at {differing}",
            where=where,
        )


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
    streams = list_streams(state, live, live.sides.torch)
    return plan_streams(plan, streams, strict=strict) if streams or state.rng is not False else []


def _is_left_out(state: State, field: str) -> bool:
    return field in state.absent_reasons()


def _missing_fields(plan: LoadPlan, state: State) -> list[str]:
    left = state.absent_reasons()
    named = [
        field if reason in (NOT_GIVEN, NO_RNG) else f"{field} ({reason})"
        for field, reason in left.items()
    ]
    reasons = {
        field: plan.checkpoint.manifest.fields[field].reason
        for field in FIELDS
        if field not in left
    }
    absent = [
        f"{field} wasn't saved: {reason}" for field, reason in reasons.items() if reason is not None
    ]
    return absent + [f"{_NOT_IN_STATE}{', '.join(named)}"] * bool(named)


def _compare_config(plan: LoadPlan, state: State) -> list[tuple[str, object, object]]:
    config, is_given = own_config(state.config, worker=plan.worker)
    if config is None:
        return []
    live = Encoder(field="config", scope=GLOBAL, inline=True).encode(config, "")
    key = ("config", "", GLOBAL)
    saved = plan.checkpoint.leaf(*key) if key in plan.checkpoint.leaves else {}
    differences = find_differences(saved, live) if is_given else []
    known = [path for path, _, _ in find_differences({}, live)]
    for identity in state.identity:
        if not any(_lies_under(path, identity) for path in known):
            raise err(Code.ARGUMENT, f"config has no key {identity!r}", where="State(identity=...)")
        for path, before, now in differences:
            if _lies_under(path, identity):
                plan.problem(
                    Code.CONFIG_IDENTITY, f"config:{path}", f"saved {before!r}, here {now!r}"
                )
    return [] if _is_absent(plan, "config") else differences


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


def _list_decisive(state: State, differences: list[tuple[str, object, object]]) -> list[str]:
    """Return the configuration differences that lower the claim: all except `state.harmless`."""
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
    """Return the reasons why no checkpoint can restore a part of the live modules."""
    side: Any = torch_side()
    return [limit for view in live.views.values() for limit in side.find_claim_limits(view.module)]


def _find_lost_schedule(plan: LoadPlan) -> list[str]:
    """Return the reason NO_SCHEDULE if the optimizer has a scheduler whose state wasn't saved."""
    keys = [key for key in plan.checkpoint.leaves if key[0] in ("optimizer", "data")]
    if plan.is_partial or any(may_be_schedule(name, None) for _, name, _ in keys):
        return []
    # A value may need a read of another process's part, so the names are checked first.
    groups = (plan.checkpoint.leaf(*key) for key in keys if "group" in key[1].split("/"))
    has_schedule = any(
        isinstance(group, Mapping) and "initial_lr" in group.get("options", ()) for group in groups
    )
    is_lost = has_schedule and not any(
        may_be_schedule("", plan.checkpoint.leaf(*key)) for key in keys
    )
    return [NO_SCHEDULE] * is_lost


def _is_absent(plan: LoadPlan, field: str) -> bool:
    """Return whether a field wasn't saved.

    An absent field is a separate reason, so no values are compared.
    """
    return plan.checkpoint.manifest.fields[field].reason is not None


def _compare_topology(plan: LoadPlan, live: Live) -> list[str]:
    if _is_absent(plan, "topology"):
        return []
    shared = topology(worker_count=plan.worker_count, side=live.sides.torch)
    facts: dict[str, object] = {"": shared}
    if plan.worker == 0:
        facts[LOCAL_TOPOLOGY] = local_facts(live, live.sides.torch)
    lowered = []
    for name, now in facts.items():
        key = ("topology", name, GLOBAL)
        saved = dict(plan.checkpoint.leaf(*key)) if key in plan.checkpoint.leaves else {}
        if saved.pop(UNREAD_SAMPLERS, False):
            lowered.append(UNREAD)
            plan.reorders = True
        for doubt, reason in DATA_DOUBTS.items():
            if saved.pop(doubt, False):
                lowered.append(reason)
                plan.reorders = True
        lowered += [reason for reason in saved.pop(UNSAVED, ()) if isinstance(reason, str)]
        lowered += [
            f"{path}: saved {before!r}, here {after!r}"
            for path, before, after in _list_topology(saved, now)
        ]
    return lowered


def _list_topology(saved: dict[str, object], now: object) -> list[tuple[str, object, object]]:
    """Return path, saved value and live value of each difference of the topology.

    If all counts of processes differ by the same values, one entry stands for all of them.
    """
    differences = find_differences(saved, now)
    counts = [(before, after) for path, before, after in differences if path in PROCESS_COUNTS]
    if len(counts) != len(PROCESS_COUNTS) or len(set(counts)) > 1:
        return differences
    return [
        ("processes", *counts[0]),
        *(one for one in differences if one[0] not in PROCESS_COUNTS),
    ]


def _compare_objects(plan: LoadPlan, live: Live) -> list[str]:
    """Return the differences of loaded objects of unknown classes from the objects at the save."""
    key = ("topology", SEEN_TOPOLOGY, GLOBAL)
    is_comparable = plan.worker == 0 and not plan.is_partial and key in plan.checkpoint.leaves
    return compare(live.units, plan.checkpoint.leaf(*key)) if is_comparable else []


#: Prefix of another process's reasons.
_OTHER: Final = "process "
#: Largest number of reasons to send to the other processes.
_TOLD: Final = 32
