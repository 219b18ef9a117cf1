"""Syntax trees of all modules live as long as the tests of one file, since each collection of garbage visits them."""

from collections.abc import Iterator

import pytest

from tests.house.sources import parse


@pytest.fixture(scope="module", autouse=True)
def _trees() -> Iterator[None]:
    yield
    parse.cache_clear()
