"""Profiles of the specification (spec/01-profiles.md): of pages, of features, and of cases."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any

from conformance.generate.clauses import ROOT, read_clauses

__all__ = ["CORE", "companions", "page_profiles", "profiles_of_case"]

CORE = "R-core"

_PAGE = ROOT / "spec" / "01-profiles.md"
_ROW = re.compile(r"\| \[[^\]]+\]\(([^)]+)\) \| ([RW]-[a-z]+) \| ([RW]-[a-z]+) \|")
_COMPANION = re.compile(r"\| \[([a-z]+)\]\(([^)]+)\) \| (stable|experimental) \| .+ \|")
_FEATURE = re.compile(r"\| (`[^|]+`) \| reader, [^|]+ \| ([A-Za-z-]+) \| .+ \|")
#: Requests among the features of a case, and the profiles of their answers.
_REQUESTS = {
    "launch": "R-run",
    "samples": "R-context",
    "tickets": "pipelines",
    "loader": "loaders",
}


def _lines() -> list[str]:
    return _PAGE.read_text("utf-8").splitlines()


@functools.cache
def page_profiles() -> dict[str, tuple[str, str]]:
    """Return the profiles of readers and of writers by page; for a companion, its name twice."""
    found = {match[1]: (match[2], match[3]) for line in _lines() if (match := _ROW.fullmatch(line))}
    return found | {page: (name, name) for name, (page, _) in companions().items()}


@functools.cache
def companions() -> dict[str, tuple[str, str]]:
    """Return the page and the status of each companion, by name."""
    matches = (_COMPANION.fullmatch(line) for line in _lines())
    return {match[1]: (match[2], match[3]) for match in matches if match}


@functools.cache
def _feature_profiles() -> dict[str, str]:
    matches = (_FEATURE.fullmatch(line) for line in _lines())
    return {
        name.strip("` "): match[2] for match in matches if match for name in match[1].split(",")
    }


@functools.cache
def _clause_profiles() -> dict[str, str]:
    """Return the profile of readers of each clause's page, by label."""
    return {clause.label: page_profiles()[clause.page][0] for clause in read_clauses()}


def profiles_of_case(members: Mapping[str, Any], page: str = "") -> list[str]:
    """Return the needed profiles of an implementation for a case, sorted; R-core if no other.

    Args:
        members: the members of the case.
        page: the page of a case of the kind `parse`, below `spec/`.
    """
    if members["kind"] == "write":
        return ["W-core"]
    known = _feature_profiles() | _REQUESTS
    found = {known[name] for name in members["features"] if name in known}
    if page:
        found.add(page_profiles()[page][0])
    if members["expect"]["outcome"] == "reject":
        found.add(_clause_profiles()[members["requirements"][0]])
        if members["expect"]["phase"] == "validate":
            found.add("R-validate")
    if _is_run(members) or _is_form_of_an_ending(members):
        found.add("R-run")
    return sorted(found - {CORE}) or [CORE]


def _is_form_of_an_ending(members: Mapping[str, Any]) -> bool:
    """Return whether the register is an abort record or tombstone of another form."""
    register = members["files"].get("manifest.json", b"")
    is_ending = b'"type":"abort"' in register or b'"type":"tombstone"' in register
    return is_ending and members["expect"].get("error") == "DOC_SCHEMA"


def _is_run(members: Mapping[str, Any]) -> bool:
    """Return whether the opened path is a run."""
    place = "" if members["path"] == "." else f"{members['path']}/"
    files = members["files"]
    is_checkpoint = f"{place}manifest.json" in files
    return not is_checkpoint and any(
        path.startswith((f"{place}launches/", f"{place}run.json", f"{place}step-"))
        for path in files
    )
