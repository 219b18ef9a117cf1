"""torchvision built for CUDA beside torch built for the CPU: two operators that its import needs.

An index may have torchvision only in a build for CUDA. With a torch for the CPU, the compiled
operators of such a build can't be loaded, and ``import torchvision`` fails at the first operator
without a definition. The definitions here have no implementation. timm needs torchvision;
torchmetrics, and therefore Lightning, import torchvision where it is installed.
"""

import importlib.util
from pathlib import Path

import torch

_SPEC = importlib.util.find_spec("torchvision")
#: Keeps the definitions.
_LIBRARY = None
if _SPEC is not None and _SPEC.origin is not None and torch.version.cuda is None:
    _version = Path(_SPEC.origin).with_name("version.py").read_text("utf-8")
    if "+cu" in _version:
        _LIBRARY = torch.library.Library("torchvision", "DEF")
        for _name in ("nms", "qnms"):
            _LIBRARY.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
