"""TorchTitan saves its trainings into a run of ckptfmt, beside the training, and goes on from there.

    config.checkpoint = CkptfmtManager.Config(enable=True, interval=100, keep_latest_k=3)

The run lies in ``<dump_folder>/<folder>``. Every save is a whole one, the last one too; an export to Hugging Face, a
seed checkpoint and several model parts in one process are refused. A loader goes on at the number of data-parallel
ranks that saved it.
"""

from __future__ import annotations

import dataclasses
import os
from concurrent.futures import Future
from typing import Any

from torchtitan.components.checkpointer import BaseCheckpointManager
from torchtitan.components.dataloader import ParallelAwareDataloader

import ckptfmt

__all__ = ["CkptfmtManager"]

#: Fields of TorchTitan's configuration that mean something which isn't done here.
_REFUSED = ("initial_load_in_hf", "last_save_in_hf", "create_seed_checkpoint", "exclude_from_loading")


class CkptfmtManager(BaseCheckpointManager):
    """A checkpoint manager over a `ckptfmt.Checkpointer`."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):
        """TorchTitan's fields, and those of `ckptfmt.Checkpointer`."""

        options: dict[str, Any] = dataclasses.field(default_factory=dict)
        """Options of `ckptfmt.Checkpointer`, such as {"delta": "auto"}."""

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any,  # noqa: ANN401 - TorchTitan's own, here and below
        model_parts: list[Any],
        optimizers: Any,  # noqa: ANN401
        lr_schedulers: Any,  # noqa: ANN401
        states: dict[str, Any],
        sd_adapter: Any = None,  # noqa: ANN401, ARG002
        base_folder: str = "",
    ) -> None:
        self.enable = config.enable
        if not self.enable:
            return
        refused = [name for name in _REFUSED if getattr(config, name)]
        if refused or len(model_parts) > 1:
            what = ", ".join(refused) or "several model parts in one process"
            raise ValueError(f"CkptfmtManager doesn't take {what}")
        self.save_future: Future[None] | None = None
        self._config = config
        self._path = os.path.join(base_folder, config.folder)  # noqa: PTH118 - as TorchTitan does
        self._handle: Any = None
        self._run: ckptfmt.Checkpointer | None = None
        if isinstance(dataloader, ParallelAwareDataloader):
            # Its own state_dict is a pickle of this one.
            dataloader = super(ParallelAwareDataloader, dataloader)
        self._state = ckptfmt.State(
            weights=model_parts[0],
            optimizer=list(optimizers),
            data=None if dataloader is None else ckptfmt.PerWorker(dataloader),
            extra={"lr_scheduler": lr_schedulers, **{name: ckptfmt.FirstWorker(one) for name, one in states.items()}},
        )

    def _load(self, step: int = -1) -> bool:
        resume = "auto" if step == -1 else ckptfmt.Run(self._path).find(step).name
        options: dict[str, Any] = {"keep": self._config.keep_latest_k or None, "resume": resume, **self._config.options}
        self._run = ckptfmt.Checkpointer(self._path, self._state, **options)
        is_resumed = self._run.restore() is not None
        initial = self._config.initial_load_path
        if not is_resumed and initial:
            model = ckptfmt.State(weights=self._state.weights, rng=False)
            ckptfmt.load(initial, model if self._config.initial_load_model_only else self._state)
        self._run.restore_rng()
        return is_resumed or bool(initial)

    def _save(self, curr_step: int, last_step: bool = False) -> bool:  # noqa: FBT001, FBT002 - as TorchTitan calls it
        is_due = last_step or curr_step % self._config.interval == 0
        is_due = is_due or (curr_step == 1 and self._config.enable_first_step_checkpoint)
        if self._config.load_only or not is_due or self._run is None:
            return False
        self._handle = self._run.save(step=curr_step)
        self.save_future = None if self._handle is None else Future()
        return self._handle is not None

    def _maybe_wait_for_staging(self) -> None:
        if self._handle is not None:
            self._handle.wait_staged()

    def _wait_for_saving(self) -> None:
        self._handle.wait()
        self.save_future = None

    def _close(self) -> None:
        if getattr(self, "_run", None) is not None:
            run, self._run = self._run, None
            run.close()  # type: ignore[union-attr]
