"""Prediction of an optimizer's new state from its old state and the gradient.

The prediction repeats the optimizer's own arithmetic. This module finds related tensors by their
names, and encodes and decodes their blocks against predictions.

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

#: By kind: the required moments, the option that identifies the kind, and the optional moment.
_KINDS: Final = {
    "adam": (("exp_avg", "exp_avg_sq"), "amsgrad", "max_exp_avg_sq"),
    "sgd": (("momentum_buffer",), "momentum", None),
}
_FIELDS: Final = ("weights", "optimizer", "data")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Members:
    """Tensors that may be predicted from each other.

    Attributes:
        kind: kind of the rule to search.
        tensors: tensors by role; a rule of this kind has these roles if it fits.
        options: options of the parameter's group in the optimizer.
        step: number of steps, or the tensor with the number; None for a kind without steps.
    """

    kind: str
    tensors: Mapping[str, TensorKey]
    options: Mapping[str, object] = dataclasses.field(default_factory=dict)
    step: TensorKey | float | None = None


def find_members(tensors: Tensors, leaves: Leaves) -> tuple[Members, ...]:
    """Return candidates for groups: first of optimizers, then weights with their copies.

    A tensor is in one candidate at most.

    Args:
        tensors: dtype and global shape of every tensor.
        leaves: parsed plain values of fields with optimizers.
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
    """Index of the 16-bit tensors by name, with and without the name's first part."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors
        self._by_tail: dict[tuple[str, str, tuple[int, ...]], list[TensorKey]] = defaultdict(list)
        for key, (dtype, shape) in tensors.items():
            if dtype in LOW:
                for tail in _tails(key):
                    self._by_tail[tail, key[2], shape].append(key)

    def of(self, key: TensorKey) -> TensorKey | None:
        """Return the only tensor that may be a rounded copy of a binary32 tensor, or None."""
        _, shape = self._tensors[key]
        found = {
            copy for tail in _tails(key) for copy in self._by_tail.get((tail, key[2], shape), ())
        }
        return found.pop() if len(found) == 1 else None


def _tails(key: TensorKey) -> set[str]:
    """Return a name, and the name without its module: ``master/fc.bias`` matches ``fc.bias``."""
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
    """Yield the parameters in a group's leaf with their states, which share the leaf's prefix."""
    starts = [
        at
        for at in range(len(name))
        if name.startswith("group/", at) and (at == 0 or name[at - 1] == "/")
    ]
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
    held = {
        key: (field, value.name, scope)
        for key, value in state.items()
        if isinstance(value, TensorRef)
    }
    places = (
        (at, parameter, where) for at in _FIELDS for where in dict.fromkeys((scope, "global"))
    )
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
        if any(
            tensors.get(key) != ("float32", shape) for role, key in found.items() if role != COPY
        ):
            continue
        step = held.get("step", number_of(state.get("step")))
        return Members(kind=kind, tensors=found, options=options, step=step)
    return None


def _master(
    tensors: Tensors, held: Mapping[object, TensorKey], shape: tuple[int, ...]
) -> TensorKey | None:
    """Return an optimizer's binary32 master of a weight, found by its name, or None."""
    return next(
        (
            key
            for name, key in held.items()
            if "master" in str(name) and tensors.get(key) == ("float32", shape)
        ),
        None,
    )


def _with_copy(members: Members, copies: _Copies) -> Members:
    copy = None if COPY in members.tensors else copies.of(members.tensors["weight"])
    if copy is None:
        return members
    return dataclasses.replace(members, tensors={**members.tensors, COPY: copy})


#: Additional encodings of a group's first member. Spec: REQ-PRE-013.
GROUP_ENCODINGS: Final = ("gradient",)

#: Encodings of the gradient's own bytes.
_GRADIENT_ENCODINGS: Final = ("raw", "planes")
#: Encoding of the gradient and its size in bytes; the gradient and the remaining changes follow.
_HEAD: Final = struct.Struct("<BI")
#: Number of elements processed at once: intermediate results stay in the processor's cache.
_PIECE: Final = 1 << 15
#: Largest share of first moments that the gradient may miss without a comparison of encodings.
_ESCAPES: Final = 0.02


class Encode(Protocol):
    """A function that encodes a block against a base, like `ckptfmt.codecs.encodings.choose`."""

    def __call__(
        self, content: memoryview, /, *, dtype: str, base: memoryview
    ) -> tuple[str, bytes]:
        """Return an encoding and the stored bytes."""


def needed_bases(rule: Rule, role: str) -> frozenset[str]:
    """Return the roles with bases that decoding a block of `role` needs, in any encoding.

    >>> (sorted(needed_bases(Rule(kind="adam"), "exp_avg_sq")),
    ...  sorted(needed_bases(Rule(kind="adam"), "weight")))
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
    """Return a short encoding of a member's block, and the bytes; `("raw", b"")` if none pays.

    A master has no prediction; the caller encodes its blocks like those outside of groups.

    Args:
        rule: rule of the group.
        role: role of the member.
        new: content of the member's block.
        bases: base blocks of all members, by role.
        news: new blocks of at least the earlier members, by role.
        dtype: dtype of the member, which must match the rule.
        predicted: result of `predict_member`, if available.
        encode: function that encodes the block against its prediction.

    Raises: StateError(ARGUMENT, FLOAT_ENVIRONMENT).
    Spec: REQ-PRE-003, REQ-PRE-013.
    """
    if dtype != role_dtype(rule, role):
        raise err(Code.ARGUMENT, f"the rule's {role} is {role_dtype(rule, role)}, not {dtype}")
    if role == "master" or not new.nbytes:
        return "raw", b""
    gradient = b""
    missed = 0.0
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
    """Decode a predicted block of a member into `out`.

    Args:
        rule: rule of the group.
        role: role of the member, not a master.
        encoding: encoding of the block, out of `GROUP_ENCODINGS` or `encodings.ENCODINGS`.
        stored: stored bytes of the block.
        out: writable memory of the content's size.
        bases: base blocks of all members, by role.
        news: new blocks of the earlier members, by role.
        where: name of the block in errors.
        predicted: result of `predict_member`, if available.

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
        # `sparse` changes the prediction in place.
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


def _iter_predictions(
    rule: Rule, role: str, bases: Views, news: Views
) -> Iterator[tuple[slice, NDArray[Any]]]:
    """Yield the prediction for a member, piece by piece."""
    check_float_environment()
    step = Step(rule)
    old = _contents(rule, bases)
    made = _contents(rule, news)
    for piece in _pieces(_count(old, made)):
        yield piece, step.predict(role, _cut(old, piece), _cut(made, piece))


def _encode_gradient(rule: Rule, new: memoryview, bases: Views) -> tuple[bytes, float]:
    """Return a first moment in the encoding `gradient`, and the share of elements it misses."""
    check_float_environment()
    step = Step(rule)
    role = FIRST_MOMENT[rule.kind]
    old = _contents(rule, bases)
    content = np.frombuffer(new, np.float32)
    count = _count(old, {role: content})
    gradient = np.empty(count, np.uint16)
    moments = np.empty(count, np.float32)
    for piece in _pieces(count):
        cut = _cut(old, piece)
        gradient[piece] = low = step.low_gradient(cut, {role: content[piece]})
        moments[piece] = without_nan(step.moment(cut, step.whole_gradient(cut, low)), cut[role])
    planes = encodings.encode("planes", _view(gradient), dtype=rule.gradient)
    index, part = (1, planes) if len(planes) < gradient.nbytes else (0, gradient.tobytes())
    missed = np.count_nonzero(bits_of(moments) != bits_of(content)) / max(count, 1)
    changes = encodings.encode("sparse", new, dtype="float32", base=_view(moments))
    return b"".join((_HEAD.pack(index, len(part)), part, changes)), missed


def _decode_gradient(
    rule: Rule, stored: memoryview, out: memoryview, bases: Views, where: str
) -> None:
    check_float_environment()
    step = Step(rule)
    role = FIRST_MOMENT[rule.kind]
    old = _contents(rule, bases)
    if stored.nbytes < _HEAD.size:
        raise err(
            Code.ENCODED_FORM, "a gradient without a head", where=where, requirement="REQ-PRE-014"
        )
    index, nbytes = _HEAD.unpack_from(stored)
    if index >= len(_GRADIENT_ENCODINGS) or nbytes > stored.nbytes - _HEAD.size:
        raise err(
            Code.ENCODED_FORM,
            "a gradient's head is out of range",
            where=where,
            requirement="REQ-PRE-014",
        )
    moment = np.frombuffer(out, np.float32)
    count = _count(old, {role: moment})
    gradient = np.empty(count, np.uint16)
    part = stored[_HEAD.size : _HEAD.size + nbytes]
    encodings.decode(
        _GRADIENT_ENCODINGS[index], part, _view(gradient), dtype=rule.gradient, where=where
    )
    for piece in _pieces(count):
        cut = _cut(old, piece)
        moment[piece] = without_nan(
            step.moment(cut, step.whole_gradient(cut, gradient[piece])), cut[role]
        )
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
    """Return the number of elements, which must be equal in all blocks."""
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
