"""It predicts later members from the gradient that is stored, also where that doesn't lead to the first moment."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from ckptfmt_conformance.adapters.reference import Reference, original

BREAKS = ("REQ-PRE-009",)
CONVICTED_BY = ("prediction/valid/adam-corrected",)

_decode_gradient = original("ckptfmt.codecs.prediction:_decode_gradient")
_decode = original("ckptfmt.codecs.encodings:decode")
_low_gradient = original("ckptfmt.codecs.optimizer_steps:Step.low_gradient")

#: The gradient behind each first moment that was decoded last.
_gradients: dict[bytes, Any] = {}


def _decode_and_keep(rule: Any, stored: memoryview, out: memoryview, bases: Any, where: str) -> None:  # noqa: ANN401 - of the implementation
    _decode_gradient(rule, stored, out, bases, where)
    how, nbytes = struct.unpack_from("<BI", stored)
    gradient = memoryview(bytearray(out.nbytes // 2))
    _decode(("raw", "planes")[how], stored[5 : 5 + nbytes], gradient, dtype=rule.gradient, where=where)
    _gradients.clear()
    _gradients[bytes(out)] = np.frombuffer(gradient, np.uint16)


def _kept(step: Any, bases: Any, news: Any) -> Any:  # noqa: ANN401 - of the implementation
    first = next(iter(news.values()))
    return _gradients[bytes(first)] if bytes(first) in _gradients else _low_gradient(step, bases, news)


class Broken(Reference):
    """See above."""

    replacements = (
        ("ckptfmt.codecs.prediction:_decode_gradient", _decode_and_keep),
        ("ckptfmt.codecs.optimizer_steps:Step.low_gradient", _kept),
    )
