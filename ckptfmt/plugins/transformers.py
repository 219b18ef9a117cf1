"""Hugging Face's Trainer saves to and resumes from a run of ckptfmt.

    from ckptfmt.plugins.transformers import CkptfmtTrainer

    options = {"stop": ckptfmt.Stop(signals=[signal.SIGTERM])}
    trainer = CkptfmtTrainer(model=model, args=args, train_dataset=data, ckptfmt=options)
    trainer.train(resume_from_checkpoint=True)

`CkptfmtTrainer` replaces `transformers.Trainer`. To combine it with another Trainer, make
`CkptfmtTrainer` the first base: ``class MyTrainer(CkptfmtTrainer, Seq2SeqTrainer)``. All other
settings come from `TrainingArguments`, as in transformers.

**Files.** The checkpoints belong to the run ``output_dir/ckptfmt``. They hold weights, optimizer,
scheduler, gradient scaler, RNG streams of each process, and the text of ``trainer_state.json``. A
save continues in the background. ``checkpoint-N``, the directory format of transformers, is written
with ``export_hf`` only. Once the checkpoint of step N is committed, a thread creates the directory
from the checkpoint and renames it into place. The directory holds the files that
``from_pretrained`` reads, ``trainer_state.json`` and ``training_args.bin``, but not the state that
only a resume needs. The next save waits for the previous export, and then raises the export's error
on the process that exports. An export that a kill prevented isn't repeated. Callbacks that read
``checkpoint-N`` in ``on_save`` need ``saver="inline"``: a save is then committed and exported when
it returns.

**Resuming.** ``resume_from_checkpoint=True`` follows the run's lineage and passes over damaged
checkpoints. In a run without a checkpoint the training begins, so that the same command begins and
continues. The text "True" of a command line means the same. ``checkpoint-0`` is a small directory
that names the run: ``get_last_checkpoint`` of transformers finds this directory, and its path means
the same, too. A path may be that of a checkpoint of the run, or of its ``checkpoint-N``: the run is
then rolled back to this checkpoint. Any other path is passed to transformers, so that a training
that began with `transformers.Trainer` continues in a run. An export whose checkpoint isn't in the
run is refused where True would select it: an export has no optimizer. Without
``resume_from_checkpoint`` a training starts again in the same run; a warning is logged if the run
has checkpoints.

The last step of an epoch, and of the training, is saved after ``on_epoch_end`` and after an
evaluation at that point, for every trigger of the save; `transformers.Trainer` saves before both
where ``save_strategy`` is "steps". After a stop in the middle of an epoch, the evaluation of the
end of an epoch is skipped. If a signal arrives in a step that is saved for another reason, the next
step ends the training.

**Retention.** With ``save_total_limit=N`` the newest N checkpoints are kept. With
``metric_for_best_model`` the best checkpoint and the newest N - 1, at least one, are kept; among
equal checkpoints the newest counts as the best. ``load_best_model_at_end`` loads the best
checkpoint from the run. Losses and metrics of evaluations are in the manifests: ``ckptfmt log``
shows them.

**Bit for bit** are weights, optimizer, learning rate, gradient scaler, RNG streams and the order of
samples, in the middle of an epoch and between epochs, with gradient accumulation, on the same
number of processes under DistributedDataParallel or FSDP2; `Trainer.train` skips the batches that
are done. The plug-in records the random numbers with which an epoch begins, so that the order is
the same also with ``train_sampling_strategy="group_by_length"`` and ``use_seedable_sampler=False``.
On a CPU accelerate ignores FSDP, and trains with DistributedDataParallel; the tests disable this
rule. Not bit for bit within an epoch, and the claim of the load names the reason:

- random numbers that a data collator or a dataset draws: the Trainer fetches the first batches
  before it restores the streams, and one batch ahead of each step, and worker processes begin
  again after a resume. The first batches of each epoch are examined;
- ``ignore_data_skip=True``, which restarts the epoch;
- ``dispatch_batches`` on several processes, except for an iterable data set: accelerate skips too
  few batches.

Evaluations with ``dataloader_persistent_workers`` aren't bit for bit either. The first loss that is
logged after a resume differs: the loss averages over the steps since the resume.

On another number of processes the same state is loaded; the Trainer then distributes the samples
differently.

**Adapters.** For a model with adapters of PEFT, a save holds the trained tensors, and refers by
digest to the tensors of the base, which is the directory or the cached snapshot of the hub from
which the model was loaded. `ckptfmt.State.frozen_base` describes loads after a move or a change of
the base. If no safetensors files of the base are on this machine, all weights are saved,
and a warning is logged.

**TRL.** ``class MyTrainer(CkptfmtTrainer, GRPOTrainer)`` also saves the completions on which a
trainer of TRL still trains, its counters and metrics, and a reference model that follows the
policy: `ckptfmt.plugins.generations`. On another number of processes the completions are generated
again.

**The witness** of each launch compares the steps that a resume repeats: loss and batch of every
call of ``training_step``, the norm of the gradients, RNG streams, learning rates and weights. The
verdict is in the log, in ``trainer.checkpointer.load_report`` and in ``ckptfmt log``.

**Refused by name**: DeepSpeed, FSDP1, FSDP on XLA, ``enable_jit_checkpoint`` (use ``stop``),
``auto_find_batch_size``, and ``push_to_hub`` except with ``hub_strategy="end"``. Not tested:
searches for hyperparameters, quantised models, devices other than the CPU.

Tested with transformers 5.23.0, accelerate 1.15.0 and torch 2.13.0.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import shutil
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from accelerate.data_loader import DataLoaderDispatcher
from accelerate.utils import gather_object
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainerState, trainer_utils
from transformers.trainer import TRAINER_STATE_NAME, ExportableState

import ckptfmt
from ckptfmt.plugins.epoch_streams import (
    DrawWatch,
    dump_begin,
    put_begin,
    put_generators,
    read_generators,
)
from ckptfmt.plugins.generations import find_generations
from ckptfmt.plugins.peft_bases import find_base, has_adapters, names_of_base

_LOG: Final = logging.getLogger("ckptfmt")
#: Reasons for a lower claim.
_NO_SKIP: Final = "ignore_data_skip=True begins the epoch again: a resume sees other samples"
_DISPATCHES: Final = (
    "dispatch_batches: accelerate skips too few batches on several processes, and a resume within"
    " an epoch sees other samples"
)
_EVALUATIONS: Final = (
    "evaluations reuse their worker processes (dataloader_persistent_workers): the first evaluation"
    " of a launch draws a random number that later evaluations don't draw"
)
#: The file in ``checkpoint-N`` that names the exported checkpoint, and in ``checkpoint-0`` the run.
_MARK: Final = "ckptfmt.json"
#: The value of a checkpoint that holds the text of ``trainer_state.json``.
_TRAINER_STATE: Final = ("optimizer", "extra/trainer", "global")
#: Prefixes of the arguments that don't influence the trained weights.
_HARMLESS: Final = (
    "ddp_timeout", "disable_tqdm", "do_", "greater_is_better", "hub_", "load_best", "log_",
    "logging_", "metric_for", "output_dir", "project", "push_to_hub", "report_to", "resume_from",
    "run_name", "save_", "skip_memory", "trackio_",
)  # fmt: skip
#: Entries of the configuration about the creation and storage of a model, not about its training.
_NOT_COMPARED: Final = (
    "base_model", "generation", "model/architectures", "model/dtype", "model/transformers_version",
)  # fmt: skip
_NOT_COMPARED_OF_ADAPTERS: Final = (
    "auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version",
)  # fmt: skip


class CkptfmtTrainer(Trainer):
    """A `transformers.Trainer` that saves to and resumes from a run of ckptfmt.

    Args:
        ckptfmt: options of a `ckptfmt.Checkpointer`, such as ``saving``, ``copies``, ``stop``,
            and four more:
            ``run``: directory of the run; by default ``ckptfmt`` in ``args.output_dir``, or in a
                trial's own directory.
            ``keep_best``: whether the best checkpoint by ``args.metric_for_best_model`` is kept in
                addition to the newest (True); or a value of `ckptfmt.Retention.best`. Not used if
                ``keep`` is a `ckptfmt.Retention`.
            ``export_hf``: whether each committed checkpoint is exported to ``checkpoint-N``
                (False).
            ``frozen_base``: the place of the base of adapters, as in `ckptfmt.State`; False to save
                all weights. By default the place from which a model with adapters was loaded.
        args, kwargs: arguments of `transformers.Trainer`, or of the other Trainer base class.

    Attributes:
        checkpointer: the `ckptfmt.Checkpointer` of the last call of `train`; None before.

    Raises: NotImplementedError for arguments that the plug-in doesn't support.
    """

    def __init__(self, *args: Any, ckptfmt: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.checkpointer: Any = None
        self._ckptfmt_options = ckptfmt or {}
        self._ckptfmt: Any = None
        _refuse_unsupported(self)

    def train(
        self, resume_from_checkpoint: Any = None, trial: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Train, as `transformers.Trainer.train` does.

        Args:
            resume_from_checkpoint: True to continue from the run's current checkpoint, by its
                lineage, or to begin if there is none; the path of a checkpoint of the run, of its
                export, or of the run; or a checkpoint that `transformers.Trainer` saved. The texts
                "True" and "False" of a command line are the values.
            trial, args, kwargs: arguments of `transformers.Trainer.train`.

        Raises: `ckptfmt.CkptError`.
        """
        with _Training(
            self, self._ckptfmt_options, Path(self._get_output_dir(trial))
        ) as self._ckptfmt:
            self._ckptfmt.callback(setattr, self, "_ckptfmt", None)
            return super().train(
                self._ckptfmt.choose(resume_from_checkpoint), trial, *args, **kwargs
            )

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if resume_from_checkpoint != self._ckptfmt.place:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None
    ) -> Any:
        prepared = super()._prepare_for_training(
            max_steps, train_dataloader, resume_from_checkpoint
        )
        # Model, optimizer, scheduler and scaler exist and are wrapped; no state of the run is
        # loaded yet.
        self._ckptfmt.follow(train_dataloader)
        self.checkpointer.restore(self._ckptfmt.saved_state)
        if resume_from_checkpoint != self._ckptfmt.place:
            self.checkpointer.restore_rng()
        return prepared

    def _load_rng_state(self, checkpoint: str | None) -> None:
        # The iterator exists, and the completed batches are skipped.
        if checkpoint == self._ckptfmt.place:
            self._ckptfmt.make_workers()
            self.checkpointer.restore_rng()
            self._ckptfmt.begin_epoch(is_restored=True)
        else:
            super()._load_rng_state(checkpoint)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        self._ckptfmt.begin_epoch()
        super()._run_epoch(*args, **kwargs)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Fetch batches as the Trainer does, and watch for random numbers drawn meanwhile."""
        with self._ckptfmt.watch.fetching() if self._ckptfmt else contextlib.nullcontext():
            return super().get_batch_samples(*args, **kwargs)

    def _evaluate(self, *args: Any, **kwargs: Any) -> Any:
        self._ckptfmt.has_evaluated = True
        return super()._evaluate(*args, **kwargs)

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Train a batch as the Trainer does, and record the loss and the batch for the witness."""
        loss = super().training_step(model, inputs, *args, **kwargs)
        if self.checkpointer is not None:
            self.checkpointer.observe(loss=loss, batch=inputs)
        return loss

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self._ckptfmt.save() if self._ckptfmt else super()._save_checkpoint(model, trial)

    def _maybe_log_save_evaluate(
        self, tr_loss: Any, grad_norm: Any, *args: Any, **kwargs: Any
    ) -> None:
        is_again, self._ckptfmt.seen = (
            self._ckptfmt.seen == self.state.global_step,
            self.state.global_step,
        )
        if not is_again:
            self.checkpointer.observe(grad_norm=grad_norm)
        if is_again and self.checkpointer.stopped:
            # A stop in mid-epoch: the checkpoint doesn't contain later events.
            self.control.should_evaluate = self.control.should_save = False
        is_last = (
            self.state.global_step >= self.state.max_steps
            or float(self.state.epoch or 0).is_integer()
        )
        if is_last and not is_again:  # The next call, after on_epoch_end, ends the step.
            is_to_save, self.control.should_save = self.control.should_save, False
            super()._maybe_log_save_evaluate(tr_loss, grad_norm, *args, **kwargs)
            self.control.should_save |= is_to_save
            return
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, *args, **kwargs)
        self.checkpointer.end_step(self.state.global_step)
        self.control.should_training_stop |= self.checkpointer.stopped

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self._ckptfmt.finish()
        result = super()._finalize_training(*args, **kwargs)
        self._ckptfmt.mark()  # with save_total_limit=1 the Trainer removes all but the best
        return result

    def _load_best_model(self) -> None:
        self._ckptfmt.load_best() if self._ckptfmt.best else super()._load_best_model()


class _Training(contextlib.ExitStack):
    """One call of `CkptfmtTrainer.train`: the run and its exports.

    Attributes:
        place: a directory with the ``trainer_state.json`` from which the Trainer resumes.
        best: name of the best checkpoint, after the training, if the run contains this checkpoint.
        seen: the last step for which the Trainer has logged, evaluated and saved.
    """

    def __init__(self, trainer: Any, options: Mapping[str, Any], output_dir: Path) -> None:
        super().__init__()
        self.trainer, self.output_dir, self.options = trainer, output_dir, dict(options)
        self.exports = str(output_dir / trainer_utils.PREFIX_CHECKPOINT_DIR)
        self.run = Path(self.options.pop("run", None) or output_dir / "ckptfmt")
        self.does_export = self.options.pop("export_hf", False)
        self.frozen_base = self.options.pop("frozen_base", None)
        self.best, self.seen, self.place = (
            "",
            -1,
            self.enter_context(tempfile.TemporaryDirectory(prefix="ckptfmt-")),
        )
        self.exporter = self.enter_context(ThreadPoolExecutor(1))
        self.exported = self.exporter.submit(lambda: None)
        self.resumed: tuple[int, dict[str, Any]] = -1, {}
        self.has_evaluated = False
        #: The streams and generators with which the current epoch began.
        self.began: dict[str, Any] | None = None
        #: The loaded `began`, until the first epoch begins.
        self.loaded: dict[str, Any] | None = None
        self.loader: Any = None
        self.watch: Any = None
        self.saved_state: Any = None

    def choose(self, resume: Any) -> Any:
        """Begin a launch of the run, and return the path from which the Trainer resumes.

        The path is `place` for a checkpoint of the run.

        Raises: ValueError for an export of another run; `ckptfmt.CkptError`.
        """
        resume = _parse_resume(resume)
        wanted = "auto" if resume is True else (resume and self._find(Path(str(resume)))) or "fresh"
        self.mark()
        options = _with_retention(self.options, self.trainer.args)
        self.trainer.checkpointer = self.enter_context(
            ckptfmt.Checkpointer(self.run, resume=wanted, **options)
        )
        checkpoint = self.trainer.checkpointer.choose()
        if checkpoint is None:
            last = wanted == "auto" and _find_last(self.trainer.args.output_dir)
            if last and Path(last, _MARK).is_file():
                raise ValueError(
                    f"{last} is an export without optimizer, of another run: pass run="
                )
            if wanted == "auto" and not last:
                _LOG.info("%s has no checkpoint yet: the training begins", self.run)
                return None
            if wanted == "auto":
                return True  # the Trainer finds its own newest checkpoint
            if isinstance(resume, str) and _is_of_another_program(resume):
                raise ValueError(
                    f"{resume} is a checkpoint of ckptfmt outside of the run {self.run}: leave"
                    " resume_from_checkpoint out, and begin the run with its weights and optimizer:"
                    f" ckptfmt={{'init_from': ckptfmt.InitFrom({resume!r}, only=['weights:*',"
                    " 'optimizer:*'], allow=['missing', 'unexpected'])}"
                )
            if not resume and any(one.state == "committed" for one in ckptfmt.Run(self.run).list()):
                _LOG.warning(
                    "%s has checkpoints: resume_from_checkpoint=True goes on from them", self.run
                )
            return resume
        self.resumed = checkpoint.step, checkpoint.leaf(*_TRAINER_STATE)
        state = TrainerState(**json.loads(self.resumed[1]["json"]))
        # This checkpoint may be the best; its path wasn't known at the save. The run may also have
        # been moved.
        is_best = state.best_global_step == checkpoint.step
        best = Path(checkpoint.store.name if is_best else state.best_model_checkpoint or "").name
        if best and (self.run / best).is_dir():
            state.best_model_checkpoint = str(self.run / best)
        state.save_to_json(str(Path(self.place, TRAINER_STATE_NAME)))
        return self.place

    def _find(self, path: Path) -> str | None:
        """Return a checkpointer's resume argument for a path; None for a path outside the run."""
        if self.run.resolve() in (path.resolve(), path.resolve().parent):
            return "auto" if path.resolve() == self.run.resolve() else path.name
        if not (mark := path / _MARK).is_file():
            return None
        told = json.loads(mark.read_text())
        if "digest" in told:
            return str(told["digest"])
        if (path / told["run"]).resolve() != self.run.resolve():
            raise ValueError(
                f"{path} belongs to the run {told['run']}, not to {self.run}: pass run="
            )
        return "auto"

    def mark(self) -> None:
        """Create the directory in which `get_last_checkpoint` of transformers finds the run."""
        place = Path(f"{self.exports}-0")
        if not self.trainer.args.should_save or (place.exists() and not (place / _MARK).is_file()):
            return
        place.mkdir(parents=True, exist_ok=True)
        run = self.run.resolve()
        is_below = run.is_relative_to(self.output_dir.resolve())
        told = Path("..", run.relative_to(self.output_dir.resolve())) if is_below else run
        (place / _MARK).write_text(json.dumps({"run": str(told)}))

    def follow(self, loader: Any) -> None:
        """Watch the loader of the training, and make the state, once all objects exist."""
        self.loader = loader
        self.watch = DrawWatch(loader)
        if self.frozen_base is None and has_adapters(self.trainer.model):
            self.frozen_base = self.agree_on_base()
        self.saved_state = self.state()

    def agree_on_base(self) -> str | None:
        """Return the place of the base of the adapters; None if any process has no files of it."""
        model = self.trainer.model
        own = find_base(model)
        found = gather_object([own])
        if all(found):
            return own
        if self.trainer.is_world_process_zero():
            _LOG.warning(
                "the safetensors files of the base of the adapters aren't on this machine (%s):"
                " checkpoints hold all weights; ckptfmt={'frozen_base': PATH} gives their place",
                ", ".join(names_of_base(model)) or "a model made from a configuration",
            )
        return None

    def begin_epoch(self, *, is_restored: bool = False) -> None:
        """Record the random numbers from which an epoch takes its order, or restore saved numbers.

        Args:
            is_restored: whether the RNG streams of the checkpoint were restored just now. They are
                the streams with which the epoch begins if no batch is skipped.
        """
        loaded = self.loaded
        skips = self.is_within_epoch() and not self.trainer.args.ignore_data_skip
        if is_restored:
            if loaded is None or not skips:
                self.began = dump_begin(self.loader)
            self.loaded = None
            return
        self.watch.begin_epoch()
        if loaded is not None:
            put_begin(self.loader, loaded, is_within_epoch=skips)
        self.began = dump_begin(self.loader)

    def is_within_epoch(self) -> bool:
        """Return whether the last step isn't the last of an epoch."""
        return not float(self.trainer.state.epoch or 0).is_integer()

    def make_workers(self) -> None:
        """Create the worker processes that all epochs share, before the RNG streams are restored.

        Their creation draws a seed, and their reuse in the next epoch draws none.
        """
        base = getattr(self.loader, "base_dataloader", self.loader)
        if getattr(base, "persistent_workers", False) and base._iterator is None:  # noqa: SLF001 - torch's loader has no public name
            generators = read_generators(self.loader)
            iter(base)
            put_generators(self.loader, generators)

    def find_doubts(self) -> tuple[str, ...]:
        """Return the reasons why a resume from the current step can't be exact."""
        args = self.trainer.args
        found = []
        if self.has_evaluated and args.dataloader_persistent_workers:
            found.append(_EVALUATIONS)
        if self.is_within_epoch():
            found += [_NO_SKIP] * args.ignore_data_skip
            is_dispatched = isinstance(self.loader, DataLoaderDispatcher) and args.world_size > 1
            is_iterable = isinstance(getattr(self.loader, "dataset", None), IterableDataset)
            if is_dispatched and not is_iterable and not self.loader.split_batches:
                found.append(_DISPATCHES)
            if (doubt := self.watch.find_doubt()) is not None:
                found.append(doubt)
        return tuple(found)

    def state(self) -> ckptfmt.State:
        """Return the state to save and load, once the Trainer's objects exist."""
        trainer = self.trainer
        args = self.trainer.args
        asked = _Asked(self._dump_trainer, self._take_trainer)
        extra: dict[str, object] = {"trainer": ckptfmt.FirstWorker(asked)}
        config = {"args": _plain(args), **_describe(trainer.model)}
        harmless = (
            *(f"args/{name}" for name in config["args"] if name.startswith(_HARMLESS)),
            *_NOT_COMPARED,
            *(
                f"peft/{name}/{member}"
                for name in config.get("peft", ())
                for member in _NOT_COMPARED_OF_ADAPTERS
            ),
        )
        data = ckptfmt.FirstWorker(
            _Asked(lambda: {"epoch": trainer.state.epoch, "step": trainer.state.global_step})
        )
        state = ckptfmt.State(
            weights=trainer.model_wrapped,
            data=data,
            extra=extra,
            config=config,
            harmless=harmless,
            frozen_base=self.frozen_base or None,
        )
        if args.save_only_model:
            state.rng = False
        else:
            state.optimizer, extra["scheduler"] = trainer.optimizer, trainer.lr_scheduler
            extra |= (
                {"scaler": scaler}
                if (scaler := getattr(trainer.accelerator, "scaler", None))
                else {}
            )
            extra |= find_generations(trainer)
        return state

    def _take_trainer(self, state: dict[str, Any]) -> None:
        self.loaded = state.get("began")

    def _dump_trainer(self) -> dict[str, Any]:
        """Return the text of ``trainer_state.json`` as the Trainer would write it now."""
        trainer = self.trainer
        if trainer.state.global_step == self.resumed[0]:
            return self.resumed[1]  # no step was made since the resume
        callbacks = [*trainer.callback_handler.callbacks, trainer.control]
        exportable = [callback for callback in callbacks if isinstance(callback, ExportableState)]
        trainer.state.stateful_callbacks |= TrainerState(
            stateful_callbacks=exportable
        ).stateful_callbacks
        text = json.dumps(dataclasses.asdict(trainer.state))
        is_within_epoch = self.began is not None and self.is_within_epoch()
        return {"json": text, "began": self.began if is_within_epoch else dump_begin(self.loader)}

    def save(self) -> None:
        """Begin a save. Raises: `ckptfmt.CkptError`; the error of an earlier save or export."""
        state = self.trainer.state
        self.trainer.store_flos()
        self.exported.exception()  # waits: a newer save may delete the exported checkpoint
        self.saved_state.doubts = self.find_doubts()
        handle = self.trainer.checkpointer.save(state.global_step, metrics=_metrics_of(state))
        self.exported.result()  # raises the export's error, after the collective save
        if handle is not None and handle.state != "SKIPPED":
            if state.best_global_step == state.global_step:
                state.best_model_checkpoint = handle.path
            if self.does_export and self.trainer.args.should_save:
                self.exported = self.exporter.submit(self._export, handle)
            if handle.state == "COMMITTED":
                self.exported.result()

    def _export(self, handle: Any) -> None:
        """Create ``checkpoint-N`` atomically from a checkpoint once it is committed."""
        digest = handle.wait().digest
        target = Path(f"{self.exports}-{handle.step}")
        live, names = {}, ["weights:*"]
        with ckptfmt.open(handle.path) as checkpoint:
            if checkpoint.frozen:  # the base isn't read: the live model has the same tensors
                live = self.trainer.model.state_dict()
                stored = checkpoint.tensors.keys() - checkpoint.frozen.keys()
                names = [f"weights:{name}" for field, name, _ in stored if field == "weights"]
        trees: Any = ckptfmt.load(
            handle.path, only=[*names, "optimizer:extra/trainer"], framework="torch"
        )
        state = TrainerState(**json.loads(trees["optimizer"]["extra/trainer"]["json"]))
        state.best_model_checkpoint = (
            state.best_global_step and f"{self.exports}-{state.best_global_step}"
        )
        place = self.output_dir / ".exporting"
        shutil.rmtree(place, ignore_errors=True)  # perhaps left by a killed process
        self.trainer._save(str(place / "made"), state_dict={**live, **trees["weights"]})  # noqa: SLF001
        state.save_to_json(str(place / "made" / TRAINER_STATE_NAME))
        (place / "made" / _MARK).write_text(
            json.dumps({"checkpoint": handle.path, "digest": digest})
        )
        if target.exists():  # an export of an earlier launch
            target.rename(place / "replaced")
        (place / "made").rename(target)
        shutil.rmtree(place)
        trainer_utils.rotate_checkpoints(
            str(self.output_dir), self.trainer.args.save_total_limit, state.best_model_checkpoint
        )
        self.mark()  # the rotation counts and removes the run's mark

    def finish(self) -> None:
        """Wait until all saves are committed and exported. Raises: a save's or export's error."""
        trainer = self.trainer
        state = self.trainer.state
        trainer.checkpointer.close()
        self.exported.exception()  # waits
        trainer.accelerator.wait_for_everyone()
        self.exported.result()
        best = Path(state.best_model_checkpoint or "")
        if best.resolve().parent == self.run.resolve():
            self.best = best.name
            if self.does_export:  # the path that users of transformers expect
                state.best_model_checkpoint = f"{self.exports}-{state.best_global_step}"

    def load_best(self) -> None:
        """Load the best model. Raises: `ckptfmt.CkptError`."""
        metric = _best_of(self.trainer.args)[0]
        score = self.trainer.state.best_metric
        found = ckptfmt.Run(self.run).list()
        equal = [
            one.name
            for one in found
            if one.state == "committed" and one.metrics.get(metric) == score
        ]
        # Among equal checkpoints the newest is kept.
        self.best = equal[-1] if equal and self.best not in equal else self.best
        ckptfmt.load(
            self.run / self.best,
            ckptfmt.State(
                weights=self.trainer.model_wrapped, rng=False, frozen_base=self.frozen_base or None
            ),
        )


class _Asked:
    """A value that is computed at each save. The Trainer itself restores most of the value.

    Args:
        ask: returns the value.
        take: called with the loaded value.
    """

    def __init__(
        self,
        ask: Callable[[], dict[str, Any]],
        take: Callable[[dict[str, Any]], object] = lambda _value: None,
    ) -> None:
        self.state_dict = ask
        self.load_state_dict = take


def _parse_resume(resume: Any) -> Any:
    """Return the value of ``resume_from_checkpoint``, which a command line passes as a text."""
    texts = {"true": True, "false": None}
    if isinstance(resume, str) and resume.lower() in texts and not Path(resume).exists():
        return texts[resume.lower()]
    return resume


def _find_last(output_dir: str) -> str | None:
    """Return the newest ``checkpoint-N``, except the mark of the run."""
    last = trainer_utils.get_last_checkpoint(output_dir) if Path(output_dir).is_dir() else None
    return None if last is None or last.endswith("-0") else str(last)


def _is_of_another_program(path: str) -> bool:
    """Return whether a path has a checkpoint or run of ckptfmt, and none of transformers."""
    is_theirs = Path(path, TRAINER_STATE_NAME).is_file()
    return not is_theirs and any(
        Path(path, name).is_file() for name in ("manifest.json", "run.json")
    )


def _with_retention(options: Mapping[str, Any], args: Any) -> dict[str, Any]:
    """Return the options with rules for ``save_total_limit`` checkpoints, including the best.

    The number and the rules in the options count before the arguments.
    """
    found = dict(options)
    best = found.pop("keep_best", True)
    if isinstance(found.get("keep"), ckptfmt.Retention):
        return found
    limit = max(args.save_total_limit or 0, 0) or None
    if best is True:
        has_best = limit and args.metric_for_best_model and args.eval_strategy != "no"
        best = (*_best_of(args), 1) if has_best else None
    newest = found.pop("keep", limit and max(1, limit - bool(best)))
    every = found.pop("keep_every", None)
    return {**found, "keep": ckptfmt.Retention(newest=newest, every=every, best=best or None)}


def _best_of(args: Any) -> tuple[str, str]:
    """Return the metric of the best model, as evaluations name it, and ``"max"`` or ``"min"``."""
    metric = args.metric_for_best_model
    return metric if metric.startswith(
        "eval_"
    ) else f"eval_{metric}", "max" if args.greater_is_better else "min"


def _metrics_of(state: TrainerState) -> dict[str, float]:
    """Return the finite losses and metrics that were logged at this step."""
    entries = [entry for entry in state.log_history if entry.get("step") == state.global_step]
    pairs = [
        pair
        for entry in entries
        for pair in entry.items()
        if pair[0] == "loss" or pair[0].startswith("eval_")
    ]
    return {
        name: value
        for name, value in pairs
        if isinstance(value, int | float) and math.isfinite(value)
    }


def _describe(model: Any) -> dict[str, Any]:
    """Return the configurations of a model, with which `ckptfmt convert --to hf` describes it."""
    whole = model.get_base_model() if hasattr(model, "get_base_model") else model
    described = _plain(getattr(whole, "config", None))
    name = described.pop("_name_or_path", None)
    if described:
        described["architectures"] = [type(whole).__name__]
    found = {"model": described}
    if name and not Path(name).is_dir():  # a name of the hub
        found["base_model"] = name
    if generation := getattr(whole, "generation_config", None):
        found["generation"] = _plain(generation)
    if has_adapters(model):
        # PEFT's entry for an adapter without the name of a task.
        kind = type(whole)
        mapping = {"base_model_class": kind.__name__, "parent_library": kind.__module__}
        found["peft"] = {
            key: {**_plain(one), **({} if one.task_type else {"auto_mapping": mapping})}
            for key, one in model.peft_config.items()
        }
    return found


def _plain(value: Any) -> dict[str, Any]:
    """Return a configuration as JSON, with the type's name for values that JSON lacks."""

    def fit(other: object) -> object:
        return sorted(other, key=str) if isinstance(other, set) else type(other).__qualname__

    return json.loads(json.dumps(value.to_dict() if value else {}, default=fit))


def _refuse_unsupported(trainer: Any) -> None:
    """Check the arguments and the environment. Raises: NotImplementedError."""
    args = trainer.args
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    is_fsdp1 = trainer.is_fsdp_enabled and getattr(plugin, "fsdp_version", 1) == 1
    refused = {
        "DeepSpeed and FSDP but for version 2": trainer.is_deepspeed_enabled
        or is_fsdp1
        or trainer.is_fsdp_xla_enabled,
        "enable_jit_checkpoint saves in mid-step: pass ckptfmt={'stop': Stop(signals=[SIGTERM])}": (
            args.enable_jit_checkpoint
        ),
        "auto_find_batch_size would begin the run twice": args.auto_find_batch_size,
        "a save is pushed before it is over: hub_strategy='end'": args.push_to_hub
        and args.hub_strategy != "end",
    }
    if found := [sentence for sentence, is_so in refused.items() if is_so]:
        raise NotImplementedError("; ".join(found))
