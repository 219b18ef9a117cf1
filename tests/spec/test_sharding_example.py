"""The columns of the two tensors drawn on page 40 are those that a committer writes."""

import re

from ckptfmt.box import Box
from ckptfmt.documents.packed import parse_packed
from ckptfmt.documents.sharding import Sharding, sharding_columns
from tests.spec.pages import page

TENSORS = [
    [(Box((0, 0), (2, 6)), 0), (Box((2, 0), (2, 6)), 1)],
    [(Box((0, 0), (1, 3)), 0), (Box((1, 0), (1, 1)), 1), (Box((1, 1), (1, 2)), 0)],
]


def drawn():
    """The numbers behind the name of each column in the picture, without the explanation."""
    columns = sharding_columns([Sharding.of(boxes) for boxes in TENSORS], 2)
    (fence,) = (
        fence for fence in page("40-index-and-parts.md").fences if "box_shape  " in fence.content
    )
    found = {}
    for line in fence.content.splitlines():
        name, *numbers = re.split(
            r"[ ,]+", line.strip().partition("dimension")[0].partition("writers")[0].strip()
        )
        if name in columns:
            found[name] = [int(number) for number in numbers]
    return columns, found


def test_the_columns_of_the_picture_are_those_of_the_tensors():
    """REQ-IDX-012: signed columns hold s as 2s, or as -2s - 1 where s is negative."""
    columns, found = drawn()
    stored = {name: parse_packed(column, "page 40").tolist() for name, column in columns.items()}
    stored["begin"] = [-(n + 1) // 2 if n % 2 else n // 2 for n in stored["begin"]]

    assert found == stored
