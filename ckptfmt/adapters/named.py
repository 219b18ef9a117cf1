"""Flat mappings from names to tensors, such as a state_dict: on several workers they add up, as modules do."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

import numpy as np

from ckptfmt.adapters import torch_side
from ckptfmt.adapters.load_plan import Plan
from ckptfmt.adapters.names import join_name
from ckptfmt.adapters.placing import fill
from ckptfmt.adapters.units import Unit
from ckptfmt.documents.tree import TensorRef
from ckptfmt.errors import Code

#: Fields whose mappings add up; elsewhere a mapping is one value, and the same on all workers.
_FIELDS: Final = ("weights", "optimizer")


def is_named_tensors(unit: Unit) -> bool:
    """Tell whether a unit is a flat mapping from strings to tensors or arrays; an empty one is."""
    side = torch_side()
    return (
        unit.field in _FIELDS
        and type(unit.value) in (dict, OrderedDict)
        and all(
            type(key) is str and (isinstance(value, np.ndarray) or (side is not None and side.is_tensor(value)))
            for key, value in unit.value.items()
        )
    )


def plan_named_tensors(plan: Plan, unit: Unit) -> bool:
    """Plan to fill such a mapping tensor by tensor, and say so.

    Not where it was saved as one value by one worker, unless a part of it is chosen or its tensors have other names.

    Problems: TENSOR_MISSING and those of `fill`.
    """
    saved_as_one = (unit.field, plan.renaming.saved_name(unit.name), unit.scope) in plan.checkpoint.leaves
    as_one = saved_as_one and plan.worker_count == 1 and not plan.is_partial and not plan.renaming
    if not is_named_tensors(unit) or as_one:
        return False
    for key, value in unit.value.items():
        name = join_name((*unit.path, key))
        chosen = plan.choose(unit.field, [name])
        saved = plan.tensor(unit.field, chosen, unit.scope) if chosen else None
        if saved is not None:
            fill(plan, value, saved, name=name)
        elif chosen:
            renamed = "" if chosen[0] == name else f" as {chosen[0]}"
            plan.problem(Code.TENSOR_MISSING, f"{unit.field}:{name}", f"not saved{renamed}")
    take_named_leaf(plan, unit)
    return True


def take_named_leaf(plan: Plan, unit: Unit) -> None:
    """Count the value by which one worker saved such a mapping as taken: it says no more than the tensors' names."""
    key = (unit.field, plan.renaming.saved_name(unit.name), unit.scope)
    if key in plan.checkpoint.leaves:
        tree = plan.checkpoint.leaf(*key)
        if isinstance(tree, dict) and all(isinstance(value, TensorRef) for value in tree.values()):
            plan.taken_leaves.add(key)
