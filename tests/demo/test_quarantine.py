"""A NaN shard and a gradient spike in the demo's training: noticed, saved as suspect, gone on from without the shard.

The run that never had the shard is the judge: every parameter, moment, buffer, RNG stream and loss,
bit by bit.
"""

import dataclasses
import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.optim import AdamW  # noqa: E402

import ckptfmt  # noqa: E402
from ckptfmt.loop.pace import Pace  # noqa: E402
from ckptfmt_conformance.elastic import Trainer, pin_arithmetic  # noqa: E402
from ckptfmt_tools.demo.judge import digest_state  # noqa: E402
from ckptfmt_tools.demo.settings import make_settings  # noqa: E402
from ckptfmt_tools.demo.task import Task, TinyGPT, read_text  # noqa: E402
from ckptfmt_tools.demo.train import make_plan, make_scheduler, seed_streams  # noqa: E402
from tests.demo.test_task import own_streams  # noqa: E402, F401

SETTINGS = dataclasses.replace(
    make_settings(steps=18, quick=True),
    width=32,
    context=32,
    text_nbytes=64 << 10,
    chunk_nbytes=256,
)
TEXT = read_text(text_nbytes=SETTINGS.text_nbytes, chunk_nbytes=SETTINGS.chunk_nbytes)
LAST = SETTINGS.steps
FACTORS = {"nan": math.nan, "spike": 1e4}


def find_shard() -> tuple[str, int, int]:
    """Two neighbouring samples of which the first is met in the last third of the run, when norms have an average."""
    sampler = ckptfmt.Sampler(
        TEXT, global_batch=SETTINGS.global_batch, seed=SETTINGS.seed, worker=(0, 1)
    )
    met = {sample: step for step in reversed(range(LAST)) for sample in sampler.indices(step)}
    met_first = {min(met.get(s, LAST), met.get(s + 1, LAST)): s for s in range(len(TEXT) - 1)}
    begin = met_first[min(step for step in met_first if step > 2 * LAST // 3)]
    return "shard-7", begin, begin + 2


SHARD = find_shard()


class Outcome:
    """What one start did: facts by step, and how it ended."""

    def __init__(self) -> None:
        self.facts: dict[int, dict[str, Any]] = {}
        self.begin = self.step = 0
        self.alarm: str | None = None
        self.passed_over: list[str] = []
        self.claim: str | None = None


def train(
    run: Any, *, factor: float = 1.0, watched: bool = True, skip: int | None = None
) -> Outcome:
    """Start the demo's training once.

    Args:
        run: directory.
        factor: of the loss of a sample of the shard.
        watched: whether there is a trigger.
        skip: the position from which the shard is left out; None to leave it in.
    """
    pin_arithmetic()
    torch.manual_seed(SETTINGS.seed)
    model = TinyGPT(SETTINGS)
    optimizer = AdamW(
        model.parameters(), lr=SETTINGS.lr, weight_decay=SETTINGS.weight_decay, foreach=False
    )
    scheduler = make_scheduler(optimizer, SETTINGS)
    sampler = ckptfmt.Sampler(
        TEXT, global_batch=SETTINGS.global_batch, seed=SETTINGS.seed, worker=(0, 1)
    )
    task = Task(model, TEXT, sampler, SETTINGS)

    def loss_of(module: Any, positions: range) -> tuple[Any, int]:
        taken = len(task.taken)
        loss, count = task.loss_of(module, positions)
        is_bad = any(SHARD[1] <= sample < SHARD[2] for sample in task.taken[taken:])
        return loss * factor if is_bad and factor != 1.0 else loss, count

    norms: list[Any] = []
    optimizer.register_step_pre_hook(
        lambda *_: norms.append(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]))
    )
    trainer = Trainer(model, optimizer, make_plan(SETTINGS), loss_of)
    seed_streams(SETTINGS.seed + 1)
    extra = {"scheduler": scheduler, "trainer": trainer}
    state = ckptfmt.State(
        weights=model, optimizer=optimizer, data=sampler, config=SETTINGS, extra=extra
    )
    triggers, found = ckptfmt.Triggers() if watched else None, Outcome()
    with ckptfmt.Checkpointer(
        run, state, every=SETTINGS.every, saver="thread", triggers=triggers
    ) as checkpointer:
        if skip is not None:
            sampler.skip(shard=SHARD, policy="shift", from_pos=skip, reason="NaN")
        found.begin, found.passed_over = checkpointer.step, checkpointer.passed_over
        for step in checkpointer.steps(LAST):
            task.begin_step()
            loss = trainer.step().loss
            scheduler.step()
            if triggers is not None:
                triggers.feed(loss=loss, grad_norm=norms[-1])
            digests = digest_state(model, optimizer, scheduler, sampler, trainer)
            del digests[
                "cursor/data"
            ]  # it moves when the body is over: the next facts, and the last ones, have it
            found.facts[step + 1] = digests | {
                "loss": float(loss).hex(),
                "samples": tuple(task.taken),
            }
        found.facts[checkpointer.step]["cursor"] = sampler.state_dict()
        found.step, found.alarm = checkpointer.step, checkpointer.alarm
        found.claim = None if checkpointer.load_report is None else checkpointer.load_report.claim
    return found


def last_good(found: Outcome) -> int:
    """The step of the newest save before the alarm's."""
    return (found.step - 1) // SETTINGS.every * SETTINGS.every


@pytest.fixture(scope="module")
def never(tmp_path_factory: Any) -> Outcome:
    """The run that never had the shard, which nothing disturbs."""
    position = (
        last_good(train(tmp_path_factory.mktemp("looks"), factor=math.nan)) * SETTINGS.global_batch
    )
    return train(tmp_path_factory.mktemp("never"), skip=position)


def differing(found: Outcome, expected: Outcome) -> set[str]:
    """The names of all facts that differ in any step that `found` did, or that one of them lacks."""
    names = {
        name
        for step in found.facts
        for name in found.facts[step].keys() | expected.facts[step].keys()
    }
    return {
        name
        for name in names
        if any(
            found.facts[step].get(name) != expected.facts[step].get(name) for step in found.facts
        )
    }


@pytest.mark.usefixtures("own_streams")
@pytest.mark.parametrize("kind", [*FACTORS])
def test_the_run_goes_on_as_the_one_that_never_had_the_shard(
    tmp_path: Any, never: Outcome, kind: str
) -> None:
    ended = train(tmp_path, factor=FACTORS[kind])
    assert ended.alarm is not None
    assert ("loss is nan" if kind == "nan" else "times the average") in ended.alarm
    assert 2 * LAST // 3 < ended.step < LAST
    before = {step: facts for step, facts in ended.facts.items() if step < ended.step}
    assert before == {step: never.facts[step] for step in before}

    good = last_good(ended)
    healed = train(tmp_path, factor=FACTORS[kind], skip=good * SETTINGS.global_batch)
    assert (healed.begin, healed.step, healed.alarm, healed.claim) == (good, LAST, None, "T1")
    assert ["is suspect: " + ended.alarm in sentence for sentence in healed.passed_over] == [True]
    assert sorted(healed.facts) == list(range(good + 1, LAST + 1))
    assert differing(healed, never) == set()
    assert {name.partition("/")[0] for name in healed.facts[LAST]} >= {
        "parameter", "moment", "step", "buffer", "schedule", "trainer", "rng", "loss", "samples", "cursor",
    }  # fmt: skip
    assert {one.step: one.suspect is not None for one in ckptfmt.Run(tmp_path).list()}[
        ended.step
    ] is True
    assert ckptfmt.validate(tmp_path).valid


@pytest.mark.usefixtures("own_streams")
@pytest.mark.parametrize("without", ["trigger", "mark", "skip"])
def test_without_one_of_them_it_is_another_run(
    tmp_path: Any, never: Outcome, without: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative controls: trigger, mark and skip are each needed."""
    if without == "mark":
        monkeypatch.setattr(Pace, "doubt", lambda _, label: label)
    ended = train(tmp_path, factor=math.nan, watched=without != "trigger")
    if (
        without == "trigger"
    ):  # nobody stops it: it ends with weights that are NaN, and was saved with them
        assert (ended.step, ended.alarm) == (LAST, None)
        assert any(name.startswith("parameter/") for name in differing(ended, never))
        return
    position = None if without == "skip" else ended.step * SETTINGS.global_batch
    again = train(tmp_path, factor=math.nan, skip=position, watched=without == "skip")
    if without == "mark":  # it goes on from the checkpoint that is NaN
        assert again.begin == ended.step
        assert any(name.startswith("parameter/") for name in differing(again, never))
    else:  # the same shard stops it again
        assert (again.begin, again.step, again.alarm) == (last_good(ended), ended.step, ended.alarm)
        assert again.facts[again.step]["loss"] == "nan"
