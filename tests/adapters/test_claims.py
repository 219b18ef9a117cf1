"""What no checkpoint can bring back, and what therefore lowers the claim."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.forks import run_program

PROGRAM = """
import sys, warnings
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.testing._internal.distributed.fake_pg import FakeStore
import ckptfmt
from ckptfmt.adapters.capture import capture
from tests.adapters.double import restore
from ckptfmt.commit.decision import commit
from ckptfmt.read.reader import Checkpoint
from ckptfmt.write.writer import write_part
from ckptfmt.documents.manifest import Origin
from ckptfmt.store.memory import MemoryStore

workers, unused = int(sys.argv[1]), sys.argv[2] == "keep"
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=workers)
state = ckptfmt.State(weights=DDP(torch.nn.Linear(2, 2), find_unused_parameters=unused), data={"p": 1}, config={"a": 1},
                      optimizer={"none": 0})
store = MemoryStore()
for writer in range(workers):
    origin = Origin(run_id=None, launch=None, nonce="0" * 32, step=1, attempt="0" * 16, writer_count=workers)
    write_part(store, capture(state, worker=writer, worker_count=workers), origin, writer=writer)
commit(store, origin, deadline_s=1)
report = restore(state, Checkpoint(store), worker=0, worker_count=workers)
print(report.claim, *report.lowered_by)
"""


@pytest.mark.parametrize(
    ("workers", "buckets", "claim"), [(2, "rebuild", "T1"), (3, "rebuild", "S0"), (3, "keep", "T1")]
)
def test_ddp_that_rebuilds_its_buckets_is_not_the_same_run_from_three_processes_on(
    workers: int, buckets: str, claim: str
) -> None:
    words = ["-c", PROGRAM, str(workers), buckets]
    code, printed = run_program(words, place=Path.cwd(), variables=os.environ)
    assert code == 0, printed
    assert printed.split()[0] == claim
    assert ("DistributedDataParallel" in printed) is (claim != "T1")
