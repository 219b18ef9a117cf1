"""Two processes under gloo that each load half of all columns: bytes read and bytes needed.

``python -m benchmarks.sharing DIRECTORY MEETING RANK WIDTH COUNT ROUNDS`` is such a process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import ckptfmt
from benchmarks.cold import list_files, make_cold
from benchmarks.layouts import Matrices
from benchmarks.loaders import describe_reads
from benchmarks.machine import read_by_calls_nbytes
from benchmarks.rounds import Progress
from ckptfmt.loading.load_report import LoadReport

_RANKS: Final = 2
_ROOT: Final = Path(__file__).parents[1]


def measure_sharing(
    directory: Path, matrices: Matrices, rounds: int, progress: Progress
) -> dict[str, Any]:
    """Return per round the bytes read and needed by both processes, and the longer time."""
    progress.say("reshard: two processes that share what they read")
    with tempfile.TemporaryDirectory() as meeting:
        shared = [str(directory.resolve()), f"{meeting}/store"]
        sizes = [str(matrices.shape[0]), str(len(matrices.whole)), str(rounds)]
        children = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.sharing", *shared, str(rank), *sizes],
                cwd=_ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(_RANKS)
        ]
        told = [child.communicate() for child in children]
    if any(child.returncode for child in children):
        raise RuntimeError("\n".join(text for _, text in told))
    by_rank = [json.loads(text) for text, _ in told]
    return {
        "rounds": [
            {
                "seconds": max(one["seconds"] for one in both),
                "needed_nbytes": sum(one["needed_nbytes"] for one in both),
                "read_nbytes": sum(one["read_nbytes"] for one in both),
                "ranks": list(both),
            }
            for both in zip(*by_rank, strict=True)
        ]
    }


def main(arguments: list[str]) -> None:
    """Run as a process of the pair, and print the counters of each load."""
    directory, meeting = arguments[:2]
    rank, width, count, rounds = map(int, arguments[2:])
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(meeting, _RANKS)  # type: ignore[attr-defined]  # public, though not said to be
    dist.init_process_group("gloo", store=store, rank=rank, world_size=_RANKS)
    mesh = init_device_mesh("cpu", (_RANKS,))
    tensors = {f"matrix.{number:03d}": _make_half(width, rank, mesh) for number in range(count)}
    print(json.dumps([_load(Path(directory), tensors, rank) for _ in range(rounds)]))
    dist.destroy_process_group()


def _make_half(width: int, rank: int, mesh: Any) -> DTensor:
    columns = len(torch.arange(width).chunk(_RANKS)[rank])
    local = torch.full((width, columns), -1.0)
    return DTensor.from_local(
        local,
        mesh,
        [Shard(1)],
        run_check=False,
        shape=torch.Size((width, width)),
        stride=(width, 1),
    )


def _load(directory: Path, tensors: dict[str, DTensor], rank: int) -> dict[str, Any]:
    if rank == 0:
        make_cold(list_files(directory))
    dist.barrier()
    before_nbytes = read_by_calls_nbytes()
    begin_s = time.perf_counter()
    report = ckptfmt.load(directory, ckptfmt.State(weights=tensors), share=True)
    seconds = time.perf_counter() - begin_s
    by_calls_nbytes = read_by_calls_nbytes() - before_nbytes
    locals_ = [tensor.to_local() for tensor in tensors.values()]
    assert not any(bool((local == -1).any()) for local in locals_), "a load left a tensor as it was"
    for local in locals_:
        local.fill_(-1)
    assert isinstance(report, LoadReport)  # a state was given
    # Compute the needed bytes here: the reader's count may exclude bytes read by the other process.
    needed_nbytes = sum(local.nbytes for local in locals_)
    return {
        "seconds": seconds,
        **describe_reads(report.reads),
        "by_calls_nbytes": by_calls_nbytes,
        "needed_nbytes": needed_nbytes,
    }


if __name__ == "__main__":
    main(sys.argv[1:])
