"""Disasters of saves beside the training: a checkpoint has the state of one step, and says which."""

import logging
from typing import Any

import numpy as np
import pytest
import torch

import ckptfmt
from ckptfmt.checkpointer import Checkpointer
from ckptfmt.store.memory import MemoryStore
from tests.builders import code_of
from tests.disasters.gates import WAIT_S, GatedStore
from tests.faults.driver import PATIENCE_S, Toy, committed, savers, send
from tests.loop.test_checkpointer import committed as committed_in


def adam(seed=0):
    """Return a small model, its optimizer, and a function that trains a step."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def train():
        optimizer.zero_grad()
        model(torch.ones(4, 8)).square().mean().backward()
        optimizer.step()

    return model, optimizer, train


def save(checkpointer, step) -> Any:
    """Begin the save of a step, and return its handle."""
    return checkpointer.save(step=step)


def contents(model, optimizer):
    """Return a copy of all weights and of all optimizer state, as bytes by name."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    found = {name: tensor.numpy().tobytes() for name, tensor in model.state_dict().items()}
    for parameter, state in optimizer.state.items():
        for key, tensor in state.items():
            found[f"{names[parameter]}/{key}"] = tensor.numpy().tobytes()
    return found


def loaded(store):
    """Return the contents of the newest checkpoint of a run, by way of another model."""
    model, optimizer, train = adam(seed=1)
    train()
    ckptfmt.load(store, ckptfmt.State(weights=model, optimizer=optimizer), allow=("streams",))
    return contents(model, optimizer)


def test_pytorch_144657_and_nvrx_376_a_save_has_the_values_of_its_call():
    """An asynchronous save wrote the values of a later step, of all tensors or of the step counts
    (pytorch#144657, nvidia-resiliency-ext#376).

    Training goes on while the files are written, and the checkpoint has each weight, moment and
    count of the call of `save`.
    """
    model, optimizer, train = adam()
    store = GatedStore(MemoryStore())
    state = ckptfmt.State(weights=model, optimizer=optimizer)
    saving = ckptfmt.Saving(saver="thread")
    with Checkpointer(store, state, saving=saving) as checkpointer:
        checkpointer.restore_rng()
        for step in (1, 2):
            train()
            save(checkpointer, step).wait("COMMITTED", WAIT_S)
        train()
        expected, naive = contents(model, optimizer), model.state_dict()
        with store.closed():
            handle = save(checkpointer, 3)
            train()
            train()
            assert store.arrived.wait(WAIT_S)
            assert handle.state != "COMMITTED"
        handle.wait("COMMITTED", WAIT_S)
    assert {name: naive[name].numpy().tobytes() for name in naive}.items() - expected.items()
    assert loaded(store) == expected


def test_lightning_20953_a_checkpoint_never_mixes_two_steps():
    """A checkpoint had one layer of a step and another layer of the next, since the training
    changed tensors during the write (pytorch-lightning#20953).

    A tensor that the program changes before its copy fails the save by the tensor's name; a save
    that succeeds is of one step.
    """
    weights = {f"layer{number}": torch.zeros(1 << 20) for number in range(8)}
    parameters = torch.nn.ParameterDict(weights)
    optimizer = torch.optim.SGD(parameters.parameters(), lr=1.0)
    for parameter in parameters.values():
        parameter.grad = torch.full_like(parameter, -1.0)

    def add(number):
        with torch.no_grad():
            for parameter in reversed([*parameters.values()]):
                parameter.add_(number)

    data = {"step": 0}
    state = ckptfmt.State(weights=parameters, optimizer=optimizer, data=data)
    saving = ckptfmt.Saving(saver="thread")
    store, outcomes = MemoryStore(), dict[int, str]()
    with Checkpointer(store, state, saving=saving) as checkpointer:
        checkpointer.restore_rng()
        for step in range(1, 7):
            optimizer.step()
            data["step"] = step
            handle = save(checkpointer, step)
            if step % 2 == 0:  # a change by other means than the optimizer, at any moment
                add(0.5)
            outcomes[step] = code_of(lambda handle=handle: handle.wait("COMMITTED", WAIT_S))
            if step % 2 == 0:
                add(-0.5)
            if outcomes[step] != "ok":
                assert "weights:layer" in str(handle.error)
                assert code_of(checkpointer.save) == outcomes[step]  # told to the training, once
    assert set(outcomes.values()) <= {"ok", "STATE_CHANGED"}
    assert outcomes[1] == outcomes[3] == outcomes[5] == "ok"
    for step, launch in committed_in(store):
        place = store.at(f"step-{step:08d}-l{launch:04d}")
        trees = ckptfmt.load(place, framework="numpy")
        values = {value for array in trees["weights"].values() for value in np.unique(array)}
        assert (values, trees["data"]) == ({float(step)}, {"step": step})


@pytest.mark.parametrize("delta", ["off", "smallest"])
@pytest.mark.parametrize("slots", [1, 2])
def test_nemo_rl_3312_and_megatron_lm_2288_each_save_has_its_own_tensors(slots, delta):
    """Each later save wrote the tensors of the first save again, or a buffer that was in use
    (NeMo-RL#3312, Megatron-LM#2288).

    Saves of an unchanged structure reuse slots of memory, and each checkpoint has its own values.
    """
    toy, store = Toy(3 << 18), MemoryStore()
    saving = ckptfmt.Saving(saver="thread", slots=slots, delta=delta)
    with Checkpointer(store, toy.state, saving=saving) as checkpointer:
        checkpointer.restore_rng()
        for _ in range(5):
            toy.save(checkpointer)
    assert [step for step, _ in committed_in(store)] == [1, 2, 3, 4, 5]
    for step in range(1, 6):
        found = Toy(3 << 18)
        place = store.at(f"step-{step:08d}-l0001")
        bases = [store.at(f"step-{base:08d}-l0001") for base in range(1, step)]
        ckptfmt.load(place, found.state, bases=bases, allow=("streams",))
        found.check(step)


def test_torchtitan_930_a_load_right_behind_a_save_waits_or_says_what_it_waits_for(place):
    """A load right behind an asynchronous save failed, or met files that were not there yet
    (torchtitan#930).

    A load names the save in hand, and `wait_s` waits for it.
    """
    toy = Toy()
    with Checkpointer(place, toy.state) as checkpointer:
        checkpointer.restore_rng()
        handle = toy.save(checkpointer)
        handle.wait("STAGED", PATIENCE_S)
        (pid,) = savers()
        send(pid, 19)  # SIGSTOP
        if handle.state != "COMMITTED" and not committed(place):
            assert code_of(lambda: ckptfmt.load(place)) == "NOT_COMMITTED"
        send(pid, 18)  # SIGCONT
        found = Toy()
        report = ckptfmt.load(place, found.state, wait_s=PATIENCE_S, allow=("streams",))
    assert report.step == 1
    found.check(1)


def test_megatron_bridge_3267_and_5738_all_places_name_the_step_of_the_call():
    """The step of an asynchronous save was read when the save ended: the tracker file and three
    loggers named a later step (Megatron-Bridge#3267, #5738).

    Directory, manifest, event and content of a checkpoint name the step of the call, however far
    the training is at the commit.
    """
    toy, store = Toy(), GatedStore(MemoryStore())
    events: list[Any] = []
    saving = ckptfmt.Saving(saver="thread")
    with Checkpointer(store, toy.state, saving=saving, on_save=events.append) as checkpointer:
        checkpointer.restore_rng()
        toy.save(checkpointer).wait("COMMITTED", WAIT_S)
        with store.closed():
            handle = toy.save(checkpointer)
            for step in range(3, 9):
                toy.train()
                checkpointer.end_step(step)
        report: Any = handle.wait("COMMITTED", WAIT_S)
    name = "step-00000002-l0001"
    with ckptfmt.open(store.at(name)) as checkpoint:
        assert (checkpoint.step, dict(checkpoint.data)) == (2, {"step": 2})
    assert report.step == 2
    (event,) = [one for one in events if one.kind == "committed" and one.step == 2]
    assert event.path.endswith(name)
    assert toy.data["step"] == 8


def test_megatron_lm_1763_and_kempnerforge_102_nothing_is_called_saved_before_the_commit(caplog):
    """The log said saved, or the link `latest` moved, when the save had only begun
    (Megatron-LM#1763, KempnerForge#102).

    State, events, log and the run's newest checkpoint change at the commit and not before.
    """
    toy, store = Toy(), GatedStore(MemoryStore())
    events: list[Any] = []
    saving = ckptfmt.Saving(saver="thread")

    def told():
        lines = [line for line in caplog.messages if "step 2 COMMITTED" in line]
        kinds = [one.kind for one in events if one.step == 2 and one.kind == "committed"]
        return len(lines), len(kinds), ckptfmt.Run(store).newest().step

    with caplog.at_level(logging.INFO, "ckptfmt"):
        with Checkpointer(store, toy.state, saving=saving, on_save=events.append) as checkpointer:
            checkpointer.restore_rng()
            toy.save(checkpointer).wait("COMMITTED", WAIT_S)
            with store.closed():
                handle = toy.save(checkpointer)
                assert store.arrived.wait(WAIT_S)
                assert handle.state in ("STAGING", "STAGED")
                assert told() == (0, 0, 1)
            handle.wait("COMMITTED", WAIT_S)
        assert told() == (1, 1, 2)
