"""The choice between a full save and a delta, from measurements of earlier saves. Pure.

A delta costs the time to find and encode the changes. It saves the time to write the unchanged
bytes. Restores of deltas are slower: a chain ends when a restore would take much longer than
that of a full checkpoint.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from ckptfmt import limits
from ckptfmt.documents.manifest import FIELDS
from ckptfmt.errors import CkptError, Code, err

MODES: Final = ("off", "auto", "smallest")
#: Assumed rates of encoding and decoding before the first measurement, in content bytes per second.
_ENCODE_RATE: Final = 0.3e9
_DECODE_RATE: Final = 1e9
#: Smallest state for which `auto` makes deltas, in bytes: below, most time goes to opening and
#: syncing files.
_LEAST_NBYTES: Final = 16 << 20
#: Least share of unchanged bytes at which finding them pays on a fast store.
_UNCHANGED: Final = 0.2
#: Largest estimated time of a delta, as a share of the time of a full save.
_MARGIN: Final = 0.9
#: Largest size of a delta that still pays, as a share of the full size.
_STORED: Final = 0.9
#: Most saves in full after a delta that didn't pay: one at first, twice as many each time after.
_PAUSE: Final = 16


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeltaOptions:
    """The caller's options for deltas.

    Attributes:
        mode: ``off``; ``auto``, never slower than a full save; ``smallest``, the fewest bytes.
        full_every: period of full saves, in saves.
        restore_budget: longest restore, as a factor of the time that a full checkpoint takes.
        fields: fields in which changed blocks are encoded.
    """

    mode: str = "off"
    full_every: int = 16
    restore_budget: float = 1.5
    fields: frozenset[str] = frozenset(FIELDS)

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise _refused(f"{self.mode!r}: one of {', '.join(MODES)}")
        if type(self.full_every) is not int or not 1 <= self.full_every <= limits.REFERENCES:
            raise _refused(f"full_every is {self.full_every!r}: from 1 to {limits.REFERENCES}")
        if type(self.restore_budget) not in (int, float) or not self.restore_budget >= 1:
            raise _refused(f"restore_budget is {self.restore_budget!r}: a factor, at least 1")
        unknown = sorted(map(str, self.fields - set(FIELDS)))
        if unknown:
            raise _refused(f"no field {', '.join(unknown)}")

    @classmethod
    def of(cls, given: str | Mapping[str, Any]) -> DeltaOptions:
        """Return the options from a mode or a mapping of attributes.

        Raises: StateError(ARGUMENT).
        """
        if not isinstance(given, Mapping):
            return cls(mode=given)
        unknown = sorted(map(str, given.keys() - {field.name for field in dataclasses.fields(cls)}))
        if unknown:
            raise _refused(f"{{...}} has unknown options: {', '.join(unknown)}")
        fields = given.get("fields", FIELDS)
        return cls(
            **{**given, "fields": frozenset((fields,) if isinstance(fields, str) else fields)}
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the options as plain values."""
        return {
            **dataclasses.asdict(self),
            "restore_budget": str(self.restore_budget),
            "fields": sorted(self.fields),
        }

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> DeltaOptions:
        """Return the options from the result of `as_dict`."""
        return cls.of({**value, "restore_budget": float(value["restore_budget"])})


def _refused(detail: str) -> CkptError:
    return err(Code.ARGUMENT, f"delta={detail}", where="delta=")


@dataclasses.dataclass(slots=True, kw_only=True)
class SaveMeasurements:
    """Measurements of the saves so far.

    Attributes:
        nbytes: size of a full save in bytes.
        full_s: duration of the last full save's writing, in seconds.
        unchanged: share of bytes in the last save that were equal in the save before.
        chain_count: number of deltas since the last full save.
        restore_nbytes: number of bytes that a restore of the newest save reads.
        decoded_nbytes: number of content bytes that a restore of the newest save decodes.
        stored_nbytes: number of bytes that the last delta stored.
        encode_rate: content bytes encoded per second; None before the first measurement.
        decode_rate: content bytes decoded per second, by as many threads as encode; None before
            the first measurement.
        pause_count: number of coming saves that must be full, since a delta didn't pay.
        next_pause: `pause_count` after the next delta that doesn't pay.
    """

    nbytes: int = 0
    full_s: float = 0.0
    unchanged: float = 0.0
    chain_count: int = 0
    restore_nbytes: int = 0
    decoded_nbytes: int = 0
    stored_nbytes: int = 0
    encode_rate: float | None = None
    decode_rate: float | None = None
    pause_count: int = 0
    next_pause: int = 1

    def restore_s(self) -> float:
        """Return the estimated time of a restore after another save like the last, in seconds."""
        read_nbytes = self.restore_nbytes + self.stored_nbytes
        decode_s = self.decoded_nbytes / (self.decode_rate or _DECODE_RATE)
        return read_nbytes / max(self.nbytes, 1) * self.full_s + decode_s

    def note_full(self, *, nbytes: int, seconds: float, unchanged: float) -> None:
        """Record the measurements of a full save."""
        self.nbytes = nbytes
        self.full_s = seconds
        self.unchanged = unchanged
        self.chain_count = self.decoded_nbytes = self.stored_nbytes = 0
        self.restore_nbytes = nbytes
        self.pause_count = max(0, self.pause_count - 1)

    def note_delta(
        self,
        *,
        seconds: float,
        unchanged: float,
        stored_nbytes: int,
        encoded_nbytes: int,
        decode_s: float,
        restore_nbytes: int,
        decoded_nbytes: int,
        mode: str,
    ) -> None:
        """Record the measurements of a delta.

        Args:
            encoded_nbytes: size of the content that was encoded and decoded again, in bytes.
            decode_s: decoding time in seconds, with all threads at work.
        """
        self.unchanged = unchanged
        self.stored_nbytes = stored_nbytes
        self.restore_nbytes = restore_nbytes
        self.decoded_nbytes = decoded_nbytes
        self.chain_count += 1
        if encoded_nbytes:
            self.encode_rate = encoded_nbytes / max(seconds, 1e-6)
            self.decode_rate = encoded_nbytes / max(decode_s, 1e-6)
        too_slow = mode == "auto" and seconds > self.full_s
        if too_slow or stored_nbytes > _STORED * self.nbytes:
            self.pause_count = self.next_pause
            self.next_pause = min(2 * self.next_pause, _PAUSE)
        else:
            self.next_pause = 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SavePlan:
    """The decision between a full save and a delta.

    Attributes:
        fields: fields in which changed blocks are encoded; None for a full save.
        reason: explanation for people.
    """

    fields: frozenset[str] | None
    reason: str


def plan_save(
    options: DeltaOptions, history: SaveMeasurements, *, base_reference_count: int | None
) -> SavePlan:
    """Return the decision whether the next save is a delta.

    A delta refers to all checkpoints to which its base refers, including the references of other
    writers' parts. The length of a chain is therefore counted in references of the base, which all
    writers share: all writers end the chain in the same save, and the next chain begins without
    references. If each writer counted its own deltas, references would accumulate without end, and
    no referenced checkpoint could be retired.

    Args:
        base_reference_count: number of checkpoints to which the base refers; None without a base.
            A base is a committed checkpoint of the same layout, with known digests.
    """
    full = _find_reason(options, history, base_reference_count)
    if full:
        return SavePlan(fields=None, reason=full)
    if options.mode == "smallest":
        return SavePlan(fields=options.fields, reason="in the fewest bytes")
    if history.nbytes < _LEAST_NBYTES:
        return SavePlan(fields=None, reason="a full save of so little takes no time")
    changed = 1.0 - history.unchanged
    write_rate = history.nbytes / max(history.full_s, 1e-6)
    encode_rate = history.encode_rate or _ENCODE_RATE
    if encode_rate * _MARGIN > write_rate:
        return SavePlan(fields=options.fields, reason="the store is slower than encoding")
    if history.unchanged >= _UNCHANGED:
        return SavePlan(fields=frozenset(), reason=f"{changed:.0%} changed")
    return SavePlan(
        fields=None, reason=f"{changed:.0%} changed, and the store is faster than encoding"
    )


def _find_reason(
    options: DeltaOptions, history: SaveMeasurements, base_reference_count: int | None
) -> str:
    """Return the reason why the next save must be full; an empty string if a delta is allowed."""
    reference_count = base_reference_count or 0
    reasons = {
        "deltas are off": options.mode == "off",
        "there is no base of this layout": base_reference_count is None,
        "there is nothing to compare": not history.nbytes,
        f"{reference_count} deltas since the last full one": reference_count + 1
        >= options.full_every,
        "a delta didn't pay lately": history.pause_count > 0,
        "reading the chain would take too long": history.chain_count > 0
        and history.restore_s() > options.restore_budget * history.full_s,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")
