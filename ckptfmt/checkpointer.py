"""The training loop's one class: resume, save as the loop goes, keep what is worth keeping."""

from __future__ import annotations

import dataclasses
import logging
import operator
import re
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, Self

from ckptfmt import limits
from ckptfmt.api import DEADLINE_S, check_vacant, report_save
from ckptfmt.documents.manifest import checkpoint_name
from ckptfmt.documents.run import Launch, ResumeFrom, Run
from ckptfmt.engines.lineage import begin_launch, check_not_fenced, open_run
from ckptfmt.engines.reader import Checkpoint
from ckptfmt.engines.retention import clean_up
from ckptfmt.errors import CkptError, Code, err
from ckptfmt.group import Agree, Group, make_group
from ckptfmt.loading import load_once
from ckptfmt.restore import LoadReport, restore_streams
from ckptfmt.sampler import Sampler
from ckptfmt.saving import Ownership, SaveReport, prepare_once, save_once
from ckptfmt.state import PerWorker
from ckptfmt.store import open_store

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator

    from ckptfmt.state import State
    from ckptfmt.store.protocol import Store

__all__ = ["Checkpointer"]

_LOG: Final = logging.getLogger("ckptfmt")
_DURATION: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?(s|min|h)")
_UNIT_S: Final = {"s": 1.0, "min": 60.0, "h": 3600.0}


class Checkpointer:
    """Resume a run and save it as it goes.

    Every process of the job makes one, with the same arguments, and runs the same loop. What must be the same on all
    (what to resume from, when to save) writer 0 decides and tells; no process decides by its own clock.

    Args:
        run: directory of the run, made if missing; or a store rooted there.
        state: what to save and restore.
        every: save after so many steps (an int), or after so much time ("90s", "5min", "1h"); None to save only at
            the end of `steps` and when `save` is called.
        keep: how many of the newest checkpoints stay; None for all.
        keep_every: checkpoints of steps divisible by this stay as well.
        resume: "auto" to follow the run's lineage; "fresh" to start anew; else name or manifest digest of a checkpoint,
            which rolls the run back to it.
        allow, strict: as for `ckptfmt.load`.
        writer, agree: as for `ckptfmt.save`.
        deadline_s: how long the processes wait for each other, in seconds.

    Attributes:
        step: training steps done.
        launch: this start's record; None before `restore`.
        load_report: what restoring found; None after a fresh start.
        passed_over: newer checkpoints that weren't valid, a sentence each.

    Raises: StateError(ARGUMENT).
    """

    def __init__(
        self,
        run: str | os.PathLike[str] | Store,
        state: State,
        *,
        every: int | str | None = None,
        keep: int | None = None,
        keep_every: int | None = None,
        resume: str = "auto",
        allow: Iterable[str] = (),
        strict: bool = False,
        writer: tuple[int, int] | None = None,
        agree: Agree = None,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        self._cadence = _parse_every(every)
        for name, value in (("keep", keep), ("keep_every", keep_every)):
            _check_positive(name, value)
        self._store = open_store(run, writable=True)
        self._state = state
        self._keep, self._keep_every = keep, keep_every
        self._resume = resume
        self._allow, self._strict = frozenset((allow,) if isinstance(allow, str) else allow), strict
        self._group: Group = make_group(writer, agree, self._store, deadline_s=deadline_s)
        self._deadline_s = deadline_s
        self._run: Run | None = None
        self._ownership = Ownership()
        self._pending_streams: Checkpoint | None = None
        self._saved_step: int | None = None
        self._clock = time.monotonic
        self._timer = _Timer()
        self._restored = self._in_body = self._requested = False
        self.step = 0
        self.launch: Launch | None = None
        self.load_report: LoadReport | None = None
        self.passed_over: list[str] = []

    def __enter__(self) -> Self:
        self.restore()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of what is held. Saves are synchronous: none is ever pending."""
        if self._pending_streams is not None:
            self._pending_streams.close()
            self._pending_streams = None

    def restore(self) -> LoadReport | None:
        """Take the next launch of the run, and load what it resumes from; entering the context does it.

        Random-number streams are put back later, when `steps` begins, since making an iterator draws from them.

        Returns: the report; None after a fresh start.
        Raises: IntegrityError(NO_VALID_CHECKPOINT); StateError; LayoutError; StoreError.
        Spec: REQ-RUN-002, REQ-RUN-006, REQ-RUN-007.
        """
        if self._restored:
            return self.load_report
        if self.launch is not None:
            raise err(
                Code.ARGUMENT,
                "restoring failed before: what is live now is neither the checkpoint nor a fresh start",
                where="restore()",
                remedy="Mend what the first error named, and start the process again.",
            )
        told = self._group.run_on_first(self._begin)
        if not isinstance(told, dict) or "launch" not in told:
            raise err(Code.WRITERS_DIVERGED, "the processes aren't at the same point", requirement="REQ-CMT-001")
        self._run = Run(run_id=told["launch"]["run_id"], writer_features=tuple(told["writer_features"]))
        resume = told["launch"].pop("resume_from")
        self.launch = Launch(**told["launch"], resume_from=None if resume is None else ResumeFrom(**resume))
        self.passed_over = told["passed_over"]
        if self.launch.resume_from is not None:
            self._load(self.launch.resume_from)
        self._timer = _Timer(last_s=self._clock())
        self._restored = True
        return self.load_report

    def steps(self, total: int) -> Iterator[int]:
        """Yield the number of each step still to do, from the steps done up to `total`; save after the loop's body.

        Before the first one everything is prepared (what can't be saved is refused here, before any training is lost),
        and the random-number streams are put back. After the last one the run is saved, if it isn't.

        Raises: as `restore` and `save`.
        """
        self.restore()
        prepare_once(self._group, self._state, self._ownership)
        if self._pending_streams is not None:
            self._restore_streams(self._pending_streams)
        while self.step < total:
            self._in_body, self._requested = True, False
            try:
                yield self.step
            finally:
                self._in_body = False
            self.step += 1
            for sampler in _find_samplers((self._state.data, self._state.extra)):
                sampler.commit(self.step)
            if self._is_due() or self._requested or self.step == total:
                self.save()

    def save(self) -> SaveReport | None:
        """Save now; every process calls it at the same step. None if this step is saved already.

        Within the body of `steps` the step isn't over: there the save is taken as soon as the body ends, and this
        returns None. A body that is left by ``break`` or an exception is no step, and isn't saved.

        Raises: FencedError(FENCED) if a newer launch owns the run; others as `ckptfmt.save`.
        Spec: REQ-CMT-001 to REQ-CMT-009, REQ-RUN-004.
        """
        if self._in_body:
            self._requested = True
            return None
        self.restore()
        launch = self.launch
        assert launch is not None  # noqa: S101 - restore() sets it
        if self._saved_step == self.step:
            return None
        place = self._store.at(checkpoint_name(self.step, launch.launch))

        def check() -> None:
            check_not_fenced(self._store, launch.launch)
            check_vacant(place)

        begin_s = self._clock()
        manifest = save_once(
            place,
            self._group,
            self._state,
            step=self.step,
            run_id=launch.run_id,
            launch=launch.launch,
            nonce=launch.nonce,
            block_nbytes=limits.BLOCK_NBYTES,
            deadline_s=self._deadline_s,
            ownership=self._ownership,
            check=check,
        )
        self._saved_step = self.step
        removed = self._clean_up() if self._group.writer == 0 else ()
        report = report_save(place.name, manifest, removed)
        self._timer = _Timer(last_s=self._clock(), next_step=self.step + 1)
        _LOG.info("step %d COMMITTED in %.2f s: %s", self.step, self._clock() - begin_s, report.path)
        return report

    def _begin(self) -> dict[str, object]:
        """Choose and record what this launch resumes from; on writer 0 only."""
        run = open_run(self._store)
        passed_over: list[str] = []

        def note(sentence: str) -> None:
            _LOG.warning("passed over: %s", sentence)
            passed_over.append(sentence)

        by_hand = None if self._resume in ("auto", "fresh") else self._resume
        launch = begin_launch(self._store, run, choose=by_hand, fresh=self._resume == "fresh", on_passed_over=note)
        return {
            "launch": dataclasses.asdict(launch),
            "writer_features": list(run.writer_features),
            "passed_over": passed_over,
        }

    def _load(self, resume: ResumeFrom) -> None:
        checkpoint = self._group.together(lambda: Checkpoint(self._store.at(resume.name), digest=resume.digest))
        self.load_report = load_once(
            self._state, checkpoint, self._group, allow=self._allow, strict=self._strict, streams=False
        )
        self._pending_streams = checkpoint
        self.step = self._saved_step = checkpoint.step
        _LOG.info("step %d restored from %s: claim %s", self.step, resume.name, self.load_report.claim)
        for sentence in self.load_report.downgrades:
            _LOG.warning("restored in another way than saved: %s", sentence)

    def _restore_streams(self, checkpoint: Checkpoint) -> None:
        restore_streams(
            self._state,
            checkpoint,
            worker=self._group.writer,
            worker_count=self._group.writer_count,
            allow=self._allow,
            strict=self._strict,
        )
        self.close()

    def _clean_up(self) -> tuple[str, ...]:
        """Let old checkpoints go. The save is committed: what fails here is reported, and is no reason to stop."""
        assert self._run is not None  # noqa: S101 - restore() sets both
        assert self.launch is not None  # noqa: S101
        try:
            return tuple(
                clean_up(
                    self._store, self._run, launch=self.launch.launch, keep=self._keep, keep_every=self._keep_every
                )
            )
        except CkptError as error:
            _LOG.warning("clean-up stopped: %s", error)
            return ()

    def _is_due(self) -> bool:
        if isinstance(self._cadence, int):
            return self.step % self._cadence == 0
        return self._cadence is not None and self._is_due_by_time(self._cadence)

    def _is_due_by_time(self, every_s: float) -> bool:
        """Tell whether the time has come; writer 0 alone looks at its clock.

        The processes ask each other only at steps that all know beforehand: each answer says at which step to ask
        again, half of the remaining time ahead.
        """
        self._timer.steps_since += 1
        if self.step < self._timer.next_step:
            return False
        elapsed_s = self._clock() - self._timer.last_s
        per_step_s = elapsed_s / self._timer.steps_since
        ahead = int((every_s - elapsed_s) / 2 / max(per_step_s, 1e-9))
        answer = {"due": elapsed_s >= every_s, "next_step": self.step + max(1, min(ahead, 1_000_000))}
        told = self._group.raise_together(None, value=answer)[0]
        self._timer.next_step = told["next_step"]
        return bool(told["due"])


@dataclasses.dataclass(slots=True)
class _Timer:
    """When the last save was, by this process's clock in seconds, and at which step to ask next."""

    last_s: float = 0.0
    steps_since: int = 0
    next_step: int = 0


def _find_samplers(value: object) -> Iterator[Sampler]:
    """Yield the samplers in a part of a state."""
    if isinstance(value, Sampler):
        yield value
    elif isinstance(value, PerWorker):
        yield from _find_samplers(value.value)
    elif isinstance(value, Mapping):
        yield from _find_samplers(tuple(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _find_samplers(item)


def _check_positive(name: str, value: object) -> None:
    if value is not None and (type(value) is not int or value < 1):
        raise err(Code.ARGUMENT, f"{name}={value!r} isn't a positive number", where=f"{name}=")


def _parse_every(every: int | str | None) -> int | float | None:
    """Return a number of steps as an int, a time in seconds as a float."""
    if every is None:
        return None
    if hasattr(every, "__index__") and not isinstance(every, bool) and operator.index(every) > 0:
        return operator.index(every)
    found = _DURATION.fullmatch(every) if isinstance(every, str) else None
    if found is None or float(found[1]) <= 0:
        raise err(Code.ARGUMENT, f"every={every!r}: steps as an int, or a time such as '5min'", where="every=")
    return float(found[1]) * _UNIT_S[found[2]]
