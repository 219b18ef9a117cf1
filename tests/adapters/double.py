"""States captured, written into memory and opened again: what a test restores."""

from ckptfmt.read.reader import Checkpoint
from ckptfmt.store.memory import MemoryStore
from ckptfmt.trainer.capture import capture
from ckptfmt.trainer.restore import LoadReport, restore
from ckptfmt.write.snapshot import Snapshot
from tests import builders


def checkpoint_of(*snapshots: Snapshot, step: int = 7) -> Checkpoint:
    """Return a checkpoint with one writer for each snapshot; later changes of live tensors don't show."""
    store = MemoryStore()
    builders.save(store, *snapshots, step=step)
    return Checkpoint(store)


def save(state, *, worker_count=1):
    """Capture a state, the same on all workers, and write it."""
    return checkpoint_of(*(capture(state, worker=worker, worker_count=worker_count) for worker in range(worker_count)))


def load(state, checkpoint, **options) -> LoadReport:
    """Restore as the only worker."""
    return restore(state, checkpoint, worker=0, worker_count=1, **options)
