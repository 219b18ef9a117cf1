"""States captured, written into memory and opened again: what a test restores."""

from ckptfmt.adapters.capture import capture
from ckptfmt.adapters.load_plan import LoadPlan
from ckptfmt.loading.load_report import LoadReport
from ckptfmt.loading.restore import plan_restore
from ckptfmt.read.reader import Checkpoint
from ckptfmt.store.memory import MemoryStore
from ckptfmt.write.snapshot import Snapshot
from tests import builders


def checkpoint_of(*snapshots: Snapshot, step: int = 7) -> Checkpoint:
    """Return a checkpoint with one writer for each snapshot; later changes of live tensors don't show."""
    store = MemoryStore()
    builders.save(store, *snapshots, step=step)
    return Checkpoint(store)


def save(state, *, worker_count=1):
    """Capture a state, the same on all workers, and write it."""
    return checkpoint_of(
        *(
            capture(state, worker=worker, worker_count=worker_count)
            for worker in range(worker_count)
        )
    )


def restore(
    state, checkpoint, *, worker, worker_count, allow=(), strict=False, streams=True, **chosen
) -> LoadReport:
    """Load as one of several workers, who aren't asked: what this one leaves may be another's."""
    plan = LoadPlan(
        checkpoint, worker=worker, worker_count=worker_count, allow=frozenset(allow), **chosen
    )
    restoration = plan_restore(state, plan, strict=strict)
    alone = worker_count == 1
    restoration.check(
        restoration.leftover() if alone else frozenset(),
        restoration.unused_renames() if alone else frozenset(),
    )
    return restoration.apply(restoration.plan_reading().run(), streams=streams)


def load(state, checkpoint, **options) -> LoadReport:
    """Restore as the only worker."""
    return restore(state, checkpoint, worker=0, worker_count=1, **options)
