"""Models and optimizers that DCP saved through ckptfmt load into a State, and the other way round."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import distributed
from torch.distributed._shard import sharded_tensor
from torch.distributed.checkpoint import filesystem, format_utils
from torch.distributed.checkpoint import state_dict_loader as dcp_load
from torch.distributed.checkpoint import state_dict_saver as dcp_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful

import ckptfmt
from ckptfmt.plugins.dcp import CkptfmtReader, CkptfmtWriter, install
from tests.plugins import trainings

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class AppState(Stateful):
    """The object of PyTorch's tutorial of DCP."""

    def __init__(self, model, optimizer, keys=("model", "optim"), options=None):
        self.model = model
        self.optimizer = optimizer
        self.keys = keys
        self.options = options

    def state_dict(self):
        states = get_state_dict(self.model, self.optimizer, options=self.options)
        return dict(zip(self.keys, states, strict=True))

    def load_state_dict(self, state_dict):
        model, optimizer = (state_dict[key] for key in self.keys)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=model,
            optim_state_dict=optimizer,
            options=self.options,
        )


class Numbered(AppState):
    """The state_dicts of modules and optimizers as torch itself gives them."""

    def state_dict(self):
        model, optimizer = self.model.state_dict(), self.optimizer.state_dict()
        return dict(zip(self.keys, (model, optimizer), strict=True))

    def load_state_dict(self, state_dict):
        self.model.load_state_dict(state_dict[self.keys[0]])
        self.optimizer.load_state_dict(state_dict[self.keys[1]])


def made(seed: int, steps: int) -> tuple[Any, Any]:
    """Return a model with a buffer, and an optimizer with two groups of other options and orders."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 4)
    )
    optimizer = optimizer_of(model, seed)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 6)).square().sum().backward()
        optimizer.step()
    return model, optimizer


def optimizer_of(model, seed=0):
    groups = [
        {"params": [model[2].weight, model[0].bias], "lr": 0.1 / (seed + 1)},
        {"params": [model[0].weight, *model[1].parameters(), model[2].bias], "weight_decay": 0.5},
    ]
    return torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.9 - seed / 100))


def bits(model, optimizer):
    """Return weights, states and options, with tensors as bytes."""
    states = [optimizer.state[one] for group in optimizer.param_groups for one in group["params"]]
    options = [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    tensors = [
        model.state_dict(),
        *({key: torch.as_tensor(value) for key, value in state.items()} for state in states),
    ]
    return options, [
        {key: (value.dtype, value.shape, value.numpy().tobytes()) for key, value in one.items()}
        for one in tensors
    ]


FORMS: dict[str, Any] = {
    "model, optim": lambda app: app.state_dict(),
    "app": lambda app: {"app": app},
    "net, opt": lambda app: AppState(app.model, app.optimizer, ("net", "opt")).state_dict(),
    "state_dict": lambda app: {
        "state_dict": AppState(app.model, app.optimizer, ("model", "optimizer"))
    },
    "an average": lambda app: {**app.state_dict(), "ema": {"model": app.model.state_dict()}},
    "flat": lambda app: {"app": AppState(app.model, app.optimizer, options=FLAT)},
    "numbered": lambda app: {"app": Numbered(app.model, app.optimizer)},
}


def save(state_dict, path):
    dcp_save.save(state_dict, storage_writer=CkptfmtWriter(path), no_dist=True)


def load(state_dict, path):
    dcp_load.load(state_dict, storage_reader=CkptfmtReader(path), no_dist=True)


def load_into(state_dict, path, app):
    """Load through DCP, and put what was loaded into the objects."""
    load(state_dict, path)
    for keys in (("model", "optim"), ("net", "opt")):
        if keys[0] in state_dict:
            AppState(app.model, app.optimizer, keys).load_state_dict(state_dict)


@pytest.mark.parametrize("form", FORMS)
def test_models_and_optimizers_are_found_at_any_key(tmp_path, form):
    """An AppState's weights and optimizer were values of extra; an optimizer loaded through DCP alone."""
    saved = made(1, 3)
    save(FORMS[form](AppState(*saved)), tmp_path / "c-3")
    assert ckptfmt.validate(tmp_path / "c-3").valid

    through_dcp, plain, torchs = made(2, 1), made(3, 1), made(4, 1)
    load_into(FORMS[form](AppState(*through_dcp)), tmp_path / "c-3", AppState(*through_dcp))
    assert bits(*through_dcp) == bits(*saved)

    state = ckptfmt.State(weights=plain[0], optimizer=plain[1], rng=False)
    report: Any = ckptfmt.load(
        tmp_path / "c-3", state, allow=("unexpected",) if form == "an average" else ()
    )
    assert report.step == 3
    assert bits(*plain) == bits(*saved)
    torchs[1].load_state_dict(ckptfmt.optimizer_state_dict(tmp_path / "c-3"))
    assert bits(made(4, 1)[0], torchs[1])[0] == bits(*saved)[0]


@pytest.mark.parametrize("form", ["model, optim", "app", "state_dict", "flat"])
def test_a_checkpoint_of_a_state_gives_dcp_its_optimizer(tmp_path, form):
    """dcp.load raised Missing key for the optimizer of ckptfmt.save."""
    saved = made(1, 3)
    ckptfmt.save(tmp_path / "c", ckptfmt.State(weights=saved[0], optimizer=saved[1]), step=3)
    other = made(2, 1)
    keys = ("model", "optimizer") if form == "state_dict" else ("model", "optim")
    app = AppState(*other, keys=keys, options=FLAT if form == "flat" else None)
    if form in ("app", "flat"):
        load({"app": app}, tmp_path / "c")
    else:
        found = app.state_dict()
        load(found, tmp_path / "c")
        app.load_state_dict(found)
    assert bits(*other) == bits(*saved)


def test_a_flat_optimizer_loads_nested_and_a_nested_one_flat(tmp_path):
    for saved_as, wanted_as in ((None, FLAT), (FLAT, None)):
        saved, other = made(1, 3), made(2, 1)
        path = tmp_path / f"c-{wanted_as is None:d}"
        save({"app": AppState(*saved, options=saved_as)}, path)
        load({"app": AppState(*other, options=wanted_as)}, path)
        assert bits(*other) == bits(*saved)


def test_two_models_with_an_optimizer_each_keep_apart(tmp_path):
    saved = {"gen": made(1, 3), "dis": made(2, 2)}
    save({key: AppState(*one) for key, one in saved.items()}, tmp_path / "by-dcp")
    states = [{key: one[at] for key, one in saved.items()} for at in range(2)]
    ckptfmt.save(tmp_path / "own", ckptfmt.State(weights=states[0], optimizer=states[1]), step=1)
    for name in ("by-dcp", "own"):
        through_dcp = {"gen": made(3, 1), "dis": made(4, 1)}
        load({key: AppState(*one) for key, one in through_dcp.items()}, tmp_path / name)
        assert {key: bits(*one) for key, one in through_dcp.items()} == {
            key: bits(*one) for key, one in saved.items()
        }
    plain = {"gen": made(3, 1), "dis": made(4, 1)}
    models, optimizers = ({key: one[at] for key, one in plain.items()} for at in range(2))
    ckptfmt.load(
        tmp_path / "by-dcp", ckptfmt.State(weights=models, optimizer=optimizers, rng=False)
    )
    assert [bits(*plain[key]) for key in plain] == [bits(*saved[key]) for key in saved]


def test_an_optimizer_without_its_model_and_one_without_a_step(tmp_path):
    model, optimizer = made(1, 3)
    save({"optim": get_optimizer_state_dict(model, optimizer)}, tmp_path / "alone")
    other, fresh = made(2, 1)
    only = ckptfmt.State(weights=other, optimizer=fresh, rng=False)
    ckptfmt.load(tmp_path / "alone", only, only="optimizer:*")
    assert bits(model, fresh) == bits(model, optimizer)

    model, optimizer = made(1, 0)
    raw = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    save(raw, tmp_path / "begun")
    other, fresh = made(2, 0)
    ckptfmt.load(tmp_path / "begun", ckptfmt.State(weights=other, optimizer=fresh, rng=False))
    assert bits(other, fresh) == bits(model, optimizer)


def sharded(tensor):
    shard = sharded_tensor.Shard.from_tensor_and_offsets(tensor, [0] * tensor.ndim, 0)  # type: ignore[attr-defined]
    return sharded_tensor.init_from_local_shards([shard], *tensor.size())


@pytest.mark.filterwarnings("ignore:Please use DTensor instead:FutureWarning")
def test_sharded_tensors_of_an_optimizer_are_saved(tmp_path):
    """FSDP1 without a device mesh gives these; a planner looks up a ShardedTensor by an offset."""
    saved, other = made(1, 3), made(2, 1)
    expected = bits(*saved)
    states: Any = get_state_dict(*saved)
    model_state, optimizer_state = states
    meeting = f"file://{tmp_path / 'meeting'}"
    distributed.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
    try:
        for state in optimizer_state["state"].values():
            state |= {name: sharded(state[name]) for name in ("exp_avg", "exp_avg_sq")}
        app = {"model": model_state, "optim": optimizer_state}
        dcp_save.save(app, storage_writer=CkptfmtWriter(tmp_path / "c"))
    finally:
        distributed.destroy_process_group()
    ckptfmt.load(tmp_path / "c", ckptfmt.State(weights=other[0], optimizer=other[1], rng=False))
    assert bits(*other) == expected


def test_an_option_that_is_a_tensor_keeps_its_bits(tmp_path):
    def with_tensor(seed: int, steps: int) -> tuple[Any, Any]:
        model, optimizer = made(seed, steps)
        for group in optimizer.param_groups:
            group["lr"] = torch.tensor(group["lr"] * (seed + 1))
        return model, optimizer

    saved, through_dcp, plain = with_tensor(1, 3), with_tensor(2, 1), with_tensor(3, 1)
    save({"app": AppState(*saved)}, tmp_path / "c")
    load({"app": AppState(*through_dcp)}, tmp_path / "c")
    assert bits(*through_dcp) == bits(*saved)
    ckptfmt.load(tmp_path / "c", ckptfmt.State(weights=plain[0], optimizer=plain[1], rng=False))
    assert bits(*plain) == bits(*saved)


def test_conversions_of_torch_reach_the_storage_that_is_installed(tmp_path):
    """install() left dcp_to_torch_save and torch_save_to_dcp to torch's storage."""
    model, optimizer = made(1, 3)
    saved = {**AppState(model, optimizer).state_dict(), "epoch": 3}
    torch.save(saved, tmp_path / "a.pt")
    dcp_save.save(saved, checkpoint_id=tmp_path / "theirs", no_dist=True)
    with install():
        format_utils.torch_save_to_dcp(tmp_path / "a.pt", tmp_path / "c-3")
        for name in ("c-3", "theirs"):
            format_utils.dcp_to_torch_save(tmp_path / name, tmp_path / f"{name}.pt")
        with pytest.raises(FileExistsError, match="torch's"):
            format_utils.torch_save_to_dcp(tmp_path / "a.pt", tmp_path / "theirs")
    other, fresh = made(2, 1)
    state = ckptfmt.State(weights=other, optimizer=fresh, extra={"epoch": 0}, rng=False)
    assert ckptfmt.load(tmp_path / "c-3", state).step == 3
    assert bits(other, fresh) == bits(model, optimizer)
    assert state.extra == {"epoch": 3}
    for name in ("c-3", "theirs"):
        found = torch.load(tmp_path / f"{name}.pt")
        other, fresh = made(2, 1)
        AppState(other, fresh).load_state_dict(found)
        assert bits(other, fresh) == bits(model, optimizer)
        assert found["epoch"] == 3
    assert vars(format_utils)["FileSystemReader"] is filesystem.FileSystemReader


def test_a_checkpoint_that_ckptfmt_0_10_wrote_loads_through_dcp(tmp_path):
    """0.10 recorded the paths in the value extra/dcp, and stored an optimizer under DCP's names."""
    paths = {
        "model.w": ["model", "w"],
        "optim.state.w.exp_avg": ["optim", "state", "w", "exp_avg"],
        "optim.param_groups.0.lr": ["optim", "param_groups", 0, "lr"],
        "step": ["step"],
    }
    state = ckptfmt.State(
        weights={"w": torch.ones(2)},
        optimizer={"state": {"w": {"exp_avg": torch.full((2,), 3.0)}}},
        extra={
            "dcp": {"alone": {"weights": "model", "optimizer": "optim"}, "paths": paths},
            "optim.param_groups.0.lr": 0.25,
            "step": torch.tensor(7),
        },
        rng=False,
    )
    ckptfmt.save(tmp_path / "c", state, step=7)
    found: dict[str, Any] = {
        "model": {"w": torch.zeros(2)},
        "optim": {"state": {"w": {"exp_avg": torch.zeros(2)}}, "param_groups": [{"lr": 0.0}]},
        "step": torch.tensor(0),
    }
    load(found, tmp_path / "c")
    assert found["model"]["w"].tolist() == [1, 1]
    assert found["optim"]["state"]["w"]["exp_avg"].tolist() == [3, 3]
    assert found["optim"]["param_groups"] == [{"lr": 0.25}]
    assert found["step"].item() == 7


WORKER = Path(__file__).with_name("dcp_moving.py")


def test_two_ranks_with_fsdp_take_a_plain_optimizer_and_give_it_back(tmp_path):
    saved = made(1, 3)
    ckptfmt.save(tmp_path / "own", ckptfmt.State(weights=saved[0], optimizer=saved[1]), step=3)
    told = trainings.run(WORKER, tmp_path, processes=2)
    assert told.count("HuggingFaceStorageReader: Size mismatch") == 2
    for name in ("stages-3", "nested-stages-3"):
        plain = made(2, 1)
        ckptfmt.load(
            tmp_path / name, ckptfmt.State(weights=plain[0], optimizer=plain[1], rng=False)
        )
        assert bits(*plain) == bits(*saved), name
    # The way out for readers of Hugging Face directories that the page names.
    command = [sys.executable, "-m", "ckptfmt", "convert", tmp_path / "nested-3", tmp_path / "hf"]
    subprocess.run([*command, "--to", "hf"], check=True, capture_output=True)
    whole = load_file(tmp_path / "hf" / "model.safetensors")
    live = saved[0].state_dict()
    assert {name: value.tolist() for name, value in whole.items()} == {
        name: value.tolist() for name, value in live.items()
    }
    through_dcp = made(3, 1)
    load({"app": AppState(*through_dcp, options=FLAT)}, tmp_path / "stages-3")
    assert bits(*through_dcp) == bits(*saved)
    for name in ("nested-3", "flat-3", "cached-3"):
        assert ckptfmt.validate(tmp_path / name).valid
        with ckptfmt.open(tmp_path / name) as checkpoint:
            assert checkpoint.manifest.origin.writer_count == 2
        plain = made(2, 1)
        ckptfmt.load(
            tmp_path / name, ckptfmt.State(weights=plain[0], optimizer=plain[1], rng=False)
        )
        assert bits(*plain) == bits(*saved), name
        through_dcp = made(3, 1)
        load({"app": AppState(*through_dcp)}, tmp_path / name)
        assert bits(*through_dcp) == bits(*saved), name
    with install():
        format_utils.dcp_to_torch_save(tmp_path / "nested-3", tmp_path / "whole.pt")
    other = made(4, 1)
    AppState(*other).load_state_dict(torch.load(tmp_path / "whole.pt")["app"])
    assert bits(*other) == bits(*saved)
