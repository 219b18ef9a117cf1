"""A training under torchft, one replica with its own lighthouse; started and killed by test_torchft.py.

Usage: torchft_training.py RUN JOURNAL [--lose-rng]
"""

import random
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchft
from torchft.coordination import LighthouseServer

import ckptfmt
from tests.plugins.trainings import Journal, rng_digest

TOTAL = 42

random.seed(7)
np.random.seed(7)  # noqa: NPY002 - the process's own stream
torch.manual_seed(7)
lighthouse: Any = LighthouseServer(bind="[::]:0", min_replicas=1, join_timeout_ms=100)
distributed: Any = torch.distributed
store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
manager: Any = torchft.Manager(
    pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=60)),
    min_replica_size=1,
    load_state_dict=lambda _: None,
    state_dict=dict,
    replica_id="replica",
    store_addr="127.0.0.1",
    store_port=store.port,
    rank=0,
    world_size=1,
    lighthouse_addr=lighthouse.address(),
    timeout=timedelta(seconds=60),
)
net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.3), torch.nn.Linear(16, 8))
model: Any = torchft.DistributedDataParallel(manager, net)
inner = torch.optim.AdamW(net.parameters(), lr=0.01)
optimizer: Any = torchft.Optimizer(manager, inner)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(inner, TOTAL)
samples = torch.randn(60, 8, generator=torch.Generator().manual_seed(1))
sampler = ckptfmt.Sampler(60, global_batch=4, seed=3)
state = ckptfmt.State(
    weights=model,
    optimizer=optimizer,
    data=sampler,
    extra={"scheduler": scheduler, "manager": manager},
    config={"width": 16},
    rng=False if "--lose-rng" in sys.argv else None,
)
journal = Journal(sys.argv[2])
with ckptfmt.Checkpointer(sys.argv[1], state, every=5, saver="thread") as checkpointer:
    batches = iter(sampler)
    for step in checkpointer.steps(TOTAL):
        ids = next(batches)
        batch = samples[list(ids)]
        optimizer.zero_grad()
        loss = (model(batch) - batch).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        journal.note(
            step + 1,
            ids=list(ids),
            loss=loss,
            weights=net.state_dict(),
            optimizer=inner.state_dict(),
            learning_rate=[scheduler.get_last_lr()],
            committed=manager.current_step(),
            rng=rng_digest(),
        )
    report = checkpointer.load_report
Path(f"{sys.argv[2]}.claim").write_text("" if report is None else f"{report.claim} {report.lowered_by}")
manager.shutdown()
lighthouse.shutdown()
