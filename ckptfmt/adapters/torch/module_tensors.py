"""A module's tensors: captured for a save; put back in place, or by the hooks that made them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ckptfmt.adapters.live_trees import Encoder, fingerprint
from ckptfmt.adapters.load_plan import MISSING, LoadPlan
from ckptfmt.adapters.placing import Placer, fill
from ckptfmt.adapters.torch.modules import Entry, ModuleView
from ckptfmt.adapters.torch.tensors import TorchSource, inner_tensors, source_of
from ckptfmt.documents.index import IndexTensor
from ckptfmt.documents.part import Leaf
from ckptfmt.documents.tree import TensorRef
from ckptfmt.errors import Code, err


def capture_entries(entries: Iterable[Entry], field: str) -> list[TorchSource]:
    """Return the sources of live tensors; tied ones once, with their other names. Raises: StateError."""
    sources = []
    for entry in entries:
        for index, (name, tensor) in enumerate(inner_tensors(entry.tensor, entry.names[0])):
            aliases = [inner_tensors(entry.tensor, other)[index][0] for other in entry.names[1:]]
            sources.append(
                source_of(
                    tensor,
                    field=field,
                    name=name,
                    scope=entry.scope,
                    storage=entry.storage,
                    aliases=tuple(sorted(aliases, key=str.encode)),
                )
            )
    return sources


def capture_module(view: ModuleView, encoder: Encoder) -> list[Leaf]:
    """Return the leaves of extra state and of what hooks made; tensors become sources of the encoder."""
    leaves = [encoder.leaf(name, value) for name, (_, value) in view.extra_states.items()]
    for name, (_, value) in view.foreign.items():
        if isinstance(value, torch.Tensor):
            encoder.encode(value, name)
        else:
            leaves.append(encoder.leaf(name, value))
    return leaves


def plan_entry(plan: LoadPlan, entry: Entry, field: str) -> None:
    """Plan to fill a live tensor of a module from whichever of its names was saved."""
    chosen = plan.choose(field, entry.names)
    for index, (_, tensor) in enumerate(inner_tensors(entry.tensor, "") if chosen else ()):
        live, *_ = inner_tensors(entry.tensor, entry.names[0])[index]
        names = [inner_tensors(entry.tensor, name)[index][0] for name in chosen]
        saved = plan.tensor(field, names, entry.scope)
        if entry.storage == "non-persistent" and (saved is None or saved.global_shape != tuple(tensor.shape)):
            # A cache, as torch sees it: what it holds is made anew where it is needed.
            found = "not saved" if saved is None else f"saved with shape {saved.global_shape}"
            plan.downgrades.append(f"{field}:{live}: non-persistent buffer left as it is, {found}")
            continue
        if saved is None:
            plan.problem(Code.TENSOR_MISSING, f"{field}:{live}", _not_saved(live, names[0], tensor))
            continue
        fill(plan, tensor, saved, name=live)
        plan.note_destination(saved, live, names[0])
        _plan_tied(plan, names, saved)


def _plan_tied(plan: LoadPlan, names: list[str], taken: IndexTensor) -> None:
    """Take the tensors that were saved apart and are tied here; other contents would be lost silently."""
    for name in names:
        other = plan.checkpoint.find(taken.field, name, taken.scope)
        if other is None or other.key in plan.taken_tensors:
            continue
        plan.taken_tensors.add(other.key)
        same = (other.dtype, other.global_shape) == (taken.dtype, taken.global_shape)
        if not same or plan.checkpoint.read(*other.key).tobytes() != plan.checkpoint.read(*taken.key).tobytes():
            where = f"{taken.field}:{name}"
            plan.problem(Code.TENSOR_UNEXPECTED, where, f"tied to {taken.name} here, but saved with other contents")


def _not_saved(live: str, saved: str, tensor: torch.Tensor) -> str:
    renamed = "" if live == saved else f" as {saved}"
    return f"not saved{renamed} (shape here {tuple(tensor.shape)})"


def plan_module(plan: LoadPlan, view: ModuleView, field: str) -> None:
    """Plan to put back extra state and what hooks made; the entries are planned on their own."""
    for name, (owner, live) in view.extra_states.items():
        value = _saved_value(plan, field, name, view.scope, live)
        if value is not MISSING:
            _plan_extra_state(plan, owner, value, f"{field}:{name}")
    foreign = {}
    for name, (key, live) in view.foreign.items():
        value = (
            _saved_tensor(plan, field, name, view.scope, live)
            if isinstance(live, torch.Tensor)
            else _saved_value(plan, field, name, view.scope, live)
        )
        if value is not MISSING:
            foreign[key] = value
    if foreign:
        plan.actions.append(lambda: _load_foreign(view.module, foreign, field))


def _saved_value(plan: LoadPlan, field: str, name: str, scope: str, live: object) -> Any:  # noqa: ANN401 - a tree
    chosen = plan.choose(field, [name])
    if not chosen:
        return MISSING
    found, at, saved = plan.leaf(field, chosen, scope)
    if saved is MISSING:
        plan.problem(Code.LEAF_MISSING, f"{field}:{name}", "not saved")
        return MISSING
    return Placer(plan, field=field, scope=at).fresh(saved, found, live)


def _saved_tensor(plan: LoadPlan, field: str, name: str, scope: str, live: torch.Tensor) -> Any:  # noqa: ANN401
    chosen = plan.choose(field, [name])
    if not chosen:
        return MISSING
    saved = plan.tensor(field, chosen, scope)
    if saved is None:
        plan.problem(Code.TENSOR_MISSING, f"{field}:{name}", _not_saved(name, chosen[0], live))
        return MISSING
    return Placer(plan, field=field, scope=saved.scope).fresh(TensorRef(saved.name, "torch"), saved.name, live)


def _plan_extra_state(plan: LoadPlan, owner: torch.nn.Module, value: object, where: str) -> None:
    def load() -> None:
        wanted = fingerprint(value, field="weights", name="")
        owner.set_extra_state(value)
        _check_read_back(wanted, owner.get_extra_state(), where)

    plan.actions.append(load)


def _load_foreign(module: torch.nn.Module, foreign: dict[str, Any], field: str) -> None:
    wanted = {key: fingerprint(value, field=field, name="") for key, value in foreign.items()}
    # Given as a whole, since hooks may look at several keys; the live tensors are copied onto themselves.
    module.load_state_dict({**module.state_dict(), **foreign})
    with torch.no_grad():
        after = module.state_dict()
    for key, fingerprints in wanted.items():
        _check_read_back(fingerprints, after.get(key), f"{field}:{key}")


def _check_read_back(wanted: tuple[bytes, dict[str, bytes]], live: object, where: str) -> None:
    if fingerprint(live, field="weights", name="") != wanted:
        raise err(Code.READ_BACK, "after the load it gives another value than the one it was given", where=where)
