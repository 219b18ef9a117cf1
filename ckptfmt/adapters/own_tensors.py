"""Tensors of a framework that speaks for itself, through `TensorSource` and `TensorSink`."""

from __future__ import annotations

import dataclasses
from typing import TypeGuard

from ckptfmt.adapters.load_plan import LoadPlan
from ckptfmt.box import Box
from ckptfmt.dtypes import DTYPES
from ckptfmt.errors import Code, err
from ckptfmt.write.snapshot import TensorSink, TensorSource


def is_piece(value: object) -> TypeGuard[TensorSource | TensorSink]:
    """Tell whether a value is a source or a sink; its class says so, so that no attribute of a value is asked for."""
    kind = type(value)
    return callable(getattr(kind, "copy_into", None)) or callable(getattr(kind, "copy_from", None))


def check_source(value: object, *, field: str, where: str) -> TensorSource:
    """Return a source that can be saved in `field`.

    Raises: StateError(STATE_UNSUPPORTED, STATE_NAME); LayoutError(BOX_BOUNDS).
    """
    if not isinstance(value, TensorSource):
        kind = type(value)
        raise err(
            Code.STATE_UNSUPPORTED,
            f"{kind.__module__}.{kind.__qualname__} isn't a ckptfmt.TensorSource: it lacks {_missing(value)}",
            where=where,
        )
    if value.field != field:
        raise err(Code.STATE_NAME, f"a source of the field {value.field}, given as {field}", where=where)
    if value.dtype not in DTYPES:
        raise err(Code.STATE_UNSUPPORTED, f"a source of the unknown dtype {value.dtype!r}", where=where)
    whole = Box.whole(tuple(value.global_shape))
    for box in value.boxes:
        if len(box.begin) != len(whole.begin) or not whole.contains(box):
            raise err(
                Code.BOX_BOUNDS, f"{box} leaves {whole.shape}", where=where, remedy="Mend the boxes of the source."
            )
    return value


def plan_sink(plan: LoadPlan, value: object, *, field: str, where: str) -> None:
    """Plan to fill a sink. Problems: TENSOR_MISSING, DTYPE_MISMATCH, SHAPE_MISMATCH, STATE_UNSUPPORTED."""
    if not isinstance(value, TensorSink) or value.field != field:
        kind = type(value)
        detail = f"{kind.__module__}.{kind.__qualname__} isn't a ckptfmt.TensorSink of the field {field}"
        plan.problem(Code.STATE_UNSUPPORTED, where, detail)
        return
    chosen = plan.choose(field, [value.name])
    if not chosen:
        return
    saved = plan.tensor(field, chosen, value.scope)
    if saved is None:
        plan.problem(Code.TENSOR_MISSING, where, "not saved")
    elif tuple(value.global_shape) != saved.global_shape:
        detail = f"saved with shape {saved.global_shape}, here {tuple(value.global_shape)}"
        plan.problem(Code.SHAPE_MISMATCH, where, detail)
    elif value.dtype != saved.dtype:
        # Nothing converts on a sink's behalf, whatever is allowed: it takes bytes.
        raise err(
            Code.DTYPE_MISMATCH,
            f"saved as {saved.dtype}, wanted as {value.dtype}",
            where=where,
            remedy="Give the sink the saved dtype, and convert in its copy_from.",
        )
    else:
        plan.sinks.append(_Sink(value, saved.name, saved.scope))


@dataclasses.dataclass(frozen=True, slots=True)
class _Sink:
    """A sink that is filled from a tensor of another name or scope."""

    sink: TensorSink
    name: str
    scope: str

    @property
    def field(self) -> str:
        return self.sink.field

    @property
    def dtype(self) -> str:
        return self.sink.dtype

    @property
    def global_shape(self) -> tuple[int, ...]:
        return tuple(self.sink.global_shape)

    @property
    def boxes(self) -> tuple[Box, ...]:
        return tuple(self.sink.boxes)

    def copy_from(self, box: Box, content: memoryview) -> None:
        self.sink.copy_from(box, content)


def _missing(value: object) -> str:
    attributes = (
        "name",
        "dtype",
        "global_shape",
        "scope",
        "boxes",
        "replica",
        "storage",
        "aliases",
        "copy_into",
        "field",
    )
    return ", ".join(name for name in sorted(attributes) if not hasattr(value, name))
