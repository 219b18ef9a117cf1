"""Prediction: the new state of an optimizer from its old one and the gradient, by the optimizer's own arithmetic.

Spec: page 56.
"""

from ckptfmt.codecs.prediction.floats import check_float_environment
from ckptfmt.codecs.prediction.member_codec import (
    GROUP_ENCODINGS,
    Members,
    decode_member,
    encode_member,
    find_members,
    predict_member,
)
from ckptfmt.codecs.prediction.optimizer_steps import needed_bases
from ckptfmt.codecs.prediction.rule import Rule, role_dtype, roles
from ckptfmt.codecs.prediction.search import find_rule

__all__ = [
    "GROUP_ENCODINGS",
    "Members",
    "Rule",
    "check_float_environment",
    "decode_member",
    "encode_member",
    "find_members",
    "find_rule",
    "needed_bases",
    "predict_member",
    "role_dtype",
    "roles",
]
