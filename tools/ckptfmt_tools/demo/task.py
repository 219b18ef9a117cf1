"""The demo's task: a text, a small GPT, and the loss of some positions of the data."""

from __future__ import annotations

import dataclasses
import random
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from ckptfmt.data.sampler import Sampler
from ckptfmt.digest import digest_bytes, digest_text
from ckptfmt_tools.demo.settings import Settings


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A text and its origin.

    Attributes:
        content: the bytes; each is a token.
        file_count: number of source files.
        chunk_nbytes: bytes in one sample.
    """

    content: bytes
    file_count: int
    chunk_nbytes: int

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.content) // self.chunk_nbytes

    def chunk(self, sample: int) -> bytes:
        """Return one sample."""
        return self.content[sample * self.chunk_nbytes : (sample + 1) * self.chunk_nbytes]

    def fingerprint(self) -> str:
        """Return the digest of the whole text: another text counts as another data set."""
        return digest_text(digest_bytes(self.content))


def read_text(*, text_nbytes: int, chunk_nbytes: int) -> Text:
    """Return the first `text_nbytes` bytes of the standard library's modules, ordered by name.

    Raises: FileNotFoundError where the library has no sources, as in a zip archive.
    """
    library = Path(sysconfig.get_path("stdlib"))
    content = bytearray()
    file_count = 0
    for path in sorted(library.glob("*.py")):
        if len(content) >= text_nbytes:
            break
        content += path.read_bytes()
        file_count += 1
    text = Text(
        content=bytes(content[:text_nbytes]), file_count=file_count, chunk_nbytes=chunk_nbytes
    )
    if len(text) == 0:
        raise FileNotFoundError(f"{library} has no sources of the standard library")
    return text


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Augmentation:
    """The random numbers that a step draws once, for all samples.

    Attributes:
        begin: position of each window in its chunk.
        masked: part of the input bytes replaced by noise.
        dropout: rate of dropout.
    """

    begin: int
    masked: float
    dropout: float


def draw_augmentation(settings: Settings) -> Augmentation:
    """Draw one number from each RNG stream of this process, and return process 0's numbers.

    The trainer gives each logical worker random numbers that follow from the plan, without an RNG
    stream to lose. These three numbers come from RNG streams that a process has and a checkpoint
    restores: a run with a lost stream learns differently.
    """
    begin = random.randrange(settings.chunk_nbytes - settings.context)
    masked = np.random.uniform(0.0, settings.masked)  # noqa: NPY002
    dropout = settings.dropout * torch.rand((), dtype=torch.float64).item()
    drawn = torch.tensor([begin, masked, dropout], dtype=torch.float64)
    if dist.is_initialized():
        dist.broadcast(drawn, src=0)
    return Augmentation(
        begin=int(drawn[0].item()), masked=float(drawn[1].item()), dropout=float(drawn[2].item())
    )


class Task:
    """The prediction of the next byte of a text, as a loss.

    Args:
        model: the trainer's model.
        text: the training text.
        sampler: an iterable of all samples of each step; the trainer assigns them to workers by
            position.
        settings: settings of the run.

    Attributes:
        taken: samples taken by this process in this step, in the order of the data.
    """

    def __init__(self, model: TinyGPT, text: Text, sampler: Sampler, settings: Settings) -> None:
        self._model = model
        self._text = text
        self._steps = iter(sampler)
        self._settings = settings
        self._samples: list[int] = []
        self._augmentation = Augmentation(begin=0, masked=0.0, dropout=0.0)
        self.taken: list[int] = []

    def begin_step(self) -> None:
        """Take the samples of the next step, and draw the random numbers; on every process."""
        self._samples = next(self._steps)
        self._augmentation = draw_augmentation(self._settings)
        self._model.set_dropout(self._augmentation.dropout)
        self.taken = []

    def loss_of(self, _: nn.Module, positions: range) -> tuple[torch.Tensor, int]:
        """Return the loss of some positions of this step, summed over tokens, and their number."""
        samples = [self._samples[position % len(self._samples)] for position in positions]
        self.taken += samples
        tokens, targets = make_batch(self._text, samples, self._augmentation, self._settings)
        loss = functional.cross_entropy(
            self._model(tokens).flatten(0, 1), targets.flatten(), reduction="sum"
        )
        self._model.count(targets)
        return loss, targets.numel()


def make_batch(
    text: Text, samples: Sequence[int], augmentation: Augmentation, settings: Settings
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and targets, (batch, context), of some samples, with noise.

    The trainer seeds Python's RNG stream and torch's for each logical worker at each step. numpy's
    numbers are derived from Python's stream; torch's stream is left to the dropout.
    """
    chunks = b"".join(text.chunk(sample) for sample in samples)
    rows = np.frombuffer(chunks, dtype=np.uint8).reshape(len(samples), settings.chunk_nbytes)
    windows = rows[:, augmentation.begin : augmentation.begin + settings.context + 1]
    tokens = windows[:, :-1].copy()
    targets = windows[:, 1:].copy()
    generator = np.random.default_rng(random.getrandbits(64))
    noise = generator.random(tokens.shape) < augmentation.masked
    tokens[noise] = generator.integers(BYTES, size=int(noise.sum()), dtype=np.uint8)
    return torch.from_numpy(tokens).long(), torch.from_numpy(targets).long()


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
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.dropout = nn.Dropout(settings.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the residual stream, (batch, context, width), after this block."""
        batch, context, width = x.shape
        split = (batch, context, self.heads, width // self.heads)
        q, k, v = (
            part.view(split).transpose(1, 2)
            for part in self.qkv(self.norm_attention(x)).chunk(3, dim=-1)
        )
        heard = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.mix(heard.transpose(1, 2).reshape(batch, context, width)))
        fed: torch.Tensor = self.dropout(self.feed(self.norm_feed(x)))
        return x + fed


class TinyGPT(nn.Module):
    """A small GPT that predicts the next byte.

    The logits start from the frequency of each byte so far. These counts are a persistent buffer:
    without a gradient, changed by each step, and necessary for the same training.
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
        """Set the rate of dropout of all layers."""
        for module in self.modules():
            if isinstance(module, nn.Dropout):
                module.p = rate
