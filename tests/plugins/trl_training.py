"""Trainings with trainers of TRL that note each step: for test_trl.py, in processes of their own."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    TrainerCallback,
    set_seed,
)
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)

import ckptfmt
from ckptfmt.plugins.transformers import CkptfmtTrainer
from tests.plugins.trainings import Journal, rng_digest, settle

#: Number of words in the vocabulary, and of prompts in an epoch.
_WORDS = 32
_PROMPTS = 4
#: Two prompts in a generation, which four batches use: an epoch has eight batches.
_GENERATING = {
    "num_generations": 4,
    "steps_per_generation": 2,
    "num_iterations": 2,
    "max_completion_length": 4,
}


class Grpo(CkptfmtTrainer, GRPOTrainer):
    """GRPO on a run of ckptfmt."""


class Rloo(CkptfmtTrainer, RLOOTrainer):
    """RLOO on a run of ckptfmt."""


class Sft(CkptfmtTrainer, SFTTrainer):
    """Supervised fine-tuning on a run of ckptfmt."""


class Dpo(CkptfmtTrainer, DPOTrainer):
    """DPO on a run of ckptfmt."""


class Forgetful(Grpo):
    """GRPO that resumes without the completions, as TRL does: the negative control."""

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._prepare_for_training(*args, **kwargs)
        self._step, self._buffered_inputs = 0, None
        return prepared


class Rewards:
    """A reward function that notes prompts, completions and rewards."""

    __name__ = "letters"

    def __init__(self) -> None:
        self.noted: list[Any] = []

    def __call__(self, prompts: Any, completions: Any, **_columns: Any) -> list[float]:
        """Return a number for the letters of each completion."""
        rewards = [sum(ord(letter) % 7 for letter in text) / 10 for text in completions]
        self.noted.append([list(prompts), list(completions), rewards])
        return rewards


class Noting(TrainerCallback):
    """Notes what each step has left behind."""

    def __init__(self, path: Path, rewards: Rewards) -> None:
        self._journal = Journal(path)
        self._rewards = rewards
        self.reference: Any = None

    def on_step_end(self, _args: Any, state: Any, _control: Any, **objects: Any) -> None:
        """Note the step."""
        facts = {
            "weights": objects["model"].state_dict(),
            "optimizer": objects["optimizer"].state_dict(),
            "reference": self.reference.state_dict() if self.reference else None,
            "rng": rng_digest(),
            "lr": repr(objects["lr_scheduler"].get_last_lr()),
            "rewards": json.dumps(self._rewards.noted),
        }
        self._rewards.noted.clear()
        self._journal.note(state.global_step, **facts)


def _make_tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(3, _WORDS))]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def _make_model(directory: Path) -> Qwen2ForCausalLM:
    """Return a model with dropout, from a directory: TRL reads the reference model from there."""
    place = directory / f"model-{os.environ.get('RANK', '0')}"
    if not place.exists():
        set_seed(11)
        sizes = {"hidden_size": 16, "intermediate_size": 32, "max_position_embeddings": 64}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1}
        tokens = {"vocab_size": _WORDS, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}
        config = Qwen2Config(attention_dropout=0.1, **sizes, **heads, **tokens)
        config.architectures = [Qwen2ForCausalLM.__name__]  # the class of the reference model
        config.save_pretrained(place)  # only process 0 saves a model
        weights = Qwen2ForCausalLM(config).state_dict()
        save_file(weights, place / "model.safetensors", {"format": "pt"})
    return Qwen2ForCausalLM.from_pretrained(place)


def _make_texts(seed: int) -> list[str]:
    drawn = torch.Generator().manual_seed(seed)
    rows = torch.randint(3, _WORDS, (_PROMPTS, 3), generator=drawn).tolist()
    return [" ".join(f"w{number}" for number in row) for row in rows]


def make_trainer(
    directory: Path,
    *,
    kind: str = "Grpo",
    is_lora: bool = False,
    saver: Any = "inline",
    **args: Any,
) -> Any:
    """Return a trainer of TRL that saves each step below a directory and notes the steps there.

    Args:
        directory: of this run.
        kind: name of the class.
        is_lora: whether adapters are trained.
        saver: of the run.
        args: arguments of the configuration.
    """
    told = {
        "output_dir": str(directory / "out"),
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "save_steps": 1,
        "logging_steps": 3,
        "seed": 3,
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "disable_tqdm": True,
    }
    rewards = Rewards()
    data = {"prompt": _make_texts(1)}
    options: dict[str, Any] = {}
    if kind == "Sft":
        config: Any = SFTConfig(**told | args)
        data = {"text": _make_texts(1) * 8}
    elif kind == "Dpo":
        config = DPOConfig(**told | args)
        data = {"prompt": data["prompt"] * 8, "chosen": _make_texts(2) * 8}
        data["rejected"] = _make_texts(3) * 8
    else:
        config = (RLOOConfig if kind == "Rloo" else GRPOConfig)(**told | _GENERATING | args)
        options["reward_funcs"] = rewards
    kinds = {one.__name__: one for one in (Grpo, Rloo, Sft, Dpo, Forgetful)}
    trainer = kinds[kind](
        model=_make_model(directory),
        args=config,
        train_dataset=Dataset.from_dict(data),
        processing_class=_make_tokenizer(),
        peft_config=LoraConfig(r=2, lora_dropout=0.1, task_type="CAUSAL_LM") if is_lora else None,
        ckptfmt={"saving": ckptfmt.Saving(saver=saver)},
        **options,
    )
    noting = Noting(directory / f"journal-{os.environ.get('RANK', '0')}", rewards)
    noting.reference = getattr(trainer, "ref_model", None)
    trainer.add_callback(noting)
    return trainer


def main(directory: Path, env: dict[str, str], told: dict[str, Any]) -> None:
    """Train in a process of its own, and write the claim of the resume and the log."""
    settle(env)
    trainer = make_trainer(directory, **told)
    trainer.train(resume_from_checkpoint=True)
    if trainer.is_world_process_zero():
        report = trainer.checkpointer.load_report
        reasons = [] if report is None else [report.claim, *report.lowered_by]
        (directory / "claim").write_text("\n".join(reasons))
        (directory / "log").write_text(json.dumps(trainer.state.log_history))
