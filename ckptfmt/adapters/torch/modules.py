"""What a module holds: parameters, buffers, extra state, and what its own hooks put into its state_dict.

It is captured for a save, and put back in place, or by the hooks that made it.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ckptfmt.adapters.live_trees import Encoder, fingerprint, worker_scope
from ckptfmt.adapters.load_plan import MISSING, LoadPlan
from ckptfmt.adapters.placing import Placer, fill
from ckptfmt.adapters.torch.tensors import (
    TorchSource,
    address_of,
    inner_tensors,
    is_plain,
    memory_of,
    source_of,
    storage_of,
)
from ckptfmt.documents.index import IndexTensor
from ckptfmt.documents.part import Leaf
from ckptfmt.documents.tree import TensorRef
from ckptfmt.errors import Code, err
from ckptfmt.state import place_of

#: Wrappers by module and class, each with the attribute that holds what it wraps.
_WRAPPERS: Final = (
    ("torch.nn.parallel.distributed", "DistributedDataParallel", "module"),
    ("torch.nn.parallel.data_parallel", "DataParallel", "module"),
    ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod"),
    ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "ActivationWrapper", "_checkpoint_wrapped_module"),
)
#: Attribute of a wrapper that takes it out of the keys of a state_dict by itself.
_TAKEN_OUT: Final = "_checkpoint_wrapped_module"


class Paths:
    """The paths within one module, for one look at it.

    Where nothing is wrapped, which is most often so, a path is a name as it is.

    Args:
        root: where paths begin; wrapped or not.
    """

    def __init__(self, root: torch.nn.Module) -> None:
        self._root = root
        loaded = ((getattr(sys.modules.get(module), name, None), attribute) for module, name, attribute in _WRAPPERS)
        self._wrappers = [(kind, attribute) for kind, attribute in loaded if kind is not None]
        self._attributes: dict[type, str | None] = {}
        self._wraps = any(self._attribute(module) is not None for module in _all_modules(root))

    def name_of(self, path: str, *, raw: bool) -> str:
        """Return the name of what `path` leads to.

        Args:
            path: of attributes.
            raw: as modules have it; else a key of a state_dict, which some wrappers have left already.
        """
        return self._walk(path, raw=raw)[1] if self._wraps else path

    def holder_of(self, key: str) -> torch.nn.Module | None:
        """Return the module that holds what a state_dict has under `key`, wrapped by nothing."""
        return self._walk(key, raw=False)[0]

    def _walk(self, path: str, *, raw: bool) -> tuple[torch.nn.Module | None, str]:
        holder: torch.nn.Module | None = None
        module: torch.nn.Module | None = self._root
        names = []
        for part in path.split("."):
            attribute = self._attribute(module)
            if module is not None and attribute == part and (raw or attribute != _TAKEN_OUT):
                module = module._modules.get(part)  # noqa: SLF001 - get_submodule would run the wrapper's __getattr__
                continue
            while module is not None and attribute is not None:
                module = module._modules.get(attribute)  # noqa: SLF001
                attribute = self._attribute(module)
            holder = module
            names.append(part)
            module = None if module is None else module._modules.get(part)  # noqa: SLF001
        return holder, ".".join(names)

    def _attribute(self, module: torch.nn.Module | None) -> str | None:
        """Return the attribute under which a wrapper holds what it wraps; None for what is no wrapper."""
        kind = type(module)
        if kind not in self._attributes:
            found = (attribute for wrapper, attribute in self._wrappers if isinstance(module, wrapper))
            self._attributes[kind] = next(found, None)
        return self._attributes[kind]


def _all_modules(root: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the modules that paths can lead to, by whichever way `modules` of one of them may go."""
    found = {id(root): root}
    waiting = [root]
    while waiting:
        parts = waiting.pop()._modules.values()  # noqa: SLF001
        new = [part for part in parts if part is not None and id(part) not in found]
        found |= {id(part): part for part in new}
        waiting += new
    return list(found.values())


def generators_of(module: torch.nn.Module) -> list[tuple[str, torch.Generator]]:
    """Return the generators that modules hold in attributes of their own, each with its path, wrappers left out."""
    paths: Paths | None = None
    found = []
    for path, part in module.named_modules():
        for name, value in part.__dict__.items():
            if type(value) is torch.Generator:
                paths = paths or Paths(module)
                found.append((".".join(filter(None, (paths.name_of(path, raw=True), name))), value))
    return found


#: Sums of more processes than this depend on their order.
_ORDER_MATTERS_FROM: Final = 2
_EXTRA_STATE: Final = "_extra_state"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Entry:
    """A live tensor of a module; `names` are all of its names, the first in the order of state_dict."""

    names: tuple[str, ...]
    scope: str
    storage: str
    tensor: torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModuleView:
    """What a module holds just now.

    Attributes:
        module: the module as it was given, wrapped or not.
        scope: of everything that isn't in `entries`.
        entries: live parameters and buffers, each with its own scope.
        parameters: all names of each live parameter by its id, saved or not, for optimizers.
        extra_states: by name, the module whose get_extra_state it is, and its value.
        foreign: by name, key in state_dict and value of what is no live tensor: the work of hooks.
    """

    module: torch.nn.Module
    scope: str
    entries: tuple[Entry, ...]
    parameters: dict[int, tuple[str, ...]]
    extra_states: dict[str, tuple[torch.nn.Module, object]]
    foreign: dict[str, tuple[str, object]]


def view_module(
    module: torch.nn.Module, *, field: str, prefix: str, scope: str, worker: int, worker_count: int
) -> ModuleView:
    """Return what a module holds.

    Args:
        module: wrapped or not; wrappers don't show in the names.
        field: field that it is saved in, for messages.
        prefix: what its names begin with.
        scope: of its tensors, but for those that each worker of a data-parallel module has for itself.
        worker: number of this worker.
        worker_count: how many there are.

    Raises: StateError(STATE_UNSUPPORTED, STATE_NAME).
    """
    _refuse_fsdp1(module, place_of(field, prefix))
    # First of all, and at each save: it also puts FSDP2's parameters back into shards after an evaluation.
    state_dict = _state_dict(module, f"{field}:{prefix}")
    # With each path to a module that has several: torch walks them all at each of its own questions.
    modules = list(module.named_modules(remove_duplicate=False))
    live = _Live(part for _, part in modules)
    paths = Paths(module)
    own = _per_worker_buffers(module) if worker_count > 1 else set()
    entries: list[Entry] = []
    extra_states: dict[str, tuple[torch.nn.Module, object]] = {}
    foreign: dict[str, tuple[str, object]] = {}
    for key, value in state_dict.items():
        name = prefix + paths.name_of(key, raw=False)
        owner = _extra_state_owner(paths, key)
        if owner is not None:
            extra_states[name] = (owner, value)
        elif live.has(value):
            at = worker_scope(worker) if id(value) in own else scope
            entries.append(Entry(names=(name,), scope=at, storage="persistent", tensor=value))
        else:
            foreign[name] = (key, value)
    entries += [
        Entry(names=(prefix + name,), scope=scope, storage="non-persistent", tensor=tensor)
        for name, tensor in _non_persistent(modules, paths)
    ]
    _refuse_double_names(entries, field)
    return ModuleView(
        module=module,
        scope=scope,
        entries=tuple(entries),
        parameters=_parameter_names(modules, paths, prefix),
        extra_states=extra_states,
        foreign=foreign,
    )


def find_claim_limits(module: torch.nn.Module) -> list[str]:
    """Return why a module can't go on bit for bit after a restart, whatever is restored.

    DistributedDataParallel sums its first step's gradients in other buckets than all later ones, unless it looks for
    unused parameters. A process that starts again thereby sums once in another order. Of two summands either order
    gives the same bits; of three it doesn't.

    Source: Reducer::should_rebuild_buckets in torch's reducer.hpp.
    """
    return [
        f"DistributedDataParallel{f' {name}' if name else ''} sums the first step after a start in other buckets than"
        " the others; find_unused_parameters=True keeps them"
        for name, part in module.named_modules()
        if isinstance(part, DistributedDataParallel)
        and (part.static_graph or not part.find_unused_parameters)
        and dist.get_world_size(part.process_group) > _ORDER_MATTERS_FROM
    ]


def merge_tied(entries: list[Entry]) -> list[Entry]:
    """Return entries of which each has memory of its own; what was tied has several names.

    Tied is what is the same object, or the same elements of the same memory.
    """
    # What lies at an address of its own is tied to nothing; of a tensor of its own kind that isn't told by address.
    addresses = [address_of(entry.tensor) if is_plain(entry.tensor) else None for entry in entries]
    if len(set(addresses)) == len(addresses) and None not in addresses:
        return list(entries)
    times = Counter(addresses)
    merged: dict[tuple[object, ...], Entry] = {}
    for entry, address in zip(entries, addresses, strict=True):
        alone = None not in times and times[address] == 1
        key = (entry.scope, id(entry.tensor) if alone else memory_of(entry.tensor) or id(entry.tensor))
        first = merged.get(key)
        if first is not None:
            names = (*first.names, *(name for name in entry.names if name not in first.names))
            entry = dataclasses.replace(first, names=names)  # noqa: PLW2901 - the entry that stands for both
        merged[key] = entry
    return list(merged.values())


def _state_dict(module: torch.nn.Module, where: str) -> dict[str, Any]:
    kind = f"{type(module).__module__}.{type(module).__qualname__}"
    try:
        with torch.no_grad():
            state_dict: dict[str, Any] = module.state_dict(keep_vars=True)
    except TypeError as error:
        raise err(
            Code.STATE_UNSUPPORTED,
            f"{kind}.state_dict can't be called as torch does: {error}",
            where=where,
            remedy="Let it take *args and **kwargs, and hand them on.",
        ) from error
    for name, value in state_dict.items():
        if torch.nn.parameter.is_lazy(value):
            raise err(
                Code.STATE_UNSUPPORTED,
                f"{kind} has a lazy parameter, which has no shape yet",
                where=f"{where}{name}",
                remedy="Run one forward pass first.",
            )
    return state_dict


class _Live:
    """The memory of the parameters and buffers of some modules."""

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        held = (tensors for module in modules for tensors in (module._parameters, module._buffers))  # noqa: SLF001
        self.tensors = [tensor for tensors in held for tensor in tensors.values() if tensor is not None]
        self.ids = set(map(id, self.tensors))

    @functools.cached_property
    def storages(self) -> set[tuple[object, object] | None]:
        """Where they lie; only a hook's tensors are looked for there."""
        return {storage_of(tensor) for tensor in self.tensors} - {None}

    def has(self, value: object) -> bool:
        """Tell whether writing to `value` writes to the module."""
        return id(value) in self.ids or (isinstance(value, torch.Tensor) and storage_of(value) in self.storages)


def _extra_state_owner(paths: Paths, key: str) -> torch.nn.Module | None:
    if key.rpartition(".")[2] != _EXTRA_STATE:
        return None
    owner = paths.holder_of(key)
    return None if owner is None or type(owner).get_extra_state is torch.nn.Module.get_extra_state else owner


def _parameter_names(
    modules: Iterable[tuple[str, torch.nn.Module]], paths: Paths, prefix: str
) -> dict[int, tuple[str, ...]]:
    names: dict[int, tuple[str, ...]] = {}
    for path, module in modules:
        for key, parameter in module._parameters.items():  # noqa: SLF001 - with the raw path, which wrappers rewrite
            if parameter is not None:
                name = prefix + paths.name_of(f"{path}.{key}" if path else key, raw=True)
                names[id(parameter)] = (*names.get(id(parameter), ()), name)
    return names


def _non_persistent(modules: Iterable[tuple[str, torch.nn.Module]], paths: Paths) -> Iterator[tuple[str, torch.Tensor]]:
    for path, module in modules:
        for key in sorted(module._non_persistent_buffers_set):  # noqa: SLF001 - torch has no public name for it
            buffer = module._buffers.get(key)  # noqa: SLF001
            if buffer is not None:
                yield paths.name_of(f"{path}.{key}" if path else key, raw=True), buffer


def _per_worker_buffers(root: torch.nn.Module) -> set[int]:
    """Return the ids of statistics that each data-parallel worker keeps for itself."""
    ids = set()
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # fully_shard keeps buffers as they are, on each rank
    wrappers = (DistributedDataParallel,) if fsdp is None else (DistributedDataParallel, fsdp.FSDPModule)
    for wrapper in root.modules():
        if not isinstance(wrapper, wrappers):
            continue
        for module in wrapper.modules():
            if isinstance(module, torch.nn.modules.batchnorm._NormBase) and not isinstance(  # noqa: SLF001
                module, torch.nn.SyncBatchNorm
            ):
                ids |= {id(buffer) for buffer in module.buffers(recurse=False)}
    return ids


def _refuse_fsdp1(root: torch.nn.Module, where: str) -> None:
    old: Any = sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel")
    if old is not None and any(isinstance(module, old.FullyShardedDataParallel) for module in root.modules()):
        raise err(
            Code.STATE_UNSUPPORTED,
            "a module wrapped in FullyShardedDataParallel (FSDP1)",
            where=where,
            remedy="Use FSDP2: torch.distributed.fsdp.fully_shard.",
        )


def _refuse_double_names(entries: list[Entry], field: str) -> None:
    for name, count in Counter(entry.names[0] for entry in entries).items():
        if count > 1:
            raise err(Code.STATE_NAME, "two tensors of a module have this name", where=place_of(field, name))


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
            plan.miss(field, live, _not_saved(live, names[0], tensor), shape=tuple(tensor.shape))
            continue
        fill(plan, tensor, saved, field=field, name=live)
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
            where = place_of(taken.field, name)
            plan.problem(Code.TENSOR_UNEXPECTED, where, f"tied to {taken.name} here, but saved with other contents")


def _not_saved(live: str, saved: str, tensor: torch.Tensor) -> str:
    renamed = "" if live == saved else f" as {saved}"
    return f"not saved{renamed} (shape here {tuple(tensor.shape)})"


def plan_module(plan: LoadPlan, view: ModuleView, field: str) -> None:
    """Plan to put back extra state and what hooks made; the entries are planned on their own."""
    for name, (owner, live) in view.extra_states.items():
        value = _saved_value(plan, field, name, view.scope, live)
        if value is not MISSING:
            _plan_extra_state(plan, owner, value, place_of(field, name))
    foreign = {}
    for name, (key, live) in view.foreign.items():
        value = _saved_value(plan, field, name, view.scope, live)
        if value is not MISSING:
            foreign[key] = value
    if foreign:
        plan.actions.append(lambda: _load_foreign(view.module, foreign, field))


def _saved_value(plan: LoadPlan, field: str, name: str, scope: str, live: object) -> Any:  # noqa: ANN401 - a tree
    """Return what was saved of a value or of a hook's tensor, `MISSING` where nothing is to be loaded."""
    chosen = plan.choose(field, [name])
    if not chosen:
        return MISSING
    if isinstance(live, torch.Tensor):
        tensor = plan.tensor(field, chosen, scope)
        if tensor is None:
            plan.miss(field, name, _not_saved(name, chosen[0], live), shape=tuple(live.shape))
            return MISSING
        reference = TensorRef(tensor.name, "torch")
        return Placer(plan, field=field, scope=tensor.scope).fresh(reference, tensor.name, live)
    found, at, saved = plan.leaf(field, chosen, scope)
    if saved is MISSING:
        plan.problem(Code.LEAF_MISSING, place_of(field, name), "not saved")
        return MISSING
    return Placer(plan, field=field, scope=at).fresh(saved, found, live)


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
        _check_read_back(fingerprints, after.get(key), place_of(field, key))


def _check_read_back(wanted: tuple[bytes, dict[str, bytes]], live: object, where: str) -> None:
    if fingerprint(live, field="weights", name="") != wanted:
        raise err(Code.READ_BACK, "the module returns another state than it was given", where=where)
