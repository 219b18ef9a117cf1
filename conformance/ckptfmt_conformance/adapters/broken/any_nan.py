"""It predicts whatever NaN the machine makes."""

from __future__ import annotations

from typing import Any

from ckptfmt_conformance.adapters.reference import Reference

BREAKS = ("REQ-PRE-005",)
CONVICTED_BY = ("prediction/valid/adam-nan", "prediction/valid/adam-nan-gradient")


def _as_predicted(predicted: Any, base: Any) -> Any:  # noqa: ANN401 - of the implementation
    del base
    return predicted


class Broken(Reference):
    """See above."""

    replacements = (
        ("ckptfmt.codecs.optimizer_steps:without_nan", _as_predicted),
        ("ckptfmt.codecs.prediction:without_nan", _as_predicted),
    )
