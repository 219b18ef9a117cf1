"""One save as named steps, and the values that the steps share.

Every save of this package is a `SaveJob`: inline saves, saves in a saver's thread or process, saves
through a node's cache, `SaveAttempt`, conversions and compactions. The steps in their order:

    check     raise if saving at this place is refused
    hold      show other savers that the attempt is in progress
    wait      wait for the attempts that were held before
    clear     check again after a wait; a replacing save removes the remains of killed saves
    write     write this writer's files, the part last
    follow    with several homes, wait until another home has the save before
    decide    commit the attempt, or wait for the committer
    confirm   with several homes, check that no launch has taken over at another home
    note      record the checkpoint as the newest, for readers that require a signature
    sweep     remove the files of earlier attempts
    record    write the ledger entry
    retain    retire checkpoints by the run's rule
    tidy      end the holds

`run` makes the steps from `wait` to `sweep`. A caller leaves out each step without work for the
caller's kind of save.

Spec: REQ-CMT-003 to REQ-CMT-009, REQ-CMT-027, REQ-CMT-042 to REQ-CMT-044, REQ-RUN-004.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import secrets
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from ckptfmt import limits
from ckptfmt.commit.decision import (
    Known,
    check_vacant,
    decide,
    finalize,
    read_register,
    refusal_of,
    sweep_attempts,
)
from ckptfmt.commit.lone import check_no_run
from ckptfmt.commit.waiting import hold_attempt, wait_for_attempts
from ckptfmt.documents.durability import HOME
from ckptfmt.documents.manifest import Manifest, Origin, checkpoint_name
from ckptfmt.documents.run import Launch, RunRecord
from ckptfmt.errors import CkptError, Code
from ckptfmt.run.ledger_writer import put_entry
from ckptfmt.run.lineage import check_not_fenced
from ckptfmt.run.retention import KEEP_ALL, Retention, explain_no_space, tidy_up
from ckptfmt.signing.pin import record_commit
from ckptfmt.signing.signer import Signer
from ckptfmt.store.protocol import Store
from ckptfmt.write.writer import as_ckpt_error, tell_failure

if TYPE_CHECKING:
    from ckptfmt.run.votes import OtherHomes

_LOG: Final = logging.getLogger("ckptfmt")


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
    """The values of a save on a writer.

    Attributes:
        store: store rooted at the checkpoint's directory.
        origin: the attempt's origin; before the writers' agreement, the proposal of this process.
        writer: number of this writer.
        deadline_s: longest wait for writers and earlier saves, in seconds.
        replace: whether the save may replace an existing checkpoint outside of a run.
        run: store rooted at the run; None outside of a run.
        writer_features: writer features of the run.
        retention: rule by which committed checkpoints of the run stay.
        durability: least durability of the files at the commit: "home", or "node" or "peers" where
            caches are enough.
        ledger: the ledger entry at the begin of the save; empty for none.
        signer: signs the manifest; None for no signature.
        pin: file that names the newest checkpoint of the run, for readers that require a
            signature; empty for none.
        others: the other homes of the run; None for a run with one home.
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
    signer: Signer | None = None
    pin: str = ""
    others: OtherHomes | None = None

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
        signer: Signer | None = None,
        pin: str = "",
        others: OtherHomes | None = None,
    ) -> SaveState:
        """Return a save of a step of a run.

        Args:
            run: store rooted at the run.
            record: identity and features of the run.
        """
        return cls(
            origin=new_origin(step=step, launch=launch),
            store=run.at(checkpoint_name(step, launch.launch)),
            run=run,
            writer_features=record.writer_features,
            retention=retention,
            ledger=ledger,
            signer=signer,
            pin=pin,
            others=others,
        )


def _call(step: Callable[[], Any]) -> Any:
    return step()


class SaveJob:
    """The steps of a save on a writer, for use by a single thread at a time.

    Args:
        save: values of the save.
        known: documents already parsed by the thread of the job.
        gives_up: ends the wait for a copy at another home when set.

    Attributes:
        held: holds of this save, which `tidy` ends.
    """

    def __init__(
        self,
        save: SaveState,
        known: Known | None = None,
        *,
        gives_up: threading.Event | None = None,
    ) -> None:
        self.save = save
        self._gives_up = gives_up or threading.Event()
        self.known = known
        self.held = contextlib.ExitStack()
        #: Whether the attempt is committed: a later failure concerns this process only.
        self._is_committed = False
        #: Attempts at the same place, held when `hold` began.
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
            hold = hold_attempt(save.store, save.origin, save.writer, must=save.replace)
            self._earlier = self.held.enter_context(hold)

    def wait(self) -> None:
        """Wait as writer 0 for the attempts held when `hold` began.

        Raises: CommitError(SAVE_PENDING) at the deadline; StoreError. Spec: REQ-CMT-043.
        """
        save = self.save
        if save.writer == 0:
            wait_for_attempts(save.store, self._earlier, deadline_s=save.deadline_s)

    def clear(self, *, may_be_committed: bool = False) -> None:
        """Check again as writer 0 that the save is allowed; a replacing save makes room.

        Args:
            may_be_committed: whether an earlier try of this attempt may have committed, without an
                answer of the store.

        Raises: FencedError(FENCED); CommitError(CHECKPOINT_EXISTS); StoreError.
        Spec: REQ-RUN-004, REQ-CMT-008, REQ-CMT-044.
        """
        save = self.save
        if save.writer != 0:
            return
        if save.run is not None:
            check_not_fenced(save.run, save.origin.launch or 0)
        if save.replace:
            # The remains of a killed save may be as large as this save, without room for both.
            sweep_attempts(save.store, save.origin)
        else:
            check_vacant(save.store, but=save.origin if may_be_committed else None)

    def run(
        self,
        write: Callable[[], object],
        *,
        again: Callable[[Callable[[], Any]], Any] | None = None,
        waits: bool = False,
        sweeps: bool = True,
    ) -> Manifest:
        """Write the files and commit the attempt.

        Args:
            write: writes this writer's files, the part last.
            again: calls its argument, a step, and repeats the call after a passing error. None to
                call each step once.
            waits: whether time has passed since `check`. Then the job begins with `wait` and
                `clear`.
            sweeps: whether to end with `sweep`.

        Raises: StoreError; CommitError; LayoutError; the errors of `write`. The writers
            learn nothing of an error.
        """
        call = again or _call
        if waits:
            self.wait()
            call(functools.partial(self.clear, may_be_committed=again is not None))
        call(write)
        self.follow()
        manifest: Manifest = call(self.decide)
        self._is_committed = True
        self.confirm()
        self.note(manifest)
        if sweeps:
            self.sweep()
        return manifest

    def run_here(self, write: Callable[[], object]) -> Manifest:
        """Make a save in the calling thread, up to `sweep`; a failure is told to all writers.

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

    def follow(self) -> None:
        """Wait as writer 0 until another home has the save before, in a run with several homes.

        Raises: StoreError(HOME_BEHIND). Spec: REQ-RUN-068.
        """
        save = self.save
        if save.others is not None and save.run is not None and save.writer == 0:
            save.others.await_copy(
                save.run,
                save.origin.run_id or "",
                save.origin.launch or 0,
                deadline_s=save.deadline_s,
                gives_up=self._gives_up,
            )

    def confirm(self) -> None:
        """Check that no launch has taken over at another home.

        Raises: FencedError(FENCED); StoreError(HOMES_AWAY). Spec: REQ-RUN-067.
        """
        save = self.save
        if save.others is not None and save.run is not None:
            origin = save.origin
            save.others.confirm(save.run, origin.run_id or "", origin.launch or 0)

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
                signer=save.signer,
            )
        return decide(
            save.store,
            save.origin,
            writer=save.writer,
            deadline_s=save.deadline_s,
            known=self.known,
            replace=save.replace,
            signer=save.signer,
        )

    def note(self, manifest: Manifest) -> None:
        """Record the committed checkpoint in the file of the pin, as writer 0.

        A failure is logged: the save is committed, and only a later rollback to a checkpoint before
        this one stays undetected. Spec: REQ-SIG-006.
        """
        if self.save.pin and self.save.writer == 0:
            try:
                record_commit(self.save.pin, manifest)
            except CkptError as error:
                _LOG.warning("the newest checkpoint isn't recorded: %s", error)

    def sweep(self) -> None:
        """Remove the files of earlier attempts as writer 0; ignore errors. Spec: REQ-CMT-027.

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

        Returns: the names of the removed checkpoints, and the problem of the clean-up, or an
            empty string.
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

    def fail(self, error: BaseException) -> CkptError:
        """Report a failure to all writers. Spec: REQ-CMT-004.

        Returns: the error with the remedy for a save in this run.
        """
        save = self.save
        found = as_ckpt_error(error)
        if save.run is not None:
            found = explain_no_space(found, save.run, save.retention)
            if found.code == Code.FILE_MISSING:
                found = self._find_fence(save.run) or found
        elif found.code == Code.FILE_MISSING and not save.replace:
            found = self._find_winner() or found
        if not self._is_committed:
            tell_failure(save.store, save.origin, save.writer, found)
        return found

    def _find_fence(self, run: Store) -> CkptError | None:
        """Return the refusal by a newer launch, which has removed the files; None without one."""
        try:
            check_not_fenced(run, self.save.origin.launch or 0)
        except CkptError as error:
            return error if error.code == Code.FENCED else None
        return None

    def _find_winner(self) -> CkptError | None:
        """Return the refusal by the checkpoint of another attempt at this place; None without one.

        The saver of a committed checkpoint removes the files of earlier attempts (REQ-CMT-027): an
        attempt that lost the race may miss its own files before it reads the register.
        """
        with contextlib.suppress(CkptError):
            register = read_register(self.save.store)
            if isinstance(register, Manifest) and register.origin != self.save.origin:
                return refusal_of(register)
        return None
