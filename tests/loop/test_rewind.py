"""Rewinds: the same processes go back to a save, and go on bit for bit like a run that never left."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptfmt
from ckptfmt.errors import CkptError, Code
from ckptfmt.run.lineage import read_known_run
from ckptfmt.run.spent_time import read_entries
from ckptfmt.store import open_store
from ckptfmt.store.memory import MemoryStore

STEPS = 24
SAVINGS = {
    "inline": ckptfmt.Saving(saver="inline"),
    "thread": ckptfmt.Saving(saver="thread"),
    "process": ckptfmt.Saving(),
    "deltas": ckptfmt.Saving(delta="auto"),
    "no overlap": ckptfmt.Saving(overlap=False),
    "one slot": ckptfmt.Saving(slots=1),
    "snapshots": ckptfmt.Saving(snapshot_every=1),
    "snapshots in a thread": ckptfmt.Saving(saver="thread", snapshot_every=1, delta="auto"),
}


class Training:
    """A training with dropout, momentum and a schedule, over samples in a random order."""

    def __init__(self, *, workers: int = 0, device: str = "cpu") -> None:
        torch.manual_seed(3)
        self.device = device
        self.model = torch.nn.Sequential(
            torch.nn.Linear(4, 64), torch.nn.BatchNorm1d(64), torch.nn.Dropout(0.5),
            torch.nn.Linear(64, 1),
        ).to(device)  # fmt: skip
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 5, 0.7)
        self.sampler = ckptfmt.Sampler(60, global_batch=4, seed=1)
        self.workers = workers
        self.state = ckptfmt.State(
            weights=self.model,
            optimizer=self.optimizer,
            data=self.sampler,
            config={},
            extra={"scheduler": self.scheduler},
        )
        self.rows: dict[int, Any] = {}

    def batches(self) -> Iterator[Any]:
        inputs: Any = torch.randn(60, 4, generator=torch.Generator().manual_seed(5))
        numbers = torch.arange(60.0).reshape(-1, 1)
        return iter(
            torch.utils.data.DataLoader(
                torch.cat([inputs, numbers], 1),  # type: ignore[arg-type]
                batch_sampler=self.sampler,
                num_workers=self.workers,
            )
        )

    def train(self, step: int, batch: Any, *, poison: Any = None) -> float:
        inputs = batch[:, :4].to(self.device)
        loss = self.model(inputs).square().mean()
        if poison is not None and poison in batch[:, 4].int().tolist():
            loss = loss * float("nan")
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.rows[step] = (batch[:, 4].int().tolist(), loss.item().hex())
        return float(loss.item())

    def bits(self) -> list[bytes]:
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        tensors = [*self.model.state_dict().values(), *moments]
        streams = [torch.get_rng_state()]
        streams += [torch.cuda.get_rng_state()] if self.device == "cuda" else []
        return [tensor.cpu().numpy().tobytes() for tensor in (*tensors, *streams)]


def undisturbed(**options: Any) -> Training:
    training = Training(**options)
    with ckptfmt.Checkpointer(
        MemoryStore(), training.state, every=5, saving=SAVINGS["inline"]
    ) as checkpointer:
        batches = training.batches()
        for step in checkpointer.steps(STEPS):
            training.train(step, next(batches))
    return training


@pytest.mark.parametrize("saving", SAVINGS.values(), ids=SAVINGS.keys())
@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(2, 42))]
)
def test_rewinds_at_any_time_end_in_the_bits_of_the_undisturbed_run(
    tmp_path: Path, saving: ckptfmt.Saving, seed: int
) -> None:
    """In bodies and between steps, with saves in flight, one after the other, to any save."""
    chance = random.Random(seed)
    right = undisturbed()
    training = Training()
    with ckptfmt.Checkpointer(tmp_path, training.state, every=2, saving=saving) as checkpointer:
        batches = training.batches()
        for step in checkpointer.steps(STEPS):
            training.train(step, next(batches))
            if step > 2 and checkpointer.rewinds < 8 and chance.random() < 0.4:
                to = None if chance.random() < 0.6 else chance.randrange(2, step + 1)
                report = checkpointer.rewind(to)
                assert report.claim == "S1"  # the RNG streams come with the next step
                assert checkpointer.step == report.step <= step
                continue
        assert checkpointer.rewinds == 8
        assert checkpointer.load_report is not None
        assert checkpointer.load_report.claim == "T1", checkpointer.load_report.lowered_by
        assert checkpointer.load_report.refuted_by is None
    assert training.rows == right.rows
    assert training.bits() == right.bits()
    again = Training()
    with ckptfmt.Checkpointer(tmp_path, again.state, saving=saving) as checkpointer:
        assert checkpointer.step == STEPS
    assert again.bits()[:-1] == right.bits()[:-1]


@pytest.mark.cuda
@pytest.mark.parametrize("saving", SAVINGS.values(), ids=SAVINGS.keys())
def test_rewinds_on_a_device_end_in_the_bits_of_the_undisturbed_run(
    tmp_path: Path, saving: ckptfmt.Saving
) -> None:
    right = undisturbed(device="cuda")
    training = Training(device="cuda")
    with ckptfmt.Checkpointer(tmp_path, training.state, every=2, saving=saving) as checkpointer:
        batches = training.batches()
        for step in checkpointer.steps(STEPS):
            training.train(step, next(batches))
            if step in (5, 12, 19) and checkpointer.rewinds < (step + 2) // 7:
                checkpointer.rewind()
    assert checkpointer.rewinds == 3
    assert (training.rows, training.bits()) == (right.rows, right.bits())


def test_a_rewind_that_leaves_the_streams_is_seen(tmp_path: Path) -> None:
    """The control: without the RNG streams, the steps that are done again are others."""
    training = Training()
    with ckptfmt.Checkpointer(tmp_path, training.state, every=4) as checkpointer:
        batches = training.batches()
        for step in checkpointer.steps(12):
            training.train(step, next(batches))
            if step == 9 and not checkpointer.rewinds:
                checkpointer.rewind()
                checkpointer.restore_rng()
                torch.rand(1)
    assert training.rows != {step: undisturbed().rows[step] for step in range(12)}
    assert checkpointer.load_report is not None
    assert checkpointer.load_report.evidence == "refuted"


@pytest.mark.parametrize("kind", ["process", "deltas", "thread"])
def test_the_newest_save_comes_from_memory(tmp_path: Path, kind: str) -> None:
    training = Training()
    reads = []
    with ckptfmt.Checkpointer(
        tmp_path, training.state, every=3, saving=SAVINGS[kind]
    ) as checkpointer:
        batches = training.batches()
        for step in checkpointer.steps(14):
            training.train(step, next(batches))
            if step == 10 and not checkpointer.rewinds:
                reads.append(checkpointer.rewind().reads)
                reads.append(checkpointer.rewind(to=3).reads)
    assert (reads[0].read_nbytes, reads[0].memory_nbytes) == (0, reads[0].needed_nbytes)
    assert reads[0].needed_nbytes > 0
    # No slot has the oldest save any more: it is read, and verified.
    assert (reads[1].memory_nbytes, reads[1].verified_nbytes >= reads[1].needed_nbytes) == (0, True)


def test_a_skip_is_the_run_without_the_samples(tmp_path: Path) -> None:
    """The steps after the rewind train on the samples that a run gets that never had the others."""
    right = Training()
    with ckptfmt.Checkpointer(
        MemoryStore(), right.state, every=4, saving=SAVINGS["inline"]
    ) as checkpointer:
        batches = right.batches()
        for step in checkpointer.steps(12):
            right.train(step, next(batches))
            if step == 7:
                right.sampler.commit(8)
                right.sampler.skip(positions=(32, 40), policy="shift")
                with torch.random.fork_rng():  # a new iterator draws a number
                    batches = right.batches()
    training = Training()
    with ckptfmt.Checkpointer(tmp_path, training.state, every=4) as checkpointer:
        batches = training.batches()
        for step in checkpointer.steps(12):
            training.train(step, next(batches))
            if step == 9 and not checkpointer.rewinds:
                report = checkpointer.rewind(skip=True, reason="a spike")
                assert report.step == 8
    assert training.rows == right.rows
    assert training.bits() == right.bits()
    resumed = Training()
    with ckptfmt.Checkpointer(tmp_path, resumed.state):
        cursor = resumed.sampler.state_dict()
    assert [(skip["reason"], skip["range"]) for skip in cursor["skips"]] == [("a spike", [32, 40])]


@pytest.mark.parametrize("workers", [0, 2])
def test_after_an_alarm_the_run_goes_on_without_the_batch(tmp_path: Path, workers: int) -> None:
    """A sample gives a NaN each time: the run goes back by itself, and trains on all other batches."""
    training = Training(workers=workers)
    poison = undisturbed().rows[9][0][0]
    triggers = ckptfmt.Triggers("rewind")
    with ckptfmt.Checkpointer(
        tmp_path, training.state, every=4, stop=ckptfmt.Stop(triggers=triggers)
    ) as checkpointer:
        batches = training.batches()
        seen = 0
        for step in checkpointer.steps(14):
            if workers and checkpointer.rewinds != seen:
                batches = training.batches()
            seen = checkpointer.rewinds
            triggers.feed(loss=training.train(step, next(batches), poison=poison))
        assert (checkpointer.rewinds, checkpointer.stopped, checkpointer.step) == (1, False, 14)
    assert all(float.fromhex(loss) == float.fromhex(loss) for _, loss in training.rows.values())
    assert not any(poison in samples for samples, _ in training.rows.values())
    names = sorted(entry.name for entry in tmp_path.glob("step-*"))
    assert names[-1] == "step-00000014-l0002"


def test_alarms_without_an_end_stop_the_run(tmp_path: Path) -> None:
    """Weights that give a NaN for each batch: three times back, then the run stops as for "save"."""
    training = Training()
    triggers = ckptfmt.Triggers("rewind")
    with ckptfmt.Checkpointer(
        tmp_path, training.state, every=4, stop=ckptfmt.Stop(triggers=triggers)
    ) as checkpointer:
        batches = training.batches()
        for step in checkpointer.steps(14):
            loss = training.train(step, next(batches))
            triggers.feed(loss=float("nan") if step >= 5 else loss)
        assert (checkpointer.rewinds, checkpointer.stopped) == (3, True)
        assert checkpointer.alarm == "step 6: loss is nan"
    with ckptfmt.Checkpointer(tmp_path, Training().state) as checkpointer:
        assert checkpointer.step == 4
        assert any("suspect" in sentence for sentence in checkpointer.passed_over)


def epochs_of(place: Any, act: Callable[[Any, int], None]) -> tuple[list[Any], list[bytes]]:
    """Train three epochs of five steps on a plain loader; return the last samples of each step."""
    torch.manual_seed(1)
    inputs: Any = torch.arange(10.0).reshape(-1, 1)
    loader = torch.utils.data.DataLoader(inputs, batch_size=2, shuffle=True)
    model = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Dropout(0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    state = ckptfmt.State(weights=model, optimizer=optimizer, data=loader, config={})
    rows: dict[int, Any] = {}
    with ckptfmt.Checkpointer(place, state, every=2) as checkpointer:
        for epoch in checkpointer.epochs(3):
            for batch in loader:
                loss = model(batch).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                rows[checkpointer.step] = (epoch, batch.flatten().tolist(), loss.item().hex())
                act(checkpointer, checkpointer.step)
    return [rows[step] for step in sorted(rows)], [
        tensor.detach().numpy().tobytes() for tensor in model.state_dict().values()
    ]


@pytest.mark.parametrize("at", [3, 5, 6, 9, 12])
def test_a_loop_over_epochs_goes_back_within_and_across_epochs(tmp_path: Path, at: int) -> None:
    right = epochs_of(tmp_path / "right", lambda *_: None)

    def act(checkpointer: Any, step: int) -> None:
        if step == at and checkpointer.rewinds < 2:
            checkpointer.rewind(None if checkpointer.rewinds else max(2, at - 5))

    assert epochs_of(tmp_path / "run", act) == right
    assert len(right[0]) == 15


def test_a_loop_of_its_own_goes_back(tmp_path: Path) -> None:
    right = undisturbed()
    training = Training()
    with ckptfmt.Checkpointer(tmp_path, training.state, every=5) as checkpointer:
        batches = training.batches()
        while checkpointer.step < STEPS:
            with checkpointer.training_step() as step:
                training.train(step, next(batches))
                if step == 13 and not checkpointer.rewinds:
                    checkpointer.rewind()
            if step == 17 and checkpointer.rewinds == 1:
                checkpointer.rewind()
        checkpointer.save()
    assert training.rows == right.rows
    assert training.bits() == right.bits()


def test_a_rewind_without_a_save_is_refused(tmp_path: Path) -> None:
    training = Training()
    with ckptfmt.Checkpointer(tmp_path, training.state) as checkpointer:
        with pytest.raises(CkptError) as early:
            checkpointer.rewind()
        batches = training.batches()
        for step in checkpointer.steps(6):
            training.train(step, next(batches))
            if step == 2:
                with pytest.raises(CkptError) as nothing:
                    checkpointer.rewind()
            if step == 4:
                checkpointer.save()
            if step == 5:
                with pytest.raises(CkptError) as before:
                    checkpointer.rewind(to=4)
                with pytest.raises(CkptError) as unknown:
                    checkpointer.rewind("step-1")
    assert early.value.code == Code.ARGUMENT
    assert nothing.value.code == before.value.code == Code.NOT_COMMITTED
    assert unknown.value.code == Code.NOT_COMMITTED
    assert "save()" in str(nothing.value)


def test_a_skip_without_a_sampler_is_refused(tmp_path: Path) -> None:
    with contextlib.suppress(StopIteration):
        epochs_of(tmp_path, refuse_skip)


def refuse_skip(checkpointer: Any, step: int) -> None:
    if step == 4:
        with pytest.raises(CkptError) as refused:
            checkpointer.rewind(skip=True)
        assert refused.value.code == Code.ARGUMENT
        assert "ckptfmt.Sampler" in str(refused.value)


def test_a_save_in_a_cache_alone_is_gone_back_to(tmp_path: Path) -> None:
    """The newest save isn't at home yet: its contents come from memory, and its files go home."""
    right = undisturbed()
    training = Training()
    cache = ckptfmt.Cache(tmp_path / "cache", upload_every=3)
    with ckptfmt.Checkpointer(
        tmp_path / "run", training.state, every=4, copies=[cache]
    ) as checkpointer:
        batches = training.batches()
        for step in checkpointer.steps(STEPS):
            training.train(step, next(batches))
            if (step, checkpointer.rewinds) in ((9, 0), (18, 1)):
                report = checkpointer.rewind()
                assert (report.step, report.reads.read_nbytes) == (8 if step == 9 else 16, 0)
    assert training.rows == right.rows
    assert training.bits() == right.bits()


def test_the_ledger_has_the_launches_of_rewinds(tmp_path: Path) -> None:
    training = Training()
    with ckptfmt.Checkpointer(tmp_path, training.state, every=4, ledger=True) as checkpointer:
        batches = training.batches()
        for step in checkpointer.steps(12):
            training.train(step, next(batches))
            if (step, checkpointer.rewinds) in ((6, 0), (10, 1)):
                checkpointer.rewind()
    store = open_store(tmp_path, writable=False)
    entries, _ = read_entries(store, read_known_run(store))
    found = [(entry.launch, entry.first_step, entry.step) for entry in entries.values()]
    assert found == [(1, 0, 6), (2, 4, 10), (3, 8, 12)]


# --- found by a review ----------------------------------------------------------------------------


def run_steps(
    place: Any, act: Callable[[Any, Training, int], None], *, steps: int = 14, **options: Any
) -> tuple[Training, Any]:
    """Train, with a call in the body of each step; a body that went back is left at once."""
    training = Training()
    with ckptfmt.Checkpointer(place, training.state, every=4, **options) as checkpointer:
        batches = training.batches()
        for step in checkpointer.steps(steps):
            rewinds = checkpointer.rewinds
            training.train(step, next(batches))
            act(checkpointer, training, step)
            if checkpointer.rewinds != rewinds:
                continue
    return training, checkpointer


def rows_of(count: int) -> dict[int, Any]:
    return {step: row for step, row in undisturbed().rows.items() if step < count}


def test_gradients_are_dropped(tmp_path: Path) -> None:
    def act(checkpointer: Any, training: Training, step: int) -> None:
        if (step, checkpointer.rewinds) == (9, 0):
            training.model(torch.full((4, 4), float("nan"))).sum().backward()
            checkpointer.rewind()

    training, _ = run_steps(tmp_path, act)
    assert training.rows == rows_of(14)


def test_the_rest_of_an_epochs_body_changes_nothing(tmp_path: Path) -> None:
    """A scheduler that makes a step after each epoch makes none for an epoch that was left."""

    def train(place: Path, at: int | None, *, alarms: bool) -> list[Any]:
        torch.manual_seed(1)
        inputs: Any = torch.arange(10.0).reshape(-1, 1)
        loader = torch.utils.data.DataLoader(inputs, batch_size=2, shuffle=True)
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        state = ckptfmt.State(
            weights=model, optimizer=optimizer, data=loader, config={}, extra={"s": scheduler}
        )
        triggers = ckptfmt.Triggers("rewind")
        rows: dict[int, Any] = {}
        with ckptfmt.Checkpointer(
            place, state, every=2, stop=ckptfmt.Stop(triggers=triggers)
        ) as checkpointer:
            for epoch in checkpointer.epochs(3):
                for batch in loader:
                    loss = model(batch).square().mean()
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    step = checkpointer.step
                    rows[step] = (epoch, loss.item().hex(), scheduler.get_last_lr())
                    is_now = step == at and not checkpointer.rewinds
                    triggers.feed(loss=float("nan") if is_now and alarms else 1.0)
                    if is_now and not alarms:
                        checkpointer.rewind()
                        checkpointer.rewind()  # a second time, from nowhere
                scheduler.step()
            assert checkpointer.rewinds == (0 if at is None else 1 if alarms else 2)
            report = checkpointer.load_report
            assert report is None or (report.claim, report.refuted_by) == ("T1", None)
        return [rows[step] for step in sorted(rows)]

    right = train(tmp_path / "right", None, alarms=False)
    for at in (3, 6, 9, 12, 14):
        assert train(tmp_path / f"by hand {at}", at, alarms=False) == right, at
        assert train(tmp_path / f"alarm {at}", at, alarms=True) == right, at


def test_a_load_that_fails_leaves_nothing_to_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ckptfmt import checkpointer as module  # noqa: PLC0415

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("in the middle of the load")

    def act(checkpointer: Any, _training: Training, step: int) -> None:
        if step == 9:
            monkeypatch.setattr(module, "load_once", fail)
            with pytest.raises(RuntimeError):
                checkpointer.rewind()
            monkeypatch.undo()

    with pytest.raises(CkptError, match="neither the checkpoint's") as refused:
        run_steps(tmp_path, act)
    assert refused.value.code == Code.ARGUMENT
    with ckptfmt.Checkpointer(tmp_path, Training().state) as checkpointer:
        assert checkpointer.step == 8


@pytest.mark.parametrize(("step", "to"), [(9, None), (2, None), (9, 1), (9, "step-00000001-l0001")])
def test_a_launch_that_was_overtaken_doesnt_go_back(tmp_path: Path, step: int, to: Any) -> None:
    """Without a save to go back to, NOT_COMMITTED hid the newer launch."""

    def act(checkpointer: Any, _training: Training, now: int) -> None:
        if now == step:
            other = Training()
            with ckptfmt.Checkpointer(tmp_path, other.state) as newer:
                assert newer.launch is not None
            with pytest.raises(CkptError) as refused:
                checkpointer.rewind(to)
            assert refused.value.code == Code.FENCED
            raise KeyboardInterrupt

    # The saves are committed before the newer launch begins: an overtaken save commits nothing.
    with pytest.raises(KeyboardInterrupt):
        run_steps(tmp_path, act, saving=ckptfmt.Saving(saver="inline"))
    assert len(list((tmp_path / "launches").iterdir())) == 2


@pytest.mark.parametrize("to", ["fresh", "auto", "step-1", True, 1.5])
def test_wrong_arguments_change_nothing(tmp_path: Path, to: Any) -> None:
    def act(checkpointer: Any, _training: Training, step: int) -> None:
        if step == 9:
            with pytest.raises(CkptError):
                checkpointer.rewind(to)
            with pytest.raises(CkptError):
                checkpointer.rewind(skip=True, reason=None)
            assert checkpointer.launch.launch == 1

    training, checkpointer = run_steps(tmp_path, act)
    assert training.rows == rows_of(14)
    assert not [report for report in checkpointer.reports if "WITNESS" in report]


def test_each_bad_batch_between_two_saves_is_left_out(tmp_path: Path) -> None:
    training = Training()
    right = undisturbed().rows
    poisons = {right[9][0][0], right[11][0][0]}
    triggers = ckptfmt.Triggers("rewind")
    with ckptfmt.Checkpointer(
        tmp_path, training.state, every=8, stop=ckptfmt.Stop(triggers=triggers)
    ) as checkpointer:
        batches = training.batches()
        for step in checkpointer.steps(14):
            batch = next(batches)
            bad = poisons & set(batch[:, 4].int().tolist())
            triggers.feed(loss=training.train(step, batch, poison=min(bad, default=None)))
        assert (checkpointer.rewinds, checkpointer.stopped) == (2, False)
    assert not any(poisons & set(samples) for samples, _ in training.rows.values())
    later = [sample for step in range(8, 14) for sample in training.rows[step][0]]
    earlier = [sample for step in range(8) for sample in right[step][0]]
    assert not set(later[:12]) & set(earlier)  # the rest of the epoch: no sample twice


def test_a_skip_of_the_program_since_the_save_stays(tmp_path: Path) -> None:
    def act(checkpointer: Any, training: Training, step: int) -> None:
        if (step, checkpointer.rewinds) == (9, 0):
            later = training.sampler.position + 12
            training.sampler.skip(samples=[47], from_pos=later, reason="of the program")
            checkpointer.rewind()

    training, _ = run_steps(tmp_path, act, steps=12)
    assert [skip.reason for skip in training.sampler.skips] == ["of the program"]


def test_abandoned_saves_are_no_bases(tmp_path: Path) -> None:
    def act(checkpointer: Any, _training: Training, step: int) -> None:
        if (step, checkpointer.rewinds) == (9, 0):
            checkpointer.rewind(to=4)

    run_steps(tmp_path, act, saving=SAVINGS["deltas"])
    run = ckptfmt.Run(tmp_path)
    run.delete("step-00000008-l0001")
    report = ckptfmt.validate(tmp_path)
    assert not report.violations
    with ckptfmt.Checkpointer(tmp_path, Training().state) as checkpointer:
        assert checkpointer.step == 14


def test_optimizer_state_newer_than_the_save_is_dropped(tmp_path: Path) -> None:
    training = Training()
    with ckptfmt.Checkpointer(tmp_path, training.state) as checkpointer:
        checkpointer.restore_rng()
        batches = training.batches()
        checkpointer.save(0)
        for step in checkpointer.steps(6):
            training.train(step, next(batches))
            if step == 3 and not checkpointer.rewinds:
                checkpointer.rewind()
    right = Training()
    with ckptfmt.Checkpointer(MemoryStore(), right.state, saving=SAVINGS["inline"]) as checkpointer:
        checkpointer.restore_rng()
        batches = right.batches()
        for step in checkpointer.steps(6):
            right.train(step, next(batches))
    assert training.rows == right.rows


def test_a_rewind_by_hand_forgets_the_alarm(tmp_path: Path) -> None:
    triggers = ckptfmt.Triggers("rewind")

    def act(checkpointer: Any, _training: Training, step: int) -> None:
        if (step, checkpointer.rewinds) == (9, 0):
            triggers.feed(loss=float("nan"))
            checkpointer.rewind()

    training, checkpointer = run_steps(tmp_path, act, stop=ckptfmt.Stop(triggers=triggers))
    assert (checkpointer.rewinds, checkpointer.alarm, checkpointer.stopped) == (1, None, False)
    assert training.rows == rows_of(14)


def test_a_rewind_before_the_batch_keeps_the_iterator(tmp_path: Path) -> None:
    training = Training()
    with ckptfmt.Checkpointer(tmp_path, training.state, every=4) as checkpointer:
        batches = training.batches()
        for step in checkpointer.steps(14):
            if (step, checkpointer.rewinds) == (10, 0):
                checkpointer.rewind()
                continue
            training.train(step, next(batches))
    assert training.rows == rows_of(14)


def test_an_alarm_without_a_save_to_go_back_to_stops_the_run(tmp_path: Path) -> None:
    triggers = ckptfmt.Triggers("rewind")

    def act(checkpointer: Any, _training: Training, step: int) -> None:
        if step == 3:
            checkpointer.save(suspect="by the program")
        triggers.feed(loss=float("nan") if step == 5 else 1.0)

    _, checkpointer = run_steps(tmp_path, act, stop=ckptfmt.Stop(triggers=triggers), keep=None)
    assert (checkpointer.rewinds, checkpointer.stopped, checkpointer.step) == (0, True, 6)


def test_an_alarm_in_a_loop_that_counts_itself_stops_the_run(tmp_path: Path) -> None:
    training = Training()
    triggers = ckptfmt.Triggers("rewind")
    with ckptfmt.Checkpointer(
        tmp_path, training.state, every=4, stop=ckptfmt.Stop(triggers=triggers)
    ) as checkpointer:
        batches = training.batches()
        checkpointer.restore_rng()
        for step in range(1, 12):
            loss = training.train(step, next(batches))
            triggers.feed(loss=float("nan") if step == 6 else loss)
            checkpointer.end_step(step)
            if checkpointer.stopped:
                break
        assert (step, checkpointer.rewinds, checkpointer.step) == (6, 0, 6)


@pytest.mark.parametrize("is_late", [False, True])
def test_iterators_made_anew_too_late_lower_the_claim(tmp_path: Path, *, is_late: bool) -> None:
    right = undisturbed(workers=1)
    training = Training(workers=1)
    with ckptfmt.Checkpointer(tmp_path, training.state, every=5) as checkpointer:
        batches = training.batches()
        seen = 0
        for step in checkpointer.steps(STEPS):
            if is_late and checkpointer.rewinds != seen:
                batches = training.batches()
                seen = 1
            training.train(step, next(batches))
            if (step, checkpointer.rewinds) == (7, 0):
                checkpointer.rewind()
                if not is_late:
                    batches = training.batches()
        report = checkpointer.load_report
    assert report is not None
    assert report.claim == ("S1" if is_late else "T1"), report.lowered_by
    assert (training.rows == right.rows) is not is_late


def test_a_closed_checkpointer_doesnt_go_back(tmp_path: Path) -> None:
    _, checkpointer = run_steps(tmp_path, lambda *_: None)
    with pytest.raises(CkptError, match="closed"):
        checkpointer.rewind()
