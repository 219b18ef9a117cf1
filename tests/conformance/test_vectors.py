"""The vectors of the conformance suite: well-formed, up to date, and what ckptfmt makes of each."""

import functools
import json
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest

from ckptfmt_conformance.callers import find_target
from ckptfmt_conformance.cases import load_cases
from ckptfmt_conformance.runner import run_cases
from conformance.generate.__main__ import differences
from conformance.generate.cases import BUG_CLASSES
from conformance.generate.coverage import TABLE, find_gaps, table_text
from conformance.generate.fields import PAGE, fields_text
from conformance.generate.kept import KEPT, edited_versions, is_kept
from conformance.generate.pages import all_cases
from conformance.generate.wire import FORMAT_VERSION
from tests.conformance.judging import PHASES, judge
from tests.spec.pages import ROOT, clauses, fences, page, table

VECTORS = ROOT / "conformance" / "vectors"
KINDS = {"open", "read", "reshard", "write", "context", "parse"}
MEMBERS = {
    "id": str, "description": str, "requirements": list, "kind": str, "roles": list, "spec": str, "features": list,
    "derived_from": str | None, "edit": str | None, "path": str, "request": dict, "expect": dict, "bug_class": str,
    "why": str, "source": dict,
}  # fmt: skip
RESULTS = {
    "open": {"tensors"},
    "open launch": {"launch"},
    "read": {"blake3"},
    "reshard": {"digests"},
    "write": {"tensors", "step"},
    "context": {"tree"},
    "context samples": {"steps"},
    "context samples ahead": {"steps", "commit", "ledger"},
    "context loader": {"state", "reported"},
    "parse document": set(),
    "parse value": {"value"},
}

#: Cases that ckptfmt doesn't pass yet, each with what is wrong there.
FAILING: dict[str, str] = {}


@functools.cache
def cases():
    found = {}
    for path in sorted(VECTORS.rglob("case.json")):
        name = path.parent.relative_to(VECTORS).as_posix()
        if not is_kept(name.partition("/")[0]):
            found[name] = json.loads(path.read_text("utf-8"))
    return found


def refused():
    return {name: case for name, case in cases().items() if case["expect"]["outcome"] == "reject"}


def codes_of(case):
    error = case["expect"]["error"]
    return error if isinstance(error, list) else [error]


# --- form -------------------------------------------------------------------------------------------------------------


def test_there_are_enough():
    assert len(refused()) >= 130
    assert len(cases()) - len(refused()) >= 60


def test_they_are_small():
    sizes = [path.stat().st_size for path in VECTORS.rglob("*") if path.is_file()]

    assert sum(sizes) < 5_000_000
    assert max(sizes) <= 80_000  # trees that are more than the 64 KiB which any part may have


def test_a_case_has_the_members_of_its_form():
    wrong = []
    for name, case in cases().items():
        missing = MEMBERS.keys() - case.keys() - {"request"}
        wrong += [f"{name}: {sorted(missing)} are missing"] if missing else []
        wrong += [f"{name}: {key}" for key, value in case.items() if not isinstance(value, MEMBERS.get(key, ()))]

    assert not wrong, "\n".join(wrong)


def test_a_case_is_called_as_its_folder_is():
    wrong = [name for name, case in cases().items() if case["id"] != name]
    misplaced = [
        name for name, case in cases().items() if name.split("/")[1] != ("invalid" if name in refused() else "valid")
    ]

    assert not wrong
    assert not misplaced
    assert not [name for name in cases() if not re.fullmatch(r"[a-z]+/(in)?valid/[a-z0-9]+([-.][a-z0-9]+)*", name)]


def test_members_are_of_their_kinds():
    for name, case in cases().items():
        assert case["kind"] in KINDS, name
        assert case["bug_class"] in BUG_CLASSES, name
        assert case["spec"] == FORMAT_VERSION, name
        assert case["roles"] == (["writer"] if case["kind"] == "write" else ["reader"]), name
        assert all(text and "\n" not in text for text in (case["description"], case["why"])), name
        assert (VECTORS / name / case["path"]).is_dir(), name


def test_the_version_is_that_of_the_specification():
    assert f'`"{FORMAT_VERSION}"`' in "\n".join(page("95-versions-and-extensions.md").lines)


def test_a_refused_case_derives_from_one_that_is_accepted():
    wrong = [name for name, case in refused().items() if case["derived_from"] not in cases().keys() - refused().keys()]

    assert not wrong
    assert not [name for name, case in refused().items() if not case["edit"]]
    assert not [
        name for name, case in cases().items() if name not in refused() and (case["edit"] or case["derived_from"])
    ]


def test_requirements_are_clauses_that_a_test_can_check():
    testable = {clause.label for clause in clauses() if not clause.withdrawn}
    wrong = {name: set(case["requirements"]) - testable for name, case in cases().items()}

    assert not {name: labels for name, labels in wrong.items() if labels}
    assert not [name for name, case in cases().items() if not case["requirements"]]


def what_is_asked(case):
    if "launch" in case.get("request", {}):
        return "open launch"
    if case["kind"] == "parse":
        return f"parse {'value' if case['request']['form'] in ('tree', 'msgpack', 'packed', 'strings') else 'document'}"
    if case["kind"] != "context" or "request" not in case:
        return case["kind"]
    ((asked, members),) = case["request"].items()
    return f"context {asked} ahead" if "fetched" in members else f"context {asked}"


def test_a_case_of_context_or_launch_needs_what_its_request_is_called():
    for name, case in cases().items():
        if case["kind"] == "context" or "launch" in case.get("request", {}):
            assert case["features"] == list(case.get("request", {})), name


def test_a_parse_case_needs_its_form():
    asked = {name: case for name, case in cases().items() if case["kind"] == "parse"}

    for name, case in asked.items():
        assert case["request"].keys() == {"form", "file"}, name
        assert case["features"][0] == f"parse-{case['request']['form']}", name
        assert [
            path.relative_to(VECTORS / name / "input").as_posix() for path in files_of(VECTORS / name / "input")
        ] == [case["request"]["file"]], name
    assert asked


def files_of(folder):
    return [path for path in folder.rglob("*") if path.is_file()]


def test_every_example_of_the_pages_is_a_case():
    """A document and each line of examples; what no reader can be asked is a picture or a session in Python."""
    counted = Counter(
        (fence.page.partition("-")[0], "->" in line)
        for fence in fences()
        if fence.language in ("json", "edits", "rejects", "hex")
        for _, line in (fence.numbered_lines() if fence.language != "json" else [(0, "")])
    )
    made = Counter(
        (case["description"].split()[1].rstrip(":"), name in refused())
        for name, case in cases().items()
        if case["kind"] == "parse"
    )

    assert {fence.language for fence in fences()} == {"text", "python", "json", "edits", "rejects", "hex"}
    assert made == counted
    assert made.total() > 300


def test_every_case_says_what_to_expect():
    known = {row[0].strip("`") for row in table("80-errors.md", "Code")}
    for name, case in cases().items():
        expect = case["expect"]
        if expect["outcome"] == "accept":
            assert expect.keys() - {"outcome"} == RESULTS[what_is_asked(case)], name
        else:
            assert expect.keys() == {"outcome", "error", "phase"}, name
            assert expect["phase"] in PHASES, name
            assert set(codes_of(case)) <= known, name


def test_a_code_is_one_that_a_clause_of_the_case_names():
    """REQ-VER-004: one of the codes, that is; where several will do, the others are those of earlier clauses."""
    named = {clause.label: set(clause.codes) for clause in clauses()}
    wrong = [
        f"{name}: {codes_of(case)} against {case['requirements']}"
        for name, case in refused().items()
        if not set(codes_of(case)) & ({"DOC_SCHEMA"} | set().union(*(named[label] for label in case["requirements"])))
    ]

    assert not wrong, "\n".join(wrong)


def test_there_are_no_links():
    assert not [path for path in VECTORS.rglob("*") if path.is_symlink()]


# --- the generator ----------------------------------------------------------------------------------------------------


def test_generated_again_they_are_the_same():
    assert differences(VECTORS) == []


def test_every_testable_clause_is_covered():
    assert find_gaps(all_cases()) == []


def test_the_table_of_coverage_is_up_to_date():
    assert TABLE.read_text("utf-8") == table_text(all_cases())


def test_the_table_of_members_is_up_to_date():
    assert PAGE.read_text("utf-8") == fields_text()


@pytest.mark.parametrize("version", KEPT)
def test_the_vectors_of_earlier_versions_are_as_they_were(version, tmp_path):
    for kept in KEPT:
        shutil.copytree(VECTORS / kept, tmp_path / kept)
    assert edited_versions(VECTORS) == edited_versions(tmp_path) == []

    with (tmp_path / version / "run" / "valid" / "simple" / "case.json").open("a") as file:
        file.write(" ")

    assert edited_versions(tmp_path) == [version]


def test_a_reader_refuses_those_of_an_earlier_version_by_that():
    """REQ-VER-001."""
    kept = [case for case in load_cases(VECTORS) if case.id.partition("/")[0] in KEPT]

    run = run_cases(find_target("reference"), kept, jobs=1)

    assert len(kept) == 6 * len(KEPT)
    assert {(result.status, result.case.spec) for result in run.results} == {("PASS", version) for version in KEPT}


# --- what ckptfmt makes of them ---------------------------------------------------------------------------------------


def named(name):
    marks = [pytest.mark.xfail(reason=FAILING[name], strict=True)] if name in FAILING else []
    return pytest.param(name, id=name, marks=marks)


@pytest.mark.parametrize("name", [named(name) for name in cases()])
def test_ckptfmt_answers_as_expected(name, tmp_path_factory):
    """REQ-VER-004, REQ-ERR-001: accepted with these bytes, or refused with this code in this phase."""
    problem = judge(VECTORS / name, cases()[name], lambda: Path(tmp_path_factory.mktemp("out")))

    assert problem is None, problem


def test_the_list_of_failing_cases_names_cases():
    assert FAILING.keys() <= cases().keys()
