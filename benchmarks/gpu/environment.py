"""Print a description of the machine as a JSON object; fail if a needed module is missing."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
from typing import Any

#: The modules imported by the steps.
_MODULES = (
    *(
        "numpy",
        "torch",
        "blake3",
        "hypothesis",
        "jsonschema",
        "ml_dtypes",
        "msgpack",
        "pytest",
        "pytest_timeout",
    ),
    *("safetensors", "xxhash", "zstandard", "ckptfmt", "ckptfmt_conformance"),
)


def main() -> int:
    """Print the object, and return 0 if all modules are present."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    device = parser.parse_args().device
    missing = {name: problem for name in _MODULES if (problem := _find_problem(name))}
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "processors": len(os.sched_getaffinity(0)),
        "memory_nbytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "packages": {name: _version_of(name) for name in (*_MODULES, "triton")},
        "missing": missing,
        "devices": [],
    }
    if "torch" not in missing:
        found |= _describe_devices()
    print(json.dumps(found, indent=1))
    return int(bool(missing) or (device == "cuda" and not found["devices"]))


def _find_problem(name: str) -> str:
    try:
        importlib.import_module(name)
    except ImportError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _version_of(name: str) -> str | None:
    for known in (name, name.replace("_", "-")):
        try:
            return importlib.metadata.version(known)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _describe_devices() -> dict[str, Any]:
    import torch  # noqa: PLC0415

    properties = [
        torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())
    ]
    return {
        "torch_cuda": torch.version.cuda,
        "driver": _ask_driver(),
        "devices": [
            {
                "name": one.name,
                "memory_nbytes": one.total_memory,
                "capability": [one.major, one.minor],
            }
            for one in properties
        ],
    }


def _ask_driver() -> str | None:
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, check=False, timeout=30)
    return done.stdout.strip() or None


if __name__ == "__main__":
    raise SystemExit(main())
