"""Verdicts: an adapter's answer is compared with the expected result.

No answer passes by default.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from ckptfmt_conformance.cases import PHASES, Case, Expectation
from ckptfmt_conformance.protocol import Answer, Description
from ckptfmt_conformance.readback import ReadbackError, read_back

__all__ = [
    "INTEGRITY",
    "NOT_FOUND",
    "RED",
    "REQUEST",
    "UNSUPPORTED",
    "Status",
    "Verdict",
    "due",
    "find_reason_to_skip",
    "judge",
]


class Status(StrEnum):
    """The result of a case. Reports count each status separately."""

    PASS = "PASS"
    FAIL = "FAIL"
    UNSUPPORTED = "UNSUPPORTED"
    SKIPPED = "SKIPPED"
    ERROR = "ERROR"
    XFAIL = "XFAIL"
    XPASS = "XPASS"


#: The statuses that make a run red. An expected failure that passes is red too, since the list of
#: expected failures has to be corrected.
RED: Final = frozenset({Status.FAIL, Status.ERROR, Status.XPASS})


#: The codes of three classes of refusals by a reader of the core; all other codes are of the class
#: of broken formats (specification, page 70).
NOT_FOUND: Final = frozenset({"NOT_COMMITTED"})
INTEGRITY: Final = frozenset(
    {
        "BLOCK_DIGEST",
        "CHECKPOINT_ABORTED",
        "CHECKPOINT_RETIRED",
        "DOC_DIGEST",
        "FILE_MISSING",
        "FILE_NBYTES",
        "HEADER_DIGEST",
    }
)
UNSUPPORTED: Final = frozenset({"FEATURE_UNSUPPORTED", "VERSION_UNSUPPORTED"})
#: The codes of wrong requests.
REQUEST: Final = frozenset({"ARGUMENT", "TENSOR_MISSING"})
#: The form of a code.
_CODE: Final = re.compile(r"[A-Z][A-Z0-9_]{2,40}")
#: The profile whose readers refuse with exactly the expected code.
_NAMES_FAULTS: Final = "R-validate"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A status, and the reason: a sentence, which more lines may follow."""

    status: Status
    message: str = ""


def find_reason_to_skip(case: Case, description: Description) -> str:
    """Return why an adapter isn't asked a case; "" if the adapter is asked.

    An adapter chooses the roles, kinds, profiles and versions in its description. Every report
    shows the cases that are skipped because of them.
    """
    if case.roles and not set(case.roles) & set(description.roles):
        return f"it isn't a {' or '.join(case.roles)}"
    if case.kind not in description.kinds:
        return f"it doesn't do {case.kind}"
    missing = sorted(set(case.profiles) - set(description.profiles))
    if missing and description.profiles:
        return f"it doesn't claim {' and '.join(missing)}"
    if not _speaks(case, description) and (case.kind != "open" or case.expect.outcome == "reject"):
        return f"it doesn't speak version {case.spec} of the format"
    return ""


def due(case: Case, description: Description) -> Expectation:
    """Return the expected result of a case for an adapter.

    An adapter without the case's version has to refuse with ``VERSION_UNSUPPORTED``.
    """
    if _speaks(case, description):
        return case.expect
    return Expectation(outcome="reject", errors=("VERSION_UNSUPPORTED",), phase="open")


def _speaks(case: Case, description: Description) -> bool:
    return not case.spec or case.spec in description.spec


def judge(  # noqa: PLR0911 - a return for each kind of answer
    case: Case, description: Description, answer: Answer, output: Path | None = None
) -> Verdict:
    """Return the verdict on an answer.

    Args:
        output: the path where the adapter was asked to write a checkpoint; None for other
            questions.
    """
    if answer.outcome == "error":
        return Verdict(status=Status.ERROR, message=answer.message)
    expect = due(case, description)
    # The version is compared before the features, because a feature may mean another thing in
    # another version.
    lacking = (
        set(case.features) - set(description.features) if _speaks(case, description) else set()
    )
    if answer.outcome == "unsupported":
        if lacking:
            return Verdict(status=Status.UNSUPPORTED, message=str(answer.body["feature"]))
        needs = (
            f"needs {', '.join(case.features)}, which it says it has"
            if case.features
            else "needs no feature"
        )
        message = f"it says that it doesn't support {answer.body['feature']}; the case {needs}"
        return Verdict(status=Status.FAIL, message=message)
    if answer.outcome == "rejected":
        # A reader without a feature has to refuse with this code, so the refusal is right.
        if lacking and answer.body["error"] == "FEATURE_UNSUPPORTED":
            return Verdict(status=Status.UNSUPPORTED, message=", ".join(sorted(lacking)))
        is_by_class = bool(description.profiles) and _NAMES_FAULTS not in description.profiles
        return _verdict(_compare_refusal(expect, answer.body, is_by_class=is_by_class))
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


def _class_of(code: str) -> frozenset[str]:
    """Return the class of a code, as the set of its codes; empty for the class of all others."""
    classes = (NOT_FOUND, INTEGRITY, UNSUPPORTED, REQUEST)
    return next((one for one in classes if code in one), frozenset())


def _compare_code(code: str, expected: Sequence[str], *, is_by_class: bool) -> str:
    """Return the fault of a refusal's code; "" if the code is right."""
    names = " or ".join(expected)
    if not is_by_class:
        return "" if code in expected else f" instead of {names}"
    if not _CODE.fullmatch(code):
        return ", which is no code"
    is_right = _class_of(code) in map(_class_of, expected)
    return "" if is_right else f", which is of another class than {names}"


def _compare_refusal(expect: Expectation, body: Mapping[str, Any], *, is_by_class: bool) -> str:
    """Return the fault of a refusal; "" if the refusal is right.

    Args:
        is_by_class: whether any code of the class of an expected code is right.
    """
    code = body["error"]
    phase = body.get("phase")
    said = f"refused with {code}" + (f" at {body['where']}" if body.get("where") else "")
    if expect.outcome == "accept":
        return f"{said}, though it must be accepted"
    if complaint := _compare_code(code, expect.errors, is_by_class=is_by_class):
        return f"{said}{complaint}"
    if expect.phase:
        if phase not in PHASES:
            return f"{said}, but in no phase: {phase!r} instead of one of {', '.join(PHASES)}"
        # An earlier phase is accepted: the reader has handed out no faulty content.
        if PHASES.index(phase) > PHASES.index(expect.phase):
            return f"{said}, but only in phase {phase}; it must be refused in phase {expect.phase}"
    return ""


def _compare_members(expected: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """Return the first difference from the expected members; "" for none.

    More members are allowed.
    """
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
            if complaint := _difference(
                f"tensor {name!r}: {member}", value, found[name].get(member)
            ):
                return complaint
    return ""


def _compare_leaves(expected: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """Return the first difference among the expected leaves.

    More leaves, such as the topology, are allowed.
    """
    for name, value in expected.items():
        if complaint := _difference(f"leaf {name!r}", value, found.get(name)):
            return complaint
    return ""


def _difference(what: str, expected: object, found: object) -> str:
    if _plain(expected) == _plain(found):
        return ""
    return f"{what} is {_short(found)} instead of {_short(expected)}"


def _plain(value: object) -> str:
    """Return a value as canonical text for comparison.

    The texts of 1, 1.0 and true differ. Digests are equal with and without the prefix ``blake3:``.
    """
    return json.dumps(value, sort_keys=True).replace('"blake3:', '"')


def _short(value: object) -> str:
    text = json.dumps(value, sort_keys=True)
    return text if len(text) <= 100 else f"{text[:97]}..."
