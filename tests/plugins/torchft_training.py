"""One replica of a training under torchft, started and killed by test_torchft.py. RANK says which one.

Usage: torchft_training.py RUN JOURNAL LIGHTHOUSE [--lose-rng] [--seed-steps] [--declare]
"""

import os
import random
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchft

import ckptfmt
from tests.plugins.trainings import Journal, rng_digest

TOTAL = 42
WAIT = timedelta(seconds=240)

replica, replica_count = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
run, journal_path = (f"{path}-{replica}" for path in sys.argv[1:3])
torch.manual_seed(7)
net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.3), torch.nn.Linear(16, 8))
random.seed(7 + replica)
np.random.seed(7 + replica)  # noqa: NPY002 - the framework's signature
torch.manual_seed(7 + replica)
distributed: Any = torch.distributed
store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
inner = torch.optim.AdamW(net.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(inner, TOTAL)
shared: dict[str, Any] = {"model": net, "optimizer": inner, "scheduler": scheduler}


def heal(state: dict[str, Any]) -> None:
    """Take what another replica has."""
    for name, value in state.items():
        shared[name].load_state_dict(value)


manager: Any = torchft.Manager(
    pg=torchft.ProcessGroupGloo(timeout=WAIT),
    min_replica_size=replica_count,
    use_async_quorum=False,
    load_state_dict=heal,
    state_dict=lambda: {name: one.state_dict() for name, one in shared.items()},
    replica_id=f"replica_{replica}",
    store_addr="127.0.0.1",
    store_port=store.port,
    rank=0,
    world_size=1,
    lighthouse_addr=sys.argv[3],
    timeout=WAIT,
    quorum_timeout=WAIT,
)
if "--declare" in sys.argv:
    manager.ckptfmt_exact = True
model: Any = torchft.DistributedDataParallel(manager, net)
optimizer: Any = torchft.Optimizer(manager, inner)
samples = torch.randn(60, 8, generator=torch.Generator().manual_seed(1))
sampler = ckptfmt.Sampler(60, global_batch=4, seed=3, worker=(replica, replica_count))
state = ckptfmt.State(
    weights=model,
    optimizer=optimizer,
    data=sampler,
    extra={"scheduler": scheduler, "manager": manager},
    config={"width": 16},
    rng=False if "--lose-rng" in sys.argv else None,
)
journal = Journal(journal_path)
with ckptfmt.Checkpointer(run, state, every=5, overlap=False) as checkpointer:
    batches = iter(sampler)
    checkpointer.restore_rng()
    fetched, ids = checkpointer.step, list[int]()
    while manager.current_step() < TOTAL:
        optimizer.zero_grad()  # waits for the other replicas, and takes their state if this one is behind
        while fetched <= manager.current_step():  # not where the last step is done again
            fetched, ids = fetched + 1, list(next(batches))
        if "--seed-steps" in sys.argv:  # the same random numbers whichever process does the step
            random.seed(fetched * replica_count + replica)
            np.random.seed(fetched * replica_count + replica)  # noqa: NPY002
            torch.manual_seed(fetched * replica_count + replica)
        batch = samples[ids]
        loss = (model(batch) - batch).square().mean()
        loss.backward()
        optimizer.step()
        if manager.current_step() < fetched:
            continue  # a replica was lost: no replica has done this step
        scheduler.step()
        checkpointer.end_step(fetched)
        journal.note(
            fetched,
            ids=ids,
            loss=loss,
            weights=net.state_dict(),
            optimizer=inner.state_dict(),
            learning_rate=[scheduler.get_last_lr()],
            committed=manager.batches_committed(),
            rng=rng_digest(),
        )
    checkpointer.save()
    report = checkpointer.load_report
Path(f"{journal_path}.claim").write_text(
    "" if report is None else f"{report.claim} {report.lowered_by}"
)
manager.shutdown()
