"""Memory of a load beyond the destination, each size in separate processes.

``python -m benchmarks.extra_memory write DIRECTORY NBYTES`` saves a checkpoint; ``cold`` or
``warm`` instead of ``write`` loads the checkpoint in that condition, and prints the figures.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import torch

import ckptfmt
from benchmarks.cold import list_files, make_cold, make_warm
from benchmarks.memory import PeakResident
from benchmarks.rounds import Progress, Workplace, remove
from benchmarks.state import PARAMETERS, plan_width

#: The measured sizes, as multiples of the benchmark's size: 0.4, 1.6 and 6 GB by default.
SIZES: Final = (0.25, 1.0, 3.75)
_ROOT: Final = Path(__file__).parents[1]
_TENSORS: Final = 3 * PARAMETERS
_SETTLE: Final = {"cold": make_cold, "warm": make_warm}


def measure_extra_memory(nbytes: int, place: Workplace, progress: Progress) -> list[dict[str, Any]]:
    """Return per size the peak of anonymous and shared memory in a load, minus the memory before.

    The destination exists and is touched before the load, so both numbers include the destination.
    """
    found = []
    for multiple in SIZES:
        wanted_nbytes = round(nbytes * multiple)
        progress.say(f"load: extra memory at {wanted_nbytes / 1e9:.2g} GB")
        directory = place.fresh("memory")
        _run_child("write", directory, wanted_nbytes)
        told = {cache: _run_child(cache, directory, wanted_nbytes) for cache in _SETTLE}
        remove(directory)
        extra_nbytes = max(one["extra_nbytes"] for one in told.values())
        found.append(
            {
                "nbytes": told["cold"]["nbytes"],
                **{f"{cache}_nbytes": one["extra_nbytes"] for cache, one in told.items()},
                "extra_nbytes": extra_nbytes,
                "extra_mib": extra_nbytes / 2**20,
            }
        )
    return found


def _run_child(action: str, directory: Path, nbytes: int) -> Any:
    command = [
        sys.executable,
        "-m",
        "benchmarks.extra_memory",
        action,
        str(directory.resolve()),
        str(nbytes),
    ]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{action} of {nbytes} bytes failed:\n{done.stderr}")
    return json.loads(done.stdout)


def main(arguments: list[str]) -> None:
    """Do an action in this process, and print the result."""
    action, directory, nbytes = arguments
    tensors = _make_tensors(int(nbytes))
    found = (
        _write(Path(directory), tensors)
        if action == "write"
        else _load(Path(directory), tensors, action)
    )
    print(json.dumps({"nbytes": sum(tensor.nbytes for tensor in tensors.values()), **found}))


def _make_tensors(nbytes: int) -> dict[str, torch.Tensor]:
    width = plan_width(nbytes)
    return {f"tensor.{number}": torch.full((width, width), -1.0) for number in range(_TENSORS)}


def _write(directory: Path, tensors: dict[str, torch.Tensor]) -> dict[str, int]:
    for number, tensor in enumerate(tensors.values()):
        tensor.fill_(number)
    ckptfmt.save(directory, ckptfmt.State(weights=tensors), step=1)
    return {}


def _load(directory: Path, tensors: dict[str, torch.Tensor], cache: str) -> dict[str, int]:
    state = ckptfmt.State(weights=tensors)
    _SETTLE[cache](list_files(directory))
    with PeakResident() as memory:
        ckptfmt.load(directory, state)
    for number, tensor in enumerate(tensors.values()):
        assert bool((tensor == number).all()), f"tensor {number} isn't as it was saved"
    return {"extra_nbytes": memory.extra_nbytes}


if __name__ == "__main__":
    main(sys.argv[1:])
