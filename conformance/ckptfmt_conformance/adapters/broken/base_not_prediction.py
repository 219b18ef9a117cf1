"""It decodes a predicted block against the base's, as it does outside of groups."""

from __future__ import annotations

from typing import Any

from ckptfmt_conformance.adapters.reference import Reference, original

BREAKS = ("REQ-PRE-016",)
CONVICTED_BY = ("prediction/valid/adam", "prediction/valid/sgd")

_predict = original("ckptfmt.codecs.optimizer_steps:Step.predict")


def _take_base(step: Any, role: str, bases: Any, news: Any) -> Any:  # noqa: ANN401 - of the implementation
    return bases[role] if role in bases else _predict(step, role, bases, news)


class Broken(Reference):
    """See above."""

    replacements = (("ckptfmt.codecs.optimizer_steps:Step.predict", _take_base),)
