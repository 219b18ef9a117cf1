"""The report of a load, and its agreement over all processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Final

from ckptfmt.errors import Code
from ckptfmt.group import Group
from ckptfmt.loading.claims import (
    OTHER_PROCESS,
    REFUTED,
    STREAMS_PENDING,
    lowest_claim,
    was_not_asked,
)
from ckptfmt.read.streaming import ReadReport
from ckptfmt.run.witness import Verdict, WitnessRecord

#: Largest number of reasons to send to the other processes.
_TOLD: Final = 32


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """The report of a load, with the claim for the run that continues from the checkpoint.

    Attributes:
        step: number of training steps done.
        digest: digest of the manifest.
        claim: ``T1`` for the same trajectory bit by bit; ``S1`` for the same order of samples, each
            once; ``S0`` for the same bytes; ``refuted`` if T1 was expected and a repeated step
            differs from the first execution.
        lowered_by: reasons why the claim isn't T1: the differences, and the parts that the caller
            didn't ask for, as ``not in State: ...`` and ``left out by only=: ...``.
        downgrades: tensors and values that were loaded in another form than saved; also in
            `lowered_by`.
        notes: changes to report without effect on the claim; ``MEMORY_DAMAGED: ...`` if files were
            read in place of damaged memory.
        config_differences: path, saved value and live value. Configuration is never loaded.
        values: loaded values without a mutable container, by field and name. If a field of the
            State is such a value, the field is set to the loaded value as well.
        reads: amount of data read by this process for the load.
        renamed: live name and saved name, each with its field, of renamed tensors and values.
        left_count: number of this process's live tensors and values left unchanged by `only`.
        settled: names of RNG streams restored by objects' load_state_dict.
        verified_steps: number of repeated steps with identical results. While the number is 0, the
            claim is expected: deduced from the state, not measured.
        compared: compared members of the repeated steps, in words.
        refuted_by: first difference of a repeated step although T1 was expected; then `claim` is
            ``refuted``.
    """

    step: int
    digest: str
    claim: str
    lowered_by: tuple[str, ...]
    downgrades: tuple[str, ...]
    notes: tuple[str, ...]
    config_differences: tuple[tuple[str, object, object], ...]
    values: dict[str, object]
    reads: ReadReport
    renamed: tuple[tuple[str, str], ...]
    left_count: int
    settled: tuple[str, ...] = ()
    verified_steps: int = 0
    compared: tuple[str, ...] = ()
    refuted_by: str | None = None

    @property
    def evidence(self) -> Verdict:
        """The origin of the claim: ``expected``, or ``verified`` or ``refuted`` by repeated steps.

        An expected claim is deduced from the state.
        """
        if self.refuted_by is not None:
            return "refuted"
        return "verified" if self.verified_steps else "expected"

    def __repr__(self) -> str:
        told = [reason for reason in self.lowered_by if was_not_asked(reason)]
        reasons = [reason for reason in self.lowered_by if not was_not_asked(reason)]
        told += [f"lowered by {len(reasons)}: {reasons[0]}"] if reasons else []
        told += [f"and {len(reasons) - 1} more in lowered_by"] if len(reasons) > 1 else []
        first = f"step={self.step}, claim={self.claim!r}{self._evidence_text()}"
        return f"LoadReport({'; '.join([first, *told])})"

    def _evidence_text(self) -> str:
        if self.refuted_by is not None:
            return f", refuted by {self.refuted_by}"
        if self.verified_steps:
            return f", verified over {self.verified_steps} steps"
        return "" if self.claim == "S0" else ", expected"

    def with_witness(self, record: WitnessRecord) -> LoadReport:
        """Return the report with the verdict of a witness."""
        refuted_by = (
            record.difference.text if record.verdict == "refuted" and record.difference else None
        )
        return dataclasses.replace(
            self,
            claim=self.claim if refuted_by is None else REFUTED,
            verified_steps=0 if record.verdict == "expected" else record.step_count,
            compared=record.compared,
            refuted_by=refuted_by,
        )

    def with_streams(self, found: Iterable[str] = ()) -> LoadReport:
        """Return the report for the time after the RNG streams are put back.

        A difference between streams that the load found is dropped unless `found` has the
        difference, too: a program may have begun to use a device, or have made a generator, since
        then.

        Args:
            found: differences found when the streams were put back.
        """
        found = tuple(found)
        known = [reason for reason in self.lowered_by if not _is_of_streams(reason)]
        lowered = tuple(dict.fromkeys((*known, *found)))
        downgrades = tuple(
            reason for reason in self.downgrades if not _is_of_streams(reason) or reason in found
        )
        return dataclasses.replace(
            self,
            claim=self.claim if lowered else "T1",
            lowered_by=lowered,
            downgrades=downgrades,
        )


def _is_of_streams(reason: str) -> bool:
    """Return whether a reason for a lower claim is a difference between RNG streams."""
    said = reason.partition(": ")[2] if reason.startswith(OTHER_PROCESS) else reason
    return said == STREAMS_PENDING or said.startswith(
        (f"{Code.STREAM_MISSING} at rng", f"{Code.STREAM_UNEXPECTED} at rng")
    )


def claim_of_all(report: LoadReport, group: Group) -> LoadReport:
    """Return a report with the lowest claim of all processes, and the reasons of all processes.

    Reasons that only other processes have come last, with the number of a process.
    """
    if group.writer_count == 1:
        return report
    own = [reason for reason in report.lowered_by if not reason.startswith(OTHER_PROCESS)]
    told = group.all_gather({"claim": report.claim, "lowered_by": own[:_TOLD]})
    others = {
        reason: f"{OTHER_PROCESS}{number}: {reason}"
        for number, theirs in reversed(list(enumerate(told)))
        for reason in theirs["lowered_by"]
        if reason not in report.lowered_by
    }
    claim = lowest_claim(theirs["claim"] for theirs in told)
    return dataclasses.replace(
        report, claim=claim, lowered_by=tuple(dict.fromkeys((*report.lowered_by, *others.values())))
    )
