"""The reference trainer: the same bits on any number of processes, and otherwise the training that everyone knows."""

import doctest
import importlib
import random

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402

from ckptfmt_conformance.elastic import LossScale, Plan, Trainer, TreeSum, WindowSum, grad_norm  # noqa: E402
from ckptfmt_conformance.elastic.plan import split_node  # noqa: E402
from ckptfmt_conformance.trajectories.gang import shared_gang  # noqa: E402
from tests.conformance.elastic_scenes import leaf, sum_everywhere  # noqa: E402

MODULES = [
    "elastic",
    *(f"elastic.{name}" for name in ("plan", "tree", "arithmetic", "scale", "trainer")),
]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before[0])
    torch.set_rng_state(before[1])


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_are_true(name):
    result = doctest.testmod(importlib.import_module(f"ckptfmt_conformance.{name}"))

    assert result.failed == 0


# Who does what


@pytest.mark.parametrize("workers", range(1, 10))
def test_the_processes_share_all_logical_workers(workers):
    plan = Plan(workers=workers, microbatch=1)

    for world_size in range(1, workers + 1):
        owned = [plan.owned(rank, world_size) for rank in range(world_size)]
        assert [worker for part in owned for worker in part] == list(range(workers))
        assert all(owned)
        assert [plan.owner(worker, world_size) for worker in range(workers)] == [
            rank for rank, part in enumerate(owned) for _ in part
        ]


def test_more_processes_than_logical_workers_are_refused():
    with pytest.raises(ValueError, match="rank 2 of 3 can't share 2"):
        Plan(workers=2, microbatch=1).owned(2, 3)


def test_a_plan_of_nothing_is_refused():
    with pytest.raises(ValueError, match="accumulate is 0"):
        Plan(workers=2, microbatch=1, accumulate=0)


def test_every_position_is_taken_once_and_in_order():
    plan = Plan(workers=3, microbatch=2, accumulate=2)
    taken = [
        position
        for step in range(3)
        for micro in range(2)
        for worker in range(3)
        for position in plan.samples(step=step, micro=micro, worker=worker)
    ]

    assert taken == list(range(3 * plan.global_batch))


def test_every_microbatch_has_random_numbers_of_its_own():
    plan = Plan(workers=4, microbatch=1, accumulate=3)
    places = [
        (step, micro, worker) for step in range(5) for micro in range(3) for worker in range(4)
    ]

    seeds = {
        plan.stream_seed(step=step, micro=micro, worker=worker) for step, micro, worker in places
    }
    other = Plan(workers=4, microbatch=1, accumulate=3, seed=1)

    assert len(seeds) == len(places)
    assert other.stream_seed(step=0, micro=0, worker=0) not in seeds


# Sums


def tree_of(values):
    """The same tree, as one would write it down."""
    if len(values) == 1:
        return values[0]
    middle = split_node(0, len(values))
    left, right = tree_of(values[:middle]), tree_of(values[middle:])
    return left[0] + right[0], left[1] + right[1]


def bits(sums):
    return tuple(vector.numpy().tobytes() for vector in sums)


@pytest.mark.parametrize("workers", [1, 2, 3, 5, 8, 13])
def test_one_process_sums_on_the_tree(workers):
    found = TreeSum()(leaf, Plan(workers=workers, microbatch=1), like=leaf(0))

    assert bits(found) == bits(tree_of([leaf(worker) for worker in range(workers)]))


@pytest.mark.parametrize("count", range(1, 12))
def test_a_window_sums_on_the_same_tree_and_can_be_saved_anywhere(count):
    window = WindowSum()
    for number in range(count):
        window.push(leaf(number))
        restored = WindowSum()
        restored.load_state_dict(window.state_dict())
        window = restored

    assert window.count == count
    assert bits(window.total()) == bits(tree_of([leaf(number) for number in range(count)]))


def test_a_window_whose_sums_are_not_its_own_is_refused():
    window = WindowSum()
    window.push(leaf(0))
    state = window.state_dict() | {"count": 2}

    with pytest.raises(ValueError, match="aren't those of 2 microbatches"):
        window.load_state_dict(state)


@pytest.mark.dist
@pytest.mark.slow
def test_the_sum_has_the_same_bits_on_any_number_of_processes_and_a_ring_has_not(tmp_path):
    gang = shared_gang()
    for workers in (5, 8):
        tree = gang.run(sum_everywhere, str(tmp_path), "tree", workers)
        expected = bits(tree_of([leaf(worker) for worker in range(workers)]))
        assert {size: found for size, found in tree[0].items() if found != expected} == {}
        assert {found for said in tree for found in said.values()} == {expected}
        assert set(tree[0]) == set(range(1, workers + 1))

    ring = gang.run(sum_everywhere, str(tmp_path), "ring", 8)
    assert len({floats for floats, _ in ring[0].values()}) > 3
    assert {wholes for _, wholes in ring[0].values()} == {bits(leaf_sum())[1]}


def leaf_sum():
    return TreeSum()(leaf, Plan(workers=8, microbatch=1), like=leaf(0))


def test_the_norm_is_that_of_all_gradients():
    gradients = [torch.randn(300, 400), torch.randn(7)]

    expected = torch.cat([gradient.flatten() for gradient in gradients]).double().norm().float()
    assert torch.allclose(grad_norm(gradients), expected)


# The trainer


class Counting(nn.Module):
    """A layer, statistics, a count, and a constant table: of two of its numbers a third of thrice is another one."""

    mean: Tensor
    count: Tensor
    table: Tensor

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", torch.tensor([0.1, 0.7070642709732056, 0.9261711835861206]))

    def forward(self, x):
        y = self.layer(x * self.table)
        with torch.no_grad():
            self.mean.lerp_(y.mean(0), 0.5)
            self.count += len(y)
        return y


def rows(samples):
    return torch.stack(
        [torch.randn(3, generator=torch.Generator().manual_seed(sample)) for sample in samples]
    )


def loss_of(model, samples):
    return model(rows(samples)).square().sum(), len(samples)


def make(plan, **options):
    torch.manual_seed(0)
    model = Counting()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, Trainer(model, optimizer, plan, options.pop("loss_of", loss_of), **options)


def test_a_step_is_that_of_the_whole_batch():
    plan = Plan(workers=3, microbatch=2, accumulate=2)
    model, trainer = make(plan)
    torch.manual_seed(0)
    plain = Counting()
    loss = plain(rows(range(plan.global_batch))).square().sum() / plan.global_batch
    loss.backward()
    with torch.no_grad():
        for parameter in plain.parameters():
            assert parameter.grad is not None
            parameter.add_(parameter.grad, alpha=-0.1)

    report = trainer.step()

    assert report.samples == range(12)
    assert report.loss == pytest.approx(loss.item())
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(ours, theirs)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_buffers_are_averaged_counted_or_left_alone():
    model, trainer = make(Plan(workers=3, microbatch=2))
    table = model.table.clone()
    torch.manual_seed(0)
    plain = Counting()
    with torch.no_grad():
        means = [0.5 * plain.layer(rows(range(2 * w, 2 * w + 2)) * table).mean(0) for w in range(3)]

    trainer.step()

    assert torch.allclose(model.mean, sum(means) / 3)
    assert model.count == 6
    trainer.step()
    assert model.count == 12
    assert model.table.numpy().tobytes() == table.numpy().tobytes()


def test_the_gradient_is_clipped():
    model, trainer = make(Plan(workers=2, microbatch=2), max_norm=0.01)
    before = [parameter.detach().clone() for parameter in model.parameters()]

    report = trainer.step()

    moved = grad_norm([new - old for new, old in zip(model.parameters(), before, strict=True)])
    assert report.norm > 0.01
    assert moved.item() == pytest.approx(0.1 * 0.01, rel=1e-3)


def test_an_overflow_is_skipped_and_halves_the_scale():
    scale = LossScale(scale=1024.0, interval=1)
    overflowing = iter([False, True, False])

    def sometimes(model, samples):
        loss, count = loss_of(model, samples)
        return (loss * float("inf") if next(overflowing) else loss), count

    model, trainer = make(Plan(workers=1, microbatch=2), scale=scale, loss_of=sometimes)
    reports, weights = [], []
    for _ in range(3):
        reports.append(trainer.step())
        weights.append(model.layer.weight.detach().clone())

    assert [report.skipped for report in reports] == [False, True, False]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[1], weights[2])
    assert scale.scale == 2048.0
    assert trainer.steps_done == 3


def test_a_scale_of_a_power_of_two_changes_no_bit():
    plain, trainer = make(Plan(workers=3, microbatch=2))
    scaled, other = make(Plan(workers=3, microbatch=2), scale=LossScale(scale=4096.0))

    for _ in range(3):
        trainer.step()
        other.step()

    for ours, theirs in zip(plain.parameters(), scaled.parameters(), strict=True):
        assert ours.detach().numpy().tobytes() == theirs.detach().numpy().tobytes()


def test_the_streams_of_the_process_are_left_alone_and_each_worker_has_its_own():
    drawn = []

    def drawing(model, samples):
        drawn.append((random.random(), torch.rand(1).item()))
        return loss_of(model, samples)

    _, trainer = make(Plan(workers=4, microbatch=1, accumulate=2), loss_of=drawing)
    before = random.getstate(), torch.get_rng_state()
    trainer.step()

    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    assert [len(set(stream)) for stream in zip(*drawn, strict=True)] == [8, 8]
    _, again = make(Plan(workers=4, microbatch=1, accumulate=2), loss_of=drawing)
    again.step()
    assert drawn[8:] == drawn[:8]


def test_it_goes_on_within_a_step():
    plan = Plan(workers=2, microbatch=2, accumulate=3)
    model, trainer = make(plan)
    other, resumed = make(plan)
    for _ in range(4):
        trainer.microbatch()
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(trainer.state_dict())

    assert (resumed.steps_done, resumed.micro) == (1, 1)
    for _ in range(5):
        assert trainer.microbatch() == resumed.microbatch()
    for ours, theirs in zip(model.state_dict().values(), other.state_dict().values(), strict=True):
        assert ours.numpy().tobytes() == theirs.numpy().tobytes()


@pytest.mark.parametrize(
    "change", [{"workers": 4}, {"microbatch": 3}, {"accumulate": 2}, {"seed": 1}]
)
def test_a_run_of_another_plan_is_refused(change):
    plan = {"workers": 2, "microbatch": 2}
    _, saved = make(Plan(**plan))
    _, trainer = make(Plan(**plan | change))

    with pytest.raises(ValueError, match=f"the saved run has {next(iter(change))} "):
        trainer.load_state_dict(saved.state_dict())
