"""The boxes of a thousand tensors on a thousand ranks: rows, grids, and irregular cuts."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import random
from collections.abc import Callable
from typing import Final

from ckptfmt.box import Box

#: The number of tensors per kind among 64. The kinds alternate, so that any 64 consecutive tensors
#: have these shares.
_SHARES: Final = {"rows, torch.chunk": 28, "rows, balanced": 28, "grid, uneven": 7, "irregular": 1}
_LAYER: Final = (
    "attention.wq",
    "attention.wk",
    "attention.wv",
    "attention.wo",
    "feed_forward.w1",
    "feed_forward.w2",
    "feed_forward.w3",
    "attention_norm",
    "ffn_norm",
)
_ROWS_EACH: Final = (256, 768)  # of a tensor cut in rows, per rank


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CutTensor:
    """A tensor with the boxes of all ranks.

    Attributes:
        boxes: the box of each rank, by number.
        grid: the ranks along rows and columns for a regular grid; else None.
    """

    name: str
    kind: str
    global_shape: tuple[int, int]
    boxes: tuple[Box, ...]
    grid: tuple[int, int] | None


def make_mixture(ranks: int, tensors: int) -> list[CutTensor]:
    """Return the tensors, equal at every call, with distinct shapes.

    A tensor grows with the number of ranks, so that the boxes stay as large.

    Args:
        ranks: a power of two.
    """
    kinds = _interleave()
    return [_make_tensor(number, kinds[number % len(kinds)], ranks) for number in range(tensors)]


def describe_mixture(mixture: list[CutTensor]) -> dict[str, object]:
    """Return the entry for a record."""
    return {
        "kinds": dict(collections.Counter(tensor.kind for tensor in mixture)),
        "grid": next((list(tensor.grid) for tensor in mixture if tensor.grid), None),
        "shapes": len({tensor.global_shape for tensor in mixture}),
        "boxes": sum(len(tensor.boxes) for tensor in mixture),
    }


def halve(tensor: CutTensor, rank: int) -> tuple[Box, ...]:
    """Return a rank's boxes with half as many ranks: rows are cut anew, other boxes are joined.

    In a grid, the joined neighbours are above each other. Irregular cuts have no half: such a rank
    needs two boxes.
    """
    if tensor.kind.startswith("rows"):
        return (split_rows(tensor, len(tensor.boxes) // 2)[rank],)
    if tensor.grid is None:
        return tensor.boxes[2 * rank : 2 * rank + 2]
    down, across = divmod(rank, tensor.grid[1])
    upper, lower = (tensor.boxes[(2 * down + half) * tensor.grid[1] + across] for half in (0, 1))
    return (Box(upper.begin, (upper.shape[0] + lower.shape[0], upper.shape[1])),)


def split_rows(tensor: CutTensor, ranks: int) -> list[Box]:
    """Return the boxes of all ranks for a cut in rows: by its own rule or by torch.chunk's."""
    split = _split_balanced if tensor.kind == "rows, balanced" else _split_chunk
    rows, columns = tensor.global_shape
    return [Box((begin, 0), (count, columns)) for begin, count in split(rows, ranks)]


def _interleave() -> list[str]:
    """Return 64 kinds, each distributed as evenly as its share allows."""
    places = [
        ((turn + 0.5) / share, kind) for kind, share in _SHARES.items() for turn in range(share)
    ]
    return [kind for _, kind in sorted(places)]


def _make_tensor(number: int, kind: str, ranks: int) -> CutTensor:
    chance = random.Random(number)
    layer, place = divmod(number, len(_LAYER))
    columns = 64 + number  # a distinct number, for distinct shapes
    grid = None
    if kind.startswith("rows"):
        each = chance.randrange(*_ROWS_EACH)
        uneven = chance.randrange(1, min(each, ranks))
        rows = ranks * each + (uneven if kind == "rows, balanced" else -uneven)
        split = _split_balanced if kind == "rows, balanced" else _split_chunk
        boxes = [Box((begin, 0), (count, columns)) for begin, count in split(rows, ranks)]
    else:
        grid = _grid_of(ranks)
        shape = (grid[0] * chance.randrange(*_ROWS_EACH), grid[1] * 256 + number)
        cut = _cut_grid if kind.startswith("grid") else _cut_irregular
        boxes = cut(shape, grid, chance)
        rows, columns = shape
        grid = grid if kind.startswith("grid") else None
    name = f"layers.{layer}.{_LAYER[place]}.weight"
    return CutTensor(
        name=name, kind=kind, global_shape=(rows, columns), boxes=tuple(boxes), grid=grid
    )


def _split_chunk(extent: int, ranks: int) -> list[tuple[int, int]]:
    """Cut as `torch.chunk` does: equal parts, and a remainder for the last."""
    each = -(-extent // ranks)
    return [
        (min(extent, rank * each), max(0, min(each, extent - rank * each))) for rank in range(ranks)
    ]


def _split_balanced(extent: int, ranks: int) -> list[tuple[int, int]]:
    """Cut into parts with sizes that differ by at most an element."""
    each, left = divmod(extent, ranks)
    return [(rank * each + min(rank, left), each + (rank < left)) for rank in range(ranks)]


def _grid_of(ranks: int) -> tuple[int, int]:
    across = 1 << (ranks.bit_length() - 1) // 2
    return ranks // across, across


def _cut_grid(shape: tuple[int, int], grid: tuple[int, int], chance: random.Random) -> list[Box]:
    """Cut both dimensions unevenly, each row of boxes at the same places."""
    down, across = (
        _cut_unevenly(extent, count, chance) for extent, count in zip(shape, grid, strict=True)
    )
    return [Box((row, column), (rows, columns)) for row, rows in down for column, columns in across]


def _cut_unevenly(extent: int, count: int, chance: random.Random) -> list[tuple[int, int]]:
    """Cut up to a third of a part away from the places of an even cut."""
    each = extent / count
    cuts = [
        0,
        *(round(each * (number + chance.uniform(-1 / 3, 1 / 3))) for number in range(1, count)),
        extent,
    ]
    return [(begin, end - begin) for begin, end in itertools.pairwise(cuts)]


def _cut_irregular(
    shape: tuple[int, int], grid: tuple[int, int], chance: random.Random
) -> list[Box]:
    """Cut from edge to edge, each half again at a separate place and in a separate direction."""
    boxes: list[Box] = []
    todo = [(Box.whole(shape), grid[0] * grid[1])]
    while todo:
        box, count = todo.pop()
        if count == 1:
            boxes.append(box)
            continue
        first = chance.randint(max(1, count * 2 // 5), max(1, count * 3 // 5))
        dim = int(box.shape[1] * chance.uniform(0.5, 2) > box.shape[0])
        at = min(box.shape[dim] - 1, max(1, round(box.shape[dim] * first / count)))
        todo += [
            (_part_of(box, dim, at, box.shape[dim]), count - first),
            (_part_of(box, dim, 0, at), first),
        ]
    return boxes


def _part_of(box: Box, dim: int, begin: int, end: int) -> Box:
    replace: Callable[[tuple[int, ...], int], tuple[int, ...]] = (  # noqa: E731
        lambda old, new: (
            *old[:dim],
            new,
            *old[dim + 1 :],
        )
    )
    return Box(replace(box.begin, box.begin[dim] + begin), replace(box.shape, end - begin))
