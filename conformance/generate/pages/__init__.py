"""The cases: a module for each page of the specification or part of a page."""

from __future__ import annotations

import functools
from collections.abc import Callable

from conformance.generate.cases import Case, Page
from conformance.generate.pages import (
    caches,
    context,
    deltas,
    documents,
    encodings,
    examples,
    frozen,
    index,
    lineage,
    manifest,
    opening,
    orders,
    parts,
    prediction,
    run,
    shards,
    suspect,
    tables,
    trees,
    whole,
)

__all__ = ["all_cases"]

_PAGES: tuple[Callable[[], Page], ...] = (
    caches.page,
    context.page,
    deltas.page,
    documents.page,
    encodings.page,
    examples.page,
    frozen.page,
    index.page,
    lineage.page,
    manifest.page,
    opening.page,
    orders.page,
    parts.page,
    prediction.page,
    run.page,
    shards.page,
    suspect.page,
    tables.page,
    trees.page,
    whole.page,
)


@functools.cache
def all_cases() -> tuple[Case, ...]:
    """Return all cases, sorted by their ids and made only once."""
    found = sorted((case for make in _PAGES for case in make().cases), key=lambda case: case.id)
    names = [case.id for case in found]
    if len(set(names)) != len(names):
        raise ValueError(
            f"two cases of one name: {sorted(name for name in names if names.count(name) > 1)}"
        )
    return tuple(found)
