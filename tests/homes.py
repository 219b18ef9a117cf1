"""The kinds of place where checkpoints have their home, and a fixture that asks each of them what a test asks."""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, Final

import pytest

from ckptfmt.store import LocalStore, MemoryStore, ObjectStore
from ckptfmt.store.protocol import Store, call_each
from ckptfmt_tools.demo.servers import Endpoint
from tests.s3 import fixtures

KINDS: Final = ("memory", "local", "s3")


class Home:
    """A kind of place, and as many empty places of that kind as a test wants.

    Attributes:
        kind: one of `KINDS`; ``s3`` is the server that the session asks for.
    """

    def __init__(
        self, kind: str, make: Callable[[str], Store], name: Callable[[str], Any] | None = None
    ) -> None:
        self.kind = kind
        self._make = make
        self._name = make if name is None else name
        self._numbers = itertools.count(1)

    def store(self, files: Mapping[str, bytes] | None = None) -> Any:
        """Return a store of its own, which holds `files`."""
        store = self._make(f"home{next(self._numbers)}")
        call_each(store, lambda file: store.create(file[0], [file[1]]), (files or {}).items())
        return store

    def path(self) -> Any:
        """Return an empty place as a user says it: a path, a URL, or a store in memory."""
        return self._name(f"home{next(self._numbers)}")


def files_of(store: Store) -> dict[str, bytes]:
    """Return all files of a store, by their paths."""
    paths = store.list("")
    return dict(
        zip(
            paths,
            call_each(store, lambda path: store.read(path, limit_nbytes=1 << 30), paths),
            strict=True,
        )
    )


def find(store: Store, beginning: str) -> str:
    """Return the only path that begins so."""
    (path,) = [
        path for path in store.list(beginning.rpartition("/")[0]) if path.startswith(beginning)
    ]
    return path


def damage(store: Store, beginning: str, edit: Callable[[bytes], bytes] | None = None) -> bytes:
    """Change the only file that begins so, by a bit of its last byte unless `edit` says how; return it as it was."""
    path = find(store, beginning)
    content = store.read(path, limit_nbytes=1 << 30)
    store.replace(path, content[:-1] + bytes([content[-1] ^ 1]) if edit is None else edit(content))
    return content


@pytest.fixture(scope="session")
def _s3_home(s3_server: Endpoint) -> ObjectStore:
    """Make a bucket that all tests of a session share; each takes prefixes of its own."""
    options = s3_server.options
    client_options = options.pop("client_options")
    url = f"s3://{s3_server.make_bucket()}"
    return ObjectStore(url, writable=True, config=options, client_options=client_options)


_S3_NUMBERS: Final = itertools.count(1)


@pytest.fixture(params=KINDS)
def home(
    request: pytest.FixtureRequest, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> Home:
    """Return a kind of place: the test runs once for each."""
    if request.param == "memory":
        return Home("memory", lambda _: MemoryStore())
    if request.param == "local":
        return Home(
            "local",
            lambda name: LocalStore(tmp_path / name, writable=True),
            lambda name: tmp_path / name,
        )
    endpoint: Endpoint = request.getfixturevalue("s3_server")
    for name, value in endpoint.environment.items():
        monkeypatch.setenv(name, value)
    bucket: ObjectStore = request.getfixturevalue("_s3_home")
    prefix = f"test{next(_S3_NUMBERS)}"
    return Home(
        "s3",
        lambda name: bucket.at(f"{prefix}/{name}"),
        lambda name: f"{bucket.name}/{prefix}/{name}",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Ask either moto and the other kinds, but not what is marked `long_on_s3`; or Ceph, all, and nothing else."""
    if fixtures.KIND == "ceph":
        left_out = [item for item in items if not _asks_s3(item)]
    else:
        left_out = [
            item
            for item in items
            if kind_of(item) == "s3" and item.get_closest_marker("long_on_s3")
        ]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


#: For tests that hand the name of a place to somebody else: a store in memory has none.
named_homes: Final = pytest.mark.parametrize("home", ["local", "s3"], indirect=True)


def _asks_s3(item: pytest.Item) -> bool:
    parameters = getattr(item, "callspec", None)
    asked = (
        set()
        if parameters is None
        else {one for one in parameters.params.values() if isinstance(one, str)}
    )
    return (
        "s3" in asked
        or "s3_server" in getattr(item, "fixturenames", ())
        or item.path.parent.name == "s3"
    )


def kind_of(item: pytest.Item) -> str | None:
    """Return the kind of place that a test asks; None if it doesn't take the fixture."""
    callspec = getattr(item, "callspec", None)
    return None if callspec is None else callspec.params.get("home")
