"""A rewind: the choice of the save, and the samples to leave out afterwards."""

from __future__ import annotations

import operator
from typing import Final

from ckptfmt.adapters.data_loaders import find_readers
from ckptfmt.data.sampler import Sampler
from ckptfmt.documents.manifest import Manifest
from ckptfmt.errors import Code, err
from ckptfmt.run.lineage import iter_lineage, list_checkpoints, list_launches, read_known_run
from ckptfmt.state import State
from ckptfmt.store.protocol import Store

_WHERE: Final = "rewind()"


def choose_save(store: Store, to: int | str | None) -> str:
    """Return the value of `resume=` for a rewind; on process 0 only.

    Args:
        store: store rooted at the run.
        to: see `Checkpointer.rewind`.

    Raises: IntegrityError(NOT_COMMITTED) if the run has no such save; StateError(ARGUMENT).
    """
    if isinstance(to, str):
        return to
    if to is not None and (isinstance(to, bool) or not hasattr(to, "__index__")):
        detail = f"to={to!r} is neither a number of steps nor the name of a checkpoint"
        raise err(Code.ARGUMENT, detail, where=_WHERE, remedy="Pass rewind(to=100), or no to=.")
    run = read_known_run(store)
    entries = list_checkpoints(store, run, with_labels=False)
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
        until = "" if most is None else f" of step {most} or earlier"
        raise err(
            Code.NOT_COMMITTED,
            f"this run has no committed save{until} to go back to",
            where=store.name,
            remedy="Save before the first step that may fail: checkpointer.save().",
        )
    return name


def can_skip(state: State) -> bool:
    """Return whether samplers, which can leave out samples, have the position in the data."""
    samplers, loaders = find_readers(state)
    return bool(samplers) and not loaders and not any(one.is_pipeline for one in samplers)


def find_ends(state: State, step: int, *, skip: bool) -> list[tuple[Sampler, int]]:
    """Return the samplers of a state, each with its position after a step.

    The samplers commit the step: their cursors are loaded afterwards.

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
    samplers = [one for one in find_readers(state)[0] if not one.is_pipeline]
    for sampler in samplers:
        sampler.commit(step)
    return [(sampler, sampler.position) for sampler in samplers]
