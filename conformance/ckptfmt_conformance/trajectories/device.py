"""What the cells of one process are trained on: the processor, or what the environment names."""

from __future__ import annotations

import os
from typing import Final

import torch

__all__ = ["DEVICE"]

#: Set CKPTFMT_CONFORMANCE_DEVICE=cuda for the cells ``t1/plain/*``. Those of several processes need the processor.
DEVICE: Final = torch.device(os.environ.get("CKPTFMT_CONFORMANCE_DEVICE", "cpu"))
