"""The tensors of a checkpoint for eyes: like ones in one row, with what they are and how they are cut."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ckptfmt.documents.index import IndexTensor
    from ckptfmt.documents.sharding import Sharding

#: A component of a name that is a number, such as the 0 of ``layers.0.weight`` and of ``lw/0``.
_NUMBER: Final = re.compile(r"(?:(?<=[./])|^)[0-9]+(?=[./]|$)")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TensorRow:
    """One tensor, or several that differ only in the numbers of their names.

    Attributes:
        name: with ``{first..last}`` or ``*`` for numbers that differ.
        scope: in the same way.
        tensors: which they are.
        cut: how each of them is cut, as `sharding_text` says it.
    """

    name: str
    scope: str
    tensors: tuple[IndexTensor, ...]
    cut: str

    @property
    def nbytes(self) -> int:
        """Size of all of them in bytes."""
        return sum(tensor.nbytes for tensor in self.tensors)


def list_tensors(tensors: Iterable[IndexTensor]) -> list[TensorRow]:
    """Return a row for each tensor."""
    cuts: dict[Sharding, str] = {}
    return [TensorRow(name=one.name, scope=one.scope, tensors=(one,), cut=_cut_of(one, cuts)) for one in tensors]


def group_tensors(tensors: Iterable[IndexTensor]) -> list[TensorRow]:
    """Return rows of tensors that are alike in field, dtype, shape, storage and cut, in the order of the index."""
    groups: dict[tuple[object, ...], list[IndexTensor]] = {}
    cuts: dict[Sharding, str] = {}
    for tensor in tensors:
        key = (
            tensor.field, *(tuple(_NUMBER.split(text)) for text in (tensor.name, tensor.scope)), tensor.dtype,
            tensor.global_shape, tensor.storage, _cut_of(tensor, cuts), bool(tensor.aliases),
        )  # fmt: skip
        groups.setdefault(key, []).append(tensor)
    return [
        TensorRow(
            name=common_name([tensor.name for tensor in group]),
            scope=common_name([tensor.scope for tensor in group]),
            tensors=tuple(group),
            cut=_cut_of(group[0], cuts),
        )
        for group in groups.values()
    ]


def _cut_of(tensor: IndexTensor, cuts: dict[Sharding, str]) -> str:
    """Return how a tensor is cut, looked at once for all tensors that share a sharding."""
    if tensor.sharding not in cuts:
        cuts[tensor.sharding] = sharding_text(tensor.sharding)
    return cuts[tensor.sharding]


def common_name(names: Sequence[str]) -> str:
    """Return one name for names that differ only in numbers.

    >>> common_name(["layers.0.w1", "layers.1.w1"]), common_name(["a.0", "a.2"]), common_name(["a.7"])
    ('layers.{0..1}.w1', 'a.*', 'a.7')
    """
    if len(names) == 1:
        return names[0]
    columns = zip(*(_NUMBER.findall(name) for name in names), strict=True)
    texts = iter([_common_number(column) for column in columns])
    return _NUMBER.sub(lambda _: next(texts), names[0])


def _common_number(numbers: Sequence[str]) -> str:
    distinct = set(numbers)
    if len(distinct) == 1:
        return numbers[0]
    if any(len(number) > 18 for number in distinct):
        return "*"
    values = sorted(map(int, distinct))
    contiguous = values[-1] - values[0] + 1 == len(values) == len(distinct)
    return f"{{{values[0]}..{values[-1]}}}" if contiguous else "*"


def sharding_text(sharding: Sharding) -> str:
    """Return how a tensor is cut: nothing for one that is whole."""
    if len(sharding) < 2:
        return "" if sharding else "no elements"
    largest, is_one = _largest_shape(sharding)
    writers = len(np.unique(sharding.part))
    size = f"of {largest}" if is_one else f"up to {largest}"
    return f"{len(sharding)} boxes {size} from {writers} writer{'s' * (writers > 1)}"


def _largest_shape(sharding: Sharding) -> tuple[list[int], bool]:
    """Return the largest shape of a sharding's boxes, by the sum of its extents, and whether all have it."""
    if sharding.extents is not None:
        bounds = [(int(extents.max()), int(extents.min())) for extents in sharding.extents]
        return [most for most, _ in bounds], all(most == least for most, least in bounds)
    shapes = np.unique(sharding.box_shape, axis=0).tolist()
    return max(shapes, key=lambda shape: (sum(shape), shape)), len(shapes) == 1
