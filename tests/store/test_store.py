"""`open_store`: what a caller may pass."""

import pathlib

import pytest

from ckptfmt.errors import Code
from ckptfmt.store import LocalStore, MemoryStore, open_store
from tests.store.helpers import code_of


def test_a_path_is_a_directory(tmp_path):
    for path in (tmp_path / "a", str(tmp_path / "b")):
        store = open_store(path, writable=True)
        assert isinstance(store, LocalStore)
        assert store.name == str(path)


def test_a_store_is_itself():
    store = MemoryStore()

    assert open_store(store, writable=True) is store


def test_opening_for_reading_makes_nothing(tmp_path):
    assert open_store(tmp_path / "a", writable=False).list("") == []
    assert not (tmp_path / "a").exists()


def test_a_relative_path_stays_where_it_was_opened(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = open_store("a", writable=True)
    monkeypatch.chdir("/")
    store.create("b", [])

    assert (tmp_path / "a" / "b").exists()


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("ftp://bucket/run", Code.STORE_UNSUPPORTED),
        (pathlib.Path("s3://bucket/run"), Code.ARGUMENT),
        ("", Code.ARGUMENT),
    ],
)
def test_what_is_no_path_is_refused(path, code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    assert code_of(lambda: open_store(path, writable=True)) == code
    assert list(tmp_path.iterdir()) == []
