"""The data cursor's one form."""

import copy
from typing import Any

import pytest

from ckptfmt.documents.cursor import dump_cursor, parse_cursor
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


def edited(pointer, value):
    tree = copy.deepcopy(VALID)
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


INNER = [f"{name}/{inner}" for name, value in VALID.items() if isinstance(value, dict) for inner in value]


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
        ("plan/tail", "drop"),
        ("order/alg", "feistel-v2"),
        ("ledger/alg", "other"),
        ("sources", [{}, {}]),
        ("skips", [{}]),
        ("mixture", {}),
        ("pipeline", []),
        ("foreign", []),
    ],
)
def test_what_a_later_reader_may_know_is_unsupported_not_malformed(pointer, value):
    with pytest.raises(CkptError) as raised:
        parse_cursor(edited(pointer, value))
    assert raised.value.code is Code.FEATURE_UNSUPPORTED
    assert raised.value.requirement == "REQ-CUR-003"


def test_another_version_is_refused_before_all_else():
    with pytest.raises(CkptError) as raised:
        parse_cursor({"kind": "ckptfmt.data_cursor", "v": 2, "else": 0})
    assert raised.value.code is Code.VERSION_UNSUPPORTED


@pytest.mark.parametrize("value", [None, [], "cursor", 7, {}, {"kind": "ckptfmt.data_cursor"}])
def test_what_is_no_cursor_is_refused(value):
    with pytest.raises(CkptError) as raised:
        parse_cursor(value)
    assert raised.value.code is Code.CURSOR_FORM
