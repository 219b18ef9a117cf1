"""Context; spec/context/: the data cursor, streams, and the scopes of leaves."""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any

from conformance.generate.cases import Page
from conformance.generate.course import course, ledger_of, positions
from conformance.generate.model import Checkpoint
from conformance.generate.order import ledger, sample_at
from conformance.generate.plans import Leaf, Plan, Stream, Tensor
from conformance.generate.wire import msgpack

__all__ = ["page"]

COUNT = 100
SEED = 7
POSITION = 256


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
        "ledger": {"alg": "mix64-add4-v1", "count": POSITION,
                   "set_digest": ledger("books", COUNT, SEED, POSITION)},
    }  # fmt: skip


def mixed() -> dict[str, Any]:
    """Return a cursor of two sources in two stages, after 16 steps of four."""
    tree = cursor() | {
        "sources": [{"id": "books", "fingerprint": None, "n": 20},
                    {"id": "code", "fingerprint": "by hand", "n": 7}],
        "mixture": {
            "alg": "block-det-v1", "block": 8, "seed": SEED,
            "stages": [
                {"from_pos": 0, "counts": {"books": 5, "code": 3}},
                {"from_pos": 40, "counts": {"books": 8, "code": 0}},
            ],
        },
    }  # fmt: skip
    return went_on(tree, 16)


def skipping() -> dict[str, Any]:
    """Return a cursor of one source after twelve steps, ten samples of which are skipped."""
    tree = cursor() | {
        "sources": [{"id": "books", "fingerprint": None, "n": 30}],
        "skips": [
            {"scope": "sample", "policy": "shift", "from_pos": 8, "reason": "nan",
             "source": "books", "ids": [3, 29]},
            {
                "scope": "shard", "policy": "hole", "from_pos": 0, "reason": "lost",
                "source": "books", "shard": "00017.tar", "range": [10, 14],
            },
            {"scope": "sample", "policy": "mask", "from_pos": 1, "reason": "licence",
             "source": "books", "ids": [0]},
            {"scope": "pos", "policy": "shift", "reason": "spike", "range": [20, 28]},
            {"scope": "pos", "policy": "hole", "reason": "", "range": [30, 31]},
        ],
    }  # fmt: skip
    return went_on(tree, 12)


def tailed(tail: str) -> dict[str, Any]:
    """Return a cursor of ten samples after seven steps of four, with a tail other than carry."""
    tree = cursor() | {"sources": [{"id": "books", "fingerprint": None, "n": 10}]}
    tree["plan"]["tail"] = tail
    return went_on(tree, 7)


def pipelined(
    tree: dict[str, Any], end: int, pending: Collection[int], discarded: Collection[int]
) -> dict[str, Any]:
    """Return a cursor with `end` positions issued, after five steps.

    Args:
        pending: positions that are neither consumed nor discarded.
        discarded: positions of the discarded samples.
    """
    tree = copy.deepcopy(tree)
    tree["plan"] |= {"global_batch": 1}
    tree = went_on(tree, end)
    tree["commit"]["step"] = 5
    tree["plan"] |= {"global_batch": 4}
    places = list(course(tree, end))
    left = {*pending, *discarded}
    tree["ledger"] = ledger_of([place for at, place in enumerate(places) if at not in left])
    bounds = [at for at in range(end + 1) if (at in pending) != (at - 1 in pending)]
    tree["pipeline"] = {
        "open": bounds,
        "discarded": ledger_of([places[at] for at in discarded]),
    }
    return tree


def went_on(tree: dict[str, Any], steps: int) -> dict[str, Any]:
    """Return a cursor advanced by `steps` steps: with new position, check and ledger."""
    end = steps * tree["plan"]["global_batch"]
    places = list(course(tree, end + 1))
    here = places[end]
    tree["commit"] = {"step": steps, "global_pos": end}
    tree["order"]["vector_check"] = {"pos": end, "id": here.sample}
    if "mixture" in tree:
        tree["order"]["vector_check"]["source"] = here.source
        found = positions(tree, end)
        tree["sources"] = [source | {"pos": found[source["id"]]} for source in tree["sources"]]
    else:
        tree["commit"] |= {"epoch": here.epoch, "pos_in_epoch": here.drawn}
    tree["ledger"] = ledger_of(places[:end])
    return tree


def tree_of(value: Any) -> Any:
    """Return the tree of dicts, lists, strings, integers and None."""
    if isinstance(value, dict):
        return ["d", *(item for row in value.items() for item in (row[0], tree_of(row[1])))]
    if isinstance(value, list):
        if len(value) >= 16 and all(type(entry) is int and 0 <= entry < 256 for entry in value):
            return ["L", "uint8", bytes(value)]
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
    _others(made)
    return made


def _plan(value: dict[str, Any]) -> Plan:
    return Plan(
        tensors=[Tensor(name="w", dtype="int8", shape=(2,))],
        leaves=[Leaf(field="data", value=tree_of(value))],
    )


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
    _valid_orders(made)
    foreign = Plan(
        tensors=[Tensor(name="w", dtype="int8", shape=(2,))],
        leaves=[
            Leaf(
                field="data",
                name="loader",
                scope=f"lw/{i}",
                value=["d", "kind", "theirs", "pos", i],
            )
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


def _valid_orders(made: Page) -> None:
    """Add cursors of mixtures, skips and tails."""
    why = (
        "who computes another order repeats some samples and leaves out others, and nothing"
        " else shows it"
    )
    for slug, tree, clauses, says in (
        (
            "mixed",
            mixed(),
            "CUR-009 CUR-010 CUR-011 CUR-012 CUR-013 CUR-014",
            "two sources, in the second of two stages",
        ),
        (
            "skips",
            skipping(),
            "CUR-003 CUR-014 CUR-017 CUR-018 CUR-019 CUR-020 CUR-021",
            "skips of each scope and policy",
        ),
        ("drop", tailed("drop"), "CUR-004 CUR-015", "the rest of each epoch is dropped"),
        (
            "pad",
            tailed("pad_masked"),
            "CUR-015 CUR-016 CUR-021",
            "the last batch of each epoch is filled up",
        ),
        (
            "pipeline",
            pipelined(cursor(), 40, {3, 7, 8, 9, 39}, {1, 2, 30}),
            "PIP-001 PIP-002 PIP-003",
            "samples are issued ahead, some discarded",
        ),
        (
            "pipeline-ended",
            pipelined(cursor(), 110, (), {104}),
            "PIP-001 PIP-002 CUR-004",
            "each of the issued samples is consumed or discarded",
        ),
        (
            "pipeline-skips",
            pipelined(skipping(), 29, {15, 16, 28}, {19}),
            "PIP-002 CUR-004 CUR-021",
            "samples are issued ahead, and skips leave some out",
        ),
        (
            "pipeline-mixed",
            pipelined(mixed(), 47, {40, 41, 44}, {45}),
            "PIP-001 PIP-002 CUR-010",
            "two sources, whose samples are issued ahead",
        ),
    ):
        made.accept(f"cursor-{slug}", _plan(tree), clauses, says, why=why)


def _others(made: Page) -> None:
    """Add positions of foreign loaders: two accepted positions, and several refused positions."""
    theirs = {
        "kind": "ckptfmt.foreign_loader", "v": 1, "lib": "torchdata", "version": "0.11.0",
        "per": "worker", "worker_count": 2, "state": {"_num_yielded": 3, "fetcher_state": None},
    }  # fmt: skip
    leaves = [Leaf(field="data", scope=f"lw/{i}", value=tree_of(theirs)) for i in range(2)]
    made.accept(
        "other-loader",
        Plan(tensors=[Tensor(name="w", dtype="int8", shape=(2,))], leaves=leaves),
        "CUR-022 CUR-023 CTX-003",
        "the positions of another library's loader, of two workers",
        why="what the library saved has to come back to it as it was",
    )
    counted = theirs | {
        "lib": "megatron",
        "per": "run",
        "worker_count": 8,
        "state": {"consumed_train_samples": 640},
    }
    made.accept(
        "consumed-samples",
        _plan(counted),
        "CUR-022",
        "a count of samples of the whole run, kept by eight workers",
        why="it is the same on all workers, and only its order isn't",
    )
    _names_of_loaders(made, counted)
    _epochs(made)
    for slug, error, path, value in (
        ("version-2", "VERSION_UNSUPPORTED", "v", 2),
        ("lib-none", "CURSOR_FORM", "lib", None),
        ("lib-of-4097", "CURSOR_FORM", "lib", "x" * 4097),
        ("version-number", "CURSOR_FORM", "version", 11),
        ("workers-0", "CURSOR_FORM", "worker_count", 0),
        ("per-host", "CURSOR_FORM", "per", "host"),
        ("elastic", "CURSOR_FORM", "elastic", 1),
    ):
        made.reject(
            f"loader-{slug}",
            "consumed-samples",
            _put(counted, path, value),
            "CUR-022",
            error,
            f"{path} is {value!r}" if len(repr(value)) < 99 else f"{path} is of {len(value)} bytes",
            why="who goes by it on another number of workers repeats samples",
            bug="WRONG_RUN",
            phase="validate",
        )


def _epochs(made: Page) -> None:
    """Add positions of torch's loaders: two accepted positions, and several refused positions."""
    stream = {"name": "torch.cpu", "kind": "torch.mt19937", "state": b"\xc0"}
    epoch = {
        "begin": [], "first": [stream], "redrawn": [], "ahead": None, "is_drawn": False,
        "seed": 7, "digest": "0" * 64,
    }  # fmt: skip
    sizes = {
        "samples": 10, "batch_size": 4, "drop_last": False, "batch_count": 3,
        "sampler": "torch.utils.data.sampler.RandomSampler",
    }  # fmt: skip
    state = {
        "sizes": sizes, "epoch": 2, "batches": 1, "attributes": {"sampler.epoch": 2},
        "process_count": 2, "draws": True, "streams": [[stream], None], "current": epoch,
        "seed": None,
    }  # fmt: skip
    loader = {
        "kind": "ckptfmt.foreign_loader", "v": 1, "lib": "torch.utils.data", "version": "2.13.0",
        "per": "worker", "worker_count": 1, "state": state,
    }  # fmt: skip
    redrawn = state | {
        "current": epoch | {"redrawn": ["held/sampler.rng"], "ahead": [[3, 1, 4, 1]]}
    }
    between = state | {"batches": 0, "current": None, "sizes": sizes | {"samples": None}}
    for slug, tree, says in (
        ("epochs", loader, "a position in the middle of an epoch"),
        ("epochs-redrawn", loader | {"state": redrawn}, "batches drawn ahead of the steps"),
        ("epochs-between", loader | {"state": between}, "a position between two epochs"),
    ):
        made.accept(
            slug,
            _plan(tree),
            "CUR-022 EPO-001 EPO-002 EPO-003",
            says,
            why="a loader that is read epoch by epoch goes on in the middle of one",
        )
    for slug, clause, path, value in (
        ("without-digest", "EPO-001", "state/current/digest", 7),
        ("position", "EPO-001", "state/position", 7),
        ("draws", "EPO-001", "state/draws", 1),
        ("stream-text", "EPO-001", "state/current/first/0/state", "x"),
        ("attribute", "EPO-001", "state/attributes/rng", [1]),
        ("processes", "EPO-002", "state/process_count", 3),
        ("no-epoch", "EPO-002", "state/current", None),
        ("not-begun", "EPO-002", "state/current/first", None),
        ("ahead", "EPO-002", "state/current/ahead", [[1]]),
    ):
        made.reject(
            f"epochs-{slug}",
            "epochs",
            _put(loader, path, value),
            clause,
            "CURSOR_FORM",
            f"{path} is {value!r}",
            why="a program that goes on from it repeats samples, or skips some",
            bug="WRONG_RUN",
            phase="validate",
        )


def _names_of_loaders(made: Page, base: dict[str, Any]) -> None:
    """Add allowed and refused names of a library."""
    for slug, lib, version, says in (
        ("nameless", "", "", "lib and version are empty"),
        (
            "named",
            "e\u0301\u202e\n",
            "x" * 4096,
            "lib isn't for JSON documents, and version is of 4096 bytes",
        ),
    ):
        made.accept(
            f"loader-{slug}",
            _plan(base | {"lib": lib, "version": version}),
            "CUR-022 LIM-002",
            says,
            why="who saves somebody else's state doesn't choose its names",
        )


def _valid_values(made: Page) -> None:
    """Add accepted leaves and streams."""
    streams = Plan(
        tensors=[Tensor(name="w", dtype="int8", shape=(2,))],
        streams=[
            Stream(name="python", kind="python.mt19937", state=["t", 3, ["t", 1, 2], None]),
            Stream(
                name="numpy",
                kind="numpy.PCG64",
                state=["d", "state", ["d", "state", ["i", (2**100).to_bytes(13, "little")]]],
            ),
            Stream(
                name="torch",
                kind="torch.philox",
                state=["a", "uint8", [2], b"\1\2"],
                scope="global",
            ),
            Stream(name="theirs", kind="xorshift.unknown", state=["l", ["f", bytes(8)]]),
            Stream(
                name="theirs", kind="xorshift.unknown", state=["l", ["f", bytes(8)]], scope="lw/1"
            ),
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
        tensors=[
            Tensor(name="extra/ema/w", field="optimizer", shape=(2,)),
            Tensor(name="w", shape=(2,)),
        ],
        leaves=[
            Leaf(
                field="optimizer", name="extra/ema", value=["d", "w", ["T", "extra/ema/w", "torch"]]
            ),
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


def _put(base: dict[str, Any], path: str, value: Any) -> Any:
    """Return an edit that sets another value in a checkpoint's cursor."""

    def edit(c: Checkpoint) -> None:
        changed = copy.deepcopy(base)
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


def _cursors(made: Page) -> None:
    """Add refused cursors."""
    why = (
        "an order or a position that is read otherwise repeats some samples and skips others,"
        " and nothing else shows it"
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
        ("tail", "CUR-003", "FEATURE_UNSUPPORTED", "plan/tail", "wrap"),
        ("order", "CUR-003", "FEATURE_UNSUPPORTED", "order/alg", "feistel-v2"),
        ("two-sources", "CUR-009", "CURSOR_FORM", "sources/1",
         {"id": "web", "fingerprint": None, "n": 3}),
        ("skips", "CUR-003", "FEATURE_UNSUPPORTED", "skips/0", {"scope": "token"}),
        ("mixture", "CUR-003", "FEATURE_UNSUPPORTED", "mixture", {"alg": "block-det-v2"}),
        ("foreign", "CUR-003", "FEATURE_UNSUPPORTED", "foreign", []),
        ("position", "CUR-004", "CURSOR_FORM", "commit/pos_in_epoch", 55),
        ("check-beyond", "CUR-004", "CURSOR_FORM", "order/vector_check/id", COUNT),
        ("ledger-count", "CUR-004", "CURSOR_FORM", "ledger/count", 255),
        ("ledger-digest", "CUR-002", "CURSOR_FORM", "ledger/set_digest", "xyz"),
    ):  # fmt: skip
        made.reject(
            f"cursor-{slug}",
            "cursor",
            _put(cursor(), path, value),
            clauses,
            error,
            f"{path} is {'missing' if value is None else value!r}",
            why=why,
            bug="WRONG_RUN",
            phase="validate",
        )
    _cursors_of_orders(made, why)


def _cursors_of_orders(made: Page, why: str) -> None:
    """Add refused cursors of mixtures, skips and tails."""
    bases = {
        "mixed": mixed(),
        "skips": skipping(),
        "drop": tailed("drop"),
        "pipeline": pipelined(cursor(), 40, {3, 7, 8, 9, 39}, {1, 2, 30}),
        "pipeline-skips": pipelined(skipping(), 29, {15, 16, 28}, {19}),
    }
    for slug, base, clauses, path, value in (
        ("same-name", "mixed", "CUR-009", "sources/1/id", "books"),
        ("positions", "mixed", "CUR-010", "sources/1/pos", 2),
        ("mixture-ledger-count", "mixed", "CUR-004", "ledger/count", 63),
        ("check-of-none", "mixed", "CUR-010", "order/vector_check/source", "web"),
        ("stage-within-block", "mixed", "CUR-011", "mixture/stages/1/from_pos", 36),
        ("counts", "mixed", "CUR-011", "mixture/stages/0/counts/code", 4),
        ("block-0", "mixed", "CUR-002", "mixture/block", 0),
        ("block-65537", "mixed", "CUR-002 LIM-001", "mixture/block", 65_537),
        ("mixture-drops", "mixed", "CUR-015", "plan/tail", "drop"),
        ("batch-beyond-epoch", "drop", "CUR-015", "plan/global_batch", 11),
        ("skip-unknown-source", "skips", "CUR-017", "skips/0/source", "web"),
        ("skip-descends", "skips", "CUR-017", "skips/0/ids", [29, 3]),
        ("skip-beyond", "skips", "CUR-017", "skips/1/range", [10, 31]),
        ("skip-of-nothing", "skips", "CUR-017", "skips/3/range", [20, 20]),
        ("skip-of-all", "skips", "CUR-019", "skips/0/ids", list(range(30))),
        ("ledger-beyond", "skips", "CUR-021", "ledger/count", 49),
        ("open-odd", "pipeline", "PIP-001", "pipeline/open", [3, 4, 7]),
        ("open-unsorted", "pipeline", "PIP-001", "pipeline/open", [7, 10, 3, 4, 39, 40]),
        ("open-touching", "pipeline", "PIP-001", "pipeline/open", [3, 4, 7, 8, 8, 10, 39, 40]),
        ("open-negative", "pipeline", "PIP-001", "pipeline/open", [-1, 1, 7, 10]),
        ("open-beyond", "pipeline", "PIP-001", "pipeline/open", [3, 4, 7, 10, 40, 41]),
        ("open-as-text", "pipeline", "PIP-001", "pipeline/open", ["3", "4"]),
        ("open-forgotten", "pipeline", "PIP-002", "pipeline/open", [7, 10, 39, 40]),
        ("discarded-forgotten", "pipeline", "PIP-002", "pipeline/discarded/count", 2),
        ("discarded-beyond", "pipeline-skips", "PIP-002", "pipeline/discarded/count", 27),
        ("pipeline-counts-all", "pipeline", "PIP-002", "ledger/count", 40),
        ("pipeline-and-more", "pipeline", "CUR-002", "pipeline/world_size", 8),
    ):
        made.reject(
            f"cursor-{slug}",
            f"cursor-{base}",
            _put(bases[base], path, value),
            clauses,
            "CURSOR_FORM",
            f"{path} is {value!r}" if slug != "skip-of-all" else f"{path} is every sample",
            why=why,
            bug="WRONG_RUN",
            phase="validate",
        )
