"""Resumes with Lightning from every moment of a training: the same training bit for bit, or with a reason.

`lightning_cells.py` does many fits in a process. All fits that resume have another seed than the
undisturbed training, so nothing but the checkpoint can give them the same random numbers.
"""

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("lightning")

import torch

import ckptfmt
from ckptfmt.plugins.lightning import CkptfmtIO
from tests.plugins import trainings

SCRIPT = Path(__file__).with_name("lightning_cells.py")
#: Checkpoints within an epoch and at its end, in the first and in the second epoch of 4 batches.
STEPS = (2, 4, 6, 8)
#: One process; two with DDP; two with FSDP2; two with tensor parallelism.
JOBS = {
    "one": ("plain", 1),
    "ddp": ("plain", 2),
    "sharded": ("sharded", 2),
    "tensors": ("tensors", 2),
}

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's advice


def results(place, processes):
    """Return the difference and the reasons of each resumed checkpoint, on all processes."""
    found: dict[str, tuple[list[str], list[str]]] = {}
    for rank in range(processes):
        for name, (difference, reasons) in json.loads(
            (place / f"resumed-{rank}.json").read_text()
        ).items():
            differences, all_reasons = found.setdefault(name, ([], []))
            differences += [f"process {rank}: {difference}"] if difference else []
            all_reasons += reasons
    return found


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    """Return the resumes of a job from checkpoints of a killed and of a stopped training."""
    done = {}

    def run(job):
        if job not in done:
            kind, processes = JOBS[job]
            place = tmp_path_factory.mktemp(job)
            trainings.run(SCRIPT, place, kind, "killed=9", kill_at=9, processes=processes)
            actions = ["reference", f"stopped={','.join(map(str, STEPS))}"]
            actions += [f"resume=killed/{step:02}-batch" for step in STEPS]
            actions += [f"resume=stopped-{step}/{step:02}-epoch" for step in STEPS]
            trainings.run(SCRIPT, place, kind, *actions, processes=processes)
            done[job] = results(place, processes)
        return done[job]

    return run


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize("how", ["killed", "stopped"])
@pytest.mark.parametrize("step", STEPS)
def test_a_killed_or_stopped_training_resumes_bit_for_bit(resumed, job, how, step):
    """Samples, losses, weights, optimizer, learning rate and RNG streams, on every process."""
    name = f"killed/{step:02}-batch" if how == "killed" else f"stopped-{step}/{step:02}-epoch"
    assert resumed(job)[name] == ([], [])


#: Checkpoints from which the kinds of trainings below are resumed.
MOMENTS = ("02-batch", "04-batch", "06-batch", "02-validation", "04-validation", "04-epoch")


def resumes_of(kind, place, *, moments=MOMENTS, processes=1):
    actions = ["reference", *(f"resume=reference/{moment}" for moment in moments)]
    trainings.run(SCRIPT, place, kind, *actions, processes=processes)
    return results(place, processes)


@pytest.mark.parametrize(
    "kind",
    [
        "noise",
        "workers",
        "generator",
        "weighted",
        "batches",
        "epoch",
        "stateful",
        "stateful workers",
        "stream",
        "cycle",
        "shortest",
        "steps",
        "stateful steps",
        "validation",
        "validation steps",
        "validation 2",
        "validation half",
        "validation 3",
        "every 2nd validation",
        "plateau",
        "limit",
        "limit stateful",
        "reload",
    ],
)
def test_kinds_of_trainings_resume_bit_for_bit_from_every_moment(tmp_path, kind):
    found = resumes_of(kind, tmp_path)
    assert len(found) >= 3
    assert {name: how for name, how in found.items() if how != ([], [])} == {}


@pytest.mark.parametrize("kind", ["epoch", "weighted", "workers"])
def test_loaders_of_two_processes_resume_bit_for_bit(tmp_path, kind):
    found = resumes_of(kind, tmp_path, moments=("04-batch", "06-batch"), processes=2)
    assert found == {"reference/04-batch": ([], []), "reference/06-batch": ([], [])}


@pytest.mark.parametrize(
    ("kind", "moment", "reason"),
    [
        ("accumulate", "03-batch", "lacks the gradients that 1 batches accumulated"),
        ("mixed", "02-batch", "some loaders have a state_dict and others don't"),
        ("reload 2", "06-batch", "made in epoch 1 instead of 0"),
        ("lasting", "06-batch", "persistent worker processes draw other random numbers"),
    ],
)
def test_a_resume_that_may_differ_tells_the_reason(tmp_path, kind, moment, reason):
    ((_, reasons),) = resumes_of(kind, tmp_path, moments=[moment]).values()
    assert [reason in told for told in reasons] == [True]


def test_a_stateful_loader_of_two_processes_tells_the_reason_within_an_epoch(tmp_path):
    found = resumes_of("stateful", tmp_path, moments=("04-batch", "06-batch"), processes=2)
    assert found["reference/04-batch"] == ([], [])
    reasons = found["reference/06-batch"][1]
    assert ["Lightning has wrapped the sampler" in reason for reason in reasons] == [True, True]


def test_the_comparison_notices_a_training_with_another_seed(tmp_path):
    """The control: without `ExactResume`, the seed of the resumed launch decides."""
    found = resumes_of("inexact", tmp_path, moments=["02-batch", "04-epoch"])
    assert found == {
        "reference/02-batch": (
            ["process 0: 03-batch differs in rng, loss, numbers, weights, optimizer"],
            [],
        ),
        "reference/04-epoch": (
            ["process 0: 05-batch differs in rng, loss, numbers, weights, optimizer"],
            [],
        ),
    }


def test_a_strategy_that_ignores_the_plug_in_is_refused(tmp_path):
    trainings.run(SCRIPT, tmp_path, "without plug-in", "refused", processes=2)
    for rank in range(2):
        _, (message,) = json.loads((tmp_path / f"resumed-{rank}.json").read_text())["refused"]
        assert "Trainer(strategy=CkptfmtModelParallelStrategy(...))" in message


DTYPES = "?bBhHiIlLefdFD"


@pytest.mark.parametrize("place", ["callbacks", "loops", "ckptfmt.exact_resume"])
def test_every_value_comes_back_with_its_type(tmp_path, place):
    """Arrays of numpy became tensors, and torch can't unpickle its tensors of uint32."""
    arrays = {code: np.arange(3).astype(code) for code in DTYPES}
    value = {
        "arrays": arrays,
        "scalars": [array[1] for array in arrays.values()],
        "nested": (np.random.get_state(), [np.zeros((2, 0)), np.array(3)]),  # noqa: NPY002
        "tensors": [
            torch.arange(3).to(kind) for kind in (torch.uint8, torch.bfloat16, torch.int64)
        ],
        "plain": (1, 2.5, None, "text", b"bytes", True, 1 + 2j, {3: {4}}),
    }
    io = CkptfmtIO(saver="inline")
    io.save_checkpoint({"state_dict": {}, place: {"key": value}}, tmp_path / "a")
    assert_same(io.load_checkpoint(tmp_path / "a")[place]["key"], value)


def assert_same(loaded, saved):
    """Assert that two values have the same types and bits."""
    assert type(loaded) is type(saved)
    if isinstance(saved, dict):
        assert list(loaded) == list(saved)
        for key, value in saved.items():
            assert_same(loaded[key], value)
    elif isinstance(saved, list | tuple):
        assert len(loaded) == len(saved)
        for one, other in zip(loaded, saved, strict=True):
            assert_same(one, other)
    elif isinstance(saved, np.ndarray | np.generic | torch.Tensor):
        assert loaded.dtype == saved.dtype
        assert trainings.digest(loaded) == trainings.digest(saved)
    else:
        assert loaded == saved


@pytest.fixture
def fabric():
    from lightning.fabric import Fabric  # noqa: PLC0415 - optional

    fabric = Fabric(accelerator="cpu", devices=1, plugins=[CkptfmtIO()])
    fabric.launch()
    yield fabric
    fabric.strategy.checkpoint_io.teardown()


def trained(fabric):
    module = torch.nn.Linear(4, 2)
    module, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters()))
    for _ in range(2):
        fabric.backward(module(torch.ones(2, 4)).sum())
        optimizer.step()
    return module, optimizer


@pytest.mark.parametrize(
    "keys", [("model", "optimizer", "step"), ("net", "opt", "iter"), ("state", "a/b", "~")]
)
def test_fabric_saves_and_loads_under_any_keys(tmp_path, fabric, keys):
    module, optimizer = trained(fabric)
    fabric.save(tmp_path / "a", dict(zip(keys, (module, optimizer, 3), strict=True)))
    other, another = trained(fabric)
    state = dict(zip(keys, (other, another, 0), strict=True))
    assert fabric.load(tmp_path / "a", state) == {}
    assert state[keys[2]] == 3
    assert trainings.digest(other.state_dict()) == trainings.digest(module.state_dict())
    assert trainings.digest(another.state_dict()) == trainings.digest(optimizer.state_dict())
    plain = torch.nn.Linear(4, 2)
    ckptfmt.load(tmp_path / "a", ckptfmt.State(weights=plain), only="weights:*")
    assert torch.equal(plain.weight, module.weight)


def test_fabric_saves_several_modules_as_parts_of_a_module_dict(tmp_path, fabric):
    modules = {"g": trained(fabric)[0], "d": fabric.setup(torch.nn.BatchNorm1d(2))}
    others = {"streams": np.random.get_state(), "none": None}  # noqa: NPY002
    fabric.save(tmp_path / "a", {**modules, **others})
    loaded = fabric.load(tmp_path / "a")
    assert_same({key: loaded[key] for key in others}, others)
    for key, module in modules.items():
        assert_same(loaded[key], module.state_dict())
    generator = torch.nn.Linear(4, 2)
    plain = torch.nn.ModuleDict({"g": generator, "d": torch.nn.BatchNorm1d(2)})
    ckptfmt.load(tmp_path / "a", ckptfmt.State(weights=plain), only="weights:*")
    assert torch.equal(generator.weight, modules["g"].weight)


def test_fabric_saves_a_bare_state_dict_and_values_without_a_module(tmp_path, fabric):
    module, _ = trained(fabric)
    fabric.save(tmp_path / "bare", module.state_dict())
    other, _ = trained(fabric)
    fabric.load_raw(tmp_path / "bare", other)
    assert torch.equal(other.weight, module.weight)
    fabric.save(tmp_path / "values", {"a": 1})
    assert fabric.load(tmp_path / "values") == {"a": 1}


def test_modules_of_fabric_with_equal_names_of_weights_are_refused(tmp_path, fabric):
    weights = {"a": {"b.w": torch.zeros(1)}, "a.b": {"w": torch.zeros(1)}}
    with pytest.raises(TypeError, match=r"named a\.b\.w: give other keys"):
        fabric.save(tmp_path / "a", weights)
