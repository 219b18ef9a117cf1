"""The vectors of the conformance suite: well-formed, up to date, and what ckptfmt makes of each."""

import functools
import json
import re
import shutil
from collections import Counter
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from referencing import Registry, Resource

from ckptfmt.documents.msgpk import parse_packed_document
from ckptfmt_conformance.callers import find_target
from ckptfmt_conformance.runner import run_cases
from conformance.generate.areas import find_differences, write_areas
from conformance.generate.cases import BUG_CLASSES
from conformance.generate.coverage import TABLE, find_gaps, table_text
from conformance.generate.fields import PAGE, fields_text
from conformance.generate.kept import KEPT, edited_versions, is_kept
from conformance.generate.pages import all_cases
from conformance.generate.wire import FORMAT_VERSION
from tests.conformance.judging import PHASES, judge
from tests.conformance.vectors import VECTORS, cases_by_id, read_area
from tests.spec.pages import SCHEMA, clauses, fences, page, table
from tests.spec.views import view_of

KINDS = {"open", "read", "reshard", "write", "context", "parse"}
MEMBERS = {
    "id": str, "description": str, "requirements": list, "kind": str, "roles": list, "spec": str, "profiles": list,
    "features": list,
    "derived_from": str | None, "edit": str | None, "path": str, "request": dict, "expect": dict, "bug_class": str,
    "why": str, "source": dict, "files": dict,
}  # fmt: skip
RESULTS = {
    "open": {"tensors"},
    "open launch": {"launch"},
    "read": {"blake3"},
    "reshard": {"digests"},
    "write": {"tensors", "step"},
    "write lists": {"tensors", "step", "leaves"},
    "context": {"tree"},
    "context samples": {"steps"},
    "context samples ahead": {"steps", "commit", "ledger"},
    "context tickets": {"tickets"},
    "context tickets ahead": {"tickets", "pipeline", "ledger"},
    "context loader": {"state", "reported"},
    "parse document": set(),
    "parse value": {"value"},
}

#: Cases that ckptfmt doesn't pass yet, each with what is wrong there.
FAILING: dict[str, str] = {}


@functools.cache
def cases():
    areas = [path for path in sorted(VECTORS.glob("*.json")) if not is_kept(path.stem)]
    return {case["id"]: case for path in areas for case in read_area(path)}


def refused():
    return {name: case for name, case in cases().items() if case["expect"]["outcome"] == "reject"}


def codes_of(case):
    error = case["expect"]["error"]
    return error if isinstance(error, list) else [error]


# --- form -----------------------------------------------------------------------------------------


def test_there_are_enough():
    assert len(refused()) >= 130
    assert len(cases()) - len(refused()) >= 60


def test_they_are_small():
    sizes = [path.stat().st_size for path in VECTORS.rglob("*") if path.is_file()]
    contents = [len(content) for case in cases_by_id().values() for content in case.files.values()]

    assert sum(sizes) < 5_500_000
    assert max(sizes) < 500_000  # what a browser shows of a repository without being asked
    assert max(contents) <= 80_000  # trees that are more than the 64 KiB which any part may have


def test_a_case_has_the_members_of_its_form():
    wrong = []
    for name, case in cases().items():
        missing = MEMBERS.keys() - case.keys() - {"request"}
        wrong += [f"{name}: {sorted(missing)} are missing"] if missing else []
        wrong += [
            f"{name}: {key}"
            for key, value in case.items()
            if not isinstance(value, MEMBERS.get(key, ()))
        ]

    assert not wrong, "\n".join(wrong)


def test_a_case_is_called_by_its_area_and_its_outcome():
    assert list(cases()) == sorted(cases())
    misplaced = [
        name
        for name, case in cases().items()
        if name.split("/")[1] != ("invalid" if name in refused() else "valid")
    ]

    assert not misplaced
    assert not [
        name
        for name in cases()
        if not re.fullmatch(r"[a-z]+/(in)?valid/[a-z0-9]+([-.][a-z0-9]+)*", name)
    ]


def test_members_are_of_their_kinds():
    for name, case in cases().items():
        assert case["kind"] in KINDS, name
        assert case["bug_class"] in BUG_CLASSES, name
        assert case["spec"] == FORMAT_VERSION, name
        assert case["roles"] == (["writer"] if case["kind"] == "write" else ["reader"]), name
        assert all(text and "\n" not in text for text in (case["description"], case["why"])), name
        assert case["kind"] == "write" or case["path"] == "." or any(
            path.startswith(f"{case['path']}/") for path in case["files"]
        ), name  # fmt: skip
        assert bool(case["files"]) == (case["kind"] != "write"), name


def test_the_version_is_that_of_the_specification():
    assert f'`"{FORMAT_VERSION}"`' in "\n".join(page("95-versions-and-extensions.md").lines)


def test_a_refused_case_derives_from_one_that_is_accepted():
    wrong = [
        name
        for name, case in refused().items()
        if case["derived_from"] not in cases().keys() - refused().keys()
    ]

    assert not wrong
    assert not [name for name, case in refused().items() if not case["edit"]]
    assert not [
        name
        for name, case in cases().items()
        if name not in refused() and (case["edit"] or case["derived_from"])
    ]


def test_requirements_are_clauses_that_a_test_can_check():
    testable = {clause.label for clause in clauses() if not clause.withdrawn}
    wrong = {name: set(case["requirements"]) - testable for name, case in cases().items()}

    assert not {name: labels for name, labels in wrong.items() if labels}
    assert not [name for name, case in cases().items() if not case["requirements"]]


def what_is_asked(case):
    if "launch" in case.get("request", {}):
        return "open launch"
    if "/write-list-" in case["id"]:
        return "write lists"
    if case["kind"] == "parse":
        return (
            "parse"
            f" {'value' if case['request']['form'] in ('tree', 'msgpack', 'packed', 'strings') else 'document'}"
        )
    if case["kind"] != "context" or "request" not in case:
        return case["kind"]
    ((asked, members),) = case["request"].items()
    is_ahead = {"fetched", "issued"} & members.keys()
    return f"context {asked} ahead" if is_ahead else f"context {asked}"


def test_a_case_of_context_or_launch_needs_what_its_request_is_called():
    for name, case in cases().items():
        if case["kind"] == "context" or "launch" in case.get("request", {}):
            assert case["features"] == list(case.get("request", {})), name


def test_a_parse_case_needs_its_form():
    asked = {name: case for name, case in cases().items() if case["kind"] == "parse"}

    for name, case in asked.items():
        assert case["request"].keys() == {"form", "file"}, name
        assert case["features"][0] == f"parse-{case['request']['form']}", name
        assert list(case["files"]) == [case["request"]["file"]], name
    assert asked


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

    assert {fence.language for fence in fences()} == {
        "text",
        "python",
        "json",
        "edits",
        "rejects",
        "hex",
    }
    assert made == counted
    assert made.total() > 300


def test_every_case_says_what_to_expect():
    known = {row[0].strip("`") for row in table("81-errors.md", "Code")}
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
        if not set(codes_of(case))
        & ({"DOC_SCHEMA"} | set().union(*(named[label] for label in case["requirements"])))
    ]

    assert not wrong, "\n".join(wrong)


def test_the_reader_in_the_readme_reads_what_the_suite_reads():
    text = (VECTORS / "README.md").read_text("utf-8")
    (program,) = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    given: dict[str, Any] = {}
    exec(program, given)
    read = {
        case["id"]: case["files"]
        for path in VECTORS.glob("*.json")
        for case in given["read_cases"](VECTORS, path.stem)
    }

    assert read == {name: case.files for name, case in cases_by_id().items()}
    assert {f"`{name}`" for name in MEMBERS} - {"`derived_from`", "`edit`"} <= set(
        re.findall(r"`[a-z_]+`", text)
    )


def test_equal_contents_stand_once_in_an_area_and_none_is_there_for_nothing():
    for path in VECTORS.glob("*.json"):
        contents = json.loads((VECTORS / "files" / path.name).read_text("utf-8"))
        used = {key for case in read_area(path) for key in case["files"].values()}
        assert used == contents.keys(), path.name
        assert len({json.dumps(entry) for entry in contents.values()}) == len(contents), path.name


def signed_documents(case):
    """Yield the type and the JSON view of each document among the files of a case, but for leftovers that are none."""
    for path, content in case.files.items():
        if content in (b"x", b"{}", b"left"):
            continue
        if path.endswith(".json"):
            signed = json.loads(content)["signed"]
            yield signed["type"], signed
        elif re.fullmatch(
            r"(.*/)?(index-[0-9a-f]{16}|parts/[0-9a-f]{16}-[0-9]{5,})\.msgpack", path
        ):
            signed = parse_packed_document(content, where=path)[0]
            yield signed["type"], view_of(signed)


def test_documents_of_accepted_cases_fit_their_schemas():
    """REQ-DOC-011: what a schema refuses, other people's tools refuse."""
    named = {path.name: json.loads(path.read_text("utf-8")) for path in SCHEMA.glob("*.json")}
    registry: Registry[Any] = Registry().with_resources(
        [(name, Resource.from_contents(schema)) for name, schema in named.items()]
    )
    validators = {
        name: Draft202012Validator(schema, registry=registry) for name, schema in named.items()
    }
    found = {
        json.dumps([kind, view], sort_keys=True): (name, kind, view)
        for name, case in cases_by_id().items()
        if case.kind == "open"
        and case.expect.outcome == "accept"
        and "tensors" in case.expect.members
        if (case.request or {}).get("verify") == "all" and case.spec == FORMAT_VERSION
        for kind, view in signed_documents(case)
        if view["format_version"] == FORMAT_VERSION
    }
    wrong = [
        f"{name}: {kind}: {error.message[:200]}"
        for name, kind, view in found.values()
        for error in validators[f"{kind}.schema.json"].iter_errors(view)
    ]

    assert {kind for _, kind, _ in found.values()} >= {"manifest", "index", "part", "run", "launch"}
    assert not wrong, "\n".join(wrong)


# --- the generator --------------------------------------------------------------------------------


def test_generated_again_they_are_the_same():
    assert find_differences(all_cases(), VECTORS) == []


def edited_copy(folder, name, old, new):
    """Copy the vectors, and edit one of their files."""
    shutil.copytree(VECTORS, folder, dirs_exist_ok=True)
    text = (folder / name).read_text("utf-8")
    assert old in text
    (folder / name).write_text(text.replace(old, new, 1), "utf-8")
    return folder


def test_a_check_says_which_case_was_edited(tmp_path):
    gap, name_of_gap = (
        '"description": "a box of the pinwheel is one row shorter"',
        '"id": "index/invalid/tiling-gap"',
    )
    for name, old, new, line in (
        ("index.json", gap, '"description": ""', ("index/invalid/tiling-gap isn't what is"
        " generated: description")),
        ("index.json", name_of_gap, '"id": "index/invalid/a"', "index/invalid/a isn't among"),
        ("index.json", name_of_gap, '"id": "index/invalid/a"', ("index/invalid/tiling-gap is"
        " missing")),
        ("index.json", "  {", "   {", "index.json isn't written as it is generated"),
        ("index.json", "[", "", "index.json can't be read"),
        ("files/documents.json", "{\n", "{\n" + '"00": {"text": ""},\n', ("files/documents.json"
        " isn't written as")),
    ):  # fmt: skip
        found = find_differences(all_cases(), edited_copy(tmp_path, name, old, new))
        assert any(text.startswith(line) for text in found), (line, found)
        assert len(found) <= 2

    key = cases_by_id()["index/invalid/tiling-gap"].files["manifest.json"].decode()
    found = find_differences(
        all_cases(), edited_copy(tmp_path, "files/index.json", json.dumps(key), '""')
    )
    assert found == ["index/invalid/tiling-gap isn't what is generated: manifest.json"]


def test_a_check_says_which_area_is_missing_or_left_over(tmp_path):
    shutil.copytree(VECTORS, tmp_path, dirs_exist_ok=True)
    (tmp_path / "trees.json").rename(tmp_path / "bushes.json")
    found = find_differences(all_cases(), tmp_path)

    assert sum(line.endswith("is missing") for line in found) == sum(
        name.startswith("trees/") for name in cases()
    )
    assert find_differences(all_cases(), tmp_path / "none")


def test_written_again_what_is_left_over_goes_and_what_is_kept_stays(tmp_path):
    shutil.copytree(VECTORS, tmp_path, dirs_exist_ok=True)
    (tmp_path / "trees.json").rename(tmp_path / "bushes.json")

    write_areas(all_cases(), tmp_path)

    there, here = (
        {path.relative_to(root): path.read_bytes() for path in root.rglob("*.json")}
        for root in (tmp_path, VECTORS)
    )
    assert there == here


def test_every_testable_clause_is_covered():
    assert find_gaps(all_cases()) == []


def test_the_table_of_coverage_is_up_to_date():
    assert TABLE.read_text("utf-8") == table_text(all_cases())


def test_the_table_of_members_is_up_to_date():
    assert PAGE.read_text("utf-8") == fields_text()


@pytest.mark.parametrize("version", KEPT)
def test_the_vectors_of_earlier_versions_are_as_they_were(version, tmp_path):
    assert edited_versions(VECTORS) == []

    for name in (f"{version}.json", f"files/{version}.json"):
        assert edited_versions(edited_copy(tmp_path, name, "manifest", "Manifest")) == [version]


def test_a_reader_refuses_those_of_an_earlier_version_by_that():
    """REQ-VER-001."""
    kept = [case for case in cases_by_id().values() if case.id.partition("/")[0] in KEPT]

    run = run_cases(find_target("reference"), kept, jobs=1)

    assert len(kept) == 6 * len(KEPT)
    assert {(result.status, result.case.spec) for result in run.results} == {
        ("PASS", version) for version in KEPT
    }


# --- what ckptfmt makes of them -------------------------------------------------------------------


def named(name):
    marks = [pytest.mark.xfail(reason=FAILING[name], strict=True)] if name in FAILING else []
    return pytest.param(name, id=name, marks=marks)


@pytest.mark.parametrize("name", [named(name) for name in cases()])
def test_ckptfmt_answers_as_expected(name, tmp_path):
    """REQ-VER-004, REQ-ERR-001: accepted with these bytes, or refused with this code in this phase."""
    case = cases_by_id()[name]

    problem = judge(case.write_files(tmp_path / "input"), cases()[name], tmp_path / "out")

    assert problem is None, problem


def test_the_list_of_failing_cases_names_cases():
    assert FAILING.keys() <= cases().keys()
