"""Checkpoints of adapters: bytes and seconds of saves and loads with a frozen base, and in full."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import save_file

import ckptfmt
from benchmarks.figures import paired_ratio, summarize
from benchmarks.record import Outcome
from benchmarks.rounds import Progress, Workplace, remove

_WIDTH: Final = 2048
_RANK: Final = 16
_ROUNDS: Final = 5
_ELEMENT_NBYTES: Final = 2


class _Adapted(torch.nn.Module):
    """A frozen bfloat16 layer with a LoRA adapter, under PEFT's names."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = torch.nn.Linear(_WIDTH, _WIDTH, bias=False, dtype=torch.bfloat16)
        self.base_layer.requires_grad_(requires_grad=False)
        self.lora_A = torch.nn.Linear(_WIDTH, _RANK, bias=False)
        self.lora_B = torch.nn.Linear(_RANK, _WIDTH, bias=False)


def measure_adapters(
    nbytes: int, *, rounds: int | None, place: Workplace, progress: Progress
) -> Outcome:
    """Measure saves and loads of a module with frozen weights of about `nbytes`."""
    count = max(1, nbytes // (_WIDTH * _WIDTH * _ELEMENT_NBYTES))
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(_Adapted() for _ in range(count)))
    base = place.fresh("base")
    base.mkdir()
    frozen = {
        name.replace(".base_layer", ""): value
        for name, value in model.state_dict().items()
        if "base_layer" in name
    }
    save_file(frozen, base / "model.safetensors")
    rows = []
    for number in range(rounds or _ROUNDS):
        progress.say(f"adapters: round {number}")
        rows.append(_measure_round(model, base, place))
    remove(base)
    names = [name for name in rows[0] if name.endswith("_s")]
    return Outcome(
        workload={
            "nbytes": sum(value.nbytes for value in model.state_dict().values()),
            "frozen_nbytes": sum(value.nbytes for value in frozen.values()),
            "trained_nbytes": sum(one.nbytes for one in model.parameters() if one.requires_grad),
            "tensors": len(model.state_dict()),
            "state": f"bfloat16 layers of {_WIDTH} x {_WIDTH}, LoRA of rank {_RANK} in float32",
        },
        settings={"ckptfmt": {"saver": "ckptfmt.save, in this process"}},
        repeats={"rounds": len(rows)},
        rounds={"adapters": rows},
        figures={name: summarize([row[name] for row in rows]) for name in names},
        ratios={
            "later_save_over_full": paired_ratio(
                [row["later_save_s"] for row in rows], [row["full_save_s"] for row in rows]
            )
        },
        goals={},
        memory={},
        notes={
            "full_save_s": "of all tensors, without frozen_base=",
            "first_save_s": "each frozen byte is compared with the base",
            "later_save_s": "each frozen byte in memory is digested",
            "same_load_s": "into a module that has the base's weights: no file of the base is read",
            "base_load_s": "into a module of zeros: the frozen tensors are read from the base",
        },
        cache="warm: base and checkpoints were written or read just before",
    )


def _measure_round(model: torch.nn.Module, base: Path, place: Workplace) -> dict[str, float]:
    found: dict[str, float] = {}

    def timed(name: str, action: Callable[[], object]) -> None:
        begin_s = time.perf_counter()
        action()
        found[f"{name}_s"] = time.perf_counter() - begin_s

    paths = {name: place.fresh(name) for name in ("full", "first", "later")}
    state = ckptfmt.State(weights=model, frozen_base=base)
    timed("full_save", lambda: ckptfmt.save(paths["full"], ckptfmt.State(weights=model), step=1))
    timed("first_save", lambda: ckptfmt.save(paths["first"], state, step=1))
    timed("later_save", lambda: ckptfmt.save(paths["later"], state, step=2))
    for name in ("full", "later"):
        files = [file for file in paths[name].rglob("*") if file.is_file()]
        found[f"{name}_nbytes"] = sum(file.stat().st_size for file in files)
    timed("same_load", lambda: ckptfmt.load(paths["later"], state))
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    timed("base_load", lambda: ckptfmt.load(paths["later"], state))
    for name, value in model.state_dict().items():
        if not torch.equal(value, kept[name]):
            raise RuntimeError(f"{name} isn't what was saved")
    for path in paths.values():
        remove(path)
    return found
