"""The class for a training loop: resume, saves during the training, retention of checkpoints."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, Literal, Self, SupportsFloat

from ckptfmt.adapters.load_plan import Allow, check_allow
from ckptfmt.api import open_checkpoint
from ckptfmt.delta.policy import DeltaOptions
from ckptfmt.documents.durability import HOME
from ckptfmt.documents.labels import Labels
from ckptfmt.documents.run import Launch, RunRecord
from ckptfmt.errors import CkptError, Code, err
from ckptfmt.features import REFERENCED
from ckptfmt.group import DEADLINE_S, Agree, Group, make_group
from ckptfmt.loading.agreement import LoadTries
from ckptfmt.loading.initial import InitFrom, carry_init
from ckptfmt.loading.load_report import LoadReport, claim_of_all
from ckptfmt.loading.restore import load_once, mark_streams, restore_streams
from ckptfmt.loop.launching import take_launch
from ckptfmt.loop.loop import StepCount, StopSignals, make_meters, parse_every
from ckptfmt.loop.pace import Pace
from ckptfmt.loop.rehearsal import Account, Rehearsal
from ckptfmt.loop.short_rehearsal import ShortRehearsal, keep_iterators
from ckptfmt.loop.talking import Talk
from ckptfmt.loop.uncounted import Unsaved
from ckptfmt.loop.witnessing import Witness, digest_outside_modules
from ckptfmt.read.reader import Checkpoint
from ckptfmt.run.node_cache import CacheOptions
from ckptfmt.run.retention import Retention
from ckptfmt.run.save_job import SaveState
from ckptfmt.saving.background import staging_thread_count
from ckptfmt.saving.handle import SaveHandle
from ckptfmt.saving.one_save import check_step
from ckptfmt.saving.peers import PeerOptions
from ckptfmt.saving.saves import SaveOptions, Saves, add_report
from ckptfmt.state import State, check_state
from ckptfmt.store import open_store
from ckptfmt.store.protocol import Store

if TYPE_CHECKING:
    from ckptfmt.loop.triggers import Triggers

_LOG: Final = logging.getLogger("ckptfmt")


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
            to save only at the end of `steps` and in calls of `save`; "auto" for the interval with
            the least waste, computed by process 0 from the measured cost of saves and the observed
            failures of launches. With `upload_every=`, "auto" chooses the intervals of the cache
            and of `run` separately. The log has the chosen interval.
        mtbf: mean time between failures that "auto" expects at first ("3h"); by default 50,700 h
            for each process.
        keep: number of the newest checkpoints to keep; None to keep all.
        keep_every: divisor of the steps whose checkpoints are kept as well.
        keep_best: a metric, "min" or "max", and a number: this many checkpoints, the best by the
            metric, are kept as well. A checkpoint saved without the metric doesn't count, unless
            `Run.set_metrics` has added the metric since. As long as no checkpoint has the metric,
            all checkpoints are kept, and the log says so. Pinned checkpoints are always kept.
        mirrors: other places to which process 0 copies the committed checkpoints, as `Run.mirror`
            does. `reports` has the failures of a mirror; the training goes on.
        cache: directory on a disk of this node (NVMe, tmpfs); other processes and runs may share
            the directory. A save is WRITTEN, and its slot is free, as soon as the cache has the
            files. The upload to `run` and the commit follow in the order of the saves; they
            continue after a temporary outage of `run`. A start first finishes the uploads that a
            killed process left in the cache, and reads the undamaged files from the cache. A
            failure after WRITTEN appears in the handle and in `reports`, and `close` raises it.
            No guarantee depends on the cache: the directory may be deleted at any time.
        cache_nbytes: greatest size of the cache in bytes; None to leave a tenth of the file system
            free. To make room, the saver removes saves that `run` already has, oldest first, and
            then waits for an upload.
        upload_every: period, in saves, of the saves whose files are all uploaded to `run`. The
            first and the last save of a start are among them. For the other saves, only the
            documents are committed in `run`; `close` uploads the files of the newest save, and so
            does the next start.
        peers: 1 to copy each WRITTEN save to the cache of a process on another node, through
            torch.distributed, in parallel with the training; 0 for no copy. After the loss of a
            node, a start finishes the replicated saves from the other caches. If the partner is
            gone, hangs for `deadline_s` or has no room, `reports` has a sentence about this, and
            each save goes to `run`.
        node: name of this node, by which `peers` distinguishes nodes; by default the host name.
        resume: "auto" to follow the run's lineage; "fresh" to start anew; otherwise the name or
            the manifest digest of a checkpoint, to roll the run back to this checkpoint.
        init_from: initial contents of a run without a checkpoint: path of a checkpoint or of
            another run, to load the weights; or an `InitFrom`, to choose the contents.
        allow: kinds of differences between the checkpoint and the live state to report instead of
            to refuse; see `ckptfmt.load`.
        strict: whether RNG streams of another number of processes are an error instead of a report.
        override: live values to keep although the checkpoint has other values. The claim is
            lowered, and the log has both values. Names as in the checkpoint, or patterns of names:
            ``"optimizer:group/lr"`` for an option of an optimizer's parameter groups,
            ``"extra:scheduler"`` for a value of `State.extra`. By default the saved value is
            taken.
        writer, agree: (number, count) of this process, and the exchange of small values between the
            processes; see `ckptfmt.save`.
        share: whether a block wanted by several processes is read by a single process, and sent to
            the rest through torch.distributed; see `ckptfmt.load`.
        deadline_s: longest wait for the other processes, for a free slot, and for the saves at the
            end, in seconds.
        saver: the writer: "process", a separate process that outlives this process; "thread", a
            thread of this process; "inline", the calling thread: `save` returns after the commit.
        overlap: whether the parameters and their optimizer state are copied during the next
            forward and backward pass, provided that the first save has shown that only the
            optimizer's step changes them.
        slots: number of snapshots for which shared memory is reserved.
        when_busy: "wait" or "skip": the behaviour of `save` while each slot holds a save that
            isn't WRITTEN.
        nice: increment of the niceness of the saver's process, and of the niceness of its session
            (the scheduler's autogroup).
        delta: "off" to write full checkpoints; "auto" to write only the changes where this is no
            slower than a full save; "smallest" to write the changes in the fewest bytes, for
            remote stores. Or a mapping with ``mode``, any of the three; ``full_every``, the period
            of full saves in saves (16), shorter where deltas don't pay; ``restore_budget``, the
            longest restore as a factor of the time that a full checkpoint takes (1.5);
            ``fields``, the fields in which changes are encoded; changed blocks of other fields are
            written unencoded.
        check_replicas: whether the processes that hold the same tensor of a mesh compare its
            digests at each save.
        failed_saves: number of consecutive saves that may fail because of the storage (full,
            unreachable, or with an I/O error) before the run ends with the error. Until then the
            training goes on, the log and `reports` have the failures, and the next due save tries
            again. 0 to end the run at the first failure. Any other failure ends the run in any
            case, and so does a failure of the last save.
        ledger: whether to record in the run how the time is spent, for `ckptfmt goodput` and
            `Run.goodput`.
        stop_on: signals to stop at, such as ``signal.SIGTERM``: the run is saved at the end of the
            step, `steps` ends, and `stopped` is true.
        stop_deadline_s: longest time for such a stop, in seconds. Also the longest wait for missing
            processes after a signal from torchrun, which sends the signal when a process is lost.
        triggers: conditions that stop the training, and the action that follows; see `Triggers`.
        witness: whether to record a few bytes of each step in the run, and to compare the steps
            repeated after a resume with their records. The claim T1 is then verified, or refuted
            with the first difference and its cause.
        rehearse: number of steps that `steps` repeats after the first save of a launch from
            nothing: the checkpoint is loaded into the live state, and the witness compares both
            passes. 0 for no repetition. `ckptfmt rehearse` is the rehearsal that kills processes.

    Attributes:
        step: number of training steps done. An assignment counts steps as `end_step` does, and
            saves nothing.
        launch: this start's record; None before `choose` or `restore`.
        passed_over: reasons, a sentence each, why checkpoints newer than the restored checkpoint
            weren't taken: invalid checkpoints, and saves that a living saver hadn't committed by
            the deadline.
        stopped: whether the run ends because of a signal, and is saved; or because of an alarm.

    Raises: StateError(ARGUMENT).
    """

    #: The save requested within the body of a step: a function that returns its labels, and whether
    #: its files go home. None without a request.
    _requested: tuple[Callable[[], Labels], bool] | None = None
    _handle: SaveHandle | None = None
    _saved_step: int | None = None
    _run: RunRecord | None = None
    #: The checkpoint from which this launch resumes; open until the RNG streams are restored.
    _checkpoint: Checkpoint | None = None
    launch: Launch | None = None
    _load_report: LoadReport | None = None
    passed_over: list[str]

    def __init__(
        self,
        run: str | os.PathLike[str] | Store,
        state: State | None = None,
        *,
        every: int | str | None = None,
        mtbf: str | None = None,
        keep: int | None = None,
        keep_every: int | None = None,
        keep_best: tuple[str, Literal["min", "max"], int] | None = None,
        mirrors: Iterable[str | os.PathLike[str] | Store] = (),
        cache: str | os.PathLike[str] | None = None,
        cache_nbytes: int | None = None,
        peers: int = 0,
        node: str | None = None,
        upload_every: int = 1,
        resume: str = "auto",
        init_from: str | os.PathLike[str] | Store | InitFrom | None = None,
        allow: Allow = (),
        strict: bool = False,
        override: Iterable[str] = (),
        writer: tuple[int, int] | None = None,
        agree: Agree = None,
        share: bool = False,
        deadline_s: float = DEADLINE_S,
        saver: Literal["process", "thread", "inline"] = "process",
        overlap: bool = True,
        slots: int = 2,
        when_busy: Literal["wait", "skip"] = "wait",
        nice: int = 0,
        delta: Literal["off", "auto", "smallest"] | Mapping[str, Any] = "off",
        check_replicas: bool = False,
        failed_saves: int = 10,
        ledger: bool = False,
        stop_on: Iterable[int] = (),
        stop_deadline_s: float = 30.0,
        triggers: Triggers | None = None,
        witness: bool = True,
        rehearse: int = 0,
    ) -> None:
        self._rehearsal = Rehearsal.from_environment()
        if self._rehearsal is not None:  # a rehearsal replaces only places and intervals
            run = self._rehearsal.place(run)
            every = self._rehearsal.every
            mtbf = None
            mirrors = ()
            cache = None
            cache_nbytes = None
            upload_every = 1
            peers = 0
            resume = "auto"
            witness = True
            rehearse = 0
        cadence = parse_every(every)
        signals = StopSignals(stop_on, deadline_s=stop_deadline_s)
        self._resume = resume
        self._init, self._retention = (
            InitFrom.of(init_from),
            Retention.of(keep, keep_every, keep_best),
        )
        options = SaveOptions(
            saver=saver,
            overlap=overlap,
            slots=slots,
            when_busy=when_busy,
            nice=nice,
            check_replicas=check_replicas,
            deadline_s=deadline_s,
            delta=DeltaOptions.of(delta),
            cache=CacheOptions.of(cache, cache_nbytes, upload_every),
            peers=PeerOptions.of(peers, node, has_cache=cache is not None),
            failed_saves=failed_saves,
        )
        self._peers = options.peers
        self._writer_features = () if options.delta.mode == "off" else (REFERENCED,)
        allowed = check_allow(allow)
        self._state = state
        self._share = share
        self._choices: dict[str, Any] = {"allow": allowed, "strict": strict, "override": override}
        self._store = open_store(run, writable=True)
        self._deadline_s = deadline_s
        self._cache = options.cache
        self._group: Group = make_group(
            writer, agree, self._store, deadline_s=deadline_s, stop_end_s=signals.end_s
        )
        meters = make_meters(every, mtbf, self._group, options.cache, ledger=ledger)
        self.passed_over = []
        self._count, self._pace = (
            StepCount(state),
            Pace(self._group, cadence, meters, signals, triggers),
        )
        self._short_rehearsal = ShortRehearsal(rehearse, every)
        is_rehearsed = self._rehearsal is not None
        self._witness = Witness(
            self._group, is_on=witness, kept_count=rehearse, is_thorough=is_rehearsed
        )
        self._saves, self._talk = (
            Saves(self._store, self._group, options, mirrors),
            Talk(self._group.writer),
        )
        self._unsaved = Unsaved(every, cadence, functools.partial(add_report, self._saves.reports))
        weakref.finalize(self, self._unsaved.end).atexit = False
        self._restored = self._is_touched = self._is_whole = self._has_begun = self._is_prepared = (
            self.stopped
        ) = False

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
        """The reason why `triggers` stopped the run; None without such a stop."""
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
        self._close(quietly=error is not None)

    def close(self) -> None:
        """Wait for the saves in flight, and release all resources.

        The last save is uploaded to the run first if only caches have its files.

        Raises: the error of a failed save, if not raised before; CommitError(SAVE_PENDING) if a
            save isn't finished by the deadline. A saver in a separate process continues the save.
        """
        self._close(quietly=False)

    def _close(self, *, quietly: bool) -> None:
        self._pace.end()
        if not quietly:
            self._unsaved.tell_at_exit()
        self._unsaved.end()
        self._pace.meters.note_closing()
        if self._checkpoint is not None:
            self._checkpoint.close()
            self._checkpoint = None
        try:
            self._saves.close(deadline_s=self._pace.rest_s(self._deadline_s), quietly=quietly)
        finally:
            self._pace.meters.close(self.step)
            self._witness.close()
            self._talk.close()
            if self._rehearsal is not None and self.launch is not None:
                self._rehearsal.give(self._store.name, self._account(self.launch))

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
        if self._is_touched:
            detail = (
                "an earlier restore() failed: the live state is neither the checkpoint's nor"
                " a fresh one"
            )
            remedy = "Correct what the first error named, and start the process again."
            raise err(Code.ARGUMENT, detail, where="restore()", remedy=remedy)
        checkpoint = self.choose()
        if checkpoint is not None:
            self._is_touched = True
            self._load(checkpoint, self._state)
        elif self._init is not None:
            self._is_touched = True
            self._begin_from(self._init, self._state)
        elif self.launch is not None:
            self._talk.tell_begun(self.launch, None, self.step, self._state)
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

    @property
    def step(self) -> int:
        """The number of training steps done.

        An assignment counts steps as `end_step` does, and saves nothing.
        """
        return self._count.step

    @step.setter
    def step(self, step: int) -> None:
        self.restore()
        self._tell(step)

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
        installs the handlers of `stop_on`. A second call has no effect.

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
        self._witness.begin(self._store, self.launch, step, self._load_report, self._count.state)

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
                self._witness.begin_step(self.step, self._count.state)
                with self._count.body():
                    yield self.step
                self._end_step(self.step + 1, total)
                if self._short_rehearsal.is_due(self.step):
                    self._go_back()
        finally:
            self._pace.rest()
        self._pace.end()

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
        self._witness.begin_step(self.step, self._count.state)
        with self._count.body():
            yield self.step
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
        return self._end_step(step, label=functools.partial(Labels.of, metrics, tags))

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
                `Run.best` and ``keep_best=``. The values of process 0 count. Pass metrics known
                only later to `Run.set_metrics`.
            tags: short strings; the values of process 0 count.
            suspect: a reason why the run doesn't go on from this save by itself, only by an
                explicit choice; the value of process 0 counts.
            durability: "home" to upload the files of this save to the run, regardless of
                `upload_every`; the value of process 0 counts.

        Raises: StateError(ARGUMENT) for a step below the number of steps done; without a step, if
            the steps aren't counted or the last step was left unfinished; and after a resume, if
            the RNG streams aren't restored. LayoutError(WRITERS_DIVERGED) if the processes save
            different steps. The error of an earlier save, if not raised before, such as
            FencedError(FENCED) when a newer launch owns the run, or the storage's error after more
            than `failed_saves` consecutive failures. Other errors as `ckptfmt.save`.
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
        self, step: int, total: int | None = None, *, label: Callable[[], Labels] | None = None
    ) -> SaveHandle | None:
        more = self._tell(step)
        self._unsaved.note_counted(1 if more else 0)
        if self._rehearsal is not None and self._rehearsal.is_fatal(self.step):
            self._witness.flush()
            self._rehearsal.kill(self._handle)
        self._pace.beat()
        if not self._is_prepared:
            self._saves.prepare(self._count.state, step=self.step)
            self._is_prepared = True
        is_over = self.stopped
        is_last = self.step == total
        # After a stop no further save is due: the stop has saved. Explicit requests are still met.
        requested = self._requested
        self._requested = None
        will_save = (
            bool(requested)
            or is_last
            or (self._rehearsal is not None and self._rehearsal.save_at == step)
        )
        is_due = not is_over and self._pace.is_due(self.step, more, will_save=will_save)
        self.stopped |= self._pace.stopped
        label, to_home = requested or (label, False)
        if self.stopped and not is_over:
            self._save_and_stop(label)
            return self._handle
        handle = (
            self._save(must=is_last, label=label, to_home=to_home) if is_due or will_save else None
        )
        self._pace.beat()
        if self._rehearsal is not None and self._rehearsal.is_over(self.step):
            self._close(quietly=True)
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
        self._witness.hear(told)
        self._pace.hear(now, told)
        # After a failure on any process, all processes may save the step again.
        return any(theirs["failed"] or not theirs["done"] for theirs in told)

    def _save(
        self,
        *,
        must: bool,
        step: int | None = None,
        deadline_s: float | None = None,
        label: Callable[[], Labels] | None = None,
        to_home: bool = False,
    ) -> SaveHandle | None:
        assert self.launch is not None and self._run is not None  # noqa: PT018, S101
        is_new = self._agree(step)
        pace = self._pace
        has_alarm = pace.alarm is not None
        self.stopped |= has_alarm
        if pace.gives_up() or not is_new:
            return None
        now = self._count.step
        label = pace.doubt(label)
        place = (self._store, self._run, self.launch)
        ledger = pace.meters.ledger(now)
        handle = self._saves.save(
            self._count.state,
            SaveState.in_run(*place, step=now, retention=self._retention, ledger=ledger),
            must=must or has_alarm,
            deadline_s=deadline_s,
            label=label,
            to_home=to_home or has_alarm,
        )
        self._unsaved.note_saved()
        if handle.state != "SKIPPED":
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
        obstacle = "witness=False, or a run in memory: no step is recorded"
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

    def _take_launch(self) -> None:
        nodes = None if self._peers is None else self._peers.meet(self._group, self._store)
        self._talk.open()
        taken = take_launch(
            self._store,
            self._group,
            resume=self._resume,
            writer_features=self._writer_features,
            deadline_s=self._deadline_s,
            cache=self._cache,
        )
        self.launch = taken.launch
        self._run = taken.run
        self._checkpoint = taken.checkpoint
        self.passed_over = taken.passed_over
        self._pace.meters.note_launch(self._store, taken)
        self._saves.take_reports(taken.reports)
        if nodes is not None:
            self._saves.begin_replicas(taken.launch, nodes)

    def _load(self, checkpoint: Checkpoint, state: State) -> None:
        self._load_report = load_once(
            state, checkpoint, self._group, **self._choices, streams=False, share=self._share
        )
        carry_init(checkpoint, state, self._group)
        self._count.go_to(checkpoint.step, mark_streams(state, self._group))
        self._is_whole = True
        self._saved_step = checkpoint.step
        _LOG.debug(
            "step %d restored from %s; random-number streams come last", self.step, checkpoint.title
        )
        self._talk.tell_changed(self._load_report)

    def _begin_from(self, init: InitFrom, state: State) -> None:
        tries = LoadTries(self._group)
        while True:
            with tries:
                checkpoint = tries.open(lambda: open_checkpoint(init.path, digest=init.digest))
                self._load_report = init.load(state, checkpoint, self._group, share=self._share)
                break
        assert self.launch is not None  # noqa: S101
        if init.is_whole:
            self._checkpoint = checkpoint
            self._is_whole = True
            self._count.go_to(checkpoint.step, mark_streams(state, self._group))
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
        remedy = "upload_every= says which saves stay in caches."
        raise err(
            Code.ARGUMENT,
            f"durability={durability!r} isn't {HOME!r}",
            where="durability=",
            remedy=remedy,
        )
    return durability == HOME
