"""The processors of this process, for the numbers of threads."""

from __future__ import annotations

import os


def processor_count() -> int:
    """Return the number of processors for a trainer.

    The trainers of a node share the processors of their launcher, unless the launcher has given
    each trainer fewer processors. Not for helper processes, whose parent is no launcher.
    """
    own_count = len(os.sched_getaffinity(0))
    try:
        trainer_count = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        launcher_count = len(os.sched_getaffinity(os.getppid()))
    except (ValueError, OSError):
        return own_count
    if trainer_count <= 1:
        return own_count
    return max(1, min(own_count, launcher_count // trainer_count))
