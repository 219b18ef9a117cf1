"""It fuses every product with the sum that it goes into, as a compiler may: one rounding where there are two."""

from __future__ import annotations

from typing import Any

from ckptfmt_conformance.adapters.reference import Reference, original

BREAKS = ("REQ-PRE-002",)
CONVICTED_BY = ("prediction/valid/adam-separate",)

_multiply_add = original("ckptfmt.codecs.optimizer_steps:multiply_add")


def _fuse(factor: Any, values: Any, addend: Any, *, separate: bool) -> Any:  # noqa: ANN401 - of the implementation
    del separate
    return _multiply_add(factor, values, addend, separate=False)


class Broken(Reference):
    """See above."""

    replacements = (("ckptfmt.codecs.optimizer_steps:multiply_add", _fuse),)
