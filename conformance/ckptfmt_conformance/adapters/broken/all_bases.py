"""It wants all members of a group from the base, also those that a prediction doesn't use."""

from __future__ import annotations

from typing import Any

from ckptfmt_conformance.adapters.reference import Reference, original

BREAKS = ("REQ-DEL-025",)
CONVICTED_BY = ("prediction/valid/adam-base-without-copy",)

_roles = original("ckptfmt.codecs.rule:roles")


def _all(rule: Any, _: str) -> Any:  # noqa: ANN401 - of the implementation
    return frozenset(_roles(rule))


class Broken(Reference):
    """See above."""

    replacements = (("ckptfmt.codecs.prediction:needed_bases", _all),)
