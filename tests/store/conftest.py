"""A directory in memory, and a bucket of a server of S3 that runs in this process."""

import logging
import pathlib
import secrets
import tempfile
import threading
from typing import NamedTuple

import boto3
import pytest
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

from tests.store.helpers import FAST_DIRECTORY


@pytest.fixture
def fast_path():
    with tempfile.TemporaryDirectory(dir=FAST_DIRECTORY, prefix="ckptfmt-test-") as path:
        yield pathlib.Path(path)


class Bucket(NamedTuple):
    """A new bucket of a server of S3: its URL, and where the server answers."""

    url: str
    endpoint: str


@pytest.fixture(scope="session")
def s3_endpoint():
    logging.getLogger("werkzeug").disabled = True
    moto, one_at_a_time = DomainDispatcherApplication(create_backend_app), threading.Lock()

    def answer(*request):
        # Of two conditional puts at once moto takes both.
        with one_at_a_time:
            return moto(*request)

    server = make_server("127.0.0.1", 0, answer, threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.fixture
def bucket(s3_endpoint, monkeypatch):
    for name, value in {
        "ACCESS_KEY_ID": "a",
        "SECRET_ACCESS_KEY": "hush",
        "ENDPOINT_URL": s3_endpoint,
        "ALLOW_HTTP": "true",
        "REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    name = f"test-{secrets.token_hex(8)}"
    boto3.client("s3", endpoint_url=s3_endpoint, region_name="us-east-1").create_bucket(Bucket=name)
    return Bucket(f"s3://{name}", s3_endpoint)
