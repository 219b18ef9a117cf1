"""Predictions, one element at a time, as computed in spec/companions/56-prediction.md."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any

__all__ = ["ADAM", "SGD", "Rule", "f32", "narrow", "predicted", "rule_tree"]

#: The members of a rule, in their order, by kind.
ADAM: dict[str, Any] = {
    "kind": "adam", "gradient": "bfloat16", "arithmetic": "fused", "moment": "lerp",
    "square": "gain_first",
    "update": "product", "copy": "", "amsgrad": False, "clip": 1.0, "l2": 0.0, "decay": 0.9,
    "gain": 1 - 0.9, "square_decay": 0.999, "square_gain": 1 - 0.999, "shrink": 1 - 0.001 * 0.1,
    "step_size": 0.001 / (1 - 0.9**2), "bias": (1 - 0.999**2) ** 0.5, "eps": 1e-8,
}  # fmt: skip
SGD: dict[str, Any] = {
    "kind": "sgd", "gradient": "bfloat16", "arithmetic": "separate", "copy": "", "nesterov": False,
    "clip": 1.0, "l2": 0.0, "decay": 0.9, "gain": 1.0, "step_size": 0.05,
}  # fmt: skip

Rule = dict[str, Any]


def rule_tree(rule: Rule) -> list[Any]:
    """Return the tree of a rule."""
    rows = (
        (key, ["f", struct.pack("<d", value)] if isinstance(value, float) else value)
        for key, value in rule.items()
    )
    return ["d", *(item for row in rows for item in row)]


def f32(value: float) -> float:
    """Return a binary64 rounded to binary32."""
    found: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return found


def narrow(value: float, dtype: str) -> bytes:
    """Return a binary32 rounded to 16 bits."""
    if dtype == "float16":
        return b"\0\x7e" if math.isnan(value) else struct.pack("<e", value)
    if math.isnan(value):
        return b"\xc0\x7f"
    bits = int.from_bytes(struct.pack("<f", value), "little")
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).to_bytes(2, "little")


def widen(content: bytes, dtype: str) -> float:
    """Return 16 bits as binary32."""
    found: float = (
        struct.unpack("<e", content)[0]
        if dtype == "float16"
        else struct.unpack("<f", b"\0\0" + content)[0]
    )
    return found


@dataclass(slots=True)
class _Arithmetic:
    """The scalars of a rule, and two ways to compute a product and a sum."""

    rule: Rule

    def scalar(self, name: str) -> float:
        """A scalar of binary32."""
        return f32(self.rule[name])

    def bracket(self, name: str) -> float:
        """A scalar that stays binary64 in the arithmetic `double`."""
        return (
            float(self.rule[name]) if self.rule["arithmetic"] == "double" else f32(self.rule[name])
        )

    def product(self, a: float, b: float) -> float:
        """A product with a scalar in brackets."""
        return a * b if self.rule["arithmetic"] == "double" else f32(a * b)

    def fma(self, a: float, x: float, y: float) -> float:
        """A product that is added to a sum."""
        return f32(f32(a * x) + y) if self.rule["arithmetic"] == "separate" else f32(a * x + y)


def gradient_of(rule: Rule, after: float, before: float, weight: float) -> tuple[float, bytes]:
    """Return the gradient for a first moment, and the gradient's 16 bits; steps 1 to 5."""
    own = _Arithmetic(rule)
    if rule.get("moment") == "lerp":
        e = f32(f32(f32(after - before) / own.scalar("gain")) + before)
    else:
        e = f32(f32(after - f32(own.scalar("decay") * before)) / own.scalar("gain"))
    if rule["gradient"] == "float32":
        return e, b""
    if rule["l2"]:
        e = f32(e - f32(own.scalar("l2") * weight))
    if rule["clip"] != 1:
        e = f32(e / own.scalar("clip"))
    stored = narrow(e, rule["gradient"])
    return from_stored(rule, stored, weight), stored


def from_stored(rule: Rule, stored: bytes, weight: float) -> float:
    """Return the gradient for 16 stored bits; step 5."""
    own = _Arithmetic(rule)
    g = widen(stored, rule["gradient"])
    if rule["clip"] != 1:
        g = f32(g * own.scalar("clip"))
    return own.fma(own.scalar("l2"), weight, g) if rule["l2"] else g


def first_moment(rule: Rule, g: float, before: float) -> float:
    """Return the first moment for a gradient; step 6."""
    own = _Arithmetic(rule)
    gain = own.bracket("gain")
    if rule.get("moment") != "lerp":
        return own.fma(gain, g, own.product(own.bracket("decay"), before))
    difference = f32(g - before)
    if -0.5 < gain < 0.5:
        return own.fma(gain, difference, before)
    less = gain - 1 if rule["arithmetic"] == "double" else f32(gain - 1)
    return own.fma(less, difference, g)


def predicted(rule: Rule, g: float, m: float, v: float, x: float, w: float) -> dict[str, float]:  # noqa: PLR0917 - the state of an element
    """Return the later members of the group from the gradient and the new first moment `m`.

    Steps 7 to 10 of the page.
    """
    own = _Arithmetic(rule)
    if rule["kind"] == "sgd":
        d = own.fma(own.scalar("decay"), m, g) if rule["nesterov"] else m
        return {"weight": own.fma(-own.scalar("step_size"), d, w)}
    share = own.bracket("square_gain")
    kept = own.product(own.bracket("square_decay"), v)
    if rule["square"] == "gain_first":
        v = own.fma(own.product(share, g), g, kept)
    else:
        v = own.fma(share, own.product(g, g), kept)
    x = max(x, v)
    r = f32(
        f32(f32(math.sqrt(x if rule["amsgrad"] else v)) / own.scalar("bias")) + own.scalar("eps")
    )
    u = w if rule["shrink"] == 1 else f32(own.bracket("shrink") * w)
    if rule["update"] == "product":
        w = f32(u - f32(f32(own.scalar("step_size") * m) / r))
    else:
        w = own.fma(-own.scalar("step_size"), f32(m / r), u)
    return {"exp_avg_sq": v, "max_exp_avg_sq": x, "weight": w}
