"""It compares the gain with 0.5 before it is rounded to binary32."""

from __future__ import annotations

from typing import Any

from ckptfmt_conformance.adapters.reference import Reference, original

BREAKS = ("REQ-PRE-011",)
CONVICTED_BY = ("prediction/valid/adam-gain-nearly-half",)

_scalar = original("ckptfmt.codecs.optimizer_steps:Step._scalar")
_moment = original("ckptfmt.codecs.optimizer_steps:Step.moment")
_multiply_add = original("ckptfmt.codecs.optimizer_steps:Step._multiply_add")


def _unrounded(step: Any, bases: Any, gradient: Any) -> Any:  # noqa: ANN401 - of the implementation
    if step.rule.kind != "adam" or step.rule.moment != "lerp" or abs(step.rule.gain) >= 0.5:
        return _moment(step, bases, gradient)
    return _multiply_add(step, _scalar(step, step.rule.gain), gradient - bases["exp_avg"], bases["exp_avg"])


class Broken(Reference):
    """See above."""

    replacements = (("ckptfmt.codecs.optimizer_steps:Step.moment", _unrounded),)
