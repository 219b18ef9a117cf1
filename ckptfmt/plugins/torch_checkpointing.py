"""The interface of torch_checkpointing's CheckpointManager, for checkpoints of ckptfmt.

    items = {"model": ItemSpec(resharder=DefaultResharder())}
    config = CkptfmtCheckpointManager.Config(items=items)
    manager = CkptfmtCheckpointManager(config)  # where it said CheckpointManager
    manager.save("checkpoints/step-1000", {"model": model.state_dict(), "step": 1000})
    manager.load("checkpoints/step-1000", into={"model": model.state_dict()})

Each save is a checkpoint, committed for all ranks together, and replaces a checkpoint at the same
path. The items ``model`` and ``optimizer`` are the weights and the optimizer: `ckptfmt.load` loads
them into live objects.

An item with a resharder in the `ItemSpec` is an item of the whole job. With several ranks, an item
without a resharder belongs to the rank, as in torch_checkpointing: each rank saves a value and
loads the same value, on the same number of ranks. A resharder isn't called: a load into sharded
tensors reads the ranges of each rank, from a checkpoint of any number of ranks.

An asynchronous save copies the payload before `save` returns. `lock` therefore never waits. The
ranks plan a save together, through a process group of gloo which the manager creates.

Values that are neither tensors nor plain values are refused, since they would need a pickle.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.tensor import DTensor
from torch_checkpointing.checkpoint_manager import CheckpointManager
from torch_checkpointing.checkpointable import CheckpointableTensor
from torch_checkpointing.config import SyncCheckpointSaverConfig
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

import ckptfmt
from ckptfmt.plugins.dcp import CkptfmtReader, CkptfmtWriter

__all__ = ["CkptfmtCheckpointManager"]

#: Fields of `Config` without an effect here, which must have their defaults.
_REFUSED: Final = (
    "subprocess_init_fn",
    "subprocess_init_args",
    "pre_finalize_callback",
    "finalize_callback",
)
_LOG: Final = logging.getLogger("ckptfmt")


class CkptfmtCheckpointManager:
    """A manager with the methods of torch_checkpointing's `CheckpointManager`.

    Every rank creates the manager, and calls its methods in the same order.

    Args:
        config: torch_checkpointing's configuration. `items` and `default` decide on the items, and
            `save` whether saves are asynchronous. Options of torch_checkpointing's own files and
            processes are refused.

    Raises: ValueError for a refused option.
    """

    Config = CheckpointManager.Config

    def __init__(self, config: CheckpointManager.Config | None = None) -> None:
        self._config = config or self.Config()
        refused = [name for name in _REFUSED if getattr(self._config, name)]
        storage = self._config.storage_config
        if storage is not None and not isinstance(storage, LocalFileSystemStorageConfig):
            refused.append(f"storage_config={type(storage).__name__}")
        specs = (*self._config.items.values(), self._config.default)
        if any(spec is not None and spec.layout is not None for spec in specs):
            refused.append("ItemSpec(layout=)")
        if refused:
            raise ValueError(
                f"not taken: {', '.join(refused)}. ckptfmt has its own files, and a save's future"
                " is done when the checkpoint is committed"
            )
        self._is_async = not isinstance(self._config.save, SyncCheckpointSaverConfig)
        self._is_distributed = dist.is_available() and dist.is_initialized()
        self._rank = dist.get_rank() if self._is_distributed else 0
        self._world_size = dist.get_world_size() if self._is_distributed else 1
        #: The group of background saves: collectives of the training must not wait for a save.
        self._group = dist.new_group(backend="gloo") if self._is_distributed else None
        self._pending: Future[Any] | None = None
        self._is_closed = False

    def save(self, checkpoint_id: str, checkpoint: Mapping[str, Any]) -> Future[Any] | None:
        """Save a payload as a checkpoint. A later save waits for the commit of an earlier save.

        The step is the number at the end of `checkpoint_id`, or the integer item ``step``.

        Returns: a future of the commit for asynchronous saves, else None.
        Raises: KeyError for a missing required item, and for an item without an `ItemSpec`;
            ValueError for a tensor with shards of torch_checkpointing's own protocol; TypeError for
            a value of another kind; errors of the earlier save; `ckptfmt.CkptError`.
        """
        self._check_open("save")
        self._wait()
        payload = self._payload(checkpoint)
        step = checkpoint.get("step")
        writer = CkptfmtWriter(
            checkpoint_id, step=step if type(step) is int else None, overwrite=True
        )
        if not self._is_async:
            state_dict_saver.save(payload, storage_writer=writer, process_group=self._group)
            return None
        pending: Any = state_dict_saver.async_save(
            payload, storage_writer=writer, process_group=self._group
        )
        self._pending = pending
        return self._pending

    def load(
        self,
        checkpoint_id: str | os.PathLike[str],
        into: Mapping[str, Any] | None = None,
        *,
        map_location: Any = None,
        strict: bool = False,
        metadata_format: Any = None,
    ) -> Mapping[str, Any]:
        """Load a checkpoint into live values, in place, and return the values.

        Args:
            checkpoint_id: path of a checkpoint or of a run, from any program.
            into: the live items; tensors are filled, and plain values are replaced. None for the
                declared items, if each is a plain value.
            map_location, metadata_format: refused.
            strict: whether a live item's entry without a saved entry is an error. By
                default such entries keep their values, and a warning names them.

        Raises: KeyError for an item without any saved entry; RuntimeError for a missing
            entry with `strict`; ValueError for a refused argument; `ckptfmt.CkptError`.
        """
        self._check_open("load")
        if map_location is not None or metadata_format is not None:
            raise ValueError(
                "map_location and metadata_format aren't taken: the live values have the devices,"
                " and a checkpoint of ckptfmt has one format"
            )
        if into is None:
            into = dict.fromkeys(self._config.items)
        if not into:
            raise ValueError("load needs into=, or Config.items: the items to read")
        live = self._payload(into)
        ckptfmt.open(checkpoint_id).close()  # torch would wrap NOT_COMMITTED
        try:
            state_dict_loader.load(
                live,
                storage_reader=CkptfmtReader(checkpoint_id),
                planner=_Planner(strict=strict),
                process_group=self._group,
            )
        except CheckpointException as error:
            # torch collects the errors of all ranks; the own rank's error says more.
            own = error.failures.get(self._rank) or next(iter(error.failures.values()))
            raise own[0] from error
        return {key: self._taken_back(key, value) for key, value in live.items()}

    def prewarm_staging(self, checkpoint: Mapping[str, Any]) -> None:
        """Check a payload. The first save allocates the memory of copies.

        Raises: as `save`.
        """
        self._check_open("prewarm staging")
        self._payload(checkpoint)

    def lock(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that never waits: when `save` returns, the payload is copied."""
        return contextlib.nullcontext()

    def close(self) -> None:
        """Wait for the save in progress. Raises: the save's error."""
        if self._is_closed:
            return
        self._is_closed = True
        self._wait()
        if self._group is not None:
            dist.destroy_process_group(self._group)

    def _check_open(self, action: str) -> None:
        if self._is_closed:
            raise RuntimeError(f"cannot {action} with a closed CkptfmtCheckpointManager")

    def _wait(self) -> None:
        pending = self._pending
        self._pending = None
        if pending is not None:
            pending.result(timeout=self._config.save.wait_timeout_secs)

    def _payload(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the items of the job under their keys, and the items of this rank under its rank.

        Raises: KeyError; ValueError.
        """
        config = self._config
        missing = [key for key, spec in config.items.items() if spec.required and key not in given]
        if missing:
            raise KeyError(f"missing required items: {sorted(missing)}")
        unknown = sorted(given.keys() - config.items.keys())
        if unknown and config.default is None:
            raise KeyError(f"no ItemSpec for {unknown}, and the schema is strict (default=None)")
        return {key: self._item(key, value) for key, value in given.items()}

    def _is_shared(self, key: str) -> bool:
        """Return whether an item belongs to the whole job."""
        spec = self._config.items.get(key, self._config.default)
        return self._world_size == 1 or (spec is not None and spec.resharder is not None)

    def _item(self, key: str, value: Any) -> Any:
        tensors = [leaf for leaf in _iter_leaves(value) if isinstance(leaf, torch.Tensor)]
        if any(isinstance(tensor, CheckpointableTensor) for tensor in tensors):
            raise ValueError(
                f"{key} has a tensor with shards of the protocol CheckpointableTensor, which"
                " ckptfmt doesn't know: pass DTensors"
            )
        if self._is_shared(key):
            return value
        if any(isinstance(tensor, DTensor) for tensor in tensors):
            raise ValueError(
                f"{key} has sharded tensors, and its ItemSpec has no resharder: declare"
                f" items={{{key!r}: ItemSpec(resharder=DefaultResharder())}}"
            )
        return {f"rank-{self._rank}": value}

    def _taken_back(self, key: str, value: Any) -> Any:
        return value if self._is_shared(key) else value[f"rank-{self._rank}"]


class _Planner(DefaultLoadPlanner):
    """A planner with a warning or an error for entries missing in the checkpoint."""

    def __init__(self, *, strict: bool) -> None:
        super().__init__(allow_partial_load=not strict)
        self._strict = strict

    def create_local_plan(self) -> Any:
        """Return the plan of this rank. Raises: KeyError; RuntimeError."""
        saved = self.metadata.state_dict_metadata.keys() if self.metadata else set()
        lacking = sorted(self.state_dict.keys() - saved)
        items = {name: str(path[0]) for name, path in self.mappings.items()}
        absent = sorted({*items.values()} - {items[name] for name in items.keys() & saved})
        if absent:
            raise KeyError(f"the checkpoint has nothing of {absent}")
        if lacking and self._strict:
            raise RuntimeError(f"the checkpoint lacks {lacking[:10]}, of {len(lacking)} entries")
        if lacking:
            _LOG.warning(
                "the checkpoint lacks %d entries, which keep their values: %s",
                len(lacking),
                ", ".join(lacking[:10]),
            )
        return super().create_local_plan()


def _iter_leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for item in value.values():
            yield from _iter_leaves(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _iter_leaves(item)
    else:
        yield value
