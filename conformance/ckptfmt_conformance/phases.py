"""In which phase a fault is found, shown and not believed: a phase is asked what only that phase can know.

Who refuses while it opens has read no file of tensors; who refuses while it reads wasn't asked to check everything. So
a case is asked without what comes later than the phase that is due: for `open` the files of tensors hold other bytes,
and neither for `open` nor for `read` is it asked that every byte be verified. Who says that it was sooner is asked once
more, in the same way, for the phase that it says.
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

#: Files with the bytes of tensors end with these.
_TENSORS: Final = (".safetensors", ".pack")
_OTHER_BYTES: Final = bytes(byte ^ 0xFF for byte in range(256))

#: Asks about a directory, by a request.
Ask = Callable[[Path, Mapping[str, Any] | None], Answer]


def ask_in_phases(case: Case, expect: Expectation, ask: Ask, judge: Callable[[Answer], Verdict]) -> Verdict:
    """Ask a case, and what its phase can't have known; return what the answers are worth.

    Args:
        expect: what is due; what isn't refused in a phase before the last is asked as it is.
        ask: asks the case's question about a directory, by a request.
        judge: says what an answer is worth.
    """
    if expect.outcome != "reject" or not expect.phase or case.kind == "parse" or "launch" in (case.request or {}):
        # What is accepted shows all of it; a document by itself has no tensors; and a launch asks which are whole.
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
    if again.outcome == "rejected" and again.body["error"] == answer.body["error"] and again.body.get("phase") == said:
        return verdict
    found = f"refused with {again.body['error']}" if again.outcome == "rejected" else again.message or again.outcome
    message = (
        f"it says that it refused with {answer.body['error']} in phase {said}, and asked {_WITHOUT[said]}: {found}"
    )
    return Verdict(status=Status.FAIL, message=message)


_WITHOUT: Final = {
    "open": "again with other bytes in the files of tensors, which that phase doesn't read",
    "read": "again without that every byte be verified",
}


def _explain(verdict: Verdict, due: str, whole: Verdict) -> Verdict:
    """Return what a failure is called: where the case passes as it is, it is the phase that is wrong."""
    if whole.status is not Status.PASS:
        return whole
    return Verdict(
        status=Status.FAIL,
        message=f"it isn't found in phase {due}: asked {_WITHOUT[due].removeprefix('again ')}: {verdict.message}",
    )


def _ask_until(phase: str, case: Case, ask: Ask) -> Answer:
    """Ask what shows no more than a phase may know."""
    if phase == PHASES[-1]:
        return _ask_about(case, ask, case.request)
    request = case.request and {name: value for name, value in case.request.items() if name != "verify"}
    return _ask_about(case, ask, request, _exchange_tensors if phase == "open" else None)


def _ask_about(
    case: Case, ask: Ask, request: Mapping[str, Any] | None, change: Callable[[str, bytes], bytes] | None = None
) -> Answer:
    """Ask about files that are written for this question alone."""
    with tempfile.TemporaryDirectory(prefix="ckptfmt-conformance-") as folder:
        # Nothing of anybody else's lies beside what is opened: a reader may look for bases there.
        return ask(case.write_files(Path(folder) / "input", change), request)


def _exchange_tensors(path: str, content: bytes) -> bytes:
    """Return other bytes of the same number for a file of tensors, and of any other file its content."""
    return content.translate(_OTHER_BYTES) if path.endswith(_TENSORS) else content
