"""Options of parameter groups: put back by the names of the parameters, whichever way they were grouped."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch

from ckptfmt.adapters.load_plan import Plan
from ckptfmt.adapters.names import GLOBAL
from ckptfmt.adapters.placing import Placer
from ckptfmt.adapters.torch.tensors import local_of
from ckptfmt.documents.tree import TensorRef, dump_tree
from ckptfmt.errors import Code

_NOT_OPTIONS: Final = ("params", "param_names")
#: What tells AdamW from Adam, which share everything else.
_ALGORITHM: Final = "decoupled_weight_decay"
#: What a scheduler leaves in a group, and what schedulers change there.
_SCHEDULED_BY: Final = "initial_lr"
_SCHEDULED: Final = ("lr", "momentum", "betas")
#: Options that choose another kernel, and with it other bits.
_FLAGS: Final = ("foreach", "fused", "capturable", "maximize", "differentiable")


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Saved:
    """A group of the checkpoint."""

    name: str
    scope: str
    options: dict[str, Any]


def plan_groups(
    plan: Plan,
    groups: Sequence[dict[str, Any]],
    names: Sequence[Sequence[tuple[str, ...]]],
    *,
    prefix: str,
    field: str,
    scope: str,
) -> list[dict[str, Any]]:
    """Plan to give each live group the options that its parameters were saved with; return these, as trees.

    A group of which not every parameter is chosen keeps its own.

    Args:
        plan: the load.
        groups: the live ones.
        names: for each group, all saved names of each of its parameters.
        prefix: what the names of the leaves begin with.
        field: their field.
        scope: their scope.

    Problems: GROUP_MISMATCH for a parameter that no saved group has, or when a live group would need two groups'
        options; LEAF_MISSING for an option that wasn't saved.
    """
    by_parameter = _saved_groups(plan, prefix=prefix, field=field, scope=scope)
    chosen = []
    for index, (group, members) in enumerate(zip(groups, names, strict=True)):
        if not _is_chosen(plan, field, prefix, members):
            plan.left_count += 1
            left = (saved for names in members for name in names for saved in by_parameter.get(name, ()))
            plan.taken_leaves |= {(field, saved.name, saved.scope) for saved in left}
            chosen.append(group)
            continue
        keys: list[Iterable[str]] = [*members] or [[f"#{index}"]]
        where = f"{field}:{prefix}group/{next(iter(keys[0]))}"
        found = _groups_of(plan, by_parameter, keys, where)
        for saved in found:
            plan.taken_leaves.add((field, saved.name, saved.scope))
            Placer(plan, field=field, scope=saved.scope).take(saved.options)
        options = {**found[0].options} if found else {}
        if any(not _same_options(plan, field, found[0], other) for other in found[1:]):
            plan.problem(Code.GROUP_MISMATCH, where, "its parameters were saved with different options")
        elif found:
            kept = {key for key in group if plan.is_overridden(field, f"{prefix}group/{key}")}
            _plan_options(plan, group, found[0], field, where, kept)
            options |= {key: group[key] for key in kept}
        chosen.append(options)
    return chosen


def _is_chosen(plan: Plan, field: str, prefix: str, members: Sequence[Iterable[str]]) -> bool:
    if not plan.is_partial:
        return True
    return bool(members) and all(any(plan.fits(field, prefix + name) for name in names) for names in members)


def _saved_groups(plan: Plan, *, prefix: str, field: str, scope: str) -> dict[str, list[_Saved]]:
    """Return the saved groups of each parameter: several where ranks that share it had experts of their own beside."""
    begins = f"{prefix}group/"
    by_parameter: dict[str, list[_Saved]] = {}
    for at in dict.fromkeys((GLOBAL, scope)):
        here: dict[str, list[_Saved]] = {}
        for key in plan.checkpoint.leaves:
            if key[0] == field and key[2] == at and key[1].startswith(begins):
                value = plan.checkpoint.leaf(*key)
                saved = _Saved(key[1], at, value["options"])
                for name in value["params"] or [key[1].removeprefix(begins)]:
                    here.setdefault(name, []).append(saved)
        by_parameter |= here
    return by_parameter


def _groups_of(
    plan: Plan, by_parameter: dict[str, list[_Saved]], members: Iterable[Iterable[str]], where: str
) -> list[_Saved]:
    found: dict[str, _Saved] = {}
    for names in members:
        names = list(names)  # noqa: PLW2901 - looked through twice
        saved = [group for name in names for group in by_parameter.get(name, ())]
        found |= {group.name: group for group in saved}
        if saved:
            continue
        if "missing" in plan.allow:
            plan.downgrades.append(f"{names[0]} is in no saved group, and keeps the options of its live one")
        else:
            plan.problem(Code.GROUP_MISMATCH, where, f"{names[0]} is in no saved group")
    return list(found.values())


def _same_options(plan: Plan, field: str, left: _Saved, right: _Saved) -> bool:
    if left.options.keys() != right.options.keys():
        return False
    contents = []
    for group in (left, right):
        options = {key: contents_of(plan, field, group.scope, value) for key, value in sorted(group.options.items())}
        contents.append(dump_tree(options, where=group.name))
    return contents[0] == contents[1]


def contents_of(plan: Plan, field: str, scope: str, value: Any) -> object:  # noqa: ANN401 - a tree
    """Return a tree with the bytes of each tensor in place of its name: equal where the values are."""
    if isinstance(value, TensorRef):
        found = plan.checkpoint.find(field, value.name, scope)
        return None if found is None else (found.dtype, plan.checkpoint.read(*found.key).tobytes())
    if isinstance(value, list | tuple):
        return [contents_of(plan, field, scope, item) for item in value]
    if isinstance(value, dict):
        return {key: contents_of(plan, field, scope, item) for key, item in value.items()}
    return value


def _plan_options(  # noqa: PLR0917 - all of it is what a group is
    plan: Plan, group: dict[str, Any], saved: _Saved, field: str, where: str, kept: set[str]
) -> None:
    for key in sorted(kept & saved.options.keys()):
        plan.downgrades.append(f"{where}: {key}: saved {saved.options[key]!r}, here {group[key]!r} stays: override=")
    options = {key: value for key, value in saved.options.items() if key not in kept}
    is_scheduled = _SCHEDULED_BY in group and _SCHEDULED_BY in saved.options
    for key in group:
        if key not in options and key not in _NOT_OPTIONS and key not in kept:
            plan.problem(Code.LEAF_MISSING, f"{where}/{key}", "the live group has this option")
    on_device = (options.get("capturable") or options.get("fused")) and group["params"]
    device = local_of(group["params"][0]).device if on_device else None
    placer = Placer(plan, field=field, scope=saved.scope, device=device, whole=True)
    for key, value in options.items():
        live = group.get(key)
        if key == _ALGORITHM and key in group and live != value:
            plan.problem(Code.GROUP_MISMATCH, where, f"{key}={value!r} as saved, {live!r} here: Adam isn't AdamW")
        if _is_told(key, is_scheduled=is_scheduled) and key in group and _differs(live, value):
            plan.notes.append(f"{where}: {key}: {live!r} here, {value!r} as saved, which is taken; see override=")
        if isinstance(live, torch.Tensor) and isinstance(value, int | float):
            plan.actions.append(functools.partial(_fill, live, value))
        else:
            placed = placer.place(live, value, f"{saved.name}/{key}")
            plan.actions.append(functools.partial(group.__setitem__, key, placed))


def _is_told(key: str, *, is_scheduled: bool) -> bool:
    """Tell whether another value than the saved one is worth a word: a scheduler has it change from step to step."""
    return key in _FLAGS or not (is_scheduled and key in _SCHEDULED)


def _differs(live: object, saved: object) -> bool:
    plain = all(isinstance(value, bool | int | float | str | tuple | list | None) for value in (live, saved))
    return plain and live != saved


def _fill(live: torch.Tensor, value: float) -> None:
    with torch.no_grad():
        live.fill_(value)
