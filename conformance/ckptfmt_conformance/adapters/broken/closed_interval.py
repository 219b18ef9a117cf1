"""It mixes the first moment from the old one on also where the gain is exactly 0.5."""

from __future__ import annotations

from typing import Any

from ckptfmt_conformance.adapters.reference import Reference, original

BREAKS = ("REQ-PRE-011",)
CONVICTED_BY = (
    "prediction/valid/adam-gain-half",
    "prediction/valid/adam-gain-nearly-half",
)

_scalar = original("ckptfmt.codecs.optimizer_steps:Step._scalar")
_moment = original("ckptfmt.codecs.optimizer_steps:Step.moment")
_multiply_add = original("ckptfmt.codecs.optimizer_steps:Step._multiply_add")


def _closed(step: Any, bases: Any, gradient: Any) -> Any:  # noqa: ANN401 - of the implementation
    gain = _scalar(step, step.rule.gain)
    if step.rule.kind != "adam" or step.rule.moment != "lerp" or abs(float(gain)) != 0.5:
        return _moment(step, bases, gradient)
    return _multiply_add(step, gain, gradient - bases["exp_avg"], bases["exp_avg"])


class Broken(Reference):
    """See above."""

    replacements = (("ckptfmt.codecs.optimizer_steps:Step.moment", _closed),)
