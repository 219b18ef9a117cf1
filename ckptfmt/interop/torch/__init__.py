"""Torch's side: what `ckptfmt.interop` calls when a torch object is met."""

from __future__ import annotations

from typing import Any

import torch

from ckptfmt.documents.tree import DeviceName, DtypeName, Size, TensorRef
from ckptfmt.interop.torch.modules import ModuleView, merge_tied, view_module
from ckptfmt.interop.torch.optimizers import capture_optimizer, is_plain_optimizer, plan_optimizer
from ckptfmt.interop.torch.restoring import plan_module
from ckptfmt.interop.torch.streams import STREAM_KINDS, global_streams, read_generator, write_generator
from ckptfmt.interop.torch.subclasses import inner_tensors, is_registered, register_flatten
from ckptfmt.interop.torch.tensors import TORCH_DTYPES, allocate, dtype_name, local_of, sink_of, source_of
from ckptfmt.interop.torch.topology import flags, local_facts, versions
from ckptfmt.interop.trees import FLATTENED, Encoder
