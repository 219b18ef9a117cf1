"""It passes over a delta for damage in a base that the delta doesn't read."""

from __future__ import annotations

from typing import Any

from ckptfmt_conformance.adapters.reference import Reference, original

BREAKS = ("REQ-RUN-012",)
CONVICTED_BY = ("run/valid/launch-base-not-needed",)

_verify_checkpoint = original("ckptfmt.read.verify:verify_checkpoint")


def _verify_all(store: Any, report: Any, **_: Any) -> Any:  # noqa: ANN401 - of the implementation
    return _verify_checkpoint(store, report)


class Broken(Reference):
    """See above."""

    replacements = (("ckptfmt.run.lineage:verify_loadable", _verify_all),)
