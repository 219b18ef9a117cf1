"""Another library's position: its one form. REQ-CUR-022."""

import pytest

from ckptfmt.data.cursor import dump_foreign, is_foreign, parse_foreign
from ckptfmt.documents.tree import dump_tree, parse_tree
from ckptfmt.errors import CkptError, Code

VALID = {
    "kind": "ckptfmt.foreign_loader",
    "v": 1,
    "lib": "torchdata",
    "version": "0.11.0",
    "per": "worker",
    "worker_count": 8,
    "state": {"_num_yielded": 3, "nested": [None, 0.5]},
}


def test_it_comes_back_as_it_was_through_a_tree_too():
    assert dump_foreign(parse_foreign(VALID)) == VALID
    assert parse_tree(dump_tree(VALID, where="data"), where="data") == VALID
    assert is_foreign(VALID)
    assert not is_foreign([VALID])
    assert not is_foreign({"kind": "ckptfmt.data_cursor"})


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"kind": "other"}, Code.CURSOR_FORM),
        ({"v": 2}, Code.VERSION_UNSUPPORTED),
        ({"v": True}, Code.CURSOR_FORM),
        ({"lib": None}, Code.CURSOR_FORM),
        ({"per": "host"}, Code.CURSOR_FORM),
        ({"worker_count": 0}, Code.CURSOR_FORM),
        ({"worker_count": 1_000_001}, Code.CURSOR_FORM),
        ({"elastic": False}, Code.CURSOR_FORM),
    ],
)
def test_an_edit_is_refused(change, code):
    with pytest.raises(CkptError) as raised:
        parse_foreign({**VALID, **change})
    assert (raised.value.code, raised.value.requirement) == (code, "REQ-CUR-022")


@pytest.mark.parametrize("name", VALID)
def test_no_member_may_be_left_out(name):
    with pytest.raises(CkptError) as raised:
        parse_foreign({key: value for key, value in VALID.items() if key != name})
    assert raised.value.code is Code.CURSOR_FORM


def test_the_position_of_torchs_loader_has_one_form():
    """REQ-EPO-001, REQ-EPO-002."""
    stream = {"name": "torch.cpu", "kind": "torch.mt19937", "state": b"x"}
    current = {
        "begin": [], "first": [stream], "redrawn": [], "ahead": None, "is_drawn": False,
        "seed": None, "digest": None,
    }  # fmt: skip
    sizes = {
        "samples": 4, "batch_size": None, "drop_last": False, "batch_count": 2, "sampler": "x.Y"
    }  # fmt: skip
    state = {
        "sizes": sizes, "epoch": 0, "batches": 1, "attributes": {}, "process_count": 0,
        "draws": False, "streams": [], "current": current, "seed": None,
    }  # fmt: skip
    valid = VALID | {"lib": "torch.utils.data", "state": state}
    assert dump_foreign(parse_foreign(valid)) == valid
    for changed in (
        state | {"epoch": -1},
        state | {"more": 1},
        state | {"process_count": 1},
        state | {"current": None},
        state | {"current": current | {"first": None}},
        state | {"current": current | {"redrawn": ["python"]}},
        state | {"current": current | {"first": [stream | {"state": "x"}]}},
        state | {"sizes": sizes | {"drop_last": 0}},
    ):
        with pytest.raises(CkptError) as raised:
            parse_foreign(valid | {"state": changed})
        assert raised.value.code == Code.CURSOR_FORM
