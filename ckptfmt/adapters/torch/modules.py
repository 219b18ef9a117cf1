"""Save and restore modules: parameters, buffers, extra state, and state_dict entries of hooks.

A load fills live tensors in place. Other values are restored by the module's own hooks.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ckptfmt.adapters.live_trees import Encoder, fingerprint, worker_scope
from ckptfmt.adapters.load_plan import MISSING, LoadPlan
from ckptfmt.adapters.placing import Placer, fill
from ckptfmt.adapters.torch.optimizer_kinds import iter_parameters
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

#: Wrapper classes, each with the attribute that holds the wrapped module.
_WRAPPERS: Final = (
    ("torch.nn.parallel.distributed", "DistributedDataParallel", "module"),
    ("torch.nn.parallel.data_parallel", "DataParallel", "module"),
    ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod"),
    (
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "ActivationWrapper",
        "_checkpoint_wrapped_module",
    ),
)
#: The attribute of wrappers that remove this attribute from the keys of a state_dict themselves.
_TAKEN_OUT: Final = "_checkpoint_wrapped_module"


class Paths:
    """A resolver of paths within a module, valid while the module's structure is unchanged.

    Without wrappers, the common case, each path is already a name.

    Args:
        root: the module at which paths begin, wrapped or not.
    """

    def __init__(self, root: torch.nn.Module) -> None:
        self._root = root
        loaded = (
            (getattr(sys.modules.get(module), name, None), attribute)
            for module, name, attribute in _WRAPPERS
        )
        self._wrappers = [(kind, attribute) for kind, attribute in loaded if kind is not None]
        self._attributes: dict[type, str | None] = {}
        self._wraps = any(self._attribute(module) is not None for module in _all_modules(root))

    def name_of(self, path: str, *, raw: bool) -> str:
        """Return the name of the item at `path`, without wrappers.

        Args:
            path: a path of attributes.
            raw: whether the path contains all wrapper attributes. If false, the path is a key of a
                state_dict, from which some wrappers have removed their attribute.
        """
        return self._walk(path, raw=raw)[1] if self._wraps else path

    def holder_of(self, key: str) -> torch.nn.Module | None:
        """Return the unwrapped module that holds the state_dict entry `key`."""
        return self._walk(key, raw=False)[0]

    def _walk(self, path: str, *, raw: bool) -> tuple[torch.nn.Module | None, str]:
        holder: torch.nn.Module | None = None
        module: torch.nn.Module | None = self._root
        names = []
        for part in path.split("."):
            attribute = self._attribute(module)
            if module is not None and attribute == part and (raw or attribute != _TAKEN_OUT):
                module = module._modules.get(part)  # noqa: SLF001
                continue
            while module is not None and attribute is not None:
                module = module._modules.get(attribute)  # noqa: SLF001
                attribute = self._attribute(module)
            holder = module
            names.append(part)
            module = None if module is None else module._modules.get(part)  # noqa: SLF001
        return holder, ".".join(names)

    def _attribute(self, module: torch.nn.Module | None) -> str | None:
        """Return a wrapper's attribute for the wrapped module; None for other modules."""
        kind = type(module)
        if kind not in self._attributes:
            found = (
                attribute for wrapper, attribute in self._wrappers if isinstance(module, wrapper)
            )
            self._attributes[kind] = next(found, None)
        return self._attributes[kind]


def _all_modules(root: torch.nn.Module) -> list[torch.nn.Module]:
    """Return all submodules, including those that an overridden `modules` method hides."""
    found = {id(root): root}
    waiting = [root]
    while waiting:
        parts = waiting.pop()._modules.values()  # noqa: SLF001
        new = [part for part in parts if part is not None and id(part) not in found]
        found |= {id(part): part for part in new}
        waiting += new
    return list(found.values())


def tensor_readers(module: torch.nn.Module) -> list[tuple[str, Callable[[], torch.Tensor | None]]]:
    """Return the places of parameters and buffers of a module, each with a function to read."""
    found: dict[int, tuple[str, Callable[[], torch.Tensor | None]]] = {}
    for path, part in module.named_modules():
        for tensors in (part._parameters, part._buffers):  # noqa: SLF001
            for name, tensor in tensors.items():
                if tensor is not None:
                    place = ".".join(filter(None, (path, name)))
                    found.setdefault(id(tensor), (place, functools.partial(tensors.get, name)))
    return list(found.values())


#: Types of most attributes of a module, which the search for generators passes over.
_NO_GENERATORS: Final[frozenset[type]] = frozenset(
    {bool, int, float, str, type(None), dict, OrderedDict, list, set, tuple}
)


def generators_of(
    module: torch.nn.Module, is_generator: Callable[[object], bool]
) -> list[tuple[str, object]]:
    """Return the generators in attributes of modules, each with its path without wrappers.

    Args:
        module: the root of the modules.
        is_generator: whether a value is a generator whose state can be saved.
    """
    paths: Paths | None = None
    found = []
    for path, part in module.named_modules():
        for name, value in part.__dict__.items():
            if type(value) not in _NO_GENERATORS and is_generator(value):
                paths = paths or Paths(module)
                found.append((".".join(filter(None, (paths.name_of(path, raw=True), name))), value))
    return found


#: With more processes than this, a sum depends on the order of the summands.
_ORDER_MATTERS_FROM: Final = 2
_EXTRA_STATE: Final = "_extra_state"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Entry:
    """A live tensor of a module. The first of `names` is the first in the order of state_dict."""

    names: tuple[str, ...]
    scope: str
    storage: str
    tensor: torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModuleView:
    """A snapshot of a module's contents.

    Attributes:
        module: the given module, wrapped or not.
        scope: the scope of all values outside of `entries`.
        entries: live parameters and buffers, each with its own scope.
        parameters: all names of each live parameter by its id, saved or not, for optimizers.
        extra_states: for each name, the module with get_extra_state, and the value.
        foreign: for each name, key and value of a state_dict entry that isn't a live tensor. Hooks
            create such entries.
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
    """Return a snapshot of a module's contents.

    Args:
        module: the module. Wrappers don't appear in the names.
        field: the module's field, for messages.
        prefix: the prefix of the names.
        scope: the scope of the tensors. Tensors that each worker of a data-parallel module keeps
            for itself have the worker's scope.
        worker: the number of this worker.
        worker_count: the number of workers.

    Raises: StateError(STATE_UNSUPPORTED, STATE_NAME).
    """
    _refuse_fsdp1(module, place_of(field, prefix))
    # This call comes first, at each save: it also reshards FSDP2's parameters after an evaluation.
    state_dict = _state_dict(module, f"{field}:{prefix}")
    # All paths of each module, computed once: torch would walk the modules at each query.
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
    """Return the reasons for which a module can't continue bit for bit after a restart.

    DistributedDataParallel uses other buckets for the gradient sums of the first step than for
    later steps, unless it searches for unused parameters. A restarted process therefore sums once
    in another order. The sum of two values doesn't depend on the order; the sum of three or more
    does.

    Source: Reducer::should_rebuild_buckets in torch's reducer.hpp.
    """
    return [
        f"DistributedDataParallel{f' {name}' if name else ''} sums the first step after a start"
        " in other buckets than"
        " the others; find_unused_parameters=True keeps them"
        for name, part in module.named_modules()
        if isinstance(part, DistributedDataParallel)
        and (part.static_graph or not part.find_unused_parameters)
        and dist.get_world_size(part.process_group) > _ORDER_MATTERS_FROM
    ]


def list_unsaved_parameters(
    views: Iterable[ModuleView], optimizers: Iterable[torch.optim.Optimizer]
) -> list[str]:
    """Return the names of trained parameters that the modules' state_dict leaves out.

    A hook on state_dict, or an own state_dict, may leave parameters out.

    Args:
        views: the modules of a State.
        optimizers: the optimizers of the State.
    """
    views = list(views)
    trained = itertools.chain.from_iterable(map(iter_parameters, optimizers))
    saved = {id(entry.tensor) for view in views for entry in view.entries}
    names = {number: found for view in views for number, found in view.parameters.items()}
    left = [one for one in trained if id(one) not in saved and id(one) in names]
    if not left:
        return []
    memory = {storage_of(entry.tensor) for view in views for entry in view.entries} - {None}
    return [names[id(one)][0] for one in left if storage_of(one) not in memory]


def merge_tied(entries: list[Entry]) -> list[Entry]:
    """Return entries with distinct memory. Tied entries are merged and have several names.

    Entries are tied if they are the same object, or the same elements of the same memory.
    """
    # A plain tensor with a unique address isn't tied. Tensors of other classes aren't compared by
    # address.
    addresses = [address_of(entry.tensor) if is_plain(entry.tensor) else None for entry in entries]
    if len(set(addresses)) == len(addresses) and None not in addresses:
        return list(entries)
    times = Counter(addresses)
    merged: dict[tuple[object, ...], Entry] = {}
    for entry, address in zip(entries, addresses, strict=True):
        alone = None not in times and times[address] == 1
        key = (
            entry.scope,
            id(entry.tensor) if alone else memory_of(entry.tensor) or id(entry.tensor),
        )
        first = merged.get(key)
        if first is not None:
            names = (*first.names, *(name for name in entry.names if name not in first.names))
            entry = dataclasses.replace(first, names=names)  # noqa: PLW2901
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
        self.tensors = [
            tensor for tensors in held for tensor in tensors.values() if tensor is not None
        ]
        self.ids = set(map(id, self.tensors))

    @functools.cached_property
    def storages(self) -> set[tuple[object, object] | None]:
        """The keys of the tensors' storages. Only tensors of hooks need this slower search."""
        return {storage_of(tensor) for tensor in self.tensors} - {None}

    def has(self, value: object) -> bool:
        """Return whether a write to `value` changes the module."""
        return id(value) in self.ids or (
            isinstance(value, torch.Tensor) and storage_of(value) in self.storages
        )


def _extra_state_owner(paths: Paths, key: str) -> torch.nn.Module | None:
    if key.rpartition(".")[2] != _EXTRA_STATE:
        return None
    owner = paths.holder_of(key)
    return (
        None
        if owner is None or type(owner).get_extra_state is torch.nn.Module.get_extra_state
        else owner
    )


def _parameter_names(
    modules: Iterable[tuple[str, torch.nn.Module]], paths: Paths, prefix: str
) -> dict[int, tuple[str, ...]]:
    names: dict[int, tuple[str, ...]] = {}
    for path, module in modules:
        for key, parameter in module._parameters.items():  # noqa: SLF001
            if parameter is not None:
                name = prefix + paths.name_of(f"{path}.{key}" if path else key, raw=True)
                names[id(parameter)] = (*names.get(id(parameter), ()), name)
    return names


def _non_persistent(
    modules: Iterable[tuple[str, torch.nn.Module]], paths: Paths
) -> Iterator[tuple[str, torch.Tensor]]:
    for path, module in modules:
        for key in sorted(module._non_persistent_buffers_set):  # noqa: SLF001
            buffer = module._buffers.get(key)  # noqa: SLF001
            if buffer is not None:
                yield paths.name_of(f"{path}.{key}" if path else key, raw=True), buffer


def _per_worker_buffers(root: torch.nn.Module) -> set[int]:
    """Return the ids of statistics buffers that each data-parallel worker keeps for itself."""
    ids = set()
    # fully_shard leaves buffers unsharded, on each rank
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    wrappers = (
        (DistributedDataParallel,) if fsdp is None else (DistributedDataParallel, fsdp.FSDPModule)
    )
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
    if old is not None and any(
        isinstance(module, old.FullyShardedDataParallel) for module in root.modules()
    ):
        raise err(
            Code.STATE_UNSUPPORTED,
            "a module wrapped in FullyShardedDataParallel (FSDP1)",
            where=where,
            remedy="Use FSDP2: torch.distributed.fsdp.fully_shard.",
        )


def _refuse_double_names(entries: list[Entry], field: str) -> None:
    for name, count in Counter(entry.names[0] for entry in entries).items():
        if count > 1:
            raise err(
                Code.STATE_NAME,
                "two tensors of a module have this name",
                where=place_of(field, name),
            )


def capture_entries(entries: Iterable[Entry], field: str) -> list[TorchSource]:
    """Return the sources of live tensors. A tied tensor has a single source with all its names.

    Raises: StateError(STATE_UNSUPPORTED).
    """
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
    """Return the leaves of extra state and of hooks' entries.

    Tensors become sources of the encoder.
    """
    leaves = [encoder.leaf(name, value) for name, (_, value) in view.extra_states.items()]
    for name, (_, value) in view.foreign.items():
        if isinstance(value, torch.Tensor):
            encoder.encode(value, name)
        else:
            leaves.append(encoder.leaf(name, value))
    return leaves


def plan_entry(plan: LoadPlan, entry: Entry, field: str) -> None:
    """Plan to fill a live tensor of a module from the first of its names that was saved."""
    chosen = plan.choose(field, entry.names)
    for index, (_, tensor) in enumerate(inner_tensors(entry.tensor, "") if chosen else ()):
        live, *_ = inner_tensors(entry.tensor, entry.names[0])[index]
        names = [inner_tensors(entry.tensor, name)[index][0] for name in chosen]
        saved = plan.tensor(field, names, entry.scope)
        if entry.storage == "non-persistent" and (
            saved is None or saved.global_shape != tuple(tensor.shape)
        ):
            # For torch a non-persistent buffer is a cache that the module recomputes.
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
    """Take the saved tensors that were separate at the save and are tied now.

    Different contents become a problem, since they would be lost silently.
    """
    for name in names:
        other = plan.checkpoint.find(taken.field, name, taken.scope)
        if other is None or other.key in plan.taken_tensors:
            continue
        plan.taken_tensors.add(other.key)
        same = (other.dtype, other.global_shape) == (taken.dtype, taken.global_shape)
        if (
            not same
            or plan.checkpoint.read(*other.key).tobytes()
            != plan.checkpoint.read(*taken.key).tobytes()
        ):
            where = place_of(taken.field, name)
            plan.problem(
                Code.TENSOR_UNEXPECTED,
                where,
                f"tied to {taken.name} here, but saved with other contents",
            )


def _not_saved(live: str, saved: str, tensor: torch.Tensor) -> str:
    renamed = "" if live == saved else f" as {saved}"
    return f"not saved{renamed} (shape here {tuple(tensor.shape)})"


def plan_module(plan: LoadPlan, view: ModuleView, field: str) -> None:
    """Plan to restore extra state and hooks' entries, and to run the module's own code of loads.

    The tensors in `entries` are planned separately.
    """
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
    elif _has_code_of_loads(view.module) and any(
        plan.only.fits(field, name) for entry in view.entries for name in entry.names
    ):
        plan.actions.append(lambda: _run_code_of_loads(view.module, field))


def _saved_value(plan: LoadPlan, field: str, name: str, scope: str, live: object) -> Any:
    """Return the saved value of an entry.

    Returns: `MISSING` if the entry isn't selected, or wasn't saved.
    """
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
    # A complete state_dict, since hooks may read several keys. Live tensors are copied onto
    # themselves.
    module.load_state_dict({**module.state_dict(), **foreign})
    with torch.no_grad():
        after = module.state_dict()
    for key, fingerprints in wanted.items():
        _check_read_back(fingerprints, after.get(key), place_of(field, key))


def _has_code_of_loads(module: torch.nn.Module) -> bool:
    """Return whether classes or hooks outside of torch have code that runs in load_state_dict."""
    functions: list[object] = [type(module).load_state_dict]
    for part in _all_modules(module):
        functions.append(type(part)._load_from_state_dict)  # noqa: SLF001
        for name in ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"):
            hooks = getattr(part, name, {}).values()
            functions += [getattr(hook, "hook", hook) for hook in hooks]
    return any(_is_foreign(function) for function in functions)


def _is_foreign(function: object) -> bool:
    return str(getattr(function, "__module__", "")).partition(".")[0] != "torch"


def _run_code_of_loads(module: torch.nn.Module, field: str) -> None:
    """Run a module's load_state_dict after the tensors are filled: they are copied onto themselves.

    A hook may set an attribute, for example, or compute a buffer that isn't saved.
    """
    strict = {} if _is_foreign(type(module).load_state_dict) else {"strict": False}
    try:
        module.load_state_dict(module.state_dict(), **strict)
    except Exception as error:
        error.add_note(f"ckptfmt: raised by the load_state_dict of the module in {field}")
        raise


def _check_read_back(wanted: tuple[bytes, dict[str, bytes]], live: object, where: str) -> None:
    if fingerprint(live, field="weights", name="") != wanted:
        raise err(Code.READ_BACK, "the module returns another state than it was given", where=where)
