"""It compares the gain with 0.5 in binary32, also where scalars stay in binary64."""

from __future__ import annotations

from typing import Any

from ckptfmt_conformance.adapters.reference import Reference, original

BREAKS = ("REQ-PRE-011",)
CONVICTED_BY = ("prediction/valid/adam-gain-nearly-half-double",)

np: Any = original("ckptfmt.codecs.optimizer_steps:np")
_scalar = original("ckptfmt.codecs.optimizer_steps:Step._scalar")
_moment = original("ckptfmt.codecs.optimizer_steps:Step.moment")
_multiply_add = original("ckptfmt.codecs.optimizer_steps:Step._multiply_add")


def _rounded(step: Any, bases: Any, gradient: Any) -> Any:  # noqa: ANN401 - of the implementation
    rule = step.rule
    if (
        rule.kind != "adam"
        or rule.moment != "lerp"
        or rule.arithmetic != "double"
        or float(np.float32(rule.gain)) < 0.5
    ):
        return _moment(step, bases, gradient)
    gain = _scalar(step, rule.gain)
    return _multiply_add(step, gain - gain.dtype.type(1), gradient - bases["exp_avg"], gradient)


class Broken(Reference):
    """See above."""

    replacements = (("ckptfmt.codecs.optimizer_steps:Step.moment", _rounded),)
