"""It doesn't compare the size of a file with what its part says: what was appended goes unseen."""

from __future__ import annotations

from ckptfmt_conformance.adapters.reference import Reference

CONVICTED_BY = ("shards/invalid/a-byte-long",)


def _check_nothing(*_: object) -> None:
    return None


class Broken(Reference):
    """See above."""

    replacements = (
        ("ckptfmt.read.files:check_nbytes", _check_nothing),
        ("ckptfmt.read.verify:check_nbytes", _check_nothing),
    )
