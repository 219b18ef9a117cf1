"""It fills a batch with the samples that the epoch began with, removed since or not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ckptfmt_conformance.adapters.reference import Reference, original

BREAKS = ("REQ-CUR-018",)
CONVICTED_BY = ("context/valid/samples-fill-shift", "context/valid/samples-fill-shift-2-of-3")

_walk = original("ckptfmt.data.course:Walk")
_draws = original("ckptfmt.data.course:Walk.draws")


def _draws_as_begun(walk: Any, begin: int, end: int) -> Iterator[Any]:  # noqa: ANN401 - of the implementation
    for some in _draws(walk, begin, end):
        if some.is_padding:
            first = walk.epoch_at(begin)[1] - _kept(walk, begin)
            whole = _walk(walk._n, seed=walk._seed, plan=walk._plan)  # noqa: SLF001 - a fault needs no interface
            at = some.epoch * walk._plan.epoch_positions(walk._n) + first  # noqa: SLF001
            some.samples[:] = [
                one.samples[0] for k in range(len(some.samples)) for one in _draws(whole, at + k, at + k + 1)
            ]
        yield some
        begin += len(some.samples)


def _kept(walk: Any, draw: int) -> int:  # noqa: ANN401 - of the implementation
    epoch = walk._find(draw)[1]  # noqa: SLF001
    return int(epoch.behind + epoch.kept)


class Broken(Reference):
    """See above."""

    replacements = (("ckptfmt.data.course:Walk.draws", _draws_as_begun),)
