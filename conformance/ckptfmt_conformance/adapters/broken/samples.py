"""Faults in resuming the data: orders of samples, cursors, and positions of foreign loaders."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ckptfmt_conformance.adapters.reference import CkptError, Code, Reference, original

_epoch = original("ckptfmt.data.shuffle:_epoch")
_iterate = original("ckptfmt.data.sampler:Sampler.__iter__")
_draws = original("ckptfmt.data.course:Walk.draws")
_COUNTS = original("ckptfmt.data.course:COUNTS")
_stretch = original("ckptfmt.data.course:Course.stretch")
_walk = original("ckptfmt.data.course:Walk")
_init = original("ckptfmt.data.course:Course.__init__")
_check_epoch = original("ckptfmt.data.cursor:_check_epoch")
_check_count = original("ckptfmt.data.cursor:_check_count")
_load = original("ckptfmt.adapters.data_loaders:ForeignLoader.load_state_dict")
_cursor_map: Any = original("ckptfmt.data.cursor:CursorMap")
_parse_foreign = original("ckptfmt.data.cursor:parse_foreign")


def _first_epoch(n: int, seed: int, _: int) -> Any:
    return _epoch(n, seed, 0)


class OneOrder(Reference):
    """It shuffles once: every epoch has the order of the first epoch."""

    breaks = ("REQ-CUR-007",)
    convicted_by = (
        "context/valid/samples-carry",
        "context/valid/samples-drop",
        "context/valid/samples-check-elsewhere",
        "context/valid/samples-far",
        "context/invalid/samples-order-again",
    )
    replacements = (("ckptfmt.data.shuffle:_epoch", _first_epoch),)


def _seed_of_the_order(seed: int, _: str) -> int:
    return seed


class OneSeed(Reference):
    """It shuffles all sources of a mixture by one seed, so equal lengths get equal orders."""

    breaks = ("REQ-CUR-013",)
    convicted_by = (
        "context/valid/samples-mixed",
        "context/valid/samples-mixed-by-blocks",
        "context/invalid/samples-one-seed",
    )
    replacements = (("ckptfmt.data.course:source_seed", _seed_of_the_order),)


def _list_sources(
    block: int, seed: int, number: int, counts: tuple[int, ...]
) -> np.ndarray[tuple[int], np.dtype]:
    del block, seed, number
    return np.repeat(np.arange(len(counts)), counts)


class ListedBlocks(Reference):
    """It orders the sources in a block as listed by the mixture, without a shuffle."""

    breaks = ("REQ-CUR-012",)
    convicted_by = (
        "context/valid/samples-mixed",
        "context/valid/samples-mixed-4-of-5",
        "context/valid/samples-mixed-skips",
        "context/invalid/samples-blocks-listed",
    )
    replacements = (("ckptfmt.data.course:_sources_of_block", _list_sources),)


class DealtInTurn(Reference):
    """It deals a step's samples to the workers in turn.

    With another number of workers, each worker gets wrong samples.
    """

    convicted_by = (
        "context/valid/samples-carry-1-of-2",
        "context/valid/samples-pad-2-of-3",
        "context/valid/samples-mixed-1-of-3",
    )

    def samples(self, content: bytes, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Return every n-th sample of each step, for n workers."""
        found = super().samples(content, {**asked, "worker": 0, "worker_count": 1})
        steps = [step[asked["worker"] :: asked["worker_count"]] for step in found["steps"]]
        return {**found, "steps": steps}


def _count_at_once(sampler: Any) -> Iterator[Any]:
    for batch in _iterate(sampler):
        sampler.commit(sampler.steps_done + 1)
        yield batch


def _count_no_more(_: Any, steps: int = 1) -> None:
    del steps


class FetchedIsDone(Reference):
    """It counts prefetched samples as consumed, so a resumed run omits them."""

    breaks = ("REQ-CUR-005", "REQ-CUR-008")
    convicted_by = (
        "context/valid/samples-ahead-plain",
        "context/valid/samples-ahead-none-done",
        "context/valid/samples-ahead-pad",
        "context/valid/samples-ahead-mixed",
        "context/valid/samples-ahead-skips",
        "context/valid/samples-ahead-fill",
        "context/valid/samples-ahead-left-out",
    )
    replacements = (
        ("ckptfmt.data.sampler:Sampler.__iter__", _count_at_once),
        ("ckptfmt.data.sampler:Sampler.advance", _count_no_more),
    )


def _draws_that_count(walk: Any, begin: int, end: int) -> Iterator[Any]:
    for some in _draws(walk, begin, end):
        yield dataclasses.replace(some, is_padding=False)


class CountedPadding(Reference):
    """It counts padding samples, which train twice then."""

    breaks = ("REQ-CUR-016",)
    convicted_by = (
        "context/valid/samples-pad",
        "context/valid/samples-pad-3-of-5",
        "context/valid/samples-skips-pad",
        "context/valid/samples-fill-mask",
        "context/valid/samples-fill-mask-2-of-3",
    )
    replacements = (("ckptfmt.data.course:Walk.draws", _draws_that_count),)


def _stretch_filled(course: Any, begin: int, end: int) -> Any:
    stretch = _stretch(course, begin, end)
    drawn = course._draw(begin, end)  # noqa: SLF001 - a fault needs no interface
    stretch.uses[:] = np.where(drawn.uses == _COUNTS, stretch.uses, drawn.uses)
    return stretch


class FilledHoles(Reference):
    """It pads a batch at the end of an epoch, despite skips at the padded positions."""

    breaks = ("REQ-CUR-016", "REQ-CUR-018")
    convicted_by = (
        "context/valid/samples-fill-hole",
        "context/valid/samples-fill-hole-2-of-3",
        "context/valid/samples-fill-hole-sample",
        "context/valid/samples-fill-hole-sample-2-of-3",
    )
    replacements = (("ckptfmt.data.course:Course.stretch", _stretch_filled),)


def _draws_as_begun(walk: Any, begin: int, end: int) -> Iterator[Any]:
    for some in _draws(walk, begin, end):
        if some.is_padding:
            first = walk.epoch_at(begin)[1] - _kept(walk, begin)
            # A fault needs no interface.
            whole = _walk(walk._n, seed=walk._seed, plan=walk._plan)  # noqa: SLF001
            at = some.epoch * walk._plan.epoch_positions(walk._n) + first  # noqa: SLF001
            some.samples[:] = [
                one.samples[0]
                for k in range(len(some.samples))
                for one in _draws(whole, at + k, at + k + 1)
            ]
        yield some
        begin += len(some.samples)


def _kept(walk: Any, draw: int) -> int:
    epoch = walk._find(draw)[1]  # noqa: SLF001
    return int(epoch.behind + epoch.kept)


class FilledAsBegun(Reference):
    """It pads a batch with the epoch's original first samples, including samples removed since."""

    breaks = ("REQ-CUR-018",)
    convicted_by = ("context/valid/samples-fill-shift", "context/valid/samples-fill-shift-2-of-3")
    replacements = (("ckptfmt.data.course:Walk.draws", _draws_as_begun),)


def _begin_at_once(course: Any, *sources: Any, skips: Any = (), **members: Any) -> None:
    begun = [
        skip if skip.scope == "pos" else dataclasses.replace(skip, from_pos=0) for skip in skips
    ]
    _init(course, *sources, skips=begun, **members)


class EarlySkips(Reference):
    """It applies skips at once, before their first position."""

    breaks = ("REQ-CUR-018",)
    convicted_by = (
        "context/valid/samples-skips-later",
        "context/valid/samples-skips-meet",
        "context/valid/samples-skips-unsorted",
        "context/valid/samples-mixed-skips",
        "context/invalid/samples-skip-early",
    )
    replacements = (("ckptfmt.data.course:Course.__init__", _begin_at_once),)


def _check_plainly(cursor: Any, where: str) -> None:
    _check_epoch(dataclasses.replace(cursor, skips=()), where)


class PlainPositions(Reference):
    """It compares every cursor with a sum of whole epochs, even after a shift of positions."""

    breaks = ("REQ-CUR-004",)
    convicted_by = (
        "context/valid/samples-ahead-left-out",
        "context/valid/samples-fill-shift-step",
        "context/valid/samples-left-out",
        "context/valid/samples-left-out-epoch",
        "context/valid/samples-fill-shift-step-2-of-3",
    )
    replacements = (("ckptfmt.data.cursor:_check_epoch", _check_plainly),)


def _check_nothing(*_: object) -> None:
    return None


def _check_unmixed_count(cursor: Any, where: str) -> None:
    if cursor.mixture is None:
        _check_count(cursor, where)


class UncountedMixtures(Reference):
    """It compares the ledger's count with the position only without a mixture."""

    breaks = ("REQ-CUR-004",)
    convicted_by = ("context/invalid/cursor-mixture-ledger-count",)
    replacements = (("ckptfmt.data.cursor:_check_count", _check_unmixed_count),)


class UncheckedSample(Reference):
    """It doesn't compare the sample in a cursor's check, so another order isn't noticed."""

    breaks = ("REQ-CUR-006",)
    convicted_by = (
        "context/invalid/samples-check",
        "context/invalid/samples-check-behind",
        "context/invalid/samples-order-again",
        "context/invalid/samples-blocks-listed",
    )
    replacements = (("ckptfmt.data.course:_check_vector", _check_nothing),)


class UncheckedStand(Reference):
    """It doesn't compare the positions of the sources with a cursor."""

    breaks = ("REQ-CUR-014",)
    convicted_by = (
        "context/invalid/samples-stand",
        "context/invalid/samples-stand-epoch",
        "context/invalid/samples-stand-mixed",
        "context/invalid/samples-stand-left-out",
    )
    replacements = (("ckptfmt.data.course:_check_stand", _check_nothing),)


def _load_anywhere(loader: Any, state_dict: Mapping[str, Any]) -> None:
    # Any object of the implementation.
    loader._worker_count = state_dict["worker_count"]  # noqa: SLF001
    _load(loader, state_dict)


def _may_always(*_: object) -> bool:
    return True


class DealtLoader(Reference):
    """It loads foreign loaders' positions on any number of workers."""

    breaks = ("REQ-CUR-023",)
    convicted_by = (
        "context/valid/loader-allowed-fewer",
        "context/valid/loader-allowed-more",
        "context/valid/loader-run-allowed",
        "context/invalid/loader-on-fewer",
        "context/invalid/loader-on-more",
        "context/invalid/loader-on-a-third",
        "context/invalid/loader-run-on-fewer",
        "context/invalid/loader-run-on-more",
    )
    replacements = (
        ("ckptfmt.loading.restore:may_load", _may_always),
        ("ckptfmt.adapters.data_loaders:ForeignLoader.load_state_dict", _load_anywhere),
    )


class _LoaderMap(_cursor_map):  # type: ignore[misc]
    """A map with another way to read names, for the maps of a loader."""

    __slots__ = ()

    def text(self, name: str) -> str:
        """Return a string."""
        return str(self.members.get(name)) if self.clause == "REQ-CUR-022" else super().text(name)


class AnyLibrary(Reference):
    """It converts the library and version of a foreign loader to strings, whatever their types."""

    breaks = ("REQ-CUR-022",)
    convicted_by = (
        "context/invalid/loader-lib-none",
        "context/invalid/loader-lib-of-4097",
        "context/invalid/loader-version-number",
    )
    replacements = (("ckptfmt.data.cursor:CursorMap", _LoaderMap),)


def _parse_named(tree: Any, **members: Any) -> Any:
    foreign = _parse_foreign(tree, **members)
    if not all(name and name.isprintable() for name in (foreign.lib, foreign.version)):
        raise CkptError(Code.CURSOR_FORM, "a library without a name", where="loader")
    return foreign


class NamedLibraries(Reference):
    """It refuses an empty or unprintable library or version of a foreign loader."""

    breaks = ("REQ-CUR-022",)
    convicted_by = ("context/valid/loader-named", "context/valid/loader-nameless")
    replacements = (("ckptfmt.read.verify:parse_foreign", _parse_named),)
