"""State of TRL's trainers beyond the state of a Trainer, for the plug-in of transformers.

`GRPOTrainer` and similar trainers of TRL train on each generation of completions for
``steps_per_generation * num_iterations`` batches. Between these batches the completions, their
advantages and their log-probabilities exist in the trainer only. A resume without the completions
generates new completions with newer weights. TRL itself saves none of these values.

The names of attributes are the names in TRL 1.16.0. TRL isn't imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from accelerate.utils import send_to_device

import ckptfmt

#: Attributes with the number of batches, the number of tokens, and the state of an adaptive bonus
#: for entropy.
_COUNTERS: Final = ("_step", "_total_train_tokens", "entropy_coef", "_last_world_entropy")


def find_generations(trainer: Any) -> dict[str, object]:
    """Return the values of ``State(extra=...)`` for a trainer of TRL; none for a plain Trainer."""
    found: dict[str, object] = {}
    if hasattr(trainer, "_metrics"):
        found["counters"] = ckptfmt.FirstWorker(_Counters(trainer))
    if hasattr(trainer, "_buffered_inputs"):
        found["generations"] = ckptfmt.PerWorker(_Generations(trainer))
    reference = getattr(trainer, "ref_model", None)
    if reference is not None and getattr(trainer.args, "sync_ref_model", False):
        found["ref_model"] = reference
    return found


class _Counters:
    """The counters of a trainer, and the metrics since the last entry of the log."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        counters = {
            name: getattr(self._trainer, name) for name in _COUNTERS if hasattr(self._trainer, name)
        }
        metrics = self._trainer._metrics["train"]  # noqa: SLF001 - TRL has no public name
        return {"counters": counters, "metrics": {name: metrics[name][:] for name in metrics}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        for name, value in state_dict["counters"].items():
            setattr(self._trainer, name, value)
        metrics = self._trainer._metrics["train"]  # noqa: SLF001 - TRL has no public name
        metrics.clear()
        metrics.update(state_dict["metrics"])


class _Generations:
    """The completions of this process for the next batches of the trainer."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        #: The loaded completions of another number of processes, until the trainer generates.
        self._unfit: Mapping[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        batches = trainer._buffered_inputs  # noqa: SLF001 - TRL has no public name
        if batches is None and self._unfit is not None:
            return dict(self._unfit)
        count = trainer.args.steps_per_generation * getattr(trainer, "num_iterations", 1)
        is_used = trainer._step % count != 0  # noqa: SLF001 - TRL has no public name
        return {"processes": trainer.args.world_size, "batches": batches if is_used else None}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        # Another number of processes distributes the prompts differently, and generates again.
        is_fit = state_dict["processes"] == self._trainer.args.world_size
        self._unfit = None if is_fit else state_dict
        self._trainer._buffered_inputs = send_to_device(  # noqa: SLF001 - TRL has no public name
            state_dict["batches"] if is_fit else None, self._trainer.args.device
        )
