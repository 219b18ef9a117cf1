"""It predicts a first moment from a gradient of 0 to which the weight decay is then added."""

from __future__ import annotations

from typing import Any

from ckptfmt_conformance.adapters.reference import Reference, original

BREAKS = ("REQ-PRE-017",)
CONVICTED_BY = ("prediction/valid/adam-decayed-l2",)

np: Any = original("ckptfmt.codecs.optimizer_steps:np")
_predict = original("ckptfmt.codecs.optimizer_steps:Step.predict")


def _predict_decayed(step: Any, role: str, bases: Any, news: Any) -> Any:  # noqa: ANN401 - of the implementation
    if role != "exp_avg" or not step.rule.l2:
        return _predict(step, role, bases, news)
    return step.moment(bases, np.float32(step.rule.l2) * bases["weight"])


class Broken(Reference):
    """See above."""

    replacements = (("ckptfmt.codecs.optimizer_steps:Step.predict", _predict_decayed),)
