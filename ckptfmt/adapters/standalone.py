"""A checkpoint as trees of new values, without a State to fill."""

from __future__ import annotations

import importlib
import sys
from collections import OrderedDict
from typing import Any, Final

from ckptfmt.adapters.choice import Patterns
from ckptfmt.adapters.live_trees import plain_values
from ckptfmt.adapters.load_plan import LoadPlan
from ckptfmt.adapters.names import GLOBAL, key_text
from ckptfmt.adapters.placing import Placer
from ckptfmt.documents.manifest import FIELDS
from ckptfmt.documents.tables import TensorKey
from ckptfmt.documents.tree import TensorRef
from ckptfmt.errors import Code, err
from ckptfmt.read.reader import Checkpoint

_FRAMEWORKS: Final = (None, "numpy", "torch")


#: Stands for a value of which nothing is chosen.
_NOTHING: Final = object()


def load_trees(checkpoint: Checkpoint, framework: str | None = None, *, only: Patterns = None) -> dict[str, Any]:
    """Return everything in a checkpoint, by field.

    A field that was saved as one tree is that tree. Any other is a mapping from names to tensors and values, every name
    of a tied tensor included and non-persistent buffers left out: what a module was saved from goes into
    ``load_state_dict`` as it is. What belongs to one worker alone is a mapping of its own under ``lw/<i>``. Fields that
    are absent are left out.

    Args:
        checkpoint: an open one.
        framework: ``torch`` or ``numpy`` for all tensors; None for what each was saved as, numpy where the program
            hasn't loaded torch.
        only: patterns of what to load; of a mapping, what is in it may be chosen.

    Raises: StateError(ARGUMENT; STATE_UNSUPPORTED for a dtype that the framework lacks); and what reading raises.
    """
    if framework not in _FRAMEWORKS:
        raise err(Code.ARGUMENT, f"{framework!r} is neither 'torch' nor 'numpy'", where="framework")
    if framework == "torch":
        importlib.import_module("torch")
    plan = LoadPlan(checkpoint, worker=0, worker_count=1, allow=frozenset(), only=only)
    trees = {field: _field(plan, field, framework) for field in FIELDS if field != "rng"}
    plan.check()
    checkpoint.plan_reading(plan.sinks).run()
    for action in plan.actions:
        action()
    trees["rng"] = _streams(plan)
    return {field: trees[field] for field in FIELDS if trees[field] != {} or _is_there(plan, field)}


def _is_there(plan: LoadPlan, field: str) -> bool:
    if plan.is_partial:
        return False
    return any(key[0] == field for key in (*plan.checkpoint.leaves, *plan.checkpoint.tensors))


def _field(plan: LoadPlan, field: str, framework: str | None) -> Any:  # noqa: ANN401 - a tree
    values: dict[str, dict[str, Any]] = {}
    for key in plan.checkpoint.leaves:
        tree = _choose(plan, key, plan.checkpoint.leaf(*key)) if key[0] == field else _NOTHING
        if tree is not _NOTHING:
            placer = Placer(plan, field=field, scope=key[2], framework=framework, parts=True)
            values.setdefault(key[2], {})[key[1]] = placer.fresh(tree, key[1])
    alone = [key for key in plan.checkpoint.tensors if key[0] == field and key not in plan.taken_tensors]
    if plan.is_partial:
        alone = [key for key in alone if any(plan.fits(field, name) for name in _names(plan, key))]
    if not alone and list(values) == [GLOBAL] and list(values[GLOBAL]) == [""]:
        return values[GLOBAL][""]
    kind = framework or ("torch" if "torch" in sys.modules else "numpy")
    placers = {scope: Placer(plan, field=field, scope=scope, framework=kind) for scope in {key[2] for key in alone}}
    for key in alone:
        _add_tensor(plan, key, placers[key[2]], kind, values.setdefault(key[2], {}))
    return {**values.pop(GLOBAL, {}), **values}


def _add_tensor(plan: LoadPlan, key: TensorKey, placer: Placer, kind: str, values: dict[str, Any]) -> None:
    tensor = plan.checkpoint.tensors[key]
    if tensor.storage == "persistent":
        made = placer.fresh(TensorRef(tensor.name, kind), tensor.name)
        values.update(dict.fromkeys((tensor.name, *tensor.aliases), made))


def _names(plan: LoadPlan, key: TensorKey) -> tuple[str, ...]:
    return (key[1], *plan.checkpoint.tensors[key].aliases)


def _choose(plan: LoadPlan, key: TensorKey, tree: Any, name: str | None = None) -> Any:  # noqa: ANN401 - a tree
    """Return what is chosen of a saved value: all, or of a mapping a smaller one, or `_NOTHING`."""
    field = key[0]
    if plan.fits_leaf(key, lambda: tree) if name is None else plan.fits(field, name):
        return tree
    if type(tree) not in (dict, OrderedDict):
        return _NOTHING
    at = key[1] if name is None else name
    begin = f"{at}/" if at else ""
    parts = ((item, _choose(plan, key, value, f"{begin}{key_text(item)}")) for item, value in tree.items())
    chosen = [(item, part) for item, part in parts if part is not _NOTHING]
    return type(tree)(chosen) if chosen else _NOTHING


def _streams(plan: LoadPlan) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for name, scope in plan.checkpoint.streams:
        if not plan.fits("rng", name):
            continue
        kind, state = plan.checkpoint.stream(name, scope)
        found.setdefault(scope, {})[name] = (kind, plain_values(state))
    return found
