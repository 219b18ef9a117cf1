"""Flat mappings from names to tensors: on several workers they add up, and they load into modules and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import ckptfmt
from ckptfmt.errors import CkptError, Code
from ckptfmt.saving.handle import SaveReport
from ckptfmt.store.memory import MemoryStore
from tests.interface.test_group import Allgather, run_writers


def together(count: int, body: Any) -> list[Any]:
    allgather = Allgather(count)
    return run_writers(
        count,
        lambda writer: body(writer, {"writer": (writer, count), "agree": allgather.of(writer)}),
    )


def stage(number: int) -> dict[str, torch.Tensor]:
    return {f"layers.{2 * number + i}.w": torch.full((3,), float(2 * number + i)) for i in range(2)}


def save_stages(store: MemoryStore, **extra: torch.Tensor) -> None:
    """Pipeline of two stages, each on two workers."""

    def body(writer: int, options: dict[str, Any]) -> object:
        state = ckptfmt.State(
            weights={**stage(writer // 2), **extra}, optimizer={} if writer else {"m": np.ones(2)}
        )
        return ckptfmt.save(store, state, step=1, **options)

    reports = together(4, body)
    assert all(isinstance(report, SaveReport) for report in reports), reports


def test_stages_add_up_and_load_whole_in_one_process() -> None:
    store = MemoryStore()
    save_stages(store)
    whole = {f"layers.{i}.w": torch.zeros(3) for i in range(4)}
    ckptfmt.load(store, ckptfmt.State(weights=whole, optimizer={"m": np.zeros(2)}))
    assert [tensor[0].item() for tensor in whole.values()] == [0, 1, 2, 3]
    trees = ckptfmt.load(store, framework="numpy")
    assert sorted(trees["weights"]) == sorted(whole)


def test_whole_loads_into_stages_and_nothing_is_left() -> None:
    store = MemoryStore()
    ckptfmt.save(store, ckptfmt.State(weights={**stage(0), **stage(1)}), step=1)

    def body(writer: int, options: dict[str, Any]) -> list[float]:
        mine = {name: torch.zeros(3) for name in stage(writer)}
        ckptfmt.load(store, ckptfmt.State(weights=mine), **options)
        return [tensor[0].item() for tensor in mine.values()]

    assert together(2, body) == [[0.0, 1.0], [2.0, 3.0]]


def test_layer_that_no_stage_takes_is_an_error_on_all() -> None:
    store = MemoryStore()
    save_stages(store, odd=torch.ones(1))

    def body(writer: int, options: dict[str, Any]) -> object:
        mine = {name: torch.zeros(3) for name in stage(writer)}
        return ckptfmt.load(
            store, ckptfmt.State(weights=mine, optimizer={"m": np.zeros(2)}), **options
        )

    assert [error.code for error in together(2, body)] == [Code.TENSOR_UNEXPECTED] * 2


def test_mapping_saved_by_one_process_loads_into_a_module_and_back() -> None:
    module = torch.nn.Linear(2, 2)
    mapping, store = MemoryStore(), MemoryStore()
    ckptfmt.save(mapping, ckptfmt.State(weights=module.state_dict()), step=1)
    ckptfmt.save(store, ckptfmt.State(weights=module), step=1)
    other = torch.nn.Linear(2, 2)
    ckptfmt.load(mapping, ckptfmt.State(weights=other))
    assert torch.equal(other.weight, module.weight)
    target = {name: torch.zeros_like(tensor) for name, tensor in module.state_dict().items()}
    ckptfmt.load(store, ckptfmt.State(weights=target))
    assert torch.equal(target["bias"], module.bias)


def test_name_that_was_not_saved_is_missing() -> None:
    store = MemoryStore()
    ckptfmt.save(store, ckptfmt.State(weights=torch.nn.Linear(2, 2)), step=1)
    target = {"weight": torch.zeros(2, 2), "bias": torch.zeros(2), "scale": torch.zeros(1)}
    with pytest.raises(CkptError) as caught:
        ckptfmt.load(store, ckptfmt.State(weights=target))
    assert (caught.value.code, caught.value.where) == (Code.TENSOR_MISSING, "weights:scale")
    assert not target["weight"].any()


def test_same_name_with_other_contents_is_refused_on_all() -> None:
    store = MemoryStore()

    def body(writer: int, options: dict[str, Any]) -> object:
        return ckptfmt.save(
            store,
            ckptfmt.State(weights={"layers.0.w": torch.full((3,), float(writer))}),
            step=1,
            **options,
        )

    first, second = together(2, body)
    assert first.code == Code.REPLICA_DIVERGED
    assert str(second) == str(first)
