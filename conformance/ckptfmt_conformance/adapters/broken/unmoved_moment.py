"""It predicts that the first moment stays: its decay, which needs no gradient, is left out."""

from __future__ import annotations

from typing import Any

from ckptfmt_conformance.adapters.reference import Reference, original

BREAKS = ("REQ-PRE-017",)
CONVICTED_BY = ("prediction/valid/adam-decayed", "prediction/valid/adam-float32")

_predict = original("ckptfmt.codecs.optimizer_steps:Step.predict")


def _predict_no_decay(step: Any, role: str, bases: Any, news: Any) -> Any:  # noqa: ANN401 - of the implementation
    return bases[role] if role in ("exp_avg", "momentum_buffer") else _predict(step, role, bases, news)


class Broken(Reference):
    """See above."""

    replacements = (("ckptfmt.codecs.optimizer_steps:Step.predict", _predict_no_decay),)
