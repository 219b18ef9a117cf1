"""Small models, each with a kind of state that is easily lost in a resume."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

__all__ = [
    "CLASSES",
    "CONTEXT",
    "FEATURES",
    "MODELS",
    "TOKENS",
    "VOCABULARY",
    "is_language_model",
    "make_model",
]

FEATURES = 64
CLASSES = 4
VOCABULARY = 24
CONTEXT = 6
WIDTH = 16
TOKENS = 7


class MLP(nn.Module):
    """A perceptron with BatchNorm's running statistics and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(FEATURES, 24)
        self.norm = nn.BatchNorm1d(24)
        self.dropout = nn.Dropout(0.2)
        self.down = nn.Linear(24, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits, (batch, classes)."""
        hidden = self.dropout(functional.relu(self.norm(self.up(x))))
        logits: torch.Tensor = self.down(hidden)
        return logits


class Curriculum(nn.Module):
    """Noise that grows with each batch.

    The count of batches is a plain number, visible only by `get_extra_state`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x with some values dropped."""
        self.seen += self.training
        return functional.dropout(x, min(0.3, 0.01 * self.seen), self.training)

    def get_extra_state(self) -> dict[str, int]:
        """Return the count of batches."""
        return {"seen": self.seen}

    def set_extra_state(self, state: dict[str, int]) -> None:
        """Restore the count of batches."""
        self.seen = state["seen"]


class CNN(nn.Module):
    """Convolutions, BatchNorm in two dimensions, and extra state if a curriculum is given."""

    def __init__(self, curriculum: nn.Module | None = None) -> None:
        super().__init__()
        self.curriculum = curriculum or nn.Dropout(0.1)
        self.first = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.second = nn.Conv2d(4, 6, 3, stride=2)
        self.head = nn.Linear(6 * 9, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits, (batch, classes)."""
        picture = functional.relu(self.norm(self.first(self.curriculum(x).view(-1, 1, 8, 8))))
        logits: torch.Tensor = self.head(functional.relu(self.second(picture)).flatten(1))
        return logits


class Block(nn.Module):
    """Attention and a feed-forward layer, each on the normalised residual."""

    def __init__(self, feed: nn.Module | None = None) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(WIDTH)
        self.norm_feed = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.feed = feed or nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the residual stream, (batch, context, width), after this block."""
        batch, context, _ = x.shape
        q, k, v = (
            self.qkv(self.norm_attention(x)).view(batch, context, 3, 2, -1).permute(2, 0, 3, 1, 4)
        )
        mask = torch.full((context, context), -1e4, dtype=q.dtype, device=q.device).triu(1)
        heard = (
            (torch.softmax(q @ k.transpose(-1, -2) + mask, dim=-1) @ v).transpose(1, 2).flatten(2)
        )
        x = x + self.dropout(self.mix(heard))
        fed: torch.Tensor = self.dropout(self.feed(self.norm_feed(x)))
        return x + fed


class GPT(nn.Module):
    """A transformer with tied weights, and a constant table of angles.

    The table is a non-persistent buffer, and no state.
    """

    angles: torch.Tensor

    def __init__(self, feed: nn.Module | None = None) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        places = torch.arange(CONTEXT, dtype=torch.float32)[:, None] / torch.arange(1, WIDTH + 1)
        self.register_buffer("angles", places.sin(), persistent=False)
        self.dropout = nn.Dropout(0.1)
        self.block = Block(feed)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        nn.init.normal_(self.token.weight, std=0.1)
        self.head.weight = self.token.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits, (batch * context, vocabulary), of each token's successor."""
        embedded = self.token(tokens)
        x = self.dropout(embedded + self.angles.to(embedded.dtype))
        logits: torch.Tensor = self.head(self.norm(self.block(x)).flatten(0, 1))
        return logits


class Experts(nn.Module):
    """A router with noise, a bias for balanced load, and counts until the step's end.

    The bias is a persistent buffer. The counts aren't persistent, but inside an accumulation window
    they are state.
    """

    bias: torch.Tensor
    counts: torch.Tensor

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, WIDTH, WIDTH) / 4)
        self.register_buffer("bias", torch.zeros(experts))
        self.register_buffer("counts", torch.zeros(experts, dtype=torch.int64), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of each token's expert."""
        scores = self.router(x)
        noisy = scores.detach() + self.bias + 0.3 * torch.randn_like(scores)
        chosen = functional.one_hot(noisy.argmax(-1), len(self.bias))
        if self.training:
            self.counts += chosen.flatten(0, -2).sum(0)
        gates = torch.softmax(scores, dim=-1) * chosen
        return torch.einsum("...e,...d,edf->...f", gates, x, self.up)

    @torch.no_grad()
    def after_step(self) -> None:
        """Move the bias towards experts with less than their share."""
        share = self.counts.sum() / len(self.counts)
        self.bias += 0.05 * torch.sign(share - self.counts)
        self.counts.zero_()


def make_cnn() -> CNN:
    """Return a CNN with extra state.

    The extra state is a plain number, which the reference trainer can't sum over logical workers.
    """
    return CNN(Curriculum())


def make_moe() -> GPT:
    """Return a GPT whose feed-forward layer is a mixture of experts."""
    return GPT(Experts())


MODELS: dict[str, Any] = {"mlp": MLP, "cnn": make_cnn, "cnn-bare": CNN, "gpt": GPT, "moe": make_moe}


def make_model(name: str) -> nn.Module:
    """Return a model with initial values from torch's stream."""
    model: nn.Module = MODELS[name]()
    return model


def is_language_model(name: str) -> bool:
    """Return whether a model takes tokens. All other models take features."""
    return name in ("gpt", "moe")
