"""accelerate through ckptfmt: trainings that are killed and resumed, and what their checkpoints are for others."""

from pathlib import Path

import pytest

pytest.importorskip("accelerate")

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType, ProjectConfiguration, set_seed
from safetensors.torch import load_file
from torch.utils.data import DataLoader, Dataset, TensorDataset

import ckptfmt
from ckptfmt.errors import CkptError
from ckptfmt.plugins.accelerate import CkptfmtAccelerator
from tests.plugins import trainings

SCRIPT = Path(__file__).with_name("accelerate_script.py")
STEPS = 46


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Return the journal of a training that nobody kills; each is run once."""
    places = {}

    def run(loader, processes=1):
        if loader not in places:
            places[loader] = place = tmp_path_factory.mktemp(loader)
            options = ("--loader", loader, "--evaluate")
            trainings.run(SCRIPT, place / "run", place / "journal", *options, processes=processes)
        return places[loader] / "journal"

    return run


def resume_differs(place, right, loader, *options, kill_at, processes=1):
    """Return how a training that is killed and resumed differs from an undisturbed one, on all processes."""
    command = (SCRIPT, place / "run", place / "journal", "--loader", loader, "--evaluate", *options)
    trainings.run(*command, kill_at=kill_at, processes=processes)
    trainings.run(*command, processes=processes)
    found = []
    for rank in range(processes):
        done = trainings.read(f"{place}/journal-{rank}")
        assert sum(map(len, done.values())) < STEPS + 8, "it has begun anew"
        found += trainings.compare(f"{right}-{rank}", f"{place}/journal-{rank}", last_step=STEPS)
    if not found:
        judged, compared, _ = trainings.verdict(place / "run")
        assert (judged, compared >= {"loss", "gradient norm", "weights"}) == ("verified", True)
    return found


@pytest.mark.parametrize("loader", ["plain", "stateful"])
def test_a_resume_within_an_epoch_is_the_same_run_bit_for_bit(tmp_path, undisturbed, loader):
    if loader == "stateful":
        pytest.importorskip("torchdata")
    assert resume_differs(tmp_path, undisturbed(loader), loader, kill_at=24) == []
    if loader == "plain":
        weights_are_for_everybody(tmp_path / "run")


def weights_are_for_everybody(run):
    assert ckptfmt.validate(run)
    newest = ckptfmt.Run(run).newest()
    assert newest.step == 42
    assert newest.metrics.keys() == {"loss"}
    assert [entry.step for entry in ckptfmt.Run(run).list() if entry.state == "committed"] == [
        28,
        35,
        42,
    ]
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 16), torch.nn.Dropout(0.4), torch.nn.Linear(16, 1)
    )
    ckptfmt.load(
        run, ckptfmt.State(weights={"model": model}), only="weights:model", allow="unexpected"
    )
    (shard,) = (run / newest.name).glob("weights-*.safetensors")
    tensors = load_file(shard)
    assert {name: tensor.shape for name, tensor in tensors.items()} == {
        **{f"model/{name}": tensor.shape for name, tensor in model.state_dict().items()},
        "model_1/weight": (1, 6),
        "model_1/bias": (1,),
    }
    assert all(
        torch.equal(tensors[f"model/{name}"], tensor) for name, tensor in model.state_dict().items()
    )


def test_a_resume_between_epochs_is_the_same_run_bit_for_bit(tmp_path, undisturbed):
    assert resume_differs(tmp_path, undisturbed("seedable"), "seedable", kill_at=30) == []


def test_two_processes_resume_bit_for_bit(tmp_path, undisturbed):
    right = undisturbed("generator", processes=2)
    assert resume_differs(tmp_path, right, "generator", kill_at=24, processes=2) == []


def test_the_comparison_sees_an_order_that_is_not_restored(tmp_path, undisturbed, may_be_refuted):
    found = resume_differs(tmp_path, undisturbed("plain"), "plain", "--forget", kill_at=24)
    assert found
    assert "numbers" in found[0]
    assert "rng" in found[0]
    assert trainings.verdict(tmp_path / "run")[:2] == ("refuted", {"rng"})
    may_be_refuted.add(tmp_path / "run")


def test_state_that_accelerate_does_not_save_is_found_by_the_loss(
    tmp_path, undisturbed, may_be_refuted
):
    """With the same random numbers, another loss shows a state outside of what was saved."""
    assert resume_differs(tmp_path, undisturbed("plain"), "plain", "--hidden", kill_at=24)
    judged, what, told = trainings.verdict(tmp_path / "run")
    assert (judged, what) == ("refuted", {"loss"})
    assert told.startswith("step 22 had the same RNG streams, but its loss is")
    assert "a state that isn't in State" in told
    may_be_refuted.add(tmp_path / "run")


def test_accelerate_alone_goes_on_with_another_order_and_other_random_numbers(
    tmp_path, undisturbed
):
    """What the plug-in's documentation says of accelerate, with a seedable sampler even.

    Up to the kill, both do the same: the plug-in changes nothing of the training.
    """
    found = resume_differs(tmp_path, undisturbed("seedable"), "seedable", "--native", kill_at=24)
    assert found[0] == "step 22 differs in loss, numbers, optimizers, rng, weights"


# --- in this process ------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def own_state():
    """accelerate keeps its state for the whole process."""
    yield
    for kind in (AcceleratorState, GradientState, PartialState):
        kind._reset_state()


class Rows(Dataset):  # type: ignore[type-arg]
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.full((3,), float(index))


def accelerator_with(tmp_path, accelerator=None, **options):
    accelerator = accelerator or CkptfmtAccelerator(cpu=True, run=tmp_path / "run", **options)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(Rows(), batch_size=2)
    return accelerator, *accelerator.prepare(model, optimizer, loader)


def train(accelerator, model, optimizer, loader, steps=3):
    for _, inputs in zip(range(steps), loader, strict=False):
        accelerator.backward(model(inputs).sum())
        optimizer.step()
        optimizer.zero_grad()


def test_accelerates_naming_and_limit_are_the_runs(tmp_path):
    project = ProjectConfiguration(
        project_dir=str(tmp_path), automatic_checkpoint_naming=True, total_limit=2
    )
    accelerator = CkptfmtAccelerator(cpu=True, project_config=project)
    accelerator, model, optimizer, loader = accelerator_with(tmp_path, accelerator)
    assert accelerator.load_state() is None
    for _ in range(3):
        train(accelerator, model, optimizer, loader, steps=1)
        accelerator.save_state("ignored, as accelerate does").wait()
    assert accelerator.save_iteration == 3
    weight = model.weight.detach().clone()
    train(accelerator, model, optimizer, loader)
    report = accelerator.load_state()
    assert (report.step, accelerator.updates, accelerator.save_iteration) == (3, 3, 3)
    assert torch.equal(model.weight, weight)
    accelerator.end_training()
    names = [
        entry.name
        for entry in ckptfmt.Run(tmp_path / "checkpoints").list()
        if entry.state == "committed"
    ]
    assert names == ["step-00000002-l0001", "step-00000003-l0001"]


def test_a_run_goes_back_to_any_of_its_checkpoints(tmp_path):
    accelerator, model, optimizer, loader = accelerator_with(tmp_path)
    train(accelerator, model, optimizer, loader)
    first = accelerator.save_state()
    weight = model.weight.detach().clone()
    train(accelerator, model, optimizer, loader)
    accelerator.save_state()
    assert accelerator.load_state(first.path).step == 3
    assert torch.equal(model.weight, weight)
    train(accelerator, model, optimizer, loader)
    accelerator.save_state()
    accelerator.end_training()
    assert ckptfmt.Run(tmp_path / "run").newest().name == "step-00000006-l0002"


def test_numbers_of_the_callers_own_are_not_those_of_updates(tmp_path):
    """The count of a run's steps doesn't go back: updates that the witness counted would refuse these numbers."""
    for first in (1, 3):
        accelerator, model, optimizer, loader = accelerator_with(tmp_path)
        assert accelerator.load_state() is None or accelerator.updates == 2
        for step in (first, first + 1):
            train(accelerator, model, optimizer, loader)
            assert accelerator.save_state(step=step).step == step
        accelerator.end_training()


def test_a_directory_of_its_own_is_one_checkpoint(tmp_path):
    accelerator, model, optimizer, loader = accelerator_with(tmp_path)
    for _ in range(2):
        train(accelerator, model, optimizer, loader)
        handle = accelerator.save_state(str(tmp_path / "own"))
    assert handle.path == str(tmp_path / "own")
    weight = model.weight.detach().clone()
    train(accelerator, model, optimizer, loader)
    assert accelerator.load_state(str(tmp_path / "own")).step == accelerator.updates == 6
    assert torch.equal(model.weight, weight)
    assert ckptfmt.validate(tmp_path / "own")


def test_a_save_that_failed_is_raised_at_the_end(tmp_path):
    accelerator, model, optimizer, loader = accelerator_with(tmp_path, saving={"saver": "thread"})
    train(accelerator, model, optimizer, loader)
    accelerator.save_state().wait()
    ckptfmt.Checkpointer(
        tmp_path / "run", ckptfmt.State(), resume="fresh"
    ).restore()  # another launch owns the run now
    train(accelerator, model, optimizer, loader)
    accelerator.save_state()
    with pytest.raises(CkptError) as caught:
        accelerator.end_training()
    assert caught.value.code == "FENCED"


def test_what_cannot_be_done_is_said(tmp_path):
    accelerator, *_ = accelerator_with(tmp_path)
    accelerator.register_save_state_pre_hook(lambda *_: None)
    with pytest.raises(NotImplementedError, match="beside the checkpoint"):
        accelerator.save_state()
    with pytest.raises(TypeError, match="strict"):
        accelerator.load_state(strict=False)


def test_a_directory_is_needed(tmp_path):
    accelerator = CkptfmtAccelerator(cpu=True)
    accelerator, *_ = accelerator_with(tmp_path, accelerator)
    with pytest.raises(ValueError, match="run="):
        accelerator.save_state()
    assert isinstance(accelerator, Accelerator)


# --- positions, counts and refusals ---------------------------------------------------------------


def seen_by(run, how, stop=None):
    """Return the rows that a training is given in one launch of a run; it saves after its sixth batch."""
    set_seed(1)
    accelerator = CkptfmtAccelerator(
        run=run, cpu=True, gradient_accumulation_steps=2 if how == "accumulate" else 1
    )
    if how == "scaler":
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=1000)
    model = torch.nn.Linear(1, 1)
    loader = DataLoader(TensorDataset(torch.arange(24.0)[:, None]), batch_size=2, shuffle=True)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=1e-4), loader
    )
    accelerator.load_state()
    (epoch, batch), seen = accelerator.position(loader), []
    assert (epoch, batch) in {(0, 0), (0, 6)}
    for epoch in range(2):
        for (inputs,) in accelerator.skip_first_batches(loader):
            with accelerator.accumulate(model):
                loss = model(inputs).square().mean() * (
                    float("inf") if how == "scaler" and batch == 2 else 1
                )
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            seen.append(inputs.flatten().tolist())
            batch += 1
            assert accelerator.position(loader) == divmod(batch, 12)
            if batch == 6 and not epoch:
                accelerator.save_state()
            if batch == stop:
                accelerator.end_training()
                return seen
    accelerator.end_training()
    return seen


@pytest.mark.parametrize("how", ["accumulate", "scaler"])
def test_batches_are_counted_apart_from_updates(tmp_path, how):
    undisturbed = seen_by(tmp_path / "undisturbed", how)
    assert seen_by(tmp_path / "run", how, stop=6) == undisturbed[:6]
    assert seen_by(tmp_path / "run", how) == undisturbed[6:]


def test_the_steps_of_any_prepared_optimizer_make_a_new_step_to_save(tmp_path):
    accelerator = CkptfmtAccelerator(cpu=True, run=tmp_path / "run")
    models = [torch.nn.Linear(2, 1) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    prepared = accelerator.prepare(*models, *optimizers)

    def update(number):
        accelerator.backward(prepared[number](torch.ones(3, 2)).sum())
        prepared[number + 2].step()

    for number in (1, 1, 1):  # the critic first
        update(number)
        assert accelerator.save_state() is not None
    assert accelerator.save_state() is None
    update(0)
    assert accelerator.save_state().step == 4
    for _ in range(3):
        update(0)
        update(1)
    assert accelerator.updates == 7
    accelerator.end_training()


def test_a_run_without_a_prepared_optimizer_needs_a_step(tmp_path):
    accelerator = CkptfmtAccelerator(cpu=True, run=tmp_path / "run")
    accelerator.prepare(torch.nn.Linear(2, 1))
    accelerator.save_state()
    with pytest.raises(ValueError, match="prepare the optimizer"):
        accelerator.save_state()
    assert accelerator.save_state(step=5) is not None
    accelerator.end_training()


def test_an_optimizer_that_is_prepared_again_is_counted_once(tmp_path):
    accelerator = CkptfmtAccelerator(cpu=True, run=tmp_path / "run")
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        prepared = accelerator.prepare(model, optimizer, DataLoader(Rows(), batch_size=2))
        train(accelerator, *prepared)
        assert accelerator.updates == 3
        accelerator.free_memory()


def test_hooks_for_loading_are_refused(tmp_path):
    accelerator, *_ = accelerator_with(tmp_path)
    accelerator.register_load_state_pre_hook(lambda *_: None)
    with pytest.raises(NotImplementedError, match="beside the checkpoint"):
        accelerator.load_state()


def test_the_home_directory_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    accelerator, model, optimizer, loader = accelerator_with(tmp_path)
    train(accelerator, model, optimizer, loader)
    accelerator.save_state("~/own").wait()
    assert accelerator.load_state("~/own").step == 3
    assert ckptfmt.validate(tmp_path / "own")


def test_fsdp1_is_refused(monkeypatch):
    monkeypatch.setattr(CkptfmtAccelerator, "distributed_type", DistributedType.FSDP)
    monkeypatch.setattr(CkptfmtAccelerator, "is_fsdp2", False)
    with pytest.raises(NotImplementedError, match="FSDP"):
        CkptfmtAccelerator(cpu=True)


def test_only_a_prepared_loader_has_a_position(tmp_path):
    accelerator, *_ = accelerator_with(tmp_path)
    with pytest.raises(ValueError, match="that prepare returned"):
        accelerator.position(DataLoader(Rows()))


def test_a_run_that_begins_with_a_save_claims_its_position(tmp_path, caplog):
    """The position at the begin of the launch is that of the save, and doesn't stand still."""
    set_seed(1)
    accelerator, model, optimizer, loader = accelerator_with(tmp_path, config={"width": 3})
    train(accelerator, model, optimizer, loader)
    accelerator.save_state()
    accelerator.end_training()
    again, model, optimizer, loader = accelerator_with(tmp_path, config={"width": 3})
    report = again.load_state()
    assert (report.claim, report.lowered_by) == ("T1", ())
    train(again, model, optimizer, again.skip_first_batches(loader), steps=1)
    again.end_training()
    assert "no step was counted" not in caplog.text


def test_gradients_that_wait_for_their_update_lower_the_claim(tmp_path):
    for is_first in (True, False):
        accelerator, model, optimizer, loader = accelerator_with(
            tmp_path, config={}, gradient_accumulation_steps=2
        )
        report = accelerator.load_state()
        if is_first:
            for _, inputs in zip(range(3), loader, strict=False):
                with accelerator.accumulate(model):
                    accelerator.backward(model(inputs).sum())
                    optimizer.step()
                    optimizer.zero_grad()
            accelerator.save_state()
        accelerator.end_training()
    assert report.claim == "S0"
    assert any("gradients that the next optimizer.step() uses" in one for one in report.lowered_by)


def test_a_loop_that_skips_nothing_is_told_so(tmp_path, caplog):
    for is_first in (True, False):
        accelerator, model, optimizer, loader = accelerator_with(tmp_path)
        accelerator.load_state()
        train(accelerator, model, optimizer, loader, steps=2)
        if is_first:
            accelerator.save_state()
            assert "skip_first_batches" not in caplog.text
        accelerator.end_training()
    assert (
        "the loaded position is batch 2 of the epoch, and the loop begins at batch 0" in caplog.text
    )


def test_the_loaded_position_has_the_types_of_the_saved_position(tmp_path):
    """numpy's stream is an array of numpy, and torch's a tensor."""
    streams = []
    for is_first in (True, False):
        accelerator, model, optimizer, loader = accelerator_with(tmp_path)
        accelerator.load_state()
        if is_first:
            train(accelerator, model, optimizer, loader, steps=2)
        streams.append(accelerator._positions[id(loader)].state_dict()["began"])
        if is_first:
            accelerator.save_state()
        accelerator.end_training()
    saved, loaded = streams
    assert saved["python"] == loaded["python"]
    assert type(loaded["numpy"][1]) is np.ndarray
    assert loaded["numpy"][1].dtype == saved["numpy"][1].dtype
    assert torch.equal(saved["torch"], loaded["torch"])
