"""One save as named steps, and the values that the steps share.

Every save of this package is a `SaveJob`: inline saves, saves in a saver's thread or process, saves
through a node's cache, `SaveAttempt`, conversions and compactions. The steps in their order:

    check     raise if saving at this place is refused
    hold      show other savers that the attempt is in progress
    wait      wait for the attempts that were held before
    clear     check again after a wait; a replacing save removes the remains of killed saves
    write     write this writer's files, the part last
    decide    commit the attempt, or wait for the committer
    sweep     remove the files of other attempts
    record    write the ledger entry
    retain    retire checkpoints by the run's rule
    tidy      end the holds

`run` makes the steps from `wait` to `sweep`. A caller that has nothing to do in another step
doesn't call that step.

Spec: REQ-CMT-003 to REQ-CMT-009, REQ-CMT-027, REQ-CMT-042 to REQ-CMT-044, REQ-RUN-004.
"""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
from collections.abc import Callable, Sequence
from typing import Any

from ckptfmt import limits
from ckptfmt.commit.decision import Known, check_vacant, decide, finalize, sweep_attempts
from ckptfmt.commit.lone import check_no_run
from ckptfmt.commit.waiting import hold_attempt, wait_for_attempts
from ckptfmt.documents.durability import HOME
from ckptfmt.documents.manifest import Manifest, Origin, checkpoint_name
from ckptfmt.documents.run import Launch, RunRecord
from ckptfmt.errors import CkptError
from ckptfmt.run.ledger_writer import put_entry
from ckptfmt.run.lineage import check_not_fenced
from ckptfmt.run.retention import KEEP_ALL, Retention, explain_no_space, tidy_up
from ckptfmt.store.protocol import Store
from ckptfmt.write.writer import as_ckpt_error, tell_failure


def new_origin(
    *,
    step: int,
    launch: Launch | None = None,
    writer_count: int = 1,
    block_nbytes: int = limits.BLOCK_NBYTES,
) -> Origin:
    """Return the origin of a new attempt.

    Args:
        launch: launch of the run; None outside of a run.

    Spec: REQ-CMT-003, REQ-CKP-007.
    """
    return Origin(
        run_id=None if launch is None else launch.run_id,
        launch=None if launch is None else launch.launch,
        nonce=secrets.token_hex(16) if launch is None else launch.nonce,
        step=step,
        attempt=secrets.token_hex(8),
        writer_count=writer_count,
        block_nbytes=block_nbytes,
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SaveState:
    """The values of one save on one writer.

    Attributes:
        store: store rooted at the checkpoint's directory.
        origin: the attempt's origin; before the writers' agreement, the proposal of this process.
        writer: number of this writer.
        deadline_s: longest wait for other writers and other saves, in seconds.
        replace: whether the save may replace an existing checkpoint outside of a run.
        run: store rooted at the run; None outside of a run.
        writer_features: writer features of the run.
        retention: rule by which committed checkpoints of the run stay.
        durability: least durability of the files at the commit: "home", or "node" or "peers" where
            caches are enough.
        ledger: the ledger entry at the begin of the save; empty for none.
    """

    store: Store
    origin: Origin
    writer: int = 0
    deadline_s: float = 0.0
    replace: bool = False
    run: Store | None = None
    writer_features: tuple[str, ...] = ()
    retention: Retention = KEEP_ALL
    durability: str = HOME
    ledger: bytes = b""

    @classmethod
    def in_run(
        cls,
        run: Store,
        record: RunRecord,
        launch: Launch,
        *,
        step: int,
        retention: Retention = KEEP_ALL,
        ledger: bytes = b"",
    ) -> SaveState:
        """Return a save of a step of a run.

        Args:
            run: store rooted at the run.
            record: identity and features of the run.
        """
        return cls(
            store=run.at(checkpoint_name(step, launch.launch)),
            origin=new_origin(step=step, launch=launch),
            run=run,
            writer_features=record.writer_features,
            retention=retention,
            ledger=ledger,
        )


class SaveJob:
    """The steps of one save on one writer. One thread at a time uses a job.

    Args:
        save: values of the save.
        known: documents already parsed by the thread that runs the job.

    Attributes:
        held: holds of this save, which `tidy` ends.
    """

    def __init__(self, save: SaveState, known: Known | None = None) -> None:
        self.save = save
        self.known = known
        self.held = contextlib.ExitStack()
        #: Attempts at the same place that were held when `hold` began.
        self._earlier: list[str] = []

    def check(self) -> None:
        """Raise if a save at this place is refused. Called before the attempt begins.

        Raises: FencedError(FENCED); CommitError(CHECKPOINT_EXISTS). Spec: REQ-RUN-004, REQ-RUN-016,
            REQ-CMT-042.
        """
        if self.save.run is None:
            check_no_run(self.save.store, replace=self.save.replace)
        else:
            self.clear()

    def hold(self) -> None:
        """Hold the attempt outside of a run, as a sign of a save in progress. Spec: REQ-CMT-043.

        In a run nothing is held here: the saver holds a file for all of its saves.
        """
        save = self.save
        if save.run is None:
            held = hold_attempt(save.store, save.origin, save.writer, must=save.replace)
            self._earlier = self.held.enter_context(held)

    def wait(self) -> None:
        """Wait as writer 0 for the attempts that were held when `hold` began.

        Raises: CommitError(SAVE_PENDING) at the deadline; StoreError. Spec: REQ-CMT-043.
        """
        save = self.save
        if save.writer == 0:
            wait_for_attempts(save.store, self._earlier, deadline_s=save.deadline_s)

    def clear(self) -> None:
        """Check again as writer 0 that the save is allowed; a replacing save makes room.

        Raises: FencedError(FENCED); CommitError(CHECKPOINT_EXISTS); StoreError.
        Spec: REQ-RUN-004, REQ-CMT-008, REQ-CMT-044.
        """
        save = self.save
        if save.writer != 0:
            return
        if save.run is not None:
            check_not_fenced(save.run, save.origin.launch or 0)
        if save.replace:
            # The remains of a killed save may be as large as this save, with room for only one.
            sweep_attempts(save.store, save.origin)
        else:
            check_vacant(save.store, but=save.origin)

    def run(
        self,
        write: Callable[[], object],
        *,
        on_written: Callable[[], object] = lambda: None,
        again: Callable[[Callable[[], Any]], Any] = lambda step: step(),
        waits: bool = False,
        sweeps: bool = True,
    ) -> Manifest:
        """Write the files and commit the attempt.

        Args:
            write: writes this writer's files, the part last.
            on_written: called once the part is durable.
            again: calls a step that it is given, and repeats the call after a passing error.
            waits: whether time has passed since `check`. Then the job begins with `wait` and
                `clear`.
            sweeps: whether to end with `sweep`.

        Raises: StoreError; CommitError; LayoutError; the errors of `write`. Nothing is told to the
            other writers.
        """
        if waits:
            again(self.wait)
            again(self.clear)
        again(write)
        on_written()
        manifest: Manifest = again(self.decide)
        if sweeps:
            self.sweep()
        return manifest

    def run_here(self, write: Callable[[], object]) -> Manifest:
        """Make a save in the calling thread, up to `sweep`; a failure is told to the other writers.

        Raises: as `run`, with the remedy of `fail`.
        """
        try:
            with self.held:
                if self.save.replace:
                    self.hold()
                return self.run(write, waits=self.save.replace)
        except Exception as error:
            found = self.fail(error)
            if isinstance(error, CkptError) and found is not error:
                raise found from error
            raise

    def decide(self, *, part_digests: Sequence[str] | None = None) -> Manifest:
        """Commit the attempt as writer 0, or wait for the decision as another writer.

        Args:
            part_digests: expected digests of all parts, which are written; None to wait for parts.

        Raises: the errors of `ckptfmt.commit.decision.decide`. Spec: REQ-CMT-005 to REQ-CMT-009.
        """
        save = self.save
        if part_digests is not None:
            return finalize(
                save.store,
                save.origin,
                known=self.known,
                part_digests=part_digests,
                replace=save.replace,
            )
        return decide(
            save.store,
            save.origin,
            writer=save.writer,
            deadline_s=save.deadline_s,
            known=self.known,
            replace=save.replace,
            sweeps=False,
        )

    def sweep(self) -> None:
        """Remove the files of other attempts as writer 0; ignore errors. Spec: REQ-CMT-027.

        The save is committed, and the remains of killed attempts only take space.
        """
        if self.save.writer == 0:
            with contextlib.suppress(CkptError):
                sweep_attempts(self.save.store, self.save.origin, known=self.known)

    def record(self) -> None:
        """Write the ledger entry of a save in a run; ignore errors. Spec: REQ-RUN-043."""
        if self.save.run is not None:
            put_entry(self.save.run, self.save.origin.launch, self.save.ledger)

    def retain(self) -> tuple[list[str], str]:
        """Retire checkpoints of the run as writer 0, by the rule of the save.

        Returns: the names of the removed checkpoints, and the problem that stopped the clean-up, or
            an empty string.
        """
        save = self.save
        origin = save.origin
        if save.writer != 0 or save.run is None:
            return [], ""
        assert origin.run_id is not None  # noqa: S101
        assert origin.launch is not None  # noqa: S101
        record = RunRecord(run_id=origin.run_id, writer_features=save.writer_features)
        try:
            return tidy_up(
                save.run,
                record,
                launch=origin.launch,
                retention=save.retention,
                known=self.known,
            )
        except Exception as error:  # noqa: BLE001
            return [], str(as_ckpt_error(error))

    def tidy(self) -> None:
        """End the holds; ignore errors."""
        with contextlib.suppress(CkptError):
            self.held.close()

    def fail(self, error: Exception) -> CkptError:
        """Tell the other writers of a failure. Spec: REQ-CMT-004.

        Returns: the error with the remedy for a save in this run.
        """
        save = self.save
        found = as_ckpt_error(error)
        if save.run is not None:
            found = explain_no_space(found, save.run, save.retention)
        tell_failure(save.store, save.origin, save.writer, found)
        return found
