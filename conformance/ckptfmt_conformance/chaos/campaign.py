"""The campaign: train, break something, wait until training goes on, again and again; then compare every checkpoint."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import random
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from ckptfmt_conformance.chaos.kinds import Kind
from ckptfmt_conformance.chaos.nodes import Cluster, Node
from ckptfmt_conformance.errors import SuiteError

__all__ = ["PER_JOB", "Campaign", "Verdict"]

#: Injections into one live job; then its checkpoints are compared, and the next job begins.
PER_JOB: Final = 25
#: Steps that are new, done after a fault by all nodes, until the job counts as recovered.
_NEW_STEPS: Final = 3
_INSIDE: Final = Path(__file__).with_name("inside")


@dataclasses.dataclass(slots=True, kw_only=True)
class Verdict:
    """What came of one injection.

    Attributes:
        index: of the injection in the campaign; with the campaign's seed it says all that was drawn.
        kind: of the fault.
        victim: name of the node.
        recovered: whether training went on by itself; None where the fault didn't strike.
        seconds: from the fault's begin until all nodes had done new steps; the time that the fault lasts is part of it.
        steps_lost: steps that were done twice.
        identical: whether all checkpoints from this injection to the next have the bits of the undisturbed run.
        message: what is wrong.
    """

    index: int
    kind: Kind
    victim: str
    recovered: bool | None = None
    seconds: float = 0.0
    steps_lost: int = 0
    identical: bool | None = None
    message: str = ""
    first_step: int = 0

    @property
    def is_kept(self) -> bool:
        """Whether everything came out as promised."""
        return self.recovered is True and self.identical is True


class NotInTimeError(Exception):
    """Something that was waited for didn't happen."""


class Job:
    """A live job on a cluster, and the scheduler that starts its agents again: the `Scene` of all faults.

    Args:
        cluster: where it runs.
        adapter: the command of the job.
        directory: its own, empty.
        pace_s: how long the job rests after each step.
        timeout_s: how long anything may take.
    """

    def __init__(
        self, cluster: Cluster, adapter: Sequence[str], directory: Path, *, pace_s: float, timeout_s: float
    ) -> None:
        self.cluster, self.run = cluster, directory / "run"
        self.rng, self.victim = random.Random(0), 0
        self._adapter, self._directory, self._pace_s, self._timeout_s = adapter, directory, pace_s, timeout_s
        self._armed = directory / "armed"
        self._armed.mkdir(parents=True)
        self._away_until = [0.0] * len(cluster.nodes)
        self._started_s = [0.0] * len(cluster.nodes)
        self._launch_count = 1
        #: Of each node its ranks as they were last seen, and since when.
        self._ranks: list[tuple[int, ...]] = []
        self._ranks_s = 0.0

    def progress(self) -> list[tuple[int, float, int]]:
        """Return step, time and number of processes of each step that was done, in the order in which they were."""
        try:
            lines = (self._directory / "progress").read_text("utf-8").split("\n")[:-1]
        except FileNotFoundError:
            return []
        return [(int(step), float(at_s), int(world)) for step, at_s, world in map(str.split, lines)]

    def highest(self) -> int:
        """Return the highest step that was done."""
        return max((step for step, _, _ in self.progress()), default=0)

    def is_whole(self) -> bool:
        """Return whether all nodes trained together at the last step, since the last agent or rank was started.

        A rank whose agent was killed trains on until the other agents notice that; what it does until then is no
        recovery.
        """
        last = self.progress()[-1:]
        alive = all(node.agent is not None and node.agent.poll() is None for node in self.cluster.nodes)
        if not (alive and last and last[0][2] == len(self.cluster.nodes) and last[0][1] > max(self._started_s)):
            return False
        ranks = [tuple(node.ranks()) for node in self.cluster.nodes]
        if ranks != self._ranks:
            self._ranks, self._ranks_s = ranks, time.monotonic()
        return all(ranks) and last[0][1] > self._ranks_s

    def tend(self) -> None:
        """Start each agent that isn't there: what a scheduler does for a job that hasn't finished."""
        now_s = time.monotonic()
        for index, node in enumerate(self.cluster.nodes):
            is_gone = node.agent is None or node.agent.poll() is not None
            if is_gone and now_s > max(self._away_until[index], self._started_s[index] + 0.5):
                self._start(node)
                self._started_s[index] = time.monotonic()

    def _start(self, node: Node) -> None:
        program = [
            *("--no-python", *self._adapter, "train", str(self.run), "--steps", "1000000"),
            *("--progress", str(self._directory / "progress"), "--pace", str(self._pace_s)),
        ]
        environment = {
            "CKPTFMT_CHAOS_INSIDE": str(self._armed),
            "CKPTFMT_CHAOS_RUN": str(self.run),
            "PYTHONPATH": os.pathsep.join([str(_INSIDE), *filter(None, [os.environ.get("PYTHONPATH")])]),
        }
        self.cluster.start_agent(node, program, environment, job=f"job{self._launch_count}")

    def launch_again(self) -> None:
        """As `Scene` says."""
        earlier = [node.agent for node in self.cluster.nodes if node.agent is not None]
        self._launch_count += 1
        for index, node in enumerate(self.cluster.nodes):
            self._start(node)
            self._started_s[index] = time.monotonic()
        self.wait_for("the end of the earlier launch", lambda: all(agent.poll() is not None for agent in earlier))

    def wait_for(self, what: str, condition: Callable[[], object]) -> None:
        """Wait for something, and tend the agents. Raises: NotInTimeError."""
        deadline_s = time.monotonic() + self._timeout_s
        while not condition():
            if time.monotonic() > deadline_s:
                raise NotInTimeError(f"{what}: not within {self._timeout_s:.0f} s")
            self.tend()
            time.sleep(0.05)

    def await_whole(self, after: int) -> None:
        """Wait until all nodes have trained together beyond a step."""
        self.wait_for(f"steps beyond {after}", lambda: self.is_whole() and self.highest() >= after + _NEW_STEPS)

    def sleep(self, seconds: float) -> None:
        """As `Scene` says."""
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            self.tend()
            time.sleep(0.05)

    def arm(self, name: str, content: str = "") -> None:
        """As `Scene` says."""
        whole = self._armed / f".{name}"
        whole.write_text(content, "utf-8")
        whole.rename(self._armed / name)

    def disarm(self, name: str) -> None:
        """As `Scene` says."""
        (self._armed / name).unlink(missing_ok=True)

    def await_struck(self, name: str) -> None:
        """As `Scene` says."""
        try:
            self.wait_for(f"a process that takes {name}", lambda: not (self._armed / name).exists())
        finally:
            self.disarm(name)

    def await_start(self) -> None:
        """As `Scene` says."""
        node = self.cluster.nodes[self.victim]
        before = set(node.ranks())
        self.wait_for("other ranks", lambda: set(node.ranks()) - before)

    def await_steps(self, count: int) -> None:
        """As `Scene` says."""
        goal = self.highest() + count
        self.wait_for(f"step {goal}", lambda: self.highest() >= goal)

    def keep_away(self, index: int, seconds: float) -> None:
        """As `Scene` says."""
        self._away_until[index] = time.monotonic() + seconds

    def newest(self) -> Path:
        """As `Scene` says."""
        return self.run / str(ask(self._adapter, "newest", self.run, timeout_s=self._timeout_s))

    def stop(self) -> None:
        """Stop the job, and end all of its processes."""
        for name in list(self._armed.iterdir()):
            name.unlink()
        for node in self.cluster.nodes:
            node.kill()


def ask(adapter: Sequence[str], question: str, run: Path, *, timeout_s: float) -> Any:  # noqa: ANN401 - any JSON
    """Return what an adapter answers about a run. Raises: SuiteError."""
    argv = [*adapter, question, str(run)]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=timeout_s * 4, check=False)
        return json.loads(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        tail = getattr(locals().get("done"), "stderr", "")[-1000:]
        raise SuiteError(f"{' '.join(argv)}: {error}\n{tail}", remedy="See README.md, `chaos`.") from error


class Campaign:
    """Injections into jobs, one after the other.

    Args:
        adapter: the command of the job.
        kinds: to draw from; each comes once before any comes twice.
        seed: of everything that is drawn.
        node_count: nodes of each job, one rank each.
        is_network: whether nodes have networks of their own.
        directory: for runs and logs.
        pace_s: how long the job rests after each step.
        timeout_s: how long anything may take.
        on_verdict: called with each injection's verdict, before checkpoints are compared.
    """

    def __init__(
        self,
        adapter: Sequence[str],
        kinds: Sequence[Kind],
        *,
        seed: int,
        node_count: int,
        is_network: bool,
        directory: Path,
        pace_s: float = 0.05,
        timeout_s: float = 180.0,
        on_verdict: Callable[[Verdict], None] = lambda _: None,
    ) -> None:
        self._adapter, self._kinds, self._seed, self._directory = adapter, kinds, seed, directory
        self._node_count, self._is_network = node_count, is_network
        self._pace_s, self._timeout_s, self._on_verdict = pace_s, timeout_s, on_verdict

    def run(self, count: int, *, within_s: float = math.inf) -> list[Verdict]:
        """Inject so many faults, and return what came of each.

        Args:
            within_s: seconds after which no other fault is injected.
        """
        end_s = time.monotonic() + within_s
        verdicts: list[Verdict] = []
        jobs: list[tuple[Path, list[Verdict]]] = []
        while len(verdicts) < count and time.monotonic() < end_s:
            directory = self._directory / f"job{len(jobs)}"
            indices = range(len(verdicts), min(count, len(verdicts) + PER_JOB))
            found = self._run_job(directory, indices, end_s)
            verdicts += found
            jobs.append((directory / "run", found))
        self._judge(jobs)
        return verdicts

    def _draw(self, index: int) -> Kind:
        turn, place = divmod(index, len(self._kinds))
        order = list(self._kinds)
        random.Random(f"{self._seed} order {turn}").shuffle(order)
        return order[place]

    def _run_job(self, directory: Path, indices: range, end_s: float) -> list[Verdict]:
        verdicts: list[Verdict] = []
        directory.mkdir(parents=True)
        with Cluster(self._node_count, is_network=self._is_network, logs=directory) as cluster:
            job = Job(cluster, self._adapter, directory, pace_s=self._pace_s, timeout_s=self._timeout_s)
            try:
                job.await_whole(0)
                for index in indices:
                    verdicts.append(self._inject(job, index))
                    self._on_verdict(verdicts[-1])
                    if not verdicts[-1].recovered or time.monotonic() > end_s:
                        break  # of a job that is stuck, what comes after would be blamed on others
            except NotInTimeError as error:
                raise SuiteError(
                    f"the job doesn't train: {error}", remedy=f"See the logs in {directory}, or --timeout."
                ) from error
            finally:
                job.stop()
        return verdicts

    def _inject(self, job: Job, index: int) -> Verdict:
        kind = self._draw(index)
        job.rng = random.Random(f"{self._seed} injection {index}")
        job.victim = job.rng.randrange(self._node_count)
        verdict = Verdict(index=index, kind=kind, victim=job.cluster.nodes[job.victim].name)
        job.sleep(job.rng.uniform(0, 1))
        verdict.first_step = job.highest()
        begin_s = time.monotonic()
        try:
            kind.inject(job)
            job.await_whole(job.highest())
            verdict.recovered = True
        except NotInTimeError as error:
            verdict.recovered, verdict.message = False, str(error)
        verdict.seconds = time.monotonic() - begin_s
        highest = verdict.first_step
        for step, at_s, _ in job.progress():
            if at_s >= begin_s:
                verdict.steps_lost = max(verdict.steps_lost, highest - step + 1)
                highest = max(highest, step)
        return verdict

    def _judge(self, jobs: Sequence[tuple[Path, list[Verdict]]]) -> None:
        """Compare all checkpoints of all jobs with those of a run that nothing happens to."""
        asked = [(ask(self._adapter, "states", run, timeout_s=self._timeout_s), found) for run, found in jobs]
        last = max((one["step"] for states, _ in asked for one in states.values()), default=1)
        reference = self._directory / "reference"
        shutil.rmtree(reference, ignore_errors=True)
        argv = [*self._adapter, "train", str(reference), "--steps", str(last)]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        undisturbed = ask(self._adapter, "states", reference, timeout_s=self._timeout_s)
        expected = {one["step"]: one.get("digest") for one in undisturbed.values()}
        if done.returncode or sorted(expected) != list(range(1, last + 1)) or None in expected.values():
            raise SuiteError(
                f"the undisturbed run failed: {done.stderr[-1000:]}", remedy="See that the job trains by itself."
            )
        for states, found in asked:
            judge_job(states, expected, found)


def judge_job(
    states: Mapping[str, Mapping[str, Any]], expected: Mapping[int, str], verdicts: Sequence[Verdict]
) -> None:
    """Say of each injection whether its checkpoints are those of the undisturbed run.

    Args:
        states: of each checkpoint its step, and its digest or problem, by its name.
        expected: the digest of each step.
        verdicts: of one job, in their order.
    """
    unreadable = {name: one for name, one in states.items() if "digest" not in one}
    allowed = sum(verdict.kind.damages for verdict in verdicts)
    failed = sum(verdict.kind.fails for verdict in verdicts)
    for verdict in verdicts:
        verdict.identical = True
        if len(unreadable) > allowed:
            verdict.identical = False
            verdict.message += f" {len(unreadable)} checkpoints can't be read, {allowed} were damaged: {unreadable}"
    there = {one["step"] for one in states.values()}
    wrong = {
        one["step"]: name for name, one in states.items() if one.get("digest", "") not in ("", expected[one["step"]])
    }
    missing = {step: "no checkpoint" for step in range(1, max(there, default=0) + 1) if step not in there}
    if len(unreadable) + len(missing) <= allowed + failed:
        missing = {}  # a writer that finds out what the storage did gives the checkpoint up
    for step, name in sorted({**wrong, **missing}.items()):
        blamed = [verdict for verdict in verdicts if verdict.first_step <= step] or list(verdicts)
        one = blamed[-1] if blamed[-1].first_step <= step else blamed[0]
        one.identical = False
        one.message += f" step {step}: {name}"
