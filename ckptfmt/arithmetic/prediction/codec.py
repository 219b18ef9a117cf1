"""Members of a group: their blocks encoded against a prediction, and back."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ckptfmt.arithmetic import encodings
from ckptfmt.arithmetic.encodings.lanes import LANES, steps_between
from ckptfmt.arithmetic.encodings.sparse import dump_changes
from ckptfmt.arithmetic.prediction.floats import check_float_environment, without_nan
from ckptfmt.arithmetic.prediction.gradient import choose_gradient
from ckptfmt.arithmetic.prediction.rule import FIRST_MOMENT, LOW, Rule, role_dtype, roles
from ckptfmt.arithmetic.prediction.steps import Step
from ckptfmt.dtypes import DTYPES
from ckptfmt.errors import Code, err

__all__ = ["GROUP_ENCODINGS", "decode_member", "encode_member", "predict_member"]

#: Encodings that only the first member of a group may have, beside those of all blocks. Spec: REQ-PRE-013.
GROUP_ENCODINGS: Final = ("gradient",)

#: A new member of `float32` that every prediction of a kind has before it.
_SOURCE: Final = {**FIRST_MOMENT, "cast": "master"}
#: How the gradient's own bytes may be stored.
_GRADIENT_ENCODINGS: Final = ("raw", "planes")
#: Encoding of the gradient, and how many bytes it takes; behind them, the moments that it doesn't give.
_HEAD: Final = struct.Struct("<BI")
#: Elements at a time: what a step computes on the way stays in the processor's cache.
_PIECE: Final = 1 << 15
#: Largest share of elements that differ from their prediction for which only the sparse encoding is tried.
_SPARSE: Final = 0.3
#: The same share for a first moment and its gradient.
_ESCAPES: Final = 0.02

Views = Mapping[str, memoryview]
Contents = dict[str, NDArray[Any]]


def encode_member(
    rule: Rule, role: str, new: memoryview, *, bases: Views, news: Views, dtype: str
) -> tuple[str, bytes]:
    """Return the encoding that stores a member's block in few bytes, and these; `("raw", b"")` where nothing pays.

    A master has no prediction, and is left to whoever encodes blocks on their own.

    Args:
        rule: the group's.
        role: of the member.
        new: content of its block.
        bases: base blocks of all members, by role.
        news: new blocks of at least the earlier members, by role.
        dtype: of the member, which the rule knows.

    Raises: StateError(ARGUMENT, FLOAT_ENVIRONMENT).
    Spec: REQ-PRE-003, REQ-PRE-013.
    """
    if dtype != role_dtype(rule, role):
        raise err(Code.ARGUMENT, f"the rule's {role} is {role_dtype(rule, role)}, not {dtype}")
    if role == FIRST_MOMENT.get(rule.kind):
        return _encode_first(rule, new, bases)
    if role == "master" or not new.nbytes:
        return "raw", b""
    changes = _Changes(new, dtype)
    for piece, predicted in _iter_predictions(rule, role, bases, news):
        changes.add(piece, predicted)
        if changes.count > _SPARSE * piece.stop:
            whole = predict_member(rule, role, bases=bases, news=news)
            return encodings.choose(new, dtype=dtype, base=whole)
    stored = changes.dump()
    return ("sparse", stored) if len(stored) < new.nbytes else ("raw", b"")


def decode_member(
    rule: Rule, role: str, encoding: str, stored: memoryview, out: memoryview, *, bases: Views, news: Views, where: str
) -> None:
    """Fill `out` with the content of a member's block.

    Args:
        rule: the group's.
        role: of the member.
        encoding: of the block, one of `GROUP_ENCODINGS` or of all encodings.
        stored: what is stored of it.
        out: where its content goes.
        bases: base blocks of all members, by role.
        news: new blocks of the earlier members, by role.
        where: of the block, for errors.

    Raises: FormatError(ENCODED_FORM); StateError(ARGUMENT, FLOAT_ENVIRONMENT).
    Spec: REQ-PRE-003, REQ-PRE-013 to REQ-PRE-015.
    """
    first = role == FIRST_MOMENT.get(rule.kind)
    if encoding in GROUP_ENCODINGS:
        if not first:
            raise err(Code.ENCODED_FORM, f"{role} is stored as a gradient", where=where, requirement="REQ-PRE-013")
        _decode_gradient(rule, stored, out, bases, where)
        return
    dtype = role_dtype(rule, role)
    base: memoryview | None = None
    if first or role == "master":
        base = bases[role] if encoding in encodings.NEEDS_BASE else None
    elif encoding == "sparse":
        # What didn't change stays where the prediction put it.
        _fill(out, rule, role, bases, news)
        base = out
    elif encoding in encodings.NEEDS_BASE:
        base = predict_member(rule, role, bases=bases, news=news)
    encodings.decode(encoding, stored, out, dtype=dtype, base=base, where=where)


def predict_member(rule: Rule, role: str, *, bases: Views, news: Views) -> memoryview:
    """Return the prediction for a member's block that isn't the first.

    Raises: StateError(ARGUMENT, FLOAT_ENVIRONMENT).
    Spec: REQ-PRE-003, REQ-PRE-009 to REQ-PRE-012.
    """
    dtype = role_dtype(rule, role)
    predicted = memoryview(bytearray(news[_SOURCE[rule.kind]].nbytes // 4 * DTYPES[dtype].nbytes))
    _fill(predicted, rule, role, bases, news)
    return predicted


def _fill(out: memoryview, rule: Rule, role: str, bases: Views, news: Views) -> None:
    words = np.frombuffer(out, np.uint16 if role_dtype(rule, role) in LOW else np.float32)
    for piece, predicted in _iter_predictions(rule, role, bases, news):
        words[piece] = predicted


def _iter_predictions(rule: Rule, role: str, bases: Views, news: Views) -> Iterator[tuple[slice, NDArray[Any]]]:
    """Yield the prediction for a later member piece by piece."""
    check_float_environment()
    step = Step(rule)
    old, made = _contents(rule, bases), _contents(rule, news)
    for piece in _pieces(_count(old, made)):
        yield piece, step.predict(role, _cut(old, piece), _cut(made, piece))


def _encode_first(rule: Rule, new: memoryview, bases: Views) -> tuple[str, bytes]:
    """Encode a first moment as the gradient that leads to it, unless that doesn't pay."""
    check_float_environment()
    step, role = Step(rule), FIRST_MOMENT[rule.kind]
    old = _contents(rule, bases)
    content = np.frombuffer(new, np.float32)
    count = _count(old, {role: content})
    gradient: NDArray[Any] = np.empty(count, np.uint16 if rule.gradient in LOW else np.float32)
    changes = _Changes(new, "float32")
    for piece in _pieces(count):
        cut = _cut(old, piece)
        gradient[piece], moment = choose_gradient(step, cut, {role: content[piece]})
        changes.add(piece, without_nan(moment, cut[role]))
    planes = encodings.encode("planes", _view(gradient), dtype=rule.gradient)
    index, part = (1, planes) if len(planes) < gradient.nbytes else (0, gradient.tobytes())
    stored = b"".join((_HEAD.pack(index, len(part)), part, changes.dump()))
    if changes.count > _ESCAPES * count or len(stored) >= new.nbytes:
        other = encodings.choose(new, dtype="float32", base=bases[role])
        if (new.nbytes if other[0] == "raw" else len(other[1])) <= len(stored):
            return other
    return "gradient", stored


def _decode_gradient(rule: Rule, stored: memoryview, out: memoryview, bases: Views, where: str) -> None:
    check_float_environment()
    step, role = Step(rule), FIRST_MOMENT[rule.kind]
    old = _contents(rule, bases)
    if stored.nbytes < _HEAD.size:
        raise err(Code.ENCODED_FORM, "a gradient without a head", where=where, requirement="REQ-PRE-014")
    index, nbytes = _HEAD.unpack_from(stored)
    if index >= len(_GRADIENT_ENCODINGS) or nbytes > stored.nbytes - _HEAD.size:
        raise err(Code.ENCODED_FORM, "a gradient's head is out of range", where=where, requirement="REQ-PRE-014")
    moment = np.frombuffer(out, np.float32)
    count = _count(old, {role: moment})
    gradient: NDArray[Any] = np.empty(count, np.uint16 if rule.gradient in LOW else np.float32)
    part = stored[_HEAD.size : _HEAD.size + nbytes]
    encodings.decode(_GRADIENT_ENCODINGS[index], part, _view(gradient), dtype=rule.gradient, where=where)
    for piece in _pieces(count):
        cut = _cut(old, piece)
        whole = step.whole_gradient(cut, gradient[piece]) if rule.gradient in LOW else gradient[piece]
        moment[piece] = without_nan(step.moment(cut, whole), cut[role])
    rest = stored[_HEAD.size + nbytes :]
    encodings.decode("sparse", rest, out, dtype="float32", base=out, where=where)


class _Changes:
    """What differs from a prediction, gathered while both are at hand: the encoding `sparse`.

    Args:
        new: content of the block.
        dtype: of its elements.
    """

    def __init__(self, new: memoryview, dtype: str) -> None:
        self._lane = LANES[dtype]
        self._words = np.frombuffer(new, self._lane.words)
        self._places = [np.empty(0, np.int64)]
        self._steps = [np.empty(0, self._lane.words)]
        self.count = 0

    def add(self, piece: slice, predicted: NDArray[Any]) -> None:
        """Compare a piece of the block with its prediction."""
        content, base = self._words[piece], predicted.view(self._lane.words)
        places = np.flatnonzero(content != base)
        if places.size:
            self._steps.append(steps_between(content[places], base[places], self._lane))
            self._places.append(places + piece.start)
            self.count += places.size

    def dump(self) -> bytes:
        """Return the block as the encoding `sparse` has it."""
        return dump_changes(np.concatenate(self._places), self._words.size, np.concatenate(self._steps))


def _contents(rule: Rule, views: Views) -> Contents:
    known = {role: role_dtype(rule, role) for role in roles(rule)}
    return {
        role: np.frombuffer(view, np.uint16 if known[role] in LOW else np.float32)
        for role, view in views.items()
        if role in known
    }


def _count(*groups: Contents) -> int:
    """Return how many elements all blocks have."""
    counts = {content.size for group in groups for content in group.values()}
    if len(counts) != 1:
        raise err(Code.ARGUMENT, f"blocks of a group have {sorted(counts)} elements")
    return counts.pop()


def _pieces(count: int) -> Iterator[slice]:
    for begin in range(0, count, _PIECE):
        yield slice(begin, min(begin + _PIECE, count))


def _cut(contents: Contents, piece: slice) -> Contents:
    return {role: content[piece] for role, content in contents.items()}


def _view(content: NDArray[Any]) -> memoryview:
    return content.data.cast("B")
