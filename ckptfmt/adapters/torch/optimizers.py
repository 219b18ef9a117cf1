"""Save and restore optimizers by parameter names, without Optimizer.load_state_dict.

That method casts state to the parameter's dtype, and numbers parameters instead of naming them.
Options of parameter groups are restored by parameter names too, even if the parameters are grouped
differently.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import torch

from ckptfmt.adapters.live_trees import GLOBAL, Encoder, child_name, find_below
from ckptfmt.adapters.load_plan import MISSING, LoadPlan
from ckptfmt.adapters.numbering import group_name
from ckptfmt.adapters.placing import Placer, fill, refuses
from ckptfmt.adapters.torch.tensors import (
    DTYPE_NAMES,
    allocate,
    dtype_name,
    is_distributed,
    is_plain,
    is_registered,
    local_of,
    source_of,
)
from ckptfmt.documents.index import IndexTensor
from ckptfmt.documents.part import Leaf
from ckptfmt.documents.tables import TensorKey
from ckptfmt.documents.tree import TensorRef, dump_tree
from ckptfmt.errors import Code, err
from ckptfmt.state import place_of

_NOT_OPTIONS: Final = ("params", "param_names")
#: The option that distinguishes AdamW from Adam, whose options are otherwise the same.
_ALGORITHM: Final = "decoupled_weight_decay"
#: The option that a scheduler adds to a group, and the options that schedulers change.
_SCHEDULED_BY: Final = "initial_lr"
_SCHEDULED: Final = ("lr", "momentum", "betas")
#: The remedy for state of another algorithm.
_OTHER_KIND: Final = (
    "Build the optimizer that was saved; or let this one begin afresh: ckptfmt.load(...,"
    " only='weights:*'), or"
    " Checkpointer(..., init_from=...) in a new run."
)
#: Options that select another kernel, and thereby change bits.
_FLAGS: Final = ("foreach", "fused", "capturable", "maximize", "differentiable")


#: State of torch's optimizers with the parameter's shape.
_LIKE_PARAMETERS: Final = {
    "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg",
    "grad_avg", "acc_delta", "sum", "prev", "step_size",
}  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Saved:
    """A parameter group of the checkpoint."""

    name: str
    scope: str
    options: dict[str, Any]


def plan_groups(
    plan: LoadPlan,
    groups: Sequence[dict[str, Any]],
    names: Sequence[Sequence[tuple[str, ...]]],
    *,
    prefix: str,
    field: str,
    scope: str,
    defaults: Iterable[str] = (),
) -> list[dict[str, Any]]:
    """Plan to restore the saved options of each live group, and return the options as trees.

    A group keeps its live options unless all its parameters are selected.

    Args:
        plan: the load plan.
        groups: the live groups.
        names: for each group, all saved names of each parameter.
        prefix: the prefix of the leaves' names.
        field: the leaves' field.
        scope: the leaves' scope.
        defaults: the options of the live optimizer's class.

    Problems: GROUP_MISMATCH for a parameter without a saved group, for a live group that combines
        saved groups with different options, or for a group of another kind of optimizer;
        LEAF_MISSING for an option that wasn't saved.
    """
    by_parameter = _saved_groups(plan, prefix=prefix, field=field, scope=scope)
    chosen = []
    for index, (group, members) in enumerate(zip(groups, names, strict=True)):
        if not _is_chosen(plan, field, prefix, members):
            plan.left_count += 1
            left = (
                saved for names in members for name in names for saved in by_parameter.get(name, ())
            )
            plan.taken_leaves |= {(field, saved.name, saved.scope) for saved in left}
            chosen.append(group)
            continue
        keys: list[Iterable[str]] = [*members] or [[f"#{index}"]]
        where = place_of(field, f"{prefix}group/{next(iter(keys[0]))}")
        found = _groups_of(plan, by_parameter, keys, where)
        for saved in found:
            plan.taken_leaves.add((field, saved.name, saved.scope))
            Placer(plan, field=field, scope=saved.scope).take(saved.options)
        options = {**found[0].options} if found else {}
        if any(not _same_options(plan, field, found[0], other) for other in found[1:]):
            plan.problem(
                Code.GROUP_MISMATCH,
                where,
                "the group's parameters were saved with different options",
            )
        elif found and (apart := _tell_apart(group, found[0].options, defaults))[0]:
            plan.problem(Code.GROUP_MISMATCH, where, _of_another_kind(*apart), remedy=_OTHER_KIND)
        elif found:
            kept = {key for key in group if plan.only.is_overridden(field, f"{prefix}group/{key}")}
            _plan_options(plan, group, found[0], field, where, kept)
            options |= {key: group[key] for key in kept}
        chosen.append(options)
    return chosen


def _tell_apart(
    live: dict[str, Any], saved: dict[str, Any], defaults: Iterable[str]
) -> tuple[list[str], list[str]]:
    """Return the options by which a live and a saved group's algorithms differ.

    Algorithms differ if each has options that the other lacks, as Adam and SGD do. With
    ``allow=("missing",)`` such a group would get meaningless options and unused state.

    Args:
        live: the live group.
        saved: the saved options.
        defaults: the options of the live optimizer's class. Other options were added to its groups.

    Returns: live and saved options; two empty lists for equal algorithms.
    """
    said_nothing = (*_NOT_OPTIONS, *_FLAGS, _SCHEDULED_BY, _ALGORITHM)
    own = [key for key in live if key not in saved and key not in said_nothing and key in defaults]
    theirs = [key for key in saved if key not in live and key not in said_nothing]
    return (own, theirs) if own and theirs else ([], [])


def _of_another_kind(own: list[str], theirs: list[str]) -> str:
    return (
        f"saved by another kind of optimizer: that one has {', '.join(theirs)}; the one here"
        f" has {', '.join(own)}"
    )


def _is_chosen(plan: LoadPlan, field: str, prefix: str, members: Sequence[Iterable[str]]) -> bool:
    if not plan.is_partial:
        return True
    return bool(members) and all(
        any(plan.only.fits(field, prefix + name) for name in names) for names in members
    )


def _saved_groups(
    plan: LoadPlan, *, prefix: str, field: str, scope: str
) -> dict[str, list[_Saved]]:
    """Return the saved groups of each parameter.

    A parameter has several groups if ranks share the parameter and also have their own experts.
    """
    begins = f"{prefix}group/"
    by_parameter: dict[str, list[_Saved]] = {}
    for at in dict.fromkeys((GLOBAL, scope)):
        here: dict[str, list[_Saved]] = {}
        for key in plan.checkpoint.leaves:
            if key[0] == field and key[2] == at and key[1].startswith(begins):
                value = plan.checkpoint.leaf(*key)
                if not isinstance(value, dict) or not {"params", "options"} <= value.keys():
                    continue  # an object of the caller under the key "group"
                saved = _Saved(key[1], at, value["options"])
                for name in value["params"] or [key[1].removeprefix(begins)]:
                    here.setdefault(name, []).append(saved)
        by_parameter |= here
    return by_parameter


def _groups_of(
    plan: LoadPlan,
    by_parameter: dict[str, list[_Saved]],
    members: Iterable[Iterable[str]],
    where: str,
) -> list[_Saved]:
    found: dict[str, _Saved] = {}
    for names in members:
        names = list(names)  # noqa: PLW2901
        saved = [group for name in names for group in by_parameter.get(name, ())]
        found |= {group.name: group for group in saved}
        if saved:
            continue
        if "missing" in plan.allow:
            plan.downgrades.append(
                f"{names[0]} is in no saved group, and keeps the options of its live one"
            )
        else:
            plan.problem(Code.GROUP_MISMATCH, where, f"{names[0]} is in no saved group")
    return list(found.values())


def _same_options(plan: LoadPlan, field: str, left: _Saved, right: _Saved) -> bool:
    if left.options.keys() != right.options.keys():
        return False
    contents = []
    for group in (left, right):
        options = {
            key: contents_of(plan, field, group.scope, value)
            for key, value in sorted(group.options.items())
        }
        contents.append(dump_tree(options, where=group.name))
    return contents[0] == contents[1]


def contents_of(plan: LoadPlan, field: str, scope: str, value: Any) -> object:
    """Return a tree with the bytes of each tensor instead of its name.

    Two results are equal if the saved values are equal.
    """
    if isinstance(value, TensorRef):
        found = plan.checkpoint.find(field, value.name, scope)
        return None if found is None else (found.dtype, plan.checkpoint.read(*found.key).tobytes())
    if isinstance(value, list | tuple):
        return [contents_of(plan, field, scope, item) for item in value]
    if isinstance(value, dict):
        return {key: contents_of(plan, field, scope, item) for key, item in value.items()}
    return value


def _plan_options(  # noqa: PLR0917
    plan: LoadPlan, group: dict[str, Any], saved: _Saved, field: str, where: str, kept: set[str]
) -> None:
    for key in sorted(kept & saved.options.keys()):
        plan.downgrades.append(
            f"{where}: {key}: saved {saved.options[key]!r}, here {group[key]!r} stays: override="
        )
    options = {key: value for key, value in saved.options.items() if key not in kept}
    is_scheduled = _SCHEDULED_BY in group and _SCHEDULED_BY in saved.options
    for key in group:
        if key not in options and key not in _NOT_OPTIONS and key not in kept:
            plan.problem(Code.LEAF_MISSING, f"{where}/{key}", "only the live group has this option")
    on_device = (options.get("capturable") or options.get("fused")) and group["params"]
    device = local_of(group["params"][0]).device if on_device else None
    placer = Placer(plan, field=field, scope=saved.scope, device=device, whole=True)
    for key, value in options.items():
        live = group.get(key)
        if key == _ALGORITHM and key in group and live != value:
            detail = f"{key}={value!r} as saved, {live!r} here: Adam isn't AdamW"
            plan.problem(Code.GROUP_MISMATCH, where, detail, remedy=_OTHER_KIND)
        # Options that a scheduler changes from step to step need no note.
        is_told = key in _FLAGS or not (is_scheduled and key in _SCHEDULED)
        if is_told and key in group and _differs(live, value):
            plan.note_option(where, key, live, value)
        if isinstance(live, torch.Tensor) and isinstance(value, int | float):
            plan.actions.append(functools.partial(_fill, live, value))
        else:
            placed = placer.place(live, value, f"{saved.name}/{key}")
            plan.actions.append(functools.partial(group.__setitem__, key, placed))


def _differs(live: object, saved: object) -> bool:
    plain = all(
        isinstance(value, bool | int | float | str | tuple | list | None) for value in (live, saved)
    )
    return plain and live != saved


def _fill(live: torch.Tensor, value: float) -> None:
    with torch.no_grad():
        live.fill_(value)


#: All names of each parameter, by the parameter's id. The first name is used for saving.
Names = Mapping[int, tuple[str, ...]]

#: State that torch keeps on the host unless the group is capturable or fused.
_HOST_KEYS: Final = ("step", "mu_product")


def capture_optimizer(
    optimizer: torch.optim.Optimizer,
    names: Names,
    *,
    prefix: str,
    path: Sequence[object],
    encoder: Encoder,
) -> list[Leaf]:
    """Return a leaf for each group, and for each parameter with state.

    Tensors become sources of the encoder.

    Args:
        optimizer: the live optimizer.
        names: live names of parameters.
        prefix: the prefix of the leaves' names.
        path: the keys that lead to the optimizer, if the prefix doesn't contain them.
        encoder: the encoder of the optimizer's field.

    Raises: StateError(PARAMETER_UNNAMED, STATE_UNSUPPORTED).
    """
    where = place_of(encoder.field, prefix)
    _check_state_keys(optimizer, where)
    leaves = []
    for index, group in enumerate(optimizer.param_groups):
        members = [
            (_names_of(parameter, names, index, where)[0], parameter)
            for parameter in group["params"]
        ]
        ordered = [name for name, _ in members]
        name = f"{prefix}{group_name(index, ordered)}"
        options = {key: value for key, value in group.items() if key not in _NOT_OPTIONS}
        tree = {
            "params": ordered,
            "number": index,
            "path": [*path],
            "options": encoder.encode(options, name),
        }
        leaves.append(encoder.leaf_of(name, tree))
        for member, parameter in members:
            state = optimizer.state.get(parameter)
            if state:
                leaves.append(_capture_state(state, prefix, member, encoder))
    return leaves


def _capture_state(state: Any, prefix: str, member: str, encoder: Encoder) -> Leaf:
    """Return the leaf of a parameter's state."""
    name = f"{prefix}state/{member}"
    under = f"{prefix}{member}"
    keys = tuple(state)
    if type(state) is not dict or not all(
        type(key) is str and is_plain(value) for key, value in state.items()
    ):
        return encoder.leaf(name, state, tensors_under=under)
    # The usual state has nothing but tensors, and the same names at each save.
    names, content = _describe_state(under, keys, place_of(encoder.field, name))
    encoder.sources += [
        source_of(tensor, field=encoder.field, name=child, scope=encoder.scope)
        for child, tensor in zip(names, state.values(), strict=True)
    ]
    return Leaf(field=encoder.field, name=name, scope=encoder.scope, value=content)


@functools.lru_cache(maxsize=1 << 14)
def _describe_state(under: str, keys: tuple[str, ...], where: str) -> tuple[tuple[str, ...], bytes]:
    """Return the names of a state's tensors, and the bytes of the leaf that refers to them.

    Args:
        under: the prefix of the tensors' names.
        keys: the keys of the state.
        where: the leaf's place, for messages.
    """
    names = tuple(child_name(under, key) for key in keys)
    tree = {key: TensorRef(child, "torch") for key, child in zip(keys, names, strict=True)}
    return names, dump_tree(tree, where=where)


def plan_optimizer(
    plan: LoadPlan,
    optimizer: torch.optim.Optimizer,
    names: Names,
    *,
    prefix: str,
    path: Sequence[object],
    field: str,
    scope: str,
) -> None:
    """Plan to restore an optimizer's groups and state. Missing state is created without a step.

    State keeps its saved dtype, with one exception: if the state was saved in its parameter's
    dtype, and the caller allows the parameter's conversion, the state is converted too.

    Args:
        plan: the load plan.
        optimizer: the live optimizer.
        names: live names of parameters.
        prefix: the prefix of the leaves' saved names.
        path: the keys that lead to the optimizer, if the prefix doesn't contain them.
        field: the leaves' field.
        scope: the leaves' scope.

    Problems: GROUP_MISMATCH, LEAF_MISSING.
    Raises: StateError(PARAMETER_UNNAMED, STATE_UNSUPPORTED).
    """
    where = place_of(field, prefix)
    _check_state_keys(optimizer, where)
    numbered = _find_numbered(plan, prefix=prefix, path=path, field=field, scope=scope)
    named = [
        [
            (parameter, _saved_names_of(plan, _names_of(parameter, names, index, where), scope))
            for parameter in group["params"]
        ]
        for index, group in enumerate(optimizer.param_groups)
    ]
    if numbered is not None:
        _plan_numbered(plan, optimizer, named, numbered, prefix=prefix)
        return
    all_options = plan_groups(
        plan, optimizer.param_groups, [[found for _, found in group] for group in named],
        prefix=prefix, field=field, scope=scope, defaults=getattr(optimizer, "defaults", ()),
    )  # fmt: skip
    for group, options in zip(named, all_options, strict=True):
        for parameter, found in group:
            on_device = bool(options.get("capturable") or options.get("fused")) or isinstance(
                optimizer, torch.optim.ASGD
            )
            _ParameterState(plan, optimizer, parameter, field=field, on_device=on_device).restore(
                found, prefix, scope
            )


@dataclasses.dataclass(frozen=True, slots=True)
class _Numbered:
    """An optimizer's saved state_dict, which numbers parameters instead of naming them."""

    key: TensorKey
    state: dict[Any, Any]
    groups: list[dict[str, Any]]


def _find_numbered(
    plan: LoadPlan, *, prefix: str, path: Sequence[object], field: str, scope: str
) -> _Numbered | None:
    """Return the saved state_dict of an optimizer, or None if there is none.

    Files of torch.save contain such state_dicts.
    """
    for at in dict.fromkeys((GLOBAL, scope)):
        key = (field, prefix.rstrip("/"), at)
        tree = (
            find_below(plan.checkpoint.leaf(*key), path) if key in plan.checkpoint.leaves else None
        )
        if isinstance(tree, list) and len(tree) == 1:  # Lightning's form
            tree = tree[0]
        if isinstance(tree, dict) and {"state", "param_groups"} <= tree.keys():
            return _Numbered(key, tree["state"], tree["param_groups"])
    return None


def _plan_numbered(
    plan: LoadPlan,
    optimizer: torch.optim.Optimizer,
    named: Sequence[Sequence[tuple[torch.Tensor, tuple[str, ...]]]],
    saved: _Numbered,
    *,
    prefix: str,
) -> None:
    """Plan to restore state by parameter positions, in the saved dtype.

    `Optimizer.load_state_dict` matches positions in the same way.

    Args:
        plan: the load plan.
        optimizer: the live optimizer.
        named: for each group, the live parameters with their saved names, which `only` and
            `override` select.
        saved: the saved state_dict.
        prefix: the prefix of the names.

    Problems: GROUP_MISMATCH for groups with another number of parameters, or of another kind of
        optimizer; SHAPE_MISMATCH for state of another parameter's shape.
    """
    field, name, at = saved.key
    where = place_of(field, name)
    plan.taken_leaves.add(saved.key)
    everything = Placer(plan, field=field, scope=at)
    sizes = [[len(members) for members in named], [len(group["params"]) for group in saved.groups]]
    if sizes[0] != sizes[1]:
        everything.take([saved.state, saved.groups])
        detail = f"saved by position, in groups of {sizes[1]} parameters; here they are {sizes[0]}"
        plan.problem(Code.GROUP_MISMATCH, where, detail)
        return
    for live, members, group in zip(optimizer.param_groups, named, saved.groups, strict=True):
        states = [
            saved.state.get(number, saved.state.get(str(number), {})) for number in group["params"]
        ]
        options = {key: value for key, value in group.items() if key not in _NOT_OPTIONS}
        everything.take([states, options])
        if not _is_chosen(plan, field, prefix, [names for _, names in members]):
            plan.left_count += 1
            continue
        if (apart := _tell_apart(live, options, getattr(optimizer, "defaults", ())))[0]:
            plan.problem(Code.GROUP_MISMATCH, where, _of_another_kind(*apart), remedy=_OTHER_KIND)
            continue
        # Older versions of torch lack some flags, or the option that distinguishes Adam from AdamW.
        kept: set[str] = {
            key for key in (*_FLAGS, _ALGORITHM) if key in live and key not in options
        }
        kept |= {key for key in live if plan.only.is_overridden(field, f"{prefix}group/{key}")}
        _plan_options(plan, live, _Saved(name, at, options), field, where, kept)
        on_device = bool(options.get("capturable") or options.get("fused"))
        for (parameter, names), state in zip(members, states, strict=True):
            if not any(plan.only.fits(field, prefix + other) for other in names):
                plan.left_count += 1
            elif _has_its_shapes(plan, state, parameter, field=field, name=names[0], scope=at):
                part = _ParameterState(plan, optimizer, parameter, field=field, on_device=on_device)
                part.saved_dtype = _saved_dtype(plan, names, at)
                part.plan_state(f"{prefix}{names[0]}", state, at)


def _has_its_shapes(
    plan: LoadPlan,
    state: dict[Any, Any],
    parameter: torch.Tensor,
    *,
    field: str,
    name: str,
    scope: str,
) -> bool:
    """Return whether element-wise state has the parameter's shape. Problems: SHAPE_MISMATCH."""
    for key in _LIKE_PARAMETERS & state.keys():
        tensor = (
            plan.checkpoint.find(field, state[key].name, scope)
            if isinstance(state[key], TensorRef)
            else None
        )
        if tensor is not None and tensor.global_shape != tuple(parameter.shape):
            detail = (
                f"at its position is state of shape {tensor.global_shape}, and it has"
                f" {tuple(parameter.shape)}"
            )
            return plan.problem(Code.SHAPE_MISMATCH, place_of(field, f"{name}/{key}"), detail)
    return True


class _ParameterState:
    """The state of a parameter during the plan of its restore."""

    def __init__(
        self,
        plan: LoadPlan,
        optimizer: torch.optim.Optimizer,
        parameter: torch.Tensor,
        *,
        field: str,
        on_device: bool,
    ) -> None:
        self.plan = plan
        self.field = field
        self.on_device = on_device
        self.optimizer = optimizer
        self.parameter = parameter
        self.live: dict[Any, Any] = optimizer.state.get(parameter) or {}
        self.saved_dtype: str | None = None

    def restore(self, names: Sequence[str], prefix: str, scope: str) -> None:
        """Plan to restore the state that was saved under any of `names`."""
        if not any(self.plan.only.fits(self.field, prefix + name) for name in names):
            self.plan.left_count += 1
            return
        self.saved_dtype = _saved_dtype(self.plan, names, scope)
        name, at, saved = self.plan.leaf(
            self.field, [f"{prefix}state/{name}" for name in names], scope
        )
        if saved is MISSING:
            if self.live and self.plan.goes_back:
                self.plan.actions.append(lambda: self._put({}))
            elif self.live:
                self.plan.problem(
                    Code.LEAF_MISSING, place_of(self.field, name), "only the live optimizer has it"
                )
            return
        self._take_tied(name, saved, [f"{prefix}state/{other}" for other in names], at)
        self.plan_state(name, saved, at)

    def plan_state(self, name: str, saved: dict[Any, Any], at: str) -> None:
        """Plan to restore a saved state.

        Args:
            name: the state's name in messages and patterns.
            saved: the saved tree.
            at: the scope in which the state was found.
        """
        placer = Placer(
            self.plan,
            field=self.field,
            scope=at,
            device=local_of(self.parameter).device,
            whole=True,
        )
        state = {key: self._value(placer, key, value, name) for key, value in saved.items()}
        for key in self.live:
            if key not in saved and not self.plan.goes_back:
                self.plan.problem(
                    Code.LEAF_MISSING,
                    place_of(self.field, f"{name}/{key}"),
                    "only the live optimizer has it",
                )
                state[key] = self.live[key]
        self.plan.actions.append(lambda: self._put(state))

    def _take_tied(self, name: str, saved: object, others: Iterable[str], scope: str) -> None:
        """Take the states of parameters that were separate at the save and are tied now.

        Different contents become a problem, since they would be lost silently.
        """
        plan = self.plan
        field = self.field
        for other in others:
            key = (field, other, scope)
            if other == name or key not in plan.checkpoint.leaves:
                continue
            value = plan.checkpoint.leaf(*key)
            plan.taken_leaves.add(key)
            Placer(plan, field=field, scope=scope).take(value)
            if contents_of(plan, field, scope, value) != contents_of(plan, field, scope, saved):
                detail = f"one parameter with that of {name} here, but saved with other contents"
                plan.problem(Code.LEAF_UNEXPECTED, place_of(field, other), detail)

    def _put(self, state: dict[Any, Any]) -> None:
        kept = self.optimizer.state[self.parameter]
        kept.clear()
        kept.update(state)

    def _value(self, placer: Placer, key: object, saved: object, name: str) -> object:
        live = self.live.get(key)
        if isinstance(live, torch.Tensor) and is_registered(live):
            return placer.place(live, saved, f"{name}/{key}")
        if not isinstance(saved, TensorRef):
            return placer.fresh(saved, f"{name}/{key}", live)
        tensor = placer.referred(saved)
        device = self._device(key)
        if self._follows(key, tensor):
            return self._converted(live, tensor)
        if (
            isinstance(live, torch.Tensor)
            and not refuses(live, tensor)
            and local_of(live).device == device
        ):
            fill(self.plan, live, tensor)
            return live
        alone = key in _HOST_KEYS or tensor.global_shape != tuple(self.parameter.shape)
        if alone and is_distributed(self.parameter) and len(tensor.sharding) > 1:
            raise err(
                Code.STATE_UNSUPPORTED,
                f"saved in {len(tensor.sharding)} pieces, in another shape than the parameter",
                where=place_of(self.field, tensor.name),
                remedy="Let the optimizer create this state, by a step, before the load.",
            )
        like = None if alone else self.parameter
        return Placer(self.plan, field=self.field, scope=placer.scope, device=device).fresh(
            saved, name, like
        )

    def _follows(self, key: object, tensor: IndexTensor) -> bool:
        """Return whether state is converted together with its parameter.

        Kernels require the same dtype for both.
        """
        return (
            "dtype" in self.plan.allow
            and key not in _HOST_KEYS
            and tensor.global_shape == tuple(self.parameter.shape)
            and tensor.dtype == self.saved_dtype != DTYPE_NAMES.get(self.parameter.dtype)
        )

    def _converted(self, live: object, tensor: IndexTensor) -> torch.Tensor:
        dtype = dtype_name(self.parameter.dtype, where=place_of(self.field, tensor.name))
        kept = isinstance(live, torch.Tensor) and (live.dtype, live.shape) == (
            self.parameter.dtype,
            self.parameter.shape,
        )
        made = live if kept else allocate(dtype, tensor.global_shape, like=self.parameter)
        fill(self.plan, made, tensor)
        return made  # type: ignore[return-value]

    def _device(self, key: object) -> torch.device:
        on_host = key in _HOST_KEYS and not self.on_device
        return torch.device("cpu") if on_host else local_of(self.parameter).device


def _names_of(parameter: torch.Tensor, names: Names, group: int, where: str) -> tuple[str, ...]:
    found = names.get(id(parameter))
    if not found:
        detail = (
            f"group {group} has a parameter of shape {tuple(parameter.shape)} that no module"
            " of weights has"
        )
        raise err(Code.PARAMETER_UNNAMED, detail, where=where)
    return found


def _saved_dtype(plan: LoadPlan, names: Iterable[str], scope: str) -> str | None:
    """Return the saved dtype of a parameter."""
    places = [(field, at) for field in ("weights", "optimizer", "data") for at in (GLOBAL, scope)]
    found = (plan.checkpoint.find(field, name, at) for name in names for field, at in places)
    return next((tensor.dtype for tensor in found if tensor is not None), None)


def _saved_names_of(plan: LoadPlan, live: tuple[str, ...], scope: str) -> tuple[str, ...]:
    """Return the saved names of a parameter, followed by names tied to the parameter at the save.

    Only the first of the tied names has saved state. Here, for example on a pipeline stage, another
    of these names may be left.
    """
    names = tuple(map(plan.renaming.saved_name, live))
    found = [plan.checkpoint.find("weights", name, at) for at in (GLOBAL, scope) for name in names]
    aliases = [
        alias for tensor in found if tensor is not None for alias in (tensor.name, *tensor.aliases)
    ]
    return tuple(dict.fromkeys((*names, *aliases)))


def _check_state_keys(optimizer: torch.optim.Optimizer, where: str) -> None:
    known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    strange = [key for key in optimizer.state if id(key) not in known]
    if strange:
        kind = type(optimizer).__qualname__
        detail = (
            f"{kind} keeps state under {type(strange[0]).__qualname__}"
            f" {str(strange[0])[:64]!r}, not a parameter"
        )
        raise err(
            Code.STATE_UNSUPPORTED,
            detail,
            where=where,
            remedy="Give the optimizer its own state_dict.",
        )
