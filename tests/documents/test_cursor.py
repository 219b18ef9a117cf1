"""The data cursor's one form."""

import copy
from typing import Any

import pytest

from ckptfmt.data.cursor import dump_cursor, parse_cursor
from ckptfmt.documents.tree import dump_tree, parse_tree
from ckptfmt.errors import CkptError, Code

VALID: dict[str, Any] = {
    "kind": "ckptfmt.data_cursor",
    "v": 1,
    "plan": {"global_batch": 64, "unit": "sample", "assign": "contig-v1", "tail": "carry"},
    "commit": {"step": 12, "global_pos": 768, "epoch": 7, "pos_in_epoch": 68},
    "order": {"seed": 2**64 - 1, "vector_check": {"pos": 768, "id": 99}, "alg": "feistel-v1"},
    "sources": [{"id": "books", "fingerprint": None, "n": 100}],
    "ledger": {"count": 768, "set_digest": "0f" * 32, "alg": "mix64-add4-v1"},
    "skips": [],
}


def edited(pointer, value, base=VALID):
    tree = copy.deepcopy(base)
    *path, last = pointer.split("/")
    inner: Any = tree
    for name in path:
        inner = inner[int(name)] if isinstance(inner, list) else inner[name]
    if value is ...:
        del inner[last]
    else:
        inner[last] = value
    return tree


def test_a_valid_cursor_comes_back_as_it_was_through_a_tree_too():
    assert dump_cursor(parse_cursor(VALID)) == VALID
    assert list(dump_cursor(parse_cursor(VALID))) == list(VALID)
    assert parse_tree(dump_tree(VALID, where="data"), where="data") == VALID


def test_a_fingerprint_may_be_given():
    tree = edited("sources", [{"id": "books", "fingerprint": "blake3:00", "n": 100}])
    assert parse_cursor(tree).sources[0].fingerprint == "blake3:00"


INNER = [
    f"{name}/{inner}" for name, value in VALID.items() if isinstance(value, dict) for inner in value
]


@pytest.mark.parametrize("pointer", [*VALID, *INNER])
def test_no_member_may_be_left_out(pointer):
    with pytest.raises(CkptError) as raised:
        parse_cursor(edited(pointer, ...))
    assert raised.value.code is Code.CURSOR_FORM


@pytest.mark.parametrize(
    "pointer", ["rank", "world_size", "plan/workers", "commit/host", "order/rounds", "ledger/chain"]
)
def test_no_member_may_be_added(pointer):
    with pytest.raises(CkptError) as raised:
        parse_cursor(edited(pointer, 0))
    assert raised.value.code is Code.CURSOR_FORM
    assert raised.value.requirement == "REQ-CUR-002"


@pytest.mark.parametrize(
    ("pointer", "value", "requirement"),
    [
        ("kind", "cursor", "REQ-CUR-001"),
        ("v", True, "REQ-CUR-002"),
        ("v", "1", "REQ-CUR-002"),
        ("plan", [], "REQ-CUR-002"),
        ("plan/global_batch", 0, "REQ-CUR-002"),
        ("plan/global_batch", 64.0, "REQ-CUR-002"),
        ("plan/unit", 1, "REQ-CUR-002"),
        ("commit/step", -1, "REQ-CUR-002"),
        ("commit/step", True, "REQ-CUR-002"),
        ("commit/step", "12", "REQ-CUR-002"),
        ("commit/pos_in_epoch", 67, "REQ-CUR-004"),
        ("commit/epoch", 6, "REQ-CUR-004"),
        ("order/seed", 1 << 64, "REQ-CUR-002"),
        ("order/seed", -1, "REQ-CUR-002"),
        ("order/vector_check/id", 100, "REQ-CUR-004"),
        ("order/vector_check/pos", None, "REQ-CUR-002"),
        ("sources", [], "REQ-CUR-002"),
        ("sources", ({"id": "books", "fingerprint": None, "n": 100},), "REQ-CUR-002"),
        ("sources/0/n", 0, "REQ-CUR-002"),
        ("sources/0/n", (1 << 48) + 1, "REQ-CUR-002"),
        ("sources/0/fingerprint", 7, "REQ-CUR-002"),
        ("sources/0/id", "x" * 4097, "REQ-CUR-002"),
        ("skips", {}, "REQ-CUR-002"),
        ("ledger/count", 767, "REQ-CUR-004"),
        ("ledger/set_digest", "0F" * 32, "REQ-CUR-002"),
        ("ledger/set_digest", "0f" * 32 + "\n", "REQ-CUR-002"),
        ("ledger/set_digest", "0f" * 31, "REQ-CUR-002"),
    ],
)
def test_an_edit_is_refused_by_its_requirement_and_place(pointer, value, requirement):
    tree = edited(pointer, value)
    with pytest.raises(CkptError) as raised:
        parse_cursor(tree, where="data#")
    assert raised.value.code is Code.CURSOR_FORM
    assert raised.value.requirement == requirement
    assert raised.value.where is not None
    assert raised.value.where.startswith(f"data#/{pointer.split('/')[0]}")


@pytest.mark.parametrize(
    ("pointer", "value"),
    [
        ("plan/unit", "token"),
        ("plan/assign", "stride-v1"),
        ("plan/tail", "wrap"),
        ("order/alg", "feistel-v2"),
        ("ledger/alg", "other"),
        ("skips", [{"scope": "token"}]),
        ("skips", [{"scope": "pos", "policy": "twice", "reason": "", "range": [0, 1]}]),
        ("mixture", {"alg": "block-det-v2"}),
        ("foreign", []),
    ],
)
def test_what_a_later_reader_may_know_is_unsupported_not_malformed(pointer, value):
    with pytest.raises(CkptError) as raised:
        parse_cursor(edited(pointer, value))
    assert raised.value.code is Code.FEATURE_UNSUPPORTED
    assert raised.value.requirement == "REQ-CUR-003"


MIXED: dict[str, Any] = {
    **VALID,
    "commit": {"step": 12, "global_pos": 768},
    "order": {
        "seed": 7,
        "vector_check": {"pos": 768, "id": 49, "source": "code"},
        "alg": "feistel-v1",
    },
    "sources": [
        {"id": "books", "fingerprint": None, "n": 100, "pos": 500},
        {"id": "code", "fingerprint": "blake3:00", "n": 50, "pos": 268},
    ],
    "mixture": {
        "alg": "block-det-v1",
        "block": 8,
        "seed": 7,
        "stages": [
            {"from_pos": 0, "counts": {"books": 5, "code": 3}},
            {"from_pos": 512, "counts": {"books": 8, "code": 0}},
        ],
    },
}
SAMPLES = {
    "scope": "sample",
    "policy": "shift",
    "from_pos": 0,
    "reason": "nan",
    "source": "books",
    "ids": [3, 99],
}
SHARD = {
    "scope": "shard", "policy": "mask", "from_pos": 9, "reason": "", "source": "books", "shard": "7", "range": [0, 100],
}  # fmt: skip
POSITIONS = {"scope": "pos", "policy": "hole", "reason": "", "range": [5, 9]}
SKIPPING: dict[str, Any] = {**VALID, "skips": [SAMPLES, SHARD, POSITIONS]}


@pytest.mark.parametrize("tree", [MIXED, SKIPPING, {**MIXED, "skips": [SAMPLES, SHARD, POSITIONS]}])
def test_mixtures_and_skips_come_back_as_they_were(tree):
    assert dump_cursor(parse_cursor(tree)) == tree
    assert parse_tree(dump_tree(tree, where="data"), where="data") == tree


PIPELINE: dict[str, Any] = {
    **VALID,
    "ledger": {**VALID["ledger"], "count": 760},
    "pipeline": {
        "open": [5, 8, 700, 701],
        "discarded": {"alg": "mix64-add4-v1", "count": 4, "set_digest": "0f" * 32},
    },
}


@pytest.mark.parametrize("tree", [PIPELINE, {**PIPELINE, "skips": [POSITIONS]}])
def test_a_pipeline_comes_back_as_it_was(tree):
    assert dump_cursor(parse_cursor(tree)) == tree
    assert parse_tree(dump_tree(tree, where="data"), where="data") == tree


@pytest.mark.parametrize(
    ("pointer", "value", "requirement"),
    [
        ("pipeline", [], "REQ-CUR-002"),
        ("pipeline/open", ..., "REQ-CUR-002"),
        ("pipeline/open", {}, "REQ-CUR-002"),
        ("pipeline/open", [5, 8, 700], "REQ-PIP-001"),
        ("pipeline/open", [5, 8, 8, 9], "REQ-PIP-001"),
        ("pipeline/open", [8, 5, 700, 701], "REQ-PIP-001"),
        ("pipeline/open", [False, 3, 700, 701], "REQ-PIP-001"),
        ("pipeline/open", [-1, 2, 700, 701], "REQ-PIP-001"),
        ("pipeline/open", [5, 8, 768, 769], "REQ-PIP-001"),
        ("pipeline/open", [0, (1 << 20) + 1], "REQ-PIP-001"),
        ("pipeline/open", [5, 8], "REQ-PIP-002"),
        ("pipeline/discarded/count", 5, "REQ-PIP-002"),
        ("pipeline/discarded/set_digest", "0", "REQ-CUR-002"),
        ("ledger/count", 768, "REQ-PIP-002"),
    ],
)
def test_an_edit_of_a_pipeline_is_refused(pointer, value, requirement):
    assert refusal(edited(pointer, value, PIPELINE)) == (Code.CURSOR_FORM, requirement)


def refusal(tree):
    with pytest.raises(CkptError) as raised:
        parse_cursor(tree)
    return raised.value.code, raised.value.requirement


@pytest.mark.parametrize(
    ("pointer", "value", "requirement"),
    [
        ("mixture", ..., "REQ-CUR-002"),
        ("mixture/seed", ..., "REQ-CUR-002"),
        ("mixture/block", 0, "REQ-CUR-002"),
        ("mixture/block", (1 << 16) + 1, "REQ-CUR-002"),
        ("mixture/stages", [], "REQ-CUR-011"),
        ("mixture/stages/0/from_pos", 8, "REQ-CUR-011"),
        ("mixture/stages/1/from_pos", 0, "REQ-CUR-011"),
        ("mixture/stages/1/from_pos", 513, "REQ-CUR-011"),
        ("mixture/stages/1/counts/code", 1, "REQ-CUR-011"),
        ("mixture/stages/1/counts/code", ..., "REQ-CUR-011"),
        ("mixture/stages/1/counts/web", 0, "REQ-CUR-011"),
        ("mixture/stages/1/counts/code", -1, "REQ-CUR-002"),
        ("commit/epoch", 0, "REQ-CUR-002"),
        ("commit/global_pos", 1 << 64, "REQ-CUR-002"),
        ("order/vector_check/source", ..., "REQ-CUR-002"),
        ("order/vector_check/source", "web", "REQ-CUR-010"),
        ("order/vector_check/id", 50, "REQ-CUR-010"),
        ("sources/1/pos", ..., "REQ-CUR-002"),
        ("sources/1/pos", 267, "REQ-CUR-010"),
        ("sources/1/id", "books", "REQ-CUR-009"),
        ("plan/tail", "pad_masked", "REQ-CUR-015"),
        ("ledger/count", 769, "REQ-CUR-004"),
    ],
)
def test_an_edit_of_a_mixture_is_refused(pointer, value, requirement):
    assert refusal(edited(pointer, value, MIXED)) == (Code.CURSOR_FORM, requirement)


@pytest.mark.parametrize(
    ("pointer", "value", "requirement"),
    [
        ("skips/0/ids", [], "REQ-CUR-017"),
        ("skips/0/ids", [3, 3], "REQ-CUR-017"),
        ("skips/0/ids", [3, 100], "REQ-CUR-017"),
        ("skips/0/ids", [True], "REQ-CUR-002"),
        ("skips/0/source", "code", "REQ-CUR-017"),
        ("skips/0/from_pos", -1, "REQ-CUR-002"),
        ("skips/0/range", [0, 1], "REQ-CUR-002"),
        ("skips/0/reason", None, "REQ-CUR-002"),
        ("skips/1/range", [0, 101], "REQ-CUR-017"),
        ("skips/1/range", [4, 4], "REQ-CUR-017"),
        ("skips/1/range", [0], "REQ-CUR-002"),
        ("skips/1/policy", "shift", "REQ-CUR-019"),
        ("skips/2/range", [9, 5], "REQ-CUR-017"),
        ("skips/2/from_pos", 5, "REQ-CUR-002"),
        ("skips", [[]], "REQ-CUR-002"),
        ("ledger/count", 769, "REQ-CUR-021"),
    ],
)
def test_an_edit_of_skips_is_refused(pointer, value, requirement):
    assert refusal(edited(pointer, value, SKIPPING)) == (Code.CURSOR_FORM, requirement)


def test_with_skips_or_padding_the_ledger_may_have_fewer_samples():
    """REQ-CUR-021."""
    assert parse_cursor(edited("ledger/count", 700, SKIPPING)).ledger.count == 700
    padded = {**VALID, "plan": {**VALID["plan"], "tail": "pad_masked"}}
    padded["commit"] = {"step": 12, "global_pos": 768, "epoch": 6, "pos_in_epoch": 0}
    assert parse_cursor({**padded, "ledger": {**VALID["ledger"], "count": 600}}).commit.epoch == 6
    assert refusal({**padded, "ledger": {**VALID["ledger"], "count": 769}}) == (
        Code.CURSOR_FORM,
        "REQ-CUR-021",
    )


def test_an_epoch_has_as_many_positions_as_the_tail_leaves_it():
    """REQ-CUR-004, REQ-CUR-015."""
    dropping = {**VALID, "plan": {**VALID["plan"], "tail": "drop"}}
    assert refusal(dropping) == (Code.CURSOR_FORM, "REQ-CUR-004")
    dropping["commit"] = {"step": 12, "global_pos": 768, "epoch": 12, "pos_in_epoch": 0}
    assert parse_cursor(dropping).plan.tail == "drop"
    assert refusal({**dropping, "sources": [{**VALID["sources"][0], "n": 63}]}) == (
        Code.CURSOR_FORM,
        "REQ-CUR-015",
    )


@pytest.mark.parametrize(
    "skip",
    [
        {**SAMPLES, "from_pos": 65},
        {**POSITIONS, "policy": "shift", "range": [64, 96]},
        {**POSITIONS, "policy": "shift", "range": [32, 64]},
        {**SHARD, "policy": "shift", "from_pos": 64, "range": [0, 37]},
    ],
)
def test_what_shifts_leaves_whole_steps_to_an_epoch(skip):
    """REQ-CUR-019."""
    dropping = {**VALID, "plan": {**VALID["plan"], "tail": "drop"}, "skips": [skip]}
    assert refusal(dropping) == (Code.CURSOR_FORM, "REQ-CUR-019")


def test_no_more_samples_are_removed_than_the_limit_says():
    """REQ-CUR-019."""
    source = {"id": "books", "fingerprint": None, "n": 1 << 30}
    skips = [{**SHARD, "policy": "shift", "range": [0, 1 << 20]}]
    base = {
        **VALID,
        "commit": {"step": 12, "global_pos": 768, "epoch": 0, "pos_in_epoch": 768},
        "sources": [source],
    }
    assert len(parse_cursor({**base, "skips": skips}).skips) == 1
    more = [*skips, {**SHARD, "policy": "shift", "range": [5, (1 << 20) + 1]}]
    assert refusal({**base, "skips": more}) == (Code.CURSOR_FORM, "REQ-CUR-019")


def test_another_version_is_refused_before_all_else():
    with pytest.raises(CkptError) as raised:
        parse_cursor({"kind": "ckptfmt.data_cursor", "v": 2, "else": 0})
    assert raised.value.code is Code.VERSION_UNSUPPORTED


@pytest.mark.parametrize("value", [None, [], "cursor", 7, {}, {"kind": "ckptfmt.data_cursor"}])
def test_what_is_no_cursor_is_refused(value):
    with pytest.raises(CkptError) as raised:
        parse_cursor(value)
    assert raised.value.code is Code.CURSOR_FORM
