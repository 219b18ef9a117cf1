"""The settings of the delta benchmarks: model, learning rate, optimizer, and duration."""

from __future__ import annotations

import dataclasses
from typing import Final

RATES: Final = ("1e-3", "1e-4", "1e-5", "1e-6")
PRETRAIN_RATE: Final = 1e-3
_SGD_RATE: Final = 1e-2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes of models and trainings.

    Attributes:
        width, layers, heads, context: the sizes of the GPT; models with experts or a table are
            narrower.
        batch: the number of windows in a step.
        steps: the number of steps of the initial training, and of the long training at 1e-5.
        settle: the number of steps of a setting before its first state.
        gap: the longer distance between two states.
        experts: the number of experts in each feed-forward layer of the model with experts.
    """

    width: int = 256
    layers: int = 4
    heads: int = 8
    context: int = 128
    batch: int = 8
    steps: int = 300
    settle: int = 4
    gap: int = 10
    experts: int = 16


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """A setting: model, training, and the saved states.

    Attributes:
        model: ``gpt``, ``lora``, ``moe`` or ``embedding``.
        optimizer: ``adamw``, ``sgd`` or ``sparse`` (AdamW, and SparseAdam for the table).
        gradients: ``fp32``, ``bf16`` (a micro-batch's gradients, rounded before the step) or
            ``clipped`` (bf16, then scaled).
        implementations: torch's implementations for the first step after the first state; the first
            implementation goes on.
        settle: the number of steps before the first state.
        offsets: the steps from the first state to the later states.
    """

    name: str
    model: str = "gpt"
    optimizer: str = "adamw"
    lr: float
    gradients: str = "fp32"
    implementations: tuple[str, ...] = ("fused",)
    settle: int
    offsets: tuple[int, ...]


def list_scenes(sizes: Sizes) -> list[Scene]:
    """Return every setting."""
    settle = sizes.settle
    gap = sizes.gap
    scenes = [
        Scene(name=f"adamw-{rate}", lr=float(rate), settle=settle, offsets=(1, 2, 3, 4, gap))
        for rate in RATES
    ]
    scenes.append(Scene(name="adamw-1e-5-aged", lr=1e-5, settle=sizes.steps, offsets=(1, gap)))
    for gradients in ("fp32", "bf16", "clipped"):
        scenes += [
            Scene(
                name=f"adamw-{gradients}-{rate}",
                lr=float(rate),
                gradients=gradients,
                implementations=("fused", "foreach", "loop"),
                settle=settle,
                offsets=(1,) if gradients == "fp32" else (1, 2, 3, 4),
            )
            for rate in ("1e-3", "1e-5")
        ]
    scenes += [
        Scene(
            name=f"sgd-{gradients}",
            optimizer="sgd",
            lr=_SGD_RATE,
            gradients=gradients,
            implementations=("fused", "foreach", "loop"),
            settle=2 * settle,
            offsets=(1,),
        )
        for gradients in ("fp32", "bf16")
    ]
    for model, optimizer, offsets in (
        ("lora", "adamw", (1, 2, 3, 4, gap)),
        ("moe", "adamw", (1, gap)),
        ("embedding", "sparse", (1, gap)),
    ):
        scenes.append(
            Scene(
                name=model,
                model=model,
                optimizer=optimizer,
                lr=1e-3,
                settle=3 * settle,
                offsets=offsets,
            )
        )
    return scenes
