"""What README of the suite says of campaigns is what their reports say."""

import json
from pathlib import Path

from ckptfmt_conformance.chaos.kinds import KINDS
from ckptfmt_conformance.chaos.report import sum_of

CONFORMANCE = Path(__file__).parents[2] / "conformance"
REPORTS = [
    json.loads(path.read_text("utf-8"))
    for path in sorted((CONFORMANCE / "records").glob("chaos-*.json"))
]


def test_the_table_is_the_sum_of_the_reports():
    assert sum_of(REPORTS) in (CONFORMANCE / "README.md").read_text("utf-8")


def test_each_proven_kind_was_injected():
    injected = {one["kind"] for report in REPORTS for one in report["injections"]}
    assert injected == {kind.name for kind in KINDS}
    assert {report["options"]["nodes"] for report in REPORTS} == {2, 3, 4}
