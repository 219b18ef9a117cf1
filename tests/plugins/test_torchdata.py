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
    "how",
    [("stateful", 0, "drawn"), ("stateful", 2, "derived"), ("sampler", 2, "derived")],
    ids=str,
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
            trainings.run(
                TRAINING,
                tmp_path / "run-lost",
                tmp_path / "lost",
                *how,
                "--lose-data",
                kill_at=kill_at,
            )
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
        return torch.utils.data.DataLoader(
            Noisy(), batch_sampler=sampler, num_workers=worker_count
        ), sampler
    loader = StatefulDataLoader(Noisy(), batch_size=2, shuffle=True, num_workers=worker_count)
    wrapped = ForeignLoader(loader, lib="torchdata") if kind == "wrapped" else loader
    return wrapped, wrapped


def take(batches, count):
    return [[sample.tolist() for sample in next(batches)] for _ in range(count)]


# Another test of this process may have imported JAX, which warns of forks.
@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
@pytest.mark.parametrize("kind", ["stateful", "wrapped", "sampler"])
@pytest.mark.parametrize("worker_count", [0, 2])
def test_what_worker_processes_draw_is_drawn_anew_and_the_rest_is_the_same(
    tmp_path, kind, worker_count
):
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
    # A fresh iterator of a plain loader draws the seed of its worker processes before its first
    # batch.
    assert (ours == right) is (worker_count == 0 and kind != "sampler")


def test_a_loader_of_each_process_is_given_as_its_own(tmp_path):
    def state(number):
        loader, _ = make("stateful", 0)
        take(iter(loader), number + 1)
        return ckptfmt.State(data=ckptfmt.PerWorker(loader), rng=False)

    attempt = ckptfmt.SaveAttempt.begin(step=1, writer_count=2)
    records = [
        attempt.write_part(tmp_path / "c", state(number), writer=number) for number in range(2)
    ]
    attempt.commit(tmp_path / "c", records)
    assert ckptfmt.validate(tmp_path / "c")


class Stream(torch.utils.data.IterableDataset[int]):
    """Twelve numbers, dealt out to the worker processes."""

    ckptfmt_exact = True

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        yield from range(worker.id if worker else 0, 12, worker.num_workers if worker else 1)


class Counted:
    """An iterator that says where it stands."""

    def __init__(self):
        self.at = 0

    def __next__(self):
        if self.at == 12:
            raise StopIteration
        self.at += 1
        return self.at

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class CountedStream(torch.utils.data.IterableDataset[int]):
    """Numbers of an iterator that says where it stands."""

    def __iter__(self):
        return Counted()


def loader_of(kind, worker_count):
    datasets = {"stream": Stream, "counted": CountedStream, "shuffled": lambda: list(range(12))}
    shuffled = (
        {"shuffle": True, "generator": torch.Generator().manual_seed(3)}
        if kind == "shuffled"
        else {}
    )
    return StatefulDataLoader(datasets[kind](), batch_size=2, num_workers=worker_count, **shuffled)


def train_on(run, kind, worker_count, last_step):
    """Train from where the run stands up to a step, each of them saved; return the batches and the claim."""
    loader = loader_of(kind, worker_count)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = ckptfmt.State(weights=model, optimizer=optimizer, data=loader, config={})
    seen = []
    with ckptfmt.Checkpointer(run, state, every=1, saver="inline") as checkpointer:
        while checkpointer.step < last_step:
            batches = iter(loader)
            checkpointer.restore_rng()
            for batch in batches:
                with checkpointer.training_step():
                    model(batch.float().reshape(-1, 1)).sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    seen.append(batch.tolist())
                if checkpointer.step == last_step:
                    break
    report = checkpointer.load_report
    return seen, None if report is None else (report.claim, report.lowered_by)


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
@pytest.mark.parametrize(
    ("kind", "worker_count"),
    [("stream", 0), ("stream", 2), ("counted", 0), ("shuffled", 0), ("shuffled", 2)],
)
def test_a_loader_that_is_resumed_again_and_again_gives_the_batches_of_one_that_never_stopped(
    tmp_path, kind, worker_count
):
    """A load of an iterable dataset was refused; the generator of a shuffling loader stood elsewhere afterwards."""
    right, _ = train_on(tmp_path / "right", kind, worker_count, 17)
    ours, claims = [], []
    for last_step in (2, 4, 6, 7, 17):
        seen, claim = train_on(tmp_path / "ours", kind, worker_count, last_step)
        ours += seen
        claims.append(claim)
    assert ours == right
    assert claims == [None] + [("T1", ())] * 4
