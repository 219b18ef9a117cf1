"""Data loaders of torch and torchdata: killed in the middle of an epoch, and resumed bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch

import ckptfmt
from ckptfmt.adapters.data_loaders import ForeignLoader
from tests.plugins import trainings

StatefulDataLoader: Any = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
TRAINING = Path(__file__).with_name("torchdata_training.py")
LAST_STEP = 42


@pytest.mark.parametrize(
    "how", [("stateful", 0, "drawn"), ("stateful", 2, "derived"), ("sampler", 2, "derived")], ids=str
)
def test_a_killed_training_goes_on_in_the_middle_of_an_epoch_bit_for_bit(tmp_path, how):
    trainings.run(TRAINING, tmp_path / "run-right", tmp_path / "right", *how)
    for kill_at in (23, None):  # in the second epoch
        trainings.run(TRAINING, tmp_path / "run-killed", tmp_path / "killed", *how, kill_at=kill_at)
    assert trainings.compare(tmp_path / "right", tmp_path / "killed", last_step=LAST_STEP) == []
    assert len(trainings.read(tmp_path / "killed")[22]) == 2
    assert (tmp_path / "killed.claim").read_text() == "T1 ()"
    assert ckptfmt.validate(tmp_path / "run-killed")
    if how[0] == "stateful" and not how[1]:
        for kill_at in (23, None):
            trainings.run(TRAINING, tmp_path / "run-lost", tmp_path / "lost", *how, "--lose-data", kill_at=kill_at)
        found = trainings.compare(tmp_path / "right", tmp_path / "lost", last_step=LAST_STEP)
        assert any("ids" in line for line in found)
        assert (tmp_path / "lost.claim").read_text().startswith("S0 ")


class Noisy(torch.utils.data.Dataset[torch.Tensor]):
    """Each sample is its number and a number that is drawn where the data set runs."""

    def __len__(self):
        return 24

    def __getitem__(self, number):
        return torch.tensor([number, int(torch.randint(1 << 30, ()))])


def make(kind, worker_count):
    """Return a loader, and what stands for it in a State."""
    if kind == "sampler":
        sampler = ckptfmt.Sampler(24, global_batch=2, seed=1)
        return torch.utils.data.DataLoader(Noisy(), batch_sampler=sampler, num_workers=worker_count), sampler
    loader = StatefulDataLoader(Noisy(), batch_size=2, shuffle=True, num_workers=worker_count)
    wrapped = ForeignLoader(loader, lib="torchdata") if kind == "wrapped" else loader
    return wrapped, wrapped


def take(batches, count):
    return [[sample.tolist() for sample in next(batches)] for _ in range(count)]


# Another test of this process may have imported JAX, which warns of forks.
@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
@pytest.mark.parametrize("kind", ["stateful", "wrapped", "sampler"])
@pytest.mark.parametrize("worker_count", [0, 2])
def test_what_worker_processes_draw_is_drawn_anew_and_the_rest_is_the_same(tmp_path, kind, worker_count):
    """What the claim doesn't cover: a worker process begins its streams anew, in torchdata as in torch."""
    torch.manual_seed(1)
    loader, data = make(kind, worker_count)
    batches = iter(loader)
    take(batches, 5)
    if kind == "sampler":
        data.commit(5)
    ckptfmt.save(tmp_path / "c", ckptfmt.State(data=data), step=5)
    right = take(batches, 6)

    torch.manual_seed(2)
    loader, data = make(kind, worker_count)
    state = ckptfmt.State(data=data)
    ckptfmt.load(tmp_path / "c", state)
    ours = take(iter(loader), 6)
    numbers = [[[sample[0] for sample in batch] for batch in found] for found in (right, ours)]
    assert numbers[0] == numbers[1]
    # A fresh iterator of a plain loader draws the seed of its worker processes before its first batch.
    assert (ours == right) is (worker_count == 0 and kind != "sampler")


def test_a_loader_of_each_process_is_given_as_its_own(tmp_path):
    def state(number):
        loader, _ = make("stateful", 0)
        take(iter(loader), number + 1)
        return ckptfmt.State(data=ckptfmt.PerWorker(loader), rng=False)

    attempt = ckptfmt.SaveAttempt.begin(step=1, writer_count=2)
    records = [attempt.write_part(tmp_path / "c", state(number), writer=number) for number in range(2)]
    attempt.commit(tmp_path / "c", records)
    assert ckptfmt.validate(tmp_path / "c")
