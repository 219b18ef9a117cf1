"""A checkpointing mechanism of the DLIO benchmark that saves with ckptfmt (MLPerf's OPEN form).

DLIO 2.0.0 takes the class by name, beside its other options::

    mpirun -n 2 dlio_benchmark workload=megatron_deepspeed \
        ++workload.checkpoint.checkpoint_mechanism_classname=benchmarks.dlio.CkptfmtCheckpointing

Needs ``pip install dlio_benchmark``, which nothing else needs. Each checkpoint has the tensors that
DLIO's own mechanism saves, as one checkpoint of all ranks. A save is over when it is committed and
durable; with ``CKPTFMT_DLIO_ASYNC=1``, when the training may go on.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar

import torch
from dlio_benchmark.checkpointing.base_checkpointing import (  # type: ignore[import-untyped, import-not-found, unused-ignore]
    BaseCheckpointing,
)
from mpi4py import MPI  # type: ignore[import-untyped, import-not-found, unused-ignore]

import ckptfmt


class CkptfmtCheckpointing(BaseCheckpointing):  # type: ignore[misc, unused-ignore]
    """The mechanism. DLIO makes one for each process."""

    _instance: ClassVar[CkptfmtCheckpointing | None] = None

    @staticmethod
    def get_instance() -> CkptfmtCheckpointing:
        """Return the mechanism of this process."""
        if CkptfmtCheckpointing._instance is None:
            CkptfmtCheckpointing._instance = CkptfmtCheckpointing()
        return CkptfmtCheckpointing._instance

    def __init__(self) -> None:
        super().__init__("ckptfmt")
        ranks = MPI.COMM_WORLD
        self._count = 0
        self._checkpointer = ckptfmt.Checkpointer(
            Path(self.args.checkpoint_folder) / "run",
            ckptfmt.State(weights=self._list_tensors(ranks.Get_rank()), rng=False),
            keep=2,
            job=ckptfmt.Job(writer=(ranks.Get_rank(), ranks.Get_size()), agree=ranks.allgather),
        )

    def _list_tensors(self, rank: int) -> dict[str, torch.Tensor]:
        """Return the tensors that DLIO's own mechanism saves on this rank, each layer's anew."""
        found: dict[str, torch.Tensor] = {}

        def add(name: str, held: Any) -> None:
            if isinstance(held, dict):
                for key, value in held.items():
                    add(f"{name}/{key}", value)
            elif held is not None:
                found[name] = held.clone()

        add(f"{rank}/model", self.model_state)
        add(f"{rank}/optimizer", self.optimization_state)
        if rank % self.args.pipeline_parallelism == 0:
            more = self.args.tensor_parallelism if self.args.tensor_parallelism > 1 else 0
            for layer in range(self.args.num_layers + more):
                add(f"{rank}/layer-{layer}", self.layer_state)
        return found

    def get_tensor(self, size: int) -> torch.Tensor:
        """Return a tensor of so many bytes."""
        return torch.randint(high=1, size=(size,), dtype=torch.int8)

    def save_state(self, suffix: str, state: object) -> None:
        """Save one file, which this mechanism never does."""
        raise NotImplementedError(suffix)

    def checkpoint(self, epoch: int, step_number: int) -> None:
        """Save all tensors of all ranks."""
        del epoch, step_number  # the steps of an epoch begin anew
        self._count += 1
        handle = self._checkpointer.save(step=self._count)
        if handle is not None and not os.environ.get("CKPTFMT_DLIO_ASYNC"):
            handle.wait()

    def finalize(self) -> None:
        """Wait for the last save."""
        self._checkpointer.close()
