"""Find live objects outside a State with an influence on the State's training.

Such objects are helpers of an optimizer, such as schedulers and gradient scalers, and data loaders
with persistent worker processes. The search asks the garbage collector, which takes some tens of
milliseconds, so only the first saves of a run search.
"""

from __future__ import annotations

import gc
import types
from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch
from torch.optim.lr_scheduler import LRScheduler

from ckptfmt.adapters.live_trees import attributes_of
from ckptfmt.adapters.torch.loaders import find_followed, samplers_of
from ckptfmt.adapters.torch.optimizer_kinds import unwrap_optimizer
from ckptfmt.adapters.torch.step_watch import list_parts
from ckptfmt.state import State

#: Limits of the traversal of attributes: depth and number of objects.
_DEPTH: Final = 6
_MOST: Final = 20_000
#: Classes whose attributes aren't traversed.
_CLOSED: Final = (
    torch.nn.Module,
    torch.Tensor,
    type,
    types.ModuleType,
    types.FunctionType,
    str,
    bytes,
    int,
    float,
)
#: Types of referrers that aren't objects of the program.
_NO_INSTANCES: Final = (type, types.FrameType, types.CellType, types.ModuleType, types.FunctionType)
#: Classes that mark their holder as a container of the whole program, such as a trainer. Such a
#: holder isn't reported.
_WHOLE: Final = (torch.nn.Module, torch.utils.data.DataLoader, torch.utils.data.Dataset, State)


def list_unheld(values: list[object]) -> tuple[list[object], list[object]]:
    """Return live objects outside the State with an influence on the training, as two lists.

    The first list has schedulers and gradient scalers for the State's optimizers. The second list
    has data loaders with persistent worker processes, which draw their seed from the program's
    stream; a loader with a separate generator isn't listed.

    Args:
        values: the objects of the State.
    """
    own = [value for value in values if isinstance(value, torch.optim.Optimizer)]
    if not own:
        return [], []
    found = _holders_of(own, {id(values), id(own)})
    held = _reach(values)
    helpers = [one for one in found if id(one) not in held and _is_helper(one, own, held)]
    loaders = [one for one in found if _is_lasting_loader(one) and not _is_held(one, held)]
    return helpers, loaders


def list_unheld_parts(own: Iterable[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
    """Return the optimizers within a State's optimizers with a state that no save has.

    The base optimizer of SAM is such an optimizer: SAM has torch's state_dict, which leaves out the
    momenta. A class with a state_dict of its own decides what belongs to its state.

    Args:
        own: the optimizers of the State.
    """
    own = list(own)
    held = set(map(id, own))
    return [
        part
        for optimizer in own
        if type(optimizer).state_dict is torch.optim.Optimizer.state_dict
        for part in list_parts(optimizer)
        if id(part) not in held
        and part.state is not optimizer.state
        and not _tensor_ids(part.state) <= _tensor_ids(optimizer.state)
    ]


def _tensor_ids(tree: object) -> set[int]:
    """Return the ids of the tensors in a tree of mappings, lists and tuples."""
    if isinstance(tree, torch.Tensor):
        return {id(tree)}
    if isinstance(tree, Mapping):
        tree = list(tree.values())
    parts = tree if isinstance(tree, list | tuple) else ()
    return set().union(*map(_tensor_ids, parts))


def _is_lasting_loader(value: Any) -> bool:
    return (
        issubclass(type(value), torch.utils.data.DataLoader)
        and bool(getattr(value, "persistent_workers", False))
        and getattr(value, "generator", None) is None
    )


def _is_held(loader: Any, held: frozenset[int]) -> bool:
    """Return whether a State holds a loader, or one of its samplers."""
    return (
        id(loader) in held
        or find_followed(loader) is not None
        or any(id(sampler) in held for sampler in samplers_of(loader).values())
    )


def is_copied(value: Any, copies: Iterable[Mapping[Any, Any]]) -> bool:
    """Return whether any of some mappings equals the current result of an object's state_dict."""
    ask = getattr(type(value), "state_dict", None)
    copies = [copy for copy in copies if copy]
    if not copies or not callable(ask):
        return False
    state = value.state_dict()
    return any(_is_equal(copy, state) for copy in copies)


def _is_equal(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor) or isinstance(right, torch.Tensor):
        is_both = isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor)
        return is_both and (
            left is right or (left.device == right.device and torch.equal(left, right))
        )
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(_is_equal(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(_is_equal, left, right))
    return type(left) is type(right) and bool(left == right)


def describe(value: object) -> str:
    """Return the name of an object's class."""
    return type(value).__qualname__


def is_schedule(value: object) -> bool:
    """Return whether an object is a scheduler of torch."""
    return issubclass(type(value), LRScheduler)


def is_scaler(value: object) -> bool:
    """Return whether an object is a gradient scaler of torch."""
    return issubclass(type(value), torch.amp.GradScaler)


def _holders_of(own: list[torch.optim.Optimizer], ignored: set[int]) -> list[object]:
    """Return all gradient scalers and loaders, and the objects with an optimizer in an attribute.

    Args:
        own: the optimizers.
        ignored: ids of containers that hold the optimizers for this search.
    """
    groups = [one.param_groups for one in own]
    ignored = ignored | {id(groups)} | {id(attributes_of(one)) for one in own}
    kinds: list[type] = [torch.amp.GradScaler, torch.utils.data.DataLoader]
    for kind in kinds:
        kinds += kind.__subclasses__()
    # One search for all: each search visits all objects of the process.
    found = _referrers([*own, *groups, *kinds], ignored)
    wrappers = [
        holder
        for holder in found
        if issubclass(type(holder), torch.optim.Optimizer)
        and any(unwrap_optimizer(holder) is one for one in own)
    ]
    wrappers = [wrapper for wrapper in wrappers if not any(wrapper is one for one in own)]
    return found + (_referrers(wrappers, ignored | {id(found)}) if wrappers else [])


def _referrers(targets: list[Any], ignored: set[int]) -> list[object]:
    """Return the instances that hold any of these objects in an attribute.

    A list, tuple or dict in an attribute is searched too.
    """
    found: list[object] = []
    containers: list[object] = []
    wanted = {id(target) for target in targets if not isinstance(target, type)}
    for referrer in gc.get_referrers(*targets):
        if (
            id(referrer) in ignored
            or referrer is targets
            or issubclass(type(referrer), _NO_INSTANCES)
        ):
            continue
        if type(referrer) not in (dict, list, tuple):
            found.append(referrer)
        elif not (type(referrer) is dict and "__builtins__" in referrer):  # a module's namespace
            parts = referrer.values() if type(referrer) is dict else referrer
            is_of_optimizer = any(id(part) in wanted for part in parts)
            containers += [referrer] if is_of_optimizer else []
    # For some objects, the garbage collector reports the attribute dict instead of the object.
    inner = gc.get_referrers(*containers) if containers else []
    found += [
        one
        for one in inner
        if one is not containers
        and type(one) not in (dict, list, tuple)
        and not issubclass(type(one), _NO_INSTANCES)
    ]
    return list({id(one): one for one in found}.values())


def _is_helper(holder: Any, own: list[torch.optim.Optimizer], held: frozenset[int]) -> bool:
    """Return whether an object outside of the State has state that affects the next steps."""
    if is_scaler(holder):
        return bool(holder.is_enabled())
    kind = type(holder)
    if issubclass(kind, (torch.optim.Optimizer, *_CLOSED)) or not callable(
        getattr(kind, "step", None)
    ):
        return False
    attributes = list(attributes_of(holder).values())
    if issubclass(kind, LRScheduler):
        return _holds(attributes, own)
    optimizers = {id(one) for one in own} | {id(one.param_groups) for one in own}
    is_around = any(
        id(part) in held and id(part) not in optimizers
        for part in attributes
        if attributes_of(part)
    )
    is_whole = any(isinstance(part, _WHOLE) for part in attributes)
    counts = any(type(part) in (int, float) for part in attributes)
    return counts and not is_around and not is_whole and _holds(attributes, own)


def _holds(attributes: list[object], own: list[torch.optim.Optimizer]) -> bool:
    """Return whether any value is an optimizer, its groups, or a wrapper or container of it."""
    wanted = {id(one) for one in own} | {id(one.param_groups) for one in own}
    parts = list(attributes)
    parts += [one for part in attributes if isinstance(part, list | tuple) for one in part]
    parts += [one for part in attributes if type(part) is dict for one in part.values()]
    return any(
        id(part) in wanted
        or (isinstance(part, torch.optim.Optimizer) and id(unwrap_optimizer(part)) in wanted)
        for part in parts
    )


def _reach(values: Iterable[object]) -> frozenset[int]:
    """Return the ids of the objects that a State's objects hold, directly or indirectly.

    Attributes and containers are followed. The State's objects are included.
    """
    found: set[int] = set()
    stack = [(value, 0) for value in values]
    while stack and len(found) < _MOST:
        value, depth = stack.pop()
        if id(value) in found or (depth and isinstance(value, _CLOSED)):
            continue
        found.add(id(value))
        if depth == _DEPTH:
            continue
        if isinstance(value, dict):
            parts: Iterable[object] = list(value.values())
        elif isinstance(value, list | tuple | set | frozenset):
            parts = list(value)
        else:
            attributes = attributes_of(value)
            is_optimizer = isinstance(value, torch.optim.Optimizer)
            parts = [
                part
                for name, part in list(attributes.items())
                if not (is_optimizer and name == "state")
            ]
        stack += [(part, depth + 1) for part in parts]
    return frozenset(found)
