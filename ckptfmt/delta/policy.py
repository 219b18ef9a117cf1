"""Whether a save is written in full or as a delta, from what was measured of the saves before. Pure.

A delta costs what it takes to find out what changed and to encode that; it saves what isn't written. And it makes the
way back longer: a chain ends when reading it would take too much longer than reading a full checkpoint.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from ckptfmt import limits
from ckptfmt.documents.manifest import FIELDS
from ckptfmt.errors import CkptError, Code, err

MODES: Final = ("off", "auto", "smallest")
#: What encoding and decoding are taken to reach before they were measured, in bytes of content a second.
_ENCODE_RATE: Final = 0.3e9
_DECODE_RATE: Final = 1e9
#: Smallest state for which `auto` looks for a gain, in bytes: below, opening and syncing files is what takes time.
_LEAST_NBYTES: Final = 16 << 20
#: Least share of blocks that are as they were for which finding them out pays where the store is fast.
_UNCHANGED: Final = 0.2
#: How much faster than a full save a delta has to promise to be.
_MARGIN: Final = 0.9
#: Largest share of the full bytes that a delta may store and still pay.
_STORED: Final = 0.9
#: Most saves that are written in full after a delta that didn't pay: at first one, then twice as many each time.
_PAUSE: Final = 16


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeltaOptions:
    """What the caller asks for.

    Attributes:
        mode: ``off``; ``auto``, never slower than a full save; ``smallest``, in the fewest bytes.
        full_every: every so many saves one is full.
        restore_budget: how much longer than that of a full checkpoint a restore may take, as a factor.
        fields: those whose changed blocks are encoded.
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
        """Return the options that a caller gives: a mode, or a mapping of attributes. Raises: StateError(ARGUMENT)."""
        if not isinstance(given, Mapping):
            return cls(mode=given)
        unknown = sorted(map(str, given.keys() - {field.name for field in dataclasses.fields(cls)}))
        if unknown:
            raise _refused(f"{{...}} has unknown options: {', '.join(unknown)}")
        fields = given.get("fields", FIELDS)
        return cls(**{**given, "fields": frozenset((fields,) if isinstance(fields, str) else fields)})

    def as_dict(self) -> dict[str, Any]:
        """Return the options as plain values."""
        return {
            **dataclasses.asdict(self),
            "restore_budget": str(self.restore_budget),
            "fields": sorted(self.fields),
        }

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> DeltaOptions:
        """Return the options that `as_dict` was asked of."""
        return cls.of({**value, "restore_budget": float(value["restore_budget"])})


def _refused(detail: str) -> CkptError:
    return err(Code.ARGUMENT, f"delta={detail}", where="delta=")


@dataclasses.dataclass(slots=True, kw_only=True)
class History:
    """What was measured of the saves so far.

    Attributes:
        nbytes: of what a full save writes.
        full_s: how long the last full one took to write, in seconds.
        unchanged: share of the bytes that were as in the save before, at the last one.
        chain_count: how many deltas were made since the last full one.
        restore_nbytes: how many bytes a restore of the newest one reads.
        decoded_nbytes: how many bytes of content it decodes.
        stored_nbytes: what the last delta stored.
        encode_rate: how many bytes of content were encoded a second; None before any were.
        decode_rate: how many were decoded a second, by as many threads.
        pause_count: how many saves are still to be full, because a delta didn't pay.
        next_pause: how many they are the next time.
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
        """Return how long a restore would take if the next save were like the last, in seconds."""
        read_nbytes = self.restore_nbytes + self.stored_nbytes
        decode_s = self.decoded_nbytes / (self.decode_rate or _DECODE_RATE)
        return read_nbytes / max(self.nbytes, 1) * self.full_s + decode_s

    def note_full(self, *, nbytes: int, seconds: float, unchanged: float) -> None:
        """Take note of a full save."""
        self.nbytes, self.full_s, self.unchanged = nbytes, seconds, unchanged
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
        """Take note of a delta.

        Args:
            encoded_nbytes: of the content that was encoded, and decoded again.
            decode_s: how long decoding it took, in seconds, as long as all threads did it.
        """
        self.unchanged, self.stored_nbytes = unchanged, stored_nbytes
        self.restore_nbytes, self.decoded_nbytes = restore_nbytes, decoded_nbytes
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
    """What a save becomes, and why.

    Attributes:
        fields: those whose changed blocks are encoded; None for a full save.
        reason: a sentence for people.
    """

    fields: frozenset[str] | None
    reason: str


def plan_save(options: DeltaOptions, history: History, *, base_reference_count: int | None) -> SavePlan:
    """Return whether the next save is a delta.

    A delta refers to all checkpoints that its base refers to, also where only another writer's part does. So the end of
    a chain is counted in references of the base, which all writers share: they end it in the same save, and the next
    chain begins with none. If each counted its own deltas, the references would grow without end, and nothing that they
    name could be retired.

    Args:
        base_reference_count: how many checkpoints the base refers to: a committed one of the same layout whose digests
            are known; None where there is none.
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
    return SavePlan(fields=None, reason=f"{changed:.0%} changed, and the store is faster than encoding")


def _find_reason(options: DeltaOptions, history: History, base_reference_count: int | None) -> str:
    """Return why the next save has to be a full one; an empty string where it needn't."""
    reference_count = base_reference_count or 0
    reasons = {
        "deltas are off": options.mode == "off",
        "there is no base of this layout": base_reference_count is None,
        "there is nothing to compare": not history.nbytes,
        f"{reference_count} deltas since the last full one": reference_count + 1 >= options.full_every,
        "a delta didn't pay lately": history.pause_count > 0,
        "reading the chain would take too long": history.chain_count > 0
        and history.restore_s() > options.restore_budget * history.full_s,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")
