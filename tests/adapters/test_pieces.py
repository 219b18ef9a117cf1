"""Tensors of a framework that speaks for itself: sources and sinks in a State."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ckptfmt
from ckptfmt.errors import CkptError, Code
from ckptfmt.store.memory import MemoryStore


class Rows:
    """Some rows of a matrix: a source and a sink."""

    field, scope, storage, aliases, replica = "weights", "global", "persistent", (), False

    def __init__(self, name: str, content: Any, begin: int, row_count: int) -> None:
        self.name, self.content, self.begin = name, content, begin
        self.dtype = content.dtype.name
        self.global_shape = (row_count, *content.shape[1:])
        self.boxes = (ckptfmt.Box((begin, 0), content.shape),)

    def copy_into(self, box: ckptfmt.Box, out: memoryview) -> None:
        out[:] = self.content[box.relative_to(self.boxes[0])].tobytes()

    def copy_from(self, box: ckptfmt.Box, content: memoryview) -> None:
        part = np.frombuffer(content, self.content.dtype).reshape(box.shape)
        self.content[box.relative_to(self.boxes[0])] = part


MATRIX = np.random.default_rng(1).standard_normal((6, 3)).astype(np.float32)


def save(**weights: Any) -> MemoryStore:
    store = MemoryStore()
    ckptfmt.save(store, ckptfmt.State(weights=weights), step=1)
    return store


def refusal(action: Any) -> CkptError:
    with pytest.raises(CkptError) as caught:
        action()
    return caught.value


def test_source_is_saved_beside_arrays_under_its_own_name() -> None:
    store = save(cut=Rows("matrix", MATRIX, 0, 6), scale=np.float64(2))
    with ckptfmt.open(store) as checkpoint:
        assert checkpoint.weights["matrix"][...].tobytes() == MATRIX.tobytes()


def test_sink_is_filled_with_its_rows_and_nothing_else() -> None:
    store = save(cut=Rows("matrix", MATRIX, 0, 6))
    sink = Rows("matrix", np.zeros((2, 3), np.float32), 3, 6)
    ckptfmt.load(store, ckptfmt.State(weights={"cut": sink}))
    assert sink.content.tobytes() == MATRIX[3:5].tobytes()


def test_sink_of_a_tensor_that_was_not_saved_is_named() -> None:
    store = save(cut=Rows("matrix", MATRIX, 0, 6))
    error = refusal(lambda: ckptfmt.load(store, ckptfmt.State(weights={"other": Rows("absent", MATRIX, 0, 6)})))
    assert (error.code, error.where) == (Code.TENSOR_MISSING, "weights:other")


def test_rows_that_nobody_holds_are_a_gap() -> None:
    error = refusal(lambda: save(cut=Rows("matrix", MATRIX[:4], 0, 6)))
    assert error.code == Code.TILING_GAP


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"field": "data"}, Code.STATE_NAME),
        ({"dtype": "decimal"}, Code.STATE_UNSUPPORTED),
        ({"boxes": (ckptfmt.Box((4, 0), (3, 3)),)}, Code.BOX_BOUNDS),
        ({"boxes": (ckptfmt.Box((0,), (6,)),)}, Code.BOX_BOUNDS),
    ],
)
def test_source_that_contradicts_itself_is_refused(change: dict[str, Any], code: Code) -> None:
    source = Rows("matrix", MATRIX, 0, 6)
    vars(source).update(change)
    assert refusal(lambda: save(cut=source)).code == code


def test_half_a_source_is_refused_and_what_it_lacks_is_named() -> None:
    class Half:
        name = "x"

        def copy_into(self, box: object, out: object) -> None: ...

    error = refusal(lambda: save(cut=Half()))
    assert error.code == Code.STATE_UNSUPPORTED
    assert "global_shape" in error.detail


@pytest.mark.parametrize(
    ("sink", "code"),
    [
        (Rows("matrix", np.zeros((6, 3), np.float64), 0, 6), Code.DTYPE_MISMATCH),
        (Rows("matrix", np.zeros((6, 3), np.float32), 0, 7), Code.SHAPE_MISMATCH),
    ],
)
def test_sink_of_another_kind_is_refused_and_stays_as_it_is(sink: Rows, code: Code) -> None:
    store = save(cut=Rows("matrix", MATRIX, 0, 6))
    assert refusal(lambda: ckptfmt.load(store, ckptfmt.State(weights={"cut": sink}))).code == code
    assert not sink.content.any()
