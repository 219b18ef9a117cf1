"""The data cursor: where a run stands in its data, free of rank, world size and worker.

A cursor is a plain tree, kept in the field `data`; integers may need 64 bits, which trees hold.

    {"kind": "ckptfmt.data_cursor", "v": 1,
     "plan":    {"unit": "sample", "global_batch": 64, "assign": "contig-v1", "tail": "carry"},
     "commit":  {"step": 1200, "global_pos": 76800, "epoch": 0, "pos_in_epoch": 76800},
     "order":   {"alg": "feistel-v1", "seed": 7, "vector_check": {"pos": 76800, "id": 991823}},
     "sources": [{"id": "books", "fingerprint": "blake3:...", "n": 5000000}],
     "skips":   [],
     "ledger":  {"alg": "mix64-add4-v1", "count": 76800, "set_digest": "<64 hex>"}}

What each says:

* `commit` counts what finished steps consumed, never what was fetched: the next step begins at `global_pos`.
* `assign` contig-v1: a step covers the positions ``[p, p + global_batch)``; worker i of w takes
  ``[p + i * global_batch div w, p + (i + 1) * global_batch div w)`` of them.
* `tail` carry: a batch that reaches the end of an epoch goes on with the next one. No sample is dropped or padded.
* `vector_check` is a position and the sample there, by which a reader proves that it computes the same order.
* `ledger` is the multiset digest of all samples consumed (`ckptfmt.arithmetic.ledger`), the order left out.

REQ-CUR-001 [RW] the kind is ``ckptfmt.data_cursor`` -> CURSOR_FORM; `v` is 1 -> VERSION_UNSUPPORTED, before all else.
REQ-CUR-002 [RW] exactly the members above, of these types and ranges -> CURSOR_FORM.
REQ-CUR-003 [R] another unit, alg, assign or tail, several sources, skips, and the reserved members `mixture`,
    `pipeline` and `foreign` need a later reader -> FEATURE_UNSUPPORTED.
REQ-CUR-004 [RW] ``global_pos = epoch * n + pos_in_epoch``, ``0 <= pos_in_epoch < n``, ``0 <= vector_check.id < n``,
    ``ledger.count = global_pos`` -> CURSOR_FORM.
REQ-CUR-005 [W] no member speaks of a rank, a world size, a worker or a host (REQ-CUR-002 has no place for one).
REQ-CUR-006 [R] the order has the sample `vector_check.id` at `vector_check.pos` -> CURSOR_FORM.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any, Final, Literal, NoReturn

from ckptfmt import limits
from ckptfmt.errors import Code, err

__all__ = ["Commit", "Cursor", "Ledger", "Order", "Plan", "Source", "VectorCheck", "dump_cursor", "parse_cursor"]

KIND: Final = "ckptfmt.data_cursor"
VERSION: Final = 1
UINT64: Final = (1 << 64) - 1

#: Members of version 1 that this reader doesn't know yet.
_RESERVED: Final = ("mixture", "pipeline", "foreign")
_POSITION: Final = limits.DIM * (UINT64 + 1)
_SET_DIGEST: Final = re.compile(r"[0-9a-f]{64}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How positions become batches. `global_batch` is in samples."""

    global_batch: int
    unit: Literal["sample"] = "sample"
    assign: Literal["contig-v1"] = "contig-v1"
    tail: Literal["carry"] = "carry"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """What finished steps have consumed: `global_pos` samples, of which `epoch` whole epochs."""

    step: int
    global_pos: int
    epoch: int
    pos_in_epoch: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class VectorCheck:
    """The sample `id` at the position `pos`, by which an order is recognised."""

    pos: int
    id: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Which sample stands at which position."""

    seed: int
    vector_check: VectorCheck
    alg: Literal["feistel-v1"] = "feistel-v1"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A data set of `n` samples; `fingerprint` says by its owner's means that it is the same one, or is None."""

    id: str
    fingerprint: str | None
    n: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """The multiset digest of `count` consumed samples: 64 hex digits."""

    count: int
    set_digest: str
    alg: Literal["mix64-add4-v1"] = "mix64-add4-v1"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """A data cursor of one source."""

    plan: Plan
    commit: Commit
    order: Order
    sources: tuple[Source]
    ledger: Ledger
    skips: tuple[()] = ()


def dump_cursor(cursor: Cursor) -> dict[str, Any]:
    """Return the tree of a cursor.

    Raises: CURSOR_FORM when its members contradict each other; LIMIT_EXCEEDED.
    Spec: REQ-CUR-001 to REQ-CUR-005.
    """
    members = dataclasses.asdict(cursor)
    tree = {"kind": KIND, "v": VERSION, **members, "sources": list(members["sources"]), "skips": []}
    parse_cursor(tree)
    return tree


def parse_cursor(tree: object, *, where: str = "cursor") -> Cursor:
    """Return the cursor that a tree says.

    Args:
        tree: of exact dicts, lists, str, int and None.
        where: the tree's place, for errors.

    Raises: CURSOR_FORM, VERSION_UNSUPPORTED, FEATURE_UNSUPPORTED.
    Spec: REQ-CUR-001 to REQ-CUR-004.
    """
    top = _Map.of(tree, where)
    _check_header(top)
    top.check_names("kind", "v", "plan", "commit", "order", "sources", "skips", "ledger")
    if top.items("skips"):
        raise err(Code.FEATURE_UNSUPPORTED, "skips", where=f"{where}/skips", requirement="REQ-CUR-003")
    cursor = Cursor(
        plan=_parse_plan(top.inner("plan")),
        commit=_parse_commit(top.inner("commit")),
        order=_parse_order(top.inner("order")),
        sources=_parse_sources(top),
        ledger=_parse_ledger(top.inner("ledger")),
    )
    _check_sums(cursor, where)
    return cursor


def _check_header(top: _Map) -> None:
    if top.members.get("kind") != KIND:
        _refuse(f"not a cursor: {top.members.get('kind')!r}", f"{top.where}/kind", "REQ-CUR-001")
    version = top.integer("v", UINT64)
    if version != VERSION:
        detail = f"version {version} of the cursor; this reader knows {VERSION}"
        raise err(Code.VERSION_UNSUPPORTED, detail, where=f"{top.where}/v", requirement="REQ-CUR-001")
    for name in _RESERVED:
        if name in top.members:
            raise err(Code.FEATURE_UNSUPPORTED, name, where=f"{top.where}/{name}", requirement="REQ-CUR-003")


def _parse_plan(plan: _Map) -> Plan:
    plan.check_names("unit", "global_batch", "assign", "tail")
    plan.check_known("unit", "sample")
    plan.check_known("assign", "contig-v1")
    plan.check_known("tail", "carry")
    return Plan(global_batch=plan.integer("global_batch", limits.DIM, least=1))


def _parse_commit(commit: _Map) -> Commit:
    commit.check_names("step", "global_pos", "epoch", "pos_in_epoch")
    return Commit(
        step=commit.integer("step", UINT64),
        global_pos=commit.integer("global_pos", _POSITION),
        epoch=commit.integer("epoch", UINT64),
        pos_in_epoch=commit.integer("pos_in_epoch", limits.DIM),
    )


def _parse_order(order: _Map) -> Order:
    order.check_names("alg", "seed", "vector_check")
    order.check_known("alg", "feistel-v1")
    vector = order.inner("vector_check")
    vector.check_names("pos", "id")
    check = VectorCheck(pos=vector.integer("pos", _POSITION), id=vector.integer("id", limits.DIM))
    return Order(seed=order.integer("seed", UINT64), vector_check=check)


def _parse_sources(top: _Map) -> tuple[Source]:
    sources = top.items("sources")
    where = f"{top.where}/sources"
    if not sources:
        _refuse("a cursor has a source", where, "REQ-CUR-002")
    if len(sources) > 1:
        raise err(Code.FEATURE_UNSUPPORTED, "several sources", where=where, requirement="REQ-CUR-003")
    source = _Map.of(sources[0], f"{where}/0")
    source.check_names("id", "fingerprint", "n")
    fingerprint = None if source.members["fingerprint"] is None else source.text("fingerprint")
    return (Source(id=source.text("id"), fingerprint=fingerprint, n=source.integer("n", limits.DIM, least=1)),)


def _parse_ledger(ledger: _Map) -> Ledger:
    ledger.check_names("alg", "count", "set_digest")
    ledger.check_known("alg", "mix64-add4-v1")
    set_digest = ledger.text("set_digest")
    if not _SET_DIGEST.fullmatch(set_digest):
        _refuse(f"not 64 hex digits: {set_digest!r}", f"{ledger.where}/set_digest", "REQ-CUR-002")
    return Ledger(count=ledger.integer("count", _POSITION), set_digest=set_digest)


def _check_sums(cursor: Cursor, where: str) -> None:
    commit, n = cursor.commit, cursor.sources[0].n
    if (commit.epoch, commit.pos_in_epoch) != divmod(commit.global_pos, n):
        detail = f"position {commit.global_pos} of {n} samples is not {commit.pos_in_epoch} in epoch {commit.epoch}"
        _refuse(detail, f"{where}/commit", "REQ-CUR-004")
    if cursor.order.vector_check.id >= n:
        detail = f"sample {cursor.order.vector_check.id} of a source of {n}"
        _refuse(detail, f"{where}/order/vector_check/id", "REQ-CUR-004")
    if cursor.ledger.count != commit.global_pos:
        detail = f"{cursor.ledger.count} samples in the ledger, {commit.global_pos} committed"
        _refuse(detail, f"{where}/ledger/count", "REQ-CUR-004")


@dataclasses.dataclass(frozen=True, slots=True)
class _Map:
    """A map of the tree, with its place; its getters check types exactly: True is no integer here."""

    members: dict[object, object]
    where: str

    @classmethod
    def of(cls, value: object, where: str) -> _Map:
        if type(value) is not dict:
            _refuse(f"a {type(value).__name__} where a map belongs", where, "REQ-CUR-002")
        return cls(value, where)

    def check_names(self, *names: str) -> None:
        if missing := [name for name in names if name not in self.members]:
            _refuse(f"without {missing[0]!r}", self.where, "REQ-CUR-002")
        if unknown := [name for name in self.members if name not in names]:
            _refuse(f"the unknown member {unknown[0]!r}", self.where, "REQ-CUR-002")

    def check_known(self, name: str, known: str) -> None:
        if self.text(name) != known:
            detail = f"{name} {self.text(name)!r}; this reader knows {known!r}"
            raise err(Code.FEATURE_UNSUPPORTED, detail, where=f"{self.where}/{name}", requirement="REQ-CUR-003")

    def inner(self, name: str) -> _Map:
        return _Map.of(self.members[name], f"{self.where}/{name}")

    def items(self, name: str) -> list[object]:
        value = self.members[name]
        if type(value) is not list:
            _refuse(f"a {type(value).__name__} where a list belongs", f"{self.where}/{name}", "REQ-CUR-002")
        return value

    def text(self, name: str) -> str:
        value = self.members[name]
        if type(value) is not str or len(value.encode(errors="replace")) > limits.NAME_NBYTES:
            detail = f"not a string of at most {limits.NAME_NBYTES} bytes"
            _refuse(detail, f"{self.where}/{name}", "REQ-CUR-002")
        return value

    def integer(self, name: str, most: int, *, least: int = 0) -> int:
        value = self.members.get(name)
        if type(value) is not int or not least <= value <= most:
            detail = f"not an integer from {least} to {most}: {value!r:.80}"
            _refuse(detail, f"{self.where}/{name}", "REQ-CUR-002")
        return value


def _refuse(detail: str, where: str, requirement: str) -> NoReturn:
    raise err(Code.CURSOR_FORM, detail, where=where, requirement=requirement)
