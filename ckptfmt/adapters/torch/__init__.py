"""The torch side: the functions that `ckptfmt.adapters` calls for torch objects."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import torch

from ckptfmt.adapters.live_trees import FLATTENED, Encoder
from ckptfmt.adapters.torch.arrivals import plan_arrivals
from ckptfmt.adapters.torch.devices import Devices
from ckptfmt.adapters.torch.fingerprints import (
    Fingerprint,
    digest_outside_modules,
    fetch,
    fetch_batch,
)
from ckptfmt.adapters.torch.frozen import split_frozen
from ckptfmt.adapters.torch.guard import Guard
from ckptfmt.adapters.torch.holders import (
    describe,
    is_copied,
    is_scaler,
    is_schedule,
    list_unheld,
    list_unheld_parts,
)
from ckptfmt.adapters.torch.loaders import (
    FollowedLoader,
    find_followed,
    follow_loader,
    is_loader,
)
from ckptfmt.adapters.torch.modules import (
    capture_entries,
    capture_module,
    find_claim_limits,
    generators_of,
    list_unsaved_parameters,
    merge_tied,
    plan_entry,
    plan_module,
    tensor_readers,
    view_module,
)
from ckptfmt.adapters.torch.optimizer_kinds import (
    is_numbered,
    is_plain_optimizer,
    iter_parameters,
    unwrap_optimizer,
)
from ckptfmt.adapters.torch.optimizers import capture_optimizer, plan_optimizer
from ckptfmt.adapters.torch.pair import Pair, find_rank
from ckptfmt.adapters.torch.runtime import (
    count_draws_outside,
    current_device,
    flags,
    generator_stream,
    global_streams,
    is_generator,
    local_facts,
    open_peers,
    seeded_state,
    versions,
    world_size,
)
from ckptfmt.adapters.torch.step_watch import StepWatch, watch_updates
from ckptfmt.adapters.torch.tensors import (
    allocate,
    declared_by,
    devices_of,
    dtype_name,
    flattened_form,
    inner_tensors,
    is_meta,
    is_registered,
    kind_of,
    meshes_of,
    register_flatten,
    sink_of,
    source_of,
    torch_dtype,
    unflatten,
)
from ckptfmt.data.sampler import Sampler
from ckptfmt.documents.tree import DeviceName, DtypeName, Size, TensorRef, dump_tree
from ckptfmt.errors import CkptError, Code, err
from ckptfmt.state import place_of

__all__ = ["register_flatten"]


def is_module(value: object) -> bool:
    """Return whether a value is a module."""
    return isinstance(value, torch.nn.Module)


def is_optimizer(value: object) -> bool:
    """Return whether a value is an optimizer, with any protocol."""
    return isinstance(value, torch.optim.Optimizer)


def is_of_every_optimizer(name: str) -> bool:
    """Return whether every torch optimizer has an attribute of this name.

    Such an attribute is saved, or never changes.
    """
    return name in _of_optimizers()


def list_optimizers(values: Iterable[object]) -> list[torch.optim.Optimizer]:
    """Return the optimizers among some objects."""
    return [value for value in values if isinstance(value, torch.optim.Optimizer)]


def list_parameters(value: object) -> list[torch.Tensor]:
    """Return the parameters of a module or of an optimizer; an empty list for other objects."""
    if isinstance(value, torch.nn.Module):
        return list(value.parameters())
    return list(iter_parameters(value)) if isinstance(value, torch.optim.Optimizer) else []


def iter_members(
    optimizer: torch.optim.Optimizer,
) -> Iterator[tuple[torch.Tensor, dict[str, object] | None]]:
    """Yield each parameter of an optimizer with the options; None instead for one with a state."""
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key != "params"}
        for parameter in group["params"]:
            yield parameter, None if optimizer.state.get(parameter) else options


def is_tensor(value: object) -> bool:
    """Return whether a value is a tensor, of any tensor class."""
    return isinstance(value, torch.Tensor)


@functools.cache
def _of_optimizers() -> frozenset[str]:
    """Return the names of the attributes that all optimizers have.

    The first call creates an optimizer, which imports torch._dynamo.
    """
    return frozenset(vars(torch.optim.SGD([torch.nn.Parameter(torch.empty(0))], lr=0.0)))


#: Types of plain tensors. A value of these types is neither a module nor an optimizer.
TENSOR_TYPES: Final[frozenset[type]] = frozenset({torch.Tensor, torch.nn.Parameter})
#: Samplers with a random order. Without a generator, the order comes from the default generator.
_SHUFFLING: Final = (
    torch.utils.data.RandomSampler,
    torch.utils.data.SubsetRandomSampler,
    torch.utils.data.WeightedRandomSampler,
)
#: Classes that supply batches and have no position to save.
_LOADERS: Final = (
    torch.utils.data.DataLoader,
    torch.utils.data.dataloader._BaseDataLoaderIter,  # noqa: SLF001
    torch.utils.data.Sampler,
    torch.utils.data.Dataset,
)


def is_plain_loader(value: object) -> bool:
    """Return whether a value is a part of torch's data loading without a `state_dict`.

    The loaders of torchdata have a `state_dict`.
    """
    return isinstance(value, _LOADERS) and not hasattr(value, "state_dict")


def has_shuffling_sampler() -> bool:
    """Return whether a live torch sampler takes its order from the default random numbers.

    A DataLoader with ``shuffle=True`` has such a sampler. The search covers all objects of the
    process and takes a few milliseconds per million objects.
    """
    referring = gc.get_referrers(*_SHUFFLING)
    return any(
        type(value) in _SHUFFLING and getattr(value, "generator", None) is None
        for value in referring
    )


def is_iterable_dataset(value: object) -> bool:
    """Return whether a value is an iterable dataset, which has no access by index."""
    return isinstance(value, torch.utils.data.IterableDataset)


def is_worker_process() -> bool:
    """Return whether this process is a worker process of a DataLoader."""
    return torch.utils.data.get_worker_info() is not None


def position_of(value: Any, *, where: str) -> FollowedLoader:
    """Return the position of a DataLoader, which is followed from now on.

    Raises: StateError(STATE_UNSUPPORTED, ARGUMENT).
    """
    if not is_loader(value) or isinstance(value.batch_sampler, Sampler):
        raise loader_error(value, where=where)
    return follow_loader(value, where=where)


def loader_error(value: Any, *, where: str) -> CkptError:
    """Return the error for a DataLoader or a part of a DataLoader, with a remedy."""
    stages = getattr(value, "pipeline", None)
    if isinstance(getattr(value, "batch_sampler", None), Sampler):
        remedy = "Give the sampler that it was made with: State(data=loader.batch_sampler)."
    elif isinstance(stages, list) and stages and is_loader(stages[0]):
        remedy = (
            f"Give the DataLoader in the {type(value).__name__}: State(data=loader.pipeline[0]);"
            " shuffle and batch in the data set, not in later stages."
        )
    else:
        remedy = "Give the DataLoader that the loop iterates over: State(data=loader)."
    return err(
        Code.STATE_UNSUPPORTED,
        f"a {type(value).__name__} doesn't say where it stands",
        where=where,
        remedy=remedy,
    )


def encode(encoder: Encoder, value: object, name: str) -> object:
    """Return the tree of a torch object; other values and an inline encoder's tensors unchanged.

    Raises: StateError(STATE_UNSUPPORTED).
    """
    if isinstance(value, torch.Tensor):
        return value if encoder.inline else _encode_tensor(encoder, value, name)
    if isinstance(value, torch.dtype):
        return DtypeName(dtype_name(value, where=place_of(encoder.field, name)))
    if isinstance(value, torch.device):
        return DeviceName(str(value))
    if isinstance(value, torch.Size):
        return Size(tuple(value))
    return value


def _encode_tensor(encoder: Encoder, value: torch.Tensor, name: str) -> object:
    if not is_registered(value):
        encoder.sources.append(
            source_of(value, field=encoder.field, name=name, scope=encoder.scope)
        )
        return TensorRef(name, "torch")
    parts = inner_tensors(value, name)
    encoder.sources += [
        source_of(tensor, field=encoder.field, name=inner, scope=encoder.scope)
        for inner, tensor in parts
    ]
    references = {inner.removeprefix(f"{name}/"): TensorRef(inner, "torch") for inner, _ in parts}
    return {FLATTENED: _form_of(encoder, value, name), **references}


def _form_of(encoder: Encoder, value: Any, name: str) -> object:
    """Return a tree from which a load can create the tensor.

    If a load can only fill a live tensor, the result is the name of the tensor's class.
    """
    if any(is_registered(getattr(value, key)) for key in value.__tensor_flatten__()[0]):
        return kind_of(type(value))  # an inner tensor is of a registered class, too
    plain = Encoder(field=encoder.field, scope=encoder.scope, inline=True)
    try:
        form = plain.encode(flattened_form(value), name)
        dump_tree(form, where=name)
    except CkptError:
        return kind_of(type(value))
    return form


def decode(value: Any) -> Any:
    """Return the dtype, device or size that a tree names.

    Raises: StateError(STATE_UNSUPPORTED).
    """
    if isinstance(value, DtypeName):
        return torch_dtype(value.name)
    return torch.device(value.name) if isinstance(value, DeviceName) else torch.Size(value.shape)
