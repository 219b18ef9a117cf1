"""It counts what was fetched as consumed: after a save, the samples that were fetched ahead are left out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ckptfmt_conformance.adapters.reference import Reference, original

BREAKS = ("REQ-CUR-005", "REQ-CUR-008")
CONVICTED_BY = (
    "context/valid/samples-ahead-plain",
    "context/valid/samples-ahead-none-done",
    "context/valid/samples-ahead-pad",
    "context/valid/samples-ahead-mixed",
    "context/valid/samples-ahead-skips",
    "context/valid/samples-ahead-fill",
    "context/valid/samples-ahead-left-out",
)

_iterate = original("ckptfmt.data.sampler:Sampler.__iter__")


def _count_at_once(sampler: Any) -> Iterator[Any]:  # noqa: ANN401 - of the implementation
    for batch in _iterate(sampler):
        sampler.commit(sampler.steps_done + 1)
        yield batch


def _count_no_more(_: Any, steps: int = 1) -> None:  # noqa: ANN401 - of the implementation
    del steps


class Broken(Reference):
    """See above."""

    replacements = (
        ("ckptfmt.data.sampler:Sampler.__iter__", _count_at_once),
        ("ckptfmt.data.sampler:Sampler.advance", _count_no_more),
    )
