"""The class for a training loop: resume, saves during the training, retention of checkpoints."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import operator
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, Self, SupportsFloat, Unpack

from ckptfmt.adapters.data_loaders import find_loaders, find_samplers
from ckptfmt.adapters.origin import program_origin
from ckptfmt.api import open_checkpoint
from ckptfmt.delta.policy import DeltaOptions
from ckptfmt.documents.durability import HOME
from ckptfmt.documents.labels import Labels
from ckptfmt.documents.run import Launch, RunRecord
from ckptfmt.errors import CkptError, Code, err
from ckptfmt.features import LABELS, REFERENCED
from ckptfmt.group import Group, attempt, make_group, never
from ckptfmt.loading.agreement import LoadTries
from ckptfmt.loading.initial import InitFrom, carry_init
from ckptfmt.loading.load_report import LoadReport, claim_of_all
from ckptfmt.loading.restore import load_once, mark_streams, restore_streams
from ckptfmt.loop.launching import Survivor, Taken, diverged, take_launch
from ckptfmt.loop.loop import StepCount, make_meters, parse_every
from ckptfmt.loop.pace import Pace
from ckptfmt.loop.rehearsal import Account, Rehearsal
from ckptfmt.loop.rewinding import (
    REMADE,
    Reach,
    can_skip,
    check_reason,
    choose_save,
    drop_gradients,
    have_fetched_ahead,
    note_reaches,
)
from ckptfmt.loop.short_rehearsal import ShortRehearsal, keep_iterators
from ckptfmt.loop.talking import Talk
from ckptfmt.loop.uncounted import UnsavedWatch
from ckptfmt.loop.witnessing import Witness, digest_outside_modules
from ckptfmt.option_groups import (
    Auto,
    Checks,
    Homes,
    Job,
    Loading,
    Mirror,
    OldKeywords,
    Options,
    Stop,
)
from ckptfmt.read.reader import Checkpoint
from ckptfmt.read.reading import DamagedMemoryError
from ckptfmt.run.node_cache import Cache
from ckptfmt.run.retention import Retention
from ckptfmt.run.save_job import SaveState
from ckptfmt.saving.background import staging_thread_count
from ckptfmt.saving.handle import SaveEvent, SaveHandle
from ckptfmt.saving.one_save import check_step
from ckptfmt.saving.peers import meet_peers
from ckptfmt.saving.saves import Saves, Saving, add_report
from ckptfmt.signing.signer import Signer
from ckptfmt.signing.trust import Trust, pin_of
from ckptfmt.state import State, check_state
from ckptfmt.store import open_store
from ckptfmt.store.protocol import Store
from ckptfmt.write.snapshot import Memory

if TYPE_CHECKING:
    from ckptfmt.loop.healer import Healing
    from ckptfmt.run.elections import RunHomes

_LOG: Final = logging.getLogger("ckptfmt")


def _find_homes(run: str | os.PathLike[str] | Store, options: Options) -> RunHomes | None:
    """Return all homes of a run, the place `run` first; None for a run with one home.

    Raises: StateError(ARGUMENT).
    """
    if options.homes is None:
        return None
    _refuse_token(options.job)
    from ckptfmt.run.elections import RunHomes  # noqa: PLC0415 - few runs need the module
    from ckptfmt.run.homes import HomePlace  # noqa: PLC0415 - the same

    homes = [HomePlace.of(place) for place in (run, *options.homes.places)]
    return RunHomes(homes, away_after_s=options.homes.away_after_s)


def _refuse_token(job: Job) -> None:
    """Refuse a token for the writers of a run with several homes. Raises: StateError(ARGUMENT)."""
    if isinstance(job.agree, str):
        raise err(
            Code.ARGUMENT,
            "agree= is a token, and processes meet at a single home by a token",
            where="agree=",
            remedy="Use torch.distributed, or pass a function that gathers bytes.",
        )


class Checkpointer:
    """The checkpointer of a training loop: resumes the run, and saves it during the training.

    Each process of the job creates a `Checkpointer` with the same arguments, and runs the same
    loop. Writer 0 decides for all processes which checkpoint to resume from and when to save, and
    sends its decisions to the other processes. No process decides by its own clock.

    A loop has one of three forms. `steps` is a complete loop. `training_step` is a context around
    each step of the program's own loop. A program that counts its steps, such as a framework's
    callback, calls `end_step` after each step, or `save` with ``step=`` to save at once. The RNG
    streams are restored when the first step begins, or by a call of `restore_rng`. Before that, no
    step may be counted, and T1 isn't claimed.

    A framework that needs the checkpoint before the objects of its state exist calls `choose`
    first, then `restore` with the state, and `restore_rng` once the iterators exist.

    Args:
        run: directory of the run, created if missing; or a store rooted there.
        state: the objects to save and restore; None if the program passes the state to `restore`
            later, once the objects exist.
        every: interval of saves: a number of steps (an int) or a time ("90s", "5min", "1h"); None
            to save only at the end of `steps` and in calls of `save`; "auto" or an `Auto` for the
            interval with the least waste, computed from measurements. With `Cache.upload_every`,
            "auto" chooses the intervals of the cache and of `run` separately.
        keep: number of the newest checkpoints to keep; a `Retention` for more rules; None to keep
            all.
        resume: "auto" to follow the run's lineage; "fresh" to start anew; otherwise the name or
            the manifest digest of a checkpoint, to roll the run back to this checkpoint.
        init_from: initial contents of a run without a checkpoint: path of a checkpoint or of
            another run, to load the weights; or an `InitFrom`, to choose the contents.
        loading: options of the load with which this launch resumes; None for the defaults of
            `Loading`. None has this meaning for each group of options.
        saving: options of the saves beside the training, such as the saver and deltas: `Saving`.
        copies: other places of the files: at most one `Cache` on a disk of this node, and any
            number of `Mirror` objects. `Homes` are two places at which the run goes on when this
            one is away.
        job: the processes of the job, and how they reach each other: `Job`.
        stop: signals and triggers at which the run is saved, and the training stops: `Stop`.
        checks: checks of the training, such as the witness of repeated steps: `Checks`.
        ledger: whether to record in the run how the time is spent, for `ckptfmt goodput` and
            `Run.goodput`.
        on_save: function to call with a `SaveEvent` when a save is staged, and when it is committed
            or has failed; also for the saves that `steps` makes. Each process calls the function
            for its own saves, in a thread for callbacks: a slow function delays only later calls.
            An exception in the function is logged. `close` waits for the calls.
        deprecated: keywords of version 0.9, which the groups replace. They give a
            DeprecationWarning with the new form, and end with version 2.0.

    Attributes:
        step: number of training steps done. An assignment counts steps as `end_step` does, and
            saves nothing.
        launch: this start's record; None before `choose` or `restore`.
        passed_over: reasons, a sentence each, why checkpoints newer than the restored checkpoint
            weren't taken: invalid checkpoints, and saves that a living saver hadn't committed by
            the deadline.
        stopped: whether the run ends because of a signal, and is saved; or because of an alarm.
        rewinds: number of times that this object has gone back, by `rewind`, by `regroup` or after
            an alarm.

    Raises: StateError(ARGUMENT); TypeError for an unknown keyword.
    """

    #: The save requested within the body of a step: a function that returns its labels, and whether
    #: its files go home. None without a request.
    _requested: tuple[Callable[[], Labels], bool] | None = None
    _handle: SaveHandle | None = None
    _saved_step: int | None = None
    #: The step of the snapshot in memory that isn't written; None without one.
    _snapshot_step: int | None = None
    _run: RunRecord | None = None
    #: The checkpoint from which this launch resumes; open until the RNG streams are restored.
    _checkpoint: Checkpoint | None = None
    launch: Launch | None = None
    #: Number of the home at which this launch commits, in a run with several homes.
    _home_number = 0
    #: The number of the newest launch that this process knows; 0 before the first launch.
    _newest_launch = 0
    #: Whether processes lend each other contents in memory for the load of this launch.
    _lends = False
    _load_report: LoadReport | None = None
    passed_over: list[str]

    def __init__(
        self,
        run: str | os.PathLike[str] | Store,
        state: State | None = None,
        *,
        every: int | str | Auto | None = None,
        keep: int | Retention | None = None,
        resume: str = "auto",
        init_from: str | os.PathLike[str] | Store | InitFrom | None = None,
        loading: Loading | None = None,
        saving: Saving | None = None,
        copies: Iterable[Cache | Mirror | Homes] = (),
        job: Job | None = None,
        stop: Stop | None = None,
        checks: Checks | None = None,
        ledger: bool = False,
        on_save: Callable[[SaveEvent], object] | None = None,
        **deprecated: Unpack[OldKeywords],
    ) -> None:
        groups = {
            "every": every,
            "keep": keep,
            "loading": loading,
            "saving": saving,
            "copies": copies,
            "job": job,
            "stop": stop,
            "checks": checks,
        }
        options = Options.of(groups, deprecated)
        self._rehearsal = Rehearsal.from_environment()
        if self._rehearsal is not None:  # a rehearsal replaces only places and intervals
            run = self._rehearsal.place(run)
            options = options.for_rehearsal(self._rehearsal.every)
            resume = "auto"
        cadence = parse_every(options.every)
        signals = options.stop.make_signals()
        self._on_save = _check_function(on_save)
        self._signer = Signer.of(options.saving.sign)
        self._trust = Trust.of(options.loading.require_signature)
        self._resume = _check_resume(resume)
        self._init = InitFrom.of(init_from)
        self._retention = options.keep
        self._snapshot_every = options.saving.snapshot_every
        has_deltas = DeltaOptions.of(options.saving.delta).mode != "off"
        self._writer_features = (REFERENCED,) if has_deltas else ()
        self._state = state
        self._share = options.loading.share
        self._choices: dict[str, Any] = {
            "allow": options.loading.allow,
            "strict": options.loading.strict,
            "override": options.loading.override,
        }
        self._homes = _find_homes(run, options)
        # The home of this launch is chosen at its begin, and this place may be away.
        self._store = (
            open_store(run, writable=True)
            if self._homes is None
            else self._homes.homes[0].open_unasked()
        )
        self._deadline_s = options.job.deadline_s
        self._cache = options.cache
        self._job = options.job
        self._group: Group = self._make_group(options.job, signals.end_s)
        meters = make_meters(options.every, options.mtbf, self._group, self._cache, ledger=ledger)
        self.passed_over = []
        self._count = StepCount(state)
        self._pace = Pace(self._group, cadence, meters, signals, options.stop.triggers)
        rehearse = options.checks.rehearse
        self._short_rehearsal = ShortRehearsal(rehearse, options.every)
        self._healing = self._begin_healing(options)
        self._make_witness = functools.partial(
            Witness,
            self._group,
            is_on=options.checks.witness,
            kept_count=rehearse,
            is_thorough=self._rehearsal is not None,
        )
        self._witness = self._make_witness()
        self._saves = Saves(
            self._store,
            self._group,
            options.saving,
            deadline_s=self._deadline_s,
            cache=self._cache,
            mirrors=options.mirrors,
            check_replicas=options.checks.replicas,
        )
        self._talk = Talk(self._group.writer)
        report = functools.partial(add_report, self._saves.reports)
        self._unsaved = UnsavedWatch(options.every, cadence, report)
        weakref.finalize(self, self._unsaved.end).atexit = False
        self._restored = self._is_touched = False
        self._is_whole = False
        self._has_begun = False
        self._is_prepared = False
        self._is_closed = False
        #: Whether iterators must be made anew between a rewind and the next step.
        self._needs_iterators = False
        #: Whether `epochs` goes back after the body of the epoch, and whether an alarm asks for it.
        self._goes_back_later = self._must_go_back = False
        self.stopped = False
        self.rewinds = 0

    def _make_group(self, job: Job, stop_end_s: Callable[[], float]) -> Group:
        return make_group(
            job.writer,
            job.agree,
            self._store,
            deadline_s=job.deadline_s,
            stop_end_s=stop_end_s,
            is_lost=job.lost or never,
        )

    def _begin_healing(self, options: Options) -> Healing | None:
        healer = options.stop.healer
        if healer is None or self._rehearsal is not None:
            return None
        return healer.begin(self._store, self._group, has_witness=options.checks.witness)

    @property
    def reports(self) -> tuple[str, ...]:
        """Deviations of the saves from the options, a sentence each.

        An example is a smaller number of slots for lack of memory.
        """
        return (*self._saves.reports, *self._witness.reports)

    @property
    def load_report(self) -> LoadReport | None:
        """The report of the restore, or of the load of `init_from`; None after neither.

        The report claims T1 only after the RNG streams are restored. The claim is "expected" until
        repeated steps have been compared, and then verified or refuted.
        """
        return self._witness.update(self._load_report)

    @property
    def alarm(self) -> str | None:
        """The reason why `Stop.triggers` stopped the run; None without such a stop."""
        return self._pace.alarm

    @property
    def staging_threads(self) -> int:
        """The number of threads that copy a snapshot."""
        return staging_thread_count()

    def __repr__(self) -> str:
        launch = "no launch yet" if self.launch is None else f"launch={self.launch.launch}"
        return f"Checkpointer({self._store.name!r}, step={self.step}, {launch})"

    def __enter__(self) -> Self:
        if self._state is not None:
            self.restore()
        return self

    def __exit__(self, _kind: object, error: object, _traceback: object) -> None:
        self._close(error)

    def close(self) -> None:
        """Wait for the saves in flight, and release all resources.

        The last save is uploaded to the run first if only caches have its files.

        Raises: the error of a failed save, if not raised before; CommitError(SAVE_PENDING) if a
            save isn't finished by the deadline. A saver in a separate process continues the save.
        """
        self._close(None)

    def _close(self, error: object) -> None:
        """Close the run.

        Args:
            error: the exception that ends the training, which the caller raises; None without one.
        """
        quietly = error is not None
        self._is_closed = True
        self._pace.end()
        if not quietly:
            self._unsaved.tell_at_exit()
        self._unsaved.end()
        self._pace.meters.note_closing()
        if self._checkpoint is not None:
            self._checkpoint.close()
            self._checkpoint = None
        if error is not None:  # the wait for saves may be cut
            self._note_end(error)
        try:
            self._saves.close(deadline_s=self._pace.rest_s(self._deadline_s), quietly=quietly)
        except CkptError as failure:
            error = failure
            raise
        finally:
            self._pace.meters.close(self.step)
            self._note_end(error)
            self._witness.close()
            self._talk.close()
            if self._rehearsal is not None and self.launch is not None:
                self._rehearsal.give(self._store.name, self._account(self.launch))

    def _note_end(self, error: object = None) -> None:
        """Record how this launch ends on this process, for a healer."""
        if self._healing is not None:
            pace = self._pace
            alarm = (pace.alarm_step, pace.alarm) if pace.is_suspect else None
            ending = self._healing.end_of(
                error, step=self.step, alarm=alarm, has_stopped=pace.stopped
            )
            self._witness.end(ending)

    def _account(self, launch: Launch) -> Account:
        """Return the report of this process for a rehearsal."""
        report = self.load_report
        return Account(
            launch=launch.launch,
            writer=self._group.writer,
            step=self.step,
            claim=None if report is None else report.claim,
            lowered_by=() if report is None else report.lowered_by,
            changes=tuple(self._witness.changes),
            modules=digest_outside_modules(self._count.state),
        )

    def choose(self) -> Checkpoint | None:
        """Begin the next launch of the run, and return the checkpoint from which it resumes.

        No live object changes. `restore` calls this method, too. A program that must read the
        checkpoint before the objects of its state exist calls `choose` first, on every process.
        Available are the checkpoint's `step`, ``store.name`` (its path), plain values by `leaf`,
        and tensors. Process 0 has then waited for living savers, has passed over damaged
        checkpoints, and has verified every byte of the returned checkpoint. To load a part early,
        such as the model for which an optimizer is built, pass the path to `ckptfmt.load` with a
        `State` of this part; `restore` then loads everything.

        Returns: the checkpoint, which the checkpointer closes; None for a fresh start. A second
            call returns the same checkpoint.
        Raises: IntegrityError(NO_VALID_CHECKPOINT); StoreError; StateError(ARGUMENT) after the RNG
            streams are restored.
        Spec: REQ-RUN-002, REQ-RUN-006, REQ-RUN-007, REQ-RUN-018.
        """
        if self.launch is None:
            self._take_launch()
        elif self._checkpoint is None and self.launch.resume_from is not None:
            remedy = (
                "Call choose() before restore_rng() and the first step; launch.resume_from"
                " names the checkpoint."
            )
            raise err(Code.ARGUMENT, "the run has gone on already", where="choose()", remedy=remedy)
        return (
            self._checkpoint
            if self.launch is not None and self.launch.resume_from is not None
            else None
        )

    def restore(self, state: State | None = None) -> LoadReport | None:
        """Load the checkpoint from which this launch resumes.

        Entering the context calls this method if the state is known by then. `choose` is called if
        the program hasn't called it. The RNG streams are restored later, when the first step
        begins, because the creation of an iterator draws from them.

        Args:
            state: the objects to save and restore, if not passed to `Checkpointer`.

        Returns: the report; None after a fresh start.
        Raises: as `choose`; StateError; LayoutError.
        """
        if state is not None and state is not self._state:
            self._take_state(state)
        if self._restored:
            return self.load_report
        if self._state is None:
            remedy = (
                "Pass it to Checkpointer, or to restore() once its objects exist, before the"
                " first step."
            )
            raise err(
                Code.ARGUMENT,
                "there is no state to restore and save",
                where="state=",
                remedy=remedy,
            )
        self._refuse_partly_loaded()
        checkpoint = self.choose()
        if checkpoint is not None:
            self._is_touched = True
            self._load(checkpoint, self._state)
        elif self._init is not None:
            self._is_touched = True
            self._begin_from(self._init, self._state)
        elif self.launch is not None:
            self._talk.tell_begun(self.launch, None, self.step, self._state)
        if self._healing is not None:
            self._healing.leave_out(self._state)
        self._pace.note_save()
        self._pace.meters.note_restored()
        self._unsaved.begin()
        self._restored = True
        return self.load_report

    def _take_state(self, state: State) -> None:
        check_state(state)
        if self._state is not None:
            remedy = "Pass it once; fields of a State may be assigned until restore()."
            raise err(
                Code.ARGUMENT,
                "another state was given before",
                where="restore(state)",
                remedy=remedy,
            )
        self._state = self._count.state = state
        self._count.follow()

    @property
    def step(self) -> int:
        """The number of training steps done.

        An assignment counts steps as `end_step` does, and saves nothing.
        """
        return self._count.step

    @step.setter
    def step(self, step: int) -> None:
        self.restore()
        self._unsaved.note_counted(self._tell(step))

    def _tell(self, step: int) -> int:
        """Count steps, let the witness record them, and return the number of new steps.

        Raises: as `StepCount.tell`.
        """
        count = self._count
        before = count.step
        more = count.tell(step)
        if more:
            if not self._witness.is_recording:
                self._begin_witness(before)
            self._witness.end_step(count.step, count.state, is_single=more == 1)
        return more

    def restore_rng(self) -> None:
        """Restore the RNG streams now, instead of at the begin of the first step.

        Every process calls this method. The creation of an iterator draws from the RNG streams,
        and fetching a batch may draw. Call this method at the point where the uninterrupted run
        saved: within an epoch, after the iterator exists and has skipped the trained samples, and
        before the first batch is fetched; between two epochs, before the next epoch's iterator is
        created. The method also prepares saves, because reading an object's state may draw, and
        installs the handlers of `Stop.signals`. A second call has no effect.

        Raises: as `restore` and `prepare`; StateError(STREAM_MISSING, STREAM_UNEXPECTED).
        """
        self.restore()
        if self._has_begun:
            return
        # The state of a fresh optimizer is known only after its first step, when slots are made.
        self._is_prepared = self._is_whole
        ready = self._saves.prepare if self._is_prepared else self._saves.check
        ready(self._count.state, step=self.step)
        if self._checkpoint is not None:
            assert self._state is not None  # noqa: S101
            self._restore_streams(self._checkpoint, self._state)
        self._pace.begin()
        self._pace.meters.note_begun(self.step)
        self._has_begun = True
        self._begin_witness(self.step)

    def _begin_witness(self, step: int) -> None:
        """Start recording the steps after `step`, unless they are recorded.

        The RNG streams are restored: a launch that resumes counts no step before.
        """
        assert self.launch is not None  # noqa: S101
        self._witness.begin(
            self._store,
            self.launch,
            step,
            self._load_report,
            self._count.state,
            follows=None if self._healing is None else self._healing.follows,
        )

    def _begin_itself(self) -> None:
        """Restore the RNG streams at the begin of the first step, if the program hasn't."""
        self._unsaved.note_counted(0)
        if not self._has_begun:
            self._witness.restores_streams_itself = True
            self.restore_rng()

    def steps(self, total: int) -> Iterator[int]:
        """Yield the number of each remaining step, below `total`, and save after the loop's body.

        Before the first step the saves are prepared, and the RNG streams are restored. A state that
        can't be saved is refused here, before any training is lost. After the last step the run is
        saved, unless its last step is saved already.

        Raises: as `restore` and `save`; StateError(ARGUMENT) for a total that isn't a number of
            steps.
        """
        check_step(total, where="steps()")
        self._begin_itself()
        if self.step >= total:
            self._talk.say("nothing is left to do: %d of %d steps are done", self.step, total)
        try:
            while self.step < total and not self.stopped:
                self._begin_itself()  # after a rewind, too
                rewinds = self.rewinds
                self._witness.begin_step(self.step, self._count.state)
                with self._count.body():
                    yield self.step
                if self.rewinds != rewinds:
                    continue
                self._end_step(self.step + 1, total)
                if self._short_rehearsal.is_due(self.step):
                    self._go_back()
        finally:
            self._pace.rest()
        self._pace.end()

    @property
    def epoch(self) -> int:
        """The number of epochs done of the DataLoader in the State.

        Raises: StateError(ARGUMENT) unless the State has exactly one DataLoader.
        """
        epoch: int = self._find_loader(None).epoch
        return epoch

    def epochs(self, total: int, *, loader: object = None) -> Iterator[int]:
        """Yield the number of each remaining epoch, below `total`; each batch is a step.

        The body loops over the DataLoader in the State. A resumed run begins with the epoch of the
        checkpoint, where the loop gets the batches that the run hasn't trained on. The step of a
        batch ends when the loop asks for the next batch. The step of an epoch's last batch ends
        with the body, code after the inner loop included. At the end of a step, the checkpointer
        counts the step and saves if a save is due. After the last epoch the run is saved.

        When the training stops (`stopped`), the inner loop gets no further batch, and the current
        epoch is the last. Don't count steps otherwise, by `training_step` or `end_step`. With
        several batches in a step, loop over ``range(checkpointer.epoch, total)`` instead.

        Args:
            total: number of epochs, over the whole run.
            loader: the DataLoader, if the State has several.

        Raises: as `restore` and `save`; StateError(ARGUMENT) if the State hasn't the loader, or if
            the body doesn't loop over the loader once.

        >>> import torch, tempfile, ckptfmt
        >>> loader = torch.utils.data.DataLoader(range(4), batch_size=2)
        >>> model = torch.nn.Linear(1, 1)
        >>> seen = []
        >>> with tempfile.TemporaryDirectory() as run:
        ...     state = ckptfmt.State(weights=model, data=loader, config={})
        ...     with ckptfmt.Checkpointer(run, state) as checkpointer:
        ...         for epoch in checkpointer.epochs(2):
        ...             for batch in loader:
        ...                 seen.append((epoch, checkpointer.step, batch.tolist()))
        >>> seen
        [(0, 0, [0, 1]), (0, 1, [2, 3]), (1, 2, [0, 1]), (1, 3, [2, 3])]
        """
        check_step(total, where="epochs()")
        position = self._find_loader(loader)
        self._begin_itself()
        if position.epoch >= total:
            self._talk.say("nothing is left to do: %d of %d epochs are done", position.epoch, total)
        position.before_batch = functools.partial(self._before_batch, position)
        position.after_batch = self._count.begin_body
        position.before_epoch = self._before_epoch
        self._goes_back_later = True
        try:
            while position.epoch < total and not self.stopped:
                self._begin_itself()  # after a rewind, too
                epoch = position.epoch
                rewinds = self.rewinds
                yield epoch
                if self.rewinds != rewinds:
                    # The rest of the body has run on the loaded state.
                    assert self.launch is not None and self.launch.resume_from is not None  # noqa: PT018, S101
                    self._go_back_to(self.launch.resume_from.name, reason=None)
                    continue
                if self._goes_back_now():
                    continue
                if self._has_stopped():
                    break
                is_last = epoch + 1 == total
                if self._count.is_under_way:
                    position.leave_epoch()
                    self._end_batch(is_last=is_last)
                    if self._goes_back_now():
                        continue
                if position.epoch != epoch + 1:
                    raise err(
                        Code.ARGUMENT,
                        f"the body of epoch {epoch} has looped over the State's DataLoader"
                        f" {position.epoch - epoch} times, not once",
                        where="epochs()",
                        remedy="Loop over the loader of the State once in each epoch, and evaluate"
                        " on a loader of its own.",
                    )
        finally:
            position.before_batch = position.after_batch = position.before_epoch = None
            self._count.is_under_way = self._goes_back_later = False
            self._pace.rest()
        self._pace.end()

    def _goes_back_now(self) -> bool:
        """Go back after an alarm within the epoch; return whether the run went back.

        Otherwise the run is saved and stops.
        """
        if not self._must_go_back:
            return False
        self._must_go_back = False
        if self._rewind_after_alarm():
            return True
        self.stopped = True
        self._save_and_stop(None)
        return False

    def _has_stopped(self) -> bool:
        return self.stopped

    def _find_loader(self, loader: object) -> Any:
        found = find_loaders(self._count.state)
        chosen = [one for one in found if loader is None or one.loader is loader]
        if len(chosen) == 1:
            return chosen[0]
        raise err(
            Code.ARGUMENT,
            f"the State has {len(found)} DataLoaders of torch"
            + (", and not this one" if loader is not None else ""),
            where="epochs()",
            remedy=(
                "Name one: epochs(total, loader=train_loader)."
                if found
                else "Give State(data=loader), or use steps() with a ckptfmt.Sampler."
            ),
        )

    def _before_batch(self, position: Any) -> bool:
        """End the step of the previous batch; return whether the loop gets another batch."""
        if self._count.is_under_way:
            self._saves.unheld.end_batch()
            if position.is_at_end:
                return True  # the rest of the epoch belongs to the last batch's step
            self._end_batch(is_last=False)
        if self.stopped or self._must_go_back:
            return False
        self._witness.begin_step(self.step, self._count.state)
        return True

    def _before_epoch(self) -> None:
        self._saves.unheld.begin_epoch()
        self._witness.begin_epoch(self.step, self._count.state)

    def _end_batch(self, *, is_last: bool) -> None:
        self._count.end_body()
        self._end_step(self.step + 1, self.step + 1 if is_last else None)
        if self._short_rehearsal.is_due(self.step):
            self._go_back()

    @contextlib.contextmanager
    def training_step(self) -> Iterator[int]:
        """Enclose a step of the program's own loop; count the step at the end, and save if due.

        The context's value is the number of the step. The first step prepares the saves and
        restores the RNG streams, as `steps` does: all random numbers of a step, its batch's
        included, should be drawn within the context. A step ended by an exception isn't counted. A
        step ended by ``break`` is counted, because Python doesn't distinguish it from a normal
        end. After the loop, call `save` to save the last step. Leave the loop early if `stopped`
        is true.

        Raises: as `restore` and `save`.
        """
        self._begin_itself()
        rewinds = self.rewinds
        self._witness.begin_step(self.step, self._count.state)
        with self._count.body():
            yield self.step
        if self.rewinds == rewinds:
            self._end_step(self.step + 1)

    def observe(
        self, *, loss: object = None, grad_norm: object = None, batch: object = None
    ) -> None:
        """Pass numbers of the current step to the witness, which compares all their bits.

        A loss helps to find the cause of a difference: a step with the same samples and a different
        loss depends on state that isn't in `State`. Several calls within a step, such as a call for
        each micro-batch, add their numbers in order. In `steps` and `training_step`, numbers passed
        before the step begins are dropped. In other loops, the numbers belong to the step that is
        counted next; if several steps are counted at once, the numbers are dropped.

        Args:
            loss: a number, or a tensor with a single element. The call doesn't wait for a device.
            grad_norm: the norm of the gradients, in the same form.
            batch: tensors, or containers of tensors; a selection of the elements is compared.

        Raises: StateError(ARGUMENT) for a loss or a norm that isn't a number.
        """
        self._witness.observe(loss=loss, grad_norm=grad_norm, batch=batch)

    def end_step(
        self,
        step: int,
        *,
        metrics: Mapping[str, SupportsFloat] | None = None,
        tags: Iterable[str] = (),
    ) -> SaveHandle | None:
        """Set the number of steps done: for loops that count their steps, such as a framework's.

        Samplers in the state commit. The run is saved if a save is due or a stop was requested;
        after a stop, `stopped` is true. A call with the current number has no effect, so a callback
        of each micro-batch may call this method. Call `restore_rng` before the first step. Call
        `end_step` after all work of the step that draws random numbers, such as an evaluation: a
        resume doesn't repeat the work done before the save, and does the work that follows it.

        Args:
            step: number of training steps done, over the whole run.
            metrics, tags: labels of a save made by this call; as for `save`.

        Returns: the save, if a save was made.
        Raises: as `save`.
        """
        self.restore()
        self._count.check(step)
        if step == self.step:
            return None
        self.restore_rng()
        label = functools.partial(Labels.of, metrics, tags)
        return self._end_step(step, label=label, can_go_back=False)

    def prepare(self) -> None:
        """Prepare saves: check the state, create and touch the slots, start the saver.

        The first step and the first save do this implicitly; an explicit call chooses the moment.
        Every process calls this method.

        Raises: StateError; LayoutError; CommitError(SAVER_LOST).
        """
        self.restore()
        self._saves.prepare(self._count.state, step=self.step)

    def save(
        self,
        step: int | None = None,
        *,
        metrics: Mapping[str, SupportsFloat] | None = None,
        tags: Iterable[str] = (),
        suspect: str | None = None,
        durability: str | None = None,
    ) -> SaveHandle | None:
        """Begin a save, and return its handle; None if this step is saved already.

        Every process calls this method at the same step. Tensors that only the optimizers' steps
        change are copied in parallel with the training, if a previous save has shown that this is
        safe. All other data is copied before the call returns. The files are written in parallel
        with the training: the handle has the progress, and can wait for the end.

        Within the body of `steps` or `training_step` the step isn't finished: the call returns
        None, and the save begins at the end of the body. A body left by an exception, or the body
        of `steps` left by ``break``, doesn't count as a step, and isn't saved.

        Args:
            step: number of training steps done, over the whole run; samplers in the state commit.
                None if the checkpointer counts the steps.
            metrics: finite numbers by name, such as ``{"eval_loss": 2.31}``, for the choice of
                `Run.best` and `Retention.best`. The values of process 0 count. Pass metrics known
                only later to `Run.set_metrics`.
            tags: short strings; the values of process 0 count.
            suspect: a reason why the run doesn't go on from this save by itself, only by an
                explicit choice; the value of process 0 counts.
            durability: "home" to upload the files of this save to the run, regardless of
                `Cache.upload_every`; the value of process 0 counts.

        Raises: StateError(ARGUMENT) for a step below the number of steps done; without a step, if
            the steps aren't counted or the last step was left unfinished; and after a resume, if
            the RNG streams aren't restored. LayoutError(WRITERS_DIVERGED) if the processes save
            different steps. The error of an earlier save, if not raised before, such as
            FencedError(FENCED) when a newer launch owns the run, or the storage's error after more
            than `Saving.failed_saves` consecutive failures. Other errors as `ckptfmt.save`.
        Spec: REQ-CMT-001 to REQ-CMT-009, REQ-RUN-004.
        """
        label = functools.partial(Labels.of, metrics, tags, suspect)
        to_home = (durability is not None and _asks_for_home(durability)) or suspect is not None
        if self._count.is_under_way and step is None:
            self._requested = label, to_home
            return None
        if not self._restored:
            self.restore()
        handle = self._save(step=step, must=False, label=label, to_home=to_home)
        if handle is None and (metrics or tags or suspect) and self._group.writer == 0:
            told = (
                "step %d is saved already, without these metrics and tags (pass them to"
                " ckptfmt.Run) or reason"
            )
            _LOG.warning(told, self.step)
        return handle

    def _end_step(
        self,
        step: int,
        total: int | None = None,
        *,
        label: Callable[[], Labels] | None = None,
        can_go_back: bool = True,
    ) -> SaveHandle | None:
        self._refuse_partly_loaded()
        more = self._tell(step)
        self._unsaved.note_counted(1 if more else 0)
        if self._rehearsal is not None and self._rehearsal.is_fatal(self.step):
            self._witness.flush()
            self._rehearsal.kill(self._handle)
        self._pace.beat()
        if not self._is_prepared:
            self._saves.begin_preparing(self._count.state, step=self.step)
            self._is_prepared = True
        is_over = self.stopped
        is_last = self.step == total
        # After a stop no further save is due: the stop has saved. Explicit requests are still met.
        requested = self._requested
        self._requested = None
        must = is_last or (self._healing is not None and self._healing.is_passed(step))
        will_save = (
            bool(requested)
            or must
            or (self._rehearsal is not None and self._rehearsal.save_at == step)
        )
        every = self._snapshot_every
        wants_snapshot = every is not None and self.step // every > (self.step - more) // every
        # The triggers are asked before a snapshot, too: the run goes back in this step.
        is_due = not is_over and self._pace.is_due(
            self.step, more, will_save=will_save or wants_snapshot
        )
        if self._goes_back_later and self._pace.asks_rewind:
            self._must_go_back = True
            return None
        if can_go_back and self._rewind_after_alarm():
            return None
        self.stopped |= self._pace.stopped
        label, to_home = requested or (label, False)
        if self.stopped and not is_over:
            self._save_and_stop(label)
            return self._handle
        handle = None
        if is_due or will_save:
            handle = self._save(must=must, label=label, to_home=to_home)
        elif wants_snapshot and not is_over:
            self._save(must=False, hold=True)
        self._pace.beat()
        if self._rehearsal is not None and self._rehearsal.is_over(self.step):
            self._close(SystemExit())
            self._rehearsal.end()
        return handle

    def _agree(self, step: int | None) -> bool:
        """Agree on the step between all processes, and return whether the step needs a save.

        Raises: StateError(ARGUMENT) as `save`, on all processes; LayoutError(WRITERS_DIVERGED).
        """
        error: CkptError | None = None
        try:
            self._count.check_known() if step is None else self._tell(step)
        except CkptError as caught:
            error = caught
        has_failed = self._handle is not None and self._handle.state == "FAILED"
        noticed, failure = self._pace.look()
        now = self._count.step
        answer = {
            "step": now,
            "done": self._saved_step == now,
            "failed": has_failed,
            "witness": self._witness.answer(),
            **noticed,
        }
        told = self._group.agree(error or failure, answer)
        # After a failure on any process, all processes may save the step again.
        is_new = any(theirs["failed"] or not theirs["done"] for theirs in told)
        self._witness.hear(told)
        self._pace.hear(now, told)
        if (
            self._healing is not None
            and self._healing.is_passed(now)
            and not self._pace.is_suspect
            and self.launch is not None
        ):
            self._witness.flush()
            self._healing.end_trouble(self.launch)
        return is_new

    def _save(
        self,
        *,
        must: bool,
        step: int | None = None,
        deadline_s: float | None = None,
        label: Callable[[], Labels] | None = None,
        to_home: bool = False,
        hold: bool = False,
    ) -> SaveHandle | None:
        """Save the agreed step, or take a snapshot that stays in memory (`hold`).

        Returns: the handle; None if the step is saved already, or an alarm forbids the save.
        """
        assert self.launch is not None and self._run is not None  # noqa: PT018, S101
        is_new = self._agree(step)
        pace = self._pace
        has_alarm = pace.alarm is not None
        if hold and has_alarm:  # the next step hears of the alarm
            return None
        self.stopped |= has_alarm
        if pace.gives_up() or not is_new:
            return None
        now = self._count.step
        if pace.is_suspect:  # the snapshot is from before the alarm, and a good save
            self._settle_snapshot(None)
        label = pace.doubt(label)
        place = (self._store, self._run, self.launch)
        ledger = pace.meters.ledger(now)
        handle = self._saves.save(
            self._count.state,
            SaveState.in_run(
                *place,
                step=now,
                retention=self._retention,
                ledger=ledger,
                signer=self._signer,
                pin=pin_of(self._trust),
                others=None if self._homes is None else self._homes.beside(self._home_number),
            ),
            must=must or has_alarm,
            deadline_s=deadline_s,
            label=label,
            to_home=to_home or has_alarm,
            on_event=self._on_save,
            hold=hold,
        )
        if hold:
            if handle.state != "SKIPPED":
                self._snapshot_step = now
                self._witness.note_saved(now, self._count.state)
                pace.meters.note_snapshot(handle)
                if self._group.writer_count == 1:  # written at the end
                    self._unsaved.note_saved()
            return handle
        self._unsaved.note_saved()
        if handle.state != "SKIPPED":
            self._snapshot_step = None
            self._handle = handle
            self._saved_step = now
            self._witness.note_saved(now, self._count.state)
            if self.launch.resume_from is None and self._short_rehearsal.note_saved(now, handle):
                add_report(
                    self._saves.reports,
                    f"NOT_REHEARSED: step {now} was saved before the steps to repeat",
                )
            pace.meters.note_save(handle)
        pace.note_save(next_step=now + 1)
        return handle

    def _save_and_stop(self, label: Callable[[], Labels] | None) -> None:
        """Save within the deadline of a stop. Later, the saver continues an uncommitted save."""
        try:
            self._save(must=True, deadline_s=self._pace.rest_s(self._deadline_s), label=label)
            if self._handle is not None:
                self._handle.wait(timeout_s=self._pace.rest_s(self._deadline_s))
        except CkptError as error:
            if error.code not in (Code.SLOTS_BUSY, Code.SAVE_PENDING):
                raise
            _LOG.warning("stopping at step %d without its save: %s", self.step, error)

    def _go_back(self) -> None:
        """Load this launch's first save into the live state, to repeat the later steps."""
        if self.stopped:
            return
        state = self._count.state
        first = self._short_rehearsal.first
        group = self._group
        assert self.launch is not None and first is not None  # noqa: PT018, S101
        obstacle = "Checks(witness=False), or a run in memory: no step is recorded"
        if self._witness.is_recording:
            obstacle = self._short_rehearsal.find_obstacle(state, timeout_s=self._deadline_s)
        told = group.agree(None, {"step": self.step, "obstacle": obstacle})
        obstacles = [theirs["obstacle"] for theirs in told if theirs["obstacle"]]
        if obstacles:
            add_report(self._saves.reports, f"NOT_REHEARSED: {obstacles[0]}")
            return
        store = self._store.at(self._short_rehearsal.name)
        with group.together(lambda: open_checkpoint(store)) as checkpoint, keep_iterators(state):
            report = load_once(state, checkpoint, group, **self._choices, share=self._share)
        report = claim_of_all(report, group)
        text = (
            "rehearsal: back from step %d to step %d, to do the steps between again: claim %s"
            " expected"
        )
        self._talk.say(text, self.step, first, report.claim)
        self._count.go_back(first)
        self._saved_step = first
        self._witness.go_back(self.launch, first, report.claim)

    def rewind(
        self, to: int | str | None = None, *, skip: bool = False, reason: str = ""
    ) -> LoadReport:
        """Go back to an earlier save in these processes, as the next launch of the run.

        Every process calls this method at the same step. The call waits for the saves in flight,
        records the next launch, and loads the save into the live objects as `restore` does. A
        snapshot of `Saving.snapshot_every` is written first, and is a save from then on.
        Gradients are dropped. Tensors come from the memory of the slots, if the save is still
        there, and else from the cache or the run. The RNG streams are put back when the next step
        begins, or by `restore_rng`. An alarm of `Stop.triggers` is forgotten.

        Within the body of `steps`, `epochs` or `training_step` the step isn't counted: leave the
        body at once, by ``continue`` or ``break``. `steps` and `epochs` go on from the save. The
        iterators of a `Sampler` in a loader without worker processes go on by themselves. Make all
        other iterators anew directly after the call, before the next step begins: making an
        iterator draws random numbers.

        Args:
            to: the number of steps to go back to, or less: the newest such save is taken; or the
                name of a checkpoint. Default: the newest save that isn't suspect.
            skip: whether to leave out the samples of the steps since the save, the step under way
                included. The samplers of the State record the skip, with the policy "shift".
            reason: explanation of the skip for readers of the cursor.

        Returns: the report of the load.
        Raises: IntegrityError(NOT_COMMITTED) if there is no save to go back to;
            CommitError(SAVE_PENDING); FencedError(FENCED) if a newer launch owns the run;
            StateError(ARGUMENT) before the first step, and for arguments that are wrong, or differ
            between the processes; as `restore`. After an error of the load the state is partly
            loaded, and the checkpointer refuses to save it.
        Spec: REQ-RUN-012.
        """
        self._go_back_to(to, reason=check_reason(reason) if skip else None)
        self.rewinds += 1
        assert self._load_report is not None  # noqa: S101
        return self._load_report

    def regroup(self, job: Job | None = None) -> LoadReport | None:
        """Go back to the newest save, together with processes that replace lost processes.

        After the loss of a process, each other process ends its process group, makes a group anew
        with the replacement, and calls this method. The replacement is a new process with the
        number of the lost process. It creates its `Checkpointer`, and calls `restore` (or enters
        the context) as at any start. All of them begin the next launch of the run, from the newest
        save. Tensors come from the memory of the slots. A process whose memory hasn't the save gets
        them from the memory of other processes by torch.distributed, and else from the cache or the
        run. If received contents differ from their digests, all processes read the cache or the
        run, and a note of the report begins with MEMORY_DAMAGED. Saves in flight have a quarter of
        `Job.deadline_s` to end, and are given up then.

        The call may be outside of the loop over `steps`, whose next call goes on from the save, or
        within the body of a step, as a call of `rewind`. Make iterators anew directly after the
        call. With `Job.lost`, a wait for a lost process ends before the deadline.

        After an error of `restore` or of this method, such as the loss of another process,
        the processes may call this method with the next group. Until then, no step ends, and no
        save is possible.

        Args:
            job: the processes of the job. Number of this process and number of processes stay the
                same. Default: the ``job=`` of this object, so that torch.distributed is asked
                again. A token in ``agree`` must be new.

        Returns: the report of the load, whose `reads` has the bytes from memory; None if this
            process hadn't begun a launch, and all processes start afresh.
        Raises: IntegrityError(NOT_COMMITTED) if there is no save to go back to;
            CommitError(WRITERS_MISSING) if a process doesn't come by the deadline;
            FencedError(FENCED) if a launch of other processes owns the run, as far as the homes
            that answer show;
            CommitError(SAVE_PENDING) if a snapshot is still being copied at the deadline;
            StateError(ARGUMENT) if this process has another number; as `restore`.
        Spec: REQ-RUN-004, REQ-RUN-012.
        """
        if self._is_closed:
            remedy = "Create a Checkpointer, and call restore(), as the replacement does."
            raise err(Code.ARGUMENT, "the checkpointer is closed", where="regroup()", remedy=remedy)
        if self._homes is not None and job is not None:
            _refuse_token(job)
        if job is None and isinstance(self._job.agree, str):
            remedy = "Give regroup(job=Job(writer=..., agree=NEW_TOKEN))."
            detail = "agree= is a token, which the lost process knew"
            raise err(Code.ARGUMENT, detail, where="regroup()", remedy=remedy)
        group = self._make_group(self._job if job is None else job, self._pace.signals.end_s)
        self._group.follow(group)
        if self.launch is None:
            return self.restore()
        self._restored = False
        self._is_touched = True
        self._pace.rest()
        count = self._count
        if count.is_under_way:
            count.end_body()
        keeps = not have_fetched_ahead(list(find_samplers(count.state)), self.step)
        kept, problem = attempt(lambda: self._saves.regroup(self._deadline_s / 4))
        snapshots, common = kept or ({}, [])
        self._witness.flush()
        self._note_begun(self.launch.launch)
        taken = self._take_launch(Survivor(common=common, problem=problem))
        self._short_rehearsal = ShortRehearsal(0, None)  # a replacement doesn't know of any
        self._load_taken(taken, snapshots, keeps=keeps)
        self._pace.forget_stop()
        self.stopped = False
        self.rewinds += 1
        return self._load_report

    def _note_begun(self, launch: int) -> None:
        self._newest_launch = max(self._newest_launch, launch)

    def _go_back_to(
        self, to: int | str | None, *, reason: str | None, is_alarm: bool = False
    ) -> None:
        """Go back to a save, and leave out the samples since the save if there is a reason.

        Args:
            to: see `rewind`.
            reason: reason for leaving out samples; None to leave out none.
            is_alarm: whether an alarm asks for this, so that a healer decides.
        """
        self._refuse_partly_loaded()
        if not (self._has_begun or self.rewinds) or self._is_closed:
            what = "the checkpointer is closed" if self._is_closed else "no step has begun"
            remedy = "restore() and steps() resume; call rewind() in a step, or after one."
            raise err(Code.ARGUMENT, what, where="rewind()", remedy=remedy)
        assert self.launch is not None  # noqa: S101
        own = self.launch.launch
        group = self._group
        state = self._count.state
        self._pace.rest()
        self._settle_snapshot(to)
        snapshots = group.together(
            lambda: self._saves.snapshots(self._pace.rest_s(self._deadline_s))
        )
        resume = group.run_on_first(lambda: choose_save(self._store, to, launch=own))
        step = self.step + self._count.is_under_way
        samplers = list(find_samplers(state))
        keeps = not have_fetched_ahead(samplers, step)
        mine = {
            "step": step,
            "to": repr(to),
            "skips": reason is not None,
            "attempts": sorted(name for name, (_, is_whole) in snapshots.items() if is_whole),
        }
        told = group.all_gather(mine)
        if any({**theirs, "attempts": None} != {**mine, "attempts": None} for theirs in told):
            detail = "the processes go back at different steps, or by different arguments"
            raise err(Code.WRITERS_DIVERGED, detail, where="rewind()")
        if self._healing is not None and not is_alarm:
            self._healing.give_up()
        reaches = group.together(lambda: note_reaches(state, step, skip=reason is not None))
        self._note_end()
        self._witness.flush()
        taken = take_launch(
            self._store,
            group,
            resume=self._ask_healer(resume, has_failed=True) if is_alarm else resume,
            writer_features=self._writer_features,
            deadline_s=self._deadline_s,
            cache=self._cache,
            trusted=set.intersection(*(set(theirs["attempts"]) for theirs in told)),
            after=own,
            signer=self._signer,
            require_signature=self._trust,
            homes=self._homes,
        )
        self._load_taken(taken, snapshots, keeps=keeps, reaches=reaches, reason=reason)
        if self._count.is_under_way:
            self._count.end_body()

    def _settle_snapshot(self, to: int | str | None) -> None:
        """Write the snapshot in memory before a rewind; drop it if `to` is another save."""
        step = self._snapshot_step
        self._snapshot_step = None
        is_wanted = step is not None and to is None
        with contextlib.suppress(TypeError):  # a name, or what `choose_save` refuses
            is_wanted |= step is not None and operator.index(to) >= step  # type: ignore[arg-type]
        self._saves.settle_held(self._pace.rest_s(self._deadline_s), write=is_wanted)

    def _load_taken(
        self,
        taken: Taken,
        snapshots: Mapping[str, tuple[Memory, bool]],
        *,
        keeps: bool,
        reaches: Iterable[Reach] = (),
        reason: str | None = None,
    ) -> None:
        """Go on as a launch that these processes have begun, from its checkpoint.

        Args:
            taken: the launch.
            snapshots: the contents in memory, as from `Saves.snapshots`.
            keeps: whether the iterators of the samplers go on by themselves.
            reaches: the reaches of the samplers before the load.
            reason: reason for leaving out the samples since the save; None to leave out none.
        """
        assert self.launch is not None and taken.checkpoint is not None  # noqa: PT018, S101
        checkpoint = taken.checkpoint
        state = self._count.state
        self._talk.say("launch %d goes back from step %d", self.launch.launch, self.step)
        ended = self._witness
        ended.close()
        self._saves.note_launch(list(ended.reports))
        self._witness = self._make_witness()
        self._pace.meters.note_rewind(self._store, taken, self.step)
        self._pace.forget_alarm()
        self.stopped = self._pace.stopped
        if self._checkpoint is not None:  # no step has begun since the last rewind
            self._checkpoint.close()
        self._adopt(taken)
        self._restored = self._has_begun = False
        self._is_touched = True
        self._handle = None
        self._requested = None
        self._snapshot_step = None
        drop_gradients(state)
        memory, _ = snapshots.get(checkpoint.manifest.origin.attempt, (None, False))
        with keep_iterators(state) if keeps else contextlib.nullcontext():
            self._load(checkpoint, state, memory, goes_back=True)
        self._pace.note_save()
        self._pace.meters.note_restored()
        for reach in reaches:
            reach.renew(reason)
        if self._healing is not None:
            self._healing.leave_out(state)
        self._needs_iterators = not keeps
        self._restored = True

    def _rewind_after_alarm(self) -> bool:
        """Go back after an alarm, if the triggers ask for it; return whether the run went back.

        Samples are left out if the samplers can. Without a save to go back to, the run stops.
        """
        heals = self._healing is not None
        newest = self._saved_step if self._snapshot_step is None else self._snapshot_step
        alarm = self._pace.find_alarm(newest, is_bounded=not heals)
        if alarm is None:
            return False
        reason = alarm if not heals and can_skip(self._count.state) else None
        try:
            self._go_back_to(None, reason=reason, is_alarm=True)
        except CkptError as error:
            if error.code not in (Code.NOT_COMMITTED, Code.HEALING_STOPPED):
                raise
            self._talk.say("the run stops: %s", error.detail, level=logging.WARNING)
            return False
        self.rewinds += 1
        return True

    def _refuse_partly_loaded(self) -> None:
        """Raise StateError(ARGUMENT) if an earlier load into the live state has failed."""
        if self._is_touched and not self._restored:
            detail = (
                "an earlier restore(), rewind() or regroup() failed: the live state is neither the"
                " checkpoint's nor a fresh one"
            )
            remedy = "Correct the cause of the first error, and start the process again."
            raise err(Code.ARGUMENT, detail, where="restore()", remedy=remedy)

    def _ask_healer(self, resume: str, *, has_failed: bool) -> str | Callable[[], str]:
        """Return the value of `resume=`, or a function for a healer's choice."""
        if self._healing is None or resume != "auto":
            return resume
        return functools.partial(self._healing.choose, self._state, has_failed=has_failed)

    def _take_launch(self, survivor: Survivor | None = None) -> Taken:
        if self._group.writer == 0:
            program_origin()  # before the checkout changes during the training
        if self._homes is not None:
            self._enter_home(self._homes, goes_on=survivor is not None)
        cache = self._cache
        nodes = None
        if cache is not None and cache.peers:
            nodes = meet_peers(cache.node, self._group, self._store)
        self._talk.open()
        taken = take_launch(
            self._store,
            self._group,
            resume=self._ask_healer(self._resume, has_failed=False),
            writer_features=self._writer_features,
            deadline_s=self._deadline_s,
            cache=cache,
            survivor=survivor,
            known=self._newest_launch,
            on_begun=self._note_begun,
            signer=self._signer,
            require_signature=self._trust,
            homes=self._homes,
        )
        if survivor is None:
            self._adopt(taken)
            self._pace.meters.note_launch(self._store, taken)
        if nodes is not None:
            self._saves.begin_replicas(taken.launch, nodes)
        return taken

    def _enter_home(self, homes: RunHomes, *, goes_on: bool) -> None:
        """Choose the home at which this launch begins, with the votes of a majority.

        Args:
            goes_on: whether this process goes on from an earlier launch; others may join it.
        """
        told = self._group.all_gather({"goes_on": goes_on, "known": self._newest_launch})
        if any(not isinstance(theirs, dict) or "goes_on" not in theirs for theirs in told):
            raise diverged()
        is_joined = any(theirs["goes_on"] for theirs in told)
        entry = self._group.run_on_first(
            lambda: dataclasses.asdict(
                homes.enter(
                    resume="auto" if is_joined else self._resume,
                    writer_features=(LABELS, *self._writer_features),
                    wait_s=self._deadline_s / 2,
                    after=max(theirs["known"] for theirs in told) if is_joined else None,
                )
            )
        )
        number = entry["number"]
        homes.adopt(entry["ids"])
        self._store = self._group.together(homes.homes[number].open)
        self._home_number = number
        self._saves.use_home(self._store, homes.beside(number))
        for sentence in entry["reports"]:
            add_report(self._saves.reports, sentence)
        if self._healing is not None:
            self._healing.use_home(self._store)

    def _adopt(self, taken: Taken) -> None:
        """Go on as a launch that these processes have begun; nothing is loaded yet."""
        self.launch = taken.launch
        self._run = taken.run
        self._checkpoint = taken.checkpoint
        self._lends = taken.lends
        self.passed_over += taken.passed_over
        self._saves.note_launch(taken.reports)
        for sentence in () if self._homes is None else self._homes.reports:
            add_report(self._saves.reports, f"HOME_BEHIND: {sentence}")
        self._saves.begin_copies(taken.run, taken.launch, self._retention)

    def _load(
        self,
        checkpoint: Checkpoint,
        state: State,
        memory: Memory | None = None,
        *,
        goes_back: bool = False,
    ) -> None:
        load = functools.partial(
            load_once,
            state,
            checkpoint,
            self._group,
            **self._choices,
            streams=False,
            share=self._share,
            goes_back=goes_back,
        )
        try:
            report = load(memory=memory, lends=self._lends)
        except DamagedMemoryError as error:
            self._saves.drop_snapshots()
            report = load()
            note = f"MEMORY_DAMAGED: each process has read the checkpoint's files: {error.detail}"
            report = dataclasses.replace(report, notes=(*report.notes, note))
        self._load_report = report
        carry_init(checkpoint, state, self._group)
        self._go_to(checkpoint, state)
        self._is_whole = True
        self._saved_step = checkpoint.step
        _LOG.debug(
            "step %d restored from %s; random-number streams come last", self.step, checkpoint.title
        )
        self._talk.tell_changed(self._load_report)

    def _go_to(self, checkpoint: Checkpoint, state: State) -> None:
        """Set the count to a loaded checkpoint's step; its RNG streams are put back later."""
        restore_rng = weakref.WeakMethod(self.restore_rng)

        def begin_streams() -> None:
            restore = restore_rng()
            if restore is not None:
                restore()

        self._count.go_to(checkpoint.step, mark_streams(state, self._group), begin_streams)

    def _begin_from(self, init: InitFrom, state: State) -> None:
        tries = LoadTries(self._group)
        while True:
            with tries:
                checkpoint = tries.open(
                    lambda: open_checkpoint(
                        init.path, digest=init.digest, require_signature=init.require_signature
                    )
                )
                self._load_report = init.load(state, checkpoint, self._group, share=self._share)
                break
        assert self.launch is not None  # noqa: S101
        if init.is_whole:
            self._checkpoint = checkpoint
            self._is_whole = True
            self._go_to(checkpoint, state)
        else:
            checkpoint.close()
            self._talk.tell_begun(self.launch, checkpoint.store.name, self.step, state)

    def _restore_streams(self, checkpoint: Checkpoint, state: State) -> None:
        group = self._group
        drawn = self._count.find_drawn()
        settled = () if self._load_report is None else self._load_report.settled
        found = group.together(
            lambda: restore_streams(
                state,
                checkpoint,
                worker=group.writer,
                worker_count=group.writer_count,
                settled=settled,
                **self._choices,
            )
        )
        checkpoint.close()
        self._checkpoint = None
        self._count.is_streamless = False
        assert self._load_report is not None  # noqa: S101
        # State outside of `State` isn't restored from any checkpoint: it lowers the claim.
        if self._needs_iterators and not all(one.has_iterators for one in find_samplers(state)):
            found = (*found, REMADE)
        self._needs_iterators = False
        found = (*drawn, *found, *self._saves.unsaved)
        self._load_report = claim_of_all(self._load_report.with_streams(found), self._group)
        assert self.launch is not None  # noqa: S101
        name = checkpoint.store.name
        source = (
            f"launch {checkpoint.manifest.origin.launch} ({name})"
            if self.launch.resume_from
            else name
        )
        self._talk.tell_resumed(self.launch, source, self._load_report, harmless=state.harmless)


def _asks_for_home(durability: object) -> bool:
    """Return whether a caller asks for a save to home.

    False for None, which leaves the choice open.

    Raises: StateError(ARGUMENT).
    """
    if durability not in (None, HOME):
        remedy = "Cache(upload_every=) says which saves stay in caches."
        raise err(
            Code.ARGUMENT,
            f"durability={durability!r} isn't {HOME!r}",
            where="durability=",
            remedy=remedy,
        )
    return durability == HOME


def _check_resume(resume: object) -> str:
    """Return the argument `resume`. Raises: StateError(ARGUMENT) if it isn't text."""
    if isinstance(resume, str):
        return resume
    detail = f"resume={resume!r} isn't 'auto', 'fresh', or the name or digest of a checkpoint"
    remedy = "Pass a name that `ckptfmt ls` lists, such as resume='step-00000035-l0003'."
    raise err(Code.ARGUMENT, detail, where="resume=", remedy=remedy)


def _check_function(on_save: object) -> Callable[[SaveEvent], object] | None:
    """Return the argument `on_save`. Raises: StateError(ARGUMENT) unless it is a function."""
    if on_save is None or callable(on_save):
        return on_save
    remedy = "Pass a function of a SaveEvent, such as on_save=print."
    raise err(Code.ARGUMENT, f"{on_save!r} isn't callable", where="on_save=", remedy=remedy)
