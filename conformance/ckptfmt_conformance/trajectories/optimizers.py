"""The optimizers and schedules of the cells, and an AdamW with float32 masters of bfloat16 weights.

torch has no such optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, NAdam, Optimizer, RMSprop
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    ExponentialLR,
    LinearLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

__all__ = ["OPTIMIZERS", "SCHEDULES", "MasterAdamW", "make_optimizer", "make_schedule"]

LR = 0.01


class MasterAdamW(Optimizer):
    """AdamW on float32 copies of bfloat16 weights, with moments in bfloat16 and float32.

    The dtypes of its state differ from the weights' dtype and among each other.
    `Optimizer.load_state_dict` would cast all of them to the weight's dtype, and so change the
    state.
    """

    def __init__(
        self, parameters: Iterable[torch.Tensor] | Iterable[dict[str, Any]], lr: float = LR
    ) -> None:
        super().__init__(
            parameters, {"lr": lr, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.01}
        )

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update each weight separately."""
        if closure is not None:
            raise ValueError("there is no closure here")
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_one(parameter, self.state[parameter], group)

    def _step_one(
        self, parameter: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        if not state:
            state["step"] = 0
            state["master"] = parameter.detach().float()
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.float32)
        state["step"] += 1
        gradient, (beta1, beta2) = parameter.grad.float(), group["betas"]  # type: ignore[union-attr]
        mean = state["exp_avg"].float() * beta1 + gradient * (1 - beta1)
        state["exp_avg"].copy_(mean)
        state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        denominator = (state["exp_avg_sq"] / (1 - beta2 ** state["step"])).sqrt() + group["eps"]
        master = state["master"].mul_(1 - group["lr"] * group["weight_decay"])
        master.addcdiv_(mean / (1 - beta1 ** state["step"]), denominator, value=-group["lr"])
        parameter.copy_(master)


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda parameters: SGD(parameters, lr=LR, momentum=0.9, weight_decay=0.01),
    "sgd-nesterov": lambda parameters: SGD(parameters, lr=LR, momentum=0.9, nesterov=True),
    "adamw-loop": lambda parameters: AdamW(parameters, lr=LR, foreach=False),
    "adamw-foreach": lambda parameters: AdamW(parameters, lr=LR, foreach=True),
    "adamw-fused": lambda parameters: AdamW(parameters, lr=LR, fused=True),
    "adam-amsgrad": lambda parameters: Adam(parameters, lr=LR, amsgrad=True, foreach=False),
    "adamw-tensor-lr": lambda parameters: AdamW(parameters, lr=torch.tensor(LR), foreach=False),
    "nadam": lambda parameters: NAdam(parameters, lr=LR),
    "rmsprop": lambda parameters: RMSprop(parameters, lr=LR, momentum=0.5, centered=True),
    "adagrad": lambda parameters: Adagrad(parameters, lr=LR, lr_decay=0.01),
    "adamw-masters": MasterAdamW,
}


def make_optimizer(name: str, model: nn.Module) -> Optimizer:
    """Return an optimizer with two groups: matrices with weight decay; biases and norms without."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in parameters if parameter.dim() > 1]},
        {
            "params": [parameter for parameter in parameters if parameter.dim() <= 1],
            "weight_decay": 0.0,
        },
    ]
    return OPTIMIZERS[name](groups)


def _make_warm_up(optimizer: Optimizer) -> SequentialLR:
    parts = [
        LinearLR(optimizer, start_factor=0.2, total_iters=3),
        CosineAnnealingLR(optimizer, T_max=12),
    ]
    return SequentialLR(optimizer, parts, milestones=[3])


SCHEDULES: dict[str, Callable[[Optimizer], Any]] = {
    "warmup-cosine": _make_warm_up,
    "exponential": lambda optimizer: ExponentialLR(optimizer, 0.9),
    "one-cycle": lambda optimizer: OneCycleLR(optimizer, max_lr=2 * LR, total_steps=16),
    "plateau": lambda optimizer: ReduceLROnPlateau(
        optimizer, factor=0.7, patience=0, threshold=0.05
    ),
}


def make_schedule(name: str, optimizer: Optimizer) -> Any:
    """Return a scheduler."""
    return SCHEDULES[name](optimizer)
