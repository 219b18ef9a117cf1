"""torchft's own manager, optimizer and DDP in a State: no plug-in is needed. Each replica has a run of its own."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptfmt
from tests.plugins import trainings

pytest.importorskip("torchft")
SCRIPT = Path(__file__).with_name("torchft_training.py")
TOTAL = 42


@pytest.fixture
def lighthouse():
    """Return a function that starts a lighthouse for so many replicas, and returns its address."""
    from torchft.coordination import LighthouseServer  # noqa: PLC0415 - the framework's signature

    servers: list[Any] = []

    def start(replica_count):
        servers.append(
            LighthouseServer(bind="[::]:0", min_replicas=replica_count, join_timeout_ms=100)
        )
        return servers[-1].address()

    yield start
    for server in servers:
        server.shutdown()


@pytest.mark.parametrize("count", [1, 2])
def test_a_killed_job_goes_on_bit_for_bit(tmp_path, lighthouse, count):
    def train(name, *options, kill_at=None):
        files = tmp_path / f"run-{name}", tmp_path / name
        trainings.run(SCRIPT, *files, lighthouse(count), *options, kill_at=kill_at, processes=count)

    train("right")
    train("killed", kill_at=28)
    for replica in range(count):
        trainings.await_savers(tmp_path / f"run-killed-{replica}")
        shutil.copytree(tmp_path / f"run-killed-{replica}", tmp_path / f"run-lost-{replica}")
    train("killed", "--declare")
    train("lost", "--lose-rng")
    for replica in range(count):
        right, killed, lost = (
            tmp_path / f"{name}-{replica}" for name in ("right", "killed", "lost")
        )
        assert trainings.compare(right, killed, last_step=TOTAL) == []
        assert len(trainings.read(killed)[27]) == 2
        assert Path(f"{killed}.claim").read_text() == "T1 ()"
        assert any(
            "weights" in line and "rng" in line
            for line in trainings.compare(right, lost, last_step=TOTAL)
        )
        run = tmp_path / f"run-killed-{replica}"
        assert ckptfmt.validate(run)
        model = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.Dropout(0.3), torch.nn.Linear(16, 8)
        )
        loaded: Any = ckptfmt.load(run, ckptfmt.State(weights=model, rng=False))
        assert loaded.step == TOTAL
        assert trainings.digest(model.state_dict()) == trainings.read(right)[TOTAL][0]["weights"]


def test_a_replica_that_dies_does_the_other_ones_run_no_harm_and_takes_its_state(
    tmp_path, lighthouse
):
    """The survivor waits, and loses no step. The other replica resumes from its own older checkpoint.

    Healing then replaces what was loaded, and the random numbers aren't those of an undisturbed run.
    So the load claims no T1 unless the training declares the manager.
    """
    address = lighthouse(2)

    def train(replica, kill_at=None):
        env = {"RANK": str(replica), "WORLD_SIZE": "2"}
        trainings.run(
            SCRIPT, tmp_path / "run", tmp_path / "ours", address, kill_at=kill_at, env=env
        )

    with ThreadPoolExecutor(1) as pool:
        survivor = pool.submit(train, 0)
        train(1, kill_at=28)
        train(1)
        survivor.result()
    claim, _, reasons = (tmp_path / "ours-1.claim").read_text().partition(" ")
    assert claim == "S1"
    assert "extra:manager: the state_dict of Manager leaves out" in reasons
    told = [trainings.read(tmp_path / f"ours-{replica}") for replica in (0, 1)]
    assert [len(told[0][step]) for step in range(1, TOTAL + 1)] == [1] * TOTAL
    names = ("weights", "optimizer", "learning_rate", "committed")
    last = [told[1][step][-1] for step in range(1, TOTAL + 1)]
    assert [[line[name] for name in names] for line in last] == [
        [told[0][line["step"]][0][name] for name in names] for line in last
    ]
    for replica, launch in ((0, 1), (1, 2)):
        run = tmp_path / f"run-{replica}"
        assert ckptfmt.validate(run)
        newest = ckptfmt.Run(run).newest()
        assert (newest.step, newest.launch) == (TOTAL, launch)


def test_with_a_seed_for_each_step_a_lost_replica_goes_on_bit_for_bit(tmp_path, lighthouse):
    """The replacement draws the random numbers of the steps that it does, and not of its checkpoint."""

    def train(name, replica, address, kill_at=None):
        env = {"RANK": str(replica), "WORLD_SIZE": "2"}
        files = tmp_path / f"run-{name}", tmp_path / name
        options = ("--seed-steps", "--declare")
        trainings.run(SCRIPT, *files, address, *options, kill_at=kill_at, env=env)

    for name, kill_at in (("right", None), ("lost", 28)):
        address = lighthouse(2)
        with ThreadPoolExecutor(1) as pool:
            survivor = pool.submit(train, name, 0, address)
            train(name, 1, address, kill_at)
            if kill_at is not None:
                train(name, 1, address)
            survivor.result()
    assert (tmp_path / "lost-1.claim").read_text() == "T1 ()"
    for replica in (0, 1):
        right, lost = (trainings.read(tmp_path / f"{name}-{replica}") for name in ("right", "lost"))
        steps = range(1, TOTAL + 1)
        assert [lost[step][-1] for step in steps] == [right[step][-1] for step in steps]
