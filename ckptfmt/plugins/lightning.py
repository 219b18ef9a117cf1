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
`CheckpointIO`: use `CkptfmtModelParallelStrategy` instead.

`ExactResume` restores the state that Lightning omits: the RNG streams of all processes, and the
position in a DataLoader. A plain DataLoader is read again up to the position. A StatefulDataLoader
isn't read again, since Lightning restores its position.

Tested with lightning 2.6.6 and torchdata 0.11.0, on the CPU: one process; DDP and FSDP2 on two over
gloo.

Bit for bit with `ExactResume`: a resume from a checkpoint of ``every_n_train_steps``, or of the end
of a validation, in the middle of an epoch or at its last step, of a shuffled DataLoader and of a
StatefulDataLoader.

Not bit for bit:

- a checkpoint of the end of an epoch (ModelCheckpoint's default) in a training without validation:
  Lightning then trains a batch that isn't part of the epoch;
- a checkpoint of ``every_n_train_steps`` at a step that a validation follows: Lightning omits
  the validation, its metrics, and the random numbers that the validation draws. Choose different
  intervals for ``every_n_train_steps`` and ``val_check_interval``, or save at the end of
  validations: ``monitor="val_loss"``, without ``every_n_train_steps``;
- another number of processes, for which no random numbers were saved;
- data sets that draw random numbers in worker processes.

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
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities import rank_zero_warn

import ckptfmt

#: Keys of Lightning's checkpoints whose contents are a field. All other keys go to ``extra``.
_WEIGHTS: Final = "state_dict"
_OPTIMIZERS: Final = "optimizer_states"
_EXTRA: Final = "extra/"
#: The key of `ExactResume` in Lightning's checkpoint.
_EXACT: Final = "ckptfmt.exact_resume"
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
        state = ckptfmt.State(
            weights=checkpoint[_WEIGHTS],
            optimizer=checkpoint.get(_OPTIMIZERS),
            extra=_extra_of(checkpoint),
            rng=False,
        )
        self.saves.save(path, state, checkpoint.get("global_step", 0))

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

        Raises: `ckptfmt.CkptError`: every byte is verified.
        """
        self.saves.wait(path)
        trees: Any = ckptfmt.load(path, framework="torch")
        checkpoint = {_key_of(name): value for name, value in trees["optimizer"].items()} | {
            _WEIGHTS: trees["weights"]
        }
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
            key: ckptfmt.FirstWorker(value) for key, value in _extra_of(checkpoint).items()
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
                _key_of(name): None
                for field, name, _ in found.leaves
                if field == "optimizer" and name.startswith(_EXTRA)
            }
            digest = found.digest
        state = ckptfmt.State(
            weights=self.model, optimizer=[*self.optimizers] or None, extra=extra, rng=False
        )
        only = None if self.optimizers else ("weights:*", f"optimizer:{_EXTRA}*")
        ckptfmt.load(path, state, only=only, digest=digest)
        return {**extra, _WEIGHTS: {}, _OPTIMIZERS: []}

    def remove_checkpoint(self, filepath: Any) -> None:
        """Delete a checkpoint, once its save has ended. Raises: the save's error."""
        self.saves.wait(filepath)
        if self.is_global_zero:
            self.saves.remove(filepath)

    def teardown(self) -> None:
        """Wait for the saves, then end as Lightning does. Raises: a save's error."""
        self.saves.close()
        super().teardown()


class ExactResume(Callback):
    """A callback that restores the state that Lightning omits: RNG streams and loader positions.

    Every checkpoint contains the RNG streams of all processes at the start of the epoch, which
    decide the order of the epoch, and at the save. After a resume the first streams apply while the
    loader is read up to its position, and the second streams apply from then on.
    """

    def __init__(self) -> None:
        #: The loaders' iterator and the RNG streams when the epoch began.
        self._began: tuple[Any, dict[str, Any]] | None = None
        self._loaded: dict[str, Any] | None = None

    # The framework's signature.
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        """Record the RNG streams from which the order of the epoch is drawn."""
        self._began = _iterator(trainer), _streams(trainer)

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
        """Add the RNG streams and loader positions of all processes to a checkpoint."""
        mine: dict[str, Any] = {"now": _streams(trainer), "began": None}
        progress = trainer.fit_loop.epoch_loop.batch_progress
        if self._began is not None and progress.current.ready and not progress.is_last_batch:
            iterator, began = self._began
            # Lightning creates the iterator of the first epoch before the epoch begins, and later
            # iterators after the epoch has begun.
            is_made_anew = _iterator(trainer) is not iterator
            mine |= {
                "began": began,
                "is_made_anew": is_made_anew,
                "batch_count": progress.current.ready,
            }
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
        """Keep this process's part of the checkpoint for `on_train_start`."""
        saved = checkpoint.get(_EXACT, ())
        if len(saved) == trainer.world_size:
            self._loaded = saved[trainer.global_rank]
        else:
            told = f"{len(saved)} processes" if saved else "none: it was made without ExactResume"
            rank_zero_warn(
                f"the checkpoint has random numbers of {told}; the training goes on with others"
            )

    # The framework's signature.
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        """Advance the loaders to their saved position, and restore the RNG streams.

        Lightning calls this method when the iterators exist, before a batch is fetched.
        """
        loaded = self._loaded
        self._loaded = None
        if loaded is None:
            return
        fetcher = trainer.fit_loop._data_fetcher  # noqa: SLF001
        goes_on = all(hasattr(loader, "state_dict") for loader in _loaders(trainer).flattened)
        began = loaded["began"] or loaded["now"]
        _put_streams(trainer, began)
        self._began = _iterator(trainer), began
        # After a validation at the end of an epoch, Lightning creates the next iterator itself.
        is_over = loaded["began"] is None and trainer.fit_loop.epoch_loop.restarted_on_last
        if not goes_on and not is_over:
            if loaded.get("is_made_anew", True):
                iter(fetcher)
            for _ in range(loaded.get("batch_count", 0)):
                next(fetcher.iterator)
        if loaded["began"] is not None:
            _put_streams(trainer, loaded["now"])


def _loaders(trainer: Trainer) -> Any:
    return trainer.fit_loop._combined_loader  # noqa: SLF001


def _iterator(trainer: Trainer) -> Any:
    return _loaders(trainer)._iterator  # noqa: SLF001


def _generators(trainer: Trainer) -> dict[str, torch.Generator]:
    """Return the loaders' own generators."""
    loaders = _loaders(trainer).flattened
    found = {
        f"loader/{number}": getattr(loader, "generator", None)
        for number, loader in enumerate(loaders)
    }
    for number, loader in enumerate(loaders):
        found[f"sampler/{number}"] = getattr(getattr(loader, "sampler", None), "generator", None)
    return {
        name: generator
        for name, generator in found.items()
        if isinstance(generator, torch.Generator)
    }


def _streams(trainer: Trainer) -> dict[str, Any]:
    """Return the RNG streams of this process and of its loaders."""
    streams: dict[str, Any] = {
        name: generator.get_state() for name, generator in _generators(trainer).items()
    }
    streams |= {"python": random.getstate(), "numpy": np.random.get_state()}  # noqa: NPY002
    return streams | {"torch": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all()}


def _put_streams(trainer: Trainer, streams: Mapping[str, Any]) -> None:
    for name, generator in _generators(trainer).items():
        generator.set_state(streams[name])
    random.setstate(streams["python"])
    np.random.set_state(streams["numpy"])  # noqa: NPY002
    torch.set_rng_state(streams["torch"])
    torch.cuda.set_rng_state_all(streams["cuda"][: torch.cuda.device_count()])


def _key_of(name: str) -> str:
    """Return the key in Lightning's checkpoint for a name in a checkpoint of ckptfmt."""
    return name.removeprefix(_EXTRA).replace("~1", "/").replace("~0", "~") if name else _OPTIMIZERS


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
