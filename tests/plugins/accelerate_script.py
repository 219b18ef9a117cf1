"""A training with accelerate, of which tests/plugins/test_accelerate.py compares every bit: run by that."""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed

import ckptfmt.plugins.accelerate
from ckptfmt.plugins.accelerate import CkptfmtAccelerator
from tests.plugins.trainings import Journal, rng_digest

STEPS = 46
SAVE_EVERY = 7  # of 14 steps in an epoch: in its middle, and at its end


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Rows that know their number."""

    def __len__(self):
        return 28

    def __getitem__(self, index):
        return torch.full((6,), float(index)), index


class Count:
    """A registered object."""

    def __init__(self):
        self.seen = 0

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state_dict):
        self.seen = state_dict["seen"]


def parse_arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("journal")
    parser.add_argument(
        "--loader", default="plain", choices=("plain", "seedable", "stateful", "generator")
    )
    parser.add_argument("--native", action="store_true", help="without the plug-in")
    parser.add_argument(
        "--forget", action="store_true", help="put no RNG streams back that an iterator began with"
    )
    parser.add_argument("--evaluate", action="store_true")
    parser.add_argument(
        "--hidden", action="store_true", help="weigh the loss by a count that nothing saves"
    )
    return parser.parse_args()


def make_accelerator(options):
    configuration = DataLoaderConfiguration(
        use_seedable_sampler=options.loader == "seedable",
        use_stateful_dataloader=options.loader == "stateful",
    )
    arguments = {
        "cpu": True,
        "dataloader_config": configuration,
        "step_scheduler_with_optimizer": False,
    }
    if options.native:
        accelerator = Accelerator(**arguments)
    else:
        accelerator = CkptfmtAccelerator(
            run=options.out, saving={"keep": 3}, config={"width": 16}, **arguments
        )
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=9)
    return accelerator


def resume(accelerator, options):
    """Return how many steps are done."""
    if not options.native:
        report = accelerator.load_state()
        return 0 if report is None else report.step
    saved = [int(place.name) for place in options.out.glob("*")]
    if saved:
        accelerator.load_state(options.out / str(max(saved)))
    return max(saved, default=0)


def save(accelerator, options, step, loss):
    if options.native:
        accelerator.save_state(options.out / str(step))
    else:
        accelerator.save_state(metrics={"loss": loss.item()})


def batches(accelerator, options, loader, done):
    """Yield the batches of all epochs still to come, as loops of accelerate's users do."""
    first, skip = divmod(done, len(loader)) if options.native else accelerator.position(loader)
    for epoch in range(first, STEPS // len(loader) + 1):
        if options.native:
            yield from (
                accelerator.skip_first_batches(loader, skip) if skip and epoch == first else loader
            )
        else:
            yield from accelerator.skip_first_batches(loader)


def evaluate(held_out, *, in_full):
    for _ in held_out:
        if not in_full:
            break


def main():
    options = parse_arguments()
    if options.forget:
        vars(ckptfmt.plugins.accelerate)["put_streams"] = lambda streams: None  # noqa: ARG005 - the framework's signature
    set_seed(7)
    torch.set_num_threads(1)
    accelerator = make_accelerator(options)
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 16), torch.nn.Dropout(0.4), torch.nn.Linear(16, 1)
    )
    critic = torch.nn.Linear(6, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    other = torch.optim.SGD(critic.parameters(), lr=0.01, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    generator = torch.Generator().manual_seed(3) if options.loader == "generator" else None
    loader = torch.utils.data.DataLoader(Rows(), batch_size=2, shuffle=True, generator=generator)
    held_out = torch.utils.data.DataLoader(Rows(), batch_size=7, shuffle=True)
    model, critic, optimizer, other, scheduler, loader, held_out = accelerator.prepare(
        model, critic, optimizer, other, scheduler, loader, held_out
    )
    count = Count()
    accelerator.register_for_checkpointing(count)
    journal = Journal(f"{options.journal}-{accelerator.process_index}")
    done = resume(accelerator, options)
    for hidden, (inputs, numbers) in enumerate(batches(accelerator, options, loader, done)):
        noise = torch.randn_like(inputs)
        loss = model(inputs / 28 + noise).square().mean() + critic(inputs).square().mean() / 100
        accelerator.backward(loss * (1 + hidden / 100) if options.hidden else loss)
        accelerator.clip_grad_norm_(model.parameters(), 100.0)
        for each in (optimizer, other):
            each.step()
            each.zero_grad()
        scheduler.step()
        count.seen += len(numbers)
        done += 1
        if options.evaluate and done % 9 == 0:
            evaluate(held_out, in_full=done % 2 == 0)
        if done % SAVE_EVERY == 0:
            save(accelerator, options, done, loss)
        journal.note(
            done,
            loss=loss.detach(),
            numbers=numbers,
            weights=[model.state_dict(), critic.state_dict()],
            optimizers=[optimizer.state_dict(), other.state_dict()],
            lr=scheduler.get_last_lr(),
            scaler=accelerator.scaler.state_dict(),
            count=count.seen,
            rng=rng_digest(),
        )
        if done == STEPS:
            break
    accelerator.end_training()


main()
