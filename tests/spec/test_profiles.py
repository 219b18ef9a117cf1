"""Profiles: each page and companion is in the tables of page 01, the core stays small, and each case names its profiles."""

import re
from pathlib import Path

import pytest

from ckptfmt.errors import Code, IntegrityError, UnsupportedError
from ckptfmt.features import READER_FEATURES, reader_profiles
from ckptfmt_conformance.judge import INTEGRITY, NOT_FOUND, UNSUPPORTED
from ckptfmt_conformance.protocol import _NEEDS
from conformance.generate.clauses import page_paths
from conformance.generate.kept import is_kept
from conformance.generate.profiles import companions, page_profiles, profiles_of_case
from tests.conformance.vectors import cases_by_id
from tests.spec.pages import SPEC, page, pages, table

READERS = {"R-core", "R-validate", "R-delta", "R-run", "R-context"}
WRITERS = {"W-core", "W-delta", "W-run"}
#: Pages of reference, which nobody implements.
REFERENCE = {"01-profiles.md", "02-policy.md", "CHANGES.md"}
#: Bounds of the core: the pages that an implementer of R-core reads, in words outside of examples.
CORE_WORDS = 6_000
CORE_CLAUSES = 100


def core_pages():
    return [one for one in pages() if page_profiles().get(relative(one.path), ("",))[0] == "R-core"]


def relative(path):
    return path.relative_to(SPEC).as_posix()


def words(one):
    """The words of a page outside of fences: what has a letter or a digit."""
    text = re.sub(r"^```.*?^```$", "", "\n".join(one.lines), flags=re.DOTALL | re.MULTILINE)
    return [word for word in text.split() if re.search(r"[A-Za-z0-9]", word)]


def test_each_page_belongs_to_a_profile_of_readers_and_to_one_of_writers():
    placed = page_profiles()
    expected = {
        relative(path)
        for path in page_paths(SPEC)
        if path.name not in REFERENCE and path.parent.name != "appendix"
    }

    assert placed.keys() == expected
    of_profiles = [pair for name, pair in placed.items() if not name.startswith("companions/")]
    assert {reader for reader, _ in of_profiles} == READERS
    assert {writer for _, writer in of_profiles} == WRITERS


def test_companions_say_their_status_as_page_01_does():
    for name, (path, status) in companions().items():
        assert f"Status: {status}." in page(Path(path).name).lines, name


def test_the_suite_asks_for_the_profiles_that_page_01_asks_for():
    rows = {row[0]: row[2] for row in table("01-profiles.md", "Profile")}
    of_page = {name: set(re.findall(r"[RW]-[a-z]+", needs)) for name, needs in rows.items()}
    # A writer of the core needs the pages of R-core, and no reader.
    of_page["W-core"] -= {"R-core"}

    assert of_page.keys() == READERS | WRITERS
    assert {name: set(_NEEDS.get(name, ("R-core",))) for name in of_page} == of_page


def test_the_core_is_small():
    """Nobody reads more than these words for R-core. If a word must come in, another one goes."""
    counted = {one.name: len(words(one)) for one in core_pages()}
    clauses = [clause for one in core_pages() for clause in one.clauses if "R" in clause.roles]

    assert len(counted) == 10
    assert sum(counted.values()) <= CORE_WORDS, counted
    assert len(clauses) <= CORE_CLAUSES


@pytest.mark.parametrize("one", core_pages(), ids=lambda one: one.name)
def test_a_page_of_the_core_leads_to_no_other_chapter(one):
    """An implementer of R-core needs no other page; the appendix is for reference."""
    links = re.findall(r"\]\(([^)#]+\.md)[^)]*\)", "\n".join(one.lines))
    targets = {
        relative((one.path.parent / link).resolve()) for link in links
    }  # fmt: skip
    core = {relative(core.path) for core in core_pages()}

    assert not [
        target
        for target in targets - core
        if not target.startswith("appendix/") and target not in REFERENCE
    ]


def test_the_features_of_the_table_are_those_of_the_code():
    rows = [row for row in table("01-profiles.md", "Feature") if row[1].startswith("reader")]
    listed = {
        name.strip("` "): row[2] for row in rows for name in row[0].split(",")
    }  # fmt: skip

    assert listed.keys() == READER_FEATURES
    for feature, profile in listed.items():
        assert reader_profiles([feature]) == ("R-core", profile)


def test_the_classes_of_the_core_are_those_of_the_code():
    """REQ-ERR-003: the table of page 70, and the suite's judge, sort codes as the package does."""
    listed = {
        row[0].strip("`"): frozenset(re.findall(r"`([A-Z_]+)`", row[1]))
        for row in table("70-open-and-read.md", "Class")
    }
    of_core = {code for one in core_pages() for clause in one.clauses for code in clause.codes}

    assert listed["NotFoundError"] == NOT_FOUND
    assert listed["IntegrityError"] == INTEGRITY
    assert listed["UnsupportedError"] == UNSUPPORTED
    for name, codes in listed.items():
        assert all(Code[code].error.__name__ == name for code in codes)
    others = of_core - NOT_FOUND - INTEGRITY - UNSUPPORTED
    assert not [
        code
        for code in others
        if issubclass(Code[code].error, (IntegrityError, UnsupportedError))
        and code != "FILES_IN_CACHES"
    ]


def test_each_case_names_the_profiles_that_it_needs():
    known = READERS | WRITERS | companions().keys()
    found = {name: case.profiles for name, case in cases_by_id().items() if not is_kept(case.spec)}
    for name, profiles in found.items():
        assert profiles, name
        assert set(profiles) <= known, name
        # R-core goes without saying: every other profile of readers needs it.
        assert "R-core" not in profiles or profiles == ("R-core",), name

    assert {name for profiles in found.values() for name in profiles} >= READERS | {"W-core"}


@pytest.mark.parametrize(
    ("change", "profiles"),
    [
        ({}, ["R-core"]),
        ({"features": ["deltas", "planes"]}, ["R-delta"]),
        ({"features": ["adam", "deltas", "labels"]}, ["R-delta", "labels", "prediction"]),
        ({"features": ["launch"]}, ["R-run"]),
        ({"files": {"run.json": b"", "launches/0001.json": b""}}, ["R-run"]),
        ({"kind": "write"}, ["W-core"]),
        (
            {
                "expect": {"outcome": "reject", "error": "SHARD_MISMATCH", "phase": "validate"},
                "requirements": ["REQ-SHD-010"],
            },
            ["R-validate"],
        ),
        (
            {
                "expect": {"outcome": "reject", "error": "DOC_DIGEST", "phase": "open"},
                "requirements": ["REQ-DOC-009"],
            },
            ["R-core"],
        ),
    ],
)
def test_profiles_follow_from_what_a_case_asks(change, profiles):
    members = {
        "kind": "open",
        "features": [],
        "path": ".",
        "requirements": ["REQ-OPN-005"],
        "expect": {"outcome": "accept"},
        "files": {"manifest.json": b""},
    }

    assert profiles_of_case(members | change) == profiles
