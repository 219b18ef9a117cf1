"""The models of the delta benchmarks: the demo's GPT, with adapters, experts, or a large table."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from ckptfmt_tools.demo.settings import Settings
from ckptfmt_tools.demo.task import BYTES, TinyGPT


def make_gpt(*, width: int, layers: int, heads: int, context: int) -> TinyGPT:
    """Return the demo's GPT in another size, without dropout, as in most current models."""
    return TinyGPT(
        Settings(
            steps=1,
            every=1,
            global_batch=1,
            chunk_nbytes=context + 1,
            text_nbytes=context + 1,
            context=context,
            layers=layers,
            width=width,
            heads=heads,
            dropout=0.0,
            warmup_steps=1,
        )
    )


class Adapter(nn.Module):
    """A low-rank addition to a linear layer (LoRA), zero at first."""

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__()
        self.down = nn.Linear(linear.in_features, rank, bias=False)
        self.up = nn.Linear(rank, linear.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the addition."""
        added: torch.Tensor = self.up(self.down(x))
        return added


def adapt(model: TinyGPT, *, part: float) -> None:
    """Freeze all parameters, and add adapters with a `part` of the parameters to all blocks."""
    frozen = sum(parameter.numel() for parameter in model.parameters())
    model.requires_grad_(requires_grad=False)
    linears = [module for module in model.blocks.modules() if isinstance(module, nn.Linear)]
    elements_per_rank = sum(linear.in_features + linear.out_features for linear in linears)
    rank = max(1, round(part / (1 - part) * frozen / elements_per_rank))
    for linear in linears:
        linear.add_module("adapter", Adapter(linear, rank))
        linear.register_forward_hook(
            lambda module, inputs, output: output + module.adapter(inputs[0])
        )


class Experts(nn.Module):
    """Feed-forward layers with one expert per sequence; unused experts get no gradient at all."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(experts)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (batch, context, width), each sequence through the router's preferred expert."""
        weights = functional.softmax(self.router(x.mean(dim=1)), dim=-1)
        best, chosen = weights.max(dim=-1)
        fed = torch.empty_like(x)
        for number in sorted(set(chosen.tolist())):
            rows = chosen == number
            fed[rows] = self.experts[number](x[rows])
        return fed * best[:, None, None]


def split_feeds(model: TinyGPT, *, experts: int) -> None:
    """Replace all feed-forward layers by experts."""
    width = model.norm.normalized_shape[0]
    for block in model.blocks:
        block.feed = Experts(width, experts)


def add_table(model: TinyGPT) -> None:
    """Add a large table: an embedding per pair of neighbouring bytes, with sparse gradients."""
    table = nn.Embedding(BYTES * BYTES, model.norm.normalized_shape[0], sparse=True)
    nn.init.normal_(table.weight, std=0.02)
    model.add_module("table", table)

    def add_pairs(_: nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        tokens = inputs[0]
        before = functional.pad(tokens, (1, 0))[:, :-1]
        pairs: torch.Tensor = table(before * BYTES + tokens)
        return output + pairs

    model.token.register_forward_hook(add_pairs)
