"""Compare two records of one step: find the first differing member and the likely causes. Pure."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Sequence
from typing import Final

from ckptfmt.run.witness import RESULTS, WORDS, StepRecord, What

#: The difference in words, for members without a printable number.
_DIFFERS: Final[dict[str, str]] = {
    "samples": "its samples differ at the same position",
    "batch": "its batch differs",
    "loss": "its loss differs",
    "grad_norm": "its gradient norm differs",
    "options": "an option of an optimizer, such as its learning rate, differs after it",
    "weights": "the weights differ after it",
}
#: The possible causes, for differences with causes independent of the compared members.
_CAUSES: Final[dict[str, str]] = {
    "position": "a step took another number of batches, or another global batch",
    "samples": "the data set or its order is another one",
    "grad_norm": "gradients that were there at the save (an accumulation half-way), or kernels"
    " that aren't"
    " deterministic",
    "options": "a scheduler that isn't in State, or was stepped after the save, or a program that"
    " sets the option by"
    " something that isn't in State",
}
_KERNELS: Final = "kernels that aren't deterministic"
_WORKERS: Final = (
    "prepared with random numbers that aren't in State, such as those of a worker process"
)
_RANDOM: Final = "random numbers that were drawn after the save"
_GRADIENTS: Final = "gradients that were there at the save (an accumulation half-way)"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepComparison:
    """The outcome of comparing one step with the same step of an earlier launch.

    Attributes:
        compared: the members that both records have, in the order of `WORDS`.
        what: the first differing member; None if all are identical.
        detail: the sentence on the difference and the causes; empty if all members are identical.
    """

    compared: tuple[What, ...]
    what: What | None = None
    detail: str = ""


def compare_steps(
    earlier: StepRecord,
    now: StepRecord,
    *,
    streams: Sequence[str],
    earlier_streams: Sequence[str],
    same_tensors: bool,
    is_first: bool,
) -> StepComparison:
    """Return the outcome of comparing a step with the same step of an earlier launch.

    Args:
        streams: the names of the RNG streams of `now`.
        earlier_streams: the names of the RNG streams of `earlier`. Only streams in both lists are
            compared.
        same_tensors: whether both digests of the weights cover the same tensors.
        is_first: whether this is the first repeated step.
    """
    drawn = _differing_streams(earlier, now, streams, earlier_streams)
    differs: dict[What, bool] = {}
    if earlier.position is not None and now.position is not None:
        of_samples = earlier.samples is not None and now.samples is not None
        differs["samples"] = earlier.position != now.position or (
            of_samples and earlier.samples != now.samples
        )
    if drawn is not None:
        differs["rng"] = bool(drawn)
    differs |= _differing_members(earlier, now, same_tensors=same_tensors)
    compared = tuple(differs)
    what = next((name for name in compared if differs[name]), None)
    if what is None:
        return StepComparison(compared=compared)
    equal = [WORDS[name] for name in compared[: compared.index(what)]]
    detail = _explain(what, earlier, now, compared, drawn or [], is_first=is_first)
    had = f" had the same {_joined(equal)}, but" if equal else ":"
    return StepComparison(compared=compared, what=what, detail=f"step {now.step}{had} {detail}")


def have_same_results(earlier: StepRecord, now: StepRecord, *, same_tensors: bool) -> bool:
    """Return whether two records of a step have results to compare, and all are the same.

    Args:
        same_tensors: whether both digests of the weights cover the same tensors.
    """
    differs = _differing_members(earlier, now, same_tensors=same_tensors)
    results = [is_other for name, is_other in differs.items() if name in RESULTS]
    return bool(results) and not any(results)


def _differing_members(
    earlier: StepRecord, now: StepRecord, *, same_tensors: bool
) -> dict[What, bool]:
    """Return whether each comparable member differs, except for samples and RNG streams."""
    names: list[What] = ["batch", "loss", "grad_norm", "options"]
    if earlier.is_several != now.is_several:
        names = ["batch", "options"]  # a number isn't comparable with a digest of several numbers
    if same_tensors and earlier.is_full == now.is_full:
        names.append("weights")
    both = [(name, getattr(earlier, name), getattr(now, name)) for name in names]
    return {
        name: one != other for name, one, other in both if one is not None and other is not None
    }


def _differing_streams(
    earlier: StepRecord, now: StepRecord, streams: Sequence[str], earlier_streams: Sequence[str]
) -> list[str] | None:
    """Return the names of the differing RNG streams; None if no stream can be compared."""
    if earlier.is_before != now.is_before:
        return None
    then = dict(zip(earlier_streams, earlier.streams, strict=False))
    both = [
        (name, then[name], digest)
        for name, digest in zip(streams, now.streams, strict=False)
        if name in then
    ]
    return [name for name, one, other in both if one != other] if both else None


def _explain(
    what: What,
    earlier: StepRecord,
    now: StepRecord,
    compared: Sequence[What],
    drawn: Sequence[str],
    *,
    is_first: bool,
) -> str:
    if what == "rng":
        return _explain_streams(now, drawn, is_first=is_first)
    differs = _DIFFERS[what]
    cause = _cause_of(what, compared, has_streams=earlier.is_full and now.is_full)
    if what == "samples" and earlier.position != now.position:
        differs = (
            f"its data ends at position {now.position}, and ended at {earlier.position} before"
        )
        cause = _CAUSES["position"]
    elif what in ("loss", "grad_norm") and not now.is_several:
        number, before = (_number(getattr(one, what)) for one in (now, earlier))
        differs = f"its {WORDS[what]} is {number}, and was {before}"
    if what != "samples" and not (earlier.is_full and now.is_full):
        cause += "; or other random numbers, since RNG streams weren't read in this step"
    return f"{differs}: {cause}"


def _cause_of(what: What, compared: Sequence[What], *, has_streams: bool) -> str:
    """Return the possible causes of a difference, given identical earlier members."""
    if what in _CAUSES:
        return _CAUSES[what]
    if what == "batch":
        order = (
            []
            if "samples" in compared
            else ["has an order that isn't in State, such as that of shuffle=True"]
        )
        return (
            "the batch"
            f" {_either(['was fetched before the state was restored', *order, f'was {_WORKERS}'])}"
        )
    causes = [] if "batch" in compared else ["the batch"]
    causes += [_RANDOM] if has_streams and "rng" not in compared else []
    if what == "loss":
        causes += ["a state that isn't in State (averaged weights, a hidden state, a counter)"]
    elif "loss" in compared:
        causes = ["the state of an optimizer that isn't in State"]
    else:
        causes += ["a state that isn't in State (an optimizer, averaged weights, a counter)"]
    causes += [_GRADIENTS] if what == "weights" and "grad_norm" not in compared else []
    hint = "" if "loss" in compared else "; observe(loss=..., batch=...) tells these apart"
    return f"{_either([*causes, _KERNELS])}{hint}"


def _explain_streams(now: StepRecord, drawn: Sequence[str], *, is_first: bool) -> str:
    names = (
        f"the RNG stream {drawn[0]} differs"
        if len(drawn) == 1
        else f"the RNG streams {_joined(drawn)} differ"
    )
    if not now.is_before:
        return f"{names} after it: the step, or something since the save, drew other random numbers"
    cause = "the step before, or something after it, drew other random numbers"
    if is_first:
        cause = (
            "something drew random numbers after the save (an evaluation, the iterator of a"
            " loader, a prefetched batch)"
        )
    return f"{names} before the step: {cause}"


def _joined(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _either(causes: Sequence[str]) -> str:
    return f"{', '.join(causes[:-1])}, or {causes[-1]}"


def _number(bits: int | None) -> str:
    (value,) = struct.unpack("<d", struct.pack("<Q", bits or 0))
    return f"{value!r}"
