"""The suite under pytest: one test per case.

``pytest -p ckptfmt_conformance.plugin --pyargs ckptfmt_conformance --adapter ...``, or without the
plugin's options ``CKPTFMT_ADAPTER=... pytest --pyargs ckptfmt_conformance``.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptfmt_conformance import cells
from ckptfmt_conformance.__main__ import read_xfails
from ckptfmt_conformance.callers import Caller, describe, find_target, open_described
from ckptfmt_conformance.cases import Case, load_cases, select_cases, vectors_root
from ckptfmt_conformance.errors import SuiteError
from ckptfmt_conformance.judge import Status
from ckptfmt_conformance.protocol import Description
from ckptfmt_conformance.runner import TIMEOUT_S, ask_case
from ckptfmt_conformance.xfails import Xfails


def _option(config: pytest.Config, name: str, default: Any = None) -> Any:
    return config.getoption(name, default=default) or default


def _adapter(config: pytest.Config) -> str:
    adapter = _option(config, "--adapter") or os.environ.get("CKPTFMT_ADAPTER")
    if not adapter:
        raise pytest.UsageError(
            "which adapter? Give `-p ckptfmt_conformance.plugin --adapter ADAPTER`, or set"
            " CKPTFMT_ADAPTER."
        )
    return str(adapter)


def _cases(config: pytest.Config) -> tuple[Case, ...]:
    with contextlib.closing(find_target(_adapter(config)).open()) as caller:
        description = describe(caller)
    root = _option(config, "--vectors")
    kinds = _option(config, "--kind", [])
    cases = load_cases(Path(root) if root else vectors_root())
    patterns = _option(config, "--filter", [])
    # Listing trajectories imports a framework.
    if "trajectory" in (kinds or description.kinds) and not root:
        cases += cells.find_cases(patterns)
    return select_cases(cases, patterns=patterns, kinds=kinds)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Create a test for each case."""
    if "case" in metafunc.fixturenames:
        try:
            cases = _cases(metafunc.config)
        except SuiteError as error:
            raise pytest.UsageError(f"{error.detail} {error.remedy}") from error
        metafunc.parametrize("case", [pytest.param(case, id=case.id) for case in cases])


@pytest.fixture(scope="session")
def asked(pytestconfig: pytest.Config) -> Iterator[tuple[Caller, Description, Xfails]]:
    """Start the adapter once for all cases."""
    target = find_target(_adapter(pytestconfig))
    xfails = _option(pytestconfig, "--xfails")
    with open_described(target) as (caller, description):
        yield caller, description, read_xfails(target, Path(xfails) if xfails else None)


def test_case(
    case: Case, asked: tuple[Caller, Description, Xfails], pytestconfig: pytest.Config
) -> None:
    """Ask one case."""
    caller, description, xfails = asked
    timeout_s = float(_option(pytestconfig, "--case-timeout", TIMEOUT_S))
    verdict = xfails.apply(case.id, ask_case(caller, case, description, timeout_s))
    if verdict.status in (Status.SKIPPED, Status.UNSUPPORTED):
        pytest.skip(f"{verdict.status}: {verdict.message}")
    if verdict.status is Status.XFAIL:
        pytest.xfail(verdict.message)
    if verdict.status is not Status.PASS:
        clauses = ", ".join(case.requirements)
        pytest.fail(
            f"{verdict.status}: {verdict.message}\n{clauses}: {case.description}\n{case.why}",
            pytrace=False,
        )
