"""torch.distributed.checkpoint saves to and loads from checkpoints of ckptfmt.

    dcp.save(state_dict, storage_writer=CkptfmtWriter("step-1200"))
    dcp.load(state_dict, storage_reader=CkptfmtReader("step-1200"))

    with install():
        dcp.async_save(state_dict, checkpoint_id="step-1200")  # and other calls without a storage

The result is an ordinary checkpoint, which ``ckptfmt.load(path, State(weights=, optimizer=))``
loads. Models and optimizers of the state_dict go to the fields weights and optimizer, under the
names that `ckptfmt.State` gives, at any key: ``{"model": ..., "optim": ...}`` and
``{"app": AppState(model, optimizer)}`` alike. Further entries go to ``extra``. DCP restores no
random numbers; the field rng is therefore absent.

`CkptfmtReader` also loads checkpoints of programs without DCP: the model is found under
``model``, the optimizer under ``optim`` with the names of `get_optimizer_state_dict`, or under
further usual keys. torch's `HuggingFaceStorageReader` refuses the pieces of sharded tensors
("Size mismatch"): `CkptfmtReader` loads them.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import pickle
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint import (
    _async_process_executor,
    _storage_utils,
    format_utils,
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
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future, collect_all

import ckptfmt
from ckptfmt import SaveAttempt
from ckptfmt.plugins.dcp_names import (
    MODELS,
    OPTIMIZERS,
    OptimizerPlace,
    Path,
    StateDictLayout,
    default_layout,
    dotted,
    is_reference,
    join,
    list_entries,
)

#: The member of a checkpoint's provenance with the places of models, optimizers and entries.
_PATHS: Final = "dcp"
#: Prefix of the names of pickled values.
_PICKLE: Final = "pickle:"
#: The state_dict keys of the fields of a checkpoint without a record of DCP.
_OWN: Final = {"weights": "model", "optimizer": "optim"}
#: Further keys of the fields, with and without the key of PyTorch's tutorial.
_OTHER_KEYS: Final = re.compile(
    rf"(?:app\.)?(?:({'|'.join(MODELS)})|({'|'.join(OPTIMIZERS)}))\.(.+)", re.DOTALL
)
#: Types of values without need of a check by a pickle.
_SIMPLE: Final = (bool, int, float, str, type(None))
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
        self._rank = kwargs.get("rank") or 0

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged, and note the entries of this rank's state_dict."""
        self._local = plan
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Begin the attempt on the coordinator, and send the attempt to all ranks with their plans.

        Raises: ValueError for names that would collide in the checkpoint.
        """
        usable = [plan for plan in plans if plan.usable]
        paths = _paths_of(usable)
        layout = StateDictLayout.find(paths.values())
        _check_names(paths, layout)
        self._items = _items_of(usable) if len(usable) == len(plans) else None
        step = (
            int(*re.findall(r"([0-9]+)/*$", os.fspath(self.path)))
            if self.step is None
            else self.step
        )
        note = layout.dump() if usable else None
        self._attempt = SaveAttempt.begin(
            step=step, writer_count=len(plans), note=note, replace=self.overwrite
        )
        self._held = self._attempt.hold(self.path)
        if self._items is None:  # ranks that use a cached plan receive no new plan data
            self._attempt.publish(self.path)
        told = self._attempt.dump()
        # The coordinator is writer 0, which alone writes the provenance.
        writers = {self._rank: 0, 0: self._rank}
        mine = _of_optimizers(self._local, layout)
        return [
            replace(
                plan,
                storage_data={
                    "attempt": told,
                    "writer": writers.get(rank, rank),
                    "has_own": self._items is None or not mine >= _of_optimizers(plan, layout),
                },
            )
            for rank, plan in enumerate(plans)
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
        told["layout"] = told["layout"] if attempt.note is None else attempt.note
        layout = StateDictLayout.parse(told["layout"])
        paths = _paths_of([plan])
        _check_names(paths, layout)
        given: dict[str, Any] = {"weights": {}, "optimizer": {}, "extra": {}}
        is_coordinator = attempt == self._attempt
        optimizers: dict[Path, dict[str, Any]] = {}
        if is_coordinator or told["has_own"]:
            optimizers = self._optimizers_of(_mapping_of(plan), planner, layout)
        if is_coordinator:
            items = _items_of(planner.global_plan) if self._items is None else self._items  # type: ignore[attr-defined]
            others = [path for path, is_tensor in items if not _is_implied(path, layout, is_tensor)]
            told_paths = [[*path] for path in dict.fromkeys((*others, *self._pickled))]
            given["provenance"] = {_PATHS: {"layout": layout.dump(), "paths": told_paths}}
        pieces: dict[str, tuple[torch.Size, dict[tuple[int, ...], torch.Tensor]]] = {}
        for item in plan.items:
            data = planner.resolve_data(item)
            if isinstance(data, io.BytesIO):
                value = self._value_of(item.index.fqn, data)
                if (
                    layout.optimizer_of(paths[item.index.fqn]) is None
                    or item.index.fqn not in value
                ):
                    given["extra"] |= value
            elif item.tensor_data is not None:
                held = pieces.setdefault(item.index.fqn, (item.tensor_data.size, {}))[1]
                held[tuple(item.tensor_data.chunk.offsets)] = data.detach()
        for fqn, (size, held) in pieces.items():
            place, name = layout.place_of(paths[fqn])
            given[place][name] = ckptfmt.source_of(
                name, held, field=place, global_shape=tuple(size)
            )
        given = {field: value for field, value in given.items() if value}
        state = ckptfmt.State(**given, rng=False, absent={"rng": "DCP saves no random numbers"})
        record = attempt.write_part(self.path, state, writer=told["writer"], optimizers=optimizers)
        # DCP needs at least one result of each rank, also where a rank writes no entry.
        indices = (meta.MetadataIndex(_PATHS), *(item.index for item in plan.items))
        results = [
            WriteResult(index=index, size_in_bytes=0, storage_data=record) for index in indices
        ]
        return collect_all([]).then(lambda _: results)

    def _optimizers_of(
        self, mapping: Mapping[str, Path], planner: SavePlanner, layout: StateDictLayout
    ) -> dict[Path, dict[str, Any]]:
        """Return the state_dicts of this rank's optimizers, with sources in the place of tensors.

        The values of a group may be in the plans of several ranks, and a leaf has one writer.
        Therefore the values come from the state_dict.

        Raises: TypeError for a value that isn't plain, without `allow_pickle`.
        """
        pairs: dict[Path, list[tuple[Path, object]]] = {one.head: [] for one in layout.optimizers}
        self._pickled: list[Path] = []
        for fqn, path in mapping.items():
            optimizer = layout.optimizer_of(path)
            if optimizer is None:
                continue
            index = meta.MetadataIndex(fqn)
            live: object = planner.state_dict[fqn]  # type: ignore[attr-defined]
            # A planner looks up a ShardedTensor by the offset of a shard.
            if not isinstance(live, torch.Tensor | ShardedTensor):
                live = planner.lookup_object(index)  # type: ignore[attr-defined]
            if isinstance(live, torch.Tensor | ShardedTensor):
                name = layout.place_of(path)[1]
                # Only the name counts here: the plans of the ranks have the pieces.
                live = ckptfmt.source_of(name, torch.empty(0), field="optimizer")
            elif not _is_simple(live):
                data = planner.resolve_data(WriteItem(index, WriteItemType.BYTE_IO))
                value = self._value_of(fqn, data)  # type: ignore[arg-type]
                if fqn not in value:
                    self._pickled.append(path)
                    continue
                live = value[fqn]
            pairs[optimizer.head].append((path, live))
        return {
            one.path: one.assemble(pairs[one.head]) for one in layout.optimizers if pairs[one.head]
        }

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

    In a checkpoint of a program without DCP, the weights are found under ``model.``, the optimizer
    under ``optim.``; or under further usual keys, such as ``app.model.`` and ``optimizer.``.

    Raises: `ckptfmt.CkptError`: every byte read is verified.
    """

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> meta.Metadata:
        """Return the tensors and values of the checkpoint, for the planner."""
        with ckptfmt.open(self.path) as checkpoint:
            # A run's newest checkpoint may change during the load. All reads therefore use this
            # path and digest.
            self._path = checkpoint.store.name
            self._digest = checkpoint.digest
            entries = _Entries(checkpoint)
        self._entries = entries
        self.load_id = uuid.uuid4().hex
        what = meta.StorageMeta(os.fspath(self.path), save_id=self._digest, load_id=self.load_id)
        described = meta.Metadata(
            state_dict_metadata=entries,
            planner_data=entries.paths,
            storage_data={},
            storage_meta=what,
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
        wanted = {
            self._entries.key_of(item.storage_index.fqn) for plan in plans for item in plan.items
        }
        of_optimizer = self._entries.of_optimizer
        if lost := sorted(of_optimizer - wanted if of_optimizer & wanted else ()):
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
        kept = {self._entries.key_of(item.storage_index.fqn) for item in others}
        values = self._read_values(
            {self._entries.names[fqn] for fqn in kept & self._entries.names.keys()}
        )
        for item in others:
            fqn = self._entries.key_of(item.storage_index.fqn)
            if fqn in self._entries.names:
                content = values[self._entries.names[fqn]]
            else:
                content = _pickled(self._entries.values_of_optimizer[fqn])
            planner.load_bytes(item, io.BytesIO(content))
        return collect_all([]).then(lambda _: None)

    def _sink(self, item: ReadItem, live: torch.Tensor) -> ckptfmt.TensorSink:
        """Return the sink that fills the target of a plan's item."""
        fqn = self._entries.key_of(item.storage_index.fqn)
        field, name, dtype, shape = self._entries.tensors[fqn]
        return ckptfmt.sink_of(
            name, {tuple(item.storage_offsets): live}, dtype=dtype, field=field, global_shape=shape
        )

    def _read_values(self, names: set[str]) -> dict[str, bytes]:
        """Return values as pickles for a planner. Raises: TypeError for a refused pickle."""
        pickles = {name for name in names if name.startswith(join(["extra", _PICKLE]))}
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
        return {name: found[name] if name in pickles else _pickled(found[name]) for name in names}


class _Entries(dict[str, Any]):
    """The entries of a checkpoint by DCP's names, each with its description for a planner.

    A planner may ask for an entry under another name, which `key_of` finds too: the flattened or
    nested form of an optimizer's groups, and without a record of DCP further usual keys of model
    and optimizer. Iteration yields the names as saved.

    Attributes:
        paths: the path of each entry.
        tensors: field, name, dtype and shape of each tensor.
        names: the name in the checkpoint of each value of ``extra``.
        values_of_optimizer: the values in the leaves of optimizers.
        of_optimizer: the entries of optimizers.
    """

    def __init__(self, checkpoint: ckptfmt.Checkpoint) -> None:
        self.paths: dict[str, Path] = {}
        self.tensors: dict[str, tuple[str, str, str, tuple[int, ...]]] = {}
        self.names: dict[str, str] = {}
        self.values_of_optimizer: dict[str, Any] = {}
        self.of_optimizer: set[str] = set()
        #: Further names of entries, and entries of another form of the state_dict.
        self._aliases: dict[str, str] = {}
        self._hidden: dict[str, Any] = {}
        self._numbered = False
        self._handles = {
            (field, name): handle
            for field in _OWN
            for name, handle in checkpoint.field(field).items()
        }
        self._left = dict(self._handles)
        self._values = {
            name
            for field, name, scope in checkpoint.leaves
            if (field, scope) == ("optimizer", "global")
        }
        told: Any = checkpoint.provenance.get(_PATHS) if checkpoint.provenance else None
        older = join(["extra", _PATHS])
        self._is_own = False
        if isinstance(told, Mapping) and "layout" in told:
            self._read(checkpoint, StateDictLayout.parse(told["layout"]), map(tuple, told["paths"]))
        elif older in self._values:
            self._read_older(checkpoint.leaf("optimizer", older))
        else:
            self._is_own = True
            self._read(checkpoint, None, ())
            for tensor_field, name in [*self._left]:
                self._add(f"{_OWN[tensor_field]}.{name}", None, (tensor_field, name))
        self._left.clear()

    def key_of(self, fqn: str) -> str:
        """Return the name as saved of an entry under any of its names."""
        if dict.__contains__(self, fqn) or fqn in self._hidden:
            return fqn
        if fqn in self._aliases:
            return self._aliases[fqn]
        other = _OTHER_KEYS.fullmatch(fqn) if self._is_own else None
        if other is None:
            return fqn
        own = f"{_OWN['weights' if other[1] else 'optimizer']}.{other[3]}"
        return self._aliases.get(own, own)

    def __contains__(self, fqn: object) -> bool:
        """Return whether there is such an entry.

        Raises: LookupError for the name of a parameter in an optimizer without names.
        """
        key = self.key_of(fqn) if isinstance(fqn, str) else ""
        is_there = dict.__contains__(self, key) or key in self._hidden
        if not is_there and self._numbered and re.match(r"optim\.state\.[^.]*[^.0-9]", key):
            raise LookupError(
                f"{fqn} isn't in the checkpoint, whose optimizer has positions instead of names of"
                " parameters, as files of torch.save and Lightning's checkpoints have."
                " Load the checkpoint by ckptfmt.load(path, ckptfmt.State(weights=model,"
                " optimizer=optimizer, rng=False), allow=('unexpected',)), which takes positions"
            )
        return is_there

    def __missing__(self, fqn: str) -> Any:
        key = self.key_of(fqn)
        if key not in self._hidden and not dict.__contains__(self, key):
            raise KeyError(fqn)
        return self._hidden[key] if key in self._hidden else self[key]

    def _read(
        self, checkpoint: ckptfmt.Checkpoint, layout: StateDictLayout | None, others: Iterable[Path]
    ) -> None:
        """Add the entries of a layout, and further entries of known paths."""
        leaves = {
            name: checkpoint.leaf("optimizer", name)
            for name in sorted(self._values)
            if name.startswith(("group/", "state/")) or not name
        }
        groups = [
            leaf
            for name, leaf in leaves.items()
            if name.startswith("group/")
            and isinstance(leaf, dict)
            and {"params", "options"} <= leaf.keys()
        ]
        groups.sort(key=lambda one: ([*map(str, one.get("path", ()))], one.get("number", 0)))
        layout = default_layout(groups) if layout is None else layout
        states = {name[6:]: leaf for name, leaf in leaves.items() if name.startswith("state/")}
        for path in others:
            fqn = dotted(path)
            place = layout.place_of(path)
            if place in self._handles:
                self._add(fqn, path, place)
            for form in ("", _PICKLE):
                if (name := join(["extra", form + fqn])) in self._values:
                    self.names[fqn] = name
                    self._add(fqn, path, None)
        for optimizer in layout.optimizers:
            whole = _below(leaves.get(""), optimizer.path)
            self._numbered = self._is_own and whole is not None
            mine = (
                groups
                if self._is_own and len(layout.optimizers) == 1
                else [one for one in groups if tuple(one.get("path", ())) == optimizer.path]
            )
            if whole is None and not mine and not states:
                continue
            self._add_optimizer(optimizer, mine, states, whole)
        for tensor_field, name in [*self._left]:
            found = layout.path_of(tensor_field, name)
            if found is not None:
                self._add(dotted(found), found, (tensor_field, name))

    def _add_optimizer(
        self, optimizer: OptimizerPlace, groups: list[Any], states: Mapping[str, Any], whole: Any
    ) -> None:
        for path, value in list_entries(optimizer, groups, states, whole):
            fqn = dotted(path)
            if dict.__contains__(self, fqn):
                continue
            if is_reference(value):
                self._add(fqn, path, ("optimizer", value.name))
            else:
                self.values_of_optimizer[fqn] = value
                self._add(fqn, path, None)
            self.of_optimizer.add(fqn)
        if whole is None:
            self._add_aliases(optimizer, groups)

    def _add_aliases(self, optimizer: OptimizerPlace, groups: list[Any]) -> None:
        """Add the names of groups' entries in the second form of the state_dict."""
        is_flat = optimizer.form == "flat"
        forms = [replace(optimizer, form=form) for form in ("nested", "flat")]
        for number, group in enumerate(groups):
            nested, flat = (
                [dotted(path) for path, _ in list_entries(form, [group], {}, None)]
                for form in forms
            )
            # The first entry of the nested form has the names of the parameters.
            begin = dotted((*optimizer.head, "param_groups"))
            numbered = [fqn.replace(f"{begin}.0.", f"{begin}.{number}.", 1) for fqn in nested]
            count = len(nested) - 1
            if not is_flat:
                self._aliases |= {
                    fqn: numbered[1 + at % count] for at, fqn in enumerate(flat) if count
                }
            elif flat:
                self._aliases |= dict(zip(numbered[1:], flat[:count], strict=True))
                members = next(value for _, value in list_entries(forms[0], [group], {}, None))
                self.values_of_optimizer[numbered[0]] = members
                self._hidden[numbered[0]] = meta.BytesStorageMetadata()

    def _read_older(self, told: Mapping[str, Any]) -> None:
        """Add the entries by a record of ckptfmt 0.10 or older."""
        paths = {fqn: tuple(path) for fqn, path in told["paths"].items()}
        fqns = {_older_place_of(path, told["alone"]): fqn for fqn, path in paths.items()}
        for place in [*self._left]:
            fqn = fqns.get(place, f"{_OWN[place[0]]}.{place[1]}")
            self._add(fqn, paths.get(fqn), place)
            if place[0] == "optimizer" and place[1][:6] != "extra/":
                self.of_optimizer.add(fqn)
        for fqn, path in paths.items():
            for form in ("", _PICKLE):
                if (name := join(["extra", form + fqn])) in self._values:
                    self.names[fqn] = name
                    self._add(fqn, path, None)
            if any(key in OPTIMIZERS for key in path[:-1]):
                self.of_optimizer.add(fqn)

    def _add(self, fqn: str, path: Path | None, place: tuple[str, str] | None) -> None:
        """Add an entry: the tensor at a place, or a value."""
        self.paths[fqn] = (fqn,) if path is None else path
        if place is None:
            self[fqn] = meta.BytesStorageMetadata()
            return
        handle = self._handles[place]
        self._left.pop(place, None)
        self.tensors[fqn] = (*place, handle.dtype, handle.shape)
        self[fqn] = _describe(handle.dtype, handle.shape)


def _below(tree: Any, path: Path) -> Any:
    """Return the numbered state_dict at a path of a leaf's tree, or None if there is none."""
    for key in path:
        tree = tree.get(key) if isinstance(tree, Mapping) else None
    if isinstance(tree, list) and len(tree) == 1:  # Lightning's form
        tree = tree[0]
    is_found = isinstance(tree, Mapping) and {"state", "param_groups"} <= tree.keys()
    return tree if is_found else None


def _pickled(value: object) -> bytes:
    """Return a value as planners take values."""
    torch.save(value, content := io.BytesIO())
    return content.getvalue()


def _is_simple(value: object) -> bool:
    """Return whether a value is plain by its type alone."""
    values = value if isinstance(value, list | tuple) else (value,)
    return type(value) in (list, tuple, *_SIMPLE) and all(type(one) in _SIMPLE for one in values)


def _mapping_of(plan: SavePlan) -> Mapping[str, Path]:
    """Return the path of each entry of a rank's state_dict; empty without a flattening planner."""
    return plan.planner_data if isinstance(plan.planner_data, Mapping) else {}


def _paths_of(plans: Iterable[SavePlan]) -> dict[str, Path]:
    """Return the path in the state_dict of each entry of the plans.

    The path is the entry's name alone, unless the planner flattens the state_dict.
    """
    return {
        item.index.fqn: tuple(_mapping_of(plan).get(item.index.fqn, (item.index.fqn,)))
        for plan in plans
        for item in plan.items
    }


def _items_of(plans: Iterable[SavePlan]) -> list[tuple[Path, bool]]:
    """Return path of each entry of the plans, and whether the entry is a tensor."""
    return [
        (path, item.type != WriteItemType.BYTE_IO)
        for plan in plans
        for item, path in zip(plan.items, _iter_paths(plan), strict=True)
    ]


def _iter_paths(plan: SavePlan) -> Iterator[Path]:
    mapping = _mapping_of(plan)
    return (tuple(mapping.get(item.index.fqn, (item.index.fqn,))) for item in plan.items)


def _is_implied(path: Path, layout: StateDictLayout, is_tensor: bool) -> bool:  # noqa: FBT001 - a fact of `path`
    """Return whether a reader finds an entry's path by the layout."""
    if layout.optimizer_of(path) is not None:
        return True
    return is_tensor and layout.path_of(*layout.place_of(path)) == path


def _of_optimizers(plan: SavePlan, layout: StateDictLayout) -> set[str]:
    """Return the entries of optimizers in a rank's state_dict."""
    mapping = _mapping_of(plan)
    return {fqn for fqn, path in mapping.items() if layout.optimizer_of(path) is not None}


def _check_names(paths: Mapping[str, Path], layout: StateDictLayout) -> None:
    """Check that entries of a state_dict have distinct names, and no name that this module uses.

    Raises: ValueError.
    """
    taken: dict[tuple[str, str], str] = {}
    for fqn, path in paths.items():
        if fqn == _PATHS or fqn.startswith(_PICKLE):
            raise ValueError(f"the key {fqn!r} is taken by ckptfmt.plugins.dcp: rename it")
        if (other := taken.setdefault(layout.place_of(path), fqn)) != fqn:
            raise ValueError(
                f"{other!r} and {fqn!r} would have one name in the checkpoint: rename one of them"
            )


def _older_place_of(path: Path, alone: Mapping[str, str]) -> tuple[str, str]:
    """Return field and name of a tensor in a checkpoint of ckptfmt 0.10.

    Args:
        path: the path of the tensor.
        alone: the only key of each field, or ``""`` where a field had several keys.
    """
    fields = dict.fromkeys(MODELS, "weights") | dict.fromkeys(OPTIMIZERS, "optimizer")
    if not alone and len(path) == 1:
        return "weights", join(path)
    if (field := fields.get(str(path[0])) if len(path) > 1 else None) is None:
        return "optimizer", join(["extra", *path])
    return field, join(path[1:] if alone.get(field) == path[0] and path[1] != "extra" else path)


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

    def reader_of(path: _Path, *given: Any, **options: Any) -> Any:
        is_path = _AtPath.validate_checkpoint_id(path)
        storage = set_up(None, path, reader=True) if is_path else None
        is_ours = isinstance(storage, CkptfmtReader)
        return storage if is_ours else read(path, *given, **options)

    def writer_of(path: _Path, *given: Any, **options: Any) -> Any:
        is_path = _AtPath.validate_checkpoint_id(path)
        storage = set_up(None, path) if is_path else None
        is_ours = isinstance(storage, CkptfmtWriter)
        return storage if is_ours else write(path, *given, **options)

    read = torch_files.FileSystemReader
    write = torch_files.FileSystemWriter
    ours: list[tuple[Any, str, Any]] = [
        (module, "_storage_setup", set_up)
        for module in (_storage_utils, state_dict_saver, state_dict_loader)
    ]
    # The conversions between torch.save and DCP create torch's storage by names of their module.
    ours += [
        (format_utils, "FileSystemReader", reader_of),
        (format_utils, "FileSystemWriter", writer_of),
    ]
    installed = contextlib.ExitStack()
    for owner, name, value in (*ours, (executor, "execute_save", execute)):
        installed.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, value)
    return installed
