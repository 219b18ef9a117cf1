"""Detect changing attributes that a state_dict of an unknown class leaves out.

Each class decides what its ``state_dict`` returns. A save records digests of the numbers, flags and
tensors in the object's attributes. After a load, the digests are compared with those of the loaded
object.
"""

from __future__ import annotations

import functools
import itertools
import time
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import numpy as np

from ckptfmt.adapters import torch_side
from ckptfmt.adapters.live import Kind, Unit
from ckptfmt.adapters.live_trees import attributes_of
from ckptfmt.digest import digest_bytes
from ckptfmt.state import place_of

#: Packages whose classes save their complete state.
_KNOWN: Final = (
    "torch",
    "torchdata",
    "datasets",
    "ckptfmt",
    "numpy",
    "jax",
    "accelerate",
    "transformers",
    "lightning",
    "lightning_fabric",
    "pytorch_lightning",
)
#: The package of an object around an optimizer without a state of its own.
_STATELESS_AROUND: Final = "torchft"
#: The attribute by which a class says that its state_dict is complete.
EXACT: Final = "ckptfmt_exact"
#: Limits of the traversal: depth, number of values, number of tensors. Objects at greater depth
#: rarely belong to the inspected object.
_DEPTH: Final = 3
_MOST: Final = 4096
_MOST_TENSORS: Final = 32
#: The number of elements sampled from each tensor.
_SAMPLE: Final = 16
#: A number within this distance of the current time, in seconds, is taken for a timestamp.
_CLOCK_S: Final = 10 * 365 * 86400.0
_FAR: Final = 2.0**53
_PLAIN: Final = (bool, int, float, complex, type(None), np.generic)
#: The digest of a value whose position can't be read, such as a generator.
_HIDDEN: Final = "hidden"


def is_known(value: object) -> bool:
    """Return whether the class of an object saves its complete state.

    Classes of well-known packages do, and classes that set `EXACT`.
    """
    kind = type(value)
    return kind.__module__.partition(".")[0] in _KNOWN or bool(getattr(value, EXACT, False))


def look_at(units: Iterable[Unit]) -> dict[str, dict[str, str]]:
    """Return digests of the attributes of each object of an unknown class.

    Returns: a mapping from each object's place to the digests by attribute path.
    """
    units = list(units)
    # Other objects of the State are saved separately.
    others = {id(unit.value) for unit in units}
    return {
        place: dict(_Look(others - {id(value)}).of(value))
        for place, value in _list_inspected(units)
        if not is_known(value)
    }


def _list_inspected(units: Iterable[Unit]) -> Iterator[tuple[str, object]]:
    """Yield the objects with a state_dict, the optimizers, and the objects around optimizers.

    A save contains no more of a Lookahead around an optimizer than the optimizer.

    Returns: pairs of the object's place and the object.
    """
    for unit in units:
        if unit.is_given and unit.kind in (Kind.STATEFUL, Kind.OPTIMIZER):
            place = place_of(unit.field, unit.name)
            yield place, unit.value
            package = type(unit.wrapper).__module__.partition(".")[0]
            if unit.wrapper is not None and package != _STATELESS_AROUND:
                yield f"{place} around the optimizer", unit.wrapper


def compare(units: Iterable[Unit], saved: object) -> list[str]:
    """Return a sentence for each loaded object whose attributes differ from the save.

    Args:
        units: the units of the State after the load.
        saved: the result of `look_at` at the save.
    """
    if not isinstance(saved, Mapping):
        return []
    units = list(units)
    kinds = {place: type(value).__qualname__ for place, value in _list_inspected(units)}
    found = []
    for place, now in look_at(units).items():
        before = saved.get(place)
        if not isinstance(before, Mapping):
            continue
        paths = [*before, *(path for path in now if path not in before)]
        differing = [
            path for path in paths if before.get(path) != now.get(path) or before[path] == _HIDDEN
        ]
        if differing:
            more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
            found.append(
                f"{place}: the state_dict of {kinds[place]} leaves out what changes: its"
                f" attribute {differing[0]}{more}"
                f" isn't as it was at the save; add it to state_dict, or set {EXACT} = True in"
                " the class if it decides"
                " no step"
            )
    return found


class _Look:
    """A traversal of the attributes of a single object."""

    def __init__(self, left_out: set[int]) -> None:
        self._seen = set(left_out)
        self._count = self._tensor_count = 0

    def of(self, value: object) -> Iterator[tuple[str, str]]:
        """Yield the path and the digest of each attribute."""
        side: Any = torch_side()
        is_optimizer = side is not None and side.is_optimizer(value)
        for name, part in list(attributes_of(value).items()):
            if not (is_optimizer and side.is_of_every_optimizer(name)):
                yield from self._look(part, name, 1)

    def _look(self, value: Any, path: str, depth: int) -> Iterator[tuple[str, str]]:
        self._count += 1
        if self._count > _MOST or depth > _DEPTH:
            return
        if isinstance(value, _PLAIN):
            text = _number_text(value)
            if text is not None:
                yield path, _digest(text)
            return
        if isinstance(value, str | bytes | type | types.ModuleType) or id(value) in self._seen:
            return
        self._seen.add(id(value))
        side: Any = torch_side()
        if isinstance(value, np.ndarray) or (side is not None and side.is_tensor(value)):
            self._tensor_count += 1
            if self._tensor_count <= _MOST_TENSORS:
                yield path, _digest(_tensor_text(value))
        elif isinstance(value, types.GeneratorType):
            yield path, _HIDDEN
        elif side is not None and (side.is_module(value) or side.is_optimizer(value)):
            return
        else:
            yield from self._parts(value, path, depth)

    def _parts(self, value: Any, path: str, depth: int) -> Iterator[tuple[str, str]]:
        if isinstance(value, Mapping):
            items: list[tuple[object, object]] = list(value.items())
        elif isinstance(value, list | tuple | set | frozenset) or type(value).__name__ == "deque":
            first = list(itertools.islice(value, _MOST))
            numbers = [_number_text(one) for one in first if isinstance(one, _PLAIN)]
            items = [(at, one) for at, one in enumerate(first) if not isinstance(one, _PLAIN)]
            is_set = isinstance(value, set | frozenset)
            yield (
                path,
                _digest(repr((len(value), sorted(map(str, numbers)) if is_set else numbers))),
            )
        elif isinstance(value, types.FunctionType | types.MethodType | functools.partial):
            items = []  # a callback's owner isn't part of the object
        elif type(value).__module__.partition(".")[0] in (
            "logging",
            "threading",
            "_thread",
            "pathlib",
            "torch",
        ):
            # Of torch's objects only schedulers count: the user doesn't save the contents of
            # others.
            side: Any = torch_side()
            is_schedule = side is not None and side.is_schedule(value)
            items = (
                [item for item in attributes_of(value).items() if item[0] != "optimizer"]
                if is_schedule
                else []
            )
        else:
            items = list(attributes_of(value).items())
        for at, (key, part) in enumerate(items):
            name = key if isinstance(key, str | int) else at
            yield from self._look(part, f"{path}.{name}", depth + 1)


def _number_text(value: Any) -> str | None:
    """Return a text of a number, equal for equal numbers; None for a timestamp.

    Timestamps differ in each process.
    """
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, bool | int) or (isinstance(value, float) and value.is_integer()):
        value = int(value)
    is_time = (
        isinstance(value, int | float) and abs(value) < _FAR and abs(value - time.time()) < _CLOCK_S
    )
    return None if is_time else value.hex() if isinstance(value, float) else repr(value)


def _tensor_text(value: Any) -> str:
    """Return the shape and a sample of the elements of a tensor or an array."""
    shape = tuple(value.shape)
    try:
        flat = value.detach().reshape(-1) if hasattr(value, "detach") else value.reshape(-1)
        stride = max(1, len(flat) // _SAMPLE)
        return repr((shape, flat[::stride][:_SAMPLE].tolist()))
    # the tensor's type doesn't support this access
    except (NotImplementedError, RuntimeError, TypeError):
        return repr(shape)


def _digest(text: str) -> str:
    return digest_bytes(text.encode())[:8].hex()
