"""Checkpoints that restore a training run: weights, and the context that produced them.

    state = ckptfmt.State(weights=model, optimizer=optimizer, data=sampler, config=config)
    with ckptfmt.Checkpointer("runs/gpt", state, every="5min", keep=3) as checkpointer:
        for step in checkpointer.steps(total):
            train_step(next(batches))

Importing this package doesn't import torch, and changes nothing: no signal handler, no hook, no environment.
"""

from __future__ import annotations

from ckptfmt.api import load, open_checkpoint, save, validate
from ckptfmt.box import Box
from ckptfmt.checkpointer import Checkpointer
from ckptfmt.data.sampler import Sampler
from ckptfmt.errors import CkptError
from ckptfmt.state import PerWorker, State
from ckptfmt.write.snapshot import TensorSink, TensorSource

open = open_checkpoint  # as gzip.open and tarfile.open

__version__ = "0.1.0"

__all__ = [
    "Box",
    "Checkpointer",
    "CkptError",
    "PerWorker",
    "Sampler",
    "State",
    "TensorSink",
    "TensorSource",
    "load",
    "open",
    "save",
    "validate",
]
