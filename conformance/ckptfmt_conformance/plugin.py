"""Options of the suite for pytest.

Use: ``pytest -p ckptfmt_conformance.plugin --pyargs ckptfmt_conformance --adapter ADAPTER``.

The plugin is named on the command line, and isn't an entry point: with an entry point, pytest
would rewrite every module of ckptfmt in every project with ckptfmt installed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

__all__ = ["pytest_addoption"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the suite."""
    group = parser.getgroup("ckptfmt conformance")
    group.addoption(
        "--adapter", metavar="ADAPTER", help="`reference`, package.module:Class, or a command line"
    )
    group.addoption(
        "--filter", action="append", default=[], metavar="GLOB", help="only cases whose id fits"
    )
    group.addoption(
        "--kind", action="append", default=[], metavar="KIND", help="only cases of this kind"
    )
    group.addoption(
        "--case-timeout", type=float, default=None, metavar="S", help="seconds for each case"
    )
    group.addoption(
        "--xfails",
        metavar="FILE",
        help="list of expected failures, if not the one beside the adapter",
    )
    group.addoption("--vectors", metavar="DIR", help="other vectors than those of the suite")
