"""Trainings under Ray Train with dropout and shuffling, whose worker 1 may kill itself; started by test_ray.py.

Usage: ray_training.py DIRECTORY TRAINING ...

A training is NAME,WORKERS,LAST_STEP,KILL_AT. In one whose name is ``forgetful``, worker 0 doesn't
put its RNG streams back after the kill, and worker 1 trains with the first samples again.
"""

import os
import random
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch


def train_loop(config: dict[str, Any]) -> None:
    """Train one worker's share."""
    import numpy as np  # noqa: PLC0415 - the framework's signature
    import torch  # noqa: PLC0415 - the framework's signature

    import ckptfmt  # noqa: PLC0415 - the framework's signature
    from ckptfmt.plugins.ray import checkpointer, report  # noqa: PLC0415 - the framework's signature
    from tests.plugins.trainings import Journal, rng_digest  # noqa: PLC0415 - the framework's signature

    rank = ray.train.get_context().get_world_rank()
    torch.manual_seed(7 + rank)
    random.seed(7 + rank)
    np.random.seed(7 + rank)  # noqa: NPY002 - the framework's signature
    samples = torch.randn(60, 8, generator=torch.Generator().manual_seed(1))
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.3), torch.nn.Linear(16, 8))
    model: Any = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
    sampler = ckptfmt.Sampler(60, global_batch=4, seed=3)
    numbers: Any = range(60)
    loader: Any = torch.utils.data.DataLoader(numbers, batch_sampler=sampler)
    state = ckptfmt.State(
        weights=model,
        optimizer=optimizer,
        data=sampler,
        extra={"scheduler": scheduler},
        config={"width": 16},
    )
    journal = Journal(f"{config['journal']}-{rank}")
    with checkpointer(state, every=5, keep=4) as run:
        forgets = config["forgets"] and run.step > 0
        batches = iter(loader)
        fresh = ckptfmt.Sampler(60, global_batch=4, seed=3)
        others = (
            iter(torch.utils.data.DataLoader(numbers, batch_sampler=fresh))
            if forgets and rank == 1
            else None
        )
        streams = torch.get_rng_state()
        run.restore_rng()
        if forgets and rank == 0:
            torch.set_rng_state(streams)
        newest: Any = None
        for step in range(run.step, config["last_step"]):
            ids = next(batches)
            if others is not None:
                ids = next(others)
            batch = samples[ids]
            loss = (model(batch) - batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            run.observe(loss=loss, batch=batch)
            optimizer.step()
            scheduler.step()
            done = step + 1
            handle = run.save(done) if done == config["last_step"] else run.end_step(done)
            newest = handle or newest
            report({"loss": loss.item()}, handle)
            journal.note(
                done,
                numbers=",".join(map(str, ids.tolist())),
                ids=ids,
                loss=loss,
                weights=net.state_dict(),
                optimizer=optimizer.state_dict(),
                learning_rate=[scheduler.get_last_lr()],
                rng=rng_digest(),
            )
            if (
                (rank, done) == (1, config["kill_at"])
                and run.launch is not None
                and run.launch.launch == 1
            ):
                newest.wait()  # which checkpoint is resumed is no matter of chance
                os.kill(os.getpid(), signal.SIGKILL)
    found = run.load_report
    Path(f"{config['journal']}-{rank}.claim").write_text(
        "" if found is None else f"{found.claim} {found.lowered_by}"
    )


if __name__ == "__main__":
    place = Path(sys.argv[1])
    root = str(Path(__file__).parents[2])
    with tempfile.TemporaryDirectory(prefix="ray") as directory:
        ray.init(
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=80 << 20,
            _temp_dir=directory,
            runtime_env={"env_vars": {"PYTHONPATH": root, "OMP_NUM_THREADS": "1"}},
        )
        for name, workers, last_step, kill_at in (training.split(",") for training in sys.argv[2:]):
            loop = {
                "journal": str(place / name),
                "last_step": int(last_step),
                "kill_at": int(kill_at),
            }
            trainer = ray.train.torch.TorchTrainer(
                train_loop,
                train_loop_config=loop | {"forgets": name == "forgetful"},
                torch_config=ray.train.torch.TorchConfig(backend="gloo"),
                scaling_config=ray.train.ScalingConfig(
                    num_workers=int(workers), resources_per_worker={"CPU": 1}
                ),
                run_config=ray.train.RunConfig(
                    storage_path=str(place / "storage"),
                    name=name,
                    failure_config=ray.train.FailureConfig(max_failures=2),
                ),
            )
            sys.stdout.write(f"REPORTED {trainer.fit().checkpoint.path}\n")
        sys.stdout.write("TRAINED\n")
        ray.shutdown()
