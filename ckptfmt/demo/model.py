"""A small GPT over bytes: dropout, tied embeddings, and a buffer that every step changes and every step needs."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from ckptfmt.demo.settings import Settings

#: The vocabulary: a token is a byte.
BYTES = 256


class Block(nn.Module):
    """Attention and a feed-forward layer, each on the normalised residual."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        width = settings.width
        self.heads = settings.heads
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.norm_feed = nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(settings.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the residual stream, (batch, context, width), after this block."""
        batch, context, width = x.shape
        split = (batch, context, self.heads, width // self.heads)
        q, k, v = (part.view(split).transpose(1, 2) for part in self.qkv(self.norm_attention(x)).chunk(3, dim=-1))
        heard = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.mix(heard.transpose(1, 2).reshape(batch, context, width)))
        fed: torch.Tensor = self.dropout(self.feed(self.norm_feed(x)))
        return x + fed


class TinyGPT(nn.Module):
    """Predict the next byte.

    The logits start from how often each byte was seen so far. Those counts are a persistent buffer: no gradient
    reaches them, each step moves them, and who loses them trains something else.
    """

    byte_counts: torch.Tensor

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.token = nn.Embedding(BYTES, settings.width)
        self.place = nn.Embedding(settings.context, settings.width)
        self.dropout = nn.Dropout(settings.dropout)
        self.blocks = nn.ModuleList(Block(settings) for _ in range(settings.layers))
        self.norm = nn.LayerNorm(settings.width)
        self.head = nn.Linear(settings.width, BYTES, bias=False)
        self.register_buffer("byte_counts", torch.zeros(BYTES, dtype=torch.int64))
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        self.head.weight = self.token.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits, (batch, context, BYTES), of the byte after each token."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.token(tokens) + self.place(places))
        for block in self.blocks:
            x = block(x)
        seen = (self.byte_counts + 1).float()
        logits: torch.Tensor = self.head(self.norm(x)) + (seen / seen.sum()).log()
        return logits

    @torch.no_grad()
    def count(self, tokens: torch.Tensor) -> None:
        """Count the bytes of a batch."""
        self.byte_counts += torch.bincount(tokens.flatten(), minlength=BYTES)

    def set_dropout(self, rate: float) -> None:
        """Drop this part of the activations from now on."""
        for module in self.modules():
            if isinstance(module, nn.Dropout):
                module.p = rate
