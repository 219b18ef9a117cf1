"""Ray Train (v2) trains with a run of ckptfmt that lies inside of the experiment's storage.

    def train_loop(config):
        ...
        with checkpointer(state, every=100, keep=3) as run:
            batches = iter(loader)
            run.restore_rng()
            for step in range(run.step, total):
                loss = train_step(next(batches))
                run.observe(loss=loss)
                report({"loss": loss}, run.end_step(step + 1))

Ray starts the workers again after a failure (`FailureConfig(max_failures=...)`), and a trainer of the same name and
storage path goes on with another number of them: either way the next launch of the run resumes from its newest
checkpoint, with all that a `ckptfmt.Checkpointer` restores, whether or not Ray was told of that checkpoint.

Let `keep=` of the checkpointer say what stays. `CheckpointConfig(num_to_keep=...)` would delete directories under the
run, behind its back.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

import ray.train
from ray.train.collective import broadcast_from_rank_zero

import ckptfmt

__all__ = ["checkpointer", "report"]


def checkpointer(state: ckptfmt.State, *, name: str = "ckptfmt", **options: Any) -> ckptfmt.Checkpointer:  # noqa: ANN401
    """Return the checkpointer of this worker; every worker calls it.

    Args:
        state: of this worker.
        name: of the run's directory in the experiment's storage.
        options: of `ckptfmt.Checkpointer`, such as ``every=`` and ``keep=``.

    Raises: ValueError where the storage isn't a file system of this machine, or mounted on it; as `Checkpointer`.
    """
    context = ray.train.get_context()
    storage = context.get_storage()
    kind = storage.storage_filesystem.type_name
    if kind != "local":
        raise ValueError(f"the experiment's storage is {kind!r}: give RunConfig(storage_path=) a directory")
    worker = context.get_world_rank(), context.get_world_size()
    # Whatever the workers train with, they meet in the storage: the token is new at each start.
    token = str(broadcast_from_rank_zero(secrets.token_hex(8)))
    # Ray stops all workers when one fails, and their children with them. A saver in a process of its own that stays
    # would hold a save which nobody completes, and the next launch would wait for it.
    options = {"saver": "thread", **options}
    return ckptfmt.Checkpointer(f"{storage.experiment_fs_path}/{name}", state, writer=worker, agree=token, **options)


def report(metrics: Mapping[str, Any], handle: Any = None) -> None:  # noqa: ANN401 - a SaveHandle, or None
    """Report metrics to Ray, and the checkpoint of a save once it is committed; every worker calls it.

    Training doesn't wait for the commit: a thread of Ray does, and what the save fails with ends the training.

    Args:
        metrics: as for `ray.train.report`.
        handle: what `Checkpointer.end_step` or `save` returned; None where nothing was saved.
    """
    if handle is None or handle.state == "SKIPPED":
        checkpoint = None
    else:
        checkpoint = ray.train.Checkpoint.from_directory(handle.path)

    def wait(checkpoint: ray.train.Checkpoint, _directory: str) -> ray.train.Checkpoint:
        handle.wait()
        return checkpoint

    ray.train.report(
        dict(metrics),
        checkpoint=checkpoint,
        checkpoint_upload_mode=ray.train.CheckpointUploadMode.ASYNC,
        checkpoint_upload_fn=wait,
        delete_local_checkpoint_after_upload=False,
    )
