"""What of torch's settings, versions and devices decides bits. Probed by name: what a torch lacks is None."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, Final

import torch

#: Attributes below `torch`; a callable is called without arguments.
_FLAGS: Final = (
    "are_deterministic_algorithms_enabled",
    "is_deterministic_algorithms_warn_only_enabled",
    "utils.deterministic.fill_uninitialized_memory",
    "get_default_dtype",
    "get_float32_matmul_precision",
    "backends.cudnn.enabled",
    "backends.cudnn.deterministic",
    "backends.cudnn.benchmark",
    "backends.mkldnn.enabled",
    "backends.mkldnn.deterministic",
    "backends.opt_einsum.enabled",
    "backends.fp32_precision",
    "backends.cuda.matmul.fp32_precision",
    "backends.cudnn.fp32_precision",
    "backends.mkldnn.fp32_precision",
    "backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
    "backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
    "backends.cuda.matmul.allow_fp16_accumulation",
    "backends.cuda.flash_sdp_enabled",
    "backends.cuda.mem_efficient_sdp_enabled",
    "backends.cuda.math_sdp_enabled",
    "backends.cuda.cudnn_sdp_enabled",
)


def flags() -> dict[str, object]:
    """Return the settings that decide bits, by their names in torch; plain values."""
    return {name: _probe(name) for name in _FLAGS}


def versions() -> dict[str, str | None]:
    """Return the versions of torch and of what it was built with."""
    return {
        "torch": str(torch.__version__),
        "torch_git": torch.version.git_version,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
    }


def world_size() -> int | None:
    """Return the number of ranks where torch.distributed is initialised, else None."""
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else None


def local_facts(devices: Iterable[str]) -> dict[str, object]:
    """Return what is true of this machine: device kinds and names, threads, instruction set."""
    kinds = sorted({torch.device(device).type for device in devices})
    cuda = [torch.device(device) for device in sorted(devices) if device.startswith("cuda")]
    return {
        "device_kinds": kinds,
        "device_names": sorted({torch.cuda.get_device_name(device) for device in cuda}),
        "num_threads": torch.get_num_threads(),
        "num_interop_threads": torch.get_num_interop_threads(),
        "cpu_capability": _probe("backends.cpu.get_cpu_capability"),
        "compile": _compilers(),
    }


def _compilers() -> list[str]:
    """Return what torch.compile was called with in this process so far; of what it compiled torch keeps no list.

    A compiled module and a plain one round differently, and draw other random numbers for dropout.
    """
    frames = sys.modules.get("torch._dynamo.eval_frame")
    backends = list(getattr(frames, "cached_backends", {}).values())
    return sorted({_describe(backend) for backend in backends if callable(backend)})


def _describe(backend: Any) -> str:  # noqa: ANN401 - whatever torch.compile takes
    name = getattr(backend, "compiler_name", None) or getattr(backend, "__qualname__", type(backend).__qualname__)
    options = getattr(backend, "config", None) or getattr(backend, "kwargs", None) or {}
    told = {"dynamic": getattr(backend, "dynamic", None), **(options if isinstance(options, dict) else {})}
    return ", ".join([str(name), *(f"{key}={value}" for key, value in sorted(told.items()) if value is not None)])


def _probe(path: str) -> object:
    value: Any = torch
    for part in path.split("."):
        value = getattr(value, part, None)
    try:
        value = value() if callable(value) else value
    except RuntimeError:  # a setting that this build or this combination of settings doesn't answer for
        return None
    return value if value is None or type(value) in (bool, int, str) else str(value)
