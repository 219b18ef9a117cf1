"""Plain values of a checkpoint: as JSON for programs, as indented lines for eyes.

The JSON view says what JSON can say plainly; every other value is an object with one member whose name begins with $:

    None, bool, str; list, tuple, deque     null, true, "text"; array
    int                                     number up to 2^53-1 in size, else {"$int": "0x..."}
    float                                   number (its shortest decimal), else {"$float": "nan" | "inf" | "-inf"}
    dict, OrderedDict, Counter              object if all keys are strings without a leading $,
                                            else {"$map": [[key, value], ...]}; in the saved order
    set, frozenset                          {"$set": [...]}
    complex                                 {"$complex": [real, imaginary]}
    bytes                                   {"$bytes": "<hex>"}
    small array, numpy scalar               {"$array": {"dtype", "shape", "hex"}}
    tensor by name                          {"$tensor": name}
    dtype, device, torch.Size               {"$dtype": name}, {"$device": name}, {"$size": [...]}

It is for looking, not for loading: tuples and lists look alike, and a NaN has lost its payload.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from ckptfmt import limits
from ckptfmt.cli.console import bytes_text, clean, shorten
from ckptfmt.documents.tree import DeviceName, DtypeName, InlineArray, Size, TensorRef
from ckptfmt.errors import CkptError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

#: Integers with more bits than this aren't printed in decimal, which takes quadratic time.
_DECIMAL_BITS: Final = 4096
_TEXT_WIDTH: Final = 72
#: How much of a value is shown on a line, in characters.
_SHOWN: Final = 4 * _TEXT_WIDTH
#: What may take several lines.
_LINED: Final = (dict, list, tuple, deque)
#: Arrays with more elements than this are shown by dtype and shape alone.
_ARRAY_ELEMENTS: Final = 8


def dump_view(value: Any) -> Any:  # noqa: ANN401, PLR0911 - any plain value; one line for each kind
    """Return the JSON view of a plain value.

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
        return {"$array": {"dtype": value.dtype, "shape": list(value.shape), "hex": value.content.hex()}}
    if isinstance(value, TensorRef):
        return {"$tensor": value.name}
    if isinstance(value, DtypeName):
        return {"$dtype": value.name}
    if isinstance(value, DeviceName):
        return {"$device": value.name}
    if isinstance(value, Size):
        return {"$size": list(value.shape)}
    raise TypeError(type(value).__name__)  # the set of kinds is closed: `parse_tree` returns no other


def iter_lines(value: object, depth: int = 0) -> Iterator[tuple[int, str, str]]:
    """Yield a value as lines of (depth, key, text); keys of one map are padded to one width.

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
        if isinstance(item, _LINED) and item and (isinstance(item, dict) or len(text) > _TEXT_WIDTH):
            yield depth, key, ""
            yield from iter_lines(item, depth + 1)
        else:
            yield depth, key.ljust(width), shorten(text, _SHOWN)


def _pairs(value: object) -> list[tuple[Any, Any]]:
    """Return the members of a container that may take several lines; nothing for any other value."""
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, list | tuple | deque):
        return list(enumerate(value))
    return []


def _text(value: Any) -> str:  # noqa: ANN401, PLR0911 - any plain value; one line for each kind
    """Return a value as one line."""
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
    """Return texts with commas between them, as far as a line shows them: of millions, a few are made."""
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
    """Return what kind of array it is, and its elements if they are few."""
    import numpy as np

    from ckptfmt.read.reader import numpy_dtype

    text = value.dtype if value.scalar else f"{value.dtype}{list(value.shape)}"
    if math.prod(value.shape) > _ARRAY_ELEMENTS:
        return text
    try:
        elements = np.frombuffer(value.content, numpy_dtype(value.dtype))
    except CkptError:  # numpy has no such dtype
        return f"{text} {value.content.hex()}"
    return f"{text} {', '.join(map(str, elements))}"
