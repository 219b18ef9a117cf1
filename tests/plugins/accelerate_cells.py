"""A short training with accelerate, ended at any step: run by test_accelerate_resumes.py."""

import argparse
import random

import numpy as np
import torch
from accelerate.utils import DataLoaderConfiguration, set_seed

import ckptfmt.plugins.accelerate
from ckptfmt.plugins.accelerate import CkptfmtAccelerator
from tests.plugins.trainings import Journal, rng_digest

#: Updates in an epoch of each process.
EPOCH = 5
LAST_STEP = 3 * EPOCH
BATCH = 2


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Rows that contain their number, and random numbers of this process if `is_noisy`."""

    def __init__(self, count, *, is_noisy=False):
        self.count = count
        self.is_noisy = is_noisy

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        noise = random.random() + np.random.rand() + torch.rand(()).item() if self.is_noisy else 0  # noqa: NPY002
        return torch.full((3,), float(index + noise)), index


class Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    """The same rows one after the other, divided between worker processes."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        first, stride = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for index in range(first, self.count, stride):
            yield torch.full((3,), float(index)), index


def parse_arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("run")
    parser.add_argument("journal")
    parser.add_argument("--save-at", type=int, default=0)
    parser.add_argument("--stop", action="store_true", help="end after the save")
    parser.add_argument("--loader", default="plain")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--persistent", action="store_true")
    parser.add_argument("--forget", action="store_true", help="restore no RNG streams of iterators")
    return parser.parse_args()


def make_loader(options, accelerator):
    """Return a loader with `EPOCH` batches for each process."""
    processes = accelerator.num_processes
    is_split = options.loader == "split"
    count = EPOCH * BATCH * processes
    data = (
        Stream(count)
        if options.loader.endswith("iterable")
        else Rows(count, is_noisy=options.loader == "noisy")
    )
    return torch.utils.data.DataLoader(
        data,
        batch_size=BATCH * processes if is_split else BATCH,
        shuffle=False if isinstance(data, Stream) else True,  # noqa: SIM211 - None isn't allowed
        num_workers=options.workers,
        persistent_workers=options.persistent,
    )


def evaluate(held_out, *, in_full):
    """Return the numbers of an evaluation's rows."""
    seen = []
    for _, numbers in held_out:
        seen.append(numbers.tolist())
        if not in_full:
            break
    return seen


def main():
    options = parse_arguments()
    if options.forget:
        vars(ckptfmt.plugins.accelerate)["put_streams"] = lambda streams: None  # noqa: ARG005 - the plug-in's signature
    torch.set_num_threads(1)
    set_seed(7)
    accelerator = CkptfmtAccelerator(
        run=options.run,
        saving={"saving": ckptfmt.Saving(saver="thread")},
        config={"width": 3},
        cpu=True,
        dataloader_config=DataLoaderConfiguration(
            use_seedable_sampler=options.loader.startswith("seedable"),
            use_stateful_dataloader="stateful" in options.loader,
            split_batches=options.loader == "split",
            dispatch_batches=options.loader == "dispatched",
        ),
    )
    model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(0.4), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = make_loader(options, accelerator)
    held_out = torch.utils.data.DataLoader(
        Rows(6 * accelerator.num_processes), batch_size=2, shuffle=True, num_workers=options.workers
    )
    model, optimizer, loader, held_out = accelerator.prepare(model, optimizer, loader, held_out)
    journal = Journal(f"{options.journal}-{accelerator.process_index}")
    report = accelerator.load_state()
    claim = "" if report is None else f"{report.claim} {report.lowered_by}"
    done = accelerator.updates
    is_dispatched = options.loader == "dispatched"
    first, batch = (0, 0) if is_dispatched else accelerator.position(loader)
    # Two workers of a stream have an odd number of batches each, and an epoch one batch more.
    is_longer = options.loader.endswith("iterable") and options.workers > 0
    assert is_dispatched or divmod(done, EPOCH + is_longer) == (first, batch)
    for _ in range(first, 3):
        for inputs, numbers in loader if is_dispatched else accelerator.skip_first_batches(loader):
            loss = model(inputs / 30 + torch.randn_like(inputs)).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            done += 1
            evaluated = []
            if done % 2 == 0:
                evaluated = evaluate(held_out, in_full=done % 4 == 0)
            if done == options.save_at:
                accelerator.save_state().wait()
            journal.note(
                done,
                loss=loss.detach(),
                inputs=inputs,
                numbers=str(numbers.tolist()),
                evaluated=str(evaluated),
                weights=model.state_dict(),
                optimizer=optimizer.state_dict(),
                rng=rng_digest(),
            )
            if options.stop and done == options.save_at:
                accelerator.end_training()
                return
    accelerator.end_training()
    if accelerator.is_main_process:
        print(f"claim {claim}")  # noqa: T201 - read by the test


main()
