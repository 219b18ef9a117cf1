"""A directory in memory."""

import pathlib
import tempfile

import pytest

from tests.store.helpers import FAST_DIRECTORY


@pytest.fixture
def fast_path():
    with tempfile.TemporaryDirectory(dir=FAST_DIRECTORY, prefix="ckptfmt-test-") as path:
        yield pathlib.Path(path)
