"""accelerate's `save_state` and `load_state` through ckptfmt: saves beside the training, resumes bit for bit.

    from ckptfmt.plugins.accelerate import CkptfmtAccelerator

    accelerator = CkptfmtAccelerator(run="runs/gpt", saving={"keep": 3})  # and whatever an Accelerator takes
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    report = accelerator.load_state()  # the newest of the run; None where there is none
    epoch, batch = divmod(report.step if report else 0, len(loader))
    ...
        for inputs in accelerator.skip_first_batches(loader, batch):  # the rest of the epoch
            ...
            accelerator.save_state()
    accelerator.end_training()  # waits for the saves, and raises what one failed with

That is one line to change, the class; the loop is accelerate's. `save_state()` saves into the run, `load_state()` goes
on from it; `save_state("directory")` and `load_state("directory")` are for one checkpoint of its own. Weights,
optimizers, schedulers, the scaler, registered objects and RNG streams are saved in the fields of `ckptfmt.State`.
Several models are called model, model_1 and so on, as accelerate calls their files.

Tested with accelerate 1.15.0, on one process and on two with DDP over gloo.

Bit for bit: a resume at any step, in the middle of an epoch too, of a shuffled loader with or without
``use_seedable_sampler``, and of a StatefulDataLoader. accelerate by itself restores neither the order of an epoch nor,
behind `skip_first_batches`, the random numbers: the plug-in remembers the RNG streams with which an iterator began, and
makes the next one with them. Call the accelerator's method `skip_first_batches`; accelerate's function of that name is
unknown to the plug-in.

Not bit for bit: a data set that itself draws random numbers, since accelerate fetches a batch ahead of the training; a
loader's position with another number of processes; gradients that are accumulated and not applied yet, which accelerate
doesn't save either. DeepSpeed, Megatron-LM, XLA and FSDP1 are refused, and so are hooks for `save_state`, which would
write beside the checkpoint.
"""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import numpy as np
import torch
from accelerate import Accelerator, DistributedType

import ckptfmt

#: Options of a Checkpointer that a Saver has, too.
_OF_SAVER: Final = ("saver", "overlap", "slots", "when_busy", "nice", "deadline_s")
_REFUSED: Final = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA)


class CkptfmtAccelerator(Accelerator):
    """An `accelerate.Accelerator` that saves to and loads from checkpoints of ckptfmt.

    Args:
        args, kwargs: of `accelerate.Accelerator`.
        run: directory of the run; left out, ``project_dir/checkpoints`` where accelerate is to name checkpoints itself.
        saving: keyword arguments of `ckptfmt.Checkpointer`, such as ``{"keep": 3, "delta": "auto"}``; ``keep`` is
            accelerate's ``total_limit`` by default.

    Attributes:
        checkpointer: the `ckptfmt.Checkpointer` of the run, once something was saved or loaded; it says what a load
            passed over, and how long saves take.
        updates: how many updates the first optimizer has made, over the whole run: the step of a checkpoint.
    """

    def __init__(
        self,
        *args: Any,  # noqa: ANN401 - accelerate's
        run: str | os.PathLike[str] | None = None,
        saving: Mapping[str, Any] | None = None,
        **kwargs: Any,  # noqa: ANN401 - accelerate's
    ) -> None:
        super().__init__(*args, **kwargs)
        if self.distributed_type in _REFUSED:
            raise NotImplementedError(f"{self.distributed_type} saves by itself: use accelerate.Accelerator")
        naming = self.project_configuration
        if run is None and naming.automatic_checkpoint_naming:
            run = os.path.join(self.project_dir, "checkpoints")  # noqa: PTH118 - may be a URL
        self._run = run
        self._saving = {"keep": naming.total_limit, **(saving or {})}
        self._positions: dict[int, _Position] = {}
        self._state = ckptfmt.State()
        self._saver: ckptfmt.Saver | None = None
        self.checkpointer: ckptfmt.Checkpointer | None = None
        self.updates = 0

    # --- what accelerate's users call ---------------------------------------------------------------------------------

    def save_state(
        self,
        output_dir: str | None = None,
        safe_serialization: bool = True,  # noqa: ARG002, FBT001, FBT002 - accelerate's; weights are always safetensors
        **kwargs: Any,  # noqa: ANN401 - of `ckptfmt.Checkpointer.save`
    ) -> Any:  # noqa: ANN401 - what ckptfmt returns
        """Save everything that was prepared or registered, beside the training; every process calls it.

        Args:
            output_dir: directory of a checkpoint of its own, in the place of one that is there; left out, or where
                accelerate names checkpoints, the run.
            safe_serialization: of no meaning here.
            kwargs: ``metrics=`` and ``tags=`` of the checkpoint; ``step=`` if it isn't `updates`.

        Returns: the handle of the save, which tells how far it is; None if this step is in the run already.
        Raises: `ckptfmt.CkptError`, also what an earlier save failed with; NotImplementedError where hooks for saving
            are registered.
        """
        if self._save_model_state_pre_hook:
            raise NotImplementedError("hooks for save_state would write beside the checkpoint: save what they do apart")
        step, saved = kwargs.pop("step", self.updates), None
        if output_dir is not None and not self.project_configuration.automatic_checkpoint_naming:
            options = {key: value for key, value in self._saving.items() if key in _OF_SAVER}
            self._saver = self._saver or ckptfmt.Saver(**options)
            saved = self._saver.save(output_dir, self._fill(self._state), step=step, replace=True, **kwargs)
        else:
            if self.checkpointer is None:
                self._begin("fresh")
            assert self.checkpointer is not None  # noqa: S101 - _begin sets it
            self._fill(self._state)
            saved = self.checkpointer.save(step, **kwargs)
        self.project_configuration.iteration += 1
        return saved

    def load_state(
        self,
        input_dir: str | None = None,
        load_kwargs: dict[str, Any] | None = None,
        **load_model_func_kwargs: Any,  # noqa: ANN401 - accelerate's
    ) -> Any:  # noqa: ANN401 - what ckptfmt returns
        """Load into everything that was prepared or registered; every process calls it.

        Args:
            input_dir: a checkpoint, of the run or of its own; left out, the one that the run goes on from.
            load_kwargs: of `ckptfmt.load`, where `input_dir` isn't in the run.
            load_model_func_kwargs: none: options of torch.load mean nothing here.

        Returns: the report, with ``step``, ``claim`` and what lowers it; None where the run has no checkpoint yet.
        Raises: `ckptfmt.CkptError`; nothing is changed where the state doesn't fit.
        """
        if load_model_func_kwargs:
            raise TypeError(f"load_state of a ckptfmt checkpoint takes no {', '.join(load_model_func_kwargs)}=")
        path = None if input_dir is None else os.path.realpath(os.path.expanduser(input_dir))  # noqa: PTH111
        if path is not None and (self._run is None or os.path.dirname(path) != os.path.realpath(self._run)):  # noqa: PTH120
            self._close()
            report: Any = ckptfmt.load(path, self._fill(self._state), **(load_kwargs or {}))
        else:
            report = self._begin("auto" if path is None else os.path.basename(path))  # noqa: PTH119
        self.updates = self.updates if report is None else report.step
        return report

    def end_training(self) -> None:
        """Wait for the saves, and then do what accelerate does. Raises: what a save failed with."""
        self._close()
        super().end_training()

    def free_memory(self, *objects: Any) -> Any:  # noqa: ANN401 - accelerate's
        """Wait for the saves, and forget all that was prepared. Raises: what a save failed with."""
        self._close()
        self._positions.clear()
        self.updates = 0
        return super().free_memory(*objects)

    # --- what accelerate calls ----------------------------------------------------------------------------------------

    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - accelerate's
        """Prepare a loader, and follow its position."""
        loader = super().prepare_data_loader(data_loader, *args, **kwargs)
        if id(loader) not in self._positions:
            self._positions[id(loader)] = _Position(self, loader)
        return loader

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:  # noqa: ANN401 - accelerate's
        """Return a loader without the first batches, whose position is that of the one it is made of."""
        skipping = super().skip_first_batches(dataloader, num_batches)
        if id(dataloader) in self._positions:
            self._positions[id(dataloader)].follow(skipping)
        return skipping

    def prepare_optimizer(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - accelerate's
        """Prepare an optimizer; the updates of the first are counted."""
        optimizer = super().prepare_optimizer(*args, **kwargs)
        if optimizer is self._optimizers[0]:
            optimizer.optimizer.register_step_post_hook(self._count)
        return optimizer

    def _count(self, *_: object) -> None:
        self.updates += 1

    # --- ckptfmt ------------------------------------------------------------------------------------------------------

    def _begin(self, resume: str) -> Any:  # noqa: ANN401 - what ckptfmt returns
        """Begin a launch of the run, and return what its load found."""
        if self._run is None:
            raise ValueError("no directory: pass one, or CkptfmtAccelerator(run=...)")
        self._close()
        self._fill(self._state)
        self.checkpointer = ckptfmt.Checkpointer(self._run, self._state, resume=resume, **self._saving)
        self.checkpointer.restore()
        self.checkpointer.restore_rng()
        return self.checkpointer.load_report

    def _close(self) -> None:
        checkpointer, self.checkpointer, saver, self._saver = self.checkpointer, None, self._saver, None
        try:
            if saver is not None:
                saver.close()
        finally:
            if checkpointer is not None:
                checkpointer.close()

    def _fill(self, state: ckptfmt.State) -> ckptfmt.State:
        """Put into a state what is prepared and registered just now."""
        models = _numbered("model", self._models)
        state.weights = self._models[0] if len(self._models) == 1 else models or None
        state.optimizer = [*self._optimizers] or None
        positions = (self._positions[id(loader)] for loader in self._dataloaders if id(loader) in self._positions)
        state.data = _numbered("dataloader", [position.scoped() for position in positions]) or None
        state.extra = {
            "accelerator": _Counters(self),
            **_numbered("scheduler", self._schedulers),
            **_numbered("registered", map(_scoped, self._custom_objects)),
            **({} if self.scaler is None else {"scaler": self.scaler}),
        }
        return state


class _Counters:
    """What an accelerator counts, as a part of a state."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._ahead = 1  # of a save under way: its own

    def state_dict(self) -> dict[str, int]:
        """Return the counts."""
        naming = self._accelerator.project_configuration
        return {"step": self._accelerator.step, "iteration": naming.iteration + self._ahead}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Set the counts."""
        self._accelerator.step, self._ahead = state_dict["step"], 0
        self._accelerator.project_configuration.iteration = state_dict["iteration"]


class _Position:
    """Where a prepared loader stands, and with which random numbers its iterator began.

    To make an iterator draws the order of the epoch, unless a sampler knows it by its seed, and always a seed for
    worker processes. The first iterator after a load is made with the RNG streams of the one before, and takes none of
    those that the training goes on with.
    """

    def __init__(self, accelerator: CkptfmtAccelerator, loader: Any) -> None:  # noqa: ANN401 - one of accelerate's
        self._accelerator = accelerator
        self._loader = loader
        self._done = 0
        #: The RNG streams, those of the process and the loader's own, with which the iterator began that is under way;
        #: None between epochs.
        self._began: tuple[dict[str, Any], dict[str, Any]] | None = None
        #: The position that was loaded last; None once an iterator was made.
        self._loaded: dict[str, Any] | None = None
        self.follow(loader)

    def follow(self, loader: Any) -> None:  # noqa: ANN401 - one of accelerate's
        """Notice when an iterator of a loader is made: this one's, or one that skips batches of it."""
        base = loader.base_dataloader
        base.__iter__ = functools.partial(self._iterate, loader, base.__iter__)

    def scoped(self) -> ckptfmt.PerWorker | ckptfmt.FirstWorker:
        """Return this as a part of a state: a StatefulDataLoader's position is that of one process."""
        return (ckptfmt.PerWorker if self._loader.use_stateful_dataloader else ckptfmt.FirstWorker)(self)

    def state_dict(self) -> dict[str, Any]:
        """Return the position."""
        if self._loaded is not None:
            return self._loaded
        state = {
            "iteration": max(self._loader.iteration, self._done),
            "began": None if self._began is None else self._began[0],
            "generators": self._own_streams() if self._began is None else self._began[1],
        }
        return state | ({"loader": self._loader.state_dict()} if self._loader.use_stateful_dataloader else {})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to a position."""
        self._loaded = state_dict
        self._loader.iteration, self._done = state_dict["iteration"], 0
        for name, generator in self._generators().items():
            generator.set_state(state_dict["generators"][name])
        if "loader" in state_dict:
            self._loader.load_state_dict(state_dict["loader"])
            if state_dict["began"] is None:
                # The iterator that is at its end is made now: later it would draw from the RNG streams put back.
                self._loader.base_dataloader.state_dict()

    def _iterate(self, loader: Any, make: Callable[[], Iterator[Any]]) -> Iterator[Any]:  # noqa: ANN401
        loaded, self._loaded, self._done = self._loaded, None, 0
        began, now = loaded["began"] if loaded else None, _streams()
        if began is not None:
            _put_streams(began)
        self._began, updates = (began or now, self._own_streams()), self._accelerator.updates
        try:
            for number, batch in enumerate(make()):
                if number == loader.skip_batches and began is not None:
                    _put_streams(now)
                yield batch
        except GeneratorExit:
            # An evaluation was left early. A training that was left may go on from here in another launch.
            self._began = self._began if self._accelerator.updates > updates else None
            raise
        self._began, self._done = None, loader.iteration + 1
        if loader is not self._loader:
            self._loader.iteration = self._done

    def _generators(self) -> dict[str, torch.Generator]:
        """Return the generators that the loader has of its own."""
        base = self._loader.base_dataloader
        found = {"loader": base.generator, "sampler": getattr(self._loader.get_sampler(), "generator", None)}
        return {name: generator for name, generator in found.items() if generator is not None}

    def _own_streams(self) -> dict[str, Any]:
        return {name: generator.get_state() for name, generator in self._generators().items()}


def _streams() -> dict[str, Any]:
    """Return the RNG streams that making an iterator may draw from."""
    return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}  # noqa: NPY002


def _put_streams(streams: Mapping[str, Any]) -> None:
    random.setstate(streams["python"])
    np.random.set_state(streams["numpy"])  # noqa: NPY002 - the global one
    torch.set_rng_state(streams["torch"])


def _numbered(name: str, objects: Iterable[Any]) -> dict[str, Any]:
    """Return objects by the names that accelerate gives their files."""
    return {name if number == 0 else f"{name}_{number}": item for number, item in enumerate(objects)}


def _scoped(value: Any) -> Any:  # noqa: ANN401 - has a state_dict
    """Return a registered object as a part of a state: process 0's counts, as for accelerate."""
    return value if isinstance(value, torch.nn.Module | torch.optim.Optimizer) else ckptfmt.FirstWorker(value)
