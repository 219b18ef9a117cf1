"""The fault campaign: inject faults into training jobs, await recovery, compare all checkpoints."""

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

#: The number of injections into a live job before the next job begins.
PER_JOB: Final = 25
#: The number of new steps of all nodes, after a fault, until the job counts as recovered.
_NEW_STEPS: Final = 3
_INSIDE: Final = Path(__file__).with_name("inside")


@dataclasses.dataclass(slots=True, kw_only=True)
class Verdict:
    """The result of an injection.

    Attributes:
        index: the injection's number in the campaign, which together with the campaign's seed
            determines all draws.
        kind: the kind of the fault.
        victim: the name of the node.
        recovered: whether training went on by itself; None where the fault didn't strike.
        seconds: the time from the fault's begin until all nodes had done new steps, including the
            duration of the fault.
        steps_lost: the number of repeated steps.
        identical: whether all checkpoints from this injection to the next have the bits of the
            undisturbed run.
        message: the description of a broken promise; "" for none.
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
        """Whether the job recovered with checkpoints identical to the undisturbed run's."""
        return self.recovered is True and self.identical is True


class NotInTimeError(Exception):
    """A condition wasn't met before the deadline."""


class Job:
    """A live job on a cluster, and a scheduler for the agents: the `Scene` of all faults.

    Args:
        cluster: the nodes of the job.
        adapter: the command of the job.
        directory: the job's own directory, which has to be empty.
        pace_s: the pause after each step, in seconds.
        timeout_s: the time limit of each wait, in seconds.
    """

    def __init__(
        self,
        cluster: Cluster,
        adapter: Sequence[str],
        directory: Path,
        *,
        pace_s: float,
        timeout_s: float,
    ) -> None:
        self.cluster = cluster
        self.run = directory / "run"
        self.rng = random.Random(0)
        self.victim = 0
        self._adapter = adapter
        self._directory = directory
        self._pace_s = pace_s
        self._timeout_s = timeout_s
        self._armed = directory / "armed"
        self._armed.mkdir(parents=True)
        self._away_until = [0.0] * len(cluster.nodes)
        self._started_s = [0.0] * len(cluster.nodes)
        self._launch_count = 1
        #: The ranks of each node as last seen, and the time since when they are the same.
        self._ranks: list[tuple[int, ...]] = []
        self._ranks_s = 0.0

    def progress(self) -> list[tuple[int, float, int]]:
        """Return step, time and number of processes of each finished step, in execution order."""
        try:
            lines = (self._directory / "progress").read_text("utf-8").split("\n")[:-1]
        except FileNotFoundError:
            return []
        return [(int(step), float(at_s), int(world)) for step, at_s, world in map(str.split, lines)]

    def highest(self) -> int:
        """Return the highest finished step."""
        return max((step for step, _, _ in self.progress()), default=0)

    def is_whole(self) -> bool:
        """Return whether all nodes did the last step together, after the last restart.

        A rank of a killed agent trains on until all agents notice the loss. The rank's
        steps until then are no recovery.
        """
        last = self.progress()[-1:]
        alive = all(
            node.agent is not None and node.agent.poll() is None for node in self.cluster.nodes
        )
        if not (
            alive
            and last
            and last[0][2] == len(self.cluster.nodes)
            and last[0][1] > max(self._started_s)
        ):
            return False
        ranks = [tuple(node.ranks()) for node in self.cluster.nodes]
        if ranks != self._ranks:
            self._ranks = ranks
            self._ranks_s = time.monotonic()
        return all(ranks) and last[0][1] > self._ranks_s

    def tend(self) -> None:
        """Restart ended agents, as a scheduler does for an unfinished job."""
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
            "PYTHONPATH": os.pathsep.join(
                [str(_INSIDE), *filter(None, [os.environ.get("PYTHONPATH")])]
            ),
        }
        self.cluster.start_agent(node, program, environment, job=f"job{self._launch_count}")

    def launch_again(self) -> None:
        """Start the job a second time; see `Scene`."""
        earlier = [node.agent for node in self.cluster.nodes if node.agent is not None]
        self._launch_count += 1
        for index, node in enumerate(self.cluster.nodes):
            self._start(node)
            self._started_s[index] = time.monotonic()
        self.wait_for(
            "the end of the earlier launch",
            lambda: all(agent.poll() is not None for agent in earlier),
        )

    def wait_for(self, what: str, condition: Callable[[], object]) -> None:
        """Wait for a condition, and tend the agents. Raises: NotInTimeError."""
        deadline_s = time.monotonic() + self._timeout_s
        while not condition():
            if time.monotonic() > deadline_s:
                raise NotInTimeError(f"{what}: not within {self._timeout_s:.0f} s")
            self.tend()
            time.sleep(0.05)

    def await_whole(self, after: int) -> None:
        """Wait until all nodes have trained together beyond a step. Raises: NotInTimeError."""
        self.wait_for(
            f"steps beyond {after}",
            lambda: self.is_whole() and self.highest() >= after + _NEW_STEPS,
        )

    def sleep(self, seconds: float) -> None:
        """Wait, and tend the agents; see `Scene`."""
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            self.tend()
            time.sleep(0.05)

    def arm(self, name: str, content: str = "") -> None:
        """Arm a fault; see `Scene`."""
        whole = self._armed / f".{name}"
        whole.write_text(content, "utf-8")
        whole.rename(self._armed / name)

    def disarm(self, name: str) -> None:
        """Disarm a fault; see `Scene`."""
        (self._armed / name).unlink(missing_ok=True)

    def await_struck(self, name: str) -> None:
        """Wait until a process has taken a fault; see `Scene`."""
        try:
            self.wait_for(f"a process that takes {name}", lambda: not (self._armed / name).exists())
        finally:
            self.disarm(name)

    def await_start(self) -> None:
        """Wait for new ranks of the victim's node; see `Scene`."""
        node = self.cluster.nodes[self.victim]
        before = set(node.ranks())
        self.wait_for("other ranks", lambda: set(node.ranks()) - before)

    def await_steps(self, count: int) -> None:
        """Wait for more steps; see `Scene`."""
        goal = self.highest() + count
        self.wait_for(f"step {goal}", lambda: self.highest() >= goal)

    def keep_away(self, index: int, seconds: float) -> None:
        """Start no agent on a node for a time; see `Scene`."""
        self._away_until[index] = time.monotonic() + seconds

    def newest(self) -> Path:
        """Return the newest checkpoint's directory; see `Scene`."""
        return self.run / str(ask(self._adapter, "newest", self.run, timeout_s=self._timeout_s))

    def stop(self) -> None:
        """Stop the job, and end all processes of the job."""
        for name in list(self._armed.iterdir()):
            name.unlink()
        for node in self.cluster.nodes:
            node.kill()


def ask(adapter: Sequence[str], question: str, run: Path, *, timeout_s: float) -> Any:
    """Return an adapter's answer to a question about a run. Raises: SuiteError."""
    argv = [*adapter, question, str(run)]
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=timeout_s * 4, check=False
        )
        return json.loads(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        tail = getattr(locals().get("done"), "stderr", "")[-1000:]
        raise SuiteError(
            f"{' '.join(argv)}: {error}\n{tail}", remedy="See README.md, `chaos`."
        ) from error


class Campaign:
    """A sequence of injections into jobs.

    Args:
        adapter: the command of the job.
        kinds: the kinds of faults to draw from. Each kind comes once before any kind comes twice.
        seed: the seed of all draws.
        node_count: the number of nodes of each job, with a rank each.
        is_network: whether each node has a separate network.
        directory: the directory of runs and logs.
        pace_s: the pause of the job after each step, in seconds.
        timeout_s: the time limit of each wait, in seconds.
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
        self._adapter = adapter
        self._kinds = kinds
        self._seed = seed
        self._directory = directory
        self._node_count = node_count
        self._is_network = is_network
        self._pace_s = pace_s
        self._timeout_s = timeout_s
        self._on_verdict = on_verdict

    def run(self, count: int, *, within_s: float = math.inf) -> list[Verdict]:
        """Inject `count` faults, and return their verdicts.

        Args:
            within_s: the time in seconds after which no more faults are injected.
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
            job = Job(
                cluster, self._adapter, directory, pace_s=self._pace_s, timeout_s=self._timeout_s
            )
            try:
                job.await_whole(0)
                for index in indices:
                    verdicts.append(self._inject(job, index))
                    self._on_verdict(verdicts[-1])
                    if not verdicts[-1].recovered or time.monotonic() > end_s:
                        break  # a stuck job would make later injections fail too
            except NotInTimeError as error:
                raise SuiteError(
                    f"the job doesn't train: {error}",
                    remedy=f"See the logs in {directory}, or --timeout.",
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
            verdict.recovered = False
            verdict.message = str(error)
        verdict.seconds = time.monotonic() - begin_s
        highest = verdict.first_step
        for step, at_s, _ in job.progress():
            if at_s >= begin_s:
                verdict.steps_lost = max(verdict.steps_lost, highest - step + 1)
                highest = max(highest, step)
        return verdict

    def _judge(self, jobs: Sequence[tuple[Path, list[Verdict]]]) -> None:
        """Compare all checkpoints of all jobs with an undisturbed run's."""
        asked = [
            (ask(self._adapter, "states", run, timeout_s=self._timeout_s), found)
            for run, found in jobs
        ]
        last = max((one["step"] for states, _ in asked for one in states.values()), default=1)
        reference = self._directory / "reference"
        shutil.rmtree(reference, ignore_errors=True)
        argv = [*self._adapter, "train", str(reference), "--steps", str(last)]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        undisturbed = ask(self._adapter, "states", reference, timeout_s=self._timeout_s)
        expected = {one["step"]: one.get("digest") for one in undisturbed.values()}
        if (
            done.returncode
            or sorted(expected) != list(range(1, last + 1))
            or None in expected.values()
        ):
            raise SuiteError(
                f"the undisturbed run failed: {done.stderr[-1000:]}",
                remedy="See that the job trains by itself.",
            )
        for states, found in asked:
            judge_job(states, expected, found)


def judge_job(
    states: Mapping[str, Mapping[str, Any]],
    expected: Mapping[int, str],
    verdicts: Sequence[Verdict],
) -> None:
    """Set for each injection whether its checkpoints equal the undisturbed run's.

    Args:
        states: the step of each checkpoint, and the digest or a problem, by name.
        expected: the digest of each step.
        verdicts: the verdicts of a job, in order.
    """
    unreadable = {name: one for name, one in states.items() if "digest" not in one}
    allowed = sum(verdict.kind.damages for verdict in verdicts)
    failed = sum(verdict.kind.fails for verdict in verdicts)
    for verdict in verdicts:
        verdict.identical = True
        if len(unreadable) > allowed:
            verdict.identical = False
            verdict.message += (
                f" {len(unreadable)} checkpoints can't be read, {allowed} were"
                f" damaged: {unreadable}"
            )
    there = {one["step"] for one in states.values()}
    wrong = {
        one["step"]: name
        for name, one in states.items()
        if one.get("digest", "") not in ("", expected[one["step"]])
    }
    missing = {
        step: "no checkpoint" for step in range(1, max(there, default=0) + 1) if step not in there
    }
    if len(unreadable) + len(missing) <= allowed + failed:
        missing = {}  # on a noticed storage fault, a writer abandons the checkpoint
    for step, name in sorted({**wrong, **missing}.items()):
        blamed = [verdict for verdict in verdicts if verdict.first_step <= step] or list(verdicts)
        one = blamed[-1] if blamed[-1].first_step <= step else blamed[0]
        one.identical = False
        one.message += f" step {step}: {name}"
