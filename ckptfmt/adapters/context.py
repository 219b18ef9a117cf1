"""Describe a run's configuration, topology and provenance, which a load only compares."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from enum import Enum
from types import SimpleNamespace
from typing import Any, Final

import numpy as np

from ckptfmt import limits
from ckptfmt.adapters.live import Live
from ckptfmt.adapters.origin import program_origin
from ckptfmt.errors import Code, err
from ckptfmt.state import INIT_FROM, FirstWorker, PerWorker

#: The placeholder in a difference for a value that is absent on this side.
ABSENT: Final = "<absent>"

#: Environment variables that select kernels, reductions or thread counts.
_ENVIRONMENT: Final = (
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "MKL_CBWR", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA",
    "CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE", "CUDA_DEVICE_MAX_CONNECTIONS",
    "NVIDIA_TF32_OVERRIDE", "NCCL_ALGO", "NCCL_PROTO", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS",
    "NCCL_NTHREADS", "NCCL_NVLS_ENABLE", "NCCL_COLLNET_ENABLE", "NVTE_ALLOW_NONDETERMINISTIC_ALGO",
    "FLASH_ATTENTION_DETERMINISTIC", "MAMBA_DETERMINISTIC", "CAUSAL_CONV1D_DETERMINISTIC",
    "PYTHONHASHSEED",
)  # fmt: skip


#: The members of the topology that count processes. The numbers are equal in most runs.
PROCESS_COUNTS: Final = ("worker_count", "logical_workers", "world_size")


def own_config(config: object, *, worker: int) -> tuple[Any, bool]:
    """Return the configuration of a State as a tree, and whether this worker saves and compares it.

    Worker 0 alone saves and compares the configuration of a `FirstWorker`.

    Raises: the errors of `plain_config`.
    """
    is_given = worker == 0 or not isinstance(config, FirstWorker)
    value = config.value if isinstance(config, FirstWorker) else config
    return (None if value is None else plain_config(value, where="config:")), is_given


def plain_config(value: Any, *, where: str, depth: int = 0) -> Any:
    """Return a configuration as a tree.

    Namespaces, dataclass instances and mappings become dicts, paths become strings, and enum
    members become their names. Values of other types stay unchanged; `dump_tree` rejects
    unsupported types by name.

    Raises: FormatError(DOC_DEPTH); StateError(STATE_UNSUPPORTED) for torch tensors.
    """
    if depth > limits.MSGPACK_DEPTH:
        raise err(
            Code.DOC_DEPTH,
            "the value nests too deeply, or contains itself",
            where=where,
            remedy="Flatten it.",
        )
    if hasattr(value, "requires_grad"):
        detail = f"a {type(value).__module__}.{type(value).__qualname__} is no configuration"
        remedy = (
            "Give numbers, texts, lists and dicts here, as value.tolist() is; give tensors"
            " to weights= or extra=."
        )
        place = where.replace(":/", "/")
        raise err(
            Code.STATE_UNSUPPORTED, detail, where=place, requirement="REQ-TRE-001", remedy=remedy
        )
    if isinstance(value, FirstWorker | PerWorker):
        name = type(value).__name__
        raise err(
            Code.ARGUMENT,
            f"{name} stands where a configuration has one value for all processes",
            where=where.replace(":/", "/"),
            remedy="Wrap the whole configuration, State(config=ckptfmt.FirstWorker(config)), which"
            " saves process 0's; a value that differs between processes goes to"
            " State(extra={name: ckptfmt.PerWorker(value)}).",
        )
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, argparse.Namespace | SimpleNamespace):
        value = vars(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {
            key: plain_config(item, where=f"{where}/{key}", depth=depth + 1)
            for key, item in value.items()
        }
    if type(value) in (list, tuple):
        return type(value)(
            plain_config(item, where=f"{where}/{index}", depth=depth + 1)
            for index, item in enumerate(value)
        )
    return value


def find_differences(saved: object, live: object) -> list[tuple[str, object, object]]:
    """Return path, saved and live value of every plain value that differs between two trees.

    >>> find_differences({"a": 1, "b": [2, 3]}, {"a": 1, "b": [2, 4], "c": 5})
    [('b/1', 3, 4), ('c', '<absent>', 5)]
    >>> find_differences({}, {"a": 1}), find_differences({"a": {}}, {"a": {"b": 1}})
    ([('a', '<absent>', 1)], [('a/b', '<absent>', 1)])
    """
    left = dict(_flatten(saved, ""))
    right = dict(_flatten(live, ""))
    # an empty container differs only by the other side's items
    for side, other in ((left, right), (right, left)):
        empty = [
            path
            for path, value in side.items()
            if isinstance(value, dict | list | tuple) and path not in other
        ]
        for path in empty:
            if any(name.startswith(f"{path}/") for name in other):
                del side[path]
    return [
        (path, left.get(path, ABSENT), right.get(path, ABSENT))
        for path in (*left, *(path for path in right if path not in left))
        if path not in left or path not in right or not _same(left[path], right[path])
    ]


def _flatten(value: object, path: str) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict) and (value or not path):
        items: Any = value.items()
    elif isinstance(value, list | tuple) and value:
        items = enumerate(value)
    else:
        yield path, value
        return
    for key, item in items:
        yield from _flatten(item, f"{path}/{key}" if path else str(key))


def _same(left: object, right: object) -> bool:
    if type(left) is not type(right):
        return False
    return left == right or (left != left and right != right)  # noqa: PLR0124


def topology(*, worker_count: int, side: Any) -> dict[str, object]:
    """Return the facts that must be equal on all workers.

    These are the number of workers, and the settings and versions that determine bits.

    Args:
        worker_count: the number of workers.
        side: the result of `torch_side`.
    """
    world_size = None if side is None else side.world_size()
    return {
        "worker_count": worker_count,
        "logical_workers": worker_count,
        "world_size": worker_count if world_size is None else world_size,
        "flags": {} if side is None else side.flags(),
        "versions": {
            "python": platform.python_version(),
            "numpy": np.__version__,
            **({} if side is None else side.versions()),
        },
    }


def local_facts(live: Live, side: Any) -> dict[str, object]:
    """Return facts about a single worker's machine: devices, threads, environment and meshes.

    Args:
        live: the structure of the State.
        side: the result of `torch_side`.
    """
    return {
        "byte_order": sys.byteorder,
        "machine": platform.machine(),
        "mesh": live.meshes,
        "env": {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
        **({} if side is None else side.local_facts(live.devices)),
        **live.jax_facts,
    }


def provenance(
    given: Mapping[str, object] | None, init_from: Mapping[str, object] | None
) -> dict[str, object]:
    """Return the origin of the run, as far as the program and the environment reveal it.

    Values from the caller override detected values.

    Args:
        given: the caller's values.
        init_from: the checkpoint that initialized the run, if any.
    """
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": dict(_packages()),
        **program_origin(),
        **({} if init_from is None else {INIT_FROM: init_from}),
        **plain_config(dict(given or {}), where="provenance"),
    }


@functools.cache
def _packages() -> tuple[tuple[str, str], ...]:
    found = ((part.metadata["Name"], part.version) for part in importlib.metadata.distributions())
    return tuple(sorted((str(name), str(version)) for name, version in found if name))
