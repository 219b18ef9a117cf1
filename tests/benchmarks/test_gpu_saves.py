"""Saves of what lies on a device, few blocks of it changed: which blocks, what counts, what is left; on the host."""

import os

import pytest
import torch

import ckptfmt
from benchmarks import gpu_saves
from benchmarks.gpu_saves import SAVE_GOALS, measure_saves
from benchmarks.rounds import Progress, Workplace
from ckptfmt import limits
from ckptfmt.adapters import torch_side
from ckptfmt.adapters.torch.devices import Devices
from tests.adapters.test_device import FakeCuda

HOST = torch.device("cpu")
MIB = limits.BLOCK_NBYTES


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Let tensors be small; nothing is timed here, and what others write needn't be waited for."""
    monkeypatch.setattr(os, "sync", lambda: None)
    monkeypatch.setattr(gpu_saves, "_TENSOR_NBYTES", 2 * MIB)


def measure(directory, nbytes, *, rounds=3, mode="smallest"):
    return measure_saves(
        HOST, nbytes, rounds=rounds, place=Workplace(directory), progress=Progress(), mode=mode
    )


def test_deltas_and_full_saves_are_of_the_same_rounds_in_turns(tmp_path):
    saves = measure(tmp_path, 4 * MIB + 5000, rounds=4)

    assert [row["order"] for row in saves.rounds] == [
        ["full", "delta"],
        ["delta", "full"],
        ["delta", "full"],
        ["full", "delta"],
    ]
    assert [row["full"]["profile"] for row in saves.rounds] == ["full"] * 4
    assert [row["delta"]["profile"] for row in saves.rounds] == ["delta"] * 4
    assert {row["changed_blocks"] for row in saves.rounds} == {1}
    assert all(row["delta"]["stored_nbytes"] < MIB for row in saves.rounds)
    assert {row["full"]["stored_nbytes"] for row in saves.rounds} == {
        saves.workload["saved_nbytes"]
    }
    assert saves.workload == {"saved_nbytes": 4 * MIB + 5000, "saved_tensors": 3, "changed_of": 5}
    assert saves.figures.keys() == {"save_full_s", "save_delta_s", "save_delta_stored_nbytes"}
    assert {figure.count for figure in (*saves.figures.values(), *saves.ratios.values())} == {4}
    assert saves.ratios.keys() == SAVE_GOALS.keys()
    assert saves.ratios["delta_save_1pct_vs_full"].median > 0
    assert saves.notes["deltas"] == 4
    assert {
        run["delta"]["mode"] for name, run in saves.settings.items() if name == "delta_save"
    } == {"smallest"}


def test_nothing_is_left(tmp_path):
    measure(tmp_path, 2 * MIB, rounds=1)

    assert not list(tmp_path.iterdir())


def test_where_no_save_was_a_delta_there_is_no_ratio(tmp_path):
    """So little that `auto` looks for no gain."""
    saves = measure(tmp_path, 2 * MIB, rounds=1, mode="auto")

    assert not saves.ratios
    assert saves.figures.keys() == {"save_full_s"}
    assert saves.notes["deltas"] == 0
    assert saves.notes["reasons"] == ["a full save of so little takes no time"]


def test_of_checkpoints_only_those_that_are_read_from_are_kept(tmp_path, monkeypatch):
    kept = []

    def count(run):
        kept.append(
            [len(list(directory.glob("step-*"))) for directory in sorted(tmp_path.iterdir())]
        )
        return check(run)

    check = gpu_saves._Run.check
    monkeypatch.setattr(gpu_saves._Run, "check", count)
    measure(tmp_path, 2 * MIB, rounds=2)

    assert kept[0] == [5, 1]  # names sort as delta, full


def test_every_hundredth_block_changes_in_one_element_and_each_in_its_turn():
    held = gpu_saves._Held(HOST, 250 * MIB // 2)
    before = torch.cat([*held.tensors.values()])
    heads = torch.cat([tensor[:: MIB // 4] for tensor in held.tensors.values()])
    seen = torch.zeros(125, dtype=torch.int64)
    for number in range(200):
        count = held.change(number)
        changed = torch.cat([tensor[:: MIB // 4] for tensor in held.tensors.values()])
        assert (changed != heads).sum() == count == (2 if number % 100 < 25 else 1)
        seen += changed != heads
        heads = changed

    assert held.changed_of == 100
    assert (seen == 2).all()
    assert (torch.cat([*held.tensors.values()]) != before).sum() == 125


def test_on_a_device_only_changed_blocks_cross_the_bus(tmp_path, monkeypatch):
    fakes = []

    def make_devices(report):
        fakes.append(FakeCuda())
        return Devices(report, cuda=fakes[-1], device_type="cpu")

    monkeypatch.setattr(torch_side(), "Devices", make_devices)
    measure(tmp_path, 4 * MIB, rounds=2)

    sent = [sum(nbytes for _, nbytes in fake.sent if nbytes >= MIB) // MIB for fake in fakes]
    # Of deltas, the slot filled once; then what changed since the last save.
    assert sent == [5 * 4, 4 + 4 * 1]


def test_what_loads_back_as_something_else_ends_the_benchmark(tmp_path, monkeypatch):
    load = ckptfmt.load

    def err(path, state):
        report = load(path, state)
        next(iter(state.weights.values()))[-1] += 1
        return report

    monkeypatch.setattr(ckptfmt, "load", err)

    with pytest.raises(RuntimeError, match="tensor-00000 isn't what was saved"):
        measure(tmp_path, 2 * MIB, rounds=1)
    assert not list(tmp_path.iterdir())
