"""Disasters of loads without an error: all that was saved is loaded bit by bit, or refused by name."""

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import ckptfmt
from tests.builders import code_of, error_of, tensor
from tests.disasters.test_mixed_steps import adam, contents
from tests.interface.test_group import Allgather, run_writers


def state_of(model, optimizer=None):
    """Return a state of a model and its optimizer, without random-number streams."""
    return ckptfmt.State(weights=model, optimizer=optimizer, rng=False)


def save_together(path, *states):
    """Save one state from each of several processes; return the reports, or the errors."""
    gather = Allgather(len(states)).of

    def save(writer):
        group: Any = {"writer": (writer, len(states)), "agree": gather(writer)}
        return ckptfmt.save(path, states[writer], step=1, **group)

    return run_writers(len(states), save)


def test_pytorch_118081_names_that_do_not_match_are_an_error_and_change_nothing(tmp_path):
    """A load left the state unchanged and raised no error (pytorch#118081).

    A saved tensor without a live tensor, or a live tensor without a saved one, is an error that
    names it, and the live objects stay as they were.
    """
    saved, live = torch.nn.Linear(4, 4), torch.nn.ModuleDict({"head": torch.nn.Linear(4, 4)})
    ckptfmt.save(tmp_path / "c", state_of(saved), step=1)
    before = pickle.dumps(live.state_dict())
    control = live.load_state_dict(saved.state_dict(), strict=False)
    assert control.missing_keys  # and no error, and nothing changed
    assert pickle.dumps(live.state_dict()) == before

    refusal = error_of(lambda: ckptfmt.load(tmp_path / "c", state_of(live)))
    assert refusal.code == "TENSOR_MISSING"
    assert "head.weight" in str(refusal)
    assert "TENSOR_UNEXPECTED at weights:weight" in str(refusal)
    assert pickle.dumps(live.state_dict()) == before


class Forgetful:
    """A scheduler of an own kind that takes only a part of its state back."""

    def __init__(self, step, warmup):
        self.step, self.warmup = step, warmup

    def state_dict(self):
        return {"step": self.step, "warmup": self.warmup}

    def load_state_dict(self, state):
        self.step = state["step"]


def test_megatron_lm_6920_and_pytorch_117421_an_object_that_ignores_its_state_is_found(tmp_path):
    """A run went on from another model than it had saved, since a loaded state was dropped without
    an error (Megatron-LM#6920, pytorch#117421).

    After a load the live objects are compared with the checkpoint: an object that returns another
    state than it was given is an error.
    """
    path = tmp_path / "c"
    ckptfmt.save(path, ckptfmt.State(extra={"own": Forgetful(7, 100)}, rng=False), step=7)
    state = ckptfmt.State(extra={"own": Forgetful(0, 50)}, rng=False)
    assert code_of(lambda: ckptfmt.load(path, state)) == "READ_BACK"
    state = ckptfmt.State(extra={"own": Forgetful(0, 100)}, rng=False)
    assert ckptfmt.load(path, state).step == 7


def test_areal_1468_optimizer_moments_are_not_dropped(tmp_path):
    """A load dropped the optimizer's moments in silence (AReaL#1468).

    The report of a load without the optimizer claims no more than equal bytes and names the part
    that is left out; an optimizer without a step gets each moment bit by bit.
    """
    model, optimizer, train = adam()
    for _ in range(3):
        train()
    ckptfmt.save(tmp_path / "c", state_of(model, optimizer), step=3)

    other, fresh, _ = adam(seed=1)
    report = ckptfmt.load(tmp_path / "c", state_of(other))
    assert report.claim == "S0"
    assert any(reason.startswith("not in State: optimizer") for reason in report.lowered_by)
    assert not fresh.state
    ckptfmt.load(tmp_path / "c", state_of(other, fresh))
    assert contents(other, fresh) == contents(model, optimizer)
    assert len(contents(other, fresh)) == 4 + 4 * 3

    ckptfmt.save(tmp_path / "weights", state_of(model), step=3)
    refused = code_of(lambda: ckptfmt.load(tmp_path / "weights", state_of(other, fresh)))
    assert refused == "GROUP_MISMATCH"


def test_pytorch_140898_gradients_at_the_save_and_at_the_load_change_no_moment(tmp_path):
    """The optimizer's state was empty without an error if gradients were present
    (pytorch#140898).

    Gradients count neither at the save nor at the load, and stay as they are.
    """
    model, optimizer, train = adam()
    train()
    train()
    assert all(parameter.grad is not None for parameter in model.parameters())
    ckptfmt.save(tmp_path / "c", state_of(model, optimizer), step=2)
    other, fresh, _ = adam(seed=1)
    for parameter in other.parameters():
        parameter.grad = torch.full_like(parameter, 3.0)
    ckptfmt.load(tmp_path / "c", state_of(other, fresh))
    assert contents(other, fresh) == contents(model, optimizer)
    assert all(bool((parameter.grad == 3.0).all()) for parameter in other.parameters())


def grouped(seed):
    """Return a model and an optimizer with a group of parameters and a group without."""
    torch.manual_seed(seed)
    model = torch.nn.Linear(4, 2)
    groups = [
        {"params": [*model.parameters()]},
        {"params": [], "lr": 0.25 * (seed + 1), "betas": (0.5, 0.75), "weight_decay": 0.125},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_pytorch_143828_and_veomni_878_a_group_without_parameters_keeps_its_settings(tmp_path):
    """A group without parameters lost its betas and weight decay, and the next step failed
    (pytorch#143828, VeOmni#878).

    The settings of each group are saved and loaded, also of an empty group.
    """
    model, optimizer = grouped(0)
    ckptfmt.save(tmp_path / "c", state_of(model, optimizer), step=1)
    other, fresh = grouped(1)
    ckptfmt.load(tmp_path / "c", state_of(other, fresh))
    for saved, live in zip(optimizer.param_groups, fresh.param_groups, strict=True):
        assert {key: live[key] for key in saved if key != "params"} == {
            key: value for key, value in saved.items() if key != "params"
        }
    assert fresh.param_groups[1]["lr"] == 0.25
    fresh.step()


def test_pytorch_192202_state_of_a_frozen_parameter_is_kept(tmp_path):
    """The moments of parameters that were frozen at the load were dropped (pytorch#192202).

    Moments belong to a name: a parameter may be frozen at the save, and at the load.
    """
    model, optimizer, train = adam()
    train()
    model[0].weight.requires_grad_(requires_grad=False)
    train()
    ckptfmt.save(tmp_path / "c", state_of(model, optimizer), step=2)

    control, dropped, _ = adam(seed=1)
    control[0].weight.requires_grad_(requires_grad=False)
    set_optimizer_state_dict(control, dropped, get_optimizer_state_dict(model, optimizer))
    assert control[0].weight not in dropped.state

    other, fresh, _ = adam(seed=1)
    other[0].weight.requires_grad_(requires_grad=False)
    ckptfmt.load(tmp_path / "c", state_of(other, fresh))
    assert contents(other, fresh) == contents(model, optimizer)
    assert "0.weight/exp_avg" in contents(other, fresh)


def test_deepspeed_2413_4295_and_7900_tensors_without_elements_take_nobodys_place(tmp_path):
    """Checkpoints of partitioned parameters had tensors of the shape [0], the loss fell, and
    nothing was said (DeepSpeed#2413, #4295, #7900; LlamaFactory#253).

    A tensor is saved with its global shape and covered exactly: missing pieces are an error of the
    save, and an empty tensor isn't loaded into another shape.
    """
    whole = np.ones((8, 4))
    none_of_it = tensor("w", whole, boxes=())
    refusal = code_of(
        lambda: ckptfmt.save(tmp_path / "a", ckptfmt.State(weights={"w": none_of_it}), step=1)
    )
    assert refusal == "TILING_GAP"
    assert code_of(lambda: ckptfmt.load(tmp_path / "a")) == "NOT_COMMITTED"

    emptied = {"w": torch.empty(0)}
    ckptfmt.save(tmp_path / "b", ckptfmt.State(weights=emptied, rng=False), step=1)
    live = {"w": torch.ones(8, 4)}
    refusal = error_of(lambda: ckptfmt.load(tmp_path / "b", ckptfmt.State(weights=live, rng=False)))
    assert refusal.code == "SHAPE_MISMATCH"
    assert live["w"].numpy().tobytes() == torch.ones(8, 4).numpy().tobytes()


@pytest.mark.parametrize(("savers", "loaders"), [(5, 3), (3, 7), (20, 1)])
def test_pytorch_136228_and_108869_uneven_and_empty_shares_join_to_the_whole(
    savers, loaders, tmp_path
):
    """A tensor of 17 rows over more processes failed to load, for shares were uneven or empty
    (pytorch#136228, #108869).

    Shares of any size, also none, join to the tensor, on any number of processes.
    """
    whole = np.arange(17 * 3, dtype=np.float32).reshape(17, 3)

    def share(worker, count):
        rows = -(-17 // count)
        begin, end = min(17, worker * rows), min(17, (worker + 1) * rows)
        return begin, end

    states = []
    for worker in range(savers):
        begin, end = share(worker, savers)
        boxes = (ckptfmt.Box((begin, 0), (end - begin, 3)),) if end > begin else ()
        held = {"w": tensor("w", whole, boxes=boxes)}
        states.append(ckptfmt.State(weights=held, rng=False))
    (digest,) = {report.digest for report in save_together(tmp_path / "c", *states)}
    found = np.zeros_like(whole)
    with ckptfmt.open(tmp_path / "c", digest=digest) as checkpoint:
        for worker in range(loaders):
            begin, end = share(worker, loaders)
            found[begin:end] = checkpoint.weights["w"][begin:end]
    assert found.tobytes() == whole.tobytes()


def test_radixark_66_a_value_of_each_process_is_no_common_value(tmp_path):
    """A list of each process was stored with the values of process 0 alone
    (radixark/Megatron-LM#66).

    A plain value that differs between processes is an error, and `PerWorker` gives each process
    its own.
    """
    ranks = [
        ckptfmt.State(weights={"w": np.ones(3)}, extra={"losses": [rank]}, rng=False)
        for rank in range(2)
    ]
    assert {one.code for one in save_together(tmp_path / "a", *ranks)} == {"LEAF_DIVERGED"}
    assert code_of(lambda: ckptfmt.load(tmp_path / "a")) == "NOT_COMMITTED"

    wrapped = [
        ckptfmt.State(
            weights={"w": np.ones(3)}, extra={"losses": ckptfmt.PerWorker([rank])}, rng=False
        )
        for rank in range(2)
    ]
    save_together(tmp_path / "b", *wrapped)
    gather = Allgather(2).of

    def load(rank):
        own = ckptfmt.PerWorker([None])
        state = ckptfmt.State(weights={"w": np.zeros(3)}, extra={"losses": own}, rng=False)
        group: Any = {"writer": (rank, 2), "agree": gather(rank)}
        ckptfmt.load(tmp_path / "b", state, **group)
        return own.value

    assert run_writers(2, load) == [[0], [1]]


def test_bloom_2022_03_24_replicas_that_differ_are_found_at_the_save(tmp_path):
    """Layer norms differed between processes for weeks, in all checkpoints (BLOOM's chronicles of
    2022-03-24).

    A replica that differs from the same tensor on another process fails the save.
    """
    norms = [torch.ones(64), torch.ones(64)]
    norms[1][17] = 1.0 + 2**-20
    states = [ckptfmt.State(weights={"norm": norm}, rng=False) for norm in norms]
    errors = save_together(tmp_path / "a", *states)
    assert {error.code for error in errors} == {"REPLICA_DIVERGED"}
    assert "norm" in str(errors[0])
    norms[1][17] = 1.0
    assert len({report.digest for report in save_together(tmp_path / "b", *states)}) == 1


def test_torchtitan_4615_moments_of_another_dtype_keep_their_bits(tmp_path):
    """Moments in bfloat16 became float32 at the load, since torch casts them to the dtype of the
    parameter (torchtitan#4615).

    Moments keep the dtype in which they were saved.
    """
    model, optimizer, train = adam()
    train()
    for state in optimizer.state.values():
        for key in ("exp_avg", "exp_avg_sq"):
            state[key] = state[key].to(torch.bfloat16)
    control = torch.optim.AdamW(model.parameters())
    control.load_state_dict(optimizer.state_dict())
    assert control.state[model[0].weight]["exp_avg"].dtype == torch.float32

    ckptfmt.save(tmp_path / "c", state_of(model, optimizer), step=1)
    other, fresh, _ = adam(seed=1)
    ckptfmt.load(tmp_path / "c", state_of(other, fresh))
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        for key, saved in optimizer.state[mine].items():
            live = fresh.state[theirs][key]
            assert live.dtype == saved.dtype
            assert torch.equal(live, saved)


def test_transformers_34053_and_composer_1376_the_loss_scale_is_restored(tmp_path):
    """A resume began with the loss scale 65536 instead of 256, and gradients overflowed
    (transformers#34053, composer#1376).

    A `GradScaler` in `extra` is restored with its scale and counts, and an `extra` without it is
    refused.
    """

    def make():
        return torch.amp.GradScaler("cpu", init_scale=512.0, growth_interval=100)

    scaler = make()
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler.scale(weight.sum() * torch.inf).backward()
    scaler.step(optimizer)
    scaler.update()  # an overflow halves the scale
    assert scaler.get_scale() == 256.0
    ckptfmt.save(tmp_path / "c", ckptfmt.State(extra={"scaler": scaler}, rng=False), step=1)

    fresh = make()
    ckptfmt.load(tmp_path / "c", ckptfmt.State(extra={"scaler": fresh}, rng=False))
    assert fresh.state_dict() == scaler.state_dict()
    assert fresh.get_scale() == 256.0
    without = ckptfmt.State(extra={"scheduler": {"last_epoch": 3}}, rng=False)
    refusal = error_of(lambda: ckptfmt.load(tmp_path / "c", without))
    assert "LEAF_UNEXPECTED at extra:scaler" in str(refusal)


def test_yolox_1318_and_lightly_train_892_averaged_weights_and_their_count_are_kept(tmp_path):
    """A checkpoint had the averaged weights in place of the trained ones, or lost the count of
    averages (YOLOX#1318, lightly-train#892).

    Trained weights, averaged weights and the count are separate contents, each restored.
    """
    model, optimizer, train = adam()
    averaged: Any = torch.optim.swa_utils.AveragedModel(model)
    for _ in range(3):
        train()
        averaged.update_parameters(model)
    state = ckptfmt.State(weights=model, optimizer=optimizer, extra={"ema": averaged}, rng=False)
    ckptfmt.save(tmp_path / "c", state, step=3)

    other, fresh, train_other = adam(seed=1)
    fresh_average = torch.optim.swa_utils.AveragedModel(other)
    ckptfmt.load(
        tmp_path / "c",
        ckptfmt.State(weights=other, optimizer=fresh, extra={"ema": fresh_average}, rng=False),
    )
    assert int(fresh_average.n_averaged) == 3
    for step in (train, train_other):
        step()
    averaged.update_parameters(model)
    fresh_average.update_parameters(other)
    assert contents(other, fresh) == contents(model, optimizer)
    for name, value in averaged.state_dict().items():
        assert torch.equal(fresh_average.state_dict()[name], value)
    assert not torch.equal(averaged.module[0].weight, model[0].weight)


def test_safetensors_98_and_unsloth_1157_tied_weights_are_one_tensor(tmp_path):
    """Weights that share memory were refused by a save, or came back as two tensors
    (safetensors#98, unsloth#1157).

    Tied weights are stored once and stay tied after a load.
    """

    class Tied(torch.nn.Module):
        def __init__(self, seed):
            super().__init__()
            torch.manual_seed(seed)
            self.embed = torch.nn.Embedding(50, 8)
            self.head = torch.nn.Linear(8, 50, bias=False)
            self.head.weight = self.embed.weight

    model, other = Tied(0), Tied(1)
    report = ckptfmt.save(tmp_path / "c", state_of(model), step=1)
    assert report.nbytes == 50 * 8 * 4
    ckptfmt.load(tmp_path / "c", state_of(other))
    assert other.head.weight is other.embed.weight
    assert torch.equal(other.embed.weight, model.embed.weight)
