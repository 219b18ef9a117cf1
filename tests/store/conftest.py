"""A directory in memory, and a bucket that the environment tells how to reach."""

import pathlib
import tempfile
from typing import NamedTuple

import pytest

from ckptfmt_tools.demo.servers import Endpoint
from tests.store.helpers import FAST_DIRECTORY


@pytest.fixture
def fast_path():
    with tempfile.TemporaryDirectory(dir=FAST_DIRECTORY, prefix="ckptfmt-test-") as path:
        yield pathlib.Path(path)


class Bucket(NamedTuple):
    """An empty bucket: its URL, and the server."""

    url: str
    server: Endpoint


@pytest.fixture
def bucket(s3_bucket, monkeypatch):
    for name, value in s3_bucket.endpoint.environment.items():
        monkeypatch.setenv(name, value)
    return Bucket(f"s3://{s3_bucket.name}", s3_bucket.endpoint)
