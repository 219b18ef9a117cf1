"""One worker of one life of a run: restore, train, save, and log what is handed over before it is."""

import contextlib
import dataclasses
import mmap
import pathlib
import random
import time
import traceback
from collections.abc import Iterator
from typing import Any

import numpy as np

from ckptfmt.checkpointer import Checkpointer
from ckptfmt.errors import CkptError
from ckptfmt.saving.handle import STATES, SaveHandle
from tests.campaign.oracle import Log
from tests.campaign.states import Held, Spec, change_specs, hold

#: After so many failed saves a trainer gives up.
_FAILURES = 6


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """What the workers of one start of a run do.

    Attributes:
        number: of the start.
        seed: of what is left to chance; the same on all workers.
        worker_count: how many there are.
        framework: see `hold`.
        specs: of what is held at first.
        elastic: whether the number of workers may be another next time.
        options: of the `Checkpointer`.
        step_count: how many steps are done.
        own_loop: whether each step is saved by hand, and its handle waited for; else `steps` does
            it all.
        changes: whether the tensors change in between.
        meddles: whether tensors are written to at the wrong moments.
        wait_chance: how often a state of a save is waited for.
        nap_s: how long a step takes at most, beyond its arithmetic.
    """

    number: int
    seed: int
    worker_count: int
    framework: str
    specs: list[Spec]
    elastic: bool
    options: dict[str, Any]
    step_count: int
    own_loop: bool
    changes: bool
    meddles: bool
    wait_chance: float
    nap_s: float


def live(
    life: Life, worker: int, *, run: pathlib.Path, log: pathlib.Path, progress: mmap.mmap
) -> int:
    """Live one life; return the exit status.

    Args:
        progress: shared: how many saves worker 0 has begun.
    """
    trainer = _Trainer(life, worker, run, Log(log), progress)
    try:
        trainer.run()
    except CkptError as error:
        trainer.tell_error(error)
        return 3
    except BaseException:  # noqa: BLE001
        trainer.log.write("failed", text=f"life {life.number}: {traceback.format_exc()}")
        return 1
    trainer.log.write("end")
    return 0


class _Trainer:
    def __init__(
        self, life: Life, worker: int, run: pathlib.Path, log: Log, progress: mmap.mmap
    ) -> None:
        self.log = log
        self._life, self._worker = life, worker
        self._progress = progress
        self._rng = random.Random(life.seed)  # for what all workers do alike
        self._own_rng = random.Random(f"{life.seed}/{worker}")
        self._held: Held = hold(
            life.specs,
            worker=worker,
            worker_count=life.worker_count,
            framework=life.framework,
            alone=not life.elastic,
        )
        self._during = "making"
        self._limit_s: float = life.options["deadline_s"]
        self._attempts: dict[int, int] = {}
        self._pending: dict[SaveHandle, str] = {}
        several = life.worker_count > 1
        self._checkpointer = Checkpointer(
            run,
            self._held.state,
            writer=(worker, life.worker_count) if several else None,
            agree=f"life{life.number}" if several else None,
            allow="streams",
            **life.options,
        )

    def run(self) -> None:
        """Restore, train, close."""
        checkpointer, options = self._checkpointer, self._life.options
        with self._timed("restore", 3):
            checkpointer.restore()
        launch = checkpointer.launch
        assert launch is not None
        self.log.write(
            "launch",
            launch=launch.launch,
            worker=self._worker,
            keep=options["keep"],
            keep_every=options["keep_every"],
            passed_over=checkpointer.passed_over,
            content=self._held.describe(),
        )
        assert checkpointer.step == self._held.step, "the step restored isn't that of the data"
        try:
            self._save_by_hand() if self._life.own_loop else self._save_by_steps()
        finally:
            with self._timed("close", 2):
                checkpointer.close()
            self._tell_states()

    def tell_error(self, error: CkptError) -> None:
        """Log an error by its name."""
        self.log.write(
            "error", code=str(error.code), text=str(error), during=self._during, worker=self._worker
        )

    # --- loops ------------------------------------------------------------------------------------

    def _save_by_hand(self) -> None:
        failure_count = 0
        with self._timed("restore_rng", 3):
            self._checkpointer.restore_rng()
        for _ in range(self._life.step_count):
            self._train()
            try:
                self._save()
            except CkptError as error:
                failure_count += 1
                # What one worker meets the others needn't: then nobody knows where they are.
                if failure_count == _FAILURES or self._life.worker_count > 1:
                    raise
                self.tell_error(error)
            self._tell_states()

    def _save(self) -> None:
        self._hand_over()
        with self._timed("save", 3):
            handle = self._checkpointer.save(step=self._held.step)
        if handle is None:
            return
        self._pending[handle] = "STAGING"
        if self._life.meddles and self._own_rng.random() < 0.5:
            self._held.meddle()
        for state in ("STAGED", "COMMITTED"):
            if handle.state != "SKIPPED" and self._own_rng.random() < self._life.wait_chance:
                self._tell_states()
                with self._timed(f"wait {state}", 1):
                    handle.wait(state, timeout_s=self._limit_s)

    def _save_by_steps(self) -> None:
        checkpointer = self._checkpointer
        for _ in checkpointer.steps(checkpointer.step + self._life.step_count):
            self._train()
            self._hand_over()
        with self._timed("close", 2):
            checkpointer.close()  # or raise what the last save failed with
        assert checkpointer.launch is not None
        if checkpointer.step and not checkpointer.stopped:
            self._tell("COMMITTED", checkpointer.step)

    def _train(self) -> None:
        seeds = (self._life.seed, self._held.step)
        self._during = f"step {self._held.step + 1}"
        if self._life.changes and self._rng.random() < 0.3:
            changed = change_specs(self._rng, self._held.specs, elastic=self._life.elastic)
            self._held.become(changed, np.random.default_rng(seeds))
        self._held.train(np.random.default_rng(seeds))
        time.sleep(self._own_rng.uniform(0, self._life.nap_s))

    # --- the log ----------------------------------------------------------------------------------

    def _hand_over(self) -> None:
        """Log the state as it is now: what comes of its save has to be this."""
        step, launch = self._held.step, self._checkpointer.launch
        assert launch is not None
        self._attempts[step] = self._attempts.get(step, 0) + 1
        self.log.write(
            "save",
            launch=launch.launch,
            step=step,
            worker=self._worker,
            worker_count=self._life.worker_count,
            attempt=self._attempts[step],
            specs=[dataclasses.asdict(spec) for spec in self._held.specs],
            content=self._held.describe(),
        )
        if self._worker == 0:
            self._progress[0] = min(255, self._progress[0] + 1)

    def _tell_states(self) -> None:
        """Log which states the saves under way have reached."""
        for handle, known in list(self._pending.items()):
            state = handle.state
            if state not in STATES:
                self._tell(state, handle.step)
                del self._pending[handle]
                continue
            for reached in STATES[STATES.index(known) + 1 : STATES.index(state) + 1]:
                self._tell(
                    reached, handle.step, profile=handle.report.profile if handle.report else None
                )
            self._pending[handle] = state
            if state == "COMMITTED":
                del self._pending[handle]

    def _tell(self, state: str, step: int, **members: Any) -> None:
        launch = self._checkpointer.launch
        assert launch is not None
        outlives = self._life.options["saver"] == "process"
        members |= {
            "launch": launch.launch,
            "step": step,
            "worker": self._worker,
            "outlives": outlives,
        }
        self.log.write("state", state=state, **members)

    @contextlib.contextmanager
    def _timed(self, what: str, deadline_count: int) -> Iterator[None]:
        """Log how long something took that may take so many deadlines."""
        self._during = f"{what} of step {self._held.step}" if hasattr(self, "_held") else what
        begin_s = time.monotonic()
        try:
            yield
        finally:
            seconds = time.monotonic() - begin_s
            self.log.write(
                "wait", what=what, seconds=seconds, limit_s=deadline_count * self._limit_s
            )
