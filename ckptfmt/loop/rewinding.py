"""A rewind: the choice of the save, and the samples to leave out afterwards."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable
from typing import Any, Final, Self

from ckptfmt.adapters import torch_side
from ckptfmt.adapters.data_loaders import find_readers
from ckptfmt.adapters.live import walk
from ckptfmt.data.cursor_map import PosSkip, Skip
from ckptfmt.data.sampler import Sampler
from ckptfmt.documents.canonical import fit_string
from ckptfmt.documents.manifest import Manifest
from ckptfmt.errors import Code, err
from ckptfmt.run.lineage import (
    check_not_fenced,
    iter_lineage,
    list_checkpoints,
    list_launches,
    read_known_run,
)
from ckptfmt.state import State
from ckptfmt.store.protocol import Store

_WHERE: Final = "rewind()"
#: The maximum length of a reason, in characters.
_REASON_LENGTH: Final = 500
#: The start of the reason of each skip by a healer, which decides anew after each failure.
BY_HEALER: Final = "healer: "
#: The reason for a lower claim if the iterators of a sampler weren't made anew in time.
REMADE: Final = (
    "the iterators of the loader have fetched batches ahead, and weren't made anew between the"
    " rewind and the next step, so that a new iterator draws random numbers of the step"
)


def choose_save(store: Store, to: int | str | None, *, launch: int | None = None) -> str:
    """Return the value of `resume=` for a rewind; on process 0 only.

    Args:
        store: store rooted at the run.
        to: see `Checkpointer.rewind`.
        launch: number of the launch that goes back; None to accept any newest launch.

    Raises: IntegrityError(NOT_COMMITTED) if the run has no such save; StateError(ARGUMENT);
        FencedError(FENCED) instead of NOT_COMMITTED after the begin of a newer launch.
    """
    is_step = hasattr(to, "__index__") and not isinstance(to, bool)
    if not (to is None or is_step or isinstance(to, str)) or to in ("auto", "fresh"):
        detail = f"to={to!r} is neither a number of steps nor the name of a checkpoint"
        raise err(Code.ARGUMENT, detail, where=_WHERE, remedy="Pass rewind(to=100), or no to=.")
    run = read_known_run(store)
    entries = list_checkpoints(store, run, with_labels=False)
    if isinstance(to, str):
        manifests = {entry.name: entry.manifest for entry in entries}
        if any(found and to in (name, found.digest) for name, found in manifests.items()):
            return to
        _check_newest(store, launch)
        raise err(
            Code.NOT_COMMITTED,
            f"the run has no committed checkpoint of the name or digest {to!r}",
            where=store.name,
            remedy="`ckptfmt ls` lists the checkpoints of a run.",
        )
    saved = [
        entry
        for entry in iter_lineage(list_launches(store, run), entries)
        if isinstance(entry.register, Manifest)
    ]
    if to is None and saved:
        return "auto"
    most = None if to is None else operator.index(to)
    name = next((entry.name for entry in saved if most is None or entry.step <= most), None)
    if name is None:
        _check_newest(store, launch)
        until = "" if most is None else f" of step {most} or earlier"
        raise err(
            Code.NOT_COMMITTED,
            f"this run has no committed save{until} to go back to",
            where=store.name,
            remedy="Save before the first step that may fail: checkpointer.save().",
        )
    return name


def _check_newest(store: Store, launch: int | None) -> None:
    if launch is not None:
        check_not_fenced(store, launch)


def can_skip(state: State) -> bool:
    """Return whether samplers, which can leave out samples, have the position in the data."""
    samplers, loaders = find_readers(state)
    return bool(samplers) and not loaders and not any(one.is_pipeline for one in samplers)


@dataclasses.dataclass(frozen=True, slots=True)
class Reach:
    """The consumed positions and the skips of a sampler before its cursor goes back.

    Attributes:
        end: the position after the last step, with a step under way.
        skips: the skips of the cursor.
    """

    sampler: Sampler
    end: int
    skips: tuple[Skip, ...]

    @classmethod
    def of(cls, sampler: Sampler, step: int) -> Self:
        """Return the reach of a sampler, which commits the step: the cursor is loaded afterwards.

        Args:
            step: number of steps done, with a step under way.
        """
        sampler.commit(step)
        return cls(sampler, sampler.position, sampler.skips)

    def renew(self, reason: str | None) -> None:
        """Add skips that are newer than the loaded cursor, and leave out the positions since then.

        Args:
            reason: reason for leaving out the positions; None to leave out no more.
        """
        sampler = self.sampler
        begin = sampler.position
        end = self.end
        newer = [
            skip
            for skip in self.skips
            if skip not in sampler.skips and not skip.reason.startswith(BY_HEALER)
        ]
        for skip in sorted(newer, key=lambda skip: skip.begin):
            is_within = reason is not None and skip.begin <= end
            if is_within and isinstance(skip, PosSkip) and skip.policy == "shift":
                end += skip.range[1] - skip.range[0]  # the loaded cursor counts these positions
            else:
                sampler.add_skip(skip)
        if reason is not None and begin < end:
            sampler.skip(positions=(begin, end), policy="shift", reason=reason)


def note_reaches(state: State, step: int, *, skip: bool) -> list[Reach]:
    """Return the reach of each sampler of a state.

    Args:
        step: number of steps done, with a step under way.
        skip: whether samples shall be left out.

    Raises: StateError(ARGUMENT) if `skip` is impossible.
    """
    if skip and not can_skip(state):
        raise err(
            Code.ARGUMENT,
            "samples can be left out only by a ckptfmt.Sampler without pipeline=True, and the State"
            " has another position in the data, or none",
            where=_WHERE,
            remedy="Call rewind() without skip=True; or give State(data=ckptfmt.Sampler(...)).",
        )
    samplers = find_readers(state)[0]
    return [Reach.of(one, step) for one in samplers if not one.is_pipeline]


def drop_gradients(state: State) -> None:
    """Drop the gradients of a state's torch parameters, as in a new process."""
    side: Any = torch_side()
    for unit in () if side is None else walk(state, worker=0):
        for parameter in side.list_parameters(unit.value):
            parameter.grad = None


def check_reason(reason: object) -> str:
    """Return a reason as a text for a cursor. Raises: StateError(ARGUMENT)."""
    if not isinstance(reason, str):
        detail = f"reason={reason!r} isn't a text"
        raise err(Code.ARGUMENT, detail, where=_WHERE, remedy='Pass a text, such as "spike".')
    return fit_string(" ".join(reason.split()), _REASON_LENGTH)


def have_fetched_ahead(samplers: Iterable[Sampler], step: int) -> bool:
    """Return whether any iterator of some samplers has batches of steps after the first `step`."""
    return any(sampler.has_fetched_ahead(step) for sampler in samplers)
