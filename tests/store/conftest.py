"""A directory in memory, where fsync costs nothing and which is a second kind of file system besides."""

import os
import pathlib
import tempfile

import pytest


@pytest.fixture
def fast_path(tmp_path):
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="ckptfmt-test-") as path:
        yield pathlib.Path(path)
