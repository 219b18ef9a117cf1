"""The data cursor: a run's position in its data, independent of rank, world size and worker.

A cursor is a plain tree, stored in the field `data`. Its integers may need 64 bits, which trees
support.

    {"kind": "ckptfmt.data_cursor", "v": 1,
     "plan":    {"unit": "sample", "global_batch": 64, "assign": "contig-v1", "tail": "carry"},
     "commit":  {"step": 1200, "global_pos": 76800, "epoch": 0, "pos_in_epoch": 76800},
     "order":   {"alg": "feistel-v1", "seed": 7, "vector_check": {"pos": 76800, "id": 991823}},
     "sources": [{"id": "books", "fingerprint": "blake3:...", "n": 5000000}],
     "skips":   [],
     "ledger":  {"alg": "mix64-add4-v1", "count": 76800, "set_digest": "<64 hex>"}}

The members:

* `commit` counts the positions consumed by finished steps, not the fetched positions: the next step
  begins at `global_pos`.
* `assign` contig-v1: a step covers the positions ``[p, p + global_batch)``. Worker i of w takes
  ``[p + i * global_batch div w, p + (i + 1) * global_batch div w)``.
* `tail`: the rule for a batch that reaches the end of an epoch. ``carry`` continues with the next
  epoch; ``drop`` leaves out the rest of the epoch; ``pad_masked`` fills the batch with samples of
  weight zero.
* `vector_check` is a position and the sample there. A reader uses them to prove that it computes
  the same order.
* `skips` are exclusions from the data, each from a position on (`ckptfmt.data.cursor_map`).
* `ledger` is the multiset digest of all consumed samples (`ckptfmt.data.course`), independent of
  their order.

In a mixture of sources, each source has its own epochs and its own position:

    {...
     "commit":  {"step": 1200, "global_pos": 76800},
     "order":   {"alg": "feistel-v1", "seed": 7,
                 "vector_check": {"pos": 76800, "source": "books", "id": 991823}},
     "sources": [{"id": "books", "fingerprint": null, "n": 5000000, "pos": 53776},
                 {"id": "code", "fingerprint": null, "n": 900000, "pos": 23024}],
     "mixture": {"alg": "block-det-v1", "block": 1024, "seed": 7,
                 "stages": [{"from_pos": 0, "counts": {"books": 717, "code": 307}}]},
     ...}

In a run that issues samples ahead and trains on the answers later, `pipeline` lists the positions
below `global_pos` that are open, neither consumed nor discarded, as begins and ends of ranges:

    {...
     "pipeline": {"open": [76790, 76792, 76799, 76800],
                  "discarded": {"alg": "mix64-add4-v1", "count": 3, "set_digest": "<64 hex>"}},
     ...}

The position of another library's data loader is opaque and valid for one number of workers only:

    {"kind": "ckptfmt.foreign_loader", "v": 1, "lib": "torchdata", "version": "0.11.0",
     "per": "worker", "worker_count": 8, "state": {...}}

`state` is the library's own value, and only the library can interpret it, except for torch's
DataLoader (`ckptfmt.data.epoch_position`). With `per` ``worker``,
each worker saves its own state under its own scope; with ``run``, all workers save the same state,
which counts over all of them.

The clauses, from REQ-CUR-001 on, are in ``spec/context/64-cursor.md``.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, Final, Literal, TypeAlias

from ckptfmt import limits
from ckptfmt.data.cursor_map import (
    CursorMap,
    PosSkip,
    Skip,
    check_ascending,
    count_removed,
    dump_skip,
    parse_skips,
    refuse,
    show_value,
)
from ckptfmt.data.epoch_position import LIB as EPOCHS_LIB
from ckptfmt.data.epoch_position import parse_position
from ckptfmt.errors import Code, err

KIND: Final = "ckptfmt.data_cursor"
VERSION: Final = 1
UINT64: Final = (1 << 64) - 1

Tail: TypeAlias = Literal["carry", "drop", "pad_masked"]

#: The member of version 1 that this reader doesn't know yet.
_RESERVED: Final = ("foreign",)
_POSITION: Final = limits.DIM * (UINT64 + 1)
_SET_DIGEST: Final = re.compile(r"[0-9a-f]{64}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """The division of positions into batches. `global_batch` is in samples."""

    global_batch: int
    unit: Literal["sample"] = "sample"
    assign: Literal["contig-v1"] = "contig-v1"
    tail: Tail = "carry"

    def epoch_positions(self, count: int) -> int:
        """Return the number of positions in an epoch of `count` samples.

        >>> [BatchPlan(global_batch=4, tail=tail).epoch_positions(10) for tail in ("carry", "drop",
        ...     "pad_masked")]
        [10, 8, 12]
        """
        if self.tail == "carry":
            return count
        steps = (
            count // self.global_batch if self.tail == "drop" else -(-count // self.global_batch)
        )
        return steps * self.global_batch


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """The data consumed by finished steps: `global_pos` positions, or `epoch` epochs and a rest.

    A mixture has no common epoch: both `epoch` and `pos_in_epoch` are None, and each source has its
    own position.
    """

    step: int
    global_pos: int
    epoch: int | None = None
    pos_in_epoch: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class VectorCheck:
    """The sample `id` at the position `pos`, as a check of an order; in a mixture, of `source`."""

    pos: int
    id: int
    source: str | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The order of samples: an algorithm, its seed, and one known sample as a check."""

    seed: int
    vector_check: VectorCheck
    alg: Literal["feistel-v1"] = "feistel-v1"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A data set of `n` samples.

    `fingerprint` identifies the contents by the owner's own method, or is None.

    In a mixture, `pos` counts the source's samples at the positions before `global_pos`.
    """

    id: str
    fingerprint: str | None
    n: int
    pos: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """The number of positions of each source in a block, from the position `from_pos` on."""

    from_pos: int
    counts: Mapping[str, int]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """The shares of sources in each block of `block` positions, exact because they are counts."""

    block: int
    seed: int
    stages: tuple[Stage, ...]
    alg: Literal["block-det-v1"] = "block-det-v1"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """The multiset digest of `count` consumed samples, as 64 hex digits."""

    count: int
    set_digest: str
    alg: Literal["mix64-add4-v1"] = "mix64-add4-v1"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """The samples of a run that issues samples ahead and trains on the answers later.

    Attributes:
        open: the positions below `global_pos` that are neither consumed nor discarded: begins and
            ends of ranges, alternately, ascending.
        discarded: the samples that no step will consume.
    """

    open: tuple[int, ...]
    discarded: Ledger

    @property
    def open_count(self) -> int:
        """The number of open positions."""
        return sum(self.open[1::2]) - sum(self.open[::2])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """A data cursor of one source, or of a mixture of sources."""

    plan: BatchPlan
    commit: Commit
    order: Order
    sources: tuple[Source, ...]
    ledger: Ledger
    mixture: Mixture | None = None
    skips: tuple[Skip, ...] = ()
    pipeline: Pipeline | None = None


def dump_cursor(cursor: Cursor) -> dict[str, Any]:
    """Return the tree of a cursor.

    Raises: CURSOR_FORM when its members contradict each other.
    Spec: REQ-CUR-001 to REQ-CUR-005, REQ-CUR-009 to REQ-CUR-011, REQ-CUR-015, REQ-CUR-017,
        REQ-CUR-019, REQ-PIP-001, REQ-PIP-002.
    """
    tree: dict[str, Any] = {
        "kind": KIND,
        "v": VERSION,
        "plan": dataclasses.asdict(cursor.plan),
        "commit": _given(cursor.commit, "epoch", "pos_in_epoch"),
        "order": {
            **dataclasses.asdict(cursor.order),
            "vector_check": _given(cursor.order.vector_check, "source"),
        },
        "sources": [_given(source, "pos") for source in cursor.sources],
        "ledger": dataclasses.asdict(cursor.ledger),
        "skips": [dump_skip(skip) for skip in cursor.skips],
    }
    if cursor.mixture is not None:
        stages = [
            {"from_pos": stage.from_pos, "counts": dict(stage.counts)}
            for stage in cursor.mixture.stages
        ]
        members = {name: getattr(cursor.mixture, name) for name in ("alg", "block", "seed")}
        tree["mixture"] = {**members, "stages": stages}
    if cursor.pipeline is not None:
        tree["pipeline"] = {
            "open": list(cursor.pipeline.open),
            "discarded": dataclasses.asdict(cursor.pipeline.discarded),
        }
    parse_cursor(tree)
    return tree


def _given(record: Any, *optional: str) -> dict[str, Any]:
    """Return the members of a record, without members of `optional` that are None."""
    members = dataclasses.asdict(record)
    return {
        name: value for name, value in members.items() if value is not None or name not in optional
    }


def parse_cursor(tree: object, *, where: str = "cursor") -> Cursor:
    """Return the cursor of a tree.

    Args:
        tree: a value of exact dicts, lists, str, int and None.
        where: the tree's place, for errors.

    Raises: CURSOR_FORM, VERSION_UNSUPPORTED, FEATURE_UNSUPPORTED.
    Spec: REQ-CUR-001 to REQ-CUR-004, REQ-CUR-009 to REQ-CUR-011, REQ-CUR-015, REQ-CUR-017,
        REQ-CUR-019, REQ-PIP-001, REQ-PIP-002.
    """
    top = CursorMap.of(tree, where)
    _check_header(top)
    is_mixed = "mixture" in top.members
    names = ("kind", "v", "plan", "commit", "order", "sources", "skips", "ledger")
    given = [name for name in ("mixture", "pipeline") if name in top.members]
    top.check_names(*names, *given)
    sources = _parse_sources(top, is_mixed=is_mixed)
    lengths = {source.id: source.n for source in sources}
    cursor = Cursor(
        plan=_parse_plan(top.inner("plan")),
        commit=_parse_commit(top.inner("commit"), is_mixed=is_mixed),
        order=_parse_order(top.inner("order"), is_mixed=is_mixed),
        sources=sources,
        ledger=_parse_ledger(top.inner("ledger")),
        mixture=parse_mixture(top.inner("mixture"), lengths) if is_mixed else None,
        skips=parse_skips(top, lengths),
        pipeline=_parse_pipeline(top.inner("pipeline")) if "pipeline" in given else None,
    )
    check_cursor(cursor, where)
    return cursor


def _check_header(top: CursorMap) -> None:
    if top.members.get("kind") != KIND:
        refuse(
            f"not a cursor: {show_value(top.members.get('kind'))}",
            f"{top.where}/kind",
            "REQ-CUR-001",
        )
    version = top.integer("v", UINT64)
    if version != VERSION:
        detail = f"version {version} of the cursor; this reader knows {VERSION}"
        raise err(
            Code.VERSION_UNSUPPORTED, detail, where=f"{top.where}/v", requirement="REQ-CUR-001"
        )
    for name in _RESERVED:
        if name in top.members:
            raise err(
                Code.FEATURE_UNSUPPORTED,
                name,
                where=f"{top.where}/{name}",
                requirement="REQ-CUR-003",
            )
    if "mixture" in top.members:
        top.inner("mixture").known("alg", "block-det-v1")


def _parse_plan(plan: CursorMap) -> BatchPlan:
    plan.check_names("unit", "global_batch", "assign", "tail")
    plan.known("unit", "sample")
    plan.known("assign", "contig-v1")
    tail: Tail = plan.known("tail", "carry", "drop", "pad_masked")
    return BatchPlan(global_batch=plan.integer("global_batch", limits.DIM, least=1), tail=tail)


def _parse_commit(commit: CursorMap, *, is_mixed: bool) -> Commit:
    commit.check_names("step", "global_pos", *(() if is_mixed else ("epoch", "pos_in_epoch")))
    return Commit(
        step=commit.integer("step", UINT64),
        global_pos=commit.integer("global_pos", UINT64 if is_mixed else _POSITION),
        epoch=None if is_mixed else commit.integer("epoch", UINT64),
        pos_in_epoch=None if is_mixed else commit.integer("pos_in_epoch", _POSITION),
    )


def _parse_order(order: CursorMap, *, is_mixed: bool) -> Order:
    order.check_names("alg", "seed", "vector_check")
    order.known("alg", "feistel-v1")
    vector = order.inner("vector_check")
    vector.check_names("pos", "id", *(("source",) if is_mixed else ()))
    check = VectorCheck(
        pos=vector.integer("pos", UINT64 if is_mixed else _POSITION),
        id=vector.integer("id", limits.DIM),
        source=vector.text("source") if is_mixed else None,
    )
    return Order(seed=order.integer("seed", UINT64), vector_check=check)


def _parse_sources(top: CursorMap, *, is_mixed: bool) -> tuple[Source, ...]:
    where = f"{top.where}/sources"
    sources: dict[str, Source] = {}
    for source in top.maps("sources"):
        source.check_names("id", "fingerprint", "n", *(("pos",) if is_mixed else ()))
        one = Source(
            id=source.text("id"),
            fingerprint=None
            if source.members["fingerprint"] is None
            else source.text("fingerprint"),
            n=source.integer("n", limits.DIM, least=1),
            pos=source.integer("pos", UINT64) if is_mixed else None,
        )
        if one.id in sources:
            refuse(f"a second source is called {one.id!r}", f"{source.where}/id", "REQ-CUR-009")
        sources[one.id] = one
    if not sources:
        refuse("a cursor has a source", where, "REQ-CUR-002")
    if len(sources) > 1 and not is_mixed:
        refuse("several sources, and no mixture of them", where, "REQ-CUR-009")
    return tuple(sources.values())


def parse_mixture(mixture: CursorMap, lengths: Mapping[str, int]) -> Mixture:
    """Return the mixture of a cursor.

    Args:
        lengths: number of samples of each source, by id.

    Raises: CURSOR_FORM.
    Spec: REQ-CUR-002, REQ-CUR-011.
    """
    mixture.check_names("alg", "block", "seed", "stages")
    block = mixture.integer("block", limits.MIXTURE_BLOCK, least=1)
    stages = [_parse_stage(stage, block, lengths) for stage in mixture.maps("stages")]
    where = f"{mixture.where}/stages"
    if not stages or stages[0].from_pos != 0:
        refuse("the first stage begins at position 0", where, "REQ-CUR-011")
    check_ascending([stage.from_pos for stage in stages], where, "REQ-CUR-011")
    return Mixture(block=block, seed=mixture.integer("seed", UINT64), stages=tuple(stages))


def _parse_stage(stage: CursorMap, block: int, lengths: Mapping[str, int]) -> Stage:
    stage.check_names("from_pos", "counts")
    from_pos = stage.integer("from_pos", UINT64)
    if from_pos % block:
        refuse(
            f"{from_pos} is no multiple of the block, {block}",
            f"{stage.where}/from_pos",
            "REQ-CUR-011",
        )
    counts = stage.inner("counts")
    if counts.members.keys() != lengths.keys():
        refuse("it doesn't name each source, and no others", counts.where, "REQ-CUR-011")
    parsed = {name: counts.integer(name, block) for name in lengths}
    if sum(parsed.values()) != block:
        refuse(
            f"the counts add up to {sum(parsed.values())}, the block is {block}",
            counts.where,
            "REQ-CUR-011",
        )
    return Stage(from_pos=from_pos, counts=parsed)


def _parse_ledger(ledger: CursorMap) -> Ledger:
    ledger.check_names("alg", "count", "set_digest")
    ledger.known("alg", "mix64-add4-v1")
    set_digest = ledger.text("set_digest")
    if not _SET_DIGEST.fullmatch(set_digest):
        refuse(f"not 64 hex digits: {set_digest!r}", f"{ledger.where}/set_digest", "REQ-CUR-002")
    return Ledger(count=ledger.integer("count", _POSITION), set_digest=set_digest)


def _parse_pipeline(pipeline: CursorMap) -> Pipeline:
    pipeline.check_names("open", "discarded")
    where = f"{pipeline.where}/open"
    bounds = pipeline.items("open")
    if len(bounds) > 2 * limits.OPEN_POSITIONS:
        refuse(f"more than {limits.OPEN_POSITIONS} ranges", where, "REQ-PIP-001")
    ends = [bound for bound in bounds if type(bound) is int]
    if len(ends) < len(bounds) or len(ends) % 2:
        refuse("not a list of begins and ends of ranges", where, "REQ-PIP-001")
    check_ascending(ends, where, "REQ-PIP-001")
    if ends and ends[0] < 0:
        refuse("a range begins before position 0", where, "REQ-PIP-001")
    parsed = Pipeline(open=tuple(ends), discarded=_parse_ledger(pipeline.inner("discarded")))
    if parsed.open_count > limits.OPEN_POSITIONS:
        detail = f"more than {limits.OPEN_POSITIONS} positions are open"
        refuse(detail, where, "REQ-PIP-001")
    return parsed


# --- consistency of the members -------------------------------------------------------------------


def check_cursor(cursor: Cursor, where: str = "cursor") -> None:
    """Raise if members of a cursor contradict each other. The order isn't computed for this.

    Raises: CURSOR_FORM.
    Spec: REQ-CUR-004, REQ-CUR-010, REQ-CUR-015, REQ-CUR-019, REQ-CUR-021, REQ-PIP-001,
        REQ-PIP-002.
    """
    check_rules(cursor.plan, cursor.sources, cursor.mixture, cursor.skips, where)
    _check_sample(cursor, where)
    if cursor.mixture is None:
        _check_epoch(cursor, where)
    elif sum(source.pos or 0 for source in cursor.sources) != cursor.commit.global_pos:
        detail = f"the positions of the sources don't add up to {cursor.commit.global_pos}"
        refuse(detail, f"{where}/sources", "REQ-CUR-010")
    _check_count(cursor, where)


def check_rules(
    plan: BatchPlan,
    sources: tuple[Source, ...],
    mixture: Mixture | None,
    skips: tuple[Skip, ...],
    where: str,
) -> None:
    """Raise if no order can follow from plan, sources, mixture and skips.

    Raises: CURSOR_FORM. Spec: REQ-CUR-015, REQ-CUR-019.
    """
    if mixture is not None and plan.tail != "carry":
        detail = f"a mixture has no epochs that a batch could end with: {plan.tail!r}"
        refuse(detail, f"{where}/plan/tail", "REQ-CUR-015")
    by_source: dict[str, list[Skip]] = {}
    for skip in skips:
        if not isinstance(skip, PosSkip):
            by_source.setdefault(skip.source, []).append(skip)
    for source in sources:
        removed = count_removed(by_source.get(source.id, ()), source.id)
        if removed > limits.SKIPPED:
            refuse(
                f"{removed} samples of {source.id!r} are removed", f"{where}/skips", "REQ-CUR-019"
            )
        if plan.epoch_positions(source.n - removed) < 1:
            # Without a skip, the batch is too large.
            place, clause = (
                (f"{where}/skips", "REQ-CUR-019") if removed else (f"{where}/plan", "REQ-CUR-015")
            )
            refuse(f"an epoch of {source.id!r} has no batch left", place, clause)
    if plan.tail == "carry":
        return
    for number, skip in enumerate(skips):
        edges = skip.range if isinstance(skip, PosSkip) else (skip.from_pos,)
        if skip.policy == "shift" and any(edge % plan.global_batch for edge in edges):
            detail = (
                f"with the tail {plan.tail!r}, a range that shifts the order begins and ends"
                " with a step"
            )
            refuse(detail, f"{where}/skips/{number}", "REQ-CUR-019")


def _check_sample(cursor: Cursor, where: str) -> None:
    vector = cursor.order.vector_check
    lengths = {source.id: source.n for source in cursor.sources}
    if vector.source is not None and vector.source not in lengths:
        refuse(
            f"there is no source {vector.source!r}",
            f"{where}/order/vector_check/source",
            "REQ-CUR-010",
        )
    n = cursor.sources[0].n if vector.source is None else lengths[vector.source]
    if vector.id >= n:
        clause = "REQ-CUR-004" if vector.source is None else "REQ-CUR-010"
        refuse(f"sample {vector.id} of a source of {n}", f"{where}/order/vector_check/id", clause)


def _check_epoch(cursor: Cursor, where: str) -> None:
    commit = cursor.commit
    if any(skip.policy == "shift" for skip in cursor.skips):
        return  # the lengths of epochs follow only from the order (REQ-CUR-014)
    length = cursor.plan.epoch_positions(cursor.sources[0].n)
    if (commit.epoch, commit.pos_in_epoch) != divmod(commit.global_pos, length):
        detail = (
            f"position {commit.global_pos} of {length} in an epoch is not"
            f" {commit.pos_in_epoch} in {commit.epoch}"
        )
        refuse(detail, f"{where}/commit", "REQ-CUR-004")


def _check_count(cursor: Cursor, where: str) -> None:
    count = cursor.ledger.count
    position = cursor.commit.global_pos
    all_count = not cursor.skips and cursor.plan.tail != "pad_masked"
    pipeline = cursor.pipeline
    if pipeline is None:
        if count > position or (all_count and count != position):
            detail = f"{count} samples in the ledger, {position} positions committed"
            refuse(detail, f"{where}/ledger/count", "REQ-CUR-004" if all_count else "REQ-CUR-021")
        return
    if pipeline.open and pipeline.open[-1] > position:
        detail = f"position {pipeline.open[-1] - 1} is open, and {position} positions were issued"
        refuse(detail, f"{where}/pipeline/open", "REQ-PIP-001")
    known = count + pipeline.discarded.count + pipeline.open_count
    if known > position or (all_count and known != position):
        detail = (
            f"{count} samples were consumed, {pipeline.discarded.count} discarded, and"
            f" {pipeline.open_count} are open, of {position} positions"
        )
        refuse(detail, f"{where}/pipeline", "REQ-PIP-002")


# --- another library's position -------------------------------------------------------------------

_LOADER_KIND: Final = "ckptfmt.foreign_loader"
_LOADER_VERSION: Final = 1

Per: TypeAlias = Literal["worker", "run"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """A data loader's state, saved by `worker_count` workers.

    With `per` ``worker``, each worker saves its own state; with ``run``, all save the same state.
    """

    lib: str
    version: str
    per: Per
    worker_count: int
    state: object


def is_foreign(tree: object) -> bool:
    """Return whether a value is the position of another library's data loader."""
    return type(tree) is dict and tree.get("kind") == _LOADER_KIND


def dump_foreign(foreign: Foreign) -> dict[str, Any]:
    """Return the tree. Raises: CURSOR_FORM. Spec: REQ-CUR-022."""
    members = {field.name: getattr(foreign, field.name) for field in dataclasses.fields(foreign)}
    tree = {"kind": _LOADER_KIND, "v": _LOADER_VERSION, **members}
    parse_foreign(tree)
    return tree


def parse_foreign(tree: object, *, where: str = "loader") -> Foreign:
    """Return the data loader's position from a tree.

    Raises: CURSOR_FORM, VERSION_UNSUPPORTED.
    Spec: REQ-CUR-022.
    """
    top = CursorMap.of(tree, where, clause="REQ-CUR-022")
    if top.members.get("kind") != _LOADER_KIND:
        refuse(
            f"not a loader's position: {show_value(top.members.get('kind'))}",
            f"{where}/kind",
            "REQ-CUR-022",
        )
    version = top.integer("v", limits.JSON_INTEGER)
    if version != _LOADER_VERSION:
        detail = f"version {version} of a loader's position; this reader knows {_LOADER_VERSION}"
        raise err(Code.VERSION_UNSUPPORTED, detail, where=f"{where}/v", requirement="REQ-CUR-022")
    top.check_names("kind", "v", "lib", "version", "per", "worker_count", "state")
    per = top.text("per")
    if per not in ("worker", "run"):
        refuse(f"{per!r} is neither 'worker' nor 'run'", f"{where}/per", "REQ-CUR-022")
    lib = top.text("lib")
    if lib == EPOCHS_LIB:
        parse_position(top.members["state"], where=f"{where}/state")
    return Foreign(
        lib=lib,
        version=top.text("version"),
        per="worker" if per == "worker" else "run",
        worker_count=top.integer("worker_count", limits.WRITERS, least=1),
        state=top.members["state"],
    )
