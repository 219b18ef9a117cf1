"""Trainings whose next steps are decided by something that their State doesn't have: no resume claims T1."""

from __future__ import annotations

import random
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import ckptfmt
from ckptfmt.adapters.torch.step_watch import StepWatch

BATCHES = torch.randn(400, 4, generator=torch.Generator().manual_seed(0))


class Warmup:
    """A scheduler of somebody's own, without a state_dict."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.count = optimizer, 0

    def step(self) -> None:
        self.count += 1
        for group in self.optimizer.param_groups:
            group["lr"] = 0.01 * self.count


def trajectory(
    run: Path, prepare: Any, *, steps: int = 5, every: int = 2
) -> tuple[list[float], ckptfmt.LoadReport | None, tuple[str, ...]]:
    """Train up to a step, from where the run stands; return losses, the load's report and the reports of the saves."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    sampler = ckptfmt.Sampler(400, global_batch=4, seed=0)
    this = types.SimpleNamespace(
        model=model, optimizer=optimizer, after=[], given={"optimizer": optimizer}, is_due=lambda _: True,
        zero_first=False, losses=[],
    )  # fmt: skip
    prepare(this)
    state = ckptfmt.State(**{"weights": model, "data": sampler, "config": {}, **this.given})
    with ckptfmt.Checkpointer(run, state, every=every, saver="inline") as checkpointer:
        batches = iter(torch.utils.data.DataLoader(BATCHES, batch_sampler=sampler))  # type: ignore[arg-type]
        for step in checkpointer.steps(steps):
            if this.zero_first:
                optimizer.zero_grad()
            loss = this.model(next(batches)).square().mean()
            loss.backward()
            if this.is_due(step):
                optimizer.step()
                if not this.zero_first:
                    optimizer.zero_grad()
            for action in this.after:
                action(loss)
            this.losses.append(loss.item())
    return this.losses, checkpointer.load_report, checkpointer.reports


def plateau(this: Any) -> None:
    scheduler = lr_scheduler.ReduceLROnPlateau(this.optimizer, patience=1, threshold=10.0)
    this.after.append(lambda loss: scheduler.step(loss.item()))


def one_of_two(this: Any) -> None:
    first = lr_scheduler.LambdaLR(this.optimizer, lambda _: 1.0)
    second = lr_scheduler.CosineAnnealingLR(this.optimizer, 7)
    this.given["extra"] = {"scheduler": first}
    this.after += [lambda _: first.step(), lambda _: second.step()]


def unrelated_last_epoch(this: Any) -> None:
    scheduler = lr_scheduler.CosineAnnealingLR(this.optimizer, 7)
    this.given["extra"] = {"progress": {"last_epoch": 3}}
    this.after.append(lambda _: scheduler.step())


def copied_state(this: Any) -> None:
    scheduler = lr_scheduler.CosineAnnealingLR(this.optimizer, 7)
    this.given["extra"] = {"scheduler": scheduler.state_dict()}
    this.after.append(lambda _: scheduler.step())


def own_schedule(this: Any) -> None:
    scheduler = Warmup(this.optimizer)
    this.after.append(lambda _: scheduler.step())


def copied_optimizer(this: Any) -> None:
    this.given["optimizer"] = this.optimizer.state_dict()


def rebound_optimizer(this: Any) -> None:
    this.given["optimizer"] = torch.optim.AdamW(this.model.parameters(), lr=0.01)


def second_optimizer(this: Any) -> None:
    head = nn.Linear(1, 1)
    body, this.model = this.model, None
    this.model = nn.Sequential(body, head)
    this.given["weights"] = this.model
    second = torch.optim.Adam(head.parameters(), lr=0.05)
    this.after += [lambda _: second.step(), lambda _: second.zero_grad()]


def second_model(this: Any) -> None:
    other = nn.Linear(4, 1)
    second = torch.optim.Adam(other.parameters(), lr=0.05)

    def train(_: object) -> None:
        second.zero_grad()
        other(BATCHES[:4]).square().mean().backward()
        second.step()

    this.after.append(train)


class Sharp(torch.optim.Optimizer):
    """A SAM: the optimizer in an attribute has the momenta, which no state_dict of this one has."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01, "momentum": 0.9})
        self.base_optimizer = torch.optim.SGD(self.param_groups, lr=0.01, momentum=0.9)
        self.param_groups = self.base_optimizer.param_groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override] # no loss
        del closure
        self.base_optimizer.step()


class SharpByItself(Sharp):
    """A SAM that loads as the published one does."""

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        self.base_optimizer.param_groups = self.param_groups


def sharp(this: Any, kind: type[Sharp] = Sharp) -> None:
    optimizer = kind(this.model.parameters())
    this.given["optimizer"] = optimizer
    this.is_due = lambda _: False
    this.after += [lambda _: optimizer.step(), lambda _: optimizer.zero_grad()]


def sharp_by_itself(this: Any) -> None:
    sharp(this, SharpByItself)


def sharp_held(this: Any) -> None:
    sharp(this)
    this.given["extra"] = {"base": this.given["optimizer"].base_optimizer}


def left_out_by_a_hook(this: Any) -> None:
    def drop(_module: object, state: Any, prefix: str, _: object) -> None:
        state.pop(f"{prefix}bias")

    this.model.register_state_dict_post_hook(drop)


def frozen_left_out_by_a_hook(this: Any) -> None:
    base = nn.Linear(1, 1).requires_grad_(requires_grad=False)
    left_out_by_a_hook(types.SimpleNamespace(model=base))
    nn.init.ones_(base.weight)
    nn.init.ones_(base.bias)
    this.model = nn.Sequential(this.model, base)
    this.given["weights"] = this.model


def accumulation_of_biases(this: Any) -> None:
    """Only some of an optimizer's parameters are trained."""
    width = 40
    layers = [nn.Linear(1, 1) for _ in range(width)]
    for layer in layers:
        layer.weight.requires_grad = False
    this.model.requires_grad_(requires_grad=False)
    this.model = nn.Sequential(this.model, *layers)
    optimizer = torch.optim.SGD(this.model.parameters(), lr=1e-3)
    this.given |= {"weights": this.model, "optimizer": optimizer}
    this.is_due = lambda _: False
    due: list[object] = []

    def step(_: object) -> None:
        due.append(None)
        if len(due) % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()

    this.after.append(step)


def accumulation(this: Any) -> None:
    this.is_due = lambda step: (step + 1) % 4 == 0


def never_cleared(this: Any) -> None:
    this.zero_first, this.optimizer.zero_grad = True, lambda: None


def accumulation_beside(this: Any) -> None:
    """A second optimizer of the State makes a step every time, the first one every third time."""
    head = nn.Linear(1, 1)
    this.model = nn.Sequential(this.model, head)
    this.given["weights"] = this.model
    second = torch.optim.Adam(head.parameters(), lr=0.05)
    this.given["optimizer"] = {"body": this.optimizer, "head": second}
    this.is_due = lambda step: step % 3 == 2
    this.after += [lambda _: second.step(), lambda _: second.zero_grad()]


@pytest.mark.parametrize(
    ("prepare", "name", "what"),
    [
        (plateau, "SCHEDULER_NOT_SAVED", "ReduceLROnPlateau"),
        (one_of_two, "SCHEDULER_NOT_SAVED", "CosineAnnealingLR"),
        (unrelated_last_epoch, "SCHEDULER_NOT_SAVED", "CosineAnnealingLR"),
        (copied_state, "SCHEDULER_NOT_SAVED", "CosineAnnealingLR"),
        (own_schedule, "SCHEDULER_NOT_SAVED", "Warmup"),
        (copied_optimizer, "OPTIMIZER_NOT_SAVED", "AdamW"),
        (rebound_optimizer, "OPTIMIZER_NOT_SAVED", "AdamW"),
        (second_optimizer, "OPTIMIZER_NOT_SAVED", "Adam"),
        (second_model, "OPTIMIZER_NOT_SAVED", "Adam"),
        (sharp, "OPTIMIZER_NOT_SAVED", "SGD"),
        (sharp_by_itself, "OPTIMIZER_NOT_SAVED", "SGD"),
        (left_out_by_a_hook, "PARAMETER_NOT_SAVED", "bias"),
        (accumulation_of_biases, "GRADIENTS_PENDING", "backward()"),
        (accumulation, "GRADIENTS_PENDING", "backward()"),
        (never_cleared, "GRADIENTS_PENDING", "backward()"),
        (accumulation_beside, "GRADIENTS_PENDING", "backward()"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_no_state_has_is_told_by_the_first_saves_and_lowers_the_claim(
    tmp_path: Path, prepare: Any, name: str, what: str
) -> None:
    _, _, reports = trajectory(tmp_path, prepare)
    assert any(report.startswith(name) and what in report for report in reports), reports
    _, report, _ = trajectory(tmp_path, prepare, steps=8)
    assert report is not None
    assert report.claim == "S1"
    assert any(what in reason for reason in report.lowered_by)


def nothing_else(this: Any) -> None:
    del this


def cleared_first(this: Any) -> None:
    """The gradients of a finished step stay until the next step begins."""
    this.zero_first = True


def zeros_kept(this: Any) -> None:
    clear = this.optimizer.zero_grad
    this.optimizer.zero_grad = lambda: clear(set_to_none=False)


def held_schedules(this: Any) -> None:
    steps = [
        lr_scheduler.ConstantLR(this.optimizer, 0.5, 3),
        lr_scheduler.CosineAnnealingLR(this.optimizer, 7),
    ]
    scheduler = lr_scheduler.SequentialLR(this.optimizer, steps, [3])
    this.given["extra"] = {"scheduler": scheduler}
    this.after.append(lambda _: scheduler.step())


def adversary(this: Any) -> None:
    """A generator and a discriminator: the pass of one leaves gradients in the other, which clears them first."""
    other = nn.Linear(1, 1)
    second = torch.optim.Adam(other.parameters(), lr=0.05)
    this.zero_first = True
    this.given |= {
        "weights": {"g": this.model, "d": other},
        "optimizer": {"g": this.optimizer, "d": second},
    }

    def train(_: object) -> None:
        second.zero_grad()
        other(this.model(BATCHES[:4]).detach()).square().mean().backward()
        second.step()
        this.optimizer.zero_grad()
        other(this.model(BATCHES[:4])).square().mean().backward()
        this.optimizer.step()

    this.after.append(train)


def frozen_beside(this: Any) -> None:
    """Weights that ask for gradients and that nothing trains."""
    this.model = nn.Sequential(this.model, nn.Linear(1, 1))
    this.given["weights"] = this.model


class Trainer:
    """A program's own class that has all there is, and counts its steps."""

    def __init__(self, this: Any) -> None:
        self.model, self.optimizer, self.count = this.model, this.optimizer, 0

    def step(self) -> None:
        self.count += 1


def trainer(this: Any) -> None:
    holder = Trainer(this)
    this.after.append(lambda _: holder.step())


def inner_loop(this: Any) -> None:
    """An optimizer that is made for one step, as in meta-learning, and still stands in a variable at the save."""
    kept: list[object] = []

    def adapt(_: object) -> None:
        fast = nn.Parameter(torch.ones(4))
        inner = torch.optim.SGD([fast], lr=0.1)
        for _ in range(2):
            inner.zero_grad()
            fast.square().sum().backward()
            inner.step()
        kept[:] = [inner]

    this.after.append(adapt)


@pytest.mark.parametrize(
    "prepare",
    [
        nothing_else,
        cleared_first,
        zeros_kept,
        held_schedules,
        sharp_held,
        frozen_left_out_by_a_hook,
        adversary,
        frozen_beside,
        trainer,
        inner_loop,
    ],
    ids=lambda value: value.__name__,
)
def test_a_state_that_has_everything_claims_t1_and_is_told_nothing(
    tmp_path: Path, prepare: Any
) -> None:
    first, _, reports = trajectory(tmp_path / "r", prepare, steps=4)
    assert not [report for report in reports if "NOT_SAVED" in report or "PENDING" in report]
    rest, report, _ = trajectory(tmp_path / "r", prepare, steps=9, every=3)
    assert report is not None
    assert (report.claim, report.lowered_by) == ("T1", ())
    undisturbed, _, _ = trajectory(tmp_path / "whole", prepare, steps=9)
    assert first + rest == undisturbed


def test_a_step_of_the_optimizer_within_an_optimizer_is_a_step_of_the_training() -> None:
    """A loop with SAM was said to take batches ahead: LOADER_AHEAD."""
    parameter = nn.Parameter(torch.ones(2))
    optimizer = Sharp([parameter])
    watch = StepWatch([optimizer])
    before = watch.progress()
    assert not watch.has_trained(before)
    optimizer.base_optimizer.step()
    assert watch.has_trained(before)
    watch.close()


class Evaluation:
    """An evaluation in each step, by a loader that no State holds."""

    def __init__(self, **options: Any) -> None:
        self.options = options

    def __call__(self, this: Any) -> None:
        batches: Any = BATCHES[:4]
        loader: Any = torch.utils.data.DataLoader(batches, 4, num_workers=1, **self.options)
        this.model = nn.Sequential(this.model, nn.Dropout(0.5))
        this.given["weights"] = this.model
        this.after.append(lambda _: [self.evaluate(this.model, batch) for batch in loader])

    @staticmethod
    @torch.no_grad()
    def evaluate(model: nn.Module, batch: torch.Tensor) -> None:
        model.eval()(batch)
        model.train()


@pytest.mark.parametrize(
    ("options", "claim"),
    [
        ({"persistent_workers": True}, "S1"),
        ({"persistent_workers": True, "generator": torch.Generator()}, "T1"),
        ({}, "T1"),
    ],
    ids=["persistent", "own generator", "new workers"],
)
def test_worker_processes_that_outlive_an_evaluation_lower_the_claim(
    tmp_path: Path, options: dict[str, Any], claim: str
) -> None:
    """Their seed is drawn from the stream of the training once in each launch, as the losses show."""
    undisturbed, _, _ = trajectory(tmp_path / "whole", Evaluation(**options), steps=4)
    first, _, reports = trajectory(tmp_path / "r", Evaluation(**options), steps=2)
    is_told = any(report.startswith("PERSISTENT_WORKERS") for report in reports)
    assert is_told is (claim == "S1"), reports
    rest, report, _ = trajectory(tmp_path / "r", Evaluation(**options), steps=4)
    assert report is not None
    assert report.claim == claim, report.lowered_by
    assert (first + rest == undisturbed) is (claim == "T1")


@pytest.mark.parametrize("kind", ["followed", "sampler"])
def test_worker_processes_of_the_training_itself_may_live_on(tmp_path: Path, kind: str) -> None:
    sampler = ckptfmt.Sampler(400, global_batch=4, seed=0)
    options: dict[str, Any] = (
        {"batch_size": 4} if kind == "followed" else {"batch_sampler": sampler}
    )
    loader: Any = torch.utils.data.DataLoader(
        BATCHES,  # type: ignore[arg-type]
        num_workers=1,
        persistent_workers=True,
        **options,
    )
    data = loader if kind == "followed" else sampler
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = ckptfmt.State(weights=model, optimizer=optimizer, data=data, config={})
    with ckptfmt.Checkpointer(tmp_path, state, every=1, saver="inline") as checkpointer:
        batches = iter(loader)
        for _ in checkpointer.steps(3):
            next(batches)
    assert not [report for report in checkpointer.reports if "PERSISTENT" in report]


# --- generators -----------------------------------------------------------------------------------


class Augment:
    """Draws from a generator that its state_dict leaves out."""

    def __init__(self, seed: int) -> None:
        self.random, self.count = np.random.default_rng(seed), 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


class Noisy(nn.Linear):
    """A module with generators of its own."""

    def __init__(self, seed: int) -> None:
        super().__init__(2, 2)
        self.random = torch.Generator().manual_seed(seed)
        self.of_numpy = np.random.default_rng(seed)
        self.of_python = random.Random(seed)


class Langevin(torch.optim.SGD):
    """An optimizer that draws from a generator of its own."""

    def __init__(self, parameters: Any, seed: int) -> None:
        super().__init__(parameters, lr=0.1)
        self.random = torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(
    "kind",
    [
        "torch", "numpy", "legacy", "python", "object", "nested",
        "module", "module's of numpy", "module's of Python", "optimizer",
    ],
)  # fmt: skip
def test_a_generator_anywhere_in_the_state_goes_on_where_it_stood(
    tmp_path: Path, kind: str
) -> None:
    def make(seed: int) -> tuple[ckptfmt.State, Any]:
        weights = Noisy(seed)
        optimizer = Langevin(weights.parameters(), seed)
        made: dict[str, Any] = {
            "torch": torch.Generator().manual_seed(seed), "numpy": np.random.default_rng(seed),
            "legacy": np.random.RandomState(seed), "python": random.Random(seed), "object": Augment(seed),
            "nested": {"deep": [{"g": np.random.default_rng(seed)}, 1]},
        }  # fmt: skip
        generator: Any = made.get(kind, 0)
        state = ckptfmt.State(
            weights=weights, optimizer=optimizer, data={"p": 1}, config={}, extra={"g": generator}
        )
        held = {
            "object": getattr(generator, "random", None), "optimizer": optimizer.random,
            "module": weights.random, "module's of numpy": weights.of_numpy,
            "module's of Python": weights.of_python,
        }  # fmt: skip
        generator = held.get(kind, generator)
        return state, generator["deep"][0]["g"] if kind == "nested" else generator

    def draw(generator: Any) -> object:
        if isinstance(generator, torch.Generator):
            return float(torch.rand((), generator=generator))
        return generator.random()

    state, generator = make(1)
    draw(generator)
    ckptfmt.save(tmp_path / "c", state, step=1)
    expected = draw(generator)
    state, generator = make(2)
    report = ckptfmt.load(tmp_path / "c", state)
    assert draw(generator) == expected
    assert report.lowered_by == ()


def test_a_generator_that_an_object_holds_since_the_save_lowers_the_claim(tmp_path: Path) -> None:
    augment: Any = Augment(1)
    generator, augment.random = augment.random, None

    def state() -> ckptfmt.State:
        weights = {"w": torch.zeros(2)}
        return ckptfmt.State(
            weights=weights, optimizer={"s": 1}, data={"p": 1}, config={}, extra={"a": augment}
        )

    ckptfmt.save(tmp_path / "c", state(), step=1)
    augment.random = generator
    report = ckptfmt.load(tmp_path / "c", state())
    assert report.claim != "T1"
    assert any(
        "STREAM_MISSING" in reason and "extra/a/random" in reason for reason in report.lowered_by
    )


# --- objects of unknown classes -------------------------------------------------------------------


class Patience:
    """A scheduler around one of torch's, whose state_dict leaves out how often nothing got better."""

    def __init__(self, optimizer: torch.optim.Optimizer, *, is_whole: bool = False) -> None:
        self.inner, self.count, self.is_whole = (
            lr_scheduler.ReduceLROnPlateau(optimizer, patience=3),
            0,
            is_whole,
        )

    def step(self, value: float) -> None:
        self.count += 1
        self.inner.step(value)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count} | ({"inner": self.inner.state_dict()} if self.is_whole else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]
        if self.is_whole:
            self.inner.load_state_dict(state["inner"])


class HarmlessPatience(Patience):
    ckptfmt_exact = True


class Average:
    """A moving average, as many write it: all that changes is in its state_dict."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.parameters = list(optimizer.param_groups[0]["params"])
        self.shadow, self.count = [part.detach().clone() for part in self.parameters], 0

    def step(self, _: float) -> None:
        self.count += 1
        for mean, part in zip(self.shadow, self.parameters, strict=True):
            mean.lerp_(part.detach(), 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow, self.count = list(state["shadow"]), state["count"]


class ForgetfulAverage(Average):
    """A moving average that begins anew after each start."""

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def whole_patience(optimizer: torch.optim.Optimizer) -> Patience:
    return Patience(optimizer, is_whole=True)


@pytest.mark.parametrize(
    ("make", "left_out"),
    [
        (Patience, "inner."),
        (ForgetfulAverage, "shadow"),
        (whole_patience, None),
        (HarmlessPatience, None),
        (Average, None),
    ],
)
def test_what_a_state_dict_leaves_out_is_not_claimed(
    tmp_path: Path, make: Any, left_out: str | None
) -> None:
    def build() -> tuple[ckptfmt.State, Any]:
        torch.manual_seed(1)
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        own = make(optimizer)
        return ckptfmt.State(
            weights=model, optimizer=optimizer, data={}, config={}, extra={"own": own}
        ), own

    state, own = build()
    with torch.no_grad():
        own_parameters: Any = state.weights
        own_parameters.weight.mul_(2.0)
    for _ in range(4):
        own.step(1.0)
    ckptfmt.save(tmp_path / "c", state, step=4)
    report = ckptfmt.load(tmp_path / "c", build()[0])
    assert (report.claim == "T1") == (left_out is None), report.lowered_by
    if left_out is not None:
        (reason,) = report.lowered_by
        assert type(own).__qualname__ in reason
        assert left_out in reason
        assert "ckptfmt_exact" in reason


class Momentum(torch.optim.SGD):
    """An optimizer of somebody's own that counts its steps in an attribute, which no state_dict of torch has."""

    count = 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        return super().step(closure)


def test_what_an_optimizer_keeps_in_an_attribute_of_its_own_is_not_claimed(tmp_path: Path) -> None:
    def build() -> ckptfmt.State:
        model = nn.Linear(2, 2)
        return ckptfmt.State(
            weights=model, optimizer=Momentum(model.parameters(), lr=1.0), data={}, config={}
        )

    state = build()
    optimizer: Any = state.optimizer
    optimizer.step()
    ckptfmt.save(tmp_path / "c", state, step=1)
    report = ckptfmt.load(tmp_path / "c", build())
    assert report.claim != "T1"
    assert any("its attribute count" in reason for reason in report.lowered_by)


@pytest.mark.parametrize("rng", [None, False])
def test_doubts_of_a_framework_lower_the_claim(tmp_path: Path, rng: Any) -> None:
    state = ckptfmt.State(weights={"w": torch.ones(2)}, data={"at": 3}, config={}, rng=rng)
    told = "an epoch begins again"
    state.doubts = (told,)
    ckptfmt.save(tmp_path, state, step=3)
    live = ckptfmt.State(weights={"w": torch.zeros(2)}, data={"at": 0}, config={}, rng=rng)
    report = ckptfmt.load(tmp_path, live)
    assert report.claim == "S0"
    assert told in report.lowered_by


class Around:
    """An object that shows an optimizer's groups, state and state_dict as its own."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups
        self.state = optimizer.state

    def state_dict(self) -> Any:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.optimizer.load_state_dict(state)

    def step(self) -> None:
        self.optimizer.step()


class Lookahead(Around):
    """The same, with weights and a count of its own."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)
        self.count = 0
        self.slow = [torch.ones(2)]

    def step(self) -> None:
        super().step()
        self.count += 1
        self.slow[0].lerp_(torch.zeros(2), 0.5)


@pytest.mark.parametrize("kind", [Around, Lookahead])
def test_what_an_object_around_an_optimizer_keeps_is_not_claimed(
    tmp_path: Path, kind: type[Around]
) -> None:
    """The count and the weights were lost under T1."""

    def build() -> tuple[ckptfmt.State, Around]:
        model = nn.Linear(2, 2)
        around = kind(torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9))
        return ckptfmt.State(weights=model, optimizer=around, data={}, config={}), around

    state, around = build()
    around.step()
    ckptfmt.save(tmp_path / "c", state, step=1)
    report = ckptfmt.load(tmp_path / "c", build()[0])
    if kind is Around:
        assert (report.claim, report.lowered_by) == ("T1", ())
    else:
        assert report.claim != "T1"
        told = [reason for reason in report.lowered_by if "leaves out what changes" in reason]
        assert len(told) == 1, report.lowered_by
        assert "Lookahead" in told[0]
        assert "count and 1 more" in told[0]
