"""What an answer is worth: it is compared with what the case expects, and nothing is taken for a pass by default."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from ckptfmt_conformance.cases import PHASES, Case, Expectation
from ckptfmt_conformance.protocol import Answer, Description
from ckptfmt_conformance.readback import ReadbackError, read_back

__all__ = ["RED", "Status", "Verdict", "due", "find_reason_to_skip", "judge"]


class Status(StrEnum):
    """How a case went; kept apart everywhere."""

    PASS = "PASS"
    FAIL = "FAIL"
    UNSUPPORTED = "UNSUPPORTED"
    SKIPPED = "SKIPPED"
    ERROR = "ERROR"
    XFAIL = "XFAIL"
    XPASS = "XPASS"


#: What makes a run red. An expected failure that passes is among them: the list of them is to be mended.
RED: Final = frozenset({Status.FAIL, Status.ERROR, Status.XPASS})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A status, and why, in one sentence; more lines may follow."""

    status: Status
    message: str = ""


def find_reason_to_skip(case: Case, description: Description) -> str:
    """Return why an adapter isn't asked at all; "" if it is.

    What an adapter leaves out of its description is its own choice, and seen in every report.
    """
    if case.roles and not set(case.roles) & set(description.roles):
        return f"it isn't a {' or '.join(case.roles)}"
    if case.kind not in description.kinds:
        return f"it doesn't do {case.kind}"
    if not _speaks(case, description) and (case.kind != "open" or case.expect.outcome == "reject"):
        return f"it doesn't speak version {case.spec} of the format"
    return ""


def due(case: Case, description: Description) -> Expectation:
    """Return what is expected of an adapter: of one that doesn't speak the case's version, that it refuses by it."""
    if _speaks(case, description):
        return case.expect
    return Expectation(outcome="reject", errors=("VERSION_UNSUPPORTED",), phase="open")


def _speaks(case: Case, description: Description) -> bool:
    return not case.spec or case.spec in description.spec


def judge(  # noqa: PLR0911 - one for each kind of answer
    case: Case, description: Description, answer: Answer, output: Path | None = None
) -> Verdict:
    """Return what an answer is worth.

    Args:
        output: where a checkpoint was to be written.
    """
    if answer.outcome == "error":
        return Verdict(status=Status.ERROR, message=answer.message)
    expect = due(case, description)
    # The version comes before the features: of another one, what a feature means isn't known.
    lacking = set(case.features) - set(description.features) if _speaks(case, description) else set()
    if answer.outcome == "unsupported":
        if lacking:
            return Verdict(status=Status.UNSUPPORTED, message=str(answer.body["feature"]))
        needs = f"needs {', '.join(case.features)}, which it says it has" if case.features else "needs no feature"
        message = f"it says that it doesn't support {answer.body['feature']}; the case {needs}"
        return Verdict(status=Status.FAIL, message=message)
    if answer.outcome == "rejected":
        # What lacks a feature has to refuse by this very name, so this is the answer that was due.
        if lacking and answer.body["error"] == "FEATURE_UNSUPPORTED":
            return Verdict(status=Status.UNSUPPORTED, message=", ".join(sorted(lacking)))
        return _verdict(_compare_refusal(expect, answer.body))
    if expect.outcome == "reject":
        return _verdict(f"accepted, though it must be refused with {' or '.join(expect.errors)}")
    result = answer.body
    if case.kind == "write":
        if output is None:
            return Verdict(status=Status.ERROR, message="nothing to read back was given")
        try:
            result = read_back(output)
        except ReadbackError as error:
            return _verdict(f"what it wrote can't be read back: {error}")
    return _verdict(_compare_members(case.expect.members, result))


def _verdict(complaint: str) -> Verdict:
    return Verdict(status=Status.FAIL if complaint else Status.PASS, message=complaint)


def _compare_refusal(expect: Expectation, body: Mapping[str, Any]) -> str:
    """Return what is wrong with a refusal; "" if nothing is."""
    code, phase = body["error"], body.get("phase")
    said = f"refused with {code}" + (f" at {body['where']}" if body.get("where") else "")
    if expect.outcome == "accept":
        return f"{said}, though it must be accepted"
    if code not in expect.errors:
        return f"{said} instead of {' or '.join(expect.errors)}"
    if expect.phase:
        if phase not in PHASES:
            return f"{said}, but in no phase: {phase!r} instead of one of {', '.join(PHASES)}"
        # Sooner is as good: nothing of what is wrong was handed out.
        if PHASES.index(phase) > PHASES.index(expect.phase):
            return f"{said}, but only in phase {phase}; it must be refused in phase {expect.phase}"
    return ""


def _compare_members(expected: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """Return the first difference from what is expected; "" if there is none. More than is expected will do."""
    for name, value in expected.items():
        if name not in found:
            return f"the result has no {name!r}"
        if name == "tensors" and isinstance(value, dict):
            complaint = _compare_tensors(value, found[name])
        elif name == "leaves" and isinstance(value, dict):
            complaint = _compare_leaves(value, found[name])
        else:
            complaint = _difference(name, value, found[name])
        if complaint:
            return complaint
    return ""


def _compare_tensors(expected: Mapping[str, Any], found: object) -> str:
    if not isinstance(found, dict):
        return "the result's 'tensors' isn't an object"
    for name in sorted(expected.keys() | found.keys()):
        if name not in found:
            return f"tensor {name!r} is missing"
        if name not in expected:
            return f"tensor {name!r} isn't in the checkpoint"
        if not isinstance(found[name], dict):
            return f"tensor {name!r} isn't an object"
        for member, value in expected[name].items():
            if complaint := _difference(f"tensor {name!r}: {member}", value, found[name].get(member)):
                return complaint
    return ""


def _compare_leaves(expected: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """Return the first difference among the leaves that are expected; others may be there, such as the topology."""
    for name, value in expected.items():
        if complaint := _difference(f"leaf {name!r}", value, found.get(name)):
            return complaint
    return ""


def _difference(what: str, expected: object, found: object) -> str:
    if _plain(expected) == _plain(found):
        return ""
    return f"{what} is {_short(found)} instead of {_short(expected)}"


def _plain(value: object) -> str:
    """Return a value as canonical text: 1, 1.0 and true are three things, and digests go with or without prefix."""
    return json.dumps(value, sort_keys=True).replace('"blake3:', '"')


def _short(value: object) -> str:
    text = json.dumps(value, sort_keys=True)
    return text if len(text) <= 100 else f"{text[:97]}..."
