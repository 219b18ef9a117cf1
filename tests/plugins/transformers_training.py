"""A training with `CkptfmtTrainer` that notes each step: for test_transformers.py, in its process or in another."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.utils.data import Dataset, IterableDataset, Subset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from ckptfmt.plugins.transformers import CkptfmtTrainer
from tests.plugins.trainings import Journal, rng_digest, settle

LAST_STEP = 42


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Tokens by number, the same everywhere."""

    def __len__(self) -> int:
        return 72

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, 64, (12,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def make_model(**changes: Any) -> GPT2LMHeadModel:
    """Return a tiny model with dropout and tied embeddings."""
    set_seed(11)
    sizes = {
        "vocab_size": 64,
        "n_positions": 16,
        "n_embd": 16,
        "n_layer": 2,
        "n_head": 2,
        "embd_pdrop": 0.2,
    }
    return GPT2LMHeadModel(GPT2Config(**{**sizes, "bos_token_id": 0, "eos_token_id": 0, **changes}))


def adapt(model: Any) -> Any:
    """Return a model with LoRA adapters around the attention."""
    from peft import LoraConfig, get_peft_model  # noqa: PLC0415 - a framework for a few tests

    set_seed(12)
    config = LoraConfig(r=2, target_modules=["c_attn"], lora_dropout=0.1, fan_in_fan_out=True)
    return get_peft_model(model, config)


class Noting(TrainerCallback):
    """Notes what each step has left behind."""

    def __init__(self, path: str | Path) -> None:
        self.journal = Journal(path)
        self.batches: list[torch.Tensor] = []
        self.losses: list[torch.Tensor] = []

    def on_step_end(self, _args: Any, state: Any, _control: Any, **objects: Any) -> None:
        """Note the step."""
        optimizer, scheduler = objects["optimizer"], objects["lr_scheduler"]
        self.journal.note(
            state.global_step,
            weights=objects["model"].state_dict(),
            optimizer=optimizer.state_dict(),
            rng=rng_digest(),
            lr=repr(scheduler.get_last_lr()),
            scheduler=scheduler.state_dict(),
            samples=self.batches,
            losses=self.losses,
            epoch=repr(state.epoch),
        )
        self.batches.clear()
        self.losses.clear()


class Noted(Trainer):
    """A Trainer that hands the samples of each step to the callback that notes them."""

    noting: Noting

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Do a step."""
        self.noting.batches.append(inputs["input_ids"].clone())
        loss = super().training_step(model, inputs, *args, **kwargs)
        self.noting.losses.append(loss.detach())
        return loss


class OfTransformers(Noted):
    """Saves and resumes as transformers does."""


class Watched(Noted, CkptfmtTrainer):
    """Saves and resumes with the plug-in; may die as soon as it has called for a save."""

    die_in_save = 0

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        if self.state.global_step == self.die_in_save:
            os.kill(os.getpid(), signal.SIGKILL)


class Sharded(Watched):
    """Trains with FSDP2 on a CPU, too; accelerate by itself takes it for accelerators alone, and trains with DDP."""

    def create_accelerator_and_postprocess(self) -> None:
        """Say that FSDP is what is meant."""
        super().create_accelerator_and_postprocess()
        state = self.accelerator.state
        state.distributed_type = DistributedType.FSDP
        state.fsdp_plugin = FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args)
        self.is_fsdp_enabled = True


class Curriculum(Watched):
    """Weighs the loss by the number of batches since the process began, which nothing saves."""

    batch_count = 0

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """Return the weighted loss."""
        self.batch_count += 1
        return super().compute_loss(*args, **kwargs) * (1 + self.batch_count / 100)


class WithoutStreams(Watched):
    """Doesn't put RNG streams back: the negative control."""

    def _load_rng_state(self, checkpoint: str | None) -> None:
        state = torch.get_rng_state()
        super()._load_rng_state(checkpoint)
        torch.set_rng_state(state)


class SaveAt(TrainerCallback):
    """Saves at one step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, _args: Any, state: Any, control: Any, **_objects: Any) -> None:
        """Ask for the save."""
        control.should_save |= state.global_step == self.step


class TerminateAt(TrainerCallback):
    """Sends SIGTERM to the process at one step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, _args: Any, state: Any, _control: Any, **_objects: Any) -> None:
        """Send the signal."""
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


class Streamed(IterableDataset[dict[str, torch.Tensor]]):
    """The same tokens one after the other."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        worker = torch.utils.data.get_worker_info()
        first, stride = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return (Tokens()[index] for index in range(first, self.count, stride))


def make_trainer(directory: Path, *, kind: type[Trainer] = Watched, **options: Any) -> Any:
    """Return a trainer that saves below a directory and notes its steps there.

    Args:
        directory: of this run.
        kind: of Trainer.
        options: ``args``, ``ckptfmt`` and others, as of the Trainer; ``args_type``: the class of
            the first; ``base``: the directory of a model to be trained with adapters.
    """
    told = {
        "output_dir": str(directory / "out"),
        "max_steps": LAST_STEP,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 3e-3,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 6,
        "save_steps": 5,
        "logging_steps": 5,
        "seed": 3,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
    }
    args = options.pop("args_type", TrainingArguments)(**{**told, **options.pop("args", {})})
    noting = Noting(directory / f"journal-{os.environ.get('RANK', '0')}")
    base = options.pop("base", None)
    options = {
        "model": make_model() if base is None else adapt(GPT2LMHeadModel.from_pretrained(base)),
        "train_dataset": Tokens(),
        "eval_dataset": Subset(Tokens(), range(8)),
        **options,
    }
    if not issubclass(kind, CkptfmtTrainer):
        options.pop("ckptfmt", None)
    trainer: Any = kind(args=args, **options)
    if isinstance(trainer, Noted):
        trainer.noting = noting
        trainer.add_callback(noting)
    return trainer


def main(directory: Path, env: dict[str, str], told: dict[str, Any]) -> None:
    """Train as told, in a process of its own."""
    settle(env)
    kind = {kind.__name__: kind for kind in (Watched, Sharded, Curriculum, WithoutStreams)}[
        told.pop("kind", "Watched")
    ]
    resume, die_in_save = told.pop("resume", None), told.pop("die_in_save", 0)
    trainer = make_trainer(directory, kind=kind, **told)
    trainer.die_in_save = die_in_save
    trainer.train(resume_from_checkpoint=resume)
    report = trainer.checkpointer.load_report
    if trainer.is_world_process_zero() and report is not None:
        (directory / "claim").write_text(
            report.claim + "".join(f"\n{reason}" for reason in report.lowered_by)
        )
