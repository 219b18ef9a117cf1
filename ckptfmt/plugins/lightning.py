"""Lightning saves to checkpoints of ckptfmt in the background; resumes continue bit for bit.

    from ckptfmt.plugins.lightning import CkptfmtIO, ExactResume

    saves = ModelCheckpoint(dirpath="checkpoints", every_n_train_steps=500, save_last=True)
    trainer = Trainer(plugins=[CkptfmtIO()], callbacks=[saves, ExactResume()])
    trainer.fit(model, ckpt_path="last")

`CkptfmtIO` works with all strategies that save through a `CheckpointIO`: one device, and DDP. The
settings of ModelCheckpoint apply: names, ``monitor``, ``save_top_k``, ``save_last``. A save returns
when its tensors are copied. When a save replaces a checkpoint, the directory holds the old or the
new checkpoint at every moment, also after a crash. The next save or removal raises the error of a
failed save. `ExactResume` raises the error at the end of the step, and the end of the trainer
raises it at the latest. ModelParallelStrategy (FSDP2, tensor parallelism) saves without a
`CheckpointIO`: use `CkptfmtModelParallelStrategy` instead. `ExactResume` refuses a `CkptfmtIO` with
ModelParallelStrategy, FSDPStrategy and DeepSpeedStrategy.

`ExactResume` restores the state that Lightning omits: the RNG streams of all processes, the
position in DataLoaders, the metrics of callbacks, and a validation or the end of an epoch that was
left to do. A plain DataLoader is read again up to the position. Lightning restores the position of
loaders with a ``state_dict``; each process receives the state of its own loader.

Tested with lightning 2.6.6 and torchdata 0.11.0, on the CPU: one process; DDP, FSDP2 and tensor
parallelism on two over gloo.

Bit for bit with `ExactResume`: a resume from a checkpoint of any moment between two steps, such as
``every_n_train_steps``, the end of a validation or the end of an epoch, also where the trainer was
stopped within an epoch.

If a resume can't be exact, `ExactResume` gives the reason as a warning and in ``differences``:

- another number of processes or batches, or a checkpoint without `ExactResume`;
- a checkpoint from within a step or a validation, as after an exception;
- gradients accumulated and not applied: save with ``every_n_train_steps``;
- a callback or scheduler that monitors the mean of a metric over the training epoch;
- validations by the clock, and a validation that a stop of the trainer has added;
- within an epoch of several processes, a StatefulDataLoader with a sampler that Lightning has
  wrapped;
- plain loaders beside loaders with a ``state_dict``; subclasses of CombinedLoader; persistent
  workers; ``reload_dataloaders_every_n_epochs`` of more than one epoch.

Not noticed: an order of samples from state other than RNG streams, the generators in attributes of
loaders, samplers and data sets, and the epoch.

With `lightning.fabric`, pass ``Fabric(plugins=[io])`` with ``io = CkptfmtIO()``, and call
``io.teardown()`` at the end, which waits for the saves and raises their errors. Keys are free. The
state_dict of a single module has its own names in the checkpoint; the names of several modules
begin with their keys. Fabric doesn't save through `CkptfmtIO` for FSDP, and refuses it.

A training with Lightning has no witness: its checkpoints belong to no run, and the plug-in
therefore knows neither launches nor earlier steps.

``save_last="link"`` links a checkpoint that is still being saved. After a crash the link may point
to no checkpoint; a load refuses such a link by name. `LightningModule.load_from_checkpoint` calls
torch.load, and can't read a checkpoint of ckptfmt. Instead, create the module, and call
``ckptfmt.load(path, ckptfmt.State(weights=module), only="weights:*")``. Hyper-parameters are in
``ckptfmt.load(path, only="extra:hyper_parameters")``. A value that isn't plain, such as an object
among the hyper-parameters, is refused by name: a checkpoint contains no executable code.
"""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities import move_data_to_device
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities import CombinedLoader, rank_zero_warn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler

import ckptfmt
from ckptfmt.plugins.epoch_streams import put_streams, read_streams

#: Keys of Lightning's checkpoints with the contents of a field. All other keys go to ``extra``.
_WEIGHTS: Final = "state_dict"
_OPTIMIZERS: Final = "optimizer_states"
_EXTRA: Final = "extra/"
#: The key of `ExactResume` in Lightning's checkpoint.
_EXACT: Final = "ckptfmt.exact_resume"
#: The key of the names of modules and optimizers in a checkpoint of Fabric.
_FABRIC: Final = "ckptfmt.fabric"
#: Greatest time to wait for the save of another process, in seconds.
_WAIT_S: Final = 600.0
_MAPPINGS: Final = (dict, OrderedDict, Counter)
_LISTS: Final = (list, tuple, deque, set, frozenset)
_PLAIN: Final = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    np.ndarray,
    torch.Size,
    torch.dtype,
    torch.device,
)


class _Saves:
    """The saves to paths that Lightning chooses, and their removal.

    Args:
        options: options of `ckptfmt.PathSaver`.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options
        self._saver: ckptfmt.PathSaver | None = None
        #: The handle of the last save to each path.
        self._handles: dict[str, Any] = {}

    def save(self, path: Any, state: ckptfmt.State, step: int) -> None:
        """Begin a save, which replaces a checkpoint at the path. Raises: `ckptfmt.CkptError`."""
        self.check()
        self._saver = self._saver or ckptfmt.PathSaver(**self._options)
        # pathlib would resolve or normalise the path of the user.
        self._handles[os.path.abspath(path)] = self._saver.save(  # noqa: PTH100
            path, state, step=step, replace=True
        )

    def wait(self, path: Any) -> None:
        """Wait until this process no longer writes to a path. Raises: the save's error."""
        # pathlib would resolve or normalise the path of the user.
        handle = self._handles.pop(os.path.abspath(path), None)  # noqa: PTH100
        if handle is not None:
            handle.wait()
            handle.wait_over()

    def remove(self, path: Any) -> None:
        """Delete the checkpoint at a path, once its save has ended.

        A deletion that a crash interrupts leaves a directory that isn't a checkpoint.

        Raises: the error of the path's save; `ckptfmt.CkptError`; OSError.
        """
        self.wait(path)
        place = Path(path)
        if place.is_symlink() or not place.is_dir():
            place.unlink(missing_ok=True)  # a link, or a checkpoint file of Lightning's own format
            return
        try:
            (self._saver or ckptfmt.PathSaver(**self._options)).remove(place)
        except ckptfmt.CkptError as error:
            # Other errors mean no checkpoint, or a damaged one.
            if error.code.startswith(("SAVE_PENDING", "ARGUMENT", "STORE_")):
                raise
        (place / "manifest.json").unlink(missing_ok=True)
        shutil.rmtree(place, ignore_errors=not place.exists())

    def check(self) -> None:
        """Raise the error of a failed save, once."""
        for path, handle in list(self._handles.items()):
            if handle.state == "FAILED":
                self.wait(path)

    def close(self) -> None:
        """Wait for all saves. Later saves are allowed. Raises: a save's error."""
        saver = self._saver
        self._saver = None
        self._handles = {}
        if saver is not None:
            saver.close()


class CkptfmtIO(CheckpointIO):
    """The CheckpointIO plug-in: stores Lightning's checkpoints as ckptfmt's, in the background.

    The module's state_dict is the field weights. Optimizer states are numbered in Lightning's
    order. All other entries are in ``extra`` under their keys.

    Args:
        saving: keyword arguments of `ckptfmt.PathSaver`.
    """

    def __init__(self, **saving: Any) -> None:
        self.saves = _Saves({"writer": (0, 1), "overlap": False, **saving})

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        """Begin a save.

        Raises: `ckptfmt.CkptError`, also for the failure of an earlier save; TypeError for
            `storage_options`, and for a value that isn't plain, which the error names.
        """
        if storage_options is not None:
            raise TypeError(
                "CkptfmtIO takes no storage_options: pass the options of a ckptfmt.PathSaver to"
                " CkptfmtIO"
            )
        plain = checkpoint if _WEIGHTS in checkpoint else _from_fabric(checkpoint)
        state = ckptfmt.State(
            weights=plain[_WEIGHTS] or None,
            optimizer=plain.get(_OPTIMIZERS),
            extra=_extra_of(plain),
            rng=False,
        )
        step = plain.get("global_step", plain.get("step"))
        self.saves.save(path, state, step if isinstance(step, int) else 0)

    def load_checkpoint(
        self,
        path: Any,
        map_location: Any = None,
        weights_only: bool | None = None,  # noqa: ARG002, FBT001 - the framework's signature
    ) -> dict[str, Any]:
        """Return the saved checkpoint, with tensors on the CPU or on the given device.

        Args:
            path: path of the checkpoint.
            map_location: a device.
            weights_only: ignored: no loaded value executes code.

        Raises: `ckptfmt.CkptError`: every byte is verified; ValueError for a checkpoint of
            another program.
        """
        self.saves.wait(path)
        # Another process may still save. Without framework=, arrays of numpy stay arrays.
        trees: Any = ckptfmt.load(path, wait_s=_WAIT_S)
        values = trees.get("optimizer", {})
        has_names = any(name.startswith("group/") for name in values)
        if has_names and f"{_EXTRA}pytorch-lightning_version" not in values:
            raise ValueError(
                f"{path} isn't a checkpoint of Lightning: leave ckpt_path out, and load weights and"
                " optimizer in on_train_start: ckptfmt.load(path, ckptfmt.State(weights=self,"
                " optimizer=self.trainer.optimizers[0], rng=False), allow=('unexpected',))"
            )
        checkpoint = {_key_of(name): value for name, value in values.items()}
        checkpoint[_WEIGHTS] = trees.get("weights", {})
        if _FABRIC in checkpoint:
            checkpoint = _to_fabric(checkpoint)
        return (
            checkpoint
            if map_location is None
            else move_data_to_device(checkpoint, torch.device(map_location))
        )

    def remove_checkpoint(self, path: Any) -> None:
        """Delete a checkpoint, once its save has ended. Raises: the save's error."""
        self.saves.remove(path)

    def teardown(self) -> None:
        """Wait for the saves. Raises: a save's error."""
        self.saves.close()


class _Value:
    """A value that several processes save as it is.

    Several processes save a mapping of tensors tensor by tensor, and an empty mapping not at all.
    """

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, value: Any) -> None:
        self.value = value


class CkptfmtModelParallelStrategy(ModelParallelStrategy):
    """FSDP2 and tensor parallelism: every process saves its own shards.

    Names are those of `ckptfmt.State`. Optimizer state is stored by parameter name. Any number of
    processes can load a checkpoint, and so can a plain module and optimizer. Hooks such as
    ``on_save_checkpoint`` receive a checkpoint without weights and optimizer states.

    Args:
        args, kwargs: arguments of `ModelParallelStrategy`.
        saving: keyword arguments of `ckptfmt.PathSaver`.
    """

    def __init__(self, *args: Any, saving: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.saves = _Saves(saving or {})
        self._state = ckptfmt.State(rng=False)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return an empty dict: the live module is saved."""
        return {}

    # The framework's signature.
    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:  # noqa: ARG002
        """Return an empty dict: the live optimizer is saved."""
        return {}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Begin a save; every process calls it. Raises: like `CkptfmtIO.save_checkpoint`."""
        if storage_options is not None:
            raise TypeError(
                "storage_options aren't supported: pass saving= to CkptfmtModelParallelStrategy"
            )
        self._state.weights = self.model
        self._state.optimizer = [*self.optimizers] if checkpoint.get(_OPTIMIZERS) else None
        self._state.extra = {
            key: ckptfmt.FirstWorker(_Value(value)) for key, value in _extra_of(checkpoint).items()
        }
        self.saves.save(self.broadcast(filepath), self._state, checkpoint.get("global_step", 0))

    def load_checkpoint(
        self,
        checkpoint_path: Any,
        weights_only: bool | None = None,  # noqa: ARG002, FBT001 - the framework's signature
    ) -> dict[str, Any]:
        """Load into the live module and optimizers, and return the other entries.

        Raises: `ckptfmt.CkptError`.
        """
        path = self.broadcast(checkpoint_path)
        self.saves.wait(path)
        with ckptfmt.open(path) as found:
            extra: dict[str, Any] = {
                _key_of(name): _Value()
                for field, name, _ in found.leaves
                if field == "optimizer" and name.startswith(_EXTRA)
            }
            digest = found.digest
        state = ckptfmt.State(
            weights=self.model, optimizer=[*self.optimizers] or None, extra=extra, rng=False
        )
        only = None if self.optimizers else ("weights:*", f"optimizer:{_EXTRA}*")
        ckptfmt.load(path, state, only=only, digest=digest)
        values = {key: value.value for key, value in extra.items()}
        return {**values, _WEIGHTS: {}, _OPTIMIZERS: []}

    def remove_checkpoint(self, filepath: Any) -> None:
        """Delete a checkpoint, once its save has ended. Raises: the save's error."""
        self.saves.wait(filepath)
        if self.is_global_zero:
            self.saves.remove(filepath)

    def teardown(self) -> None:
        """Wait for the saves, then end as Lightning does. Raises: a save's error."""
        self.saves.close()
        super().teardown()


class _Watched(CombinedLoader):
    """Lightning's combination of the loaders, with the RNG streams that decided the epoch's order.

    Attributes:
        trainer: the trainer that iterates over the loaders.
        made: RNG streams before the iterator was made.
        draws: RNG streams before the batches at which a loader draws an order, by number of batch:
            the first batch, and the newest restart of each shorter loader.
        fetched: number of batches taken from the iterator.
        planned: RNG streams to restore, by number of the batch before which.
        seeds: seeds of samplers in the resumed training, by name.
        resumed: RNG streams for the first iterator after a load, until the training starts.
    """

    trainer: Any = None
    seeds: Mapping[str, Any]
    resumed: list[Mapping[str, Any]]
    made: dict[str, Any] | None = None
    draws: dict[int, tuple[int, dict[str, Any]]]
    fetched: int = 0
    planned: dict[int, Mapping[str, Any]]

    def watch(
        self, trainer: Trainer, seeds: Mapping[str, Any], resumed: list[Mapping[str, Any]]
    ) -> None:
        """Begin to record for a trainer."""
        self.trainer = trainer
        self.seeds = seeds
        self.resumed = resumed
        self.draws = {}
        self.planned = {}

    def __iter__(self) -> Any:
        # Lightning makes the first iterator before it tells the samplers the epoch, too late for a
        # loader with worker processes, which draws the order at once.
        for loader in self.flattened:
            _set_epoch(loader, self.trainer.fit_loop.epoch_progress.current.processed)
        _put_generators(self, self.seeds)
        for streams in self.resumed:
            _put_streams(self, streams)
        self.made = _streams(self)
        self.draws = {}
        self.fetched = 0
        return super().__iter__()

    def __next__(self) -> Any:
        if (planned := self.planned.pop(self.fetched, None)) is not None:
            _put_streams(self, planned)
        is_first = not self.draws
        before = _streams(self) if is_first or len(self.flattened) > 1 else {}
        iterators = list(self._iterator.iterators)
        batch = super().__next__()
        if is_first:
            self.draws[-1] = 0, before
        for number, (old, new) in enumerate(zip(iterators, self._iterator.iterators, strict=True)):
            if old is not new:
                self.draws[number] = self.fetched, before
        self.fetched += 1
        return batch


class ExactResume(Callback):
    """A callback that restores the state that Lightning omits.

    Every checkpoint contains, for each process, the RNG streams at the save, the streams from which
    the order of the epoch was drawn, the position in the loaders, the metrics of callbacks, and
    whether a validation or the end of an epoch was left to do. A resume draws the order again,
    reads the loaders up to the position, and continues with the rest.

    Attributes:
        differences: the reasons for which the resumed training isn't the same as an undisturbed
            training; empty for an exact resume. Each reason is also given as a warning.
    """

    def __init__(self) -> None:
        self.differences: tuple[str, ...] = ()
        self._loaded: dict[str, Any] | None = None
        self._rest = _Rest()
        self._seeds: dict[str, Any] = {}
        self._began: list[Mapping[str, Any]] = []

    # The framework's signature.
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:  # noqa: ARG002
        """Watch the loaders. Raises: TypeError for a strategy that ignores `CkptfmtIO`."""
        _check_strategy(trainer.strategy)
        source: Any = trainer.fit_loop._data_source  # noqa: SLF001
        if stage == "fit" and "dataloader" not in vars(source):
            source.dataloader = partial(
                _watch, source.dataloader, trainer, self._seeds, self._began
            )

    # The framework's signature.
    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Raise the error of a failed save."""
        for part in (trainer.strategy, trainer.strategy.checkpoint_io):
            if isinstance(part, CkptfmtIO | CkptfmtModelParallelStrategy):
                part.saves.check()

    def on_save_checkpoint(
        self,
        trainer: Trainer,
        pl_module: LightningModule,  # noqa: ARG002 - the framework's signature
        checkpoint: dict[str, Any],
    ) -> None:
        """Add the state that Lightning omits, of all processes, to a checkpoint."""
        loops = checkpoint["loops"]["fit_loop"]["state_dict"]
        mine = _capture(trainer, loops.get("combined_loader"))
        everyone: list[Any] = [mine] * trainer.world_size
        if trainer.world_size > 1:
            torch.distributed.all_gather_object(everyone, mine)
        checkpoint[_EXACT] = everyone

    def on_load_checkpoint(
        self,
        trainer: Trainer,
        pl_module: LightningModule,  # noqa: ARG002 - the framework's signature
        checkpoint: dict[str, Any],
    ) -> None:
        """Keep this process's part for `on_train_start`, and tell Lightning's loops the rest."""
        saved = checkpoint.get(_EXACT, ())
        self.differences = ()
        if len(saved) != trainer.world_size:
            told = f"{len(saved)} processes" if saved else "none: it was made without ExactResume"
            self._tell(
                f"the checkpoint has random numbers of {told}; the training goes on with others"
            )
            return
        self._loaded = _upgraded(saved[trainer.global_rank])
        now = self._loaded["now"]
        self._seeds |= {name: now[name] for name in now if name.endswith(_SEED)}
        self._began[:] = [self._loaded["began"]] if self._loaded["began"] else []
        self._rest = _set_loops(checkpoint["loops"]["fit_loop"], self._loaded)
        self._tell(*self._loaded["differences"])

    # The framework's signature.
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        """Advance the loaders to their saved position, and restore the RNG streams.

        Lightning calls this method when the iterators exist, before a batch is fetched.

        Raises: ValueError for a loader that ends before the saved position.
        """
        loaded = self._loaded
        self._loaded = None
        self._began.clear()
        if loaded is None:
            return
        loop = trainer.fit_loop
        loader: Any = loop._combined_loader  # noqa: SLF001
        self._tell(*_differences_at_start(trainer, loaded, self._rest))
        loop._last_train_dl_reload_epoch = loaded["reloaded"]  # noqa: SLF001
        trainer.callback_metrics.update(loaded["metrics"])
        self._rest.begin(loop)
        is_read_again = loaded["began"] is not None and loaded["fetched"] is not None
        if is_read_again and self._rest.kind in (_BATCHES, _VALIDATION):
            _advance(loop._data_fetcher, loader, loaded)  # noqa: SLF001
        if self._rest.kind == _BATCHES and isinstance(loader, _Watched):
            # Hooks that follow may draw random numbers.
            loader.planned = {loader.fetched: loaded["now"]}
        _put_streams(loader, loaded["now"])

    # The framework's signature.
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        """Begin the epoch that follows a resumed end of an epoch as any other."""
        if self._rest.kind == _EPOCH_END:
            trainer.fit_loop.epoch_loop.restarting = False
        self._rest = _Rest()

    def _tell(self, *differences: str) -> None:
        self.differences += differences
        for difference in differences:
            rank_zero_warn(
                f"the resumed training isn't the same as an undisturbed one: {difference}"
            )


#: The rest of a step or an epoch at a save.
_BATCHES: Final = "batches"
_VALIDATION: Final = "validation"
_EPOCH_END: Final = "end of the epoch"
_NEXT_EPOCH: Final = "next epoch"
_AFTER_VALIDATION: Final = "after the validation"


@dataclass(frozen=True, slots=True)
class _Rest:
    """The rest of a step or an epoch, which Lightning has to do first after a load.

    Attributes:
        kind: the first thing to do.
        schedulers: "step" or "epoch" if schedulers that follow a metric weren't updated.
    """

    kind: str = _BATCHES
    schedulers: str | None = None

    def begin(self, loop: Any) -> None:
        """Tell Lightning's loops the rest, before the first batch."""
        epochs = loop.epoch_loop
        # Without metrics, Lightning wouldn't update schedulers at the end of a resumed epoch.
        loop._restarting = False  # noqa: SLF001
        if self.schedulers is not None:
            progress = loop.epoch_progress.current
            progress.completed -= self.schedulers == "epoch"
            epochs.update_lr_schedulers(self.schedulers, update_plateau_schedulers=True)
            progress.completed += self.schedulers == "epoch"
        if self.kind == _VALIDATION:
            epochs.val_loop.restarting = False
            epochs.val_loop._restart_stage = "restarted_mid_evaluation"  # noqa: SLF001
        elif self.kind == _EPOCH_END:
            epochs.val_loop._has_run = True  # noqa: SLF001 - nothing is left to validate
        elif self.kind == _NEXT_EPOCH:
            epochs.restarting = False
            loop._resuming_from_checkpoint = False  # noqa: SLF001 - Lightning makes an iterator


def _set_loops(loops: dict[str, Any], saved: Mapping[str, Any]) -> _Rest:
    """Return the rest, and set the progress in saved loops so that Lightning does the rest."""
    if saved["loaders"] is not None:
        loops["state_dict"]["combined_loader"] = saved["loaders"]
    batches = loops["epoch_loop.batch_progress"]
    epochs = loops["epoch_progress"]["total"]
    is_in_step = batches["total"]["processed"] < batches["total"]["ready"]
    if batches["total"]["ready"] == 0 or is_in_step:
        return _Rest()
    if epochs["processed"] < epochs["started"]:
        return _rest_of_epoch(loops, saved)
    if batches["is_last_batch"]:
        was_completed = epochs["completed"] == epochs["processed"]
        for counts in loops["epoch_progress"].values():
            counts["completed"] = counts["processed"]
        return _Rest(_NEXT_EPOCH, None if was_completed else "epoch")
    # The trainer was stopped within the epoch, which isn't over.
    for counts in loops["epoch_progress"].values():
        counts["processed"] -= 1
        counts["completed"] = counts["processed"]
    loops["epoch_loop.state_dict"]["_batches_that_stepped"] -= saved["validates"]
    return _Rest()


def _rest_of_epoch(loops: dict[str, Any], saved: Mapping[str, Any]) -> _Rest:
    """Do as `_set_loops` for a checkpoint within an epoch, between two steps."""
    batches = loops["epoch_loop.batch_progress"]
    has_validated = batches["total"]["completed"] == batches["total"]["processed"]
    if has_validated:
        return _Rest(_AFTER_VALIDATION if batches["is_last_batch"] else _BATCHES)
    if not saved["validates"] and not batches["is_last_batch"]:
        return _Rest(_BATCHES, "step")
    for key in ("total", "current"):
        batches[key]["completed"] += 1
    if saved["validates"]:
        return _Rest(_VALIDATION)
    loops["epoch_loop.state_dict"]["_batches_that_stepped"] += 1
    return _Rest(_EPOCH_END, "step")


def _check_strategy(strategy: Any) -> None:
    """Check that a strategy with `CkptfmtIO` saves through a CheckpointIO. Raises: TypeError."""
    io = strategy.checkpoint_io
    while not isinstance(io, CkptfmtIO) and hasattr(io, "checkpoint_io"):
        io = io.checkpoint_io
    ignores = isinstance(strategy, DeepSpeedStrategy | FSDPStrategy | ModelParallelStrategy)
    if (
        isinstance(io, CkptfmtIO)
        and ignores
        and not isinstance(strategy, CkptfmtModelParallelStrategy)
    ):
        raise TypeError(
            f"{type(strategy).__name__} doesn't save through CkptfmtIO. For FSDP2 and tensor"
            " parallelism, use Trainer(strategy=CkptfmtModelParallelStrategy(...)) with fully_shard"
            " in configure_model"
        )


def _watch(make: Callable[[], Any], *resumed: Any) -> Any:
    """Return the loaders of a training as a loader that records RNG streams, if possible."""
    found: Any = make()
    if not isinstance(found, CombinedLoader):
        found = _Watched(found, "max_size_cycle")  # as Lightning does
    elif type(found) is CombinedLoader:
        found.__class__ = _Watched
    if isinstance(found, _Watched):
        found.watch(*resumed)
    return found


def _capture(trainer: Trainer, loader_states: list[Any] | None) -> dict[str, Any]:
    """Return the state of this process that Lightning omits."""
    loop = trainer.fit_loop
    loader: Any = loop._combined_loader  # noqa: SLF001
    progress = loop.epoch_loop.batch_progress
    is_in_step = progress.total.processed < progress.total.ready
    mine: dict[str, Any] = {
        "now": _streams(loader),
        "began": None,
        "draws": {},
        "fetched": 0,
        "loaders": None,
        "batches": loop.max_batches,
        "validates": _validates(trainer, is_in_step=is_in_step),
        "reloaded": loop._last_train_dl_reload_epoch,  # noqa: SLF001
        "metrics": dict(trainer.callback_metrics),
        "differences": _differences_at_save(trainer, is_in_step=is_in_step),
    }
    if loader is None:
        return mine
    is_within = is_in_step or not progress.is_last_batch
    if isinstance(loader, _Watched) and is_within:
        mine |= {
            "began": loader.made,
            "draws": dict(sorted(loader.draws.values(), key=itemgetter(0))),
            "fetched": loader.fetched - is_in_step,
        }
    if all(map(_is_stateful, loader.flattened)):
        mine |= {"fetched": None, "draws": {}}
    mine["loaders"] = loader_states if mine["fetched"] is None else []
    return mine


def _validates(trainer: Trainer, *, is_in_step: bool) -> bool:
    """Return whether Lightning validates after the newest batch."""
    loop = trainer.fit_loop
    fetcher = loop._data_fetcher  # noqa: SLF001
    if is_in_step or fetcher is None or loop.epoch_loop.batch_progress.current.ready == 0:
        return False
    return bool(loop.epoch_loop._should_check_val_fx(fetcher))  # noqa: SLF001


def _differences_at_save(trainer: Trainer, *, is_in_step: bool) -> list[str]:
    """Return the reasons for which no resume from a checkpoint of now can be exact."""
    loop = trainer.fit_loop
    loader: Any = loop._combined_loader  # noqa: SLF001
    if loader is None:
        return []
    progress = loop.epoch_loop.batch_progress
    accumulated = progress.current.ready % trainer.accumulate_grad_batches
    validation = loop.epoch_loop.val_loop.batch_progress
    has_validated = validation.is_last_batch and (
        validation.current.completed == validation.current.ready
    )
    stateful = [_is_stateful(one) for one in loader.flattened]
    fetches = loop._data_fetcher  # noqa: SLF001
    means = _monitored_means(trainer)
    found = {
        "the checkpoint was saved within a step; the batch is trained again, with other random"
        " numbers. Save between steps": is_in_step,
        f"the checkpoint lacks the gradients that {accumulated} batches accumulated. Save after"
        " an optimizer step, as every_n_train_steps does": not is_in_step
        and not progress.is_last_batch
        and accumulated != 0,
        "the checkpoint was saved within a validation. Save at the end of validations, or between"
        " steps": trainer.validating and not has_validated,
        "the trainer had been told to stop within an epoch, and validated once more": (
            trainer.should_stop and trainer.enable_validation and not progress.is_last_batch
        ),
        "validations follow the clock. Give val_check_interval as a number": (
            trainer.enable_validation and trainer._val_check_time_interval is not None  # noqa: SLF001
        ),
        "the training step had fetched batches ahead": (
            hasattr(fetches, "iterator_wrapper") and fetches.fetched != progress.current.ready
        ),
        "Lightning has wrapped the sampler of a loader with a state_dict, and doesn't restore the"
        " order. Use a plain DataLoader": not progress.is_last_batch and _has_wrapped(loader),
        "some loaders have a state_dict and others don't. Use StatefulDataLoader for all": (
            any(stateful) and not all(stateful)
        ),
        f"the order of a {type(loader).__name__} isn't recorded. Use CombinedLoader": (
            not all(stateful) and not isinstance(loader, _Watched)
        ),
        f"the means of the epoch, {', '.join(means)}, cover only batches after the resume, and a"
        " callback or a scheduler monitors them. Monitor a metric of the validation": (
            bool(means) and loop.epoch_progress.total.processed < loop.epoch_progress.total.started
        ),
    }
    return [reason for reason, applies in found.items() if applies]


def _has_wrapped(loader: Any) -> bool:
    """Return whether a loader with a state_dict has a sampler in Lightning's wrapper."""
    samplers = [
        getattr(getattr(one, "batch_sampler", None), "sampler", None)
        for one in loader.flattened
        if _is_stateful(one)
    ]
    return any(isinstance(sampler, DistributedSamplerWrapper) for sampler in samplers)


def _monitored_means(trainer: Trainer) -> list[str]:
    """Return the metrics of training epochs that a callback or a scheduler monitors."""
    watchers = [*trainer.callbacks, *trainer.lr_scheduler_configs]  # type: ignore[attr-defined]
    monitored = {getattr(one, "monitor", None) for one in watchers}
    results = trainer.fit_loop.epoch_loop._results.values()  # noqa: SLF001
    names = {result.meta.name for result in results if result.meta.on_epoch}
    return sorted(name for name in names if {name, f"{name}_epoch"} & monitored)


def _differences_at_start(trainer: Trainer, loaded: Mapping[str, Any], rest: _Rest) -> list[str]:
    """Return the reasons for which this resume can't be exact."""
    loop = trainer.fit_loop
    loader: Any = loop._combined_loader  # noqa: SLF001
    asked = loop._last_train_dl_reload_epoch  # noqa: SLF001
    lasting = any(getattr(one, "persistent_workers", False) for one in loader.flattened)
    found = {
        f"the epoch has {loop.max_batches} batches; {loaded['batches']} at the save": (
            loop.max_batches != loaded["batches"]
        ),
        f"the loaders were made in epoch {asked} instead of {loaded['reloaded']}, by"
        " reload_dataloaders_every_n_epochs": rest.kind in (_BATCHES, _VALIDATION)
        and trainer.reload_dataloaders_every_n_epochs > 0
        and asked != loaded["reloaded"],
        "the loaders and samplers have other generators than at the save": (
            _generators(loader).keys() != loaded["now"].keys() - _STREAMS
        ),
        "persistent worker processes draw other random numbers. Leave persistent_workers out, if"
        " the data set draws any": lasting and loop.epoch_progress.current.processed > 0,
    }
    return [reason for reason, applies in found.items() if applies]


_OLDER: Final = (
    "the checkpoint is of ckptfmt 0.10 or older, which doesn't record whether a validation or the"
    " end of an epoch is left to do"
)


def _upgraded(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return a process's part of a checkpoint, in today's form."""
    if "draws" in saved:
        return dict(saved)
    # ckptfmt 0.10 recorded the streams of the first batch alone.
    made = saved["began"]
    return {
        "now": saved["now"],
        "began": made,
        "draws": {} if made is None or saved.get("is_made_anew", True) else {0: made},
        "fetched": saved.get("batch_count", 0),
        "loaders": None,
        "batches": None,
        "validates": False,
        "reloaded": float("-inf"),
        "metrics": {},
        "differences": [_OLDER],
    }


def _is_stateful(loader: object) -> bool:
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def _set_epoch(loader: object, epoch: int) -> None:
    """Tell the samplers of a loader the epoch, as Lightning does before each epoch."""
    batches = getattr(loader, "batch_sampler", None)
    for sampler in (getattr(loader, "sampler", None), getattr(batches, "sampler", None)):
        if callable(tell := getattr(sampler, "set_epoch", None)):
            tell(epoch)


def _advance(fetcher: Any, loader: _Watched, loaded: Mapping[str, Any]) -> None:
    """Make the iterator of an epoch again, and read the loaders up to the saved position.

    Raises: ValueError for a loader that ends before the position.
    """
    _put_streams(loader, loaded["began"])
    loader.planned = dict(loaded["draws"])
    iter(fetcher)
    batches = getattr(fetcher, "iterator_wrapper", fetcher)
    while loader.fetched < loaded["fetched"]:
        try:
            next(batches)
        except StopIteration:
            raise ValueError(
                f"the loader ended after {loader.fetched} batches, before the saved position,"
                f" {loaded['fetched']}: resume with the data of the save"
            ) from None
    fetcher.fetched = 0  # Lightning adds the position


#: Names of the streams of a process, beside those of loaders.
_STREAMS: Final = frozenset({"python", "numpy", "torch", "cuda"})
#: Suffix of the names of samplers' seeds.
_SEED: Final = "/seed"


def _generators(loader: Any) -> dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]]:
    """Return functions that read and set the generators of loaders, samplers and data sets.

    The seed of a DistributedSampler counts as a generator.
    """
    found: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {}
    rest = [(f"loader/{number}", one) for number, one in enumerate(loader.flattened)]
    seen: set[int] = set()
    while rest:
        name, owner = rest.pop()
        for key, value in getattr(owner, "__dict__", {}).items():
            at = f"{name}/{key}"
            if id(value) in seen:
                continue
            if isinstance(value, DataLoader | Dataset | Sampler):
                rest.append((at, value))
            elif isinstance(value, torch.Generator):
                found[at] = value.get_state, value.set_state
            elif isinstance(value, random.Random):
                found[at] = value.getstate, value.setstate
            elif isinstance(value, np.random.Generator):
                bits = value.bit_generator
                found[at] = partial(getattr, bits, "state"), partial(setattr, bits, "state")
            else:
                continue
            seen.add(id(value))
        if isinstance(owner, DistributedSampler):
            found[f"{name}{_SEED}"] = (
                partial(getattr, owner, "seed"),
                partial(setattr, owner, "seed"),
            )
    return found


def _streams(loader: Any) -> dict[str, Any]:
    """Return the RNG streams of this process and of its loaders."""
    generators = {} if loader is None else _generators(loader)
    streams: dict[str, Any] = {name: read() for name, (read, _) in generators.items()}
    return streams | read_streams() | {"cuda": torch.cuda.get_rng_state_all()}


def _put_generators(loader: Any, streams: Mapping[str, Any]) -> None:
    for name, (_, write) in _generators(loader).items():
        if name in streams:
            write(streams[name])


def _put_streams(loader: Any, streams: Mapping[str, Any]) -> None:
    _put_generators(loader, streams)
    put_streams(streams)
    torch.cuda.set_rng_state_all(streams["cuda"][: torch.cuda.device_count()])


def _key_of(name: str) -> str:
    """Return the key in Lightning's checkpoint for a name in a checkpoint of ckptfmt."""
    return name.removeprefix(_EXTRA).replace("~1", "/").replace("~0", "~") if name else _OPTIMIZERS


def _from_fabric(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checkpoint of Fabric, with keys of the user, with Lightning's keys.

    The names of a single module's weights stay as they are. The names of several modules' weights
    begin with the user's key, as in a ModuleDict. A mapping of tensors counts as a module.

    Raises: TypeError for modules with equal names of weights.
    """
    if _is_weights(checkpoint):
        return {_WEIGHTS: checkpoint, _FABRIC: None}
    modules = {key: value for key, value in checkpoint.items() if _is_weights(value)}
    optimizers = {
        key: value
        for key, value in checkpoint.items()
        if isinstance(value, dict) and value.keys() >= {"state", "param_groups"}
    }
    weights: dict[str, Any] = {}
    for key, value in modules.items():
        named = {name if len(modules) == 1 else f"{key}.{name}": value[name] for name in value}
        if twice := weights.keys() & named.keys():
            raise TypeError(f"two modules have weights named {min(twice)}: give other keys")
        weights |= named
    kinds = {key: [len(value), type(value) is OrderedDict] for key, value in modules.items()}
    taken = modules.keys() | optimizers.keys()
    return {
        _WEIGHTS: weights,
        _OPTIMIZERS: [*optimizers.values()] or None,
        _FABRIC: {"modules": kinds, "optimizers": [*optimizers]},
        **{key: value for key, value in checkpoint.items() if key not in taken},
    }


def _to_fabric(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return the checkpoint from which `_from_fabric` was made."""
    form = checkpoint.pop(_FABRIC)
    weights = checkpoint.pop(_WEIGHTS)
    if form is None:
        return dict(weights)
    optimizers = checkpoint.pop(_OPTIMIZERS, None) or []
    checkpoint |= dict(zip(form["optimizers"], optimizers, strict=True))
    tensors = iter(weights.items())
    for key, (count, is_ordered) in form["modules"].items():
        before = "" if len(form["modules"]) == 1 else f"{key}."
        items = ((name.removeprefix(before), tensor) for name, tensor in islice(tensors, count))
        checkpoint[key] = OrderedDict(items) if is_ordered else dict(items)
    return checkpoint


def _is_weights(value: object) -> bool:
    return (
        type(value) in (dict, OrderedDict)
        and len(value) > 0  # type: ignore[arg-type]
        and all(
            isinstance(name, str) and isinstance(tensor, torch.Tensor)
            for name, tensor in value.items()  # type: ignore[attr-defined]
        )
    )


def _extra_of(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries for ``extra``. Raises: TypeError for a value that isn't plain."""
    extra = {key: value for key, value in checkpoint.items() if key not in (_WEIGHTS, _OPTIMIZERS)}
    opaque = next(
        (found for key, value in extra.items() if (found := _find_opaque(value, key))), None
    )
    if opaque is not None:
        remedy = (
            "leave it out, as with save_hyperparameters(ignore=...), or turn it into plain values"
        )
        raise TypeError(f"{opaque} is no plain value: {remedy}")
    return extra


def _find_opaque(value: Any, name: str) -> str | None:
    """Return name and type of the first value that isn't plain."""
    kind = type(value)
    if kind in _MAPPINGS or kind in _LISTS:
        items = value.items() if kind in _MAPPINGS else enumerate(value)
        return next(
            (found for key, item in items if (found := _find_opaque(item, f"{name}/{key}"))), None
        )
    is_plain = kind in _PLAIN or isinstance(value, torch.Tensor | np.generic)
    return None if is_plain else f"{name}, a {kind.__module__}.{kind.__qualname__},"
