"""The settings of the demo's training, equal on every process of every launch."""

from __future__ import annotations

import dataclasses

#: Pieces of state that `--leave-out` can leave out of a restore.
ITEMS = (
    "python",
    "numpy",
    "torch.cpu",
    "optimizer.step",
    "optimizer.exp_avg",
    "optimizer.exp_avg_sq",
    "scheduler",
    "cursor",
    "buffer",
    "trainer",
)

#: The least number of steps with room for saves, a kill between two of them, and a resume.
STEPS_MIN = 8


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The config of the demo's run.

    Attributes:
        steps: total number of training steps.
        every: number of steps from one save to the next.
        global_batch: samples per step, over all processes.
        workers: logical workers, which share a batch evenly; up to this number of processes share
            the workers.
        chunk_nbytes: bytes of text in one sample; the training window lies anywhere inside.
        text_nbytes: total bytes of text, so few that the run reads the text more than once.
        context: tokens in a window.
        dropout, masked: greatest rate of dropout, and greatest part of the input bytes replaced by
            noise; each step draws both.
    """

    steps: int
    every: int
    warmup_steps: int
    global_batch: int = 24
    chunk_nbytes: int = 2 << 10
    text_nbytes: int = 2 << 20
    context: int = 128
    layers: int = 4
    width: int = 128
    heads: int = 4
    dropout: float = 0.2
    masked: float = 0.04
    lr: float = 2e-3
    weight_decay: float = 0.1
    workers: int = 4
    seed: int = 2026

    @property
    def killed_step(self) -> int:
        """The step after which a process is killed: in mid-run, and between two saves."""
        return self._middle_save + max(1, self.every // 2)

    @property
    def resized_step(self) -> int:
        """The saved step from which the run is resumed at another world size."""
        return self._middle_save + self.every

    @property
    def _middle_save(self) -> int:
        return self.steps // 2 // self.every * self.every


def make_settings(*, steps: int | None = None, quick: bool = False) -> Settings:
    """Return the demo's settings; `quick` trains a much smaller model for fewer steps.

    >>> settings = make_settings()
    >>> settings.steps, settings.every, settings.killed_step, settings.resized_step
    (60, 10, 35, 40)
    """
    steps = steps or (24 if quick else 60)
    part = max(2, steps // 6)
    settings = Settings(steps=steps, every=part, warmup_steps=part)
    if not quick:
        return settings
    return dataclasses.replace(
        settings,
        global_batch=12,
        chunk_nbytes=256,
        text_nbytes=48 << 10,
        context=64,
        layers=1,
        width=64,
        heads=2,
    )
