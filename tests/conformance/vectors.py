"""The vectors as tests read them: what each case says, and a folder with the files of one."""

import functools
import json
from pathlib import Path
from typing import Any

from ckptfmt_conformance.cases import Case, load_cases, vectors_root

VECTORS = vectors_root()


@functools.cache
def cases_by_id() -> dict[str, Case]:
    """Return all cases as the suite reads them, those of earlier versions too."""
    return {case.id: case for case in load_cases(VECTORS)}


def read_area(path: Path) -> list[dict[str, Any]]:
    """Return what the cases of an area say, as it stands in the file."""
    cases: list[dict[str, Any]] = json.loads(path.read_text("utf-8"))
    return cases


def write_area(
    root: Path, area: str, cases: list[dict[str, Any]], contents: dict[str, dict[str, str]]
) -> None:
    """Write the two files of an area."""
    (root / "files").mkdir(parents=True, exist_ok=True)
    (root / f"{area}.json").write_text(json.dumps(cases), "utf-8")
    (root / "files" / f"{area}.json").write_text(json.dumps(contents), "utf-8")
