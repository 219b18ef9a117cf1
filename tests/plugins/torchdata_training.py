"""A training with dropout whose data come from a loader in mid-epoch; started and killed by test_torchdata.py.

Usage: torchdata_training.py RUN JOURNAL LOADER WORKERS AUGMENT [--lose-data]

LOADER is ``stateful`` or ``sampler``; AUGMENT says which noise the data set adds: numbers ``drawn``
from the process's stream, or numbers ``derived`` from that of the sample.
"""

import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

import ckptfmt
from tests.plugins.trainings import Journal, rng_digest

run, journal_path, kind, worker_count, augment = sys.argv[1:6]
TOTAL = 42  # steps of four samples: an epoch has 15


class Samples(torch.utils.data.Dataset[tuple[int, torch.Tensor]]):
    """Sixty samples, and noise."""

    def __init__(self) -> None:
        self.samples = torch.randn(60, 8, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.samples)

    def __getitem__(self, number: int) -> tuple[int, torch.Tensor]:
        """Return a sample, with the noise that was asked for."""
        generator = torch.Generator().manual_seed(int(number)) if augment == "derived" else None
        return number, self.samples[number] + torch.randn(8, generator=generator)


torch.manual_seed(7)
random.seed(7)
np.random.seed(7)  # noqa: NPY002 - the framework's signature
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.3), torch.nn.Linear(16, 8))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, TOTAL)
workers: dict[str, Any] = {
    "num_workers": int(worker_count),
    "persistent_workers": worker_count != "0",
}
loader: Any
if kind == "sampler":
    sampler = ckptfmt.Sampler(60, global_batch=4, seed=3)
    loader, data = torch.utils.data.DataLoader(Samples(), batch_sampler=sampler, **workers), sampler
else:
    loader = data = StatefulDataLoader(Samples(), batch_size=4, shuffle=True, **workers)


def iter_batches():
    """Yield batches, one epoch after the other."""
    while True:
        yield from loader


state = ckptfmt.State(
    weights=model,
    optimizer=optimizer,
    data=None if "--lose-data" in sys.argv else data,
    extra={"scheduler": scheduler},
    config={"width": 16},
)
journal = Journal(journal_path)
with ckptfmt.Checkpointer(run, state, every=4, saver="thread") as checkpointer:
    batches = (
        iter(loader) if kind == "sampler" else iter_batches()
    )  # before the streams are put back
    for step in checkpointer.steps(TOTAL):
        ids, batch = next(batches)
        loss = (model(batch) - batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        journal.note(
            step + 1,
            ids=ids,
            batch=batch,
            loss=loss,
            weights=model.state_dict(),
            optimizer=optimizer.state_dict(),
            learning_rate=[scheduler.get_last_lr()],
            rng=rng_digest(),
        )
    report = checkpointer.load_report
Path(f"{journal_path}.claim").write_text(
    "" if report is None else f"{report.claim} {report.lowered_by}"
)
