"""REQ-CMT-028: what the guard waits for, what it trusts, what gets past it, and that it goes away."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

from ckptfmt import State
from ckptfmt.adapters.torch import guard as guards
from ckptfmt.adapters.torch.guard import Guard
from ckptfmt.adapters.torch.tensors import source_of
from ckptfmt.checkpointer import Checkpointer
from ckptfmt.documents.manifest import checkpoint_name
from ckptfmt.errors import CkptError, Code
from ckptfmt.read.reader import Checkpoint
from ckptfmt.run.lineage import list_checkpoints
from ckptfmt.saving.handle import SaveHandle
from ckptfmt.store.memory import MemoryStore
from ckptfmt.write.staging import HostCopy, Seen
from tests.builders import code_of
from tests.overlap.trainings import TRAININGS, Training, module
from tests.overlap.watching import Late, Spy, Trainer, bytes_of


def trusted(trainer: Trainer, training: Training) -> int:
    """Train and save until everything is trusted that will be; return the number of the next turn."""
    for number in range(3):
        training.turn(number)
        trainer.save()
    return 3


def reports(trainer: Trainer) -> list[str]:
    return [
        report for report in trainer.checkpointer.reports if report.startswith("OVERLAP_REFUSED")
    ]


def weight_of(training: Training) -> Any:
    net: Any = training.state.weights
    return net[0].weight


@pytest.fixture
def training() -> Training:
    return TRAININGS["AdamW, fused"]()


# --- without the guard, these tests would see it --------------------------------------------------


def unguarded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Guard, "meet_step", lambda *_: None)


def test_without_the_guard_the_save_fails(training, late: Late, monkeypatch):
    with Trainer(training.state, late) as trainer:
        number = trusted(trainer, training)
        unguarded(monkeypatch)
        training.turn(number)
        with pytest.raises(CkptError) as caught:
            trainer.saves[-1][0].wait_copied()
    assert caught.value.code == Code.STATE_CHANGED


def test_without_the_guard_and_the_checks_the_snapshot_is_torn(training, late: Late, monkeypatch):
    with Trainer(training.state, late) as trainer:
        number = trusted(trainer, training)
        unguarded(monkeypatch)
        monkeypatch.setattr(guards._Sample, "is_held", lambda _: True)
        monkeypatch.setattr(guards._CheckedCopy, "judge", lambda *_, **__: None)
        training.turn(number)
    assert set(trainer.torn()[3]) == training.late


# --- what is trusted ------------------------------------------------------------------------------


def test_what_is_copied_late_is_told_by_the_first_step_after_the_first_save(late: Late, spy: Spy):
    net: Any = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Embedding(4, 8, max_norm=0.1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    mean = {"weight": torch.zeros(8, 6)}

    def turn(number: int) -> None:
        optimizer.zero_grad()
        (
            net[1](net[0](torch.randn(4, 6))) + net[2](torch.tensor(number % 4))
        ).square().sum().backward()
        optimizer.step()
        mean["weight"].lerp_(net[0].weight.detach(), 0.5)

    training = Training(
        State(weights=net, optimizer=optimizer, extra={"mean": mean, "list": [1]}), turn, set()
    )
    with Trainer(training.state, late) as trainer:
        trusted(trainer, training)
    parameters = {"0.weight", "0.bias", "1.weight", "1.bias", "2.weight"}
    moments = {
        f"optimizer:{name}/{key}" for name in parameters for key in ("exp_avg", "exp_avg_sq")
    }
    assert spy.overlapped[0] == set()
    assert spy.overlapped[1] == {f"weights:{name}" for name in parameters - {"2.weight"}} | moments
    assert len(reports(trainer)) == 1
    assert reports(trainer)[0].endswith("copied before save returns: weights:2.weight")


def test_nothing_is_trusted_that_no_step_followed(training, late: Late, spy: Spy):
    with Trainer(training.state, late) as trainer:
        training.turn(0)
        for _ in range(3):
            trainer.save()
    assert spy.overlapped == [set(), set(), set()]


def test_memory_of_several_processes_is_never_trusted(training, late: Late, spy: Spy):
    weight_of(training).share_memory_()
    with Trainer(training.state, late) as trainer:
        trusted(trainer, training)
    assert spy.overlapped[-1] == training.late - {"weights:0.weight"}


def test_what_was_made_for_a_save_alone_is_let_go(late: Late):
    """Else the trainer would keep a second copy of it until the next save."""

    class Ephemeral:
        def state_dict(self) -> dict[str, Any]:
            made = torch.zeros(3)
            alive.append(weakref.ref(made))
            return {"made": made}

        def load_state_dict(self, state: object) -> None:
            pass

    alive: list[Any] = []
    net = module()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with Trainer(
        State(weights=net, optimizer=optimizer, extra={"it": Ephemeral()}), late
    ) as trainer:
        trainer.save().wait()
        gc.collect()
        assert [found() for found in alive] == [None] * len(alive)


def test_tensors_of_inference_mode_are_saved(training, late: Late):
    with torch.inference_mode():
        training.state.extra = {"seen": torch.ones(3)}
    with Trainer(training.state, late) as trainer:
        trusted(trainer, training)
    assert trainer.torn() == {}


def test_a_module_can_be_converted_between_save_and_step(training, late: Late):
    """Where torch exchanges tensors for that, as it does for sharded ones, it refuses any with a weak reference."""
    with Trainer(training.state, late) as trainer:
        training.turn(0)
        trainer.save()
        torch.utils.swap_tensors(
            weight_of(training), nn.Parameter(weight_of(training).detach().clone())
        )
        training.turn(1)
    assert trainer.torn() == {}


def test_saves_without_a_step_leave_nothing_to_wait_for(training, late: Late):
    with Trainer(training.state, late) as trainer:
        trusted(trainer, training)
        late.end()
        for _ in range(5):
            trainer.save().wait_copied()
        (guard,) = trainer.checkpointer._saves._guards.values()
        assert len(guard._in_flight) == 1


# --- waiting --------------------------------------------------------------------------------------


def test_step_waits_for_the_copies_and_the_handle_accounts_for_it(
    training, late: Late, monkeypatch
):
    wait_copied, wait_s = SaveHandle.wait_copied, 0.3

    def wait_long(handle: SaveHandle, timeout_s: float | None = None) -> None:
        time.sleep(wait_s)  # the copies begin behind this
        wait_copied(handle, timeout_s)

    with Trainer(training.state, late) as trainer:
        number = trusted(trainer, training)
        training.turn(number)
        begin_s = time.monotonic()
        handle = trainer.save()
        in_save_s, blocked_in_save_s = time.monotonic() - begin_s, handle.blocked_s
        assert handle.state == "STAGING"
        monkeypatch.setattr(SaveHandle, "wait_copied", wait_long)
        begin_s = time.monotonic()
        training.turn(number + 1)
        in_turn_s = time.monotonic() - begin_s
        assert handle.is_copied
    assert 0 < blocked_in_save_s <= in_save_s
    assert wait_s <= handle.blocked_s - blocked_in_save_s <= in_turn_s
    assert trainer.torn() == {}


class DeviceCopy:
    """A copy that a device does: its queue keeps it ahead of what is enqueued behind `guard`."""

    def __init__(self, source: Any) -> None:
        self.keys, self.begin, self.end = [(source.field, source.name, source.scope)], 0, 4
        self.done: list[str] = []
        self.seen: tuple[Seen, ...] = ()

    def start(self) -> None:
        self.done.append("start")

    def finish(self) -> None:
        self.done.append("finish")

    def guard(self) -> None:
        self.done.append("guard")

    def settle(self) -> None:
        self.done.append("settle")


class Awaited:
    def __init__(self) -> None:
        self.blocked_s = 0.0
        self.reports: list[str] = []

    def wait_copied(self) -> None:
        raise AssertionError("a device's queue waits, not the host")

    def report(self, sentence: str) -> None:
        self.reports.append(sentence)


@pytest.mark.parametrize("moment", ["before the step", "in the step"])
def test_a_step_goes_on_beside_copies_of_a_device(moment):
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    source = source_of(weight, field="weights", name="w", scope="global")
    awaited, copy = Awaited(), DeviceCopy(source)
    guard = Guard(awaited.report)
    (held,) = guard.hold([copy], [source], awaited)
    held.start()
    with torch.no_grad():
        if moment == "before the step":
            weight.add_(1)
        guard.meet_step(optimizer)
        weight.add_(1)
    found = code_of(held.finish)
    guard.close()
    assert copy.done == ["start", "guard", "finish"]
    assert found == ("STATE_CHANGED" if moment == "before the step" else "ok")
    assert bool(awaited.reports) == (moment == "before the step")


def test_a_caller_can_wait_for_the_copies_and_then_change_anything(training, late: Late):
    with Trainer(training.state, late) as trainer:
        trusted(trainer, training)
        handle = trainer.saves[-1][0]
        assert handle.state == "STAGING"
        handle.wait_copied()
        weight_of(training).data.zero_()
    assert trainer.torn() == {}


def test_slow_copies_beside_real_turns(training, late: Late, monkeypatch):
    finish = HostCopy.finish

    def slow(copy: HostCopy) -> None:
        time.sleep(0.002)
        finish(copy)

    monkeypatch.setattr(HostCopy, "finish", slow)
    late.end()
    with Trainer(training.state, late) as trainer:
        for number in range(8):
            training.turn(number)
            trainer.save()
    assert trainer.torn() == {}


def test_an_earlier_save_is_waited_for_although_a_later_one_copies_nothing_late(
    training, late: Late, monkeypatch
):
    """A turn without a step, and a save of which everything is copied before it returns."""
    with Trainer(training.state, late) as trainer:
        number = trusted(trainer, training)
        with monkeypatch.context() as patch:
            patch.setattr(Guard, "find_constant", lambda *_: frozenset())
            trainer.save()
        training.turn(number)
    assert trainer.torn() == {}


def test_a_step_of_another_thread_waits_as_well(training, late: Late, monkeypatch):
    """Optimizers in the backward pass step in as many threads as there are devices."""
    waits, both = threading.Barrier(2, timeout=10), []
    wait_copied = SaveHandle.wait_copied

    def meet(handle: SaveHandle, timeout_s: float | None = None) -> None:
        # The first one to come doesn't wait alone.
        both.append(waits.wait())
        wait_copied(handle, timeout_s)

    with Trainer(training.state, late) as trainer:
        trusted(trainer, training)
        monkeypatch.setattr(SaveHandle, "wait_copied", meet)
        threads = [
            threading.Thread(target=torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1).step)
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(both) == [0, 1]


def test_a_step_after_an_interrupted_one_waits_again(training, late: Late, monkeypatch):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with Trainer(training.state, late) as trainer:
        number = trusted(trainer, training)
        with monkeypatch.context() as patch:
            patch.setattr(SaveHandle, "wait_copied", interrupt)
            with pytest.raises(KeyboardInterrupt):
                training.turn(number)
        training.turn(number)
    assert trainer.torn() == {}


def test_a_save_within_a_step_copies_nothing_late(late: Late, spy: Spy):
    net = module()
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=4)
    with Trainer(State(weights=net, optimizer=optimizer), late) as trainer:

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = net(torch.ones(2, 6)).square().sum()
            loss.backward()
            if len(trainer.saves) < 4 and optimizer.state_dict()["state"][0]["func_evals"] > 2:
                trainer.save()
            return loss

        for _ in range(4):
            optimizer.step(closure)
    assert len(trainer.saves) == 4
    assert spy.overlapped[-1] == set()
    assert trainer.torn() == {}


def test_hooks_of_all_optimizers_that_are_older_run_behind_the_guard(training, late: Late):
    """Such a hook may begin to change tensors long after the guard has come to trust them."""
    weight, begins = weight_of(training), [False]

    def change_one(*_: object) -> None:
        if begins[0]:
            weight.data[0, 0] = 1

    torch_optimizer.register_optimizer_step_pre_hook(change_one)
    with Trainer(training.state, late) as trainer:
        number = trusted(trainer, training)
        begins[0] = True
        training.turn(number)
    assert trainer.torn() == {}


@pytest.mark.parametrize("how", ["by its option", "at a step"])
def test_an_optimizer_that_is_captured_is_trusted_no_more(how, late: Late, spy: Spy, monkeypatch):
    """Its steps may be replayed from then on, and no hook runs."""
    training = TRAININGS["SGD with momentum"]()
    optimizer: Any = training.state.optimizer
    with Trainer(training.state, late) as trainer:
        number = trusted(trainer, training)
        assert spy.overlapped[-1] == training.late
        with monkeypatch.context() as patch:
            if how == "by its option":
                optimizer.param_groups[0]["capturable"] = True
            else:
                patch.setattr(guards, "_is_capturing", lambda: True)
                patch.setattr(guards._CheckedCopy, "guard", _refuse_in_capture)
            training.turn(number)
        for again in range(3):
            trainer.save()
            training.turn(number + again)
    assert spy.overlapped[3:] == [set()] * 3
    assert trainer.torn() == {}


def _refuse_in_capture(*_: object) -> None:
    raise AssertionError("a graph can't wait for events that aren't in it")


# --- what is changed in spite of everything -------------------------------------------------------


def by_operation(weight: Any) -> None:
    with torch.no_grad():
        weight.add_(1)


def by_one_element(weight: Any) -> None:
    with torch.no_grad():
        weight[3, 2] = 7


def by_data(weight: Any) -> None:
    weight.data.mul_(0.5)


def by_array(weight: Any) -> None:
    weight.detach().numpy()[:] += 1


@pytest.mark.parametrize("change", [by_operation, by_one_element, by_data, by_array])
def test_what_is_written_to_before_its_copy_fails_the_save(
    change, training, late: Late, spy: Spy, tmp_path
):
    with Trainer(
        training.state, late, path=tmp_path / "run" if change is by_operation else None
    ) as trainer:
        number = trusted(trainer, training)
        change(weight_of(training))
        training.turn(number)
        handle, _ = trainer.saves.pop()
        with pytest.raises(CkptError) as caught:
            handle.wait()
        assert caught.value.code == Code.STATE_CHANGED
        assert caught.value.where == "weights:0.weight"
        with pytest.raises(CkptError) as raised:
            trainer.checkpointer.save()
        assert raised.value.code == Code.STATE_CHANGED
        for again in range(3):
            trainer.save()
            change(weight_of(training))
            training.turn(number + again)
    assert trainer.torn() == {}, "a tensor that was written to isn't trusted any more"
    assert len(reports(trainer)) == 1
    assert "weights:0.weight" not in spy.overlapped[-1]
    steps = [entry.step for entry in list_checkpoints(trainer._store) if entry.register is not None]
    assert handle.step not in steps
    assert len(steps) == len(trainer.saves)


def test_weights_that_are_exchanged_for_their_average_fail_one_save_and_no_other(
    training, late: Late, spy: Spy
):
    """As programs do that evaluate the average after some of their saves, through ``.data``."""
    net: Any = training.state.weights
    failed = []
    with Trainer(training.state, late) as trainer:
        for number in range(8):
            training.turn(number)
            try:
                trainer.save()
            except CkptError as error:
                failed.append((trainer.saves.pop()[0].step, error.code))
                trainer.save()
            if number >= 4:
                own = [parameter.detach().clone() for parameter in net.parameters()]
                for parameter in net.parameters():
                    parameter.data.zero_()
                with contextlib.suppress(CkptError):
                    trainer.saves[-1][0].wait_copied()
                for parameter, content in zip(net.parameters(), own, strict=True):
                    parameter.data.copy_(content)
    assert failed == [(5, Code.STATE_CHANGED)]
    assert trainer.torn() == {}
    assert spy.overlapped[-1] == set()


def test_a_write_that_was_under_way_at_the_check_is_found_when_it_is_counted(
    training, late: Late, monkeypatch
):
    """Torch counts a write behind it: what is copied meanwhile looks unchanged."""
    version, looked = guards._version, list[Any]()

    def delayed(source: Any) -> int:
        if (
            threading.current_thread().name.startswith("ckptfmt-stager")
            and source.data_ptr() == first
        ):
            looked.append(source)
            return version(source) + (len(looked) > 1)
        return version(source)

    first = weight_of(training).data_ptr()
    with Trainer(training.state, late) as trainer:
        number = trusted(trainer, training)
        late.release()
        trainer.saves[-1][0].wait_copied()
        training.turn(number)
        monkeypatch.setattr(guards, "_version", delayed)
        handle = trainer.save()
        late.release()
        with pytest.raises(CkptError) as caught:
            handle.wait()
    assert caught.value.code == Code.STATE_CHANGED


# --- hooks come and go ----------------------------------------------------------------------------


def hook_count() -> int:
    return len(torch_optimizer._global_optimizer_pre_hooks) + len(
        torch_optimizer._global_optimizer_post_hooks
    )


def test_a_step_of_anything_goes_on_after_close(training, late: Late):
    before = hook_count()
    with Trainer(training.state, late) as trainer:
        number = trusted(trainer, training)
        assert hook_count() > before
    assert hook_count() == before
    training.turn(number)


@pytest.mark.parametrize("ends", ["closed", "dropped"])
def test_no_hook_is_left_behind(ends, training):
    before = hook_count()
    checkpointer = Checkpointer(MemoryStore(), training.state, saver="thread")
    for number in range(3):
        training.turn(number)
        checkpointer.step += 1
        checkpointer.save()
    assert hook_count() > before
    if ends == "closed":
        checkpointer.close()
    del checkpointer
    gc.collect()
    assert hook_count() == before


@pytest.mark.parametrize("options", [{"overlap": False}, {"saver": "inline"}])
def test_without_overlap_there_is_no_hook(options, training):
    """Hooks that look for what no State holds are others; they hold no step back."""
    before = hook_count()
    with Checkpointer(
        MemoryStore(), training.state, **{"saver": "thread", **options}
    ) as checkpointer:
        training.turn(0)
        checkpointer.step = 1
        checkpointer.save()
        hooks = [*torch_optimizer._global_optimizer_pre_hooks.values()]
        hooks += torch_optimizer._global_optimizer_post_hooks.values()
        assert not [hook for hook in hooks if hook.__module__ == guards.__name__]
    assert hook_count() == before


def test_optimizers_with_a_strange_state_step_as_before(training, late: Late):
    """The hook meets every optimizer of the process, and must not make one fail."""
    strange = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    strange.state[strange.param_groups[0]["params"][0]] = [1, 2]
    with Trainer(training.state, late) as trainer:
        number = trusted(trainer, training)
        strange.step()
        training.turn(number)


def test_other_default_devices_make_no_difference(training, late: Late):
    guards._sample_at.cache_clear()
    trainer = Trainer(training.state, late)
    training.turn(0)
    with trainer, torch.device("meta"):
        trainer.save()
        training.state.optimizer.step()
        trainer.save()
        training.state.optimizer.step()
    assert trainer.torn() == {}


# --- a thousand -----------------------------------------------------------------------------------


@pytest.mark.parametrize("save_count", [100, pytest.param(1000, marks=pytest.mark.exhaustive)])
def test_changed_at_once_after_save_returns(save_count, late: Late):
    late.end()
    net: Any = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    array, leaf = np.zeros(16), [0]
    state = State(weights=net, optimizer=optimizer, extra={"array": array, "leaf": leaf})
    net(torch.randn(4, 3)).square().sum().backward()
    changes: list[Any] = [
        optimizer.step,
        lambda: net[1].running_mean.add_(1),
        lambda: np.add(array, 1, out=array),
        lambda: leaf.append(leaf.pop() + 1),
    ]
    torn = []
    for _ in range(save_count // 10):  # runs: each save of one looks at all that it has
        store = MemoryStore()
        with Checkpointer(store, state, saver="thread") as checkpointer:
            for step in range(1, 11):
                optimizer.step()
                checkpointer.step = step
                wanted = [
                    bytes_of(net[0].weight),
                    bytes_of(net[1].running_mean),
                    array.tobytes(),
                    list(leaf),
                ]
                handle = checkpointer.save()
                changes[step % len(changes)]()
                assert handle is not None
                handle.wait()
                checkpoint = Checkpoint(store.at(checkpoint_name(step, 1)))
                names = [
                    ("weights", "0.weight"),
                    ("weights", "1.running_mean"),
                    ("optimizer", "extra/array"),
                ]
                saved = [checkpoint.read(*name).tobytes() for name in names]
                if [*saved, checkpoint.leaf("optimizer", "extra/leaf")] != wanted:
                    torn.append(step)
    assert torn == []
