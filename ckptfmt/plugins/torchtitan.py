"""TorchTitan saves its trainings into a run of ckptfmt in the background, and resumes from the run.

    config.checkpoint = CkptfmtManager.Config(enable=True, interval=100, keep_latest_k=3)

The run lies in ``<dump_folder>/<folder>``. Every save contains the full state, also the last save.
An export to Hugging Face, a seed checkpoint and several model parts in one process are refused.
Each data-parallel rank has its own loader. With another number of data-parallel ranks a load is
refused; with ``exclude_from_loading=["dataloader"]`` the loaders start from the beginning.

The witness of each launch compares the steps that a resume repeats: RNG streams, learning rates and
weights, but not the loss, which TorchTitan doesn't pass to a checkpoint manager. The job's
configuration isn't passed either: T1 is neither claimed nor refuted.

A training that TorchTitan's own manager has saved continues in a run, in a separate folder:

    CkptfmtManager.Config(
        enable=True,
        folder="run",
        initial_load_path="/outputs/checkpoint/step-500",
        initial_load_model_only=False,
    )
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final

from torch.distributed.checkpoint import state_dict_loader
from torchtitan.components.checkpointer import BaseCheckpointManager
from torchtitan.components.checkpointer.base import ModelWrapper
from torchtitan.components.dataloader import ParallelAwareDataloader

import ckptfmt

__all__ = ["CkptfmtManager"]

#: Fields of TorchTitan's configuration for features that this manager doesn't support.
_REFUSED: Final = ("initial_load_in_hf", "last_save_in_hf", "create_seed_checkpoint")

#: The selectors in a checkpoint of the items that TorchTitan can exclude from loading.
_EXCLUDED: Final = {"dataloader": "data:*", "lr_scheduler": "extra:lr_scheduler"}


class CkptfmtManager(BaseCheckpointManager):
    """A checkpoint manager that uses a `ckptfmt.Checkpointer`."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):
        """TorchTitan's fields, and options of `ckptfmt.Checkpointer`."""

        options: dict[str, Any] = dataclasses.field(default_factory=dict)
        """Options of `ckptfmt.Checkpointer`, such as {"saving": ckptfmt.Saving(delta="auto")}."""

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any,
        model_parts: list[Any],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: Any = None,  # noqa: ARG002 - the framework's signature
        base_folder: str = "",
    ) -> None:
        self.enable = config.enable
        if not self.enable:
            return
        refused = [name for name in _REFUSED if getattr(config, name)]
        refused += [
            f"exclude_from_loading={[name]}"
            for name in config.exclude_from_loading
            if name not in _EXCLUDED
        ]
        if refused or len(model_parts) > 1:
            what = ", ".join(refused) or "several model parts in one process"
            raise ValueError(f"CkptfmtManager doesn't take {what}")
        self.save_future: Future[None] | None = None
        self._config = config
        # pathlib would resolve or normalise the path of the user.
        self._path = os.path.join(base_folder, config.folder)  # noqa: PTH118
        self._handle: Any = None
        self._run: ckptfmt.Checkpointer | None = None
        #: The state under the names that TorchTitan's own manager uses.
        self._theirs = {
            "optimizer": optimizers,
            "lr_scheduler": lr_schedulers,
            "dataloader": dataloader,
            **states,
        }
        if isinstance(dataloader, ParallelAwareDataloader):
            dataloader = _Position(dataloader)
        self._state = ckptfmt.State(
            weights=model_parts[0],
            optimizer=list(optimizers),
            data=None if dataloader is None else ckptfmt.PerWorker(dataloader),
            extra={
                "lr_scheduler": lr_schedulers,
                **{name: ckptfmt.FirstWorker(one) for name, one in states.items()},
            },
        )

    def _load(self, step: int = -1) -> bool:
        resume = "auto" if step == -1 else ckptfmt.Run(self._path).find(step).name
        override = [_EXCLUDED[name] for name in self._config.exclude_from_loading]
        options: dict[str, Any] = {
            "keep": self._config.keep_latest_k or None,
            "resume": resume,
            **self._config.options,
        }
        if any(field.name in options for field in dataclasses.fields(ckptfmt.Loading)):
            options.setdefault("override", override)  # keywords of ckptfmt 0.9
        else:
            loading = options.get("loading") or ckptfmt.Loading()
            kept = (*loading.override, *override)
            options["loading"] = dataclasses.replace(loading, override=kept)
        initial = self._config.initial_load_path
        if not initial:
            self._refuse_theirs()
        self._run = ckptfmt.Checkpointer(self._path, self._state, **options)
        is_resumed = self._run.restore() is not None
        if initial and not is_resumed:
            self._begin_from(initial)
        self._run.restore_rng()
        return is_resumed or bool(initial)

    def _begin_from(self, path: str) -> None:
        """Load the initial state of an empty run: a ckptfmt checkpoint, or TorchTitan's own."""
        is_model_only = self._config.initial_load_model_only
        excluded = self._config.exclude_from_loading
        # pathlib would resolve or normalise the path of the user.
        if not os.path.exists(os.path.join(path, ".metadata")):  # noqa: PTH110, PTH118
            if is_model_only:
                ckptfmt.load(path, ckptfmt.State(weights=self._state.weights, rng=False))
                return
            data = None if "dataloader" in excluded else self._state.data
            extra = {
                name: one for name, one in (self._state.extra or {}).items() if name not in excluded
            }
            state = ckptfmt.State(
                weights=self._state.weights, optimizer=self._state.optimizer, data=data, extra=extra
            )
            ckptfmt.load(path, state, allow=["unexpected"] if "lr_scheduler" in excluded else ())
            return
        model_of_theirs = ModelWrapper(self._state.weights)
        weights = model_of_theirs.state_dict()
        excluded = [*self._theirs] if is_model_only else excluded
        others = {
            name: one
            for name, one in self._theirs.items()
            if name not in excluded and one is not None
        }
        state_dict_loader.load({**weights, **others}, checkpoint_id=path)
        model_of_theirs.load_state_dict(weights)

    def _refuse_theirs(self) -> None:
        """Check that a folder without ckptfmt checkpoints has none of TorchTitan's manager.

        Raises: ValueError.
        """
        with contextlib.suppress(ckptfmt.CkptError):
            ckptfmt.Run(self._path).newest()
            return
        theirs = [found.parent for found in Path(self._path).glob("step-*/.metadata")]
        if theirs:
            newest = max(theirs, key=lambda place: int(place.name.removeprefix("step-"))).absolute()
            raise ValueError(
                f"{self._path} has checkpoints of TorchTitan's own manager, and none of ckptfmt."
                " To go on from the"
                f" newest one, give another checkpoint.folder, initial_load_path={str(newest)!r}"
                " and"
                " initial_load_model_only=False; to begin anew, give another checkpoint.folder"
            )

    # The framework's signature.
    def _save(self, curr_step: int, last_step: bool = False) -> bool:  # noqa: FBT001, FBT002
        is_due = last_step or curr_step % self._config.interval == 0
        is_due = is_due or (curr_step == 1 and self._config.enable_first_step_checkpoint)
        if self._config.load_only or self._run is None:
            return False
        self._run.step = curr_step  # the witness records every step
        if not is_due:
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
            run = self._run
            self._run = None
            run.close()  # type: ignore[union-attr]


class _Position:
    """The position of one data-parallel rank in its data.

    The state_dict of TorchTitan's loader is a pickle of this position; the plug-in stores plain
    values.
    """

    def __init__(self, loader: ParallelAwareDataloader) -> None:
        self._inner: Any = super(ParallelAwareDataloader, loader)
        self._place = {"dp_rank": loader.dp_rank, "dp_world_size": loader.dp_world_size}

    def state_dict(self) -> dict[str, Any]:
        """Return the position with its rank and the number of ranks."""
        return {**self._place, "loader": self._inner.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Set the position.

        Raises: ValueError where another rank saved the position, or the number of ranks differs.
        """
        saved = {name: state_dict[name] for name in self._place}
        if saved != self._place:
            raise ValueError(
                f"the loader's position was saved by rank {saved['dp_rank']} of"
                f" {saved['dp_world_size']}, and this is"
                f" rank {self._place['dp_rank']} of {self._place['dp_world_size']}: TorchTitan's"
                " loaders aren't"
                " resharded. Train on as many data-parallel ranks as before, or begin the data"
                " anew:"
                ' checkpoint.exclude_from_loading=["dataloader"]'
            )
        self._inner.load_state_dict(state_dict["loader"])
