"""It reads integers as doubles, as many a JSON parser does."""

from __future__ import annotations

import json

from ckptfmt_conformance.adapters.reference import Reference

CONVICTED_BY = ("trees/valid/big-integers", "trees/valid/scalars")


def _round(members: dict[str, object]) -> dict[str, object]:
    if members.keys() == {"int"}:
        return {"int": str(int(float(str(members["int"]))))}
    return members


class Broken(Reference):
    """See above."""

    def tree_of(self, content: bytes) -> object:
        """Return what is said of a tree, its large integers rounded."""
        return json.loads(json.dumps(super().tree_of(content)), object_hook=_round)
