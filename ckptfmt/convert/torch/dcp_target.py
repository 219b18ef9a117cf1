"""A directory of torch.distributed.checkpoint as the target of a conversion, in one process."""

from __future__ import annotations

import dataclasses
import io
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import _nested_dict
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save

from ckptfmt.adapters.torch.tensors import TORCH_DTYPES
from ckptfmt.box import Box
from ckptfmt.convert.content import LeftOut, Memory, Tensor, map_tree
from ckptfmt.dtypes import DTYPES
from ckptfmt.errors import Code, err


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Flat:
    """What a directory will hold.

    Attributes:
        state_dict: nested, its tensors on the meta device.
        tensors: by the flattened name.
        left_out: what comes back otherwise.
    """

    state_dict: dict[str, Any]
    tensors: dict[str, Tensor]
    left_out: list[LeftOut]


def plan_flat(root: dict[str, Any]) -> Flat:
    """Flatten a mapping as torch does, and say what of it comes back otherwise.

    Raises: StateError(STATE_NAME) where two paths become one name.
    """
    tied: dict[int, str] = {}
    left_out: list[LeftOut] = []

    def placeholder(value: object, path: str) -> object:
        if not isinstance(value, Tensor):
            return value
        if value.nbytes and tied.setdefault(id(value), path) != path:
            left_out.append(LeftOut(path, f"tied to {tied[id(value)]}, and stored a second time"))
        return _Named(value)

    named = map_tree(root, placeholder)
    metas = map_tree(named, lambda value, _: value.meta if isinstance(value, _Named) else value)
    # Torch pickles a tuple as it is, with whatever tensors are in it.
    lists = _tuples_of_tensors_as_lists(metas)
    try:
        flat, paths = _nested_dict.flatten_state_dict(lists)
    except ValueError as error:
        remedy = "Convert it to a torch.save file, which keeps nested names, or one field of it with --only."
        raise err(Code.STATE_NAME, f"torch joins names with dots: {error}", where="", remedy=remedy) from None
    by_meta = {id(value.meta): value.tensor for value in _all_named(named)}
    tensors = {name: by_meta[id(value)] for name, value in flat.items() if id(value) in by_meta}
    assert len(tensors) == len(by_meta)  # noqa: S101 - else a placeholder would be pickled in a tensor's place
    left_out += _differences(metas, _nested_dict.unflatten_state_dict(flat, paths), "")
    return Flat(state_dict=lists, tensors=tensors, left_out=left_out)


def _tuples_of_tensors_as_lists(value: Any) -> Any:  # noqa: ANN401 - a tree
    if isinstance(value, dict):
        return type(value)((key, _tuples_of_tensors_as_lists(item)) for key, item in value.items())
    if not isinstance(value, list | tuple):
        return value
    items = [_tuples_of_tensors_as_lists(item) for item in value]
    return items if isinstance(value, list) or _has_tensors(items) else value


def _has_tensors(value: object) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    return any(map(_has_tensors, value)) if isinstance(value, list) else isinstance(value, torch.Tensor)


class _Named:
    """A tensor of the content, with its placeholder on the meta device."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.meta = torch.empty(tensor.global_shape, dtype=TORCH_DTYPES[tensor.dtype], device="meta")


def _all_named(root: object) -> list[_Named]:
    found: list[_Named] = []
    map_tree(root, lambda value, _: found.append(value) if isinstance(value, _Named) else None)
    return found


def _differences(before: Any, after: Any, path: str) -> list[LeftOut]:  # noqa: ANN401 - trees
    """Return where a tree isn't the same any more: torch knows dicts with strings as keys, and lists."""
    if isinstance(before, torch.Tensor) or before is after:
        return []
    found = []
    if type(before) is not type(after):
        found.append(LeftOut(path, f"a {type(before).__name__} comes back as a {type(after).__name__}"))
    if isinstance(before, dict) and isinstance(after, dict):
        for key, item in before.items():
            below = f"{path}/{key}" if path else str(key)
            if str(key) not in after:
                found.append(LeftOut(below, "what is empty doesn't come back"))
                continue
            if type(key) is not str:
                found.append(LeftOut(below, "a key that isn't a string comes back as one"))
            found += _differences(item, after[str(key)], below)
    elif isinstance(before, list | tuple) and isinstance(after, list | tuple):
        for index, (item, other) in enumerate(zip(before, after, strict=False)):
            found += _differences(item, other, f"{path}/{index}")
    return found


def write_directory(path: Path, flat: Flat, *, on_progress: Callable[[int], None]) -> None:
    """Write a directory with torch's own writer, which is given a chunk of a tensor at a time.

    Raises: OSError; what reading the source raises.
    """
    planner = _StreamingPlanner(flat.tensors, on_progress)
    writer = FileSystemWriter(path, per_thread_copy_ahead=0, overwrite=False)
    logger = logging.getLogger("torch.distributed.checkpoint")
    level = logger.level
    try:
        logger.setLevel(logging.ERROR)
        save(flat.state_dict, storage_writer=writer, planner=planner, no_dist=True)
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from error
    finally:
        logger.setLevel(level)


class _StreamingPlanner(DefaultSavePlanner):
    """Cuts tensors into chunks, and reads each just when it is written."""

    def __init__(self, tensors: dict[str, Tensor], on_progress: Callable[[int], None]) -> None:
        super().__init__()
        self._tensors = tensors
        self._on_progress = on_progress
        self._memory = Memory()

    def create_local_plan(self) -> SavePlan:
        """Return torch's plan with several items for each large tensor."""
        plan = super().create_local_plan()
        self.plan = dataclasses.replace(plan, items=[piece for item in plan.items for piece in self._cut(item)])
        return self.plan

    def _cut(self, item: WriteItem) -> list[WriteItem]:
        if item.type is WriteItemType.BYTE_IO or item.tensor_data is None:
            return [item]
        boxes = list(self._tensors[item.index.fqn].iter_chunks())
        if len(boxes) == 1:
            return [item]
        pieces = []
        for box in boxes:
            chunk = dcp_metadata.ChunkStorageMetadata(torch.Size(box.begin), torch.Size(box.shape))
            data = dataclasses.replace(item.tensor_data, chunk=chunk)
            index = dcp_metadata.MetadataIndex(item.index.fqn, chunk.offsets)
            pieces.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))
        return pieces

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Return the elements of a chunk, until the next is asked for: torch's writer keeps all that it is given."""
        if write_item.type is WriteItemType.BYTE_IO or write_item.tensor_data is None:
            return super().resolve_data(write_item)
        tensor, chunk = self._tensors[write_item.index.fqn], write_item.tensor_data.chunk
        box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
        out = self._memory.take(box.element_count * DTYPES[tensor.dtype].nbytes)
        tensor.copy_into(box, out)
        self._on_progress(out.nbytes)
        dtype = TORCH_DTYPES[tensor.dtype]
        if not out.nbytes:
            return torch.empty(chunk.sizes, dtype=dtype)
        return torch.frombuffer(out, dtype=torch.uint8).view(dtype).reshape(chunk.sizes)
