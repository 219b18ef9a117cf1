"""torch.distributed.checkpoint saves to and loads from checkpoints of ckptfmt.

    dcp.save(state_dict, storage_writer=CkptfmtWriter("step-1200"))
    dcp.load(state_dict, storage_reader=CkptfmtReader("step-1200"))

What is written is an ordinary checkpoint. A state_dict ``{"model": ..., "optim": ...}`` goes to the fields weights and
optimizer, under the names that `ckptfmt.State` gives; everything else goes to ``extra``. DCP restores no random
numbers, so the field rng is absent.
"""

from __future__ import annotations

import dataclasses
import io
import operator
import os
import pickle
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final, TypeAlias, TypeVar

import torch
from torch.distributed.checkpoint import metadata as meta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

import ckptfmt

#: Keys of a state_dict whose contents are the field of that name.
_FIELDS: Final = {
    **dict.fromkeys(("model", "module", "weights", "state_dict", "model_state_dict"), "weights"),
    **dict.fromkeys(("optim", "optimizer", "optimizer_state_dict"), "optimizer"),
}
#: The value in which a checkpoint says where in the state_dict each of its entries was.
_PATHS: Final = "dcp"
#: What the names of values begin with that are kept as pickles.
_PICKLE: Final = "pickle:"
#: The keys under which a checkpoint's fields are found that DCP didn't write.
_OWN: Final = {"weights": "model", "optimizer": "optim"}
_NO_RNG: Final = "DCP saves no random numbers"
_TRAILING_NUMBER: Final = re.compile(r"([0-9]+)$")
_Path: TypeAlias = str | os.PathLike[str]
_Plan = TypeVar("_Plan", SavePlan, LoadPlan)
_Result = TypeVar("_Result")


class _AtPath:
    """What writer and reader have alike: the path of a checkpoint, and nothing to add to one rank's plan."""

    def __init__(self, path: _Path) -> None:
        self.checkpoint_id = os.fspath(path)

    def reset(self, checkpoint_id: _Path | None = None) -> None:
        """Begin another save or load; its path stands above the one before."""
        self.checkpoint_id = self.checkpoint_id if checkpoint_id is None else os.fspath(checkpoint_id)

    def prepare_local_plan(self, plan: _Plan) -> _Plan:
        """Return the plan as it is."""
        return plan

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: _Path) -> bool:
        """Tell whether this can be a checkpoint's path."""
        return isinstance(checkpoint_id, str | os.PathLike)


class CkptfmtWriter(_AtPath, StorageWriter):
    """Where `dcp.save` and `dcp.async_save` write: a directory that becomes one checkpoint.

    Args:
        path: of the checkpoint; ``checkpoint_id=`` of the call stands above it.
        step: training steps done; by default the number in which the path ends, else 0.
        allow_pickle: whether objects that are no plain values are kept as pickles, which `CkptfmtReader` loads only
            with the same option. By default they are refused by name, before anything is written.

    Raises: `ckptfmt.CkptError`; CHECKPOINT_EXISTS where the directory holds a checkpoint already.
    """

    def __init__(self, path: _Path = "", *, step: int | None = None, allow_pickle: bool = False) -> None:
        super().__init__(path)
        self._step = step
        self._allow_pickle = allow_pickle
        self._paths: dict[str, tuple[Any, ...]] = {}
        self._attempt: ckptfmt.SaveAttempt | None = None

    def set_up_storage_writer(self, is_coordinator: bool, *_args: Any, **kwargs: Any) -> None:  # noqa: ANN401, ARG002, FBT001
        """Take note of who calls. Raises: NotImplementedError without collectives: then nobody could commit."""
        if not kwargs.get("use_collectives", True):
            raise NotImplementedError("ckptfmt commits once for all ranks: call dcp.save with use_collectives=True")

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Begin the attempt, on the coordinator, and tell it to all ranks along with their plans.

        Raises: NotImplementedError for cached plans, with which nothing can be told; ValueError for names that the
            checkpoint can't keep apart.
        """
        if not all(plan.usable for plan in plans):
            raise NotImplementedError("a cached plan can't carry a save's id: use a planner without plan caching")
        self._paths = {fqn: path for plan in plans for fqn, path in _paths_of(plan).items()}
        _check_names(self._paths)
        number = _TRAILING_NUMBER.search(self.checkpoint_id.rstrip("/"))
        step = self._step if self._step is not None else int(number[1]) if number else 0
        self._attempt = ckptfmt.SaveAttempt.begin(step=step, writer_count=len(plans))
        told = self._attempt.dump(), _heads_alone(self._paths.values())
        return [dataclasses.replace(plan, storage_data=(*told, writer)) for writer, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's part; durable when this returns."""
        told, alone, writer = plan.storage_data
        paths = _paths_of(plan)
        pieces: dict[str, dict[tuple[int, ...], torch.Tensor]] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        extra: dict[str, object] = {}
        if writer == 0:
            extra[_PATHS] = {fqn: list(path) for fqn, path in self._paths.items()}
        for item in plan.items:
            fqn = item.index.fqn
            data = planner.resolve_data(item)
            if isinstance(data, io.BytesIO):
                extra |= self._value_of(fqn, data)
            elif item.tensor_data is not None:
                pieces.setdefault(fqn, {})[tuple(item.tensor_data.chunk.offsets)] = data.detach()
                shapes[fqn] = tuple(item.tensor_data.size)
        given: dict[str, dict[str, object]] = {"weights": {}, "optimizer": {}}
        for fqn, held in pieces.items():
            field, name = _place_of(paths[fqn], alone)
            given[field][name] = ckptfmt.source_of(name, held, field=field, global_shape=shapes[fqn])
        weights, optimizer = given["weights"], given["optimizer"]
        state = ckptfmt.State(weights=weights, optimizer=optimizer, extra=extra, rng=False, absent={"rng": _NO_RNG})
        record = ckptfmt.SaveAttempt.parse(told).write_part(self.checkpoint_id, state, writer=writer)
        return _done([WriteResult(index=meta.MetadataIndex(_PATHS), size_in_bytes=0, storage_data=record)])

    def _value_of(self, fqn: str, content: io.BytesIO) -> dict[str, object]:
        """Return the value that a planner has pickled, under its name."""
        content.seek(0)
        try:
            return {fqn: torch.load(content, weights_only=True, map_location="cpu")}
        except pickle.UnpicklingError as error:
            if self._allow_pickle:
                return {_PICKLE + fqn: content.getvalue()}
            raise TypeError(f"{fqn} is no plain value; pass allow_pickle=True to keep it as a pickle") from error

    def finish(self, metadata: meta.Metadata, results: list[list[WriteResult]]) -> None:
        """Commit, on the coordinator: the checkpoint is durable when this returns."""
        assert self._attempt is not None  # noqa: S101 - prepare_global_plan ran on the coordinator
        self._attempt.commit(self.checkpoint_id, [result.storage_data for of_rank in results for result in of_rank])
        metadata.storage_data = {}


class CkptfmtReader(_AtPath, StorageReader):
    """Where `dcp.load` reads: a checkpoint, or the newest of a run, whoever saved it.

    Args:
        path: of the checkpoint or run; ``checkpoint_id=`` of the call stands above it.
        allow_pickle: whether objects that `CkptfmtWriter` kept as pickles are loaded: that runs what is in them.

    Of a checkpoint that DCP didn't write, the weights are found under ``model.``, everything else under its field.

    Raises: `ckptfmt.CkptError`: every byte that is read is verified.
    """

    def __init__(self, path: _Path = "", *, allow_pickle: bool = False) -> None:
        super().__init__(path)
        self._allow_pickle = allow_pickle
        self._tensors: dict[str, tuple[str, str, Any]] = {}
        self._pickled: set[str] = set()
        self._path = self._digest = ""

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> meta.Metadata:  # noqa: ANN401
        """Return what there is, for the planner."""
        with ckptfmt.open(self.checkpoint_id) as checkpoint:
            # Of a run, its newest may be another one soon: this one is read to the end.
            self._path, self._digest = checkpoint.store.name, checkpoint.digest
            paths = _read_paths(checkpoint)
            kept = {name for _, name, _ in checkpoint.leaves}
            self._pickled = {fqn for fqn in paths if _value_name(_PICKLE + fqn) in kept}
            tensors = {(field, name): handle for field in _OWN for name, handle in checkpoint.field(field).items()}
        alone = _heads_alone(paths.values())
        self._tensors = {
            fqn: (*place, tensors[place]) for fqn, path in paths.items() if (place := _place_of(path, alone)) in tensors
        }
        named = {(field, name) for field, name, _ in self._tensors.values()}
        for (field, name), handle in tensors.items():
            if (field, name) not in named:
                self._tensors[f"{_OWN[field]}.{name}"] = field, name, handle
        found: dict[str, Any] = {fqn: _describe(handle) for fqn, (_, _, handle) in self._tensors.items()}
        found |= {fqn: meta.BytesStorageMetadata() for fqn in paths if fqn not in found}
        return meta.Metadata(state_dict_metadata=found, planner_data=paths, storage_data={})

    def set_up_storage_reader(self, metadata: meta.Metadata, is_coordinator: bool, *_args: Any, **_kwargs: Any) -> None:  # noqa: ANN401, FBT001
        """Do nothing: what there is, is known."""

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Tell all ranks, along with their plans, which checkpoint the coordinator has opened."""
        return [dataclasses.replace(plan, storage_data=self._digest) for plan in plans]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill what this rank's plan asks for, in place.

        Raises: RuntimeError where the coordinator opened another checkpoint of the run.
        """
        if plan.storage_data != self._digest:
            raise RuntimeError("a checkpoint was committed meanwhile, so that ranks opened different ones: load again")
        tensors = [item for item in plan.items if item.type == LoadItemType.TENSOR]
        others = [item for item in plan.items if item.type == LoadItemType.BYTE_IO]
        targets = [planner.resolve_tensor(item).detach() for item in tensors]
        with ckptfmt.open(self._path, digest=self._digest) as checkpoint:
            checkpoint.read_into([self._sink(item, target) for item, target in zip(tensors, targets, strict=True)])
        for item, target in zip(tensors, targets, strict=True):
            planner.commit_tensor(item, target)
        values = self._read_values([item.storage_index.fqn for item in others])
        for item in others:
            planner.load_bytes(item, io.BytesIO(values[item.storage_index.fqn]))
        return _done(None)

    def _sink(self, item: ReadItem, target: torch.Tensor) -> ckptfmt.TensorSink:
        """Return the sink that fills the target of a plan's item."""
        field, name, handle = self._tensors[item.storage_index.fqn]
        begin = tuple(map(operator.add, item.storage_index.offset or (), item.storage_offsets))
        return ckptfmt.sink_of(name, {begin: target}, dtype=handle.dtype, field=field, global_shape=handle.shape)

    def _read_values(self, names: list[str]) -> dict[str, bytes]:
        """Return values as the pickles that a planner loads."""
        if not names:
            return {}
        stored = {name: _PICKLE + name if name in self._pickled else name for name in names}
        pickles = self._pickled.intersection(names)
        if pickles and not self._allow_pickle:
            raise TypeError(f"{min(pickles)} is a pickle: pass allow_pickle=True to load it, which runs what is in it")
        only = [f"optimizer:{_value_name(name)}" for name in stored.values()]
        trees: Any = ckptfmt.load(self._path, only=only, framework="torch", digest=self._digest)
        found = trees["optimizer"]
        pickled: dict[str, bytes] = {}
        for name in names:
            content = io.BytesIO()
            if name not in self._pickled:
                torch.save(found[_value_name(name)], content)
            pickled[name] = content.getvalue() or found[_value_name(stored[name])]
        return pickled


def _done(result: _Result) -> Future[_Result]:
    done: Future[_Result] = Future()
    done.set_result(result)
    return done


def _paths_of(plan: SavePlan) -> dict[str, tuple[Any, ...]]:
    """Return where in the state_dict each entry of a plan was: that is its name, but where a planner flattens."""
    found = plan.planner_data if isinstance(plan.planner_data, Mapping) else {}
    return {item.index.fqn: tuple(found.get(item.index.fqn, (item.index.fqn,))) for item in plan.items}


def _heads_alone(paths: Iterable[tuple[Any, ...]]) -> dict[str, str]:
    """Return for each field the key of the state_dict that is all of it: none where several are, or nothing nests."""
    heads: dict[str, set[str]] = {}
    for path in paths:
        if len(path) > 1 and path[0] in _FIELDS:
            heads.setdefault(_FIELDS[path[0]], set()).add(path[0])
    return {field: found.pop() if len(found) == 1 else "" for field, found in heads.items()}


def _check_names(paths: Mapping[str, tuple[Any, ...]]) -> None:
    """Refuse entries of a state_dict that would lie at one place, or where this module keeps something itself."""
    alone = _heads_alone(paths.values())
    taken: dict[tuple[str, str], str] = {}
    for fqn, path in paths.items():
        if fqn == _PATHS or fqn.startswith(_PICKLE):
            raise ValueError(f"the key {fqn!r} is taken by ckptfmt.plugins.dcp: rename it")
        other = taken.setdefault(_place_of(path, alone), fqn)
        if other != fqn:
            raise ValueError(f"{other!r} and {fqn!r} would have one name in the checkpoint: rename one of them")


def _place_of(path: tuple[Any, ...], alone: Mapping[str, str]) -> tuple[str, str]:
    """Return field and name of a tensor."""
    keys = [_escape(str(key)) for key in path]
    if not alone and len(keys) == 1:
        return "weights", keys[0]  # the state_dict of a module
    field = _FIELDS.get(keys[0]) if len(keys) > 1 else None
    if field is None:
        return "optimizer", "/".join(["extra", *keys])
    is_all = alone[field] == keys[0] and keys[1] != "extra"
    return field, "/".join(keys[1:] if is_all else keys)


def _escape(key: str) -> str:
    """Return how a key stands in a name, as in a JSON pointer."""
    return key.replace("~", "~0").replace("/", "~1")


def _value_name(fqn: str) -> str:
    """Return the name of a value of ``State(extra=...)``."""
    return f"extra/{_escape(fqn)}"


def _read_paths(checkpoint: Any) -> dict[str, tuple[Any, ...]]:  # noqa: ANN401 - what ckptfmt.open returns
    """Return where in the state_dict each entry was; nothing of a checkpoint that DCP didn't write."""
    key = ("optimizer", _value_name(_PATHS), "global")
    paths = checkpoint.leaf(*key) if key in checkpoint.leaves else {}
    return {fqn: tuple(path) for fqn, path in paths.items()}


def _describe(handle: Any) -> meta.TensorStorageMetadata:  # noqa: ANN401 - what a view of tensors holds
    size = torch.Size(handle.shape)
    whole = meta.ChunkStorageMetadata(offsets=torch.Size([0] * len(size)), sizes=size)
    return meta.TensorStorageMetadata(meta.TensorProperties(dtype=getattr(torch, handle.dtype)), size, [whole])
