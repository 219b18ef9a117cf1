"""One load, from an open checkpoint into the live `State` of all processes: all of them succeed, or all raise."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Final, TypeVar, cast

from ckptfmt.adapters import jax_side, torch_side
from ckptfmt.adapters.context import PROCESS_COUNTS, find_differences, local_facts, own_config, topology
from ckptfmt.adapters.data_loaders import UNREAD, UNREAD_SAMPLERS, may_load, settle
from ckptfmt.adapters.live import NO_SCHEDULE, Kind, Live, Unit, may_be_schedule, optimizer_prefix
from ckptfmt.adapters.live_trees import GLOBAL, Encoder, fingerprint, prefix_of
from ckptfmt.adapters.load_plan import MISSING, LoadPlan, Patterns, Rename, check_allow
from ckptfmt.adapters.placing import Placer, plan_named_tensors, plan_sink, put_back, take_named_leaf
from ckptfmt.adapters.rng_streams import capture_streams, live_streams, plan_streams, settling
from ckptfmt.adapters.unsaved import UNSAVED
from ckptfmt.adapters.visible import compare
from ckptfmt.documents.cursor import KIND as CURSOR_KIND
from ckptfmt.documents.manifest import FIELDS
from ckptfmt.documents.tables import TensorKey
from ckptfmt.documents.tree import find_difference, parse_tree
from ckptfmt.documents.witness import Verdict, WitnessRecord
from ckptfmt.errors import Code, StateError, err
from ckptfmt.group import Group, attempt
from ckptfmt.read.files import ReplacedError, read_anew, replaced
from ckptfmt.read.reader import Checkpoint
from ckptfmt.read.reading import Reading
from ckptfmt.read.sharing import Peers, refuse_sharing
from ckptfmt.read.streaming import ReadReport
from ckptfmt.state import NO_RNG, NOT_GIVEN, CapturedRng, State, place_of
from ckptfmt.trainer.data_position import DATA_DOUBTS
from ckptfmt.trainer.one_save import LOCAL_TOPOLOGY, SEEN_TOPOLOGY, list_streams

T = TypeVar("T")

#: The levels of claims, from the least on.
CLAIMS: Final = ("S0", "S1", "T1")
#: The claim of a launch that was to be the same trajectory and isn't.
REFUTED: Final = "refuted"
#: Fields that are loaded; the others are compared, or put back as streams.
_LOADED: Final = ("weights", "optimizer", "data")
#: How many differences of the configuration are told one by one.
_SHOWN: Final = 20
_NOT_IN_STATE: Final = "not in State: "
_LEFT_OUT: Final = "left out by only=: "
#: What lowers the claim of a load as long as the RNG streams stand elsewhere.
_STREAMS_PENDING: Final = "the random-number streams aren't put back yet"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """The report of a load, with the claim that holds for the run that goes on from it.

    Attributes:
        step: training steps done.
        digest: of the manifest.
        claim: ``T1`` same trajectory bit by bit; ``S1`` same order of samples, each once; ``S0`` same bytes;
            ``refuted`` where T1 was expected and a step that was done twice came out otherwise.
        lowered_by: why the claim isn't T1: what differs; and, as ``not in State: ...`` and ``left out by only=: ...``,
            what wasn't asked for.
        downgrades: tensors and values that were loaded in another way than saved; among `lowered_by`.
        notes: changes worth a line that don't lower the claim.
        config_differences: path, saved and live value; configuration is never loaded.
        values: loaded values that stand in no container that could be changed, by field and name; a field of the State
            that is such a value is set to it as well.
        reads: how much was read for it, by this process.
        renamed: live name and saved name, each with its field, of tensors and values that were saved under another one.
        left_count: how many live tensors and values of this process `only` left as they were.
        settled: names of RNG streams that objects put back themselves, by their load_state_dict.
        verified_steps: the number of steps that were done twice and are identical. As long as there is none, `claim` is
            expected: deduced from the state, and not measured.
        compared: the members of these steps that were compared, in words.
        refuted_by: the first difference of a step that was done twice, where T1 was expected; then `claim` is
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
        """Where the claim comes from: ``expected`` (deduced from the state), ``verified`` or ``refuted`` by steps."""
        if self.refuted_by is not None:
            return "refuted"
        return "verified" if self.verified_steps else "expected"

    def __repr__(self) -> str:
        told = [reason for reason in self.lowered_by if was_not_asked(reason)]
        reasons = [reason for reason in self.lowered_by if not was_not_asked(reason)]
        told += [f"lowered by {len(reasons)}: {reasons[0]}"] if reasons else []
        told += [f"and {len(reasons) - 1} more in lowered_by"] if len(reasons) > 1 else []
        return f"LoadReport({'; '.join([f'step={self.step}, claim={self.claim!r}{self._evidence_text()}', *told])})"

    def _evidence_text(self) -> str:
        if self.refuted_by is not None:
            return f", refuted by {self.refuted_by}"
        if self.verified_steps:
            return f", verified over {self.verified_steps} steps"
        return "" if self.claim == "S0" else ", expected"

    def with_witness(self, record: WitnessRecord) -> LoadReport:
        """Return the report with the verdict of a witness."""
        refuted_by = record.difference.text if record.verdict == "refuted" and record.difference else None
        return dataclasses.replace(
            self,
            claim=self.claim if refuted_by is None else REFUTED,
            verified_steps=record.step_count,
            compared=record.compared,
            refuted_by=refuted_by,
        )

    def with_streams(self, found: Iterable[str] = ()) -> LoadReport:
        """Return the report once the RNG streams are put back, too, and what was found to differ then."""
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

    What one process has no place for may be another's; only what none of them takes is unexpected. Whatever doesn't fit
    is found on all of them before anything live is changed on any. Damaged bytes are found as they are read: then the
    state is partly that of the checkpoint, and isn't fit to go on with.

    Args:
        state: live objects; parameters, containers and arrays are filled in place, and trees of JAX replaced in it.
        allow: differences to accept: ``missing``, ``unexpected``, ``dtype``, ``streams``, ``loader``.
        strict: refuse RNG streams of another number of workers.
        streams: put RNG streams back too; else `restore_streams` does, once iterators exist.
        only: what to load, as patterns of saved names; see `ckptfmt.adapters.load_plan.Only`.
        rename: what live names were called; see `ckptfmt.adapters.load_plan.Renaming`.
        override: what stays as it is live, as patterns.
        share: whether what several processes want is read by one of them and sent to the others.

    Raises: as `ckptfmt.load`; LayoutError(WRITERS_DIVERGED) if the processes load different checkpoints;
        StateError(PEER_FAILED) where another process refused; ReplacedError on all processes where the checkpoint was
        replaced under one of them.
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
        frozenset.intersection(*(frozenset(theirs[name]) for theirs in told)) for name in ("unused", "idle")
    )

    def check() -> Reading:
        restoration.check(frozenset(set.intersection(*leftovers)), unused, idle)
        return restoration.plan_reading()

    reading = _read_together(group, checkpoint, check)
    with contextlib.ExitStack() as stack:
        if share and group.writer_count > 1:
            reading.share(stack.enter_context(_open_peers(group)))
        report = _read_together(group, checkpoint, lambda: restoration.apply(reading, streams=streams))
    return claim_of_all(report, group)


def load_anew(group: Group, open_checkpoint: Callable[[], Checkpoint], load: Callable[[Checkpoint], T]) -> T:
    """Return the result of a load on all processes, begun anew where the checkpoint was replaced meanwhile.

    Args:
        open_checkpoint: opens the checkpoint that the place has now.
        load: loads an open checkpoint into the state.

    Raises: as `read_anew`; IntegrityError(CHECKPOINT_RETIRED) where the next checkpoint lacks a tensor of the one
        before: the state may have that tensor already. Spec: REQ-OPN-013.
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
    """Raise CHECKPOINT_RETIRED unless a checkpoint has all tensors that an earlier try may have filled."""
    lacking = sorted(filled - checkpoint.tensors.keys())
    if lacking:
        raise err(
            Code.CHECKPOINT_RETIRED,
            "another checkpoint took the place of the one that was being loaded, and lacks some of the tensors, first"
            f" {place_of(lacking[0][0], lacking[0][1])}: the state is partly loaded",
            where=checkpoint.store.name,
            requirement="REQ-OPN-013",
            remedy="Make the state anew, and load again.",
        )


def _read_together(group: Group, checkpoint: Checkpoint, read: Callable[[], T]) -> T:
    """Return the result of a read that all processes do; raise ReplacedError on all where one process raises it.

    Raises: as `Group.together`. Spec: REQ-OPN-013.
    """

    def look() -> T:
        try:
            return read()
        except StateError as error:
            if error.code == Code.PEER_FAILED:  # another process reads for this one (`share`), and couldn't
                checkpoint.check_current()
            raise

    result, error = attempt(look)
    is_replaced = isinstance(error, ReplacedError)
    told = group.raise_together(None if is_replaced else error, value=is_replaced)
    if any(told):
        raise error if error is not None else replaced(checkpoint.digest)
    return cast("T", result)


def was_not_asked(reason: str) -> bool:
    """Return whether what lowers a claim is no difference, but something that the caller didn't ask for.

    >>> was_not_asked("process 1: not in State: data"), was_not_asked("processes: saved 2, here 1")
    (True, False)
    """
    said = reason.partition(": ")[2] if reason.startswith(_OTHER) else reason
    return said.startswith((_NOT_IN_STATE, _LEFT_OUT))


def claim_of_all(report: LoadReport, group: Group) -> LoadReport:
    """Return a report with what lowers the claim on any process: a run is no more than the least of them.

    What another process says, and this one doesn't, comes last, with its number.
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
    """Put the RNG streams back: the last thing to do before the first step.

    Args:
        settled: names of RNG streams that stay as they are, since objects have put them back themselves.

    Returns: what lowers the claim now: RNG streams that couldn't be put back, and what of the topology isn't as it was;
        since the load, flags may have been set, or something compiled.

    Raises: StateError(STREAM_MISSING, STREAM_UNEXPECTED).
    """
    live = Live.of(state, worker=worker, worker_count=worker_count)
    plan = LoadPlan(checkpoint, worker=worker, worker_count=worker_count, allow=frozenset(allow), override=override)
    plan.settled |= set(settled)
    actions = _plan_streams(plan, state, live, strict=strict)
    plan.check()
    for action in actions:
        action()
    return (*plan.downgrades, *_compare_topology(plan, live))


def mark_streams(state: State, group: Group) -> Callable[[], object]:
    """Return a function whose value changes with every random number that is drawn from the live RNG streams."""
    if state.rng is False:
        return lambda: None
    devices = Live.of(state, worker=group.writer, worker_count=group.writer_count).devices
    generators = None if isinstance(state.rng, CapturedRng) else state.rng
    return lambda: capture_streams(live_streams(generators, devices), worker=group.writer)


def plan_restore(state: State, plan: LoadPlan, *, strict: bool = False) -> Restoration:
    """Return what a load would do; nothing live is changed.

    Args:
        plan: an empty one.
        strict: refuse RNG streams of another number of workers.

    Raises: StateError.
    """
    live = Live.of(state, worker=plan.worker, worker_count=plan.worker_count)
    lacking = [unit for unit in live.units if plan.is_imported and _lacks(plan, unit)]
    plan.downgrades += [f"{place_of(unit.field, unit.name)} wasn't imported: it stays as it is" for unit in lacking]
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
    """Tell whether an imported checkpoint has nothing of a unit: other formats have no place for it, or it was new.

    Of the weights everything is wanted: a parameter that isn't there is an error, wherever the checkpoint is from.
    """
    return unit.field != "weights" and not plan.has(unit.field, unit.name)


@dataclasses.dataclass(frozen=True, slots=True)
class Restoration:
    """A load that is planned and not yet done: `check`, `plan_reading`, then `apply`.

    Workers agree on what none of them takes by intersecting their `leftover`, on keys of `rename` that none has met by
    intersecting their `unused_renames`, and on patterns of `only` by intersecting their `idle_patterns`; they give the
    results to `check`.
    """

    plan: LoadPlan
    state: State
    live: Live
    stream_actions: list[Callable[[], None]]
    config_differences: tuple[tuple[str, object, object], ...]
    lowered_by: tuple[str, ...]

    def leftover(self) -> frozenset[tuple[str, TensorKey]]:
        """Return what this worker has no place for: ``tensor`` or ``leaf``, with field, name and scope."""
        return self.plan.leftover(field for field in _LOADED if not _is_left_out(self.state, field))

    def unused_renames(self) -> frozenset[str]:
        """Return the keys of `rename` that no live name of this worker has met."""
        return self.plan.renaming.unused()

    def idle_patterns(self) -> list[str]:
        """Return the patterns of `only` of which this worker takes nothing."""
        return self.plan.list_idle_patterns(has_streams=self.state.rng is not False)

    def check(
        self,
        leftover: frozenset[tuple[str, TensorKey]],
        unused_renames: frozenset[str] = frozenset(),
        idle_patterns: frozenset[str] = frozenset(),
    ) -> None:
        """Raise what is wrong with this load. Raises: StateError.

        Args:
            leftover: what no worker takes.
            unused_renames: keys of `rename` that no worker has met.
            idle_patterns: patterns of `only` of which no worker takes anything.
        """
        if unused_renames:
            raise err(
                Code.ARGUMENT,
                f"no live name is one of these, or lies beneath it: {', '.join(map(repr, sorted(unused_renames)))}",
                where="rename=",
                remedy="The keys are names of the live state; the values are those in the checkpoint.",
            )
        self.plan.refuse_leftover(leftover)
        self.plan.refuse_idle_patterns(idle_patterns)
        self.plan.check()

    def plan_reading(self) -> Reading:
        """Return what will be read for `apply`; nothing live is changed. Raises: IntegrityError of parts."""
        plan, side = self.plan, torch_side()
        borrow = None if side is None else side.plan_arrivals(plan.sinks, report=plan.notes.append)
        return plan.checkpoint.plan_reading(plan.sinks, borrow=borrow)

    def apply(self, reading: Reading, *, streams: bool = True) -> LoadReport:
        """Fill the live objects. Raises: StateError(READ_BACK), and what reading raises."""
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
        if self.plan.is_partial or self.plan.reorders or ("data", "", GLOBAL) not in self.plan.taken_leaves:
            return "S0"
        cursor = checkpoint.leaf("data", "", GLOBAL)
        return "S1" if isinstance(cursor, dict) and cursor.get("kind") == CURSOR_KIND else "S0"


# --- units ------------------------------------------------------------------------------------------------------------


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
            pass  # an RNG stream, put back with the others
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
    """Report what a cursor allows to be another from here on, and what makes another training of the run."""
    if not all(isinstance(cursor, dict) and cursor.get("kind") == CURSOR_KIND for cursor in (saved, now)):
        return
    cursors: tuple[Any, Any] = (saved, now)
    for part in ("plan", "mixture"):
        for path, before, after in find_differences(*(cursor.get(part) for cursor in cursors)):
            plan.downgrades.append(f"{where}: {part}/{path}: saved {before!r}, here {after!r}")
            plan.reorders |= part == "mixture"


def _compare_schedules(plan: LoadPlan, live: object, saved: object, now: object, where: str) -> None:
    """Refuse the state of another class of scheduler before anything is loaded: a scheduler takes any attributes."""
    if not (hasattr(live, "last_epoch") and isinstance(saved, Mapping) and isinstance(now, Mapping)):
        return
    if lacking := sorted(str(name) for name in now.keys() - saved.keys()):
        detail = f"the saved state lacks {', '.join(lacking[:4])}, which a {type(live).__qualname__} has: it was saved"
        detail += " from another class, or by another version of it"
        remedy = "Give an object of the class that was saved; or keep the live one: Checkpointer(override=...)."
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
    # Asking a loader for its state makes its iterator, which draws random numbers: before the RNG streams are put back.
    found = fingerprint(live.state_dict(), field=where, name="")
    if found != wanted and not settle(live, value):
        path = find_difference(parse_tree(wanted[0], where=where), parse_tree(found[0], where=where))
        differing = path or next(name for name, digest in wanted[1].items() if found[1].get(name) != digest)
        raise err(Code.READ_BACK, f"its state_dict differs from the loaded one, first at {differing}", where=where)


def _plan_tree(plan: LoadPlan, unit: Unit) -> None:
    side = jax_side()
    if side is not None and side.has_arrays(unit.value):
        side.plan_tree(plan, unit)
        return
    if plan_named_tensors(plan, unit):
        return
    saved_name = plan.renaming.saved_name(unit.name)
    where = place_of(unit.field, unit.name)
    # Of a mapping that isn't chosen as a whole, what is in it may be.
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


# --- comparisons ------------------------------------------------------------------------------------------------------


def _plan_streams(plan: LoadPlan, state: State, live: Live, *, strict: bool) -> list[Callable[[], None]]:
    streams = list_streams(state, live)
    return plan_streams(plan, streams, strict=strict) if streams or state.rng is not False else []


def _is_left_out(state: State, field: str) -> bool:
    return field in state.absent_reasons()


def _missing_fields(plan: LoadPlan, state: State) -> list[str]:
    left = state.absent_reasons()
    named = [field if reason in (NOT_GIVEN, NO_RNG) else f"{field} ({reason})" for field, reason in left.items()]
    reasons = {field: plan.checkpoint.manifest.fields[field].reason for field in FIELDS if field not in left}
    absent = [f"{field} wasn't saved: {reason}" for field, reason in reasons.items() if reason is not None]
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
                plan.problem(Code.CONFIG_IDENTITY, f"config:{path}", f"saved {before!r}, here {now!r}")
    return [] if _is_absent(plan, "config") else differences


def _explain_shapes(plan: LoadPlan, differences: list[tuple[str, object, object]]) -> None:
    """Give tensors of other shapes a remedy: what the configuration says of it, or that none was saved that could."""
    if differences:
        told = "; ".join(f"config:{path} was {before!r}, and is {now!r} here" for path, before, now in differences[:3])
        remedy = f"Build the model as it was saved: {told}."
    elif plan.checkpoint.manifest.fields["config"].reason is None:
        path = plan.checkpoint.store.name
        remedy = f"Build the model as it was saved: `ckptfmt inspect {path} --field config` shows its configuration."
    else:
        remedy = (
            "Build the model with the saved sizes. No configuration was saved: State(config={...}) is compared by a"
            " load, which then names the value that differs."
        )
    plan.problems = [
        dataclasses.replace(problem, remedy=remedy) if problem.code == Code.SHAPE_MISMATCH else problem
        for problem in plan.problems
    ]


def _list_decisive(state: State, differences: list[tuple[str, object, object]]) -> list[str]:
    """Return what the configuration lowers the claim by: whatever the caller doesn't call harmless."""
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
    side: Any = torch_side()
    return [limit for view in live.views.values() for limit in side.find_claim_limits(view.module)]


def _find_lost_schedule(plan: LoadPlan) -> list[str]:
    """Return that nothing is saved of the scheduler that the optimizer's learning rates follow, where that is so."""
    keys = [key for key in plan.checkpoint.leaves if key[0] in ("optimizer", "data")]
    if plan.is_partial or any(may_be_schedule(name, None) for _, name, _ in keys):
        return []
    # Values may lie in the parts of other processes: they are read only where names don't tell.
    groups = (plan.checkpoint.leaf(*key) for key in keys if "group" in key[1].split("/"))
    has_schedule = any(isinstance(group, Mapping) and "initial_lr" in group.get("options", ()) for group in groups)
    is_lost = has_schedule and not any(may_be_schedule("", plan.checkpoint.leaf(*key)) for key in keys)
    return [NO_SCHEDULE] * is_lost


def _is_absent(plan: LoadPlan, field: str) -> bool:
    """Return whether a field wasn't saved, which is a reason by itself: nothing of it is compared one by one."""
    return plan.checkpoint.manifest.fields[field].reason is not None


def _compare_topology(plan: LoadPlan, live: Live) -> list[str]:
    if _is_absent(plan, "topology"):
        return []
    facts: dict[str, object] = {"": topology(worker_count=plan.worker_count)}
    if plan.worker == 0:
        facts[LOCAL_TOPOLOGY] = local_facts(devices=live.devices, meshes=live.meshes, jax_facts=live.jax_facts)
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
        lowered += [f"{path}: saved {before!r}, here {after!r}" for path, before, after in _list_topology(saved, now)]
    return lowered


def _list_topology(saved: dict[str, object], now: object) -> list[tuple[str, object, object]]:
    """Return path, saved and live value of what differs; the number of processes once, if all its names agree."""
    differences = find_differences(saved, now)
    counts = [(before, after) for path, before, after in differences if path in PROCESS_COUNTS]
    if len(counts) != len(PROCESS_COUNTS) or len(set(counts)) > 1:
        return differences
    return [("processes", *counts[0]), *(one for one in differences if one[0] not in PROCESS_COUNTS)]


def _compare_objects(plan: LoadPlan, live: Live) -> list[str]:
    """Return what the loaded objects of unknown classes have otherwise than at the save."""
    key = ("topology", SEEN_TOPOLOGY, GLOBAL)
    is_comparable = plan.worker == 0 and not plan.is_partial and key in plan.checkpoint.leaves
    return compare(live.units, plan.checkpoint.leaf(*key)) if is_comparable else []


#: What a reason of another process begins with.
_OTHER: Final = "process "
#: How many reasons a process tells the others.
_TOLD: Final = 32
