"""A training of TorchTitan's small Llama on a CPU, with its own loader; started and killed by test_torchtitan.py.

TorchTitan 0.3 trains on accelerators. Stand-ins for what it asks of one let its own trainer run
here: the device's type and name, a memory monitor, attention that isn't compiled, and, before torch
2.15, a time-out of process groups. Several processes train with FSDP2 over gloo, and each notes its
steps in a journal of its own.

Usage: titan_training.py RUN JOURNAL [--lose-data] [--without-loader] [--theirs] [--from CHECKPOINT]
"""

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

random.seed(7)
np.random.seed(7)  # noqa: NPY002 - the framework's signature
stub: Any = torch
stub._utils._get_available_device_type = lambda: "cpu"
stub.cpu.current_device = lambda: 0
stub.cpu.get_device_name = lambda *_: "cpu"
stub.distributed.set_timeout = getattr(stub.distributed, "set_timeout", lambda *_: None)

import tokenizers  # noqa: E402 - the framework's signature
from torch.nn.attention import flex_attention  # noqa: E402 - the framework's signature
from torchtitan.components import metrics  # noqa: E402 - the framework's signature
from torchtitan.components.checkpointer import CheckpointManager  # noqa: E402 - the framework's signature
from torchtitan.models.common.attention import FlexAttention  # noqa: E402 - the framework's signature
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402 - the framework's signature

from ckptfmt.plugins.torchtitan import CkptfmtManager  # noqa: E402 - the framework's signature
from tests.plugins.trainings import Journal, rng_digest  # noqa: E402 - the framework's signature

TOTAL = 42


class Monitor:
    """A device's memory, of which nothing is known."""

    device_name = "cpu"

    def get_peak_stats(self) -> Any:
        """Return zeros."""
        return metrics.DeviceMemStats(*(0.0 for _ in metrics.DeviceMemStats._fields))

    def reset_peak_stats(self) -> None:
        """Do nothing."""


metrics.build_device_memory_monitor = Monitor
attention: Any = flex_attention
attention._validate_device = lambda *_: None
FlexAttention._compiled_flex_attn = staticmethod(attention.flex_attention)


def write_assets(directory: Path) -> None:
    """Write a text that TorchTitan's c4_test reads, and a tokenizer."""
    draw = random.Random(0)
    texts = [
        " ".join(draw.choices(["alpha", "beta", "gamma", "delta", "eta"], k=40)) for _ in range(200)
    ]
    (directory / "tests" / "assets" / "c4_test").mkdir(parents=True, exist_ok=True)
    lines = "\n".join(json.dumps({"text": text}) for text in texts)
    (directory / "tests" / "assets" / "c4_test" / "data.json").write_text(lines)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    special = ["<unk>", "<|begin_of_text|>", "<|end_of_text|>"]
    tokenizer.train_from_iterator(
        texts, tokenizers.trainers.BpeTrainer(vocab_size=400, special_tokens=special)
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"bos_token": special[1], "eos_token": special[2]}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


alone = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
}
os.environ |= alone | os.environ
run, journal_path = map(os.path.abspath, sys.argv[1:3])
directory = Path(f"{run}-assets-{os.environ['RANK']}")
write_assets(directory)
os.chdir(directory)
os.environ["HF_HOME"] = str(directory)
config = llama3_debugmodel()
config.hf_assets_path = str(directory)
config.dump_folder = run
config.training.seq_len, config.training.local_batch_size, config.training.steps = 32, 2, TOTAL
config.training.disable_cuda_graphs = True
config.debug.seed = 3
config.parallelism.spmd_backend = "partial_dtensor"
config.validator.enable = False
config.activation_checkpoint = None
config.model_spec.model.layers = config.model_spec.model.layers[:1]
excluded = ["dataloader"] if "--without-loader" in sys.argv else []
initial: dict[str, Any] = {}
if "--from" in sys.argv:
    initial = {
        "initial_load_path": sys.argv[-1],
        "initial_load_model_only": False,
        "folder": "ours",
    }
kind: Any = CheckpointManager if "--theirs" in sys.argv else CkptfmtManager
config.checkpoint = kind.Config(
    enable=True, interval=5, keep_latest_k=3, exclude_from_loading=excluded, **initial
)
trainer = config.build()
for module in trainer.model_parts[0].modules():
    if isinstance(module, torch.distributed.fsdp.FSDPModule):
        module.set_force_sum_reduction_for_comms(True)  # gloo has no reduction that scales
journal = Journal(f"{journal_path}-{os.environ['RANK']}")
inner, step_of_trainer, load_of_manager = (
    trainer.checkpointer.save,
    trainer.train_step,
    trainer.checkpointer.load,
)
seen: list[Any] = []


def train_step(data_iterator: Any) -> None:
    """Train a step, and note what it took from the loader."""

    def noting() -> Any:
        for batch in data_iterator:
            seen.append(batch)
            yield batch

    seen.clear()
    step_of_trainer(noting())


def trained() -> dict[str, Any]:
    """Return what is trained."""
    optimizers = [optimizer.state_dict() for optimizer in trainer.optimizers]
    return {"weights": trainer.model_parts[0].state_dict(), "optimizer": optimizers}


def load(step: int) -> bool:
    """Load as the trainer does, and note what was loaded, behind the journals' names."""
    is_loaded: bool = load_of_manager(step)
    name = f"{journal_path}-{os.environ['RANK']}"
    Journal(f"{name}.loaded").note(trainer.step, **trained())
    report = None if "--theirs" in sys.argv else trainer.checkpointer._run.load_report
    Path(f"{name}.claim").write_text(
        "" if report is None else f"{report.claim} {report.lowered_by}"
    )
    return is_loaded


def save(step: int, last_step: bool = False) -> bool:  # noqa: FBT001, FBT002 - the framework's signature
    """Save as the trainer does, and note the step."""
    is_saved: bool = inner(step, last_step)
    journal.note(
        step,
        data=[[inputs, labels] for inputs, labels in seen],
        **trained(),
        learning_rate=[trainer.lr_schedulers.state_dict()],
        tokens=trainer.ntokens_seen,
        rng=rng_digest(),
    )
    return is_saved


trainer.train_step, trainer.checkpointer.save, trainer.checkpointer.load = train_step, save, load
if "--lose-data" in sys.argv:
    trainer.checkpointer._state.data = None
trainer.train()
trainer.close()
