"""It doesn't compare the header of a shard with its digest: other tools see other tensors."""

from __future__ import annotations

from typing import Any

from ckptfmt_conformance.adapters.reference import Reference

CONVICTED_BY = ("shards/invalid/bit-in-header", "shards/invalid/bit-in-padding")


def _read_header(store: Any, file: Any) -> Any:  # noqa: ANN401 - of the implementation
    return store.read_range(file.name, 0, file.header_nbytes)


class Broken(Reference):
    """See above."""

    replacements = (("ckptfmt.read.files:read_header", _read_header),)
