"""Checks of the phase in which a reader finds a fault. The suite verifies the phase by experiment.

A reader that refuses in phase `open` has read no file of tensors. A reader that refuses in phase
`read` wasn't asked to verify all bytes. So the suite withholds the content that only a later phase
may use: for `open`, the files of tensors hold other bytes; for `open` and `read`, the request
doesn't ask to verify every byte. A reader that reports an earlier phase than the expected one is
asked again in the same way for the reported phase.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from ckptfmt_conformance.cases import PHASES, Case, Expectation
from ckptfmt_conformance.judge import Status, Verdict
from ckptfmt_conformance.protocol import Answer

__all__ = ["ask_in_phases"]

#: Suffixes of the files with the bytes of tensors.
_TENSORS: Final = (".safetensors", ".pack")
_OTHER_BYTES: Final = bytes(byte ^ 0xFF for byte in range(256))

#: Asks about a directory, with a request.
Ask = Callable[[Path, Mapping[str, Any] | None], Answer]


def ask_in_phases(
    case: Case, expect: Expectation, ask: Ask, judge: Callable[[Answer], Verdict]
) -> Verdict:
    """Ask a case with only the expected phase's content. Return the verdict.

    Args:
        expect: the expected result. A case without an expected refusal before the last phase
            is asked unchanged.
        ask: asks the case's question about a directory, with a request.
        judge: returns the verdict on an answer.
    """
    if (
        expect.outcome != "reject"
        or not expect.phase
        or case.kind == "parse"
        or "launch" in (case.request or {})
    ):
        # An accepted case shows the whole content. A single document has no tensors. A launch
        # asks which checkpoints are whole.
        return judge(_ask_about(case, ask, case.request))
    due = expect.phase
    answer = _ask_until(due, case, ask)
    verdict = judge(answer)
    if verdict.status is Status.FAIL and due != PHASES[-1]:
        return _explain(verdict, due, judge(_ask_about(case, ask, case.request)))
    if verdict.status is not Status.PASS or answer.outcome != "rejected":
        return verdict
    said = answer.body.get("phase")
    if said not in PHASES or PHASES.index(said) >= PHASES.index(due):
        return verdict
    again = _ask_until(said, case, ask)
    if (
        again.outcome == "rejected"
        and again.body["error"] == answer.body["error"]
        and again.body.get("phase") == said
    ):
        return verdict
    found = (
        f"refused with {again.body['error']}"
        if again.outcome == "rejected"
        else again.message or again.outcome
    )
    message = (
        f"it says that it refused with {answer.body['error']} in phase {said}, and asked"
        f" {_WITHOUT[said]}: {found}"
    )
    return Verdict(status=Status.FAIL, message=message)


_WITHOUT: Final = {
    "open": "again with other bytes in the files of tensors, which that phase doesn't read",
    "read": "again without that every byte be verified",
}


def _explain(verdict: Verdict, due: str, whole: Verdict) -> Verdict:
    """Return the verdict on a failure. Where the unchanged case passes, only the phase is wrong."""
    if whole.status is not Status.PASS:
        return whole
    return Verdict(
        status=Status.FAIL,
        message=(
            f"it isn't found in phase {due}: asked {_WITHOUT[due].removeprefix('again ')}:"
            f" {verdict.message}"
        ),
    )


def _ask_until(phase: str, case: Case, ask: Ask) -> Answer:
    """Ask a case with only a phase's content."""
    if phase == PHASES[-1]:
        return _ask_about(case, ask, case.request)
    request = case.request and {
        name: value for name, value in case.request.items() if name != "verify"
    }
    return _ask_about(case, ask, request, _exchange_tensors if phase == "open" else None)


def _ask_about(
    case: Case,
    ask: Ask,
    request: Mapping[str, Any] | None,
    change: Callable[[str, bytes], bytes] | None = None,
) -> Answer:
    """Ask about files written for this question only."""
    with tempfile.TemporaryDirectory(prefix="ckptfmt-conformance-") as folder:
        # The opened directory has no siblings, since a reader may look for bases there.
        return ask(case.write_files(Path(folder) / "input", change), request)


def _exchange_tensors(path: str, content: bytes) -> bytes:
    """Return other bytes of the same length for a file of tensors; other content unchanged."""
    return content.translate(_OTHER_BYTES) if path.endswith(_TENSORS) else content
