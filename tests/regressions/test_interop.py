"""Cases that once went wrong between live objects and a checkpoint, each named after its cause."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

import ckptfmt
from ckptfmt.errors import CkptError, Code
from ckptfmt.loading.load_report import LoadReport
from ckptfmt.store.memory import MemoryStore


def saved(**fields: Any) -> MemoryStore:
    store = MemoryStore()
    ckptfmt.save(store, ckptfmt.State(**fields), step=1)
    return store


def load(store: MemoryStore, **fields: Any) -> LoadReport:
    report = ckptfmt.load(store, ckptfmt.State(**fields))
    assert isinstance(report, LoadReport)
    return report


def code_of(action: Any) -> Code:
    with pytest.raises(CkptError) as caught:
        action()
    return caught.value.code


def test_one_element_with_a_stride_has_no_contiguous_form() -> None:
    column = torch.arange(6.0).reshape(2, 3)[:1, 1]
    assert column.stride() == (3,)
    target = torch.zeros(1)
    load(saved(weights={"b": column}), weights={"b": target})
    assert target.tolist() == [1.0]


def test_transposed_and_conjugated_views_keep_their_values() -> None:
    view = torch.arange(6.0).reshape(2, 3).T
    conjugate = torch.tensor([1 + 2j, 3 - 4j]).conj()
    target = {"t": torch.zeros(3, 2), "c": torch.zeros(2, dtype=torch.complex64)}
    load(saved(weights={"t": view, "c": conjugate}), weights=target)
    assert torch.equal(target["t"], view)
    assert torch.equal(target["c"], conjugate.resolve_conj())


def test_default_device_does_not_decide_where_a_load_puts_its_buffers() -> None:
    store = saved(weights={"w": torch.ones(3)})
    target = torch.zeros(3)
    with torch.device("meta"):
        load(store, weights={"w": target})
        trees = ckptfmt.load(store, framework="torch")
    assert target.tolist() == [1.0] * 3
    assert trees["weights"]["w"].device.type == "cpu"


def test_adam_is_not_turned_into_adamw() -> None:
    def make(kind: Any) -> tuple[Any, Any]:
        model = torch.nn.Linear(2, 2)
        return model, kind(model.parameters(), weight_decay=0.1)

    model, optimizer = make(torch.optim.Adam)
    store = saved(weights=model, optimizer=optimizer)
    other, decoupled = make(torch.optim.AdamW)
    assert code_of(lambda: load(store, weights=other, optimizer=decoupled)) == Code.GROUP_MISMATCH
    assert decoupled.param_groups[0]["decoupled_weight_decay"] is True


def test_counter_of_numpy_scalars_comes_back_as_such() -> None:
    counts: Counter[str] = Counter()
    counts["a"] = np.float32(2)  # type: ignore[assignment]
    trees = ckptfmt.load(saved(extra={"c": counts}), framework="numpy")
    found: Any = trees["optimizer"]["extra/c"]
    assert {type(found), *map(type, found.values())} == {Counter, np.float32}


class Cache(torch.nn.Module):
    def __init__(self, length: int | None) -> None:
        super().__init__()
        self.register_buffer(
            "cache", None if length is None else torch.ones(length), persistent=False
        )


@pytest.mark.parametrize(("before", "now"), [(3, None), (None, 3), (3, 5)])
def test_non_persistent_buffer_that_is_made_lazily_is_reported_and_no_error(
    before: Any, now: Any
) -> None:
    module = Cache(now)
    report = load(saved(weights=Cache(before)), weights=module)
    assert any("cache" in line for line in report.downgrades)
    assert report.claim != "T1"
    assert now is None or module.cache.tolist() == [1.0] * now  # type: ignore[operator]


def test_lazy_module_is_refused_by_name() -> None:
    assert code_of(lambda: saved(weights=torch.nn.LazyLinear(3))) == Code.STATE_UNSUPPORTED


def test_module_with_a_state_dict_of_its_own_signature_is_refused_by_name() -> None:
    class Own(torch.nn.Linear):
        def state_dict(self) -> Any:  # type: ignore[override]
            return {}

    assert code_of(lambda: saved(weights=Own(2, 2))) == Code.STATE_UNSUPPORTED


@pytest.mark.parametrize("inner", [None, torch.nn.Linear(1, 1)])
def test_container_that_contains_itself_is_refused_by_name(inner: Any) -> None:
    loop: list[Any] = [inner]
    loop.append(loop)
    assert code_of(lambda: saved(extra={"loop": loop})) == Code.DOC_DEPTH


def test_one_word_may_be_allowed_without_a_tuple() -> None:
    store = saved(weights={"a": np.ones(1)})
    report = ckptfmt.load(
        store, ckptfmt.State(weights={"a": np.zeros(1), "b": np.zeros(1)}), allow="missing"
    )
    assert isinstance(report, LoadReport)
    assert report.downgrades


def test_integers_of_numpy_are_steps() -> None:
    store = MemoryStore()
    assert ckptfmt.save(store, ckptfmt.State(data=1), step=np.int64(3)).step == 3  # type: ignore[arg-type]
    ckptfmt.Checkpointer(MemoryStore(), ckptfmt.State(data=1), every=np.int64(5))  # type: ignore[arg-type]
