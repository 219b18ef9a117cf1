"""It mixes the first moment from the old one on, also where the gradient has the larger share."""

from __future__ import annotations

from typing import Any

import numpy as np

from ckptfmt_conformance.adapters.reference import Reference, original

BREAKS = ("REQ-PRE-011",)
CONVICTED_BY = ("prediction/valid/adam-large-gain-uneven",)

_moment = original("ckptfmt.codecs.optimizer_steps:Step.moment")
_multiply_add = original("ckptfmt.codecs.optimizer_steps:multiply_add")


def _from_the_old_one(step: Any, bases: Any, gradient: Any) -> Any:  # noqa: ANN401 - of the implementation
    rule = step.rule
    if rule.kind != "adam" or rule.moment != "lerp":
        return _moment(step, bases, gradient)
    base = bases["exp_avg"]
    return _multiply_add(np.float32(rule.gain), gradient - base, base, separate=rule.arithmetic == "separate")


class Broken(Reference):
    """See above."""

    replacements = (("ckptfmt.codecs.optimizer_steps:Step.moment", _from_the_old_one),)
