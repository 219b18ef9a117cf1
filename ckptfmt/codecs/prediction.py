"""Prediction: an optimizer's new state from its old one and the gradient, by the optimizer's own arithmetic.

Here: which tensors belong together by their names, and their blocks encoded against a prediction, and back.

Spec: page 56.
"""

from __future__ import annotations

import dataclasses
import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from ckptfmt.codecs import encodings
from ckptfmt.codecs.optimizer_steps import Step, bits_of, check_float_environment, without_nan
from ckptfmt.codecs.rule import COPY, FIRST_MOMENT, LOW, Rule, number_of, role_dtype, roles
from ckptfmt.documents.tables import TensorKey
from ckptfmt.documents.tree import TensorRef
from ckptfmt.dtypes import DTYPES
from ckptfmt.errors import Code, err

#: Dtype and global shape of each tensor.
Tensors = Mapping[TensorKey, tuple[str, tuple[int, ...]]]
#: Plain value of each leaf, by field, name and scope.
Leaves = Mapping[TensorKey, object]

#: Moments that a kind needs, the option that tells it from others, and the moment that there may be.
_KINDS: Final = {
    "adam": (("exp_avg", "exp_avg_sq"), "amsgrad", "max_exp_avg_sq"),
    "sgd": (("momentum_buffer",), "momentum", None),
}
_FIELDS: Final = ("weights", "optimizer", "data")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Members:
    """Tensors that may be predicted from each other.

    Attributes:
        kind: of the rule to look for.
        tensors: by role; a rule of this kind has these roles if it holds.
        options: of the parameter's group.
        step: number of steps, or the tensor that has it; None where the kind has none.
    """

    kind: str
    tensors: Mapping[str, TensorKey]
    options: Mapping[str, object] = dataclasses.field(default_factory=dict)
    step: TensorKey | float | None = None


def find_members(tensors: Tensors, leaves: Leaves) -> tuple[Members, ...]:
    """Return candidates for groups, each tensor in one at most: of optimizers first, then weights and their copies.

    Args:
        tensors: dtype and global shape of every tensor.
        leaves: the plain values of fields with optimizers, parsed.
    """
    copies = _Copies(tensors)
    used: set[TensorKey] = set()
    found = []
    for members in _iter_optimized(tensors, leaves, copies):
        keys = set(members.tensors.values())
        if len(keys) == len(members.tensors) and not keys & used:
            used |= keys
            found.append(members)
    for key, (dtype, _) in tensors.items():
        copy = copies.of(key)
        if dtype == "float32" and copy is not None and not {key, copy} & used:
            used |= {key, copy}
            found.append(Members(kind="cast", tensors={"master": key, "weight": copy}))
    return tuple(found)


class _Copies:
    """Tensors of 16 bits, by what comes behind the first step of their names."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors
        self._by_tail: dict[tuple[str, str, tuple[int, ...]], list[TensorKey]] = defaultdict(list)
        for key, (dtype, shape) in tensors.items():
            if dtype in LOW:
                for tail in _tails(key):
                    self._by_tail[tail, key[2], shape].append(key)

    def of(self, key: TensorKey) -> TensorKey | None:
        """Return the only tensor that may be the rounded copy of one in binary32."""
        _, shape = self._tensors[key]
        found = {copy for tail in _tails(key) for copy in self._by_tail.get((tail, key[2], shape), ())}
        return found.pop() if len(found) == 1 else None


def _tails(key: TensorKey) -> set[str]:
    """Return a name, and the same without the key of its module: ``master/fc.weight`` goes with ``fc.weight``."""
    _, name, _ = key
    return {name, name.partition("/")[2] or name}


def _iter_optimized(tensors: Tensors, leaves: Leaves, copies: _Copies) -> Iterator[Members]:
    for (field, name, scope), value in leaves.items():
        if not (isinstance(value, dict) and isinstance(value.get("params"), list)):
            continue
        options = value.get("options")
        if isinstance(options, dict):
            for parameter, state in _iter_states(leaves, field, name, scope, value["params"]):
                members = _members_of(tensors, parameter, state, options, field=field, scope=scope)
                if members is not None:
                    yield _with_copy(members, copies)


def _iter_states(
    leaves: Leaves, field: str, name: str, scope: str, parameters: Iterable[object]
) -> Iterator[tuple[str, Mapping[object, object]]]:
    """Yield the parameters of a group's leaf, and the state of each: their names begin as the group's does."""
    starts = [at for at in range(len(name)) if name.startswith("group/", at) and (at == 0 or name[at - 1] == "/")]
    for parameter in parameters:
        for prefix in (name[:at] for at in starts):
            state = leaves.get((field, f"{prefix}state/{parameter}", scope))
            if isinstance(parameter, str) and isinstance(state, dict):
                yield parameter, state
                break


def _members_of(
    tensors: Tensors,
    parameter: str,
    state: Mapping[object, object],
    options: Mapping[str, object],
    *,
    field: str,
    scope: str,
) -> Members | None:
    held = {key: (field, value.name, scope) for key, value in state.items() if isinstance(value, TensorRef)}
    places = ((at, parameter, where) for at in _FIELDS for where in dict.fromkeys((scope, "global")))
    weight = next((place for place in places if place in tensors), None)
    for kind, (needed, option, more) in _KINDS.items():
        if weight is None or option not in options or not set(needed) <= held.keys():
            continue
        found = {role: held[role] for role in needed}
        if more is not None and options[option] is True and more in held:
            found[more] = held[more]
        found["weight"] = weight
        shape = tensors[weight][1]
        master = _master(tensors, held, shape) if tensors[weight][0] in LOW else None
        if master is not None:
            found |= {"weight": master, COPY: weight}
        if any(tensors.get(key) != ("float32", shape) for role, key in found.items() if role != COPY):
            continue
        step = held.get("step", number_of(state.get("step")))
        return Members(kind=kind, tensors=found, options=options, step=step)
    return None


def _master(tensors: Tensors, held: Mapping[object, TensorKey], shape: tuple[int, ...]) -> TensorKey | None:
    """Return what an optimizer's state has of a weight in binary32, if its name says so."""
    return next(
        (key for name, key in held.items() if "master" in str(name) and tensors.get(key) == ("float32", shape)), None
    )


def _with_copy(members: Members, copies: _Copies) -> Members:
    copy = None if COPY in members.tensors else copies.of(members.tensors["weight"])
    if copy is None:
        return members
    return dataclasses.replace(members, tensors={**members.tensors, COPY: copy})


#: Encodings that only the first member of a group may have, beside those of all blocks. Spec: REQ-PRE-013.
GROUP_ENCODINGS: Final = ("gradient",)

#: How the gradient's own bytes may be stored.
_GRADIENT_ENCODINGS: Final = ("raw", "planes")
#: Encoding of the gradient, and how many bytes it takes; behind them, the moments that it doesn't give.
_HEAD: Final = struct.Struct("<BI")
#: Elements at a time: what a step computes on the way stays in the processor's cache.
_PIECE: Final = 1 << 15
#: Largest share of first moments that their gradient may miss before other encodings are tried.
_ESCAPES: Final = 0.02


class Encode(Protocol):
    """What encodes a block against a base; see `ckptfmt.codecs.encodings.choose`."""

    def __call__(self, content: memoryview, /, *, dtype: str, base: memoryview) -> tuple[str, bytes]:
        """Return an encoding, and what is stored."""


def needed_bases(rule: Rule, role: str) -> frozenset[str]:
    """Return the roles whose bases the block of a role is decoded from, whatever encoding it has.

    >>> sorted(needed_bases(Rule(kind="adam"), "exp_avg_sq")), sorted(needed_bases(Rule(kind="adam"), "weight"))
    (['exp_avg', 'exp_avg_sq'], ['weight'])
    """
    if rule.kind == "cast" or role == COPY:
        return frozenset()
    first = FIRST_MOMENT[rule.kind]
    gradient = frozenset({first, "weight"} if rule.l2 else {first})
    if role in (first, "exp_avg_sq") or rule.nesterov:
        return gradient | {role}
    return frozenset({role})


Views = Mapping[str, memoryview]
Contents = dict[str, NDArray[Any]]


def encode_member(
    rule: Rule,
    role: str,
    new: memoryview,
    *,
    bases: Views,
    news: Views,
    dtype: str,
    predicted: memoryview | None = None,
    encode: Encode = encodings.choose,
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
        predicted: what `predict_member` returned, where that is at hand.
        encode: what to encode the block with against its prediction.

    Raises: StateError(ARGUMENT, FLOAT_ENVIRONMENT).
    Spec: REQ-PRE-003, REQ-PRE-013.
    """
    if dtype != role_dtype(rule, role):
        raise err(Code.ARGUMENT, f"the rule's {role} is {role_dtype(rule, role)}, not {dtype}")
    if role == "master" or not new.nbytes:
        return "raw", b""
    gradient, missed = b"", 0.0
    if role == FIRST_MOMENT.get(rule.kind) and rule.gradient in LOW:
        gradient, missed = _encode_gradient(rule, new, bases)
        if missed <= _ESCAPES and len(gradient) < new.nbytes:
            return "gradient", gradient
    base = predict_member(rule, role, bases=bases, news=news) if predicted is None else predicted
    encoding, stored = encode(new, dtype=dtype, base=base)
    if gradient and len(gradient) < (new.nbytes if encoding == "raw" else len(stored)):
        return "gradient", gradient
    return encoding, stored


def decode_member(
    rule: Rule,
    role: str,
    encoding: str,
    stored: memoryview,
    out: memoryview,
    *,
    bases: Views,
    news: Views,
    where: str,
    predicted: memoryview | None = None,
) -> None:
    """Fill `out` with the content of a member's block, which is predicted.

    Args:
        rule: the group's.
        role: of the member; a master isn't predicted.
        encoding: of the block, one of `GROUP_ENCODINGS` or of all encodings.
        stored: what is stored of it.
        out: where its content goes.
        bases: base blocks of all members, by role.
        news: new blocks of the earlier members, by role.
        where: of the block, for errors.
        predicted: what `predict_member` returned, where that is at hand.

    Raises: FormatError(ENCODED_FORM); StateError(ARGUMENT, FLOAT_ENVIRONMENT).
    Spec: REQ-PRE-003, REQ-PRE-013 to REQ-PRE-015.
    """
    if encoding in GROUP_ENCODINGS:
        if role != FIRST_MOMENT.get(rule.kind) or rule.gradient not in LOW:
            detail = f"{role} is stored as a gradient of {rule.gradient}"
            raise err(Code.ENCODED_FORM, detail, where=where, requirement="REQ-PRE-013")
        _decode_gradient(rule, stored, out, bases, where)
        return
    base = predicted
    if base is None and encoding in encodings.NEEDS_BASE:
        # What didn't change stays where the prediction put it.
        base = out if encoding == "sparse" else memoryview(bytearray(out.nbytes))
        _fill(base, rule, role, bases, news)
    encodings.decode(encoding, stored, out, dtype=role_dtype(rule, role), base=base, where=where)


def predict_member(rule: Rule, role: str, *, bases: Views, news: Views) -> memoryview:
    """Return the prediction for a member's block; a master has none.

    Raises: StateError(ARGUMENT, FLOAT_ENVIRONMENT).
    Spec: REQ-PRE-003, REQ-PRE-009 to REQ-PRE-012, REQ-PRE-017.
    """
    count = _count(_contents(rule, bases), _contents(rule, news))
    predicted = memoryview(bytearray(count * DTYPES[role_dtype(rule, role)].nbytes))
    _fill(predicted, rule, role, bases, news)
    return predicted


def _fill(out: memoryview, rule: Rule, role: str, bases: Views, news: Views) -> None:
    words = np.frombuffer(out, np.uint16 if role_dtype(rule, role) in LOW else np.float32)
    for piece, predicted in _iter_predictions(rule, role, bases, news):
        words[piece] = predicted


def _iter_predictions(rule: Rule, role: str, bases: Views, news: Views) -> Iterator[tuple[slice, NDArray[Any]]]:
    """Yield the prediction for a member piece by piece."""
    check_float_environment()
    step = Step(rule)
    old, made = _contents(rule, bases), _contents(rule, news)
    for piece in _pieces(_count(old, made)):
        yield piece, step.predict(role, _cut(old, piece), _cut(made, piece))


def _encode_gradient(rule: Rule, new: memoryview, bases: Views) -> tuple[bytes, float]:
    """Return a first moment as the gradient that leads to it, and in which share of the elements it doesn't."""
    check_float_environment()
    step, role = Step(rule), FIRST_MOMENT[rule.kind]
    old = _contents(rule, bases)
    content = np.frombuffer(new, np.float32)
    count = _count(old, {role: content})
    gradient, moments = np.empty(count, np.uint16), np.empty(count, np.float32)
    for piece in _pieces(count):
        cut = _cut(old, piece)
        gradient[piece] = low = step.low_gradient(cut, {role: content[piece]})
        moments[piece] = without_nan(step.moment(cut, step.whole_gradient(cut, low)), cut[role])
    planes = encodings.encode("planes", _view(gradient), dtype=rule.gradient)
    index, part = (1, planes) if len(planes) < gradient.nbytes else (0, gradient.tobytes())
    missed = np.count_nonzero(bits_of(moments) != bits_of(content)) / max(count, 1)
    changes = encodings.encode("sparse", new, dtype="float32", base=_view(moments))
    return b"".join((_HEAD.pack(index, len(part)), part, changes)), missed


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
    gradient = np.empty(count, np.uint16)
    part = stored[_HEAD.size : _HEAD.size + nbytes]
    encodings.decode(_GRADIENT_ENCODINGS[index], part, _view(gradient), dtype=rule.gradient, where=where)
    for piece in _pieces(count):
        cut = _cut(old, piece)
        moment[piece] = without_nan(step.moment(cut, step.whole_gradient(cut, gradient[piece])), cut[role])
    rest = stored[_HEAD.size + nbytes :]
    encodings.decode("sparse", rest, out, dtype="float32", base=out, where=where)


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
