"""Context; spec/60-context.md: the data cursor, streams, and how leaves are scoped."""

from __future__ import annotations

import copy
from typing import Any

from conformance.generate.cases import Page
from conformance.generate.model import Checkpoint
from conformance.generate.order import ledger, sample_at
from conformance.generate.plans import Leaf, Plan, Stream, Tensor
from conformance.generate.wire import msgpack

__all__ = ["page"]

COUNT, SEED, POSITION = 100, 7, 256


def cursor() -> dict[str, Any]:
    """Return a cursor of a source of 100 samples, after 64 steps of four."""
    return {
        "kind": "ckptfmt.data_cursor",
        "v": 1,
        "plan": {"unit": "sample", "global_batch": 4, "assign": "contig-v1", "tail": "carry"},
        "commit": {"step": 64, "global_pos": POSITION, "epoch": 2, "pos_in_epoch": 56},
        "order": {
            "alg": "feistel-v1", "seed": SEED,
            "vector_check": {"pos": POSITION, "id": sample_at(COUNT, SEED, POSITION)},
        },
        "sources": [{"id": "books", "fingerprint": None, "n": COUNT}],
        "skips": [],
        "ledger": {"alg": "mix64-add4-v1", "count": POSITION, "set_digest": ledger("books", COUNT, SEED, POSITION)},
    }  # fmt: skip


def tree_of(value: Any) -> Any:  # noqa: ANN401 - any plain value
    """Return the tree of dicts, lists, strings, integers and None."""
    if isinstance(value, dict):
        return ["d", *(item for row in value.items() for item in (row[0], tree_of(row[1])))]
    if isinstance(value, list):
        return ["l", *map(tree_of, value)]
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1 << 64:
        return ["i", value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)]
    return value


def page() -> Page:
    """Return the cases of context."""
    made = Page("context")
    _valid(made)
    _valid_values(made)
    _cursors(made)
    return made


def _plan(value: dict[str, Any]) -> Plan:
    return Plan(tensors=[Tensor(name="w", dtype="int8", shape=(2,))], leaves=[Leaf(field="data", value=tree_of(value))])


def _valid(made: Page) -> None:
    made.accept(
        "cursor",
        _plan(cursor()),
        "CUR-001 CUR-002 CUR-003 CUR-004 CUR-005 CUR-006 CUR-007 CUR-008",
        "a cursor in the third epoch of a source of 100 samples",
        why="it is what the invalid cursors differ from",
    )
    far = cursor()
    count = 2**48
    position = 3 * count + 5
    far["commit"] = {"step": 2**64 - 1, "global_pos": position, "epoch": 3, "pos_in_epoch": 5}
    far["order"] |= {"seed": 2**64 - 1, "vector_check": {"pos": 3 * count, "id": 37976156300933}}
    far["sources"][0] |= {"n": count, "fingerprint": "by its owner's means"}
    far["ledger"] |= {"count": position, "set_digest": "0" * 64}
    made.accept(
        "cursor-far",
        _plan(far),
        "CUR-002 CUR-004 LIM-002 CUR-007",
        "the greatest source, seed and step",
        why="the greatest that is allowed has to be read, and 64 bits don't overflow",
    )
    foreign = Plan(
        tensors=[Tensor(name="w", dtype="int8", shape=(2,))],
        leaves=[
            Leaf(field="data", name="loader", scope=f"lw/{i}", value=["d", "kind", "theirs", "pos", i])
            for i in range(2)
        ],
    )
    made.accept(
        "foreign-loader",
        foreign,
        "CUR-001 CTX-003 CTX-001",
        "another loader's state, of two logical workers",
        why="what isn't a cursor is a value like any other",
    )


def _valid_values(made: Page) -> None:
    """Add leaves and streams that are accepted."""
    streams = Plan(
        tensors=[Tensor(name="w", dtype="int8", shape=(2,))],
        streams=[
            Stream(name="python", kind="python.mt19937", state=["t", 3, ["t", 1, 2], None]),
            Stream(
                name="numpy",
                kind="numpy.PCG64",
                state=["d", "state", ["d", "state", ["i", (2**100).to_bytes(13, "little")]]],
            ),
            Stream(name="torch", kind="torch.philox", state=["a", "uint8", [2], b"\1\2"], scope="global"),
            Stream(name="theirs", kind="xorshift.unknown", state=["l", ["f", bytes(8)]]),
            Stream(name="theirs", kind="xorshift.unknown", state=["l", ["f", bytes(8)]], scope="lw/1"),
        ],
    )
    made.accept(
        "streams",
        streams,
        "CTX-003 CTX-006",
        "streams of four kinds, one of them unknown, in three scopes",
        why="who doesn't know a kind keeps the state as it is",
    )
    extra = Plan(
        tensors=[Tensor(name="extra/ema/w", field="optimizer", shape=(2,)), Tensor(name="w", shape=(2,))],
        leaves=[
            Leaf(field="optimizer", name="extra/ema", value=["d", "w", ["T", "extra/ema/w", "torch"]]),
            Leaf(field="topology", value=["d", "worker_count", 1]),
            Leaf(field="topology", name="local", value=["d"]),
            Leaf(field="provenance", value=["d", "commit", "0" * 40]),
        ],
    )
    made.accept(
        "extra",
        extra,
        "CTX-002 TRE-004",
        "an average under extra/, two leaves of topology, one of provenance",
        why="what a step changes and is no optimizer is there as well",
    )


def _cursors(made: Page) -> None:
    def put(path: str, value: Any) -> Any:  # noqa: ANN401 - an edit
        def edit(c: Checkpoint) -> None:
            changed = copy.deepcopy(cursor())
            place: Any = changed
            *steps, last = path.split("/")
            for step in steps:
                place = place[int(step) if isinstance(place, list) else step]
            if value is None and last in ("ledger", "skips", "alg"):
                del place[last]
            elif isinstance(place, list):
                place.insert(int(last), value)
            else:
                place[last] = value
            c.part["leaves"]["value"][0] = msgpack(tree_of(changed))

        return edit

    why = (
        "an order or a position that is read otherwise repeats some samples and skips others, and nothing else shows it"
    )
    for slug, clauses, error, path, value in (
        ("version-2", "CUR-001", "VERSION_UNSUPPORTED", "v", 2),
        ("without-ledger", "CUR-002", "CURSOR_FORM", "ledger", None),
        ("world-size", "CUR-002 CUR-005", "CURSOR_FORM", "world_size", 8),
        ("batch-0", "CUR-002", "CURSOR_FORM", "plan/global_batch", 0),
        ("seed-negative", "CUR-002", "CURSOR_FORM", "order/seed", -1),
        ("seed-2-64", "CUR-002 LIM-001", "CURSOR_FORM", "order/seed", 2**64),
        ("n-0", "CUR-002 CUR-004", "CURSOR_FORM", "sources/0/n", 0),
        ("unit", "CUR-003", "FEATURE_UNSUPPORTED", "plan/unit", "token"),
        ("tail", "CUR-003", "FEATURE_UNSUPPORTED", "plan/tail", "drop"),
        ("order", "CUR-003", "FEATURE_UNSUPPORTED", "order/alg", "feistel-v2"),
        ("two-sources", "CUR-003", "FEATURE_UNSUPPORTED", "sources/1", {"id": "web", "fingerprint": None, "n": 3}),
        ("skips", "CUR-003", "FEATURE_UNSUPPORTED", "skips/0", {"pos": 5}),
        ("mixture", "CUR-003", "FEATURE_UNSUPPORTED", "mixture", {}),
        ("position", "CUR-004", "CURSOR_FORM", "commit/pos_in_epoch", 55),
        ("check-beyond", "CUR-004", "CURSOR_FORM", "order/vector_check/id", COUNT),
        ("ledger-count", "CUR-004", "CURSOR_FORM", "ledger/count", 255),
        ("ledger-digest", "CUR-002", "CURSOR_FORM", "ledger/set_digest", "xyz"),
    ):  # fmt: skip
        made.reject(
            f"cursor-{slug}",
            "cursor",
            put(path, value),
            clauses,
            error,
            f"{path} is {'missing' if value is None else value!r}",
            why=why,
            bug="WRONG_RUN",
            phase="validate",
        )
