"""Ray Train (v2) trains with a run of ckptfmt inside the experiment's storage.

    def train_loop(config):
        ...
        with checkpointer(state, every=100, keep=3) as run:
            batches = iter(loader)
            run.restore_rng()
            for step in range(run.step, total):
                loss = train_step(next(batches))
                run.observe(loss=loss)
                report({"loss": loss}, run.end_step(step + 1))

Ray starts the workers again after a failure (`FailureConfig(max_failures=...)`). A new trainer with
the same name and storage path may continue with another number of workers. In both cases the next
launch of the run resumes from the newest checkpoint of the run, and restores the same state as a
`ckptfmt.Checkpointer`, whether or not that checkpoint was reported to Ray.

Choose the retained checkpoints by `keep=` of the checkpointer. `CheckpointConfig(num_to_keep=...)`
would delete directories of the run without the run's knowledge.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Mapping
from typing import Any

import ray.train
from ray.train.collective import broadcast_from_rank_zero

import ckptfmt

__all__ = ["checkpointer", "report"]


def checkpointer(
    state: ckptfmt.State, *, name: str = "ckptfmt", **options: Any
) -> ckptfmt.Checkpointer:
    """Return the checkpointer of this worker; every worker calls it.

    Args:
        state: this worker's state.
        name: name of the run's directory in the experiment's storage.
        options: options of `ckptfmt.Checkpointer`, such as ``every=`` and ``keep=``. The default
            of ``saving`` is ``ckptfmt.Saving(saver="thread")``; `ckptfmt.Job.writer` and
            `ckptfmt.Job.agree` are set here.

    Raises: ValueError where the storage isn't a file system of this machine, or mounted on it; the
        errors of `Checkpointer`.
    """
    context = ray.train.get_context()
    storage = context.get_storage()
    kind = storage.storage_filesystem.type_name
    if kind != "local":
        raise ValueError(
            f"the experiment's storage is {kind!r}: give RunConfig(storage_path=) a directory"
        )
    worker = context.get_world_rank(), context.get_world_size()
    # The workers agree on a launch through files in the storage. The token is new at each start.
    token = str(broadcast_from_rank_zero(secrets.token_hex(8)))
    # Ray stops all workers and their child processes when one worker fails. A separate saver
    # process that survives would hold a save that no process completes, and the next launch would
    # wait for this save.
    if _has_fields_of(ckptfmt.Saving, options):  # keywords of ckptfmt 0.9
        options = {"saver": "thread", **options}
    else:
        saving = options.get("saving") or ckptfmt.Saving()
        options["saving"] = dataclasses.replace(saving, saver="thread")
    if _has_fields_of(ckptfmt.Job, options):
        options |= {"writer": worker, "agree": token}
    else:
        job = options.get("job") or ckptfmt.Job()
        options["job"] = dataclasses.replace(job, writer=worker, agree=token)
    return ckptfmt.Checkpointer(f"{storage.experiment_fs_path}/{name}", state, **options)


def _has_fields_of(group: Any, options: Mapping[str, Any]) -> bool:
    return any(field.name in options for field in dataclasses.fields(group))


def report(metrics: Mapping[str, Any], handle: Any = None) -> None:
    """Report metrics to Ray, and the checkpoint once it is committed; every worker calls it.

    The training doesn't wait for the commit: a thread of Ray waits. The error of a failed save ends
    the training.

    Args:
        metrics: metrics, as in `ray.train.report`.
        handle: the result of `Checkpointer.end_step` or `save`; None where no save was made.
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
