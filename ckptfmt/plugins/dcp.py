"""torch.distributed.checkpoint saves to and loads from checkpoints of ckptfmt.

    dcp.save(state_dict, storage_writer=CkptfmtWriter("step-1200"))
    dcp.load(state_dict, storage_reader=CkptfmtReader("step-1200"))

    with install():
        dcp.async_save(state_dict, checkpoint_id="step-1200")  # and other calls without a storage

The result is an ordinary checkpoint. The entries of a state_dict ``{"model": ..., "optim": ...}``
go to the fields weights and optimizer, under the names that `ckptfmt.State` gives. All other
entries go to ``extra``. DCP restores no random numbers; the field rng is therefore absent.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import pickle
import re
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

import torch
from torch.distributed.checkpoint import (
    _async_process_executor,
    _storage_utils,
    state_dict_loader,
    state_dict_saver,
)
from torch.distributed.checkpoint import filesystem as torch_files
from torch.distributed.checkpoint import metadata as meta
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future, collect_all

import ckptfmt
from ckptfmt import SaveAttempt

#: Keys of a state_dict, and the fields that store their contents.
_FIELDS = dict.fromkeys(["model", "module", "weights", "state_dict", "model_state_dict"], "weights")
_FIELDS |= dict.fromkeys(["optim", "optimizer", "optimizer_state_dict"], "optimizer")
#: The value of a checkpoint that records the path of each entry in the state_dict.
_PATHS: Final = "dcp"
#: Prefix of the names of pickled values.
_PICKLE: Final = "pickle:"
#: The state_dict keys of the fields of a checkpoint that DCP didn't write.
_OWN: Final = {"weights": "model", "optimizer": "optim"}
_LOG: Final = logging.getLogger("ckptfmt")
_Path: TypeAlias = str | os.PathLike[str]


@dataclass
class _AtPath:
    """The common base of writer and reader: a checkpoint's path. A rank's plan stays unchanged.

    Attributes:
        path: path of the checkpoint.
        allow_pickle: whether pickles are written or loaded.
    """

    path: _Path = ""
    allow_pickle: bool = field(default=False, kw_only=True)

    def reset(self, checkpoint_id: _Path | None = None) -> None:
        """Begin another save or load; `checkpoint_id` replaces the path of the previous call."""
        self.path = self.path if checkpoint_id is None else checkpoint_id

    def prepare_local_plan(self, plan: Any) -> Any:
        """Return the plan unchanged."""
        return plan

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: _Path) -> bool:
        """Return whether an id can be a checkpoint's path: URLs can't."""
        return "://" not in os.fspath(checkpoint_id)


@dataclass(kw_only=True)
class CkptfmtWriter(_AtPath, StorageWriter):
    """The storage writer of `dcp.save` and `dcp.async_save`: writes a directory as one checkpoint.

    Args:
        path: path of the checkpoint; ``checkpoint_id=`` of the call takes precedence.
        step: number of training steps done; by default the number at the end of the path, or 0.
        overwrite: whether to replace an existing checkpoint. At every moment the old or the new
            checkpoint is complete; both need room on the disk.
        allow_pickle: whether objects that aren't plain values are stored as pickles, which
            `CkptfmtReader` loads only with the same option. By default a save with such an object
            is refused before any write; the error names the object.

    Raises: `ckptfmt.CkptError`; CHECKPOINT_EXISTS where the directory already holds a checkpoint.
    """

    step: int | None = None
    overwrite: bool = False
    #: The digest of the last committed checkpoint, on the coordinator.
    save_id: str = field(default="", init=False)
    _attempt: Any = field(default=None, init=False)  # set on the coordinator only

    # The framework's signature.
    def set_up_storage_writer(self, is_coordinator: bool, *_args: Any, **kwargs: Any) -> None:  # noqa: ARG002, FBT001
        """Check that ranks use collectives: without collectives no rank could commit.

        Raises: NotImplementedError without collectives.
        """
        if not kwargs.get("use_collectives", True):
            raise NotImplementedError(
                "ckptfmt commits once for all ranks: call dcp.save with use_collectives=True"
            )

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Begin the attempt on the coordinator, and send the attempt to all ranks with their plans.

        Raises: ValueError for names that would collide in the checkpoint.
        """
        usable = [plan for plan in plans if plan.usable]
        alone = _heads_alone(usable)
        paths = _paths_of(usable)
        _check_names(paths, alone)
        self._paths = paths if len(usable) == len(plans) else None
        step = (
            int(*re.findall(r"([0-9]+)/*$", os.fspath(self.path)))
            if self.step is None
            else self.step
        )
        note = alone if usable else None
        self._attempt = SaveAttempt.begin(
            step=step, writer_count=len(plans), note=note, replace=self.overwrite
        )
        self._held = self._attempt.hold(self.path)
        if self._paths is None:  # ranks that use a cached plan receive no new plan data
            self._attempt.publish(self.path)
        told = self._attempt.dump()
        return [
            replace(plan, storage_data={"attempt": told, "writer": writer})
            for writer, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's part. The part is durable on return."""
        told: dict[str, Any] = plan.storage_data
        # A caching planner may return the plan of an earlier save, whose attempt is over.
        attempt = (
            SaveAttempt.parse(told.pop("attempt"))
            if "attempt" in told
            else SaveAttempt.find(self.path)
        )
        told["alone"] = alone = told["alone"] if attempt.note is None else attempt.note
        paths = _paths_of([plan])
        _check_names(paths, alone)
        given: dict[str, Any] = {"weights": {}, "optimizer": {}, "extra": {}}
        if attempt == self._attempt:
            known = _paths_of(planner.global_plan) if self._paths is None else self._paths  # type: ignore[attr-defined]
            given["extra"][_PATHS] = {
                "alone": alone,
                "paths": {fqn: list(path) for fqn, path in known.items()},
            }
        pieces: dict[str, tuple[torch.Size, dict[tuple[int, ...], torch.Tensor]]] = {}
        for item in plan.items:
            data = planner.resolve_data(item)
            if isinstance(data, io.BytesIO):
                given["extra"] |= self._value_of(item.index.fqn, data)
            elif item.tensor_data is not None:
                held = pieces.setdefault(item.index.fqn, (item.tensor_data.size, {}))[1]
                held[tuple(item.tensor_data.chunk.offsets)] = data.detach()
        for fqn, (size, held) in pieces.items():
            place, name = _place_of(paths[fqn], alone)
            given[place][name] = ckptfmt.source_of(
                name, held, field=place, global_shape=tuple(size)
            )
        state = ckptfmt.State(**given, rng=False, absent={"rng": "DCP saves no random numbers"})
        record = attempt.write_part(self.path, state, writer=told["writer"])
        # DCP needs at least one result of each rank, also where a rank writes no entry.
        indices = (meta.MetadataIndex(_PATHS), *(item.index for item in plan.items))
        results = [
            WriteResult(index=index, size_in_bytes=0, storage_data=record) for index in indices
        ]
        return collect_all([]).then(lambda _: results)

    def _value_of(self, fqn: str, content: io.BytesIO) -> dict[str, object]:
        """Return the value that a planner has pickled, under its name.

        Raises: TypeError for a value that isn't plain, without `allow_pickle`.
        """
        try:
            return {
                fqn: torch.load(
                    io.BytesIO(content.getvalue()), weights_only=True, map_location="cpu"
                )
            }
        except pickle.UnpicklingError as error:
            if self.allow_pickle:
                return {_PICKLE + fqn: content.getvalue()}
            raise TypeError(
                f"{fqn} is no plain value; pass allow_pickle=True to keep it as a pickle"
            ) from error

    def finish(self, metadata: meta.Metadata, results: list[list[WriteResult]]) -> None:
        """Commit, on the coordinator. The checkpoint is durable on return.

        Raises: RuntimeError where a rank used a cached plan of another state_dict.
        """
        written = [result for of_rank in results for result in of_rank]
        if lacking := metadata.state_dict_metadata.keys() - {
            result.index.fqn for result in written
        }:
            raise RuntimeError(
                f"{min(lacking)!r} wasn't written: the planner's cached plan is of another"
                " state_dict"
            )
        with self._held:
            self.save_id = self._attempt.commit(
                self.path, {result.storage_data for result in written}
            ).digest


class CkptfmtReader(_AtPath, StorageReader):
    """The storage reader of `dcp.load`: a checkpoint, or the newest of a run, from any program.

    Args:
        path: path of the checkpoint or run; ``checkpoint_id=`` of the call takes precedence.
        allow_pickle: whether to load objects that `CkptfmtWriter` stored as pickles. Loading a
            pickle executes code in the pickle.

    In a checkpoint that DCP didn't write, the weights are found under ``model.``, the optimizer
    under ``optim.``.

    Raises: `ckptfmt.CkptError`: every byte read is verified.
    """

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> meta.Metadata:
        """Return the tensors and values of the checkpoint, for the planner."""
        with ckptfmt.open(self.path) as checkpoint:
            # A run's newest checkpoint may change during the load. All reads therefore use this
            # path and digest.
            self._path = checkpoint.store.name
            self._digest = checkpoint.digest
            key = ("optimizer", _join(["extra", _PATHS]), "global")  # absent where DCP didn't write
            told: Any = (
                checkpoint.leaf(*key) if key in checkpoint.leaves else {"alone": {}, "paths": {}}
            )
            paths = {fqn: tuple(path) for fqn, path in told["paths"].items()}
            fqns = {_place_of(path, told["alone"]): fqn for fqn, path in paths.items()}
            self._tensors: dict[str, Any] = {
                fqns.get((field, name), f"{_OWN[field]}.{name}"): (
                    field,
                    name,
                    handle.dtype,
                    handle.shape,
                )
                for field in _OWN
                for name, handle in checkpoint.field(field).items()
            }
            kept = {name for _, name, _ in checkpoint.leaves}
        #: Entries of an optimizer, at any depth: `Stateful` objects nest the optimizer under their
        #: own key.
        self._of_optimizer = {
            fqn
            for fqn, (place, name, *_) in self._tensors.items()
            if place == "optimizer" and name[:6] != "extra/"
        } | {
            fqn
            for fqn, path in paths.items()
            if any(_FIELDS.get(key) == "optimizer" for key in path[:-1])
        }
        self._values = {
            fqn: name
            for fqn in paths
            for form in ("", _PICKLE)
            if (name := _join(["extra", form + fqn])) in kept
        }
        found: dict[str, Any] = {
            fqn: _describe(*form) for fqn, (_, _, *form) in self._tensors.items()
        }
        found |= {fqn: meta.BytesStorageMetadata() for fqn in self._values}
        self.load_id = uuid.uuid4().hex
        what = meta.StorageMeta(os.fspath(self.path), save_id=self._digest, load_id=self.load_id)
        described = meta.Metadata(
            state_dict_metadata=found, planner_data=paths, storage_data={}, storage_meta=what
        )
        # The version of this torch's own reader, for the planner. Older versions of torch define
        # none.
        described.version = getattr(torch_files, "CURRENT_DCP_VERSION", None)
        return described

    def set_up_storage_reader(
        self,
        metadata: meta.Metadata,
        is_coordinator: bool,  # noqa: FBT001 - the framework's signature
        *_args: Any,
        **_kwargs: Any,
    ) -> None:
        """Do nothing: `read_metadata` has recorded the contents of the checkpoint."""

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Send the digest of the coordinator's checkpoint to all ranks with their plans.

        A planner requests the entries of the live state_dict. The state of an optimizer that has
        made no step isn't in the live state_dict. Where ranks request some of the saved entries of
        an optimizer, a warning names the saved entries that no rank requests.
        """
        wanted = {item.storage_index.fqn for plan in plans for item in plan.items}
        if lost := sorted(self._of_optimizer - wanted if self._of_optimizer & wanted else ()):
            names = ", ".join(map(repr, lost[:3])) + (" and others" if len(lost) > 3 else "")
            _LOG.warning(
                "%s: %d saved entries of the optimizer aren't loaded, because the live state_dict"
                " lacks their keys: %s."
                " Where the optimizer has made no step, take its state_dict with get_state_dict or"
                " get_optimizer_state_dict of torch.distributed.checkpoint.state_dict, which"
                " creates the state",
                os.fspath(self.path),
                len(lost),
                names,
            )
        return [replace(plan, storage_data=self._digest) for plan in plans]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the targets of this rank's plan in place.

        Raises: RuntimeError where the coordinator opened another checkpoint of the run; TypeError
            for a pickle without `allow_pickle`.
        """
        if plan.storage_data != self._digest:
            raise RuntimeError(
                "a checkpoint was committed meanwhile, so that ranks opened different"
                " checkpoints: load again"
            )
        pairs = [
            (one, planner.resolve_tensor(one).detach())
            for one in plan.items
            if one.type == LoadItemType.TENSOR
        ]
        others = [item for item in plan.items if item.type == LoadItemType.BYTE_IO]
        with ckptfmt.open(self._path, digest=self._digest) as checkpoint:
            checkpoint.read_into([self._sink(item, target) for item, target in pairs])
        for item, target in pairs:
            planner.commit_tensor(item, target)
        values = self._read_values({self._values[item.storage_index.fqn] for item in others})
        for item in others:
            planner.load_bytes(item, io.BytesIO(values[self._values[item.storage_index.fqn]]))
        return collect_all([]).then(lambda _: None)

    def _sink(self, item: ReadItem, live: torch.Tensor) -> ckptfmt.TensorSink:
        """Return the sink that fills the target of a plan's item."""
        field, name, dtype, shape = self._tensors[item.storage_index.fqn]
        return ckptfmt.sink_of(
            name, {tuple(item.storage_offsets): live}, dtype=dtype, field=field, global_shape=shape
        )

    def _read_values(self, names: set[str]) -> dict[str, bytes]:
        """Return values as pickles for a planner. Raises: TypeError for a refused pickle."""
        pickles = {name for name in names if name.startswith(_join(["extra", _PICKLE]))}
        if pickles and not self.allow_pickle:
            raise TypeError(
                f"{min(pickles)} is a pickle: pass allow_pickle=True to load the pickle, which runs"
                " code in the file"
            )
        only = [f"optimizer:{name}" for name in names]
        trees: Any = (
            ckptfmt.load(self._path, only=only, framework="torch", digest=self._digest)
            if names
            else {}
        )
        found = dict(trees.get("optimizer", {}))
        for name in names - pickles:
            torch.save(found[name], content := io.BytesIO())
            found[name] = content.getvalue()
        return found


def _paths_of(plans: Iterable[SavePlan]) -> dict[str, tuple[Any, ...]]:
    """Return the path in the state_dict of each entry of the plans.

    The path is the entry's name alone, unless the planner flattens the state_dict.
    """
    known = [
        (plan, plan.planner_data if isinstance(plan.planner_data, Mapping) else {})
        for plan in plans
    ]
    named = [(item.index.fqn, paths) for plan, paths in known for item in plan.items]
    return {fqn: tuple(paths.get(fqn, (fqn,))) for fqn, paths in named}


def _heads_alone(plans: Iterable[SavePlan]) -> dict[str, str]:
    """Return the state_dict key of each field.

    The key is ``""`` where several keys map to one field. Fields without nested entries are left
    out.
    """
    mappings = [plan.planner_data for plan in plans if isinstance(plan.planner_data, Mapping)]
    heads = {
        path[0]
        for paths in mappings
        for path in paths.values()
        if len(path) > 1 and path[0] in _FIELDS
    }
    return {
        _FIELDS[head]: head if [*map(_FIELDS.get, heads)].count(_FIELDS[head]) == 1 else ""
        for head in heads
    }


def _check_names(paths: Mapping[str, tuple[Any, ...]], alone: Mapping[str, str]) -> None:
    """Check that entries of a state_dict have distinct names, and no name that this module uses.

    Raises: ValueError.
    """
    taken: dict[tuple[str, str], str] = {}
    for fqn, path in paths.items():
        if fqn == _PATHS or fqn.startswith(_PICKLE):
            raise ValueError(f"the key {fqn!r} is taken by ckptfmt.plugins.dcp: rename it")
        if (other := taken.setdefault(_place_of(path, alone), fqn)) != fqn:
            raise ValueError(
                f"{other!r} and {fqn!r} would have one name in the checkpoint: rename one of them"
            )


def _place_of(path: tuple[Any, ...], alone: Mapping[str, str]) -> tuple[str, str]:
    """Return the field and name of a tensor."""
    if not alone and len(path) == 1:
        return "weights", _join(path)  # the state_dict of a module
    if (field := _FIELDS.get(path[0]) if len(path) > 1 else None) is None:
        return "optimizer", _join(["extra", *path])
    return field, _join(path[1:] if alone.get(field) == path[0] and path[1] != "extra" else path)


def _join(keys: Iterable[object]) -> str:
    """Return the name of the value under these keys, escaped as in a JSON pointer."""
    return "/".join(str(key).replace("~", "~0").replace("/", "~1") for key in keys)


def _describe(dtype: str, shape: tuple[int, ...]) -> meta.TensorStorageMetadata:
    """Return the planner's description of a tensor: one chunk, so that offsets are the tensor's."""
    whole = meta.ChunkStorageMetadata(offsets=torch.Size([0] * len(shape)), sizes=torch.Size(shape))
    return meta.TensorStorageMetadata(
        meta.TensorProperties(dtype=getattr(torch, dtype)), whole.sizes, [whole]
    )


def install(*, allow_pickle: bool = False) -> contextlib.ExitStack:
    """Make ckptfmt the storage of calls that pass only ``checkpoint_id=``, a path and no URL.

    As with torch's storage, a save replaces an existing checkpoint. Torch still reads checkpoints
    that torch wrote; a save onto such a checkpoint raises FileExistsError.

    Args:
        allow_pickle: the option of `CkptfmtWriter` and `CkptfmtReader`.

    Returns: a context that undoes the installation at its end or by its method ``close``.
    Raises: RuntimeError where ckptfmt is installed already.
    """
    if (theirs := _storage_utils._storage_setup).__module__ == __name__:  # noqa: SLF001
        raise RuntimeError(
            "ckptfmt is installed already: close the handle from the first install()"
        )
    executor = _async_process_executor._ProcessBasedAsyncCheckpointExecutor  # noqa: SLF001
    execute_save = executor.execute_save

    # The framework's signature.
    def set_up(storage: Any, checkpoint_id: _Path | None, reader: bool = False) -> Any:  # noqa: FBT001, FBT002
        # pathlib would resolve or normalise the path of the user.
        is_theirs = checkpoint_id and os.path.exists(os.path.join(checkpoint_id, ".metadata"))  # noqa: PTH110, PTH118
        if is_theirs and not (storage or reader):
            raise FileExistsError(
                f"{checkpoint_id} has a checkpoint of torch's: remove it, or save to another path"
            )
        if (
            not (storage or is_theirs)
            and checkpoint_id
            and _AtPath.validate_checkpoint_id(checkpoint_id)
        ):
            storage = CkptfmtReader() if reader else CkptfmtWriter(overwrite=True)
            storage.allow_pickle = allow_pickle
        return theirs(storage, checkpoint_id, reader)

    def execute(self: Any, *given: Any, **options: Any) -> Any:
        # The process of an asynchronous save has no installation of ckptfmt.
        options["storage_writer"] = set_up(
            options.get("storage_writer"), options.get("checkpoint_id")
        )
        return execute_save(self, *given, **options)

    ours = [
        (module, "_storage_setup", set_up)
        for module in (_storage_utils, state_dict_saver, state_dict_loader)
    ]
    installed = contextlib.ExitStack()
    for owner, name, value in (*ours, (executor, "execute_save", execute)):
        installed.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, value)
    return installed
