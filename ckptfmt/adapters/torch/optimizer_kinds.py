"""Classify torch optimizers: plain, wrapped, or with their own protocol; list their parameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch

#: Attributes with torch's hooks on state_dict and load_state_dict. Unpickled optimizers lack them.
_HOOKS: Final = tuple(
    f"_optimizer_{verb}_{order}_hooks"
    for verb in ("state_dict", "load_state_dict")
    for order in ("pre", "post")
)


def iter_parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yield the parameters of all groups of an optimizer."""
    for group in optimizer.param_groups:
        yield from group["params"]


def is_plain_optimizer(value: object) -> bool:
    """Return whether `state` and `param_groups` hold the complete state of an optimizer.

    An optimizer with its own state_dict or load_state_dict, or with hooks on them, is saved through
    these methods instead.
    """
    if not isinstance(value, torch.optim.Optimizer):
        return False
    own = type(value).state_dict is not torch.optim.Optimizer.state_dict
    own = own or type(value).load_state_dict is not torch.optim.Optimizer.load_state_dict
    return not own and not any(getattr(value, hooks, None) for hooks in _HOOKS)


def unwrap_optimizer(value: Any) -> Any:
    """Return the optimizer inside a wrapper, or the value itself if the value is no wrapper.

    Accelerate and torchft have such wrappers. A wrapper holds an optimizer in an attribute, exposes
    the optimizer's groups and state as its own, and adds no entries to the state_dict. The
    wrapper's own state_dict would number the parameters, which have names. The test looks at
    behaviour instead of types. Thus all frameworks' wrappers are recognized, also wrappers that are
    created at run time, as in Fabric.
    """
    if isinstance(value, torch.nn.Module | type):
        return value
    for inner in list(getattr(value, "__dict__", {}).values()):
        if (
            isinstance(inner, torch.optim.Optimizer)
            and inner is not value
            and _is_shown_by(value, inner)
        ):
            return unwrap_optimizer(inner)
    return value


def is_numbered(value: Any) -> bool:
    """Return whether a state_dict numbers parameters.

    The question applies to optimizers with their own protocol.
    """
    if not isinstance(getattr(value, "param_groups", None), list):
        return False
    state_dict = value.state_dict()
    groups = state_dict.get("param_groups") if isinstance(state_dict, dict) else None
    members = (
        [group.get("params") for group in groups if isinstance(group, dict)]
        if isinstance(groups, list)
        else []
    )
    return any(isinstance(one, int) for some in members if isinstance(some, list) for one in some)


def _is_shown_by(wrapper: Any, inner: torch.optim.Optimizer) -> bool:
    same = all(
        getattr(wrapper, name, None) is getattr(inner, name) for name in ("param_groups", "state")
    )
    return same and _adds_nothing(wrapper, inner)


def _adds_nothing(wrapper: Any, inner: torch.optim.Optimizer) -> bool:
    """Return whether a wrapper's state_dict has the same entries and state as the optimizer's."""
    if not callable(getattr(wrapper, "state_dict", None)):
        return False
    own = wrapper.state_dict()
    held = inner.state_dict()
    if (
        not isinstance(own, dict)
        or own.keys() != held.keys()
        or held.keys() != {"state", "param_groups"}
    ):
        return False
    own_state = own["state"]
    held_state = held["state"]
    return own_state.keys() == held_state.keys() and all(
        own_state[key] is held_state[key] for key in held_state
    )
