"""A server of S3 for every test that asks for one, and an empty bucket on it.

moto serves, unless the environment variable CKPTFMT_TEST_S3 is ``ceph``, as `make test-s3` sets it.
"""

import dataclasses
import os
from collections.abc import Iterator
from typing import Any

import pytest

from ckptfmt_tools.demo.servers import Endpoint, Server
from tests.s3.proxy import Proxy

KIND = os.environ.get("CKPTFMT_TEST_S3", "moto")


@dataclasses.dataclass(frozen=True)
class Bucket:
    """A bucket on a server."""

    endpoint: Endpoint
    name: str

    def through(self, proxy: Proxy) -> "Bucket":
        """Return the same bucket, seen through a proxy."""
        return Bucket(proxy.endpoint, self.name)

    def store(self, prefix: str = "", **options: Any) -> Any:
        """Return obstore's own store of it."""
        import obstore.store  # noqa: PLC0415

        return obstore.store.S3Store(
            self.name, prefix=prefix or None, **self.endpoint.options, **options
        )

    def names(self, prefix: str = "") -> list[str]:
        """Return the keys of all objects below a prefix, without it."""
        return [
            entry["path"].removeprefix(f"{prefix}/")
            for page in self.store().list(prefix or None)
            for entry in page
        ]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is marked `ceph` where another server is used."""
    if KIND == "ceph":
        return
    left_out = [item for item in items if item.get_closest_marker("ceph")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("ceph")]


@pytest.fixture(scope="session")
def s3_server() -> Iterator[Endpoint]:
    """Start the server that this session asks for; see the module."""
    with Server(KIND) as server:
        yield server.endpoint


@pytest.fixture
def s3_bucket(s3_server: Endpoint) -> Bucket:
    """Make an empty bucket."""
    return Bucket(s3_server, s3_server.make_bucket())


@pytest.fixture
def s3_proxy(s3_server: Endpoint) -> Iterator[Proxy]:
    """Start a proxy before the server."""
    with Proxy(s3_server) as proxy:
        yield proxy
