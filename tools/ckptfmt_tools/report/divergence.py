"""The divergence of two runs that should be equal: differing tensors and values, by step."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Final

from ckptfmt.cli.console import clean, count_text, shorten
from ckptfmt.cli.log import read_history
from ckptfmt.cli.places import Place
from ckptfmt.documents.manifest import FIELDS
from ckptfmt.errors import CkptError, Code, StoreError, err
from ckptfmt.read.reader import Checkpoint
from ckptfmt.run.lineage import RunEntry, iter_lineage
from ckptfmt.state import place_of
from ckptfmt_tools.comparison import Comparison, TensorDifference, compare

#: The fields of a trajectory. Configuration, topology and provenance may differ between equal runs.
_FIELDS: Final = ("weights", "optimizer", "rng", "data")
#: The fields that can reveal the cause of a difference, with their names in a sentence.
_NAMED: Final = {"rng": "RNG streams", "data": "the position in the data"}
#: The greatest number of differing steps compared, from the first on: differing blocks are read.
_STEPS: Final = 24
#: The greatest number of tensors and values kept, ordered by their first differing step.
_ROWS: Final = 40
#: The greatest length of a name, in characters.
_NAME_LENGTH: Final = 120


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DivergedStep:
    """A training step at which the checkpoints of the two runs differ.

    Attributes:
        step: the training step.
        names: the names of the checkpoints in the two runs.
        tensor_count: the number of differing tensors.
        value_count: the number of differing plain values and RNG streams.
        fields: the differing fields.
        unsaved: the fields of a trajectory that either checkpoint lacks.
    """

    step: int
    names: tuple[str, str]
    tensor_count: int
    value_count: int
    fields: tuple[str, ...]
    unsaved: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DivergedName:
    """A tensor, a plain value or an RNG stream that differs.

    Attributes:
        field, name, scope: the key in the index.
        first_step: the first step with a difference.
        distances: the difference at each step of `Divergence.steps`, in words; None where equal.
        ratios: the greatest ratio of a difference to the larger of the two elements, at each step
            of `Divergence.steps`; None where equal, or without such a number.
    """

    field: str
    name: str
    scope: str
    first_step: int
    distances: tuple[str | None, ...]
    ratios: tuple[float | None, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """The differences of two runs at equal steps of their lineages.

    Attributes:
        other: the path of the second run.
        shared_count: the number of steps with a checkpoint in both runs.
        compared_count: the number of shared steps at which a comparison was tried, from the first
            on; the comparisons in `problems` failed.
        last_same_step: the last equal step before the first difference; None without such a step.
        steps: the differing steps, ascending.
        names: the differing tensors and values, ordered by their first differing step.
        more_count: the number of further differing tensors and values.
        problems: the errors of failed comparisons.
    """

    other: str
    shared_count: int
    compared_count: int
    last_same_step: int | None
    steps: tuple[DivergedStep, ...]
    names: tuple[DivergedName, ...]
    more_count: int
    problems: tuple[CkptError, ...]


def find_divergence(place: Place, other: Place) -> Divergence:
    """Compare the checkpoints of two runs at equal steps, in the order of steps.

    Blocks are compared by their recorded digests. In differing blocks, the elements are compared.

    Raises: StateError(ARGUMENT) if the runs have no step in common; StoreError.
    """
    one_by_step = _by_step(place)
    other_by_step = _by_step(other)
    shared = sorted(one_by_step.keys() & other_by_step.keys())
    if not shared:
        remedy = "Save both runs at equal steps: with the same every=."
        raise err(Code.ARGUMENT, "the runs have no step in common", where=other.path, remedy=remedy)
    found: list[tuple[int, Comparison]] = []
    unsaved: dict[int, tuple[str, ...]] = {}
    problems: list[CkptError] = []
    compared_count = 0
    last_same_step = None
    for step in shared:
        if len(found) == _STEPS:
            break
        compared_count += 1
        try:
            with (
                _open(place, one_by_step[step]) as first,
                _open(other, other_by_step[step]) as second,
            ):
                comparison = compare(first, second, fields=_FIELDS)
        except StoreError:
            raise
        except CkptError as error:
            problems.append(error.below(one_by_step[step].name))
            continue
        if not comparison.is_same:
            found.append((step, comparison))
            sides = (first.manifest.fields, second.manifest.fields)
            unsaved[step] = tuple(
                field for field in _FIELDS if any(side[field].reason for side in sides)
            )
        elif not found:
            last_same_step = step
    names = _list_names(found)
    return Divergence(
        other=other.path,
        shared_count=len(shared),
        compared_count=compared_count,
        last_same_step=last_same_step,
        steps=tuple(
            DivergedStep(
                step=step,
                names=(one_by_step[step].name, other_by_step[step].name),
                tensor_count=len(comparison.tensors),
                value_count=len(comparison.values),
                unsaved=unsaved[step],
                fields=tuple(
                    sorted(
                        {one.field for one in comparison.tensors}
                        | {one.field for one in comparison.values}
                    )
                ),
            )
            for step, comparison in found
        ),
        names=tuple(names[:_ROWS]),
        more_count=max(0, len(names) - _ROWS),
        problems=tuple(problems),
    )


def divergence_text(found: Divergence) -> str:
    """Return sentences on the first difference of two runs, if any, and on its possible cause."""
    shared = (
        f"This run and {found.other} have checkpoints at"
        f" {count_text(found.shared_count, 'step')} in common"
    )
    if not found.steps:
        same_count = found.compared_count - len(found.problems)
        same = f"weights, optimizer, RNG streams and data are the same at {same_count}"
        return f"{shared}: {same if same_count else 'none compared'}."
    first = found.steps[0]
    before = (
        "the same at none before"
        if found.last_same_step is None
        else f"the same up to step {found.last_same_step}"
    )
    said = [
        (
            f"{shared}: {before}, and different from step {first.step} on"
            f" ({' and '.join(first.names)})."
        )
    ]
    name = next(
        (one for one in found.names if one.first_step == first.step and one.ratios[0] is not None),
        None,
    )
    name = name or next((one for one in found.names if one.first_step == first.step), None)
    if name is not None:
        said.append(
            f"The first difference is {place_of(name.field, name.name)} at step {first.step}:"
            f" {name.distances[0]}."
        )
    said.append(_cause_text(found))
    return " ".join(said)


def _cause_text(found: Divergence) -> str:
    """Return the cause of the first difference as far as the differing fields show it."""
    first = found.steps[0]
    fields = set(found.steps[0].fields)
    since = "before" if found.last_same_step is None else f"between step {found.last_same_step} and"
    if not fields - {"rng"}:
        return "Only RNG streams differ."
    if "data" in fields:
        return (
            f"The position in the data differs at step {first.step}, too: the runs took other"
            f" samples {since} it."
        )
    if "rng" in fields:
        return (
            f"RNG streams differ at step {first.step}, too, and the position in the data is the"
            " same: one of the runs"
            f" drew other random numbers {since} it."
        )
    if unsaved := [_NAMED[field] for field in first.unsaved if field in _NAMED]:
        return f"The cause can't be told: the checkpoints don't have {' and '.join(unsaved)}."
    return (
        f"RNG streams and the position in the data are the same at step {first.step}: the runs"
        f" differ {since} it by a"
        " state that isn't saved, by the contents of the samples, or by kernels that aren't"
        " deterministic."
    )


def _by_step(place: Place) -> Mapping[int, RunEntry]:
    """Return the committed checkpoints on the lineage of a run, by step."""
    history = read_history(place)
    lineage = iter_lineage(history.launches, history.entries)
    return {entry.step: entry for entry in reversed([*lineage]) if entry.manifest is not None}


def _open(place: Place, entry: RunEntry) -> Checkpoint:
    return Checkpoint(place.store.at(entry.name))


def _list_names(found: list[tuple[int, Comparison]]) -> list[DivergedName]:
    """Return all differing tensors and values, ordered by first step, field and name."""
    rows: dict[tuple[str, str, str], dict[int, tuple[str, float | None]]] = {}
    for step, comparison in found:
        for key, told in _iter_told(comparison):
            rows.setdefault(key, {})[step] = told
    steps = [step for step, _ in found]
    names = []
    for (field, name, scope), by_step in rows.items():
        told_by_step = [by_step.get(step) for step in steps]
        names.append(
            DivergedName(
                field=field,
                name=shorten(clean(name), _NAME_LENGTH),
                scope=scope,
                first_step=min(by_step),
                distances=tuple(None if told is None else told[0] for told in told_by_step),
                ratios=tuple(None if told is None else told[1] for told in told_by_step),
            )
        )
    return sorted(
        names, key=lambda one: (one.first_step, FIELDS.index(one.field), one.name, one.scope)
    )


def _iter_told(
    comparison: Comparison,
) -> Iterator[tuple[tuple[str, str, str], tuple[str, float | None]]]:
    for tensor in comparison.tensors:
        yield (tensor.field, tensor.name, tensor.scope), _tell(tensor)
    for value in comparison.values:
        text = "another value" if value.only_in is None else "only in one of the runs"
        yield (value.field, value.name, value.scope), (text, None)


def _tell(tensor: TensorDifference) -> tuple[str, float | None]:
    distance = tensor.distance
    if tensor.only_in is not None:
        return "only in one of the runs", None
    if distance is None:
        return f"another {' and '.join(tensor.described) or 'content'}", None
    sizes = f"{distance.changed_count} of {distance.element_count} elements differ"
    if distance.max_abs is not None:
        sizes += f", by at most {distance.max_abs:.3g}"
    if distance.max_rel is not None:
        sizes += f", relative {distance.max_rel:.3g}"
    is_number = (
        distance.max_rel is not None and math.isfinite(distance.max_rel) and not distance.nan_count
    )
    return sizes, distance.max_rel if is_number else None
