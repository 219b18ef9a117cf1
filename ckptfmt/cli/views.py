"""Views of a checkpoint's tensors and plain values: rows of like tensors; JSON or indented lines.

The JSON view has JSON's own values where they suffice. Every other value is an object with a single
member, with a name that begins with $:

    None, bool, str; list, tuple, deque     null, true, "text"; array
    int                                     number up to 2^53-1 in size, else {"$int": "0x..."}
    float                                   number (its shortest decimal),
                                            else {"$float": "nan" | "inf" | "-inf"}
    dict, OrderedDict, Counter              object if all keys are strings without a leading $,
                                            else {"$map": [[key, value], ...]}; in the saved order
    set, frozenset                          {"$set": [...]}
    complex                                 {"$complex": [real, imaginary]}
    bytes                                   {"$bytes": "<hex>"}
    small array, numpy scalar               {"$array": {"dtype", "shape", "hex"}}
    tensor by name                          {"$tensor": name}
    dtype, device, torch.Size               {"$dtype": name}, {"$device": name}, {"$size": [...]}

The view is meant for display, not for loading: tuples and lists look alike, and the payload of a
NaN is lost.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import numpy as np

from ckptfmt import limits
from ckptfmt.cli.console import bytes_text, clean, shorten
from ckptfmt.documents.index import IndexTensor
from ckptfmt.documents.sharding import Sharding
from ckptfmt.documents.tree import DeviceName, DtypeName, InlineArray, Size, TensorRef
from ckptfmt.errors import CkptError

#: The most bits of an integer printed in decimal; the conversion takes quadratic time.
_DECIMAL_BITS: Final = 4096
_TEXT_WIDTH: Final = 72
#: The greatest length of a value on a line, in characters.
_SHOWN: Final = 4 * _TEXT_WIDTH
#: The types of values that may take several lines.
_LINED: Final = (dict, list, tuple, deque)
#: The greatest number of shown elements; larger arrays are shown by dtype and shape only.
_ARRAY_ELEMENTS: Final = 8


def dump_view(value: Any) -> Any:  # noqa: PLR0911
    """Return the JSON view of a plain value, in the forms of the module's docstring.

    >>> dump_view({"lr": (0.5, float("nan")), "seed": 1 << 64})
    {'lr': [0.5, {'$float': 'nan'}], 'seed': {'$int': '0x10000000000000000'}}
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return value if abs(value) <= limits.JSON_INTEGER else {"$int": hex(value)}
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, complex):
        return {"$complex": [dump_view(value.real), dump_view(value.imag)]}
    if isinstance(value, bytes):
        return {"$bytes": value.hex()}
    if isinstance(value, list | tuple | deque):
        return [dump_view(item) for item in value]
    if isinstance(value, set | frozenset):
        return {"$set": [dump_view(item) for item in sorted(value, key=_text)]}
    if isinstance(value, dict):
        return _dump_map(value)
    return _dump_named(value)


def _dump_map(value: dict[Any, Any]) -> dict[str, Any]:
    if all(isinstance(key, str) and not key.startswith("$") for key in value):
        return {key: dump_view(item) for key, item in value.items()}
    return {"$map": [[dump_view(key), dump_view(item)] for key, item in value.items()]}


def _dump_named(value: object) -> dict[str, Any]:
    if isinstance(value, InlineArray):
        return {
            "$array": {"dtype": value.dtype, "shape": list(value.shape), "hex": value.content.hex()}
        }
    if isinstance(value, TensorRef):
        return {"$tensor": value.name}
    if isinstance(value, DtypeName):
        return {"$dtype": value.name}
    if isinstance(value, DeviceName):
        return {"$device": value.name}
    if isinstance(value, Size):
        return {"$size": list(value.shape)}
    raise TypeError(type(value).__name__)  # `parse_tree` returns no further types


def iter_lines(value: object, depth: int = 0) -> Iterator[tuple[int, str, str]]:
    """Yield a value as lines of (depth, key, text); the keys of a map are padded to equal width.

    >>> list(iter_lines({"lr": 0.1, "model": {"width": 4}}))
    [(0, 'lr   ', '0.1'), (0, 'model', ''), (1, 'width', '4')]
    """
    pairs = _pairs(value)
    if not pairs:
        yield depth, "", _text(value)
        return
    keys = [clean(key) if isinstance(key, str) else _text(key) for key, _ in pairs]
    width = min(max(map(len, keys)), 28)
    for key, (_, item) in zip(keys, pairs, strict=True):
        text = _text(item)
        if (
            isinstance(item, _LINED)
            and item
            and (isinstance(item, dict) or len(text) > _TEXT_WIDTH)
        ):
            yield depth, key, ""
            yield from iter_lines(item, depth + 1)
        else:
            yield depth, key.ljust(width), shorten(text, _SHOWN)


def value_text(value: object) -> str:
    """Return a value as a short line.

    >>> value_text({"lr": 0.5})
    '{"lr": 0.5}'
    """
    return shorten(_text(value), _TEXT_WIDTH)


def _pairs(value: object) -> list[tuple[Any, Any]]:
    """Return the members of a container of a type in `_LINED`; [] for any other value."""
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, list | tuple | deque):
        return list(enumerate(value))
    return []


def _text(value: Any) -> str:  # noqa: PLR0911
    """Return a value as a line."""
    if isinstance(value, str):
        return f'"{clean(value)}"'
    if isinstance(value, int) and value.bit_length() > _DECIMAL_BITS:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, bytes):
        return f"{bytes_text(len(value))} of bytes" if len(value) > 16 else f"bytes {value.hex()}"
    if isinstance(value, tuple):
        return f"({_join(map(_text, value))}{',' * (len(value) == 1)})"
    if isinstance(value, list | deque):
        return f"[{_join(map(_text, value))}]"
    if isinstance(value, set | frozenset):
        return f"{{{_join(sorted(map(_text, value)))}}}" if value else "set()"
    if isinstance(value, dict):
        return f"{{{_join(f'{_text(key)}: {_text(item)}' for key, item in value.items())}}}"
    return _named_text(value)


def _join(texts: Iterable[str]) -> str:
    """Return texts joined by commas, up to the length of a line; later texts aren't computed."""
    shown: list[str] = []
    length = 0
    for text in texts:
        if length > _SHOWN:
            shown.append("...")
            break
        shown.append(text)
        length += len(text)
    return ", ".join(shown)


def _named_text(value: object) -> str:
    if isinstance(value, InlineArray):
        return _array_text(value)
    if isinstance(value, TensorRef):
        return f"tensor {clean(value.name)}"
    if isinstance(value, DtypeName | DeviceName):
        return clean(value.name)
    if isinstance(value, Size):
        return f"Size{list(value.shape)}"
    return repr(value)


def _array_text(value: InlineArray) -> str:
    """Return dtype and shape of an array, and its elements if few."""
    import numpy as np

    from ckptfmt.dtypes import numpy_dtype

    text = value.dtype if value.scalar else f"{value.dtype}{list(value.shape)}"
    if math.prod(value.shape) > _ARRAY_ELEMENTS:
        return text
    try:
        elements = np.frombuffer(value.content, numpy_dtype(value.dtype))
    except CkptError:  # a dtype unknown to numpy
        return f"{text} {value.content.hex()}"
    return f"{text} {', '.join(map(str, elements))}"


#: A numeric component of a name, such as the 0 in ``layers.0.weight`` and in ``lw/0``.
_NUMBER: Final = re.compile(r"(?:(?<=[./])|^)[0-9]+(?=[./]|$)")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TensorRow:
    """A tensor, or several tensors that differ only in the numbers of their names.

    Attributes:
        name: the common name, with ``{first..last}`` or ``*`` for differing numbers.
        scope: the common scope, in the same form.
        tensors: the tensors.
        cut: the sharding of each tensor, as a text of `sharding_text`.
    """

    name: str
    scope: str
    tensors: tuple[IndexTensor, ...]
    cut: str

    @property
    def nbytes(self) -> int:
        """The size of all tensors in bytes."""
        return sum(tensor.nbytes for tensor in self.tensors)


def list_tensors(tensors: Iterable[IndexTensor]) -> list[TensorRow]:
    """Return a row for each tensor."""
    cuts: dict[Sharding, str] = {}
    return [
        TensorRow(name=one.name, scope=one.scope, tensors=(one,), cut=_cut_of(one, cuts))
        for one in tensors
    ]


def group_tensors(tensors: Iterable[IndexTensor]) -> list[TensorRow]:
    """Return rows of like tensors, in the order of the index.

    Like tensors have equal field, dtype, shape, storage and sharding, all or none have aliases, and
    their names differ only in numbers.
    """
    groups: dict[tuple[object, ...], list[IndexTensor]] = {}
    cuts: dict[Sharding, str] = {}
    for tensor in tensors:
        key = (
            tensor.field,
            *(tuple(_NUMBER.split(text)) for text in (tensor.name, tensor.scope)),
            tensor.dtype,
            tensor.global_shape,
            tensor.storage,
            _cut_of(tensor, cuts),
            bool(tensor.aliases),
        )
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
    """Return the text on a tensor's sharding, computed once for all tensors with this sharding."""
    if tensor.sharding not in cuts:
        cuts[tensor.sharding] = sharding_text(tensor.sharding)
    return cuts[tensor.sharding]


def common_name(names: Sequence[str]) -> str:
    """Return a common name for names that differ only in numbers.

    >>> (common_name(["layers.0.w1", "layers.1.w1"]), common_name(["a.0", "a.2"]),
    ...  common_name(["a.7"]))
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
    """Return a text on the boxes of a sharding; "" for an undivided tensor."""
    if len(sharding) < 2:
        return "" if sharding else "no elements"
    largest, is_one = _largest_shape(sharding)
    writers = len(np.unique(sharding.part))
    size = f"of {largest}" if is_one else f"up to {largest}"
    return f"{len(sharding)} boxes {size} from {writers} writer{'s' * (writers > 1)}"


def _largest_shape(sharding: Sharding) -> tuple[list[int], bool]:
    """Return the largest box shape, by the sum of its extents, and whether all boxes have it."""
    if sharding.extents is not None:
        bounds = [(int(extents.max()), int(extents.min())) for extents in sharding.extents]
        return [most for most, _ in bounds], all(most == least for most, least in bounds)
    shapes = np.unique(sharding.box_shape, axis=0).tolist()
    return max(shapes, key=lambda shape: (sum(shape), shape)), len(shapes) == 1
