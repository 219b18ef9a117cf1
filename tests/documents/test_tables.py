"""What index and parts have in common."""

import pytest

from ckptfmt.documents.tables import block_count, sort_key


def test_rows_are_sorted_by_the_bytes_of_names():
    """REQ-IDX-003: fields by number, names and scopes by their UTF-8 bytes."""
    keys = [
        ("weights", "", "global"),
        ("weights", "Z", "lw/0"),
        ("weights", "a", "global"),
        ("weights", "a", "lw/0"),
        ("weights", "a", "lw/10"),
        ("weights", "a", "lw/2"),
        ("weights", "é", "global"),
        ("weights", "\uffee", "global"),
        ("weights", "\U0001f600", "global"),
        ("optimizer", "", "global"),
        ("rng", "", "global"),
        ("data", "", "global"),
        ("config", "", "global"),
        ("topology", "", "global"),
        ("provenance", "", "global"),
    ]
    assert sorted(set(keys), key=sort_key) == keys


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 4097, 8192, 2**60])
def test_blocks_cover_their_bytes(nbytes):
    """REQ-TEN-005."""
    count = block_count(nbytes, 4096)
    assert count * 4096 >= nbytes > (count - 1) * 4096 or nbytes == count == 0
