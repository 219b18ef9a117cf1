"""The training loop's one class: resume, save as the loop goes, keep what is worth keeping."""

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
from ckptfmt.documents.durability import asks_for_home
from ckptfmt.documents.labels import Labels
from ckptfmt.documents.run import Launch, RunRecord
from ckptfmt.errors import CkptError, Code, err
from ckptfmt.features import REFERENCED
from ckptfmt.group import DEADLINE_S, Agree, Group, make_group
from ckptfmt.read.reader import Checkpoint
from ckptfmt.run.node_cache import CacheOptions
from ckptfmt.run.retention import Retention
from ckptfmt.state import State, check_state
from ckptfmt.store import open_store
from ckptfmt.store.protocol import Store
from ckptfmt.trainer.background import staging_thread_count
from ckptfmt.trainer.handle import SaveHandle
from ckptfmt.trainer.initial import InitFrom, carry_init
from ckptfmt.trainer.launching import take_launch
from ckptfmt.trainer.loop import StepCount, StopSignals, make_meters, parse_every
from ckptfmt.trainer.one_save import check_step
from ckptfmt.trainer.pace import Pace
from ckptfmt.trainer.peers import PeerOptions
from ckptfmt.trainer.rehearsal import Account, Rehearsal
from ckptfmt.trainer.restore import LoadReport, claim_of_all, load_anew, load_once, mark_streams, restore_streams
from ckptfmt.trainer.saves import SaveOptions, Saves, Target, add_report
from ckptfmt.trainer.short_rehearsal import ShortRehearsal, keep_iterators
from ckptfmt.trainer.talking import Talk
from ckptfmt.trainer.uncounted import Unsaved
from ckptfmt.trainer.witnessing import Witness, digest_outside_modules

if TYPE_CHECKING:
    from ckptfmt.trainer.triggers import Triggers

_LOG: Final = logging.getLogger("ckptfmt")


class Checkpointer:
    """Resume a run and save it as it goes.

    Every process of the job makes one, with the same arguments, and runs the same loop. Writer 0 decides whatever must
    be the same on all (what to resume from, when to save) and tells the others; no process decides by its own clock.

    There are three kinds of loops. `steps` is a whole one. `training_step` is a context around each step of a loop of
    the program's own. A program that counts its steps, such as a framework's callback, calls `end_step` after each of
    them, or `save` with ``step=`` to save at once. RNG streams are put back when the first step begins, or when
    `restore_rng` is called; until then nothing may be counted, and T1 isn't claimed.

    A framework that needs the checkpoint before it builds the objects of its state calls `choose` first, then `restore`
    with the state, then `restore_rng` once the iterators exist.

    Args:
        run: directory of the run, made if missing; or a store rooted there.
        state: the objects to save and restore; left out where `restore` gets it, because its objects are built later.
        every: save after so many steps (an int), or after so much time ("90s", "5min", "1h"); None to save only at
            the end of `steps` and when `save` is called; "auto" for the interval that wastes the least, as process 0
            measures what saves cost and how often launches failed; with `upload_every=` for caches and `run` apart; the
            log says what is chosen.
        mtbf: the time between failures that "auto" expects at first ("3h"), by default 50,700 h for each process.
        keep: how many of the newest checkpoints stay; None for all.
        keep_every: checkpoints of steps divisible by this stay as well.
        keep_best: a metric, "min" or "max", and a number: so many of those that are best by that metric stay as well.
            One that was saved without the metric isn't among them, unless `Run.set_metrics` has given it since. As
            long as no checkpoint has it, all stay, and the log says so. Pinned checkpoints stay, too.
        mirrors: other places to which process 0 copies what is committed, as `Run.mirror` does; what fails there is
            told by `reports`, and the training goes on.
        cache: a directory on a disk of this node (NVMe, tmpfs), which other processes and runs may share. A save is
            WRITTEN, and its slot free, once it is there; it goes to `run` and is committed behind that, in the order of
            saves, as long as `run` doesn't answer for a while, too. A start first finishes what a killed one left
            there, and reads from there what is whole. A failure behind WRITTEN is told by the handle and by
            `reports`, and raised by `close`. The directory is never relied on: it may be deleted at any time.
        cache_nbytes: how large it may become, in bytes; None to leave a tenth of its file system free. Saves that
            `run` has go first, the oldest of them; then the saver waits for an upload.
        upload_every: of so many saves one goes to `run` in full, the first of a start and its last among them. The
            others are committed there by their documents; `close` brings home the newest of them, and so does a start.
        peers: 1 to copy what is WRITTEN to the cache of a process of another node, through torch.distributed, beside
            the training: after the loss of a node, a start finishes from other caches what had a replica. Where a
            partner is gone, hangs for `deadline_s` or has no room, `reports` says so, and each save goes to `run`.
        node: the name of this node, by which `peers` tells nodes apart; the host's name by default.
        resume: "auto" to follow the run's lineage; "fresh" to start anew; else name or manifest digest of a checkpoint,
            which rolls the run back to it.
        init_from: the beginning of a run that has no checkpoint yet: path of a checkpoint or of another run, of which
            the weights are taken; or an `InitFrom`, which says what is taken.
        allow, strict: as for `ckptfmt.load`.
        override: live values that are kept, though others were saved; the claim falls, and the log has both values.
            Names as in the checkpoint, or patterns of them: ``"optimizer:group/lr"`` for an option of an optimizer's
            parameter groups, ``"extra:scheduler"`` for a value of `State.extra`. By default the saved one is taken.
        writer, agree: as for `ckptfmt.save`.
        share: as for `ckptfmt.load`.
        deadline_s: how long the processes wait for each other, for a free slot, and for saves at the end, in seconds.
        saver: the writer: "process", a process of its own, which outlives this one; "thread", a thread of this
            process; "inline", this thread: `save` returns when the checkpoint is committed.
        overlap: whether parameters and their optimizer's state are copied beside the next forward and backward pass,
            where a first save has shown that only the optimizer's step changes them.
        slots: how many snapshots there is shared memory for.
        when_busy: "wait" or "skip": what `save` does when every slot holds a save that isn't written yet.
        nice: the number that the saver's process adds to its niceness, and to that of its session.
        delta: "off"; "auto": only what changed is written where that is no slower than everything; "smallest": what
            changed is written in the fewest bytes, for stores that are far away. Or a mapping with ``mode``, one of
            these; ``full_every``: every so many saves one is full (16), sooner where deltas don't pay;
            ``restore_budget``: how much longer a restore may take than that of a full checkpoint, as a factor (1.5);
            ``fields``: those whose changes are encoded, where changes of others are written as they are.
        check_replicas: whether processes that hold the same tensor of a mesh compare it, by digest, at each save.
        failed_saves: how many saves in a row may fail because of the storage (it is full, is away, or reports an error)
            before the run ends with the error. Until then the training goes on, the log and `reports` say so, and the
            next save that is due tries again. 0 to end at the first. Other failures end the run in any case, and so
            does that of the last save.
        ledger: whether to record where the time goes, in the run, for `ckptfmt goodput` and `Run.goodput`.
        stop_on: signals, such as ``signal.SIGTERM``, after which the run is saved at the end of the step, `steps` ends,
            and `stopped` is true.
        stop_deadline_s: how long that may take, in seconds; also the longest wait for processes that don't come any
            more, where the signal is torchrun's, since one of them was lost.
        triggers: `Triggers`, which notice that the training goes wrong, and say what then happens.
        witness: whether to record a few bytes of each step beside the run, and to compare the steps that are done again
            behind a resume: the claim T1 is then verified, or refuted with the first difference and its cause.
        rehearse: the number of steps that `steps` does twice behind the first save of a launch that begins from
            nothing: the checkpoint is loaded into the live state, and the witness compares both times. 0 for none.
            `ckptfmt rehearse` is the rehearsal that kills processes.

    Attributes:
        step: training steps done. To assign it says so, as `end_step` does, and saves nothing.
        launch: this start's record; None before `choose` or `restore`.
        passed_over: why newer ones than the restored checkpoint weren't taken, a sentence each: checkpoints that aren't
            valid, and saves that a living saver hadn't committed by the deadline.
        stopped: whether the run ends because of a signal, and is saved; or because of an alarm.

    Raises: StateError(ARGUMENT).
    """

    #: What returns the labels of the save that a body asked for, and whether it goes home; None where none did.
    _requested: tuple[Callable[[], Labels], bool] | None = None
    _handle: SaveHandle | None = None
    _saved_step: int | None = None
    _run: RunRecord | None = None
    #: The checkpoint that this launch resumes from; open until the RNG streams are put back.
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
        if self._rehearsal is not None:  # the program's options hold, but for places and the interval of saves
            run, every, mtbf = self._rehearsal.place(run), self._rehearsal.every, None
            mirrors, cache, cache_nbytes, upload_every, peers = (), None, None, 1, 0
            resume, witness, rehearse = "auto", True, 0
        cadence, signals, self._resume = parse_every(every), StopSignals(stop_on, deadline_s=stop_deadline_s), resume
        self._init, self._retention = InitFrom.of(init_from), Retention.of(keep, keep_every, keep_best)
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
        self._peers, self._writer_features = options.peers, () if options.delta.mode == "off" else (REFERENCED,)
        allowed, self._state, self._share = check_allow(allow), state, share
        self._choices: dict[str, Any] = {"allow": allowed, "strict": strict, "override": override}
        self._store, self._deadline_s, self._cache = open_store(run, writable=True), deadline_s, options.cache
        self._group: Group = make_group(writer, agree, self._store, deadline_s=deadline_s, stop_end_s=signals.end_s)
        meters, self.passed_over = make_meters(every, mtbf, self._group, options.cache, ledger=ledger), []
        self._count, self._pace = StepCount(state), Pace(self._group, cadence, meters, signals, triggers)
        self._short_rehearsal = ShortRehearsal(rehearse, every)
        is_rehearsed = self._rehearsal is not None
        self._witness = Witness(self._group, is_on=witness, kept_count=rehearse, is_thorough=is_rehearsed)
        self._saves, self._talk = Saves(self._store, self._group, options, mirrors), Talk(self._group.writer)
        self._unsaved = Unsaved(every, cadence, functools.partial(add_report, self._saves.reports))
        weakref.finalize(self, self._unsaved.end).atexit = False
        self._restored = self._is_touched = self._is_whole = self._has_begun = self._is_prepared = self.stopped = False

    @property
    def reports(self) -> tuple[str, ...]:
        """Sentences on what saves do otherwise than was asked for, such as fewer slots for want of memory."""
        return (*self._saves.reports, *self._witness.reports)

    @property
    def load_report(self) -> LoadReport | None:
        """The report of restoring, or of loading what the run begins from; None if there was neither.

        It claims T1 once the RNG streams are put back, at the earliest. Its claim is expected until steps that are done
        twice were compared; then it is verified, or refuted.
        """
        return self._witness.update(self._load_report)

    @property
    def alarm(self) -> str | None:
        """Why `triggers` stopped the run; None if they didn't."""
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
        """Wait for the saves in flight, bring home the last one if it is in caches alone, and let go of what is held.

        Raises: the error of a save that failed, if it wasn't raised yet; CommitError(SAVE_PENDING) if a save isn't over
            by the deadline: a saver in a process of its own goes on with it.
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
        """Return the account of this process, for a rehearsal."""
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
        """Take the next launch of the run, and return the checkpoint that it resumes from; nothing live is changed.

        `restore` does this, too. Call it before, on every process, to read from the checkpoint what must be known
        before the state's objects exist: its `step`, ``store.name`` (its path), plain values by `leaf`, tensors.
        Process 0 has waited for living savers, has passed over what is damaged, and has verified every byte of it.
        To load a part of it earlier than the rest, such as the model that an optimizer is made for, pass that path to
        `ckptfmt.load`, with a `State` of that part; `restore` then loads everything.

        Returns: the checkpoint, which the checkpointer closes; None for a fresh start. A second call returns the same.
        Raises: IntegrityError(NO_VALID_CHECKPOINT); StoreError; StateError(ARGUMENT) once RNG streams were put back.
        Spec: REQ-RUN-002, REQ-RUN-006, REQ-RUN-007, REQ-RUN-018.
        """
        if self.launch is None:
            self._take_launch()
        elif self._checkpoint is None and self.launch.resume_from is not None:
            remedy = "Call choose() before restore_rng() and the first step; launch.resume_from names the checkpoint."
            raise err(Code.ARGUMENT, "the run has gone on already", where="choose()", remedy=remedy)
        return self._checkpoint if self.launch is not None and self.launch.resume_from is not None else None

    def restore(self, state: State | None = None) -> LoadReport | None:
        """Load what this launch resumes from; entering the context does it, unless no state was given yet.

        `choose` is called, where nobody did. RNG streams are put back later, when the first step begins, since making
        an iterator draws from them.

        Args:
            state: the objects to save and restore, where `Checkpointer` wasn't given them.

        Returns: the report; None after a fresh start.
        Raises: as `choose`; StateError; LayoutError.
        """
        if state is not None and state is not self._state:
            self._take_state(state)
        if self._restored:
            return self.load_report
        if self._state is None:
            remedy = "Pass it to Checkpointer, or to restore() once its objects exist, before the first step."
            raise err(Code.ARGUMENT, "there is no state to restore and save", where="state=", remedy=remedy)
        if self._is_touched:
            detail = "an earlier restore() failed: the live state is neither the checkpoint's nor a fresh one"
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
            raise err(Code.ARGUMENT, "another state was given before", where="restore(state)", remedy=remedy)
        self._state = self._count.state = state

    @property
    def step(self) -> int:
        """Training steps done. To assign it says so, as `end_step` does, and saves nothing."""
        return self._count.step

    @step.setter
    def step(self, step: int) -> None:
        self.restore()
        self._tell(step)

    def _tell(self, step: int) -> int:
        """Count steps, which the witness records; return how many more they are. Raises: as `StepCount.tell`."""
        more = self._count.tell(step)
        if more:
            self._witness.end_step(self.step, self._count.state, is_single=more == 1)
        return more

    def restore_rng(self) -> None:
        """Put the RNG streams back: now, and not when the first step begins. Every process calls it.

        Making an iterator draws from the RNG streams, and so may fetching a batch. Call this where the undisturbed run
        saved: within an epoch once the iterator exists and has left out what was trained already, before the first
        batch is fetched; between two epochs before the next one's iterator is made. It also makes ready for saves,
        since to ask an object for its state may draw, and catches `stop_on`. A second call does nothing.

        Raises: as `restore` and `prepare`; StateError(STREAM_MISSING, STREAM_UNEXPECTED).
        """
        self.restore()
        if self._has_begun:
            return
        # What a fresh optimizer will hold isn't known before its first step: its slots are made then.
        self._is_prepared = self._is_whole
        ready = self._saves.prepare if self._is_prepared else self._saves.check
        ready(self._count.state, step=self.step)
        if self._checkpoint is not None:
            assert self._state is not None  # noqa: S101 - restore() refuses to go on without
            self._restore_streams(self._checkpoint, self._state)
        self._pace.begin()
        self._pace.meters.note_begun(self.step)
        self._has_begun = True
        assert self.launch is not None  # noqa: S101 - restore() takes one
        self._witness.begin(self._store, self.launch, self.step, self._load_report, self._count.state)

    def _begin_itself(self) -> None:
        """Put the RNG streams back as the first step begins, where the program didn't."""
        self._unsaved.note_counted(0)
        if not self._has_begun:
            self._witness.restores_streams_itself = True
            self.restore_rng()

    def steps(self, total: int) -> Iterator[int]:
        """Yield the number of each step still to do, from the steps done up to `total`; save after the loop's body.

        Before the first one everything is prepared (what can't be saved is refused here, before any training is lost),
        and the RNG streams are put back. After the last one the run is saved, if it isn't.

        Raises: as `restore` and `save`; StateError(ARGUMENT) for a total that isn't a number of steps.
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
        """Hold one step of a loop of one's own; on the way out the step is done, and is saved if that is due.

        The context's value is the number of the step. The first one prepares what `steps` prepares, and puts the
        RNG streams back: let what a step draws, its batch included, be drawn within. A step that an exception
        ends isn't done; Python can't tell one that ``break`` ends from others, so that one is. After the loop, `save`
        saves the last step; `stopped` says when to leave early.

        Raises: as `restore` and `save`.
        """
        self._begin_itself()
        self._witness.begin_step(self.step, self._count.state)
        with self._count.body():
            yield self.step
        self._end_step(self.step + 1)

    def observe(self, *, loss: object = None, grad_norm: object = None, batch: object = None) -> None:
        """Show numbers of the step that is under way to the witness, which compares all their bits.

        Losses tell the cause of a difference: a step with the same samples and another loss has a state that isn't in
        `State`. A step that calls it several times, such as once for each micro-batch, shows all of them in order.
        Numbers belong to the step that is counted next; where several are counted at once they are dropped.

        Args:
            loss: a number, or a tensor of one element; one on a device isn't waited for.
            grad_norm: the norm of the gradients; likewise.
            batch: tensors, or containers of tensors, of which chosen elements are compared.

        Raises: StateError(ARGUMENT) for a loss or a norm that is no number.
        """
        self._witness.observe(loss=loss, grad_norm=grad_norm, batch=batch)

    def end_step(
        self, step: int, *, metrics: Mapping[str, SupportsFloat] | None = None, tags: Iterable[str] = ()
    ) -> SaveHandle | None:
        """Say that so many steps are done, over the whole run: for loops that count them, such as a framework's.

        Samplers in the state commit; the run is saved if that is due or if it is to stop; then `stopped` says so. To
        say a number again does nothing, so that callbacks of each micro-batch may call it. Call `restore_rng` before
        the first step. Call this after what belongs to the step and draws random numbers, such as an evaluation: a
        resume doesn't do again what came before the save, and does what came after it.

        Args:
            step: training steps done.
            metrics, tags: of the save, if there is one; as for `save`.

        Returns: the save, if there is one.
        Raises: as `save`.
        """
        self.restore()
        self._count.check(step)
        if step == self.step:
            return None
        self.restore_rng()
        return self._end_step(step, label=functools.partial(Labels.of, metrics, tags))

    def prepare(self) -> None:
        """Make ready for saves: check the state, make and touch slots, start the saver.

        The first step and the first save do it; call it to choose the moment. Every process calls it.

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
        """Begin a save; every process calls it at the same step. None if this step is saved already.

        Tensors that the optimizers' steps change are copied beside the training where that was seen to be safe; all
        else is copied when this returns. Writing goes on beside the training: the handle tells how far it is, and waits
        for it.

        Within the body of `steps` or `training_step` the step isn't over: there the save is taken as soon as the body
        ends, and this returns None. A body that is left by an exception, or that of `steps` by ``break``, is no step,
        and isn't saved.

        Args:
            step: training steps done, over the whole run; samplers in the state commit. Left out where they are counted
                here already.
            metrics: finite numbers by name, such as ``{"eval_loss": 2.31}``, by which `Run.best` and ``keep_best=``
                choose; those of process 0 count. Metrics that are known later go to `Run.set_metrics`.
            tags: short strings; likewise.
            suspect: a reason why the run isn't to go on from this save unless somebody chooses it; likewise.
            durability: "home" for a save whose files go home, whatever `upload_every` says; likewise.

        Raises: StateError(ARGUMENT) for a step before those that are done; without a step, where nobody counts them or
            the last one was left half-way; and after a resume whose RNG streams weren't put back;
            LayoutError(WRITERS_DIVERGED) if the processes save different steps. The error of an earlier save, if it
            wasn't raised yet, such as FencedError(FENCED) when a newer launch owns the run, or that of the storage when
            more than `failed_saves` in a row have failed; others as `ckptfmt.save`.
        Spec: REQ-CMT-001 to REQ-CMT-009, REQ-RUN-004.
        """
        label = functools.partial(Labels.of, metrics, tags, suspect)
        to_home = asks_for_home(durability) or suspect is not None
        if self._count.is_under_way and step is None:
            self._requested = label, to_home
            return None
        self.restore()
        handle = self._save(step=step, must=False, label=label, to_home=to_home)
        if handle is None and (metrics or tags or suspect) and self._group.writer == 0:
            told = "step %d is saved already, without these metrics and tags (pass them to ckptfmt.Run) or reason"
            _LOG.warning(told, self.step)
        return handle

    def _end_step(
        self, step: int, total: int | None = None, *, label: Callable[[], Labels] | None = None
    ) -> SaveHandle | None:
        more = self._tell(step)
        self._unsaved.note_counted(1 if more else 0)
        if self._rehearsal is not None and self._rehearsal.is_fatal(self.step):
            self._rehearsal.kill(self._handle)
        self._pace.beat()
        if not self._is_prepared:
            self._saves.prepare(self._count.state, step=self.step)
            self._is_prepared = True
        is_over, is_last = self.stopped, self.step == total
        # Who goes on after a stop has a checkpoint of it, and asks for any other.
        requested, self._requested = self._requested, None
        will_save = bool(requested) or is_last or (self._rehearsal is not None and self._rehearsal.save_at == step)
        is_due = not is_over and self._pace.is_due(self.step, more, will_save=will_save)
        self.stopped |= self._pace.stopped
        label, to_home = requested or (label, False)
        if self.stopped and not is_over:
            self._save_and_stop(label)
            return self._handle
        handle = self._save(must=is_last, label=label, to_home=to_home) if is_due or will_save else None
        self._pace.beat()
        if self._rehearsal is not None and self._rehearsal.is_over(self.step):
            self._close(quietly=True)
            self._rehearsal.end()
        return handle

    def _agree(self, step: int | None) -> bool:
        """Count on all processes alike, and return whether the step is still to be saved.

        Raises: StateError(ARGUMENT) as `save`, on all processes; LayoutError(WRITERS_DIVERGED).
        """
        error: CkptError | None = None
        try:
            self._count.check_known() if step is None else self._tell(step)
        except CkptError as caught:
            error = caught
        has_failed = self._handle is not None and self._handle.state == "FAILED"
        noticed, failure = self._pace.look()
        answer = {"step": self.step, "done": self._saved_step == self.step, "failed": has_failed, **noticed}
        answer["witness"] = self._witness.answer()
        told = self._group.agree(error or failure, answer)
        self._pace.hear(self.step, told)
        self._witness.hear([theirs["witness"] for theirs in told])
        # A step whose save failed, on any process, may be saved again, by all.
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
        assert self.launch is not None and self._run is not None  # noqa: S101, PT018 - restore() sets both
        is_new = self._agree(step)
        self.stopped |= self.alarm is not None
        if self._pace.gives_up() or not is_new:
            return None
        place, ledger = (self._store, self._run, self.launch), self._pace.meters.ledger(self.step)
        target = Target.in_run(*place, step=self.step, retention=self._retention, ledger=ledger)
        handle = self._saves.save(
            self._count.state,
            target,
            step=self.step,
            must=must or self.alarm is not None,
            deadline_s=deadline_s,
            label=self._pace.doubt(label),
            to_home=to_home or self.alarm is not None,
        )
        self._unsaved.note_saved()
        if handle.state != "SKIPPED":
            self._handle, self._saved_step = handle, self.step
            self._witness.note_saved(self.step, self._count.state)
            if self.launch.resume_from is None:
                self._short_rehearsal.note_saved(self.step, handle)
            self._pace.meters.note_save(handle)
        self._pace.note_save(next_step=self.step + 1)
        return handle

    def _save_and_stop(self, label: Callable[[], Labels] | None) -> None:
        """Save within the deadline of a stop; what isn't committed by then is left to the saver."""
        try:
            self._save(must=True, deadline_s=self._pace.rest_s(self._deadline_s), label=label)
            if self._handle is not None:
                self._handle.wait(timeout_s=self._pace.rest_s(self._deadline_s))
        except CkptError as error:
            if error.code not in (Code.SLOTS_BUSY, Code.SAVE_PENDING):
                raise
            _LOG.warning("stopping at step %d without its save: %s", self.step, error)

    def _go_back(self) -> None:
        """Load the first save of this launch into the live state, so that the steps behind it are done again."""
        state, first, group = self._count.state, self._short_rehearsal.first, self._group
        assert self.launch is not None and first is not None  # noqa: S101, PT018 - a save was made
        obstacle = "witness=False, or a run in memory: no step is recorded"
        if self._witness.is_recording:
            obstacle = self._short_rehearsal.find_obstacle(state, timeout_s=self._deadline_s)
        told = group.agree(None, {"step": self.step, "obstacle": obstacle})
        obstacles = [theirs["obstacle"] for theirs in told if theirs["obstacle"]]
        if obstacles:
            add_report(self._saves.reports, f"NOT_REHEARSED: {obstacles[0]}")
            return
        path = self._short_rehearsal.path
        with group.together(lambda: open_checkpoint(path)) as checkpoint, keep_iterators(state):
            report = load_once(state, checkpoint, group, **self._choices, share=self._share)
        report = claim_of_all(report, group)
        text = "rehearsal: back from step %d to step %d, to do the steps between again: claim %s expected"
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
        self.launch, self._run, self._checkpoint = taken.launch, taken.run, taken.checkpoint
        self.passed_over = taken.passed_over
        self._pace.meters.note_launch(self._store, taken)
        self._saves.take_reports(taken.reports)
        if nodes is not None:
            self._saves.begin_replicas(taken.launch, nodes)

    def _load(self, checkpoint: Checkpoint, state: State) -> None:
        self._load_report = load_once(state, checkpoint, self._group, **self._choices, streams=False, share=self._share)
        carry_init(checkpoint, state, self._group)
        self._count.go_to(checkpoint.step, mark_streams(state, self._group))
        self._is_whole, self._saved_step = True, checkpoint.step
        _LOG.debug("step %d restored from %s; random-number streams come last", self.step, checkpoint.title)
        self._talk.tell_changed(self._load_report)

    def _begin_from(self, init: InitFrom, state: State) -> None:
        checkpoint, self._load_report = load_anew(
            self._group,
            lambda: open_checkpoint(init.path, digest=init.digest),
            lambda found: (found, init.load(state, found, self._group, share=self._share)),
        )
        assert self.launch is not None  # noqa: S101 - restore() chooses first
        if init.is_whole:
            self._checkpoint, self._is_whole = checkpoint, True
            self._count.go_to(checkpoint.step, mark_streams(state, self._group))
        else:
            checkpoint.close()
            self._talk.tell_begun(self.launch, checkpoint.store.name, self.step, state)

    def _restore_streams(self, checkpoint: Checkpoint, state: State) -> None:
        group, drawn = self._group, self._count.find_drawn()
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
        assert self._load_report is not None  # noqa: S101 - what has RNG streams to put back was loaded
        # Objects of this launch that no State holds go on from elsewhere, whatever the checkpoint had.
        found = (*drawn, *found, *self._saves.unsaved)
        self._load_report = claim_of_all(self._load_report.with_streams(found), self._group)
        assert self.launch is not None  # noqa: S101 - restore() chooses first
        name = checkpoint.store.name
        source = f"launch {checkpoint.manifest.origin.launch} ({name})" if self.launch.resume_from else name
        self._talk.tell_resumed(self.launch, source, self._load_report, harmless=state.harmless)
