"""Lightning through ckptfmt: trainings that are killed and resumed, and what their checkpoints are for others."""

import resource
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning")

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from safetensors.torch import load_file

import ckptfmt
from ckptfmt.commit import lone
from ckptfmt.commit.waiting import held_path
from ckptfmt.errors import CkptError, Code, err
from ckptfmt.plugins.lightning import CkptfmtIO, ExactResume
from ckptfmt.store import open_store
from tests.plugins import trainings

SCRIPT = Path(__file__).with_name("lightning_script.py")
STEPS = 46

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's advice


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Return the journal of a training that nobody kills; each is run once."""
    places = {}

    def run(*options, processes=1):
        if options not in places:
            places[options] = place = tmp_path_factory.mktemp("undisturbed")
            trainings.run(SCRIPT, place / "run", place / "journal", *options, processes=processes)
        return places[options] / "journal"

    return run


def resume_differs(place, right, *options, kill_at, processes=1):
    """Return how a training that is killed and resumed differs from an undisturbed one, on all processes."""
    command = (SCRIPT, place / "run", place / "journal", *options)
    trainings.run(*command, kill_at=kill_at, processes=processes)
    trainings.run(*command, processes=processes)
    found = []
    for rank in range(processes):
        done = trainings.read(f"{place}/journal-{rank}")
        assert sum(map(len, done.values())) < STEPS + 8, "it has begun anew"
        found += trainings.compare(f"{right}-{rank}", f"{place}/journal-{rank}", last_step=STEPS)
    return found


@pytest.mark.parametrize("loader", ["plain", "stateful"])
def test_a_resume_within_an_epoch_is_the_same_run_bit_for_bit(tmp_path, undisturbed, loader):
    if loader == "stateful":
        pytest.importorskip("torchdata")
    options = ("--loader", loader)
    assert resume_differs(tmp_path, undisturbed(*options), *options, kill_at=24) == []
    if loader == "plain":
        are_for_everybody(tmp_path / "run")


def test_two_processes_of_ddp_resume_bit_for_bit(tmp_path, undisturbed):
    options = ("--kind", "ddp")
    assert (
        resume_differs(
            tmp_path, undisturbed(*options, processes=2), *options, kill_at=24, processes=2
        )
        == []
    )
    numbers = [trainings.read(f"{tmp_path}/journal-{rank}")[24][0]["numbers"] for rank in range(2)]
    assert numbers[0] != numbers[1]
    assert ckptfmt.validate(tmp_path / "run" / "last.ckpt")


@pytest.mark.parametrize(("every", "kill_at", "resumes_at"), [(5, 23, 19), (14, 30, 28)])
def test_a_resume_behind_a_validation_is_the_same_run_bit_for_bit(
    tmp_path, undisturbed, every, kill_at, resumes_at
):
    """A validation within an epoch, and one at its end; both draw random numbers, and are followed by a save."""
    options = ("--validate", str(every))
    right = undisturbed(*options)
    assert resume_differs(tmp_path, right, *options, kill_at=kill_at) == []
    steps = trainings.read(tmp_path / "journal-0")
    assert [step for step, lines in steps.items() if len(lines) == 2] == [
        *range(resumes_at + 1, kill_at + 1)
    ]
    validations = trainings.read(tmp_path / "journal-0-validations")
    assert validations == trainings.read(f"{right}-0-validations")
    assert [step for step in validations if step > resumes_at]


@pytest.mark.parametrize(
    ("options", "kill_at"), [(("--validate", "7", "--save-before"), 24), (("--epochs",), 20)]
)
def test_what_lightning_leaves_out_behind_a_save_is_done_by_the_resume(
    tmp_path, undisturbed, options, kill_at
):
    """A validation of the saved step, and the start of an epoch behind ModelCheckpoint's default.

    Lightning alone omits the validation, and trains a batch that isn't part of an epoch.
    """
    assert resume_differs(tmp_path, undisturbed(*options), *options, kill_at=kill_at) == []


def plain_module():
    layers = torch.nn.Sequential(
        torch.nn.Linear(6, 16), torch.nn.Dropout(0.4), torch.nn.Linear(16, 1)
    )
    return torch.nn.ModuleDict({"layers": layers})


def are_for_everybody(checkpoints):
    assert {place.name for place in checkpoints.iterdir()} == {
        "epoch=2-step=35.ckpt",
        "epoch=2-step=42.ckpt",
        "last.ckpt",
    }
    last = checkpoints / "last.ckpt"
    assert ckptfmt.validate(last)
    module = plain_module()
    ckptfmt.load(last, ckptfmt.State(weights=module), only="weights:*")
    (shard,) = last.glob("weights-*.safetensors")
    tensors = load_file(shard)
    assert tensors.keys() == module.state_dict().keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in module.state_dict().items())
    trees: Any = ckptfmt.load(last, only="optimizer:extra/hyper_parameters")
    assert trees["optimizer"] == {"extra/hyper_parameters": {"width": 16}}


def test_a_resume_from_the_last_step_of_an_epoch_is_the_same_run_bit_for_bit(tmp_path, undisturbed):
    right = undisturbed("--loader", "plain")
    assert resume_differs(tmp_path, right, "--loader", "plain", kill_at=30) == []
    steps = trainings.read(tmp_path / "journal-0")
    assert [step for step, lines in steps.items() if len(lines) == 2] == [29, 30]


def test_fully_sharded_modules_resume_bit_for_bit_and_load_into_plain_ones(tmp_path, undisturbed):
    options = ("--kind", "sharded")
    assert (
        resume_differs(
            tmp_path, undisturbed(*options, processes=2), *options, kill_at=24, processes=2
        )
        == []
    )
    last = tmp_path / "run" / "last.ckpt"
    assert ckptfmt.validate(last)
    module = plain_module()
    optimizer = torch.optim.AdamW(module.parameters())
    ckptfmt.load(
        last, ckptfmt.State(weights=module, optimizer=[optimizer], rng=False), allow="unexpected"
    )
    assert all(optimizer.state[parameter]["exp_avg"].any() for parameter in module.parameters())


def test_without_the_callback_order_and_random_numbers_are_others(tmp_path, undisturbed):
    """The control of this comparison, and what Lightning does by itself."""
    found = resume_differs(
        tmp_path, undisturbed("--loader", "plain"), "--loader", "plain", "--inexact", kill_at=24
    )
    assert found[0] == "step 22 differs in loss, numbers, optimizer, rng, weights"


# --- in this process ------------------------------------------------------------------------------


class Tiny(LightningModule):
    def __init__(self, width=1, loss=None):  # noqa: ARG002 - the framework's signature
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(2, width)

    def training_step(self, batch, _batch_idx):
        return self.layer(batch).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def trainer_with(tmp_path, io, *callbacks, **options):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    settings = {"max_steps": 6, "accelerator": "cpu", "devices": 1, **quiet, **options}
    return Trainer(plugins=[io], callbacks=[*callbacks], default_root_dir=tmp_path, **settings)


def every_second_step(tmp_path):
    return ModelCheckpoint(dirpath=tmp_path / "saved", every_n_train_steps=2, save_top_k=-1)


def rows():
    data: Any = [torch.full((2,), float(row)) for row in range(8)]
    return torch.utils.data.DataLoader(data, batch_size=2)


def test_a_checkpoint_comes_back_as_it_was(tmp_path):
    saved = {
        "epoch": 1,
        "global_step": 7,
        "state_dict": {"w": torch.arange(3.0), "n": torch.tensor(4)},
        "optimizer_states": [
            {
                "state": {0: {"step": torch.tensor(2.0)}},
                "param_groups": [{"lr": 0.1, "params": [0]}],
            }
        ],
        "callbacks": {"Some{'a/b': None}": {"best": {"x/y~z": torch.tensor(0.5)}, "none": None}},
        "loops": {"fit_loop": {"state": (1, [2, {"three": 4.0}])}},
        "": {"an empty key": 1},
    }
    io = CkptfmtIO()
    io.save_checkpoint(saved, tmp_path / "a.ckpt")
    loaded = io.load_checkpoint(tmp_path / "a.ckpt", map_location="cpu")
    assert trainings.digest(loaded) == trainings.digest(saved)
    assert isinstance(loaded["loops"]["fit_loop"]["state"], tuple)
    origin = ckptfmt.open(tmp_path / "a.ckpt").manifest.origin
    assert (origin.step, origin.run_id) == (7, None)
    io.teardown()


def test_the_best_stay_and_the_last_is_replaced(tmp_path):
    saves = ModelCheckpoint(
        dirpath=tmp_path / "saved",
        every_n_train_steps=1,
        monitor="step",
        mode="max",
        save_top_k=2,
        save_last=True,
    )
    trainer = trainer_with(tmp_path, CkptfmtIO(), saves)
    trainer.fit(Tiny(), rows())
    assert sorted(place.name for place in (tmp_path / "saved").iterdir()) == [
        "epoch=1-step=5.ckpt",
        "epoch=1-step=6.ckpt",
        "last.ckpt",
    ]
    assert all(ckptfmt.validate(place) for place in (tmp_path / "saved").iterdir())
    weight = trainer.lightning_module.layer.weight.detach().clone()
    module = Tiny()
    trainer = trainer_with(tmp_path, CkptfmtIO(), saves)
    trainer.fit(module, rows(), ckpt_path="best")
    assert torch.equal(module.layer.weight, weight)


def test_a_linked_last_is_found(tmp_path):
    saves = ModelCheckpoint(
        dirpath=tmp_path / "saved", every_n_train_steps=2, save_top_k=-1, save_last="link"
    )
    trainer_with(tmp_path, CkptfmtIO(), saves).fit(Tiny(), rows())
    assert (tmp_path / "saved" / "last.ckpt").is_symlink()
    trainer = trainer_with(tmp_path, CkptfmtIO(), saves, max_steps=8)
    trainer.fit(Tiny(), rows(), ckpt_path="last")
    assert trainer.global_step == 8


def test_what_is_no_plain_value_is_refused_by_name(tmp_path):
    trainer = trainer_with(tmp_path, CkptfmtIO(), every_second_step(tmp_path))
    with pytest.raises(
        TypeError, match=r"hyper_parameters/loss, a torch\.nn.*save_hyperparameters\(ignore="
    ):
        trainer.fit(Tiny(loss=torch.nn.MSELoss()), rows())
    assert not (tmp_path / "saved").exists()


def test_a_removal_waits_for_the_save(tmp_path):
    io = CkptfmtIO()
    io.save_checkpoint({"state_dict": {"w": torch.zeros(1 << 20)}}, tmp_path / "a.ckpt")
    io.remove_checkpoint(tmp_path / "a.ckpt")
    assert not (tmp_path / "a.ckpt").exists()
    io.teardown()
    assert not (tmp_path / "a.ckpt").exists()


def test_a_removal_waits_for_the_saver_of_another_process(tmp_path):
    """Under FSDP each process has a saver, and the first removes what all of them wrote."""
    place = tmp_path / "a.ckpt"
    with ckptfmt.PathSaver(saver="inline") as saver:
        saver.save(place, ckptfmt.State(weights={"w": torch.zeros(8)}, rng=False), step=1)
    with ThreadPoolExecutor() as pool:
        with open_store(place, writable=True).hold(held_path("9f3c41d27ab80e65", 1)):
            removal = pool.submit(CkptfmtIO().remove_checkpoint, place)
            with pytest.raises(TimeoutError):
                removal.result(0.2)
            assert ckptfmt.validate(place)
        removal.result(60)
    assert not place.exists()


def test_a_removal_that_the_storage_refuses_leaves_the_checkpoint(tmp_path, monkeypatch):
    place = tmp_path / "a.ckpt"
    with ckptfmt.PathSaver(saver="inline") as saver:
        saver.save(place, ckptfmt.State(weights={"w": torch.zeros(8)}, rng=False), step=1)

    def refuse(store):
        raise err(Code.STORE_IO, "Input/output error", where=store.name)

    with monkeypatch.context() as patch:
        patch.setattr(lone, "read_register", refuse)
        with pytest.raises(CkptError, match="STORE_IO"):
            CkptfmtIO().remove_checkpoint(place)
    assert ckptfmt.validate(place)


@pytest.mark.parametrize("what", ["file", "directory", "link", "damaged", "nothing"])
def test_what_is_no_checkpoint_is_removed_as_lightning_does(tmp_path, what):
    """A training that went over to ckptfmt has checkpoints of before, which Lightning removes in their turn."""
    place, other = tmp_path / "a.ckpt", tmp_path / "other"
    other.mkdir()
    if what == "file":
        torch.save({"state_dict": {}}, place)
    elif what == "link":
        place.symlink_to(other)
    elif what != "nothing":
        place.mkdir()
        (place / ("manifest.json" if what == "damaged" else "shard.pt")).write_bytes(b"{")
    CkptfmtIO().remove_checkpoint(place)
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


@pytest.fixture
def no_large_files():
    """Return what lets no file of this process grow beyond 64 KiB: the writing of a save fails, not its beginning."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("callbacks", [[], [ExactResume()]])
def test_a_save_that_fails_beside_the_training_ends_it(tmp_path, callbacks, no_large_files):
    """With `ExactResume` at the end of the step, without it at the next save, removal or the end."""

    class SaveOnce(Callback):
        def on_train_batch_start(self, trainer, *_):
            if trainer.global_step == 0:
                trainer.save_checkpoint(tmp_path / "good.ckpt")  # makes the slots
                trainer.strategy.checkpoint_io.saves.wait(tmp_path / "good.ckpt")
                no_large_files()
                trainer.save_checkpoint(tmp_path / "bad.ckpt")
                trainer.strategy.checkpoint_io.saves._handles[
                    str(tmp_path / "bad.ckpt")
                ].wait_over()

    trainer = trainer_with(
        tmp_path, CkptfmtIO(saver="thread"), SaveOnce(), *callbacks, enable_checkpointing=False
    )
    with pytest.raises(CkptError) as caught:
        trainer.fit(Tiny(width=1 << 16), rows())
    assert caught.value.code == "STORE_IO"
    assert trainer.global_step == (1 if callbacks else 6)
    assert ckptfmt.validate(tmp_path / "good.ckpt")
    with pytest.raises(CkptError):
        ckptfmt.open(tmp_path / "bad.ckpt")


def test_options_that_mean_nothing_are_refused(tmp_path):
    with pytest.raises(TypeError, match="storage_options"):
        CkptfmtIO().save_checkpoint({}, tmp_path / "a.ckpt", storage_options={})
