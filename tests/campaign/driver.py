"""Starts the trainers of the campaign, kills and stops them and their helpers, and asks the oracle afterwards.

A process with one thread, so that it may fork: a trainer costs milliseconds, and its saver an
interpreter's start.
"""

import contextlib
import dataclasses
import json
import mmap
import os
import pathlib
import random
import secrets
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from typing import Any, Final

from ckptfmt.checkpointer import Checkpointer
from ckptfmt.delta import coders
from ckptfmt.saving import saver
from tests.campaign.checker import look_at, problems_of
from tests.campaign.oracle import EXCUSED, Oracle, Place
from tests.campaign.states import Spec, hold, make_specs
from tests.campaign.trainer import Life, live
from tests.faults.driver import MARK, mark_of, until

_SMALL_NBYTES: Final = (20_000, 300_000, 2_000_000, 6_000_000)
_LARGE_NBYTES: Final = (38 << 20, 46 << 20)
_PATIENCE_S: Final = 60.0
#: What the processes that are killed beside a trainer run.
_HELPERS: Final = {"saver": saver.__name__, "coder": coders.__name__}
#: Of a job of which one worker is dead, how long the others may live on; a launcher ends them.
_GRACE_S: Final = (0.0, 0.0, 0.3)
#: After how long a life counts as hanging.
_BOUND_S: Final = 400.0
_ACTIONS: Final = (
    "kill trainer", "kill trainer", "kill job", "kill saver", "kill saver", "kill coder", ("stop"
    " saver"), "stop coder",
    "stop trainer", "end",
)  # fmt: skip


@dataclasses.dataclass(slots=True)
class Report:
    """What was done, and what was found.

    Attributes:
        states: that became checkpoints; `handed`: that were handed to saves.
        lives: starts of a run, and `workers` in them; `runs`: directories.
        deltas: committed saves that were one.
        kills: by what was killed; `stops`: by what was stopped and went on; `ends`: by signal.
        compared: checkpoints loaded into new tensors and compared.
        lost, different, overdue, unexpected: how often.
        errors: what trainers were told, by code; all of them excused.
        problems: what was found, in words.
    """

    states: int = 0
    handed: int = 0
    runs: int = 0
    lives: int = 0
    workers: int = 0
    deltas: int = 0
    large: int = 0
    kills: dict[str, int] = dataclasses.field(default_factory=dict)
    stops: dict[str, int] = dataclasses.field(default_factory=dict)
    ends: int = 0
    rollbacks: int = 0
    compared: int = 0
    lost: int = 0
    different: int = 0
    overdue: int = 0
    unexpected: int = 0
    errors: dict[str, int] = dataclasses.field(default_factory=dict)
    problems: list[str] = dataclasses.field(default_factory=list)


def campaign(
    report: Report,
    rng: random.Random,
    *,
    state_count: int,
    frameworks: Sequence[str],
    large: float,
    life_limit: int,
    end_s: float,
    directory: str | None,
    keep: pathlib.Path | None = None,
) -> None:
    """Do runs until there are `state_count` states in `report`, or it is too late.

    Args:
        large: share of the runs whose states are above 32 MiB.
        life_limit: how many lives a run has at most.
        end_s: when to begin no more, by the monotonic clock.
        directory: where the runs are; None for that of temporary files.
        keep: where runs with findings are left.
    """
    _warm_up(frameworks, directory)
    while report.states < state_count and time.monotonic() < end_s:
        seed = rng.getrandbits(32)
        with tempfile.TemporaryDirectory(dir=directory, prefix="ckptfmt-campaign-") as place:
            run = _Run(
                pathlib.Path(place), report, seed, frameworks, large=large, life_limit=life_limit
            )
            try:
                run.go()
            finally:
                run.end_helpers()
            if run.problem_count and keep is not None:
                shutil.copytree(place, keep / f"run-{seed}", dirs_exist_ok=True)


def _warm_up(frameworks: Sequence[str], directory: str | None) -> None:
    """Import, here and not in each trainer, what a life and a check import."""
    for framework in frameworks:
        with tempfile.TemporaryDirectory(dir=directory, prefix="ckptfmt-campaign-") as place:
            held = hold(
                make_specs(random.Random(0), 1000, elastic=True),
                worker=0,
                worker_count=1,
                framework=framework,
            )
            with Checkpointer(place, held.state, saver="inline") as checkpointer:
                checkpointer.save(step=0)
            look_at(pathlib.Path(place) / "step-00000000-l0001", {}, framework="numpy")
            problems_of(place)


class _Run:
    """One run: its directory, its lives, its oracle."""

    def __init__(
        self,
        place: pathlib.Path,
        report: Report,
        seed: int,
        frameworks: Sequence[str],
        *,
        large: float,
        life_limit: int,
    ) -> None:
        self._root, self._log = place / "run", place / "log"
        self._log.touch()
        self._seed, self._report = seed, report
        self._rng = rng = random.Random(seed)
        self._oracle = Oracle(self._root, self._log)
        self._mark = f"{secrets.token_hex(6)}-campaign"
        self._large = rng.random() < large
        self._life_limit = life_limit
        self._framework = rng.choice(frameworks)
        self._elastic = rng.random() < 0.6
        self._worker_count = rng.choice((1, 1, 1, 2)) if self._large else rng.choice((1, 1, 2, 3))
        self._has_deltas = self._large or rng.random() < 0.6
        self._changes = self._framework != "module" and rng.random() < 0.4
        nbytes = rng.choice(_LARGE_NBYTES if self._large else _SMALL_NBYTES)
        self._specs = make_specs(rng, nbytes, elastic=self._elastic)
        #: Whether every saver of earlier lives had ended when the last one began, and was let do so
        #: ever since.
        self._is_quiet = True
        self._was_disturbed = False
        self._rescues = True
        self.problem_count = 0

    def go(self) -> None:
        """Live some lives, the last one undisturbed, and judge."""
        report, rng = self._report, self._rng
        report.runs += 1
        life_count = min(self._life_limit, rng.randint(2, 4) if self._large else rng.randint(4, 9))
        for number in range(life_count):
            is_last = number == life_count - 1
            self._live_once(number, disturbed=not is_last and rng.random() < 0.85)
            # Or let the next life begin beside savers that are still at work; never where it must
            # know the tensors.
            if is_last or self._changes or rng.random() < 0.7:
                self._judge(everything=is_last)
            else:
                self._is_quiet = self._rescues = False
            if self._collect(number):
                break
        counts = self._oracle.counts
        report.states += self._oracle.state_count()
        report.large += self._oracle.state_count() if self._large else 0
        report.handed += counts["handed"]
        report.deltas += counts["deltas"]
        report.compared += counts["compared"]
        for name, count in counts.items():
            if name.startswith("error "):
                _add(report.errors, name.removeprefix("error "), count)

    def _collect(self, number: int) -> bool:
        """Take over what the oracle has found; say whether there is something."""
        report, oracle = self._report, self._oracle
        for kind in ("lost", "different", "overdue", "unexpected"):
            found: list[str] = getattr(oracle, kind)
            setattr(report, kind, getattr(report, kind) + len(found))
            report.problems += [
                f"{kind}, run {self._seed} life {number}: {sentence}" for sentence in found
            ]
            self.problem_count += len(found)
            found.clear()
        if self.problem_count:
            for sentence in report.problems[-self.problem_count :]:
                sys.stderr.write(f"{sentence}\n")
        return self.problem_count > 0

    # --- a life -----------------------------------------------------------------------------------

    def _live_once(self, number: int, *, disturbed: bool) -> None:
        life = self._make_life(number, disturbed=disturbed)
        begin_s = time.monotonic()
        os.environ[MARK] = f"{self._mark}-{number}"
        progress = mmap.mmap(-1, 1)
        children = [self._start(life, worker, progress) for worker in range(life.worker_count)]
        self._report.lives += 1
        self._report.workers += life.worker_count
        self._was_disturbed = not self._is_quiet
        plan = self._plan_actions(life) if disturbed else []
        self._watch(life, children, progress, list(plan))
        told = (
            f"{life.framework} x{life.worker_count} {life.options}, {plan}:"
            f" {time.monotonic() - begin_s:.1f} s"
        )
        sys.stderr.write(f"run {self._seed} life {number}: {told}\n")
        # Who has little time may run out of it, whatever happens to him: others have the
        # processors, too.
        excused = EXCUSED if self._was_disturbed or disturbed else frozenset()
        self._oracle.listen(excused=excused | {"STATE_CHANGED"} if life.meddles else excused)

    def _make_life(self, number: int, *, disturbed: bool) -> Life:
        rng = self._rng
        if self._elastic and rng.random() < 0.4:
            self._worker_count = rng.choice((1, 2)) if self._large else rng.choice((1, 2, 3))
        resume = self._choose_resume()
        saver = rng.choice(("process", "process", "process", "thread", "inline"))
        delta: Any = "off"
        if self._has_deltas:
            saver = "process" if saver == "inline" else saver
            # A run that is begun without deltas never has any.
            modes = ("smallest", "smallest", "auto", "off") if number else ("smallest", "auto")
            mode = "smallest" if self._large else rng.choice(modes)
            delta = {
                "mode": mode,
                "full_every": rng.choice((3, 16)),
                "restore_budget": rng.choice((1.5, 100.0)),
            }
        own_loop = rng.random() < 0.8
        options = {
            "resume": resume,
            "saver": saver,
            "slots": rng.choice((1, 2, 2)),
            "when_busy": rng.choice(("wait", "wait", "skip")),
            "overlap": rng.random() < 0.8,
            "nice": rng.choice((0, 0, 5)),
            "delta": delta,
            "keep": rng.choice((None, 1, 2, 3)),
            "keep_every": rng.choice((None, None, 4)),
            "check_replicas": rng.random() < 0.3,
            "deadline_s": 8.0 if disturbed else 90.0,
        }
        if not own_loop:
            options |= {
                "every": rng.choice((1, 2)),
                "stop_on": [signal.SIGTERM],
                "stop_deadline_s": 30.0,
            }
        return Life(
            number=number,
            seed=rng.getrandbits(32),
            worker_count=self._worker_count,
            framework=self._framework,
            specs=self._specs,
            elastic=self._elastic,
            options=options,
            step_count=rng.randint(3, 8) if self._large else rng.randint(4, 40),
            own_loop=own_loop,
            changes=self._changes,
            meddles=own_loop and self._worker_count == 1 and rng.random() < 0.15,
            wait_chance=rng.choice((0.0, 0.3, 0.8)),
            nap_s=rng.choice((0.0, 0.002, 0.01)),
        )

    def _choose_resume(self) -> str:
        """Choose what to resume from, and know its tensors beforehand."""
        rng, oracle = self._rng, self._oracle
        if not self._is_quiet:
            return "auto"
        registers = oracle.registers()
        there = sorted(place for place, kind in registers.items() if kind == "manifest")
        chance = rng.random()
        if there and chance < 0.12:
            place = rng.choice(there)
            self._report.rollbacks += 1
            self._know(place)
            return oracle.place_of(place).name
        line = [place for place in oracle.line() if registers[place] == "manifest"]
        if line:
            self._know(line[0])
        return "auto"

    def _know(self, place: Place) -> None:
        self._specs = [Spec.of(row) for row in self._oracle.specs_of(place)]

    def _start(self, life: Life, worker: int, progress: mmap.mmap) -> int:
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                os.setsid()
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                status = live(life, worker, run=self._root, log=self._log, progress=progress)
            finally:
                os._exit(status)
        return pid

    # --- what happens to it -----------------------------------------------------------------------

    def _plan_actions(self, life: Life) -> list[tuple[int, float, str]]:
        """Return what to do: after how many saves, how much later, what."""
        rng = self._rng
        names = [name for name in _ACTIONS if not (name == "end" and life.own_loop)]
        if not self._large:
            names = [name for name in names if "coder" not in name]
        if not life.own_loop:
            names += ["end"] * 3
        plan = [
            (
                rng.randint(0, life.step_count),
                rng.choice((0.0, rng.uniform(0, 0.02), rng.uniform(0, 0.3))),
                name,
            )
            for name in rng.sample(names, rng.randint(1, 3))
        ]
        return sorted(plan)

    def _watch(
        self,
        life: Life,
        children: list[int],
        progress: mmap.mmap,
        plan: list[tuple[int, float, str]],
    ) -> None:
        """Do what is planned, until every worker has ended; end those that are left alone, or hang."""
        alive = dict(enumerate(children))
        begin_s = time.monotonic()
        alone_s = float("inf")
        due_s = None
        while alive:
            for worker, pid in list(alive.items()):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    del alive[worker]
                    if status and alive and alone_s == float("inf"):
                        self._was_disturbed = True
                        alone_s = (
                            time.monotonic()
                            + self._rng.choice(_GRACE_S)
                            + (10.0 if status == 3 << 8 else 0.0)
                        )
            now_s = time.monotonic()
            if now_s > alone_s:
                for pid in alive.values():
                    os.kill(pid, signal.SIGKILL)
            if now_s - begin_s > _BOUND_S and alive:
                self._oracle.overdue.append(
                    f"workers {[*alive]} of life {life.number} are still there"
                )
                for pid in alive.values():
                    os.kill(pid, signal.SIGKILL)
                begin_s = now_s
            if plan and progress[0] >= plan[0][0]:
                due_s = now_s + plan[0][1] if due_s is None else due_s
                if now_s >= due_s:
                    self._act(plan.pop(0)[2], alive)
                    due_s = None
            time.sleep(0.001)

    def _act(self, name: str, alive: dict[int, int]) -> None:
        """Do one thing to the life, if there is somebody to do it to."""
        rng, report = self._rng, self._report
        what, _, whom = name.partition(" ")
        if whom in ("saver", "coder"):
            targets = self._helpers(whom)
            targets = [rng.choice(targets)] if targets else []
        else:
            targets = [*alive.values()]
            targets = [rng.choice(targets)] if whom == "trainer" and targets else targets
        if not targets:
            return
        self._was_disturbed = True
        self._rescues &= name != "kill saver"
        if what == "end":
            report.ends += 1
            os.kill(targets[0], signal.SIGTERM)
            return
        _add(report.kills if what == "kill" else report.stops, whom, 1)
        for pid in targets:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if what == "kill" else signal.SIGSTOP)
        if what == "stop":
            time.sleep(rng.choice((0.01, 0.1, 0.6)))
            for pid in targets:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def _helpers(self, kind: str) -> list[int]:
        """Return the savers or coders of this run."""
        found = []
        for place in pathlib.Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if f"\0{_HELPERS[kind]}\0".encode() in (place / "cmdline").read_bytes():
                    found.append(int(place.name))
        return [pid for pid in found if (mark_of(pid) or "").startswith(self._mark)]

    def end_helpers(self) -> None:
        """Kill what is still there: the directory is about to go."""
        for pid in (*self._helpers("saver"), *self._helpers("coder")):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        until(lambda: not self._helpers("saver"))

    # --- the judgement ----------------------------------------------------------------------------

    def _judge(self, *, everything: bool) -> None:
        """Wait until nobody is at work any more; load what there is, and let the oracle compare."""
        oracle, rng = self._oracle, self._rng
        begin_s = time.monotonic()
        if not until(lambda: not self._helpers("saver"), _PATIENCE_S, every_s=0.05):
            oracle.overdue.append("a saver doesn't end")
        quiet_s = time.monotonic() - begin_s
        framework = "torch" if self._framework != "numpy" and rng.random() < 0.5 else "numpy"
        wanted = oracle.wanted(again=lambda: everything or rng.random() < 0.2)
        found = self._look(sorted(wanted.items()), framework, validate=everything)
        if found is not None:
            for place, loaded in zip(sorted(wanted), found["loaded"], strict=True):
                oracle.compare(place, loaded)
            oracle.lost += found["problems"]
        oracle.check_kept(is_quiet=True, rescues=self._rescues)
        rest_s = time.monotonic() - begin_s - quiet_s
        sys.stderr.write(
            f"    quiet after {quiet_s:.1f} s, {len(wanted)} compared in {rest_s:.1f} s\n"
        )
        self._is_quiet = self._rescues = True

    def _look(
        self, wanted: list[tuple[Place, Any]], framework: str, *, validate: bool
    ) -> dict[str, Any] | None:
        """Load checkpoints in a process of its own; return what they hold, and what `validate` says of the run."""
        answer = self._log.with_name("answer")
        answer.unlink(missing_ok=True)
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                loaded = [
                    look_at(self._oracle.place_of(place), ranges, framework=framework)
                    for place, ranges in wanted
                ]
                problems = problems_of(self._root) if validate and self._root.exists() else []
                answer.write_text(json.dumps({"loaded": loaded, "problems": problems}))
                status = 0
            except BaseException:  # noqa: BLE001
                traceback.print_exc()
            finally:
                os._exit(status)
        if not until(
            lambda: os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT),
            _BOUND_S,
            every_s=0.002,
        ):
            self._oracle.overdue.append("the checker doesn't end")
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        if status:
            self._oracle.unexpected.append(f"the checker ended with status {status}")
            return None
        found: dict[str, Any] = json.loads(answer.read_bytes())
        return found


def _add(counts: dict[str, int], name: str, count: int) -> None:
    counts[name] = counts.get(name, 0) + count
