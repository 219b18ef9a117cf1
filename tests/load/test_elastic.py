"""The script of docs/elastic.md under torchrun: nodes are lost and join, and a cluster is split into two halves.

The script counts in the weights which node trained which sample. A checkpoint thereby proves from
outside what was trained into it: each sample of each step once, and no step by two halves.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptfmt
from ckptfmt.commit.decision import read_register
from ckptfmt.commit.waiting import poll
from ckptfmt.documents.manifest import (
    MANIFEST_NAME,
    Manifest,
    checkpoint_name,
    parse_checkpoint_name,
)
from ckptfmt.documents.run import Launch
from ckptfmt.store import LocalStore
from ckptfmt_conformance.adapters.chaos_job import read_states
from ckptfmt_conformance.chaos.nodes import Cluster, network_problem
from tests.builders import known_launches
from tests.house.sources import ROOT
from tests.plugins import trainings

#: How long anything may take that should take seconds: on a busy machine a minute's work takes ten.
PATIENCE_S = 300.0
#: More steps than any test waits for.
ENDLESS = "1000000"
SAMPLE_COUNT, BATCH = 50_000, 12
#: How many of the newest checkpoints of a run are looked at: all of a training that saves each step
#: take too long.
_NEWEST = 6

#: The script with a rest after each step, so that a test sees the steps go by.
SLOWLY = """
import runpy, sys, time
from torch.optim.optimizer import register_optimizer_step_post_hook
register_optimizer_step_post_hook(lambda *_: time.sleep(0.2))
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """Return the script of the page, as a file."""
    page = (ROOT / "docs/elastic.md").read_text("utf-8")
    (body,) = re.findall(r"^```python file=train.py\n((?:.*\n)*?)^```$", page, re.MULTILINE)
    (tmp_path / "slowly.py").write_text(SLOWLY, "utf-8")
    path = tmp_path / "train.py"
    path.write_text(body, "utf-8")
    return path


def train_alone(script: Path, run: Path, steps: int, processes: int = 1) -> str:
    """Train on one node until so many steps are done, with processes that are forks; return what they print."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    meeting = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    node = {"NODE": "0", "GROUP_WORLD_SIZE": "1", "CACHE": str(run.with_name(f"{run.name}.cache"))}
    return trainings.run(
        script, run, str(steps), processes=processes, env={**meeting, **node}, timeout_s=PATIENCE_S
    )


def samples_of(step: int) -> list[int]:
    """Return the samples of a step, on however many processes it is trained."""
    return ckptfmt.Sampler(SAMPLE_COUNT, global_batch=BATCH, seed=0, worker=(0, 1)).indices(step)


def read_head(run: Path) -> tuple[int, np.ndarray[Any, Any], dict[str, np.ndarray[Any, Any]]]:
    """Return steps, counts by node and sample, and weights of the checkpoint that a run goes on from."""
    with ckptfmt.Run(run).open() as head:
        weights = {name: head.weights[name][...] for name in head.weights}
        counts = weights.pop(next(name for name in weights if "trained" in name))
        return head.step, counts, weights


def check_samples(run: Path) -> None:
    """Check that the head of a run has each sample of each of its steps, and each once."""
    steps, counts, _ = read_head(run)
    expected = np.zeros(SAMPLE_COUNT, counts.dtype)
    for step in range(steps):
        expected[samples_of(step)] += 1
    assert np.array_equal(counts.sum(0), expected)


def check_weights(run: Path, undisturbed: Path) -> None:
    """Check that weights are close to those of another run: sums over processes are rounded in another order."""
    steps, _, weights = read_head(run)
    others_steps, _, others = read_head(undisturbed)
    assert others_steps == steps
    assert weights.keys() == others.keys()
    for name, weight in weights.items():
        np.testing.assert_allclose(weight, others[name], rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.dist
def test_the_script_goes_on_at_other_numbers_of_processes(script: Path, tmp_path: Path) -> None:
    """With claim S1: the same samples in the same order, each once, and weights that are close."""
    run, undisturbed = tmp_path / "run", tmp_path / "undisturbed"
    train_alone(script, run, 7, processes=3)
    said = train_alone(script, run, 12, processes=2)
    assert re.search(
        r"from step 7 of launch 1 .*: claim S1 expected .*lowered by: processes: saved 3, here 2",
        said,
    )
    train_alone(script, undisturbed, 12)
    check_samples(run)
    check_weights(run, undisturbed)


@pytest.mark.exhaustive
@pytest.mark.dist
def test_a_position_in_the_data_that_is_not_saved_is_noticed(script: Path, tmp_path: Path) -> None:
    """The negative control of the samples."""
    script.write_text(script.read_text("utf-8").replace(", data=sampler", ""), "utf-8")
    train_alone(script, tmp_path / "run", 7, processes=2)
    train_alone(script, tmp_path / "run", 12)
    with pytest.raises(AssertionError):
        check_samples(tmp_path / "run")


# --- nodes ----------------------------------------------------------------------------------------


class Job:
    """A training on nodes of a cluster, and the scheduler that starts agents which ended again.

    Args:
        cluster: the nodes.
        directory: of the run, ``run``, and of the nodes' caches and logs.
        program: what torchrun starts.
    """

    def __init__(self, cluster: Cluster, directory: Path, program: list[str]) -> None:
        self.cluster, self.directory, self.run, self.program = (
            cluster,
            directory,
            directory / "run",
            program,
        )
        self._is_wanted = [False] * len(cluster.nodes)

    def cache(self, index: int) -> Path:
        """Return the cache of a node."""
        return self.directory / f"cache{index}"

    def environment(self, index: int) -> dict[str, str]:
        """Return what a node's processes find in their environment."""
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        return {
            "NODE": str(index),
            "CACHE": str(self.cache(index)),
            "PYTHONPATH": path,
            "OMP_NUM_THREADS": "1",
        }

    def start(self, index: int) -> None:
        """Start an agent on a node, and again whenever it ends."""
        self._is_wanted[index] = True
        self.cluster.start_agent(self.cluster.nodes[index], self.program, self.environment(index))

    def start_apart(self, index: int) -> None:
        """Start an agent on a node with a rendezvous of its own, once: its scheduler reaches nobody else."""
        node = self.cluster.nodes[index]
        argv = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"),
            *("--monitor-interval=0.1", "--local-addr=127.0.0.1", *self.program),
        ]
        environment = {**self.environment(index), "GLOO_SOCKET_IFNAME": "lo"}
        node.agent = node.start(argv, environment, self.directory / f"{node.name}.log")

    def lose(self, index: int) -> None:
        """Lose a node for good, with its disk."""
        self._is_wanted[index] = False
        self.cluster.nodes[index].kill()
        shutil.rmtree(self.cache(index), ignore_errors=True)

    def drain(self, index: int) -> None:
        """Take a node away as schedulers do: with SIGTERM for its agent."""
        self._is_wanted[index] = False
        agent = self.cluster.nodes[index].agent
        assert agent is not None
        agent.terminate()

    def cut(self, index: int) -> None:
        """Cut a node off from the network; nobody starts an agent there."""
        self._is_wanted[index] = False
        self.cluster.cut(index)

    def wait_for(self, what: str, condition: Callable[[], Any]) -> Any:
        """Wait until something holds, and return it."""
        for _ in poll(PATIENCE_S, pause_max_s=0.5):
            if found := condition():
                return found
            for index, node in enumerate(self.cluster.nodes):
                if self._is_wanted[index] and (node.agent is None or node.agent.poll() is not None):
                    self.start(index)
        logs = "\n".join(
            f"{index}: {self.log(index)[-4000:]}" for index in range(len(self.cluster.nodes))
        )
        raise AssertionError(f"{what}: not within {PATIENCE_S:g} s\n{logs}")

    def log(self, index: int) -> str:
        """Return what a node printed so far."""
        path = self.directory / f"node{index}.log"
        return path.read_text("utf-8", "replace") if path.exists() else ""

    def launches(self) -> dict[int, Launch]:
        """Return all launches of the run so far, by number."""
        if not (self.run / "run.json").exists():
            return {}
        return {one.launch: one for one in known_launches(LocalStore(self.run, writable=False))}

    def await_commits(self, *, world: int, after: int = 0) -> int:
        """Wait until a launch after one has committed twice with so many processes; return the launch."""

        def find() -> int:
            places = filter(
                None, (parse_checkpoint_name(path.name) for path in self.run.glob("step-*"))
            )
            newest = sorted(((launch, step) for step, launch in places), reverse=True)[:_NEWEST]
            registers = [
                read_register(LocalStore(self.run, writable=False).at(checkpoint_name(step, one)))
                for one, step in newest
            ]
            origins = [one.origin for one in registers if isinstance(one, Manifest)]
            found = [one.launch or 0 for one in origins if one.writer_count == world]
            return max((one for one in found if one > after and found.count(one) > 1), default=0)

        launch: int = self.wait_for(f"a launch after {after} of {world} processes", find)
        return launch

    def resumed_place(self, launch: int) -> tuple[int, int]:
        """Return step and launch of what a launch went on from; zeros if it began anew."""
        resume = self.launches()[launch].resume_from
        return (None if resume is None else parse_checkpoint_name(resume.name)) or (0, 0)


@contextlib.contextmanager
def job_on(count: int, directory: Path, program: list[str]) -> Iterator[Job]:
    """Start a training on nodes, in networks of their own where that is allowed; end it with all of its processes."""
    with Cluster(count, is_network=not network_problem(), logs=directory) as cluster:
        job = Job(cluster, directory, program)
        for index in range(count):
            job.start(index)
        yield job
        for node in cluster.nodes:
            node.kill()


def program_of(script: Path) -> list[str]:
    """Return what torchrun starts: the script, slowly and without an end."""
    directory = script.parent
    return [str(directory / "slowly.py"), str(script), str(directory / "run"), ENDLESS]


@pytest.mark.exhaustive
@pytest.mark.dist
@pytest.mark.parametrize("lost", [0, 1])
def test_a_node_is_lost_for_good_and_another_joins_and_leaves(
    script: Path, tmp_path: Path, lost: int
) -> None:
    """The run goes on from the newest save that the other node's cache has all of, which home doesn't have.

    Weights are close to those of the undisturbed run, and its samples are the same (S1).
    """
    with job_on(2, tmp_path, program_of(script)) as job:
        together = job.await_commits(world=2)
        away = job.run.with_name("away")
        job.run.rename(away)
        step = job.wait_for(
            "a save that home lacks", lambda: newest_replica(job.cache(1 - lost), away)
        )
        job.lose(lost)
        away.rename(job.run)
        alone = job.await_commits(world=1, after=together)
        assert job.resumed_place(alone)[0] >= step
        job.start(lost)
        joined = job.await_commits(world=2, after=alone)
        job.drain(lost)
        job.await_commits(world=1, after=joined)
    check_samples(job.run)
    train_alone(script, tmp_path / "undisturbed", read_head(job.run)[0])
    check_weights(job.run, tmp_path / "undisturbed")


def newest_replica(cache: Path, home: Path) -> int:
    """Return the newest step of which a node's cache has the parts of both processes, and home has no commit."""
    steps = [0]
    for place in cache.glob("*/step-*"):
        found = parse_checkpoint_name(place.name)
        is_whole = len(list(place.glob("parts/*.msgpack"))) == 2
        if found is not None and is_whole and not (home / place.name / MANIFEST_NAME).exists():
            steps.append(found[0])
    return max(steps)


@pytest.mark.exhaustive
@pytest.mark.dist
def test_the_reference_trainer_has_the_same_bits_when_nodes_are_lost_and_join(
    tmp_path: Path,
) -> None:
    """Each checkpoint has the bits of the undisturbed run."""
    program = ["-m", "ckptfmt_conformance.adapters.chaos_job", "train"]
    with job_on(
        2, tmp_path, [*program, str(tmp_path / "run"), "--steps", ENDLESS, "--pace", "0.2"]
    ) as job:
        together = job.await_commits(world=2)
        job.lose(0)
        alone = job.await_commits(world=1, after=together)
        job.start(0)
        job.await_commits(world=2, after=alone)
    found = read_states(job.run)
    last = max(int(one["step"]) for one in found.values())
    undisturbed = tmp_path / "undisturbed"
    subprocess.run([sys.executable, *program, str(undisturbed), "--steps", str(last)], check=True)
    expected = {one["step"]: one["digest"] for one in read_states(undisturbed).values()}
    assert len(set(expected.values())) == last
    assert {one["step"] for one in found.values()} == set(range(1, last + 1))
    assert [name for name, one in found.items() if one["digest"] != expected[one["step"]]] == []


# --- halves ---------------------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.dist
def test_no_step_is_trained_by_two_halves_of_a_split_cluster(script: Path, tmp_path: Path) -> None:
    """Both halves reach home, and both are started again; whoever was taken over is refused by name, and may come back.

    The half that is cut off gets a rendezvous of its own, against the advice of the page: else it
    doesn't train at all.
    """
    if problem := network_problem():
        pytest.skip(problem)
    with job_on(2, tmp_path, program_of(script)) as job:
        node = job.cluster.nodes[1]
        together = job.await_commits(world=2)
        job.cut(1)
        first = job.await_commits(world=1, after=together)
        job.wait_for("the end of what was cut off", lambda: not node.ranks())
        node.kill()
        assert "FENCED" not in job.log(0) + job.log(1)
        job.start_apart(1)
        job.wait_for("a refusal of node 0", lambda: "FENCED" in job.log(0))
        job.wait_for("a refusal of node 1", lambda: "FENCED" in job.log(1))
        job.wait_for(
            "the end of node 1", lambda: node.agent is not None and node.agent.poll() is not None
        )
        alone = job.await_commits(world=1, after=first + 1)
        job.cluster.mend()
        job.start(1)
        job.await_commits(world=2, after=alone)
    check_samples(job.run)
    took = {
        int(launch): index
        for index in (0, 1)
        for launch in re.findall(r"launch (\d+) goes on from", job.log(index))
    }
    for launch, nodes in trained_by(job).items():
        assert nodes == {frozenset({0, 1})} or nodes == {frozenset({took[launch]})}, (
            launch,
            nodes,
            took,
        )
    assert {took[launch] for launch in took if together < launch <= alone} == {0, 1}


def trained_by(job: Job) -> dict[int, set[frozenset[int]]]:
    """Return for each launch on the way to the head of a run which nodes trained its steps together."""
    with ckptfmt.Run(job.run).open() as head:
        place = parse_checkpoint_name(Path(head.path).name) or (0, 0)
    steps, counts, _ = read_head(job.run)
    assert steps * BATCH <= SAMPLE_COUNT, "samples came twice, and don't tell of one step"
    found = {}
    while place[1]:
        begin = job.resumed_place(place[1])
        found[place[1]] = {
            frozenset(np.flatnonzero(counts[:, samples_of(step)].any(1)).tolist())
            for step in range(begin[0], place[0])
        }
        place = begin
    return found
