"""accelerate's `save_state` and `load_state` through ckptfmt: background saves, bit-exact resumes.

    from ckptfmt.plugins.accelerate import CkptfmtAccelerator

    # and all arguments of an Accelerator
    accelerator = CkptfmtAccelerator(run="runs/gpt", saving={"keep": 3}, config=args)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    accelerator.load_state()  # the newest checkpoint of the run; None for an empty run
    first, _ = accelerator.position(loader)
    for epoch in range(first, epochs):
        # first the rest of the current epoch, later whole epochs
        for inputs in accelerator.skip_first_batches(loader):
            ...
            accelerator.save_state()
    accelerator.end_training()  # waits for the saves and raises their errors

The class is the only line that changes; the loop stays accelerate's. `save_state()` saves into the
run, and `load_state()` continues from the run. `save_state("directory")` and
`load_state("directory")` save and load a single checkpoint outside the run. Weights, optimizers,
schedulers, the gradient scaler, registered objects and RNG streams are saved in the fields of
`ckptfmt.State`. Several models are called model, model_1 and so on, like accelerate's files.

Tested with accelerate 1.15.0, on one process and on two with DDP over gloo.

Bit for bit: a resume at any step, also in the middle of an epoch, of a shuffled loader with or
without ``use_seedable_sampler``, and of a StatefulDataLoader. accelerate alone doesn't restore the
order of an epoch. After `skip_first_batches`, accelerate doesn't restore the random numbers either.
The plug-in records the RNG streams at the start of an iterator, and creates the next iterator with
the same streams. With a StatefulDataLoader, and with persistent worker processes, an epoch
therefore draws one random number more, or at another moment, than with accelerate alone.

The plug-in counts the batches of a loader separately from updates: there are
fewer updates than batches where gradients are accumulated or a scaler skips a step. Call the
accelerator's method `skip_first_batches`; the plug-in doesn't see calls of accelerate's function of
the same name.

The witness of a run compares the updates that a resume repeats: the loss of the last
`accelerator.backward` before the update, the norm that `clip_grad_norm_` returned, RNG streams,
learning rates and weights. Updates are recorded from the first save or load on. A run whose saves
are given ``step=`` has no record of updates.

Not bit for bit within an epoch; the claim of the load then names the reason:

- a data set that draws random numbers, since accelerate fetches one batch ahead of the training,
  and worker processes begin again after a resume. The first batches of each epoch are examined;
- a loader's position with another number of processes, or where one process fetches for several
  (``dispatch_batches``, the default for an iterable data set);
- gradients that are accumulated and not applied yet, which accelerate doesn't save either.

Steps of an optimizer that wasn't prepared are neither saved nor counted. DeepSpeed, Megatron-LM,
XLA and FSDP1 are refused. Hooks for `save_state` and `load_state` are refused too, because they
would write and read outside the checkpoint.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import torch
from accelerate import Accelerator, DistributedType
from accelerate.data_loader import DataLoaderDispatcher

import ckptfmt
from ckptfmt.plugins.epoch_streams import (
    DrawWatch,
    put_generators,
    put_streams,
    read_generators,
    read_streams,
)

_LOG: Final = logging.getLogger("ckptfmt")
#: The reason for a lower claim if one process fetches for several.
_DISPATCHES: Final = (
    "one process fetches the batches for all (dispatch_batches, or an iterable data set): the"
    " loader has no position, and a resume within an epoch sees other samples"
)
#: The warning about a loop that doesn't begin where the loaded position is.
_NOT_SKIPPED: Final = (
    "the loaded position is batch %d of the epoch, and the loop begins at batch %d: iterate over"
    " accelerator.skip_first_batches(loader)"
)
#: Stands for the end of an iterator.
_END: Final = object()
#: Fields of `ckptfmt.Saving` that are options of a `ckptfmt.PathSaver`, too.
_OF_SAVER: Final = ("saver", "overlap", "slots", "when_busy", "nice")
_Path = str | os.PathLike[str]
_Options = Mapping[str, Any]
_REFUSED: Final = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA)


class CkptfmtAccelerator(Accelerator):
    """An `accelerate.Accelerator` that saves to and loads from checkpoints of ckptfmt.

    Args:
        args, kwargs: arguments of `accelerate.Accelerator`.
        run: the run's directory; by default ``project_dir/checkpoints`` if accelerate is configured
            to name checkpoints itself.
        saving: keyword arguments of `ckptfmt.Checkpointer`, such as
            ``{"keep": 3, "saving": ckptfmt.Saving(delta="auto")}``; ``keep`` is accelerate's
            ``total_limit`` by default.
        config: the program's configuration, as in `ckptfmt.State`. Without a configuration a load
            claims S1 at most, and the witness refutes no claim.
        frozen_base: the place of the weights that the run doesn't train, such as the base of LoRA
            adapters, as in `ckptfmt.State`. Saves refer to these weights instead of storing them.

    Attributes:
        checkpointer: the `ckptfmt.Checkpointer` of the run, None before the first save or load. The
            checkpointer reports the checkpoints that a load passed over, and the durations of
            saves.
        updates: number of updates over the whole run, which is the step of a checkpoint. Optimizers
            that step in turn make one update together; any step after a save begins another update.
        counts_steps: whether the newest checkpoint of the run has the number of `updates`. Each
            update is then a step of the run, and the witness of the run records the step.
    """

    def __init__(
        self,
        *args: Any,
        run: _Path | None = None,
        saving: _Options | None = None,
        config: Any = None,
        frozen_base: _Path | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        if self.distributed_type in _REFUSED or (
            self.distributed_type == DistributedType.FSDP and not self.is_fsdp2
        ):
            raise NotImplementedError(
                f"{self.distributed_type} of this version: use accelerate.Accelerator"
            )
        naming = self.project_configuration
        if run is None and naming.automatic_checkpoint_naming:
            # pathlib would resolve or normalise the path of the user.
            run = os.path.join(self.project_dir, "checkpoints")  # noqa: PTH118
        # pathlib would resolve or normalise the path of the user.
        self._run = None if run is None else os.path.expanduser(run)  # noqa: PTH111
        self._saving = {"keep": naming.total_limit, **(saving or {})}
        self._positions: dict[int, _Position] = {}
        self._state = ckptfmt.State(config=config, frozen_base=frozen_base)
        self._saver: ckptfmt.PathSaver | None = None
        self.checkpointer: ckptfmt.Checkpointer | None = None
        self.updates = 0
        self._hooks: dict[int, Any] = {}
        self._stepped: set[int] = set()  # optimizers that stepped in the last counted update
        self._seen: dict[str, Any] = {}  # loss and gradient norm since the last optimizer step
        self.counts_steps = False

    # --- methods that users call ------------------------------------------------------------------

    def save_state(
        self,
        output_dir: _Path | None = None,
        safe_serialization: bool = True,  # noqa: ARG002, FBT001, FBT002 - the framework's signature
        **kwargs: Any,
    ) -> Any:
        """Save all prepared or registered objects in the background; every process calls this.

        Args:
            output_dir: directory of a single checkpoint, which replaces an existing checkpoint
                there. Left out, or where accelerate names checkpoints, the save goes into the run.
            safe_serialization: ignored: weights are always safetensors.
            kwargs: ``metrics=`` and ``tags=`` of the checkpoint; ``step=`` if the step isn't
                `updates`.

        Returns: the handle of the save, which reports progress; None if the run already has this
            step.
        Raises: `ckptfmt.CkptError`, also for the failure of an earlier save; NotImplementedError
            where hooks for saving are registered; ValueError where a step is saved already and no
            prepared optimizer counts steps.
        """
        if self._save_model_state_pre_hook:
            raise NotImplementedError(
                "hooks for save_state would write beside the checkpoint: save their data apart"
            )
        counts_steps = bool(self._optimizers) and "step" not in kwargs
        is_counted = counts_steps or "step" in kwargs
        step = kwargs.pop("step", self.updates)
        self._stepped.clear()
        self._fill(self._state)
        if output_dir is not None and not self.project_configuration.automatic_checkpoint_naming:
            self._saver = self._saver or ckptfmt.PathSaver(**_options_of_saver(self._saving))
            path = os.path.expanduser(output_dir)  # noqa: PTH111 - a path of the user, as given
            saved: Any = self._saver.save(path, self._state, step=step, replace=True, **kwargs)
        else:
            checkpointer = self.checkpointer or self._begin("fresh", step)
            self.counts_steps = counts_steps
            saved = checkpointer.save(step, **kwargs)
            if saved is None and not is_counted:
                raise ValueError(
                    f"step {step} is saved already: prepare the optimizer, which counts, or"
                    " pass"
                    " step="
                )
        self.project_configuration.iteration += 1
        return saved

    def load_state(
        self, input_dir: _Path | None = None, load_kwargs: _Options | None = None, **kwargs: Any
    ) -> Any:
        """Load into every prepared or registered object; every process calls this method.

        Args:
            input_dir: a checkpoint of the run, or a single checkpoint; by default the checkpoint
                from which the run continues.
            load_kwargs: arguments of `ckptfmt.load`, used where `input_dir` isn't in the run.
            kwargs: must be empty: options of torch.load have no meaning here.

        Returns: the report, with ``step``, ``claim`` and the differences that lower the claim; None
            where the run has no checkpoint yet.
        Raises: `ckptfmt.CkptError`, where no object is changed if the state doesn't fit;
            NotImplementedError where hooks for loading are registered; TypeError for `kwargs`.
        """
        if self._load_model_state_pre_hook:
            raise NotImplementedError(
                "hooks for load_state would read beside the checkpoint: load their data apart"
            )
        if kwargs:
            raise TypeError(f"load_state of a ckptfmt checkpoint takes no {', '.join(kwargs)}=")
        # pathlib would resolve or normalise the path of the user.
        path = None if input_dir is None else os.path.realpath(os.path.expanduser(input_dir))  # noqa: PTH111
        if path is not None and (
            # pathlib would resolve or normalise the path of the user.
            self._run is None or os.path.dirname(path) != os.path.realpath(self._run)  # noqa: PTH120
        ):
            self._close()
            report: Any = ckptfmt.load(path, self._fill(self._state), **(load_kwargs or {}))
        else:
            # pathlib would resolve or normalise the path of the user.
            report = self._begin("auto" if path is None else os.path.basename(path)).load_report  # noqa: PTH119
        self._stepped = set()
        self.updates = self.updates if report is None else report.step
        return report

    def position(self, loader: Any) -> tuple[int, int]:
        """Return the epoch of a prepared loader, and the number of batches given to the training.

        A load sets both numbers.

        Raises: ValueError where the loader wasn't prepared here, or one process fetches for
            several.
        """
        if id(loader) not in self._positions or (
            isinstance(loader, DataLoaderDispatcher) and self.num_processes > 1
        ):
            raise ValueError(
                "no position: give the loader that prepare returned, without dispatch_batches"
            )
        return self._positions[id(loader)].count()

    def end_training(self) -> None:
        """Wait for the saves, then end the training as accelerate does. Raises: a save's error."""
        self._close()
        super().end_training()

    def free_memory(self, *objects: Any) -> Any:
        """Wait for the saves, and release all prepared objects. Raises: a save's error."""
        self._close()
        while self._hooks:
            self._hooks.popitem()[1].remove()
        self._positions.clear()
        self.updates = 0
        return super().free_memory(*objects)

    # --- methods that accelerate calls ------------------------------------------------------------

    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        """Prepare a loader, and track its position."""
        loader = super().prepare_data_loader(data_loader, *args, **kwargs)
        if id(loader) not in self._positions:
            self._positions[id(loader)] = _Position(self, loader)
        return loader

    def skip_first_batches(self, dataloader: Any, num_batches: int | None = None) -> Any:
        """Return a loader without the first batches of `dataloader`. Both share one position.

        Args:
            dataloader: a prepared loader.
            num_batches: the number of batches to skip. By default the number of batches before the
                loaded position; 0 once an iterator was created after the load, and for a
                StatefulDataLoader.

        Raises: ValueError where `num_batches` is left out and the loader has no position; see
            `position`.
        """
        if num_batches is None:
            _, num_batches = self.position(dataloader)
            if dataloader.use_stateful_dataloader or not self._positions[id(dataloader)].loaded:
                return dataloader
        skipping = super().skip_first_batches(dataloader, num_batches)
        if id(dataloader) in self._positions:
            self._positions[id(dataloader)].follow(skipping, num_batches - skipping.skip_batches)
        return skipping

    def prepare_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Prepare an optimizer, and count its steps."""
        optimizer = super().prepare_optimizer(*args, **kwargs)
        theirs = optimizer.optimizer
        if id(theirs) not in self._hooks and not isinstance(theirs, type(optimizer)):
            self._hooks[id(theirs)] = theirs.register_step_post_hook(self._count)
        return optimizer

    def backward(self, loss: Any, **kwargs: Any) -> None:
        """Call accelerate's backward, and record the loss for the witness."""
        super().backward(loss, **kwargs)
        if loss.numel() == 1:
            self._seen["loss"] = loss.detach()

    def clip_grad_norm_(self, *args: Any, **kwargs: Any) -> Any:
        """Clip as accelerate does, and return the norm, which is recorded for the witness."""
        norm = self._seen["grad_norm"] = super().clip_grad_norm_(*args, **kwargs)
        return norm

    def _count(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        seen = self._seen
        self._seen = {}
        if not self._stepped or id(optimizer) in self._stepped:
            self._stepped = set()
            self.updates = self.updates + 1
            if self.checkpointer is not None and self.counts_steps:
                self.checkpointer.observe(**seen)
                self.checkpointer.step = self.updates
        self._stepped.add(id(optimizer))

    # --- ckptfmt ----------------------------------------------------------------------------------

    def _begin(self, resume: str, step: int = 0) -> ckptfmt.Checkpointer:
        """Begin a launch of the run, and load the checkpoint from which the run continues.

        Args:
            resume: see `ckptfmt.Checkpointer`.
            step: number of steps done before a fresh start.
        """
        if self._run is None:
            raise ValueError("no directory: pass one, or CkptfmtAccelerator(run=...)")
        self._close()
        self._fill(self._state)
        self.counts_steps = False
        self.checkpointer = checkpointer = ckptfmt.Checkpointer(
            self._run, self._state, resume=resume, **self._saving
        )
        checkpointer.restore()
        if step:
            checkpointer.step = step
        checkpointer.restore_rng()
        return checkpointer

    def _close(self) -> None:
        checkpointer = self.checkpointer
        self.checkpointer = None
        saver = self._saver
        self._saver = None
        with contextlib.ExitStack() as closing:
            closing.callback(checkpointer.close if checkpointer else bool)
            closing.callback(saver.close if saver else bool)

    def _fill(self, state: ckptfmt.State) -> ckptfmt.State:
        """Put the currently prepared and registered objects into a state, and return the state."""
        models = _numbered("model", self._models)
        state.weights = self._models[0] if len(self._models) == 1 else models or None
        state.optimizer = [*self._optimizers] or None
        positions = [
            self._positions[id(loader)]
            for loader in self._dataloaders
            if id(loader) in self._positions
        ]
        doubts = (position.find_doubt() for position in positions)
        state.doubts = tuple(dict.fromkeys(doubt for doubt in doubts if doubt is not None))
        state.data = _numbered("dataloader", [position.scoped() for position in positions]) or None
        registered = _numbered("registered", map(_scoped, self._custom_objects))
        scaler = {} if self.scaler is None else {"scaler": self.scaler}
        schedulers = _numbered("scheduler", self._schedulers)
        state.extra = {"accelerator": _Counters(self), **schedulers, **registered, **scaler}
        return state


def _options_of_saver(given: _Options) -> dict[str, Any]:
    """Return the options of a `ckptfmt.PathSaver` among keywords of a `ckptfmt.Checkpointer`."""
    found = {name: given[name] for name in (*_OF_SAVER, "deadline_s") if name in given}
    if (saving := given.get("saving")) is not None:
        found |= {name: getattr(saving, name) for name in _OF_SAVER}
    if (job := given.get("job")) is not None:
        found["deadline_s"] = job.deadline_s
    return found


class _Counters:
    """The counters of an accelerator, as a part of a state."""

    def __init__(self, accelerator: CkptfmtAccelerator) -> None:
        self._accelerator = accelerator
        self._ahead = 1  # the current save counts itself

    def state_dict(self) -> dict[str, Any]:
        """Return the counts."""
        own = self._accelerator
        counts = {"step": own.step, "iteration": own.save_iteration + self._ahead}
        return counts | ({"counts_steps": True} if own.counts_steps else {})

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Set the counts."""
        self._accelerator.step, self._ahead = state_dict["step"], 0
        self._accelerator.project_configuration.iteration = state_dict["iteration"]
        self._accelerator.counts_steps = state_dict.get("counts_steps", False)


class _Position:
    """The position of a prepared loader, and the random numbers with which its iterator began.

    Creating an iterator always draws a seed for worker processes. Creating an iterator also draws
    the order of the epoch, unless a sampler derives the order from a seed. The first iterator after
    a load is created with the RNG streams of the saved iterator, and draws no numbers from the
    streams with which the training continues. Each epoch therefore begins with the draws of a
    creation: an iterator that already exists would take its order from other numbers.
    """

    def __init__(self, accelerator: CkptfmtAccelerator, loader: Any) -> None:
        self._accelerator = accelerator
        self._loader = loader
        self._done = self._batch = 0  # completed epochs; batches given in the current epoch
        #: The RNG streams of the process and of the loader at the start of the current iterator;
        #: None between epochs.
        self._began: tuple[dict[str, Any], dict[str, Any]] | None = None
        #: The loaded position; None once an iterator was created.
        self.loaded: dict[str, Any] | None = None
        if loader.use_stateful_dataloader:
            # accelerate's prepare has created the first iterator. Its random numbers are unknown.
            loader.base_dataloader.load_state_dict({})
        self._watch = DrawWatch(loader)
        self.follow(loader)

    def follow(self, loader: Any, skipped: int = 0) -> None:
        """Track the iterators of the prepared loader, or of a copy that skips batches."""
        base = loader.base_dataloader
        base.__iter__ = functools.partial(self._iterate, loader, skipped, base.__iter__)

    def count(self) -> tuple[int, int]:
        """Return the number of completed epochs, and of batches given in the current epoch."""
        if self.loaded is not None:
            return self.loaded["position"]
        return max(self._loader.iteration, self._done), 0 if self._began is None else self._batch

    def scoped(self) -> ckptfmt.PerWorker | ckptfmt.FirstWorker:
        """Return this position as a part of a state: per process for a StatefulDataLoader."""
        return (ckptfmt.PerWorker if self._loader.use_stateful_dataloader else ckptfmt.FirstWorker)(
            self
        )

    def find_doubt(self) -> str | None:
        """Return the reason why a resume from the position can't be exact, if there is any."""
        if isinstance(self._loader, DataLoaderDispatcher) and self._accelerator.num_processes > 1:
            return None if self._loader.end_of_dataloader else _DISPATCHES
        return None if self._began is None else self._watch.find_doubt()

    def state_dict(self) -> dict[str, Any]:
        """Return the position."""
        if self.loaded is not None:
            return self.loaded
        began, generators = self._began or (None, read_generators(self._loader))
        state = {"position": self.count(), "began": began, "generators": generators}
        return state | (
            {"loader": self._loader.state_dict()} if self._loader.use_stateful_dataloader else {}
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the position."""
        self.loaded = state_dict
        self._loader.iteration, self._done = state_dict["position"][0], 0
        base = self._loader.base_dataloader
        if "loader" in state_dict and state_dict["began"] is not None:
            base.load_state_dict(state_dict["loader"])
        elif "loader" in state_dict:
            # Between epochs, and after an evaluation that ended early, the next iterator begins an
            # epoch. The exhausted iterator is created now: created later, it would draw from the
            # restored RNG streams.
            base.load_state_dict({**state_dict["loader"], "_iterator_finished": True})
            base.state_dict()
        put_generators(self._loader, state_dict["generators"])

    def _iterate(
        self, loader: Any, skipped: int, make: Callable[[], Iterator[Any]]
    ) -> Iterator[Any]:
        loaded = self.loaded
        self.loaded = None
        self._done = 0
        is_stateful = self._loader.use_stateful_dataloader
        wanted = loaded["position"][1] if loaded else 0
        if is_stateful:
            skipped = wanted
        elif loaded and skipped + loader.skip_batches != wanted:
            _LOG.warning(_NOT_SKIPPED, wanted, skipped + loader.skip_batches)
        began = loaded["began"] if loaded else None
        now = read_streams()
        put_streams(began or now)
        self._began = (began or now, read_generators(self._loader))
        updates = self._accelerator.updates
        base = loader.base_dataloader
        if base.persistent_workers and base._iterator is not None:  # noqa: SLF001 - torch's loader has no public name
            # The reuse of worker processes omits the seed that a new iterator draws.
            torch.empty((), dtype=torch.int64).random_(generator=base.generator)
        try:
            batches = make()
            if is_stateful and began is not None:
                _count_once(batches, wanted)
            for number, batch in enumerate(self._watched(batches)):
                if number == loader.skip_batches and began is not None:
                    put_streams(now)
                self._batch = skipped + number  # accelerate fetches this batch ahead
                yield batch
        except GeneratorExit:
            # The loop left the iterator early. An evaluation has made no update, and ends here. A
            # training may continue from here in another launch.
            self._began = self._began if self._accelerator.updates > updates else None
            raise
        self._began = None
        self._done = loader.iteration + 1
        self._loader.iteration = self._loader.iteration if loader is self._loader else self._done

    def _watched(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches, and watch for random numbers that are drawn meanwhile."""
        self._watch.begin_epoch()
        while True:
            with self._watch.fetching():
                batch = next(batches, _END)
            if batch is _END:
                return
            yield batch


def _count_once(iterator: Any, taken: int) -> None:
    """Correct the count of batches in an iterator of torchdata with a loaded position.

    An iterator of an iterable data set takes `taken` batches to reach the position, and counts
    these batches twice. A state saved later in the epoch would be too far ahead.
    """
    excess = iterator._num_yielded - taken  # noqa: SLF001 - torchdata has no public name
    if excess > 0:
        iterator._num_yielded = taken  # noqa: SLF001 - see above
        if hasattr(iterator, "_snapshot"):
            iterator._snapshot["_snapshot_step"] -= excess  # noqa: SLF001 - see above


def _numbered(name: str, objects: Iterable[Any]) -> dict[str, Any]:
    """Return objects under the names that accelerate gives to their files."""
    return {
        name if number == 0 else f"{name}_{number}": item for number, item in enumerate(objects)
    }


def _scoped(value: Any) -> Any:
    """Return a registered object as a part of a state: process 0's object, as in accelerate."""
    return (
        value
        if isinstance(value, torch.nn.Module | torch.optim.Optimizer)
        else ckptfmt.FirstWorker(value)
    )
