"""Which objects are torch's optimizers, plain or in a wrapper, and which go by a protocol of their own."""

from __future__ import annotations

from typing import Any, Final

import torch

#: Where torch keeps what changes a state_dict on its way; absent on optimizers that were unpickled.
_HOOKS: Final = tuple(
    f"_optimizer_{verb}_{order}_hooks" for verb in ("state_dict", "load_state_dict") for order in ("pre", "post")
)


def is_plain_optimizer(value: object) -> bool:
    """Tell whether all there is to an optimizer is in `state` and `param_groups`.

    One with its own state_dict or load_state_dict, or with hooks on them, goes by its own protocol instead.
    """
    if not isinstance(value, torch.optim.Optimizer):
        return False
    own = type(value).state_dict is not torch.optim.Optimizer.state_dict
    own = own or type(value).load_state_dict is not torch.optim.Optimizer.load_state_dict
    return not own and not any(getattr(value, hooks, None) for hooks in _HOOKS)


def unwrap_optimizer(value: Any) -> Any:  # noqa: ANN401 - anything
    """Return the optimizer that a wrapper stands for, such as accelerate's or torchft's; anything else as it is.

    A wrapper holds an optimizer in an attribute, shows that one's groups and state as its own, and has nothing else in
    its state_dict. Saved by its own protocol, its state would be numbered, where parameters have names. Going by what
    it does, and not by types, finds each framework's, and those that are made at run time, as Fabric's are.
    """
    if isinstance(value, torch.nn.Module | type):
        return value
    for inner in list(getattr(value, "__dict__", {}).values()):
        if isinstance(inner, torch.optim.Optimizer) and inner is not value and _is_shown_by(value, inner):
            return unwrap_optimizer(inner)
    return value


def is_numbered(value: Any) -> bool:  # noqa: ANN401 - has a state_dict
    """Tell whether a state_dict numbers parameters; asked of optimizers that go by a protocol of their own."""
    if not isinstance(getattr(value, "param_groups", None), list):
        return False
    state_dict = value.state_dict()
    groups = state_dict.get("param_groups") if isinstance(state_dict, dict) else None
    members = [group.get("params") for group in groups if isinstance(group, dict)] if isinstance(groups, list) else []
    return any(isinstance(one, int) for some in members if isinstance(some, list) for one in some)


def _is_shown_by(wrapper: Any, inner: torch.optim.Optimizer) -> bool:  # noqa: ANN401 - has perhaps groups and state
    same = all(getattr(wrapper, name, None) is getattr(inner, name) for name in ("param_groups", "state"))
    return same and _adds_nothing(wrapper, inner)


def _adds_nothing(wrapper: Any, inner: torch.optim.Optimizer) -> bool:  # noqa: ANN401 - has groups and state
    """Tell whether a wrapper's state_dict is that of its optimizer: the same entries, the same state."""
    if not callable(getattr(wrapper, "state_dict", None)):
        return False
    own, held = wrapper.state_dict(), inner.state_dict()
    if not isinstance(own, dict) or own.keys() != held.keys() or held.keys() != {"state", "param_groups"}:
        return False
    own_state, held_state = own["state"], held["state"]
    return own_state.keys() == held_state.keys() and all(own_state[key] is held_state[key] for key in held_state)
