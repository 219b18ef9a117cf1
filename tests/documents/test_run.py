"""run.json and launch records."""

from typing import Any

import pytest

from ckptfmt.documents.canonical import dump_document
from ckptfmt.documents.manifest import Reference
from ckptfmt.documents.run import Launch, RunRecord, launch_name, parse_launch_name
from ckptfmt.errors import Code, FormatError
from tests.builders import NONCE, RUN_ID, code_of, error_of, parse_json

DIGEST = "blake3:" + "a" * 64
RESUME = Reference(name="step-00000400-l0001", digest=DIGEST)
LAUNCH = Launch(run_id=RUN_ID, launch=3, nonce=NONCE, chosen_by="hand", resume_from=RESUME)


def test_records_come_back():
    """REQ-RUN-001, REQ-RUN-002."""
    for run in (RunRecord(run_id=RUN_ID), RunRecord(run_id=RUN_ID, writer_features=("packs",))):
        assert RunRecord.parse(run.dump()) == run
    for resume in (None, RESUME):
        for chosen_by in ("lineage", "fallback", "hand"):
            launch = Launch(
                run_id=RUN_ID, launch=3, nonce=NONCE, chosen_by=chosen_by, resume_from=resume
            )
            assert Launch.parse(launch.dump(), where="launches/0003.json") == launch


@pytest.mark.parametrize("number", [0, 1, 9999, 10_000, 12_345_678])
def test_numbers_stand_in_names(number):
    """REQ-RUN-005: numbers are numbers."""
    assert parse_launch_name(launch_name(number)) == number


@pytest.mark.parametrize(
    "name",
    [
        "",
        "3.json",
        "003.json",
        "00003.json",
        "0003.JSON",
        "0003.json\n",
        " 0003.json",
        "0003",
        "0003.json.tmp",
        "-003.json",
        "+003.json",
        "0x03.json",
        "\u0660\u0660\u0660\u0663.json",
        "00_3.json",
        "9" * 60 + ".json",
        "0003/.json",
        ".0003.json",
    ],
)
def test_other_names_are_no_records(name):
    """REQ-RUN-005; row 31."""
    assert parse_launch_name(name) is None


@pytest.mark.parametrize(
    "place", ["launches/0004.json", "launches/3.json", "0004.json", "launches/00003.json"]
)
def test_the_number_in_the_name_counts(place):
    """REQ-RUN-005."""
    error = error_of(lambda: Launch.parse(LAUNCH.dump(), where=place))
    assert (error.code, error.where, error.requirement) == (Code.RUN_MISMATCH, place, "REQ-RUN-005")


WRONG: dict[str, list[Any]] = {
    "launch": [True, -1, "3", None, 2**53],
    "nonce": ["", "A" * 32, "0" * 33, None],
    "run_id": ["", None, "g" * 32, "0" * 31],
    "chosen_by": ["chance", "", None, "Hand"],
    "resume_from": [
        {},
        [],
        "x",
        {"name": RESUME.name},
        {"digest": DIGEST},
        {"name": RESUME.name, "digest": DIGEST, "x": 1},
        {"name": "../x", "digest": DIGEST},
        {"name": "/step-00000400-l0001", "digest": DIGEST},
        {"name": "step-400-l1", "digest": DIGEST},
        {"name": RESUME.name, "digest": DIGEST.upper()},
        {"name": RESUME.name, "digest": "md5:" + "a" * 64},
        {"name": RESUME.name, "digest": DIGEST[:-1]},
        {
            "name": "step-\u0660\u0660\u0660\u0660\u0660\u0664\u0660\u0660-l\u0660\u0660\u0660\u0661",
            "digest": DIGEST,
        },
    ],
}


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, values in WRONG.items() for value in values]
)
def test_wrong_members_are_refused(key, value):
    """REQ-RUN-001, REQ-RUN-002, REQ-RUN-006, REQ-RUN-007; rows 31, 32, 37 and 38."""
    content = dump_document({**parse_json(LAUNCH.dump()), key: value})
    code = code_of(lambda: Launch.parse(content, where="launches/0003.json"))
    assert code == (Code.DOC_NUMBER if value == 2**53 else Code.DOC_SCHEMA)


@pytest.mark.parametrize(
    "document", [RunRecord(run_id=RUN_ID).dump(), LAUNCH.dump()], ids=["run", "launch"]
)
def test_a_record_is_not_taken_for_another(document):
    """REQ-DOC-011."""
    other = Launch.parse if b'"type":"run"' in document else RunRecord.parse
    error = error_of(lambda: other(document, where="launches/0003.json"))
    assert (error.code, type(error)) == (Code.DOC_SCHEMA, FormatError)
