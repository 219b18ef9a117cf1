"""The device of the cells with one process: the CPU, or the environment's choice."""

from __future__ import annotations

import os
from typing import Final

import torch

__all__ = ["DEVICE"]

#: Set CKPTFMT_CONFORMANCE_DEVICE=cuda for the cells ``t1/plain/*``. Cells of several processes need
#: the CPU.
DEVICE: Final = torch.device(os.environ.get("CKPTFMT_CONFORMANCE_DEVICE", "cpu"))
