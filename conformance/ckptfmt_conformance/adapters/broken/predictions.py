"""Faults in predicted blocks."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from ckptfmt_conformance.adapters.reference import Reference, original

_predict = original("ckptfmt.codecs.optimizer_steps:Step.predict")
_roles = original("ckptfmt.codecs.rule:roles")
_decode_gradient = original("ckptfmt.codecs.prediction:_decode_gradient")
_decode = original("ckptfmt.codecs.encodings:decode")
_low_gradient = original("ckptfmt.codecs.optimizer_steps:Step.low_gradient")
_round_low = original("ckptfmt.codecs.optimizer_steps:round_low")
_multiply_add = original("ckptfmt.codecs.optimizer_steps:multiply_add")
_moment = original("ckptfmt.codecs.optimizer_steps:Step.moment")
_scalar = original("ckptfmt.codecs.optimizer_steps:Step._scalar")
_step_multiply_add = original("ckptfmt.codecs.optimizer_steps:Step._multiply_add")


def _take_base(step: Any, role: str, bases: Any, news: Any) -> Any:
    return bases[role] if role in bases else _predict(step, role, bases, news)


class BaseNotPrediction(Reference):
    """It decodes a predicted block against the base's block, as outside of groups."""

    breaks = ("REQ-PRE-016",)
    convicted_by = ("prediction/valid/adam", "prediction/valid/sgd")
    replacements = (("ckptfmt.codecs.optimizer_steps:Step.predict", _take_base),)


#: The element size of the narrow tensors in these cases; the wide tensor is the master.
_NARROW = 2


def _join_one(
    content_of: Callable[[int], memoryview], elements: range, element_nbytes: int, block_nbytes: int
) -> memoryview:
    block = content_of(elements.start * _NARROW // block_nbytes)
    nbytes = len(elements) * element_nbytes
    return memoryview(block.tobytes().ljust(nbytes, b"\0")[:nbytes])


class BlockByBlock(Reference):
    """It predicts a block from blocks of the same number.

    Blocks of wider dtypes with the same number hold other elements.
    """

    breaks = ("REQ-DEL-011",)
    convicted_by = ("prediction/valid/cast-of-two-blocks",)
    replacements = (("ckptfmt.read.decoding:join_blocks", _join_one),)


def _all_bases(rule: Any, _: str) -> Any:
    return frozenset(_roles(rule))


class AllBases(Reference):
    """It requires all members of a group in the base, including members unused by a prediction."""

    breaks = ("REQ-DEL-025",)
    convicted_by = ("prediction/valid/adam-base-without-copy",)
    replacements = (("ckptfmt.codecs.prediction:needed_bases", _all_bases),)


#: The gradient of each first moment in the last decoding.
_gradients: dict[bytes, Any] = {}


def _decode_and_keep(
    rule: Any, stored: memoryview, out: memoryview, bases: Any, where: str
) -> None:
    _decode_gradient(rule, stored, out, bases, where)
    how, nbytes = struct.unpack_from("<BI", stored)
    gradient = memoryview(bytearray(out.nbytes // 2))
    _decode(
        ("raw", "planes")[how], stored[5 : 5 + nbytes], gradient, dtype=rule.gradient, where=where
    )
    _gradients.clear()
    _gradients[bytes(out)] = np.frombuffer(gradient, np.uint16)


def _kept_gradient(step: Any, bases: Any, news: Any) -> Any:
    first = next(iter(news.values()))
    return (
        _gradients[bytes(first)] if bytes(first) in _gradients else _low_gradient(step, bases, news)
    )


class StoredGradient(Reference):
    """It predicts later members from the stored gradient, even where another gradient is due.

    The stored gradient doesn't always lead to the first moment.
    """

    breaks = ("REQ-PRE-009",)
    convicted_by = ("prediction/valid/adam-corrected",)
    replacements = (
        ("ckptfmt.codecs.prediction:_decode_gradient", _decode_and_keep),
        ("ckptfmt.codecs.optimizer_steps:Step.low_gradient", _kept_gradient),
    )


def _as_predicted(predicted: Any, base: Any) -> Any:
    del base
    return predicted


class AnyNan(Reference):
    """It predicts the NaN that the machine produces, without normalization."""

    breaks = ("REQ-PRE-005",)
    convicted_by = ("prediction/valid/adam-nan", "prediction/valid/adam-nan-gradient")
    replacements = (
        ("ckptfmt.codecs.optimizer_steps:without_nan", _as_predicted),
        ("ckptfmt.codecs.prediction:without_nan", _as_predicted),
    )


def _round_bits(values: Any, precision: str) -> Any:
    low = _round_low(values, precision)
    bits = values.view(np.uint32).astype(np.uint64)
    if precision == "float16":
        cut = (bits >> 16 & 0x8000 | 0x7C00 | bits >> 13 & 0x3FF).astype(np.uint16)
    else:
        cut = (bits + 0x7FFF + (bits >> 16 & 1) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), cut, low)


class RoundedNans(Reference):
    """It rounds a NaN to 16 bits like a number, which gives an infinity or a zero."""

    breaks = ("REQ-PRE-004",)
    convicted_by = ("prediction/valid/cast-bfloat16", "prediction/valid/cast-float16")
    replacements = (("ckptfmt.codecs.optimizer_steps:round_low", _round_bits),)


def _fuse(factor: Any, values: Any, addend: Any, *, separate: bool) -> Any:
    del separate
    return _multiply_add(factor, values, addend, separate=False)


class FusedSums(Reference):
    """It fuses every product with its sum, as a compiler may: one rounding instead of two."""

    breaks = ("REQ-PRE-002",)
    convicted_by = ("prediction/valid/adam-separate",)
    replacements = (("ckptfmt.codecs.optimizer_steps:multiply_add", _fuse),)


def _from_the_old_one(step: Any, bases: Any, gradient: Any) -> Any:
    rule = step.rule
    if rule.kind != "adam" or rule.moment != "lerp":
        return _moment(step, bases, gradient)
    base = bases["exp_avg"]
    return _multiply_add(
        np.float32(rule.gain), gradient - base, base, separate=rule.arithmetic == "separate"
    )


class NearEnd(Reference):
    """It computes the first moment from the old moment, even for a large share of the gradient."""

    breaks = ("REQ-PRE-011",)
    convicted_by = ("prediction/valid/adam-large-gain-uneven",)
    replacements = (("ckptfmt.codecs.optimizer_steps:Step.moment", _from_the_old_one),)


def _moment_closed(step: Any, bases: Any, gradient: Any) -> Any:
    gain = _scalar(step, step.rule.gain)
    if step.rule.kind != "adam" or step.rule.moment != "lerp" or abs(float(gain)) != 0.5:
        return _moment(step, bases, gradient)
    return _step_multiply_add(step, gain, gradient - bases["exp_avg"], bases["exp_avg"])


class ClosedInterval(Reference):
    """It computes the first moment from the old moment for a gain of exactly 0.5 too."""

    breaks = ("REQ-PRE-011",)
    convicted_by = (
        "prediction/valid/adam-gain-half",
        "prediction/valid/adam-gain-nearly-half",
    )
    replacements = (("ckptfmt.codecs.optimizer_steps:Step.moment", _moment_closed),)


def _moment_rounded(step: Any, bases: Any, gradient: Any) -> Any:
    rule = step.rule
    if (
        rule.kind != "adam"
        or rule.moment != "lerp"
        or rule.arithmetic != "double"
        or float(np.float32(rule.gain)) < 0.5
    ):
        return _moment(step, bases, gradient)
    gain = _scalar(step, rule.gain)
    return _step_multiply_add(
        step, gain - gain.dtype.type(1), gradient - bases["exp_avg"], gradient
    )


class RoundedGain(Reference):
    """It compares the gain with 0.5 in binary32, even where scalars stay in binary64."""

    breaks = ("REQ-PRE-011",)
    convicted_by = ("prediction/valid/adam-gain-nearly-half-double",)
    replacements = (("ckptfmt.codecs.optimizer_steps:Step.moment", _moment_rounded),)


def _moment_unrounded(step: Any, bases: Any, gradient: Any) -> Any:
    if step.rule.kind != "adam" or step.rule.moment != "lerp" or abs(step.rule.gain) >= 0.5:
        return _moment(step, bases, gradient)
    return _step_multiply_add(
        step, _scalar(step, step.rule.gain), gradient - bases["exp_avg"], bases["exp_avg"]
    )


class UnroundedGain(Reference):
    """It compares the gain with 0.5 before the gain is rounded to binary32."""

    breaks = ("REQ-PRE-011",)
    convicted_by = ("prediction/valid/adam-gain-nearly-half",)
    replacements = (("ckptfmt.codecs.optimizer_steps:Step.moment", _moment_unrounded),)


def _predict_no_decay(step: Any, role: str, bases: Any, news: Any) -> Any:
    return (
        bases[role] if role in ("exp_avg", "momentum_buffer") else _predict(step, role, bases, news)
    )


class UnmovedMoment(Reference):
    """It predicts an unchanged first moment, without the decay, which needs no gradient."""

    breaks = ("REQ-PRE-017",)
    convicted_by = ("prediction/valid/adam-decayed", "prediction/valid/adam-float32")
    replacements = (("ckptfmt.codecs.optimizer_steps:Step.predict", _predict_no_decay),)


def _predict_decayed(step: Any, role: str, bases: Any, news: Any) -> Any:
    if role != "exp_avg" or not step.rule.l2:
        return _predict(step, role, bases, news)
    return step.moment(bases, np.float32(step.rule.l2) * bases["weight"])


class ZeroBeforeDecay(Reference):
    """It adds the weight decay to a zero gradient when it predicts a first moment."""

    breaks = ("REQ-PRE-017",)
    convicted_by = ("prediction/valid/adam-decayed-l2",)
    replacements = (("ckptfmt.codecs.optimizer_steps:Step.predict", _predict_decayed),)
