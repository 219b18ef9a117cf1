"""It makes a list of every tuple: what was hashed or compared by type no longer is."""

from __future__ import annotations

import json

from ckptfmt_conformance.adapters.reference import Reference

CONVICTED_BY = ("trees/valid/sequences", "trees/valid/deep")


class Broken(Reference):
    """See above."""

    def tree_of(self, content: bytes) -> object:
        """Return what is said of a tree, lists for tuples."""
        return json.loads(json.dumps(super().tree_of(content)).replace('{"tuple":', '{"list":'))
